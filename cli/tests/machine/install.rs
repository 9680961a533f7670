//! `construct daemon install` and `uninstall`, with a fake `systemctl`.

use std::{fs, os::unix::fs::symlink, path::PathBuf, process::Command};

use crate::{Finished, Machine, read};

/// The states of units are in files with their names.
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

/// The calls of systemctl without queries.
fn changes(machine: &Machine) -> Vec<String> {
    let calls = machine.calls("systemctl").into_iter();
    let changes = calls.filter(|call| !call.contains(" is-") && !call.contains("show-environment"));
    changes
        .map(|call| call.strip_prefix("--user ").expect("the user's systemd").to_owned())
        .collect()
}

#[test]
fn install_writes_and_enables_units_and_uninstall_removes_them() {
    let machine = machine();
    let [service, socket] = units(&machine);
    let output = machine.run(&["daemon", "install"]).stdout();
    for path in [&service, &socket] {
        assert!(output.contains(&format!("written    {}", path.display())), "{output}");
    }
    let address = machine.path("runtime/construct/gateway.socket");
    assert!(output.contains(&format!("unix:{}", address.display())), "{output}");
    assert_eq!(machine.calls("dev"), ["build"]);
    assert_eq!(changes(&machine), ["daemon-reload", "enable --now construct.socket"]);
    let text = read(&service);
    for part in [
        format!("ExecStart=\"{}\" daemon run\n", env!("CARGO_BIN_EXE_construct")),
        format!("Environment=\"CONSTRUCT_DEV={}\"\n", machine.path("checkout/dev").display()),
        format!("Environment=\"CONSTRUCT_HOME={}\"\n", machine.path("data").display()),
        format!("EnvironmentFile=-{}\n", machine.path("config/construct/daemon.env").display()),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }

    // Again without changes. With other settings, the service is replaced; a running mesh is not
    // stopped.
    let again = machine.run(&["daemon", "install"]).stdout();
    assert_eq!(again.matches("unchanged").count(), 2, "{again}");
    fs::write(machine.path("is-active.construct.service"), "active\n").unwrap();
    let mut other = machine.command(&["daemon", "install"]);
    let changed =
        Finished::from_output(other.env("CONSTRUCT_HOME", machine.path("other")).output().unwrap())
            .stdout();
    assert!(changed.contains("replaced   ") && changed.contains("unchanged  "), "{changed}");
    assert!(changed.contains("systemctl --user restart construct.service"), "{changed}");
    assert!(!changes(&machine).iter().any(|call| call.contains("restart")));

    fs::remove_file(machine.path("systemctl.calls")).unwrap();
    let removed = machine.run(&["daemon", "uninstall"]).stdout();
    assert!(
        removed.contains(&format!("the data stays in {}", machine.path("other").display())),
        "{removed}"
    );
    assert!(!service.exists() && !socket.exists());
    assert_eq!(
        changes(&machine),
        ["disable --now construct.socket", "stop construct.service", "daemon-reload"]
    );
    assert_eq!(machine.run(&["daemon", "uninstall"]).stdout(), "nothing is installed\n");
}

#[test]
fn foreign_files_are_replaced_only_with_force() {
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
            let refused = machine.run(&["daemon", command]).stderr(1);
            assert!(
                refused.contains("construct.socket exists") && refused.contains("--force"),
                "{refused}"
            );
            assert!(!service.exists(), "nothing is installed partially");
        }
        assert!(machine.calls("dev").is_empty() && changes(&machine).is_empty());
        assert_eq!(read(&socket), foreign);
    }
    machine.run(&["daemon", "install", "--force"]).stdout();
    assert!(read(&socket).contains("ListenStream=%t/construct/gateway.socket"));
    assert!(service.exists());
}

#[test]
fn files_are_printed_or_written_without_starting() {
    let machine = machine();
    let [service, socket] = units(&machine);
    let printed = machine.run(&["daemon", "install", "--print"]).stdout();
    assert!(
        !service.exists() && printed.contains(&format!("# {}\n", service.display())),
        "{printed}"
    );
    assert!(printed.contains("Type=notify") && printed.contains("[Socket]"), "{printed}");
    let output = machine.run(&["daemon", "install", "--no-start"]).stdout();
    assert!(
        service.exists() && socket.exists() && output.contains("systemctl --user daemon-reload"),
        "{output}"
    );
    assert!(machine.calls("systemctl").is_empty() && machine.calls("dev").is_empty());
    assert!(printed.contains(&read(&service)) && printed.contains(&read(&socket)));
    // systemd's own check, where available.
    let mut verify = Command::new("systemd-analyze");
    verify
        .args(["--user", "verify"])
        .args([&service, &socket])
        .env("XDG_RUNTIME_DIR", machine.path("runtime"));
    if let Ok(done) = verify.output() {
        // Unknown directives are only warnings.
        let done = Finished::from_output(done);
        assert!(done.code == Some(0) && !done.errors.contains("construct."), "{done:?}");
    }
}

#[test]
fn missing_systemd_is_reported_with_alternatives() {
    let machine = machine();
    machine.program(
        "programs/systemctl",
        "echo 'Failed to connect to bus: No medium found' >&2; exit 1",
    );
    let [service, _] = units(&machine);
    let refused = machine.run(&["daemon", "install"]).stderr(1);
    assert!(
        refused.contains("No medium found") && refused.contains("construct daemon run"),
        "{refused}"
    );
    assert!(!service.exists() && machine.calls("dev").is_empty());
    let mut without_systemctl = machine.command(&["daemon", "install"]);
    let refused = Finished::from_output(
        without_systemctl.env("PATH", machine.path("config")).output().unwrap(),
    )
    .stderr(1);
    assert!(refused.contains("there is no systemctl"), "{refused}");
    let status = machine.run(&["daemon", "status"]);
    assert!(status.code == Some(3) && status.output.contains("No medium found"), "{status:?}");
    // Installed files can be removed all the same.
    machine.run(&["daemon", "install", "--no-start"]).stdout();
    let removed = machine.run(&["daemon", "uninstall"]);
    assert!(removed.errors.contains("only the files are removed"), "{removed:?}");
    removed.stdout();
    assert!(!service.exists());
}

#[test]
fn service_is_stopped_by_systemd() {
    let machine = machine();
    fs::write(machine.path("is-active.construct.service"), "activating\n").unwrap();
    fs::write(machine.path("is-active.construct.socket"), "active\n").unwrap();
    let mut stop = machine.command(&["daemon", "stop"]);
    // Works in any directory.
    let output =
        Finished::from_output(stop.env_remove("CONSTRUCT_DEV").current_dir("/").output().unwrap())
            .stdout();
    assert_eq!(output, "the mesh has stopped; the next request starts it again\n");
    assert_eq!(changes(&machine), ["stop construct.service"]);
    machine.run(&["daemon", "install", "--no-start"]).stdout();
    fs::write(machine.path("refused"), "").unwrap();
    let refused = machine.run(&["daemon", "uninstall"]).stderr(1);
    assert!(refused.contains("Failed to disable unit"), "{refused}");
    assert!(
        units(&machine).iter().all(|path| path.exists()),
        "a unit that cannot be disabled keeps its files"
    );
}
