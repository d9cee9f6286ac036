//! Speed and memory of the transformer alone, one JSON line per row.
//!
//! usage: bench_model MODEL.gguf THREADS CASE
//!
//! A case is `prefill:TOKENS`, `decode:PAST:SEQUENCES`, or `train:SEQUENCES:TOKENS`
//! (forward and backward of a clipped policy gradient through LoRA r16 on all seven
//! linears, with per-layer recomputation). Run one case per process, so that the peak
//! memory is that case's own.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;
use spotter_model::{
    Batch, CacheSlots, KvPool, LoadOptions, LoadedModel, LoraAdapter, LoraConfig, Segment,
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Repetitions; the median counts.
const REPEAT: usize = 5;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, threads, case] = arguments.as_slice() else {
        return Err("usage: bench_model MODEL.gguf THREADS CASE".into());
    };
    let options = LoadOptions {
        threads: Some(threads.parse()?),
        ..Default::default()
    };
    let loaded = LoadedModel::load(Path::new(model), &options)?;
    let parts: Vec<&str> = case.split(':').collect();
    let number =
        |i: usize| -> Outcome<usize> { Ok(parts.get(i).ok_or("the case is incomplete")?.parse()?) };
    let (tokens, mut seconds) = match parts[0] {
        "prefill" => (number(1)?, prefill(&loaded, number(1)?)?),
        "decode" => (number(2)?, decode(&loaded, number(1)?, number(2)?)?),
        "train" => (
            number(1)? * number(2)?,
            train(&loaded, number(1)?, number(2)?)?,
        ),
        other => return Err(format!("'{other}' is no case").into()),
    };
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let row = serde_json::json!({
        "section": if parts[0] == "train" { "training" } else { "model" },
        "engine": "Spotter",
        "row": case,
        "value": tokens as f64 / median,
        "unit": "tokens/s",
        "peak_mib": peak_mib(),
    });
    println!("{row}");
    Ok(())
}

fn ids(n: usize, seed: u32) -> Vec<u32> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            20 + (state >> 8) % 49_000
        })
        .collect()
}

fn slots(sequence: usize, blocks: usize, past: usize) -> Option<CacheSlots> {
    let first = (sequence * blocks) as u32;
    Some(CacheSlots {
        blocks: (first..first + blocks as u32).collect(),
        past,
        write: true,
    })
}

fn prefill(loaded: &LoadedModel, n: usize) -> Outcome<Vec<f64>> {
    let blocks = n.div_ceil(KvPool::BLOCK_TOKENS);
    let pool = KvPool::new(loaded.model.config(), blocks);
    let tokens = ids(n, 7);
    let mut seconds = Vec::new();
    for _ in 0..REPEAT {
        let began = Instant::now();
        let batch = Batch {
            segments: vec![Segment {
                tokens: tokens.clone(),
                cache: slots(0, blocks, 0),
                ..Default::default()
            }],
        };
        let hidden = loaded.model.forward(&batch, Some(&pool))?;
        loaded.model.logits(&hidden.narrow(0, n - 1, 1)?)?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

/// Seconds per decoding step of `sequences` sequences with `past` tokens behind them.
fn decode(loaded: &LoadedModel, past: usize, sequences: usize) -> Outcome<Vec<f64>> {
    let steps = 32;
    let blocks = (past + steps).div_ceil(KvPool::BLOCK_TOKENS);
    let pool = KvPool::new(loaded.model.config(), blocks * sequences);
    for sequence in 0..sequences {
        let batch = Batch {
            segments: vec![Segment {
                tokens: ids(past, sequence as u32),
                cache: slots(sequence, blocks, 0),
                ..Default::default()
            }],
        };
        loaded.model.forward(&batch, Some(&pool))?;
    }
    let mut seconds = Vec::new();
    for step in 0..steps {
        let began = Instant::now();
        let segments = (0..sequences)
            .map(|sequence| Segment {
                tokens: ids(1, (step * 31 + sequence) as u32),
                cache: slots(sequence, blocks, past + step),
                ..Default::default()
            })
            .collect();
        let hidden = loaded.model.forward(&Batch { segments }, Some(&pool))?;
        loaded.model.logits(&hidden)?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

fn train(loaded: &LoadedModel, sequences: usize, n: usize) -> Outcome<Vec<f64>> {
    let adapter = LoraAdapter::init(loaded.model.config(), LoraConfig::default(), 7)?;
    let adapter = Arc::new(adapter);
    let mut seconds = Vec::new();
    let tokens: Vec<Vec<u32>> = (0..sequences).map(|s| ids(n + 1, s as u32 + 1)).collect();
    let targets: Vec<u32> = tokens.iter().flat_map(|t| t[1..].to_vec()).collect();
    let advantages: Vec<f32> = ids(targets.len(), 3)
        .iter()
        .map(|v| (v % 2000) as f32 / 1000.0 - 1.0)
        .collect();
    let advantages = Tensor::from_vec(advantages, targets.len(), &candle_core::Device::Cpu)?;
    for _ in 0..REPEAT {
        let began = Instant::now();
        let batch = Batch {
            segments: tokens
                .iter()
                .map(|t| Segment {
                    tokens: t[..n].to_vec(),
                    adapter: Some(adapter.clone()),
                    ..Default::default()
                })
                .collect(),
        };
        let (_, gradients, ()) = loaded.model.value_and_gradients(&batch, None, |hidden| {
            let new = loaded.model.logprobs(hidden, &targets, 1.0)?.logprobs;
            let ratio = (&new - new.detach())?.exp()?;
            let clipped = ratio.clamp(0.8, 1.2)?;
            let surrogate = (ratio * &advantages)?.minimum(&(clipped * &advantages)?)?;
            Ok((surrogate.mean_all()?.neg()?, ()))
        })?;
        if gradients.is_empty() {
            return Err("there are no gradients".into());
        }
        seconds.push(began.elapsed().as_secs_f64());
    }
    Ok(seconds)
}

/// Peak resident memory of this process, MiB; 0 where the platform does not tell.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|kb| kb.trim().parse::<f64>().ok())
        .map_or(0.0, |kb| kb / 1024.0)
}
