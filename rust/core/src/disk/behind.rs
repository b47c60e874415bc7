//! Writing behind the back of who loads: records are collected until many can be written at once, by a
//! thread of this process.
//!
//! ```text
//!   put ──► filling ── full, old, or wanted ──► full ── the thread ──► file
//! ```
//!
//! A group takes whole pages, and a line of the log for each record: where samples are small and come slowly,
//! it waits for more of them. A record that waits here is claimed in the table: nobody else writes it, and who
//! wants it says so, and waits a moment. What waits has a bound in bytes; who brings more waits for the disk, up to its deadline. In a
//! forked child nothing of it is the child's.

use super::log::STEP;
use crate::fault::{Fault, active as broken};
use crate::sys::direct::DirectFile;
use crate::sys::pages::{PAGE, Pages};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// So many bytes are written at once at most, or so many records.
pub(super) const MOST_GROUP_BYTES: usize = 4 << 20;
const GROUP_RECORDS: usize = 4096;
/// What waits to be written, all in all. Every process that loads may have so much.
const MOST_BYTES: usize = 12 << 20;
/// What was brought is written after this time, if it is so much: the padding of whole pages is little of it;
const OLD: Duration = Duration::from_millis(20);
const ENOUGH_BYTES: usize = 256 << 10;
const ENOUGH_RECORDS: usize = 256;
/// and after this time, however little it is.
const VERY_OLD: Duration = Duration::from_secs(1);
/// Who lets go of a store waits for so long for what it brought.
const LAST_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 5000 });

/// Who writes.
pub(super) trait Writer: Send + Sync {
    /// Writes these records and ends their claims; what cannot be written is dropped.
    fn write(&self, group: &mut Group, last: &mut Last);

    /// Drops these records.
    fn give_up(&self, group: &Group);
}

/// How often somebody of any process wanted a record that waits to be written.
type Calls = Box<dyn Fn() -> u64 + Send + Sync>;

/// The file that was written to last: region, generation, file.
pub(super) type Last = Option<(u64, u32, DirectFile)>;

/// Records that are written together.
pub(super) struct Group {
    memory: Pages,
    used: usize,
    pub(super) items: Vec<Item>,
    began: Instant,
    /// The calls before that.
    calls: u64,
}

/// One of them: where it lies in the group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) index: usize,
    pub(super) at: usize,
    pub(super) len: usize,
    /// How often all had been emptied when it was brought.
    pub(super) since: u64,
}

impl Group {
    fn new(memory: Pages, calls: u64) -> Self {
        Self { memory, used: 0, items: Vec::new(), began: Instant::now(), calls }
    }

    /// Whether there is no point in waiting for more.
    fn is_ripe(&self, calls: u64) -> bool {
        let age = self.began.elapsed();
        let is_enough = self.used >= ENOUGH_BYTES || self.items.len() >= ENOUGH_RECORDS;
        let soon = is_enough || broken(Fault::SmallGroups);
        calls != self.calls || age >= VERY_OLD || soon && age >= OLD
    }

    fn has_room(&self, len: usize) -> bool {
        self.memory.len() - self.used >= len && self.items.len() < GROUP_RECORDS
    }

