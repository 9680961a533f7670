//! Linking Slack users to members of Construct.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use construct_proto::mesh::v1 as mesh_v1;
use futures::StreamExt as _;
use prost::Message as _;

use super::*;

/// A mesh in which users have to link their accounts.
async fn begin_with_members(script: &Value) -> (Mesh, SlackServer) {
    begin_with(script, |mesh, _| mesh.set_env("CONSTRUCT_SLACK_MEMBERS_ONLY", "true")).await
}

/// A code for a key with this role and these scopes.
async fn code(mesh: &Mesh, role: v1::Role, scopes: &[&str]) -> String {
    let spec = v1::ApiKeySpec {
        name: "slack".to_owned(),
        role: role.into(),
        scopes: scopes.iter().map(|&scope| scope.to_owned()).collect(),
        limits: None,
    };
    let request =
        v1::CreateSetupCodeRequest { spec: Some(spec), ..v1::CreateSetupCodeRequest::default() };
    mesh.client().unwrap().keys().create_setup_code(request).await.unwrap().into_inner().code
}

/// Waits until a user gets this reply to a command, after the first `heard` replies.
async fn wait_for_reply(slack: &SlackServer, heard: &mut usize, words: &str) {
    *heard = until(&format!("a reply with {words:?}"), TURN_TIMEOUT, async || {
        let said = slack.responses();
        let found = said.iter().skip(*heard).position(|said| said.to_string().contains(words));
        found.map(|place| *heard + place + 1).ok_or(said)
    })
    .await;
}

async fn ask(mesh: &Mesh, slack: &SlackServer, user: &str, words: &str) -> String {
    let (ts, event) = slack.ask(CHANNEL, user, None, words, json!([]));
    assert_eq!(slack.send_event(mesh, &event).await.unwrap(), 200);
    ts
}

