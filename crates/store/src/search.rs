//! What a search matches: a phrase of trigrams, or, when the query is shorter than
//! three characters, a single term of the second index.

use std::collections::BTreeSet;

/// A query as SQL understands it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Query {
    /// Three characters or more: a phrase of `step_text`.
    Phrase(String),
    /// One or two: a term of `step_short`.
    Term(String),
}

impl Query {
    /// `None` when there is nothing to search for.
    pub(crate) fn parse(q: Option<&str>) -> Option<Self> {
        let q = q.map(str::trim).filter(|q| !q.is_empty())?;
        let quoted = format!("\"{}\"", q.replace('"', "\"\""));
        Some(if q.chars().count() >= 3 {
            Self::Phrase(quoted)
        } else {
            Self::Term(quoted)
        })
    }

    /// The index and what it is asked.
    pub(crate) fn parts(self) -> (&'static str, String) {
        match self {
            Self::Phrase(text) => ("step_text", text),
            Self::Term(text) => ("step_short", text),
        }
    }
}

/// A LIKE pattern for text that contains this.
pub(crate) fn like(q: &str) -> String {
    let mut pattern = String::from("%");
    for c in q.trim().chars() {
        if matches!(c, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('%');
    pattern
}

/// The terms by which texts are found with one or two characters: characters that are
/// not ASCII, pairs with such a character, and words of one or two ASCII characters.
pub(crate) fn short_terms<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut terms = BTreeSet::new();
    for text in texts {
        for word in text.split(|c: char| !c.is_alphanumeric()) {
            if word.is_ascii() {
                if (1..=2).contains(&word.len()) {
                    terms.insert(word.to_lowercase());
                }
                continue;
            }
            let mut before: Option<char> = None;
            for c in word.chars() {
                if !c.is_ascii() {
                    terms.insert(c.to_lowercase().collect());
                }
                if let Some(b) = before
                    && !(b.is_ascii() && c.is_ascii())
                {
                    terms.insert([b, c].iter().flat_map(|c| c.to_lowercase()).collect());
                }
                before = Some(c);
            }
        }
    }
    let mut out = String::new();
    for term in terms {
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(&term);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{Query, like, short_terms};

    #[test]
    fn short_terms_are_what_trigrams_miss() {
        assert_eq!(short_terms(["ok, A股 煮熟 egg"]), "a股 ok 煮 煮熟 熟 股");
        assert_eq!(short_terms(["", "plain words only"]), "");
    }

    #[test]
    fn queries_are_text_never_syntax() {
        assert_eq!(
            Query::parse(Some(" a\"b* ")),
            Some(Query::Phrase("\"a\"\"b*\"".into()))
        );
        assert_eq!(
            Query::parse(Some("煮熟")),
            Some(Query::Term("\"煮熟\"".into()))
        );
        assert_eq!(Query::parse(Some("  ")), None);
        assert_eq!(like("5%_"), "%5\\%\\_%");
    }
}
