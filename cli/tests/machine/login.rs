//! Stored sessions, used without a gateway and an issuer. `cli/src/login/tests.rs` and `./dev
//! clients` test the log-in with an issuer.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
};

use serde_json::{Value, json};

use crate::{Finished, Machine, read};

/// Finds and removes secrets in files.
const KEYRING: &str = r#"
for item; do :; done
case $1 in
lookup) cat "$here/secret.$item" 2>/dev/null || exit 1 ;;
clear) rm "$here/secret.$item" 2>/dev/null || exit 1 ;;
esac
"#;

fn session(refresh: Option<&str>, until: &str) -> String {
    let mut session = json!({"token": "t0ken", "until": until});
    if let Some(refresh) = refresh {
        session["refresh"] = refresh.into();
    }
    session.to_string()
}

/// Writes a context with a log-in. Its gateway and its issuer are unreachable.
fn write_context(machine: &Machine, location: &str, value: &str) {
    let login =
        json!({"issuer": "http://127.0.0.1:1", "client_id": "cli", "audience": "construct"});
    let context = json!({"address": "http://127.0.0.1:1", location: value, "login": login});
    let file = json!({"current": "work", "contexts": {"work": context}}).to_string();
    fs::create_dir_all(machine.path("config/construct")).unwrap();
    let path = machine.path("config/construct/contexts.json");
    let mut options = OpenOptions::new();
    let mut file_handle =
        options.write(true).create(true).truncate(true).mode(0o600).open(path).unwrap();
    file_handle.write_all(file.as_bytes()).unwrap();
}

fn stored_context(machine: &Machine) -> Value {
    let file: Value =
        serde_json::from_str(&read(&machine.path("config/construct/contexts.json"))).unwrap();
    file["contexts"]["work"].clone()
}

#[test]
fn session_is_used_until_it_expires() {
    let machine = Machine::new();
    write_context(&machine, "key", &session(None, "2999-01-01T00:00:00Z"));
    let listed = machine.run(&["context", "list"]).stdout();
    assert!(listed.contains("log-in in the file") && !listed.contains("t0ken"), "{listed}");
    let unreachable = machine.run(&["task", "list"]).stderr(3);
    assert!(unreachable.contains("the gateway cannot be reached"), "{unreachable}");

    write_context(&machine, "key", &session(None, "2020-01-01T00:00:00Z"));
    let expired = machine.run(&["task", "list"]).stderr(1);
    assert!(
        expired.contains("the log-in of work has expired")
            && expired.contains("construct login --context work"),
        "{expired}"
    );
    // A renewable session does not expire because the issuer is unreachable.
    write_context(&machine, "key", &session(Some("refr3sh"), "2020-01-01T00:00:00Z"));
    let unreachable = machine.run(&["task", "list"]).stderr(3);
    assert!(
        unreachable.contains("the issuer cannot be reached") && !unreachable.contains("refr3sh"),
        "{unreachable}"
    );
    // A key has priority; the session is not renewed then.
    let by_key =
        machine.command(&["task", "list"]).env("CONSTRUCT_KEY", "ct_other").output().unwrap();
    let by_key = Finished::from_output(by_key).stderr(3);
    assert!(by_key.contains("the gateway cannot be reached"), "{by_key}");
    write_context(&machine, "key", "not a written session");
    let invalid = machine.run(&["task", "list"]).stderr(2);
    assert!(
        invalid.contains("construct login --context work") && !invalid.contains("written"),
        "{invalid}"
    );
}

#[test]
fn logout_deletes_the_session_from_file_and_keyring() {
    let machine = Machine::new();
    let session = session(Some("refr3sh"), "2999-01-01T00:00:00Z");
    write_context(&machine, "key", &session);
    let out = machine.run(&["logout"]);
    assert!(out.errors.contains("warning: the session is not revoked"), "{out:?}");
    assert_eq!(out.stdout(), "logged out of work\n");
    assert_eq!(stored_context(&machine), json!({"address": "http://127.0.0.1:1"}));
    let repeated = machine.run(&["logout"]).stderr(2);
    assert!(repeated.contains("the context work has no log-in"), "{repeated}");

    machine.program("programs/secret-tool", KEYRING);
    fs::write(machine.path("secret.i"), &session).unwrap();
    write_context(&machine, "keyring", "i");
    assert!(machine.run(&["context", "list"]).stdout().contains("log-in in the keyring"));
    machine.run(&["task", "list"]).stderr(3);
    machine.run(&["logout"]).stdout();
    assert!(!machine.path("secret.i").exists());
    assert_eq!(stored_context(&machine), json!({"address": "http://127.0.0.1:1"}));
}

#[test]
fn failed_login_reports_the_reason_and_changes_nothing() {
    let machine = Machine::new();
    let no_context = machine.run(&["login"]).stderr(2);
    assert!(
        no_context.contains("no context is selected")
            && no_context.contains("construct context add"),
        "{no_context}"
    );
    machine.run(&["context", "add", "work", "--address", "http://127.0.0.1:1"]).stdout();
    let unreachable = machine.run(&["login"]).stderr(3);
    assert!(unreachable.contains("the gateway cannot be reached"), "{unreachable}");
    let other = machine.run(&["--gateway", "http://127.0.0.1:2", "login"]).stderr(2);
    assert!(other.contains("the context work is for http://127.0.0.1:1"), "{other}");

    machine.run(&["context", "add", "socket", "--address", "unix:/nowhere"]).stdout();
    let socket = machine.run(&["login", "--context", "socket"]).stderr(2);
    assert!(socket.contains("is the operator"), "{socket}");
    let add = [
        "context",
        "add",
        "work",
        "--address",
        "http://127.0.0.1:1",
        "--key-stdin",
        "--keyring",
        "never",
    ];
    machine.run_with(&add, "ct_0123456789\n").stdout();
    let keyed = machine.run(&["login"]).stderr(2);
    assert!(keyed.contains("the context work has an API key"), "{keyed}");
    assert_eq!(stored_context(&machine)["key"], "ct_0123456789");
}
