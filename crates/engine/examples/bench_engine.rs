//! The serving engine measured against itself: one JSON line per row.
//!
//! usage: bench_engine [MODEL]
//!
//! The model comes from the command line or `SPOTTER_TEST_MODEL`. `SPOTTER_BENCH_TOKENS`
//! sets the length of the long conversation (14000), `SPOTTER_BENCH_THREADS` the threads (2).

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;
use spotter_core::AdapterVersion;
use spotter_core::generate::{
    AdapterChoice, Completion, GenerateEvent, GenerateRequest, Prompt, Sampling,
};
use spotter_engine::{Engine, EngineSettings};
use spotter_model::{KvPool, LoadOptions, LoadedModel, LoraAdapter, LoraConfig};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let model = std::env::args()
        .nth(1)
        .or_else(|| std::env::var("SPOTTER_TEST_MODEL").ok())
        .ok_or("usage: bench_engine MODEL.gguf (or SPOTTER_TEST_MODEL)")?;
    let number = |name: &str, default: usize| {
        let set = std::env::var(name).ok().and_then(|v| v.parse().ok());
        set.unwrap_or(default)
    };
    let long = number("SPOTTER_BENCH_TOKENS", 14_000);
    let options = LoadOptions {
        threads: Some(number("SPOTTER_BENCH_THREADS", 2)),
        ..Default::default()
    };
    let loaded = Arc::new(LoadedModel::load(&PathBuf::from(model), &options)?);
    let (sender, events) = channel();
    let sender = Mutex::new(sender);
    let settings = EngineSettings {
        context_length: long + 4096,
        blocks: (2 * long + 16 * 1024) / KvPool::BLOCK_TOKENS,
        max_batch: 16,
        max_queue: 64,
    };
    let sink = Arc::new(move |id, event| {
        if let Ok(sender) = sender.lock() {
            // Nobody listens any more when the bench has ended.
            let _ = sender.send((Instant::now(), id, event));
        }
    });
    let mut bench = Bench {
        vocab: loaded.model.config().vocab as u32,
        engine: Engine::start(loaded.clone(), settings, sink)?,
        events,
        next: 0,
    };
    bench.batching()?;
    bench.beside_a_prompt(long)?;
    bench.next_turn(long)?;
    bench.swaps(&loaded)?;
    bench.engine.shutdown(Duration::from_secs(1));
    Ok(())
}

fn row(row: &str, value: f64, unit: &str, target: &str, against: &str) {
    let line = json!({"section": "engine", "engine": "Spotter", "row": row, "value": value,
        "unit": unit, "target": target, "against": against});
    println!("{line}");
}

/// The value below which this share of the values lies.
fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len() as f64 * share) as usize;
    values
        .get(at.min(values.len().saturating_sub(1)))
        .copied()
        .unwrap_or(f64::NAN)
}

struct Bench {
    engine: Engine,
    events: Receiver<(Instant, u64, GenerateEvent)>,
    vocab: u32,
    next: u64,
}

/// When each token came, and how it ended.
#[derive(Default)]
struct Stream {
    tokens: Vec<Instant>,
    cached: u32,
    completion: Option<Completion>,
    ended: bool,
}

impl Stream {
    fn gaps(&self) -> Vec<f64> {
        let pairs = self.tokens.windows(2);
        pairs
            .map(|w| w[1].duration_since(w[0]).as_secs_f64() * 1e3)
            .collect()
    }
}

