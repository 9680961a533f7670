//! The scripts that are killed.

/// Side effects of a script, numbered from 1.
pub(super) const EFFECTS: u32 = 50;
/// How many of them a concurrent script has at a time, and after how many a sequential one reads a
/// file.
const GROUP: u32 = 5;
/// The file to which each effect appends its number, but those that make a file.
pub(super) const LOG: &str = "effects.log";
/// The folder of the files that are made.
pub(super) const MADE: &str = "made";
/// The file that changes all the time.
pub(super) const TICK: &str = "tick.txt";

/// How a script has its effects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// One after the other.
    Sequential,
    /// Five at a time.
    Concurrent,
}

/// What an effect is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A request to somebody else's server.
    Request,
    /// A command that appends to a file.
    Command,
    /// A new file.
    File,
}

/// What the effect with this number is; the scripts decide the same.
pub(super) const fn kind(number: u32) -> Kind {
    match number % 10 {
        3 => Kind::Command,
        7 => Kind::File,
        _ => Kind::Request,
    }
}

/// What both scripts share. Each effect says with it what the script knows: random numbers, the
/// time, a file that changes, the order in which earlier ones ended. Were any of that another when
/// the script is run again, it would do something else.
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

    /// The number that the call has which is the effect with this number.
    pub(super) const fn call(self, number: u32) -> u32 {
        let group = (number - 1) / GROUP;
        match self {
            // In front of each group a file is read.
            Self::Sequential => number + group + 1,
            // And each has a timer.
            Self::Concurrent => number + 2 * group + 1,
        }
    }

    /// How many effects can be under way.
    pub(super) const fn at_once(self) -> u32 {
        match self {
            Self::Sequential => 1,
            Self::Concurrent => GROUP,
        }
    }
}
