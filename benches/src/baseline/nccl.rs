//! Dispatch and combine by NCCL's collectives: the exchange alone, of rows that lie as it needs
//! them.

use std::sync::Arc;

use epoxide::driver::{Device, Stream};
use epoxide::group::{ProcessGroup, ReduceOp};
use epoxide::{DType, Tensor};
use epoxide::{Error, Result};
use epoxide_nccl::{Communicator, Config, Library, Watchdog};
use epoxide_testing::harness::Rank;
use epoxide_testing::oracle;
use epoxide_testing::payload::{bytes_of, mix};
use epoxide_testing::roundtrip::Case;
use half::bf16;

use super::{Exchange, link_rows};
use crate::TIMEOUT;
use crate::high_throughput::{RETURNED, ROWS};

/// Whole numbers up to here are exact in BF16, and so are sums that stay below.
const EXACT: u64 = 256;
/// Type of rows that NCCL only moves.
const BYTES: DType = DType::Fp8E4m3;

/// NCCL among the ranks of a measurement.
pub(crate) struct Nccl(Communicator);

impl Nccl {
    pub fn check() -> Result<()> {
        Library::find().map(drop)
    }

    /// Collective.
    pub fn join(device: &Device, group: &Arc<dyn ProcessGroup>) -> Result<Nccl> {
        // Calls that block start an operation in this thread. For a call that does not block, NCCL
        // makes a thread to start it, and we poll again after a pause. The host would then take
        // longer than small operations do. The watchdog keeps the deadline.
        let watchdog = Some(Watchdog::default());
        let config = Config { timeout: TIMEOUT, blocking: true, watchdog, ..Config::named("bench") };
        Ok(Nccl(Communicator::over_group(&Library::find()?, device, &**group, config)?))
    }

    /// Ready to be timed, after one dispatch and one combine with correct results.
    pub fn all_to_all(&self, case: &Case, rig: &Rank) -> Result<AllToAll<'_>> {
        let exchange = AllToAll::new(&self.0, case, rig)?;
        let (me, ranks) = (rig.rank, case.routing.num_ranks());
        let sources = oracle::recv_order(&case.routing, me);
        let rows = sources.iter().map(|&(source, token)| message(case, source, token));
        check(rig, &exchange.received, "all-to-all dispatch", rows, || exchange.dispatch(&rig.stream))?;
        let rows = (0..ranks).flat_map(|to| tokens_for(case, me, to).map(move |token| (to, token)));
        let rows = rows.map(|(receiver, token)| returned(case, receiver, (me, token)));
        check(rig, &exchange.home, "all-to-all combine", rows, || exchange.combine(&rig.stream))?;
        Ok(exchange)
    }

    /// The same. Collective.
    pub fn all_gather(&self, case: &Case, rig: &Rank) -> Result<AllGather<'_>> {
        let exchange = AllGather::new(&self.0, case, rig)?;
        let me = rig.rank;
        let rows = all_tokens(case).map(|(source, token)| message_with_topk(case, source, token));
        check(rig, &exchange.all, "all-gather dispatch", rows, || exchange.dispatch(&rig.stream))?;
        let rows = (0..case.routing.num_tokens(me)).map(|token| {
            let receivers = (0..case.routing.num_ranks()).filter(|&to| case.routing.hits(me, token, to));
            let shares: Vec<Vec<f32>> = receivers.map(|to| share(case, to, (me, token))).collect();
            // From 0: of nothing, `sum` gives -0.
            let sum =
                |column: usize| bf16::from_f32(shares.iter().fold(0.0, |sum, share| sum + share[column]));
            bytes_of(&(0..columns(case)).map(sum).collect::<Vec<bf16>>())
        });
        check(rig, &exchange.sums, "reduce-scatter combine", rows, || exchange.combine(&rig.stream))?;
        Ok(exchange)
    }

    /// Ends it together with the other ranks. Collective.
    pub fn finalize(&self) -> Result<()> {
        self.0.finalize()
    }
}

/// A row as a dispatch moves it: elements, then scales, so that one message brings both.
fn message(case: &Case, rank: u32, token: u32) -> Vec<u8> {
    [case.row(ROWS, rank, token), bytes_of(&case.scales(ROWS, rank, token))].concat()
}

