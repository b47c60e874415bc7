//! Batches as C++ makes them, and batch buffers as it holds them: by address.
#![allow(unsafe_code)] // holds, records and columns cross as pointers

use crate::acquiring::Acquiring;
use crate::augment::Pipeline;
use crate::bridge::ffi;
use crate::guard::{Crossing, calm, guard};
use crate::records::Records;
use crate::schema::Schema;
use std::sync::Arc;
use stocache::batches::{self, Buffer, Fused, Gathered, Pieces, Row, Ticket};
use stocache::tiers::Levels;
use stocache::{Error, Kind};

/// A batch in the making.
pub struct Batch {
    /// Until `find`.
    stores: Vec<Arc<Levels>>,
    /// Likewise.
    fused: Option<Fused>,
    batch: batches::Batch,
}

/// Which columns a batch has.
pub struct Layout(batches::Layout);

/// A batch of so many rows, none of which is there.
pub fn new_batch(rows: usize) -> Box<Batch> {
    Box::new(Batch { stores: Vec::new(), fused: None, batch: batches::Batch::new(rows) })
}

impl Batch {
    pub fn add_store(&mut self, records: &Records) {
        self.stores.push(Arc::clone(records.levels()));
    }

    pub fn fuse(&mut self, pipeline: &Pipeline, seed: u64, epoch: u64, numbers: &[i64]) {
        let pipeline = Arc::clone(pipeline.parsed());
        let numbers = || numbers.iter().map(|&number| number as u64).collect();
        let numbers = calm(Vec::new(), numbers);
        self.fused = Some(Fused { pipeline, seed, epoch, numbers });
    }

    pub fn find(&mut self, which: &[u32], indices: &[i64]) -> bool {
        let (stores, fused) = (std::mem::take(&mut self.stores), self.fused.take());
        let found = calm(None, || batches::Batch::find_for(fused, stores, which, indices));
        found.map(|batch| self.batch = batch).is_some()
    }

    pub fn look_again(&mut self) -> bool {
        calm(false, || self.batch.look_again())
    }

    pub fn rows(&self) -> usize {
        self.batch.rows()
    }

    pub fn schemas_in(&self, store: usize) -> &[u16] {
        self.batch.schemas_in(store)
    }

    pub fn know(&mut self, store: usize, number: u16, schema: &Schema) {
        calm((), || self.batch.know(store, number, Arc::clone(schema.parsed())));
    }

    pub fn absent(&self) -> Vec<u32> {
        self.batch.absent()
    }

    pub fn is_coming(&self) -> bool {
        calm(false, || self.batch.is_coming())
    }

    pub fn arrive(&mut self) -> Result<bool, Crossing> {
        guard(|| Ok(self.batch.arrive()))
    }

    pub fn lend(&mut self, acquiring: &mut Acquiring) -> Result<bool, Crossing> {
        guard(|| Ok(self.batch.lend(acquiring.inner())))
    }

    pub fn return_lent(&mut self) {
        calm((), || self.batch.return_lent());
    }

    pub fn keep_lent(&mut self, acquiring: &mut Acquiring) -> Result<(), Crossing> {
        guard(|| {
            self.batch.keep_lent(acquiring.inner());
            Ok(())
        })
    }

    pub fn receive(&mut self, acquiring: &mut Acquiring) -> Result<(), Crossing> {
        guard(|| {
            self.batch.receive(acquiring.inner());
            Ok(())
        })
    }

    pub fn present(&self) -> Vec<i64> {
        let present = || self.batch.present().into_iter().map(|index| index as i64).collect();
        calm(Vec::new(), present)
    }

    /// # Safety
    /// The pieces must be readable, and stay as they are, for as long as the batch is used.
    pub unsafe fn give(&mut self, row: usize, pieces: &[ffi::Part]) -> bool {
        let rows = pieces.iter().map(|part| Row { data: part.data, len: part.len });
        // SAFETY: by the caller's promise.
        calm(false, || unsafe { self.batch.give(row, Pieces(rows.collect())) })
    }

    /// # Safety
    /// As for `give`.
    pub unsafe fn give_as(&mut self, row: usize, pieces: &[ffi::Part], schema: &Schema) -> bool {
        let rows = pieces.iter().map(|part| Row { data: part.data, len: part.len });
        let schema = Arc::clone(schema.parsed());
        // SAFETY: by the caller's promise.
        calm(false, || unsafe { self.batch.give_as(row, Pieces(rows.collect()), schema) })
    }

