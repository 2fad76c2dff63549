//! How rows are summed: gathered by bulk loads into a ring of slots, from the contributors to a
//! token, added in registers, and stored.

use crate::kernels::epoch::{aborted, note_missing_token, pool_of};
use crate::kernels::list::{Destination, entry_at};
use crate::kernels::ring::{Ring, Turn};
use crate::layout::{
    CombineArgs, ExpertCombineArgs, FEW_RANKS, MAX_SLOT_BYTES, MAX_WAITED_SLOT_BYTES, NAN_BITS,
    SEND_LIST_STRIDE, SEND_ROW_STRIDE, row_stride,
};
use crate::simt::*;

/// Vectors of 16 bytes that a lane sums at a time, in registers.
pub const VECTORS: usize = 8;

/// How many of them there are where a warp has more than sums to keep: one fewer, so that sixteen
/// warps have registers enough.
pub const fn vectors_of(fewer: bool) -> usize {
    if fewer { VECTORS - 1 } else { VECTORS }
}

// A slot has so many vectors of each lane.
const _: () = assert!(MAX_SLOT_BYTES == 32 * 16 * VECTORS as u32);
const _: () = assert!(MAX_WAITED_SLOT_BYTES == 32 * 16 * vectors_of(true) as u32);

/// The element type of 16 bytes of a row.
pub trait Summand {
    /// Bytes of an element.
    const BYTES: u32;
    /// Adds a vector to its sums.
    fn add(sum: &mut [f32; 8], vector: [u32; 4]);
    /// Adds a vector times a weight.
    fn add_weighted(sum: &mut [f32; 8], vector: [u32; 4], weight: f32);
    /// Rounds the sums to a vector.
    fn round(sum: &[f32; 8]) -> [u32; 4];
}

pub struct Bf16;
pub struct F16;
pub struct F32;

impl Summand for Bf16 {
    const BYTES: u32 = 2;

    #[device]
    fn add(sum: &mut [f32; 8], v: [u32; 4]) {
        sum[0] += bf16x2_lo(v[0]);
        sum[1] += bf16x2_hi(v[0]);
        sum[2] += bf16x2_lo(v[1]);
        sum[3] += bf16x2_hi(v[1]);
        sum[4] += bf16x2_lo(v[2]);
        sum[5] += bf16x2_hi(v[2]);
        sum[6] += bf16x2_lo(v[3]);
        sum[7] += bf16x2_hi(v[3]);
    }

    #[device]
    fn add_weighted(sum: &mut [f32; 8], v: [u32; 4], weight: f32) {
        sum[0] += bf16x2_lo(v[0]) * weight;
        sum[1] += bf16x2_hi(v[0]) * weight;
        sum[2] += bf16x2_lo(v[1]) * weight;
        sum[3] += bf16x2_hi(v[1]) * weight;
        sum[4] += bf16x2_lo(v[2]) * weight;
        sum[5] += bf16x2_hi(v[2]) * weight;
        sum[6] += bf16x2_lo(v[3]) * weight;
        sum[7] += bf16x2_hi(v[3]) * weight;
    }

    #[device]
    fn round(s: &[f32; 8]) -> [u32; 4] {
        [pack_bf16x2(s[0], s[1]), pack_bf16x2(s[2], s[3]), pack_bf16x2(s[4], s[5]), pack_bf16x2(s[6], s[7])]
    }
}

impl Summand for F16 {
    const BYTES: u32 = 2;

    #[device]
    fn add(sum: &mut [f32; 8], v: [u32; 4]) {
        sum[0] += f16x2_lo(v[0]);
        sum[1] += f16x2_hi(v[0]);
        sum[2] += f16x2_lo(v[1]);
        sum[3] += f16x2_hi(v[1]);
        sum[4] += f16x2_lo(v[2]);
        sum[5] += f16x2_hi(v[2]);
        sum[6] += f16x2_lo(v[3]);
        sum[7] += f16x2_hi(v[3]);
    }

