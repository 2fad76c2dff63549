//! Loops, and asserts on structs that host and device share.

/// Runs a block for each `step`-th index of a range, for each one where there is no step. The range
/// is evaluated once, the step in each turn. Indices are numbers of any type.
///
/// ```
/// let mut seen = [0; 10];
/// epoxide_simt::stride!(i in 2..10, 3 => { seen[i] += 1 });
/// assert_eq!(seen, [0, 0, 1, 0, 0, 1, 0, 0, 1, 0]);
/// epoxide_simt::stride!(i in 0..10 => { seen[i] += 1 });
/// assert_eq!(seen, [1, 1, 2, 1, 1, 2, 1, 1, 2, 1]);
/// ```
///
/// The index is incremented after the block, as in a hand-written loop. An iterator would compute
/// the next index first and keep both in registers. So the block has no `continue`; it may `break`.
///
/// An index must not overflow: the end and a step together have at most the number of values of the
/// index's type, `end + step <= 2^32` for `u32`. Beyond that, the index starts again below the end,
/// and the loop may never end.
#[macro_export]
macro_rules! stride {
    ($i:ident in $range:expr => $body:block) => { $crate::stride!($i in $range, 1 => $body) };
    ($i:ident in $range:expr, $step:expr => $body:block) => {{
        let ::core::ops::Range { start: mut next, end } = $range;
        while next < end {
            let $i = next;
            $body
            next += $step;
        }
    }};
}

/// [`stride!`] that is compiled as one loop, each instruction once. LLVM and ptxas unroll short loops
/// by four or eight. In code that runs once, fetching instructions takes longer than running them.
/// Indices are `u32`.
///
/// ```text
/// rolled!(source in 0..ranks => { rows += counts.ld(source) });
/// ```
#[macro_export]
macro_rules! rolled {
    ($i:ident in $range:expr => $body:block) => { $crate::rolled!($i in $range, 1 => $body) };
    ($i:ident in $range:expr, $step:expr => $body:block) => {
        $crate::stride!($i in $range, $crate::unknown($step) => {
            $crate::no_unroll();
            $body
        })
    };
}

/// [`stride!`] by the threads of the whole grid, side by side. Thread `t` of `n` takes the indices
/// `start + t`, `start + t + n`, and so on. Indices are `u32`.
///
/// ```text
/// grid_stride!(i in 0..len => { out.st(i, a.ld(i)); });
/// ```
///
/// The end and the number of the grid's threads together are at most 2^32, or the index overflows
/// and the loop may never end. A clause such as `requires(len <= 1 << 31)` ensures it for grids of
/// up to 2^31 threads.
///
/// No collective inside: threads leave the loop at different times.
#[macro_export]
macro_rules! grid_stride {
    ($i:ident in $range:expr => $body:block) => {{
        let range: ::core::ops::Range<u32> = $range;
        let first = range.start + $crate::ctaid() * $crate::ntid() + $crate::tid();
        $crate::stride!($i in first..range.end, $crate::nctaid() * $crate::ntid() => $body)
    }};
}

/// [`stride!`] by the threads of each block, side by side. Thread `t` of `n` takes the indices
/// `start + t`, `start + t + n`, and so on. Indices are `u32`, and `end + n` is at most 2^32.
///
/// No collective inside: threads leave the loop at different times.
#[macro_export]
macro_rules! block_stride {
    ($i:ident in $range:expr => $body:block) => {{
        let range: ::core::ops::Range<u32> = $range;
        $crate::stride!($i in range.start + $crate::tid()..range.end, $crate::ntid() => $body)
    }};
}