    fn add(&mut self, index: usize, since: u64, head: &[u8], parts: &[IoSlice<'_>]) {
        let at = self.used;
        let mut end = at;
        for part in std::iter::once(head).chain(parts.iter().map(|part| &**part)) {
            self.memory[end..end + part.len()].copy_from_slice(part);
            end += part.len();
        }
        self.items.push(Item { index, at, len: end - at, since });
        self.used = end.next_multiple_of(STEP as usize).min(self.memory.len());
        self.memory[end..self.used].fill(0);
    }

    /// Makes whole pages of it: how many bytes.
    pub(super) fn close(&mut self) -> usize {
        let end = self.used.next_multiple_of(PAGE);
        self.memory[self.used..end].fill(0);
        self.used = end;
        end
    }

    /// What is to be written.
    pub(super) fn pages(&self) -> &[u8] {
        &self.memory[..self.used]
    }
}

/// What waits, and the thread that writes it.
pub(super) struct Behind {
    shared: Arc<Shared>,
}

struct Shared {
    /// Of whole pages.
    group_bytes: usize,
    queue: Mutex<Queue>,
    /// Something came, or went.
    changed: Condvar,
    calls: Calls,
}

#[derive(Default)]
struct Queue {
    filling: Option<Group>,
    full: VecDeque<Group>,
    /// Of both, and of what is being written.
    bytes: usize,
    /// What is being written at this moment.
    writing: Vec<usize>,
    /// Somebody waits for all of it.
    hurry: usize,
    /// Memory for the next group.
    spare: Option<Pages>,
    has_thread: bool,
    ends: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>, at_most: Duration) -> MutexGuard<'a, Queue> {
        let waited = self.changed.wait_timeout(queue, at_most);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.filling.is_none() && self.full.is_empty() && self.writing.is_empty()
    }

    /// Whether something is to be written now.
    fn has_next(&self, calls: u64) -> bool {
        let ripe = |group: &Group| self.hurry > 0 || self.ends || group.is_ripe(calls);
        !self.full.is_empty() || self.filling.as_ref().is_some_and(ripe)
    }

    fn next(&mut self) -> Option<Group> {
        let next = self.full.pop_front().or_else(|| self.filling.take())?;
        self.writing = next.items.iter().map(|item| item.index).collect();
        Some(next)
    }

    fn done(&mut self, group: Group, group_bytes: usize) {
        self.bytes -= group.memory.len();
        self.writing.clear();
        if group.memory.len() == group_bytes {
            self.spare = Some(group.memory);
        }
    }

    fn has(&self, index: usize) -> bool {
        let holds = |group: &Group| group.items.iter().any(|item| item.index == index);
        self.writing.contains(&index)
            || self.filling.as_ref().is_some_and(holds)
            || self.full.iter().any(holds)
    }

    fn group_for(&mut self, len: usize, group_bytes: usize, calls: u64) -> Option<&mut Group> {
        if self.filling.as_ref().is_some_and(|group| !group.has_room(len)) {
            self.full.extend(self.filling.take());
        }
        if self.filling.is_none() {
            let spare = if len <= group_bytes { self.spare.take() } else { None };
            let memory = spare.or_else(|| Pages::new(len.max(group_bytes)))?;
            let group = Group::new(memory, calls);
            self.bytes += group.memory.len();
            self.filling = Some(group);
        }
        self.filling.as_mut()
    }
}

impl Behind {
    /// Writes groups of about so many bytes.
    pub(super) fn new(group_bytes: usize, calls: Calls) -> Self {
        let group_bytes = group_bytes.clamp(PAGE, MOST_GROUP_BYTES).next_multiple_of(PAGE);
        let (queue, changed) = (Mutex::default(), Condvar::new());
        Self { shared: Arc::new(Shared { group_bytes, queue, changed, calls }) }
    }

    /// Takes a claimed record to be written; false if there is no room for it before the deadline.
    pub(super) fn push<W: Writer + 'static>(
        &self,
        writer: &Arc<W>,
        index: usize,
        since: u64,
        head: &[u8],
        parts: &[IoSlice<'_>],
        deadline: Instant,
    ) -> bool {
        let shared = &self.shared;
        let len = head.len() + parts.iter().map(|part| part.len()).sum::<usize>();
        let calls = (shared.calls)();
        let mut queue = shared.lock();
        // One that is longer than all may wait alone.
        while queue.bytes > 0 && queue.bytes + len.max(shared.group_bytes) > MOST_BYTES {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || queue.ends {
                return false;
            }
            queue.hurry += 1;
            shared.changed.notify_all();
            queue = shared.wait(queue, left);
            queue.hurry -= 1;
        }
        let (begun, full) = (queue.filling.is_some(), queue.full.len());
        let Some(group) = queue.group_for(len, shared.group_bytes, calls) else { return false };
        group.add(index, since, head, parts);
        // The thread looks by itself at what grows.
        let is_news = !begun || queue.full.len() > full;
        if !queue.has_thread {
            let weak: Weak<dyn Writer> = Arc::<W>::downgrade(writer);
            queue.has_thread = start(weak, Arc::clone(shared));
        }
        let group = if queue.has_thread { None } else { queue.next() };
        drop(queue);
        if is_news {
            shared.changed.notify_all();
        }
        if let Some(mut group) = group {
            // No thread is to be had: then it is written here.
            writer.write(&mut group, &mut None);
            shared.lock().done(group, shared.group_bytes);
        }
        true
    }

