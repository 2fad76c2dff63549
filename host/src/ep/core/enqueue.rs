//! Streams of operations: the stream of one, the caller's or the buffer's own, and the work that it
//! waits for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sequence::{Operation, Sequence};
use crate::driver::{Device, Event, Stream, give_up_unless};
use crate::error::{Error, Result};

/// The stream of an operation, the work that it waits for, and the work that waits for it.
///
/// The operations of one [`Buffer`](crate::throughput::Buffer) run one after the other on every
/// rank, on any streams. Within a recording that spans several streams, the caller orders them.
///
/// Two *different* buffers have no order between them, and their operations wait for peers while
/// they hold multiprocessors. Launch the operations of two buffers in the same order on every rank.
/// Otherwise they can deadlock until their deadlines, in any of these cases:
/// * Both operations are on one stream, so that the second starts after the first has ended.
/// * The device cannot hold the blocks of both ([`Config::num_sms`](crate::throughput::Config)
///   blocks each, and those that copy in a combine of a tensor).
/// * One operation overwrites rows, and therefore waits for earlier work of all other streams.
///
/// The error then names the other buffer, unless the operation there got through behind the deadline
/// before the host asked.
#[derive(Debug, Clone, Copy)]
pub struct StreamOrder<'a> {
    caller: &'a Stream,
    previous_event: Option<&'a Event>,
    on_comm_stream: bool,
    asynchronous: bool,
}

/// The number and the name of a device.
pub fn named(device: &Device) -> String {
    format!("device {}, {}", device.info().ordinal, device.info().name)
}

/// Whether both are one GPU, which may have been opened twice; virtual ones have no address.
pub fn is_same_gpu(one: &Device, other: &Device) -> bool {
    let (own, address) = (&one.info().pci_bus_id, &other.info().pci_bus_id);
    one.is(other) || (!own.is_empty() && own == address)
}

impl<'a> StreamOrder<'a> {
    /// An error unless the stream is of `device`: a free of memory waits for its streams.
    pub(super) fn check_device(&self, device: &Device) -> Result<()> {
        let of = self.caller.device();
        if of.is(device) {
            return Ok(());
        }
        let rule = format!("must be on a stream of the buffer's device, {}: make one there", named(device));
        Err(Error::argument("order", format!("on a stream of {}", named(of)), rule))
    }

    /// Runs on the caller's stream itself. Can be captured in a graph.
    pub fn on(stream: &'a Stream) -> Self {
        StreamOrder { caller: stream, previous_event: None, on_comm_stream: false, asynchronous: false }
    }

    /// Runs on the buffer's high-priority communication stream, after what `stream` holds now;
    /// `stream` then waits for the end. With [`StreamOrder::asynchronous`] it does not wait, so the
    /// caller's work overlaps the communication until it waits for the event of the output.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use epoxide::driver::virt::{VirtConfig, VirtualGpu};
    /// # use epoxide::group::run_threads;
    /// use epoxide::driver::Stream;
    /// use epoxide::throughput::*;
    /// use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
    ///
    /// # let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
    /// #     let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
    /// let stream = Stream::new(&device)?;
    /// #     let shape = Shape { max_tokens: 2, hidden: 32, dtype: DType::Bf16, max_topk: 1, max_scales: 0 };
    /// #     let mut buffer = Buffer::new(device, &*group, Options::new(shape))?;
    /// #     let mut place = buffer.place(0)?;
    /// #     let x = Tensor::from_host(&stream, DType::F32, &[2, 16], &[rank as f32; 32])?;
    /// #     let topk_idx = TypedTensor::from_host(&stream, &[2, 1], &[0i64, 1])?;
    /// let layout = buffer.get_dispatch_layout(&topk_idx, 2, StreamOrder::on(&stream))?;
    /// // How many rows come stays on the device, so that the host waits for nothing either.
    /// let counts = Counts::OnDevice { capacity: buffer.capacity() };
    /// let request = DispatchRequest::new(&x, &layout).counts(counts);
    /// let received = buffer.dispatch(&mut place, request, StreamOrder::comm(&stream).asynchronous())?;
    ///
    /// // Work enqueued on `stream` here, such as the layer's shared experts, runs beside the dispatch.
    ///
    /// if let Some(arrived) = &received.event {
    ///     stream.wait(arrived)?;
    /// }
    /// // From here on `stream` may read `received.recv_x`.
    /// let request = CombineRequest::new(&received.recv_x, &received.handle);
    /// let combined = buffer.combine(request, StreamOrder::comm(&stream))?;
    /// #     combined.combined_x.to_host::<f32>(&stream)
    /// # })?;
    /// # assert_eq!(sums, [vec![0.0; 32], vec![1.0; 32]]);
    /// # Ok::<(), epoxide::group::RankFailure>(())
    /// ```
    pub fn comm(stream: &'a Stream) -> Self {
        StreamOrder { on_comm_stream: true, ..StreamOrder::on(stream) }
    }

