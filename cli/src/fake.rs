//! A fake gateway in the test's process. It plays a list of events, and can break connections.

use std::{
    net::{SocketAddr, TcpListener},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use construct_proto::v1::{
    self, Event, Message, Metadata, Task, TaskPhase, TaskStatus,
    agent_service_server::{AgentService, AgentServiceServer},
    event_service_server::{EventService, EventServiceServer},
    message_service_server::{MessageService, MessageServiceServer},
    task_service_server::{TaskService, TaskServiceServer},
};
use futures::{Stream, StreamExt as _};
use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::ServerTlsConfig};

use crate::gateway::Gateway;

/// The id of every task.
pub(crate) const TASK: &str = "task_1";
/// The id of every sent message.
pub(crate) const MESSAGE: &str = "message_1";

/// How a connection breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Break {
    /// The stream ends, as when the gateway stops.
    End,
    /// The stream fails with UNAVAILABLE.
    Unavailable,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Played once the message is sent. An event's cursor is its position, from 1.
    pub(crate) events: Vec<Event>,
    /// After how many events, and how, the next connections break.
    pub(crate) breaks: Vec<(usize, Break)>,
    /// Played once the task is canceled.
    pub(crate) on_cancel: Vec<Event>,
    pub(crate) phase: Option<TaskPhase>,
    /// The received calls, in order.
    pub(crate) calls: Vec<String>,
    /// How often sending a message fails at first.
    pub(crate) refusals: usize,
}

/// The running fake. It has its own runtime, so that its connections end with it.
pub(crate) struct Fake {
    shared: Shared,
    address: SocketAddr,
    runtime: Option<Runtime>,
}

#[derive(Clone)]
struct Shared {
    state: Arc<Mutex<State>>,
}

impl Fake {
    pub(crate) fn start(state: State) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Shared { state: Arc::new(Mutex::new(state)) };
        let runtime = Some(serve(&shared, listener, None));
        Self { shared, address, runtime }
    }

    /// Starts one with TLS.
    pub(crate) fn start_tls(tls: ServerTlsConfig) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Shared { state: Arc::default() };
        let runtime = Some(serve(&shared, listener, Some(tls)));
        Self { shared, address, runtime }
    }

    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn gateway(&self) -> Gateway {
        Gateway::new(&crate::context::Target {
            address: format!("http://{}", self.address),
            key: None,
            organization: None,
            tls: crate::context::TlsArgs::default(),
            session: None,
        })
        .unwrap()
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    /// Stops with all connections, and starts again on the same port.
    pub(crate) fn restart(&mut self) {
        self.stop();
        self.runtime = Some(serve(&self.shared, TcpListener::bind(self.address).unwrap(), None));
    }

    pub(crate) fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // On another thread, because it blocks. Afterwards the port is free.
            std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)))
                .join()
                .unwrap();
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop();
    }
}

fn serve(shared: &Shared, listener: TcpListener, tls: Option<ServerTlsConfig>) -> Runtime {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut server = tonic::transport::Server::builder();
    if let Some(tls) = tls {
        server = server.tls_config(tls).unwrap();
    }
    let router = server
        .add_service(AgentServiceServer::new(shared.clone()))
        .add_service(TaskServiceServer::new(shared.clone()))
        .add_service(MessageServiceServer::new(shared.clone()))
        .add_service(EventServiceServer::new(shared.clone()));
    listener.set_nonblocking(true).unwrap();
    runtime.spawn(async move {
        let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
        router.serve_with_incoming(incoming).await.unwrap();
    });
    runtime
}

impl Shared {
    fn record_call(&self, call: impl Into<String>) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap();
        state.calls.push(call.into());
        state
    }

    fn next(&self, at: usize, breaks: Option<(usize, Break)>) -> Next {
        if let Some((_, how)) = breaks.filter(|(after, _)| at >= *after) {
            return Next::Break(how);
        }
        let mut state = self.state.lock().unwrap();
        if state.calls.iter().any(|call| call.starts_with("cancel")) {
            let more = std::mem::take(&mut state.on_cancel);
            state.events.extend(more);
        }
        let sent = state.calls.iter().any(|call| call.starts_with("create_message"));
        match state.events.get(at).filter(|_| sent) {
            Some(event) => {
                Next::Event(Box::new(Event { cursor: (at + 1).to_string(), ..event.clone() }))
            }
            None => Next::Wait,
        }
    }

    fn task(&self) -> Response<Task> {
        let phase = self.state.lock().unwrap().phase.unwrap_or(TaskPhase::AwaitInput);
        Response::new(Task {
            metadata: Some(Metadata { id: TASK.to_owned(), ..Metadata::default() }),
            status: Some(TaskStatus { phase: phase.into(), ..TaskStatus::default() }),
            ..Task::default()
        })
    }
}

#[tonic::async_trait]
impl EventService for Shared {
    type SubscribeStream = Pin<Box<dyn Stream<Item = Result<Event, Status>> + Send>>;

    async fn subscribe(
        &self,
        request: Request<v1::SubscribeRequest>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let cursor = request.into_inner().cursor;
        let mut state = self.record_call(format!("subscribe {cursor}"));
        let breaks = if state.breaks.is_empty() { None } else { Some(state.breaks.remove(0)) };
        drop(state);
        let from: usize = cursor.parse().unwrap_or(0);
        let events = futures::stream::unfold(Some((from, self.clone())), move |state| async move {
            let (at, shared) = state?;
            loop {
                match shared.next(at, breaks) {
                    Next::Event(event) => return Some((Ok(*event), Some((at + 1, shared)))),
                    // A poll, as in the gateway.
                    Next::Wait => tokio::time::sleep(Duration::from_millis(2)).await,
                    Next::Break(Break::End) => return None,
                    Next::Break(Break::Unavailable) => {
                        return Some((Err(Status::unavailable("PostgreSQL is away")), None));
                    }
                }
            }
        });
        Ok(Response::new(events.boxed()))
    }
}

