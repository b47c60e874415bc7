//! What earlier jobs left: read from the logs into the table, by the first process of the node; and once more
//! if others have written since, before anybody with this table does.

use super::log;
use super::store::DiskStore;
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active as broken, reached};
use crate::space::pack;
use crate::sys::pages::PAGE;
use rustix::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Which of the locks of the table is held while it is informed; the first is that of the regions.
const LOCK: u64 = 1;
/// How long to wait for who reads the logs: ten million records take about a second.
const PATIENCE: Duration = Duration::from_secs(60);
/// Who may not read them itself looks so often whether somebody has done so, and not for so long.
const NAP: Duration = Duration::from_millis(10);
const PATIENCE_WITHOUT_LEASE: Duration = Duration::from_secs(2);

impl DiskStore {
    /// Sees to it that the table knows what there is. If whoever does so dies, another one begins again.
    pub(super) fn inform(&self, keys: Option<&[u128]>) -> Result<()> {
        let space = self.space();
        let began = Instant::now();
        while !space.is_ready() {
            let Some(lease) = space.lease() else {
                if began.elapsed() > PATIENCE_WITHOUT_LEASE {
                    let path = self.path().display();
                    let message =
                        format!("too many processes use the disk level in {path}; end some");
                    return Err(Error::new(Kind::State, message));
                }
                std::thread::sleep(NAP);
                continue;
            };
            let informed = space.locked(LOCK, lease, || {
                if !space.is_ready() {
                    self.note_keys(keys.unwrap_or_default());
                    self.recall();
                }
            });
            if informed.is_none() && began.elapsed() > PATIENCE {
                return Err(Error::new(
                    Kind::State,
                    format!(
                        "the process that reads what is in {} does not come to an end; end it",
                        self.path().display()
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Sees to it that a table that may write knows where those ended who did so before it; whether it does.
    /// Until then it knows what there was when it was made.
    pub(super) fn take_over(&self) -> bool {
        let space = self.space();
        if broken(Fault::WriteWhereItEnded) {
            return true;
        }
        if !space.is_ready_to_write()
            && let Some(lease) = space.lease()
        {
            let _others_are_at_it = space.locked(LOCK, lease, || {
                if space.is_ready() && !space.is_ready_to_write() {
                    self.forget_all();
                    self.recall();
                }
            });
        }
        space.is_ready_to_write()
    }

    /// Who looks for a record meanwhile finds none, and loads it.
    fn forget_all(&self) {
        let space = self.space();
        (0..self.geometry().dataset_len as usize).for_each(|i| space.withdraw(i));
        for r in 0..self.geometry().regions {
            space.restore(r, space.generation(r, Ordering::Acquire), 0, 0, 0);
        }
    }

    fn note_keys(&self, keys: &[u128]) {
        for (i, key) in keys.iter().enumerate() {
            let words = self.keys(i);
            words[0].store(*key as u64, Ordering::Relaxed);
            words[1].store((*key >> 64) as u64, Ordering::Relaxed);
        }
    }

    /// Reads all logs. Nobody writes.
    fn recall(&self) {
        let space = self.space();
        // Asked first: what others write until nobody else does is seen below.
        let writes = self.is_chosen();
        let places = self.geometry().keyed.then(|| Places::of(self));
        // The one with the most room left is filled up. If none has any, one is active all the same: with
        // none, all would be taken for emptied.
        let mut active = None;
        let mut recalled = Vec::new();
        for (region, generation) in self.newest(writes) {
            let (used, logged) = self.recall_region(region, generation, places.as_ref());
            let left = self.geometry().region_bytes.saturating_sub(used);
            if active.is_none_or(|(most, _)| left > most) {
                active = Some((left, region));
            }
            recalled.push((region, generation, used, logged));
        }
        // A sample may have been written twice, if its first record was damaged: the last one counts.
        let mut records = vec![0; self.geometry().regions as usize];
        for record in (0..self.geometry().dataset_len as usize).filter_map(|i| space.indexed(i)) {
            records[record.region as usize] += 1;
        }
        for (region, generation, used, logged) in recalled {
            space.restore(region, generation, used, logged, records[region as usize]);
        }
        reached("disk: logs read");
        space.activate(active.map(|(_, region)| region));
        space.set_ready(writes);
    }

    /// The generation of each region that counts, the oldest first; what else there is goes, if this table
    /// writes.
    fn newest(&self, writes: bool) -> Vec<(u64, u32)> {
        let (newest, rest) = self.folder.generations(self.geometry().regions);
        if writes {
            rest.into_iter()
                .for_each(|(region, generation)| self.folder.remove(region, generation));
        }
        newest
    }

    /// Tells the table of the records of a region; where they end, and how many places its log has.
    fn recall_region(&self, region: u64, generation: u32, places: Option<&Places>) -> (u64, u64) {
        let space = self.space();
        let first = region * self.geometry().region_bytes;
        let seed = log::seed(self.fingerprint(), region, generation);
        let length = std::fs::metadata(self.folder.data(region, generation))
            .map_or(0, |data| data.len().min(self.geometry().region_bytes));
        let mut used = 0;
        let mut each = |entry: log::Entry| {
            let end = entry.at.saturating_add(entry.len);
            if end > length {
                return; // of a file that was cut
            }
            used = used.max(end.next_multiple_of(PAGE as u64).min(self.geometry().region_bytes));
            let words = pack(first + entry.at, entry.len, 0, generation);
            let tell = |i: usize| {
                space.announce(i, words);
                space.publish(i, words);
            };
            match places {
                Some(places) => places.with(entry.key).for_each(tell),
                None => self.index(entry.key).into_iter().for_each(tell),
            }
        };
        let logged = self.folder.open_log(region, generation).and_then(|file| {
            log::read(file.as_fd(), seed, self.geometry().region_bytes, &mut each)
        });
        match logged {
            Ok(logged) => (used, logged.places),
            // Who writes there would write over what it does not know of.
            Err(_) => (self.geometry().region_bytes, 0),
        }
    }
}

/// Which samples have a key. By its first half: the seal of a record tells the rest. Several samples
/// may have the same.
struct Places(Vec<(u64, usize)>);

impl Places {
    fn of(store: &DiskStore) -> Self {
        let samples = 0..store.geometry().dataset_len as usize;
        let mut places: Vec<_> = samples.map(|i| (store.identity(i).0, i)).collect();
        places.sort_unstable();
        Self(places)
    }

    fn with(&self, key: u64) -> impl Iterator<Item = usize> + '_ {
        let first = self.0.partition_point(|&(other, _)| other < key);
        self.0[first..].iter().take_while(move |&&(other, _)| other == key).map(|&(_, i)| i)
    }
}
