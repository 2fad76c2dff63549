//! Operations one behind the other, on several streams, and in graphs.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use epoxide::Result;
use epoxide::driver::{Event, Memory, MemoryKind, Stream};
use epoxide::ep::{
    Buffer, CachedDispatchRequest, CombineRequest, CombineRows, Counts, DType, DispatchRequest, StreamOrder, Tensor,
};
use epoxide::testing::{oracle, payload};

use crate::harness::{Rank, Setup};
use crate::turns::{HIDDEN, Inputs, ROW, TOPK, Turn, echo, give_back};

/// Device memory that keeps what an operation gave while the next ones overwrite it.
struct Log {
    memory: Memory,
    slot: u64,
}

impl Log {
    fn new(rank: &Rank, turns: usize, slot: u64) -> Result<Log> {
        let memory = Memory::alloc(rank.device(), turns as u64 * slot, MemoryKind::Device, "log")?;
        Ok(Log { memory, slot })
    }

    /// Keeps all rows of `tensor`, in stream order.
    fn keep(&self, rank: &Rank, turn: usize, tensor: &Tensor) -> Result<()> {
        let (at, bytes) = (self.memory.ptr().add(turn as u64 * self.slot), tensor.rows() * tensor.row_stride());
        assert!(bytes <= self.slot);
        // SAFETY: the log and the buffer's memory outlive the stream's work: the test synchronises before it ends.
        unsafe { rank.stream.copy(at, tensor.ptr(), bytes) }
    }

    /// The first `rows` rows that were kept.
    fn rows(&self, rank: &Rank, turn: usize, rows: usize, stride: u64) -> Result<Vec<Vec<u8>>> {
        let mut bytes = vec![0; rows * stride as usize];
        rank.stream.read(&mut bytes, self.memory.ptr().add(turn as u64 * self.slot))?;
        Ok(bytes.chunks(stride as usize).map(|row| row[..ROW as usize].to_vec()).collect())
    }
}

/// Ranks of different speed.
fn dawdle(rng: &mut SmallRng) {
    if rng.random_bool(0.1) {
        std::thread::sleep(Duration::from_micros(rng.random_range(0..2000)));
    }
}

#[test]
fn two_hundred_turns_without_a_host_wait() {
    const TURNS: usize = 200;
    let setup = Setup::new(4, 2, 12, ROW);
    let turns: Vec<Turn> = (0..TURNS as u64)
        .map(|seed| {
            let mut rng = SmallRng::seed_from_u64(1000 + seed);
            let tokens: Vec<u32> = (0..4).map(|_| rng.random_range(0..=12)).collect();
            Turn::random(seed, &tokens, 2)
        })
        .collect();
    setup.run(|rank| {
        let inputs: Vec<_> = turns.iter().map(|turn| Inputs::upload(turn, rank)).collect::<Result<_>>()?;
        let recv_log = Log::new(rank, TURNS, rank.buffer.capacity() * ROW.next_multiple_of(128))?;
        let sum_log = Log::new(rank, TURNS, 12 * ROW)?;
        let mut rng = SmallRng::seed_from_u64(rank.rank.into());
        for (index, (turn, inputs)) in turns.iter().zip(&inputs).enumerate() {
            dawdle(&mut rng);
            let (output, back) = echo(rank, inputs, turn.routing.num_experts)?;
            recv_log.keep(rank, index, &output.recv_x)?;
            sum_log.keep(rank, index, &back.combined_x)?;
            // Outputs and handles are dropped here, with the work still queued.
        }
        rank.stream.synchronize()?;
        rank.buffer.check()?;
        for (index, turn) in turns.iter().enumerate() {
            let want = turn.recv(rank.rank);
            let got = recv_log.rows(rank, index, want.len(), ROW.next_multiple_of(128))?;
            rank.equal(&format!("recv_x of turn {index}"), &got, &want);
            let want = &turn.sums[rank.rank as usize];
            let got = sum_log.rows(rank, index, want.len(), ROW)?;
            rank.equal(&format!("combined_x of turn {index}"), &got, want);
        }
        Ok(())
    });
}

