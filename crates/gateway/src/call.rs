//! The one internal form of a request; every dialect translates into it.
//!
//! Reading is lenient: unknown keys are kept for the record and otherwise
//! ignored, and content may be a string, a list of parts or null.

use serde_json::{Map, Value, json};
use spotter_core::AdapterVersion;
use spotter_core::Code;
use spotter_core::chat::{Message, ResponseFormat, Role, Tool, ToolCall, ToolChoice};
use spotter_core::code::Failure;
use spotter_core::generate::{AdapterChoice, Prompt, Sampling};

use crate::engine::Adapters;
use crate::error::invalid;
use crate::session::Hints;

/// Most choices of one request.
const MAX_CHOICES: u64 = 16;
/// Longest tool-call id.
const MAX_CALL_ID: usize = 40;

/// What to answer to.
#[derive(Clone, Debug)]
pub(crate) enum Ask {
    /// A conversation.
    Chat,
    /// Raw text or token ids, as `/v1/completions` and `/generate` send it.
    Raw(Prompt),
}

/// A request, whatever dialect it came in.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// The model name as the client wrote it; echoed.
    pub(crate) model: String,
    pub(crate) ask: Ask,
    /// The conversation; for raw prompts one user message.
    pub(crate) messages: Vec<Message>,
    pub(crate) tools: Vec<Tool>,
    pub(crate) tool_choice: ToolChoice,
    pub(crate) response_format: ResponseFormat,
    pub(crate) sampling: Sampling,
    pub(crate) template_variables: Map<String, Value>,
    /// Alternatives per token; `None` when no log-probabilities are asked for.
    pub(crate) top_logprobs: Option<u8>,
    /// How many choices.
    pub(crate) n: usize,
    pub(crate) stream: bool,
    /// Whether the stream ends with a usage chunk.
    pub(crate) include_usage: bool,
    pub(crate) hints: Hints,
    /// The request's other top-level keys, for the record.
    pub(crate) other: Map<String, Value>,
}

impl Call {
    /// A call without content, for the model that the body names.
    pub(crate) fn new(body: &Map<String, Value>, recorded_elsewhere: &[&str]) -> Self {
        let other = body
            .iter()
            .filter(|(key, _)| !recorded_elsewhere.contains(&key.as_str()))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        Self {
            model: text(body.get("model")).unwrap_or("spotter").to_owned(),
            ask: Ask::Chat,
            messages: Vec::new(),
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            response_format: ResponseFormat::Text,
            sampling: Sampling::default(),
            template_variables: Map::new(),
            top_logprobs: None,
            n: 1,
            stream: body.get("stream").and_then(Value::as_bool).unwrap_or(false),
            include_usage: false,
            hints: Hints::default(),
            other,
        }
    }

    /// The prompt for the engine, taken out of the call.
    pub(crate) fn prompt(&mut self) -> Prompt {
        match &self.ask {
            Ask::Raw(prompt) => prompt.clone(),
            Ask::Chat => Prompt::Chat {
                messages: std::mem::take(&mut self.messages),
                tools: if self.tool_choice == ToolChoice::None {
                    Vec::new()
                } else {
                    std::mem::take(&mut self.tools)
                },
                template_variables: std::mem::take(&mut self.template_variables),
            },
        }
    }
}

/// Which weights a model name asks for.
///
/// `spotter` and unknown names mean the live adapter, `spotter:base` and
/// `spotter:vN` a fixed version; a provider's prefix (`x/y/spotter:v2`) does not
/// matter.
pub(crate) fn adapter_choice(model: &str, adapters: &Adapters) -> Result<AdapterChoice, Failure> {
    let name = model.rsplit('/').next().unwrap_or(model);
    let Some(version) = name
        .strip_prefix("spotter:")
        .filter(|v| !matches!(*v, "latest" | "live" | "current"))
    else {
        return Ok(AdapterChoice::Current);
    };
    let unknown = || {
        Failure::new(
            Code::ModelNotFound,
            format!("The model '{model}' does not exist; GET /v1/models lists those that do."),
        )
    };
    let version: AdapterVersion = version.parse().map_err(|_| unknown())?;
    if version.is_base() || adapters.live == version || adapters.loaded.contains(&version) {
        Ok(AdapterChoice::Version(version))
    } else {
        Err(unknown())
    }
}

/// A JSON string.
pub(crate) fn text(value: Option<&Value>) -> Option<&str> {
    value.and_then(Value::as_str)
}

