//! Secrets: never shown, bound to hosts and commands, and used by agents.

use construct_domain::{OrganizationId, SecretId};
use construct_proto::v1::{self, secret_service_client::SecretServiceClient};
use construct_store::{Keyring, Stream};
use prost::Message as _;
use tonic::{Code, transport::Channel};

use super::{entities::contains, harness::*};
use crate::validate::tests::fields;

const VALUE: &str = "ghp_x7Qw9Zk2Lm4Vt8Rp";

pub(super) fn secrets(gateway: &Gateway) -> SecretServiceClient<Channel> {
    SecretServiceClient::new(gateway.channel())
}

fn bindings(hosts: &[&str], commands: &[&str]) -> Option<v1::SecretBindings> {
    let owned = |list: &[&str]| list.iter().map(|entry| (*entry).to_owned()).collect();
    Some(v1::SecretBindings { hosts: owned(hosts), commands: owned(commands) })
}

pub(super) fn secret(name: &str) -> v1::CreateSecretRequest {
    let spec = v1::SecretSpec {
        name: name.into(),
        description: "for issues".into(),
        value: VALUE.into(),
        bindings: bindings(&["api.example.com", "api.example.com"], &["git"]),
    };
    v1::CreateSecretRequest { spec: Some(spec), idempotency_key: String::new() }
}

#[tokio::test]
async fn secret_value_is_sealed_with_its_own_key_and_never_shown() {
    let gateway = Gateway::start().await;
    let mut client = secrets(&gateway);
    let request = v1::CreateSecretRequest { idempotency_key: "key".into(), ..secret("TOKEN") };
    let created = client.create_secret(request.clone()).await.expect("it is made").into_inner();
    let again = client.create_secret(request.clone()).await.expect("it is repeated").into_inner();
    assert_eq!(created, again);
    // The same idempotency key with another value is refused.
    let mut other = request.clone();
    other.spec.as_mut().expect("set").value.push('x');
    expect_error(client.create_secret(other).await, Code::InvalidArgument);
    let spec = created.spec.clone().expect("set");
    assert_eq!(
        (spec.value.as_str(), spec.bindings),
        ("", bindings(&["api.example.com"], &["git"]))
    );
    assert_eq!(created.status.expect("set").encryption_key_id, "s1");

    let name = |name: &str| v1::GetSecretRequest { secret: name.into() };
    let id = created.metadata.expect("set").id;
    let got = client.get_secret(name("TOKEN")).await.expect("it is there").into_inner();
    assert_eq!(
        got,
        client.get_secret(name(&id)).await.expect("names and ids are equivalent").into_inner()
    );
    let update = v1::UpdateSecretRequest {
        secret: "TOKEN".into(),
        value: Some(format!("{VALUE}-new")),
        ..v1::UpdateSecretRequest::default()
    };
    let updated = client.update_secret(update).await.expect("it is changed").into_inner();
    let listed =
        client.list_secrets(v1::ListSecretsRequest::default()).await.expect("listed").into_inner();
    assert_eq!(listed.secrets, [updated]);

    let stored =
        gateway.store().secret_find(OrganizationId::LOCAL, &id).await.expect("it is stored");
    let key: [u8; 32] = std::array::from_fn(|index| 31 - index as u8);
    let keyring = Keyring::new("s1", [("s1".to_owned(), key)]).expect("a keyring");
    let opened = keyring.open(&stored.id.to_string(), &stored.value).expect("it decrypts");
    assert_eq!(secrecy::ExposeSecret::expose_secret(&opened), format!("{VALUE}-new").as_bytes());
    let events = gateway
        .store()
        .events_after(Stream::organization(OrganizationId::LOCAL), 0, 100, u64::MAX)
        .await
        .expect("they are read");
    let kinds: Vec<&str> = events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(kinds, ["secret.created", "secret.updated"]);
    assert!(events.iter().all(|event| !contains(&event.payload, "ghp_")));
    assert!(!contains(&listed.secrets[0].encode_to_vec(), "ghp_"));
    for shown in [
        format!("{request:?}"),
        format!(
            "{:?}",
            v1::UpdateSecretRequest { value: Some(VALUE.into()), ..Default::default() }
        ),
    ] {
        assert!(!shown.contains("ghp_"), "{shown}");
    }
}

#[tokio::test]
async fn invalid_secret_is_refused_without_showing_its_value() {
    let gateway = Gateway::start().await;
    let valid = secret("TOKEN").spec.expect("set");
    for (spec, field) in [
        (v1::SecretSpec { name: "token".into(), ..valid.clone() }, "spec.name"),
        (v1::SecretSpec { value: "1234567".into(), ..valid.clone() }, "spec.value"),
        (v1::SecretSpec { value: " 1234567\n".into(), ..valid.clone() }, "spec.value"),
        // Longer values that a script could guess.
        (v1::SecretSpec { value: "48123456".into(), ..valid.clone() }, "spec.value"),
        (v1::SecretSpec { value: "1234567890".repeat(100), ..valid.clone() }, "spec.value"),
        (v1::SecretSpec { value: "x".repeat(64 * 1024 + 1), ..valid.clone() }, "spec.value"),
        (v1::SecretSpec { bindings: None, ..valid.clone() }, "spec.bindings"),
        (
            v1::SecretSpec { bindings: bindings(&["*"], &[]), ..valid.clone() },
            "spec.bindings.hosts[0]",
        ),
        (
            v1::SecretSpec { bindings: bindings(&["a.com:443"], &[]), ..valid.clone() },
            "spec.bindings.hosts[0]",
        ),
        (
            v1::SecretSpec { bindings: bindings(&[], &["git", "git push"]), ..valid.clone() },
            "spec.bindings.commands[1]",
        ),
    ] {
        let request = v1::CreateSecretRequest { spec: Some(spec), idempotency_key: String::new() };
        let status =
            expect_error(secrets(&gateway).create_secret(request).await, Code::InvalidArgument);
        assert_eq!(fields(&status), [field]);
        assert!(!status.message().contains("123456"), "{status}");
    }
}

