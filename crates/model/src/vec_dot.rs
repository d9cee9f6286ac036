//! Dot products of stored rows with f32 activations, without a dequantised copy.
//!
//! Decoding reads every weight once per token and is bound by memory, so a block goes
//! from its stored form into registers and is multiplied there, for up to
//! [`MAX_ROWS`] activation rows at once. The block formats are those of ggml
//! (`ggml-quants.c`). AVX-512 has a kernel for every quantised format, AVX2 for the
//! common ones; anything else is dequantised row by row and multiplied by [`dot`], a
//! loop that compilers vectorise for NEON and for the x86 baseline.
//!
//! Activations stay f32 (llama.cpp quantises them to eight bits), so serving and
//! training compute the same numbers.
#![allow(unsafe_code)]

use std::ops::Range;

use crate::dequantise::{dot, row_to_f32};
use crate::weights::WeightView;

/// Most activation rows that one pass over a stored row serves.
pub(crate) const MAX_ROWS: usize = 8;

/// `out[r * m + i] = w[rows.start + r] · x[i]`, for `m = x.len() / w.cols` activation
/// rows, at most [`MAX_ROWS`].
///
/// # Panics
/// When the lengths do not fit.
pub(crate) fn rows_dot(w: &WeightView, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
    let k = w.cols;
    let m = x.len() / k;
    assert!(m * k == x.len() && (1..=MAX_ROWS).contains(&m) && out.len() == rows.len() * m);
    #[cfg(target_arch = "x86_64")]
    {
        if avx512::available() {
            // SAFETY: the features were detected; `x` is [m, k] by the assertion above.
            let done = unsafe {
                match m {
                    1 => avx512::rows::<1>(w, rows.clone(), x, out),
                    2 => avx512::rows::<2>(w, rows.clone(), x, out),
                    3 => avx512::rows::<3>(w, rows.clone(), x, out),
                    4 => avx512::rows::<4>(w, rows.clone(), x, out),
                    5 => avx512::rows::<5>(w, rows.clone(), x, out),
                    6 => avx512::rows::<6>(w, rows.clone(), x, out),
                    7 => avx512::rows::<7>(w, rows.clone(), x, out),
                    _ => avx512::rows::<8>(w, rows.clone(), x, out),
                }
            };
            if done {
                return;
            }
        } else if avx2::available() {
            // SAFETY: as above.
            let done = unsafe {
                match m {
                    1 => avx2::rows::<1>(w, rows.clone(), x, out),
                    2 => avx2::rows::<2>(w, rows.clone(), x, out),
                    3 => avx2::rows::<3>(w, rows.clone(), x, out),
                    4 => avx2::rows::<4>(w, rows.clone(), x, out),
                    5 => avx2::rows::<5>(w, rows.clone(), x, out),
                    6 => avx2::rows::<6>(w, rows.clone(), x, out),
                    7 => avx2::rows::<7>(w, rows.clone(), x, out),
                    _ => avx2::rows::<8>(w, rows.clone(), x, out),
                }
            };
            if done {
                return;
            }
        }
    }
    dequantised(w, rows, x, out);
}

