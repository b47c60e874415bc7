//! A record as it lies on a server.
//!
//! ```text
//!    0  magic    u32   MAGIC
//!    4  schema   u32   its length; 0 if the record brings it
//!    8  tag      32 bytes of BLAKE3, keyed with the job's secret
//!   40  the schema
//!    …  the record (records/portable.rs)
//! ```
//!
//! The tag is of the record, the schema, the name, zeros, and the three lengths: whole chunks of BLAKE3, as many as
//! a processor works on at once (`tags`). So it covers the name under which the value lies, which says the dataset,
//! its fingerprint and the sample; the schema; and the record. A value that somebody else wrote, that was moved to
//! another name, or that was cut or changed, is none. The schema is in each value: no other key is needed, and none
//! can be evicted alone.

use super::tags::{CHUNK, CHUNKS, Key};
use crate::fault::{Fault, active as broken};
use crate::records::portable::HEAD;
use blake3::Hasher;

const MAGIC: u32 = u32::from_le_bytes(*b"sto2");
/// What stands in front of the schema.
pub(super) const FRONT: usize = 40;
/// A longer schema is none.
const MOST_SCHEMA: usize = 1 << 20;
const TAG: std::ops::Range<usize> = 8..FRONT;
/// The lengths, at the end of what is tagged.
const LENGTHS: usize = 24;

/// The job's secret, as a key.
pub(super) struct Secret(Key);

impl Secret {
    pub(super) fn new(words: &[u8]) -> Self {
        Self(Key::new(blake3::derive_key("stocache 2026 tag of a value on a server", words)))
    }

    /// A tag of these parts; each is told from the next by the lengths.
    fn tag<'a>(
        &self,
        name: &[u8],
        schema: &[u8],
        record_len: usize,
        record: impl Iterator<Item = &'a [u8]>,
    ) -> blake3::Hash {
        let mut hasher = Hasher::new_keyed(self.0.bytes());
        record.for_each(|part| _ = hasher.update(part));
        let parts = record_len + schema.len() + name.len() + LENGTHS;
        let zeros = [0; CHUNK * CHUNKS];
        let zeros = &zeros[..tagged(record_len, schema.len(), name.len()) - parts];
        let lengths = lengths(record_len, schema.len(), name.len());
        hasher.update(schema).update(name).update(zeros).update(&lengths);
        hasher.finalize()
    }

    /// What stands in front of the schema and the record.
    pub(super) fn front<'a>(
        &self,
        name: &[u8],
        schema: &[u8],
        record_len: usize,
        record: impl Iterator<Item = &'a [u8]>,
    ) -> [u8; FRONT] {
        let mut front = [0; FRONT];
        front[..4].copy_from_slice(&MAGIC.to_le_bytes());
        front[4..8].copy_from_slice(&(schema.len() as u32).to_le_bytes());
        front[TAG].copy_from_slice(self.tag(name, schema, record_len, record).as_bytes());
        front
    }

    /// Of each of these values, whether somebody who has the secret wrote it, for its name: what is tagged of it,
    /// all of the same length, and the tag.
    pub(super) fn are_ours(&self, values: &[(&[u8], &Front)]) -> Vec<bool> {
        let tagged: Vec<&[u8]> = values.iter().map(|(tagged, _)| *tagged).collect();
        let tags = self.0.tags(&tagged);
        // blake3 compares hashes in constant time.
        let is_ours = |(tag, (_, front)): (blake3::Hash, &(&[u8], &Front))| {
            broken(Fault::TrustServers) || tag == front.tag
        };
        tags.into_iter().zip(values).map(is_ours).collect()
    }
}

/// Puts behind a record, which lies at the start of `memory`, what else is tagged: all of it. The memory is as long
/// as `tagged` says.
pub(super) fn completed<'m>(
    front: &Front,
    name: &[u8],
    schema: &[u8],
    memory: &'m mut [u8],
) -> &'m [u8] {
    let all = &mut memory[..tagged(front.record_len, schema.len(), name.len())];
    let (_, rest) = all.split_at_mut(front.record_len);
    let (to_schema, rest) = rest.split_at_mut(schema.len());
    to_schema.copy_from_slice(schema);
    let (to_name, rest) = rest.split_at_mut(name.len());
    to_name.copy_from_slice(name);
    let (zeros, to_lengths) = rest.split_at_mut(rest.len() - LENGTHS);
    zeros.fill(0);
    to_lengths.copy_from_slice(&lengths(front.record_len, schema.len(), name.len()));
    all
}

/// How many bytes a tag of such parts is of: whole chunks, as many as are done at once, or a multiple of that.
pub(super) fn tagged(record: usize, schema: usize, name: usize) -> usize {
    let chunks = (record + schema + name + LENGTHS).div_ceil(CHUNK);
    let done =
        if chunks <= CHUNKS { chunks.next_power_of_two() } else { chunks.next_multiple_of(CHUNKS) };
    done * CHUNK
}

fn lengths(record: usize, schema: usize, name: usize) -> [u8; LENGTHS] {
    let mut lengths = [0; LENGTHS];
    for (at, len) in [name, schema, record].into_iter().enumerate() {
        lengths[8 * at..8 * at + 8].copy_from_slice(&(len as u64).to_le_bytes());
    }
    lengths
}

