//! `deploy/docker/mesh`, which runs the mesh where `./dev` cannot, with a fake `docker`.

use std::{fs, path::Path};

use crate::{Finished, Machine};

/// The running containers are the lines of a file, which is reported once.
const DOCKER: &str = r#"
case "$*" in
*' ps '*) if [ -e "$here/broken" ]; then echo 'Cannot connect to the Docker daemon' >&2; exit 1; fi ;;
esac
case "$*" in
*' --status running --quiet')
  cat "$here/containers"
  : >"$here/containers"
  ;;
esac
"#;

const COMPOSE: &str = "compose --env-file .construct/compose.env";

fn machine() -> Machine {
    let machine = Machine::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("deploy/docker/mesh");
    for folder in ["deploy/docker", "scripts/dev"] {
        fs::create_dir_all(machine.path("checkout").join(folder)).unwrap();
    }
    fs::copy(source, machine.path("checkout/deploy/docker/mesh")).unwrap();
    fs::write(machine.path("checkout/scripts/dev/mesh.sh"), "").unwrap();
    fs::write(machine.path("containers"), "one\ntwo\n").unwrap();
    machine.program("checkout/deploy/docker/secrets", "");
    machine.program("programs/docker", DOCKER);
    machine.program("programs/sleep", "");
    machine
}

/// Runs a command with the script instead of `./dev`, and the default data directory.
fn run(machine: &Machine, arguments: &[&str]) -> Finished {
    let mut command = machine.command(arguments);
    let command = command
        .env("CONSTRUCT_DEV", machine.path("checkout/deploy/docker/mesh"))
        .env_remove("CONSTRUCT_HOME");
    Finished::from_output(command.output().unwrap())
}

#[test]
fn daemon_ends_when_the_containers_stop() {
    let machine = machine();
    run(&machine, &["daemon", "run"]).stdout();
    let calls = [
        "up --no-build --detach --wait",
        "ps --status running --quiet",
        "ps --status running --quiet",
        "stop",
    ];
    assert_eq!(machine.calls("docker"), calls.map(|call| format!("{COMPOSE} {call}")));
    assert_eq!(machine.calls("sleep").len(), 1, "waits while containers run");
    assert!(
        machine.path("checkout/.construct/run/daemon").exists(),
        "the daemon's files are in the checkout"
    );
    assert!(machine.calls("secrets").is_empty());
}

#[test]
fn daemon_fails_without_docker() {
    let machine = machine();
    fs::write(machine.path("broken"), "").unwrap();
    let errors = run(&machine, &["daemon", "run"]).stderr(1);
    assert!(
        errors.contains("Cannot connect to the Docker daemon") && errors.contains("mesh watch: "),
        "{errors}"
    );
}

#[test]
fn secrets_are_created_before_the_build() {
    let machine = machine();
    run(&machine, &["up"]).stdout();
    run(&machine, &["down"]).stdout();
    machine.program("programs/launchctl", "");
    run(&machine, &["daemon", "install", "--launchd"]).stdout();
    let calls =
        ["up --build --detach --wait", "stop", "build"].map(|call| format!("{COMPOSE} {call}"));
    assert_eq!(machine.calls("docker"), calls);
    assert_eq!(machine.calls("secrets").len(), 2);
}
