//! `POST /v1/embeddings`: refused in words, because the served model generates
//! text and its hidden states are not embeddings anyone should index with.

use axum::http::StatusCode;
use axum::response::Response;
use spotter_core::Code;
use spotter_core::code::Failure;

use crate::error::{self, Form};

/// `POST /v1/embeddings`.
pub(crate) async fn embeddings() -> Response {
    let failure = Failure::new(
        Code::InvalidRequest,
        "Spotter serves a text generation model and offers no embeddings; point the client's embedding setting at another server.",
    );
    let mut response = error::response(Form::OpenAi, &failure);
    *response.status_mut() = StatusCode::NOT_IMPLEMENTED;
    response
}
