//! tch and cxx glue: the core's caches as libtorch tensors.
//!
//! [`bridge`] is the whole boundary, [`handle`] what it forwards to, [`tensor`] how tensors cross
//! it, [`guard`] what keeps a panic from crossing.
#![deny(unsafe_code)]

mod acquiring;
mod augment;
mod batches;
mod bridge;
mod cluster;
mod disk;
mod disk_folder;
mod files;
mod guard;
mod handle;
mod node;
mod records;
mod schema;
mod shards;
mod tensor;
