//! Shapes of data movement that the compiler does not vectorise well by itself, with SSE2 or AVX2
//! where there is that.
//!
//! Left alone, the compiler loads a register row at odd offsets right after it was stored in
//! aligned pieces. The store buffer cannot forward that, and a loop that also streams through
//! memory then runs at half its speed.

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

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
fn transpose(m: [[u32; 4]; 4]) -> [[u32; 4]; 4] {
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

/// A lane of 32 or 64 bits.
pub(super) trait Spread: Copy {
    /// Sets the lanes `k` of the 64 bytes at `at`.
    ///
    /// # Safety
    /// The processor must have AVX-512F, and `at` be valid for 64 bytes.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe fn spread(at: *mut Self, v: Self, k: u32);
}

/// Sets the lanes `m` of a row to `v`, in pieces of 64 bytes where the processor has such: compiled
/// code that reads a row soon after it was written in smaller pieces waits for these.
#[inline(always)]
pub(super) fn spread<T: Spread>(row: &mut [T; 32], v: T, m: u32) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if is_x86_feature_detected!("avx512f") {
        let lanes = 64 / size_of::<T>();
        for (piece, part) in row.chunks_exact_mut(lanes).enumerate() {
            let k = m >> (piece * lanes) & (u32::MAX >> (32 - lanes));
            if k != 0 {
                // SAFETY: this processor has AVX-512F, and a piece has 64 bytes.
                unsafe { T::spread(part.as_mut_ptr(), v, k) };
            }
        }
        return;
    }
    super::lanes::lanes(m).for_each(|i| row[i] = v);
}

macro_rules! spread {
    ($t:ty, $broadcast:literal, $move:literal) => {
        impl Spread for $t {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            #[inline(always)]
            unsafe fn spread(at: *mut $t, v: $t, k: u32) {
                // SAFETY: the caller vouches for the processor and the 64 bytes, which are read and
                // written. Lanes outside of `k` take what is there.
                unsafe {
                    std::arch::asm!(
                        "kmovw k1, {keep:e}",
                        $broadcast,
                        concat!($move, " zmm16{{k1}}, [{at}]"),
                        concat!($move, " [{at}], zmm16"),
                        keep = in(reg) !k,
                        v = in(reg) v,
                        at = in(reg) at,
                        out("zmm16") _,
                        out("k1") _,
                        options(nostack, preserves_flags),
                    );
                }
            }
        }
    };
}
spread!(u32, "vpbroadcastd zmm16, {v:e}", "vmovdqu32");
spread!(u64, "vpbroadcastq zmm16, {v}", "vmovdqu64");

/// A lane's address.
pub(super) trait Address: Copy {
    /// Whether all lanes of a row are equal, and whether each is `1 << shift` more than the one
    /// before.
    fn compare(row: &[Self; 32], shift: u32) -> (bool, bool);
}

macro_rules! address {
    ($t:ty, $lanes:literal, $compare:ident, $set:ident, $shift:ident, $add:ident) => {
        impl Address for $t {
            #[inline(always)]
            fn compare(row: &[$t; 32], shift: u32) -> (bool, bool) {
                #[cfg(target_arch = "x86_64")]
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: this processor has AVX2.
                    return unsafe { $compare(row, shift) };
                }
                let (mut apart, mut scattered) = (0, 0);
                for (lane, x) in (0..).zip(row) {
                    apart |= x ^ row[0];
                    scattered |= x ^ row[0].wrapping_add(lane << shift);
                }
                (apart == 0, scattered == 0)
            }
        }

        /// [`Address::compare`] by whole registers: left alone, the compiler compares and packs
        /// each lane.
        #[cfg(target_arch = "x86_64")]
        #[inline]
        #[target_feature(enable = "avx2")]
        fn $compare(row: &[$t; 32], shift: u32) -> (bool, bool) {
            use std::arch::x86_64::{
                _mm_cvtsi32_si128, _mm256_loadu_si256, _mm256_or_si256, _mm256_setzero_si256,
                _mm256_testz_si256, _mm256_xor_si256, $add, $set, $shift,
            };
            let lanes: [$t; $lanes] = std::array::from_fn(|lane| lane as $t);
            // SAFETY: the array has 32 bytes.
            let lanes = unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) };
            let first = $set(row[0] as _);
            let mut expected = $add(first, $shift(lanes, _mm_cvtsi32_si128(shift as i32)));
            let step = $set($lanes << shift);
            let (mut apart, mut scattered) = (_mm256_setzero_si256(), _mm256_setzero_si256());
            for part in row.as_chunks::<$lanes>().0 {
                // SAFETY: a chunk has 32 bytes.
                let part = unsafe { _mm256_loadu_si256(part.as_ptr().cast()) };
                apart = _mm256_or_si256(apart, _mm256_xor_si256(part, first));
                scattered = _mm256_or_si256(scattered, _mm256_xor_si256(part, expected));
                expected = $add(expected, step);
            }
            let none = |all| _mm256_testz_si256(all, all) != 0;
            (none(apart), none(scattered))
        }
    };
}
address!(u32, 8, compare_narrow, _mm256_set1_epi32, _mm256_sll_epi32, _mm256_add_epi32);
address!(u64, 4, compare_wide, _mm256_set1_epi64x, _mm256_sll_epi64, _mm256_add_epi64);

