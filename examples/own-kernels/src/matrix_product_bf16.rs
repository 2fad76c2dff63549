//! A matrix product on tensor cores: BF16 numbers, sums in f32.
//!
//! Tiles of both operands go to shared memory by asynchronous copies, into a ring of three stages: two
//! are under way while the block multiplies the third. In a row of a tile, pieces of 16 bytes change
//! places (`^`), so that the eight rows of a matrix that `ldmatrix` reads lie in different banks.
//!
//! Sound because each thread waits for its own copies and then meets the block at a barrier: behind it
//! the stage is complete. Behind the same barrier all threads are done with the stage before, which the
//! next copies overwrite.

use epoxide_simt::*;

/// Stages of the ring.
const STAGES: u32 = 3;

shared! {
    /// A tile of each operand, as pairs of BF16 numbers.
    struct Stage {
        /// `[128, 32]` numbers of `a`: rows of 64 bytes.
        a: [u32; 2048],
        /// `[32, 128]` numbers of `b`: rows of 256 bytes.
        b: [u32; 2048],
    }
}

/// `c[m, n] = a[m, k] * b[k, n]` for BF16 numbers, two in each element of `a` and `b`. A block computes
/// 128 x 128 sums, a warp 64 x 32 of them.
#[kernel(
    threads = 256, block = 256, grid = (m / 128) * (n / 128), shared = STAGES * Stage::BYTES,
    barriers = 1, min_blocks = 2, registers = 128,
    requires(
        m.is_multiple_of(128), n.is_multiple_of(128), k.is_multiple_of(32),
        m >= 128, n >= 128, k >= 32, m <= 1 << 15, n <= 1 << 15, k <= 1 << 15,
    )
)]
pub unsafe fn matrix_product_bf16(a: Global<u32>, b: Global<u32>, c: Global<f32>, m: u32, n: u32, k: u32) {
    let _ = m;
    let tiles_across = n / 128;
    let row = ctaid() / tiles_across * 128;
    let column = ctaid() % tiles_across * 128;
    let ring = dynamic_shared();
    let copies = Copies::new(a, b, row, column, n, k);
    let pieces = Pieces::new();

    let tiles = k / 32;
    unroll!(2, N => {
        if (N as u32) < tiles {
            copies.start(Stage::at(ring + N as u32 * Stage::BYTES), N as u32);
        }
        cp_async_commit();
    });
    let mut sums = [[[0.0; 4]; 4]; 4];
    // The stage that is multiplied, and the one that is filled.
    let (mut full, mut free) = (0, 2);
    stride!(tile in 0..tiles => {
        // The group behind this tile's is the one that may still be under way.
        cp_async_wait::<1>();
        barrier_sync();
        if tile + 2 < tiles {
            copies.start(Stage::at(ring + free * Stage::BYTES), tile + 2);
        }
        cp_async_commit();
        pieces.multiply(Stage::at(ring + full * Stage::BYTES), &mut sums);
        full = if full == STAGES - 1 { 0 } else { full + 1 };
        free = if free == STAGES - 1 { 0 } else { free + 1 };
    });

    let i = row + pieces.row + laneid() / 4;
    let j = column + pieces.column + laneid() % 4 * 2;
    unroll!(4, I => {
        unroll!(4, J => {
            let [s0, s1, s2, s3] = sums[I][J];
            let at = (i + I as u32 * 16) * n + j + J as u32 * 8;
            st_u64(c.at(at), pair(s0, s1));
            st_u64(c.at(at + 8 * n), pair(s2, s3));
        });
    });
}

/// Two numbers, as 8 bytes.
#[device]
fn pair(low: f32, high: f32) -> u64 {
    low.to_bits() as u64 | (high.to_bits() as u64) << 32
}

