//! What is on this node: every cache in /dev/shm and outside of it, whose it is, how large, and who
//! uses it; and how one is removed by its name.
//!
//! Looking changes nothing. Whether a cache is in use is asked of /proc first, then of the table of
//! locks, which shows those of other users too; the lock itself is tried only where both say nothing.
//!
//! Whatever another user can put there is read with pread(2) and believed as little as a header is:
//! only files that nobody else may reach are mapped, for one that shrinks is a SIGBUS.

use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active};
use crate::segment::layout::{self, Geometry, Header};
use crate::segment::lease;
use crate::segment::name::{SHM, file_name, path_of};
use crate::segment::parts::{NOTES_AT, NOTES_BYTES};
use crate::segment::space_layout::SpaceLayout;
use crate::sys::fork;
use crate::sys::mapping::Mapping;
use crate::sys::private_file::{check_private, open_checked, read_header, unlink_same, write_all};
use crate::sys::proc::numbers;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A cache as anybody on the node can see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listed {
    /// What its user calls it; empty if the name was removed while it is in use.
    pub name: String,
    /// Its file in /dev/shm; empty for a memfd and where the name was removed.
    pub path: String,
    /// Whose it is.
    pub user: u32,
    /// The number of its format; another build of stocache may not read it.
    pub format: u32,
    /// "slots", "records" or "files"; empty if it could not be read.
    pub kind: &'static str,
    /// Bytes that it may take.
    pub limit_bytes: u64,
    /// Bytes that it takes now.
    pub used_bytes: u64,
    /// Samples of its dataset.
    pub samples: u64,
    /// Samples that it holds; `None` where that could not be counted.
    pub filled: Option<u64>,
    /// It outlives its processes.
    pub keep: bool,
    /// A process has it open.
    pub in_use: bool,
    /// Those that can be seen from here.
    pub pids: Vec<u32>,
    /// What the data were said to be, hashed.
    pub fingerprint: u128,
    /// What whoever made it noted down (`describe`).
    pub notes: String,
    /// Why it could not be read; empty if it could.
    pub trouble: String,
}

/// How many records a space holds: only its own room, above this one, can tell.
pub type CountRecords = fn(&SpaceLayout, &Mapping) -> u64;

/// One look at everything.
pub fn list(count: CountRecords) -> Vec<Listed> {
    let users = users_of_segments();
    let locked = locked_files();
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(SHM).into_iter().flatten().flatten() {
        // Whose it is says the file, not its name: anybody can give it any.
        if let Some((_, format, name)) = parse(&entry.file_name().to_string_lossy())
            && let Ok(stat) = entry.metadata()
            && stat.is_file()
        {
            let (link, path) = (entry.path(), Some(entry.path()));
            let seen = Seen { user: stat.uid(), format, name, link, path };
            found.insert((stat.dev(), stat.ino()), seen);
        }
    }
    // What has no file any more: memfds, and caches whose name was removed while they are in use.
    for (id, user) in &users {
        if found.contains_key(id) {
            continue;
        }
        let (_, format, name) =
            user.file.as_deref().and_then(parse).unwrap_or((0, 0, String::new()));
        let seen = Seen { user: user.owner, format, name, link: user.link.clone(), path: None };
        found.insert(*id, seen);
    }
    let mut all: Vec<Listed> = found
        .into_iter()
        .map(|(id, seen)| {
            let pids =
                users.get(&id).map_or(Vec::new(), |user| user.pids.iter().copied().collect());
            let in_use = !pids.is_empty() || locked.contains(&id.1);
            look(seen, id, pids, in_use, count)
        })
        // Other programs make nameless files in /dev/shm, too.
        .filter(|listed| !(listed.name.is_empty() && listed.kind.is_empty()))
        .collect();
    all.sort_by(|a, b| (a.user, &a.name).cmp(&(b.user, &b.name)));
    all
}

