//! Records that change their level: up, when they were asked for; down, when memory needs their room.
#![allow(unsafe_code)] // the copy out of the mapping

use super::levels::{Fetched, Levels};
use crate::records::{Claim, Put};
use crate::space::Ground;
use std::io::IoSlice;
use std::time::Instant;

impl Levels {
    /// Whether what comes from below should be in memory, and may find room: not if that is for samples that are
    /// nowhere yet.
    fn lets_rise(&self, fetched: &Fetched) -> bool {
        if !self.is_of_now(fetched) || self.memory().has_no_room(fetched.bytes().len() as u64) {
            return false;
        }
        if self.is_from_afar(fetched) {
            return true; // nowhere on this node
        }
        let exclusive = self.filling_below().is_some() && !self.memory().recycles();
        !exclusive || self.holds_all_below()
    }

    /// Puts a record that came from below into memory, if it should be there and nobody else is at it.
    pub(super) fn claim_and_rise(&self, index: usize, fetched: &Fetched) {
        if !self.lets_rise(fetched) {
            self.keep_near(index, fetched);
        } else if self.memory().begin(index) == Claim::LoadAndStore {
            if !self.rise(index, fetched) {
                self.keep_near(index, fetched);
            }
            self.memory().abandon(index);
        }
    }

    /// Puts a claimed record that came from below into memory, if it should be there; whether it is. The
    /// claim stays.
    pub(super) fn rise(&self, index: usize, fetched: &Fetched) -> bool {
        if !self.lets_rise(fetched) {
            return false;
        }
        let record = [IoSlice::new(fetched.bytes())];
        let put =
            self.memory().fill_claimed(index, fetched.schema, &record, Some(fetched.since), self);
        matches!(put, Ok(Put::Stored))
    }

    /// Gives the records of a region of memory to the level below, as far as it does not have them. Others
    /// wait for that region: what could not go in time, all in all, is loaded again.
    fn sink(&self, r: u64) {
        let memory = self.memory();
        let deadline = Self::deadline();
        let mut bytes = Vec::new();
        for (index, record) in memory.records_in(r) {
            if Instant::now() >= deadline {
                return;
            }
            if self.is_below(index) || bytes.try_reserve(record.len).is_err() {
                continue;
            }
            bytes.resize(record.len, 0);
            let since = self.since();
            // SAFETY: as long as the record.
            unsafe { memory.copy_out(record, bytes.as_mut_ptr()) };
            if memory.is_whole(record.region, record.generation) {
                let parts = [IoSlice::new(&bytes)];
                self.pass_down(&[(index, record.schema, &parts)], &since, deadline);
            }
        }
    }
}

/// Memory whose regions go down before they are emptied.
impl Ground for Levels {
    fn may_go(&self, r: u64, _generation: u32) -> bool {
        self.sink(r);
        true // what the level below does not take is loaded again
    }
}
