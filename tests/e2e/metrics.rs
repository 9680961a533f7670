//! The services export exactly the metrics in `deploy/observability/metrics.txt`, with which alerts
//! and dashboards are compared.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use construct_proto::v1;
use construct_tests::{
    client::{Client, Conversation, TURN_TIMEOUT},
    http,
    mesh::{Mesh, Service},
    vendor::{VendorServer, anthropic},
    wait::until,
};

const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/observability/metrics.txt");
const CODE: &str = "create_file('x.txt', 'made'); try { read_file('none.txt') } catch (error) { print(error.name) }";

/// Metrics by service and name: the kind, the labels of some series, the labels of every series.
type Metrics = BTreeMap<(String, String), Metric>;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Metric {
    kind: String,
    some: BTreeSet<String>,
    all: BTreeSet<String>,
}

#[tokio::test]
async fn services_export_exactly_the_listed_metrics() {
    let mesh = Mesh::start().await.unwrap();
    let vendor = VendorServer::start().await;
    let done = anthropic::Answer::text("It is made.").with_usage(150, 120, 6, 7);
    vendor
        .reply(anthropic::error(529, "overloaded_error", "Overloaded"))
        .reply(
            anthropic::Answer::text("I make it.")
                .and_code("toolu_1", CODE)
                .with_usage(100, 20, 30, 40)
                .reply(),
        )
        // Long enough for another request to wait for the only key.
        .reply(done.reply().dripping(32, Duration::from_millis(100)))
        .reply(anthropic::Answer::text("Here I am instead.").with_usage(10, 0, 0, 7).reply());
    let refusing =
        VendorServer::answering(|_| anthropic::error(401, "authentication_error", "no")).await;
    provider(&mesh, "large", &vendor, 1).await;
    provider(&mesh, "refused", &refusing, 0).await;
    let client = mesh.client().unwrap();
    let fallbacks = vec![v1::ModelFallback { model: "large".into(), weight: 0 }];
    let update = v1::UpdateModelRequest {
        model: "refused".into(),
        fallbacks: Some(v1::ModelFallbacks { fallbacks }),
        ..Default::default()
    };
    client.models().update_model(update).await.unwrap();

    let (one, other) =
        (begin(&client, &mesh, "large").await, begin(&client, &mesh, "refused").await);
    let recorder = one.record();
    one.submit("Make it.").await;
    until("the second answer to begin", TURN_TIMEOUT, async || match vendor.requests().len() {
        3 => Ok(()),
        count => Err(count),
    })
    .await;
    other.submit("Who is there?").await;
    for conversation in [&one, &other] {
        let status = conversation.wait_until_idle().await.status.unwrap();
        assert_eq!(status.last_outcome(), v1::TurnOutcome::Completed, "{status:?}");
    }
    recorder.wait_for_sequence(one.task().await.unwrap().status.unwrap().event_sequence).await;

    compare(&mesh, &Service::ALL).await;
}

/// Checks that these services export exactly the listed metrics, once they have done everything
/// that is counted.
pub(crate) async fn compare(mesh: &Mesh, services: &[Service]) {
    let names: Vec<String> =
        services.iter().map(|service| format!("{service:?}").to_lowercase()).collect();
    let mut list = listed_metrics();
    list.retain(|(service, _), _| names.contains(service));
    let mut counted = Metrics::new();
    for (service, name) in services.iter().zip(&names) {
        counted.extend(read(name, &mesh.metrics(*service).await.unwrap()));
    }
    let problems = differences(&list, &counted);
    assert!(
        problems.is_empty(),
        "{}\n\nwhat was counted:\n{}",
        problems.join("\n"),
        show(&counted)
    );
}

/// Calls of a method that the gateway has counted, by protocol and outcome.
async fn calls(mesh: &Mesh, method: &str) -> BTreeMap<(String, String), u64> {
    let page = mesh.metrics(Service::Gateway).await.unwrap();
    let label = |line: &str, name: &str| {
        let value =
            line.split_once(&format!("{name}=\"")).and_then(|(_, rest)| rest.split_once('"'));
        value.map(|(value, _)| value.to_owned()).unwrap_or_default()
    };
    let counts =
        page.lines().filter(|line| line.starts_with("construct_gateway_request_seconds_count{"));
    let counts = counts.filter(|line| label(line, "rpc_method") == method).map(|line| {
        let number = line.rsplit(' ').next().unwrap().parse().unwrap();
        ((label(line, "construct_protocol"), label(line, "rpc_response_status_code")), number)
    });
    counts.collect()
}