    /// Waits until all that was brought is written; whether it is.
    pub(super) fn flush(&self, patience: Duration) -> bool {
        self.wait(patience, Queue::is_empty)
    }

    /// Waits until that sample is written, if it is about to be; whether it is not any more.
    pub(super) fn wait_for(&self, index: usize, patience: Duration) -> bool {
        self.wait(patience, |queue| !queue.has(index))
    }

    fn wait(&self, patience: Duration, done: impl Fn(&Queue) -> bool) -> bool {
        let mut queue = self.shared.lock();
        let began = Instant::now();
        queue.hurry += 1;
        self.shared.changed.notify_all();
        while !done(&queue) {
            let left = patience.saturating_sub(began.elapsed());
            if left.is_zero() {
                break;
            }
            queue = self.shared.wait(queue, left);
        }
        queue.hurry -= 1;
        done(&queue)
    }

    /// How many records wait.
    pub(super) fn waiting(&self) -> usize {
        let queue = self.shared.lock();
        let groups = queue.full.iter().chain(&queue.filling);
        queue.writing.len() + groups.map(|group| group.items.len()).sum::<usize>()
    }

    /// Writes what is left, for a while, and ends the thread.
    pub(super) fn end(&self, writer: &dyn Writer) {
        let until = Instant::now() + LAST_PATIENCE;
        let mut queue = self.shared.lock();
        queue.ends = true;
        let mut left: Vec<Group> = queue.full.drain(..).collect();
        left.extend(queue.filling.take());
        drop(queue);
        self.shared.changed.notify_all();
        let mut last = None;
        for group in &mut left {
            if Instant::now() < until || broken(Fault::WaitForEver) {
                writer.write(group, &mut last);
            } else {
                writer.give_up(group);
            }
        }
    }
}

/// A thread that writes for as long as there is a writer; false if none is to be had.
fn start(writer: Weak<dyn Writer>, shared: Arc<Shared>) -> bool {
    let serve = move || {
        let mut last = None;
        let mut queue = shared.lock();
        loop {
            if queue.has_next((shared.calls)()) {
                // Who drops it writes what is left itself.
                let Some(writer) = writer.upgrade() else { return };
                let next = queue.next();
                drop(queue);
                let Some(mut group) = next else { return };
                writer.write(&mut group, &mut last);
                drop(writer); // perhaps the last to have it: so without the lock
                queue = shared.lock();
                queue.done(group, shared.group_bytes);
                shared.changed.notify_all();
                continue;
            }
            if queue.ends {
                return;
            }
            queue = if queue.filling.is_some() {
                shared.wait(queue, OLD)
            } else {
                last = None; // a file that is open takes room when it is removed
                shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
            };
        }
    };
    std::thread::Builder::new().name("stocache-write".into()).spawn(serve).is_ok()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A disk that takes its time.
    #[derive(Default)]
    struct Slow {
        written: AtomicUsize,
        given_up: AtomicUsize,
    }

    impl Writer for Slow {
        fn write(&self, group: &mut Group, _: &mut Last) {
            std::thread::sleep(Duration::from_millis(200));
            self.written.fetch_add(group.items.len(), Ordering::Relaxed);
        }

        fn give_up(&self, group: &Group) {
            self.given_up.fetch_add(group.items.len(), Ordering::Relaxed);
        }
    }

    #[test]
    fn what_cannot_be_written_in_time_at_the_end_is_given_up() {
        let slow = Arc::new(Slow::default());
        let behind = Behind::new(PAGE, Box::new(|| 0));
        let record = [7; PAGE];
        let soon = Instant::now() + Duration::from_secs(60);
        (0..20).for_each(|i| assert!(behind.push(&slow, i, 0, &record, &[], soon)));
        assert!(behind.waiting() > 10);
        behind.end(&*slow);
        let given_up = slow.given_up.load(Ordering::Relaxed);
        assert!((1..20).contains(&given_up), "{given_up} of 20");
        assert!(behind.flush(Duration::from_secs(60)), "the thread is done with its own");
        assert_eq!(slow.written.load(Ordering::Relaxed) + given_up, 20, "each is one or the other");
    }
}
