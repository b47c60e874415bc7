//! The cache of files: no half file, no file twice, nothing removed that somebody is about to open,
//! nothing stuck, however many processes are killed, stopped or forked.
//!
//! The bytes of a file follow from its number and its size, and so does its time of change.

use crate::processes::{Child, Random, Tally};
use crate::tear::{READS, TORN, kill};
use crate::{Run, Verdict};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};
use stocache::{Check, FileCache, FileOptions, Served};

const PASSED: usize = 2;
const STARTED: usize = 3;
/// Only turns a hang into a message.
const HANG: Duration = Duration::from_secs(60);

/// A far folder and a place for a near one, both gone at the end.
pub struct Disks {
    pub root: PathBuf,
    sizes: Vec<usize>,
}

impl Disks {
    pub fn new(what: &str, sizes: Vec<usize>) -> Result<Self, String> {
        let root = std::env::temp_dir().join(format!("torture-{what}-{}", std::process::id()));
        let disks = Self { root, sizes };
        let fail = |error: std::io::Error| error.to_string();
        for i in 0..disks.sizes.len() {
            let path = disks.root.join("far").join(name(i));
            std::fs::create_dir_all(path.parent().expect("a folder")).map_err(fail)?;
            std::fs::write(&path, content(i, disks.sizes[i])).map_err(fail)?;
            let file = std::fs::File::options().write(true).open(&path).map_err(fail)?;
            file.set_modified(time(i)).map_err(fail)?;
        }
        Ok(disks)
    }

    pub fn count(&self) -> usize {
        self.sizes.len()
    }

    pub fn total(&self) -> u64 {
        self.sizes.iter().sum::<usize>() as u64
    }

    fn largest(&self) -> u64 {
        self.sizes.iter().copied().max().unwrap_or(0) as u64
    }

    pub fn open(&self, limit: Option<u64>, evict: bool) -> Result<Arc<FileCache>, String> {
        let cache = FileCache::open(FileOptions {
            source: self.root.join("far"),
            cache: self.root.join("near"),
            limit,
            evict,
            check: Check::Once,
            hashed: false,
            files: self.sizes.len() as u64,
        })
        .map_err(|error| format!("open failed: {error}"))?;
        match cache.trouble() {
            Some(trouble) => Err(format!("open failed: {trouble}")),
            None => Ok(cache),
        }
    }

    /// The one folder that the cache has made.
    fn folder(&self) -> Option<PathBuf> {
        std::fs::read_dir(self.root.join("near")).ok()?.flatten().next().map(|e| e.path())
    }

    /// Every file under its final name: its number and path.
    fn copies(&self) -> Vec<(usize, PathBuf)> {
        let Some(folder) = self.folder() else { return Vec::new() };
        (0..self.sizes.len()).map(|i| (i, folder.join("files").join(name(i)))).collect()
    }

    pub fn parts(&self) -> Vec<PathBuf> {
        let parts = self.folder().and_then(|folder| std::fs::read_dir(folder.join("parts")).ok());
        parts.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    }

    /// Bytes on the near disk.
    fn used(&self) -> u64 {
        let parts = self.parts().into_iter();
        let copies = self.copies().into_iter().map(|(_, path)| path);
        parts.chain(copies).filter_map(|path| Some(path.metadata().ok()?.len())).sum()
    }

    /// Whether the file at `path` is file `i`, whole; an error if it is not there.
    pub fn check(&self, i: usize, path: &Path) -> std::io::Result<bool> {
        use std::io::Read;
        let mut file = std::fs::File::open(path)?;
        let mut bytes = Vec::with_capacity(self.sizes[i]);
        file.read_to_end(&mut bytes)?;
        Ok(file.metadata()?.modified()? == time(i) && bytes == content(i, self.sizes[i]))
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.root);
    }
}

pub fn name(i: usize) -> String {
    format!("{}/{i}.bin", i % 3)
}

fn time(i: usize) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::new(1_600_000_000 + i as u64, 123_456_789 + i as u32)
}

fn content(i: usize, size: usize) -> Vec<u8> {
    let seed = (i as u64) << 32 | size as u64;
    let words = (0..size.div_ceil(8) as u64).flat_map(|at| (seed ^ at).to_le_bytes());
    let mut bytes: Vec<u8> = words.collect();
    bytes.truncate(size);
    bytes
}

/// From nothing to some MB, most of them small.
pub fn sizes(count: usize, random: &mut Random) -> Vec<usize> {
    let size = |i: usize, random: &mut Random| match i % 8 {
        0 => i % 3,
        1 => 500_000 + random.below(1_500_000) as usize,
        _ => random.below(100_000) as usize,
    };
    (0..count).map(|i| size(i, random)).collect()
}

