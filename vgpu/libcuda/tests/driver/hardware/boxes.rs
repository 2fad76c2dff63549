//! Copies of boxes of tensors: loads, stores, multicasts, and loads by maps that a kernel makes.

use std::rc::Rc;

use super::{Case, MapOfCase};
use crate::tensor_maps::{GUARD, Map, Rng};

/// Bytes of shared memory that a kernel fills and gives back.
pub const ROOM: usize = 12 << 10;

pub const HEAD: &str = ".version 8.6\n.target sm_90a\n.address_size 64\n";

/// A kernel of the module: `%rd1` is the tensor map, `%rd2` the tensor, `%rd3` the buffer, `%rd4` the
/// buffer of a map, `%r1` the box at its offset, `%r2` an mbarrier, `%r3` the bytes of the box,
/// `%r4` the lane.
pub fn entry(name: &str, directives: &str, body: &str) -> String {
    let loads: String = (0..5).map(|d| format!("ld.param.u32 %c{d}, [c{d}];\n")).collect();
    format!(
        ".visible .entry {name}(.param .u64 tensor, .param .u64 buf, .param .u64 made,
    .param .align 64 .b8 map[128], .param .u32 bytes, .param .u32 at, .param .u32 mask, .param .u32 c0,
    .param .u32 c1, .param .u32 c2, .param .u32 c3, .param .u32 c4) {directives}
{{
.reg .pred %p<8>; .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b32 %c<5>; .reg .b64 %rd<16>;
.shared .align 1024 .b8 BOX[{ROOM}];
.shared .align 128 .b8 MAP[128];
.shared .align 8 .b8 BARRIER[8];
ld.param.u64 %rd2, [tensor]; ld.param.u64 %rd3, [buf]; ld.param.u64 %rd4, [made];
ld.param.u32 %r3, [bytes]; ld.param.u32 %r7, [at];
mov.b64 %rd1, map; cvta.param.u64 %rd1, %rd1;
{loads}mov.u32 %r14, BOX; add.u32 %r1, %r14, %r7; mov.u32 %r2, BARRIER; mov.u32 %r4, %tid.x;
shl.b32 %r5, %r4, 3;
{body}
ret;
}}
"
    )
}

/// Moves all of the box's memory: `step` has it at `%r6`, and its place in the buffer in `%rd6`.
fn for_each_word(label: &str, step: &str) -> String {
    format!(
        "mov.u32 %r8, %r5;
{label}: add.u32 %r6, %r14, %r8; cvt.u64.u32 %rd6, %r8; add.u64 %rd6, %rd3, %rd6; {step}
add.u32 %r8, %r8, 256; setp.lt.u32 %p1, %r8, {ROOM}; @%p1 bra {label};\n"
    )
}

pub fn coordinates(rank: u32) -> String {
    (0..rank).map(|d| format!("%c{d}")).collect::<Vec<_>>().join(", ")
}

/// A load that waits for its mbarrier, at most for a while, and stores whether the box has come. One of
/// rank 0 is of bytes, from `%c0` on.
fn load(rank: u32, modifiers: &str, operand: &str) -> String {
    let at = coordinates(rank);
    let instructions = if rank == 0 {
        "cvt.u64.u32 %rd8, %c0; add.u64 %rd2, %rd2, %rd8;
@!%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd2], %r3, [%r2];"
            .to_owned()
    } else {
        format!(
            "@!%p4 cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [%rd1, {{{at}}}];
@!%p4 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{modifiers} [%r1], [%rd1, {{{at}}}], [%r2]{operand};"
        )
    };
    load_by(&instructions, operand.is_empty())
}

