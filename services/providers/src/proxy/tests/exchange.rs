//! Requests and answers through the proxy.

use std::time::Duration;

use construct_proto::mesh::v1::{CancelStep, FailureClass};
use construct_tests::vendor::{Reply, anthropic, openai};
use futures::{StreamExt as _, stream};
use serde_json::{Value, json};

use super::{Limits, Proxy, client::Client, name};
use crate::tests::{
    until,
    wires::{ANSWER_TEXT, CODE, KEY, PROOF, THINKING_TEXT, Wire},
};

async fn ask(proxy: &Proxy, client: Client, body: &Value) -> (u16, String) {
    let response = proxy.post(client.path()).json(body).send().await.expect("the proxy answers");
    (response.status().as_u16(), response.text().await.expect("a body"))
}

#[tokio::test]
async fn every_client_protocol_works_with_every_vendor() {
    let proxy = Proxy::start().await;
    for wire in Wire::ALL {
        let (stream, used) = wire.rich_answer();
        for client in Client::ALL {
            let mut answers = Vec::new();
            for streamed in [false, true] {
                proxy.vendor.reply(wire.reply(&stream).dripping(700, Duration::ZERO));
                let (status, body) =
                    ask(&proxy, client, &client.question(&name(wire), streamed)).await;
                assert_eq!(status, 200, "{wire:?} {client:?}: {body}");
                let read = if streamed {
                    client.streamed(&body)
                } else {
                    client.assemble(&serde_json::from_str(&body).expect("JSON"))
                };
                assert_eq!(
                    (read.text.as_str(), read.thought.as_str()),
                    (ANSWER_TEXT, THINKING_TEXT),
                    "{wire:?} {client:?}"
                );
                let [(id, tool, arguments)] = &read.calls[..] else {
                    panic!("{wire:?} {client:?}: {read:?}")
                };
                assert!(!id.is_empty());
                assert_eq!(
                    (tool.as_str(), arguments),
                    ("code_interpreter", &json!({"code": CODE}))
                );
                let stop = match client {
                    Client::Chat => "tool_calls",
                    Client::Responses => "completed",
                    Client::Messages => "tool_use",
                };
                assert_eq!(read.stop, stop);
                let total_input_tokens =
                    used.input_tokens + used.cache_read_tokens + used.cache_write_tokens;
                assert_eq!(
                    read.usage,
                    (total_input_tokens, used.cache_read_tokens, used.output_tokens),
                    "{wire:?} {client:?}"
                );
                answers.push(read);
            }
            // Sent back with the result of the call, the vendor receives the same as in a direct
            // conversation.
            proxy.vendor.reply(wire.reply(&wire.answer("It is 7.")));
            let question = client.went_on(client.question(&name(wire), false), &answers[1]);
            let (status, body) = ask(&proxy, client, &question).await;
            assert_eq!(status, 200, "{wire:?} {client:?}: {body}");
            assert_eq!(
                client.assemble(&serde_json::from_str(&body).expect("JSON")).text,
                "It is 7."
            );
            let sent = proxy.vendor.requests().last().expect("a request").body.to_string();
            assert!(
                sent.contains("it gave 7") && sent.contains("code_interpreter"),
                "{wire:?} {client:?}: {sent}"
            );
            // Chat Completions has no field for the proof of thinking, so the vendor gets what
            // plain text allows.
            let sent_back = wire
                .thought_sent_back()
                .filter(|thought| client != Client::Chat || *thought == THINKING_TEXT);
            match sent_back {
                Some(thought) => assert!(sent.contains(thought), "{wire:?} {client:?}: {sent}"),
                None => assert!(!sent.contains(THINKING_TEXT), "{wire:?} {client:?}: {sent}"),
            }
        }
    }
}

