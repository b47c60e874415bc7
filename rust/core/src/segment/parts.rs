//! Where the parts lie that all segments have, whatever they hold: see layout.rs for the picture.

use crate::segment::claim::{ENTRY_WORDS, LEASES};

/// Length of the immutable header.
pub const HEADER_BYTES: usize = 256;

pub(crate) const FROZEN_AT: usize = 512;
pub(crate) const EPOCH_AT: usize = 576;
pub(crate) const TOLD_AT: usize = 640;
pub(crate) const RESTS_AT: usize = 704;
pub(crate) const RESTS: usize = (NOTES_AT - RESTS_AT) / 8;
pub(crate) const NOTES_AT: usize = 1024;
pub(crate) const NOTES_BYTES: usize = COUNTERS_AT - NOTES_AT;
pub(crate) const COUNTERS_AT: usize = PAGE;
pub(crate) const COUNTER_STRIPES: usize = 64;
pub(crate) const COUNTER_STRIPE_BYTES: usize = 192;
pub(crate) const LEASES_AT: usize = COUNTERS_AT + COUNTER_STRIPES * COUNTER_STRIPE_BYTES;
pub(crate) const STATES_AT: u64 = (LEASES_AT + LEASES as usize * ENTRY_WORDS * 8) as u64;

pub(crate) const PAGE: usize = 4096;
/// A cache line.
pub(crate) const LINE: u64 = 64;
/// States beyond those of the samples: locks that end with their holder.
pub(crate) const LOCKS: u64 = 2;

const _: () = {
    assert!(HEADER_BYTES <= FROZEN_AT);
    assert!(FROZEN_AT / 64 != EPOCH_AT / 64, "the epoch has its own cache line");
    assert!(EPOCH_AT.is_multiple_of(8) && EPOCH_AT / 64 != TOLD_AT / 64);
    assert!(TOLD_AT / 64 < RESTS_AT / 64 && RESTS_AT < NOTES_AT && NOTES_AT < COUNTERS_AT);
    assert!(COUNTERS_AT.is_multiple_of(64) && COUNTER_STRIPE_BYTES.is_multiple_of(64));
    assert!(LEASES_AT.is_multiple_of(64) && STATES_AT.is_multiple_of(64));
};
