//! High throughput: the [`Buffer`] and its operations, for batches of any size.
//! [`low_latency`](crate::low_latency) is the mode for up to 1,024 tokens a rank; the [front
//! page](crate#high-throughput) has an example of both.
//!
//! ```text
//! topk_idx --get_dispatch_layout--> DispatchLayout --dispatch--> Received { recv_x, .., handle }
//!                                                                     | experts run
//!                                                                     v
//!                                              Combined <--combine(rows, handle)
//! ```
//!
//! A method is collective if its documentation contains that word: each rank of the group makes the
//! same collective calls in the same order. A rank without tokens makes the same calls, with tensors
//! of 0 rows; otherwise its peers time out. Work is enqueued on a stream
//! ([`StreamOrder`](crate::StreamOrder)); only an exact-size dispatch, for the counts, and
//! [`Buffer::capture`] make the host wait.
//!
//! # The calls of a layer
//!
//! | call | does | host waits |
//! |---|---|---|
//! | [`Buffer::get_dispatch_layout`] | counts the top-k ids by rank and expert; local | no |
//! | [`Buffer::dispatch`] | exchanges counts, sends each token's row once to every rank with one of its experts | for the counts, unless [`Counts::OnDevice`] |
//! | [`Buffer::dispatch_cached`] | the same along the routing of an earlier dispatch, without counts | no |
//! | [`Received::combine_rows`] | gives rows in the pool, so that experts write where combine reads | no |
//! | [`Buffer::combine`] | sums a token's rows from all ranks in FP32 and rank order, without weights | no |
//! | [`Buffer::combine_into`] | the same with the sums in tensors of the caller's | no |
//! | [`Buffer::combine_backward`], [`Buffer::dispatch_backward`], [`Buffer::weights_backward`] | [gradients](#training) | no |
//! | [`Buffer::dispatch_send`], [`Buffer::dispatch_cached_send`], [`Buffer::combine_send`], [`Buffer::combine_send_into`] | the first [half](#two-batches-at-once) of a call; [`Pending::receive`] is the second | as the call |
//! | [`Buffer::copy_received`] | copies received rows into a tensor of the caller's; local | no |
//! | [`Buffer::transpose_column`] | copies a received column with the rows side by side, as grouped GEMMs read scales; local | no |
//! | [`Buffer::first_tokens`] | ids of a batch whose size is only on the device; local | no |
//! | [`Buffer::capture`] | records calls as a [`Step`], for CUDA graphs | for the run before the recording |
//! | [`Buffer::check`] | returns the error of an operation that has failed by now | no |
//!
//! # Two batches at once
//! One batch's experts can run while another batch is under way. Make a buffer for each of the two,
//! with a stream of its own, and interleave their halves: `dispatch_send` of A, `combine_send` of
//! B, `receive` of A, and so on. The first half of a dispatch ends when this rank's rows have been
//! sent, that of a combine when its rows are where peers gather them. The second half waits for the
//! peers. No multiprocessor is held in between. A [`Pending`] borrows its buffer, so the compiler
//! rejects a second operation in flight there. Kernels of both batches must fit on the device
//! together: give each buffer half of the multiprocessors ([`Config`]).
//!
//! # Training
//! Each operation has its backward, along the [`DispatchHandle`] of the forward pass: dispatch and
//! combine are each other's transposes.
//!
//! | forward | backward | gives |
//! |---|---|---|
//! | [`Buffer::combine`] | [`Buffer::combine_backward`], a dispatch | gradients of the experts' rows |
//! | [`Buffer::dispatch`] | [`Buffer::dispatch_backward`], a combine | the gradient of `x` |
//! | weights of the experts' rows | [`Buffer::weights_backward`] | the gradient of `topk_weights` |
//!
//! A forward pass and its gradients take two places ([`Options::places`]). Low latency is for
//! decoding: it has no handle, and its combine consumes the received rows.
//!
//! # Rows and weights
//! Received rows are grouped by source rank and sorted by token ([`Received`]). `recv_topk_idx` has
//! the local ids of this rank's experts, -1 for others. A token is received once, however many of
//! this rank's experts it has: add their results, weighted, before the combine.
//!
//! # Payloads
//! A row is bytes, sent with up to four columns of bytes ([`DispatchRequest::column`],
//! [`Received::recv_columns`]): scales of MXFP8 and NVFP4, or other data for the experts.
//! [`Payload`](crate::Payload) has the usual formats, the room that they need in a buffer, and the
//! shapes of their tensors.
//!
//! A dispatch converts rows of bf16 to e4m3 with f32 scales or to MXFP8, on request
//! ([`DispatchRequest::quantise`], [`Quantise`]).
//!
//! ```
//! # use std::time::Duration;
//! # use epoxide::driver::Stream;
//! # use epoxide::driver::virt::{VirtConfig, VirtualGpu};
//! # use epoxide::group::run_threads;
//! # use epoxide::half::bf16;
//! # use epoxide::throughput::*;
//! # use epoxide::{DType, Payload, StreamOrder, Tensor, TypedTensor};
//! # run_threads(2, Duration::from_secs(60), |rank, group| {
//! #     let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
//! #     let stream = Stream::new(&device)?;
//! #     let order = StreamOrder::on(&stream);
//! let max_scales = Payload::fp8(DType::Fp8E4m3, 128)?.max_scales();
//! let shape = Shape { max_tokens: 2, hidden: 128, dtype: DType::Bf16, max_topk: 1, max_scales };
//! let mut buffer = Buffer::new(device, &*group, Options::new(shape))?;
//! #     let mut place = buffer.place(0)?;
//! let x = Tensor::from_host(&stream, DType::Bf16, &[2, 128], &[bf16::from_f32(3.5); 256])?;
//! #     let topk_idx = TypedTensor::from_host(&stream, &[2, 1], &[0i64, 1])?;
//! #     let layout = buffer.get_dispatch_layout(&topk_idx, 2, order)?;
//! let request = DispatchRequest::new(&x, &layout).quantise(Quantise::Fp8);
//! let received = buffer.dispatch(&mut place, request, order)?;
//! // Rows are e4m3: 448 times the scale is 3.5.
//! assert_eq!(received.recv_x.dtype(), DType::Fp8E4m3);
//! let scales = received.recv_x_scales.as_ref().expect("f32 scales");
//! assert_eq!(scales.values(&stream)?, [3.5 / 448.0; 2]);
//! #     Ok(())
//! # })?;
//! # Ok::<(), epoxide::group::RankFailure>(())
//! ```
//!
//! # Whose memory
//! [`Options::sizes`] and [`Shape::most_rows_by_expert`] compute sizes without a buffer: the pool,
//! wire memory, rows, and memory for rows that a dispatch quantises. Not in them are layouts,
//! handles and sums, whose memory calls take as needed and reuse, and the buffer's tables.
//! [`Buffer::combine_into`] takes no memory for sums.
//!
//! | | in memory of the buffer | in memory of the caller |
//! |---|---|---|
//! | received rows | the [`Place`]: peers write there, mapped once when the buffer was made; [`Place::recv_x_ptr`] never changes | [`Buffer::copy_received`], a copy by this rank's kernel |
//! | rows for a combine | [`Place::combine_rows`]: peers read there, nothing is copied | any tensor, copied into the pool while peers gather |
//! | sums | [`Buffer::combine`] allocates them | [`Buffer::combine_into`]: this rank's kernel writes there, nothing is copied |
//! | e4m3 rows that a dispatch makes of bf16 | the buffer, from the first such dispatch on: [`Sizes::quantise_bytes`](crate::Sizes::quantise_bytes) | rows that are quantised before |
//! | inputs | | any tensor; a [`DispatchLayout`] and a [`DispatchHandle`] own their tables |
//!
//! A dispatch and its combine can be in separate functions: [`Received::detach`] drops the
//! lifetime, and the handle owns all that the combine needs.
//!
//! # Errors
//! Calls only enqueue work. A host read of a result ([`Tensor::to_host`](crate::Tensor::to_host))
//! waits for its operation and returns that operation's error instead of numbers. For results that
//! only kernels read, synchronise their stream and call [`Buffer::check`]; sums missing after a
//! failed combine are NaN. The deadline of waits for ranks is [`Options::timeout`]; an expired one
//! is [`Error::PeerTimeout`](crate::Error::PeerTimeout).
//!
//! A dispatch with [`Counts::OnDevice`] whose plan fails ends alone, on every rank, and the buffer
//! stays usable. The host read and the event of the call give that error; the next call does not.
//! [`Buffer::check`] gives it once.
//!
//! # Several nodes
//! [`Options::ranks_per_node`] spreads the ranks over nodes, and [`Options::transport`]
//! joins these. Ranks that can all map each other's memory are one node.

pub use crate::ep::core::Step;
pub use crate::ep::throughput::{
    Buffer, CachedDispatchRequest, CombineOutputs, CombineRequest, CombineRows, Combined, Config, Counts,
    Detached, DispatchHandle, DispatchLayout, DispatchRequest, GradWeights, InternodeHandle, IntranodeHandle,
    NodeCounts, Options, Pending, Place, PoolRows, Received, Shape, low_latency_rdma_size_hint,
};
pub use crate::ep::{ExpertRows, Quantise};
