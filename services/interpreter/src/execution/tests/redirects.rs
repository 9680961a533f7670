//! Redirects of requests, which lead where the rules may not want scripts to go.

use std::{net::IpAddr, sync::Mutex};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use super::*;

/// A server under every name that says what it was asked for, and redirects `/to/HOST` to this host
/// with 307, `/see/HOST` with 303.
async fn server() -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let noted = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            // The request is small and comes at once.
            let mut request = [0; 4096];
            let read = stream.read(&mut request).await.unwrap_or(0);
            let text = String::from_utf8_lossy(&request[..read]).into_owned();
            let (method, path) = text.split_once(' ').expect("a request");
            let path = path.split(' ').next().expect("a path");
            let host =
                text.lines().find_map(|line| line.strip_prefix("host: ")).unwrap_or_default();
            let host = host.split(':').next().unwrap_or_default();
            noted.lock().expect("nobody panics with it").push(format!("{method} {host}{path}"));
            let to = |status: u16, host: &str| {
                format!("HTTP/1.1 {status} X\r\nLocation: http://{host}:{port}/end?q=1\r\n")
            };
            let head = match (path.strip_prefix("/to/"), path.strip_prefix("/see/")) {
                (Some(host), _) => to(307, host),
                (_, Some(host)) => to(303, host),
                _ => "HTTP/1.1 200 OK\r\n".to_owned(),
            };
            let _ = stream
                .write_all(
                    format!("{head}Content-Length: 0\r\nConnection: close\r\n\r\n").as_bytes(),
                )
                .await;
        }
    });
    (port, asked)
}

fn rule(action: PolicyAction, host: &str, methods: &[&str]) -> PolicyRule {
    PolicyRule {
        action: action.into(),
        hosts: vec![host.to_owned()],
        methods: methods.iter().map(|method| (*method).to_owned()).collect(),
        reason: "it is theirs".to_owned(),
        ..PolicyRule::default()
    }
}

#[tokio::test]
async fn a_redirect_is_followed_only_where_the_rules_let_a_call_go() {
    let (port, asked) = server().await;
    let script = format!(
        "const told = [];
        for (const [method, path] of [
            ['GET', 'to/b.test'], ['GET', 'to/denied.test'], ['GET', 'to/asked.test'], ['POST', 'to/a.test'], ['POST', 'see/get.test'],
            ['POST', 'to/get.test'],
        ]) {{
            try {{ told.push(fetch(`http://a.test:{port}/${{path}}`, {{ method }}).url) }}
            catch (error) {{ told.push(`${{error.name}} ${{error.details.url}} ${{error.message}}`) }}
        }}
        JSON.stringify(told)"
    );
    let local: IpAddr = Ipv4Addr::LOCALHOST.into();
    let egress =
        Egress::resolving(&[local], Arc::new(move |_| Box::pin(async move { Ok(vec![local]) })));
    let hosts = vec!["*.test".parse().expect("hosts")];
    let policy = Policy { hosts, ..Policy::default() };
    let sandbox = CommandSandbox::unavailable("a test needs none");
    let mut world = World::with(&[&script], policy, egress.expect("made"), sandbox).await;
    world.command.agent_policy = vec![
        rule(PolicyAction::Deny, "denied.test", &[]),
        rule(PolicyAction::Ask, "asked.test", &[]),
        rule(PolicyAction::Deny, "get.test", &["POST"]),
    ];
    let results = world.completes().await;
    let told: Vec<String> = serde_json::from_str(&results[0].output)
        .unwrap_or_else(|error| panic!("{error}: {results:?}"));
    let end = |host: &str| format!("http://{host}:{port}/end?q=1");
    assert_eq!(told[0], end("b.test"));
    let denied =
        format!("PolicyDenied {} fetch: the request to a.test was made", end("denied.test"));
    assert!(told[1].starts_with(&denied) && told[1].contains("it is theirs"), "{told:?}");
    let not_followed =
        format!("RedirectNotFollowed {} fetch: the request to a.test was made", end("asked.test"));
    assert!(
        told[2].starts_with(&not_followed) && told[2].contains("in a call of its own"),
        "{told:?}"
    );
    assert_eq!((&told[3], &told[4]), (&end("a.test"), &end("get.test")));
    assert!(told[5].starts_with("PolicyDenied"), "{told:?}");
    let asked = asked.lock().expect("nobody panics with it").clone();
    let expected = [
        "GET a.test/to/b.test",
        "GET b.test/end?q=1",
        "GET a.test/to/denied.test",
        "GET a.test/to/asked.test",
        "POST a.test/to/a.test",
        "POST a.test/end?q=1",
        "POST a.test/see/get.test",
        "GET get.test/end?q=1",
        "POST a.test/to/get.test",
    ];
    assert_eq!(asked, expected);
}
