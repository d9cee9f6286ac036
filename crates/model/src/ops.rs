//! RMS norm, rotary positions, SwiGLU and log-probabilities, each with its backward.
//!
//! candle's fast versions of these have no backward and cut the gradient without an
//! error, so they are written here and tested against finite differences.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, Device, Layout, Result as TensorResult, Shape,
    Tensor,
};
use rayon::prelude::*;

use crate::dequantise::{exp, exp_sum_precise, multiversion};
use crate::linear::{Linear, slice};

/// Elements per parallel task of an element-wise operation.
const GRAIN: usize = 16 * 1024;

multiversion! {
    pub(crate) fn rms_row(x: &[f32], w: &[f32], eps: f32, y: &mut [f32]) {
        let r = inverse_rms(x, eps);
        for i in 0..x.len() {
            y[i] = x[i] * r * w[i];
        }
    }
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mut sums = [0f32; 16];
    let chunks = x.chunks_exact(16);
    let mut total = chunks.remainder().iter().map(|v| v * v).sum::<f32>();
    for c in chunks {
        for i in 0..16 {
            sums[i] = c[i].mul_add(c[i], sums[i]);
        }
    }
    total += sums.iter().sum::<f32>();
    1.0 / (total / x.len() as f32 + eps).sqrt()
}

multiversion! {
    fn rms_row_backward(x: &[f32], w: &[f32], g: &[f32], eps: f32, dx: &mut [f32]) {
        let r = inverse_rms(x, eps);
        let mut total = 0f32;
        for i in 0..x.len() {
            total += g[i] * w[i] * x[i];
        }
        let c = total * r * r * r / x.len() as f32;
        for i in 0..x.len() {
            dx[i] = g[i] * w[i] * r - x[i] * c;
        }
    }
}

/// `y = x / rms(x) · w` over rows of `w.len()` values; `w` is frozen.
/// Zhang and Sennrich 2019, arXiv:1910.07467.
pub(crate) fn rms_norm(x: &Tensor, w: &Arc<[f32]>, eps: f32) -> TensorResult<Tensor> {
    x.contiguous()?.apply_op1(RmsNorm { w: w.clone(), eps })
}

struct RmsNorm {
    w: Arc<[f32]>,
    eps: f32,
}

impl CustomOp1 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> TensorResult<(CpuStorage, Shape)> {
        let x = slice(storage, layout)?;
        let d = self.w.len();
        let mut y = vec![0f32; x.len()];
        let rows = (GRAIN / d).max(1) * d;
        y.par_chunks_mut(rows)
            .zip(x.par_chunks(rows))
            .for_each(|(y, x)| {
                for (y, x) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
                    rms_row(x, &self.w, self.eps, y);
                }
            });
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, g: &Tensor) -> TensorResult<Option<Tensor>> {
        let op = RmsNormBackward {
            w: self.w.clone(),
            eps: self.eps,
        };
        Ok(Some(
            x.contiguous()?.apply_op2_no_bwd(&g.contiguous()?, &op)?,
        ))
    }
}

struct RmsNormBackward {
    w: Arc<[f32]>,
    eps: f32,
}

impl CustomOp2 for RmsNormBackward {
    fn name(&self) -> &'static str {
        "rms-norm-backward"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> TensorResult<(CpuStorage, Shape)> {
        let (x, g) = (slice(s1, l1)?, slice(s2, l2)?);
        let d = self.w.len();
        let mut dx = vec![0f32; x.len()];
        let rows = (GRAIN / d).max(1) * d;
        dx.par_chunks_mut(rows)
            .zip(x.par_chunks(rows))
            .zip(g.par_chunks(rows))
            .for_each(|((dx, x), g)| {
                for ((dx, x), g) in dx
                    .chunks_exact_mut(d)
                    .zip(x.chunks_exact(d))
                    .zip(g.chunks_exact(d))
                {
                    rms_row_backward(x, &self.w, g, self.eps, dx);
                }
            });
        Ok((CpuStorage::F32(dx), l1.shape().clone()))
    }
}

/// Cosines and sines of every row's position: two tables `[rows, head_dim / 2]`.
#[derive(Debug)]
pub(crate) struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl RopeTable {
    /// `positions[i]` is the position of row `i`.
    pub(crate) fn new(positions: &[usize], frequencies: &[f32]) -> Self {
        let half = frequencies.len();
        let mut cos = Vec::with_capacity(positions.len() * half);
        let mut sin = Vec::with_capacity(positions.len() * half);
        for p in positions {
            for f in frequencies {
                // f32 angles, as the reference implementations compute them.
                let angle = *p as f32 * f;
                cos.push(angle.cos());
                sin.push(angle.sin());
            }
        }
        Self { cos, sin, half }
    }

    /// Rotates every head of `x`, which is row `row` of the batch.
    pub(crate) fn rotate(&self, row: usize, x: &mut [f32]) {
        let half = self.half;
        let cos = &self.cos[row * half..(row + 1) * half];
        let sin = &self.sin[row * half..(row + 1) * half];
        for head in x.chunks_exact_mut(2 * half) {
            let (a, b) = head.split_at_mut(half);
            for j in 0..half {
                let (x, y) = (a[j], b[j]);
                a[j] = x * cos[j] - y * sin[j];
                b[j] = y * cos[j] + x * sin[j];
            }
        }
    }
}

