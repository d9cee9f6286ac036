//! Connecting clients: what each one needs to be told, and the edit of OpenClaw's
//! configuration file, which keeps comments and everything that is not Spotter's.

use serde_json::{Map, Value, json};
use spotter_core::Code;
use spotter_core::code::Failure;
use spotter_gateway::control::dto::ConnectGuide;

/// The clients that [`guide`] knows.
pub const CLIENTS: &[&str] = &[
    "openclaw",
    "claude-code",
    "nanobot",
    "openai",
    "anthropic",
    "ollama",
];

/// The model that OpenClaw is told to use: provider and model name.
const OPENCLAW_MODEL: &str = "spotter/spotter";
/// Below this OpenClaw cuts its answers short (its own prompt takes about 14,000 tokens).
const OPENCLAW_WINDOW: u32 = 32_768;

/// How to connect a client: the configuration and the commands or lines that do it.
/// `base_url` has no path; `token` is empty where none is needed. `None` for an unknown
/// client.
pub fn guide(
    client: &str,
    base_url: &str,
    token: &str,
    context_length: u32,
) -> Option<ConnectGuide> {
    let base = base_url.trim_end_matches('/');
    // Clients refuse an empty key even where the server asks for none.
    let key = if token.is_empty() { "none" } else { token };
    let openai = format!("{base}/v1");
    let (snippet, commands) = match client {
        "openclaw" => {
            let mut commands = vec!["spotter connect openclaw".to_owned()];
            if context_length < OPENCLAW_WINDOW {
                commands.push(format!(
                    "# This model reads {context_length} tokens; OpenClaw needs about {OPENCLAW_WINDOW}."
                ));
            }
            (
                json!({
                    "models": {
                        "mode": "merge",
                        "providers": {"spotter": openclaw_provider(base, key, context_length)},
                    },
                    "agents": {"defaults": {"model": {"primary": OPENCLAW_MODEL}}},
                }),
                commands,
            )
        }
        "claude-code" => {
            let environment = [
                ("ANTHROPIC_BASE_URL", base),
                ("ANTHROPIC_AUTH_TOKEN", key),
                ("ANTHROPIC_MODEL", "spotter"),
                // A line that changes with every conversation would defeat the prefix cache.
                ("CLAUDE_CODE_ATTRIBUTION_HEADER", "0"),
            ];
            (
                json!({"env": object(&environment)}),
                exports(&environment, "claude"),
            )
        }
        "nanobot" => (
            json!({
                "agents": {"defaults": {"model": "spotter", "provider": "custom"}},
                "providers": {"custom": {"apiKey": key, "apiBase": openai}},
            }),
            vec![
                "# Merge the lines above into ~/.nanobot/config.json, then:".to_owned(),
                "nanobot agent".to_owned(),
            ],
        ),
        "openai" => {
            let environment = [
                ("OPENAI_BASE_URL", openai.as_str()),
                ("OPENAI_API_KEY", key),
            ];
            (
                json!({"base_url": openai, "api_key": key, "model": "spotter"}),
                exports(&environment, ""),
            )
        }
        "anthropic" => {
            let environment = [("ANTHROPIC_BASE_URL", base), ("ANTHROPIC_API_KEY", key)];
            (
                json!({"base_url": base, "api_key": key, "model": "spotter"}),
                exports(&environment, ""),
            )
        }
        "ollama" => (
            json!({"host": base, "model": "spotter", "headers": {"authorization": format!("Bearer {key}")}}),
            exports(&[("OLLAMA_HOST", base), ("OLLAMA_API_KEY", key)], ""),
        ),
        _ => return None,
    };
    Some(ConnectGuide { snippet, commands })
}

fn object(pairs: &[(&str, &str)]) -> Value {
    let map: Map<_, _> = pairs
        .iter()
        .map(|&(key, value)| (key.to_owned(), json!(value)))
        .collect();
    Value::Object(map)
}

fn exports(pairs: &[(&str, &str)], last: &str) -> Vec<String> {
    let lines = pairs
        .iter()
        .map(|(key, value)| format!("export {key}={value}"));
    let last = (!last.is_empty()).then(|| last.to_owned());
    lines.chain(last).collect()
}

