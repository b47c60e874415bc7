//! The one error type.

/// What went wrong, in the words a caller can act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// An argument outside what is allowed.
    Argument,
    /// An argument of the wrong type.
    Type,
    /// An index outside the dataset or the cache.
    Index,
    /// Not enough memory, space on the mount, or descriptors.
    Space,
    /// Something at that name that is not ours to use.
    Refused,
    /// The operation is not possible in this state.
    State,
    /// The operating system said no.
    System,
    /// The caller asked to be let go; it knows why.
    Interrupted,
    /// The operating system said no about a file of the caller's, with this number; the message is
    /// its path alone.
    Errno(i32),
}

impl Kind {
    /// The word that stands for this kind across the language boundary.
    pub const fn word(self) -> &'static str {
        match self {
            Kind::Argument => "argument",
            Kind::Type => "type",
            Kind::Index => "index",
            Kind::Space => "space",
            Kind::Refused => "refused",
            Kind::State => "state",
            Kind::System => "system",
            Kind::Interrupted => "interrupted",
            Kind::Errno(_) => "errno",
        }
    }

    fn suffix(self) -> String {
        match self {
            Kind::Errno(number) => format!(": {}", std::io::Error::from_raw_os_error(number)),
            _ => String::new(),
        }
    }
}

/// One line that says what was given, what is allowed and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}{}", .kind.suffix())]
pub struct Error {
    kind: Kind,
    message: String,
}

/// The result of everything here that can go wrong.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of `kind` with a one-line message.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// What sort of error this is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The message alone; the path of the file for [`Kind::Errno`].
    pub fn message(&self) -> &str {
        &self.message
    }

    /// A failed system call; the remedy is added where there is a usual one.
    #[cfg(not(loom))]
    pub(crate) fn system(doing: &str, errno: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        let (kind, remedy) = match errno {
            Errno::NOSPC | Errno::DQUOT => {
                (Kind::Space, "; free some of /dev/shm, remount it larger or use backing=\"memfd\"")
            }
            Errno::NOMEM => {
                (Kind::Space, "; lower the size limit or raise the memory limit (ulimit -v)")
            }
            Errno::MFILE | Errno::NFILE => {
                (Kind::Space, "; raise the limit of open files (ulimit -n)")
            }
            Errno::ROFS | Errno::ACCESS | Errno::PERM => {
                (Kind::System, "; make /dev/shm writable for this user or use backing=\"memfd\"")
            }
            Errno::NOENT | Errno::NOTDIR => {
                (Kind::System, "; is /dev/shm mounted? backing=\"memfd\" needs no /dev/shm")
            }
            _ => (Kind::System, ""),
        };
        Self::new(kind, format!("{doing}: {errno}{remedy}"))
    }

    /// What a failed write of `what` says of the caller; `None` if it speaks of the space that all
    /// share.
    #[cfg(not(loom))]
    pub(crate) fn unwritable(what: &str, errno: rustix::io::Errno) -> Option<Self> {
        use rustix::io::Errno;
        match errno {
            Errno::FAULT => Some(Self::new(
                Kind::Argument,
                format!("the {what}'s memory cannot be read; use ordinary tensors"),
            )),
            Errno::BADF => Some(Self::closed()),
            _ => None,
        }
    }

    /// The program closed a descriptor that is ours.
    #[cfg(not(loom))]
    pub(crate) fn closed() -> Self {
        Self::new(
            Kind::State,
            "this process closed a descriptor of the cache, which it does not own; \
             construct the cache after closing descriptors",
        )
    }

    /// The caller asked to be let go.
    #[cfg(not(loom))]
    pub(crate) fn interrupted() -> Self {
        Self::new(Kind::Interrupted, "interrupted")
    }
}

/// Why a cache froze, for the one warning: `state` is what it was like, `errno` that of the write.
#[cfg(not(loom))]
pub(crate) fn frozen_reason(name: &str, state: &str, errno: i32) -> String {
    format!(
        "the cache {name:?} is frozen{state}: writing a sample failed ({}); training goes on, \
         what is cached stays, what is not is loaded from the source",
        std::io::Error::from_raw_os_error(errno)
    )
}
