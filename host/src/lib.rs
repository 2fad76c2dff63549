//! epoxide: expert parallelism in Rust.
//!
//! Moves Mixture-of-Experts tokens between GPUs: **dispatch** sends each token to the ranks that
//! hold its experts, **combine** returns the experts' outputs and sums them. The kernels are
//! written in Rust and shipped as PTX. The same PTX runs on NVIDIA GPUs and on a virtual GPU, so
//! everything works, and is tested, without a GPU.
//!
//! Two modes have the same two operations. Each has a page:
//!
//! | | page | take it for |
//! |---|---|---|
//! | high throughput | [`throughput`] | prefill and training: more than 1,024 tokens a rank, gradients, cached routing; the host may wait for counts |
//! | low latency | [`low_latency`] | decoding, up to 1,024 tokens a rank; the host waits for no operation |
//!
//! The README has measured times of both, by the number of GPUs.
//!
//! # High throughput
//! Each rank has a device, a process group and a [`Buffer`](throughput::Buffer). Here two ranks are
//! threads; with [`group::rendezvous`] they are processes on one or several hosts, as in
//! `examples/ranks.rs`. Then each opens the GPU of its [`Member::local_rank`](group::Member). Copy
//! this into a `main.rs` and it runs.
//!
//! ```
//! use std::time::Duration;
//!
//! use epoxide::driver::Stream;
//! use epoxide::driver::virt::{VirtConfig, VirtualGpu};
//! use epoxide::group::run_threads;
//! use epoxide::half::bf16;
//! use epoxide::throughput::*;
//! use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
//!         // On GPUs, with the feature `cuda`: epoxide::driver::cuda::CudaDevice::open(rank)?
//!         let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
//!         let stream = Stream::new(&device)?;
//!         let order = StreamOrder::on(&stream);
//!         let shape = Shape { max_tokens: 2, hidden: 64, dtype: DType::Bf16, max_topk: 2, max_scales: 0 };
//!         let mut buffer = Buffer::new(device, &*group, Options::new(shape))?;
//!         let mut place = buffer.place(0)?;
//!
//!         // Two tokens per rank and four experts: 0 and 1 on rank 0, 2 and 3 on rank 1. -1 selects nothing.
//!         let x = Tensor::from_host(&stream, DType::Bf16, &[2, 64], &[bf16::from_f32(rank as f32 + 1.0); 128])?;
//!         let topk_idx = TypedTensor::from_host(&stream, &[2, 2], &[0i64, 3, 1, -1])?;
//!         let topk_weights = TypedTensor::from_host(&stream, &[2, 2], &[0.5f32, 0.5, 1.0, 0.0])?;
//!
//!         let layout = buffer.get_dispatch_layout(&topk_idx, 4, order)?;
//!         let request = DispatchRequest::new(&x, &layout).topk_weights(&topk_weights);
//!         let received = buffer.dispatch(&mut place, request, order)?;
//!
//!         // The experts work on received.recv_x here; these return it as it is. Combine weighs nothing:
//!         // experts multiply by received.recv_topk_weights.
//!         let combined = buffer.combine(CombineRequest::new(&received.recv_x, &received.handle), order)?;
//!         combined.combined_x.to_host::<bf16>(&stream)
//!     })?;
//!     // Token 0 went to both ranks and comes back as the sum of two rows, token 1 to one of them.
//!     assert_eq!((sums[1][0].to_f32(), sums[1][64].to_f32()), (4.0, 2.0));
//!     Ok(())
//! }
//! ```
//!
//! # Low latency
//! The same two tokens and four experts, with a [`low_latency::Buffer`].
//!
//! ```
//! use std::time::Duration;
//!
//! use epoxide::driver::Stream;
//! use epoxide::driver::virt::{VirtConfig, VirtualGpu};
//! use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
//! use epoxide::group::run_threads;
//! use epoxide::half::bf16;
//! use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Shape};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
//!         let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
//!         let stream = Stream::new(&device)?;
//!         let order = StreamOrder::on(&stream);
//!         // Up to 8 tokens of 64 elements from each rank, 2 of 4 experts for each.
//!         let shape = Shape { max_tokens: 8, hidden: 64, num_topk: 2, num_experts: 4 };
//!         let mut buffer = Buffer::new(device, &*group, Options::new(shape))?;
//!         let mut place = buffer.place(0)?;
//!
//!         let x = Tensor::from_host(&stream, DType::Bf16, &[2, 64], &[bf16::from_f32(rank as f32 + 1.0); 128])?;
//!         let topk_idx = TypedTensor::from_host(&stream, &[2, 2], &[0i64, 3, 1, -1])?;
//!         let topk_weights = TypedTensor::from_host(&stream, &[2, 2], &[0.5f32, 0.5, 1.0, 0.0])?;
//!         let request = DispatchRequest::new(&x, &topk_idx).topk_weights(&topk_weights);
//!         let received = buffer.dispatch(&mut place, request, order)?;
//!
//!         // The experts work on the rows of received.x here; these return them as they are, by row.
//!         let rows = received.x.clone();
//!         let combined = buffer.combine(received, CombineRequest::by_row(&rows), order)?;
//!         combined.x.to_host::<bf16>(&stream)
//!     })?;
//!     // Token 0 went to both ranks and comes back as the sum of two rows, token 1 to one of them.
//!     assert_eq!((sums[1][0].to_f32(), sums[1][64].to_f32()), (4.0, 2.0));
//!     Ok(())
//! }
//! ```
//!
//! # Where to go from here
//!
//! | you want | look at |
//! |---|---|
//! | ranks that are processes, started by `epoxide launch`, torchrun, mpirun or srun | [`group::rendezvous`] |
//! | to know which experts a received row is for | [`Received`](throughput::Received): `recv_topk_idx` has the ids of this rank's experts, -1 for others. A token comes once, however many of them it selects: add their weighted results before the combine, which sums the ranks' rows without weights |
//! | to work on the received rows with kernels of your own or of a framework | [`Tensor::ptr`](Tensor::ptr), [`Stream::adopt`](driver::Stream::adopt), the crate `epoxide::gpu` |
//! | a tensor in memory of another owner | [`Tensor::from_raw`](Tensor::from_raw) |
//! | outputs in memory of your own, its size before there is a buffer | [`throughput`](throughput#whose-memory), [`low_latency`](low_latency#whose-memory) |
//! | a group by the 128 bytes of a unique id, as with NCCL | [`group::UniqueId`] |
//! | the host never to wait, and CUDA graphs | [`Counts::OnDevice`](throughput::Counts), [`Buffer::capture`](throughput::Buffer::capture) |
//! | experts that write where combine reads | [`Received::combine_rows`](throughput::Received::combine_rows) |
//! | communication beside computation | [`StreamOrder::comm`](StreamOrder::comm) |
//! | several nodes | [`Options::ranks_per_node`](throughput::Options::ranks_per_node), [`TransportOptions`](transport::TransportOptions) |
//! | to know whether enqueued work succeeded | [`Tensor::to_host`](Tensor::to_host) of a result gives the operation's error instead of numbers, and so does the event of an asynchronous call; [`Buffer::check`](throughput::Buffer::check), once the stream has been synchronised, for results that only kernels read, whose sums are NaN then. Later calls give it too, but not where the plan of a dispatch with [`Counts::OnDevice`](throughput::Counts) failed: only that dispatch ends |
//! | gradients | [`Training`](throughput#training) |
//! | the same routing again, for another tensor | [`Buffer::dispatch_cached`](throughput::Buffer::dispatch_cached) |
//!
//! # Results of the operations
//! `tokens` are this rank's, `received` its received rows; `rows` stands for `num_ranks *
//! max_tokens`.
//!
//! | | high throughput: [`Received`](throughput::Received), [`Combined`](throughput::Combined) | low latency: [`Received`](low_latency::Received), [`Combined`](low_latency::Combined) |
//! |---|---|---|
//! | rows | `recv_x` `[received, hidden]`, by source rank, then by token, without gaps | `x` `[rows, hidden]`: token t of rank s is row `s * max_tokens + t`; other rows hold anything |
//! | how often a token comes | once to each rank that has an expert of it, with `by_expert` once for each selection | the same; with `by_expert` also once for each selection |
//! | f32 scales of fp8 rows | `recv_x_scales` f32 `[received, num_scales]` | `scales` f32 `[hidden / 128 rounded up, rows]` |
//! | columns of bytes that travel with rows ([`Payload`]) | `recv_columns`, each `[received, n]` | `columns`, each as words i32 `[bytes / 4 rounded up, rows]` |
//! | its experts here | `recv_topk_idx` i64 `[received, num_topk]`: local ids, -1 for those of other ranks | `expert_rows` i32 `[local_experts, rows]`: the rows of each expert |
//! | its weights | `recv_topk_weights` f32 `[received, num_topk]`, 0 beside -1 | stay on the device, for the combine |
//! | rows by expert | `recv_x` itself; `handle.by_expert()` has the segments | `by_expert`: rows, their tables and the segments |
//! | counts of experts | `num_recv_tokens_per_expert`: *selections*, so that a token which names an expert twice counts twice; each count is rounded up to `expert_alignment`, without additional rows | `expert_counts` i32 `[local_experts]`: *rows*, so that such a token counts once |
//! | tokens of rows | `recv_src_idx` i32 `[received]` | `src_info` i32 `[local_experts, rows]` |
//! | weights in combine | none: give it rows that are weighted and summed over this rank's experts | `by_expert`: each expert's row times the weight of each entry that names it, or `unweighted`; `by_row` and `in_pool`: none, as in the other mode |
//! | sums | `combined_x` `[tokens, hidden]`, bf16, f16 or f32, in FP32 in rank order, 0 for a token that went nowhere | `x` `[tokens, hidden]`, of [`Options::combine_dtype`](low_latency::Options::combine_dtype), the same way |
//! | valid until | rows: the next dispatch to their [`Place`](throughput::Place); handle and sums: dropped | rows: their combine; sums: the next dispatch to their [`Place`](low_latency::Place) |
//!
//! # Lifetime of memory
//! Inputs, outputs, layouts, handles and events may be dropped as soon as the call that took them
//! has returned. The work is then only enqueued. Their memory is reused behind everything enqueued
//! on the device's [`Stream`](driver::Stream)s by then, adopted ones included. Work on other
//! streams is not waited for, and memory given to [`Tensor::from_raw`](Tensor::from_raw) is the
//! caller's to keep. Only a [`Place`](throughput::Place) is overwritten while it is held, by the
//! next dispatch there, and the compiler rejects that while its rows are in use.
//!
//! # Features
//!
//! | feature | |
//! |---|---|
//! | none | the virtual GPU; no system library |
//! | `cuda` | NVIDIA GPUs: `driver::cuda`. Starts without a driver, and builds without a CUDA toolkit once `CUDA_LIBRARY_PATH` is set as below |
//! | `rdma` | the transport over ibverbs ([`TransportKind::Verbs`](transport::TransportKind)). Starts where `libibverbs.so.1` is. Building takes cmake, a C compiler, libclang and libibverbs, with their headers, as below |
//!
//! Without a CUDA toolkit the feature `cuda` builds with these lines, in the folder of your crate.
//! They make a `libcuda.so` for the linker that only names the C library; the driver is found when
//! the program runs.
//!
//! ```sh
//! mkdir -p cuda/lib64 && echo 'INPUT(-lc)' > cuda/lib64/libcuda.so
//! CUDA_LIBRARY_PATH=$PWD/cuda cargo build
//! ```
//!
//! The build script of the feature `rdma` runs cmake on the rdma-core that `ibverbs-sys` carries,
//! and makes bindings from its headers with libclang. On Debian `apt-get install cmake pkg-config
//! clang libclang-dev libibverbs-dev libnl-3-dev libnl-route-3-dev python3` is enough. cmake also
//! compiles all of rdma-core, unless `CMAKE` names a script that leaves `cmake --build` out.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod bounded;
pub mod driver;
mod ep;
#[doc(hidden)]
pub mod internal;
pub mod low_latency;
pub mod throughput;
pub mod transport;

use epoxide_base::{error, foreign, lock, virtual_time};

pub use ep::{
    DType, Element, ExpertId, ExpertMap, Payload, Placement, Sizes, StreamOrder, Tensor, TypedTensor,
};
#[doc(inline)]
pub use epoxide_base::{Error, Result, Scope};

/// The device side: kernels and how they are launched, the structs that they share with the host.
pub use epoxide_gpu as gpu;
/// Process groups: how ranks find each other and agree before they share memory.
#[doc(inline)]
pub use epoxide_group as group;
/// The crate whose [`bf16`](half::bf16) tensors hold.
pub use half;