    #[device]
    fn add_weighted(sum: &mut [f32; 8], v: [u32; 4], weight: f32) {
        sum[0] += f16x2_lo(v[0]) * weight;
        sum[1] += f16x2_hi(v[0]) * weight;
        sum[2] += f16x2_lo(v[1]) * weight;
        sum[3] += f16x2_hi(v[1]) * weight;
        sum[4] += f16x2_lo(v[2]) * weight;
        sum[5] += f16x2_hi(v[2]) * weight;
        sum[6] += f16x2_lo(v[3]) * weight;
        sum[7] += f16x2_hi(v[3]) * weight;
    }

    #[device]
    fn round(s: &[f32; 8]) -> [u32; 4] {
        [pack_f16x2(s[0], s[1]), pack_f16x2(s[2], s[3]), pack_f16x2(s[4], s[5]), pack_f16x2(s[6], s[7])]
    }
}

impl Summand for F32 {
    const BYTES: u32 = 4;

    #[device]
    fn add(sum: &mut [f32; 8], v: [u32; 4]) {
        sum[0] += f32::from_bits(v[0]);
        sum[1] += f32::from_bits(v[1]);
        sum[2] += f32::from_bits(v[2]);
        sum[3] += f32::from_bits(v[3]);
    }

    #[device]
    fn add_weighted(sum: &mut [f32; 8], v: [u32; 4], weight: f32) {
        sum[0] += f32::from_bits(v[0]) * weight;
        sum[1] += f32::from_bits(v[1]) * weight;
        sum[2] += f32::from_bits(v[2]) * weight;
        sum[3] += f32::from_bits(v[3]) * weight;
    }

    #[device]
    fn round(s: &[f32; 8]) -> [u32; 4] {
        [s[0].to_bits(), s[1].to_bits(), s[2].to_bits(), s[3].to_bits()]
    }
}

/// The contributors to a token's sum: lane l holds contributor l, if there is one. They are added
/// in ascending order.
pub trait Contributors {
    /// Whether a lane sums fewer vectors at a time, because its warp has this to keep:
    /// [`vectors_of`].
    const FEWER: bool;
    /// Whether rows are weighted: [`Contributors::weight`].
    const WEIGHTED: bool = false;
    /// The weight of the lane's row of `token`, where it has one.
    #[device]
    unsafe fn weight(&self, _token: u32) -> f32 {
        1.0
    }
    /// The lane's row of `token`, or -1.
    unsafe fn row(&self, token: u32) -> i32;
    /// Where the lane's row is.
    fn address(&self, row: i32) -> u64;
    /// Where the lane's weights of that row are.
    fn weights(&self, row: i32) -> u64;
    /// Returns when the lane's row may be read.
    unsafe fn wait(&self, row: i32);
    /// Lanes that may have one, rounded up to a multiple of 8.
    fn lanes(&self) -> u32;
}

/// The combine rows of the ranks of this node. They may be read once all ranks are ready.
pub struct Ranks<'a> {
    args: &'a CombineArgs,
    /// The lane's pool. Values that the arguments hold are not kept in registers.
    pool: u64,
    table: Global<i32>,
}

impl<'a> Ranks<'a> {
    /// `table`: i32 `[tokens, SEND_ROW_STRIDE]`.
    #[device]
    pub fn new(args: &'a CombineArgs, table: u64) -> Self {
        Ranks { args, pool: pool_of(&args.comm, laneid()), table: Global::new(table) }
    }

    /// Lane l: rank l's row of the token that has these entries, or -1; -1 in all lanes unless
    /// there is such a token. The function does not wait for its load.
    ///
    /// # Safety
    /// The entries of a token that exists are live.
    #[device]
    pub unsafe fn row_at(entries: Global<i32>, exists: bool) -> i32 {
        ld_i32_if((laneid() < SEND_ROW_STRIDE) & exists, entries.at(laneid()), -1)
    }
}

impl Contributors for Ranks<'_> {
    const FEWER: bool = false;

    /// # Safety
    /// The entries lie inside the table.
    #[device]
    unsafe fn row(&self, token: u32) -> i32 {
        Ranks::row_at(self.table.skip(row_major(token, SEND_ROW_STRIDE, 0)), true)
    }

    #[device]
    fn address(&self, row: i32) -> u64 {
        let stride = row_stride(self.args.row_bytes as u64);
        DevicePtr(self.pool + self.args.comm.pool.combine_x).row(row, stride)
    }

    #[device]
    fn weights(&self, row: i32) -> u64 {
        let offset = row as i64 * (self.args.num_topk * 4) as i64;
        (self.pool + self.args.comm.pool.combine_weights).wrapping_add_signed(offset)
    }

    #[device]
    unsafe fn wait(&self, _row: i32) {}

    #[device]
    fn lanes(&self) -> u32 {
        FEW_RANKS as u32
    }
}

