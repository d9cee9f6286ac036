//! The forward for a few sequences with one new token each: what decoding does.
//!
//! It computes what [`Model::forward`](crate::Model::forward) computes for any batch,
//! from the same weights, caches and adapters, in five stages per layer that all
//! compute threads go through together (see [`crate::lockstep`]): queries, keys and
//! values; attention; output; gate and up; down. Norms, rotary positions and the
//! small side of LoRA are cheap enough for every thread to compute for itself, which
//! saves a stage each. Long pasts are cut into pieces, so that one sequence keeps
//! every thread busy, and the pieces' softmaxes are merged (Flash-Decoding: Dao et
//! al. 2023).
#![allow(unsafe_code)]

use std::ops::{Deref, Range};
use std::sync::{Arc, PoisonError, RwLockWriteGuard};

use candle_core::{Layout, Storage, Tensor};

use crate::attention::Plan;
use crate::config::Config;
use crate::dequantise::{axpy_here, dot, dot_here, exp, multiversion};
use crate::error::{ModelError, Result};
use crate::kv::{KvPool, LayerCache};
use crate::linear::{Linear, Shared};
use crate::lockstep::{Crew, Lockstep};
use crate::lora::{LoraAdapter, Target};
use crate::ops::{RopeTable, rms_row, swiglu_chunk};
use crate::vec_dot::{MAX_ROWS, rows_dot};

/// Fewest keys worth a piece of their own, and most that a piece may have.
const PIECE: Range<usize> = 32..1024;
/// Stages of one layer.
const STAGES: usize = 5;
/// Fewest multiplications for which a thread takes a chunk of a stage.
const GRAIN: usize = 16 * 1024;

/// One layer's weights, as the model keeps them.
pub(crate) struct LayerWeights<'a> {
    pub(crate) attention_norm: &'a [f32],
    pub(crate) mlp_norm: &'a [f32],
    pub(crate) q_norm: Option<&'a [f32]>,
    pub(crate) k_norm: Option<&'a [f32]>,
    pub(crate) linears: &'a [Arc<Linear>; 7],
}

/// One decoding step.
pub(crate) struct Step<'a> {
    pub(crate) config: &'a Config,
    pub(crate) layers: Vec<LayerWeights<'a>>,
    pub(crate) norm: &'a [f32],
    pub(crate) plan: &'a Plan,
    pub(crate) rope: &'a RopeTable,
    /// Row and cache slot of every key and value to be stored.
    pub(crate) writes: Vec<(usize, usize)>,
    pub(crate) pool: Option<&'a KvPool>,
    /// The adapter of every row.
    pub(crate) adapters: Vec<Option<&'a Arc<LoraAdapter>>>,
}

/// A run of keys and values, `[len, kv_heads · d]` each.
type Run<'a> = (&'a [f32], &'a [f32]);

/// Some keys of one sequence.
#[derive(Clone, Copy)]
struct Piece {
    row: usize,
    start: usize,
    end: usize,
    /// Whether the row's own key belongs to it.
    last: bool,
}

/// `A` `[r, in]` and `B` `[out, r]` of one row, and their scale.
#[derive(Clone, Copy)]
struct Lora<'a> {
    a: &'a [f32],
    b: &'a [f32],
    rank: usize,
    scale: f32,
}

/// What every thread reads and some thread writes, stage by stage.
#[derive(Clone, Copy)]
struct Buffers {
    x: Shared,
    q: Shared,
    k: Shared,
    v: Shared,
    /// Per piece: `heads · d` unnormalised outputs, then `heads` maxima and sums.
    partial: Shared,
    mlp: Shared,
}

/// One thread's own memory.
#[derive(Default)]
struct Scratch {
    h: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    scores: Vec<f32>,
    out: Vec<f32>,
    out2: Vec<f32>,
    t: Vec<f32>,
    t2: Vec<f32>,
}

struct Heads {
    heads: usize,
    group: usize,
    d: usize,
    width: usize,
}

