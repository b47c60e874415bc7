//! The format of a segment, written down once. Only this file knows offsets.
//!
//! ```text
//!   0        header, never changed after creation (HEADER_BYTES)
//!   512      frozen       u32   1: no more writes, set by whoever met a full mount, reset by clear
//!   576      epoch        u64   raised before readable bytes change (see slot.rs)
//!   4096     counters     COUNTER_STRIPES stripes of COUNTER_STRIPE_BYTES
//!   states   dataset_len  bytes, one state per sample (see slot.rs)
//!   checks   capacity     u64 checksums, only with verify
//!   data     capacity     slots of slot_bytes each, no gaps
//! ```
//!
//! The header, all numbers little-endian:
//!
//! ```text
//!   0    8   magic "stocache"
//!   8    4   format number
//!   12   4   flags: bit 0 keep, bit 1 verify, the rest zero
//!   16   16  instance: random, tells two segments of one name apart
//!   32   8   dataset_len        40   8   capacity
//!   48   8   slot_bytes         56   4   dtype (torch's ScalarType number)
//!   60   4   number of dims     64   128 dims, unused ones zero
//!   192  8   states offset      200  8   checks offset
//!   208  8   data offset        216  8   total length
//!   224  16  fingerprint, zero if none
//!   240  4   kind: 0 slots      244  4   zero
//!   248  8   XXH3 of bytes 0 to 248
//! ```
//!
//! A segment of records (store.rs) has kind 1 at 240 and differs from 32 on:
//!
//! ```text
//!   states    dataset_len + LOCKS  bytes, one state per sample, then those of the locks
//!   places    dataset_len  u64     where a sample's record begins (see store.rs)
//!   infos     dataset_len  u64     its length and schema
//!   regions   64 bytes of heads, then 64 bytes per region: cursor and last use
//!   schemas   SCHEMA_BYTES         appended to, never changed
//!   data      records
//!
//!   32   8   dataset_len        40   8   data_bytes
//!   48   8   number of regions  192  8   states offset
//!   200  8   places offset      208  8   data offset       216  8   total length
//!   240  4   kind
//! ```
//!
//! A table of files (files.rs) has kind 2 at 240 and differs from 32 on:
//!
//! ```text
//!   states    entries + LOCKS      bytes, the lock of each file
//!   entries   entries              of ENTRY_WORDS u64 each (see table.rs)
//!   heads     one line             words of all files together
//!   rows      LEASES               of ROW_WORDS u64 each: which files a process was given last
//!
//!   32   8   entries            192  8   states offset
//!   200  8   entries offset     208  8   rows offset       216  8   total length
//! ```
//!
//! Offsets follow from the geometry; they are stored so that a reader of another build that
//! computes them differently refuses the segment instead of reading the wrong bytes.
//! Raising [`FORMAT`] costs users their kept caches: the new version starts with an empty one.

use crate::error::{Error, Kind, Result};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// The number of this format; part of a segment's name, so that versions never meet.
pub const FORMAT: u32 = 1;
/// The most dimensions a sample can have.
pub const MAX_DIMS: usize = 16;
/// Length of the immutable header.
pub const HEADER_BYTES: usize = 256;

pub(crate) const FROZEN_AT: usize = 512;
pub(crate) const EPOCH_AT: usize = 576;
pub(crate) const COUNTERS_AT: usize = PAGE;
pub(crate) const COUNTER_STRIPES: usize = 64;
pub(crate) const COUNTER_STRIPE_BYTES: usize = 128;

const PAGE: usize = 4096;
const MAGIC: [u8; 8] = *b"stocache";
const CHECKSUM_AT: usize = HEADER_BYTES - 8;
const FLAG_KEEP: u32 = 1;
const FLAG_VERIFY: u32 = 2;
const KIND_SLOTS: u32 = 0;
const KIND_RECORDS: u32 = 1;
const KIND_FILES: u32 = 2;

