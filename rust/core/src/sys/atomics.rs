//! Atomics: the real ones, or loom's model of them under `--cfg loom`.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};
