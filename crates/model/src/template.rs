//! Chat templates: the model's own Jinja, with what Python templates take for granted.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::Serialize;
use serde_json::{Map, Value as Json, json};
use spotter_core::chat::{Message, Role, Tool};

use crate::error::{ModelError, Result};
use crate::tokenizer::Tokenizer;

/// Used when a model brings no template: ChatML, which most small models know.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// Instructions a template may execute for one prompt.
const FUEL: u64 = 20_000_000;
/// Largest template source in bytes.
const MAX_SOURCE: usize = 1 << 20;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    knows_tools: bool,
}

impl ChatTemplate {
    /// Compiles a template; `None` takes ChatML.
    ///
    /// # Errors
    /// When the source is too large or not valid Jinja.
    pub fn new(source: Option<&str>, tokenizer: &Tokenizer) -> Result<Self> {
        let source = source.unwrap_or(CHATML).to_owned();
        if source.len() > MAX_SOURCE {
            return Err(ModelError::Template(format!(
                "it is larger than {MAX_SOURCE} bytes"
            )));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|e| ModelError::Template(e.to_string()))?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<Value, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned("chat", source.clone())
            .map_err(|e| ModelError::Template(e.to_string()))?;
        let knows_tools = source.contains("tools") && source.contains("tool_call");
        Ok(Self {
            environment,
            source,
            bos: tokenizer.bos_text(),
            knows_tools,
        })
    }

    /// The Jinja source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template renders tools by itself.
    pub fn knows_tools(&self) -> bool {
        self.knows_tools
    }

    /// The prompt's text. Neighbouring messages of one role are merged first.
    ///
    /// # Errors
    /// When the template fails or refuses the conversation.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[Tool],
        variables: &Map<String, Json>,
    ) -> Result<String> {
        let mut merged = merge(messages);
        if !self.knows_tools {
            fold_tools(&mut merged, tools);
        }
        let messages: Vec<Json> = merged.iter().map(message_json).collect();
        let tools: Option<Vec<Json>> = (self.knows_tools && !tools.is_empty()).then(|| {
            tools
                .iter()
                .map(|t| json!({"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}))
                .collect()
        });
        let failed = |e: Error| ModelError::Template(format!("{e:#}"));
        let template = self.environment.get_template("chat").map_err(failed)?;
        let base = context! {
            messages => messages.iter().map(jinja).collect::<Vec<_>>(),
            tools => tools.map(|t| t.iter().map(jinja).collect::<Vec<_>>()),
            add_generation_prompt => true,
            bos_token => self.bos.clone(),
            eos_token => "",
        };
        let extra = Value::from_pairs(variables.iter().map(|(k, v)| (k.clone(), jinja(v))));
        template
            .render(context! { ..extra, ..base })
            .map_err(failed)
    }

    /// The prompt's token ids. An assistant message that carries `token_ids` contributes
    /// exactly those; everything around it is tokenised in the pieces between them.
    ///
    /// # Errors
    /// When the template or the tokeniser fails.
    pub fn prompt_ids(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        tools: &[Tool],
        variables: &Map<String, Json>,
    ) -> Result<Vec<u32>> {
        let mut marked = messages.to_vec();
        let mut recorded = Vec::new();
        for (i, message) in marked.iter_mut().enumerate() {
            let alone = |j: Option<usize>| {
                j.and_then(|j| messages.get(j))
                    .is_none_or(|m| m.role != Role::Assistant)
            };
            if message.role == Role::Assistant
                && alone(i.checked_sub(1))
                && alone(Some(i + 1))
                && let Some(ids) = message.token_ids.take().filter(|ids| !ids.is_empty())
            {
                message.content = sentinel(recorded.len());
                message.reasoning = None;
                message.tool_calls.clear();
                recorded.push(ids);
            }
        }
        let text = self.render(&marked, tools, variables)?;
        let mut ids: Vec<u32> = tokenizer.bos().into_iter().collect();
        let mut rest = text.as_str();
        for (i, answer) in recorded.iter().enumerate() {
            let mark = sentinel(i);
            let Some((before, after)) = rest.split_once(&mark) else {
                // The template rewrote or dropped the message: its text decides.
                let text = self.render(messages, tools, variables)?;
                let mut ids: Vec<u32> = tokenizer.bos().into_iter().collect();
                ids.extend(without_double_bos(tokenizer, tokenizer.encode(&text)?));
                return Ok(ids);
            };
            ids.extend(tokenizer.encode(before)?);
            ids.extend(answer);
            rest = after;
            if let Some(last) = answer
                .last()
                .filter(|id| tokenizer.end_of_turn().contains(id))
            {
                let end = String::from_utf8_lossy(tokenizer.token_bytes(*last)).into_owned();
                rest = rest.strip_prefix(end.as_str()).unwrap_or(rest);
            }
        }
        ids.extend(tokenizer.encode(rest)?);
        Ok(without_double_bos(tokenizer, ids))
    }
}

fn without_double_bos(tokenizer: &Tokenizer, mut ids: Vec<u32>) -> Vec<u32> {
    if let Some(bos) = tokenizer.bos()
        && ids.len() > 1
        && ids[0] == bos
        && ids[1] == bos
    {
        ids.remove(0);
    }
    ids
}

/// Stands for the content of a recorded answer; private-use characters, so that no
/// client's text contains it by accident.
fn sentinel(i: usize) -> String {
    format!("\u{F8FF}\u{E000}{i}\u{E001}")
}

/// Joins neighbouring messages of one role, as alternating templates require.
fn merge(messages: &[Message]) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        match out.last_mut() {
            Some(last) if last.role == message.role && message.role != Role::Tool => {
                if !last.content.is_empty() && !message.content.is_empty() {
                    last.content.push_str("\n\n");
                }
                last.content.push_str(&message.content);
                last.tool_calls.extend(message.tool_calls.iter().cloned());
            }
            _ => out.push(message.clone()),
        }
    }
    // System messages belong first; one from the middle joins them.
    if let Some(later) = out.iter().skip(1).position(|m| m.role == Role::System) {
        let mut system = String::new();
        let mut at = later + 1;
        if out[0].role == Role::System {
            system = out.remove(0).content;
            at -= 1;
        }
        while at < out.len() {
            if out[at].role == Role::System {
                let moved = out.remove(at);
                if !system.is_empty() {
                    system.push_str("\n\n");
                }
                system.push_str(&moved.content);
            } else {
                at += 1;
            }
        }
        out.insert(0, Message::text(Role::System, system));
        return merge(&out);
    }
    out
}