/// What stands in front of a value that was read.
pub(super) struct Front {
    pub(super) schema_len: usize,
    pub(super) record_len: usize,
    tag: blake3::Hash,
}

impl Front {
    /// Of a value of so many bytes; None if it is none of ours.
    pub(super) fn parse(front: &[u8; FRONT], len: usize) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| front[at + i]));
        let schema_len = word(4) as usize;
        let record_len = len.checked_sub(FRONT)?.checked_sub(schema_len)?;
        let good = word(0) == MAGIC && schema_len <= MOST_SCHEMA && record_len >= HEAD;
        let tag: [u8; 32] = std::array::from_fn(|i| front[TAG.start + i]);
        good.then(|| Self { schema_len, record_len, tag: tag.into() })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Golden bytes: whoever changes the format must notice, and change MAGIC.
    #[test]
    fn the_front_of_a_value_is_this() {
        let record = [7; HEAD + 3];
        let (one, two) = record.split_at(20);
        let front =
            Secret::new(b"words").front(b"name", b"schema", record.len(), [one, two].into_iter());
        assert_eq!(front[..8], *b"sto2\x06\0\0\0");
        assert_eq!(
            blake3::Hash::from_bytes(front[TAG].try_into().unwrap()).to_hex().as_str(),
            GOLDEN
        );
    }

    const GOLDEN: &str = "a810e83f7b41da052ba5f0418e8e7f2a9d829f19ca8916f6451f034d89c30a19";

    fn is_ours(secret: &Secret, front: &Front, name: &[u8], schema: &[u8], record: &[u8]) -> bool {
        let len = tagged(record.len(), schema.len(), name.len());
        let mut memory = vec![0xff; len.max(tagged(front.record_len, schema.len(), name.len()))];
        memory[..record.len()].copy_from_slice(record);
        let front = Front { record_len: record.len(), ..*front };
        let all = completed(&front, name, schema, &mut memory);
        secret.are_ours(&[(all, &front)]) == [true] && memory.starts_with(record)
    }

    #[test]
    fn values_of_all_lengths_are_ours_and_others_are_not() {
        let secret = Secret::new(b"words");
        for len in (HEAD..3000).step_by(41).chain((15_900..17_500).step_by(97)).chain([150_528]) {
            let record: Vec<u8> = (0..len).map(|at| (at * 7 + at / 256) as u8).collect();
            let (one, two) = record.split_at(len / 3);
            let front = secret.front(b"name:1", b"schema", len, [one, two].into_iter());
            let front = Front::parse(&front, FRONT + 6 + len).unwrap();
            assert!(is_ours(&secret, &front, b"name:1", b"schema", &record), "{len}");
            let mut changed = record.clone();
            changed[len - 1] ^= 128;
            assert!(!is_ours(&secret, &front, b"name:1", b"schema", &changed), "{len}");
            changed[len - 1] ^= 128;
            changed.push(0); // as the zeros behind it are
            assert!(!is_ours(&secret, &front, b"name:1", b"schema", &changed), "{len}");
        }
    }

    #[test]
    fn only_the_very_value_is_ours() {
        let (secret, other) = (Secret::new(b"words"), Secret::new(b"Words"));
        let record = vec![1; HEAD + 9];
        let front = secret.front(b"a:1", b"ss", record.len(), std::iter::once(&record[..]));
        let parsed = Front::parse(&front, FRONT + 2 + record.len()).unwrap();
        assert_eq!((parsed.schema_len, parsed.record_len), (2, record.len()));
        assert!(is_ours(&secret, &parsed, b"a:1", b"ss", &record));
        let mut changed = record.clone();
        changed[HEAD] ^= 1;
        let mut longer = record.clone();
        longer.push(0);
        for (name, schema, record) in [
            (&b"a:2"[..], &b"ss"[..], &record),
            (b"a:1", b"st", &record),
            (b"a:1s", b"s", &record),
            (b"sa:1", b"s", &record),
            (b"a:1", b"ss", &changed),
            (b"a:1", b"ss", &longer),
        ] {
            assert!(!is_ours(&secret, &parsed, name, schema, record));
        }
        assert!(!is_ours(&other, &parsed, b"a:1", b"ss", &record));
    }

    #[test]
    fn lengths_that_cannot_be_are_no_value() {
        let record = [0; HEAD];
        let good = Secret::new(b"").front(b"", b"schema", HEAD, std::iter::once(&record[..]));
        assert!(Front::parse(&good, FRONT + 6 + HEAD).is_some());
        for len in [0, FRONT, FRONT + 5, FRONT + 6, FRONT + 6 + HEAD - 1] {
            assert!(Front::parse(&good, len).is_none(), "{len}");
        }
        let mut huge = good;
        huge[4..8].fill(0xff);
        assert!(Front::parse(&huge, usize::MAX).is_none());
        let mut foreign = good;
        foreign[0] = b'x';
        assert!(Front::parse(&foreign, FRONT + 6 + HEAD).is_none());
    }
}
