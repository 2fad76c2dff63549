//! PTX that other compilers made from sources of our own: it loads, and its results are those of
//! the host.
//!
//! The sources, the PTX and how to make it anew are in `foreign/`; its README lists the kernels.
//! Every kernel runs on several schedules. Integers are compared exactly, floats too where the
//! kernel fixes the order of its operations; elsewhere the test states its bound.

mod host;

use epoxide_vgpu::{
    Argument, ElementType, FaultKind, Fill, GridConfig, MachineError, Number, Swizzle, TensorMap, TiledTensor,
};
use half::{bf16, f16};
use host::*;

#[test]
fn vector_add() {
    let n = 1000;
    let (a, b) = (floats(n, 1), floats(n, 2));
    let sum: Vec<f32> = a.iter().zip(&b).map(|(x, y)| x + y).collect();
    on_every_schedule("elementwise", |gpu| {
        let (a, b, c) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<f32>(n));
        gpu.launch("vector_add", 4, 256, &[&a, &b, &c, &(n as i32)]);
        assert_eq!(c.download().unwrap(), sum);
    });
}

#[test]
fn saxpy_rounds_once() {
    let (x, y) = (floats(1024, 3), floats(1024, 4));
    let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| 1.7f32.mul_add(*x, *y)).collect();
    on_every_schedule("elementwise", |gpu| {
        let (x, y) = (gpu.buffer(&x), gpu.buffer(&y));
        // Fewer threads than vectors, so that the loop goes around.
        gpu.launch("saxpy", 2, 64, &[&1.7f32, &x, &y, &256]);
        assert_eq!(y.download().unwrap(), expected);
    });
}

#[test]
fn stencil_in_tiles_with_halos() {
    let (width, height) = (37usize, 21usize);
    let image = floats(width * height, 5);
    let at = |x: usize, y: usize| image[y * width + x];
    let mut expected = image.clone();
    for y in 1..height - 1 {
        for x in 1..width - 1 {
            let sum = (at(x, y - 1) + at(x, y + 1)) + (at(x - 1, y) + at(x + 1, y));
            expected[y * width + x] = 0.25f32.mul_add(sum, -at(x, y));
        }
    }
    on_every_schedule("elementwise", |gpu| {
        let (a, b) = (gpu.buffer(&image), gpu.zeros::<f32>(width * height));
        gpu.launch("stencil", [3, 2, 1], [16, 16, 1], &[&a, &b, &(width as i32), &(height as i32)]);
        assert_eq!(b.download().unwrap(), expected);
    });
}

#[test]
fn transpose_through_padded_tiles() {
    let (width, height) = (70usize, 45usize);
    let m = words(width * height, 6);
    let expected: Vec<u32> = (0..width * height).map(|k| m[k % height * width + k / height]).collect();
    on_every_schedule("elementwise", |gpu| {
        let (a, b) = (gpu.buffer(&m), gpu.zeros::<u32>(m.len()));
        gpu.launch("transpose", [3, 2, 1], [32, 8, 1], &[&a, &b, &(width as i32), &(height as i32)]);
        assert_eq!(b.download().unwrap(), expected);
    });
}

