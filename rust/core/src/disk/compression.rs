//! Records made smaller on their way to disk, each by itself.
//!
//! ```text
//!   head     of the record, sealed anew over what follows (records/portable.rs)
//!   length   u64   of the record before
//!   bytes    packed
//! ```
//!
//! What is unpacked was checked as it is, and fills the length that it declares, no more and no less.

use crate::records::portable::{self, HEAD};
use std::cell::RefCell;
use std::io::IoSlice;

/// How records are packed on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    #[default]
    None,
    /// Quick to unpack, and a good deal smaller.
    Zstd,
    /// Quicker, and not as small.
    Lz4,
}

const LENGTH: usize = 8;
/// Who loads a sample packs it, and should not wait for long.
const ZSTD_LEVEL: i32 = 1;

impl Compression {
    /// The way of that name.
    pub fn of(name: &str) -> Option<Self> {
        match name {
            "none" => Some(Self::None),
            "zstd" => Some(Self::Zstd),
            "lz4" => Some(Self::Lz4),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zstd => "zstd",
            Self::Lz4 => "lz4",
        }
    }

    /// As a head says it.
    fn number(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Zstd => 1,
            Self::Lz4 => 2,
        }
    }

    fn numbered(number: u8) -> Option<Self> {
        [Self::Zstd, Self::Lz4].into_iter().find(|way| way.number() == number)
    }

    /// These bytes, packed behind their length; `None` if that saves less than a sixteenth.
    pub fn pack(self, parts: &[IoSlice<'_>]) -> Option<Vec<u8>> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let most = len - len / 16;
        let mut gathered = Vec::new();
        let bytes: &[u8] = match parts {
            [one] => one,
            many => {
                gathered.try_reserve_exact(len).ok()?;
                many.iter().for_each(|part| gathered.extend_from_slice(part));
                &gathered
            }
        };
        let mut packed = Vec::new();
        let room = match self {
            Self::None => return None,
            Self::Zstd => most,
            Self::Lz4 => lz4_flex::block::get_maximum_output_size(len),
        };
        packed.try_reserve_exact(LENGTH + room).ok()?;
        packed.resize(LENGTH + room, 0);
        packed[..LENGTH].copy_from_slice(&(len as u64).to_le_bytes());
        let into = &mut packed[LENGTH..];
        let took = match self {
            Self::None => return None,
            Self::Zstd => with_zstd(|zstd| zstd.0.compress_to_buffer(bytes, into).ok())?,
            Self::Lz4 => lz4_flex::block::compress_into(bytes, into).ok()?,
        };
        packed.truncate(LENGTH + took);
        (LENGTH + took <= most).then_some(packed)
    }

    /// What `pack` made of a record of this many bytes, into as many; whether it was that.
    pub fn unpack(self, packed: &[u8], into: &mut [u8]) -> bool {
        let Some((_, bytes)) = packed.split_first_chunk::<LENGTH>() else { return false };
        let got = match self {
            Self::None => return false,
            Self::Zstd => with_zstd(|zstd| zstd.1.decompress_to_buffer(bytes, into).ok()),
            Self::Lz4 => lz4_flex::block::decompress_into(bytes, into).ok(),
        };
        got == Some(into.len())
    }
}

/// A packed record that was read, checked and not yet unpacked.
pub(crate) struct Packed<'a> {
    way: Compression,
    head: portable::Head,
    bytes: &'a [u8],
    /// Of the record before, without its head.
    len: u64,
}

impl<'a> Packed<'a> {
    /// `None` if it is damaged, or of a way that is not known here.
    pub(crate) fn open(read: &'a [u8], key: u64, fingerprint: u128) -> Option<Self> {
        let way = Compression::numbered(portable::packed_as(read))?;
        let (head, bytes) = portable::open_packed(read, key, fingerprint).ok()?;
        let len = u64::from_le_bytes(*bytes.first_chunk::<LENGTH>()?);
        Some(Self { way, head, bytes, len })
    }

    /// Of the whole record before, with its head; `None` if there is no such length.
    pub(crate) fn len(&self) -> Option<usize> {
        usize::try_from(self.len).ok()?.checked_add(HEAD)
    }

    /// The record before, sealed as it was; whether there is one.
    pub(crate) fn unpack(&self, into: &mut [u8]) -> bool {
        let Some((head, bytes)) = into.split_first_chunk_mut::<HEAD>() else { return false };
        let good = bytes.len() as u64 == self.len && self.way.unpack(self.bytes, bytes);
        if good {
            let sealed = portable::Head { len: self.len, ..self.head };
            *head = portable::seal(&sealed, &[IoSlice::new(bytes)]);
        }
        good
    }
}

/// Whether what was read says that it is packed.
pub(crate) fn is_packed(read: &[u8]) -> bool {
    portable::packed_as(read) != 0
}

