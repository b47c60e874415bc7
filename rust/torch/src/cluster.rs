//! Servers of a cluster, as C++ knows them: below a store of records, or alone.

use crate::bridge::ffi;
use crate::guard::{Crossing, calm, guard};
use crate::handle::{argument, hashed};
use crate::records::Records;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stocache::cluster::{ClusterOptions, ClusterStore, parse_servers};
use stocache::tiers::{Cluster, Disk, Levels, Tier};

type Result<T> = std::result::Result<T, Crossing>;

/// How long a single value may take beyond what its server may.
const PATIENCE: Duration = Duration::from_secs(10);

fn opened(options: &ffi::ClusterOptions) -> Result<Arc<ClusterStore>> {
    let servers = parse_servers(&options.url)?;
    Ok(Arc::new(ClusterStore::new(ClusterOptions {
        servers,
        name: options.name.clone(),
        fingerprint: hashed(&options.fingerprint),
        secret: options.secret.clone(),
        ttl: Duration::from_millis(options.ttl_millis),
    })?))
}

/// What this process saw of each server and, if they are asked, what they hold.
fn servers_of(store: &ClusterStore, ask: bool) -> Vec<ffi::ClusterServer> {
    let holdings = if ask { store.holdings() } else { Vec::new() };
    let of = |seen: stocache::cluster::ServerStats| {
        let holding = holdings.iter().find(|holding| holding.address == seen.address);
        let holding = holding.cloned().unwrap_or_default();
        ffi::ClusterServer {
            address: seen.address,
            hits: seen.hits,
            misses: seen.misses,
            fills: seen.fills,
            dropped: seen.dropped,
            forged: seen.forged,
            errors: seen.errors,
            bytes_read: seen.bytes_read,
            bytes_written: seen.bytes_written,
            latency_nanos: seen.latency.map(|took| took.as_nanos() as u64),
            resting: seen.resting,
            answers: holding.samples.is_some(),
            samples: holding.samples.unwrap_or(0),
            values: holding.values,
            used_bytes: holding.used_bytes,
            max_bytes: holding.max_bytes,
            version: holding.version,
        }
    };
    store.stats().into_iter().map(of).collect()
}

impl Records {
    pub fn open_cluster(&self, options: &ffi::ClusterOptions) -> Result<()> {
        guard(|| {
            let store = opened(options)?;
            let memory = self.store();
            let mut below: Vec<Box<dyn Tier>> = Vec::new();
            if let Some(disk) = self.disk() {
                below.push(Box::new(Disk::new(Arc::clone(disk), self.compression())));
            }
            below.push(Box::new(Cluster::new(Arc::clone(&store), Arc::clone(memory))));
            let levels = Levels::new(Arc::clone(memory), below);
            if !self.put_cluster(levels, store, options.clone()) {
                return Err(argument("a cluster is open already".to_string()));
            }
            Ok(())
        })
    }

    pub fn cluster_options(&self) -> Result<ffi::ClusterOptions> {
        guard(|| Ok(self.cluster().map(|cluster| cluster.options.clone()).unwrap_or_default()))
    }

    pub fn cluster_servers(&self, ask: bool) -> Result<Vec<ffi::ClusterServer>> {
        guard(|| {
            let all = self.cluster().map(|cluster| servers_of(&cluster.store, ask));
            Ok(all.unwrap_or_default())
        })
    }
}

/// Values on servers, known by digests of their keys.
pub struct Servers(Arc<ClusterStore>);

pub fn open_servers(options: &ffi::ClusterOptions) -> Result<Box<Servers>> {
    guard(|| Ok(Box::new(Servers(opened(options)?))))
}

fn digest(high: u64, low: u64) -> u128 {
    u128::from(high) << 64 | u128::from(low)
}

impl Servers {
    /// The halves of each digest stand beside each other, the high one first.
    pub fn get_many(&self, digests: &[u64]) -> Result<Vec<ffi::NamedValue>> {
        guard(|| {
            let keys: Vec<u128> =
                digests.chunks_exact(2).map(|halves| digest(halves[0], halves[1])).collect();
            let of = |found: Option<(Vec<u8>, Vec<u8>)>| {
                let is_there = found.is_some();
                let (schema, bytes) = found.unwrap_or_default();
                ffi::NamedValue { is_there, schema, bytes }
            };
            let found = self.0.get_values(&keys, Instant::now() + PATIENCE);
            Ok(found.into_iter().map(of).collect())
        })
    }

    pub fn address_of(&self, high: u64, low: u64) -> String {
        calm(String::new(), || self.0.address_of(digest(high, low)))
    }

    pub fn put(&self, high: u64, low: u64, schema: &[u8], bytes: &[u8]) -> bool {
        calm(false, || {
            self.0.put_value(digest(high, low), schema, bytes, Instant::now() + PATIENCE)
        })
    }

    pub fn flush(&self, nanos: u64) -> bool {
        calm(false, || self.0.flush(Duration::from_nanos(nanos)))
    }

    pub fn clear(&self) -> Result<()> {
        guard(|| Ok(self.0.clear()?))
    }

    pub fn news(&self) -> String {
        calm(String::new(), || self.0.news().unwrap_or_default())
    }

    pub fn servers(&self, ask: bool) -> Result<Vec<ffi::ClusterServer>> {
        guard(|| Ok(servers_of(&self.0, ask)))
    }
}
