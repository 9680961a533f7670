//! Keys of contexts, with a fake `secret-tool`.

use std::{fs, os::unix::fs::PermissionsExt as _};

use crate::{Finished, Machine, read};

/// Stores each secret in a file.
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

fn add(machine: &Machine, name: &str, more: &[&str]) -> Finished {
    let arguments =
        [&["context", "add", name, "--address", "http://127.0.0.1:1", "--key-stdin"], more]
            .concat();
    machine.run_with(&arguments, &format!("{KEY}\n"))
}

/// The secrets in the keyring.
fn secrets(machine: &Machine) -> Vec<String> {
    let entries = fs::read_dir(machine.path("")).unwrap().map(|entry| entry.unwrap());
    let secrets =
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("secret."));
    secrets.map(|entry| read(&entry.path())).collect()
}

fn file(machine: &Machine) -> String {
    let path = machine.path("config/construct/contexts.json");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    read(&path)
}

#[test]
fn key_is_stored_in_the_keyring_and_removed_with_its_context() {
    let machine = Machine::new();
    machine.program("programs/secret-tool", KEYRING);
    let added = add(&machine, "work", &[]);
    assert!(added.errors.contains("the key of work is in the keyring"), "{added:?}");
    added.stdout();
    assert_eq!(secrets(&machine), [KEY]);
    assert!(!file(&machine).contains(KEY) && file(&machine).contains("\"keyring\""));
    let listed = machine.run(&["context", "list"]).stdout();
    assert!(listed.starts_with("* work ") && listed.contains("key in the keyring"), "{listed}");

    // It is read only when it is needed.
    let lookups =
        || machine.calls("secret-tool").iter().filter(|call| call.starts_with("lookup ")).count();
    let before = lookups();
    machine.run(&["version"]).stdout();
    Finished::from_output(
        machine.command(&["task", "list"]).env("CONSTRUCT_KEY", "ct_other").output().unwrap(),
    )
    .stderr(3);
    assert_eq!(lookups(), before);
    machine.run(&["task", "list"]).stderr(3);
    assert_eq!(lookups(), before + 1);

    // A new key replaces the old one.
    add(&machine, "work", &[]).stdout();
    assert_eq!(secrets(&machine), [KEY]);
    machine.run(&["context", "remove", "work"]).stdout();
    assert!(secrets(&machine).is_empty());
    assert!(!machine.calls("secret-tool").join("\n").contains(KEY), "it was on a command line");
}

#[test]
fn key_is_stored_in_the_file_without_a_keyring() {
    let machine = Machine::new();
    machine.program("programs/secret-tool", NONE);
    let added = add(&machine, "work", &[]);
    assert!(
        added.errors.contains("contexts.json, which only you may read (secret-tool: Cannot auto"),
        "{added:?}"
    );
    added.stdout();
    assert!(file(&machine).contains(KEY));
    assert!(machine.run(&["context", "list"]).stdout().contains("key in the file"));
    let refused = add(&machine, "other", &["--keyring", "always"]).stderr(1);
    assert!(
        refused.contains("does not store the key") && refused.contains("--keyring never"),
        "{refused}"
    );
    assert!(!file(&machine).contains("other"), "nothing is stored partially");

    // With `never`, the keyring is not used. A key in the file stays there.
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
    Finished::from_output(
        never.arg(machine.path("key")).env("CONSTRUCT_KEYRING", "never").output().unwrap(),
    )
    .stdout();
    machine.run(&["task", "list"]).stderr(3);
    machine.run(&["context", "remove", "work"]).stdout();
    assert!(machine.calls("secret-tool").is_empty());
    assert_eq!(file(&machine).matches(KEY).count(), 1);
}

#[test]
fn lost_or_inaccessible_key_is_reported() {
    let machine = Machine::new();
    machine.program("programs/secret-tool", KEYRING);
    add(&machine, "work", &["--keyring", "always"]).stdout();
    let item = file(&machine);
    machine.program("programs/secret-tool", NONE);
    let locked = machine.run(&["task", "list"]).stderr(1);
    assert!(
        locked.contains("does not return the key of work") && locked.contains("Cannot autolaunch"),
        "{locked}"
    );
    fs::remove_file(machine.path("programs/secret-tool")).unwrap();
    machine.program("programs/secret-tool", KEYRING);
    let id = item.split("\"keyring\": \"").nth(1).unwrap().split('"').next().unwrap();
    fs::remove_file(machine.path(&format!("secret.{id}"))).unwrap();
    let lost = machine.run(&["--context", "work", "task", "list"]).stderr(2);
    assert!(
        lost.contains("the key of work is no longer in the keyring")
            && lost.contains("context add work"),
        "{lost}"
    );
    // A missing key is ignored; a key that cannot be removed is reported.
    machine.run(&["context", "remove", "work"]).stdout();
    add(&machine, "work", &[]).stdout();
    machine.program("programs/secret-tool", NONE);
    let stays = machine.run(&["context", "remove", "work"]).stderr(1);
    assert!(stays.contains("stays in the keyring"), "{stays}");
    assert!(!file(&machine).contains("work"));
}
