//! The transformer against the reference, against itself in other batches, and its
//! gradients against finite differences.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;
use serde_json::Value;
use spotter_model::{
    Batch, CacheSlots, KvPool, LoadOptions, LoadedModel, LoraAdapter, LoraConfig, Model, Segment,
};

fn tiny() -> LoadedModel {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny/tiny.gguf");
    LoadedModel::load(
        &path,
        &LoadOptions {
            threads: Some(2),
            ..Default::default()
        },
    )
    .expect("tiny loads")
}

fn smollm() -> Option<LoadedModel> {
    let Some(path) = std::env::var_os("SPOTTER_TEST_MODEL").map(PathBuf::from) else {
        println!("SPOTTER_TEST_MODEL is not set: the real model was not tested");
        return None;
    };
    Some(LoadedModel::load(&path, &LoadOptions::default()).expect("the real model loads"))
}

fn golden() -> Value {
    serde_json::from_str(include_str!("fixtures/smollm2-135m.json")).expect("fixture")
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .expect("ids")
        .iter()
        .map(|v| v.as_u64().expect("id") as u32)
        .collect()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor
        .flatten_all()
        .and_then(|t| t.to_vec1())
        .expect("values")
}

fn root(tokens: &[u32]) -> Segment {
    Segment {
        tokens: tokens.to_vec(),
        ..Default::default()
    }
}

