//! Following a scan until it is over.

use construct_proto::v1::{
    GetScanRequest, ListCandidatesRequest, ScanEvent, ScanPhase, WatchScanRequest,
};

use super::shown;
use crate::{
    entity::watching::{self, End},
    failure::{Exit, Failure},
    gateway::{Gateway, call},
    json, money,
    output::{Format, OutputArgs, print},
    page::Listed,
    words::{count, one_line},
};

/// Prints what happens until the scan is over, then what it proposes.
///
/// # Errors
/// What the gateway fails with.
pub(super) async fn follow(
    gateway: &Gateway,
    scan: &str,
    output: OutputArgs,
) -> Result<Exit, Failure> {
    let people = output.format() == Format::Table;
    let open = async |cursor: String| {
        gateway.scans().watch_scan(WatchScanRequest { scan: scan.to_owned(), cursor }).await
    };
    watching::follow(String::new(), End::Over, open, |event: ScanEvent| {
        if people {
            eprintln!("{}", line(&event));
        } else if output.format() == Format::Json {
            eprintln!("{}", json::message("construct.v1.ScanEvent", &event));
        }
        Ok(event.cursor)
    })
    .await?;
    let found = call(gateway.scans().get_scan(GetScanRequest { scan: scan.to_owned() })).await?;
    let status = found.status.clone().unwrap_or_default();
    if status.phase() != ScanPhase::Review {
        output.one(&found)?;
        return Ok(if status.phase() == ScanPhase::Cancelled {
            Exit::Cancelled
        } else {
            Exit::Failed
        });
    }
    let request =
        ListCandidatesRequest { scan: scan.to_owned(), ..ListCandidatesRequest::default() };
    let items = call(gateway.scans().list_candidates(request)).await?.candidates;
    if people && items.is_empty() {
        print("nothing in this repository would make a good tool\n")?;
    } else {
        output.list(&Listed { items, next_page_token: String::new() })?;
    }
    if people {
        eprintln!("construct scan review {scan}");
    }
    Ok(Exit::Completed)
}

fn line(event: &ScanEvent) -> String {
    let phase = shown::phase(event.phase());
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
    let words = [kind, &one_line(&event.message)]
        .iter()
        .filter(|part| !part.is_empty())
        .copied()
        .collect::<Vec<_>>()
        .join(": ");
    format!("{phase:<10} {words}{numbers}").trim_end().to_owned()
}
