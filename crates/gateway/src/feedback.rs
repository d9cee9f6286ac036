//! Feedback that a person types into the chat, and reactions that a channel
//! reports there.

use std::sync::LazyLock;

use regex::Regex;
use spotter_core::chat::{Message, Role};

use crate::control::dto::{Rating, RatingChange};
use crate::user_text;

/// How every acknowledgement begins; with it, later requests' history is cleaned.
const ACKNOWLEDGED: &str = "Thanks, noted ";

static CORRECTION: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(
        r"(?is)^(?:because\s+)?(?:(?:the|your)\s+(?:right |correct |better )?(?:answer|reply|response)\s+)?(?:it\s+)?should(?:\s+have)?\s+(?:be|been|read|said|say)\s*:?\s+(.+)$",
    )
    .ok()
});
static LABELLED: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"(?is)^(?:correction|correct answer|better)\s*:\s*(.+)$").ok());
static REACTION: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"(?m)^.*\breaction added: (👍|👎)\S* by .*$").ok());

/// Reads a message that is nothing but feedback.
///
/// Understood are thumbs alone, `/good` and `/bad` with or without words, and a
/// thumb with "because …" or "should be …". Anything else is `None`.
pub(crate) fn parse(text: &str) -> Option<RatingChange> {
    let text = text.trim();
    if let Some(rating) = only_thumbs(text) {
        return Some(change(rating, ""));
    }
    for (command, rating) in [("/good", Rating::Up), ("/bad", Rating::Down)] {
        if let Some(rest) = strip_command(text, command) {
            return Some(change(rating, rest));
        }
    }
    let mut characters = text.chars();
    let rating = thumb(characters.next()?)?;
    let rest = characters.as_str().trim_start_matches(is_modifier).trim();
    let lower = rest.to_lowercase();
    let feedback = [
        "because",
        "the answer should",
        "your answer should",
        "should be",
        "should have",
        "correction:",
    ]
    .iter()
    .any(|start| lower.starts_with(start));
    feedback.then(|| change(rating, rest))
}

/// A reaction that a channel reported as text, as in
/// `Telegram reaction added: 👍 by Alice on msg 42`, and the text without it.
pub(crate) fn reported_reaction(text: &str) -> Option<(Rating, String)> {
    let regex = LazyLock::force(&REACTION).as_ref()?;
    let found = regex.captures(text)?;
    let rating = thumb(found.get(1)?.as_str().chars().next()?)?;
    Some((rating, regex.replace_all(text, "").trim().to_owned()))
}

/// The one line that answers feedback.
pub(crate) fn acknowledgement(change: &RatingChange) -> String {
    let thumb = match change.rating {
        Some(Rating::Up) => "👍",
        _ => "👎",
    };
    let kept = if change.correction.is_some() {
        " The better answer is kept."
    } else {
        ""
    };
    format!("{ACKNOWLEDGED}{thumb}{kept}")
}

/// Removes feedback and its acknowledgements from a conversation's history: they
/// are not part of it for the model.
pub(crate) fn without_exchanges(messages: Vec<Message>) -> Vec<Message> {
    let mut kept: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        let acknowledges = message.role == Role::Assistant
            && message.content.starts_with(ACKNOWLEDGED)
            && kept.last().is_some_and(|previous| {
                previous.role == Role::User
                    && parse(&user_text::genuine(&previous.content)).is_some()
            });
        if acknowledges {
            kept.pop();
        } else {
            kept.push(message);
        }
    }
    kept
}

fn change(rating: Rating, words: &str) -> RatingChange {
    let words = words.trim().trim_start_matches([':', ',', '-']).trim();
    let correction = [&CORRECTION, &LABELLED]
        .into_iter()
        .filter_map(|pattern| LazyLock::force(pattern).as_ref())
        .find_map(|regex| regex.captures(words)?.get(1))
        .map(|found| unquoted(found.as_str()))
        .filter(|text| rating == Rating::Down && !text.is_empty());
    let note = if correction.is_some() || words.is_empty() {
        None
    } else {
        let start = words
            .get(..8)
            .filter(|s| s.eq_ignore_ascii_case("because "));
        Some(words[start.map_or(0, str::len)..].trim().to_owned())
    };
    RatingChange {
        rating: Some(rating),
        reasons: Vec::new(),
        note,
        correction,
    }
}

