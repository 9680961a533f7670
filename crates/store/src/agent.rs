//! Agents.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use construct_domain::{AgentId, ModelId, OrganizationId, SecretId, TaskId, policy::Rule};

use crate::{
    Cursor, Error, Key, Page, Store, Write, WriteOutcome, WriteOutput,
    secret::agent_secrets_set,
    text,
    write::{Writer, begin},
};

pub(crate) const ENTITY: &str = "agent";

/// Sampling parameters of a model. `None` is the vendor's default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelParameters {
    /// 0 to 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// The longest answer, in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Candidates per token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Sequences that end an answer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_sequences: Vec<String>,
    /// The thinking effort; none: the vendor's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thinking: Option<ThinkingEffort>,
}

/// How much a model thinks before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThinkingEffort {
    /// Not at all, or as little as it can.
    Off,
    /// A little.
    Low,
    /// More.
    Medium,
    /// As much as the model considers useful.
    High,
}

/// An agent.
#[derive(Debug, Clone, PartialEq)]
pub struct Agent {
    /// Its id.
    pub id: AgentId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// Its model.
    pub model: ModelId,
    /// That model's name.
    pub model_name: String,
    /// Unique in the organization.
    pub name: String,
    /// Shown to people.
    pub description: String,
    /// Instructions for its model.
    pub instructions: String,
    /// Model calls per user message; 0 means [`construct_domain::task::DEFAULT_MAX_TURNS`].
    pub max_turns: u32,
    /// Sampling parameters of its model.
    pub parameters: ModelParameters,
    /// Rules for the calls of its scripts.
    pub policy: Vec<Rule>,
    /// The pool of interpreters that runs the scripts of its tasks.
    pub compute: String,
    /// Names of the secrets its scripts may use, in order.
    pub secrets: Vec<String>,
    /// Names of the models that its scripts may call in addition to its own, in the given order.
    pub script_models: Vec<String>,
    /// Conversations are compacted once they fill this percentage of the model's input, 1 to 100.
    pub compact_at: u32,
    /// The number of its tasks.
    pub task_count: i64,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

impl Agent {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), &self.name, self.created_at, self.updated_at)
    }
}

/// An agent to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewAgent {
    /// Its id.
    pub id: AgentId,
    /// Its model.
    pub model: ModelId,
    /// Unique in the organization.
    pub name: String,
    /// Shown to people.
    pub description: String,
    /// Instructions for its model.
    pub instructions: String,
    /// Model calls per user message; 0 means the default.
    pub max_turns: u32,
    /// Sampling parameters of its model.
    pub parameters: ModelParameters,
    /// Rules for the calls of its scripts.
    pub policy: Vec<Rule>,
    /// The pool of interpreters that runs the scripts of its tasks.
    pub compute: String,
    /// The secrets its scripts may use.
    pub secrets: Vec<SecretId>,
    /// The models that its scripts may call in addition to its own.
    pub script_models: Vec<ModelId>,
    /// Conversations are compacted once they fill this percentage of the model's input, 1 to 100.
    pub compact_at: u32,
}

/// Changes to an agent. `None` leaves a field as it is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AgentChanges {
    /// Its model.
    pub model: Option<ModelId>,
    /// Unique in the organization.
    pub name: Option<String>,
    /// Shown to people.
    pub description: Option<String>,
    /// Instructions for its model.
    pub instructions: Option<String>,
    /// Model calls per user message; 0 means the default.
    pub max_turns: Option<u32>,
    /// Replaces all of them.
    pub parameters: Option<ModelParameters>,
    /// Replaces all of it.
    pub policy: Option<Vec<Rule>>,
    /// The pool of interpreters for tasks that are created from now on.
    pub compute: Option<String>,
    /// Replaces all of them.
    pub secrets: Option<Vec<SecretId>>,
    /// Replaces all of them.
    pub script_models: Option<Vec<ModelId>>,
    /// Conversations are compacted once they fill this percentage of the model's input, 1 to 100.
    pub compact_at: Option<u32>,
}

