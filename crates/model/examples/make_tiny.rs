//! Writes the tiny test model: Llama-shaped, random weights from a fixed seed, a
//! byte-level vocabulary, a tool-capable chat template and a long context. It is written
//! as a GGUF file, and as a Hugging Face folder with the same values in F32.
//!
//! usage: make_tiny FOLDER     (writes FOLDER/tiny.gguf and FOLDER/hf/)

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use spotter_model::Tokenizer;
use spotter_model::gguf::{Gguf, GgufModel, GgufWriter, Value, rope_permutation};
use spotter_model::weights::{BlockType, WeightSource};

const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 128;
const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const VOCAB: usize = 512;

const TEMPLATE: &str = "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- 'Functions:\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools>\\nCall one as <tool_call>\\n{\"name\": ..., \"arguments\": ...}\\n</tool_call><|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}{%- if message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}{%- elif message.role == 'system' and loop.first %}{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// GPT-2's printable stand-in for a byte.
fn stand_in(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let code = if printable(byte) {
        u32::from(byte)
    } else {
        256 + (0..byte).filter(|b| !printable(*b)).count() as u32
    };
    char::from_u32(code).unwrap_or('?')
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).ok_or("usage: make_tiny FOLDER")?;
    write(Path::new(&folder))?;
    println!("wrote {folder}/tiny.gguf and {folder}/hf");
    Ok(())
}

/// Writes both forms.
pub(crate) fn write(folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let gguf = folder.join("tiny.gguf");
    std::fs::create_dir_all(folder.join("hf"))?;
    std::fs::write(&gguf, make()?)?;
    write_folder(&gguf, &folder.join("hf"))
}

fn write_folder(gguf: &Path, folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let source = GgufModel::new(Gguf::open(gguf)?)?;
    let mut names = vec![
        "model.embed_tokens.weight".to_owned(),
        "model.norm.weight".to_owned(),
    ];
    for layer in 0..LAYERS {
        for part in [
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ] {
            names.push(format!("model.layers.{layer}.{part}.weight"));
        }
    }
    let mut tensors = BTreeMap::new();
    for name in names {
        let view = source.tensor(&name)?.ok_or(format!("{name} is missing"))?;
        let shape = if view.rows == 1 {
            vec![view.cols]
        } else {
            vec![view.rows, view.cols]
        };
        let bytes: Vec<u8> = view
            .to_f32()
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        tensors.insert(name, (shape, bytes));
    }
    let mut views = BTreeMap::new();
    for (name, (shape, bytes)) in &tensors {
        views.insert(name, TensorView::new(Dtype::F32, shape.clone(), bytes)?);
    }
    let weights = safetensors::serialize(views, None)?;
    std::fs::write(folder.join("model.safetensors"), weights)?;
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": true,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    });
    let tokenizer_config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": false,
        "chat_template": TEMPLATE,
    });
    for (name, json) in [
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
    ] {
        let text = serde_json::to_string_pretty(&json)? + "\n";
        std::fs::write(folder.join(name), text)?;
    }
    let tokenizer = Tokenizer::from_gguf(&source.file)?;
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_json()? + "\n")?;
    Ok(())
}

