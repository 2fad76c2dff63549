//! Copies of pixels of tensors (`im2col`): loads, multicasts and stores.

use std::rc::Rc;

use super::boxes::{HEAD, ROOM, coordinates, entry, load_by, store_by};
use super::{Case, MapOfCase};
use crate::tensor_maps::{GUARD, Map, Rng};
use crate::tensor_maps_of_pixels::Pixels;

/// Offsets of a load, which lie in the third buffer, in 16-bit registers.
fn offsets(rank: u32) -> (String, String) {
    let registers = &["%h0", "%h2", "%h3"][..rank as usize - 2];
    let loads = registers.iter().enumerate();
    let loads = loads.map(|(i, register)| format!("ld.global.u16 {register}, [%rd4+{}];\n", 2 * i));
    (loads.collect(), registers.join(", "))
}

/// A load by an instruction `tensor` of a copy, behind a prefetch.
fn load(rank: u32, modifiers: &str, operand: &str) -> String {
    let (at, (loads, offsets)) = (coordinates(rank), offsets(rank));
    load_by(
        &format!(
            "{loads}@!%p4 cp.async.bulk.prefetch.tensor.{rank}d.L2.global.im2col [%rd1, {{{at}}}], {{{offsets}}};
@!%p4 cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes{modifiers} [%r1], [%rd1, {{{at}}}], [%r2], {{{offsets}}}{operand};"
        ),
        operand.is_empty(),
    )
}

fn store(rank: u32) -> String {
    store_by(&format!(
        "cp.async.bulk.tensor.{rank}d.global.shared::cta.im2col_no_offs.bulk_group [%rd1, {{{}}}], [%r1];",
        coordinates(rank)
    ))
}

/// A copy of pixels: the tensor with the bytes around it, and the buffer.
#[derive(Clone)]
struct Copy {
    map: Pixels,
    tensor: Vec<u8>,
    buffer: Vec<u8>,
    /// C, W, H, D and N.
    place: [i32; 5],
    offsets: [u16; 3],
    /// The begin of the pixels in shared memory.
    offset: u32,
}

impl Copy {
    fn of(map: Pixels, place: [i32; 5], offsets: [u16; 3], rng: &mut Rng) -> Copy {
        let tensor = rng.bytes(map.map.offset as usize + map.map.tensor_bytes() + GUARD);
        Copy { tensor, buffer: rng.bytes(ROOM + 8), place, offsets, offset: 0, map }
    }

    /// A copy that begins in the box of its image.
    fn random(rng: &mut Rng) -> Copy {
        let map = Pixels::random(rng);
        Copy::random_of(map, rng)
    }

    /// The same of this map.
    fn random_of(map: Pixels, rng: &mut Rng) -> Copy {
        let axes = map.axes();
        let mut place = [0; 5];
        let unit = 16 / map.map.bytes() as i64;
        place[0] = (unit * rng.from(0, (map.map.shape[0] as i64 - 1) / unit)) as i32;
        for axis in 0..axes {
            let last = map.map.shape[axis + 1] as i64 - 1 + i64::from(map.upper[axis]);
            place[axis + 1] = rng.from(map.lower[axis].into(), last) as i32;
        }
        place[axes + 1] = rng.from(0, map.map.shape[axes + 1] as i64 - 1) as i32;
        let offsets = std::array::from_fn(|_| rng.from(0, 3) as u16);
        Copy::of(map, place, offsets, rng)
    }

    fn case(self, name: String, (ptx, kernel): (&Rc<str>, String), [blocks, mask]: [u32; 2]) -> Case {
        let Copy { map, tensor, buffer, place, offsets, offset } = self;
        let bytes = map.pixels * map.map.tile[0] * map.map.bytes() as u32;
        let words = [bytes, offset, mask].into_iter().chain(place.map(|at| at as u32)).collect();
        let mut third: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
        third.resize(128, 0);
        let result = (usize::from(!name.starts_with("store")), 0);
        Case {
            name,
            ptx: Rc::clone(ptx),
            kernel,
            shape: [blocks, 32],
            buffers: vec![tensor, buffer.repeat(blocks as usize), third],
            map: Some(MapOfCase::OfPixels(map)),
            words,
            result,
        }
    }
}

struct Both<'a> {
    cases: &'a mut Vec<Case>,
    ptx: Rc<str>,
    rng: Rng,
}

