//! Stored blocks to f32, and dot products against f32 activations.
//!
//! The block formats are those of ggml (`ggml-quants.c`). Each loop is written once
//! and compiled for AVX-512, AVX2 and the baseline; the variant is chosen at run time.
#![allow(unsafe_code)]

use candle_core::quantized::k_quants;
use half::{bf16, f16};

use crate::weights::BlockType;

/// Compiles a function for several instruction sets and picks one at run time.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    // SAFETY: the features were detected on this processor.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                {
                    // SAFETY: the features were detected on this processor.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}
pub(crate) use multiversion;

#[inline(always)]
fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

multiversion! {
    fn q4_0(bytes: &[u8], out: &mut [f32]) {
        for (block, y) in bytes.chunks_exact(18).zip(out.chunks_exact_mut(32)) {
            let d = half_at(block, 0);
            let (low, high) = y.split_at_mut(16);
            for i in 0..16 {
                let q = block[2 + i];
                low[i] = (i32::from(q & 15) - 8) as f32 * d;
                high[i] = (i32::from(q >> 4) - 8) as f32 * d;
            }
        }
    }
}

multiversion! {
    fn q4_1(bytes: &[u8], out: &mut [f32]) {
        for (block, y) in bytes.chunks_exact(20).zip(out.chunks_exact_mut(32)) {
            let (d, m) = (half_at(block, 0), half_at(block, 2));
            let (low, high) = y.split_at_mut(16);
            for i in 0..16 {
                let q = block[4 + i];
                low[i] = i32::from(q & 15) as f32 * d + m;
                high[i] = i32::from(q >> 4) as f32 * d + m;
            }
        }
    }
}

multiversion! {
    fn q8_0(bytes: &[u8], out: &mut [f32]) {
        for (block, y) in bytes.chunks_exact(34).zip(out.chunks_exact_mut(32)) {
            let d = half_at(block, 0);
            for i in 0..32 {
                y[i] = f32::from(block[2 + i] as i8) * d;
            }
        }
    }
}

/// Reads `T` blocks that may lie at any address and converts them with candle's code.
fn by_candle<T: k_quants::GgmlType>(bytes: &[u8], out: &mut [f32]) {
    let size = size_of::<T>();
    for (block, y) in bytes
        .chunks_exact(size)
        .zip(out.chunks_exact_mut(T::BLCK_SIZE))
    {
        // SAFETY: the k_quants blocks are plain `repr(C)` data without padding or
        // invalid values, `block` is exactly as long as one, and the read is unaligned.
        let block: T = unsafe { std::ptr::read_unaligned(block.as_ptr().cast()) };
        T::to_float(std::slice::from_ref(&block), y);
    }
}

