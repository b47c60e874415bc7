//! What is on this node, as C++ sees it.

use crate::bridge::ffi;
use crate::guard::{Crossing, guard};
use stocache::segment;

type Result<T> = std::result::Result<T, Crossing>;

pub fn list_caches() -> Result<Vec<ffi::Listed>> {
    let listed = |each: segment::Listed| ffi::Listed {
        name: each.name,
        path: each.path,
        user: each.user,
        format: each.format,
        kind: each.kind.to_string(),
        limit_bytes: each.limit_bytes,
        used_bytes: each.used_bytes,
        samples: each.samples,
        filled: each.filled.map_or(-1, |filled| filled as i64),
        keep: each.keep,
        in_use: each.in_use,
        pids: each.pids,
        fingerprint: format!("{:032x}", each.fingerprint),
        notes: each.notes,
        trouble: each.trouble,
    };
    guard(|| Ok(segment::list(stocache::space::count_records).into_iter().map(listed).collect()))
}

pub fn remove_cache(name: &str, force: bool) -> Result<Vec<String>> {
    guard(|| Ok(segment::remove(name, force)?))
}

pub fn describe_cache(name: &str, text: &str) -> Result<()> {
    guard(|| Ok(segment::describe(name, text)?))
}
