//! Keys of contexts, with a script in the place of `secret-tool`.

use std::{fs, os::unix::fs::PermissionsExt as _};

use crate::{Done, Machine, read};

/// Keeps each secret in a file.
const KEYRING: &str = r#"
for item; do :; done
case $1 in
store) cat >"$here/secret.$item" ;;
lookup) cat "$here/secret.$item" 2>/dev/null || exit 1 ;;
clear) rm "$here/secret.$item" 2>/dev/null || exit 1 ;;
esac
"#;

const NONE: &str = "echo 'secret-tool: Cannot autolaunch D-Bus without X11 $DISPLAY' >&2; exit 1";

const KEY: &str = "ct_0123456789";

fn add(machine: &Machine, name: &str, more: &[&str]) -> Done {
    let arguments =
        [&["context", "add", name, "--address", "http://127.0.0.1:1", "--key-stdin"], more]
            .concat();
    machine.run_with(&arguments, &format!("{KEY}\n"))
}

/// The secrets that the keyring holds.
fn secrets(machine: &Machine) -> Vec<String> {
    let entries = fs::read_dir(machine.path("")).unwrap().map(|entry| entry.unwrap());
    let held = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("secret."));
    held.map(|entry| read(&entry.path())).collect()
}

fn file(machine: &Machine) -> String {
    let path = machine.path("config/construct/contexts.json");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    read(&path)
}

#[test]
fn a_key_lies_in_the_keyring_and_goes_with_its_context() {
    let machine = Machine::new();
    machine.program("programs/secret-tool", KEYRING);
    let added = add(&machine, "work", &[]);
    assert!(added.errors.contains("the key of work is in the keyring"), "{added:?}");
    added.said();
    assert_eq!(secrets(&machine), [KEY]);
    assert!(!file(&machine).contains(KEY) && file(&machine).contains("\"keyring\""));
    let listed = machine.run(&["context", "list"]).said();
    assert!(listed.starts_with("* work ") && listed.contains("key in the keyring"), "{listed}");

    // It is taken from there when it is needed, and only then.
    let lookups =
        || machine.calls("secret-tool").iter().filter(|call| call.starts_with("lookup ")).count();
    let before = lookups();
    machine.run(&["version"]).said();
    Done::of(machine.command(&["task", "list"]).env("CONSTRUCT_KEY", "ct_other").output().unwrap())
        .complained(3);
    assert_eq!(lookups(), before);
    machine.run(&["task", "list"]).complained(3);
    assert_eq!(lookups(), before + 1);

    // A new key takes the old one's place.
    add(&machine, "work", &[]).said();
    assert_eq!(secrets(&machine), [KEY]);
    machine.run(&["context", "remove", "work"]).said();
    assert!(secrets(&machine).is_empty());
    assert!(!machine.calls("secret-tool").join("\n").contains(KEY), "it stood on a command line");
}

#[test]
fn without_a_keyring_a_key_lies_in_the_file_and_that_is_said() {
    let machine = Machine::new();
    machine.program("programs/secret-tool", NONE);
    let added = add(&machine, "work", &[]);
    assert!(
        added.errors.contains("contexts.json, which only you may read (secret-tool: Cannot auto"),
        "{added:?}"
    );
    added.said();
    assert!(file(&machine).contains(KEY));
    assert!(machine.run(&["context", "list"]).said().contains("key in the file"));
    let refused = add(&machine, "other", &["--keyring", "always"]).complained(1);
    assert!(
        refused.contains("does not take the key") && refused.contains("--keyring never"),
        "{refused}"
    );
    assert!(!file(&machine).contains("other"), "it is not remembered by halves");

    // Who wants none is not asked; and what lies in the file stays there when there is one later.
    machine.program("programs/secret-tool", KEYRING);
    fs::remove_file(machine.path("secret-tool.calls")).unwrap();
    let mut never = machine.command(&[
        "context",
        "add",
        "third",
        "--address",
        "http://127.0.0.1:1",
        "--key-file",
    ]);
    fs::write(machine.path("key"), KEY).unwrap();
    Done::of(never.arg(machine.path("key")).env("CONSTRUCT_KEYRING", "never").output().unwrap())
        .said();
    machine.run(&["task", "list"]).complained(3);
    machine.run(&["context", "remove", "work"]).said();
    assert!(machine.calls("secret-tool").is_empty());
    assert_eq!(file(&machine).matches(KEY).count(), 1);
}

#[test]
fn a_key_that_the_keyring_has_lost_or_keeps_to_itself_is_said_to_be() {
    let machine = Machine::new();
    machine.program("programs/secret-tool", KEYRING);
    add(&machine, "work", &["--keyring", "always"]).said();
    let item = file(&machine);
    machine.program("programs/secret-tool", NONE);
    let locked = machine.run(&["task", "list"]).complained(1);
    assert!(
        locked.contains("does not give the key of work") && locked.contains("Cannot autolaunch"),
        "{locked}"
    );
    fs::remove_file(machine.path("programs/secret-tool")).unwrap();
    machine.program("programs/secret-tool", KEYRING);
    let id = item.split("\"keyring\": \"").nth(1).unwrap().split('"').next().unwrap();
    fs::remove_file(machine.path(&format!("secret.{id}"))).unwrap();
    let lost = machine.run(&["--context", "work", "task", "list"]).complained(2);
    assert!(
        lost.contains("the key of work is not in the keyring any more")
            && lost.contains("context add work"),
        "{lost}"
    );
    // What is not there need not be removed; what cannot be is said to stay.
    machine.run(&["context", "remove", "work"]).said();
    add(&machine, "work", &[]).said();
    machine.program("programs/secret-tool", NONE);
    let stays = machine.run(&["context", "remove", "work"]).complained(1);
    assert!(stays.contains("stays in the keyring"), "{stays}");
    assert!(!file(&machine).contains("work"));
}
