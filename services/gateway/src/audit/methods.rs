//! The audit properties of each method, from the contract's descriptors: a new method needs no code
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

/// Fields that name objects, in addition to those named after the objects of methods (`task`,
/// `api_key`, …).
const OBJECT_FIELDS: [&str; 5] = ["letter", "models", "parent", "provider", "user"];

/// The service of API keys, and its field with the id of a key.
const KEY_SERVICE: &str = "KeyService";
const API_KEY: &str = "api_key";

/// The audit properties of a method.
#[derive(Debug)]
pub(crate) struct Method {
    /// `TaskService/CreateTask`.
    pub(crate) name: String,
    /// Each call has an entry, because it changes something or exports much.
    pub(crate) writes: bool,
    /// Paths of the ids and names in a request.
    request: Vec<Vec<u32>>,
    /// Paths of the id of a created or changed object in a response.
    response: Vec<Vec<u32>>,
}

static BY_PATH: LazyLock<HashMap<String, Method>> = LazyLock::new(|| {
    let methods: Vec<_> = construct_proto::methods().collect();
    let names: BTreeSet<String> = methods
        .iter()
        .map(|method| noun(method.name()))
        .chain(OBJECT_FIELDS.map(str::to_owned))
        .collect();
    // In the service of API keys, `api_key` is an id; elsewhere it is a vendor's key itself.
    let names_without_key: BTreeSet<String> =
        names.iter().filter(|name| *name != API_KEY).cloned().collect();
    let method_properties = |method: &MethodDescriptor| Method {
        name: format!("{}/{}", method.parent_service().name(), method.name()),
        writes: writes(method),
        request: request_paths(
            &method.input(),
            if method.parent_service().name() == KEY_SERVICE { &names } else { &names_without_key },
        ),
        response: response_paths(&method.output()),
    };
    let path = |method: &MethodDescriptor| {
        format!("/{}/{}", method.parent_service().full_name(), method.name())
    };
    methods.iter().map(|method| (path(method), method_properties(method))).collect()
});

/// The method of this path, if it is one of the contract.
pub(crate) fn find_method(path: &str) -> Option<&'static Method> {
    BY_PATH.get(path)
}

/// The objects in a response of the method with this name.
pub(crate) fn response_objects(name: &str, response: &[u8]) -> Vec<String> {
    let Some(method) = find_method(&format!("/construct.v1.{name}")) else { return Vec::new() };
    find(&method.response, response)
}

impl Method {
    /// The objects in a request.
    pub(crate) fn request_objects(&self, request: &[u8]) -> Vec<String> {
        find(&self.request, request)
    }
}

fn find(paths: &[Vec<u32>], message: &[u8]) -> Vec<String> {
    let paths: Vec<&[u32]> = paths.iter().map(Vec::as_slice).collect();
    let mut found = Vec::new();
    objects::collect(message, &paths, &mut found);
    found
}

fn writes(method: &MethodDescriptor) -> bool {
    let options = method.method_descriptor_proto().options.as_ref();
    let reads = options
        .is_some_and(|options| options.idempotency_level() == IdempotencyLevel::NoSideEffects);
    options::is_audited(method) || !reads
}

/// Converts `CreateApiKey` to `api_key`.
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

/// Paths of fields with these names in a request, or in its specification.
fn request_paths(message: &MessageDescriptor, names: &BTreeSet<String>) -> Vec<Vec<u32>> {
    let mut paths = Vec::new();
    for field in message.fields() {
        match field.kind() {
            Kind::String | Kind::Uint64 if names.contains(field.name()) => {
                paths.push(vec![field.number()])
            }
            Kind::Message(spec) if field.name() == "spec" => {
                let deeper = request_paths(&spec, names).into_iter();
                paths.extend(deeper.map(|path| [vec![field.number()], path].concat()));
            }
            _ => {}
        }
    }
    paths
}

