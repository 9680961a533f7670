//! Follows a scan until it ends.

use construct_proto::v1::{
    GetScanRequest, ListCandidatesRequest, ScanEvent, ScanPhase, WatchScanRequest,
};

use super::display;
use crate::{
    entity::watch_stream::{self, StreamEnd},
    failure::{Exit, Failure},
    gateway::{Gateway, call},
    json, money,
    output::{Format, OutputArgs, print},
    page::Page,
    text::{count, one_line},
};

/// Prints the scan's events until it ends, then its candidates.
///
/// # Errors
/// The error of the gateway.
pub(super) async fn follow(
    gateway: &Gateway,
    scan: &str,
    output: OutputArgs,
) -> Result<Exit, Failure> {
    let for_people = output.format() == Format::Table;
    let open = async |cursor: String| {
        gateway.scans().watch_scan(WatchScanRequest { scan: scan.to_owned(), cursor }).await
    };
    watch_stream::follow(String::new(), StreamEnd::Finished, open, |event: ScanEvent| {
        if for_people {
            eprintln!("{}", describe(&event));
        } else if output.format() == Format::Json {
            eprintln!("{}", json::message("construct.v1.ScanEvent", &event));
        }
        Ok(event.cursor)
    })
    .await?;
    let scan_entity =
        call(gateway.scans().get_scan(GetScanRequest { scan: scan.to_owned() })).await?;
    let status = scan_entity.status.clone().unwrap_or_default();
    if status.phase() != ScanPhase::Review {
        output.entity(&scan_entity)?;
        return Ok(if status.phase() == ScanPhase::Cancelled {
            Exit::Cancelled
        } else {
            Exit::Failed
        });
    }
    let request =
        ListCandidatesRequest { scan: scan.to_owned(), ..ListCandidatesRequest::default() };
    let items = call(gateway.scans().list_candidates(request)).await?.candidates;
    if for_people && items.is_empty() {
        print("the scan found no candidates in this repository\n")?;
    } else {
        output.list(&Page { items, next_page_token: String::new() })?;
    }
    if for_people {
        eprintln!("construct scan review {scan}");
    }
    Ok(Exit::Completed)
}

/// An event as one line.
fn describe(event: &ScanEvent) -> String {
    let phase = display::phase_name(event.phase());
    let mut parts = Vec::new();
    if event.tool_calls > 0 {
        parts.push(count(event.tool_calls, "call"));
    }
    if event.cost_pico_usd > 0 {
        parts.push(money::cost(event.cost_pico_usd));
    }
    let numbers = if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) };
    let kind = if matches!(event.r#type.as_str(), "phase" | "progress") {
        ""
    } else {
        event.r#type.as_str()
    };
    let text = [kind, &one_line(&event.message)]
        .iter()
        .filter(|part| !part.is_empty())
        .copied()
        .collect::<Vec<_>>()
        .join(": ");
    format!("{phase:<10} {text}{numbers}").trim_end().to_owned()
}