#[tokio::test]
async fn thinking_is_not_sent_to_another_provider() {
    let proxy = Proxy::start().await;
    let (stream, _) = Wire::Anthropic.rich_answer();
    proxy.vendor.reply(Wire::Anthropic.reply(&stream));
    let client = Client::Messages;
    let (_, body) = ask(&proxy, client, &client.question("anthropic", false)).await;
    let read = client.assemble(&serde_json::from_str(&body).expect("JSON"));
    assert!(!body.contains(PROOF), "it is opaque");
    proxy.vendor.reply(openai::Answer::text("x").reply());
    let question = client.went_on(client.question("openrouter", false), &read);
    assert_eq!(ask(&proxy, client, &question).await.0, 200);
    let sent = proxy.vendor.requests().last().expect("a request").body.to_string();
    assert!(!sent.contains(PROOF) && !sent.contains(THINKING_TEXT), "{sent}");
}

#[tokio::test]
async fn images_tools_and_parameters_reach_the_vendor() {
    let proxy = Proxy::start().await;
    let image = "iVBORw0KGgo=";
    let url = format!("data:image/png;base64,{image}");
    let tool = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let bodies = [
        (
            Client::Chat,
            json!({"model": "anthropic", "temperature": 0.5, "max_tokens": 77, "stop": "END",
            "tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": false,
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": tool}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": url}}]}]}),
        ),
        (
            Client::Responses,
            json!({"model": "anthropic", "temperature": 0.5, "max_output_tokens": 77,
            "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": false,
            "tools": [{"type": "function", "name": "weather", "parameters": tool}],
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "look"},
                {"type": "input_image", "image_url": url}]}]}),
        ),
        (
            Client::Messages,
            json!({"model": "anthropic", "temperature": 0.5, "max_tokens": 77, "stop_sequences": ["END"],
            "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": true},
            "tools": [{"name": "weather", "input_schema": tool}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "look"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}}]}]}),
        ),
    ];
    for (client, body) in bodies {
        proxy.vendor.reply(anthropic::Answer::text("x").reply());
        let (status, answer) = ask(&proxy, client, &body).await;
        assert_eq!(status, 200, "{client:?}: {answer}");
        let sent = proxy.vendor.requests().last().expect("a request").clone();
        assert_eq!(sent.header("x-api-key"), KEY);
        let sent = sent.body;
        assert_eq!(
            (&sent["temperature"], &sent["max_tokens"]),
            (&json!(0.5), &json!(77)),
            "{client:?}"
        );
        assert_eq!(sent["tools"][0]["name"], "weather");
        assert_eq!(sent["tools"][0]["input_schema"], tool);
        let choice = json!({"type": "tool", "name": "weather", "disable_parallel_tool_use": true});
        assert_eq!(sent["tool_choice"], choice, "{client:?}");
        assert_eq!(sent["messages"][0]["content"][1]["source"]["data"], image);
        if client != Client::Responses {
            assert_eq!(sent["stop_sequences"], json!(["END"]));
        }
    }
}

#[tokio::test]
async fn answer_format_is_requested_in_the_vendor_format() {
    let proxy = Proxy::start().await;
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
    let body = |model: &str| {
        json!({"model": model, "messages": [{"role": "user", "content": "go"}], "response_format":
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}})
    };
    for wire in Wire::ALL {
        let path = match wire {
            Wire::OpenAi | Wire::Xai | Wire::OpenRouter => {
                Some("/response_format/json_schema/schema")
            }
            Wire::Responses => Some("/text/format/schema"),
            Wire::Gemini => Some("/generationConfig/responseJsonSchema"),
            Wire::Ollama => Some("/format"),
            // The first one only where a guarantee is requested, because it supports a subset of
            // JSON Schema.
            Wire::Anthropic | Wire::Bedrock | Wire::DeepSeek => None,
        };
        proxy.vendor.reply(wire.reply(&wire.answer("{\"n\": 1}")));
        assert_eq!(ask(&proxy, Client::Chat, &body(&name(wire))).await.0, 200);
        let sent = proxy.vendor.requests().last().expect("a request").body.clone();
        match path {
            Some(path) => assert_eq!(sent.pointer(path), Some(&schema), "{wire:?}: {sent}"),
            None => assert!(sent.to_string().contains("JSON Schema"), "{wire:?}: {sent}"),
        }
        let native = wire == Wire::DeepSeek;
        assert_eq!(
            sent.pointer("/response_format/type") == Some(&json!("json_object")),
            native,
            "{wire:?}: {sent}"
        );
    }
}

