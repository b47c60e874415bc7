//! Models of the slot protocol: loom tries every order of these steps.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --profile models --lib segment::claim::models`

use super::*;
use crate::segment::lock::StateLock;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU8;
use loom::thread;

/// A cache of one slot of two bytes, and leases that a model can kill.
struct World {
    states: [AtomicU16; 1],
    leases: [AtomicU64; 3 * ENTRY_WORDS],
    epoch: AtomicU64,
    bytes: [AtomicU8; 2],
    /// Who holds lease k: 0 nobody, else a process number. Stands for the kernel's lock table, so
    /// it is changed only by compare-and-swap, as a system call is one step.
    holders: [AtomicU8; 3],
}

impl World {
    fn new(state: State, bytes: u8) -> Arc<Self> {
        Arc::new(Self {
            states: [AtomicU16::new(state)],
            // Whoever claimed it has counted it.
            leases: std::array::from_fn(|at| {
                AtomicU64::new(u64::from(at == 1 && is_claimed(state)))
            }),
            epoch: AtomicU64::new(0),
            bytes: [AtomicU8::new(bytes), AtomicU8::new(bytes)],
            holders: [AtomicU8::new(0), AtomicU8::new(0), AtomicU8::new(0)],
        })
    }

    fn slots(&self) -> Slots<'_> {
        Slots::new(&self.states, &self.epoch, &self.leases)
    }

    fn lock(&self, k: Lease, process: u8) -> bool {
        self.holders[k as usize]
            .compare_exchange(0, process, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    fn unlock(&self, k: Lease) {
        self.holders[k as usize].store(0, Ordering::Release);
    }

    fn fill(&self, value: u8) {
        for byte in &self.bytes {
            byte.store(value, Ordering::Relaxed);
        }
    }

    /// One more in the first byte, in two steps: two who do it at once count one.
    fn count(&self) {
        let before = self.bytes[0].load(Ordering::Relaxed);
        self.bytes[0].store(before + 1, Ordering::Relaxed);
    }

    fn copy(&self) -> [u8; 2] {
        [0, 1].map(|i| self.bytes[i].load(Ordering::Relaxed))
    }

    /// A whole write in the name of `lease`; true if it was ours to make.
    fn write(&self, me: Process, value: u8, overwrite: bool) -> bool {
        let won = self.slots().claim(0, me.lease, overwrite, &Look(self, me)) == Claim::Claimed;
        if won {
            self.fill(value);
            assert!(self.slots().publish(0, me.lease), "a living writer lost its claim");
        }
        won
    }

    /// A copy as a reader makes it: whole or nothing.
    fn read(&self) -> Option<u8> {
        let [a, b] = self.slots().read_stable(0, || self.copy())?;
        assert_eq!(a, b, "torn");
        Some(a)
    }
}

/// loom runs a thread up to its first wait before it tries another one; without this the orders in
/// which the spawned thread is ahead would not be tried (the first control below found that).
fn others_may_go_first() {
    thread::yield_now();
}

#[derive(Clone, Copy)]
struct Process {
    number: u8,
    lease: Lease,
}

struct Look<'a>(&'a World, Process);

impl Orphans for Look<'_> {
    fn while_orphaned<R>(&self, k: Lease, act: impl FnOnce() -> R) -> Option<R> {
        if !self.0.lock(k, self.1.number) {
            return None;
        }
        let result = act();
        self.0.unlock(k);
        Some(result)
    }
}

const A: Process = Process { number: 1, lease: 0 };
const B: Process = Process { number: 2, lease: 1 };

#[test]
fn a_reader_sees_nothing_or_all_of_a_first_write() {
    loom::model(|| {
        let world = World::new(EMPTY, 0);
        assert!(world.lock(A.lease, A.number));
        let writer = thread::spawn({
            let world = world.clone();
            move || assert!(world.write(A, 7, false))
        });
        others_may_go_first();
        // As a view is read: no epoch, only the state.
        if world.slots().state(0) == SET {
            assert_eq!(world.copy(), [7, 7]);
        }
        writer.join().unwrap();
        assert_eq!(world.read(), Some(7));
    });
}

#[test]
fn of_two_writers_of_one_slot_exactly_one_wins() {
    loom::model(|| {
        let world = World::new(EMPTY, 0);
        assert!(world.lock(A.lease, A.number) && world.lock(B.lease, B.number));
        let other = thread::spawn({
            let world = world.clone();
            move || world.write(A, 1, false)
        });
        others_may_go_first();
        let mine = world.write(B, 2, false);
        let theirs = other.join().unwrap();
        assert!(mine ^ theirs);
        assert_eq!(world.read(), Some(if mine { 2 } else { 1 }));
    });
}

#[test]
fn a_copy_is_never_a_mixture_while_the_slot_is_overwritten() {
    loom::model(|| {
        let world = World::new(SET, 1);
        assert!(world.lock(A.lease, A.number));
        let writer = thread::spawn({
            let world = world.clone();
            move || assert!(world.write(A, 2, true))
        });
        others_may_go_first();
        world.read();
        writer.join().unwrap();
        assert_eq!(world.read(), Some(2));
    });
}

#[test]
fn a_copy_is_never_a_mixture_while_the_slot_is_cleared_and_filled_again() {
    cleared_and_filled_again(|world| {
        world.write(B, 2, false);
    });
}

