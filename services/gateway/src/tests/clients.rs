//! Third-party clients in other languages: Google's gRPC for Python, and Buf's Connect for Node,
//! which also speaks gRPC-Web and gRPC. And a third-party OpenID Connect issuer.

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

/// Copies a script to where its packages are: Node searches beside the script.
fn copy_beside_packages(folder: &Path, script: &str) -> PathBuf {
    let target = folder.join("node").join(script);
    fs::copy(Path::new(SCRIPTS).join(script), &target)
        .unwrap_or_else(|error| panic!("{}: {error}", target.display()));
    target
}

/// Runs a command to its end, prints its output, and panics if it failed.
async fn run(command: &mut Command, what: &Path) {
    // A proxy from the environment does not lead to this machine.
    let running = command.env("no_proxy", "127.0.0.1").kill_on_drop(true).output();
    let output =
        running.await.unwrap_or_else(|error| panic!("{} is not started: {error}", what.display()));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}:\n{printed}", what.display());
    println!("{printed}");
}

/// `CONSTRUCT_TEST_CLIENTS` names the folder that `./dev clients` installs them in.
#[tokio::test]
async fn clients_in_other_languages_work() {
    let Some(folder) = std::env::var_os("CONSTRUCT_TEST_CLIENTS").map(PathBuf::from) else {
        eprintln!(
            "SKIPPED: CONSTRUCT_TEST_CLIENTS is not set, so no client in another language is tested; ./dev clients tests them"
        );
        return;
    };
    let gateway = Gateway::start_with(login_required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let (_, key) = create_key(&gateway, local, Role::Owner, &[Scope::Admin], None).await;
    for (program, script) in [
        (folder.join("python/bin/python").into_os_string(), Path::new(SCRIPTS).join("check.py")),
        (OsString::from("node"), copy_beside_packages(&folder, "check.mjs")),
    ] {
        let mut command = Command::new(&program);
        command
            .arg(&script)
            .env("CONSTRUCT_GATEWAY_URL", format!("http://{}", gateway.address))
            .env("CONSTRUCT_KEY", &key)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        run(&mut command, &script).await;
    }
}

/// `CONSTRUCT_TEST_CLI` names the program of the command line.
#[tokio::test]
async fn people_log_in_at_a_real_issuer() {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let (Some(folder), Some(construct)) =
        (variable("CONSTRUCT_TEST_CLIENTS"), variable("CONSTRUCT_TEST_CLI"))
    else {
        eprintln!(
            "SKIPPED: CONSTRUCT_TEST_CLIENTS and CONSTRUCT_TEST_CLI are not set, so no login at a real issuer is tested; ./dev clients tests it"
        );
        return;
    };
    let mut issuer = Command::new("node")
        .arg(copy_beside_packages(&folder, "issuer.mjs"))
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("node is there");
    let mut lines = BufReader::new(issuer.stdout.take().expect("it is piped")).lines();
    let url =
        wait_for("the issuer says where it is", lines.next_line()).await.expect("it can be read");
    let url = url.expect("it has not ended");
    // One gateway accepts ID tokens, whose audience is the command line. The other accepts access
    // tokens, whose audience is the gateway.
    let config = |audience: &str| Config {
        gateway_oidc_issuer: Some(url.clone()),
        gateway_oidc_audience: Some(audience.to_owned()),
        gateway_oidc_client_id: Some("construct-cli".to_owned()),
        ..login_required()
    };
    let gateway = Gateway::start_with(config("construct-cli")).await;
    let other = Gateway::start_with(config("https://construct.example.com")).await;
    let script = copy_beside_packages(&folder, "login.mjs");
    let mut command = Command::new("node");
    command
        .arg(&script)
        .env("CONSTRUCT", construct)
        .env("CONSTRUCT_GATEWAY_URL", format!("http://{}", gateway.address))
        .env("CONSTRUCT_OTHER_GATEWAY_URL", format!("http://{}", other.address))
        .env("CONSTRUCT_ISSUER", url);
    run(&mut command, &script).await;
}
