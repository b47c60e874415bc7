//! The folder of a disk level as people see it who use none: what is in it, whether its records are whole, and
//! how it is removed. Nothing that is read is believed, and looking changes nothing.

use super::compression::{Packed, is_packed};
use super::folder::{Folder, MOST_FILES, is_half_made, is_ours, unlink};
use super::log::{self, Entry};
use super::members;
use crate::error::{Error, Kind, Result};
use crate::records::portable::{self, HEAD};
use crate::sys::direct::DirectFile;
use crate::sys::ofd::is_any_locked;
use crate::sys::pages::{PAGE, Pages};
use crate::sys::private_file::check_folder;
use rustix::fd::AsFd;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// So many bytes of records are checked in a step, about.
const STEP_BYTES: usize = 32 << 20;

/// What a folder holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspected {
    /// Whose it is.
    pub user: u32,
    /// Of the dataset.
    pub fingerprint: u128,
    /// Of the dataset; 0 if samples are known by keys.
    pub samples: u64,
    /// Whether they are.
    pub keyed: bool,
    /// Records there are, as the logs say.
    pub records: u64,
    /// Bytes that all files take.
    pub bytes: u64,
    /// A process has it open.
    pub in_use: bool,
    /// When it was used last, in seconds since 1970; 0 if that is not known.
    pub used_at: i64,
    /// Why it could not be read; empty if it could.
    pub trouble: String,
}

/// What is in a folder; `None` if it is not that of a disk level.
pub fn inspect(path: &Path) -> Option<Inspected> {
    let names = Names::of(path)?;
    let mut found = Inspected {
        user: std::fs::symlink_metadata(path).map_or(0, |folder| folder.uid()),
        in_use: is_in_use(path),
        bytes: names.bytes,
        ..Inspected::default()
    };
    if let Ok(lock) = std::fs::symlink_metadata(path.join("lock")) {
        found.used_at = lock.mtime();
    }
    match open(path) {
        Ok(folder) => {
            found.fingerprint = folder.header.fingerprint;
            found.samples = folder.header.samples;
            found.keyed = folder.header.keyed;
            found.records = Records::of(&folder).count();
        }
        Err(why) => found.trouble = why,
    }
    Some(found)
}

/// Removes a disk level. Who uses it, if `force` allows for that, goes on with the files that it has open.
pub fn remove(path: &Path, force: bool) -> Result<()> {
    let shown = path.display();
    let refuse = |why: String| Error::new(Kind::Refused, format!("{shown} is not removed: {why}"));
    let Some(names) = Names::of(path) else {
        return Err(refuse("it is not the folder of a disk level".into()));
    };
    if let Some(other) = names.others.first() {
        return Err(refuse(format!(
            "it holds {other:?}, which is not stocache's; remove that first"
        )));
    }
    check_folder(path).map_err(refuse)?;
    let removed = if force {
        remove_ours(path)
    } else {
        members::alone(path, || remove_ours(path)).ok_or_else(|| {
            let message = format!(
                "the disk level in {shown} is in use; end its processes first, or use --force: they go on with the \
                 files that they have open"
            );
            Error::new(Kind::State, message)
        })?
    };
    removed.map_err(|errno| {
        Error::new(Kind::System, format!("cannot remove {shown}: {errno}; remove it by hand"))
    })
}

/// Removes all files of a disk level, and the folder if nothing else is in it.
fn remove_ours(path: &Path) -> std::io::Result<()> {
    let names = Names::of(path).map_or(Vec::new(), |names| names.ours);
    // The header after them: what is left of it can be removed in the same way. By the lock those who come
    // see that it was removed.
    let last = ["store", "temporary", "lock"];
    let others = names.iter().map(String::as_str).filter(|name| !last.contains(name));
    others.chain(last).try_for_each(|name| unlink(path, name))?;
    std::fs::remove_dir(path)
}

/// Removes what killed processes left in a folder that nobody uses, and all of it if it was never more than
/// that; the names that went.
pub fn tidy(path: &Path) -> Result<Vec<String>> {
    if Names::of(path).is_none() || is_in_use(path) || check_folder(path).is_err() {
        return Ok(Vec::new());
    }
    members::alone(path, || tidy_alone(path)).unwrap_or_else(|| Ok(Vec::new()))
}

