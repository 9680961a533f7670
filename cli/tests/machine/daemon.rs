//! `construct daemon run` and `stop`, with a fake `./dev`.

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

use crate::{Finished, Machine};

/// The timeout of notifications, longer than any of them takes.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(120);

/// `up` and `watch` exit with the code written into their pipe. Without a pipe `up` exits at once.
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

/// A machine with a fake mesh and service manager.
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
        manager.set_read_timeout(Some(NOTIFY_TIMEOUT)).unwrap();
        let service = Self { machine, manager };
        service.pipe("watch");
        service
    }

    fn pipe(&self, name: &str) {
        assert!(Command::new("mkfifo").arg(self.machine.path(name)).status().unwrap().success());
    }

    pub(crate) fn start(&self) -> Child {
        self.machine
            .command(&["daemon", "run"])
            .env("NOTIFY_SOCKET", self.machine.path("manager"))
            .spawn()
            .unwrap()
    }

    /// The first line of the next notification to the service manager.
    pub(crate) fn notification(&self) -> String {
        let mut text = [0; 256];
        let length = self.manager.recv(&mut text).unwrap();
        std::str::from_utf8(&text[..length]).unwrap().lines().next().unwrap().to_owned()
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.machine.calls("dev")
    }
}

pub(crate) fn wait(child: Child) -> Finished {
    Finished::from_output(child.wait_with_output().unwrap())
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn daemon_runs_until_it_is_stopped() {
    let service = Service::new();
    let run = service.start();
    assert_eq!(service.notification(), "READY=1");
    let status = service.machine.run(&["daemon", "status"]).stdout();
    assert!(status.contains(&format!("daemon   runs (process {})", run.id())), "{status}");
    let second = service.machine.run(&["daemon", "run"]).stderr(1);
    assert!(second.contains(&format!("(process {})", run.id())), "{second}");
    assert_eq!(service.machine.run(&["daemon", "stop"]).stdout(), "the mesh has stopped\n");
    assert_eq!(service.notification(), "STOPPING=1");
    wait(run).stdout();
    assert_eq!(service.calls(), ["up --built", "watch", "down"]);
    let environment = crate::read(&service.machine.path("dev.environment"));
    assert!(
        environment.contains("DEV_DAEMON=1") && environment.contains("DEV_LISTEN_FDS=0"),
        "{environment}"
    );
    assert!(!environment.contains("NOTIFY_SOCKET"), "it is only for the daemon: {environment}");
    assert_eq!(service.machine.run(&["daemon", "stop"]).stdout(), "the daemon does not run\n");
    assert!(service.machine.run(&["daemon", "status"]).stderr(3).is_empty());
}

#[test]
fn exit_of_the_mesh_sets_the_exit_code() {
    for (exit_code, code) in [("1\n", 1), ("0\n", 0)] {
        let service = Service::new();
        let run = service.start();
        assert_eq!(service.notification(), "READY=1");
        fs::write(service.machine.path("watch"), exit_code).unwrap();
        assert_eq!(service.notification(), "STOPPING=1");
        let done = wait(run);
        assert_eq!(done.code, Some(code), "{done:?}");
        assert_eq!(done.errors.contains("dev watch: exit status: 1"), code == 1, "{done:?}");
        assert_eq!(service.calls(), ["up --built", "watch", "down"]);
    }
}

#[test]
fn failed_start_stops_everything() {
    let service = Service::new();
    service.pipe("up");
    let run = service.start();
    fs::write(service.machine.path("up"), "7\n").unwrap();
    assert_eq!(service.notification(), "STOPPING=1");
    let errors = wait(run).stderr(1);
    assert!(errors.contains("dev up: exit status: 7"), "{errors}");
    assert_eq!(service.calls(), ["up --built", "down"]);
}

#[test]
fn signal_interrupts_the_start() {
    for stop in [Signal::TERM, Signal::INT] {
        let service = Service::new();
        service.pipe("up");
        let run = service.start();
        // Blocks until the script has opened it.
        let pipe = fs::File::create(service.machine.path("up")).unwrap();
        signal(&run, stop);
        assert_eq!(service.notification(), "STOPPING=1");
        wait(run).stdout();
        assert_eq!(service.calls(), ["up --built", "down"]);
        drop(pipe);
    }
}

#[test]
fn passed_socket_is_inherited_by_the_mesh() {
    let service = Service::new();
    let listener = UnixListener::bind(service.machine.path("socket")).unwrap();
    for (pid, passed) in [("$$", "1"), ("1", "0")] {
        // As systemd does: the socket at 3, and the receiver's process id.
        let script = format!(
            "exec 3<&0 </dev/null; LISTEN_PID={pid} LISTEN_FDS=1 LISTEN_FDNAMES=x exec \"$0\" daemon run"
        );
        let mut command = Command::new("/bin/sh");
        service.machine.set_environment(&mut command);
        let run = command
            .args(["-c", &script, env!("CARGO_BIN_EXE_construct")])
            .env("NOTIFY_SOCKET", service.machine.path("manager"))
            .stdin(Stdio::from(OwnedFd::from(listener.try_clone().unwrap())))
            .spawn()
            .unwrap();
        assert_eq!(service.notification(), "READY=1");
        let environment = crate::read(&service.machine.path("dev.environment"));
        assert!(environment.contains(&format!("DEV_LISTEN_FDS={passed}")), "{environment}");
        assert!(
            !environment.lines().any(|line| line.starts_with("LISTEN_")),
            "they are for another process: {environment}"
        );
        assert!(crate::read(&service.machine.path("dev.socket")).starts_with("socket:["));
        signal(&run, Signal::TERM);
        assert_eq!(service.notification(), "STOPPING=1");
        wait(run).stdout();
        fs::remove_file(service.machine.path("dev.environment")).unwrap();
    }
}
