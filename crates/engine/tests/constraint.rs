//! Constrained answers of a model that would rather say anything else.
//!
//! The scripted model prefers tokens at random, and can be told how to begin; whatever
//! form was asked for must come out of it all the same.

use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use spotter_core::chat::{Message, ResponseFormat, Role, Tool, ToolChoice};
use spotter_core::code::{Code, Failure};
use spotter_core::generate::{
    AdapterChoice, Completion, FinishReason, GenerateEvent, GenerateRequest, Prompt, Sampling,
};
use spotter_engine::{Compute, Computed, Engine, EngineSettings, Wants};
use spotter_model::gguf::Gguf;
use spotter_model::{Batch, ChatTemplate, ModelError, Tokenizer};

const LLAMA: &str = "{% set tool_calls = 1 %}{{ tools }}<|python_tag|>{% for m in messages %}{{ m.content }}{% endfor %}";
const MISTRAL: &str = "{% set tool_calls = 1 %}{{ tools }}[TOOL_CALLS]{% for m in messages %}{{ m.content }}{% endfor %}";

/// Prefers tokens by a hash of the place; begins with `lead`.
struct Whim {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    vocab: usize,
    lead: Vec<u32>,
    prompt_len: Mutex<Option<usize>>,
}

impl Compute for Whim {
    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn template(&self) -> &ChatTemplate {
        &self.template
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn block_bytes(&self) -> u64 {
        1
    }

    fn run(&self, batch: &Batch, wants: &Wants) -> Result<Computed, ModelError> {
        let mut computed = Computed::default();
        assert_eq!(batch.segments.len(), 1, "one request at a time");
        for _ in &wants.logits {
            let segment = &batch.segments[0];
            let place = segment.cache.as_ref().map_or(0, |c| c.past) + segment.tokens.len();
            let first = *self.prompt_len.lock().expect("lock").get_or_insert(place);
            let hash = |id: usize| {
                let mut x = (place * 1_000_003 + id) as u64;
                x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D_2C1B_3C6D);
                ((x >> 40) & 0xFF) as f32 / 64.0
            };
            let mut logits: Vec<f32> = (0..self.vocab).map(hash).collect();
            if let Some(next) = self.lead.get(place - first) {
                logits[*next as usize] = 40.0;
            }
            computed.logits.push(logits);
        }
        Ok(computed)
    }
}

fn answer(
    template: Option<&str>,
    lead: &str,
    request: GenerateRequest,
) -> Result<(Completion, String), Failure> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny/tiny.gguf");
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).expect("opens")).expect("tokeniser");
    let compute = Whim {
        template: ChatTemplate::new(template, &tokenizer).expect("template"),
        vocab: tokenizer.vocab_size(),
        lead: tokenizer.encode(lead).expect("encodes"),
        prompt_len: Mutex::default(),
        tokenizer,
    };
    let (sender, events) = channel();
    let sender = Mutex::new(sender);
    let sink = Arc::new(move |_, event| {
        let _ = sender.lock().expect("lock").send(event);
    });
    let limits = EngineSettings {
        context_length: 8192,
        blocks: 256,
        max_batch: 2,
        max_queue: 2,
    };
    let engine = Engine::with_compute(Arc::new(compute), limits, sink).expect("starts");
    engine.submit(1, request);
    let mut streamed = String::new();
    let ended = loop {
        match events
            .recv_timeout(Duration::from_secs(120))
            .expect("in time")
        {
            GenerateEvent::Delta { content, .. } => streamed.push_str(&content),
            GenerateEvent::Finished { completion } => break Ok((*completion, streamed)),
            GenerateEvent::Failed { failure } => break Err(failure),
            _ => {}
        }
    };
    engine.shutdown(Duration::from_secs(1));
    ended
}

