//! Two organizations on one mesh with required logins: each works, and neither sees the other. All
//! through the command line.

use std::{
    os::unix::fs::PermissionsExt as _,
    process::{Output, Stdio},
};

use construct_tests::{
    client::TURN_TIMEOUT,
    mesh::{Mesh, binary},
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, process::Command, time::timeout};

pub(crate) const REQUIRED: (&str, &str) = ("CONSTRUCT_GATEWAY_LOGIN", "required");

/// Runs the command line with a key, or without one.
pub(crate) async fn run(mesh: &Mesh, key: Option<&str>, arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(binary("construct").unwrap());
    command
        .env_clear()
        .env("CONSTRUCT_GATEWAY_URL", mesh.gateway_url())
        .envs(key.map(|key| ("CONSTRUCT_KEY", key)));
    finish(command.args(arguments), input).await
}

async fn finish(command: &mut Command, input: &str) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A command that ends without reading closes its end.
    let _ = stdin.write_all(input.as_bytes()).await;
    drop(stdin);
    timeout(TURN_TIMEOUT, child.wait_with_output()).await.expect("the command ends").unwrap()
}

/// The output of a successful command.
pub(crate) async fn output(
    mesh: &Mesh,
    key: Option<&str>,
    arguments: &[&str],
    input: &str,
) -> String {
    let done = run(mesh, key, arguments, input).await;
    assert!(done.status.success(), "{arguments:?}: {done:?}");
    String::from_utf8(done.stdout).unwrap()
}

pub(crate) async fn json_output(mesh: &Mesh, key: &str, arguments: &[&str], input: &str) -> Value {
    serde_json::from_str(
        &output(mesh, Some(key), &[arguments, &["-o", "json"]].concat(), input).await,
    )
    .unwrap()
}

/// The error of a refused command.
pub(crate) async fn refusal(mesh: &Mesh, key: Option<&str>, arguments: &[&str]) -> String {
    let done = run(mesh, key, arguments, "").await;
    assert!(!done.status.success(), "{arguments:?}: {done:?}");
    String::from_utf8(done.stderr).unwrap()
}

pub(crate) async fn first_key(mesh: &Mesh) -> Output {
    let mut command = Command::new(binary("construct-gateway").unwrap());
    command
        .env_clear()
        .env("CONSTRUCT_DATABASE_URL", mesh.database.url())
        .env("CONSTRUCT_NATS_URL", mesh.nats.url());
    finish(command.arg("first-key"), "").await
}

/// Creates a provider, a model, an agent, a secret and a budget of one organization; its agent's
/// answers contain `color`.
pub(crate) async fn create_entities(mesh: &Mesh, key: &str, color: &str) {
    let script = json!({"count": "since_user", "turns": [
        {"code": format!("execute_command('echo {color} >> mark; cat mark')")},
        {"text": format!("{color} sees {{{{last_result}}}}")},
    ]});
    let provider = ["modelprovider", "create", "p", "--type", "scripted", "--script-file", "-"];
    output(mesh, Some(key), &provider, &script.to_string()).await;
    output(mesh, Some(key), &["model", "create", "m", "--provider", "p", "--model-id", "m"], "")
        .await;
    output(mesh, Some(key), &["agent", "create", "worker", "--model", "m"], "").await;
    let secret = ["secret", "create", "TOKEN", "--host", "api.example.com", "--description", color];
    output(mesh, Some(key), &secret, &format!("{color}-secret-value")).await;
    output(mesh, Some(key), &["budget", "create", "5/month", "--agent", "worker"], "").await;
}

