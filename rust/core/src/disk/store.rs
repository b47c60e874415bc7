//! A disk store as this process has it open: its folder, and the table that all processes share.
//!
//! ```text
//!   state[i]    the claim of claim.rs: empty, or claimed by who is about to write the record
//!   index[i]    in which file the record is, where, and in which generation of that (space/)
//!   region      a file that is filled from its start and removed as a whole
//! ```
//!
//! Truth is in the folder. The table is what is known of it: the first process of a node reads the logs
//! into it, and it goes with the last. A record is written in this order: its bytes, its entry of the log,
//! its entry of the index. A kill leaves no record or a whole one, and room that nobody uses until its
//! region goes.

use super::behind::Behind;
use super::files::Files;
use super::folder::{self, Folder, Header, MOST_FILES};
use super::members::Member;
use super::mending::remove_damaged;
use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::segment::counters::Count;
use crate::segment::layout::{DiskGeometry, DiskLayout, Geometry};
use crate::segment::{Opened, Request, Segment};
use crate::space::{self, Space};
use crate::sys::per_process::PerProcess;
use crate::sys::recent::Recent;
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use xxhash_rust::xxh3::Xxh3;

/// What was told: a bit of the segment.
const TOLD_OF_TROUBLE: u32 = 1;
const TOLD_OF_LIMIT: u32 = 2;
/// To make a file of some gigabytes, or to remove one, takes a while, and who waits for it is a thread that
/// has nothing else to do.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// What to open.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// The folder of this store alone.
    pub path: PathBuf,
    /// Bytes that its files may take.
    pub budget: u64,
    /// Samples in the dataset.
    pub dataset_len: u64,
    /// Of the dataset.
    pub fingerprint: u128,
    /// Whether files go to make room for new ones.
    pub recycles: bool,
    /// What samples are known by.
    pub keys: Keys,
}

/// What samples are known by.
#[derive(Clone, Debug)]
pub enum Keys {
    /// Their numbers.
    Numbers,
    /// A key each.
    Of(Arc<[u128]>),
    /// What a table has that is in use, of this number.
    OfTable(u64),
}

/// So often a store is opened again that somebody removes meanwhile.
const TRIES: u32 = 10;

/// A disk store, open in this process.
pub struct DiskStore {
    segment: Segment,
    geometry: DiskGeometry,
    layout: DiskLayout,
    /// Its number, by which others find it.
    table: u64,
    pub(super) folder: Folder,
    pub(super) files: Files,
    /// Whether it is small against the memory that is free.
    pub(super) is_small: Recent,
    member: Member,
    /// Whether the table of this process writes; once it does, it does.
    writes: AtomicBool,
    pub(super) behind: PerProcess<Behind>,
    /// What people should know. Only tried to lock, because a forked child may find it locked by a thread
    /// that it does not have.
    news: Mutex<Option<String>>,
}

impl DiskStore {
    /// Joins the store in a folder, or makes it.
    pub fn open(options: &DiskOptions) -> Result<Arc<Self>> {
        let mut left = TRIES;
        loop {
            let mut met = None;
            let opened = Self::open_once(options, &mut met);
            let is_gone = || match Folder::read(&options.path) {
                Ok(Some(header)) => met.is_some_and(|met| met != header.id),
                there => there.is_ok(),
            };
            match opened {
                // Somebody removed it meanwhile, as what a killed job left, say.
                Err(error)
                    if left > 0
                        && matches!(error.kind(), Kind::System | Kind::Refused)
                        && is_gone() =>
                {
                    left -= 1;
                }
                opened => return opened,
            }
        }
    }

