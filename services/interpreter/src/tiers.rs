//! How much a script and its commands may use, by the pool that runs them.
//!
//! | | `cpu-2` | `cpu-4` | `cpu-8`, `gpu` |
//! |---|---|---|---|
//! | a script's CPU time | 10 s | 20 s | 40 s |
//! | from its start to its end | 10 min | 15 min | 20 min |
//! | memory | 64 MiB | 128 MiB | 256 MiB |
//! | printed text | 256 KiB | 256 KiB | 256 KiB |
//! | its value | 1 MiB | 1 MiB | 1 MiB |
//! | host calls and timers | 10,000 | 20,000 | 40,000 |
//! | a call's arguments, its result | 4 MiB | 8 MiB | 16 MiB |
//! | results that are journaled, of all scripts of a message | 64 MiB | 128 MiB | 256 MiB |
//! | a command's CPU time | 20 min | 40 min | 80 min |
//! | processors | 2 | 4 | 8 |
//! | memory | 4 GiB | 8 GiB | 16 GiB |
//! | processes | 512 | 1,024 | 2,048 |
//! | largest file | 4 GiB | 8 GiB | 16 GiB |
//! | `/tmp`, `/dev/shm` | 512 MiB | 1 GiB | 2 GiB |
//!
//! A pool of another name has what `cpu-2` has. What each limit does is told in [`Limits`] and
//! [`CommandLimits`], where it is enforced. None reaches beyond the step of its task, which ends
//! half an hour after it began: a script for which more than that is set would be given up without
//! having been told its limit.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use construct_domain::{compute, decide::CODE_TIMEOUT};
use construct_runtime::config;
use serde::{Deserialize, Serialize};

use crate::{command::CommandLimits, sandbox::Limits};

/// The engine itself needs about 3 MiB of a script's memory.
const LEAST_MEMORY: usize = 4 << 20;
/// A call and its result are journaled, and a message of the mesh takes 64 MiB.
const MOST_CALL: usize = 32 << 20;

/// What a script of one pool, and each of its commands, may use.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tier {
    pub(crate) script: Limits,
    pub(crate) commands: CommandLimits,
    /// How much of what calls give is journaled for one execution, in bytes. A call for which there
    /// is no room is an error the script can catch: it is not made, or its result is left out.
    pub(crate) journal_bytes: usize,
}

impl Default for Tier {
    fn default() -> Self {
        Self {
            script: Limits::default(),
            commands: CommandLimits::default(),
            journal_bytes: 64 << 20,
        }
    }
}

/// A duration as the configuration writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Span(#[serde(with = "config::duration")] pub Duration);

/// Limits of one pool that the operator sets; the others stay as its tier has them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Overrides {
    /// CPU time of a script.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script_cpu: Option<Span>,
    /// Time from a script's start to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script_wall: Option<Span>,
    /// Memory of a script.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script_memory_bytes: Option<usize>,
    /// What is kept of the text a script prints.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script_output_bytes: Option<usize>,
    /// Size of a script's value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script_result_bytes: Option<usize>,
    /// Host calls and timers of a script.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_calls: Option<u32>,
    /// Size of one call's arguments, and of its result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_call_bytes: Option<usize>,
    /// What is journaled of the results of one execution's calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal_bytes: Option<usize>,
    /// CPU time of a command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command_cpu: Option<Span>,
    /// Processors of a command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command_cores: Option<usize>,
    /// Memory of a command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command_memory_bytes: Option<u64>,
    /// Processes of a command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command_processes: Option<usize>,
    /// Largest file of a command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command_file_bytes: Option<u64>,
    /// Size of a command's `/tmp` and `/dev/shm`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command_scratch_bytes: Option<u64>,
}

impl Tier {
    /// The table of this module's documentation.
    pub(crate) fn of(pool: &str) -> Self {
        let (factor, wall) = match pool {
            "cpu-4" => (2, 15),
            "cpu-8" | compute::GPU => (4, 20),
            _ => (1, 10),
        };
        let Self { script, commands, journal_bytes } = Self::default();
        Self {
            script: Limits {
                cpu: script.cpu * factor,
                wall: Duration::from_secs(wall * 60),
                memory_bytes: script.memory_bytes * factor as usize,
                host_calls: script.host_calls * factor,
                call_bytes: script.call_bytes * factor as usize,
                ..script
            },
            commands: CommandLimits {
                cpu: commands.cpu * factor,
                cores: commands.cores * factor as usize,
                memory_bytes: commands.memory_bytes * u64::from(factor),
                processes: commands.processes * factor as usize,
                file_bytes: commands.file_bytes * u64::from(factor),
                scratch_bytes: commands.scratch_bytes * u64::from(factor),
            },
            journal_bytes: journal_bytes * factor as usize,
        }
    }

