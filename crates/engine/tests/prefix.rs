//! Prefix reuse on what an agent really sends, without weights: the tokens decide.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use spotter_core::chat::{Message, Role, Tool, ToolCall};
use spotter_core::generate::{
    AdapterChoice, Completion, GenerateEvent, GenerateRequest, Prompt, Sampling,
};
use spotter_engine::{Compute, Computed, Engine, EngineSettings, Wants};
use spotter_model::gguf::{Gguf, Value as Meta};
use spotter_model::{Batch, ChatTemplate, ModelError, Tokenizer};

/// The repository's tiny tokeniser and template; says a letter at a time, which nobody
/// who tokenises the text again would do.
struct Letters {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    letters: Vec<u32>,
}

impl Letters {
    fn new() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny/tiny.gguf");
        let file = Gguf::open(&path).expect("opens");
        let tokenizer = Tokenizer::from_gguf(&file).expect("tokeniser");
        let source = file
            .metadata()
            .get("tokenizer.chat_template")
            .and_then(Meta::as_str);
        Self {
            template: ChatTemplate::new(source, &tokenizer).expect("template"),
            letters: "the water and the eggs "
                .chars()
                .flat_map(|c| tokenizer.encode(&c.to_string()).expect("encodes"))
                .collect(),
            tokenizer,
        }
    }
}

impl Compute for Letters {
    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn template(&self) -> &ChatTemplate {
        &self.template
    }

    fn vocab(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    fn block_bytes(&self) -> u64 {
        1000
    }

    fn run(&self, batch: &Batch, wants: &Wants) -> Result<Computed, ModelError> {
        let rows: Vec<usize> = batch
            .segments
            .iter()
            .flat_map(|s| {
                let past = s.cache.as_ref().map_or(0, |c| c.past);
                (1..=s.tokens.len()).map(move |n| past + n)
            })
            .collect();
        let logits = wants.logits.iter().map(|row| {
            let next = self.letters[rows[*row as usize] % self.letters.len()];
            let mut logits = vec![-30.0; self.vocab()];
            logits[next as usize] = 0.0;
            logits
        });
        Ok(Computed {
            logits: logits.collect(),
            logprobs: Vec::new(),
        })
    }
}

struct Rig {
    engine: Engine,
    events: Receiver<(u64, GenerateEvent)>,
    next: u64,
}

struct Answered {
    prompt: Vec<u32>,
    cached: usize,
    completion: Completion,
}

impl Answered {
    fn reused(&self) -> f64 {
        self.cached as f64 / self.prompt.len() as f64
    }
}

fn rig(tokens: usize) -> Rig {
    let (sender, events) = channel();
    let sender = Mutex::new(sender);
    let sink = Arc::new(move |id, event| {
        let _ = sender.lock().expect("lock").send((id, event));
    });
    let limits = EngineSettings {
        context_length: tokens,
        blocks: tokens / 32,
        max_batch: 4,
        max_queue: 16,
    };
    Rig {
        engine: Engine::with_compute(Arc::new(Letters::new()), limits, sink).expect("starts"),
        events,
        next: 0,
    }
}

impl Rig {
    fn ask(&mut self, messages: Vec<Message>, tools: &[Tool], max_tokens: u32) -> Answered {
        self.next += 1;
        let request = GenerateRequest {
            prompt: Prompt::Chat {
                messages,
                tools: tools.to_vec(),
                template_variables: Default::default(),
            },
            tool_choice: Default::default(),
            response_format: Default::default(),
            sampling: Sampling {
                max_tokens: Some(max_tokens),
                ignore_eos: true,
                temperature: 0.0,
                ..Default::default()
            },
            adapter: AdapterChoice::Current,
            session: "agent".into(),
            turn: None,
            top_logprobs: None,
            deadline_ms: None,
        };
        self.engine.submit(self.next, request);
        let (mut prompt, mut cached) = (Vec::new(), 0);
        loop {
            match self
                .events
                .recv_timeout(Duration::from_secs(120))
                .expect("in time")
                .1
            {
                GenerateEvent::Started {
                    prompt_ids,
                    cached_tokens,
                    ..
                } => (prompt, cached) = (prompt_ids, cached_tokens as usize),
                GenerateEvent::Finished { completion } => {
                    return Answered {
                        prompt,
                        cached,
                        completion: *completion,
                    };
                }
                GenerateEvent::Failed { failure } => panic!("{failure}"),
                _ => {}
            }
        }
    }
}

/// A request as OpenClaw sent it, in the types of the engine.
fn openclaw(name: &str) -> (Vec<Message>, Vec<Tool>) {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../gateway/tests/fixtures")
        .join(format!("openclaw-{name}.json"));
    let sent: Value =
        serde_json::from_str(&std::fs::read_to_string(path).expect("reads")).expect("parses");
    let body = &sent["body"];
    let text = |content: &Value| match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts
            .iter()
            .filter_map(|p| p["text"].as_str())
            .collect::<Vec<_>>()
            .join("\n"),
        _ => String::new(),
    };
    let messages = body["messages"].as_array().expect("messages");
    let messages = messages.iter().map(|m| {
        let role = match m["role"].as_str() {
            Some("system") => Role::System,
            Some("assistant") => Role::Assistant,
            Some("tool") => Role::Tool,
            _ => Role::User,
        };
        let calls = m["tool_calls"].as_array().into_iter().flatten();
        Message {
            tool_calls: calls
                .map(|c| ToolCall {
                    id: c["id"].as_str().unwrap_or_default().into(),
                    name: c["function"]["name"].as_str().unwrap_or_default().into(),
                    arguments: c["function"]["arguments"]
                        .as_str()
                        .unwrap_or_default()
                        .into(),
                })
                .collect(),
            tool_call_id: m["tool_call_id"].as_str().map(str::to_owned),
            ..Message::text(role, text(&m["content"]))
        }
    });
    let tools = body["tools"]
        .as_array()
        .expect("tools")
        .iter()
        .map(|t| Tool {
            name: t["function"]["name"].as_str().unwrap_or_default().into(),
            description: t["function"]["description"]
                .as_str()
                .unwrap_or_default()
                .into(),
            parameters: t["function"]["parameters"].clone(),
        });
    (messages.collect(), tools.collect())
}

