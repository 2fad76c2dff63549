//! Operations beside a kernel that occupies all multiprocessors but a few, forever. On virtual GPUs
//! one block of a kernel runs at a time, so no block may wait for a later one.
//!
//! These tests also run on GPUs: `EPOXIDE_TEST_DEVICE=cuda EPOXIDE_TEST_RANKS=2`, one at a time. A
//! kernel holds all but two multiprocessors there, from the second round on: the driver loads
//! kernels and allocates memory in the first, and may wait for all running kernels then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig};
use epoxide::driver::{Device, Stream};
use epoxide::group::ProcessGroup;
use epoxide::internal::Tuning;
use epoxide::internal::driver::Hooks;
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{DType, Error, Result, StreamOrder, Tensor, TypedTensor};
use epoxide::{low_latency, throughput};
use epoxide_testing::harness::{PATIENCE, Setup, num_ranks, on_gpus, open_device, run_ranks, try_run_ranks};
use epoxide_testing::neighbour::Holder;
use half::bf16;

const TOKENS: u64 = 40;
const HIDDEN: u64 = 512;
/// Rounds, so that operations meet the words of those before.
const ROUNDS: usize = 3;

/// The longest wait for a peer. On GPUs it passes in real time.
fn deadline() -> Duration {
    if on_gpus() { Duration::from_secs(10) } else { PATIENCE }
}

/// The spreads of ranks over nodes.
const SPREADS: [Option<TransportKind>; 3] = [None, Some(TransportKind::Direct), Some(TransportKind::Shm)];

/// A device of which one block of a kernel, or two multiprocessors, are free.
fn device(rank: u32) -> Result<Device> {
    let hooks = Hooks { max_blocks_resident: Some(1), ..Hooks::default() };
    open_device(VirtConfig { ordinal: rank, sm_count: 8, hooks, ..VirtConfig::default() })
}

/// Makes rounds on a rank. From the second one on a kernel holds all other multiprocessors of a
/// GPU.
fn rounds(device: &Device, group: &dyn ProcessGroup, mut round: impl FnMut() -> Result<()>) -> Result<()> {
    let holder = on_gpus().then(|| Holder::new(device)).transpose()?;
    for number in 0..ROUNDS {
        if number == 1 {
            // Once all ranks have made theirs.
            group.barrier(PATIENCE)?;
            holder.iter().try_for_each(|holder| holder.hold(device.info().sm_count - 2))?;
        }
        round()?;
    }
    group.barrier(PATIENCE)
}

/// Rows of which each element is the rank's number and 1, and ids by which each token goes to all
/// ranks.
fn inputs(rank: u32, ranks: u32, stream: &Stream) -> Result<(Tensor<'static>, TypedTensor<'static, i64>)> {
    let x = vec![bf16::from_f32(rank as f32 + 1.0); (TOKENS * HIDDEN) as usize];
    let ids: Vec<i64> = (0..TOKENS).flat_map(|_| 0..i64::from(ranks)).collect();
    Ok((
        Tensor::from_host(stream, DType::Bf16, &[TOKENS, HIDDEN], &x)?,
        TypedTensor::from_host(stream, &[TOKENS, ranks.into()], &ids)?,
    ))
}

/// Checks the sums of rows that all ranks return unchanged.
fn check(rank: u32, ranks: u32, sums: &Tensor<'_>, stream: &Stream) -> Result<()> {
    let want = bf16::from_f32((rank + 1) as f32 * ranks as f32);
    let sums = sums.to_host::<bf16>(stream)?;
    assert!(sums.len() as u64 == TOKENS * HIDDEN && sums.iter().all(|sum| *sum == want));
    Ok(())
}