/// Puts tools, calls and results into plain messages, in the Hermes form, for
/// templates that know none of them.
fn fold_tools(messages: &mut Vec<Message>, tools: &[Tool]) {
    for message in messages.iter_mut() {
        match message.role {
            Role::Assistant => {
                for call in std::mem::take(&mut message.tool_calls) {
                    let arguments: Json = serde_json::from_str(&call.arguments)
                        .unwrap_or(Json::String(call.arguments));
                    let call = json!({"name": call.name, "arguments": arguments});
                    if !message.content.is_empty() {
                        message.content.push('\n');
                    }
                    message
                        .content
                        .push_str(&format!("<tool_call>\n{call}\n</tool_call>"));
                }
            }
            Role::Tool => {
                message.role = Role::User;
                message.content = format!("<tool_response>\n{}\n</tool_response>", message.content);
            }
            Role::System | Role::User => {}
        }
    }
    if !tools.is_empty() {
        let mut text = String::from(
            "You may call one or more functions to assist with the user query.\n\nThe functions, one JSON object per line, inside <tools></tools>:\n<tools>\n",
        );
        for t in tools {
            let tool =
                json!({"name": t.name, "description": t.description, "parameters": t.parameters});
            text.push_str(&format!("{tool}\n"));
        }
        text.push_str(
            "</tools>\n\nTo call one, answer with a JSON object inside <tool_call></tool_call>:\n<tool_call>\n{\"name\": <function>, \"arguments\": <arguments object>}\n</tool_call>",
        );
        match messages.first_mut() {
            Some(first) if first.role == Role::System => {
                first.content.push_str("\n\n");
                first.content.push_str(&text);
            }
            _ => messages.insert(0, Message::text(Role::System, text)),
        }
    }
    *messages = merge(messages);
}

/// JSON as a template value.
fn jinja(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(v) => Value::from(*v),
        Json::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(v), _, _) => Value::from(v),
            (_, Some(v), _) => Value::from(v),
            (_, _, v) => Value::from(v.unwrap_or(f64::NAN)),
        },
        Json::String(v) => Value::from(v.as_str()),
        Json::Array(v) => Value::from(v.iter().map(jinja).collect::<Vec<_>>()),
        Json::Object(v) => Value::from_pairs(v.iter().map(|(k, v)| (k.clone(), jinja(v)))),
    }
}

