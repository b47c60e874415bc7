//! Nothing panics across the bridge: a panic there is an abort of the trainer.

use stocache::{Error, Kind};
pub use stocache::{calm, guard};

/// An error as it crosses: the kind's word, a unit separator, the message. `rust_errors.h` splits it.
/// After "errno" stands its number, and the message is a path.
#[derive(Debug)]
pub struct Crossing(Error);

impl std::fmt::Display for Crossing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let number = match self.0.kind() {
            Kind::Errno(number) => number.to_string(),
            _ => String::new(),
        };
        write!(f, "{}{number}\u{1f}{}", self.0.kind().word(), self.0.message())
    }
}

impl From<Error> for Crossing {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<tch::TchError> for Crossing {
    fn from(error: tch::TchError) -> Self {
        Self(Error::new(Kind::System, format!("libtorch: {error}")))
    }
}

impl From<cxx::Exception> for Crossing {
    fn from(error: cxx::Exception) -> Self {
        Self(Error::new(Kind::System, format!("libtorch: {error}")))
    }
}
