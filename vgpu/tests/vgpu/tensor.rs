//! Tensor maps and `cp.async.bulk.tensor` against a host oracle that moves element by element.

use epoxide_vgpu::{
    Argument, CheckConfig, Class, DeviceConfig, ElementType, Fault, FaultKind, Fill, Machine, MachineError,
    Module, Swizzle, TensorMap, TiledTensor, for_each_seed, supported_opcode,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{HEAD, device, launch, tier};

/// Bytes of shared memory for a box.
pub const ROOM: usize = 16 << 10;

/// A kernel around `body`, which has the map in `%rd1`, five coordinates in `%c0` and up, so many
/// offsets in `%h0` and up, the box at `%r1`, the mbarrier at `%r2`, the buffer in `%rd2` and the bytes
/// of the box in `%r3`. The kernel's arguments are the buffer, the map, the bytes, the coordinates and
/// the offsets.
pub fn around_box(body: &str, offsets: usize) -> String {
    let (words, halves) = (0..5, 0..offsets);
    let of_words: String = words.clone().map(|d| format!(", .param .u32 c{d}")).collect();
    let of_halves: String = halves.clone().map(|d| format!(", .param .u16 o{d}")).collect();
    let words: String = words.map(|d| format!("ld.param.u32 %c{d}, [c{d}];\n")).collect();
    let halves: String = halves.map(|d| format!("ld.param.u16 %h{d}, [o{d}];\n")).collect();
    format!(
        "{HEAD}.shared .align 1024 .b8 BOX[{ROOM}];\n.shared .align 8 .b8 BARRIER[8];
.visible .entry k(.param .u64 buf, .param .align 64 .b8 map[128], .param .u32 bytes{of_words}{of_halves})
{{
.reg .pred %p<8>; .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b32 %c<5>; .reg .b64 %rd<16>;
ld.param.u64 %rd2, [buf];
ld.param.u32 %r3, [bytes];
mov.b64 %rd1, map;
cvta.param.u64 %rd1, %rd1;
{words}{halves}mov.u32 %r1, BOX;
mov.u32 %r2, BARRIER;
mov.u32 %r4, %tid.x;
{body}
ret;
}}
"
    )
}

/// The registers of so many coordinates in [`around_box`].
pub fn coordinates(count: usize) -> String {
    let names: Vec<_> = (0..count).map(|d| format!("%c{d}")).collect();
    names.join(", ")
}

/// A tensor, a box of it, and the coordinates of a copy. The innermost dimension comes first.
#[derive(Clone, Debug)]
struct Case {
    bytes: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
    tile: Vec<usize>,
    element_strides: Vec<usize>,
    swizzle: Swizzle,
    at: Vec<i32>,
}

impl Case {
    fn random(rng: &mut ChaCha8Rng) -> Case {
        let bytes = [1, 2, 4, 8][rng.random_range(0..4)];
        let rank = rng.random_range(1..=5);
        let swizzle =
            [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128][rng.random_range(0..4)];
        let row = match swizzle {
            Swizzle::None => 16 * rng.random_range(1..=4),
            // One row in three is shorter than the rows of the swizzle.
            swizzle if rng.random_range(0..3) > 0 => 16 << swizzle as usize,
            swizzle => 16 * rng.random_range(1..=1 << swizzle as usize),
        };
        let mut tile = vec![row / bytes];
        let most = [0, 0, 40, 7, 4, 3][rank];
        tile.extend((1..rank).map(|_| rng.random_range(1..=most)));
        let element_strides: Vec<usize> =
            (0..rank).map(|_| if rng.random() { 1 } else { rng.random_range(1..=3) }).collect();
        let shape: Vec<usize> = tile.iter().map(|len| rng.random_range(1..=2 * len)).collect();
        let mut strides = vec![];
        let mut length = shape[0] * bytes;
        for len in &shape[1..] {
            // Room between the rows.
            length = length.next_multiple_of(16) + 16 * rng.random_range(0..2);
            strides.push(length);
            length *= len;
        }
        let mut at: Vec<i32> =
            (0..rank).map(|d| rng.random_range(-(tile[d] as i32)..=shape[d] as i32)).collect();
        at[0] &= !(16 / bytes as i32 - 1);
        Case { bytes, shape, strides, tile, element_strides, swizzle, at }
    }

    /// The same with a box that does not begin before the tensor.
    fn for_store(mut self) -> Case {
        self.at.iter_mut().for_each(|at| *at = (*at).max(0));
        self
    }

    /// The types of elements of these bytes that no copy changes.
    fn types(&self) -> &'static [ElementType] {
        use ElementType::*;
        match self.bytes {
            1 => &[U8],
            2 => &[U16, F16, Bf16],
            4 => &[U32, I32, F32, F32Ftz],
            _ => &[U64, I64, F64],
        }
    }

    fn element_type(&self) -> ElementType {
        self.types()[self.shape[0] % self.types().len()]
    }

    fn tensor_bytes(&self) -> usize {
        let last = self.shape.len() - 1;
        if last == 0 { self.shape[0] * self.bytes } else { self.strides[last - 1] * self.shape[last] }
    }

    fn map(&self, address: u64) -> TensorMap {
        let longs = |list: &[usize]| list.iter().map(|&v| v as u64).collect::<Vec<_>>();
        let words = |list: &[usize]| list.iter().map(|&v| v as u32).collect::<Vec<_>>();
        TensorMap::tiled(&TiledTensor {
            address,
            element_type: self.element_type(),
            shape: &longs(&self.shape),
            strides: &longs(&self.strides),
            tile: &words(&self.tile),
            element_strides: &words(&self.element_strides),
            swizzle: self.swizzle,
            fill: Fill::Zeros,
        })
        .unwrap()
    }

    /// Each element of the box: its place in shared memory, its place in the tensor if it is there, and
    /// whether it is the last one of its row.
    fn elements(&self) -> Vec<(usize, Option<usize>, bool)> {
        let rank = self.shape.len();
        let count = |d: usize| match d {
            0 => self.tile[0],
            d => self.tile[d].div_ceil(self.element_strides[d]),
        };
        let mut all = vec![];
        let mut index = vec![0; rank];
        loop {
            let row = (1..rank).rev().fold(0, |sum, d| sum * count(d) + index[d]);
            let linear = row * self.pitch() + index[0] * self.bytes;
            let mask = match self.swizzle {
                Swizzle::None => 0,
                Swizzle::Bytes32 => 1,
                Swizzle::Bytes64 => 3,
                Swizzle::Bytes128 => 7,
            };
            let mut place = Some(0);
            for (d, at) in index.iter().enumerate() {
                let step = if d == 0 { 1 } else { self.element_strides[d] };
                let coordinate = i64::from(self.at[d]) + (at * step) as i64;
                let stride = if d == 0 { self.bytes } else { self.strides[d - 1] };
                let inside = (0..self.shape[d] as i64).contains(&coordinate);
                place = place.filter(|_| inside).map(|place| place + coordinate as usize * stride);
            }
            let is_last = i64::from(self.at[0]) + index[0] as i64 == self.shape[0] as i64 - 1;
            all.push((linear ^ (linear >> 7 & mask) << 4, place, is_last));
            let Some(d) = (0..rank).find(|&d| index[d] + 1 < count(d)) else { return all };
            index[..d].fill(0);
            index[d] += 1;
        }
    }

    fn box_bytes(&self) -> usize {
        self.elements().len() * self.bytes
    }

    /// Distance of the rows of the box in shared memory.
    fn pitch(&self) -> usize {
        match self.swizzle {
            Swizzle::None => self.tile[0] * self.bytes,
            swizzle => 16 << swizzle as usize,
        }
    }

    /// Bytes of the box in shared memory, with those between its rows.
    fn room(&self) -> usize {
        self.box_bytes() / (self.tile[0] * self.bytes) * self.pitch()
    }

    /// Check mode where no bytes lie between the rows: the kernel reads them.
    fn check(&self, wanted: bool) -> Option<CheckConfig> {
        (wanted && self.room() == self.box_bytes()).then(CheckConfig::default)
    }

    fn coordinates(&self) -> String {
        coordinates(self.at.len())
    }

    /// [`around_box`] without offsets.
    fn text(body: &str) -> String {
        around_box(body, 0)
    }

    fn load(&self) -> String {
        format!(
            "setp.ne.u32 %p1, %r4, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r2], 1;
fence.proxy.async.shared::cta;
prefetch.tensormap [%rd1];
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r3;
cp.async.bulk.prefetch.tensor.{0}d.L2.global.tile [%rd1, {{{1}}}];
cp.async.bulk.tensor.{0}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{1}}}], [%r2];
READY:
bar.sync 0;
WAIT:
mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
@!%p2 bra WAIT;
shl.b32 %r5, %r4, 3;
COPY:
setp.ge.u32 %p3, %r5, {2};
@%p3 bra DONE;
add.u32 %r6, %r1, %r5;
ld.shared.u64 %rd3, [%r6];
cvt.u64.u32 %rd4, %r5;
add.u64 %rd4, %rd2, %rd4;
st.global.u64 [%rd4], %rd3;
add.u32 %r5, %r5, 256;
bra COPY;
DONE:",
            self.at.len(),
            self.coordinates(),
            self.room()
        )
    }

    fn store(&self) -> String {
        format!(
            "shl.b32 %r5, %r4, 3;
COPY:
setp.ge.u32 %p3, %r5, {2};
@%p3 bra DONE;
cvt.u64.u32 %rd4, %r5;
add.u64 %rd4, %rd2, %rd4;
ld.global.u64 %rd3, [%rd4];
add.u32 %r6, %r1, %r5;
st.shared.u64 [%r6], %rd3;
add.u32 %r5, %r5, 256;
bra COPY;
DONE:
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p1, %r4, 0;
@%p1 bra END;
cp.async.bulk.tensor.{0}d.global.shared::cta.tile.bulk_group [%rd1, {{{1}}}], [%r1];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
END:",
            self.at.len(),
            self.coordinates(),
            self.room()
        )
    }

    /// Runs a kernel. Gives the contents of the buffer and of the tensor.
    fn run(
        &self,
        text: &str,
        buffer: &[u8],
        tensor: &[u8],
        seed: u64,
        check: Option<CheckConfig>,
    ) -> Result<(Vec<u8>, Vec<u8>), MachineError> {
        let module = Module::parse(text).unwrap_or_else(|e| panic!("{e}"));
        let mut machine = Machine::with_config(1, device(seed), check);
        let (buf, global) = (machine.upload(0, "buf", buffer)?, machine.upload(0, "tensor", tensor)?);
        let map = self.map(global.addr());
        let bytes = self.box_bytes() as u32;
        let at: [i32; 5] = std::array::from_fn(|d| self.at.get(d).copied().unwrap_or(0));
        let arguments: [&dyn Argument; 8] = [&buf, &map, &bytes, &at[0], &at[1], &at[2], &at[3], &at[4]];
        machine.launch_with(0, &module, "k", launch(1, 32), &arguments)?;
        machine.run()?;
        Ok((buf.download()?, global.download()?))
    }

    /// Compares a box that was loaded with the tensor.
    fn compare(&self, got: &[u8], tensor: &[u8]) {
        for (at, place, _) in self.elements() {
            let expected = place.map_or(&[0; 8][..self.bytes], |place| &tensor[place..place + self.bytes]);
            assert!(&got[at..at + self.bytes] == expected, "{self:?}, byte {at} of the box");
        }
    }

    fn fault(&self, text: &str, check: Option<CheckConfig>) -> Fault {
        match self.run(text, &[0; ROOM], &vec![0; self.tensor_bytes()], 3, check) {
            Err(MachineError::Fault(fault)) => *fault,
            other => panic!("no fault but {other:?}:\n{text}"),
        }
    }
}

