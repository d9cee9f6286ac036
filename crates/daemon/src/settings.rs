//! Settings: what can be set, what each means, and which value counts.
//!
//! A value comes from the command line, else from the environment
//! (`SPOTTER_` and the key in capitals), else from the database, else it is the default.
//! [`RawSettings`] is what the command line said; [`Settings`] is what counts, and knows
//! where each value came from.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use spotter_core::Code;
use spotter_core::code::Failure;
use spotter_core::train::Dial;
use spotter_gateway::control::dto;

/// Settings as the command line gave them; what was not given is `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)] // `SPECS` describes every field once, for people.
pub struct RawSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_auth: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads_serve: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads_train: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_length: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_mb: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_batch: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_queue: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule_from: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule_until: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_minutes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_floor: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_minimum: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dial: Option<Dial>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training_overrides: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recording: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retention_days: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retention_mb: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retention_steps: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub language: Option<String>,
}

/// Settings as they count.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[allow(missing_docs)] // `SPECS` describes every field once, for people.
pub struct Settings {
    pub host: String,
    pub port: u16,
    pub model: String,
    pub no_auth: bool,
    pub device: String,
    pub threads_serve: u32,
    pub threads_train: u32,
    pub context_length: u32,
    pub cache_mb: u32,
    pub max_batch: u32,
    pub max_queue: u32,
    pub schedule: Schedule,
    pub schedule_from: String,
    pub schedule_until: String,
    pub idle_minutes: u32,
    pub label_floor: u32,
    pub label_minimum: u32,
    pub dial: Dial,
    pub training_overrides: String,
    pub recording: bool,
    pub retention_days: u32,
    pub retention_mb: u32,
    pub retention_steps: u32,
    pub language: String,
    /// Every value with where it came from, by key.
    #[serde(skip)]
    pub origins: BTreeMap<&'static str, (Value, Source)>,
}

/// When training may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// As soon as there is enough to learn from.
    Always,
    /// Once no request came for `idle_minutes`.
    Idle,
    /// Between `schedule_from` and `schedule_until`.
    Schedule,
    /// Only when it is asked for.
    Manual,
}

impl Schedule {
    /// Its name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Idle => "idle",
            Self::Schedule => "schedule",
            Self::Manual => "manual",
        }
    }
}

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nobody set it.
    Default,
    /// The settings page or the control API.
    Database,
    /// An environment variable.
    Environment,
    /// An argument of `spotter serve`.
    CommandLine,
}

impl Source {
    /// Its name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Database => "database",
            Self::Environment => "environment",
            Self::CommandLine => "command line",
        }
    }
}

/// What values a setting takes.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Any text without control characters.
    Text,
    /// A whole number between two bounds.
    Number(u32, u32),
    /// On or off.
    Switch,
    /// One of these.
    Choice(&'static [&'static str]),
    /// A time of day, `HH:MM`.
    Time,
}

impl Kind {
    /// Its name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Number(..) => "number",
            Self::Switch => "switch",
            Self::Choice(_) => "choice",
            Self::Time => "time",
        }
    }

    /// A value of this kind out of plain text, as the environment has it.
    fn parse(self, text: &str) -> Option<Value> {
        match self {
            Self::Text | Self::Choice(_) | Self::Time => Some(json!(text)),
            Self::Number(..) => text.trim().parse::<u32>().ok().map(|n| json!(n)),
            Self::Switch => match text.trim().to_ascii_lowercase().as_str() {
                "1" | "true" | "yes" | "on" => Some(json!(true)),
                "0" | "false" | "no" | "off" => Some(json!(false)),
                _ => None,
            },
        }
    }

    /// Whether a value is of this kind; what is expected, if not.
    fn check(self, value: &Value) -> Result<(), String> {
        let good = match self {
            Self::Text => value
                .as_str()
                .is_some_and(|text| !text.chars().any(char::is_control)),
            Self::Number(least, most) => value
                .as_u64()
                .is_some_and(|n| (u64::from(least)..=u64::from(most)).contains(&n)),
            Self::Switch => value.is_boolean(),
            Self::Choice(choices) => value.as_str().is_some_and(|text| choices.contains(&text)),
            Self::Time => value.as_str().is_some_and(is_time),
        };
        if good {
            return Ok(());
        }
        Err(match self {
            Self::Text => "text on one line".to_owned(),
            Self::Number(least, most) => format!("a whole number from {least} to {most}"),
            Self::Switch => "true or false".to_owned(),
            Self::Choice(choices) => format!("one of {}", choices.join(", ")),
            Self::Time => "a time of day such as 23:30".to_owned(),
        })
    }
}

