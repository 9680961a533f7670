//! The Unix socket of processes that run as the same user.

use std::{
    fs,
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net,
    },
    path::Path,
};

use anyhow::Context as _;
use tokio::net::UnixListener;

/// Listens on the socket at `path`, which nobody else may open. One that an earlier process left is replaced; anything else is not.
pub(crate) fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    let shown = path.display();
    if let Ok(found) = fs::symlink_metadata(path) {
        anyhow::ensure!(found.file_type().is_socket(), "{shown} is there already and is no socket");
        anyhow::ensure!(net::UnixStream::connect(path).is_err(), "somebody listens on {shown} already");
        fs::remove_file(path).with_context(|| format!("the old socket {shown} cannot be removed"))?;
    }
    // Bound under another name, so that it never stands there with other rights.
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(format!(".{}", std::process::id()));
    let unfinished = Path::new(&unfinished);
    let listener = UnixListener::bind(unfinished).with_context(|| format!("cannot listen on {shown}"))?;
    let placed = fs::set_permissions(unfinished, fs::Permissions::from_mode(0o600))
        .and_then(|()| fs::rename(unfinished, path))
        .with_context(|| format!("cannot listen on {shown}"));
    if placed.is_err() {
        _ = fs::remove_file(unfinished);
    }
    placed.map(|()| listener)
}
