//! On a heap-backed segment, so that Miri can run them: `cargo +nightly miri test --lib heap`.
use crate::segment::claim::{Claim, EMPTY, Lease, Orphans, Slots, claimed_by};
use crate::segment::counters::{Count, Counters};
use crate::segment::layout::{SlotsGeometry, SlotsLayout};
use crate::segment::lease;
use crate::slots::seen::Seen;
use crate::sys::mapping::{Mapping, checksum};
use std::sync::atomic::Ordering;

fn heap() -> (Mapping, SlotsLayout, SlotsGeometry) {
    let geometry = SlotsGeometry::plan(1 << 16, 100, &[64], 0, 1, true).unwrap();
    let layout = geometry.layout().unwrap();
    (Mapping::heap(layout.total as usize), layout, geometry)
}

fn slots<'a>(mapping: &'a Mapping, layout: &SlotsLayout, geometry: &SlotsGeometry) -> Slots<'a> {
    lease::slots(mapping, layout.states_at, geometry.capacity)
}

/// No lease is ever free.
struct AllAlive;

impl Orphans for AllAlive {
    fn while_orphaned<R>(&self, _k: Lease, _act: impl FnOnce() -> R) -> Option<R> {
        None
    }
}

/// Every lease is free.
struct AllDead;

impl Orphans for AllDead {
    fn while_orphaned<R>(&self, _k: Lease, act: impl FnOnce() -> R) -> Option<R> {
        Some(act())
    }
}

#[test]
fn heap_slot_is_claimed_filled_published_and_read() {
    let (mapping, layout, geometry) = heap();
    let slots = slots(&mapping, &layout, &geometry);
    let at = layout.slot_at(&geometry, 5) as usize;
    assert_eq!(slots.claim(5, 0, false, &AllAlive), Claim::Claimed);
    assert_eq!(slots.claim(5, 1, false, &AllAlive), Claim::Busy);
    mapping.write(at, &[9; 64]);
    assert!(slots.publish(5, 0));
    assert_eq!(slots.claim(5, 1, false, &AllAlive), Claim::Occupied);
    let mut row = [0u8; 64];
    #[allow(unsafe_code)]
    // SAFETY: `row` is one slot long.
    let copied = slots.read_stable(5, || unsafe { mapping.copy_out(at, row.as_mut_ptr(), 64) });
    assert_eq!((copied, row), (Some(()), [9; 64]));
    assert_eq!(mapping.checksum(at, 64), checksum(&[9; 64]));
    assert_eq!(slots.filled(), 1);
}

#[test]
fn heap_slot_of_a_dead_writer_is_taken_over_or_swept() {
    let (mapping, layout, geometry) = heap();
    let slots = slots(&mapping, &layout, &geometry);
    assert_eq!(slots.claim(0, 7, false, &AllAlive), Claim::Claimed);
    assert_eq!(slots.claim(1, 7, false, &AllAlive), Claim::Claimed);
    assert_eq!(slots.claim(0, 8, false, &AllDead), Claim::Claimed);
    slots.empty_claims_of_the_dead(7);
    assert_eq!((slots.state(0), slots.state(1)), (claimed_by(8), EMPTY));
}

#[test]
fn heap_only_a_lease_whose_holder_left_claims_costs_a_walk() {
    let (mapping, layout, geometry) = heap();
    let slots = slots(&mapping, &layout, &geometry);
    let left = |lease| slots.entry(lease).claims.load(Ordering::Relaxed);
    assert_eq!(slots.claim(0, 7, false, &AllAlive), Claim::Claimed);
    assert_eq!(slots.claim(0, 8, true, &AllAlive), Claim::Busy);
    assert_eq!((left(7), left(8)), (1, 0));
    assert!(slots.publish(0, 7) && !slots.publish(0, 7));
    slots.abandon(0, 7);
    assert_eq!(left(7), 0);
    slots.clear(7, |_| true, |_| assert_eq!(left(7), 1));
    assert_eq!(slots.claim(3, 7, false, &AllAlive), Claim::Claimed);
    assert_eq!(slots.claim(4, 7, false, &AllAlive), Claim::Claimed);
    assert_eq!(slots.claim(4, 8, false, &AllDead), Claim::Claimed);
    assert_eq!((left(7), left(8)), (2, 1), "one was taken over, and is counted all the same");
    slots.empty_claims_of_the_dead(7);
    assert_eq!((left(7), slots.state(3), slots.state(4)), (0, EMPTY, claimed_by(8)));
}

#[test]
fn heap_clear_empties_what_is_set_and_leaves_what_is_being_written() {
    let (mapping, layout, geometry) = heap();
    let slots = slots(&mapping, &layout, &geometry);
    for i in 0..100 {
        assert_eq!(slots.claim(i, 0, false, &AllAlive), Claim::Claimed);
        assert!(i == 42 || slots.publish(i, 0));
    }
    let mut scrubbed = 0;
    slots.clear(1, |_| true, |_| scrubbed += 1);
    assert_eq!((scrubbed, slots.filled(), slots.state(42)), (99, 0, claimed_by(0)));
}

#[test]
fn heap_counters_of_threads_add_up() {
    let (mapping, ..) = heap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..100).for_each(|_| Counters(&mapping).add(Count::Hits, 2)));
        }
    });
    assert_eq!(Counters(&mapping).sum(Count::Hits), 800);
}

#[test]
fn heap_what_was_missed_in_a_closed_cache_excuses_nothing() {
    for _ in 0..100 {
        let seen = Seen::new(64);
        assert!(!seen.was_missed(7), "of a cache at the same address");
        seen.missed(7);
    }
}

#[test]
fn heap_what_was_seen_is_remembered_per_sample() {
    let seen = Seen::new(130);
    seen.insert(129);
    seen.insert(64);
    seen.remove(64);
    assert!(seen.contains(129) && !seen.contains(64) && !seen.contains(0));
}