/// The text of a message's content, whatever its form. Parts that are not text
/// are named in brackets, so that the model knows something was there.
pub(crate) fn content_text(content: Option<&Value>) -> String {
    match content {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts: Vec<String> = parts.iter().filter_map(part_text).collect();
            texts.join("\n")
        }
        Some(part @ Value::Object(_)) => part_text(part).unwrap_or_default(),
        Some(other) => other.to_string(),
    }
}

fn part_text(part: &Value) -> Option<String> {
    if let Value::String(text) = part {
        return Some(text.clone());
    }
    if let Some(text) = text(part.get("text")).or_else(|| text(part.get("refusal"))) {
        return Some(text.to_owned());
    }
    match text(part.get("type"))? {
        kind if kind.contains("image") => Some("[image]".to_owned()),
        kind if kind.contains("audio") => Some("[audio]".to_owned()),
        kind if kind.contains("file") || kind.contains("document") => Some("[file]".to_owned()),
        _ => None,
    }
}

/// JSON text in its compact form; text that is not JSON stays as it is.
pub(crate) fn compact(arguments: &str) -> String {
    let trimmed = arguments.trim();
    if trimmed.is_empty() {
        return "{}".to_owned();
    }
    serde_json::from_str::<Value>(trimmed)
        .map_or_else(|_| arguments.to_owned(), |value| value.to_string())
}

/// An id with letters and digits only, because clients rewrite ids to that and
/// compare them afterwards.
pub(crate) fn call_id(id: &str) -> String {
    id.chars()
        .filter(char::is_ascii_alphanumeric)
        .take(MAX_CALL_ID)
        .collect()
}

/// Reads an OpenAI chat message; `None` when its role is unknown.
pub(crate) fn chat_message(value: &Value) -> Option<Message> {
    let role = match text(value.get("role"))? {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" | "model" => Role::Assistant,
        "tool" | "function" => Role::Tool,
        _ => return None,
    };
    let mut message = Message::text(role, content_text(value.get("content")));
    message.name = text(value.get("name"))
        .or_else(|| text(value.get("tool_name")))
        .map(str::to_owned);
    message.tool_call_id = text(value.get("tool_call_id")).map(call_id);
    message.reasoning = text(value.get("reasoning_content"))
        .or_else(|| text(value.get("reasoning")))
        .filter(|r| !r.is_empty())
        .map(str::to_owned);
    if let Some(calls) = value.get("tool_calls").and_then(Value::as_array) {
        message.tool_calls = calls.iter().filter_map(tool_call).collect();
    }
    if let Some(call) = value.get("function_call").filter(|c| c.is_object()) {
        message
            .tool_calls
            .extend(tool_call(&json!({"function": call})));
    }
    Some(message)
}

fn tool_call(value: &Value) -> Option<ToolCall> {
    let function = value.get("function").unwrap_or(value);
    let arguments = match function.get("arguments") {
        Some(Value::String(text)) => compact(text),
        Some(Value::Null) | None => "{}".to_owned(),
        Some(object) => object.to_string(),
    };
    Some(ToolCall {
        id: call_id(text(value.get("id")).unwrap_or_default()),
        name: text(function.get("name"))?.to_owned(),
        arguments,
    })
}

/// Reads tools: nested (`function`), flat, and Anthropic's (`input_schema`).
/// Tools of kinds that a server runs itself are left out.
pub(crate) fn tools(value: Option<&Value>) -> Vec<Tool> {
    let Some(list) = value.and_then(Value::as_array) else {
        return Vec::new();
    };
    list.iter()
        .filter_map(|entry| {
            let function = entry.get("function").unwrap_or(entry);
            let parameters = function
                .get("parameters")
                .or_else(|| function.get("input_schema"))
                .filter(|schema| schema.is_object())
                .cloned()
                .unwrap_or_else(|| json!({"type": "object", "properties": {}}));
            Some(Tool {
                name: text(function.get("name"))?.to_owned(),
                description: text(function.get("description"))
                    .unwrap_or_default()
                    .to_owned(),
                parameters,
            })
        })
        .collect()
}

/// Reads `tool_choice` in the forms of OpenAI chat, Responses and Anthropic.
pub(crate) fn tool_choice(value: Option<&Value>) -> ToolChoice {
    let word = |word: &str| match word {
        "none" => ToolChoice::None,
        "required" | "any" => ToolChoice::Required,
        _ => ToolChoice::Auto,
    };
    match value {
        Some(Value::String(choice)) => word(choice),
        Some(Value::Object(choice)) => {
            let name = text(choice.get("function").and_then(|f| f.get("name")))
                .or_else(|| text(choice.get("name")));
            match name {
                Some(name) => ToolChoice::Named(name.to_owned()),
                None => word(text(choice.get("type")).unwrap_or("auto")),
            }
        }
        _ => ToolChoice::Auto,
    }
}

