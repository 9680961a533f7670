//! `construct deadletter`: messages of the mesh that could not be processed.

use clap::Subcommand;
use construct_proto::v1::{
    DeadLetter, DropDeadLetterRequest, GetDeadLetterRequest, ListDeadLettersRequest,
    RedriveDeadLetterRequest,
};
use jiff::Timestamp;

use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, OutputArgs, print},
    page::Page,
    text::{clip, one_line},
    time,
};

/// Letters per request.
const PAGE_SIZE: u32 = 100;

#[derive(Debug, Subcommand)]
pub(crate) enum DeadLetterCommand {
    /// List dead letters, the oldest first.
    List {
        /// The maximum number.
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
        limit: u32,
        /// Only letters after this one.
        #[arg(long, value_name = "ID", default_value_t = 0, hide_default_value = true)]
        after: u64,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show a dead letter.
    Show {
        /// Its id.
        letter: u64,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Publish the message again on its subject. Repair the cause first.
    Redrive {
        /// Its id.
        letter: u64,
    },
    /// Delete a dead letter.
    Drop {
        /// Its id.
        letter: u64,
    },
}

impl DeadLetterCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::List { limit, after, output } => output.list(&list(gateway, limit, after).await?),
            Self::Show { letter, output } => output.entity(
                &call(gateway.recovery().get_dead_letter(GetDeadLetterRequest { letter })).await?,
            ),
            Self::Redrive { letter } => {
                call(gateway.recovery().redrive_dead_letter(RedriveDeadLetterRequest { letter }))
                    .await?;
                print(&format!("dead letter {letter} was published again\n"))
            }
            Self::Drop { letter } => {
                call(gateway.recovery().drop_dead_letter(DropDeadLetterRequest { letter })).await?;
                print(&format!("dead letter {letter} was removed\n"))
            }
        }
    }
}

async fn list(gateway: &Gateway, limit: u32, mut after: u64) -> Result<Page<DeadLetter>, Failure> {
    let mut items: Vec<DeadLetter> = Vec::new();
    loop {
        let remaining =
            limit.saturating_sub(u32::try_from(items.len()).unwrap_or(u32::MAX)).min(PAGE_SIZE);
        if remaining == 0 {
            return Ok(Page { items, next_page_token: String::new() });
        }
        let request =
            ListDeadLettersRequest { after, limit: i32::try_from(remaining).unwrap_or(i32::MAX) };
        let letters = call(gateway.recovery().list_dead_letters(request)).await?.letters;
        match letters.last() {
            Some(last) => after = last.id,
            None => return Ok(Page { items, next_page_token: String::new() }),
        }
        items.extend(letters);
    }
}

impl Entity for DeadLetter {
    const NAME: &'static str = "construct.v1.DeadLetter";
    const PLURAL: &'static str = "letters";
    const COLUMNS: &'static [&'static str] = &["ID", "SUBJECT", "REASON", "AGE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let age = time::read(self.time.as_ref())
            .map(|time| time::distance(time, now))
            .unwrap_or_default();
        vec![self.id.to_string(), self.subject.clone(), clip(&one_line(&self.reason), 80), age]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let at = time::read(self.time.as_ref());
        let at = at
            .map(|at| format!("{} ({})", time::local(at), time::relative(at, now)))
            .unwrap_or_default();
        let redrivable =
            if self.redrivable { "" } else { "no: it is a command, or lacks information" };
        vec![
            ("id", self.id.to_string()),
            ("stream", self.stream.clone()),
            ("subject", self.subject.clone()),
            ("type", self.message_type.clone()),
            ("time", at),
            ("deliveries", self.deliveries.to_string()),
            ("bytes", self.payload_size.to_string()),
            ("redrivable", redrivable.to_owned()),
            ("reason", self.reason.clone()),
        ]
    }
}
