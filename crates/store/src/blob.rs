//! Token ids and log-probabilities as compact blobs, and shared prefixes.

use crate::error::{Result, StoreError};

const LEVEL: i32 = 3;
/// Largest decoded blob that is accepted.
const MAX_BYTES: usize = 1 << 28;

fn compress(bytes: &[u8]) -> Result<Vec<u8>> {
    zstd::bulk::compress(bytes, LEVEL).map_err(|e| StoreError::Damaged(e.to_string()))
}

fn decompress(blob: &[u8]) -> Result<Vec<u8>> {
    let size = zstd::zstd_safe::get_frame_content_size(blob)
        .ok()
        .flatten()
        .filter(|n| *n <= MAX_BYTES as u64)
        .ok_or_else(|| StoreError::Damaged("a blob has no usable size".into()))?;
    zstd::bulk::decompress(blob, size as usize).map_err(|e| StoreError::Damaged(e.to_string()))
}

/// Text or JSON.
pub(crate) fn from_text(text: &str) -> Result<Vec<u8>> {
    compress(text.as_bytes())
}

/// The reverse of [`from_text`].
pub(crate) fn to_text(blob: &[u8]) -> Result<String> {
    String::from_utf8(decompress(blob)?).map_err(|e| StoreError::Damaged(e.to_string()))
}

/// Ids as LEB128 varints, compressed.
pub(crate) fn from_ids(ids: &[u32]) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(ids.len() * 2);
    for id in ids {
        let mut v = *id;
        while v >= 0x80 {
            bytes.push(v as u8 | 0x80);
            v >>= 7;
        }
        bytes.push(v as u8);
    }
    compress(&bytes)
}

/// The reverse of [`from_ids`].
pub(crate) fn to_ids(blob: &[u8]) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    let (mut value, mut shift) = (0u32, 0);
    for byte in decompress(blob)? {
        if shift > 28 {
            return Err(StoreError::Damaged("a token id is too long".into()));
        }
        value |= u32::from(byte & 0x7F) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            ids.push(value);
            (value, shift) = (0, 0);
        }
    }
    Ok(ids)
}

/// Floats bit by bit, bytes of one significance together, compressed.
pub(crate) fn from_floats(values: &[f32]) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(values.len() * 4);
    for i in 0..4 {
        bytes.extend(values.iter().map(|v| v.to_le_bytes()[i]));
    }
    compress(&bytes)
}

/// The reverse of [`from_floats`].
pub(crate) fn to_floats(blob: &[u8]) -> Result<Vec<f32>> {
    let bytes = decompress(blob)?;
    let n = bytes.len() / 4;
    Ok((0..n)
        .map(|i| f32::from_le_bytes([bytes[i], bytes[n + i], bytes[2 * n + i], bytes[3 * n + i]]))
        .collect())
}

/// Length of the common beginning.
pub(crate) fn common_prefix<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{from_floats, from_ids, from_text, to_floats, to_ids, to_text};

    proptest! {
        #[test]
        fn blobs_are_exact(
            ids in proptest::collection::vec(any::<u32>(), 0..200),
            floats in proptest::collection::vec(any::<f32>(), 0..200),
            text in "\\PC{0,80}",
        ) {
            prop_assert_eq!(to_ids(&from_ids(&ids)?)?, ids);
            let back = to_floats(&from_floats(&floats)?)?;
            prop_assert!(back.iter().map(|f| f.to_bits()).eq(floats.iter().map(|f| f.to_bits())));
            prop_assert_eq!(to_text(&from_text(&text)?)?, text);
        }
    }

    #[test]
    fn damaged_blobs_are_errors() {
        assert!(to_ids(b"nonsense").is_err());
        let mut blob = from_ids(&[1, 2, 3]).expect("encodes");
        blob.truncate(blob.len() - 2);
        assert!(to_ids(&blob).is_err());
    }
}
