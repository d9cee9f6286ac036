//! Failures in the form each dialect expects. Internal details never leave here.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use spotter_core::Code;
use spotter_core::code::Failure;

/// Whose error form an answer must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// `{"error": {"message", "type", "param", "code"}}`.
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`.
    Anthropic,
    /// `{"error": "message"}`.
    Ollama,
    /// `{"error": {"code", "message"}}`.
    Control,
}

impl Form {
    /// The form of the surface that a path belongs to.
    pub(crate) fn of_path(path: &str) -> Self {
        if path.starts_with("/v1/messages") {
            Self::Anthropic
        } else if path.starts_with("/api/v1") {
            Self::Control
        } else if path.starts_with("/api/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }
}

/// The HTTP status of a failure.
pub(crate) fn status_of(code: Code) -> StatusCode {
    match code {
        Code::InvalidRequest | Code::ContextLengthExceeded => StatusCode::BAD_REQUEST,
        Code::Unauthorized => StatusCode::UNAUTHORIZED,
        Code::Forbidden => StatusCode::FORBIDDEN,
        Code::NotFound | Code::ModelNotFound => StatusCode::NOT_FOUND,
        Code::Conflict => StatusCode::CONFLICT,
        Code::Busy => StatusCode::TOO_MANY_REQUESTS,
        Code::Unavailable | Code::Cancelled | Code::OutOfMemory => StatusCode::SERVICE_UNAVAILABLE,
        Code::DiskFull => StatusCode::INSUFFICIENT_STORAGE,
        Code::BadModelFile
        | Code::ChecksumMismatch
        | Code::NotEnoughLabels
        | Code::NothingToLearn => StatusCode::UNPROCESSABLE_ENTITY,
        Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// The message a client may see.
fn public_message(failure: &Failure) -> &str {
    match failure.code {
        Code::Internal => "Something failed inside Spotter; its log has the details.",
        // A template or grammar explains itself over several lines, with its source.
        _ => failure.message.lines().next().unwrap_or_default(),
    }
}

/// The error's JSON.
pub(crate) fn body(form: Form, failure: &Failure) -> Value {
    let message = public_message(failure);
    let code = failure.code.as_str();
    match form {
        Form::OpenAi => {
            let kind = match status_of(failure.code).as_u16() {
                401 => "authentication_error",
                403 => "permission_error",
                429 => "rate_limit_error",
                400..=499 => "invalid_request_error",
                _ => "server_error",
            };
            json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
        }
        Form::Anthropic => {
            let kind = match failure.code {
                Code::Unauthorized => "authentication_error",
                Code::Forbidden => "permission_error",
                Code::NotFound | Code::ModelNotFound => "not_found_error",
                Code::Busy => "rate_limit_error",
                Code::Unavailable | Code::Cancelled | Code::OutOfMemory => "overloaded_error",
                Code::InvalidRequest | Code::ContextLengthExceeded => "invalid_request_error",
                _ => "api_error",
            };
            json!({"type": "error", "error": {"type": kind, "message": message}})
        }
        Form::Ollama => json!({"error": message}),
        Form::Control => json!({"error": {"code": code, "message": message}}),
    }
}

/// The whole answer.
pub(crate) fn response(form: Form, failure: &Failure) -> Response {
    if failure.code == Code::Internal {
        tracing::error!(message = %failure.message, "a request failed");
    }
    let status = status_of(failure.code);
    let mut response = (status, Json(body(form, failure))).into_response();
    let seconds = match failure.code {
        Code::Busy => Some("2"),
        Code::Unavailable | Code::OutOfMemory => Some("5"),
        _ => None,
    };
    if let Some(seconds) = seconds {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from_static(seconds));
    }
    response
}

/// A malformed request; the message names the field.
pub(crate) fn invalid(message: impl Into<String>) -> Failure {
    Failure::new(Code::InvalidRequest, message)
}

/// A control-API handler's failure.
pub(crate) struct ControlError(pub(crate) Failure);

impl From<Failure> for ControlError {
    fn from(failure: Failure) -> Self {
        Self(failure)
    }
}

impl IntoResponse for ControlError {
    fn into_response(self) -> Response {
        response(Form::Control, &self.0)
    }
}
