//! Which conversation a call belongs to, and which client makes it.
//!
//! Clients do not agree on a session id, and OpenClaw sends none; see
//! [`conversation`] for the order in which signals are believed.

use axum::http::HeaderMap;
use sha2::{Digest, Sha256};
use spotter_core::chat::{Message, Role};
use spotter_core::id::SessionUid;

use crate::pool::hex;
use crate::user_text;

/// What a request's body says about its conversation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hints {
    /// `prompt_cache_key`.
    pub(crate) cache_key: Option<String>,
    /// The session inside Anthropic's `metadata.user_id`.
    pub(crate) metadata_session: Option<String>,
    /// `user`.
    pub(crate) user: Option<String>,
    /// The trajectory in the URL.
    pub(crate) trajectory: Option<PathTrajectory>,
}

/// The trajectory and prompt ids of a Claw-R1 URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PathTrajectory {
    /// The task attempt.
    pub(crate) trajectory: String,
    /// The prompt group.
    pub(crate) prompt: String,
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers
        .get(name)?
        .to_str()
        .ok()
        .map(str::trim)
        .filter(|value| !value.is_empty())
}

/// The id of a conversation, derived from the first signal that is there:
///
/// 1. the trajectory in the URL,
/// 2. `prompt_cache_key` (OpenClaw sends `<sessionId>:0`; the suffix is dropped),
/// 3. `X-Claude-Code-Session-Id`, then the session in `metadata.user_id`,
/// 4. `X-Session-Id`, `X-Session-Affinity`,
/// 5. `sessionId=` in OpenClaw's `Runtime:` line,
/// 6. `user`,
/// 7. the system prompt and the first words of the person.
///
/// The id is a digest of the signal, so it is the same after a restart.
pub(crate) fn conversation(
    hints: &Hints,
    headers: &HeaderMap,
    messages: &[Message],
) -> (SessionUid, &'static str) {
    if let Some(path) = &hints.trajectory {
        return (SessionUid::from(path.trajectory.clone()), "url");
    }
    let runtime = || {
        messages
            .iter()
            .filter(|m| matches!(m.role, Role::System | Role::User))
            .find_map(|m| user_text::runtime_session(&m.content))
    };
    let (key, signal) = if let Some(key) = hints.cache_key.as_deref().filter(|k| !k.is_empty()) {
        (without_slot(key).to_owned(), "prompt_cache_key")
    } else if let Some(key) = header(headers, "x-claude-code-session-id") {
        (key.to_owned(), "x-claude-code-session-id")
    } else if let Some(key) = hints.metadata_session.clone() {
        (key, "metadata.user_id")
    } else if let Some(key) = header(headers, "x-session-id") {
        (key.to_owned(), "x-session-id")
    } else if let Some(key) = header(headers, "x-session-affinity") {
        (key.to_owned(), "x-session-affinity")
    } else if let Some(key) = runtime() {
        (key, "runtime line")
    } else if let Some(key) = hints.user.clone().filter(|u| !u.is_empty()) {
        (format!("user:{key}"), "user")
    } else {
        return (opening(messages), "opening");
    };
    (digest(&key), signal)
}

/// A session id of a client, as it is stored: the digest of the client's own key.
pub(crate) fn digest(key: &str) -> SessionUid {
    SessionUid::from(hex(&Sha256::digest(key.as_bytes())[..16]))
}

/// `<sessionId>:0` without the slot number.
pub(crate) fn without_slot(key: &str) -> &str {
    match key.rsplit_once(':') {
        Some((id, slot)) if !id.is_empty() && slot.bytes().all(|b| b.is_ascii_digit()) => id,
        _ => key,
    }
}

/// The digest of the system prompt and the first words of the person.
fn opening(messages: &[Message]) -> SessionUid {
    let mut hash = Sha256::new_with_prefix("opening");
    for message in messages {
        match message.role {
            Role::System => {
                hash.update([1]);
                hash.update(message.content.trim());
            }
            Role::User => {
                let words = user_text::genuine(&message.content);
                if !words.is_empty() {
                    hash.update([2]);
                    hash.update(words);
                    break;
                }
            }
            Role::Assistant | Role::Tool => break,
        }
    }
    SessionUid::from(hex(&hash.finalize()[..16]))
}

