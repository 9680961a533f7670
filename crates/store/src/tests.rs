//! Tests of this crate against a real server.

mod approvals;
mod audit;
mod budgets;
mod catalog;
mod commit;
mod control;
mod erase;
mod events;
mod files;
mod identity;
mod keys;
mod messages;
mod migrations;
mod pages;
mod plans;
mod pool;
mod scans;
mod schedules;
mod slack;
mod states;
mod subtasks;
mod task_cache;
mod tasks;
mod usage;
mod writes;

use jiff::Timestamp;
use uuid::Uuid;

use construct_domain::{
    AgentId, MessageId, ModelId, ModelProviderId, OrganizationId, StepId, TaskId,
    message::{Block, Content},
    money::{LongContext, Prices, Rates, Usage},
};

use crate::{
    Error, Idempotency, Model, ModelParameters, ModelProviderKind, NewAgent, NewEvent, NewModel,
    NewModelProvider, NewTask, NewUserMessage, PricesSource, Store, StoredEvent, StoredMessage,
    StoredTask, Write, WriteOutcome, WriteOutput, testing::Database,
};

const ORG: OrganizationId = OrganizationId::LOCAL;

fn now() -> Timestamp {
    Timestamp::from_microsecond(Timestamp::now().as_microsecond()).expect("the present is in range")
}

fn write() -> Write {
    Write::new(ORG, now())
}

fn write_with_key(key: &str, hash: u8) -> Write {
    let idempotency =
        Some(Idempotency { key: key.to_owned(), method: "Test", request_hash: [hash; 32] });
    Write { idempotency, ..write() }
}

fn event(kind: &str) -> NewEvent {
    NewEvent { kind: kind.to_owned(), payload: kind.as_bytes().to_vec(), step: None }
}

/// The event of a task that is deleted with its parent.
fn deleted_event(_: TaskId) -> NewEvent {
    event("task.deleted")
}

/// Renders an event of this kind. The response is the `Debug` text of the entity.
fn rendered<T: std::fmt::Debug>(kind: &str) -> impl FnOnce(&T) -> WriteOutput + Send + use<T> {
    let event = event(kind);
    move |entity| WriteOutput { event, response: format!("{entity:?}").into_bytes() }
}

fn applied<T: std::fmt::Debug>(written: WriteOutcome<T>) -> T {
    applied_with_event(written).0
}

fn applied_with_event<T: std::fmt::Debug>(written: WriteOutcome<T>) -> (T, Option<StoredEvent>) {
    match written {
        WriteOutcome::Applied { entity, event } => (entity, event),
        WriteOutcome::Repeated { response } => {
            panic!("it was repeated: {}", String::from_utf8_lossy(&response))
        }
    }
}

fn text(text: &str) -> Content {
    Content { blocks: vec![Block::Text(text.to_owned())] }
}

fn usage(tokens: i64) -> Usage {
    Usage {
        input_tokens: tokens,
        output_tokens: 1,
        cache_read_tokens: 2,
        cache_write_tokens: 3,
        thinking_tokens: 1,
        cost_pico_usd: tokens * 10,
    }
}

fn step_id() -> StepId {
    StepId::from_uuid(Uuid::now_v7())
}

fn message_id() -> MessageId {
    MessageId::from_uuid(Uuid::now_v7())
}

/// A database with one agent.
struct Fixture {
    database: Database,
    store: Store,
    provider: ModelProviderId,
    model: ModelId,
    agent: AgentId,
}

impl Fixture {
    async fn new() -> Self {
        let database = Database::new().await;
        let store = database.store();
        let provider = applied(
            store
                .model_provider_create(&write(), new_provider("p"), rendered("provider.created"))
                .await
                .expect("created"),
        )
        .id;
        let model: Model = applied(
            store
                .model_create(&write(), new_model(provider, "m"), rendered("model.created"))
                .await
                .expect("created"),
        );
        let agent = applied(
            store
                .agent_create(&write(), new_agent(model.id, "a"), rendered("agent.created"))
                .await
                .expect("created"),
        )
        .id;
        Self { database, store, provider, model: model.id, agent }
    }

    async fn task(&self) -> TaskId {
        self.stored_task().await.state.id
    }

    async fn stored_task(&self) -> StoredTask {
        applied(
            self.store
                .task_create(&write(), new_task(self.agent), rendered("task.created"))
                .await
                .expect("created"),
        )
    }

    async fn message(&self, task: TaskId, body: &str) -> StoredMessage {
        self.message_as(task, body, false).await
    }

    async fn message_as(&self, task: TaskId, body: &str, interrupts: bool) -> StoredMessage {
        let new = NewUserMessage { id: message_id(), task, content: text(body), interrupts };
        applied(
            self.store
                .message_create(&write(), new, rendered("message.created"))
                .await
                .expect("accepted"),
        )
    }
}

fn new_provider(name: &str) -> NewModelProvider {
    NewModelProvider {
        id: ModelProviderId::from_uuid(Uuid::now_v7()),
        name: name.to_owned(),
        kind: ModelProviderKind::Scripted,
        base_url: String::new(),
        script: Some("{}".to_owned()),
        key: None,
        additional_keys: Vec::new(),
        limits: crate::KeyLimits::default(),
    }
}

fn new_model(provider: ModelProviderId, name: &str) -> NewModel {
    NewModel {
        id: ModelId::from_uuid(Uuid::now_v7()),
        provider,
        name: name.to_owned(),
        vendor_model: "vendor".to_owned(),
        context_window: 1000,
        max_output_tokens: 100,
        prices: Prices {
            input: 1,
            output: 2,
            cache_read: 3,
            cache_write: 4,
            thinking: 5,
            request: 6,
            long_context: Some(LongContext {
                above_input_tokens: 7,
                rates: Rates { input: 8, ..Rates::default() },
            }),
        },
        prices_source: PricesSource::Given,
        tool_calling: true,
        fallbacks: Vec::new(),
        hedge_after_ms: 0,
    }
}

fn new_agent(model: ModelId, name: &str) -> NewAgent {
    NewAgent {
        id: AgentId::from_uuid(Uuid::now_v7()),
        model,
        name: name.to_owned(),
        description: String::new(),
        instructions: "be good".to_owned(),
        max_turns: 0,
        parameters: ModelParameters::default(),
        policy: Vec::new(),
        compute: "cpu-2".to_owned(),
        secrets: Vec::new(),
        script_models: Vec::new(),
        compact_at: construct_domain::context::DEFAULT_COMPACT_AT_PERCENT,
    }
}

fn new_task(agent: AgentId) -> NewTask {
    NewTask {
        id: TaskId::from_uuid(Uuid::now_v7()),
        agent,
        workspace: "/w".to_owned(),
        title: String::new(),
        max_turns_override: 0,
        policy: Vec::new(),
        pinned: Vec::new(),
        compute: None,
    }
}

/// A second organization.
async fn other_organization(store: &Store) -> OrganizationId {
    let id = Uuid::now_v7();
    sqlx::query("INSERT INTO organizations (id, name, slug, created_at, updated_at) VALUES ($1, 'other', 'other', '2026-01-01Z', '2026-01-01Z')")
        .bind(id)
        .execute(&store.pool)
        .await
        .expect("inserted");
    OrganizationId::from_uuid(id)
}

#[track_caller]
fn assert_not_found<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert!(matches!(result, Err(Error::NotFound { .. })), "{result:?}");
}
