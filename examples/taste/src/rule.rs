//! A preference as a rule over the answer's text.

use anyhow::{Context, Result, ensure};
use regex::Regex;
use serde::Deserialize;

/// The preferences that ship with the example, as rule files.
const BUILT_IN: &[&str] = &[
    include_str!("../preferences/brief.json"),
    include_str!("../preferences/calm.json"),
    include_str!("../preferences/asks-back.json"),
    include_str!("../preferences/bullets.json"),
    include_str!("../preferences/signs-off.json"),
    include_str!("../preferences/no-first-person.json"),
];

/// A rule file as written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    name: String,
    max_words: Option<usize>,
    min_words: Option<usize>,
    #[serde(default)]
    must_match: Vec<String>,
    #[serde(default)]
    must_not_match: Vec<String>,
    correction: Option<String>,
    correction_suffix: Option<String>,
}

/// A preference, ready to judge.
#[derive(Debug)]
pub(crate) struct Rule {
    /// What it is called in the report.
    pub(crate) name: String,
    max_words: Option<usize>,
    min_words: Option<usize>,
    must_match: Vec<Regex>,
    must_not_match: Vec<Regex>,
    correction: Option<String>,
    correction_suffix: Option<String>,
}

impl Rule {
    /// Reads a rule file.
    pub(crate) fn parse(json: &str) -> Result<Self> {
        let raw: RawRule = serde_json::from_str(json).context("the rule file is not valid")?;
        let compile = |patterns: &[String]| -> Result<Vec<Regex>> {
            patterns
                .iter()
                .map(|p| {
                    Regex::new(p).with_context(|| format!("'{p}' is not a regular expression"))
                })
                .collect()
        };
        let rule = Self {
            must_match: compile(&raw.must_match)?,
            must_not_match: compile(&raw.must_not_match)?,
            name: raw.name,
            max_words: raw.max_words,
            min_words: raw.min_words,
            correction: raw.correction,
            correction_suffix: raw.correction_suffix,
        };
        ensure!(
            rule.max_words.is_some()
                || rule.min_words.is_some()
                || !rule.must_match.is_empty()
                || !rule.must_not_match.is_empty(),
            "rule '{}' has no clause, so every answer would satisfy it",
            rule.name
        );
        Ok(rule)
    }

    /// One of the preferences that ship with the example.
    pub(crate) fn built_in(name: &str) -> Result<Self> {
        let mut names = Vec::new();
        for json in BUILT_IN {
            let rule = Self::parse(json)?;
            if rule.name == name {
                return Ok(rule);
            }
            names.push(rule.name);
        }
        anyhow::bail!(
            "there is no preference '{name}'; choose one of {}",
            names.join(", ")
        )
    }

    /// Whether every clause holds.
    pub(crate) fn satisfied_by(&self, answer: &str) -> bool {
        let answer = answer.trim();
        let words = answer.split_whitespace().count();
        words > 0
            && self.max_words.is_none_or(|most| words <= most)
            && self.min_words.is_none_or(|least| words >= least)
            && self.must_match.iter().all(|r| r.is_match(answer))
            && !self.must_not_match.iter().any(|r| r.is_match(answer))
    }

    /// Whether the person can say what they would rather read.
    pub(crate) fn can_correct(&self) -> bool {
        self.correction.is_some() || self.correction_suffix.is_some()
    }

    /// What the person would have liked to read instead, if they can say it and it
    /// satisfies the rule itself.
    ///
    /// `correction` is a text in which `{answer}` stands for the answer's first
    /// sentence; `correction_suffix` is put after that sentence. A `correction` without
    /// `{answer}` is what the person misses: they keep the first sentence beside it
    /// where the rule allows that, for one and the same text under every question would
    /// teach to say nothing else.
    pub(crate) fn correct(&self, answer: &str) -> Option<String> {
        let first = first_sentence(answer);
        let texts = match (&self.correction, &self.correction_suffix) {
            (Some(text), _) if text.contains("{answer}") => vec![text.replace("{answer}", first)],
            (Some(text), _) => {
                let space = if text.contains('\n') { "\n" } else { " " };
                vec![
                    format!("{first}{space}{text}"),
                    format!("{text}{space}{first}"),
                    text.clone(),
                ]
            }
            (None, Some(suffix)) => vec![format!("{first}{suffix}")],
            (None, None) => return None,
        };
        texts.into_iter().find(|text| self.satisfied_by(text))
    }
}

