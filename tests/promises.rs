//! The promises, kept by the real build. `STOCACHE_LONG=1` raises the counts to the full marks.
#![cfg(not(feature = "faults"))]

use std::process::Command;

fn long() -> bool {
    std::env::var_os("STOCACHE_LONG").is_some()
}

/// Runs one torture; `quick` and `full` are its counts.
fn holds(what: &str, quick: u64, full: u64) {
    let count = if long() { full } else { quick };
    let status = Command::new(env!("CARGO_BIN_EXE_torture"))
        .args([what, "--count", &count.to_string()])
        .status()
        .expect("torture runs");
    assert!(status.success(), "{what}: {status}");
}

#[test]
fn p1_copies_are_whole_while_writers_overwrite_clear_and_die() {
    holds("tear-copies", 1_000, 10_000);
}

#[test]
fn p1_views_are_whole_while_writers_fill_and_die() {
    holds("tear-views", 500, 10_000);
}

#[test]
fn p1_records_are_whole_while_somebody_clears_and_writers_die() {
    holds("records", 500, 10_000);
}

#[test]
fn p1_records_are_whole_while_regions_are_recycled_and_writers_die() {
    holds("records-lru", 1_000, 10_000);
}

#[test]
fn p1_rows_of_batches_are_whole_while_somebody_clears_and_others_die() {
    holds("batches", 200, 5_000);
}

#[test]
fn p1_rows_of_batches_are_whole_while_regions_are_recycled_and_others_die() {
    holds("batches-lru", 200, 5_000);
}

#[test]
fn p1_images_are_made_of_whole_samples_while_regions_are_recycled_and_others_die() {
    holds("batches-fused", 200, 5_000);
}

#[test]
fn p2_the_slot_of_a_dead_writer_is_taken_over() {
    holds("takeover", 50, 1_000);
}

#[test]
fn thousands_of_processes_write_to_one_cache() {
    holds("many-writers", 400, 4_096);
}

#[test]
fn p3_nobody_waits_for_a_stopped_writer_and_nobody_robs_it() {
    holds("stopped", 1_000, 60_000);
}

#[test]
fn p4_p5_names_of_live_segments_stay_and_leftovers_go() {
    holds("lifecycle", 10_000, 100_000);
}

#[test]
fn p4_names_go_with_the_last_process_and_what_the_killed_leave_with_the_next() {
    holds("leftovers", 50, 1_000);
}

#[test]
fn p5_a_child_keeps_its_segment_when_its_parent_detaches() {
    holds("fork-detach", 100, 1_000);
}

#[test]
fn p26_what_a_dead_main_process_held_is_taken_over_though_its_workers_live() {
    holds("orphaned", 10, 300);
}

#[test]
fn p26_a_child_that_outlives_its_parent_removes_the_name() {
    holds("parent-first", 30, 500);
}

#[test]
fn p26_views_that_outlive_their_cache_hold_nothing_but_memory() {
    holds("kept-views", 600, 5_000);
}

#[test]
fn ranks_that_make_a_memfd_at_the_same_moment_share_one() {
    holds("memfd-race", 20, 500);
}

#[test]
fn ranks_that_make_a_file_at_the_same_moment_share_one_though_there_is_room_for_one_only() {
    let Some(status) = in_small_shm("shm-race --count 10") else { return };
    assert!(status.success(), "shm-race: {status}");
}

#[test]
fn p6_a_full_mount_freezes_and_never_kills() {
    let Some(status) = in_small_shm("full") else { return };
    assert!(status.success(), "full: {status}");
}

#[test]
fn p6_a_full_mount_of_huge_pages_freezes_and_never_kills() {
    let Some(status) = in_small_shm("full-huge") else { return };
    assert!(status.success(), "full-huge: {status}");
}

#[test]
fn p10_children_forked_while_threads_run_all_work() {
    holds("forks", 200, 1_000);
}

#[test]
fn p10_children_forked_during_the_first_use_all_work() {
    holds("first-use", 300, 5_000);
}

#[test]
fn p11_damaged_headers_are_refused() {
    holds("headers", 100_000, 1_000_000);
}

#[test]
fn p12_what_we_make_is_private_under_any_umask() {
    holds("umasks", 1, 1);
}

#[test]
fn p14_files_are_whole_under_their_names_while_copiers_die() {
    holds("files-killed", 150, 1_000);
}

#[test]
fn files_are_copied_once_whoever_asks() {
    holds("files-once", 20, 200);
}

#[test]
fn p16_the_limit_holds_and_what_was_given_can_be_opened() {
    holds("files-evicted", 30_000, 300_000);
}

#[test]
fn p2_the_file_of_a_dead_copier_is_taken_over_and_its_room_comes_back() {
    holds("files-dead", 20, 1_000);
}

#[test]
fn p3_nobody_waits_for_a_stopped_copier_and_nobody_robs_it() {
    holds("files-stopped", 2, 20);
}

#[test]
fn p10_children_forked_while_threads_copy_all_work() {
    holds("files-forks", 200, 1_000);
}

#[test]
fn files_are_whole_while_every_operation_meets_every_other_and_processes_die() {
    holds("files-against", 150, 2_000);
}

#[test]
fn nothing_that_processes_with_another_table_were_given_is_removed() {
    holds("files-two-tables", 100, 2_000);
}

#[test]
fn hundreds_of_processes_copy_files_and_are_given_those_of_others() {
    holds("files-many", 300, 1_000);
}

#[test]
fn a_source_that_may_not_be_read_is_an_error_with_its_number() {
    holds("files-unreadable", 1, 1);
}

#[test]
fn p22_a_cache_without_its_name_works_on_and_can_be_joined() {
    holds("name-removed", 50, 1_000);
}

/// Runs a torture with a tmpfs of 16 MiB over /dev/shm, with huge pages for who asks, in a mount namespace of its own.
fn in_small_shm(what: &str) -> Option<std::process::ExitStatus> {
    let script = format!(
        "mount -t tmpfs -o size=16m,huge=advise tmpfs /dev/shm && exec {} {what}",
        env!("CARGO_BIN_EXE_torture")
    );
    let allowed =
        Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|status| status.success());
    if !allowed {
        eprintln!(
            "skipped: no right to make a mount namespace here, so a full /dev/shm is not covered"
        );
        return None;
    }
    Some(Command::new("unshare").args(["-m", "sh", "-c", &script]).status().expect("unshare runs"))
}
