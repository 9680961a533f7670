//! What is said to the service manager that started this process, where one did (`sd_notify(3)`).

use std::{env, ffi::OsStr, io, os::unix::net::UnixDatagram};

/// Names the socket that it listens on.
pub(crate) const SOCKET: &str = "NOTIFY_SOCKET";

/// Says how things are. That it cannot be said is told, and changes nothing: the manager has a time
/// limit.
pub(crate) fn say(state: &str) {
    let Some(place) = env::var_os(SOCKET).filter(|place| !place.is_empty()) else { return };
    if let Err(error) = send(&place, state) {
        eprintln!("warning: the service manager cannot be told: {error}");
    }
}

fn send(place: &OsStr, state: &str) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    #[cfg(target_os = "linux")]
    if let Some(name) = place.as_encoded_bytes().strip_prefix(b"@") {
        use std::os::{linux::net::SocketAddrExt as _, unix::net::SocketAddr};
        return socket
            .send_to_addr(state.as_bytes(), &SocketAddr::from_abstract_name(name)?)
            .map(drop);
    }
    socket.send_to(state.as_bytes(), place).map(drop)
}
