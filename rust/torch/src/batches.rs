//! Batch buffers as C++ holds them: by address.
#![allow(unsafe_code)] // a hold crosses as a pointer

use crate::bridge::ffi;
use crate::guard::{Crossing, guard};
use stocache::ring::{self, Buffer, Ticket};

/// A buffer that nobody else holds, or null.
pub fn take_batch(bytes: usize) -> *mut u8 {
    ring::take(bytes).map_or(std::ptr::null_mut(), |buffer| buffer.into_raw().cast())
}

/// Gives back what is kept of makers that are gone.
pub fn sweep_batches() {
    ring::sweep();
}

/// Ends a hold.
///
/// # Safety
/// `data` must come from `take_batch` or `receive_batch`, and be used once.
pub unsafe fn drop_batch(data: *mut u8) {
    // SAFETY: by the caller's promise.
    drop(unsafe { Buffer::from_raw(data.cast()) });
}

/// A ticket for the buffer that holds `data`; no bytes if there is none, or no ticket can be had.
///
/// # Safety
/// None is needed; cxx asks for it because of the pointer, which is only compared.
pub unsafe fn send_batch(data: *const u8) -> ffi::Ticket {
    let sent = ring::holding(data).and_then(|buffer| buffer.send().ok());
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
        Ok(ring::receive(&ticket)?.into_raw().cast())
    })
}
