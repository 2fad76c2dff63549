//! Arguments of `cuTensorMapEncodeIm2col`.

use crate::cuda::*;
use crate::tensor_maps::{Bytes, GUARD, Map, Rng};

/// Arguments of `cuTensorMapEncodeIm2col`. The dimensions are C, W, H, D and N; of three there are C, W
/// and N.
#[derive(Clone, Debug)]
pub struct Pixels {
    /// The channels of a pixel are its innermost tile. The others are not used.
    pub map: Map,
    pub pixels: u32,
    /// W, H and D.
    pub lower: [i32; 3],
    pub upper: [i32; 3],
}

impl Pixels {
    /// A small tensor of f32 with `rank` dimensions, of which a copy has 24 pixels.
    pub fn plain(rank: u32) -> Pixels {
        let mut map = Map { rank, offset: GUARD as u64, ..Map::simple() };
        map.shape = [20, 6, 5, 4, 3, 1];
        map.shape[rank as usize - 1] = 3;
        map.tile[0] = 8;
        let mut pixels = Pixels { map, pixels: 24, lower: [0; 3], upper: [0; 3] };
        pixels.lay_out();
        pixels
    }

    pub fn lay_out(&mut self) {
        self.map.lay_out();
    }

    /// Dimensions of a pixel's place in an image.
    pub fn axes(&self) -> usize {
        self.map.rank as usize - 2
    }

    /// The 128 bytes for a tensor that is at its offset from `address`, or the code of the driver.
    pub fn bytes_at(&self, address: u64) -> Result<Vec<u8>, Code> {
        let mut map = Bytes([0; 128]);
        match self.encode_at(&raw mut map as usize, address) {
            0 => Ok(map.0.to_vec()),
            code => Err(code),
        }
    }

    fn encode_at(&self, to: usize, address: u64) -> Code {
        let map = &self.map;
        cu!(cuTensorMapEncodeIm2col(
            to => usize, map.data_type => i32, map.rank => u32, address + map.offset => u64,
            map.shape.as_ptr() => *const u64, map.strides.as_ptr() => *const u64,
            self.lower.as_ptr() => *const i32, self.upper.as_ptr() => *const i32, map.tile[0] => u32,
            self.pixels => u32, map.steps.as_ptr() => *const u32, map.interleave => i32, map.swizzle => i32,
            map.promotion => i32, map.fill => i32,
        ))
    }

    /// A map that is right, of a tensor that is small.
    pub fn random(rng: &mut Rng) -> Pixels {
        let mut map = Map::random(rng);
        map.rank = rng.from(3, 5) as u32;
        let axes = map.rank as usize - 2;
        for d in 1..=axes {
            map.shape[d] = rng.from(1, 6) as u64;
            map.steps[d] = rng.of(&[1, 1, 1, 2, 3]);
        }
        map.shape[axes + 1] = rng.from(1, 3) as u64;
        map.steps[axes + 1] = 1;
        let mut pixels = Pixels { map, pixels: 0, lower: [0; 3], upper: [0; 3] };
        let row = match pixels.map.swizzle {
            0 => pixels.map.tile[0] * pixels.map.bytes() as u32,
            swizzle => 16 << swizzle,
        };
        pixels.pixels = rng.from(1, i64::from(6144 / row).min(96)) as u32;
        for axis in 0..axes {
            let length = pixels.map.shape[axis + 1] as i64;
            let lower = rng.from(-3, 2.min(length - 1));
            pixels.lower[axis] = lower as i32;
            // The last place of the box is not before the first.
            pixels.upper[axis] = rng.from((lower - (length - 1)).max(-3), 3) as i32;
        }
        pixels.lay_out();
        pixels
    }
}