impl Both<'_> {
    fn load(&mut self, name: &str, copy: Copy) {
        let kernel = format!("load{}", copy.map.map.rank);
        self.cases.push(copy.case(format!("load of pixels {name}"), (&self.ptx, kernel), [1, 1]));
    }

    fn store(&mut self, name: &str, copy: Copy) {
        let kernel = format!("store{}", copy.map.map.rank);
        self.cases.push(copy.case(format!("store of pixels {name}"), (&self.ptx, kernel), [1, 1]));
    }

    /// A load, and a store, of pixels of a map that `set` changes.
    fn each(&mut self, name: &str, rank: u32, place: [i32; 5], offsets: [u16; 3], set: &dyn Fn(&mut Pixels)) {
        let mut map = Pixels::plain(rank);
        set(&mut map);
        map.lay_out();
        let copy = Copy::of(map, place, offsets, &mut self.rng);
        self.load(name, copy.clone());
        if offsets == [0; 3] {
            self.store(name, copy);
        }
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = vec![];
    let kernels = (3..=5).flat_map(|rank| {
        [
            entry(&format!("load{rank}"), "", &load(rank, "", "")),
            entry(&format!("store{rank}"), "", &store(rank)),
        ]
    });
    let ptx: Rc<str> = (HEAD.to_owned() + &kernels.collect::<String>()).into();
    let mut both = Both { cases: &mut cases, ptx, rng: Rng(18) };
    plain(&mut both);
    formats(&mut both);
    for group in 0..30 {
        for _ in 0..8 {
            let copy = Copy::random(&mut both.rng);
            both.load(&format!("random {group}"), copy);
        }
    }
    for group in 0..7 {
        for _ in 0..8 {
            let copy = Copy::random(&mut both.rng);
            // A store begins inside of the tensor. Most have pixels outside.
            let place = copy.place.map(|at| at.max(0));
            both.store(&format!("random {group}"), Copy { place, ..copy });
        }
    }
    multicast(both.cases);
    of_another_kind(both.cases);
    outside(&mut both);
    inside(&mut both);
    cases
}

/// Stores of which no pixel is outside of an image.
fn inside(both: &mut Both) {
    for group in 0..12 {
        for _ in 0..8 {
            let mut map = Pixels::random(&mut both.rng);
            for axis in 0..map.axes() {
                let length = map.map.shape[axis + 1] as i32;
                map.lower[axis] = map.lower[axis].max(0);
                map.upper[axis] = map.upper[axis].min(0).max(map.lower[axis] - (length - 1));
            }
            let copy = Copy::random_of(map, &mut both.rng);
            both.store(&format!("inside {group}"), copy);
        }
    }
    // The box reaches beyond the image, but its two pixels do not.
    for rank in 3..=5 {
        for axis in 0..rank as usize - 2 {
            for (lower, upper) in [(-1, 0), (0, 1), (-1, 1)] {
                let mut map = Pixels::plain(rank);
                (map.lower[axis], map.upper[axis], map.pixels) = (lower, upper, 2);
                let place = std::array::from_fn(|d| (1..=rank as usize - 2).contains(&d).into());
                let copy = Copy::of(map, place, [0; 3], &mut both.rng);
                both.store(&format!("rank {rank} of a large box"), copy);
            }
        }
    }
}

/// Places and offsets, in the box and outside, by maps of f32.
fn plain(both: &mut Both) {
    for rank in 3..=5 {
        let axes = rank as usize - 2;
        let name = |what: &str| format!("rank {rank} {what}");
        let at = |set: &dyn Fn(&mut [i32; 5])| {
            let mut place = [0; 5];
            set(&mut place);
            place
        };
        // From the first pixel, from within, up to the end of the last image and beyond.
        both.each(&name("first"), rank, [0; 5], [0; 3], &|_| {});
        both.each(&name("within"), rank, at(&|place| place[1..=axes].fill(2)), [0; 3], &|_| {});
        both.each(&name("last"), rank, at(&|place| place[axes + 1] = 2), [0; 3], &|_| {});
        both.each(&name("channels"), rank, at(&|place| place[0] = 16), [0; 3], &|_| {});
        both.each(&name("all"), rank, [0; 5], [0; 3], &|map| map.pixels = 360);
        // Boxes that are smaller and larger than the image, with offsets.
        for (lower, upper) in [(1, -1), (-1, 1), (-2, -1), (1, 2)] {
            for offsets in [[0; 3], [1, 2, 1], [3, 0, 2]] {
                both.each(
                    &name("corners"),
                    rank,
                    at(&|place| place[1..=axes].fill(lower)),
                    offsets,
                    &|map| {
                        (map.lower, map.upper) = ([lower; 3], [upper; 3]);
                        map.pixels = 40;
                    },
                );
            }
        }
        // The corners of each dimension, and their order.
        for axis in 0..axes {
            both.each(&name("one corner"), rank, [0; 5], [0; 3], &|map| map.upper[axis] = -2);
            both.each(&name("one corner"), rank, at(&|place| place[axis + 1] = 1), [0; 3], &|map| {
                map.lower[axis] = 1;
            });
            both.each(
                &name("one offset"),
                rank,
                [0; 5],
                std::array::from_fn(|i| (i == axis).into()),
                &|_| {},
            );
        }
        // Steps, from places that are their multiples or not.
        for d in 0..=axes + 1 {
            for step in [2, 3] {
                both.each(&name(&format!("step {d}")), rank, [0; 5], [0; 3], &|map| map.map.steps[d] = step);
                let from = at(&|place| place[1..=axes].fill(1));
                both.each(&name(&format!("step {d}")), rank, from, [1; 3], &|map| map.map.steps[d] = step);
                both.each(&name(&format!("step {d}")), rank, from, [0; 3], &|map| {
                    map.map.steps[d] = step;
                    (map.lower, map.upper) = ([-1; 3], [1; 3]);
                });
            }
        }
    }
}