/// Round trips of high throughput, with rows of a tensor and in the pool.
fn throughput_rounds(rank: u32, group: &Arc<dyn ProcessGroup>, spread: Option<TransportKind>) -> Result<()> {
    use throughput::{Buffer, CombineRequest, Config, DispatchRequest, Options, Shape};
    let (device, ranks) = (device(rank)?, group.size());
    let stream = Stream::new(&device)?;
    let shape = Shape {
        max_tokens: TOKENS as u32,
        hidden: HIDDEN,
        dtype: DType::Bf16,
        max_topk: ranks,
        max_scales: 0,
    };
    let mut options = Options::new(shape).config(Config::with_sms(8)?).timeout(deadline());
    if let Some(kind) = spread {
        options = options.ranks_per_node(ranks / 2).transport(TransportOptions::new(kind)).keep_nodes();
    }
    let mut buffer = Buffer::new(device.clone(), &**group, options)?;
    let mut place = buffer.place(0)?;
    let (x, topk_idx) = inputs(rank, ranks, &stream)?;
    let order = StreamOrder::on(&stream);
    rounds(&device, &**group, || {
        let layout = buffer.get_dispatch_layout(&topk_idx, ranks, order)?;
        let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &layout), order)?;
        let of_tensor = CombineRequest::new(&received.recv_x, &received.handle);
        check(rank, ranks, &buffer.combine(of_tensor, order)?.combined_x, &stream)?;
        let rows = received.combine_rows(DType::Bf16, HIDDEN)?;
        let to = rows.tensor();
        // SAFETY: both are in the pool, which lives as long as the buffer.
        unsafe { stream.copy(to.ptr(), received.recv_x.ptr(), to.rows() * to.row_stride())? };
        let in_pool = CombineRequest::new(&rows, &received.handle);
        check(rank, ranks, &buffer.combine(in_pool, order)?.combined_x, &stream)
    })
}

/// Round trips of rows by expert with two experts a rank: a received row is copied to the other
/// expert's rows. Ranks have different numbers of blocks, so that blocks wait for blocks of other
/// indices; across nodes their numbers are the same.
fn by_expert_rounds(rank: u32, group: &Arc<dyn ProcessGroup>, spread: Option<TransportKind>) -> Result<()> {
    use throughput::{
        Buffer, CachedDispatchRequest, CombineRequest, Config, DispatchRequest, Options, Shape,
    };
    let (device, ranks) = (device(rank)?, group.size());
    let stream = Stream::new(&device)?;
    let experts = 2 * ranks;
    let shape = Shape {
        max_tokens: TOKENS as u32,
        hidden: HIDDEN,
        dtype: DType::Bf16,
        max_topk: experts,
        max_scales: 0,
    };
    let options = Options::new(shape).config(Config::with_sms(8)?).timeout(deadline());
    let mut options = options.rows_by_expert(u64::from(experts) * TOKENS);
    if let Some(kind) = spread {
        options = options.ranks_per_node(ranks / 2).transport(TransportOptions::new(kind)).keep_nodes();
    }
    let mut buffer = Buffer::new(device.clone(), &**group, options)?;
    let mut place = buffer.place(0)?;
    let (x, _) = inputs(rank, ranks, &stream)?;
    let ids: Vec<i64> = (0..TOKENS).flat_map(|_| 0..i64::from(experts)).collect();
    let topk_idx = TypedTensor::from_host(&stream, &[TOKENS, experts.into()], &ids)?;
    let order = StreamOrder::on(&stream);
    rounds(&device, &**group, || {
        let layout = buffer.get_dispatch_layout(&topk_idx, experts, order)?;
        let request = DispatchRequest::new(&x, &layout).by_expert(1);
        let received = buffer.dispatch(&mut place, request, order)?;
        let request = CombineRequest::new(&received.recv_x, &received.handle);
        check(rank, experts, &buffer.combine(request, order)?.combined_x, &stream)?;
        let handle = received.handle.clone();
        let num_sms = if spread.is_some() { 8 } else { [8, 2, 6, 4][rank as usize % 4] };
        let request = CachedDispatchRequest::new(&x, &handle).num_sms(num_sms);
        let received = buffer.dispatch_cached(&mut place, request, order)?;
        let request = CombineRequest::new(&received.recv_x, &received.handle);
        check(rank, experts, &buffer.combine(request, order)?.combined_x, &stream)
    })
}

/// Round trips of low latency, whose rows return with words and as packets; `change` sets options.
fn low_latency_rounds(
    rank: u32,
    group: &Arc<dyn ProcessGroup>,
    spread: Option<TransportKind>,
    change: impl Fn(low_latency::Options) -> low_latency::Options,
) -> Result<()> {
    use low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Shape};
    let (device, ranks) = (device(rank)?, group.size());
    let stream = Stream::new(&device)?;
    let shape = Shape { max_tokens: TOKENS as u32, hidden: HIDDEN, num_topk: ranks, num_experts: ranks };
    for packet_tokens in [0, TOKENS as u32] {
        let mut options = change(Options::new(shape).packet_tokens(packet_tokens).timeout(deadline()));
        if let Some(kind) = spread {
            options = options.ranks_per_node(ranks / 2).transport(TransportOptions::new(kind)).keep_nodes();
        }
        let mut buffer = Buffer::new(device.clone(), &**group, options)?;
        let mut place = buffer.place(0)?;
        let (x, topk_idx) = inputs(rank, ranks, &stream)?;
        let order = StreamOrder::on(&stream);
        rounds(&device, &**group, || {
            // No combine answers this one: the next waits for all ranks before it sends rows.
            drop(buffer.dispatch(&mut place, DispatchRequest::new(&x, &topk_idx), order)?);
            let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &topk_idx), order)?;
            let rows = received.x.clone();
            let combined = buffer.combine(received, CombineRequest::by_row(&rows), order)?;
            check(rank, ranks, &combined.x, &stream)?;
            if spread.is_some() {
                return Ok(());
            }
            let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &topk_idx), order)?;
            let rows = received.combine_rows()?;
            assert_eq!(rows.row_stride(), received.x.row_stride());
            // SAFETY: both are in the pool, which lives as long as the buffer.
            unsafe { stream.copy(rows.ptr(), received.x.ptr(), rows.rows() * rows.row_stride())? };
            let combined = buffer.combine(received, CombineRequest::in_pool(), order)?;
            check(rank, ranks, &combined.x, &stream)
        })?;
    }
    Ok(())
}

