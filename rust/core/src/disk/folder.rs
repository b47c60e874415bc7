//! The folder of a disk store: whose it is, what it is for, the names in it.
//!
//! ```text
//!   <folder>/store              what it is for: the header below
//!   <folder>/lock               who uses it (members.rs)
//!   <folder>/schemas            what records are made of (schemas.rs)
//!   <folder>/003-0000000a.dat   the records of region 3 in its generation 10
//!   <folder>/003-0000000a.log   which they are (log.rs)
//! ```
//!
//! A file is never written to again once its region has another generation: it is cut to nothing and removed.
//! Who has it open finds less than a record there, which is a miss.
//!
//! The header, all numbers little-endian:
//!
//! ```text
//!   0   8   magic "stocdisk"       8   4   format number     12  4   flags: bit 0 keyed
//!   16  16  random number          32  16  fingerprint of the dataset
//!   48  8   samples of the dataset, 0 if keyed               56  8   bytes of a region
//!   64  8   XXH3 of bytes 0 to 64
//! ```

use super::log::LONGEST_FILE;
use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active as broken, reached};
use crate::sys::pages::PAGE;
use crate::sys::private_file::{
    check_folder, check_private, open_private, private_folder, read_header, write_all,
};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// The number of this format. A store of another is left as it is.
pub(super) const FORMAT: u32 = 1;
const MAGIC: [u8; 8] = *b"stocdisk";
const HEADER: usize = 72;
const FLAG_KEYED: u32 = 1;
/// So many regions at the most: each is a descriptor of every process that reads.
pub(super) const MOST_FILES: u64 = 64;

/// What a store is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Random: tells two stores apart that were in the same place.
    pub(super) id: u128,
    pub(super) fingerprint: u128,
    /// 0 if samples are known by keys: then their number may change.
    pub(super) samples: u64,
    pub(super) keyed: bool,
    pub(super) region_bytes: u64,
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(8, &FORMAT.to_le_bytes());
        put(12, &(if self.keyed { FLAG_KEYED } else { 0 }).to_le_bytes());
        put(16, &self.id.to_le_bytes());
        put(32, &self.fingerprint.to_le_bytes());
        put(48, &self.samples.to_le_bytes());
        put(56, &self.region_bytes.to_le_bytes());
        let sum = xxh3_64(&bytes[..HEADER - 8]);
        bytes[HEADER - 8..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Believes nothing.
    fn decode(bytes: &[u8; HEADER]) -> std::result::Result<Self, Unreadable> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let wide = |at: usize| u128::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[..8] != MAGIC {
            let what = "its file \"store\" does not begin like one of stocache's";
            return Err(Unreadable::Damaged(what.into()));
        }
        let (format, flags) = (word(8) as u32, (word(8) >> 32) as u32);
        if format != FORMAT {
            let what = format!("it has format {format}, this stocache reads format {FORMAT}");
            return Err(Unreadable::Other(what));
        }
        if word(64) != xxh3_64(&bytes[..64]) || flags & !FLAG_KEYED != 0 {
            return Err(Unreadable::Damaged("its file \"store\" is damaged".into()));
        }
        let region_bytes = word(56);
        if !(1..=LONGEST_FILE).contains(&region_bytes) || !region_bytes.is_multiple_of(PAGE as u64)
        {
            let what = format!("its files are of {region_bytes} bytes, which cannot be");
            return Err(Unreadable::Damaged(what));
        }
        Ok(Self {
            id: wide(16),
            fingerprint: wide(32),
            samples: word(48),
            keyed: flags & FLAG_KEYED != 0,
            region_bytes,
        })
    }
}

/// Why a header cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// It was one of this format, and is none any more.
    Damaged(String),
    /// Of another format or user, or the disk does not let us see it.
    Other(String),
}

impl From<Unreadable> for String {
    fn from(why: Unreadable) -> Self {
        let (Unreadable::Damaged(what) | Unreadable::Other(what)) = why;
        what
    }
}

/// A region, and which of its generations.
pub(super) type Generation = (u64, u32);