#[tokio::test]
async fn organizations_cannot_see_each_other() {
    let mesh = Mesh::start_with(&[REQUIRED]).await.unwrap();
    assert!(refusal(&mesh, None, &["task", "list"]).await.contains("CONSTRUCT_KEY"));
    let made = first_key(&mesh).await;
    assert!(made.status.success(), "{made:?}");
    let operator = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    assert!(operator.starts_with("ct_"));
    assert!(!first_key(&mesh).await.status.success(), "there is one first key");

    let mut keys = Vec::new();
    for color in ["red", "blue"] {
        let made = json_output(&mesh, &operator, &["organization", "create", color], "").await;
        let code = made["setupCode"]["code"].as_str().unwrap();
        let key = output(&mesh, None, &["key", "exchange"], code).await.trim().to_owned();
        let me = json_output(&mesh, &key, &["whoami"], "").await;
        assert_eq!(me["organizationId"], made["organization"]["metadata"]["id"]);
        create_entities(&mesh, &key, color).await;
        keys.push(key);
    }
    let (red, blue) = (keys[0].as_str(), keys[1].as_str());
    let work = ["exec", "--agent", "worker", "Do it."];
    let (of_red, of_blue) =
        tokio::join!(output(&mesh, Some(red), &work, ""), output(&mesh, Some(blue), &work, ""));
    assert!(of_red.contains("red sees") && !of_red.contains("blue"), "{of_red}");
    assert!(of_blue.contains("blue sees") && !of_blue.contains("red"), "{of_blue}");

    let tasks = json_output(&mesh, red, &["task", "list"], "").await;
    assert_eq!(tasks["tasks"].as_array().unwrap().len(), 1, "{tasks}");
    let task = tasks["tasks"][0]["metadata"]["id"].as_str().unwrap();
    let directory = ["exec", "--agent", "worker", "--workspace", "/tmp", "Do it."];
    assert!(refusal(&mesh, Some(red), &directory).await.contains("workspace"));
    for arguments in [
        &["task", "get", task][..],
        &["message", "list", task],
        &["message", "create", task, "Do it for me."],
        &["task", "delete", task],
        &["events", task],
    ] {
        let errors = refusal(&mesh, Some(blue), arguments).await;
        assert!(errors.contains("not found"), "{arguments:?}: {errors}");
    }
    // Entities with the same name belong to their own organization.
    for (key, own, other) in [(red, "red", "blue"), (blue, "blue", "red")] {
        for list in ["task", "agent", "secret", "budget", "modelprovider", "key", "organization"] {
            let listed = output(&mesh, Some(key), &[list, "list", "-o", "json"], "").await;
            assert!(!listed.contains(&format!("\"{other}")), "{list} of {own}: {listed}");
        }
        assert!(refusal(&mesh, Some(key), &["deadletter", "list"]).await.contains("operator"));
    }
    // The operator can manage organizations, but not enter the others.
    let operators = json_output(&mesh, &operator, &["task", "list"], "").await;
    assert!(operators["tasks"].as_array().is_none_or(Vec::is_empty), "{operators}");
    let organization = json_output(&mesh, red, &["whoami"], "").await["organizationId"]
        .as_str()
        .unwrap()
        .to_owned();
    refusal(&mesh, Some(&operator), &["--organization", &organization, "task", "list"]).await;
    let log = mesh.log(construct_tests::mesh::Service::Gateway);
    for secret in [&operator, red, blue, "secret-value"] {
        assert!(!log.contains(secret), "a secret is in the log");
    }
}

#[tokio::test]
async fn cli_context_remembers_gateway_and_credentials() {
    let mesh = Mesh::start_with(&[REQUIRED]).await.unwrap();
    let operator = String::from_utf8(first_key(&mesh).await.stdout).unwrap();
    let home = mesh.home().join("person");
    let programs = mesh.home().join("programs");
    let run = async |arguments: &[&str], input: &str| {
        let mut command = Command::new(binary("construct").unwrap());
        let paths = format!("{}:/usr/bin:/bin", programs.display());
        finish(command.env_clear().env("HOME", &home).env("PATH", paths).args(arguments), input)
            .await
    };
    std::fs::create_dir(&programs).unwrap();
    let keyring = programs.join("secret-tool");
    std::fs::write(&keyring, "#!/bin/sh\nexit 1\n").unwrap();
    std::fs::set_permissions(&keyring, std::fs::Permissions::from_mode(0o700)).unwrap();
    let address = mesh.gateway_url();
    let added =
        run(&["context", "add", "work", "--address", &address, "--key-stdin"], &operator).await;
    assert!(added.status.success(), "{added:?}");
    let me = run(&["whoami"], "").await;
    assert!(String::from_utf8_lossy(&me.stdout).contains("owner"), "{me:?}");
    let listed = String::from_utf8(run(&["context", "list"], "").await.stdout).unwrap();
    assert!(
        listed.starts_with("* work") && listed.contains(&address) && !listed.contains("ct_"),
        "{listed}"
    );
    assert!(run(&["context", "remove", "work"], "").await.status.success());
    assert!(!run(&["--context", "work", "whoami"], "").await.status.success());

    // The same with a keyring, which holds one key.
    let held = programs.join("held");
    let script =
        "#!/bin/sh\ncase $1 in store) cat >HELD ;; lookup) cat HELD ;; clear) rm HELD ;; esac\n";
    std::fs::write(&keyring, script.replace("HELD", &held.display().to_string())).unwrap();
    let added =
        run(&["context", "add", "work", "--address", &address, "--key-stdin"], &operator).await;
    assert!(added.status.success() && held.exists(), "{added:?}");
    let me = run(&["whoami"], "").await;
    assert!(String::from_utf8_lossy(&me.stdout).contains("owner"), "{me:?}");
    assert!(run(&["context", "remove", "work"], "").await.status.success());
    assert!(!held.exists());
}
