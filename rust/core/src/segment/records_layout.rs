//! The format of a store of records (kind 1): where everything lies.

use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::segment::parts::{LOCKS, PAGE, STATES_AT};
use crate::segment::space_layout::{MAX_DATA_BYTES, MAX_REGIONS, RECORD_ALIGN, SpaceLayout};

/// How much room there is for records of any size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordsGeometry {
    /// Samples in the dataset.
    pub dataset_len: u64,
    /// Bytes for records.
    pub data_bytes: u64,
    /// Into how many regions they are divided. One is never recycled; of several, the one that was
    /// not used for longest is emptied when a new one is needed.
    pub regions: u64,
}

/// Bytes for the schemas of records.
pub(crate) const SCHEMA_BYTES: u64 = 64 << 10;
/// How many regions there are where regions are recycled: more where they would be larger than this. While
/// one goes to a level below, others wait for it.
pub(crate) const FEWEST_REGIONS: u64 = 32;
const LARGE_REGION: u64 = 256 << 20;

impl RecordsGeometry {
    /// What `limit_bytes` leave for records once the index has its share.
    pub fn plan(limit_bytes: u64, dataset_len: u64, recycle: bool) -> Result<Self> {
        if dataset_len == 0 {
            return Err(Error::new(
                Kind::Argument,
                "the dataset is empty; there is nothing to cache",
            ));
        }
        let many = (limit_bytes / LARGE_REGION).clamp(FEWEST_REGIONS, MAX_REGIONS);
        let regions = if recycle { many } else { 1 };
        let bare = Self { dataset_len, data_bytes: 0, regions };
        let index = bare.layout()?.data_at;
        // A region begins where a record may.
        let each = limit_bytes.saturating_sub(index) / regions / RECORD_ALIGN * RECORD_ALIGN;
        if each == 0 {
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "memory is {}, which is too small: the index of {dataset_len} samples alone takes {}; raise it",
                    Bytes(limit_bytes),
                    Bytes(index)
                ),
            ));
        }
        let geometry = Self { dataset_len, data_bytes: each * regions, regions };
        geometry.layout().map(|_| geometry)
    }

    /// What the index of so many samples takes, and room for a few bytes: the least that can be asked for.
    pub fn least(dataset_len: u64, recycle: bool) -> Result<u64> {
        let regions = if recycle { FEWEST_REGIONS } else { 1 };
        let bare = Self { dataset_len, data_bytes: 0, regions };
        Ok(bare.layout()?.data_at + regions * RECORD_ALIGN)
    }

    /// Bytes of one region.
    pub fn region_bytes(&self) -> u64 {
        self.data_bytes / self.regions
    }

    /// Where everything lies.
    pub fn layout(&self) -> Result<RecordsLayout> {
        RecordsLayout::of(self).ok_or_else(|| {
            Error::new(
                Kind::Argument,
                format!(
                    "a cache of {self} is beyond the {} that one can hold; lower memory",
                    Bytes(MAX_DATA_BYTES)
                ),
            )
        })
    }
}

impl std::fmt::Display for RecordsGeometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let policy = if self.regions == 1 { "freeze" } else { "lru" };
        write!(
            f,
            "{} for records of {} samples, policy {policy:?}",
            Bytes(self.data_bytes),
            self.dataset_len
        )
    }
}

/// Offsets of the parts of a segment of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordsLayout {
    pub(crate) states_at: u64,
    pub(crate) space: SpaceLayout,
    pub(crate) schemas_at: u64,
    /// The records. Everything before is metadata, allocated at creation.
    pub data_at: u64,
    /// Length of the segment.
    pub total: u64,
}

impl RecordsLayout {
    pub(crate) fn of(geometry: &RecordsGeometry) -> Option<Self> {
        let RecordsGeometry { dataset_len, data_bytes, regions } = *geometry;
        let states_at = STATES_AT;
        let index_at = states_at.checked_add(dataset_len.checked_add(LOCKS)?.checked_mul(2)?)?;
        let (mut space, schemas_at) =
            SpaceLayout::of(index_at, dataset_len, data_bytes, regions, regions > 1)?;
        let data_at =
            schemas_at.checked_add(SCHEMA_BYTES)?.checked_next_multiple_of(PAGE as u64)?;
        let total = data_at.checked_add(data_bytes)?;
        space.base = data_at;
        (total <= i64::MAX as u64).then_some(Self { states_at, space, schemas_at, data_at, total })
    }
}
