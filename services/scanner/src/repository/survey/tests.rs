use super::*;

fn survey_files(files: &[(&str, &str)]) -> Survey {
    let (mut found, mut survey) = (Findings::new(&SurveyLimits::default()), Survey::default());
    for (path, text) in files {
        let source = SourceFile::new(path, text);
        manifests::collect(&source, &mut found);
        interfaces::collect(&source, &mut found);
        let language =
            languages::by_name(path).or_else(|| languages::by_shebang(text)).unwrap_or_default();
        commands::collect(&source, language, &mut found);
        found.start_next_file();
    }
    found.finish(&mut survey);
    survey
}

/// `kind name:line about [argument:line about, …]`
fn describe_entries(survey: &Survey) -> Vec<String> {
    let describe = |about: &Option<String>| {
        about.as_deref().map(|about| format!(" {about}")).unwrap_or_default()
    };
    let argument = |one: &Argument| format!("{}:{}{}", one.name, one.line, describe(&one.about));
    let entry = |one: &EntryPoint| {
        let arguments: Vec<String> = one.arguments.iter().map(argument).collect();
        format!(
            "{:?} {}:{}{} {arguments:?}",
            one.kind,
            one.name,
            one.place.line,
            describe(&one.about)
        )
    };
    survey.entries.iter().map(entry).collect()
}

#[test]
fn argparse_click_typer_and_fire_commands_are_found() {
    let argparse = "\"\"\"Converts.\"\"\"\nimport argparse\np = argparse.ArgumentParser(\n    prog='conv',\n    description='Converts '\n    'tables.',\n)\np.add_argument('input')\np.add_argument('-o', '--out', required=True, help=\"where (it) goes\")\n";
    assert_eq!(
        describe_entries(&survey_files(&[("tool.py", argparse)])),
        [
            "Command conv:3 Converts tables. [\"input:8\", \"-o, --out (required):9 where (it) goes\"]"
        ]
    );
    let click = "import click\n\n@click.command()\n@click.option('--count', default=1, help='How often.')\n@click.argument('name')\ndef say_hello(count, name):\n    \"\"\"Greets.\"\"\"\n";
    assert_eq!(
        describe_entries(&survey_files(&[("a.py", click)])),
        ["Command say-hello:6 Greets. [\"--count:4 How often.\", \"NAME:5\"]"]
    );
    let typer = "import typer\napp = typer.Typer()\n\n@app.command()\ndef run(path: str, deep: bool = False):\n    \"\"\"Runs.\"\"\"\n";
    assert_eq!(
        describe_entries(&survey_files(&[("a.py", typer)])),
        ["Command run:5 Runs. [\"path: str:5\", \"deep: bool:5\"]"]
    );
    assert_eq!(
        describe_entries(&survey_files(&[("x.py", "import fire\nfire.Fire(main)\n")])),
        ["Command x:2 []"]
    );
    assert_eq!(
        describe_entries(&survey_files(&[(
            "x.py",
            "'''Does it.'''\nif __name__ == '__main__':\n  f()\n"
        )])),
        ["Script x:2 Does it. []"]
    );
}

#[test]
fn clap_commands_are_found_derived_and_built() {
    let derived = "use clap::Parser;\n\n/// Finds things.\n#[derive(Parser, Debug)]\n#[command(name = \"find-it\")]\nstruct Cli {\n    /// What to find.\n    pattern: String,\n    /// How many threads.\n    #[arg(short, long)]\n    max_threads: Option<usize>,\n}\n";
    assert_eq!(
        describe_entries(&survey_files(&[("src/cli.rs", derived)])),
        [
            "Command find-it:6 Finds things. [\"pattern: String:8 What to find.\", \"--max-threads: Option<usize>:11 How many threads.\"]"
        ]
    );
    let built = "use clap::{Arg, Command};\nfn f() {\n    Command::new(\"x\")\n        .about(\"Does x\")\n        .arg(Arg::new(\"file\").help(\"The file\"))\n}\nfn g() { std::process::Command::new(\"ls\"); }\n";
    assert_eq!(
        describe_entries(&survey_files(&[("src/b.rs", built)])),
        ["Command x:3 Does x [\"file:5 The file\"]"]
    );
}

