//! Reading request bodies and writing streams.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{self, Form, invalid};

/// A JSON object, whatever its content type says. Errors have the dialect's form.
pub(crate) struct Json(pub(crate) Map<String, Value>);

impl<S: Send + Sync> FromRequest<S> for Json {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let form = Form::of_path(request.uri().path());
        let bytes = read(request, state, form).await?;
        object(&bytes)
            .map(Self)
            .map_err(|failure| error::response(form, &failure))
    }
}

/// A JSON object that may be left out entirely.
pub(crate) struct OptionalJson(pub(crate) Map<String, Value>);

impl<S: Send + Sync> FromRequest<S> for OptionalJson {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let form = Form::of_path(request.uri().path());
        let bytes = read(request, state, form).await?;
        if bytes.trim_ascii().is_empty() {
            return Ok(Self(Map::new()));
        }
        object(&bytes)
            .map(Self)
            .map_err(|failure| error::response(form, &failure))
    }
}

/// The query string; errors have the dialect's form.
pub(crate) struct Query<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Response> {
        axum::extract::Query::try_from_uri(&parts.uri)
            .map(|axum::extract::Query(query)| Self(query))
            .map_err(|rejection| {
                let failure = invalid(format!("{}.", rejection.body_text()));
                error::response(Form::of_path(parts.uri.path()), &failure)
            })
    }
}

async fn read<S: Send + Sync>(request: Request, state: &S, form: Form) -> Result<Bytes, Response> {
    Bytes::from_request(request, state)
        .await
        .map_err(|rejection| {
            let status = rejection.status();
            let failure = if status == StatusCode::PAYLOAD_TOO_LARGE {
                invalid(format!(
                    "The body is larger than {} MB.",
                    crate::BODY_LIMIT / (1024 * 1024)
                ))
            } else {
                invalid("The body could not be read.")
            };
            let mut response = error::response(form, &failure);
            *response.status_mut() = status;
            response
        })
}

fn object(bytes: &[u8]) -> Result<Map<String, Value>, spotter_core::code::Failure> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(invalid("The body is JSON, but not an object.")),
        Err(error) => Err(invalid(format!("The body is not JSON: {error}."))),
    }
}

/// One server-sent event with data only.
pub(crate) fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// One server-sent event with a name.
pub(crate) fn event(name: &str, value: &Value) -> String {
    format!("event: {name}\ndata: {value}\n\n")
}

/// A streamed answer.
pub(crate) fn stream<S>(content_type: &'static str, headers: HeaderMap, lines: S) -> Response
where
    S: Stream<Item = String> + Send + 'static,
{
    let body = Body::from_stream(lines.map(|line| Ok::<_, Infallible>(Bytes::from(line))));
    let mut response = (headers, body).into_response();
    let fixed = response.headers_mut();
    fixed.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    fixed.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks a reverse proxy in between to pass every event on at once.
    fixed.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// `text/event-stream`.
pub(crate) const SSE: &str = "text/event-stream; charset=utf-8";
/// Newline-delimited JSON.
pub(crate) const NDJSON: &str = "application/x-ndjson";
