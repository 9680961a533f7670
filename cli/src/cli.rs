//! The command line.

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::{
    console::Color,
    context::{self, TlsArgs, Wanted},
    conversation, costs, daemon, dead, doctor, entity, events, exec,
    failure::{EXIT_CODES, Exit, Failure},
    login, mesh, output, tap, top, usage, whoami, why,
};

/// Construct turns a language model into a dependable worker.
#[derive(Debug, Parser)]
#[command(name = "construct", version, propagate_version = true, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// Where the gateway is; when not given, where the context says, or else on this machine: at
    /// the daemon's socket where there is one (construct daemon), or at http://127.0.0.1:60080.
    #[arg(long, global = true, env = "CONSTRUCT_GATEWAY_URL", value_name = "URL")]
    gateway: Option<String>,
    /// Which of the remembered gateways to use (construct context).
    #[arg(long, global = true, env = "CONSTRUCT_CONTEXT", value_name = "NAME")]
    context: Option<String>,
    /// The organization to work in, by id, for who has several.
    #[arg(long, global = true, env = "CONSTRUCT_ORGANIZATION", value_name = "ID")]
    organization: Option<String>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Whether to color what people read.
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    color: Color,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Begin a conversation in the terminal.
    New(conversation::NewArgs),
    /// Go on with a conversation.
    Resume(conversation::ResumeArgs),
    /// Give an agent one job, watch it work, and print its answer.
    Exec(exec::ExecArgs),
    /// Agents: who answers, with which model and instructions.
    #[command(subcommand)]
    Agent(entity::agent::AgentCommand),
    /// Tasks: conversations with an agent.
    #[command(subcommand)]
    Task(entity::task::TaskCommand),
    /// Calls of scripts that wait for a person.
    #[command(subcommand)]
    Approval(entity::approval::ApprovalCommand),
    /// The messages of a task.
    #[command(subcommand)]
    Message(entity::message::MessageCommand),
    /// Models: what a provider offers, at which price.
    #[command(subcommand)]
    Model(entity::model::ModelCommand),
    /// Accounts with model vendors.
    #[command(subcommand, name = "modelprovider")]
    ModelProvider(entity::model_provider::ModelProviderCommand),
    /// Budgets: how much may be spent.
    #[command(subcommand)]
    Budget(entity::budget::BudgetCommand),
    /// What was spent, and on what.
    Costs(costs::CostsArgs),
    /// What was used: by day, agent, model or tool.
    Usage(usage::UsageArgs),
    /// Quotas: how much an organization may do.
    #[command(subcommand)]
    Quota(entity::quota::QuotaCommand),
    /// Schedules: messages that are sent by the clock.
    #[command(subcommand)]
    Schedule(entity::schedule::ScheduleCommand),
    /// Look through a repository for what would make good tools.
    Scan(entity::scan::ScanArgs),
    /// Secrets that scripts use without seeing them.
    #[command(subcommand)]
    Secret(entity::secret::SecretCommand),
    /// Documents that clients keep: settings and the like.
    #[command(subcommand)]
    State(entity::state::StateCommand),
    /// Files: what people upload.
    #[command(subcommand)]
    File(entity::file::FileCommand),
    /// Tokens by which programs reach models through the proxy.
    #[command(subcommand)]
    Token(entity::token::TokenCommand),
    /// Organizations: who owns what.
    #[command(subcommand)]
    Organization(entity::organization::OrganizationCommand),
    /// Members of an organization.
    #[command(subcommand)]
    Member(entity::member::MemberCommand),
    /// Invitations into an organization.
    #[command(subcommand)]
    Invitation(entity::invitation::InvitationCommand),
    /// API keys: how programs log in.
    #[command(subcommand)]
    Key(entity::key::KeyCommand),
    /// The audit trail: who did what.
    #[command(subcommand)]
    Audit(entity::audit::AuditCommand),
    /// Say who the gateway takes you for.
    Whoami(whoami::WhoAmIArgs),
    /// Log in as a person, with a browser, at the gateway of a context.
    Login(login::LoginArgs),
    /// Forget a log-in.
    Logout,
    /// Gateways and keys, by name.
    #[command(subcommand)]
    Context(context::ContextCommand),
    /// Messages of the mesh that could not be understood and were given up.
    #[command(subcommand)]
    Dead(dead::DeadCommand),
    /// Say whether the deployment is well, and what to do where it is not.
    Doctor(doctor::DoctorArgs),
    /// Show what the installation does right now: workers, queues, tasks and spending.
    Top(top::TopArgs),
    /// Say what a task waits for, since when, and who can end the wait.
    Why(why::WhyArgs),
    /// Print what happens, as it happens.
    Events(events::EventsArgs),
    /// Print the messages on the mesh, decoded: for operators, because it listens on NATS, past all
    /// log-in.
    Tap(tap::TapArgs),
    /// Start the mesh on this machine (in a checkout: ./dev up).
    Up,
    /// Stop the mesh on this machine (in a checkout: ./dev down).
    Down,
    /// The mesh on this machine as a service of yours, which starts when it is needed.
    Daemon(daemon::DaemonArgs),
    /// Print the completions for a shell.
    Completions {
        /// For which.
        shell: clap_complete::Shell,
    },
    /// Print the version.
    Version,
}

