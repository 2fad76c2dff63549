//! Slices, streams and graphs of cudarc's on a GPU: `EPOXIDE_TEST_DEVICE=cuda` runs them, on any
//! driver. Rank r has GPU r; `EPOXIDE_TEST_RANKS` is the number of ranks, without it 1.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView};
use epoxide::driver::Stream;
use epoxide::group::{ProcessGroup, run_threads};
use epoxide::half::bf16;
use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Place, Shape};
use epoxide::{Error, Result, StreamOrder, TypedTensor};
use epoxide_cudarc::{Lent, LentSlice, LentStream};

const TOKENS: usize = 6;
const HIDDEN: usize = 256;
const ROWS: [u64; 2] = [TOKENS as u64, HIDDEN as u64];

/// The number of ranks; `None` if no GPU was requested.
fn ranks() -> Option<u32> {
    match std::env::var("EPOXIDE_TEST_DEVICE").as_deref() {
        Ok("cuda") => Some(std::env::var("EPOXIDE_TEST_RANKS").map_or(1, |ranks| ranks.parse().unwrap())),
        _ => {
            eprintln!("skipped: EPOXIDE_TEST_DEVICE=cuda runs it on a GPU");
            None
        }
    }
}

/// A rank with a stream of cudarc's.
struct Rank {
    group: Arc<dyn ProcessGroup>,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    lent: LentStream,
    buffer: Buffer,
    place: Place,
    topk_idx: CudaSlice<i32>,
}

impl Rank {
    /// Each token of a rank selects one expert of each rank.
    fn join(rank: u32, group: Arc<dyn ProcessGroup>) -> Result<Rank> {
        let ranks = group.size();
        let context = CudaContext::new(rank as usize).expect("a GPU");
        let stream = context.new_stream().expect("a stream");
        let lent = LentStream::new(&stream)?;
        let shape =
            Shape { max_tokens: TOKENS as u32, hidden: HIDDEN as u64, num_topk: ranks, num_experts: ranks };
        let options = Options::new(shape).timeout(Duration::from_secs(20));
        let buffer = Buffer::new(lent.device().clone(), &*group, options)?;
        let place = buffer.place(0)?;
        let ids: Vec<i32> = (0..TOKENS).flat_map(|_| 0..ranks as i32).collect();
        let topk_idx = stream.clone_htod(&ids).expect("ids");
        Ok(Rank { group, context, stream, lent, buffer, place, topk_idx })
    }

    /// A dispatch of `x` and a combine of the unchanged rows: each token's sum is its row times the
    /// number of ranks.
    fn round_trip(&mut self, x: &CudaSlice<u16>, out: &mut CudaSlice<u16>) -> Result<()> {
        let order = StreamOrder::on(&self.lent);
        let topk = u64::from(self.group.size());
        // SAFETY: all calls run on the stream; slices of a recording outlive it in these tests.
        let (x, ids) =
            unsafe { (self.lent.input(x, &ROWS)?, self.lent.input(&self.topk_idx, &[TOKENS as u64, topk])?) };
        let received = self.buffer.dispatch(&mut self.place, DispatchRequest::new(&x, &ids), order)?;
        let rows = received.x.clone();
        // SAFETY: as above.
        let sums = unsafe { self.lent.output(out, &ROWS)? };
        self.buffer.combine_into(received, CombineRequest::by_row(&rows), &sums, order)?;
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().expect("the stream");
        self.context.check_err().expect("no error that cudarc has recorded");
        self.group.barrier(Duration::from_secs(60))?;
        self.buffer.check()
    }
}

fn row_bits(seed: u32) -> Vec<u16> {
    (0..TOKENS * HIDDEN).map(|at| bf16::from_f32(((at as u32 * 7 + seed) % 64) as f32).to_bits()).collect()
}

/// Small whole numbers: their sums are exact.
fn sums(seed: u32, ranks: u32) -> Vec<u16> {
    let sum = |bits| bf16::from_f32(bf16::from_bits(bits).to_f32() * ranks as f32).to_bits();
    row_bits(seed).into_iter().map(sum).collect()
}

