//! Commands that try to escape, to stay alive, and to exceed their limits.

use std::fs::File;
use std::net::TcpListener;

use rustix::fs::FlockOperation;
use tempfile::TempDir;
use tokio::sync::OnceCell;

use super::*;
use crate::test_requirements::skip_or_fail;

struct Bench {
    directory: TempDir,
    workspace: Workspace,
    policy: CommandPolicy,
    sandbox: CommandSandbox,
}

fn bench(sandbox: CommandSandbox) -> Bench {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let workspace = Workspace::open(directory.path()).expect("a workspace");
    let policy =
        CommandPolicy { confinement: Confinement::AllowUnconfined, ..CommandPolicy::default() };
    Bench { directory, workspace, policy, sandbox }
}

/// The sandbox of this host, detected once. Its absence is printed, and is an error where
/// everything must be tested.
pub(crate) async fn sandbox() -> CommandSandbox {
    static FOUND: OnceCell<CommandSandbox> = OnceCell::const_new();
    let found = FOUND.get_or_init(async || CommandSandbox::detect(&interpreter()).await).await;
    if !found.is_available() {
        skip_or_fail(found.describe());
    }
    found.clone()
}

/// The program that applies Landlock to commands. It is built with the tests of the whole package;
/// if it is missing, commands are tested without it.
pub(crate) fn interpreter() -> PathBuf {
    let test = std::env::current_exe().expect("there is one");
    test.ancestors().nth(2).expect("a target folder").join("construct-interpreter")
}

/// A bench with bubblewrap and Landlock; `None` if one of them is missing, which is printed.
async fn landlocked() -> Option<Bench> {
    let bench = confined().await?;
    if uses_landlock(&bench.sandbox) {
        return Some(bench);
    }
    let why = bench.sandbox.describe();
    match confine::version() {
        Some(_) => skip_or_fail(why),
        // Another kernel cannot be installed for a test.
        None => eprintln!("not tested here: {why}"),
    }
    None
}

fn uses_landlock(sandbox: &CommandSandbox) -> bool {
    sandbox.describe().contains(" and Landlock (ABI")
}

/// A bench with a sandbox; `None` if the host has no working bubblewrap.
async fn confined() -> Option<Bench> {
    let found = sandbox().await;
    found.is_available().then(|| bench(found))
}

/// Benches with every kind of sandbox on this host.
async fn benches() -> Vec<Bench> {
    let mut benches = vec![bench(CommandSandbox::unavailable("a test"))];
    benches.extend(confined().await);
    benches
}

fn request(script: &str) -> Request {
    Request {
        script: script.to_owned(),
        directory: RelativePath::root(),
        environment: BTreeMap::new(),
        stdin: Vec::new(),
        timeout: Duration::from_secs(30),
        scrubber: Arc::default(),
    }
}

impl Bench {
    async fn run(&self, request: Request) -> Outcome {
        let cancel = CancellationToken::new();
        self.sandbox
            .run(&self.workspace, &self.policy, request, &cancel)
            .await
            .expect("a command that runs")
    }

    async fn script(&self, script: &str) -> Outcome {
        self.run(request(script)).await
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Waits until the lock of [`STAYS`] is free, which means that all its processes have ended.
    async fn wait_for_lock(&self) {
        let file = File::options().write(true).open(self.path("lock")).expect("the lock was made");
        let free = async {
            while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), free)
            .await
            .expect("a process of the command is still alive");
    }

    async fn wait_until_ready(&self) {
        let ready = async {
            while !self.path("ready").exists() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), ready)
            .await
            .expect("the command never became ready");
    }
}

/// Starts a grandchild in its own session that holds a lock as long as it lives, and reports when
/// it does.
const STAYS: &str = "(setsid sh -c 'exec 9>lock; flock 9; touch ready; sleep 300; true' &)\n\
    while [ ! -e ready ]; do sleep 0.01; done\n";

#[tokio::test]
async fn command_returns_exit_code_and_separate_outputs() {
    for bench in benches().await {
        let outcome = bench.script("echo out; echo err >&2; exit 3").await;
        assert_eq!(outcome.exit_code, Some(3));
        assert_eq!(outcome.stdout.text, "out\n");
        assert_eq!(outcome.stderr.text, "err\n");
        assert!(!outcome.timed_out && !outcome.stdout.truncated);
        assert_eq!((outcome.signal, outcome.limit_exceeded), (None, None));
    }
}

