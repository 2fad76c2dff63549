//! Low latency: dispatch and combine for decode-sized batches, whose time is mostly waiting.
//! [`throughput`](crate::throughput) is the mode for larger batches; the [front
//! page](crate#results-of-the-operations) compares the results of both.
//!
//! ```text
//! x, topk_idx, weights --dispatch--> Received { x, expert_rows, expert_counts, .. }
//!                                        | experts run: rows of expert e are expert_rows[e][..expert_counts[e]]
//!                                        v
//!                       Combined <--combine(received, request)
//! ```
//!
//! A token's row is sent once to each rank that has one of its experts, and is stored at `source *
//! max_tokens + token`, where it stays. Hence no count exchange precedes it and no copy follows.
//! Each rank lists the rows of each of its experts. For experts that need their rows contiguous,
//! [`Buffer::gather_by_expert`] copies them. Combine sums, weighted, the experts' results of a
//! token on each rank, and returns one row per rank. Rows of bf16 are sent unchanged or, in either
//! direction, as e4m3, in a dispatch also as MXFP8 ([`Quantise`]). Rows of other types are
//! dispatched as they are, with up to four columns of bytes ([`DispatchRequest::column`],
//! [`Payload`](crate::Payload)). Combine sums rows of bf16, f16 or f32
//! ([`Options::combine_dtype`]).
//!
//! # The calls of a layer
//! The host waits in none but `capture` and `regroup`, and all but these two can be captured. A call
//! that takes memory (`first_tokens`, several columns, rows by expert) takes it in the run that
//! `capture` makes before it records.
//!
//! | call | does |
//! |---|---|
//! | [`Buffer::dispatch`] | sends each token's row once to every rank with one of its experts; one kernel |
//! | [`Buffer::dispatch_send`], [`Pending::receive`] | the same in two halves, between which it holds no multiprocessor; [`Buffer::combine_send`] too |
//! | [`Buffer::gather_by_expert`], [`Buffer::gather_columns_by_expert`] | copies received rows together by expert, and their columns |
//! | [`Buffer::combine`] | sums and returns the experts' rows: [`CombineRequest::by_expert`] weighs them, [`CombineRequest::by_row`] does not, and [`CombineRequest::in_pool`] reads them where experts left them ([`Received::combine_rows`]) |
//! | [`Buffer::combine_into`], [`Buffer::combine_send_into`] | the same with the sums in a tensor of the caller's |
//! | [`Buffer::first_tokens`] | ids of a batch whose size is only on the device |
//! | [`Buffer::capture`] | records calls as a [`Step`], which is launched any number of times |
//! | [`Buffer::regroup`] | continues without lost ranks |
//!
//! A method is collective if its documentation contains that word: every rank makes the same
//! collective calls in the same order. A rank without tokens makes the same calls, with tensors of 0
//! rows; otherwise its peers time out.
//!
//! # Two batches at once
//! One batch's experts can run while another batch is under way. Make a buffer for each of the two,
//! with a stream of its own, and interleave their halves: `dispatch_send` of A, `dispatch_send` of
//! B, `receive` of A, `combine_send` of A, `receive` of B, and so on. A [`Pending`] borrows its
//! buffer, so the compiler rejects a second operation in flight there. Give each buffer half of the
//! multiprocessors ([`Options::num_sms`]), so that the operations of both fit on the device. Launch
//! the operations in the same order on every rank ([`StreamOrder`](crate::StreamOrder) says why). A
//! [`Step`] has one of the buffers. Record both with
//! [`Stream::capture`](crate::driver::Stream::capture), whose launch is `unsafe`.
//!
//! # Whose memory
//! [`Options::sizes`] and [`Shape::most_rows_by_expert`] compute sizes without a buffer, sums and
//! tables included. Not in them is memory that a call takes: for rows by expert without
//! [`DispatchRequest::recv_x`], for columns that a kernel first copies together
//! ([`DispatchRequest::column`]), and for [`Buffer::first_tokens`].
//!
//! | | in memory of the buffer | in memory of the caller |
//! |---|---|---|
//! | received rows | the [`Place`]: peers write there, mapped once when the buffer was made; [`Place::recv_x_ptr`] never changes | [`Buffer::gather_by_expert`], a copy by this rank's kernel |
//! | rows for a combine | [`Received::combine_rows`]: peers read there, within a node | any tensor; this rank's kernel sends them |
//! | sums | the place ([`Combined`]) | [`Buffer::combine_into`]: this rank's kernel writes there, nothing is copied |
//!
//! A dispatch and its combine can be in separate functions: [`Received::detach`] drops the
//! lifetime, [`Detached::attach`] restores it for the combine.
//!
//! # Errors
//! If a rank has died, operations end at their deadlines, and a host read of their results returns
//! the error ([`Tensor::to_host`](crate::Tensor::to_host)). For results that only kernels read,
//! synchronise their stream and call [`Buffer::check`].
//!
//! # Several nodes
//! Across nodes ([`Options::ranks_per_node`]) the calls and their results are the same. A rank then
//! sends each other rank one message in a dispatch and one in a combine, over a transport or into
//! mapped memory. Received rows are copied from it to their places.
//!
//! # Example
//! ```
//! use std::time::Duration;
//!
//! use epoxide::driver::Stream;
//! use epoxide::driver::virt::{VirtConfig, VirtualGpu};
//! use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
//! use epoxide::group::run_threads;
//! use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Shape};
//! use epoxide::half::bf16;
//!
//! let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
//!     let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
//!     let stream = Stream::new(&device)?;
//!     // Up to 8 tokens of 64 elements from each rank, each for 2 of 4 experts: 0 and 1 are on rank 0, 2 and 3 on rank 1.
//!     let shape = Shape { max_tokens: 8, hidden: 64, num_topk: 2, num_experts: 4 };
//!     let mut buffer = Buffer::new(device, &*group, Options::new(shape))?;
//!     let mut place = buffer.place(0)?;
//!     let order = StreamOrder::on(&stream);
//!
//!     let x = Tensor::from_host(&stream, DType::Bf16, &[2, 64], &[bf16::from_f32(rank as f32 + 1.0); 128])?;
//!     let topk_idx = TypedTensor::from_host(&stream, &[2, 2], &[0i64, 3, 1, -1])?;
//!     let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &topk_idx), order)?;
//!     // The experts work on the rows of received.x here; these return them as they are.
//!     let rows = received.x.clone();
//!     let combined = buffer.combine(received, CombineRequest::by_row(&rows), order)?;
//!     combined.x.to_host::<bf16>(&stream)
//! })?;
//! // Token 0 went to both ranks and comes back as the sum of two rows, token 1 to one of them.
//! assert_eq!((sums[1][0].to_f32(), sums[1][64].to_f32()), (4.0, 2.0));
//! # Ok::<(), epoxide::group::RankFailure>(())
//! ```

pub use crate::ep::core::Step;
pub use crate::ep::low_latency::{
    Buffer, ByExpertPtrs, CombineRequest, Combined, Detached, DispatchRequest, Options, Pending, Place,
    Received, ReceivedByExpert, Shape,
};
pub use crate::ep::{ExpertRows, Quantise};
