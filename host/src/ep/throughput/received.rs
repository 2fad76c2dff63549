//! The result of a dispatch.

use std::sync::Arc;

use super::DispatchHandle;
use super::place::{Place, PoolRows, Room};
use crate::driver::Event;
use crate::ep::core::Lease;
use crate::ep::payload::Record;
use crate::ep::tensor::Owner;
use crate::ep::{DType, Element, Tensor, TypedTensor};
use crate::error::Result;

/// The result of a dispatch. The tensors are in the dispatch's place and keep its borrow.
///
/// Rows are always grouped by source rank, ascending, and inside a source sorted by token index.
///
/// [`DispatchRequest::by_expert`](super::DispatchRequest::by_expert) delivers one row for each
/// selection, grouped by local expert, and an expert's rows in that order. Padding counts in
/// `num_recv_tokens`; only its `recv_src_idx` is defined.
#[derive(Debug)]
#[non_exhaustive]
pub struct Received<'p> {
    /// `[num_recv_tokens, hidden]`, dtype of x, or e4m3 of rows that are quantised on their way.
    /// Rows are `row_stride()` bytes apart, a multiple of 128.
    pub recv_x: Tensor<'p>,
    /// Scales of the rows, laid out as the scales of x, with `num_recv_tokens` rows; those that
    /// [`Quantise`](crate::throughput::Quantise) makes `[num_recv_tokens, hidden / 128]`.
    pub recv_x_scales: Option<TypedTensor<'p, f32>>,
    /// The columns of the rows, in the order of the request and with its types, each
    /// `[num_recv_tokens, n]` (or `[num_recv_tokens]`); rows that the dispatch converts to MXFP8
    /// have one, UE8M0 `[num_recv_tokens, hidden / 32]`. The columns of a row are adjacent: each
    /// begins at a multiple of 4 bytes, and its rows are `row_stride()` bytes apart, the same for
    /// all of them. [`Buffer::transpose_column`](super::Buffer::transpose_column) copies one with
    /// the rows side by side.
    pub recv_columns: Vec<Tensor<'p>>,
    /// `[num_recv_tokens, num_topk]`: local expert ids, or -1 where the expert is not on this rank.
    /// `None` where top-k was not sent, and of rows by expert.
    pub recv_topk_idx: Option<TypedTensor<'p, i64>>,
    /// `[num_recv_tokens, num_topk]`: 0 where `recv_topk_idx` is -1. For rows by expert
    /// `[num_recv_tokens]`, the weight of the selection.
    pub recv_topk_weights: Option<TypedTensor<'p, f32>>,
    /// `[num_recv_tokens]`: the token's index on its source rank; of rows by expert, -1 in padding.
    /// `None` in a cached dispatch.
    pub recv_src_idx: Option<TypedTensor<'p, i32>>,
    /// `[num_recv_tokens, 2]`: the source node, and a word whose bit j is set if rank j of this
    /// node gets the token too. `None` in a cached dispatch and within one node.
    pub recv_src_meta: Option<TypedTensor<'p, i32>>,
    /// `[num_recv_tokens, 2]`, of rows by expert: the source rank, and which of the token's entries
    /// selected the expert. `None` in a cached dispatch.
    pub recv_src_entry: Option<TypedTensor<'p, i32>>,
    /// Rows received; `None` where the host did not wait for the counts.
    pub num_recv_tokens: Option<u32>,
    /// Selections of each local expert, each rounded up to the alignment; empty where the host did
    /// not wait, or cached.
    pub num_recv_tokens_per_expert: Vec<u32>,
    /// The routing, for combine and cached dispatches.
    pub handle: DispatchHandle,
    /// Where an asynchronous call ends.
    pub event: Option<Event>,
    /// The layout of a row's columns.
    pub(super) record: Record,
    pub(super) lease: Arc<Lease<Room>>,
}

impl<'p> Received<'p> {
    /// Rows `[num_recv_tokens, hidden]` of the place that peers gather from. If experts write their
    /// output here, combine need not copy it.
    ///
    /// # Errors
    /// [`Error::Capacity`](crate::Error::Capacity) where a row is larger than the pool was made
    /// for, [`Error::Argument`](crate::Error::Argument) where they are in use already.
    pub fn combine_rows(&self, dtype: DType, hidden: u64) -> Result<PoolRows<'p>> {
        self.lease.place().combine_rows(self.lease.clone() as Owner, dtype, self.recv_x.rows(), hidden)
    }

    /// Replaces the borrow of the place by a check at run time that the rows are still valid. For
    /// callers that cannot carry lifetimes.
    pub fn detach(self) -> Detached {
        self.lease.detach();
        fn free<T: Element>(tensor: Option<TypedTensor<'_, T>>) -> Option<TypedTensor<'static, T>> {
            tensor.map(TypedTensor::into_static)
        }
        Detached(Received {
            recv_x: self.recv_x.into_static(),
            recv_x_scales: free(self.recv_x_scales),
            recv_columns: self.recv_columns.into_iter().map(Tensor::into_static).collect(),
            recv_topk_idx: free(self.recv_topk_idx),
            recv_topk_weights: free(self.recv_topk_weights),
            recv_src_idx: free(self.recv_src_idx),
            recv_src_meta: free(self.recv_src_meta),
            recv_src_entry: free(self.recv_src_entry),
            num_recv_tokens: self.num_recv_tokens,
            num_recv_tokens_per_expert: self.num_recv_tokens_per_expert,
            handle: self.handle,
            event: self.event,
            record: self.record,
            lease: self.lease,
        })
    }
}

/// The result of a dispatch, without a borrow of its place. A later dispatch there overwrites the
/// rows, behind all work enqueued by then.
#[derive(Debug)]
pub struct Detached(Received<'static>);

impl Detached {
    /// The rows, for as long as `place` is borrowed. A step that was captured with the place
    /// overwrites them when it runs, also in that time: launch it behind their last use.
    ///
    /// # Errors
    /// [`Error::StaleHandle`](crate::Error::StaleHandle) where a later dispatch has overwritten
    /// them, [`Error::Argument`](crate::Error::Argument) where they are in another place.
    pub fn at<'p>(&'p self, place: &'p Place) -> Result<&'p Received<'p>> {
        self.0.lease.check_in(place.0.place()).map(|()| &self.0)
    }

    /// The routing, which nothing overwrites.
    pub fn handle(&self) -> &DispatchHandle {
        &self.0.handle
    }
}