impl Cli {
    /// Does what is asked for.
    ///
    /// # Errors
    /// When it can't be done.
    pub(crate) async fn run(self) -> Result<Exit, Failure> {
        let done = |()| Exit::Completed;
        let Self { gateway, context, organization, tls, color, command } = self;
        let command = match command {
            Command::Context(command) => return command.run(organization, tls).map(done),
            Command::Daemon(command) => return Box::pin(command.run()).await,
            Command::Up => return mesh::dev("up"),
            Command::Down => return mesh::dev("down"),
            Command::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Self::command(), "construct", &mut script);
                return output::print(&String::from_utf8_lossy(&script)).map(done);
            }
            Command::Version => {
                return output::print(concat!("construct ", env!("CARGO_PKG_VERSION"), "\n"))
                    .map(done);
            }
            command => command,
        };
        let wanted = Wanted { gateway, context, organization, tls };
        let command = match command {
            Command::Login(args) => return Box::pin(args.run(wanted)).await.map(done),
            Command::Logout => return Box::pin(login::logout(wanted)).await.map(done),
            command => command,
        };
        let gateway = Box::pin(login::gateway(wanted)).await?;
        match command {
            Command::New(args) => Box::pin(conversation::new(args, gateway, color)).await,
            Command::Resume(args) => Box::pin(conversation::resume(args, gateway, color)).await,
            Command::Exec(args) => Box::pin(exec::exec(args, gateway, color)).await,
            Command::Agent(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Task(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Approval(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Message(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Model(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::ModelProvider(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Budget(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Costs(args) => Box::pin(args.run(&gateway)).await.map(done),
            Command::Usage(args) => Box::pin(args.run(&gateway)).await.map(done),
            Command::Quota(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Schedule(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Scan(args) => Box::pin(args.run(&gateway)).await,
            Command::Secret(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::State(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::File(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Token(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Organization(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Member(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Invitation(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Key(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Audit(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Whoami(args) => Box::pin(args.run(&gateway)).await.map(done),
            Command::Dead(command) => Box::pin(command.run(&gateway)).await.map(done),
            Command::Doctor(args) => Box::pin(args.run(&gateway, color)).await,
            Command::Top(args) => Box::pin(args.run(&gateway, color)).await,
            Command::Why(args) => Box::pin(args.run(&gateway)).await.map(done),
            Command::Events(args) => Box::pin(args.run(gateway, color)).await.map(done),
            Command::Tap(args) => Box::pin(args.run(color)).await.map(done),
            // Above, because these need no gateway, or not as who calls.
            Command::Context(_)
            | Command::Login(_)
            | Command::Logout
            | Command::Daemon(_)
            | Command::Up
            | Command::Down
            | Command::Completions { .. }
            | Command::Version => Ok(Exit::Completed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_the_demo_says_is_understood() {
        for line in [
            "construct modelprovider create demo --type anthropic --api-key-env ANTHROPIC_API_KEY",
            "construct modelprovider create demo --type ollama --base-url http://127.0.0.1:11434",
            "construct modelprovider create demo --type scripted --script-file script.json",
            "construct model create demo --provider demo --model-id gpt --context-window 128000 --input-price 0.25 --output-price 2",
            "construct agent create demo --model demo --instructions-file instructions.md",
            "construct exec --agent demo --workspace . words",
            "construct exec --agent demo --attach report.pdf --attach file_01890a5d-ac96-774b-bcce-b302099a8057 words",
            "construct new --attach data.csv",
            "construct message create task_1 --attach a.png words",
            "construct exec -o json --timeout 5m --reconnect 60s -",
            "construct task list --phase suspended --limit 3 -o yaml --order-by updated_at",
            "construct resume --last",
            "construct tap construct.v1.evt.> --full",
            "construct approval list --task task_1 --state pending",
            "construct approval reject approval_1 --words no",
            "construct agent update demo --policy rules.yaml",
            "construct task create --agent demo --policy -",
            "construct budget create 5/month --agent demo",
            "construct exec --agent demo --budget 2.50 words",
            "construct costs --by agent --since 7d -o json",
            "construct usage --by day,agent,model --since 7d --time-zone Europe/Berlin -o json",
            "construct usage --by tool --tool fetch --agent demo --limit 3",
            "construct quota get",
            "construct quota set org_1 --tier free --tasks-per-day 100 --runs-per-day tier --spend-per-month 2.50",
            "construct dead list --after 7 -o json",
            "construct dead redrive 8",
            "construct task retry task_1",
            "construct model catalog anthropic",
            "construct schedule create morning --agent demo --cron 0_9_*_*_1 --time-zone Europe/Berlin words",
            "construct message create task_1 --interrupt words",
            "construct task rewind task_1 msg_1 --keep",
            "construct task fork task_1 msg_1",
            "construct task create --agent demo --pin one --pin two",
            "construct task pin task_1 fact -o json",
            "construct task unpin task_1 1",
            "construct organization create team --name Team",
            "construct --organization org_1 member update user_1 --role admin",
            "construct invitation create a@example.com --role viewer --expires 1d",
            "construct key create ci --scope tasks:write --scope agents:read --role member --expires 30d",
            "construct key create ci --scope tasks:write --tasks-per-day 100 --spend-per-month 2.50 --storage-bytes 1000000",
            "construct key get key_1",
            "construct key limit key_1 --runs-per-day none --tokens-per-day 100000",
            "construct key code laptop --scope admin",
            "construct whoami -o json",
            "construct audit list --since 7d --method */Delete* --outcome permission_denied -o json",
            "construct audit export --until 2026-11-21T22:55:00Z --user user_1 --key key_1 --object task_1",
            "construct --ca ca.pem context add far --address https://construct.example.com --client-certificate c.pem --client-key k.pem",
            "construct context add home --address unix:/run/construct/socket --organization org_1",
            "construct context add work --address http://127.0.0.1:1 --key-stdin",
            "construct context add work --address http://127.0.0.1:1 --key-file f --keyring always",
            "construct login --context work --browser --port 8400 --client-id cli --keyring never",
            "construct logout --context work",
            "construct daemon install --no-start --force",
            "construct daemon install --print",
            "construct daemon install --print --launchd",
            "construct daemon --launchd stop",
            "construct daemon uninstall",
            "construct daemon status",
            "construct token create --model m --model n --budget 2 --expires 30m",
            "construct state list --shared -o json",
            "construct state get settings --at-version 3",
            "construct state put pinned pinned.json --expected-version 0 --shared",
            "construct state put pinned -",
            "construct state delete pinned --forget",
            "construct state versions pinned -o json",
            "construct state restore pinned 2",
            "construct state watch settings pinned --shared -o json",
            "construct state export folder --force",
            "construct state import folder --shared --force",
            "construct file upload report.pdf --name May.pdf --media-type application/pdf --new -o json",
            "construct file download file_1 - --force",
            "construct file list --name report.pdf --media-type image/* --sha256 00 --state ready --limit 3",
            "construct file get file_1 -o json",
            "construct file update file_1 --name May.pdf --revision 3",
            "construct file delete file_1",
            "construct scan octocat/reports --ref v1 --model sonnet --budget 1.50",
            "construct scan . --no-wait -o json",
            "construct scan list --repository github:a/b --limit 3",
            "construct scan review scan_1 --accept all --reject other",
            "construct scan review scan_1 --edit report --with edit.json",
            "construct scan create-tools scan_1 --candidate report",
            "construct scan compare scan_1 scan_2",
            "construct scan connection create work --app 7 --installation 8 --key-file key.pem",
            "construct scan connection repositories work --owner octocat",
        ] {
            assert!(Cli::try_parse_from(line.split(' ')).is_ok(), "{line}");
        }
    }

    #[test]
    fn what_the_runbook_says_is_understood() {
        let runbook = include_str!("../../docs/runbook.md");
        let blocks = runbook.lines().filter(|line| line.starts_with("construct "));
        let inline = runbook
            .split('`')
            .filter(|code| code.starts_with("construct ") && !code.contains('\n'));
        let mut count = 0;
        for line in blocks.chain(inline) {
            let command =
                line.split('#').next().unwrap_or_default().replace('\'', "").replace("LETTER", "7");
            if let Err(error) = Cli::try_parse_from(command.split_whitespace()) {
                // In a sentence a command may be named without what it is about.
                let named = error.kind() == clap::error::ErrorKind::MissingRequiredArgument
                    && !line.contains("TASK");
                assert!(named, "{line}: {error}");
            }
            count += 1;
        }
        assert!(count > 30, "only {count} commands were found");
    }

    #[test]
    fn contradictions_are_refused() {
        for line in [
            "construct exec --task task_1 --agent other words",
            "construct resume task_1 --last",
            "construct agent create a --model m --instructions x --instructions-file y",
            "construct modelprovider create p --type openai --api-key-env A --api-key-stdin",
            "construct model create m --provider p --input-price -1",
            "construct task list --limit 0",
            "construct budget create 5 --agent a --task task_1",
            "construct whoami --client-certificate c.pem",
            "construct audit list --since yesterday",
            "construct exec --task task_1 --budget 1 words",
            "construct token create --budget 2",
            "construct usage --by week",
            "construct quota set org_1 --tasks-per-day -1",
            "construct key create ci",
            "construct key create ci --scope admin --role root",
            "construct key create ci --scope admin --tasks-per-day tier",
            "construct context add a --address http://a:1 --key-stdin --key-file f",
            "construct daemon install --print --no-start",
            "construct schedule create s --agent a --task t --cron x words",
            "construct schedule create s --agent a words",
            "construct schedule create s --task t --title x --cron x words",
            "construct scan",
            "construct scan review scan_1 --edit report",
            "construct scan connection create work --app 7",
        ] {
            let error = Cli::try_parse_from(line.split(' ')).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}
