//! Encodings of text.

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use rquickjs::{Ctx, Exception, Result, String, TypedArray, Value};

/// The decoding of `atob`: padding may be missing, spare bits may be set.
const FORGIVING: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// Allocates a buffer of this capacity, or throws a JavaScript error: the usual allocation would
/// abort the guest when memory is short.
fn buffer(ctx: &Ctx<'_>, capacity: usize) -> Result<Vec<u8>> {
    let mut buffer = Vec::new();
    match buffer.try_reserve_exact(capacity) {
        Ok(()) => Ok(buffer),
        Err(_) => Err(Exception::throw_internal(ctx, "out of memory")),
    }
}

/// Base64 of text whose characters are bytes; null if one is above U+00FF.
pub(super) fn base64_encode<'js>(ctx: Ctx<'js>, text: String<'js>) -> Result<Value<'js>> {
    let text = super::utf8(&ctx, text)?;
    let mut bytes = buffer(&ctx, text.len())?;
    for character in text.as_str().chars() {
        match u8::try_from(character) {
            Ok(byte) => bytes.push(byte),
            Err(_) => return Ok(Value::new_null(ctx)),
        }
    }
    let len = bytes.len().div_ceil(3) * 4;
    let mut encoded = buffer(&ctx, len)?;
    encoded.resize(len, 0);
    let written = FORGIVING
        .encode_slice(&bytes, &mut encoded)
        .map_err(|_| Exception::throw_internal(&ctx, "base64"))?;
    Ok(super::string_from(&ctx, &encoded[..written])?.into_value())
}

/// The bytes of base64 text as characters; null if it is not base64.
pub(super) fn base64_decode<'js>(ctx: Ctx<'js>, text: String<'js>) -> Result<Value<'js>> {
    let text = super::utf8(&ctx, text)?;
    let mut input = buffer(&ctx, text.len())?;
    input.extend(
        text.as_str()
            .bytes()
            .filter(|byte| !matches!(byte, b' ' | b'\t' | b'\n' | b'\x0c' | b'\r')),
    );
    let mut decoded = buffer(&ctx, input.len() / 4 * 3 + 3)?;
    decoded.resize(decoded.capacity(), 0);
    let Ok(len) = FORGIVING.decode_slice(&input, &mut decoded) else {
        return Ok(Value::new_null(ctx));
    };
    let mut characters = buffer(&ctx, len * 2)?;
    for &byte in &decoded[..len] {
        let mut utf8 = [0; 2];
        characters.extend_from_slice(char::from(byte).encode_utf8(&mut utf8).as_bytes());
    }
    Ok(super::string_from(&ctx, &characters)?.into_value())
}

/// The text's UTF-8 bytes.
pub(super) fn utf8_encode<'js>(ctx: Ctx<'js>, text: String<'js>) -> Result<TypedArray<'js, u8>> {
    let text = super::utf8(&ctx, text)?;
    TypedArray::new_copy(ctx, text.as_str().as_bytes())
}

/// The text of UTF-8 bytes. Invalid bytes become U+FFFD, or null is returned if `fatal`.
pub(super) fn utf8_decode<'js>(
    ctx: Ctx<'js>,
    bytes: TypedArray<'js, u8>,
    fatal: bool,
) -> Result<Value<'js>> {
    let bytes = slice(&bytes);
    if std::str::from_utf8(bytes).is_ok() {
        return Ok(super::string_from(&ctx, bytes)?.into_value());
    }
    if fatal {
        return Ok(Value::new_null(ctx));
    }
    let chunks = bytes.utf8_chunks();
    let len = chunks
        .clone()
        .map(|chunk| chunk.valid().len() + 3 * usize::from(!chunk.invalid().is_empty()))
        .sum();
    let mut text = buffer(&ctx, len)?;
    for chunk in chunks {
        text.extend_from_slice(chunk.valid().as_bytes());
        if !chunk.invalid().is_empty() {
            text.extend_from_slice("\u{fffd}".as_bytes());
        }
    }
    Ok(super::string_from(&ctx, &text)?.into_value())
}

/// The number of bytes up to the last complete character; the rest is the beginning of one.
pub(super) fn utf8_whole(bytes: TypedArray<'_, u8>) -> usize {
    let bytes = slice(&bytes);
    // The beginning of a character is at most three bytes long.
    for start in (bytes.len().saturating_sub(3)..bytes.len()).rev() {
        if let Err(error) = std::str::from_utf8(&bytes[start..])
            && error.error_len().is_none()
            && error.valid_up_to() == 0
        {
            return start;
        }
    }
    bytes.len()
}

/// The bytes of an array; empty if its buffer is detached.
fn slice<'a>(bytes: &'a TypedArray<'_, u8>) -> &'a [u8] {
    // SAFETY: only JavaScript could change or detach the buffer, and none runs while the slice is
    // alive.
    unsafe { bytes.as_bytes() }.unwrap_or_default()
}
