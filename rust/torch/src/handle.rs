//! A cache as C++ holds it.
#![allow(unsafe_code)] // tensors over the segment, and the pins that keep it mapped

use crate::bridge::ffi;
use crate::guard::{Crossing, calm, guard};
use crate::tensor::{Contents, borrow, flags, indices};
use cxx::UniquePtr;
use std::sync::Arc;
use stocache::segment::Segment;
use stocache::segment::layout::Header;
use stocache::{
    Backing, Cache, Error, Geometry, HugePages, Join, Kind, Load, Mapping, Opened, Request,
    SlotsGeometry, Stored, random_name,
};

type Result<T> = std::result::Result<T, Crossing>;

const GIB: f64 = (1u64 << 30) as f64;

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
        let request = request(options)?;
        let (cache, opened) = match options.if_gone.as_str() {
            "empty" => Cache::open(&request)?,
            "error" => Cache::join(&request.name, Some(&request))?,
            other => return Err(unknown("if_gone", other, r#""error" or "empty""#)),
        };
        Ok(Box::new(Handle { cache, opened }))
    })
}

/// What the options ask for, every value checked.
fn request(options: &ffi::Options) -> Result<Request> {
    let gib = options.size_limit_gib;
    // As Python and C++ write numbers: 1, 0.5, 1e300, nan.
    let shown = format!("{gib:?}").trim_end_matches(".0").to_lowercase();
    if !(gib.is_finite() && gib > 0.0) {
        return Err(argument(format!("size_limit_gib is {shown}; it must be a number above 0")));
    }
    if gib >= (1u64 << 33) as f64 {
        return Err(argument(format!("size_limit_gib is {shown}; it must be below 2**33")));
    }
    let dataset_len = whole("dataset_len", options.dataset_len)?;
    let dims = options.dims.iter().enumerate();
    let dims = dims
        .map(|(i, &dim)| whole(&format!("dimension {i} of data_dims"), dim))
        .collect::<Result<Vec<u64>>>()?;
    let backing = backing(&options.backing)?;
    let verify = match options.verify.as_str() {
        "never" => false,
        "always" => true,
        other => return Err(unknown("verify", other, r#""never" or "always""#)),
    };
    let private = options.name.is_empty();
    if options.keep && private {
        let message = "keep=True needs name=, so that the next run can find the cache";
        return Err(argument(message.to_string()));
    }
    Ok(Request {
        name: if private { random_name()? } else { options.name.clone() },
        geometry: Geometry::Slots(SlotsGeometry::plan(
            (gib * GIB) as u64,
            dataset_len,
            &dims,
            options.dtype,
            options.item_bytes,
            verify,
        )?),
        fingerprint: hashed(&options.fingerprint),
        keep: options.keep,
        backing,
        huge_pages: huge_pages(&options.huge_pages)?,
        private,
        join: join_of(&options.instance, options.pid, options.fd),
    })
}

/// What `fingerprint_of` made.
pub fn hashed(fingerprint: &str) -> u128 {
    u128::from_str_radix(fingerprint, 16).unwrap_or_default()
}

/// Where another process has it open; an empty instance says nobody does.
pub fn join_of(instance: &str, pid: u32, fd: i32) -> Option<Join> {
    u128::from_str_radix(instance, 16).ok().map(|instance| Join { instance, pid, fd })
}

pub fn backing(word: &str) -> Result<Backing> {
    match word {
        "auto" => Ok(Backing::Auto),
        "shm" => Ok(Backing::Shm),
        "memfd" => Ok(Backing::Memfd),
        other => Err(unknown("backing", other, r#""auto", "shm" or "memfd""#)),
    }
}

pub fn huge_pages(word: &str) -> Result<HugePages> {
    match word {
        "no" => Ok(HugePages::No),
        "auto" => Ok(HugePages::Auto),
        "yes" => Ok(HugePages::Yes),
        other => Err(unknown("huge_pages", other, r#""no", "auto" or "yes""#)),
    }
}

/// What `huge_pages` reads.
pub fn huge_pages_word(segment: &Segment) -> String {
    match segment.huge_pages() {
        HugePages::No => "no",
        HugePages::Auto => "auto",
        HugePages::Yes => "yes",
    }
    .to_string()
}

pub fn argument(message: String) -> Crossing {
    Error::new(Kind::Argument, message).into()
}

pub fn unknown(what: &str, given: &str, allowed: &str) -> Crossing {
    argument(format!("{what} {given:?} is not known; use {allowed}"))
}

/// A whole number of at least 1.
pub fn whole(what: &str, given: i64) -> Result<u64> {
    match u64::try_from(given) {
        Ok(number @ 1..) if number < 1 << 62 => Ok(number),
        Ok(1..) => Err(argument(format!("{what} is {given}; it must be below 2**62"))),
        _ => Err(argument(format!("{what} is {given}; it must be at least 1"))),
    }
}

/// Joins the cache of that name, whatever it holds.
pub fn join(name: &str) -> Result<Box<Handle>> {
    guard(|| {
        let (cache, opened) = Cache::join(name, None)?;
        Ok(Box::new(Handle { cache, opened }))
    })
}

/// The cache of that name, open in this process already or joined for the rest of its life.
pub fn by_name(name: &str) -> Result<Box<Handle>> {
    guard(|| Ok(Box::new(Handle { cache: Cache::by_name(name)?, opened: Opened::Joined })))
}

/// Ends what `by_name` and `hold` began.
pub fn release(name: &str) -> bool {
    calm(false, || Cache::release(name))
}

/// What a user says of the data, as caches remember it.
pub fn fingerprint_of(text: &[u8]) -> String {
    format!("{:032x}", Header::fingerprint_of(text))
}

/// Where a segment is.
pub fn location(segment: &Segment, opened: Opened) -> ffi::Location {
    let join = segment.location();
    ffi::Location {
        name: segment.name().to_string(),
        path: segment.path().map(|path| path.display().to_string()).unwrap_or_default(),
        backing: if segment.backing() == Backing::Memfd { "memfd" } else { "shm" }.to_string(),
        opened: match opened {
            Opened::Created => "created",
            Opened::Joined => "joined",
            Opened::Resumed => "resumed",
        }
        .to_string(),
        instance: format!("{:032x}", join.instance),
        pid: join.pid,
        fd: join.fd,
    }
}

/// Bytes that the machine and the memory cgroup leave.
pub fn free_memory() -> u64 {
    calm(0, || stocache::sys::limits::memory().free)
}

/// From now on waits end when C++ says so.
pub fn ask_cpp() {
    stocache::sys::interrupt::ask_with(ffi::is_interrupted);
}

/// Removes leftovers of this user.
pub fn sweep() -> Vec<String> {
    calm(Vec::new(), stocache::remove_leftovers)
}

/// Deals with the names of this process's segments: it is about to end.
pub fn leave() {
    calm((), stocache::leave);
}

/// Ends what `Handle::pin` began.
///
/// # Safety
/// `pin` must come from `Handle::pin` and not be used again.
pub unsafe fn unpin(pin: *mut Pin) {
    // SAFETY: `pin` came from Arc::into_raw of an Arc<Mapping> (Handle::pin).
    calm((), || drop(unsafe { Arc::from_raw(pin.cast_const().cast::<Mapping>()) }));
}

impl Handle {
    /// Keeps it open for those who know it by name only.
    pub fn hold(&self) {
        calm((), || self.cache.hold());
    }

    pub fn geometry(&self) -> ffi::Geometry {
        let geometry = self.cache.geometry();
        ffi::Geometry {
            dataset_len: geometry.dataset_len as i64,
            capacity: geometry.capacity as i64,
            slot_bytes: geometry.slot_bytes,
            dims: self.dims(),
            dtype: geometry.dtype,
            total_bytes: self.cache.layout().total,
        }
    }

    pub fn location(&self) -> Result<ffi::Location> {
        guard(|| Ok(location(self.cache.segment(), self.opened)))
    }

    /// The options that lead here again, or to an equal cache if this one is gone.
    pub fn options(&self) -> Result<ffi::Options> {
        let (geometry, location) = (self.cache.geometry(), self.location()?);
        let header = self.cache.segment().header();
        // Exact: a division by a power of two.
        let limit = geometry.capacity * geometry.slot_bytes + geometry.dataset_len;
        Ok(ffi::Options {
            size_limit_gib: limit as f64 / GIB,
            dataset_len: geometry.dataset_len as i64,
            dims: self.dims(),
            dtype: geometry.dtype,
            item_bytes: self.item_bytes() as u64,
            name: location.name,
            backing: location.backing,
            keep: header.keep,
            verify: if geometry.verify { "always" } else { "never" }.to_string(),
            fingerprint: format!("{:032x}", header.fingerprint),
            if_gone: "empty".to_string(),
            huge_pages: huge_pages_word(self.cache.segment()),
            instance: location.instance,
            pid: location.pid,
            fd: location.fd,
        })
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
        calm(nothing(ffi::Slot::Empty), || match self.cache.load(index) {
            Load::Hit(at) => ffi::Found {
                state: ffi::Slot::Hit,
                data: self.cache.segment().mapping().at(at, 0).as_ptr(),
            },
            Load::Empty => nothing(ffi::Slot::Empty),
            Load::Beyond => nothing(ffi::Slot::Beyond),
            Load::Outside => nothing(ffi::Slot::Outside),
        })
    }

    pub fn store(&self, index: i64, value: &ffi::Tensor, overwrite: bool) -> Result<ffi::Slot> {
        guard(|| {
            let value = Contents::of(value, self.item_bytes())?;
            Ok(match self.cache.store(index, value.bytes(), overwrite)? {
                Stored::Done => ffi::Slot::Stored,
                Stored::Lost => ffi::Slot::Lost,
                Stored::Occupied => ffi::Slot::Occupied,
                Stored::Beyond => ffi::Slot::Beyond,
                Stored::Outside => ffi::Slot::Outside,
                Stored::Refused(true) => ffi::Slot::Froze,
                Stored::Refused(false) => ffi::Slot::Refused,
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
            let at = self.cache.layout().data_at + place * self.cache.geometry().slot_bytes;
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
            self.view(self.cache.layout().data_at, bytes, &sizes, geometry.dtype)
        })
    }

    /// The states, live: two bytes each.
    pub fn states(&self) -> Result<UniquePtr<ffi::Tensor>> {
        guard(|| {
            let bytes = 2 * self.cache.geometry().dataset_len;
            self.view(self.cache.layout().states_at, bytes, &[bytes as i64], 0)
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

    pub fn stats(&self) -> Result<ffi::Stats> {
        let stats = guard(|| Ok::<_, Crossing>(self.cache.stats()))?;
        Ok(ffi::Stats {
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
        })
    }

    pub fn frozen_reason(&self) -> Result<String> {
        guard(|| Ok(self.cache.frozen_reason()))
    }
}
