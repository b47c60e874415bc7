//! Writing one slot, and emptying all.

use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active};
use crate::segment::claim::{Claim, Lease, SET};
use crate::segment::counters::Count;
use crate::slots::cache::Cache;
use crate::slots::outcome::{Load, Stored};
use crate::sys::mapping::checksum;
use rustix::io::Errno;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long an overwrite waits for another writer of the same slot before it lets that one win.
const OVERWRITE_PATIENCE: Duration = Duration::from_millis(100);

impl Cache {
    /// Stores a sample. `bytes` must be exactly one slot long.
    pub fn store(&self, index: i64, bytes: &[u8], overwrite: bool) -> Result<Stored> {
        if bytes.len() as u64 != self.geometry().slot_bytes {
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "a value of {} bytes does not fit a slot of {} bytes",
                    bytes.len(),
                    self.geometry().slot_bytes
                ),
            ));
        }
        self.take_note_after_fork();
        let i = match self.slot_of(index) {
            Ok(i) => i,
            Err(Load::Outside) => return Ok(Stored::Outside),
            Err(_) => return Ok(Stored::Beyond),
        };
        let slots = self.slots();
        // Known and still set: the answer needs neither a lease nor space.
        if !overwrite && slots.state(i) == SET {
            return Ok(self.already_set(i));
        }
        if self.segment.is_frozen() {
            self.counters().add(Count::Dropped, 1);
            return Ok(Stored::Refused(false));
        }
        let Some(lease) = self.leases().mine(&slots) else {
            self.counters().add(Count::Dropped, 1);
            return self.check_descriptor().map(|()| Stored::Refused(false));
        };
        match self.claim(i, lease, overwrite) {
            Claim::Claimed => self.fill(i, lease, bytes),
            Claim::Occupied => Ok(self.already_set(i)),
            Claim::Busy => {
                self.counters().add(Count::Lost, 1);
                Ok(Stored::Lost)
            }
            Claim::Beyond => Ok(Stored::Beyond),
        }
    }

    /// An error if the program closed our descriptor.
    #[cold]
    fn check_descriptor(&self) -> Result<()> {
        if self.segment().anchor().is_ours() { Ok(()) } else { Err(Error::closed()) }
    }

    fn already_set(&self, i: usize) -> Stored {
        let missed = self.seen.was_missed(i); // asked in any case: the answer is used up
        if self.seen.contains(i) && !missed {
            return Stored::Occupied;
        }
        self.seen.insert(i);
        self.counters().add(Count::Lost, 1);
        Stored::Lost
    }

    /// An overwrite waits, bounded, for a living writer of the slot; others need not.
    fn claim(&self, i: usize, lease: Lease, overwrite: bool) -> Claim {
        let slots = self.slots();
        let mut claim = slots.claim(i, lease, overwrite, &self.leases());
        if claim == Claim::Busy && overwrite {
            self.counters().add(Count::Waits, 1);
            let began = Instant::now();
            while claim == Claim::Busy && began.elapsed() < OVERWRITE_PATIENCE {
                std::thread::sleep(Duration::from_micros(50));
                if self.leases().mine(&slots) != Some(lease) {
                    break; // the program closed our descriptor meanwhile
                }
                claim = slots.claim(i, lease, overwrite, &self.leases());
            }
        }
        claim
    }

    fn fill(&self, i: usize, lease: Lease, bytes: &[u8]) -> Result<Stored> {
        let slots = self.slots();
        if active(Fault::PublishEarly) {
            slots.publish(i, lease);
        }
        let at = self.layout().slot_at(self.geometry(), i as u64);
        if let Err(errno) = self.segment.write(bytes, at) {
            slots.abandon(i, lease);
            self.counters().add(Count::Dropped, 1);
            if let Some(error) = Error::unwritable("value", errno) {
                return Err(error);
            }
            return Ok(Stored::Refused(self.segment.freeze(errno)));
        }
        if self.geometry().verify {
            self.checks()[i].store(checksum(bytes), Ordering::Relaxed);
        }
        let published = slots.publish(i, lease);
        if !published && !active(Fault::PublishEarly) {
            self.counters().add(Count::Lost, 1);
            return Ok(Stored::Lost);
        }
        self.seen.insert(i);
        self.seen.was_missed(i); // and is not any more
        self.counters().add(Count::Fills, 1);
        self.counters().add(Count::Bytes, bytes.len() as u64);
        Ok(Stored::Done)
    }

    /// Why the cache froze, for the one warning.
    pub fn frozen_reason(&self) -> String {
        let (filled, capacity) = (self.slots().filled(), self.geometry().capacity);
        self.segment.frozen_reason(&format!(" with {filled} of {capacity} slots filled"))
    }

    /// Empties every slot, wipes its bytes and takes values again. The memory stays allocated.
    pub fn clear(&self) -> Result<()> {
        let slots = self.slots();
        let Some(lease) = self.leases().mine(&slots) else {
            self.check_descriptor()?;
            return Err(Error::new(
                Kind::State,
                "too many processes are writing to this cache to clear it; try again later",
            ));
        };
        let zeros = vec![0u8; self.geometry().slot_bytes as usize];
        let mut failed = None;
        slots.clear(
            lease,
            |_| true,
            |i| {
                // A clear takes long: asked anew.
                let wiped = if self.leases().mine(&slots) == Some(lease) {
                    self.segment.write(&zeros, self.layout().slot_at(self.geometry(), i as u64))
                } else {
                    Err(Errno::BADF)
                };
                failed = failed.or(wiped.err());
            },
        );
        self.seen.forget();
        self.segment.thaw();
        failed.map_or(Ok(()), |errno| Err(Error::system("cannot wipe a slot", errno)))
    }

    /// Makes sure that touching slots `from..to` through the mapping cannot fail any more.
    pub fn reserve(&self, from: u64, to: u64) -> Result<()> {
        let (g, layout) = (self.geometry(), self.layout());
        let (at, len) = (layout.data_at + from * g.slot_bytes, (to - from) * g.slot_bytes);
        self.segment.reserve(at, len).map_err(|errno| {
            Error::system(
                &format!("cannot reserve {} for direct access to the array", Bytes(len)),
                errno,
            )
        })
    }
}
