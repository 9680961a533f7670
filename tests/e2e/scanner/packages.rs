//! Real packages of the public registries.

use construct_tests::repositories;
use sha2::{Digest as _, Sha256};

use super::*;

/// A script that really searches a package for a word that the test knows.
fn search_script(commit: &str, word: &str) -> Value {
    let code = format!(
        "const root = '{commit}/tree';\n\
         const all = grep({word}, root, {{literal: true, exclude: '.construct/**'}}).matches;\n\
         const found = all.find(match => !match.path.includes('.construct'));\n\
         const path = found.path.replace(root + '/', '');\n\
         const candidate = {candidate};\n\
         candidate.entry_point.path = path; candidate.entry_point.line = found.line; delete candidate.entry_point.symbol;\n\
         candidate.evidence[0].path = path; candidate.evidence[0].line = found.line;\n\
         candidate.evidence[0].quote = {word};\n\
         print(JSON.stringify({{candidates: [candidate]}}));",
        word = json!(word),
        candidate = valid_candidate(),
    );
    json!({"turns": [{"code": code}, {"text": "{{last_result}}"}]})
}

#[tokio::test]
async fn real_packages_are_scanned_end_to_end() {
    let (mesh, github) = begin().await;
    for (name, package, word) in [
        ("rust", repositories::RUST, "fn main()"),
        ("python", repositories::PYTHON, "import click"),
        ("node", repositories::NODE, "commander"),
    ] {
        let commit = format!("{:040x}", name.len() as u128 + 0xabc0);
        let archive = std::fs::read(repositories::package(package)).unwrap();
        let repository = format!("octo/{name}");
        github.commit_archive(&repository, &commit, archive);
        mesh.scripted_agent(name, &search_script(&commit, word)).await.unwrap();
        let scan = create(&mesh, scan_spec(&repository, name)).await;
        let status = wait_for_phase(&mesh, &scan, Review).await;
        assert_eq!(status.candidates, 1, "{name}: {status:?}");
        assert!(status.files > 10, "{name}: {status:?}");
        // The findings in the real files were verified against them.
        let content = candidates(&mesh, &scan).await.remove(0).content.unwrap();
        let (entry, evidence) = (content.entry_point.unwrap(), &content.evidence[0]);
        assert!(
            entry.line > 0 && entry.path == evidence.path && evidence.quote == word,
            "{name}: {entry:?} {evidence:?}"
        );
    }
}

#[tokio::test]
async fn workspace_folder_is_scanned() {
    let (mesh, _github) = begin().await;
    let folder = mesh.folder("workspace").unwrap();
    let files = repositories::monorepo(&folder, 300).unwrap();
    mesh.scripted_agent(
        "m",
        &json!([{"text": answer(&[candidate("workspace", "Cargo.toml", 1, "[workspace]")])}]),
    )
    .await
    .unwrap();
    let spec = v1::ScanSpec {
        source: Some(v1::scan_spec::Source::Folder(folder.display().to_string())),
        model: "m".into(),
        ..Default::default()
    };
    let scan = create(&mesh, spec).await;
    let status = wait_for_phase(&mesh, &scan, Review).await;
    assert_eq!(status.candidates, 1, "{status:?}");
    assert_eq!(status.files + status.files_skipped, i64::try_from(files).unwrap(), "{status:?}");
}

/// The numbers in a text, in order.
fn numbers(text: &str) -> Vec<u64> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

/// Measurements and long trials: `./dev test -P nightly`.
mod nightly {
    use super::*;

