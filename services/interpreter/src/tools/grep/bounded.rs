//! Matching that can be stopped quickly, whatever the expression and the file.
//!
//! In the worst case, the engine takes one step for each state of the compiled expression and each
//! byte, and it cannot be stopped while it scans a text. A short expression with counted
//! repetitions, `(a{1,300}){1,300}`, has hundreds of thousands of states: scanning the 64 KiB that
//! a searcher passes at once would take minutes. So the engine gets whole lines of at most
//! [`MAX_STEPS`] at once, and the search checks its [`Stop`] in between. A line that exceeds this
//! is scanned here, byte by byte, with the same result.

use std::cell::{Cell, RefCell};
use std::io;

use grep_matcher::{ByteSet, LineMatchKind, LineTerminator, Match, Matcher, NoCaptures};
use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use regex_automata::Input;
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson::{self, NFA, State};
use regex_automata::util::syntax;

use super::TOOL;
use crate::tools::error::ToolError;
use crate::tools::stop::Stop;

/// Maximum steps between two checks of the stop: states of the expression times bytes of the text.
/// They take some tens of milliseconds.
const MAX_STEPS: usize = 1 << 23;

/// Memory for a compiled expression, in bytes. It is compiled three times (also to run backwards),
/// which cannot be stopped either.
const MAX_COMPILED_BYTES: usize = 2 << 20;

/// Memory for the engine's cache while it matches, in bytes.
const MAX_CACHE_BYTES: usize = 8 << 20;

/// The error for an expression that is too large.
pub(super) const TOO_LARGE: (&str, &str) =
    ("ExpressionTooLarge", "when the expression is too large after expanding its repetitions.");

/// An expression, and the search that it is matched for.
pub(super) struct BoundedMatcher<'a> {
    matcher: RegexMatcher,
    /// The same expression, to count its states and for long lines.
    nfa: NFA,
    /// How many bytes the engine may scan between two checks of the stop.
    bytes_per_check: usize,
    /// Bytes scanned since the last check.
    seen: Cell<usize>,
    /// Created for the first long line.
    stepper: RefCell<Option<Stepper>>,
    stop: &'a Stop,
}

/// The expression as an automaton whose states are created lazily.
struct Stepper {
    dfa: DFA,
    cache: Cache,
}

impl<'a> BoundedMatcher<'a> {
    pub(super) fn new(
        query: &str,
        literal: bool,
        case_sensitive: bool,
        stop: &'a Stop,
    ) -> Result<Self, ToolError> {
        let escaped = literal.then(|| regex_syntax::escape(query));
        let nfa = NFA::compiler()
            .configure(
                NFA::config()
                    .utf8(false)
                    .nfa_size_limit(Some(MAX_COMPILED_BYTES))
                    .which_captures(thompson::WhichCaptures::None),
            )
            .syntax(syntax::Config::new().utf8(false).crlf(true).case_insensitive(!case_sensitive))
            .build(escaped.as_deref().unwrap_or(query));
        if nfa.as_ref().is_err_and(|error| error.size_limit().is_some()) {
            return Err(too_large());
        }
        let mut builder = RegexMatcherBuilder::new();
        builder
            .case_insensitive(!case_sensitive)
            .fixed_strings(literal)
            .crlf(true)
            // Larger than above: classes grow when characters that a line cannot contain are
            // removed.
            .size_limit(2 * MAX_COMPILED_BYTES)
            .dfa_size_limit(MAX_CACHE_BYTES);
        // It has the better error messages.
        let matcher = builder.build(query).map_err(|error| invalid(&error.to_string()))?;
        let nfa = nfa.map_err(|error| invalid(&error.to_string()))?;
        let states = nfa.states().iter().map(cost).sum::<usize>().max(1);
        let bytes_per_check = (MAX_STEPS / states).max(1);
        Ok(Self {
            matcher,
            nfa,
            bytes_per_check,
            seen: Cell::new(0),
            stepper: RefCell::new(None),
            stop,
        })
    }

    /// Approximate start of the match in a line: for a long line, the end of the match.
    pub(super) fn place(&self, line: &[u8]) -> usize {
        self.find(line).ok().flatten().map_or(0, |found| found.start())
    }

    /// Checks the stop if the engine could take more than [`MAX_STEPS`] since the last check with
    /// these bytes.
    fn check_stop(&self, bytes: usize) -> io::Result<()> {
        let seen = self.seen.get().saturating_add(bytes);
        if seen <= self.bytes_per_check {
            self.seen.set(seen);
            return Ok(());
        }
        self.seen.set(bytes);
        self.stop.check().map_err(|_| io::Error::other("stopped"))
    }

    /// The end of the first match in a text that is too long for the engine.
    fn step_through(&self, text: &[u8], at: usize) -> io::Result<Option<usize>> {
        let mut made = self.stepper.borrow_mut();
        let stepper = match &mut *made {
            Some(stepper) => stepper,
            none => none.insert(Stepper::new(&self.nfa)?),
        };
        let Stepper { dfa, cache } = stepper;
        let input = Input::new(text).span(at..text.len());
        let mut state = dfa.start_state_forward(cache, &input).map_err(io::Error::other)?;
        let mut seen = at;
        for piece in text[at..].chunks(self.bytes_per_check) {
            self.check_stop(piece.len())?;
            for byte in piece {
                state = dfa.next_state(cache, state, *byte).map_err(io::Error::other)?;
                if state.is_match() {
                    // The automaton reports a match one byte late.
                    return Ok(Some(seen));
                }
                if state.is_dead() {
                    return Ok(None);
                }
                if state.is_quit() {
                    return Err(io::Error::other(
                        "a word boundary is next to a non-ASCII character",
                    ));
                }
                seen += 1;
            }
        }
        state = dfa.next_eoi_state(cache, state).map_err(io::Error::other)?;
        Ok(state.is_match().then_some(text.len()))
    }
}

