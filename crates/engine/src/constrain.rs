//! Answers that are held to a form: JSON, a schema, or a call of an offered tool.
//!
//! A grammar says before every token which ones may follow. The sampler draws among those
//! only, so what is stored is the log-probability of the distribution that was drawn from.
//!
//! What a schema asks beyond what a grammar can say is left out with a note in the log.
//! A schema that is no schema is refused with the path of its fault.

use std::cell::{OnceCell, RefCell};

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use spotter_core::Code;
use spotter_core::chat::{ResponseFormat, Tool, ToolChoice};
use spotter_core::code::Failure;
use spotter_core::generate::{GenerateRequest, Prompt};
use spotter_model::Tokenizer;
use std::sync::Arc;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::output::CALL;

/// Compiled grammars that are kept: an agent sends the same tools with every request.
const KEPT: usize = 16;
/// Longest text that a grammar counts.
const MOST_COUNTED: u64 = 2048;

/// What holds one answer to a form.
#[derive(Clone, Default)]
pub(crate) struct Constraint {
    /// Holds now.
    active: Option<Matcher>,
    /// Holds from the mark that begins a tool call to the one that ends it.
    in_call: Option<Matcher>,
    /// The form holds for the whole answer, not for a call alone.
    whole: bool,
}

impl Constraint {
    /// The tokens that may not follow; `None` when all may.
    pub(crate) fn banned(&mut self, vocab: usize) -> Result<Option<Vec<u32>>, Failure> {
        let Some(matcher) = &mut self.active else {
            return Ok(None);
        };
        let mask = matcher
            .compute_mask_or_eos()
            .map_err(|e| broken(&e.to_string()))?;
        let banned = (0..vocab).filter(|id| *id >= mask.len() || !mask.get(*id));
        Ok(Some(banned.map(|id| id as u32).collect()))
    }

    /// Takes in a drawn token that is no end of the turn.
    pub(crate) fn drawn(&mut self, id: u32) -> Result<(), Failure> {
        if let Some(matcher) = &mut self.active {
            matcher
                .consume_token(id)
                .map_err(|e| broken(&e.to_string()))?;
            if matcher.is_stopped() && !self.whole {
                self.active = None;
            }
        }
        Ok(())
    }

    /// The answer's text has begun a tool call, of which nothing but space is there yet.
    pub(crate) fn call_begun(&mut self) {
        if self.active.is_none() {
            self.active = self.in_call.clone();
        }
    }

    /// Whether nothing but the end of the turn may follow.
    pub(crate) fn complete(&self) -> bool {
        self.active.as_ref().is_some_and(Matcher::is_stopped)
    }
}

fn broken(reason: &str) -> Failure {
    tracing::error!(reason, "a grammar failed");
    let text = "the answer could not be held to the form asked for; the request can be repeated";
    Failure::new(Code::Unavailable, text)
}

/// Compiles and keeps the grammars of one model's vocabulary.
#[derive(Default)]
pub(crate) struct Grammars {
    factory: OnceCell<Option<ParserFactory>>,
    kept: RefCell<Vec<(String, Matcher)>>,
}

impl Grammars {
    /// What this request's answer is held to.
    ///
    /// # Errors
    /// When a schema is malformed, or the tool that must be called is not offered.
    pub(crate) fn constraint(
        &self,
        request: &GenerateRequest,
        tokenizer: &Tokenizer,
        vocab: usize,
    ) -> Result<Constraint, Failure> {
        let tools: &[Tool] = match &request.prompt {
            Prompt::Chat { tools, .. } if request.tool_choice != ToolChoice::None => tools,
            _ => &[],
        };
        if let ResponseFormat::JsonSchema(schema) = &request.response_format {
            check(schema, "response_format.schema")?;
        }
        for (i, tool) in tools.iter().enumerate() {
            check(&tool.parameters, &format!("tools[{i}].parameters"))?;
        }
        let chosen: Vec<&Tool> = match &request.tool_choice {
            ToolChoice::Named(name) => tools.iter().filter(|t| t.name == *name).collect(),
            _ => tools.iter().collect(),
        };
        let forced = matches!(
            request.tool_choice,
            ToolChoice::Required | ToolChoice::Named(_)
        );
        if forced && chosen.is_empty() {
            let offered: Vec<&str> = tools.iter().map(|t| t.name.as_str()).collect();
            let text = match &request.tool_choice {
                ToolChoice::Named(name) => format!(
                    "'tool_choice' names '{name}', which is not offered; offered are: {}",
                    offered.join(", ")
                ),
                _ => "'tool_choice' requires a call, and no tool is offered".to_owned(),
            };
            return Err(Failure::new(Code::InvalidRequest, text));
        }
        let text_form = match &request.response_format {
            ResponseFormat::Text => None,
            ResponseFormat::JsonObject => Some(json!({"type": "object"})),
            ResponseFormat::JsonSchema(schema) => Some(schema.clone()),
        };
        let compile = |form: &dyn Fn(Ease) -> String| self.compile(tokenizer, vocab, form);
        let mut constraint = Constraint::default();
        if forced {
            constraint.active = compile(&|ease| grammar(None, &chosen, true, ease));
        } else if let Some(schema) = &text_form {
            constraint.active = compile(&|ease| grammar(Some(schema), &chosen, true, ease));
        } else if !chosen.is_empty() {
            constraint.in_call = compile(&|ease| grammar(None, &chosen, false, ease));
        }
        constraint.whole = constraint.active.is_some();
        if constraint.active.is_none() && (forced || text_form.is_some()) {
            return Err(broken("not even the most relaxed grammar was accepted"));
        }
        Ok(constraint)
    }

