//! The processes of a command: counting them, and killing all of them.
//!
//! A process belongs to a command if it descends from the command's first process or is in its
//! session. Under bubblewrap that is exact, since the first process of the namespace adopts
//! orphans. Without a sandbox, a process that starts its own session *and* loses its parent is not
//! counted, but it is still killed, by the mark that it inherited in its environment. A process
//! that also clears its environment escapes; `AllowUnconfined` accepts that.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tokio::process::Child;

use super::CommandLimits;

/// How often the processes of a command are measured.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// How long to wait for a process to stop before its children are searched.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// The limit that a command exceeded.
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
    /// Its name in results.
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
    /// Whether it is a zombie.
    ended: bool,
    resident_pages: u64,
    /// CPU time of the process and of its reaped children, in kernel ticks.
    ticks: u64,
}

/// Environment variable that marks the processes of a command that runs without a sandbox.
pub(super) const MARK: &str = "CONSTRUCT_COMMAND";

/// The processes of a command, identified by the first one. They are killed when this is dropped.
#[derive(Debug)]
pub(super) struct Group {
    leader: Option<Pid>,
    /// `MARK=value` as in their environment.
    mark: Option<String>,
    killed: AtomicBool,
}

impl Group {
    /// The group that `child` leads. It was started as the leader of its own session.
    pub(super) fn new(child: &Child, mark: Option<String>) -> Self {
        let leader = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        let mark = mark.map(|value| format!("{MARK}={value}"));
        Self { leader, mark, killed: AtomicBool::new(false) }
    }

    /// Returns when the group exceeds a limit; otherwise never.
    pub(super) async fn watch(&self, limits: &CommandLimits) -> Limit {
        let Some(leader) = self.leader else { return std::future::pending().await };
        let leader = leader.as_raw_nonzero().get();
        let page = rustix::param::page_size() as u64;
        let ticks_per_second = rustix::param::clock_ticks_per_second().max(1);
        loop {
            tokio::time::sleep(SAMPLE_INTERVAL).await;
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

    /// Records that no process is left to kill.
    pub(super) fn mark_dead(&self) {
        self.killed.store(true, Ordering::Relaxed);
    }

    /// Kills every process of the group.
    pub(super) async fn kill(&self) {
        if let Some(leader) = self.leader {
            // Stops the group first: finding the processes outside of it takes a few milliseconds,
            // and only its leader leads to them.
            let _ = rustix::process::kill_process_group(leader, Signal::STOP);
            let mark = self.mark.clone();
            drop(tokio::task::spawn_blocking(move || kill_all(leader, mark.as_deref())).await);
        }
        // Not earlier: if this future is dropped, `drop` must still kill the group, while the
        // leader leads to the others.
        self.killed.store(true, Ordering::Relaxed);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The future that ran the command was dropped before its end.
        if let (Some(leader), false) = (self.leader, *self.killed.get_mut()) {
            kill_all(leader, self.mark.as_deref());
        }
    }
}

fn kill_all(leader: Pid, mark: Option<&str>) {
    // The tree is read before its root dies, because orphans cannot be traced to it, and while its
    // root is stopped: bubblewrap may be about to create a process that leaves its session. It is
    // read a second time for processes that were forked during the first pass.
    let _ = rustix::process::kill_process(leader, Signal::STOP);
    let started = Instant::now();
    // The kernel completes the creation of a process with its own namespaces first, which takes
    // long if many are created at the same time.
    while !is_stopped(leader) && started.elapsed() < STOP_TIMEOUT {
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

/// Whether a process is stopped or has ended and so creates no other.
fn is_stopped(id: Pid) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{}/stat", id.as_raw_nonzero())) else {
        return true;
    };
    // The name before it may contain any character.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't' | 'Z' | 'X' | 'x'))
}

/// Whether a process inherited this variable.
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

/// The process table, at most half a [`SAMPLE_INTERVAL`] old. All commands of this service share
/// it.
fn recent_table() -> Arc<Vec<Process>> {
    static LATEST: Mutex<Option<(Instant, Arc<Vec<Process>>)>> = Mutex::new(None);
    let mut latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner);
    match &*latest {
        Some((read, table)) if read.elapsed() < SAMPLE_INTERVAL / 2 => Arc::clone(table),
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
    fn program_name_may_contain_parentheses() {
        let line = "42 (a) b (c)) S 7 42 9 0 -1 4194304 1 0 0 0 1 20 300 4000 20 0 1 0 100 1000 55 184 0 0";
        let process = parse_stat(42, line).expect("a valid line");
        assert_eq!((process.parent, process.session, process.resident_pages), (7, 9, 55));
        assert_eq!((process.ticks, process.ended), (4321, false));
        assert!(parse_stat(42, &line.replace(") S ", ") Z ")).expect("a valid line").ended);
    }

    #[test]
    fn members_are_descendants_and_the_session() {
        let process = |id, parent, session| Process {
            id,
            parent,
            session,
            ended: false,
            resident_pages: 1,
            ticks: 0,
        };
        // 11 is a descendant, 12 descends from it in its own session, 13 is an orphan of the
        // session, 14 is unrelated.
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