impl Stepper {
    fn new(nfa: &NFA) -> io::Result<Self> {
        let config = DFA::config()
            // It cannot decide word boundaries at non-ASCII characters, and quits there.
            .unicode_word_boundary(true)
            .cache_capacity(MAX_CACHE_BYTES)
            // Exceeding the capacity is better than failing: the cache is bounded by the size of
            // the expression.
            .skip_cache_capacity_check(true);
        let dfa = DFA::builder()
            .configure(config)
            .build_from_nfa(nfa.clone())
            .map_err(io::Error::other)?;
        let cache = dfa.create_cache();
        Ok(Self { dfa, cache })
    }
}

impl Matcher for BoundedMatcher<'_> {
    type Captures = NoCaptures;
    type Error = io::Error;

    fn find_at(&self, haystack: &[u8], at: usize) -> io::Result<Option<Match>> {
        let length = haystack.len().saturating_sub(at);
        if length <= self.bytes_per_check {
            self.check_stop(length)?;
            return Ok(self.matcher.find_at(haystack, at)?);
        }
        Ok(self.step_through(haystack, at)?.map(Match::zero))
    }

    fn shortest_match_at(&self, haystack: &[u8], at: usize) -> io::Result<Option<usize>> {
        let length = haystack.len().saturating_sub(at);
        if length <= self.bytes_per_check {
            self.check_stop(length)?;
            return Ok(self.matcher.shortest_match_at(haystack, at)?);
        }
        self.step_through(haystack, at)
    }

    /// The searcher passes all lines it has, beginning at the start of a line.
    fn find_candidate_line(&self, haystack: &[u8]) -> io::Result<Option<LineMatchKind>> {
        let mut from = 0;
        while from < haystack.len() {
            let piece = &haystack[from..];
            let piece = &piece[..whole_lines(piece, self.bytes_per_check)];
            let found = if piece.len() <= self.bytes_per_check {
                self.check_stop(piece.len())?;
                self.matcher.find_candidate_line(piece)?
            } else {
                self.step_through(without_ending(piece), 0)?.map(LineMatchKind::Confirmed)
            };
            match found {
                // No match contains a line break: this is the empty beginning of the next line,
                // which is not in this piece.
                Some(LineMatchKind::Confirmed(at))
                    if at == piece.len() && piece.ends_with(b"\n") => {}
                Some(LineMatchKind::Confirmed(at)) => {
                    return Ok(Some(LineMatchKind::Confirmed(from + at)));
                }
                Some(LineMatchKind::Candidate(at)) => {
                    return Ok(Some(LineMatchKind::Candidate(from + at)));
                }
                None => {}
            }
            from += piece.len();
        }
        Ok(None)
    }

    fn new_captures(&self) -> io::Result<NoCaptures> {
        Ok(NoCaptures::new())
    }

    fn non_matching_bytes(&self) -> Option<&ByteSet> {
        self.matcher.non_matching_bytes()
    }

    fn line_terminator(&self) -> Option<LineTerminator> {
        self.matcher.line_terminator()
    }
}

/// The cost of a state for a byte: its transitions, all of which may have to be followed.
fn cost(state: &State) -> usize {
    match state {
        State::Sparse(sparse) => sparse.transitions.len(),
        State::Union { alternates } => alternates.len(),
        State::BinaryUnion { .. } => 2,
        _ => 1,
    }
}

/// The length of as many whole lines as fit into `bytes_per_check`, at least one.
fn whole_lines(text: &[u8], bytes_per_check: usize) -> usize {
    if text.len() <= bytes_per_check {
        return text.len();
    }
    let after = |at: usize| at + 1;
    memchr::memrchr(b'\n', &text[..bytes_per_check]).map(after).unwrap_or_else(|| {
        memchr::memchr(b'\n', &text[bytes_per_check..])
            .map_or(text.len(), |at| after(bytes_per_check + at))
    })
}

/// A line without its ending.
pub(super) fn without_ending(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

fn too_large() -> ToolError {
    ToolError::new(
        TOO_LARGE.0,
        format!(
            "{TOOL}: the expression is too large after expanding its repetitions, and nothing was searched. Use fewer \
             or less nested counted repetitions (`(a{{1,100}}){{1,100}}` is 10,000 copies of `a`; `a+` is one), and \
             ASCII classes inside them: `[0-9A-Za-z_]` has 4 ranges, `\\w` has hundreds. Counting can be done in the \
             script."
        ),
    )
}

fn invalid(why: &str) -> ToolError {
    ToolError::invalid(format!(
        "{TOOL}: the query is not a valid regular expression: {why}\nThe syntax is Rust's (no \
         look-around, no back-references). To search for plain text, give the option {{ literal: true }}."
    ))
}

#[cfg(test)]
mod tests;
