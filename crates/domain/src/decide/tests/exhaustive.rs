//! Explores every history of a small mesh instead of a sample: two reconcilers and two workers,
//! with the state that PostgreSQL, JetStream and the journals keep for them.
//!
//! # Model
//!
//! [`mesh`] contains all promises of the rest of the system: a commit is guarded by its version, a
//! command is delivered until it is acknowledged, a journal entry names the one before it.
//! Everything that can happen is tried in every order: processes that die between any two steps,
//! messages that are lost or redelivered, deadlines that pass while a worker is running.
//!
//! # Properties
//!
//! In every reachable state: a side effect happened at most once; what the model is told about it
//! is true and stays true; calls and results are paired; no message ends twice; a task that is not
//! idle has a time for its next reconcile. From every reachable state, one is reachable in which
//! every message is accounted for, so nothing is stuck.
//!
//! # Guards
//!
//! Further tests disable each guard and expect a violation. This shows that the exploration finds
//! errors.

mod explore;
mod mesh;

use explore::explore;
use mesh::{Guard, Mesh, Scope};

/// Explores the scope and prints the number of states.
fn assert_holds(scope: Scope) {
    let states = explore(Mesh::new(scope, None)).unwrap_or_else(|violation| panic!("{violation}"));
    // A scope in which hardly anything can happen would hold for the wrong reason.
    assert!(states > 500, "only {states} states");
    println!("{states} states: {scope:?}");
}

const NO_FAULTS: Scope = Scope {
    messages: 1,
    interrupts: 0,
    cancels: 0,
    suspends: 0,
    rewinds: 0,
    retries: 0,
    scripts: 1,
    approvals: 0,
    subtask_waits: 0,
    failures: 0,
    refusals: 0,
    crashes: 0,
    lost: 0,
    redelivered: 0,
    late: 0,
};

#[test]
fn crashes_between_any_steps_lose_and_repeat_nothing() {
    assert_holds(Scope { crashes: 2, failures: 1, ..NO_FAULTS });
}

#[test]
fn lost_and_redelivered_messages_leave_every_message_answered() {
    assert_holds(Scope { messages: 2, lost: 1, redelivered: 1, ..NO_FAULTS });
    assert_holds(Scope { messages: 2, lost: 1, crashes: 1, ..NO_FAULTS });
}

#[test]
fn deadline_passing_during_work_is_reported_truthfully() {
    assert_holds(Scope { late: 1, redelivered: 1, ..NO_FAULTS });
    assert_holds(Scope { late: 1, crashes: 1, ..NO_FAULTS });
}

#[test]
fn cancel_at_any_moment_ends_turn_once_and_truthfully() {
    assert_holds(Scope { messages: 2, cancels: 1, ..NO_FAULTS });
    assert_holds(Scope { cancels: 1, crashes: 1, lost: 1, ..NO_FAULTS });
    assert_holds(Scope { cancels: 1, redelivered: 1, ..NO_FAULTS });
    assert_holds(Scope { cancels: 1, late: 1, ..NO_FAULTS });
}

#[test]
fn suspend_and_resume_at_any_moment_continue_the_task() {
    assert_holds(Scope { suspends: 1, crashes: 1, ..NO_FAULTS });
    assert_holds(Scope { suspends: 1, lost: 1, ..NO_FAULTS });
}

#[test]
fn rewind_at_any_moment_keeps_conversation_consistent() {
    assert_holds(Scope { messages: 2, rewinds: 1, ..NO_FAULTS });
    assert_holds(Scope { rewinds: 1, crashes: 1, ..NO_FAULTS });
    assert_holds(Scope { rewinds: 1, lost: 1, ..NO_FAULTS });
    assert_holds(Scope { rewinds: 1, redelivered: 1, ..NO_FAULTS });
    assert_holds(Scope { rewinds: 1, cancels: 1, ..NO_FAULTS });
    assert_holds(Scope { rewinds: 1, approvals: 1, ..NO_FAULTS });
    assert_holds(Scope { rewinds: 1, subtask_waits: 1, ..NO_FAULTS });
}

