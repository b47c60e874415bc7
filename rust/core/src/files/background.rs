//! Threads that copy files behind the caller's back, a few per process.

use crate::sys::fork;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};

const THREADS: usize = 2;
/// What does not fit is not remembered: it is asked for again in the next epoch.
const WAITING: usize = 1024;

/// Who can copy a file by its name.
pub(crate) trait Copier: Send + Sync {
    /// Copies it, if there is none; never panics.
    fn copy(&self, name: &[u8]);
}

/// A cache that is closed meanwhile needs no more copies.
type Job = (Weak<dyn Copier>, Vec<u8>);

struct ThreadPool {
    process: u32,
    jobs: SyncSender<Job>,
}

/// The pool of this process; a forked child finds its parent's, which has no threads here.
static POOL: AtomicPtr<ThreadPool> = AtomicPtr::new(std::ptr::null_mut());

/// Asks for a copy. Never waits.
pub(crate) fn submit(copier: Weak<dyn Copier>, name: &[u8]) {
    if let Some(pool) = pool() {
        drop(pool.jobs.try_send((copier, name.to_vec())));
    }
}

#[allow(unsafe_code)] // a pool is never freed, so that a reference to it is good for ever
fn pool() -> Option<&'static ThreadPool> {
    let found = POOL.load(Ordering::Acquire);
    // SAFETY: null, or leaked below and never changed.
    if let Some(pool) = unsafe { found.as_ref() }
        && pool.process == fork::process()
    {
        return Some(pool);
    }
    let (jobs, queue) = sync_channel(WAITING);
    let queue = Arc::new(Mutex::new(queue));
    let start = || {
        let queue = queue.clone();
        let builder = std::thread::Builder::new().name("stocache-copy".into());
        builder.spawn(move || work(&queue))
    };
    if (0..THREADS).filter(|_| start().is_ok()).count() == 0 {
        return None;
    }
    let made = Box::into_raw(Box::new(ThreadPool { process: fork::process(), jobs }));
    match POOL.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just leaked.
        Ok(_) => unsafe { made.as_ref() },
        Err(other) => {
            // SAFETY: ours alone; its threads end when the sender goes. The other is leaked.
            unsafe {
                drop(Box::from_raw(made));
                other.as_ref()
            }
        }
    }
}

fn work(queue: &Mutex<Receiver<Job>>) {
    loop {
        let next = match queue.lock() {
            Ok(queue) => queue.recv(),
            Err(_) => return,
        };
        let Ok((copier, name)) = next else { return };
        if let Some(copier) = copier.upgrade() {
            copier.copy(&name);
        }
    }
}
