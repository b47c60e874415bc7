//! Samples that somebody wants, as C++ holds them.
#![allow(unsafe_code)] // records come as addresses

use crate::bridge::ffi;
use crate::disk::{nothing, record_at};
use crate::guard::{Crossing, calm, guard};
use crate::records::Records;
use std::io::IoSlice;
use std::time::Duration;
use stocache::tiers::acquire;
use stocache::{Error, Kind, Put};

type Result<T> = std::result::Result<T, Crossing>;

/// Samples that somebody wants.
pub struct Acquiring(acquire::Acquiring);

impl Records {
    /// Begins with these samples. Others who load one are waited for, `nanos` at the least.
    pub fn acquire(&self, indices: &[i64], nanos: u64) -> Result<Box<Acquiring>> {
        guard(|| {
            let outside = |index: &i64| {
                let len = self.store().geometry().dataset_len;
                let message = format!("sample {index} is outside of a dataset of {len}");
                Crossing::from(Error::new(Kind::Index, message))
            };
            let within = |index: &i64| self.store().index(*index).ok_or_else(|| outside(index));
            let indices = indices.iter().map(within).collect::<Result<Vec<usize>>>()?;
            let patience = Duration::from_nanos(nanos);
            Ok(Box::new(Acquiring(self.levels().acquire(&indices, patience))))
        })
    }
}

impl Acquiring {
    /// What it is in the core.
    pub(crate) fn inner(&mut self) -> &mut acquire::Acquiring {
        &mut self.0
    }

    /// Those that the caller is to load now; none if all others are there. Also none if it is to be let
    /// go, of which it knows.
    pub fn next_to_load(&mut self) -> Result<Vec<i64>> {
        guard(|| Ok(self.0.next_to_load().into_iter().map(|index| index as i64).collect()))
    }

    /// What becomes of a sample if it is put.
    pub fn outlook(&self, index: i64) -> ffi::Outlook {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        calm(ffi::Outlook::Unasked, || match self.0.outlook(index) {
            None => ffi::Outlook::Unasked,
            Some(acquire::Outlook::Stored) => ffi::Outlook::Stored,
            Some(acquire::Outlook::StoredElsewhere) => ffi::Outlook::StoredElsewhere,
            Some(acquire::Outlook::Refused) => ffi::Outlook::Refused,
        })
    }

    /// What came from below and is not in memory.
    pub fn given(&self, index: i64) -> ffi::RecordAt {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        calm(nothing(), || record_at(self.0.given(index)))
    }

    /// Stores the record of a sample that was loaded; its claim ends in any case.
    ///
    /// # Safety
    /// The parts must be readable for the length of the call.
    pub unsafe fn fill(&mut self, i: i64, schema: u16, parts: &[ffi::Part]) -> Result<ffi::Put> {
        guard(|| {
            let slice = |part: &ffi::Part| match part.len {
                0 => IoSlice::new(&[]),
                // SAFETY: by the caller's promise.
                len => IoSlice::new(unsafe { std::slice::from_raw_parts(part.data, len) }),
            };
            let parts: Vec<IoSlice<'_>> = parts.iter().map(slice).collect();
            let Ok(index) = usize::try_from(i) else { return Ok(ffi::Put::StoredElsewhere) };
            let filled = self.0.fill(index, schema, &parts)?;
            Ok(match filled.memory {
                _ if filled.below => ffi::Put::Stored,
                Put::Stored => ffi::Put::Stored,
                Put::StoredElsewhere => ffi::Put::StoredElsewhere,
                Put::NoRoom => ffi::Put::NoRoom,
                Put::TooLarge => ffi::Put::TooLarge,
                Put::Refused(true) => ffi::Put::Froze,
                Put::Refused(false) => ffi::Put::Refused,
            })
        })
    }

    /// Gives one back that will not be filled.
    pub fn abandon(&mut self, i: i64) {
        calm((), || usize::try_from(i).into_iter().for_each(|index| self.0.abandon(index)));
    }

    /// Gives back all that was not filled.
    pub fn give_back(&mut self) {
        calm((), || self.0.give_back());
    }
}