    /// The strictest form that compiles.
    fn compile(
        &self,
        tokenizer: &Tokenizer,
        vocab: usize,
        form: &dyn Fn(Ease) -> String,
    ) -> Option<Matcher> {
        let key = form(Ease::None);
        if let Some((_, matcher)) = self.kept.borrow().iter().find(|(k, _)| *k == key) {
            return Some(matcher.deep_clone());
        }
        let factory = self
            .factory
            .get_or_init(|| factory(tokenizer, vocab))
            .as_ref()?;
        for ease in [Ease::None, Ease::Counts, Ease::Any] {
            let parser = factory.create_parser(TopLevelGrammar::from_lark(form(ease)));
            let mut matcher = Matcher::new(parser);
            if let Some(reason) = matcher.get_error() {
                tracing::warn!(reason, "a schema is relaxed: the grammar does not take it");
                continue;
            }
            for note in matcher.grammar_warnings() {
                tracing::info!(note, "a schema is relaxed");
            }
            let mut kept = self.kept.borrow_mut();
            if kept.len() >= KEPT {
                kept.remove(0);
            }
            kept.push((key, matcher.deep_clone()));
            return Some(matcher);
        }
        None
    }
}

fn factory(tokenizer: &Tokenizer, vocab: usize) -> Option<ParserFactory> {
    let ends = tokenizer.end_of_turn();
    let first = *ends.first()?;
    let words: Vec<Vec<u8>> = (0..vocab as u32)
        .map(|id| {
            let bytes = tokenizer.token_bytes(id);
            // A call's marks are part of the grammar, also where they are control tokens.
            let mark = [CALL.0, CALL.1].iter().any(|m| m.as_bytes() == bytes);
            if ends.contains(&id) || (tokenizer.is_special(id) && !mark) {
                let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
                word.extend_from_slice(bytes);
                word
            } else {
                bytes.to_vec()
            }
        })
        .collect();
    let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, first), &words).with_eos_tokens(ends);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    match ParserFactory::new_simple(&env) {
        Ok(mut factory) => {
            factory.quiet();
            Some(factory)
        }
        Err(error) => {
            tracing::error!(%error, "this vocabulary takes no grammars");
            None
        }
    }
}

/// How much of a schema is left out.
#[derive(Clone, Copy, PartialEq)]
enum Ease {
    /// Only lengths no grammar can count.
    None,
    /// Lengths, patterns and formats.
    Counts,
    /// All but that it is an object.
    Any,
}

/// The grammar of an answer: JSON of `schema`, a call of one of `tools`, or either. Without
/// `marks`, of the part of a call that follows its first mark.
fn grammar(schema: Option<&Value>, tools: &[&Tool], marks: bool, ease: Ease) -> String {
    let mut rules = String::new();
    let mut starts = Vec::new();
    if let Some(schema) = schema {
        starts.push("form".to_owned());
        rules.push_str(&format!("form: %json {}\n", eased(schema, ease)));
    }
    if !tools.is_empty() {
        let begin = if marks {
            format!("{} ", quoted(&format!("{}\n", CALL.0)))
        } else {
            "/[ \\n]{0,2}/ ".to_owned()
        };
        let names: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
        starts.push(format!(
            "{begin}({}) {}",
            names.join(" | "),
            quoted(&format!("\n{}", CALL.1))
        ));
        for (i, tool) in tools.iter().enumerate() {
            let name = Value::String(tool.name.clone());
            let head = quoted(&format!("{{\"name\": {name}, \"arguments\": "));
            rules.push_str(&format!(
                "call_{i}: {head} arguments_{i} \"}}\"\narguments_{i}: %json {}\n",
                eased(&arguments(&tool.parameters), ease)
            ));
        }
    }
    format!("start: {}\n{rules}", starts.join(" | "))
}

