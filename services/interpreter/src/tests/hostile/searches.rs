//! Expressions that are short and take as many steps as there is room for, on large files: they
//! hold threads and processors, and must let go of both.

use std::time::Instant;

use super::*;

/// As many as it takes to occupy every search there is room for, and every call on files there was
/// room for once.
const SCRIPTS: usize = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn searches_that_never_end_keep_no_other_tool_from_its_work_and_end_with_their_scripts() {
    let script = "
        const wanted = ['(a{1,150}){1,150}b', '(?:(?:a?){100}){100}b', '[a-y]{0,9000}z', '(\\\\w{2}b?){8}!'];
        await Promise.all([...wanted, ...wanted].map(query => tools.grep(query, '.', {max_results: 1})))";
    let greedy: Vec<Bench> = (0..SCRIPTS).map(|_| Bench::with_files()).collect();
    for bench in &greedy {
        for (name, line) in [("line", 8 << 20), ("lines", 100)] {
            let text: String =
                (0..8 << 20).map(|at| if at % line == line - 1 { '\n' } else { 'a' }).collect();
            std::fs::write(bench.work(name), text).expect("written");
        }
    }
    let cancel = CancellationToken::new();
    let attacks =
        greedy.iter().map(|bench| engine().run(script, bench, &bench.limits, cancel.clone()));
    let attacks = futures::future::join_all(attacks);
    let quiet = async {
        let bench = Bench::with_files();
        // Long enough for all of them to be at it.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let began = Instant::now();
        for _ in 0..3 {
            bench.works_as_ever("searches that never end").await;
        }
        let served = began.elapsed();
        cancel.cancel();
        (served, Instant::now())
    };
    let (ended, (served, stopped)) = tokio::join!(attacks, quiet);
    let scripts = stopped.elapsed();
    assert!(ended.iter().all(|outcome| matches!(outcome.status, Status::Cancelled)), "{ended:?}");
    // Another search has its turn when the threads are free again, and not only their callers.
    let found = greedy[0]
        .toolbox
        .call("grep", serde_json::json!(["inside", "inside.txt"]), &CallContext::default())
        .await;
    let threads = stopped.elapsed();
    assert_eq!(found.expect("a result")["matches"][0]["line"], 1);
    println!(
        "three scripts took {served:.1?} meanwhile; after the stop the scripts ended in {scripts:.1?}, the threads in {threads:.1?}"
    );
    assert!(served < Duration::from_secs(20), "the other tools went on for {served:?}");
    assert!(threads < Duration::from_secs(5), "they went on for {threads:?}");
}
