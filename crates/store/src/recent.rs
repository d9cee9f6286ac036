//! What the writer wrote lately, so that a growing conversation is not read back at
//! every step. Only the writer's thread holds one, and it is emptied whenever something
//! it may know of was undone or deleted.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// Token ids that are remembered, in all prompts together.
const TOKENS: usize = 2_000_000;
/// Texts whose rows are remembered.
const CONTENTS: usize = 50_000;

/// A step's prompt and response, and its message rows, reassembled.
pub(crate) struct Whole {
    pub(crate) ids: Vec<u32>,
    pub(crate) messages: Vec<u32>,
    pub(crate) depth: i64,
}

/// The memory.
#[derive(Default)]
pub(crate) struct Recent {
    wholes: VecDeque<(i64, Rc<Whole>)>,
    tokens: usize,
    contents: HashMap<[u8; 32], i64>,
}

impl Recent {
    pub(crate) fn whole(&self, id: i64) -> Option<Rc<Whole>> {
        let found = self.wholes.iter().rev().find(|(known, _)| *known == id);
        found.map(|(_, whole)| whole.clone())
    }

    pub(crate) fn keep(&mut self, id: i64, whole: Rc<Whole>) {
        self.tokens += whole.ids.len() + whole.messages.len();
        self.wholes.push_back((id, whole));
        while self.tokens > TOKENS
            && let Some((_, oldest)) = self.wholes.pop_front()
        {
            self.tokens -= oldest.ids.len() + oldest.messages.len();
        }
    }

    pub(crate) fn content(&self, hash: &[u8; 32]) -> Option<i64> {
        self.contents.get(hash).copied()
    }

    pub(crate) fn keep_content(&mut self, hash: [u8; 32], id: i64) {
        if self.contents.len() >= CONTENTS {
            self.contents.clear();
        }
        self.contents.insert(hash, id);
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}
