//! Which server has which value, as far as this process knows.
//!
//! By the list that people gave, until a server of it says that it is one of a native cluster: then by the slots
//! that this cluster tells, and the list is only where to start. What was told may be old. Whoever is sent
//! elsewhere goes there; and the whole is asked for anew, now and then.

use super::address::{Address, Servers};
use super::budget::Trouble;
use super::link::{Link, Told};
use super::rests::Circumstances;
use super::slots::{Elsewhere, Map, Place, Run, SLOTS, slot_of};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// The slots are not asked for more often than this.
const LEARN_REST: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 1_000 });
/// Nor, because of a server that is left alone, than this: others need a while until they replace it.
const REPLACEMENT: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 5_000 });
/// More servers than a cluster has: who names more is not believed.
const MOST_NODES: usize = 1_000;
/// Nobody has that slot.
const NOBODY: u16 = u16::MAX;

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A server.
pub(super) struct Node {
    pub(super) address: Address,
    pub(super) link: Mutex<Link>,
}

impl Node {
    fn new(address: Address, common: &Arc<Circumstances>) -> Arc<Self> {
        let link = Mutex::new(Link::new(&address, common));
        Arc::new(Self { address, link })
    }
}

/// What these servers are.
#[derive(Clone)]
enum Kind {
    /// Nobody has asked them.
    Unknown,
    /// Each for itself.
    Listed,
    /// One cluster: the node of each slot.
    Native(Box<[u16]>),
}

/// Servers and what they have, as of one moment. In all tables of a process those that are in both are in the
/// same order, so that threads that lock them in this order never wait for each other.
#[derive(Clone)]
pub(super) struct Table {
    /// Those of the list first.
    nodes: Vec<Arc<Node>>,
    listed: usize,
    /// Those of the list that this node uses, unless they are of a native cluster.
    cell: Range<usize>,
    kind: Kind,
    common: Arc<Circumstances>,
}

impl Table {
    pub(super) fn nodes(&self) -> &[Arc<Node>] {
        &self.nodes
    }

    pub(super) fn is_native(&self) -> bool {
        matches!(self.kind, Kind::Native(_))
    }

    /// The server of a value, of which the list says `listed`; None if nobody has it.
    pub(super) fn server(&self, listed: usize, name: &[u8]) -> Option<usize> {
        match &self.kind {
            Kind::Native(slots) => {
                Some(slots[usize::from(slot_of(name))]).filter(|&at| at != NOBODY).map(usize::from)
            }
            _ => Some(listed),
        }
    }

    /// Those that have values: of a native cluster the ones with slots, so no replica.
    pub(super) fn holders(&self) -> Vec<Arc<Node>> {
        match &self.kind {
            Kind::Native(slots) => {
                let mut has = vec![false; self.nodes.len()];
                slots
                    .iter()
                    .filter(|&&at| at != NOBODY)
                    .for_each(|&at| has[usize::from(at)] = true);
                self.nodes
                    .iter()
                    .zip(has)
                    .filter(|(_, has)| *has)
                    .map(|(it, _)| it.clone())
                    .collect()
            }
            _ => self.nodes[..self.listed].to_vec(),
        }
    }

    /// Of these, the ones that this node uses.
    pub(super) fn of_the_cell(&self) -> Vec<Arc<Node>> {
        if self.is_native() { self.holders() } else { self.nodes[self.cell.clone()].to_vec() }
    }

    /// The position of the server that `from` says is there; a new one if need be.
    fn find(&mut self, from: &Address, place: &Place) -> Option<usize> {
        let host = place.host.as_deref().unwrap_or(&from.host);
        let is_it = |node: &Arc<Node>| node.address.host == host && node.address.port == place.port;
        if let Some(at) = self.nodes.iter().position(is_it) {
            return Some(at);
        }
        if self.nodes.len() >= MOST_NODES + self.listed {
            return None;
        }
        let address = Address { host: host.to_string(), port: place.port, ..from.clone() };
        self.nodes.push(Node::new(address, &self.common));
        Some(self.nodes.len() - 1)
    }

