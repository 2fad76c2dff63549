//! Copies of pixels (`cp.async.bulk.tensor` with `.im2col`) against a host oracle that lists the
//! pixels of all images. The oracle follows the PTX manual, section "Im2col mode".

use epoxide_vgpu::{
    Argument, CheckConfig, ElementType, Fault, FaultKind, Fill, Machine, MachineError, Module, PixelTensor,
    Swizzle, TensorMap, for_each_seed, supported_opcode,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{device, launch, replaying, tier};
use crate::tensor::{ROOM, around_box, coordinates};

/// A tensor of f32, a copy of its pixels, and where it begins. Dimensions are C, W, H, D and N.
#[derive(Clone, Debug)]
struct Case {
    shape: Vec<usize>,
    strides: Vec<usize>,
    /// The corners of the box in W, H and D.
    lower: Vec<i32>,
    upper: Vec<i32>,
    channels: usize,
    pixels: usize,
    steps: Vec<usize>,
    swizzle: Swizzle,
    fill: Fill,
    at: Vec<i32>,
    offsets: Vec<u16>,
}

impl Case {
    /// A copy whose box reaches up to `beyond` places beyond the images.
    fn random(rng: &mut ChaCha8Rng, beyond: i32) -> Case {
        let axes = rng.random_range(1..=3);
        let swizzle =
            [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128][rng.random_range(0..4)];
        // Rows are as long as those of the swizzle, so that no gaps stay unwritten.
        let channels = match swizzle {
            Swizzle::None => 4 * rng.random_range(1..=6),
            swizzle => 4 << swizzle as usize,
        };
        let mut shape: Vec<usize> = vec![rng.random_range(1..=2 * channels)];
        shape.extend((0..axes).map(|_| rng.random_range(1..=6)));
        shape.push(rng.random_range(1..=3));
        let mut strides = vec![];
        let mut length = shape[0] * 4;
        for len in &shape[1..] {
            length = length.next_multiple_of(16) + 16 * rng.random_range(0..2);
            strides.push(length);
            length *= len;
        }
        let mut case = Case {
            shape,
            strides,
            lower: vec![],
            upper: vec![],
            channels,
            pixels: rng.random_range(1..=(ROOM / 4 / channels).min(120)),
            steps: (0..axes + 2).map(|_| if rng.random() { 1 } else { rng.random_range(1..=3) }).collect(),
            swizzle,
            fill: if rng.random() { Fill::Zeros } else { Fill::Nan },
            at: vec![],
            offsets: (0..axes).map(|_| rng.random_range(0..4)).collect(),
        };
        // Each image counts.
        case.steps[axes + 1] = 1;
        case.at.push(4 * rng.random_range(-1..=case.shape[0] as i32 / 4));
        for axis in 0..axes {
            let last = case.shape[axis + 1] as i32 - 1;
            let lower = rng.random_range(-beyond..=last.min(2));
            let upper = rng.random_range((lower - last).max(-3)..=beyond);
            let steps = (last + upper - lower) / case.steps[axis + 1] as i32;
            case.at.push(lower + rng.random_range(0..=steps) * case.steps[axis + 1] as i32);
            case.lower.push(lower);
            case.upper.push(upper);
        }
        case.at.push(rng.random_range(0..case.shape[axes + 1] as i32));
        case
    }

    fn axes(&self) -> usize {
        self.lower.len()
    }

    fn tensor_bytes(&self) -> usize {
        self.strides.last().unwrap() * self.shape.last().unwrap()
    }

    fn map(&self, address: u64) -> TensorMap {
        let longs = |list: &[usize]| list.iter().map(|&v| v as u64).collect::<Vec<_>>();
        TensorMap::of_pixels(&PixelTensor {
            address,
            element_type: ElementType::F32,
            shape: &longs(&self.shape),
            strides: &longs(&self.strides),
            lower_corner: &self.lower,
            upper_corner: &self.upper,
            channels: self.channels as u32,
            pixels: self.pixels as u32,
            element_strides: &self.steps.iter().map(|&v| v as u32).collect::<Vec<_>>(),
            swizzle: self.swizzle,
            fill: self.fill,
        })
        .unwrap()
    }

    /// The places of the pixels of a copy, from W on: those of the boxes of all images in order, from
    /// where the copy begins.
    fn places(&self) -> Vec<Vec<i32>> {
        let mut all: Vec<Vec<i32>> = (0..1000).map(|image| vec![image]).collect();
        for axis in (0..self.axes()).rev() {
            let last = self.shape[axis + 1] as i32 - 1 + self.upper[axis];
            let line = (self.lower[axis]..=last).step_by(self.steps[axis + 1]);
            let line: Vec<i32> = line.collect();
            all = all
                .iter()
                .take(2000)
                .flat_map(|rest| line.iter().map(|&at| [&[at], rest.as_slice()].concat()))
                .collect();
        }
        let begin = all.iter().position(|place| place[..] == self.at[1..]).expect("it is in the box");
        all[begin..][..self.pixels].to_vec()
    }

    /// Each element of a copy: its place in shared memory, and its place in the tensor if it is there.
    fn elements(&self, offsets: &[u16]) -> Vec<(usize, Option<usize>, bool)> {
        let pitch = 4 * self.channels;
        let mask = [0, 1, 3, 7][self.swizzle as usize];
        let mut all = vec![];
        for (pixel, place) in self.places().iter().enumerate() {
            for channel in 0..self.channels {
                let linear = pixel * pitch + 4 * channel;
                let first = i64::from(self.at[0]) + channel as i64;
                let mut to = (0..self.shape[0] as i64).contains(&first).then_some(4 * first as usize);
                for (d, at) in place.iter().enumerate() {
                    let at = i64::from(*at) + i64::from(offsets.get(d).copied().unwrap_or(0));
                    let inside = (0..self.shape[d + 1] as i64).contains(&at);
                    to = to.filter(|_| inside).map(|to| to + at as usize * self.strides[d]);
                }
                let is_last = first == self.shape[0] as i64 - 1;
                all.push((linear ^ (linear >> 7 & mask) << 4, to, is_last));
            }
        }
        all
    }

    fn bytes(&self) -> usize {
        4 * self.channels * self.pixels
    }

    fn coordinates(&self) -> String {
        coordinates(self.at.len())
    }

    /// [`around_box`] with offsets.
    fn text(body: &str) -> String {
        around_box(body, 3)
    }

    fn load(&self) -> String {
        let offsets = ["%h0", "%h1", "%h2"][..self.axes()].join(", ");
        format!(
            "setp.ne.u32 %p1, %r4, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r2], 1;
fence.proxy.async.shared::cta;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r3;
cp.async.bulk.prefetch.tensor.{0}d.L2.global.im2col [%rd1, {{{1}}}], {{{offsets}}};
cp.async.bulk.tensor.{0}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{1}}}], [%r2], {{{offsets}}};
READY:
bar.sync 0;
WAIT:
mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
@!%p2 bra WAIT;
shl.b32 %r5, %r4, 2;
COPY:
setp.ge.u32 %p3, %r5, %r3;
@%p3 bra DONE;
add.u32 %r6, %r1, %r5;
ld.shared.u32 %r7, [%r6];
cvt.u64.u32 %rd4, %r5;
add.u64 %rd4, %rd2, %rd4;
st.global.u32 [%rd4], %r7;
add.u32 %r5, %r5, 128;
bra COPY;
DONE:",
            self.at.len(),
            self.coordinates()
        )
    }

    fn store(&self) -> String {
        format!(
            "shl.b32 %r5, %r4, 2;
COPY:
setp.ge.u32 %p3, %r5, %r3;
@%p3 bra DONE;
cvt.u64.u32 %rd4, %r5;
add.u64 %rd4, %rd2, %rd4;
ld.global.u32 %r7, [%rd4];
add.u32 %r6, %r1, %r5;
st.shared.u32 [%r6], %r7;
add.u32 %r5, %r5, 128;
bra COPY;
DONE:
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p1, %r4, 0;
@%p1 bra END;
cp.async.bulk.tensor.{0}d.global.shared::cta.im2col_no_offs.bulk_group [%rd1, {{{1}}}], [%r1];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
END:",
            self.at.len(),
            self.coordinates()
        )
    }

    /// Runs a kernel. Gives the contents of the buffer and of the tensor.
    fn run(
        &self,
        text: &str,
        buffer: &[u8],
        tensor: &[u8],
        seed: u64,
    ) -> Result<(Vec<u8>, Vec<u8>), MachineError> {
        let module = Module::parse(text).unwrap_or_else(|e| panic!("{e}"));
        let check = seed.is_multiple_of(2).then(CheckConfig::default);
        let mut machine = Machine::with_config(1, device(seed), check);
        let (buf, global) = (machine.upload(0, "buf", buffer)?, machine.upload(0, "tensor", tensor)?);
        let (map, bytes) = (self.map(global.addr()), self.bytes() as u32);
        let at: [i32; 5] = std::array::from_fn(|d| self.at.get(d).copied().unwrap_or(0));
        let offsets: [u16; 3] = std::array::from_fn(|d| self.offsets.get(d).copied().unwrap_or(0));
        let mut arguments: Vec<&dyn Argument> = vec![&buf, &map, &bytes];
        arguments.extend(at.iter().map(|at| at as &dyn Argument));
        arguments.extend(offsets.iter().map(|offset| offset as &dyn Argument));
        machine.launch_with(0, &module, "k", launch(1, 32), &arguments)?;
        machine.run()?;
        Ok((buf.download()?, global.download()?))
    }

    fn fault(&self, text: &str) -> Fault {
        match self.run(text, &[0; ROOM], &vec![0; self.tensor_bytes()], 3) {
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
fn pixels_come_as_the_map_and_the_offsets_describe_them() {
    for_each_seed(tier(120, 2000), |seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(1 << 32 | seed);
        let case = Case::random(&mut rng, 3);
        let tensor = noise(&mut rng, case.tensor_bytes());
        let (got, _) = case
            .run(&Case::text(&case.load()), &[0; ROOM], &tensor, seed)
            .unwrap_or_else(|e| panic!("{case:?}: {e}"));
        let outside = if case.fill == Fill::Zeros { [0; 4] } else { [0xf7, 0x7f, 0xf7, 0x7f] };
        for (at, place, _) in case.elements(&case.offsets) {
            let expected = place.map_or(&outside[..], |place| &tensor[place..place + 4]);
            assert!(got[at..at + 4] == *expected, "{case:?}, byte {at} of the pixels");
        }
    });
}

#[test]
fn pixels_go_to_the_tensor_without_offsets() {
    let mut stored = 0;
    for_each_seed(tier(240, 4000), |seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(2 << 32 | seed);
        let case = Case::random(&mut rng, 0);
        // A store does not begin before its tensor.
        if case.at.iter().any(|at| *at < 0) {
            return;
        }
        let (mut expected, content) = (noise(&mut rng, case.tensor_bytes()), noise(&mut rng, ROOM));
        let before = expected.clone();
        for (at, place, is_last) in case.elements(&[]) {
            if let Some(place) = place {
                // The last channel takes the rest of its 16 bytes along, as far as the memory goes.
                let len = if is_last { 16 - at % 16 } else { 4 }.min(expected.len() - place);
                expected[place..place + len].copy_from_slice(&content[at..at + len]);
            }
        }
        let (_, got) = case
            .run(&Case::text(&case.store()), &content, &before, seed)
            .unwrap_or_else(|e| panic!("{case:?}: {e}"));
        assert!(got == expected, "{case:?}");
        stored += 1;
    });
    assert!(stored > 20 || replaying(), "{stored} stores");
}

