//! Batch buffers that cross processes without a copy.
//!
//! A worker fills a buffer and sends a [`Ticket`], five numbers, to the training process, which maps
//! the same memory. When nobody holds the buffer any more, in whatever process, its maker gives it
//! out again. Page faults of fresh memory cost more than the copy into it, so the maker keeps its
//! buffers, and a receiver keeps its mappings of them.
//!
//! A buffer is a memfd of fixed length, allocated before anybody touches it and sealed, so that no
//! access to it can fail:
//!
//! ```text
//!   0      magic, instance (random), bytes: never change
//!   64     sends     raised as a ticket is made
//!   128    drops     raised as a process lets go
//!   256    tickets   one word per ticket that was sent and not yet received: its serial number
//!   4096   the batch
//! ```
//!
//! Who holds a buffer is known to the kernel: locks on bytes of the file (F_OFD_SETLK), which it
//! frees when their owner dies, however that happens. The bytes themselves are only labels.
//!
//! | lock   | who has it                                              | who asks                    |
//! | ------ | ------------------------------------------------------- | --------------------------- |
//! | `HELD` | every process that holds the buffer, except its maker   | the maker, before reuse     |
//! | `MADE` | the maker, as long as it keeps the buffer               | receivers, before they keep an unheld mapping |
//!
//! ```text
//!   take      a buffer of ours that nobody holds, or a new one
//!   send      while holding: enter a serial number into `tickets`; the ticket carries it
//!   receive   lock `HELD`, then take the serial number out of `tickets`, once
//!   drop      the last hold in a process: unlock `HELD`; keep the mapping if `MADE` is locked
//! ```
//!
//! A hold never disappears on its way: the ticket is entered before the sender lets go, and taken
//! out after the receiver has its lock. Only the maker gives a buffer out again, after it has seen
//! no hold of its own, no ticket and no lock, while nothing was sent (`Mapped::is_free`).
//!
//! **Death.** A process that dies lets go of what it held. A maker that dies takes with it what it
//! had sent and nobody had received; what was received stays valid. A ticket that nobody will ever
//! receive cannot be told from one that waits in a queue, so it keeps its buffer, and the maker
//! makes others: up to [`BUFFERS`], then [`take`] returns nothing and batches go through ordinary
//! memory. A sender who knows that a ticket is lost says so with [`cancel`].
//!
//! **Fork.** A lock belongs to an open file description, and a child shares those of its parent, by
//! descriptors and by mappings. So before a fork every buffer that is held is opened and locked
//! anew; the child maps that in place of what it inherited, and drops the rest. Its holds are its
//! own from the start: neither process can let go for the other, and what a child holds is not
//! written to either. A child that never lets go, as a worker that inherited a variable of its
//! parent, costs the maker that buffer for as long as it lives.
//!
//! Not promised: defence against a hostile process of the same user.
//!
//! | module | role |
//! | --- | --- |
//! | `process` | the buffers of this process, and what happens to them at fork |
//! | `pool` | which buffers are kept, given out again and given back |
//! | `mapped` | one buffer in this process: made, opened, held |
//! | `header` | the words of a buffer that processes share: its tickets |
#![allow(unsafe_code)] // holds that cross as addresses

mod header;
mod mapped;
mod pool;
mod process;
#[cfg(test)]
mod tests;

use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use process::buffers;
use std::ffi::c_void;
use std::ptr::NonNull;

pub use header::TICKETS;
pub use pool::BUFFERS;

/// Where another process finds a buffer: plain numbers, to be sent in a message. Each can be
/// received once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The process that sent it; it must live until the ticket is received.
    pub pid: u32,
    /// The buffer's descriptor in that process.
    pub fd: i32,
    /// The buffer's random number.
    pub instance: u64,
    /// The length of the batch.
    pub bytes: u64,
    /// Tells the tickets of one buffer apart.
    pub serial: u64,
}

