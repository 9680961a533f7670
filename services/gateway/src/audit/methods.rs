//! What the trail says of each method, by the contract's descriptors: a new method needs no line
//! here.

use std::{
    collections::{BTreeSet, HashMap},
    sync::LazyLock,
};

use construct_proto::options;
use prost_reflect::{
    Kind, MessageDescriptor, MethodDescriptor, prost_types::method_options::IdempotencyLevel,
};

use super::objects;

/// Fields that name something, besides those that are called after what a method's name ends with
/// (`task`, `api_key`, …).
const NAMES: [&str; 5] = ["letter", "models", "parent", "provider", "user"];

/// The service of our own keys, and what it calls one.
const KEYS: &str = "KeyService";
const API_KEY: &str = "api_key";

/// A method, as the trail sees it.
#[derive(Debug)]
pub(crate) struct Method {
    /// `TaskService/CreateTask`.
    pub(crate) name: String,
    /// Each call leaves an entry: because it changes something, or takes out much.
    pub(crate) writes: bool,
    /// Where ids and names stand in a request.
    request: Vec<Vec<u32>>,
    /// Where the id of what was made or changed stands in an answer.
    answer: Vec<Vec<u32>>,
}

static BY_PATH: LazyLock<HashMap<String, Method>> = LazyLock::new(|| {
    let methods: Vec<_> = construct_proto::methods().collect();
    let names: BTreeSet<String> =
        methods.iter().map(|method| noun(method.name())).chain(NAMES.map(str::to_owned)).collect();
    // What the service of our own keys calls an `api_key` is the id of one; elsewhere it is a
    // vendor's key itself.
    let elsewhere: BTreeSet<String> =
        names.iter().filter(|name| *name != API_KEY).cloned().collect();
    let described = |method: &MethodDescriptor| Method {
        name: format!("{}/{}", method.parent_service().name(), method.name()),
        writes: writes(method),
        request: named(
            &method.input(),
            if method.parent_service().name() == KEYS { &names } else { &elsewhere },
        ),
        answer: made(&method.output()),
    };
    let path = |method: &MethodDescriptor| {
        format!("/{}/{}", method.parent_service().full_name(), method.name())
    };
    methods.iter().map(|method| (path(method), described(method))).collect()
});

/// The method of this path, if it is one of ours.
pub(crate) fn of(path: &str) -> Option<&'static Method> {
    BY_PATH.get(path)
}

/// What an answer of the method with this name names.
pub(crate) fn answered(name: &str, answer: &[u8]) -> Vec<String> {
    let Some(method) = of(&format!("/construct.v1.{name}")) else { return Vec::new() };
    find(&method.answer, answer)
}

impl Method {
    /// What a request names.
    pub(crate) fn asked(&self, request: &[u8]) -> Vec<String> {
        find(&self.request, request)
    }
}

fn find(paths: &[Vec<u32>], message: &[u8]) -> Vec<String> {
    let paths: Vec<&[u32]> = paths.iter().map(Vec::as_slice).collect();
    let mut found = Vec::new();
    objects::find(message, &paths, &mut found);
    found
}

fn writes(method: &MethodDescriptor) -> bool {
    let options = method.method_descriptor_proto().options.as_ref();
    let reads = options
        .is_some_and(|options| options.idempotency_level() == IdempotencyLevel::NoSideEffects);
    options::is_audited(method) || !reads
}

/// `CreateApiKey` as `api_key`.
fn noun(method: &str) -> String {
    let mut noun = String::new();
    for (index, letter) in method.char_indices() {
        if letter.is_ascii_uppercase() && index > 0 {
            noun.push('_');
        }
        noun.push(letter.to_ascii_lowercase());
    }
    noun.split_once('_').map(|(_, noun)| noun.to_owned()).unwrap_or_default()
}

/// Where fields with these names stand in a request, or in its specification.
fn named(message: &MessageDescriptor, names: &BTreeSet<String>) -> Vec<Vec<u32>> {
    let mut paths = Vec::new();
    for field in message.fields() {
        match field.kind() {
            Kind::String | Kind::Uint64 if names.contains(field.name()) => {
                paths.push(vec![field.number()])
            }
            Kind::Message(spec) if field.name() == "spec" => {
                let deeper = named(&spec, names).into_iter();
                paths.extend(deeper.map(|path| [vec![field.number()], path].concat()));
            }
            _ => {}
        }
    }
    paths
}

