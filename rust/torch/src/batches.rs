//! Batches as C++ makes them, and batch buffers as it holds them: by address.
#![allow(unsafe_code)] // holds, records and columns cross as pointers

use crate::bridge::ffi;
use crate::guard::{Crossing, calm, guard};
use crate::records::Records;
use crate::schema::Schema;
use std::sync::Arc;
use stocache::batches::{self, Buffer, Gathered, Pieces, Row, Ticket};

/// A batch in the making.
pub struct Batch(batches::Batch);

/// The records of these samples, as far as they are there; without rows if they are not of one schema.
pub fn find_batch(records: &Records, indices: &[i64]) -> Box<Batch> {
    let found = calm(None, || batches::Batch::find(records.store(), indices));
    // SAFETY: no rows.
    Box::new(Batch(found.unwrap_or_else(|| unsafe { batches::Batch::over(Vec::new()) })))
}

/// A batch of records of the caller's.
///
/// # Safety
/// They must be readable for as long as the batch is used.
pub unsafe fn batch_over(records: &[ffi::Part]) -> Box<Batch> {
    let rows = records.iter().map(|part| Row { data: part.data, len: part.len });
    // SAFETY: by the caller's promise.
    Box::new(Batch(unsafe { batches::Batch::over(rows.collect()) }))
}

impl Batch {
    pub fn rows(&self) -> usize {
        self.0.rows()
    }

    pub fn schema(&self) -> u16 {
        self.0.schema()
    }

    pub fn absent(&self) -> i64 {
        self.0.absent().map_or(-1, |row| row as i64)
    }

    /// # Safety
    /// The pieces must be readable, and stay as they are, for as long as the batch is used.
    pub unsafe fn give(&mut self, schema: u16, pieces: &[ffi::Part]) -> bool {
        let rows = pieces.iter().map(|part| Row { data: part.data, len: part.len });
        // SAFETY: by the caller's promise.
        calm(false, || unsafe { self.0.give(schema, Pieces(rows.collect())) })
    }

    pub fn lay_out(&mut self, schema: &Schema) -> bool {
        calm(false, || self.0.lay_out(Arc::clone(schema.parsed())))
    }

    pub fn columns(&self) -> Vec<ffi::Column> {
        let column = |column: &batches::Column| ffi::Column {
            dtype: column.dtype,
            sizes: column.sizes.clone(),
        };
        self.0.columns().iter().map(column).collect()
    }

    pub fn numbers_in(&self, leaf: u32) -> Result<usize, Crossing> {
        guard(|| Ok(self.0.numbers_in(leaf)))
    }

    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// # Safety
    /// The targets must be valid for writes of their lengths, and nobody else's meanwhile.
    pub unsafe fn copy(
        &mut self,
        to: &[ffi::Target],
        threads: usize,
    ) -> Result<ffi::Gathered, Crossing> {
        guard(|| {
            let to: Vec<_> = to.iter().map(|target| (target.data, target.len)).collect();
            // SAFETY: by the caller's promise.
            Ok(match unsafe { self.0.copy(&to, threads) }? {
                Gathered::Whole => ffi::Gathered::Whole,
                Gathered::Unlike => ffi::Gathered::Unlike,
                Gathered::Gone => ffi::Gathered::Gone,
            })
        })
    }

    /// A string of a row, after the copy.
    pub fn text(&self, row: usize, column: usize) -> Result<&[u8], Crossing> {
        guard(|| {
            let text = self.0.texts()[row * self.0.texts_per_row() + column];
            Ok(&self.0.text_bytes()[text.at..][..text.len])
        })
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
