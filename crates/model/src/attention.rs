//! Causal attention over a ragged batch whose segments form a forest.
//!
//! A token attends to the cached past of its root, to every token of its ancestors,
//! and to its own segment up to itself. Queries are handled in tiles, so the largest
//! buffer is one tile of scores, never `[n, n]`. Grouped key/value heads are read in
//! place. The backward recomputes the tile's probabilities (as FlashAttention does:
//! Dao et al. 2022, arXiv:2205.14135).
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result as TensorResult, Shape, Tensor};
use rayon::prelude::*;

use crate::dequantise::{axpy, dot, exp_sum};
use crate::kv::LayerCache;
use crate::linear::{Shared, gemm, slice};

/// Query tokens per tile.
const TILE: usize = 32;
/// Fewest score rows for which GEMM is used.
const GEMM_ROWS: usize = 8;

/// What one segment attends to.
#[derive(Debug)]
pub(crate) struct SegmentPlan {
    /// Its rows in the batch.
    pub(crate) rows: Range<usize>,
    /// Runs of cache slots that hold the past of its root, in order.
    pub(crate) past: Vec<Range<usize>>,
    /// Batch rows of its ancestors, root first.
    pub(crate) ancestors: Vec<Range<usize>>,
}

/// Where every segment of a batch looks.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) segments: Vec<SegmentPlan>,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

/// `q`: `[N, heads · d]`, `k`, `v`: `[N, kv_heads · d]` → `[N, heads · d]`.
pub(crate) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    plan: &Arc<Plan>,
    cache: Option<&Arc<RwLock<LayerCache>>>,
) -> TensorResult<Tensor> {
    let op = Attention {
        plan: plan.clone(),
        cache: cache.cloned(),
    };
    q.contiguous()?
        .apply_op3(&k.contiguous()?, &v.contiguous()?, op)
}

struct Attention {
    plan: Arc<Plan>,
    cache: Option<Arc<RwLock<LayerCache>>>,
}

/// A run of keys and values: pointers to the first row, and the number of rows.
#[derive(Clone, Copy)]
struct Source<'a> {
    k: &'a [f32],
    v: &'a [f32],
    /// First batch row, when the run lies in the batch.
    batch_row: Option<usize>,
    len: usize,
}

/// One tile of queries of one key/value head.
#[derive(Clone, Copy)]
struct Task {
    segment: usize,
    start: usize,
    end: usize,
    kv_head: usize,
}

impl Plan {
    fn tasks(&self) -> Vec<Task> {
        let mut tasks = Vec::new();
        for (segment, s) in self.segments.iter().enumerate() {
            for start in (0..s.rows.len()).step_by(TILE) {
                let end = (start + TILE).min(s.rows.len());
                for kv_head in 0..self.kv_heads {
                    tasks.push(Task {
                        segment,
                        start,
                        end,
                        kv_head,
                    });
                }
            }
        }
        tasks
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The key/value runs that the tile sees; the last one ends with the tile itself.
    fn sources<'a>(
        &self,
        task: Task,
        k: &'a [f32],
        v: &'a [f32],
        cache: Option<&'a LayerCache>,
    ) -> Vec<Source<'a>> {
        let width = self.kv_heads * self.head_dim;
        let segment = &self.segments[task.segment];
        let mut sources = Vec::with_capacity(segment.past.len() + segment.ancestors.len() + 1);
        if let Some(cache) = cache {
            for run in &segment.past {
                let range = run.start * width..run.end * width;
                sources.push(Source {
                    k: &cache.k[range.clone()],
                    v: &cache.v[range],
                    batch_row: None,
                    len: run.len(),
                });
            }
        }
        let own = segment.rows.start..segment.rows.start + task.end;
        for rows in segment
            .ancestors
            .iter()
            .cloned()
            .chain(std::iter::once(own))
        {
            sources.push(Source {
                k: &k[rows.start * width..rows.end * width],
                v: &v[rows.start * width..rows.end * width],
                batch_row: Some(rows.start),
                len: rows.len(),
            });
        }
        sources
    }

    /// Copies the tile's queries (or gradients) of one head group: `[tokens · group, d]`.
    fn gather(&self, task: Task, x: &[f32], out: &mut Vec<f32>) {
        let (group, d) = (self.group(), self.head_dim);
        let first = self.segments[task.segment].rows.start;
        out.clear();
        for row in first + task.start..first + task.end {
            let at = (row * self.heads + task.kv_head * group) * d;
            out.extend_from_slice(&x[at..at + group * d]);
        }
    }

    /// Unnormalised probabilities of the tile, `[tokens · group, keys]`, and their row sums.
    fn probabilities(
        &self,
        task: Task,
        q: &[f32],
        sources: &[Source<'_>],
        scores: &mut Vec<f32>,
        sums: &mut Vec<f32>,
    ) -> usize {
        let (group, d) = (self.group(), self.head_dim);
        let width = self.kv_heads * d;
        let keys: usize = sources.iter().map(|s| s.len).sum();
        let rows = (task.end - task.start) * group;
        scores.clear();
        scores.resize(rows * keys, 0.0);
        let mut column = 0;
        for source in sources {
            let at = task.kv_head * d;
            if rows < GEMM_ROWS {
                for j in 0..source.len {
                    let key = &source.k[j * width + at..j * width + at + d];
                    for i in 0..rows {
                        scores[i * keys + column + j] = dot(&q[i * d..(i + 1) * d], key);
                    }
                }
            } else {
                // SAFETY: q is [rows, d]; the run has `len` rows of `width` values, read at
                // one head's columns; the scores' columns lie inside [rows, keys].
                unsafe {
                    gemm(
                        (rows, source.len, d),
                        scores.as_mut_ptr().add(column),
                        keys,
                        false,
                        q.as_ptr(),
                        (d, 1),
                        source.k.as_ptr().add(at),
                        (1, width),
                        1.0,
                    );
                }
            }
            column += source.len;
        }
        let scale = 1.0 / (d as f32).sqrt();
        sums.clear();
        for (i, row) in scores.chunks_exact_mut(keys).enumerate() {
            let hidden = task.end - task.start - 1 - i / group;
            let (seen, unseen) = row.split_at_mut(keys - hidden);
            sums.push(exp_sum(seen, scale));
            unseen.fill(0.0);
        }
        keys
    }
}