#[tokio::test]
async fn failure_has_the_form_and_status_of_the_client_protocol() {
    let wire = Wire::OpenAi;
    for (status, class, seen, kinds) in [
        (
            400,
            FailureClass::InvalidRequest,
            400,
            ["invalid_request_error", "invalid_request_error"],
        ),
        (
            400,
            FailureClass::ContextTooLong,
            400,
            ["invalid_request_error", "invalid_request_error"],
        ),
        (401, FailureClass::Authentication, 502, ["server_error", "api_error"]),
        (429, FailureClass::RateLimited, 429, ["rate_limit_error", "rate_limit_error"]),
        (500, FailureClass::Transient, 502, ["server_error", "api_error"]),
        (529, FailureClass::Overloaded, 503, ["server_error", "overloaded_error"]),
    ] {
        for client in Client::ALL {
            for streamed in [false, true] {
                // A proxy each, because refused keys and failures are remembered.
                let proxy = Proxy::start().await;
                for _ in 0..3 {
                    proxy.vendor.reply(wire.error(status, class).header("retry-after", "600"));
                }
                let response = proxy
                    .post(client.path())
                    .json(&client.question("openai", streamed))
                    .send()
                    .await
                    .expect("an answer");
                let own = if client == Client::Messages && seen == 503 { 529 } else { seen };
                assert_eq!(response.status().as_u16(), own, "{client:?} {class:?}");
                let header = |name: &str| {
                    response.headers().get(name).map(|value| value.to_str().unwrap().to_owned())
                };
                let again = matches!(class, FailureClass::RateLimited | FailureClass::Overloaded);
                assert_eq!(
                    header("x-should-retry").as_deref(),
                    Some(if again { "true" } else { "false" })
                );
                if again {
                    let wait: u64 =
                        header("retry-after").expect("a time").parse().expect("seconds");
                    assert!((590..=600).contains(&wait), "{wait}");
                }
                let body: Value = response.json().await.expect("JSON");
                let (kind, message) = client.error(&body);
                assert_eq!(kind, kinds[usize::from(client == Client::Messages)], "{body}");
                assert!(!message.is_empty());
            }
        }
    }
}

#[tokio::test]
async fn failure_is_retried_before_the_answer_begins_else_reported() {
    let proxy = Proxy::start().await;
    let wire = Wire::Anthropic;
    let stream = wire.answer("The answer is 42, and that is certain.");
    for client in Client::ALL {
        proxy.vendor.reply(wire.error(500, FailureClass::Transient)).reply(wire.reply(&stream));
        let (status, body) = ask(&proxy, client, &client.question("anthropic", true)).await;
        assert_eq!(status, 200);
        assert_eq!(client.streamed(&body).text, "The answer is 42, and that is certain.");

        proxy.vendor.reply(wire.reply(&stream).broken_after(stream.len() * 2 / 3));
        let (status, body) = ask(&proxy, client, &client.question("anthropic", true)).await;
        assert_eq!(status, 200, "the answer had begun");
        let events = super::client::events(&body);
        let last = events.last().expect("an event");
        match client {
            Client::Chat => assert_eq!(last["error"]["type"], "server_error"),
            Client::Responses => assert_eq!(last["response"]["status"], "failed", "{last}"),
            Client::Messages => assert_eq!(last["error"]["type"], "api_error"),
        }
    }
    // The first of them were tried twice.
    assert_eq!(proxy.vendor.requests().len(), 9);
}

