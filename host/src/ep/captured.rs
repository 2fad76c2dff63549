//! What a capture keeps.

use std::sync::Arc;

use super::handle::DispatchHandle;
use super::place::Lease;
use super::tensor::Owner;

/// What is known of a step while it is captured.
#[derive(Debug, Default)]
pub(super) struct Captured {
    /// What its kernels use.
    pub kept: Vec<Owner>,
    /// The places that it overwrites.
    pub leases: Vec<Arc<Lease>>,
    /// The dispatches in it.
    pub handles: Vec<DispatchHandle>,
}