enum Next {
    Event(Box<Event>),
    Wait,
    Break(Break),
}

/// Methods that no test needs.
fn unimplemented<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("the fake does not do this"))
}

#[tonic::async_trait]
impl TaskService for Shared {
    async fn create_task(
        &self,
        request: Request<v1::CreateTaskRequest>,
    ) -> Result<Response<Task>, Status> {
        let spec = request.into_inner().spec.unwrap_or_default();
        drop(self.record_call(format!("create_task {} {}", spec.agent, spec.title)));
        Ok(self.task())
    }

    async fn get_task(
        &self,
        request: Request<v1::GetTaskRequest>,
    ) -> Result<Response<Task>, Status> {
        match request.into_inner().task.as_str() {
            TASK => Ok(self.task()),
            other => Err(Status::not_found(format!("there is no task {other}"))),
        }
    }

    async fn cancel_task(
        &self,
        request: Request<v1::CancelTaskRequest>,
    ) -> Result<Response<Task>, Status> {
        drop(self.record_call(format!("cancel_task {}", request.into_inner().reason)));
        Ok(self.task())
    }

    async fn list_tasks(
        &self,
        _: Request<v1::ListTasksRequest>,
    ) -> Result<Response<v1::ListTasksResponse>, Status> {
        unimplemented()
    }

    async fn update_task(
        &self,
        _: Request<v1::UpdateTaskRequest>,
    ) -> Result<Response<Task>, Status> {
        unimplemented()
    }

    async fn delete_task(
        &self,
        _: Request<v1::DeleteTaskRequest>,
    ) -> Result<Response<v1::DeleteTaskResponse>, Status> {
        unimplemented()
    }

    async fn suspend_task(
        &self,
        _: Request<v1::SuspendTaskRequest>,
    ) -> Result<Response<Task>, Status> {
        unimplemented()
    }

    async fn resume_task(
        &self,
        _: Request<v1::ResumeTaskRequest>,
    ) -> Result<Response<Task>, Status> {
        unimplemented()
    }

    async fn rewind_task(
        &self,
        _: Request<v1::RewindTaskRequest>,
    ) -> Result<Response<Task>, Status> {
        unimplemented()
    }

    async fn fork_task(&self, _: Request<v1::ForkTaskRequest>) -> Result<Response<Task>, Status> {
        unimplemented()
    }

    async fn explain_task(
        &self,
        _: Request<v1::ExplainTaskRequest>,
    ) -> Result<Response<v1::TaskExplanation>, Status> {
        unimplemented()
    }
}

#[tonic::async_trait]
impl MessageService for Shared {
    async fn create_message(
        &self,
        request: Request<v1::CreateMessageRequest>,
    ) -> Result<Response<Message>, Status> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        if state.refusals > 0 {
            state.refusals -= 1;
            state.calls.push(format!("refused {}", request.idempotency_key));
            return Err(Status::unavailable("NATS is away"));
        }
        state.calls.push(format!("create_message {}", request.idempotency_key));
        drop(state);
        let metadata = Metadata { id: MESSAGE.to_owned(), ..Metadata::default() };
        Ok(Response::new(Message { metadata: Some(metadata), spec: request.spec, status: None }))
    }

    async fn edit_message(
        &self,
        _: Request<v1::EditMessageRequest>,
    ) -> Result<Response<Message>, Status> {
        unimplemented()
    }

    async fn get_message(
        &self,
        _: Request<v1::GetMessageRequest>,
    ) -> Result<Response<Message>, Status> {
        unimplemented()
    }

    async fn list_messages(
        &self,
        _: Request<v1::ListMessagesRequest>,
    ) -> Result<Response<v1::ListMessagesResponse>, Status> {
        unimplemented()
    }

    async fn update_message(
        &self,
        _: Request<v1::UpdateMessageRequest>,
    ) -> Result<Response<Message>, Status> {
        unimplemented()
    }

    async fn delete_message(
        &self,
        _: Request<v1::DeleteMessageRequest>,
    ) -> Result<Response<v1::DeleteMessageResponse>, Status> {
        unimplemented()
    }
}

#[tonic::async_trait]
impl AgentService for Shared {
    async fn list_agents(
        &self,
        _: Request<v1::ListAgentsRequest>,
    ) -> Result<Response<v1::ListAgentsResponse>, Status> {
        let spec = v1::AgentSpec { name: "coder".to_owned(), ..v1::AgentSpec::default() };
        let agents = vec![v1::Agent { spec: Some(spec), ..v1::Agent::default() }];
        Ok(Response::new(v1::ListAgentsResponse { agents, page: None }))
    }

    async fn create_agent(
        &self,
        _: Request<v1::CreateAgentRequest>,
    ) -> Result<Response<v1::Agent>, Status> {
        unimplemented()
    }

    async fn get_agent(
        &self,
        _: Request<v1::GetAgentRequest>,
    ) -> Result<Response<v1::Agent>, Status> {
        unimplemented()
    }

    async fn update_agent(
        &self,
        _: Request<v1::UpdateAgentRequest>,
    ) -> Result<Response<v1::Agent>, Status> {
        unimplemented()
    }

    async fn delete_agent(
        &self,
        _: Request<v1::DeleteAgentRequest>,
    ) -> Result<Response<v1::DeleteAgentResponse>, Status> {
        unimplemented()
    }
}
