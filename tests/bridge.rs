//! No panic crosses the bridge: its functions return a `Result`, answer a panic with "nothing there", or do
//! nothing that can panic.

use std::path::Path;

/// Of the bridge's functions these only read fields, count in checked arithmetic, or hand over what they
/// are given; and these are for other functions of the bridge.
const PLAIN: [&str; 38] = [
    "levels",
    "hashed",
    "join_of",
    "huge_pages_word",
    "argument",
    "unknown",
    "location",
    "fingerprint_of",
    "ask_cpp",
    "geometry",
    "pin",
    "base",
    "store",
    "source_of",
    "folder",
    "trouble",
    "new_batch",
    "add_store",
    "absent",
    "rows",
    "schemas_in",
    "columns",
    "bytes",
    "parsed",
    "sums",
    "nodes",
    "keys",
    "classes",
    "dtypes",
    "images",
    "names",
    "tensor_itemsize",
    "image_mode",
    "is_palette_mode",
    "dims_bytes",
    "pixels_bytes",
    "backing",
    "huge_pages",
];

/// The functions of a file that could end the process: they return no `Result`, and let a panic through.
fn uncaught(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let starts: Vec<usize> = ["    pub fn ", "\npub fn ", "    pub unsafe fn ", "\npub unsafe fn "]
        .iter()
        .flat_map(|start| text.match_indices(start).map(|(at, start)| at + start.len()))
        .collect();
    for at in starts {
        let rest = &text[at..];
        let body = &rest[..rest.find("\n    }\n").or(rest.find("\n}\n")).unwrap_or(rest.len())];
        let name: String = body.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let signature = &body[..body.find(" {\n").unwrap_or(body.len())];
        let plain = PLAIN.contains(&name.as_str()) && !body.contains("calm(");
        if !signature.contains("Result<") && !body.contains("calm(") && !plain {
            found.push(name);
        }
    }
    found
}

#[test]
fn no_function_of_the_bridge_lets_a_panic_through() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("rust/torch/src");
    let files = [
        "acquiring",
        "augment",
        "batches",
        "cluster",
        "disk",
        "disk_folder",
        "files",
        "handle",
        "node",
        "records",
        "schema",
    ];
    for file in files {
        let text = std::fs::read_to_string(root.join(format!("{file}.rs"))).unwrap();
        assert_eq!(uncaught(&text), [""; 0], "{file}.rs: return a Result, or use `calm`");
    }
}

#[test]
fn control_a_function_that_lets_a_panic_through_is_caught() {
    let free = "\npub fn look(i: usize) -> u8 {\n    TABLE[i]\n}\n";
    let method =
        "impl T {\n    pub unsafe fn look(&self, i: usize) -> u8 {\n        self.0[i]\n    }\n}\n";
    assert_eq!((uncaught(free), uncaught(method)), (vec!["look".into()], vec!["look".into()]));
    let calm = "\npub fn look(i: usize) -> u8 {\n    calm(0, || TABLE[i])\n}\n";
    let result = "\npub fn look(i: usize) -> Result<u8> {\n    guard(|| Ok(TABLE[i]))\n}\n";
    assert!(uncaught(calm).is_empty() && uncaught(result).is_empty());
}
