//! HTTP clients for tests.

/// A client that ignores the environment's proxies.
pub fn client() -> reqwest::ClientBuilder {
    // The library insists on a provider for TLS, which no test uses. Somebody else may have chosen
    // one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy()
}
