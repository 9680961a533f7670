//! Lists, health and reflection of the gateway.

use construct_proto::v1::{self, MessageSource, TaskPhase};
use construct_tests::{client::id, http, mesh::Mesh, transcript};
use serde_json::json;
use tonic::{Code, Response};

#[tokio::test]
async fn lists_are_filtered_ordered_and_paged() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"conversations": [{"match": "", "turns": [{"code": "1"}, {"text": "said {{last_user_text}}"}]}]});
    mesh.scripted_agent("one", &script).await.unwrap();
    let other = mesh.scripted_agent("other", &script).await.unwrap();
    let client = mesh.client().unwrap();
    let begin = async |agent: &str, workspace: &str| {
        let spec = v1::TaskSpec {
            agent: agent.into(),
            workspace: workspace.into(),
            title: "t".into(),
            ..v1::TaskSpec::default()
        };
        client.create_task_with(spec).await.unwrap()
    };
    let mut made = Vec::new();
    for n in 0..7 {
        let agent = if n < 5 { "one" } else { "other" };
        let workspace = if n % 2 == 0 { "/even" } else { "/odd" };
        made.push(begin(agent, workspace).await);
    }
    let ids: Vec<String> = made.iter().map(|conversation| conversation.id().to_owned()).collect();
    made[3].suspend().await;
    made[3].wait_for_phase(TaskPhase::Suspended).await;

    let list = async |filter: v1::list_tasks_request::Filter, order_by: &str, page_size: i32| {
        let (mut found, mut page_token) = (Vec::new(), String::new());
        loop {
            let page = v1::PageRequest { page_size, page_token, order_by: order_by.into() };
            let request = v1::ListTasksRequest { page: Some(page), filter: Some(filter.clone()) };
            let response = client.tasks().list_tasks(request).await.map(Response::into_inner)?;
            assert!(response.tasks.len() <= usize::try_from(page_size).unwrap());
            found.extend(response.tasks.iter().map(|task| id(task.metadata.as_ref())));
            page_token = response.page.unwrap_or_default().next_page_token;
            if page_token.is_empty() {
                return Ok::<_, tonic::Status>(found);
            }
        }
    };
    let any = v1::list_tasks_request::Filter::default();
    let newest_first: Vec<String> = ids.iter().rev().cloned().collect();
    for size in [1, 2, 7, 100] {
        assert_eq!(list(any.clone(), "created_at", size).await.unwrap(), ids, "{size}");
        assert_eq!(list(any.clone(), "", size).await.unwrap(), newest_first, "{size}");
    }
    assert_eq!(
        list(any.clone(), "updated_at desc", 3).await.unwrap()[0],
        ids[3],
        "the suspended one changed last"
    );
    let filter = |change: fn(&mut v1::list_tasks_request::Filter)| {
        let mut filter = v1::list_tasks_request::Filter::default();
        change(&mut filter);
        filter
    };
    assert_eq!(
        list(filter(|filter| filter.agent = "other".into()), "created_at", 1).await.unwrap(),
        ids[5..]
    );
    let by_id =
        v1::list_tasks_request::Filter { agent: id(other.metadata.as_ref()), ..any.clone() };
    assert_eq!(
        list(by_id, "created_at", 1).await.unwrap(),
        ids[5..],
        "ids are accepted where names are"
    );
    let nobody = list(filter(|filter| filter.agent = "nobody".into()), "", 1).await;
    assert!(
        nobody.as_ref().map_or_else(|status| status.code() == Code::NotFound, Vec::is_empty),
        "{nobody:?}"
    );
    let suspended = filter(|filter| filter.phase = TaskPhase::Suspended.into());
    assert_eq!(list(suspended, "", 2).await.unwrap(), ids[3..4]);
    let odd = filter(|filter| filter.workspace = "/odd".into());
    assert_eq!(
        list(odd, "created_at", 2).await.unwrap(),
        [ids[1].clone(), ids[3].clone(), ids[5].clone()]
    );
    let third = made[3].task().await.unwrap().metadata.unwrap().created_at;
    let later = v1::list_tasks_request::Filter { created_after: third, ..any.clone() };
    assert_eq!(list(later, "created_at", 2).await.unwrap(), ids[4..]);
    let earlier = v1::list_tasks_request::Filter { created_before: third, ..any.clone() };
    assert_eq!(list(earlier, "created_at", 2).await.unwrap(), ids[..3]);

    // Messages: by position, by author, from a position on.
    let conversation = client.create_task("one", None).await.unwrap();
    for text in ["a", "b", "c"] {
        conversation.ask(text).await;
    }
    let list = async |filter: v1::list_messages_request::Filter, order_by: &str, page_size: i32| {
        let (mut found, mut page_token) = (Vec::new(), String::new());
        loop {
            let page = v1::PageRequest { page_size, page_token, order_by: order_by.into() };
            let task = conversation.id().to_owned();
            let request = v1::ListMessagesRequest { task, page: Some(page), filter: Some(filter) };
            let response = client.messages().list_messages(request).await.unwrap().into_inner();
            found.extend(
                response.messages.iter().map(|message| transcript::status(message).position),
            );
            page_token = response.page.unwrap_or_default().next_page_token;
            if page_token.is_empty() {
                return found;
            }
        }
    };
    let any = v1::list_messages_request::Filter::default();
    let up: Vec<i64> = (1..=12).collect();
    let down: Vec<i64> = (1..=12).rev().collect();
    for size in [1, 5, 12, 100] {
        assert_eq!(list(any, "", size).await, up);
        assert_eq!(list(any, "position desc", size).await, down);
    }
    let users = v1::list_messages_request::Filter {
        source: MessageSource::User.into(),
        ..Default::default()
    };
    assert_eq!(list(users, "", 2).await, [1, 5, 9]);
    let rest = v1::list_messages_request::Filter {
        source: MessageSource::Assistant.into(),
        after_position: 6,
        ..Default::default()
    };
    assert_eq!(list(rest, "position desc", 1).await, [12, 10, 8]);
}

#[tokio::test]
async fn gateway_serves_health_and_reflection() {
    let mesh = Mesh::start().await.unwrap();
    let client = http::client().http2_prior_knowledge().build().unwrap();
    let post = async |path: &str, body: &'static [u8]| {
        let request = client.post(format!("{}/{path}", mesh.gateway_url()));
        let response = request
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(body)
            .send()
            .await;
        response.unwrap().bytes().await.unwrap()
    };
    // A frame with an empty request; the answer is a frame with `status: SERVING`.
    let health = post("grpc.health.v1.Health/Check", &[0, 0, 0, 0, 0]).await;
    assert_eq!(health.as_ref(), [0, 0, 0, 0, 2, 8, 1]);
    // `list_services: ""`.
    let services =
        post("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", &[0, 0, 0, 0, 2, 0x3A, 0])
            .await;
    let services = String::from_utf8_lossy(&services);
    for name in ["Agent", "Event", "Message", "Model", "ModelProvider", "Task"] {
        assert!(
            services.contains(&format!("construct.v1.{name}Service")),
            "{name} is not in {services:?}"
        );
    }
}
