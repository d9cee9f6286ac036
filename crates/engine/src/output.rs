//! From generated text to content, reasoning and tool calls.
//!
//! The parser takes text in any pieces and gives the same result: markup is never
//! leaked and never cut, because text that might begin markup is held back until it is
//! decided. A call that does not parse becomes content again, so nothing is lost.
//!
//! Dialect: Hermes (`<tool_call>{"name": …, "arguments": …}</tool_call>`), which Qwen
//! and most small open-weight models write; reasoning in `<think>…</think>`.

use serde_json::Value;
use spotter_core::chat::ToolCall;

/// The marks around a tool call.
pub(crate) const CALL: (&str, &str) = ("<tool_call>", "</tool_call>");
const THINK: (&str, &str) = ("<think>", "</think>");

/// A piece of parsed output.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Visible text.
    Content(String),
    /// Reasoning.
    Reasoning(String),
    /// A complete tool call.
    Call(ToolCall),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Content,
    Reasoning,
    Call,
}

/// A streaming parser for one answer.
#[derive(Debug)]
pub struct OutputParser {
    state: State,
    held: String,
    parses_calls: bool,
    id_prefix: String,
    calls: u32,
    trim_start: bool,
}

impl OutputParser {
    /// A parser; calls are only recognised when tools were offered. `id_prefix` makes
    /// call ids unique and holds letters and digits only.
    pub fn new(parses_calls: bool, id_prefix: &str) -> Self {
        Self {
            state: State::Content,
            held: String::new(),
            parses_calls,
            id_prefix: id_prefix.to_owned(),
            calls: 0,
            trim_start: false,
        }
    }

    /// Whether a call has begun of which nothing but space is there yet.
    pub fn call_begun(&self) -> bool {
        self.state == State::Call && self.held.trim().is_empty()
    }

    /// Adds text and returns what is decided.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut out = Vec::new();
        while self.advance(&mut out) {}
        out
    }

    /// The answer has ended: what is held back is content after all.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut out = Vec::new();
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Reasoning => emit(&mut out, Piece::Reasoning(held)),
            // A call whose end mark is missing may still be whole.
            State::Call => match self.call(&held) {
                Some(call) => out.push(Piece::Call(call)),
                None => emit(&mut out, Piece::Content(format!("{}{held}", CALL.0))),
            },
            State::Content => emit(&mut out, Piece::Content(held)),
        }
        out
    }

    /// One step; false when more text is needed.
    fn advance(&mut self, out: &mut Vec<Piece>) -> bool {
        match self.state {
            State::Content => {
                if self.trim_start {
                    // The line breaks between reasoning or calls and the text are markup too.
                    let trimmed = self.held.trim_start_matches(['\n', '\r', ' ']).len();
                    self.held.drain(..self.held.len() - trimmed);
                    if self.held.is_empty() {
                        return false;
                    }
                }
                let mut marks = vec![(THINK.0, State::Reasoning), (THINK.1, State::Content)];
                if self.parses_calls {
                    marks.push((CALL.0, State::Call));
                }
                let found = marks
                    .iter()
                    .filter_map(|(mark, next)| Some((self.held.find(mark)?, *mark, *next)))
                    .min_by_key(|(at, ..)| *at);
                if let Some((at, mark, next)) = found {
                    let before: String = self.held.drain(..at + mark.len()).collect();
                    let mut before = before[..at].to_owned();
                    if next != State::Reasoning && mark != THINK.1 {
                        before.truncate(before.trim_end_matches(['\n', '\r']).len());
                    }
                    emit(out, Piece::Content(before));
                    self.trim_start = mark == THINK.1;
                    self.state = next;
                    return true;
                }
                let keep = held_back(
                    &self.held,
                    marks.iter().map(|(mark, _)| *mark),
                    self.parses_calls,
                );
                let ready: String = self.held.drain(..self.held.len() - keep).collect();
                if !ready.is_empty() {
                    self.trim_start = false;
                }
                emit(out, Piece::Content(ready));
                false
            }
            State::Reasoning => {
                if let Some(at) = self.held.find(THINK.1) {
                    let all: String = self.held.drain(..at + THINK.1.len()).collect();
                    emit(out, Piece::Reasoning(all[..at].to_owned()));
                    self.state = State::Content;
                    self.trim_start = true;
                    return true;
                }
                let keep = held_back(&self.held, std::iter::once(THINK.1), false);
                let ready = self.held.drain(..self.held.len() - keep).collect();
                emit(out, Piece::Reasoning(ready));
                false
            }
            State::Call => {
                let Some(at) = self.held.find(CALL.1) else {
                    return false;
                };
                let all: String = self.held.drain(..at + CALL.1.len()).collect();
                match self.call(&all[..at]) {
                    Some(call) => out.push(Piece::Call(call)),
                    None => emit(out, Piece::Content(format!("{}{all}", CALL.0))),
                }
                self.state = State::Content;
                self.trim_start = true;
                true
            }
        }
    }

    fn call(&mut self, text: &str) -> Option<ToolCall> {
        let json: Value = serde_json::from_str(text.trim()).ok()?;
        let name = json["name"].as_str()?.to_owned();
        let arguments = match json.get("arguments").or_else(|| json.get("parameters")) {
            Some(Value::String(text)) => serde_json::from_str::<Value>(text).ok()?.to_string(),
            Some(value) => value.to_string(),
            None => "{}".to_owned(),
        };
        let id = format!("call{}{}", self.id_prefix, self.calls);
        self.calls += 1;
        Some(ToolCall {
            id,
            name,
            arguments,
        })
    }
}