#[test]
fn cached_and_uncached_dispatches_in_turn() {
    let setup = Setup::new(3, 2, 10, ROW);
    let turns: Vec<Turn> = (0..30).map(|seed| Turn::random(seed, &[10, 4, 7], 2)).collect();
    // Rows of turn i along the routing of turn i / 5 * 5: what arrives is known from mixing the two.
    setup.run(|rank| {
        let mut handle = None;
        for (index, turn) in turns.iter().enumerate() {
            let routed = &turns[index / 5 * 5];
            let inputs = Inputs::upload(turn, rank)?;
            let output = match &handle {
                Some(handle) if index % 5 != 0 => rank.dispatch_cached(&inputs.x, None, handle)?,
                _ => {
                    let layout = rank.layout(&inputs.topk_idx, turn.routing.num_experts)?;
                    let counts = if index % 10 == 0 { Counts::Exact } else { rank.on_device() };
                    rank.dispatch(DispatchRequest { counts, ..DispatchRequest::new(&inputs.x, &layout) })?
                }
            };
            let plan = &routed.plans[rank.rank as usize];
            let got = rank.row_bytes(&output.recv_x)?;
            let want = oracle::recv_rows(plan, &turn.x);
            rank.equal(&format!("recv_x of turn {index}"), &got[..want.len()], &want);
            let back = give_back(rank, &output)?;
            let combined = rank.row_bytes(&back.combined_x)?;
            let mine = rank.rank as usize;
            let want: Vec<_> = (0..)
                .zip(&turn.x[mine])
                .map(|(token, row)| scaled(row, routed.routing.num_destinations(rank.rank, token)))
                .collect();
            rank.equal(&format!("combined_x of turn {index}"), &combined, &want);
            handle = Some(output.handle);
        }
        rank.stream.synchronize()
    });
}

/// A row of small BF16 integers times `factor`, which is exact.
fn scaled(row: &[u8], factor: u32) -> Vec<u8> {
    let values: Vec<half::bf16> = payload::values_of(row);
    let scaled: Vec<_> = values.iter().map(|v| half::bf16::from_f32(v.to_f32() * factor as f32 + 0.0)).collect();
    payload::bytes_of(&scaled)
}

#[test]
fn two_buffers_at_once() {
    let setup = Setup::new(3, 1, 8, ROW);
    let turns: Vec<Turn> = (0..40).map(|seed| Turn::random(seed, &[8, 3, 6], 1)).collect();
    setup.run(|rank| {
        // A second buffer on the same device, with a stream of its own, so that the two overlap.
        let mut other = Rank {
            buffer: Buffer::new(rank.device().clone(), &*rank.group, setup.options.clone())?,
            stream: Stream::new(rank.device(), false)?.into(),
            group: rank.group.clone(),
            rank: rank.rank,
            failures: Vec::new(),
        };
        let mut inputs = Vec::new();
        let mut outputs = Vec::new();
        for (index, turn) in turns.iter().enumerate() {
            let at = if index % 2 == 0 { &mut *rank } else { &mut other };
            inputs.push(Inputs::upload(turn, at)?);
            outputs.push(echo(at, &inputs[index], turn.routing.num_experts)?);
        }
        rank.stream.synchronize()?;
        other.stream.synchronize()?;
        rank.buffer.check()?;
        other.buffer.check()?;
        for (index, (turn, (_, back))) in turns.iter().zip(&outputs).enumerate() {
            let got = rank.row_bytes(&back.combined_x)?;
            rank.equal(&format!("combined_x of turn {index}"), &got, &turn.sums[rank.rank as usize]);
        }
        // Neither pool goes before all peers are through with both.
        rank.synchronize()
    });
}

#[test]
fn the_comm_stream_orders_itself_with_the_caller() {
    let setup = Setup::new(2, 1, 8, ROW);
    let turns: Vec<Turn> = (0..20).map(|seed| Turn::random(seed, &[8, 5], 1)).collect();
    setup.run(|rank| {
        let topk_idx = Tensor::alloc(rank.device(), DType::I64, &[turns[0].x[rank.rank as usize].len() as u64, TOPK.into()])?;
        let x = Tensor::alloc(rank.device(), DType::Bf16, &[topk_idx.rows(), HIDDEN as u64])?;
        for (index, turn) in turns.iter().enumerate() {
            // The inputs are written in the caller's stream, over and over in the same place; the operations run on the
            // other stream, and must wait for the writes and be waited for.
            let fresh = Inputs::upload(turn, rank)?;
            let copy = |to: &Tensor, from: &Tensor| {
                // SAFETY: both tensors live until the reads below have synchronised.
                unsafe { rank.stream.copy(to.ptr(), from.ptr(), from.rows() * from.row_stride()) }
            };
            copy(&topk_idx, &fresh.topk_idx)?;
            copy(&x, &fresh.x)?;
            let order = StreamOrder::comm(&rank.stream);
            let layout = rank.buffer.get_dispatch_layout(&topk_idx, turn.routing.num_experts, order)?;
            let counts = if index % 2 == 0 { Counts::Exact } else { rank.on_device() };
            let request = DispatchRequest { counts, ..DispatchRequest::new(&x, &layout) };
            let output = rank.buffer.dispatch(request, order)?;
            let rows = rank.buffer.combine_rows(DType::Bf16, rank.buffer.capacity(), HIDDEN as u64)?;
            // SAFETY: both are in the pool, which lives as long as the buffer.
            unsafe { rank.stream.copy(rows.ptr(), output.recv_x.ptr(), rows.rows() * rows.row_stride())? };
            let request = CombineRequest {
                rows: CombineRows::InPool { dtype: DType::Bf16, hidden: HIDDEN as u64 },
                topk_weights: None,
                handle: &output.handle,
            };
            let back = rank.buffer.combine(request, order)?;
            let events = [layout.event().is_none(), output.event.is_none(), back.event.is_none()];
            let got = rank.row_bytes(&back.combined_x)?;
            rank.equal(&format!("combined_x of turn {index}"), &got, &turn.sums[rank.rank as usize]);
            rank.equal("no events where the caller waits", &events, &[true; 3]);
        }
        rank.stream.synchronize()
    });
}