#[tokio::test]
async fn client_disconnect_closes_the_vendor_call_and_is_charged() {
    let proxy = Proxy::start().await;
    let wire = Wire::Anthropic;
    let stream = wire.answer("The answer is 42, and that is certain.");
    for (at, client) in Client::ALL.into_iter().enumerate() {
        for streamed in [true, false] {
            proxy.vendor.reply(wire.reply(&stream).silent_after(stream.len() * 2 / 3));
            let sending =
                proxy.post(client.path()).json(&client.question("anthropic", streamed)).send();
            if streamed {
                let response = sending.await.expect("it begins");
                let mut bytes = response.bytes_stream();
                bytes.next().await.expect("something").expect("bytes");
                assert_eq!(proxy.vendor.open_answers(), 1);
            } else {
                let sending = tokio::spawn(sending);
                until("the vendor to be called", async || match proxy.vendor.open_answers() {
                    0 => Err(()),
                    _ => Ok(()),
                })
                .await;
                sending.abort();
            }
            until("the connection to close", async || match proxy.vendor.open_answers() {
                0 => Ok(()),
                open => Err(open),
            })
            .await;
        }
        let reports = proxy.reports(at + 1).await;
        let usage = reports[at].usage.expect("a usage");
        assert!(usage.output_tokens > 0 && usage.cost_pico_usd > 0, "{usage:?}");
    }
}

#[tokio::test]
async fn unsupported_request_is_rejected_with_a_reason() {
    let proxy = Proxy::start().await;
    let user = json!([{"role": "user", "content": "go"}]);
    let assistant =
        json!([{"role": "user", "content": "go"}, {"role": "assistant", "content": "I"}]);
    let remote = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}]}]);
    for (client, body, words) in [
        (Client::Chat, json!({"messages": user, "n": 2}), "`n`"),
        (Client::Chat, json!({"messages": user, "logprobs": true}), "`logprobs`"),
        (Client::Chat, json!({"messages": []}), "empty"),
        (Client::Chat, json!({"messages": remote}), "data: URLs"),
        (
            Client::Chat,
            json!({"messages": user, "tools": [{"type": "custom", "custom": {}}]}),
            "custom",
        ),
        (Client::Chat, json!({"messages": user, "tool_choice": "required"}), "no tools"),
        (Client::Chat, json!({"messages": 7}), "cannot be read"),
        (
            Client::Responses,
            json!({"input": "go", "previous_response_id": "resp_1"}),
            "previous_response_id",
        ),
        (
            Client::Responses,
            json!({"input": "go", "tools": [{"type": "web_search"}]}),
            "web_search",
        ),
        (
            Client::Responses,
            json!({"input": [{"type": "item_reference", "id": "x"}]}),
            "item_reference",
        ),
        (
            Client::Messages,
            json!({"messages": assistant, "max_tokens": 1}),
            "end with a message of the user",
        ),
        (
            Client::Messages,
            json!({"messages": user, "max_tokens": 1, "mcp_servers": [{}]}),
            "mcp_servers",
        ),
    ] {
        let (status, answer) = ask(&proxy, client, &body).await;
        let (_, message) = client.error(&serde_json::from_str(&answer).expect("JSON"));
        assert_eq!(status, 400, "{client:?}: {answer}");
        assert!(message.contains(words), "{client:?}: {message}");
    }
    assert!(proxy.vendor.requests().is_empty());
    assert!(proxy.mesh(|mesh| mesh.reserved.is_empty()));
}

#[tokio::test]
async fn unknown_fields_are_accepted() {
    let proxy = Proxy::start().await;
    proxy.vendor.reply(openai::Answer::text("x").reply());
    let body = json!({"model": "openai", "messages": [{"role": "user", "content": "go", "name": "ada"}], "user": "u",
        "seed": 7, "store": true, "metadata": {"a": "b"}, "service_tier": "auto", "something_new": {"x": 1}});
    assert_eq!(ask(&proxy, Client::Chat, &body).await.0, 200);
}

