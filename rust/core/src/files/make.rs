//! A copy made, and given its name.

use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active as broken};
use crate::files::content::{Content, Version, stat_file};
use crate::files::copy::{Trouble, copy, is_about_one_file, is_lack_of_room};
use crate::files::folder::Folder;
use crate::files::news::Topic;
use crate::files::paths::{as_path, lossy};
use crate::files::table::{CHECKED, FileLock, OWNED};
use crate::segment::counters::Count;
use crate::segment::lease::now;
use crate::sys::private_file::private_folder;
use rustix::fs::Stat;
use rustix::io::Errno;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// After a write failed, nothing is written for so long.
const REST: Duration = Duration::from_secs(10);
/// How often a source that changes while it is copied is tried again.
const TRIES: usize = 3;

/// What came of the wish for a copy.
pub(crate) enum Provided {
    /// It was there.
    Found,
    /// It was made.
    Made,
    /// There is none, and none can be made now.
    Not,
}

impl Folder {
    /// Copies the file, if there is room for it and a way to write.
    pub(crate) fn make(
        &self,
        lock: &FileLock<'_>,
        name: &[u8],
        source: &[u8],
        far: &Stat,
    ) -> Result<Provided> {
        let table = &self.table;
        // A time that is too far off was set by another clock.
        let left = table.resume_at().load(Ordering::Relaxed).saturating_sub(now());
        if (1..=REST.as_nanos() as u64).contains(&left) {
            return Ok(Provided::Not);
        }
        let path = self.path_of(name);
        if let Some(parent) = as_path(&path).parent()
            && let Err(error) = private_folder(parent)
        {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            return Ok(self.give_up(lock, name, errno));
        }
        let part = if broken(Fault::CopyInPlace) {
            as_path(&path).to_path_buf()
        } else {
            self.part(lock.i)
        };
        let mut wanted = Version::of(far);
        for _ in 0..TRIES {
            match self.make_room(lock, wanted.size) {
                Ok(true) => {}
                Ok(false) => return Ok(Provided::Not),
                Err(errno) => return Ok(self.give_up(lock, name, errno)),
            }
            let began = Instant::now();
            match copy(as_path(source), &part, wanted, self.options.hashed) {
                Ok(copied) => {
                    if let Err(errno) = self.publish(lock, &part, name, copied) {
                        return Ok(self.give_up(lock, name, errno));
                    }
                    let counters = table.counters();
                    counters.add(Count::Fills, 1);
                    counters.add(Count::Bytes, copied.version.size);
                    counters.add(Count::LoadNanos, began.elapsed().as_nanos() as u64);
                    return Ok(Provided::Made);
                }
                Err(Trouble::Changed) => {
                    table.unreserve(lock);
                    match stat_file(as_path(source)) {
                        Ok(far) => wanted = Version::of(&far),
                        Err(errno) => return Err(self.lose(lock, source, errno)),
                    }
                }
                Err(Trouble::Interrupted) => {
                    let _gone = rustix::fs::unlink(&part);
                    table.unreserve(lock);
                    return Err(Error::interrupted());
                }
                Err(Trouble::Source(errno)) => return Err(self.lose(lock, source, errno)),
                // Somebody removed the folder.
                Err(Trouble::Copy(Errno::NOENT)) if private_folder(&self.parts).is_ok() => {
                    table.unreserve(lock);
                }
                Err(Trouble::Copy(errno)) => return Ok(self.give_up(lock, name, errno)),
            }
        }
        let _gone = rustix::fs::unlink(&part);
        table.counters().add(Count::Dropped, 1);
        Ok(Provided::Not) // it is being written all the time
    }

    /// Gives the whole copy its name. It is noted before that: who dies in between leaves a note of
    /// a file that is not there, and not a file that nobody knows.
    fn publish(
        &self,
        lock: &FileLock<'_>,
        part: &Path,
        name: &[u8],
        copied: Content,
    ) -> rustix::io::Result<()> {
        let entry = self.table.entry(lock.i);
        let before = (entry.flags() & OWNED != 0).then(|| entry.content());
        self.note(lock, name, copied)?;
        self.table.own(lock, copied);
        if let Err(errno) = rustix::fs::rename(part, as_path(&self.path_of(name))) {
            match before {
                Some(before) => {
                    self.table.own(lock, before);
                    let _lost = self.note(lock, name, before);
                }
                None => self.forget(lock, name),
            }
            return Err(errno);
        }
        entry.touch(now());
        entry.raise(CHECKED);
        Ok(())
    }

    /// After the source could not be read.
    pub(crate) fn lose(&self, lock: &FileLock<'_>, source: &[u8], errno: Errno) -> Error {
        let _gone = rustix::fs::unlink(self.part(lock.i));
        self.table.unreserve(lock);
        self.table.counters().add(Count::Dropped, 1);
        source_error(source, errno)
    }

    /// After a write failed: nothing more is written for a while, unless it was this file's fault,
    /// and people are told once.
    fn give_up(&self, lock: &FileLock<'_>, name: &[u8], errno: Errno) -> Provided {
        let _gone = rustix::fs::unlink(self.part(lock.i));
        self.table.unreserve(lock);
        self.table.counters().add(Count::Dropped, 1);
        if is_about_one_file(errno) {
            self.tell(Topic::Odd, || {
                let path = lossy(&self.path_of(name));
                format!("{path} cannot be made: {errno}; its source is used instead")
            });
            return Provided::Not;
        }
        self.table.resume_at().store(now() + REST.as_nanos() as u64, Ordering::Relaxed);
        let (what, remedy) = if is_lack_of_room(errno) {
            (Topic::Full, "free some space or set limit=")
        } else {
            (Topic::Unwritable, "make it writable or use another cache folder")
        };
        self.tell(what, || {
            format!(
                "{} takes no more files ({errno}); what is there is used, the rest is read from the \
                 source, and writing is tried again every {} s: {remedy}",
                self.path.display(),
                REST.as_secs()
            )
        });
        Provided::Not
    }
}

/// What reading the file itself would have said, with the number of the error for Python.
pub(crate) fn source_error(path: &[u8], errno: Errno) -> Error {
    Error::new(Kind::Errno(errno.raw_os_error()), lossy(path))
}