#[tokio::test]
async fn invalid_request_is_counted_once_as_client_error() {
    let mesh = Mesh::start().await.unwrap();
    let client = http::client().build().unwrap();
    let http2 = http::client().http2_prior_knowledge().build().unwrap();
    let url = |path: &str| format!("{}{path}", mesh.gateway_url());
    let get_task = url("/construct.v1.TaskService/GetTask");
    // A varint without an end, twice as gRPC and once as gRPC-Web.
    let frame = [0, 0, 0, 0, 2, 0x0A, 0xFF];
    for (client, kind) in [
        (&http2, "application/grpc"),
        (&http2, "application/grpc"),
        (&client, "application/grpc-web"),
    ] {
        let request = client.post(&get_task).header("content-type", kind).header("te", "trailers");
        let answer = request.body(frame.to_vec()).send().await.unwrap();
        assert_eq!(answer.status().as_u16(), 200, "{kind}");
        // gRPC-Web reports in the body how a call ended.
        if kind == "application/grpc" {
            assert_eq!(answer.headers()["grpc-status"], "3");
        }
    }
    // Invalid JSON, an unknown method, and an unsupported content type.
    for (kind, body) in
        [("application/json", "{"), ("application/json", r#"{"tusk": 1}"#), ("text/plain", "hello")]
    {
        let answer =
            client.post(&get_task).header("content-type", kind).body(body).send().await.unwrap();
        assert!(answer.status().is_client_error(), "{}", answer.status());
    }
    let answer = client
        .post(url("/v1/tasks"))
        .header("content-type", "application/json")
        .body("[")
        .send()
        .await;
    assert_eq!(answer.unwrap().status().as_u16(), 400);
    // A valid request is counted once as well.
    assert_eq!(
        client.get(url("/v1/tasks/task_nonsense")).send().await.unwrap().status().as_u16(),
        400
    );
    let count = |face: &str, number| ((face.to_owned(), "INVALID_ARGUMENT".to_owned()), number);
    let expected = BTreeMap::from([
        count("connect", 3),
        count("grpc", 2),
        count("grpc-web", 1),
        count("rest", 1),
    ]);
    assert_eq!(calls(&mesh, "TaskService/GetTask").await, expected);
    assert_eq!(calls(&mesh, "TaskService/CreateTask").await, BTreeMap::from([count("rest", 1)]));
}

async fn provider(mesh: &Mesh, name: &str, vendor: &VendorServer, max_concurrency: i64) {
    let provider = v1::ModelProviderSpec {
        name: name.into(),
        r#type: v1::ModelProviderType::Anthropic.into(),
        base_url: vendor.url(),
        api_key: "sk-test-0123456789".into(),
        max_concurrency,
        ..v1::ModelProviderSpec::default()
    };
    mesh.agent(name, provider).await.unwrap();
}

async fn begin(client: &Client, mesh: &Mesh, agent: &str) -> Conversation {
    let workspace = mesh.folder(agent).unwrap().display().to_string();
    // With a title, no model call is made for one.
    let spec = v1::TaskSpec {
        agent: agent.into(),
        workspace,
        title: "A job".into(),
        ..Default::default()
    };
    client.create_task_with(spec).await.unwrap()
}

/// The listed metrics; a label with `?` is missing in some series.
fn listed_metrics() -> Metrics {
    let text = super::read(Path::new(LIST));
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let read = |line: &str| {
        let mut words = line.split(' ').map(str::to_owned);
        let [service, name, kind] =
            std::array::from_fn(|_| words.next().unwrap_or_else(|| panic!("{line}")));
        let labels: BTreeSet<String> = words.collect();
        let some = labels.iter().map(|label| label.trim_end_matches('?').to_owned()).collect();
        let all = labels.into_iter().filter(|label| !label.ends_with('?')).collect();
        ((service, name), Metric { kind, some, all })
    };
    let metrics: Vec<_> = lines.map(read).collect();
    let count = metrics.len();
    let list: Metrics = metrics.into_iter().collect();
    assert_eq!(list.len(), count, "a metric is listed twice");
    list
}

/// The metrics of a page in Prometheus' text format.
fn read(service: &str, page: &str) -> Metrics {
    let mut kinds = BTreeMap::new();
    let mut found = Metrics::new();
    for line in page.lines() {
        if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            kinds.insert(name.to_owned(), kind.to_owned());
            continue;
        }
        if line.starts_with('#') || line.is_empty() {
            continue;
        }
        let (series, _) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let parts = ["_bucket", "_count", "_sum"];
        let base = parts
            .iter()
            .find_map(|part| name.strip_suffix(part))
            .filter(|base| kinds.contains_key(*base));
        let name = base.unwrap_or(name);
        let kind = kinds.get(name).unwrap_or_else(|| panic!("{line} has no kind")).clone();
        let labels: BTreeSet<String> =
            names(labels).into_iter().filter(|label| label != "le").collect();
        let key = (service.to_owned(), name.to_owned());
        let metric = found.entry(key).or_insert_with(|| Metric {
            kind,
            some: labels.clone(),
            all: labels.clone(),
        });
        metric.all.retain(|label| labels.contains(label));
        metric.some.extend(labels);
    }
    found
}

/// The label names in `name="value",…}`; a value may contain anything, with `"` and `\` escaped by
/// `\`.
fn names(mut labels: &str) -> Vec<String> {
    let mut names = Vec::new();
    while let Some((name, rest)) = labels.split_once("=\"") {
        names.push(name.trim_start_matches(',').to_owned());
        let mut escaped = false;
        let end = rest.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        labels = &rest[end.expect("a value ends") + 1..];
    }
    names
}

fn differences(list: &Metrics, counted: &Metrics) -> Vec<String> {
    let mut problems = Vec::new();
    for (service, name) in list.keys().filter(|key| !counted.contains_key(*key)) {
        problems.push(format!("{service} does not count {name}, which is listed"));
    }
    for ((service, name), metric) in counted {
        match list.get(&(service.clone(), name.clone())) {
            None => problems.push(format!("{service} counts {name}, which is not listed")),
            Some(listed) if listed.kind != metric.kind => {
                problems.push(format!(
                    "{service} {name} is a {} and not a {}",
                    metric.kind, listed.kind
                ));
            }
            Some(listed) => {
                for label in metric.some.difference(&listed.some) {
                    problems.push(format!(
                        "{service} {name} has the label {label}, which is not listed"
                    ));
                }
                for label in listed.all.difference(&metric.all) {
                    problems.push(format!("{service} {name} has series without the label {label}"));
                }
            }
        }
    }
    problems
}

/// In the form of the list.
fn show(counted: &Metrics) -> String {
    let line = |((service, name), metric): (&(String, String), &Metric)| {
        let label = |label: &String| {
            format!(" {label}{}", if metric.all.contains(label) { "" } else { "?" })
        };
        format!(
            "{service} {name} {}{}\n",
            metric.kind,
            metric.some.iter().map(label).collect::<String>()
        )
    };
    counted.iter().map(line).collect()
}

#[test]
fn metrics_page_is_parsed_with_any_label_values() {
    let page = "# HELP a_seconds words\n# TYPE a_seconds histogram\na_seconds_bucket{x=\"1,y=\\\"2\",le=\"+Inf\"} 1\n\
                a_seconds_sum{x=\"1\",z=\"}\"} 2\na_seconds_count{x=\"1\"} 1\n# TYPE b_count counter\nb_count 3\n";
    let metric = |kind: &str, some: &[&str], all: &[&str]| Metric {
        kind: kind.to_owned(),
        some: some.iter().map(|&label| label.to_owned()).collect(),
        all: all.iter().map(|&label| label.to_owned()).collect(),
    };
    let key = |name: &str| ("sample".to_owned(), name.to_owned());
    let expected = [
        (key("a_seconds"), metric("histogram", &["x", "z"], &["x"])),
        (key("b_count"), metric("counter", &[], &[])),
    ];
    assert_eq!(read("sample", page), Metrics::from(expected));
}
