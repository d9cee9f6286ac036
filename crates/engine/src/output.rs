//! From generated text to content, reasoning and tool calls.
//!
//! The parser takes text in any pieces and gives the same result: markup is never
//! leaked and never cut, because text that might begin markup is held back until it is
//! decided. A call that does not parse becomes content again, so nothing is lost; half a
//! call, where the answer was cut off, is neither.
//!
//! How calls are written is a [`Dialect`]; reasoning is `<think>…</think>` and relatives.

use serde_json::{Map, Value};
use spotter_core::chat::ToolCall;

use crate::dialect::Dialect;

pub(crate) const HERMES: (&str, &str) = ("<tool_call>", "</tool_call>");
pub(crate) const MISTRAL: &str = "[TOOL_CALLS]";
pub(crate) const MISTRAL_ARGUMENTS: &str = "[ARGS]";
const MISTRAL_ID: &str = "[CALL_ID]";
pub(crate) const PYTHON: &str = "<|python_tag|>";
/// Marks around reasoning. The first is known anywhere, its relatives at the beginning.
const REASONING: [(&str, &str); 4] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
];
/// Tools that take the code behind a Llama python tag.
const INTERPRETERS: [&str; 4] = ["code_interpreter", "ipython", "python", "execute_python"];

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

/// How an answer is to be read.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// How the model writes calls.
    pub dialect: Dialect,
    /// The tools that were offered; without any, no call is looked for.
    pub tools: Vec<String>,
    /// Makes call ids unique; letters and digits only.
    pub id_prefix: String,
    /// The closing mark, when the prompt ends inside reasoning.
    pub reasoning: Option<&'static str>,
}

impl Reading {
    /// The closing mark of the reasoning that this prompt leaves open.
    pub fn open_reasoning(prompt: &str) -> Option<&'static str> {
        let end = prompt.trim_end();
        REASONING
            .iter()
            .find(|(open, _)| end.ends_with(open))
            .map(|(_, close)| *close)
    }
}

/// What a call began with.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mark {
    Hermes,
    Mistral,
    Python,
    /// Nothing: the answer itself is JSON.
    Bare,
}

