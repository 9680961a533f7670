//! The processes of a command: counting them, and killing all of them.
//!
//! A process belongs to a command when it descends from the one that was started or is in its
//! session. Under bubblewrap that is exact, since the first process of the namespace adopts
//! orphans. Without a sandbox, a process that starts a session of its own *and* loses its parent is
//! not counted; it is killed all the same, by the mark that it inherited in its environment. A
//! process that also clears its environment escapes, which is part of what `AllowUnconfined`
//! accepts.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tokio::process::Child;

use super::CommandLimits;

/// How often the processes of a command are counted.
const SAMPLE: Duration = Duration::from_millis(100);
/// For how long a process that is told to stop is waited for before its children are looked for.
const STANDSTILL: Duration = Duration::from_secs(1);

/// The bound that a command exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    /// Too many live processes.
    Processes,
    /// Too much resident memory in all processes together.
    Memory,
    /// Too much CPU time in all processes together.
    Cpu,
}

impl Limit {
    /// The word used in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Processes => "processes",
            Self::Memory => "memory",
            Self::Cpu => "cpu",
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Process {
    id: i32,
    parent: i32,
    session: i32,
    /// It has ended, and its parent has not asked how.
    ended: bool,
    resident_pages: u64,
    /// CPU time of the process and of its children that have ended, in the kernel's ticks.
    ticks: u64,
}

/// Environment variable that marks the processes of a command that runs without a sandbox.
pub(super) const MARK: &str = "CONSTRUCT_COMMAND";

/// A command's processes, named by the first one. They are killed when this is dropped.
#[derive(Debug)]
pub(super) struct Group {
    leader: Option<Pid>,
    /// `MARK=value` as it stands in their environment.
    mark: Option<String>,
    killed: AtomicBool,
}

impl Group {
    /// The group that `child` leads; it was started as the leader of a session of its own.
    pub(super) fn of(child: &Child, mark: Option<String>) -> Self {
        let leader = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let mark = mark.map(|value| format!("{MARK}={value}"));
        Self { leader, mark, killed: AtomicBool::new(false) }
    }

    /// Returns when the group exceeds a bound; otherwise never.
    pub(super) async fn watch(&self, limits: &CommandLimits) -> Limit {
        let Some(leader) = self.leader else { return std::future::pending().await };
        let leader = leader.as_raw_nonzero().get();
        let page = rustix::param::page_size() as u64;
        let ticks_per_second = rustix::param::clock_ticks_per_second().max(1);
        loop {
            tokio::time::sleep(SAMPLE).await;
            let sampled = tokio::task::spawn_blocking(move || {
                let members = members(&recent_table(), leader);
                let memory =
                    members.iter().map(|process| process.resident_pages).sum::<u64>() * page;
                let ticks = members.iter().map(|process| process.ticks).sum::<u64>();
                let cpu = Duration::from_millis(ticks * 1000 / ticks_per_second);
                (members.iter().filter(|process| !process.ended).count(), memory, cpu)
            });
            match sampled.await {
                Ok((processes, ..)) if processes > limits.processes => return Limit::Processes,
                Ok((_, memory, _)) if memory > limits.memory_bytes => return Limit::Memory,
                Ok((.., cpu)) if cpu > limits.cpu => return Limit::Cpu,
                _ => {}
            }
        }
    }

    /// Nothing is left to kill.
    pub(super) fn is_gone(&self) {
        self.killed.store(true, Ordering::Relaxed);
    }

    /// Kills every process of the group.
    pub(super) async fn kill(&self) {
        if let Some(leader) = self.leader {
            // The group does nothing more; looking for those outside of it takes a few
            // milliseconds, and only its leader leads to them.
            let _ = rustix::process::kill_process_group(leader, Signal::STOP);
            let mark = self.mark.clone();
            drop(tokio::task::spawn_blocking(move || kill_all(leader, mark.as_deref())).await);
        }
        // Not before: who does not wait for this drops the leader, and with it what leads to the
        // others.
        self.killed.store(true, Ordering::Relaxed);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The future that ran the command was dropped in the middle.
        if let (Some(leader), false) = (self.leader, *self.killed.get_mut()) {
            kill_all(leader, self.mark.as_deref());
        }
    }
}

fn kill_all(leader: Pid, mark: Option<&str>) {
    // The tree is read before its root dies, because orphans can no longer be traced to it, and
    // while its root stands still: bubblewrap may be about to make a process that leaves its
    // session. It is read a second time for processes that were forked during the first.
    let _ = rustix::process::kill_process(leader, Signal::STOP);
    let begun = Instant::now();
    // One that is being made with namespaces of its own is made to its end, which takes long where
    // many are made at the same time.
    while !stands_still(leader) && begun.elapsed() < STANDSTILL {
        std::thread::sleep(Duration::from_micros(200));
    }
    for _ in 0..2 {
        let table = table();
        let members = members(&table, leader.as_raw_nonzero().get());
        let _ = rustix::process::kill_process_group(leader, Signal::KILL);
        let marked =
            table.iter().filter(|process| mark.is_some_and(|mark| is_marked(process.id, mark)));
        for process in members.iter().chain(marked) {
            if let Some(id) = Pid::from_raw(process.id) {
                let _ = rustix::process::kill_process(id, Signal::KILL);
            }
        }
    }
}

/// Whether a process is stopped or has ended: it makes no other.
fn stands_still(id: Pid) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{}/stat", id.as_raw_nonzero())) else {
        return true;
    };
    // The name before it may hold anything.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't' | 'Z' | 'X' | 'x'))
}