/// The control: a writer that does not pass on the raise it has seen must be caught.
#[test]
#[should_panic(expected = "torn")]
fn control_claiming_without_the_fence_is_caught() {
    cleared_and_filled_again(|world| {
        if world.slots().take(0, EMPTY, B.lease) {
            world.fill(2);
            world.slots().publish(0, B.lease);
        }
    });
}

fn cleared_and_filled_again(write: fn(&World)) {
    // Three threads: all orders would take minutes.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let world = World::new(SET, 1);
        assert!(world.lock(A.lease, A.number) && world.lock(B.lease, B.number));
        let reader = thread::spawn({
            let world = world.clone();
            move || world.read()
        });
        let writer = thread::spawn({
            let world = world.clone();
            move || write(&world)
        });
        world.slots().clear(A.lease, |_| true, |_| {});
        reader.join().unwrap();
        writer.join().unwrap();
        assert!(matches!(world.read(), None | Some(2)));
    });
}

#[test]
fn the_slot_of_a_dead_writer_goes_to_exactly_one() {
    loom::model(|| {
        // The writer died half-way: its state stands, its lease is free.
        let world = World::new(claimed_by(0), 9);
        world.bytes[0].store(3, Ordering::Relaxed);
        let c = Process { number: 3, lease: 2 };
        assert!(world.lock(B.lease, B.number) && world.lock(c.lease, c.number));
        let other = thread::spawn({
            let world = world.clone();
            move || world.write(B, 1, false)
        });
        others_may_go_first();
        let mine = world.write(c, 2, false);
        let theirs = other.join().unwrap();
        // Both may meet while the other looks; then one of them is told "busy", never both win.
        assert!(!(mine && theirs));
        if mine || theirs {
            assert_eq!(world.read(), Some(if mine { 2 } else { 1 }));
        } else {
            assert!(world.write(c, 2, false), "stuck");
        }
    });
}

#[test]
fn a_reused_lease_is_swept_before_its_first_claim_and_never_stolen() {
    a_reused_lease(true);
}

/// The control: an heir that does not empty them must leave the slot stuck.
#[test]
#[should_panic(expected = "stuck")]
fn control_a_reused_lease_that_is_not_swept_is_caught() {
    a_reused_lease(false);
}

fn a_reused_lease(swept: bool) {
    loom::model(move || {
        let world = World::new(claimed_by(0), 9);
        assert!(world.lock(B.lease, B.number));
        // A new process takes the dead one's lease, empties what that left, and writes the very slot.
        let heir = thread::spawn({
            let world = world.clone();
            move || {
                if world.lock(A.lease, A.number) {
                    if swept {
                        world.slots().empty_claims_of_the_dead(A.lease);
                    }
                    world.write(A, 1, false);
                }
            }
        });
        others_may_go_first();
        let mine = world.write(B, 2, false);
        heir.join().unwrap();
        match world.read() {
            Some(value) => assert!(value == 1 || (mine && value == 2)),
            None => assert!(world.write(B, 2, false), "stuck"),
        }
    });
}

/// The control: with the publish moved before the bytes, the first model must fail.
#[test]
#[should_panic(expected = "left == right")]
fn control_publishing_before_the_bytes_is_caught() {
    loom::model(|| {
        let world = World::new(EMPTY, 0);
        let writer = thread::spawn({
            let world = world.clone();
            move || {
                assert_eq!(world.slots().claim(0, 0, false, &Look(&world, A)), Claim::Claimed);
                world.slots().publish(0, 0);
                world.fill(7);
            }
        });
        others_may_go_first();
        if world.slots().state(0) == SET {
            assert_eq!(world.copy(), [7, 7]);
        }
        writer.join().unwrap();
    });
}

/// The control: overwriting without raising the epoch must be caught by the copy model.
#[test]
#[should_panic(expected = "torn")]
fn control_overwriting_without_the_epoch_is_caught() {
    loom::model(|| {
        let world = World::new(SET, 1);
        let writer = thread::spawn({
            let world = world.clone();
            move || {
                assert!(world.slots().take(0, SET, 0));
                world.fill(2);
                world.slots().publish(0, 0);
            }
        });
        others_may_go_first();
        world.read();
        writer.join().unwrap();
    });
}

#[test]
fn a_lock_has_one_holder_who_sees_what_the_one_before_did() {
    counted_under(|world, me| {
        let lock = StateLock::take(world.slots(), 0, me.lease, &Look(world, me))?;
        world.count();
        drop(lock);
        Some(())
    });
}

/// The control: who goes on without the lock must be caught.
#[test]
#[should_panic(expected = "lost")]
fn control_going_on_without_the_lock_is_caught() {
    counted_under(|world, me| {
        let lock = StateLock::take(world.slots(), 0, me.lease, &Look(world, me));
        world.count();
        drop(lock);
        Some(())
    });
}

/// Two count under a lock that is free, or whose holder died.
fn counted_under(count: fn(&World, Process) -> Option<()>) {
    for state in [EMPTY, claimed_by(0)] {
        loom::model(move || {
            let world = World::new(state, 0);
            let c = Process { number: 3, lease: 2 };
            assert!(world.lock(B.lease, B.number) && world.lock(c.lease, c.number));
            let other = thread::spawn({
                let world = world.clone();
                move || count(&world, B).is_some()
            });
            others_may_go_first();
            let mine = count(&world, c).is_some();
            let theirs = other.join().unwrap();
            let counted = world.copy()[0];
            assert_eq!(counted, u8::from(mine) + u8::from(theirs), "lost");
            assert!(count(&world, c).is_some(), "stuck");
        });
    }
}
