//! Commands that scripts start: forks, daemons, floods, full disks, the service's processes and
//! files, and networks.

use std::fs::File;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};

use rustix::fs::FlockOperation;

use super::*;
use crate::command::CommandLimits;

/// Limits that a test reaches quickly.
fn small_limits() -> CommandPolicy {
    let limits = CommandLimits {
        processes: 40,
        memory_bytes: 100 << 20,
        scratch_bytes: 4 << 20,
        file_bytes: 1 << 20,
        ..CommandLimits::default()
    };
    CommandPolicy { limits, ..CommandPolicy::default() }
}

/// Waits for a lock that every process of a command holds: it is free when the last of them has
/// ended.
async fn wait_until_lock_is_free(bench: &Bench) {
    let file = File::options().write(true).open(bench.work("lock")).expect("the lock was made");
    let free = async {
        while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), free)
        .await
        .expect("a process of the command is still alive");
}

#[tokio::test]
async fn exceeded_command_limits_are_reported_to_the_script() {
    let Some(bench) = Bench::with_commands(small_limits()).await else { return };
    let run = |command: &str, result: &str| {
        format!(
            "let r; try {{ r = execute_command({}, {{timeout_seconds: 20}}) }} catch (e) {{ r = {{...e.details, name: e.name}} }}
            if (!({result})) throw r; execute_command('echo fine').stdout",
            Value::from(command)
        )
    };
    let scripts = [
        // Each has its own limit: if the service is root the kernel does not count, and the service
        // may be late.
        run(
            "f() { [ $1 -eq 0 ] || { f $(($1 - 1)) | f $(($1 - 1)) & }; sleep 15; }; f 7",
            "r.limit_exceeded === 'processes' || r.stderr.includes('fork')",
        ),
        run(
            "for i in $(seq 200); do sleep 15 & done; wait",
            "r.limit_exceeded === 'processes' || r.stderr.includes('fork')",
        ),
        run(
            "head -c 400000000 /dev/zero | tail -n 1 | wc -c; exit ${PIPESTATUS[1]}",
            "r.limit_exceeded === 'memory' || r.exit_code !== 0",
        ),
        run("head -c 3000000 /dev/zero > big", "r.exit_code !== 0"),
        run("truncate -s 10G sparse", "r.exit_code !== 0"),
        run("head -c 20000000 /dev/zero > /tmp/full", "r.exit_code !== 0"),
        run(
            "for i in $(seq 50); do head -c 1000000 /dev/zero > /dev/shm/$i || exit 9; done",
            "r.exit_code === 9",
        ),
        run(
            "yes | head -c 50000000",
            "r.name === 'OutputTooLarge' && r.exit_code === 0 && r.stdout.length < 20000",
        ),
        run("yes >&2 & yes", "r.timed_out || r.limit_exceeded")
            .replace("timeout_seconds: 20", "timeout_seconds: 1"),
        run("trap '' TERM INT HUP; while :; do :; done", "r.timed_out")
            .replace("timeout_seconds: 20", "timeout_seconds: 1"),
    ];
    for script in &scripts {
        let outcome = bench.run(script).await;
        assert_eq!(difference(&outcome, Is("fine\n")), None, "{script}");
        bench.assert_works_normally(script).await;
    }
    assert!(std::fs::metadata(bench.work("big")).expect("begun").len() <= 1 << 20);
}

#[tokio::test]
async fn daemons_end_with_their_command_and_script() {
    let Some(bench) = Bench::with_commands(small_limits()).await else { return };
    let daemon = "exec 9>lock; flock 9; (setsid nohup sh -c '(setsid sleep 300 &) ; sleep 300' >/dev/null 2>&1 &) ; sleep 0.1";
    let ways = [
        // It goes into the background twice, in its own sessions.
        format!("execute_command({})", Value::from(daemon)),
        // The script ends without waiting.
        format!(
            "tools.execute_command({}); await tools.find_file('*')",
            Value::from(format!("{daemon}; touch ready; sleep 300"))
        ),
        // The script is canceled.
        format!(
            "tools.execute_command({}); for (;;) await tools.find_file('ready')",
            Value::from(format!("{daemon}; touch ready; sleep 300"))
        ),
    ];
    for way in &ways {
        File::create(bench.work("lock")).expect("made");
        let limits = Limits { wall: Duration::from_secs(3), ..bench.limits.clone() };
        let began = std::time::Instant::now();
        bench.run_within(way, &limits).await;
        assert!(began.elapsed() < Duration::from_secs(20), "{way}");
        wait_until_lock_is_free(&bench).await;
        bench.assert_works_normally(way).await;
    }
}

