//! The parameters of a call with GET.

use base64::{
    Engine as _,
    alphabet::URL_SAFE,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use bytes::Bytes;
use tonic::Status;

use crate::protocols::codec::{Codec, Encoding, invalid};

/// Padding is optional.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The message in a query.
///
/// # Errors
/// `INVALID_ARGUMENT` with the invalid parameter.
pub(super) fn message(query: &str) -> Result<(Codec, Bytes), Status> {
    let (mut codec, mut message, mut base64, mut encoding) =
        (None, None, false, Encoding::Identity);
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "connect" if value == "v1" => {}
            "connect" => return Err(invalid("connect", "must be `v1`")),
            "encoding" => {
                codec = Some(match &*value {
                    "json" => Codec::Json,
                    "proto" => Codec::Proto,
                    _ => return Err(invalid("encoding", "must be `json` or `proto`")),
                });
            }
            "compression" => encoding = Encoding::from_name(&value)?,
            "base64" => base64 = value == "1",
            // The parser converts bytes to text, so a binary message must be base64.
            "message" => message = Some(value.into_owned()),
            // Other parameters are for intermediaries such as caches.
            _ => {}
        }
    }
    let codec = codec.ok_or_else(|| invalid("encoding", "is missing: `json` or `proto`"))?;
    let message = message.ok_or_else(|| invalid("message", "is missing"))?;
    let bytes = if base64 {
        let invalid_base64 = |error: base64::DecodeError| {
            invalid("message", &format!("is not URL-safe base64: {error}"))
        };
        BASE64.decode(message).map_err(invalid_base64)?
    } else {
        message.into_bytes()
    };
    Ok((codec, encoding.decompress(bytes.into())?))
}
