//! What is kept of a log-in, and what commands do with it while neither gateway nor issuer is
//! there. Logging in itself is tried against an issuer: `cli/src/login/tests.rs`, and `./dev
//! clients`.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
};

use serde_json::{Value, json};

use crate::{Done, Machine, read};

/// Keeps each secret in a file, and finds and removes it.
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

/// A context with which somebody has logged in. Nobody listens at its gateway, nor at the issuer.
fn logged_in(machine: &Machine, place: &str, what: &str) {
    let login =
        json!({"issuer": "http://127.0.0.1:1", "client_id": "cli", "audience": "construct"});
    let context = json!({"address": "http://127.0.0.1:1", place: what, "login": login});
    let file = json!({"current": "work", "contexts": {"work": context}}).to_string();
    fs::create_dir_all(machine.path("config/construct")).unwrap();
    let path = machine.path("config/construct/contexts.json");
    let mut options = OpenOptions::new();
    let mut written =
        options.write(true).create(true).truncate(true).mode(0o600).open(path).unwrap();
    written.write_all(file.as_bytes()).unwrap();
}

fn kept(machine: &Machine) -> Value {
    let file: Value =
        serde_json::from_str(&read(&machine.path("config/construct/contexts.json"))).unwrap();
    file["contexts"]["work"].clone()
}

#[test]
fn a_session_is_presented_while_it_lasts_and_said_to_be_over_after_that() {
    let machine = Machine::new();
    logged_in(&machine, "key", &session(None, "2999-01-01T00:00:00Z"));
    let listed = machine.run(&["context", "list"]).said();
    assert!(listed.contains("log-in in the file") && !listed.contains("t0ken"), "{listed}");
    let away = machine.run(&["task", "list"]).complained(3);
    assert!(away.contains("the gateway cannot be reached"), "{away}");

    logged_in(&machine, "key", &session(None, "2020-01-01T00:00:00Z"));
    let over = machine.run(&["task", "list"]).complained(1);
    assert!(
        over.contains("the log-in of work is over")
            && over.contains("construct login --context work"),
        "{over}"
    );
    // What can be renewed is not over because the issuer is away.
    logged_in(&machine, "key", &session(Some("refr3sh"), "2020-01-01T00:00:00Z"));
    let away = machine.run(&["task", "list"]).complained(3);
    assert!(away.contains("the issuer cannot be reached") && !away.contains("refr3sh"), "{away}");
    // A key goes before it, and nothing is renewed then.
    let by_key =
        machine.command(&["task", "list"]).env("CONSTRUCT_KEY", "ct_other").output().unwrap();
    let by_key = Done::of(by_key).complained(3);
    assert!(by_key.contains("the gateway cannot be reached"), "{by_key}");
    logged_in(&machine, "key", "what no log-in has written");
    let again = machine.run(&["task", "list"]).complained(2);
    assert!(
        again.contains("construct login --context work") && !again.contains("written"),
        "{again}"
    );
}

#[test]
fn a_log_out_forgets_the_session_wherever_it_lies() {
    let machine = Machine::new();
    let session = session(Some("refr3sh"), "2999-01-01T00:00:00Z");
    logged_in(&machine, "key", &session);
    let out = machine.run(&["logout"]);
    assert!(out.errors.contains("warning: the issuer is not told"), "{out:?}");
    assert_eq!(out.said(), "logged out of work\n");
    assert_eq!(kept(&machine), json!({"address": "http://127.0.0.1:1"}));
    let nobody = machine.run(&["logout"]).complained(2);
    assert!(nobody.contains("nobody is logged in with the context work"), "{nobody}");

    machine.program("programs/secret-tool", KEYRING);
    fs::write(machine.path("secret.i"), &session).unwrap();
    logged_in(&machine, "keyring", "i");
    assert!(machine.run(&["context", "list"]).said().contains("log-in in the keyring"));
    machine.run(&["task", "list"]).complained(3);
    machine.run(&["logout"]).said();
    assert!(!machine.path("secret.i").exists());
    assert_eq!(kept(&machine), json!({"address": "http://127.0.0.1:1"}));
}

#[test]
fn who_cannot_log_in_is_told_why_and_nothing_is_changed() {
    let machine = Machine::new();
    let nowhere = machine.run(&["login"]).complained(2);
    assert!(
        nowhere.contains("no context is used") && nowhere.contains("construct context add"),
        "{nowhere}"
    );
    machine.run(&["context", "add", "work", "--address", "http://127.0.0.1:1"]).said();
    let away = machine.run(&["login"]).complained(3);
    assert!(away.contains("the gateway cannot be reached"), "{away}");
    let other = machine.run(&["--gateway", "http://127.0.0.1:2", "login"]).complained(2);
    assert!(other.contains("the context work is of http://127.0.0.1:1"), "{other}");

    machine.run(&["context", "add", "socket", "--address", "unix:/nowhere"]).said();
    let socket = machine.run(&["login", "--context", "socket"]).complained(2);
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
    machine.run_with(&add, "ct_0123456789\n").said();
    let keyed = machine.run(&["login"]).complained(2);
    assert!(keyed.contains("the context work has an API key"), "{keyed}");
    assert_eq!(kept(&machine)["key"], "ct_0123456789");
}
