//! Handles: where they are replaced by secrets, where not, and that secrets never come back.

use construct_proto::mesh::v1::{GrantedSecret, SealedSecret};
use construct_runtime::MasterKeys;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use std::net::SocketAddr;
use std::sync::Mutex;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use construct_domain::policy::{Action, Verdict};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::fetch::{LOCAL, of_type, ok, redirect, server};
use super::*;
use crate::command::Confinement;
use crate::scrub::{Pattern, Scrubber};

const VALUE: &str = "gh/s3cr3t+0123456789=é\"x";
const SEED: &[u8] = b"the seed of an execution";

pub(crate) fn keys() -> MasterKeys {
    MasterKeys::parse("s1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=").expect("a key of 32 bytes")
}

/// A secret as encrypted by the gateway.
pub(crate) fn granted(name: &str, value: &str, hosts: &[&str], commands: &[&str]) -> GrantedSecret {
    let id = format!("secret_{name}");
    let key = LessSafeKey::new(
        UnboundKey::new(&AES_256_GCM, keys().active().expose()).expect("32 bytes"),
    );
    let mut ciphertext = value.as_bytes().to_vec();
    let nonce = Nonce::assume_unique_for_key([7; 12]);
    key.seal_in_place_append_tag(nonce, Aad::from(id.as_bytes()), &mut ciphertext)
        .expect("a short text");
    GrantedSecret {
        id,
        name: name.to_owned(),
        hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        commands: commands.iter().map(|command| (*command).to_owned()).collect(),
        value: Some(SealedSecret { key_id: "s1".to_owned(), nonce: vec![7; 12], ciphertext }),
    }
}

/// A toolbox with secrets that may reach 127.0.0.1 and other hosts, and runs commands without a
/// sandbox.
fn bench(secrets: &[GrantedSecret]) -> Bench {
    let mut policy = Policy { hosts: vec!["*".parse().expect("a host")], ..Policy::default() };
    policy.commands.confinement = Confinement::AllowUnconfined;
    let Bench { directory, tools } =
        Bench::with(policy, Egress::new(&[LOCAL]).expect("an HTTP client"));
    Bench { directory, tools: tools.with_secrets(Secrets::open(secrets, Some(&keys()), SEED)) }
}

async fn handle(bench: &Bench, name: &str) -> String {
    bench.call("secrets.get", json!([name])).await.as_str().expect("a text").to_owned()
}

/// Asserts that no significant part of a value is in what came back.
fn assert_clean(what: &impl ToString, value: &str) {
    let text = what.to_string();
    let value: Vec<char> = value.chars().collect();
    for piece in value.windows(6) {
        let piece: String = piece.iter().collect();
        assert!(!text.contains(&piece), "{piece:?} came back: {text}");
    }
}

#[tokio::test]
async fn header_has_the_value_only_on_the_wire() {
    let value = "gh/s3cr3t+0123456789=x";
    let (address, mut requests) = server(|request| {
        let sent = request
            .lines()
            .find_map(|line| line.strip_prefix("authorization: "))
            .unwrap_or_default()
            .to_owned();
        let body = format!("{request}{sent}");
        let head =
            format!("HTTP/1.1 401 {sent}\r\nX-Echo: {sent}\r\nContent-Length: {}", body.len());
        format!("{head}\r\nConnection: close\r\n\r\n{body}").into()
    })
    .await;
    let bench = bench(&[granted("TOKEN", value, &["127.0.0.1"], &[])]);
    let handle = handle(&bench, "TOKEN").await;
    let options = json!({"headers": {"Authorization": format!("Bearer {handle}"), "X-Twice": format!("{handle}:{handle}")}});
    let result = bench.call("fetch", json!([format!("http://{address}/"), options])).await;
    let request = requests.recv().await.expect("a request");
    assert!(request.contains(&format!("authorization: Bearer {value}\r\n")), "{request}");
    assert!(request.contains(&format!("x-twice: {value}:{value}\r\n")), "{request}");
    assert_clean(&result, value);
    assert_eq!(result["headers"]["x-echo"], json!(format!("Bearer {handle}")));
    assert!(
        result["body"]
            .as_str()
            .expect("a text")
            .contains(&format!("authorization: Bearer {handle}\r\n")),
        "{result}"
    );
}

