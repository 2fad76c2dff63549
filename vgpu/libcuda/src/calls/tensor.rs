//! Tensor maps.

use std::ffi::{c_int, c_uint};

use epoxide_vgpu::{ElementType, Fill, PixelTensor, Swizzle, TensorMap, TensorMapError, TiledTensor};

use super::api;
use crate::abi::*;
use crate::symbols::report_once;

api! {
    /// Describes a tensor for copies of boxes. Interleaved layouts are not supported. The hint for the
    /// cache changes nothing.
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
        let Layout { element_type, swizzle, fill } = Layout::new(data_type, swizzle, promotion, fill)?;
        // A driver requires the list of strides for one dimension as well, though it is empty.
        if strides.is_null() {
            return Err(INVALID_VALUE);
        }
        let (shape, strides) = (shape.get_all(rank)?, strides.get_all(rank - 1)?);
        let (tile, element_strides) = (tile.get_all(rank)?, element_strides.get_all(rank)?);
        check_interleave(interleave, rank)?;
        let tensor = TiledTensor {
            address,
            element_type,
            shape: &shape,
            strides: &strides,
            tile: &tile,
            element_strides: &element_strides,
            swizzle,
            fill,
        };
        map.put(made(TensorMap::tiled(&tensor))?)
    }

    /// Describes a tensor of images for copies of pixels, as above.
    fn cuTensorMapEncodeIm2col(
        map: Out<TensorMap>,
        data_type: c_int,
        rank: c_uint,
        address: CUdeviceptr,
        shape: In<u64>,
        strides: In<u64>,
        lower_corner: In<c_int>,
        upper_corner: In<c_int>,
        channels: c_uint,
        pixels: c_uint,
        element_strides: In<c_uint>,
        interleave: c_int,
        swizzle: c_int,
        promotion: c_int,
        fill: c_int,
    ) {
        let rank = usize::try_from(rank).ok().filter(|rank| (3..=5).contains(rank)).ok_or(INVALID_VALUE)?;
        let Layout { element_type, swizzle, fill } = Layout::new(data_type, swizzle, promotion, fill)?;
        let (shape, strides) = (shape.get_all(rank)?, strides.get_all(rank - 1)?);
        let element_strides = element_strides.get_all(rank)?;
        let (lower_corner, upper_corner) = (lower_corner.get_all(rank - 2)?, upper_corner.get_all(rank - 2)?);
        check_interleave(interleave, rank)?;
        let tensor = PixelTensor {
            address,
            element_type,
            shape: &shape,
            strides: &strides,
            lower_corner: &lower_corner,
            upper_corner: &upper_corner,
            channels,
            pixels,
            element_strides: &element_strides,
            swizzle,
            fill,
        };
        map.put(made(TensorMap::of_pixels(&tensor))?)
    }
}

/// Arguments that the kinds of tensor maps share.
struct Layout {
    element_type: ElementType,
    swizzle: Swizzle,
    fill: Fill,
}

impl Layout {
    fn new(data_type: c_int, swizzle: c_int, promotion: c_int, fill: c_int) -> Result<Self, CUresult> {
        // An H200 has no types beyond.
        let data_type = usize::try_from(data_type).ok().and_then(|number| ElementType::ALL.get(number));
        let element_type = *data_type.ok_or(INVALID_VALUE)?;
        let swizzle = match swizzle {
            0 => Swizzle::None,
            1 => Swizzle::Bytes32,
            2 => Swizzle::Bytes64,
            3 => Swizzle::Bytes128,
            _ => return Err(INVALID_VALUE),
        };
        let fill = match fill {
            0 => Fill::Zeros,
            1 => Fill::Nan,
            _ => return Err(INVALID_VALUE),
        };
        if !(0..=3).contains(&promotion) {
            return Err(INVALID_VALUE);
        }
        Ok(Layout { element_type, swizzle, fill })
    }
}

fn check_interleave(interleave: c_int, rank: usize) -> Result<(), CUresult> {
    match interleave {
        0 => Ok(()),
        1 | 2 if rank >= 3 => {
            report_once("an interleaved tensor map");
            Err(NOT_SUPPORTED)
        }
        _ => Err(INVALID_VALUE),
    }
}

fn made(map: Result<TensorMap, TensorMapError>) -> Result<TensorMap, CUresult> {
    map.map_err(|error| {
        eprintln!("libcuda of virtual GPUs: {error}");
        INVALID_VALUE
    })
}
