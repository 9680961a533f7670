//! Files that a script must not reach: by path, by symbolic link, and by a link that is swapped in
//! between the check and the opening.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags};

use super::*;

/// All calls that touch the file `PATH`.
const CALLS: &[&str] = &[
    "read_file(PATH)",
    "await tools.read(PATH)",
    "create_file(PATH, 'x')",
    "save_file(FILE, PATH)",
    "edit_file(PATH, [{old: 'canary', new: 'x'}])",
    "list_files(PATH)",
    "grep('canary', PATH)",
    "find_file('*', PATH)",
    "delete_file(PATH, true)",
    "await import(PATH)",
];

/// Every call on every path, which must fail with this error name.
fn calls(paths: &[&str], name: &'static str, except: &[&str]) -> Vec<(String, &'static str)> {
    let templates = CALLS.iter().filter(|way| !except.iter().any(|part| way.contains(part)));
    let call = |way: &str, path: &str| {
        // An import must be relative to the script to be a path.
        let path = if way.contains("import") && !path.starts_with("./") && !path.starts_with("../")
        {
            format!("./{path}")
        } else {
            path.to_owned()
        };
        (way.replace("PATH", &Value::from(path).to_string()), name)
    };
    templates.flat_map(|template| paths.iter().map(move |path| call(template, path))).collect()
}

