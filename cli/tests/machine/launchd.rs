//! `construct daemon` with `--launchd`, as it is on macOS, with a script in the place of
//! `launchctl`. What launchd itself does with the file no test says.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::Command,
};

use rustix::process::getuid;

use crate::{
    Done, Machine,
    daemon::{Service, end},
    read,
};

/// What launchd has read it keeps in a file.
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

/// What launchd was told, without what it was only asked.
fn told(machine: &Machine) -> Vec<String> {
    machine.calls("launchctl").into_iter().filter(|call| !call.starts_with("print ")).collect()
}

/// What it is told to begin with.
fn begun(machine: &Machine) -> [String; 2] {
    let domain = format!("gui/{}", getuid().as_raw());
    [
        format!("enable {domain}/construct.mesh"),
        format!("bootstrap {domain} {}", agent(machine).display()),
    ]
}

fn ended() -> String {
    format!("bootout gui/{}/construct.mesh", getuid().as_raw())
}

#[test]
fn what_is_installed_is_written_started_and_removed_again() {
    let machine = machine();
    let agent = agent(&machine);
    let said = machine.run(&["daemon", "install", "--launchd"]).said();
    assert!(said.contains(&format!("written    {}\n", agent.display())), "{said}");
    assert!(said.contains("now and at each log-in"), "{said}");
    assert_eq!(machine.calls("dev"), ["build"]);
    assert_eq!(told(&machine), begun(&machine));
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

    // Again, while it waits for its next try: it is begun anew.
    fs::remove_file(machine.path("launchctl.calls")).unwrap();
    let again = machine.run(&["daemon", "install", "--launchd"]).said();
    assert!(again.contains("unchanged  "), "{again}");
    let [enabled, bootstrapped] = begun(&machine);
    assert_eq!(told(&machine), [ended(), enabled, bootstrapped]);

    // While it runs, which its lock says, it is not stopped for another file.
    fs::remove_file(machine.path("launchctl.calls")).unwrap();
    fs::create_dir_all(machine.path("data/run")).unwrap();
    let running = File::create(machine.path("data/run/daemon")).unwrap();
    running.lock().unwrap();
    let runs = machine.run(&["daemon", "install", "--launchd"]).said();
    assert!(runs.contains("the mesh runs"), "{runs}");
    let mut other = machine.command(&["daemon", "install", "--launchd"]);
    let changed =
        Done::of(other.env("CONSTRUCT_HOME", machine.path("other")).output().unwrap()).said();
    assert!(
        changed.contains("replaced   ") && changed.contains("construct daemon stop"),
        "{changed}"
    );
    assert!(told(&machine).is_empty());
    drop(running);

    let gone = machine.run(&["daemon", "uninstall", "--launchd"]).said();
    assert!(
        gone.contains(&format!("the data stays in {}", machine.path("other").display())),
        "{gone}"
    );
    assert!(!agent.exists());
    assert_eq!(told(&machine), [ended()]);
    assert_eq!(machine.run(&["daemon", "uninstall", "--launchd"]).said(), "nothing is installed\n");
}

#[test]
fn the_file_can_be_shown_or_only_written() {
    let machine = machine();
    let agent = agent(&machine);
    let shown = machine.run(&["daemon", "install", "--print", "--launchd"]).said();
    assert!(!agent.exists() && shown.starts_with("<?xml "), "{shown}");
    let said = machine.run(&["daemon", "install", "--no-start", "--launchd"]).said();
    assert!(said.contains("launchctl bootstrap gui/$(id -u) "), "{said}");
    assert_eq!(shown, read(&agent), "what is shown can be put into a file");
    assert!(machine.calls("launchctl").is_empty() && machine.calls("dev").is_empty());
    // What macOS itself says of it, where it can be asked.
    if let Ok(done) = Command::new("plutil").arg("-lint").arg(&agent).output() {
        Done::of(done).said();
    }
}

#[test]
fn a_file_of_somebody_else_is_left_alone_unless_that_is_wanted() {
    let machine = machine();
    let agent = agent(&machine);
    fs::create_dir_all(agent.parent().unwrap()).unwrap();
    fs::write(&agent, "<plist/>\n").unwrap();
    for command in ["install", "uninstall"] {
        let refused = machine.run(&["daemon", command, "--launchd"]).complained(1);
        assert!(
            refused.contains("construct.mesh.plist is there") && refused.contains("--force"),
            "{refused}"
        );
    }
    assert!(machine.calls("dev").is_empty() && told(&machine).is_empty());
    assert_eq!(read(&agent), "<plist/>\n");
    machine.run(&["daemon", "install", "--force", "--launchd"]).said();
    assert!(read(&agent).contains("<key>KeepAlive</key>"));
}

#[test]
fn what_launchd_refuses_is_told_and_without_it_the_file_can_be_removed() {
    let machine = machine();
    let agent = agent(&machine);
    fs::write(machine.path("refused"), "").unwrap();
    let refused = machine.run(&["daemon", "install", "--launchd"]).complained(1);
    assert!(
        refused.contains("launchctl bootstrap gui/") && refused.contains("Input/output error"),
        "{refused}"
    );
    assert!(
        machine.run(&["daemon", "status", "--launchd"]).output.contains("agent    not loaded\n")
    );

    let without = |arguments: &[&str]| {
        let mut command = machine.command(arguments);
        Done::of(command.env("PATH", machine.path("config")).output().unwrap())
    };
    let refused = without(&["daemon", "install", "--launchd"]).complained(1);
    assert!(
        refused.contains("there is no launchctl") && refused.contains("construct daemon run"),
        "{refused}"
    );
    let status = without(&["daemon", "status", "--launchd"]);
    assert!(
        status.code == Some(3) && status.output.contains("there is no launchctl"),
        "{status:?}"
    );
    let gone = without(&["daemon", "uninstall", "--launchd"]);
    assert!(gone.errors.contains("only the file is removed"), "{gone:?}");
    gone.said();
    assert!(!agent.exists());
}

#[test]
fn what_launchd_started_it_forgets_before_it_ends() {
    let service = Service::new();
    let machine = &service.machine;
    machine.program("programs/launchctl", LAUNCHCTL);
    machine.run(&["daemon", "install", "--launchd"]).said();
    let run = service.begin();
    assert_eq!(service.told(), "READY=1");
    let status = machine.run(&["daemon", "status", "--launchd"]).said();
    assert!(
        status.contains("agent    loaded\n") && status.contains(&format!("(process {})", run.id())),
        "{status}"
    );
    fs::write(machine.path("slow"), "").unwrap();
    // From anywhere: where the data is, the file says.
    let mut stop = machine.command(&["daemon", "stop", "--launchd"]);
    let stop = stop.env_remove("CONSTRUCT_DEV").env_remove("CONSTRUCT_HOME").current_dir("/");
    let said = Done::of(stop.output().unwrap()).said();
    assert!(
        said.starts_with("the mesh has stopped; construct daemon install starts it again"),
        "{said}"
    );
    assert_eq!(service.told(), "STOPPING=1");
    end(run).said();
    assert_eq!(service.calls(), ["build", "up --built", "watch", "down"]);
    assert_eq!(told(machine).last(), Some(&ended()));
    assert_eq!(machine.run(&["daemon", "stop", "--launchd"]).said(), "the daemon does not run\n");
}
