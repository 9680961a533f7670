//! Signature Version 4, by which AWS authenticates requests. Specified at
//! <https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html>.
//!
//! Own code, because the crate for it depends on the runtime of Amazon's whole client, for these
//! few hashes.

use std::fmt::Write as _;

use ring::{
    digest::{SHA256, digest},
    hmac,
};
use secrecy::{ExposeSecret as _, SecretString};

const ALGORITHM: &str = "AWS4-HMAC-SHA256";

/// An access key.
pub(super) struct AccessKey {
    pub(super) id: String,
    pub(super) secret: SecretString,
}

/// What the signature covers.
pub(super) struct SigningRequest<'a> {
    pub(super) method: &'a str,
    /// As it is sent, i.e. escaped once.
    pub(super) path: &'a str,
    /// In canonical form; empty when there is none.
    pub(super) query: &'a str,
    /// With lower-case names in their order.
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) body: &'a [u8],
    pub(super) service: &'a str,
}

/// The value of the header `Authorization` for a request sent at `date` (`20150830T123600Z`).
pub(super) fn sign(
    key: &AccessKey,
    request: &SigningRequest<'_>,
    region: &str,
    date: &str,
) -> String {
    let names: Vec<&str> = request.headers.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    // The path is escaped a second time; only S3 differs.
    let path: Vec<String> = request.path.split('/').map(percent_encode).collect();
    let mut canonical = format!("{}\n{}\n{}\n", request.method, path.join("/"), request.query);
    for (name, value) in request.headers {
        // Writing to a string cannot fail.
        let _ = writeln!(canonical, "{name}:{}", value.trim());
    }
    let _ = write!(canonical, "\n{names}\n{}", hex(digest(&SHA256, request.body).as_ref()));

    let day = date.get(..8).unwrap_or(date);
    let scope = format!("{day}/{region}/{}/aws4_request", request.service);
    let hash = hex(digest(&SHA256, canonical.as_bytes()).as_ref());
    let to_sign = format!("{ALGORITHM}\n{date}\n{scope}\n{hash}");
    let signing_key = [day, region, request.service, "aws4_request"]
        .iter()
        .fold(format!("AWS4{}", key.secret.expose_secret()).into_bytes(), |key, part| {
            hmac_sha256(&key, part.as_bytes())
        });
    let signature = hex(&hmac_sha256(&signing_key, to_sign.as_bytes()));
    format!(
        "{ALGORITHM} Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
        key.id
    )
}

/// Percent-encodes everything but unreserved characters.
pub(super) fn percent_encode(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            escaped.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(escaped, "%{byte:02X}");
        }
    }
    escaped
}

fn hmac_sha256(key: &[u8], data: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), data).as_ref().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The key of all examples in the vendor's documentation.
    fn key() -> AccessKey {
        AccessKey {
            id: "AKIDEXAMPLE".into(),
            secret: SecretString::from("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"),
        }
    }

    /// The worked example of <https://docs.aws.amazon.com/general/latest/gr/sigv4-create-canonical-request.html>.
    #[test]
    fn documented_example_has_the_documented_signature() {
        let request = SigningRequest {
            method: "GET",
            path: "/",
            query: "Action=ListUsers&Version=2010-05-08",
            headers: &[
                ("content-type", "application/x-www-form-urlencoded; charset=utf-8"),
                ("host", "iam.amazonaws.com"),
                ("x-amz-date", "20150830T123600Z"),
            ],
            body: b"",
            service: "iam",
        };
        assert_eq!(
            sign(&key(), &request, "us-east-1", "20150830T123600Z"),
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/iam/aws4_request, \
             SignedHeaders=content-type;host;x-amz-date, \
             Signature=5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"
        );
    }

    /// The signature of the same request by `aws-sigv4` 1.6, a part of the vendor's own client.
    #[test]
    fn arn_model_and_session_token_match_the_vendor_client() {
        let model = percent_encode(
            "arn:aws:bedrock:eu-central-1:123456789012:inference-profile/eu.anthropic.claude-sonnet-4-20250514-v1:0",
        );
        let request = SigningRequest {
            method: "POST",
            path: &format!("/model/{model}/converse-stream"),
            query: "",
            headers: &[
                ("content-type", "application/json"),
                ("host", "bedrock-runtime.eu-central-1.amazonaws.com"),
                ("x-amz-date", "20150830T123600Z"),
                ("x-amz-security-token", "SESSION+token/="),
            ],
            body: br#"{"messages":[]}"#,
            service: "bedrock",
        };
        let authorization = sign(&key(), &request, "eu-central-1", "20150830T123600Z");
        let signature =
            "Signature=ff3a15491e938afcb81194a03deee960b05bdc582e11360a1cdab572c28551a9";
        assert!(authorization.ends_with(signature), "{authorization}");
    }
}