/// The same, when nobody uses it or comes to.
fn tidy_alone(path: &Path) -> Result<Vec<String>> {
    let Some(names) = Names::of(path) else { return Ok(Vec::new()) };
    let mut gone = Vec::new();
    match open(path) {
        Ok(folder) => {
            let (_, rest) = folder.generations(MOST_FILES);
            for (region, generation) in rest {
                folder.remove(region, generation);
                gone.push(format!("{region:03}-{generation:08x}"));
            }
            for name in names.ours.iter().filter(|name| is_half_made(name)) {
                if unlink(path, name).is_ok() {
                    gone.push(name.clone());
                }
            }
        }
        // Whoever made it died before it was anything.
        Err(_) if !names.ours.iter().any(|name| name == "store") && names.others.is_empty() => {
            remove_ours(path).map_err(|error| {
                let shown = path.display();
                Error::new(
                    Kind::System,
                    format!("cannot remove {shown}: {error}; remove it by hand"),
                )
            })?;
            gone.push(String::new());
        }
        Err(_) => {}
    }
    Ok(gone)
}

/// The records of a disk level, to be read one after the other.
pub struct Check {
    folder: Folder,
    left: Vec<(u64, u32, Vec<Entry>)>,
    records: u64,
    damaged: u64,
    pages: Option<Pages>,
    unpacked: Vec<u8>,
}

/// What a step has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Records that were looked at; none: all are.
    pub records: u64,
    /// Those of them that are not what was written.
    pub damaged: u64,
}

impl Check {
    /// Begins with a disk level; an error if it cannot be read.
    pub fn begin(path: &Path) -> Result<Self> {
        let folder = open(path).map_err(|why| {
            let message = format!("{} cannot be read as a disk level: {why}", path.display());
            Error::new(Kind::Refused, message)
        })?;
        let found = Records::of(&folder);
        let (records, damaged) = (found.count() + found.damaged, found.damaged);
        let mut left: HashMap<(u64, u32), Vec<Entry>> = HashMap::new();
        for (region, generation, entry) in found.newest.into_values() {
            left.entry((region, generation)).or_default().push(entry);
        }
        let mut left: Vec<_> = left.into_iter().map(|((r, g), all)| (r, g, all)).collect();
        // Taken from the end.
        left.sort_by_key(|&(region, ..)| std::cmp::Reverse(region));
        left.iter_mut().for_each(|(.., all)| all.sort_by_key(|entry| std::cmp::Reverse(entry.at)));
        let (pages, unpacked) = (None, Vec::new());
        Ok(Self { folder, left, records, damaged, pages, unpacked })
    }

    /// How many there are, also those of which a log tells what cannot be.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Looks at some more.
    pub fn step(&mut self) -> Result<Checked> {
        let done = self.some_more();
        done.map_err(|errno| {
            let path = self.folder.path.display();
            Error::new(Kind::System, format!("cannot read from {path}: {errno}"))
        })
    }

    fn some_more(&mut self) -> rustix::io::Result<Checked> {
        // Of these the log alone tells.
        let damaged = std::mem::take(&mut self.damaged);
        let mut checked = Checked { records: damaged, damaged };
        let mut bytes = 0;
        while bytes < STEP_BYTES {
            let Some((region, generation, mut entries)) = self.left.pop() else { break };
            let file = DirectFile::open(&self.folder.data(region, generation), false);
            let file = match file {
                Err(Errno::NOENT) => None, // it went meanwhile
                file => Some(file?),
            };
            while bytes < STEP_BYTES {
                let Some(entry) = entries.pop() else { break };
                bytes += entry.len as usize + PAGE;
                let Some(file) = &file else { continue };
                checked.records += 1;
                checked.damaged += u64::from(!self.is_whole(file, &entry)?);
            }
            if !entries.is_empty() {
                self.left.push((region, generation, entries));
            }
        }
        Ok(checked)
    }

