//! The whole boundary between Rust and C++. It forwards; it does not decide.
#![allow(unsafe_code)] // the boundary itself

pub use crate::handle::{Handle, Pin};
use crate::handle::{by_id, open, sweep, unpin};

#[cxx::bridge(namespace = "stocache::bridge")]
pub mod ffi {
    /// What to open; see `stocache::Request`.
    struct Options {
        limit_bytes: u64,
        dataset_len: u64,
        dims: Vec<u64>,
        /// torch's ScalarType number.
        dtype: i32,
        item_bytes: u64,
        name: String,
        /// The name is random: nobody else has it.
        private_name: bool,
        /// "auto", "shm" or "memfd".
        backing: String,
        keep: bool,
        verify: bool,
        fingerprint: String,
        /// The rest says where another process has it open; an empty instance says nobody does.
        instance: String,
        pid: u32,
        fd: i32,
    }

    /// What was opened.
    struct Facts {
        id: u64,
        dataset_len: u64,
        capacity: u64,
        slot_bytes: u64,
        dims: Vec<i64>,
        dtype: i32,
        name: String,
        path: String,
        backing: String,
        /// "created", "joined" or "resumed".
        opened: String,
        instance: String,
        pid: u32,
        fd: i32,
        total_bytes: u64,
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
        fn by_id(id: u64) -> Result<Box<Handle>>;
        fn sweep() -> Vec<String>;
        unsafe fn unpin(pin: *mut Pin);

        fn facts(self: &Handle) -> Facts;
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
