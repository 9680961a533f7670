//! The scripts that are killed.

/// Side effects of a script, numbered from 1.
pub(super) const EFFECTS: u32 = 50;
/// Number of concurrent effects of a concurrent script; a sequential one reads a file after as
/// many.
const GROUP: u32 = 5;
/// The file to which each effect appends its number, except effects that create a file.
pub(super) const LOG_FILE: &str = "effects.log";
/// The folder of the created files.
pub(super) const CREATED_FOLDER: &str = "made";
/// A file that changes constantly.
pub(super) const TICK_FILE: &str = "tick.txt";

/// The order of a script's effects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// One after the other.
    Sequential,
    /// Five at a time.
    Concurrent,
}

/// The kind of an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A request to an external server.
    Request,
    /// A command that appends to a file.
    Command,
    /// A new file.
    File,
}

/// The kind of the effect with this number; the scripts compute the same.
pub(super) const fn kind(number: u32) -> Kind {
    match number % 10 {
        3 => Kind::Command,
        7 => Kind::File,
        _ => Kind::Request,
    }
}

/// The common part of both scripts. Each effect carries what the script knows: random numbers, the
/// time, a changing file, the order in which earlier effects ended. If any of that differed on a
/// replay, the script would do something else.
const PRELUDE: &str = r"
const remote = 'URL';
const notes = {}, replies = {}, unknown = [], order = [];
let tick;
const note = n => notes[n] =
    [n, Math.random(), Date.now(), crypto.randomUUID(), performance.now(), tick, `(${order})`].join(' ');
const command = (n, text) => `echo ${n} >> effects.log; sleep 0.00${n % 7}; echo '${text}'`;
const missed = (n, error) => {
    if (error.name !== 'OutcomeUnknown') throw error;
    unknown.push(n);
    order.push(-n);
    return -n;
};
";

const SEQUENTIAL: &str = r"
const effect = (n, text) => {
    if (n % 10 === 3) return execute_command(command(n, text)).stdout.trim();
    if (n % 10 === 7) return create_file(`made/${n}`, text).status;
    return fetch(`${remote}/${n}`, { method: 'POST', body: text }).body;
};
for (let n = 1; n <= 50; n++) {
    if (n % 5 === 1) tick = read_file('tick.txt').trim();
    try {
        replies[n] = effect(n, note(n));
        order.push(n);
    } catch (error) {
        missed(n, error);
    }
}
({ notes, replies, unknown, order })
";

const CONCURRENT: &str = r"
const effect = async (n, text) => {
    if (n % 10 === 3) return (await tools.execute_command(command(n, text))).stdout.trim();
    if (n % 10 === 7) return (await tools.create_file(`made/${n}`, text)).status;
    return (await tools.fetch(`${remote}/${n}`, { method: 'POST', body: text })).body;
};
for (let group = 0; group < 10; group++) {
    tick = read_file('tick.txt').trim();
    const calls = [1, 2, 3, 4, 5].map(i => group * 5 + i).map(n =>
        effect(n, note(n)).then(reply => { replies[n] = reply; order.push(n); return n }, error => missed(n, error)));
    calls.push(new Promise(done => setTimeout(() => done('timer'), group % 4)));
    order.push('first:' + await Promise.race(calls));
    await Promise.all(calls);
}
({ notes, replies, unknown, order })
";

impl Shape {
    /// The script's text.
    pub(super) fn script(self, url: &str) -> String {
        let body = match self {
            Self::Sequential => SEQUENTIAL,
            Self::Concurrent => CONCURRENT,
        };
        format!("{}{body}", PRELUDE.replace("URL", url))
    }

    /// The number of the call for the effect with this number.
    pub(super) const fn call(self, number: u32) -> u32 {
        let group = (number - 1) / GROUP;
        match self {
            // A file is read before each group.
            Self::Sequential => number + group + 1,
            // Each group also has a timer.
            Self::Concurrent => number + 2 * group + 1,
        }
    }

    /// Maximum number of concurrent effects.
    pub(super) const fn concurrency(self) -> u32 {
        match self {
            Self::Sequential => 1,
            Self::Concurrent => GROUP,
        }
    }
}