impl Bench {
    async fn refuses_all(&self, calls: &[(String, &'static str)]) {
        let file = Value::from(self.attached.id.as_str()).to_string();
        let calls: Vec<(String, &'static str)> =
            calls.iter().map(|(call, name)| (call.replace("FILE", &file), *name)).collect();
        let calls: Vec<(&str, &'static str)> =
            calls.iter().map(|(call, name)| (call.as_str(), *name)).collect();
        self.refuses(&calls).await;
        assert_eq!(
            std::fs::read_to_string(self.outside("secret")).expect("the file still exists"),
            CANARY
        );
        assert_eq!(
            std::fs::read_dir(self.outside("")).expect("a directory").count(),
            1,
            "something was created outside"
        );
    }
}

#[tokio::test]
async fn paths_do_not_leave_the_workspace() {
    let bench = Bench::with_files();
    let absolute = bench.outside("secret").display().to_string();
    let sneaky = bench.work("../outside/secret").display().to_string();
    let up = "../".repeat(40) + "etc/passwd";
    let relative = [
        "../outside/secret",
        "./a/../../outside/secret",
        "a/b/../../../outside/secret",
        "..//outside//secret",
        up.as_str(),
    ];
    bench.refuses_all(&calls(&relative, "OutsideWorkspace", &[])).await;
    // An absolute path is not a module path at all; another test covers it.
    let absolute = [
        "/etc/passwd",
        "/proc/self/environ",
        "/proc/self/root/etc/passwd",
        "/proc/1/cmdline",
        "/dev/stdin",
        "/dev/fd/0",
        "/sys/kernel",
        "//etc/passwd",
        "/./etc/./passwd",
        absolute.as_str(),
        sneaky.as_str(),
    ];
    bench.refuses_all(&calls(&absolute, "OutsideWorkspace", &["import"])).await;
    // Names that other programs treat as a way out are ordinary names.
    let names = [
        "%2e%2e/outside/secret",
        "..%2foutside%2fsecret",
        "..\\outside\\secret",
        "\u{2024}\u{2024}/outside/secret",
        "\u{ff0e}\u{ff0e}/outside/secret",
        "~/secret",
        "~root/secret",
        "$HOME/secret",
        "`id`/secret",
        "file:///etc/passwd",
        ".../outside/secret",
        "..;/outside/secret",
        "..\u{200b}/outside/secret",
    ];
    bench.refuses_all(&calls(&names, "FileNotFound", &["create_file", "save_file"])).await;
    bench.refuses_all(&calls(&["a\0b/secret"], "InvalidPath", &["import"])).await;
}

#[tokio::test]
async fn symbolic_links_do_not_leave_the_workspace() {
    let bench = Bench::with_files();
    let deep = "../".repeat(40) + "etc";
    for (name, target) in [
        ("up", Path::new("../outside")),
        ("absolute", &bench.outside("")),
        ("climbing", Path::new(&deep)),
        ("chain", Path::new("up")),
        ("root", Path::new("/")),
        ("magic", Path::new("/proc/self/root")),
        ("here", Path::new("/proc/self/cwd")),
        ("descriptors", Path::new("/proc/self/fd")),
        ("init", Path::new("/proc/1/root")),
    ] {
        symlink(target, bench.work(name)).expect("linked");
    }
    std::fs::create_dir(bench.work("sub")).expect("made");
    symlink("../up/secret", bench.work("sub/file")).expect("linked");
    symlink("../../outside/new", bench.work("sub/dangling")).expect("linked");
    let within = [
        "up/secret",
        "absolute/secret",
        "chain/secret",
        "climbing/passwd",
        "root/etc/passwd",
        "magic/etc/passwd",
        "here/x",
        "descriptors/0",
        "init/etc/passwd",
        "sub/../up/secret",
        "up/../outside/secret/.",
    ];
    // Paths that resolve lexically (`up/..` is the workspace) are resolved before any link is read.
    let lexical = ["up/../outside/secret/."];
    let through: Vec<&str> =
        within.iter().copied().filter(|path| !lexical.contains(path)).collect();
    bench.refuses_all(&calls(&through, "OutsideWorkspace", &[])).await;
    bench.refuses_all(&calls(&lexical, "FileNotFound", &["create_file", "save_file"])).await;
    // The link itself may be deleted; its target stays.
    bench
        .refuses_all(&calls(&["sub/file", "sub/dangling"], "OutsideWorkspace", &["delete_file"]))
        .await;
    bench
        .withstands(&[(
            "try { delete_file('sub/file') } catch (error) { if (error.name !== 'FileNotFound') throw error }
             const found = [...list_files('.', true), ...find_file('**').paths, ...grep('canary').matches];
             JSON.stringify(found).includes('secret')",
            Is("false"),
        )])
        .await;
    assert!(bench.outside("secret").exists());
}

#[test]
fn link_swapped_in_during_open_leads_nowhere() {
    let bench = Bench::with_files();
    std::fs::create_dir(bench.work("d")).expect("made");
    std::fs::write(bench.work("d/secret"), "inside").expect("written");
    std::fs::write(bench.work("d/code.js"), "export default 'inside'").expect("written");
    std::fs::write(bench.outside("code.js"), format!("export default '{CANARY}'"))
        .expect("written");
    symlink("../outside", bench.work("link")).expect("linked");
    let script = "
        const counts = {inside: 0, refused: 0};
        const tried = async (call, expected) => {
            try {
                const result = JSON.stringify(await call());
                if (result.includes('canary')) throw new Error('leaked ' + result);
                counts.inside++;
            } catch (error) {
                if (!['OutsideWorkspace', 'FileNotFound', 'FileChanged', 'NotADirectory', 'IoError', 'TextNotFound'].includes(error.name)) throw error;
                counts.refused++;
            }
        };
        for (let i = 0; i < 150 || (counts.inside === 0 || counts.refused === 0) && i < 2000; i++) {
            await Promise.all([
                tried(() => tools.read_file('d/secret')),
                tried(() => tools.create_file('d/made/' + i, 'x')),
                tried(() => tools.save_file(FILE, 'd/saved')),
                tried(() => tools.edit_file('d/secret', [{old: 'canary', new: 'edited'}])),
                tried(() => tools.list_files('d', true)),
                tried(() => tools.grep('canary|inside', 'd').then(found => found.matches.map(match => match.text))),
                tried(() => tools.delete_file('d/made', true)),
            ]);
        }
        [counts.inside > 0, counts.refused > 0]";
    let script = script.replace("FILE", &Value::from(bench.attached.id.as_str()).to_string());
    let (here, there, done) = (bench.work("d"), bench.work("link"), AtomicBool::new(false));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(CWD, &here, CWD, &there, RenameFlags::EXCHANGE)
                    .expect("both exist");
            }
        });
        let outcome = runtime.block_on(bench.run(&script));
        done.store(true, Ordering::Relaxed);
        outcome
    });
    assert_eq!(difference(&outcome, Is("[true,true]")), None);
    assert_eq!(
        std::fs::read_to_string(bench.outside("secret")).expect("the file still exists"),
        CANARY
    );
    for made in ["made", "saved"] {
        assert!(!bench.outside(made).exists(), "something was created outside");
    }
}

