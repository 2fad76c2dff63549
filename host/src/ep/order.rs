//! Where in the caller's and our streams an operation runs.

use crate::driver::{Event, Stream};

/// Which stream an operation runs on, what it waits for, and who waits for it.
///
/// The operations of one [`Buffer`](super::Buffer) come one after the other on every rank, whatever streams they run on. Only within a
/// recording that spans several streams their order is the recorder's affair.
///
/// Two *different* buffers have no order between them. Their operations wait for peers while they hold multiprocessors: where one rank
/// launches buffer A's before B's and another one B's before A's, on streams that run side by side, and both do not fit on the device at
/// once ([`Config::num_sms`](super::Config) blocks each), they wait for each other until their deadlines; the error then
/// names the other buffer. Launch them in one order on every rank, or on one
/// stream, or give each so few multiprocessors that all fit.
#[derive(Debug, Clone, Copy)]
pub struct StreamOrder<'a> {
    pub(super) caller: &'a Stream,
    pub(super) previous_event: Option<&'a Event>,
    pub(super) on_comm_stream: bool,
    pub(super) asynchronous: bool,
}

impl<'a> StreamOrder<'a> {
    /// Runs on the caller's stream itself. Can be captured in a graph.
    pub fn on(stream: &'a Stream) -> Self {
        StreamOrder { caller: stream, previous_event: None, on_comm_stream: false, asynchronous: false }
    }

    /// Runs on the buffer's high-priority communication stream, after what `stream` holds now; `stream` then waits for
    /// the end. With [`StreamOrder::asynchronous`] it does not wait, so that work of the caller's runs beside the communication, until it waits for
    /// the event of the output.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use epoxide::driver::virt::{VirtConfig, VirtualGpu};
    /// # use epoxide::group::launch::run_threads;
    /// use epoxide::driver::Stream;
    /// use epoxide::ep::*;
    ///
    /// # let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
    /// #     let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
    /// let stream = Stream::new(&device, false)?;
    /// #     let shape = BufferShape { max_tokens_per_rank: 2, max_row_bytes: 64, max_topk: 1, max_scales: 0 };
    /// #     let mut buffer = Buffer::new(device, &*group, BufferOptions::new(shape))?;
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
    /// # Ok::<(), epoxide::group::launch::RankFailure>(())
    /// ```
    pub fn comm(stream: &'a Stream) -> Self {
        StreamOrder { on_comm_stream: true, ..StreamOrder::on(stream) }
    }

    /// Waits for `event` instead of all that the caller's stream holds; on the caller's own stream, as well.
    pub fn after(self, event: &'a Event) -> Self {
        StreamOrder { previous_event: Some(event), ..self }
    }

    /// Leaves the caller's stream alone at the end: the output has an event to wait for.
    pub fn asynchronous(self) -> Self {
        StreamOrder { asynchronous: true, ..self }
    }
}