#[tokio::test]
async fn service_processes_files_and_variables_are_hidden() {
    let Some(bench) = Bench::with_commands(CommandPolicy::default()).await else { return };
    // Cargo sets it for every test; it stands in for keys in a service's environment.
    let key = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    // A careless parent leaves it open: it must not be inherited.
    let open = File::open(bench.outside("secret")).expect("there");
    rustix::io::fcntl_setfd(&open, rustix::io::FdFlags::empty()).expect("left open");
    let outside = bench.outside("secret").display().to_string();
    let service = std::process::id();
    let commands = [
        "env; set; export".to_owned(),
        "cat /proc/*/environ /proc/self/task/*/environ | tr '\\0' '\\n'".to_owned(),
        "cat /proc/1/root/etc/shadow /proc/self/root/etc/shadow /etc/shadow".to_owned(),
        format!("cat {outside} /proc/1/root{outside} /proc/1/cwd{outside} ../outside/secret"),
        "for f in /proc/*/fd/*; do case $f in */0|*/1|*/2) ;; *) readlink $f; cat $f < /dev/null; esac; done".to_owned(),
        "cat /proc/*/mem /proc/kcore /dev/mem /dev/kmem /proc/*/maps | head -c 100 | wc -c >/dev/null".to_owned(),
        format!("ls -d /proc/{service} 2>/dev/null; cat /proc/{service}/cmdline"),
        format!("ln -s {outside} out; cat out; ln {outside} hard; cat hard; cp {outside} copy"),
        "mknod disk b 8 0 && cat disk; mount -t proc none /mnt; chroot / true".to_owned(),
        "cp /bin/sh s && chmod u+s s && echo SETUID; chmod 4755 s && echo SETUID".to_owned(),
        "for f in /proc/sys/kernel/core_pattern /proc/sysrq-trigger /sys/kernel/uevent_helper /etc/passwd /usr/bin/x; do (echo x > $f) && echo WROTE $f; done".to_owned(),
    ];
    for command in &commands {
        let script = format!(
            "const r = execute_command({}, {{timeout_seconds: 20}}); const all = r.stdout + r.stderr; if (all.includes('SETUID') || all.includes('WROTE')) throw all; all",
            Value::from(command.as_str())
        );
        let outcome = bench.run(&script).await;
        let Status::Completed { value } = &outcome.status else { panic!("{command}: {outcome:?}") };
        let shown = value.display();
        assert!(
            !shown.contains(CANARY) && !shown.contains("CARGO_") && !shown.contains(&key),
            "{command}: {shown}"
        );
        assert!(!shown.contains("root:$") && !shown.contains("root:*"), "{command}: {shown}");
        bench.assert_works_normally(command).await;
    }
    // Files that a command has made do not lead tools outside either.
    bench
        .refuses(&[
            ("read_file('out')", "OutsideWorkspace"),
            (
                "execute_command('ln -sfn ../outside away'); read_file('away/secret')",
                "OutsideWorkspace",
            ),
            (
                "execute_command('ln -sfn ../outside away'); create_file('away/made', 'x')",
                "OutsideWorkspace",
            ),
            ("execute_command('true', {cwd: 'away'})", "OutsideWorkspace"),
            ("execute_command('true', {cwd: '/etc'})", "OutsideWorkspace"),
            ("execute_command('mkfifo pipe'); read_file('pipe')", "NotARegularFile"),
            ("read_file('copy')", "FileNotFound"),
            ("execute_command('x'.repeat(200000))", "InvalidArguments"),
            ("execute_command('a\\0b')", "InvalidArguments"),
            ("execute_command('true', {env: {'A=B': 'x'}})", "InvalidArguments"),
            ("execute_command('true', {env: {A: 'x\\0y'}})", "InvalidArguments"),
            ("execute_command('true', {timeout_seconds: 1e9})", "InvalidArguments"),
        ])
        .await;
    drop(open);
}