fn tools() -> Vec<Tool> {
    let tool = |name: &str, parameters: Value| Tool {
        name: name.into(),
        description: String::new(),
        parameters,
    };
    vec![
        tool(
            "move",
            json!({"type": "object", "additionalProperties": false, "required": ["to", "speed"], "properties": {
                "to": {"$ref": "#/$defs/side"},
                "speed": {"type": "integer", "minimum": 1, "maximum": 9}},
                "$defs": {"side": {"enum": ["left", "right"]}}}),
        ),
        tool(
            "say \"it\"",
            json!({"type": "object", "additionalProperties": false, "required": ["text"], "properties": {
                "text": {"type": "string", "maxLength": 6}}}),
        ),
    ]
}

fn request(seed: u64, tool_choice: ToolChoice, format: ResponseFormat) -> GenerateRequest {
    GenerateRequest {
        prompt: Prompt::Chat {
            messages: vec![Message::text(Role::User, "do something")],
            tools: tools(),
            template_variables: Default::default(),
        },
        tool_choice,
        response_format: format,
        sampling: Sampling {
            seed: Some(seed),
            max_tokens: Some(400),
            ..Default::default()
        },
        adapter: AdapterChoice::Current,
        session: String::new(),
        turn: None,
        top_logprobs: None,
        deadline_ms: None,
    }
}

fn check_call(name: &str, arguments: &str) {
    let arguments: Value = serde_json::from_str(arguments).expect("arguments parse");
    match name {
        "move" => {
            assert!(["left", "right"].contains(&arguments["to"].as_str().expect("a side")));
            assert!((1..=9).contains(&arguments["speed"].as_i64().expect("a speed")));
        }
        "say \"it\"" => {
            let text = arguments["text"].as_str().expect("a text");
            assert!(text.chars().count() <= 6, "{text}");
        }
        other => panic!("{other} was not offered"),
    }
}

#[test]
fn a_required_call_comes_in_every_dialect() {
    for template in [
        None,
        Some(LLAMA),
        Some(MISTRAL),
        Some("{{ tools }}tool_call"),
    ] {
        for seed in 0..4 {
            let (c, streamed) = answer(
                template,
                "",
                request(seed, ToolChoice::Required, ResponseFormat::Text),
            )
            .expect("answers");
            assert_eq!(c.finish_reason, FinishReason::ToolCalls, "{c:?}");
            assert!((1..=4).contains(&c.tool_calls.len()), "{c:?}");
            assert_eq!(c.content, "", "no markup leaks");
            assert_eq!(streamed, "");
            for call in &c.tool_calls {
                check_call(&call.name, &call.arguments);
            }
        }
    }
}

#[test]
fn a_named_tool_is_the_one_that_is_called() {
    for seed in 0..3 {
        for name in ["move", "say \"it\""] {
            let choice = ToolChoice::Named(name.into());
            let (c, _) =
                answer(None, "", request(seed, choice, ResponseFormat::Text)).expect("answers");
            let names: Vec<&str> = c.tool_calls.iter().map(|t| t.name.as_str()).collect();
            assert_eq!(names, [name]);
            check_call(name, &c.tool_calls[0].arguments);
        }
    }
    let unknown = request(0, ToolChoice::Named("fly".into()), ResponseFormat::Text);
    let failure = answer(None, "", unknown).expect_err("not offered");
    assert_eq!(failure.code, Code::InvalidRequest);
    assert!(
        failure.message.contains("'fly'") && failure.message.contains("move"),
        "{failure}"
    );
    let mut none = request(0, ToolChoice::Required, ResponseFormat::Text);
    if let Prompt::Chat { tools, .. } = &mut none.prompt {
        tools.clear();
    }
    let failure = answer(None, "", none).expect_err("no tools");
    assert_eq!(failure.code, Code::InvalidRequest);
}

