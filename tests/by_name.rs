//! Caches that a process knows by name only.
#![cfg(not(feature = "faults"))]

use stocache::{Backing, Cache, Kind, Opened, Request, SlotsGeometry, random_name};

fn request(name: &str, backing: Backing) -> Request {
    let geometry = SlotsGeometry::plan(1 << 16, 100, &[4], 0, 1, false).unwrap();
    let named = Request::new(name, stocache::Geometry::Slots(geometry));
    Request { fingerprint: 7, backing, ..named }
}

fn exists(name: &str) -> bool {
    std::fs::read_dir("/dev/shm")
        .unwrap()
        .any(|entry| entry.unwrap().file_name().to_string_lossy().ends_with(name))
}

#[test]
fn joining_takes_what_is_there_and_makes_nothing() {
    let name = random_name().unwrap();
    let missing = Cache::join(&name, None).err().unwrap();
    assert_eq!(missing.kind(), Kind::State);
    assert!(missing.to_string().contains(&name), "{missing}");
    assert!(!exists(&name));
    for backing in [Backing::Shm, Backing::Memfd] {
        let (made, how) = Cache::open(&request(&name, backing)).unwrap();
        assert_eq!(how, Opened::Created);
        made.store(3, &[1, 2, 3, 4], false).unwrap();
        let (joined, how) = Cache::join(&name, None).unwrap();
        assert_eq!((how, joined.geometry()), (Opened::Joined, made.geometry()));
        let other = Request { fingerprint: 8, ..request(&name, backing) };
        let refused = Cache::join(&name, Some(&other)).err().unwrap();
        assert_eq!(refused.kind(), Kind::Argument);
    }
    assert!(Cache::join(&name, None).is_err());
}

#[test]
fn a_name_is_held_from_its_first_use_until_it_is_released() {
    let name = random_name().unwrap();
    assert!(Cache::by_name(&name).is_err());
    let (made, _) = Cache::open(&request(&name, Backing::Shm)).unwrap();
    // Open here already: nothing is held in addition.
    drop(Cache::by_name(&name).unwrap());
    drop(made);
    assert!(!exists(&name));
    assert!(!Cache::release(&name));

    let (made, _) = Cache::open(&request(&name, Backing::Shm)).unwrap();
    made.hold();
    made.store(3, &[1, 2, 3, 4], false).unwrap();
    drop(made);
    assert_eq!(Cache::by_name(&name).unwrap().stats().filled, 1);
    assert!(Cache::release(&name));
    assert!(!exists(&name));
    assert!(Cache::by_name(&name).is_err());
}