/// Filter for a list of agents.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AgentFilter {
    /// With this model only.
    pub model: Option<ModelId>,
    /// Prefix of the name; empty: all.
    pub name_prefix: String,
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    model_id: Uuid,
    model_name: String,
    name: String,
    description: String,
    instructions: String,
    max_turns: i32,
    parameters: Value,
    policy: Value,
    compute: String,
    secrets: Vec<String>,
    script_models: Vec<String>,
    compact_at_percent: i32,
    task_count: i64,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for Agent {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: AgentId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            model: ModelId::from_uuid(row.model_id),
            model_name: row.model_name,
            name: row.name,
            description: row.description,
            instructions: row.instructions,
            max_turns: turns_from_sql(row.max_turns),
            parameters: serde_json::from_value(row.parameters).map_err(Error::internal)?,
            policy: serde_json::from_value(row.policy).map_err(Error::internal)?,
            compute: row.compute,
            secrets: row.secrets,
            script_models: row.script_models,
            compact_at: u32::try_from(row.compact_at_percent).unwrap_or_default(),
            task_count: row.task_count,
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

/// A limit of turns, as a statement parameter.
pub(crate) fn turns_to_sql(turns: u32) -> i32 {
    i32::try_from(turns).unwrap_or(i32::MAX)
}

/// A limit of turns, from a row.
pub(crate) fn turns_from_sql(turns: i32) -> u32 {
    u32::try_from(turns).unwrap_or(0)
}

macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            r#"SELECT a.id, a.organization_id, a.model_id, m.name AS model_name, a.name, a.description, a.instructions, a.max_turns,
                    a.parameters, a.policy, a.compute, a.compact_at_percent,
                    ARRAY(SELECT s.name FROM agent_secrets x JOIN secrets s ON s.organization_id = x.organization_id AND s.id = x.secret_id
                          WHERE x.organization_id = a.organization_id AND x.agent_id = a.id ORDER BY s.name) AS "secrets!",
                    ARRAY(SELECT y.name FROM agent_script_models x JOIN models y ON y.organization_id = x.organization_id AND y.id = x.model_id
                          WHERE x.organization_id = a.organization_id AND x.agent_id = a.id ORDER BY x.position) AS "script_models!",
                    (SELECT count(*) FROM tasks t
                     WHERE t.organization_id = a.organization_id AND t.agent_id = a.id AND t.deleted_at IS NULL) AS "task_count!",
                    a.revision, a.created_at, a.updated_at
             FROM agents a
             JOIN models m ON m.organization_id = a.organization_id AND m.id = a.model_id "# $(+ $tail)+,
            $($argument),*
        )
    };
}

macro_rules! list {
    ($store:expr, $organization:expr, $filter:expr, $page:expr, $after:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $after?;
        select!(
            ["WHERE a.organization_id = $1
               AND ($2::uuid IS NULL OR a.model_id = $2) AND starts_with(a.name, $3) AND (" $key ", a.id) " $comparison " ($4, $5)
             ORDER BY " $key $direction ", a.id" $direction " LIMIT $6"],
            $organization.uuid(),
            $filter.model.map(ModelId::uuid),
            $filter.name_prefix,
            value,
            id,
            $page.limit(),
        )
        .fetch_all(&$store.pool)
        .await?
    }};
}

/// What the scripts of a task can use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScriptCapabilities {
    /// Names of the models they may call: the agent's own, then those that the agent lists.
    pub models: Vec<String>,
    /// Whether there are secrets: [`Store::task_secrets`].
    pub secrets: bool,
    /// Whether the conversation may contain files: [`Store::task_files`].
    pub files: bool,
}

