//! The format of a segment, written down once. Only this file knows offsets.
//!
//! ```text
//!   0        header, never changed after creation (HEADER_BYTES)
//!   512      frozen       u32   1: no more writes, set by whoever met a full mount, reset by clear
//!   576      epoch        u64   raised before readable bytes change (see claim.rs)
//!   640      told         u32   what was said to the user already, a bit each
//!   704      rests        40 u64, until when servers are left alone (see cluster/rests.rs)
//!   1024     notes        text for people, zero from its end on (see list.rs)
//!   4096     counters     COUNTER_STRIPES stripes of COUNTER_STRIPE_BYTES
//!   12288    leases       LEASES entries of two u64: who has it, how many claims (see claim.rs)
//!   states   dataset_len  u16, one state per sample (see claim.rs)
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
//!   states    dataset_len + LOCKS  u16, one state per sample, then those of the locks
//!   index     dataset_len          two u64 per sample: where its record is (see space/format.rs)
//!   regions   a line of words, then two lines per region (see space/regions.rs)
//!   writers   LEASES       u64     in which regions a process is writing
//!   schemas   SCHEMA_BYTES         appended to, never changed
//!   data      records
//!
//!   32   8   dataset_len        40   8   data_bytes
//!   48   8   number of regions  192  8   states offset
//!   200  8   index offset       208  8   data offset       216  8   total length
//!   240  4   kind
//! ```
//!
//! A table of files has kind 2 at 240 and differs from 32 on: see table_layout.rs. The table of a disk store
//! has kind 3 (disk_layout.rs):
//!
//! ```text
//!   32   8   dataset_len        40   8   bytes of one region
//!   48   8   number of regions  56   4   flags: bit 0 recycles, bit 1 keyed
//!   192  8   states offset      200  8   index offset
//!   208  8   keys offset        216  8   total length
//! ```
//!
//! Offsets follow from the geometry; they are stored so that a reader of another build that
//! computes them differently refuses the segment instead of reading the wrong bytes.
//! Raising [`FORMAT`] costs users their kept caches: the new version starts with an empty one.

use crate::error::{Error, Kind, Result};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

pub use crate::segment::disk_layout::{DiskGeometry, DiskLayout};
pub use crate::segment::geometry::{Extent, Geometry};
pub use crate::segment::parts::HEADER_BYTES;
pub(crate) use crate::segment::records_layout::*;
pub use crate::segment::records_layout::{RecordsGeometry, RecordsLayout};
pub use crate::segment::slots_layout::{MAX_DIMS, SlotsGeometry, SlotsLayout};
pub use crate::segment::table_layout::{TableGeometry, TableLayout};

/// The number of this format; part of a segment's name, so that versions never meet.
pub const FORMAT: u32 = 4;
const MAGIC: [u8; 8] = *b"stocache";
const CHECKSUM_AT: usize = HEADER_BYTES - 8;
const FLAG_KEEP: u32 = 1;
const FLAG_VERIFY: u32 = 2;
const KIND_SLOTS: u32 = 0;
const KIND_RECORDS: u32 = 1;
const KIND_FILES: u32 = 2;
const KIND_DISK: u32 = 3;

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
    pub geometry: Geometry,
}