#[test]
fn retried_turn_ends_once_more_in_every_history() {
    assert_holds(Scope { messages: 2, refusals: 1, retries: 1, ..NO_FAULTS });
    assert_holds(Scope { refusals: 2, retries: 2, crashes: 1, ..NO_FAULTS });
    assert_holds(Scope { refusals: 1, retries: 1, lost: 1, ..NO_FAULTS });
    assert_holds(Scope { refusals: 1, retries: 1, cancels: 1, ..NO_FAULTS });
    assert_holds(Scope { refusals: 1, retries: 1, rewinds: 1, ..NO_FAULTS });
}

#[test]
fn interrupting_message_at_any_moment_is_answered() {
    assert_holds(Scope { interrupts: 1, crashes: 1, ..NO_FAULTS });
    assert_holds(Scope { interrupts: 1, lost: 1, ..NO_FAULTS });
}

#[test]
fn script_waiting_for_approval_always_resumes_or_ends() {
    assert_holds(Scope { approvals: 1, crashes: 1, ..NO_FAULTS });
    assert_holds(Scope { approvals: 1, redelivered: 1, ..NO_FAULTS });
    assert_holds(Scope { approvals: 1, cancels: 1, ..NO_FAULTS });
    assert_holds(Scope { approvals: 1, suspends: 1, ..NO_FAULTS });
}

#[test]
fn script_waiting_for_subtask_resumes_in_every_history() {
    assert_holds(Scope { subtask_waits: 1, crashes: 1, ..NO_FAULTS });
    assert_holds(Scope { subtask_waits: 1, lost: 1, ..NO_FAULTS });
    assert_holds(Scope { subtask_waits: 1, cancels: 1, ..NO_FAULTS });
    assert_holds(Scope { subtask_waits: 1, redelivered: 1, ..NO_FAULTS });
}

/// Expects a violation without this guard.
fn fails_without(guard: Guard, scope: Scope, expected: &str) {
    let violation =
        explore(Mesh::new(scope, Some(guard))).expect_err("the guard is not needed in this scope");
    assert!(violation.contains(expected), "{violation}");
}

#[test]
fn missing_version_guard_lets_replicas_corrupt_a_task() {
    fails_without(Guard::Version, Scope { messages: 2, redelivered: 1, ..NO_FAULTS }, "");
}

#[test]
fn missing_journal_chain_repeats_an_effect() {
    fails_without(Guard::JournalChain, Scope { redelivered: 1, ..NO_FAULTS }, "twice");
}

#[test]
fn missing_journal_repeats_an_effect_after_crash() {
    fails_without(Guard::Journal, Scope { crashes: 1, ..NO_FAULTS }, "twice");
}

#[test]
fn closing_the_journal_late_allows_unreported_side_effects() {
    fails_without(
        Guard::CloseBeforeCommit,
        Scope { cancels: 1, late: 1, lost: 1, ..NO_FAULTS },
        "after it was reported",
    );
}

#[test]
fn skipping_empty_journal_check_denies_a_running_script() {
    fails_without(Guard::EmptyJournal, Scope { cancels: 1, ..NO_FAULTS }, "after it was reported");
}

#[test]
fn missing_stop_entry_allows_unreported_side_effects() {
    fails_without(
        Guard::StopEntry,
        Scope { cancels: 1, crashes: 1, ..NO_FAULTS },
        "after it was reported",
    );
}

#[test]
fn skipping_intent_recheck_loses_a_message() {
    fails_without(
        Guard::RecheckIntents,
        Scope { messages: 2, ..NO_FAULTS },
        "no settled state is reachable",
    );
}

#[test]
fn missing_step_check_never_resends_a_lost_command() {
    fails_without(
        Guard::StepCheck,
        Scope { lost: 1, ..NO_FAULTS },
        "no settled state is reachable",
    );
}

#[test]
fn skipping_subtask_recheck_waits_until_deadline() {
    fails_without(
        Guard::SubtaskRecheck,
        Scope { subtask_waits: 1, ..NO_FAULTS },
        "waits for a subtask that has ended",
    );
}

#[test]
fn unrecorded_subtask_end_is_waited_for_until_deadline() {
    fails_without(
        Guard::SubtaskEndRecorded,
        Scope { subtask_waits: 1, lost: 1, ..NO_FAULTS },
        "waits for a subtask that has ended",
    );
}

#[test]
fn cutting_between_script_and_result_unpairs_them() {
    fails_without(
        Guard::CutWithResults,
        Scope { rewinds: 1, ..NO_FAULTS },
        "whose script has no result",
    );
}