/// One stored row to f32. `bytes` holds whole blocks for exactly `out.len()` values.
pub(crate) fn row_to_f32(block: BlockType, bytes: &[u8], out: &mut [f32]) {
    match block {
        BlockType::F32 => {
            for (y, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *y = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        BlockType::F16 => {
            for (y, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *y = f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        BlockType::BF16 => {
            for (y, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *y = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        BlockType::Q4_0 => q4_0(bytes, out),
        BlockType::Q4_1 => q4_1(bytes, out),
        BlockType::Q8_0 => q8_0(bytes, out),
        BlockType::Q5_0 => by_candle::<k_quants::BlockQ5_0>(bytes, out),
        BlockType::Q5_1 => by_candle::<k_quants::BlockQ5_1>(bytes, out),
        BlockType::Q4_K => by_candle::<k_quants::BlockQ4K>(bytes, out),
        BlockType::Q5_K => by_candle::<k_quants::BlockQ5K>(bytes, out),
        BlockType::Q6_K => by_candle::<k_quants::BlockQ6K>(bytes, out),
    }
}

/// f32 to stored blocks; `bytes` is exactly as long as `values` needs.
pub(crate) fn quantise_row(block: BlockType, values: &[f32], bytes: &mut [u8]) {
    fn by_candle<T: k_quants::GgmlType + Clone>(values: &[f32], bytes: &mut [u8]) {
        let mut blocks = vec![T::zeros(); values.len() / T::BLCK_SIZE];
        T::from_float(values, &mut blocks);
        // SAFETY: the blocks are plain `repr(C)` data without padding, read as bytes.
        let raw = unsafe {
            std::slice::from_raw_parts(blocks.as_ptr().cast::<u8>(), size_of_val(&blocks[..]))
        };
        bytes.copy_from_slice(raw);
    }
    match block {
        BlockType::F32 => {
            for (b, v) in bytes.chunks_exact_mut(4).zip(values) {
                b.copy_from_slice(&v.to_le_bytes());
            }
        }
        BlockType::F16 => {
            for (b, v) in bytes.chunks_exact_mut(2).zip(values) {
                b.copy_from_slice(&f16::from_f32(*v).to_le_bytes());
            }
        }
        BlockType::BF16 => {
            for (b, v) in bytes.chunks_exact_mut(2).zip(values) {
                b.copy_from_slice(&bf16::from_f32(*v).to_le_bytes());
            }
        }
        BlockType::Q4_0 => by_candle::<k_quants::BlockQ4_0>(values, bytes),
        BlockType::Q4_1 => by_candle::<k_quants::BlockQ4_1>(values, bytes),
        BlockType::Q5_0 => by_candle::<k_quants::BlockQ5_0>(values, bytes),
        BlockType::Q5_1 => by_candle::<k_quants::BlockQ5_1>(values, bytes),
        BlockType::Q8_0 => by_candle::<k_quants::BlockQ8_0>(values, bytes),
        BlockType::Q4_K => by_candle::<k_quants::BlockQ4K>(values, bytes),
        BlockType::Q5_K => by_candle::<k_quants::BlockQ5K>(values, bytes),
        BlockType::Q6_K => by_candle::<k_quants::BlockQ6K>(values, bytes),
    }
}

/// Dot product for use inside a [`multiversion`] function: in 32 partial sums, which
/// are added pairwise.
#[inline(always)]
pub(crate) fn dot_here(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 32];
    let (ac, bc) = (a.chunks_exact(32), b.chunks_exact(32));
    let (ar, br) = (ac.remainder(), bc.remainder());
    for (a, b) in ac.zip(bc) {
        for i in 0..32 {
            sums[i] = a[i].mul_add(b[i], sums[i]);
        }
    }
    let mut total = 0f32;
    for (a, b) in ar.iter().zip(br) {
        total += a * b;
    }
    for width in [16, 8, 4, 2, 1] {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    total + sums[0]
}

/// `y += a * x` for use inside a [`multiversion`] function.
#[inline(always)]
pub(crate) fn axpy_here(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(*x, *y);
    }
}

multiversion! {
    /// Dot product.
    pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
        dot_here(a, b)
    }
}

multiversion! {
    /// `y += a * x`.
    pub(crate) fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
        axpy_here(a, x, y);
    }
}

/// exp, accurate to about 1e-7 relative, in a form that vectorises.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 5.0e-1);
    let y = p.mul_add(r * r, r) + 1.0;
    y * f32::from_bits((((n as i32) + 127) << 23) as u32)
}

multiversion! {
    /// Softmax numerators in place: `x[i] = exp(scale * (x[i] - max))`; returns their sum.
    pub(crate) fn exp_sum(x: &mut [f32], scale: f32) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 16];
        for c in x.chunks_exact(16) {
            for i in 0..16 {
                lanes[i] = if c[i] > lanes[i] { c[i] } else { lanes[i] };
            }
        }
        let mut max = f32::NEG_INFINITY;
        for v in x.chunks_exact(16).remainder().iter().chain(&lanes) {
            max = if *v > max { *v } else { max };
        }
        let mut sums = [0f32; 16];
        let mut chunks = x.chunks_exact_mut(16);
        for c in &mut chunks {
            for i in 0..16 {
                c[i] = exp((c[i] - max) * scale);
                sums[i] += c[i];
            }
        }
        let mut total = 0f32;
        for v in chunks.into_remainder() {
            *v = exp((*v - max) * scale);
            total += *v;
        }
        for s in sums {
            total += s;
        }
        total
    }
}