multiversion! {
    /// Unnormalised attention of `q` (`[heads, d]`) over `runs`, into `partial`.
    fn attend(q: &[f32], runs: &[Run<'_>], shape: &Heads, scores: &mut [f32], partial: &mut [f32]) {
        let Heads { heads, group, d, width } = *shape;
        let len = scores.len() / heads;
        let mut column = 0;
        for (keys, _) in runs {
            for key in keys.chunks_exact(width) {
                for h in 0..heads {
                    let key = &key[h / group * d..][..d];
                    scores[h * len + column] = dot_here(&q[h * d..][..d], key);
                }
                column += 1;
            }
        }
        let scale = 1.0 / (d as f32).sqrt();
        let (out, rest) = partial.split_at_mut(heads * d);
        let (maxima, sums) = rest.split_at_mut(heads);
        for h in 0..heads {
            let scores = &mut scores[h * len..(h + 1) * len];
            let mut max = f32::NEG_INFINITY;
            for s in scores.iter() {
                max = if *s > max { *s } else { max };
            }
            let mut sum = 0f32;
            for s in scores.iter_mut() {
                *s = exp((*s - max) * scale);
                sum += *s;
            }
            maxima[h] = max * scale;
            sums[h] = sum;
        }
        out.fill(0.0);
        let mut column = 0;
        for (_, values) in runs {
            for value in values.chunks_exact(width) {
                for h in 0..heads {
                    let value = &value[h / group * d..][..d];
                    axpy_here(scores[h * len + column], value, &mut out[h * d..][..d]);
                }
                column += 1;
            }
        }
    }
}

impl Step<'_> {
    /// Whether the batch is one that this forward computes.
    pub(crate) fn fits(plan: &Plan) -> bool {
        plan.segments.len() <= MAX_ROWS
            && plan
                .segments
                .iter()
                .all(|s| s.rows.len() == 1 && s.ancestors.is_empty())
    }

    /// Final hidden states `[m, hidden]` of embedded tokens `x` `[m, hidden]`.
    ///
    /// Runs on every thread of the current rayon pool; only one such run may be on a
    /// pool at a time.
    ///
    /// # Errors
    /// When an adapter is not in memory as f32.
    pub(crate) fn run(&self, mut x: Vec<f32>) -> Result<Vec<f32>> {
        let c = self.config;
        let m = self.plan.segments.len();
        let (q_width, kv_width) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let threads = rayon::current_num_threads();
        let pieces = self.pieces(threads);
        let stride = c.heads * (c.head_dim + 2);
        let mut q = vec![0f32; m * q_width];
        let mut k = vec![0f32; m * kv_width];
        let mut v = vec![0f32; m * kv_width];
        let mut partial = vec![0f32; pieces.len() * stride];
        let mut mlp = vec![0f32; m * c.intermediate];
        let buffers = Buffers {
            x: Shared(x.as_mut_ptr()),
            q: Shared(q.as_mut_ptr()),
            k: Shared(k.as_mut_ptr()),
            v: Shared(v.as_mut_ptr()),
            partial: Shared(partial.as_mut_ptr()),
            mlp: Shared(mlp.as_mut_ptr()),
        };
        // The caches stay locked for the whole step: a key is written by one thread while
        // others read earlier ones.
        let mut guards: Vec<RwLockWriteGuard<'_, LayerCache>> = self
            .pool
            .iter()
            .flat_map(|p| &p.layers)
            .map(|l| l.write().unwrap_or_else(PoisonError::into_inner))
            .collect();
        let caches: Vec<(Shared, Shared)> = guards
            .iter_mut()
            .map(|g| (Shared(g.k.as_mut_ptr()), Shared(g.v.as_mut_ptr())))
            .collect();
        let storages = self.storages();
        let loras = self.loras(&storages)?;
        let lockstep = Lockstep::new(threads, STAGES * self.layers.len());
        rayon::broadcast(|_| {
            let mut crew = lockstep.join();
            let mut scratch = Scratch::default();
            for layer in 0..self.layers.len() {
                self.layer(
                    layer,
                    &mut crew,
                    buffers,
                    &pieces,
                    caches.get(layer).copied(),
                    &loras[layer * 7 * m..(layer + 1) * 7 * m],
                    &mut scratch,
                );
            }
        });
        let mut y = vec![0f32; x.len()];
        for (y, x) in y.chunks_exact_mut(c.hidden).zip(x.chunks_exact(c.hidden)) {
            rms_row(x, self.norm, c.norm_eps, y);
        }
        Ok(y)
    }

    /// Every sequence's keys in pieces; a sequence's pieces are neighbours.
    fn pieces(&self, threads: usize) -> Vec<Piece> {
        let m = self.plan.segments.len();
        let mut pieces = Vec::new();
        for (row, segment) in self.plan.segments.iter().enumerate() {
            let past: usize = segment.past.iter().map(ExactSizeIterator::len).sum();
            let wanted = (4 * threads).div_ceil(m);
            let len = past.div_ceil(wanted).clamp(PIECE.start, PIECE.end);
            let mut start = 0;
            loop {
                let end = (start + len).min(past);
                let last = end == past;
                pieces.push(Piece {
                    row,
                    start,
                    end,
                    last,
                });
                if last {
                    break;
                }
                start = end;
            }
        }
        pieces
    }

    /// Locks the tensors of every layer, target and row that has an adapter: `A`, `B`.
    #[allow(clippy::type_complexity)]
    fn storages(&self) -> Vec<Option<[(impl Deref<Target = Storage> + '_, &Layout); 2]>> {
        let mut storages = Vec::with_capacity(self.layers.len() * 7 * self.adapters.len());
        for layer in 0..self.layers.len() {
            for target in Target::ALL {
                for adapter in &self.adapters {
                    let pair = adapter.and_then(|a| a.pair(layer, target));
                    storages.push(pair.map(|p| [&p.a, &p.b].map(Tensor::storage_and_layout)));
                }
            }
        }
        storages
    }

    /// `[layer][target][row]`.
    #[allow(clippy::type_complexity)]
    fn loras<'s, G: Deref<Target = Storage>>(
        &self,
        storages: &'s [Option<[(G, &Layout); 2]>],
    ) -> Result<Vec<Option<Lora<'s>>>> {
        let values = |(guard, layout): &'s (G, &Layout)| -> Result<&'s [f32]> {
            match (&**guard, layout.contiguous_offsets()) {
                (Storage::Cpu(storage), Some((start, end))) => {
                    Ok(&storage.as_slice::<f32>()?[start..end])
                }
                _ => Err(ModelError::Invalid(
                    "an adapter's matrix is not contiguous in memory".into(),
                )),
            }
        };
        let rows = self.adapters.iter().cycle();
        storages
            .iter()
            .zip(rows)
            .map(|(pair, adapter)| match (pair, adapter) {
                (Some([a, b]), Some(adapter)) => Ok(Some(Lora {
                    a: values(a)?,
                    b: values(b)?,
                    rank: adapter.config().rank,
                    scale: adapter.config().scale(),
                })),
                _ => Ok(None),
            })
            .collect()
    }

    /// The pieces `range` of rows of `x` stand for `[m, cols]`; chunk of `y = W x + b + LoRA`
    /// into `out[r * m + i]`.
    fn rows(
        linear: &Linear,
        loras: &[Option<Lora<'_>>],
        t: &[f32],
        x: &[f32],
        rows: Range<usize>,
        out: &mut Vec<f32>,
    ) {
        let m = loras.len();
        out.clear();
        out.resize(rows.len() * m, 0.0);
        rows_dot(linear.weight(), rows.clone(), x, out);
        if let Some(bias) = linear.bias() {
            for (out, b) in out.chunks_exact_mut(m).zip(&bias[rows.clone()]) {
                for y in out {
                    *y += b;
                }
            }
        }
        let mut from = 0;
        for (i, lora) in loras.iter().enumerate() {
            let Some(lora) = lora else { continue };
            let t = &t[from..from + lora.rank];
            from += lora.rank;
            for (r, row) in rows.clone().enumerate() {
                out[r * m + i] += dot(t, &lora.b[row * lora.rank..(row + 1) * lora.rank]);
            }
        }
    }

    /// `scale · A x` of every row that has an adapter, one after the other.
    fn shrink(loras: &[Option<Lora<'_>>], x: &[f32], t: &mut Vec<f32>) {
        t.clear();
        let k = x.len() / loras.len();
        for (lora, x) in loras.iter().zip(x.chunks_exact(k)) {
            if let Some(lora) = lora {
                t.extend(lora.a.chunks_exact(k).map(|a| lora.scale * dot(a, x)));
            }
        }
    }

    fn norm_rows(&self, x: Shared, w: &[f32], h: &mut Vec<f32>) {
        let (m, width) = (self.adapters.len(), self.config.hidden);
        h.resize(m * width, 0.0);
        // SAFETY: x is [m, hidden], and no thread writes it in the stage that reads it.
        let x = unsafe { std::slice::from_raw_parts(x.get(), m * width) };
        for (h, x) in h.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            rms_row(x, w, self.config.norm_eps, h);
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn layer(
        &self,
        index: usize,
        crew: &mut Crew<'_>,
        at: Buffers,
        pieces: &[Piece],
        cache: Option<(Shared, Shared)>,
        loras: &[Option<Lora<'_>>],
        s: &mut Scratch,
    ) {
        let c = self.config;
        let m = self.adapters.len();
        let layer = &self.layers[index];
        let lora = |t: Target| &loras[t as usize * m..(t as usize + 1) * m];
        let linear = |t: Target| &*layer.linears[t as usize];
        let (q_width, kv_width) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let grain = |cols: usize| GRAIN.div_ceil(cols * m);

        // Queries, keys and values: one numbering of all their output rows.
        self.norm_rows(at.x, layer.attention_norm, &mut s.h);
        let parts = [
            (Target::Q, 0, q_width, at.q),
            (Target::K, q_width, kv_width, at.k),
            (Target::V, q_width + kv_width, kv_width, at.v),
        ];
        let mut t = [const { Vec::new() }; 3];
        for ((target, ..), t) in parts.iter().zip(&mut t) {
            Self::shrink(lora(*target), &s.h, t);
        }
        crew.stage(q_width + 2 * kv_width, grain(c.hidden), |rows| {
            for ((target, first, width, to), t) in parts.iter().zip(&t) {
                let start = rows.start.max(*first);
                let end = rows.end.min(first + width);
                if start >= end {
                    continue;
                }
                let rows = start - first..end - first;
                Self::rows(
                    linear(*target),
                    lora(*target),
                    t,
                    &s.h,
                    rows.clone(),
                    &mut s.out,
                );
                for (row, out) in rows.zip(s.out.chunks_exact(m)) {
                    for (i, y) in out.iter().enumerate() {
                        // SAFETY: the buffer is [m, width], and column `row` is this chunk's.
                        unsafe { *to.get().add(i * width + row) = *y };
                    }
                }
            }
        });

        // Attention, piece by piece.
        crew.stage(pieces.len(), 1, |range| {
            for piece in range {
                self.attend_piece(index, at, pieces[piece], piece, cache, s);
            }
        });

        // Output, added to the residual stream.
        self.merge(at.partial, pieces, &mut s.h);
        self.add_linear(crew, linear(Target::O), lora(Target::O), at.x, s);

        // Gate and up, multiplied.
        self.norm_rows(at.x, layer.mlp_norm, &mut s.h);
        Self::shrink(lora(Target::Gate), &s.h, &mut s.t);
        Self::shrink(lora(Target::Up), &s.h, &mut s.t2);
        crew.stage(c.intermediate, grain(2 * c.hidden), |rows| {
            let (gate, up) = (Target::Gate, Target::Up);
            Self::rows(
                linear(gate),
                lora(gate),
                &s.t,
                &s.h,
                rows.clone(),
                &mut s.out,
            );
            Self::rows(linear(up), lora(up), &s.t2, &s.h, rows.clone(), &mut s.out2);
            s.scores.resize(s.out.len(), 0.0);
            swiglu_chunk(&s.out, &s.out2, &mut s.scores[..s.out.len()]);
            for (row, y) in rows.zip(s.scores.chunks_exact(m)) {
                for (i, y) in y.iter().enumerate() {
                    // SAFETY: the buffer is [m, intermediate], and column `row` is this chunk's.
                    unsafe { *at.mlp.get().add(i * c.intermediate + row) = *y };
                }
            }
        });

        // Down, added to the residual stream.
        s.h.clear();
        // SAFETY: the buffer is [m, intermediate], and nothing writes it in this stage.
        s.h.extend_from_slice(unsafe {
            std::slice::from_raw_parts(at.mlp.get(), m * c.intermediate)
        });
        self.add_linear(crew, linear(Target::Down), lora(Target::Down), at.x, s);
    }

    /// `x += W h + b + LoRA` with `h` in the scratch.
    fn add_linear(
        &self,
        crew: &mut Crew<'_>,
        linear: &Linear,
        loras: &[Option<Lora<'_>>],
        x: Shared,
        s: &mut Scratch,
    ) {
        let (m, hidden) = (loras.len(), self.config.hidden);
        Self::shrink(loras, &s.h, &mut s.t);
        crew.stage(hidden, GRAIN.div_ceil(linear.cols() * m), |rows| {
            Self::rows(linear, loras, &s.t, &s.h, rows.clone(), &mut s.out);
            for (row, out) in rows.zip(s.out.chunks_exact(m)) {
                for (i, y) in out.iter().enumerate() {
                    // SAFETY: x is [m, hidden]; column `row` is this chunk's in this stage.
                    unsafe { *x.get().add(i * hidden + row) += y };
                }
            }
        });
    }

    /// Normalises (Qwen3) and rotates the heads of one row.
    fn heads(&self, row: usize, x: &mut [f32], norm: Option<&[f32]>, copy: &mut Vec<f32>) {
        if let Some(norm) = norm {
            copy.clear();
            copy.extend_from_slice(x);
            let d = self.config.head_dim;
            for (y, x) in x.chunks_exact_mut(d).zip(copy.chunks_exact(d)) {
                rms_row(x, norm, self.config.norm_eps, y);
            }
        }
        self.rope.rotate(row, x);
    }

    fn attend_piece(
        &self,
        index: usize,
        at: Buffers,
        piece: Piece,
        number: usize,
        cache: Option<(Shared, Shared)>,
        s: &mut Scratch,
    ) {
        let c = self.config;
        let layer = &self.layers[index];
        let shape = Heads {
            heads: c.heads,
            group: c.heads / c.kv_heads,
            d: c.head_dim,
            width: c.kv_heads * c.head_dim,
        };
        let (q_width, width) = (c.heads * c.head_dim, shape.width);
        let row = piece.row;
        s.q.clear();
        // SAFETY: queries are [m, heads · d], written in an earlier stage.
        s.q.extend_from_slice(unsafe {
            std::slice::from_raw_parts(at.q.get().add(row * q_width), q_width)
        });
        self.heads(row, &mut s.q, layer.q_norm, &mut s.out2);

        let mut runs: Vec<Run<'_>> = Vec::with_capacity(2);
        if let Some((k, v)) = cache {
            let mut before = 0;
            for run in &self.plan.segments[row].past {
                let start = piece.start.max(before);
                let end = piece.end.min(before + run.len());
                if start < end {
                    let from = (run.start + start - before) * width;
                    let len = (end - start) * width;
                    // SAFETY: the slots lie inside the cache, whose lock the step holds. They
                    // are past tokens; this step writes new slots only, which no run names.
                    runs.push(unsafe {
                        (
                            std::slice::from_raw_parts(k.get().add(from), len),
                            std::slice::from_raw_parts(v.get().add(from), len),
                        )
                    });
                }
                before += run.len();
            }
        }
        let mut keys = piece.end - piece.start;
        if piece.last {
            keys += 1;
            s.k.clear();
            // SAFETY: keys and values are [m, kv_heads · d], written in an earlier stage.
            let value = unsafe {
                s.k.extend_from_slice(std::slice::from_raw_parts(
                    at.k.get().add(row * width),
                    width,
                ));
                std::slice::from_raw_parts(at.v.get().add(row * width), width)
            };
            self.heads(row, &mut s.k, layer.k_norm, &mut s.out2);
            if let Some((k, v)) = cache {
                for (_, slot) in self.writes.iter().filter(|(r, _)| *r == row) {
                    // SAFETY: the slot lies inside the cache, is this row's alone, and no
                    // piece reads it in this step.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            s.k.as_ptr(),
                            k.get().add(slot * width),
                            width,
                        );
                        std::ptr::copy_nonoverlapping(
                            value.as_ptr(),
                            v.get().add(slot * width),
                            width,
                        );
                    }
                }
            }
            runs.push((&s.k, value));
        }
        let stride = c.heads * (c.head_dim + 2);
        // SAFETY: this piece's part of the buffer is this task's alone.
        let partial = unsafe {
            std::slice::from_raw_parts_mut(at.partial.get().add(number * stride), stride)
        };
        s.scores.clear();
        s.scores.resize(c.heads * keys, 0.0);
        attend(&s.q, &runs, &shape, &mut s.scores, partial);
    }

    /// Merges the pieces' softmaxes: `[m, heads · d]`.
    fn merge(&self, partial: Shared, pieces: &[Piece], out: &mut Vec<f32>) {
        let (heads, d) = (self.config.heads, self.config.head_dim);
        let stride = heads * (d + 2);
        // SAFETY: written in an earlier stage, and read only in this one.
        let partial = unsafe { std::slice::from_raw_parts(partial.get(), pieces.len() * stride) };
        out.clear();
        out.resize(self.adapters.len() * heads * d, 0.0);
        let mut first = 0;
        while first < pieces.len() {
            let row = pieces[first].row;
            let count = pieces[first..].iter().take_while(|p| p.row == row).count();
            let parts = &partial[first * stride..(first + count) * stride];
            for h in 0..heads {
                let maximum = |p: &[f32]| p[heads * d + h];
                let sum = |p: &[f32]| p[heads * (d + 1) + h];
                let max = parts
                    .chunks_exact(stride)
                    .map(maximum)
                    .fold(f32::NEG_INFINITY, f32::max);
                let total: f32 = parts
                    .chunks_exact(stride)
                    .map(|p| exp(maximum(p) - max) * sum(p))
                    .sum();
                let out = &mut out[(row * heads + h) * d..][..d];
                for p in parts.chunks_exact(stride) {
                    let weight = exp(maximum(p) - max) / total;
                    for (y, x) in out.iter_mut().zip(&p[h * d..(h + 1) * d]) {
                        *y += weight * x;
                    }
                }
            }
            first += count;
        }
    }
}
