//! Landlock alone: what `construct-interpreter confine` refuses without bubblewrap around it.

use std::{
    net::TcpListener,
    os::{linux::net::SocketAddrExt as _, unix::net},
    path::Path,
    process::{Command, Output},
};

/// The version of Landlock that the kernel has, 0 for none.
fn version() -> i64 {
    // SAFETY: with the flag 1 the kernel answers with a number; it is given no memory.
    unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0_usize, 1_u32)
    }
}

/// Whether the kernel has what a test is about; where it hasn't, that is said. Another kernel is
/// not to be had by installing something.
fn has(least: i64) -> bool {
    let version = version();
    if version < least {
        eprintln!(
            "not tested here: the kernel's Landlock has version {version}, and this needs {least}"
        );
    }
    version >= least
}

/// Runs a shell script under rules that grant the system's programs and one directory, and others
/// if said.
fn confined(directory: &Path, more: &[&str], script: &str) -> Output {
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
        .expect("it starts")
}

/// The same script without any confinement, to show that it would do what it is refused.
fn free(directory: &Path, script: &str) -> String {
    let output = Command::new("/bin/sh")
        .args(["-c", script])
        .current_dir(directory)
        .output()
        .expect("it starts");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn said(output: &Output) -> String {
    assert!(output.status.code() != Some(125), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn what_lies_outside_of_the_granted_directories_is_neither_read_nor_written() {
    if !has(1) {
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
    assert_eq!(said(&confined(inside.path(), &[], &script)), "y\nlinked\n");
    assert!(outside.path().join("secret").exists() && !outside.path().join("made").exists());
    let listed = confined(inside.path(), &["--list", "/"], &script);
    assert_eq!(said(&listed), "secret\nLISTED\ny\n", "names can be granted without what they name");
}

#[test]
fn rules_hold_for_whatever_is_started_and_cannot_be_taken_back() {
    if !has(1) {
        return;
    }
    let (inside, outside) =
        (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    // The program under test itself, asked for more.
    std::fs::copy(env!("CARGO_BIN_EXE_construct-interpreter"), inside.path().join("again"))
        .expect("copied");
    let script = format!(
        "(setsid sh -c 'echo x > {0}/made && echo WROTE'); ./again confine --read / --write / -- \
         /bin/sh -c 'echo begun; echo x > {0}/made && echo WROTE'",
        outside.path().display()
    );
    assert_eq!(said(&confined(inside.path(), &[], &script)), "begun\n");
    assert!(!outside.path().join("made").exists());
}

#[test]
fn tcp_is_refused_unless_granted() {
    if !has(4) {
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
    assert_eq!(said(&confined(directory.path(), &[], &script)), "13 13");
    assert_eq!(said(&confined(directory.path(), &["--tcp"], &script)), "0 0");
}

#[test]
fn an_abstract_socket_of_the_parent_is_out_of_reach() {
    if !has(6) {
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
    assert_eq!(free(directory.path(), &script), "0");
    assert_eq!(said(&confined(directory.path(), &[], &script)), "1");
}

#[test]
fn no_signal_reaches_the_parent_but_those_among_themselves_do() {
    if !has(6) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let script = format!(
        "kill -0 {} 2>/dev/null && echo REACHED; sleep 60 & kill $! && echo own; wait $!; echo $?",
        std::process::id()
    );
    assert_eq!(free(directory.path(), &script), "REACHED\nown\n143\n");
    assert_eq!(said(&confined(directory.path(), &[], &script)), "own\n143\n");
}

#[test]
fn the_command_has_no_variable_that_it_was_not_given() {
    if !has(1) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    assert_eq!(
        said(&confined(directory.path(), &[], "echo \"${CARGO_MANIFEST_DIR-none}\"")),
        "none\n"
    );
}

#[test]
fn a_mistake_in_the_rules_begins_no_command() {
    let directory = tempfile::tempdir().expect("a directory");
    for more in [&["--raed", "/usr"][..], &["--processes", "many"]] {
        let output = confined(directory.path(), more, "echo BEGUN");
        assert_eq!(output.status.code(), Some(125), "{output:?}");
        assert!(
            output.stdout.is_empty()
                && output.stderr.starts_with(b"construct-interpreter confine: "),
            "{output:?}"
        );
    }
}
