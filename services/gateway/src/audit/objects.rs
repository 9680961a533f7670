//! Collects ids and names from an encoded message, by field numbers. Other fields are skipped
//! without being decoded.

use prost::{
    bytes::Buf as _,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};

/// Maximum number of objects of an entry.
pub(super) const MAX_OBJECTS: usize = 32;
/// Maximum length of an id or name.
const MAX_OBJECT_BYTES: usize = 128;

/// Collects the values at `paths` in `message`. From a malformed message it collects the values
/// before the error.
pub(super) fn collect(mut message: &[u8], paths: &[&[u32]], objects: &mut Vec<String>) {
    while message.has_remaining() && objects.len() < MAX_OBJECTS {
        let Ok((number, wire)) = decode_key(&mut message) else { return };
        let at = |path: &&&[u32]| path.first() == Some(&number);
        match wire {
            WireType::LengthDelimited => {
                let length = decode_varint(&mut message)
                    .ok()
                    .and_then(|length| usize::try_from(length).ok());
                let Some((value, rest)) =
                    length.and_then(|length| message.split_at_checked(length))
                else {
                    return;
                };
                message = rest;
                let deeper: Vec<&[u32]> = paths.iter().filter(at).map(|path| &path[1..]).collect();
                if deeper.iter().any(|path| path.is_empty()) {
                    add(value, objects);
                } else if !deeper.is_empty() {
                    collect(value, &deeper, objects);
                }
            }
            WireType::Varint => {
                let Ok(value) = decode_varint(&mut message) else { return };
                if paths.iter().filter(at).any(|path| path.len() == 1) {
                    add(value.to_string().as_bytes(), objects);
                }
            }
            _ => {
                if skip_field(wire, number, &mut message, DecodeContext::default()).is_err() {
                    return;
                }
            }
        }
    }
}

/// Adds an id or a name. Any other content of the field is ignored.
pub(super) fn add(value: &[u8], objects: &mut Vec<String>) {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-:/@".contains(byte);
    if value.is_empty()
        || value.len() > MAX_OBJECT_BYTES
        || !value.iter().all(plain)
        || objects.len() >= MAX_OBJECTS
    {
        return;
    }
    let text = String::from_utf8_lossy(value).into_owned();
    if !objects.contains(&text) {
        objects.push(text);
    }
}
