//! The mesh on this machine: in a checkout, its `dev` script runs it, or on macOS the one that has
//! Docker do so.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process,
};

use crate::failure::{Exit, Failure};

/// Names the script when the current directory is not in a checkout.
pub(crate) const VARIABLE: &str = "CONSTRUCT_DEV";

/// Names the folder with everything of a mesh; in the checkout, when it is not set.
pub(crate) const HOME: &str = "CONSTRUCT_HOME";

/// The script, in a checkout. What `dev` starts needs Linux.
const SCRIPT: &str = if cfg!(target_os = "macos") { "deploy/docker/mesh" } else { "dev" };

/// What a checkout has. Other projects may have a `dev` too.
const PARTS: &str = "scripts/dev/mesh.sh";

/// Runs `dev <command>`.
///
/// # Errors
/// When there is no checkout, or the script can't be started.
pub(crate) fn dev(command: &str) -> Result<Exit, Failure> {
    let script = script()?;
    let status = process::Command::new(&script)
        .arg(command)
        .status()
        .map_err(|error| unusable(&script, &error))?;
    if status.success() {
        Ok(Exit::Completed)
    } else {
        Err(Failure::failed(format!("{} {command}: {status}", script.display())))
    }
}

/// The script.
///
/// # Errors
/// When there is no checkout.
pub(crate) fn script() -> Result<PathBuf, Failure> {
    let named = env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    named.or_else(|| env::current_dir().ok().and_then(|from| find(&from))).ok_or_else(|| {
        Failure::failed("there is no checkout of Construct here or above, so there is nothing to run the mesh from")
            .hint(format!("go to a checkout, name its dev script in {VARIABLE}, or use docker-compose.yml"))
    })
}

/// What to say of a script that cannot be run.
pub(crate) fn unusable(script: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::failed(format!("{} cannot be run: {error}", script.display()))
}

/// A mesh: what runs it, and where everything of it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// The script, with its whole path.
    pub(crate) script: PathBuf,
    /// The folder, with its whole path.
    pub(crate) home: PathBuf,
}

impl Place {
    /// That of the checkout we are in, as the script itself would find it.
    ///
    /// # Errors
    /// When there is no checkout.
    pub(crate) fn find() -> Result<Self, Failure> {
        let script = script()?;
        let script = fs::canonicalize(&script).map_err(|error| unusable(&script, &error))?;
        let root = root(&script);
        let named = env::var_os(HOME).filter(|value| !value.is_empty());
        let home = root.join(named.unwrap_or_else(|| ".construct".into()));
        Ok(Self { script, home })
    }
}

/// What relative paths begin at: the script's checkout, or else where it lies.
pub(crate) fn root(script: &Path) -> &Path {
    checkout(script).or_else(|| script.parent()).unwrap_or(Path::new("/"))
}

/// The script of the checkout that `from` is in.
fn find(from: &Path) -> Option<PathBuf> {
    checkout(from).map(|dir| dir.join(SCRIPT))
}

fn checkout(from: &Path) -> Option<&Path> {
    from.ancestors().find(|dir| dir.join(PARTS).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_is_found_from_below_only() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = here.parent().unwrap();
        let script = find(&here.join("src")).unwrap();
        assert_eq!(script, root.join(SCRIPT));
        assert_eq!(find(Path::new("/")), None);
        for script in [script, root.join("deploy/docker/mesh")] {
            assert!(script.is_file(), "{}", script.display());
            assert_eq!(super::root(&script), root);
        }
        assert_eq!(super::root(Path::new("/opt/own/script")), Path::new("/opt/own"));
    }
}