/// 12 pixels of 8 channels of images of 6 by 5.
fn simple() -> Case {
    Case {
        shape: vec![16, 6, 5, 2],
        strides: vec![64, 384, 1920],
        lower: vec![-1, -1],
        upper: vec![-1, -1],
        channels: 8,
        pixels: 12,
        steps: vec![1; 4],
        swizzle: Swizzle::None,
        fill: Fill::Zeros,
        at: vec![8, -1, -1, 0],
        offsets: vec![0, 0],
    }
}

/// The map describes a convolution with 3 by 3 weights and a padding of 1: by offset (r, s), a copy
/// has for each pixel of the result the one that is multiplied with weight (r, s).
#[test]
fn a_convolution_takes_its_pixels_by_offsets() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let tensor = noise(&mut rng, simple().tensor_bytes());
    for (s, r) in (0..3).flat_map(|s| (0..3).map(move |r| (s, r))) {
        let case = Case { offsets: vec![s, r], pixels: 60, ..simple() };
        let (got, _) = case.run(&Case::text(&case.load()), &[0; ROOM], &tensor, 1).unwrap();
        let mut pixels = got.chunks_exact(32);
        for (n, p, q) in (0..2).flat_map(|n| (0..5).flat_map(move |p| (0..6).map(move |q| (n, p, q)))) {
            let (w, h) = (q + i32::from(s) - 1, p + i32::from(r) - 1);
            let expected = match (0..6).contains(&w) && (0..5).contains(&h) {
                true => &tensor[1920 * n as usize + 384 * h as usize + 64 * w as usize + 32..][..32],
                false => &[0; 32],
            };
            assert!(pixels.next() == Some(expected), "image {n}, row {p}, column {q}, weight {r}, {s}");
        }
    }
}

