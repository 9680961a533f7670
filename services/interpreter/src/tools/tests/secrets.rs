//! Handles: where secrets are put in their place, where they are not, and that they never come
//! back.

use construct_proto::mesh::v1::{GrantedSecret, SealedSecret};
use construct_runtime::MasterKeys;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use super::fetch::{LOCAL, ok, redirect, server};
use super::*;
use crate::command::Confinement;

const VALUE: &str = "gh/s3cr3t+0123456789=é\"x";
const SEED: &[u8] = b"the seed of an execution";

pub(crate) fn keys() -> MasterKeys {
    MasterKeys::parse("s1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=").expect("a key of 32 bytes")
}

/// A secret as the gateway seals it.
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

/// A toolbox with secrets, that may reach 127.0.0.1 and more, and runs commands without a sandbox.
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

/// Whether no part of a value that says anything is in what came back.
fn assert_clean(what: &impl ToString, value: &str) {
    let text = what.to_string();
    let value: Vec<char> = value.chars().collect();
    for piece in value.windows(6) {
        let piece: String = piece.iter().collect();
        assert!(!text.contains(&piece), "{piece:?} came back: {text}");
    }
}

#[tokio::test]
async fn a_header_has_the_value_on_the_wire_and_the_handle_everywhere_else() {
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
async fn a_secret_goes_to_bound_hosts_only_and_over_https_only() {
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
        ("PLAIN", "http://example.net/".to_owned(), "https only"),
    ] {
        let handle = handle(&bench, name).await;
        let error = bench.fails("fetch", json!([url, {"headers": {"x-key": handle}}])).await;
        assert_eq!(error.name, "SecretNotAllowed", "{error}");
        assert!(
            error.message.contains(why) && error.message.contains("nothing was sent"),
            "{error}"
        );
    }
    assert!(requests.try_recv().is_err(), "a request went out");
}

#[tokio::test]
async fn a_redirect_takes_a_secret_to_no_other_origin() {
    let (inner, mut reached) = server(|_| ok("there")).await;
    let to = format!("http://{inner}/next");
    let (outer, mut requests) = server(move |_| redirect(307, &to)).await;
    let bench = bench(&[granted("TOKEN", "12345678-abc", &["127.0.0.1"], &[])]);
    let handle = handle(&bench, "TOKEN").await;
    // Also in a header that is otherwise sent on.
    let options = json!({"headers": {"Authorization": handle, "User-Agent": format!("a/{handle}"), "Accept": "text/plain"}});
    let result = bench.call("fetch", json!([format!("http://{outer}/"), options])).await;
    assert_eq!(result["body"], json!("there"));
    assert!(requests.recv().await.expect("a request").contains("authorization: 12345678-abc\r\n"));
    let second = reached.recv().await.expect("a request");
    assert!(second.contains("accept: text/plain\r\n"), "{second}");
    assert!(!second.contains("12345678") && !second.contains("secret:"), "{second}");
}

#[tokio::test]
async fn a_body_that_is_cut_within_the_value_does_not_show_its_beginning() {
    let value = "0123456789abcdefghijkl";
    let (address, _requests) = server(move |_| ok(&format!("text {value} more text"))).await;
    let bench = bench(&[granted("TOKEN", value, &["127.0.0.1"], &[])]);
    for max_bytes in 1..=40 {
        let result = bench
            .call("fetch", json!([format!("http://{address}/"), {"max_bytes": max_bytes}]))
            .await;
        let body = result["body"].as_str().expect("a text");
        assert!(
            !body.contains("012") && !body.contains("ijkl") && body.len() <= max_bytes,
            "{max_bytes}: {body}"
        );
    }
}

#[tokio::test]
async fn handles_stand_in_headers_and_environments_and_nowhere_else() {
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
async fn a_command_gets_the_value_and_its_output_has_the_handle() {
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
    // That it did get the value shows in the length, in a program that is bound as well.
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
async fn a_command_that_is_not_bound_or_may_be_another_does_not_run() {
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
async fn a_variable_that_is_set_holds_the_handle_and_commands_that_are_bound_get_the_value() {
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
async fn a_handle_is_that_of_its_execution_and_cannot_be_made_up() {
    let secrets =
        [granted("TOKEN", VALUE, &["127.0.0.1"], &[]), granted("B", VALUE, &[], &["git"])];
    let (first, again) = (bench(&secrets), bench(&secrets));
    let handle = handle(&first, "TOKEN").await;
    assert_eq!(handle.len(), "{{secret:TOKEN:0123456789abcdef}}".len());
    assert_eq!(
        handle,
        self::handle(&again, "TOKEN").await,
        "a script that is run again gets the same"
    );
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
        unknown.name == "SecretNotFound" && unknown.message.contains("There are: TOKEN, B."),
        "{unknown}"
    );
    let none = bench(&[]).fails("secrets.get", json!(["TOKEN"])).await;
    assert!(none.name == "SecretNotFound" && none.message.contains("may use none"), "{none}");
}

#[tokio::test]
async fn a_secret_that_cannot_be_opened_says_so() {
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
async fn nothing_that_can_be_printed_shows_a_value() {
    let bench = bench(&[granted("TOKEN", VALUE, &["127.0.0.1"], &["git"])]);
    assert_clean(&format!("{:?}", bench.tools), VALUE);
}
