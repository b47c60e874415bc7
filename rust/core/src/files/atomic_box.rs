//! One value that threads take and put back. No thread waits for another, and a fork while a thread
//! has the value costs the child that value and nothing else: a mutex would stay locked there.

use std::sync::atomic::{AtomicPtr, Ordering};

/// A place for one value. The pointer owns a box, or is null.
pub(crate) struct AtomicBox<T>(AtomicPtr<T>);

impl<T> AtomicBox<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed).is_null()
    }

    pub(crate) fn take(&self) -> Option<Box<T>> {
        // SYNC POINT box: Acquire here, Release in `put`: who takes a value sees what is in it.
        own(self.0.swap(std::ptr::null_mut(), Ordering::AcqRel))
    }

    /// Puts a value there if there is none; else gives it back.
    pub(crate) fn put(&self, value: Box<T>) -> Result<(), Box<T>> {
        let (none, new) = (std::ptr::null_mut(), Box::into_raw(value));
        match self.0.compare_exchange(none, new, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => Ok(()),
            Err(_) => own(new).map_or(Ok(()), Err),
        }
    }
}

#[allow(unsafe_code)] // a box behind an atomic pointer
fn own<T>(pointer: *mut T) -> Option<Box<T>> {
    // SAFETY: made by Box::into_raw in `put`, and swapped out or never in, so nobody else has it.
    (!pointer.is_null()).then(|| unsafe { Box::from_raw(pointer) })
}

impl<T> Drop for AtomicBox<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_at_a_time() {
        let cell = AtomicBox::new();
        assert!(cell.is_empty() && cell.take().is_none());
        assert_eq!(cell.put(Box::new(1)), Ok(()));
        assert_eq!(cell.put(Box::new(2)), Err(Box::new(2)));
        assert_eq!(
            (cell.is_empty(), cell.take(), cell.is_empty()),
            (false, Some(Box::new(1)), true)
        );
    }

    #[test]
    fn no_two_threads_have_it() {
        let cell = AtomicBox::new();
        cell.put(Box::new(0u64)).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut left = 10_000;
                    while left > 0 {
                        if let Some(mut count) = cell.take() {
                            *count += 1;
                            left -= 1;
                            cell.put(count).unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(cell.take(), Some(Box::new(40_000)));
    }
}