/// The ranks whose rows a combine within a node sums.
pub trait Peers<'a>: Contributors {
    fn new(args: &'a CombineArgs) -> Self;
    /// The rank of a lane's row, and the row there.
    unsafe fn source(&self, row: i32) -> (u32, u32);
}

impl<'a> Peers<'a> for Ranks<'a> {
    #[device]
    fn new(args: &'a CombineArgs) -> Self {
        Ranks::new(args, args.send_row.0)
    }

    #[device]
    unsafe fn source(&self, row: i32) -> (u32, u32) {
        (laneid(), row as u32)
    }
}

/// The combine rows of many ranks: lane d has a token's d-th destination. A row is represented by
/// the number of its entry in the lists.
pub struct Listed<'a>(&'a CombineArgs);

impl Listed<'_> {
    /// # Safety
    /// `entry` is that of a row, or -1.
    #[device]
    unsafe fn destination(&self, entry: i32) -> Destination {
        Destination::at(entry_at(self.0.send_row.0, 0, entry as u32), entry >= 0)
    }
}

impl<'a> Peers<'a> for Listed<'a> {
    #[device]
    fn new(args: &'a CombineArgs) -> Self {
        Listed(args)
    }

    #[device]
    unsafe fn source(&self, row: i32) -> (u32, u32) {
        let Destination { row, rank } = self.destination(row);
        (rank, row as u32)
    }
}

impl Contributors for Listed<'_> {
    const FEWER: bool = false;

    /// # Safety
    /// The token has a list.
    #[device]
    unsafe fn row(&self, token: u32) -> i32 {
        let entry = (token * SEND_LIST_STRIDE + laneid()) as i32;
        if self.destination(entry).row >= 0 { entry } else { -1 }
    }

    #[device]
    fn address(&self, row: i32) -> u64 {
        // SAFETY: `row` gave the entry; pools are mapped.
        unsafe {
            let to = self.destination(row);
            let rows = DevicePtr(to.pool(&self.0.comm) + self.0.comm.pool.combine_x);
            rows.row(to.row, row_stride(self.0.row_bytes as u64))
        }
    }

    #[device]
    fn weights(&self, row: i32) -> u64 {
        let offset = |row: i32| row as i64 * (self.0.num_topk * 4) as i64;
        // SAFETY: as in `address`.
        unsafe {
            let to = self.destination(row);
            (to.pool(&self.0.comm) + self.0.comm.pool.combine_weights).wrapping_add_signed(offset(to.row))
        }
    }

    #[device]
    unsafe fn wait(&self, _row: i32) {}

    #[device]
    fn lanes(&self) -> u32 {
        SEND_LIST_STRIDE
    }
}

/// Rows by expert: lane k has the row of a token's entry k, which may have a weight. Several may be
/// of one rank.
pub struct ByExpert<'a> {
    listed: Listed<'a>,
    args: &'a ExpertCombineArgs,
}

impl<'a> ByExpert<'a> {
    #[device]
    pub fn new(args: &'a ExpertCombineArgs) -> Self {
        ByExpert { listed: Listed(&args.combine), args }
    }
}

impl Contributors for ByExpert<'_> {
    const FEWER: bool = false;
    const WEIGHTED: bool = true;

    /// # Safety
    /// The token has so many weights.
    #[device]
    unsafe fn weight(&self, token: u32) -> f32 {
        let entry = row_major(token, self.args.num_topk, laneid());
        let is_given = !self.args.weights.is_null() && (laneid() as u64) < self.args.num_topk;
        let weight = ld_f32_if(is_given, self.args.weights.array::<f32>().at(entry));
        if is_given { weight } else { 1.0 }
    }

    #[device]
    unsafe fn row(&self, token: u32) -> i32 {
        self.listed.row(token)
    }

    #[device]
    fn address(&self, row: i32) -> u64 {
        self.listed.address(row)
    }

    #[device]
    fn weights(&self, row: i32) -> u64 {
        self.listed.weights(row)
    }

    #[device]
    unsafe fn wait(&self, _row: i32) {}

    #[device]
    fn lanes(&self) -> u32 {
        SEND_LIST_STRIDE
    }
}