#[test]
fn bad_copies_of_pixels_are_faults() {
    let load = simple().load();
    // The box is from -1 to 4 in W, and from -1 to 3 in H.
    let begin =
        |place: &str| load.replace("cp.async.bulk.prefetch", &format!("{place}\ncp.async.bulk.prefetch"));
    let box_copy = load
        .replace("im2col.mbarrier", "tile.mbarrier")
        .replace("[%r2], {%h0, %h1};", "[%r2];")
        .replace("cp.async.bulk.prefetch", "// cp.async.bulk.prefetch");
    let other_rank = load
        .replace("4d.", "3d.")
        .replace("{%c0, %c1, %c2, %c3}", "{%c0, %c1, %c2}")
        .replace("{%h0, %h1}", "{%h0}");
    for (body, message) in [
        (box_copy, "a copy of a box by a tensor map of pixels"),
        (other_rank, "a copy of 3 dimensions, and the tensor map has 4"),
        (begin("add.u32 %c0, %c0, 1;"), "byte 36"),
        (begin("mov.u32 %c1, -2;"), "coordinate -2 in W, where the box of pixels is from -1 to 4"),
        (begin("mov.u32 %c2, 4;"), "coordinate 4 in H, where the box of pixels is from -1 to 3"),
    ] {
        let fault = simple().fault(&Case::text(&body));
        let FaultKind::BulkCopy { message: found } = &fault.kind else { panic!("{fault}") };
        assert!(found.contains(message), "{fault}");
    }
}

