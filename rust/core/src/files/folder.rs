//! The folder on the near disk: opened, remembered, swept, and what may be removed from it.

use crate::fault::{Fault, active as broken};
use crate::file::open_private;
use crate::files::FileOptions;
use crate::journal::{self, Journal};
use crate::layout::{Plan, Table};
use crate::segment::{Backing, Request};
use crate::shelf::Shelf;
use crate::table::{EVICTING, Entry, FileTable, Locked, OWNED};
use rustix::fs::{CWD, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// Who waits for a copy gives up once it has not grown for so long.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long to wait for who tells the table what earlier jobs left.
const RECALL_PATIENCE: Duration = Duration::from_secs(2);
/// The reservations of the dead are looked for so often, unless there is nothing else left.
const RECLAIM_EVERY: Duration = Duration::from_secs(1);
/// How many files are looked out for removal at a time: finding them takes a walk over the log.
const VICTIMS: usize = 4096;

/// Files with the time of their last use.
pub(crate) type Victims = Vec<(u64, Vec<u8>)>;

/// What works only with a folder that we can use.
pub(crate) struct Near {
    pub(crate) table: Arc<FileTable>,
    pub(crate) journal: Journal,
    pub(crate) domain: Domain,
    /// `<folder>/files/`, as it stands before a name.
    pub(crate) files: Vec<u8>,
    pub(crate) parts: PathBuf,
    /// Looked out for removal, the oldest last.
    pub(crate) victims: Shelf<Victims>,
}

impl Near {
    pub(crate) fn open(folder: &Path, options: &FileOptions) -> std::result::Result<Self, String> {
        let refuse = |why: String| {
            format!(
                "{} cannot be used as a cache: {why}; files are read from {} instead",
                folder.display(),
                options.source.display()
            )
        };
        let say = |error: std::io::Error| refuse(error.to_string());
        let code = |errno: Errno| refuse(std::io::Error::from(errno).to_string());
        std::fs::create_dir_all(&options.cache).map_err(say)?;
        for part in [folder.to_path_buf(), folder.join("files"), folder.join("parts")] {
            private_folder(&part).map_err(say)?;
            check_folder(&part).map_err(refuse)?;
        }
        let stat = rustix::fs::stat(folder).map_err(code)?;
        let place = [stat.st_dev.to_le_bytes(), stat.st_ino.to_le_bytes()].concat();
        let journal = Journal { path: folder.join("index") };
        let files = with_slash(folder.join("files").into_os_string().into_encoded_bytes());
        // What earlier jobs left must have room in the table too.
        let left = journal.at_most().unwrap_or_else(|| journal::walk(as_path(&files)).len() as u64);
        let table =
            Table::plan(options.files.max(left)).map_err(|error| refuse(error.to_string()))?;
        let request = Request {
            name: format!("files-{:016x}", xxh3_64(&place)),
            plan: Plan::Files(table),
            fingerprint: 0,
            keep: false,
            backing: Backing::Auto,
            private: false,
            join: None,
        };
        let (table, _) = FileTable::open(&request).map_err(|error| refuse(error.to_string()))?;
        let domain =
            Domain::join(&folder.join("lock"), table.segment().header().instance).map_err(code)?;
        let parts = folder.join("parts");
        let near = Self { table, journal, domain, files, parts, victims: Shelf::new() };
        near.inform(options.limit.is_some());
        Ok(near)
    }

    /// Sees to it that the table knows what earlier jobs left. If whoever does so dies, another one
    /// begins again; if it is stopped, what is there is taken for somebody else's until it goes on.
    fn inform(&self, by_age: bool) {
        let began = Instant::now();
        while !self.table.is_recalled() && began.elapsed() < RECALL_PATIENCE {
            match self.table.lock_recall() {
                Some(_lock) if self.table.is_recalled() => {}
                Some(_lock) => {
                    self.recall(by_age);
                    self.table.set_recalled();
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Takes note of what earlier jobs left.
    fn recall(&self, by_age: bool) {
        self.journal.displace();
        let mut contents = self.journal.read();
        if contents.damaged > 0 || contents == journal::Contents::default() {
            // Damaged or lost: what is there tells.
            let mut found = journal::walk(as_path(&self.files));
            found.retain(|name, _| !contents.files.contains_key(name));
            let _lost = self.journal.keep_all(&found);
            contents.files.extend(found);
        }
        if contents.is_untidy() {
            let _busy = self.journal.tidy();
        }
        if self.domain.is_alone() {
            // Those of living processes have this table's number.
            let ours = format!("{:x}-", self.domain.id);
            for part in std::fs::read_dir(&self.parts).into_iter().flatten().flatten() {
                if !part.file_name().as_bytes().starts_with(ours.as_bytes()) {
                    let _gone = std::fs::remove_file(part.path());
                }
            }
        }
        for (name, kept) in &contents.files {
            let Some(i) = self.table.find_or_add(key(name)) else { continue };
            let Some(lock) = self.table.lock(i) else { continue };
            let entry = self.table.entry(i);
            if entry.flags() & OWNED != 0 {
                continue;
            }
            if by_age {
                match rustix::fs::lstat(as_path(&self.path(name))) {
                    // The kernel notes at least the day of the last use.
                    Ok(stat) if can_be_ours(&stat) => {
                        entry.touch((stat.st_atime as u64).wrapping_mul(1_000_000_000));
                    }
                    _ => continue, // gone, or another took its place; no record says so
                }
            }
            self.table.own(&lock, kept.version, kept.hash);
        }
    }

    pub(crate) fn path(&self, name: &[u8]) -> Vec<u8> {
        [&self.files[..], name].concat()
    }

    /// Where file `i` is copied before it gets its name.
    pub(crate) fn part(&self, i: usize) -> PathBuf {
        self.parts.join(format!("{:x}-{i}", self.domain.id))
    }

    /// The names that the log has, of files that were not removed.
    pub(crate) fn names(&self) -> Vec<Vec<u8>> {
        self.journal.read().files.into_keys().collect()
    }

    /// Waits until nobody has file `i` locked. False if its copy does not get on: then whoever makes
    /// it may be stopped, and nothing is to be waited for.
    pub(crate) fn wait(&self, i: usize) -> bool {
        let part = self.part(i);
        let size = || rustix::fs::stat(&part).map_or(0, |stat| stat.st_size as u64);
        let (mut seen, mut since) = (size(), Instant::now());
        let mut nap = Duration::from_micros(100);
        while self.table.is_locked(i) {
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(5));
            // The lock of the dead is there for the taking.
            if nap == Duration::from_millis(5) && self.table.lock(i).is_some() {
                return true;
            }
            let grown = size();
            if grown != seen {
                (seen, since) = (grown, Instant::now());
            } else if since.elapsed() > PATIENCE {
                return false;
            }
        }
        true
    }

    /// The files that were not used for longest, the oldest last.
    pub(crate) fn look_out(&self) -> Victims {
        let contents = self.journal.read();
        if contents.is_untidy() {
            let _busy = self.journal.tidy();
        }
        let mut found = self.candidates(contents.files.into_keys());
        if found.is_empty() && self.table.entries().any(|entry| entry.flags() & OWNED != 0) {
            // The log was lost under way; what is ours among what is there has to be noted again.
            let mut lost = journal::walk(as_path(&self.files));
            lost.retain(|name, _| self.owned(name).is_some());
            let _lost = self.journal.keep_all(&lost);
            found = self.candidates(lost.into_keys());
        }
        found.sort_unstable_by(|a, b| b.cmp(a));
        let surplus = found.len().saturating_sub(VICTIMS);
        found.drain(..surplus);
        found
    }

    fn owned(&self, name: &[u8]) -> Option<Entry<'_>> {
        let entry = self.table.entry(self.table.find(key(name))?);
        (entry.flags() & OWNED != 0).then_some(entry)
    }

    fn candidates(&self, names: impl Iterator<Item = Vec<u8>>) -> Victims {
        names.filter_map(|name| Some((self.owned(&name)?.used(), name))).collect()
    }

    /// Gives back what the dead had set aside; true if that was something. Looking takes a walk over
    /// the table, so it is done `now` or once in a while.
    pub(crate) fn reclaim(&self, now: bool) -> bool {
        let (at, time) = (self.table.reclaimed_at(), crate::files::now());
        let since = time.abs_diff(at.load(Ordering::Relaxed));
        if !now && since < RECLAIM_EVERY.as_nanos() as u64 {
            return false;
        }
        at.store(time, Ordering::Relaxed);
        let mut any = false;
        for i in (0..self.table.len()).filter(|&i| self.table.is_reserved(i)) {
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
        let path = self.path(name);
        if rustix::fs::lstat(as_path(&path)).is_ok_and(|stat| !can_be_ours(&stat)) {
            self.forget(&lock, name); // another took its place
            return Ok(false);
        }
        entry.raise(EVICTING);
        let in_use = self.table.is_given_out(i) || !self.domain.is_alone();
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

    pub(crate) fn forget(&self, lock: &Locked<'_>, name: &[u8]) {
        self.table.disown(lock);
        let _lost = self.journal.remove(name); // a record of what is gone is no harm
    }
}

/// All processes that share one table. Two tables can be for one folder, if /dev/shm is not shared
/// while the disk is (containers): then neither knows what the other's processes are about to open.
///
/// Byte `id` of the file `lock` is locked, shared, by every process with the table of that number.
pub(crate) struct Domain {
    pub(crate) id: u64,
    file: rustix::fd::OwnedFd,
}

impl Domain {
    pub(crate) fn join(path: &Path, instance: u128) -> rustix::io::Result<Self> {
        // Not for writing: that would keep the disk from being made read-only.
        let file = open_private(path, OFlags::RDONLY).or_else(|errno| {
            // Where nothing can be written, what is there can be read.
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|_| errno)
        })?;
        let id = instance as u64 >> 2; // a place in a file is at most 2^63
        crate::lease::share_byte(&file, id)?;
        Ok(Self { id, file })
    }

    /// Whether no process with another table lives.
    pub(crate) fn is_alone(&self) -> bool {
        !crate::lease::is_locked_elsewhere(&self.file, self.id)
    }
}

/// Whether a file in the place of a copy of ours can be that copy: one that only its owner may reach.
/// What people put there as a rule is not.
pub(crate) fn can_be_ours(stat: &Stat) -> bool {
    crate::file::check_private(stat).is_ok()
}

pub(crate) fn key(name: &[u8]) -> u64 {
    xxh3_64(name).max(1)
}

pub(crate) fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

pub(crate) fn with_slash(mut path: Vec<u8>) -> Vec<u8> {
    if path.last() != Some(&b'/') {
        path.push(b'/');
    }
    path
}

/// Makes a folder, and those above it, for this user alone, whatever the umask says.
pub(crate) fn private_folder(path: &Path) -> std::io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) if broken(Fault::NoChmod) => Ok(()),
        Ok(()) => std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) => match path.parent() {
            Some(parent) if error.kind() == std::io::ErrorKind::NotFound => {
                private_folder(parent)?;
                private_folder(path)
            }
            _ => Err(error),
        },
    }
}

/// A folder of this user that nobody else can write to.
fn check_folder(path: &Path) -> std::result::Result<(), String> {
    let stat = rustix::fs::lstat(path).map_err(|errno| errno.to_string())?;
    let uid = rustix::process::geteuid().as_raw();
    if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
        return Err(format!("{} is not a folder", path.display()));
    }
    if stat.st_uid != uid {
        return Err(format!(
            "{} belongs to user {}, we are user {uid}",
            path.display(),
            stat.st_uid
        ));
    }
    if stat.st_mode & 0o022 != 0 {
        return Err(format!("others may write to {} (chmod 700 it)", path.display()));
    }
    Ok(())
}