/// Random bytes other than 0, to distinguish them from filled bytes.
fn noise(rng: &mut ChaCha8Rng, len: usize) -> Vec<u8> {
    (0..len).map(|_| rng.random_range(1..=255)).collect()
}

#[test]
fn boxes_come_as_the_map_describes_them() {
    for_each_seed(tier(120, 2000), |seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(1 << 32 | seed);
        let case = Case::random(&mut rng);
        let tensor = noise(&mut rng, case.tensor_bytes());
        let (got, _) = case
            .run(&Case::text(&case.load()), &[0; ROOM], &tensor, seed, case.check(seed % 2 == 0))
            .unwrap_or_else(|e| panic!("{case:?}: {e}"));
        case.compare(&got, &tensor);
    });
}

#[test]
fn boxes_go_to_the_tensor_and_to_the_16_bytes_at_the_end_of_a_row() {
    for_each_seed(tier(120, 2000), |seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(2 << 32 | seed);
        let case = Case::random(&mut rng).for_store();
        let (mut expected, content) = (noise(&mut rng, case.tensor_bytes()), noise(&mut rng, ROOM));
        let before = expected.clone();
        for (at, place, is_last) in case.elements() {
            if let Some(place) = place {
                // The last element of a row takes the rest of its 16 bytes along, as far as the
                // memory goes.
                let len = if is_last { 16 - at % 16 } else { case.bytes }.min(expected.len() - place);
                expected[place..place + len].copy_from_slice(&content[at..at + len]);
            }
        }
        let check = case.check(seed % 2 == 0);
        let (_, got) = case
            .run(&Case::text(&case.store()), &content, &before, seed, check)
            .unwrap_or_else(|e| panic!("{case:?}: {e}"));
        assert!(got == expected, "{case:?}");
    });
}

