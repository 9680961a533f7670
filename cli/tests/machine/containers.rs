//! `deploy/docker/mesh`, which runs the mesh where `./dev` cannot, with a script in the place of
//! `docker`.

use std::{fs, path::Path};

use crate::{Done, Machine};

/// The containers that run are the lines of a file, which are told once.
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

/// With the script in the place of `./dev`, and data where it belongs when nothing is said.
fn run(machine: &Machine, arguments: &[&str]) -> Done {
    let mut command = machine.command(arguments);
    let command = command
        .env("CONSTRUCT_DEV", machine.path("checkout/deploy/docker/mesh"))
        .env_remove("CONSTRUCT_HOME");
    Done::of(command.output().unwrap())
}

#[test]
fn the_mesh_in_containers_is_run_and_ends_when_they_are_stopped() {
    let machine = machine();
    run(&machine, &["daemon", "run"]).said();
    let calls = [
        "up --no-build --detach --wait",
        "ps --status running --quiet",
        "ps --status running --quiet",
        "stop",
    ];
    assert_eq!(machine.calls("docker"), calls.map(|call| format!("{COMPOSE} {call}")));
    assert_eq!(machine.calls("sleep").len(), 1, "while some run, it waits");
    assert!(
        machine.path("checkout/.construct/run/daemon").exists(),
        "what is the daemon's lies in the checkout"
    );
    assert!(machine.calls("secrets").is_empty());
}

#[test]
fn it_fails_without_docker_so_that_it_is_started_anew() {
    let machine = machine();
    fs::write(machine.path("broken"), "").unwrap();
    let errors = run(&machine, &["daemon", "run"]).complained(1);
    assert!(
        errors.contains("Cannot connect to the Docker daemon") && errors.contains("mesh watch: "),
        "{errors}"
    );
}

#[test]
fn passwords_and_keys_are_made_before_anything_is_built() {
    let machine = machine();
    run(&machine, &["up"]).said();
    run(&machine, &["down"]).said();
    machine.program("programs/launchctl", "");
    run(&machine, &["daemon", "install", "--launchd"]).said();
    let calls =
        ["up --build --detach --wait", "stop", "build"].map(|call| format!("{COMPOSE} {call}"));
    assert_eq!(machine.calls("docker"), calls);
    assert_eq!(machine.calls("secrets").len(), 2);
}
