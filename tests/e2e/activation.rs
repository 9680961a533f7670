//! A listening socket that another process owns, as with systemd: clients wait while the mesh
//! starts, and none is refused.

use std::{
    fs,
    net::TcpListener,
    os::unix::{
        fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, symlink},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use construct_proto::v1::{
    ListAgentsRequest, ListAgentsResponse, agent_service_client::AgentServiceClient,
};
use construct_tests::{
    client::TURN_TIMEOUT,
    mesh::{Mesh, Service, binary, free_address, guest_cache, with_socket},
    wait::until,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpStream, UnixDatagram},
    task::JoinHandle,
    time::timeout,
};
use tonic::{Status, transport::Endpoint};

use crate::identity::REQUIRED;

/// The time limit for the start of a mesh, with servers whose data is created.
const START_TIMEOUT: Duration = Duration::from_secs(400);

/// A listening socket, its path, and its inode number.
fn listen(folder: &Path) -> (UnixListener, PathBuf, u64) {
    let path = folder.join("gateway.socket");
    let socket = UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let number = fs::metadata(&path).unwrap().ino();
    (socket, path, number)
}

/// A request of a connected client. It needs the whole gateway, including the database.
async fn ask(path: &Path) -> JoinHandle<Result<ListAgentsResponse, Status>> {
    let channel =
        Endpoint::from_shared(format!("unix:{}", path.display())).unwrap().connect().await.unwrap();
    tokio::spawn(async move {
        let answer =
            AgentServiceClient::new(channel).list_agents(ListAgentsRequest::default()).await;
        answer.map(tonic::Response::into_inner)
    })
}

#[tokio::test]
async fn inherited_socket_is_served_by_gateway_and_its_successor() {
    let mut mesh = Mesh::prepare(&[REQUIRED]).await.unwrap();
    let (socket, path, number) = listen(mesh.home());
    for _ in 0..2 {
        // No process serves yet.
        let asked = ask(&path).await;
        mesh.spawn_with_socket(Service::Gateway, &socket).unwrap();
        let answer = timeout(TURN_TIMEOUT, asked).await.expect("it is answered").unwrap();
        // Without credentials, although logins are required: authenticated by the peer's user.
        assert_eq!(answer.unwrap().agents.len(), 0);
        assert_eq!(mesh.stop(Service::Gateway).await.unwrap(), 0);
        assert_eq!(
            fs::metadata(&path).unwrap().ino(),
            number,
            "the socket is not the gateway's to remove"
        );
    }

    // A socket that other users could open would make them the operator.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    mesh.spawn_with_socket(Service::Gateway, &socket).unwrap();
    let refused = mesh.wait_until_ready(Service::Gateway).await.unwrap_err().to_string();
    assert!(refused.contains("others may open"), "{refused}");
    assert_eq!(fs::metadata(&path).unwrap().ino(), number);
}

/// An installation, run by the script that people use.
struct Installation {
    home: TempDir,
    script: PathBuf,
    target: PathBuf,
}

impl Installation {
    fn new() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let target =
            binary("construct").unwrap().parent().and_then(Path::parent).unwrap().to_owned();
        let installation =
            Self { home: tempfile::tempdir().unwrap(), script: root.join("dev"), target };
        // Ports that no other test takes.
        let names = ["nats", "nats_monitor", "postgres", "gateway", "providers", "operator"];
        let health = ["gateway", "reconciler", "interpreter", "providers", "scanner"]
            .map(|it| format!("{it}_health"));
        let ports = names.map(str::to_owned).into_iter().chain(health);
        let lines =
            ports.map(|name| format!("dev_port_{name}={}\n", free_address().unwrap().port()));
        fs::write(installation.home.path().join("env"), lines.collect::<String>()).unwrap();
        // Shares the guest that other tests' services have compiled.
        let cache = guest_cache().unwrap();
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&cache).unwrap();
        symlink(cache, installation.home.path().join("cache")).unwrap();
        installation
    }

    fn configure<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.home.path())
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CONSTRUCT_DEV", &self.script)
            .env("CONSTRUCT_HOME", self.home.path())
    }

    fn daemon(&self, socket: &UnixListener, manager: &Path) -> Child {
        let (mut command, input) =
            with_socket(&binary("construct").unwrap(), &["daemon", "run"], socket).unwrap();
        self.configure(&mut command)
            .env("NOTIFY_SOCKET", manager)
            .stdin(input)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// The address of the operator protocol, as printed for people.
    fn operator(&self) -> Option<String> {
        let text = fs::read_to_string(self.home.path().join("env")).unwrap();
        text.lines()
            .find_map(|line| line.strip_prefix("export CONSTRUCT_OPERATOR="))
            .map(str::to_owned)
    }

    /// The process id of this name.
    fn process(&self, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.home.path().join(format!("run/{name}.pid"))).ok()?;
        text.split(' ').next().map(str::to_owned)
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        // Ends the processes that a failed test left.
        let mut down = Command::new(&self.script);
        _ = self.configure(&mut down).arg("down").stderr(Stdio::null()).status();
    }
}