const _: () = {
    assert!(HEADER_BYTES <= FROZEN_AT);
    assert!(FROZEN_AT / 64 != EPOCH_AT / 64, "the epoch has its own cache line");
    assert!(EPOCH_AT.is_multiple_of(8) && EPOCH_AT + 8 <= COUNTERS_AT);
    assert!(COUNTERS_AT.is_multiple_of(COUNTER_STRIPE_BYTES));
    assert!(64 + 8 * MAX_DIMS == 192);
};

/// What is cached: how many samples of which shape, and how many of them fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Samples in the dataset.
    pub dataset_len: u64,
    /// Samples that fit in the cache: the first `capacity` by index.
    pub capacity: u64,
    /// Bytes of one sample.
    pub slot_bytes: u64,
    /// torch's ScalarType number.
    pub dtype: i32,
    /// Dimensions of one sample.
    pub dims: Vec<u64>,
    /// A checksum per slot.
    pub verify: bool,
}

impl Geometry {
    /// As many samples of `dims` as `limit_bytes` hold, after one state byte per sample of the dataset.
    pub fn plan(
        limit_bytes: u64,
        dataset_len: u64,
        dims: &[u64],
        dtype: i32,
        item_bytes: u64,
        verify: bool,
    ) -> Result<Self> {
        if dims.len() > MAX_DIMS {
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "data_dims has {} dimensions, at most {MAX_DIMS} are allowed; flatten some of them",
                    dims.len()
                ),
            ));
        }
        if dataset_len == 0 {
            return Err(Error::new(Kind::Argument, "dataset_len is 0, it must be at least 1"));
        }
        let slot_bytes = dims
            .iter()
            .try_fold(item_bytes, |bytes, &dim| bytes.checked_mul(dim))
            .filter(|&bytes| bytes <= i64::MAX as u64)
            .ok_or_else(|| {
                Error::new(
                    Kind::Argument,
                    format!(
                        "data_dims {dims:?} is more than 2^63 bytes a sample; make them smaller"
                    ),
                )
            })?;
        if slot_bytes == 0 {
            return Err(Error::new(
                Kind::Argument,
                format!("data_dims {dims:?} holds no element, every dimension must be at least 1"),
            ));
        }
        let geometry = Self {
            dataset_len,
            capacity: (limit_bytes.saturating_sub(dataset_len) / slot_bytes).min(dataset_len),
            slot_bytes,
            dtype,
            dims: dims.to_vec(),
            verify,
        };
        geometry.layout().map(|_| geometry)
    }

    /// Where everything lies.
    pub fn layout(&self) -> Result<Layout> {
        let too_large = || {
            Error::new(
                Kind::Argument,
                format!("a cache of {self} is beyond what one file can hold; lower size_limit_gib"),
            )
        };
        Layout::of(self).ok_or_else(too_large)
    }
}

impl std::fmt::Display for Geometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} of {} samples, data_dims {:?}, dtype {}, {} a sample{}",
            self.capacity,
            self.dataset_len,
            self.dims,
            dtype_name(self.dtype),
            Bytes(self.slot_bytes),
            if self.verify { ", verified" } else { "" }
        )
    }
}

/// torch's name for a ScalarType number; the numbers are part of torch's own file formats.
fn dtype_name(dtype: i32) -> String {
    let name = match dtype {
        0 => "uint8",
        1 => "int8",
        2 => "int16",
        3 => "int32",
        4 => "int64",
        5 => "float16",
        6 => "float32",
        7 => "float64",
        9 => "complex64",
        10 => "complex128",
        11 => "bool",
        15 => "bfloat16",
        23 => "float8_e5m2",
        24 => "float8_e4m3fn",
        27 => "uint16",
        28 => "uint32",
        29 => "uint64",
        other => return format!("number {other}"),
    };
    name.to_string()
}

/// A number of bytes as people read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return write!(f, "{} bytes", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        write!(f, "{value:.2} {}", UNITS[unit])
    }
}

