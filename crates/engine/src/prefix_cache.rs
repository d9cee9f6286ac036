//! Which sequence uses which key/value block, and which prefixes can be used again.
//!
//! Full blocks of computed tokens stay known after their sequence has ended, as a tree:
//! a block's key is its parent block and its own tokens, below a root per adapter
//! version. Keys are compared in full, so a hash collision cannot mix two prompts.
//! Blocks that nobody uses are reclaimed, least recently used first.

use std::collections::{BTreeSet, HashMap};

use spotter_core::AdapterVersion;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    /// Incarnation of the parent block, or the root of a version.
    parent: u64,
    tokens: Box<[u32]>,
}

#[derive(Debug, Default)]
struct Block {
    users: u32,
    last_used: u64,
    key: Option<Key>,
    /// Unique over all uses of all blocks; children name their parent by it.
    incarnation: u64,
}

/// Bookkeeping for a pool of blocks.
#[derive(Debug)]
pub struct PrefixCache {
    block_tokens: usize,
    blocks: Vec<Block>,
    known: HashMap<Key, u32>,
    /// Unused blocks in the order in which they are reclaimed.
    idle: BTreeSet<(u64, u32)>,
    clock: u64,
    incarnations: u64,
}

/// Roots lie above every incarnation.
const ROOT: u64 = 1 << 63;

impl PrefixCache {
    /// Bookkeeping for `blocks` blocks of `block_tokens` tokens.
    pub fn new(blocks: usize, block_tokens: usize) -> Self {
        Self {
            block_tokens,
            blocks: (0..blocks).map(|_| Block::default()).collect(),
            known: HashMap::new(),
            idle: (0..blocks as u32).map(|b| (0, b)).collect(),
            clock: 0,
            incarnations: 0,
        }
    }

    /// Blocks that could be given out now.
    pub fn available(&self) -> usize {
        self.idle.len()
    }

