//! Matching that can be stopped soon, whatever the expression and the file.
//!
//! The engine takes at worst one step for each state of the compiled expression and each byte, and
//! cannot be stopped while it looks at a text. A few characters with counted repetitions,
//! `(a{1,300}){1,300}`, are hundreds of thousands of states: of the 64 KiB that a searcher gives it
//! at once it would come back after minutes. So it is given whole lines of at most [`STEPS`] at
//! once, and in between the search looks at its [`Stop`]. A line for which that is too little is
//! stepped through here, byte by byte, to the same end.

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

/// Most steps without a look at the stop: states of the expression times bytes of the text. Some
/// tens of milliseconds.
const STEPS: usize = 1 << 23;

/// Memory for a compiled expression, in bytes. It is compiled three times over (also to run
/// backwards), which cannot be stopped either.
const MAX_COMPILED: usize = 2 << 20;

/// Memory for what the engine remembers while it matches, in bytes.
const MAX_REMEMBERED: usize = 8 << 20;

/// The name of the error, and when it is thrown.
pub(super) const TOO_LARGE: (&str, &str) = (
    "ExpressionTooLarge",
    "when the expression is too large once its repetitions are written out.",
);

/// An expression, and the search that it is matched for.
pub(super) struct Bounded<'a> {
    matcher: RegexMatcher,
    /// The same, to count its states, and for long lines.
    nfa: NFA,
    /// So many bytes the engine may look at without a look at the stop.
    room: usize,
    /// Bytes it has looked at since the last one.
    seen: Cell<usize>,
    /// Made when the first long line comes.
    stepper: RefCell<Option<Stepper>>,
    stop: &'a Stop,
}

/// The expression as an automaton whose states are made when they are needed.
struct Stepper {
    dfa: DFA,
    cache: Cache,
}

impl<'a> Bounded<'a> {
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
                    .nfa_size_limit(Some(MAX_COMPILED))
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
            // Some more than above: what a line cannot contain is taken out of its classes.
            .size_limit(2 * MAX_COMPILED)
            .dfa_size_limit(MAX_REMEMBERED);
        // Its words about a mistake are the better ones.
        let matcher = builder.build(query).map_err(|error| invalid(&error.to_string()))?;
        let nfa = nfa.map_err(|error| invalid(&error.to_string()))?;
        let states = nfa.states().iter().map(weight).sum::<usize>().max(1);
        let room = (STEPS / states).max(1);
        Ok(Self { matcher, nfa, room, seen: Cell::new(0), stepper: RefCell::new(None), stop })
    }

    /// Where the match in a line begins, about: of a long line where it ends.
    pub(super) fn place(&self, line: &[u8]) -> usize {
        self.find(line).ok().flatten().map_or(0, |found| found.start())
    }

    /// Looks at the stop where the engine could take more than [`STEPS`] without that, given so
    /// many bytes.
    fn look_at(&self, bytes: usize) -> io::Result<()> {
        let seen = self.seen.get().saturating_add(bytes);
        if seen <= self.room {
            self.seen.set(seen);
            return Ok(());
        }
        self.seen.set(bytes);
        self.stop.check().map_err(|_| io::Error::other("stopped"))
    }

    /// Where the first match that is found ends, of a text that is too long for the engine.
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
        for piece in text[at..].chunks(self.room) {
            self.look_at(piece.len())?;
            for byte in piece {
                state = dfa.next_state(cache, state, *byte).map_err(io::Error::other)?;
                if state.is_match() {
                    // It is known one byte later.
                    return Ok(Some(seen));
                }
                if state.is_dead() {
                    return Ok(None);
                }
                if state.is_quit() {
                    return Err(io::Error::other(
                        "a word ends beside a character that is not ASCII",
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
            // Where words end among other than ASCII characters it cannot say, and does not.
            .unicode_word_boundary(true)
            .cache_capacity(MAX_REMEMBERED)
            // Rather more memory than none: it is bounded by the size of the expression.
            .skip_cache_capacity_check(true);
        let dfa = DFA::builder()
            .configure(config)
            .build_from_nfa(nfa.clone())
            .map_err(io::Error::other)?;
        let cache = dfa.create_cache();
        Ok(Self { dfa, cache })
    }
}

impl Matcher for Bounded<'_> {
    type Captures = NoCaptures;
    type Error = io::Error;

    fn find_at(&self, haystack: &[u8], at: usize) -> io::Result<Option<Match>> {
        let length = haystack.len().saturating_sub(at);
        if length <= self.room {
            self.look_at(length)?;
            return Ok(self.matcher.find_at(haystack, at)?);
        }
        Ok(self.step_through(haystack, at)?.map(Match::zero))
    }

    fn shortest_match_at(&self, haystack: &[u8], at: usize) -> io::Result<Option<usize>> {
        let length = haystack.len().saturating_sub(at);
        if length <= self.room {
            self.look_at(length)?;
            return Ok(self.matcher.shortest_match_at(haystack, at)?);
        }
        self.step_through(haystack, at)
    }

    /// The searcher asks with all the lines that it has, from the beginning of one on.
    fn find_candidate_line(&self, haystack: &[u8]) -> io::Result<Option<LineMatchKind>> {
        let mut from = 0;
        while from < haystack.len() {
            let piece = &haystack[from..];
            let piece = &piece[..whole_lines(piece, self.room)];
            let found = if piece.len() <= self.room {
                self.look_at(piece.len())?;
                self.matcher.find_candidate_line(piece)?
            } else {
                self.step_through(without_ending(piece), 0)?.map(LineMatchKind::Confirmed)
            };
            match found {
                // Nothing that is found has a line break in it: this is the empty beginning of the
                // next line, of which too little is seen here.
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

/// What a state may cost for a byte: its ways on, all of which may have to be looked at.
fn weight(state: &State) -> usize {
    match state {
        State::Sparse(ways) => ways.transitions.len(),
        State::Union { alternates } => alternates.len(),
        State::BinaryUnion { .. } => 2,
        _ => 1,
    }
}

/// The length of as many whole lines as there is room for, at least of one.
fn whole_lines(text: &[u8], room: usize) -> usize {
    if text.len() <= room {
        return text.len();
    }
    let after = |at: usize| at + 1;
    memchr::memrchr(b'\n', &text[..room]).map(after).unwrap_or_else(|| {
        memchr::memchr(b'\n', &text[room..]).map_or(text.len(), |at| after(room + at))
    })
}

/// A line without what ends it.
pub(super) fn without_ending(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

fn too_large() -> ToolError {
    ToolError::new(
        TOO_LARGE.0,
        format!(
            "{TOOL}: the query is an expression that is too large once its repetitions are written out, and nothing was searched. \
             Repeat less, or less often within one another (`(a{{1,100}}){{1,100}}` is 10,000 copies of `a`; `a+` is one), and in what is \
             repeated use ASCII classes: `[0-9A-Za-z_]` has 4 ranges, `\\w` has hundreds. What has to be counted can be counted in the script."
        ),
    )
}

fn invalid(why: &str) -> ToolError {
    ToolError::invalid(format!(
        "{TOOL}: the query is not a regular expression that can be used: {why}\nThe syntax is Rust's (no \
         look-around, no back-references). To search for plain text, give the option {{ literal: true }}."
    ))
}

#[cfg(test)]
mod tests;