/// The same by instructions of the lane for which `%p4` is false, in a block `alone` or in a cluster.
pub fn load_by(instructions: &str, alone: bool) -> String {
    let poison = for_each_word("FILL", "st.shared.u64 [%r6], 0xa5a5a5a5a5a5a5a5;");
    let copy = for_each_word("COPY", "ld.shared.u64 %rd7, [%r6]; st.global.u64 [%rd6], %rd7;");
    // All blocks of a cluster meet: before the copy, and before one ends.
    let meet = match alone {
        true => "bar.sync 0;",
        false => "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
    };
    format!(
        "{poison}setp.ne.u32 %p3, %r4, 0; mov.u32 %r9, 0; ld.param.u32 %r10, [mask]; cvt.u16.u32 %h1, %r10;
mov.u32 %r11, %ctaid.x; shl.b32 %r12, 1, %r11;
@%p3 bra INIT;
mbarrier.init.shared.b64 [%r2], 1;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r3;
INIT: fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; {meet}
setp.ne.or.u32 %p4, %r11, 0, %p3;
{instructions}
bar.sync 0;
and.b32 %r12, %r12, %r10; setp.eq.u32 %p5, %r12, 0; @%p5 bra GOT;
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
add.u32 %r9, %r9, 1; setp.gt.u32 %p6, %r9, 500; or.pred %p6, %p6, %p2; @!%p6 bra WAIT;
selp.u32 %r10, 1, 2, %p2;
GOT: bar.warp.sync 0xffffffff;
mul.lo.u32 %r11, %r11, {stride}; cvt.u64.u32 %rd8, %r11; add.u64 %rd3, %rd3, %rd8;
{copy}@%p3 bra END; st.global.u32 [%rd3+{ROOM}], %r10;
END: {meet}",
        stride = ROOM + 8,
    )
}

/// A prefetch alone, which leaves a mark.
const PREFETCH: &str = "setp.ne.u32 %p3, %r4, 0; @%p3 bra END;
cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%c0, %c1}]; st.global.u32 [%rd3], 7;
END:";

fn store(rank: u32) -> String {
    let instruction = if rank == 0 {
        "cvt.u64.u32 %rd8, %c0; add.u64 %rd2, %rd2, %rd8;
cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], %r3;"
            .to_owned()
    } else {
        format!(
            "cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%rd1, {{{}}}], [%r1];",
            coordinates(rank)
        )
    };
    store_by(&instruction)
}

/// A store of the box by one lane, with this instruction.
pub fn store_by(instruction: &str) -> String {
    let fill = for_each_word("FILL", "ld.global.u64 %rd7, [%rd6]; st.shared.u64 [%r6], %rd7;");
    format!(
        "{fill}fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p3, %r4, 0; @%p3 bra END;
{instruction}
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END:"
    )
}

impl Map {
    /// A small map of a tensor with `rank` dimensions of which boxes are parts.
    fn plain(rank: u32) -> Map {
        let mut map = Map { rank, offset: GUARD as u64, shape: [20, 6, 5, 4, 3, 1], ..Map::simple() };
        map.tile = [8, 3, 2, 2, 2, 1];
        map.lay_out();
        map
    }

    /// Strides of dimensions that lie behind one another.
    pub fn lay_out(&mut self) {
        let mut length = self.shape[0] * self.bytes() as u64;
        for d in 1..self.rank as usize {
            self.strides[d - 1] = length.next_multiple_of(16);
            length = self.strides[d - 1] * self.shape[d];
        }
    }

    pub fn tensor_bytes(&self) -> usize {
        match self.rank as usize {
            1 => self.shape[0] as usize * self.bytes(),
            rank => (self.strides[rank - 2] * self.shape[rank - 1]) as usize,
        }
    }

    /// Bytes of the box in shared memory.
    fn box_bytes(&self) -> u32 {
        let rows = (1..self.rank as usize).map(|d| self.tile[d].div_ceil(self.steps[d]));
        rows.product::<u32>() * self.tile[0] * self.bytes() as u32
    }