fn is_time(text: &str) -> bool {
    let number = |part: &str| match part.as_bytes() {
        [a, b] if a.is_ascii_digit() && b.is_ascii_digit() => part.parse::<u8>().ok(),
        _ => None,
    };
    text.split_once(':').is_some_and(|(hours, minutes)| {
        number(hours).is_some_and(|h| h < 24) && number(minutes).is_some_and(|m| m < 60)
    })
}

/// A default that a constant table can hold.
#[derive(Clone, Copy, Debug)]
enum Fallback {
    Text(&'static str),
    Number(u32),
    Switch(bool),
}

impl Fallback {
    fn value(self) -> Value {
        match self {
            Self::Text(text) => json!(text),
            Self::Number(number) => json!(number),
            Self::Switch(on) => json!(on),
        }
    }
}

/// One setting, described.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Its key.
    pub key: &'static str,
    /// Its name for people.
    pub title: &'static str,
    /// What it does.
    pub description: &'static str,
    /// What values it takes.
    pub kind: Kind,
    default: Fallback,
    /// Whether a change counts only after a restart.
    pub restart_required: bool,
}

const fn spec(
    key: &'static str,
    title: &'static str,
    kind: Kind,
    default: Fallback,
    restart_required: bool,
    description: &'static str,
) -> Spec {
    Spec {
        key,
        title,
        description,
        kind,
        default,
        restart_required,
    }
}

use Fallback as D;

