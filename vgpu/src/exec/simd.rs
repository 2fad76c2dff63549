//! Two shapes of data movement that the compiler does not vectorise well by itself, with SSE2 where there is SSE2.
//!
//! Left alone it loads a register row at odd offsets right after it was stored in aligned pieces; the store buffer
//! cannot forward that, and a loop that also streams through memory then runs at half its speed.

/// The top bit of each of 32 words.
#[inline(always)]
pub(crate) fn top_bits(words: &[u32; 32]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128, _mm_movemask_ps};
        let mut mask = 0;
        for (c, four) in words.as_chunks::<4>().0.iter().enumerate() {
            // SAFETY: both types are 16 plain bytes; SSE2 belongs to every x86-64.
            let bits = unsafe { _mm_movemask_ps(std::mem::transmute::<[u32; 4], __m128>(*four)) };
            mask |= (bits as u32) << (4 * c);
        }
        mask
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        words.iter().enumerate().fold(0, |mask, (i, w)| mask | (w >> 31) << i)
    }
}

/// Exchanges rows and columns.
#[inline(always)]
pub(crate) fn transpose(m: [[u32; 4]; 4]) -> [[u32; 4]; 4] {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{
            __m128i, _mm_unpackhi_epi32, _mm_unpackhi_epi64, _mm_unpacklo_epi32, _mm_unpacklo_epi64,
        };
        // SAFETY: arrays and vectors are the same 64 plain bytes; SSE2 belongs to every x86-64.
        unsafe {
            let [a, b, c, d] = std::mem::transmute::<[[u32; 4]; 4], [__m128i; 4]>(m);
            let (ab_lo, ab_hi) = (_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
            let (cd_lo, cd_hi) = (_mm_unpacklo_epi32(c, d), _mm_unpackhi_epi32(c, d));
            std::mem::transmute::<[__m128i; 4], [[u32; 4]; 4]>([
                _mm_unpacklo_epi64(ab_lo, cd_lo),
                _mm_unpackhi_epi64(ab_lo, cd_lo),
                _mm_unpacklo_epi64(ab_hi, cd_hi),
                _mm_unpackhi_epi64(ab_hi, cd_hi),
            ])
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        std::array::from_fn(|i| std::array::from_fn(|k| m[k][i]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn against_the_definition() {
        let mut r = crate::rng::Rng::new(3);
        let words: [u32; 32] = std::array::from_fn(|_| r.next() as u32);
        let want = words.iter().enumerate().fold(0, |mask, (i, w)| mask | (w >> 31) << i);
        assert_eq!(top_bits(&words), want);
        let m: [[u32; 4]; 4] = std::array::from_fn(|i| std::array::from_fn(|k| (10 * i + k) as u32));
        let t = transpose(m);
        for i in 0..4 {
            for k in 0..4 {
                assert_eq!(t[i][k], m[k][i]);
            }
        }
    }
}
