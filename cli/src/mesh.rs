//! The mesh on this machine. In a checkout, the `dev` script runs it; on macOS, a script that uses
//! Docker does.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process,
};

use crate::failure::{Exit, Failure};

/// The environment variable with the script's path, for use outside of a checkout.
pub(crate) const SCRIPT_VARIABLE: &str = "CONSTRUCT_DEV";

/// The environment variable with the mesh's data directory. Default: a directory in the checkout.
pub(crate) const HOME_VARIABLE: &str = "CONSTRUCT_HOME";

/// The script's path in a checkout. `dev` needs Linux.
const SCRIPT: &str = if cfg!(target_os = "macos") { "deploy/docker/mesh" } else { "dev" };

/// A file that identifies a checkout. Other projects may have a `dev` too.
const CHECKOUT_MARKER: &str = "scripts/dev/mesh.sh";

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

/// Finds the script.
///
/// # Errors
/// When there is no checkout.
pub(crate) fn script() -> Result<PathBuf, Failure> {
    let named = env::var_os(SCRIPT_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    named.or_else(|| env::current_dir().ok().and_then(|directory| find_script(&directory))).ok_or_else(|| {
        Failure::failed("the current directory is not in a checkout of Construct, which is needed to run the mesh")
            .hint(format!("change to a checkout, set {SCRIPT_VARIABLE} to its dev script, or use docker-compose.yml"))
    })
}

/// The failure when the script cannot be run.
pub(crate) fn unusable(script: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::failed(format!("{} cannot be run: {error}", script.display()))
}

/// The absolute paths of a mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MeshPaths {
    /// The script that runs it.
    pub(crate) script: PathBuf,
    /// The data directory.
    pub(crate) home: PathBuf,
}

impl MeshPaths {
    /// The paths of the current checkout, as the script resolves them.
    ///
    /// # Errors
    /// When there is no checkout.
    pub(crate) fn find() -> Result<Self, Failure> {
        let script = script()?;
        let script = fs::canonicalize(&script).map_err(|error| unusable(&script, &error))?;
        let root = root(&script);
        let named = env::var_os(HOME_VARIABLE).filter(|value| !value.is_empty());
        let home = root.join(named.unwrap_or_else(|| ".construct".into()));
        Ok(Self { script, home })
    }
}

/// The base of relative paths: the script's checkout, or else its directory.
pub(crate) fn root(script: &Path) -> &Path {
    checkout(script).or_else(|| script.parent()).unwrap_or(Path::new("/"))
}

/// The script of the checkout that contains a directory.
fn find_script(directory: &Path) -> Option<PathBuf> {
    checkout(directory).map(|dir| dir.join(SCRIPT))
}

fn checkout(path: &Path) -> Option<&Path> {
    path.ancestors().find(|dir| dir.join(CHECKOUT_MARKER).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_is_found_from_inside_a_checkout_only() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = here.parent().unwrap();
        let script = find_script(&here.join("src")).unwrap();
        assert_eq!(script, root.join(SCRIPT));
        assert_eq!(find_script(Path::new("/")), None);
        for script in [script, root.join("deploy/docker/mesh")] {
            assert!(script.is_file(), "{}", script.display());
            assert_eq!(super::root(&script), root);
        }
        assert_eq!(super::root(Path::new("/opt/own/script")), Path::new("/opt/own"));
    }
}
