//! Text to token ids, as the trainer needs it.

use spotter_core::chat::{Message, Role};
use spotter_core::code::{Code, Failure};
use spotter_model::{LoadedModel, ModelError};

/// Turns text into token ids: a tokenizer with a chat template.
pub trait Vocabulary {
    /// An assistant's answer as it follows a prompt, end-of-turn token included.
    fn answer(&self, text: &str) -> Result<Vec<u32>, Failure>;

    /// Plain text, with a beginning-of-text token where the model uses one.
    fn text(&self, text: &str) -> Result<Vec<u32>, Failure>;

    /// A chat of one user message, up to where the assistant's answer begins.
    fn question(&self, text: &str) -> Result<Vec<u32>, Failure>;

    /// Tokens that end an answer.
    fn ends(&self) -> Vec<u32>;
}

impl Vocabulary for LoadedModel {
    fn answer(&self, text: &str) -> Result<Vec<u32>, Failure> {
        let mut ids = self.tokenizer.encode(text).map_err(failure)?;
        ids.extend(self.tokenizer.end_of_turn().first());
        Ok(ids)
    }

    fn text(&self, text: &str) -> Result<Vec<u32>, Failure> {
        let mut ids: Vec<u32> = self.tokenizer.bos().into_iter().collect();
        ids.extend(self.tokenizer.encode(text).map_err(failure)?);
        Ok(ids)
    }

    fn question(&self, text: &str) -> Result<Vec<u32>, Failure> {
        let message = Message {
            role: Role::User,
            content: text.to_owned(),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
            token_ids: None,
        };
        self.template
            .prompt_ids(&self.tokenizer, &[message], &[], &serde_json::Map::new())
            .map_err(failure)
    }

    fn ends(&self) -> Vec<u32> {
        self.tokenizer.end_of_turn().to_vec()
    }
}

fn failure(error: ModelError) -> Failure {
    Failure::new(Code::Internal, error.to_string())
}