#[tokio::test]
async fn command_killed_by_a_signal_reports_it() {
    for bench in benches().await {
        let outcome = bench.script("kill -SEGV $$").await;
        assert_eq!((outcome.exit_code, outcome.signal), (Some(139), Some("SIGSEGV")));
    }
}

#[tokio::test]
async fn input_directory_and_variables_reach_the_command() {
    for bench in benches().await {
        std::fs::create_dir(bench.path("sub dir")).expect("made");
        let outcome = bench
            .run(Request {
                directory: bench.workspace.locate("sub dir").expect("a path"),
                environment: BTreeMap::from([(
                    "GREETING".to_owned(),
                    "hello 'you' $HOME".to_owned(),
                )]),
                stdin: b"some input".to_vec(),
                ..request("cat; echo; echo \"$GREETING\"; pwd; echo made > made")
            })
            .await;
        let expected = format!(
            "some input\nhello 'you' $HOME\n{}/sub dir\n",
            bench.workspace.root().display()
        );
        assert_eq!(outcome.stdout.text, expected, "{}", outcome.stderr.text);
        assert!(bench.path("sub dir/made").exists());
    }
}

#[tokio::test]
async fn service_environment_is_not_inherited() {
    // Cargo sets this for every test; it represents the keys in the environment of a service.
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    for bench in benches().await {
        let outcome = bench.script("env").await;
        let names: Vec<&str> =
            outcome.stdout.text.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
        let known = [
            "PATH",
            "HOME",
            "TMPDIR",
            "LANG",
            "TERM",
            "PAGER",
            "GIT_TERMINAL_PROMPT",
            "PWD",
            "OLDPWD",
            "SHLVL",
            "_",
            processes::MARK,
        ];
        assert!(names.iter().all(|name| known.contains(name)), "{names:?}");
        let parents =
            bench.script("cat /proc/$PPID/environ /proc/1/environ | tr '\\0' '\\n'").await;
        if bench.sandbox.is_available() {
            assert!(!parents.stdout.text.contains("CARGO_MANIFEST_DIR"));
        }
    }
}

#[tokio::test]
async fn timeout_kills_grandchildren_in_other_sessions() {
    for bench in benches().await {
        let script = format!("{STAYS}echo started; sleep 300");
        let outcome =
            bench.run(Request { timeout: Duration::from_secs(3), ..request(&script) }).await;
        assert!(outcome.timed_out);
        assert_eq!((outcome.exit_code, outcome.signal), (None, Some("SIGKILL")));
        assert_eq!(outcome.stdout.text, "started\n");
        bench.wait_for_lock().await;
    }
}

#[tokio::test]
async fn background_processes_end_with_their_command() {
    for bench in benches().await {
        let outcome = bench.script(&format!("{STAYS}exit 0")).await;
        assert_eq!(outcome.exit_code, Some(0));
        assert!(outcome.duration < Duration::from_secs(20));
        bench.wait_for_lock().await;
    }
}

#[tokio::test]
async fn cancel_kills_all_processes_at_once() {
    for bench in benches().await {
        let cancel = CancellationToken::new();
        let script = format!("{STAYS}sleep 300");
        let running = bench.sandbox.run(&bench.workspace, &bench.policy, request(&script), &cancel);
        let (outcome, cancelled) = tokio::join!(running, async {
            bench.wait_until_ready().await;
            cancel.cancel();
            Instant::now()
        });
        assert!(matches!(outcome, Err(CommandError::Cancelled)));
        assert!(cancelled.elapsed() < Duration::from_secs(2), "it took {:?}", cancelled.elapsed());
        bench.wait_for_lock().await;
    }
}

#[tokio::test]
async fn dropped_call_leaves_no_process() {
    for bench in benches().await {
        let cancel = CancellationToken::new();
        let script = format!("{STAYS}sleep 300");
        let running = bench.sandbox.run(&bench.workspace, &bench.policy, request(&script), &cancel);
        tokio::select! {
            _ = running => panic!("it ended by itself"),
            () = bench.wait_until_ready() => {}
        }
        bench.wait_for_lock().await;
    }
}

#[tokio::test]
async fn oversized_output_is_cut_in_the_middle() {
    for bench in benches().await {
        let outcome = bench
            .script("echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo; echo last")
            .await;
        assert_eq!(outcome.exit_code, Some(0));
        assert!(outcome.stdout.truncated && outcome.stdout.text.len() < 2_200_000);
        assert!(
            outcome.stdout.text.starts_with("first\n") && outcome.stdout.text.ends_with("\nlast\n")
        );
    }
}