#[tokio::test]
async fn special_files_and_endless_trees_are_handled() {
    let bench = Bench::with_files();
    rustix::fs::mknodat(
        CWD,
        bench.work("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .expect("a pipe");
    symlink("loop", bench.work("loop")).expect("linked");
    symlink(".", bench.work("again")).expect("linked");
    let file = Value::from(bench.attached.id.as_str()).to_string();
    let save = |path: &str| format!("save_file({file}, '{path}')");
    let [to_pipe, to_loop, below_file, to_itself] = ["pipe", "loop", "inside.txt/x", "."].map(save);
    bench
        .refuses(&[
            (to_pipe.as_str(), "NotARegularFile"),
            (to_loop.as_str(), "InvalidPath"),
            (below_file.as_str(), "NotADirectory"),
            (to_itself.as_str(), "IsADirectory"),
            ("read_file('pipe')", "NotARegularFile"),
            ("create_file('pipe', 'x')", "NotARegularFile"),
            ("edit_file('pipe', [{old: 'a', new: 'b'}])", "NotARegularFile"),
            ("await import('./pipe')", "ImportFailed"),
            ("read_file('loop')", "InvalidPath"),
            ("create_file('loop', 'x')", "InvalidPath"),
            ("read_file('again/'.repeat(60) + 'inside.txt')", "InvalidPath"),
            ("create_file('inside.txt/x', 'x')", "NotADirectory"),
            ("create_file('.', 'x')", "IsADirectory"),
            ("delete_file('.')", "InvalidArguments"),
        ])
        .await;
    let tree =
        "let path = ''; for (let i = 0; i < 200; i++) path += 'd/'; create_file(path + 'f', 'x');
        let listed = 'all'; try { list_files('.', true) } catch (error) { listed = error.name }
        [listed, find_file('**/f').paths.length >= 0, delete_file('d', true).deleted > 200].join()";
    bench.withstands(&[(tree, Is("TooManyEntries,true,true"))]).await;
}

#[tokio::test]
async fn only_attached_files_can_be_saved() {
    let bench = Bench::with_files();
    let blobs = bench.directory.path().join("blobs");
    let other = OrganizationId::from_uuid(Uuid::from_u128(7));
    let foreign = store_file(&blobs, other, "theirs", CANARY.as_bytes());
    let own = store_file(
        &blobs,
        OrganizationId::LOCAL,
        "elsewhere",
        format!("{CANARY} of another task").as_bytes(),
    );
    let mut ids = vec![
        "../../../outside/secret".to_owned(),
        "/etc/passwd".to_owned(),
        "sha256:../../../outside/secret".to_owned(),
        "sha256:".to_owned(),
        "a.txt".to_owned(),
        bench.attached.sha256.clone(),
        format!("sha256:{}", bench.attached.sha256.to_uppercase()),
        format!(" {}", bench.attached.id),
        "x\0y".to_owned(),
        "x".repeat(128),
    ];
    for file in [foreign, own] {
        ids.extend([format!("sha256:{}", file.sha256), file.id]);
    }
    let call = |file: &str| format!("save_file({}, 'saved')", Value::from(file));
    let mut calls: Vec<(String, &'static str)> =
        ids.iter().map(|file| (call(file), "FileNotAttached")).collect();
    calls.extend(["".to_owned(), "x".repeat(129)].map(|file| (call(&file), "InvalidArguments")));
    bench.refuses_all(&calls).await;
    assert!(!bench.work("saved").exists());
    let saved =
        format!("save_file({:?}, 'made/saved').bytes + read_file('made/saved')", bench.attached.id);
    bench.withstands(&[(saved.as_str(), Is("13attached text"))]).await;
}
