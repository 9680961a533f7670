//! `construct daemon run` and `stop`, with a script in the place of `./dev`.

use std::{
    fs,
    os::{
        fd::OwnedFd,
        unix::net::{UnixDatagram, UnixListener},
    },
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{Done, Machine};

/// More than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// `up` and `watch` end with the code that is written into their pipe; `up` at once when it has
/// none.
const DEV: &str = r#"
env | grep -E '^(DEV_|LISTEN_|NOTIFY_|CONSTRUCT_HOME)' | sort >>"$here/dev.environment"
case $1 in
up)
  readlink "/proc/$$/fd/3" >"$here/dev.socket"
  if [ -p "$here/up" ]; then
    read -r code <"$here/up"
    exit "$code"
  fi
  ;;
watch)
  read -r code <"$here/watch"
  exit "$code"
  ;;
esac
exit 0
"#;

/// A machine on which the mesh can be run.
pub(crate) struct Service {
    pub(crate) machine: Machine,
    manager: UnixDatagram,
}

impl Service {
    pub(crate) fn new() -> Self {
        let machine = Machine::new();
        machine.program("checkout/dev", DEV);
        machine.program(
            "programs/systemctl",
            "echo 'Failed to connect to bus: No medium found' >&2; exit 1",
        );
        let manager = UnixDatagram::bind(machine.path("manager")).unwrap();
        manager.set_read_timeout(Some(PATIENCE)).unwrap();
        let service = Self { machine, manager };
        service.pipe("watch");
        service
    }

    fn pipe(&self, name: &str) {
        assert!(Command::new("mkfifo").arg(self.machine.path(name)).status().unwrap().success());
    }

    pub(crate) fn begin(&self) -> Child {
        self.machine
            .command(&["daemon", "run"])
            .env("NOTIFY_SOCKET", self.machine.path("manager"))
            .spawn()
            .unwrap()
    }

    /// The first line of what the service manager is told next.
    pub(crate) fn told(&self) -> String {
        let mut text = [0; 256];
        let length = self.manager.recv(&mut text).unwrap();
        std::str::from_utf8(&text[..length]).unwrap().lines().next().unwrap().to_owned()
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.machine.calls("dev")
    }
}

pub(crate) fn end(child: Child) -> Done {
    Done::of(child.wait_with_output().unwrap())
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn the_mesh_runs_until_somebody_says_stop() {
    let service = Service::new();
    let run = service.begin();
    assert_eq!(service.told(), "READY=1");
    let status = service.machine.run(&["daemon", "status"]).said();
    assert!(status.contains(&format!("daemon   runs (process {})", run.id())), "{status}");
    let second = service.machine.run(&["daemon", "run"]).complained(1);
    assert!(second.contains(&format!("already (process {})", run.id())), "{second}");
    assert_eq!(service.machine.run(&["daemon", "stop"]).said(), "the mesh has stopped\n");
    assert_eq!(service.told(), "STOPPING=1");
    end(run).said();
    assert_eq!(service.calls(), ["up --built", "watch", "down"]);
    let environment = crate::read(&service.machine.path("dev.environment"));
    assert!(
        environment.contains("DEV_DAEMON=1") && environment.contains("DEV_LISTEN_FDS=0"),
        "{environment}"
    );
    assert!(!environment.contains("NOTIFY_SOCKET"), "it is for the daemon alone: {environment}");
    assert_eq!(service.machine.run(&["daemon", "stop"]).said(), "the daemon does not run\n");
    assert!(service.machine.run(&["daemon", "status"]).complained(3).is_empty());
}

#[test]
fn what_ends_by_itself_is_a_failure_and_what_was_stopped_is_none() {
    for (written, code) in [("1\n", 1), ("0\n", 0)] {
        let service = Service::new();
        let run = service.begin();
        assert_eq!(service.told(), "READY=1");
        fs::write(service.machine.path("watch"), written).unwrap();
        assert_eq!(service.told(), "STOPPING=1");
        let done = end(run);
        assert_eq!(done.code, Some(code), "{done:?}");
        assert_eq!(done.errors.contains("dev watch: exit status: 1"), code == 1, "{done:?}");
        assert_eq!(service.calls(), ["up --built", "watch", "down"]);
    }
}

#[test]
fn what_does_not_start_is_a_failure_and_leaves_nothing() {
    let service = Service::new();
    service.pipe("up");
    let run = service.begin();
    fs::write(service.machine.path("up"), "7\n").unwrap();
    assert_eq!(service.told(), "STOPPING=1");
    let errors = end(run).complained(1);
    assert!(errors.contains("dev up: exit status: 7"), "{errors}");
    assert_eq!(service.calls(), ["up --built", "down"]);
}

#[test]
fn a_start_can_be_interrupted() {
    for wanted in [Signal::TERM, Signal::INT] {
        let service = Service::new();
        service.pipe("up");
        let run = service.begin();
        // Opened by us only when the script has it open.
        let pipe = fs::File::create(service.machine.path("up")).unwrap();
        signal(&run, wanted);
        assert_eq!(service.told(), "STOPPING=1");
        end(run).said();
        assert_eq!(service.calls(), ["up --built", "down"]);
        drop(pipe);
    }
}

#[test]
fn a_socket_that_was_passed_is_passed_on() {
    let service = Service::new();
    let listener = UnixListener::bind(service.machine.path("socket")).unwrap();
    for (pid, passed) in [("$$", "1"), ("1", "0")] {
        // What systemd does: the socket at 3, and whom it is for.
        let script = format!(
            "exec 3<&0 </dev/null; LISTEN_PID={pid} LISTEN_FDS=1 LISTEN_FDNAMES=x exec \"$0\" daemon run"
        );
        let mut command = Command::new("/bin/sh");
        service.machine.furnish(&mut command);
        let run = command
            .args(["-c", &script, env!("CARGO_BIN_EXE_construct")])
            .env("NOTIFY_SOCKET", service.machine.path("manager"))
            .stdin(Stdio::from(OwnedFd::from(listener.try_clone().unwrap())))
            .spawn()
            .unwrap();
        assert_eq!(service.told(), "READY=1");
        let environment = crate::read(&service.machine.path("dev.environment"));
        assert!(environment.contains(&format!("DEV_LISTEN_FDS={passed}")), "{environment}");
        assert!(
            !environment.lines().any(|line| line.starts_with("LISTEN_")),
            "they name another process: {environment}"
        );
        assert!(crate::read(&service.machine.path("dev.socket")).starts_with("socket:["));
        signal(&run, Signal::TERM);
        assert_eq!(service.told(), "STOPPING=1");
        end(run).said();
        fs::remove_file(service.machine.path("dev.environment")).unwrap();
    }
}
