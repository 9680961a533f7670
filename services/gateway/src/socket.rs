//! The Unix socket for processes of the same user: created by the gateway, or passed to it.
//!
//! The parent of the gateway may listen on the socket already (systemd does, before anything runs)
//! and pass the descriptor. Clients then wait in the kernel's queue while the gateway starts or
//! restarts, and are never refused.

use std::{
    env, fs,
    os::{
        fd::{FromRawFd as _, OwnedFd, RawFd},
        unix::{
            fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
            net,
        },
    },
    path::Path,
};

use anyhow::Context as _;
use socket2::{SockRef, Type};
use tokio::net::UnixListener;

use crate::identity::authenticate::current_uid;

/// The first passed descriptor (`sd_listen_fds(3)`).
const FIRST_PASSED_FD: RawFd = 3;

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Socket {
    /// Accepts connections.
    pub(crate) listener: UnixListener,
    /// Whether it existed before this process. Then clients wait until the gateway can answer, as
    /// they waited for its start.
    pub(crate) passed: bool,
}

/// The passed socket, or else the configured one, which is created. The file of a passed socket is
/// never touched: it belongs to its creator as well.
pub(crate) fn open(
    passed: Option<OwnedFd>,
    configured: Option<&Path>,
) -> anyhow::Result<Option<Socket>> {
    if let Some(passed) = passed {
        let listener = check(passed, configured)?;
        return Ok(Some(Socket { listener, passed: true }));
    }
    let made = configured.map(bind).transpose()?;
    Ok(made.map(|listener| Socket { listener, passed: false }))
}

/// The descriptor that was passed to this process, if any (`LISTEN_PID` and `LISTEN_FDS`). To be
/// called once.
pub(crate) fn passed_socket() -> anyhow::Result<Option<OwnedFd>> {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    // Descriptors passed to a parent process are not for this one.
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS").unwrap_or_default() {
        0 => return Ok(None),
        1 => {}
        count => {
            anyhow::bail!("{count} sockets were passed, and only one is served: a Unix socket")
        }
    }
    let kind = fs::read_link(format!("/proc/self/fd/{FIRST_PASSED_FD}")).unwrap_or_default();
    let is_socket = kind.to_str().is_some_and(|kind| kind.starts_with("socket:"));
    anyhow::ensure!(is_socket, "a socket was announced, and none was passed");
    // SAFETY: who started this process has opened the descriptor for it and says so; nothing here
    // has opened it or uses it, and it is taken once.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(FIRST_PASSED_FD) }))
}

/// Checks that a passed socket is as the gateway would create it: everyone who can connect is the
/// operator.
fn check(passed: OwnedFd, configured: Option<&Path>) -> anyhow::Result<UnixListener> {
    let socket = SockRef::from(&passed);
    let address = socket.local_addr().context("what was passed is no socket")?;
    let fits = address.is_unix() && socket.r#type()? == Type::STREAM && socket.is_listener()?;
    anyhow::ensure!(
        fits,
        "the socket that was passed is no Unix stream socket that is listened on"
    );
    let path = address.as_pathname().context("the socket that was passed has no path")?;
    let display = path.display();
    if let Some(configured) = configured {
        let same = configured == path;
        anyhow::ensure!(
            same,
            "the socket that was passed is {display}, and gateway_socket is {}",
            configured.display()
        );
    }
    let metadata = fs::symlink_metadata(path)
        .with_context(|| format!("the socket that was passed, {display}, is gone"))?;
    anyhow::ensure!(
        metadata.file_type().is_socket(),
        "{display} is not the socket that was passed"
    );
    anyhow::ensure!(current_uid() == Some(metadata.uid()), "{display} belongs to another user");
    anyhow::ensure!(
        metadata.mode() & 0o077 == 0,
        "others may open {display}: its mode has to be 0600 (SocketMode=0600)"
    );
    socket.set_cloexec(true)?;
    let listener = net::UnixListener::from(passed);
    listener.set_nonblocking(true)?;
    Ok(UnixListener::from_std(listener)?)
}

/// Listens on the socket at `path`, which no other user may open. A stale socket of an earlier
/// process is replaced; other files are not.
fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    let display = path.display();
    if let Ok(metadata) = fs::symlink_metadata(path) {
        anyhow::ensure!(
            metadata.file_type().is_socket(),
            "{display} is there already and is no socket"
        );
        anyhow::ensure!(
            net::UnixStream::connect(path).is_err(),
            "somebody listens on {display} already"
        );
        fs::remove_file(path)
            .with_context(|| format!("the old socket {display} cannot be removed"))?;
    }
    // Bound under another name, so that it never exists with wider permissions.
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(format!(".{}", std::process::id()));
    let unfinished = Path::new(&unfinished);
    let listener =
        UnixListener::bind(unfinished).with_context(|| format!("cannot listen on {display}"))?;
    let placed = fs::set_permissions(unfinished, fs::Permissions::from_mode(0o600))
        .and_then(|()| fs::rename(unfinished, path))
        .with_context(|| format!("cannot listen on {display}"));
    if placed.is_err() {
        _ = fs::remove_file(unfinished);
    }
    placed.map(|()| listener)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn passed_socket_must_match_the_configuration() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let made = net::UnixListener::bind(&path).expect("it is bound");
        let again = || OwnedFd::from(made.try_clone().expect("another descriptor"));
        let refused = |passed: OwnedFd, configured: Option<&Path>| {
            open(Some(passed), configured).expect_err("it is refused").to_string()
        };
        let mode = |mode| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("its mode is set")
        };

        mode(0o660);
        assert!(refused(again(), None).contains("others may open"));
        mode(0o600);
        let socket = open(Some(again()), Some(&path)).expect("it fits").expect("one was passed");
        assert!(socket.passed && path.exists());
        drop(socket);
        assert!(path.exists(), "it is not ours to remove");
        assert!(
            refused(again(), Some(Path::new("/elsewhere")))
                .contains("gateway_socket is /elsewhere")
        );

        let port = TcpListener::bind("127.0.0.1:0").expect("a port");
        assert!(refused(port.into(), None).contains("no Unix stream socket"));
        let datagrams =
            net::UnixDatagram::bind(folder.path().join("datagrams")).expect("it is bound");
        assert!(refused(datagrams.into(), None).contains("no Unix stream socket"));
        let (connected, _other) = net::UnixStream::pair().expect("a pair");
        assert!(refused(connected.into(), None).contains("no Unix stream socket"));
        let file = fs::File::open("/dev/null").expect("a file");
        assert!(refused(file.into(), None).contains("no socket"));
        fs::remove_file(&path).expect("it is removed");
        assert!(refused(again(), None).contains("is gone"));
        fs::write(&path, "").expect("it is written");
        assert!(refused(again(), None).contains("is not the socket"));
    }

    #[test]
    fn socket_of_another_process_is_ignored() {
        // Nothing is passed to tests.
        assert!(passed_socket().expect("nothing is wrong").is_none());
    }
}
