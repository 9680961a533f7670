//! Prints entities as a table, JSON or YAML on standard output.

use std::io::{self, IsTerminal as _, Write as _};

use comfy_table::{ContentArrangement, Table};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::{
    failure::Failure,
    json,
    page::Page,
    text::{one_line, printable},
};

/// The format of printed entities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// A table for people.
    Table,
    /// Protobuf's canonical JSON.
    Json,
    /// The same JSON as YAML.
    Yaml,
}

/// The output options.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct OutputArgs {
    /// The output format.
    #[arg(long, short, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// An entity of the API that this program can print.
pub(crate) trait Entity: prost::Message {
    /// The full protobuf name.
    const NAME: &'static str;
    /// The JSON field of a list that holds the entities.
    const PLURAL: &'static str;
    /// The column headings of a table.
    const COLUMNS: &'static [&'static str];

    /// The row of the entity in a table.
    fn row(&self, now: Timestamp) -> Vec<String>;

    /// All details as names and values. Empty values are not printed.
    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)>;
}

impl OutputArgs {
    /// The chosen format.
    pub(crate) fn format(self) -> Format {
        self.output
    }

    /// Prints an entity.
    ///
    /// # Errors
    /// When standard output can't be written.
    pub(crate) fn entity<T: Entity>(self, entity: &T) -> Result<(), Failure> {
        let text = match self.output {
            Format::Table => details(&entity.details(Timestamp::now())),
            Format::Json | Format::Yaml => self.value(&json::message(T::NAME, entity)),
        };
        print(&text)
    }

    /// Prints a list.
    ///
    /// # Errors
    /// When standard output can't be written.
    pub(crate) fn list<T: Entity>(self, page: &Page<T>) -> Result<(), Failure> {
        match self.output {
            Format::Table => {
                let now = Timestamp::now();
                print(&table(T::COLUMNS, page.items.iter().map(|item| item.row(now))))?;
                if !page.next_page_token.is_empty() {
                    eprintln!("there are more: --page-token {}", page.next_page_token);
                }
                Ok(())
            }
            Format::Json | Format::Yaml => {
                let items: Vec<Value> =
                    page.items.iter().map(|item| json::message(T::NAME, item)).collect();
                let mut list = json!({ T::PLURAL: items });
                if !page.next_page_token.is_empty() {
                    list["page"] = json!({ "nextPageToken": page.next_page_token });
                }
                print(&self.value(&list))
            }
        }
    }

    /// Reports that an entity was deleted.
    ///
    /// # Errors
    /// When standard output can't be written.
    pub(crate) fn deleted(self, kind: &str, reference: &str) -> Result<(), Failure> {
        print(&match self.output {
            Format::Table => format!("{kind} {reference} is deleted\n"),
            Format::Json | Format::Yaml => self.value(&json!({ "deleted": reference })),
        })
    }

    /// Prints any protobuf message named `name`. In the table format, prints `text` instead.
    ///
    /// # Errors
    /// When standard output can't be written.
    pub(crate) fn message(
        self,
        name: &str,
        message: &impl prost::Message,
        text: &str,
    ) -> Result<(), Failure> {
        print(&match self.output {
            Format::Table => text.to_owned(),
            Format::Json | Format::Yaml => self.value(&json::message(name, message)),
        })
    }

    fn value(self, value: &Value) -> String {
        match self.output {
            // Serializing plain data cannot fail.
            Format::Yaml => serde_yaml_ng::to_string(value).unwrap_or_default(),
            Format::Table | Format::Json => {
                serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
            }
        }
    }
}

/// Writes to standard output.
///
/// # Errors
/// When it can't be written.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// A table with a header row.
pub(crate) fn table(columns: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_header(columns.to_vec());
    if io::stdout().is_terminal() {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    } else {
        table.set_content_arrangement(ContentArrangement::Disabled);
    }
    for row in rows {
        table.add_row(row.iter().map(|cell| one_line(cell)).collect::<Vec<_>>());
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt() + "\n"
}

/// Names and values, one per line. Values of several lines are indented below their name.
fn details(fields: &[(&'static str, String)]) -> String {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    let mut text = String::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_empty()) {
        let value = printable(value);
        if value.trim_end().contains('\n') {
            text.push_str(&format!("{name}:\n"));
            for line in value.trim_end().lines() {
                text.push_str(format!("  {line}").trim_end());
                text.push('\n');
            }
        } else {
            text.push_str(&format!("{:width$}{}\n", format!("{name}:"), value.trim_end()));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_aligned_and_long_values_indented() {
        let fields = [
            ("name", "coder".to_owned()),
            ("title", String::new()),
            ("instructions", "one\n\ntwo\n".to_owned()),
        ];
        assert_eq!(details(&fields), "name:         coder\ninstructions:\n  one\n\n  two\n");
    }

    #[test]
    fn table_has_no_borders() {
        let rows =
            vec![vec!["a".to_owned(), "1\n2".to_owned()], vec!["longer".to_owned(), String::new()]];
        assert_eq!(
            table(&["NAME", "VALUE"], rows.into_iter()),
            "NAME    VALUE\na       1 2\nlonger\n"
        );
    }
}