fn message_json(message: &Message) -> Json {
    let mut out = json!({"role": message.role.as_str(), "content": message.content});
    if let Some(reasoning) = &message.reasoning {
        out["reasoning_content"] = json!(reasoning);
    }
    if !message.tool_calls.is_empty() {
        out["tool_calls"] = message
            .tool_calls
            .iter()
            .map(|call| {
                let arguments: Json = serde_json::from_str(&call.arguments)
                    .unwrap_or_else(|_| Json::String(call.arguments.clone()));
                json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
            })
            .collect();
    }
    if let Some(id) = &message.tool_call_id {
        out["tool_call_id"] = json!(id);
    }
    if let Some(name) = &message.name {
        out["name"] = json!(name);
    }
    out
}

/// JSON as Python's `json.dumps(ensure_ascii=False)` writes it: a space after `,` and `:`.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
        w.write_all(b": ")
    }
}

fn tojson(value: Value, kwargs: Kwargs) -> std::result::Result<Value, Error> {
    let failed = |e: serde_json::Error| Error::new(ErrorKind::InvalidOperation, e.to_string());
    let indent: Option<usize> = kwargs.get("indent")?;
    let mut out = Vec::new();
    match indent {
        Some(n) => {
            let spaces = vec![b' '; n.min(16)];
            let formatter = serde_json::ser::PrettyFormatter::with_indent(&spaces);
            let mut serializer = serde_json::Serializer::with_formatter(&mut out, formatter);
            value.serialize(&mut serializer).map_err(failed)?;
        }
        None => {
            let mut serializer = serde_json::Serializer::with_formatter(&mut out, PythonFormatter);
            value.serialize(&mut serializer).map_err(failed)?;
        }
    }
    let text = String::from_utf8_lossy(&out).into_owned();
    Ok(Value::from_safe_string(text))
}

/// `strftime` of the current UTC date, for the fields that templates use.
fn strftime_now(format: String) -> String {
    let seconds = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    strftime(&format, seconds)
}

fn strftime(format: &str, seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = [
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
        "Monday",
        "Tuesday",
        "Wednesday",
    ];
    let days = seconds / 86_400;
    // Civil date from days (Hinnant, "chrono-compatible low-level date algorithms").
    let z = days as i64 + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + i64::from(month <= 2);
    let month_name = MONTHS[(month - 1) as usize];
    let day_name = DAYS[(days % 7) as usize];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{:02}", seconds / 3600 % 24)),
            Some('M') => out.push_str(&format!("{:02}", seconds / 60 % 60)),
            Some('S') => out.push_str(&format!("{:02}", seconds % 60)),
            Some('%') => out.push('%'),
            Some(other) => {
                out.push('%');
                out.push(other);
            }
            None => out.push('%'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use spotter_core::chat::{Message, Role, Tool};

    use super::{merge, strftime};

    #[test]
    fn neighbours_merge_and_system_messages_come_first() {
        let merged = merge(&[
            Message::text(Role::System, "a"),
            Message::text(Role::User, "b"),
            Message::text(Role::System, "c"),
            Message::text(Role::User, "d"),
            Message::text(Role::User, "e"),
        ]);
        let flat: Vec<(Role, &str)> = merged
            .iter()
            .map(|m| (m.role, m.content.as_str()))
            .collect();
        assert_eq!(
            flat,
            [(Role::System, "a\n\nc"), (Role::User, "b\n\nd\n\ne")]
        );
    }

    #[test]
    fn dates_are_civil() {
        assert_eq!(
            strftime("%d %b %Y, %A %H:%M", 1_796_115_600),
            "01 Dec 2026, Tuesday 09:00"
        );
        assert_eq!(strftime("%Y-%m-%d", 951_782_400), "2000-02-29");
    }

    #[test]
    fn tools_reach_templates_that_know_none() {
        let mut messages = vec![Message::text(Role::User, "hi")];
        let tool = Tool {
            name: "add".into(),
            description: "adds".into(),
            parameters: serde_json::json!({}),
        };
        super::fold_tools(&mut messages, &[tool]);
        assert_eq!(messages[0].role, Role::System);
        assert!(messages[0].content.contains("\"name\":\"add\""));
    }
}