/// Offsets of the parts of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The state bytes.
    pub states_at: u64,
    /// The checksums; equal to `data_at` without verify.
    pub checks_at: u64,
    /// The slots. Everything before is metadata, allocated at creation.
    pub data_at: u64,
    /// Length of the segment.
    pub total: u64,
}

impl Layout {
    fn of(geometry: &Geometry) -> Option<Self> {
        let pages = |at: u64| at.checked_next_multiple_of(PAGE as u64);
        let states_at = (COUNTERS_AT + COUNTER_STRIPES * COUNTER_STRIPE_BYTES) as u64;
        let checks_at = pages(states_at.checked_add(geometry.dataset_len)?)?;
        let checks = if geometry.verify { geometry.capacity.checked_mul(8)? } else { 0 };
        let data_at = pages(checks_at.checked_add(checks)?)?;
        let total = data_at.checked_add(geometry.capacity.checked_mul(geometry.slot_bytes)?)?;
        (total <= i64::MAX as u64).then_some(Self { states_at, checks_at, data_at, total })
    }

    /// Where slot `i` begins.
    #[inline]
    pub(crate) fn slot_at(&self, geometry: &Geometry, i: u64) -> u64 {
        debug_assert!(i < geometry.capacity);
        self.data_at + i * geometry.slot_bytes
    }
}

/// Room for records of any size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Samples in the dataset.
    pub dataset_len: u64,
    /// Bytes for records.
    pub data_bytes: u64,
    /// Into how many regions they are divided. One is never recycled; of several, the one that was
    /// not used for longest is emptied when a new one is needed.
    pub regions: u64,
}

/// States beyond those of the samples: locks that end with their holder.
pub(crate) const LOCKS: u64 = 2;
/// Bytes for the schemas of records.
pub(crate) const SCHEMA_BYTES: u64 = 64 << 10;
const LINE: u64 = 64;
/// How many regions there are where regions are recycled.
const REGIONS: u64 = 32;

impl Room {
    /// What `limit_bytes` leave for records once the index has its share.
    pub fn plan(limit_bytes: u64, dataset_len: u64, recycle: bool) -> Result<Self> {
        if dataset_len == 0 {
            return Err(Error::new(
                Kind::Argument,
                "the dataset is empty; there is nothing to cache",
            ));
        }
        let regions = if recycle { REGIONS } else { 1 };
        let bare = Self { dataset_len, data_bytes: 0, regions };
        let index = bare.layout()?.data_at;
        // A region begins where a record may.
        let each = limit_bytes.saturating_sub(index) / regions / RECORD_ALIGN * RECORD_ALIGN;
        if each == 0 {
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "memory is {}, which is too small: the index of {dataset_len} samples alone takes {}; raise it",
                    Bytes(limit_bytes),
                    Bytes(index)
                ),
            ));
        }
        let room = Self { dataset_len, data_bytes: each * regions, regions };
        room.layout().map(|_| room)
    }

    /// Bytes of one region.
    pub fn region_bytes(&self) -> u64 {
        self.data_bytes / self.regions
    }

    /// Where everything lies.
    pub fn layout(&self) -> Result<RecordLayout> {
        RecordLayout::of(self).ok_or_else(|| {
            Error::new(
                Kind::Argument,
                format!("a cache of {self} is beyond what one file can hold; lower the limit"),
            )
        })
    }
}

impl std::fmt::Display for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let policy = if self.regions == 1 { "freeze" } else { "lru" };
        write!(
            f,
            "{} for records of {} samples, policy {policy:?}",
            Bytes(self.data_bytes),
            self.dataset_len
        )
    }
}

/// Records begin at multiples of this, which suits every element type.
pub(crate) const RECORD_ALIGN: u64 = 16;

/// Offsets of the parts of a segment of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordLayout {
    pub(crate) states_at: u64,
    pub(crate) places_at: u64,
    pub(crate) infos_at: u64,
    pub(crate) regions_at: u64,
    pub(crate) schemas_at: u64,
    /// The records. Everything before is metadata, allocated at creation.
    pub data_at: u64,
    /// Length of the segment.
    pub total: u64,
}