#[tokio::test]
async fn members_ask_and_decide_with_their_own_keys() {
    let script = json!([
        {"text": "I shall do it.", "code": "create_file('key', 'x').status"},
        {"text": "Done: {{last_result}}"},
    ]);
    let (mesh, slack) = begin_with_members(&script).await;
    let rule = v1::PolicyRule {
        action: v1::PolicyAction::Ask.into(),
        tools: vec!["create_file".to_owned()],
        ..v1::PolicyRule::default()
    };
    let update = v1::UpdateAgentRequest {
        agent: "helper".to_owned(),
        policy: Some(v1::Policy { rules: vec![rule] }),
        ..v1::UpdateAgentRequest::default()
    };
    mesh.client().unwrap().agents().update_agent(update).await.unwrap();

    // Taps the mesh and records every command.
    let mut tap = mesh.bus().await.tap("construct.>").await.unwrap();
    let (commands, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (counted, seeing) = (Arc::clone(&commands), Arc::clone(&seen));
    tokio::spawn(async move {
        while let Some(message) = tap.next().await {
            seeing.lock().unwrap().extend(format!("{:?}", message.headers).into_bytes());
            seeing.lock().unwrap().extend(&message.payload);
            let is_command = mesh_v1::SlackDelivery::decode(message.payload)
                .is_ok_and(|told| told.kind == "command");
            counted.fetch_add(usize::from(is_command), Ordering::Relaxed);
        }
    });

    let mut heard = 0;
    // Ann is not linked, and the service does not use its own key for her.
    let thread = ask(&mesh, &slack, ANN, "before").await;
    wait_for_answer(&slack, CHANNEL, &thread, "I do not know who you are in Construct").await;
    slack.command(&mesh, ANN, CHANNEL, "link nonsense").await.unwrap();
    wait_for_reply(&slack, &mut heard, "That code is invalid").await;
    let reading = code(&mesh, v1::Role::Member, &["tasks:read"]).await;
    slack.command(&mesh, ANN, CHANNEL, &format!("link {reading}")).await.unwrap();
    wait_for_reply(&slack, &mut heard, "cannot ask questions").await;
    // A guest cannot be linked either.
    let unused = code(&mesh, v1::Role::Member, &["tasks:write"]).await;
    slack.command(&mesh, GUEST, CHANNEL, &format!("link {unused}")).await.unwrap();
    wait_for_reply(&slack, &mut heard, "only help members of this workspace").await;

    // A viewer has that role here as well.
    let viewing = code(&mesh, v1::Role::Viewer, &["tasks:write"]).await;
    slack.command(&mesh, ANN, CHANNEL, &format!("link {viewing}")).await.unwrap();
    wait_for_reply(&slack, &mut heard, "In Construct you are").await;
    let thread = ask(&mesh, &slack, ANN, "as a viewer").await;
    wait_for_answer(&slack, CHANNEL, &thread, "your role in Construct").await;
    assert_eq!(asked_questions(&mesh).await, Vec::<String>::new());

    // The code that the guest could not use is still valid, once.
    slack.command(&mesh, ANN, CHANNEL, &format!("link `{unused}`")).await.unwrap();
    wait_for_reply(&slack, &mut heard, "In Construct you are").await;
    slack.command(&mesh, CARL, CHANNEL, &format!("link {unused}")).await.unwrap();
    wait_for_reply(&slack, &mut heard, "That code is invalid").await;
    slack.command(&mesh, ANN, CHANNEL, "me").await.unwrap();
    wait_for_reply(&slack, &mut heard, "In Construct you are").await;

    let thread = ask(&mesh, &slack, ANN, "as a member").await;
    let question = until("a question with buttons", TURN_TIMEOUT, async || {
        slack.posts(CHANNEL, &thread).get(1).cloned().ok_or("none")
    })
    .await;
    let at = question["ts"].as_str().unwrap();
    // An admin of the workspace without an account in Construct.
    slack.press(&mesh, BOB, CHANNEL, at, "construct_approve").await.unwrap();
    until("a message to Bob", TURN_TIMEOUT, async || {
        let ephemeral_messages = slack.ephemeral_messages();
        let told = ephemeral_messages.iter().any(|told| {
            told["user"] == BOB && told.to_string().contains("I do not know who you are")
        });
        if told { Ok(()) } else { Err(ephemeral_messages) }
    })
    .await;
    slack.press(&mesh, ANN, CHANNEL, at, "construct_approve").await.unwrap();
    until("the answer", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &thread);
        if posts.first().is_some_and(|post| visible_text(post).contains("Done:")) {
            Ok(())
        } else {
            Err(posts)
        }
    })
    .await;
    let client = mesh.client().unwrap();
    let approvals = client
        .approvals()
        .list_approvals(v1::ListApprovalsRequest::default())
        .await
        .unwrap()
        .into_inner();
    let keys = client
        .keys()
        .list_api_keys(v1::ListApiKeysRequest::default())
        .await
        .unwrap()
        .into_inner()
        .api_keys;
    let hers = keys.iter().filter(|key| {
        key.spec
            .as_ref()
            .is_some_and(|spec| spec.role() == v1::Role::Member && spec.scopes == ["tasks:write"])
    });
    let hers: Vec<String> =
        hers.filter_map(|key| Some(key.metadata.as_ref()?.id.clone())).collect();
    let decided: Vec<String> = approvals
        .approvals
        .iter()
        .filter_map(|approval| Some(approval.status.as_ref()?.decided_by.clone()))
        .collect();
    assert_eq!((hers.len(), &decided), (1, &hers));

    // Her key is revoked in Construct: she gets a message, and can unlink herself.
    let revoke =
        v1::RevokeApiKeyRequest { api_key: hers[0].clone(), ..v1::RevokeApiKeyRequest::default() };
    client.keys().revoke_api_key(revoke).await.unwrap();
    let thread = ask(&mesh, &slack, ANN, "without a key").await;
    wait_for_answer(&slack, CHANNEL, &thread, "no longer accepts your key").await;
    slack.command(&mesh, ANN, CHANNEL, "unlink").await.unwrap();
    wait_for_reply(&slack, &mut heard, "I have unlinked your Construct account").await;
    let thread = ask(&mesh, &slack, ANN, "after").await;
    wait_for_answer(&slack, CHANNEL, &thread, "I do not know who you are in Construct").await;

    let sent = 8;
    until("the tap to see every command", TURN_TIMEOUT, async || {
        match commands.load(Ordering::Relaxed) {
            count if count == sent => Ok(()),
            count => Err(count),
        }
    })
    .await;
    let seen = String::from_utf8_lossy(&seen.lock().unwrap()).into_owned();
    assert!(seen.contains("as a member"), "what is asked is seen");
    for secret in [&unused, &viewing, &reading] {
        assert!(
            !seen.contains(secret.as_str()),
            "a set-up code can be read by whoever taps the mesh"
        );
    }

    let asked = asked_questions(&mesh).await;
    assert!(asked.len() == 1 && asked[0].contains("as a member"), "{asked:?}");
    let log = mesh.log(Service::Slack);
    for secret in [&unused, &viewing, &reading] {
        assert!(!log.contains(secret.as_str()), "{log}");
    }
    for key in &keys {
        assert!(
            key.prefix.starts_with("ct_") && !log.contains(&key.prefix),
            "{}: {log}",
            key.prefix
        );
    }
    assert_no_complaints(&slack);
}