    fn over(self, set: &Overrides) -> Self {
        let Self { script, commands, journal_bytes } = self;
        let time = |set: Option<Span>, tier: Duration| set.map_or(tier, |Span(time)| time);
        Self {
            script: Limits {
                cpu: time(set.script_cpu, script.cpu),
                wall: time(set.script_wall, script.wall),
                memory_bytes: set.script_memory_bytes.unwrap_or(script.memory_bytes),
                output_bytes: set.script_output_bytes.unwrap_or(script.output_bytes),
                result_bytes: set.script_result_bytes.unwrap_or(script.result_bytes),
                host_calls: set.host_calls.unwrap_or(script.host_calls),
                call_bytes: set.host_call_bytes.unwrap_or(script.call_bytes),
            },
            commands: CommandLimits {
                cpu: time(set.command_cpu, commands.cpu),
                cores: set.command_cores.unwrap_or(commands.cores),
                memory_bytes: set.command_memory_bytes.unwrap_or(commands.memory_bytes),
                processes: set.command_processes.unwrap_or(commands.processes),
                file_bytes: set.command_file_bytes.unwrap_or(commands.file_bytes),
                scratch_bytes: set.command_scratch_bytes.unwrap_or(commands.scratch_bytes),
            },
            journal_bytes: set.journal_bytes.unwrap_or(journal_bytes),
        }
    }

    /// What is wrong with it: the name of a limit and what it must be.
    fn fault(&self) -> Option<(&'static str, String)> {
        let Self { script, commands, journal_bytes } = self;
        let times = [
            ("script_cpu", script.cpu),
            ("script_wall", script.wall),
            // The kernel counts a process's CPU time in seconds.
            ("command_cpu", Duration::from_secs(commands.cpu.as_secs())),
        ];
        let counts = [
            ("script_result_bytes", script.result_bytes as u64),
            ("host_calls", u64::from(script.host_calls)),
            ("host_call_bytes", script.call_bytes as u64),
            ("journal_bytes", *journal_bytes as u64),
            ("command_cores", commands.cores as u64),
            ("command_memory_bytes", commands.memory_bytes),
            ("command_processes", commands.processes as u64),
            ("command_file_bytes", commands.file_bytes),
            ("command_scratch_bytes", commands.scratch_bytes),
        ];
        let too_short = times
            .into_iter()
            .find(|(_, time)| time.is_zero())
            .map(|(name, _)| (name, "longer".to_owned()));
        let zero = counts
            .into_iter()
            .find(|(_, count)| *count == 0)
            .map(|(name, _)| (name, "at least 1".to_owned()));
        let memory = (script.memory_bytes < LEAST_MEMORY).then(|| {
            (
                "script_memory_bytes",
                format!("at least {LEAST_MEMORY}: the engine itself needs 3 MiB"),
            )
        });
        let call = (script.call_bytes > MOST_CALL)
            .then(|| ("host_call_bytes", format!("at most {MOST_CALL}")));
        let wall = (script.wall > CODE_TIMEOUT).then(|| {
            let most = CODE_TIMEOUT.as_secs() / 60;
            (
                "script_wall",
                format!("at most {most}min: then the step ends that its scripts belong to"),
            )
        });
        too_short.or(zero).or(memory).or(call).or(wall)
    }
}

/// The tiers of the pools that this process serves.
#[derive(Debug, Clone)]
pub(crate) struct Tiers {
    pools: HashMap<String, Tier>,
    default: Tier,
}

impl Tiers {
    /// `all` holds for every pool, what `own` says of a pool over that.
    ///
    /// # Errors
    /// A limit that nothing could work with, in words.
    pub(crate) fn new(
        pools: &[String],
        all: &Overrides,
        own: &BTreeMap<String, Overrides>,
    ) -> Result<Self, String> {
        let tier = |name: &String| {
            let tier =
                Tier::of(name).over(all).over(own.get(name).unwrap_or(&Overrides::default()));
            match tier.fault() {
                Some((limit, must)) => Err(format!("{limit} of `{name}` must be {must}")),
                None => Ok((name.clone(), tier)),
            }
        };
        let pools = pools.iter().map(tier).collect::<Result<_, _>>()?;
        Ok(Self { pools, default: Tier::of(compute::DEFAULT).over(all) })
    }

    /// What a command for this pool may use. Only commands of earlier versions name none.
    pub(crate) fn of(&self, pool: &str) -> &Tier {
        self.pools.get(pool).unwrap_or(&self.default)
    }

