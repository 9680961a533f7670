//! The one shape of every benchmark's result.

use std::time::Duration;

use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;

/// What a benchmark measured.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// The benchmark.
    pub(crate) bench: &'static str,
    /// What was done, in words.
    pub(crate) what: String,
    /// One line each.
    pub(crate) rows: Vec<Row>,
}

/// One figure beside its floor.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) figure: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) ours: f64,
    pub(crate) floor: f64,
    /// Ours to the floor for times, the floor's share that we reach for rates.
    pub(crate) ratio: f64,
}

impl Row {
    /// A time, in milliseconds: less is better.
    pub(crate) fn time(figure: &'static str, ours: Duration, floor: Duration) -> Self {
        let (ours, floor) = (ours.as_secs_f64() * 1e3, floor.as_secs_f64() * 1e3);
        Self { figure, unit: "ms", ours, floor, ratio: ours / floor }
    }

    /// A rate per second: more is better.
    pub(crate) fn rate(figure: &'static str, ours: f64, floor: f64) -> Self {
        Self { figure, unit: "1/s", ours, floor, ratio: ours / floor }
    }
}

impl Figures {
    pub(crate) fn json(&self) -> String {
        serde_json::json!(self).to_string()
    }

    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_header(["figure", "unit", "ours", "floor", "ours / floor"]);
        for row in &self.rows {
            table.add_row([
                row.figure.to_owned(),
                row.unit.to_owned(),
                format!("{:.2}", row.ours),
                format!("{:.2}", row.floor),
                format!("{:.2}", row.ratio),
            ]);
        }
        format!("{}\n{table}", self.what)
    }
}

/// The value below which `share` of the sorted times lie.
pub(crate) fn percentile(times: &mut [Duration], share: f64) -> Duration {
    times.sort_unstable();
    let index = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len().max(1)) - 1;
    times.get(index).copied().unwrap_or_default()
}
