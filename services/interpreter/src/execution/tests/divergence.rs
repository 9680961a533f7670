//! Scripts whose replay does something else than their journal says.

use super::*;

/// Runs the first text of a script to its end, and then the second text on the same journal.
async fn replay_as(first: &str, second: &str) -> (World, Vec<CodeInterpreterResult>) {
    let mut world = World::new(&[first, "create_file('later', ''); 'later'"]).await;
    let results = world.run_to_completion().await;
    assert!(results.iter().all(|result| result.error.is_empty()), "{results:?}");
    std::fs::remove_file(world.path("later")).expect("it was made");
    second.clone_into(&mut world.command.calls[0].code);
    let results = world.run_to_completion().await;
    (world, results)
}

#[tokio::test]
async fn diverging_script_ends_at_its_first_other_call() {
    const FIRST: &str = "create_file('a', '1'); create_file('b', '2'); await new Promise(r => setTimeout(r, 1)); 'end'";
    let cases = [
        ("create_file('a', '1'); delete_file('b'); 'end'", "call 2 was create_file", "delete_file"),
        (
            "create_file('a', '1'); create_file('b', '3'); 'end'",
            "call 2 was create_file",
            "create_file with other arguments",
        ),
        (
            "create_file('new', ''); create_file('a', '1'); 'end'",
            "call 1 was create_file",
            "create_file with other arguments",
        ),
        (
            "try { create_file('c', '1') } catch {} 'caught'",
            "call 1 was create_file",
            "create_file with other arguments",
        ),
        (
            "create_file('a', '1'); await new Promise(r => setTimeout(r, 1)); 'end'",
            "call 2 was create_file",
            "setTimeout",
        ),
        (
            "create_file('a', '1'); create_file('b', '2'); read_file('a')",
            "call 3 was setTimeout",
            "read_file",
        ),
        (
            "create_file('a', '1'); create_file('b', '2'); await new Promise(r => setTimeout(r, 2)); 'end'",
            "call 3 was setTimeout",
            "setTimeout with other arguments",
        ),
        ("create_file('a', '1'); 'end'", "call 2 was create_file", "not made"),
        ("throw new Error('other')", "call 1 was create_file", "not made"),
        (
            "create_file('a', '1'); tools.create_file('new', '').catch(() => {}); await null; 'nobody waits'",
            "call 2 was create_file",
            "",
        ),
    ];
    for (second, before, now) in cases {
        let (world, results) = replay_as(FIRST, second).await;
        let [first, later] = results.as_slice() else { panic!("{second}: {results:?}") };
        assert!(first.error.starts_with("ReplayDiverged: "), "{second}: {}", first.error);
        let expected = format!("{before} in the first run of the script, and is {now}");
        assert!(first.error.contains(&expected), "{second}: {}", first.error);
        assert!(
            first.error.contains("Calls that had ended: #1 create_file, #2 create_file."),
            "{second}: {}",
            first.error
        );
        assert!(
            later.error.starts_with("Stopped: a script before it could not be continued."),
            "{later:?}"
        );
        assert_eq!(
            (world.file("a").as_deref(), world.file("b").as_deref()),
            (Some("1"), Some("2")),
            "{second}"
        );
        for name in ["c", "new", "later"] {
            assert_eq!(world.file(name), None, "{second} made {name}");
        }
    }
}

#[tokio::test]
async fn diverging_script_starts_no_new_effect() {
    let first = "await Promise.all(['a', 'b'].map(name => tools.create_file(name, '1'))); 'end'";
    for second in [
        "await Promise.all(['a', 'x', 'c', 'd'].map(name => tools.create_file(name, '1'))); 'end'",
        "await Promise.all(['x', 'b', 'c', 'd'].map(name => tools.create_file(name, '1'))); 'end'",
    ] {
        let (world, results) = replay_as(first, second).await;
        assert!(results[0].error.starts_with("ReplayDiverged: "), "{results:?}");
        for name in ["c", "d", "x"] {
            assert_eq!(world.file(name), None, "{second} made {name}");
        }
    }
}