/// A folder that is ours.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    pub(super) header: Header,
    /// Device and inode: a copy has the same header.
    pub(super) place: (u64, u64),
}

impl Folder {
    /// The store in this folder, made as `wanted` says if there is none. It is not looked at yet whether it
    /// is for the same samples.
    pub(super) fn open(path: &Path, wanted: &Header) -> Result<Self> {
        let refuse = |why: String| {
            Error::new(
                Kind::Refused,
                format!(
                    "{} cannot be used as a disk level: {why}; remove it (`stocache rm {}`) or use another disk_path",
                    path.display(),
                    path.display()
                ),
            )
        };
        private_folder(path).map_err(|error| {
            let remedy = "disk_path must be a folder that this user may write to";
            Error::new(Kind::System, format!("cannot make {}: {error}; {remedy}", path.display()))
        })?;
        check_folder(path).map_err(refuse)?;
        if let Some(what) = network(path) {
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "disk_path {} is on {what}, a network file system, which is no faster than the source and \
                     has no locks that can be relied on; use a disk of this node",
                    path.display()
                ),
            ));
        }
        let header = Self::read(path).map_err(|why| refuse(why.into()))?;
        let header = match header {
            Some(header) => header,
            None => {
                Self::write(path, wanted).map_err(|errno| {
                    Error::new(
                        if errno == Errno::NOSPC { Kind::Space } else { Kind::System },
                        format!("cannot write to {}: {errno}; free some of the disk, or use another disk_path",
                            path.display()),
                    )
                })?;
                // Whoever was faster.
                Self::read(path)
                    .map_err(String::from)
                    .and_then(|header| header.ok_or_else(|| "it vanished".to_string()))
                    .map_err(refuse)?
            }
        };
        Self::with(path, header).map_err(|errno| refuse(errno.to_string()))
    }

    /// The one that is there, with what its header says.
    pub(super) fn with(path: &Path, header: Header) -> rustix::io::Result<Self> {
        let stat = rustix::fs::stat(path)?;
        Ok(Self { path: path.to_path_buf(), header, place: (stat.st_dev, stat.st_ino) })
    }

    /// Why the store in this folder cannot be what `wanted` says; `None` if it can. Its regions keep the
    /// size that they have.
    pub(super) fn differs(&self, wanted: &Header) -> Option<String> {
        let ours = &self.header;
        if ours.fingerprint != wanted.fingerprint {
            return Some("it was made for other data".into());
        }
        if ours.keyed != wanted.keyed {
            let word = if ours.keyed { "with" } else { "without" };
            return Some(format!("it was made {word} key="));
        }
        (ours.samples != wanted.samples)
            .then(|| format!("it is for {} samples, not {}", ours.samples, wanted.samples))
    }

    /// Whether it is not another store by now, which somebody made in the place of this one.
    pub(super) fn is_ours(&self) -> bool {
        let is_another = |header: Header| header.id != self.header.id;
        !matches!(Self::read(&self.path), Ok(Some(header)) if is_another(header))
            || broken(Fault::TrustPlace)
    }

    /// What the header in a folder says; `None` if there is none.
    pub(super) fn read(path: &Path) -> std::result::Result<Option<Header>, Unreadable> {
        // A pipe that others put there is not waited for.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match rustix::fs::openat(CWD, path.join("store"), flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => {
                let what = format!("cannot open its file \"store\" ({errno})");
                return Err(Unreadable::Other(what));
            }
        };
        let stat =
            rustix::fs::fstat(&file).map_err(|errno| Unreadable::Other(errno.to_string()))?;
        check_private(&stat).map_err(Unreadable::Other)?;
        if stat.st_size < HEADER as i64 {
            let what = format!("its file \"store\" has only {} bytes", stat.st_size);
            return Err(Unreadable::Damaged(what));
        }
        let (bytes, _) = read_header::<HEADER>(file.as_fd()).map_err(Unreadable::Other)?;
        Header::decode(&bytes).map(Some)
    }

    /// Puts a header there in one step, unless there is one.
    fn write(path: &Path, header: &Header) -> rustix::io::Result<()> {
        let made = path.join(format!("store.{:016x}", header.id as u64));
        let file = open_private(&made, OFlags::WRONLY | OFlags::EXCL)?;
        let named = write_all(file.as_fd(), &header.encode(), 0)
            .and_then(|()| rustix::fs::fsync(&file))
            .and_then(|()| {
                reached("disk: header written");
                let to = path.join("store");
                match rustix::fs::renameat_with(CWD, &made, CWD, &to, RenameFlags::NOREPLACE) {
                    // Some file systems have only links for this.
                    Err(Errno::INVAL) => rustix::fs::link(&made, &to),
                    done => done,
                }
            });
        let _moved_already = rustix::fs::unlink(&made);
        match named {
            Err(Errno::EXIST) => Ok(()), // somebody was faster
            done => done,
        }
    }

    pub(super) fn data(&self, region: u64, generation: u32) -> PathBuf {
        self.path.join(format!("{region:03}-{generation:08x}.dat"))
    }

    pub(super) fn log(&self, region: u64, generation: u32) -> PathBuf {
        self.path.join(format!("{region:03}-{generation:08x}.log"))
    }

    /// The files of regions that are there: region, generation, whether it is the log.
    pub(super) fn files(&self) -> Vec<(u64, u32, bool)> {
        let Ok(entries) = std::fs::read_dir(&self.path) else { return Vec::new() };
        let named = |entry: std::io::Result<std::fs::DirEntry>| {
            region_of(&entry.ok()?.file_name().into_string().ok()?)
        };
        entries.filter_map(named).collect()
    }

    /// Of each of so many regions, the newest generation that has both files, the oldest first; and all others
    /// that are there.
    pub(super) fn generations(&self, regions: u64) -> (Vec<Generation>, Vec<Generation>) {
        let mut there: BTreeMap<(u64, u32), u8> = BTreeMap::new();
        for (region, generation, log) in self.files() {
            *there.entry((region, generation)).or_default() |= if log { 1 } else { 2 };
        }
        let mut newest: BTreeMap<u64, u32> = BTreeMap::new();
        for (&(region, generation), &files) in &there {
            if files == 3 && region < regions {
                newest.insert(region, generation); // ascending: the last is the newest
            }
        }
        let counts = |of: &(u64, u32)| newest.get(&of.0) == Some(&of.1);
        let (mut newest, rest): (Vec<_>, Vec<_>) = there.keys().copied().partition(counts);
        newest.sort_by_cached_key(|&(region, generation)| {
            std::fs::metadata(self.log(region, generation)).and_then(|log| log.modified()).ok()
        });
        (newest, rest)
    }

    pub(super) fn open_log(&self, region: u64, generation: u32) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        rustix::fs::openat(CWD, self.log(region, generation), flags, Mode::empty())
    }

    /// Removes the files of a region in that generation, and their room: also from who has one open, which
    /// may be for long. What it reads of it belongs to nobody any more.
    pub(super) fn remove(&self, region: u64, generation: u32) {
        let (log, data) = (self.log(region, generation), self.data(region, generation));
        let _gone_already = rustix::fs::unlink(&log);
        let flags = OFlags::WRONLY | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        if !broken(Fault::RemoveUncut) {
            let _gone_already = rustix::fs::openat(CWD, &data, flags, Mode::empty());
        }
        reached("disk: file cut");
        let _gone_already = rustix::fs::unlink(&data);
    }
}