    /// Coordinates of a box that is in the tensor, in part or not. The innermost one is a multiple of
    /// 16 bytes.
    fn place(&self, rng: &mut Rng) -> [i32; 5] {
        let mut place: [i32; 5] = std::array::from_fn(|d| match rng.from(0, 40) {
            _ if d >= self.rank as usize => 0,
            0 => rng.of(&[i32::MIN, i32::MAX, 1 << 20, -(1 << 20)]),
            _ => rng.from(-i64::from(self.tile[d]), self.shape[d] as i64) as i32,
        });
        place[0] &= !(16 / self.bytes() as i32 - 1);
        place
    }
}

/// A copy of a box: the tensor with the bytes around it, and the buffer.
struct Copy {
    map: Map,
    tensor: Vec<u8>,
    buffer: Vec<u8>,
    place: [i32; 5],
    /// The begin of the box in shared memory.
    offset: u32,
}

impl Copy {
    fn random(rng: &mut Rng) -> Copy {
        let map = Map::random(rng);
        let most = (ROOM as u32 - map.box_bytes()) / 128;
        let place = map.place(rng);
        Copy { offset: 128 * rng.from(0, most.into()) as u32, ..Copy::of(map, place, rng) }
    }

    fn of(map: Map, place: [i32; 5], rng: &mut Rng) -> Copy {
        let tensor = rng.bytes(map.offset as usize + map.tensor_bytes() + GUARD);
        Copy { tensor, buffer: rng.bytes(ROOM + 8), place, offset: 0, map }
    }

    /// A case of a load, or of a store. The kernel gets the map `template` if it makes one.
    fn case(
        self,
        name: String,
        (ptx, kernel): (&Rc<str>, String),
        [blocks, mask]: [u32; 2],
        template: Option<Map>,
    ) -> Case {
        let Copy { map, tensor, buffer, place, offset } = self;
        let words = [map.box_bytes(), offset, mask].into_iter().chain(place.map(|at| at as u32)).collect();
        let buffer = buffer.repeat(blocks as usize);
        let result = (usize::from(!name.starts_with("store")), 0);
        Case {
            name,
            ptx: Rc::clone(ptx),
            kernel,
            shape: [blocks, 32],
            buffers: vec![tensor, buffer, vec![0; 128]],
            map: Some(template.map_or(MapOfCase::OfBuffer(map), MapOfCase::Template)),
            words,
            result,
        }
    }
}

/// Loads and stores.
struct Both<'a> {
    cases: &'a mut Vec<Case>,
    ptx: Rc<str>,
}

impl<'a> Both<'a> {
    fn new(cases: &'a mut Vec<Case>) -> Self {
        let kernels = (1..=5).flat_map(|rank| {
            [
                entry(&format!("load{rank}"), "", &load(rank, "", "")),
                entry(&format!("store{rank}"), "", &store(rank)),
            ]
        });
        let kernels = kernels.chain([
            entry("load", "", &load(0, "", "")),
            entry("store", "", &store(0)),
            entry("prefetch2", "", PREFETCH),
            entry("made2", "", &format!("mov.u64 %rd1, %rd4;\n{}", load(2, "", ""))),
        ]);
        Both { cases, ptx: (HEAD.to_owned() + &kernels.collect::<String>()).into() }
    }

    fn add(&mut self, kernel: &str, name: &str, copy: Copy) {
        let name = [kernel.trim_end_matches(|c: char| c.is_ascii_digit()), name].join(" ");
        self.cases.push(copy.case(name, (&self.ptx, kernel.to_owned()), [1, 1], None));
    }

    fn load(&mut self, name: &str, copy: Copy) {
        self.add(&format!("load{}", copy.map.rank), name, copy);
    }

    fn store(&mut self, name: &str, copy: Copy) {
        self.add(&format!("store{}", copy.map.rank), name, copy);
    }

