//! Tensor maps.

use crate::cuda::*;

/// 128 bytes, as programs have them.
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
