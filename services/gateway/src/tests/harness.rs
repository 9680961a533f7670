//! A gateway for tests, and helpers.

use std::{fmt::Debug, net::SocketAddr, time::Duration};

use construct_bus::testing::NatsServer;
use construct_proto::v1::{
    self, agent_service_client::AgentServiceClient, event_service_client::EventServiceClient,
    message_service_client::MessageServiceClient,
    model_provider_service_client::ModelProviderServiceClient,
    model_service_client::ModelServiceClient,
    organization_service_client::OrganizationServiceClient, task_service_client::TaskServiceClient,
};
use construct_runtime::{Common, Context};
use construct_store::{Store, testing::Database};
use tokio::{net::TcpListener, runtime::Handle};
use tonic::{
    Code, Request, Status, Streaming,
    transport::{Channel, Endpoint},
};

use crate::Config;

/// Longer than anything that a test waits for.
const TIMEOUT: Duration = Duration::from_secs(20);

pub(super) struct Gateway {
    pub(super) context: Context,
    pub(super) nats: NatsServer,
    pub(super) database: Database,
    pub(super) address: SocketAddr,
    pub(super) operator: SocketAddr,
    channel: Channel,
}

impl Gateway {
    /// Starts a gateway in local mode and waits until it is ready.
    pub(super) async fn start() -> Self {
        Self::start_local(Config::default()).await
    }

    /// Starts a gateway whose configuration has local mode, and waits until it is ready.
    pub(super) async fn start_local(config: Config) -> Self {
        let (database, nats) = tokio::join!(Database::new(), NatsServer::start());
        let (database_url, nats_url) = (database.url().to_owned(), nats.url().to_owned());
        let gateway = Self::launch_with(database, nats, &database_url, &nats_url, config).await;
        gateway.wait_until_ready().await;
        gateway
    }

    /// Starts a gateway with any configuration, and waits until it is ready.
    pub(super) async fn start_with(config: Config) -> Self {
        let (database, nats) = tokio::join!(Database::new(), NatsServer::start());
        let (database_url, nats_url) = (database.url().to_owned(), nats.url().to_owned());
        let gateway = Self::launch_with(database, nats, &database_url, &nats_url, config).await;
        let who_am_i = || async {
            let mut request = Request::new(v1::WhoAmIRequest {});
            request
                .metadata_mut()
                .insert("authorization", "Bearer ct_x".parse().expect("a header"));
            OrganizationServiceClient::new(gateway.channel())
                .who_am_i(request)
                .await
                .map(drop)
                .map_err(|status| status.code())
        };
        // Without the database no caller can be authenticated.
        _ = wait_until("the gateway is ready", who_am_i, |answer| {
            *answer == Err(Code::Unauthenticated)
        })
        .await;
        gateway
    }

    /// Starts a gateway without waiting: the test finds out itself when it is ready.
    pub(super) async fn start_unready(config: Config) -> Self {
        let (database, nats) = tokio::join!(Database::new(), NatsServer::start());
        let (database_url, nats_url) = (database.url().to_owned(), nats.url().to_owned());
        Self::launch_with(database, nats, &database_url, &nats_url, config).await
    }

    /// Waits until requests are served.
    pub(super) async fn wait_until_ready(&self) {
        let ask = || async { self.agents().list_agents(v1::ListAgentsRequest::default()).await };
        _ = wait_until("the gateway is ready", ask, Result::is_ok).await;
    }

    /// Starts a gateway with these addresses of PostgreSQL and NATS, which may be wrong, without
    /// waiting.
    pub(super) async fn launch(
        database: Database,
        nats: NatsServer,
        database_url: &str,
        nats_url: &str,
    ) -> Self {
        Self::launch_with(database, nats, database_url, nats_url, Config::default()).await
    }

    async fn launch_with(
        database: Database,
        nats: NatsServer,
        database_url: &str,
        nats_url: &str,
        config: Config,
    ) -> Self {
        // The reconciler, which creates the streams, does not run here.
        drop(nats.bus().await);
        let common = Common {
            nats_url: nats_url.into(),
            database_url: Some(database_url.into()),
            data_dir: nats.dir().join("data"),
            master_key: Some(MASTER_KEY.into()),
            secrets_key: Some(SECRETS_KEY.into()),
            token_key: Some(TOKEN_KEY.into()),
            shutdown_grace: Duration::from_secs(5),
            ..Common::default()
        };
        let context = Context::new("gateway", common);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address: SocketAddr = listener.local_addr().expect("it is bound");
        let operator = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let operator_address = operator.local_addr().expect("it is bound");
        let operator = Some(operator);
        let (starting, runtime) = (context.clone(), Handle::current());
        // As in the process, the start runs on a thread of its own, not in a task: it need not be
        // `Send`.
        std::thread::spawn(move || {
            // Ends with an error only when the test ends first.
            _ = runtime.block_on(crate::start(listener, operator, None, &config, &starting));
        });
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        Self {
            context,
            nats,
            database,
            address,
            operator: operator_address,
            channel: endpoint.connect_lazy(),
        }
    }