/// The same with ids and weights: a rank that is sent all tokens has to see which are its own.
fn message_with_topk(case: &Case, rank: u32, token: u32) -> Vec<u8> {
    let ids = bytes_of(&case.routing.topk_idx[rank as usize][token as usize]);
    [message(case, rank, token), ids, bytes_of(&case.token_weights(rank, token))].concat()
}

/// Elements of a row in a combine.
fn columns(case: &Case) -> usize {
    case.hidden() as usize
}

/// The row that `receiver` returns for a token, in BF16: the same as to epoxide's combine.
fn returned(case: &Case, receiver: u32, source: (u32, u32)) -> Vec<u8> {
    let row = case.returned(RETURNED, receiver, source, 0..columns(case));
    bytes_of(&row.into_iter().map(bf16::from_f32).collect::<Vec<bf16>>())
}

/// The share of `receiver` in the sum of a token. NCCL sums in an order and a precision of its own,
/// so the shares are whole numbers with an exact sum.
fn share(case: &Case, receiver: u32, (rank, token): (u32, u32)) -> Vec<f32> {
    let most = (EXACT / u64::from(case.routing.num_ranks())).clamp(1, 16);
    let base = mix(&[case.seed, u64::from(receiver), u64::from(rank), u64::from(token)]);
    let value = |column| (mix(&[base, column]) % (2 * most + 1)) as f32 - most as f32;
    (0..case.hidden()).map(value).collect()
}

/// The tokens of a rank that another is sent, in order.
fn tokens_for(case: &Case, from: u32, to: u32) -> impl Iterator<Item = u32> {
    (0..case.routing.num_tokens(from)).filter(move |&token| case.routing.hits(from, token, to))
}

/// (rank, token) of all tokens, by rank.
fn all_tokens(case: &Case) -> impl Iterator<Item = (u32, u32)> {
    let routing = &case.routing;
    (0..routing.num_ranks()).flat_map(|rank| (0..routing.num_tokens(rank)).map(move |token| (rank, token)))
}

/// Spoils what a call writes, makes it, and holds every row against what it should be.
fn check(
    rig: &Rank,
    output: &Tensor,
    what: &'static str,
    mut expected: impl Iterator<Item = Vec<u8>>,
    call: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if output.rows() > 0 {
        rig.poison(output)?;
    }
    call()?;
    rig.stream.synchronize()?;
    let got = rig.first_rows(output, output.rows())?;
    for (row, got) in got.chunks_exact(output.row_bytes() as usize).enumerate() {
        let Some(want) = expected.next() else {
            return Err(Error::os(what, format!("{} rows came, expected {row}", output.rows())));
        };
        if let Some(at) = got.iter().zip(&want).position(|(got, want)| got != want) {
            let (got, want) = (got[at], want[at]);
            let difference = format!("byte {at} of row {row} is {got:#04x}, expected {want:#04x}");
            return Err(Error::os(what, difference));
        }
    }
    match expected.count() {
        // A rank whose rows are wrong gives the group up, which the others learn here and not by
        // NCCL's deadline.
        0 => rig.group.barrier(rig.group.timeout()),
        more => Err(Error::os(what, format!("{} rows came, expected {more} more", output.rows()))),
    }
}

/// Sends and receives between all ranks: rows lie together by destination, one for each rank that
/// has an expert of a token.
pub(crate) struct AllToAll<'a> {
    nccl: &'a Communicator,
    /// Rows for each rank, and from each.
    to: Vec<u64>,
    from: Vec<u64>,
    sent: Tensor<'static>,
    received: Tensor<'static>,
    /// Rows that the experts return, and the memory that receives them, not summed.
    back: Tensor<'static>,
    home: Tensor<'static>,
    link_bytes: (u64, u64),
}