/// Prefetches `bytes` bytes from `p` on. Any address is allowed.
#[inline(always)]
pub(super) fn prefetch(p: *const u8, bytes: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for at in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction. It is a hint, and no access.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(at).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (p, bytes);
}

/// Sixteen bytes that other threads may access meanwhile. Inline assembly leaves such a race to the
/// processor, which reads each word at once; a plain access of Rust would be undefined behaviour.
///
/// # Safety
/// `p` must be valid for 16 bytes and aligned to words.
#[inline(always)]
unsafe fn read_four(p: *const [u32; 4]) -> [u32; 4] {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let four: std::arch::x86_64::__m128i;
        // SAFETY: the caller vouches for 16 bytes at `p`; every x86-64 processor has SSE2, and the
        // types are as long.
        unsafe {
            std::arch::asm!("movdqu {four}, [{p}]", four = out(xmm_reg) four, p = in(reg) p,
                options(nostack, preserves_flags, readonly));
            std::mem::transmute(four)
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller vouches for 16 bytes at `p`, aligned to words.
    [0, 1, 2, 3].map(|e| unsafe { AtomicU32::from_ptr(p.cast_mut().cast::<u32>().add(e)) }.load(Relaxed))
}

/// The same for a store.
///
/// # Safety
/// As for [`read_four`].
#[inline(always)]
unsafe fn write_four(p: *mut [u32; 4], four: [u32; 4]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as in `read_four`.
    unsafe {
        let four: std::arch::x86_64::__m128i = std::mem::transmute(four);
        std::arch::asm!("movdqu [{p}], {four}", four = in(xmm_reg) four, p = in(reg) p,
            options(nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    for (e, word) in four.into_iter().enumerate() {
        // SAFETY: as in `read_four`.
        unsafe { AtomicU32::from_ptr(p.cast::<u32>().add(e)) }.store(word, Relaxed);
    }
}

/// Whether [`read_pieces`] and [`write_pieces`] access elements of 8 bytes at once.
pub(super) const WHOLE_ELEMENTS: bool = cfg!(all(target_arch = "x86_64", not(miri)));

/// A value that other threads may access meanwhile, 16 bytes at a time.
///
/// # Safety
/// `p` must be valid for a `T`, and aligned to words. A `T` is multiples of 16 plain bytes.
#[inline(always)]
pub(super) unsafe fn read_pieces<T>(p: *const T) -> T {
    let mut value = std::mem::MaybeUninit::<T>::uninit();
    for piece in 0..size_of::<T>() / 16 {
        // SAFETY: the piece lies in the value.
        unsafe {
            value
                .as_mut_ptr()
                .cast::<[u32; 4]>()
                .add(piece)
                .write_unaligned(read_four(p.cast::<[u32; 4]>().add(piece)))
        };
    }
    // SAFETY: all pieces have been written, and any bits are a `T`.
    unsafe { value.assume_init() }
}

/// The same for a store.
///
/// # Safety
/// As for [`read_pieces`].
#[inline(always)]
pub(super) unsafe fn write_pieces<T>(p: *mut T, value: T) {
    for piece in 0..size_of::<T>() / 16 {
        // SAFETY: the piece lies in the value.
        unsafe {
            write_four(
                p.cast::<[u32; 4]>().add(piece),
                (&raw const value).cast::<[u32; 4]>().add(piece).read_unaligned(),
            )
        };
    }
}

/// Loads 32 vectors of four words; word `e` of each goes to row `e`.
///
/// # Safety
/// `p` must be valid for 512 bytes and aligned to words, and each of the rows valid; they may be
/// the same.
#[inline(always)]
pub(crate) unsafe fn load_fours(p: *const [[u32; 4]; 4], rows: [*mut [u32; 32]; 4]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the caller vouches for the pointers, and this processor has AVX2.
        return unsafe { avx2::load_fours(p.cast(), rows) };
    }
    for c in 0..8 {
        // SAFETY: the caller vouches for the 8 blocks of 64 bytes.
        let four = transpose(unsafe { read_pieces(p.add(c)) });
        for (row, values) in rows.into_iter().zip(four) {
            // SAFETY: the caller vouches for the rows, each 8 times 16 bytes.
            unsafe { row.cast::<[u32; 4]>().add(c).write(values) };
        }
    }
}

/// Stores 32 vectors of four words, of which word `e` comes from row `e`.
///
/// # Safety
/// `p` must be valid for 512 bytes and aligned to words.
#[inline(always)]
pub(crate) unsafe fn store_fours(p: *mut [[u32; 4]; 4], rows: [&[u32; 32]; 4]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the caller vouches for the pointer, and this processor has AVX2.
        return unsafe { avx2::store_fours(p.cast(), rows) };
    }
    for c in 0..8 {
        let four = transpose(rows.map(|row| row.as_chunks::<4>().0[c]));
        // SAFETY: the caller vouches for the 8 blocks of 64 bytes.
        unsafe { write_pieces(p.add(c), four) };
    }
}

/// The same, past the caches. Other processors observe these stores in any order before a
/// [`drain`]; this processor observes them as ordinary stores.
///
/// # Safety
/// `p` must be valid for 512 bytes and aligned to 64.
#[inline(always)]
pub(crate) unsafe fn stream_fours(p: *mut [[u32; 4]; 4], rows: [&[u32; 32]; 4]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the caller vouches for the pointer, and this processor has AVX2.
        return unsafe { avx2::stream_fours(p.cast(), rows) };
    }
    // SAFETY: the caller vouches for the pointer.
    unsafe { store_fours(p, rows) }
}

/// Orders the stores of [`stream_fours`] before all stores behind them.
#[inline(always)]
pub(crate) fn drain() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // SAFETY: the instruction belongs to every x86-64 processor.
        unsafe { std::arch::asm!("sfence", options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _mm256_loadu_si256, _mm256_permute2x128_si256, _mm256_storeu_si256, _mm256_unpackhi_epi32,
        _mm256_unpackhi_epi64, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
    };

    /// Exchanges rows and columns of two blocks of four by four words, one in each half of the
    /// registers.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn transpose([a, b, c, d]: [__m256i; 4]) -> [__m256i; 4] {
        let (ab_lo, ab_hi) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd_lo, cd_hi) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab_lo, cd_lo),
            _mm256_unpackhi_epi64(ab_lo, cd_lo),
            _mm256_unpacklo_epi64(ab_hi, cd_hi),
            _mm256_unpackhi_epi64(ab_hi, cd_hi),
        ]
    }

    /// 32 bytes that other threads may access meanwhile; see [`super::read_four`].
    ///
    /// # Safety
    /// `p` must be valid for them.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn read(p: *const __m256i) -> __m256i {
        let v;
        // SAFETY: the caller vouches for the pointer, and the processor has AVX2.
        unsafe {
            std::arch::asm!("vmovdqu {v}, [{p}]", v = out(ymm_reg) v, p = in(reg) p,
                options(nostack, preserves_flags, readonly));
        }
        v
    }

    /// The same for a store.
    ///
    /// # Safety
    /// `p` must be valid for 32 bytes.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn write(p: *mut __m256i, v: __m256i) {
        // SAFETY: as in `read`.
        unsafe {
            std::arch::asm!("vmovdqu [{p}], {v}", v = in(ymm_reg) v, p = in(reg) p,
                options(nostack, preserves_flags));
        }
    }

    /// See [`super::load_fours`].
    ///
    /// # Safety
    /// The same.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn load_fours(p: *const __m256i, rows: [*mut [u32; 32]; 4]) {
        for c in 0..4 {
            // SAFETY: the caller vouches for 16 times 32 bytes.
            let two = |k: usize| unsafe { read(p.add(4 * c + k)) };
            let [v01, v23, v45, v67] = [two(0), two(1), two(2), two(3)];
            let words = transpose([
                _mm256_permute2x128_si256::<0x20>(v01, v45),
                _mm256_permute2x128_si256::<0x31>(v01, v45),
                _mm256_permute2x128_si256::<0x20>(v23, v67),
                _mm256_permute2x128_si256::<0x31>(v23, v67),
            ]);
            for (row, eight) in rows.into_iter().zip(words) {
                // SAFETY: the caller vouches for the rows, each 4 times 32 bytes.
                unsafe { _mm256_storeu_si256(row.cast::<__m256i>().add(c), eight) };
            }
        }
    }

    /// See [`super::store_fours`].
    ///
    /// # Safety
    /// The same.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn store_fours(p: *mut __m256i, rows: [&[u32; 32]; 4]) {
        for c in 0..4 {
            for (k, two) in eight_vectors(rows, c).into_iter().enumerate() {
                // SAFETY: the caller vouches for 16 times 32 bytes.
                unsafe { write(p.add(4 * c + k), two) };
            }
        }
    }

    /// See [`super::stream_fours`].
    ///
    /// # Safety
    /// The same.
    #[cfg(not(miri))]
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stream_fours(p: *mut __m256i, rows: [&[u32; 32]; 4]) {
        for c in 0..4 {
            for (k, two) in eight_vectors(rows, c).into_iter().enumerate() {
                // SAFETY: the caller vouches for 16 times 32 bytes, aligned to 64. Such a store
                // differs from others only in the order in which other processors observe it.
                unsafe {
                    std::arch::asm!(
                        "vmovntdq [{at}], {two}",
                        at = in(reg) p.add(4 * c + k),
                        two = in(ymm_reg) two,
                        options(nostack, preserves_flags),
                    );
                }
            }
        }
    }

    /// The vectors `8 * c` to `8 * c + 7`, two in each register.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn eight_vectors(rows: [&[u32; 32]; 4], c: usize) -> [__m256i; 4] {
        // SAFETY: a chunk has 32 bytes.
        let eight = |e: usize| unsafe {
            _mm256_loadu_si256(rows[e].as_chunks::<8>().0[c].as_ptr().cast::<__m256i>())
        };
        let [v04, v15, v26, v37] = transpose([eight(0), eight(1), eight(2), eight(3)]);
        [
            _mm256_permute2x128_si256::<0x20>(v04, v15),
            _mm256_permute2x128_si256::<0x20>(v26, v37),
            _mm256_permute2x128_si256::<0x31>(v04, v15),
            _mm256_permute2x128_si256::<0x31>(v26, v37),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn against_the_definition() {
        let mut r = crate::seeds::Rng::new(3);
        let words: [u32; 32] = std::array::from_fn(|_| r.next() as u32);
        let want = words.iter().enumerate().fold(0, |mask, (i, w)| mask | (w >> 31) << i);
        assert_eq!(top_bits(&words), want);
        let mut vectors: [[u32; 4]; 32] = std::array::from_fn(|_| std::array::from_fn(|_| r.next() as u32));
        let (mut rows, mut back) = ([[0; 32]; 4], [[0; 4]; 32]);
        // SAFETY: all are arrays of 512 bytes in all, or 128 a row.
        unsafe {
            load_fours(vectors.as_mut_ptr().cast_const().cast(), rows.each_mut().map(|row| &raw mut *row));
            store_fours(back.as_mut_ptr().cast(), rows.each_ref());
        }
        assert!((0..32).all(|i| (0..4).all(|e| rows[e][i] == vectors[i][e])));
        assert_eq!(back, vectors);
        #[repr(align(64))]
        struct Line([[u32; 4]; 32]);
        let mut past_caches = Line([[0; 4]; 32]);
        // SAFETY: the array has 512 bytes and is aligned to 64.
        unsafe { stream_fours(past_caches.0.as_mut_ptr().cast(), rows.each_ref()) };
        drain();
        assert_eq!(past_caches.0, vectors);
        let m: [[u32; 4]; 4] = std::array::from_fn(|i| std::array::from_fn(|k| (10 * i + k) as u32));
        for m in [u32::MAX, 1 << 9, 0x8001_0300, 0] {
            let (mut narrow, mut wide) = (words, words.map(u64::from));
            spread(&mut narrow, 7, m);
            spread(&mut wide, 7, m);
            for i in 0..32 {
                let want = if m >> i & 1 != 0 { 7 } else { words[i] };
                assert_eq!((narrow[i], wide[i]), (want, want.into()));
            }
        }
        for shift in 0..5 {
            let row: [u64; 32] = std::array::from_fn(|i| (u64::MAX - 40).wrapping_add((i as u64) << shift));
            let narrow = row.map(|v| v as u32);
            assert_eq!(
                (u64::compare(&row, shift), u32::compare(&narrow, shift)),
                ((false, true), (false, true))
            );
            assert_eq!(
                (u64::compare(&[7; 32], shift), u32::compare(&[7; 32], shift)),
                ((true, false), (true, false))
            );
            for i in 1..32 {
                let (mut row, mut narrow, mut one, mut narrow_one) = (row, narrow, [7; 32], [7; 32]);
                (row[i], one[i]) = (row[i] ^ 1 << (2 * i), 7 ^ 1 << (2 * i));
                (narrow[i], narrow_one[i]) = (narrow[i] ^ 1 << i, 7 ^ 1 << i);
                assert_eq!(
                    (u64::compare(&row, shift), u32::compare(&narrow, shift)),
                    ((false, false), (false, false))
                );
                assert_eq!(
                    (u64::compare(&one, shift), u32::compare(&narrow_one, shift)),
                    ((false, false), (false, false))
                );
            }
        }
        let t = transpose(m);
        for i in 0..4 {
            for k in 0..4 {
                assert_eq!(t[i][k], m[k][i]);
            }
        }
    }
}