/// Notes down, in the cache of that name that this process has open, what it was made for: `text`
/// is shown to people and compared with that of others, and nothing depends on it.
pub fn describe(name: &str, text: &str) -> Result<()> {
    let mut notes = text.as_bytes().to_vec();
    notes.truncate(NOTES_BYTES);
    notes.resize(NOTES_BYTES, 0);
    let _unforked = fork::hold();
    let named = open_checked(&path_of(name)).ok().flatten();
    let Some(file) = named.or_else(|| own_memfd(name)) else { return Ok(()) };
    let readable = read_header(file.as_fd()).ok().map(|(bytes, len)| Header::decode(&bytes, len));
    if let Some(Ok(_)) = readable {
        write_all(file.as_fd(), &notes, NOTES_AT as u64)
            .map_err(|errno| Error::system("cannot describe the cache", errno))?;
    }
    Ok(())
}

/// Removes the caches of that name, of any format; returns the files that went. One that is in use
/// loses only its name, and only with `force`: its processes go on. An error if no file went.
pub fn remove(name: &str, force: bool) -> Result<Vec<String>> {
    let all: Vec<Listed> = list(|_, _| 0).into_iter().filter(|each| each.name == name).collect();
    let user = rustix::process::geteuid().as_raw();
    let (with_file, without): (Vec<&Listed>, Vec<&Listed>) =
        all.iter().filter(|each| each.user == user).partition(|each| !each.path.is_empty());
    let mut refusals = Vec::new();
    let mut removed = Vec::new();
    for each in with_file {
        match remove_file(each, force) {
            Ok(true) => removed.push(each.path.clone()),
            Ok(false) => {}
            Err(refusal) => refusals.push(refusal),
        }
    }
    if !removed.is_empty() {
        return Ok(removed);
    }
    let refused = |why: String| Error::new(Kind::Refused, why);
    let absent = |why: String| Error::new(Kind::State, why);
    Err(match (refusals.pop(), without.first(), all.first()) {
        (Some(refusal), ..) => refusal,
        (None, Some(without), _) => absent(format!(
            "the cache {name:?} has no file: it lies in the memory of {} and ends with them",
            processes(&without.pids)
        )),
        (None, None, Some(other)) if other.user != user => refused(format!(
            "the cache {name:?} belongs to user {}, we are user {user}; run this as that user",
            other.user
        )),
        _ => {
            absent(format!("there is no cache named {name:?}; `stocache ls` shows those there are"))
        }
    })
}

/// Whether its file went; `false` if somebody else was faster.
fn remove_file(cache: &Listed, force: bool) -> Result<bool> {
    let path = Path::new(&cache.path);
    let _unforked = fork::hold();
    let refused = |why: String| Error::new(Kind::Refused, format!("{}: {why}", cache.path));
    let Some(file) = open_checked(path).map_err(refused)? else { return Ok(false) };
    let free = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    if !free && !force {
        return Err(Error::new(
            Kind::State,
            format!(
                "the cache {:?} is in use by {}; end them, or remove its name alone with \
                 --force: they go on with what they have",
                cache.name,
                processes(&cache.pids)
            ),
        ));
    }
    Ok(unlink_same(file.as_fd(), path))
}

fn processes(pids: &[u32]) -> String {
    match pids {
        [] => "processes that cannot be seen from here".to_string(),
        [one] => format!("process {one}"),
        many => {
            let numbers: Vec<String> = many.iter().map(u32::to_string).collect();
            format!("processes {}", numbers.join(", "))
        }
    }
}

/// A segment's file, not looked into yet.
struct Seen {
    user: u32,
    format: u32,
    name: String,
    /// Where it can be opened.
    link: PathBuf,
    path: Option<PathBuf>,
}

fn look(seen: Seen, id: (u64, u64), pids: Vec<u32>, in_use: bool, count: CountRecords) -> Listed {
    let mut listed = Listed {
        name: seen.name,
        path: seen.path.map_or(String::new(), |path| path.display().to_string()),
        user: seen.user,
        format: seen.format,
        pids,
        in_use,
        ..Listed::default()
    };
    // A child must not inherit the lock that may be tried below.
    let _unforked = fork::hold();
    let file = match open_seen(&seen.link, listed.path.is_empty(), id) {
        Ok((file, stat)) => {
            listed.limit_bytes = stat.st_size as u64;
            listed.used_bytes = stat.st_blocks as u64 * 512;
            file
        }
        Err(errno) => {
            // What it takes is no secret.
            if let Ok(stat) = std::fs::symlink_metadata(&seen.link) {
                listed.limit_bytes = stat.len();
                listed.used_bytes = stat.blocks() * 512;
            }
            listed.trouble = format!("cannot be opened ({errno})");
            return listed;
        }
    };
    if !listed.in_use {
        let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        listed.in_use = locked.is_err();
    }
    if let Err(why) = read(&file, &mut listed, count) {
        listed.trouble = why;
    }
    listed
}

