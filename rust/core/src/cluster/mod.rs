//! Records on servers that speak Redis's protocol: Redis, Valkey.
//!
//! | module | role |
//! | --- | --- |
//! | `store` | all servers, as this process uses them |
//! | `routes` | which server has which value, as far as this process knows |
//! | `link` | one server: what was asked of it and not answered |
//! | `questions` | values that are asked for, several at once |
//! | `rests` | how long a server is left alone after trouble, by all processes of a node |
//! | `slots` | the slots of a native cluster, and where servers send those who ask the wrong one |
//! | `connection` | bytes to and from a server, with a bound on all waiting |
//! | `stream` | a socket that never blocks, with or without TLS |
//! | `budget` | how long a server may be waited for |
//! | `value` | a record as it lies on a server: with its schema, and a tag that proves who wrote it |
//! | `tags` | such tags of several values at once |
//! | `placement` | which server has which sample |
//! | `address` | servers as people write them |
//! | `tls` | whom a server's certificate must be from, and our own |
//! | `latency` | how long answers take |
//!
//! A server is believed nothing. What it says is bounded before memory is taken for it; a reply that is out
//! of step ends the connection; a value counts only if its tag says that somebody with the job's secret wrote
//! it for this very sample. Trouble is a miss, and costs one wait until the server's rest is over.

mod address;
mod budget;
mod connection;
mod latency;
mod link;
mod placement;
mod questions;
mod rests;
mod routes;
mod slots;
mod store;
mod stream;
mod tags;
#[cfg(test)]
pub(crate) mod tests;
mod tls;
mod value;

pub use address::{Address, Servers, parse_servers};
pub use link::{MAX_VALUE, ServerStats};
pub use store::{ClusterOptions, ClusterStore, Holding, Received, Receiver};
pub use tls::Tls;
