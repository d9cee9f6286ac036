//! Constrained decoding: which tokens may follow, so that calls and JSON always parse.
//!
//! A [`Plan`] is compiled when a request is prepared. It holds the grammar of the whole
//! answer (`tool_choice` required or named, `response_format`) and the grammar of one call,
//! which takes effect once the model has begun a call by itself. Tokens are masked before
//! temperature and truncation, so the recorded log-probability of a token is that of the
//! constrained distribution it was drawn from; the model's own is recorded beside it.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use spotter_core::Code;
use spotter_core::chat::{ResponseFormat, Tool, ToolChoice};
use spotter_core::code::Failure;
use spotter_core::generate::{GenerateRequest, Prompt};

use crate::compute::Compute;
use crate::dialect::Dialect;
use crate::output::{HERMES, MISTRAL, MISTRAL_ARGUMENTS, OutputParser, PYTHON};
use crate::schema::{Strictness, check, relax};

/// Compiled grammars that are kept; an agent sends the same tools with every call.
const KEPT: usize = 16;
/// White space between the parts of JSON: enough to be natural, too little to get lost in.
const SPACE: &str = r"\n[ \t]{0,12}| ";
/// Most calls of an answer that must call.
const MOST_CALLS: usize = 4;

/// The tokeniser as the grammar engine wants it.
struct Environment {
    trie: TokTrie,
    compute: Arc<dyn Compute>,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let tokenizer = self.compute.tokenizer();
        let ids = std::str::from_utf8(bytes)
            .ok()
            .and_then(|text| tokenizer.encode(text).ok())
            .filter(|ids| {
                let joined = ids.iter().flat_map(|id| tokenizer.token_bytes(*id));
                joined.eq(bytes)
            });
        ids.unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}

/// Compiles grammars for one model.
pub(crate) struct Grammars {
    environment: TokEnv,
    factory: ParserFactory,
    dialect: Dialect,
    /// Whether the model's template speaks of reasoning.
    reasons: bool,
    /// The opening mark of reasoning, where it is a token.
    think: Option<u32>,
    /// By grammar; `None` when it does not compile.
    kept: VecDeque<(String, Option<Matcher>)>,
}

