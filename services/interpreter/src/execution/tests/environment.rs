//! What commands find in their environment is what was set where the script calls them, whenever
//! they are carried out.

use super::*;

#[tokio::test]
async fn a_command_finds_what_was_set_when_it_was_called() {
    let script = "
        const early = tools.execute_command('echo \"[$X]\"');
        setenv('X', '1');
        const late = tools.execute_command('echo \"[$X]\"');
        setenv('X', '2');
        [(await early).stdout, (await late).stdout].join('').replaceAll('\\n', '')";
    let mut world =
        World::granting(&[script, "setenv('Y', getenv('X') + '!').value", "getenv('Y')"]).await;
    let results = world.completes().await;
    let outputs: Vec<&str> = results.iter().map(|result| result.output.as_str()).collect();
    assert_eq!(outputs, ["[][1]", "2!", "2!"], "{results:?}");
    assert_eq!(world.completes().await, results);
}

#[tokio::test]
async fn a_command_is_judged_with_what_it_finds() {
    let script = "
        const asked = tools.execute_command('touch made');
        setenv('BASH_ENV', 'x');
        try { await asked; 'made' } catch (error) { error.name }";
    let mut world = World::granting(&[script]).await;
    world.command.agent_policy = vec![PolicyRule {
        action: PolicyAction::Ask.into(),
        tools: vec!["execute_command".to_owned()],
        reason: "it is a command".to_owned(),
        ..PolicyRule::default()
    }];
    let asked = world.parks().await.calls.remove(0);
    assert_eq!(
        asked.arguments, r#"{"command":"touch made"}"#,
        "nothing was set when it was called"
    );
    // When the script is run again, the variable was set before: the rejection holds all the same.
    world.decide(&asked, false, "no");
    assert_eq!(world.completes().await[0].output, "ApprovalRejected");
    assert_eq!(world.file("made"), None);
}
