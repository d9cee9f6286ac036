//! A frozen linear layer, its optional LoRA, and their gradients.
//!
//! `y = x Wᵀ + b + scale · (x Aᵀ) Bᵀ` (LoRA: Hu et al. 2021, arXiv:2106.09685).
//! `W` stays as it lies in the file: many rows go through block-wise dequantised f32
//! GEMM, few rows through dot products with the stored blocks. Activations are never quantised,
//! so serving and training compute the same numbers. The backward forms `g W` and the
//! gradients of `A` and `B`; no gradient of `W` or `b` exists.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use candle_core::{
    CpuStorage, CustomOp1, CustomOp3, Layout, Result as TensorResult, Shape, Tensor,
};
use rayon::prelude::*;

use crate::dequantise::{dot, row_to_f32};
use crate::vec_dot::{MAX_ROWS, rows_dot};
use crate::weights::WeightView;

/// Fewest rows for which GEMM beats row-wise dot products.
const GEMM_ROWS: usize = MAX_ROWS + 1;
/// Fewest multiplications worth a task of their own.
const TASK: usize = 64 * 1024;
/// Bytes of one dequantised panel: small enough for a core's second-level cache.
const PANEL_BYTES: usize = 1 << 20;

/// A pointer that may be used from several threads; each writes its own elements.
#[derive(Clone, Copy)]
pub(crate) struct Shared(pub(crate) *mut f32);
// SAFETY: every use writes disjoint elements, see the call sites.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// The pointer, by method so that closures capture the wrapper.
    pub(crate) fn get(self) -> *mut f32 {
        self.0
    }
}

/// `dst[m, n] (+)= lhs[m, k] · rhs[k, n]` on one thread, strides in elements.
///
/// # Safety
/// The pointers are valid for every element that the shapes and strides reach, and
/// nobody else writes `dst` meanwhile.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn gemm(
    shape: (usize, usize, usize),
    dst: *mut f32,
    dst_rs: usize,
    accumulate: bool,
    lhs: *const f32,
    lhs_strides: (usize, usize),
    rhs: *const f32,
    rhs_strides: (usize, usize),
    alpha: f32,
) {
    let (m, n, k) = shape;
    if m == 0 || n == 0 {
        return;
    }
    // SAFETY: forwarded from the caller.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst,
            1,
            dst_rs as isize,
            accumulate,
            lhs,
            lhs_strides.1 as isize,
            lhs_strides.0 as isize,
            rhs,
            rhs_strides.1 as isize,
            rhs_strides.0 as isize,
            1f32,
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// The contiguous f32 values of a tensor's storage.
pub(crate) fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> TensorResult<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => candle_core::bail!("a contiguous tensor is needed"),
    }
}

/// `W` and `b`, frozen.
#[derive(Debug)]
pub struct Linear {
    weight: WeightView,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// From `W` `[out, in]` and an optional `b` `[out]`.
    pub fn new(weight: WeightView, bias: Option<Vec<f32>>) -> Self {
        Self { weight, bias }
    }

    /// Output width.
    pub fn rows(&self) -> usize {
        self.weight.rows
    }

    /// Input width.
    pub fn cols(&self) -> usize {
        self.weight.cols
    }

    /// The bias, if there is one.
    pub(crate) fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// The stored weight.
    pub fn weight(&self) -> &WeightView {
        &self.weight
    }

    fn panel_rows(&self) -> usize {
        let per_thread = self.rows().div_ceil(2 * rayon::current_num_threads());
        per_thread.min(PANEL_BYTES / (4 * self.cols())).max(16)
    }