/// Where sums go. The whole warp calls each method.
pub trait Sink {
    /// Where the token's weights go; 0 where none are wanted.
    unsafe fn weights(&self, token: u32) -> u64;
    /// Takes an item's sum: vector J of a lane belongs at byte `lane * 16 + J * 512` of its
    /// `bytes`.
    unsafe fn store(&mut self, item: Item, bytes: u32, vectors: [[u32; 4]; VECTORS]);
}

/// The operation's outputs, of sums of so many vectors a lane: that of token t at
/// `rows + t * row_bytes`, its weights at `weights + t * num_topk * 4`.
pub struct Outputs<'a, const FEWER: bool>(&'a CombineArgs);

impl<'a, const FEWER: bool> Outputs<'a, FEWER> {
    #[device]
    pub fn new(args: &'a CombineArgs) -> Self {
        Outputs(args)
    }
}

impl<const FEWER: bool> Sink for Outputs<'_, FEWER> {
    #[device]
    unsafe fn weights(&self, token: u32) -> u64 {
        let weights = self.0.combined_weights;
        if weights.is_null() { 0 } else { weights.array::<f32>().at(row_major(token, self.0.num_topk, 0)) }
    }

    /// # Safety
    /// The output has room for every token.
    #[device]
    unsafe fn store(&mut self, item: Item, bytes: u32, vectors: [[u32; 4]; VECTORS]) {
        let row = self.0.combined_x.row(item.token, self.0.row_bytes);
        let to = row + (item.piece * self.0.slot_bytes) as u64;
        unroll!(8, J => {
            let at = laneid() * 16 + J as u32 * 512;
            if J < vectors_of(FEWER) && at < bytes {
                st_v4(to + at as u64, vectors[J]);
            }
        });
    }
}

/// Sums the rows of a warp's share of tokens, those of `gather`, which has just started; all warps
/// with a ring call it.
///
/// # Safety
/// `from`, `to` and the range are those of the operation, and whole warps call it. Items are the
/// same in all lanes of a warp.
#[device]
pub unsafe fn sum_rows<E: Summand, C: Contributors, S: Sink, const WHOLE: bool>(
    args: &CombineArgs,
    ring: &Ring,
    turn: &mut Turn,
    from: &C,
    to: &mut S,
    gather: Gather<WHOLE>,
) {
    let lane = laneid();
    let mut load = gather;
    let (mut filled, mut slot) = (0, turn.slot);
    while filled < args.slots && load.bits != 0 {
        load_piece(ring, args, from, &load, slot);
        load.advance(args, from);
        filled += 1;
        slot = if slot + 1 == ring.count { 0 } else { slot + 1 };
    }
    let mut sum = gather;
    let mut item = gather.first;
    while item.token < gather.end {
        // Tokens that went nowhere are not in the gather's sequence.
        let gathered = sum.item == item;
        if item.piece == 0 {
            let weights = to.weights(item.token);
            if weights != 0 {
                sum_weights(args, from, weights, if gathered { sum.row } else { -1 });
            }
        }
        let bytes = item.bytes(args);
        let mut sums = [[0.0f32; 8]; VECTORS];
        let mut contributors = if gathered { sum.bits.count_ones() } else { 0 };
        // With weights: the lanes that have a row, and the lane's weight.
        let (mut lanes, mut weight) = (sum.bits, 1.0);
        if C::WEIGHTED && gathered {
            weight = from.weight(item.token);
        }
        while contributors != 0 {
            ring.wait(turn);
            let buffer = ring.buffer(turn.slot);
            let mut its_weight = 1.0;
            if C::WEIGHTED {
                its_weight = f32::from_bits(shfl_u32(weight.to_bits(), lanes.trailing_zeros() & 31));
                lanes &= lanes.wrapping_sub(1);
            }
            unroll!(8, J => {
                let at = lane * 16 + J as u32 * 512;
                if J < vectors_of(C::FEWER) && at < bytes {
                    let vector = ld_shared_v4(buffer + at);
                    if C::WEIGHTED {
                        E::add_weighted(&mut sums[J], vector, its_weight);
                    } else {
                        E::add(&mut sums[J], vector);
                    }
                }
            });
            // All lanes have read the slot: fill it again.
            syncwarp();
            if load.bits != 0 {
                load_piece(ring, args, from, &load, turn.slot);
                load.advance(args, from);
            }
            turn.advance(ring);
            contributors -= 1;
        }
        let mut vectors = [[0; 4]; VECTORS];
        unroll!(8, J => {
            if J < vectors_of(C::FEWER) {
                vectors[J] = E::round(&sums[J]);
            }
        });
        to.store(item, bytes, vectors);
        if gathered {
            sum.next_item(args, from);
        }
        item = item.next::<WHOLE>(args, gather.step);
    }
}

