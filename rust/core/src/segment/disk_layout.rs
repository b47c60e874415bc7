//! The format of the table of a disk store (kind 3): what is known of records that lie in files.
//!
//! ```text
//!   states    dataset_len + LOCKS  u16, one state per sample, then those of the locks
//!   index, regions, writers        as in a segment of records (space_layout.rs)
//!   keys      dataset_len          two u64 per sample, if samples are known by keys
//! ```

use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::segment::parts::{LINE, LOCKS, PAGE, STATES_AT};
use crate::segment::space_layout::{MAX_DATA_BYTES, MAX_REGIONS, RECORD_ALIGN, SpaceLayout};

/// How much room there is in files for records of any size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskGeometry {
    /// Samples in the dataset.
    pub dataset_len: u64,
    /// Bytes of one region, which is one file.
    pub region_bytes: u64,
    /// How many there may be.
    pub regions: u64,
    /// Whether a file goes when room for another is needed.
    pub recycles: bool,
    /// Whether samples are known by keys of the user's, instead of their numbers.
    pub keyed: bool,
}

/// Offsets of the parts of a table of a disk store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskLayout {
    pub(crate) states_at: u64,
    pub(crate) space: SpaceLayout,
    pub(crate) keys_at: u64,
    /// Length of the segment, all of which is allocated at creation.
    pub total: u64,
}

const FLAG_RECYCLES: u32 = 1;
const FLAG_KEYED: u32 = 2;

impl DiskGeometry {
    /// Where everything lies.
    pub fn layout(&self) -> Result<DiskLayout> {
        DiskLayout::of(self).ok_or_else(|| {
            Error::new(
                Kind::Argument,
                format!(
                    "a disk level of {self} is beyond the {} in {MAX_REGIONS} files that one can hold; lower disk",
                    Bytes(MAX_DATA_BYTES)
                ),
            )
        })
    }

    pub(crate) fn flags(&self) -> u32 {
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        flag(self.recycles, FLAG_RECYCLES) | flag(self.keyed, FLAG_KEYED)
    }

    /// Of what a header says; `None` if that cannot be.
    pub(crate) fn from_header(
        dataset_len: u64,
        region_bytes: u64,
        regions: u64,
        flags: u32,
    ) -> Option<Self> {
        (flags & !(FLAG_RECYCLES | FLAG_KEYED) == 0).then_some(Self {
            dataset_len,
            region_bytes,
            regions,
            recycles: flags & FLAG_RECYCLES != 0,
            keyed: flags & FLAG_KEYED != 0,
        })
    }
}

impl std::fmt::Display for DiskGeometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let policy = if self.recycles { "lru" } else { "freeze" };
        write!(
            f,
            "{} files of {} for records of {} samples, policy {policy:?}",
            self.regions,
            Bytes(self.region_bytes),
            self.dataset_len
        )
    }
}

impl DiskLayout {
    pub(crate) fn of(geometry: &DiskGeometry) -> Option<Self> {
        let states_at = STATES_AT;
        let states = geometry.dataset_len.checked_add(LOCKS)?.checked_mul(2)?;
        let bytes = geometry.region_bytes.checked_mul(geometry.regions)?;
        let (space, end) = SpaceLayout::of(
            states_at.checked_add(states)?,
            geometry.dataset_len,
            bytes,
            geometry.regions,
            geometry.recycles,
        )?;
        let keys_at = end.checked_next_multiple_of(LINE)?;
        let keys = if geometry.keyed { geometry.dataset_len.checked_mul(16)? } else { 0 };
        let total = keys_at.checked_add(keys)?.checked_next_multiple_of(PAGE as u64)?;
        let fits = geometry.dataset_len > 0
            && geometry.region_bytes > 0
            && geometry.region_bytes.is_multiple_of(PAGE as u64)
            && total <= i64::MAX as u64;
        const { assert!((PAGE as u64).is_multiple_of(RECORD_ALIGN)) };
        fits.then_some(Self { states_at, space, keys_at, total })
    }
}
