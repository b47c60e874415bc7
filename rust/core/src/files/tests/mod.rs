//! One process, and what can be on its disks.
#![allow(unsafe_code)] // mounts of a thread's own

mod ownership;
mod room;
mod serving;
mod trouble;

use super::cache::FileCache;
use super::folder::Folder;
use super::options::{Check, FileOptions, Served};
use super::paths::as_path;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// A far and a near folder, gone at the end.
struct Disks {
    root: PathBuf,
}

impl Disks {
    fn new(what: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("stocache-{what}-{}-{n}", std::process::id()));
        let _old = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("far")).unwrap();
        Self { root }
    }

    fn far(&self, name: &str) -> PathBuf {
        self.root.join("far").join(name)
    }

    /// A file at the source whose bytes follow from `salt`.
    fn put(&self, name: &str, salt: u8, bytes: usize) {
        std::fs::create_dir_all(self.far(name).parent().unwrap()).unwrap();
        std::fs::write(self.far(name), vec![salt; bytes]).unwrap();
    }

    fn options(&self) -> FileOptions {
        FileOptions {
            source: self.root.join("far"),
            cache: self.root.join("near"),
            limit: None,
            evict: true,
            check: Check::Once,
            hashed: false,
            files: 100,
        }
    }

    fn open(&self) -> Arc<FileCache> {
        self.open_with(|_| ())
    }

    fn open_with(&self, change: impl FnOnce(&mut FileOptions)) -> Arc<FileCache> {
        let mut options = self.options();
        change(&mut options);
        let cache = FileCache::open(options).unwrap();
        assert_eq!(cache.trouble(), None);
        cache
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.root);
    }
}

impl FileCache {
    fn opened(&self) -> &Folder {
        self.folder().unwrap()
    }

    fn copy_at(&self, name: &str) -> PathBuf {
        self.path().join("files").join(name)
    }

    /// What a reader gets, and whether it is the copy.
    fn bytes(&self, name: &str) -> (Vec<u8>, bool) {
        match self.fetch(name.as_bytes()).unwrap() {
            Served::Copy(path) => (std::fs::read(as_path(&path)).unwrap(), true),
            Served::Source(path) => (std::fs::read(as_path(&path)).unwrap(), false),
        }
    }

    /// What a reader is given.
    fn path_of(&self, name: &str) -> PathBuf {
        match self.fetch(name.as_bytes()).unwrap() {
            Served::Copy(path) | Served::Source(path) => as_path(&path).into(),
        }
    }

    fn is_copied(&self, name: &str) -> bool {
        matches!(self.fetch(name.as_bytes()), Ok(Served::Copy(_)))
    }
}

fn later(path: &Path) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap();
}

/// Runs `act` in a thread with mounts of its own, or says what is not covered.
fn with_mounts(uncovered: &str, act: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: this thread alone gets a mount namespace, which ends with it.
            if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
                return eprintln!("skipped: no right to mount here, so {uncovered} is not covered");
            }
            mount(None, Path::new("/"), libc::MS_REC | libc::MS_PRIVATE, "").unwrap();
            act();
        });
        thread.join().unwrap();
    });
}

fn mount(kind: Option<&str>, at: &Path, flags: u64, data: &str) -> std::io::Result<()> {
    let text = |text: &[u8]| CString::new(text).unwrap();
    let (kind, at) = (text(kind.unwrap_or("none").as_bytes()), text(at.as_os_str().as_bytes()));
    let data = text(data.as_bytes());
    // SAFETY: NUL-terminated texts that outlive the call.
    let done = unsafe {
        libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast())
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