    /// The same with these slots, and the servers that had some and have none any more.
    fn with_slots(&self, from: &Address, runs: &[Run]) -> (Self, Vec<Arc<Node>>) {
        let mut new = self.clone();
        let mut slots = vec![NOBODY; SLOTS].into_boxed_slice();
        for run in runs {
            let Some(at) = new.find(from, &run.place) else { continue };
            slots[usize::from(run.first)..=usize::from(run.last)].fill(at as u16);
        }
        let mut stays = vec![false; new.nodes.len()];
        stays[..new.listed].fill(true);
        slots.iter().filter(|&&at| at != NOBODY).for_each(|&at| stays[usize::from(at)] = true);
        let mut now = vec![NOBODY; new.nodes.len()];
        let (mut nodes, mut gone) = (Vec::new(), Vec::new());
        for (at, node) in new.nodes.into_iter().enumerate() {
            if stays[at] {
                now[at] = nodes.len() as u16;
                nodes.push(node);
            } else {
                gone.push(node);
            }
        }
        slots.iter_mut().filter(|at| **at != NOBODY).for_each(|at| *at = now[usize::from(*at)]);
        let (listed, cell) = (self.listed, self.cell.clone());
        let (kind, common) = (Kind::Native(slots), Arc::clone(&self.common));
        (Self { nodes, listed, cell, kind, common }, gone)
    }
}

#[derive(Default)]
struct Learning {
    last: Option<Instant>,
    /// Who is asked first, next time.
    turn: usize,
}

/// The servers of one process.
pub(super) struct Routes {
    table: RwLock<Arc<Table>>,
    /// What the table says may be old.
    doubted: AtomicBool,
    learning: Mutex<Learning>,
    pub(super) common: Arc<Circumstances>,
}

impl Routes {
    pub(super) fn new(servers: &Servers, common: Circumstances) -> Self {
        let common = Arc::new(common);
        let made = |server: &Address| Node::new(server.clone(), &common);
        let nodes: Vec<Arc<Node>> = servers.all.iter().map(made).collect();
        let cell = servers.cell.clone();
        let table = Table {
            listed: nodes.len(),
            nodes,
            cell,
            kind: Kind::Unknown,
            common: Arc::clone(&common),
        };
        Self {
            table: RwLock::new(Arc::new(table)),
            doubted: AtomicBool::new(false),
            learning: Mutex::default(),
            common,
        }
    }

