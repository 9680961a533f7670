//! `construct top`: what the installation does right now, for whoever runs it.

use std::{
    fmt::Write as _,
    io::{self, IsTerminal as _, Write as _},
    time::Duration,
};

use clap::Args;
use construct_proto::v1::{GetOverviewRequest, Overview, Spender, TaskPhase, WorkerLoad};
use crossterm::{
    cursor::{Hide, MoveTo, Show},
    event::{Event, EventStream, KeyCode, KeyEventKind, KeyModifiers},
    execute, queue,
    terminal::{
        self, Clear, ClearType, DisableLineWrap, EnableLineWrap, EnterAlternateScreen,
        LeaveAlternateScreen,
    },
};
use futures::StreamExt as _;

use crate::{
    console::{Color, Style},
    failure::{Exit, Failure},
    gateway::{Gateway, call},
    money,
    output::{Format, OutputArgs, table},
    time,
    words::{clip, count, one_line, thousands},
};

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// How often to look: 500ms, 2s, 1m.
    #[arg(long, short = 'n', value_parser = interval, default_value = "2s", value_name = "TIME")]
    interval: Duration,
    /// Print it once, which is what happens without a terminal, too.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    output: OutputArgs,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = time::parse_duration(text)?;
    if interval < Duration::from_millis(500) {
        return Err("half a second is the shortest".to_owned());
    }
    Ok(interval)
}

impl TopArgs {
    /// Shows the installation until `q` is pressed.
    ///
    /// # Errors
    /// What the gateway fails with at the first look; later it is shown in its place. When the
    /// terminal is gone.
    pub(crate) async fn run(self, gateway: &Gateway, color: Color) -> Result<Exit, Failure> {
        let first = look(gateway, Duration::ZERO).await?;
        let terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
        let colored = color.applies(terminal);
        if self.once || !terminal || self.output.format() != Format::Table {
            self.output.words("construct.v1.Overview", &first, &frame(&first, None, colored))?;
            return Ok(Exit::Completed);
        }
        let _screen = Screen::enter()?;
        let (mut now, mut before, mut trouble) = (first, None, None);
        let mut inputs = EventStream::new();
        let mut next = Box::pin(look(gateway, self.interval));
        loop {
            draw(&shown(&now, before.as_ref(), trouble.as_deref(), colored))?;
            tokio::select! {
                answer = &mut next => {
                    match answer {
                        Ok(answer) => {
                            before = Some(std::mem::replace(&mut now, answer));
                            trouble = None;
                        }
                        // What was seen last stays there.
                        Err(failure) => trouble = Some(failure.to_string()),
                    }
                    next = Box::pin(look(gateway, self.interval));
                }
                input = inputs.next() => match input {
                    Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                        let interrupts = key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
                        if interrupts || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                            return Ok(Exit::Completed);
                        }
                    }
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(error.into()),
                    None => return Ok(Exit::Completed),
                },
            }
        }
    }
}

async fn look(gateway: &Gateway, after: Duration) -> Result<Overview, Failure> {
    tokio::time::sleep(after).await;
    call(gateway.diagnosis().get_overview(GetOverviewRequest {})).await
}

/// The screen as it was found is given back when this is dropped.
struct Screen;

