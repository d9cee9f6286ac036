//! The scheduler over a scripted model: no weights, and faults on demand.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use spotter_core::generate::{
    AdapterChoice, Completion, GenerateEvent, GenerateRequest, Prompt, Sampling,
};
use spotter_core::train::ScoreItem;
use spotter_core::{AdapterVersion, Code, code::Failure};
use spotter_engine::{Compute, Computed, Engine, EngineSettings, Wants};
use spotter_model::gguf::Gguf;
use spotter_model::{Batch, ChatTemplate, ModelError, Tokenizer};

/// A prompt with this token panics while it is computed.
const PANICS: u32 = 400;
/// A prompt with this token is refused by the device.
const FAILS: u32 = 401;
/// After this token the numbers are useless.
const NOT_A_NUMBER: u32 = 402;

/// Says after every token the next one; token ids below 300 are plain text.
struct Script {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    vocab: usize,
    pause: Duration,
    /// (past, length) of every segment of every batch.
    batches: Mutex<Vec<Vec<(usize, usize)>>>,
}

impl Compute for Script {
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
        std::thread::sleep(self.pause);
        let flat: Vec<u32> = batch
            .segments
            .iter()
            .flat_map(|s| s.tokens.clone())
            .collect();
        assert!(!flat.contains(&PANICS), "scripted");
        if flat.contains(&FAILS) {
            return Err(ModelError::Tensor(candle_core::Error::Msg(
                "scripted".into(),
            )));
        }
        let segments = batch.segments.iter().map(|s| {
            (
                s.cache.as_ref().map_or(0, |cache| cache.past),
                s.tokens.len(),
            )
        });
        self.batches.lock().expect("lock").push(segments.collect());
        let logits = wants.logits.iter().map(|row| {
            let last = flat[*row as usize];
            if last == NOT_A_NUMBER {
                return vec![f32::NAN; self.vocab];
            }
            let mut logits = vec![-20.0; self.vocab];
            logits[(last as usize + 1) % 300] = 20.0;
            logits
        });
        Ok(Computed {
            logits: logits.collect(),
            logprobs: wants
                .logprobs
                .iter()
                .map(|(rows, targets)| {
                    assert_eq!(rows.len(), targets.len());
                    targets.iter().map(|t| -(*t as f32)).collect()
                })
                .collect(),
        })
    }
}

struct Rig {
    engine: Engine,
    events: Receiver<(u64, GenerateEvent)>,
    script: Arc<Script>,
    seen: HashMap<u64, Vec<GenerateEvent>>,
    order: Vec<(u64, GenerateEvent)>,
}

fn rig(pause_ms: u64, settings: impl FnOnce(&mut EngineSettings)) -> Rig {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny/tiny.gguf");
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).expect("opens")).expect("tokeniser");
    let template = ChatTemplate::new(None, &tokenizer).expect("template");
    let vocab = tokenizer.vocab_size();
    assert!(vocab > NOT_A_NUMBER as usize, "{vocab} tokens");
    let script = Arc::new(Script {
        tokenizer,
        template,
        vocab,
        pause: Duration::from_millis(pause_ms),
        batches: Mutex::default(),
    });
    let mut limits = EngineSettings {
        context_length: 32_768,
        blocks: 2048,
        max_batch: 8,
        max_queue: 64,
    };
    settings(&mut limits);
    let (sender, events) = channel();
    let sender = Mutex::new(sender);
    let sink = Arc::new(move |id, event| {
        let _ = sender.lock().expect("lock").send((id, event));
    });
    Rig {
        engine: Engine::with_compute(script.clone(), limits, sink).expect("starts"),
        events,
        script,
        seen: HashMap::new(),
        order: Vec::new(),
    }
}

impl Rig {
    /// Waits until `enough` holds for an event.
    fn wait(&mut self, enough: impl Fn(u64, &GenerateEvent) -> bool) {
        loop {
            let (id, event) = self
                .events
                .recv_timeout(Duration::from_secs(60))
                .expect("an event in time");
            let found = enough(id, &event);
            self.seen.entry(id).or_default().push(event.clone());
            self.order.push((id, event));
            if found {
                return;
            }
        }
    }

