//! Compactions: summaries that replace the older part of a transcript in the prompt.

use construct_domain::{
    MessageId, TaskId,
    context::{Outline, OutlineEntry},
    message::Source,
};

use crate::{Error, Store};

/// The text that replaces the messages up to a position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compaction {
    /// The last replaced position.
    pub through: i64,
    /// The positions up to there that are kept, after the text.
    pub kept: Vec<i64>,
    /// The text.
    pub text: String,
    /// Estimate of its tokens.
    pub tokens: i64,
}

impl Store {
    /// The compaction of a task that ends at this position.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn compaction(
        &self,
        task: TaskId,
        through: i64,
    ) -> Result<Option<Compaction>, Error> {
        let compaction = sqlx::query_as!(
            Compaction,
            "SELECT through, kept, content AS text, estimated_tokens AS tokens FROM compactions
             WHERE task_id = $1 AND through = $2",
            task.uuid(),
            through,
        );
        Ok(compaction.fetch_optional(&self.pool).await?)
    }

    /// The outline of a task's prompt: its messages without their content.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Internal`] when a message cannot be read.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn outline(&self, task: TaskId) -> Result<Outline, Error> {
        let rows = sqlx::query!(
            r#"SELECT m.id, m.position AS "position!", m.source, m.estimated_tokens,
                      coalesce(c.estimated_tokens, 0) AS "summary!",
                      m.content @? '$.blocks[*] ? (@.kind == "code_interpreter_result")' AS "results!"
               FROM tasks t
               JOIN messages m ON m.task_id = t.id AND m.position IS NOT NULL AND m.superseded_at IS NULL
               LEFT JOIN compactions c ON c.task_id = t.id AND c.through = t.compacted_through
               WHERE t.id = $1 AND (c.through IS NULL OR m.position > c.through OR m.position = ANY (c.kept))
               ORDER BY m.position"#,
            task.uuid(),
        )
        .fetch_all(&self.pool)
        .await?;
        let summary = rows.first().map_or(0, |row| row.summary);
        let entry = |source: &str| {
            Source::parse(source)
                .ok_or_else(|| Error::internal(format!("unknown source `{source}`")))
        };
        let shown = rows.iter().map(|row| {
            Ok(OutlineEntry {
                message: MessageId::from_uuid(row.id),
                position: row.position,
                source: entry(&row.source)?,
                results: row.results,
                tokens: row.estimated_tokens,
            })
        });
        Ok(Outline { summary, shown: shown.collect::<Result<_, Error>>()? })
    }
}