fn emit(out: &mut Vec<Piece>, piece: Piece) {
    match (&piece, out.last_mut()) {
        (Piece::Content(t) | Piece::Reasoning(t), _) if t.is_empty() => {}
        (Piece::Content(t), Some(Piece::Content(last))) => last.push_str(t),
        (Piece::Reasoning(t), Some(Piece::Reasoning(last))) => last.push_str(t),
        _ => out.push(piece),
    }
}

/// How many bytes at the end might begin one of the marks. Line breaks before a mark
/// that swallows them are held too.
fn held_back<'a>(text: &str, marks: impl Iterator<Item = &'a str>, breaks: bool) -> usize {
    let mut most = 0;
    for mark in marks {
        for len in (1..mark.len()).rev() {
            if text.ends_with(&mark[..len]) {
                most = most.max(len);
                break;
            }
        }
    }
    if breaks {
        let rest = &text[..text.len() - most];
        most += rest.len() - rest.trim_end_matches(['\n', '\r']).len();
    }
    most
}

/// Cuts a stream before the first of several stop texts, across any chunk border.
#[derive(Debug)]
pub struct StopTexts {
    stops: Vec<String>,
    held: String,
}

impl StopTexts {
    /// Stops before any of these.
    pub fn new(stops: Vec<String>) -> Self {
        Self {
            stops: stops.into_iter().filter(|s| !s.is_empty()).collect(),
            held: String::new(),
        }
    }