/// Whether a file of that name in a folder is stocache's.
pub(super) fn is_ours(name: &str) -> bool {
    matches!(name, "store" | "lock" | "schemas" | "about" | "temporary")
        || is_half_made(name)
        || region_of(name).is_some()
}

/// What is renamed when it is whole.
pub(super) fn is_half_made(name: &str) -> bool {
    let rest = |before: &str| name.strip_prefix(before).filter(|rest| !rest.is_empty());
    rest("store.").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
        || rest("about.").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Removes a file of that name. Files of regions are cut first: who has one open would keep its room.
pub(super) fn unlink(folder: &Path, name: &str) -> std::io::Result<()> {
    let path = folder.join(name);
    if region_of(name).is_some() {
        let flags = OFlags::WRONLY | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let _gone_already = rustix::fs::openat(CWD, &path, flags, Mode::empty());
    }
    match rustix::fs::unlink(&path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// What the name of a region's file says: region, generation, whether it is the log.
pub(super) fn region_of(name: &str) -> Option<(u64, u32, bool)> {
    let (stem, ending) = name.split_once('.')?;
    let (region, generation) = stem.split_once('-')?;
    let log = match ending {
        "dat" => false,
        "log" => true,
        _ => return None,
    };
    let right = region.len() == 3 && generation.len() == 8;
    right.then_some(())?;
    let generation = u32::from_str_radix(generation, 16).ok().filter(|&g| g > 0)?;
    Some((region.parse().ok()?, generation, log))
}

/// The name of the network file system that this is on; `None` if it is on none that is known.
fn network(path: &Path) -> Option<&'static str> {
    let kind = rustix::fs::statfs(path).ok()?.f_type as u64 as u32;
    Some(match kind {
        0x6969 => "NFS",
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => "SMB",
        0x0bd0_0bd0 => "Lustre",
        0x4750_4653 => "GPFS",
        0x1983_0326 => "BeeGFS",
        0x00c3_6400 => "Ceph",
        0x5346_414f | 0x6b41_4653 => "AFS",
        0x0102_1997 => "9P",
        _ => return None,
    })
}

/// The size of regions for a budget: at most 64 of them, of 64 MiB at least; of a small budget four, so
/// that a part of it can go. None if that is too small for any.
pub(super) fn region_bytes(budget: u64) -> Result<u64> {
    const LEAST_BYTES: u64 = 64 << 20;
    const FEWEST: u64 = 4;
    let page = PAGE as u64;
    let least = 2 * page; // one of records and one of the log
    let regions = (budget / LEAST_BYTES).clamp(FEWEST, MOST_FILES);
    let bytes = budget / regions / page * page;
    if bytes < least {
        return Err(Error::new(
            Kind::Argument,
            format!(
                "disk is {}, which is too small; give it {} or more",
                Bytes(budget),
                Bytes(FEWEST * least)
            ),
        ));
    }
    Ok(bytes.min(LONGEST_FILE))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            id: 5,
            fingerprint: 3 << 64 | 2,
            samples: 1000,
            keyed: false,
            region_bytes: 1 << 26,
        }
    }

    /// Golden bytes: whoever changes the format must notice, and raise FORMAT.
    #[test]
    fn header_bytes_of_this_format_are_these() {
        let bytes = header().encode();
        assert_eq!(
            &bytes[..64],
            b"stocdisk\x01\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
              \x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\xe8\x03\0\0\0\0\0\0\0\0\0\x04\0\0\0\0"
        );
        assert_eq!(Header::decode(&bytes), Ok(header()));
    }

    #[test]
    fn damaged_headers_are_refused() {
        let good = header().encode();
        for bit in 0..8 * HEADER {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let why = Header::decode(&bad);
            let damaged = matches!(why, Err(Unreadable::Damaged(_)));
            assert!(
                why.is_err() && (damaged || (8..12).contains(&(bit / 8))),
                "bit {bit}: {why:?}"
            );
        }
        for region_bytes in [0, 1, 4095, 4097, !4095] {
            let impossible = Header { region_bytes, ..header() };
            assert!(Header::decode(&impossible.encode()).is_err(), "files of {region_bytes}");
        }
        let mut newer = good;
        newer[8] = 2;
        assert_eq!(
            Header::decode(&newer),
            Err(Unreadable::Other("it has format 2, this stocache reads format 1".into()))
        );
    }

    #[test]
    fn a_budget_is_divided_into_files() {
        assert_eq!(region_bytes(300 << 30).unwrap(), (300 << 30) / 64 / 4096 * 4096);
        assert_eq!(region_bytes(1 << 30).unwrap(), 64 << 20);
        assert_eq!(region_bytes(100 << 20).unwrap(), 25 << 20);
        assert_eq!(region_bytes(32 << 10).unwrap(), 8192);
        assert!(region_bytes(32_767).is_err());
    }
}