#[tokio::test]
async fn commands_without_a_sandbox_need_the_operators_consent() {
    let mut bench = bench(CommandSandbox::unavailable("bubblewrap is missing"));
    bench.policy = CommandPolicy::default();
    let cancel = CancellationToken::new();
    let refused =
        bench.sandbox.run(&bench.workspace, &bench.policy, request("touch ran"), &cancel).await;
    assert!(
        matches!(refused, Err(CommandError::NoSandbox { ref reason }) if reason.contains("missing")),
        "{refused:?}"
    );
    assert!(!bench.path("ran").exists());
}

#[tokio::test]
async fn outside_start_directory_is_rejected_before_anything_runs() {
    for bench in benches().await {
        std::os::unix::fs::symlink("/", bench.path("away")).expect("linked");
        let directory = bench.workspace.locate("away").expect("a path");
        let cancel = CancellationToken::new();
        let request = Request { directory, ..request("true") };
        let refused = bench.sandbox.run(&bench.workspace, &bench.policy, request, &cancel).await;
        assert!(
            matches!(refused, Err(CommandError::Directory(PathError::Outside { .. }))),
            "{refused:?}"
        );
    }
}

#[tokio::test]
async fn too_many_processes_end_a_command() {
    for mut bench in benches().await {
        bench.policy.limits.processes = 40;
        // The command limits itself, in case the limit under test fails.
        let script = "for i in $(seq 300); do sleep 20 & done; wait";
        let outcome =
            bench.run(Request { timeout: Duration::from_secs(15), ..request(script) }).await;
        // If the service is not root, the kernel denies the fork before the service counts too
        // many.
        let by_kernel = outcome.stderr.text.contains("fork");
        assert!(outcome.limit_exceeded == Some("processes") || by_kernel, "{outcome:?}");
        let left = bench.script("ls -d /proc/[0-9]* | wc -l").await;
        if bench.sandbox.is_available() {
            assert!(left.stdout.text.trim().parse::<usize>().expect("a number") < 20);
        }
    }
}

#[tokio::test]
async fn memory_is_limited() {
    for mut bench in benches().await {
        bench.policy.limits.memory_bytes = 100 << 20;
        let outcome = bench
            .script("head -c 400000000 /dev/zero | tail -n 1 | wc -c; exit ${PIPESTATUS[1]}")
            .await;
        assert!(
            outcome.limit_exceeded == Some("memory") || outcome.exit_code != Some(0),
            "{outcome:?}"
        );
    }
}

#[tokio::test]
async fn cpu_limit_counts_all_processes_of_a_command() {
    let alone = "while :; do :; done";
    // No process reaches the limit by itself: ended processes count as well.
    let many = "while :; do timeout 0.5 sh -c 'while :; do :; done'; done";
    for mut bench in benches().await {
        bench.policy.limits.cpu = Duration::from_secs(1);
        for script in [alone, many] {
            let outcome =
                bench.run(Request { timeout: Duration::from_secs(120), ..request(script) }).await;
            assert_eq!(outcome.limit_exceeded, Some("cpu"), "{script}: {outcome:?}");
        }
    }
}

#[tokio::test]
async fn command_sees_only_its_processors() {
    let service = std::thread::available_parallelism().expect("known").get();
    for mut bench in benches().await {
        for cores in [1, 4096] {
            bench.policy.limits.cores = cores;
            let outcome = bench.script("nproc").await;
            assert_eq!(outcome.stdout.text.trim(), cores.min(service).to_string());
        }
    }
}

#[tokio::test]
async fn file_size_is_limited() {
    for mut bench in benches().await {
        bench.policy.limits.file_bytes = 1 << 20;
        let outcome = bench.script("head -c 3000000 /dev/zero > big").await;
        assert_ne!(outcome.exit_code, Some(0));
        assert!(std::fs::metadata(bench.path("big")).expect("begun").len() <= 1 << 20);
    }
}

