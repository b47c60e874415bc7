//! Schemas on disk: appended to one file, never changed.
//!
//! ```text
//!   0   4   length of the schema
//!   4   4   zero
//!   8   8   XXH3 of the schema, seeded with its length
//!   16      the schema, and zeros up to a multiple of 8
//! ```

use crate::fault::reached;
use crate::sys::pages::PAGE;
use crate::sys::private_file::open_private;
use rustix::fs::OFlags;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const HEAD: usize = 16;
/// As many as memory keeps, and more would be no schemas: every sample of its own kind. Of a small budget
/// little, for this is beside it.
const MOST_BYTES: u64 = 1 << 20;
const MOST_OF_BUDGET: u64 = 1024;

/// All schemas in the file, damaged parts left out.
pub(super) fn read(path: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(path).unwrap_or_default();
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    let (mut found, mut at) = (Vec::new(), 0);
    while at + HEAD <= bytes.len() {
        let len = word(at) as usize; // the upper half is zero
        let schema = (at + HEAD).checked_add(len).and_then(|end| bytes.get(at + HEAD..end));
        match schema {
            Some(schema) if xxh3_64_with_seed(schema, len as u64) == word(at + 8) => {
                found.push(schema.to_vec());
                at += HEAD + len.next_multiple_of(8);
            }
            _ => at += 1, // a part of one may end anywhere, and what comes after it begins there
        }
    }
    found
}

/// Adds a schema, in one write: others may do the same at the same time.
pub(super) fn append(path: &Path, schema: &[u8], budget: u64) -> rustix::io::Result<()> {
    let file = open_private(path, OFlags::WRONLY | OFlags::APPEND)?;
    let mut bytes = (schema.len() as u64).to_le_bytes().to_vec();
    bytes.extend(xxh3_64_with_seed(schema, schema.len() as u64).to_le_bytes());
    bytes.extend(schema);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    let most = (budget / MOST_OF_BUDGET).clamp(PAGE as u64, MOST_BYTES);
    if rustix::fs::fstat(&file)?.st_size as u64 + bytes.len() as u64 > most {
        return Err(rustix::io::Errno::NOSPC);
    }
    reached("disk: schema to be written");
    match rustix::io::write(&file, &bytes)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(rustix::io::Errno::NOSPC), // what there is of it is no schema
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_come_back_past_what_is_damaged() {
        let path = std::env::temp_dir().join(format!("stocache-schemas-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        assert_eq!(read(&path), Vec::<Vec<u8>>::new());
        let schemas: Vec<Vec<u8>> = (1..40).map(|len| vec![len; usize::from(len)]).collect();
        for (n, schema) in schemas.iter().enumerate() {
            append(&path, schema, 1 << 30).unwrap();
            // A part of one, left by who was killed in the middle, or met a full disk.
            let part: &[u8] = match n {
                20 => &[9, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
                25 => &[9, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3],
                30 => &[9, 0, 0, 0, 0],
                _ => &[],
            };
            let bytes = [&std::fs::read(&path).unwrap()[..], part].concat();
            std::fs::write(&path, bytes).unwrap();
        }
        assert_eq!(read(&path), schemas);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[HEAD] ^= 1; // in the first
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(read(&path), schemas[1..]);
        std::fs::remove_file(&path).unwrap();
    }
}
