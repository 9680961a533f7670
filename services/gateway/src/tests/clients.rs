//! Clients that others wrote, in other languages: Google's gRPC for Python, and Buf's Connect for Node, which knows gRPC-Web and gRPC as well.

use std::{ffi::OsString, fs, path::PathBuf};

use construct_domain::{
    OrganizationId, UserId,
    access::{Role, Scope},
};
use tokio::process::Command;

use super::{
    harness::*,
    walk::{key, required},
};

/// Where they are installed: `CONSTRUCT_TEST_CLIENTS` names the folder that `./dev clients` makes.
#[tokio::test]
async fn clients_in_other_languages_work() {
    let Some(folder) = std::env::var_os("CONSTRUCT_TEST_CLIENTS").map(PathBuf::from) else {
        eprintln!(
            "LEFT OUT: CONSTRUCT_TEST_CLIENTS is not set, so no client in another language is tried; ./dev clients tries them"
        );
        return;
    };
    let gateway = Gateway::start_with(required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let (_, key) = key(&gateway, local, Role::Owner, &[Scope::Admin], None).await;
    let scripts = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/clients");
    // Node looks for packages beside the script.
    let script = folder.join("node/check.mjs");
    fs::copy(format!("{scripts}/check.mjs"), &script).unwrap_or_else(|error| panic!("{}: {error}", script.display()));
    for (program, script) in [
        (folder.join("python/bin/python").into_os_string(), PathBuf::from(format!("{scripts}/check.py"))),
        (OsString::from("node"), script),
    ] {
        let running = Command::new(&program)
            .arg(&script)
            .env("CONSTRUCT_GATEWAY_URL", format!("http://{}", gateway.address))
            .env("CONSTRUCT_KEY", &key)
            // A proxy of the person's is not the way to this machine.
            .env("no_proxy", "127.0.0.1")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .kill_on_drop(true)
            .output();
        let output = running.await.unwrap_or_else(|error| panic!("{} does not start: {error}", program.display()));
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}:\n{said}", script.display());
        println!("{said}");
    }
}
