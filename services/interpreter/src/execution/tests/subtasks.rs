//! Scripts that begin other tasks and wait for them: what is asked, how often, and what is put
//! away.

use std::sync::Mutex;

use construct_proto::mesh::v1::{
    SubtaskAnswer, SubtaskQuestion, SubtaskState, subtask_answer::Refusal, subtask_question::Ask,
};

use super::*;

/// The subtask whose answer is too long.
const LONG: &str = "task_99";

/// Stands for the reconcilers: takes down what is asked, and answers as it is told.
pub(super) struct Desk {
    asked: Arc<Mutex<Vec<SubtaskQuestion>>>,
    over: Arc<AtomicBool>,
    stop: CancellationToken,
}

impl Desk {
    pub(super) async fn open(world: &World) -> Self {
        Self::on(world.nats.bus().await)
    }

    fn on(bus: Bus) -> Self {
        let desk =
            Self { asked: Arc::default(), over: Arc::default(), stop: CancellationToken::new() };
        let stop = desk.stop.clone();
        let (asked, over) = (Arc::clone(&desk.asked), Arc::clone(&desk.over));
        tokio::spawn(async move {
            let answer = move |question: SubtaskQuestion| {
                let answer = answer(&question, over.load(Relaxed));
                asked.lock().expect("nobody panics with it").push(question);
                Box::pin(std::future::ready(Some(answer))) as futures::future::BoxFuture<'static, _>
            };
            bus.answer(&subject::Subtasks, stop, answer).await
        });
        desk
    }

    /// Waits until this was asked so often.
    async fn was_asked(&self, call: (u32, u32), times: usize) {
        let count = || self.calls().into_iter().filter(|asked| *asked == call).count();
        until("a call to be asked about", || (count() >= times).then_some(())).await;
    }

