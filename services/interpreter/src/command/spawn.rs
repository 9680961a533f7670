//! Starting the process of a command.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Resource, Rlimit, Signal};
use rustix::thread::CpuSet;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::processes::Group;
use super::{CommandLimits, piped};

/// Open files per process.
const MAX_OPEN_FILES: u64 = 4096;

struct Job {
    command: Command,
    /// See [`Group::new`].
    mark: Option<String>,
    runtime: Handle,
    reply: oneshot::Sender<io::Result<(Group, Child)>>,
}

/// Starts a process from a thread that lives as long as the service.
///
/// "Kill me when my parent dies" means the parent *thread* to Linux. A process started from a
/// thread of a runtime's pool would be killed when that thread idles away.
///
/// The process comes with its group, which kills all of its descendants when it is dropped. Killing
/// the process alone could leave a sandbox behind that bubblewrap has created but not yet bound to
/// its own lifetime.
pub(super) async fn spawn(command: Command, mark: Option<String>) -> io::Result<(Group, Child)> {
    let (reply, started) = oneshot::channel();
    let job = Job { command, mark, runtime: Handle::current(), reply };
    let thread_ended = || io::Error::other("the thread that starts commands has ended");
    spawner()?.send(job).map_err(|_| thread_ended())?;
    started.await.map_err(|_| thread_ended())?
}

fn spawner() -> io::Result<&'static Sender<Job>> {
    static SPAWNER: OnceLock<Result<Sender<Job>, io::ErrorKind>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, jobs) = std::sync::mpsc::channel::<Job>();
        let thread = std::thread::Builder::new().name("command-spawner".to_owned());
        thread
            .spawn(move || {
                for Job { mut command, mark, runtime, reply } in jobs {
                    let _context = runtime.enter();
                    let spawned = command.spawn().map(|child| (Group::new(&child, mark), child));
                    // Without a receiver, the group is dropped here or in the channel, and then the
                    // child.
                    drop(reply.send(spawned));
                }
            })
            .map(|_| sender)
            .map_err(|e| e.kind())
    });
    spawner.as_ref().map_err(|kind| io::Error::from(*kind))
}

/// Makes the process the leader of its own session and group, limits its resources, passes on the
/// `inherited` descriptors, and starts it in `directory`.
pub(super) fn isolate(
    command: &mut Command,
    limits: &CommandLimits,
    inherited: Vec<OwnedFd>,
    directory: Option<OwnedFd>,
) {
    piped(command);
    let (bounds, processors) = (self::limits(limits), processors(limits.cores));
    let service = rustix::process::getpid();
    let prepare = move || {
        // Bubblewrap requests the same once it runs. Here it covers the time before: if the service
        // is killed, no process is left that continues the command or holds the service's port.
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        if rustix::process::getppid() != Some(service) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        rustix::process::setsid()?;
        for (resource, limit) in bounds {
            rustix::process::setrlimit(resource, limit)?;
        }
        if let Some(processors) = &processors {
            rustix::thread::sched_setaffinity(None, processors)?;
        }
        // Closes inherited descriptors that the parent of the service left open (a directory would
        // lead out of the sandbox). SAFETY: a system call on numbers alone; it only marks
        // descriptors to be closed by `exec`.
        if unsafe {
            libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC)
        } != 0
        {
            return Err(io::Error::last_os_error());
        }
        for descriptor in &inherited {
            fcntl_setfd(descriptor, FdFlags::empty())?;
        }
        if let Some(directory) = &directory {
            rustix::process::fchdir(directory)?;
        }
        Ok(())
    };
    // SAFETY: the closure runs in the child between fork and exec, where only async-signal-safe
    // calls are allowed. It makes plain system calls on values made before the fork: it allocates
    // nothing, takes no lock and cannot panic.
    unsafe {
        command.pre_exec(prepare);
    }
}

/// Chooses `count` of the processors that the service may use, each command beginning where the
/// previous one ended. `None` if the service has no more processors, or their number is unknown.
fn processors(count: usize) -> Option<CpuSet> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let own = rustix::thread::sched_getaffinity(None).ok()?;
    let own: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|processor| own.is_set(*processor)).collect();
    if own.len() <= count {
        return None;
    }
    let mut chosen = CpuSet::new();
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    for index in 0..count {
        chosen.set(own[(first.wrapping_add(index)) % own.len()]);
    }
    Some(chosen)
}

/// Limits of each process, never above the service's own.
fn limits(limits: &CommandLimits) -> [(Resource, Rlimit); 5] {
    let limit = |resource, wanted: u64| {
        let hard = rustix::process::getrlimit(resource).maximum.unwrap_or(u64::MAX);
        let value = Some(wanted.min(hard));
        (resource, Rlimit { current: value, maximum: value })
    };
    [
        limit(Resource::Core, 0),
        limit(Resource::Nofile, MAX_OPEN_FILES),
        limit(Resource::Fsize, limits.file_bytes),
        // Not the address space: programs with a garbage collector reserve far more of it than they
        // use.
        limit(Resource::Data, limits.memory_bytes),
        // The service ends the command first, with the reason.
        limit(Resource::Cpu, limits.cpu.as_secs() + 1),
    ]
}
