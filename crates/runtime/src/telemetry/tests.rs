use std::sync::Mutex;

use serde_json::Value;

use super::*;

/// Collects the log lines of a test.
#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn logged(format: LogFormat, filter: &str, work: impl FnOnce()) -> String {
    let options =
        Options { service: "sample", instance_id: "sample-1", version: "0", log: filter, format };
    let buffer = Buffer::default();
    let writer = buffer.clone();
    let provider = SdkTracerProvider::builder().with_sampler(Sampler::AlwaysOff).build();
    let dispatch =
        dispatch(&options, parse_filter(filter).unwrap(), &provider, move || writer.clone(), false);
    dispatcher::with_default(&dispatch, work);
    let bytes = buffer.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn json_line_has_service_instance_fields_and_ids_of_its_trace() {
    let text = logged(LogFormat::Json, "info", || {
        let outer = tracing::info_span!("outer", task = "task_1").entered();
        tracing::info!(answer = 42, "first \"quoted\"");
        tracing::info_span!(parent: &outer, "inner").in_scope(|| tracing::info!("second"));
        drop(outer);
        tracing::info!("third");
    });
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [first, second, third] = lines.as_slice() else { panic!("{text}") };
    assert_eq!(first["service"], "sample");
    assert_eq!(first["instance"], "sample-1");
    assert_eq!(first["fields"]["message"], "first \"quoted\"");
    assert_eq!(first["fields"]["answer"], 42);
    assert_eq!(first["spans"][0]["task"], "task_1");
    assert_eq!(first["trace_id"].as_str().unwrap().len(), 32);
    assert_eq!(second["trace_id"], first["trace_id"], "one trace");
    assert_ne!(second["span_id"], first["span_id"], "two spans");
    assert!(third.get("trace_id").is_none());
}

#[test]
fn text_line_has_level_and_message() {
    let text = logged(LogFormat::Text, "info", || tracing::warn!(to = "nats", "cannot connect"));
    assert!(
        text.contains("WARN") && text.contains("cannot connect") && text.contains("to=\"nats\""),
        "{text}"
    );
    assert!(!text.contains('\u{1b}'), "color without a terminal: {text}");
}

#[test]
fn filter_drops_unnamed_targets_and_levels() {
    let text = logged(LogFormat::Text, "warn", || {
        tracing::info!("quiet");
        tracing::warn!("loud");
    });
    assert!(!text.contains("quiet") && text.contains("loud"), "{text}");
}

#[test]
fn chain_shows_every_cause_once() {
    #[derive(Debug, thiserror::Error)]
    #[error("cannot connect")]
    struct Outer {
        source: io::Error,
    }
    let error = Outer { source: io::Error::other("refused") };
    assert_eq!(Chain(&error).to_string(), "cannot connect: refused");
}
