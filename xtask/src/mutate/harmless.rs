//! Faults that change nothing in a round trip, each with the reason. They are not tried, and counted apart.

use super::faults::{Fault, Kind};
use crate::workspace::Workspace;

/// A kind of place, by instruction and Rust line.
struct Harmless {
    kinds: &'static [Kind],
    /// What the opcode begins with.
    opcode: &'static str,
    /// What the kernel's own line holds.
    source: &'static str,
    why: &'static str,
}

const HARMLESS: [Harmless; 2] = [
    Harmless {
        kinds: &[Kind::AcquireToRelaxed, Kind::DeviceToBlock],
        opcode: "ld.acquire.gpu.",
        source: "current_epoch(",
        why: "an earlier kernel of the stream wrote the epoch",
    },
    Harmless {
        kinds: &[Kind::DeviceToBlock],
        opcode: "ld.relaxed.gpu.global.b32",
        source: "",
        why: "only a wait that expires writes the abort word, and none does",
    },
];

/// Why a fault changes nothing, if it is known not to.
pub fn why(ws: &Workspace, fault: &Fault) -> Option<&'static str> {
    let source = std::fs::read_to_string(ws.root.join(&fault.own.0)).unwrap_or_default();
    let line = source.lines().nth((fault.own.1 as usize).saturating_sub(1)).unwrap_or("");
    let known = |harmless: &&Harmless| {
        harmless.kinds.contains(&fault.kind)
            && fault.opcode.starts_with(harmless.opcode)
            && line.contains(harmless.source)
    };
    HARMLESS.iter().find(known).map(|harmless| harmless.why)
}

#[cfg(test)]
mod tests {
    use super::super::{KERNELS, faults, text};
    use super::*;

    #[test]
    fn every_reason_is_needed() {
        let ws = Workspace::find().unwrap();
        let faults = faults::enumerate(&text::bodies(epoxide_gpu::PTX, &KERNELS).unwrap());
        let reasons: Vec<_> = faults.iter().filter_map(|fault| why(&ws, fault)).collect();
        assert!(HARMLESS.iter().all(|harmless| reasons.contains(&harmless.why)));
        assert!(reasons.len() < faults.len() / 4);
    }
}
