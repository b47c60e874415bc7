//! The whole boundary between Rust and C++. It forwards; it does not decide.
#![allow(unsafe_code)] // the boundary itself

pub use crate::handle::{Handle, Pin};
use crate::handle::{by_name, fingerprint_of, join, open, release, sweep, unpin};

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