/// Every setting there is, in the order in which people see them.
#[rustfmt::skip]
pub const SPECS: &[Spec] = &[
    spec("host", "Address", Kind::Text, D::Text("127.0.0.1"), true,
        "Where the gateway listens. 127.0.0.1 can be reached from this machine only."),
    spec("port", "Port", Kind::Number(0, 65535), D::Number(8100), true,
        "The gateway's port. 0 takes any free one."),
    spec("model", "Model", Kind::Text, D::Text("smollm2-135m-instruct"), true,
        "The base model: a name from the catalogue, a GGUF file or a folder. The Models page changes it without a restart."),
    spec("no_auth", "No token", Kind::Switch, D::Switch(false), true,
        "Answers requests without a token. Possible on this machine's own address only."),
    spec("device", "Device", Kind::Text, D::Text("auto"), true,
        "What computes: auto, cpu, cuda, or cuda and a number such as cuda:1."),
    spec("threads_serve", "Threads for answers", Kind::Number(0, 1024), D::Number(0), true,
        "Processor threads for answering. 0 uses every core."),
    spec("threads_train", "Threads for training", Kind::Number(0, 1024), D::Number(0), true,
        "Processor threads for training. 0 leaves one core free."),
    spec("context_length", "Context window", Kind::Number(0, 1_048_576), D::Number(0), true,
        "Most tokens of a prompt and its answer together. 0 uses the model's own limit."),
    spec("cache_mb", "Prompt memory", Kind::Number(0, 1_048_576), D::Number(0), true,
        "Megabytes for remembered prompts, so that a conversation's next turn starts fast. 0 chooses by free memory."),
    spec("max_batch", "Answers at once", Kind::Number(1, 256), D::Number(8), true,
        "How many requests are answered side by side."),
    spec("max_queue", "Waiting requests", Kind::Number(1, 4096), D::Number(64), true,
        "How many more may wait. Further ones are told to come back later."),
    spec("schedule", "When to train", Kind::Choice(&["always", "idle", "schedule", "manual"]), D::Text("idle"), false,
        "always: as soon as there is enough to learn from. idle: once no request came for a while. schedule: between two times of day. manual: only when you ask."),
    spec("schedule_from", "Train from", Kind::Time, D::Text("01:00"), false,
        "With the policy schedule: training may start from this local time on."),
    spec("schedule_until", "Train until", Kind::Time, D::Text("06:00"), false,
        "With the policy schedule: no training starts after this local time."),
    spec("idle_minutes", "Idle minutes", Kind::Number(0, 1440), D::Number(5), false,
        "With the policy idle: minutes without a request before training starts."),
    spec("label_floor", "Ratings before training", Kind::Number(1, 10_000), D::Number(16), false,
        "How many new rated answers start a lesson."),
    spec("label_minimum", "Fewest ratings", Kind::Number(1, 10_000), D::Number(8), false,
        "A lesson may start with this many when two of them are dislikes or one is a correction, and when you ask for it."),
    spec("dial", "How boldly to learn", Kind::Choice(&["gentle", "normal", "bold"]), D::Text("normal"), false,
        "How far one lesson may move the model. Sets learning rate, distance limit and passes."),
    spec("training_overrides", "Advanced training settings", Kind::Text, D::Text("{}"), false,
        "Single numbers that the dial would choose, as JSON: {\"learning_rate\": 0.0005, \"epochs\": 4}. Every name is described in crates/trainer/src/config.rs."),
    spec("recording", "Record conversations", Kind::Switch, D::Switch(true), false,
        "Without recording nothing is kept and nothing can be learned."),
    spec("retention_days", "Keep for days", Kind::Number(0, 36_500), D::Number(0), false,
        "Older answers are deleted; rated ones that no lesson has used are kept. 0 keeps everything."),
    spec("retention_mb", "Keep megabytes", Kind::Number(0, 16_777_216), D::Number(0), false,
        "When the data is larger, the oldest unrated answers are deleted first. 0 sets no limit."),
    spec("retention_steps", "Keep answers", Kind::Number(0, 100_000_000), D::Number(0), false,
        "How many answers are kept at most, oldest unrated ones deleted first. 0 sets no limit."),
    spec("language", "Language", Kind::Choice(&["auto", "en", "zh-CN"]), D::Text("auto"), false,
        "The language of the interface. auto follows the browser or system."),
];

/// The description of a key; `None` when there is no such setting.
pub fn spec_of(key: &str) -> Option<&'static Spec> {
    SPECS.iter().find(|spec| spec.key == key)
}

fn refused(message: String) -> Failure {
    Failure::new(Code::InvalidRequest, message)
}

/// Checks one change; the answer is the text to keep in the database.
pub fn validate(key: &str, value: &Value) -> Result<String, Failure> {
    let spec = spec_of(key).ok_or_else(|| refused(format!("There is no setting '{key}'.")))?;
    spec.kind
        .check(value)
        .map_err(|expected| refused(format!("{key} must be {expected}, not {value}.")))?;
    if key == "device" {
        check_device(value)?;
    }
    if key == "training_overrides" {
        overrides(value.as_str().unwrap_or_default())?;
    }
    Ok(value.to_string())
}

/// The advanced training settings as a map; the training worker checks names and values.
///
/// # Errors
/// When the text is no JSON object.
pub fn overrides(text: &str) -> Result<Map<String, Value>, Failure> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_str(text).map_err(|error| {
        refused(format!(
            "training_overrides must be a JSON object such as {{\"epochs\": 4}}: {error}."
        ))
    })
}

fn check_device(value: &Value) -> Result<(), Failure> {
    let text = value.as_str().unwrap_or_default();
    let numbered = text
        .strip_prefix("cuda:")
        .is_some_and(|n| n.parse::<u16>().is_ok());
    if matches!(text, "auto" | "cpu" | "cuda") || numbered {
        return Ok(());
    }
    Err(refused(format!(
        "device must be auto, cpu, cuda or cuda:N, not '{text}'."
    )))
}