    fn dequantise_rows(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, chunk) in rows.zip(out.chunks_exact_mut(self.cols())) {
            row_to_f32(self.weight.block, self.weight.row(row), chunk);
        }
    }

    /// `y[m, out] = x[m, in] · Wᵀ + b`; `x` and `y` are row-major.
    pub(crate) fn apply(&self, x: &[f32], y: &mut [f32]) {
        let (n, k) = (self.rows(), self.cols());
        let m = x.len() / k;
        let out = Shared(y.as_mut_ptr());
        if m < GEMM_ROWS {
            let even = n.div_ceil(8 * rayon::current_num_threads());
            let step = even.max(TASK / (k * m)).max(1);
            (0..n.div_ceil(step)).into_par_iter().for_each_init(
                || vec![0f32; step * m],
                |dots, task| {
                    let rows = task * step..((task + 1) * step).min(n);
                    let dots = &mut dots[..rows.len() * m];
                    rows_dot(&self.weight, rows.clone(), x, dots);
                    for (row, dots) in rows.zip(dots.chunks_exact(m)) {
                        for (i, y) in dots.iter().enumerate() {
                            // SAFETY: element (i, row) belongs to this task alone.
                            unsafe { *out.get().add(i * n + row) = *y };
                        }
                    }
                },
            );
        } else {
            let step = self.panel_rows();
            (0..n.div_ceil(step)).into_par_iter().for_each_init(
                || vec![0f32; step * k],
                |panel, task| {
                    let rows = task * step..((task + 1) * step).min(n);
                    let width = rows.len();
                    self.dequantise_rows(rows.clone(), panel);
                    // SAFETY: x is [m, k], the panel [width, k]; columns `rows` of y belong
                    // to this task alone.
                    unsafe {
                        gemm(
                            (m, width, k),
                            out.get().add(rows.start),
                            n,
                            false,
                            x.as_ptr(),
                            (k, 1),
                            panel.as_ptr(),
                            (1, k),
                            1.0,
                        );
                    }
                },
            );
        }
        if let Some(bias) = &self.bias {
            for y in y.chunks_exact_mut(n) {
                for (y, b) in y.iter_mut().zip(bias) {
                    *y += b;
                }
            }
        }
    }

    /// `dx[m, in] = g[m, out] · W`.
    pub(crate) fn apply_transposed(&self, g: &[f32], dx: &mut [f32]) {
        let (n, k) = (self.rows(), self.cols());
        let threads = rayon::current_num_threads();
        let rows = (g.len() / n).div_ceil(threads).max(1);
        let step = (PANEL_BYTES / (4 * k)).clamp(16, n.max(16));
        dx.par_chunks_mut(rows * k)
            .zip(g.par_chunks(rows * n))
            .for_each(|(dx, g)| {
                let m = g.len() / n;
                let mut panel = vec![0f32; step * k];
                for start in (0..n).step_by(step) {
                    let end = (start + step).min(n);
                    self.dequantise_rows(start..end, &mut panel);
                    // SAFETY: g is [m, n] read at columns start..end, the panel is
                    // [end - start, k], dx is [m, k] and belongs to this task.
                    unsafe {
                        gemm(
                            (m, k, end - start),
                            dx.as_mut_ptr(),
                            k,
                            start > 0,
                            g.as_ptr().add(start),
                            (n, 1),
                            panel.as_ptr(),
                            (k, 1),
                            1.0,
                        );
                    }
                }
            });
    }

    /// `y = x Wᵀ + b` with a gradient for `x` only. `x`: `[m, in]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(self: &Arc<Self>, x: &Tensor) -> TensorResult<Tensor> {
        x.contiguous()?.apply_op1(Frozen(self.clone()))
    }

    /// `y = x Wᵀ + b + scale (x Aᵀ) Bᵀ` with gradients for `x`, `A` and `B`.
    /// `x`: `[m, in]`, `a`: `[r, in]`, `b`: `[out, r]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward_lora(
        self: &Arc<Self>,
        x: &Tensor,
        a: &Tensor,
        b: &Tensor,
        scale: f32,
    ) -> TensorResult<Tensor> {
        let op = WithLora {
            base: Some(self.clone()),
            scale,
        };
        x.contiguous()?.apply_op3(a, b, op)
    }
}

/// `scale (x Aᵀ) Bᵀ` alone, with gradients.
pub(crate) fn lora_delta(x: &Tensor, a: &Tensor, b: &Tensor, scale: f32) -> TensorResult<Tensor> {
    x.contiguous()?
        .apply_op3(a, b, WithLora { base: None, scale })
}

struct Frozen(Arc<Linear>);

impl CustomOp1 for Frozen {
    fn name(&self) -> &'static str {
        "frozen-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> TensorResult<(CpuStorage, Shape)> {
        let (m, k) = layout.shape().dims2()?;
        if k != self.0.cols() {
            candle_core::bail!("a linear layer of width {} was given {k}", self.0.cols());
        }
        let x = slice(storage, layout)?;
        let mut y = vec![0f32; m * self.0.rows()];
        self.0.apply(x, &mut y);
        Ok((CpuStorage::F32(y), Shape::from((m, self.0.rows()))))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, g: &Tensor) -> TensorResult<Option<Tensor>> {
        Ok(Some(
            g.contiguous()?
                .apply_op1_no_bwd(&Transposed(self.0.clone()))?,
        ))
    }
}

