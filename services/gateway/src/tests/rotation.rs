//! `construct-gateway keys`, with a database that uses the keys.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use construct_domain::OrganizationId;
use construct_proto::v1;
use construct_runtime::MasterKeys;
use construct_store::{Keyring, Store};
use jiff::{SignedDuration, Timestamp};
use tempfile::TempDir;

use super::{
    harness::*,
    secrets::{secret, secrets},
};
use crate::rotation::{Command, perform};

/// A key file of a test, and the database of its gateway.
struct Keys {
    folder: TempDir,
    path: PathBuf,
    store: Store,
}

impl Keys {
    fn new(name: &str, text: &str, store: Store) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        fs::write(&path, text).expect("it is written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("its rights are set");
        Self { folder, path, store }
    }

    /// Runs a command at this time; returns its output, or its error.
    async fn run_at(&self, now: Timestamp, words: &[&str]) -> Result<String, String> {
        let mut arguments = vec![words[0].into(), self.path.clone().into_os_string()];
        arguments.extend(words[1..].iter().map(Into::into));
        let command = Command::parse(arguments).expect("it is understood");
        match perform(&command, Some(&self.store), now).await {
            Ok(output) => Ok(output.message),
            Err(error) => Err(format!("{error:#}")),
        }
    }

    async fn run(&self, words: &[&str]) -> Result<String, String> {
        self.run_at(Timestamp::now(), words).await
    }

    fn read(&self) -> MasterKeys {
        MasterKeys::read(&self.path).expect("services accept it")
    }

    /// The keyring of a gateway that is started now.
    fn keyring(&self) -> Keyring {
        crate::keyring(&self.read()).expect("a keyring")
    }
}

#[tokio::test]
async fn secrets_key_rotates_while_secrets_are_written() {
    let gateway = Gateway::start().await;
    let keys = Keys::new("secrets.key", SECRETS_KEY, gateway.store());
    let mut client = secrets(&gateway);
    client.create_secret(secret("TOKEN_0")).await.expect("it is made");
    keys.run(&["add", "--name", "s2"]).await.expect("it is added");
    assert_eq!(keys.read().active().id(), "s1", "a new key is not active yet");
    let early = keys.run(&["retire", "s1"]).await.expect_err("it is the first");
    assert!(early.contains("is the first"), "{early}");
    keys.run(&["promote", "s2"]).await.expect("it is promoted");
    assert_eq!(keys.read().active().id(), "s2");
    let early = keys.run(&["retire", "s1"]).await.expect_err("nothing is encrypted again yet");
    assert!(early.contains("1 of secrets (`s1`)"), "{early}");

    // This gateway was not restarted and keeps using the old key. Another gateway was restarted.
    let writing = tokio::spawn(async move {
        for number in 1..20 {
            client.create_secret(secret(&format!("TOKEN_{number}"))).await.expect("it is made");
        }
    });
    let new_keyring = keys.keyring();
    let mut refused = 0;
    loop {
        let finished = writing.is_finished();
        keys.store.secret_reseal_all(&new_keyring, Timestamp::now()).await.expect("they are read");
        match keys.run(&["retire", "s1"]).await {
            Ok(_) if finished => break,
            // No row used the old key at that moment. Put it back, as an operator would who sees
            // that a gateway still uses it.
            Ok(_) => {
                let text = fs::read_to_string(&keys.path).expect("it is there");
                fs::write(&keys.path, format!("{text}{SECRETS_KEY}\n")).expect("it is written");
            }
            Err(error) => {
                refused += 1;
                assert!(error.contains("of secrets (`s1`)"), "{error}");
                assert!(refused < 1_000, "it never ends: {error}");
            }
        }
        tokio::task::yield_now().await;
    }
    writing.await.expect("everything is written");
    let remaining = keys.keyring();
    for number in 0..20 {
        let stored = keys
            .store
            .secret_find(OrganizationId::LOCAL, &format!("TOKEN_{number}"))
            .await
            .expect("it is there");
        remaining
            .open(&stored.id.to_string(), &stored.value)
            .expect("it opens with the remaining key");
    }
    let listed = keys.run(&["list"]).await.expect("it is listed");
    assert!(
        listed.contains("first") && listed.contains("20 of secrets") && !listed.contains("s1"),
        "{listed}"
    );
    assert!(
        gateway.database.contents().await.contains("RetireKey"),
        "the audit trail has the retirement"
    );
}

