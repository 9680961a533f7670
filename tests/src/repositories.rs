//! Real repositories to scan: packages of the public registries, which `./dev test` fetches, and
//! large ones assembled from them.

use std::{
    io,
    path::{Path, PathBuf},
};

/// A command line tool in Rust that uses clap's derive.
pub const RUST: &str = "hexyl-0.14.0.crate";
/// A command line tool in Python that uses click.
pub const PYTHON: &str = "sqlite_utils-3.38.tar.gz";
/// A command line tool in JavaScript that uses commander.
pub const NODE: &str = "svgo-3.3.2.tgz";

/// A monorepo that `./dev test` assembles from those and two large packages: Django, with commands
/// that use argparse, and core-js. It is packed as GitHub packs repositories.
pub const MONOREPO: &str = "monorepo-1.tar.gz";
/// Its number of files.
pub const MONOREPO_FILES: i64 = 10_549;

/// The path of a fetched archive.
///
/// # Panics
/// When it is missing: `./dev test` fetches it, and names the folder in
/// `CONSTRUCT_TEST_REPOSITORIES`.
pub fn package(name: &str) -> PathBuf {
    let folder = std::env::var_os("CONSTRUCT_TEST_REPOSITORIES");
    let folder = folder.expect("CONSTRUCT_TEST_REPOSITORIES is set; run the tests with ./dev test");
    let path = Path::new(&folder).join(name);
    assert!(path.is_file(), "{} is missing; ./dev test fetches it", path.display());
    path
}

/// Larger files are not copied: the test is about the number of files.
const MAX_COPIED: u64 = 4 * 1024;

/// Assembles a workspace from the small files of the crates that cargo has unpacked for this
/// project: at least `files`, in folders by crate. Returns their number.
///
/// # Errors
/// When the disk fails, or there are too few files.
pub fn monorepo(into: &Path, files: usize) -> io::Result<usize> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let sources =
        home.ok_or_else(|| io::Error::other("cargo's home is not known"))?.join("registry/src");
    let mut crates = Vec::new();
    for registry in std::fs::read_dir(sources)? {
        for one in std::fs::read_dir(registry?.path())? {
            crates.push(one?.path());
        }
    }
    crates.sort();
    std::fs::create_dir_all(into.join("crates"))?;
    let mut count = 1;
    for folder in &crates {
        if count >= files {
            break;
        }
        let name = folder.file_name().unwrap_or_default();
        count += copy(folder, &into.join("crates").join(name))?;
    }
    std::fs::write(
        into.join("Cargo.toml"),
        "[workspace]\nmembers = [\"crates/*\"]\nresolver = \"3\"\n",
    )?;
    if count < files {
        return Err(io::Error::other(format!("cargo has unpacked {count} files only")));
    }
    Ok(count)
}

fn copy(from: &Path, to: &Path) -> io::Result<usize> {
    std::fs::create_dir_all(to)?;
    let mut count = 0;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (kind, to) = (entry.file_type()?, to.join(entry.file_name()));
        if kind.is_dir() {
            count += copy(&entry.path(), &to)?;
        } else if kind.is_file() && entry.metadata()?.len() <= MAX_COPIED {
            std::fs::copy(entry.path(), to)?;
            count += 1;
        }
    }
    Ok(count)
}
