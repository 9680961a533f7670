//! Notes about incomplete results reach the model, whatever the script does with the results.

use super::*;

#[tokio::test]
async fn notes_of_results_follow_the_output_on_replay() {
    let script = "const found = await Promise.all([tools.grep('x', 'wide'), tools.grep('y', 'narrow'), tools.grep('x', 'wide')]);
        create_file('secrets/a', '');
        found.map(one => one.matches.length)";
    let mut world = World::new(&[script]).await;
    std::fs::write(world.path("wide"), "x".repeat(1_000)).expect("written");
    std::fs::write(world.path("narrow"), "y").expect("written");
    // The script is suspended and replayed: then the journal answers the searches.
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    world.decide(&request, true, "");
    let results = world.run_to_completion().await;
    let lines: Vec<&str> = results[0].output.lines().collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert_eq!(lines[0], "[1,1,1]");
    assert!(
        lines[1].starts_with("[#1 grep: In 1 matches, a line has more than 500 characters"),
        "{lines:?}"
    );
    assert!(lines[2].starts_with("[#3 grep: "), "{lines:?}");
}

#[tokio::test]
async fn only_the_first_notes_of_results_are_listed() {
    let script = "for (let n = 0; n < 15; n++) grep('x', 'wide')";
    let mut world = World::new(&[script]).await;
    std::fs::write(world.path("wide"), "x".repeat(1_000)).expect("written");
    let results = world.run_to_completion().await;
    let lines: Vec<&str> =
        results[0].output.lines().filter(|line| line.starts_with("[#")).collect();
    assert!(lines.len() == 10 && lines[9].starts_with("[#10 grep: "), "{lines:?}");
    assert!(
        results[0].output.contains("the results of 5 more calls are incomplete"),
        "{}",
        results[0].output
    );
}
