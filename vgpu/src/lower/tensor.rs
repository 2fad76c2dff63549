//! Decoding of `cp.async.bulk.tensor`.

use super::decode::Emit;
use super::state::{Lower, Lowered};
use super::types::Mods;
use crate::ir::{Addr, BulkOp, Op, SINK, TensorCopy, Way};
use crate::ptx::{Operand, Span};
use crate::tensor_map::MOST_DIMENSIONS;

/// `cp.async.bulk.tensor` and `cp.async.bulk.prefetch.tensor` of tiles.
pub(super) fn copy(m: &mut Mods) -> Result<Emit, String> {
    const DIMENSIONS: [(&str, u8); MOST_DIMENSIONS] = [("1d", 1), ("2d", 2), ("3d", 3), ("4d", 4), ("5d", 5)];
    let Some(rank) = m.one_of(&DIMENSIONS) else { return m.unsupported() };
    m.has("tile");
    let policy = usize::from(m.has("L2::cache_hint"));
    if m.has("prefetch") {
        if !(m.has("L2") && m.has("global")) {
            return m.unsupported();
        }
        return Ok(Box::new(move |l, ops| {
            l.count(ops, 1 + policy..=1 + policy)?;
            let (map, coordinates) = place(l, rank, &ops[0])?;
            let nowhere = Addr { slot: SINK, wide: false, offset: 0 };
            push(l, TensorCopy { way: Way::Prefetch, map, rank, coordinates, shared: nowhere, blocks: SINK });
            Ok(())
        }));
    }
    // Destination and source space, in this order.
    let spaces: Vec<&str> =
        m.names().filter(|n| matches!(*n, "global" | "shared::cta" | "shared::cluster")).collect();
    m.ignore(&spaces);
    let on_mbarrier = m.has("mbarrier::complete_tx::bytes");
    let in_group = m.has("bulk_group");
    let multicast = usize::from(m.has("multicast::cluster"));
    match (spaces.as_slice(), on_mbarrier, in_group) {
        (["shared::cluster" | "shared::cta", "global"], true, false) => Ok(Box::new(move |l, ops| {
            let n = 3 + multicast + policy;
            l.count(ops, n..=n)?;
            let shared = l.address(&ops[0])?;
            let (map, coordinates) = place(l, rank, &ops[1])?;
            let way = Way::Load(l.address(&ops[2])?);
            let blocks = if multicast == 1 { l.source(&ops[3], crate::ir::File::R32, 16)? } else { SINK };
            push(l, TensorCopy { way, map, rank, coordinates, shared, blocks });
            Ok(())
        })),
        (["global", "shared::cta"], false, true) if multicast == 0 => Ok(Box::new(move |l, ops| {
            l.count(ops, 2 + policy..=2 + policy)?;
            let (map, coordinates) = place(l, rank, &ops[0])?;
            let shared = l.address(&ops[1])?;
            push(l, TensorCopy { way: Way::Store, map, rank, coordinates, shared, blocks: SINK });
            Ok(())
        })),
        _ => m.unsupported(),
    }
}

fn push(l: &mut Lower, copy: TensorCopy) {
    l.operands.tensor_copies.push(copy);
    l.push(Op::Bulk(BulkOp::Tensor { copy: l.operands.tensor_copies.len() as u32 - 1 }));
}

/// `[map, {x, y}]`: the address of the map, and the coordinates.
fn place(l: &mut Lower, rank: u8, op: &(Operand, Span)) -> Lowered<(Addr, [u32; MOST_DIMENSIONS])> {
    let Operand::Tensor { map, coordinates } = &op.0 else {
        return Err((op.1, "a tensor map with coordinates is needed here".into()));
    };
    if coordinates.len() != usize::from(rank) {
        return Err((op.1, format!("{} coordinates given, {rank} expected", coordinates.len())));
    }
    let mut slots = [SINK; MOST_DIMENSIONS];
    for (slot, coordinate) in slots.iter_mut().zip(coordinates) {
        *slot = l.source_of::<u32>(&(coordinate.clone(), op.1))?;
    }
    Ok((l.address(&(Operand::clone(map), op.1))?, slots))
}
