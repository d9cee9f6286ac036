//! The engine on the tiny model: order of events, reuse, swaps under load, cancellation.

use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use spotter_core::chat::{Message, Role};
use spotter_core::generate::{
    AdapterChoice, Completion, GenerateEvent, GenerateRequest, Prompt, Sampling,
};
use spotter_core::{AdapterVersion, Code};
use spotter_engine::{Engine, EngineSettings};
use spotter_model::{LoadOptions, LoadedModel, LoraAdapter, LoraConfig};

type Events = Receiver<(u64, GenerateEvent)>;

fn start(blocks: usize, max_batch: usize) -> (Engine, Events, Arc<LoadedModel>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny/tiny.gguf");
    let options = LoadOptions {
        threads: Some(2),
        ..Default::default()
    };
    let model = Arc::new(LoadedModel::load(&path, &options).expect("tiny loads"));
    let (sender, events) = channel();
    let sender = Mutex::new(sender);
    let settings = EngineSettings {
        context_length: 4096,
        blocks,
        max_batch,
        max_queue: 64,
    };
    let sink = Arc::new(move |id, event| {
        let _ = sender.lock().expect("lock").send((id, event));
    });
    (
        Engine::start(model.clone(), settings, sink).expect("starts"),
        events,
        model,
    )
}

fn ask(text: &str, seed: u64, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Prompt::Chat {
            messages: vec![Message::text(Role::User, text)],
            tools: Vec::new(),
            template_variables: Default::default(),
        },
        tool_choice: Default::default(),
        response_format: Default::default(),
        sampling: Sampling {
            seed: Some(seed),
            max_tokens: Some(max_tokens),
            ignore_eos: true,
            ..Default::default()
        },
        adapter: AdapterChoice::Current,
        session: text.to_owned(),
        turn: None,
        top_logprobs: None,
        deadline_ms: None,
    }
}

#[derive(Debug, Default)]
struct Outcome {
    prompt: u32,
    cached: u32,
    adapter: AdapterVersion,
    streamed: String,
    completion: Option<Completion>,
    failure: Option<Code>,
}

/// Collects until every one of `ids` has ended.
fn collect(events: &Events, ids: &[u64]) -> HashMap<u64, Outcome> {
    let mut out: HashMap<u64, Outcome> = ids.iter().map(|id| (*id, Outcome::default())).collect();
    let mut open = ids.len();
    while open > 0 {
        let (id, event) = events
            .recv_timeout(Duration::from_secs(60))
            .expect("an event in time");
        let o = out.get_mut(&id).expect("a known id");
        assert!(
            o.completion.is_none() && o.failure.is_none(),
            "nothing follows the end"
        );
        match event {
            GenerateEvent::Started {
                cached_tokens,
                adapter,
                prompt_tokens,
                ..
            } => {
                o.prompt = prompt_tokens;
                o.cached = cached_tokens;
                o.adapter = adapter;
            }
            GenerateEvent::Delta { content, .. } => o.streamed.push_str(&content),
            GenerateEvent::Finished { completion } => {
                o.completion = Some(*completion);
                open -= 1;
            }
            GenerateEvent::Failed { failure } => {
                o.failure = Some(failure.code);
                open -= 1;
            }
            GenerateEvent::Queued { .. } | GenerateEvent::Prefill { .. } => {}
        }
    }
    out
}

#[test]
fn a_batched_answer_equals_the_same_answer_alone() {
    let (engine, events, _) = start(256, 8);
    let requests: Vec<GenerateRequest> = (0..6)
        .map(|i| {
            ask(
                &format!("question {i} {}", "words ".repeat(i * 20)),
                i as u64,
                24,
            )
        })
        .collect();
    let mut alone = Vec::new();
    for (i, request) in requests.iter().enumerate() {
        engine.submit(i as u64, request.clone());
        alone.push(
            collect(&events, &[i as u64])
                .remove(&(i as u64))
                .and_then(|o| o.completion)
                .expect("answers"),
        );
    }
    let ids: Vec<u64> = (100..106).collect();
    for (id, request) in ids.iter().zip(&requests) {
        engine.submit(*id, request.clone());
    }
    let together = collect(&events, &ids);
    for (id, alone) in ids.iter().zip(&alone) {
        let o = &together[id];
        let c = o.completion.as_ref().expect("answers");
        assert_eq!(c.response_ids, alone.response_ids);
        assert_eq!(c.logprobs.len(), c.response_ids.len());
        assert_eq!(o.streamed, c.content, "the stream is the answer");
        for (a, b) in c.logprobs.iter().zip(&alone.logprobs) {
            assert!((a - b).abs() < 1e-3, "{a} and {b}");
        }
    }
    engine.shutdown(Duration::from_secs(1));
}

