//! cudarc's slices and streams in and out of epoxide, without copies.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Shape};
//! use epoxide::StreamOrder;
//! use epoxide_cudarc::LentStream;
//!
//! # fn layer(group: &dyn epoxide::group::ProcessGroup) -> Result<(), Box<dyn std::error::Error>> {
//! let context = CudaContext::new(0)?;
//! let stream = context.new_stream()?;
//! // Once: the device, the stream and the buffer.
//! let lent = LentStream::new(&stream)?;
//! let shape = Shape { max_tokens: 128, hidden: 7168, num_topk: 8, num_experts: 256 };
//! let mut buffer = Buffer::new(lent.device().clone(), group, Options::new(shape))?;
//! let mut place = buffer.place(0)?;
//!
//! // bf16 as its bits; with cudarc's feature `f16` half::bf16 will do.
//! let x = stream.alloc_zeros::<u16>(16 * 7168)?;
//! let topk_idx = stream.alloc_zeros::<i32>(16 * 8)?;
//! let mut out = stream.alloc_zeros::<u16>(16 * 7168)?;
//!
//! // Each layer: slices become tensors for as long as the calls are enqueued.
//! let order = StreamOrder::on(&lent);
//! // SAFETY: no call here is recorded in a graph.
//! let (x, ids) = unsafe { (lent.input(&x, &[16, 7168])?, lent.input(&topk_idx, &[16, 8])?) };
//! let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &ids), order)?;
//! drop((x, ids));
//! let rows = received.x.clone();
//! // SAFETY: as above.
//! let sums = unsafe { lent.output(&mut out, &[16, 7168])? };
//! buffer.combine_into(received, CombineRequest::by_row(&rows), &sums, order)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Ownership
//!
//! | | owner | freed |
//! |---|---|---|
//! | [`LentStream`] | cudarc; it holds an `Arc<CudaStream>` | by cudarc, after the last `Arc` |
//! | [`LentStream::input`], [`LentStream::output`] | the slice, which the result borrows | by cudarc, behind the stream's work at the time the result was dropped |
//! | [`LentStream::slice`] | epoxide, whose tensor the result borrows | by epoxide, behind the stream's work |
//! | the context | both: cudarc and epoxide retain the primary context of the device | with the last of them |
//!
//! # Order
//! cudarc orders streams by two events of each slice. [`LentStream::input`] makes the stream wait
//! for the last write of the slice, [`LentStream::output`] for all its uses. Dropping the result,
//! the *guard*, records the use. Drop it once the call is enqueued; an
//! [`asynchronous`](epoxide::StreamOrder::asynchronous) call is enqueued on the stream once that
//! waits for the call's event.
//!
//! # Graphs
//! While the stream is captured, guards wait for nothing and record nothing: waits cannot cross the
//! border of a recording, in either direction. The caller orders the memory before the capture and
//! behind each replay, as with any captured kernel.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod lend;
mod stream;

pub use lend::{Lent, LentSlice};
pub use stream::LentStream;