multiversion! {
    /// With `z = scale * (x - max)`: the largest value, the sum of `exp(z)` and the sum of
    /// `exp(z) z`, both in f64; the numerators `exp(z)` are left in place.
    pub(crate) fn exp_sum_precise(x: &mut [f32], scale: f32) -> (f32, f64, f64) {
        let mut max = f32::NEG_INFINITY;
        for v in x.iter() {
            max = if *v > max { *v } else { max };
        }
        let (mut sums, mut weighted) = ([0f64; 8], [0f64; 8]);
        let mut chunks = x.chunks_exact_mut(8);
        for c in &mut chunks {
            for i in 0..8 {
                let z = (c[i] - max) * scale;
                c[i] = exp(z);
                sums[i] += f64::from(c[i]);
                weighted[i] += f64::from(c[i] * z);
            }
        }
        let (mut sum, mut mean) = (0f64, 0f64);
        for v in chunks.into_remainder() {
            let z = (*v - max) * scale;
            *v = exp(z);
            sum += f64::from(*v);
            mean += f64::from(*v * z);
        }
        for i in 0..8 {
            sum += sums[i];
            mean += weighted[i];
        }
        (max, sum, mean)
    }
}

#[cfg(test)]
mod tests {
    use super::{dot, exp, exp_sum, quantise_row, row_to_f32};
    use crate::weights::BlockType;

    #[test]
    fn every_format_survives_a_round_trip_within_its_precision() {
        let values: Vec<f32> = (0..512)
            .map(|i| ((i * 37 % 101) as f32 / 50.0 - 1.0) * 0.7)
            .collect();
        for (block, tolerance) in [
            (BlockType::F32, 0.0),
            (BlockType::F16, 1e-3),
            (BlockType::BF16, 5e-3),
            (BlockType::Q4_0, 0.1),
            (BlockType::Q4_1, 0.06),
            (BlockType::Q5_0, 0.06),
            (BlockType::Q5_1, 0.03),
            (BlockType::Q8_0, 0.006),
            (BlockType::Q4_K, 0.08),
            (BlockType::Q5_K, 0.04),
            (BlockType::Q6_K, 0.03),
        ] {
            let mut bytes = vec![0u8; block.bytes_for(values.len()).expect("whole blocks")];
            quantise_row(block, &values, &mut bytes);
            let mut back = vec![0f32; values.len()];
            row_to_f32(block, &bytes, &mut back);
            let worst = values
                .iter()
                .zip(&back)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(worst <= tolerance, "{}: off by {worst}", block.name());
        }
    }

    #[test]
    fn own_loops_equal_candle_bit_for_bit() {
        use candle_core::quantized::k_quants::{BlockQ4_0, BlockQ4_1, BlockQ8_0};
        let values: Vec<f32> = (0..256).map(|i| ((i * 91 % 257) as f32).sin()).collect();
        let check = |block: BlockType, candle: fn(&[u8], &mut [f32])| {
            let mut bytes = vec![0u8; block.bytes_for(values.len()).expect("whole blocks")];
            quantise_row(block, &values, &mut bytes);
            let (mut ours, mut theirs) = (vec![0f32; 256], vec![0f32; 256]);
            row_to_f32(block, &bytes, &mut ours);
            candle(&bytes, &mut theirs);
            for (a, b) in ours.iter().zip(&theirs) {
                assert!((a - b).abs() <= 1e-6, "{}: {a} and {b}", block.name());
            }
        };
        check(BlockType::Q4_0, super::by_candle::<BlockQ4_0>);
        check(BlockType::Q4_1, super::by_candle::<BlockQ4_1>);
        check(BlockType::Q8_0, super::by_candle::<BlockQ8_0>);
    }

    #[test]
    fn exp_and_sums_are_accurate() {
        for i in -800..=80 {
            let x = i as f32 / 10.0;
            let (ours, exact) = (f64::from(exp(x)), f64::from(x).exp());
            assert!(
                (ours - exact).abs() <= 3e-7 * exact,
                "exp({x}): {ours} and {exact}"
            );
        }
        let mut x: Vec<f32> = (0..77).map(|i| (i as f32 * 0.3).cos()).collect();
        let max = x.iter().copied().fold(f32::MIN, f32::max);
        let exact: f64 = x.iter().map(|v| f64::from((v - max) * 0.5).exp()).sum();
        assert!((f64::from(exp_sum(&mut x, 0.5)) - exact).abs() < 1e-4);
        let a: Vec<f32> = (0..70).map(|i| i as f32).collect();
        assert_eq!(dot(&a, &a), (0..70).map(|i| (i * i) as f32).sum::<f32>());
    }
}