#[test]
fn a_repeated_prefix_is_reused_and_gives_the_same_answer() {
    let (engine, events, _) = start(256, 4);
    let request = ask(&"a long shared prompt ".repeat(30), 5, 12);
    engine.submit(1, request.clone());
    let cold = collect(&events, &[1]).remove(&1).expect("ends");
    engine.submit(2, request);
    let warm = collect(&events, &[2]).remove(&2).expect("ends");
    assert_eq!(cold.cached, 0);
    assert!(warm.cached > 200, "only {} tokens were reused", warm.cached);
    assert_eq!(
        cold.completion.expect("cold").response_ids,
        warm.completion.expect("warm").response_ids
    );
    let counters = engine.counters();
    assert_eq!(counters.cached_tokens, u64::from(warm.cached));
    engine.shutdown(Duration::from_secs(1));
}

#[test]
fn swaps_under_load_drop_nothing_and_mix_no_versions() {
    let (engine, events, model) = start(1024, 16);
    let config = LoraConfig {
        rank: 4,
        ..Default::default()
    };
    for version in 1..=2 {
        let adapter = LoraAdapter::init(model.model.config(), config.clone(), u64::from(version))
            .expect("init");
        engine.insert_adapter(AdapterVersion(version), adapter);
    }
    let ids: Vec<u64> = (0..32).collect();
    for id in &ids {
        engine.submit(*id, ask(&format!("stream {id}"), *id, 30));
    }
    let (done, swaps) = channel();
    for i in 0..50u32 {
        let done = done.clone();
        engine.swap(None, AdapterVersion(i % 3), move |r| {
            let _ = done.send(r.is_ok());
        });
        std::thread::sleep(Duration::from_millis(5));
    }
    let outcomes = collect(&events, &ids);
    assert!(
        outcomes.values().all(|o| o.completion.is_some()),
        "every stream was answered"
    );
    assert!((0..50).all(|_| swaps.recv_timeout(Duration::from_secs(10)) == Ok(true)));
    // What each version alone would have said.
    for id in ids.iter().step_by(5) {
        let o = &outcomes[id];
        let mut request = ask(&format!("stream {id}"), *id, 30);
        request.adapter = AdapterChoice::Version(o.adapter);
        engine.submit(1000 + id, request);
        let alone = collect(&events, &[1000 + id])
            .remove(&(1000 + id))
            .and_then(|o| o.completion)
            .expect("ends");
        assert_eq!(
            alone.response_ids,
            o.completion.as_ref().expect("ends").response_ids
        );
    }
    engine.shutdown(Duration::from_secs(1));
}

#[test]
fn bad_requests_fail_alone() {
    let (engine, events, _) = start(64, 4);
    engine.submit(1, ask(&"far too long ".repeat(2000), 0, 4));
    let mut unknown = ask("hello", 0, 4);
    unknown.adapter = AdapterChoice::Version(AdapterVersion(9));
    engine.submit(2, unknown);
    engine.submit(3, ask("hello", 0, 4));
    let mut empty = ask("", 0, 4);
    empty.prompt = Prompt::Tokens(Vec::new());
    engine.submit(4, empty);
    let outcomes = collect(&events, &[1, 2, 3, 4]);
    assert_eq!(outcomes[&1].failure, Some(Code::ContextLengthExceeded));
    assert_eq!(outcomes[&2].failure, Some(Code::ModelNotFound));
    assert!(outcomes[&3].completion.is_some());
    assert_eq!(outcomes[&4].failure, Some(Code::InvalidRequest));
    engine.shutdown(Duration::from_secs(1));
}

#[test]
fn cancellation_frees_the_blocks() {
    let (engine, events, _) = start(128, 4);
    engine.submit(1, ask("an endless answer", 0, 3000));
    std::thread::sleep(Duration::from_millis(50));
    engine.cancel(1);
    assert_eq!(collect(&events, &[1])[&1].failure, Some(Code::Cancelled));
    engine.submit(2, ask("next", 0, 3));
    assert!(collect(&events, &[2])[&2].completion.is_some());
    engine.shutdown(Duration::from_secs(1));
}

