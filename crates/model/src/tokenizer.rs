//! Text to token ids and back, exactly as the model was trained.
//!
//! The tokeniser comes from `tokenizer.json` or from GGUF metadata, from which the same
//! JSON is assembled; the `tokenizers` crate does the work.

use std::collections::HashMap;
use std::path::Path;
use std::str::FromStr;

use serde_json::{Value as Json, json};

use crate::error::{ModelError, Result};
use crate::gguf::{Gguf, Value};

/// Tokens that end a turn, by text, beside the model's own end-of-sequence id.
const END_OF_TURN: &[&str] = &[
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "</s>",
    "<end_of_turn>",
];

/// A tokeniser with the model's special tokens.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bytes: Vec<Vec<u8>>,
    special: Vec<bool>,
    bos: Option<u32>,
    add_bos: bool,
    end: Vec<u32>,
}

/// The pre-tokeniser behind a GGUF `tokenizer.ggml.pre` name.
fn pre_tokenizer(name: &str) -> Option<Json> {
    let byte_level = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
    let split = |digits: &str| {
        let pattern = format!(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{{L}}\\p{{N}}]?\\p{{L}}+|{digits}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
        );
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            byte_level(false),
        ]})
    };
    Some(match name {
        "default" | "gpt-2" | "gpt2" => byte_level(true),
        "smollm" => json!({"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            byte_level(true),
        ]}),
        "qwen2" => split("\\p{N}"),
        "llama-bpe" | "llama3" | "llama-v3" => split("\\p{N}{1,3}"),
        _ => return None,
    })
}

impl Tokenizer {
    /// From GGUF metadata (byte-level BPE).
    ///
    /// # Errors
    /// When the vocabulary is missing or of a kind that is not known.
    pub fn from_gguf(file: &Gguf) -> Result<Self> {
        let meta = file.metadata();
        let bad = |reason: String| ModelError::bad(file.path(), reason);
        let text = |key: &str| meta.get(key).and_then(Value::as_str);
        match text("tokenizer.ggml.model") {
            Some("gpt2") => {}
            Some(other) => {
                return Err(bad(format!(
                    "its '{other}' tokeniser is not supported in GGUF; use the Hugging Face folder with tokenizer.json"
                )));
            }
            None => return Err(bad("it has no tokeniser".into())),
        }
        let strings = |key: &str| -> Result<Vec<&str>> {
            meta.get(key)
                .and_then(Value::as_array)
                .and_then(|a| a.iter().map(Value::as_str).collect())
                .ok_or_else(|| bad(format!("'{key}' is missing")))
        };
        let tokens = strings("tokenizer.ggml.tokens")?;
        let merges = strings("tokenizer.ggml.merges")?;
        let types = meta
            .get("tokenizer.ggml.token_type")
            .and_then(Value::as_array)
            .unwrap_or(&[]);
        let pre = text("tokenizer.ggml.pre").unwrap_or("default");
        let pre_json = pre_tokenizer(pre)
            .ok_or_else(|| bad(format!("its pre-tokeniser '{pre}' is not known")))?;
        let added: Vec<Json> = tokens
            .iter()
            .enumerate()
            .filter_map(|(id, token)| {
                let kind = types.get(id).and_then(Value::as_u64).unwrap_or(1);
                matches!(kind, 3 | 4).then(|| {
                    json!({"id": id, "content": token, "single_word": false, "lstrip": false,
                           "rstrip": false, "normalized": false, "special": kind == 3})
                })
            })
            .collect();
        let vocab: serde_json::Map<String, Json> = tokens
            .iter()
            .enumerate()
            .map(|(id, token)| ((*token).to_owned(), json!(id)))
            .collect();
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": added,
            "normalizer": if pre == "qwen2" { json!({"type": "NFC"}) } else { Json::Null },
            "pre_tokenizer": pre_json,
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null,
                      "continuing_subword_prefix": null, "end_of_word_suffix": null,
                      "fuse_unk": false, "byte_fallback": false,
                      "ignore_merges": pre.starts_with("llama"),
                      "vocab": vocab, "merges": merges},
        });
        let id = |key: &str| {
            meta.get(key)
                .and_then(Value::as_u64)
                .and_then(|v| u32::try_from(v).ok())
        };
        let add_bos = meta.get("tokenizer.ggml.add_bos_token") == Some(&Value::Bool(true));
        let eos = [
            id("tokenizer.ggml.eos_token_id"),
            id("tokenizer.ggml.eot_token_id"),
        ];
        Self::new(
            &json.to_string(),
            id("tokenizer.ggml.bos_token_id"),
            add_bos,
            &eos,
        )
        .map_err(|e| bad(e.to_string()))
    }

    /// From a Hugging Face folder's `tokenizer.json` and `tokenizer_config.json`.
    ///
    /// # Errors
    /// When a file is missing or malformed.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let json = std::fs::read_to_string(&path).map_err(|e| ModelError::io(&path, e))?;
        let config: Json = std::fs::read_to_string(folder.join("tokenizer_config.json"))
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok())
            .unwrap_or(Json::Null);
        let inner = tokenizers::Tokenizer::from_str(&json)
            .map_err(|e| ModelError::bad(&path, e.to_string()))?;
        let token = |key: &str| {
            let entry = &config[key];
            let text = entry.as_str().or_else(|| entry["content"].as_str())?;
            inner.token_to_id(text)
        };
        let add_bos = config["add_bos_token"] == Json::Bool(true);
        Self::new(&json, token("bos_token"), add_bos, &[token("eos_token")])
    }

    fn new(json: &str, bos: Option<u32>, add_bos: bool, eos: &[Option<u32>]) -> Result<Self> {
        let inner = tokenizers::Tokenizer::from_str(json)
            .map_err(|e| ModelError::Tokenizer(e.to_string()))?;
        let vocab = inner.get_vocab(true);
        let size = vocab.values().max().map_or(0, |m| *m as usize + 1);
        let decoder: Json =
            serde_json::from_str::<Json>(json).unwrap_or(Json::Null)["decoder"].take();
        let byte_level = decoder.to_string().contains("\"ByteLevel\"");
        let alphabet = byte_alphabet();
        let mut bytes = vec![Vec::new(); size];
        let mut special = vec![false; size];
        for (token, id) in &vocab {
            bytes[*id as usize] = if byte_level {
                token
                    .chars()
                    .map(|c| alphabet.get(&c).copied())
                    .collect::<Option<Vec<u8>>>()
                    .unwrap_or_else(|| token.as_bytes().to_vec())
            } else if let Some(hex) = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')) {
                u8::from_str_radix(hex, 16).map_or_else(|_| token.as_bytes().to_vec(), |b| vec![b])
            } else {
                token.replace('▁', " ").into_bytes()
            };
        }
        for (id, token) in inner.get_added_tokens_decoder() {
            if let Some(slot) = bytes.get_mut(id as usize) {
                *slot = token.content.clone().into_bytes();
                special[id as usize] = token.special;
            }
        }
        let mut end: Vec<u32> = eos.iter().flatten().copied().collect();
        end.extend(END_OF_TURN.iter().filter_map(|t| inner.token_to_id(t)));
        end.sort_unstable();
        end.dedup();
        Ok(Self {
            inner,
            bytes,
            special,
            bos,
            add_bos,
            end,
        })
    }

    /// The tokeniser in the form of `tokenizer.json`.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub fn to_json(&self) -> Result<String> {
        self.inner
            .to_string(true)
            .map_err(|e| ModelError::Tokenizer(e.to_string()))
    }

    /// Token ids of `text`; the text of special tokens becomes those tokens.
    ///
    /// # Errors
    /// When the tokeniser fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self
            .inner
            .encode_fast(text, false)
            .map_err(|e| ModelError::Tokenizer(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The bytes that a token stands for; empty for an unknown id.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize).map_or(&[], Vec::as_slice)
    }

    /// Whether a token is a control token, which never is visible text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The text of `ids`, control tokens left out, invalid UTF-8 replaced.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids
            .iter()
            .filter(|id| !self.is_special(**id))
            .flat_map(|id| self.token_bytes(*id))
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The id of a token by its text.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Ids that end a turn.
    pub fn end_of_turn(&self) -> &[u32] {
        &self.end
    }

    /// The begin-of-sequence id, when prompts begin with it by themselves.
    pub fn bos(&self) -> Option<u32> {
        self.bos.filter(|_| self.add_bos)
    }

    /// The begin-of-sequence token's text, for templates.
    pub fn bos_text(&self) -> String {
        self.bos
            .map(|id| String::from_utf8_lossy(self.token_bytes(id)).into_owned())
            .unwrap_or_default()
    }

    /// Ids in use.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }
}

