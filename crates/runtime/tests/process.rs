//! A whole service as a process: arguments, configuration, signals, exit codes.
//!
//! This binary is both sides. With `SAMPLE_SERVICE` in its environment it is a service; otherwise
//! it runs the tests, each of which starts it again.

use std::{
    env,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, Command, ExitCode, Output, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use construct_runtime::{Common, Context, ServiceConfig, config};
use libtest_mimic::{Arguments, Trial};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Longer than any step takes.
const TOO_LONG: Duration = Duration::from_secs(30);

#[derive(Debug, Serialize, Deserialize)]
#[serde(default)]
struct Config {
    sample_mode: String,
    sample_count: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self { sample_mode: "obedient".to_owned(), sample_count: 1 }
    }
}

impl ServiceConfig for Config {
    fn validate(&self, _common: &Common) -> Result<(), config::Invalid> {
        match self.sample_count {
            0 => Err(config::Invalid::new("sample_count", "must be at least 1")),
            _ => Ok(()),
        }
    }
}

async fn run(config: Config, context: &Context) -> anyhow::Result<()> {
    opentelemetry::global::meter("sample").u64_counter("sample.starts").build().add(1, &[]);
    tracing::info_span!("sample.start").in_scope(|| tracing::debug!("a span to export"));
    let draining = context.lifecycle().draining();
    match config.sample_mode.as_str() {
        "obedient" => context.lifecycle().spawn("work", async move {
            draining.cancelled().await;
            anyhow::Ok(())
        }),
        "stubborn" => {
            context.lifecycle().spawn("work", std::future::pending::<anyhow::Result<()>>())
        }
        "panicking" => {
            context.lifecycle().spawn("work", async { panic!("out of luck") as anyhow::Result<()> })
        }
        "unreachable" => {
            let latch = context.readiness().register("nats");
            context
                .connect_with_retry("nats", &latch, || async {
                    Err::<(), _>(std::io::Error::other("refused"))
                })
                .await?;
        }
        _ => anyhow::bail!("there is no such mode"),
    }
    Ok(())
}