#[test]
fn recorded_answers_keep_their_prefix_in_the_cache() {
    let (engine, events, _) = start(256, 4);
    let question = "tell me something long about water and eggs ".repeat(6);
    let mut first = ask(&question, 3, 60);
    first.sampling.ignore_eos = false;
    engine.submit(1, first);
    let mut o = collect(&events, &[1]).remove(&1).expect("ends");
    let c = o.completion.take().expect("answers");
    let mut next = ask("", 4, 4);
    next.prompt = Prompt::Chat {
        messages: vec![
            Message::text(Role::User, question),
            Message {
                token_ids: Some(c.response_ids.clone()),
                ..Message::text(Role::Assistant, c.content)
            },
            Message::text(Role::User, "go on"),
        ],
        tools: Vec::new(),
        template_variables: Default::default(),
    };
    engine.submit(2, next);
    let o2 = collect(&events, &[2]).remove(&2).expect("ends");
    // All but the last sampled token have keys and values; whole blocks are reused.
    let computed = o.prompt as usize + c.response_ids.len() - 1;
    assert_eq!(
        o2.cached as usize,
        computed / 32 * 32,
        "prompt {}, answer {}",
        o.prompt,
        c.response_ids.len()
    );
    assert!(o2.completion.is_some());
    engine.shutdown(Duration::from_secs(1));
}

/// `ask`, with two tools offered.
fn ask_with_tools(seed: u64) -> GenerateRequest {
    let tool = |name: &str, parameters| spotter_core::chat::Tool {
        name: name.into(),
        description: String::new(),
        parameters,
    };
    let mut request = ask("What is the weather?", seed, 400);
    request.sampling.ignore_eos = false;
    if let Prompt::Chat { tools, .. } = &mut request.prompt {
        let city = serde_json::json!({"type": "object", "additionalProperties": false,
            "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]});
        let level = serde_json::json!({"type": "object", "additionalProperties": false,
            "properties": {"loud": {"type": "boolean"}}, "required": ["loud"]});
        *tools = vec![tool("weather", city), tool("alarm", level)];
    }
    request
}

#[test]
fn a_required_call_is_made_and_its_arguments_fit() {
    let (engine, events, _) = start(256, 4);
    let ids: Vec<u64> = (0..6).collect();
    for id in &ids {
        let mut request = ask_with_tools(*id);
        request.tool_choice = match id {
            0..3 => spotter_core::chat::ToolChoice::Required,
            _ => spotter_core::chat::ToolChoice::Named("alarm".into()),
        };
        engine.submit(*id, request);
    }
    for (id, outcome) in collect(&events, &ids) {
        let completion = outcome.completion.expect("an answer");
        let call = completion.tool_calls.first().expect("a call");
        let arguments: serde_json::Value =
            serde_json::from_str(&call.arguments).expect("arguments are JSON");
        match call.name.as_str() {
            "weather" if id < 3 => {
                assert!(["C", "F"].contains(&arguments["unit"].as_str().unwrap_or("")));
            }
            "alarm" => assert!(arguments["loud"].is_boolean()),
            other => panic!("{other} was called in answer {id}"),
        }
        assert_eq!(completion.content, "", "no markup is left over");
        let drawn = completion.logprobs.iter().zip(&completion.model_logprobs);
        assert!(
            drawn.clone().any(|(own, model)| own - model > 0.1),
            "what was drawn from is the narrowed distribution, not the model's"
        );
    }
}

#[test]
fn an_answer_fits_the_schema_asked_for() {
    let (engine, events, _) = start(256, 4);
    let mut request = ask("Rate this.", 3, 120);
    request.sampling.ignore_eos = false;
    request.response_format = spotter_core::chat::ResponseFormat::JsonSchema(serde_json::json!({
        "type": "object", "additionalProperties": false, "required": ["good", "grade"],
        "properties": {"good": {"type": "boolean"}, "grade": {"enum": [1, 2, 3]},},
    }));
    engine.submit(1, request.clone());
    let completion = collect(&events, &[1]).remove(&1).and_then(|o| o.completion);
    let content = completion.expect("an answer").content;
    let json: serde_json::Value = serde_json::from_str(&content).expect("JSON");
    assert!(json["good"].is_boolean(), "{content}");
    assert!((1..=3).contains(&json["grade"].as_u64().unwrap_or(0)));

    request.response_format =
        spotter_core::chat::ResponseFormat::JsonSchema(serde_json::json!({"type": "objekt"}));
    engine.submit(2, request);
    let failure = collect(&events, &[2]).remove(&2).and_then(|o| o.failure);
    assert_eq!(failure, Some(Code::InvalidRequest));
}

#[test]
fn a_named_tool_that_is_not_offered_is_refused() {
    let (engine, events, _) = start(64, 2);
    let mut request = ask_with_tools(1);
    request.tool_choice = spotter_core::chat::ToolChoice::Named("siren".into());
    engine.submit(1, request);
    let failure = collect(&events, &[1]).remove(&1).and_then(|o| o.failure);
    assert_eq!(failure, Some(Code::InvalidRequest));
}
