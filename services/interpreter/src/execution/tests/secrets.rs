//! Secrets in whole scripts: in the exchange in which they are used, and where scripts try to find
//! them out.

use super::*;
use crate::tools::tests::{
    fetch::{ok, server},
    secrets::{granted, keys},
};

const VALUE: &str = "s3cr3t-x7Qw9Zk2Lm4-Vt8Rp";

#[tokio::test]
async fn command_with_a_secret_shows_the_handle_to_script_and_journal() {
    let script = "
        const handle = secrets.get('TOKEN');
        const { stdout, stderr } = execute_command('sh show.sh', { env: { TOKEN: handle } });
        JSON.stringify({ handle, stdout, stderr })";
    let mut world = World::granting(&[script]).await;
    world.executor.secrets_keys = Some(keys());
    world.command.secrets = vec![granted("TOKEN", VALUE, &[], &["sh"])];
    let program = r#"
        echo "key=$TOKEN"
        printf %s "user:$TOKEN:$TOKEN:$TOKEN:$TOKEN" | base64 >&2"#;
    std::fs::write(world.path("show.sh"), program).expect("written");

    let results = world.completes().await;
    let told: serde_json::Value = serde_json::from_str(&results[0].output).expect("JSON");
    let handle = told["handle"].as_str().expect("a text");
    assert_eq!(told["stdout"], format!("key={handle}\n"));
    // In lines of 76 characters.
    assert!(told["stderr"].as_str().expect("a text").matches(handle).count() >= 3, "{told}");
    // What is kept for people, and what the script is answered from when it is run again.
    let journal = world.executor.bus.journal().load(world.step()).await.expect("read").entries;
    assert!(journal.len() >= 2, "{journal:?}");
    for text in [format!("{results:?}"), format!("{journal:?}")] {
        assert!(!text.contains(VALUE) && !text.contains("eDdRdzlaazJMbTQ"), "{text}");
    }
    assert_eq!(world.completes().await, results);
}

/// The script has a secret that is bound to another host. It has guesses of its beginning, in
/// hexadecimal digits, repeated by a host that it may reach, and the answer cut behind the guess.
#[tokio::test]
async fn script_finds_out_nothing_by_having_guesses_repeated_and_cut() {
    let repeat = |request: &str| {
        let path = request.split(' ').nth(1).unwrap_or_default().trim_start_matches('/').to_owned();
        ok(&format!("{path}{}", "#".repeat(64)))
    };
    let (address, _requests) = server(repeat).await;
    let script = format!(
        r#"
        const hex = "0123456789abcdef";
        let calls = 0;
        const cut = async (guess) => {{
            calls++;
            const {{ body }} = await tools.fetch("http://{address}/" + guess, {{ max_bytes: guess.length }});
            return body !== guess;
        }};
        const which = async (known) => {{
            const tries = await Promise.all([...hex].map(async (c) => [c, await cut(known + c)]));
            return tries.filter(([, hit]) => hit).map(([c]) => c).join("");
        }};
        // The value begins with "s", which is 73.
        let found = "";
        for (const digit of hex) found += await which("7" + digit);
        `${{calls}} guesses: [${{found}}]`"#
    );
    let mut world = World::granting(&[&script]).await;
    world.executor.secrets_keys = Some(keys());
    world.command.secrets = vec![granted("TOKEN", VALUE, &["api.github.com"], &[])];
    let results = world.completes().await;
    assert!(results[0].output.contains("256 guesses: []"), "{results:?}");
}
