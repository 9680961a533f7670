//! Credentials for AWS: an access key, which signs every request, or a Bedrock API key, which is
//! sent as a bearer token.

use jiff::Timestamp;
use reqwest::{
    Url,
    header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, InvalidHeaderValue},
};
use secrecy::{ExposeSecret as _, SecretString};

use super::signature::{AccessKey, SigningRequest, sign};
use crate::failure::Failure;

/// The parsed key of a provider.
pub(super) enum Credentials {
    Signing { access_key: AccessKey, token: Option<SecretString> },
    Bearer(SecretString),
}

impl Credentials {
    /// Parses `ACCESS_KEY_ID:SECRET_ACCESS_KEY[:SESSION_TOKEN]`, or a Bedrock API key, which has no
    /// colon.
    pub(super) fn parse(key: Option<&SecretString>) -> Result<Self, Failure> {
        let key = key.ok_or_else(|| {
            Failure::configuration("the provider has no API key, which Bedrock needs")
        })?;
        let Some((id, rest)) = key.expose_secret().split_once(':') else {
            return Ok(Self::Bearer(key.clone()));
        };
        let (secret, token) = match rest.split_once(':') {
            Some((secret, token)) => (secret, Some(SecretString::from(token))),
            None => (rest, None),
        };
        let access_key = AccessKey { id: id.to_owned(), secret: SecretString::from(secret) };
        Ok(Self::Signing { access_key, token })
    }

    /// The authentication headers of a request with `body` to `url` at `now`.
    pub(super) fn headers(
        &self,
        method: &str,
        url: &Url,
        region: &str,
        body: &[u8],
        now: Timestamp,
    ) -> Result<HeaderMap, Failure> {
        self.try_headers(method, url, region, body, now).map_err(|_| {
            Failure::configuration("the API key holds characters that no HTTP header allows")
        })
    }

    fn try_headers(
        &self,
        method: &str,
        url: &Url,
        region: &str,
        body: &[u8],
        now: Timestamp,
    ) -> Result<HeaderMap, InvalidHeaderValue> {
        let mut headers = HeaderMap::new();
        let (authorization, signing) = match self {
            Self::Bearer(key) => (format!("Bearer {}", key.expose_secret()), None),
            Self::Signing { access_key, token } => {
                let date = now.strftime("%Y%m%dT%H%M%SZ").to_string();
                let host = match (url.host_str(), url.port()) {
                    (Some(host), Some(port)) => format!("{host}:{port}"),
                    (host, _) => host.unwrap_or_default().to_owned(),
                };
                let mut signed = vec![
                    ("content-type", "application/json"),
                    ("host", &host),
                    ("x-amz-date", &date),
                ];
                if let Some(token) = token {
                    signed.push(("x-amz-security-token", token.expose_secret()));
                }
                let request = SigningRequest {
                    method,
                    path: url.path(),
                    query: "",
                    headers: &signed,
                    body,
                    service: "bedrock",
                };
                (sign(access_key, &request, region, &date), Some((date.clone(), token)))
            }
        };
        if let Some((date, token)) = signing {
            headers.insert(HeaderName::from_static("x-amz-date"), HeaderValue::from_str(&date)?);
            if let Some(token) = token {
                headers.insert(
                    HeaderName::from_static("x-amz-security-token"),
                    sensitive_header(token.expose_secret())?,
                );
            }
        }
        headers.insert(AUTHORIZATION, sensitive_header(&authorization)?);
        Ok(headers)
    }
}

fn sensitive_header(value: &str) -> Result<HeaderValue, InvalidHeaderValue> {
    let mut value = HeaderValue::from_str(value)?;
    value.set_sensitive(true);
    Ok(value)
}

/// The region of an endpoint: from its host (`bedrock-runtime.REGION.amazonaws.com`, also with a
/// prefix or from a private network), or from the parameter `region`.
pub(super) fn region(base: &Url) -> Result<String, Failure> {
    if let Some((_, region)) =
        base.query_pairs().find(|(name, value)| name == "region" && !value.is_empty())
    {
        return Ok(region.into_owned());
    }
    let mut labels = base
        .host_str()
        .unwrap_or_default()
        .split('.')
        .skip_while(|label| !label.starts_with("bedrock-runtime"));
    match (labels.next(), labels.next()) {
        (Some(_), Some(region)) if !region.is_empty() => Ok(region.to_owned()),
        _ => Err(Failure::configuration(
            "the base URL names no region: use https://bedrock-runtime.REGION.amazonaws.com, or add ?region=REGION",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_is_read_from_host_or_query() {
        for (base, expected) in [
            ("https://bedrock-runtime.eu-central-1.amazonaws.com", Some("eu-central-1")),
            ("https://bedrock-runtime-fips.us-east-1.amazonaws.com/", Some("us-east-1")),
            ("https://bedrock-runtime.cn-north-1.amazonaws.com.cn", Some("cn-north-1")),
            (
                "https://vpce-0a1b-c2d3.bedrock-runtime.us-west-2.vpce.amazonaws.com",
                Some("us-west-2"),
            ),
            ("http://127.0.0.1:4566/?region=us-east-1", Some("us-east-1")),
            ("http://127.0.0.1:4566/", None),
            ("https://bedrock-runtime/", None),
        ] {
            let found = region(&base.parse().expect("a URL")).ok();
            assert_eq!(found.as_deref(), expected, "{base}");
        }
    }

    #[test]
    fn key_without_colon_is_sent_as_bearer_token() {
        let url = "https://bedrock-runtime.us-east-1.amazonaws.com/model/m/converse-stream"
            .parse()
            .expect("a URL");
        let headers = |key: &str| {
            let credentials = Credentials::parse(Some(&SecretString::from(key))).expect("a key");
            credentials
                .headers("POST", &url, "us-east-1", b"{}", Timestamp::UNIX_EPOCH)
                .expect("headers")
        };
        let bearer = headers("ABSKexample");
        assert_eq!(bearer[AUTHORIZATION], "Bearer ABSKexample");
        assert!(bearer[AUTHORIZATION].is_sensitive() && bearer.get("x-amz-date").is_none());
        let signed = headers("AKIDEXAMPLE:secret:token:with:colons");
        assert_eq!(signed["x-amz-date"], "19700101T000000Z");
        assert_eq!(signed["x-amz-security-token"], "token:with:colons");
        let authorization = signed[AUTHORIZATION].to_str().expect("ASCII");
        assert!(
            authorization.starts_with(
                "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/19700101/us-east-1/bedrock/aws4_request, \
                 SignedHeaders=content-type;host;x-amz-date;x-amz-security-token, Signature="
            ),
            "{authorization}"
        );
        assert!(Credentials::parse(None).is_err());
    }
}
