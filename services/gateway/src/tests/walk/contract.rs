//! The rules of the contract's fields, for every method that has them.

use prost_reflect::{Kind, MessageDescriptor, ReflectMessage as _, Value, prost_types};
use tonic_types::StatusExt as _;

use super::*;

/// Requests of one type, each with one field, at the named path, that the contract refuses.
fn violating_requests(
    message: &MessageDescriptor,
    parents: &mut Vec<String>,
) -> Vec<(String, DynamicMessage)> {
    let mut requests = Vec::new();
    if parents.iter().any(|known| known == message.full_name()) || message.is_map_entry() {
        return requests;
    }
    parents.push(message.full_name().to_owned());
    for field in message.fields() {
        let rule = construct_proto::options::rule(&field);
        let entry = if field.is_list() { "[0]" } else { "" };
        let mut put = |path: String, value: Value| {
            let mut request = DynamicMessage::new(message.clone());
            request
                .set_field(&field, if field.is_list() { Value::List(vec![value]) } else { value });
            requests.push((path, request));
        };
        let path = format!("{}{entry}", field.name());
        match field.kind() {
            Kind::String => put(path, Value::String("\0".to_owned())),
            Kind::Enum(_) => put(path, Value::EnumNumber(99)),
            Kind::Bytes => {
                if let Some(most) = rule.max_bytes {
                    put(path, Value::Bytes(vec![b'x'; most as usize + 1].into()));
                }
            }
            Kind::Int32 | Kind::Int64 | Kind::Uint32 | Kind::Uint64 => {
                let wrong = rule
                    .max
                    .and_then(|most| most.checked_add(1))
                    .or(rule.min.map(|least| least - 1));
                if let Some(wrong) = wrong {
                    put(path, number(&field.kind(), wrong));
                }
            }
            Kind::Double => put(path, Value::F64(f64::NAN)),
            Kind::Message(inner) if inner.full_name() == "google.protobuf.Timestamp" => {
                let time = prost_types::Timestamp { seconds: i64::MAX, nanos: 0 };
                put(path, Value::Message(time.transcode_to_dynamic()));
            }
            Kind::Message(inner) if inner.full_name() == "google.protobuf.Duration" => {
                let duration = prost_types::Duration { seconds: i64::MAX, nanos: 0 };
                put(path, Value::Message(duration.transcode_to_dynamic()));
            }
            Kind::Message(inner) => {
                for (deeper, value) in violating_requests(&inner, parents) {
                    put(format!("{path}.{deeper}"), Value::Message(value));
                }
            }
            _ => {}
        }
    }
    parents.pop();
    requests
}

fn number(kind: &Kind, value: i64) -> Value {
    match kind {
        Kind::Int32 => Value::I32(value.try_into().expect("a limit of 32 bits")),
        Kind::Uint32 => Value::U32(value.try_into().expect("a limit of 32 bits")),
        Kind::Uint64 => Value::U64(value.try_into().expect("a limit that is positive")),
        _ => Value::I64(value),
    }
}

/// A rule of a field holds for every method whose request has the field. A method that does not
/// check it fails here.
#[tokio::test]
async fn every_method_refuses_contract_violations() {
    let gateway = Gateway::start_with(login_required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let (_, own) = create_key(&gateway, local, Role::Owner, &[Scope::Admin], None).await;
    let mut refused = 0;
    for (method, _) in methods() {
        for (path, request) in violating_requests(&method.input(), &mut Vec::new()) {
            let name = format!("{}: {path}", method.full_name());
            let answer = send(&gateway, &method, request.encode_to_vec(), Some(&own)).await;
            let status = answer.err().unwrap_or_else(|| panic!("{name} is accepted"));
            assert_eq!(status.code(), Code::InvalidArgument, "{name}: {status:?}");
            let details = status.get_error_details();
            let fields = details.bad_request().map_or(&[][..], |bad| &bad.field_violations);
            let is_named = fields.iter().any(|wrong| wrong.field == path) || fields.len() == 32;
            assert!(is_named, "{name}: {fields:?}");
            refused += 1;
        }
    }
    assert!(refused > 400, "{refused}");
}
