//! The folder on the near disk: opened, and what earlier jobs left in it remembered.

use crate::error::{Error, Result};
use crate::fault::{Fault, active as broken};
use crate::files::atomic_box::AtomicBox;
use crate::files::content::Content;
use crate::files::domain::Domain;
use crate::files::journal::{self, Journal, Logged};
use crate::files::news::{News, Topic};
use crate::files::options::FileOptions;
use crate::files::paths::{as_path, can_be_ours, key, with_slash};
use crate::files::table::{FileLock, FileTable, NoRoom, OWNED};
use crate::segment::Request;
use crate::segment::layout::{Geometry, TableGeometry};
use crate::sys::interrupt::Patience;
use crate::sys::private_file::{check_folder, private_folder};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// Who waits for a copy gives up once it has not grown for so long.
const PATIENCE: Duration = Duration::from_secs(1);
/// A log that is no longer than this is as good as a tidy one.
const LOG_SPARE: u64 = 64 << 10;
/// How long to wait for who tells the table what earlier jobs left.
const RECALL_PATIENCE: Duration = Duration::from_secs(2);
/// Files looked out for removal.
#[derive(Default)]
pub(crate) struct Victims {
    /// With the time of their last use, the oldest last.
    pub(crate) files: Vec<(u64, usize)>,
    /// Their names, if they had to be looked for in the whole log and folder.
    pub(crate) names: Option<HashMap<usize, Vec<u8>>>,
}

/// A folder that we can use.
pub(crate) struct Folder {
    pub(crate) options: FileOptions,
    pub(crate) path: PathBuf,
    pub(crate) table: Arc<FileTable>,
    pub(crate) journal: Journal,
    pub(crate) domain: Domain,
    /// `<folder>/files/`, as it stands before a name.
    pub(crate) files: Vec<u8>,
    pub(crate) parts: PathBuf,
    pub(crate) victims: AtomicBox<Victims>,
    pub(crate) news: News,
}

impl Folder {
    pub(crate) fn open(path: &Path, options: &FileOptions) -> std::result::Result<Self, String> {
        let refuse = |why: String| {
            format!(
                "{} cannot be used as a cache: {why}; files are read from {} instead",
                path.display(),
                options.source.display()
            )
        };
        let say = |error: std::io::Error| refuse(error.to_string());
        let code = |errno: Errno| refuse(std::io::Error::from(errno).to_string());
        std::fs::create_dir_all(&options.cache).map_err(say)?;
        for folder in [path.to_path_buf(), path.join("files"), path.join("parts")] {
            private_folder(&folder).map_err(say)?;
            check_folder(&folder).map_err(refuse)?;
        }
        let stat = rustix::fs::stat(path).map_err(code)?;
        let identity = [stat.st_dev.to_le_bytes(), stat.st_ino.to_le_bytes()].concat();
        let journal = Journal { path: path.join("index") };
        let files = with_slash(path.join("files").into_os_string().into_encoded_bytes());
        // What earlier jobs left must have room in the table too.
        let left = journal.at_most().unwrap_or_else(|| journal::walk(as_path(&files)).len() as u64);
        let table = plan(options.files.max(left)).map_err(|error| refuse(error.to_string()))?;
        let request =
            Request::new(format!("files-{:016x}", xxh3_64(&identity)), Geometry::Files(table));
        let (table, _) = FileTable::open(&request).map_err(|error| refuse(error.to_string()))?;
        let domain =
            Domain::join(&path.join("lock"), table.segment().header().instance).map_err(code)?;
        let folder = Self {
            options: options.clone(),
            path: path.to_path_buf(),
            table,
            journal,
            domain,
            files,
            parts: path.join("parts"),
            victims: AtomicBox::new(),
            news: News::new(),
        };
        folder.inform();
        Ok(folder)
    }