impl Screen {
    fn enter() -> io::Result<Self> {
        terminal::enable_raw_mode()?;
        let screen = Self;
        // What is too long for a line is cut by the terminal.
        execute!(io::stdout(), EnterAlternateScreen, DisableLineWrap, Hide)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // There is nobody left to tell if that fails.
        let _ = execute!(io::stdout(), Show, EnableLineWrap, LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}

/// Puts lines over what is on the screen; what does not fit is left out.
fn draw(text: &str) -> io::Result<()> {
    let (_, rows) = terminal::size().unwrap_or((80, 24));
    let mut out = Vec::new();
    queue!(out, MoveTo(0, 0))?;
    for (number, line) in text.lines().take(usize::from(rows)).enumerate() {
        if number > 0 {
            out.extend(b"\r\n");
        }
        queue!(out, Clear(ClearType::UntilNewLine))?;
        out.extend(line.as_bytes());
    }
    queue!(out, Clear(ClearType::FromCursorDown))?;
    let mut stdout = io::stdout().lock();
    stdout.write_all(&out)?;
    stdout.flush()
}

/// A frame, and below it what is to be said about it.
fn shown(
    now: &Overview,
    before: Option<&Overview>,
    trouble: Option<&str>,
    colored: bool,
) -> String {
    let mut text = frame(now, before, colored);
    let (columns, _) = terminal::size().unwrap_or((80, 24));
    let below = match trouble {
        Some(trouble) => Style::Bad.paint(&clip(&one_line(trouble), usize::from(columns)), colored),
        None => Style::Dim.paint("q ends it", colored),
    };
    _ = writeln!(text, "\n{below}");
    text
}

/// All that is known, in lines. What happened since the look before is told as a rate.
fn frame(now: &Overview, before: Option<&Overview>, colored: bool) -> String {
    let spent = now.spent.unwrap_or_default();
    let at = time::read(now.time.as_ref()).map(time::clock).unwrap_or_default();
    let mut text = format!(
        "{at}  last hour: {}, {}, {} tokens\n\n",
        money::cost(spent.cost_pico_usd),
        count(spent.calls, "model call"),
        thousands(spent.tokens),
    );
    let rows = now.workers.iter().map(|load| {
        let stands = if load.served { "" } else { "nobody is there" };
        vec![
            load.worker.clone(),
            thousands(load.taken),
            thousands(load.waiting),
            thousands(load.redelivered),
            rate(load, now, before),
            stands.to_owned(),
        ]
    });
    let workers = table(&["WORKERS", "AT WORK", "WAITING", "REDELIVERED", "PER SECOND", ""], rows);
    for (line, load) in
        workers.lines().zip(std::iter::once(None).chain(now.workers.iter().map(Some)))
    {
        let style = match load {
            Some(load) if !load.served => Style::Bad,
            Some(load) if load.waiting > 0 => Style::Accent,
            Some(_) => Style::Plain,
            None => Style::Dim,
        };
        _ = writeln!(text, "{}", style.paint(line, colored));
    }
    let phases: Vec<String> = now
        .tasks
        .iter()
        .map(|task| format!("{} {}", thousands(task.count), phase(task.phase())))
        .collect();
    let tasks = if phases.is_empty() { "all at rest".to_owned() } else { phases.join(", ") };
    _ = writeln!(text, "\n{} {tasks}", Style::Dim.paint("TASKS", colored));
    let attention: Vec<String> = [
        (now.overdue, "overdue"),
        (now.parked, "put aside"),
        (i64::try_from(now.dead_letters).unwrap_or(i64::MAX), "dead letters"),
    ]
    .into_iter()
    .filter(|(count, _)| *count > 0)
    .map(|(count, what)| format!("{} {what}", thousands(count)))
    .collect();
    if !attention.is_empty() {
        let words = format!("{}: see construct doctor", attention.join(", "));
        _ = writeln!(text, "{}", Style::Bad.paint(&words, colored));
    }
    if !now.spenders.is_empty() {
        let spenders =
            table(&["SPENT BY", "OF", "CALLS", "TOKENS", "COST"], now.spenders.iter().map(spender));
        for (number, line) in spenders.lines().enumerate() {
            let style = if number == 0 { Style::Dim } else { Style::Plain };
            _ = writeln!(
                text,
                "{}{}",
                if number == 0 { "\n" } else { "" },
                style.paint(line, colored)
            );
        }
    }
    text
}

fn spender(spender: &Spender) -> Vec<String> {
    let spent = spender.spent.unwrap_or_default();
    let agent = if spender.agent_name.is_empty() { &spender.agent } else { &spender.agent_name };
    vec![
        if agent.is_empty() { "no agent".to_owned() } else { clip(agent, 40) },
        clip(&spender.organization_name, 40),
        thousands(spent.calls),
        thousands(spent.tokens),
        money::cost(spent.cost_pico_usd),
    ]
}

/// How many messages a second workers were handed between two looks; nothing is known after the
/// first, and when queues were made anew.
fn rate(load: &WorkerLoad, now: &Overview, before: Option<&Overview>) -> String {
    let known = before.and_then(|before| {
        let earlier = before.workers.iter().find(|earlier| earlier.worker == load.worker)?;
        let handed = load.delivered.checked_sub(earlier.delivered)?;
        let took = time::read(now.time.as_ref())?.duration_since(time::read(before.time.as_ref())?);
        let millis = u64::try_from(took.as_millis()).ok().filter(|&millis| millis > 0)?;
        let tenths = handed.saturating_mul(10_000) / millis;
        Some(format!("{}.{}", thousands(tenths / 10), tenths % 10))
    });
    known.unwrap_or_else(|| "-".to_owned())
}

fn phase(phase: TaskPhase) -> &'static str {
    match phase {
        TaskPhase::InvokeModel => "ask a model",
        TaskPhase::ExecuteTools => "run a script",
        TaskPhase::AwaitApproval => "wait for a decision",
        TaskPhase::AwaitSubtasks => "wait for subtasks",
        TaskPhase::AwaitInput | TaskPhase::Unspecified => "begin",
        TaskPhase::Suspended => "suspended",
    }
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::{PhaseCount, Spent};

    use super::*;

    fn load(worker: &str, served: bool, waiting: u64, delivered: u64) -> WorkerLoad {
        WorkerLoad {
            worker: worker.to_owned(),
            served,
            waiting,
            taken: 1,
            redelivered: 0,
            delivered,
        }
    }

    fn overview(second: i64, delivered: u64) -> Overview {
        Overview {
            time: Some(prost_types::Timestamp { seconds: 1_800_000_000 + second, nanos: 0 }),
            workers: vec![
                load("reconciler", true, 3, delivered),
                load("interpreter.cpu-2", false, 0, 7),
            ],
            ..Overview::default()
        }
    }

    #[test]
    fn a_frame_says_who_works_who_is_missing_and_who_spends() {
        let mut now = overview(2, 1_035);
        now.tasks = vec![
            PhaseCount { phase: TaskPhase::InvokeModel.into(), count: 1_200 },
            PhaseCount { phase: TaskPhase::AwaitApproval.into(), count: 1 },
        ];
        now.parked = 2;
        let spent = Spent { calls: 1, tokens: 2_500, cost_pico_usd: 1_500_000_000_000 };
        now.spent = Some(spent);
        now.spenders = vec![Spender {
            organization: "org_1".to_owned(),
            organization_name: "Acme".to_owned(),
            agent: "agent_1".to_owned(),
            agent_name: String::new(),
            spent: Some(spent),
        }];
        let text = frame(&now, Some(&overview(0, 1_000)), false);
        let (first, rest) = text.split_once('\n').expect("lines");
        assert!(first.contains("last hour: $1.50, 1 model call, 2,500 tokens"), "{first}");
        let expected = "
WORKERS            AT WORK  WAITING  REDELIVERED  PER SECOND
reconciler         1        3        0            17.5
interpreter.cpu-2  1        0        0            0.0         nobody is there

TASKS 1,200 ask a model, 1 wait for a decision
2 put aside: see construct doctor

SPENT BY  OF    CALLS  TOKENS  COST
agent_1   Acme  1      2,500   $1.50
";
        assert_eq!(rest, expected);
        // The first look knows no rate, and neither does one after the queues were made anew.
        for before in [None, Some(overview(0, 2_000))] {
            let text = frame(&now, before.as_ref(), false);
            let line = text.lines().find(|line| line.starts_with("reconciler")).expect("a line");
            assert!(line.ends_with('-'), "{line}");
        }
        assert!(frame(&overview(0, 0), None, false).contains("TASKS all at rest"));
        assert!(
            frame(&now, None, true).contains("\u{1b}[31minterpreter.cpu-2"),
            "{}",
            frame(&now, None, true)
        );
    }

    #[test]
    fn looking_has_a_shortest_interval() {
        assert_eq!(interval("1s"), Ok(Duration::from_secs(1)));
        assert!(interval("10ms").is_err() && interval("fast").is_err());
    }
}