pub fn path_of(served: &Served) -> &Path {
    let (Served::Copy(path) | Served::Source(path)) = served;
    Path::new(std::ffi::OsStr::from_bytes(path))
}

/// As a dataset does: the quick way, then the other one.
pub fn ask(cache: &FileCache, i: usize) -> Result<Served, String> {
    match cache.hit(name(i).as_bytes()) {
        Some(path) => Ok(Served::Copy(path)),
        None => cache.fetch(name(i).as_bytes()).map_err(|error| error.to_string()),
    }
}

/// Asks for a file, opens what was given and looks at it.
fn visit(disks: &Disks, cache: &FileCache, i: usize, tally: &Tally) {
    let served = ask(cache, i).expect("a path");
    if matches!(served, Served::Source(_)) {
        return tally.add(PASSED);
    }
    match disks.check(i, path_of(&served)) {
        Ok(true) => tally.add(READS),
        Ok(false) => {
            eprintln!("file {i} is not whole");
            tally.add(TORN);
        }
        Err(error) => {
            eprintln!("file {i}: {error}");
            tally.add(TORN);
        }
    }
}

/// Processes are killed while they copy and evict. Under its final name, a file is whole at every
/// moment; in the end one more process finishes everything.
pub fn killed(run: &mut Run) -> Verdict {
    let disks = Disks::new("files-killed", sizes(64, &mut run.random))?;
    let tally = Tally::new();
    let (shared, counts) = (&disks, &tally);
    // Looks at what is there, whoever makes it.
    let watcher = Child::fork(|| {
        loop {
            for (i, path) in shared.copies() {
                if matches!(shared.check(i, &path), Ok(false)) {
                    eprintln!("half a file under its final name: {}", path.display());
                    counts.add(TORN);
                }
            }
        }
    });
    let work = move |mut random: Random| {
        // Each opens the cache by itself, so that kills meet that too.
        let cache = shared.open(Some(shared.total() / 2), true).expect("an open cache");
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (cache, mut random) = (&cache, Random::new(random.next()));
                scope.spawn(move || {
                    loop {
                        let i = random.below(shared.sizes.len() as u64) as usize;
                        visit(shared, cache, i, counts);
                    }
                });
            }
        });
    };
    run.count = run.count.div_ceil(2);
    kill(run, &tally, work)?;
    // And while one process lives, which has to make up for what the others leave in the table.
    let survivor = disks.open(None, true)?;
    kill(run, &tally, work)?;
    for i in 0..disks.sizes.len() {
        if let Served::Source(_) = ask(&survivor, i)? {
            return Err(format!("there is no room for file {i}: {:?}", survivor.stats()));
        }
    }
    if survivor.stats().bytes != disks.total() {
        return Err(format!("{} bytes, but {:?}", disks.total(), survivor.stats()));
    }
    drop(survivor);
    drop(watcher);
    if tally.get(TORN) > 0 {
        return Err("a file was not whole; what it was is above".into());
    }
    // Nothing is stuck, nothing is left over, and all is known.
    let all = disks.sizes.len();
    let last = disks.open(None, true)?;
    for i in 0..all {
        match ask(&last, i)? {
            Served::Copy(_) => {}
            Served::Source(_) => return Err(format!("file {i} is stuck after all died")),
        }
    }
    drop(last);
    let again = disks.open(None, true)?;
    for (i, path) in disks.copies() {
        if !disks.check(i, &path).map_err(|error| error.to_string())? {
            return Err(format!("file {i} is not whole"));
        }
        ask(&again, i)?;
    }
    let (stats, parts) = (again.stats(), disks.parts());
    if (stats.files, stats.bytes, stats.copies) != (all as u64, disks.total(), 0) {
        return Err(format!("{all} files of {} bytes, but {stats:?}", disks.total()));
    }
    if again.names().len() != all || !parts.is_empty() {
        return Err(format!("{} names in the log, left over: {parts:?}", again.names().len()));
    }
    Ok(format!("no half file, no leftover, {} passed", tally.get(PASSED)))
}

