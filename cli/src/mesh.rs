//! The mesh on this machine: in a checkout, its `dev` script runs it.

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

/// Runs `dev <command>`.
///
/// # Errors
/// When there is no checkout, or the script can't be started.
pub(crate) fn dev(command: &str) -> Result<Exit, Failure> {
    let script = script()?;
    let status = process::Command::new(&script).arg(command).status().map_err(|error| unusable(&script, &error))?;
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
        let root = script.parent().unwrap_or(Path::new("/"));
        let named = env::var_os(HOME).filter(|value| !value.is_empty());
        let home = root.join(named.unwrap_or_else(|| ".construct".into()));
        Ok(Self { script, home })
    }
}

/// The script of the checkout that `from` is in. Other projects may have a `dev` too: ours has its parts beside it.
fn find(from: &Path) -> Option<PathBuf> {
    from.ancestors().find(|dir| dir.join("scripts/dev/mesh.sh").is_file()).map(|dir| dir.join("dev"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_is_found_from_below_only() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = here.parent().unwrap();
        assert_eq!(find(&here.join("src")), Some(root.join("dev")));
        assert_eq!(find(Path::new("/")), None);
    }
}
