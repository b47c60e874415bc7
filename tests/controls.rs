//! The controls: with one rule broken, the same tortures must notice.
//!
//! A harness that cannot see a broken build proves nothing. Built with `--features faults`.
#![cfg(feature = "faults")]

use std::process::{Command, ExitStatus};

/// Runs one torture with `fault` switched on.
fn broken(fault: &str, what: &str, count: u64) -> ExitStatus {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torture"));
    command.args([what, "--count", &count.to_string()]);
    if needs_small_shm(what) {
        let script = format!(
            "mount -t tmpfs -o size=16m,huge=advise tmpfs /dev/shm && exec {} {what} --count {count}",
            env!("CARGO_BIN_EXE_torture")
        );
        command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &script]);
    }
    command.env("STOCACHE_FAULT", fault).status().expect("torture runs")
}

fn needs_small_shm(what: &str) -> bool {
    what.starts_with("full") || what == "shm-race"
}

/// Whether a small /dev/shm can be had.
fn may_mount() -> bool {
    let allowed =
        Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|status| status.success());
    if !allowed {
        eprintln!(
            "skipped: no right to make a mount namespace here, so the controls of a small /dev/shm are not covered"
        );
    }
    allowed
}

/// What happens seldom may not happen at all on a busy machine: then there are more turns.
fn is_caught(fault: &str, what: &str, count: u64) {
    let counts = [count, 4 * count, 16 * count];
    // Nothing but an exit that says so counts: a crash, or arguments that are wrong, are no control.
    let noticed = counts.into_iter().any(|count| match broken(fault, what, count) {
        status if status.code() == Some(1) => true,
        status if status.success() => false,
        status => panic!("{what} with {fault} ended otherwise: {status}"),
    });
    assert!(noticed, "{fault} was not noticed by {what}");
    // And the same build without the fault passes, so it is the fault that was noticed.
    let status = broken("", what, count.min(100));
    assert_eq!(status.code(), Some(0), "{what} fails without a fault: {status}");
}

#[test]
fn publishing_before_the_bytes_is_caught_in_copies() {
    is_caught("PublishEarly", "tear-copies", 5_000);
}

#[test]
fn publishing_before_the_bytes_is_caught_in_views() {
    is_caught("PublishEarly", "tear-views", 5_000);
}

#[test]
fn ignoring_the_epoch_is_caught() {
    is_caught("IgnoreEpoch", "tear-copies", 5_000);
}

#[test]
fn publishing_a_record_before_its_bytes_is_caught() {
    is_caught("PublishEarly", "records", 5_000);
}

#[test]
fn ignoring_the_generation_is_caught_in_records_that_are_cleared() {
    is_caught("IgnoreEpoch", "records", 50_000);
}

#[test]
fn ignoring_the_generation_is_caught_in_records_that_are_recycled() {
    is_caught("IgnoreEpoch", "records-lru", 50_000);
}

#[test]
fn ignoring_the_generation_is_caught_in_batches_that_are_gathered_ahead() {
    is_caught("IgnoreEpoch", "batches", 20_000);
    is_caught("IgnoreEpoch", "batches-lru", 20_000);
    is_caught("IgnoreEpoch", "batches-fused", 20_000);
}

#[test]
fn emptying_a_region_that_is_written_to_is_caught() {
    is_caught("RecycleInUse", "records-lru", 20_000);
}

#[test]
fn losing_the_room_of_what_is_cleared_is_caught() {
    is_caught("LoseRoom", "records", 20);
}

#[test]
fn never_taking_over_is_caught() {
    is_caught("NoTakeover", "takeover", 50);
}

#[test]
fn too_few_leases_are_caught() {
    is_caught("FewLeases", "many-writers", 300);
}

#[test]
fn robbing_a_living_writer_is_caught() {
    is_caught("StealFromLiving", "stopped", 100);
}

#[test]
fn leaving_the_name_behind_is_caught() {
    is_caught("KeepName", "leftovers", 10);
}

#[test]
fn never_sweeping_is_caught() {
    is_caught("NoSweep", "leftovers", 10);
}

#[test]
fn removing_a_live_segment_is_caught() {
    is_caught("UnlinkLive", "lifecycle", 10_000);
}

#[test]
fn forking_without_a_lock_of_the_childs_own_is_caught() {
    is_caught("NoForkHandler", "fork-detach", 100);
}

#[test]
fn registering_fork_handlers_at_the_first_use_is_caught() {
    is_caught("LateForkHandler", "first-use", 5_000);
}

#[test]
fn mapping_through_the_locked_description_is_caught_where_workers_live_on() {
    is_caught("MapLockedDescription", "orphaned", 10);
}

#[test]
fn mapping_through_the_locked_description_is_caught_where_a_child_lives_on() {
    is_caught("MapLockedDescription", "parent-first", 3);
}

#[test]
fn mapping_through_the_locked_description_is_caught_where_views_live_on() {
    is_caught("MapLockedDescription", "kept-views", 600);
}

#[test]
fn making_a_file_while_others_make_it_is_caught() {
    if may_mount() {
        is_caught("CreateUnlocked", "shm-race", 20);
    }
}

#[test]
fn a_slow_walk_through_proc_makes_one_memfd_and_without_the_lock_it_is_caught() {
    let status = broken("SlowWalk", "memfd-race", 2);
    assert_eq!(status.code(), Some(0), "two caches under a slow walk: {status}");
    is_caught("SlowWalkUnlocked", "memfd-race", 2);
}

#[test]
fn leaving_the_mode_to_the_umask_is_caught() {
    is_caught("NoChmod", "umasks", 1);
}

#[test]
fn joining_by_name_only_is_caught() {
    is_caught("JoinByNameOnly", "name-removed", 10);
}

#[test]
fn accepting_a_damaged_header_is_caught() {
    is_caught("SkipHeaderChecksum", "headers", 100_000);
}

#[test]
fn copying_a_file_under_its_final_name_is_caught() {
    is_caught("CopyInPlace", "files-killed", 1_000);
}

#[test]
fn copying_what_somebody_else_is_copying_is_caught() {
    is_caught("IgnoreLock", "files-once", 20);
}

#[test]
fn removing_a_file_that_was_just_given_is_caught() {
    is_caught("EvictInUse", "files-evicted", 1_000_000);
}

#[test]
fn removing_a_file_that_was_just_given_is_caught_among_all_operations() {
    is_caught("EvictInUse", "files-against", 10_000);
}

#[test]
fn too_few_leases_are_caught_where_files_are_copied() {
    is_caught("FewLeases", "files-many", 300);
}

#[test]
fn removing_what_another_table_gives_out_is_caught() {
    is_caught("IgnoreOtherTables", "files-two-tables", 300);
}

#[test]
fn never_taking_over_a_file_is_caught() {
    is_caught("NoTakeover", "files-dead", 20);
}

#[test]
fn taking_a_file_from_a_living_copier_is_caught() {
    is_caught("StealFromLiving", "files-stopped", 1);
}

#[test]
fn writing_through_the_mapping_dies_on_a_full_mount() {
    use std::os::unix::process::ExitStatusExt;
    if !may_mount() {
        return;
    }
    for (fault, what) in [("WriteThroughMapping", "full"), ("TouchHugePages", "full-huge")] {
        let status = broken(fault, what, 1);
        assert_eq!(status.signal(), Some(7), "{fault}: expected SIGBUS: {status}");
    }
}
