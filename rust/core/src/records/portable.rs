//! A record that can travel: to a disk, to another machine, to the next job.
//!
//! ```text
//!    0  magic        u32   MAGIC
//!    4  format       u16   FORMAT
//!    6  flags        u16   INLINE_SCHEMA: the record brings its schema; PACKED: how its bytes are packed
//!    8  key          u64   the number of its sample
//!   16  length       u64   of the bytes that follow this head
//!   24  checksum     u64   XXH3 of this head, with zeros here, and of the bytes; seeded with the fingerprint
//!   32  fingerprint  u128  of the dataset
//!   48  schema       u128  the schema's content hash; zero if the record brings it
//!   64  the bytes of the record
//! ```
//!
//! All integers are little endian. Whoever has read such a record believes nothing of it before
//! [`open`]: bytes of another sample, another dataset or another time are as wrong as flipped ones.
//! Records that hold pickles do not travel: whoever could write to a disk or a server could run code.

use crate::fault::{Fault, active as broken};
use std::io::IoSlice;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

const MAGIC: u32 = u32::from_le_bytes(*b"stor");
/// The number of this format. Records of another are misses.
pub const FORMAT: u16 = 1;
/// The length of the head.
pub const HEAD: usize = 64;
/// The record brings its schema.
pub const INLINE_SCHEMA: u16 = 1;
/// What is left of the flags: the way in which the bytes are packed, or zero.
const PACKED: u16 = 0xff00;

const CHECKSUM: std::ops::Range<usize> = 24..32;

/// What the head says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The number of the sample.
    pub key: u64,
    /// Of the dataset.
    pub fingerprint: u128,
    /// The content hash of its schema; `None` if it brings it.
    pub schema: Option<u128>,
    /// How many bytes follow.
    pub len: u64,
}

/// Why a record is not the one that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// Fewer bytes, or more, than the head says.
    Length,
    /// It is no record.
    Magic,
    /// It is one of another version of stocache.
    Format,
    /// It is another sample's.
    Key,
    /// It is another dataset's.
    Fingerprint,
    /// Its bytes are not those that were written.
    Checksum,
}

/// A schema's content hash, by which it is known outside of the store that gave it a number.
pub fn schema_hash(schema: &[u8]) -> u128 {
    xxh3_128(schema)
}

