//! The log of a region: which records lie in its file. Opening a store reads logs, not records.
//!
//! ```text
//!   0   key     u64   the number of the sample, or the first half of its key
//!   8   at      u32   where the record begins: in steps of STEP from the start of the file
//!   12  length  u32   of the record in bytes, with its head
//!   16  sum     u64   XXH3 of the 16 bytes before, seeded with the dataset, the region and its generation
//! ```
//!
//! An entry is written after the bytes that it is about, at a place that nobody else writes to. A kill
//! leaves zeros in its place, or a whole one. All integers are little endian.

use crate::fault::{Fault, active as broken};
use crate::sys::pages::PAGE;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The length of an entry.
pub(super) const ENTRY: usize = 24;
/// Records begin at multiples of this.
pub(super) const STEP: u64 = 64;
/// The longest record that an entry can name.
pub(super) const LONGEST: u64 = u32::MAX as u64;
/// The longest file whose records an entry can name.
pub(super) const LONGEST_FILE: u64 = STEP << 32;

/// So much of a log is read at a time; whole entries.
const BLOCK: usize = ENTRY * (48 << 10);

/// What a log of so many places takes of the disk.
pub(super) fn bytes(places: u64) -> u64 {
    (places * ENTRY as u64).next_multiple_of(PAGE as u64)
}

/// A record in a region's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: u64,
    /// From the start of the file, a multiple of STEP.
    pub(super) at: u64,
    pub(super) len: u64,
}

/// What entries of this region are seeded with.
pub(super) fn seed(fingerprint: u128, region: u64, generation: u32) -> u64 {
    let folded = fingerprint as u64 ^ (fingerprint >> 64) as u64;
    folded ^ (region << 32 | u64::from(generation)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Entry {
    pub(super) fn encode(&self, seed: u64) -> [u8; ENTRY] {
        debug_assert!(self.at.is_multiple_of(STEP) && self.at < LONGEST_FILE);
        let mut bytes = [0; ENTRY];
        bytes[..8].copy_from_slice(&self.key.to_le_bytes());
        bytes[8..12].copy_from_slice(&((self.at / STEP) as u32).to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.len as u32).to_le_bytes());
        let sum = xxh3_64_with_seed(&bytes[..16], seed);
        bytes[16..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// `None` if these are not the bytes of an entry of that region.
    pub(super) fn decode(bytes: &[u8; ENTRY], seed: u64) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let sum = xxh3_64_with_seed(&bytes[..16], seed);
        if word(16) != sum && !broken(Fault::SkipRecordChecksum) {
            return None;
        }
        let place = word(8);
        Some(Self { key: word(0), at: (place & 0xffff_ffff) * STEP, len: place >> 32 })
    }
}

/// What a log says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Read {
    /// Places for entries, used or not: the next one comes after them.
    pub(super) places: u64,
    /// Entries that are none.
    pub(super) damaged: u64,
}

/// Reads the log of a region from its beginning to its end. One that is longer than the region, which has room for
/// log and records, is an error: nobody wrote it, and it may have no end.
pub(super) fn read(
    file: BorrowedFd<'_>,
    seed: u64,
    region_bytes: u64,
    mut each: impl FnMut(Entry),
) -> rustix::io::Result<Read> {
    let mut found = Read::default();
    let mut block = vec![0; BLOCK];
    loop {
        if found.places * ENTRY as u64 > region_bytes {
            return Err(Errno::FBIG);
        }
        let got = read_block(file, &mut block, found.places * ENTRY as u64)?;
        for bytes in block[..got].chunks(ENTRY) {
            found.places += 1;
            let Ok(bytes) = <&[u8; ENTRY]>::try_from(bytes) else {
                found.damaged += 1; // a part of one, at the end
                continue;
            };
            match Entry::decode(bytes, seed) {
                Some(entry) => each(entry),
                None if bytes.iter().all(|&byte| byte == 0) => {} // its writer died
                None => found.damaged += 1,
            }
        }
        if got < BLOCK {
            return Ok(found);
        }
    }
}

fn read_block(file: BorrowedFd<'_>, block: &mut [u8], at: u64) -> rustix::io::Result<usize> {
    let mut got = 0;
    while got < block.len() {
        match rustix::io::pread(file, &mut block[got..], at + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(got)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::fd::AsFd;

    /// Golden bytes: whoever changes the format must notice, and raise that of the folder.
    #[test]
    fn the_bytes_of_an_entry_are_these() {
        let bytes = Entry { key: 7, at: 3 * STEP, len: 500 }.encode(seed(9, 2, 1));
        assert_eq!(&bytes[..16], b"\x07\0\0\0\0\0\0\0\x03\0\0\0\xf4\x01\0\0");
        assert_eq!(u64::from_le_bytes(bytes[16..].try_into().unwrap()), GOLDEN_SUM);
    }

    const GOLDEN_SUM: u64 = 5975244862825265509;

    proptest! {
        #[test]
        fn an_entry_comes_back_and_nothing_else_does(
            key: u64, steps in 0u64..1 << 32, len in 0..=LONGEST, region in 0u64..128,
            generation: u32, bit in 0usize..8 * ENTRY,
        ) {
            let entry = Entry { key, at: steps * STEP, len };
            let seed = seed(5, region, generation);
            let mut bytes = entry.encode(seed);
            prop_assert_eq!(Entry::decode(&bytes, seed), Some(entry));
            prop_assert_eq!(Entry::decode(&bytes, super::seed(6, region, generation)), None);
            prop_assert_eq!(Entry::decode(&bytes, super::seed(5, region, generation ^ 1)), None);
            prop_assert_eq!(Entry::decode(&bytes, super::seed(5, region + 1, generation)), None);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Entry::decode(&bytes, seed), None);
        }
    }

    #[test]
    fn a_log_is_read_past_what_the_dead_left() {
        let path = std::env::temp_dir().join(format!("stocache-log-{}", std::process::id()));
        let entries: Vec<Entry> = (0..BLOCK as u64 / ENTRY as u64 + 3)
            .map(|key| Entry { key, at: key * STEP, len: 10 })
            .collect();
        let mut bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.encode(1)).collect();
        bytes[2 * ENTRY..3 * ENTRY].fill(0); // nobody wrote it
        bytes[5 * ENTRY] ^= 1;
        bytes.extend([9; 7]); // a part of one
        std::fs::write(&path, &bytes).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut seen = Vec::new();
        let found = read(file.as_fd(), 1, 1 << 30, |entry| seen.push(entry)).unwrap();
        assert_eq!(found, Read { places: entries.len() as u64 + 1, damaged: 2 });
        let wanted: Vec<Entry> =
            entries.into_iter().filter(|entry| ![2, 5].contains(&entry.key)).collect();
        assert_eq!(seen, wanted);
        assert_eq!(read(file.as_fd(), 1, 1 << 20, |_| ()), Err(Errno::FBIG));
    }
}