impl Mark {
    fn text(self) -> &'static str {
        match self {
            Self::Hermes => HERMES.0,
            Self::Mistral => MISTRAL,
            Self::Python => PYTHON,
            Self::Bare => "",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Content,
    /// Until this mark.
    Reasoning(&'static str),
    Call(Mark),
}

/// What the text of a call turned out to be.
enum Read {
    /// More text decides.
    Wait,
    /// Calls, and the bytes that they took.
    Calls(Vec<(String, String)>, usize),
    /// This many bytes are no call.
    Text(usize),
}

/// A streaming parser for one answer.
#[derive(Debug)]
pub struct OutputParser {
    reading: Reading,
    state: State,
    held: String,
    calls: u32,
    /// White space (and separators of calls) here is markup.
    trim: bool,
    /// Nothing visible has been said since the beginning or the last call.
    fresh: bool,
    /// The answer itself may still turn out to be a call.
    bare: bool,
}

impl OutputParser {
    /// A parser for one answer.
    pub fn new(reading: Reading) -> Self {
        Self {
            state: reading.reasoning.map_or(State::Content, State::Reasoning),
            bare: matches!(reading.dialect, Dialect::Llama | Dialect::Json)
                && !reading.tools.is_empty(),
            reading,
            held: String::new(),
            calls: 0,
            trim: false,
            fresh: true,
        }
    }

    /// Adds text and returns what is decided.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut out = Vec::new();
        while self.advance(&mut out, false) {}
        out
    }

    /// The answer has ended: what is held back is decided now.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut out = Vec::new();
        let begun = self.held.trim_start();
        let again = self.state == State::Content && self.calls > 0 && self.fresh;
        if again && self.marks().iter().any(|(mark, _)| mark.starts_with(begun)) {
            // The next call was cut off inside its mark.
            self.held.clear();
        }
        while !self.held.is_empty() && self.advance(&mut out, true) {}
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Reasoning(_) => emit(&mut out, Piece::Reasoning(held)),
            State::Content | State::Call(_) => emit(&mut out, Piece::Content(held)),
        }
        out
    }

    /// Whether the answer is inside its reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning(_))
    }

    /// How many calls are complete.
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// The text of the call that has begun and is not complete, from behind its mark.
    /// Text without a mark counts once it names one of the tools.
    pub fn open_call(&self) -> Option<&str> {
        match self.state {
            State::Call(Mark::Hermes | Mark::Mistral) => Some(self.held.as_str()),
            State::Call(Mark::Python) => {
                Some(self.held.as_str()).filter(|h| h.trim_start().starts_with('{'))
            }
            State::Call(Mark::Bare) => {
                let held = self.held.trim_start();
                let name = bare_name(held)?;
                self.reading
                    .tools
                    .iter()
                    .any(|tool| tool == name)
                    .then_some(held)
            }
            _ => None,
        }
    }

    fn marks(&self) -> Vec<(&'static str, Option<State>)> {
        let mut marks = Vec::with_capacity(8);
        for (i, (open, close)) in REASONING.into_iter().enumerate() {
            if i == 0 || self.fresh {
                marks.push((open, Some(State::Reasoning(close))));
            }
        }
        // A closing mark without an opening one says nothing and is dropped.
        marks.push((REASONING[0].1, None));
        if !self.reading.tools.is_empty() {
            let mark = match self.reading.dialect {
                Dialect::Hermes | Dialect::Json => Mark::Hermes,
                Dialect::Llama => Mark::Python,
                Dialect::Mistral { .. } => Mark::Mistral,
            };
            marks.push((mark.text(), Some(State::Call(mark))));
        }
        marks
    }

    /// One step; false when more text is needed.
    fn advance(&mut self, out: &mut Vec<Piece>, finished: bool) -> bool {
        match self.state {
            State::Content => self.content(out, finished),
            State::Reasoning(close) => {
                if let Some(at) = self.held.find(close) {
                    let all: String = self.held.drain(..at + close.len()).collect();
                    emit(out, Piece::Reasoning(all[..at].to_owned()));
                    self.state = State::Content;
                    self.trim = true;
                    return true;
                }
                let keep = held_back(&self.held, std::iter::once(close), false);
                let ready = self.held.drain(..self.held.len() - keep).collect();
                emit(out, Piece::Reasoning(ready));
                false
            }
            State::Call(mark) => match self.read(mark, finished) {
                Read::Wait => false,
                Read::Calls(calls, len) => {
                    self.held.drain(..len);
                    for (name, arguments) in calls {
                        let id = format!("call{}{}", self.reading.id_prefix, self.calls);
                        self.calls += 1;
                        out.push(Piece::Call(ToolCall {
                            id,
                            name,
                            arguments,
                        }));
                    }
                    self.state = State::Content;
                    (self.trim, self.fresh) = (true, true);
                    true
                }
                Read::Text(len) => {
                    let text: String = self.held.drain(..len).collect();
                    if mark == Mark::Bare {
                        // It is text after all, in which other marks may follow.
                        self.held.insert_str(0, &text);
                        self.bare = false;
                    } else {
                        emit(out, Piece::Content(format!("{}{text}", mark.text())));
                        self.fresh = false;
                    }
                    self.state = State::Content;
                    true
                }
            },
        }
    }

    fn content(&mut self, out: &mut Vec<Piece>, finished: bool) -> bool {
        if self.trim {
            // The breaks between reasoning or calls and what follows are markup too.
            let separators: &[char] = if self.calls > 0 && self.bare {
                &['\n', '\r', '\t', ' ', ';', ',']
            } else {
                &['\n', '\r', '\t', ' ']
            };
            let trimmed = self.held.trim_start_matches(separators).len();
            self.held.drain(..self.held.len() - trimmed);
            if self.held.is_empty() {
                return false;
            }
        }
        if self.bare && self.fresh {
            let text = self.held.trim_start();
            let fence = "```json";
            let begins = text.starts_with('{')
                || (self.reading.dialect == Dialect::Json
                    && (text.starts_with('[') || text.starts_with(fence)));
            if begins {
                self.state = State::Call(Mark::Bare);
                return true;
            }
            let may_begin = text.is_empty()
                || (self.reading.dialect == Dialect::Json && fence.starts_with(text));
            if may_begin && !finished {
                return false;
            }
        }
        let marks = self.marks();
        let found = marks
            .iter()
            .filter_map(|(mark, next)| {
                let at = self.held.find(mark)?;
                let relative = REASONING[1..].iter().any(|(open, _)| open == mark);
                let first = self.held[..at].trim().is_empty();
                (first || !relative).then_some((at, *mark, *next))
            })
            .min_by_key(|(at, mark, _)| (*at, std::cmp::Reverse(mark.len())));
        if let Some((at, mark, next)) = found {
            let before: String = self.held.drain(..at + mark.len()).collect();
            let mut before = before[..at].to_owned();
            if matches!(next, Some(State::Call(_))) {
                before.truncate(before.trim_end_matches(['\n', '\r']).len());
            }
            if !before.trim().is_empty() {
                self.fresh = false;
            }
            emit(out, Piece::Content(before));
            self.trim = next.is_none();
            if let Some(next) = next {
                self.state = next;
            }
            return true;
        }
        let keep = if finished {
            0
        } else {
            let calls = !self.reading.tools.is_empty();
            held_back(&self.held, marks.iter().map(|(mark, _)| *mark), calls)
        };
        let ready: String = self.held.drain(..self.held.len() - keep).collect();
        if !ready.is_empty() {
            self.trim = false;
        }
        if !ready.trim().is_empty() {
            self.fresh = false;
        }
        emit(out, Piece::Content(ready));
        false
    }

    /// Reads the call that the held text begins with.
    fn read(&self, mark: Mark, finished: bool) -> Read {
        let all = self.held.len();
        let lead = all - self.held.trim_start().len();
        let text = &self.held[lead..];
        if text.is_empty() && !finished {
            return Read::Wait;
        }
        match mark {
            Mark::Hermes => self.read_hermes(finished),
            Mark::Mistral
                if text.starts_with(['[', '{']) && !text.starts_with(MISTRAL_ARGUMENTS) =>
            {
                whole(text, lead, finished)
            }
            Mark::Mistral => read_mistral(text, lead, finished),
            Mark::Python if text.starts_with('{') => whole(text, lead, finished),
            Mark::Python if !finished => Read::Wait,
            Mark::Python => {
                let code = text.trim_end();
                let interpreter = INTERPRETERS
                    .iter()
                    .find(|name| self.reading.tools.iter().any(|tool| tool == *name));
                match (python_call(code), interpreter) {
                    (Some(call), _) => Read::Calls(vec![call], all),
                    (None, Some(name)) => {
                        let arguments = serde_json::json!({"code": code}).to_string();
                        Read::Calls(vec![((*name).to_owned(), arguments)], all)
                    }
                    (None, None) => Read::Text(all),
                }
            }
            Mark::Bare => {
                let (open, close) = match text.strip_prefix("```json") {
                    Some(rest) => (text.len() - rest.trim_start().len(), "```"),
                    None => (0, ""),
                };
                let body = &text[open..];
                if body.is_empty() && !finished {
                    return Read::Wait;
                }
                if !may_be_call(body) {
                    return Read::Text(all);
                }
                match whole(body, lead + open, finished) {
                    Read::Calls(calls, len) => {
                        if calls.is_empty() && self.open_call().is_none() {
                            return Read::Text(all);
                        }
                        let known =
                            |(name, _): &(String, String)| self.reading.tools.contains(name);
                        if !calls.iter().all(known) {
                            return Read::Text(all);
                        }
                        let rest = self.held[len..].trim_start();
                        if rest.starts_with(close) {
                            Read::Calls(calls, all - rest.len() + close.len())
                        } else if close.starts_with(rest) && !finished {
                            Read::Wait
                        } else {
                            Read::Calls(calls, len)
                        }
                    }
                    Read::Text(_) => Read::Text(all),
                    Read::Wait => Read::Wait,
                }
            }
        }
    }

    fn read_hermes(&self, finished: bool) -> Read {
        let (held, close) = (self.held.as_str(), HERMES.1);
        let lead = held.len() - held.trim_start().len();
        match json_end(&held[lead..]) {
            Scan::Complete(len) => {
                let rest = held[lead + len..].trim_start();
                if rest.starts_with(close) || (finished && rest.is_empty()) {
                    let used = if rest.is_empty() { 0 } else { close.len() };
                    let consumed = held.len() - rest.len() + used;
                    return match calls_of(&held[lead..lead + len]) {
                        Some(calls) => Read::Calls(calls, consumed),
                        None => Read::Text(consumed),
                    };
                }
                if close.starts_with(rest) && !finished {
                    return Read::Wait;
                }
            }
            Scan::Incomplete if !finished => return Read::Wait,
            Scan::Incomplete if !held.contains(close) => {
                return Read::Calls(Vec::new(), held.len());
            }
            Scan::Incomplete | Scan::Malformed(_) => {}
        }
        match held.find(close) {
            Some(at) => match calls_of(held[..at].trim()) {
                Some(calls) => Read::Calls(calls, at + close.len()),
                None => Read::Text(at + close.len()),
            },
            None if !finished => Read::Wait,
            None => match calls_of(held.trim()) {
                Some(calls) => Read::Calls(calls, held.len()),
                None => Read::Text(held.len()),
            },
        }
    }
}

