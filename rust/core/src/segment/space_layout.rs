//! The words of a space of records, where they lie in a segment: of memory, or of files.

use crate::segment::claim::LEASES;
use crate::segment::parts::LINE;

/// Records begin at multiples of this, which suits every element type.
pub(crate) const RECORD_ALIGN: u64 = 16;
/// The most that an entry of the index can point into: 64 TiB.
pub(crate) const MAX_DATA_BYTES: u64 = 1 << 46;
/// The most regions: a byte of a writer's word names one.
pub(crate) const MAX_REGIONS: u64 = 255;
const INDEX_ENTRY_BYTES: u64 = 16;
/// Of the words of a region, readers look at those of the first line and writers at both.
const REGION_BYTES: u64 = 2 * LINE;

/// What a space is for, and where its words are: an index, regions, writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceLayout {
    /// Samples in the dataset.
    pub(crate) samples: u64,
    /// Bytes for records.
    pub(crate) bytes: u64,
    /// Into how many regions they are divided.
    pub(crate) regions: u64,
    /// Whether a region is emptied when a new one is needed.
    pub(crate) recycles: bool,
    /// Where its first byte is for those who find records: in the mapping; 0 if it is elsewhere.
    pub(crate) base: u64,
    pub(crate) index_at: u64,
    pub(crate) regions_at: u64,
    pub(crate) writers_at: u64,
}

impl SpaceLayout {
    /// The words from `at` on, and where they end. `base` is set by who knows where the records lie.
    pub(crate) fn of(
        at: u64,
        samples: u64,
        bytes: u64,
        regions: u64,
        recycles: bool,
    ) -> Option<(Self, u64)> {
        let lines = |at: u64| at.checked_next_multiple_of(LINE);
        let index_at = lines(at)?;
        let regions_at = lines(index_at.checked_add(samples.checked_mul(INDEX_ENTRY_BYTES)?)?)?;
        let words = regions.checked_mul(REGION_BYTES)?.checked_add(LINE)?;
        let writers_at = regions_at.checked_add(words)?;
        let end = lines(writers_at.checked_add(8 * u64::from(LEASES))?)?;
        let fits = (1..=MAX_REGIONS).contains(&regions)
            && bytes <= MAX_DATA_BYTES
            && bytes.is_multiple_of(regions.checked_mul(RECORD_ALIGN)?);
        let made =
            Self { samples, bytes, regions, recycles, base: 0, index_at, regions_at, writers_at };
        fits.then_some((made, end))
    }

    /// Bytes of one region.
    #[inline]
    pub(crate) fn region_bytes(&self) -> u64 {
        self.bytes / self.regions
    }

    /// Where the words of region `r` are; those of all regions together stand before the first.
    pub(crate) fn region_at(&self, r: u64) -> usize {
        (self.regions_at + LINE + r * REGION_BYTES) as usize
    }
}