#[tokio::test]
async fn secret_is_sent_only_to_bound_hosts_over_https() {
    let (address, mut requests) = server(|_| ok("")).await;
    let bench = bench(&[
        granted("TOKEN", VALUE, &["api.example.com", "*.example.org"], &[]),
        granted("COMMANDS_ONLY", VALUE, &[], &["git"]),
        granted("PLAIN", "12345678", &["example.net"], &[]),
    ]);
    for (name, url, why) in [
        (
            "TOKEN",
            format!("http://{address}/"),
            "bound to these hosts: api.example.com, *.example.org",
        ),
        ("TOKEN", "https://example.org/".to_owned(), "bound to these hosts"),
        ("TOKEN", "https://api.example.com.evil.org/".to_owned(), "bound to these hosts"),
        ("COMMANDS_ONLY", format!("http://{address}/"), "and commands: git"),
        ("PLAIN", "http://example.net/".to_owned(), "only sent over https"),
    ] {
        let handle = handle(&bench, name).await;
        let error = bench.fails("fetch", json!([url, {"headers": {"x-key": handle}}])).await;
        assert_eq!(error.name, "SecretNotAllowed", "{error}");
        assert!(
            error.message.contains(why) && error.message.contains("nothing was sent"),
            "{error}"
        );
    }
    assert!(requests.try_recv().is_err(), "a request was sent");
}

#[tokio::test]
async fn redirect_to_another_origin_drops_secrets() {
    let (inner, mut reached) = server(|_| ok("there")).await;
    let to = format!("http://{inner}/next");
    let (outer, mut requests) = server(move |_| redirect(307, &to)).await;
    let bench = bench(&[granted("TOKEN", "12345678-abc", &["127.0.0.1"], &[])]);
    let handle = handle(&bench, "TOKEN").await;
    // Also in a header that is otherwise forwarded.
    let options = json!({"headers": {"Authorization": handle, "User-Agent": format!("a/{handle}"), "Accept": "text/plain"}});
    let result = bench.call("fetch", json!([format!("http://{outer}/"), options])).await;
    assert_eq!(result["body"], json!("there"));
    assert!(requests.recv().await.expect("a request").contains("authorization: 12345678-abc\r\n"));
    let second = reached.recv().await.expect("a request");
    assert!(second.contains("accept: text/plain\r\n"), "{second}");
    assert!(!second.contains("12345678") && !second.contains("secret:"), "{second}");
}

#[tokio::test]
async fn body_truncated_within_a_secret_does_not_show_its_start() {
    let value = "0123456789abcdefghijkl";
    let (address, _requests) = server(move |_| ok(&format!("text {value} more text"))).await;
    let bench = bench(&[granted("TOKEN", value, &["127.0.0.1"], &[])]);
    let handle = handle(&bench, "TOKEN").await;
    for max_bytes in 1..=40 {
        let options = json!({"max_bytes": max_bytes, "headers": {"x-key": handle}});
        let result = bench.call("fetch", json!([format!("http://{address}/"), options])).await;
        let whole = format!("text {value} more text");
        let mut expected = whole[..max_bytes.min(whole.len())].to_owned();
        if max_bytes > 5 {
            let after = expected
                .split_off(5)
                .split_off(value.len().min(max_bytes - 5).min(whole.len() - 5));
            expected = format!("text {handle}{after}");
        }
        assert_eq!(result["body"], json!(expected), "{max_bytes}");
        assert_eq!(result["truncated"], json!(max_bytes < whole.len()));
    }
}