/// The plain way, for every format and processor.
fn dequantised(w: &WeightView, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
    let (k, m) = (w.cols, x.len() / w.cols);
    let mut row = vec![0f32; k];
    for (r, out) in rows.zip(out.chunks_exact_mut(m)) {
        row_to_f32(w.block, w.row(r), &mut row);
        for (out, x) in out.iter_mut().zip(x.chunks_exact(k)) {
            *out = dot(x, &row);
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn f16_bits(bytes: &[u8], at: usize) -> i32 {
    i32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// Scale and minimum of sub-block `j` of a Q4_K or Q5_K block, six bits each
/// (`get_scale_min_k4` in `ggml-quants.c`).
pub(crate) fn scale_min(j: usize, scales: &[u8]) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (scales[j] & 63, scales[j + 4] & 63)
    } else {
        (
            (scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4),
            (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4),
        )
    };
    (f32::from(scale), f32::from(min))
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::{
        __m512, __m512i, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_cvtss_f32, _mm_loadu_si128,
        _mm256_loadu_si256, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_ps,
        _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32,
        _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_or_epi32, _mm512_mul_ps,
        _mm512_or_si512, _mm512_permutex2var_ps, _mm512_permutexvar_ps, _mm512_reduce_add_ps,
        _mm512_set_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32,
        _mm512_srli_epi32, _mm512_srlv_epi32,
    };
    use std::ops::Range;

    use super::{f16_bits, scale_min};
    use crate::weights::{BlockType, WeightView};

    pub(super) fn available() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    /// The `M` running sums of one stored row, in two halves that hide latency.
    struct Sums<const M: usize> {
        even: [__m512; M],
        odd: [__m512; M],
        x: *const f32,
        k: usize,
    }

    impl<const M: usize> Sums<M> {
        /// Adds the products of 32 weights with columns `at..at + 32` of every row.
        ///
        /// # Safety
        /// `x` is `[M, k]` and `at + 32 <= k`.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        #[inline]
        unsafe fn add(&mut self, at: usize, low: __m512, high: __m512) {
            for i in 0..M {
                // SAFETY: forwarded from the caller.
                unsafe {
                    let x = self.x.add(i * self.k + at);
                    self.even[i] = _mm512_fmadd_ps(low, _mm512_loadu_ps(x), self.even[i]);
                    self.odd[i] = _mm512_fmadd_ps(high, _mm512_loadu_ps(x.add(16)), self.odd[i]);
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    fn half(bytes: &[u8], at: usize) -> f32 {
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(f16_bits(bytes, at))))
    }

    /// 0, 1, …, 15.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn ramp() -> __m512 {
        _mm512_set_ps(
            15., 14., 13., 12., 11., 10., 9., 8., 7., 6., 5., 4., 3., 2., 1., 0.,
        )
    }

    /// Sixteen bytes, widened.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    fn bytes16(bytes: &[u8]) -> __m512i {
        let bytes = &bytes[..16];
        // SAFETY: sixteen bytes are there, and the load needs no alignment.
        _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
    }

    /// Multiplies rows of `w` with `M` activation rows; false when the format has no kernel.
    ///
    /// # Safety
    /// The features of [`available`] exist and `x` is `[M, w.cols]`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn rows<const M: usize>(
        w: &WeightView,
        rows: Range<usize>,
        x: &[f32],
        out: &mut [f32],
    ) -> bool {
        let ramp = ramp();
        for (row, out) in rows.zip(out.chunks_exact_mut(M)) {
            let bytes = w.row(row);
            let mut sums = Sums::<M> {
                even: [_mm512_setzero_ps(); M],
                odd: [_mm512_setzero_ps(); M],
                x: x.as_ptr(),
                k: w.cols,
            };
            // SAFETY: a stored row has whole blocks for exactly `w.cols` values, and x is
            // [M, w.cols].
            unsafe {
                match w.block {
                    BlockType::Q4_0 => q4_0(bytes, ramp, &mut sums),
                    BlockType::Q4_1 => q4_1(bytes, ramp, &mut sums),
                    BlockType::Q5_0 => q5_0(bytes, ramp, &mut sums),
                    BlockType::Q5_1 => q5_1(bytes, ramp, &mut sums),
                    BlockType::Q8_0 => q8_0(bytes, &mut sums),
                    BlockType::Q4_K => q4_k(bytes, ramp, &mut sums),
                    BlockType::Q5_K => q5_k(bytes, ramp, &mut sums),
                    BlockType::Q6_K => q6_k(bytes, &mut sums),
                    BlockType::F16 if w.cols.is_multiple_of(32) => f16(bytes, &mut sums),
                    BlockType::BF16 if w.cols.is_multiple_of(32) => bf16(bytes, &mut sums),
                    _ => return false,
                }
            }
            for (out, (even, odd)) in out.iter_mut().zip(sums.even.iter().zip(&sums.odd)) {
                *out = _mm512_reduce_add_ps(_mm512_add_ps(*even, *odd));
            }
        }
        true
    }

    // Every kernel below: `bytes` holds whole blocks for exactly `sums.k` values, and
    // `sums.x` is `[M, sums.k]`, so the columns of a block are inside every row.

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    unsafe fn q4_0<const M: usize>(bytes: &[u8], ramp: __m512, sums: &mut Sums<M>) {
        let centred = _mm512_add_ps(ramp, _mm512_set1_ps(-8.0));
        for (n, block) in bytes.chunks_exact(18).enumerate() {
            let table = _mm512_mul_ps(centred, _mm512_set1_ps(half(block, 0)));
            let q = bytes16(&block[2..]);
            let low = _mm512_permutexvar_ps(q, table);
            let high = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(q), table);
            // SAFETY: see above.
            unsafe { sums.add(32 * n, low, high) };
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    unsafe fn q4_1<const M: usize>(bytes: &[u8], ramp: __m512, sums: &mut Sums<M>) {
        for (n, block) in bytes.chunks_exact(20).enumerate() {
            let (d, min) = (half(block, 0), half(block, 2));
            let table = _mm512_fmadd_ps(ramp, _mm512_set1_ps(d), _mm512_set1_ps(min));
            let q = bytes16(&block[4..]);
            let low = _mm512_permutexvar_ps(q, table);
            let high = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(q), table);
            // SAFETY: see above.
            unsafe { sums.add(32 * n, low, high) };
        }
    }

    /// Nibbles of sixteen bytes with a fifth bit each, looked up in a table of 32.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    fn five_bits(q: __m512i, fifth: u32, table: (__m512, __m512)) -> (__m512, __m512) {
        let bit = _mm512_set1_epi32(16);
        let low = _mm512_and_si512(q, _mm512_set1_epi32(15));
        let high = _mm512_srli_epi32::<4>(q);
        let low = _mm512_mask_or_epi32(low, fifth as u16, low, bit);
        let high = _mm512_mask_or_epi32(high, (fifth >> 16) as u16, high, bit);
        (
            _mm512_permutex2var_ps(table.0, low, table.1),
            _mm512_permutex2var_ps(table.0, high, table.1),
        )
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    fn table32(ramp: __m512, d: f32, min: f32) -> (__m512, __m512) {
        let d = _mm512_set1_ps(d);
        let upper = _mm512_add_ps(ramp, _mm512_set1_ps(16.0));
        (
            _mm512_fmadd_ps(ramp, d, _mm512_set1_ps(min)),
            _mm512_fmadd_ps(upper, d, _mm512_set1_ps(min)),
        )
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    unsafe fn q5_0<const M: usize>(bytes: &[u8], ramp: __m512, sums: &mut Sums<M>) {
        for (n, block) in bytes.chunks_exact(22).enumerate() {
            let d = half(block, 0);
            let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
            let table = table32(ramp, d, -16.0 * d);
            let (low, high) = five_bits(bytes16(&block[6..]), fifth, table);
            // SAFETY: see above.
            unsafe { sums.add(32 * n, low, high) };
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    unsafe fn q5_1<const M: usize>(bytes: &[u8], ramp: __m512, sums: &mut Sums<M>) {
        for (n, block) in bytes.chunks_exact(24).enumerate() {
            let (d, min) = (half(block, 0), half(block, 2));
            let fifth = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
            let table = table32(ramp, d, min);
            let (low, high) = five_bits(bytes16(&block[8..]), fifth, table);
            // SAFETY: see above.
            unsafe { sums.add(32 * n, low, high) };
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    fn signed16(bytes: &[u8]) -> __m512 {
        let bytes = &bytes[..16];
        // SAFETY: sixteen bytes are there, and the load needs no alignment.
        let q = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    unsafe fn q8_0<const M: usize>(bytes: &[u8], sums: &mut Sums<M>) {
        for (n, block) in bytes.chunks_exact(34).enumerate() {
            let d = _mm512_set1_ps(half(block, 0));
            let low = _mm512_mul_ps(signed16(&block[2..]), d);
            let high = _mm512_mul_ps(signed16(&block[18..]), d);
            // SAFETY: see above.
            unsafe { sums.add(32 * n, low, high) };
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    unsafe fn q4_k<const M: usize>(bytes: &[u8], ramp: __m512, sums: &mut Sums<M>) {
        for (n, block) in bytes.chunks_exact(144).enumerate() {
            let (d, min) = (half(block, 0), half(block, 2));
            let (scales, quants) = block[4..].split_at(12);
            for (j, quants) in quants.chunks_exact(32).enumerate() {
                let (a, b) = (bytes16(quants), bytes16(&quants[16..]));
                for half in 0..2 {
                    let (s, m) = scale_min(2 * j + half, scales);
                    let (s, m) = (_mm512_set1_ps(d * s), _mm512_set1_ps(-min * m));
                    let table = _mm512_fmadd_ps(ramp, s, m);
                    let (a, b) = if half == 0 {
                        (a, b)
                    } else {
                        (_mm512_srli_epi32::<4>(a), _mm512_srli_epi32::<4>(b))
                    };
                    let low = _mm512_permutexvar_ps(a, table);
                    let high = _mm512_permutexvar_ps(b, table);
                    // SAFETY: see above.
                    unsafe { sums.add(256 * n + 64 * j + 32 * half, low, high) };
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    unsafe fn q5_k<const M: usize>(bytes: &[u8], ramp: __m512, sums: &mut Sums<M>) {
        let (nibble, one) = (_mm512_set1_epi32(15), _mm512_set1_epi32(1));
        for (n, block) in bytes.chunks_exact(176).enumerate() {
            let (d, min) = (half(block, 0), half(block, 2));
            let (scales, rest) = block[4..].split_at(12);
            let (fifth, quants) = rest.split_at(32);
            let (fifth_a, fifth_b) = (bytes16(fifth), bytes16(&fifth[16..]));
            for (j, quants) in quants.chunks_exact(32).enumerate() {
                let (a, b) = (bytes16(quants), bytes16(&quants[16..]));
                for half in 0..2 {
                    let sub = 2 * j + half;
                    let (s, m) = scale_min(sub, scales);
                    let table = table32(ramp, d * s, -min * m);
                    let shift = _mm512_set1_epi32(sub as i32);
                    let quant = |q: __m512i, fifth: __m512i| {
                        let q = if half == 0 {
                            _mm512_and_si512(q, nibble)
                        } else {
                            _mm512_srli_epi32::<4>(q)
                        };
                        let bit = _mm512_and_si512(_mm512_srlv_epi32(fifth, shift), one);
                        let index = _mm512_or_si512(q, _mm512_slli_epi32::<4>(bit));
                        _mm512_permutex2var_ps(table.0, index, table.1)
                    };
                    let (low, high) = (quant(a, fifth_a), quant(b, fifth_b));
                    // SAFETY: see above.
                    unsafe { sums.add(256 * n + 32 * sub, low, high) };
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    unsafe fn q6_k<const M: usize>(bytes: &[u8], sums: &mut Sums<M>) {
        let (nibble, two) = (_mm512_set1_epi32(15), _mm512_set1_epi32(3));
        let offset = _mm512_set1_epi32(-32);
        for (n, block) in bytes.chunks_exact(210).enumerate() {
            let (low_bits, rest) = block.split_at(128);
            let (high_bits, rest) = rest.split_at(64);
            let (scales, d) = rest.split_at(16);
            let d = half(d, 0);
            for part in 0..2 {
                let (ql, qh) = (&low_bits[64 * part..], &high_bits[32 * part..]);
                for quarter in 0..4 {
                    let value = |lane: usize| {
                        let q = bytes16(&ql[32 * (quarter % 2) + 16 * lane..]);
                        let q = if quarter < 2 {
                            _mm512_and_si512(q, nibble)
                        } else {
                            _mm512_srli_epi32::<4>(q)
                        };
                        let h = bytes16(&qh[16 * lane..]);
                        let shift = _mm512_set1_epi32(2 * quarter as i32);
                        let h = _mm512_and_si512(_mm512_srlv_epi32(h, shift), two);
                        let q = _mm512_or_si512(q, _mm512_slli_epi32::<4>(h));
                        let q = _mm512_cvtepi32_ps(_mm512_add_epi32(q, offset));
                        let scale = f32::from(scales[8 * part + 2 * quarter + lane] as i8);
                        _mm512_mul_ps(q, _mm512_set1_ps(d * scale))
                    };
                    let (low, high) = (value(0), value(1));
                    // SAFETY: see above.
                    unsafe { sums.add(256 * n + 128 * part + 32 * quarter, low, high) };
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    unsafe fn f16<const M: usize>(bytes: &[u8], sums: &mut Sums<M>) {
        for (n, block) in bytes.chunks_exact(64).enumerate() {
            // SAFETY: the block has 64 bytes; for the columns see above.
            unsafe {
                let p = block.as_ptr();
                let low = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
                let high = _mm512_cvtph_ps(_mm256_loadu_si256(p.add(32).cast()));
                sums.add(32 * n, low, high);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    #[inline]
    unsafe fn bf16<const M: usize>(bytes: &[u8], sums: &mut Sums<M>) {
        for (n, block) in bytes.chunks_exact(64).enumerate() {
            // SAFETY: the block has 64 bytes; for the columns see above.
            unsafe {
                let wide = |p: *const u8| {
                    let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
                };
                let (low, high) = (wide(block.as_ptr()), wide(block.as_ptr().add(32)));
                sums.add(32 * n, low, high);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m128i, __m256, _mm_and_si128, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_cvtss_f32,
        _mm_loadl_epi64, _mm_set1_epi8, _mm_srli_epi16, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
        _mm256_cvtepu8_epi32, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_set1_ps,
        _mm256_setzero_ps, _mm256_storeu_ps,
    };
    use std::ops::Range;

    use super::{f16_bits, scale_min};
    use crate::weights::{BlockType, WeightView};

    pub(super) fn available() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    struct Sums<const M: usize> {
        sums: [__m256; M],
        x: *const f32,
        k: usize,
    }

    impl<const M: usize> Sums<M> {
        /// Adds the products of eight weights with columns `at..at + 8` of every row.
        ///
        /// # Safety
        /// `x` is `[M, k]` and `at + 8 <= k`.
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline]
        unsafe fn add(&mut self, at: usize, w: __m256) {
            for i in 0..M {
                // SAFETY: forwarded from the caller.
                let x = unsafe { _mm256_loadu_ps(self.x.add(i * self.k + at)) };
                self.sums[i] = _mm256_fmadd_ps(w, x, self.sums[i]);
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn half(bytes: &[u8], at: usize) -> f32 {
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(f16_bits(bytes, at))))
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn bytes8(bytes: &[u8]) -> __m128i {
        let bytes = &bytes[..8];
        // SAFETY: eight bytes are there, and the load needs no alignment.
        unsafe { _mm_loadl_epi64(bytes.as_ptr().cast()) }
    }

    /// Low (or high) nibbles of eight bytes as floats.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn nibbles(bytes: __m128i, high: bool) -> __m256 {
        let bytes = if high {
            _mm_srli_epi16::<4>(bytes)
        } else {
            bytes
        };
        let bytes = _mm_and_si128(bytes, _mm_set1_epi8(15));
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
    }

    /// Adds a run of nibbles `q · d + min`: the low ones at `at`, the high ones `apart`
    /// columns later.
    ///
    /// # Safety
    /// As for [`Sums::add`], for both runs.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn add_nibbles<const M: usize>(
        quants: &[u8],
        low: (f32, f32),
        high: (f32, f32),
        at: usize,
        sums: &mut Sums<M>,
    ) {
        let apart = quants.len();
        for (i, quants) in quants.chunks_exact(8).enumerate() {
            let q = bytes8(quants);
            for (upper, (d, min)) in [(false, low), (true, high)] {
                let w = nibbles(q, upper);
                let w = _mm256_fmadd_ps(w, _mm256_set1_ps(d), _mm256_set1_ps(min));
                // SAFETY: forwarded from the caller.
                unsafe { sums.add(at + 8 * i + if upper { apart } else { 0 }, w) };
            }
        }
    }

    /// Multiplies rows of `w` with `M` activation rows; false when the format has no kernel.
    ///
    /// # Safety
    /// The features of [`available`] exist and `x` is `[M, w.cols]`.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn rows<const M: usize>(
        w: &WeightView,
        rows: Range<usize>,
        x: &[f32],
        out: &mut [f32],
    ) -> bool {
        for (row, out) in rows.zip(out.chunks_exact_mut(M)) {
            let bytes = w.row(row);
            let mut sums = Sums::<M> {
                sums: [_mm256_setzero_ps(); M],
                x: x.as_ptr(),
                k: w.cols,
            };
            // SAFETY: a stored row has whole blocks for exactly `w.cols` values, and x is
            // [M, w.cols], so the columns of a block are inside every row.
            unsafe {
                match w.block {
                    BlockType::Q4_0 => {
                        for (n, block) in bytes.chunks_exact(18).enumerate() {
                            let d = half(block, 0);
                            let scale = (d, -8.0 * d);
                            add_nibbles(&block[2..], scale, scale, 32 * n, &mut sums);
                        }
                    }
                    BlockType::Q4_1 => {
                        for (n, block) in bytes.chunks_exact(20).enumerate() {
                            let scale = (half(block, 0), half(block, 2));
                            add_nibbles(&block[4..], scale, scale, 32 * n, &mut sums);
                        }
                    }
                    BlockType::Q8_0 => {
                        for (n, block) in bytes.chunks_exact(34).enumerate() {
                            let d = _mm256_set1_ps(half(block, 0));
                            for i in 0..4 {
                                let q = _mm256_cvtepi8_epi32(bytes8(&block[2 + 8 * i..]));
                                let w = _mm256_mul_ps(_mm256_cvtepi32_ps(q), d);
                                sums.add(32 * n + 8 * i, w);
                            }
                        }
                    }
                    BlockType::Q4_K => {
                        for (n, block) in bytes.chunks_exact(144).enumerate() {
                            let (d, min) = (half(block, 0), half(block, 2));
                            let (scales, quants) = block[4..].split_at(12);
                            for (j, quants) in quants.chunks_exact(32).enumerate() {
                                let scale = |sub: usize| {
                                    let (s, m) = scale_min(sub, scales);
                                    (d * s, -min * m)
                                };
                                let (low, high) = (scale(2 * j), scale(2 * j + 1));
                                add_nibbles(quants, low, high, 256 * n + 64 * j, &mut sums);
                            }
                        }
                    }
                    _ => return false,
                }
            }
            for (out, sum) in out.iter_mut().zip(sums.sums) {
                let mut lanes = [0f32; 8];
                // SAFETY: eight floats fit.
                unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sum) };
                *out = lanes.iter().sum();
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_ROWS, dequantised, rows_dot};
    use crate::dequantise::quantise_row;
    use crate::weights::{BlockType, Bytes, WeightView};

    const FORMATS: [BlockType; 11] = [
        BlockType::F32,
        BlockType::F16,
        BlockType::BF16,
        BlockType::Q4_0,
        BlockType::Q4_1,
        BlockType::Q5_0,
        BlockType::Q5_1,
        BlockType::Q8_0,
        BlockType::Q4_K,
        BlockType::Q5_K,
        BlockType::Q6_K,
    ];

    fn view(block: BlockType, rows: usize, cols: usize) -> WeightView {
        let size = block.bytes_for(cols).expect("whole blocks");
        let mut bytes = vec![0u8; rows * size];
        for (r, bytes) in bytes.chunks_exact_mut(size).enumerate() {
            let values: Vec<f32> = (0..cols)
                .map(|i| ((r * 131 + i * 37) as f32 * 0.618).sin() * 0.2 + 0.03)
                .collect();
            quantise_row(block, &values, bytes);
        }
        WeightView {
            rows,
            cols,
            block,
            bytes: Bytes::Owned(bytes.into()),
            permutation: None,
        }
    }

    type Kernel = fn(&WeightView, &[f32], &mut [f32]) -> bool;

    fn agrees(kernel: Kernel) -> usize {
        let mut checked = 0;
        for block in FORMATS {
            let w = view(block, 5, 512);
            for m in 1..=MAX_ROWS {
                let x: Vec<f32> = (0..m * 512).map(|i| (i as f32 * 0.37).cos()).collect();
                let (mut ours, mut plain) = (vec![0f32; 3 * m], vec![0f32; 3 * m]);
                if !kernel(&w, &x, &mut ours) {
                    continue;
                }
                dequantised(&w, 1..4, &x, &mut plain);
                for (a, b) in ours.iter().zip(&plain) {
                    let (name, off) = (block.name(), (a - b).abs());
                    assert!(off <= 2e-5, "{name}, {m} rows: {a} instead of {b}");
                }
                checked += 1;
            }
        }
        checked
    }

    #[test]
    fn the_chosen_kernels_equal_dequantise_then_multiply() {
        let checked = agrees(|w, x, out| {
            rows_dot(w, 1..4, x, out);
            true
        });
        assert_eq!(checked, FORMATS.len() * MAX_ROWS);
    }

    /// A processor with AVX-512 would never choose these.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_avx2_kernels_equal_dequantise_then_multiply() {
        if !super::avx2::available() {
            // Without AVX2 these kernels cannot run, and are never chosen.
            return;
        }
        // SAFETY: the features were detected, and x has as many rows as are asked for.
        let checked = agrees(|w, x, out| unsafe {
            match x.len() / w.cols {
                1 => super::avx2::rows::<1>(w, 1..4, x, out),
                2 => super::avx2::rows::<2>(w, 1..4, x, out),
                8 => super::avx2::rows::<8>(w, 1..4, x, out),
                _ => false,
            }
        });
        assert_eq!(checked, 3 * 4, "three row counts, four formats");
    }
}
