//! Making room: which files go, and when one may.

use crate::fault::{Fault, active as broken};
use crate::files::folder::{Folder, Victims};
use crate::files::journal;
use crate::files::news::Topic;
use crate::files::paths::{as_path, can_be_ours, key};
use crate::files::table::{EVICTING, FileLock, OWNED};
use crate::segment::claim::LEASES;
use crate::segment::counters::Count;
use crate::segment::lease::now;
use rustix::io::Errno;
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The reservations of the dead are looked for so often, unless there is nothing else left.
const RECLAIM_EVERY: Duration = Duration::from_secs(1);

impl Folder {
    /// Keeps to the limit: an earlier job may have had a higher one.
    pub(crate) fn trim(&self) {
        let Some(limit) = self.options.limit else { return };
        while self.table.bytes() > limit && self.evict_one() == Ok(true) {}
    }

    /// Sets `bytes` aside for a file, removing others if that is allowed and needed. An error if they
    /// cannot be removed.
    pub(crate) fn make_room(&self, lock: &FileLock<'_>, bytes: u64) -> rustix::io::Result<bool> {
        let (table, entry) = (&self.table, self.table.entry(lock.i));
        let limit = self.options.limit.unwrap_or(u64::MAX);
        if bytes > limit || crate::sys::limits::check_file_size(bytes).is_err() {
            table.counters().add(Count::TooLarge, 1);
            return Ok(false);
        }
        // What it takes already is going to be replaced.
        let before = entry.owned_bytes();
        table.reserve(lock, bytes.saturating_sub(before));
        while table.bytes() > limit {
            if self.reclaim(false) {
                continue;
            }
            let gained = if self.options.evict { self.evict_one() } else { Ok(false) };
            if gained != Ok(true) {
                table.unreserve(lock);
                return gained;
            }
        }
        Ok(true)
    }

    /// Removes the file that was not used for longest. False if there is none to remove.
    fn evict_one(&self) -> rustix::io::Result<bool> {
        if !self.domain.is_alone() {
            if self.domain.has_rowless() {
                self.tell(Topic::Rowless, || {
                    format!(
                        "{} is used by more than {LEASES} processes, so nothing is removed from it; \
                         use fewer workers",
                        self.path.display()
                    )
                });
                return Ok(false);
            }
            self.tell(Topic::Unshared, || {
                format!(
                    "{} is also used by processes that do not share this /dev/shm (another \
                     container?), so nothing is removed from it; share /dev/shm or use another folder",
                    self.path.display()
                )
            });
            return Ok(false);
        }
        // Who finds the list in another thread's hands makes another one.
        let mut victims = self.victims.take().unwrap_or_default();
        let gained = self.remove_one_of(&mut victims);
        let _there_is_one = self.victims.put(victims);
        gained
    }

    fn remove_one_of(&self, victims: &mut Victims) -> rustix::io::Result<bool> {
        let mut looked = false;
        loop {
            let Some((used, i)) = victims.files.pop() else {
                if looked {
                    return Ok(false);
                }
                looked = true;
                if self.reclaim(true) {
                    return Ok(true);
                }
                *victims = Victims { files: self.table.oldest(), names: None };
                continue;
            };
            let entry = self.table.entry(i);
            if entry.flags() & OWNED == 0 || entry.used() != used {
                continue;
            }
            let Some(name) = self.name_of(i).or_else(|| self.look_for_name(i, victims)) else {
                // Neither the log nor the folder has it.
                if let Some(lock) = self.table.lock(i) {
                    self.table.disown(&lock);
                    return Ok(true);
                }
                continue;
            };
            if self.remove(i, &name)? {
                self.table.counters().add(Count::Evicted, 1);
                return Ok(true);
            }
        }
    }

    /// The name of a file that is not where the log should have it: from the whole log, and from what
    /// is in the folder if the log was lost. Done once for all that were looked out.
    fn look_for_name(&self, i: usize, victims: &mut Victims) -> Option<Vec<u8>> {
        let Victims { files, names } = victims;
        let names = names.get_or_insert_with(|| {
            let logged = self.journal.read().files;
            self.learn(&logged);
            let owned = |name: &Vec<u8>| {
                let i = self.table.find(key(name))?;
                (self.table.entry(i).flags() & OWNED != 0).then_some(i)
            };
            let mut found: Vec<Vec<u8>> = logged.into_keys().collect();
            found.retain(|name| owned(name).is_some());
            if (found.len() as u64) < self.table.files() {
                // What is ours among what is there has to be noted again.
                let known: HashSet<&Vec<u8>> = found.iter().collect();
                let mut lost = journal::walk(as_path(&self.files));
                lost.retain(|name, _| !known.contains(name) && owned(name).is_some());
                if let Ok(logged) = self.journal.keep_all(&lost) {
                    self.learn(&logged);
                }
                found.extend(lost.into_keys());
            }
            let wanted: HashSet<usize> = files.iter().map(|&(_, i)| i).chain([i]).collect();
            let named = found.into_iter().filter_map(|name| Some((owned(&name)?, name)));
            named.filter(|(i, _)| wanted.contains(i)).collect()
        });
        names.remove(&i)
    }

    /// Gives back what the dead had set aside; true if that was something. Looking takes a walk over
    /// the table, so it is done at once or once in a while.
    fn reclaim(&self, at_once: bool) -> bool {
        let (at, time) = (self.table.reclaimed_at(), now());
        let since = time.abs_diff(at.load(Ordering::Relaxed));
        if !at_once && since < RECLAIM_EVERY.as_nanos() as u64 {
            return false;
        }
        at.store(time, Ordering::Relaxed);
        let mut any = false;
        for i in self.table.reserved() {
            if let Some(lock) = self.table.lock(i) {
                let _gone = rustix::fs::unlink(self.part(i));
                self.table.unreserve(&lock);
                any = true;
            }
        }
        any
    }

    /// Removes file `i` if it is ours and nobody uses it or is about to.
    pub(crate) fn remove(&self, i: usize, name: &[u8]) -> rustix::io::Result<bool> {
        let Some(lock) = self.table.lock(i) else { return Ok(false) };
        let entry = self.table.entry(i);
        if entry.flags() & OWNED == 0 {
            return Ok(false);
        }
        let path = self.path_of(name);
        if rustix::fs::lstat(as_path(&path)).is_ok_and(|stat| !can_be_ours(&stat)) {
            self.forget(&lock, name); // another took its place
            return Ok(false);
        }
        entry.raise(EVICTING);
        let alone = self.domain.may_remove(); // until it is removed
        let in_use = alone.is_none() || self.table.is_given_out(i);
        if in_use && !broken(Fault::EvictInUse) {
            entry.lower(EVICTING);
            return Ok(false);
        }
        match rustix::fs::unlink(as_path(&path)) {
            Ok(()) | Err(Errno::NOENT) => {
                self.forget(&lock, name);
                Ok(true)
            }
            Err(errno) => {
                entry.lower(EVICTING);
                Err(errno)
            }
        }
    }

    /// Removes all copies that are ours and that nobody is about to use; says how many.
    pub(crate) fn clear(&self) -> u64 {
        let remove = |name: &Vec<u8>| {
            self.table.find(key(name)).is_some_and(|i| self.remove(i, name) == Ok(true))
        };
        self.names().iter().filter(|name| remove(name)).count() as u64
    }
}
