//! Copies of a far folder's files on a near disk. Each module knows only those below it.
//!
//! | module | role |
//! | --- | --- |
//! | `inspect` | what is there, compared byte by byte, counted, cleared |
//! | `cache` | serving: the copy if there is a right one, else it is made, else the source |
//! | `background` | a thread pool that copies files behind the caller's back |
//! | `make` | a copy made, and given its name |
//! | `evict` | making room: which files go, and when one may |
//! | `folder` | the folder on the near disk: opened, and what is in it remembered |
//! | `domain` | who else uses the folder |
//! | `news` | what people should know, each once |
//! | `table` | what the processes of a node know together about files |
//! | `journal` | which files are ours: a log on disk |
//! | `copy` | one file copied whole, or not at all |
//! | `content` | what tells two states of a file apart |
//! | `paths` | names, paths and folders |
//! | `atomic_box` | one value that threads take and put back |
//! | `options` | what callers say and are told |

mod atomic_box;
mod background;
mod cache;
mod content;
mod copy;
mod domain;
mod evict;
mod folder;
mod inspect;
mod journal;
mod make;
mod news;
mod options;
mod paths;
mod table;
#[cfg(test)]
mod tests;

pub use cache::FileCache;
pub use options::{Check, FileOptions, FileStats, Served, Verdict};