#[tokio::test]
async fn retire_refuses_a_key_file_of_another_installation() {
    let gateway = Gateway::start().await;
    let mut vendor = provider("p");
    let spec = vendor.spec.as_mut().expect("set");
    spec.r#type = v1::ModelProviderType::Anthropic.into();
    spec.api_key = "sk-0123456789".to_owned();
    gateway.providers().create_model_provider(vendor).await.expect("the provider is made");
    let other = "other:AQECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let text = format!("{other}\n{TOKEN_KEY}\n");
    let keys = Keys::new("master.key", &text, gateway.store());
    let listed = keys.run(&["list"]).await.expect("it is listed");
    assert!(
        listed.contains("encrypts nothing") && listed.contains("absent  1 of model_providers"),
        "{listed}"
    );
    assert!(!listed.contains("AQECAwQF"), "no key is shown: {listed}");
    let wrong = keys.run(&["retire", "t1"]).await.expect_err("the database needs other keys");
    assert!(wrong.contains("1 of model_providers (`test`)"), "{wrong}");
    assert_eq!(fs::read_to_string(&keys.path).expect("it is there"), text);
    let unknown = Keys { path: keys.folder.path().join("none.key"), ..keys };
    fs::write(&unknown.path, text).expect("it is written");
    fs::set_permissions(&unknown.path, fs::Permissions::from_mode(0o600))
        .expect("its rights are set");
    let unknown = unknown.run(&["retire", "t1"]).await.expect_err("the kind is unknown");
    assert!(unknown.contains("--kind"), "{unknown}");
}

#[tokio::test]
async fn token_key_retires_after_its_last_token_expires() {
    let database = construct_store::testing::Database::new().await;
    let keys = Keys::new("token.key", TOKEN_KEY, database.store());
    let now = Timestamp::now();
    keys.run_at(now, &["add", "--name", "t2"]).await.expect("it is added");
    keys.run_at(now, &["promote", "t2"]).await.expect("it is promoted");
    let week = SignedDuration::from_hours(7 * 24);
    let listed = keys.run_at(now, &["list"]).await.expect("it is listed");
    let ends = format!(
        "tokens it has signed end by {:.0}",
        now.round(jiff::Unit::Second).expect("a time") + week
    );
    assert!(listed.contains(&ends), "{listed}, not {ends}");
    let early = keys
        .run_at(now + week - SignedDuration::from_mins(1), &["retire", "t1"])
        .await
        .expect_err("too early");
    assert!(early.contains("may be valid until"), "{early}");
    let before = fs::read_to_string(&keys.path).expect("it is there");
    keys.run_at(now + week + SignedDuration::from_mins(1), &["retire", "t1"])
        .await
        .expect("the last one has ended");
    fs::write(&keys.path, before).expect("it is written");
    keys.run_at(now, &["retire", "t1", "--at-once"]).await.expect("it is forced");
    assert_eq!(keys.read().iter().map(|key| key.id().to_owned()).collect::<Vec<_>>(), ["t2"]);
}

#[test]
fn invalid_key_commands_print_the_usage() {
    let parse = |arguments: &[&str]| Command::parse(arguments.iter().map(Into::into));
    for words in [
        &[][..],
        &["list"],
        &["list", "a.key", "b"],
        &["add", "a.key", "b"],
        &["promote", "a.key"],
        &["retire", "a.key"],
        &["promote", "a.key", "b", "--at-once"],
        &["list", "a.key", "--kind"],
        &["list", "a.key", "--kind", "other"],
        &["list", "a.key", "--name", "b"],
        &["list", "a.key", "--force"],
        &["burn", "a.key"],
    ] {
        assert!(parse(words).expect_err("it is not understood").contains("usage:"), "{words:?}");
    }
    assert_eq!(
        parse(&["list", "/etc/master.key"]),
        parse(&["list", "--kind", "master", "/etc/master.key"])
    );
    assert_ne!(
        parse(&["list", "/etc/master.key"]),
        parse(&["list", "/etc/master.key", "--kind", "token"])
    );
}