/// Places outside of the box, of which many are faults.
fn outside(both: &mut Both) {
    for rank in 3..=5 {
        let axes = rank as usize - 2;
        let name = |what: &str| format!("rank {rank} {what}");
        let at = |d: usize, by: i32| std::array::from_fn(|i| if i == d { by } else { 0 });
        for d in 0..=axes + 1 {
            let end = Pixels::plain(rank).map.shape[d] as i32 - 1;
            for by in [1, 100] {
                let (before, behind) = if d == 0 { (-4 * by, 20 + 4 * by) } else { (-by, end + by) };
                for place in [before, behind] {
                    let copy = Copy::of(Pixels::plain(rank), at(d, place), [0; 3], &mut both.rng);
                    both.load(&name(&format!("outside {d}")), copy);
                }
            }
            // The box is smaller, so that the place is in the tensor.
            for place in [1, end] {
                let mut map = Pixels::plain(rank);
                (map.lower, map.upper) = ([2; 3], [-1; 3]);
                let place = if d == 0 { place & !3 } else { place };
                let copy = Copy::of(map, at(d, place), [0; 3], &mut both.rng);
                both.load(&name(&format!("outside of a small box {d}")), copy.clone());
                both.store(&name(&format!("outside of a small box {d}")), copy);
            }
        }
        // Offsets at the bounds of their fields.
        for offset in [7, 15, 16, 31, 32, 127, 128, 255, 256, 0x7fff, 0x8000, 0xffff] {
            let mut map = Pixels::plain(rank);
            map.lower = [[0, -5, -14][rank as usize - 3]; 3];
            let place = std::array::from_fn(|d| if (1..=axes).contains(&d) { map.lower[0] } else { 0 });
            let last = std::array::from_fn(|axis| if axis == axes - 1 { offset } else { 0 });
            for offsets in [last, [offset, 0, 0]] {
                let copy = Copy::of(map.clone(), place, offsets, &mut both.rng);
                both.load(&name("far offset"), copy);
            }
        }
        for d in 0..=axes + 1 {
            let end = Pixels::plain(rank).map.shape[d] as i32 - 1;
            for place in if d == 0 { [-4, 24] } else { [-1, end + 1] } {
                let copy = Copy::of(Pixels::plain(rank), at(d, place), [0; 3], &mut both.rng);
                both.store(&name(&format!("outside {d}")), copy);
            }
        }
    }
    // Channels that are no multiple of 16 bytes, and addresses in shared memory.
    for first in [1, 2, -2] {
        let copy = Copy::of(Pixels::plain(4), [first, 0, 0, 0, 0], [0; 3], &mut both.rng);
        both.load("unaligned", copy.clone());
        both.store("unaligned", copy);
    }
    for offset in [128, 256, 64, 16] {
        let copy = Copy::of(Pixels::plain(4), [0; 5], [0; 3], &mut both.rng);
        both.load(&format!("to {offset}"), Copy { offset, ..copy.clone() });
        both.store(&format!("from {offset}"), Copy { offset, ..copy });
    }
}