/// A server that answers with the path and then padding, as many hosts do in some form.
async fn reflecting() -> SocketAddr {
    let repeat = |request: &str| {
        let path = request.split(' ').nth(1).unwrap_or_default().trim_start_matches('/').to_owned();
        ok(&format!("{path}{}", "#".repeat(600)))
    };
    server(repeat).await.0
}

/// A script's guesses of the value, in three forms that an address does not change.
fn guesses(value: &str) -> [String; 3] {
    [
        value.to_owned(),
        value.bytes().map(|byte| format!("{byte:02x}")).collect(),
        STANDARD.encode(value),
    ]
}

const TOKEN: &str = "ghpx7Qw9Zk2Lm4Vt8Rp1eNdY";

#[tokio::test]
async fn unsent_secret_does_not_affect_responses() {
    let address = reflecting().await;
    let secrets = [
        granted("TOKEN", TOKEN, &["api.github.com"], &["git"]),
        granted("SENT", VALUE, &["127.0.0.1"], &[]),
    ];
    let bench = bench(&secrets);
    // Also if it was requested, and in an exchange of another secret.
    handle(&bench, "TOKEN").await;
    let sent = handle(&bench, "SENT").await;
    for text in guesses(TOKEN) {
        for length in 1..=text.len() {
            let headers = if length % 2 == 0 { json!({}) } else { json!({"x-key": sent}) };
            let options = json!({"max_bytes": length, "headers": headers});
            let result =
                bench.call("fetch", json!([format!("http://{address}/{text}"), options])).await;
            assert_eq!(result["body"], json!(text[..length]));
            assert!(result["url"].as_str().expect("a text").ends_with(&text));
        }
    }
}

#[tokio::test]
async fn partial_secret_in_a_response_is_ordinary_text() {
    let address = reflecting().await;
    let bench = bench(&[granted("TOKEN", TOKEN, &["127.0.0.1"], &[])]);
    let handle = handle(&bench, "TOKEN").await;
    let options = |length: usize| json!({"max_bytes": length, "headers": {"x-key": handle}});
    for text in guesses(TOKEN) {
        for length in 1..text.len() {
            // It is not visible whether the next character is the right one.
            let right = &text[..length];
            let result = bench
                .call("fetch", json!([format!("http://{address}/{right}"), options(length)]))
                .await;
            assert_eq!(result["body"], json!(right));
        }
        let result = bench
            .call("fetch", json!([format!("http://{address}/{text}"), options(text.len())]))
            .await;
        assert_eq!(result["body"], json!(handle), "the complete value is found");
    }
}

/// If the host sends nothing more or closes the connection, what could be part of the value is
/// withheld, whatever it is.
#[tokio::test]
async fn interrupted_body_withholds_its_end() {
    let margin = Scrubber::new([Arc::new(Pattern::new(TOKEN, ""))]).margin();
    let padding = 3 * margin;
    for breaks in [false, true] {
        let listener = TcpListener::bind((LOCAL, 0)).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 4096];
                let read = stream.read(&mut request).await.unwrap_or_default();
                let request = String::from_utf8_lossy(&request[..read]).into_owned();
                let path = request
                    .split(' ')
                    .nth(1)
                    .unwrap_or_default()
                    .trim_start_matches('/')
                    .to_owned();
                let head = "HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n";
                drop(
                    stream
                        .write_all(format!("{head}{}{path}", "-".repeat(padding)).as_bytes())
                        .await,
                );
                if !breaks {
                    open.push(stream);
                }
            }
        });
        let bench = bench(&[granted("TOKEN", TOKEN, &["127.0.0.1"], &[])]);
        let handle = handle(&bench, "TOKEN").await;
        let mut bodies = Vec::new();
        for guess in [&TOKEN[..10], "zzzzzzzzzz"] {
            let url = format!("http://{address}/{guess}");
            let max_bytes = padding + guess.len() - 2;
            let without = bench.call("fetch", json!([url, {"max_bytes": max_bytes}])).await;
            assert_eq!(without["body"], json!(format!("{}{}", "-".repeat(padding), &guess[..8])));
            let options = json!({"max_bytes": max_bytes, "headers": {"x-key": handle}});
            let with = bench.call("fetch", json!([url, options])).await;
            assert_eq!(with["truncated"], json!(true));
            bodies.push(with["body"].clone());
        }
        assert_eq!(bodies[0], json!("-".repeat(padding + 10 - margin)));
        assert_eq!(bodies[0], bodies[1]);
    }
}

