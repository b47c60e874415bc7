//! The whole boundary between Rust and C++. It forwards; it does not decide.
#![allow(unsafe_code)] // the boundary itself

use crate::batches::{drop_batch, receive_batch, send_batch, sweep_batches, take_batch};
pub use crate::files::Files;
use crate::files::open_files;
pub use crate::handle::{Handle, Pin};
use crate::handle::{by_name, fingerprint_of, free_memory, join, open, release, sweep, unpin};
pub use crate::records::Records;
use crate::records::open_records;

#[cxx::bridge(namespace = "stocache::bridge")]
pub mod ffi {
    /// What to open, as the user said it; `open` checks the values.
    #[derive(Clone)]
    struct Options {
        size_limit_gib: f64,
        dataset_len: i64,
        dims: Vec<i64>,
        /// torch's ScalarType number.
        dtype: i32,
        item_bytes: u64,
        /// Empty: one that nobody else has is made up.
        name: String,
        /// "auto", "shm" or "memfd".
        backing: String,
        keep: bool,
        /// "never" or "always".
        verify: String,
        /// `fingerprint_of` what the user says of the data.
        fingerprint: String,
        /// "empty" makes the cache where there is none, "error" does not.
        if_gone: String,
        /// The rest says where another process has it open; an empty instance says nobody does.
        instance: String,
        pid: u32,
        fd: i32,
    }

    /// What a cache holds.
    struct Geometry {
        dataset_len: i64,
        capacity: i64,
        slot_bytes: u64,
        dims: Vec<i64>,
        dtype: i32,
        total_bytes: u64,
    }

    /// Where a cache is.
    struct Place {
        name: String,
        path: String,
        backing: String,
        /// "created", "joined" or "resumed".
        opened: String,
        instance: String,
        pid: u32,
        fd: i32,
    }

    /// A store of records to open, as the user said it.
    #[derive(Clone)]
    struct RecordOptions {
        limit_bytes: u64,
        dataset_len: i64,
        /// "freeze" or "lru".
        policy: String,
        /// Empty: one that nobody else has is made up.
        name: String,
        backing: String,
        keep: bool,
        fingerprint: String,
        instance: String,
        pid: u32,
        fd: i32,
    }

    /// A record in the mapping; no data if there is none.
    struct RecordAt {
        data: *const u8,
        len: usize,
        schema: u16,
    }

    /// Bytes of a record to be.
    struct Part {
        data: *const u8,
        len: usize,
    }

    /// Where another process finds a batch; see `stocache::ring::Ticket`.
    struct Ticket {
        pid: u32,
        fd: i32,
        instance: u64,
        bytes: u64,
        serial: u64,
    }

    /// Who loads a sample.
    enum Loader {
        Mine,
        Nobody,
        Other,
        /// The store takes nothing now.
        Refused,
    }

    /// What became of a record.
    enum Filled {
        Stored,
        Lost,
        Full,
        TooLarge,
        Refused,
        /// Refused, and this was the write that froze the store.
        Froze,
    }

    struct RecordStats {
        hits: u64,
        misses: u64,
        fills: u64,
        bytes: u64,
        waits: u64,
        lost: u64,
        dropped: u64,
        loads: u64,
        load_nanos: u64,
        too_large: u64,
        evicted: u64,
        filled: u64,
        used_bytes: u64,
        data_bytes: u64,
        dataset_len: u64,
        frozen: bool,
    }

    /// Files to keep copies of, as the user said it.
    struct FileOptions {
        /// The far folder and the near one, as bytes: paths need not be text.
        source: Vec<u8>,
        cache: Vec<u8>,
        /// Bytes that copies may take; 0: no limit.
        limit: u64,
        /// "lru" or "freeze".
        policy: String,
        /// "once", "always" or "never".
        check: String,
        hashed: bool,
        files: u64,
    }

    /// A path to open.
    struct PathTo {
        path: Vec<u8>,
        /// Of a copy, not of the source.
        copy: bool,
    }

    /// What a comparison found.
    enum Compared {
        Absent,
        Same,
        Differs,
    }

    struct FileStats {
        hits: u64,
        copies: u64,
        copied_bytes: u64,
        copy_nanos: u64,
        waits: u64,
        passed: u64,
        failed: u64,
        stale: u64,
        evicted: u64,
        too_large: u64,
        files: u64,
        bytes: u64,
    }

    /// What a look-up found.
    struct Found {
        state: Slot,
        /// The slot's first byte, on a hit.
        data: *mut u8,
    }

    /// What a slot was found to be, or what became of a value.
    enum Slot {
        Hit,
        Empty,
        Beyond,
        Outside,
        Stored,
        Lost,
        Occupied,
        Refused,
        /// Refused, and this was the write that froze the cache.
        Froze,
    }

    struct Stats {
        hits: u64,
        misses: u64,
        fills: u64,
        bytes: u64,
        waits: u64,
        lost: u64,
        dropped: u64,
        damaged: u64,
        filled: u64,
        frozen: bool,
    }