    /// Adds text; returns what may pass, and whether a stop text was reached.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        if self.stops.is_empty() {
            return (text.to_owned(), false);
        }
        self.held.push_str(text);
        if let Some(at) = self
            .stops
            .iter()
            .filter_map(|s| self.held.find(s.as_str()))
            .min()
        {
            let ready = self.held[..at].to_owned();
            self.held.clear();
            return (ready, true);
        }
        let keep = self
            .stops
            .iter()
            .flat_map(|stop| {
                stop.char_indices()
                    .skip(1)
                    .map(|(i, _)| i)
                    .filter(|i| self.held.ends_with(&stop[..*i]))
            })
            .max()
            .unwrap_or(0);
        (self.held.drain(..self.held.len() - keep).collect(), false)
    }

    /// What is held back when the answer ends.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{OutputParser, Piece, StopTexts, emit};

    /// Feeds `text` in pieces that end at the given distances; joins neighbours.
    fn parse(text: &str, cuts: &[usize]) -> Vec<Piece> {
        let mut parser = OutputParser::new(true, "x");
        let mut all = Vec::new();
        let mut add = |pieces: Vec<Piece>| pieces.into_iter().for_each(|p| emit(&mut all, p));
        let mut rest = text;
        for cut in cuts {
            let at = rest
                .char_indices()
                .map(|(i, _)| i)
                .nth(*cut)
                .unwrap_or(rest.len());
            add(parser.push(&rest[..at]));
            rest = &rest[at..];
        }
        add(parser.push(rest));
        add(parser.finish());
        all
    }

    fn call(name: &str, arguments: &str, n: u32) -> Piece {
        Piece::Call(spotter_core::chat::ToolCall {
            id: format!("callx{n}"),
            name: name.into(),
            arguments: arguments.into(),
        })
    }

    const MIXED: &str = "<think>\nhm</think>\n\nSure.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>{\"name\":\"sub\"}</tool_call>";

    #[test]
    fn content_reasoning_and_calls_are_told_apart() {
        assert_eq!(
            parse(MIXED, &[]),
            [
                Piece::Reasoning("\nhm".into()),
                Piece::Content("Sure.".into()),
                call("add", "{\"a\":1}", 0),
                call("sub", "{}", 1),
            ]
        );
    }

    #[test]
    fn what_is_no_call_is_content() {
        let broken = "a <tool_call>not json</tool_call> b";
        assert_eq!(
            parse(broken, &[]),
            [Piece::Content(broken.replace("> b", ">b"))]
        );
        assert_eq!(parse("1 <tool", &[]), [Piece::Content("1 <tool".into())]);
        assert_eq!(
            parse("an unopened</think>end", &[]),
            [Piece::Content("an unopenedend".into())]
        );
    }

    #[test]
    fn a_call_without_its_end_mark_still_counts() {
        assert_eq!(
            parse("<tool_call>{\"name\":\"f\",\"arguments\":{}}", &[]),
            [call("f", "{}", 0)]
        );
    }

    proptest! {
        #[test]
        fn any_chunk_borders_give_the_same_pieces(cuts in proptest::collection::vec(0usize..9, 0..60)) {
            prop_assert_eq!(parse(MIXED, &cuts), parse(MIXED, &[]));
        }

        #[test]
        fn text_without_markup_passes_unchanged(text in "[a-z<>/\n ]{0,60}", cuts in proptest::collection::vec(0usize..9, 0..30)) {
            prop_assume!(!text.contains("<think>") && !text.contains("</think>") && !text.contains("<tool_call>"));
            let joined: String = parse(&text, &cuts).into_iter().map(|p| match p {
                Piece::Content(t) => t,
                other => panic!("{other:?}"),
            }).collect();
            prop_assert_eq!(joined, text);
        }

        #[test]
        fn stop_texts_cut_at_the_same_place(text in "[abc]{0,40}", cuts in proptest::collection::vec(0usize..6, 0..30)) {
            let mut stops = StopTexts::new(vec!["abca".into(), "cc".into()]);
            let (mut out, mut rest, mut stopped) = (String::new(), text.as_str(), false);
            for cut in cuts.iter().copied().chain([usize::MAX]) {
                if stopped { break; }
                let at = cut.min(rest.len());
                let (ready, stop) = stops.push(&rest[..at]);
                out.push_str(&ready);
                stopped = stop;
                rest = &rest[at..];
            }
            if !stopped { out.push_str(&stops.finish()); }
            let end = ["abca", "cc"].iter().filter_map(|s| text.find(s)).min().unwrap_or(text.len());
            prop_assert_eq!(out, &text[..end]);
        }
    }
}