impl RecordLayout {
    fn of(room: &Room) -> Option<Self> {
        let lines = |at: u64| at.checked_next_multiple_of(LINE);
        let words = room.dataset_len.checked_mul(8)?;
        let states_at = (COUNTERS_AT + COUNTER_STRIPES * COUNTER_STRIPE_BYTES) as u64;
        let places_at = lines(states_at.checked_add(room.dataset_len)?.checked_add(LOCKS)?)?;
        let infos_at = lines(places_at.checked_add(words)?)?;
        let regions_at = lines(infos_at.checked_add(words)?)?;
        let schemas_at = regions_at.checked_add(room.regions.checked_add(1)?.checked_mul(LINE)?)?;
        let data_at =
            schemas_at.checked_add(SCHEMA_BYTES)?.checked_next_multiple_of(PAGE as u64)?;
        let total = data_at.checked_add(room.data_bytes)?;
        let fits = total <= i64::MAX as u64;
        fits.then_some(Self {
            states_at,
            places_at,
            infos_at,
            regions_at,
            schemas_at,
            data_at,
            total,
        })
    }

    /// Where the words of region `r` are; those of all regions together stand before the first.
    pub(crate) fn region_at(&self, r: u64) -> usize {
        (self.regions_at + (r + 1) * LINE) as usize
    }
}

/// Room to note what is known of files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Files that can be told apart; some more than are expected.
    pub entries: u64,
}

/// Entries beyond those that are expected; few in unit tests, which fill a table.
const SPARE: u64 = if cfg!(test) { 1 << 10 } else { 1 << 16 };
/// Words of one file: a cache line.
pub(crate) const ENTRY_WORDS: u64 = 8;
/// Threads of a process that are told apart; see table.rs.
pub(crate) const ROW_THREADS: u64 = 32;
/// Words of one process: two per thread.
pub(crate) const ROW_WORDS: u64 = 2 * ROW_THREADS;

impl Table {
    /// Room for `files` files and for those that come later: new ones, or those of another list of
    /// names below the same source. An entry is 65 bytes.
    pub fn plan(files: u64) -> Result<Self> {
        let table = Self { entries: files.saturating_add(files / 4).saturating_add(SPARE) };
        table.layout().map(|_| table)
    }

    /// Where everything lies.
    pub fn layout(&self) -> Result<TableLayout> {
        TableLayout::of(self).ok_or_else(|| {
            Error::new(
                Kind::Argument,
                format!("{} files are more than one cache can know", self.entries),
            )
        })
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a table of {} files", self.entries)
    }
}

/// Offsets of the parts of a table of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableLayout {
    pub(crate) states_at: u64,
    pub(crate) entries_at: u64,
    pub(crate) heads_at: u64,
    pub(crate) rows_at: u64,
    pub(crate) total: u64,
}

impl TableLayout {
    fn of(table: &Table) -> Option<Self> {
        let lines = |at: u64| at.checked_next_multiple_of(LINE);
        let states_at = (COUNTERS_AT + COUNTER_STRIPES * COUNTER_STRIPE_BYTES) as u64;
        let entries_at = lines(states_at.checked_add(table.entries)?.checked_add(LOCKS)?)?;
        let heads_at = entries_at.checked_add(table.entries.checked_mul(8 * ENTRY_WORDS)?)?;
        let rows_at = heads_at.checked_add(LINE)?;
        let rows = u64::from(crate::slot::LEASES) * 8 * ROW_WORDS;
        let total = rows_at.checked_add(rows)?.checked_next_multiple_of(PAGE as u64)?;
        let fits = total <= i64::MAX as u64;
        fits.then_some(Self { states_at, entries_at, heads_at, rows_at, total })
    }
}

/// What a segment holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// A slot per sample (cache.rs).
    Slots(Geometry),
    /// Records of any size (store.rs).
    Records(Room),
    /// What is known of files (files.rs).
    Files(Table),
}