    extern "Rust" {
        /// A cache, open in this process.
        type Handle;
        /// Keeps the memory under a tensor mapped.
        type Pin;

        fn open(options: &Options) -> Result<Box<Handle>>;
        fn join(name: &str) -> Result<Box<Handle>>;
        fn by_name(name: &str) -> Result<Box<Handle>>;
        fn release(name: &str) -> bool;
        fn fingerprint_of(text: &[u8]) -> String;
        fn sweep() -> Vec<String>;
        /// Bytes that the machine and the memory cgroup leave.
        fn free_memory() -> u64;
        unsafe fn unpin(pin: *mut Pin);

        fn hold(self: &Handle);
        fn geometry(self: &Handle) -> Geometry;
        fn place(self: &Handle) -> Place;
        fn options(self: &Handle) -> Options;
        fn pin(self: &Handle) -> *mut Pin;
        fn look(self: &Handle, index: i64) -> Found;
        fn base(self: &Handle) -> *mut u8;
        fn store(self: &Handle, index: i64, value: &Tensor, overwrite: bool) -> Result<Slot>;
        fn load_many(
            self: &Handle,
            indices: &Tensor,
            out: &Tensor,
            found: &Tensor,
            threads: u32,
        ) -> Result<()>;
        fn store_many(
            self: &Handle,
            indices: &Tensor,
            values: &Tensor,
            stored: &Tensor,
            overwrite: bool,
        ) -> Result<bool>;
        fn slot_in_place(self: &Handle, index: i64) -> Result<UniquePtr<Tensor>>;
        fn array(self: &Handle) -> Result<UniquePtr<Tensor>>;
        fn states(self: &Handle) -> Result<UniquePtr<Tensor>>;
        fn clear(self: &Handle) -> Result<()>;
        fn stats(self: &Handle) -> Stats;
        fn frozen_reason(self: &Handle) -> String;
    }

    extern "Rust" {
        /// A batch buffer that nobody else holds, or null.
        fn take_batch(bytes: usize) -> *mut u8;
        /// Ends a hold on a batch buffer.
        unsafe fn drop_batch(data: *mut u8);
        /// Gives back what is kept of makers that are gone.
        fn sweep_batches();
        /// A ticket for the batch buffer that holds `data`; no bytes if there is none.
        unsafe fn send_batch(data: *const u8) -> Ticket;
        /// The batch of a ticket, held until `drop_batch`.
        fn receive_batch(ticket: &Ticket) -> Result<*mut u8>;
    }

    extern "Rust" {
        /// A store of records, open in this process.
        type Records;

        fn open_records(options: &RecordOptions) -> Result<Box<Records>>;

        fn find(self: &Records, i: i64) -> RecordAt;
        fn is_stable(self: &Records) -> bool;
        fn epoch(self: &Records) -> u64;
        fn unmoved(self: &Records, before: u64) -> bool;
        fn note(self: &Records, hits: u64, misses: u64);
        fn note_loads(self: &Records, loads: u64, nanos: u64);
        fn begin(self: &Records, i: i64) -> Loader;
        fn wait(self: &Records, i: i64, nanos: u64);
        fn abandon(self: &Records, i: i64);
        unsafe fn fill(self: &Records, i: i64, schema: u16, parts: &[Part]) -> Result<Filled>;
        fn intern(self: &Records, schema: &[u8]) -> u16;
        fn schema(self: &Records, number: u16) -> Vec<u8>;
        fn clear(self: &Records) -> Result<()>;
        fn stats(self: &Records) -> RecordStats;
        fn frozen_reason(self: &Records) -> String;
        fn place(self: &Records) -> Place;
        fn options(self: &Records) -> RecordOptions;
    }

    extern "Rust" {
        /// A cache of files, open in this process.
        type Files;

        fn open_files(options: &FileOptions) -> Result<Box<Files>>;

        /// The path of a right copy; empty if there is none.
        fn hit(self: &Files, name: &[u8]) -> Vec<u8>;
        fn fetch(self: &Files, name: &[u8]) -> Result<PathTo>;
        fn fetch_behind(self: &Files, name: &[u8]) -> Result<PathTo>;
        fn source_of(self: &Files, name: &[u8]) -> Vec<u8>;
        fn contains(self: &Files, name: &[u8]) -> bool;
        /// Each followed by a zero byte.
        fn names(self: &Files) -> Vec<u8>;
        fn verify(self: &Files, name: &[u8]) -> Result<Compared>;
        fn clear(self: &Files) -> u64;
        fn stats(self: &Files) -> FileStats;
        fn folder(self: &Files) -> Vec<u8>;
        /// Why nothing is cached; empty if something is.
        fn trouble(self: &Files) -> String;
        /// What to tell people; empty if nothing.
        fn news(self: &Files) -> String;
    }

    unsafe extern "C++" {
        include!("tensor.h");

        #[namespace = "at"]
        type Tensor;

        /// A tensor over `bytes` bytes at `data`; dropping its last reference drops `pin`.
        unsafe fn over_segment(
            pin: *mut Pin,
            data: *mut u8,
            bytes: u64,
            sizes: &[i64],
            dtype: i32,
        ) -> Result<UniquePtr<Tensor>>;
    }
}
