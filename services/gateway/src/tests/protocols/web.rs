//! gRPC-Web.

use construct_proto::v1;
use prost::Message as _;

use super::*;

#[tokio::test]
async fn grpc_web_works_over_both_http_versions() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let message = v1::GetTaskRequest { task: task.clone() }.encode_to_vec();
    let length = u32::try_from(message.len()).expect("it is small");
    let body = [&[0][..], &length.to_be_bytes(), &message].concat();
    for client in [http(), http2()] {
        let response = client
            .post(gateway.url("/construct.v1.TaskService/GetTask"))
            .header("content-type", "application/grpc-web+proto")
            .header("x-grpc-web", "1")
            .body(body.clone())
            .send()
            .await
            .expect("it answers");
        assert_eq!(response.headers()["content-type"], "application/grpc-web+proto");
        let bytes = response.bytes().await.expect("a body");
        let length = u32::from_be_bytes(bytes[1..5].try_into().expect("four bytes")) as usize;
        let found = v1::Task::decode(&bytes[5..5 + length]).expect("a task");
        assert_eq!(id(found.metadata), task);
        let trailers = &bytes[5 + length..];
        assert_eq!(trailers[0], 0x80, "trailers follow");
        assert!(String::from_utf8_lossy(&trailers[5..]).contains("grpc-status:0"), "{trailers:?}");
    }
}
