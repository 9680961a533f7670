//! The command line.

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::{
    console::Color,
    context::{self, TargetArgs, TlsArgs},
    conversation, costs, daemon, dead_letters, doctor, entity, events, exec, explain,
    failure::{EXIT_CODES, Exit, Failure},
    login, mesh, output, tap, top, usage, whoami,
};

/// Construct turns a language model into a dependable worker.
#[derive(Debug, Parser)]
#[command(name = "construct", version, propagate_version = true, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// The gateway's address. Default: the context's address; without a context the daemon's socket
    /// on this machine (construct daemon), or http://127.0.0.1:60080.
    #[arg(long, global = true, env = "CONSTRUCT_GATEWAY_URL", value_name = "URL")]
    gateway: Option<String>,
    /// The context to use (construct context).
    #[arg(long, global = true, env = "CONSTRUCT_CONTEXT", value_name = "NAME")]
    context: Option<String>,
    /// The id of the organization to work in, for members of several.
    #[arg(long, global = true, env = "CONSTRUCT_ORGANIZATION", value_name = "ID")]
    organization: Option<String>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Whether to color output for people.
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    color: Color,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a conversation in the terminal.
    New(conversation::NewArgs),
    /// Continue a conversation.
    Resume(conversation::ResumeArgs),
    /// Send an agent one prompt, watch it work, and print its answer.
    Exec(exec::ExecArgs),
    /// Agents: a model, instructions, rules and limits under a name.
    #[command(subcommand)]
    Agent(entity::agent::AgentCommand),
    /// Tasks: conversations with an agent.
    #[command(subcommand)]
    Task(entity::task::TaskCommand),
    /// Approvals: decide about calls of scripts.
    #[command(subcommand)]
    Approval(entity::approval::ApprovalCommand),
    /// The messages of a task.
    #[command(subcommand)]
    Message(entity::message::MessageCommand),
    /// Models of providers, with prices and limits.
    #[command(subcommand)]
    Model(entity::model::ModelCommand),
    /// Accounts at model vendors.
    #[command(subcommand, name = "modelprovider")]
    ModelProvider(entity::model_provider::ModelProviderCommand),
    /// Budgets: limits on spending.
    #[command(subcommand)]
    Budget(entity::budget::BudgetCommand),
    /// Show costs by agent, model, task, day or purpose.
    Costs(costs::CostsArgs),
    /// Show usage by day, agent, key, model or tool.
    Usage(usage::UsageArgs),
    /// Quotas: limits of an organization.
    #[command(subcommand)]
    Quota(entity::quota::QuotaCommand),
    /// Schedules: messages sent at given times.
    #[command(subcommand)]
    Schedule(entity::schedule::ScheduleCommand),
    /// Scan a repository for candidates for Tools.
    Scan(entity::scan::ScanArgs),
    /// Secrets that scripts use without seeing them.
    #[command(subcommand)]
    Secret(entity::secret::SecretCommand),
    /// JSON documents that clients store, such as settings.
    #[command(subcommand)]
    State(entity::state::StateCommand),
    /// Uploaded files.
    #[command(subcommand)]
    File(entity::file::FileCommand),
    /// Tokens for the model proxy.
    #[command(subcommand)]
    Token(entity::token::TokenCommand),
    /// Organizations.
    #[command(subcommand)]
    Organization(entity::organization::OrganizationCommand),
    /// Members of an organization.
    #[command(subcommand)]
    Member(entity::member::MemberCommand),
    /// Invitations into an organization.
    #[command(subcommand)]
    Invitation(entity::invitation::InvitationCommand),
    /// API keys: credentials of programs.
    #[command(subcommand)]
    Key(entity::key::KeyCommand),
    /// The audit log.
    #[command(subcommand)]
    Audit(entity::audit::AuditCommand),
    /// Show the user or key that the gateway authenticates.
    Whoami(whoami::WhoAmIArgs),
    /// Log in with a browser at the gateway of a context.
    Login(login::LoginArgs),
    /// Log out: delete and revoke the session.
    Logout,
    /// Contexts: named gateways with their credentials.
    #[command(subcommand)]
    Context(context::ContextCommand),
    /// Dead letters: messages of the mesh that could not be processed.
    #[command(subcommand, name = "deadletter")]
    DeadLetter(dead_letters::DeadLetterCommand),
    /// Check the health of the deployment and suggest remedies.
    Doctor(doctor::DoctorArgs),
    /// Show the current load: workers, queues, tasks and spending.
    Top(top::TopArgs),
    /// Explain what a task waits for, since when, and what ends the wait.
    Explain(explain::ExplainArgs),
    /// Print events as they happen.
    Events(events::EventsArgs),
    /// Print the decoded messages of the mesh. For operators: it subscribes to NATS directly and
    /// bypasses the gateway's authentication.
    Tap(tap::TapArgs),
    /// Start the mesh on this machine (in a checkout: ./dev up).
    Up,
    /// Stop the mesh on this machine (in a checkout: ./dev down).
    Down,
    /// Run the mesh on this machine as a user service, started on demand.
    Daemon(daemon::DaemonArgs),
    /// Print shell completions.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the version.
    Version,
}