#[test]
fn reductions_of_boxes_change_the_16_bytes_at_the_end_of_a_row_too() {
    use ElementType::{I32, U32, U64};
    for_each_seed(tier(120, 2000), |seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(3 << 32 | seed);
        let case = std::iter::repeat_with(|| Case::random(&mut rng))
            .find(|case| [U32, I32, U64].contains(&case.element_type()))
            .expect("it does not end")
            .for_store();
        let (mut expected, content) = (noise(&mut rng, case.tensor_bytes()), noise(&mut rng, ROOM));
        let before = expected.clone();
        for (at, place, is_last) in case.elements() {
            if let Some(place) = place {
                let len = if is_last { 16 - at % 16 } else { case.bytes }.min(expected.len() - place);
                let bytes = expected[place..place + len].iter_mut();
                bytes.zip(&content[at..at + len]).for_each(|(byte, with)| *byte ^= with);
            }
        }
        let reduction = case.store().replace("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor");
        let text = replaced(&reduction, ".tile.bulk_group", ".xor.tile.bulk_group");
        let check = case.check(seed % 2 == 0);
        let (_, got) =
            case.run(&text, &content, &before, seed, check).unwrap_or_else(|e| panic!("{case:?}: {e}"));
        assert!(got == expected, "{case:?}");
    });
}

