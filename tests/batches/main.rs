//! Batch buffers between real processes, under kills, forks and forged tickets.
//!
//! Every test runs in a process of its own (`world`), because a process has one ring. Every batch is
//! one word repeated, and the message carries the word: a batch that was written to while somebody
//! held it is seen. `STOCACHE_LONG=1` raises the counts, `STOCACHE_TEST_SEED` repeats a run.
#![cfg(not(feature = "faults"))]

mod deaths;
mod exchange;
mod forks;
#[allow(dead_code)] // shared with the torture program
#[path = "../torture/processes.rs"]
mod processes;
mod refusals;
mod world;
