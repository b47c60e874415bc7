//! Reads of a file past the page cache, in an order that nobody knows before: by threads with pread(2), or by
//! one with io_uring. Why the disk level does the former is written in docs/decisions.md.

use io_uring::{IoUring, opcode, types};
use std::alloc::{Layout, alloc_zeroed};
use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const FILE: usize = 1 << 30;
const PAGE: usize = 4096;
const ROUNDS: usize = 5;

/// Prints what each way reads in a second, and which share of a processor it takes.
pub fn compare(folder: &Path) -> Result<()> {
    let path = folder.join("ways");
    let mut file = File::create(&path)?;
    (0..FILE >> 20).try_for_each(|i| file.write_all(&vec![i as u8 | 1; 1 << 20]))?;
    file.sync_all()?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path)?;
    for (size, threads) in [(PAGE, 8), (37 * PAGE, 4)] {
        let places = order(FILE / size, size);
        for round in 0..ROUNDS {
            let ways: [(&str, &dyn Fn() -> Result<()>); 3] = [
                ("pread, threads", &|| by_threads(&file, &places, size, threads)),
                ("io_uring, as many on their way", &|| by_ring(&file, &places, size, threads)),
                ("io_uring, 32 on their way", &|| by_ring(&file, &places, size, 32)),
            ];
            for (name, way) in ways {
                let (began, before) = (Instant::now(), processor_seconds());
                way()?;
                let took = began.elapsed().as_secs_f64();
                let share = 100.0 * (processor_seconds() - before) / took;
                let speed = places.len() as f64 / took;
                println!(
                    "{size} bytes, round {round}: {speed:.0} reads/s, {share:.0} % of a processor: {name} ({threads})"
                );
            }
        }
    }
    std::fs::remove_file(path)?;
    Ok(())
}

fn order(count: usize, size: usize) -> Vec<u64> {
    let mut places: Vec<u64> = (0..count).map(|i| (i * size) as u64).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for i in (1..count).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        places.swap(i, (random % (i as u64 + 1)) as usize);
    }
    places.truncate(60_000);
    places
}

fn buffer(size: usize) -> &'static mut [u8] {
    let layout = Layout::from_size_align(size, PAGE).expect("small");
    // SAFETY: the layout is not empty; nobody frees it.
    unsafe { std::slice::from_raw_parts_mut(alloc_zeroed(layout), size) }
}

fn by_threads(file: &File, places: &[u64], size: usize, threads: usize) -> Result<()> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let to = buffer(size);
                while let Some(&at) = places.get(next.fetch_add(1, Ordering::Relaxed)) {
                    file.read_exact_at(to, at).expect("it is there");
                }
            });
        }
    });
    Ok(())
}

fn by_ring(file: &File, places: &[u64], size: usize, depth: usize) -> Result<()> {
    let mut ring = IoUring::new(depth as u32)?;
    let buffers: Vec<*mut u8> = (0..depth).map(|_| buffer(size).as_mut_ptr()).collect();
    let (mut free, mut next, mut done): (Vec<usize>, _, _) = ((0..depth).collect(), 0, 0);
    while done < places.len() {
        while let (Some(&at), Some(k)) = (places.get(next), free.pop()) {
            let fd = types::Fd(file.as_raw_fd());
            let read = opcode::Read::new(fd, buffers[k], size as u32).offset(at).build();
            // SAFETY: file and buffer outlive the ring.
            unsafe { ring.submission().push(&read.user_data(k as u64))? };
            next += 1;
        }
        ring.submit_and_wait(1)?;
        for completed in ring.completion() {
            if completed.result() != size as i32 {
                return Err(format!("a read ended with {}", completed.result()).into());
            }
            free.push(completed.user_data() as usize);
            done += 1;
        }
    }
    Ok(())
}

fn processor_seconds() -> f64 {
    let mut used = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: it is zeroed, and written by the call.
    let used = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, used.as_mut_ptr());
        used.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(used.ru_utime) + seconds(used.ru_stime)
}
