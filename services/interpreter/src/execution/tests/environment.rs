//! Commands get the environment that was set where the script calls them, whenever they run.

use super::*;

#[tokio::test]
async fn command_gets_the_environment_of_its_call() {
    let script = "
        const early = tools.execute_command('echo \"[$X]\"');
        setenv('X', '1');
        const late = tools.execute_command('echo \"[$X]\"');
        setenv('X', '2');
        [(await early).stdout, (await late).stdout].join('').replaceAll('\\n', '')";
    let mut world = World::with_network_and_commands(&[
        script,
        "setenv('Y', getenv('X') + '!').value",
        "getenv('Y')",
    ])
    .await;
    let results = world.run_to_completion().await;
    let outputs: Vec<&str> = results.iter().map(|result| result.output.as_str()).collect();
    assert_eq!(outputs, ["[][1]", "2!", "2!"], "{results:?}");
    assert_eq!(world.run_to_completion().await, results);
}

#[tokio::test]
async fn policy_sees_the_environment_of_the_call() {
    let script = "
        const asked = tools.execute_command('touch made');
        setenv('BASH_ENV', 'x');
        try { await asked; 'made' } catch (error) { error.name }";
    let mut world = World::with_network_and_commands(&[script]).await;
    world.command.agent_policy = vec![PolicyRule {
        action: PolicyAction::Ask.into(),
        tools: vec!["execute_command".to_owned()],
        reason: "it is a command".to_owned(),
        ..PolicyRule::default()
    }];
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    assert_eq!(request.arguments, r#"{"command":"touch made"}"#, "no variable was set at the call");
    // On replay the variable was set before; the rejection still applies.
    world.decide(&request, false, "no");
    assert_eq!(world.run_to_completion().await[0].output, "ApprovalRejected");
    assert_eq!(world.file("made"), None);
}