#[tokio::test]
async fn started_call_is_compared_on_replay() {
    for (second, now) in [
        ("await new Promise(r => setTimeout(r, 1)); create_file('new', '')", "setTimeout"),
        ("create_file('new', '')", "create_file"),
        ("execute_command('touch new')", "execute_command with other arguments"),
    ] {
        let mut world =
            World::with_network_and_commands(&["execute_command('touch begun; sleep 300')"]).await;
        let begun = world.path("begun");
        tokio::select! {
            _ = world.run() => panic!("the command sleeps"),
            () = wait_for("the command to start", || begun.exists().then_some(())) => {}
        }
        second.clone_into(&mut world.command.calls[0].code);
        let results = world.run_to_completion().await;
        let what =
            format!("call 1 was execute_command in the first run of the script, and is {now} in");
        assert!(results[0].error.contains(&what), "{results:?}");
        assert!(
            results[0].error.contains("may or may not have had their effect: #1 execute_command."),
            "{results:?}"
        );
        assert_eq!(world.file("new"), None);
    }
}

#[tokio::test]
async fn same_script_is_answered_from_the_journal() {
    let same = "create_file('a', '1').status + create_file('b', '2').status";
    let (world, results) = replay_as(same, same).await;
    assert_eq!(results[0].output, "createdcreated");
    assert_eq!((results[1].output.as_str(), world.file("later")), ("later", None));
}

#[tokio::test]
async fn unawaited_calls_are_no_divergence() {
    // Whether the call reaches the host, and whether it ends, depends on the machine's speed.
    let script = "tools.create_file('a', '1'); for (let i = 0; i < 300000; i++); 'end'";
    for _ in 0..3 {
        let (_, results) = replay_as(script, script).await;
        assert!(results[0].error.is_empty(), "{results:?}");
        assert!(results[0].output.starts_with("end"), "{results:?}");
    }
}

#[tokio::test]
async fn clock_advances_with_each_call_and_replays_equal() {
    let script = "
        const times = [Date.now()];
        execute_command('sleep 0.05');
        times.push(Date.now());
        await tools.execute_command('sleep 0.05');
        times.push(Date.now());
        await new Promise(done => setTimeout(done, 50));
        times.push(Date.now());
        times";
    let mut world = World::with_network_and_commands(&[script]).await;
    let results = world.run_to_completion().await;
    let times: Vec<u64> = serde_json::from_str(&results[0].output).expect("numbers");
    assert!(times.windows(2).all(|pair| pair[1] >= pair[0] + 50), "{times:?}");
    assert_eq!(world.run_to_completion().await, results);
}

#[tokio::test]
async fn script_ended_by_a_limit_is_not_resumed_with_the_next() {
    let first = "
        print(Date.now());
        try { execute_command('sleep 300') } catch {}
        create_file('late', '')";
    let second = "execute_command('touch begun; sleep 300; touch never')";
    let mut world = World::with_network_and_commands(&[first, second, "print(Date.now())"]).await;
    world.executor.tiers = tiers(Duration::from_secs(3));
    let begun = world.path("begun");
    tokio::select! {
        _ = world.run() => panic!("the second script sleeps"),
        () = wait_for("the second script to start", || begun.exists().then_some(())) => {}
    }
    let results = world.run_to_completion().await;
    assert!(results[0].error.starts_with("TimeLimitExceeded: "), "{results:?}");
    assert!(results[1].error.starts_with("OutcomeUnknown: "), "{results:?}");
    assert_eq!((world.file("late"), world.file("never")), (None, None));
    // The clock continues as if the first script had been replayed.
    let clock = |result: &CodeInterpreterResult| {
        result.output.lines().next().and_then(|line| line.parse::<u64>().ok())
    };
    assert!(clock(&results[0]).is_some() && clock(&results[0]) < clock(&results[2]), "{results:?}");
    assert_eq!(world.run_to_completion().await, results);
}