#[test]
fn asynchronous_calls_are_ordered_by_their_events() {
    let setup = Setup::new(2, 1, 8, ROW);
    let turns: Vec<Turn> = (0..20).map(|seed| Turn::random(seed, &[8, 5], 1)).collect();
    setup.run(|rank| {
        for (index, turn) in turns.iter().enumerate() {
            let inputs = Inputs::upload(turn, rank)?;
            let start = rank.event()?;
            let order = StreamOrder::comm(&rank.stream).after(&start).asynchronous();
            let layout = rank.buffer.get_dispatch_layout(&inputs.topk_idx, turn.routing.num_experts, order)?;
            let laid_out = layout.event().expect("an asynchronous call has an event");
            let order = StreamOrder::comm(&rank.stream).after(laid_out).asynchronous();
            let request = DispatchRequest { counts: rank.on_device(), ..DispatchRequest::new(&inputs.x, &layout) };
            let output = rank.buffer.dispatch(request, order)?;

            // A cached dispatch on top, ordered by events alone, then the experts on the caller's stream.
            let dispatched = output.event.as_ref().expect("an asynchronous call has an event");
            let order = StreamOrder::comm(&rank.stream).after(dispatched).asynchronous();
            let request = CachedDispatchRequest { x: &inputs.x, x_scales: None, handle: &output.handle };
            let again = rank.buffer.dispatch_cached(request, order)?;
            rank.stream.wait(again.event.as_ref().expect("an asynchronous call has an event"))?;
            let rows = rank.buffer.combine_rows(DType::Bf16, rank.buffer.capacity(), HIDDEN as u64)?;
            // SAFETY: both are in the pool, which lives as long as the buffer.
            unsafe { rank.stream.copy(rows.ptr(), again.recv_x.ptr(), rows.rows() * rows.row_stride())? };
            let computed = rank.event()?;
            let request = CombineRequest {
                rows: CombineRows::InPool { dtype: DType::Bf16, hidden: HIDDEN as u64 },
                topk_weights: None,
                handle: &output.handle,
            };
            let order = StreamOrder::comm(&rank.stream).after(&computed).asynchronous();
            let back = rank.buffer.combine(request, order)?;
            back.event.as_ref().expect("an asynchronous call has an event").synchronize()?;
            let got = rank.row_bytes(&back.combined_x)?;
            rank.equal(&format!("combined_x of turn {index}"), &got, &turn.sums[rank.rank as usize]);
        }
        Ok(())
    });
}

#[test]
fn a_call_on_the_callers_stream_can_be_asynchronous_and_wait_for_an_event() {
    let setup = Setup::new(2, 1, 8, ROW);
    let turn = Turn::random(5, &[8, 5], 1);
    setup.run(|rank| {
        // Inputs come on another stream; the event orders them before the layout.
        let side = Stream::new(rank.device(), false)?;
        let inputs = Inputs::upload(&turn, rank)?;
        let topk_idx = Tensor::alloc(rank.device(), DType::I64, inputs.topk_idx.shape())?;
        // SAFETY: both tensors live until the synchronise below.
        unsafe { side.copy(topk_idx.ptr(), inputs.topk_idx.ptr(), topk_idx.rows() * topk_idx.row_stride())? };
        let copied = Event::new(rank.device(), false)?;
        copied.record(&side)?;
        let order = StreamOrder::on(&rank.stream).after(&copied).asynchronous();
        let layout = rank.buffer.get_dispatch_layout(&topk_idx, turn.routing.num_experts, order)?;
        layout.event().expect("an asynchronous call has an event").synchronize()?;
        let got = rank.values::<i32>(&layout.num_tokens_per_rank())?;
        rank.equal("num_tokens_per_rank", &got, &turn.plans[rank.rank as usize].layout.num_tokens_per_rank);
        Ok(())
    });
}