/// The head of a record with these bytes.
pub fn seal(head: &Head, parts: &[IoSlice<'_>]) -> [u8; HEAD] {
    let mut bytes = [0; HEAD];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    let flags = if head.schema.is_none() { INLINE_SCHEMA } else { 0 };
    put(0, &MAGIC.to_le_bytes());
    put(4, &FORMAT.to_le_bytes());
    put(6, &flags.to_le_bytes());
    put(8, &head.key.to_le_bytes());
    put(16, &head.len.to_le_bytes());
    put(32, &head.fingerprint.to_le_bytes());
    put(48, &head.schema.unwrap_or(0).to_le_bytes());
    let sum = checksum(&bytes, head.fingerprint, parts.iter().map(|part| &**part));
    bytes[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The head of the same record with its bytes `packed`, in a way whose number is not zero. What
/// [`open`] and [`check`] see then is none.
pub fn repack(head: &[u8; HEAD], way: u8, packed: &[u8]) -> [u8; HEAD] {
    let fingerprint = u128::from_le_bytes(std::array::from_fn(|i| head[32 + i]));
    let mut bytes = *head;
    bytes[7] = way; // the upper half of the flags
    bytes[16..24].copy_from_slice(&(packed.len() as u64).to_le_bytes());
    bytes[CHECKSUM].fill(0);
    let sum = checksum(&bytes, fingerprint, std::iter::once(packed));
    bytes[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// In which way the bytes of a record say that they are packed; 0 if they are not. Nothing is checked.
pub fn packed_as(read: &[u8]) -> u8 {
    if read.len() < HEAD { 0 } else { read[7] }
}

/// What the head of a packed record of sample `key` says, and its bytes as they are, if that is what was read.
pub fn open_packed(read: &[u8], key: u64, fingerprint: u128) -> Result<(Head, &[u8]), Damage> {
    let (head, bytes) = read.split_first_chunk::<HEAD>().ok_or(Damage::Length)?;
    let parts = [IoSlice::new(bytes)];
    verify(head, &parts, key, fingerprint, is_sealed(head, &parts, fingerprint))
        .map(|(head, _)| (head, bytes))
}

/// The bytes of the record of sample `key`, if that is what was read.
pub fn open(read: &[u8], key: u64, fingerprint: u128) -> Result<(Head, &[u8]), Damage> {
    let (head, bytes) = read.split_first_chunk::<HEAD>().ok_or(Damage::Length)?;
    check(head, &[IoSlice::new(bytes)], key, fingerprint).map(|head| (head, bytes))
}

/// The same for bytes of which the caller knows that somebody sealed them, and nobody changed them since: the
/// checksum is not looked at.
pub fn open_vouched(read: &[u8], key: u64, fingerprint: u128) -> Result<(Head, &[u8]), Damage> {
    let (head, bytes) = read.split_first_chunk::<HEAD>().ok_or(Damage::Length)?;
    match verify(head, &[IoSlice::new(bytes)], key, fingerprint, |_| true)? {
        (head, 0) => Ok((head, bytes)),
        _packed => Err(Damage::Format),
    }
}

/// What the head of the record of sample `key` says, if these bytes are that record.
pub fn check(
    head: &[u8; HEAD],
    parts: &[IoSlice<'_>],
    key: u64,
    fingerprint: u128,
) -> Result<Head, Damage> {
    match verify(head, parts, key, fingerprint, is_sealed(head, parts, fingerprint))? {
        (head, 0) => Ok(head),
        _packed => Err(Damage::Format),
    }
}

/// Says whether a checksum is that of these bytes.
fn is_sealed(head: &[u8; HEAD], parts: &[IoSlice<'_>], fingerprint: u128) -> impl Fn(u64) -> bool {
    move |sum| {
        let mut unsummed = *head;
        unsummed[CHECKSUM].fill(0);
        checksum(&unsummed, fingerprint, parts.iter().map(|part| &**part)) == sum
    }
}

/// What the head says, and in which way the bytes are packed.
fn verify(
    head: &[u8; HEAD],
    parts: &[IoSlice<'_>],
    key: u64,
    fingerprint: u128,
    is_sealed: impl Fn(u64) -> bool,
) -> Result<(Head, u8), Damage> {
    let len: u64 = parts.iter().map(|part| part.len() as u64).sum();
    let field = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    let wide = |at: usize| u128::from(field(at)) | u128::from(field(at + 8)) << 64;
    let first = field(0);
    if broken(Fault::TrustTiers) {
        return Ok((Head { key, fingerprint, schema: Some(wide(48)), len }, 0));
    }
    if first as u32 != MAGIC {
        return Err(Damage::Magic);
    }
    let flags = (first >> 48) as u16;
    if (first >> 32) as u16 != FORMAT || flags & !(INLINE_SCHEMA | PACKED) != 0 {
        return Err(Damage::Format);
    }
    if field(16) != len {
        return Err(Damage::Length);
    }
    if !is_sealed(field(CHECKSUM.start)) {
        // Told apart for people: the seed is the fingerprint, so another one has another sum, too.
        return Err(if wide(32) == fingerprint { Damage::Checksum } else { Damage::Fingerprint });
    }
    if wide(32) != fingerprint {
        return Err(Damage::Fingerprint);
    }
    if field(8) != key {
        return Err(Damage::Key);
    }
    let schema = (flags & INLINE_SCHEMA == 0).then(|| wide(48));
    Ok((Head { key, fingerprint, schema, len }, (flags >> 8) as u8))
}

fn checksum<'a>(
    head: &[u8; HEAD],
    fingerprint: u128,
    parts: impl Iterator<Item = &'a [u8]>,
) -> u64 {
    let mut sum = Xxh3::with_seed(fingerprint as u64 ^ (fingerprint >> 64) as u64);
    sum.update(head);
    parts.for_each(|part| sum.update(part));
    sum.digest()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(head: &Head, bytes: &[u8]) -> Vec<u8> {
        let mut whole = seal(head, &[IoSlice::new(bytes)]).to_vec();
        whole.extend_from_slice(bytes);
        whole
    }

    fn head(key: u64, fingerprint: u128, schema: Option<u128>, bytes: &[u8]) -> Head {
        Head { key, fingerprint, schema, len: bytes.len() as u64 }
    }

    /// Golden bytes: whoever changes the format must notice, and raise FORMAT.
    #[test]
    fn the_bytes_of_a_portable_record_are_these() {
        let sealed =
            seal(&head(7, 3 << 64 | 2, Some(5 << 64 | 4), b"abc"), &[IoSlice::new(b"abc")]);
        let mut wanted = *b"stor\x01\0\0\0\x07\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0????????\
            \x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0";
        let sum: [u8; 8] = sealed[CHECKSUM].try_into().unwrap();
        wanted[CHECKSUM].copy_from_slice(&sum);
        assert_eq!(sealed, wanted);
        assert_eq!(u64::from_le_bytes(sum), GOLDEN_SUM);
        assert_eq!(schema_hash(b"\x01i"), GOLDEN_SCHEMA);
    }

    const GOLDEN_SUM: u64 = 15071892097642403798;
    const GOLDEN_SCHEMA: u128 = 113901503896504134764785021949525746193;

    #[test]
    fn damage_is_told_apart() {
        let whole = record(&head(7, 9, None, b"bytes"), b"bytes");
        let with = |at: usize, byte: u8| {
            let mut other = whole.clone();
            other[at] = byte;
            other
        };
        assert!(open(&whole, 7, 9).is_ok());
        assert_eq!(open(&whole[..HEAD - 1], 7, 9), Err(Damage::Length));
        assert_eq!(open(&whole[..HEAD + 1], 7, 9), Err(Damage::Length));
        assert_eq!(open(&with(0, b'x'), 7, 9), Err(Damage::Magic));
        assert_eq!(open(&with(4, 9), 7, 9), Err(Damage::Format));
        assert_eq!(open(&with(HEAD, b'x'), 7, 9), Err(Damage::Checksum));
        assert_eq!(open(&whole, 8, 9), Err(Damage::Key));
        assert_eq!(open(&whole, 7, 8), Err(Damage::Fingerprint));
        assert_eq!(
            open(&record(&head(7, 8, None, b"bytes"), b"bytes"), 7, 9),
            Err(Damage::Fingerprint)
        );
    }

    proptest! {
        #[test]
        fn what_was_sealed_is_opened_and_nothing_else(
            key: u64,
            other: u64,
            fingerprint: u128,
            schema: Option<u128>,
            bytes in proptest::collection::vec(any::<u8>(), 0..600),
            cut in 0usize..600,
            bit in 0usize..8 * 664,
        ) {
            let wanted = head(key, fingerprint, schema, &bytes);
            let (before, after) = bytes.split_at(cut.min(bytes.len()));
            let sealed = seal(&wanted, &[IoSlice::new(before), IoSlice::new(after)]);
            let mut whole = sealed.to_vec();
            whole.extend_from_slice(&bytes);
            prop_assert_eq!(open(&whole, key, fingerprint), Ok((wanted, &bytes[..])));
            prop_assert!(other == key || open(&whole, other, fingerprint).is_err());
            prop_assert!(open(&whole, key, !fingerprint).is_err());
            prop_assert!(open(&whole[..whole.len() - 1], key, fingerprint).is_err());
            let bit = bit % (8 * whole.len());
            whole[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(open(&whole, key, fingerprint).is_err());
        }

        #[test]
        fn a_packed_record_is_opened_as_such_alone(
            key: u64,
            fingerprint: u128,
            schema: Option<u128>,
            way in 1u8..,
            packed in proptest::collection::vec(any::<u8>(), 0..100),
            bit in 0usize..8 * 164,
        ) {
            let wanted = head(key, fingerprint, schema, b"what it was before");
            let before = seal(&wanted, &[IoSlice::new(b"what it was before")]);
            let mut whole = repack(&before, way, &packed).to_vec();
            whole.extend_from_slice(&packed);
            let opened = Head { len: packed.len() as u64, ..wanted };
            prop_assert_eq!(packed_as(&whole), way);
            prop_assert_eq!(open_packed(&whole, key, fingerprint), Ok((opened, &packed[..])));
            prop_assert_eq!(open(&whole, key, fingerprint), Err(Damage::Format));
            prop_assert!(open_packed(&whole, !key, fingerprint).is_err());
            let bit = bit % (8 * whole.len());
            whole[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(open_packed(&whole, key, fingerprint).is_err());
        }

        #[test]
        fn noise_is_no_record(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(open(&noise, 0, 0).is_err());
        }
    }
}
