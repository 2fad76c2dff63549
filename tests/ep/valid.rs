//! Calls that are refused, between calls that are not.

use epoxide::Result;
use epoxide::ep::{DType, DispatchLayout, DispatchRequest, Tensor};

use epoxide_testing::harness::{Rank, Setup, assert_names};

pub const RANKS: u32 = 2;
pub const EXPERTS: u32 = 4;
pub const TOKENS: u64 = 5;

/// A rank with valid inputs for everything, of which the tests below replace one.
pub struct Valid {
    pub topk_idx: Tensor,
    pub topk_weights: Tensor,
    pub x: Tensor,
    pub layout: DispatchLayout,
}

impl Valid {
    pub fn new(rank: &mut Rank) -> Result<Valid> {
        let topk_idx = rank.upload(DType::I64, 2, &vec![vec![0i64, 3]; TOKENS as usize])?;
        let layout = rank.layout(&topk_idx, EXPERTS)?;
        Ok(Valid {
            topk_weights: rank.upload(DType::F32, 2, &vec![vec![1.0f32, 2.0]; TOKENS as usize])?,
            x: rank.upload_rows(DType::Bf16, 8, &vec![vec![1; 16]; TOKENS as usize])?,
            topk_idx,
            layout,
        })
    }

    pub fn request(&self) -> DispatchRequest<'_> {
        DispatchRequest {
            topk_idx: Some(&self.topk_idx),
            topk_weights: Some(&self.topk_weights),
            ..DispatchRequest::new(&self.x, &self.layout)
        }
    }
}

/// Runs `bad` on both ranks, then a valid dispatch. `bad` waits for the stream where kernels use tensors of its own.
pub fn then_dispatch(setup: Setup, bad: impl Fn(&mut Rank, &Valid) -> Result<()> + Sync) {
    setup.run(|rank| {
        let valid = Valid::new(rank)?;
        bad(rank, &valid)?;
        let output = rank.dispatch(valid.request())?;
        rank.equal("rows after the bad calls", output.num_recv_tokens.as_slice(), &[RANKS * TOKENS as u32]);
        rank.stream.synchronize()
    });
}

pub fn tensor(rank: &Rank, dtype: DType, shape: &[u64]) -> Tensor {
    Tensor::alloc(rank.device(), dtype, shape).expect("memory for a tensor")
}

/// The error of a call that must fail.
#[track_caller]
pub fn refused<T>(result: Result<T>, parts: &[&str]) {
    match result {
        Ok(_) => panic!("a call succeeded that should have named {parts:?}"),
        Err(error) => assert_names(&error, parts),
    }
}