/// Where the id stands of what an answer shows: in its metadata, in that of the one thing it holds,
/// or at its top.
fn made(message: &MessageDescriptor) -> Vec<Vec<u32>> {
    let id = |message: &MessageDescriptor| {
        let field = message.get_field_by_name("metadata")?;
        let Kind::Message(metadata) = field.kind() else { return None };
        Some(vec![field.number(), metadata.get_field_by_name("id")?.number()])
    };
    let mut paths: Vec<Vec<u32>> = id(message).into_iter().collect();
    for field in message.fields().filter(|field| !field.is_list()) {
        match field.kind() {
            Kind::Message(part) => {
                paths.extend(id(&part).map(|path| [vec![field.number()], path].concat()))
            }
            Kind::String if field.name() == "id" => paths.push(vec![field.number()]),
            _ => {}
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use construct_proto::v1;
    use prost::Message as _;

    use super::*;

    fn method(name: &str) -> &'static Method {
        of(&format!("/construct.v1.{name}")).expect("there is such a method")
    }

    #[test]
    fn what_leaves_an_entry_is_known_and_reading_leaves_none() {
        for (name, writes) in [
            ("TaskService/CreateTask", true),
            ("KeyService/ExchangeSetupCode", true),
            ("ModelProviderService/CheckModelProvider", true),
            ("RecoveryService/DropDeadLetter", true),
            ("TaskService/GetTask", false),
            ("OrganizationService/WhoAmI", false),
            ("EventService/Subscribe", false),
            ("AuditService/ListAuditEntries", false),
            ("AuditService/ExportAuditEntries", true),
            ("FileService/DownloadFile", true),
            ("FileService/GetFile", false),
        ] {
            assert_eq!(method(name).writes, writes, "{name}");
        }
    }

    #[test]
    fn ids_and_names_are_found_and_nothing_that_anybody_wrote() {
        let text = v1::block::Block::Text(v1::Text { text: "task".into() });
        let spec = v1::MessageSpec {
            task: "task_1".into(),
            blocks: vec![v1::Block { block: Some(text) }],
            ..v1::MessageSpec::default()
        };
        let request = v1::CreateMessageRequest { spec: Some(spec), idempotency_key: "k".into() };
        let asked = |name: &str, request: Vec<u8>| method(name).asked(&request);
        assert_eq!(asked("MessageService/CreateMessage", request.encode_to_vec()), ["task_1"]);
        let spec = v1::SecretSpec {
            name: "TOKEN".into(),
            value: "hunter2".into(),
            ..v1::SecretSpec::default()
        };
        let request = v1::CreateSecretRequest { spec: Some(spec), idempotency_key: "k".into() };
        assert_eq!(
            asked("SecretService/CreateSecret", request.encode_to_vec()),
            Vec::<String>::new()
        );
        let request = v1::UpdateSecretRequest {
            secret: "TOKEN".into(),
            value: Some("hunter2".into()),
            ..v1::UpdateSecretRequest::default()
        };
        assert_eq!(asked("SecretService/UpdateSecret", request.encode_to_vec()), ["TOKEN"]);
        let spec = v1::ModelProviderSpec {
            name: "anthropic".into(),
            api_key: "sk-ant-api03-hunter2".into(),
            ..v1::ModelProviderSpec::default()
        };
        let request =
            v1::CreateModelProviderRequest { spec: Some(spec), idempotency_key: "k".into() };
        assert_eq!(
            asked("ModelProviderService/CreateModelProvider", request.encode_to_vec()),
            Vec::<String>::new(),
            "a vendor's key is in the trail"
        );
        let request = v1::UpdateModelProviderRequest {
            model_provider: "anthropic".into(),
            api_key: Some("sk-ant-api03-hunter2".into()),
            ..v1::UpdateModelProviderRequest::default()
        };
        assert_eq!(
            asked("ModelProviderService/UpdateModelProvider", request.encode_to_vec()),
            ["anthropic"]
        );
        let request = v1::RevokeApiKeyRequest {
            api_key: "key_1".into(),
            ..v1::RevokeApiKeyRequest::default()
        };
        assert_eq!(asked("KeyService/RevokeApiKey", request.encode_to_vec()), ["key_1"]);
        let request = v1::ForkTaskRequest {
            task: "task_1".into(),
            message: "msg_1".into(),
            idempotency_key: "k".into(),
            ..v1::ForkTaskRequest::default()
        };
        assert_eq!(asked("TaskService/ForkTask", request.encode_to_vec()), ["task_1", "msg_1"]);
        let request = v1::DropDeadLetterRequest { letter: 17 };
        assert_eq!(asked("RecoveryService/DropDeadLetter", request.encode_to_vec()), ["17"]);
        let request = v1::CreateModelTokenRequest {
            models: vec!["a".into(), "b".into(), "a".into(), "not a name".into()],
            ..v1::CreateModelTokenRequest::default()
        };
        assert_eq!(
            asked("ModelTokenService/CreateModelToken", request.encode_to_vec()),
            ["a", "b"]
        );
        let request = v1::ExchangeSetupCodeRequest { code: "cs_secret".into() };
        assert_eq!(
            asked("KeyService/ExchangeSetupCode", request.encode_to_vec()),
            Vec::<String>::new()
        );
    }

    #[test]
    fn of_an_answer_the_id_is_found_and_no_key() {
        let metadata = Some(v1::Metadata { id: "key_1".into(), ..v1::Metadata::default() });
        let api_key = Some(v1::ApiKey {
            metadata: metadata.clone(),
            prefix: "ct_x".into(),
            ..v1::ApiKey::default()
        });
        let answer = v1::CreateApiKeyResponse { api_key, key: "ct_secret".into() };
        assert_eq!(answered("KeyService/CreateApiKey", &answer.encode_to_vec()), ["key_1"]);
        let task = v1::Task { metadata, ..v1::Task::default() };
        assert_eq!(answered("TaskService/CreateTask", &task.encode_to_vec()), ["key_1"]);
        assert_eq!(answered("TaskService/CreateTask", b"\xff\xff"), Vec::<String>::new());
        assert_eq!(answered("SignIn", b""), Vec::<String>::new());
    }

    /// No field of a write that holds a secret or what somebody wrote is called like one that names
    /// something.
    #[test]
    fn only_what_is_meant_to_be_is_taken_for_a_name() {
        let methods: Vec<_> = construct_proto::methods().collect();
        let names: BTreeSet<String> = methods
            .iter()
            .map(|method| noun(method.name()))
            .chain(NAMES.map(str::to_owned))
            .collect();
        let forbidden = [
            "value",
            "key",
            "code",
            "token",
            "text",
            "comment",
            "blocks",
            "instructions",
            "content",
            "email",
        ];
        for name in forbidden {
            assert!(!names.contains(name), "{name}");
        }
    }
}
