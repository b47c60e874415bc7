//! A store whose header is damaged. Nothing in it can be believed without, so it is made anew where it is: if
//! nobody uses it, and there is nothing in the folder that is not ours.

use super::folder::{Folder, Unreadable, is_ours, unlink};
use super::members;
use crate::fault::{Fault, active as broken, reached};
use crate::sys::private_file::check_folder;
use std::path::Path;

/// Removes what is left of a store that was damaged; what was wrong with it. None if nothing was removed.
pub(super) fn remove_damaged(path: &Path) -> Option<String> {
    let _damaged = damage(path)?;
    check_folder(path).ok()?;
    if broken(Fault::MendInUse) {
        return remove(path);
    }
    // Others may have come to the same, and done it.
    members::alone(path, || remove(path))?
}

fn damage(path: &Path) -> Option<String> {
    match Folder::read(path) {
        Err(Unreadable::Damaged(why)) => Some(why),
        _ => None,
    }
}

fn remove(path: &Path) -> Option<String> {
    let why = damage(path)?;
    let entries = std::fs::read_dir(path).ok()?;
    let names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.iter().all(|name| is_ours(name)).then_some(())?;
    // The header last: until it is gone, this begins again. What says who uses it, and how long it stays, stays.
    let goes = |name: &&String| !matches!(name.as_str(), "store" | "lock" | "temporary");
    names.iter().filter(goes).try_for_each(|name| unlink(path, name)).ok()?;
    reached("disk: damaged files removed");
    unlink(path, "store").ok()?;
    Some(why)
}