#[derive(Default)]
struct Scratch {
    q: Vec<f32>,
    g: Vec<f32>,
    scores: Vec<f32>,
    sums: Vec<f32>,
    out: Vec<f32>,
    d_scores: Vec<f32>,
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "forest-attention"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> TensorResult<(CpuStorage, Shape)> {
        let (q, k, v) = (slice(s1, l1)?, slice(s2, l2)?, slice(s3, l3)?);
        let plan = &*self.plan;
        let (group, d) = (plan.group(), plan.head_dim);
        let width = plan.kv_heads * d;
        let mut y = vec![0f32; q.len()];
        let out = Shared(y.as_mut_ptr());
        let cache = self
            .cache
            .as_ref()
            .map(|c| c.read().unwrap_or_else(PoisonError::into_inner));
        let cache = cache.as_deref();
        plan.tasks()
            .into_par_iter()
            .for_each_init(Scratch::default, |s, task| {
                plan.gather(task, q, &mut s.q);
                let sources = plan.sources(task, k, v, cache);
                let keys = plan.probabilities(task, &s.q, &sources, &mut s.scores, &mut s.sums);
                let rows = s.sums.len();
                s.out.clear();
                s.out.resize(rows * d, 0.0);
                let (mut column, at) = (0, task.kv_head * d);
                for (n, source) in sources.iter().enumerate() {
                    if rows < GEMM_ROWS {
                        for j in 0..source.len {
                            let value = &source.v[j * width + at..j * width + at + d];
                            for i in 0..rows {
                                let p = s.scores[i * keys + column + j];
                                axpy(p, value, &mut s.out[i * d..(i + 1) * d]);
                            }
                        }
                    } else {
                        // SAFETY: the scores' columns of this run are [rows, len] with stride
                        // `keys`; the run's values are [len, d] with stride `width`.
                        unsafe {
                            gemm(
                                (rows, d, source.len),
                                s.out.as_mut_ptr(),
                                d,
                                n > 0,
                                s.scores.as_ptr().add(column),
                                (keys, 1),
                                source.v.as_ptr().add(at),
                                (width, 1),
                                1.0,
                            );
                        }
                    }
                    column += source.len;
                }
                let first = plan.segments[task.segment].rows.start + task.start;
                for i in 0..rows {
                    let inverse = 1.0 / s.sums[i];
                    let at =
                        ((first + i / group) * plan.heads + task.kv_head * group + i % group) * d;
                    for (j, o) in s.out[i * d..(i + 1) * d].iter().enumerate() {
                        // SAFETY: these elements of y belong to this tile and head alone.
                        unsafe { *out.get().add(at + j) = o * inverse };
                    }
                }
            });
        Ok((CpuStorage::F32(y), l1.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _y: &Tensor,
        g: &Tensor,
    ) -> TensorResult<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let values = |t: &Tensor| t.contiguous()?.flatten_all()?.to_vec1::<f32>();
        if q.dtype() != DType::F32 {
            candle_core::bail!("attention has a backward for f32 only");
        }
        let (qs, ks, vs, gs) = (values(q)?, values(k)?, values(v)?, values(g)?);
        let (dq, dk, dv) = self.backward(&qs, &ks, &vs, &gs);
        let tensor =
            |data: Vec<f32>, like: &Tensor| Tensor::from_vec(data, like.shape(), like.device());
        Ok((
            Some(tensor(dq, q)?),
            Some(tensor(dk, k)?),
            Some(tensor(dv, v)?),
        ))
    }
}

impl Attention {
    fn backward(
        &self,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        g: &[f32],
    ) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let plan = &*self.plan;
        let (group, d) = (plan.group(), plan.head_dim);
        let width = plan.kv_heads * d;
        let scale = 1.0 / (d as f32).sqrt();
        let (mut dq, mut dk, mut dv) = (
            vec![0f32; q.len()],
            vec![0f32; k.len()],
            vec![0f32; v.len()],
        );
        let (dq_at, dk_at, dv_at) = (
            Shared(dq.as_mut_ptr()),
            Shared(dk.as_mut_ptr()),
            Shared(dv.as_mut_ptr()),
        );
        let cache = self
            .cache
            .as_ref()
            .map(|c| c.read().unwrap_or_else(PoisonError::into_inner));
        let cache = cache.as_deref();
        let tasks = plan.tasks();
        // Tiles of one key/value head share rows of dk and dv, so a head is one thread's work.
        (0..plan.kv_heads).into_par_iter().for_each(|kv_head| {
            let mut s = Scratch::default();
            let at = kv_head * d;
            for task in tasks.iter().copied().filter(|t| t.kv_head == kv_head) {
                plan.gather(task, q, &mut s.q);
                plan.gather(task, g, &mut s.g);
                let sources = plan.sources(task, k, v, cache);
                let keys = plan.probabilities(task, &s.q, &sources, &mut s.scores, &mut s.sums);
                let rows = s.sums.len();
                for (row, sum) in s.scores.chunks_exact_mut(keys).zip(&s.sums) {
                    let inverse = 1.0 / sum;
                    for p in row {
                        *p *= inverse;
                    }
                }
                s.d_scores.clear();
                s.d_scores.resize(rows * keys, 0.0);
                let mut column = 0;
                for source in &sources {
                    // SAFETY: shapes as in the forward pass; columns `at..at + d` of dv belong
                    // to this head and therefore to this thread.
                    unsafe {
                        let p = s.scores.as_ptr().add(column);
                        gemm(
                            (rows, source.len, d),
                            s.d_scores.as_mut_ptr().add(column),
                            keys,
                            false,
                            s.g.as_ptr(),
                            (d, 1),
                            source.v.as_ptr().add(at),
                            (1, width),
                            1.0,
                        );
                        if let Some(row) = source.batch_row {
                            let to = dv_at.get().add(row * width + at);
                            gemm(
                                (source.len, d, rows),
                                to,
                                width,
                                true,
                                p,
                                (1, keys),
                                s.g.as_ptr(),
                                (d, 1),
                                1.0,
                            );
                        }
                    }
                    column += source.len;
                }
                for (ds, p) in s
                    .d_scores
                    .chunks_exact_mut(keys)
                    .zip(s.scores.chunks_exact(keys))
                {
                    let mean = dot(ds, p);
                    for (ds, p) in ds.iter_mut().zip(p) {
                        *ds = p * (*ds - mean) * scale;
                    }
                }
                s.out.clear();
                s.out.resize(rows * d, 0.0);
                let mut column = 0;
                for (n, source) in sources.iter().enumerate() {
                    // SAFETY: as above, for dk; `out` is this thread's own.
                    unsafe {
                        let ds = s.d_scores.as_ptr().add(column);
                        gemm(
                            (rows, d, source.len),
                            s.out.as_mut_ptr(),
                            d,
                            n > 0,
                            ds,
                            (keys, 1),
                            source.k.as_ptr().add(at),
                            (width, 1),
                            1.0,
                        );
                        if let Some(row) = source.batch_row {
                            let to = dk_at.get().add(row * width + at);
                            gemm(
                                (source.len, d, rows),
                                to,
                                width,
                                true,
                                ds,
                                (1, keys),
                                s.q.as_ptr(),
                                (d, 1),
                                1.0,
                            );
                        }
                    }
                    column += source.len;
                }
                let first = plan.segments[task.segment].rows.start + task.start;
                for i in 0..rows {
                    let to = ((first + i / group) * plan.heads + kv_head * group + i % group) * d;
                    for (j, o) in s.out[i * d..(i + 1) * d].iter().enumerate() {
                        // SAFETY: these elements of dq belong to this tile and head alone.
                        unsafe { *dq_at.get().add(to + j) = *o };
                    }
                }
            }
        });
        (dq, dk, dv)
    }
}