/// Repeats a block with a constant from 0 to `count - 1`: unrolled in the source, so that arrays
/// which it indexes stay in registers. Counts: 1 to 8, and 16.
///
/// ```
/// let mut sums = [0; 4];
/// epoxide_simt::unroll!(4, N => { sums[N] += N * N });
/// assert_eq!(sums, [0, 1, 4, 9]);
/// let mut next = 1;
/// epoxide_simt::unroll!(4, N => {
///     sums[N] = next;
///     next = 10 * next;
/// });
/// assert_eq!(sums, [1, 10, 100, 1000]);
/// ```
#[macro_export]
macro_rules! unroll {
    // The last turn also assigns values that only a following turn would read.
    (@ $n:ident $body:block $($value:literal)*) => {
        $( { const $n: usize = $value; #[allow(unused_assignments)] $body; } )*
    };
    (1, $n:ident => $body:block) => { $crate::unroll!(@ $n $body 0) };
    (2, $n:ident => $body:block) => { $crate::unroll!(@ $n $body 0 1) };
    (3, $n:ident => $body:block) => { $crate::unroll!(@ $n $body 0 1 2) };
    (4, $n:ident => $body:block) => { $crate::unroll!(@ $n $body 0 1 2 3) };
    (5, $n:ident => $body:block) => { $crate::unroll!(@ $n $body 0 1 2 3 4) };
    (6, $n:ident => $body:block) => { $crate::unroll!(@ $n $body 0 1 2 3 4 5) };
    (7, $n:ident => $body:block) => { $crate::unroll!(@ $n $body 0 1 2 3 4 5 6) };
    (8, $n:ident => $body:block) => { $crate::unroll!(@ $n $body 0 1 2 3 4 5 6 7) };
    (16, $n:ident => $body:block) => {
        $crate::unroll!(@ $n $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
}

/// [`stride!`] over a number of turns that is known when the kernel is compiled, but is not a
/// literal: `few!(4, i in 0..N => { .. })` with at most 4 turns. Arrays that it indexes stay in
/// registers.
///
/// rustc's own back end unrolls the loop. libNVVM would unroll it only after the pass that splits
/// arrays, so the macro unrolls it. So the block has neither `continue` nor `break`. More turns
/// than the number are an error when the kernel is compiled.
///
/// ```
/// fn sum<const N: usize>(values: [u32; N]) -> u32 {
///     let mut sum = 0;
///     epoxide_simt::few!(4, i in 0..N => { sum += values[i] });
///     sum
/// }
/// assert_eq!(sum([1, 2, 4]), 7);
/// ```
///
/// ```compile_fail,E0080
/// let mut sum = 0;
/// epoxide_simt::few!(4, i in 0..5 => { sum += i });
/// ```
#[cfg(not(epoxide_backend = "nvvm"))]
#[macro_export]
macro_rules! few {
    ($most:tt, $i:ident in $range:expr => $body:block) => {{
        const {
            let ::core::ops::Range { start, end } = $range;
            assert!(end <= start + $most, "few! has more turns than its first number");
        }
        $crate::stride!($i in $range => $body)
    }};
}

/// See the other definition, which is a loop.
#[cfg(epoxide_backend = "nvvm")]
#[macro_export]
macro_rules! few {
    ($most:tt, $i:ident in $range:expr => $body:block) => {{
        const {
            let ::core::ops::Range { start, end } = $range;
            assert!(end <= start + $most, "few! has more turns than its first number");
        }
        let ::core::ops::Range { start, end } = $range;
        $crate::unroll!($most, TURN => {
            let $i = start + TURN;
            if $i < end $body
        });
    }};
}

/// Asserts a struct's size and the offset of its last field, so that host and device cannot drift
/// apart. Both compile it.
///
/// ```
/// #[epoxide_simt::kernel_args]
/// pub struct Args {
///     pub data: epoxide_simt::DevicePtr,
///     pub len: u64,
/// }
/// epoxide_simt::layout_assert!(Args, size = 16, len at 8);
/// ```
#[macro_export]
macro_rules! layout_assert {
    ($ty:ty, size = $size:expr, $field:ident at $offset:expr) => {
        const _: () = assert!(::core::mem::size_of::<$ty>() == $size);
        const _: () = assert!(::core::mem::offset_of!($ty, $field) == $offset);
    };
}