#[test]
fn grids_have_three_dimensions() {
    let (grid, block) = ([3u32, 2, 4], [5u32, 3, 2]);
    let ids = |d: [u32; 3]| {
        (0..d[2]).flat_map(move |z| (0..d[1]).flat_map(move |y| (0..d[0]).map(move |x| x | y << 8 | z << 16)))
    };
    let expected: Vec<u32> = ids(grid)
        .enumerate()
        .flat_map(|(b, at)| ids(block).enumerate().flat_map(move |(t, id)| [b as u32, t as u32, at, id]))
        .collect();
    on_every_schedule("elementwise", |gpu| {
        let out = gpu.zeros::<u32>(expected.len());
        gpu.launch("grid_3d", grid, block, &[&out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

/// The rows' softmax in f64.
fn softmax_of(x: &[f32], columns: usize) -> Vec<f64> {
    x.chunks(columns)
        .flat_map(|row| {
            let top = row.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
            let e: Vec<f64> = row.iter().map(|v| f64::from(v - top).exp()).collect();
            let sum: f64 = e.iter().sum();
            e.into_iter().map(move |v| v / sum)
        })
        .collect()
}

#[test]
fn softmax_within_a_few_units() {
    let (rows, columns) = (3, 300);
    let x = floats(rows * columns, 7);
    let expected = softmax_of(&x, columns);
    on_every_schedule("elementwise", |gpu| {
        let (a, b) = (gpu.buffer(&x), gpu.zeros::<f32>(x.len()));
        gpu.launch("softmax", rows as u32, 128, &[&a, &b, &(columns as i32)]);
        // Two exponentials of 2 units, a sum of 300 terms and a division.
        assert_close(&b.download().unwrap(), &expected, 2e-6);
    });
}

#[test]
fn divisions_of_all_widths() {
    let n = 200;
    let (mut a, mut b) = (longs(n, 8), longs(n, 9));
    // Small divisors as well, and the ends of the ranges.
    b.iter_mut().step_by(2).for_each(|v| *v >>= 40);
    (a[0], a[1], a[2]) = (i64::MIN, i64::from(i32::MIN), -1);
    let expected: Vec<i64> = a
        .iter()
        .zip(&b)
        .flat_map(|(&x, &y)| {
            let (xi, xu, xl) = (x as i32, x as u32, x as u64);
            let (yu, yl) = (y as u32 | 1, y as u64 | 1);
            let ys = if y == -1 || y == 0 { 3 } else { y };
            let yi = if y as i32 | 1 == -1 { 5 } else { y as i32 | 1 };
            [
                i64::from(xi / yi),
                i64::from(xi % yi),
                i64::from(xu / yu),
                i64::from(xu % yu),
                x / ys,
                x % ys,
                (xl / yl) as i64,
                (xl % yl) as i64,
                i64::from(xi / 7),
                i64::from(xu % 1000),
                x / 1_000_003,
                i64::from(x as i16 / 11),
            ]
        })
        .collect();
    on_every_schedule("elementwise", |gpu| {
        let (a, b, out) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<i64>(12 * n));
        gpu.launch("divide", 2, 128, &[&a, &b, &out, &(n as i32)]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn pairs_of_halves() {
    // Whole multiples of 1/256 below 4: products and sums are exact in f64, and so is rounded once.
    let half = |w: u32| f16::from_f32((w % 2048) as f32 / 256.0 - 4.0);
    let (x, y): (Vec<f16>, Vec<f16>) = words(512, 10).iter().map(|w| (half(*w), half(w >> 16))).unzip();
    let a = [half(700), half(1900)];
    let expected: Vec<u16> = (0..512)
        .map(|i| {
            let [a, x, y] = [a[i % 2], x[i], y[i]].map(f16::to_f64);
            let (fma, square) = (f16::from_f64(a * x + y), f16::from_f64(x * x));
            if fma > square { fma.to_bits() } else { square.to_bits() }
        })
        .collect();
    let bits = |v: &[f16]| v.iter().map(|h| h.to_bits()).collect::<Vec<u16>>();
    let pair = u32::from(a[0].to_bits()) | u32::from(a[1].to_bits()) << 16;
    on_every_schedule("elementwise", |gpu| {
        let (x, y) = (gpu.buffer(&bits(&x)), gpu.buffer(&bits(&y)));
        gpu.launch("half_pairs", 2, 128, &[&pair, &x, &y, &256]);
        assert_eq!(y.download().unwrap(), expected);
    });
}

#[test]
fn bf16_by_way_of_f32() {
    let n = 301;
    let x: Vec<bf16> = floats(n, 11).iter().map(|v| bf16::from_f32(*v)).collect();
    let expected: Vec<u16> = x.iter().map(|v| bf16::from_f32(v.to_f32() * 1.37).to_bits()).collect();
    let bits: Vec<u16> = x.iter().map(|v| v.to_bits()).collect();
    on_every_schedule("elementwise", |gpu| {
        let (x, y) = (gpu.buffer(&bits), gpu.zeros::<u16>(n));
        gpu.launch("bf16_scale", 2, 96, &[&x, &1.37f32, &y, &(n as i32)]);
        assert_eq!(y.download().unwrap(), expected);
    });
}

#[test]
fn block_sums_by_shuffles() {
    let n = 5000;
    let x = words(n, 12);
    let (blocks, threads) = (3usize, 160usize);
    let mut expected = vec![0u32; blocks];
    for (i, v) in x.iter().enumerate() {
        let block = i % (blocks * threads) / threads;
        expected[block] = expected[block].wrapping_add(*v);
    }
    on_every_schedule("reduce", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<u32>(blocks));
        gpu.launch("reduce_shuffle", blocks as u32, threads as u32, &[&x, &out, &(n as i32)]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

/// The sum by a tree that adds the upper half to the lower one.
fn tree_sum<T: Copy + std::ops::Add<Output = T>>(v: &[T]) -> T {
    let mut v = v.to_vec();
    while v.len() > 1 {
        let half = v.len() / 2;
        v = (0..half).map(|i| v[i] + v[i + half]).collect();
    }
    v[0]
}

#[test]
fn block_sums_by_a_tree_in_dynamic_shared_memory() {
    let x = floats(1024, 13);
    let expected: Vec<f32> = x.chunks(256).map(tree_sum).collect();
    on_every_schedule("reduce", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<f32>(4));
        gpu.launch_with("reduce_tree", 4, 256, 1024, &[&x, &out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn the_last_block_sums_up() {
    let n = 20_000;
    let x = words(n, 14);
    let expected = x.iter().fold(0u32, |a, b| a.wrapping_add(*b));
    on_every_schedule("reduce", |gpu| {
        let (x, parts) = (gpu.buffer(&x), gpu.zeros::<u32>(50));
        let (ticket, out) = (gpu.zeros::<u32>(1), gpu.zeros::<u32>(1));
        gpu.launch("reduce_last_block", 50, 256, &[&x, &parts, &ticket, &out, &(n as i32)]);
        assert_eq!((out.download().unwrap()[0], ticket.download().unwrap()[0]), (expected, 50));
    });
}

#[test]
fn warp_reductions_by_redux() {
    let x: Vec<i32> = words(256, 15).iter().map(|w| (w | 0x40) as i32).collect();
    let expected: Vec<i32> = x
        .chunks(32)
        .flat_map(|w| {
            let fold = |f: fn(i32, i32) -> i32| w.iter().copied().reduce(f).unwrap();
            [fold(i32::min), fold(i32::max), fold(|a, b| a & b), fold(|a, b| a | b)]
        })
        .collect();
    on_every_schedule("reduce", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<i32>(32));
        gpu.launch("reduce_redux", 2, 128, &[&x, &out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

/// Inclusive running sums of every `width` elements.
fn running(x: &[u32], width: usize) -> Vec<u32> {
    let sums = |c: &[u32]| {
        c.iter()
            .scan(0u32, |s, v| {
                *s = s.wrapping_add(*v);
                Some(*s)
            })
            .collect::<Vec<u32>>()
    };
    x.chunks(width).flat_map(sums).collect()
}

#[test]
fn scans_within_warps_and_blocks() {
    let x = words(1024, 16);
    let exclusive: Vec<u32> = running(&x, 512).iter().zip(&x).map(|(s, v)| s.wrapping_sub(*v)).collect();
    on_every_schedule("scan", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<u32>(1024));
        gpu.launch("warp_scan", 4, 256, &[&x, &out]);
        assert_eq!(out.download().unwrap(), running(&x.download().unwrap(), 32));
        gpu.launch("scan_hillis_steele", 4, 256, &[&x, &out]);
        assert_eq!(out.download().unwrap(), running(&x.download().unwrap(), 256));
        gpu.launch("scan_blelloch", 2, 256, &[&x, &out]);
        assert_eq!(out.download().unwrap(), exclusive);
    });
}

#[test]
fn a_scan_over_blocks_looks_back() {
    let n = 2500;
    let x = words(n, 17);
    let expected = running(&x, n);
    on_every_schedule("scan", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<u32>(n));
        let (states, ticket) = (gpu.zeros::<u64>(20), gpu.zeros::<u32>(1));
        gpu.launch("scan_look_back", 20, 128, &[&x, &out, &states, &ticket, &(n as i32)]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

/// `a * b` with one rounding per step, in the order of the inner index.
fn product(a: &[f32], b: &[f32], m: usize, n: usize, k: usize) -> Vec<f32> {
    (0..m * n).map(|e| (0..k).fold(0f32, |s, i| a[e / n * k + i].mul_add(b[i * n + e % n], s))).collect()
}

#[test]
fn a_tiled_matrix_product() {
    let (m, n, k) = (37usize, 50usize, 29usize);
    let (a, b) = (floats(m * k, 18), floats(k * n, 19));
    let expected = product(&a, &b, m, n, k);
    on_every_schedule("matmul", |gpu| {
        let (a, b, c) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<f32>(m * n));
        let sizes = [m, n, k].map(|v| v as i32);
        gpu.launch("sgemm_tiled", [4, 3, 1], [16, 16, 1], &[&a, &b, &c, &sizes[0], &sizes[1], &sizes[2]]);
        assert_eq!(c.download().unwrap(), expected);
    });
}

#[test]
fn a_matrix_product_in_registers() {
    let (m, n, k) = (128usize, 64usize, 48usize);
    let (a, b) = (floats(m * k, 20), floats(k * n, 21));
    let expected = product(&a, &b, m, n, k);
    on_every_schedule("matmul", |gpu| {
        let (a, b, c) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<f32>(m * n));
        gpu.launch_with("sgemm_registers", [1, 2, 1], 256, 8192, &[&a, &b, &c, &(n as i32), &(k as i32)]);
        assert_eq!(c.download().unwrap(), expected);
    });
}

#[test]
fn a_matrix_product_of_bytes() {
    let (n, k4) = (32usize, 13usize);
    let (a, b) = (words(n * k4, 22), words(n * k4, 23));
    let bytes = |w: u32| w.to_le_bytes().map(|v| i32::from(v as i8));
    let expected: Vec<i32> = (0..n * n)
        .map(|e| {
            let pairs = (0..k4).map(|i| (bytes(a[e / n * k4 + i]), bytes(b[e % n * k4 + i])));
            pairs.map(|(x, y)| x.iter().zip(&y).map(|(p, q)| p * q).sum::<i32>()).sum()
        })
        .collect();
    on_every_schedule("matmul", |gpu| {
        let (a, b, c) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<i32>(n * n));
        gpu.launch("igemm_dp4a", [2, 4, 1], [16, 8, 1], &[&a, &b, &c, &(n as i32), &(k4 as i32)]);
        assert_eq!(c.download().unwrap(), expected);
    });
}

#[test]
fn histograms_by_atomics() {
    let n = 3000;
    let x = words(n, 24);
    let bytes: Vec<u8> = x.iter().map(|w| (w % 256 * (w >> 8 & 1)) as u8).collect();
    let (mut counts, mut sums) = (vec![0u32; 256], vec![0u64; 61]);
    bytes.iter().for_each(|b| counts[usize::from(*b)] += 1);
    x.iter().for_each(|w| sums[*w as usize % 61] += u64::from(*w));
    on_every_schedule("histogram", |gpu| {
        let (input, bins) = (gpu.buffer(&bytes), gpu.zeros::<u32>(256));
        gpu.launch("histogram_shared", 3, 128, &[&input, &bins, &(n as i32)]);
        assert_eq!(bins.download().unwrap(), counts);
        let (input, bins) = (gpu.buffer(&x), gpu.zeros::<u64>(61));
        gpu.launch("histogram_global", 12, 256, &[&input, &bins, &(n as i32)]);
        assert_eq!(bins.download().unwrap(), sums);
    });
}

#[test]
fn digits_are_counted_by_matching() {
    let x = words(512, 25);
    let mut expected = vec![0u32; 4 * 16];
    x.iter().enumerate().for_each(|(i, w)| expected[i / 128 * 16 + (w >> 12 & 15) as usize] += 1);
    on_every_schedule("histogram", |gpu| {
        let (x, counts) = (gpu.buffer(&x), gpu.zeros::<u32>(64));
        gpu.launch("radix_count", 4, 128, &[&x, &counts, &12]);
        assert_eq!(counts.download().unwrap(), expected);
    });
}

#[test]
fn compaction_keeps_every_odd_element() {
    let n = 1100;
    let x = words(n, 26);
    let mut expected: Vec<u32> = x.iter().copied().filter(|v| v & 1 == 1).collect();
    expected.sort_unstable();
    on_every_schedule("histogram", |gpu| {
        let (x, out, count) = (gpu.buffer(&x), gpu.zeros::<u32>(n), gpu.zeros::<u32>(1));
        gpu.launch("compact", 5, 256, &[&x, &out, &count, &(n as i32)]);
        let kept = count.download().unwrap()[0] as usize;
        let mut got = out.download().unwrap()[..kept].to_vec();
        got.sort_unstable();
        assert_eq!(got, expected);
    });
}

#[test]
fn the_largest_double_by_compare_and_swap() {
    let n = 700;
    let x: Vec<f64> = floats(n, 27).iter().map(|v| f64::from(*v) * 1e10).collect();
    let expected = x.iter().copied().fold(-1e300, f64::max);
    on_every_schedule("histogram", |gpu| {
        let (x, top) = (gpu.buffer(&x), gpu.buffer(&[-1e300f64]));
        gpu.launch("atomic_max_double", 3, 256, &[&x, &top, &(n as i32)]);
        assert_eq!(top.download().unwrap(), [expected]);
    });
}

#[test]
fn every_atomic_operation() {
    let x = words(192, 28);
    let (start, limit) = (0x1234_5678u32, 37u32);
    let step = |o: &mut [u32], v: u32| {
        o[0] = o[0].min(v);
        o[1] = o[1].max(v);
        o[2] = (o[2] as i32).min(v as i32) as u32;
        o[3] = (o[3] as i32).max(v as i32) as u32;
        o[4] &= v | 0xffff;
        o[5] |= v & 0xffff;
        o[6] ^= v;
        o[7] = o[7].wrapping_sub(v);
        o[8] = if o[8] >= limit { 0 } else { o[8] + 1 };
        o[9] = if o[9] == 0 || o[9] > limit { limit } else { o[9] - 1 };
    };
    let mut expected = vec![start; 10];
    x.iter().for_each(|v| step(&mut expected, *v));
    let total: u32 = x.iter().map(|v| v % 16).sum();
    on_every_schedule("histogram", |gpu| {
        let (x, out, sum) = (gpu.buffer(&x), gpu.buffer(&[start; 10]), gpu.zeros::<f32>(1));
        gpu.launch("atomic_zoo", 3, 64, &[&x, &out, &sum, &limit]);
        assert_eq!((out.download().unwrap(), sum.download().unwrap()[0]), (expected.clone(), total as f32));
    });
}

#[test]
fn a_list_loses_nothing() {
    let n = 600;
    on_every_schedule("histogram", |gpu| {
        let (head, next) = (gpu.buffer(&[u32::MAX]), gpu.zeros::<u32>(n));
        gpu.launch("push_list", 5, 128, &[&head, &next, &(n as i32)]);
        let (next, mut at, mut seen) = (next.download().unwrap(), head.download().unwrap()[0], vec![]);
        while at != u32::MAX {
            seen.push(at);
            assert!(seen.len() <= n, "the list has a loop");
            at = next[at as usize];
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..n as u32).collect::<Vec<u32>>());
    });
}

#[test]
fn bitonic_sorts_in_warps_and_blocks() {
    let x = words(2048, 29);
    let values: Vec<u32> = (0..2048).collect();
    on_every_schedule("sort", |gpu| {
        let keys = gpu.buffer(&x);
        gpu.launch("sort_warp", 8, 256, &[&keys]);
        let sorted = |width: usize| {
            let mut all = x.clone();
            all.chunks_mut(width).for_each(<[u32]>::sort_unstable);
            all
        };
        assert_eq!(keys.download().unwrap(), sorted(32));
        let (keys, places) = (gpu.buffer(&x), gpu.buffer(&values));
        gpu.launch("sort_block", 2, 256, &[&keys, &places]);
        assert_eq!(keys.download().unwrap(), sorted(1024));
        // The values have moved with their keys.
        let moved: Vec<u32> = places.download().unwrap().iter().map(|i| x[*i as usize]).collect();
        assert_eq!(moved, keys.download().unwrap());
    });
}

#[test]
fn a_radix_sort_is_stable() {
    let x: Vec<u32> = words(512, 30).iter().map(|w| w % 97).collect();
    let mut expected: Vec<(u32, u32)> = x.iter().copied().zip(0..).collect();
    expected.chunks_mut(256).for_each(|c| c.sort());
    on_every_schedule("sort", |gpu| {
        let (keys, values) = (gpu.buffer(&x), gpu.buffer(&(0..512).collect::<Vec<u32>>()));
        gpu.launch("sort_radix", 2, 256, &[&keys, &values]);
        assert_eq!(
            keys.download().unwrap().into_iter().zip(values.download().unwrap()).collect::<Vec<_>>(),
            expected
        );
    });
}

/// A thread's digest of its 16 bytes of every tile.
fn digest(tiles: impl Iterator<Item = [u32; 4]>) -> u32 {
    tiles.fold(0, |s: u32, v| s.wrapping_mul(31).wrapping_add(v[0] ^ v[1]).wrapping_add(v[2] ^ v[3]))
}

#[test]
fn a_warp_fetches_tiles_for_the_others() {
    for tiles in [1usize, 2, 7] {
        let x = words(3 * tiles * 512, 31);
        let expected: Vec<u32> = (0..3 * 128)
            .map(|i| {
                let at = |k: usize| (i / 128 * tiles + k) * 512 + i % 128 * 4;
                digest((0..tiles).map(|k| x[at(k)..at(k) + 4].try_into().unwrap()))
            })
            .collect();
        on_every_schedule("async", |gpu| {
            let (x, out) = (gpu.buffer(&x), gpu.zeros::<u32>(3 * 128));
            gpu.launch("produce_consume", 3, 160, &[&x, &out, &(tiles as i32)]);
            assert_eq!(out.download().unwrap(), expected);
        });
    }
}

#[test]
fn tiles_leave_by_bulk_copies() {
    let tiles = 5usize;
    let x = floats(2 * tiles * 128, 32);
    let expected: Vec<f32> = x.iter().map(|v| v * 0.3).collect();
    on_every_schedule("async", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<f32>(2 * tiles * 128));
        gpu.launch("bulk_store", 2, 128, &[&x, &out, &0.3f32, &(tiles as i32)]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn tiles_come_by_asynchronous_copies_of_threads() {
    let tiles = 6usize;
    let x = words(2 * tiles * 256, 33);
    let expected: Vec<u32> = (0..2 * 64)
        .map(|i| {
            let at = |k: usize| (i / 64 * tiles + k) * 256 + (63 - i % 64) * 4;
            digest((0..tiles).map(|k| x[at(k)..at(k) + 4].try_into().unwrap()))
        })
        .collect();
    on_every_schedule("async", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<u32>(2 * 64));
        gpu.launch("copy_pipeline", 2, 64, &[&x, &out, &(tiles as i32)]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn the_barrier_of_the_library() {
    let rounds = 5;
    let x = words(256, 34);
    let expected: Vec<u32> = x
        .chunks(128)
        .flat_map(|ring| {
            (0..rounds).fold(ring.to_vec(), |r, _| {
                (0..128).map(|t| r[t].wrapping_add(r[(t + 1) % 128].wrapping_mul(3))).collect()
            })
        })
        .collect();
    on_every_schedule("async", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<u32>(256));
        gpu.launch("library_barrier", 2, 128, &[&x, &out, &rounds]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn blocks_meet_at_a_barrier_in_memory() {
    let (blocks, steps) = (6u32, 9);
    let n = blocks as usize * 64;
    let start = words(n, 35);
    let expected = (0..steps).fold(start.clone(), |c, _| {
        let next = |i: usize| c[(i + n - 1) % n] ^ c[i].wrapping_mul(5).wrapping_add(c[(i + 1) % n]);
        (0..n).map(next).collect()
    });
    on_every_schedule("sync", |gpu| {
        let both: Vec<u32> = start.iter().copied().chain(vec![0; n]).collect();
        let (cells, arrived, round) = (gpu.buffer(&both), gpu.zeros::<u32>(1), gpu.zeros::<u32>(1));
        gpu.launch("grid_barrier", blocks, 64, &[&cells, &arrived, &round, &steps]);
        assert_eq!(cells.download().unwrap()[n..], expected);
    });
}

#[test]
fn a_lock_lets_every_lane_in_once() {
    let expected = (0..3 * 64).fold(1u32, |v, _| v.wrapping_mul(3).wrapping_add(1));
    on_every_schedule("sync", |gpu| {
        let (lock, value) = (gpu.zeros::<u32>(1), gpu.buffer(&[1u32]));
        gpu.launch("spin_lock", 3, 64, &[&lock, &value]);
        assert_eq!(value.download().unwrap(), [expected]);
    });
}

#[test]
fn pairs_of_warps_have_barriers_of_their_own() {
    let x = words(128, 36);
    let expected: Vec<u32> = x.chunks(32).flat_map(|c| c.iter().rev().map(|v| v.wrapping_add(1))).collect();
    on_every_schedule("sync", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<u32>(128));
        gpu.launch("named_barriers", 2, 128, &[&x, &out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn barriers_count_votes() {
    // A block without a zero, one of positive numbers only, and one of any.
    let x: Vec<i32> = words(3 * 96, 37)
        .iter()
        .enumerate()
        .map(|(i, w)| match i / 96 {
            0 => (w | 1) as i32,
            1 => (w >> 2 | 1) as i32,
            _ => (w % 5) as i32 - 2,
        })
        .collect();
    let expected: Vec<i32> = x
        .chunks(96)
        .flat_map(|c| {
            let odd = c.iter().filter(|v| *v & 1 == 1).count() as i32;
            [odd, i32::from(c.iter().all(|v| *v > 0)), i32::from(c.contains(&0)), 96]
        })
        .collect();
    on_every_schedule("sync", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<i32>(12));
        gpu.launch("block_votes", 3, 96, &[&x, &out]);
        assert_eq!(out.download().unwrap().iter().map(|v| *v & 0xff).collect::<Vec<i32>>(), expected);
    });
}

#[test]
fn lanes_pass_mail_in_shared_memory() {
    let x = words(256, 38);
    let expected: Vec<u32> = x
        .chunks(32)
        .flat_map(|warp| {
            (0..4).fold(warp.to_vec(), |v, r| {
                let fetch = |lane: usize| {
                    let u = v[(lane * 5 + r) % 32];
                    if u & 1 == 1 { u.count_ones().wrapping_mul(0x9e37_79b9).wrapping_add(u) } else { u }
                };
                (0..32).map(|lane| v[lane] ^ fetch(lane)).collect()
            })
        })
        .collect();
    on_every_schedule("sync", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<u32>(256));
        gpu.launch("warp_mailbox", 2, 128, &[&x, &out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn arrays_in_local_memory() {
    let x: Vec<i32> = words(96 * 16, 39).iter().map(|w| *w as i32 % 1000).collect();
    let mut expected = x.clone();
    expected.chunks_mut(16).for_each(<[i32]>::sort_unstable);
    on_every_schedule("control", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<i32>(96 * 16));
        gpu.launch("local_array", 2, 48, &[&x, &out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

/// The interpreter of `control.cu`.
fn interpret(program: &[u8], id: u32) -> [u32; 2] {
    let (mut a, mut b, mut pc) = (id, 1u32, 0);
    while pc < program.len() {
        match program[pc] {
            0 => a = a.wrapping_add(b),
            1 => b ^= a << 3,
            2 => a = a.wrapping_mul(2_654_435_761),
            3 => a = a.count_ones().wrapping_add(b),
            4 => b = b.reverse_bits(),
            5 => {
                let bytes = u64::from(b) << 32 | u64::from(a);
                a = [5, 7, 1, 3].iter().rev().fold(0, |r, i| r << 8 | (bytes >> (8 * i)) as u32 & 0xff);
            }
            6 => b = b.wrapping_sub(a >> 5),
            7 => pc += (a & 1) as usize,
            8 => a = (((u64::from(b) << 32 | u64::from(a)) << (a & 31)) >> 32) as u32,
            9 => b = (b | 1).leading_zeros().wrapping_mul(a),
            10 => a = !a,
            11 => pc = program.len(),
            _ => a ^= b,
        }
        pc += 1;
    }
    [a, b]
}

#[test]
fn a_switch_jumps_through_a_table() {
    let length = 40;
    let program: Vec<u8> = words(64 * length, 40).iter().map(|w| (w % 13) as u8).collect();
    let expected: Vec<u32> = program.chunks(length).zip(0..).flat_map(|(p, id)| interpret(p, id)).collect();
    on_every_schedule("control", |gpu| {
        let (p, out) = (gpu.buffer(&program), gpu.zeros::<u32>(128));
        gpu.launch("interpreter", 2, 32, &[&p, &(length as i32), &out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn functions_are_called_with_structures() {
    let x: Vec<i32> = words(128, 41).iter().map(|w| (w % 900) as i32 + 1).collect();
    let expected: Vec<i64> = x
        .chunks(2)
        .zip(0..)
        .flat_map(|(c, id)| {
            let (mut a, mut b) = (c[0], c[1]);
            while b != 0 {
                (a, b) = (b, a % b);
            }
            let tag = if a == 1 { id } else { id + 1 };
            [c[0] / a, c[1] / a, tag, a].map(i64::from)
        })
        .collect();
    on_every_schedule("control", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<i64>(256));
        gpu.launch("calls", 2, 32, &[&x, &out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn an_assertion_that_fails_stops_the_kernel() {
    let x: Vec<u32> = words(64, 42).iter().map(|w| w % 100).collect();
    let plus_one: Vec<u32> = x.iter().map(|v| v + 1).collect();
    on_every_schedule("control", |gpu| {
        let (good, out) = (gpu.buffer(&x), gpu.zeros::<u32>(64));
        gpu.launch("checked", 1, 64, &[&good, &out, &100]);
        assert_eq!(out.download().unwrap(), plus_one);
        let mut bad = x.clone();
        bad[45] = 100;
        let bad = gpu.buffer(&bad);
        let fault = gpu.fault("checked", 1, 64, &[&bad, &out, &100]);
        assert!(matches!(fault.kind, FaultKind::Trap), "{fault}");
        assert_eq!((fault.warp, fault.lane), (1, Some(13)));
    });
}

#[test]
fn tables_of_constants_and_variables_of_the_module() {
    let bytes: Vec<u8> = words(96 * 64, 43).iter().map(|w| *w as u8).collect();
    let crc = |c: &[u8]| {
        !c.iter().fold(u32::MAX, |c, b| {
            (0..8).fold(c ^ u32::from(*b), |c, _| if c & 1 == 1 { c >> 1 ^ 0xedb8_8320 } else { c >> 1 })
        })
    };
    let expected: Vec<u32> = bytes.chunks(64).map(crc).collect();
    let total = expected.iter().fold(0x1234u32, |a, b| a.wrapping_add(*b));
    on_every_schedule("control", |gpu| {
        let (x, out, sum) = (gpu.buffer(&bytes), gpu.zeros::<u32>(96), gpu.zeros::<u32>(1));
        gpu.launch("crc32", 3, 32, &[&x, &out]);
        assert_eq!(out.download().unwrap(), expected);
        gpu.launch("read_total", 1, 1, &[&sum]);
        assert_eq!(sum.download().unwrap(), [total]);
    });
}

#[test]
fn lanes_loop_as_long_as_they_need() {
    let n = 120;
    let x: Vec<u32> = words(n, 44).iter().map(|w| w % 100_000 + 1).collect();
    let (steps, peaks): (Vec<u32>, Vec<u64>) = x
        .iter()
        .map(|v| {
            let (mut v, mut count, mut top) = (u64::from(*v), 0, u64::from(*v));
            while v != 1 {
                v = if v % 2 == 0 { v / 2 } else { 3 * v + 1 };
                (count, top) = (count + 1, top.max(v));
            }
            (count, top)
        })
        .unzip();
    on_every_schedule("control", |gpu| {
        let (x, count, top) = (gpu.buffer(&x), gpu.zeros::<u32>(n), gpu.zeros::<u64>(n));
        gpu.launch("collatz", 2, 64, &[&x, &count, &top, &(n as i32)]);
        assert_eq!((count.download().unwrap(), top.download().unwrap()), (steps.clone(), peaks.clone()));
    });
}

#[test]
fn products_of_128_bits() {
    let (a, b) = (longs(128, 45), longs(128, 46));
    let wide = |v: &[i64]| u128::from(v[1] as u64) << 64 | u128::from(v[0] as u64);
    let expected: Vec<u64> = a
        .chunks(2)
        .zip(b.chunks(2))
        .flat_map(|(x, y)| {
            let (x, y) = (wide(x), wide(y));
            let p = x.wrapping_mul(y).wrapping_add(x >> 3).wrapping_sub(y);
            [p as u64, (p >> 64) as u64]
        })
        .collect();
    on_every_schedule("control", |gpu| {
        let (a, b, out) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<u64>(128));
        gpu.launch("multiply_128", 2, 32, &[&a, &b, &out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

/// By its series, which converges well for the small arguments here.
fn erf(x: f64) -> f64 {
    let mut term = x;
    let mut sum = x;
    for k in 1..80 {
        term *= -x * x / f64::from(k);
        sum += term / f64::from(2 * k + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

#[test]
fn functions_of_the_library_keep_their_bounds() {
    // Some arguments are large enough for the slow reduction of angles.
    let mut x: Vec<f32> = floats(128, 47).iter().map(|v| v * 8.0).collect();
    x.iter_mut().step_by(9).for_each(|v| *v *= 1e5);
    let expected: Vec<f64> =
        x.iter()
            .flat_map(|v| {
                let (v, e) = (f64::from(*v), f64::from(*v / 8.0));
                // Beyond the range of f32 it is infinite or zero.
                let exp = f64::from(e.exp() as f32);
                let e = [v.sin(), v.cos(), v.abs().ln(), exp, v.abs().powf(0.7f32.into())]
                    .into_iter()
                    .chain([v.tanh(), v.atan(), if v.abs() < 60.0 { erf(v / 16.0) } else { v.signum() }]);
                e.collect::<Vec<_>>()
            })
            .collect();
    let double: Vec<f64> = x.iter().map(|v| f64::from(*v) * 1.000_001).collect();
    let expected_double: Vec<f64> = double
        .iter()
        .flat_map(|v| [(v / 8.0).exp(), v.abs().ln(), v.abs().sqrt(), v.sin(), 1.0 / v, v.cbrt()])
        .collect();
    on_every_schedule("control", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<f32>(1024));
        gpu.launch("functions_f32", 2, 64, &[&x, &out]);
        // At most 4 units in the last place, by the tables of CUDA.
        assert_close(&out.download().unwrap(), &expected, 4.0 / f64::from(1 << 23));
        let (x, out) = (gpu.buffer(&double), gpu.zeros::<f64>(768));
        gpu.launch("functions_f64", 2, 64, &[&x, &out]);
        // At most 2 units, and another one of the host.
        assert_close(&out.download().unwrap(), &expected_double, 3.0 * f64::EPSILON);
    });
}

#[test]
fn clang_triad_and_dot_in_f64() {
    let n = 512;
    let (a, b): (Vec<f64>, Vec<f64>) = floats(n, 48)
        .iter()
        .zip(floats(n, 49))
        .map(|(a, b)| (f64::from(*a) / 3.0, f64::from(b) / 7.0))
        .unzip();
    let triad: Vec<f64> = a.iter().zip(&b).map(|(a, b)| 1.1f64.mul_add(*b, *a)).collect();
    let products: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a * b).collect();
    let dots: Vec<f64> = products.chunks(128).map(tree_sum).collect();
    on_every_schedule("plain", |gpu| {
        let (a, b, c, d) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<f64>(n), gpu.zeros::<f64>(4));
        gpu.launch("triad", 4, 160, &[&a, &b, &c, &1.1f64, &(n as i32)]);
        assert_eq!(c.download().unwrap(), triad);
        gpu.launch("dot", 4, 128, &[&a, &b, &d]);
        assert_eq!(d.download().unwrap(), dots);
    });
}

#[test]
fn clang_primes_by_a_function_called_twice() {
    let x: Vec<u32> = (0..256).map(|i| i * 7 + 1).chain([65537, 65521, 65535, 2, 3, 0, 561, 1]).collect();
    let prime = |n: u32| n > 1 && (2..n).take_while(|d| d * d <= n).all(|d| !n.is_multiple_of(d));
    let expected: Vec<u8> = x.iter().map(|n| u8::from(prime(*n))).collect();
    on_every_schedule("plain", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<u8>(264));
        gpu.launch("primes", 11, 24, &[&x, &out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn clang_running_maximum_of_a_warp() {
    let x: Vec<i32> = words(128, 50).iter().map(|w| *w as i32).collect();
    let expected: Vec<i32> = x
        .chunks(32)
        .flat_map(|c| (0..32).map(|i| *c[..=i].iter().max().unwrap()).collect::<Vec<i32>>())
        .collect();
    on_every_schedule("plain", |gpu| {
        let (x, out) = (gpu.buffer(&x), gpu.zeros::<i32>(128));
        gpu.launch("warp_maximum", 2, 64, &[&x, &out]);
        assert_eq!(out.download().unwrap(), expected);
    });
}

#[test]
fn clang_blurs_bytes() {
    let (width, height) = (45i32, 17i32);
    let image: Vec<u8> = words((width * height) as usize, 51).iter().map(|w| *w as u8).collect();
    let expected: Vec<u8> = (0..width * height)
        .map(|k| {
            let weight = |i: i32| 2 - i.abs();
            let mut sum = 8;
            for j in -1..=1 {
                for i in -1..=1 {
                    let (u, v) = ((k % width + i).clamp(0, width - 1), (k / width + j).clamp(0, height - 1));
                    sum += weight(i) * weight(j) * i32::from(image[(v * width + u) as usize]);
                }
            }
            (sum >> 4) as u8
        })
        .collect();
    on_every_schedule("plain", |gpu| {
        let (a, b) = (gpu.buffer(&image), gpu.zeros::<u8>(image.len()));
        gpu.launch("blur", 8, 100, &[&a, &b, &width, &height]);
        assert_eq!(b.download().unwrap(), expected);
    });
}

#[test]
fn clang_plays_life() {
    let (n, generations) = (48usize, 4);
    let start: Vec<u64> = longs(n, 52).iter().map(|v| *v as u64).collect();
    let next = |b: Vec<u64>| -> Vec<u64> {
        let alive = |x: usize, y: usize| (b[y % n] >> (x % 64) & 1) as u32;
        (0..n)
            .map(|y| {
                (0..64).fold(0, |row, x| {
                    let count: u32 =
                        (0..9).filter(|k| *k != 4).map(|k| alive(x + 63 + k % 3, y + n - 1 + k / 3)).sum();
                    row | u64::from(count == 3 || count == 2 && alive(x, y) == 1) << x
                })
            })
            .collect()
    };
    let expected = (0..generations).fold(start.clone(), |b, _| next(b));
    on_every_schedule("plain", |gpu| {
        let rows = gpu.buffer(&start);
        gpu.launch("life", 1, n as u32, &[&rows, &generations]);
        assert_eq!(rows.download().unwrap(), expected);
    });
}

#[test]
fn clang_groups_by_keys() {
    let keys: Vec<u8> = words(320, 53).iter().map(|w| (w % 10) as u8).collect();
    let values: Vec<i32> = words(320, 54).iter().map(|w| *w as i32 >> 8).collect();
    let (mut sums, mut floats, mut least) = ([0i32; 10], [0f32; 10], [i32::MAX; 10]);
    for (k, v) in keys.iter().zip(&values) {
        let k = usize::from(*k);
        sums[k] = sums[k].wrapping_add(*v);
        floats[k] += (v % 64) as f32;
        least[k] = least[k].min(*v);
    }
    on_every_schedule("plain", |gpu| {
        let (k, v) = (gpu.buffer(&keys), gpu.buffer(&values));
        let (s, f, m) = (gpu.zeros::<i32>(10), gpu.zeros::<f32>(10), gpu.buffer(&[i32::MAX; 10]));
        gpu.launch("group_by", 5, 64, &[&k, &v, &s, &f, &m]);
        assert_eq!(
            (s.download().unwrap(), f.download().unwrap(), m.download().unwrap()),
            (sums.to_vec(), floats.to_vec(), least.to_vec())
        );
    });
}

#[test]
fn triton_vector_add() {
    let n = 2500;
    let (a, b) = (floats(n, 55), floats(n, 56));
    let sum: Vec<f32> = a.iter().zip(&b).map(|(x, y)| x + y).collect();
    on_every_schedule("t_vector_add", |gpu| {
        let (a, b, c) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<f32>(n));
        gpu.launch("t_vector_add", 3, 128, &[&a, &b, &c, &(n as i32)]);
        assert_eq!(c.download().unwrap(), sum);
    });
}

#[test]
fn triton_softmax_within_a_few_units() {
    let (rows, columns) = (3, 700);
    let x = floats(rows * columns, 57);
    let expected = softmax_of(&x, columns);
    on_every_schedule("t_softmax", |gpu| {
        let (a, b) = (gpu.buffer(&x), gpu.zeros::<f32>(x.len()));
        gpu.launch_with("t_softmax", rows as u32, 128, 16, &[&a, &b, &(columns as i32)]);
        // The exponential of an approximation: its argument, of at most 20, is scaled by a rounded
        // factor.
        assert_close(&b.download().unwrap(), &expected, 1e-5);
    });
}

#[test]
fn triton_layer_norm_within_a_few_units() {
    let (rows, columns) = (4, 333);
    let x = floats(rows * columns, 58);
    let (weight, bias) = (floats(columns, 59), floats(columns, 60));
    let expected: Vec<f64> = x
        .chunks(columns)
        .flat_map(|row| {
            let n = columns as f64;
            let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
            let variance = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
            let scale = 1.0 / (variance + 1e-5).sqrt();
            let (w, b) = (&weight, &bias);
            (0..columns).map(move |i| (f64::from(row[i]) - mean) * scale * f64::from(w[i]) + f64::from(b[i]))
        })
        .collect();
    on_every_schedule("t_layer_norm", |gpu| {
        let (x, w, b) = (gpu.buffer(&x), gpu.buffer(&weight), gpu.buffer(&bias));
        let y = gpu.zeros::<f32>(rows * columns);
        let arguments: [&dyn Argument; 6] = [&x, &w, &b, &y, &(columns as i32), &1e-5f32];
        gpu.launch_with("t_layer_norm", rows as u32, 128, 16, &arguments);
        // Absolute, since bias and product may cancel; values are below 50.
        for (got, want) in y.download().unwrap().iter().zip(&expected) {
            assert!((f64::from(*got) - want).abs() < 2e-5, "{got} instead of {want}");
        }
    });
}

#[test]
fn triton_matrix_product() {
    let (m, n, k) = (40usize, 50usize, 37usize);
    let (a, b) = (floats(m * k, 61), floats(k * n, 62));
    let expected = product(&a, &b, m, n, k);
    on_every_schedule("t_matmul", |gpu| {
        let (a, b, c) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<f32>(m * n));
        let sizes = [m, n, k].map(|v| v as i32);
        let arguments: [&dyn Argument; 6] = [&a, &b, &c, &sizes[0], &sizes[1], &sizes[2]];
        gpu.launch_with("t_matmul", [2, 2, 1], 128, 8192, &arguments);
        assert_eq!(c.download().unwrap(), expected);
    });
}

/// Whole numbers up to 7, whose products have exact sums in every order.
fn small(n: usize, seed: u64) -> Vec<i8> {
    words(n, seed).into_iter().map(|v| (v % 15) as i8 - 7).collect()
}

/// The products by `t_dot_{kind}`, and by `t_wgmma_{kind}`, of matrices that divide no tile, in
/// numbers of one type.
fn dot<T: Number, D: Number + PartialEq + std::fmt::Debug + Default>(
    kind: &str,
    number: impl Fn(i8) -> T,
    sum: impl Fn(i32) -> D,
) {
    let (m, n, k) = (40usize, 72usize, 80usize);
    let (a, b) = (small(m * k, 70), small(k * n, 71));
    let element = |row: usize, column: usize| {
        (0..k).map(|at| i32::from(a[row * k + at]) * i32::from(b[at * n + column])).sum()
    };
    let expected: Vec<D> = (0..m * n).map(|at| sum(element(at / n, at % n))).collect();
    let [a, b] = [&a, &b].map(|of| of.iter().map(|&v| number(v)).collect::<Vec<T>>());
    for (file, rows) in [("t_dot", 32), ("t_wgmma", 64)] {
        on_every_schedule(&format!("{file}_{kind}"), |gpu| {
            let (a, b, c) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<D>(m * n));
            let sizes = [m, n, k].map(|v| v as i32);
            let arguments: [&dyn Argument; 6] = [&a, &b, &c, &sizes[0], &sizes[1], &sizes[2]];
            gpu.launch_with("t_dot", [m.div_ceil(rows) as u32, 2, 1], 128, 48 << 10, &arguments);
            assert_eq!(c.download().unwrap(), expected);
        });
    }
}

#[test]
fn triton_products_on_tensor_cores() {
    dot("bf16", |v| bf16::from_f32(v.into()), |v| v as f32);
    dot("f16", |v| f16::from_f32(v.into()), |v| v as f32);
    dot("tf32", f32::from, |v| v as f32);
    dot("s8", |v| v, |v| v);
}

#[test]
fn triton_products_by_tensor_maps() {
    // The first dimension divides no tile, so that copies fill with zeros and leave out.
    let (m, n, k) = (72usize, 104usize, 80usize);
    let (a, b) = (small(m * k, 75), small(k * n, 76));
    let element = |row: usize, column: usize| -> i32 {
        (0..k).map(|at| i32::from(a[row * k + at]) * i32::from(b[at * n + column])).sum()
    };
    let expected: Vec<f32> = (0..m * n).map(|at| element(at / n, at % n) as f32).collect();
    let [a, b] = [&a, &b].map(|of| of.iter().map(|&v| bf16::from_f32(v.into())).collect::<Vec<_>>());
    let map =
        |address: u64, element_type: ElementType, [rows, columns]: [usize; 2], tile: &[u32], swizzle| {
            TensorMap::tiled(&TiledTensor {
                address,
                element_type,
                shape: &[columns as u64, rows as u64],
                strides: &[columns as u64 * u64::from(element_type.bytes())],
                tile,
                element_strides: &[1, 1],
                swizzle,
                fill: Fill::Zeros,
            })
            .unwrap()
        };
    on_every_schedule("t_tensor_maps", |gpu| {
        let (a, b, c) = (gpu.buffer(&a), gpu.buffer(&b), gpu.zeros::<f32>(m * n));
        // Boxes and swizzles are those of the compiler's metadata.
        let of_a = map(a.addr(), ElementType::Bf16, [m, k], &[32, 64], Swizzle::Bytes64);
        let of_b = map(b.addr(), ElementType::Bf16, [k, n], &[64, 32], Swizzle::Bytes128);
        let of_c = map(c.addr(), ElementType::F32, [m, n], &[32, 64], Swizzle::Bytes128);
        let (shapes, strides) = ([m, k, n].map(|v| v as i32), [k, n].map(|v| v as u64));
        let arguments: [&dyn Argument; 16] = [
            &of_a,
            &shapes[0],
            &shapes[1],
            &strides[0],
            &1u64,
            &of_b,
            &shapes[1],
            &shapes[2],
            &strides[1],
            &1u64,
            &of_c,
            &shapes[0],
            &shapes[2],
            &strides[1],
            &1u64,
            &shapes[1],
        ];
        gpu.launch_with("t_tensor_maps", [2, 2, 1], 128, 48 << 10, &arguments);
        assert_eq!(c.download().unwrap(), expected);
    });
}

#[test]
fn triton_product_of_a_product() {
    let (m, k, blocks) = (64usize, 32usize, 3usize);
    // Products that bf16 has exactly.
    let [a, b, c] = [(m * k, 72), (blocks * k * m, 73), (blocks * m * k, 74)]
        .map(|(n, seed)| words(n, seed).into_iter().map(|v| (v % 3) as i32 - 1).collect::<Vec<_>>());
    let mut expected = vec![0; m * k];
    for block in 0..blocks {
        for row in 0..m {
            let first = |column: usize| -> i32 {
                (0..k).map(|at| a[row * k + at] * b[(block * k + at) * m + column]).sum()
            };
            let first: Vec<i32> = (0..m).map(first).collect();
            for column in 0..k {
                let more = (0..m).map(|at| first[at] * c[(block * m + at) * k + column]);
                expected[row * k + column] += more.sum::<i32>();
            }
        }
    }
    let expected: Vec<f32> = expected.into_iter().map(|v| v as f32).collect();
    let [a, b, c] = [a, b, c].map(|of| of.into_iter().map(|v| bf16::from_f32(v as f32)).collect::<Vec<_>>());
    on_every_schedule("t_wgmma_chain", |gpu| {
        let (a, b, c) = (gpu.buffer(&a), gpu.buffer(&b), gpu.buffer(&c));
        let d = gpu.zeros::<f32>(m * k);
        gpu.launch_with("t_wgmma_chain", 1, 128, 48 << 10, &[&a, &b, &c, &d, &(blocks as i32)]);
        assert_eq!(d.download().unwrap(), expected);
    });
}

#[test]
fn triton_sums_columns() {
    let (rows, columns) = (75usize, 128usize);
    let x = words(rows * columns, 63);
    let column = |j: usize| (0..rows).fold(0u32, |s, i| s.wrapping_add(x[i * columns + j]));
    let expected: Vec<u32> = (0..columns).map(column).collect();
    on_every_schedule("t_column_sum", |gpu| {
        let (x, y) = (gpu.buffer(&x), gpu.zeros::<u32>(columns));
        gpu.launch_with("t_column_sum", 2, 128, 512, &[&x, &y, &(rows as i32), &(columns as i32)]);
        assert_eq!(y.download().unwrap(), expected);
    });
}

#[test]
fn triton_running_sums() {
    let x = words(2048, 64);
    on_every_schedule("t_cumsum", |gpu| {
        let (x, y) = (gpu.buffer(&x), gpu.zeros::<u32>(2048));
        gpu.launch_with("t_cumsum", 2, 128, 128, &[&x, &y]);
        assert_eq!(y.download().unwrap(), running(&x.download().unwrap(), 1024));
    });
}

#[test]
fn triton_histogram() {
    let n = 1400;
    let x: Vec<u32> = words(n, 65).iter().map(|w| w % 64).collect();
    let mut expected = vec![0u32; 64];
    x.iter().for_each(|v| expected[*v as usize] += 1);
    on_every_schedule("t_histogram", |gpu| {
        let (x, y) = (gpu.buffer(&x), gpu.zeros::<u32>(64));
        gpu.launch_with("t_histogram", 3, 128, 256, &[&x, &y, &(n as i32)]);
        assert_eq!(y.download().unwrap(), expected);
    });
}

#[test]
fn triton_argmax_takes_the_first() {
    let (rows, columns) = (5usize, 410usize);
    // Few values, so that the largest occurs often.
    let x: Vec<i32> = words(rows * columns, 66).iter().map(|w| (w % 40) as i32 - 30).collect();
    let (mut values, mut places) = (vec![], vec![]);
    for row in x.chunks(columns) {
        let top = *row.iter().max().unwrap();
        values.push(top);
        places.push(row.iter().position(|v| *v == top).unwrap() as i32);
    }
    on_every_schedule("t_argmax", |gpu| {
        let (x, v, i) = (gpu.buffer(&x), gpu.zeros::<i32>(rows), gpu.zeros::<i32>(rows));
        gpu.launch_with("t_argmax", rows as u32, 128, 32, &[&x, &v, &i, &(columns as i32)]);
        assert_eq!((v.download().unwrap(), i.download().unwrap()), (values.clone(), places.clone()));
    });
}

#[test]
fn triton_gathers_rows() {
    let (width, picks) = (100usize, 9usize);
    let table = floats(20 * width, 67);
    let index: Vec<u32> = words(picks, 68).iter().map(|w| w % 20).collect();
    let expected: Vec<f32> =
        index.iter().flat_map(|i| table[*i as usize * width..][..width].to_vec()).collect();
    on_every_schedule("t_gather", |gpu| {
        let (t, i, y) = (gpu.buffer(&table), gpu.buffer(&index), gpu.zeros::<f32>(picks * width));
        gpu.launch("t_gather", picks as u32, 128, &[&t, &i, &y, &(width as i32)]);
        assert_eq!(y.download().unwrap(), expected);
    });
}

#[test]
fn triton_sorts() {
    let x: Vec<i32> = words(512, 69).iter().map(|w| *w as i32).collect();
    let mut expected = x.clone();
    expected.chunks_mut(256).for_each(<[i32]>::sort_unstable);
    on_every_schedule("t_sort", |gpu| {
        let (x, y) = (gpu.buffer(&x), gpu.zeros::<i32>(512));
        gpu.launch_with("t_sort", 2, 128, 1024, &[&x, &y]);
        assert_eq!(y.download().unwrap(), expected);
    });
}

#[test]
fn triton_transposes_halves_by_ldmatrix() {
    let (m, n) = (50usize, 80usize);
    let x: Vec<f16> =
        words(m * n, 70).iter().map(|w| f16::from_f32((w % 1999) as f32 / 8.0 - 100.0)).collect();
    let bits: Vec<u16> = x.iter().map(|v| v.to_bits()).collect();
    let expected: Vec<u16> =
        (0..m * n).map(|k| f16::from_f32(x[k % m * n + k / m].to_f32() * 2.0).to_bits()).collect();
    on_every_schedule("t_transpose_half", |gpu| {
        let (x, y) = (gpu.buffer(&bits), gpu.zeros::<u16>(m * n));
        let sizes = [m as i32, n as i32];
        gpu.launch_with("t_transpose_half", [2, 2, 1], 128, 4096, &[&x, &y, &sizes[0], &sizes[1]]);
        assert_eq!(y.download().unwrap(), expected);
    });
}

/// Philox 4x32 with 10 rounds, the first word.
fn philox(seed: u32, counter: u32) -> u32 {
    let high = |a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32;
    let (mut c, mut k) = ([counter, 0, 0, 0], [seed, 0]);
    for _ in 0..10 {
        let (a, b) = (0xd251_1f53, 0xcd9e_8d57u32);
        c = [
            high(b, c[2]) ^ c[1] ^ k[0],
            b.wrapping_mul(c[2]),
            high(a, c[0]) ^ c[3] ^ k[1],
            c[0].wrapping_mul(a),
        ];
        k = [k[0].wrapping_add(0x9e37_79b9), k[1].wrapping_add(0xbb67_ae85)];
    }
    c[0]
}

#[test]
fn triton_random_numbers() {
    let expected: Vec<u32> = (0..512).map(|i| philox(77, i)).collect();
    on_every_schedule("t_philox", |gpu| {
        let y = gpu.zeros::<u32>(512);
        gpu.launch("t_philox", 2, 128, &[&y, &77]);
        assert_eq!(y.download().unwrap(), expected);
    });
}

#[test]
fn a_histogram_whose_bins_are_in_all_blocks_of_a_cluster() {
    let (n, bins_per_block) = (700usize, 20usize);
    for cluster in [1, 2, 4] {
        let bins = bins_per_block * cluster as usize;
        let values: Vec<u32> = words(n, 71).into_iter().map(|word| word % (bins as u32 + 3)).collect();
        let mut expected = vec![0u32; bins];
        values.iter().for_each(|&value| expected[(value as usize).min(bins - 1)] += 1);
        let shape = GridConfig::new(8, 64, 4 * bins_per_block as u32).in_clusters_of([cluster, 1, 1]);
        on_every_schedule("cluster", |gpu| {
            let (values, counts) = (gpu.buffer(&values), gpu.zeros::<u32>(bins));
            let arguments: [&dyn Argument; 4] = [&values, &counts, &(n as i32), &(bins_per_block as i32)];
            gpu.launch_in_clusters("cluster_histogram", shape, &arguments);
            assert_eq!(counts.download().unwrap(), expected);
        });
    }
}

#[test]
fn a_histogram_without_its_last_barrier_is_reported() {
    let shape = GridConfig::new(2, 32, 80).in_clusters_of([2, 1, 1]);
    on_every_schedule("cluster", |gpu| {
        if !gpu.is_checked() {
            return;
        }
        let (values, counts) =
            (gpu.buffer(&(0..64).map(|i| i % 40).collect::<Vec<u32>>()), gpu.zeros::<u32>(40));
        let arguments: [&dyn Argument; 4] = [&values, &counts, &64, &20];
        let Err(MachineError::Fault(fault)) = gpu.run("cluster_histogram_early", shape, &arguments) else {
            panic!("no report")
        };
        // The race shows first, or the end of a block that another one has yet to count in.
        let kind = &fault.kind;
        assert!(matches!(kind, FaultKind::Race(_) | FaultKind::EndedBlock { .. }), "{fault}");
    });
}

#[test]
fn rows_are_normalised_by_a_cluster() {
    let (part, rows) = (96usize, 3usize);
    let x = floats(4 * part * rows, 72);
    let expected: Vec<f64> = x
        .chunks(4 * part)
        .flat_map(|row| {
            let squares: f64 = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
            let scale = 1.0 / (squares / row.len() as f64).sqrt();
            row.iter().map(move |&v| f64::from(v) * scale)
        })
        .collect();
    let shape = GridConfig::new(4 * rows as u32, 64, 4 * part as u32);
    on_every_schedule("cluster", |gpu| {
        let (from, to) = (gpu.buffer(&x), gpu.zeros::<f32>(x.len()));
        gpu.launch_in_clusters("cluster_rms_norm", shape, &[&from, &to, &(part as i32)]);
        assert_close(&to.download().unwrap(), &expected, 1e-5);
    });
}