fn signal(name: &str, process: &str) {
    assert!(Command::new("kill").args([name, process]).status().unwrap().success());
}

async fn wait_for_exit(daemon: &mut Child) -> ExitStatus {
    until("the daemon to end", START_TIMEOUT, async || daemon.try_wait().unwrap().ok_or("it runs"))
        .await
}

/// The answer to a line of the operator protocol.
async fn send_line(operator: &str, line: &Value) -> Value {
    let mut stream = TcpStream::connect(operator).await.unwrap();
    stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    let mut answers = BufReader::new(stream).lines();
    let answer = timeout(TURN_TIMEOUT, answers.next_line()).await.expect("it is answered").unwrap();
    serde_json::from_str(&answer.expect("a line")).unwrap()
}

async fn next_notification(manager: &UnixDatagram) -> String {
    let mut text = [0; 256];
    let length = timeout(START_TIMEOUT, manager.recv(&mut text))
        .await
        .expect("the service manager gets a message")
        .unwrap();
    String::from_utf8_lossy(&text[..length]).lines().next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn first_request_starts_mesh_and_supervisor_restarts_services() {
    let installation = Installation::new();
    let (socket, path, number) = listen(installation.home.path());
    let manager_path = installation.home.path().join("manager");
    let manager = UnixDatagram::bind(&manager_path).unwrap();

    let asked = ask(&path).await;
    let mut daemon = installation.daemon(&socket, &manager_path);
    let answer = timeout(START_TIMEOUT, asked).await.expect("it is answered").unwrap();
    assert_eq!(answer.unwrap().agents.len(), 0);
    assert_eq!(next_notification(&manager).await, "READY=1");
    let operator = installation.operator().expect("no other process has its port");
    let sessions = send_line(&operator, &json!({"id": "1", "type": "list_sessions"})).await;
    assert_eq!(sessions["type"], "sessions", "{sessions}");
    // A second gateway without the socket would leave clients waiting for ever.
    let mut up = Command::new(&installation.script);
    let refused = installation.configure(&mut up).args(["up", "--built"]).output().unwrap();
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && errors.contains("the daemon runs this mesh"), "{errors}");

    // A process dies: everything stops, the service manager sees a failure, and clients that
    // connect meanwhile are served by the next instance.
    signal("-KILL", &installation.process("reconciler").unwrap());
    assert_eq!(next_notification(&manager).await, "STOPPING=1");
    assert_eq!(wait_for_exit(&mut daemon).await.code(), Some(1));
    assert!(
        installation.process("postgres").is_none() && installation.process("gateway").is_none()
    );
    assert_eq!(fs::metadata(&path).unwrap().ino(), number);
    // Without the operator protocol, whose port another mesh may have taken by now.
    let taken = TcpListener::bind(&operator).unwrap();
    let asked = ask(&path).await;
    let mut daemon = installation.daemon(&socket, &manager_path);
    timeout(START_TIMEOUT, asked).await.expect("it is answered").unwrap().unwrap();
    assert_eq!(next_notification(&manager).await, "READY=1");
    assert_eq!(installation.operator(), None);
    drop(taken);

    signal("-TERM", &daemon.id().to_string());
    assert_eq!(next_notification(&manager).await, "STOPPING=1");
    assert_eq!(wait_for_exit(&mut daemon).await.code(), Some(0));
    assert!(installation.process("nats").is_none());
    assert_eq!(fs::metadata(&path).unwrap().ino(), number);
}