fn openclaw_provider(base: &str, key: &str, context_length: u32) -> Value {
    json!({
        "baseUrl": format!("{base}/v1"),
        "apiKey": key,
        "api": "openai-completions",
        "timeoutSeconds": 600,
        "headers": {"x-gateway-client": "openclaw"},
        "models": [{
            "id": "spotter",
            "name": "Spotter",
            "input": ["text"],
            "contextWindow": context_length,
            "maxTokens": (context_length / 4).clamp(256, 8192),
            "compat": {"supportsPromptCacheKey": true, "maxTokensField": "max_tokens"},
        }],
    })
}

/// OpenClaw's configuration with Spotter as a provider and as the primary model; nothing
/// else changes. An absent or empty file is `""`.
pub fn openclaw_connect(
    text: &str,
    base_url: &str,
    token: &str,
    context_length: u32,
) -> Result<String, Failure> {
    let key = if token.is_empty() { "none" } else { token };
    let provider = openclaw_provider(base_url.trim_end_matches('/'), key, context_length);
    with_provider(text, &provider)
}

fn with_provider(text: &str, provider: &Value) -> Result<String, Failure> {
    let mut text = if text.trim().is_empty() {
        "{}\n".to_owned()
    } else {
        text.to_owned()
    };
    if find(&text, &["models", "mode"])?.is_none() {
        text = set(&text, &["models", "mode"], &json!("merge"))?;
    }
    text = set(&text, &["models", "providers", "spotter"], provider)?;
    // Where models are listed, OpenClaw refuses those that are not.
    let listed = find(&text, &["agents", "defaults", "models"])?;
    if let Some(Node {
        kind: Kind::Object(members),
        ..
    }) = listed
        && !members.is_empty()
        && !members.iter().any(|member| member.key == OPENCLAW_MODEL)
    {
        let path = ["agents", "defaults", "models", OPENCLAW_MODEL];
        text = set(&text, &path, &json!({}))?;
    }
    let primary = primary_path(&text)?;
    set(&text, primary, &json!(OPENCLAW_MODEL))
}

/// The primary model is either the text `model` or `primary` inside the object `model`.
fn primary_path(text: &str) -> Result<&'static [&'static str], Failure> {
    let model = find(text, &["agents", "defaults", "model"])?;
    Ok(match model.map(|node| node.kind) {
        Some(Kind::Other) => &["agents", "defaults", "model"],
        _ => &["agents", "defaults", "model", "primary"],
    })
}

/// Takes Spotter out again. `before` is the file as it was before connecting, if it is
/// still there: when nothing else has changed since, it comes back byte for byte.
pub fn openclaw_disconnect(text: &str, before: Option<&str>) -> Result<String, Failure> {
    if text.trim().is_empty() {
        return Ok(text.to_owned());
    }
    let path = ["models", "providers", "spotter"];
    let Some(provider) = find(text, &path)? else {
        return Ok(text.to_owned());
    };
    if let Some(before) = before
        && let Ok(value) = serde_json::from_str::<Value>(&text[provider.start..provider.end])
        && with_provider(before, &value).is_ok_and(|after| after == text)
    {
        return Ok(before.to_owned());
    }
    let mut text = remove(text, &path)?;
    let listed = ["agents", "defaults", "models", OPENCLAW_MODEL];
    let was_listed = before
        .and_then(|before| find(before, &listed).ok())
        .is_some_and(|node| node.is_some());
    if !was_listed {
        text = remove(&text, &listed)?;
    }
    let primary = primary_path(&text)?;
    let current = find(&text, primary)?.map(|node| text[node.start..node.end].to_owned());
    let is_ours = current.is_some_and(|value| value.trim_matches(['"', '\'']) == OPENCLAW_MODEL);
    if is_ours {
        let earlier = before.and_then(|before| {
            let node = find(before, primary_path(before).ok()?).ok()??;
            Some(before[node.start..node.end].to_owned())
        });
        text = match earlier {
            Some(earlier) => set_raw(&text, primary, &earlier)?,
            None => remove(&text, primary)?,
        };
    }
    Ok(text)
}

/// A value of a JSON5 text, by the bytes it spans.
#[derive(Clone, Debug)]
struct Node {
    start: usize,
    end: usize,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Object(Vec<Member>),
    Other,
}

#[derive(Clone, Debug)]
struct Member {
    key: String,
    start: usize,
    value: Node,
    /// Where the comma after the value ends, if there is one.
    comma: Option<usize>,
}

