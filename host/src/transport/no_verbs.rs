//! Replaces `verbs` in builds without it: returns an error on every rank.

use std::sync::Arc;

use super::greeting;
use super::links::Links;
use super::options::TransportOptions;
use super::setup::Setup;
use crate::driver::{Device, Memory};
use crate::error::{Error, Result};

pub(super) fn connect(setup: &Setup<'_>) -> Result<Links> {
    greeting::meet(setup, greeting::check_arguments(setup).and_then(|()| Err(unavailable())))?;
    Err(unavailable())
}

pub(super) fn wire_memory(_options: &TransportOptions, _device: &Device, _bytes: u64) -> Result<Arc<Memory>> {
    Err(unavailable())
}

fn unavailable() -> Error {
    Error::Unavailable {
        what: "the verbs transport".into(),
        reason: "this program was built without it; build with `cargo build --release --features rdma` \
                 (`tests/rdma/setup.sh` installs what that takes)"
            .into(),
    }
}
