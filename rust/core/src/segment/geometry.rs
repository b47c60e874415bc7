//! What a segment holds and how much of it, whichever kind it is.

use crate::error::Result;
use crate::segment::disk_layout::DiskGeometry;
use crate::segment::records_layout::RecordsGeometry;
use crate::segment::slots_layout::SlotsGeometry;
use crate::segment::table_layout::TableGeometry;

/// What a segment holds and how much of it: the numbers from which its layout follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Geometry {
    /// A slot per sample (cache.rs).
    Slots(SlotsGeometry),
    /// Records of any size (store.rs).
    Records(RecordsGeometry),
    /// What is known of files (files/table).
    Files(TableGeometry),
    /// What is known of records in files (disk).
    Disk(DiskGeometry),
}

impl Geometry {
    /// Samples in the dataset.
    pub fn dataset_len(&self) -> u64 {
        match self {
            Geometry::Slots(geometry) => geometry.dataset_len,
            Geometry::Records(geometry) => geometry.dataset_len,
            Geometry::Files(table) => table.expected,
            Geometry::Disk(disk) => disk.dataset_len,
        }
    }

    /// Whether somebody who asked for `wanted` can use this. Records are as good in more room or
    /// less: who came first decided.
    pub(crate) fn serves(&self, wanted: &Geometry) -> bool {
        match (self, wanted) {
            (Geometry::Slots(ours), Geometry::Slots(theirs)) => ours == theirs,
            (Geometry::Records(ours), Geometry::Records(theirs)) => {
                (ours.dataset_len, ours.regions) == (theirs.dataset_len, theirs.regions)
            }
            (Geometry::Files(_), Geometry::Files(_)) => true,
            (Geometry::Disk(ours), Geometry::Disk(theirs)) => {
                let DiskGeometry { dataset_len, region_bytes, recycles, keyed, .. } = ours;
                (*dataset_len, *region_bytes, *recycles, *keyed)
                    == (theirs.dataset_len, theirs.region_bytes, theirs.recycles, theirs.keyed)
            }
            _ => false,
        }
    }

    /// The argument with which people say how large it may be.
    pub(crate) fn size_argument(&self) -> &'static str {
        match self {
            Geometry::Slots(_) => "size_limit_gib",
            Geometry::Records(_) => "memory",
            Geometry::Files(_) => "the number of files",
            Geometry::Disk(_) => "the length of the dataset",
        }
    }

    /// Where its parts begin and end.
    pub fn extent(&self) -> Result<Extent> {
        let (states_at, data_at, total) = match self {
            Geometry::Slots(slots) => slots.layout().map(|l| (l.states_at, l.data_at, l.total)),
            Geometry::Records(records) => {
                records.layout().map(|l| (l.states_at, l.data_at, l.total))
            }
            Geometry::Files(table) => table.layout().map(|l| (l.states_at, l.data_at, l.total)),
            Geometry::Disk(disk) => disk.layout().map(|l| (l.states_at, l.total, l.total)),
        }?;
        Ok(Extent { states_at, data_at, total })
    }

    /// Memory that it takes. Samples fill what they were given; a table of files grows with use.
    pub(crate) fn budget(&self) -> Result<Budget> {
        let Extent { data_at: metadata, total, .. } = self.extent()?;
        Ok(match self {
            Geometry::Files(table) => {
                Budget { least: metadata, likely: table.likely_bytes().max(metadata) }
            }
            _ => Budget { least: total, likely: total },
        })
    }
}

impl std::fmt::Display for Geometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Geometry::Slots(geometry) => geometry.fmt(f),
            Geometry::Records(geometry) => geometry.fmt(f),
            Geometry::Files(table) => table.fmt(f),
            Geometry::Disk(disk) => disk.fmt(f),
        }
    }
}

/// Where the parts of a segment begin and end that all have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The states.
    pub states_at: u64,
    /// The data. What lies before is metadata, allocated at creation.
    pub data_at: u64,
    /// Length of the segment.
    pub total: u64,
}

/// Memory that a segment takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// What there must be.
    pub(crate) least: u64,
    /// What it takes when it is used as expected.
    pub(crate) likely: u64,
}