/// Paths of the object's id in a response: in its metadata, in that of its only part, or at its top
/// level.
fn response_paths(message: &MessageDescriptor) -> Vec<Vec<u32>> {
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
        find_method(&format!("/construct.v1.{name}")).expect("the method exists")
    }

    #[test]
    fn only_writes_and_exports_have_entries() {
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
    fn request_objects_are_ids_and_names_only() {
        let text = v1::block::Block::Text(v1::Text { text: "task".into() });
        let spec = v1::MessageSpec {
            task: "task_1".into(),
            blocks: vec![v1::Block { block: Some(text) }],
            ..v1::MessageSpec::default()
        };
        let request = v1::CreateMessageRequest { spec: Some(spec), idempotency_key: "k".into() };
        let objects = |name: &str, request: Vec<u8>| method(name).request_objects(&request);
        assert_eq!(objects("MessageService/CreateMessage", request.encode_to_vec()), ["task_1"]);
        let spec = v1::SecretSpec {
            name: "TOKEN".into(),
            value: "hunter2".into(),
            ..v1::SecretSpec::default()
        };
        let request = v1::CreateSecretRequest { spec: Some(spec), idempotency_key: "k".into() };
        assert_eq!(
            objects("SecretService/CreateSecret", request.encode_to_vec()),
            Vec::<String>::new()
        );
        let request = v1::UpdateSecretRequest {
            secret: "TOKEN".into(),
            value: Some("hunter2".into()),
            ..v1::UpdateSecretRequest::default()
        };
        assert_eq!(objects("SecretService/UpdateSecret", request.encode_to_vec()), ["TOKEN"]);
        let spec = v1::ModelProviderSpec {
            name: "anthropic".into(),
            api_key: "sk-ant-api03-hunter2".into(),
            ..v1::ModelProviderSpec::default()
        };
        let request =
            v1::CreateModelProviderRequest { spec: Some(spec), idempotency_key: "k".into() };
        assert_eq!(
            objects("ModelProviderService/CreateModelProvider", request.encode_to_vec()),
            Vec::<String>::new(),
            "a vendor's key is in the audit log"
        );
        let request = v1::UpdateModelProviderRequest {
            model_provider: "anthropic".into(),
            api_key: Some("sk-ant-api03-hunter2".into()),
            ..v1::UpdateModelProviderRequest::default()
        };
        assert_eq!(
            objects("ModelProviderService/UpdateModelProvider", request.encode_to_vec()),
            ["anthropic"]
        );
        let request = v1::RevokeApiKeyRequest {
            api_key: "key_1".into(),
            ..v1::RevokeApiKeyRequest::default()
        };
        assert_eq!(objects("KeyService/RevokeApiKey", request.encode_to_vec()), ["key_1"]);
        let request = v1::ForkTaskRequest {
            task: "task_1".into(),
            message: "msg_1".into(),
            idempotency_key: "k".into(),
            ..v1::ForkTaskRequest::default()
        };
        assert_eq!(objects("TaskService/ForkTask", request.encode_to_vec()), ["task_1", "msg_1"]);
        let request = v1::DropDeadLetterRequest { letter: 17 };
        assert_eq!(objects("RecoveryService/DropDeadLetter", request.encode_to_vec()), ["17"]);
        let request = v1::CreateModelTokenRequest {
            models: vec!["a".into(), "b".into(), "a".into(), "not a name".into()],
            ..v1::CreateModelTokenRequest::default()
        };
        assert_eq!(
            objects("ModelTokenService/CreateModelToken", request.encode_to_vec()),
            ["a", "b"]
        );
        let request = v1::ExchangeSetupCodeRequest { code: "cs_secret".into() };
        assert_eq!(
            objects("KeyService/ExchangeSetupCode", request.encode_to_vec()),
            Vec::<String>::new()
        );
    }

    #[test]
    fn response_objects_have_the_id_and_no_key() {
        let metadata = Some(v1::Metadata { id: "key_1".into(), ..v1::Metadata::default() });
        let api_key = Some(v1::ApiKey {
            metadata: metadata.clone(),
            prefix: "ct_x".into(),
            ..v1::ApiKey::default()
        });
        let answer = v1::CreateApiKeyResponse { api_key, key: "ct_secret".into() };
        assert_eq!(response_objects("KeyService/CreateApiKey", &answer.encode_to_vec()), ["key_1"]);
        let task = v1::Task { metadata, ..v1::Task::default() };
        assert_eq!(response_objects("TaskService/CreateTask", &task.encode_to_vec()), ["key_1"]);
        assert_eq!(response_objects("TaskService/CreateTask", b"\xff\xff"), Vec::<String>::new());
        assert_eq!(response_objects("SignIn", b""), Vec::<String>::new());
    }

    /// No field of a write with a secret or a text is named like a field with an object.
    #[test]
    fn secret_and_text_fields_are_no_objects() {
        let methods: Vec<_> = construct_proto::methods().collect();
        let names: BTreeSet<String> = methods
            .iter()
            .map(|method| noun(method.name()))
            .chain(OBJECT_FIELDS.map(str::to_owned))
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