impl Plan {
    /// Samples in the dataset.
    pub fn dataset_len(&self) -> u64 {
        match self {
            Plan::Slots(geometry) => geometry.dataset_len,
            Plan::Records(room) => room.dataset_len,
            Plan::Files(table) => table.entries,
        }
    }

    /// Whether somebody who asked for `wanted` can use this. Records are as good in more room or
    /// less: who came first decided.
    pub(crate) fn serves(&self, wanted: &Plan) -> bool {
        match (self, wanted) {
            (Plan::Slots(ours), Plan::Slots(theirs)) => ours == theirs,
            (Plan::Records(ours), Plan::Records(theirs)) => {
                (ours.dataset_len, ours.regions) == (theirs.dataset_len, theirs.regions)
            }
            (Plan::Files(_), Plan::Files(_)) => true,
            _ => false,
        }
    }

    /// Where the data begin, and the length of the segment. What lies before is metadata.
    pub fn extent(&self) -> Result<(u64, u64)> {
        match self {
            Plan::Slots(geometry) => geometry.layout().map(|l| (l.data_at, l.total)),
            Plan::Records(room) => room.layout().map(|l| (l.data_at, l.total)),
            Plan::Files(table) => table.layout().map(|l| (l.total, l.total)),
        }
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Plan::Slots(geometry) => geometry.fmt(f),
            Plan::Records(room) => room.fmt(f),
            Plan::Files(table) => table.fmt(f),
        }
    }
}

/// The immutable first bytes of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Random; tells two segments of one name apart.
    pub instance: u128,
    /// The name outlives the last process.
    pub keep: bool,
    /// What the user says the data are, hashed; zero if nothing was said.
    pub fingerprint: u128,
    /// What is cached.
    pub plan: Plan,
}

