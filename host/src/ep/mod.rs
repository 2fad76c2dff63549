//! Expert parallelism: the [`Buffer`] and its operations.
//!
//! ```text
//! topk_idx --get_dispatch_layout--> DispatchLayout --dispatch--> DispatchOutput { recv_x, .., handle }
//!                                                                     | experts run
//!                                                                     v
//!                                              CombineOutput <--combine(rows, handle)
//! ```
//!
//! Operations are collective unless they say that they are local: each rank of the group makes the same calls in the same order. Work is
//! enqueued on a stream ([`StreamOrder`]); only an exact-size dispatch makes the host wait, for the counts.

mod beside;
mod buffer;
mod by_node;
mod captured;
pub(crate) mod ceiling;
mod combine;
mod config;
mod dispatch;
mod enqueue;
mod experts;
mod fault;
mod handle;
mod kernels;
mod layout;
pub(crate) mod low_latency;
mod observed;
mod options;
mod order;
mod peers;
mod place;
mod pool;
mod received;
mod scratch;
mod sequence;
mod step;
mod tensor;
pub(crate) mod topology;
pub(crate) mod trace;
pub(crate) mod tuning;
mod wire;

pub use buffer::Buffer;
pub use by_node::NodeCounts;
pub use combine::{CombineOutput, CombineRequest, CombineRows};
pub use config::{Config, low_latency_rdma_size_hint};
pub use dispatch::{CachedDispatchRequest, Counts, DispatchRequest};
pub use experts::{ExpertId, ExpertMap, Placement};
pub use handle::{DispatchHandle, ExpertRows, InternodeHandle, IntranodeHandle};
pub use layout::DispatchLayout;
pub use options::{BufferOptions, BufferShape};
pub use order::StreamOrder;
pub use place::{Place, PoolRows};
pub use received::{Detached, DispatchOutput};
pub use step::Step;
pub use tensor::{DType, Element, Tensor, TypedTensor};
use topology::Topology;
