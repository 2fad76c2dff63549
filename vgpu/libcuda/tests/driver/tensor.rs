//! Tensor maps.

use crate::cuda::*;

/// 128 bytes, in the alignment that programs use.
#[repr(C, align(64))]
struct Map([u8; 128]);

/// The code of `cuTensorMapEncodeTiled` for a tensor of words with 4 rows of 5 and a box of 2 rows
/// of 4.
fn encode(
    map: &mut Map,
    data_type: i32,
    shape: &[u64; 2],
    [interleave, swizzle, fill]: [i32; 3],
    addr: u64,
) -> Code {
    let (stride, tile, steps) = (32u64, [4u32, 2], [1u32, 1]);
    let shape = shape.as_ptr();
    cu!(cuTensorMapEncodeTiled(
        map => *mut Map, data_type => i32, 2 => u32, addr => u64, shape => *const u64, &stride => *const u64,
        tile.as_ptr() => *const u32, steps.as_ptr() => *const u32, interleave => i32, swizzle => i32, 2 => i32,
        fill => i32,
    ))
}

#[test]
fn a_kernel_copies_the_box_of_a_tensor_map() {
    let _context = Context::on(0);
    let words: Vec<u32> = (0..32).collect();
    let (mut tensor, mut out) = (upload(&words), alloc(8));
    let mut map = Map([0; 128]);
    assert_eq!(encode(&mut map, 2, &[5, 4], [0; 3], tensor), 0);
    let mut params = [(&raw mut out).cast(), (&raw mut map).cast()];
    assert_eq!(Module::load().try_launch("copy_box", 0, [1, 1], &mut params), 0);
    // From column 4 and row 1 on; what is behind the fifth column is 0.
    assert_eq!(download(out, 8), [12, 0, 0, 0, 20, 0, 0, 0]);
    tensor += 4;
    for (data_type, shape, modes, addr, code) in [
        (2, [5, 4], [0; 3], tensor, INVALID_VALUE),
        (2, [0, 4], [0; 3], tensor - 4, INVALID_VALUE),
        (99, [5, 4], [0; 3], tensor - 4, INVALID_VALUE),
        (2, [5, 4], [0, 9, 0], tensor - 4, INVALID_VALUE),
        (2, [5, 4], [1, 0, 0], tensor - 4, INVALID_VALUE),
        (2, [5, 4], [0, 0, 1], tensor - 4, INVALID_VALUE),
        (7, [5, 4], [0, 0, 1], tensor - 4, 0),
        (12, [5, 4], [0; 3], tensor - 4, 0),
    ] {
        assert_eq!(encode(&mut map, data_type, &shape, modes, addr), code, "{data_type} {shape:?} {modes:?}");
    }
}

/// Arguments of `cuTensorMapEncodeIm2col` for two images of three pixels with four words.
struct Pixels {
    rank: u32,
    lower: i32,
    upper: i32,
    channels: u32,
    count: u32,
    steps: [u32; 3],
    interleave: i32,
}

const PIXELS: Pixels =
    Pixels { rank: 3, lower: -1, upper: -1, channels: 4, count: 2, steps: [1; 3], interleave: 0 };

impl Pixels {
    fn encode(&self, map: &mut Map, addr: u64) -> Code {
        let (shape, strides) = ([4u64, 3, 2], [16u64, 48]);
        cu!(cuTensorMapEncodeIm2col(
            map => *mut Map, 2 => i32, self.rank => u32, addr => u64, shape.as_ptr() => *const u64,
            strides.as_ptr() => *const u64, &self.lower => *const i32, &self.upper => *const i32,
            self.channels => u32, self.count => u32, self.steps.as_ptr() => *const u32,
            self.interleave => i32, 0 => i32, 0 => i32, 0 => i32,
        ))
    }
}

#[test]
fn a_kernel_copies_the_pixels_of_a_tensor_map() {
    let _context = Context::on(0);
    let words: Vec<u32> = (0..24).collect();
    let (tensor, mut out) = (upload(&words), alloc(8));
    let mut map = Map([0; 128]);
    assert_eq!(PIXELS.encode(&mut map, tensor), 0);
    let mut params = [(&raw mut out).cast(), (&raw mut map).cast()];
    assert_eq!(Module::load().try_launch("copy_pixels", 0, [1, 1], &mut params), 0);
    // The last place of the box of the first image, then the first of the next: 1 and -1. By the offset
    // of 2 these are a pixel outside of its image, and the second of the next.
    assert_eq!(download(out, 8), [0, 0, 0, 0, 16, 17, 18, 19]);
    // The bounds of the manual.
    for (pixels, code) in [
        (Pixels { rank: 2, ..PIXELS }, INVALID_VALUE),
        (Pixels { rank: 6, ..PIXELS }, INVALID_VALUE),
        (Pixels { lower: -32_768, ..PIXELS }, 0),
        (Pixels { lower: -32_769, ..PIXELS }, INVALID_VALUE),
        (Pixels { upper: 32_767, ..PIXELS }, 0),
        (Pixels { upper: 32_768, ..PIXELS }, INVALID_VALUE),
        // A box of one place, and of none.
        (Pixels { upper: -3, ..PIXELS }, 0),
        (Pixels { upper: -4, ..PIXELS }, INVALID_VALUE),
        (Pixels { channels: 256, ..PIXELS }, 0),
        (Pixels { channels: 260, ..PIXELS }, INVALID_VALUE),
        (Pixels { channels: 0, ..PIXELS }, INVALID_VALUE),
        (Pixels { count: 1024, channels: 16, ..PIXELS }, 0),
        (Pixels { count: 1025, ..PIXELS }, INVALID_VALUE),
        (Pixels { steps: [1, 8, 1], ..PIXELS }, 0),
        (Pixels { steps: [1, 9, 1], ..PIXELS }, INVALID_VALUE),
        (Pixels { steps: [1, 0, 1], ..PIXELS }, INVALID_VALUE),
        (Pixels { interleave: 3, ..PIXELS }, INVALID_VALUE),
    ] {
        let Pixels { rank, lower, upper, channels, count, steps, interleave } = pixels;
        let text = format!("{rank} {lower} {upper} {channels} {count} {steps:?} {interleave}");
        assert_eq!(pixels.encode(&mut map, tensor), code, "{text}");
    }
}
