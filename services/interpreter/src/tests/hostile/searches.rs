//! Short expressions that take the maximum number of steps on large files. They hold threads and
//! processors, and must release both.

use std::time::Instant;

use super::*;

/// Enough to occupy all slots for searches, and all former slots for file tools.
const SCRIPTS: usize = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_searches_block_no_tool_and_end_with_their_script() {
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
    let modest = async {
        let bench = Bench::with_files();
        // Long enough for all of them to be running.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let began = Instant::now();
        for _ in 0..3 {
            bench.assert_works_normally("searches that never end").await;
        }
        let served = began.elapsed();
        cancel.cancel();
        (served, Instant::now())
    };
    let (ended, (served, stopped)) = tokio::join!(attacks, modest);
    let scripts = stopped.elapsed();
    assert!(ended.iter().all(|outcome| matches!(outcome.status, Status::Cancelled)), "{ended:?}");
    // Another search starts only when the threads are free again, not just their callers.
    let found = greedy[0]
        .toolbox
        .call("grep", serde_json::json!(["inside", "inside.txt"]), &CallContext::default())
        .await;
    let threads = stopped.elapsed();
    assert_eq!(found.expect("a result")["matches"][0]["line"], 1);
    println!(
        "three scripts took {served:.1?} meanwhile; after the stop the scripts ended in {scripts:.1?}, the threads in {threads:.1?}"
    );
    assert!(served < Duration::from_secs(20), "the other tools took {served:?}");
    assert!(threads < Duration::from_secs(5), "the searches continued for {threads:?}");
}
