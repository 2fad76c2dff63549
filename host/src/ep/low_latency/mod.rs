//! Low latency: dispatch and combine for decode-sized batches, where waiting is what takes time.
//!
//! ```text
//! x, topk_idx, weights --dispatch--> Received { x, expert_rows, expert_counts, .. }
//!                                        | experts run: rows of expert e are expert_rows[e][..expert_counts[e]]
//!                                        v
//!                       Combined <--combine(received, rows)
//! ```
//!
//! A token's row travels once to each rank that has one of its experts, and lands at `source * max_tokens + token`, where it stays: nothing
//! is counted first, nothing copied behind. Each rank says which of the rows each of its experts has. Combine sums what the experts of a rank
//! made of a token there, weighted, and returns one row for each rank.
//!
//! Either is one kernel, or two halves between which it holds no multiprocessor ([`Buffer::dispatch_send`], [`Pending::receive`]).
//!
//! Nothing is allocated by these calls and the host waits for nothing, so that all of them can be captured in a graph. Within one node; every
//! rank makes the same calls in the same order.

mod buffer;
mod combine;
mod dispatch;
mod fault;
mod halves;
mod layout;
mod options;
mod place;

pub use buffer::Buffer;
pub use combine::{Combined, ExpertRows};
pub use dispatch::{DispatchRequest, Quantise, Received};
pub use halves::Pending;
pub use options::Options;
pub use place::Place;