/// A hold on a buffer. While one exists, in any process, the buffer is not given out again.
pub struct Buffer {
    data: NonNull<u8>,
    bytes: usize,
    instance: u64,
}

// SAFETY: a hold is a number in a table that any thread may change; the bytes are reached through
// raw pointers only.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// What this process keeps at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Buffers made by this process.
    pub made: usize,
    /// Their bytes.
    pub made_bytes: u64,
    /// Mappings of other processes' buffers.
    pub received: usize,
    /// Holds in this process.
    pub holds: usize,
}

/// A buffer of exactly `bytes` bytes that nobody else holds: one that is free again, or a new one.
/// Its contents are undefined. `None` if no more may be had; ordinary memory must do then.
pub fn take(bytes: usize) -> Option<Buffer> {
    buffers().take(bytes)
}

/// The buffer of a ticket. It takes over the ticket's hold, so a second call is an error.
pub fn receive(ticket: &Ticket) -> Result<Buffer> {
    buffers().receive(ticket)
}

/// One more hold on the buffer that `address` lies in, if somebody in this process holds one.
pub fn holding(address: *const u8) -> Option<Buffer> {
    buffers().holding(address as usize)
}

/// Takes back a ticket that this process sent and that will not be received, because the message
/// was not sent or its receiver has died. False if it was received before.
pub fn cancel(ticket: &Ticket) -> bool {
    buffers().cancel(ticket)
}

/// Gives back mappings whose makers are gone or gave the buffer up. [`receive`] and the drop of a
/// hold do this too; this is for a process that does neither any more.
pub fn give_back() {
    buffers().give_back_useless();
}

/// What this process keeps at this moment.
pub fn usage() -> Usage {
    let pool = buffers();
    let made = || pool.entries.iter().filter(|entry| entry.made);
    Usage {
        made: made().count(),
        made_bytes: made().map(|entry| entry.bytes as u64).sum(),
        received: pool.entries.len() - made().count(),
        holds: pool.entries.iter().map(|entry| entry.holds).sum(),
    }
}

impl Buffer {
    /// The first byte; page-aligned.
    pub fn address(&self) -> NonNull<u8> {
        self.data
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes; never, but clippy asks.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The buffer's random number; the same in all processes.
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// A ticket with a hold of its own. What was written to the buffer before, the receiver sees.
    pub fn send(&self) -> Result<Ticket> {
        let mut pool = buffers();
        let entry = pool.find(self.data).ok_or_else(unknown)?;
        if !entry.is_ours() {
            return Err(Error::new(
                Kind::State,
                "another part of the program closed the descriptor of this batch; send a copy of it",
            ));
        }
        let serial = entry.header().enter_ticket().ok_or_else(|| {
            Error::new(
                Kind::State,
                format!(
                    "{TICKETS} messages with this batch were not received yet; send a copy of it"
                ),
            )
        })?;
        entry.exposed = true;
        Ok(Ticket {
            pid: std::process::id(),
            fd: entry.fd,
            instance: self.instance,
            bytes: self.bytes as u64,
            serial,
        })
    }

    /// The hold as a pointer, for the deleter of a tensor: the address of the batch. Nothing is
    /// released until it goes through [`Buffer::from_raw`].
    pub fn into_raw(self) -> *mut c_void {
        let data = self.data.as_ptr().cast();
        std::mem::forget(self);
        data
    }

    /// The hold that `into_raw` gave out. `None` if there is no such hold.
    ///
    /// # Safety
    /// `raw` must come from `into_raw`, in this process or before it was forked, and be used once.
    pub unsafe fn from_raw(raw: *mut c_void) -> Option<Self> {
        let mut pool = buffers();
        let entry = pool.find(NonNull::new(raw.cast())?)?;
        (entry.holds > 0).then(|| entry.as_held())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        buffers().release(self.data);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} at {:p}, {:016x})", Bytes(self.bytes as u64), self.data, self.instance)
    }
}

fn unknown() -> Error {
    Error::new(Kind::State, "this batch is not held by this process; take or receive one")
}
