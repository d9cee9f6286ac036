//! What must not be stored: patterns whose matches are replaced before a step reaches
//! the disk.

use std::borrow::Cow;

use regex::Regex;
use serde::Serialize;
use serde_json::Value;
use spotter_core::reward::Reward;
use spotter_core::step::{Step, StepKind};

use crate::error::{Result, StoreError};

/// What stands in the place of a match.
pub const REDACTED: &str = "[redacted]";
/// Why a step that held a match is not trained.
const REASON: &str = "holds redacted text; kept for reading, not for learning";
/// Most compiled size of one pattern.
const PATTERN_BYTES: usize = 1 << 20;

/// Compiled patterns; without any, everything passes unchanged.
#[derive(Debug, Default)]
pub struct Redactor {
    patterns: Vec<Regex>,
}

/// What redaction would do to a text that is stored now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Preview {
    /// The step.
    pub uid: String,
    /// The line with the first match, as it is stored.
    pub before: String,
    /// The same line as it would be stored.
    pub after: String,
}

impl Redactor {
    /// Compiles patterns.
    ///
    /// # Errors
    /// `Invalid` when one is not a regular expression, or matches the empty text.
    pub fn new<S: AsRef<str>>(patterns: &[S]) -> Result<Self> {
        let patterns = patterns
            .iter()
            .map(|p| p.as_ref().trim())
            .filter(|p| !p.is_empty())
            .map(|pattern| {
                let regex = regex::RegexBuilder::new(pattern)
                    .size_limit(PATTERN_BYTES)
                    .build()
                    .map_err(|e| StoreError::Invalid(format!("'{pattern}': {e}")))?;
                if regex.is_match("") {
                    return Err(StoreError::Invalid(format!(
                        "'{pattern}' matches every text, even an empty one"
                    )));
                }
                Ok(regex)
            })
            .collect::<Result<_>>()?;
        Ok(Self { patterns })
    }

    /// Whether there is nothing to look for.
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// The text without what the patterns match.
    pub fn text<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut out = Cow::Borrowed(text);
        for pattern in &self.patterns {
            if let Cow::Owned(changed) = pattern.replace_all(&out, regex::NoExpand(REDACTED)) {
                out = Cow::Owned(changed);
            }
        }
        out
    }

    fn string(&self, text: &mut String) -> bool {
        if let Cow::Owned(changed) = self.text(text) {
            *text = changed;
            return true;
        }
        false
    }

    /// Strings at any depth, names of fields included.
    fn value(&self, value: &mut Value) -> bool {
        match value {
            Value::String(text) => self.string(text),
            Value::Array(items) => items.iter_mut().fold(false, |any, v| self.value(v) | any),
            Value::Object(fields) => {
                let mut any = false;
                if fields.keys().any(|k| matches!(self.text(k), Cow::Owned(_))) {
                    any = true;
                    *fields = std::mem::take(fields)
                        .into_iter()
                        .map(|(k, v)| (self.text(&k).into_owned(), v))
                        .collect();
                }
                fields.values_mut().fold(any, |any, v| self.value(v) | any)
            }
            _ => false,
        }
    }

    /// Redacts a step. Token ids spell the text out, so a step with a match loses them,
    /// and with them the possibility to be learned from.
    pub(crate) fn step(&self, step: &mut Step) {
        if self.is_empty() {
            return;
        }
        let found = self.string(&mut step.user_text)
            | self.string(&mut step.answer_text)
            | self.string(&mut step.client)
            | self.value(&mut step.request)
            | self.value(&mut step.response);
        if found {
            step.prompt_ids.clear();
            step.response_ids.clear();
            step.logprobs.clear();
            step.model_logprobs.clear();
            step.kind = StepKind::Side;
            step.kind_reason = REASON.to_owned();
        }
    }

    /// Redacts what a person wrote about an answer.
    pub(crate) fn reward(&self, reward: &mut Reward) {
        for text in [&mut reward.note, &mut reward.correction]
            .into_iter()
            .flatten()
            .chain(&mut reward.reasons)
        {
            self.string(text);
        }
    }

    /// The first line of a text that would change.
    pub(crate) fn preview(&self, uid: &str, texts: &[&str]) -> Option<Preview> {
        texts
            .iter()
            .flat_map(|text| text.lines())
            .find_map(|line| match self.text(line) {
                Cow::Owned(after) => Some(Preview {
                    uid: uid.to_owned(),
                    before: line.to_owned(),
                    after,
                }),
                Cow::Borrowed(_) => None,
            })
    }
}