    /// The most memory that a script of any pool may have.
    pub(crate) fn most_memory_bytes(&self) -> usize {
        self.pools
            .values()
            .chain([&self.default])
            .map(|tier| tier.script.memory_bytes)
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiers(all: &Overrides, own: &[(&str, Overrides)]) -> Result<Tiers, String> {
        let pools = ["cpu-2", "cpu-4", "cpu-8", "bench"].map(str::to_owned);
        let own = own.iter().map(|(name, set)| ((*name).to_owned(), set.clone())).collect();
        Tiers::new(&pools, all, &own)
    }

    #[test]
    fn a_larger_tier_has_more_of_everything_that_its_name_is_about() {
        let tiers = tiers(&Overrides::default(), &[]).expect("sound");
        let [small, middle, large] = compute::STANDARD.map(|name| tiers.of(name));
        assert_eq!(small, &Tier::default());
        for (less, more) in [(small, middle), (middle, large)] {
            assert!(less.script.cpu < more.script.cpu && less.script.wall < more.script.wall);
            assert!(less.script.memory_bytes < more.script.memory_bytes);
            assert!(
                less.script.host_calls < more.script.host_calls
                    && less.script.call_bytes < more.script.call_bytes
            );
            assert!(less.journal_bytes < more.journal_bytes);
            assert!(
                less.commands.cpu < more.commands.cpu && less.commands.cores < more.commands.cores
            );
            assert!(less.commands.memory_bytes < more.commands.memory_bytes);
            assert!(less.commands.processes < more.commands.processes);
        }
        assert_eq!([small, middle, large].map(|tier| tier.commands.cores), [2, 4, 8]);
        assert_eq!(tiers.of("bench"), small);
        assert_eq!(tiers.of(""), small);
        assert_eq!(tiers.most_memory_bytes(), large.script.memory_bytes);
    }

    #[test]
    fn what_is_set_for_a_pool_goes_before_what_is_set_for_all() {
        let all = Overrides {
            host_calls: Some(7),
            script_cpu: Some(Span(Duration::from_secs(1))),
            ..Default::default()
        };
        let own =
            Overrides { host_calls: Some(9), command_processes: Some(3), ..Default::default() };
        let tiers = tiers(&all, &[("cpu-4", own)]).expect("sound");
        let tier = tiers.of("cpu-4");
        assert_eq!((tier.script.host_calls, tier.commands.processes), (9, 3));
        assert_eq!(tier.script.cpu, Duration::from_secs(1));
        assert_eq!(tier.script.memory_bytes, Tier::of("cpu-4").script.memory_bytes);
        assert_eq!(tiers.of("cpu-2").script.host_calls, 7);
        assert_eq!(tiers.of("cpu-2").commands, Tier::default().commands);
    }

    #[test]
    fn limits_that_nothing_could_work_with_are_refused_by_name() {
        let span = |milliseconds| Some(Span(Duration::from_millis(milliseconds)));
        for (set, limit) in [
            (Overrides { script_cpu: span(0), ..Default::default() }, "script_cpu"),
            (Overrides { script_wall: span(0), ..Default::default() }, "script_wall"),
            (
                Overrides { script_wall: span(30 * 60 * 1000 + 1), ..Default::default() },
                "script_wall",
            ),
            (Overrides { command_cpu: span(999), ..Default::default() }, "command_cpu"),
            (Overrides { host_calls: Some(0), ..Default::default() }, "host_calls"),
            (
                Overrides { host_call_bytes: Some(33 << 20), ..Default::default() },
                "host_call_bytes",
            ),
            (Overrides { journal_bytes: Some(0), ..Default::default() }, "journal_bytes"),
            (
                Overrides { script_memory_bytes: Some(1 << 20), ..Default::default() },
                "script_memory_bytes",
            ),
            (Overrides { command_processes: Some(0), ..Default::default() }, "command_processes"),
        ] {
            let error = tiers(&Overrides::default(), &[("cpu-8", set)]).expect_err(limit);
            assert!(error.starts_with(&format!("{limit} of `cpu-8` must be ")), "{error}");
        }
        let most = Overrides { script_wall: Some(Span(CODE_TIMEOUT)), ..Default::default() };
        tiers(&most, &[]).expect("all the time that a step has");
    }

    #[test]
    fn the_table_of_the_documentation_is_the_one_that_holds() {
        let text = include_str!("tiers.rs");
        let row = |name: &str| {
            let line =
                text.lines().find(|line| line.starts_with(&format!("//! | {name} |"))).expect(name);
            line.split('|')
                .skip(2)
                .map(|cell| cell.trim().to_owned())
                .filter(|cell| !cell.is_empty())
                .collect::<Vec<_>>()
        };
        let tiers = compute::STANDARD.map(Tier::of);
        let cells = |cell: &dyn Fn(&Tier) -> String| tiers.iter().map(cell).collect::<Vec<_>>();
        assert_eq!(
            row("a script's CPU time"),
            cells(&|tier| format!("{} s", tier.script.cpu.as_secs()))
        );
        assert_eq!(
            row("from its start to its end"),
            cells(&|tier| format!("{} min", tier.script.wall.as_secs() / 60))
        );
        assert_eq!(row("memory"), cells(&|tier| format!("{} MiB", tier.script.memory_bytes >> 20)));
        assert_eq!(
            row("printed text"),
            cells(&|tier| format!("{} KiB", tier.script.output_bytes >> 10))
        );
        assert_eq!(
            row("a call's arguments, its result"),
            cells(&|tier| format!("{} MiB", tier.script.call_bytes >> 20))
        );
        assert_eq!(
            row("results that are journaled, of all scripts of a message"),
            cells(&|tier| format!("{} MiB", tier.journal_bytes >> 20))
        );
        assert_eq!(
            row("a command's CPU time"),
            cells(&|tier| format!("{} min", tier.commands.cpu.as_secs() / 60))
        );
        assert_eq!(row("processors"), cells(&|tier| tier.commands.cores.to_string()));
        assert_eq!(
            row("largest file"),
            cells(&|tier| format!("{} GiB", tier.commands.file_bytes >> 30))
        );
    }
}