/// Processes and threads ask for the same files at once: each is copied once. Counted by the cache,
/// and by the kernel: how often a file of the source was opened.
pub fn once(run: &mut Run) -> Verdict {
    const PROCESSES: usize = 4;
    const THREADS: usize = 3;
    for round in 0..run.count {
        let mut sizes = sizes(24, &mut run.random);
        sizes.iter_mut().for_each(|size| *size += 50_000);
        let disks = Disks::new("files-once", sizes)?;
        let opened = Opened::watch(&disks.root.join("far"))?;
        let cache = disks.open(None, true)?;
        let tally = Tally::new();
        let (shared, open, counts) = (&disks, &cache, &tally);
        let work = || {
            counts.add(STARTED);
            while counts.get(STARTED) < (PROCESSES * THREADS) as u64 {
                std::hint::spin_loop();
            }
            (0..shared.sizes.len()).for_each(|i| visit(shared, open, i, counts));
        };
        let children: Vec<Child> = (0..PROCESSES)
            .map(|_| {
                Child::fork(|| {
                    std::thread::scope(|scope| {
                        (0..THREADS).for_each(|_| drop(scope.spawn(work)));
                    });
                })
            })
            .collect();
        for child in children {
            let status = child.wait_at_most(HANG)?;
            if status != 0 {
                return Err(format!("a child ended with status {status:#x}"));
            }
        }
        let (files, stats, opens) = (disks.sizes.len() as u64, cache.stats(), opened.count()?);
        if stats.copies != files || opens != files || tally.get(TORN) > 0 {
            return Err(format!(
                "round {round}: {files} files, {} copies, {opens} opened at the source, {} torn",
                stats.copies,
                tally.get(TORN)
            ));
        }
    }
    Ok(format!("each file was copied once, in {} rounds", run.count))
}

/// Counts how often files below a folder are opened.
struct Opened(i32);

impl Opened {
    fn watch(folder: &Path) -> Result<Self, String> {
        // SAFETY: makes a descriptor that is closed on drop; paths are NUL-terminated.
        unsafe {
            let fd = libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC);
            for entry in std::fs::read_dir(folder).map_err(|error| error.to_string())?.flatten() {
                let path = std::ffi::CString::new(entry.path().as_os_str().as_bytes())
                    .map_err(|error| error.to_string())?;
                if libc::inotify_add_watch(fd, path.as_ptr(), libc::IN_OPEN) < 0 {
                    return Err(std::io::Error::last_os_error().to_string());
                }
            }
            Ok(Self(fd))
        }
    }

    fn count(&self) -> Result<u64, String> {
        let (mut buffer, mut count) = (vec![0u8; 1 << 16], 0);
        loop {
            // SAFETY: the buffer is as long as said.
            let n = unsafe { libc::read(self.0, buffer.as_mut_ptr().cast(), buffer.len()) };
            if n <= 0 {
                return Ok(count);
            }
            let (mut at, header) = (0, std::mem::size_of::<libc::inotify_event>());
            while at + header <= n as usize {
                // SAFETY: in bounds; the kernel wrote an event here.
                let event: libc::inotify_event = unsafe {
                    buffer.as_ptr().add(at).cast::<libc::inotify_event>().read_unaligned()
                };
                if event.mask & libc::IN_Q_OVERFLOW != 0 {
                    return Err("more was opened than the kernel remembers".into());
                }
                count += u64::from(event.mask & libc::IN_ISDIR == 0);
                at += header + event.len as usize;
            }
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: ours, closed once.
        unsafe { libc::close(self.0) };
    }
}

/// Files come and go all the time. What was just given can be opened, and the one before it too; the
/// limit holds. `count` is how many are opened.
pub fn evicted(run: &mut Run) -> Verdict {
    const PROCESSES: u64 = 4;
    const THREADS: u64 = 2;
    let disks = Disks::new("files-evicted", sizes(80, &mut run.random))?;
    // Room for what all threads hold at most, and some more.
    let limit = disks.largest() * PROCESSES * THREADS * 2;
    let limit = limit.min(disks.total() * 2 / 3);
    let cache = disks.open(Some(limit), true)?;
    let tally = Tally::new();
    let (shared, open, counts, seed) = (&disks, &cache, &tally, run.random.next());
    let work = |mut random: Random| {
        let mut before: Option<(usize, Served)> = None;
        loop {
            let i = random.below(shared.sizes.len() as u64) as usize;
            let served = ask(open, i).expect("a path");
            // The last two stay.
            for (i, served) in before.iter().chain([&(i, served.clone())]) {
                match served {
                    Served::Source(_) => counts.add(PASSED),
                    Served::Copy(_) => match shared.check(*i, path_of(served)) {
                        Ok(true) => counts.add(READS),
                        wrong => {
                            eprintln!("file {i}, just given: {wrong:?}");
                            counts.add(TORN);
                        }
                    },
                }
            }
            before = Some((i, served));
        }
    };
    let children: Vec<Child> = (0..PROCESSES)
        .map(|p| {
            Child::fork(|| {
                std::thread::scope(|scope| {
                    (0..THREADS).for_each(|t| {
                        scope.spawn(move || work(Random::new(seed ^ (p * 100 + t + 1))));
                    });
                });
            })
        })
        .collect();
    let (mut most, began) = (0, Instant::now());
    // On until something was evicted: a short run only fills the room.
    let enough = || tally.get(READS) >= run.count && cache.stats().evicted > 20;
    while !enough() && tally.get(TORN) == 0 {
        most = most.max(disks.used());
        if began.elapsed() > HANG * 20 || children.iter().any(Child::has_ended) {
            return Err("a child hangs or panicked; what it said is above".into());
        }
    }
    drop(children);
    let (stats, over) = (cache.stats(), limit + PROCESSES * THREADS * disks.largest());
    let line = format!(
        "{} opened, {} from the source, {} evicted, at most {most} of {limit} bytes",
        tally.get(READS),
        tally.get(PASSED),
        stats.evicted
    );
    if tally.get(TORN) > 0 || most > over {
        return Err(line);
    }
    if stats.evicted == 0 || tally.get(PASSED) > tally.get(READS) {
        return Err(format!("hardly anything was evicted: the torture tests nothing; {line}"));
    }
    Ok(line)
}