#[test]
fn json_answers_satisfy_their_schema() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["ok", "n"],
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 10, "maximum": 99},
            "word": {"type": "string", "pattern": "^[a-c]{2}$"}}});
    for seed in 0..4 {
        let format = ResponseFormat::JsonSchema(schema.clone());
        let (c, streamed) =
            answer(None, "", request(seed, ToolChoice::None, format)).expect("answers");
        assert_eq!(c.finish_reason, FinishReason::Stop);
        assert_eq!(streamed, c.content);
        let value: Value = serde_json::from_str(&c.content).expect("parses");
        assert!(value["ok"].is_boolean(), "{value}");
        assert!(
            (10..=99).contains(&value["n"].as_i64().expect("a number")),
            "{value}"
        );
        // What was forced had no alternative, whatever the model thought of it.
        let forced = c.logprobs.iter().zip(&c.model_logprobs);
        assert!(
            forced.clone().any(|(l, m)| *l > -1e-4 && *m < -2.0),
            "{c:?}"
        );
        assert!(
            forced.clone().all(|(l, m)| *l >= *m - 1e-4),
            "a mask only adds probability"
        );
    }
    let (c, _) = answer(
        None,
        "",
        request(1, ToolChoice::None, ResponseFormat::JsonObject),
    )
    .expect("answers");
    assert!(c.content.trim_start().starts_with('{'), "{}", c.content);
}

#[test]
fn a_malformed_schema_is_refused_and_an_awkward_one_relaxed() {
    let bad = json!({"type": "object", "properties": {"age": {"type": "integr"}}});
    let failure = answer(
        None,
        "",
        request(0, ToolChoice::None, ResponseFormat::JsonSchema(bad)),
    )
    .expect_err("not a schema");
    assert_eq!(failure.code, Code::InvalidRequest);
    assert!(
        failure
            .message
            .contains("response_format.json_schema.schema.properties.age.type"),
        "{failure}"
    );
    let awkward = json!({"type": "object", "required": ["a"], "additionalProperties": false, "properties": {
        "a": {"type": "integer", "minimum": 1, "maximum": 5, "multipleOf": 1, "$comment": "x"},
        "b": {"type": "string", "maxLength": 90_000_000, "pattern": "^(?<!x)y\\b", "contentEncoding": "base64", "enum": ["y"]}},
        "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}, "unevaluatedProperties": false});
    let (c, _) = answer(
        None,
        "",
        request(0, ToolChoice::None, ResponseFormat::JsonSchema(awkward)),
    )
    .expect("answers");
    let value: Value = serde_json::from_str(&c.content).expect("parses");
    assert!(
        (1..=5).contains(&value["a"].as_i64().expect("a number")),
        "{value}"
    );
}

#[test]
fn a_call_that_has_begun_ends_well() {
    let leads = [
        (None, "Well. <tool_call>\n{"),
        (None, "<tool_call>"),
        (Some(LLAMA), "{\"name\": \"move\""),
        (Some(LLAMA), "<|python_tag|>{\"na"),
        (Some(MISTRAL), "[TOOL_CALLS]"),
    ];
    for (template, lead) in leads {
        let request = request(3, ToolChoice::Auto, ResponseFormat::Text);
        let (c, streamed) = answer(template, lead, request).expect("answers");
        let call = c
            .tool_calls
            .first()
            .unwrap_or_else(|| panic!("no call: {c:?}"));
        check_call(&call.name, &call.arguments);
        assert!(
            !streamed.contains("tool_call") && !streamed.contains("TOOL_CALLS"),
            "{streamed}"
        );
    }
}

#[test]
fn a_form_is_kept_behind_reasoning() {
    let template = "<think>{% for m in messages %}{{ m.content }}{% endfor %}<think>\n";
    let schema = json!({"type": "object", "required": ["n"], "additionalProperties": false,
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}});
    let request = request(5, ToolChoice::None, ResponseFormat::JsonSchema(schema));
    let (c, _) = answer(Some(template), "because</think>\n\n", request).expect("answers");
    assert!(
        c.reasoning
            .as_deref()
            .is_some_and(|r| r.starts_with("because")),
        "{c:?}"
    );
    let value: Value = serde_json::from_str(&c.content).expect("parses");
    assert!(value["n"].is_i64(), "{value}");
}
