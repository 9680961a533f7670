//! Ids and names out of a message, by the numbers of their fields. What is not asked for is skipped
//! without being looked at.

use prost::{
    bytes::Buf as _,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};

/// Objects of an entry at most.
pub(super) const MOST: usize = 32;
/// Characters of an id or name at most.
const LONGEST: usize = 128;

/// Adds what stands at `paths` in `message`. A message that cannot be read gives what stood before
/// that.
pub(super) fn find(mut message: &[u8], paths: &[&[u32]], found: &mut Vec<String>) {
    while message.has_remaining() && found.len() < MOST {
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
                    add(value, found);
                } else if !deeper.is_empty() {
                    find(value, &deeper, found);
                }
            }
            WireType::Varint => {
                let Ok(value) = decode_varint(&mut message) else { return };
                if paths.iter().filter(at).any(|path| path.len() == 1) {
                    add(value.to_string().as_bytes(), found);
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

/// Adds an id or a name. Whatever else stands in such a field is not for the trail.
pub(super) fn add(value: &[u8], found: &mut Vec<String>) {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-:/@".contains(byte);
    if value.is_empty() || value.len() > LONGEST || !value.iter().all(plain) || found.len() >= MOST
    {
        return;
    }
    let text = String::from_utf8_lossy(value).into_owned();
    if !found.contains(&text) {
        found.push(text);
    }
}