#[test]
fn stores_of_pixels_need_a_box_in_their_images() {
    let inside = Case { lower: vec![0, 1], at: vec![8, 0, 1, 0], ..simple() };
    let run =
        |case: &Case| case.run(&Case::text(&case.store()), &[0; ROOM], &vec![0; case.tensor_bytes()], 3);
    run(&inside).unwrap();
    for (lower, upper, message) in [
        ([-1, 1], [-1, -1], "a store of pixels whose box is from -1 to 4 in W, where an image has 6"),
        ([0, 1], [-1, 2], "a store of pixels whose box is from 1 to 6 in H, where an image has 5"),
    ] {
        // All of its pixels are in the first rows of an image.
        let case =
            Case { lower: lower.into(), upper: upper.into(), pixels: 2, at: vec![8, 1, 1, 0], ..simple() };
        let Err(MachineError::Fault(fault)) = run(&case) else { panic!("no fault: {case:?}") };
        let FaultKind::BulkCopy { message: found } = &fault.kind else { panic!("{fault}") };
        assert!(found.contains(message), "{fault}");
    }
}

#[test]
fn maps_of_pixels_have_bounds() {
    let map = |change: &dyn Fn(&mut Case)| {
        let mut case = simple();
        change(&mut case);
        TensorMap::of_pixels(&PixelTensor {
            address: 256,
            element_type: ElementType::F32,
            shape: &case.shape.iter().map(|&v| v as u64).collect::<Vec<_>>(),
            strides: &case.strides.iter().map(|&v| v as u64).collect::<Vec<_>>(),
            lower_corner: &case.lower,
            upper_corner: &case.upper,
            channels: case.channels as u32,
            pixels: case.pixels as u32,
            element_strides: &case.steps.iter().map(|&v| v as u32).collect::<Vec<_>>(),
            swizzle: case.swizzle,
            fill: case.fill,
        })
        .is_ok()
    };
    assert!(map(&|_| {}));
    assert!(
        map(&|case| case.pixels = 1024) && !map(&|case| case.pixels = 1025) && !map(&|case| case.pixels = 0)
    );
    assert!(
        map(&|case| case.channels = 256)
            && !map(&|case| case.channels = 260)
            && !map(&|case| case.channels = 6)
    );
    assert!(map(&|case| case.lower[0] = -128) && !map(&|case| case.lower[0] = -129));
    assert!(map(&|case| case.upper[1] = 127) && !map(&|case| case.upper[1] = 128));
    // A box has a pixel.
    assert!(map(&|case| case.upper[0] = -6) && !map(&|case| case.upper[0] = -7));
    // A copy has 228 KiB at most.
    let of_1_kibibyte = |pixels: usize| map(&|case| (case.channels, case.pixels) = (256, pixels));
    assert!(of_1_kibibyte(228) && !of_1_kibibyte(229));
    assert!(map(&|case| case.swizzle = Swizzle::Bytes32));
    assert!(!map(&|case| (case.swizzle, case.channels) = (Swizzle::Bytes32, 12)));
    assert!(!map(&|case| case.lower = vec![0]) && !map(&|case| case.steps[1] = 9));
}

#[test]
fn copies_of_pixels_are_supported() {
    for opcode in [
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.5d.shared::cta.global.im2col.mbarrier::complete_tx::bytes.L2::cache_hint",
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster",
        "cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group",
        "cp.async.bulk.prefetch.tensor.3d.L2.global.im2col",
    ] {
        assert!(supported_opcode(opcode), "{opcode}");
    }
    for opcode in [
        "cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.3d.global.shared::cta.im2col.bulk_group",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col_no_offs.mbarrier::complete_tx::bytes",
        "cp.async.bulk.prefetch.tensor.3d.L2.global.im2col_no_offs",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col::w.mbarrier::complete_tx::bytes",
    ] {
        assert!(!supported_opcode(opcode), "{opcode}");
    }
}
