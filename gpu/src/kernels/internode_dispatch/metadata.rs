//! Metadata of a row that crosses nodes: its destinations, and its token's top-k entries.

use crate::layout::{DispatchArgs, FEW_RANKS};
use crate::simt::*;

/// A token's metadata: lane r holds its row at rank r, and lane k its top-k entry k. By expert,
/// lane k holds the row of entry k.
#[derive(Clone, Copy)]
pub struct Metadata {
    /// The row at rank r, or -1.
    pub row: i32,
    /// By expert: the rank of this node that has the row.
    pub rank: u32,
    /// A global id.
    pub expert: i64,
    pub weight: f32,
}

impl Metadata {
    pub const NONE: Metadata = Metadata { row: -1, rank: 0, expert: -1, weight: 0.0 };

    /// Writes source index, local expert ids and weights to every rank that wants the token.
    ///
    /// # Safety
    /// Rows were planned inside the pools; this is the row's only writer.
    #[device]
    pub unsafe fn send(&self, args: &DispatchArgs, token: u32, lane: u32) {
        let pool = &args.comm.pool;
        // All rows first: the shuffles overlap, and the stores do not wait for them one by one.
        let mut rows = [0i32; FEW_RANKS];
        unroll!(8, RANK => { rows[RANK] = shfl_u32(self.row as u32, RANK as u32) as i32 });
        unroll!(8, RANK => {
            if rows[RANK] >= 0 {
                let (base, row) = (args.comm.pools[RANK].0, rows[RANK] as u64);
                if lane < args.num_topk {
                    let first = args.first_expert + RANK as u32 * args.local_experts;
                    let local = self.expert - first as i64;
                    let here = local >= 0 && local < args.local_experts as i64;
                    let entry = row_major(row, args.num_topk, lane);
                    let ids = Global::<i64>::new(base + pool.recv_topk_idx);
                    st_i64(ids.at(entry), if here { local } else { -1 });
                    let weights = Global::<f32>::new(base + pool.recv_topk_weights);
                    st_f32(weights.at(entry), if here { self.weight } else { 0.0 });
                }
                if lane == 0 {
                    Global::<u32>::new(base + pool.recv_src_idx).st(row, token);
                }
            }
        });
    }

    /// By expert: writes where the lane's row comes from, `token` of global rank `source`, and its
    /// weight. The pool of its rank begins at `base`.
    ///
    /// # Safety
    /// The row was planned inside the pool; this is its only writer.
    #[device]
    pub unsafe fn send_selection(&self, args: &DispatchArgs, token: u32, source: u32, base: u64) {
        if self.row >= 0 {
            let (pool, row) = (&args.comm.pool, self.row as u64);
            Global::<u32>::new(base + pool.recv_src_idx).st(row, token);
            let entry = Global::<[u32; 2]>::new(base + pool.recv_topk_idx).at(row);
            st_u32(entry, source);
            st_u32(entry + 4, laneid());
            if !args.topk_weights.is_null() {
                Global::<f32>::new(base + pool.recv_topk_weights).st(row, self.weight);
            }
        }
    }
}
