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
    /// Take what is in the place of a copy for the copy.
    TrustCopies,
    /// Make it an error that there is no copy, instead of giving the path of the source.
    NoFallback,
    /// Join by name only, although it is known where the segment is open.
    JoinByNameOnly,
    /// Let a panic go on to the caller.
    NoGuard,
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

/// Controls of unit tests: with one rule broken, the same test must fail. Those of the tortures are
/// in tests/controls.rs.
#[cfg(all(test, feature = "faults"))]
mod controls {
    use super::Fault;
    use std::process::Command;

    /// Runs one test of this very program, alone; its exit status and what it printed.
    fn run(test: &str, fault: &str) -> (Option<i32>, String) {
        let done = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .env("STOCACHE_FAULT", fault)
            .env_remove("STOCACHE_LONG") // the quick counts are enough to notice
            .output()
            .expect("the test runs");
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
                "space::tests::version_1_reads_its_own_files_and_ignores_no_limit",
                "space::tests::version_2_takes_the_tightest_ancestor_and_counts_page_cache_as_free",
            ],
        );
    }

    #[test]
    fn believing_damaged_records_is_caught() {
        is_caught(
            Fault::SkipRecordChecksum,
            &["journal::tests::flipped_bits_are_found", "files::tests::a_damaged_log_is_made_anew"],
        );
    }

    #[test]
    fn forgetting_late_records_is_caught() {
        is_caught(
            Fault::ForgetLateRecords,
            &[
                "journal::tests::nothing_is_lost_when_who_writes_the_log_anew_takes_longer_than_others_wait",
            ],
        );
    }

    #[test]
    fn believing_damaged_copies_is_caught() {
        is_caught(
            Fault::TrustCopies,
            &[
                "files::tests::a_changed_copy_is_made_again",
                "files::tests::a_flipped_bit_is_found_by_the_hash_and_by_verify",
                "files::tests::damaged_copies_are_found_by_the_hash",
            ],
        );
    }

    #[test]
    fn letting_a_panic_through_is_caught() {
        is_caught(Fault::NoGuard, &["guard::tests::a_panic_is_an_error_with_its_words"]);
    }

    #[test]
    fn stopping_where_nothing_can_be_written_is_caught() {
        is_caught(
            Fault::NoFallback,
            &[
                "files::tests::a_full_disk_is_the_source_and_one_line_of_news_until_there_is_room",
                "files::tests::a_read_only_disk_serves_what_it_has",
            ],
        );
    }
}
