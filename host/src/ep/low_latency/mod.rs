//! Low latency, as [`crate::low_latency`] has it for users.

mod buffer;
mod combine;
mod dispatch;
mod fault;
mod gather;
mod halves;
mod internode;
mod layout;
mod options;
mod place;
mod quantise;
mod regroup;
mod results;
mod step;

pub use buffer::Buffer;
pub use combine::CombineRequest;
pub use dispatch::DispatchRequest;
pub use halves::Pending;
pub use options::Options;
pub use place::Place;
pub use quantise::Quantise;
pub use results::{Combined, Detached, Received};