    /// Sees to it that the table knows what earlier jobs left. If whoever does so dies, another one
    /// begins again; if it is stopped, what is there is taken for somebody else's until it goes on.
    fn inform(&self) {
        let began = Instant::now();
        while !self.table.is_recalled() && began.elapsed() < RECALL_PATIENCE {
            match self.table.lock_recall() {
                Some(_lock) if self.table.is_recalled() => {}
                Some(_lock) => {
                    self.recall();
                    self.table.set_recalled();
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Takes note of what earlier jobs left.
    fn recall(&self) {
        self.journal.displace();
        let mut contents = self.journal.read();
        if contents.damaged > 0 || contents == journal::Contents::default() {
            // Damaged or lost: what is there tells.
            let mut found = journal::walk(as_path(&self.files));
            found.retain(|name, _| !contents.files.contains_key(name));
            let logged = self.journal.keep_all(&found).unwrap_or_else(|_| {
                let nowhere = |(name, content)| (name, Logged { content, at: u64::MAX });
                found.into_iter().map(nowhere).collect()
            });
            contents.files.extend(logged);
        }
        if contents.is_untidy()
            && let Ok(logged) = self.journal.tidy()
        {
            contents.files.extend(logged);
        }
        self.table.tidy_at().store(grown(self.journal.len()), Ordering::Relaxed);
        if let Some(_until_they_are_gone) = self.domain.may_remove() {
            // Those of living processes have this table's number.
            let ours = format!("{:x}-", self.domain.id);
            for part in std::fs::read_dir(&self.parts).into_iter().flatten().flatten() {
                if !part.file_name().as_bytes().starts_with(ours.as_bytes()) {
                    let _gone = std::fs::remove_file(part.path());
                }
            }
        }
        for (name, file) in &contents.files {
            let Ok(i) = self.table.find_or_add(key(name)) else { continue };
            let Some(lock) = self.table.lock(i) else { continue };
            let entry = self.table.entry(i);
            entry.set_name_at(file.at);
            if entry.flags() & OWNED != 0 {
                continue;
            }
            if self.options.limit.is_some() {
                match rustix::fs::lstat(as_path(&self.path_of(name))) {
                    // The kernel notes at least the day of the last use.
                    Ok(stat) if can_be_ours(&stat) => {
                        entry.touch((stat.st_atime as u64).wrapping_mul(1_000_000_000));
                    }
                    _ => continue, // gone, or another took its place; no record says so
                }
            }
            self.table.own(&lock, file.content);
        }
    }

    pub(crate) fn path_of(&self, name: &[u8]) -> Vec<u8> {
        [&self.files[..], name].concat()
    }

    /// Where file `i` is copied before it gets its name.
    pub(crate) fn part(&self, i: usize) -> PathBuf {
        self.parts.join(format!("{:x}-{i}", self.domain.id))
    }

    /// The names that the log has, of files that were not removed.
    pub(crate) fn names(&self) -> Vec<Vec<u8>> {
        self.journal.read().files.into_keys().collect()
    }

    /// Waits until nobody has file `i` locked. False if its copy does not get on: then whoever makes
    /// it may be stopped, and nothing is to be waited for. An error if the caller wants to be let go.
    pub(crate) fn wait(&self, i: usize) -> Result<bool> {
        let part = self.part(i);
        let size = || rustix::fs::stat(&part).map_or(0, |stat| stat.st_size as u64);
        let (mut seen, mut since) = (size(), Instant::now());
        let mut nap = Duration::from_micros(100);
        let mut asking = Patience::new();
        while self.table.is_locked(i) {
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(5));
            // The lock of the dead is there for the taking.
            if nap == Duration::from_millis(5) && self.table.lock(i).is_some() {
                return Ok(true);
            }
            if asking.is_interrupted() {
                return Err(Error::interrupted());
            }
            let grown = size();
            if grown != seen {
                (seen, since) = (grown, Instant::now());
            } else if since.elapsed() > PATIENCE {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Notes that this file is going to be ours.
    pub(crate) fn note(
        &self,
        lock: &FileLock<'_>,
        name: &[u8],
        content: Content,
    ) -> rustix::io::Result<()> {
        let at = self.journal.keep(name, content)?;
        self.table.entry(lock.i).set_name_at(at.start);
        self.look_at_log(at.end);
        Ok(())
    }

    pub(crate) fn forget(&self, lock: &FileLock<'_>, name: &[u8]) {
        self.table.disown(lock);
        // A record of what is gone is no harm.
        if let Ok(at) = self.journal.remove(name) {
            self.look_at_log(at.end);
        }
    }

    /// Once the log, which ends at `end`, is twice as long as at the last look: writes it anew if
    /// most of it says nothing any more.
    fn look_at_log(&self, end: u64) {
        let at = self.table.tidy_at();
        let due = at.load(Ordering::Relaxed);
        let mine = |due| at.compare_exchange(due, grown(end), Ordering::Relaxed, Ordering::Relaxed);
        if end <= due || mine(due).is_err() {
            return;
        }
        if self.journal.read().is_untidy()
            && let Ok(logged) = self.journal.tidy()
        {
            self.learn(&logged);
        }
        at.store(grown(self.journal.len()), Ordering::Relaxed);
    }

    /// Notes where in the log the names of files are.
    pub(crate) fn learn(&self, logged: &HashMap<Vec<u8>, Logged>) {
        for (name, file) in logged {
            if let Some(i) = self.table.find(key(name)) {
                self.table.entry(i).set_name_at(file.at);
            }
        }
    }

    /// The name of file `i`, read where the log should have it. None if it does not: the log was
    /// written anew, by processes with another table or a moment ago, or is damaged.
    pub(crate) fn name_of(&self, i: usize) -> Option<Vec<u8>> {
        let entry = self.table.entry(i);
        if broken(Fault::NameByLog) {
            return self.journal.read().files.into_keys().find(|name| key(name) == entry.key());
        }
        self.journal.name_at(entry.name_at()).filter(|name| key(name) == entry.key())
    }

    /// Lets others know that this thread is about to use file `i`. False if that cannot be.
    #[inline]
    pub(crate) fn give_out(&self, i: usize) -> bool {
        self.table.give_out(i) || (!broken(Fault::NoRowNoHit) && self.domain.show_rowless())
    }

    /// Tells people that files that are new are read from the source.
    pub(crate) fn tell_no_room(&self, why: NoRoom) {
        self.tell(Topic::Many, || {
            let path = self.path.display();
            match why {
                NoRoom::Table => format!(
                    "more files are asked for than {path} was opened for; those that are new to it \
                     are read from the source: construct the cache with the most files first"
                ),
                NoRoom::Memory(errno) => format!(
                    "there is no memory to note more files of {path} ({errno}); those that are new \
                     to it are read from the source: free some space in /dev/shm"
                ),
            }
        });
    }

    /// Tells people, if nobody on this node was told yet.
    pub(crate) fn tell(&self, what: Topic, text: impl FnOnce() -> String) {
        if self.table.segment().is_first_to_tell(what as u32) {
            self.news.put(text());
        }
    }
}

/// The length at which a log of this length is worth a look.
fn grown(len: u64) -> u64 {
    len.saturating_mul(2).saturating_add(LOG_SPARE)
}

/// A table for so many files, and for as many others as the file size limit of this process allows.
fn plan(files: u64) -> Result<TableGeometry> {
    let mut table = TableGeometry::plan(files)?;
    while crate::sys::limits::check_file_size(table.layout()?.total).is_err() {
        match table.smaller() {
            Some(smaller) => table = smaller,
            None => break,
        }
    }
    Ok(table)
}