/// A random text with parts of a value, and sometimes all of it, in several forms.
fn content(random: &mut fastrand::Rng, value: &str, alphabet: &[char]) -> String {
    let mut text = String::new();
    for _ in 0..random.usize(1..12) {
        let form = match random.u8(0..5) {
            0 => STANDARD.encode(value),
            1 => STANDARD.encode(format!("user:{value}")),
            2 => value.bytes().map(|byte| format!("{byte:02x}")).collect(),
            _ => value.to_owned(),
        };
        match random.u8(0..10) {
            0 => text.push_str(&form),
            1 => text.push('\n'),
            2 => text.push_str(&form[form.ceil_char_boundary(random.usize(1..form.len()))..]),
            3..6 => text.push_str(&form[..form.floor_char_boundary(random.usize(1..form.len()))]),
            _ => text.extend((0..random.usize(0..30)).filter_map(|_| random.choice(alphabet))),
        }
    }
    text
}

#[tokio::test]
async fn response_depends_only_on_complete_sent_secrets() {
    let response = Arc::new(Mutex::new(Vec::new()));
    let shared = Arc::clone(&response);
    let (address, _requests) = server(move |_| shared.lock().expect("unpoisoned").clone()).await;
    let alphabets =
        ["ab", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", "x/+=&\"<'é%~"];
    let (mut whole, mut parts, mut withheld) = (0, 0, 0);
    for seed in 0..400 {
        let random = &mut fastrand::Rng::with_seed(seed);
        let alphabet: Vec<char> = alphabets[random.usize(0..alphabets.len())].chars().collect();
        let value: String =
            (0..random.usize(8..40)).filter_map(|_| random.choice(&alphabet)).collect();
        let text = content(random, &value, &alphabet);
        let breaks_off = random.u8(0..4) == 0 && !text.is_empty();
        let is_page = random.u8(0..4) == 0;
        let (kind, body) = match random.u8(0..3) {
            _ if is_page => {
                ("text/html; charset=utf-8", format!("<p>{text}<p>{text}").into_bytes())
            }
            0 => (
                "text/plain; charset=utf-16le",
                text.encode_utf16().flat_map(u16::to_le_bytes).collect(),
            ),
            _ => ("text/plain; charset=utf-8", text.clone().into_bytes()),
        };
        let mut sent = of_type(kind, &body);
        if breaks_off {
            sent.truncate(sent.len() - random.usize(1..=body.len().min(10)));
        }
        *response.lock().expect("unpoisoned") = sent;
        let max_bytes = random.usize(1..body.len() + 20);
        let form = if is_page { "markdown" } else { "text" };
        let without = bench(&[]);
        let with = bench(&[granted("TOKEN", &value, &["127.0.0.1"], &["git"])]);
        let token = handle(&with, "TOKEN").await;
        let fetch = async |bench: &Bench, headers: Value| {
            let options = json!({"max_bytes": max_bytes, "as": form, "headers": headers});
            let url = format!("http://{address}/");
            bench.tools.call("fetch", json!([url, options]), &CallContext::default()).await
        };
        let plain = fetch(&without, json!({})).await;
        let registered = fetch(&with, json!({})).await;
        assert_eq!(registered, plain, "{seed}: the secret was not sent");
        let scrubbed = fetch(&with, json!({"x-key": token})).await;
        let (plain, scrubbed) = match (plain, scrubbed) {
            (Ok(plain), Ok(scrubbed)) => (plain, scrubbed),
            (plain, scrubbed) => {
                assert!(breaks_off, "{seed}: {scrubbed:?}");
                assert_eq!(scrubbed, plain, "{seed}");
                continue;
            }
        };
        let (got, shown) =
            (plain["body"].as_str().expect("a text"), scrubbed["body"].as_str().expect("a text"));
        let pattern = Arc::new(Pattern::new(&value, ""));
        let has = |text: &str| {
            pattern.forms().any(|form| memchr::memmem::find(text.as_bytes(), form).is_some())
        };
        if [text.as_str(), got].iter().any(|text| has(text) || has(&text.replace('\n', ""))) {
            whole += 1;
            assert!(!has(&shown.replace(&token, " ")), "{seed}: {shown}");
            continue;
        }
        parts += 1;
        if scrubbed == plain {
            continue;
        }
        withheld += 1;
        assert!(breaks_off || is_page, "{seed}: {shown:?} for {got:?}");
        // For a page both the source and the text, and a few bytes for closing marks and a divided
        // character.
        let most = Scrubber::new([pattern]).margin() * (1 + usize::from(is_page)) + 12;
        assert!(
            got.starts_with(shown) && got.len() - shown.len() <= most,
            "{seed}: {shown:?} for {got:?}"
        );
        assert_eq!(scrubbed["truncated"], json!(true));
    }
    assert!(whole > 50 && parts > 100 && withheld > 10, "{whole} {parts} {withheld}");
}