/// Reads JSON that is one call or a list of them; `lead` bytes lie before it.
fn whole(text: &str, lead: usize, finished: bool) -> Read {
    match json_end(text) {
        Scan::Complete(len) => match calls_of(&text[..len]) {
            Some(calls) => Read::Calls(calls, lead + len),
            None => Read::Text(lead + len),
        },
        Scan::Incomplete if !finished => Read::Wait,
        // Cut off.
        Scan::Incomplete => Read::Calls(Vec::new(), lead + text.len()),
        Scan::Malformed(at) => Read::Text(lead + at),
    }
}

/// Reads `name[ARGS]{…}`, with or without the marks inside.
fn read_mistral(text: &str, lead: usize, finished: bool) -> Read {
    let cut_off = if finished {
        Read::Calls(Vec::new(), lead + text.len())
    } else {
        Read::Wait
    };
    let open = match text.find(['{', '}', '\n']) {
        None => return cut_off,
        Some(at) if text.as_bytes()[at] != b'{' => return Read::Text(lead + at),
        Some(at) => at,
    };
    let head = &text[..open];
    let head = head.split(MISTRAL_ARGUMENTS).next().unwrap_or(head);
    let name = head.split(MISTRAL_ID).next().unwrap_or(head).trim();
    if name.is_empty() || name.contains(char::is_whitespace) {
        return Read::Text(lead + open);
    }
    match json_end(&text[open..]) {
        Scan::Complete(len) => {
            let arguments = serde_json::from_str::<Value>(&text[open..open + len]);
            match arguments {
                Ok(arguments) => Read::Calls(
                    vec![(name.to_owned(), arguments.to_string())],
                    lead + open + len,
                ),
                Err(_) => Read::Text(lead + open + len),
            }
        }
        Scan::Incomplete => cut_off,
        Scan::Malformed(at) => Read::Text(lead + open + at),
    }
}

