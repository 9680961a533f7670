//! `construct daemon install` and `uninstall`, with a script in the place of `systemctl`.

use std::{fs, os::unix::fs::symlink, path::PathBuf, process::Command};

use crate::{Done, Machine, read};

/// Units are in the states that are written into files of their names.
const SYSTEMCTL: &str = r#"
case $2 in
is-active | is-enabled) cat "$here/$2.$3" 2>/dev/null || { echo inactive; exit 3; } ;;
disable) if [ -e "$here/refused" ]; then echo 'Failed to disable unit' >&2; exit 1; fi ;;
esac
"#;

fn machine() -> Machine {
    let machine = Machine::new();
    machine.program("programs/systemctl", SYSTEMCTL);
    machine.program("checkout/dev", "");
    machine
}

fn units(machine: &Machine) -> [PathBuf; 2] {
    ["construct.service", "construct.socket"]
        .map(|name| machine.path("config/systemd/user").join(name))
}

/// What systemd was told, without what it was only asked.
fn told(machine: &Machine) -> Vec<String> {
    let calls = machine.calls("systemctl").into_iter();
    let told = calls.filter(|call| !call.contains(" is-") && !call.contains("show-environment"));
    told.map(|call| call.strip_prefix("--user ").expect("the person's own systemd").to_owned())
        .collect()
}

#[test]
fn what_is_installed_is_written_listened_for_and_removed_again() {
    let machine = machine();
    let [service, socket] = units(&machine);
    let said = machine.run(&["daemon", "install"]).said();
    for path in [&service, &socket] {
        assert!(said.contains(&format!("written    {}", path.display())), "{said}");
    }
    let address = machine.path("runtime/construct/gateway.socket");
    assert!(said.contains(&format!("unix:{}", address.display())), "{said}");
    assert_eq!(machine.calls("dev"), ["build"]);
    assert_eq!(told(&machine), ["daemon-reload", "enable --now construct.socket"]);
    let text = read(&service);
    for part in [
        format!("ExecStart=\"{}\" daemon run\n", env!("CARGO_BIN_EXE_construct")),
        format!("Environment=\"CONSTRUCT_DEV={}\"\n", machine.path("checkout/dev").display()),
        format!("Environment=\"CONSTRUCT_HOME={}\"\n", machine.path("data").display()),
        format!("EnvironmentFile=-{}\n", machine.path("config/construct/daemon.env").display()),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }

    // Again: nothing is new. With other settings: the service is, and what runs is not stopped for
    // it.
    let again = machine.run(&["daemon", "install"]).said();
    assert_eq!(again.matches("unchanged").count(), 2, "{again}");
    fs::write(machine.path("is-active.construct.service"), "active\n").unwrap();
    let mut other = machine.command(&["daemon", "install"]);
    let changed =
        Done::of(other.env("CONSTRUCT_HOME", machine.path("other")).output().unwrap()).said();
    assert!(changed.contains("replaced   ") && changed.contains("unchanged  "), "{changed}");
    assert!(changed.contains("systemctl --user restart construct.service"), "{changed}");
    assert!(!told(&machine).iter().any(|call| call.contains("restart")));

    fs::remove_file(machine.path("systemctl.calls")).unwrap();
    let gone = machine.run(&["daemon", "uninstall"]).said();
    assert!(
        gone.contains(&format!("the data stays in {}", machine.path("other").display())),
        "{gone}"
    );
    assert!(!service.exists() && !socket.exists());
    assert_eq!(
        told(&machine),
        ["disable --now construct.socket", "stop construct.service", "daemon-reload"]
    );
    assert_eq!(machine.run(&["daemon", "uninstall"]).said(), "nothing is installed\n");
}

