//! Counts that grow with each dispatch, in tensors of the caller's.

use std::time::Duration;

use half::bf16;

use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::group::run_threads;
use epoxide::low_latency;
use epoxide::throughput::{Counts, DispatchRequest};
use epoxide::transport::TransportKind;
use epoxide::{DType, Error, Result, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::NodeLinks;
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::payload::{bytes_of, rng_of};
use epoxide_testing::roundtrip::Case;

use crate::promises::found;
use crate::spread::Spread;
use crate::valid::{refused, setup, then_dispatch};

/// Selections of each expert of `rank`.
fn selections(routing: &Routing, rank: u32) -> Vec<i32> {
    let of = |local| {
        let id = i64::from(rank * routing.local_experts() + local);
        routing.topk_idx.iter().flatten().flatten().filter(|&&selected| selected == id).count() as i32
    };
    (0..routing.local_experts()).map(of).collect()
}

#[test]
fn selections_add_up() {
    let several = NodeLinks { ranks_per_node: 1, transport: TransportKind::Shm, queues: 1 };
    for (nodes, by_expert) in [(None, false), (None, true), (Some(several), false), (Some(several), true)] {
        let routing = Routing::random(&mut rng_of(&[3]), &[7, 4], 3, 6, Style::Repeats);
        let case = Case { nodes, ..Case::new(routing, 48) };
        let mut setup = case.setup_by_expert(4);
        setup.device.checker = Some(Checker::new(CheckConfig::default()));
        setup.run(|rank| {
            let (ids, _) = rank.topk(&case)?;
            let layout = rank.layout(&ids, case.routing.num_experts)?;
            let (x, _) = rank.payload(&case, 1)?;
            let mut place = rank.place()?;
            let start = [5, -1, i32::MAX];
            let cumulative = TypedTensor::from_host(&rank.stream, &[3], &start)?;
            let request = DispatchRequest::new(&x, &layout).cumulative_counts(&cumulative);
            let request = if by_expert { request.by_expert(4) } else { request };
            for turn in 1..=3 {
                let on_device = Counts::OnDevice { capacity: rank.buffer.capacity() };
                let counts = if turn == 2 { on_device } else { Counts::Exact };
                drop(rank.dispatch(&mut place, request.counts(counts))?);
                let selected = selections(&case.routing, rank.rank).into_iter();
                let sums = start.iter().zip(selected).map(|(start, count)| start.wrapping_add(turn * count));
                rank.equal("cumulative counts", &cumulative.values(&rank.stream)?, &sums.collect::<Vec<_>>());
            }
            Ok(())
        });
    }
}

#[test]
fn counts_are_exact_or_refused() {
    then_dispatch(setup(Spread::OneNode), |rank, valid, place| {
        let stream = rank.stream.clone();
        let counts = TypedTensor::from_host(&stream, &[2], &[3, 4])?;
        let request = valid.request().cumulative_counts(&counts);
        refused(
            rank.dispatch(place, request.expert_alignment(8)),
            &["cumulative_counts = given", "multiples of 8", "expert_alignment 1"],
        );
        let three = TypedTensor::from_host(&stream, &[3], &[0, 0, 0])?;
        refused(
            rank.dispatch(place, valid.request().cumulative_counts(&three)),
            &["cumulative_counts has shape [3]", "[local_experts = 2]"],
        );
        // A dispatch without room adds nothing.
        let request = request.counts(Counts::OnDevice { capacity: 1 });
        let handle = rank.dispatch(place, request)?.handle;
        refused(rank.buffer.check_dispatch(&handle, &stream), &["capacity"]);
        refused(rank.buffer.check(), &["capacity"]);
        drop(handle);
        // SAFETY: the tensor outlives this one, which does not carry the dispatch's outcome.
        let bare: TypedTensor<'_, i32> =
            unsafe { Tensor::from_raw(counts.ptr(), DType::I32, &[2]) }.typed()?;
        rank.equal("counts", &bare.values(&stream)?, &[3, 4]);
        Ok(())
    });
}

/// The id is out of range on rank 0 alone. Its other selections move, and rank 1 has no failure.
#[test]
fn a_low_latency_dispatch_with_a_bad_id_adds_nothing() {
    let outcomes = run_threads(2, Duration::from_secs(60), |rank, group| -> Result<_> {
        let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
        let stream = epoxide::driver::Stream::new(&device)?;
        let shape = low_latency::Shape { max_tokens: 4, hidden: 64, num_topk: 2, num_experts: 4 };
        let mut buffer = low_latency::Buffer::new(device, &*group, low_latency::Options::new(shape))?;
        let mut place = buffer.place(0)?;
        let x = Tensor::from_host(&stream, DType::Bf16, &[2, 64], &[bf16::ONE; 128])?;
        let ids = if rank == 0 { [0i64, 4, 1, 2] } else { [0, 1, 2, 3] };
        let ids = TypedTensor::from_host(&stream, &[2, 2], &ids)?;
        let counts = TypedTensor::from_host(&stream, &[2], &[10, 20])?;
        let request = low_latency::DispatchRequest::new(&x, &ids).cumulative_counts(&counts);
        drop(buffer.dispatch(&mut place, request, StreamOrder::on(&stream))?);
        stream.synchronize()?;
        let failed =
            matches!(buffer.check(), Err(Error::Broken { reason, .. }) if reason.contains("topk_idx = 4"));
        Ok((failed, found(&stream, &counts)?.concat()))
    });
    assert_eq!(outcomes.unwrap(), [(true, bytes_of(&[10i32, 20])), (false, bytes_of(&[12i32, 21]))]);
}

#[test]
fn rows_of_low_latency_add_up_in_halves_and_replays() {
    let sums = run_threads(2, Duration::from_secs(60), |rank, group| -> Result<Vec<i32>> {
        let config = VirtConfig {
            ordinal: rank,
            checker: Some(Checker::new(CheckConfig::default())),
            ..VirtConfig::default()
        };
        let device = VirtualGpu::new(config);
        let stream = epoxide::driver::Stream::new(&device)?;
        let shape = low_latency::Shape { max_tokens: 4, hidden: 64, num_topk: 2, num_experts: 4 };
        let mut buffer = low_latency::Buffer::new(device, &*group, low_latency::Options::new(shape))?;
        let mut place = buffer.place(0)?;
        let order = StreamOrder::on(&stream);
        let x = Tensor::from_host(&stream, DType::Bf16, &[2, 64], &[bf16::ONE; 128])?;
        let ids = TypedTensor::from_host(&stream, &[2, 2], &[0i64, 3, 1, -1])?;
        let rows = Tensor::from_host(&stream, DType::Bf16, &[8, 64], &[bf16::ONE; 512])?;
        let counts = TypedTensor::from_host(&stream, &[2], &[10, 20])?;
        let request = low_latency::DispatchRequest::new(&x, &ids).cumulative_counts(&counts);
        let pending = buffer.dispatch_send(&mut place, request, order)?;
        let received = pending.receive(order)?;
        drop(buffer.combine(received, low_latency::CombineRequest::by_row(&rows), order)?);
        let step = buffer.capture(&stream, |buffer, order| {
            let received = buffer.dispatch(&mut place, request, order)?;
            let sums = buffer.combine(received, low_latency::CombineRequest::by_row(&rows), order)?;
            Ok(sums.detach())
        })?;
        for _ in 0..3 {
            step.launch(&stream)?;
        }
        step.check(&stream)?;
        counts.values(&stream)
    });
    // A dispatch of halves, one of a warm-up, and three replays.
    assert_eq!(sums.unwrap(), [vec![10 + 5 * 2, 20 + 5 * 2], vec![10, 20 + 5 * 2]]);
}