#[tokio::test]
async fn confined_command_writes_only_into_the_workspace() {
    let Some(bench) = confined().await else { return };
    let outside = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(outside.path().join("secret"), "secret").expect("written");
    let hidden = outside.path().join("secret");
    let script = format!(
        "cat {0} && echo LEAKED; echo x > {0} && echo LEAKED\n\
         for place in / /usr /usr/bin /etc /dev /home /var /proc/sys/kernel; do\n\
           (echo x > $place/construct-test) 2>/dev/null && echo WROTE $place\n\
         done\n\
         cat /etc/shadow 2>/dev/null && echo LEAKED\n\
         mount -t tmpfs none /usr 2>/dev/null && echo MOUNTED\n\
         unshare -U true 2>/dev/null && echo NESTED\n\
         echo private > /tmp/construct-test && echo x > inside && echo fine",
        hidden.display()
    );
    let outcome = bench.script(&script).await;
    assert_eq!(outcome.stdout.text, "fine\n", "{}", outcome.stderr.text);
    assert_eq!(std::fs::read_to_string(&hidden).expect("readable"), "secret");
    assert!(bench.path("inside").exists());
    assert!(!Path::new("/tmp/construct-test").exists());
}

#[tokio::test]
async fn confined_command_has_no_capabilities_and_sees_no_others() {
    let Some(bench) = confined().await else { return };
    let script = format!(
        "grep CapEff /proc/self/status; kill -0 {} && echo SEEN; id -u",
        std::process::id()
    );
    let outcome = bench.script(&script).await;
    assert_eq!(outcome.stdout.text, "CapEff:\t0000000000000000\n1000\n");
    let count = bench.script("ls -d /proc/[0-9]* | wc -l").await;
    assert!(count.stdout.text.trim().parse::<usize>().expect("a number") < 10);
}