impl Store {
    /// An agent by id.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn agent_get(
        &self,
        organization: OrganizationId,
        id: AgentId,
    ) -> Result<Agent, Error> {
        select!(["WHERE a.organization_id = $1 AND a.id = $2"], organization.uuid(), id.uuid())
            .fetch_optional(&self.pool)
            .await?
            .ok_or(Error::NotFound { what: ENTITY })?
            .try_into()
    }

    /// An agent by id or name. If the name of one agent is the id of another, the id wins.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn agent_find(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<Agent, Error> {
        let id = name_or_id.parse::<AgentId>().ok().map(AgentId::uuid);
        select!(
            ["WHERE a.organization_id = $1 AND (a.id = $2 OR a.name = $3) ORDER BY (a.id = $2) IS TRUE DESC LIMIT 1"],
            organization.uuid(),
            id as _,
            name_or_id,
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// The id of an agent by id or name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn agent_resolve(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<AgentId, Error> {
        let id = name_or_id.parse::<AgentId>().ok().map(AgentId::uuid);
        sqlx::query_scalar!(
            "SELECT id FROM agents WHERE organization_id = $1 AND (id = $2 OR name = $3) ORDER BY (id = $2) IS TRUE DESC LIMIT 1",
            organization.uuid(),
            id as _,
            name_or_id,
        )
        .fetch_optional(&self.pool)
        .await?
        .map(AgentId::from_uuid)
        .ok_or(Error::NotFound { what: ENTITY })
    }

    /// A page of agents.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn agent_list(
        &self,
        organization: OrganizationId,
        filter: &AgentFilter,
        page: &Page,
    ) -> Result<Vec<Agent>, Error> {
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt, false) => {
                list!(self, organization, filter, page, page.after_time(), "a.created_at", ">", "")
            }
            (Key::CreatedAt, true) => {
                list!(
                    self,
                    organization,
                    filter,
                    page,
                    page.after_time(),
                    "a.created_at",
                    "<",
                    " DESC"
                )
            }
            (Key::UpdatedAt, false) => {
                list!(self, organization, filter, page, page.after_time(), "a.updated_at", ">", "")
            }
            (Key::UpdatedAt, true) => {
                list!(
                    self,
                    organization,
                    filter,
                    page,
                    page.after_time(),
                    "a.updated_at",
                    "<",
                    " DESC"
                )
            }
            (Key::Name, false) => {
                list!(self, organization, filter, page, page.after_name(), "a.name", ">", "")
            }
            (Key::Name, true) => {
                list!(self, organization, filter, page, page.after_name(), "a.name", "<", " DESC")
            }
        };
        rows.into_iter().map(TryInto::try_into).collect()
    }

    /// Creates an agent.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] when the name is taken, [`Error::NotFound`] when a referenced
    /// entity does not exist; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn agent_create(
        &self,
        write: &Write,
        new: NewAgent,
        render: impl FnOnce(&Agent) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Agent>, Error> {
        let mut writer = begin!(self, write);
        sqlx::query!(
            "INSERT INTO agents
                 (id, organization_id, model_id, name, description, instructions, max_turns, parameters, policy, compute,
                  created_at, updated_at, compact_at_percent)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $10, $11, $9, $9, $12)",
            new.id.uuid(),
            writer.organization(),
            new.model.uuid(),
            new.name,
            &*text::clean(&new.description),
            &*text::clean(&new.instructions),
            turns_to_sql(new.max_turns),
            text::json(&new.parameters)?,
            writer.now(),
            text::json(&new.policy)?,
            new.compute,
            turns_to_sql(new.compact_at),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        if !new.secrets.is_empty() {
            agent_secrets_set(&mut writer, new.id.uuid(), &new.secrets).await?;
        }
        if !new.script_models.is_empty() {
            agent_script_models_set(&mut writer, new.id.uuid(), &new.script_models).await?;
        }
        let entity = agent_reload(&mut writer, new.id).await?;
        writer.finish(entity, render).await
    }

    /// Changes an agent.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::AlreadyExists`], [`Error::Conflict`] when the revision is not
    /// the expected one.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn agent_update(
        &self,
        write: &Write,
        id: AgentId,
        expected_revision: Option<i64>,
        changes: AgentChanges,
        render: impl FnOnce(&Agent) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Agent>, Error> {
        let mut writer = begin!(self, write);
        let parameters = changes.parameters.as_ref().map(text::json).transpose()?;
        let policy = changes.policy.as_ref().map(text::json).transpose()?;
        let done = sqlx::query!(
            "UPDATE agents SET
                 model_id = coalesce($5, model_id),
                 name = coalesce($6, name),
                 description = coalesce($7, description),
                 instructions = coalesce($8, instructions),
                 max_turns = coalesce($9, max_turns),
                 parameters = coalesce($10, parameters),
                 policy = coalesce($11, policy),
                 compute = coalesce($12, compute),
                 compact_at_percent = coalesce($13, compact_at_percent),
                 revision = revision + 1,
                 updated_at = $4
             WHERE organization_id = $1 AND id = $2 AND ($3::bigint IS NULL OR revision = $3)",
            writer.organization(),
            id.uuid(),
            expected_revision,
            writer.now(),
            changes.model.map(ModelId::uuid),
            changes.name,
            text::clean_option(changes.description.as_deref()),
            text::clean_option(changes.instructions.as_deref()),
            changes.max_turns.map(turns_to_sql),
            parameters,
            policy,
            changes.compute,
            changes.compact_at.map(turns_to_sql),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        if let Some(secrets) = &changes.secrets
            && done.rows_affected() > 0
        {
            agent_secrets_set(&mut writer, id.uuid(), secrets).await?;
        }
        if let Some(models) = &changes.script_models
            && done.rows_affected() > 0
        {
            agent_script_models_set(&mut writer, id.uuid(), models).await?;
        }
        let entity = agent_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish(entity, render).await
    }

    /// What the scripts of a task can use at this moment. Empty when the task does not exist.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_script_capabilities(
        &self,
        task: TaskId,
    ) -> Result<ScriptCapabilities, Error> {
        let row = sqlx::query!(
            r#"SELECT m.name,
                    ARRAY(SELECT y.name FROM agent_script_models x JOIN models y ON y.organization_id = x.organization_id AND y.id = x.model_id
                          WHERE x.organization_id = a.organization_id AND x.agent_id = a.id AND x.model_id <> m.id
                          ORDER BY x.position) AS "others!",
                    EXISTS (SELECT FROM agent_secrets s WHERE s.organization_id = a.organization_id AND s.agent_id = a.id) AS "secrets!",
                    EXISTS (SELECT FROM messages q WHERE q.task_id = t.id AND q.source = 'user' AND q.position IS NOT NULL
                            AND q.content->'blocks' @> '[{"kind": "attachment"}]') AS "files!"
             FROM tasks t
             JOIN agents a ON a.organization_id = t.organization_id AND a.id = t.agent_id
             JOIN models m ON m.organization_id = a.organization_id AND m.id = a.model_id
             WHERE t.id = $1"#,
            task.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(row.map_or_else(ScriptCapabilities::default, |row| ScriptCapabilities {
            models: std::iter::once(row.name).chain(row.others).collect(),
            secrets: row.secrets,
            files: row.files,
        }))
    }

    /// Deletes an agent. The entity in the result is the agent before the deletion.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InUse`] while other entities refer to it.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn agent_delete(
        &self,
        write: &Write,
        id: AgentId,
        render: impl FnOnce(&Agent) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Agent>, Error> {
        let mut writer = begin!(self, write);
        let entity = agent_reload(&mut writer, id).await?;
        let done = sqlx::query!(
            "DELETE FROM agents WHERE organization_id = $1 AND id = $2",
            writer.organization(),
            id.uuid()
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_delete)?;
        if done.rows_affected() == 0 {
            return Err(Error::NotFound { what: ENTITY });
        }
        writer.finish(entity, render).await
    }
}

/// Replaces the models that an agent's scripts may call in addition to its own.
async fn agent_script_models_set(
    writer: &mut Writer<'_>,
    agent: Uuid,
    models: &[ModelId],
) -> Result<(), Error> {
    let organization = writer.organization();
    sqlx::query!(
        "DELETE FROM agent_script_models WHERE organization_id = $1 AND agent_id = $2",
        organization,
        agent
    )
    .execute(&mut *writer.transaction)
    .await?;
    let models: Vec<Uuid> = models.iter().map(|model| model.uuid()).collect();
    sqlx::query!(
        "INSERT INTO agent_script_models (organization_id, agent_id, model_id, position)
         SELECT $1::uuid, $2::uuid, model, min(place)::integer
         FROM unnest($3::uuid[]) WITH ORDINALITY AS listed (model, place) GROUP BY model",
        organization,
        agent,
        &models,
    )
    .execute(&mut *writer.transaction)
    .await
    .map_err(Error::from_write)?;
    Ok(())
}

async fn agent_reload(writer: &mut Writer<'_>, id: AgentId) -> Result<Agent, Error> {
    select!(["WHERE a.organization_id = $1 AND a.id = $2"], writer.organization(), id.uuid())
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
}