    /// The same, unless the folder is removed meanwhile. `met` is which store it was.
    fn open_once(options: &DiskOptions, met: &mut Option<u128>) -> Result<Arc<Self>> {
        let keyed = !matches!(options.keys, Keys::Numbers);
        if let Keys::Of(keys) = &options.keys
            && keys.len() as u64 != options.dataset_len
        {
            let (keys, samples) = (keys.len(), options.dataset_len);
            let message =
                format!("key= gave {keys} keys for {samples} samples; it must give one each");
            return Err(Error::new(Kind::Argument, message));
        }
        let wanted = Header {
            id: random()?,
            fingerprint: options.fingerprint,
            samples: if keyed { 0 } else { options.dataset_len },
            keyed,
            region_bytes: folder::region_bytes(options.budget)?,
        };
        let damaged = remove_damaged(&options.path);
        let folder = Folder::open(&options.path, &wanted)?;
        *met = Some(folder.header.id);
        if let Some(why) = folder.differs(&wanted) {
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "fingerprint: the disk level in {} is not for this dataset: {why}; remove it \
                     (on_change=\"clear\", or `stocache rm {}`) or use another disk_path",
                    options.path.display(),
                    options.path.display()
                ),
            ));
        }
        let region_bytes = folder.header.region_bytes;
        check_budget(options, region_bytes)?;
        let geometry = DiskGeometry {
            dataset_len: options.dataset_len,
            region_bytes,
            regions: (options.budget / region_bytes).clamp(1, MOST_FILES),
            recycles: options.recycles,
            keyed,
        };
        let table = table_of(&folder, options);
        let mut request = Request::new(format!("disk-{table:016x}"), Geometry::Disk(geometry));
        request.fingerprint = options.fingerprint;
        let (segment, how) = Segment::open(&request)?;
        let store = Self::over(segment, how, folder, table)?;
        store.tell_of_limit(options.budget);
        if let Some(why) = damaged {
            store.tell_of_damage(&why);
        }
        match &options.keys {
            Keys::Numbers => store.inform(None)?,
            Keys::Of(keys) => store.inform(Some(keys))?,
            Keys::OfTable(_) if store.space().is_ready() => {}
            Keys::OfTable(_) => {
                let message = "the disk level is gone, and with it the keys of its samples; construct it anew";
                return Err(Error::new(Kind::State, message));
            }
        }
        Ok(store)
    }

    fn over(segment: Segment, how: Opened, folder: Folder, table: u64) -> Result<Arc<Self>> {
        let Geometry::Disk(geometry) = segment.header().geometry.clone() else {
            let message = format!("the cache {:?} is not a disk level", segment.name());
            return Err(Error::new(Kind::Refused, message));
        };
        let instance = segment.header().instance;
        segment.unique(how, |segment| {
            let layout = geometry.layout()?;
            let is_there = || {
                let there = Folder::read(&folder.path);
                matches!(there, Ok(Some(header)) if header.id == folder.header.id)
            };
            let member = Member::join(&folder.path, instance, is_there).map_err(|errno| {
                let path = folder.path.display();
                Error::new(
                    Kind::System,
                    format!("cannot lock {path}: {errno}; use another disk_path"),
                )
            })?;
            let writes = AtomicBool::new(false); // not before it knows what there is
            let files = Files::new(geometry.regions);
            let (behind, news) = (PerProcess::new(), Mutex::default());
            Ok(Self {
                segment,
                geometry,
                layout,
                table,
                folder,
                files,
                is_small: Recent::new(),
                member,
                writes,
                behind,
                news,
            })
        })
    }

    /// Where its records lie, and what is known of them.
    #[inline]
    pub(crate) fn space(&self) -> Space<'_> {
        Space::new(&self.segment, &self.layout.space).with_patience(LOCK_PATIENCE)
    }

    /// Says how often somebody wanted what waits to be written. It keeps the table's memory, and not the store.
    pub(super) fn calls(&self) -> Box<dyn Fn() -> u64 + Send + Sync> {
        let (layout, mapping) = (self.layout.space, Arc::clone(self.segment.mapping()));
        Box::new(move || space::calls(&layout, &mapping))
    }

    /// The table.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// How much there may be.
    pub fn geometry(&self) -> &DiskGeometry {
        &self.geometry
    }

    /// What leads another process to the same table.
    pub fn options(&self) -> DiskOptions {
        let keys = if self.geometry.keyed { Keys::OfTable(self.table) } else { Keys::Numbers };
        DiskOptions {
            path: self.folder.path.clone(),
            budget: self.budget(),
            dataset_len: self.geometry.dataset_len,
            fingerprint: self.fingerprint(),
            recycles: self.geometry.recycles,
            keys,
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder.path
    }

    /// Of the dataset.
    pub fn fingerprint(&self) -> u128 {
        self.folder.header.fingerprint
    }

    /// The index, if the dataset has such a sample.
    pub fn index(&self, key: u64) -> Option<usize> {
        (key < self.geometry.dataset_len).then_some(key as usize)
    }

    /// Whether the processes with this table are those that write.
    pub fn writes(&self) -> bool {
        self.writes.load(Ordering::Relaxed) || {
            let now = self.is_chosen() && self.take_over();
            self.writes.store(now, Ordering::Relaxed);
            now
        }
    }

    /// Whether this table is the one that may write.
    pub(super) fn is_chosen(&self) -> bool {
        self.folder.is_ours() && self.member.writes(&self.folder.path)
    }

    /// What sample `i` is known by on disk: its number, or its key; and what its record is sealed with.
    pub fn identity(&self, i: usize) -> (u64, u128) {
        let fingerprint = self.fingerprint();
        if !self.geometry.keyed {
            return (i as u64, fingerprint);
        }
        let words = self.keys(i);
        let low = words[0].load(Ordering::Relaxed);
        let high = words[1].load(Ordering::Relaxed);
        // The other half is part of what the record's checksum is seeded with.
        (low, fingerprint ^ u128::from(high))
    }

    pub(super) fn keys(&self, i: usize) -> &[std::sync::atomic::AtomicU64] {
        self.segment.mapping().words(self.layout.keys_at as usize + 16 * i, 2)
    }

    /// Bytes that its files may take.
    pub fn budget(&self) -> u64 {
        self.geometry.region_bytes * self.geometry.regions
    }

    /// Waits until what this process brought is written; whether it is.
    pub fn flush(&self, patience: Duration) -> bool {
        self.behind.get().is_none_or(|behind| behind.flush(patience))
    }

    /// Takes note of trouble with the disk, for one warning on this node.
    pub(crate) fn note_trouble(&self, doing: &str, errno: Errno) {
        self.space().counters().add(Count::Errors, 1);
        if self.segment.is_first_to_tell(TOLD_OF_TROUBLE)
            && let Ok(mut news) = self.news.try_lock()
        {
            let folder = self.folder.path.display();
            *news = Some(format!(
                "cannot {doing} the disk level in {folder} ({errno}); what it has is used, what it cannot take \
                 is loaded from the source, and it is tried again every ten seconds"
            ));
        }
    }

    /// Takes note of a budget that files of this size, as many as there may be, do not come up to.
    fn tell_of_limit(&self, budget: u64) {
        let is_limited = self.geometry.regions == MOST_FILES && self.budget() < budget;
        if is_limited
            && budget - self.budget() >= self.geometry.region_bytes
            && self.segment.is_first_to_tell(TOLD_OF_LIMIT)
            && let Ok(mut news) = self.news.try_lock()
        {
            *news = Some(format!(
                "the disk level in {} was made for less, in files of {}, and takes no more than {} of the {} \
                 that it may; remove it to have it made for that",
                self.folder.path.display(),
                Bytes(self.geometry.region_bytes),
                Bytes(self.budget()),
                Bytes(budget)
            ));
        }
    }

    fn tell_of_damage(&self, why: &str) {
        if let Ok(mut news) = self.news.try_lock() {
            let folder = self.folder.path.display();
            *news = Some(format!(
                "the disk level in {folder} could not be read ({why}), and was made anew: its samples are loaded once more"
            ));
        }
    }

    /// What people should know, once.
    pub fn news(&self) -> Option<String> {
        self.news.try_lock().ok()?.take()
    }
}