/// Waits until `disks` has a copy in the making that has begun to grow.
fn growing(disks: &Disks, child: &Child) -> Result<bool, String> {
    let began = Instant::now();
    loop {
        let grown = |path: &PathBuf| path.metadata().is_ok_and(|meta| meta.size() > 0);
        if disks.parts().iter().any(grown) {
            return Ok(true);
        }
        if child.has_ended() {
            return Ok(false);
        }
        if began.elapsed() > HANG {
            return Err("nobody begins to copy".into());
        }
    }
}

/// Whoever copies dies: another one takes over at once, and what was set aside comes back.
pub fn dead(run: &mut Run) -> Verdict {
    const LARGE: usize = 16 << 20;
    let disks = Disks::new("files-dead", vec![LARGE, LARGE, 1000])?;
    let limit = Some(2 * LARGE as u64 + 1000);
    let cache = disks.open(limit, false)?;
    let (open, mut met) = (&cache, 0);
    for round in 0..run.count {
        let i = (round % 2) as usize;
        let child = Child::fork(|| drop(ask(open, i)));
        growing(&disks, &child)?;
        child.signal(libc::SIGKILL);
        child.wait();
        met += u64::from(!disks.parts().is_empty());
        for i in 0..3 {
            if let Served::Source(_) = ask(&cache, i)? {
                return Err(format!("round {round}: file {i} is stuck after its copier died"));
            }
        }
        if cache.stats().bytes != disks.total() {
            return Err(format!("{} of {} bytes", cache.stats().bytes, disks.total()));
        }
        for (_, path) in disks.copies() {
            std::fs::remove_file(path).map_err(|error| error.to_string())?;
        }
    }
    if met == 0 {
        return Err("nobody was killed in the middle of a copy: nothing was tested".into());
    }
    Ok(format!("{met} of {} died in the middle of a copy, all were finished", run.count))
}

/// Whoever copies is stopped: others are given the source and are not held up with other files;
/// nobody takes the file from it, and it is whole in the end.
pub fn stopped(run: &mut Run) -> Verdict {
    const LARGE: usize = 64 << 20;
    let disks = Disks::new("files-stopped", vec![LARGE, 100_000, 0, 5])?;
    let (mut met, began) = (0, Instant::now());
    while met < run.count {
        if began.elapsed() > HANG * 10 {
            return Err("no copy could be stopped in its middle".into());
        }
        let cache = disks.open(None, true)?;
        let open = &cache;
        let child = Child::fork(|| drop(ask(open, 0)));
        if !growing(&disks, &child)? {
            continue;
        }
        child.stop();
        if disks.parts().is_empty() {
            // Too late: it is done already.
            child.signal(libc::SIGCONT);
            child.wait();
            let _gone = std::fs::remove_file(&disks.copies()[0].1);
            continue;
        }
        for i in 1..4 {
            if let Served::Source(_) = ask(&cache, i)? {
                return Err(format!("file {i} waits for a process that copies another one"));
            }
        }
        let asked = Child::fork(|| {
            let served = ask(open, 0).expect("a path");
            assert!(matches!(served, Served::Source(_)), "taken from one who lives: {served:?}");
        });
        if asked.wait_at_most(HANG)? != 0 {
            return Err("the file was taken from a living process".into());
        }
        child.signal(libc::SIGCONT);
        if child.wait_at_most(HANG)? != 0 {
            return Err("the stopped process did not finish".into());
        }
        let served = cache.hit(name(0).as_bytes()).map(Served::Copy);
        if !served.is_some_and(|served| disks.check(0, path_of(&served)).unwrap_or(false)) {
            return Err("the copy of the stopped process is not whole".into());
        }
        let stats = cache.stats();
        if stats.copies != 4 {
            return Err(format!("4 files, but {stats:?}"));
        }
        drop(cache);
        std::fs::remove_dir_all(disks.root.join("near")).map_err(|error| error.to_string())?;
        met += 1;
    }
    Ok(format!("{met} copies were stopped and finished"))
}

