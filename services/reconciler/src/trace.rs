//! The trace of a turn is that of the message it began with, whoever has its task looked at: a
//! worker, a timer, the sweep, or a person who wants something else of it.

use construct_store::LoadedTask;
use opentelemetry::{
    Context,
    trace::{SpanContext, SpanId, TraceContextExt as _, TraceId, TraceState},
};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// The id of the trace that the current span is in.
pub(crate) fn current_trace_id() -> Option<String> {
    trace_id(&Span::current().context())
}

/// The span to go on with a task's turn in: none where the look at it is in the turn's trace, or
/// there is no turn; else one in that trace, with a link to the look. `turn` is where the trace was
/// last gone on with, and is replaced where it is another one.
pub(crate) fn turn_span(loaded: &LoadedTask, turn: &mut Context) -> Span {
    let look = Span::current().context();
    let wanted = loaded.trace_id.as_deref().filter(|_| loaded.task.turn.is_some());
    let Some(wanted) = wanted.filter(|wanted| trace_id(&look).as_deref() != Some(*wanted)) else {
        if trace_id(turn) != trace_id(&look) {
            *turn = remote_context(look.span().span_context().clone());
        }
        return Span::none();
    };
    if trace_id(turn).as_deref() != Some(wanted) {
        let Some(context) = context_in_trace(wanted, &look) else { return Span::none() };
        *turn = context;
    }
    let span = tracing::info_span!("reconciler.task.turn", task = %loaded.task.id);
    // Fails when the span is disabled; then there is nothing to continue.
    _ = span.set_parent(turn.clone());
    span.add_link(look.span().span_context().clone());
    span
}

fn trace_id(context: &Context) -> Option<String> {
    let span = context.span();
    let span = span.span_context();
    span.is_valid().then(|| span.trace_id().to_string())
}

/// A place in a trace of which the id alone is known: below a span that nobody has seen.
fn context_in_trace(trace: &str, look: &Context) -> Option<Context> {
    let trace = TraceId::from_hex(trace).ok()?;
    let unseen = SpanId::from(u64::from_be_bytes(*trace.to_bytes().last_chunk()?).max(1));
    let flags = look.span().span_context().trace_flags();
    Some(remote_context(SpanContext::new(trace, unseen, flags, true, TraceState::default())))
}

fn remote_context(span: SpanContext) -> Context {
    Context::new().with_remote_span_context(span)
}