/// Records the tokens whose sums may be missing or wrong, because the kernel's wait expired or it
/// had no plan, and stores NaN there if `args.spoils`. The share is that of [`sum_rows`]. The whole
/// warp calls it.
///
/// # Safety
/// The outputs have room for every token. This warp alone writes the item, and has done so before.
#[device]
pub unsafe fn spoil<const WHOLE: bool>(args: &CombineArgs, begin: u32, end: u32, nth: u32, of: u32) {
    // A plan that failed ends its dispatch alone.
    let is_missing = laneid() == 0 && aborted(&args.comm);
    let (mut item, step) = Item::share::<WHOLE>(args, begin, nth, of);
    while item.token < end {
        let row = args.combined_x.row(item.token, args.row_bytes);
        let (to, bytes) = (row + (item.piece * args.slot_bytes) as u64, item.bytes(args));
        let mut at = laneid() * 16;
        while at < bytes && args.spoils != 0 {
            st_v4(to + at as u64, [NAN_BITS; 4]);
            at += 512;
        }
        if is_missing {
            note_missing_token(&args.comm, item.token);
        }
        let has_weights = laneid() < args.num_topk && !args.combined_weights.is_null();
        if item.piece == 0 && has_weights && args.spoils != 0 {
            let entry = row_major(item.token, args.num_topk, laneid());
            args.combined_weights.array::<f32>().st(entry, f32::from_bits(NAN_BITS));
        }
        item = item.next::<WHOLE>(args, step);
    }
}

/// A piece of a token's row. A warp takes every n-th item of its block, so that pieces, not rows,
/// are what is spread.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Item {
    pub token: u32,
    pub piece: u32,
}

impl Item {
    /// The `n`-th item from piece 0 of `token` on.
    #[device]
    fn nth(args: &CombineArgs, token: u32, n: u32) -> Self {
        Item { token: token + n / args.pieces, piece: n % args.pieces }
    }

    /// The first item of the `nth` of `of` warps from `begin` on, and the step to its next.
    #[device]
    fn share<const WHOLE: bool>(args: &CombineArgs, begin: u32, nth: u32, of: u32) -> (Item, Item) {
        if WHOLE {
            return (Item { token: begin + nth, piece: 0 }, Item { token: of, piece: 0 });
        }
        (Item::nth(args, begin, nth), Item::nth(args, 0, of))
    }

    /// The warp's next item: the next piece of the row, or of pieces the one `step` further on.
    #[device]
    fn next<const WHOLE: bool>(self, args: &CombineArgs, step: Item) -> Self {
        if WHOLE {
            let ends = self.piece + 1 == args.pieces;
            return Item {
                token: if ends { self.token + step.token } else { self.token },
                piece: if ends { 0 } else { self.piece + 1 },
            };
        }
        let piece = self.piece + step.piece;
        let carry = (piece >= args.pieces) as u32;
        Item { token: self.token + step.token + carry, piece: piece - carry * args.pieces }
    }

    #[device]
    fn bytes(self, args: &CombineArgs) -> u32 {
        (args.row_bytes - self.piece * args.slot_bytes).min(args.slot_bytes)
    }
}

/// A warp's place in its sequence of (item, contributor). Items without contributors are left out.
#[derive(Clone, Copy)]
pub struct Gather<const WHOLE: bool> {
    /// The first item of the warp's share, with or without contributors.
    first: Item,
    item: Item,
    next: Item,
    step: Item,
    end: u32,
    /// Contributors of this item that are still to come; 0 at the end of the sequence.
    bits: u32,
    /// Lane l: contributor l's row of the token, or -1.
    row: i32,
    /// The same of the next item, fetched ahead.
    next_row: i32,
}

