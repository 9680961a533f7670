//! A turn stays in the trace of the message it began with, whatever triggers a reconcile of its
//! task: a worker, a timer, the sweep, or another request of a person.

use construct_store::LoadedTask;
use opentelemetry::{
    Context,
    trace::{SpanContext, SpanId, TraceContextExt as _, TraceId, TraceState},
};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// The id of the current span's trace.
pub(crate) fn current_trace_id() -> Option<String> {
    trace_id(&Span::current().context())
}

/// The span in which a task's turn continues: none if the reconcile is in the turn's trace, or
/// there is no turn; otherwise one in that trace, with a link to the reconcile. `turn` is where the
/// trace was last continued, and is replaced if it is another trace.
pub(crate) fn turn_span(loaded: &LoadedTask, turn: &mut Context) -> Span {
    let reconcile = Span::current().context();
    let turn_trace = loaded.trace_id.as_deref().filter(|_| loaded.task.turn.is_some());
    let Some(turn_trace) =
        turn_trace.filter(|turn_trace| trace_id(&reconcile).as_deref() != Some(*turn_trace))
    else {
        if trace_id(turn) != trace_id(&reconcile) {
            *turn = remote_context(reconcile.span().span_context().clone());
        }
        return Span::none();
    };
    if trace_id(turn).as_deref() != Some(turn_trace) {
        let Some(context) = context_in_trace(turn_trace, &reconcile) else { return Span::none() };
        *turn = context;
    }
    let span = tracing::info_span!("reconciler.task.turn", task = %loaded.task.id);
    // Fails when the span is disabled; then there is nothing to continue.
    _ = span.set_parent(turn.clone());
    span.add_link(reconcile.span().span_context().clone());
    span
}

fn trace_id(context: &Context) -> Option<String> {
    let span = context.span();
    let span = span.span_context();
    span.is_valid().then(|| span.trace_id().to_string())
}

/// A context in a trace of which only the id is known: below a span that was never recorded.
fn context_in_trace(trace: &str, reconcile: &Context) -> Option<Context> {
    let trace = TraceId::from_hex(trace).ok()?;
    let parent = SpanId::from(u64::from_be_bytes(*trace.to_bytes().last_chunk()?).max(1));
    let flags = reconcile.span().span_context().trace_flags();
    Some(remote_context(SpanContext::new(trace, parent, flags, true, TraceState::default())))
}

fn remote_context(span: SpanContext) -> Context {
    Context::new().with_remote_span_context(span)
}