    fn is_whole(&mut self, file: &DirectFile, entry: &Entry) -> rustix::io::Result<bool> {
        let start = (entry.at % PAGE as u64) as usize;
        let (len, room) = (entry.len as usize, start + entry.len as usize);
        if self.pages.as_ref().is_none_or(|pages| pages.len() < room) {
            self.pages = Pages::new(room);
        }
        let Some(pages) = &mut self.pages else { return Err(Errno::NOMEM) };
        let room = room.next_multiple_of(PAGE);
        let got = file.read(&mut pages[..room], entry.at - start as u64)?;
        if got < start + len || len < HEAD {
            return Ok(false);
        }
        let read = &pages[start..start + len];
        // The other half of a key is nowhere but in what the record is sealed with.
        let (sealed, ours) = (sealed_with(read), self.folder.header.fingerprint);
        let right =
            if self.folder.header.keyed { sealed >> 64 == ours >> 64 } else { sealed == ours };
        if !right || !is_packed(read) {
            return Ok(right && portable::open(read, entry.key, sealed).is_ok());
        }
        let Some(packed) = Packed::open(read, entry.key, sealed) else { return Ok(false) };
        let Some(len) = packed.len() else { return Ok(false) };
        self.unpacked.clear();
        if self.unpacked.try_reserve_exact(len).is_err() {
            return Ok(false);
        }
        self.unpacked.resize(len, 0);
        Ok(packed.unpack(&mut self.unpacked))
    }
}

/// The fingerprint that a head names; it is as long as one.
fn sealed_with(read: &[u8]) -> u128 {
    u128::from_le_bytes(std::array::from_fn(|i| read[32 + i]))
}

/// What the logs of a folder say.
struct Records {
    /// By key: where the record is. A sample may have been written twice.
    newest: HashMap<u64, (u64, u32, Entry)>,
    /// Entries that are none, or of what cannot be.
    damaged: u64,
}

impl Records {
    fn of(folder: &Folder) -> Self {
        let mut found = Self { newest: HashMap::new(), damaged: 0 };
        let samples = (!folder.header.keyed).then_some(folder.header.samples);
        for (region, generation) in folder.generations(MOST_FILES).0 {
            let seed = log::seed(folder.header.fingerprint, region, generation);
            let length =
                std::fs::metadata(folder.data(region, generation)).map_or(0, |data| data.len());
            let mut cut = 0;
            let read = folder.open_log(region, generation).and_then(|file| {
                log::read(file.as_fd(), seed, folder.header.region_bytes, |entry| {
                    let is_there = entry.at.saturating_add(entry.len) <= length;
                    if is_there && samples.is_none_or(|samples| entry.key < samples) {
                        found.newest.insert(entry.key, (region, generation, entry));
                    } else {
                        cut += 1;
                    }
                })
            });
            found.damaged += cut
                + match read {
                    Ok(log) => log.damaged,
                    Err(Errno::NOENT) => 0, // it went meanwhile
                    Err(_) => 1,            // whatever it would have told
                };
        }
        found
    }

    fn count(&self) -> u64 {
        self.newest.len() as u64
    }
}

/// A store that is there, or why it cannot be read.
fn open(path: &Path) -> std::result::Result<Folder, String> {
    check_folder(path)?;
    let header = Folder::read(path)?.ok_or("it has no file \"store\"")?;
    Folder::with(path, header).map_err(|errno| errno.to_string())
}

/// Whether a process has it open. What cannot be asked is taken for used.
fn is_in_use(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    match rustix::fs::openat(CWD, path.join("lock"), flags, Mode::empty()) {
        Ok(file) => is_any_locked(&file),
        Err(errno) => errno != Errno::NOENT,
    }
}

/// The names in a folder that can only be that of a disk level.
struct Names {
    ours: Vec<String>,
    others: Vec<String>,
    bytes: u64,
}

impl Names {
    /// `None` if it is none: a level has a header, or a lock at least.
    fn of(path: &Path) -> Option<Self> {
        let folder = std::fs::symlink_metadata(path).ok()?;
        folder.is_dir().then_some(())?;
        let mut names = Self { ours: Vec::new(), others: Vec::new(), bytes: 0 };
        for entry in std::fs::read_dir(path).ok()?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Ok(stat) = entry.metadata() else { continue };
            if stat.is_file() && is_ours(&name) {
                names.bytes += stat.blocks() * 512;
                names.ours.push(name);
            } else {
                names.others.push(name);
            }
        }
        let ours = |wanted: &str| names.ours.iter().any(|name| name == wanted);
        (ours("store") || ours("lock") || ours("temporary")).then_some(names)
    }
}
