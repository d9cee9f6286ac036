//! Where a call stands: its turn, its trajectory, and whether it may be trained.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use axum::http::HeaderMap;
use sha2::{Digest, Sha256};
use spotter_core::chat::{Message, Role};
use spotter_core::code::Failure;
use spotter_core::id::{SessionUid, StepUid, TrajectoryUid};
use spotter_core::step::StepKind;

use crate::pool::{LastStep, Pool, hex};
use crate::session::{self, Hints};
use crate::user_text;

/// How many conversations are remembered; older ones are read from the data pool.
const REMEMBERED: usize = 4096;

/// Where a call stands.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Place {
    pub(crate) session: SessionUid,
    /// The turn's key: the trace id, or derived.
    pub(crate) turn: String,
    pub(crate) trajectory: TrajectoryUid,
    pub(crate) prompt_uid: String,
    /// Position in the trajectory.
    pub(crate) index: u32,
    pub(crate) kind: StepKind,
    pub(crate) kind_reason: String,
    /// The person's words in this turn.
    pub(crate) user_text: String,
    /// Messages of the request that the client keeps.
    pub(crate) messages: usize,
    /// The last main step of the conversation before this call.
    pub(crate) previous: Option<StepUid>,
    /// Whether this is the turn's first call.
    pub(crate) opens_turn: bool,
}

/// How many answers of a conversation are remembered.
const REMEMBERED_ANSWERS: usize = 64;

struct Conversation {
    last: LastStep,
    touched: Instant,
    /// Keys and sampled ids of its answers, oldest first.
    answers: VecDeque<(String, Vec<u32>)>,
}

/// The last main step and the answers of each recently active conversation.
#[derive(Default)]
pub(crate) struct Conversations {
    recent: Mutex<HashMap<SessionUid, Conversation>>,
}

impl Conversations {
    async fn last(
        &self,
        pool: &dyn Pool,
        session: &SessionUid,
    ) -> Result<Option<LastStep>, Failure> {
        {
            let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(conversation) = recent.get(session) {
                return Ok(Some(conversation.last.clone()));
            }
        }
        pool.last_step(session).await
    }

    /// Finds where a call stands. Nothing is remembered until [`Self::commit`],
    /// so a call that fails leaves no mark.
    pub(crate) async fn place(
        &self,
        pool: &dyn Pool,
        hints: &Hints,
        headers: &HeaderMap,
        messages: &[Message],
    ) -> Result<Place, Failure> {
        let (session, _) = session::conversation(hints, headers, messages);
        let last = self.last(pool, &session).await?;
        let genuine = user_text::last_genuine(messages);
        let raw = genuine.as_ref().map_or("", |(_, raw, _)| raw);
        let words = genuine.as_ref().map_or("", |(_, _, words)| words);
        let (kind, kind_reason) = classify(hints, headers, messages, raw, words);
        let kept = messages
            .iter()
            .filter(|m| !user_text::is_transient(m))
            .count();

        if let Some(path) = &hints.trajectory {
            let index = last.as_ref().map_or(0, |l| l.index + 1);
            return Ok(Place {
                turn: path.trajectory.clone(),
                trajectory: TrajectoryUid::from(path.trajectory.clone()),
                prompt_uid: path.prompt.clone(),
                index,
                kind,
                kind_reason,
                user_text: words.to_owned(),
                messages: kept,
                previous: last.map(|l| l.uid),
                opens_turn: index == 0,
                session,
            });
        }

        let mut turn =
            session::trace_id(headers).unwrap_or_else(|| derived_turn(&session, messages, words));
        let resent = user_text::is_retry(raw);
        if let Some(last) = last.as_ref().filter(|l| resent && l.user_text == words) {
            turn.clone_from(&last.turn);
        }
        let same_turn = last.as_ref().filter(|l| l.turn == turn);
        let opens_turn = same_turn.is_none();
        let (trajectory, index) = match same_turn {
            // The history grew, so this call follows from the last one.
            Some(last) if kind == StepKind::Main && kept > last.messages => {
                (last.trajectory.clone(), last.index + 1)
            }
            // Otherwise it is another attempt at the same turn, or another turn.
            _ => (TrajectoryUid::new(), 0),
        };
        Ok(Place {
            prompt_uid: trajectory.to_string(),
            trajectory,
            index,
            turn,
            kind,
            kind_reason,
            user_text: words.to_owned(),
            messages: kept,
            previous: last.map(|l| l.uid),
            opens_turn,
            session,
        })
    }

    /// The sampled ids of a recent answer of a conversation.
    pub(crate) fn answer(&self, session: &SessionUid, key: &str) -> Option<Vec<u32>> {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let answers = &recent.get(session)?.answers;
        let (_, ids) = answers.iter().rev().find(|(known, _)| known == key)?;
        Some(ids.clone())
    }

    /// Remembers a stored main step as the last of its conversation, and its answer's
    /// key and sampled ids.
    pub(crate) fn commit(&self, place: &Place, uid: &StepUid, answer: (String, Vec<u32>)) {
        if place.kind != StepKind::Main {
            return;
        }
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.len() >= REMEMBERED && !recent.contains_key(&place.session) {
            let oldest = recent
                .iter()
                .min_by_key(|(_, conversation)| conversation.touched)
                .map(|(session, _)| session.clone());
            if let Some(oldest) = oldest {
                recent.remove(&oldest);
            }
        }
        let mut answers = recent
            .remove(&place.session)
            .map(|conversation| conversation.answers)
            .unwrap_or_default();
        if !answer.1.is_empty() {
            answers.push_back(answer);
        }
        if answers.len() > REMEMBERED_ANSWERS {
            answers.pop_front();
        }
        let conversation = Conversation {
            last: LastStep {
                uid: uid.clone(),
                trajectory: place.trajectory.clone(),
                index: place.index,
                turn: place.turn.clone(),
                user_text: place.user_text.clone(),
                messages: place.messages,
            },
            touched: Instant::now(),
            answers,
        };
        recent.insert(place.session.clone(), conversation);
    }

