//! A cache as C++ holds it.
#![allow(unsafe_code)] // tensors over the segment, and the pins that keep it mapped

use crate::bridge::ffi;
use crate::guard::{Crossing, guard};
use crate::tensor::{Contents, borrow, flags, indices};
use cxx::UniquePtr;
use std::sync::Arc;
use stocache::layout::Header;
use stocache::{
    Backing, Cache, Error, Geometry, Join, Kind, Load, Mapping, Opened, Request, Store,
};

type Result<T> = std::result::Result<T, Crossing>;

/// A cache, open in this process.
pub struct Handle {
    cache: Arc<Cache>,
    opened: Opened,
}

/// Keeps the memory under a tensor mapped: a counted reference to the mapping, not to the cache.
pub struct Pin(#[allow(dead_code)] Mapping);

/// Joins or makes a cache.
pub fn open(options: &ffi::Options) -> Result<Box<Handle>> {
    guard(|| {
        let backing = match options.backing.as_str() {
            "auto" => Backing::Auto,
            "shm" => Backing::Shm,
            "memfd" => Backing::Memfd,
            other => {
                let message =
                    format!("backing {other:?} is not known; use \"auto\", \"shm\" or \"memfd\"");
                return Err(Error::new(Kind::Argument, message).into());
            }
        };
        let request = Request {
            name: options.name.clone(),
            geometry: Geometry::plan(
                options.limit_bytes,
                options.dataset_len,
                &options.dims,
                options.dtype,
                options.item_bytes,
                options.verify,
            )?,
            fingerprint: Header::fingerprint_of(&options.fingerprint),
            keep: options.keep,
            backing,
            private: options.private_name,
            join: u128::from_str_radix(&options.instance, 16).ok().map(|instance| Join {
                instance,
                pid: options.pid,
                fd: options.fd,
            }),
        };
        let (cache, opened) = Cache::open(&request)?;
        Ok(Box::new(Handle { cache, opened }))
    })
}

/// The open cache with that number.
pub fn by_id(id: u64) -> Result<Box<Handle>> {
    guard(|| {
        match Cache::by_id(id) {
        Some(cache) => Ok(Box::new(Handle { cache, opened: Opened::Joined })),
        None => Err(Error::new(
            Kind::State,
            format!("no open cache has the handle {id}; it was closed, or the handle is of another process"),
        )
        .into()),
    }
    })
}

/// Removes leftovers of this user.
pub fn sweep() -> Vec<String> {
    stocache::sweep()
}

/// Ends what `Handle::pin` began.
///
/// # Safety
/// `pin` must come from `Handle::pin` and not be used again.
pub unsafe fn unpin(pin: *mut Pin) {
    // SAFETY: `pin` came from Arc::into_raw of an Arc<Mapping> (Handle::pin).
    drop(unsafe { Arc::from_raw(pin.cast_const().cast::<Mapping>()) });
}

impl Handle {
    pub fn facts(&self) -> ffi::Facts {
        let segment = self.cache.segment();
        let (geometry, join) = (self.cache.geometry(), segment.join());
        ffi::Facts {
            id: self.cache.id(),
            dataset_len: geometry.dataset_len,
            capacity: geometry.capacity,
            slot_bytes: geometry.slot_bytes,
            dims: geometry.dims.iter().map(|&dim| dim as i64).collect(),
            dtype: geometry.dtype,
            name: segment.name().to_string(),
            path: segment.path().map(|path| path.display().to_string()).unwrap_or_default(),
            backing: if segment.backing() == Backing::Memfd { "memfd" } else { "shm" }.to_string(),
            opened: match self.opened {
                Opened::Created => "created",
                Opened::Joined => "joined",
                Opened::Resumed => "resumed",
            }
            .to_string(),
            instance: format!("{:032x}", join.instance),
            pid: join.pid,
            fd: join.fd,
            total_bytes: segment.layout().total,
        }
    }

    /// A reference to the mapping that `unpin` gives back.
    pub fn pin(&self) -> *mut Pin {
        Arc::into_raw(self.cache.segment().mapping().clone()).cast_mut().cast()
    }

    /// The first mapped byte.
    pub fn base(&self) -> *mut u8 {
        self.cache.segment().mapping().at(0, 0).as_ptr()
    }

    /// The hot path: no allocation, no error.
    #[inline]
    pub fn look(&self, index: i64) -> ffi::Found {
        let nothing = |state| ffi::Found { state, data: std::ptr::null_mut() };
        match self.cache.load(index) {
            Load::Hit(at) => ffi::Found {
                state: ffi::Slot::Hit,
                data: self.cache.segment().mapping().at(at, 0).as_ptr(),
            },
            Load::Empty => nothing(ffi::Slot::Empty),
            Load::Beyond => nothing(ffi::Slot::Beyond),
            Load::Outside => nothing(ffi::Slot::Outside),
        }
    }

    pub fn store(&self, index: i64, value: &ffi::Tensor, overwrite: bool) -> Result<ffi::Slot> {
        guard(|| {
            let value = Contents::of(value, self.item_bytes())?;
            Ok(match self.cache.store(index, value.bytes(), overwrite)? {
                Store::Stored => ffi::Slot::Stored,
                Store::Lost => ffi::Slot::Lost,
                Store::Occupied => ffi::Slot::Occupied,
                Store::Beyond => ffi::Slot::Beyond,
                Store::Outside => ffi::Slot::Outside,
                Store::Refused(true) => ffi::Slot::Froze,
                Store::Refused(false) => ffi::Slot::Refused,
            })
        })
    }

    pub fn load_many(
        &self,
        at: &ffi::Tensor,
        out: &ffi::Tensor,
        found: &ffi::Tensor,
        threads: u32,
    ) -> Result<()> {
        guard(|| {
            let (at, out, mut found) = (borrow(at), borrow(out), borrow(found));
            let at = indices(&at)?;
            if !out.is_contiguous()
                || out.numel() * self.item_bytes() != at.len() * self.slot_bytes()
            {
                return Err(Error::new(
                    Kind::Argument,
                    "out is not contiguous or not one row per index",
                )
                .into());
            }
            // SAFETY: contiguous with exactly one row per index (checked above), and the C++ side
            // has checked that it does not overlap the cache.
            unsafe {
                self.cache.load_many(
                    at,
                    out.data_ptr().cast(),
                    flags(&mut found)?,
                    threads as usize,
                )?;
            }
            Ok(())
        })
    }

    pub fn store_many(
        &self,
        at: &ffi::Tensor,
        values: &ffi::Tensor,
        stored: &ffi::Tensor,
        overwrite: bool,
    ) -> Result<bool> {
        guard(|| {
            let (at, mut stored) = (borrow(at), borrow(stored));
            let values = Contents::of(values, self.item_bytes())?;
            Ok(self.cache.store_many(
                indices(&at)?,
                values.bytes(),
                overwrite,
                flags(&mut stored)?,
            )?)
        })
    }

    /// The slot as it is, set or not; its memory is reserved first.
    pub fn slot_in_place(&self, index: i64) -> Result<UniquePtr<ffi::Tensor>> {
        guard(|| {
            let place = index as u64;
            if index < 0 || place >= self.cache.geometry().capacity {
                return Err(self.cache.outside(index).into());
            }
            self.cache.reserve(place, place + 1)?;
            let at =
                self.cache.segment().layout().data_at + place * self.cache.geometry().slot_bytes;
            self.view(
                at,
                self.cache.geometry().slot_bytes,
                &self.dims(),
                self.cache.geometry().dtype,
            )
        })
    }

    /// The whole array; all of its memory is reserved first.
    pub fn array(&self) -> Result<UniquePtr<ffi::Tensor>> {
        guard(|| {
            let geometry = self.cache.geometry();
            self.cache.reserve(0, geometry.capacity)?;
            let sizes: Vec<i64> =
                [geometry.capacity as i64].into_iter().chain(self.dims()).collect();
            let bytes = geometry.capacity * geometry.slot_bytes;
            self.view(self.cache.segment().layout().data_at, bytes, &sizes, geometry.dtype)
        })
    }

    /// The state bytes, live.
    pub fn states(&self) -> Result<UniquePtr<ffi::Tensor>> {
        guard(|| {
            let len = self.cache.geometry().dataset_len;
            self.view(self.cache.segment().layout().states_at, len, &[len as i64], 0)
        })
    }

    fn view(
        &self,
        at: u64,
        bytes: u64,
        sizes: &[i64],
        dtype: i32,
    ) -> Result<UniquePtr<ffi::Tensor>> {
        let data = self.cache.segment().mapping().at(at as usize, bytes as usize);
        // SAFETY: the bytes lie in the mapping, which the pin keeps alive as long as the tensor.
        Ok(unsafe { ffi::over_segment(self.pin(), data.as_ptr(), bytes, sizes, dtype)? })
    }

    fn dims(&self) -> Vec<i64> {
        self.cache.geometry().dims.iter().map(|&dim| dim as i64).collect()
    }

    fn slot_bytes(&self) -> usize {
        self.cache.geometry().slot_bytes as usize
    }

    fn item_bytes(&self) -> usize {
        let items: u64 = self.cache.geometry().dims.iter().product();
        self.slot_bytes() / items as usize
    }

    pub fn clear(&self) -> Result<()> {
        guard(|| Ok(self.cache.clear()?))
    }

    pub fn stats(&self) -> ffi::Stats {
        let stats = self.cache.stats();
        ffi::Stats {
            hits: stats.hits,
            misses: stats.misses,
            fills: stats.fills,
            bytes: stats.bytes,
            waits: stats.waits,
            lost: stats.lost,
            dropped: stats.dropped,
            damaged: stats.damaged,
            filled: stats.filled,
            frozen: stats.frozen,
        }
    }

    pub fn frozen_reason(&self) -> String {
        self.cache.frozen_reason()
    }
}