fn quoted(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}

/// Arguments are an object, whatever the client has left out.
fn arguments(parameters: &Value) -> Value {
    match parameters {
        Value::Object(map) if !map.is_empty() => {
            let mut map = map.clone();
            if !["type", "$ref", "anyOf", "oneOf", "allOf"]
                .iter()
                .any(|k| map.contains_key(*k))
            {
                map.insert("type".into(), json!("object"));
            }
            Value::Object(map)
        }
        _ => json!({"type": "object"}),
    }
}

/// The schema as the grammar gets it.
fn eased(schema: &Value, ease: Ease) -> Value {
    let mut out = match (ease, schema) {
        (Ease::Any, _) => json!({"type": "object"}),
        (_, Value::Object(_)) => schema.clone(),
        _ => json!({}),
    };
    leave_out(&mut out, ease);
    out["x-guidance"] = json!({
        "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ",
        "lenient": true, "coerce_one_of": true,
    });
    out
}

fn leave_out(schema: &mut Value, ease: Ease) {
    const COUNTS: [&str; 4] = ["maxLength", "minLength", "maxItems", "minItems"];
    match schema {
        Value::Object(map) => {
            map.retain(|key, value| {
                let counts = COUNTS.contains(&key.as_str()) && value.is_number();
                let huge = value.as_u64().is_some_and(|n| n > MOST_COUNTED);
                let shape = ["pattern", "format"].contains(&key.as_str()) && value.is_string();
                let out = counts && (huge || ease != Ease::None) || shape && ease != Ease::None;
                if out {
                    tracing::debug!(key, "left out of a schema");
                }
                !out
            });
            map.values_mut().for_each(|v| leave_out(v, ease));
        }
        Value::Array(list) => list.iter_mut().for_each(|v| leave_out(v, ease)),
        _ => {}
    }
}

/// Refuses what is no schema, naming the path.
fn check(schema: &Value, path: &str) -> Result<(), Failure> {
    const TYPES: [&str; 7] = [
        "object", "array", "string", "number", "integer", "boolean", "null",
    ];
    let wrong = |at: &str, what: &str| {
        let text = format!("invalid schema: '{path}{at}' {what}");
        Err(Failure::new(Code::InvalidRequest, text))
    };
    let map = match schema {
        Value::Object(map) => map,
        Value::Bool(_) | Value::Null => return Ok(()),
        _ => return wrong("", "must be an object"),
    };
    for (key, value) in map {
        match key.as_str() {
            "type" => {
                let known = |v: &Value| v.as_str().is_some_and(|t| TYPES.contains(&t));
                let fine = match value {
                    Value::Array(list) => !list.is_empty() && list.iter().all(known),
                    one => known(one),
                };
                if !fine {
                    return wrong(".type", &format!("is {value}, which is no JSON type"));
                }
            }
            "properties" | "$defs" | "definitions" => {
                let Some(entries) = value.as_object() else {
                    return wrong(&format!(".{key}"), "must be an object");
                };
                for (name, inner) in entries {
                    check(inner, &format!("{path}.{key}.{name}"))?;
                }
            }
            "anyOf" | "oneOf" | "allOf" => {
                let Some(list) = value.as_array().filter(|l| !l.is_empty()) else {
                    return wrong(&format!(".{key}"), "must be a list of schemas");
                };
                for (i, inner) in list.iter().enumerate() {
                    check(inner, &format!("{path}.{key}[{i}]"))?;
                }
            }
            "items" if !value.is_array() => check(value, &format!("{path}.items"))?,
            "enum" if !value.is_array() => return wrong(".enum", "must be a list"),
            "required" if !value.is_array() && !value.is_boolean() => {
                return wrong(".required", "must be a list of names");
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Ease, check, eased};

    #[test]
    fn a_fault_is_named_by_its_path() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "text"}}}});
        let failure = check(&schema, "schema").expect_err("'text' is no type");
        assert!(
            failure.message.contains("'schema.properties.a.items.type'"),
            "{}",
            failure.message
        );
        assert!(check(&json!({"properties": []}), "s").is_err());
        assert!(check(&json!({"type": ["string", "null"], "x-odd": 1}), "s").is_ok());
    }

    #[test]
    fn huge_lengths_are_left_out_and_small_ones_kept() {
        let schema =
            json!({"type": "string", "maxLength": 100_000, "minLength": 3, "pattern": "a+"});
        let strict = eased(&schema, Ease::None);
        assert!(strict.get("maxLength").is_none());
        assert_eq!(strict["minLength"], 3);
        assert!(eased(&schema, Ease::Counts).get("pattern").is_none());
    }
}
