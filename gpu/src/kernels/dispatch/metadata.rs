//! Metadata of rows: their source indices and top-k entries, which a block's last warps send.
//!
//! Rows of consecutive tokens at a rank are consecutive. So a warp that takes several tokens at
//! once, an entry a lane, fills whole packets of the link. The warps that move rows would send a
//! token's few bytes at a time.

use crate::kernels::ids::Id;
use crate::kernels::list::{Destination, entry_at};
use crate::layout::{DispatchArgs, FEW_RANKS, SEND_LIST_STRIDE, SEND_ROW_STRIDE};
use crate::simt::*;

/// A lane's entry among those of the tokens that its warp takes together: of token `token`, top-k
/// entry `k`.
#[derive(Clone, Copy)]
pub struct Metadata {
    /// The lane's token, or `u32::MAX` where there is none for it.
    token: u32,
    k: u32,
    /// Where the token goes: its row at every rank, or -1. With many ranks, the list of its
    /// destinations is read when the entries are sent.
    rows: [i32; FEW_RANKS],
    /// The id of a physical expert.
    id: Id,
    weight: f32,
}

/// Tokens that a warp takes together.
#[device]
pub fn tokens_at_once(args: &DispatchArgs) -> u32 {
    32 / columns(args)
}

/// Entries of a token, as a divisor: at most 32, and a clamp instead of a test, so that no division
/// needs a trap.
#[device]
fn columns(args: &DispatchArgs) -> u32 {
    let columns = args.num_topk.clamp(1, 32);
    // SAFETY: the clamp says so.
    unsafe { assume(columns >= 1) };
    columns
}

/// The entries of the tokens that a warp takes together: of rows, or of rows by expert.
#[derive(Clone, Copy)]
pub struct Entries<const MANY: bool, const BY_EXPERT: bool> {
    of_rows: Metadata,
    by_expert: Selection,
}

impl<const MANY: bool, const BY_EXPERT: bool> Entries<MANY, BY_EXPERT> {
    /// Reads those of the tokens from `first` on that are before `end`, ahead of their use.
    /// `planned`: whether rows have places.
    #[device]
    pub unsafe fn fetch(args: &DispatchArgs, first: u32, end: u32, planned: bool) -> Self {
        if BY_EXPERT {
            let by_expert = Selection::fetch(args, first, if planned { end } else { first });
            Entries { of_rows: Metadata::NONE, by_expert }
        } else {
            Entries { of_rows: Metadata::fetch::<MANY>(args, first, end), by_expert: Selection::NONE }
        }
    }

    /// Sends them.
    #[device]
    pub unsafe fn send(&self, args: &DispatchArgs) {
        if BY_EXPERT {
            self.by_expert.send(args);
        } else {
            self.of_rows.send::<MANY>(args);
        }
    }
}

/// A lane's selection of an expert, by entry `k` of token `token`.
#[derive(Clone, Copy)]
struct Selection {
    to: Destination,
    token: u32,
    k: u32,
    weight: f32,
}

impl Selection {
    const NONE: Selection = Selection { to: Destination { row: -1, rank: 0 }, token: 0, k: 0, weight: 0.0 };

    /// The lane's, of those of the tokens from `first` on that are before `end`.
    ///
    /// # Safety
    /// The entries of tokens before `end` lie inside their tensors and lists.
    #[device]
    unsafe fn fetch(args: &DispatchArgs, first: u32, end: u32) -> Selection {
        let (lane, columns) = (laneid(), columns(args));
        let (nth, k) = (lane / columns, lane % columns);
        let token = first + nth;
        let exists = (nth < tokens_at_once(args)) & (token < end);
        let to = Destination::at(entry_at(args.send_row.0, token, k), exists);
        let entry = row_major(token, args.num_topk, k);
        let is_weighted = exists & !args.topk_weights.is_null();
        let weight = ld_f32_if(is_weighted, args.topk_weights.array::<f32>().at(entry));
        Selection { to, token, k, weight }
    }

