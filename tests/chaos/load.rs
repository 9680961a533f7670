//! The load: conversations whose messages all have side effects, from their scripts or from
//! subtasks.

use std::{
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use construct_proto::v1;
use construct_tests::{
    client::{Conversation, id, retry_unavailable},
    mesh::Mesh,
    random::Random,
    recorder::Recorder,
};
use serde_json::{Value, json};

use crate::people;

/// The error of a turn without budget.
pub(crate) const BUDGET_EXHAUSTED: &str = "the budget of the task is exhausted";

/// The side effects of each message.
pub(crate) const EFFECTS: usize = 6;

/// The initial budget of the conversation with subtasks, and each increase when it is exhausted, in
/// 10⁻¹² dollars: some messages, and the reservations of two or three calls at a time.
const BUDGET: i64 = 600_000_000_000;

/// A budget that is raised when it is exhausted.
#[derive(Debug)]
pub(crate) struct Budget {
    pub(crate) id: String,
    pub(crate) limit: Mutex<i64>,
}

/// How the work of a conversation is done, and how its user behaves.
pub(crate) enum Kind {
    /// Its scripts do the work.
    Works,
    /// Subtasks do the work, with this shared budget.
    Delegates(Budget),
    /// Its scripts do the work, and some calls need approval.
    Asks,
    /// Its scripts do the work, if they get to it: the user withdraws every message.
    Fickle,
}

/// One conversation.
pub(crate) struct Job {
    pub(crate) conversation: Conversation,
    pub(crate) recorder: Recorder,
    pub(crate) folder: PathBuf,
    pub(crate) kind: Kind,
    pub(crate) said: Mutex<Vec<String>>,
}

impl Job {
    pub(crate) const fn budget(&self) -> Option<&Budget> {
        if let Kind::Delegates(budget) = &self.kind { Some(budget) } else { None }
    }
}

/// Each effect is its own line or file, named after the message. Unknown outcomes are noted, as the
/// model is asked to.
fn script() -> Value {
    let code = [
        "const message = {{json last_user_text}}, unknown = [];",
        "const effect = async n => {",
        "  try {",
        "    if (n % 3 === 0) await tools.create_file(`made/${message}.${n}`, 'made');",
        "    else {",
        "      const done = await tools.execute_command(`echo ${message}.${n} >> effects.log && sleep 0.0${n}`);",
        "      if (done.exit_code !== 0) throw new Error(`effect ${n} has failed: ${done.stderr}`);",
        "    }",
        "  } catch (error) {",
        "    if (error.name !== 'OutcomeUnknown') throw error;",
        "    unknown.push(n);",
        "  }",
        "};",
        "for (let n = 1; n <= 3; n++) await effect(n);",
        "await Promise.all([4, 5, 6].map(effect));",
        "`unknown of ${message}: ${JSON.stringify(unknown)}.`",
    ];
    json!({"count": "since_user", "turns": [
        {"text": "I shall do that now.", "tokens_per_second": 40, "code": [code]},
        {"text": "Done. {{last_result}}", "tokens_per_second": 80},
    ]})
}

/// Each half of a message's effects is done by a subtask. Effects that it reports as unknown are
/// noted as well, and so are all effects of a subtask that did not complete; separately where the
/// budget was exhausted, which is no interruption.
fn manager() -> Value {
    let code = [
        "const message = {{json last_user_text}}, unknown = [], unpaid = [], halves = [[1, 2, 3], [4, 5, 6]], begun = [];",
        "for (const half of halves) {",
        "  const order = { message: JSON.stringify({ message, half }), agent: 'hand', title: `${message} ${half}` };",
        "  try { begun.push(tasks.spawn(order).task) }",
        "  catch (error) { if (error.name !== 'TooManySubtasks') throw error; unknown.push(...half) }",
        "}",
        "const ended = begun.length > 0 ? tasks.await(begun) : [];",
        "ended.forEach((one, n) => {",
        "  if (one.task !== begun[n]) throw new Error('answers are not in order');",
        "  if (one.status === 'completed') unknown.push(...JSON.parse(one.answer));",
        &format!(
            "  else (one.error?.includes('{BUDGET_EXHAUSTED}') ? unpaid : unknown).push(...halves[n]);"
        ),
        "});",
        "`unknown of ${message}: ${JSON.stringify(unknown)}. unpaid of ${message}: ${JSON.stringify(unpaid)}.`",
    ];
    json!({"count": "since_user", "usage": {"input": 500, "output": 1500}, "turns": [
        {"text": "I shall have that done.", "tokens_per_second": 40, "code": [code]},
        {"text": "Done. {{last_result}}", "tokens_per_second": 80},
    ]})
}

fn worker() -> Value {
    let code = [
        "const { message, half } = JSON.parse({{json last_user_text}}), unknown = [];",
        "for (const n of half) {",
        "  try {",
        "    const done = execute_command(`echo ${message}.${n} >> effects.log && sleep 0.0${n}`);",
        "    if (done.exit_code !== 0) throw new Error(`effect ${n} has failed: ${done.stderr}`);",
        "  }",
        "  catch (error) { if (error.name !== 'OutcomeUnknown') throw error; unknown.push(n) }",
        "}",
        "JSON.stringify(unknown)",
    ];
    json!({"count": "since_user", "usage": {"input": 500, "output": 1500}, "turns": [
        {"code": [code]}, {"text": "{{last_result}}", "tokens_per_second": 80},
    ]})
}

impl Budget {
    async fn for_conversation(conversation: &Conversation) -> Self {
        let (task, period) = (conversation.id().to_owned(), v1::BudgetPeriod::Total.into());
        let spec =
            v1::BudgetSpec { task, period, limit_pico_usd: BUDGET, ..v1::BudgetSpec::default() };
        let request =
            v1::CreateBudgetRequest { spec: Some(spec), ..v1::CreateBudgetRequest::default() };
        let budget =
            conversation.client().budgets().create_budget(request).await.unwrap().into_inner();
        Self { id: id(budget.metadata.as_ref()), limit: Mutex::new(BUDGET) }
    }

    /// Raises the budget.
    pub(crate) async fn raise(&self, job: &Job) {
        let limit_pico_usd = *self.limit.lock().unwrap() + BUDGET;
        let raise = v1::UpdateBudgetRequest {
            budget: self.id.clone(),
            limit_pico_usd,
            ..v1::UpdateBudgetRequest::default()
        };
        let budgets = job.conversation.client().budgets();
        let raised = retry_unavailable("the budget to be raised", async || {
            budgets.clone().update_budget(raise.clone()).await
        });
        raised.await.unwrap();
        *self.limit.lock().unwrap() = limit_pico_usd;
    }
}

/// Starts all conversations.
pub(crate) async fn begin(mesh: &Mesh) -> Vec<Job> {
    for (name, script) in
        [("worker", script()), ("careful", script()), ("manager", manager()), ("hand", worker())]
    {
        mesh.scripted_agent(name, &script).await.unwrap();
    }
    let client = mesh.client().unwrap();
    people::ask_before_files(&client, "careful").await;
    let mut jobs = Vec::new();
    for (n, agent) in ["manager", "careful", "worker", "worker", "worker"].into_iter().enumerate() {
        let folder = mesh.folder(&format!("job-{n}")).unwrap();
        let workspace = folder.display().to_string();
        // With a title no model call is made for one, which would be skipped without budget.
        let title = format!("Job {n}");
        let spec =
            v1::TaskSpec { agent: agent.to_owned(), workspace, title, ..v1::TaskSpec::default() };
        let conversation = client.create_task_with(spec).await.unwrap();
        let kind = match n {
            0 => Kind::Delegates(Budget::for_conversation(&conversation).await),
            1 => Kind::Asks,
            2 => Kind::Fickle,
            _ => Kind::Works,
        };
        let recorder = conversation.record();
        jobs.push(Job { conversation, recorder, folder, kind, said: Mutex::default() });
    }
    jobs
}

/// Sends messages until it is `over`. Fickle users withdraw each one, at times that follow from the
/// seed.
pub(crate) async fn run_conversations(jobs: &[Job], seed: u64, over: &AtomicBool) {
    let speaking = (1..).zip(jobs).map(async |(n, job)| match job.kind {
        Kind::Fickle => people::change_messages(job, Random::new(seed.rotate_left(n)), over).await,
        Kind::Works | Kind::Delegates(_) | Kind::Asks => send_messages(job, over).await,
    });
    futures::future::join_all(speaking).await;
}

/// Some messages are sent while the previous one is processed, some afterwards.
async fn send_messages(job: &Job, over: &AtomicBool) {
    for n in 0.. {
        let text = format!("m{n}");
        job.conversation.submit(&text).await;
        job.said.lock().unwrap().push(text);
        if n % 2 == 1 {
            let task = job.conversation.wait_until_idle().await.status.unwrap_or_default();
            if let Some(budget) = job.budget()
                && task.last_outcome() != v1::TurnOutcome::Completed
            {
                budget.raise(job).await;
            }
            if over.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}