/// Whether a process was started with this variable, or by one that was.
fn is_marked(id: i32, mark: &str) -> bool {
    std::fs::read(format!("/proc/{id}/environ")).is_ok_and(|environment| {
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    })
}

/// The descendants of `leader`, its session, and itself.
fn members(table: &[Process], leader: i32) -> Vec<Process> {
    let mut children: HashMap<i32, Vec<usize>> = HashMap::new();
    for (index, process) in table.iter().enumerate() {
        children.entry(process.parent).or_default().push(index);
    }
    let mut seen = HashSet::new();
    let mut open: Vec<usize> = (0..table.len())
        .filter(|index| table[*index].id == leader || table[*index].session == leader)
        .collect();
    let mut found = Vec::new();
    while let Some(index) = open.pop() {
        if seen.insert(index) {
            found.push(table[index]);
            open.extend(children.get(&table[index].id).into_iter().flatten());
        }
    }
    found
}

/// The process table, at most [`SAMPLE`] old: all commands of this service share one reading of it.
fn recent_table() -> Arc<Vec<Process>> {
    static LATEST: Mutex<Option<(Instant, Arc<Vec<Process>>)>> = Mutex::new(None);
    let mut latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    match &*latest {
        Some((read, table)) if read.elapsed() < SAMPLE / 2 => Arc::clone(table),
        _ => {
            let table = Arc::new(table());
            *latest = Some((Instant::now(), Arc::clone(&table)));
            table
        }
    }
}

fn table() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(|id| parse_stat(id, &std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?))
        .collect()
}

/// Reads one line of `/proc/<pid>/stat` (see proc(5)).
fn parse_stat(id: i32, line: &str) -> Option<Process> {
    // The second field is the program's name in parentheses, which may itself contain spaces and
    // parentheses.
    let (_, rest) = line.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let ticks =
        |fields: &[&str]| fields.iter().map(|field| field.parse::<u64>().ok()).sum::<Option<u64>>();
    Some(Process {
        id,
        ended: matches!(fields.first(), Some(&("Z" | "X"))),
        ticks: ticks(fields.get(11..15)?)?,
        parent: fields.get(1)?.parse().ok()?,
        session: fields.get(3)?.parse().ok()?,
        resident_pages: fields.get(21)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_parentheses_does_not_confuse_the_fields() {
        let line = "42 (a) b (c)) S 7 42 9 0 -1 4194304 1 0 0 0 1 20 300 4000 20 0 1 0 100 1000 55 184 0 0";
        let process = parse_stat(42, line).expect("a valid line");
        assert_eq!((process.parent, process.session, process.resident_pages), (7, 9, 55));
        assert_eq!((process.ticks, process.ended), (4321, false));
        assert!(parse_stat(42, &line.replace(") S ", ") Z ")).expect("a valid line").ended);
    }

    #[test]
    fn members_are_descendants_and_the_session_but_not_others() {
        let process = |id, parent, session| Process {
            id,
            parent,
            session,
            ended: false,
            resident_pages: 1,
            ticks: 0,
        };
        // 11 descends, 12 descends from it in a session of its own, 13 is an orphan of the session,
        // 14 is a stranger.
        let table = [
            process(10, 1, 10),
            process(11, 10, 10),
            process(12, 11, 12),
            process(13, 1, 10),
            process(14, 1, 14),
        ];
        let mut ids: Vec<i32> = members(&table, 10).iter().map(|process| process.id).collect();
        ids.sort_unstable();
        assert_eq!(ids, [10, 11, 12, 13]);
    }
}
