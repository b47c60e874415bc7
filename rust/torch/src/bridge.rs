//! The whole boundary between Rust and C++. It forwards; it does not decide.
#![allow(unsafe_code)] // the boundary itself

pub use crate::acquiring::Acquiring;
pub use crate::augment::Pipeline;
use crate::augment::new_pipeline;
pub use crate::batches::{Batch, Layout};
use crate::batches::{
    drop_batch, give_back_batches, new_batch, receive_batch, send_batch, take_batch,
};
pub use crate::cluster::{Servers, open_servers};
pub use crate::disk::FetchedRecords;
pub use crate::disk_folder::{
    DiskCheck, check_disk, inspect_disk, remove_disk, tidy_disk, try_compression,
};
pub use crate::files::Files;
use crate::files::open_files;
pub use crate::handle::{Handle, Pin};
use crate::handle::{
    ask_cpp, by_name, fingerprint_of, free_memory, join, leave, open, release, sweep, unpin,
};
use crate::node::{describe_cache, list_caches, remove_cache};
pub use crate::records::Records;
use crate::records::{least_memory, open_records};
pub use crate::schema::Schema;
use crate::schema::{
    dims_bytes, image_mode, is_palette_mode, numpy_dtype, parse_schema, pixels_bytes,
    tensor_itemsize,
};
use crate::shards::{count_for, deal_out, permute, visit};

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
        /// "no", "auto" or "yes".
        huge_pages: String,
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
    struct Location {
        name: String,
        path: String,
        backing: String,
        /// "created", "joined" or "resumed".
        opened: String,
        instance: String,
        pid: u32,
        fd: i32,
    }

    /// A cache on this node; see `stocache::segment::Listed`.
    struct Listed {
        name: String,
        path: String,
        user: u32,
        format: u32,
        kind: String,
        limit_bytes: u64,
        used_bytes: u64,
        samples: u64,
        /// Below 0: not known.
        filled: i64,
        keep: bool,
        in_use: bool,
        pids: Vec<u32>,
        fingerprint: String,
        notes: String,
        trouble: String,
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
        huge_pages: String,
        instance: String,
        pid: u32,
        fd: i32,
    }

    /// A disk level to open below a store, as the user said it.
    #[derive(Clone)]
    struct DiskOptions {
        /// Its folder, as bytes: paths need not be text. Empty: there is none.
        path: Vec<u8>,
        budget: u64,
        /// `fingerprint_of` what its samples depend on, keys apart.
        fingerprint: String,
        /// Two numbers for each sample, if samples are known by keys.
        keys: Vec<u64>,
        /// The number of a table that has the keys already; 0: none.
        table: u64,
        /// "none", "zstd" or "lz4".
        compression: String,
    }

    /// A cluster to open below a store, or alone.
    #[derive(Clone, Default)]
    struct ClusterOptions {
        /// redis://host:port,host:port. Empty: there is none.
        url: String,
        name: String,
        fingerprint: String,
        secret: Vec<u8>,
        /// 0: values stay.
        ttl_millis: u64,
    }

    /// A server of a cluster: what this process saw, and what it says of itself if it was asked.
    struct ClusterServer {
        address: String,
        hits: u64,
        misses: u64,
        fills: u64,
        dropped: u64,
        forged: u64,
        errors: u64,
        bytes_read: u64,
        bytes_written: u64,
        /// Of half of its answers at the most, of nine in ten, of 99 in 100; 0: it was not asked.
        latency_nanos: [u64; 3],
        resting: bool,
        answers: bool,
        samples: u64,
        /// Of all datasets.
        values: u64,
        used_bytes: u64,
        max_bytes: u64,
        version: String,
    }

    /// A value that is known by a digest of its key.
    struct NamedValue {
        is_there: bool,
        schema: Vec<u8>,
        bytes: Vec<u8>,
    }

    /// What packing a record does.
    struct PackTrial {
        /// Bytes that it takes then.
        bytes: u64,
        pack_nanos: u64,
        unpack_nanos: u64,
    }

    /// The folder of a disk level, as `stocache::disk::Inspected` says it.
    struct DiskFolder {
        /// False: it is none, and nothing else here counts.
        is_one: bool,
        user: u32,
        fingerprint: String,
        samples: u64,
        keyed: bool,
        records: u64,
        bytes: u64,
        in_use: bool,
        used_at: i64,
        trouble: String,
    }

    /// What a step of a check found.
    struct Checked {
        records: u64,
        damaged: u64,
    }

    struct DiskStats {
        hits: u64,
        fills: u64,
        records: u64,
        bytes: u64,
        capacity: u64,
        evicted: u64,
        dropped: u64,
        waiting: u64,
        errors: u64,
        /// Whether this process may write to it.
        writes: bool,
    }

    /// What became of what a rank asked for.
    struct LookUps {
        hits: u64,
        misses: u64,
        /// Of the hits.
        from_disk: u64,
    }

    /// A record in the mapping; no data if there is none. Its bytes may change at any time: what was
    /// copied is the record only if `is_whole` says so afterwards.
    struct RecordAt {
        data: *const u8,
        len: usize,
        schema: u16,
        region: u32,
        generation: u32,
    }

    /// Bytes of a record to be.
    struct Part {
        data: *const u8,
        len: usize,
    }

    /// What a part of a sample is: `stocache::records::schema::Kind`, with the characters that stand
    /// for them in a schema.
    #[repr(u8)]
    #[derive(Debug)]
    enum Kind {
        None = 110,       // n
        Bool = 63,        // ?
        Int = 105,        // i
        BigInt = 73,      // I
        Float = 102,      // f
        Complex = 99,     // c
        Str = 115,        // s
        Bytes = 121,      // y
        ByteArray = 89,   // Y
        Tensor = 84,      // T
        Array = 65,       // A
        NumpyScalar = 97, // a
        NumpyStr = 117,   // u
        NumpyBytes = 118, // v
        Image = 77,       // M
        Tuple = 40,       // (
        List = 91,        // [
        Ints = 108,       // l
        Floats = 100,     // d
        Size = 90,        // Z
        Dict = 123,       // {
        OrderedDict = 79, // O
        NamedTuple = 80,  // P
        DataClass = 68,   // D
        Enum = 69,        // E
        Pairs = 109,      // m
        Object = 82,      // R
        Pickle = 112,     // p
        Missing = 120,    // x
    }

    /// Where a text lies in the bytes of a schema.
    struct Span {
        at: u32,
        len: u32,
    }

    /// A part of a sample; the fields are those of `stocache::records::schema::Node`.
    struct Node {
        kind: Kind,
        /// torch's ScalarType number, or -1.
        dtype: i8,
        count: u32,
        entry: u32,
        word: u32,
        number: u32,
        leaf: u32,
        key: u32,
        names: u32,
        more: u32,
        after: u32,
        stacked: bool,
    }

    /// A key of a dict; those in a tuple follow it.
    struct Key {
        /// 'n' None, '0' False, '1' True, 'i' int, 'f' float, 's' str, 'y' bytes, '(' tuple.
        kind: u8,
        count: u32,
        bits: u64,
        text: Span,
    }

    /// A class, as it was when the sample was stored.
    struct Class {
        kind: Kind,
        module: Span,
        qualified: Span,
        /// How many fields and slots, and their names, as they stand in the schema.
        fields: Span,
    }

    /// A dtype of numpy in a schema.
    struct NumpyType {
        text: Span,
        dtype: DType,
    }

    /// What the text of a numpy dtype says.
    struct DType {
        /// Of one character if it is flexible; 0: not stored.
        itemsize: u32,
        /// The width is a word of the record.
        flexible: bool,
        /// What torch.as_tensor makes of it: torch's ScalarType number, or -1.
        torch: i8,
    }

    /// The modes of an image and of its palette.
    struct Image {
        mode: Span,
        palette: Span,
    }

    /// What is known of a mode of images.
    struct ImageMode {
        /// Per pixel; 0: not stored.
        bits: u8,
        palette: bool,
    }

    /// Where a payload lies in a record.
    struct Extent {
        at: u64,
        len: u64,
    }

    /// What a schema says as a whole.
    struct SchemaSums {
        words: usize,
        leaves: usize,
        /// Where the numbers begin in a record, and where they end.
        numbers_at: u64,
        head: u64,
        needs_pickle: bool,
        collatable: bool,
        fusible: bool,
        has_rest: bool,
    }

    /// A tensor of a batch.
    struct Column {
        dtype: i8,
        sizes: Vec<i64>,
        /// In memory the second size comes last.
        channels_last: bool,
    }

    /// Memory to be written to.
    struct Target {
        data: *mut u8,
        len: usize,
    }

    /// What became of a batch.
    enum Gathered {
        Whole,
        /// Shapes differ.
        Unlike,
        /// A record is gone.
        Gone,
    }

    /// Where another process finds a batch; see `stocache::batches::Ticket`.
    struct Ticket {
        pid: u32,
        fd: i32,
        instance: u64,
        bytes: u64,
        serial: u64,
    }

    /// What becomes of a sample if it is put; see `stocache::tiers::acquire::Outlook`.
    enum Outlook {
        /// It was not to be loaded here.
        Unasked,
        Stored,
        StoredElsewhere,
        Refused,
    }

    /// What became of a record.
    enum Put {
        Stored,
        StoredElsewhere,
        NoRoom,
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
        transforms: u64,
        transform_nanos: u64,
        too_large: u64,
        evicted: u64,
        unsupported: u64,
        cluster_hits: u64,
        cluster_misses: u64,
        cluster_fills: u64,
        cluster_dropped: u64,
        cluster_errors: u64,
        filled: u64,
        used_bytes: u64,
        data_bytes: u64,
        dataset_len: u64,
        frozen: bool,
    }

    /// An image before its augmentation; see `stocache::augment::Shape`.
    struct ImageShape {
        channels: u32,
        height: u32,
        width: u32,
        dtype: i8,
        interleaved: bool,
        pil: bool,
        array: bool,
    }

    /// What becomes of it.
    struct ImageOutput {
        dtype: i8,
        dims: Vec<i64>,
        bytes: usize,
        channels_last: bool,
    }

    /// What the parameters of a row are a function of.
    struct RowNumber {
        seed: u64,
        epoch: u64,
        index: u64,
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
        /// What happens to names at a normal exit, for a process that has none.
        fn leave();
        /// From now on waits ask `is_interrupted` whether they are to end.
        fn ask_cpp();
        /// Bytes that the machine and the memory cgroup leave.
        fn free_memory() -> u64;
        unsafe fn unpin(pin: *mut Pin);

        fn hold(self: &Handle);
        fn geometry(self: &Handle) -> Geometry;
        fn location(self: &Handle) -> Result<Location>;
        fn options(self: &Handle) -> Result<Options>;
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
        fn stats(self: &Handle) -> Result<Stats>;
        fn frozen_reason(self: &Handle) -> Result<String>;
    }

    extern "Rust" {
        fn list_caches() -> Result<Vec<Listed>>;
        /// The files that went.
        fn remove_cache(name: &str, force: bool) -> Result<Vec<String>>;
        fn describe_cache(name: &str, text: &str) -> Result<()>;
    }

    extern "Rust" {
        /// A batch buffer that nobody else holds, or null.
        fn take_batch(bytes: usize) -> *mut u8;
        /// Ends a hold on a batch buffer.
        unsafe fn drop_batch(data: *mut u8);
        /// Gives back what is kept of makers that are gone.
        fn give_back_batches();
        /// A ticket for the batch buffer that holds `data`; no bytes if there is none.
        unsafe fn send_batch(data: *const u8) -> Ticket;
        /// The batch of a ticket, held until `drop_batch`.
        fn receive_batch(ticket: &Ticket) -> Result<*mut u8>;
    }

    extern "Rust" {
        /// A store of records, open in this process.
        type Records;

        fn open_records(options: &RecordOptions) -> Result<Box<Records>>;
        /// The least memory that a store for so many samples takes.
        fn least_memory(dataset_len: i64, policy: &str) -> Result<u64>;

        fn find(self: &Records, i: i64) -> RecordAt;
        fn is_whole(self: &Records, region: u32, generation: u32) -> bool;
        fn note(self: &Records, hits: u64, misses: u64);
        fn note_loads(self: &Records, loads: u64, nanos: u64);
        fn note_transforms(self: &Records, samples: u64, nanos: u64);
        fn note_unsupported(self: &Records, samples: u64);
        fn is_first_to_tell(self: &Records, what: u32) -> bool;
        /// Why nothing can be stored from this process; empty if something can.
        fn cut_off(self: &Records) -> String;
        fn intern(self: &Records, schema: &[u8]) -> u16;
        fn schema(self: &Records, number: u16) -> Vec<u8>;
        fn clear(self: &Records) -> Result<()>;
        fn stats(self: &Records) -> Result<RecordStats>;
        fn frozen_reason(self: &Records) -> Result<String>;
        fn location(self: &Records) -> Result<Location>;
        fn options(self: &Records) -> Result<RecordOptions>;

        /// Puts a disk level below it.
        fn open_disk(self: &Records, options: &DiskOptions) -> Result<()>;
        /// The options that lead to the same disk level; no path if there is none.
        fn disk_options(self: &Records) -> Result<DiskOptions>;
        fn disk_stats(self: &Records) -> Result<DiskStats>;
        /// Puts a cluster below it, and below the disk.
        fn open_cluster(self: &Records, options: &ClusterOptions) -> Result<()>;
        /// The options that lead to the same cluster; no URL if there is none.
        fn cluster_options(self: &Records) -> Result<ClusterOptions>;
        fn cluster_servers(self: &Records, ask: bool) -> Result<Vec<ClusterServer>>;
        /// What the processes that count for that rank asked for.
        fn look_ups_of(self: &Records, rank: u32) -> Result<LookUps>;
        /// Whether a level below memory has that sample.
        fn is_below(self: &Records, i: i64) -> bool;
        /// Whether every sample is in some level of this node.
        fn is_complete(self: &Records) -> Result<bool>;
        /// Begins to read these samples from levels below.
        fn prefetch(self: &Records, indices: &[i64]) -> Result<()>;
        /// Whether what was given to levels below is where it belongs.
        fn flush(self: &Records, nanos: u64) -> bool;
        /// What people should know of levels below, once.
        fn news_below(self: &Records) -> String;
    }

    extern "Rust" {
        /// Values on servers, known by digests of their keys, in two halves.
        type Servers;

        fn open_servers(options: &ClusterOptions) -> Result<Box<Servers>>;
        fn get_many(self: &Servers, digests: &[u64]) -> Result<Vec<NamedValue>>;
        /// The server that has the value of a key.
        fn address_of(self: &Servers, high: u64, low: u64) -> String;
        fn put(self: &Servers, high: u64, low: u64, schema: &[u8], bytes: &[u8]) -> bool;
        fn flush(self: &Servers, nanos: u64) -> bool;
        fn clear(self: &Servers) -> Result<()>;
        fn news(self: &Servers) -> String;
        fn servers(self: &Servers, ask: bool) -> Result<Vec<ClusterServer>>;
    }

    extern "Rust" {
        /// The records of a disk level, checked one after the other.
        type DiskCheck;

        fn inspect_disk(path: &[u8]) -> Result<DiskFolder>;
        fn remove_disk(path: &[u8], force: bool) -> Result<()>;
        /// Removes what killed processes left in it: the names that went.
        fn tidy_disk(path: &[u8]) -> Result<Vec<String>>;
        fn check_disk(path: &[u8]) -> Result<Box<DiskCheck>>;
        /// How many there are.
        fn records(self: &DiskCheck) -> u64;
        /// Some more; none: that was all.
        fn step(self: &mut DiskCheck) -> Result<Checked>;
        fn try_compression(way: &str, record: &[u8]) -> Result<PackTrial>;
    }

    extern "Rust" {
        /// Records from levels below memory.
        type FetchedRecords;

        /// What levels below have of these samples.
        fn fetch(self: &Records, indices: &[i64]) -> Result<Box<FetchedRecords>>;
        /// By position; no data if it is not there. Valid as long as this is.
        fn at(self: &FetchedRecords, which: usize) -> RecordAt;
    }

    extern "Rust" {
        /// Samples that somebody wants: who loads which.
        type Acquiring;

        fn acquire(self: &Records, indices: &[i64], nanos: u64) -> Result<Box<Acquiring>>;
        fn next_to_load(self: &mut Acquiring) -> Result<Vec<i64>>;
        fn outlook(self: &Acquiring, index: i64) -> Outlook;
        /// What came from below and is not in memory; valid until the next call.
        fn given(self: &Acquiring, index: i64) -> RecordAt;
        unsafe fn fill(self: &mut Acquiring, i: i64, schema: u16, parts: &[Part]) -> Result<Put>;
        fn abandon(self: &mut Acquiring, i: i64);
        fn give_back(self: &mut Acquiring);
    }

    extern "Rust" {
        /// A schema, parsed.
        type Schema;

        fn parse_schema(bytes: &[u8]) -> Result<Box<Schema>>;
        fn sums(self: &Schema) -> SchemaSums;
        /// Whether they differ in what is beside the pixels of images alone.
        fn is_like(self: &Schema, other: &Schema) -> bool;
        fn bytes(self: &Schema) -> &[u8];
        fn nodes(self: &Schema) -> &[Node];
        fn keys(self: &Schema) -> &[Key];
        fn classes(self: &Schema) -> &[Class];
        fn dtypes(self: &Schema) -> &[NumpyType];
        fn images(self: &Schema) -> &[Image];
        fn names(self: &Schema) -> &[Span];
        /// Reads the words of a record and finds its payloads; false if it is damaged.
        fn lay_out(self: &Schema, record: &[u8], words: &mut [u32], extents: &mut [Extent])
        -> bool;
        /// The same for what a batch keeps of a record beside its columns.
        fn lay_out_rest(
            self: &Schema,
            rest: &[u8],
            words: &mut [u32],
            extents: &mut [Extent],
        ) -> bool;

        // For who writes schemas and records.
        fn numpy_dtype(text: &[u8]) -> DType;
        /// 0: tensors of this dtype are not stored.
        fn tensor_itemsize(dtype: i8) -> u32;
        fn image_mode(name: &[u8]) -> ImageMode;
        fn is_palette_mode(name: &[u8]) -> bool;
        /// False if no tensor can have these dims.
        fn dims_bytes(dims: &[u32], itemsize: u64, bytes: &mut u64) -> bool;
        fn pixels_bytes(width: u32, height: u32, bits: u8, bytes: &mut u64) -> bool;
    }

    extern "Rust" {
        /// A batch in the making; see `stocache::batches::Batch`.
        type Batch;
        /// Which columns a batch has.
        type Layout;

        /// Of so many rows, none of which is there.
        fn new_batch(rows: usize) -> Box<Batch>;
        /// Before `find`: a store whose number is that of those before it.
        fn add_store(self: &mut Batch, records: &Records);
        /// Before `find`: images are made by a pipeline. Its random numbers follow from the indices of
        /// samples, or from these numbers.
        fn fuse(self: &mut Batch, pipeline: &Pipeline, seed: u64, epoch: u64, numbers: &[i64]);
        /// The samples of these indices, each of the store of that number or all of the first; false if
        /// one is in no dataset, or records in one store are of two schemas.
        fn find(self: &mut Batch, which: &[u32], indices: &[i64]) -> bool;
        /// Looks for rows that are not there; false if records in one store are of two schemas.
        fn look_again(self: &mut Batch) -> bool;
        fn rows(self: &Batch) -> usize;
        /// The numbers of the schemas of what was found in that store.
        fn schemas_in(self: &Batch, store: usize) -> &[u16];
        /// Says what one of these is that is like the schema of the batch.
        fn know(self: &mut Batch, store: usize, number: u16, schema: &Schema);
        /// The rows that are not there, and are not read from below.
        fn absent(self: &Batch) -> Vec<u32>;
        /// Whether rows are being read from below.
        fn is_coming(self: &Batch) -> bool;
        /// Waits for them; false if records in one store are of two schemas.
        fn arrive(self: &mut Batch) -> Result<bool>;
        /// Asks for some of what is acquired, and has it stand for its rows; false if it is of two schemas.
        fn lend(self: &mut Batch, acquiring: &mut Acquiring) -> Result<bool>;
        /// Rows that were lent are not there any more.
        fn return_lent(self: &mut Batch);
        /// Waits until they are copied, and lets go of what was lent.
        fn keep_lent(self: &mut Batch, acquiring: &mut Acquiring) -> Result<()>;
        /// Asks for the rest, and copies it as it comes.
        fn receive(self: &mut Batch, acquiring: &mut Acquiring) -> Result<()>;
        /// The samples whose rows are not absent.
        fn present(self: &Batch) -> Vec<i64>;
        /// The record of a row that is not there, of the schema of the others.
        unsafe fn give(self: &mut Batch, row: usize, pieces: &[Part]) -> bool;
        /// The same of a schema that is like it.
        unsafe fn give_as(self: &mut Batch, row: usize, pieces: &[Part], schema: &Schema) -> bool;
        /// By the rows that are there, all of this schema; false if they are not a batch.
        fn lay_out(self: &mut Batch, schema: &Schema) -> bool;
        /// As another batch of the same store; false if this one cannot be.
        fn lay_out_like(self: &mut Batch, layout: &Layout) -> bool;
        fn is_laid_out_like(self: &Batch, layout: &Layout) -> bool;
        /// How it is laid out; an error if that is not by schema and shapes alone.
        fn layout(self: &Batch) -> Result<Box<Layout>>;
        fn columns(self: &Batch) -> Vec<Column>;
        /// How long the lists of numbers of this payload are.
        fn numbers_in(self: &Batch, leaf: u32) -> Result<usize>;
        /// Begins to copy what is there, on so many threads.
        unsafe fn begin(self: &mut Batch, to: &[Target], threads: usize) -> Result<()>;
        /// Waits for the copies, and makes those of rows that have come since.
        fn finish(self: &mut Batch) -> Result<Gathered>;
        /// Whether every row that came from a store is still there.
        fn is_current(self: &Batch) -> bool;
        /// A string of a row, when the batch was finished.
        fn text(self: &Batch, row: usize, column: usize) -> Result<&[u8]>;
        /// What a row keeps beside its columns, for `lay_out_rest`; empty if that is nothing.
        fn rest(self: &Batch, row: usize) -> Result<&[u8]>;
    }

    /// Somebody who keeps a part of a dataset; see `stocache::shards`.
    struct Holder {
        weight: u64,
        capacity: u64,
    }

    /// What a rank visits in one epoch; see `stocache::shards`.
    struct Visits {
        count: u64,
        step: u64,
        offset: u64,
        first: u64,
        held: u64,
        key: [u64; 3],
        shuffle: bool,
    }

    /// Consecutive positions.
    struct Stretch {
        start: u64,
        len: u64,
    }

    extern "Rust" {
        /// Has this process, and those it forks, count for that rank of the node.
        fn count_for(rank: u32);
        /// Who keeps which positions of so many samples.
        fn deal_out(
            samples: u64,
            chunk: u64,
            holders: &[Holder],
            agreed: bool,
        ) -> Result<Vec<Stretch>>;
        /// Puts in the place of each number the one that has its position in the order of that key.
        fn permute(numbers: &mut [u64], len: u64, key: &[u64; 3]) -> Result<()>;
        /// Puts in the place of each number the position of that visit.
        fn visit(numbers: &mut [u64], visits: &Visits) -> Result<()>;
    }

    extern "Rust" {
        /// Steps that were fused.
        type Pipeline;

        fn new_pipeline(description: &str) -> Result<Box<Pipeline>>;

        fn output(self: &Pipeline, shape: &ImageShape) -> Result<ImageOutput>;
        /// What is done to that row, as JSON.
        fn drawn(self: &Pipeline, number: &RowNumber, shape: &ImageShape) -> Result<String>;
        /// Writes a row for each index, of images that lie one after the other.
        unsafe fn apply(
            self: &Pipeline,
            number: &RowNumber,
            indices: &[u64],
            shape: &ImageShape,
            data: *const u8,
            to: *mut u8,
            threads: usize,
        ) -> Result<()>;
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
        fn names(self: &Files) -> Result<Vec<u8>>;
        fn verify(self: &Files, name: &[u8]) -> Result<Compared>;
        fn clear(self: &Files) -> Result<u64>;
        fn stats(self: &Files) -> Result<FileStats>;
        fn folder(self: &Files) -> Vec<u8>;
        /// Why nothing is cached; empty if something is.
        fn trouble(self: &Files) -> String;
        /// What to tell people; empty if nothing.
        fn news(self: &Files) -> String;
    }

    unsafe extern "C++" {
        include!("api/interrupt.h");
        include!("tensor/tensor.h");

        /// Whether who called from this thread wants to be let go.
        fn is_interrupted() -> bool;

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
