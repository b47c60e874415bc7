//! Which server has which sample: the one that scores highest for it (rendezvous hashing).
//!
//! All who give the same servers agree, in whatever order they give them. A server that leaves takes its own
//! samples with it, and no other moves.
//!
//! Where there are more servers than a dataset needs, those of a node are a cell of its neighbours, which hold a
//! copy together: it has no connection to any other.

use super::address::{Address, Servers};
use xxhash_rust::xxh3::xxh3_64;

/// Servers by position, each by a number that follows from its address.
pub(super) struct Placement {
    /// Where the cell begins.
    first: usize,
    servers: Vec<u64>,
}

impl Placement {
    pub(super) fn new(servers: &Servers) -> Self {
        let number = |server: &Address| xxh3_64(server.to_string().as_bytes());
        let cell = &servers.all[servers.cell.clone()];
        Self { first: servers.cell.start, servers: cell.iter().map(number).collect() }
    }

    /// The position of the server that has this sample of that dataset.
    pub(super) fn of(&self, key: u64, fingerprint: u128) -> usize {
        let sample = mixed(key ^ fingerprint as u64 ^ (fingerprint >> 64) as u64);
        let score = |&(at, &server): &(usize, &u64)| (mixed(server ^ sample), at);
        self.first + self.servers.iter().enumerate().max_by_key(score).map_or(0, |(at, _)| at)
    }
}

/// Each bit of the result depends on each of the number (splitmix64).
fn mixed(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::address::parse_servers;
    use super::*;

    const SAMPLES: u64 = 20_000;

    fn servers(count: usize) -> Servers {
        let list: Vec<String> = (0..count).map(|i| format!("10.0.0.{i}:7000")).collect();
        parse_servers(&format!("redis://{}", list.join(","))).unwrap()
    }

    #[test]
    fn servers_have_equal_shares_in_whatever_order_they_are_given() {
        let mut list = servers(8);
        let placement = Placement::new(&list);
        let chosen: Vec<String> =
            (0..SAMPLES).map(|key| list.all[placement.of(key, 7)].to_string()).collect();
        for server in &list.all {
            let share = chosen.iter().filter(|&it| *it == server.to_string()).count() as f64;
            let equal = SAMPLES as f64 / 8.0;
            assert!((share / equal - 1.0).abs() < 0.1, "{server}: {share} of {equal}");
        }
        list.all.reverse();
        let placement = Placement::new(&list);
        assert!(
            (0..SAMPLES)
                .all(|key| { list.all[placement.of(key, 7)].to_string() == chosen[key as usize] })
        );
    }

    #[test]
    fn a_server_that_leaves_takes_its_own_samples_only() {
        let before = servers(8);
        let all: Vec<Address> =
            before.all.iter().filter(|it| it.host != "10.0.0.3").cloned().collect();
        let after = Servers { cell: 0..all.len(), all };
        let (old, new) = (Placement::new(&before), Placement::new(&after));
        for key in 0..SAMPLES {
            let was = &before.all[old.of(key, 9)];
            assert!(was.host == "10.0.0.3" || *was == after.all[new.of(key, 9)]);
        }
    }

    #[test]
    fn only_servers_of_the_cell_have_samples() {
        let mut servers = servers(8);
        servers.cell = 3..6;
        let placement = Placement::new(&servers);
        for at in 0..8 {
            let share = (0..SAMPLES).filter(|&key| placement.of(key, 7) == at).count() as f64;
            let equal = if (3..6).contains(&at) { SAMPLES as f64 / 3.0 } else { 0.0 };
            assert!((share - equal).abs() <= 0.1 * equal, "{at}: {share} of {equal}");
        }
    }
}
