//! A cache of files as C++ holds it.

use crate::bridge::ffi;
use crate::guard::{Crossing, calm, guard};
use crate::handle::unknown;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;
use stocache::{Check, FileCache, FileOptions, Served, Verdict};

type Result<T> = std::result::Result<T, Crossing>;

/// A cache of files, open in this process.
pub struct Files(Arc<FileCache>);

/// Opens a cache of files. A folder that cannot be used is no error: see `trouble`.
pub fn open_files(options: &ffi::FileOptions) -> Result<Box<Files>> {
    guard(|| {
        let path = |bytes: &Vec<u8>| PathBuf::from(OsString::from_vec(bytes.clone()));
        let evict = match options.policy.as_str() {
            "lru" => true,
            "freeze" => false,
            other => return Err(unknown("policy", other, r#""lru" or "freeze""#)),
        };
        let check = match options.check.as_str() {
            "once" => Check::Once,
            "always" => Check::Always,
            "never" => Check::Never,
            other => return Err(unknown("check", other, r#""once", "always" or "never""#)),
        };
        let cache = FileCache::open(FileOptions {
            source: path(&options.source),
            cache: path(&options.cache),
            limit: (options.limit > 0).then_some(options.limit),
            evict,
            check,
            hashed: options.hashed,
            files: options.files,
        })?;
        Ok(Box::new(Files(cache)))
    })
}

fn path_to(served: Served) -> ffi::PathTo {
    match served {
        Served::Copy(path) => ffi::PathTo { path, copy: true },
        Served::Source(path) => ffi::PathTo { path, copy: false },
    }
}

impl Files {
    pub fn hit(&self, name: &[u8]) -> Vec<u8> {
        calm(Vec::new(), || self.0.hit(name).unwrap_or_default())
    }

    pub fn fetch(&self, name: &[u8]) -> Result<ffi::PathTo> {
        guard(|| Ok(path_to(self.0.fetch(name)?)))
    }

    pub fn fetch_behind(&self, name: &[u8]) -> Result<ffi::PathTo> {
        guard(|| Ok(path_to(self.0.fetch_behind(name)?)))
    }

    pub fn source_of(&self, name: &[u8]) -> Vec<u8> {
        self.0.source_of(name)
    }

    pub fn contains(&self, name: &[u8]) -> bool {
        calm(false, || self.0.contains(name))
    }

    pub fn names(&self) -> Result<Vec<u8>> {
        guard(|| {
            let mut joined = Vec::new();
            for name in self.0.names() {
                joined.extend(name);
                joined.push(0);
            }
            Ok(joined)
        })
    }

    pub fn verify(&self, name: &[u8]) -> Result<ffi::Compared> {
        guard(|| {
            Ok(match self.0.verify(name)? {
                Verdict::Absent => ffi::Compared::Absent,
                Verdict::Same => ffi::Compared::Same,
                Verdict::Differs => ffi::Compared::Differs,
            })
        })
    }

    pub fn clear(&self) -> Result<u64> {
        guard(|| Ok(self.0.clear()))
    }

    pub fn stats(&self) -> Result<ffi::FileStats> {
        let s = guard(|| Ok::<_, Crossing>(self.0.stats()))?;
        Ok(ffi::FileStats {
            hits: s.hits,
            copies: s.copies,
            copied_bytes: s.copied_bytes,
            copy_nanos: s.copy_nanos,
            waits: s.waits,
            passed: s.passed,
            failed: s.failed,
            stale: s.stale,
            evicted: s.evicted,
            too_large: s.too_large,
            files: s.files,
            bytes: s.bytes,
        })
    }

    pub fn folder(&self) -> Vec<u8> {
        self.0.path().as_os_str().as_bytes().to_vec()
    }

    pub fn trouble(&self) -> String {
        self.0.trouble().unwrap_or_default().to_string()
    }

    pub fn news(&self) -> String {
        calm(String::new(), || self.0.take_news().unwrap_or_default())
    }
}
