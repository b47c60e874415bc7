//! Which schemas may come from a level below: none that asks for a pickle, and of classes those that somebody
//! of this node has stored samples of.
//!
//! A schema names the classes of a sample's parts, and who reads a record imports them by these names. A name
//! from a disk or a server could be any. So it counts only if a schema in memory has the same class: that one
//! is of a sample which a process of this node had in its hands, or came from below by this very rule. The
//! first sample of a class is loaded, and from then on such records come up.

use crate::fault::{Fault, active as broken};
use crate::records::RecordStore;
use crate::records::schema::{Class, Schema};
use std::collections::HashSet;

/// What becomes of records of a schema that came from below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// They come up.
    Welcome,
    /// Nobody of this node has stored a sample of such a class yet: a miss, and the record stays.
    NotYet,
    /// It asks for a pickle, or is no schema.
    Never,
}

/// The classes in the schemas of memory.
#[derive(Default)]
pub(super) struct KnownClasses {
    /// How many of these schemas were looked at.
    seen: usize,
    names: HashSet<Vec<u8>>,
}

impl KnownClasses {
    pub(super) fn judge(&mut self, memory: &RecordStore, schema: &[u8]) -> Verdict {
        let Some(schema) = travels(schema) else { return Verdict::Never };
        if self.has_all(&schema) || broken(Fault::TrustClasses) {
            return Verdict::Welcome;
        }
        for bytes in memory.schemas_from(self.seen) {
            self.seen += 1;
            let classes = |schema: Schema| {
                schema.classes.iter().map(|class| name_of(&schema, class)).collect::<Vec<_>>()
            };
            self.names.extend(Schema::parse(&bytes).map(classes).unwrap_or_default());
        }
        if self.has_all(&schema) { Verdict::Welcome } else { Verdict::NotYet }
    }

    fn has_all(&self, schema: &Schema) -> bool {
        schema.classes.iter().all(|class| self.names.contains(&name_of(schema, class)))
    }
}

/// The schema, if its records may go down, and up again.
pub(super) fn travels(schema: &[u8]) -> Option<Schema> {
    let schema = Schema::parse(schema).ok()?;
    (!schema.needs_pickle || broken(Fault::PicklesTravel)).then_some(schema)
}

/// What kind of class it is, where it is found and what its fields are, as the schema says it.
fn name_of(schema: &Schema, class: &Class) -> Vec<u8> {
    let mut name = vec![class.kind as u8];
    for span in [class.module, class.qualified, class.fields] {
        name.extend(span.len.to_le_bytes());
        name.extend(schema.text(span));
    }
    name
}