impl Bench {
    fn ids(&self, n: usize, seed: u64) -> Vec<u32> {
        let mut state = seed as u32 ^ 0x9E37_79B9;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                20 + (state >> 8) % (self.vocab - 20)
            })
            .collect()
    }

    fn submit(&mut self, prompt: Vec<u32>, max_tokens: u32) -> u64 {
        self.next += 1;
        let id = self.next;
        let request = GenerateRequest {
            prompt: Prompt::Tokens(prompt),
            tool_choice: Default::default(),
            response_format: Default::default(),
            sampling: Sampling {
                seed: Some(id),
                max_tokens: Some(max_tokens),
                ignore_eos: true,
                ..Default::default()
            },
            adapter: AdapterChoice::Current,
            session: id.to_string(),
            turn: None,
            // Makes every token an event of its own.
            top_logprobs: Some(0),
            deadline_ms: None,
        };
        self.engine.submit(id, request);
        id
    }

    /// Reads events until `enough` holds.
    fn follow(
        &mut self,
        streams: &mut HashMap<u64, Stream>,
        enough: impl Fn(&HashMap<u64, Stream>) -> bool,
    ) -> Outcome<()> {
        while !enough(streams) {
            let (at, id, event) = self.events.recv_timeout(Duration::from_secs(600))?;
            let stream = streams.entry(id).or_default();
            match event {
                GenerateEvent::Started { cached_tokens, .. } => stream.cached = cached_tokens,
                GenerateEvent::Delta { logprobs, .. } if !logprobs.is_empty() => {
                    stream.tokens.push(at);
                }
                GenerateEvent::Finished { completion } => {
                    stream.completion = Some(*completion);
                    stream.ended = true;
                }
                GenerateEvent::Failed { .. } => stream.ended = true,
                _ => {}
            }
        }
        Ok(())
    }

    fn run(&mut self, prompts: Vec<Vec<u32>>, max_tokens: u32) -> Outcome<Vec<Stream>> {
        let ids: Vec<u64> = prompts
            .into_iter()
            .map(|p| self.submit(p, max_tokens))
            .collect();
        let mut streams = HashMap::new();
        self.follow(&mut streams, |s| {
            ids.iter().all(|id| s.get(id).is_some_and(|s| s.ended))
        })?;
        Ok(ids.iter().filter_map(|id| streams.remove(id)).collect())
    }

    fn batching(&mut self) -> Outcome<()> {
        let mut single = f64::NAN;
        for n in [1usize, 4, 16] {
            let mut rates = Vec::new();
            for repeat in 0..3 {
                let prompts = (0..n).map(|i| self.ids(32, (repeat * 100 + i) as u64 + 1));
                let prompts = prompts.collect();
                let streams = self.run(prompts, 48)?;
                let all: Vec<Instant> = streams.iter().flat_map(|s| s.tokens.clone()).collect();
                let (Some(first), Some(last)) = (all.iter().min(), all.iter().max()) else {
                    return Err("no token came".into());
                };
                let seconds = last.duration_since(*first).as_secs_f64();
                rates.push((all.len() - n) as f64 / seconds);
            }
            let rate = quantile(&mut rates, 0.5);
            if n == 1 {
                single = rate;
            }
            let name = format!("decode, {n} streams");
            row(&name, rate, "tokens/s", "", "");
            if n > 1 {
                let name = format!("gain of {n} streams over one");
                row(&name, rate / single, "x", "> 1", "one stream");
            }
        }
        Ok(())
    }

    fn beside_a_prompt(&mut self, long: usize) -> Outcome<()> {
        let prompt = self.ids(32, 77);
        let alone = self.run(vec![prompt.clone()], 96)?;
        let idle = quantile(&mut alone[0].gaps(), 0.95);
        let stream = self.submit(prompt, 4000);
        let mut streams = HashMap::new();
        self.follow(&mut streams, |s| {
            s.get(&stream).is_some_and(|s| s.tokens.len() > 4)
        })?;
        let begun = Instant::now();
        let tokens = self.ids(long, 78);
        let prefill = self.submit(tokens, 1);
        self.follow(&mut streams, |s| {
            s.get(&prefill).is_some_and(|s| s.ended) || s.get(&stream).is_some_and(|s| s.ended)
        })?;
        let took = begun.elapsed().as_secs_f64();
        self.engine.cancel(stream);
        self.engine.cancel(prefill);
        self.follow(&mut streams, |s| s.values().all(|s| s.ended))?;
        let mut during = streams
            .remove(&stream)
            .map(|mut s| {
                s.tokens.retain(|at| *at >= begun);
                s.gaps()
            })
            .unwrap_or_default();
        let p95 = quantile(&mut during, 0.95);
        let name = format!("inter-token p95 beside a prefill of {long}");
        row("inter-token p95, idle", idle, "ms", "", "");
        row(&name, p95, "ms", "", "");
        row(
            "inter-token p95 beside a prefill, relative",
            p95 / idle,
            "x",
            "<= 2",
            "idle",
        );
        row(
            &format!("prefill of {long} beside a stream"),
            took,
            "s",
            "",
            "",
        );
        Ok(())
    }

    fn next_turn(&mut self, long: usize) -> Outcome<()> {
        let mut prompt = self.ids(long, 79);
        let cold = self.run(vec![prompt.clone()], 40)?;
        let answer = cold[0].completion.as_ref().ok_or("the cold turn failed")?;
        let cold_ms = answer.first_token_ms as f64;
        prompt.extend(&answer.response_ids);
        let mut warm = Vec::new();
        let mut reused = f64::NAN;
        for turn in 0..5 {
            prompt.extend(self.ids(60, 80 + turn));
            let next = self.run(vec![prompt.clone()], 20)?;
            let answer = next[0].completion.as_ref().ok_or("a warm turn failed")?;
            warm.push(answer.first_token_ms as f64);
            reused = f64::from(next[0].cached) / prompt.len() as f64;
            prompt.extend(&answer.response_ids);
        }
        let warm = quantile(&mut warm, 0.5);
        row(
            &format!("first token, cold, {long} tokens"),
            cold_ms,
            "ms",
            "",
            "",
        );
        row("first token of the next turn", warm, "ms", "", "");
        row(
            "first token of the next turn, relative",
            100.0 * warm / cold_ms,
            "%",
            "<= 5",
            "cold",
        );
        row(
            "prompt reused on the next turn",
            100.0 * reused,
            "%",
            ">= 95",
            "",
        );
        Ok(())
    }

    fn swaps(&mut self, loaded: &LoadedModel) -> Outcome<()> {
        for version in 1..=2 {
            let config = LoraConfig::default();
            let adapter = LoraAdapter::init(loaded.model.config(), config, version)?;
            self.engine
                .insert_adapter(AdapterVersion(version as u32), adapter);
        }
        let mut tails = [Vec::new(), Vec::new()];
        let mut failed = 0;
        let mut replies = Vec::new();
        for swapping in [false, true, false, true] {
            // Both times every stream goes through an adapter, so only the swap differs.
            self.engine.swap(None, AdapterVersion(1), |_| {});
            let ids: Vec<u64> = (0..16)
                .map(|i| {
                    let prompt = self.ids(32, 200 + i);
                    self.submit(prompt, 60)
                })
                .collect();
            let mut streams = HashMap::new();
            self.follow(&mut streams, |s| {
                ids.iter()
                    .all(|id| s.get(id).is_some_and(|s| !s.tokens.is_empty()))
            })?;
            let (done, answers) = channel();
            if swapping {
                for i in 0..50u32 {
                    let (done, asked) = (done.clone(), Instant::now());
                    let to = AdapterVersion(1 + (i + 1) % 2);
                    self.engine.swap(None, to, move |r| {
                        // The receiver outlives every swap.
                        let _ = done.send((r.is_ok(), asked.elapsed().as_secs_f64() * 1e3));
                    });
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            drop(done);
            self.follow(&mut streams, |s| s.values().all(|s| s.ended))?;
            for (ok, ms) in answers {
                failed += usize::from(!ok);
                replies.push(ms);
            }
            failed += streams.values().filter(|s| s.completion.is_none()).count();
            let gaps = streams.values().flat_map(Stream::gaps);
            tails[usize::from(swapping)].extend(gaps);
        }
        let [still, swapped] = &mut tails;
        let (still, swapped) = (quantile(still, 0.99), quantile(swapped, 0.99));
        row(
            "dropped or refused, 16 streams, 50 swaps",
            failed as f64,
            "",
            "0",
            "",
        );
        row("inter-token p99 without swaps", still, "ms", "", "");
        row("inter-token p99 with 50 swaps", swapped, "ms", "", "");
        row(
            "latency added by swaps, p99",
            swapped - still,
            "ms",
            "<= 50",
            "without swaps",
        );
        row(
            "time to a swap's effect, p99",
            quantile(&mut replies, 0.99),
            "ms",
            "",
            "",
        );
        Ok(())
    }
}