#[tokio::test]
async fn redirect_error_has_the_handle() {
    #[derive(Debug)]
    struct Asks;
    impl Redirects for Asks {
        fn judge(&self, _: PolicySubject) -> Verdict {
            Verdict { action: Action::Ask, reason: String::new() }
        }
    }
    let (address, _requests) = server(|request| {
        let sent =
            request.lines().find_map(|line| line.strip_prefix("x-key: ")).unwrap_or_default();
        redirect(302, &format!("http://example.com/{sent}?again={sent}"))
    })
    .await;
    let bench = bench(&[granted("TOKEN", TOKEN, &["127.0.0.1"], &[])]);
    let token = handle(&bench, "TOKEN").await;
    let cx = CallContext { redirects: Some(Arc::new(Asks)), ..CallContext::default() };
    let args = json!([format!("http://{address}/"), {"headers": {"x-key": token}}]);
    let error = bench.tools.call("fetch", args, &cx).await.expect_err("not followed");
    assert_eq!(error.name, "RedirectNotFollowed");
    let told = format!("{} {}", error.message, error.details.expect("details"));
    assert_clean(&told, TOKEN);
    assert_eq!(told.matches(&token).count(), 3, "{told}");
}

/// `data` in gzip format, stored without compression.
fn gzip(data: &[u8]) -> Vec<u8> {
    let crc = !data.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 * (crc & 1)))
    });
    let length = u16::try_from(data.len()).expect("short");
    let mut packed = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255, 1];
    packed.extend(length.to_le_bytes());
    packed.extend((!length).to_le_bytes());
    packed.extend_from_slice(data);
    packed.extend(crc.to_le_bytes());
    packed.extend(u32::from(length).to_le_bytes());
    packed
}

#[tokio::test]
async fn compressed_body_is_scrubbed_or_rejected() {
    let (address, _requests) = server(|request| {
        let sent =
            request.lines().find_map(|line| line.strip_prefix("x-key: ")).unwrap_or_default();
        let encoding = if request.starts_with("GET /br ") { "br" } else { "gzip" };
        let body = gzip(format!("you sent {sent}").as_bytes());
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {}",
            body.len()
        );
        [format!("{head}\r\nConnection: close\r\n\r\n").into_bytes(), body].concat()
    })
    .await;
    let bench = bench(&[granted("TOKEN", TOKEN, &["127.0.0.1"], &[])]);
    let token = handle(&bench, "TOKEN").await;
    // Even if a script requests an encoding that could not be scrubbed.
    let options = json!({"headers": {"x-key": token, "accept-encoding": "br"}});
    let result = bench.call("fetch", json!([format!("http://{address}/gzip"), options])).await;
    assert_eq!(result["body"], json!(format!("you sent {token}")));
    let error = bench.fails("fetch", json!([format!("http://{address}/br"), options])).await;
    assert!(error.name == "FetchFailed" && error.message.contains("encoding"), "{error}");
    assert_clean(&error, TOKEN);
}