#[test]
fn an_agents_next_turn_and_second_call_reuse_the_prompt() {
    let mut rig = rig(128 * 1024);
    let (first, tools) = openclaw("first-turn");
    assert!(tools.len() > 5, "{} tools", tools.len());
    let cold = rig.ask(first, &tools, 20);
    assert!(cold.prompt.len() > 14_000, "{} tokens", cold.prompt.len());
    assert_eq!(cold.cached, 0);
    // Another conversation in between does not cost this one its prefix.
    let other = Message::text(Role::User, "something else entirely ".repeat(300));
    rig.ask(vec![other], &[], 20);
    for (what, name) in [("next turn", "call-2"), ("second call", "call-3")] {
        let (messages, tools) = openclaw(name);
        let warm = rig.ask(messages, &tools, 20);
        assert!(warm.reused() >= 0.95, "{what}: {:.3} reused", warm.reused());
    }
    rig.engine.shutdown(Duration::from_secs(1));
}

#[test]
fn a_recorded_answer_stays_the_same_tokens() {
    let tokenizer = Letters::new().tokenizer;
    let mut rig = rig(16 * 1024);
    let question = Message::text(Role::User, "tell me about water and eggs ".repeat(30));
    let first = rig.ask(vec![question.clone()], &[], 100);
    let said = first.completion;
    assert_ne!(
        tokenizer.encode(&said.content).expect("encodes"),
        said.response_ids,
        "the text would be tokenised differently"
    );
    let history = |ids: Option<Vec<u32>>| {
        vec![
            question.clone(),
            Message {
                token_ids: ids,
                ..Message::text(Role::Assistant, said.content.clone())
            },
            Message::text(Role::User, "go on"),
        ]
    };
    let exact = rig.ask(history(Some(said.response_ids.clone())), &[], 4);
    let whole: Vec<u32> = first
        .prompt
        .iter()
        .chain(&said.response_ids)
        .copied()
        .collect();
    assert!(
        exact.prompt.starts_with(&whole),
        "the same tokens as were generated"
    );
    assert_eq!(
        exact.cached,
        (whole.len() - 1) / 32 * 32,
        "all of them are reused"
    );
    let again = rig.ask(history(None), &[], 4);
    assert!(!again.prompt.starts_with(&whole));
    rig.engine.shutdown(Duration::from_secs(1));
}

#[test]
fn a_session_of_32k_tokens_stays_in_its_memory() {
    let window = 32 * 1024;
    let mut rig = rig(window + 1024);
    let total = rig.engine.counters().cache_total;
    let mut messages = vec![Message::text(Role::System, "You help.")];
    let mut last = 0;
    loop {
        let text = "more about the water and the eggs of the day ".repeat(20);
        messages.push(Message::text(Role::User, text));
        let turn = rig.ask(messages.clone(), &[], 60);
        assert!(
            turn.cached + 64 >= last,
            "{} of {last} tokens were reused",
            turn.cached
        );
        let used = rig.engine.counters().cache_used;
        assert!(used <= total, "{used} of {total} bytes");
        last = turn.prompt.len() + turn.completion.response_ids.len();
        messages.push(Message {
            token_ids: Some(turn.completion.response_ids),
            ..Message::text(Role::Assistant, turn.completion.content)
        });
        // Strangers take what memory is left, and give it back.
        let stranger = Message::text(Role::User, format!("{last} ").repeat(20));
        rig.ask(vec![stranger], &[], 4);
        if last + 1000 > window {
            break;
        }
    }
    assert!(last > 30_000, "{last} tokens");
    rig.engine.shutdown(Duration::from_secs(1));
}