    /// Blocks in use by a sequence.
    pub fn used(&self) -> usize {
        self.blocks.len() - self.idle.len()
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    fn root(version: AdapterVersion) -> u64 {
        ROOT | u64::from(version.0)
    }

    /// Takes the longest known prefix of `tokens`, in whole blocks, at most `most` tokens.
    pub fn reuse(&mut self, version: AdapterVersion, tokens: &[u32], most: usize) -> Vec<u32> {
        let mut parent = Self::root(version);
        let mut table = Vec::new();
        for chunk in tokens[..most.min(tokens.len())].chunks_exact(self.block_tokens) {
            let key = Key {
                parent,
                tokens: chunk.into(),
            };
            let Some(block) = self.known.get(&key).copied() else {
                break;
            };
            parent = self.blocks[block as usize].incarnation;
            self.hold(block);
            table.push(block);
        }
        table
    }

    fn hold(&mut self, block: u32) {
        let b = &mut self.blocks[block as usize];
        if b.users == 0 {
            self.idle.remove(&(b.last_used, block));
        }
        b.users += 1;
    }

    /// A block for new tokens; reclaims the least recently used one. `None` when every
    /// block is in use.
    pub fn allocate(&mut self) -> Option<u32> {
        let (_, block) = self.idle.pop_first()?;
        let b = &mut self.blocks[block as usize];
        if let Some(key) = b.key.take() {
            self.known.remove(&key);
        }
        self.incarnations += 1;
        b.incarnation = self.incarnations;
        b.users = 1;
        Some(block)
    }

    /// Makes the full blocks among `tokens` (all computed) findable.
    pub fn remember(&mut self, version: AdapterVersion, tokens: &[u32], table: &[u32]) {
        let mut parent = Self::root(version);
        for (chunk, block) in tokens.chunks_exact(self.block_tokens).zip(table) {
            let key = Key {
                parent,
                tokens: chunk.into(),
            };
            match self.known.get(&key) {
                // Somebody else computed the same prefix first; children hang below theirs.
                Some(other) => parent = self.blocks[*other as usize].incarnation,
                None => {
                    let b = &mut self.blocks[*block as usize];
                    if b.key.is_none() {
                        b.key = Some(key.clone());
                        self.known.insert(key, *block);
                    }
                    parent = b.incarnation;
                }
            }
        }
    }

    /// A sequence lets go of its blocks.
    pub fn release(&mut self, table: &[u32]) {
        self.clock += 1;
        // Leaves go first when blocks are reclaimed, so that a prefix dies from its end.
        for (i, block) in table.iter().enumerate() {
            let b = &mut self.blocks[*block as usize];
            b.users -= 1;
            if b.users == 0 {
                b.last_used = if b.key.is_some() {
                    self.clock * (1 << 20) - i as u64
                } else {
                    0
                };
                self.idle.insert((b.last_used, *block));
            }
        }
    }

    /// Forgets every prefix of a version that nobody uses any more.
    pub fn forget(&mut self, version: AdapterVersion) {
        let root = Self::root(version);
        let mut parents = vec![root];
        while let Some(parent) = parents.pop() {
            let children: Vec<u32> = self
                .known
                .iter()
                .filter(|(k, _)| k.parent == parent)
                .map(|(_, b)| *b)
                .collect();
            for block in children {
                let b = &mut self.blocks[block as usize];
                parents.push(b.incarnation);
                if let Some(key) = b.key.take() {
                    self.known.remove(&key);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use spotter_core::AdapterVersion;

    use super::PrefixCache;

    const V1: AdapterVersion = AdapterVersion(1);

    fn run(cache: &mut PrefixCache, version: AdapterVersion, tokens: &[u32]) -> (usize, Vec<u32>) {
        let mut table = cache.reuse(version, tokens, tokens.len() - 1);
        let reused = table.len();
        while table.len() * 4 < tokens.len() {
            table.push(cache.allocate().expect("a block"));
        }
        cache.remember(version, tokens, &table);
        (reused, table)
    }

    #[test]
    fn a_prefix_is_found_again_only_under_its_version() {
        let mut cache = PrefixCache::new(16, 4);
        let tokens: Vec<u32> = (0..14).collect();
        let (reused, table) = run(&mut cache, V1, &tokens);
        assert_eq!(reused, 0);
        let (reused, shared) = run(&mut cache, V1, &tokens);
        assert_eq!(
            (reused, &shared[..3]),
            (3, &table[..3]),
            "three full blocks"
        );
        let (reused, _) = run(&mut cache, AdapterVersion::BASE, &tokens);
        assert_eq!(reused, 0);
        let mut other = tokens.clone();
        other[5] = 99;
        assert_eq!(
            run(&mut cache, V1, &other).0,
            1,
            "the first block is the same"
        );
    }

    #[test]
    fn unused_blocks_are_reclaimed_least_recently_used_first() {
        let mut cache = PrefixCache::new(4, 4);
        let (_, a) = run(&mut cache, V1, &[1; 8]);
        cache.release(&a);
        let (_, b) = run(&mut cache, V1, &[2; 8]);
        cache.release(&b);
        assert_eq!(cache.available(), 4);
        let (_, c) = run(&mut cache, V1, &[3; 8]);
        assert!(
            c.iter().all(|block| a.contains(block)),
            "the older prefix went"
        );
        assert_eq!(run(&mut cache, V1, &[2; 8]).0, 1, "the newer one stayed");
        assert!(cache.allocate().is_none(), "blocks in use are never taken");
        cache.release(&c);
    }

    #[test]
    fn a_version_can_be_forgotten() {
        let mut cache = PrefixCache::new(8, 4);
        let (_, a) = run(&mut cache, V1, &[1; 12]);
        cache.release(&a);
        cache.forget(V1);
        assert_eq!(run(&mut cache, V1, &[1; 12]).0, 0);
    }
}
