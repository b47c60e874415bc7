//! The format of a store of records (kind 1): where everything lies.

use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::segment::claim::LEASES;
use crate::segment::parts::{LINE, LOCKS, PAGE, STATES_AT};

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
/// How many regions there are where regions are recycled.
pub(crate) const REGIONS: u64 = 32;

impl RecordsGeometry {
    /// What `limit_bytes` leave for records once the index has its share.
    pub fn plan(limit_bytes: u64, dataset_len: u64, recycle: bool) -> Result<Self> {
        if dataset_len == 0 {
            return Err(Error::new(
                Kind::Argument,
                "the dataset is empty; there is nothing to cache",
            ));
        }
        let regions = if recycle { REGIONS } else { 1 };
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

/// Records begin at multiples of this, which suits every element type.
pub(crate) const RECORD_ALIGN: u64 = 16;
/// The most that an entry of the index can point into: 64 TiB.
pub(crate) const MAX_DATA_BYTES: u64 = 1 << 46;
const INDEX_ENTRY_BYTES: u64 = 16;
/// Of the words of a region, readers look at those of the first line and writers at both.
const REGION_BYTES: u64 = 2 * LINE;

/// Offsets of the parts of a segment of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordsLayout {
    pub(crate) states_at: u64,
    pub(crate) index_at: u64,
    pub(crate) regions_at: u64,
    pub(crate) writers_at: u64,
    pub(crate) schemas_at: u64,
    /// The records. Everything before is metadata, allocated at creation.
    pub data_at: u64,
    /// Length of the segment.
    pub total: u64,
}

impl RecordsLayout {
    pub(crate) fn of(geometry: &RecordsGeometry) -> Option<Self> {
        let lines = |at: u64| at.checked_next_multiple_of(LINE);
        let entries = geometry.dataset_len.checked_mul(INDEX_ENTRY_BYTES)?;
        let states_at = STATES_AT;
        let index_at = lines(
            states_at.checked_add(geometry.dataset_len.checked_add(LOCKS)?.checked_mul(2)?)?,
        )?;
        let regions_at = lines(index_at.checked_add(entries)?)?;
        let regions = geometry.regions.checked_mul(REGION_BYTES)?.checked_add(LINE)?;
        let writers_at = regions_at.checked_add(regions)?;
        let writers = 8 * u64::from(LEASES);
        let schemas_at = lines(writers_at.checked_add(writers)?)?;
        let data_at =
            schemas_at.checked_add(SCHEMA_BYTES)?.checked_next_multiple_of(PAGE as u64)?;
        let total = data_at.checked_add(geometry.data_bytes)?;
        let fits = geometry.data_bytes <= MAX_DATA_BYTES && total <= i64::MAX as u64;
        fits.then_some(Self {
            states_at,
            index_at,
            regions_at,
            writers_at,
            schemas_at,
            data_at,
            total,
        })
    }

    /// Where the words of region `r` are; those of all regions together stand before the first.
    pub(crate) fn region_at(&self, r: u64) -> usize {
        (self.regions_at + LINE + r * REGION_BYTES) as usize
    }
}