    /// Loads of boxes, then stores of them, each inside of the tensor and across its bounds.
    fn each(&mut self, name: &str, maps: &[Map], rng: &mut Rng) {
        for add in [Self::load, Self::store] {
            for map in maps {
                let unit = 16 / map.bytes() as i32;
                let last = (map.shape[0] as i32 - 1) / unit * unit;
                let end: [i32; 5] = std::array::from_fn(|d| map.shape[d] as i32 - 1);
                for place in [[unit, 1, 1, 1, 1], [last, end[1], end[2], end[3], end[4]]] {
                    add(self, name, Copy::of(map.clone(), place, rng));
                }
            }
        }
        for map in maps {
            let unit = 16 / map.bytes() as i32;
            self.load(name, Copy::of(map.clone(), [-unit, -1, -1, -1, -1], rng));
        }
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = vec![];
    copies(&mut cases);
    multicast(&mut cases);
    replaced(&mut cases);
    retyped(&mut cases);
    bare(&mut cases);
    cases
}

/// The bits of a number that may be an infinity, a NaN or subnormal, or near the half of two of tf32.
fn special(rng: &mut Rng) -> u32 {
    let exponent = rng.of(&[0, 0, 0, 1, 2, 127, 253, 254, 255, 255]);
    let low = rng.of(&[0, 1, 0xfff, 0x1000, 0x1001, 0x1fff]);
    let high = rng.of(&[0, 0, 1, 2, 3, 0x3fe, 0x3ff]);
    (rng.next() as u32 & 1) << 31 | exponent << 23 | high << 13 | low
}

/// Boxes that are loaded and stored, of every rank.
fn copies(cases: &mut Vec<Case>) {
    let (mut both, mut rng) = (Both::new(cases), Rng(2));
    for rank in 1..=5 {
        both.each(&format!("rank {rank}"), &[Map::plain(rank)], &mut rng);
    }
    let plain = |set: &dyn Fn(&mut Map)| {
        let mut map = Map::plain(3);
        set(&mut map);
        map.lay_out();
        map
    };
    for data_type in 0..=9 {
        // A row of 32 bytes.
        let map = plain(&|map| {
            map.data_type = data_type;
            map.tile[0] = 32 / map.bytes() as u32;
            map.shape[0] = 80 / map.bytes() as u64 + 1;
        });
        both.each(&format!("type {data_type}"), &[map], &mut rng);
    }
    for data_type in 10..=12 {
        let map = plain(&|map| map.data_type = data_type);
        both.each(&format!("type {data_type}"), &[map], &mut rng);
    }
    for swizzle in 1..=3 {
        let map = plain(&|map| (map.swizzle, map.tile[0], map.tile[1]) = (swizzle, 4 << swizzle, 6));
        both.each(&format!("swizzle {swizzle}"), &[map], &mut rng);
    }
    for d in 0..3 {
        let maps = [2, 3, 8].map(|step| plain(&|map| (map.steps[d], map.tile[1]) = (step, 4)));
        both.each(&format!("step {d}"), &maps, &mut rng);
    }
    // Coordinates far outside.
    for (d, end) in [i32::MIN, i32::MAX, 1 << 20, -(1 << 20)].into_iter().enumerate() {
        for axis in 0..3 {
            let mut place = [4, 1, 1, 0, 0];
            place[axis] = if axis == 0 { end & !3 } else { end };
            both.load(&format!("far {d}"), Copy::of(Map::plain(3), place, &mut rng));
        }
    }
    // Innermost coordinates that are no multiple of 16 bytes.
    for (data_type, first) in [(0, 8), (0, 1), (1, 4), (7, 2), (7, -2), (8, 1)] {
        let map = plain(&|map| {
            map.data_type = data_type;
            map.tile[0] = 32 / map.bytes() as u32;
        });
        both.load("unaligned", Copy::of(map.clone(), [first, 1, 1, 0, 0], &mut rng));
        both.store("unaligned", Copy::of(map.clone(), [first, 1, 1, 0, 0], &mut rng));
    }
    // Addresses in shared memory that are no multiple of 128.
    for (swizzle, offset) in [(0, 16), (0, 64), (1, 64), (3, 64)] {
        let map = plain(&|map| (map.swizzle, map.tile[0]) = (swizzle, 4 << swizzle));
        let copy = |rng: &mut Rng| Copy { offset, ..Copy::of(map.clone(), [4, 1, 1, 0, 0], rng) };
        both.load(&format!("to {offset} in swizzle {swizzle}"), copy(&mut rng));
        both.store(&format!("from {offset} in swizzle {swizzle}"), copy(&mut rng));
    }
    // Maps of another rank.
    for (kernel, rank) in [("load2", 3), ("load3", 2), ("store2", 3), ("store3", 2)] {
        both.add(kernel, &format!("of rank {rank}"), Copy::of(Map::plain(rank), [4, 1, 1, 0, 0], &mut rng));
    }
    // Bytes, whose addresses are multiples of 16 or not.
    for (bytes, offset, first) in [(32, 16, 16), (32, 8, 16), (32, 16, 8)] {
        for kernel in ["load", "store"] {
            let copy = Copy { offset, ..Copy::of(Map::plain(2), [first, 0, 0, 0, 0], &mut rng) };
            let mut bulk =
                copy.case(format!("{kernel} of bytes"), (&both.ptx, kernel.to_owned()), [1, 1], None);
            bulk.words[0] = bytes;
            both.cases.push(bulk);
        }
    }
    // Prefetches, which need what loads need, and a load by 128 zeros.
    for (rank, first, second) in [(2, 4, 1), (2, -8, 1), (2, 4, -1), (2, 4, 1 << 20), (2, 3, 1), (3, 4, 1)] {
        both.add("prefetch2", "of a box", Copy::of(Map::plain(rank), [first, second, 0, 0, 0], &mut rng));
    }
    both.add("made2", "of zeros", Copy::of(Map::plain(2), [4, 1, 0, 0, 0], &mut rng));
    // Stores before the begin of the tensor, in one dimension.
    for rank in 1..=3 {
        for axis in 0..rank as usize {
            let mut place = [4, 1, 1, 0, 0];
            place[axis] = if axis == 0 { -4 } else { -1 };
            both.store("before the begin", Copy::of(Map::plain(rank), place, &mut rng));
        }
    }
    // Rows that are shorter than those of the swizzle: a single one, and several.
    for rows in [1, 12] {
        for swizzle in 1..=3 {
            for row in (16..16 << swizzle).step_by(16) {
                let map = Map { swizzle, offset: GUARD as u64, ..Map::simple() };
                let map = Map { tile: [row / 4, rows, 1, 1, 1, 1], ..map };
                let name = format!("{rows} of {row} bytes in swizzle {swizzle}");
                both.load(&name, Copy::of(map.clone(), [0; 5], &mut rng));
                both.store(&name, Copy::of(map, [0; 5], &mut rng));
            }
        }
    }
    for group in 0..40 {
        for _ in 0..8 {
            both.load(&format!("random {group}"), Copy::random(&mut rng));
        }
    }
    for group in 0..20 {
        for _ in 0..8 {
            let copy = Copy::random(&mut rng);
            // A store begins inside of the tensor or behind it.
            let place = copy.place.map(|at| if at < 0 { at & 3 } else { at });
            let unit = 16 / copy.map.bytes() as i32;
            let first = place[0] / unit * unit;
            let place = std::array::from_fn(|d| if d == 0 { first } else { place[d] });
            both.store(&format!("random {group}"), Copy { place, ..copy });
        }
    }
    // Types whose copies change numbers, on numbers that are near their bounds.
    for data_type in [7, 10, 11, 12] {
        for _ in 0..3 {
            let map = Map { data_type, rank: 1, shape: [256; 6], tile: [256; 6], ..Map::plain(1) };
            let bytes: Vec<u8> = (0..512).flat_map(|_| special(&mut rng).to_le_bytes()).collect();
            let mut copy = Copy::of(map, [0; 5], &mut rng);
            copy.tensor[GUARD..GUARD + 1024].copy_from_slice(&bytes[..1024]);
            copy.buffer[..1024].copy_from_slice(&bytes[1024..]);
            let [tensor, buffer] = [&copy.tensor, &copy.buffer].map(Vec::clone);
            let again = Copy { map: copy.map.clone(), tensor, buffer, ..copy };
            both.load(&format!("numbers of type {data_type}"), copy);
            both.store(&format!("numbers of type {data_type}"), again);
        }
    }
    // Fills with NaN.
    for data_type in 6..=12 {
        let map = plain(&|map| {
            (map.data_type, map.fill) = (data_type, 1);
            map.tile[0] = 32 / map.bytes() as u32;
            map.shape[0] = 80 / map.bytes() as u64 + 1;
        });
        both.each(&format!("NaN of type {data_type}"), &[map], &mut rng);
    }
}

/// Boxes that go to some blocks of a cluster of four.
fn multicast(cases: &mut Vec<Case>) {
    let kernels = (1..=5).map(|rank| {
        entry(&format!("load{rank}"), ".reqnctapercluster 4", &load(rank, ".multicast::cluster", ", %h1"))
    });
    let ptx: Rc<str> = (HEAD.to_owned() + &kernels.collect::<String>()).into();
    let mut rng = Rng(3);
    for mask in 1..16 {
        for _ in 0..2 {
            let copy = Copy::random(&mut rng);
            let kernel = format!("load{}", copy.map.rank);
            cases.push(copy.case(format!("multicast {mask}"), (&ptx, kernel), [4, mask], None));
        }
    }
}

/// Numbers of types of elements, which `tensormap.replace` has for those of the driver.
const TYPES: [u32; 13] = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 11, 12];

