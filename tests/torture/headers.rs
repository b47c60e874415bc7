//! P11: no damaged header is accepted.

use crate::{Run, Verdict};
use stocache::SlotsGeometry;
use stocache::segment::layout::{HEADER_BYTES, Header};

/// Flips a few bits at a time; `count` headers.
pub fn mutated(run: &mut Run) -> Verdict {
    let geometry = SlotsGeometry::plan(1 << 30, 1000, &[3, 32, 32], 0, 1, true)
        .map_err(|error| error.to_string())?;
    let total = geometry.layout().map_err(|error| error.to_string())?.total;
    let header = Header {
        instance: 1,
        keep: false,
        fingerprint: 0,
        geometry: stocache::Geometry::Slots(geometry),
    };
    let good = header.encode().map_err(|error| error.to_string())?;
    for round in 0..run.count {
        let mut bad = good;
        for _ in 0..1 + run.random.below(4) {
            bad[run.random.below(HEADER_BYTES as u64) as usize] ^= 1 << run.random.below(8);
        }
        if bad != good && Header::decode(&bad, total).is_ok() {
            return Err(format!("round {round}: accepted {bad:?}"));
        }
    }
    Ok(format!("{} damaged headers refused", run.count))
}