/// Guesses printed by a command that did not receive the secret are unchanged.
#[tokio::test]
async fn unsent_secret_does_not_affect_command_output() {
    let secrets = [
        granted("TOKEN", "48112345", &["api.example.com"], &["seq"]),
        granted("SENT", TOKEN, &[], &["seq"]),
    ];
    let bench = bench(&secrets);
    handle(&bench, "TOKEN").await;
    let sent = handle(&bench, "SENT").await;
    for env in [json!({}), json!({"KEY": sent})] {
        let result =
            bench.call("execute_command", json!(["seq 48112300 48112399", {"env": env}])).await;
        let lines: String = (48_112_300..48_112_400).map(|number| format!("{number}\n")).collect();
        assert_eq!(result["stdout"], json!(lines));
    }
    // Files with a guess are unchanged too.
    bench.write("guess.txt", format!("48112345 {TOKEN}"));
    assert_eq!(
        bench.call("read_file", json!(["guess.txt"])).await,
        json!(format!("48112345 {TOKEN}"))
    );
}

#[tokio::test]
async fn killed_command_with_a_secret_withholds_its_output_end() {
    let bench = bench(&[granted("TOKEN", TOKEN, &[], &["sh"])]);
    let token = handle(&bench, "TOKEN").await;
    bench.write("slow.sh", "head -c 5000 /dev/zero | tr '\\0' .; printf %.8s \"$TOKEN\"; sleep 30");
    let options = json!({"env": {"TOKEN": token}, "timeout_seconds": 1});
    let result = bench.call("execute_command", json!(["sh slow.sh", options])).await;
    let margin = Scrubber::new([Arc::new(Pattern::new(TOKEN, ""))]).margin();
    assert_eq!(result["timed_out"], json!(true));
    assert!(result["note"].as_str().is_some_and(|note| note.contains("withheld")), "{result}");
    assert_eq!(result["stdout"], json!(".".repeat(5_008 - margin)));
    // Without a secret the output is complete.
    let result = bench.call("execute_command", json!(["sh slow.sh", {"timeout_seconds": 1}])).await;
    assert_eq!((&result["stdout"], &result["note"]), (&json!(".".repeat(5_000)), &json!(null)));
}

#[tokio::test]
async fn handles_are_accepted_only_in_headers_and_environments() {
    let bench = bench(&[granted("TOKEN", VALUE, &["127.0.0.1"], &["git"])]);
    let handle = handle(&bench, "TOKEN").await;
    let encoded = handle.replace('{', "%7B").replace(':', "%3A").replace('}', "%7D");
    for (tool, args, place) in [
        ("fetch", json!([format!("https://127.0.0.1/?key={handle}")]), "the address"),
        ("fetch", json!([format!("https://127.0.0.1/?key={encoded}")]), "the address"),
        ("fetch", json!(["https://127.0.0.1/", {"method": "POST", "body": handle}]), "the body"),
        ("execute_command", json!([format!("git push {handle}")]), "the command"),
        ("git", json!([["push", handle]]), "the command"),
        ("node", json!([format!("console.log('{handle}')")]), "the standard input"),
        ("execute_command", json!(["git", {"stdin": handle}]), "the standard input"),
    ] {
        let error = bench.fails(tool, args).await;
        assert_eq!(error.name, "InvalidArguments");
        assert!(error.message.contains(place) && error.message.contains("options.env"), "{error}");
    }
}

