//! Heads: what stands in front of a record in memory, by which a region's records are found without a walk
//! over the index.
//!
//! ```text
//!   key        the number of its sample
//!   content    bits 0 to 32    its length in bytes
//!              bits 33 to 48   its schema
//! ```
//!
//! A head is believed only where the index says the same of that sample: a writer that died has left
//! room without one, in which there may be anything.

use super::base::RecordStore;
use crate::fault::{Fault, active as broken};
use crate::segment::space_layout::RECORD_ALIGN;
use crate::space::{LENGTH_BITS, Record};
use std::sync::atomic::Ordering;

/// A multiple of RECORD_ALIGN.
pub(super) const HEAD_BYTES: u64 = 16;
/// So much of a region is read at once to find its records; a page costs as much as a head.
const BLOCK: usize = 4096;

const _: () = assert!(HEAD_BYTES == 2 * 8 && HEAD_BYTES.is_multiple_of(RECORD_ALIGN));

/// What a record of `len` bytes takes. Also one without any has a byte of its region.
pub(super) fn room_for(len: u64) -> u64 {
    HEAD_BYTES + len.next_multiple_of(RECORD_ALIGN).max(RECORD_ALIGN)
}

/// The head of a record.
pub(super) fn pack_head(key: u64, len: u64, schema: u16) -> [u8; HEAD_BYTES as usize] {
    let content = len | u64::from(schema) << LENGTH_BITS;
    let mut head = [0; HEAD_BYTES as usize];
    head[..8].copy_from_slice(&key.to_le_bytes());
    head[8..].copy_from_slice(&content.to_le_bytes());
    head
}

/// The reverse, of bytes that begin with a head: key, length, schema.
fn unpack_head(head: &[u8]) -> (u64, u64, u16) {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    let (key, content) = (word(0), word(8));
    (key, content & ((1 << LENGTH_BITS) - 1), (content >> LENGTH_BITS) as u16)
}

impl RecordStore {
    /// The records of region `r`, each with the number of its sample, in the order in which they lie
    /// there. Costs what the region holds, and a look per 16 bytes of what the dead left between. As
    /// with `find`, they may be gone when they are looked at; to look for them is no use of the region.
    pub fn records_in(&self, r: u64) -> impl Iterator<Item = (usize, Record)> + '_ {
        let space = self.space();
        let first = r * space.layout().region_bytes();
        let end = first + space.used_in(r);
        let mut at = first;
        let (mut block, mut block_at, mut read) = (vec![0; BLOCK], first, 0);
        std::iter::from_fn(move || {
            while at + HEAD_BYTES < end {
                let here = space.layout().base + at;
                if (at - block_at) as usize + HEAD_BYTES as usize > read {
                    block_at = at;
                    read = self.segment().read(&mut block, here);
                    if read < HEAD_BYTES as usize {
                        return None;
                    }
                }
                let (key, len, schema) = unpack_head(&block[(at - block_at) as usize..]);
                let found = self.index(key as i64).and_then(|i| {
                    let record = space.indexed(i)?;
                    let generation = space.generation(record.region.into(), Ordering::Acquire);
                    (generation == record.generation).then_some((i, record))
                });
                match found {
                    Some((i, record))
                        if broken(Fault::TrustHeads)
                            || record.at as u64 == here + HEAD_BYTES
                                && (record.len as u64, record.schema) == (len, schema) =>
                    {
                        at += room_for(len);
                        return Some((i, record));
                    }
                    // A gap that the dead left, or a record that is gone.
                    _ => at += RECORD_ALIGN,
                }
            }
            None
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_bytes_of_a_head_are_these() {
        assert_eq!(&pack_head(7, 5, 3), b"\x07\0\0\0\0\0\0\0\x05\0\0\0\x06\0\0\0");
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_back(key: u64, len in 0..1u64 << LENGTH_BITS, schema: u16) {
            prop_assert_eq!(unpack_head(&pack_head(key, len, schema)), (key, len, schema));
        }
    }
}
