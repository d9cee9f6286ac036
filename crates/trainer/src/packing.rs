//! Packing token sequences into prefix trees, so that shared prompts are computed once.
//!
//! Sequences that begin alike (rollouts of one prompt; turn k+1, which extends
//! turn k; a chosen and a rejected answer) share their common tokens as one
//! segment. A segment attends to itself and its ancestors, so the packed loss
//! equals the unpacked one. Nothing here knows the model; ids in, layout out.

use std::ops::Range;

/// A prompt and its response, to be scored or trained.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Prompt token ids, at least one.
    pub prompt: &'a [u32],
    /// Response token ids, at least one.
    pub response: &'a [u32],
    /// Temperature at which the response's log-probabilities are taken.
    pub temperature: f32,
}

impl Sequence<'_> {
    /// Tokens that are fed to the model: the last one is only predicted.
    fn fed(&self) -> usize {
        (self.prompt.len() + self.response.len()).saturating_sub(1)
    }

    fn token(&self, position: usize) -> u32 {
        if position < self.prompt.len() {
            self.prompt[position]
        } else {
            self.response[position - self.prompt.len()]
        }
    }

    fn common_prefix(&self, other: &Self) -> usize {
        let limit = self.fed().min(other.fed());
        (0..limit)
            .find(|&i| self.token(i) != other.token(i))
            .unwrap_or(limit)
    }
}

/// Consecutive tokens with one parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The segment that precedes it, always at a lower index.
    pub parent: Option<usize>,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Position of its first token in the sequence.
    pub start: usize,
    /// Whether any sequence has response tokens here.
    pub has_response: bool,
}

/// A log-probability asked of the packed batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// Flat row (in segment order) whose output predicts the token.
    pub row: usize,
    /// The token.
    pub token: u32,
    /// Temperature of the distribution.
    pub temperature: f32,
}

/// A packed batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Packed {
    /// Segments, parents first; their tokens lie flat in this order.
    pub segments: Vec<Segment>,
    /// One target per response token, in the order of the sequences given.
    pub targets: Vec<Target>,
    /// For each sequence, its targets.
    pub spans: Vec<Range<usize>>,
    /// For each sequence, the flat row of its last prompt token.
    pub prompt_rows: Vec<usize>,
}

impl Packed {
    /// Tokens fed to the model.
    pub fn tokens(&self) -> usize {
        self.segments.iter().map(|s| s.tokens.len()).sum()
    }
}