    /// Drops what is remembered, after something was forgotten.
    pub(crate) fn forget(&self) {
        self.recent
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }
}

/// A turn's key for clients without a trace id: the conversation, how many
/// messages of the person there are, and the last one's words.
fn derived_turn(session: &SessionUid, messages: &[Message], words: &str) -> String {
    let count = messages
        .iter()
        .filter(|m| m.role == Role::User && !user_text::genuine(&m.content).is_empty())
        .count();
    let digest = hex(&Sha256::digest(words.as_bytes())[..4]);
    let session = session.as_str();
    format!("{}-{count}-{digest}", session.get(..12).unwrap_or(session))
}

/// Phrases that mark a call which a client makes for itself: where to look, the
/// phrase in lower case, and the reason in words.
const SIDE_PHRASES: &[(&str, &str)] = &[
    ("[openclaw heartbeat poll]", "heartbeat of the client"),
    ("read heartbeat.md if it exists", "heartbeat of the client"),
    (
        "pre-compaction memory flush",
        "memory flush before compaction",
    ),
    (
        "create a detailed summary of the conversation",
        "compaction summary",
    ),
    (
        "the messages above are a conversation to summarize",
        "compaction summary",
    ),
    ("context checkpoint summary", "compaction summary"),
    ("context summarization assistant", "compaction summary"),
    ("summarize this coding conversation", "compaction summary"),
    ("generate a concise title", "title of the conversation"),
    ("generate a short title", "title of the conversation"),
    ("generate a title", "title of the conversation"),
    ("write a 5-10 word title", "title of the conversation"),
    ("title for this conversation", "title of the conversation"),
    ("title for the conversation", "title of the conversation"),
    (
        "analyze if this message indicates a new conversation topic",
        "topic detection",
    ),
    (
        "suggest 3-5 relevant follow-up questions",
        "suggested questions",
    ),
    (
        "broad tags categorizing the main themes",
        "tags of the conversation",
    ),
];

/// Whether a call may be trained, and why.
fn classify(
    hints: &Hints,
    headers: &HeaderMap,
    messages: &[Message],
    raw: &str,
    words: &str,
) -> (StepKind, String) {
    let side = |reason: &str| (StepKind::Side, reason.to_owned());
    let declared = headers
        .get("x-spotter-kind")
        .or_else(|| headers.get("x-turn-type"))
        .and_then(|value| value.to_str().ok());
    match declared {
        Some("side") => return side("the client says so"),
        Some("main") => return (StepKind::Main, "the client says so".to_owned()),
        _ => {}
    }
    if hints.trajectory.is_some() {
        return (StepKind::Main, "task attempt of a client".to_owned());
    }
    let lower = raw.to_lowercase();
    // A long system prompt may mention titles or summaries; a short one is about them.
    let short_system = messages
        .iter()
        .filter(|m| m.role == Role::System && m.content.len() < 2000)
        .map(|m| m.content.to_lowercase())
        .collect::<String>();
    for (phrase, reason) in SIDE_PHRASES {
        // The phrase opens the text of a side call; further on a person may quote it.
        let in_text = lower.find(phrase).is_some_and(|at| at < 300);
        if in_text || short_system.contains(phrase) {
            return side(reason);
        }
    }
    if words.is_empty() {
        return side("no words of a person");
    }
    let reason = match messages
        .iter()
        .rev()
        .find(|m| !user_text::is_transient(m))
        .map(|m| m.role)
    {
        Some(Role::Tool) => "continues a person's request after a tool",
        _ => "answers a person",
    };
    (StepKind::Main, reason.to_owned())
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderMap;
    use spotter_core::chat::{Message, Role};
    use spotter_core::step::StepKind;

    use super::classify;
    use crate::session::Hints;
    use crate::user_text::last_genuine;

    fn kind(messages: &[Message]) -> (StepKind, String) {
        let found = last_genuine(messages);
        let (raw, words) = found
            .as_ref()
            .map_or(("", ""), |(_, raw, words)| (*raw, words.as_str()));
        classify(&Hints::default(), &HeaderMap::new(), messages, raw, words)
    }

    #[test]
    fn side_calls_are_recognised_with_their_reason() {
        let (k, reason) = kind(&[Message::text(
            Role::User,
            "[OpenClaw heartbeat poll] anything to do?",
        )]);
        assert_eq!(k, StepKind::Side);
        assert!(reason.contains("heartbeat"));
        let (k, reason) = kind(&[
            Message::text(Role::System, "Generate a concise title for this chat."),
            Message::text(Role::User, "hello"),
        ]);
        assert_eq!(
            (k, reason.as_str()),
            (StepKind::Side, "title of the conversation")
        );
        let (k, _) = kind(&[Message::text(
            Role::User,
            "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>x<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
        )]);
        assert_eq!(k, StepKind::Side);
    }

    #[test]
    fn a_persons_request_is_main() {
        assert_eq!(
            kind(&[Message::text(Role::User, "hello")]).0,
            StepKind::Main
        );
        let (k, reason) = kind(&[
            Message::text(Role::User, "what time is it?"),
            Message::text(Role::Tool, "noon"),
        ]);
        assert_eq!(k, StepKind::Main);
        assert!(reason.contains("tool"));
    }
}