impl Grammars {
    /// Reads the vocabulary.
    ///
    /// # Errors
    /// When the vocabulary has no end-of-turn token or cannot be indexed.
    pub(crate) fn new(compute: Arc<dyn Compute>) -> Result<Self, String> {
        let tokenizer = compute.tokenizer();
        let marks = [HERMES.0, HERMES.1, MISTRAL, MISTRAL_ARGUMENTS, PYTHON];
        let marks: Vec<Option<u32>> = marks.iter().map(|mark| tokenizer.id(mark)).collect();
        let words: Vec<Vec<u8>> = (0..compute.vocab() as u32)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id);
                // Marks of calls are written like text; other control tokens never are.
                if tokenizer.is_special(id) && !marks.contains(&Some(id)) {
                    [&[TokTrie::SPECIAL_TOKEN_MARKER][..], bytes].concat()
                } else {
                    bytes.to_vec()
                }
            })
            .collect();
        let ends = tokenizer.end_of_turn();
        let first = *ends.first().ok_or("the model has no end-of-turn token")?;
        let info = TokRxInfo::new(words.len() as u32, first);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(ends);
        let dialect = Dialect::of(compute.template());
        let reasons = compute.template().source().contains("<think>");
        let think = tokenizer.id("<think>").filter(|_| reasons);
        let environment: TokEnv = Arc::new(Environment {
            trie,
            compute: compute.clone(),
        });
        let mut factory = ParserFactory::new_simple(&environment).map_err(|e| e.to_string())?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self {
            environment,
            factory,
            dialect,
            reasons,
            think,
            kept: VecDeque::new(),
        })
    }

    /// What constrains the answer to a request.
    ///
    /// # Errors
    /// `InvalidRequest` when the request asks for what cannot be: a malformed schema, a
    /// tool that is not there.
    pub(crate) fn plan(&mut self, request: &GenerateRequest) -> Result<Plan, Failure> {
        let invalid = |text: String| Failure::new(Code::InvalidRequest, text);
        let tools: &[Tool] = match &request.prompt {
            Prompt::Chat { tools, .. } if request.tool_choice != ToolChoice::None => tools,
            _ => &[],
        };
        let schema = match &request.response_format {
            ResponseFormat::Text => None,
            ResponseFormat::JsonObject => Some(json!({"type": "object"})),
            ResponseFormat::JsonSchema(schema) => {
                check(schema, "response_format.json_schema.schema")?;
                Some(schema.clone())
            }
        };
        let must: Option<Vec<Tool>> = match &request.tool_choice {
            ToolChoice::Auto | ToolChoice::None => None,
            ToolChoice::Required if tools.is_empty() => {
                return Err(invalid(
                    "'tool_choice' requires a tool, but 'tools' is empty".into(),
                ));
            }
            ToolChoice::Required => Some(tools.to_vec()),
            ToolChoice::Named(name) => match tools.iter().find(|t| t.name == *name) {
                Some(tool) => Some(vec![tool.clone()]),
                None => {
                    let names: Vec<&str> = tools.iter().map(|t| t.name.as_str()).collect();
                    return Err(invalid(format!(
                        "'tool_choice' names '{name}', which is not among the tools: {}",
                        names.join(", ")
                    )));
                }
            },
        };
        let most = match &request.tool_choice {
            ToolChoice::Named(_) => 1,
            _ => MOST_CALLS,
        };
        let (dialect, reasons) = (self.dialect, self.reasons);
        let whole = match (must, schema) {
            (Some(must), _) => self.compile("tools", |strictness, notes| {
                dialect.answer(reasons, &must, most, None, strictness, notes)
            }),
            (None, Some(schema)) => self.compile("response_format", |strictness, notes| {
                let schema = relax(&schema, "schema", strictness, notes);
                dialect.answer(reasons, tools, most, Some(&schema), strictness, notes)
            }),
            (None, None) => None,
        };
        let call = if whole.is_none() && !tools.is_empty() {
            self.compile("tools", |strictness, notes| {
                dialect.call(tools, strictness, notes)
            })
        } else {
            None
        };
        Ok(Plan {
            whole,
            call,
            think: self.think,
            environment: Some(self.environment.clone()),
        })
    }

    /// Compiles a grammar, with as much of its schemas as is possible.
    fn compile(
        &mut self,
        what: &str,
        source: impl Fn(Strictness, &mut Vec<String>) -> String,
    ) -> Option<Matcher> {
        for strictness in [Strictness::Full, Strictness::Shape, Strictness::Object] {
            let mut notes = Vec::new();
            let lark = source(strictness, &mut notes);
            if let Some((_, kept)) = self.kept.iter().find(|(key, _)| *key == lark) {
                match kept {
                    Some(matcher) => return Some(matcher.clone()),
                    None => continue,
                }
            }
            let grammar = TopLevelGrammar::from_lark(lark.clone());
            let mut matcher = Matcher::new(self.factory.create_parser(grammar));
            let compiled = match matcher.get_error() {
                None => {
                    notes.extend(matcher.grammar_warnings());
                    if !notes.is_empty() {
                        let left_out = notes.join("; ");
                        tracing::info!(what, left_out, "a schema is enforced in part");
                    }
                    Some(matcher)
                }
                Some(error) => {
                    let error = error.lines().next().unwrap_or_default();
                    tracing::info!(what, error, ?strictness, "a schema is relaxed");
                    None
                }
            };
            if self.kept.len() >= KEPT {
                self.kept.pop_front();
            }
            self.kept.push_back((lark, compiled.clone()));
            if compiled.is_some() {
                return compiled;
            }
        }
        tracing::warn!(
            what,
            "the answer is not constrained: no grammar could be made of it"
        );
        None
    }
}

/// A text as a literal of the grammar.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

