//! The commands for agents, tasks, messages, models and providers.

use anyhow::ensure;
use construct_tests::mesh::{Mesh, Service};
use serde_json::Value;

use super::{CommandOutput, construct};

/// A command line, its input, its exit code, and parts of its output: on standard output, or on
/// standard error if it fails.
pub(super) type Case<'a> = (&'a str, &'a str, i32, &'a [&'a str]);

pub(super) async fn check(mesh: &Mesh, cases: &[Case<'_>]) {
    let mut wrong = Vec::new();
    for (line, input, code, parts) in cases {
        if let Err(why) = attempt(mesh, line, input, *code, parts).await {
            wrong.push(format!("{line}: {why}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

pub(super) async fn run(
    mesh: &Mesh,
    line: &str,
    input: &str,
    code: i32,
    parts: &[&str],
) -> CommandOutput {
    attempt(mesh, line, input, code, parts).await.unwrap_or_else(|why| panic!("{line}: {why}"))
}

async fn attempt(
    mesh: &Mesh,
    line: &str,
    input: &str,
    code: i32,
    parts: &[&str],
) -> anyhow::Result<CommandOutput> {
    let arguments = split_words(line);
    let done =
        construct(mesh, &arguments.iter().map(String::as_str).collect::<Vec<_>>(), input).await;
    ensure!(done.code() == code, "the exit code is not {code}: {done:?}");
    let (said, silent) =
        if code == 0 { (&done.output, &done.errors) } else { (&done.errors, &done.output) };
    ensure!(
        silent.is_empty(),
        "what is printed goes to one place, and not {silent:?} to the other"
    );
    for part in parts {
        ensure!(said.contains(part), "{part:?} is not in {said}");
    }
    ensure!(!said.contains("sk-secret") && !said.contains("panicked"), "it says {said}");
    Ok(done)
}

/// Splits a command line into words; quotes keep words together.
fn split_words(line: &str) -> Vec<String> {
    let quoted = line.split('\'').enumerate();
    let words = quoted.flat_map(|(index, part)| {
        if index % 2 == 1 { vec![part] } else { part.split_whitespace().collect() }
    });
    words.map(ToOwned::to_owned).collect()
}

/// The JSON output of `line`, after checking that it prints the same as YAML and something for
/// people.
pub(super) async fn get(mesh: &Mesh, line: &str) -> Value {
    let json = run(mesh, &format!("{line} -o json"), "", 0, &[]).await.json();
    let yaml = run(mesh, &format!("{line} -o yaml"), "", 0, &[]).await.output;
    assert_eq!(serde_yaml_ng::from_str::<Value>(&yaml).unwrap(), json, "{line}");
    let id = json["metadata"]["id"].as_str().unwrap();
    run(mesh, line, "", 0, &[id, "revision:"]).await;
    json
}

#[tokio::test]
async fn entities_are_managed_by_name_and_by_id() {
    // Queued work must not run, so no worker runs.
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.spawn(Service::Gateway).unwrap();
    mesh.wait_until_ready(Service::Gateway).await.unwrap();

    // Providers. Keys are written and never returned.
    check(
        &mesh,
        &[
            ("modelprovider list", "", 0, &["NAME"]),
            (
                "modelprovider create p --type scripted --script-file -",
                "[]",
                0,
                &["scripted", "script:", "2 bytes"],
            ),
            ("modelprovider create p --type scripted --script-file -", "[]", 1, &["p"]),
            (
                "modelprovider create 'Not A Name' --type scripted",
                "",
                2,
                &["rejects the request as invalid", "- spec.name: "],
            ),
            ("modelprovider create q --type nonsense", "", 2, &["anthropic"]),
            (
                "modelprovider create q --type openai --api-key-env NO_SUCH_VARIABLE",
                "",
                2,
                &["NO_SUCH_VARIABLE is not set"],
            ),
            (
                "modelprovider create q --type openai --api-key-stdin",
                " \n",
                2,
                &["the API key is empty"],
            ),
            (
                "modelprovider create q --type openai --api-key-stdin --base-url ftp://x",
                "sk-secret",
                2,
                &["spec.base_url"],
            ),
            (
                "modelprovider create q --type openai --api-key-stdin",
                "sk-secret\n",
                0,
                &["api key:", "set, encrypted with"],
            ),
            ("modelprovider list --type openai", "", 0, &["q"]),
            ("modelprovider get nobody", "", 1, &["not found", "nobody"]),
            ("modelprovider get 'Not A Name'", "", 2, &["model_provider"]),
        ],
    )
    .await;
    let provider = get(&mesh, "modelprovider get p").await;
    let id = provider["metadata"]["id"].as_str().unwrap();
    assert_eq!(get(&mesh, &format!("modelprovider get {id}")).await, provider);
    let sealed = get(&mesh, "modelprovider get q").await;
    assert_eq!(
        (&sealed["status"]["apiKeySet"], &sealed["spec"]["apiKey"]),
        (&Value::Bool(true), &Value::Null),
        "{sealed}"
    );
    check(
        &mesh,
        &[
            (
                &format!("modelprovider update {id} --name renamed"),
                "",
                0,
                &["name:     renamed", "revision: 2"],
            ),
            ("modelprovider get p", "", 1, &["not found"]),
            (
                "modelprovider update renamed --script-file /no/such/file",
                "",
                2,
                &["/no/such/file cannot be read"],
            ),
            ("modelprovider update renamed --script-file -", "nonsense", 2, &["script"]),
            (
                "modelprovider update renamed --revision 1 --name late",
                "",
                1,
                &["hint: it was changed concurrently"],
            ),
            ("modelprovider update nobody --name late", "", 1, &["not found"]),
            ("modelprovider delete q", "", 0, &["model provider q is deleted\n"]),
            ("modelprovider delete q", "", 1, &["not found"]),
        ],
    )
    .await;

    // Models. Omitted prices are unchanged.
    check(
        &mesh,
        &[
            ("model create m --provider nobody", "", 1, &["nobody"]),
            (
                "model create m --provider renamed --input-price 3 --output-price 15",
                "",
                0,
                &["$3", "$15"],
            ),
            ("model create m --provider renamed", "", 1, &["m"]),
            ("model update m --context-window=-1", "", 2, &["context_window"]),
            ("model update m --input-price nonsense", "", 2, &["--input-price"]),
            ("model get nobody", "", 1, &["not found"]),
            ("modelprovider delete renamed", "", 1, &["in use by at least one model"]),
        ],
    )
    .await;
    let model = get(&mesh, "model get m").await;
    let id = model["metadata"]["id"].as_str().unwrap();
    assert_eq!(get(&mesh, &format!("model get {id}")).await, model);
    check(
        &mesh,
        &[
            (
                &format!("model update {id} --output-price 0.25 --vendor-model v2"),
                "",
                0,
                &["$3", "$0.25", "v2"],
            ),
            ("model update m --name mm", "", 0, &["mm"]),
            ("model list --provider renamed", "", 0, &["mm", "v2"]),
            ("model list --provider renamed --name-prefix x", "", 0, &["NAME"]),
        ],
    )
    .await;

    // Agents.
    check(
        &mesh,
        &[
            ("task create", "", 2, &["there is no agent yet", "construct agent create"]),
            ("new", "", 2, &["there is no agent yet"]),
            (
                "agent create a --model mm --instructions-file - --temperature 0.5",
                "Be brief.\nVery.",
                0,
                &["Be brief.\n  Very."],
            ),
            (
                "agent create b --model mm --temperature 3",
                "",
                2,
                &["- spec.parameters.temperature: "],
            ),
            ("agent create b --model nobody", "", 1, &["nobody"]),
            ("agent update a --max-tokens 100", "", 0, &["0.5", "100"]),
            ("agent get nobody -o json", "", 1, &["not found"]),
            ("model delete mm", "", 1, &["in use by at least one agent"]),
        ],
    )
    .await;
    let agent = get(&mesh, "agent get a").await;
    let id = agent["metadata"]["id"].as_str().unwrap();
    assert_eq!(get(&mesh, &format!("agent get {id}")).await, agent);
    assert_eq!(
        agent["spec"]["parameters"],
        serde_json::json!({"temperature": 0.5, "maxTokens": 100})
    );
    check(
        &mesh,
        &[
            (
                &format!("agent update {id} --name worker --description 'Works hard'"),
                "",
                0,
                &["worker", "Works hard"],
            ),
            ("agent list --model mm", "", 0, &["worker", "Works hard"]),
            ("agent list --order-by nonsense", "", 2, &["page.order_by"]),
            ("agent list --page-token nonsense", "", 2, &["page.page_token"]),
        ],
    )
    .await;

    // Secrets. Values are written and never returned; new bindings need them again.
    let create =
        "secret create TOKEN --host api.example.com --command git --description 'For issues'";
    check(
        &mesh,
        &[
            ("secret create TOKEN", "sk-secret-1", 2, &["--host HOST"]),
            ("secret create token --host a.com", "sk-secret-1", 2, &["- spec.name: "]),
            ("secret create TOKEN --host '*'", "sk-secret-1", 2, &["- spec.bindings.hosts[0]: "]),
            ("secret create TOKEN --host a.com", "1234567\n", 2, &["- spec.value: "]),
            (
                "secret create TOKEN --host a.com",
                "20261128\n",
                2,
                &["- spec.value: is too easy to guess"],
            ),
            (
                create,
                "sk-secret-1\n",
                0,
                &["set, encrypted with", "api.example.com", "git", "For issues"],
            ),
            (create, "sk-secret-1\n", 1, &["a secret with this name exists already"]),
            ("secret list --name-prefix TO", "", 0, &["TOKEN", "api.example.com", "For issues"]),
            ("secret update TOKEN --host evil.example.org", "", 2, &["- value: "]),
            (
                "secret update TOKEN --host other.example.org --new-value",
                "sk-secret-2",
                0,
                &["other.example.org"],
            ),
            ("secret get NONE", "", 1, &["not found"]),
            ("agent update worker --secret NONE", "", 1, &["secret `NONE` not found"]),
            ("agent update worker --secret TOKEN", "", 0, &["secrets:", "TOKEN"]),
            ("secret delete TOKEN", "", 1, &["in use by at least one agent"]),
        ],
    )
    .await;
    let secret = get(&mesh, "secret get TOKEN").await;
    assert_eq!(
        (&secret["spec"]["value"], &secret["status"]["agentCount"]),
        (&Value::Null, &Value::from("1")),
        "{secret}"
    );
    check(
        &mesh,
        &[
            ("agent update worker --no-secrets", "", 0, &["worker"]),
            ("secret delete TOKEN", "", 0, &["secret TOKEN is deleted\n"]),
        ],
    )
    .await;

    // Tasks and messages. They have no names.
    let task =
        run(&mesh, "task create --title Sums --agent worker -o json", "", 0, &[]).await.json();
    let id = task["metadata"]["id"].as_str().unwrap();
    let message =
        run(&mesh, &format!("message create {id} -o json"), "first\ntry", 0, &[]).await.json();
    let said = message["metadata"]["id"].as_str().unwrap();
    let second =
        run(&mesh, &format!("message create {id} second -o json"), "", 0, &[]).await.json();
    let second = second["metadata"]["id"].as_str().unwrap();
    let unknown = "msg_01890a5d-ac96-774b-bcce-b302099a8057";
    check(
        &mesh,
        &[
            (&format!("message create {id}"), " ", 2, &["- spec.blocks: "]),
            (&format!("message update {said} 'another try'"), "", 0, &["another try", "queued"]),
            (
                &format!("message update {said} --revision 1 late"),
                "",
                1,
                &["it was changed concurrently"],
            ),
            (&format!("message get {said} -o yaml"), "", 0, &["text: another try"]),
            (&format!("message list {id}"), "", 0, &["another try", "queued", "second"]),
            (&format!("message list {id} --source assistant"), "", 0, &["SOURCE"]),
            (
                &format!("message delete {second}"),
                "",
                0,
                &[&format!("message {second} is deleted\n")],
            ),
            (&format!("message delete {second}"), "", 1, &["not found"]),
            (&format!("message get {unknown}"), "", 1, &["not found", unknown]),
            (&format!("message get {id}"), "", 2, &["message"]),
            ("message list nonsense", "", 2, &["- task: "]),
        ],
    )
    .await;
    assert_eq!(get(&mesh, &format!("task get {id}")).await["spec"]["title"], "Sums");
    assert_eq!(get(&mesh, &format!("message get {said}")).await["spec"]["task"], id);
    check(
        &mesh,
        &[
            (
                &format!("task update {id} --title Differences --max-turns 7"),
                "",
                0,
                &["Differences", "max turns:", "7"],
            ),
            (&format!("task update {id} --max-turns 5000"), "", 2, &["max_turns"]),
            (&format!("task update {id} --agent nobody"), "", 1, &["nobody"]),
            ("task list --phase await-input --agent worker", "", 0, &["Differences"]),
            ("task list --phase suspended", "", 0, &["ID"]),
            ("task list --created-after nonsense", "", 2, &["--created-after"]),
            ("agent delete worker", "", 1, &["in use by at least one task"]),
            // No worker runs, so it stays pending.
            (&format!("task suspend {id}"), "", 0, &["being suspended"]),
            (&format!("task resume {id}"), "", 0, &["await input"]),
            (&format!("task cancel {id} --reason 'changed my mind'"), "", 0, &[id]),
            ("task cancel nonsense", "", 2, &["- task: "]),
            (&format!("explain {id}"), "", 0, &["The task waits for ", "phase", "released by"]),
            (&format!("explain {id} -o json"), "", 0, &["\"waitingFor\": "]),
            ("explain task_01890a5d-ac96-774b-bcce-b302099a8057", "", 1, &["not found"]),
            (&format!("task delete {id} -o json"), "", 0, &["\"deleted\": "]),
            (&format!("task get {id}"), "", 1, &["not found"]),
            (&format!("message list {id}"), "", 1, &["not found"]),
            (&format!("message get {said}"), "", 1, &["not found"]),
        ],
    )
    .await;

    // Shell completions.
    for shell in ["bash", "zsh", "fish"] {
        let script =
            run(&mesh, &format!("completions {shell}"), "", 0, &["construct"]).await.output;
        for command in ["modelprovider", "resume", "completions", "--idempotency-key"] {
            let command = command.trim_start_matches("--");
            assert!(script.contains(command), "{shell} completes {command}");
        }
    }
    check(
        &mesh,
        &[
            ("completions nonsense", "", 2, &["bash"]),
            ("--gateway nonsense://x task list", "", 2, &["nonsense://x"]),
            ("nonsense", "", 2, &["nonsense"]),
            ("agent", "", 2, &["create"]),
            ("--version", "", 0, &["construct "]),
            ("version", "", 0, &["construct "]),
        ],
    )
    .await;
}
