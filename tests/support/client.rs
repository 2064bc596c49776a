//! An HTTP client that keeps whole answers.

use std::net::SocketAddr;
use std::time::Duration;

use reqwest::{Method, RequestBuilder};
use serde_json::Value;

/// A response read to its end.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: http::HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// # Errors
    /// When the response breaks off.
    pub(crate) async fn read(response: reqwest::Response) -> reqwest::Result<Self> {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Ok(Self { status, headers, body: response.bytes().await?.to_vec() })
    }

    /// # Panics
    /// When the header is there more than once.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).iter();
        let value = values.next()?;
        assert!(values.next().is_none(), "more than one {name}: {:?}", self.headers);
        Some(value.to_str().expect("a text header"))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// # Panics
    /// When the body is not JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.text()))
    }

    /// The `error` member of a refusal; `None` for anything else.
    pub(crate) fn error(&self) -> Option<String> {
        let body: Value = serde_json::from_slice(&self.body).ok()?;
        Some(body.get("error")?.as_str()?.to_owned())
    }
}

/// One version of HTTP towards one address. Clones share their connections.
#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    address: SocketAddr,
}

impl Client {
    pub(crate) fn http1(address: SocketAddr) -> Self {
        Self { http: build(reqwest::Client::builder().http1_only()), address }
    }

    /// HTTP/2 with prior knowledge, all on one connection.
    pub(crate) fn http2(address: SocketAddr) -> Self {
        Self { http: build(reqwest::Client::builder().http2_prior_knowledge()), address }
    }

    /// A request to add to; dropping what it sends aborts it.
    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("http://{}{path}", self.address))
    }

    /// A GET with this key in `x-api-key`.
    ///
    /// # Panics
    /// When there is no whole answer.
    pub(crate) async fn get(&self, path: &str, key: Option<&str>) -> Answer {
        let mut request = self.request(Method::GET, path);
        if let Some(key) = key {
            request = request.header("x-api-key", key);
        }
        self.send(request).await
    }

    /// A GET that the upstream's record lists under `id`.
    ///
    /// # Panics
    /// When there is no whole answer.
    pub(crate) async fn get_as(&self, id: &str, path: &str, key: &str) -> Answer {
        self.send(self.request(Method::GET, path).header("x-api-key", key).header("x-test-id", id)).await
    }

    /// # Panics
    /// When there is no whole answer.
    pub(crate) async fn send(&self, request: RequestBuilder) -> Answer {
        let response = request.send().await.unwrap_or_else(|error| panic!("no answer: {error:?}"));
        Answer::read(response).await.unwrap_or_else(|error| panic!("no whole answer: {error:?}"))
    }
}

/// One GET over a connection of its own; `None` when nothing answers.
pub(crate) async fn fetch(url: &str) -> Option<Answer> {
    let response = build(reqwest::Client::builder().http1_only()).get(url).send().await.ok()?;
    Answer::read(response).await.ok()
}

/// Without proxies or redirects, and with an end to every wait.
fn build(builder: reqwest::ClientBuilder) -> reqwest::Client {
    let builder = builder.no_proxy().redirect(reqwest::redirect::Policy::none()).timeout(Duration::from_secs(120));
    builder.build().expect("a client without TLS")
}