/// The client: a recognised name, or what it calls itself.
pub(crate) fn client(headers: &HeaderMap, messages: &[Message]) -> String {
    if let Some(name) = header(headers, "x-gateway-client") {
        return name.chars().take(60).collect();
    }
    // Its marks open a message; looking through 50 kB of prompt would take longer.
    let openclaw = messages.iter().any(|m| {
        let text = m.content.trim_start();
        text.starts_with("<!-- openclaw:attempt:")
            || text.starts_with("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>")
    });
    if openclaw {
        return "openclaw".to_owned();
    }
    let agent = header(headers, "user-agent").unwrap_or_default();
    let lower = agent.to_ascii_lowercase();
    let known = [
        ("claude-cli", "claude-code"),
        ("openai/python", "openai-python"),
        ("asyncopenai/python", "openai-python"),
        ("openai/js", "openai-js"),
        ("anthropic/python", "anthropic-python"),
        ("anthropic/js", "anthropic-js"),
        ("ai-sdk", "vercel-ai"),
        ("ai/", "vercel-ai"),
        ("mozilla/", "browser"),
    ];
    for (prefix, name) in known {
        if lower.starts_with(prefix) {
            if headers.contains_key("x-session-affinity") && name == "openai-python" {
                return "nanobot".to_owned();
            }
            return name.to_owned();
        }
    }
    match agent.split_whitespace().next() {
        Some(product) => product.chars().take(60).collect(),
        None => "unknown".to_owned(),
    }
}

/// The trace id of a W3C `traceparent`; `None` when absent, malformed or zero.
pub(crate) fn trace_id(headers: &HeaderMap) -> Option<String> {
    let id = header(headers, "traceparent")?.split('-').nth(1)?;
    let valid = id.len() == 32
        && id.bytes().all(|b| b.is_ascii_hexdigit())
        && id.bytes().any(|b| b != b'0');
    valid.then(|| id.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue};
    use spotter_core::chat::{Message, Role};

    use super::{Hints, conversation, trace_id, without_slot};

    #[test]
    fn a_session_is_the_same_by_cache_key_and_by_runtime_line() {
        let messages = [Message::text(
            Role::User,
            "hi\n\nRuntime: agent=main | session=agent:main:main | sessionId=abc-1 | host=h",
        )];
        let by_line = conversation(&Hints::default(), &HeaderMap::new(), &messages);
        let hints = Hints {
            cache_key: Some("abc-1:0".into()),
            ..Hints::default()
        };
        let by_key = conversation(&hints, &HeaderMap::new(), &messages);
        assert_eq!(by_line.0, by_key.0);
        assert_eq!((by_line.1, by_key.1), ("runtime line", "prompt_cache_key"));
        assert_eq!(without_slot("plain"), "plain");
    }

    #[test]
    fn conversations_with_another_opening_are_apart() {
        let of = |text: &str, more: &[Message]| {
            let mut messages = vec![Message::text(Role::User, text)];
            messages.extend_from_slice(more);
            conversation(&Hints::default(), &HeaderMap::new(), &messages).0
        };
        let more = [
            Message::text(Role::Assistant, "hello"),
            Message::text(Role::User, "and then?"),
        ];
        assert_eq!(of("hi", &[]), of("hi", &more));
        assert_ne!(of("hi", &[]), of("ho", &[]));
    }

    #[test]
    fn only_valid_trace_ids_count() {
        let with = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("traceparent", HeaderValue::from_static(value));
            trace_id(&headers)
        };
        assert_eq!(
            with("00-7684f80c4bedc6fe64562c791b579640-f216ca351e8ae722-01").as_deref(),
            Some("7684f80c4bedc6fe64562c791b579640")
        );
        assert_eq!(
            with("00-00000000000000000000000000000000-f216ca351e8ae722-01"),
            None
        );
        assert_eq!(with("nonsense"), None);
    }
}
