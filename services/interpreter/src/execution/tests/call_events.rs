//! Progress events about calls.

use construct_bus::Bookmark;
use construct_proto::v1::{ToolCalled, event::Payload};

use super::*;

impl World {
    /// The published call events, in order.
    async fn call_events(&self) -> Vec<ToolCalled> {
        let step = self.command.step.as_ref().expect("it names a step");
        let (organization, task) = (&step.organization_id, &step.task_id);
        let (organization, task) =
            (organization.parse().expect("an id"), task.parse().expect("an id"));
        let replay =
            self.executor.bus.replay_progress(organization, task, None, Bookmark::default());
        let events = replay.await.expect("readable").events;
        let called = events.into_iter().filter_map(|event| match event.payload {
            Some(Payload::ToolCalled(called)) => Some(called),
            _ => None,
        });
        called.collect()
    }
}

#[tokio::test]
async fn call_event_has_canonical_arguments_and_tool_classes() {
    let script = "
        create_file({ path: './sub//../a.ts', content: 'export default 1' });
        await import('./a.ts');
        try { create_file('b') } catch {}
        try { create_file({ path: './secrets/../secrets/key', content: 'k' }) } catch {}
        setenv('A', 'é'.repeat(4000));";
    let mut world = World::new(&[script]).await;
    world.command.agent_policy[0].action = PolicyAction::Deny.into();
    let results = world.run_to_completion().await;
    assert_eq!(results[0].error, "");
    let events = world.call_events().await;
    let shown: Vec<_> = events
        .iter()
        .map(|call| (call.number, &*call.name, &*call.arguments, &*call.effect, &*call.permission))
        .collect();
    let [made, module, unfit, refused, long] = shown.as_slice() else { panic!("{events:?}") };
    let file = |number, arguments| (number, "create_file", arguments, "write", "files.write");
    assert_eq!(*made, file(1, r#"{"path":"a.ts","content":"export default 1"}"#));
    assert_eq!(*module, (2, "import", r#"{"path":"a.ts"}"#, "read", "files.read"));
    assert_eq!(
        *unfit,
        file(3, r#"{"path":"b"}"#),
        "invalid arguments are shown as the script gave them"
    );
    assert_eq!(
        *refused,
        file(4, r#"{"path":"secrets/key","content":"k"}"#),
        "a refused call is shown as well"
    );
    assert_eq!((long.1, long.3, long.4), ("setenv", "write", "environment"));
    assert!(
        long.2.ends_with("é…") && (4095..=4096 + '…'.len_utf8()).contains(&long.2.len()),
        "{}",
        long.2.len()
    );
    // The report of the script has the same arguments.
    let kept: Vec<_> =
        results[0].tool_uses.iter().map(|used| (used.number, &used.arguments)).collect();
    assert_eq!(kept, events.iter().map(|call| (call.number, &call.arguments)).collect::<Vec<_>>());
}