#[test]
fn a_graph_replays_with_other_routings() {
    let setup = Setup::new(3, 2, 9, ROW);
    let turns: Vec<Turn> = (0..12).map(|seed| Turn::random(seed, &[9, 2, 6], 2)).collect();
    setup.run(|rank| {
        let inputs = Inputs::upload(&turns[0], rank)?;
        // Once without a graph: the capture finds the memory that this gives back, and may not allocate.
        drop(echo(rank, &inputs, turns[0].routing.num_experts)?);
        rank.synchronize()?;
        let mut outputs = None;
        let stream = rank.stream.clone();
        let graph = stream.capture(|| {
            outputs = Some(echo(rank, &inputs, turns[0].routing.num_experts)?);
            Ok(())
        })?;
        let (output, back) = outputs.expect("the capture has run");
        for (index, turn) in turns.iter().enumerate() {
            let fresh = Inputs::upload(turn, rank)?;
            for (to, from) in [(&inputs.topk_idx, &fresh.topk_idx), (&inputs.x, &fresh.x)] {
                // SAFETY: all tensors live until the reads below have synchronised.
                unsafe { rank.stream.copy(to.ptr(), from.ptr(), from.rows() * from.row_stride())? };
            }
            graph.launch(&rank.stream)?;
            let want = turn.recv(rank.rank);
            let got = rank.row_bytes(&output.recv_x)?;
            rank.equal(&format!("recv_x of replay {index}"), &got[..want.len()], &want);
            let got = rank.row_bytes(&back.combined_x)?;
            rank.equal(&format!("combined_x of replay {index}"), &got, &turn.sums[rank.rank as usize]);
            let count = output.handle.num_recv_tokens(&rank.stream)?;
            rank.equal("num_recv_tokens of a replay", &[count], &[want.len() as u32]);

            // Calls outside of the graph in between stay in step with it.
            if index % 3 == 0 {
                let (_, eager) = echo(rank, &fresh, turn.routing.num_experts)?;
                let got = rank.row_bytes(&eager.combined_x)?;
                rank.equal("combined_x without the graph", &got, &turn.sums[rank.rank as usize]);
            }
            rank.stream.synchronize()?;
        }
        Ok(())
    });
}

#[test]
fn replays_need_no_host_wait_between_them() {
    const REPLAYS: usize = 50;
    let setup = Setup::new(2, 1, 6, ROW);
    let turns: Vec<Turn> = (0..REPLAYS as u64).map(|seed| Turn::random(seed, &[6, 4], 1)).collect();
    setup.run(|rank| {
        let inputs = Inputs::upload(&turns[0], rank)?;
        let fresh: Vec<_> = turns.iter().map(|turn| Inputs::upload(turn, rank)).collect::<Result<_>>()?;
        let log = Log::new(rank, REPLAYS, 6 * ROW)?;
        drop(echo(rank, &inputs, turns[0].routing.num_experts)?);
        rank.synchronize()?;
        let mut outputs = None;
        let stream = rank.stream.clone();
        let graph = stream.capture(|| {
            outputs = Some(echo(rank, &inputs, turns[0].routing.num_experts)?);
            Ok(())
        })?;
        let (_, back) = outputs.expect("the capture has run");
        for (index, fresh) in fresh.iter().enumerate() {
            for (to, from) in [(&inputs.topk_idx, &fresh.topk_idx), (&inputs.x, &fresh.x)] {
                // SAFETY: all tensors live until the synchronise below.
                unsafe { rank.stream.copy(to.ptr(), from.ptr(), from.rows() * from.row_stride())? };
            }
            graph.launch(&rank.stream)?;
            log.keep(rank, index, &back.combined_x)?;
        }
        rank.stream.synchronize()?;
        for (index, turn) in turns.iter().enumerate() {
            let want = &turn.sums[rank.rank as usize];
            let got = log.rows(rank, index, want.len(), ROW)?;
            rank.equal(&format!("combined_x of replay {index}"), &got, want);
        }
        Ok(())
    });
}