impl Dialect {
    /// The grammar of one call from behind its mark, or of the whole text of one where the
    /// dialect has no mark.
    fn call(self, tools: &[Tool], strictness: Strictness, notes: &mut Vec<String>) -> String {
        let mut lark = match self {
            Self::Hermes => format!("start: SPACE? call SPACE? {}\n", literal(HERMES.1)),
            Self::Mistral {
                arguments_mark: true,
            }
            | Self::Llama
            | Self::Json => "start: SPACE? call\n".to_owned(),
            Self::Mistral {
                arguments_mark: false,
            } => "start: SPACE? list\nlist: \"[\" SPACE? call (SPACE? \",\" SPACE? call)* SPACE? \"]\"\n".to_owned(),
        };
        self.rules(tools, strictness, notes, &mut lark);
        lark
    }

    /// The grammar of an answer that calls tools, or is JSON of a schema.
    fn answer(
        self,
        reasons: bool,
        tools: &[Tool],
        most: usize,
        schema: Option<&Value>,
        strictness: Strictness,
        notes: &mut Vec<String>,
    ) -> String {
        let repeated = |part: &str| match most {
            0 | 1 => String::new(),
            _ => format!(" ({part}){{0,{}}}", most - 1),
        };
        let calls = match self {
            Self::Hermes => {
                let (open, close) = (literal(HERMES.0), literal(HERMES.1));
                let again = repeated("SPACE? one");
                format!("calls: one{again}\none: {open} SPACE? call SPACE? {close}\n")
            }
            Self::Llama | Self::Json => "calls: call\n".to_owned(),
            Self::Mistral {
                arguments_mark: true,
            } => {
                let again = repeated("one");
                format!("calls: one{again}\none: {} call\n", literal(MISTRAL))
            }
            Self::Mistral {
                arguments_mark: false,
            } => {
                let again = repeated("SPACE? \",\" SPACE? call");
                let mark = literal(MISTRAL);
                format!("calls: {mark} SPACE? \"[\" SPACE? call{again} SPACE? \"]\"\n")
            }
        };
        // Reasoning and what follows it are parted by line breaks, which the parser drops.
        let lead = if reasons { "SPACE? " } else { "" };
        let mut lark = match (tools.is_empty(), schema) {
            (false, Some(_)) => format!("start: {lead}(json | calls)\n{calls}"),
            (false, None) => format!("start: {lead}calls\n{calls}"),
            (true, _) => format!("start: {lead}json\n"),
        };
        if let Some(schema) = schema {
            let _ = writeln!(lark, "json: {}", json_rule(schema));
        }
        if !tools.is_empty() {
            self.rules(tools, strictness, notes, &mut lark);
        } else {
            let _ = writeln!(lark, "SPACE: /{SPACE}/");
        }
        lark
    }

    /// The rules of a call: a choice among the tools, each with its arguments.
    fn rules(
        self,
        tools: &[Tool],
        strictness: Strictness,
        notes: &mut Vec<String>,
        lark: &mut String,
    ) {
        let names: Vec<String> = (0..tools.len()).map(|i| format!("tool{i}")).collect();
        let _ = writeln!(lark, "call: {}", names.join(" | "));
        for (i, tool) in tools.iter().enumerate() {
            let key = self.arguments_key();
            if matches!(
                self,
                Self::Mistral {
                    arguments_mark: true
                }
            ) {
                let head = literal(&format!("{}{MISTRAL_ARGUMENTS}", tool.name));
                let _ = writeln!(lark, "tool{i}: {head} SPACE? arguments{i}");
            } else {
                let name = literal(&Value::from(tool.name.as_str()).to_string());
                let [name_key, key] = ["name", key].map(|k| literal(&format!("\"{k}\"")));
                let _ = writeln!(
                    lark,
                    "tool{i}: \"{{\" SPACE? {name_key} SPACE? \":\" SPACE? {name} SPACE? \",\" SPACE? {key} SPACE? \":\" SPACE? arguments{i} SPACE? \"}}\""
                );
            }
            let mut schema = match &tool.parameters {
                Value::Object(object) if !object.is_empty() => {
                    relax(&tool.parameters, &tool.name, strictness, notes)
                }
                _ => json!({"type": "object"}),
            };
            if let Some(object) = schema.as_object_mut()
                && !["type", "anyOf", "allOf", "$ref", "enum", "const"]
                    .iter()
                    .any(|key| object.contains_key(*key))
            {
                object.insert("type".into(), json!("object"));
            }
            let _ = writeln!(lark, "arguments{i}: {}", json_rule(&schema));
        }
        let _ = writeln!(lark, "SPACE: /{SPACE}/");
    }
}

