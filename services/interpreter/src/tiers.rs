//! Limits of a script and its commands, by the pool that runs them.
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
//! A pool with another name has the limits of `cpu-2`. [`Limits`] and [`CommandLimits`] describe
//! what each limit does and where it is enforced. No limit may exceed the timeout of a step, half
//! an hour: the step would end before the script reaches its limit, and the script would never
//! learn of it.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use construct_domain::{compute, decide::CODE_TIMEOUT};
use construct_runtime::config;
use serde::{Deserialize, Serialize};

use crate::{command::CommandLimits, sandbox::Limits};

/// The engine itself uses about 3 MiB of a script's memory.
const MIN_MEMORY_BYTES: usize = 4 << 20;
/// A call and its result are journaled, and a message of the mesh is at most 64 MiB.
const MAX_CALL_BYTES: usize = 32 << 20;

/// Limits of one pool's scripts and of each of their commands.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tier {
    pub(crate) script: Limits,
    pub(crate) commands: CommandLimits,
    /// Maximum size of the results journaled for one execution, in bytes. A call without room
    /// throws an error that the script can catch: it is not made, or its result is left out.
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

/// Limits of one pool that the operator sets; the others are those of its tier.
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
    /// Maximum size of a script's printed text.
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
    /// Size of the journaled results of one execution's calls.
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
    /// The tier of a pool, by the table in the module documentation.
    pub(crate) fn for_pool(pool: &str) -> Self {
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

    fn with_overrides(self, set: &Overrides) -> Self {
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

    /// The first invalid limit: its name and what it must be.
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
        let memory = (script.memory_bytes < MIN_MEMORY_BYTES).then(|| {
            (
                "script_memory_bytes",
                format!("at least {MIN_MEMORY_BYTES}: the engine itself uses 3 MiB"),
            )
        });
        let call = (script.call_bytes > MAX_CALL_BYTES)
            .then(|| ("host_call_bytes", format!("at most {MAX_CALL_BYTES}")));
        let wall = (script.wall > CODE_TIMEOUT).then(|| {
            let max = CODE_TIMEOUT.as_secs() / 60;
            ("script_wall", format!("at most {max}min, the timeout of a step"))
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
    /// `all` applies to every pool; `own` overrides it per pool.
    ///
    /// # Errors
    /// A message that names the invalid limit.
    pub(crate) fn new(
        pools: &[String],
        all: &Overrides,
        own: &BTreeMap<String, Overrides>,
    ) -> Result<Self, String> {
        let tier = |name: &String| {
            let tier = Tier::for_pool(name)
                .with_overrides(all)
                .with_overrides(own.get(name).unwrap_or(&Overrides::default()));
            match tier.fault() {
                Some((limit, must)) => Err(format!("{limit} of `{name}` must be {must}")),
                None => Ok((name.clone(), tier)),
            }
        };
        let pools = pools.iter().map(tier).collect::<Result<_, _>>()?;
        Ok(Self { pools, default: Tier::for_pool(compute::DEFAULT).with_overrides(all) })
    }

    /// The tier of a command's pool. Only commands of earlier versions name none.
    pub(crate) fn for_pool(&self, pool: &str) -> &Tier {
        self.pools.get(pool).unwrap_or(&self.default)
    }

    /// The largest memory limit of all pools.
    pub(crate) fn max_memory_bytes(&self) -> usize {
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
    fn larger_tier_has_larger_limits() {
        let tiers = tiers(&Overrides::default(), &[]).expect("valid limits");
        let [small, middle, large] = compute::STANDARD.map(|name| tiers.for_pool(name));
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
        assert_eq!(tiers.for_pool("bench"), small);
        assert_eq!(tiers.for_pool(""), small);
        assert_eq!(tiers.max_memory_bytes(), large.script.memory_bytes);
    }

    #[test]
    fn pool_override_beats_general_override() {
        let all = Overrides {
            host_calls: Some(7),
            script_cpu: Some(Span(Duration::from_secs(1))),
            ..Default::default()
        };
        let own =
            Overrides { host_calls: Some(9), command_processes: Some(3), ..Default::default() };
        let tiers = tiers(&all, &[("cpu-4", own)]).expect("valid limits");
        let tier = tiers.for_pool("cpu-4");
        assert_eq!((tier.script.host_calls, tier.commands.processes), (9, 3));
        assert_eq!(tier.script.cpu, Duration::from_secs(1));
        assert_eq!(tier.script.memory_bytes, Tier::for_pool("cpu-4").script.memory_bytes);
        assert_eq!(tiers.for_pool("cpu-2").script.host_calls, 7);
        assert_eq!(tiers.for_pool("cpu-2").commands, Tier::default().commands);
    }

    #[test]
    fn unusable_limits_are_refused_by_name() {
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
        tiers(&most, &[]).expect("the whole timeout of a step");
    }

    #[test]
    fn documented_table_matches_the_tiers() {
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
        let tiers = compute::STANDARD.map(Tier::for_pool);
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
