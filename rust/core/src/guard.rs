//! A panic becomes an error, for code that is called by other languages.

use crate::error::{Error, Kind};
use crate::fault::{Fault, active};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `act`; a panic in it becomes an error.
pub fn guard<T, E: From<Error>>(act: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    if active(Fault::NoGuard) {
        return act();
    }
    // A core value that panicked half-way is not used again: the caller gets an error.
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| {
        let what = panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        Err(Error::new(Kind::State, format!("a bug in stocache, please report it: {what}")).into())
    })
}

/// Runs `act`; a panic in it becomes `otherwise`. For who cannot say that something went wrong; the
/// panic itself does, on stderr.
#[inline]
pub fn calm<T>(otherwise: T, act: impl FnOnce() -> T) -> T {
    if active(Fault::NoGuard) {
        return act();
    }
    catch_unwind(AssertUnwindSafe(act)).unwrap_or(otherwise)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// P23
    #[test]
    fn a_panic_is_an_error_with_its_words() {
        let empty: [u8; 0] = [];
        let at = std::hint::black_box(3);
        let error = guard(|| Ok::<_, Error>(empty[at])).unwrap_err();
        assert_eq!(error.kind(), Kind::State);
        assert!(error.message().contains("index is 3"), "{error}");
        assert!(error.message().contains("bug in stocache"), "{error}");
        let error = guard(|| -> Result<(), Error> { std::panic::panic_any(5) }).unwrap_err();
        assert_eq!(error.kind(), Kind::State);
        assert_eq!(guard(|| Ok::<_, Error>(7)).unwrap(), 7);
    }

    /// P23
    #[test]
    fn a_panic_is_the_answer_of_who_cannot_say_so() {
        let empty: [u8; 0] = [];
        let at = std::hint::black_box(3);
        assert_eq!((calm(7, || empty[at]), calm(7, || 8)), (7, 8));
    }
}
