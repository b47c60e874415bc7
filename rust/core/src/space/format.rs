//! The words of the index, written down once.
//!
//! ```text
//!   location   bits 0 to 41    where the record begins: in steps of RECORD_ALIGN, from the first
//!              bits 42 to 57   its schema
//!   extent     bits 0 to 32    its length in bytes
//!              bits 33 to 63   the generation of its region in which it was written, from 1 on
//! ```
//!
//! An extent of zero says that there is no record. A record whose generation is not that of its
//! region is gone, too: the region was emptied since.

use crate::segment::space_layout::{MAX_DATA_BYTES, RECORD_ALIGN};

/// The longest record.
pub const MAX_RECORD: u64 = 4 << 30;

const LOCATION_BITS: u32 = 42;
pub(crate) const LENGTH_BITS: u32 = 33;
/// The last generation of a region: it is not emptied again, so that none comes twice.
pub(crate) const LAST_GENERATION: u32 = (1 << (64 - LENGTH_BITS)) - 1;

const _: () = {
    assert!(MAX_DATA_BYTES / RECORD_ALIGN == 1 << LOCATION_BITS);
    assert!(MAX_RECORD < 1 << LENGTH_BITS);
};

/// Where a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its first byte, from the start of the mapping, or of the space if that is elsewhere.
    pub at: usize,
    /// Its length in bytes.
    pub len: usize,
    /// The number of its schema, or [`INLINE`](crate::records::INLINE).
    pub schema: u16,
    /// The region that it lies in.
    pub region: u32,
    /// The generation of that region. Once it is another, the bytes may be anything.
    pub generation: u32,
}

/// The two words of a record that begins at `at`, from the first byte of all records.
pub(crate) fn pack(at: u64, len: u64, schema: u16, generation: u32) -> (u64, u64) {
    debug_assert!(at.is_multiple_of(RECORD_ALIGN) && at < MAX_DATA_BYTES);
    debug_assert!(len >> LENGTH_BITS == 0 && (1..=LAST_GENERATION).contains(&generation));
    (
        (at / RECORD_ALIGN) | u64::from(schema) << LOCATION_BITS,
        len | u64::from(generation) << LENGTH_BITS,
    )
}

/// The reverse: first byte, length, schema, generation.
#[inline]
pub(super) fn unpack(location: u64, extent: u64) -> (u64, u64, u16, u32) {
    (
        (location & ((1 << LOCATION_BITS) - 1)) * RECORD_ALIGN,
        extent & ((1 << LENGTH_BITS) - 1),
        (location >> LOCATION_BITS) as u16,
        (extent >> LENGTH_BITS) as u32,
    )
}

/// A generation and how many records were written in it, as one word.
pub(super) fn pack_count(generation: u32, count: u64) -> u64 {
    u64::from(generation) << LENGTH_BITS | count
}

/// The reverse.
pub(super) fn unpack_count(word: u64) -> (u32, u64) {
    ((word >> LENGTH_BITS) as u32, word & ((1 << LENGTH_BITS) - 1))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_of_a_record_are_these() {
        assert_eq!(pack(32, 5, 3, 1), (2 | 3 << 42, 5 | 1 << 33));
        assert_eq!(pack(0, 1, 0, LAST_GENERATION).1, 1 | u64::MAX << 33);
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_back(
            steps in 0u64..1 << LOCATION_BITS,
            len in 0..=MAX_RECORD,
            schema: u16,
            generation in 1..=LAST_GENERATION,
        ) {
            let at = steps * RECORD_ALIGN;
            let (location, extent) = pack(at, len, schema, generation);
            prop_assert_ne!(extent, 0);
            prop_assert_eq!(unpack(location, extent), (at, len, schema, generation));
            prop_assert_eq!(unpack_count(pack_count(generation, len)), (generation, len));
        }
    }
}