/// A box of 8 rows of 128 bytes, of which half are in the tensor.
fn simple() -> Case {
    Case {
        bytes: 2,
        shape: vec![96, 8],
        strides: vec![192],
        tile: vec![64, 8],
        element_strides: vec![1, 1],
        swizzle: Swizzle::Bytes128,
        at: vec![64, 0],
    }
}

fn replaced(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "{from}");
    Case::text(&text.replace(from, to))
}

#[test]
fn bad_copies_of_boxes_are_faults() {
    let (load, store) = (simple().load(), simple().store());
    for (body, from, to, text) in [
        (
            &load,
            "cp.async.bulk.tensor",
            "add.u64 %rd1, %rd1, 64;\ncp.async.bulk.tensor",
            "there is no tensor map",
        ),
        (&load, "cp.async.bulk.tensor", "add.u64 %rd1, %rd1, 8;\ncp.async.bulk.tensor", "no multiple of 64"),
        (
            &load,
            "2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%c0, %c1}]",
            "1d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%c0}]",
            "a copy of 1 dimensions",
        ),
        (&load, "cp.async.bulk.tensor", "add.u32 %c0, %c0, 1;\ncp.async.bulk.tensor", "byte 130 of a row"),
        (
            &store,
            "cp.async.bulk.tensor",
            "mov.u32 %c0, 4;\ncp.async.bulk.tensor",
            "coordinate 4 of the innermost dimension is at byte 8 of a row, no multiple of 16",
        ),
        (
            &store,
            "cp.async.bulk.tensor",
            "mov.u32 %c1, -1;\ncp.async.bulk.tensor",
            "coordinate -1 of a store: it must not begin before its tensor",
        ),
    ] {
        let fault = simple().fault(&replaced(body, from, to), None);
        let FaultKind::BulkCopy { message } = &fault.kind else { panic!("{fault}") };
        assert!(message.contains(text), "{fault}");
        assert!(
            fault.at.ptx_text.contains("cp.async.bulk") && fault.kind.class() == Class::Bounds,
            "{fault}"
        );
    }
    for (body, from) in
        [(&load, "complete_tx::bytes [%r1]"), (&store, "bulk_group [%rd1, {%c0, %c1}], [%r1]")]
    {
        let text = replaced(body, from, &from.replace("[%r1]", "[%r1+64]"));
        let fault = simple().fault(&text, None);
        assert!(matches!(fault.kind, FaultKind::Misaligned { align: 128, .. }), "{fault}");
    }
    let beyond = replaced(&load, "bytes [%r1]", "bytes [%r1+15488]");
    let fault = simple().fault(&beyond, None);
    assert!(matches!(fault.kind, FaultKind::OutOfWindow { space: "shared", .. }), "{fault}");
    // The tensor has fewer bytes than its map.
    let case = Case { shape: vec![96, 60], at: vec![0, 52], ..simple() };
    let module = Module::parse(&Case::text(&case.load())).unwrap();
    let mut machine = Machine::with_config(1, DeviceConfig::default(), None);
    let buf = machine.upload(0, "buf", &[0u8; ROOM]).unwrap();
    let small = machine.upload(0, "tensor", &[0u8; 192 * 55]).unwrap();
    let map = case.map(small.addr());
    machine.launch_with(0, &module, "k", launch(1, 32), &[&buf, &map, &1024, &0, &52, &0, &0, &0]).unwrap();
    let Err(MachineError::Fault(fault)) = machine.run() else { panic!("passes") };
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { .. }), "{fault}");
}