#[tokio::test]
async fn directory_swapped_for_a_link_leads_nowhere() {
    let Some(bench) = Bench::with_commands(CommandPolicy::default()).await else { return };
    std::fs::create_dir(bench.work("real")).expect("made");
    std::fs::write(bench.work("real/secret"), "inside").expect("written");
    let script = "
        const swapping = tools.execute_command('ln -sfn real d; touch begun; while [ ! -e stop ]; do ln -sfn ../outside d; ln -sfn real d; done; rm -f d', {timeout_seconds: 60});
        while (find_file('begun').paths.length === 0) await new Promise(done => setTimeout(done, 10));
        let inside = 0, refused = 0;
        for (let i = 0; i < 4000 && (inside < 20 || refused < 20); i++) {
            try { if (read_file('d/secret') !== 'inside') throw new Error('it leaked'); inside++ }
            catch (error) { if (!['OutsideWorkspace', 'FileNotFound'].includes(error.name)) throw error; if (error.name === 'OutsideWorkspace') refused++ }
            try { create_file('d/made', 'x') } catch (error) { if (!['OutsideWorkspace', 'FileNotFound', 'IoError', 'FileChanged'].includes(error.name)) throw error }
            // Other processes may leave the command no processor time.
            if (i % 20 === 19) await new Promise(done => setTimeout(done, 20));
        }
        create_file('stop', '');
        await swapping;
        [inside > 0, refused > 0]";
    let outcome = bench.run(script).await;
    assert_eq!(difference(&outcome, Is("[true,true]")), None);
    assert_eq!(
        std::fs::read_dir(bench.outside("")).expect("a directory").count(),
        1,
        "something was created outside"
    );
}

#[tokio::test]
async fn commands_reach_no_network_or_service_socket() {
    let Some(bench) = Bench::with_commands(CommandPolicy::default()).await else { return };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("set");
    let port = listener.local_addr().expect("an address").port();
    let name = format!("construct-hostile-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name.as_bytes()).expect("a name");
    let hidden = UnixListener::bind_addr(&address).expect("a socket");
    hidden.set_nonblocking(true).expect("set");
    let commands = [
        format!("exec 3<>/dev/tcp/127.0.0.1/{port}"),
        format!("exec 3<>/dev/tcp/localhost/{port}"),
        "exec 3<>/dev/tcp/169.254.169.254/80".to_owned(),
        "exec 3<>/dev/tcp/1.1.1.1/53".to_owned(),
        "exec 3<>/dev/udp/8.8.8.8/53; echo x >&3".to_owned(),
        "exec 3<>/dev/tcp/example.com/80".to_owned(),
        format!("curl -sS -m 3 http://127.0.0.1:{port}/ || exit 1"),
        "curl -sS -m 3 http://169.254.169.254/latest/meta-data/ || exit 1".to_owned(),
        "getent hosts example.com || exit 1".to_owned(),
        format!(
            "python3 -c \"import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}')\" || exit 1"
        ),
        "python3 -c \"import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\" || exit 1"
            .to_owned(),
        "python3 -c \"import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\" || exit 1"
            .to_owned(),
        "python3 -c \"import socket; socket.socket(socket.AF_VSOCK)\" || exit 1".to_owned(),
    ];
    for command in &commands {
        let script = format!(
            "execute_command({}, {{timeout_seconds: 20}}).exit_code !== 0",
            Value::from(command.as_str())
        );
        let outcome = bench.run(&script).await;
        assert_eq!(difference(&outcome, Is("true")), None, "{command}");
        bench.assert_works_normally(command).await;
    }
    assert!(listener.accept().is_err(), "a command reached the service's loopback");
    assert!(hidden.accept().is_err(), "a command reached an abstract socket of the service");
}

#[tokio::test]
async fn commands_are_refused_without_confinement() {
    let bench = Bench::with_files();
    bench
        .refuses(&[
            ("execute_command('touch ran')", "CommandsUnavailable"),
            ("bash('touch ran')", "CommandsUnavailable"),
            ("git(['init'])", "CommandsUnavailable"),
            ("node('1')", "CommandsUnavailable"),
            ("python(['-c', 'x'])", "CommandsUnavailable"),
            ("npm(['i'])", "CommandsUnavailable"),
        ])
        .await;
    assert!(!bench.work("ran").exists());
}