/// Spreads that this number of ranks can have.
fn spreads(ranks: u32) -> impl Iterator<Item = Option<TransportKind>> {
    SPREADS.into_iter().filter(move |spread| spread.is_none() || ranks.is_multiple_of(2))
}

#[test]
fn high_throughput_needs_one_block_at_a_time() {
    let ranks = num_ranks(4);
    for spread in spreads(ranks) {
        run_ranks(ranks, |rank, group| throughput_rounds(rank, &group, spread));
    }
}

#[test]
fn rows_by_expert_need_one_block_at_a_time() {
    let ranks = num_ranks(4);
    for spread in spreads(ranks) {
        run_ranks(ranks, |rank, group| by_expert_rounds(rank, &group, spread));
    }
}

#[test]
fn low_latency_beside_persistent_kernels_needs_one_block_at_a_time() {
    let ranks = num_ranks(4);
    for spread in spreads(ranks) {
        let change = low_latency::Options::beside_persistent_kernels;
        run_ranks(ranks, |rank, group| low_latency_rounds(rank, &group, spread, change));
    }
}

/// Otherwise it does not, which shows that these tests can fail.
#[test]
fn low_latency_needs_all_blocks_of_an_operation_otherwise() {
    if on_gpus() {
        return;
    }
    let failure = try_run_ranks(4, |rank, group| low_latency_rounds(rank, &group, None, |options| options));
    assert!(matches!(failure.unwrap_err().error, Error::PeerTimeout { .. }));
}

/// A warp's first tokens are fixed, as many as fill its ring. The blocks that run first send all
/// others: where one block runs at a time, the last one sends nothing but what is fixed.
#[test]
fn blocks_that_run_first_send_the_tokens_of_others() {
    if on_gpus() {
        return;
    }
    // Four blocks with two warps that send, since the rows are short, and two rows in each ring.
    let tuning =
        Tuning { dispatch_warps: 1, dispatch_stages: 2, dispatch_claiming_blocks: 1, ..Tuning::default() };
    let mut setup = Setup::new(2, 2, TOKENS as u32, 2 * HIDDEN).tuning(tuning);
    let checker = Checker::new(CheckConfig::default());
    checker.count_loads();
    setup.device.checker = Some(checker.clone());
    setup.device.hooks.max_blocks_resident = Some(1);
    setup.run(|rank| {
        let (x, topk_idx) = inputs(rank.rank, 2, &rank.stream)?;
        let order = StreamOrder::on(&rank.stream);
        let layout = rank.buffer.get_dispatch_layout(&topk_idx, 2, order)?;
        let mut place = rank.buffer.place(0)?;
        let _received =
            rank.buffer.dispatch(&mut place, throughput::DispatchRequest::new(&x, &layout), order)?;
        rank.synchronize()?;
        // All memory still exists.
        rank.group.barrier(PATIENCE)?;
        if rank.rank == 0 {
            let mut loaded = checker.loads();
            loaded.retain(|it| it.by == 0 && it.kernel == "dispatch_claiming" && it.part == "send_row");
            let loads: BTreeMap<u32, u64> = loaded.iter().map(|it| (it.block, it.loads)).collect();
            let fixed = loads[&3];
            // Eight lanes load the rows of a token; each block sends the metadata of as many
            // tokens.
            let others = 8 * (TOKENS - 4 * 2 * 2);
            assert_eq!(loads, BTreeMap::from([(0, fixed + others), (1, fixed), (2, fixed), (3, fixed)]));
        }
        rank.group.barrier(PATIENCE)
    });
}