    pub(super) fn table(&self) -> Arc<Table> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, change: impl FnOnce(&Table) -> Table) -> Arc<Table> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        *table = Arc::new(change(&table));
        Arc::clone(&table)
    }

    /// What the table says may be old: the slots are asked for anew when that may be done.
    pub(super) fn doubt(&self) {
        self.doubted.store(true, Ordering::Relaxed); // a hint: nothing else hangs on it
    }

    /// The same because a server of the table is left alone, and may have been replaced.
    pub(super) fn doubt_now_and_then(&self) {
        if let Ok(learning) = self.learning.try_lock()
            && learning.last.is_none_or(|last| last.elapsed() >= REPLACEMENT)
        {
            self.doubt();
        }
    }

    /// The table, learned anew if there is doubt; by one thread, while others use what there is.
    pub(super) fn current(&self, deadline: Instant) -> Arc<Table> {
        if self.doubted.load(Ordering::Relaxed)
            && let Ok(mut learning) = self.learning.try_lock()
        {
            self.learn(&mut learning, None, deadline);
        }
        self.table()
    }

    /// The table, after these servers were asked what they are. For who sends what it does not keep, and for who
    /// has to know all servers.
    pub(super) fn known(&self, deadline: Instant) -> Arc<Table> {
        if matches!(self.table().kind, Kind::Unknown) {
            self.learn(&mut locked(&self.learning), None, deadline);
        }
        self.current(deadline)
    }

    /// The table, and in it where to go: after these servers sent us elsewhere. None: nobody knows.
    pub(super) fn follow(
        &self,
        sent: &[(Arc<Node>, Elsewhere)],
        deadline: Instant,
    ) -> (Arc<Table>, Vec<Option<usize>>) {
        let mut table = self.table();
        if !table.is_native() {
            let first = sent.first().map(|(node, _)| Arc::clone(node));
            self.learn(&mut locked(&self.learning), first, deadline);
            table = self.table();
            if !table.is_native() {
                return (table, vec![None; sent.len()]);
            }
        } else if sent.iter().any(|(_, to)| !to.this_time) {
            self.doubt();
        }
        let mut ways = Vec::with_capacity(sent.len());
        let table = self.put(|table| {
            let mut table = table.clone();
            for (from, to) in sent {
                let at = table.find(&from.address, &to.place);
                if let (Kind::Native(slots), Some(at), false) = (&mut table.kind, at, to.this_time)
                {
                    slots[usize::from(to.slot)] = at as u16;
                }
                ways.push(at);
            }
            table
        });
        (table, ways)
    }

    /// Asks one server after the other for the slots, until one says them; not too often, and for one wait in all.
    fn learn(&self, learning: &mut Learning, first: Option<Arc<Node>>, deadline: Instant) {
        if learning.last.is_some_and(|last| last.elapsed() < LEARN_REST) {
            return;
        }
        learning.last = Some(Instant::now());
        learning.turn += 1;
        self.doubted.store(false, Ordering::Relaxed);
        let table = self.table();
        let sent = first.is_some();
        // Nobody connects to all servers of the list to learn what those of its cell are.
        let some =
            if table.is_native() { &table.nodes[..] } else { &table.nodes[table.cell.clone()] };
        let count = some.len();
        let others = (0..count).map(|at| Arc::clone(&some[(at + learning.turn) % count]));
        for node in first.into_iter().chain(others) {
            let mut link = locked(&node.link);
            if !link.may_be_asked() {
                continue;
            }
            let mut budget = link.budget(deadline, 0);
            let outcome = link.map(&node.address, &mut budget);
            link.put_back(&budget);
            // For one wait in all.
            let late = matches!(outcome, Err(Trouble::Late | Trouble::Slow | Trouble::OutOfTime));
            match link.settle(outcome) {
                Some(Map::Runs(runs)) if !runs.is_empty() => {
                    drop(link);
                    return self.take(&node.address, &runs, deadline);
                }
                Some(Map::Runs(_)) => {}
                Some(Map::Without(words)) if sent || table.is_native() => {
                    link.tell(Told::NoSlots, |server| {
                        format!(
                            "the server {server} is one of a native cluster and does not say who has \
                             which slots (it says {words:?}); samples of other servers are loaded: \
                             let its user call CLUSTER SLOTS"
                        )
                    });
                }
                Some(Map::Without(_)) => {
                    let listed = |table: &Table| match table.kind {
                        Kind::Unknown => Table { kind: Kind::Listed, ..table.clone() },
                        _ => table.clone(),
                    };
                    self.put(listed);
                    return;
                }
                None if late => return,
                None => {}
            }
        }
    }

    /// From now on these slots count.
    fn take(&self, from: &Address, runs: &[Run], deadline: Instant) {
        let mut gone = Vec::new();
        self.put(|table| {
            let (new, left) = table.with_slots(from, runs);
            gone = left;
            new
        });
        // What was sent to them is answered, or nobody will know.
        for node in gone {
            let mut link = locked(&node.link);
            let mut budget = link.budget(deadline, 0);
            let outcome = link.flush(&mut budget);
            link.settle(outcome);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::address::parse_servers;
    use super::*;

    fn run(first: u16, last: u16, host: Option<&str>, port: u16) -> Run {
        Run { first, last, place: Place { host: host.map(String::from), port } }
    }

    fn shown(table: &Table) -> Vec<String> {
        table.holders().iter().map(|node| node.address.to_string()).collect()
    }

    #[test]
    fn the_list_is_where_to_start() {
        let servers = parse_servers("redis://u:word@seed:1,b:2").unwrap();
        let routes = Routes::new(&servers, Circumstances::default());
        let table = routes.table();
        assert_eq!(
            (table.server(1, b"foo"), shown(&table)),
            (Some(1), vec!["seed:1".into(), "b:2".into()])
        );
        let (table, gone) = table.with_slots(
            &servers.all[0],
            &[
                run(0, 99, Some("c"), 3),
                run(100, 12_181, None, 4),
                run(12_182, 12_182, Some("b"), 2),
            ],
        );
        assert!(gone.is_empty());
        assert_eq!(shown(&table), ["b:2", "c:3", "seed:4"]);
        assert_eq!(table.server(0, b"foo"), Some(1), "slot 12182");
        assert_eq!(table.server(0, b"123456789"), None, "slot 12739");
        assert_eq!(table.nodes()[2].address.password, "word");
        let (after, gone) = table.with_slots(&servers.all[0], &[run(0, 16_383, Some("d"), 5)]);
        assert_eq!((shown(&after), gone.len()), (vec!["d:5".into()], 2));
        assert_eq!(after.nodes().len(), 3, "those of the list, and one");
        assert!(Arc::ptr_eq(&after.nodes()[1], &table.nodes()[1]), "with its connection");
    }

    #[test]
    fn who_names_servers_without_end_is_not_believed() {
        let servers = parse_servers("redis://seed:1").unwrap();
        let routes = Routes::new(&servers, Circumstances::default());
        let runs: Vec<Run> = (0..5_000).map(|i| run(i, i, Some("x"), i + 1)).collect();
        let (table, _) = routes.table().with_slots(&servers.all[0], &runs);
        assert_eq!(table.nodes().len(), MOST_NODES + 1);
        let from = Arc::clone(&table.nodes()[0]);
        routes.put(|_| table);
        let place = Place { host: Some("y".into()), port: 1 };
        let to = Elsewhere { slot: 1, place, this_time: false };
        assert_eq!(routes.follow(&[(from, to)], Instant::now()).1, [None]);
    }
}