#[tokio::test]
async fn wider_bindings_require_the_value_again() {
    let gateway = Gateway::start().await;
    let mut client = secrets(&gateway);
    client.create_secret(secret("TOKEN")).await.expect("it is made");
    let update = |bindings, value: Option<&str>| v1::UpdateSecretRequest {
        secret: "TOKEN".into(),
        bindings,
        value: value.map(str::to_owned),
        ..v1::UpdateSecretRequest::default()
    };
    for wider in [
        bindings(&["api.example.com", "evil.example.org"], &[]),
        bindings(&[], &["node"]),
        bindings(&["*.example.com"], &[]),
    ] {
        let status =
            expect_error(client.update_secret(update(wider, None)).await, Code::InvalidArgument);
        assert_eq!(fields(&status), ["value"]);
    }
    let guessable = client.update_secret(update(None, Some("20261128"))).await;
    assert_eq!(fields(&expect_error(guessable, Code::InvalidArgument)), ["value"]);
    let narrowed = client
        .update_secret(update(bindings(&[], &["git"]), None))
        .await
        .expect("fewer bindings")
        .into_inner();
    assert_eq!(narrowed.spec.expect("set").bindings, bindings(&[], &["git"]));
    client
        .update_secret(update(bindings(&["evil.example.org"], &[]), Some(VALUE)))
        .await
        .expect("with the value");
}

#[tokio::test]
async fn agent_uses_only_the_secrets_it_names() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = secrets(&gateway);
    let first = client.create_secret(secret("TOKEN")).await.expect("it is made").into_inner();
    client.create_secret(secret("ANOTHER")).await.expect("it is made");
    let first = first.metadata.expect("set").id;
    let set = |secrets: &[&str]| v1::UpdateAgentRequest {
        agent: "ada".into(),
        secrets: Some(v1::AgentSecrets {
            secrets: secrets.iter().map(|name| (*name).to_owned()).collect(),
        }),
        ..v1::UpdateAgentRequest::default()
    };
    expect_error(gateway.agents().update_agent(set(&["NONE"])).await, Code::NotFound);
    expect_error(gateway.agents().update_agent(set(&["none"])).await, Code::InvalidArgument);
    let names = async |request| {
        let agent =
            gateway.agents().update_agent(request).await.expect("it is changed").into_inner();
        agent.spec.expect("set").secrets
    };
    assert_eq!(names(set(&[&first, "ANOTHER", "TOKEN"])).await, ["ANOTHER", "TOKEN"]);
    let untouched =
        v1::UpdateAgentRequest { agent: "ada".into(), max_turns: Some(3), ..Default::default() };
    assert_eq!(names(untouched).await, ["ANOTHER", "TOKEN"]);

    let task = gateway.task().await.parse().expect("an id");
    let usable = gateway.store().task_secrets(task).await.expect("they are read");
    assert_eq!(
        usable.iter().map(|secret| secret.name.as_str()).collect::<Vec<_>>(),
        ["ANOTHER", "TOKEN"]
    );
    let delete =
        |secret: &str| v1::DeleteSecretRequest { secret: secret.into(), ..Default::default() };
    expect_error(client.delete_secret(delete("TOKEN")).await, Code::FailedPrecondition);
    assert_eq!(names(set(&["ANOTHER"])).await, ["ANOTHER"]);
    client.delete_secret(delete("TOKEN")).await.expect("no agent may use it");
    expect_error(client.delete_secret(delete("TOKEN")).await, Code::NotFound);
    let got = client
        .get_secret(v1::GetSecretRequest { secret: "ANOTHER".into() })
        .await
        .expect("it is there");
    assert_eq!(got.into_inner().status.expect("set").agent_count, 1);

    let mut with = agent("eve");
    with.spec.as_mut().expect("set").secrets = vec!["ANOTHER".into()];
    let made = gateway.agents().create_agent(with).await.expect("it is made").into_inner();
    assert_eq!(made.spec.expect("set").secrets, ["ANOTHER"]);
    gateway
        .agents()
        .delete_agent(v1::DeleteAgentRequest { agent: "eve".into(), ..Default::default() })
        .await
        .expect("secrets do not prevent its deletion");
}

#[tokio::test]
async fn secrets_are_resealed_when_their_key_changes() {
    let gateway = Gateway::start().await;
    secrets(&gateway).create_secret(secret("TOKEN")).await.expect("it is made");
    let old: [u8; 32] = std::array::from_fn(|index| 31 - index as u8);
    let store = gateway.store();
    let both = Keyring::new("s2", [("s1".to_owned(), old), ("s2".to_owned(), [9; 32])])
        .expect("a keyring");
    let only = Keyring::new("s2", [("s2".to_owned(), [9; 32])]).expect("a keyring");
    let now = jiff::Timestamp::now();
    let id: SecretId =
        store.secret_resolve(OrganizationId::LOCAL, "TOKEN").await.expect("it is there");
    assert_eq!(store.secret_reseal_all(&only, now).await.expect("they are read").failed, [id]);
    assert_eq!(store.secret_reseal_all(&both, now).await.expect("they are read").resealed, 1);
    let stored = store.secret_find(OrganizationId::LOCAL, "TOKEN").await.expect("it is there");
    assert_eq!(stored.value.key_id, "s2");
    only.open(&id.to_string(), &stored.value).expect("it decrypts");
}