const DEPTH: usize = 64;

/// Reads JSON5: comments, single quotes, bare keys and trailing commas are allowed.
struct Scanner<'a> {
    text: &'a str,
    at: usize,
}

impl Scanner<'_> {
    fn document(text: &str) -> Result<Node, Failure> {
        let mut scanner = Scanner { text, at: 0 };
        if text.starts_with('\u{feff}') {
            scanner.at = 3;
        }
        let root = scanner.value(0)?;
        scanner.space()?;
        if scanner.at < text.len() {
            return Err(scanner.wrong("the end"));
        }
        match root.kind {
            Kind::Object(_) => Ok(root),
            Kind::Other => Err(wrong_at(text, root.start, "an object")),
        }
    }

    fn wrong(&self, expected: &str) -> Failure {
        wrong_at(self.text, self.at, expected)
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn take(&mut self, token: char) -> bool {
        let found = self.peek() == Some(token);
        if found {
            self.at += token.len_utf8();
        }
        found
    }

    fn space(&mut self) -> Result<(), Failure> {
        loop {
            let rest = &self.text[self.at..];
            let trimmed = rest.trim_start();
            self.at += rest.len() - trimmed.len();
            if trimmed.starts_with("//") {
                self.at += trimmed.find('\n').unwrap_or(trimmed.len());
            } else if trimmed.starts_with("/*") {
                match trimmed.find("*/") {
                    Some(end) => self.at += end + 2,
                    None => return Err(self.wrong("the end of a comment")),
                }
            } else {
                return Ok(());
            }
        }
    }

    fn value(&mut self, depth: usize) -> Result<Node, Failure> {
        self.space()?;
        if depth > DEPTH {
            return Err(self.wrong("fewer levels"));
        }
        let start = self.at;
        let kind = match self.peek() {
            Some('{') => Kind::Object(self.members(depth)?),
            Some('[') => {
                self.at += 1;
                loop {
                    self.space()?;
                    if self.take(']') {
                        break;
                    }
                    self.value(depth + 1)?;
                    self.space()?;
                    if !self.take(',') && self.peek() != Some(']') {
                        return Err(self.wrong("a comma or ]"));
                    }
                }
                Kind::Other
            }
            Some(quote @ ('"' | '\'')) => {
                self.quoted(quote)?;
                Kind::Other
            }
            _ => {
                self.bare("a value")?;
                Kind::Other
            }
        };
        Ok(Node {
            start,
            end: self.at,
            kind,
        })
    }

    fn members(&mut self, depth: usize) -> Result<Vec<Member>, Failure> {
        self.at += 1;
        let mut members = Vec::new();
        loop {
            self.space()?;
            if self.take('}') {
                return Ok(members);
            }
            let start = self.at;
            let key = match self.peek() {
                Some(quote @ ('"' | '\'')) => self.quoted(quote)?,
                _ => self.bare("a key")?,
            };
            self.space()?;
            if !self.take(':') {
                return Err(self.wrong("a colon"));
            }
            let value = self.value(depth + 1)?;
            self.space()?;
            let comma = self.take(',').then_some(self.at);
            if comma.is_none() && self.peek() != Some('}') {
                return Err(self.wrong("a comma or }"));
            }
            members.push(Member {
                key,
                start,
                value,
                comma,
            });
        }
    }

    fn quoted(&mut self, quote: char) -> Result<String, Failure> {
        self.at += 1;
        let start = self.at;
        let mut escaped = false;
        for (offset, character) in self.text[start..].char_indices() {
            if escaped {
                escaped = false;
            } else if character == '\\' {
                escaped = true;
            } else if character == quote {
                self.at = start + offset + 1;
                let raw = &self.text[start..start + offset];
                let plain = serde_json::from_str(&format!("\"{raw}\""));
                return Ok(plain.unwrap_or_else(|_| raw.to_owned()));
            }
        }
        Err(self.wrong("the end of a text"))
    }

    fn bare(&mut self, expected: &str) -> Result<String, Failure> {
        let rest = &self.text[self.at..];
        let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '$' | '+' | '-' | '.');
        let length = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        if length == 0 {
            return Err(self.wrong(expected));
        }
        self.at += length;
        Ok(rest[..length].to_owned())
    }
}

