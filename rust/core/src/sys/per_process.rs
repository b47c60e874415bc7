//! What each process makes for itself: threads, descriptors, locks of std. A forked child finds its
//! parent's in whatever state it was, leaves it alone, and makes its own at first use.
#![allow(unsafe_code)] // a pointer that is changed once per process

use crate::sys::fork::Me;
use std::sync::atomic::{AtomicPtr, Ordering};

pub(crate) struct PerProcess<T> {
    current: AtomicPtr<Made<T>>,
}

struct Made<T> {
    owner: Me,
    value: T,
}

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self { current: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// What this process has, if it made it.
    pub(crate) fn get(&self) -> Option<&T> {
        // Acquire: as below.
        let current = self.current.load(Ordering::Acquire);
        // SAFETY: null or made below, and not freed before this is dropped.
        let made = unsafe { current.as_ref() }?;
        (made.owner == Me::now()).then_some(&made.value)
    }

    /// The same; made now if need be. Of several threads that make it at once, one wins.
    pub(crate) fn get_or_make(&self, make: impl Fn() -> T) -> &T {
        loop {
            let current = self.current.load(Ordering::Acquire);
            if let Some(found) = self.get() {
                return found;
            }
            let made = Box::into_raw(Box::new(Made { owner: Me::now(), value: make() }));
            // Release: whoever sees the address sees what is there. That of a parent is leaked.
            let put =
                self.current.compare_exchange(current, made, Ordering::Release, Ordering::Relaxed);
            if put.is_err() {
                // SAFETY: made above, and nobody has seen it.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        if self.get().is_some() {
            // SAFETY: made in `get_or_make` by this process; nobody has a reference any more.
            drop(unsafe { Box::from_raw(*self.current.get_mut()) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_makes_its_own_and_leaves_its_parents_alone() {
        let cell = PerProcess::new();
        assert_eq!(cell.get(), None);
        assert_eq!(*cell.get_or_make(|| String::from("parent")), "parent");
        assert_eq!(*cell.get_or_make(|| unreachable!()), "parent");
        // SAFETY: the child ends without a return to the test.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let good = cell.get().is_none() && *cell.get_or_make(|| "child".into()) == "child";
            drop(cell);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        let mut status = -1;
        // SAFETY: our child, and a status of our own.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!((status, cell.get().map(String::as_str)), (0, Some("parent")));
    }

    #[test]
    fn threads_that_make_it_at_once_get_the_same() {
        let cell = PerProcess::new();
        let addresses: Vec<usize> = std::thread::scope(|scope| {
            let find = || std::ptr::from_ref(cell.get_or_make(|| vec![1, 2, 3])).addr();
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(find)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(addresses.iter().all(|&address| address == addresses[0]));
    }
}