#[test]
fn commander_yargs_cobra_flags_and_getopts_are_found() {
    let commander = "#!/usr/bin/env node\nconst { program } = require('commander');\nprogram.description('Serves.')\n  .option('-p, --port <n>', 'the port')\n  .command('build <dir>');\n";
    assert_eq!(
        describe_entries(&survey_files(&[("bin/serve.js", commander)])),
        ["Command serve:4 Serves. [\"-p, --port <n>:4 the port\", \"subcommand build <dir>:5\"]"]
    );
    let yargs = "import yargs from 'yargs';\nyargs(x).option('size', {\n  type: 'number',\n  describe: 'how large',\n});\n";
    assert_eq!(
        describe_entries(&survey_files(&[("cut.mjs", yargs)])),
        ["Command cut:2 [\"--size:2 how large\"]"]
    );
    let cobra = "package main\nvar c = &cobra.Command{\n\tUse: \"sync [dir]\",\n\tShort: \"Syncs.\",\n}\nfunc init() {\n\tc.Flags().BoolP(\"dry\", \"n\", false, \"only say\")\n}\n";
    assert_eq!(
        describe_entries(&survey_files(&[("sync.go", cobra)])),
        ["Command sync [dir]:2 Syncs. [\"--dry:7 only say\"]"]
    );
    let flag = "package main\nvar n = flag.Int(\"n\", 1, \"how many\")\n";
    assert_eq!(
        describe_entries(&survey_files(&[("cmd/many/main.go", flag)])),
        ["Command many:2 [\"-n:2 how many\"]"]
    );
    let shell = "#!/bin/bash\n# Backs up.\n\nwhile getopts \"vf:\" o; do\n  case $o in\n  --dry-run|-d) x=1 ;; # only say\n  esac\ndone\n";
    assert_eq!(
        describe_entries(&survey_files(&[("backup.sh", shell)])),
        ["Shell backup:1 Backs up. [\"-v:4\", \"-f VALUE:4\", \"--dry-run, -d:6 only say\"]"]
    );
}

#[test]
fn manifests_yield_packages_programs_and_scripts() {
    let survey = survey_files(&[
        (
            "Cargo.toml",
            "[package]\nname = \"grab\"\ndescription = \"Grabs.\"\n[[bin]]\nname = \"gr\"\npath = \"src/x.rs\"\n[dependencies]\nclap = \"4\"\n[workspace]\nmembers = [\"crates/*\"]\n",
        ),
        (
            "py/pyproject.toml",
            "[project]\nname = \"pyt\"\ndependencies = [\"Typer>=0.9\"]\n[project.scripts]\npyt = \"pyt.cli:main\"\n",
        ),
        (
            "old/setup.py",
            "setup(\n    name='old',\n    entry_points={'console_scripts': [\n        'old-run = old.main:run',\n    ]},\n)\n",
        ),
        (
            "js/package.json",
            "{\n \"name\": \"@s/tool\",\n \"bin\": \"cli.js\",\n \"scripts\": {\n  \"build\": \"tsc\"\n },\n \"workspaces\": [\"packages/*\"]\n}\n",
        ),
        ("Makefile", "CC := gcc\n# Makes all.\nall: x\nx: ## Makes x\n\tcc\n.PHONY: all\n"),
        ("justfile", "set shell := ['sh']\n# Ships it.\nship target='prod': build\n\tx\n"),
        ("Dockerfile", "FROM x\nENTRYPOINT [\"run\"]\n"),
    ]);
    let modules: Vec<String> = survey
        .modules
        .iter()
        .map(|one| {
            format!(
                "{} {} {:?} {:?} {}:{}",
                one.kind, one.name, one.frameworks, one.members, one.place.path, one.place.line
            )
        })
        .collect();
    assert_eq!(
        modules,
        [
            "cargo grab [\"clap\"] [\"crates/*\"] Cargo.toml:2",
            "node @s/tool [] [\"packages/*\"] js/package.json:2",
            "python old [] [] old/setup.py:2",
            "python pyt [\"typer\"] [] py/pyproject.toml:2",
        ]
    );
    assert_eq!(
        describe_entries(&survey),
        [
            "Binary gr:5 []",
            "Binary tool:3 []",
            "Binary old-run:4 []",
            "Binary pyt:5 []",
            "Recipe just ship:3 Ships it. [\"target='prod':3\"]",
            "Recipe make all:3 Makes all. []",
            "Recipe make x:4 Makes x []",
            "PackageScript build:5 tsc []",
            "Container .:2 [\"run\"] []",
        ]
    );
}

#[test]
fn interfaces_workflows_and_notebooks_are_read() {
    let survey = survey_files(&[
        (
            "api.yaml",
            "openapi: 3.0.0\npaths:\n  /orders/{id}:\n    parameters: []\n    get:\n      operationId: getOrder\n      summary: One order\n    delete: {}\ncomponents: {}\n",
        ),
        (
            "api.json",
            "{\"openapi\": \"3.0.0\",\n \"paths\": {\"/x\": {\n  \"post\": {\"summary\": \"Makes x\"}}}}\n",
        ),
        ("a.proto", "service Orders {\n  // Makes one.\n  rpc Create(A) returns (B);\n}\n"),
        (
            ".github/workflows/w.yml",
            "name: Release\non:\n  workflow_dispatch:\n    inputs:\n      version:\n        description: Which one\n        required: true\n",
        ),
        (
            "n.ipynb",
            "{\"cells\": [\n {\"cell_type\": \"markdown\", \"source\": [\"# Sales\\n\"]},\n {\"cell_type\": \"code\", \"metadata\": {\"tags\": [\"parameters\"]},\n  \"source\": [\"year = 2024\\n\"]}]}\n",
        ),
    ]);
    let operations: Vec<String> = survey
        .operations
        .iter()
        .map(|one| {
            format!(
                "{} {} {} {}",
                one.kind,
                one.name,
                one.place.line,
                one.about.clone().unwrap_or_default()
            )
        })
        .collect();
    assert_eq!(
        operations,
        [
            "openapi GET /orders/{id} 5 One order",
            "openapi DELETE /orders/{id} 8 ",
            "openapi POST /x 3 Makes x",
            "proto Orders.Create 3 Makes one."
        ]
    );
    assert_eq!(
        describe_entries(&survey),
        [
            "Notebook n.ipynb:2 Sales [\"year:4 default 2024\"]",
            "Workflow Release:3 [\"version:5 Which one\"]"
        ]
    );
}