/// Rotates pairs (i, i + half) of every head: `x` is `[rows, heads * head_dim]`.
/// Su et al. 2021, arXiv:2104.09864, in the half-split layout of Hugging Face.
pub(crate) fn rope(x: &Tensor, table: &Arc<RopeTable>) -> TensorResult<Tensor> {
    x.contiguous()?.apply_op1(Rope {
        table: table.clone(),
        sign: 1.0,
    })
}

struct Rope {
    table: Arc<RopeTable>,
    sign: f32,
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> TensorResult<(CpuStorage, Shape)> {
        let x = slice(storage, layout)?;
        let width = layout.shape().dims2()?.1;
        let half = self.table.half;
        let mut y = vec![0f32; x.len()];
        let rows = (GRAIN / width).max(1);
        y.par_chunks_mut(rows * width)
            .zip(x.par_chunks(rows * width))
            .enumerate()
            .for_each(|(chunk, (y, x))| {
                for (i, (y, x)) in y
                    .chunks_exact_mut(width)
                    .zip(x.chunks_exact(width))
                    .enumerate()
                {
                    let row = chunk * rows + i;
                    let cos = &self.table.cos[row * half..(row + 1) * half];
                    let sin = &self.table.sin[row * half..(row + 1) * half];
                    for (y, x) in y.chunks_exact_mut(2 * half).zip(x.chunks_exact(2 * half)) {
                        let (ya, yb) = y.split_at_mut(half);
                        let (xa, xb) = x.split_at(half);
                        for j in 0..half {
                            let s = sin[j] * self.sign;
                            ya[j] = xa[j] * cos[j] - xb[j] * s;
                            yb[j] = xb[j] * cos[j] + xa[j] * s;
                        }
                    }
                }
            });
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, g: &Tensor) -> TensorResult<Option<Tensor>> {
        let inverse = Rope {
            table: self.table.clone(),
            sign: -self.sign,
        };
        Ok(Some(g.contiguous()?.apply_op1_no_bwd(&inverse)?))
    }
}

multiversion! {
    pub(crate) fn swiglu_chunk(a: &[f32], b: &[f32], y: &mut [f32]) {
        for i in 0..y.len() {
            y[i] = a[i] / (1.0 + exp(-a[i])) * b[i];
        }
    }
}

multiversion! {
    fn swiglu_chunk_backward(a: &[f32], b: &[f32], g: &[f32], da: &mut [f32], db: &mut [f32]) {
        for i in 0..a.len() {
            let s = 1.0 / (1.0 + exp(-a[i]));
            let silu = a[i] * s;
            db[i] = g[i] * silu;
            da[i] = g[i] * b[i] * (s + silu * (1.0 - s));
        }
    }
}

/// `silu(gate) · up`. Shazeer 2020, arXiv:2002.05202.
pub(crate) fn swiglu(gate: &Tensor, up: &Tensor) -> TensorResult<Tensor> {
    gate.contiguous()?.apply_op2(&up.contiguous()?, SwiGlu)
}

struct SwiGlu;

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> TensorResult<(CpuStorage, Shape)> {
        let (a, b) = (slice(s1, l1)?, slice(s2, l2)?);
        let mut y = vec![0f32; a.len()];
        y.par_chunks_mut(GRAIN)
            .zip(a.par_chunks(GRAIN))
            .zip(b.par_chunks(GRAIN))
            .for_each(|((y, a), b)| swiglu_chunk(a, b, y));
        Ok((CpuStorage::F32(y), l1.shape().clone()))
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        _y: &Tensor,
        g: &Tensor,
    ) -> TensorResult<(Option<Tensor>, Option<Tensor>)> {
        let both = a.apply_op3_no_bwd(b, &g.contiguous()?, &SwiGluBackward)?;
        let n = both.dim(0)? / 2;
        let half = |start: usize| both.narrow(0, start, n)?.reshape(a.shape());
        Ok((Some(half(0)?), Some(half(n)?)))
    }
}

struct SwiGluBackward;

impl CustomOp3 for SwiGluBackward {
    fn name(&self) -> &'static str {
        "swiglu-backward"
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
        let (a, b, g) = (slice(s1, l1)?, slice(s2, l2)?, slice(s3, l3)?);
        let n = a.len();
        let mut both = vec![0f32; 2 * n];
        let (da, db) = both.split_at_mut(n);
        da.par_chunks_mut(GRAIN)
            .zip(db.par_chunks_mut(GRAIN))
            .zip(a.par_chunks(GRAIN))
            .zip(b.par_chunks(GRAIN))
            .zip(g.par_chunks(GRAIN))
            .for_each(|((((da, db), a), b), g)| swiglu_chunk_backward(a, b, g, da, db));
        Ok((CpuStorage::F32(both), Shape::from(2 * n)))
    }
}