impl<'a> AllToAll<'a> {
    fn new(nccl: &'a Communicator, case: &Case, rig: &Rank) -> Result<AllToAll<'a>> {
        let (me, ranks) = (rig.rank, case.routing.num_ranks());
        let count = |from, to| tokens_for(case, from, to).count() as u64;
        let to: Vec<u64> = (0..ranks).map(|to| count(me, to)).collect();
        let from: Vec<u64> = (0..ranks).map(|from| count(from, me)).collect();
        let sent = (0..ranks).flat_map(|to| tokens_for(case, me, to));
        let sent: Vec<Vec<u8>> = sent.map(|token| message(case, me, token)).collect();
        let back: Vec<Vec<u8>> =
            oracle::recv_order(&case.routing, me).into_iter().map(|of| returned(case, me, of)).collect();
        let width = u64::from(case.row_bytes) + case.scale_bytes();
        let home = [to.iter().sum(), case.hidden()];
        let (dispatched, combined) = link_rows(&case.routing, me);
        Ok(AllToAll {
            nccl,
            sent: rig.upload_rows(BYTES, width, &sent)?,
            received: Tensor::alloc(rig.device(), BYTES, &[from.iter().sum(), width])?,
            back: rig.upload_rows(DType::Bf16, case.hidden(), &back)?,
            home: Tensor::alloc(rig.device(), DType::Bf16, &home)?,
            to,
            from,
            link_bytes: (dispatched * width, combined * case.hidden() * 2),
        })
    }
}

impl Exchange for AllToAll<'_> {
    fn dispatch(&self, stream: &Stream) -> Result<()> {
        self.nccl.all_to_all(&self.received, &self.sent, &self.from, &self.to, stream).map(drop)
    }

    fn combine(&self, stream: &Stream) -> Result<()> {
        self.nccl.all_to_all(&self.home, &self.back, &self.to, &self.from, stream).map(drop)
    }

    fn check(&self) -> Result<()> {
        self.nccl.check()
    }

    fn link_bytes(&self) -> (u64, u64) {
        self.link_bytes
    }
}

/// All tokens to all ranks, and back a row for each of them, zeros where a rank has none of its
/// experts, which NCCL sums.
pub(crate) struct AllGather<'a> {
    nccl: &'a Communicator,
    own: Tensor<'static>,
    all: Tensor<'static>,
    shares: Tensor<'static>,
    sums: Tensor<'static>,
    link_bytes: (u64, u64),
}

impl<'a> AllGather<'a> {
    fn new(nccl: &'a Communicator, case: &Case, rig: &Rank) -> Result<AllGather<'a>> {
        let (me, ranks) = (rig.rank, u64::from(case.routing.num_ranks()));
        let tokens = u64::from(case.routing.num_tokens(me));
        let own = (0..tokens as u32).map(|token| message_with_topk(case, me, token));
        // An id has 8 bytes, a weight 4.
        let width = u64::from(case.row_bytes) + case.scale_bytes() + 12 * u64::from(case.routing.num_topk);
        let share_of = |(source, token)| -> Vec<u8> {
            let columns = match case.routing.hits(source, token, me) {
                true => share(case, me, (source, token)),
                false => vec![0.0; columns(case)],
            };
            bytes_of(&columns.into_iter().map(bf16::from_f32).collect::<Vec<bf16>>())
        };
        Ok(AllGather {
            nccl,
            own: rig.upload_rows(BYTES, width, &own.collect::<Vec<_>>())?,
            all: Tensor::alloc(rig.device(), BYTES, &[ranks * tokens, width])?,
            shares: rig.upload_rows(
                DType::Bf16,
                case.hidden(),
                &all_tokens(case).map(share_of).collect::<Vec<_>>(),
            )?,
            sums: Tensor::alloc(rig.device(), DType::Bf16, &[tokens, case.hidden()])?,
            link_bytes: ((ranks - 1) * tokens * width, (ranks - 1) * tokens * case.hidden() * 2),
        })
    }
}

impl Exchange for AllGather<'_> {
    fn dispatch(&self, stream: &Stream) -> Result<()> {
        self.nccl.all_gather(&self.all, &self.own, stream).map(drop)
    }

    fn combine(&self, stream: &Stream) -> Result<()> {
        self.nccl.reduce_scatter(&self.sums, &self.shares, ReduceOp::Sum, stream).map(drop)
    }

    fn check(&self) -> Result<()> {
        self.nccl.check()
    }

    fn link_bytes(&self) -> (u64, u64) {
        self.link_bytes
    }
}