#[test]
fn files_of_others_are_left_alone_unless_that_is_wanted() {
    let machine = machine();
    let [service, socket] = units(&machine);
    fs::create_dir_all(service.parent().unwrap()).unwrap();
    for foreign in ["[Service]\nExecStart=/bin/true\n", ""] {
        if foreign.is_empty() {
            // As `systemctl mask` does.
            fs::remove_file(&socket).unwrap();
            symlink("/dev/null", &socket).unwrap();
        } else {
            fs::write(&socket, foreign).unwrap();
        }
        for command in ["install", "uninstall"] {
            let refused = machine.run(&["daemon", command]).complained(1);
            assert!(
                refused.contains("construct.socket is there") && refused.contains("--force"),
                "{refused}"
            );
            assert!(!service.exists(), "nothing is done by halves");
        }
        assert!(machine.calls("dev").is_empty() && told(&machine).is_empty());
        assert_eq!(read(&socket), foreign);
    }
    machine.run(&["daemon", "install", "--force"]).said();
    assert!(read(&socket).contains("ListenStream=%t/construct/gateway.socket"));
    assert!(service.exists());
}

#[test]
fn files_can_be_shown_or_only_written() {
    let machine = machine();
    let [service, socket] = units(&machine);
    let shown = machine.run(&["daemon", "install", "--print"]).said();
    assert!(!service.exists() && shown.contains(&format!("# {}\n", service.display())), "{shown}");
    assert!(shown.contains("Type=notify") && shown.contains("[Socket]"), "{shown}");
    let said = machine.run(&["daemon", "install", "--no-start"]).said();
    assert!(
        service.exists() && socket.exists() && said.contains("systemctl --user daemon-reload"),
        "{said}"
    );
    assert!(machine.calls("systemctl").is_empty() && machine.calls("dev").is_empty());
    assert!(shown.contains(&read(&service)) && shown.contains(&read(&socket)));
    // What systemd itself says of them, where it can be asked.
    let mut verify = Command::new("systemd-analyze");
    verify
        .args(["--user", "verify"])
        .args([&service, &socket])
        .env("XDG_RUNTIME_DIR", machine.path("runtime"));
    if let Ok(done) = verify.output() {
        // A word that it does not know is only told.
        let done = Done::of(done);
        assert!(done.code == Some(0) && !done.errors.contains("construct."), "{done:?}");
    }
}

#[test]
fn without_systemd_it_is_said_what_can_be_done_instead() {
    let machine = machine();
    machine.program(
        "programs/systemctl",
        "echo 'Failed to connect to bus: No medium found' >&2; exit 1",
    );
    let [service, _] = units(&machine);
    let refused = machine.run(&["daemon", "install"]).complained(1);
    assert!(
        refused.contains("No medium found") && refused.contains("construct daemon run"),
        "{refused}"
    );
    assert!(!service.exists() && machine.calls("dev").is_empty());
    let mut nowhere = machine.command(&["daemon", "install"]);
    let refused =
        Done::of(nowhere.env("PATH", machine.path("config")).output().unwrap()).complained(1);
    assert!(refused.contains("there is no systemctl"), "{refused}");
    let status = machine.run(&["daemon", "status"]);
    assert!(status.code == Some(3) && status.output.contains("No medium found"), "{status:?}");
    // Files that are there can be removed all the same.
    machine.run(&["daemon", "install", "--no-start"]).said();
    let gone = machine.run(&["daemon", "uninstall"]);
    assert!(gone.errors.contains("only the files are removed"), "{gone:?}");
    gone.said();
    assert!(!service.exists());
}

#[test]
fn what_systemd_started_systemd_stops() {
    let machine = machine();
    fs::write(machine.path("is-active.construct.service"), "activating\n").unwrap();
    fs::write(machine.path("is-active.construct.socket"), "active\n").unwrap();
    let mut stop = machine.command(&["daemon", "stop"]);
    // From anywhere.
    let said = Done::of(stop.env_remove("CONSTRUCT_DEV").current_dir("/").output().unwrap()).said();
    assert_eq!(said, "the mesh has stopped; the next request starts it again\n");
    assert_eq!(told(&machine), ["stop construct.service"]);
    machine.run(&["daemon", "install", "--no-start"]).said();
    fs::write(machine.path("refused"), "").unwrap();
    let refused = machine.run(&["daemon", "uninstall"]).complained(1);
    assert!(refused.contains("Failed to disable unit"), "{refused}");
    assert!(units(&machine).iter().all(|path| path.exists()), "what still listens keeps its files");
}