    pub fn lay_out(&mut self, schema: &Schema) -> bool {
        calm(false, || self.batch.lay_out(Arc::clone(schema.parsed())))
    }

    pub fn lay_out_like(&mut self, layout: &Layout) -> bool {
        calm(false, || self.batch.lay_out_like(&layout.0))
    }

    pub fn is_laid_out_like(&self, layout: &Layout) -> bool {
        calm(false, || self.batch.is_laid_out_like(&layout.0))
    }

    pub fn layout(&self) -> Result<Box<Layout>, Crossing> {
        guard(|| {
            let none = || Error::new(Kind::State, "a batch was not laid out");
            Ok(Box::new(Layout(self.batch.layout().ok_or_else(none)?)))
        })
    }

    pub fn columns(&self) -> Vec<ffi::Column> {
        let rows = self.batch.rows() as i64;
        let column = |column: &batches::Column| ffi::Column {
            dtype: column.dtype,
            sizes: std::iter::once(rows).chain(column.dims.iter().copied()).collect(),
            channels_last: column.channels_last,
        };
        self.batch.columns().iter().map(column).collect()
    }

    pub fn numbers_in(&self, leaf: u32) -> Result<usize, Crossing> {
        guard(|| Ok(self.batch.numbers_in(leaf)))
    }

    /// # Safety
    /// The targets must be valid for writes of their lengths, and nobody else's, until the batch is
    /// finished or dropped.
    pub unsafe fn begin(&mut self, to: &[ffi::Target], threads: usize) -> Result<(), Crossing> {
        guard(|| {
            let to: Vec<_> = to.iter().map(|target| (target.data, target.len)).collect();
            // SAFETY: by the caller's promise.
            Ok(unsafe { self.batch.begin(&to, threads) }?)
        })
    }

    pub fn finish(&mut self) -> Result<ffi::Gathered, Crossing> {
        guard(|| {
            Ok(match self.batch.finish() {
                Gathered::Whole => ffi::Gathered::Whole,
                Gathered::Unlike => ffi::Gathered::Unlike,
                Gathered::Gone => ffi::Gathered::Gone,
            })
        })
    }

    pub fn is_current(&self) -> bool {
        calm(false, || self.batch.is_current())
    }

    pub fn text(&self, row: usize, column: usize) -> Result<&[u8], Crossing> {
        guard(|| Ok(self.batch.text(row, column).unwrap_or_default()))
    }

    pub fn rest(&self, row: usize) -> Result<&[u8], Crossing> {
        guard(|| Ok(self.batch.rest(row).unwrap_or_default()))
    }
}

/// A buffer that nobody else holds, or null.
pub fn take_batch(bytes: usize) -> *mut u8 {
    let taken = calm(None, || batches::take(bytes));
    taken.map_or(std::ptr::null_mut(), |buffer| buffer.into_raw().cast())
}

/// Gives back what is kept of makers that are gone.
pub fn give_back_batches() {
    calm((), batches::give_back);
}

/// Ends a hold.
///
/// # Safety
/// `data` must come from `take_batch` or `receive_batch`, and be used once.
pub unsafe fn drop_batch(data: *mut u8) {
    // SAFETY: by the caller's promise.
    calm((), || drop(unsafe { Buffer::from_raw(data.cast()) }));
}

/// A ticket for the buffer that holds `data`; no bytes if there is none, or no ticket can be had.
///
/// # Safety
/// None is needed; cxx asks for it because of the pointer, which is only compared.
pub unsafe fn send_batch(data: *const u8) -> ffi::Ticket {
    let sent = calm(None, || batches::holding(data).and_then(|buffer| buffer.send().ok()));
    match sent {
        Some(Ticket { pid, fd, instance, bytes, serial }) => {
            ffi::Ticket { pid, fd, instance, bytes, serial }
        }
        None => ffi::Ticket { pid: 0, fd: -1, instance: 0, bytes: 0, serial: 0 },
    }
}

/// The batch of a ticket.
pub fn receive_batch(ticket: &ffi::Ticket) -> Result<*mut u8, Crossing> {
    guard(|| {
        let ticket = Ticket {
            pid: ticket.pid,
            fd: ticket.fd,
            instance: ticket.instance,
            bytes: ticket.bytes,
            serial: ticket.serial,
        };
        Ok(batches::receive(&ticket)?.into_raw().cast())
    })
}