impl Header {
    /// The bytes of this header.
    pub fn encode(&self) -> Result<[u8; HEADER_BYTES]> {
        let mut out = [0; HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        let verify = matches!(&self.plan, Plan::Slots(g) if g.verify);
        let flags = if self.keep { FLAG_KEEP } else { 0 } | if verify { FLAG_VERIFY } else { 0 };
        put(0, &MAGIC);
        put(8, &FORMAT.to_le_bytes());
        put(12, &flags.to_le_bytes());
        put(16, &self.instance.to_le_bytes());
        let offsets = match &self.plan {
            Plan::Slots(g) => {
                let layout = g.layout()?;
                put(32, &g.dataset_len.to_le_bytes());
                put(40, &g.capacity.to_le_bytes());
                put(48, &g.slot_bytes.to_le_bytes());
                put(56, &g.dtype.to_le_bytes());
                put(60, &(g.dims.len() as u32).to_le_bytes());
                for (i, dim) in g.dims.iter().enumerate() {
                    put(64 + 8 * i, &dim.to_le_bytes());
                }
                put(240, &KIND_SLOTS.to_le_bytes());
                [layout.states_at, layout.checks_at, layout.data_at, layout.total]
            }
            Plan::Records(room) => {
                let layout = room.layout()?;
                put(32, &room.dataset_len.to_le_bytes());
                put(40, &room.data_bytes.to_le_bytes());
                put(48, &room.regions.to_le_bytes());
                put(240, &KIND_RECORDS.to_le_bytes());
                [layout.states_at, layout.places_at, layout.data_at, layout.total]
            }
            Plan::Files(table) => {
                let layout = table.layout()?;
                put(32, &table.entries.to_le_bytes());
                put(240, &KIND_FILES.to_le_bytes());
                [layout.states_at, layout.entries_at, layout.rows_at, layout.total]
            }
        };
        for (i, offset) in offsets.iter().enumerate() {
            put(192 + 8 * i, &offset.to_le_bytes());
        }
        put(224, &self.fingerprint.to_le_bytes());
        let checksum = xxh3_64(&out[..CHECKSUM_AT]);
        out[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
        Ok(out)
    }

    /// Reads a header from a file of `file_len` bytes. Believes nothing.
    pub fn decode(bytes: &[u8; HEADER_BYTES], file_len: u64) -> Result<Self> {
        use crate::fault::{Fault, active};
        let refuse = |why: String| Err(Error::new(Kind::Refused, why));
        let u32_at = |at: usize| u32::from_le_bytes(field(bytes, at));
        let u64_at = |at: usize| u64::from_le_bytes(field(bytes, at));
        if !is_ours(bytes) {
            return refuse("magic: it does not begin like a stocache segment".into());
        }
        if u32_at(8) != FORMAT {
            return refuse(format!(
                "version: it has format {}, this stocache reads format {FORMAT}",
                u32_at(8)
            ));
        }
        if u64_at(CHECKSUM_AT) != xxh3_64(&bytes[..CHECKSUM_AT])
            && !active(Fault::SkipHeaderChecksum)
        {
            return refuse("checksum: its header is damaged".into());
        }
        let (flags, kind, ndim) = (u32_at(12), u32_at(240), u32_at(60) as usize);
        if flags & !(FLAG_KEEP | FLAG_VERIFY) != 0 || ndim > MAX_DIMS || kind > KIND_FILES {
            return refuse(format!(
                "header: kind {kind}, flags {flags:#x} and {ndim} dimensions are not known"
            ));
        }
        let offsets = [u64_at(192), u64_at(200), u64_at(208), u64_at(216)];
        let (plan, fits) = if kind == KIND_SLOTS {
            let geometry = Geometry {
                dataset_len: u64_at(32),
                capacity: u64_at(40),
                slot_bytes: u64_at(48),
                dtype: u32_at(56) as i32,
                dims: (0..ndim).map(|i| u64_at(64 + 8 * i)).collect(),
                verify: flags & FLAG_VERIFY != 0,
            };
            let fits = geometry.dataset_len > 0
                && geometry.slot_bytes > 0
                && geometry.capacity <= geometry.dataset_len
                && Layout::of(&geometry)
                    .is_some_and(|l| [l.states_at, l.checks_at, l.data_at, l.total] == offsets);
            (Plan::Slots(geometry), fits)
        } else if kind == KIND_FILES {
            let table = Table { entries: u64_at(32) };
            let fits = table.entries > 0
                && TableLayout::of(&table)
                    .is_some_and(|l| [l.states_at, l.entries_at, l.rows_at, l.total] == offsets);
            (Plan::Files(table), fits)
        } else {
            let room =
                Room { dataset_len: u64_at(32), data_bytes: u64_at(40), regions: u64_at(48) };
            let fits = room.dataset_len > 0
                && (room.regions == 1 || room.regions == REGIONS)
                && room.data_bytes > 0
                && room.data_bytes.is_multiple_of(room.regions * RECORD_ALIGN)
                && RecordLayout::of(&room)
                    .is_some_and(|l| [l.states_at, l.places_at, l.data_at, l.total] == offsets);
            (Plan::Records(room), fits)
        };
        if !fits {
            return refuse(format!("header: its offsets do not fit its geometry ({plan})"));
        }
        if offsets[3] != file_len {
            return refuse(format!(
                "size: it has {file_len} bytes, its header says {}",
                offsets[3]
            ));
        }
        Ok(Self {
            instance: u128::from_le_bytes(field(bytes, 16)),
            keep: flags & FLAG_KEEP != 0,
            fingerprint: u128::from_le_bytes(field(bytes, 224)),
            plan,
        })
    }

    /// A fingerprint of what the user says the data are.
    pub fn fingerprint_of(words: &[u8]) -> u128 {
        if words.is_empty() { 0 } else { xxh3_128(words).max(1) }
    }
}

/// Whether a file begins like a segment of any format. The first 16 bytes keep their meaning in
/// every format, so that a sweep can tell leftovers of other versions from kept caches.
pub(crate) fn is_ours(bytes: &[u8; HEADER_BYTES]) -> bool {
    bytes[..8] == MAGIC
}

/// Whether a header says what it was made to say. Of other formats that cannot be told.
pub(crate) fn is_intact(bytes: &[u8; HEADER_BYTES], file_len: u64) -> bool {
    u32::from_le_bytes(field(bytes, 8)) != FORMAT || Header::decode(bytes, file_len).is_ok()
}

/// Whether a segment of any format is to be kept.
pub(crate) fn is_kept(bytes: &[u8; HEADER_BYTES]) -> bool {
    u32::from_le_bytes(field(bytes, 12)) & FLAG_KEEP != 0
}

/// The checksum of a slot's bytes.
pub(crate) fn slot_checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOLDEN_CHECKSUM: u64 = 11_059_473_271_207_105_674;

    const GOLDEN_CHECKSUM_OF_A_TABLE: u64 = 102_470_075_741_456_972;

    fn header() -> Header {
        Header {
            instance: 0x0102_0304,
            keep: true,
            fingerprint: Header::fingerprint_of(b"imagenet"),
            plan: Plan::Slots(Geometry::plan(1 << 20, 1000, &[3, 4, 5], 0, 1, true).unwrap()),
        }
    }

    fn table() -> Header {
        let plan = Plan::Files(Table { entries: 1000 });
        Header { instance: 0x0102_0304, keep: false, fingerprint: 0, plan }
    }

    #[test]
    fn capacity_is_what_fits_after_one_byte_per_sample() {
        let plan = |limit, len| Geometry::plan(limit, len, &[10], 0, 1, false).map(|g| g.capacity);
        assert_eq!(plan(1000, 50).unwrap(), 50);
        assert_eq!(plan(1000, 500).unwrap(), 50);
        assert_eq!(plan(1000, 990).unwrap(), 1);
        assert_eq!(plan(1000, 991).unwrap(), 0);
        assert_eq!(plan(1000, 2000).unwrap(), 0);
    }

    #[test]
    fn header_survives_a_round_trip() {
        for header in [header(), table()] {
            let total = header.plan.extent().unwrap().1;
            assert_eq!(Header::decode(&header.encode().unwrap(), total).unwrap(), header);
        }
    }

    /// Golden bytes: whoever changes the format must notice, and raise FORMAT.
    #[test]
    fn header_bytes_of_this_format_are_these() {
        let bytes = header().encode().unwrap();
        assert_eq!(&bytes[..16], b"stocache\x01\0\0\0\x03\0\0\0");
        assert_eq!(&bytes[16..24], &[4, 3, 2, 1, 0, 0, 0, 0]);
        assert_eq!(
            &bytes[32..64],
            &[
                0xe8, 3, 0, 0, 0, 0, 0, 0, // dataset_len 1000
                0xe8, 3, 0, 0, 0, 0, 0, 0, // capacity 1000
                60, 0, 0, 0, 0, 0, 0, 0, // slot_bytes
                0, 0, 0, 0, 3, 0, 0, 0, // dtype, ndim
            ]
        );
        assert_eq!(
            &bytes[192..224],
            &[
                0, 0x30, 0, 0, 0, 0, 0, 0, // states at 12288
                0, 0x40, 0, 0, 0, 0, 0, 0, // checks at 16384
                0, 0x60, 0, 0, 0, 0, 0, 0, // data at 24576
                0x60, 0x4a, 1, 0, 0, 0, 0, 0, // total 84576
            ]
        );
        assert_eq!(u64::from_le_bytes(field(&bytes, 248)), GOLDEN_CHECKSUM);
    }

    #[test]
    fn header_bytes_of_a_table_of_files_are_these() {
        let bytes = table().encode().unwrap();
        assert_eq!(&bytes[..16], b"stocache\x01\0\0\0\0\0\0\0");
        assert_eq!(&bytes[16..24], &[4, 3, 2, 1, 0, 0, 0, 0]);
        assert_eq!(&bytes[32..40], &[0xe8, 3, 0, 0, 0, 0, 0, 0]); // 1000 entries
        assert!(bytes[40..192].iter().all(|&byte| byte == 0));
        assert_eq!(
            &bytes[192..224],
            &[
                0, 0x30, 0, 0, 0, 0, 0, 0, // states at 12288
                0, 0x34, 0, 0, 0, 0, 0, 0, // entries at 13312
                0x40, 0x2e, 1, 0, 0, 0, 0, 0, // rows at 77376, after one line of words
                0, 0x30, 3, 0, 0, 0, 0, 0, // total 208896
            ]
        );
        assert_eq!(&bytes[240..244], &[2, 0, 0, 0]); // kind
        assert_eq!(u64::from_le_bytes(field(&bytes, 248)), GOLDEN_CHECKSUM_OF_A_TABLE);
    }

    #[test]
    fn a_table_has_room_for_more_files_than_expected() {
        assert_eq!(Table::plan(0).unwrap().entries, 1024);
        assert_eq!(Table::plan(1_000_000).unwrap().entries, 1_251_024);
        assert!(Table::plan(u64::MAX).is_err());
        assert!(Table::plan(u64::MAX / 64).is_err());
    }

    proptest! {
        #[test]
        fn parts_of_a_table_do_not_overlap(entries in 1u64..1 << 40) {
            let l = Table { entries }.layout().unwrap();
            prop_assert!(l.states_at + entries + LOCKS <= l.entries_at);
            prop_assert_eq!(l.entries_at + entries * 64, l.heads_at);
            prop_assert_eq!(l.heads_at + LINE, l.rows_at);
            prop_assert!(l.rows_at + u64::from(crate::slot::LEASES) * 8 * ROW_WORDS <= l.total);
            prop_assert!([l.entries_at, l.heads_at, l.rows_at].iter().all(|at| at % LINE == 0));
        }

        #[test]
        fn layout_parts_do_not_overlap(
            limit in 1u64..1 << 45,
            len in 1u64..1 << 33,
            dims in prop::collection::vec(1u64..600, 0..5),
            verify: bool,
        ) {
            if let Ok(g) = Geometry::plan(limit, len, &dims, 0, 4, verify) {
                let l = g.layout().unwrap();
                prop_assert!(l.states_at + g.dataset_len <= l.checks_at);
                let checks = u64::from(verify) * g.capacity * 8;
                prop_assert!(l.checks_at + checks <= l.data_at);
                prop_assert_eq!(l.data_at + g.capacity * g.slot_bytes, l.total);
                prop_assert!(g.capacity == 0 || g.capacity * g.slot_bytes + g.dataset_len <= limit);
                if let Some(last) = g.capacity.checked_sub(1) {
                    prop_assert_eq!(l.slot_at(&g, last) + g.slot_bytes, l.total);
                }
            }
        }

        #[test]
        fn arbitrary_bytes_are_refused_without_a_crash(bytes: Vec<u8>, len: u64) {
            let mut head = [0u8; HEADER_BYTES];
            let n = bytes.len().min(HEADER_BYTES);
            head[..n].copy_from_slice(&bytes[..n]);
            prop_assert!(Header::decode(&head, len).is_err());
        }
    }

    /// P11: no damaged header is accepted. `STOCACHE_LONG=1` raises the count to a million.
    #[test]
    fn mutated_headers_are_never_accepted() {
        let long = std::env::var_os("STOCACHE_LONG").is_some();
        let rounds = if long { 1_000_000 } else { 100_000 };
        let whole = [header(), table()]
            .map(|header| (header.encode().unwrap(), header.plan.extent().unwrap().1));
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for (good, total) in whole {
            for _ in 0..rounds {
                let mut bad = good;
                for _ in 0..1 + random() % 4 {
                    bad[random() as usize % HEADER_BYTES] ^= 1 << (random() % 8);
                }
                assert!(bad == good || Header::decode(&bad, total).is_err(), "accepted {bad:?}");
            }
            assert!(Header::decode(&good, total + 1).is_err());
        }
    }
}
