//! Switches that break one rule each, for the control tests.
//!
//! A harness that cannot see a broken build proves nothing, so with the feature `faults` the
//! environment variable `STOCACHE_FAULT` names one rule to break. Without the feature every switch
//! is the constant `false` and costs nothing.

/// A rule that can be broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Publish the slot before its bytes are written.
    PublishEarly,
    /// Never take over the slot of a dead writer.
    NoTakeover,
    /// Take a slot from a writer that is alive.
    StealFromLiving,
    /// Remove the name on detach without asking whether others are attached.
    UnlinkLive,
    /// Accept a header whose checksum does not match.
    SkipHeaderChecksum,
    /// Write through the mapping instead of pwrite, so that a full mount is a SIGBUS.
    WriteThroughMapping,
    /// Ignore the epoch, so that a copy may mix an old and a new value.
    IgnoreEpoch,
    /// Empty a region without asking whether somebody is writing to it.
    RecycleInUse,
    /// Copy a file that somebody else is copying.
    IgnoreFileLock,
    /// Copy a file under the name it will have.
    CopyInPlace,
    /// Remove a file without asking whether somebody is about to open it.
    EvictInUse,
    /// Leave open segments as they are when the process forks.
    NoForkHandler,
    /// Register the fork handlers at the first use instead of as the library is loaded.
    LateForkHandler,
}

#[cfg(feature = "faults")]
pub(crate) fn active(fault: Fault) -> bool {
    use std::sync::OnceLock;
    static NAME: OnceLock<String> = OnceLock::new();
    let name = NAME.get_or_init(|| std::env::var("STOCACHE_FAULT").unwrap_or_default());
    *name == format!("{fault:?}")
}

#[cfg(not(feature = "faults"))]
#[inline(always)]
pub(crate) const fn active(_fault: Fault) -> bool {
    false
}