#[tokio::test]
async fn request_without_valid_token_is_rejected() {
    let proxy = Proxy::start().await;
    let url = |path: &str| format!("http://{}{path}", proxy.address);
    for client in Client::ALL {
        let question = client.question("openai", false);
        let post = || proxy.http.post(url(client.path())).json(&question);
        let expired = proxy.token_of(|token| token.expires_at = jiff::Timestamp::UNIX_EPOCH);
        let narrow = proxy.token_of(|token| token.models = vec!["gemini".into(), "gone".into()]);
        let missing = client.question("gone", false);
        for (request, status) in [
            (post(), 401),
            (post().bearer_auth("sk-something"), 401),
            (post().bearer_auth(&expired), 401),
            (post().header("x-api-key", &narrow), 404),
            (proxy.http.post(url(client.path())).json(&missing).bearer_auth(&narrow), 404),
        ] {
            let response = request.send().await.expect("an answer");
            assert_eq!(response.status().as_u16(), status);
            let (kind, message) = client.error(&response.json().await.expect("JSON"));
            assert!(!kind.is_empty() && !message.is_empty());
        }
    }
    let narrow = proxy.token_of(|token| token.models = vec!["gemini".into(), "openai".into()]);
    let models: Value = proxy
        .http
        .get(url("/v1/models"))
        .bearer_auth(&narrow)
        .send()
        .await
        .expect("an answer")
        .json()
        .await
        .expect("JSON");
    let ids: Vec<&Value> =
        models["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["gemini", "openai"]);
    for (path, status) in [("/v1/models", 401), ("/v1/elsewhere", 404)] {
        assert_eq!(
            proxy.http.get(url(path)).send().await.expect("an answer").status().as_u16(),
            status
        );
    }
    assert!(proxy.vendor.requests().is_empty());
}

#[tokio::test]
async fn model_is_looked_up_once_for_many_calls() {
    let proxy = Proxy::start().await;
    for _ in 0..3 {
        proxy.vendor.reply(openai::Answer::text("x").reply());
        let (status, body) =
            ask(&proxy, Client::Chat, &Client::Chat.question("openai", false)).await;
        assert_eq!(status, 200, "{body}");
    }
    assert_eq!(proxy.mesh(|mesh| mesh.asked.len()), 1);
}

#[tokio::test]
async fn canceled_task_ends_its_calls() {
    let proxy = Proxy::start().await;
    let wire = Wire::OpenAi;
    let stream = wire.answer("It takes a while.");
    let order = |task: &str| CancelStep {
        task_id: task.into(),
        step_id: format!("step_{}", uuid::Uuid::now_v7()),
        reason: "the user cancelled".into(),
    };
    for streamed in [true, false] {
        proxy.vendor.reply(wire.reply(&stream).silent_after(stream.len() / 3));
        let question = Client::Chat.question("openai", streamed);
        let asking = tokio::spawn(proxy.post(Client::Chat.path()).json(&question).send());
        until("the vendor to be called", async || {
            if proxy.vendor.open_answers() == 0 { Err(()) } else { Ok(()) }
        })
        .await;
        proxy.cancels.cancel(&order("task_2"));
        assert_eq!(proxy.vendor.open_answers(), 1, "that was another task");
        proxy.cancels.cancel(&order("task_1"));
        let response = asking.await.expect("no panic").expect("an answer");
        let body = if streamed {
            super::client::events(&response.text().await.expect("a stream"))
                .pop()
                .expect("an event")
        } else {
            assert_eq!(response.status().as_u16(), 504);
            response.json().await.expect("JSON")
        };
        let (_, message) = Client::Chat.error(&body);
        assert!(message.contains("the user cancelled"), "{message}");
        until("the connection to close", async || match proxy.vendor.open_answers() {
            0 => Ok(()),
            open => Err(open),
        })
        .await;
    }
    // The usage until then is charged.
    assert!(!proxy.reports(1).await.is_empty());
}

#[tokio::test]
async fn excess_calls_are_rejected_at_once() {
    let proxy = Proxy::with(Limits {
        concurrency: 1,
        timeout: Duration::from_millis(500),
        ..Limits::default()
    })
    .await;
    let wire = Wire::OpenAi;
    let stream = wire.answer("It takes a while.");
    proxy.vendor.reply(wire.reply(&stream).silent_after(stream.len() / 3));
    let question = Client::Chat.question("openai", true);
    let first = proxy.post(Client::Chat.path()).json(&question).send().await.expect("it begins");
    let (status, body) =
        ask(&proxy, Client::Messages, &Client::Messages.question("openai", false)).await;
    assert_eq!(status, 529, "{body}");
    // The first one ends with its timeout.
    let events = super::client::events(&first.text().await.expect("a stream"));
    assert_eq!(events.last().expect("an event")["error"]["code"], "timeout");
    proxy.vendor.reply(Reply::bytes("text/event-stream", wire.answer("x")));
    assert_eq!(ask(&proxy, Client::Chat, &question).await.0, 200);

    let large = "x".repeat(33 * 1024 * 1024);
    let body = json!({"model": "openai", "messages": [{"role": "user", "content": large}]});
    let response = proxy.post(Client::Chat.path()).json(&body).send().await;
    // An unread rest of a body may also break the connection.
    assert!(response.is_err() || response.is_ok_and(|response| response.status().as_u16() == 413));
}

#[tokio::test]
async fn bodies_beyond_the_memory_limit_are_rejected_unread() {
    // This concurrency allows one of the largest bodies.
    let proxy = Proxy::with(Limits { concurrency: 4, ..Limits::default() }).await;
    let wire = Wire::OpenAi;
    let question = Client::Chat.question("openai", false);
    // A body without a length that does not end yet.
    let (sender, pieces) = tokio::sync::mpsc::channel::<Result<Vec<u8>, std::io::Error>>(1);
    let pieces =
        stream::unfold(pieces, async |mut pieces| pieces.recv().await.map(|piece| (piece, pieces)));
    let request = proxy.post(Client::Chat.path()).header("content-type", "application/json");
    let first = tokio::spawn(request.body(reqwest::Body::wrap_stream(pieces)).send());
    let body = question.to_string().into_bytes();
    let (head, tail) = body.split_at(10);
    sender.send(Ok(head.into())).await.expect("it is read");
    for client in Client::ALL {
        until("the room to be taken", async || {
            let response = proxy
                .post(client.path())
                .json(&json!({"model": "openai"}))
                .send()
                .await
                .expect("an answer");
            let status = response.status().as_u16();
            let header = |name: &str| {
                response.headers().get(name).map(|value| value.to_str().unwrap().to_owned())
            };
            let again = (header("retry-after"), header("x-should-retry"));
            let (kind, message) = client.error(&response.json().await.expect("JSON"));
            let own = if client == Client::Messages {
                (529, "overloaded_error")
            } else {
                (503, "server_error")
            };
            if (status, kind.as_str()) != own {
                return Err((status, message));
            }
            assert_eq!(again, (Some("1".to_owned()), Some("true".to_owned())));
            Ok(())
        })
        .await;
    }
    // A received body holds only its size, and releases the rest.
    let answer = wire.answer("x");
    proxy
        .vendor
        .reply(wire.reply(&answer).silent_after(answer.len() / 3))
        .reply(wire.reply(&answer));
    sender.send(Ok(tail.into())).await.expect("it is read");
    drop(sender);
    until("the vendor to be called", async || {
        if proxy.vendor.open_answers() == 0 { Err(()) } else { Ok(()) }
    })
    .await;
    assert_eq!(ask(&proxy, Client::Chat, &question).await.0, 200);
    first.abort();
}

/// With the SDKs where they are installed: `CONSTRUCT_TEST_SDK_PYTHON` names a Python that has
/// `openai` and `anthropic`. `./dev clients` installs them and sets it.
#[tokio::test]
async fn official_sdks_work() {
    let Some(python) = std::env::var_os("CONSTRUCT_TEST_SDK_PYTHON") else {
        eprintln!("CONSTRUCT_TEST_SDK_PYTHON is not set: the SDKs are not tried");
        return;
    };
    let proxy = Proxy::start().await;
    let (stream, _) = Wire::Anthropic.rich_answer();
    // The number of calls that the script makes.
    for _ in 0..9 {
        proxy.vendor.reply(Wire::Anthropic.reply(&stream));
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/sdk/check.py");
    let url = format!("http://{}", proxy.address);
    let running = tokio::process::Command::new(python)
        .args([script, &url, &proxy.token(), "anthropic"])
        .output();
    let output = running.await.expect("Python starts");
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(proxy.vendor.take().is_none(), "every answer was asked for");
}
