//! `construct daemon` with `--launchd`, as on macOS, with a fake `launchctl`. What launchd itself
//! does with the file is not tested.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::Command,
};

use rustix::process::getuid;

use crate::{
    Finished, Machine,
    daemon::{Service, wait},
    read,
};

/// The loaded agent is stored in a file.
const LAUNCHCTL: &str = r#"
case $1:$2 in
print:gui/*/*) [ -e "$here/loaded" ] || { echo 'Could not find service' >&2; exit 113; } ;;
bootstrap:*)
  if [ -e "$here/refused" ]; then echo 'Bootstrap failed: 5: Input/output error' >&2; exit 5; fi
  cp "$3" "$here/loaded"
  ;;
bootout:*)
  rm "$here/loaded"
  if [ -e "$here/slow" ]; then echo 'Boot-out failed: 36: Operation now in progress' >&2; exit 36; fi
  ;;
esac
"#;

fn machine() -> Machine {
    let machine = Machine::new();
    machine.program("programs/launchctl", LAUNCHCTL);
    machine.program("checkout/dev", "");
    machine
}

fn agent(machine: &Machine) -> PathBuf {
    machine.path("Library/LaunchAgents/construct.mesh.plist")
}

/// The calls of launchctl without queries.
fn changes(machine: &Machine) -> Vec<String> {
    machine.calls("launchctl").into_iter().filter(|call| !call.starts_with("print ")).collect()
}

/// The calls that load the agent.
fn load_calls(machine: &Machine) -> [String; 2] {
    let domain = format!("gui/{}", getuid().as_raw());
    [
        format!("enable {domain}/construct.mesh"),
        format!("bootstrap {domain} {}", agent(machine).display()),
    ]
}

fn unload_call() -> String {
    format!("bootout gui/{}/construct.mesh", getuid().as_raw())
}

#[test]
fn install_writes_and_loads_the_agent_and_uninstall_removes_it() {
    let machine = machine();
    let agent = agent(&machine);
    let output = machine.run(&["daemon", "install", "--launchd"]).stdout();
    assert!(output.contains(&format!("written    {}\n", agent.display())), "{output}");
    assert!(output.contains("now and at each log-in"), "{output}");
    assert_eq!(machine.calls("dev"), ["build"]);
    assert_eq!(changes(&machine), load_calls(&machine));
    let text = read(&agent);
    for part in [
        format!(
            "<string>{}</string>\n    <string>daemon</string>\n",
            env!("CARGO_BIN_EXE_construct")
        ),
        format!(
            "<key>CONSTRUCT_DEV</key>\n    <string>{}</string>\n",
            machine.path("checkout/dev").display()
        ),
        format!(
            "<key>CONSTRUCT_HOME</key>\n    <string>{}</string>\n",
            machine.path("data").display()
        ),
        format!(
            "<key>PATH</key>\n    <string>{}:/usr/bin:/bin</string>\n",
            machine.path("programs").display()
        ),
        format!("<string>{}</string>\n", machine.path("Library/Logs/construct.log").display()),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }

    // Again, while launchd waits for its next attempt: the agent is reloaded.
    fs::remove_file(machine.path("launchctl.calls")).unwrap();
    let again = machine.run(&["daemon", "install", "--launchd"]).stdout();
    assert!(again.contains("unchanged  "), "{again}");
    let [enabled, bootstrapped] = load_calls(&machine);
    assert_eq!(changes(&machine), [unload_call(), enabled, bootstrapped]);

    // A running mesh is not stopped for a new file.
    fs::remove_file(machine.path("launchctl.calls")).unwrap();
    fs::create_dir_all(machine.path("data/run")).unwrap();
    let running = File::create(machine.path("data/run/daemon")).unwrap();
    running.lock().unwrap();
    let runs = machine.run(&["daemon", "install", "--launchd"]).stdout();
    assert!(runs.contains("the mesh runs"), "{runs}");
    let mut other = machine.command(&["daemon", "install", "--launchd"]);
    let changed =
        Finished::from_output(other.env("CONSTRUCT_HOME", machine.path("other")).output().unwrap())
            .stdout();
    assert!(
        changed.contains("replaced   ") && changed.contains("construct daemon stop"),
        "{changed}"
    );
    assert!(changes(&machine).is_empty());
    drop(running);

    let removed = machine.run(&["daemon", "uninstall", "--launchd"]).stdout();
    assert!(
        removed.contains(&format!("the data stays in {}", machine.path("other").display())),
        "{removed}"
    );
    assert!(!agent.exists());
    assert_eq!(changes(&machine), [unload_call()]);
    assert_eq!(
        machine.run(&["daemon", "uninstall", "--launchd"]).stdout(),
        "nothing is installed\n"
    );
}

#[test]
fn agent_file_is_printed_or_written_without_loading() {
    let machine = machine();
    let agent = agent(&machine);
    let printed = machine.run(&["daemon", "install", "--print", "--launchd"]).stdout();
    assert!(!agent.exists() && printed.starts_with("<?xml "), "{printed}");
    let output = machine.run(&["daemon", "install", "--no-start", "--launchd"]).stdout();
    assert!(output.contains("launchctl bootstrap gui/$(id -u) "), "{output}");
    assert_eq!(printed, read(&agent), "the printed file is valid");
    assert!(machine.calls("launchctl").is_empty() && machine.calls("dev").is_empty());
    // The check of macOS, where available.
    if let Ok(done) = Command::new("plutil").arg("-lint").arg(&agent).output() {
        Finished::from_output(done).stdout();
    }
}

#[test]
fn foreign_agent_file_is_replaced_only_with_force() {
    let machine = machine();
    let agent = agent(&machine);
    fs::create_dir_all(agent.parent().unwrap()).unwrap();
    fs::write(&agent, "<plist/>\n").unwrap();
    for command in ["install", "uninstall"] {
        let refused = machine.run(&["daemon", command, "--launchd"]).stderr(1);
        assert!(
            refused.contains("construct.mesh.plist exists") && refused.contains("--force"),
            "{refused}"
        );
    }
    assert!(machine.calls("dev").is_empty() && changes(&machine).is_empty());
    assert_eq!(read(&agent), "<plist/>\n");
    machine.run(&["daemon", "install", "--force", "--launchd"]).stdout();
    assert!(read(&agent).contains("<key>KeepAlive</key>"));
}

#[test]
fn launchd_errors_are_reported_and_uninstall_works_without_it() {
    let machine = machine();
    let agent = agent(&machine);
    fs::write(machine.path("refused"), "").unwrap();
    let refused = machine.run(&["daemon", "install", "--launchd"]).stderr(1);
    assert!(
        refused.contains("launchctl bootstrap gui/") && refused.contains("Input/output error"),
        "{refused}"
    );
    assert!(
        machine.run(&["daemon", "status", "--launchd"]).output.contains("agent    not loaded\n")
    );

    let without = |arguments: &[&str]| {
        let mut command = machine.command(arguments);
        Finished::from_output(command.env("PATH", machine.path("config")).output().unwrap())
    };
    let refused = without(&["daemon", "install", "--launchd"]).stderr(1);
    assert!(
        refused.contains("there is no launchctl") && refused.contains("construct daemon run"),
        "{refused}"
    );
    let status = without(&["daemon", "status", "--launchd"]);
    assert!(
        status.code == Some(3) && status.output.contains("there is no launchctl"),
        "{status:?}"
    );
    let removed = without(&["daemon", "uninstall", "--launchd"]);
    assert!(removed.errors.contains("only the file is removed"), "{removed:?}");
    removed.stdout();
    assert!(!agent.exists());
}

#[test]
fn stop_unloads_the_agent_before_the_daemon_ends() {
    let service = Service::new();
    let machine = &service.machine;
    machine.program("programs/launchctl", LAUNCHCTL);
    machine.run(&["daemon", "install", "--launchd"]).stdout();
    let run = service.start();
    assert_eq!(service.notification(), "READY=1");
    let status = machine.run(&["daemon", "status", "--launchd"]).stdout();
    assert!(
        status.contains("agent    loaded\n") && status.contains(&format!("(process {})", run.id())),
        "{status}"
    );
    fs::write(machine.path("slow"), "").unwrap();
    // Works in any directory: the file names the data directory.
    let mut stop = machine.command(&["daemon", "stop", "--launchd"]);
    let stop = stop.env_remove("CONSTRUCT_DEV").env_remove("CONSTRUCT_HOME").current_dir("/");
    let output = Finished::from_output(stop.output().unwrap()).stdout();
    assert!(
        output.starts_with("the mesh has stopped; construct daemon install starts it again"),
        "{output}"
    );
    assert_eq!(service.notification(), "STOPPING=1");
    wait(run).stdout();
    assert_eq!(service.calls(), ["build", "up --built", "watch", "down"]);
    assert_eq!(changes(machine).last(), Some(&unload_call()));
    assert_eq!(machine.run(&["daemon", "stop", "--launchd"]).stdout(), "the daemon does not run\n");
}