/// Log-probabilities of chosen tokens, with what the chunked pass computes on the way.
#[derive(Debug)]
pub struct LogProbs {
    /// Natural log-probabilities `[m]`; differentiable with respect to the hidden rows.
    pub logprobs: Tensor,
    /// Entropies in nats `[m]`, without a gradient.
    pub entropy: Vec<f32>,
}

/// Rows whose logits exist at one time.
const HEAD_ROWS: usize = 64;

/// log softmax(h Wᵀ / temperature) at `targets`, in chunks of rows, so that
/// `[tokens, vocabulary]` never exists. The gradient with respect to `h`,
/// `(onehot − softmax) W / temperature`, is formed in the same pass.
pub(crate) fn logprobs(
    hidden: &Tensor,
    head: &Arc<Linear>,
    targets: &[u32],
    temperature: f32,
) -> TensorResult<LogProbs> {
    let m = hidden.dim(0)?;
    if m != targets.len() {
        candle_core::bail!("{m} hidden rows but {} target tokens", targets.len());
    }
    if let Some(bad) = targets.iter().find(|t| **t as usize >= head.rows()) {
        candle_core::bail!("token {bad} is outside the vocabulary of {}", head.rows());
    }
    let side = Arc::new(Mutex::new(Side::default()));
    let op = HeadLogProbs {
        head: head.clone(),
        targets: targets.to_vec(),
        temperature,
        wants_gradient: hidden.track_op(),
        side: side.clone(),
    };
    let logprobs = hidden.contiguous()?.apply_op1(op)?;
    let entropy = std::mem::take(&mut side.lock().unwrap_or_else(PoisonError::into_inner).entropy);
    Ok(LogProbs { logprobs, entropy })
}

#[derive(Default)]
struct Side {
    entropy: Vec<f32>,
    gradient: Option<Tensor>,
}

struct HeadLogProbs {
    head: Arc<Linear>,
    targets: Vec<u32>,
    temperature: f32,
    wants_gradient: bool,
    side: Arc<Mutex<Side>>,
}

impl CustomOp1 for HeadLogProbs {
    fn name(&self) -> &'static str {
        "head-logprobs"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> TensorResult<(CpuStorage, Shape)> {
        let (m, k) = layout.shape().dims2()?;
        let x = slice(storage, layout)?;
        let v = self.head.rows();
        let scale = 1.0 / self.temperature;
        let mut logprobs = vec![0f32; m];
        let mut entropy = vec![0f32; m];
        let mut gradient = vec![0f32; if self.wants_gradient { m * k } else { 0 }];
        let mut buffer = vec![0f32; HEAD_ROWS.min(m) * v];
        for start in (0..m).step_by(HEAD_ROWS) {
            let rows = HEAD_ROWS.min(m - start);
            let logits = &mut buffer[..rows * v];
            self.head.apply(&x[start * k..(start + rows) * k], logits);
            logits
                .par_chunks_mut(v)
                .zip(logprobs[start..start + rows].par_iter_mut())
                .zip(entropy[start..start + rows].par_iter_mut())
                .zip(self.targets[start..start + rows].par_iter())
                .for_each(|(((row, logprob), entropy), target)| {
                    let target = *target as usize;
                    let logit = f64::from(row[target]);
                    let (max, sum, weighted) = exp_sum_precise(row, scale);
                    let log_z = sum.ln();
                    let shifted = (logit - f64::from(max)) * f64::from(scale);
                    *logprob = (shifted - log_z) as f32;
                    // H = log Z − E[z].
                    *entropy = (log_z - weighted / sum) as f32;
                    let share = (f64::from(scale) / sum) as f32;
                    for p in row.iter_mut() {
                        *p *= -share;
                    }
                    row[target] += scale;
                });
            if self.wants_gradient {
                self.head
                    .apply_transposed(logits, &mut gradient[start * k..(start + rows) * k]);
            }
        }
        let mut side = self.side.lock().unwrap_or_else(PoisonError::into_inner);
        side.entropy = entropy;
        if self.wants_gradient {
            side.gradient = Some(Tensor::from_vec(gradient, (m, k), &Device::Cpu)?);
        }
        Ok((CpuStorage::F32(logprobs), Shape::from(m)))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, g: &Tensor) -> TensorResult<Option<Tensor>> {
        let gradient = self
            .side
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .gradient
            .clone();
        match gradient {
            Some(d) => Ok(Some(d.broadcast_mul(&g.reshape(((), 1))?)?)),
            None => candle_core::bail!("log-probabilities were computed without a gradient"),
        }
    }
}