    pub(super) fn store(&self) -> Store {
        self.database.store()
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(super) fn agents(&self) -> AgentServiceClient<Channel> {
        AgentServiceClient::new(self.channel())
    }

    pub(super) fn models(&self) -> ModelServiceClient<Channel> {
        ModelServiceClient::new(self.channel())
    }

    pub(super) fn providers(&self) -> ModelProviderServiceClient<Channel> {
        ModelProviderServiceClient::new(self.channel())
    }

    pub(super) fn tasks(&self) -> TaskServiceClient<Channel> {
        TaskServiceClient::new(self.channel())
    }

    pub(super) fn messages(&self) -> MessageServiceClient<Channel> {
        MessageServiceClient::new(self.channel()).max_encoding_message_size(64 * 1024 * 1024)
    }

    pub(super) fn events(&self) -> EventServiceClient<Channel> {
        EventServiceClient::new(self.channel())
    }

    /// Creates a scripted provider `p`, its model `m`, and the agent `ada`.
    pub(super) async fn with_agent(self) -> Self {
        self.providers().create_model_provider(provider("p")).await.expect("the provider is made");
        self.models().create_model(model("m")).await.expect("the model is made");
        self.agents().create_agent(agent("ada")).await.expect("the agent is made");
        self
    }

    /// Creates a task of `ada`; returns its id.
    pub(super) async fn task(&self) -> String {
        let request =
            v1::CreateTaskRequest { spec: Some(task_spec()), idempotency_key: String::new() };
        id(self.tasks().create_task(request).await.expect("the task is made").into_inner().metadata)
    }

    pub(super) async fn send_message(&self, task: &str, text: &str) -> v1::Message {
        self.messages()
            .create_message(message(task, text))
            .await
            .expect("the message is accepted")
            .into_inner()
    }

    pub(super) async fn subscribe(&self, task: &str, cursor: &str) -> Streaming<v1::Event> {
        let request =
            v1::SubscribeRequest { task: task.into(), cursor: cursor.into(), types: Vec::new() };
        self.events().subscribe(request).await.expect("the subscription is accepted").into_inner()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.context.lifecycle().stop("the test is over");
    }
}

pub(super) const MASTER_KEY: &str = "test:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
pub(super) const SECRETS_KEY: &str = "s1:Hx4dHBsaGRgXFhUUExIREA8ODQwLCgkIBwYFBAMCAQA=";
pub(super) const TOKEN_KEY: &str = "t1:AR4dHBsaGRgXFhUUExIREA8ODQwLCgkIBwYFBAMCAQA=";

pub(super) fn provider(name: &str) -> v1::CreateModelProviderRequest {
    let spec = v1::ModelProviderSpec {
        name: name.into(),
        r#type: v1::ModelProviderType::Scripted.into(),
        ..v1::ModelProviderSpec::default()
    };
    v1::CreateModelProviderRequest { spec: Some(spec), ..v1::CreateModelProviderRequest::default() }
}

pub(super) fn model(name: &str) -> v1::CreateModelRequest {
    let spec =
        v1::ModelSpec { name: name.into(), provider: "p".into(), ..v1::ModelSpec::default() };
    v1::CreateModelRequest { spec: Some(spec), ..v1::CreateModelRequest::default() }
}

pub(super) fn agent(name: &str) -> v1::CreateAgentRequest {
    let spec = v1::AgentSpec { name: name.into(), model: "m".into(), ..v1::AgentSpec::default() };
    v1::CreateAgentRequest { spec: Some(spec), ..v1::CreateAgentRequest::default() }
}

pub(super) fn task_spec() -> v1::TaskSpec {
    v1::TaskSpec { agent: "ada".into(), workspace: "/work".into(), ..v1::TaskSpec::default() }
}

pub(super) fn message(task: &str, text: &str) -> v1::CreateMessageRequest {
    let block = v1::block::Block::Text(v1::Text { text: text.into() });
    let spec = v1::MessageSpec {
        task: task.into(),
        blocks: vec![v1::Block { block: Some(block) }],
        ..v1::MessageSpec::default()
    };
    v1::CreateMessageRequest { spec: Some(spec), ..v1::CreateMessageRequest::default() }
}

pub(super) fn text(message: &v1::Message) -> &str {
    match message.spec.as_ref().and_then(|spec| spec.blocks.first()?.block.as_ref()) {
        Some(v1::block::Block::Text(text)) => &text.text,
        other => panic!("not a text: {other:?}"),
    }
}

pub(super) fn id(metadata: Option<v1::Metadata>) -> String {
    metadata.expect("every entity has metadata").id
}

/// The error of a call that must fail with this code.
#[track_caller]
pub(super) fn expect_error<T: Debug>(result: Result<T, Status>, code: Code) -> Status {
    let status = result.expect_err("it is refused");
    assert_eq!(status.code(), code, "{status:?}");
    status
}

/// Waits for a future that must complete in time.
pub(super) async fn wait_for<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future)
        .await
        .unwrap_or_else(|_| panic!("not within {TIMEOUT:?}: {what}"))
}

/// The next `count` events.
pub(super) async fn next_events(stream: &mut Streaming<v1::Event>, count: usize) -> Vec<v1::Event> {
    let mut events = Vec::new();
    while events.len() < count {
        match tokio::time::timeout(TIMEOUT, stream.message()).await {
            Ok(Ok(Some(event))) => events.push(event),
            Ok(end) => panic!(
                "the stream ended with {end:?} instead of event {} of {count}, after {events:?}",
                events.len() + 1
            ),
            Err(_) => {
                panic!("event {} of {count} did not come, after {events:?}", events.len() + 1)
            }
        }
    }
    events
}

/// Calls `ask` until its answer is good; panics with the last answer after [`TIMEOUT`].
pub(super) async fn wait_until<T: Debug, F: Future<Output = T>>(
    what: &str,
    ask: impl Fn() -> F,
    good: impl Fn(&T) -> bool,
) -> T {
    let end = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let answer = ask().await;
        if good(&answer) {
            return answer;
        }
        assert!(
            tokio::time::Instant::now() < end,
            "not within {TIMEOUT:?}: {what}; last: {answer:?}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