fn run(main: impl Fn(&mut Rank) -> Result<()> + Sync) {
    let Some(ranks) = ranks() else { return };
    let ended = run_threads(ranks, Duration::from_secs(120), |rank, group| {
        let mut rank = Rank::join(rank, group)?;
        main(&mut rank)?;
        rank.synchronize()
    });
    ended.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn slices_go_in_and_sums_come_out_without_a_copy() {
    run(|rank| {
        let mut out = rank.stream.alloc_zeros::<u16>(TOKENS * HIDDEN).expect("sums");
        for seed in 0..4 {
            let x = rank.stream.clone_htod(&row_bits(seed)).expect("rows");
            rank.round_trip(&x, &mut out)?;
            // Freed while the stream may still read it.
            drop(x);
            assert_eq!(rank.stream.clone_dtoh(&out).expect("sums"), sums(seed, rank.group.size()));
            rank.synchronize()?;
        }
        Ok(())
    });
}

#[test]
fn slices_of_other_streams_are_ordered_by_their_events() {
    run(|rank| {
        let other = rank.context.new_stream().expect("a stream");
        let mut x = other.alloc_zeros::<u16>(TOKENS * HIDDEN).expect("rows");
        let mut out = other.alloc_zeros::<u16>(TOKENS * HIDDEN).expect("sums");
        for seed in 0..20 {
            other.memcpy_htod(&row_bits(seed), &mut x).expect("a copy");
            rank.round_trip(&x, &mut out)?;
            assert_eq!(other.clone_dtoh(&out).expect("sums"), sums(seed, rank.group.size()), "{seed}");
        }
        rank.synchronize()
    });
}

#[test]
fn a_capture_waits_for_no_event_and_records_none() {
    run(|rank| {
        let other = rank.context.new_stream().expect("a stream");
        let mut x = other.clone_htod(&row_bits(0)).expect("rows");
        let mut out = other.alloc_zeros::<u16>(TOKENS * HIDDEN).expect("sums");
        // Memory and kernels of the recording exist before it begins.
        rank.round_trip(&x, &mut out)?;
        rank.synchronize()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        rank.stream.begin_capture(mode).expect("a capture");
        let recorded = rank.round_trip(&x, &mut out);
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = rank.stream.end_capture(flags).expect("a graph").expect("a graph with nodes");
        recorded?;
        // Events of the slices are as they were: both streams may use them.
        for seed in 1..6 {
            other.memcpy_htod(&row_bits(seed), &mut x).expect("a copy");
            other.synchronize().expect("the copy");
            graph.launch().expect("a launch");
            rank.stream.synchronize().expect("the launch");
            assert_eq!(other.clone_dtoh(&out).expect("sums"), sums(seed, rank.group.size()), "{seed}");
            rank.synchronize()?;
        }
        Ok(())
    });
}

#[test]
fn memory_of_ours_is_a_slice_that_cudarc_does_not_free() {
    run(|rank| {
        let other = rank.context.new_stream().expect("a stream");
        let mine = TypedTensor::from_host(&rank.lent, &ROWS, &row_bits(3))?;
        for _ in 0..3 {
            // SAFETY: its copies are waited for before it is dropped.
            let lent: LentSlice<'_, u16> = unsafe { rank.lent.slice(&mine)? };
            let view: CudaView<'_, u16> = lent.view();
            assert_eq!(other.clone_dtoh(&view).expect("a copy"), row_bits(3));
        }
        // SAFETY: as above.
        let mut lent = unsafe { rank.lent.slice(&mine)? };
        other.memcpy_htod(&row_bits(5), &mut lent.view_mut()).expect("a copy");
        other.synchronize().expect("the copy");
        drop(lent);
        assert_eq!(mine.values(&rank.lent)?, row_bits(5));
        Ok(())
    });
}

#[test]
fn arguments_are_checked() {
    run(|rank| {
        let few = rank.stream.alloc_zeros::<u16>(TOKENS * HIDDEN - 1).expect("rows");
        // SAFETY: no call gets it.
        let error = unsafe { rank.lent.input(&few, &ROWS) }.unwrap_err();
        assert!(matches!(error, Error::Shape { .. }) && error.to_string().contains("[1535]"), "{error}");
        // SAFETY: as above.
        let error = unsafe { rank.lent.input(&few, &[u64::MAX, 2]) }.unwrap_err();
        assert!(matches!(error, Error::Shape { .. }), "{error}");
        // SAFETY: as above.
        drop(unsafe { rank.lent.input(&few, &[2, 8])? });
        Ok(())
    });
}

/// Threads may share what the crate gives; it needs no GPU to be compiled.
#[test]
fn a_stream_may_be_used_from_any_thread() {
    fn assert_send_sync<T: Send + Sync>() {}
    assert_send_sync::<LentStream>();
    let _: fn(&LentStream) -> &Stream = |lent| lent;
    let _ = drop::<Lent<'_, u16>>;
}