/// `name.call(key="value", …)`, as Llama 3 calls its built-in tools.
fn python_call(code: &str) -> Option<(String, String)> {
    let (name, rest) = code.split_once(".call(")?;
    let mut rest = rest.strip_suffix(')')?.trim();
    let valid = |c: char| c.is_alphanumeric() || c == '_';
    if name.is_empty() || !name.chars().all(valid) {
        return None;
    }
    let mut arguments = Map::new();
    while !rest.is_empty() {
        let (key, value) = rest.split_once('=')?;
        let mut values = serde_json::Deserializer::from_str(value).into_iter::<Value>();
        let parsed = values.next()?.ok()?;
        rest = value[values.byte_offset()..]
            .trim_start()
            .trim_start_matches(',')
            .trim_start();
        arguments.insert(key.trim().to_owned(), parsed);
    }
    Some((name.to_owned(), Value::Object(arguments).to_string()))
}

/// The name in `{"name": "…"`, as far as it is complete.
fn bare_name(text: &str) -> Option<&str> {
    let mut rest = text.strip_prefix('{')?.trim_start();
    if let Some(after) = rest.strip_prefix("\"type\"") {
        let after = after.trim_start().strip_prefix(':')?.trim_start();
        let after = after.strip_prefix("\"function\"")?.trim_start();
        rest = after.strip_prefix(',')?.trim_start();
    }
    let rest = rest.strip_prefix("\"name\"")?.trim_start();
    let rest = rest.strip_prefix(':')?.trim_start().strip_prefix('"')?;
    rest.split_once('"').map(|(name, _)| name)
}

