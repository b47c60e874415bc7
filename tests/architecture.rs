//! The stated order of rooms and modules, checked: each knows only those below it.
//!
//! The order is read where people read it, in the tables of `lib.rs` and of each room's `mod.rs`; the
//! edges are the paths that begin with `crate::`, and in a room's own files with `super::`, outside of
//! tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Everybody may know these, and they know no room.
const BESIDE: [&str; 4] = ["bytes", "error", "fault", "guard"];

/// The names in the first column of the table at the head of a file, from the top.
fn table(text: &str) -> Vec<String> {
    text.lines()
        .take_while(|line| line.starts_with("//!"))
        .filter_map(|line| line.strip_prefix("//! | ")?.split(" | ").next())
        .map(|name| name.trim_matches(|c| "[]`".contains(c)).to_string())
        .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
        .filter(|name| !["room", "module", "word"].contains(&name.as_str()))
        .collect()
}

/// The code of a file: without its tests and its comments.
fn code(text: &str) -> String {
    let tests =
        ["#[cfg(test)]\nmod ", "#[cfg(all(test, not(loom)))]\nmod ", "#[cfg(all(test, feature"];
    let end = tests.iter().filter_map(|mark| text.find(mark)).min().unwrap_or(text.len());
    let lines = text[..end].lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The first names of every path that begins with `root`, two where there are as many.
fn edges(code: &str, root: &str) -> Vec<Vec<String>> {
    code.match_indices(root).flat_map(|(at, _)| names(&code[at + root.len()..], 2)).collect()
}

/// The names at the start of a path, up to so many; of each of them, where it is a list in braces:
/// `room::{self, module::Thing, module}`.
fn names(path: &str, most: usize) -> Vec<Vec<String>> {
    if let Some(list) = path.strip_prefix('{') {
        return items(list).into_iter().flat_map(|item| names(item, most)).collect();
    }
    let end = path.find(|c: char| !is_name(c)).unwrap_or(path.len());
    let (first, rest) = path.split_at(end);
    let after = match rest.strip_prefix("::") {
        Some(rest) if most > 1 => names(rest, most - 1),
        _ => vec![Vec::new()],
    };
    after.into_iter().map(|names| [vec![first.to_string()], names].concat()).collect()
}

/// What stands between the commas of a list, whose opening brace is gone.
fn items(list: &str) -> Vec<&str> {
    let (mut found, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in list.char_indices() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if depth < 0 || (depth == 0 && c == ',') {
            found.push(list[start..at].trim());
            start = at + 1;
        }
        if depth < 0 {
            break;
        }
    }
    found
}

/// What a file at `path` below the source folder may not do but does.
fn violations(path: &Path, text: &str, tables: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let rooms = &tables[""];
    let place = |list: &[String], name: &str| list.iter().position(|listed| listed == name);
    let mut parts = path.iter().map(|part| part.to_string_lossy().replace(".rs", ""));
    let (room, module) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let code = code(text);
    let mut edges = edges(&code, "crate::");
    if parts.next().is_none() && module != "mod" {
        let within = self::edges(&code, "super::").into_iter();
        edges.extend(within.map(|names| [vec![room.clone()], names].concat()));
    }
    let mut found = Vec::new();
    for names in edges {
        let name = |at: usize| names.get(at).cloned().unwrap_or_default();
        let (to_room, to_module) = (name(0), name(1));
        let why = if BESIDE.contains(&to_room.as_str()) {
            continue;
        } else if to_room == room && !module.is_empty() {
            let modules = &tables[&room];
            match (place(modules, &module), place(modules, &to_module)) {
                (Some(from), Some(to)) if to < from => "stands above it in its room",
                _ => continue,
            }
        } else {
            match (place(rooms, &room), place(rooms, &to_room)) {
                (None, Some(_)) if BESIDE.contains(&room.as_str()) => {
                    "is a room, and it stands beside"
                }
                (Some(from), Some(to)) if to < from => "is a room above its own",
                _ => continue,
            }
        };
        found.push(format!("{}: crate::{to_room}::{to_module} {why}", path.display()));
    }
    found
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        let name = entry.file_name().into_string().unwrap();
        if path.is_dir() && name != "tests" {
            files(&path, found);
        } else if name.ends_with(".rs") && !["tests.rs", "models.rs", "lib.rs"].contains(&&*name) {
            found.push(path);
        }
    }
}