fn wrong_at(text: &str, at: usize, expected: &str) -> Failure {
    let line = text[..at].matches('\n').count() + 1;
    Failure::new(
        Code::InvalidRequest,
        format!("the configuration is not readable in line {line}: {expected} was expected there"),
    )
}

/// The value at a path; `None` where a key is absent, an error where a value on the way
/// is no object.
fn find(text: &str, path: &[&str]) -> Result<Option<Node>, Failure> {
    let mut node = Scanner::document(text)?;
    for key in path {
        let Kind::Object(members) = node.kind else {
            return Err(wrong_at(text, node.start, "an object"));
        };
        // The last of several equal keys counts, as in JSON.parse.
        match members.into_iter().rev().find(|member| member.key == *key) {
            Some(member) => node = member.value,
            None => return Ok(None),
        }
    }
    Ok(Some(node))
}

fn set(text: &str, path: &[&str], value: &Value) -> Result<String, Failure> {
    set_raw(
        text,
        path,
        &serde_json::to_string_pretty(value).unwrap_or_default(),
    )
}

/// Puts a value at a path, replacing what is there or adding the missing keys.
fn set_raw(text: &str, path: &[&str], raw: &str) -> Result<String, Failure> {
    if let Some(node) = find(text, path)? {
        let raw = indented(raw, &indent_at(text, node.start));
        return Ok(format!("{}{raw}{}", &text[..node.start], &text[node.end..]));
    }
    // The deepest object that is there takes the rest of the path as one new member.
    let mut present = path.len() - 1;
    let (object, members) = loop {
        match find(text, &path[..present])? {
            Some(Node {
                start,
                end,
                kind: Kind::Object(members),
            }) => break ((start, end), members),
            Some(node) => return Err(wrong_at(text, node.start, "an object")),
            None => present -= 1,
        }
    };
    let mut member = raw.to_owned();
    for key in path[present..].iter().rev() {
        let inner = format!("{}: {member}", json!(key));
        member = inner;
        if *key != path[present] {
            member = format!("{{\n  {}\n}}", indented(&member, "  "));
        }
    }
    let outer = indent_at(text, object.0);
    let unit = match members.first() {
        Some(first) if indent_at(text, first.start).contains('\t') => "\t",
        _ => "  ",
    };
    let inner = format!("{outer}{unit}");
    let close = object.1 - 1;
    let content_end = text[..close].trim_end().len();
    let mut out = text[..content_end].to_owned();
    if let Some(last) = members.last()
        && last.comma.is_none()
    {
        out.insert(last.value.end, ',');
    }
    out.push('\n');
    out.push_str(&inner);
    out.push_str(&indented(&member, &inner));
    let gap = &text[content_end..close];
    if gap.contains('\n') {
        out.push_str(gap);
    } else {
        out.push('\n');
        out.push_str(&outer);
    }
    out.push_str(&text[close..]);
    Ok(out)
}

/// Removes the member at a path, if it is there.
fn remove(text: &str, path: &[&str]) -> Result<String, Failure> {
    let Some((key, parents)) = path.split_last() else {
        return Ok(text.to_owned());
    };
    let Some(Node {
        kind: Kind::Object(members),
        ..
    }) = find(text, parents)?
    else {
        return Ok(text.to_owned());
    };
    let Some(index) = members.iter().rposition(|member| member.key == *key) else {
        return Ok(text.to_owned());
    };
    let member = &members[index];
    let (start, end) = match (member.comma, index.checked_sub(1)) {
        (Some(comma), _) => (member.start, comma),
        // The last member: the comma before it goes instead.
        (None, Some(before)) => {
            let previous = &members[before];
            let comma = previous.comma.unwrap_or(previous.value.end);
            let mut out = text[..previous.value.end].to_owned();
            // What lies between is the comma and perhaps a comment, which stays.
            out.push_str(text[previous.value.end..comma].trim_end_matches(','));
            out.push_str(text[comma..member.start].trim_end());
            out.push_str(&text[member.value.end..]);
            return Ok(out);
        }
        (None, None) => (member.start, member.value.end),
    };
    let head = text[..start].trim_end_matches([' ', '\t']);
    let head = head.strip_suffix('\n').unwrap_or(&text[..start]);
    Ok(format!("{head}{}", &text[end..]))
}