/// Whether JSON text may still become a call, by its first key.
fn may_be_call(text: &str) -> bool {
    let rest = text.trim_start_matches(['[', ' ', '\n', '\r', '\t']);
    let Some(rest) = rest.strip_prefix('{') else {
        return rest.is_empty();
    };
    let Some(rest) = rest.trim_start().strip_prefix('"') else {
        return rest.trim_start().is_empty();
    };
    let keys = ["name", "type", "function", "id", "arguments", "parameters"];
    match rest.split_once('"') {
        Some((key, _)) => keys.contains(&key),
        None => keys.iter().any(|key| key.starts_with(rest)),
    }
}

enum Scan {
    /// The value is this many bytes long.
    Complete(usize),
    Incomplete,
    /// It is none from this byte on.
    Malformed(usize),
}

/// Where the JSON object or list ends that `text` begins with.
fn json_end(text: &str) -> Scan {
    let (mut open, mut string, mut escaped) = (Vec::new(), false, false);
    for (at, byte) in text.bytes().enumerate() {
        if string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'{' => open.push(b'}'),
            b'[' => open.push(b']'),
            _ if open.is_empty() => return Scan::Malformed(at),
            b'}' | b']' => {
                if open.pop() != Some(byte) {
                    return Scan::Malformed(at);
                }
                if open.is_empty() {
                    return Scan::Complete(at + 1);
                }
            }
            b'"' => string = true,
            b'<' => return Scan::Malformed(at),
            _ => {}
        }
    }
    Scan::Incomplete
}

/// The calls that JSON text describes: one, or a list of them.
fn calls_of(text: &str) -> Option<Vec<(String, String)>> {
    match serde_json::from_str(text.trim()).ok()? {
        Value::Array(calls) if !calls.is_empty() => calls.iter().map(call_of).collect(),
        call => Some(vec![call_of(&call)?]),
    }
}