    #[tokio::test]
    async fn monorepo_of_10000_files_is_scanned() {
        let (mesh, github) = begin().await;
        let archive = std::fs::read(repositories::package(repositories::MONOREPO)).unwrap();
        let commit: String =
            Sha256::digest(&archive).iter().take(20).map(|byte| format!("{byte:02x}")).collect();
        github.commit_archive("octo/mono", &commit, archive);
        // In a debug build on a busy machine, it takes minutes.
        let patience = Duration::from_secs(600);
        // The model searches all files and their symbol outlines, and proposes its findings in each
        // language.
        let code = format!(
            "const root = '{commit}/tree';\n\
             const listed = grep('execute_from_command_line', root + '/.construct/outline', {{literal: true}}).matches.length;\n\
             const proposal = (name, word, inside) => {{\n\
               const found = grep(word, root, {{literal: true, exclude: '.construct/**'}}).matches.find(match => match.path.includes(inside));\n\
               const candidate = {{...{candidate}}};\n\
               const path = found.path.replace(root + '/', '');\n\
               candidate.name = name;\n\
               candidate.entry_point = {{path, line: found.line, command: name + ' --help'}};\n\
               candidate.evidence = [{{path, line: found.line, quote: word, statement: 'It is defined here.'}}];\n\
               return candidate;\n\
             }};\n\
             const candidates = [\n\
               proposal('django-admin', 'def execute_from_command_line(', 'python/'),\n\
               proposal('hexyl', 'fn main() {{', 'crates/hexyl/src/'),\n\
               proposal('svgo', 'function makeProgram(program)', 'node/svgo/'),\n\
             ];\n\
             if (listed === 0) throw new Error('its symbols are not listed');\n\
             print(JSON.stringify({{candidates}}));",
            candidate = valid_candidate(),
        );
        mesh.scripted_agent("m", &json!({"turns": [{"code": code}, {"text": "{{last_result}}"}]}))
            .await
            .unwrap();
        let scan = create(&mesh, scan_spec("octo/mono", "m")).await;
        let status = wait_for_phase_within(&mesh, &scan, Review, patience).await;
        assert_eq!(
            (status.commit.as_str(), status.candidates, status.refused),
            (commit.as_str(), 3, 0),
            "{status:?}"
        );
        assert_eq!(status.files + status.files_skipped, repositories::MONOREPO_FILES, "{status:?}");
        assert!(status.files >= 10_000 && status.files_skipped < 100, "{status:?}");
        let mut found: Vec<_> = candidates(&mesh, &scan)
            .await
            .into_iter()
            .map(|one| one.content.unwrap())
            .map(|content| (content.name, content.entry_point.unwrap().path))
            .collect();
        found.sort();
        let places = [
            ("django-admin", "python/Django/django/core/management/__init__.py"),
            ("hexyl", "crates/hexyl/src/main.rs"),
            ("svgo", "node/svgo/lib/svgo/coa.js"),
        ];
        assert_eq!(found, places.map(|(name, path)| (name.to_owned(), path.to_owned())));

        // The events: the number of files is reported from when they are there.
        let all = events(&mesh, &scan).await;
        for event in &all {
            let is_known = !matches!(event.phase(), Queued | Snapshot);
            assert_eq!(event.files, if is_known { status.files } else { 0 }, "{event:?}");
        }
        let last = all.last().unwrap();
        assert_eq!((last.phase(), last.candidates), (Review, 3), "{last:?}");
        let survey = all.iter().find(|event| event.message.contains("entry points")).unwrap();
        let [languages, entries, symbols, outlined] = numbers(&survey.message)[..] else {
            panic!("{survey:?}")
        };
        assert!(
            languages >= 10 && entries >= 100 && symbols >= 30_000 && outlined >= 2000,
            "{survey:?}"
        );

        // The model's overview: languages, packages and commands of all files, within its size
        // limit.
        let asked = transcript(&mesh, &scan).await;
        for told in [
            "Python (",
            "JavaScript (",
            "Rust (",
            "Django",
            "core-js",
            "hexyl",
            "svgo",
            "sqlite-utils",
            "[clap]",
            "[click]",
            "[uses commander]",
            "[argparse]",
        ] {
            assert!(asked.contains(told), "{told}: {asked}");
        }
        wait_until_clean(&mesh).await;

        // A scan with a smaller file limit ends without candidates.
        let limits = v1::ScanLimits { max_files: 5000, ..Default::default() };
        let scan =
            create(&mesh, v1::ScanSpec { limits: Some(limits), ..scan_spec("octo/mono", "m") })
                .await;
        let status = wait_for_phase_within(&mesh, &scan, v1::ScanPhase::Failed, patience).await;
        assert!(
            status.reason.contains("more entries than a repository may have") && status.files == 0,
            "{status:?}"
        );
        wait_until_clean(&mesh).await;
        assert_eq!(github.complaints(), Vec::<String>::new());
    }
}