/// Reads `response_format`, and `text.format` of Responses.
pub(crate) fn response_format(value: Option<&Value>) -> ResponseFormat {
    let Some(value) = value else {
        return ResponseFormat::Text;
    };
    match text(value.get("type")) {
        Some("json_object") => ResponseFormat::JsonObject,
        Some("json_schema") => {
            let schema = value
                .get("json_schema")
                .and_then(|s| s.get("schema"))
                .or_else(|| value.get("schema"));
            match schema {
                Some(schema) if schema.is_object() => ResponseFormat::JsonSchema(schema.clone()),
                _ => ResponseFormat::JsonObject,
            }
        }
        _ => ResponseFormat::Text,
    }
}

fn number(body: &Map<String, Value>, key: &str) -> Result<Option<f64>, Failure> {
    match body.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value
            .as_f64()
            .map(Some)
            .ok_or_else(|| invalid(format!("'{key}' is not a number."))),
    }
}

fn in_range(
    body: &Map<String, Value>,
    key: &str,
    low: f64,
    high: f64,
) -> Result<Option<f32>, Failure> {
    match number(body, key)? {
        Some(value) if !(low..=high).contains(&value) => Err(invalid(format!(
            "'{key}' is {value}; it must be between {low} and {high}."
        ))),
        #[allow(clippy::cast_possible_truncation)]
        value => Ok(value.map(|v| v as f32)),
    }
}

/// Reads sampling parameters under OpenAI's names and the usual extensions.
/// `limits` are the keys that may hold the token limit; the first one that is
/// there counts.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(crate) fn sampling(body: &Map<String, Value>, limits: &[&str]) -> Result<Sampling, Failure> {
    let defaults = Sampling::default();
    let mut max_tokens = None;
    for key in limits {
        if let Some(limit) = number(body, key)? {
            // Zero and -1 mean "no limit" to several clients; other negative ones are slips.
            if limit < -1.0 {
                return Err(invalid(format!("'{key}' must be at least 1.")));
            }
            max_tokens = (limit >= 1.0).then_some(limit.min(f64::from(u32::MAX)) as u32);
            break;
        }
    }
    let stop = match body.get("stop").or_else(|| body.get("stop_sequences")) {
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(list)) => list
            .iter()
            .filter_map(|s| s.as_str().map(str::to_owned))
            .collect(),
        _ => Vec::new(),
    };
    let logit_bias = match body.get("logit_bias") {
        Some(Value::Object(map)) => map
            .iter()
            .filter_map(|(id, bias)| Some((id.parse().ok()?, bias.as_f64()? as f32)))
            .collect(),
        _ => Vec::new(),
    };
    Ok(Sampling {
        temperature: in_range(body, "temperature", 0.0, 5.0)?.unwrap_or(defaults.temperature),
        top_p: in_range(body, "top_p", 0.0, 1.0)?
            .filter(|p| *p > 0.0)
            .unwrap_or(defaults.top_p),
        top_k: number(body, "top_k")?.map_or(defaults.top_k, |k| k.max(0.0) as u32),
        min_p: in_range(body, "min_p", 0.0, 1.0)?.unwrap_or(defaults.min_p),
        repetition_penalty: in_range(body, "repetition_penalty", 0.0, 10.0)?
            .filter(|p| *p > 0.0)
            .unwrap_or(defaults.repetition_penalty),
        presence_penalty: in_range(body, "presence_penalty", -10.0, 10.0)?
            .unwrap_or(defaults.presence_penalty),
        frequency_penalty: in_range(body, "frequency_penalty", -10.0, 10.0)?
            .unwrap_or(defaults.frequency_penalty),
        logit_bias,
        seed: body
            .get("seed")
            .and_then(|s| s.as_u64().or_else(|| s.as_i64().map(i64::cast_unsigned))),
        stop: stop.into_iter().filter(|s| !s.is_empty()).collect(),
        max_tokens,
        ignore_eos: body
            .get("ignore_eos")
            .and_then(Value::as_bool)
            .unwrap_or(false),
    })
}

