//! Scripts that spawn subtasks and wait for them: which requests they make, how often, and when
//! they are suspended.

use std::sync::Mutex;

use construct_proto::mesh::v1::{
    SubtaskRequest, SubtaskResponse, SubtaskState, subtask_request::Operation,
    subtask_response::Refusal,
};

use super::*;

/// The subtask whose answer is too long.
const LONG_ANSWER_TASK: &str = "task_99";

/// Stands in for the reconcilers: records requests and answers them.
pub(super) struct FakeReconciler {
    requests: Arc<Mutex<Vec<SubtaskRequest>>>,
    over: Arc<AtomicBool>,
    stop: CancellationToken,
}

impl FakeReconciler {
    pub(super) async fn open(world: &World) -> Self {
        Self::serve(world.nats.bus().await)
    }

    fn serve(bus: Bus) -> Self {
        let reconciler =
            Self { requests: Arc::default(), over: Arc::default(), stop: CancellationToken::new() };
        let stop = reconciler.stop.clone();
        let (requests, over) = (Arc::clone(&reconciler.requests), Arc::clone(&reconciler.over));
        tokio::spawn(async move {
            let answer = move |request: SubtaskRequest| {
                let answer = answer(&request, over.load(Relaxed));
                requests.lock().expect("the lock is not poisoned").push(request);
                Box::pin(std::future::ready(Some(answer))) as futures::future::BoxFuture<'static, _>
            };
            bus.answer(&subject::Subtasks, stop, answer).await
        });
        reconciler
    }

    /// Waits for this many requests of a call.
    async fn wait_for_requests(&self, call: (u32, u32), times: usize) {
        let count = || self.calls().into_iter().filter(|requested| *requested == call).count();
        wait_for("requests of a call", || (count() >= times).then_some(())).await;
    }

    pub(super) fn calls(&self) -> Vec<(u32, u32)> {
        self.requests
            .lock()
            .expect("the lock is not poisoned")
            .iter()
            .map(|request| (request.script, request.number))
            .collect()
    }
}

