//! What the gateway asks of a serving engine, and what comes back.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::adapter::AdapterVersion;
use crate::chat::{Message, ResponseFormat, Tool, ToolCall, ToolChoice};
use crate::code::Failure;

/// The prompt, before tokenisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prompt {
    /// A conversation, rendered with the model's chat template.
    Chat {
        /// The messages in order; the engine merges neighbours of one role.
        messages: Vec<Message>,
        /// The tools the model may call.
        #[serde(default)]
        tools: Vec<Tool>,
        /// Extra variables for the chat template (`enable_thinking`, …).
        #[serde(default)]
        template_variables: Map<String, Value>,
    },
    /// Raw text, tokenised with special tokens recognised.
    Text(String),
    /// Token ids as they are.
    Tokens(Vec<u32>),
}

/// Which weights answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdapterChoice {
    /// Whatever version is live when the request starts.
    #[default]
    Current,
    /// This version, `BASE` included.
    Version(AdapterVersion),
}

/// Sampling parameters, resolved: every field has its value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// Softmax temperature; 0 means greedy.
    pub temperature: f32,
    /// Nucleus mass in (0, 1]; 1 is off.
    pub top_p: f32,
    /// Keep the k most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keep tokens with at least this share of the top token's probability; 0 is off.
    pub min_p: f32,
    /// Divides (or multiplies) logits of seen tokens; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from logits of tokens already generated; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence among tokens already generated; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these token ids.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of this request's own generator; without one it is random.
    pub seed: Option<u64>,
    /// Generation stops before any of these texts.
    pub stop: Vec<String>,
    /// Most tokens to generate; the engine clamps it to the context window.
    pub max_tokens: Option<u32>,
    /// Keep generating past the end-of-turn token (for benchmarks).
    pub ignore_eos: bool,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            stop: Vec::new(),
            max_tokens: None,
            ignore_eos: false,
        }
    }
}

/// One generation: one sequence. The gateway sends `n` of them for `n` choices;
/// the prefix cache makes the shared prompt free.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// The prompt.
    pub prompt: Prompt,
    /// Whether a tool must be called.
    #[serde(default)]
    pub tool_choice: ToolChoice,
    /// The form of the answer.
    #[serde(default)]
    pub response_format: ResponseFormat,
    /// Sampling parameters.
    #[serde(default)]
    pub sampling: Sampling,
    /// Which weights answer.
    #[serde(default)]
    pub adapter: AdapterChoice,
    /// Key for fairness between conversations.
    #[serde(default)]
    pub session: String,
    /// Key of the user turn; calls of one turn stay on one adapter version.
    #[serde(default)]
    pub turn: Option<String>,
    /// How many alternatives per token to report; `None` reports no log-probabilities
    /// to the client (they are stored all the same).
    #[serde(default)]
    pub top_logprobs: Option<u8>,
    /// Give up when the answer has not finished after this many milliseconds.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
}

/// The log-probability of one generated token, for clients that ask.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// The token's text; bytes that are not UTF-8 on their own are replaced.
    pub text: String,
    /// Natural log of the model's own probability (temperature 1, no truncation).
    pub logprob: f32,
    /// The most likely alternatives: id, text, log-probability.
    #[serde(default)]
    pub top: Vec<(u32, String, f32)>,
}

/// A piece of a tool call as it streams.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCallDelta {
    /// Position among the calls of this answer, from 0.
    pub index: u32,
    /// Set once, on the first piece.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Set once, on the first piece.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The next fragment of the arguments; the fragments join to compact JSON.
    #[serde(default)]
    pub arguments: String,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// End-of-turn token or a stop text.
    Stop,
    /// The token limit.
    Length,
    /// The answer calls tools.
    ToolCalls,
}

/// The answer, complete.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// Text without reasoning or tool-call markup.
    pub content: String,
    /// Reasoning, if the model wrote any.
    #[serde(default)]
    pub reasoning: Option<String>,
    /// Tool calls, in order.
    #[serde(default)]
    pub tool_calls: Vec<ToolCall>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The sampled ids, end-of-turn token included when it was sampled.
    pub response_ids: Vec<u32>,
    /// Natural log-probabilities of `response_ids` under the distribution they were
    /// sampled from (after temperature, penalties, bias and truncation).
    /// Empty when a remote engine gave none.
    pub logprobs: Vec<f32>,
    /// Natural log-probabilities of `response_ids` under the model itself
    /// (temperature 1, nothing applied). Empty when a remote engine gave none.
    pub model_logprobs: Vec<f32>,
    /// Time to the first token and in total, milliseconds, queueing included.
    pub first_token_ms: u64,
    /// Total time in milliseconds.
    pub total_ms: u64,
}

/// What an engine reports while it answers, in this order: `Queued`*, `Started`,
/// `Prefill`*, `Delta`*, then exactly one `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum GenerateEvent {
    /// Waiting; `position` requests are ahead.
    Queued {
        /// Requests ahead of this one.
        position: u32,
    },
    /// The prompt is tokenised and the adapter version chosen.
    Started {
        /// The prompt's token ids. Empty when a remote engine gave none.
        prompt_ids: Vec<u32>,
        /// Prompt length in tokens.
        prompt_tokens: u32,
        /// How many of them came from the prefix cache.
        cached_tokens: u32,
        /// The version that answers.
        adapter: AdapterVersion,
    },
    /// Prefill progress.
    Prefill {
        /// Prompt tokens computed or reused so far.
        done: u32,
        /// Prompt tokens in total.
        total: u32,
    },
    /// The next piece of the answer.
    Delta {
        /// Visible text.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        content: String,
        /// Reasoning text.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        reasoning: String,
        /// Tool-call pieces.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<ToolCallDelta>,
        /// Log-probabilities of the tokens since the last delta, when asked for.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        logprobs: Vec<TokenLogprob>,
    },
    /// The answer is complete.
    Finished {
        /// The answer.
        completion: Box<Completion>,
    },
    /// No answer.
    Failed {
        /// Why.
        failure: Failure,
    },
}