#[test]
fn a_multicast_reaches_the_blocks_of_the_cluster_alone() {
    let multicast = |mask: u32| {
        let from = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%c0, %c1}], [%r2]";
        let to = format!(
            "mov.u16 %h1, {mask};\ncp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%r1], [%rd1, {{%c0, %c1}}], [%r2], %h1, %rd2"
        );
        replaced(&simple().load(), from, &to)
    };
    let tensor = vec![7; simple().tensor_bytes()];
    let (got, _) = simple().run(&multicast(1), &[0; ROOM], &tensor, 1, None).unwrap();
    assert_eq!(got.iter().filter(|byte| **byte == 7).count(), 8 * 64);
    let fault = simple().fault(&multicast(3), None);
    assert_eq!(fault.kind, FaultKind::OutOfCluster { rank: 1, blocks: 1 });
}

#[test]
fn check_mode_watches_copies_of_boxes() {
    let check = || Some(CheckConfig::default());
    let (load, store) = (simple().load(), simple().store());
    for (body, from, to, class, text) in [
        (&load, "@!%p2 bra WAIT;", "", Class::Corrupts, "its mbarrier's phase"),
        (&store, "fence.proxy.async.shared::cta;", "", Class::Proxy, "a fence.proxy.async"),
        (
            &store,
            "cp.async.bulk.wait_group.read 0;",
            "st.shared.u64 [%r1+16], %rd1;\ncp.async.bulk.wait_group.read 0;",
            Class::Corrupts,
            "wait_group",
        ),
    ] {
        let fault = simple().fault(&replaced(body, from, to), check());
        let FaultKind::Race(race) = &fault.kind else { panic!("{fault}") };
        assert_eq!(race.class, class, "{fault}");
        assert!(race.missing.contains(text), "{fault}");
    }
    let ends = replaced(&store, "cp.async.bulk.wait_group.read 0;", "");
    let fault = simple().fault(&ends, check());
    assert!(matches!(fault.kind, FaultKind::CopyOutlivesBlock { .. }), "{fault}");
    // A row outside of the tensor, in shared memory that nothing else wrote, is no race.
    let (got, _) = simple().run(&Case::text(&load), &[0; ROOM], &vec![9; 192 * 8], 5, check()).unwrap();
    assert_eq!(got.iter().filter(|byte| **byte == 9).count(), 8 * 64);
}