#[tokio::test]
async fn command_receives_the_value_and_its_output_has_the_handle() {
    let bench = bench(&[
        granted("TOKEN", VALUE, &[], &["printenv"]),
        granted("OTHER", "another-value", &[], &["sh"]),
    ]);
    let handle = handle(&bench, "TOKEN").await;
    let script = "printenv TOKEN";
    let result = bench
        .call("execute_command", json!([script, {"env": {"TOKEN": format!("<{handle}>")}}]))
        .await;
    assert_eq!(result["stdout"], json!(format!("<{handle}>\n")));
    // The length shows that a bound program received the value.
    let other = self::handle(&bench, "OTHER").await;
    let script = "sh -c 'printf %s \"$OTHER\" | wc -c; printf %s \"$OTHER\" | base64 >\\&2'"
        .replace("\\&", "&");
    let refused = bench.fails("execute_command", json!([script, {"env": {"OTHER": other}}])).await;
    assert!(
        refused.name == "SecretNotAllowed" && refused.message.contains("more than one program"),
        "{refused}"
    );
    bench.write("count.sh", "printf %s \"$OTHER\" | wc -c; printf %s \"x$OTHER\" | base64 >&2");
    let result =
        bench.call("execute_command", json!(["sh count.sh", {"env": {"OTHER": other}}])).await;
    assert_eq!(result["stdout"].as_str().map(str::trim), Some("13"));
    assert!(result["stderr"].as_str().expect("a text").contains(&other), "{result}");
    assert_clean(&result, "another-value");
}

#[tokio::test]
async fn unbound_or_ambiguous_command_does_not_run() {
    let bench = bench(&[granted("TOKEN", VALUE, &["127.0.0.1"], &["printenv"])]);
    let handle = handle(&bench, "TOKEN").await;
    let env = json!({"TOKEN": handle});
    for (tool, args) in [
        ("execute_command", json!(["touch ran", {"env": env}])),
        ("execute_command", json!(["printenv TOKEN; touch ran", {"env": env}])),
        ("execute_command", json!(["printenv TOKEN | rev >ran", {"env": env}])),
        (
            "execute_command",
            json!(["printenv $[x]", {"env": {"TOKEN": handle, "x": "a[$(touch ran)]"}}]),
        ),
        ("execute_command", json!(["./printenv TOKEN", {"env": env}])),
        ("execute_command", json!(["PATH=. printenv TOKEN", {"env": env}])),
        ("execute_command", json!(["printenv TOKEN", {"env": {"TOKEN": handle, "PATH": "."}}])),
        (
            "execute_command",
            json!(["printenv TOKEN", {"env": {"TOKEN": handle, "LD_PRELOAD": "./x.so"}}]),
        ),
        ("execute_command", json!(["printenv TOKEN", {"env": {"TOKEN": handle, "BASH_ENV": "x"}}])),
        ("git", json!([["status"], {"env": env}])),
        ("node", json!(["1", {"env": env}])),
    ] {
        let error = bench.fails(tool, args.clone()).await;
        assert_eq!(error.name, "SecretNotAllowed", "{args}: {error}");
        assert!(error.message.contains("othing ran"), "{error}");
    }
    assert!(!bench.path("ran").exists());
}

#[tokio::test]
async fn setenv_keeps_the_handle_and_bound_commands_get_the_value() {
    let bench = bench(&[granted("TOKEN", "value-of-23-characters!", &[], &["printenv", "sh"])]);
    let handle = handle(&bench, "TOKEN").await;
    let set = bench.call("setenv", json!(["TOKEN", handle])).await;
    assert_eq!(set, json!({"name": "TOKEN", "value": handle}));
    assert_eq!(bench.call("getenv", json!(["TOKEN"])).await, json!(handle));
    bench.write("length.sh", "expr length \"$TOKEN\"");
    assert_eq!(
        bench.call("execute_command", json!(["sh length.sh"])).await["stdout"],
        json!("23\n")
    );
    assert_eq!(
        bench.call("execute_command", json!(["printenv TOKEN"])).await["stdout"],
        json!(format!("{handle}\n"))
    );
    let error = bench.fails("execute_command", json!(["ls"])).await;
    assert!(
        error.name == "SecretNotAllowed" && error.message.contains("setenv(\"TOKEN\")"),
        "{error}"
    );
    bench.call("setenv", json!(["TOKEN"])).await;
    assert_eq!(bench.call("execute_command", json!(["ls"])).await["stdout"], json!("length.sh\n"));
}

