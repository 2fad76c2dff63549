//! Calls that are refused, between calls that are not.

use std::sync::{Arc, Mutex};

use epoxide::group::ProcessGroup;
use epoxide::throughput::{DispatchLayout, DispatchRequest, Place};
use epoxide::{DType, Element, Error, Result, Tensor, TypedTensor};

use epoxide_testing::harness::{Rank, Setup, assert_names};
use epoxide_testing::lockstep;

use crate::spread::Spread;

pub const RANKS: u32 = 2;
pub const EXPERTS: u32 = 4;
pub const TOKENS: u64 = 5;

/// A rank with valid inputs for everything, of which the tests below replace one.
pub struct Valid {
    pub topk_idx: TypedTensor<'static, i64>,
    pub topk_weights: TypedTensor<'static, f32>,
    pub x: Tensor<'static>,
    pub layout: DispatchLayout<'static>,
}

impl Valid {
    pub fn new(rank: &mut Rank) -> Result<Valid> {
        let topk_idx = rank.upload_typed(2, &vec![vec![0i64, 3]; TOKENS as usize])?;
        let layout = rank.layout(&topk_idx, EXPERTS)?;
        Ok(Valid {
            topk_weights: rank.upload_typed(2, &vec![vec![1.0f32, 2.0]; TOKENS as usize])?,
            x: rank.upload_rows(DType::Bf16, 8, &vec![vec![1; 16]; TOKENS as usize])?,
            topk_idx,
            layout,
        })
    }

    pub fn request(&self) -> DispatchRequest<'_> {
        self.request_of(&self.x)
    }

    /// With other rows.
    pub fn request_of<'a>(&'a self, x: &'a Tensor<'a>) -> DispatchRequest<'a> {
        DispatchRequest::new(x, &self.layout).topk_weights(&self.topk_weights)
    }

    /// With another layout.
    pub fn request_along<'a>(&'a self, layout: &'a DispatchLayout<'a>) -> DispatchRequest<'a> {
        DispatchRequest::new(&self.x, layout).topk_weights(&self.topk_weights)
    }
}

/// One node of two ranks, or two nodes of one.
pub fn setup(spread: Spread) -> Setup {
    let num_channels = if spread == Spread::OneNode { 1 } else { 2 };
    Setup::new(RANKS, num_channels, TOKENS as u32, 64).nodes(spread.nodes(1))
}

/// Runs `bad` on both ranks, then a valid dispatch to the same place.
pub fn then_dispatch(setup: Setup, bad: impl Fn(&mut Rank, &Valid, &mut Place) -> Result<()> + Sync) {
    setup.run(|rank| {
        let valid = Valid::new(rank)?;
        let mut place = rank.place()?;
        bad(rank, &valid, &mut place)?;
        let output = rank.dispatch(&mut place, valid.request())?;
        rank.equal("rows after the bad calls", output.num_recv_tokens.as_slice(), &[RANKS * TOKENS as u32]);
        rank.stream.synchronize()
    });
}

pub fn tensor(rank: &Rank, dtype: DType, shape: &[u64]) -> Tensor<'static> {
    Tensor::alloc(rank.device(), dtype, shape).expect("memory for a tensor")
}

pub fn typed<T: Element>(rank: &Rank, shape: &[u64]) -> TypedTensor<'static, T> {
    tensor(rank, T::DTYPE, shape).typed().expect("a tensor of this type")
}

/// The bytes of a tensor in the pool, padding included, to be read after later dispatches.
pub fn bytes_in_pool(tensor: &Tensor<'_>) -> Tensor<'static> {
    let shape = [tensor.rows(), tensor.row_stride()];
    // SAFETY: the pool lives as long as the rank's buffer, and the callers read while no operation
    // runs.
    unsafe { Tensor::from_raw(tensor.ptr(), DType::Fp8E4m3, &shape) }
}

/// The errors of the ranks that fail to join, sorted.
pub fn errors_of(ranks: u32, join: impl Fn(Arc<dyn ProcessGroup>) -> Result<Rank> + Sync) -> Vec<String> {
    let errors = Mutex::new(Vec::new());
    let _ = lockstep::run(ranks, |group| {
        let joined = join(group);
        errors.lock().expect("no panic").extend(joined.as_ref().err().map(ToString::to_string));
        joined
    });
    let mut errors = errors.into_inner().expect("no panic");
    errors.sort();
    errors
}

/// Checks that the error names rank 1 as absent.
#[track_caller]
pub fn expect_gone<T>(outcome: Result<T>) {
    match outcome {
        Ok(_) => panic!("rank 1 has gone"),
        Err(error) => assert!(matches!(error, Error::PeerTimeout { peer: 1, .. }), "{error}"),
    }
}

/// The error of a call that must fail.
#[track_caller]
pub fn refused<T>(result: Result<T>, parts: &[&str]) {
    match result {
        Ok(_) => panic!("a call succeeded that should have named {parts:?}"),
        Err(error) => assert_names(&error, parts),
    }
}