#[test]
fn brief_keeps_its_limit_and_starts_with_key_facts() {
    let files: Vec<(String, String)> = (0..300)
        .map(|n| {
            (
                format!("t{n}.py"),
                format!("import click\n@click.command(help='Does {n}')\n@click.option('--x')\ndef f{n}(): pass\n"),
            )
        })
        .collect();
    let files: Vec<(&str, &str)> =
        files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    let survey = survey_files(&files);
    for room in [0, 10, 100, 1000, 5000, 100_000] {
        let text = crate::repository::brief(&survey, room);
        assert!(text.chars().count() <= room, "{room}: {}", text.chars().count());
    }
    let text = crate::repository::brief(&survey, 2000);
    assert!(
        text.contains("f0 (t0.py:4): Does 0 [click]\n    --x (:3)") && text.contains("more\n"),
        "{text}"
    );
}

/// The length of the longest name.
fn longest_name(survey: &Survey) -> usize {
    let arguments = survey.entries.iter().flat_map(|one| &one.arguments).map(|one| &one.name);
    let names = survey
        .entries
        .iter()
        .map(|one| &one.name)
        .chain(survey.modules.iter().map(|one| &one.name));
    let members = survey.modules.iter().flat_map(|one| &one.members);
    let operations = survey.operations.iter().map(|one| &one.name);
    arguments.chain(names).chain(members).chain(operations).map(String::len).max().unwrap_or(0)
}

#[test]
fn findings_are_truncated_while_reading() {
    let limits =
        SurveyLimits { entries: 50, operations: 50, modules: 5, ..SurveyLimits::default() };
    let make = "a:\n".repeat(10_000);
    let derive = format!("// clap\n{}", "#[derive(Args)]\nenum a\n".repeat(2_000));
    let long = "x".repeat(100_000);
    let member = format!("[package]\nname = \"{long}\"\n[workspace]\nmembers = [\"{long}\"]\n");
    let proto = format!("service {long} {{\n{}}}\n", "  rpc b(C) returns (D);\n".repeat(2000));
    let scripts: String = (0..2_000).map(|n| format!("\"s{n}\": \"x\",\n")).collect();
    let package = format!("{{\"scripts\": {{\n{scripts}\"z\": \"\"}}}}");
    let (mut found, mut survey) = (Findings::new(&limits), Survey::default());
    for n in 0..4 {
        for (name, text) in [
            ("Makefile", &make),
            ("a.rs", &derive),
            ("Cargo.toml", &member),
            ("a.proto", &proto),
            ("package.json", &package),
        ] {
            let path = format!("d{n}/{name}");
            let source = SourceFile::new(&path, text);
            manifests::collect(&source, &mut found);
            interfaces::collect(&source, &mut found);
            commands::collect(&source, languages::by_name(&path).unwrap_or_default(), &mut found);
            found.start_next_file();
            assert!(found.len() <= 3 * (2 * 50 + 2 * findings::MAX_PER_FILE), "{}", found.len());
        }
    }
    found.finish(&mut survey);
    assert_eq!((survey.entries.len(), survey.operations.len(), survey.modules.len()), (50, 50, 5));
    assert!(
        survey.entries.iter().all(|one| one.arguments.len() <= limits.arguments),
        "{:?}",
        survey.entries
    );
    assert_eq!(longest_name(&survey), 200);
    assert_eq!(survey.truncated.len(), 3, "{:?}", survey.truncated);
}

#[test]
fn scripts_of_large_manifests_have_correct_lines() {
    let scripts: String = (0..5_000).map(|n| format!("\"s{n}\": \"x\",\n")).collect();
    let package = format!("{{\"s7\": 1,\n\"scripts\": {{\n{scripts}\"z\": \"\"}}}}");
    let survey = survey_files(&[("package.json", &package)]);
    let seventh =
        survey.entries.iter().find(|one| one.name == "s7").expect("it is one of the first");
    assert_eq!(seventh.place.line, 10);
}
