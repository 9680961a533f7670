//! Every history of a small mesh, and not a sample of them: two reconcilers and two workers with
//! what PostgreSQL, JetStream and the journals keep for them. All that the rest of the system
//! promises about these (a commit is guarded by its version, a command is delivered until it is
//! acknowledged, a journal entry names the one before it) is in [`mesh`]; what is tried on it is
//! everything that can happen, in every order: processes that die between any two steps, messages
//! that are lost or delivered again, deadlines that pass while a worker is at it.
//!
//! In every state that can be reached: a side effect happened at most once, what the model is told
//! about it is true and stays true, calls and results pair up, no message ends twice, and whoever
//! is not idle has a time to look again. From every state that can be reached, one can be reached
//! in which every message is accounted for: nothing is stuck, whatever has happened.
//!
//! That this finds something is tried as well: with each of the guards left out it must.

mod explore;
mod mesh;

use explore::explore;
use mesh::{Guard, Mesh, Scope};

/// Explores, and says how much there was.
fn holds(scope: Scope) {
    let states = explore(Mesh::new(scope, None)).unwrap_or_else(|found| panic!("{found}"));
    // A scope in which hardly anything can happen would hold for the wrong reason.
    assert!(states > 500, "only {states} states");
    println!("{states} states: {scope:?}");
}

const CALM: Scope = Scope {
    messages: 1,
    interrupts: 0,
    cancels: 0,
    suspends: 0,
    rewinds: 0,
    retries: 0,
    scripts: 1,
    parks: 0,
    awaits: 0,
    failures: 0,
    refusals: 0,
    crashes: 0,
    lost: 0,
    redelivered: 0,
    late: 0,
};

#[test]
fn processes_that_die_between_any_two_steps_lose_and_repeat_nothing() {
    holds(Scope { crashes: 2, failures: 1, ..CALM });
}

#[test]
fn two_messages_are_answered_whatever_is_lost_or_delivered_twice() {
    holds(Scope { messages: 2, lost: 1, redelivered: 1, ..CALM });
    holds(Scope { messages: 2, lost: 1, crashes: 1, ..CALM });
}

#[test]
fn a_deadline_that_passes_while_a_worker_is_at_it_is_told_as_it_was() {
    holds(Scope { late: 1, redelivered: 1, ..CALM });
    holds(Scope { late: 1, crashes: 1, ..CALM });
}

#[test]
fn a_cancel_at_any_moment_ends_the_turn_once_and_truly() {
    holds(Scope { messages: 2, cancels: 1, ..CALM });
    holds(Scope { cancels: 1, crashes: 1, lost: 1, ..CALM });
    holds(Scope { cancels: 1, redelivered: 1, ..CALM });
    holds(Scope { cancels: 1, late: 1, ..CALM });
}

#[test]
fn a_task_that_is_suspended_and_resumed_at_any_moment_goes_on() {
    holds(Scope { suspends: 1, crashes: 1, ..CALM });
    holds(Scope { suspends: 1, lost: 1, ..CALM });
}

#[test]
fn a_conversation_that_is_taken_back_at_any_moment_to_any_message_stays_whole() {
    holds(Scope { messages: 2, rewinds: 1, ..CALM });
    holds(Scope { rewinds: 1, crashes: 1, ..CALM });
    holds(Scope { rewinds: 1, lost: 1, ..CALM });
    holds(Scope { rewinds: 1, redelivered: 1, ..CALM });
    holds(Scope { rewinds: 1, cancels: 1, ..CALM });
    holds(Scope { rewinds: 1, parks: 1, ..CALM });
    holds(Scope { rewinds: 1, awaits: 1, ..CALM });
}

#[test]
fn a_failed_turn_that_is_gone_on_with_ends_once_more_whatever_comes_between() {
    holds(Scope { messages: 2, refusals: 1, retries: 1, ..CALM });
    holds(Scope { refusals: 2, retries: 2, crashes: 1, ..CALM });
    holds(Scope { refusals: 1, retries: 1, lost: 1, ..CALM });
    holds(Scope { refusals: 1, retries: 1, cancels: 1, ..CALM });
    holds(Scope { refusals: 1, retries: 1, rewinds: 1, ..CALM });
}

