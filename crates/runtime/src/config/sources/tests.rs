use std::{io::Write as _, net::SocketAddr, time::Duration};

use serde::Deserialize;

use super::*;
use crate::config::{Common, LogFormat, Secret, ServiceConfig};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Sample {
    concurrency: u32,
    ratio: f64,
    verbose: bool,
    name: String,
    #[serde(with = "crate::config::duration")]
    interval: Duration,
    listen: Option<SocketAddr>,
    limit: Option<u64>,
    strict: Option<bool>,
    hosts: Vec<String>,
    ports: Vec<u16>,
}

impl Default for Sample {
    fn default() -> Self {
        Self {
            concurrency: 50,
            ratio: 0.5,
            verbose: false,
            name: "sample".to_owned(),
            interval: Duration::from_secs(30),
            listen: None,
            limit: None,
            strict: None,
            hosts: Vec::new(),
            ports: Vec::new(),
        }
    }
}

impl ServiceConfig for Sample {}

fn environment(variables: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    variables.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

fn from_env(variables: &[(&str, &str)]) -> Sources {
    Sources::new(None, environment(variables)).unwrap()
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

#[test]
fn nothing_set_loads_the_defaults() {
    assert_eq!(from_env(&[]).load::<Sample>().unwrap(), Sample::default());
}

#[test]
fn environment_wins_over_file_and_file_over_default() {
    let file = file("concurrency = 7\nname = \"from file\"\n");
    let sources =
        Sources::new(Some(file.path()), environment(&[("CONSTRUCT_NAME", "from env")])).unwrap();
    let sample: Sample = sources.load().unwrap();
    assert_eq!((sample.concurrency, sample.name.as_str(), sample.ratio), (7, "from env", 0.5));
    assert_eq!(sources.origin("name"), Origin::Environment("CONSTRUCT_NAME".to_owned()));
    assert_eq!(
        sources.origin("concurrency"),
        Origin::File { key: "concurrency".to_owned(), path: file.path().to_owned() }
    );
    assert_eq!(sources.origin("ratio"), Origin::Default);
}

#[test]
fn file_is_found_through_the_environment() {
    let file = file("concurrency = 9\n");
    let sources = from_env(&[("CONSTRUCT_CONFIG", file.path().to_str().unwrap())]);
    assert_eq!(sources.load::<Sample>().unwrap().concurrency, 9);
}

#[test]
fn environment_text_takes_the_type_of_its_field() {
    let sample: Sample = from_env(&[
        ("CONSTRUCT_CONCURRENCY", "8"),
        ("CONSTRUCT_RATIO", "0.75"),
        ("CONSTRUCT_VERBOSE", "true"),
        ("CONSTRUCT_NAME", "12345"),
        ("CONSTRUCT_INTERVAL", "1m 30s"),
        ("CONSTRUCT_LISTEN", "127.0.0.1:0"),
        ("CONSTRUCT_LIMIT", "99"),
        ("CONSTRUCT_STRICT", "off"),
        ("CONSTRUCT_HOSTS", "a.example, 10,true"),
        ("CONSTRUCT_PORTS", "[80, 443]"),
    ])
    .load()
    .unwrap();
    let expected = Sample {
        concurrency: 8,
        ratio: 0.75,
        verbose: true,
        name: "12345".to_owned(),
        interval: Duration::from_secs(90),
        listen: Some("127.0.0.1:0".parse().unwrap()),
        limit: Some(99),
        strict: Some(false),
        hosts: vec!["a.example".to_owned(), "10".to_owned(), "true".to_owned()],
        ports: vec![80, 443],
    };
    assert_eq!(sample, expected);
}

#[test]
fn environment_string_keeps_quotes_and_spaces() {
    for text in ["\"quoted\"", "[x]", "{a=1}", " padded ", "true"] {
        assert_eq!(from_env(&[("CONSTRUCT_NAME", text)]).load::<Sample>().unwrap().name, text);
    }
}

#[test]
fn integer_parses_as_float_and_commas_as_a_list() {
    let sample: Sample =
        from_env(&[("CONSTRUCT_RATIO", "1"), ("CONSTRUCT_PORTS", "80,443")]).load().unwrap();
    assert_eq!((sample.ratio, sample.ports), (1.0, vec![80, 443]));
}

#[test]
fn empty_variable_counts_as_unset() {
    assert_eq!(
        from_env(&[("CONSTRUCT_CONCURRENCY", "")]).load::<Sample>().unwrap().concurrency,
        50
    );
}

#[test]
fn error_names_variable_and_value() {
    let error =
        from_env(&[("CONSTRUCT_CONCURRENCY", "many")]).load::<Sample>().unwrap_err().to_string();
    assert!(error.starts_with("CONSTRUCT_CONCURRENCY in the environment: "), "{error}");
    assert!(error.contains("\"many\"") && error.contains("u32"), "{error}");

    let error =
        from_env(&[("CONSTRUCT_LISTEN", "localhost")]).load::<Sample>().unwrap_err().to_string();
    assert!(error.starts_with("CONSTRUCT_LISTEN in the environment: "), "{error}");

    let error = from_env(&[("CONSTRUCT_INTERVAL", "5")]).load::<Sample>().unwrap_err().to_string();
    assert!(error.contains("CONSTRUCT_INTERVAL") && error.contains("such as 5s"), "{error}");
}

#[test]
fn error_names_key_and_file() {
    let file = file("concurrency = \"many\"\n");
    let error =
        Sources::new(Some(file.path()), []).unwrap().load::<Sample>().unwrap_err().to_string();
    assert!(error.starts_with(&format!("`concurrency` in {}: ", file.path().display())), "{error}");
}

#[test]
fn malformed_and_missing_file_errors_name_the_file() {
    let file = file("concurrency = \n");
    let Err(error @ Error::Syntax { .. }) = Sources::new(Some(file.path()), []) else {
        panic!("accepted")
    };
    assert!(error.to_string().contains(&file.path().display().to_string()), "{error}");

    let Err(error @ Error::Read { .. }) = Sources::new(Some(Path::new("/nonexistent/c.toml")), [])
    else {
        panic!("accepted")
    };
    assert!(error.to_string().contains("/nonexistent/c.toml"), "{error}");
}

#[test]
fn unknown_keys_of_the_file_are_listed() {
    let file = file("concurrency = 1\nconcurency = 2\nlog = \"warn\"\n[table]\nx = 1\n");
    let sources = Sources::new(Some(file.path()), []).unwrap();
    let known = &keys::<Sample>().unwrap() | &keys::<Common>().unwrap();
    assert_eq!(sources.unknown_keys(&known), ["concurency", "table"]);
}

#[test]
fn common_part_is_read_from_the_same_sources() {
    let common: Common = from_env(&[
        ("CONSTRUCT_NATS_URL", "nats://u:p@nats:4222"),
        ("CONSTRUCT_DATA_DIR", "/data"),
        ("CONSTRUCT_HEALTH_LISTEN", "0.0.0.0:8080"),
        ("CONSTRUCT_LOG_FORMAT", "json"),
        ("CONSTRUCT_SHUTDOWN_GRACE", "250ms"),
        ("CONSTRUCT_INSTANCE_ID", "17"),
        ("CONSTRUCT_MASTER_KEY", "12345"),
    ])
    .load()
    .unwrap();
    assert_eq!(common.nats_url.expose(), "nats://u:p@nats:4222");
    assert_eq!(common.blob_dir(), Path::new("/data/blobs"));
    assert_eq!(common.health_listen, Some("0.0.0.0:8080".parse().unwrap()));
    assert_eq!(common.log_format, LogFormat::Json);
    assert_eq!(common.shutdown_grace, Duration::from_millis(250));
    assert_eq!(common.instance_id.as_deref(), Some("17"));
    assert_eq!(common.master_key.as_ref().map(Secret::expose), Some("12345"));
    common.validate().unwrap();
}

#[test]
fn invalid_common_values_are_rejected_with_their_origin() {
    for (name, value, part) in [
        ("CONSTRUCT_LOG", "construct=[loud", "filter"),
        ("CONSTRUCT_INSTANCE_ID", "a.b", "subjects"),
    ] {
        let sources = from_env(&[(name, value)]);
        let invalid = sources.load::<Common>().unwrap().validate().unwrap_err();
        let error = sources.refused(invalid).to_string();
        assert!(
            error.starts_with(&format!("{name} in the environment: ")) && error.contains(part),
            "{error}"
        );
    }
    let missing = Common::default().database_url().unwrap_err();
    let error = from_env(&[]).refused(missing).to_string();
    assert!(error.starts_with("`database_url` is required: set CONSTRUCT_DATABASE_URL"), "{error}");
}

#[test]
fn wrong_type_for_a_secret_does_not_repeat_it() {
    let file = file("master_key = 8675309\n");
    let error =
        Sources::new(Some(file.path()), []).unwrap().load::<Common>().unwrap_err().to_string();
    assert!(error.contains("`master_key`") && !error.contains("8675309"), "{error}");
}

#[test]
fn description_masks_secrets_and_names_origins() {
    let sources = from_env(&[
        ("CONSTRUCT_DATABASE_URL", "postgres://construct:s3cret@db/construct"),
        ("CONSTRUCT_MASTER_KEY", "hunter2"),
    ]);
    let text = sources.describe(&sources.load::<Common>().unwrap()).unwrap();
    assert!(!text.contains("s3cret") && !text.contains("hunter2"), "{text}");
    for line in [
        "database_url = \"postgres://***@db/construct\"  # CONSTRUCT_DATABASE_URL in the environment",
        "master_key = \"***\"  # CONSTRUCT_MASTER_KEY in the environment",
        "log = \"info\"  # default",
        "shutdown_grace = \"5s\"  # default",
        "# health_listen is not set (CONSTRUCT_HEALTH_LISTEN)",
    ] {
        assert!(text.lines().any(|l| l == line), "{line:?} is missing in:\n{text}");
    }
}