impl Header {
    /// The bytes of this header.
    pub fn encode(&self) -> Result<[u8; HEADER_BYTES]> {
        let mut out = [0; HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        let verify = matches!(&self.geometry, Geometry::Slots(g) if g.verify);
        let flags = if self.keep { FLAG_KEEP } else { 0 } | if verify { FLAG_VERIFY } else { 0 };
        put(0, &MAGIC);
        put(8, &FORMAT.to_le_bytes());
        put(12, &flags.to_le_bytes());
        put(16, &self.instance.to_le_bytes());
        let offsets = match &self.geometry {
            Geometry::Slots(g) => {
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
            Geometry::Records(geometry) => {
                let layout = geometry.layout()?;
                put(32, &geometry.dataset_len.to_le_bytes());
                put(40, &geometry.data_bytes.to_le_bytes());
                put(48, &geometry.regions.to_le_bytes());
                put(240, &KIND_RECORDS.to_le_bytes());
                [layout.states_at, layout.space.index_at, layout.data_at, layout.total]
            }
            Geometry::Files(table) => {
                put(32, &table.entries.to_le_bytes());
                put(40, &table.expected.to_le_bytes());
                put(240, &KIND_FILES.to_le_bytes());
                table.layout()?.offsets()
            }
            Geometry::Disk(disk) => {
                let layout = disk.layout()?;
                put(32, &disk.dataset_len.to_le_bytes());
                put(40, &disk.region_bytes.to_le_bytes());
                put(48, &disk.regions.to_le_bytes());
                put(56, &disk.flags().to_le_bytes());
                put(240, &KIND_DISK.to_le_bytes());
                [layout.states_at, layout.space.index_at, layout.keys_at, layout.total]
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
        if flags & !(FLAG_KEEP | FLAG_VERIFY) != 0 || ndim > MAX_DIMS || kind > KIND_DISK {
            return refuse(format!(
                "header: kind {kind}, flags {flags:#x} and {ndim} dimensions are not known"
            ));
        }
        let offsets = [u64_at(192), u64_at(200), u64_at(208), u64_at(216)];
        let (geometry, fits) = if kind == KIND_SLOTS {
            let geometry = SlotsGeometry {
                dataset_len: u64_at(32),
                capacity: u64_at(40),
                slot_bytes: u64_at(48),
                dtype: u32_at(56) as i32,
                dims: (0..ndim).map(|i| u64_at(64 + 8 * i)).collect(),
                verify: flags & FLAG_VERIFY != 0,
            };
            let items = geometry.dims.iter().try_fold(1, |items: u64, &dim| items.checked_mul(dim));
            let fits = geometry.dataset_len > 0
                && geometry.slot_bytes > 0
                && items.is_some_and(|n| n > 0 && geometry.slot_bytes.is_multiple_of(n))
                && geometry.capacity <= geometry.dataset_len
                && SlotsLayout::of(&geometry)
                    .is_some_and(|l| [l.states_at, l.checks_at, l.data_at, l.total] == offsets);
            (Geometry::Slots(geometry), fits)
        } else if kind == KIND_FILES {
            let table = TableGeometry { entries: u64_at(32), expected: u64_at(40) };
            let fits = TableLayout::of(&table).is_some_and(|l| l.offsets() == offsets);
            (Geometry::Files(table), fits)
        } else if kind == KIND_DISK {
            let words = (u64_at(32), u64_at(40), u64_at(48), u32_at(56));
            let Some(disk) = DiskGeometry::from_header(words.0, words.1, words.2, words.3) else {
                return refuse(format!("header: flags {:#x} are not known", words.3));
            };
            let fits = DiskLayout::of(&disk)
                .is_some_and(|l| [l.states_at, l.space.index_at, l.keys_at, l.total] == offsets);
            (Geometry::Disk(disk), fits)
        } else {
            let geometry = RecordsGeometry {
                dataset_len: u64_at(32),
                data_bytes: u64_at(40),
                regions: u64_at(48),
            };
            let fits = geometry.dataset_len > 0
                && (geometry.regions == 1 || geometry.regions >= FEWEST_REGIONS)
                && geometry.data_bytes > 0
                && RecordsLayout::of(&geometry).is_some_and(|l| {
                    [l.states_at, l.space.index_at, l.data_at, l.total] == offsets
                });
            (Geometry::Records(geometry), fits)
        };
        if !fits {
            return refuse(format!("header: its offsets do not fit its geometry ({geometry})"));
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
            geometry,
        })
    }

    /// A fingerprint of what the user says the data are.
    pub fn fingerprint_of(words: &[u8]) -> u128 {
        if words.is_empty() { 0 } else { xxh3_128(words).max(1) }
    }
}

/// Whether a file begins like a segment of any format. The first 16 bytes keep their meaning in
/// every format, so that leftovers of other versions can be told from kept caches.
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

fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOLDEN_CHECKSUM: u64 = 137_414_236_514_818_634;

    const GOLDEN_CHECKSUM_OF_A_TABLE: u64 = 16_974_571_345_811_744_774;

    fn header() -> Header {
        Header {
            instance: 0x0102_0304,
            keep: true,
            fingerprint: Header::fingerprint_of(b"imagenet"),
            geometry: Geometry::Slots(
                SlotsGeometry::plan(1 << 20, 1000, &[3, 4, 5], 0, 1, true).unwrap(),
            ),
        }
    }

    fn table() -> Header {
        let geometry = Geometry::Files(TableGeometry { entries: 1000, expected: 200 });
        Header { instance: 0x0102_0304, keep: false, fingerprint: 0, geometry }
    }

    #[test]
    fn capacity_is_what_fits_after_one_byte_per_sample() {
        let plan =
            |limit, len| SlotsGeometry::plan(limit, len, &[10], 0, 1, false).map(|g| g.capacity);
        assert_eq!(plan(1000, 50).unwrap(), 50);
        assert_eq!(plan(1000, 500).unwrap(), 50);
        assert_eq!(plan(1000, 990).unwrap(), 1);
        assert_eq!(plan(1000, 991).unwrap(), 0);
        assert_eq!(plan(1000, 2000).unwrap(), 0);
    }

    #[test]
    fn header_survives_a_round_trip() {
        for header in [header(), table()] {
            let total = header.geometry.extent().unwrap().total;
            assert_eq!(Header::decode(&header.encode().unwrap(), total).unwrap(), header);
        }
    }

    /// What is made of these numbers divides by them.
    #[test]
    fn dims_that_do_not_make_a_slot_are_refused() {
        let with = |dims: &[u64]| {
            let mut header = header();
            let Geometry::Slots(geometry) = &mut header.geometry else { unreachable!() };
            geometry.dims = dims.to_vec();
            let total = header.geometry.extent().unwrap().total;
            Header::decode(&header.encode().unwrap(), total).map(|_| ())
        };
        assert!(with(&[3, 4, 5]).is_ok() && with(&[15]).is_ok()); // the control: a slot of 60 bytes
        for dims in [&[0][..], &[3, 0], &[7], &[61], &[1 << 32, 1 << 32, 60], &[1 << 63, 2, 1]] {
            let why = with(dims).unwrap_err();
            assert_eq!(why.kind(), Kind::Refused, "{dims:?}");
        }
    }

    /// Golden bytes: whoever changes the format must notice, and raise FORMAT.
    #[test]
    fn header_bytes_of_this_format_are_these() {
        let bytes = header().encode().unwrap();
        assert_eq!(&bytes[..16], b"stocache\x04\0\0\0\x03\0\0\0");
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
                0, 0x40, 1, 0, 0, 0, 0, 0, // states at 81920
                0, 0x50, 1, 0, 0, 0, 0, 0, // checks at 86016
                0, 0x70, 1, 0, 0, 0, 0, 0, // data at 94208
                0x60, 0x5a, 2, 0, 0, 0, 0, 0, // total 154208
            ]
        );
        assert_eq!(u64::from_le_bytes(field(&bytes, 248)), GOLDEN_CHECKSUM);
    }