/// Which environment variable sets a key.
pub fn variable(key: &str) -> String {
    format!("SPOTTER_{}", key.to_ascii_uppercase())
}

/// The settings that count. A wrong value on the command line or in the environment is
/// an error; one in the database (from another version) falls back to the default.
pub fn resolve(
    raw: &RawSettings,
    env: impl Fn(&str) -> Option<String>,
    database: impl Fn(&str) -> Option<String>,
) -> Result<Settings, Failure> {
    let given = match serde_json::to_value(raw) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    };
    let mut origins = BTreeMap::new();
    let mut values = Map::new();
    for spec in SPECS {
        let found = if let Some(value) = given.get(spec.key) {
            validate(spec.key, value)?;
            (value.clone(), Source::CommandLine)
        } else if let Some(text) = env(&variable(spec.key)).filter(|text| !text.is_empty()) {
            let value = spec.kind.parse(&text).unwrap_or(Value::String(text));
            validate(spec.key, &value).map_err(|failure| {
                refused(format!("{}: {}", variable(spec.key), failure.message))
            })?;
            (value, Source::Environment)
        } else if let Some(value) = stored(spec, database(spec.key)) {
            (value, Source::Database)
        } else {
            (spec.default.value(), Source::Default)
        };
        values.insert(spec.key.to_owned(), found.0.clone());
        origins.insert(spec.key, found);
    }
    let mut settings: Settings = serde_json::from_value(Value::Object(values))
        .map_err(|error| Failure::new(Code::Internal, format!("settings: {error}")))?;
    settings.origins = origins;
    if settings.no_auth && !is_loopback(&settings.host) {
        return Err(refused(format!(
            "Refusing to answer without a token on {}: others could reach it. \
             Leave out --no-auth, or listen on 127.0.0.1.",
            settings.host
        )));
    }
    Ok(settings)
}

fn stored(spec: &Spec, text: Option<String>) -> Option<Value> {
    let text = text?;
    let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
    match validate(spec.key, &value) {
        Ok(_) => Some(value),
        Err(failure) => {
            tracing::warn!(key = spec.key, "ignoring a stored setting: {failure}");
            None
        }
    }
}

/// Whether only this machine can reach the address.
pub fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

impl Settings {
    /// Every setting as the control API shows it.
    pub fn list(&self) -> Vec<dto::Setting> {
        SPECS
            .iter()
            .map(|spec| {
                let (value, source) = match self.origins.get(spec.key) {
                    Some((value, source)) => (value.clone(), *source),
                    None => (spec.default.value(), Source::Default),
                };
                dto::Setting {
                    key: spec.key.to_owned(),
                    value,
                    default: spec.default.value(),
                    source: source.as_str().to_owned(),
                    restart_required: spec.restart_required,
                    title: spec.title.to_owned(),
                    description: spec.description.to_owned(),
                    kind: spec.kind.as_str().to_owned(),
                    options: match spec.kind {
                        Kind::Choice(choices) => {
                            Some(choices.iter().map(|&choice| choice.to_owned()).collect())
                        }
                        _ => None,
                    },
                }
            })
            .collect()
    }

