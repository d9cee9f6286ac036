//! One answer in the making: its tokens, its text, and what is reported of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spotter_core::AdapterVersion;
use spotter_core::chat::ToolCall;
use spotter_core::code::Failure;
use spotter_core::generate::{
    Completion, FinishReason, GenerateEvent, GenerateRequest, TokenLogprob, ToolCallDelta,
};
use spotter_model::tokenizer::StreamDecoder;
use spotter_model::{LoraAdapter, Tokenizer};

use crate::constraint::Constraint;
use crate::output::{OutputParser, Piece, StopTexts};
use crate::sampler::Sampler;

/// A request that holds blocks and is being computed.
pub(crate) struct Sequence {
    pub(crate) id: u64,
    pub(crate) request: Box<GenerateRequest>,
    pub(crate) version: AdapterVersion,
    pub(crate) adapter: Option<Arc<LoraAdapter>>,
    /// Prompt and answer.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// How many of them have keys and values.
    pub(crate) computed: usize,
    pub(crate) blocks: Vec<u32>,
    pub(crate) limit: usize,
    pub(crate) arrived: Instant,
    pub(crate) answer: Answer,
}

impl Sequence {
    /// Whether its next token is one of the answer.
    pub(crate) fn answering(&self) -> bool {
        self.computed + 1 == self.tokens.len() && self.tokens.len() > self.prompt_len
    }

    /// Draws a token; returns what is to be reported, and whether the answer has ended.
    pub(crate) fn advance(
        &mut self,
        logits: &[f32],
        tokenizer: &Tokenizer,
    ) -> Result<(Option<GenerateEvent>, Option<FinishReason>), Failure> {
        let a = &mut self.answer;
        let ends = tokenizer.end_of_turn();
        // Only the end of the turn ends an answer that has a form.
        let ignore_eos = self.request.sampling.ignore_eos && !a.constraint.is_whole();
        let wants = self.request.top_logprobs;
        let banned = if ignore_eos { ends } else { &[] };
        let mask = a.constraint.mask(&a.parser);
        let sampled = a
            .sampler
            .sample(logits, wants.unwrap_or(0), banned, mask.as_ref())?;
        a.constraint.commit(sampled.id, &a.parser);
        a.first_token.get_or_insert_with(Instant::now);
        self.tokens.push(sampled.id);
        a.logprobs.push(sampled.logprob);
        a.model_logprobs.push(sampled.model_logprob);
        let ended = ends.contains(&sampled.id) && !ignore_eos;
        let mut text = String::new();
        // Tool-call marks are control tokens in some vocabularies; the parser needs them.
        let visible = !tokenizer.is_special(sampled.id) || !ends.contains(&sampled.id);
        if !ended && visible {
            text = a.decoder.push(tokenizer.token_bytes(sampled.id));
        }
        let (text, stopped) = a.stops.push(&text);
        let pieces = a.parser.push(&text);
        a.constraint.follow(&a.parser, !a.stops.held().is_empty());
        let piece_text = |id: u32| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
        let logprobs = wants.map(|_| TokenLogprob {
            id: sampled.id,
            text: piece_text(sampled.id),
            logprob: sampled.model_logprob,
            top: sampled
                .top
                .iter()
                .map(|(id, l)| (*id, piece_text(*id), *l))
                .collect(),
        });
        let event = a.delta(pieces, logprobs.into_iter().collect());
        let reason = if ended || stopped {
            Some(FinishReason::Stop)
        } else if self.tokens.len() - self.prompt_len >= self.limit {
            Some(FinishReason::Length)
        } else {
            None
        };
        Ok((event, reason))
    }

    /// The last events of an answer that has ended.
    pub(crate) fn finish(&mut self, reason: FinishReason) -> Vec<GenerateEvent> {
        let a = &mut self.answer;
        let mut rest = a.decoder.finish();
        if reason == FinishReason::Length {
            let (passed, _) = a.stops.push(&rest);
            rest = passed;
        }
        rest.push_str(&a.stops.finish());
        let mut pieces = a.parser.push(&rest);
        pieces.extend(a.parser.finish());
        let mut events: Vec<GenerateEvent> = a.delta(pieces, Vec::new()).into_iter().collect();
        let finish_reason = if a.calls.is_empty() || reason == FinishReason::Length {
            reason
        } else {
            FinishReason::ToolCalls
        };
        let now = Instant::now();
        let completion = Completion {
            content: std::mem::take(&mut a.content),
            reasoning: Some(std::mem::take(&mut a.reasoning)).filter(|r| !r.is_empty()),
            tool_calls: std::mem::take(&mut a.calls),
            finish_reason,
            response_ids: self.tokens[self.prompt_len..].to_vec(),
            logprobs: std::mem::take(&mut a.logprobs),
            model_logprobs: std::mem::take(&mut a.model_logprobs),
            first_token_ms: millis(a.first_token.unwrap_or(now).duration_since(self.arrived)),
            total_ms: millis(now.duration_since(self.arrived)),
        };
        events.push(GenerateEvent::Finished {
            completion: Box::new(completion),
        });
        events
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// How an answer is drawn and read.
pub(crate) struct Answer {
    pub(crate) sampler: Sampler,
    pub(crate) stops: StopTexts,
    pub(crate) parser: OutputParser,
    constraint: Constraint,
    decoder: StreamDecoder,
    content: String,
    reasoning: String,
    calls: Vec<ToolCall>,
    logprobs: Vec<f32>,
    model_logprobs: Vec<f32>,
    first_token: Option<Instant>,
}

impl Answer {
    pub(crate) fn new(
        sampler: Sampler,
        stops: StopTexts,
        parser: OutputParser,
        constraint: Constraint,
    ) -> Self {
        Self {
            sampler,
            stops,
            parser,
            constraint,
            decoder: StreamDecoder::default(),
            content: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
            logprobs: Vec::new(),
            model_logprobs: Vec::new(),
            first_token: None,
        }
    }

    /// Adds pieces to the answer; `None` when there is nothing to report.
    fn delta(&mut self, pieces: Vec<Piece>, logprobs: Vec<TokenLogprob>) -> Option<GenerateEvent> {
        let (mut content, mut reasoning) = (String::new(), String::new());
        let mut tool_calls = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Content(text) => content.push_str(&text),
                Piece::Reasoning(text) => reasoning.push_str(&text),
                Piece::Call(call) => {
                    tool_calls.push(ToolCallDelta {
                        index: self.calls.len() as u32,
                        id: Some(call.id.clone()),
                        name: Some(call.name.clone()),
                        arguments: call.arguments.clone(),
                    });
                    self.calls.push(call);
                }
            }
        }
        self.content.push_str(&content);
        self.reasoning.push_str(&reasoning);
        let empty = content.is_empty()
            && reasoning.is_empty()
            && tool_calls.is_empty()
            && logprobs.is_empty();
        (!empty).then_some(GenerateEvent::Delta {
            content,
            reasoning,
            tool_calls,
            logprobs,
        })
    }
}