    pub(super) fn calls(&self) -> Vec<(u32, u32)> {
        self.asked
            .lock()
            .expect("nobody panics with it")
            .iter()
            .map(|asked| (asked.script, asked.number))
            .collect()
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Tasks are called `task_1`, `task_2`, … by the number of the call that began them.
fn answer(question: &SubtaskQuestion, over: bool) -> SubtaskAnswer {
    match question.ask.as_ref().expect("something is asked") {
        Ask::Spawn(spawn) if spawn.agent == "nobody" => {
            let refused = Refusal {
                name: "AgentNotFound".to_owned(),
                message: "there is no agent.".to_owned(),
            };
            SubtaskAnswer { refused: Some(refused), ..SubtaskAnswer::default() }
        }
        Ask::Spawn(_) => SubtaskAnswer {
            spawned: format!("task_{}", question.number),
            ..SubtaskAnswer::default()
        },
        Ask::Await(wait) => {
            let state = |task: &String| SubtaskState {
                task: task.clone(),
                status: "completed".to_owned(),
                answer: format!("answer of {task}"),
                cost_pico_usd: 500_000_000_000,
                answer_left_out: if task == LONG { 7 } else { 0 },
                ..SubtaskState::default()
            };
            SubtaskAnswer {
                tasks: wait.tasks.iter().map(state).collect(),
                over,
                ..SubtaskAnswer::default()
            }
        }
        Ask::List(list) => {
            let from = list
                .after
                .strip_prefix("task_")
                .map_or(0, |number| number.parse::<u32>().expect("a number") + 1);
            let state =
                |number| SubtaskState { task: format!("task_{number}"), ..SubtaskState::default() };
            SubtaskAnswer {
                tasks: (from..from + 2).map(state).collect(),
                more: from < 4,
                ..SubtaskAnswer::default()
            }
        }
        _ => SubtaskAnswer::default(),
    }
}

#[tokio::test]
async fn a_list_is_read_page_by_page() {
    let mut world = World::new(&["tasks.list().map(one => one.task).join()"]).await;
    let desk = Desk::open(&world).await;
    let [result] = world.completes().await.try_into().expect("one result");
    assert_eq!(result.output, "task_0,task_1,task_2,task_3,task_4,task_5");
    assert_eq!(desk.calls(), [(0, 1); 3]);
}

#[tokio::test]
async fn a_script_that_waits_for_subtasks_is_put_away_and_asks_again_when_it_is_gone_on_with() {
    let script = "const begun = ['a', 'b'].map(message => tasks.spawn({ message, budget: 0.5 }).task); \
                  tasks.await(begun, { timeout_seconds: 60 }).map(one => `${one.answer} ${one.cost}`).join()";
    let mut world = World::new(&[script]).await;
    let desk = Desk::open(&world).await;
    let parked = world.parks().await;
    assert!(parked.calls.is_empty());
    let [awaited] = parked.awaits.as_slice() else { panic!("{parked:?}") };
    assert_eq!(
        (awaited.script, awaited.number, awaited.task_ids.as_slice()),
        (0, 3, &["task_1".to_owned(), "task_2".to_owned()][..])
    );
    let error = &parked.results[0].error;
    assert!(
        error.contains("canceled while waiting for subtasks")
            && error.contains("still waited for subtasks: #3"),
        "{error}"
    );
    // Gone on with too early, it waits for the same, as long as before.
    world.next_round();
    assert_eq!(world.parks().await.awaits, parked.awaits);
    desk.over.store(true, Relaxed);
    world.next_round();
    let [result] = world.completes().await.try_into().expect("one result");
    assert_eq!(
        (result.output.as_str(), result.error.as_str()),
        ("answer of task_1 0.5,answer of task_2 0.5", "")
    );
    assert_eq!(
        desk.calls(),
        [(0, 1), (0, 2), (0, 3), (0, 3), (0, 3)],
        "what has ended is not asked again"
    );
}

#[tokio::test]
async fn one_that_waits_for_a_subtask_and_a_person_goes_on_with_whichever_comes_first() {
    let script = "const one = tools.tasks.await('task_7').then(one => one.answer); \
                  const made = tools.create_file('secrets/key', 'k').then(made => made.status); \
                  (await Promise.all([one, made])).join()";
    let mut world = World::new(&[script]).await;
    let desk = Desk::open(&world).await;
    let parked = world.parks().await;
    assert_eq!((parked.calls.len(), parked.awaits.len()), (1, 1));
    desk.over.store(true, Relaxed);
    world.next_round();
    let parked = world.parks().await;
    assert_eq!((parked.calls.len(), parked.awaits.len()), (1, 0));
    world.decide(&parked.calls[0], true, "");
    let [result] = world.completes().await.try_into().expect("one result");
    assert_eq!((result.output.as_str(), result.error.as_str()), ("answer of task_7,created", ""));
}

#[tokio::test]
async fn a_subtask_that_ends_while_its_script_does_something_else_is_noticed() {
    let script = "const slow = new Promise(done => setTimeout(() => done('the timer'), 15000)); \
                  const one = tools.tasks.await('task_7').then(one => one.answer); \
                  await Promise.race([one, slow])";
    let mut world = World::new(&[script]).await;
    let desk = Desk::open(&world).await;
    let ended = async {
        desk.was_asked((0, 2), 2).await;
        desk.over.store(true, Relaxed);
        std::time::Instant::now()
    };
    let (results, ended) = tokio::join!(world.completes(), ended);
    assert!(ended.elapsed() < Duration::from_secs(8), "{:?}", ended.elapsed());
    assert!(results[0].output.contains("answer of task_7"), "{results:?}");
    // It is the same when it is run again: what has ended stands in the journal.
    desk.over.store(false, Relaxed);
    assert_eq!(world.completes().await, results);
}

#[tokio::test]
async fn a_wait_that_is_over_while_the_script_works_keeps_it_from_being_put_away() {
    let script = "const [one, slept] = await Promise.all([ \
                      tools.tasks.await('task_7'), \
                      new Promise(done => setTimeout(() => done('slept'), 3000))]); \
                  one.answer + ' ' + slept";
    let mut world = World::new(&[script]).await;
    let desk = Desk::open(&world).await;
    let ended = async {
        desk.was_asked((0, 1), 1).await;
        desk.over.store(true, Relaxed);
    };
    let (results, ()) = tokio::join!(world.completes(), ended);
    assert_eq!(results[0].output, "answer of task_7 slept");
    assert_eq!(desk.calls(), [(0, 1), (0, 1)]);
}

#[tokio::test]
async fn a_script_is_put_away_as_soon_as_it_waits_for_subtasks_alone() {
    let script = "const [one, slept] = await Promise.all([ \
                      tools.tasks.await('task_7'), \
                      new Promise(done => setTimeout(() => done('slept'), 2500))]); \
                  one.answer + ' ' + slept";
    let mut world = World::new(&[script]).await;
    let desk = Desk::open(&world).await;
    let began = std::time::Instant::now();
    let parked = world.parks().await;
    assert!(began.elapsed() >= Duration::from_millis(2500), "the timer was waited for");
    let [awaited] = parked.awaits.as_slice() else { panic!("{parked:?}") };
    assert_eq!((awaited.number, awaited.task_ids.as_slice()), (1, &["task_7".to_owned()][..]));
    assert!(desk.calls().len() >= 3, "it was asked about meanwhile: {:?}", desk.calls());
    assert!(parked.results[0].error.contains("still waited for subtasks: #1"), "{parked:?}");
    desk.over.store(true, Relaxed);
    world.next_round();
    assert_eq!(world.completes().await[0].output, "answer of task_7 slept");
}

#[tokio::test]
async fn what_is_refused_is_an_error_that_a_script_can_catch() {
    let script = "try { tasks.spawn({ message: 'a', agent: 'nobody' }) } catch (error) { `${error.name}: ${error.message}` }";
    let mut world = World::new(&[script]).await;
    let _desk = Desk::open(&world).await;
    let [result] = world.completes().await.try_into().expect("one result");
    assert_eq!(result.output, "AgentNotFound: tasks.spawn: there is no agent.");
}

#[tokio::test]
async fn a_script_asks_until_there_is_a_reconciler() {
    let mut world = World::new(&["tasks.spawn('a').task"]).await;
    let nats = Arc::clone(&world.nats);
    let mut questions =
        nats.bus().await.tap("construct.v1.ctl.reconciler.>").await.expect("tapped");
    let running = world.completes();
    let opening = async {
        use futures::StreamExt as _;
        questions.next().await.expect("it asks, and nobody answers");
        Desk::on(nats.bus().await)
    };
    let (results, _desk) = tokio::join!(running, opening);
    assert_eq!(results[0].output, "task_1");
}

#[tokio::test]
async fn answer_that_was_cut_is_said_to_be_beside_it() {
    let script = format!(
        "tasks.await(['task_1', '{LONG}']).map(({{ answer, note }}) => [answer, note ?? 'all'])"
    );
    let mut world = World::new(&[&script]).await;
    let desk = Desk::open(&world).await;
    desk.over.store(true, Relaxed);
    let results = world.completes().await;
    let note = r#"Of the answer of \"task_99\" the last 7 bytes are left out."#;
    let value = format!(r#"[["answer of task_1","all"],["answer of {LONG}","{note}"]]"#);
    assert!(results[0].output.starts_with(&value), "{results:?}");
    assert!(results[0].output.contains("\n[#1 tasks.await: Of the answer of "), "{results:?}");
}
