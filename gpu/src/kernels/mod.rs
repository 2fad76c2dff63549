//! The kernels, one file per family, and the manifest that their PTX is checked against.
//!
//! Every operation between ranks has the same three steps, carried by two words per peer (`layout::Control`):
//! *ready* (I have entered operation `epoch`), *move*, *done* (I have done my part towards you). `epoch` module holds
//! them; the host crate's ARCHITECTURE page says why no two operations can meet in a region.

mod ceiling;
mod combine;
mod dispatch;
mod epoch;
mod layout;
mod notify;
mod ring;

#[cfg(not(target_arch = "nvptx64"))]
mod launch;
#[cfg(not(target_arch = "nvptx64"))]
pub use launch::*;

#[cfg(not(target_arch = "nvptx64"))]
pub use {
    ceiling::{CeilingPull, CeilingPush},
    combine::{CombineBf16, CombineF32, StageCombine},
    dispatch::Dispatch,
    layout::DispatchLayout,
    notify::Notify,
};

pub use combine::MAX_SLOT_BYTES;

/// Every kernel of the module, in the order of an operation.
#[cfg(not(target_arch = "nvptx64"))]
pub const MANIFEST: &[KernelInfo] = &[
    DispatchLayout::INFO,
    Notify::INFO,
    Dispatch::INFO,
    StageCombine::INFO,
    CombineBf16::INFO,
    CombineF32::INFO,
    CeilingPush::INFO,
    CeilingPull::INFO,
];
