//! Secrets that a program has written into files do not come back from there either.

use super::*;
use crate::tools::tests::secrets::{granted, keys};

const VALUE: &str = "s3cr3t-0123456789-abcdef";
/// `echo -n s3cr3t-0123456789-abcdef | base64`
const ENCODED: &str = "czNjcjN0LTAxMjM0NTY3ODktYWJjZGVm";

#[tokio::test]
async fn a_secret_that_lies_in_a_file_comes_back_from_no_tool_as_it_is() {
    let leave = "
        const handle = secrets.get('TOKEN');
        execute_command('sh leave.sh', { env: { TOKEN: handle } }).exit_code + ' ' + handle";
    // Another script, which has asked for no secret: like one of a later message.
    let look = "
        const told = {
            read: read_file('left.txt'),
            grep: grep('key', '.'),
            listed: list_files('.'),
            found: find_file('*.left'),
            edited: edit_file('left.txt', [{ old: 'key', new: 'the key' }]),
            printed: execute_command('cat left.b64').stdout,
            imported: await import('./left.js'),
        };
        try { read_file('s3cr3t-0123456789-abcdeg.left') } catch (error) { told.similar = [error.message, error.details] }
        try { await import('./s3cr3t-0123456789-abcdeg.left') } catch (error) { told.module = error.message }
        JSON.stringify(told)";
    let mut world = World::granting(&[leave, look]).await;
    world.executor.secrets_keys = Some(keys());
    world.command.secrets = vec![granted("TOKEN", VALUE, &[], &["sh"])];
    let program = r#"
        echo "key=$TOKEN" > left.txt
        printf %s "$TOKEN" | base64 > left.b64
        echo "export const key = '$TOKEN'" > left.js
        echo > "$TOKEN.left""#;
    std::fs::write(world.path("leave.sh"), program).expect("written");

    let results = world.completes().await;
    let (status, handle) = results[0].output.split_once(' ').expect("two words");
    assert_eq!(
        (status, world.file("left.txt")),
        ("0", Some(format!("the key={VALUE}\n"))),
        "{results:?}"
    );
    assert_eq!(world.file("left.b64"), Some(format!("{ENCODED}\n")), "a file stays as it is");
    let told: serde_json::Value = serde_json::from_str(&results[1].output).expect("JSON");
    for name in
        ["read", "grep", "listed", "found", "edited", "printed", "imported", "similar", "module"]
    {
        assert!(told[name].to_string().contains(handle), "{name}: {}", told[name]);
    }
    // What is kept for people, and what the script is answered from when it is run again.
    let journal = world.executor.bus.journal().load(world.step()).await.expect("read").entries;
    assert!(journal.len() > 10, "{journal:?}");
    for text in [format!("{results:?}"), format!("{journal:?}")] {
        assert!(!text.contains(VALUE) && !text.contains(ENCODED), "{text}");
    }
    assert_eq!(world.completes().await, results);
}