/// Forks while threads copy, evict and have the pool copy: every child works, with a pool of its own.
pub fn forks(run: &mut Run) -> Verdict {
    let disks = Disks::new("files-forks", sizes(80, &mut run.random))?;
    let limit = Some(disks.total() / 2);
    let cache = disks.open(limit, true)?;
    let (stop, tally) = (AtomicBool::new(false), Tally::new());
    std::thread::scope(|scope| {
        for t in 0..3 {
            let (disks, cache, stop, tally) = (&disks, &cache, &stop, &tally);
            scope.spawn(move || {
                let mut random = Random::new(t + 1);
                while !stop.load(Ordering::Relaxed) {
                    let i = random.below(disks.sizes.len() as u64) as usize;
                    if t == 0 {
                        drop(cache.fetch_behind(name(i).as_bytes()));
                        std::thread::sleep(Duration::from_micros(200));
                    } else {
                        visit(disks, cache, i, tally);
                    }
                }
            });
        }
        let outcome = (0..run.count).try_for_each(|round| {
            let (disks, cache, tally) = (&disks, &cache, &tally);
            let mut random = Random::new(run.random.next());
            let child = Child::fork(move || {
                for _ in 0..3 {
                    let i = random.below(disks.sizes.len() as u64) as usize;
                    visit(disks, cache, i, tally);
                }
                let again = disks.open(limit, true).expect("an open in a child");
                let began = Instant::now();
                // Evicted meanwhile, or no room: then another one.
                loop {
                    let i = random.below(disks.sizes.len() as u64) as usize;
                    let name = name(i);
                    drop(again.fetch_behind(name.as_bytes()));
                    std::thread::sleep(Duration::from_millis(1));
                    if again.hit(name.as_bytes()).is_some() {
                        break;
                    }
                    assert!(began.elapsed() < HANG / 2, "nothing is copied behind a child");
                }
            });
            match child.wait_at_most(HANG)? {
                0 if tally.get(TORN) == 0 => Ok(()),
                status => Err(format!("round {round}: a child ended with status {status:#x}")),
            }
        });
        stop.store(true, Ordering::Relaxed);
        outcome
    })?;
    // What the pool is doing ends before the folders go.
    let open = Arc::downgrade(&cache);
    drop(cache);
    while open.strong_count() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    if tally.get(TORN) > 0 {
        return Err("a file was not whole or not there; what it was is above".into());
    }
    Ok(format!("{} children worked, {} files read", run.count, tally.get(READS)))
}

/// A source that may not be read is an error with its number, and no trouble of the cache.
pub fn unreadable(_run: &mut Run) -> Verdict {
    use std::os::unix::fs::PermissionsExt;
    const NOBODY: u32 = 65534;
    // SAFETY: asks who we are.
    if unsafe { libc::geteuid() } != 0 {
        return Ok("skipped: not root, so a source of another user is not covered".into());
    }
    let disks = Disks::new("files-unreadable", vec![1000, 1000])?;
    let mode = |path: PathBuf, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
            .map_err(|error| error.to_string())
    };
    mode(disks.root.join("far").join(name(0)), 0o600)?;
    std::fs::create_dir(disks.root.join("near")).map_err(|error| error.to_string())?;
    mode(disks.root.join("near"), 0o777)?;
    let child = Child::fork(|| {
        // SAFETY: this process is another user from here on.
        assert_eq!(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) }, 0);
        let cache = disks.open(Some(1000), true).expect("a cache of one's own");
        let error = cache.fetch(name(0).as_bytes()).expect_err("it may not be read");
        assert_eq!(error.kind(), stocache::Kind::Errno(libc::EACCES), "{error}");
        assert!(matches!(ask(&cache, 1), Ok(Served::Copy(_))));
        assert_eq!((cache.stats().bytes, cache.stats().failed), (1000, 1));
        assert_eq!(cache.take_news(), None);
    });
    match child.wait_at_most(HANG)? {
        0 => Ok("an error with the right number".into()),
        status => Err(format!("the other user ended with status {status:#x}")),
    }
}