/// Replaces all fields of the map at `at`.
fn replaces(map: &Map, space: &str, at: &str) -> String {
    let replace = |field: &str, bits: u32, operands: String| {
        format!("tensormap.replace.tile.{field}.{space}.b1024.b{bits} [{at}], {operands};\n")
    };
    let mut text =
        format!("add.u64 %rd9, %rd2, {};\n", map.offset) + &replace("global_address", 64, "%rd9".into());
    text += &replace("rank", 32, (map.rank - 1).to_string());
    for d in 0..map.rank as usize {
        text += &replace("box_dim", 32, format!("{d}, {}", map.tile[d]));
        text += &replace("global_dim", 32, format!("{d}, {}", map.shape[d]));
        text += &replace("element_stride", 32, format!("{d}, {}", map.steps[d]));
        if d > 0 {
            text += &replace("global_stride", 64, format!("{}, {}", d - 1, map.strides[d - 1]));
        }
    }
    text += &replace("elemtype", 32, TYPES[map.data_type as usize].to_string());
    text += &replace("swizzle_mode", 32, map.swizzle.to_string());
    text += &replace("interleave_layout", 32, "0".into());
    text + &replace("fill_mode", 32, "0".into())
}

/// Makes a map in shared memory, of words that `word` gives, by instructions of one thread, and copies it
/// to the buffer of a map.
fn made_in_shared(word: &str, replaces: &str) -> String {
    format!(
        "shl.b32 %r10, %r4, 2; cvt.u64.u32 %rd9, %r10; add.u64 %rd9, %rd1, %rd9; {word}
mov.u32 %r11, MAP; add.u32 %r10, %r11, %r10; st.shared.b32 [%r10], %r13; bar.sync 0;
@%p7 bra MADE;\n{replaces}MADE: bar.sync 0;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd4], [%r11], 128;"
    )
}

