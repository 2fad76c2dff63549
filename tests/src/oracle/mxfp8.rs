//! MXFP8 rows, by the OCP Microscaling Formats (MX) specification 1.0: e4m3 elements in blocks of
//! 32, each block with a scale of 8 bits, which are an exponent with a bias of 127 (UE8M0).

use super::low_latency::e4m3;

/// Elements that share a scale.
pub const MX_BLOCK: usize = 32;

/// The number that a UE8M0 byte stands for: a power of two, or NaN.
pub fn ue8m0(byte: u8) -> f64 {
    if byte == 0xff { f64::NAN } else { 2f64.powi(i32::from(byte) - 127) }
}

/// A row as MXFP8: its elements, and the scale of each block.
///
/// Section 6.3: the exponent of the scale is that of the largest power of two up to the largest
/// magnitude of the block, less that of the largest power of two in e4m3, 256 = 2^8. Elements are
/// divided by the scale and rounded to nearest even; those that are too large become the largest
/// number, 448. Scales reach from 2^-127 to 2^127.
///
/// Beyond the specification, by the library's rules: an infinite magnitude counts as 2^128, the
/// scale of a block with a NaN is NaN, and the other elements of that block count as if the NaN was
/// infinite.
pub fn mxfp8(row: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let (elements, scales): (Vec<_>, Vec<_>) = row.chunks(MX_BLOCK).map(block).unzip();
    (elements.concat(), scales)
}

fn block(block: &[f32]) -> (Vec<u8>, u8) {
    let has_nan = block.iter().any(|value| value.is_nan());
    let magnitudes =
        block.iter().map(|value| if value.is_nan() { f64::INFINITY } else { f64::from(value.abs()) });
    let largest = magnitudes.fold(0.0, f64::max);
    // The largest power of two up to the largest magnitude, of those that f32 has and the next one.
    let exponent = (-149..=128).rev().find(|&exponent| 2f64.powi(exponent) <= largest);
    let shared = exponent.map_or(-127, |exponent| (exponent - 8).clamp(-127, 127));
    let element = |value: &f32| {
        // Exact: f64 has the exponents and the digits of all quotients.
        let quotient = f64::from(*value) / 2f64.powi(shared);
        if value.is_nan() { 0x7f } else { e4m3(quotient as f32) }
    };
    (block.iter().map(element).collect(), if has_nan { 0xff } else { (shared + 127) as u8 })
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use rand::Rng;

    use super::super::from_e4m3;
    use super::*;
    use crate::payload::rng_of;

    /// The elements and the scale of a block that begins with these numbers, the others being 0.
    fn of(first: &[f32]) -> (Vec<u8>, u8) {
        let mut row = first.to_vec();
        row.resize(MX_BLOCK, 0.0);
        let (elements, scales) = mxfp8(&row);
        assert_eq!((elements.len(), scales.len()), (MX_BLOCK, 1));
        (elements[..first.len()].to_vec(), scales[0])
    }

    #[test]
    fn blocks_worked_out_by_hand() {
        // 1 / 2^-8 = 256 is 1.0 * 2^8: exponent field 15, mantissa 0.
        assert_eq!(of(&[1.0, -0.5, 0.0, -0.0]), (vec![0x78, 0xf0, 0, 0x80], 119));
        // The same scale up to the next power of two; 1.75 * 256 = 448 is the largest.
        assert_eq!(of(&[1.75, 1.99]), (vec![0x7e, 0x7e], 119));
        assert_eq!(of(&[2.0, 1.75]), (vec![0x78, 0x76], 120));
        // 1.8125 * 2^8 = 464 lies between 448 and the 480 that there is not.
        assert_eq!(of(&[1.8125]), (vec![0x7e], 119));
        assert_eq!(of(&[0.0; 3]), (vec![0; 3], 0));
        // Ties go to the even neighbour: 17 / 16 and 19 / 16 of 256 are halfway between neighbours.
        assert_eq!(of(&[17.0 / 16.0, 19.0 / 16.0]), (vec![0x78, 0x7a], 119));
    }

    #[test]
    fn the_ends_of_the_range() {
        // The smallest bf16 number is 2^-133; by the least scale, 2^-127, it is 2^-6.
        assert_eq!(of(&[f32::from_bits(1 << 16)]), (vec![0x08], 0));
        assert_eq!(of(&[2f32.powi(-119)]), (vec![0x78], 0));
        assert_eq!(of(&[2f32.powi(-118)]), (vec![0x78], 1));
        let largest = bf16::MAX.to_f32();
        assert_eq!(of(&[largest, -largest, 1.0]), (vec![0x7e, 0xfe, 0], 246));
        assert_eq!(of(&[f32::INFINITY, f32::NEG_INFINITY, largest]), (vec![0x7e, 0xfe, 0x78], 247));
        assert_eq!(of(&[f32::NAN, f32::NEG_INFINITY, largest]), (vec![0x7f, 0xfe, 0x78], 255));
    }

    /// The largest quotient is 2^8 to 2^9, where numbers are 32 apart; above 448 it is cut off.
    #[test]
    fn no_element_is_off_by_more_than_half_a_step() {
        let mut rng = rng_of(&[32]);
        for _ in 0..200 {
            let magnitude = 2f32.powi(rng.random_range(-100..100));
            let row: Vec<f32> = (0..MX_BLOCK).map(|_| rng.random_range(-1.0f32..1.0) * magnitude).collect();
            let (elements, scales) = mxfp8(&row);
            let scale = ue8m0(scales[0]);
            for (value, element) in row.iter().zip(elements) {
                let (value, number) = (f64::from(*value) / scale, f64::from(from_e4m3(element)));
                let most = if value.abs() > 448.0 { value.abs() - 448.0 } else { 16.0 };
                assert!((value - number).abs() <= most && value.abs() < 512.0, "{value} became {number}");
            }
        }
    }
}
