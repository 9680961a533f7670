//! JSON log lines with the ids of their traces.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use opentelemetry::trace::TraceContextExt as _;
use tracing::{Event, Subscriber, dispatcher::WeakDispatch};
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    registry::LookupSpan,
};

/// Adds `service`, `instance`, `trace_id` and `span_id` to the JSON objects of another format.
pub(super) struct Annotated<F> {
    json: F,
    /// `,"service":"…","instance":"…"`
    constant: String,
    /// The dispatcher. It must be passed in: while an event is being dispatched, tracing does not
    /// return the current one.
    dispatch: Arc<OnceLock<WeakDispatch>>,
}

impl<F> Annotated<F> {
    pub(super) fn new(
        json: F,
        service: &str,
        instance_id: &str,
        dispatch: Arc<OnceLock<WeakDispatch>>,
    ) -> Self {
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let constant =
            format!(",\"service\":{},\"instance\":{}", quoted(service), quoted(instance_id));
        Self { json, constant, dispatch }
    }
}

impl<S, N, F> FormatEvent<S, N> for Annotated<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'w> FormatFields<'w> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.json.format_event(context, Writer::new(&mut line), event)?;
        let Some(open) = line.trim_end().strip_suffix('}') else {
            // Not an object: pass it on unchanged rather than lose it.
            return writer.write_str(&line);
        };
        write!(writer, "{open}{}", self.constant)?;
        let otel = context.lookup_current().and_then(|span| {
            let dispatch = self.dispatch.get()?.upgrade()?;
            tracing_opentelemetry::get_otel_context(&span.id(), &dispatch)
        });
        if let Some(otel) = otel {
            let span = otel.span();
            let ids = span.span_context();
            if ids.is_valid() {
                write!(
                    writer,
                    ",\"trace_id\":\"{}\",\"span_id\":\"{}\"",
                    ids.trace_id(),
                    ids.span_id()
                )?;
            }
        }
        writer.write_str("}\n")
    }
}