/// Packs sequences into a prefix forest. Segments never straddle the border of a
/// prompt and its response.
pub fn pack(sequences: &[Sequence<'_>]) -> Packed {
    let order = sorted(sequences);
    let mut segments = Vec::new();
    let mut paths = vec![Vec::new(); sequences.len()];
    branch(sequences, &order, 0, None, &mut segments, &mut paths);

    let mut first_row = Vec::with_capacity(segments.len());
    let mut rows = 0;
    for segment in &segments {
        first_row.push(rows);
        rows += segment.tokens.len();
    }
    let mut packed = Packed::default();
    for (sequence, path) in sequences.iter().zip(&paths) {
        let row = |position: usize| {
            path.iter()
                .map(|&s| (&segments[s], first_row[s]))
                .find(|(s, _)| position < s.start + s.tokens.len())
                .map_or(0, |(s, first)| first + position - s.start)
        };
        let from = packed.targets.len();
        let last_prompt = sequence.prompt.len().saturating_sub(1);
        packed.targets.extend(
            sequence
                .response
                .iter()
                .enumerate()
                .map(|(i, &token)| Target {
                    row: row(last_prompt + i),
                    token,
                    temperature: sequence.temperature,
                }),
        );
        packed.spans.push(from..packed.targets.len());
        packed.prompt_rows.push(row(last_prompt));
    }
    packed.segments = segments;
    packed
}

/// Splits units of work into micro-batches of at most `max_tokens` packed tokens
/// (a larger unit stands alone). A unit is one or several sequences whose loss
/// must be computed together, such as a chosen and a rejected answer. Units with
/// common prefixes end up together. Returns indices into `units`.
pub fn micro_batches(units: &[Vec<Sequence<'_>>], max_tokens: usize) -> Vec<Vec<usize>> {
    let firsts: Vec<Sequence<'_>> = units.iter().filter_map(|u| u.first().copied()).collect();
    if firsts.len() != units.len() {
        // An empty unit has no place in the order; it needs no work either.
        return (0..units.len())
            .filter(|&i| !units[i].is_empty())
            .map(|i| vec![i])
            .collect();
    }
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut members: Vec<Sequence<'_>> = Vec::new();
    for index in sorted(&firsts) {
        let before = members.len();
        members.extend(&units[index]);
        match batches.last_mut() {
            Some(batch) if packed_tokens(&members) <= max_tokens => batch.push(index),
            _ => {
                members.drain(..before);
                batches.push(vec![index]);
            }
        }
    }
    batches
}

/// Tokens that the packed sequences feed to the model.
fn packed_tokens(sequences: &[Sequence<'_>]) -> usize {
    let order = sorted(sequences);
    let mut tokens = 0;
    for (i, &index) in order.iter().enumerate() {
        let shared = i
            .checked_sub(1)
            .map_or(0, |p| sequences[index].common_prefix(&sequences[order[p]]));
        tokens += sequences[index].fed() - shared;
    }
    tokens
}

/// Indices in lexicographic order of the fed tokens, ties in the given order.
fn sorted(sequences: &[Sequence<'_>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (&sequences[a], &sequences[b]);
        let common = a.common_prefix(b);
        match (common < a.fed(), common < b.fed()) {
            (true, true) => a.token(common).cmp(&b.token(common)),
            (more, other) => more.cmp(&other),
        }
    });
    order
}

/// Adds the subtree of `group`, whose members agree on the first `depth` tokens.
fn branch(
    sequences: &[Sequence<'_>],
    group: &[usize],
    depth: usize,
    parent: Option<usize>,
    segments: &mut Vec<Segment>,
    paths: &mut [Vec<usize>],
) {
    let mut rest = group;
    while let Some(&first) = rest.first() {
        if sequences[first].fed() <= depth {
            rest = &rest[1..];
            continue;
        }
        let token = sequences[first].token(depth);
        let size = rest
            .iter()
            .take_while(|&&i| sequences[i].token(depth) == token)
            .count();
        let (children, others) = rest.split_at(size);
        rest = others;

        // The members are sorted, so the first and the last differ the earliest.
        let last = children[size - 1];
        let mut end = if size == 1 {
            sequences[first].fed()
        } else {
            sequences[first].common_prefix(&sequences[last])
        };
        for &member in children {
            let border = sequences[member].prompt.len();
            if border > depth {
                end = end.min(border);
            }
        }
        let id = segments.len();
        segments.push(Segment {
            parent,
            tokens: (depth..end).map(|i| sequences[first].token(i)).collect(),
            start: depth,
            has_response: children.iter().any(|&i| sequences[i].prompt.len() <= depth),
        });
        for &member in children {
            paths[member].push(id);
        }
        branch(sequences, children, end, Some(id), segments, paths);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop, prop_assert, prop_assert_eq, proptest};

    use super::{Sequence, micro_batches, pack};

    fn sequence<'a>(prompt: &'a [u32], response: &'a [u32]) -> Sequence<'a> {
        Sequence {
            prompt,
            response,
            temperature: 1.0,
        }
    }

    #[test]
    fn rollouts_of_one_prompt_share_it() {
        let packed = pack(&[
            sequence(&[1, 2, 3], &[4, 5]),
            sequence(&[1, 2, 3], &[6, 7]),
            sequence(&[1, 2, 3], &[4, 8]),
        ]);
        assert_eq!(packed.segments[0].tokens, [1, 2, 3]);
        assert!(!packed.segments[0].has_response);
        assert_eq!(packed.tokens(), 3 + 1 + 1, "the shared 4 is fed once, too");
        assert_eq!(packed.prompt_rows, [2, 2, 2]);
    }

    #[test]
    fn a_turn_extends_the_turn_before() {
        let packed = pack(&[
            sequence(&[1, 2], &[3, 4]),
            sequence(&[1, 2, 3, 4, 5], &[6, 7]),
        ]);
        assert_eq!(packed.tokens(), 6);
        let second = packed.segments.iter().find(|s| s.tokens.contains(&3));
        assert!(
            second.is_some_and(|s| s.has_response),
            "turn one trains on it"
        );
    }

    proptest! {
        #[test]
        fn every_target_sees_exactly_its_own_history(
            raw in prop::collection::vec(
                (prop::collection::vec(0u32..3, 1..6), prop::collection::vec(0u32..3, 1..6)), 1..8),
            budget in 4usize..20,
        ) {
            let sequences: Vec<_> = raw.iter().map(|(p, r)| sequence(p, r)).collect();
            let packed = pack(&sequences);
            let mut owner = Vec::new();
            for (id, segment) in packed.segments.iter().enumerate() {
                owner.extend((0..segment.tokens.len()).map(|offset| (id, offset)));
            }
            for (i, (prompt, response)) in raw.iter().enumerate() {
                prop_assert_eq!(packed.spans[i].len(), response.len());
                let full: Vec<u32> = prompt.iter().chain(response).copied().collect();
                for (j, target) in packed.targets[packed.spans[i].clone()].iter().enumerate() {
                    prop_assert_eq!(target.token, response[j]);
                    // Walk up from the row; the tokens seen must be the sequence's history.
                    let (mut id, offset) = owner[target.row];
                    let mut history: Vec<u32> = packed.segments[id].tokens[..=offset].to_vec();
                    while let Some(parent) = packed.segments[id].parent {
                        prop_assert!(parent < id);
                        let mut longer = packed.segments[parent].tokens.clone();
                        prop_assert_eq!(packed.segments[id].start, packed.segments[parent].start + longer.len());
                        longer.extend(history);
                        history = longer;
                        id = parent;
                    }
                    prop_assert_eq!(&history[..], &full[..prompt.len() + j]);
                }
            }
            prop_assert_eq!(super::packed_tokens(&sequences), packed.tokens());
            let units: Vec<_> = sequences.iter().map(|s| vec![*s]).collect();
            let batches = micro_batches(&units, budget);
            let mut seen: Vec<usize> = batches.iter().flatten().copied().collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..raw.len()).collect::<Vec<_>>());
            for batch in &batches {
                let members: Vec<_> = batch.iter().map(|&i| sequences[i]).collect();
                prop_assert!(batch.len() == 1 || pack(&members).tokens() <= budget);
            }
        }
    }
}