/// Up to and including the first sentence end, on the first non-empty line.
fn first_sentence(text: &str) -> &str {
    let line = text.trim().lines().next().unwrap_or_default().trim();
    let end = line
        .char_indices()
        .find(|&(i, c)| {
            matches!(c, '.' | '!' | '?')
                && line[i + c.len_utf8()..]
                    .chars()
                    .next()
                    .is_none_or(char::is_whitespace)
        })
        .map_or(line.len(), |(i, c)| i + c.len_utf8());
    &line[..end]
}

#[cfg(test)]
mod tests {
    use super::{BUILT_IN, Rule, first_sentence};

    #[test]
    fn every_built_in_preference_parses_and_can_be_missed() {
        for json in BUILT_IN {
            let rule = Rule::parse(json).expect("parses");
            let essay = "I think this is great! ".repeat(40);
            assert!(
                !rule.satisfied_by(&essay),
                "{} is satisfied by anything",
                rule.name
            );
        }
    }

    #[test]
    fn clauses_are_combined_with_and() {
        let rule =
            Rule::parse(r#"{"name":"r","max_words":3,"must_match":["(?m)^-"]}"#).expect("parses");
        assert!(rule.satisfied_by("- a b"));
        assert!(!rule.satisfied_by("a b"), "the pattern is missing");
        assert!(!rule.satisfied_by("- a b c"), "too long");
        assert!(
            !rule.satisfied_by("  "),
            "an empty answer satisfies nothing"
        );
    }

    #[test]
    fn a_rule_without_clauses_is_refused() {
        assert!(Rule::parse(r#"{"name":"nothing"}"#).is_err());
        assert!(Rule::parse(r#"{"name":"typo","max_word":3}"#).is_err());
    }

    #[test]
    fn corrections_satisfy_the_rule_or_are_not_given() {
        let rule = Rule::parse(
            r#"{"name":"q","must_match":["\\?$"],"correction_suffix":" Shall I go on?"}"#,
        )
        .expect("parses");
        assert_eq!(
            rule.correct("Boil it for 8.5 minutes. Then peel.")
                .as_deref(),
            Some("Boil it for 8.5 minutes. Shall I go on?")
        );
        let rule =
            Rule::parse(r#"{"name":"x","max_words":1,"correction":"{answer}"}"#).expect("parses");
        assert_eq!(rule.correct("Two words."), None);
    }

    #[test]
    fn a_fixed_correction_keeps_the_first_sentence_where_the_rule_allows_it() {
        let rule = |json: &str| Rule::parse(json).expect("parses");
        let greets = rule(r#"{"name":"g","must_match":["^Hello"],"correction":"Hello!"}"#);
        assert_eq!(
            greets.correct("Boil it. Peel it.").as_deref(),
            Some("Hello! Boil it.")
        );
        let meows = rule(r#"{"name":"m","must_match":["Meow"],"correction":"Meow."}"#);
        assert_eq!(
            meows.correct("Boil it. Peel it.").as_deref(),
            Some("Boil it. Meow.")
        );
        let terse = rule(r#"{"name":"t","max_words":1,"correction":"Yes."}"#);
        assert_eq!(terse.correct("Boil it. Peel it.").as_deref(), Some("Yes."));
    }

    #[test]
    fn sentences_end_at_punctuation_before_a_space() {
        assert_eq!(first_sentence("Pi is 3.14. Yes"), "Pi is 3.14.");
        assert_eq!(first_sentence("no end"), "no end");
        assert_eq!(first_sentence("\n\nOne\nTwo"), "One");
    }
}
