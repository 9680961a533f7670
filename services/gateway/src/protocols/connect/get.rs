//! The parameters of a call with GET.

use base64::{
    Engine as _,
    alphabet::URL_SAFE,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use bytes::Bytes;
use tonic::Status;

use crate::protocols::codec::{Codec, Encoding, invalid};

/// Padding may be there or not.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The message that stands in a query.
///
/// # Errors
/// `INVALID_ARGUMENT` with the parameter that is wrong.
pub(super) fn message(query: &str) -> Result<(Codec, Bytes), Status> {
    let (mut codec, mut message, mut base64, mut encoding) =
        (None, None, false, Encoding::Identity);
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "connect" if value == "v1" => {}
            "connect" => return Err(invalid("connect", "there is only `v1`")),
            "encoding" => {
                codec = Some(match &*value {
                    "json" => Codec::Json,
                    "proto" => Codec::Proto,
                    _ => return Err(invalid("encoding", "must be `json` or `proto`")),
                });
            }
            "compression" => encoding = Encoding::named(&value)?,
            "base64" => base64 = value == "1",
            // Bytes, of which the parser has made text: what is no text has to come as base64.
            "message" => message = Some(value.into_owned()),
            // Further ones are for those in between, such as caches.
            _ => {}
        }
    }
    let codec = codec.ok_or_else(|| invalid("encoding", "is missing: `json` or `proto`"))?;
    let message = message.ok_or_else(|| invalid("message", "is missing"))?;
    let bytes = if base64 {
        let words = |error: base64::DecodeError| {
            invalid("message", &format!("is no base64 for addresses: {error}"))
        };
        BASE64.decode(message).map_err(words)?
    } else {
        message.into_bytes()
    };
    Ok((codec, encoding.unpack(bytes.into())?))
}