struct Transposed(Arc<Linear>);

impl CustomOp1 for Transposed {
    fn name(&self) -> &'static str {
        "frozen-linear-transposed"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> TensorResult<(CpuStorage, Shape)> {
        let m = layout.shape().dims2()?.0;
        let mut dx = vec![0f32; m * self.0.cols()];
        self.0.apply_transposed(slice(storage, layout)?, &mut dx);
        Ok((CpuStorage::F32(dx), Shape::from((m, self.0.cols()))))
    }
}

struct WithLora {
    base: Option<Arc<Linear>>,
    scale: f32,
}

impl CustomOp3 for WithLora {
    fn name(&self) -> &'static str {
        "linear-with-lora"
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
        let (m, k) = l1.shape().dims2()?;
        let (r, ka) = l2.shape().dims2()?;
        let (n, rb) = l3.shape().dims2()?;
        if ka != k
            || rb != r
            || self
                .base
                .as_ref()
                .is_some_and(|w| w.rows() != n || w.cols() != k)
        {
            candle_core::bail!("LoRA shapes [{r}, {ka}] and [{n}, {rb}] do not fit [{m}, {k}]");
        }
        let (x, a, b) = (slice(s1, l1)?, slice(s2, l2)?, slice(s3, l3)?);
        let mut y = vec![0f32; m * n];
        if let Some(base) = &self.base {
            base.apply(x, &mut y);
        }
        let mut t = vec![0f32; m * r];
        if m < GEMM_ROWS {
            for (t, x) in t.chunks_exact_mut(r).zip(x.chunks_exact(k)) {
                for (t, a) in t.iter_mut().zip(a.chunks_exact(k)) {
                    *t = self.scale * dot(x, a);
                }
            }
            for (y, t) in y.chunks_exact_mut(n).zip(t.chunks_exact(r)) {
                for (y, b) in y.iter_mut().zip(b.chunks_exact(r)) {
                    *y += dot(t, b);
                }
            }
        } else {
            let rows = m.div_ceil(rayon::current_num_threads());
            y.par_chunks_mut(rows * n)
                .zip(t.par_chunks_mut(rows * r))
                .zip(x.par_chunks(rows * k))
                .for_each(|((y, t), x)| {
                    let m = x.len() / k;
                    // SAFETY: x is [m, k], a [r, k], b [n, r], t [m, r], y [m, n], and t
                    // and y belong to this task.
                    unsafe {
                        let t = t.as_mut_ptr();
                        gemm(
                            (m, r, k),
                            t,
                            r,
                            false,
                            x.as_ptr(),
                            (k, 1),
                            a.as_ptr(),
                            (1, k),
                            self.scale,
                        );
                        gemm(
                            (m, n, r),
                            y.as_mut_ptr(),
                            n,
                            true,
                            t,
                            (r, 1),
                            b.as_ptr(),
                            (1, r),
                            1.0,
                        );
                    }
                });
        }
        Ok((CpuStorage::F32(y), Shape::from((m, n))))
    }

    fn bwd(
        &self,
        x: &Tensor,
        a: &Tensor,
        b: &Tensor,
        _y: &Tensor,
        g: &Tensor,
    ) -> TensorResult<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // Constants here: the gradient of a gradient is never asked for.
        let (x, a, b, g) = (x.detach(), a.detach(), b.detach(), g.contiguous()?.detach());
        let gt = (g.matmul(&b)? * f64::from(self.scale))?; // [m, r]
        let t = (x.matmul(&a.t()?)? * f64::from(self.scale))?; // [m, r]
        let da = gt.t()?.matmul(&x)?; // [r, in]
        let db = g.t()?.matmul(&t)?; // [out, r]
        let dx = gt.matmul(&a)?;
        let dx = match &self.base {
            Some(base) => (dx + g.apply_op1_no_bwd(&Transposed(base.clone()))?)?,
            None => dx,
        };
        Ok((Some(dx), Some(da), Some(db)))
    }
}
