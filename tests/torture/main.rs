//! Tortures the core with real processes, and says whether a promise broke.
//!
//! `torture <what> [--count N] [--seed S]` exits with 0 if the promise held, 1 if it did not, and
//! 2 for a wrong call. tests/promises.rs runs it on the real build, tests/controls.rs on builds
//! with one rule broken: there it must exit with something else than 0.

mod batches;
mod files;
mod files_against;
mod full;
mod headers;
mod lifecycle;
mod locks;
mod private;
mod processes;
mod records;
mod tear;
mod writers;

use processes::Random;
use std::process::ExitCode;

/// What a run is asked to do.
struct Run {
    count: u64,
    random: Random,
}

/// One line for people, or what broke.
type Verdict = Result<String, String>;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |flag: &str, default: u64| {
        let at = args.iter().position(|arg| arg == flag)?;
        args.get(at + 1)?.parse().ok().or(Some(default))
    };
    let seed = number("--seed", 0).unwrap_or_else(|| u64::from(std::process::id()) ^ 0x9e37_79b9);
    let count = number("--count", 0).unwrap_or(1000);
    let mut run = Run { count, random: Random::new(seed) };
    let what = args.first().map(String::as_str).unwrap_or_default();
    let promise: fn(&mut Run) -> Verdict = match what {
        "tear-copies" => tear::copies,
        "tear-views" => tear::views,
        "takeover" => writers::takeover,
        "stopped" => writers::stopped,
        "many-writers" => writers::many,
        "lifecycle" => lifecycle::cycles,
        "leftovers" => lifecycle::leftovers,
        "name-removed" => lifecycle::name_removed,
        "fork-detach" => lifecycle::fork_then_detach,
        "forks" => lifecycle::forks_while_threads_run,
        "memfd-race" => lifecycle::memfd_race,
        "shm-race" => lifecycle::shm_race,
        "orphaned" => locks::orphaned,
        "parent-first" => locks::parent_first,
        "kept-views" => locks::kept_views,
        "first-use" => lifecycle::fork_during_first_use,
        "batches" => batches::frozen,
        "batches-lru" => batches::recycled,
        "batches-fused" => batches::fused,
        "records" => records::frozen,
        "records-lru" => records::recycled,
        "files-killed" => files::killed,
        "files-once" => files::once,
        "files-evicted" => files::evicted,
        "files-dead" => files::dead,
        "files-stopped" => files::stopped,
        "files-forks" => files::forks,
        "files-unreadable" => files::unreadable,
        "files-against" => files_against::all,
        "files-two-tables" => files_against::two_tables,
        "files-many" => files_against::many,
        "umasks" => private::umasks,
        "headers" => headers::mutated,
        "full" => full::mount,
        "full-huge" => full::mount_of_huge_pages,
        _ => {
            eprintln!(
                "usage: torture tear-copies|tear-views|takeover|stopped|many-writers|lifecycle|leftovers|name-removed|\
                 fork-detach|forks|first-use|memfd-race|shm-race|orphaned|parent-first|kept-views|batches|batches-lru|batches-fused|records|records-lru|\
                 files-killed|files-once|files-evicted|files-dead|files-stopped|files-forks|\
                 files-unreadable|files-against|files-two-tables|files-many|umasks|headers|full|full-huge \
                 [--count N] [--seed S]"
            );
            return ExitCode::from(2);
        }
    };
    println!("{what}: count {count}, seed {seed}");
    match promise(&mut run) {
        Ok(line) => {
            println!("{what}: held; {line}");
            note(&format!("{what}: {line}\n"));
            ExitCode::SUCCESS
        }
        Err(line) => {
            println!("{what}: BROKEN; {line}");
            ExitCode::FAILURE
        }
    }
}

/// Keeps what was counted for the end of a long run (`make test-long`), which asks for it.
fn note(line: &str) {
    use std::io::Write;
    let Some(path) = std::env::var_os("STOCACHE_COUNTS") else { return };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(line.as_bytes())).expect("counts can be noted");
}
