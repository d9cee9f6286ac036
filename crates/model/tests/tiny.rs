//! The committed tiny model is what its generator writes, and its two forms are one model.

#[allow(dead_code, reason = "the generator's main is not called here")]
#[path = "../examples/make_tiny.rs"]
mod make_tiny;

use std::path::{Path, PathBuf};

use spotter_model::{Batch, LoadOptions, LoadedModel, Segment};

fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny")
}

#[test]
fn the_generator_reproduces_the_committed_files() {
    let folder = tempfile::tempdir().unwrap();
    make_tiny::write(folder.path()).unwrap();
    for name in [
        "tiny.gguf",
        "hf/config.json",
        "hf/tokenizer_config.json",
        "hf/tokenizer.json",
        "hf/model.safetensors",
    ] {
        let fresh = std::fs::read(folder.path().join(name)).unwrap();
        let kept = std::fs::read(committed().join(name)).unwrap();
        assert!(fresh == kept, "{name} is not what make_tiny writes");
    }
}

#[test]
fn the_gguf_file_and_the_folder_are_one_model() {
    let options = LoadOptions::default();
    let gguf = LoadedModel::load(&committed().join("tiny.gguf"), &options).unwrap();
    let folder = LoadedModel::load(&committed().join("hf"), &options).unwrap();
    assert_eq!(gguf.model.config(), folder.model.config());
    assert_eq!(gguf.template.source(), folder.template.source());
    assert_eq!(folder.quantisation, "F32");
    assert_eq!(folder.name, "hf");

    let text = "<|im_start|>user\nWhat can the water do with 3 eggs? 水<|im_end|>\n";
    let tokens = gguf.tokenizer.encode(text).unwrap();
    assert_eq!(tokens, folder.tokenizer.encode(text).unwrap());
    assert_eq!(gguf.tokenizer.end_of_turn(), folder.tokenizer.end_of_turn());

    let targets = &tokens[1..];
    let logprobs = |loaded: &LoadedModel| -> Vec<f32> {
        let batch = Batch {
            segments: vec![Segment {
                tokens: tokens.clone(),
                ..Default::default()
            }],
        };
        let hidden = loaded.model.forward(&batch, None).unwrap();
        let rows = hidden.narrow(0, 0, targets.len()).unwrap();
        let values = loaded.model.logprobs(&rows, targets, 1.0).unwrap();
        values.logprobs.to_vec1().unwrap()
    };
    let (a, b) = (logprobs(&gguf), logprobs(&folder));
    assert!(a.iter().any(|v| *v < -0.5), "log-probabilities are real");
    for (i, (a, b)) in a.iter().zip(&b).enumerate() {
        assert!((a - b).abs() < 1e-5, "position {i}: {a} and {b}");
    }
}