    fn end(&mut self, id: u64) -> Result<Completion, Failure> {
        loop {
            match self.seen.get(&id).and_then(|events| events.last()) {
                Some(GenerateEvent::Finished { completion }) => return Ok(*completion.clone()),
                Some(GenerateEvent::Failed { failure }) => return Err(failure.clone()),
                _ => self.wait(|i, _| i == id),
            }
        }
    }
}

fn tokens(prompt: Vec<u32>, max_tokens: u32) -> GenerateRequest {
    static UNIQUE: AtomicU32 = AtomicU32::new(0);
    GenerateRequest {
        prompt: Prompt::Tokens(prompt),
        tool_choice: Default::default(),
        response_format: Default::default(),
        sampling: Sampling {
            temperature: 0.0,
            max_tokens: Some(max_tokens),
            ignore_eos: true,
            ..Default::default()
        },
        adapter: AdapterChoice::Current,
        session: UNIQUE.fetch_add(1, Ordering::Relaxed).to_string(),
        turn: None,
        top_logprobs: None,
        deadline_ms: None,
    }
}

fn expect_after(last: u32, n: u32) -> Vec<u32> {
    (1..=n).map(|i| (last + i) % 300).collect()
}

#[test]
fn a_fault_in_one_sequence_fails_that_one() {
    let mut rig = rig(1, |_| {});
    for round in 0..2u64 {
        let id = |n: u64| round * 10 + n;
        rig.engine.submit(id(1), tokens(vec![50; 40], 30));
        rig.engine.submit(id(2), tokens(vec![60, PANICS], 30));
        rig.engine.submit(id(3), tokens(vec![70; 900], 30));
        rig.engine.submit(id(4), tokens(vec![80, FAILS], 30));
        rig.engine.submit(id(5), tokens(vec![90, NOT_A_NUMBER], 30));
        for n in [2, 4, 5] {
            let failure = rig.end(id(n)).expect_err("fails");
            assert_eq!(failure.code, Code::Unavailable, "{failure:?}");
        }
        for (n, last) in [(1, 50), (3, 70)] {
            let c = rig.end(id(n)).expect("goes on");
            assert_eq!(c.response_ids, expect_after(last, 30));
        }
    }
    rig.engine.shutdown(Duration::from_secs(1));
}

#[test]
fn a_long_prompt_never_keeps_a_stream_from_its_next_token() {
    let mut rig = rig(1, |_| {});
    rig.engine.submit(1, tokens(vec![5; 20], 400));
    rig.wait(|id, e| id == 1 && matches!(e, GenerateEvent::Delta { .. }));
    rig.script.batches.lock().expect("lock").clear();
    rig.engine
        .submit(2, tokens((0..14_000).map(|i| i % 290).collect(), 1));
    let items = vec![ScoreItem {
        prompt_ids: vec![7; 5000],
        response_ids: vec![1, 2, 3],
    }];
    let (done, scores) = channel();
    rig.engine.score(None, items, move |r| {
        let _ = done.send(r);
    });
    rig.end(1).expect("ends");
    let batches = rig.script.batches.lock().expect("lock").clone();
    let streaming = batches.iter().take(399).collect::<Vec<_>>();
    assert!(
        streaming.iter().all(|b| b.iter().any(|(_, len)| *len == 1)),
        "every turn advances the stream"
    );
    assert!(
        streaming.iter().any(|b| b.len() > 1),
        "the prompt advances beside it"
    );
    rig.end(2).expect("ends");
    let scores = scores.recv().expect("a reply").expect("scores");
    assert_eq!(scores, [vec![-1.0, -2.0, -3.0]]);
    rig.engine.shutdown(Duration::from_secs(1));
}