/// Reads `n`.
#[allow(clippy::cast_possible_truncation)]
pub(crate) fn choices(body: &Map<String, Value>) -> Result<usize, Failure> {
    match body.get("n").filter(|n| !n.is_null()) {
        None => Ok(1),
        Some(n) => match n.as_u64() {
            Some(n @ 1..=MAX_CHOICES) => Ok(n as usize),
            _ => Err(invalid(format!("'n' must be between 1 and {MAX_CHOICES}."))),
        },
    }
}

/// Puts system messages where chat templates accept them.
///
/// Those before the first answer are joined into one at the front; a later one,
/// which templates would refuse or which would change the whole prefix, becomes a
/// user message in place.
pub(crate) fn normalise(messages: Vec<Message>) -> Vec<Message> {
    let mut system = String::new();
    let mut rest: Vec<Message> = Vec::with_capacity(messages.len());
    let mut answered = false;
    for mut message in messages {
        match message.role {
            Role::System if !answered => {
                if !system.is_empty() && !message.content.is_empty() {
                    system.push_str("\n\n");
                }
                system.push_str(&message.content);
            }
            Role::System => {
                message.role = Role::User;
                rest.push(message);
            }
            _ => {
                answered |= message.role == Role::Assistant;
                rest.push(message);
            }
        }
    }
    if !system.is_empty() {
        rest.insert(0, Message::text(Role::System, system));
    }
    rest
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use spotter_core::AdapterVersion;
    use spotter_core::chat::{Message, Role, ToolChoice};
    use spotter_core::generate::AdapterChoice;

    use super::{
        adapter_choice, call_id, chat_message, content_text, normalise, tool_choice, tools,
    };
    use crate::engine::Adapters;

    #[test]
    fn content_may_have_any_form() {
        assert_eq!(content_text(None), "");
        assert_eq!(content_text(Some(&json!(null))), "");
        assert_eq!(content_text(Some(&json!("a"))), "a");
        assert_eq!(
            content_text(Some(&json!([
                {"type": "text", "text": "a"},
                {"type": "input_text", "text": "b"},
                {"type": "image_url", "image_url": {"url": "data:"}},
            ]))),
            "a\nb\n[image]"
        );
    }

    #[test]
    fn arguments_become_compact_and_ids_alphanumeric() {
        let message = chat_message(
            &json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_mock-1", "type": "function",
             "function": {"name": "exec", "arguments": "{\"command\": \"x\"}"}}]}),
        )
        .expect("a message");
        assert_eq!(message.tool_calls[0].arguments, r#"{"command":"x"}"#);
        assert_eq!(message.tool_calls[0].id, "callmock1");
        assert_eq!(call_id(&"a_".repeat(100)).len(), 40);
    }

    #[test]
    fn tools_are_read_in_three_forms() {
        let read = tools(Some(&json!([
            {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}, "strict": true}},
            {"type": "function", "name": "b", "parameters": {"type": "object"}},
            {"name": "c", "input_schema": {"type": "object"}, "defer_loading": true},
            {"type": "web_search"},
        ])));
        let names: Vec<_> = read.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(
            tool_choice(Some(&json!({"type": "tool", "name": "a"}))),
            ToolChoice::Named("a".into())
        );
        assert_eq!(
            tool_choice(Some(&json!({"type": "any"}))),
            ToolChoice::Required
        );
    }

    #[test]
    fn model_names_choose_an_adapter() {
        let adapters = Adapters {
            live: AdapterVersion(2),
            loaded: vec![AdapterVersion(1), AdapterVersion(2)],
        };
        for name in ["spotter", "gpt-x", "org/model", "gw/spotter", "qwen:7b"] {
            assert_eq!(
                adapter_choice(name, &adapters),
                Ok(AdapterChoice::Current),
                "{name}"
            );
        }
        assert_eq!(
            adapter_choice("gw/spotter:v1", &adapters),
            Ok(AdapterChoice::Version(AdapterVersion(1)))
        );
        assert_eq!(
            adapter_choice("spotter:base", &adapters),
            Ok(AdapterChoice::Version(AdapterVersion::BASE))
        );
        assert!(adapter_choice("spotter:v9", &adapters).is_err());
    }

    #[test]
    fn system_messages_are_joined_at_the_front() {
        let messages = normalise(vec![
            Message::text(Role::User, "u"),
            Message::text(Role::System, "s"),
            Message::text(Role::Assistant, "a"),
            Message::text(Role::System, "late"),
        ]);
        let roles: Vec<_> = messages.iter().map(|m| m.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
    }
}