fn json_rule(schema: &Value) -> String {
    let mut schema = schema.clone();
    if let Some(object) = schema.as_object_mut() {
        let options = json!({"lenient": true, "coerce_one_of": true, "whitespace_pattern": SPACE});
        object.insert("x-guidance".into(), options);
    }
    format!("%json {schema}")
}

/// The grammars of one request.
#[derive(Default)]
pub(crate) struct Plan {
    whole: Option<Matcher>,
    call: Option<Matcher>,
    think: Option<u32>,
    environment: Option<TokEnv>,
}

/// Follows one answer and says which tokens may come next.
#[derive(Default)]
pub(crate) struct Constraint {
    plan: Plan,
    /// The grammar of the call that is being written.
    call: Option<Matcher>,
    /// Calls that were looked at already.
    seen: Option<u32>,
    begun: bool,
}

impl Constraint {
    pub(crate) fn new(plan: Plan) -> Self {
        Self {
            plan,
            ..Default::default()
        }
    }

    /// Whether the whole answer has a form, which an end-of-turn token must end.
    pub(crate) fn is_whole(&self) -> bool {
        self.plan.whole.is_some()
    }

    /// The tokens that may come next; `None` when all may.
    pub(crate) fn mask(&mut self, parser: &OutputParser) -> Option<SimpleVob> {
        if parser.is_reasoning() {
            return None;
        }
        let begun = std::mem::replace(&mut self.begun, true);
        if let Some(whole) = &mut self.plan.whole {
            let mask = whole.compute_mask_or_eos();
            return match mask {
                Ok(mut mask) => {
                    if let (false, Some(think)) = (begun, self.plan.think) {
                        mask.allow_token(think);
                    }
                    Some(mask)
                }
                Err(error) => {
                    self.plan.whole = None;
                    given_up(&error)
                }
            };
        }
        let call = self.call.as_mut()?;
        if call.is_stopped() {
            self.call = None;
            return None;
        }
        call.compute_mask().map_or_else(
            |error| {
                self.call = None;
                given_up(&error)
            },
            Some,
        )
    }

    /// Takes in the token that was drawn, before its text is parsed.
    pub(crate) fn commit(&mut self, token: u32, parser: &OutputParser) {
        if parser.is_reasoning() || Some(token) == self.plan.think {
            return;
        }
        let matcher = match &mut self.plan.whole {
            Some(whole) => Some(whole),
            None => self.call.as_mut(),
        };
        if let Some(matcher) = matcher
            && !matcher.is_stopped()
            && let Err(error) = matcher.consume_token(token)
        {
            given_up::<()>(&error);
            self.plan.whole = None;
            self.call = None;
        }
    }

    /// Looks, after a token was parsed, whether a call has begun by itself; from here on
    /// its arguments can only be valid. `held` is text that has not reached the parser.
    pub(crate) fn follow(&mut self, parser: &OutputParser, held: bool) {
        let calls = parser.calls();
        if self.call.is_some() || self.seen == Some(calls) || held {
            return;
        }
        let (Some(call), Some(text)) = (&self.plan.call, parser.open_call()) else {
            return;
        };
        self.seen = Some(calls);
        let Some(environment) = &self.plan.environment else {
            return;
        };
        let mut matcher = call.clone();
        let ids = environment.tok_trie().greedy_tokenize(text.as_bytes());
        match matcher.try_consume_tokens(&ids) {
            Ok(taken) if taken == ids.len() => self.call = Some(matcher),
            _ => tracing::debug!("a call began in a form of its own and is not constrained"),
        }
    }
}

/// A grammar that cannot go on lets the answer go on without it.
fn given_up<T>(error: &dyn std::fmt::Display) -> Option<T> {
    tracing::warn!(%error, "a constraint was given up; the answer goes on without it");
    None
}
