//! What the results of calls lack is shown to the model, whatever the script does with them.

use super::*;

#[tokio::test]
async fn what_results_lack_is_told_beside_the_output_also_when_the_script_is_run_again() {
    let script = "const found = await Promise.all([tools.grep('x', 'wide'), tools.grep('y', 'narrow'), tools.grep('x', 'wide')]);
        create_file('secrets/a', '');
        found.map(one => one.matches.length)";
    let mut world = World::new(&[script]).await;
    std::fs::write(world.path("wide"), "x".repeat(1_000)).expect("written");
    std::fs::write(world.path("narrow"), "y").expect("written");
    // The script is put away and run again: then the journal answers the searches.
    let asked = world.parks().await.calls.remove(0);
    world.decide(&asked, true, "");
    let results = world.completes().await;
    let lines: Vec<&str> = results[0].output.lines().collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert_eq!(lines[0], "[1,1,1]");
    assert!(
        lines[1].starts_with("[#1 grep: Of 1 matches a line has more than 500 characters"),
        "{lines:?}"
    );
    assert!(lines[2].starts_with("[#3 grep: "), "{lines:?}");
}

#[tokio::test]
async fn only_the_first_results_that_lack_something_are_told_of() {
    let script = "for (let n = 0; n < 15; n++) grep('x', 'wide')";
    let mut world = World::new(&[script]).await;
    std::fs::write(world.path("wide"), "x".repeat(1_000)).expect("written");
    let results = world.completes().await;
    let lines: Vec<&str> =
        results[0].output.lines().filter(|line| line.starts_with("[#")).collect();
    assert!(lines.len() == 10 && lines[9].starts_with("[#10 grep: "), "{lines:?}");
    assert!(
        results[0].output.contains("the results of 5 more calls lack something"),
        "{}",
        results[0].output
    );
}
