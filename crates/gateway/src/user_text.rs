//! The genuine words of a person, without what clients wrap around them.
//!
//! OpenClaw prefixes a timestamp, appends a `Runtime:` line, adds a transient
//! message of internal context and rewrites a message that it sends again; Claude
//! Code adds `<system-reminder>` blocks. None of that is the person's text.

use std::sync::LazyLock;

use regex::Regex;
use spotter_core::chat::{Message, Role};

const CONTEXT_BEGIN: &str = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>";
const CONTEXT_END: &str = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>";
const RETRY_BEGIN: &str = "[Queued user message from a previous active turn";
const RETRY_END: &str = "Continue the current task from the existing transcript";

/// A pattern of this module; all are literals that the tests compile.
fn pattern(text: &str) -> Option<Regex> {
    Regex::new(text).ok()
}

static TIMESTAMP: LazyLock<Option<Regex>> = LazyLock::new(|| {
    pattern(
        r"^\s*\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d{2}-\d{2} \d{2}:\d{2}(?::\d{2})?(?: [^\]\n]{1,40})?\]\s?",
    )
});
static RUNTIME: LazyLock<Option<Regex>> =
    LazyLock::new(|| pattern(r"(?:^|\n)\s*Runtime: (?:agent|session|host)[^\n]*\|[^\n]*"));
static REMINDER: LazyLock<Option<Regex>> =
    LazyLock::new(|| pattern(r"(?s)<system-reminder>.*?</system-reminder>\s*"));
fn without(text: &str, pattern: &LazyLock<Option<Regex>>) -> String {
    match LazyLock::force(pattern) {
        Some(regex) => regex.replace_all(text, "").into_owned(),
        None => text.to_owned(),
    }
}

/// Whether a message is only OpenClaw's transient context, which it appends to
/// every call and never keeps.
pub(crate) fn is_transient(message: &Message) -> bool {
    let text = message.content.trim();
    message.role == Role::User && text.starts_with(CONTEXT_BEGIN) && text.ends_with(CONTEXT_END)
}

/// Whether a message is one that OpenClaw sends again after an error.
pub(crate) fn is_retry(text: &str) -> bool {
    text.contains(RETRY_BEGIN) || text.contains(RETRY_END)
}

/// The person's words in one user message; empty when there are none.
pub(crate) fn genuine(text: &str) -> String {
    let mut text = text.to_owned();
    while let Some(begin) = text.find(CONTEXT_BEGIN) {
        let end = text[begin..]
            .find(CONTEXT_END)
            .map_or(text.len(), |at| begin + at + CONTEXT_END.len());
        text.replace_range(begin..end, "");
    }
    text = without(&text, &REMINDER);
    text = without(&text, &RUNTIME);
    if let Some(begin) = text.find(RETRY_BEGIN) {
        // The wrapper's own line ends the announcement; the text follows it.
        let after = text[begin..]
            .find('\n')
            .map_or(text.len(), |at| begin + at + 1);
        text.replace_range(begin..after, "");
    }
    if let Some(end) = text.find(RETRY_END) {
        text.truncate(end);
    }
    without(text.trim(), &TIMESTAMP).trim().to_owned()
}

/// The session id in OpenClaw's `Runtime:` line, wherever it stands.
///
/// The line ends a message, so the search begins at the end; system prompts have
/// 50 kB and more.
pub(crate) fn runtime_session(text: &str) -> Option<String> {
    let line = text[text.rfind("Runtime: ")?..].lines().next()?;
    line.split('|')
        .find_map(|field| field.trim().strip_prefix("sessionId="))
        .filter(|id| !id.is_empty())
        .map(str::to_owned)
}

/// The last user message with words of a person: its position, its raw text and
/// the words.
pub(crate) fn last_genuine(messages: &[Message]) -> Option<(usize, &str, String)> {
    messages
        .iter()
        .enumerate()
        .rev()
        .filter(|(_, m)| m.role == Role::User)
        .find_map(|(at, m)| {
            let words = genuine(&m.content);
            (!words.is_empty()).then_some((at, m.content.as_str(), words))
        })
}

#[cfg(test)]
mod tests {
    use super::{genuine, is_retry, runtime_session};

    const FIRST: &str = "[Tue 2026-12-01 05:09 UTC] Say hello\n\nRuntime: agent=main | session=agent:main:main | sessionId=3ec9cf0d-414c-48ec-8c94-ae289cb75fb0 | host=laptop";

    #[test]
    fn wrappers_are_removed() {
        assert_eq!(genuine(FIRST), "Say hello");
        assert_eq!(
            genuine(
                "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nx\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
            ),
            ""
        );
        assert_eq!(
            genuine("<system-reminder>\nnotes\n</system-reminder>\nrun a command"),
            "run a command"
        );
        assert_eq!(genuine("  plain\ntext "), "plain\ntext");
        assert_eq!(genuine("[not a date] stays"), "[not a date] stays");
    }

    #[test]
    fn a_retried_message_gives_back_the_original_words() {
        let wrapped = "[Queued user message from a previous active turn; preserved as context only]\nSay hello\n\nContinue the current task from the existing transcript and do not repeat work.";
        assert!(is_retry(wrapped));
        assert_eq!(genuine(wrapped), "Say hello");
        let dated = "[Queued user message from a previous active turn; preserved as context only]\n[Tue 2026-12-01 05:09 UTC] Say hello\n\nContinue the current task from the existing transcript.";
        assert_eq!(genuine(dated), "Say hello");
    }

    #[test]
    fn the_session_id_is_read_from_the_runtime_line() {
        assert_eq!(
            runtime_session(FIRST).as_deref(),
            Some("3ec9cf0d-414c-48ec-8c94-ae289cb75fb0")
        );
        assert_eq!(runtime_session("sessionId=1 without a runtime line"), None);
    }
}
