//! What callers say and are told.

use std::path::PathBuf;

/// When a copy is compared with its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// At the first use in a job.
    Once,
    /// At every use.
    Always,
    /// Not if there is a copy that we made.
    Never,
}

/// What to cache, and how.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// The far folder; absolute.
    pub source: PathBuf,
    /// The folder to keep copies in; absolute.
    pub cache: PathBuf,
    /// Bytes that copies may take.
    pub limit: Option<u64>,
    /// Remove what was not used for longest to make room; else what is there stays.
    pub evict: bool,
    /// When to compare.
    pub check: Check,
    /// Keep a hash of every copy, and compare it when the copy is.
    pub hashed: bool,
    /// How many files are expected.
    pub files: u64,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// The path of a whole copy.
    Copy(Vec<u8>),
    /// The path of the source, because there is no copy and none can be made now.
    Source(Vec<u8>),
}

/// What a comparison found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There is no copy.
    Absent,
    /// The copy is what the source has.
    Same,
    /// It is not, and was removed if it was ours.
    Differs,
}

/// Sums over all processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of counters.rs
pub struct FileStats {
    pub hits: u64,
    pub copies: u64,
    pub copied_bytes: u64,
    pub copy_nanos: u64,
    pub waits: u64,
    pub passed: u64,
    pub failed: u64,
    pub stale: u64,
    pub evicted: u64,
    pub too_large: u64,
    /// Files that are ours at this moment, and their bytes.
    pub files: u64,
    pub bytes: u64,
}
