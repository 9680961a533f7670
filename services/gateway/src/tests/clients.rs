//! Clients that others wrote, in other languages: Google's gRPC for Python, and Buf's Connect for
//! Node, which knows gRPC-Web and gRPC as well. And an issuer that others wrote, for people.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use construct_domain::{
    OrganizationId, UserId,
    access::{Role, Scope},
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
};

use super::{
    harness::*,
    walk::{create_key, login_required},
};
use crate::Config;

const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/clients");

/// Node looks for packages beside the script.
fn beside_packages(folder: &Path, script: &str) -> PathBuf {
    let there = folder.join("node").join(script);
    fs::copy(Path::new(SCRIPTS).join(script), &there)
        .unwrap_or_else(|error| panic!("{}: {error}", there.display()));
    there
}

/// Runs it to its end, and says what it said.
async fn succeeds(command: &mut Command, what: &Path) {
    // A proxy of the person's is not the way to this machine.
    let running = command.env("no_proxy", "127.0.0.1").kill_on_drop(true).output();
    let output =
        running.await.unwrap_or_else(|error| panic!("{} is not started: {error}", what.display()));
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}:\n{said}", what.display());
    println!("{said}");
}

/// Where they are installed: `CONSTRUCT_TEST_CLIENTS` names the folder that `./dev clients` makes.
#[tokio::test]
async fn clients_in_other_languages_work() {
    let Some(folder) = std::env::var_os("CONSTRUCT_TEST_CLIENTS").map(PathBuf::from) else {
        eprintln!(
            "LEFT OUT: CONSTRUCT_TEST_CLIENTS is not set, so no client in another language is tried; ./dev clients tries them"
        );
        return;
    };
    let gateway = Gateway::start_with(login_required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let (_, key) = create_key(&gateway, local, Role::Owner, &[Scope::Admin], None).await;
    for (program, script) in [
        (folder.join("python/bin/python").into_os_string(), Path::new(SCRIPTS).join("check.py")),
        (OsString::from("node"), beside_packages(&folder, "check.mjs")),
    ] {
        let mut command = Command::new(&program);
        command
            .arg(&script)
            .env("CONSTRUCT_GATEWAY_URL", format!("http://{}", gateway.address))
            .env("CONSTRUCT_KEY", &key)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        succeeds(&mut command, &script).await;
    }
}

/// `construct` is the command's program: `CONSTRUCT_TEST_CLI` names it.
#[tokio::test]
async fn people_log_in_at_a_real_issuer() {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let (Some(folder), Some(construct)) =
        (variable("CONSTRUCT_TEST_CLIENTS"), variable("CONSTRUCT_TEST_CLI"))
    else {
        eprintln!(
            "LEFT OUT: CONSTRUCT_TEST_CLIENTS and CONSTRUCT_TEST_CLI are not set, so nobody logs in at a real issuer; ./dev clients does that"
        );
        return;
    };
    let mut issuer = Command::new("node")
        .arg(beside_packages(&folder, "issuer.mjs"))
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("node is there");
    let mut lines = BufReader::new(issuer.stdout.take().expect("it is piped")).lines();
    let url =
        wait_for("the issuer says where it is", lines.next_line()).await.expect("it can be read");
    let url = url.expect("it has not ended");
    // One gateway takes ID tokens of the command, which are for that, and the other access tokens,
    // which are for the gateway.
    let config = |audience: &str| Config {
        gateway_oidc_issuer: Some(url.clone()),
        gateway_oidc_audience: Some(audience.to_owned()),
        gateway_oidc_client_id: Some("construct-cli".to_owned()),
        ..login_required()
    };
    let gateway = Gateway::start_with(config("construct-cli")).await;
    let other = Gateway::start_with(config("https://construct.example.com")).await;
    let script = beside_packages(&folder, "login.mjs");
    let mut command = Command::new("node");
    command
        .arg(&script)
        .env("CONSTRUCT", construct)
        .env("CONSTRUCT_GATEWAY_URL", format!("http://{}", gateway.address))
        .env("CONSTRUCT_OTHER_GATEWAY_URL", format!("http://{}", other.address))
        .env("CONSTRUCT_ISSUER", url);
    succeeds(&mut command, &script).await;
}