impl std::fmt::Display for DiskStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in {}", Bytes(self.budget()), self.folder.path.display())
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        if let Some(behind) = self.behind.get() {
            behind.end(self);
        }
    }
}

/// Whether the files of a store that is there are small enough for what they may take now: where files are to
/// go one by one, more than one. To make the store anew would be to lose all of it for a wrong number.
fn check_budget(options: &DiskOptions, region_bytes: u64) -> Result<()> {
    let least = if options.recycles { 2 * region_bytes } else { region_bytes };
    if options.budget >= least {
        return Ok(());
    }
    let path = options.path.display();
    Err(Error::new(
        Kind::Argument,
        format!(
            "disk is {}, which is too small for the disk level in {path}: it was made for more, in files of {}; \
             give it {} or more, remove it (`stocache rm {path}`) or use another disk_path",
            Bytes(options.budget),
            Bytes(region_bytes),
            Bytes(least)
        ),
    ))
}

fn random() -> Result<u128> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Error::system("cannot draw a random number", errno))?;
    Ok(u128::from_le_bytes(bytes))
}

/// Which table: of this store, with these keys. Two lists of samples have two tables.
fn table_of(folder: &Folder, options: &DiskOptions) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&folder.header.id.to_le_bytes());
    hash.update(&folder.place.0.to_le_bytes());
    hash.update(&folder.place.1.to_le_bytes());
    hash.update(&options.dataset_len.to_le_bytes());
    hash.update(&[u8::from(options.recycles)]);
    match &options.keys {
        Keys::Numbers => {}
        Keys::Of(keys) => keys.iter().for_each(|key| hash.update(&key.to_le_bytes())),
        Keys::OfTable(table) => return *table,
    }
    hash.digest()
}
