//! Folders of disk levels, for who uses none: as C++ sees them.

use crate::bridge::ffi;
use crate::guard::{Crossing, calm, guard};
use crate::handle::{argument, unknown};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Instant;
use stocache::disk::{self, Check, Compression};

type Result<T> = std::result::Result<T, Crossing>;

/// The records of a disk level, checked one after the other.
pub struct DiskCheck(Check);

fn path_of(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

pub fn inspect_disk(path: &[u8]) -> Result<ffi::DiskFolder> {
    guard(|| {
        let found = disk::inspect(path_of(path));
        let is_one = found.is_some();
        let found = found.unwrap_or_default();
        Ok(ffi::DiskFolder {
            is_one,
            user: found.user,
            fingerprint: format!("{:032x}", found.fingerprint),
            samples: found.samples,
            keyed: found.keyed,
            records: found.records,
            bytes: found.bytes,
            in_use: found.in_use,
            used_at: found.used_at,
            trouble: found.trouble,
        })
    })
}

pub fn remove_disk(path: &[u8], force: bool) -> Result<()> {
    guard(|| Ok(disk::remove(path_of(path), force)?))
}

pub fn tidy_disk(path: &[u8]) -> Result<Vec<String>> {
    guard(|| Ok(disk::tidy(path_of(path))?))
}

pub fn check_disk(path: &[u8]) -> Result<Box<DiskCheck>> {
    guard(|| Ok(Box::new(DiskCheck(Check::begin(path_of(path))?))))
}

impl DiskCheck {
    pub fn records(&self) -> u64 {
        calm(0, || self.0.records())
    }

    pub fn step(&mut self) -> Result<ffi::Checked> {
        guard(|| {
            let step = self.0.step()?;
            Ok(ffi::Checked { records: step.records, damaged: step.damaged })
        })
    }
}

/// The way of packing records of that name.
pub(crate) fn compression(name: &str) -> Result<Compression> {
    Compression::of(name).ok_or_else(|| unknown("compression", name, r#""zstd", "lz4" or None"#))
}

/// What it does with a record: once, after a first time that is not counted.
pub fn try_compression(way: &str, record: &[u8]) -> Result<ffi::PackTrial> {
    guard(|| {
        let way = compression(way)?;
        let parts = [IoSlice::new(record)];
        let mut trial =
            ffi::PackTrial { bytes: record.len() as u64, pack_nanos: 0, unpack_nanos: 0 };
        let mut into = Vec::new();
        into.try_reserve_exact(record.len()).map_err(|_| argument("no memory is left".into()))?;
        into.resize(record.len(), 0);
        for _ in 0..2 {
            let began = Instant::now();
            let packed = way.pack(&parts);
            trial.pack_nanos = began.elapsed().as_nanos() as u64;
            let Some(packed) = packed else { break };
            let began = Instant::now();
            let good = way.unpack(&packed, &mut into);
            trial.unpack_nanos = began.elapsed().as_nanos() as u64;
            debug_assert!(good && into == record);
            trial.bytes = packed.len() as u64;
        }
        Ok(trial)
    })
}