impl Cli {
    /// Runs the command.
    ///
    /// # Errors
    /// When the command fails.
    pub(crate) async fn run(self) -> Result<Exit, Failure> {
        let completed = |()| Exit::Completed;
        let Self { gateway, context, organization, tls, color, command } = self;
        let command = match command {
            Command::Context(command) => return command.run(organization, tls).map(completed),
            Command::Daemon(command) => return Box::pin(command.run()).await,
            Command::Up => return mesh::dev("up"),
            Command::Down => return mesh::dev("down"),
            Command::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Self::command(), "construct", &mut script);
                return output::print(&String::from_utf8_lossy(&script)).map(completed);
            }
            Command::Version => {
                return output::print(concat!("construct ", env!("CARGO_PKG_VERSION"), "\n"))
                    .map(completed);
            }
            command => command,
        };
        let target = TargetArgs { gateway, context, organization, tls };
        let command = match command {
            Command::Login(args) => return Box::pin(args.run(target)).await.map(completed),
            Command::Logout => return Box::pin(login::logout(target)).await.map(completed),
            command => command,
        };
        let gateway = Box::pin(login::gateway(target)).await?;
        match command {
            Command::New(args) => Box::pin(conversation::new(args, gateway, color)).await,
            Command::Resume(args) => Box::pin(conversation::resume(args, gateway, color)).await,
            Command::Exec(args) => Box::pin(exec::exec(args, gateway, color)).await,
            Command::Agent(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Task(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Approval(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Message(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Model(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::ModelProvider(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Budget(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Costs(args) => Box::pin(args.run(&gateway)).await.map(completed),
            Command::Usage(args) => Box::pin(args.run(&gateway)).await.map(completed),
            Command::Quota(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Schedule(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Scan(args) => Box::pin(args.run(&gateway)).await,
            Command::Secret(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::State(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::File(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Token(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Organization(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Member(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Invitation(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Key(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Audit(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Whoami(args) => Box::pin(args.run(&gateway)).await.map(completed),
            Command::DeadLetter(command) => Box::pin(command.run(&gateway)).await.map(completed),
            Command::Doctor(args) => Box::pin(args.run(&gateway, color)).await,
            Command::Top(args) => Box::pin(args.run(&gateway, color)).await,
            Command::Explain(args) => Box::pin(args.run(&gateway)).await.map(completed),
            Command::Events(args) => Box::pin(args.run(gateway, color)).await.map(completed),
            Command::Tap(args) => Box::pin(args.run(color)).await.map(completed),
            // Handled above: these need no gateway, or no caller.
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
    fn command_line_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn documented_commands_are_parsed() {
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
            "construct approval reject approval_1 --comment no",
            "construct agent update demo --policy rules.yaml",
            "construct task create --agent demo --policy -",
            "construct budget create 5/month --agent demo",
            "construct exec --agent demo --budget 2.50 words",
            "construct costs --by agent --since 7d -o json",
            "construct usage --by day,agent,model --since 7d --time-zone Europe/Berlin -o json",
            "construct usage --by tool --tool fetch --agent demo --limit 3",
            "construct quota get",
            "construct quota set org_1 --tier free --tasks-per-day 100 --runs-per-day tier --spend-per-month 2.50",
            "construct deadletter list --after 7 -o json",
            "construct deadletter redrive 8",
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
    fn runbook_commands_are_parsed() {
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
                // A sentence may name a command without its arguments.
                let named = error.kind() == clap::error::ErrorKind::MissingRequiredArgument
                    && !line.contains("TASK");
                assert!(named, "{line}: {error}");
            }
            count += 1;
        }
        assert!(count > 30, "only {count} commands were found");
    }

    #[test]
    fn conflicting_arguments_are_refused() {
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
