//! Places for received rows and for the rows of a combine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use epoxide_gpu::layout::{DevicePtr, PoolLayout, row_stride};

use crate::driver::{Device, Stream};
use crate::ep::core::{Arena, Held, Overwrites, PlaceState};
use crate::ep::tensor::{Element, Owner, Owns};
use crate::ep::{DType, Tensor, TypedTensor};
use crate::error::{Error, Result, Scope};

/// Room in the pool for the rows of one dispatch, and for the rows of its combine. A buffer has
/// [`Options::places`](super::Options::places) of them, and each is taken once, by
/// [`Buffer::place`](super::Buffer::place).
///
/// A dispatch borrows its place mutably, and its results keep that borrow. A second dispatch there
/// does not compile while the first one's rows are in use. All ranks give a dispatch the place of
/// the same index.
#[derive(Debug)]
pub struct Place(pub(super) Held<Room>);

impl Place {
    /// Its index in the buffer.
    pub fn index(&self) -> u32 {
        self.0.place().index()
    }

    /// Address of the first received row. It is the same for each dispatch to this place, so a
    /// kernel may keep it. Rows are `row_stride()` bytes of [`recv_x`](super::Received::recv_x)
    /// apart. Read them between the end of a dispatch and the start of the next one here.
    pub fn recv_x_ptr(&self) -> DevicePtr {
        self.0.place().at(self.0.place().room().layout.recv_x)
    }

    /// Address of the first weight of [`recv_topk_weights`](super::Received::recv_topk_weights),
    /// the same for each dispatch to this place.
    pub fn recv_topk_weights_ptr(&self) -> DevicePtr {
        self.0.place().at(self.0.place().room().layout.recv_topk_weights)
    }

    /// Address of the first row that peers gather from, the same for each combine from this place;
    /// [`Place::combine_rows`] has the rows.
    pub fn combine_rows_ptr(&self) -> DevicePtr {
        self.0.place().at(self.0.place().room().layout.combine_x)
    }

    /// Rows here that peers gather from, for a combine without a dispatch before it, such as that
    /// of a backward pass; see [`Received::combine_rows`](super::Received::combine_rows).
    ///
    /// # Errors
    /// [`Error::Capacity`] where `rows` or the row is larger than the pool was made for,
    /// [`Error::Argument`] where they are in use already.
    pub fn combine_rows(&self, dtype: DType, rows: u64, hidden: u64) -> Result<PoolRows<'_>> {
        self.0.place().combine_rows(self.0.place().pool(), dtype, rows, hidden)
    }
}

/// Rows of a dispatch, and those of its combine.
#[derive(Debug)]
pub struct Room {
    /// The pool's layout with the rows of this place.
    pub layout: PoolLayout,
    pub max_row_bytes: u64,
    /// The combine rows are in use.
    pub rows_given: AtomicBool,
    /// Streams may still use combine rows that were given out.
    pub rows_used: AtomicBool,
}

impl PlaceState<Room> {
    /// An error where a combine would stage its rows over those that the caller is writing.
    pub fn check_rows_free(&self) -> Result<()> {
        if self.room().rows_given.load(Ordering::Acquire) {
            let rule = "its combine rows are given out (PoolRows): combine those, or drop them first";
            return Err(Error::argument("place", self.index(), rule));
        }
        Ok(())
    }

    /// Rows of this place as a tensor.
    pub fn rows<'p>(&self, owner: Owner, offset: u64, dtype: DType, rows: u64, hidden: u64) -> Tensor<'p> {
        let rows = Tensor::in_memory(self.at(offset), dtype, &[rows, hidden], owner);
        rows.with_row_stride(row_stride(hidden * dtype.size()))
    }

    /// A contiguous tensor in this place.
    pub fn tensor<'p, T: Element>(&self, owner: Owner, offset: u64, shape: &[u64]) -> TypedTensor<'p, T> {
        TypedTensor::in_memory(self.at(offset), shape, owner)
    }

    pub fn combine_rows<'p>(
        self: &Arc<Self>,
        owner: Owner,
        dtype: DType,
        rows: u64,
        hidden: u64,
    ) -> Result<PoolRows<'p>> {
        let row_bytes = hidden.saturating_mul(dtype.size());
        if row_bytes > self.room().max_row_bytes {
            let remedy = format!("create the buffer with hidden * dtype.size() >= {row_bytes}");
            let (what, have) = (("hidden", "bytes"), self.room().max_row_bytes);
            return Err(Error::capacity(what, row_bytes, have, remedy, Scope::ThisRank));
        }
        if rows > self.room().layout.rows {
            let remedy = "ask for as many as the dispatch received";
            let (what, have) = (("combine rows", "rows"), self.room().layout.rows);
            return Err(Error::capacity(what, rows, have, remedy, Scope::ThisRank));
        }
        if self.room().rows_given.swap(true, Ordering::AcqRel) {
            let rule = "its combine rows are given out already: drop those first";
            return Err(Error::argument("place", self.index(), rule));
        }
        let lease = Arc::new(RowsLease { owner, place: self.clone() });
        let rows = self.rows(lease, self.room().layout.combine_x, dtype, rows, hidden).named("rows");
        Ok(PoolRows { rows, place: self.clone() })
    }

    /// Makes `stream` wait for all work that may use combine rows that were given out.
    pub fn order_behind_rows(&self, stream: &Stream) -> Result<()> {
        let used = &self.room().rows_used;
        if !used.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        self.order_behind_all(stream).inspect_err(|_| used.store(true, Ordering::Release))
    }
}

/// The right to the combine rows of a place, shared by the tensors of them.
#[derive(Debug)]
struct RowsLease {
    /// Keeps the memory.
    owner: Owner,
    place: Arc<PlaceState<Room>>,
}

impl Owns for RowsLease {
    fn device(&self) -> &Device {
        self.owner.device()
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        self.owner.arena()
    }

    fn memory(&self) -> Option<Owner> {
        Some(self.owner.clone())
    }
}

impl Drop for RowsLease {
    fn drop(&mut self) {
        self.place.room().rows_used.store(true, Ordering::Release);
        self.place.room().rows_given.store(false, Ordering::Release);
    }
}

/// The combine rows of a place, over which a step copies others.
impl Overwrites for PlaceState<Room> {
    fn check_free(&self) -> Result<()> {
        self.check_rows_free()
    }

    fn begin_again(self: Arc<Self>, stream: &Stream) -> Result<()> {
        self.order_behind_rows(stream)
    }
}

/// Rows `[rows, hidden]` of a place that peers gather from. If experts write their output here,
/// combine need not copy it ([`CombineRows::InPool`](super::CombineRows::InPool)). Rows are
/// `row_stride()` bytes apart.
///
/// The caller may write them from the end of one combine to the start of the next. Peers may still
/// gather those of a combine that has failed. They are given out until this and all clones of its
/// tensor are dropped. A combine of a tensor then copies its rows here, behind all work enqueued so
/// far.
#[derive(Debug)]
pub struct PoolRows<'p> {
    rows: Tensor<'p>,
    pub(super) place: Arc<PlaceState<Room>>,
}

impl<'p> PoolRows<'p> {
    /// The rows.
    pub fn tensor(&self) -> &Tensor<'p> {
        &self.rows
    }
}
