//! `construct top`: the current load of the installation, for operators.

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
    text::{clip, count, one_line, thousands},
    time,
};

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// The refresh interval: 500ms, 2s, 1m.
    #[arg(long, short = 'n', value_parser = parse_interval, default_value = "2s", value_name = "TIME")]
    interval: Duration,
    /// Print one snapshot. The default without a terminal.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    output: OutputArgs,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = time::parse_duration(text)?;
    if interval < Duration::from_millis(500) {
        return Err("the shortest interval is 500ms".to_owned());
    }
    Ok(interval)
}

impl TopArgs {
    /// Shows the installation until `q` is pressed.
    ///
    /// # Errors
    /// The first error of the gateway; later failures are shown on the screen. When the
    /// terminal is gone.
    pub(crate) async fn run(self, gateway: &Gateway, color: Color) -> Result<Exit, Failure> {
        let first = fetch_overview(gateway, Duration::ZERO).await?;
        let terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
        let colored = color.applies(terminal);
        if self.once || !terminal || self.output.format() != Format::Table {
            self.output.message("construct.v1.Overview", &first, &frame(&first, None, colored))?;
            return Ok(Exit::Completed);
        }
        let _screen = Screen::enter()?;
        let (mut current, mut previous, mut error) = (first, None, None);
        let mut inputs = EventStream::new();
        let mut next = Box::pin(fetch_overview(gateway, self.interval));
        loop {
            draw(&screen_text(&current, previous.as_ref(), error.as_deref(), colored))?;
            tokio::select! {
                result = &mut next => {
                    match result {
                        Ok(overview) => {
                            previous = Some(std::mem::replace(&mut current, overview));
                            error = None;
                        }
                        // The last overview stays visible.
                        Err(failure) => error = Some(failure.to_string()),
                    }
                    next = Box::pin(fetch_overview(gateway, self.interval));
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

async fn fetch_overview(gateway: &Gateway, delay: Duration) -> Result<Overview, Failure> {
    tokio::time::sleep(delay).await;
    call(gateway.diagnosis().get_overview(GetOverviewRequest {})).await
}

/// The alternate screen; dropping it restores the terminal.
struct Screen;

impl Screen {
    fn enter() -> io::Result<Self> {
        terminal::enable_raw_mode()?;
        let screen = Self;
        // The terminal clips long lines.
        execute!(io::stdout(), EnterAlternateScreen, DisableLineWrap, Hide)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A failure cannot be reported here.
        let _ = execute!(io::stdout(), Show, EnableLineWrap, LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}

/// Draws the text over the screen; lines that do not fit are omitted.
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

/// A frame, and below it an error or a hint.
fn screen_text(
    current: &Overview,
    previous: Option<&Overview>,
    error: Option<&str>,
    colored: bool,
) -> String {
    let mut text = frame(current, previous, colored);
    let (columns, _) = terminal::size().unwrap_or((80, 24));
    let footer = match error {
        Some(error) => Style::Bad.paint(&clip(&one_line(error), usize::from(columns)), colored),
        None => Style::Dim.paint("q quits", colored),
    };
    _ = writeln!(text, "\n{footer}");
    text
}

/// The overview as text. `previous` is the basis of rates.
fn frame(current: &Overview, previous: Option<&Overview>, colored: bool) -> String {
    let spent = current.spending.unwrap_or_default();
    let at = time::read(current.time.as_ref()).map(time::clock).unwrap_or_default();
    let mut text = format!(
        "{at}  last hour: {}, {}, {} tokens\n\n",
        money::cost(spent.cost_pico_usd),
        count(spent.calls, "model call"),
        thousands(spent.tokens),
    );
    let rows = current.workers.iter().map(|load| {
        let problem = if load.served { "" } else { "no worker" };
        vec![
            load.worker.clone(),
            thousands(load.in_flight),
            thousands(load.waiting),
            thousands(load.redelivered),
            rate(load, current, previous),
            problem.to_owned(),
        ]
    });
    let workers = table(&["WORKERS", "ACTIVE", "WAITING", "REDELIVERED", "PER SECOND", ""], rows);
    for (line, load) in
        workers.lines().zip(std::iter::once(None).chain(current.workers.iter().map(Some)))
    {
        let style = match load {
            Some(load) if !load.served => Style::Bad,
            Some(load) if load.waiting > 0 => Style::Accent,
            Some(_) => Style::Plain,
            None => Style::Dim,
        };
        _ = writeln!(text, "{}", style.paint(line, colored));
    }
    let phases: Vec<String> = current
        .tasks
        .iter()
        .map(|task| format!("{} {}", thousands(task.count), phase_name(task.phase())))
        .collect();
    let tasks = if phases.is_empty() { "all idle".to_owned() } else { phases.join(", ") };
    _ = writeln!(text, "\n{} {tasks}", Style::Dim.paint("TASKS", colored));
    let attention: Vec<String> = [
        (current.overdue, "overdue"),
        (current.quarantined, "quarantined"),
        (i64::try_from(current.dead_letters).unwrap_or(i64::MAX), "dead letters"),
    ]
    .into_iter()
    .filter(|(count, _)| *count > 0)
    .map(|(count, name)| format!("{} {name}", thousands(count)))
    .collect();
    if !attention.is_empty() {
        let line = format!("{}: see construct doctor", attention.join(", "));
        _ = writeln!(text, "{}", Style::Bad.paint(&line, colored));
    }
    if !current.spenders.is_empty() {
        let spenders = table(
            &["AGENT", "ORGANIZATION", "CALLS", "TOKENS", "COST"],
            current.spenders.iter().map(spender),
        );
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
    let spent = spender.spending.unwrap_or_default();
    let agent = if spender.agent_name.is_empty() { &spender.agent } else { &spender.agent_name };
    vec![
        if agent.is_empty() { "no agent".to_owned() } else { clip(agent, 40) },
        clip(&spender.organization_name, 40),
        thousands(spent.calls),
        thousands(spent.tokens),
        money::cost(spent.cost_pico_usd),
    ]
}

/// The messages per second delivered to the workers since the previous overview. `-` without a
/// previous one, and when the consumers were recreated.
fn rate(load: &WorkerLoad, current: &Overview, previous: Option<&Overview>) -> String {
    let rate = previous.and_then(|previous| {
        let earlier = previous.workers.iter().find(|earlier| earlier.worker == load.worker)?;
        let delivered = load.delivered.checked_sub(earlier.delivered)?;
        let start = time::read(previous.time.as_ref())?;
        let elapsed = time::read(current.time.as_ref())?.duration_since(start);
        let millis = u64::try_from(elapsed.as_millis()).ok().filter(|&millis| millis > 0)?;
        let tenths = delivered.saturating_mul(10_000) / millis;
        Some(format!("{}.{}", thousands(tenths / 10), tenths % 10))
    });
    rate.unwrap_or_else(|| "-".to_owned())
}

fn phase_name(phase: TaskPhase) -> &'static str {
    match phase {
        TaskPhase::InvokeModel => "invoking a model",
        TaskPhase::ExecuteTools => "executing a script",
        TaskPhase::AwaitApproval => "awaiting approval",
        TaskPhase::AwaitSubtasks => "awaiting subtasks",
        TaskPhase::AwaitInput | TaskPhase::Unspecified => "starting",
        TaskPhase::Suspended => "suspended",
    }
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::{PhaseCount, Spending};

    use super::*;

    fn load(worker: &str, served: bool, waiting: u64, delivered: u64) -> WorkerLoad {
        WorkerLoad {
            worker: worker.to_owned(),
            served,
            waiting,
            in_flight: 1,
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
    fn frame_lists_workers_tasks_and_spenders() {
        let mut current = overview(2, 1_035);
        current.tasks = vec![
            PhaseCount { phase: TaskPhase::InvokeModel.into(), count: 1_200 },
            PhaseCount { phase: TaskPhase::AwaitApproval.into(), count: 1 },
        ];
        current.quarantined = 2;
        let spent = Spending { calls: 1, tokens: 2_500, cost_pico_usd: 1_500_000_000_000 };
        current.spending = Some(spent);
        current.spenders = vec![Spender {
            organization: "org_1".to_owned(),
            organization_name: "Acme".to_owned(),
            agent: "agent_1".to_owned(),
            agent_name: String::new(),
            spending: Some(spent),
        }];
        let text = frame(&current, Some(&overview(0, 1_000)), false);
        let (first, rest) = text.split_once('\n').expect("lines");
        assert!(first.contains("last hour: $1.50, 1 model call, 2,500 tokens"), "{first}");
        let expected = "
WORKERS            ACTIVE  WAITING  REDELIVERED  PER SECOND
reconciler         1       3        0            17.5
interpreter.cpu-2  1       0        0            0.0         no worker

TASKS 1,200 invoking a model, 1 awaiting approval
2 quarantined: see construct doctor

AGENT    ORGANIZATION  CALLS  TOKENS  COST
agent_1  Acme          1      2,500   $1.50
";
        assert_eq!(rest, expected);
        // There is no rate at first, and after the consumers were recreated.
        for previous in [None, Some(overview(0, 2_000))] {
            let text = frame(&current, previous.as_ref(), false);
            let line = text.lines().find(|line| line.starts_with("reconciler")).expect("a line");
            assert!(line.ends_with('-'), "{line}");
        }
        assert!(frame(&overview(0, 0), None, false).contains("TASKS all idle"));
        assert!(
            frame(&current, None, true).contains("\u{1b}[31minterpreter.cpu-2"),
            "{}",
            frame(&current, None, true)
        );
    }

    #[test]
    fn interval_has_a_minimum() {
        assert_eq!(parse_interval("1s"), Ok(Duration::from_secs(1)));
        assert!(parse_interval("10ms").is_err() && parse_interval("fast").is_err());
    }
}