/// Types, swizzles and fills.
fn formats(both: &mut Both) {
    for data_type in 0..=12 {
        both.each(&format!("type {data_type}"), 4, [0, 1, 1, 0, 0], [0; 3], &|map| {
            map.map.data_type = data_type;
            map.map.tile[0] = 32 / map.map.bytes() as u32;
            map.map.shape[0] = 80 / map.map.bytes() as u64 + 1;
            (map.lower, map.upper) = ([-1; 3], [1; 3]);
        });
    }
    for data_type in 6..=12 {
        both.each(&format!("NaN of type {data_type}"), 4, [0, -1, -1, 0, 0], [1, 0, 0], &|map| {
            (map.map.data_type, map.map.fill) = (data_type, 1);
            map.map.tile[0] = 32 / map.map.bytes() as u32;
            map.map.shape[0] = 80 / map.map.bytes() as u64 + 1;
            (map.lower, map.upper) = ([-1; 3], [1; 3]);
        });
    }
    for swizzle in 1..=3 {
        for channels in (4..=4 << swizzle).step_by(4) {
            both.each(&format!("swizzle {swizzle}"), 4, [4, 1, 1, 0, 0], [0; 3], &|map| {
                (map.map.swizzle, map.map.tile[0]) = (swizzle, channels);
            });
        }
    }
    for (channels, pixels) in [(4, 1), (4, 3), (4, 768), (256, 1), (256, 11), (12, 7), (20, 33)] {
        both.each(&format!("{pixels} pixels of {channels}"), 4, [0; 5], [0; 3], &|map| {
            (map.map.tile[0], map.pixels) = (channels, pixels);
        });
    }
}

/// Pixels that go to some blocks of a cluster of four.
fn multicast(cases: &mut Vec<Case>) {
    let kernels = (3..=5).map(|rank| {
        entry(&format!("load{rank}"), ".reqnctapercluster 4", &load(rank, ".multicast::cluster", ", %h1"))
    });
    let ptx: Rc<str> = (HEAD.to_owned() + &kernels.collect::<String>()).into();
    let mut rng = Rng(19);
    for mask in 1..16 {
        let copy = Copy::random(&mut rng);
        let kernel = format!("load{}", copy.map.map.rank);
        cases.push(copy.case(format!("multicast of pixels {mask}"), (&ptx, kernel), [4, mask]));
    }
}

/// Copies of pixels by maps of boxes, of boxes by maps of pixels, and by maps of another rank.
fn of_another_kind(cases: &mut Vec<Case>) {
    let (at, (loads, offsets)) = (coordinates(4), offsets(4));
    let body = |modes: [&str; 2]| {
        let [load_mode, store_mode] = modes;
        let offsets = if load_mode == "im2col" { format!(", {{{offsets}}}") } else { String::new() };
        [
            load_by(
                &format!(
                    "{loads}@!%p4 cp.async.bulk.tensor.4d.shared::cluster.global.{load_mode}.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{at}}}], [%r2]{offsets};"
                ),
                true,
            ),
            store_by(&format!(
                "cp.async.bulk.tensor.4d.global.shared::cta.{store_mode}.bulk_group [%rd1, {{{at}}}], [%r1];"
            )),
        ]
    };
    let [load_box, store_box] = body(["tile", "tile"]);
    let [load_pixels, store_pixels] = body(["im2col", "im2col_no_offs"]);
    let kernels = [
        entry("load_box", "", &load_box),
        entry("store_box", "", &store_box),
        entry("load_pixels", "", &load_pixels),
        entry("store_pixels", "", &store_pixels),
    ];
    let ptx: Rc<str> = (HEAD.to_owned() + &kernels.concat()).into();
    let mut rng = Rng(20);
    for rank in [3, 4, 5] {
        for kind in ["load", "store"] {
            // The instruction's mode is that of the map only where the rank differs.
            let copy = Copy::of(Pixels::plain(rank), [0, 1, 1, 0, 0], [0; 3], &mut rng);
            let (kernel, name) = match rank {
                4 => ("box", format!("{kind} of a box by a map of pixels")),
                _ => ("pixels", format!("{kind} of pixels by a map of rank {rank}")),
            };
            cases.push(copy.case(name, (&ptx, format!("{kind}_{kernel}")), [1, 1]));
        }
    }
    for kind in ["load", "store"] {
        let mut map = Map { rank: 4, offset: GUARD as u64, shape: [20, 6, 5, 3, 1, 1], ..Map::simple() };
        map.tile = [8, 2, 2, 2, 1, 1];
        map.lay_out();
        let pixels = Pixels { map: map.clone(), pixels: 8, ..Pixels::plain(4) };
        let copy = Copy::of(pixels, [0, 1, 1, 0, 0], [0; 3], &mut rng);
        let name = format!("{kind} of pixels by a map of boxes");
        let case = copy.case(name, (&ptx, format!("{kind}_pixels")), [1, 1]);
        cases.push(Case { map: Some(MapOfCase::OfBuffer(map)), ..case });
    }
}