/// A load by the map that `make` has made in the buffer of a map.
fn with_made_map(rank: u32, make: &str) -> String {
    format!(
        "setp.ne.u32 %p7, %r4, 0;\n{make}\nmov.u64 %rd1, %rd4;
fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;\n{}",
        load(rank, "", "")
    )
}

/// Loads by maps that the kernel makes of another map, in shared or in global memory, and of zeros.
fn replaced(cases: &mut Vec<Case>) {
    let mut rng = Rng(4);
    for kind in ["shared", "global", "zeros"] {
        let copies: Vec<Copy> = (0..24).map(|_| Copy::random(&mut rng)).collect();
        let kernels = copies.iter().enumerate().map(|(i, copy)| {
            let word = if kind == "zeros" { "mov.b32 %r13, 0;" } else { "ld.b32 %r13, [%rd9];" };
            let make = match kind {
                "global" => format!(
                    "@%p7 bra MADE;\n{}fence.proxy.tensormap::generic.release.gpu;\nMADE: bar.sync 0;",
                    replaces(&copy.map, "global", "%rd4")
                ),
                _ => made_in_shared(word, &replaces(&copy.map, "shared::cta", "%r11")),
            };
            entry(&format!("load{i}"), "", &with_made_map(copy.map.rank, &make))
        });
        let ptx: Rc<str> = (HEAD.to_owned() + &kernels.collect::<String>()).into();
        for (i, copy) in copies.into_iter().enumerate() {
            let template = Map::random(&mut rng);
            let name = format!("map made of {kind} {}", i / 8);
            cases.push(copy.case(name, (&ptx, format!("load{i}")), [1, 1], Some(template)));
        }
    }
}

