//! Notifications to the service manager that started this process (`sd_notify(3)`).

use std::{env, ffi::OsStr, io, os::unix::net::UnixDatagram};

/// The environment variable with the service manager's socket.
pub(crate) const SOCKET_VARIABLE: &str = "NOTIFY_SOCKET";

/// Notifies the service manager, if there is one. A failure is only a warning: the manager has a
/// timeout.
pub(crate) fn notify(state: &str) {
    let Some(address) = env::var_os(SOCKET_VARIABLE).filter(|address| !address.is_empty()) else {
        return;
    };
    if let Err(error) = send(&address, state) {
        eprintln!("warning: the service manager cannot be notified: {error}");
    }
}

fn send(address: &OsStr, state: &str) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    #[cfg(target_os = "linux")]
    if let Some(name) = address.as_encoded_bytes().strip_prefix(b"@") {
        use std::os::{linux::net::SocketAddrExt as _, unix::net::SocketAddr};
        return socket
            .send_to_addr(state.as_bytes(), &SocketAddr::from_abstract_name(name)?)
            .map(drop);
    }
    socket.send_to(state.as_bytes(), address).map(drop)
}
