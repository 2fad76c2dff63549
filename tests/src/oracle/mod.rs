//! Expected results of layout, dispatch and combine, from the routing of all ranks.
//!
//! Written from the definitions, not from the kernels: slow, serial, and with one line per rule.
//! Quantities are nested `Vec`s in the shapes of the interface; rows are in the order of `recv_x`.
//! [`plan`] covers one node, and the quantities that several nodes share with it;
//! [`InternodeOracle`] the rest.

mod by_expert;
mod internode;
mod intranode;
mod low_latency;
mod mxfp8;
mod routing;

pub use by_expert::{ExpertPlan, by_expert, combine_by_expert};
pub use internode::{InternodeOracle, InternodePlan};
pub use intranode::{
    Layout, Plan, channel_tokens, combine_f32, combined_weights, layout, plan, recv_order, recv_rows,
    recv_topk_weights,
};
pub use low_latency::{
    LowLatencyPlan, Travel, from_e4m3, low_latency_plan, low_latency_share, low_latency_sum, quantised,
};
pub use mxfp8::{MX_BLOCK, mxfp8, ue8m0};
pub use routing::{Routing, Style};
