//! Keyed BLAKE3 of several messages at once.
//!
//! ```text
//!   a message     chunk 0   chunk 1   chunk 2   chunk 3        a processor works on up to 16 chunks at once:
//!                      \\    /             \\    /             those of a long message, or the first ones of
//!                     parent              parent             several messages, then the second ones, …
//!                           \\            /
//!                              the root
//! ```
//!
//! A sample of 3 KB is four chunks, with which a processor is as long busy as with sixteen. So short messages of
//! the same length are hashed side by side; what comes out is BLAKE3 as everybody has it. The crate does that for
//! the chunks of one message alone; its parts for that are public, though not promised to stay: where they went,
//! `blake3::keyed_hash` for each message is all that is needed here.

use blake3::{Hash, IncrementCounter, platform::Platform};

/// What BLAKE3 works on at a time; and so many of them a processor can do at once.
pub(super) const CHUNK: usize = 1024;
pub(super) const CHUNKS: usize = 16;

const BLOCK: usize = 64;
const OUT: usize = 32;
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 1 << 1;
const PARENT: u8 = 1 << 2;
const ROOT: u8 = 1 << 3;
const KEYED: u8 = 1 << 4;

/// A key, in both forms in which it is needed.
pub(super) struct Key {
    bytes: [u8; 32],
    words: [u32; 8],
}

impl Key {
    pub(super) fn new(bytes: [u8; 32]) -> Self {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|k| bytes[4 * at + k]));
        Self { bytes, words: std::array::from_fn(word) }
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.bytes
    }

    /// Of each of these messages, which are of one length.
    pub(super) fn tags(&self, messages: &[&[u8]]) -> Vec<Hash> {
        let len = messages.first().map_or(0, |message| message.len());
        let chunks = len / CHUNK;
        // A tree is simple where it is a full one; and long messages keep a processor busy alone.
        let side_by_side = len.is_multiple_of(CHUNK) && chunks.is_power_of_two() && chunks < CHUNKS;
        if messages.len() < 2 || !side_by_side || messages.iter().any(|it| it.len() != len) {
            return messages.iter().map(|it| blake3::keyed_hash(&self.bytes, it)).collect();
        }
        messages.chunks(CHUNKS).flat_map(|some| self.side_by_side(some, chunks)).collect()
    }

    /// Of up to CHUNKS messages of so many chunks.
    fn side_by_side(&self, messages: &[&[u8]], chunks: usize) -> Vec<Hash> {
        let platform = Platform::detect();
        let hashes = |len: usize| vec![0; len * OUT];
        // Chunk by chunk of all messages, and then message by message.
        let mut level = hashes(messages.len() * chunks);
        let mut out = hashes(messages.len());
        for chunk in 0..chunks {
            let inputs: Vec<&[u8; CHUNK]> =
                messages.iter().filter_map(|it| it[chunk * CHUNK..].first_chunk()).collect();
            let last = if chunks == 1 { CHUNK_END | ROOT } else { CHUNK_END };
            let counter = chunk as u64;
            let same = IncrementCounter::No;
            platform.hash_many(
                &inputs,
                &self.words,
                counter,
                same,
                KEYED,
                CHUNK_START,
                last,
                &mut out,
            );
            for (message, hash) in out.chunks_exact(OUT).enumerate() {
                level[(message * chunks + chunk) * OUT..][..OUT].copy_from_slice(hash);
            }
        }
        let mut width = chunks;
        while width > 1 {
            width /= 2;
            let root = if width == 1 { ROOT } else { 0 };
            let mut above = hashes(messages.len() * width);
            let parents: Vec<&[u8; BLOCK]> =
                level.chunks_exact(BLOCK).filter_map(|pair| pair.first_chunk()).collect();
            for (some, out) in parents.chunks(CHUNKS).zip(above.chunks_mut(CHUNKS * OUT)) {
                let same = IncrementCounter::No;
                platform.hash_many(some, &self.words, 0, same, KEYED | PARENT | root, 0, 0, out);
            }
            level = above;
        }
        let hash = |bytes: &[u8]| Hash::from_bytes(std::array::from_fn(|at| bytes[at]));
        level.chunks_exact(OUT).map(hash).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Whatever the crate does inside, this is BLAKE3.
    #[test]
    fn tags_of_several_messages_are_those_of_each() {
        let key = Key::new(std::array::from_fn(|at| at as u8 * 7 + 1));
        for len in [0, 1, 1023, 1024, 1025, 2048, 3072, 4096, 8192, 16_384, 32_768, 65_536] {
            for count in [1, 2, 3, 4, 7, 8, 15, 16, 17, 33] {
                let messages: Vec<Vec<u8>> = (0..count)
                    .map(|of: usize| {
                        (0..len).map(|at| (at * 31 + at / 251 + of * 97) as u8).collect()
                    })
                    .collect();
                let messages: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
                let each: Vec<Hash> =
                    messages.iter().map(|it| blake3::keyed_hash(key.bytes(), it)).collect();
                assert_eq!(key.tags(&messages), each, "{count} of {len} bytes");
            }
        }
        let unlike: [&[u8]; 2] = [&[1; 1024], &[1; 2048]];
        assert_eq!(key.tags(&unlike)[1], blake3::keyed_hash(key.bytes(), unlike[1]));
        assert!(key.tags(&[]).is_empty());
    }
}
