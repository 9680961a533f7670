//! The mesh on this machine: in a checkout, its `dev` script runs it.

use std::{
    env,
    path::{Path, PathBuf},
    process,
};

use crate::failure::{Exit, Failure};

/// Names the script when the current directory is not in a checkout.
const VARIABLE: &str = "CONSTRUCT_DEV";

/// Runs `dev <command>`.
///
/// # Errors
/// When there is no checkout, or the script can't be started.
pub(crate) fn dev(command: &str) -> Result<Exit, Failure> {
    let script = match env::var_os(VARIABLE) {
        Some(path) => PathBuf::from(path),
        None => env::current_dir().ok().and_then(|from| find(&from)).ok_or_else(|| {
            Failure::failed("there is no checkout of Construct here or above, so there is nothing to run the mesh from")
                .hint(format!("go to a checkout, name its dev script in {VARIABLE}, or use docker-compose.yml"))
        })?,
    };
    let status = process::Command::new(&script)
        .arg(command)
        .status()
        .map_err(|error| Failure::failed(format!("{} cannot be run: {error}", script.display())))?;
    if status.success() {
        Ok(Exit::Completed)
    } else {
        Err(Failure::failed(format!("{} {command}: {status}", script.display())))
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