    /// Where a key's value came from.
    pub fn source(&self, key: &str) -> Option<Source> {
        self.origins.get(key).map(|(_, source)| *source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none(_: &str) -> Option<String> {
        None
    }

    #[test]
    fn every_setting_has_a_field_and_a_valid_default() {
        let defaults = resolve(&RawSettings::default(), none, none).unwrap();
        assert_eq!(defaults.origins.len(), SPECS.len());
        for spec in SPECS {
            validate(spec.key, &spec.default.value()).unwrap();
            assert!(!spec.title.is_empty() && spec.description.ends_with('.'));
            assert_eq!(defaults.source(spec.key), Some(Source::Default));
        }
        let raw = RawSettings {
            host: Some("::1".into()),
            port: Some(1),
            model: Some("tiny".into()),
            no_auth: Some(true),
            device: Some("cpu".into()),
            threads_serve: Some(1),
            threads_train: Some(1),
            context_length: Some(1),
            cache_mb: Some(1),
            max_batch: Some(1),
            max_queue: Some(1),
            schedule: Some(Schedule::Schedule),
            schedule_from: Some("23:59".into()),
            schedule_until: Some("00:00".into()),
            idle_minutes: Some(1),
            label_floor: Some(1),
            label_minimum: Some(1),
            dial: Some(Dial::Bold),
            training_overrides: Some("{\"epochs\": 1}".into()),
            recording: Some(false),
            retention_days: Some(1),
            retention_mb: Some(1),
            retention_steps: Some(1),
            language: Some("zh-CN".into()),
        };
        let all = resolve(&raw, none, none).unwrap();
        for spec in SPECS {
            assert_eq!(
                all.source(spec.key),
                Some(Source::CommandLine),
                "{}",
                spec.key
            );
        }
    }

    #[test]
    fn the_command_line_wins_over_the_environment_over_the_database() {
        let env = |key: &str| match key {
            "SPOTTER_PORT" => Some("2".to_owned()),
            "SPOTTER_DIAL" => Some("bold".to_owned()),
            "SPOTTER_RECORDING" => Some("off".to_owned()),
            _ => None,
        };
        let database = |key: &str| match key {
            "port" => Some("3".to_owned()),
            "dial" => Some("\"gentle\"".to_owned()),
            "schedule" => Some("\"manual\"".to_owned()),
            "language" => Some("\"klingon\"".to_owned()),
            _ => None,
        };
        let raw = RawSettings {
            port: Some(1),
            ..RawSettings::default()
        };
        let settings = resolve(&raw, env, database).unwrap();
        assert_eq!(
            (settings.port, settings.source("port")),
            (1, Some(Source::CommandLine))
        );
        assert_eq!(
            (settings.dial, settings.source("dial")),
            (Dial::Bold, Some(Source::Environment))
        );
        assert!(!settings.recording);
        assert_eq!(settings.schedule, Schedule::Manual);
        assert_eq!(settings.source("schedule"), Some(Source::Database));
        assert_eq!(
            (settings.language.as_str(), settings.source("language")),
            ("auto", Some(Source::Default))
        );
        let listed = settings.list();
        let port = listed.iter().find(|setting| setting.key == "port").unwrap();
        assert_eq!((&port.value, &port.default), (&json!(1), &json!(8100)));
        assert_eq!(port.source, "command line");
    }

    #[test]
    fn a_wrong_value_is_refused_in_words() {
        for (key, value, words) in [
            ("port", json!(70000), "from 0 to 65535"),
            ("port", json!("8100"), "a whole number"),
            ("port", json!(-1), "a whole number"),
            ("dial", json!("reckless"), "one of gentle, normal, bold"),
            ("recording", json!("yes"), "true or false"),
            ("schedule_from", json!("24:00"), "time of day"),
            ("schedule_from", json!("+1:00"), "time of day"),
            ("model", json!("two\nlines"), "one line"),
            ("device", json!("cuda:x"), "cuda:N"),
            ("colour", json!(1), "no setting 'colour'"),
        ] {
            let failure = validate(key, &value).unwrap_err();
            assert_eq!(failure.code, Code::InvalidRequest);
            assert!(failure.message.contains(words), "{}", failure.message);
        }
        let env = |key: &str| (key == "SPOTTER_PORT").then(|| "many".to_owned());
        let failure = resolve(&RawSettings::default(), env, none).unwrap_err();
        assert!(
            failure.message.contains("SPOTTER_PORT"),
            "{}",
            failure.message
        );
    }

    #[test]
    fn another_address_without_a_token_is_refused() {
        let open = |host: &str| {
            let raw = RawSettings {
                host: Some(host.to_owned()),
                no_auth: Some(true),
                ..RawSettings::default()
            };
            resolve(&raw, none, none)
        };
        for host in [
            "0.0.0.0",
            "192.168.1.7",
            "::",
            "example",
            "127.0.0.1.example",
        ] {
            assert!(open(host).is_err(), "{host}");
        }
        for host in ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"] {
            assert!(open(host).is_ok(), "{host}");
        }
    }
}