#[test]
fn maps_that_no_copy_can_use_are_errors() {
    let good = TiledTensor {
        address: 4096,
        element_type: ElementType::F32,
        shape: &[64, 8],
        strides: &[256],
        tile: &[32, 4],
        element_strides: &[1, 1],
        swizzle: Swizzle::Bytes128,
        fill: Fill::Nan,
    };
    TensorMap::tiled(&good).unwrap();
    for (bad, text) in [
        (TiledTensor { shape: &[], ..good }, "0 dimensions"),
        (TiledTensor { shape: &[1; 6], ..good }, "6 dimensions"),
        (TiledTensor { strides: &[], ..good }, "0 strides for 2 dimensions"),
        (TiledTensor { tile: &[32], ..good }, "1 box dimensions"),
        (TiledTensor { element_strides: &[1; 3], ..good }, "3 element strides"),
        (TiledTensor { element_type: ElementType::U32, ..good }, "a fill with NaN for elements of U32"),
        (TiledTensor { address: 4104, ..good }, "is not a multiple of 16"),
        (TiledTensor { shape: &[64, 0], ..good }, "a dimension of 0"),
        (TiledTensor { strides: &[264], ..good }, "a stride of 264 bytes"),
        (TiledTensor { tile: &[32, 257], ..good }, "a box dimension of 257"),
        (TiledTensor { element_strides: &[1, 9], ..good }, "an element stride of 9"),
        (TiledTensor { tile: &[3, 4], ..good }, "12 bytes, no multiple of 16"),
        (TiledTensor { swizzle: Swizzle::Bytes64, ..good }, "128 bytes, and those of the swizzle 64"),
        (
            TiledTensor {
                shape: &[64; 3],
                strides: &[256; 2],
                tile: &[32, 256, 8],
                element_strides: &[1; 3],
                ..good
            },
            "a box of 262144 bytes",
        ),
    ] {
        let error = TensorMap::tiled(&bad).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn other_copies_of_tensors_are_refused() {
    for opcode in [
        "fence.proxy.tensormap::generic.release.gpu",
        "fence.proxy.tensormap::generic.acquire.sys",
        "prefetch.tensormap",
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group",
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.xor.bulk_group.L2::cache_hint",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.noftz.bf16",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.inc.u32",
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64",
        "tensormap.replace.tile.element_stride.global.b1024.b32",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.cluster.sync.aligned",
    ] {
        assert!(supported_opcode(opcode), "{opcode}");
    }
    for opcode in [
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.exch.tile.bulk_group",
        "cp.reduce.async.bulk.tensor.2d.shared::cluster.global.add.tile.mbarrier::complete_tx::bytes",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s64",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.noftz.f16",
        "cp.async.bulk.tensor.2d.global.shared::cta.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.2d.shared::cta.global.bulk_group",
        "cp.async.bulk.tensor.6d.global.shared::cta.bulk_group",
        "tensormap.replace.tile.global_address.shared::cta.b1024.b32",
        "tensormap.replace.tile.box_dim.shared::cta.b1024.b64",
        "tensormap.replace.im2col.rank.b1024.b32",
        "tensormap.replace.tile.rank.shared::cluster.b1024.b32",
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.acquire.gpu.sync.aligned",
    ] {
        assert!(!supported_opcode(opcode), "{opcode}");
    }
}

impl Case {
    /// Replaces of all fields of the map at `map`, an address of this space.
    fn replaces(&self, space: &str, map: &str, address: u64) -> String {
        let replace = |field: &str, bits: u32, operands: String| {
            format!("tensormap.replace.tile.{field}{space}.b1024.b{bits} [{map}], {operands};\n")
        };
        let element = self.types()[self.shape[0] % self.types().len()];
        // Numbers here are not those of the driver API.
        let number = match element {
            ElementType::F32Ftz => 8,
            ElementType::F64 => 9,
            ElementType::Bf16 => 10,
            element => element as u32,
        };
        let rank = self.shape.len();
        let mut text = replace("global_address", 64, address.to_string());
        text += &replace("rank", 32, (rank - 1).to_string());
        for d in 0..rank {
            text += &replace("box_dim", 32, format!("{d}, {}", self.tile[d]));
            text += &replace("global_dim", 32, format!("{d}, {}", self.shape[d]));
            text += &replace("element_stride", 32, format!("{d}, {}", self.element_strides[d]));
        }
        for (d, stride) in self.strides.iter().enumerate() {
            text += &replace("global_stride", 64, format!("{d}, {stride}"));
        }
        text += &replace("elemtype", 32, number.to_string());
        text += &replace("swizzle_mode", 32, (self.swizzle as u32).to_string());
        text += &replace("interleave_layout", 32, "0".into());
        text + &replace("fill_mode", 32, "0".into())
    }

    /// A load whose map the kernel makes: of zeros in shared memory, with a copy to the end of the
    /// buffer, or of another map there. `change` edits the text.
    fn run_made(
        &self,
        tensor: &[u8],
        from_zeros: bool,
        seed: u64,
        check: Option<CheckConfig>,
        change: impl Fn(String) -> String,
    ) -> Result<Vec<u8>, MachineError> {
        let mut machine = Machine::with_config(1, device(seed), check);
        let global = machine.upload(0, "tensor", tensor)?;
        let other = Case { at: vec![], ..simple() }.map(4096);
        let buf = machine.upload(0, "buf", &[&[0; ROOM][..], &other.to_bytes()].concat())?;
        let make = if from_zeros {
            format!(
                ".shared .align 128 .b8 MAP[128];
mov.u32 %r7, MAP;
shl.b32 %r8, %r4, 2;
add.u32 %r8, %r7, %r8;
st.shared.u32 [%r8], 0;
bar.warp.sync 0xffffffff;
setp.ne.u32 %p4, %r4, 0;
@%p4 bra MADE;
{}MADE:
bar.warp.sync 0xffffffff;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r7], 128;",
                self.replaces(".shared::cta", "%r7", global.addr())
            )
        } else {
            format!(
                "setp.ne.u32 %p4, %r4, 0;\n@%p4 bra MADE;\n{}fence.proxy.tensormap::generic.release.gpu;\nMADE:",
                self.replaces(if seed.is_multiple_of(2) { "" } else { ".global" }, "%rd1", global.addr())
            )
        };
        let body = format!(
            "add.u64 %rd1, %rd2, {ROOM};\n{make}\nfence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;\n{}",
            self.load()
        );
        let module = Module::parse(&Case::text(&change(body))).unwrap_or_else(|e| panic!("{e}"));
        let bytes = self.box_bytes() as u32;
        let at: [i32; 5] = std::array::from_fn(|d| self.at.get(d).copied().unwrap_or(0));
        let arguments: [&dyn Argument; 8] = [&buf, &other, &bytes, &at[0], &at[1], &at[2], &at[3], &at[4]];
        machine.launch_with(0, &module, "k", launch(1, 32), &arguments)?;
        machine.run()?;
        buf.download()
    }
}

#[test]
fn a_kernel_makes_and_changes_maps() {
    for_each_seed(tier(60, 1000), |seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(4 << 32 | seed);
        let case = Case::random(&mut rng);
        let tensor = noise(&mut rng, case.tensor_bytes());
        let check = case.check(seed % 3 == 0);
        let got = case
            .run_made(&tensor, seed % 2 == 0, seed / 2, check, |text| text)
            .unwrap_or_else(|e| panic!("{case:?}: {e}"));
        case.compare(&got, &tensor);
    });
}