fn source() -> (PathBuf, BTreeMap<String, Vec<String>>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("rust/core/src");
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap();
    let rooms = table(&read(root.join("lib.rs")));
    let mut tables: BTreeMap<_, _> = rooms
        .iter()
        .map(|room| (room.clone(), table(&read(root.join(room).join("mod.rs")))))
        .collect();
    tables.insert(String::new(), rooms);
    (root, tables)
}

#[test]
fn each_room_and_each_module_knows_only_those_below_it() {
    let (root, tables) = source();
    let mut all = Vec::new();
    files(&root, &mut all);
    assert!(all.len() > 30, "the sources were found");
    let found: Vec<String> = all
        .iter()
        .flat_map(|path| {
            let text = std::fs::read_to_string(path).unwrap();
            violations(path.strip_prefix(&root).unwrap(), &text, &tables)
        })
        .collect();
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn every_room_and_every_module_is_in_its_table() {
    let (root, tables) = source();
    let mut missing = Vec::new();
    for (room, listed) in &tables {
        let folder = root.join(room);
        for entry in std::fs::read_dir(&folder).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap().replace(".rs", "");
            let known = ["mod", "lib", "tests", "models"].contains(&&*name)
                || (room.is_empty() && BESIDE.contains(&&*name))
                || listed.contains(&name);
            if !known {
                missing.push(format!("{room}/{name}"));
            }
        }
    }
    assert!(missing.is_empty(), "not in the table of their room: {missing:?}");
}

/// The control: edges that are forbidden are seen, whatever their form.
#[test]
fn control_a_forbidden_edge_is_caught() {
    let (_, tables) = source();
    let seen = |path: &str, text: &str| violations(Path::new(path), text, &tables).len();
    assert_eq!(seen("sys/ofd.rs", "use crate::segment::Segment;"), 1);
    assert_eq!(seen("sys/ofd.rs", "fn f() { crate::slots::cache::g() }"), 1);
    assert_eq!(seen("segment/claim.rs", "use crate::segment::{self, lease::Leases};"), 1);
    assert_eq!(seen("segment/claim.rs", "use super::{lease::Leases, layout};"), 2);
    assert_eq!(seen("error.rs", "use crate::sys::limits;"), 1);
    assert_eq!(seen("slots/cache.rs", "use crate::{error::{Error, Kind}, tiers::tier::Tier};"), 1);
    assert_eq!(seen("segment/lease.rs", "use crate::segment::claim::Claim;"), 0);
    assert_eq!(seen("slots/cache.rs", "use crate::{error::Error, sys::limits};"), 0);
    assert_eq!(seen("records/schema/parse.rs", "use super::store::Thing;"), 0);
    assert_eq!(seen("sys/ofd.rs", "// crate::segment is above"), 0);
    assert_eq!(seen("sys/ofd.rs", "#[cfg(test)]\nmod tests { use crate::segment; }"), 0);
}

/// Where things are that the documents speak of.
const TREE: [&str; 8] =
    ["rust", "csrc", "python", "tests", "benches", "examples", "docs", "setup.py"];
const DOCUMENTS: [&str; 3] = ["docs/architecture.md", "docs/decisions.md", "CONTRIBUTING.md"];
const ENDINGS: [&str; 9] =
    [".rs", ".py", ".pyi", ".cpp", ".h", ".md", ".svg", ".toml", "CMakeLists.txt"];

/// What is in the tree: the paths of its files, and the names of its functions.
struct Tree {
    paths: Vec<String>,
    functions: Vec<String>,
}