fn make() -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    // Three control tokens, 256 bytes, then merges of frequent pairs.
    let mut tokens: Vec<String> = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        .map(str::to_owned)
        .to_vec();
    let mut types = vec![3i32; 3];
    tokens.extend((0..=255).map(|b| stand_in(b).to_string()));
    let space = stand_in(b' ');
    let words = [
        "the",
        "and",
        "ing",
        "you",
        "that",
        "for",
        "are",
        "with",
        "this",
        "not",
        "can",
        "make",
        "water",
        "what",
        "how",
        "egg",
        "help",
        "your",
        "from",
        "good",
        "name",
        "time",
        "call",
        "tool",
        "user",
        "system",
        "assistant",
    ];
    let mut merges = Vec::new();
    for word in words {
        for start in ["", " "] {
            let mut so_far = String::new();
            for c in start.chars().map(|_| space).chain(word.chars()) {
                let joined = format!("{so_far}{c}");
                if !so_far.is_empty() && !tokens.contains(&joined) && tokens.len() < VOCAB {
                    merges.push(format!("{so_far} {c}"));
                    tokens.push(joined.clone());
                }
                so_far = joined;
            }
        }
    }
    types.resize(tokens.len(), 1);
    while tokens.len() < VOCAB {
        tokens.push(format!("<|unused_{}|>", tokens.len()));
        types.push(3);
    }

    let mut w = GgufWriter::default();
    let text = |v: &str| Value::String(v.to_owned());
    let number = |v: usize| Value::U32(v as u32);
    w.metadata("general.architecture", text("llama"));
    w.metadata("general.name", text("tiny"));
    w.metadata("general.license", text("apache-2.0"));
    w.metadata("llama.block_count", number(LAYERS));
    w.metadata("llama.context_length", number(32768));
    w.metadata("llama.embedding_length", number(HIDDEN));
    w.metadata("llama.feed_forward_length", number(INTERMEDIATE));
    w.metadata("llama.attention.head_count", number(HEADS));
    w.metadata("llama.attention.head_count_kv", number(KV_HEADS));
    w.metadata("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    w.metadata("llama.rope.freq_base", Value::F32(100_000.0));
    w.metadata("tokenizer.ggml.model", text("gpt2"));
    w.metadata("tokenizer.ggml.pre", text("smollm"));
    w.metadata(
        "tokenizer.ggml.tokens",
        Value::Array(tokens.iter().map(|t| text(t)).collect()),
    );
    w.metadata(
        "tokenizer.ggml.token_type",
        Value::Array(types.into_iter().map(Value::I32).collect()),
    );
    w.metadata(
        "tokenizer.ggml.merges",
        Value::Array(merges.iter().map(|m| text(m)).collect()),
    );
    w.metadata("tokenizer.ggml.bos_token_id", number(1));
    w.metadata("tokenizer.ggml.eos_token_id", number(2));
    w.metadata("tokenizer.ggml.add_bos_token", Value::Bool(false));
    w.metadata("tokenizer.chat_template", text(TEMPLATE));

    let mut state = 0x5EED_u64;
    let mut normal = move || {
        // Sum of twelve uniforms: close enough to a normal, and exact everywhere.
        let mut sum = -6.0;
        for _ in 0..12 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            sum += (state >> 40) as f32 / (1u64 << 24) as f32;
        }
        sum
    };
    let mut matrix = |rows: usize, cols: usize, scale: f32| -> Vec<f32> {
        (0..rows * cols).map(|_| normal() * scale).collect()
    };
    let deviation = |cols: usize| 1.0 / (cols as f32).sqrt();
    w.tensor(
        "token_embd.weight",
        &[HIDDEN, VOCAB],
        BlockType::Q8_0,
        &matrix(VOCAB, HIDDEN, 0.3),
    )?;
    for layer in 0..LAYERS {
        let at = |name: &str| format!("blk.{layer}.{name}.weight");
        w.tensor(&at("attn_norm"), &[HIDDEN], BlockType::F32, &[1.0; HIDDEN])?;
        w.tensor(&at("ffn_norm"), &[HIDDEN], BlockType::F32, &[1.0; HIDDEN])?;
        let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
        for (name, rows, cols, heads) in [
            ("attn_q", q, HIDDEN, HEADS),
            ("attn_k", kv, HIDDEN, KV_HEADS),
            ("attn_v", kv, HIDDEN, 0),
            ("attn_output", HIDDEN, q, 0),
            ("ffn_gate", INTERMEDIATE, HIDDEN, 0),
            ("ffn_up", INTERMEDIATE, HIDDEN, 0),
            ("ffn_down", HIDDEN, INTERMEDIATE, 0),
        ] {
            let mut values = matrix(rows, cols, deviation(cols));
            if heads > 0 {
                // GGUF stores these rows in interleaved order.
                let hf = values.clone();
                for (i, stored) in rope_permutation(heads, HEAD_DIM).into_iter().enumerate() {
                    let to = stored as usize * cols;
                    values[to..to + cols].copy_from_slice(&hf[i * cols..(i + 1) * cols]);
                }
            }
            let block = if name == "ffn_up" {
                BlockType::Q4_1
            } else {
                BlockType::Q8_0
            };
            w.tensor(&at(name), &[cols, rows], block, &values)?;
        }
    }
    w.tensor(
        "output_norm.weight",
        &[HIDDEN],
        BlockType::F32,
        &[1.0; HIDDEN],
    )?;
    let mut bytes = Vec::new();
    w.write(&mut bytes)?;
    Ok(bytes)
}
