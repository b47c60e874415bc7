//! P6: a full mount freezes the cache; it never kills.
//!
//! Needs a small tmpfs of its own on /dev/shm: tests/promises.rs makes one in a mount namespace.

use crate::processes::{open, request, unique};
use crate::{Run, Verdict};
use std::path::Path;
use stocache::{HugePages, Load, Request, Stored};

/// Somebody else fills the mount after the cache was made; then the cache is filled.
pub fn mount(_run: &mut Run) -> Verdict {
    fill(HugePages::No)
}

/// The same with huge pages: asking for one must not be what kills.
pub fn mount_of_huge_pages(_run: &mut Run) -> Verdict {
    fill(HugePages::Yes)
}

fn fill(huge_pages: HugePages) -> Verdict {
    const BYTES: u64 = 256 << 10;
    let mount =
        stocache::sys::limits::mount(Path::new("/dev/shm")).map_err(|error| error.to_string())?;
    if mount.size > 64 << 20 {
        return Err(
            "refusing to fill a /dev/shm of more than 64 MiB; run inside a small tmpfs".into()
        );
    }
    let slots = mount.free / BYTES - 2;
    let request = Request { huge_pages, ..request(&unique("full"), slots, BYTES) };
    let (cache, _) = open(&request)?;
    let hog = Path::new("/dev/shm/somebody-else");
    std::fs::write(hog, vec![1u8; (mount.free / 2) as usize]).map_err(|error| error.to_string())?;
    let value = vec![5u8; BYTES as usize];
    let (mut stored, mut froze) = (0, 0);
    for i in 0..slots {
        match cache.store(i as i64, &value, false).map_err(|error| error.to_string())? {
            Stored::Done => stored += 1,
            Stored::Refused(first) => froze += u64::from(first),
            other => return Err(format!("slot {i}: {other:?}")),
        }
    }
    if froze != 1 || !cache.stats().frozen || stored == 0 || stored == slots {
        return Err(format!("{stored} of {slots} stored, frozen {froze} times"));
    }
    let readable =
        (0..slots).filter(|&i| matches!(cache.load(i as i64), Load::Hit(_))).count() as u64;
    if readable != stored {
        return Err(format!("{stored} stored but {readable} readable"));
    }
    // Space comes back, and clear() lets the cache use it.
    std::fs::remove_file(hog).map_err(|error| error.to_string())?;
    cache.clear().map_err(|error| error.to_string())?;
    match cache.store(slots as i64 - 1, &value, false).map_err(|error| error.to_string())? {
        Stored::Done => {
            Ok(format!("froze after {stored} of {slots} samples, all of them readable, and thawed"))
        }
        other => Err(format!("still frozen after clear: {other:?}")),
    }
}
