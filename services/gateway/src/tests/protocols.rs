//! The protocols besides gRPC, as plain HTTP clients see them.

mod audit;
mod connect;
mod examples;
mod files;
mod grpc;
mod guard;
mod operator;
mod rest;
mod web;

use std::io::Write as _;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::harness::*;

/// An HTTP/1.1 client, like `curl`.
pub(super) fn http() -> reqwest::Client {
    // Fails if another test of this process has done it.
    _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().http1_only().no_gzip().no_proxy().build().expect("a client")
}

/// An HTTP/2 client with prior knowledge.
fn http2() -> reqwest::Client {
    _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .http2_prior_knowledge()
        .no_gzip()
        .no_proxy()
        .build()
        .expect("a client")
}

impl Gateway {
    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Sends these bytes and reads until the server closes the connection.
    async fn send_raw(&self, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).await.expect("it listens");
        stream.write_all(request).await.expect("it reads");
        let mut answer = Vec::new();
        wait_for("the server closes the connection", stream.read_to_end(&mut answer))
            .await
            .expect("it answers");
        String::from_utf8_lossy(&answer).into_owned()
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(bytes).expect("to memory");
    packed.finish().expect("to memory")
}

fn task_json() -> Value {
    json!({"spec": {"agent": "ada", "workspace": "/work", "title": "over the wire"}})
}
