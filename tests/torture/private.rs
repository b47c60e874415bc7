//! P12: what we make only its owner may reach, whatever the umask says.

use crate::files::{Disks, name};
use crate::processes::{open, request, unique};
use crate::{Run, Verdict};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use stocache::{Backing, Request, Served};

/// Segments with and without a name, copies of files and their folders, under one umask after the
/// other.
pub fn umasks(_run: &mut Run) -> Verdict {
    let mut looked = 0;
    for umask in [0o000, 0o022, 0o077, 0o777] {
        let disks = Disks::new(&format!("private-{umask:o}"), vec![1000; 6])?;
        // That one is the user's own.
        std::fs::create_dir(disks.root.join("near")).map_err(|error| error.to_string())?;
        // SAFETY: the harness has no other thread whose files this could change.
        let before = unsafe { libc::umask(umask) };
        let found = segments().and_then(|modes| Ok([modes, copies(&disks)?].concat()));
        // SAFETY: as above.
        unsafe { libc::umask(before) };
        for (path, mode, is_folder) in &found.map_err(|what| format!("umask {umask:o}: {what}"))? {
            if *mode != if *is_folder { 0o700 } else { 0o600 } {
                return Err(format!("umask {umask:o}: {} has mode {mode:o}", path.display()));
            }
            looked += 1;
        }
    }
    Ok(format!("{looked} files and folders are private"))
}

/// A path, its mode, and whether it is a folder.
type Rights = (PathBuf, u32, bool);

fn look(path: &Path) -> Result<Rights, String> {
    let meta = path.metadata().map_err(|error| format!("{}: {error}", path.display()))?;
    Ok((path.to_path_buf(), meta.permissions().mode() & 0o7777, meta.is_dir()))
}

fn segments() -> Result<Vec<Rights>, String> {
    let of = |backing| {
        let wanted = Request { backing, ..request(&unique("private"), 8, 4096) };
        let (cache, _) = open(&wanted)?;
        look(Path::new(&format!("/proc/self/fd/{}", cache.segment().location().fd)))
    };
    Ok(vec![of(Backing::Shm)?, of(Backing::Memfd)?])
}

fn copies(disks: &Disks) -> Result<Vec<Rights>, String> {
    let cache = disks.open(None, true)?;
    for i in 0..6 {
        match cache.fetch(name(i).as_bytes()) {
            Ok(Served::Copy(_)) => {}
            other => return Err(format!("no copy of file {i}: {other:?}")),
        }
    }
    let mut found = vec![look(cache.path())?];
    let mut next = 0;
    while next < found.len() {
        let (at, _, is_folder) = &found[next];
        let entries = is_folder.then(|| std::fs::read_dir(at).into_iter().flatten().flatten());
        let below: Vec<_> = entries.into_iter().flatten().map(|entry| entry.path()).collect();
        for path in below {
            found.push(look(&path)?);
        }
        next += 1;
    }
    Ok(found)
}