#[test]
fn scores_of_a_chunked_item_are_complete_and_in_order() {
    let rig = rig(0, |_| {});
    let answer: Vec<u32> = (0..1300).map(|i| i % 290).collect();
    let items: Vec<ScoreItem> = (1..4)
        .map(|n| ScoreItem {
            prompt_ids: vec![7; n * 300],
            response_ids: answer.clone(),
        })
        .collect();
    let (done, scores) = channel();
    let send = |done: std::sync::mpsc::Sender<_>| {
        move |r| {
            let _ = done.send(r);
        }
    };
    rig.engine.score(None, items, send(done.clone()));
    let expected: Vec<f32> = answer.iter().map(|t| -(*t as f32)).collect();
    let all = scores.recv().expect("a reply").expect("scores");
    assert_eq!(all, vec![expected; 3]);
    rig.engine.score(None, Vec::new(), send(done.clone()));
    assert_eq!(scores.recv().expect("a reply"), Ok(Vec::new()));
    let empty = ScoreItem {
        prompt_ids: Vec::new(),
        response_ids: vec![1],
    };
    rig.engine.score(None, vec![empty], send(done.clone()));
    let refused = scores.recv().expect("a reply").expect_err("no prompt");
    assert_eq!(refused.code, Code::InvalidRequest);
    let panics = ScoreItem {
        prompt_ids: vec![1, PANICS],
        response_ids: vec![1],
    };
    rig.engine.score(None, vec![panics], send(done));
    let failed = scores.recv().expect("a reply").expect_err("panics");
    assert_eq!(failed.code, Code::Unavailable);
    rig.engine.shutdown(Duration::from_secs(1));
}

#[test]
fn cancellation_and_deadlines_hold_in_the_middle_of_a_prompt() {
    let mut rig = rig(5, |limits| limits.max_batch = 1);
    let prompt: Vec<u32> = (0..30_000).map(|i| i % 290).collect();
    rig.engine.submit(1, tokens(prompt.clone(), 5));
    rig.wait(|id, e| id == 1 && matches!(e, GenerateEvent::Prefill { .. }));
    let mut queued = tokens(vec![1; 10], 5);
    queued.deadline_ms = Some(1);
    rig.engine.submit(2, queued);
    assert_eq!(rig.end(2).expect_err("expires").code, Code::Cancelled);
    rig.engine.cancel(1);
    assert_eq!(rig.end(1).expect_err("cancelled").code, Code::Cancelled);
    let whole =
        |e: &GenerateEvent| matches!(e, GenerateEvent::Prefill { done, total } if done == total);
    assert!(
        !rig.seen[&1].iter().any(whole),
        "the prompt was not finished"
    );

    let mut late = tokens(prompt.iter().map(|t| t + 1).collect(), 5);
    late.deadline_ms = Some(60);
    rig.engine.submit(3, late);
    let failure = rig.end(3).expect_err("expires");
    assert_eq!(failure.code, Code::Cancelled);
    assert!(failure.message.contains("deadline"), "{failure}");
    assert!(
        !rig.seen[&3].iter().any(whole),
        "the prompt was not finished"
    );

    // What was computed of the cancelled prompt is not lost.
    rig.engine.submit(4, tokens(prompt, 1));
    rig.end(4).expect("ends");
    let cached = rig.seen[&4].iter().find_map(|e| match e {
        GenerateEvent::Started { cached_tokens, .. } => Some(*cached_tokens),
        _ => None,
    });
    assert!(cached.is_some_and(|c| c >= 480), "{cached:?} tokens");
    rig.engine.shutdown(Duration::from_secs(1));
}

