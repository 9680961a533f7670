//! Redirects to hosts that the rules may not allow.

use std::{net::IpAddr, sync::Mutex};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use super::*;

/// A server under every host name. It records requests, and redirects `/to/HOST` to that host with
/// 307 and `/see/HOST` with 303.
async fn server() -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let requests = Arc::<Mutex<Vec<String>>>::default();
    let log = Arc::clone(&requests);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            // The request is small and arrives at once.
            let mut buffer = [0; 4096];
            let read = stream.read(&mut buffer).await.unwrap_or(0);
            let text = String::from_utf8_lossy(&buffer[..read]).into_owned();
            let (method, path) = text.split_once(' ').expect("a request");
            let path = path.split(' ').next().expect("a path");
            let host =
                text.lines().find_map(|line| line.strip_prefix("host: ")).unwrap_or_default();
            let host = host.split(':').next().unwrap_or_default();
            log.lock().expect("the lock is not poisoned").push(format!("{method} {host}{path}"));
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
    (port, requests)
}

fn rule(action: PolicyAction, host: &str, methods: &[&str]) -> PolicyRule {
    PolicyRule {
        action: action.into(),
        hosts: vec![host.to_owned()],
        methods: methods.iter().map(|method| (*method).to_owned()).collect(),
        reason: "it is not ours".to_owned(),
        ..PolicyRule::default()
    }
}

#[tokio::test]
async fn redirect_is_followed_only_where_rules_allow() {
    let (port, requests) = server().await;
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
        Egress::with_lookup(&[local], Arc::new(move |_| Box::pin(async move { Ok(vec![local]) })));
    let hosts = vec!["*.test".parse().expect("hosts")];
    let policy = Policy { hosts, ..Policy::default() };
    let sandbox = CommandSandbox::unavailable("a test needs none");
    let mut world = World::with_policy(&[&script], policy, egress.expect("made"), sandbox).await;
    world.command.agent_policy = vec![
        rule(PolicyAction::Deny, "denied.test", &[]),
        rule(PolicyAction::Ask, "asked.test", &[]),
        rule(PolicyAction::Deny, "get.test", &["POST"]),
    ];
    let results = world.run_to_completion().await;
    let outcomes: Vec<String> = serde_json::from_str(&results[0].output)
        .unwrap_or_else(|error| panic!("{error}: {results:?}"));
    let end = |host: &str| format!("http://{host}:{port}/end?q=1");
    assert_eq!(outcomes[0], end("b.test"));
    let denied =
        format!("PolicyDenied {} fetch: the request to a.test was made", end("denied.test"));
    assert!(
        outcomes[1].starts_with(&denied) && outcomes[1].contains("it is not ours"),
        "{outcomes:?}"
    );
    let not_followed =
        format!("RedirectNotFollowed {} fetch: the request to a.test was made", end("asked.test"));
    assert!(
        outcomes[2].starts_with(&not_followed) && outcomes[2].contains("in a separate call"),
        "{outcomes:?}"
    );
    assert_eq!((&outcomes[3], &outcomes[4]), (&end("a.test"), &end("get.test")));
    assert!(outcomes[5].starts_with("PolicyDenied"), "{outcomes:?}");
    let requests = requests.lock().expect("the lock is not poisoned").clone();
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
    assert_eq!(requests, expected);
}