/// Log-probabilities of `tokens[1..]` in one plain batch.
fn plain(model: &Model, tokens: &[u32], adapter: Option<Arc<LoraAdapter>>) -> Vec<f32> {
    let batch = Batch {
        segments: vec![Segment {
            adapter,
            ..root(tokens)
        }],
    };
    let hidden = model.forward(&batch, None).expect("forward");
    let hidden = hidden.narrow(0, 0, tokens.len() - 1).expect("rows");
    floats(
        &model
            .logprobs(&hidden, &tokens[1..], 1.0)
            .expect("logprobs")
            .logprobs,
    )
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// An adapter whose every matrix is non-zero.
fn busy_adapter(model: &Model, seed: u64) -> LoraAdapter {
    let config = LoraConfig {
        rank: 4,
        ..Default::default()
    };
    let fresh = LoraAdapter::init(model.config(), config.clone(), seed).expect("init");
    let mut tensors = fresh.to_tensors().expect("tensors");
    for (i, (name, tensor)) in tensors.iter_mut().enumerate() {
        if name.contains("lora_B") {
            let n = tensor.elem_count();
            let values: Vec<f32> = (0..n)
                .map(|j| (((i * 131 + j * 29 + seed as usize) % 97) as f32 / 48.5 - 1.0) * 0.02)
                .collect();
            *tensor = Tensor::from_vec(values, tensor.shape(), tensor.device()).expect("tensor");
        }
    }
    LoraAdapter::from_tensors(model.config(), config, &tensors).expect("adapter")
}

#[test]
fn the_tokeniser_gives_the_reference_ids() {
    let Some(loaded) = smollm() else { return };
    let golden = golden();
    let prompt = golden["prompt"].as_str().expect("prompt");
    assert_eq!(
        loaded.tokenizer.encode(prompt).expect("encodes"),
        ids(&golden["prompt_ids"])
    );
}

#[test]
fn log_probabilities_and_greedy_answers_equal_the_reference() {
    let Some(loaded) = smollm() else { return };
    let golden = golden();
    let (prompt, greedy) = (ids(&golden["prompt_ids"]), ids(&golden["greedy"]));
    let expected: Vec<f32> = golden["prompt_token_logprobs"]
        .as_array()
        .expect("logprobs")
        .iter()
        .map(|v| v.as_f64().expect("number") as f32)
        .collect();
    let ours = plain(&loaded.model, &prompt, None);
    let worst = largest_difference(&ours, &expected);
    println!("prompt log-probabilities: largest difference {worst:.2e}");
    assert!(worst < 1e-4, "off by {worst}");

    // Greedy decoding through the cache, one token at a time.
    let pool = KvPool::new(loaded.model.config(), 8);
    let mut tokens = prompt.clone();
    let mut past = 0;
    let mut answer = Vec::new();
    while answer.len() < greedy.len() {
        let cache = CacheSlots {
            blocks: (0..8).collect(),
            past,
            write: true,
        };
        let segment = Segment {
            cache: Some(cache),
            ..root(&tokens[past..])
        };
        let batch = Batch {
            segments: vec![segment],
        };
        let hidden = loaded.model.forward(&batch, Some(&pool)).expect("forward");
        let last = hidden
            .narrow(0, hidden.dim(0).expect("rows") - 1, 1)
            .expect("last row");
        let logits = floats(&loaded.model.logits(&last).expect("logits"));
        let best = (0..logits.len())
            .max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
            .expect("a token");
        if answer.is_empty() {
            let (max, sum) = logits.iter().fold((f32::MIN, 0f64), |(m, s), l| {
                (m.max(*l), s + f64::from(*l).exp())
            });
            assert!(max.is_finite());
            for entry in golden["top5_first"].as_array().expect("top five") {
                let (id, logprob) = match entry {
                    Value::Array(pair) => (pair[0].as_u64(), pair[1].as_f64()),
                    other => (other["id"].as_u64(), other["logprob"].as_f64()),
                };
                let (id, logprob) = (id.expect("id") as usize, logprob.expect("logprob"));
                let ours = f64::from(logits[id]) - sum.ln();
                assert!(
                    (ours - logprob).abs() < 2e-5,
                    "token {id}: {ours} and {logprob}"
                );
            }
        }
        past = tokens.len();
        tokens.push(best as u32);
        answer.push(best as u32);
    }
    assert_eq!(answer, greedy);
}

#[test]
fn chunked_batched_cached_and_shared_prefixes_agree() {
    let loaded = tiny();
    let model = &loaded.model;
    let adapter = Arc::new(busy_adapter(model, 3));
    let tokens: Vec<u32> = (0..90).map(|i| (i * 37 + 11) % 400 + 3).collect();
    let expected = plain(model, &tokens, Some(adapter.clone()));

    // In chunks of uneven length, through the cache, beside a stranger without an adapter.
    let pool = KvPool::new(model.config(), 16);
    let stranger: Vec<u32> = (0..90).map(|i| (i * 53 + 7) % 400 + 3).collect();
    let expected_stranger = plain(model, &stranger, None);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut past = 0;
    for len in [1, 7, 32, 1, 40, 9] {
        let slots = |blocks: [u32; 3]| {
            Some(CacheSlots {
                blocks: blocks.to_vec(),
                past,
                write: true,
            })
        };
        let batch = Batch {
            segments: vec![
                Segment {
                    cache: slots([4, 9, 2]),
                    adapter: Some(adapter.clone()),
                    ..root(&tokens[past..past + len])
                },
                Segment {
                    cache: slots([0, 1, 7]),
                    ..root(&stranger[past..past + len])
                },
            ],
        };
        let hidden = model.forward(&batch, Some(&pool)).expect("forward");
        for (row, (all, out)) in [(&tokens, &mut ours), (&stranger, &mut theirs)]
            .into_iter()
            .enumerate()
        {
            let end = (past + len).min(89);
            let rows = hidden.narrow(0, row * len, end - past).expect("rows");
            let lp = model
                .logprobs(&rows, &all[past + 1..end + 1], 1.0)
                .expect("logprobs");
            out.extend(floats(&lp.logprobs));
        }
        past += len;
    }
    assert!(largest_difference(&ours, &expected) < 1e-4);
    assert!(largest_difference(&theirs, &expected_stranger) < 1e-4);

    // As a forest: a shared prompt, two continuations.
    let (prompt, a, b) = (&tokens[..50], &tokens[50..], &stranger[..30]);
    let with = |tokens: &[u32], parent| Segment {
        parent,
        adapter: Some(adapter.clone()),
        ..root(tokens)
    };
    let batch = Batch {
        segments: vec![with(prompt, None), with(a, Some(0)), with(b, Some(0))],
    };
    let hidden = model.forward(&batch, None).expect("forward");
    let rows = hidden.narrow(0, 50, 39).expect("rows");
    let shared = floats(
        &model
            .logprobs(&rows, &a[1..], 1.0)
            .expect("logprobs")
            .logprobs,
    );
    assert!(largest_difference(&shared, &expected[50..]) < 1e-4);
    let joined: Vec<u32> = prompt.iter().chain(b).copied().collect();
    let expected_b = plain(model, &joined, Some(adapter));
    let rows = hidden.narrow(0, 90, 29).expect("rows");
    let shared = floats(
        &model
            .logprobs(&rows, &b[1..], 1.0)
            .expect("logprobs")
            .logprobs,
    );
    assert!(largest_difference(&shared, &expected_b[50..]) < 1e-4);
}

#[test]
fn entropy_and_temperature_are_those_of_the_softmax() {
    let loaded = tiny();
    let batch = Batch {
        segments: vec![root(&[5, 6, 7, 8])],
    };
    let hidden = loaded.model.forward(&batch, None).expect("forward");
    let logits = floats(&loaded.model.logits(&hidden).expect("logits"));
    let vocab = loaded.model.config().vocab;
    for temperature in [1.0f32, 0.6] {
        let result = loaded
            .model
            .logprobs(&hidden, &[9, 10, 11, 12], temperature)
            .expect("logprobs");
        let ours = floats(&result.logprobs);
        for (row, target) in [9usize, 10, 11, 12].into_iter().enumerate() {
            let z: Vec<f64> = logits[row * vocab..(row + 1) * vocab]
                .iter()
                .map(|l| f64::from(*l / temperature))
                .collect();
            let log_z = z.iter().map(|z| z.exp()).sum::<f64>().ln();
            let entropy: f64 = z.iter().map(|z| -(z - log_z).exp() * (z - log_z)).sum();
            assert!((f64::from(ours[row]) - (z[target] - log_z)).abs() < 1e-5);
            assert!((f64::from(result.entropy[row]) - entropy).abs() < 1e-4);
        }
    }
}

/// Σ weight · logprob over a forest with a shared prompt.
fn weighted_loss(
    model: &Model,
    adapter: &Arc<LoraAdapter>,
    pool: Option<(&KvPool, usize)>,
) -> (f32, spotter_model::Gradients) {
    let prompt: Vec<u32> = (0..40).map(|i| (i * 17 + 5) % 400 + 3).collect();
    let answers: [Vec<u32>; 2] = [
        (0..9).map(|i| (i * 71 + 1) % 400 + 3).collect(),
        (0..35).map(|i| (i * 13 + 2) % 400 + 3).collect(),
    ];
    let with = |tokens: &[u32], parent, cache| Segment {
        tokens: tokens.to_vec(),
        parent,
        cache,
        adapter: Some(adapter.clone()),
    };
    let segments = match pool {
        None => vec![
            with(&prompt, None, None),
            with(&answers[0], Some(0), None),
            with(&answers[1], Some(0), None),
        ],
        Some((_, past)) => {
            let cache = || {
                Some(CacheSlots {
                    blocks: vec![0, 1],
                    past,
                    write: false,
                })
            };
            vec![
                with(&answers[0], None, cache()),
                with(&answers[1], None, cache()),
            ]
        }
    };
    let batch = Batch { segments };
    let first = batch.len() - 44;
    let targets: Vec<u32> = (0..44).map(|i| (i * 31 + 4) % 400 + 3).collect();
    let weights: Vec<f32> = (0..44).map(|i| (i as f32 * 0.7).sin() / 10.0).collect();
    let (value, gradients, ()) = model
        .value_and_gradients(&batch, pool.map(|(p, _)| p), |hidden| {
            let rows = hidden.narrow(0, first, 44)?;
            let lp = model.logprobs(&rows, &targets, 0.8)?.logprobs;
            let w = Tensor::from_slice(&weights, 44, lp.device())?;
            Ok(((lp * w)?.sum_all()?, ()))
        })
        .expect("gradients");
    (value, gradients)
}

fn nudged(
    model: &Model,
    adapter: &LoraAdapter,
    name: &str,
    at: usize,
    by: f32,
) -> Arc<LoraAdapter> {
    let mut tensors = adapter.to_tensors().expect("tensors");
    let tensor = &tensors[name];
    let mut values = floats(tensor);
    values[at] += by;
    let changed = Tensor::from_vec(values, tensor.shape(), tensor.device()).expect("tensor");
    tensors.insert(name.to_owned(), changed);
    let adapter = LoraAdapter::from_tensors(model.config(), adapter.config().clone(), &tensors)
        .expect("adapter");
    Arc::new(adapter.trainable().expect("trainable"))
}

fn check_against_finite_differences(
    pool: Option<(&KvPool, usize)>,
    model: &Model,
    adapter: &LoraAdapter,
) {
    let trainable = Arc::new(adapter.trainable().expect("trainable"));
    let (_, gradients) = weighted_loss(model, &trainable, pool);
    assert_eq!(
        gradients.len(),
        trainable.vars().len(),
        "every matrix has a gradient"
    );
    for (name, gradient) in &gradients {
        let g = floats(gradient);
        assert!(g.iter().any(|v| *v != 0.0), "{name} has a zero gradient");
        // The largest entry, where rounding matters least.
        let at = (0..g.len())
            .max_by(|a, b| g[*a].abs().total_cmp(&g[*b].abs()))
            .expect("an entry");
        let h = 1e-2;
        let (up, _) = weighted_loss(model, &nudged(model, adapter, name, at, h), pool);
        let (down, _) = weighted_loss(model, &nudged(model, adapter, name, at, -h), pool);
        let numeric = (up - down) / (2.0 * h);
        let error = (numeric - g[at]).abs() / g[at].abs().max(1e-3);
        assert!(error < 2e-2, "{name}[{at}]: {} and {numeric}", g[at]);
    }
}

#[test]
fn gradients_of_every_matrix_equal_finite_differences() {
    let loaded = tiny();
    let adapter = busy_adapter(&loaded.model, 1);
    check_against_finite_differences(None, &loaded.model, &adapter);
}

#[test]
fn gradients_through_responses_only_equal_finite_differences() {
    let loaded = tiny();
    let model = &loaded.model;
    let adapter = busy_adapter(model, 2);
    let pool = KvPool::new(model.config(), 2);
    let prompt: Vec<u32> = (0..40).map(|i| (i * 17 + 5) % 400 + 3).collect();
    let cache = CacheSlots {
        blocks: vec![0, 1],
        past: 0,
        write: true,
    };
    let segment = Segment {
        cache: Some(cache),
        ..root(&prompt)
    };
    model
        .forward(
            &Batch {
                segments: vec![segment],
            },
            Some(&pool),
        )
        .expect("prompt");
    check_against_finite_differences(Some((&pool, 40)), model, &adapter);
}

#[test]
fn adapters_survive_the_disk_and_foreign_ones_are_refused() {
    let loaded = tiny();
    let adapter = busy_adapter(&loaded.model, 4);
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("adapter");
    spotter_model::adapter_file::save_peft(&adapter, "tiny", &path, None).expect("saves");
    let back = spotter_model::adapter_file::load_peft(&path, loaded.model.config()).expect("loads");
    assert_eq!(back.config(), adapter.config());
    for ((name, a), (_, b)) in adapter
        .to_tensors()
        .expect("a")
        .iter()
        .zip(&back.to_tensors().expect("b"))
    {
        assert_eq!(floats(a), floats(b), "{name}");
    }
    assert!(
        spotter_model::adapter_file::save_peft(&adapter, "tiny", &path, None).is_err(),
        "nothing is overwritten"
    );

    let mut other = loaded.model.config().clone();
    other.hidden += 32;
    let error = spotter_model::adapter_file::load_peft(&path, &other).expect_err("another base");
    assert!(error.to_string().contains("shape"), "{error}");
    std::fs::write(path.join("adapter_model.safetensors"), b"short").expect("writes");
    assert!(spotter_model::adapter_file::load_peft(&path, loaded.model.config()).is_err());
}

#[test]
fn recorded_ids_are_spliced_into_the_prompt() {
    use spotter_core::chat::{Message, Role};
    let loaded = tiny();
    let t = &loaded.tokenizer;
    // "the" as three single-byte tokens: never what the tokeniser itself would give.
    let mut odd: Vec<u32> = "the"
        .bytes()
        .map(|b| t.id(&(b as char).to_string()).expect("byte"))
        .collect();
    assert_ne!(
        t.encode("the").expect("encodes"),
        odd,
        "the test needs a second tokenisation"
    );
    odd.push(t.id("<|im_end|>").expect("end"));
    let mut messages = vec![
        Message::text(Role::User, "say it"),
        Message {
            token_ids: Some(odd.clone()),
            ..Message::text(Role::Assistant, "the")
        },
        Message::text(Role::User, "again"),
    ];
    let vars = serde_json::Map::new();
    let ids = loaded
        .template
        .prompt_ids(t, &messages, &[], &vars)
        .expect("ids");
    assert!(
        ids.windows(odd.len()).any(|w| w == odd),
        "the recorded ids are in the prompt"
    );
    messages[1].token_ids = None;
    let plain = loaded
        .template
        .prompt_ids(t, &messages, &[], &vars)
        .expect("ids");
    let text = |ids: &[u32]| {
        ids.iter()
            .flat_map(|i| t.token_bytes(*i))
            .copied()
            .collect::<Vec<u8>>()
    };
    assert_eq!(text(&ids), text(&plain), "and the text is the same");
}