/// Loads without a prefetch of the same box in front.
fn bare(cases: &mut Vec<Case>) {
    let body = load(2, "", "");
    let prefetch = body.lines().find(|line| line.contains("prefetch")).expect("it has one");
    let ptx: Rc<str> = (HEAD.to_owned() + &entry("load2", "", &body.replace(prefetch, ""))).into();
    let mut rng = Rng(12);
    for (first, second) in [(4, 1), (-8, -1), (3, 1), (-2, 1)] {
        let copy = Copy::of(Map::plain(2), [first, second, 0, 0, 0], &mut rng);
        cases.push(copy.case("load alone".to_owned(), (&ptx, "load2".to_owned()), [1, 1], None));
    }
}

/// Loads by maps whose type of elements, or fill, is replaced alone.
fn retyped(cases: &mut Vec<Case>) {
    // The type and the fill of the template, then those of the map.
    let mut pairs = vec![];
    for from in [7, 10, 11, 12] {
        pairs.extend((0..=12).map(|to| [from, 0, to, 0]));
    }
    pairs.extend([[7, 0, 7, 1], [6, 0, 6, 1], [8, 0, 8, 1], [2, 0, 2, 1]]);
    pairs.extend([[7, 1, 7, 0], [7, 1, 6, 1], [7, 1, 8, 1], [7, 1, 2, 1], [7, 1, 2, 0]]);
    let kernels = pairs.iter().enumerate().map(|(i, [_, _, to, fill])| {
        let body = made_in_shared(
            "ld.b32 %r13, [%rd9];",
            &format!(
                "add.u64 %rd9, %rd2, {GUARD};
tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r11], %rd9;
tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r11], {};
tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%r11], {fill};\n",
                TYPES[*to as usize]
            ),
        );
        entry(&format!("load{i}"), "", &with_made_map(2, &body))
    });
    let ptx: Rc<str> = (HEAD.to_owned() + &kernels.collect::<String>()).into();
    let mut rng = Rng(8);
    for (i, [from, from_fill, to, fill]) in pairs.into_iter().enumerate() {
        let of = |data_type, fill| {
            let map = Map { data_type, fill, offset: GUARD as u64, ..Map::simple() };
            Map { shape: [20, 6, 1, 1, 1, 1], tile: [16, 3, 1, 1, 1, 1], strides: [256; 6], ..map }
        };
        let copy = Copy::of(of(to, fill), [16, 1, 0, 0, 0], &mut rng);
        let name = format!("map of type {from} fill {from_fill} made one");
        cases.push(copy.case(name, (&ptx, format!("load{i}")), [1, 1], Some(of(from, from_fill))));
    }
}
