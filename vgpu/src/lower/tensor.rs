//! Decoding of `cp.async.bulk.tensor`, and of `tensormap`, which changes and copies tensor maps.

use super::decode::Emit;
use super::matrix::{access, parts_of};
use super::state::{Lower, Lowered};
use super::types::Mods;
use super::wgmma::integer;
use crate::exec::lanes::{op1, op2};
use crate::ir::{
    Addr, BulkOp, FULL, Fence, File, Init, Op, Reduce, SINK, Scope, Space, Special, TensorCopy, WarpOp, Way,
};
use crate::ptx::{Operand, Span};
use crate::tensor_map::{ElementType, Field, MARK_PLACE, MOST_AXES, MOST_DIMENSIONS, address_word};

/// `cp.async.bulk.tensor`, `cp.reduce.async.bulk.tensor` and `cp.async.bulk.prefetch.tensor`, of boxes
/// (`.tile`) and of pixels (`.im2col`, and `.im2col_no_offs` of a store or a reduction).
pub(super) fn copy(m: &mut Mods) -> Result<Emit, String> {
    const DIMENSIONS: [(&str, u8); MOST_DIMENSIONS] = [("1d", 1), ("2d", 2), ("3d", 3), ("4d", 4), ("5d", 5)];
    let Some(rank) = m.one_of(&DIMENSIONS) else { return m.unsupported() };
    let (with_offsets, without) = (m.has("im2col"), m.has("im2col_no_offs"));
    let is_box = m.has("tile") || !(with_offsets || without);
    if rank < 3 && !is_box {
        return m.unsupported();
    }
    let list = usize::from(with_offsets);
    let policy = usize::from(m.has("L2::cache_hint"));
    if m.has("prefetch") {
        if !(m.has("L2") && m.has("global")) || without {
            return m.unsupported();
        }
        return Ok(Box::new(move |l, ops| {
            let n = 1 + list + policy;
            l.count(ops, n..=n)?;
            let (map, coordinates) = place(l, rank, &ops[0])?;
            let shared = Addr { slot: SINK, wide: false, offset: 0 };
            let offsets = if with_offsets { Some(offsets(l, rank, &ops[1])?) } else { None };
            let way = Way::Prefetch;
            push(l, TensorCopy { way, map, rank, coordinates, shared, blocks: SINK, offsets });
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
    let reduce = m.has("reduce").then(|| m.one_of(&Reduce::NAMES));
    if reduce == Some(None) {
        return m.unsupported();
    }
    let reduce = reduce.flatten();
    match (spaces.as_slice(), on_mbarrier, in_group) {
        (["shared::cluster" | "shared::cta", "global"], true, false) if !without && reduce.is_none() => {
            Ok(Box::new(move |l, ops| {
                let n = 3 + list + multicast + policy;
                l.count(ops, n..=n)?;
                let shared = l.address(&ops[0])?;
                let (map, coordinates) = place(l, rank, &ops[1])?;
                let way = Way::Load(l.address(&ops[2])?);
                let offsets = if with_offsets { Some(offsets(l, rank, &ops[3])?) } else { None };
                let blocks = if multicast == 1 { l.source(&ops[3 + list], File::R32, 16)? } else { SINK };
                push(l, TensorCopy { way, map, rank, coordinates, shared, blocks, offsets });
                Ok(())
            }))
        }
        (["global", "shared::cta"], false, true) if multicast == 0 && !with_offsets => {
            Ok(Box::new(move |l, ops| {
                l.count(ops, 2 + policy..=2 + policy)?;
                let (map, coordinates) = place(l, rank, &ops[0])?;
                let shared = l.address(&ops[1])?;
                let offsets = without.then_some([SINK; MOST_AXES]);
                let way = reduce.map_or(Way::Store, Way::Reduce);
                push(l, TensorCopy { way, map, rank, coordinates, shared, blocks: SINK, offsets });
                Ok(())
            }))
        }
        _ => m.unsupported(),
    }
}

fn push(l: &mut Lower, copy: TensorCopy) {
    l.operands.tensor_copies.push(copy);
    l.push(Op::Bulk(BulkOp::Tensor { copy: l.operands.tensor_copies.len() as u32 - 1 }));
}

/// `{w, h}`: the offsets of pixels, of 16 bits.
fn offsets(l: &mut Lower, rank: u8, op: &(Operand, Span)) -> Lowered<[u32; MOST_AXES]> {
    let mut slots = [SINK; MOST_AXES];
    for (slot, part) in slots.iter_mut().zip(parts_of(op, usize::from(rank) - 2)?) {
        *slot = l.source(&part, File::R32, 16)?;
    }
    Ok(slots)
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

/// `tensormap.replace` and `tensormap.cp_fenceproxy`.
pub(super) fn map(m: &mut Mods) -> Result<Emit, String> {
    if m.has("cp_fenceproxy") {
        return copy_map(m);
    }
    if !(m.has("replace") && m.has("tile") && m.has("b1024")) {
        return m.unsupported();
    }
    const SPACES: [(&str, Space); 2] = [("global", Space::Global), ("shared::cta", Space::Shared)];
    let space = m.one_of(&SPACES).unwrap_or(Space::Generic);
    type OfDimension = fn(u8) -> Field;
    let by_dimension: [(&str, OfDimension); 4] = [
        ("box_dim", Field::Tile),
        ("global_dim", Field::Length),
        ("global_stride", Field::Stride),
        ("element_stride", Field::ElementStride),
    ];
    // No field: a value that every map here has, no interleaving, units of 16 bytes.
    type OfValue = fn(i64) -> Option<Vec<(Field, u64)>>;
    let fixed: [(&str, OfValue); 5] = [
        ("elemtype", |value| {
            let element = element_type(value)?;
            let rounds = element.rounds().then_some((Field::Rounds, 1));
            Some([(Field::Element, element.byte())].into_iter().chain(rounds).collect())
        }),
        ("swizzle_mode", |value| (value < 4).then(|| vec![(Field::Swizzle, value as u64)])),
        ("interleave_layout", |value| (value == 0).then(Vec::new)),
        ("fill_mode", |value| (value < 2).then(|| vec![(Field::Fill, value as u64)])),
        ("swizzle_atomicity", |value| (value == 0).then(Vec::new)),
    ];
    if let Some(of) = m.one_of(&by_dimension) {
        let wide = matches!(of(0), Field::Stride(_));
        if !m.has(if wide { "b64" } else { "b32" }) {
            return m.unsupported();
        }
        return Ok(Box::new(move |l, ops| {
            l.count(ops, 3..=3)?;
            let last = MOST_DIMENSIONS as i64 - if wide { 2 } else { 1 };
            let field = of(integer(l, &ops[1], 0..=last, "ordinal of a dimension")? as u8);
            let map = l.address(&ops[0])?;
            let value = if wide { l.source_of::<u64>(&ops[2])? } else { l.source_of::<u32>(&ops[2])? };
            replace(l, space, map, field, value);
            Ok(())
        }));
    }
    if let Some(of) = m.one_of(&fixed) {
        let name = m.opcode.to_owned();
        if !m.has("b32") {
            return m.unsupported();
        }
        return Ok(Box::new(move |l, ops| {
            l.count(ops, 2..=2)?;
            let value = integer(l, &ops[1], 0..=15, "new value")?;
            let map = l.address(&ops[0])?;
            let Some(fields) = of(value) else {
                return l.error(format!("value {value} of '{name}' is not supported"));
            };
            if fields.is_empty() {
                mark(l, space, map);
            }
            for (field, value) in fields {
                let value = l.constant(File::R32, Init::Bits(value));
                replace(l, space, map, field, value);
            }
            Ok(())
        }));
    }
    let field = m.one_of(&[("global_address", Field::Address), ("rank", Field::Rank)]);
    let Some(field) = field else { return m.unsupported() };
    let wide = field == Field::Address;
    if !m.has(if wide { "b64" } else { "b32" }) {
        return m.unsupported();
    }
    Ok(Box::new(move |l, ops| {
        l.count(ops, 2..=2)?;
        let map = l.address(&ops[0])?;
        let value = if wide { l.source_of::<u64>(&ops[1])? } else { l.source_of::<u32>(&ops[1])? };
        replace(l, space, map, field, value);
        Ok(())
    }))
}

/// The type that an `.elemtype` names.
fn element_type(number: i64) -> Option<ElementType> {
    // Three numbers are not those of the driver API.
    let number = match number {
        8 => 10,
        9 => 8,
        10 => 9,
        number => number,
    };
    ElementType::ALL.get(usize::try_from(number).ok()?).copied()
}

/// Stores `value`, as the instruction has it, in a field of a map.
fn replace(l: &mut Lower, space: Space, map: Addr, field: Field, value: u32) {
    let (offset, bytes) = field.place();
    let wide = bytes == 8;
    // A number that does not fit the field becomes one that a copy rejects.
    let convert = match field {
        Field::Address => Some(op1(address_word)),
        Field::Rank => Some(op1(|rank: u32| rank.saturating_add(1).min(0xff))),
        Field::ElementStride(_) => Some(op1(|stride: u32| stride.min(0xff))),
        Field::Tile(_) => Some(op1(|len: u32| len.min(0xffff))),
        Field::Length(_) => Some(op1(|len: u32| len.wrapping_sub(1))),
        Field::Element | Field::Rounds | Field::Fill | Field::Swizzle | Field::Stride(_) => None,
    };
    let value = match convert {
        None => value,
        Some(convert) => {
            let slot = l.slot(if wide { File::R64 } else { File::R32 });
            l.push_alu(convert.f, [slot, value, 0, 0, 0, 0], convert.sig);
            slot
        }
    };
    mark(l, space, map);
    let map = Addr { offset: map.offset.wrapping_add(offset), ..map };
    l.push(access(false, space, map, bytes, value));
}

/// Marks a map as one: the first fields of a map may be replaced in zeros.
fn mark(l: &mut Lower, space: Space, map: Addr) {
    let (offset, mark) = MARK_PLACE;
    let mark = l.constant(File::R32, Init::Bits(mark));
    l.push(access(false, space, Addr { offset: map.offset.wrapping_add(offset), ..map }, 4, mark));
}

/// `tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.SCOPE.sync.aligned`: each
/// lane copies 4 of the 128 bytes, and the warp meets on both sides.
fn copy_map(m: &mut Mods) -> Result<Emit, String> {
    const SCOPES: [(&str, Scope); 4] =
        [("cta", Scope::Cta), ("cluster", Scope::Cluster), ("gpu", Scope::Gpu), ("sys", Scope::Sys)];
    let whole = m.has("global") & m.has("shared::cta") & m.has("tensormap::generic") & m.has("release");
    let (Some(scope), true, true) = (m.one_of(&SCOPES), whole, m.has("sync") & m.has("aligned")) else {
        return m.unsupported();
    };
    Ok(Box::new(move |l, ops| {
        l.count(ops, 3..=3)?;
        integer(l, &ops[2], 128..=128, "size of a tensor map")?;
        let ends = [l.address(&ops[1])?, l.address(&ops[0])?];
        let lane = l.constant(File::R32, Init::Special(Special::LaneId));
        let mask = l.constant(File::R32, Init::Bits(FULL.into()));
        let [src, dst] = ends.map(|end| {
            let add = if end.wide {
                op2(|at: u64, lane: u32| at.wrapping_add(u64::from(4 * lane)))
            } else {
                op2(|at: u32, lane: u32| at.wrapping_add(4 * lane))
            };
            let slot = l.slot(if end.wide { File::R64 } else { File::R32 });
            l.push_alu(add.f, [slot, end.slot, lane, 0, 0, 0], add.sig);
            Addr { slot, ..end }
        });
        let word = l.slot(File::R32);
        l.push(Op::Warp { op: WarpOp::Sync, mask });
        l.push(access(true, Space::Shared, src, 4, word));
        l.push(access(false, Space::Global, dst, 4, word));
        l.push(Op::Fence(Fence::AcqRel(scope)));
        l.push(Op::Warp { op: WarpOp::Sync, mask });
        Ok(())
    }))
}
