//! Landlock alone: what `construct-interpreter confine` refuses without bubblewrap.

use std::{
    net::TcpListener,
    os::{linux::net::SocketAddrExt as _, unix::net},
    path::Path,
    process::{Command, Output},
};

/// The version of the kernel's Landlock, 0 for none.
fn landlock_version() -> i64 {
    // SAFETY: with the flag 1 the kernel returns a number; it gets no memory.
    unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0_usize, 1_u32)
    }
}

/// Whether the kernel's Landlock has at least this version; prints a message if not. No test
/// requirement: another kernel cannot simply be installed.
fn has_landlock(min: i64) -> bool {
    let landlock_version = landlock_version();
    if landlock_version < min {
        eprintln!(
            "skipped: the kernel's Landlock has version {landlock_version}, this needs {min}"
        );
    }
    landlock_version >= min
}

/// Runs a shell script under rules that grant the system's programs and one directory, and `more`
/// rules.
fn run_confined(directory: &Path, more: &[&str], script: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_construct-interpreter"));
    command.arg("confine");
    for path in ["/usr", "/bin", "/lib", "/lib64", "/etc", "/proc"] {
        command.args(["--read", path]);
    }
    command.args(["--devices", "/dev", "--write"]).arg(directory).args(more);
    command
        .args(["--", "/bin/sh", "-c", script])
        .current_dir(directory)
        .output()
        .expect("the process starts")
}

/// Runs the same script without confinement, to show that it would do what is refused.
fn run_unconfined(directory: &Path, script: &str) -> String {
    let output = Command::new("/bin/sh")
        .args(["-c", script])
        .current_dir(directory)
        .output()
        .expect("the process starts");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn stdout(output: &Output) -> String {
    assert!(output.status.code() != Some(125), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn files_outside_of_granted_directories_are_unreachable() {
    if !has_landlock(1) {
        return;
    }
    let (inside, outside) =
        (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    std::fs::write(outside.path().join("secret"), "secret").expect("written");
    let script = format!(
        "cd {}; cat secret && echo READ; echo x > made && echo WROTE; ls && echo LISTED; mkdir d && echo MADE; \
         rm -f secret && echo REMOVED; cd - > /dev/null; echo y > inside && cat inside; ln -s /etc link && echo linked",
        outside.path().display()
    );
    assert_eq!(stdout(&run_confined(inside.path(), &[], &script)), "y\nlinked\n");
    assert!(outside.path().join("secret").exists() && !outside.path().join("made").exists());
    let listed = run_confined(inside.path(), &["--list", "/"], &script);
    assert_eq!(
        stdout(&listed),
        "secret\nLISTED\ny\n",
        "names can be granted without what they name"
    );
}

#[test]
fn rules_apply_to_children_and_cannot_be_revoked() {
    if !has_landlock(1) {
        return;
    }
    let (inside, outside) =
        (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    // The program under test itself, with wider rules.
    std::fs::copy(env!("CARGO_BIN_EXE_construct-interpreter"), inside.path().join("again"))
        .expect("copied");
    let script = format!(
        "(setsid sh -c 'echo x > {0}/made && echo WROTE'); ./again confine --read / --write / -- \
         /bin/sh -c 'echo begun; echo x > {0}/made && echo WROTE'",
        outside.path().display()
    );
    assert_eq!(stdout(&run_confined(inside.path(), &[], &script)), "begun\n");
    assert!(!outside.path().join("made").exists());
}

#[test]
fn tcp_is_refused_unless_granted() {
    if !has_landlock(4) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let script = format!(
        "perl -MSocket -e 'socket(S, AF_INET, SOCK_STREAM, 0); \
         print connect(S, pack_sockaddr_in({port}, INADDR_LOOPBACK)) ? 0 : int($!), \" \"; \
         socket(T, AF_INET, SOCK_STREAM, 0); print bind(T, pack_sockaddr_in(0, INADDR_LOOPBACK)) ? 0 : int($!)'"
    );
    assert_eq!(stdout(&run_confined(directory.path(), &[], &script)), "13 13");
    assert_eq!(stdout(&run_confined(directory.path(), &["--tcp"], &script)), "0 0");
}

#[test]
fn abstract_socket_of_the_parent_is_unreachable() {
    if !has_landlock(6) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let name = format!("construct-test-{}", std::process::id());
    let address = net::SocketAddr::from_abstract_name(&name).expect("a name");
    let _listener = net::UnixListener::bind_addr(&address).expect("it is free");
    let script = format!(
        "perl -MSocket -e 'socket(S, AF_UNIX, SOCK_STREAM, 0); \
         print connect(S, pack_sockaddr_un(\"\\0{name}\")) ? 0 : int($!)'"
    );
    assert_eq!(run_unconfined(directory.path(), &script), "0");
    assert_eq!(stdout(&run_confined(directory.path(), &[], &script)), "1");
}

#[test]
fn signals_reach_own_processes_but_not_the_parent() {
    if !has_landlock(6) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let script = format!(
        "kill -0 {} 2>/dev/null && echo REACHED; sleep 60 & kill $! && echo own; wait $!; echo $?",
        std::process::id()
    );
    assert_eq!(run_unconfined(directory.path(), &script), "REACHED\nown\n143\n");
    assert_eq!(stdout(&run_confined(directory.path(), &[], &script)), "own\n143\n");
}

#[test]
fn command_inherits_no_environment() {
    if !has_landlock(1) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    assert_eq!(
        stdout(&run_confined(directory.path(), &[], "echo \"${CARGO_MANIFEST_DIR-none}\"")),
        "none\n"
    );
}

#[test]
fn invalid_rules_start_no_command() {
    let directory = tempfile::tempdir().expect("a directory");
    for more in [&["--raed", "/usr"][..], &["--processes", "many"]] {
        let output = run_confined(directory.path(), more, "echo BEGUN");
        assert_eq!(output.status.code(), Some(125), "{output:?}");
        assert!(
            output.stdout.is_empty()
                && output.stderr.starts_with(b"construct-interpreter confine: "),
            "{output:?}"
        );
    }
}