#[test]
fn a_quiet_session_is_served_before_a_busy_one() {
    let mut rig = rig(2, |limits| limits.max_batch = 2);
    for id in 1..=8 {
        // The first two hold both places until every request has arrived.
        let length = if id <= 2 { 500 } else { 30 };
        let mut request = tokens(vec![id as u32; 10], length);
        request.session = "busy".into();
        rig.engine.submit(id, request);
    }
    let mut quiet = tokens(vec![100; 10], 3);
    quiet.session = "quiet".into();
    rig.engine.submit(9, quiet);
    for id in 1..=9 {
        rig.end(id).expect("ends");
    }
    let started: Vec<u64> = rig
        .order
        .iter()
        .filter(|(_, e)| matches!(e, GenerateEvent::Started { .. }))
        .map(|(id, _)| *id)
        .collect();
    let at = started.iter().position(|id| *id == 9).expect("started");
    assert!(at <= 2, "started in the order {started:?}");
    rig.engine.shutdown(Duration::from_secs(1));
}

#[test]
fn the_queue_is_bounded_and_says_positions() {
    let mut rig = rig(5, |limits| {
        limits.max_batch = 1;
        limits.max_queue = 2;
    });
    rig.engine.submit(1, tokens(vec![1; 10], 60));
    rig.wait(|id, e| id == 1 && matches!(e, GenerateEvent::Delta { .. }));
    for id in 2..=3 {
        rig.engine.submit(id, tokens(vec![1; 10], 2));
        rig.wait(|i, e| i == id && matches!(e, GenerateEvent::Queued { .. }));
    }
    rig.engine.submit(4, tokens(vec![1; 10], 2));
    assert_eq!(rig.end(4).expect_err("too many").code, Code::Busy);
    for id in 1..=3 {
        rig.end(id).expect("ends");
    }
    let positions = |id| -> Vec<u32> {
        rig.seen[&id]
            .iter()
            .filter_map(|e| match e {
                GenerateEvent::Queued { position } => Some(*position),
                _ => None,
            })
            .collect()
    };
    assert_eq!((positions(2), positions(3)), (vec![0], vec![1, 0]));
    rig.engine.shutdown(Duration::from_secs(1));
}

#[test]
fn memory_that_runs_out_fails_one_and_the_other_goes_on() {
    let mut rig = rig(0, |limits| limits.blocks = 24);
    rig.engine.submit(1, tokens(vec![1; 10], 600));
    rig.engine.submit(2, tokens(vec![2; 10], 600));
    let ends = [rig.end(1), rig.end(2)];
    assert_eq!(ends.iter().filter(|e| e.is_ok()).count(), 1);
    let failure = ends.into_iter().find_map(Result::err).expect("one failed");
    assert_eq!(failure.code, Code::OutOfMemory, "{failure}");
    rig.engine.shutdown(Duration::from_secs(1));
}

#[test]
fn bad_input_names_what_is_wrong() {
    let mut rig = rig(0, |limits| limits.context_length = 100);
    rig.engine.submit(1, tokens(vec![1; 100], 5));
    let failure = rig.end(1).expect_err("too long");
    assert_eq!(failure.code, Code::ContextLengthExceeded);
    assert_eq!(
        failure.message,
        "This model's maximum context length is 100 tokens. However, your messages resulted in 100 tokens."
    );
    let mut unknown = tokens(vec![1], 5);
    unknown.adapter = AdapterChoice::Version(AdapterVersion(9));
    rig.engine.submit(2, unknown);
    let failure = rig.end(2).expect_err("unknown");
    assert_eq!(failure.code, Code::ModelNotFound);
    assert!(failure.message.contains("base"), "{failure}");
    let mut hot = tokens(vec![1], 5);
    hot.sampling.temperature = f32::NAN;
    rig.engine.submit(3, hot);
    let failure = rig.end(3).expect_err("no number");
    assert_eq!(failure.code, Code::InvalidRequest);
    assert!(failure.message.contains("'temperature'"), "{failure}");
    rig.engine.submit(4, tokens(vec![1, 9_999_999], 5));
    assert_eq!(rig.end(4).expect_err("no token").code, Code::InvalidRequest);
    rig.engine.submit(5, tokens(vec![1; 99], 50));
    assert_eq!(rig.end(5).expect("fits").response_ids.len(), 1);
    rig.engine.shutdown(Duration::from_secs(1));
}