impl Tree {
    fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut tree = Self { paths: Vec::new(), functions: Vec::new() };
        for name in std::fs::read_dir(root).unwrap().flatten() {
            let name = name.file_name().into_string().unwrap();
            if root.join(&name).is_file() {
                tree.paths.push(name);
            }
        }
        TREE.iter().for_each(|name| tree.add(root, &root.join(name)));
        tree
    }

    fn add(&mut self, root: &Path, path: &Path) {
        if path.is_dir() {
            for entry in std::fs::read_dir(path).unwrap().flatten() {
                self.add(root, &entry.path());
            }
        } else {
            // What is no text names no function.
            let text = std::fs::read_to_string(path).unwrap_or_default();
            for mark in ["fn ", "def ", "class "] {
                let names = text.split(mark).skip(1);
                let name = |rest: &str| rest.chars().take_while(|&c| is_name(c)).collect();
                self.functions.extend(names.map(name));
            }
            self.paths.push(path.strip_prefix(root).unwrap().to_string_lossy().into_owned());
        }
    }

    /// Whether there is a file or a folder whose path ends so.
    fn has_path(&self, word: &str) -> bool {
        let word = format!("/{}", word.trim_end_matches('/'));
        self.paths.iter().any(|path| {
            let path = format!("/{path}");
            path.ends_with(&word) || path.contains(&format!("{word}/"))
        })
    }

    /// Whether there is a function of that name; of which a part may be left out: "…".
    fn has_function(&self, name: &str) -> bool {
        let (head, tail) = name.split_once('…').unwrap_or((name, ""));
        let whole = !name.contains('…');
        self.functions.iter().any(|function| {
            if whole {
                function == name
            } else {
                function.starts_with(head) && function.ends_with(tail)
            }
        })
    }

    /// What a document names in backticks, and there is not.
    fn missing(&self, text: &str) -> Vec<String> {
        let prose: String = text.split("```").step_by(2).collect();
        let quoted = prose.split('`').skip(1).step_by(2).flat_map(str::split_whitespace);
        let names = |word: &&str| {
            let word = word.split('[').next().unwrap_or_default();
            let long = word.contains('…') || word.matches('_').count() > 2;
            word.contains('_') && word.chars().all(|c| is_name(c) || c == '…') && long
        };
        let mut missing = Vec::new();
        for word in quoted {
            if names(&word) {
                let name = word.split('[').next().unwrap_or_default();
                if !self.has_function(name) && name.to_uppercase() != name {
                    missing.push(word.to_string());
                }
            } else if is_path(word) {
                missing.extend(one_each(word).into_iter().filter(|path| !self.has_path(path)));
            }
        }
        missing
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn is_path(word: &str) -> bool {
    let relative = word.chars().all(|c| is_name(c) || "./-{},".contains(c))
        && !word.starts_with(['/', '.', '-']);
    relative
        && (ENDINGS.iter().any(|ending| word.ends_with(ending))
            || TREE.iter().any(|top| word.starts_with(&format!("{top}/"))))
}

/// `a/{b,c}.rs` is two paths.
fn one_each(word: &str) -> Vec<String> {
    match (word.split_once('{'), word.split_once('}')) {
        (Some((head, list)), Some((_, tail))) => {
            let list = list.split('}').next().unwrap_or_default();
            list.split(',').map(|name| format!("{head}{name}{tail}")).collect()
        }
        _ => vec![word.to_string()],
    }
}

#[test]
fn every_file_and_every_test_that_a_document_names_exists() {
    let tree = Tree::read();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let missing: Vec<String> = DOCUMENTS
        .iter()
        .flat_map(|document| {
            let text = std::fs::read_to_string(root.join(document)).unwrap();
            let missing = tree.missing(&text);
            missing.into_iter().map(move |word| format!("{document}: {word}"))
        })
        .collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

/// The control: a file or a test that is gone is seen, whatever its form.
#[test]
fn control_a_name_that_is_gone_is_caught() {
    let tree = Tree::read();
    let gone = |text: &str| tree.missing(text).len();
    assert_eq!(gone("`slot/models.rs` and `rust/core/src/segment/{lock,lifecycle}.rs`"), 2);
    assert_eq!(gone("`rust/core/src/nothing/`, `benches/python/nothing.py --only fill`"), 2);
    assert_eq!(gone("`p1_nothing_is_ever_torn`, `p1_nothing_…`, `…_is_ever_torn[memfd]`"), 3);
    assert_eq!(gone("`segment/lock.rs`, `rust/core/src/segment/`, `/dev/shm/x.rs`, nothing.rs"), 0);
    assert_eq!(gone("`control_a_name_…` and `control_a_name_that_is_gone_is_caught`"), 0);
    assert_eq!(gone("```\nnothing.rs\n``` and `a.b_c` and `MADV_POPULATE_WRITE_X`"), 0);
}
