//! In a program without the feature `nccl` there is no NCCL, and nothing of it to call.

use std::convert::Infallible;
use std::sync::Arc;

use epoxide::driver::{Device, Stream};
use epoxide::group::ProcessGroup;
use epoxide::{Error, Result};
use epoxide_testing::harness::Rank;
use epoxide_testing::roundtrip::Case;

use super::exchange::Exchange;

fn missing() -> Error {
    let reason = "this program was built without it; build with --features nccl".into();
    Error::Unavailable { what: "NCCL".into(), reason }
}

/// None.
pub(crate) struct Nccl(Infallible);

impl Nccl {
    pub fn check() -> Result<()> {
        Err(missing())
    }

    pub fn join(_: &Arc<dyn Device>, _: &Arc<dyn ProcessGroup>) -> Result<Nccl> {
        Err(missing())
    }

    pub fn all_to_all(&self, _: &Case, _: &Rank) -> Result<NoExchange> {
        match self.0 {}
    }

    pub fn all_gather(&self, _: &Case, _: &Rank) -> Result<NoExchange> {
        match self.0 {}
    }

    pub fn finalize(&self) -> Result<()> {
        match self.0 {}
    }
}

/// None.
pub(crate) struct NoExchange(Infallible);

impl Exchange for NoExchange {
    fn dispatch(&self, _: &Stream) -> Result<()> {
        match self.0 {}
    }

    fn combine(&self, _: &Stream) -> Result<()> {
        match self.0 {}
    }

    fn in_pairs(&self) -> bool {
        match self.0 {}
    }

    fn check(&self) -> Result<()> {
        match self.0 {}
    }

    fn link_bytes(&self) -> (u64, u64) {
        match self.0 {}
    }
}
