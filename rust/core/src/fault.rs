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
    /// Give out as few leases as fit a byte.
    FewLeases,
    /// Take nobody for stopped.
    IgnoreStopped,
    /// Take a slot from a writer that is alive.
    StealFromLiving,
    /// Map files that other users may change.
    MapOthers,
    /// Remove the name on detach without asking whether others are attached.
    UnlinkLive,
    /// Accept a header whose checksum does not match.
    SkipHeaderChecksum,
    /// Write through the mapping instead of pwrite, so that a full mount is a SIGBUS.
    WriteThroughMapping,
    /// Touch a page to make it a huge one instead of asking for it, so that a full mount is a SIGBUS.
    TouchHugePages,
    /// Ignore the epoch, or the generation of a region, so that a copy may mix an old and a new value.
    IgnoreEpoch,
    /// Empty a region without asking whether somebody is writing to it.
    RecycleInUse,
    /// Say that all is gone before asking who is still writing.
    RaiseThenAsk,
    /// Look up the states before the lease is had, of which a dead holder claims one meanwhile.
    StatesBeforeLease,
    /// Make a segment without a look at who else is making it.
    CreateUnlocked,
    /// Give up the room of what is emptied while somebody is writing to it.
    LoseRoom,
    /// Believe a count of records that a dead process may have left.
    TrustCounts,
    /// Go on as if a lock were ours that somebody else has.
    IgnoreLock,
    /// Copy a file under the name it will have.
    CopyInPlace,
    /// Remove a file without asking whether somebody is about to open it.
    EvictInUse,
    /// Map a segment through the open file description that carries its locks, and leave it to that to end them.
    MapLockedDescription,
    /// Read the whole log to name the files that are to be removed.
    NameByLog,
    /// Remove files although processes with another table live.
    IgnoreOtherTables,
    /// Use a folder without waiting for who is removing something from it.
    JoinAtOnce,
    /// Give a process without a row no copy.
    NoRowNoHit,
    /// Touch pages of a table that were not allocated.
    TouchHoles,
    /// Allocate all of a table when it is made.
    AllocateTable,
    /// Leave open segments as they are when the process forks.
    NoForkHandler,
    /// Register the fork handlers at the first use instead of as the library is loaded.
    LateForkHandler,
    /// Leave the name when the last process detaches.
    KeepName,
    /// Remove nothing that the dead left behind.
    NoSweep,
    /// Look for free memory on the machine only, not in the memory cgroup.
    IgnoreCgroup,
    /// Leave new files and folders the rights that the umask gave them.
    NoChmod,
    /// Believe a record of the log whose checksum does not match.
    SkipRecordChecksum,
    /// Replace the log without a look at what was appended meanwhile.
    ForgetLateRecords,
    /// Augment a sample alike in every epoch.
    ForgetAugmentationEpoch,
    /// Leave what was erased at its place while the image is turned.
    LeaveErased,
    /// Begin a turn of coefficients in the middle of a pixel.
    TurnOver,
    /// Augment what is gathered by its row in the batch, and not by its sample.
    NumberByRow,
    /// Hand out a batch although an image of it could not be made.
    HandOutHalfMade,
    /// Copy rows where they are read also into a batch of the process that this one was forked by.
    TakeForParent,
    /// Take what is in the place of a copy for the copy.
    TrustCopies,
    /// Make it an error that there is no copy, instead of giving the path of the source.
    NoFallback,
    /// No rule: looking through /proc takes long, and what was seen is old when it is done.
    SlowWalk,
    /// The same, and nobody is kept from making a memfd that others are just making.
    SlowWalkUnlocked,
    /// Join by name only, although it is known where the segment is open.
    JoinByNameOnly,
    /// Let a panic go on to the caller.
    NoGuard,
    /// Take what comes from below memory for what was asked for.
    TrustTiers,
    /// Take values of servers that nobody with the job's secret wrote.
    TrustServers,
    /// Use the connections of the process that forked this one.
    InheritConnections,
    /// Take a value for missing that a server says is elsewhere.
    IgnoreMoved,
    /// Wait for each server as long as for a single one.
    WaitForEach,
    /// Wait for a server anew whenever a byte came from it.
    WaitForEachByte,
    /// Ask a server for all values of a batch at once.
    AskForAll,
    /// Wait for a server as long in each operation as in the first.
    FreshBudgets,
    /// Touch all memory for a value before any of it has come.
    TouchPages,
    /// Ask servers on for a batch, of which one did not answer.
    AskOnInVain,
    /// Tell no other process of the node that a server is in trouble.
    RestAlone,
    /// Tell other processes of the node also of trouble that this one may be alone with.
    ShareAllTrouble,
    /// Leave it to words of the node alone to remember which servers are in trouble.
    RestByWordsAlone,
    /// Take a server for well as soon as it was asked.
    EndRestUnanswered,
    /// Let records that ask for pickle travel.
    PicklesTravel,
    /// Take classes from below that nobody of this node has stored.
    TrustClasses,
    /// Keep the claims of samples that nobody filled.
    KeepClaims,
    /// Look for records where a head says that one is, whatever the index says.
    TrustHeads,
    /// Note a record in the log of its file before its bytes are written.
    LogFirst,
    /// Empty one region after the other where no file can be made for any.
    EmptyInVain,
    /// Take a store that others made in the place of this one for this one.
    TrustPlace,
    /// Keep a record on disk that is none.
    KeepDamaged,
    /// Remove a file whose room those keep who have it open.
    RemoveUncut,
    /// Leave files open both ways that were read both ways.
    KeepBothWays,
    /// Read a large level through the page cache.
    CrowdOut,
    /// Write the log beside the budget.
    LogBesides,
    /// Write groups of records however small they are.
    SmallGroups,
    /// Wait for a record without telling who has it.
    WaitSilently,
    /// Write what is left at the end, however long that takes.
    WaitForEver,
    /// Remove a damaged store without asking whether somebody uses it.
    MendInUse,
    /// Use a folder, or its lock, that somebody has removed meanwhile.
    JoinRemoved,
    /// Keep what was read before all was emptied.
    OutliveClear,
    /// Write where a file ended when this table was made, though others have written since.
    WriteWhereItEnded,
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