/// Opens what was seen, if it is still that. A link of /proc has to be followed, one in /dev/shm may
/// be anybody's.
fn open_seen(
    link: &Path,
    in_proc: bool,
    id: (u64, u64),
) -> rustix::io::Result<(OwnedFd, rustix::fs::Stat)> {
    let follow = if in_proc { OFlags::empty() } else { OFlags::NOFOLLOW };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | follow;
    let file = rustix::fs::openat(CWD, link, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if (stat.st_dev, stat.st_ino) != id {
        return Err(rustix::io::Errno::STALE);
    }
    Ok((file, stat))
}

/// What the segment says of itself.
fn read(
    file: &OwnedFd,
    listed: &mut Listed,
    count: CountRecords,
) -> std::result::Result<(), String> {
    let (bytes, len) = read_header(file.as_fd())?;
    if !layout::is_ours(&bytes) {
        return Err("is no cache".into());
    }
    listed.keep = layout::is_kept(&bytes);
    let header = Header::decode(&bytes, len).map_err(|error| error.message().to_string())?;
    listed.fingerprint = header.fingerprint;
    listed.samples = header.geometry.dataset_len();
    let mut notes = vec![0; NOTES_BYTES];
    let read = rustix::io::pread(file, &mut notes[..], NOTES_AT as u64).unwrap_or(0);
    let text = notes[..read].split(|&byte| byte == 0).next().unwrap_or_default();
    listed.notes = String::from_utf8_lossy(text).into_owned();
    listed.kind = match &header.geometry {
        Geometry::Slots(_) => "slots",
        Geometry::Records(_) => "records",
        Geometry::Files(_) => "files",
        Geometry::Disk(_) => "disk",
    };
    let ours = rustix::fs::fstat(file).is_ok_and(|stat| check_private(&stat).is_ok());
    if !ours && !active(Fault::MapOthers) {
        return Ok(());
    }
    let Ok(mapping) = Mapping::map(file.as_fd(), len as usize) else { return Ok(()) };
    listed.filled = match &header.geometry {
        Geometry::Slots(g) => {
            let at = g.layout().map_err(|error| error.message().to_string())?.states_at;
            Some(lease::slots(&mapping, at, g.capacity).filled())
        }
        Geometry::Records(g) => g.layout().ok().map(|layout| count(&layout.space, &mapping)),
        Geometry::Disk(g) => g.layout().ok().map(|layout| count(&layout.space, &mapping)),
        Geometry::Files(_) => None,
    };
    Ok(())
}

/// "stocache-<user>-<format>-<name>".
fn parse(file: &str) -> Option<(u32, u32, String)> {
    let mut parts = file.strip_prefix("stocache-")?.splitn(3, '-');
    let (user, format, name) = (parts.next()?, parts.next()?, parts.next()?);
    Some((user.parse().ok()?, format.parse().ok()?, name.to_string()))
}

/// Processes that have one file open.
#[derive(Default)]
struct Users {
    pids: BTreeSet<u32>,
    /// Whose the file is.
    owner: u32,
    /// One of their descriptors.
    link: PathBuf,
    /// The name that the file has or had.
    file: Option<String>,
}

/// By device and inode.
fn users_of_segments() -> BTreeMap<(u64, u64), Users> {
    let mut found: BTreeMap<(u64, u64), Users> = BTreeMap::new();
    for pid in numbers(Path::new("/proc")) {
        for fd in numbers(&PathBuf::from(format!("/proc/{pid}/fd"))) {
            let link = PathBuf::from(format!("/proc/{pid}/fd/{fd}"));
            let Ok(target) = std::fs::read_link(&link) else { continue };
            let target = target.to_string_lossy();
            let target = target.strip_suffix(" (deleted)").unwrap_or(&target);
            let in_shm = target.strip_prefix(SHM).and_then(|rest| rest.strip_prefix('/'));
            let file = in_shm.or_else(|| target.strip_prefix("/memfd:"));
            // Whoever made a file before it had a name goes on showing it as a number.
            let unnamed = in_shm.is_some_and(|file| file.starts_with('#'));
            let ours = file.is_some_and(|file| parse(file).is_some());
            if (ours || unnamed)
                && let Ok(stat) = std::fs::metadata(&link)
            {
                let users = found.entry((stat.dev(), stat.ino())).or_default();
                users.pids.insert(pid);
                users.owner = stat.uid();
                if ours {
                    users.file = file.map(str::to_string);
                }
                users.link = link;
            }
        }
    }
    found
}

/// Inodes on which somebody holds a lock, whoever it is. Numbers of other file systems among them
/// make a leftover look used, never the other way round.
fn locked_files() -> BTreeSet<u64> {
    let table = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let inode = |line: &str| line.split_whitespace().nth(5)?.rsplit(':').next()?.parse().ok();
    table.lines().filter(|line| line.contains("FLOCK")).filter_map(inode).collect()
}

/// The memfd of that name that this process has open.
fn own_memfd(name: &str) -> Option<OwnedFd> {
    let wanted = format!("/memfd:{} (deleted)", file_name(name));
    numbers(Path::new("/proc/self/fd")).into_iter().find_map(|fd| {
        let link = format!("/proc/self/fd/{fd}");
        (std::fs::read_link(&link).ok()?.to_str()? == wanted).then_some(())?;
        rustix::fs::openat(CWD, link, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::layout::{FORMAT, RecordsGeometry};
    use crate::segment::name::{file_prefix, random_name};
    use crate::segment::{Backing, Request, Segment};
    use std::os::unix::fs::PermissionsExt;

    fn request(name: &str, backing: Backing, keep: bool) -> Request {
        let room = RecordsGeometry::plan(1 << 20, 8, false).unwrap();
        Request { backing, keep, ..Request::new(name, Geometry::Records(room)) }
    }

    fn listed(name: &str) -> Vec<Listed> {
        list(|_, _| 7).into_iter().filter(|each| each.name == name).collect()
    }

    #[test]
    fn file_names_are_told_from_those_of_others() {
        let good = format!("{}{FORMAT}-a-name-7", file_prefix());
        let user = rustix::process::geteuid().as_raw();
        assert_eq!(parse(&good), Some((user, FORMAT, "a-name-7".into())));
        for other in ["stocache-batch", "stocache-1-a-b", "stocache-1-2", "torch_1_2", "#12"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn what_others_may_change_is_read_and_not_mapped() {
        let name = random_name().unwrap();
        let (segment, _) = Segment::open(&request(&name, Backing::Shm, false)).unwrap();
        let path = segment.path().unwrap();
        assert_eq!(listed(&name)[0].filled, Some(7));
        // As good as another user's: others may make it shorter at any time.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        let open = listed(&name);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!((open[0].kind, open[0].samples, open[0].filled), ("records", 8, None));
        assert_eq!(open[0].trouble, "");
    }

    #[test]
    fn a_file_is_removed_though_caches_of_its_name_live_without_one() {
        for backing in [Backing::Memfd, Backing::Shm] {
            let name = random_name().unwrap();
            let (nameless, _) = Segment::open(&request(&name, backing, false)).unwrap();
            if backing == Backing::Shm {
                // Whoever joins goes on showing the name; whoever made it never did.
                let (joined, _) = Segment::join(&name, None).unwrap();
                drop(nameless);
                assert_eq!(remove(&name, true).unwrap().len(), 1);
                check(&name, joined);
            } else {
                check(&name, nameless);
            }
        }

        fn check(name: &str, nameless: Segment) {
            let (kept, _) = Segment::open(&request(name, Backing::Shm, true)).unwrap();
            let path = kept.path().unwrap().display().to_string();
            let in_use = remove(name, false).unwrap_err().to_string();
            assert!(in_use.contains("is in use by process"), "{in_use}");
            drop(kept);
            assert_eq!(listed(name).len(), 2);
            assert_eq!(remove(name, false).unwrap(), [path]);
            let without = remove(name, true).unwrap_err().to_string();
            assert!(without.contains("has no file: it lies in the memory of"), "{without}");
            drop(nameless);
            let gone = remove(name, true).unwrap_err().to_string();
            assert!(gone.contains("there is no cache named"), "{gone}");
        }
    }
}