#[test]
fn a_message_that_interrupts_at_any_moment_is_answered() {
    holds(Scope { interrupts: 1, crashes: 1, ..CALM });
    holds(Scope { interrupts: 1, lost: 1, ..CALM });
}

#[test]
fn a_script_that_waits_for_a_person_goes_on_or_ends_whatever_happens() {
    holds(Scope { parks: 1, crashes: 1, ..CALM });
    holds(Scope { parks: 1, redelivered: 1, ..CALM });
    holds(Scope { parks: 1, cancels: 1, ..CALM });
    holds(Scope { parks: 1, suspends: 1, ..CALM });
}

#[test]
fn a_script_that_waits_for_a_subtask_goes_on_whenever_that_ends_and_whoever_is_told() {
    holds(Scope { awaits: 1, crashes: 1, ..CALM });
    holds(Scope { awaits: 1, lost: 1, ..CALM });
    holds(Scope { awaits: 1, cancels: 1, ..CALM });
    holds(Scope { awaits: 1, redelivered: 1, ..CALM });
}

/// Something is found without this guard.
fn is_needed(guard: Guard, scope: Scope, words: &str) {
    let found =
        explore(Mesh::new(scope, Some(guard))).expect_err("the guard is of no use in this scope");
    assert!(found.contains(words), "{found}");
}

#[test]
fn without_the_guard_of_a_commits_version_two_replicas_break_a_task() {
    is_needed(Guard::Version, Scope { messages: 2, redelivered: 1, ..CALM }, "");
}

#[test]
fn without_the_chain_of_journal_entries_an_effect_happens_twice() {
    is_needed(Guard::Chain, Scope { redelivered: 1, ..CALM }, "twice");
}

#[test]
fn without_a_journal_an_effect_happens_twice_after_a_crash() {
    is_needed(Guard::Journal, Scope { crashes: 1, ..CALM }, "twice");
}

#[test]
fn without_closing_the_journal_first_something_happens_behind_what_is_said() {
    is_needed(
        Guard::CloseFirst,
        Scope { cancels: 1, late: 1, lost: 1, ..CALM },
        "behind what was said",
    );
}

#[test]
fn without_an_empty_journal_it_is_said_of_a_script_that_runs_that_it_has_not_begun() {
    is_needed(Guard::Unbegun, Scope { cancels: 1, ..CALM }, "behind what was said");
}

#[test]
fn without_its_last_word_a_stopped_script_is_run_behind_what_is_said() {
    is_needed(Guard::LastWord, Scope { cancels: 1, crashes: 1, ..CALM }, "behind what was said");
}

#[test]
fn without_looking_at_it_anew_a_message_is_never_answered_that_came_with_a_result() {
    is_needed(Guard::SeenAnew, Scope { messages: 2, ..CALM }, "nothing leads on from here");
}

#[test]
fn without_looking_again_a_lost_command_is_never_made_up_for() {
    is_needed(Guard::LookAgain, Scope { lost: 1, ..CALM }, "nothing leads on from here");
}

#[test]
fn without_looking_anew_an_end_that_was_seen_too_early_is_waited_for_to_the_deadline() {
    is_needed(Guard::LookAnew, Scope { awaits: 1, ..CALM }, "waits for what has come");
}

#[test]
fn without_noting_it_an_end_that_nobody_was_told_of_is_waited_for_to_the_deadline() {
    is_needed(Guard::EndNoted, Scope { awaits: 1, lost: 1, ..CALM }, "waits for what has come");
}

#[test]
fn without_cutting_it_whole_a_transcript_has_scripts_without_results() {
    is_needed(Guard::CutWhole, Scope { rewinds: 1, ..CALM }, "whose script has no result");
}