fn unquoted(text: &str) -> String {
    let text = text.trim();
    for (open, close) in [('"', '"'), ('“', '”'), ('«', '»'), ('\'', '\'')] {
        let inner = text
            .strip_prefix(open)
            .and_then(|rest| rest.strip_suffix(close));
        if let Some(inner) = inner {
            return inner.trim().to_owned();
        }
    }
    text.to_owned()
}

fn strip_command<'a>(text: &'a str, command: &str) -> Option<&'a str> {
    let start = text.get(..command.len())?;
    let rest = &text[command.len()..];
    let ends =
        rest.is_empty() || rest.starts_with(|c: char| c.is_whitespace() || c == ':' || c == ',');
    (start.eq_ignore_ascii_case(command) && ends).then(|| rest.trim())
}

fn thumb(c: char) -> Option<Rating> {
    match c {
        '👍' => Some(Rating::Up),
        '👎' => Some(Rating::Down),
        _ => None,
    }
}

/// Skin tones and the variation selector.
fn is_modifier(c: char) -> bool {
    ('\u{1F3FB}'..='\u{1F3FF}').contains(&c) || c == '\u{FE0F}'
}

fn only_thumbs(text: &str) -> Option<Rating> {
    let mut rating = None;
    for c in text.chars() {
        if is_modifier(c) || c.is_whitespace() || c == '!' || c == '.' {
            continue;
        }
        let this = thumb(c)?;
        if rating.is_some_and(|earlier| earlier != this) {
            return None;
        }
        rating = Some(this);
    }
    rating
}

#[cfg(test)]
mod tests {
    use super::{acknowledgement, parse, reported_reaction, without_exchanges};
    use crate::control::dto::Rating;
    use spotter_core::chat::{Message, Role};

    #[test]
    fn thumbs_and_commands_are_feedback() {
        for (text, rating) in [
            ("👍", Rating::Up),
            ("👍🏽", Rating::Up),
            ("👎👎 ", Rating::Down),
            ("/good", Rating::Up),
            ("/BAD", Rating::Down),
        ] {
            let change = parse(text).unwrap_or_else(|| panic!("{text} is feedback"));
            assert_eq!(change.rating, Some(rating), "{text}");
            assert_eq!((change.note, change.correction), (None, None), "{text}");
        }
    }

    #[test]
    fn words_become_a_note_or_a_correction() {
        let change = parse("/bad because it was too long").expect("feedback");
        assert_eq!(change.note.as_deref(), Some("it was too long"));
        let change = parse("/bad the answer should be \"42\"").expect("feedback");
        assert_eq!(change.correction.as_deref(), Some("42"));
        assert_eq!(change.note, None);
        let change = parse("👎 should have been: Bern, of course.").expect("feedback");
        assert_eq!(change.correction.as_deref(), Some("Bern, of course."));
        let change = parse("/good the answer should be kept").expect("feedback");
        assert_eq!(
            change.correction, None,
            "a liked answer needs no correction"
        );
    }

    #[test]
    fn other_messages_are_not_feedback() {
        for text in [
            "",
            "👍👎",
            "good",
            "/goodbye",
            "👍 now write a poem",
            "/badge me",
            "a 👍",
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_reported_reaction_is_read_and_removed() {
        let text = "Telegram reaction added: 👎 by Alice (@alice) on msg 42\nWhat now?";
        let (rating, rest) = reported_reaction(text).expect("a reaction");
        assert_eq!((rating, rest.as_str()), (Rating::Down, "What now?"));
    }

    #[test]
    fn feedback_leaves_no_trace_in_the_history() {
        let change = parse("👍").expect("feedback");
        let messages = vec![
            Message::text(Role::User, "hi"),
            Message::text(Role::Assistant, "hello"),
            Message::text(Role::User, "👍"),
            Message::text(Role::Assistant, acknowledgement(&change)),
            Message::text(Role::User, "and now?"),
        ];
        let kept = without_exchanges(messages);
        let texts: Vec<_> = kept.iter().map(|m| m.content.as_str()).collect();
        assert_eq!(texts, ["hi", "hello", "and now?"]);
    }
}
