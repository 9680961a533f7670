//! Random calls: whatever the arguments of a tool are, the call ends with a result that matches its
//! definition, or with an error for a model. Half of the arguments fit the definition, so that the
//! tools work on odd files.

use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::symlink;
use std::sync::Arc;

use fastrand::Rng;
use rustix::fs::{CWD, FileType, Mode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::tests::fuzz::{Target, fuzz, reductions};

/// Maximum time of a call, whatever its arguments; programs have five seconds of it.
const LONGEST: Duration = Duration::from_secs(60);
/// Longest error message, in bytes: a model reads it.
const LONGEST_MESSAGE: usize = 16 << 10;
/// The address of the test's own server, the only one that can be reached.
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

#[derive(Clone)]
struct Call {
    tool: String,
    arguments: Value,
}

struct Calls {
    egress: Egress,
    sandbox: CommandSandbox,
    port: u16,
}

impl Calls {
    fn bench(&self) -> Bench {
        let hosts = ["*.test", "127.0.0.1"].map(|host| host.parse().expect("a pattern")).into();
        let mut bench = Bench::with(Policy { hosts, ..Policy::default() }, self.egress.clone());
        bench.tools.sandbox = self.sandbox.clone();
        bench.write("text.txt", "one\ntwo\r\nthree\u{1f600}\n");
        bench.write("sub/code.rs", "fn main() {}\n");
        bench.write("sub/.gitignore", "*.log\n!x\n[\n");
        bench.write("binary", [0, 159, 146, 150, 255, 254]);
        bench.write("utf16", [0xff, 0xfe, b'a', 0, b'\n', 0, b'b']);
        bench.write("latin", b"caf\xe9\n\xff");
        bench.write("wide", "x".repeat(100_000));
        bench.write("empty", "");
        bench.write("page.html", "<p>a<table><tr><td>b</table><pre>c");
        symlink("/etc", bench.path("away")).expect("linked");
        symlink("sub", bench.path("link")).expect("linked");
        symlink("loop", bench.path("loop")).expect("linked");
        rustix::fs::mknodat(CWD, bench.path("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
            .expect("a pipe");
        bench
    }

    async fn call(&self, bench: &Bench, call: &Call) -> Result<(), String> {
        let Call { tool, arguments } = call;
        let canonical = bench.tools.canonical(tool, arguments);
        if let Ok(canonical) = &canonical {
            if bench.tools.canonical(tool, canonical).as_ref() != Ok(canonical) {
                return Err(format!("{tool}: the canonical form {canonical} has another one"));
            }
            bench
                .tools
                .subjects(tool, canonical, &bench.tools.environment())
                .await
                .map_err(|error| format!("{tool}: no subject: {error}"))?;
        }
        let cx = CallContext::default();
        let ended =
            tokio::time::timeout(LONGEST, bench.tools.call(tool, arguments.clone(), &cx)).await;
        let ended = ended.map_err(|_| format!("{tool}: it takes longer than {LONGEST:?}"))?;
        match ended {
            Ok(result) => {
                if let Err(error) = canonical {
                    return Err(format!(
                        "{tool}: it was executed, but has no canonical form: {error}"
                    ));
                }
                let output = &definition(tool)
                    .ok_or_else(|| format!("{tool} is no tool, but was called"))?
                    .output;
                definitions::accept(output, &result)
                    .map_err(|why| format!("{tool} returned what is not described: {why}"))
            }
            Err(error) if error.name == "InternalError" || error.name.is_empty() => {
                Err(format!("{tool}: {error}"))
            }
            Err(error) if error.message.is_empty() || error.message.len() > LONGEST_MESSAGE => {
                Err(format!("{tool}: a message of {} bytes: {}", error.message.len(), error.name))
            }
            Err(_) => Ok(()),
        }
    }

    fn text(&self, random: &mut Rng) -> String {
        const TEXTS: &[&str] = &[
            "",
            ".",
            "..",
            "/",
            "text.txt",
            "./text.txt/",
            "sub/code.rs",
            "sub",
            "link/code.rs",
            "away/passwd",
            "loop",
            "pipe",
            "binary",
            "utf16",
            "latin",
            "wide",
            "empty",
            "new",
            "new/dir/file",
            "../x",
            "/etc/passwd",
            "a\0b",
            "sub/../text.txt",
            "one",
            "two\r\n",
            "three",
            "\u{1f600}",
            "x",
            "xx",
            "\n",
            "*",
            "**/*",
            "*.{rs,txt}",
            "[",
            "[!a]",
            "{a,{b,c}}",
            "\\",
            "(",
            "(a+)+$",
            "\\p{L}",
            "^$",
            ".*",
            "(?i)ONE",
            "\\b",
            "x{1000}",
            "a|b|",
            "%",
            "$HOME",
            "`id`",
            "true",
            "exit 3",
            "echo x; echo y >&2",
            "cat text.txt",
            "kill -9 $$",
            "print(1)",
            "1 + 1",
            "--version",
            "-h",
            "status",
            "log",
            "PATH",
            "A",
            "A=B",
            "\u{202e}",
            "\u{fffd}",
            "e\u{301}",
            "http://open.test:PORT/",
            "http://open.test:PORT/page",
            "http://open.test:PORT/loop",
            "http://closed.test/",
            "http://127.0.0.1:PORT/cut",
            "http://[::1]/",
            "ftp://x/",
            "http://other.example/",
            "GET",
            "post",
            "markdown",
            "text",
            "read_file",
            "search files",
            "null",
            "NaN",
            "__proto__",
            "constructor",
            "toString",
        ];
        match random.u8(..12) {
            0 => (0..random.usize(..12)).map(|_| random.char(..)).collect(),
            1 => TEXTS[random.usize(..TEXTS.len())].repeat(random.usize(1..300)),
            2 => "x".repeat(random.usize(..9000)),
            3 => format!(
                "{}{}",
                TEXTS[random.usize(..TEXTS.len())],
                TEXTS[random.usize(..TEXTS.len())]
            ),
            _ => TEXTS[random.usize(..TEXTS.len())].replace("PORT", &self.port.to_string()),
        }
    }

    /// Any JSON.
    fn value(&self, random: &mut Rng, depth: usize) -> Value {
        const NUMBERS: &[f64] = &[
            0.0,
            1.0,
            -1.0,
            2.0,
            0.5,
            1e3,
            1e6,
            1e15,
            9_007_199_254_740_991.0,
            9_007_199_254_740_992.0,
            1e300,
            -0.0,
            5e-324,
        ];
        match random.u8(..if depth > 3 { 6 } else { 9 }) {
            0 => Value::Null,
            1 => random.bool().into(),
            2 => NUMBERS[random.usize(..NUMBERS.len())].into(),
            3 => {
                if random.bool() {
                    random.u64(..).into()
                } else {
                    random.i64(..).into()
                }
            }
            4 | 5 => self.text(random).into(),
            6 => (0..random.usize(..5)).map(|_| self.value(random, depth + 1)).collect(),
            _ => Value::Object(
                (0..random.usize(..4))
                    .map(|_| (self.text(random), self.value(random, depth + 1)))
                    .collect(),
            ),
        }
    }

    /// A value that mostly fits a parameter.
    fn fitting(&self, kind: &Kind, random: &mut Rng) -> Value {
        if random.u8(..20) == 0 {
            return self.value(random, 0);
        }
        let texts = |random: &mut Rng| -> Value {
            (0..random.usize(..4)).map(|_| Value::from(self.text(random))).collect()
        };
        match kind {
            Kind::Path | Kind::File | Kind::Text { .. } => self.text(random).into(),
            Kind::Integer { min, max } => match random.u8(..4) {
                0 => (*min).into(),
                1 => (*max).min(20_000).into(),
                _ => random.u64(*min..=(*min + 20).min(*max)).into(),
            },
            Kind::Number { min, max } => (min + random.f64() * (max - min)).into(),
            Kind::Boolean => random.bool().into(),
            Kind::OneOf(words) => words[random.usize(..words.len())].into(),
            Kind::TextOrTexts { .. } | Kind::CodeOrArguments { .. } if random.bool() => {
                self.text(random).into()
            }
            Kind::TextOrTexts { .. } | Kind::CodeOrArguments { .. } | Kind::Arguments => {
                texts(random)
            }
            Kind::TextMap => Value::Object(
                (0..random.usize(..3))
                    .map(|_| (self.text(random), self.text(random).into()))
                    .collect(),
            ),
            Kind::Object(properties) => self.fitting_object(properties, random),
            Kind::Objects(properties) => {
                (0..random.usize(1..4)).map(|_| self.fitting_object(properties, random)).collect()
            }
            Kind::Any => self.value(random, 0),
        }
    }

    fn fitting_object(&self, parameters: &[Parameter], random: &mut Rng) -> Value {
        let mut object = serde_json::Map::new();
        for parameter in parameters {
            if parameter.name == "timeout_seconds" {
                object.insert(parameter.name.to_owned(), 5.into());
            } else if parameter.required || random.u8(..3) == 0 {
                object.insert(parameter.name.to_owned(), self.fitting(&parameter.kind, random));
            }
        }
        Value::Object(object)
    }

    fn one_call(&self, random: &mut Rng) -> Call {
        let tools = definitions();
        let tool = &tools[random.usize(..tools.len())];
        // Programs start slowly, and their behavior mostly depends on the machine.
        let tool = if tool.permission == Permission::Commands && random.u8(..4) > 0 {
            &tools[random.usize(..6)]
        } else {
            tool
        };
        let name = match (random.u8(..10), tool.aliases) {
            (0, [alias, ..]) => (*alias).to_owned(),
            (1, _) if random.bool() => self.text(random),
            _ => tool.name.to_owned(),
        };
        let runs = tool.permission == Permission::Commands;
        let mut arguments = if random.bool() || runs {
            self.fitting_object(tool.parameters, random)
        } else {
            self.value(random, 0)
        };
        if runs && let Some(named) = arguments.as_object_mut() {
            named.insert("options".to_owned(), json!({"timeout_seconds": 5}));
        }
        Call { tool: name, arguments }
    }
}

impl Target for Calls {
    type Case = Vec<Call>;

    const NAME: &'static str = "calls";

    fn make(&self, random: &mut Rng) -> Vec<Call> {
        (0..random.usize(1..6)).map(|_| self.one_call(random)).collect()
    }

    async fn check(&self, calls: &Vec<Call>) -> Result<(), String> {
        let bench = self.bench();
        for call in calls {
            self.call(&bench, call).await?;
        }
        Ok(())
    }

    fn smaller(&self, calls: &Vec<Call>) -> Vec<Vec<Call>> {
        let mut smaller = reductions(calls);
        for (position, call) in calls.iter().enumerate() {
            for arguments in smaller_values(&call.arguments) {
                let mut calls = calls.clone();
                calls[position].arguments = arguments;
                smaller.push(calls);
            }
        }
        smaller
    }

    fn show(&self, calls: &Vec<Call>) -> String {
        calls.iter().map(|call| format!("{}({})\n", call.tool, call.arguments)).collect()
    }
}

/// Smaller variants of the value.
fn smaller_values(value: &Value) -> Vec<Value> {
    match value {
        Value::String(text) => {
            let characters: Vec<char> = text.chars().collect();
            reductions(&characters)
                .into_iter()
                .map(|characters| String::from_iter(characters).into())
                .collect()
        }
        Value::Array(items) => {
            let parts = items.iter().enumerate().flat_map(|(position, item)| {
                smaller_values(item).into_iter().map(move |smaller| {
                    let mut items = items.clone();
                    items[position] = smaller;
                    Value::Array(items)
                })
            });
            reductions(items).into_iter().map(Value::Array).chain(parts).collect()
        }
        Value::Object(map) => {
            let entries: Vec<(String, Value)> = map.clone().into_iter().collect();
            let parts = map.iter().flat_map(|(name, item)| {
                smaller_values(item).into_iter().map(move |smaller| {
                    let mut map = map.clone();
                    map.insert(name.clone(), smaller);
                    Value::Object(map)
                })
            });
            reductions(&entries)
                .into_iter()
                .map(|entries| Value::Object(entries.into_iter().collect()))
                .chain(parts)
                .collect()
        }
        _ => Vec::new(),
    }
}

/// A server with odd answers.
async fn server() -> u16 {
    let listener = TcpListener::bind((LOCAL, 0)).await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = vec![0; 16 << 10];
            let read = stream.read(&mut request).await.unwrap_or(0);
            let path = String::from_utf8_lossy(&request[..read])
                .split(' ')
                .nth(1)
                .unwrap_or_default()
                .to_owned();
            let answer: &[u8] = match path.as_str() {
                "/page" => b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 27\r\nConnection: close\r\n\r\n<h1>a<ul><li><a href=b>c<p>\xff",
                "/loop" => b"HTTP/1.1 302 Found\r\nLocation: /loop\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
                "/cut" => b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nConnection: close\r\n\r\ncut",
                _ => b"HTTP/1.1 418 \xe9\r\nX-A: \xff\r\nContent-Length: 3\r\nConnection: close\r\n\r\n\0\xffa",
            };
            drop(stream.write_all(answer).await);
        }
    });
    port
}

#[tokio::test]
async fn random_calls_end_as_their_definitions_describe() {
    let resolve =
        |host: String| -> futures::future::BoxFuture<'static, std::io::Result<Vec<IpAddr>>> {
            let address =
                if host == "open.test" { LOCAL } else { IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)) };
            Box::pin(async move { Ok(vec![address]) })
        };
    let egress = Egress::with_lookup(&[LOCAL], Arc::new(resolve)).expect("an HTTP client");
    let sandbox = crate::command::tests::sandbox().await;
    fuzz(Calls { egress, sandbox, port: server().await }).await;
}