/// A confined bench, a listener outside of it, and a script that reports whether it can connect.
async fn bench_with_listener() -> Option<(Bench, TcpListener, String)> {
    let bench = confined().await?;
    if shell() != "/bin/bash" {
        skip_or_fail("there is no bash, whose /dev/tcp this test uses");
        return None;
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    Some((bench, listener, format!("exec 3<>/dev/tcp/127.0.0.1/{port} && echo CONNECTED")))
}

#[tokio::test]
async fn confined_command_reaches_no_network_unless_granted() {
    let Some((mut bench, _listener, script)) = bench_with_listener().await else { return };
    let outcome = bench.script(&script).await;
    assert_eq!(outcome.stdout.text, "");
    assert_ne!(outcome.exit_code, Some(0));
    // The same command connects if it may, so the failure above has no other cause.
    bench.policy.network = true;
    let outcome = bench.script(&script).await;
    assert_eq!(outcome.stdout.text, "CONNECTED\n", "{}", outcome.stderr.text);
}

#[tokio::test]
async fn operator_settings_apply_to_commands() {
    let common = construct_runtime::Common::default();
    let policy = |config: &crate::Config| config.command_policy(&common);
    let own = std::path::absolute(common.data_dir.join("x")).expect("a path");
    let tools = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(tools.path().join("tool"), "#!/bin/sh\necho from the tool\n").expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(tools.path().join("tool"), mode).expect("set");
    let granting = crate::Config {
        interpreter_command_network: true,
        interpreter_command_read_only_paths: vec![tools.path().to_owned()],
        interpreter_command_search_path: vec![tools.path().to_owned()],
        ..crate::Config::default()
    };
    for (wrong, key) in [
        (
            crate::Config {
                interpreter_command_search_path: vec!["bin".into()],
                ..granting.clone()
            },
            "interpreter_command_search_path",
        ),
        (
            crate::Config {
                interpreter_command_read_only_paths: vec!["opt".into()],
                ..granting.clone()
            },
            "interpreter_command_read_only_paths",
        ),
        (
            crate::Config { interpreter_command_read_only_paths: vec![own], ..granting.clone() },
            "interpreter_command_read_only_paths",
        ),
        (
            crate::Config {
                interpreter_command_read_only_paths: vec!["/".into()],
                ..granting.clone()
            },
            "interpreter_command_read_only_paths",
        ),
    ] {
        let error = policy(&wrong).expect_err(key);
        assert!(format!("{error:?}").contains(key), "{error:?}");
    }
    let Some((mut bench, _listener, connect)) = bench_with_listener().await else { return };
    let script = format!("tool; {connect}");
    for (config, expected) in
        [(crate::Config::default(), ""), (granting, "from the tool\nCONNECTED\n")]
    {
        bench.policy = policy(&config).expect("sound");
        let outcome = bench.script(&script).await;
        assert_eq!(outcome.stdout.text, expected, "{}", outcome.stderr.text);
    }
}

#[tokio::test]
async fn variables_of_a_script_do_not_affect_the_sandbox() {
    let Some(bench) = confined().await else { return };
    // With this the dynamic loader lists libraries instead of running the program. Bubblewrap has
    // other libraries than a shell.
    let environment = BTreeMap::from([("LD_TRACE_LOADED_OBJECTS".to_owned(), "1".to_owned())]);
    let outcome = bench.run(Request { environment, ..request("true") }).await;
    assert!(outcome.stdout.text.contains("libc"), "{outcome:?}");
    assert!(!outcome.stdout.text.contains("libcap"), "bubblewrap itself was traced: {outcome:?}");
    assert!(
        !outcome.stdout.text.contains("libgcc"),
        "the program that applies Landlock was traced: {outcome:?}"
    );
}

#[tokio::test]
async fn path_is_readable_only_by_policy() {
    let Some(mut bench) = confined().await else { return };
    let tools = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(tools.path().join("tool"), "#!/bin/sh\necho from the tool\n").expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(tools.path().join("tool"), mode).expect("set");
    assert_eq!(bench.script("tool").await.exit_code, Some(127));
    bench.policy.read_only_paths = vec![tools.path().to_owned()];
    bench.policy.search_path = vec![tools.path().to_owned()];
    assert_eq!(bench.script("tool").await.stdout.text, "from the tool\n");
    assert_ne!(
        bench.script(&format!("echo x > {}/x", tools.path().display())).await.exit_code,
        Some(0)
    );
}

#[tokio::test]
async fn confined_command_cannot_change_kernel_settings() {
    let Some(bench) = confined().await else { return };
    // Opened for writing, but nothing is written: if this test fails, the host is unchanged.
    let script = "for name in core_pattern hostname; do (: >> /proc/sys/kernel/$name) 2>/dev/null && echo OPENED $name; done\n\
        (: >> /proc/sys/vm/overcommit_memory) 2>/dev/null && echo OPENED; (: >> /proc/sysrq-trigger) 2>/dev/null && echo OPENED\n\
        [ -e /sys/kernel ] && echo SEEN; [ -r /proc/self/status ] && echo fine";
    assert_eq!(bench.script(script).await.stdout.text, "fine\n");
}

#[tokio::test]
async fn command_inherits_no_descriptor_of_the_service() {
    // As the parent of the service may leave it open: without the close-on-exec flag.
    let open = rustix::fs::open("/", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())
        .expect("a directory");
    for bench in benches().await {
        // Named one by one, because listing the directory opens it.
        let outcome = bench.script("exec readlink $(seq -f /proc/self/fd/%g 0 300)").await;
        let open: Vec<&str> = outcome.stdout.text.lines().collect();
        assert!(
            open.len() == 3 && open.iter().all(|target| target.starts_with("pipe:")),
            "{open:?}"
        );
    }
    drop(open);
}

#[tokio::test]
async fn excess_commands_wait_and_are_cancelable() {
    let bench = bench(CommandSandbox::unavailable("a test"));
    let all = u32::try_from(MAX_CONCURRENT_COMMANDS).expect("a small number");
    let busy = bench.sandbox.clone();
    let permits = busy.running.acquire_many(all).await.expect("open");
    let cancel = CancellationToken::new();
    let waiting = bench.sandbox.run(&bench.workspace, &bench.policy, request("touch ran"), &cancel);
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    cancel.cancel();
    assert!(matches!(waiting.await, Err(CommandError::Cancelled)));
    assert!(!bench.path("ran").exists());
    drop(permits);
    assert_eq!(bench.script("echo fine").await.stdout.text, "fine\n");
}

#[tokio::test]
async fn unneeded_system_calls_are_denied() {
    let Some(bench) = confined().await else { return };
    // `syscall` of Perl, which every Debian has, makes calls by number. 425 is io_uring_setup, 38
    // the family AF_ALG.
    let outcome = bench
        .script(
            "unshare -U true 2>/dev/null && echo unshared\n\
             perl -e 'print syscall(425, 8, 0) < 0 ? int($!) : 0, \"\\n\"'\n\
             perl -MSocket -e 'print socket(S, 38, SOCK_SEQPACKET, 0) ? 0 : int($!), \"\\n\"'\n\
             perl -MSocket -e 'print socket(S, AF_INET, SOCK_STREAM, 0) ? 0 : int($!), \"\\n\"'\n\
             perl -e 'fork // die; wait; print \"forked\\n\"' | sort -u",
        )
        .await;
    assert_eq!(outcome.stdout.text, "1\n1\n0\nforked\n", "{outcome:?}");
}

#[tokio::test]
async fn command_cannot_create_set_user_files() {
    let Some(bench) = confined().await else { return };
    let outcome = bench
        .script(
            "cp /bin/true program\n\
             chmod 755 program && echo allowed\n\
             for mode in 4755 2755 u+s g+s; do chmod $mode program 2>/dev/null && echo $mode; done\n\
             perl -MFcntl -e 'print sysopen(F, \"made\", O_CREAT | O_WRONLY, 04755) ? 0 : int($!), \"\\n\"'\n\
             perl -MFcntl -e 'print sysopen(F, \"plain\", O_CREAT | O_WRONLY, 0755) ? 0 : int($!), \"\\n\"'",
        )
        .await;
    assert_eq!(outcome.stdout.text, "allowed\n1\n0\n", "{outcome:?}");
    assert!(!bench.path("made").exists());
}

#[tokio::test]
async fn landlock_denies_tcp_even_on_the_own_loopback() {
    let Some(mut bench) = landlocked().await else { return };
    // The command's own network has no listener: a connection fails with ECONNREFUSED (111) without
    // Landlock, with EACCES (13) with it.
    let script = "perl -MSocket -e 'socket(S, AF_INET, SOCK_STREAM, 0); \
        print connect(S, pack_sockaddr_in(9, INADDR_LOOPBACK)) ? 0 : int($!), \" \"; \
        socket(T, AF_INET, SOCK_STREAM, 0); print bind(T, pack_sockaddr_in(8080, INADDR_LOOPBACK)) ? 0 : int($!)'";
    assert_eq!(bench.script(script).await.stdout.text, "13 13");
    bench.policy.loopback = true;
    assert_eq!(bench.script(script).await.stdout.text, "111 0");
}

#[tokio::test]
async fn usual_operations_work_under_landlock() {
    let Some(bench) = landlocked().await else { return };
    let script = "set -e; mkdir -p a b; echo x > a/f; mv a/f b/g; ln b/g b/h; ln -s g b/i; cat b/i; rm -r a; mkfifo p\n\
        printf '#!/bin/sh\\necho run' > tool; chmod +x tool; ./tool; cp tool /tmp/tool; /tmp/tool; echo y > /dev/shm/y\n\
        diff <(echo one) <(echo one) && echo same > /dev/stdout; echo gone > /dev/null; : > b/g\n\
        ls / > /dev/null; cat /proc/self/comm; head -c 3 /dev/urandom | wc -c\n\
        sleep 60 & kill $!; wait $! || echo \"killed $?\"; set +e; yes | head -1; echo \"${PIPESTATUS[0]}\"";
    let outcome = bench.script(&script.replace("\\n        ", "\n")).await;
    assert_eq!(
        outcome.stdout.text, "x\nrun\nrun\nsame\ncat\n3\nkilled 143\ny\n141\n",
        "{}",
        outcome.stderr.text
    );
}

#[tokio::test]
async fn variables_and_process_limit_apply_under_landlock() {
    let Some(bench) = landlocked().await else { return };
    let environment = BTreeMap::from([
        ("ODD".to_owned(), "a=b\nc 'd'".to_owned()),
        ("EMPTY".to_owned(), String::new()),
    ]);
    let outcome = bench
        .run(Request {
            environment,
            ..request("echo \"$ODD|${EMPTY-unset}|\"; ulimit -u; env | wc -l")
        })
        .await;
    let words: Vec<&str> = outcome.stdout.text.lines().collect();
    assert_eq!(words[..3], ["a=b", "c 'd'||", "512"], "{outcome:?}");
}

/// Commands also run without Landlock, so no other test detects that it is not used.
#[tokio::test]
async fn landlock_is_used_if_the_kernel_supports_it() {
    if confine::version().is_none() {
        return eprintln!("not tested here: the kernel has no Landlock");
    }
    let Some(bench) = confined().await else { return };
    if !interpreter().exists() {
        return skip_or_fail("construct-interpreter was not built with the tests");
    }
    assert!(uses_landlock(&bench.sandbox), "{}", bench.sandbox.describe());
}