/// The record as it goes to disk: its head and its bytes, packed. `None`: as it is.
pub(crate) fn pack(
    way: Compression,
    head: &[u8; HEAD],
    parts: &[IoSlice<'_>],
) -> Option<([u8; HEAD], Vec<u8>)> {
    let packed = way.pack(parts)?;
    Some((portable::repack(head, way.number(), &packed), packed))
}

type Zstd = (zstd::bulk::Compressor<'static>, zstd::bulk::Decompressor<'static>);

/// One of each per thread: to make them takes longer than to use them.
fn with_zstd(act: impl FnOnce(&mut Zstd) -> Option<usize>) -> Option<usize> {
    thread_local! {
        static MADE: RefCell<Option<Zstd>> = const { RefCell::new(None) };
    }
    let make = || -> std::io::Result<Zstd> {
        Ok((zstd::bulk::Compressor::new(ZSTD_LEVEL)?, zstd::bulk::Decompressor::new()?))
    };
    MADE.with_borrow_mut(|made| {
        if made.is_none() {
            *made = make().ok();
        }
        act(made.as_mut()?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::portable::Head;
    use proptest::prelude::*;

    const WAYS: [Compression; 2] = [Compression::Zstd, Compression::Lz4];

    fn seal(bytes: &[u8]) -> [u8; HEAD] {
        let head = Head { key: 7, fingerprint: 9, schema: Some(3), len: bytes.len() as u64 };
        portable::seal(&head, &[IoSlice::new(bytes)])
    }

    fn packed(way: Compression, bytes: &[u8]) -> Option<Vec<u8>> {
        let (head, bytes) = pack(way, &seal(bytes), &[IoSlice::new(bytes)])?;
        Some([&head[..], &bytes].concat())
    }

    fn unpacked(read: &[u8]) -> Option<Vec<u8>> {
        let packed = Packed::open(read, 7, 9)?;
        let mut into = vec![0; packed.len()?];
        packed.unpack(&mut into).then_some(into)
    }

    /// The same with another length declared, and sealed: only who can seal can say so.
    fn declaring(way: Compression, bytes: &[u8], len: u64) -> Vec<u8> {
        let mut packed = way.pack(&[IoSlice::new(bytes)]).unwrap();
        packed[..LENGTH].copy_from_slice(&len.to_le_bytes());
        let head = portable::repack(&seal(bytes), way.number(), &packed);
        [&head[..], &packed].concat()
    }

    #[test]
    fn names_lead_back() {
        for way in [Compression::None, Compression::Zstd, Compression::Lz4] {
            assert_eq!(Compression::of(way.name()), Some(way));
        }
        assert_eq!(Compression::of("gzip"), None);
    }

    #[test]
    fn what_does_not_get_smaller_stays_as_it_is() {
        let mut seed = 1u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 56) as u8
        })
        .take(10_000)
        .collect();
        for way in WAYS {
            assert_eq!(packed(way, &noise), None);
            assert_eq!(packed(way, b""), None);
            assert!(packed(way, &[0; 10_000]).unwrap().len() < 1000);
        }
        assert_eq!(packed(Compression::None, &[0; 10_000]), None);
    }

    /// A few bytes that become many: no more than they declare, and not one byte less.
    #[test]
    fn what_unpacks_to_another_length_is_no_record() {
        let zeros = vec![0; 1 << 20];
        for way in WAYS {
            assert!(unpacked(&declaring(way, &zeros, 1 << 20)).is_some(), "the control");
            for len in [0, 1, 1000, (1 << 20) - 1, (1 << 20) + 1, 1 << 21] {
                assert_eq!(unpacked(&declaring(way, &zeros, len)), None, "{way:?} {len}");
            }
            let read = declaring(way, &zeros, u64::MAX);
            assert_eq!(Packed::open(&read, 7, 9).unwrap().len(), None);
        }
    }

    #[test]
    fn a_way_that_is_not_known_is_no_record() {
        let read = packed(Compression::Zstd, &[0; 1000]).unwrap();
        let (head, bytes) = read.split_first_chunk::<HEAD>().unwrap();
        let other = [&portable::repack(head, 9, bytes)[..], bytes].concat();
        assert!(is_packed(&other) && Packed::open(&other, 7, 9).is_none());
    }

    proptest! {
        #[test]
        fn a_record_comes_back_as_it_was_or_not_at_all(
            word in any::<u8>(),
            len in 100usize..5000,
            parts in 1usize..5,
            bit: usize,
            cut: usize,
        ) {
            let bytes: Vec<u8> = (0..len).map(|i| word.wrapping_add((i / 50) as u8)).collect();
            let slices: Vec<IoSlice<'_>> = bytes.chunks(len.div_ceil(parts)).map(IoSlice::new).collect();
            for way in WAYS {
                let (head, small) = pack(way, &seal(&bytes), &slices).unwrap();
                let read = [&head[..], &small].concat();
                prop_assert!(is_packed(&read));
                let whole = [&seal(&bytes)[..], &bytes].concat();
                prop_assert_eq!(unpacked(&read), Some(whole));
                let mut bad = read.clone();
                bad[bit / 8 % read.len()] ^= 1 << (bit % 8);
                prop_assert_eq!(unpacked(&bad), None);
                prop_assert_eq!(unpacked(&read[..cut % read.len()]), None);
                // Also where the seal fits: what is no such stream is refused, and nothing breaks.
                let mut noise = small.clone();
                noise[LENGTH + bit % (small.len() - LENGTH)] ^= 1 << (bit % 8);
                let sealed = portable::repack(&head, way.number(), &noise);
                let _whatever = unpacked(&[&sealed[..], &noise].concat());
            }
        }
    }
}