fn call_of(json: &Value) -> Option<(String, String)> {
    let json = json
        .get("function")
        .filter(|f| f.is_object())
        .unwrap_or(json);
    let name = json.get("name")?.as_str()?.to_owned();
    let arguments = match json.get("arguments").or_else(|| json.get("parameters")) {
        Some(Value::String(text)) => serde_json::from_str::<Value>(text).ok()?.to_string(),
        Some(Value::Null) | None => "{}".to_owned(),
        Some(value) => value.to_string(),
    };
    Some((name, arguments))
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

    /// What is held back now.
    pub fn held(&self) -> &str {
        &self.held
    }

    /// What is held back when the answer ends.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Dialect, OutputParser, Piece, Reading, StopTexts, emit};

    const LLAMA: Dialect = Dialect::Llama;
    const MISTRAL: Dialect = Dialect::Mistral {
        arguments_mark: true,
    };

    fn reading(dialect: Dialect) -> Reading {
        Reading {
            dialect,
            tools: vec!["add".into(), "sub".into(), "search".into()],
            id_prefix: "x".into(),
            reasoning: None,
        }
    }

    /// Feeds `text` in pieces that end at the given distances; joins neighbours.
    fn parse_as(reading: Reading, text: &str, cuts: &[usize]) -> Vec<Piece> {
        let mut parser = OutputParser::new(reading);
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

    fn parse(text: &str, cuts: &[usize]) -> Vec<Piece> {
        parse_as(reading(Dialect::Hermes), text, cuts)
    }

    fn call(name: &str, arguments: &str, n: u32) -> Piece {
        Piece::Call(spotter_core::chat::ToolCall {
            id: format!("callx{n}"),
            name: name.into(),
            arguments: arguments.into(),
        })
    }

    fn text(text: &str) -> Piece {
        Piece::Content(text.into())
    }

    fn thought(text: &str) -> Piece {
        Piece::Reasoning(text.into())
    }

    const MIXED: &str = "<think>\nhm</think>\n\nSure.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>{\"name\":\"sub\"}</tool_call>";

    /// Text of every dialect with what it means.
    fn corpus() -> Vec<(Dialect, &'static str, Vec<Piece>)> {
        let hermes = Dialect::Hermes;
        let old = Dialect::Mistral {
            arguments_mark: false,
        };
        let add = |n| call("add", "{\"a\":1}", n);
        vec![
            (
                hermes,
                MIXED,
                vec![thought("\nhm"), text("Sure."), add(0), call("sub", "{}", 1)],
            ),
            (
                hermes,
                "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": \"</tool_call> é\"}}</tool_call>",
                vec![call("add", "{\"a\":\"</tool_call> é\"}", 0)],
            ),
            (
                hermes,
                "<thinking>why</thinking>ok",
                vec![thought("why"), text("ok")],
            ),
            (hermes, "say <thinking>", vec![text("say <thinking>")]),
            (
                hermes,
                "{\"name\": \"add\"}",
                vec![text("{\"name\": \"add\"}")],
            ),
            (
                hermes,
                "a <tool_call>not json</tool_call> b",
                vec![text("a <tool_call>not json</tool_call> b")],
            ),
            (
                hermes,
                "<tool_call>{\"name\":\"add\",\"arguments\":{\"a\":1}}",
                vec![add(0)],
            ),
            (hermes, "1 <tool", vec![text("1 <tool")]),
            (
                LLAMA,
                "{\"name\": \"add\", \"parameters\": {\"a\": 1}}",
                vec![add(0)],
            ),
            (
                LLAMA,
                "{\"type\": \"function\", \"name\": \"add\", \"parameters\": {\"a\": \"1}\"}}; {\"name\": \"sub\", \"parameters\": {}}",
                vec![call("add", "{\"a\":\"1}\"}", 0), call("sub", "{}", 1)],
            ),
            (
                LLAMA,
                "<|python_tag|>{\"name\": \"add\", \"parameters\": {\"a\": 1}}",
                vec![add(0)],
            ),
            (
                LLAMA,
                "<|python_tag|>search.call(query=\"a, b\", top=3)",
                vec![call("search", "{\"query\":\"a, b\",\"top\":3}", 0)],
            ),
            (
                LLAMA,
                "<|python_tag|>print(1)",
                vec![text("<|python_tag|>print(1)")],
            ),
            (
                LLAMA,
                "{\"answer\": {\"name\": 1}}",
                vec![text("{\"answer\": {\"name\": 1}}")],
            ),
            (
                LLAMA,
                "{\"name\": \"Ada\", \"age\": 3} is her record",
                vec![text("{\"name\": \"Ada\", \"age\": 3} is her record")],
            ),
            (
                LLAMA,
                "I would {\"name\": \"add\"}",
                vec![text("I would {\"name\": \"add\"}")],
            ),
            (
                MISTRAL,
                "Well.[TOOL_CALLS]add[ARGS]{\"a\": 1}[TOOL_CALLS]sub[CALL_ID]abc[ARGS]{}",
                vec![text("Well."), add(0), call("sub", "{}", 1)],
            ),
            (
                old,
                "[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"sub\", \"arguments\": {}}]",
                vec![add(0), call("sub", "{}", 1)],
            ),
            (
                MISTRAL,
                "[THINK]so[/THINK]yes",
                vec![thought("so"), text("yes")],
            ),
            (
                MISTRAL,
                "[TOOL_CALLS]no call\n",
                vec![text("[TOOL_CALLS]no call\n")],
            ),
            (
                Dialect::Json,
                "```json\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```",
                vec![add(0)],
            ),
            (
                Dialect::Json,
                "[{\"function\": {\"name\": \"add\", \"arguments\": \"{\\\"a\\\": 1}\"}}, {\"name\": \"sub\"}]",
                vec![add(0), call("sub", "{}", 1)],
            ),
            (Dialect::Json, "[1, 2]", vec![text("[1, 2]")]),
            (
                Dialect::Json,
                "```json\n[1]\n```",
                vec![text("```json\n[1]\n```")],
            ),
            (Dialect::Json, "{\"name\": \"add\", \"argu", vec![]),
            (
                Dialect::Json,
                "{\"name\": \"else\", \"argu",
                vec![text("{\"name\": \"else\", \"argu")],
            ),
            (
                hermes,
                "ok <tool_call>{\"name\": \"add\", \"argu",
                vec![text("ok ")],
            ),
            (MISTRAL, "[TOOL_CALLS]add[ARGS]{\"a", vec![]),
            (
                hermes,
                "<tool_call>{\"name\": \"sub\"}</tool_call>\n<tool",
                vec![call("sub", "{}", 0)],
            ),
        ]
    }

    #[test]
    fn every_dialect_is_read_at_every_border() {
        for (dialect, written, meant) in corpus() {
            let whole = parse_as(reading(dialect), written, &[]);
            assert_eq!(whole, meant, "{dialect:?} {written}");
            let length = written.chars().count();
            assert_eq!(
                parse_as(reading(dialect), written, &vec![1; length]),
                meant,
                "{written}"
            );
            for first in 0..length {
                for second in 0..length - first {
                    let cut = parse_as(reading(dialect), written, &[first, second]);
                    assert_eq!(
                        cut, meant,
                        "{dialect:?} {written} cut at {first} and {second}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_prompt_may_leave_reasoning_open() {
        let open = Reading::open_reasoning("<|im_start|>assistant\n<think>\n");
        assert_eq!(open, Some("</think>"));
        assert_eq!(Reading::open_reasoning("<think>\n\n</think>\n\n"), None);
        let reading = Reading {
            reasoning: open,
            ..reading(Dialect::Hermes)
        };
        assert_eq!(
            parse_as(reading, "first\n</think>\n\nthen", &[3, 4]),
            [thought("first\n"), text("then")]
        );
        assert_eq!(
            parse("an unopened</think>end", &[]),
            [text("an unopenedend")]
        );
    }

    #[test]
    fn an_open_call_shows_its_text() {
        let open = |dialect, written: &str| {
            let mut parser = OutputParser::new(reading(dialect));
            let said = parser.push(written);
            assert!(
                said.iter()
                    .all(|p| matches!(p, Piece::Content(t) if t == "a")),
                "{said:?}"
            );
            parser.open_call().map(str::to_owned)
        };
        assert_eq!(open(Dialect::Hermes, "a<tool_c"), None);
        assert_eq!(
            open(Dialect::Hermes, "a<tool_call>\n{").as_deref(),
            Some("\n{")
        );
        assert_eq!(open(LLAMA, "{\"name\": \"ad"), None);
        assert_eq!(
            open(LLAMA, "{\"name\": \"add\"").as_deref(),
            Some("{\"name\": \"add\"")
        );
        assert_eq!(open(LLAMA, "{\"name\": \"other\""), None);
        assert_eq!(open(MISTRAL, "[TOOL_CALLS]ad").as_deref(), Some("ad"));
    }

    proptest! {
        #[test]
        fn any_chunk_borders_give_the_same_pieces(which in 0usize..40, cuts in proptest::collection::vec(0usize..9, 0..60)) {
            let corpus = corpus();
            let (dialect, written, meant) = &corpus[which % corpus.len()];
            prop_assert_eq!(&parse_as(reading(*dialect), written, &cuts), meant);
        }

        #[test]
        fn any_text_gives_the_same_pieces_in_any_chunks(
            dialect in prop_oneof![Just(Dialect::Hermes), Just(LLAMA), Just(MISTRAL), Just(Dialect::Json)],
            parts in proptest::collection::vec(prop_oneof![
                Just("<think>"), Just("</think>"), Just("<tool_call>"), Just("</tool_call>"), Just("[TOOL_CALLS]"),
                Just("[ARGS]"), Just("<|python_tag|>"), Just("{\"name\": \"add\", \"arguments\": {}}"), Just("add"),
                Just("{"), Just("}"), Just("["), Just("\""), Just("\n"), Just(" "), Just("é"), Just(";"), Just("```json"), Just("```"),
            ], 0..14),
            cuts in proptest::collection::vec(0usize..9, 0..60),
        ) {
            let written = parts.concat();
            prop_assert_eq!(parse_as(reading(dialect), &written, &cuts), parse_as(reading(dialect), &written, &[]));
        }

        #[test]
        fn text_without_markup_passes_unchanged(text in "[a-z<>/\n ]{0,60}", cuts in proptest::collection::vec(0usize..9, 0..30)) {
            prop_assume!(!text.contains("<think") && !text.contains("</think>") && !text.contains("<tool_call>") && !text.contains("<reasoning>"));
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