/// A place in the code where a test may hold a thread: what the kernel does now and then, at a moment
/// that the test chooses. Elsewhere nothing.
#[cfg(test)]
pub(crate) fn reached(place: &'static str) {
    meeting::die_if_told(place);
    meeting::AT.with_borrow_mut(|act| act.iter_mut().for_each(|act| act(place)));
}

#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn reached(_place: &'static str) {}

/// What a thread of a test does where it comes by.
#[cfg(test)]
pub(crate) mod meeting {
    use std::cell::RefCell;
    use std::sync::Mutex;

    type Act = Box<dyn FnMut(&'static str)>;

    thread_local! {
        pub(super) static AT: RefCell<Option<Act>> = const { RefCell::new(None) };
    }

    /// Where this process dies, whichever of its threads comes by, and how often it passes before.
    static DEATH: Mutex<Option<(&'static str, u32)>> = Mutex::new(None);

    /// From now on this process is killed when it comes there once more than so often.
    pub(crate) fn die_at(place: &'static str, passing: u32) {
        *DEATH.lock().unwrap() = Some((place, passing));
    }

    pub(super) fn die_if_told(place: &str) {
        match &mut *DEATH.lock().unwrap() {
            Some((there, passing)) if *there == place => match passing.checked_sub(1) {
                Some(less) => *passing = less,
                None => {
                    let me = rustix::process::getpid();
                    let _dead = rustix::process::kill_process(me, rustix::process::Signal::KILL);
                }
            },
            _ => {}
        }
    }

    /// From now on this thread calls `act` wherever it comes by.
    pub(crate) fn at(act: impl FnMut(&'static str) + 'static) {
        AT.set(Some(Box::new(act)));
    }
}

/// Controls of unit tests: with one rule broken, the same test must fail. Those of the tortures are
/// in tests/controls.rs.
#[cfg(all(test, feature = "faults"))]
mod controls {
    use super::Fault;
    use std::process::Command;

    /// Runs one test of this very program, alone; its exit status and what it printed.
    fn run(test: &str, fault: &str) -> (Option<i32>, String) {
        // What a test that fails or is killed leaves there goes with the folder.
        let folder = std::env::temp_dir().join(format!(
            "{}-{}",
            test.replace("::", "-"),
            std::process::id()
        ));
        std::fs::create_dir_all(&folder).expect("a folder for temporary files");
        let done = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .env("STOCACHE_FAULT", fault)
            .env("TMPDIR", &folder)
            .env_remove("STOCACHE_LONG") // the quick counts are enough to notice
            .output()
            .expect("the test runs");
        let _gone = std::fs::remove_dir_all(&folder);
        let text = [done.stdout, done.stderr].concat();
        (done.status.code(), String::from_utf8_lossy(&text).into_owned())
    }

    fn is_caught(fault: Fault, tests: &[&str]) {
        for test in tests {
            let (code, text) = run(test, "");
            assert!(
                code == Some(0) && text.contains("1 passed"),
                "{test} without a fault: {code:?} {text}"
            );
            if text.contains("skipped: ") {
                eprintln!("skipped: {test} is, so its control is not covered");
                continue;
            }
            let (code, text) = run(test, &format!("{fault:?}"));
            assert!(
                code == Some(101) && text.contains("1 failed"),
                "{fault:?} was not noticed by {test}: {code:?} {text}"
            );
        }
    }

    #[test]
    fn ignoring_the_cgroup_is_caught() {
        is_caught(
            Fault::IgnoreCgroup,
            &[
                "sys::limits::tests::version_1_reads_its_own_files_and_ignores_no_limit",
                "sys::limits::tests::version_2_takes_the_tightest_ancestor_and_counts_page_cache_as_free",
            ],
        );
    }

    #[test]
    fn augmenting_alike_in_every_epoch_is_caught() {
        is_caught(
            Fault::ForgetAugmentationEpoch,
            &["augment::tests::numbers_follow_from_seed_epoch_and_index_and_from_nothing_else"],
        );
    }

    #[test]
    fn leaving_what_was_erased_at_its_place_is_caught() {
        is_caught(Fault::LeaveErased, &["augment::tests::what_was_erased_moves_with_the_image"]);
    }

    #[test]
    fn normalising_pixels_as_other_channels_is_caught() {
        is_caught(
            Fault::TurnOver,
            &["augment::tests::pixels_of_any_number_of_channels_have_the_means_of_their_channels"],
        );
    }

    #[test]
    fn augmenting_by_the_place_in_a_batch_is_caught() {
        is_caught(
            Fault::NumberByRow,
            &[
                "batches::tests::random_numbers_follow_from_the_sample_or_from_the_number_that_was_given",
            ],
        );
    }

    #[test]
    fn handing_out_what_was_half_made_is_caught() {
        is_caught(
            Fault::HandOutHalfMade,
            &["batches::tests::a_batch_with_an_image_that_cannot_be_made_is_not_handed_out"],
        );
    }

    #[test]
    fn writing_into_the_batch_of_a_parent_is_caught() {
        is_caught(
            Fault::TakeForParent,
            &["batches::tests::taking::a_child_does_not_write_into_the_batch_of_its_parent"],
        );
    }

    #[test]
    fn believing_the_counts_of_the_dead_is_caught() {
        is_caught(Fault::TrustCounts, &["records::tests::a_count_that_the_dead_left_is_made_anew"]);
    }

    #[test]
    fn trusting_a_copy_of_an_emptied_region_is_caught() {
        is_caught(
            Fault::IgnoreEpoch,
            &[
                "records::tests::a_copy_is_whole_only_if_its_region_was_not_emptied_meanwhile",
                "batches::tests::rows_that_moved_are_copied_again_and_those_that_are_gone_are_no_batch",
            ],
        );
    }

    #[test]
    fn taking_whatever_comes_from_below_is_caught() {
        is_caught(
            Fault::TrustTiers,
            &[
                "tiers::tests::ways::garbage_from_below_is_a_miss",
                "disk::tests::damaged_files_are_misses",
                "disk::tests::ten_thousand_damaged_records_are_misses",
            ],
        );
    }

    #[test]
    fn believing_servers_is_caught() {
        is_caught(
            Fault::TrustServers,
            &["cluster::tests::forged_and_moved_and_damaged_values_are_misses"],
        );
    }

    #[test]
    fn using_a_parents_connections_is_caught() {
        is_caught(
            Fault::InheritConnections,
            &["cluster::tests::a_forked_child_has_connections_of_its_own"],
        );
    }

    #[test]
    fn asking_the_wrong_server_only_is_caught() {
        is_caught(
            Fault::IgnoreMoved,
            &[
                "cluster::tests::native::servers_of_a_native_cluster_are_one_store",
                "cluster::tests::native::slots_that_move_while_they_are_read_are_found",
            ],
        );
    }

    #[test]
    fn waiting_for_each_server_is_caught() {
        is_caught(
            Fault::WaitForEach,
            &["cluster::tests::many_hung_servers_take_two_waits_at_the_most"],
        );
    }

    #[test]
    fn waiting_anew_for_each_byte_is_caught() {
        is_caught(
            Fault::WaitForEachByte,
            &["cluster::tests::a_server_that_drips_is_waited_for_as_long_as_one_that_is_silent"],
        );
    }

    #[test]
    fn memory_for_what_never_comes_is_caught() {
        is_caught(
            Fault::TouchPages,
            &["cluster::tests::waits::a_value_that_is_announced_and_never_comes_takes_no_memory"],
        );
    }

    #[test]
    fn as_long_a_wait_in_each_operation_is_caught() {
        is_caught(
            Fault::FreshBudgets,
            &["cluster::tests::waits::a_server_that_is_nearly_late_each_time_is_given_up"],
        );
    }

    #[test]
    fn asking_for_all_values_at_once_is_caught() {
        is_caught(Fault::AskForAll, &["cluster::tests::waits::bytes_on_their_way_have_a_bound"]);
    }

    #[test]
    fn asking_servers_on_in_vain_is_caught() {
        is_caught(
            Fault::AskOnInVain,
            &["batches::tests::receive::a_level_that_let_us_wait_in_vain_is_not_asked_again"],
        );
    }

    #[test]
    fn leaving_rests_to_words_of_the_node_is_caught() {
        is_caught(
            Fault::RestByWordsAlone,
            &["cluster::rests::tests::a_process_rests_by_itself_where_all_words_are_taken"],
        );
    }

    #[test]
    fn taking_a_server_for_well_unanswered_is_caught() {
        is_caught(
            Fault::EndRestUnanswered,
            &["cluster::tests::waits::while_one_tries_a_server_the_others_leave_it_alone"],
        );
    }

    #[test]
    fn telling_others_of_ones_own_trouble_is_caught() {
        is_caught(
            Fault::ShareAllTrouble,
            &["cluster::tests::waits::trouble_of_one_process_is_its_own"],
        );
    }

    #[test]
    fn keeping_the_trouble_of_a_server_to_oneself_is_caught() {
        is_caught(
            Fault::RestAlone,
            &["cluster::tests::the_processes_of_a_node_wait_once_for_a_hung_server"],
        );
    }

    #[test]
    fn letting_pickles_travel_is_caught() {
        is_caught(Fault::PicklesTravel, &["tiers::tests::ways::pickles_do_not_travel"]);
    }

    #[test]
    fn believing_names_of_classes_is_caught() {
        is_caught(
            Fault::TrustClasses,
            &["tiers::tests::ways::classes_come_up_once_somebody_has_stored_such_a_sample"],
        );
    }

    #[test]
    fn keeping_what_nobody_filled_is_caught() {
        is_caught(Fault::KeepClaims, &["tiers::tests::ways::what_was_not_filled_is_given_back"]);
    }

    #[test]
    fn believing_a_head_without_the_index_is_caught() {
        is_caught(
            Fault::TrustHeads,
            &["records::tests::the_records_of_a_region_are_found_without_the_index"],
        );
    }

    #[test]
    fn emptying_regions_for_files_that_cannot_be_made_is_caught() {
        is_caught(
            Fault::EmptyInVain,
            &["disk::tests::where_no_file_can_be_made_what_is_there_stays"],
        );
    }

    #[test]
    fn noting_a_record_before_it_is_written_is_caught() {
        is_caught(Fault::LogFirst, &["disk::tests::a_kill_at_any_place_leaves_nothing_torn"]);
    }

    #[test]
    fn writing_into_the_store_of_others_is_caught() {
        is_caught(
            Fault::TrustPlace,
            &[
                "disk::tests::who_has_lost_its_folder_leaves_the_one_that_others_made_in_its_place_alone",
            ],
        );
    }

    #[test]
    fn keeping_damaged_records_is_caught() {
        is_caught(
            Fault::KeepDamaged,
            &["tiers::tests::two_levels::a_damaged_record_is_loaded_once_and_written_again"],
        );
    }

    #[test]
    fn leaving_the_room_of_a_file_to_who_has_it_open_is_caught() {
        is_caught(
            Fault::RemoveUncut,
            &["disk::tests::files_that_go_take_no_room_though_others_have_them_open"],
        );
    }

    #[test]
    fn writing_over_what_others_wrote_since_is_caught() {
        is_caught(
            Fault::WriteWhereItEnded,
            &["disk::tests::who_writes_after_others_goes_on_where_they_ended"],
        );
    }

    #[test]
    fn keeping_what_was_read_before_all_was_emptied_is_caught() {
        is_caught(
            Fault::OutliveClear,
            &[
                "tiers::tests::two_levels::what_was_read_ahead_is_not_given_after_others_filled_all_anew",
                "tiers::tests::ways::what_is_being_read_while_others_empty_all_does_not_come_up",
                "tiers::tests::ways::what_is_being_loaded_while_others_empty_all_is_not_stored",
                "tiers::tests::two_levels::what_is_being_loaded_while_others_empty_the_disk_is_not_written",
                "disk::tests::what_waits_to_be_written_while_others_empty_all_is_not_written",
            ],
        );
    }

    #[test]
    fn keeping_files_open_both_ways_is_caught() {
        is_caught(
            Fault::KeepBothWays,
            &["disk::tests::a_file_is_one_descriptor_whichever_way_it_is_read"],
        );
    }

    #[test]
    fn reading_large_levels_through_the_page_cache_is_caught() {
        is_caught(
            Fault::CrowdOut,
            &["disk::tests::a_level_that_memory_has_no_room_for_stays_out_of_the_page_cache"],
        );
    }

    #[test]
    fn writing_logs_beside_the_budget_is_caught() {
        is_caught(
            Fault::LogBesides,
            &["disk::tests::records_and_logs_take_no_more_than_the_budget"],
        );
    }

    #[test]
    fn writing_groups_however_small_they_are_is_caught() {
        is_caught(
            Fault::SmallGroups,
            &["disk::tests::small_samples_that_come_slowly_are_written_together"],
        );
    }

    #[test]
    fn waiting_for_a_record_without_a_word_is_caught() {
        is_caught(
            Fault::WaitSilently,
            &["disk::tests::what_waits_in_another_process_is_written_when_it_is_wanted"],
        );
    }

    #[test]
    fn writing_what_is_left_however_long_that_takes_is_caught() {
        is_caught(
            Fault::WaitForEver,
            &["disk::behind::tests::what_cannot_be_written_in_time_at_the_end_is_given_up"],
        );
    }

    #[test]
    fn removing_a_damaged_store_under_others_is_caught() {
        is_caught(
            Fault::MendInUse,
            &["disk::tests::a_damaged_store_is_made_anew_unless_it_is_in_use_or_not_only_ours"],
        );
    }

    #[test]
    fn using_a_folder_that_was_removed_meanwhile_is_caught() {
        is_caught(
            Fault::JoinRemoved,
            &["disk::tests::a_folder_that_is_removed_while_it_is_opened_is_made_anew"],
        );
    }

    #[test]
    fn giving_away_the_room_of_somebody_who_writes_is_caught() {
        is_caught(
            Fault::RecycleInUse,
            &[
                "records::tests::what_is_being_written_while_the_store_is_cleared_is_gone_and_keeps_its_room",
            ],
        );
    }

    #[test]
    fn asking_who_writes_after_all_is_said_to_be_gone_is_caught() {
        is_caught(
            Fault::RaiseThenAsk,
            &["records::tests::a_record_that_is_written_while_all_is_emptied_keeps_its_room"],
        );
    }

    #[test]
    fn looking_up_the_states_before_the_lease_is_caught() {
        is_caught(
            Fault::StatesBeforeLease,
            &["files::table::tests::what_the_dead_locked_last_is_free_for_who_has_their_lease"],
        );
    }

    #[test]
    fn not_waiting_for_who_removes_is_caught() {
        is_caught(
            Fault::JoinAtOnce,
            &["files::tests::ownership::who_comes_while_a_file_is_removed_is_not_given_it"],
        );
    }

    #[test]
    fn losing_the_room_of_what_is_emptied_is_caught() {
        is_caught(
            Fault::LoseRoom,
            &[
                "records::tests::the_room_of_a_cleared_store_is_there_once_who_wrote_is_done_or_dead",
            ],
        );
    }

    #[test]
    fn believing_damaged_records_is_caught() {
        is_caught(
            Fault::SkipRecordChecksum,
            &[
                "files::journal::tests::flipped_bits_are_found",
                "files::tests::ownership::a_damaged_log_is_made_anew",
            ],
        );
    }

    #[test]
    fn forgetting_late_records_is_caught() {
        is_caught(
            Fault::ForgetLateRecords,
            &[
                "files::journal::tests::nothing_is_lost_when_who_writes_the_log_anew_takes_longer_than_others_wait",
            ],
        );
    }

    #[test]
    fn believing_damaged_copies_is_caught() {
        is_caught(
            Fault::TrustCopies,
            &[
                "files::tests::serving::a_changed_copy_is_made_again",
                "files::tests::serving::a_flipped_bit_is_found_by_the_hash_and_by_verify",
                "files::tests::serving::damaged_copies_are_found_by_the_hash",
            ],
        );
    }

    #[test]
    fn mapping_what_others_may_change_is_caught() {
        is_caught(
            Fault::MapOthers,
            &["segment::list::tests::what_others_may_change_is_read_and_not_mapped"],
        );
    }

    #[test]
    fn taking_a_stopped_process_for_a_running_one_is_caught() {
        is_caught(
            Fault::IgnoreStopped,
            &[
                "sys::proc::tests::a_stopped_process_is_seen_and_one_of_another_namespace_never_is",
                "disk::tests::who_is_dead_or_stopped_is_not_waited_for",
            ],
        );
    }

    #[test]
    fn making_a_memfd_while_others_make_it_is_caught() {
        is_caught(
            Fault::CreateUnlocked,
            &[
                "segment::open::tests::who_is_stopped_while_making_a_memfd_is_waited_for_and_then_named",
            ],
        );
    }

    #[test]
    fn letting_a_panic_through_is_caught() {
        is_caught(
            Fault::NoGuard,
            &[
                "guard::tests::a_panic_is_an_error_with_its_words",
                "guard::tests::a_panic_is_the_answer_of_who_cannot_say_so",
            ],
        );
    }

    #[test]
    fn stopping_where_nothing_can_be_written_is_caught() {
        is_caught(
            Fault::NoFallback,
            &[
                "files::tests::trouble::a_full_disk_is_the_source_and_one_line_of_news_until_there_is_room",
                "files::tests::trouble::a_read_only_disk_serves_what_it_has",
            ],
        );
    }

    #[test]
    fn reading_the_log_for_every_file_that_goes_is_caught() {
        is_caught(
            Fault::NameByLog,
            &["files::tests::room::a_file_is_removed_without_reading_the_log"],
        );
    }

    #[test]
    fn allocating_a_whole_table_is_caught() {
        is_caught(
            Fault::AllocateTable,
            &["files::table::tests::a_table_takes_what_its_files_take"],
        );
    }

    #[test]
    fn serving_nothing_without_a_lease_is_caught() {
        is_caught(
            Fault::NoRowNoHit,
            &["files::tests::serving::who_has_no_lease_is_served_what_is_there"],
        );
    }

    /// A signal ends the whole program.
    #[test]
    fn touching_what_was_not_allocated_is_caught() {
        let test = "files::tests::room::a_full_dev_shm_is_the_source_for_files_that_are_new";
        let (code, text) = run(test, "");
        assert!(code == Some(0), "{text}");
        if text.contains("skipped: ") {
            return eprintln!("skipped: {test} is, so its control is not covered");
        }
        let (code, text) = run(test, &format!("{:?}", Fault::TouchHoles));
        assert!(code.is_none(), "TouchHoles was not noticed: {code:?} {text}");
    }
}
