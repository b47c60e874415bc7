//! What to open, and whether what is there will do.

use crate::error::{Error, Kind, Result};
use crate::segment::layout::{Geometry, Header};
use crate::segment::name::Backing;
use crate::sys::huge_pages::HugePages;
use crate::sys::limits;

/// How a segment was come by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// Made, empty.
    Created,
    /// Others use it already.
    Joined,
    /// Kept from an earlier run.
    Resumed,
}

/// Where another process has the segment open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Join {
    /// The segment's random number.
    pub instance: u128,
    /// A process that has it open.
    pub pid: u32,
    /// Its descriptor there.
    pub fd: i32,
}

/// What to open.
#[derive(Clone, Debug)]
pub struct Request {
    /// The user's name for it, or a generated one.
    pub name: String,
    /// What it holds, and how much.
    pub geometry: Geometry,
    /// What the user says the data are; zero for nothing.
    pub fingerprint: u128,
    /// The name outlives the last process.
    pub keep: bool,
    /// Where the bytes live.
    pub backing: Backing,
    /// Whether this process fills it with huge pages.
    pub huge_pages: HugePages,
    /// The name is random: nobody else can have it, so nobody needs to be looked for.
    pub private: bool,
    /// A process that has it open.
    pub join: Option<Join>,
}

impl Request {
    /// What others may have open by that name or will; it goes with its last process.
    pub fn new(name: impl Into<String>, geometry: Geometry) -> Self {
        Self {
            name: name.into(),
            geometry,
            fingerprint: 0,
            keep: false,
            backing: Backing::Auto,
            huge_pages: HugePages::No,
            private: false,
            join: None,
        }
    }

    pub(super) fn wanted(&self) -> Wanted<'_> {
        Wanted { name: &self.name, like: Some(self) }
    }
}

/// What an existing segment must be to be joined.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) name: &'a str,
    /// None takes whatever has the name.
    pub(super) like: Option<&'a Request>,
}

impl Wanted<'_> {
    pub(super) fn check(self, header: &Header) -> Result<()> {
        limits::check_file_size(header.geometry.extent()?.total)?;
        let Some(request) = self.like else { return Ok(()) };
        let why = if !header.geometry.serves(&request.geometry) {
            format!(
                "geometry: the cache {:?} exists with {}, but {} was asked for; use another name or the same arguments",
                self.name, header.geometry, request.geometry
            )
        } else if request.keep && !header.keep {
            format!(
                "keep: the cache {:?} is in use by processes that did not ask to keep it; \
                 use another name, or keep=True in all of them",
                self.name
            )
        } else if header.fingerprint != request.fingerprint {
            let remedy = if header.keep {
                format!("remove the old one (on_change=\"clear\", or `stocache rm {}`)", self.name)
            } else {
                "end the programs that use it".to_string()
            };
            format!(
                "fingerprint: the cache {:?} was made for other data; use another name or {remedy}",
                self.name
            )
        } else {
            return Ok(());
        };
        Err(Error::new(Kind::Argument, why))
    }
}