impl<const WHOLE: bool> Gather<WHOLE> {
    /// The start of a warp's share of tokens `begin..end`: it is the `nth` of `of` warps. A warp
    /// takes whole rows, every `of`-th: what there is to find out of a token is found out once. Or
    /// it takes pieces, where there are too few tokens for all warps to have as many. The whole
    /// warp calls it.
    ///
    /// # Safety
    /// The range is one of tokens that there are; the whole warp calls it.
    #[device]
    pub unsafe fn start<C: Contributors>(
        args: &CombineArgs,
        from: &C,
        begin: u32,
        end: u32,
        nth: u32,
        of: u32,
    ) -> Self {
        let (first, step) = Item::share::<WHOLE>(args, begin, nth, of);
        let next_row = row_before(from, first.token, end);
        let mut gather = Gather { first, item: first, next: first, step, end, bits: 0, row: -1, next_row };
        gather.next_item(args, from);
        gather
    }

    /// Goes on to the next item that has contributors.
    ///
    /// # Safety
    /// `row` is called for tokens of the range only.
    #[device]
    unsafe fn next_item<C: Contributors>(&mut self, args: &CombineArgs, from: &C) {
        loop {
            (self.item, self.row) = (self.next, self.next_row);
            self.next = self.item.next::<WHOLE>(args, self.step);
            if !WHOLE || self.next.token != self.item.token {
                self.next_row = row_before(from, self.next.token, self.end);
            }
            self.bits = ballot(self.row >= 0);
            if self.bits != 0 || self.item.token >= self.end {
                return;
            }
        }
    }

    /// Goes on to the next contributor or item.
    ///
    /// # Safety
    /// `bits` is the same in all lanes, so that the whole warp calls it.
    #[device]
    unsafe fn advance<C: Contributors>(&mut self, args: &CombineArgs, from: &C) {
        self.bits &= self.bits - 1;
        if self.bits == 0 {
            self.next_item(args, from);
        }
    }
}

/// The lane's row of `token`, or -1; also -1 from `end` on.
///
/// # Safety
/// The token is in the range.
#[device]
unsafe fn row_before<C: Contributors>(from: &C, token: u32, end: u32) -> i32 {
    if token < end { from.row(token) } else { -1 }
}

/// Lane k: sums entry k of a token's weights over its contributors, to entry k at `to`.
///
/// # Safety
/// Rows were planned inside their memory; they are read behind the wait, and the warp meets behind
/// it.
#[device]
unsafe fn sum_weights<C: Contributors>(args: &CombineArgs, from: &C, to: u64, row: i32) {
    let lane = laneid();
    let active = lane < args.num_topk;
    if row >= 0 {
        from.wait(row);
    }
    syncwarp();
    let weights = from.weights(row);
    let mut total = 0.0f32;
    stride!(first in 0..from.lanes(), 8 => {
        let mut parts = [0.0f32; 8];
        // All loads first, so that they are in flight together.
        unroll!(8, PART => {
            let source = first + PART as u32;
            let (base, row) = (shfl_u64(weights, source), shfl_u32(row as u32, source) as i32);
            parts[PART] = ld_f32_if(active && row >= 0, Global::<f32>::new(base).at(lane));
        });
        total = parts.into_iter().fold(total, |sum, part| sum + part);
    });
    if active {
        Global::<f32>::new(to).st(lane, total);
    }
}

/// The lane that holds the contributor's address starts the load, into a slot that no lane reads
/// any more.
///
/// # Safety
/// The piece lies inside the contributor's row.
#[device]
unsafe fn load_piece<C: Contributors, const WHOLE: bool>(
    ring: &Ring,
    args: &CombineArgs,
    from: &C,
    piece: &Gather<WHOLE>,
    slot: u32,
) {
    if piece.bits.trailing_zeros() == laneid() {
        from.wait(piece.row);
        let offset = (piece.item.piece * args.slot_bytes) as u64;
        // The slot was read by ordinary loads; the copy engine writes it next.
        fence_proxy_async_shared();
        ring.load(slot, from.address(piece.row) + offset, piece.item.bytes(args));
    }
}
