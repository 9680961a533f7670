//! Scripts that, run again, do something else than their journal says.

use super::*;

/// Runs the first text of a script to its end, and then the second one on the same journal.
async fn runs_again_as(first: &str, second: &str) -> (World, Vec<CodeInterpreterResult>) {
    let mut world = World::new(&[first, "create_file('later', ''); 'later'"]).await;
    let results = world.completes().await;
    assert!(results.iter().all(|result| result.error.is_empty()), "{results:?}");
    std::fs::remove_file(world.path("later")).expect("it was made");
    second.clone_into(&mut world.command.calls[0].code);
    let results = world.completes().await;
    (world, results)
}

#[tokio::test]
async fn a_script_that_does_something_else_ends_at_the_call_where_it_does() {
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
        let (world, results) = runs_again_as(FIRST, second).await;
        let [first, later] = results.as_slice() else { panic!("{second}: {results:?}") };
        assert!(first.error.starts_with("ReplayDiverged: "), "{second}: {}", first.error);
        let what = format!("{before} when the script ran first, and is {now}");
        assert!(first.error.contains(&what), "{second}: {}", first.error);
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
async fn what_else_a_diverging_script_starts_has_no_effect() {
    let first = "await Promise.all(['a', 'b'].map(name => tools.create_file(name, '1'))); 'end'";
    for second in [
        "await Promise.all(['a', 'x', 'c', 'd'].map(name => tools.create_file(name, '1'))); 'end'",
        "await Promise.all(['x', 'b', 'c', 'd'].map(name => tools.create_file(name, '1'))); 'end'",
    ] {
        let (world, results) = runs_again_as(first, second).await;
        assert!(results[0].error.starts_with("ReplayDiverged: "), "{results:?}");
        for name in ["c", "d", "x"] {
            assert_eq!(world.file(name), None, "{second} made {name}");
        }
    }
}

#[tokio::test]
async fn a_call_that_was_only_begun_is_compared_as_well() {
    for (second, now) in [
        ("await new Promise(r => setTimeout(r, 1)); create_file('new', '')", "setTimeout"),
        ("create_file('new', '')", "create_file"),
        ("execute_command('touch new')", "execute_command with other arguments"),
    ] {
        let mut world = World::granting(&["execute_command('touch begun; sleep 300')"]).await;
        let begun = world.path("begun");
        tokio::select! {
            _ = world.run() => panic!("it sleeps"),
            () = until("the command to begin", || begun.exists().then_some(())) => {}
        }
        second.clone_into(&mut world.command.calls[0].code);
        let results = world.completes().await;
        let what =
            format!("call 1 was execute_command when the script ran first, and is {now} when");
        assert!(results[0].error.contains(&what), "{results:?}");
        assert!(
            results[0].error.contains("may or may not have had their effect: #1 execute_command."),
            "{results:?}"
        );
        assert_eq!(world.file("new"), None);
    }
}

#[tokio::test]
async fn a_script_that_does_the_same_is_answered_from_the_journal() {
    let same = "create_file('a', '1').status + create_file('b', '2').status";
    let (world, results) = runs_again_as(same, same).await;
    assert_eq!(results[0].output, "createdcreated");
    assert_eq!((results[1].output.as_str(), world.file("later")), ("later", None));
}

#[tokio::test]
async fn calls_that_nobody_waited_for_are_no_divergence() {
    // Whether the host hears of the call, and whether it ends, depends on how fast the machine is.
    let script = "tools.create_file('a', '1'); for (let i = 0; i < 300000; i++); 'end'";
    for _ in 0..3 {
        let (_, results) = runs_again_as(script, script).await;
        assert!(results[0].error.is_empty(), "{results:?}");
        assert!(results[0].output.starts_with("end"), "{results:?}");
    }
}

#[tokio::test]
async fn a_scripts_clock_goes_on_with_each_kind_of_call_and_shows_the_same_again() {
    let script = "
        const times = [Date.now()];
        execute_command('sleep 0.05');
        times.push(Date.now());
        await tools.execute_command('sleep 0.05');
        times.push(Date.now());
        await new Promise(done => setTimeout(done, 50));
        times.push(Date.now());
        times";
    let mut world = World::granting(&[script]).await;
    let results = world.completes().await;
    let times: Vec<u64> = serde_json::from_str(&results[0].output).expect("numbers");
    assert!(times.windows(2).all(|pair| pair[1] >= pair[0] + 50), "{times:?}");
    assert_eq!(world.completes().await, results);
}

#[tokio::test]
async fn a_script_that_was_ended_by_a_limit_is_not_gone_on_with_when_the_next_one_is() {
    let first = "
        print(Date.now());
        try { execute_command('sleep 300') } catch {}
        create_file('late', '')";
    let second = "execute_command('touch begun; sleep 300; touch never')";
    let mut world = World::granting(&[first, second, "print(Date.now())"]).await;
    world.executor.tiers = tiers(Duration::from_secs(3));
    let begun = world.path("begun");
    tokio::select! {
        _ = world.run() => panic!("the second script sleeps"),
        () = until("the second script to begin", || begun.exists().then_some(())) => {}
    }
    let results = world.completes().await;
    assert!(results[0].error.starts_with("TimeLimitExceeded: "), "{results:?}");
    assert!(results[1].error.starts_with("OutcomeUnknown: "), "{results:?}");
    assert_eq!((world.file("late"), world.file("never")), (None, None));
    // The clock of the scripts goes on as if the first one had been run again.
    let clock = |result: &CodeInterpreterResult| {
        result.output.lines().next().and_then(|line| line.parse::<u64>().ok())
    };
    assert!(clock(&results[0]).is_some() && clock(&results[0]) < clock(&results[2]), "{results:?}");
    assert_eq!(world.completes().await, results);
}