#[test]
fn a_map_with_a_wrong_number_is_a_fault_of_the_copy() {
    let case = simple();
    let tensor = vec![7; case.tensor_bytes()];
    for (from, to, text) in [
        ("rank.shared::cta.b1024.b32 [%r7], 1", "rank.shared::cta.b1024.b32 [%r7], 5", "6 dimensions"),
        (
            "rank.shared::cta.b1024.b32 [%r7], 1",
            "rank.shared::cta.b1024.b32 [%r7], 2",
            "a box dimension of 0",
        ),
        ("b32 [%r7], 1, 8", "b32 [%r7], 1, 300", "a box dimension of 300"),
        ("b64 [%r7], 0, 192", "b64 [%r7], 0, 200", "a stride of 200 bytes"),
        (
            "element_stride.shared::cta.b1024.b32 [%r7], 1, 1",
            "element_stride.shared::cta.b1024.b32 [%r7], 1, 300",
            "an element stride of 255",
        ),
        (
            "rank.shared::cta.b1024.b32 [%r7], 1",
            "rank.shared::cta.b1024.b32 [%r7], 1;\ntensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r7], 4104",
            "an address that is not a multiple of 16",
        ),
        ("b32 [%r7], 0, 64", "b32 [%r7], 0, 72", "144 bytes, and those of the swizzle 128"),
    ] {
        let change = |body: String| {
            assert!(body.contains(from), "{from} in {body}");
            body.replacen(from, to, 1)
        };
        let Err(MachineError::Fault(fault)) = case.run_made(&tensor, true, 0, None, change) else {
            panic!("{to} passes")
        };
        let FaultKind::BulkCopy { message } = &fault.kind else { panic!("{fault}") };
        assert!(message.contains(text) && message.contains("in the map at"), "{fault}");
    }
    // Without the copy, global memory holds the other map, whose tensor does not exist.
    let stale = |body: String| {
        let start = body.find("tensormap.cp_fenceproxy").unwrap();
        let end = start + body[start..].find('\n').unwrap();
        body.replace(&body[start..end], "")
    };
    let Err(MachineError::Fault(fault)) = case.run_made(&tensor, true, 0, None, stale) else {
        panic!("passes")
    };
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { .. }), "{fault}");
}

#[test]
fn values_that_maps_here_cannot_have_are_refused() {
    let body = |field: &str, value: u32| {
        format!("tensormap.replace.tile.{field}.shared::cta.b1024.b32 [%r1], {value};")
    };
    for (field, value) in [("elemtype", 13), ("interleave_layout", 1), ("swizzle_mode", 4), ("fill_mode", 2)]
    {
        let error = crate::common::reject(&body(field, value));
        assert!(
            error.message.contains(&format!("value {value} of 'tensormap.replace.tile.{field}")),
            "{error}"
        );
    }
    let error =
        crate::common::reject("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r1], 4, %rd1;");
    assert!(error.message.contains("the ordinal of a dimension must be a constant from 0 to 3"), "{error}");
}