/// A thread's share of the copy of a tile: a piece of 16 bytes of two rows of each operand.
#[derive(Clone, Copy)]
struct Copies {
    /// Addresses in tile 0.
    a: u64,
    b: u64,
    /// Offsets in the tiles of a stage.
    a_at: u32,
    b_at: u32,
    /// Bytes of a row.
    a_row: u64,
    b_row: u64,
}

impl Copies {
    #[device]
    fn new(a: Global<u32>, b: Global<u32>, row: u32, column: u32, n: u32, k: u32) -> Copies {
        let (a_row, a_piece) = (tid() / 4, tid() % 4);
        let (b_row, b_piece) = (tid() / 16, tid() % 16);
        Copies {
            a: a.at((row + a_row) * (k / 2) + a_piece * 4),
            b: b.at(b_row * (n / 2) + column / 2 + b_piece * 4),
            a_at: a_row * 64 + (a_piece ^ (a_row / 2 % 4)) * 16,
            b_at: b_row * 256 + (b_piece ^ (b_row % 8)) * 16,
            a_row: k as u64 * 2,
            b_row: n as u64 * 2,
        }
    }

    /// Starts the copies of a tile.
    ///
    /// # Safety
    /// The operands have the tile, and no thread uses the stage.
    #[device]
    unsafe fn start(self, stage: Stage, tile: u32) {
        let (a, b) = (self.a + tile as u64 * 64, self.b + tile as u64 * 32 * self.b_row);
        let (to_a, to_b) = (stage.a().at(0) + self.a_at, stage.b().at(0) + self.b_at);
        cp_async_16(to_a, a);
        cp_async_16(to_a + 64 * 64, a + 64 * self.a_row);
        cp_async_16(to_b, b);
        cp_async_16(to_b + 16 * 256, b + 16 * self.b_row);
    }
}

/// A lane's part of a tile: pieces of four matrices of 16 x 16 of `a`, and of two of `b`.
#[derive(Clone, Copy)]
struct Pieces {
    /// The first row and column of the warp's sums, in the block's.
    row: u32,
    column: u32,
    /// Offsets of the row of a matrix that the lane names, for both halves of a tile's 32.
    a_at: [u32; 2],
    /// The same for both halves of the warp's columns.
    b_at: [u32; 2],
}

impl Pieces {
    #[device]
    fn new() -> Pieces {
        let (warp, lane) = (tid() / 32, laneid());
        let (row, column) = (warp / 4 * 64, warp % 4 * 32);
        // Rows 0 to 7, rows 8 to 15, and the same of the next eight columns.
        let (matrix, r) = (lane / 8, lane % 8);
        let down = matrix % 2 * 8 + r;
        let a_at = (row + down) * 64 + ((matrix / 2) ^ (r / 2)) * 16;
        let b_at = down * 256 + ((column / 8 + matrix / 2) ^ r) * 16;
        Pieces { row, column, a_at: [a_at, a_at ^ 32], b_at: [b_at, b_at ^ 32] }
    }

    /// Adds the product of a stage's tiles.
    ///
    /// # Safety
    /// All 32 lanes call it, and the stage is complete.
    #[device]
    unsafe fn multiply(self, stage: Stage, sums: &mut [[[f32; 4]; 4]; 4]) {
        unroll!(2, HALF => {
            let mut left = [[0; 4]; 4];
            unroll!(4, I => {
                left[I] = ldmatrix_x4(stage.a().at(0) + self.a_at[HALF] + I as u32 * 16 * 64);
            });
            let mut right = [[0; 4]; 2];
            unroll!(2, J => {
                right[J] = ldmatrix_x4_trans(stage.b().at(0) + self.b_at[J] + HALF as u32 * 16 * 256);
            });
            unroll!(4, I => {
                unroll!(4, J => {
                    let of_b = [right[J / 2][J % 2 * 2], right[J / 2][J % 2 * 2 + 1]];
                    sums[I][J] = mma_m16n8k16_bf16(left[I], of_b, sums[I][J]);
                });
            });
        });
    }
}