    /// Waits for `event` instead of all that the caller's stream holds; on the caller's own stream,
    /// as well.
    pub fn after(self, event: &'a Event) -> Self {
        StreamOrder { previous_event: Some(event), ..self }
    }

    /// Does not make the caller's stream wait at the end: the output has an event to wait for.
    pub fn asynchronous(self) -> Self {
        StreamOrder { asynchronous: true, ..self }
    }
}

/// A buffer's own stream, and the events that order it with those of callers.
#[derive(Debug)]
pub struct Enqueuer {
    comm_stream: Stream,
    start: Event,
    /// The end of the last captured operation, in its recording.
    captured_end: Event,
    sequence: Arc<Sequence>,
}

impl Enqueuer {
    pub fn new(device: &Device) -> Result<Arc<Enqueuer>> {
        Ok(Arc::new(Enqueuer {
            comm_stream: Stream::unfenced(device)?,
            start: Event::new(device)?,
            captured_end: Event::new(device)?,
            sequence: Sequence::new(device)?,
        }))
    }

    /// The buffer's own stream, of high priority.
    pub fn comm_stream(&self) -> &Stream {
        &self.comm_stream
    }

    /// The order of the buffer's operations.
    pub fn sequence(&self) -> &Arc<Sequence> {
        &self.sequence
    }

    /// Whether an operation is only recorded.
    pub fn is_capturing(order: StreamOrder<'_>) -> Result<bool> {
        order.caller.is_capturing()
    }

    /// Runs `work` on the stream of `order`, behind the previous operation; returns the event of an
    /// asynchronous call. `capturing`: whether the caller's stream only records.
    pub fn run(
        &self,
        order: StreamOrder<'_>,
        capturing: bool,
        operation: Operation,
        work: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<Option<Event>> {
        self.sequence.check_received(operation, capturing)?;
        let caller = order.caller;
        let stream = if order.on_comm_stream { &self.comm_stream } else { caller };
        match order.previous_event {
            Some(event) => stream.wait(event)?,
            None if order.on_comm_stream => {
                self.start.record(caller)?;
                stream.wait(&self.start)?;
            }
            None => {}
        }
        // A wait for an event of a capture makes the stream join it, and one for another event keeps
        // the buffer's own stream out.
        if order.previous_event.is_some() && stream.is_capturing()? != capturing {
            let rule = match capturing {
                true => {
                    "the capture of the caller's stream does not reach it: give one that was recorded in it"
                }
                false => "it is of a capture that the stream has joined only now: make the call once more",
            };
            return Err(Error::argument("after", "the given event", rule));
        }
        let outcome = if capturing {
            let outcome = work(stream);
            if outcome.is_ok() {
                self.sequence.enqueued(operation, true);
            }
            outcome.and(self.captured_end.record(stream))
        } else {
            let submission = self.sequence.begin(stream, operation)?;
            // After an error as well: launched kernels still run, and the memory they use is freed.
            submission.end(stream, work(stream))
        };
        if order.asynchronous && outcome.is_ok() {
            let event = Event::new(stream.device())?;
            event.record(stream)?;
            return Ok(Some(event));
        }
        if order.on_comm_stream {
            let waits =
                if capturing { caller.wait(&self.captured_end) } else { self.sequence.wait_on(caller) };
            return outcome.and(waits).map(|()| None);
        }
        outcome.map(|()| None)
    }

    /// Rejects further operations and waits for the last one: kernels in flight use memory that is
    /// freed next. If the wait fails or exceeds `limit`, the device is given up.
    pub fn close(&self, limit: Duration) {
        self.sequence.close();
        let start = Instant::now();
        let copies = self.comm_stream.wait_timeout(limit);
        let last = self.sequence.wait(limit.saturating_sub(start.elapsed()));
        // The buffer's kernels end by their own deadlines, but not before earlier work on the
        // caller's stream.
        let ended = copies.and_then(|copies| Ok(copies && last?));
        give_up_unless(ended, self.comm_stream.device(), "the last operation of a buffer", limit);
    }
}