fn main() -> ExitCode {
    if env::var_os("SAMPLE_SERVICE").is_some() {
        return construct_runtime::main("sample", run);
    }
    let tests: [(&str, fn()); 13] = [
        ("metrics_are_served_with_health", metrics_are_served_with_health),
        ("sigterm_drains_and_exits_with_0", sigterm_drains_and_exits_with_0),
        ("second_signal_drops_work_and_exits_with_3", second_signal_drops_work_and_exits_with_3),
        ("grace_period_drops_work_and_exits_with_3", grace_period_drops_work_and_exits_with_3),
        ("panicking_task_exits_with_1_and_its_name", panicking_task_exits_with_1_and_its_name),
        ("failed_start_exits_with_1_and_the_reason", failed_start_exits_with_1_and_the_reason),
        (
            "unconnected_process_reports_it_and_can_be_stopped",
            unconnected_process_reports_it_and_can_be_stopped,
        ),
        (
            "invalid_configuration_exits_with_2_and_the_variable",
            invalid_configuration_exits_with_2_and_the_variable,
        ),
        ("check_config_starts_nothing", check_config_starts_nothing),
        ("print_config_masks_secrets", print_config_masks_secrets),
        (
            "version_and_help_exit_with_0_and_bad_arguments_with_2",
            version_and_help_exit_with_0_and_bad_arguments_with_2,
        ),
        (
            "spans_are_exported_and_silent_collector_does_not_block",
            spans_are_exported_and_silent_collector_does_not_block,
        ),
        (
            "invalid_collector_address_exits_with_1_and_its_name",
            invalid_collector_address_exits_with_1_and_its_name,
        ),
    ];
    let trials = tests.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

fn command(variables: &[(&str, &str)], arguments: &[&str]) -> Command {
    let mut command = Command::new(env::current_exe().expect("a running program has a path"));
    command
        .env_clear()
        .env("SAMPLE_SERVICE", "1")
        .envs(variables.iter().copied())
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn output(variables: &[(&str, &str)], arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } =
        command(variables, arguments).output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("output is text");
    (status.code(), text(stdout), text(stderr))
}

/// A service in its own process with a health server and JSON logs.
struct Service {
    child: Child,
    lines: mpsc::Receiver<String>,
    log: Vec<String>,
}

impl Service {
    fn start(mode: &str, more: &[(&str, &str)]) -> Self {
        let mut variables = vec![
            ("CONSTRUCT_SAMPLE_MODE", mode),
            ("CONSTRUCT_HEALTH_LISTEN", "127.0.0.1:0"),
            ("CONSTRUCT_LOG_FORMAT", "json"),
        ];
        variables.extend(more);
        let mut child = command(&variables, &[]).spawn().expect("the program starts");
        let stderr = BufReader::new(child.stderr.take().expect("it is piped"));
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { child, lines, log: Vec::new() }
    }

    /// Waits for a log line with this message.
    fn wait_for(&mut self, message: &str) -> Value {
        loop {
            match self.lines.recv_timeout(TOO_LONG) {
                Ok(line) => {
                    self.log.push(line.clone());
                    let line: Value = serde_json::from_str(&line).unwrap_or(Value::Null);
                    if line["fields"]["message"].as_str().is_some_and(|text| text.contains(message))
                    {
                        return line;
                    }
                }
                Err(error) => panic!("no line with {message:?} ({error}) in {:#?}", self.log),
            }
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal)
            .expect("the child exists until it is waited for");
    }

    fn exit_code(&mut self) -> Option<i32> {
        let (sender, receiver) = mpsc::channel::<()>();
        let pid = rustix::process::Pid::from_child(&self.child);
        // A service that does not end must fail the test, not hang it.
        let watchdog = thread::spawn(move || {
            if receiver.recv_timeout(TOO_LONG) == Err(mpsc::RecvTimeoutError::Timeout) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        });
        let status = self.child.wait().expect("the child can be waited for");
        drop(sender);
        watchdog.join().expect("the watchdog does not panic");
        status.code()
    }
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the health server listens");
    write!(stream, "GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
        .expect("it reads");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("it answers");
    response
}

fn sigterm_drains_and_exits_with_0() {
    let mut service = Service::start("obedient", &[("CONSTRUCT_INSTANCE_ID", "sample-7")]);
    let line = service.wait_for("health endpoints");
    let address = line["fields"]["address"].as_str().expect("the line has the address").to_owned();
    assert_eq!(service.wait_for("started")["instance"], "sample-7");
    assert!(get(&address, "/healthz").starts_with("HTTP/1.1 200"));
    assert!(get(&address, "/readyz").starts_with("HTTP/1.1 200"));
    service.signal(rustix::process::Signal::TERM);
    assert_eq!(service.wait_for("stopping")["fields"]["reason"], "SIGTERM");
    assert_eq!(service.exit_code(), Some(0));
}

fn metrics_are_served_with_health() {
    let mut service = Service::start("obedient", &[("CONSTRUCT_INSTANCE_ID", "sample-7")]);
    let line = service.wait_for("health endpoints");
    let address = line["fields"]["address"].as_str().expect("the line has the address").to_owned();
    service.wait_for("started");
    let page = get(&address, "/metrics");
    assert!(
        page.starts_with("HTTP/1.1 200")
            && page.contains("content-type: text/plain; version=0.0.4"),
        "{page}"
    );
    assert!(page.contains("\nsample_starts_total 1\n"), "{page}");
    assert!(
        page.contains("service_instance_id=\"sample-7\",service_name=\"construct-sample\""),
        "{page}"
    );
    service.signal(rustix::process::Signal::TERM);
    assert_eq!(service.exit_code(), Some(0));
}

fn second_signal_drops_work_and_exits_with_3() {
    let mut service = Service::start("stubborn", &[("CONSTRUCT_SHUTDOWN_GRACE", "10m")]);
    service.wait_for("started");
    service.signal(rustix::process::Signal::INT);
    service.wait_for("stopping");
    service.signal(rustix::process::Signal::TERM);
    let line = service.wait_for("dropping running tasks");
    assert!(line["fields"]["tasks"].as_str().is_some_and(|tasks| tasks.contains("work")), "{line}");
    assert_eq!(service.exit_code(), Some(3));
}

fn grace_period_drops_work_and_exits_with_3() {
    let mut service = Service::start("stubborn", &[("CONSTRUCT_SHUTDOWN_GRACE", "50ms")]);
    service.wait_for("started");
    service.signal(rustix::process::Signal::TERM);
    service.wait_for("dropping running tasks");
    assert_eq!(service.exit_code(), Some(3));
}

fn panicking_task_exits_with_1_and_its_name() {
    let mut service = Service::start("panicking", &[]);
    service.wait_for("panic: out of luck");
    let line = service.wait_for("the service failed");
    assert_eq!(line["fields"]["error"], "task `work` panicked: out of luck");
    assert_eq!(service.exit_code(), Some(1));
}

fn failed_start_exits_with_1_and_the_reason() {
    let mut service = Service::start("unheard of", &[]);
    let line = service.wait_for("the service failed");
    assert_eq!(line["fields"]["error"], "the service could not start: there is no such mode");
    assert_eq!(service.exit_code(), Some(1));
}

fn unconnected_process_reports_it_and_can_be_stopped() {
    let mut service = Service::start("unreachable", &[]);
    let line = service.wait_for("health endpoints");
    let address = line["fields"]["address"].as_str().expect("the line has the address").to_owned();
    let line = service.wait_for("cannot connect");
    assert_eq!(
        (&line["fields"]["to"], &line["fields"]["reason"]),
        (&"nats".into(), &"refused".into())
    );
    let ready = get(&address, "/readyz");
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    assert!(get(&address, "/healthz").starts_with("HTTP/1.1 200"));
    service.signal(rustix::process::Signal::TERM);
    assert_eq!(service.exit_code(), Some(0));
}

fn invalid_configuration_exits_with_2_and_the_variable() {
    for (name, value, part) in [
        ("CONSTRUCT_SAMPLE_COUNT", "0", "must be at least 1"),
        ("CONSTRUCT_SAMPLE_COUNT", "many", "u32"),
        ("CONSTRUCT_LOG", "construct=[loud", "filter"),
        ("CONSTRUCT_SHUTDOWN_GRACE", "5", "such as 5s"),
        ("CONSTRUCT_CONFIG", "/nonexistent.toml", "/nonexistent.toml"),
    ] {
        let (code, _, stderr) = output(&[(name, value)], &[]);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.starts_with("construct-sample: ") && stderr.contains(part), "{stderr}");
        assert!(name == "CONSTRUCT_CONFIG" || stderr.contains(name), "{stderr}");
    }
}

fn check_config_starts_nothing() {
    let (code, stdout, stderr) = output(&[], &["--check-config"]);
    assert_eq!(
        (code, stdout.as_str(), stderr.as_str()),
        (Some(0), "construct-sample: the configuration is valid\n", "")
    );
    let (code, ..) = output(&[("CONSTRUCT_SAMPLE_COUNT", "0")], &["--check-config"]);
    assert_eq!(code, Some(2));
}

fn print_config_masks_secrets() {
    let variables =
        [("CONSTRUCT_NATS_URL", "nats://user:s3cret@nats:4222"), ("CONSTRUCT_SAMPLE_COUNT", "3")];
    let (code, stdout, _) = output(&variables, &["--print-config"]);
    assert_eq!(code, Some(0));
    assert!(
        stdout.contains("nats_url = \"nats://***@nats:4222\"") && !stdout.contains("s3cret"),
        "{stdout}"
    );
    assert!(
        stdout.contains("sample_count = 3  # CONSTRUCT_SAMPLE_COUNT in the environment"),
        "{stdout}"
    );
}

fn version_and_help_exit_with_0_and_bad_arguments_with_2() {
    let (code, stdout, _) = output(&[], &["--version"]);
    assert_eq!(
        (code, stdout.trim()),
        (Some(0), concat!("construct-sample ", env!("CARGO_PKG_VERSION")))
    );
    let (code, stdout, _) = output(&[], &["--help"]);
    assert_eq!(code, Some(0));
    assert!(
        stdout.contains("Usage: construct-sample") && stdout.contains("--check-config"),
        "{stdout}"
    );
    assert_eq!(output(&[], &["--nonsense"]).0, Some(2));
}

fn spans_are_exported_and_silent_collector_does_not_block() {
    let collector = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
    let endpoint = format!("http://{}", collector.local_addr().expect("it is bound"));
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut preface = [0; 14];
        let (mut stream, _) = collector.accept().expect("the exporter connects");
        stream.read_exact(&mut preface).expect("the exporter speaks");
        // Kept open without an answer until the test ends.
        sender.send((preface, stream)).expect("the test waits");
    });
    let mut service = Service::start("obedient", &[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)]);
    service.wait_for("started");
    service.signal(rustix::process::Signal::TERM);
    let (preface, _stream) =
        receiver.recv_timeout(TOO_LONG).expect("spans are exported at the latest at the end");
    assert_eq!(&preface, b"PRI * HTTP/2.0");
    assert_eq!(service.exit_code(), Some(0));
}

fn invalid_collector_address_exits_with_1_and_its_name() {
    let (code, _, stderr) = output(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:1")], &[]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("OTEL_EXPORTER_OTLP_ENDPOINT"), "{stderr}");
}