/// GPT-2's printable stand-ins for bytes, by character.
fn byte_alphabet() -> HashMap<char, u8> {
    let mut map = HashMap::with_capacity(256);
    let mut next = 256u32;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if printable {
            u32::from(byte)
        } else {
            next += 1;
            next - 1
        };
        if let Some(c) = char::from_u32(code) {
            map.insert(c, byte);
        }
    }
    map
}

/// Decodes a stream of tokens without cutting a character in two.
#[derive(Debug, Default)]
pub struct StreamDecoder {
    pending: Vec<u8>,
}

impl StreamDecoder {
    /// Adds a token's bytes and returns the text that is complete now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let good = error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.pending[..good]));
                    match error.error_len() {
                        Some(bad) => {
                            text.push('\u{FFFD}');
                            self.pending.drain(..good + bad);
                        }
                        None => {
                            self.pending.drain(..good);
                            return text;
                        }
                    }
                }
            }
        }
    }

    /// What is left when the stream ends.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{StreamDecoder, byte_alphabet};

    #[test]
    fn the_byte_alphabet_covers_every_byte_once() {
        let mut bytes: Vec<u8> = byte_alphabet().into_values().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    }

    proptest! {
        #[test]
        fn streaming_equals_decoding_at_once(text in "\\PC{0,40}", cuts in proptest::collection::vec(1usize..4, 0..40)) {
            let (mut decoder, mut out, mut rest) = (StreamDecoder::default(), String::new(), text.as_bytes());
            for cut in cuts {
                let (head, tail) = rest.split_at(cut.min(rest.len()));
                out.push_str(&decoder.push(head));
                rest = tail;
            }
            out.push_str(&decoder.push(rest));
            out.push_str(&decoder.finish());
            prop_assert_eq!(out, text);
        }
    }
}
