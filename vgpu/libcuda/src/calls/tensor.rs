//! Tensor maps.

use std::ffi::{c_int, c_uint};

use epoxide_vgpu::{Swizzle, TensorMap, TiledTensor};

use super::api;
use crate::abi::*;
use crate::symbols::report_once;

/// Bytes of the elements of a `CU_TENSOR_MAP_DATA_TYPE_*`. Copies of tf32 change no bits. `None` for
/// types whose copies flush numbers, which are not supported. An H200 has no types beyond.
fn element_bytes(data_type: c_int) -> Res<Option<u32>> {
    Ok(match data_type {
        0 => Some(1),
        1 | 6 | 9 => Some(2),
        2 | 3 | 7 | 11 => Some(4),
        4 | 5 | 8 => Some(8),
        10 | 12 => None,
        _ => return Err(INVALID_VALUE),
    })
}

api! {
    /// Describes a tensor for copies of boxes. Interleaved layouts, fills with NaN, types whose copies
    /// change numbers, and rows that are shorter than those of the swizzle are not supported. The hint for the cache changes nothing.
    fn cuTensorMapEncodeTiled(
        map: Out<TensorMap>,
        data_type: c_int,
        rank: c_uint,
        address: CUdeviceptr,
        shape: In<u64>,
        strides: In<u64>,
        tile: In<c_uint>,
        element_strides: In<c_uint>,
        interleave: c_int,
        swizzle: c_int,
        promotion: c_int,
        fill: c_int,
    ) {
        let rank = usize::try_from(rank).ok().filter(|rank| (1..=5).contains(rank)).ok_or(INVALID_VALUE)?;
        let swizzle = match swizzle {
            0 => Swizzle::None,
            1 => Swizzle::Bytes32,
            2 => Swizzle::Bytes64,
            3 => Swizzle::Bytes128,
            _ => return Err(INVALID_VALUE),
        };
        // A driver wants the list of strides for one dimension as well, though it is empty.
        if !(0..=3).contains(&promotion) || !(0..=1).contains(&fill) || strides.is_null() {
            return Err(INVALID_VALUE);
        }
        let element_bytes = element_bytes(data_type)?;
        let (shape, strides) = (shape.get_all(rank)?, strides.get_all(rank - 1)?);
        let (tile, element_strides) = (tile.get_all(rank)?, element_strides.get_all(rank)?);
        // A driver takes several rows that are shorter than those of the swizzle.
        let row = u64::from(tile[0]) * u64::from(element_bytes.unwrap_or(0));
        let is_short = swizzle != Swizzle::None
            && row < 16 << swizzle as u32
            && tile[1..].iter().any(|&len| len > 1);
        let (Some(element_bytes), 0, 0, false) = (element_bytes, interleave, fill, is_short) else {
            report_once("this kind of tensor map");
            return Err(NOT_SUPPORTED);
        };
        let tensor = TiledTensor {
            address,
            element_bytes,
            shape: &shape,
            strides: &strides,
            tile: &tile,
            element_strides: &element_strides,
            swizzle,
        };
        let made = TensorMap::tiled(&tensor).map_err(|error| {
            eprintln!("libcuda of virtual GPUs: {error}");
            INVALID_VALUE
        })?;
        map.put(made)
    }
}
