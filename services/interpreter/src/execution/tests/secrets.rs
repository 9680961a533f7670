//! Secrets in whole scripts: in exchanges that use them, and where scripts try to guess them.

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
    let mut world = World::with_network_and_commands(&[script]).await;
    world.executor.secrets_keys = Some(keys());
    world.command.secrets = vec![granted("TOKEN", VALUE, &[], &["sh"])];
    let program = r#"
        echo "key=$TOKEN"
        printf %s "user:$TOKEN:$TOKEN:$TOKEN:$TOKEN" | base64 >&2"#;
    std::fs::write(world.path("show.sh"), program).expect("written");

    let results = world.run_to_completion().await;
    let output: serde_json::Value = serde_json::from_str(&results[0].output).expect("JSON");
    let handle = output["handle"].as_str().expect("a text");
    assert_eq!(output["stdout"], format!("key={handle}\n"));
    // `base64` breaks lines after 76 characters.
    assert!(output["stderr"].as_str().expect("a text").matches(handle).count() >= 3, "{output}");
    // The result for people, and the journal that answers a replay.
    let journal = world.executor.bus.journal().load(world.step()).await.expect("read").entries;
    assert!(journal.len() >= 2, "{journal:?}");
    for text in [format!("{results:?}"), format!("{journal:?}")] {
        assert!(!text.contains(VALUE) && !text.contains("eDdRdzlaazJMbTQ"), "{text}");
    }
    assert_eq!(world.run_to_completion().await, results);
}

/// The script has a secret that is bound to another host. It sends guesses of its prefix, in
/// hexadecimal digits, to a host that repeats them, and cuts the response right after the guess.
#[tokio::test]
async fn guessing_at_cuts_reveals_nothing() {
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
    let mut world = World::with_network_and_commands(&[&script]).await;
    world.executor.secrets_keys = Some(keys());
    world.command.secrets = vec![granted("TOKEN", VALUE, &["api.github.com"], &[])];
    let results = world.run_to_completion().await;
    assert!(results[0].output.contains("256 guesses: []"), "{results:?}");
}
