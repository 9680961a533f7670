//! The common form of every benchmark's result.

use std::time::Duration;

use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;

/// The result of a benchmark.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// The benchmark.
    pub(crate) bench: &'static str,
    /// A description of the measurement, the floor and the peer.
    pub(crate) what: String,
    /// The table rows.
    pub(crate) rows: Vec<Row>,
}

/// One figure, with its lower bound and the result of another system.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) figure: String,
    pub(crate) unit: &'static str,
    pub(crate) ours: f64,
    pub(crate) floor: Option<f64>,
    pub(crate) peer: Option<f64>,
}

impl Row {
    /// A time in milliseconds; lower is better.
    pub(crate) fn millis(figure: impl Into<String>, ours: Duration) -> Self {
        Self::new(figure, "ms", ours.as_secs_f64() * 1e3)
    }

    /// A time in microseconds; lower is better.
    pub(crate) fn micros(figure: impl Into<String>, ours: Duration) -> Self {
        Self::new(figure, "µs", ours.as_secs_f64() * 1e6)
    }

    /// Any other figure.
    pub(crate) fn new(figure: impl Into<String>, unit: &'static str, ours: f64) -> Self {
        Self { figure: figure.into(), unit, ours, floor: None, peer: None }
    }

    /// Adds the lower bound.
    pub(crate) fn floor(self, floor: Duration) -> Self {
        let floor = self.in_unit(floor);
        Self { floor: Some(floor), ..self }
    }

    /// Adds the lower bound, in the row's unit.
    pub(crate) fn floor_value(self, floor: f64) -> Self {
        Self { floor: Some(floor), ..self }
    }

    /// Adds the result of a peer, if one is installed.
    pub(crate) fn peer(self, peer: Option<Duration>) -> Self {
        let peer = peer.map(|peer| self.in_unit(peer));
        Self { peer, ..self }
    }

    fn in_unit(&self, time: Duration) -> f64 {
        time.as_secs_f64() * if self.unit == "µs" { 1e6 } else { 1e3 }
    }
}

impl Figures {
    pub(crate) fn json(&self) -> String {
        serde_json::json!(self).to_string()
    }

    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        table.set_header([
            "figure",
            "unit",
            "ours",
            "floor",
            "ours / floor",
            "peer",
            "ours / peer",
        ]);
        for row in &self.rows {
            let beside = |other: Option<f64>| match other {
                Some(other) => (format!("{other:.2}"), format!("{:.2}", row.ours / other)),
                None => ("–".to_owned(), String::new()),
            };
            let ((floor, to_floor), (peer, to_peer)) = (beside(row.floor), beside(row.peer));
            table.add_row([
                row.figure.clone(),
                row.unit.to_owned(),
                format!("{:.2}", row.ours),
                floor,
                to_floor,
                peer,
                to_peer,
            ]);
        }
        format!("{}\n{table}", self.what)
    }
}

/// The value below which `share` of the times lie. Sorts them.
pub(crate) fn percentile(times: &mut [Duration], share: f64) -> Duration {
    times.sort_unstable();
    let index = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len().max(1)) - 1;
    times.get(index).copied().unwrap_or_default()
}