/// The white space at the start of the line that holds this position.
fn indent_at(text: &str, at: usize) -> String {
    let line = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    text[line..at]
        .chars()
        .take_while(|c| matches!(c, ' ' | '\t'))
        .collect()
}

/// Every line but the first, moved right.
fn indented(text: &str, indent: &str) -> String {
    text.replace('\n', &format!("\n{indent}"))
}

/// The lines that differ, `-` before and `+` after, with what is between left out.
pub fn diff(before: &str, after: &str) -> String {
    let (old, new): (Vec<_>, Vec<_>) = (before.lines().collect(), after.lines().collect());
    // Longest common subsequence; configuration files are small.
    let mut table = vec![vec![0_u32; new.len() + 1]; old.len() + 1];
    for i in (0..old.len()).rev() {
        for j in (0..new.len()).rev() {
            table[i][j] = if old[i] == new[j] {
                table[i + 1][j + 1] + 1
            } else {
                table[i + 1][j].max(table[i][j + 1])
            };
        }
    }
    let (mut i, mut j, mut out) = (0, 0, String::new());
    while i < old.len() || j < new.len() {
        if i < old.len() && j < new.len() && old[i] == new[j] {
            (i, j) = (i + 1, j + 1);
        } else if i < old.len() && (j == new.len() || table[i + 1][j] >= table[i][j + 1]) {
            out.push_str(&format!("-{}\n", old[i]));
            i += 1;
        } else {
            out.push_str(&format!("+{}\n", new[j]));
            j += 1;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const URL: &str = "http://127.0.0.1:8100";

    const CONFIG: &str = r#"// my agent
{
  agents: {
    defaults: {
      model: { primary: 'cloud/big', fallbacks: ["cloud/small"] }, // the good one
      sandbox: { mode: "all" }, /* never touch */
    },
  },
  "models": {
    "providers": {
      "cloud": {"baseUrl": "https://cloud.example/v1", "apiKey": "k"} // mine
    }
  },
  channels: { telegram: { enabled: true } },
}
"#;

    /// The JSON value of a JSON5 text, by the scanner under test's own spans.
    fn at(text: &str, path: &[&str]) -> Option<String> {
        find(text, path)
            .unwrap()
            .map(|node| text[node.start..node.end].to_owned())
    }

    #[test]
    fn connecting_adds_the_provider_and_keeps_everything_else() {
        let after = openclaw_connect(CONFIG, URL, "secret", 8192).unwrap();
        let provider = at(&after, &["models", "providers", "spotter"]).unwrap();
        let provider: Value = serde_json::from_str(&provider).unwrap();
        assert_eq!(provider["baseUrl"], "http://127.0.0.1:8100/v1");
        assert_eq!(provider["apiKey"], "secret");
        assert_eq!(provider["timeoutSeconds"], 600);
        assert_eq!(provider["models"][0]["contextWindow"], 8192);
        assert_eq!(provider["models"][0]["maxTokens"], 2048);
        assert_eq!(
            provider["models"][0]["compat"]["supportsPromptCacheKey"],
            true
        );
        let primary = ["agents", "defaults", "model", "primary"];
        assert_eq!(at(&after, &primary).unwrap(), "\"spotter/spotter\"");
        // Every line of the old file is still there, but the one with the primary model
        // and the one that got a comma.
        for line in CONFIG.lines() {
            let changed = line.contains("primary:") || line.contains("// mine");
            assert!(changed || after.contains(line), "lost: {line}\n{after}");
        }
        for kept in [
            "// the good one",
            "// mine",
            "/* never touch */",
            "cloud/small",
        ] {
            assert!(after.contains(kept), "lost: {kept}");
        }
        let again = openclaw_connect(&after, URL, "secret", 8192).unwrap();
        assert_eq!(again, after, "connecting twice changes nothing");
    }

    #[test]
    fn undoing_gives_the_file_back_byte_for_byte() {
        for before in [
            CONFIG,
            "",
            "{}",
            "{\n}\n",
            "{\"agents\":{\"defaults\":{\"model\":\"a/b\"}}}",
        ] {
            let after = openclaw_connect(before, URL, "secret", 65536).unwrap();
            assert_ne!(after, before);
            assert_eq!(openclaw_disconnect(&after, Some(before)).unwrap(), before);
        }
    }

    #[test]
    fn undoing_keeps_what_was_changed_since() {
        let after = openclaw_connect(CONFIG, URL, "secret", 8192).unwrap();
        let edited = after.replace("enabled: true", "enabled: false");
        for before in [Some(CONFIG), None] {
            let undone = openclaw_disconnect(&edited, before).unwrap();
            assert!(undone.contains("enabled: false"));
            assert_eq!(at(&undone, &["models", "providers", "spotter"]), None);
            let primary = at(&undone, &["agents", "defaults", "model", "primary"]);
            assert_eq!(primary.as_deref(), before.map(|_| "'cloud/big'"));
            let cloud = at(&undone, &["models", "providers", "cloud", "apiKey"]);
            assert_eq!(cloud.as_deref(), Some("\"k\""));
            assert!(undone.contains("// mine") && undone.contains("// the good one"));
        }
        // A model chosen since stays chosen.
        let chosen = edited.replace("\"spotter/spotter\"", "\"other/model\"");
        let undone = openclaw_disconnect(&chosen, Some(CONFIG)).unwrap();
        let primary = at(&undone, &["agents", "defaults", "model", "primary"]);
        assert_eq!(primary.as_deref(), Some("\"other/model\""));
    }

    #[test]
    fn a_list_of_allowed_models_gets_the_new_one() {
        let before = "{agents: {defaults: {models: {'cloud/big': {alias: 'b'}}}}}";
        let after = openclaw_connect(before, URL, "", 8192).unwrap();
        let listed = at(&after, &["agents", "defaults", "models", "spotter/spotter"]);
        assert_eq!(listed.as_deref(), Some("{}"));
        assert_eq!(openclaw_disconnect(&after, Some(before)).unwrap(), before);
        let edited = format!("{after}\n// later");
        let undone = openclaw_disconnect(&edited, Some(before)).unwrap();
        let listed = at(
            &undone,
            &["agents", "defaults", "models", "spotter/spotter"],
        );
        assert_eq!(listed, None, "{undone}");
        assert!(at(&undone, &["agents", "defaults", "models", "cloud/big"]).is_some());
    }

    #[test]
    fn a_new_file_is_plain_json() {
        let fresh = openclaw_connect("", URL, "", 32768).unwrap();
        let value: Value = serde_json::from_str(&fresh).unwrap();
        assert_eq!(value["models"]["mode"], "merge");
        assert_eq!(value["models"]["providers"]["spotter"]["apiKey"], "none");
        assert_eq!(
            value["agents"]["defaults"]["model"]["primary"],
            OPENCLAW_MODEL
        );
        let snippet = guide("openclaw", URL, "", 32768).unwrap().snippet;
        assert_eq!(snippet, value, "the guide shows what the command writes");
    }

    #[test]
    fn a_file_that_makes_no_sense_is_left_alone() {
        for (text, line) in [
            ("{", "line 1"),
            ("[]", "line 1"),
            ("{\n\"a\" 1}", "line 2"),
            ("{\"models\": 3}", "line 1"),
            ("{\n\n/* open", "line 3"),
            ("{} {}", "line 1"),
            ("{a: 'open}", "line 1"),
        ] {
            let failure = openclaw_connect(text, URL, "", 1).unwrap_err();
            assert!(
                failure.message.contains(line),
                "{text}: {}",
                failure.message
            );
        }
        let deep = "[".repeat(100_000);
        assert!(openclaw_connect(&format!("{{a: {deep}"), URL, "", 1).is_err());
    }

    #[test]
    fn every_client_is_told_address_and_token() {
        for client in CLIENTS {
            let guide = guide(client, URL, "secret", 4096).unwrap();
            let text = format!("{} {:?}", guide.snippet, guide.commands);
            assert!(
                text.contains(URL) && text.contains("secret"),
                "{client}: {text}"
            );
        }
        assert!(guide("telnet", URL, "", 1).is_none());
        let small = guide("openclaw", URL, "", 8192).unwrap();
        assert!(small.commands[1].contains("8192"));
    }

    #[test]
    fn the_diff_shows_changed_lines_only() {
        assert_eq!(diff("a\nb\nc\n", "a\nx\nc\nd\n"), "-b\n+x\n+d\n");
        assert_eq!(diff("a\n", "a\n"), "");
    }
}