#[tokio::test]
async fn handle_is_bound_to_its_execution_and_unguessable() {
    let secrets =
        [granted("TOKEN", VALUE, &["127.0.0.1"], &[]), granted("B", VALUE, &[], &["git"])];
    let (first, again) = (bench(&secrets), bench(&secrets));
    let handle = handle(&first, "TOKEN").await;
    assert_eq!(handle.len(), "{{secret:TOKEN:0123456789abcdef}}".len());
    assert_eq!(handle, self::handle(&again, "TOKEN").await, "a replayed script gets the same");
    let other = Secrets::open(&secrets, Some(&keys()), b"another seed");
    let Bench { directory, tools } = again;
    let later = Bench { directory, tools: tools.with_secrets(other) };
    let forged = "{{secret:TOKEN:0123456789abcdef}}";
    for (bench, handle) in
        [(&later, handle.as_str()), (&first, forged), (&first, "{{secret:NONE:0123456789abcdef}}")]
    {
        let error =
            bench.fails("fetch", json!(["https://127.0.0.1/", {"headers": {"x": handle}}])).await;
        assert_eq!(error.name, "SecretNotFound", "{error}");
    }
    let unknown = first.fails("secrets.get", json!(["TOKEM"])).await;
    assert!(
        unknown.name == "SecretNotFound"
            && unknown.message.contains("The available secrets are: TOKEN, B."),
        "{unknown}"
    );
    let none = bench(&[]).fails("secrets.get", json!(["TOKEN"])).await;
    assert!(none.name == "SecretNotFound" && none.message.contains("has no secrets"), "{none}");
}

#[tokio::test]
async fn unreadable_secret_has_its_own_error() {
    let mut broken = granted("BROKEN", VALUE, &["127.0.0.1"], &[]);
    broken.id = "secret_other".to_owned();
    let mut foreign = granted("FOREIGN", VALUE, &["127.0.0.1"], &[]);
    foreign.value.as_mut().expect("sealed").key_id = "s2".to_owned();
    let split = granted("SPLIT", "12345678\u{0}--bind", &[], &["git"]);
    let bench = bench(&[broken, foreign, split]);
    for (name, why) in
        [("BROKEN", "set again"), ("FOREIGN", "CONSTRUCT_SECRETS_KEY"), ("SPLIT", "set again")]
    {
        let error = bench.fails("secrets.get", json!([name])).await;
        assert!(error.name == "SecretUnavailable" && error.message.contains(why), "{error}");
    }
    let large =
        ["A", "B", "C", "D", "E"].map(|name| granted(name, &"x".repeat(60_000), &[], &["git"]));
    let large = self::bench(&large);
    handle(&large, "D").await;
    let error = large.fails("secrets.get", json!(["E"])).await;
    assert!(error.name == "SecretUnavailable" && error.message.contains("together"), "{error}");
    let none = Secrets::open(&[granted("A", VALUE, &[], &["git"])], None, SEED);
    let Bench { tools, directory } = bench;
    let bench = Bench { directory, tools: tools.with_secrets(none) };
    assert_eq!(bench.fails("secrets.get", json!(["A"])).await.name, "SecretUnavailable");
}

#[tokio::test]
async fn debug_output_shows_no_value() {
    let bench = bench(&[granted("TOKEN", VALUE, &["127.0.0.1"], &["git"])]);
    assert_clean(&format!("{:?}", bench.tools), VALUE);
}