impl Drop for FakeReconciler {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Tasks are named `task_1`, `task_2`, … by the number of the call that spawned them.
fn answer(request: &SubtaskRequest, over: bool) -> SubtaskResponse {
    match request.operation.as_ref().expect("a request") {
        Operation::Spawn(spawn) if spawn.agent == "nobody" => {
            let refused = Refusal {
                name: "AgentNotFound".to_owned(),
                message: "there is no agent.".to_owned(),
            };
            SubtaskResponse { refusal: Some(refused), ..SubtaskResponse::default() }
        }
        Operation::Spawn(_) => SubtaskResponse {
            spawned_task: format!("task_{}", request.number),
            ..SubtaskResponse::default()
        },
        Operation::Await(wait) => {
            let state = |task: &String| SubtaskState {
                task: task.clone(),
                status: "completed".to_owned(),
                answer: format!("answer of {task}"),
                cost_pico_usd: 500_000_000_000,
                omitted_answer_bytes: if task == LONG_ANSWER_TASK { 7 } else { 0 },
                ..SubtaskState::default()
            };
            SubtaskResponse {
                tasks: wait.tasks.iter().map(state).collect(),
                wait_ended: over,
                ..SubtaskResponse::default()
            }
        }
        Operation::List(list) => {
            let from = list
                .after
                .strip_prefix("task_")
                .map_or(0, |number| number.parse::<u32>().expect("a number") + 1);
            let state =
                |number| SubtaskState { task: format!("task_{number}"), ..SubtaskState::default() };
            SubtaskResponse {
                tasks: (from..from + 2).map(state).collect(),
                has_more: from < 4,
                ..SubtaskResponse::default()
            }
        }
        _ => SubtaskResponse::default(),
    }
}

#[tokio::test]
async fn task_list_is_read_page_by_page() {
    let mut world = World::new(&["tasks.list().map(one => one.task).join()"]).await;
    let reconciler = FakeReconciler::open(&world).await;
    let [result] = world.run_to_completion().await.try_into().expect("one result");
    assert_eq!(result.output, "task_0,task_1,task_2,task_3,task_4,task_5");
    assert_eq!(reconciler.calls(), [(0, 1); 3]);
}

#[tokio::test]
async fn waiting_for_subtasks_suspends_and_resume_asks_again() {
    let script = "const begun = ['a', 'b'].map(message => tasks.spawn({ message, budget: 0.5 }).task); \
                  tasks.await(begun, { timeout_seconds: 60 }).map(one => `${one.answer} ${one.cost}`).join()";
    let mut world = World::new(&[script]).await;
    let reconciler = FakeReconciler::open(&world).await;
    let suspended = world.run_until_suspended().await;
    assert!(suspended.approval_requests.is_empty());
    let [awaited] = suspended.awaits.as_slice() else { panic!("{suspended:?}") };
    assert_eq!(
        (awaited.script, awaited.number, awaited.task_ids.as_slice()),
        (0, 3, &["task_1".to_owned(), "task_2".to_owned()][..])
    );
    let error = &suspended.results[0].error;
    assert!(
        error.contains("canceled while waiting for subtasks")
            && error.contains("still waited for subtasks: #3"),
        "{error}"
    );
    // Resumed too early, it waits for the same, as long as before.
    world.next_round();
    assert_eq!(world.run_until_suspended().await.awaits, suspended.awaits);
    reconciler.over.store(true, Relaxed);
    world.next_round();
    let [result] = world.run_to_completion().await.try_into().expect("one result");
    assert_eq!(
        (result.output.as_str(), result.error.as_str()),
        ("answer of task_1 0.5,answer of task_2 0.5", "")
    );
    assert_eq!(
        reconciler.calls(),
        [(0, 1), (0, 2), (0, 3), (0, 3), (0, 3)],
        "ended calls are not requested again"
    );
}

#[tokio::test]
async fn script_resumes_with_the_first_of_subtask_and_approval() {
    let script = "const one = tools.tasks.await('task_7').then(one => one.answer); \
                  const made = tools.create_file('secrets/key', 'k').then(made => made.status); \
                  (await Promise.all([one, made])).join()";
    let mut world = World::new(&[script]).await;
    let reconciler = FakeReconciler::open(&world).await;
    let suspended = world.run_until_suspended().await;
    assert_eq!((suspended.approval_requests.len(), suspended.awaits.len()), (1, 1));
    reconciler.over.store(true, Relaxed);
    world.next_round();
    let suspended = world.run_until_suspended().await;
    assert_eq!((suspended.approval_requests.len(), suspended.awaits.len()), (1, 0));
    world.decide(&suspended.approval_requests[0], true, "");
    let [result] = world.run_to_completion().await.try_into().expect("one result");
    assert_eq!((result.output.as_str(), result.error.as_str()), ("answer of task_7,created", ""));
}

#[tokio::test]
async fn subtask_end_is_noticed_while_the_script_works() {
    let script = "const slow = new Promise(done => setTimeout(() => done('the timer'), 15000)); \
                  const one = tools.tasks.await('task_7').then(one => one.answer); \
                  await Promise.race([one, slow])";
    let mut world = World::new(&[script]).await;
    let reconciler = FakeReconciler::open(&world).await;
    let ended = async {
        reconciler.wait_for_requests((0, 2), 2).await;
        reconciler.over.store(true, Relaxed);
        std::time::Instant::now()
    };
    let (results, ended) = tokio::join!(world.run_to_completion(), ended);
    assert!(ended.elapsed() < Duration::from_secs(8), "{:?}", ended.elapsed());
    assert!(results[0].output.contains("answer of task_7"), "{results:?}");
    // The replay is the same: the end is in the journal.
    reconciler.over.store(false, Relaxed);
    assert_eq!(world.run_to_completion().await, results);
}

#[tokio::test]
async fn finished_wait_does_not_suspend_the_script() {
    let script = "const [one, slept] = await Promise.all([ \
                      tools.tasks.await('task_7'), \
                      new Promise(done => setTimeout(() => done('slept'), 3000))]); \
                  one.answer + ' ' + slept";
    let mut world = World::new(&[script]).await;
    let reconciler = FakeReconciler::open(&world).await;
    let ended = async {
        reconciler.wait_for_requests((0, 1), 1).await;
        reconciler.over.store(true, Relaxed);
    };
    let (results, ()) = tokio::join!(world.run_to_completion(), ended);
    assert_eq!(results[0].output, "answer of task_7 slept");
    assert_eq!(reconciler.calls(), [(0, 1), (0, 1)]);
}

#[tokio::test]
async fn script_waiting_only_for_subtasks_is_suspended() {
    let script = "const [one, slept] = await Promise.all([ \
                      tools.tasks.await('task_7'), \
                      new Promise(done => setTimeout(() => done('slept'), 2500))]); \
                  one.answer + ' ' + slept";
    let mut world = World::new(&[script]).await;
    let reconciler = FakeReconciler::open(&world).await;
    let began = std::time::Instant::now();
    let suspended = world.run_until_suspended().await;
    assert!(began.elapsed() >= Duration::from_millis(2500), "the script waits for the timer");
    let [awaited] = suspended.awaits.as_slice() else { panic!("{suspended:?}") };
    assert_eq!((awaited.number, awaited.task_ids.as_slice()), (1, &["task_7".to_owned()][..]));
    assert!(
        reconciler.calls().len() >= 3,
        "requests were made meanwhile: {:?}",
        reconciler.calls()
    );
    assert!(suspended.results[0].error.contains("still waited for subtasks: #1"), "{suspended:?}");
    reconciler.over.store(true, Relaxed);
    world.next_round();
    assert_eq!(world.run_to_completion().await[0].output, "answer of task_7 slept");
}

#[tokio::test]
async fn refused_spawn_throws_a_catchable_error() {
    let script = "try { tasks.spawn({ message: 'a', agent: 'nobody' }) } catch (error) { `${error.name}: ${error.message}` }";
    let mut world = World::new(&[script]).await;
    let _reconciler = FakeReconciler::open(&world).await;
    let [result] = world.run_to_completion().await.try_into().expect("one result");
    assert_eq!(result.output, "AgentNotFound: tasks.spawn: there is no agent.");
}

#[tokio::test]
async fn requests_repeat_until_a_reconciler_answers() {
    let mut world = World::new(&["tasks.spawn('a').task"]).await;
    let nats = Arc::clone(&world.nats);
    let mut questions =
        nats.bus().await.tap("construct.v1.ctl.reconciler.>").await.expect("tapped");
    let running = world.run_to_completion();
    let opening = async {
        use futures::StreamExt as _;
        questions.next().await.expect("an unanswered request");
        FakeReconciler::serve(nats.bus().await)
    };
    let (results, _reconciler) = tokio::join!(running, opening);
    assert_eq!(results[0].output, "task_1");
}

#[tokio::test]
async fn clipped_answer_has_a_note() {
    let script = format!(
        "tasks.await(['task_1', '{LONG_ANSWER_TASK}']).map(({{ answer, note }}) => [answer, note ?? 'all'])"
    );
    let mut world = World::new(&[&script]).await;
    let reconciler = FakeReconciler::open(&world).await;
    reconciler.over.store(true, Relaxed);
    let results = world.run_to_completion().await;
    let note = r#"The last 7 bytes of the answer of \"task_99\" are omitted."#;
    let value =
        format!(r#"[["answer of task_1","all"],["answer of {LONG_ANSWER_TASK}","{note}"]]"#);
    assert!(results[0].output.starts_with(&value), "{results:?}");
    assert!(results[0].output.contains("\n[#1 tasks.await: The last 7 bytes of "), "{results:?}");
}
