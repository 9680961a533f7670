//! HTTP clients for tests.

/// A client that ignores the environment's proxies.
pub fn client() -> reqwest::ClientBuilder {
    // The library requires a TLS provider, which no test uses. Another test may have installed one
    // already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy()
}