    /// Writes where the selection's row comes from, and its weight.
    ///
    /// # Safety
    /// The row was planned inside the pool; this is its only writer.
    #[device]
    unsafe fn send(&self, args: &DispatchArgs) {
        if self.to.row >= 0 {
            let (pool, base, row) = (&args.comm.pool, self.to.pool(&args.comm), self.to.row as u64);
            Global::<u32>::new(base + pool.recv_src_idx).st(row, self.token);
            let entry = Global::<[u32; 2]>::new(base + pool.recv_topk_idx).at(row);
            st_u32(entry, args.comm.rank);
            st_u32(entry + 4, self.k);
            if !args.topk_weights.is_null() {
                Global::<f32>::new(base + pool.recv_topk_weights).st(row, self.weight);
            }
        }
    }
}

impl Metadata {
    const NONE: Metadata =
        Metadata { token: u32::MAX, k: 0, rows: [-1; FEW_RANKS], id: Id::NONE, weight: 0.0 };

    /// Reads the entries of the tokens from `first` on that are before `end`, ahead of their use.
    ///
    /// # Safety
    /// The entries of tokens before `end` lie inside their tensors.
    #[device]
    pub unsafe fn fetch<const MANY: bool>(args: &DispatchArgs, first: u32, end: u32) -> Metadata {
        let (lane, columns) = (laneid(), columns(args));
        let (nth, k) = (lane / columns, lane % columns);
        let token = first + nth;
        let exists = (nth < tokens_at_once(args)) & (token < end);
        let (mut id, mut weight) = (Id::NONE, 0.0);
        let mut rows = [-1; FEW_RANKS];
        if exists {
            if !MANY {
                let at = args.send_row.array::<i32>().at(token * SEND_ROW_STRIDE);
                let (low, high) = (ld_v4(at), ld_v4(at + 16));
                unroll!(8, RANK => {
                    rows[RANK] = if RANK < 4 { low[RANK % 4] } else { high[RANK % 4] } as i32;
                });
            }
            if k < args.num_topk {
                let entry = row_major(token, args.num_topk, k);
                id = Id::load(args.topk_idx, args.narrow_ids, entry);
                weight = args.topk_weights.array::<f32>().ld(entry);
            }
        }
        Metadata { token: if exists { token } else { u32::MAX }, k, rows, id, weight }
    }

    /// Writes source index, local expert ids and weights to every rank that wants the lane's token.
    ///
    /// # Safety
    /// Rows were planned inside the pools; this is the entry's only writer.
    #[device]
    pub unsafe fn send<const MANY: bool>(&self, args: &DispatchArgs) {
        let expert = self.id.value(args.narrow_ids);
        if MANY {
            let mut nth = if self.token == u32::MAX { SEND_LIST_STRIDE } else { 0 };
            while nth < SEND_LIST_STRIDE {
                let to = Destination::at(entry_at(args.send_row.0, self.token, nth), true);
                if to.row < 0 {
                    break;
                }
                self.send_to(args, expert, to.rank, to.pool(&args.comm), to.row as u64);
                nth += 1;
            }
            return;
        }
        unroll!(8, RANK => {
            if self.rows[RANK] >= 0 {
                self.send_to(args, expert, RANK as u32, args.comm.pools[RANK].0, self.rows[RANK] as u64);
            }
        });
    }

    /// The same of physical expert `expert` to rank `rank`, whose pool begins at `base`.
    #[device]
    unsafe fn send_to(&self, args: &DispatchArgs, expert: i64, rank: u32, base: u64, row: u64) {
        let pool = &args.comm.pool;
        if self.k < args.num_topk {
            let first = rank * args.local_experts;
            let local = expert - first as i64;
            let here = local >= 0 && local < args.local_experts as i64;
            let entry = row_major(row, args.num_topk, self.k);
            st_i64(Global::<i64>::new(base + pool.recv_topk_idx).at(entry), if here { local } else { -1 });
            let weights = Global::<f32>::new(base + pool.recv_topk_weights);
            st_f32(weights.at(entry), if here { self.weight } else { 0.0 });
        }
        if self.k == 0 {
            Global::<u32>::new(base + pool.recv_src_idx).st(row, self.token);
        }
    }
}