    #[test]
    fn header_bytes_of_a_table_of_files_are_these() {
        let bytes = table().encode().unwrap();
        assert_eq!(&bytes[..16], b"stocache\x04\0\0\0\0\0\0\0");
        assert_eq!(&bytes[16..24], &[4, 3, 2, 1, 0, 0, 0, 0]);
        assert_eq!(&bytes[32..40], &[0xe8, 3, 0, 0, 0, 0, 0, 0]); // 1000 entries
        assert_eq!(&bytes[40..48], &[200, 0, 0, 0, 0, 0, 0, 0]); // 200 expected
        assert!(bytes[48..192].iter().all(|&byte| byte == 0));
        let offsets: Vec<u64> =
            (192..224).step_by(8).map(|at| u64::from_le_bytes(field(&bytes, at))).collect();
        assert_eq!(offsets, [86_016, 2_191_360, 2_244_608, 2_301_952]); // states, index, entries, total
        assert_eq!(&bytes[240..244], &[2, 0, 0, 0]); // kind
        assert_eq!(u64::from_le_bytes(field(&bytes, 248)), GOLDEN_CHECKSUM_OF_A_TABLE);
    }

    proptest! {
        #[test]
        fn layout_parts_do_not_overlap(
            limit in 1u64..1 << 45,
            len in 1u64..1 << 33,
            dims in prop::collection::vec(1u64..600, 0..5),
            verify: bool,
        ) {
            if let Ok(g) = SlotsGeometry::plan(limit, len, &dims, 0, 4, verify) {
                let l = g.layout().unwrap();
                prop_assert!(l.states_at + 2 * g.dataset_len <= l.checks_at);
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
            .map(|header| (header.encode().unwrap(), header.geometry.extent().unwrap().total));
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
