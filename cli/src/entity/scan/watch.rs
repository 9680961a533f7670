//! Following a scan until it is over.

use std::time::Duration;

use construct_proto::v1::{GetScanRequest, ListCandidatesRequest, ScanEvent, ScanPhase, WatchScanRequest};
use tonic::Code;

use super::shown;
use crate::{
    failure::{Exit, Failure, may_pass},
    gateway::{Gateway, call},
    json, money,
    output::{Format, OutputArgs, print},
    page::Listed,
    words::{count, one_line},
};

/// The pause before a lost connection is tried again, and how often in a row.
const PAUSE: Duration = Duration::from_millis(500);
const TRIES: u32 = 60;

/// Prints what happens until the scan is over, then what it proposes.
///
/// # Errors
/// What the gateway fails with.
pub(super) async fn follow(gateway: &Gateway, scan: &str, output: OutputArgs) -> Result<Exit, Failure> {
    let (mut cursor, mut tries) = (String::new(), 0);
    let people = output.format() == Format::Table;
    loop {
        let request = WatchScanRequest { scan: scan.to_owned(), cursor: cursor.clone() };
        let lost = match gateway.scans().watch_scan(request).await {
            Ok(stream) => {
                let mut events = stream.into_inner();
                loop {
                    match events.message().await {
                        Ok(Some(event)) => {
                            tries = 0;
                            event.cursor.clone_into(&mut cursor);
                            if people {
                                eprintln!("{}", line(&event));
                            } else if output.format() == Format::Json {
                                eprintln!("{}", json::message("construct.v1.ScanEvent", &event));
                            }
                        }
                        Ok(None) => break None,
                        Err(status) => break Some(status),
                    }
                }
            }
            Err(status) => Some(status),
        };
        match lost {
            None => break,
            Some(status) if tries < TRIES && (may_pass(&status) || status.code() == Code::Unknown) => {
                tries += 1;
                tokio::time::sleep(PAUSE).await;
            }
            Some(status) => return Err(status.into()),
        }
    }
    let found = call(gateway.scans().get_scan(GetScanRequest { scan: scan.to_owned() })).await?;
    let status = found.status.clone().unwrap_or_default();
    if status.phase() != ScanPhase::Review {
        output.one(&found)?;
        return Ok(if status.phase() == ScanPhase::Cancelled { Exit::Cancelled } else { Exit::Failed });
    }
    let request = ListCandidatesRequest { scan: scan.to_owned(), ..ListCandidatesRequest::default() };
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
    let kind = if matches!(event.r#type.as_str(), "phase" | "progress") { "" } else { event.r#type.as_str() };
    let words = [kind, &one_line(&event.message)]
        .iter()
        .filter(|part| !part.is_empty())
        .copied()
        .collect::<Vec<_>>()
        .join(": ");
    format!("{phase:<10} {words}{numbers}").trim_end().to_owned()
}
