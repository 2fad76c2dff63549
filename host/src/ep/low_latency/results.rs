//! Places, and the results of operations in them.

use std::marker::PhantomData;
use std::sync::Arc;

use epoxide_gpu::layout::{DevicePtr, LowLatencyMessages, LowLatencyPlace};

use super::fault::Generation;
use super::layout::PlaceTables;
use crate::driver::{Event, Memory};
use crate::ep::core::{Held, Lease};
use crate::ep::{DType, ExpertRows, Tensor, TypedTensor};
use crate::error::{Error, Result};

/// Room for the rows of one dispatch and for the sums of its combine.
/// [`Buffer::place`](super::Buffer::place) hands it out; the holder of the rows of a dispatch
/// borrows it.
#[derive(Debug)]
pub struct Place(pub(super) Held<Room>);

impl Place {
    /// Its index: every rank dispatches to the place of the same index.
    pub fn index(&self) -> u32 {
        self.0.place().index()
    }

    /// Address of the first received row, the first one of [`Received::x`]. It is the same for each
    /// dispatch to this place, so a kernel may keep it.
    pub fn recv_x_ptr(&self) -> DevicePtr {
        self.0.place().room().recv_x
    }

    /// Address of the first one of [`Received::combine_rows`], the same for each dispatch to this
    /// place; `None` across nodes, and where the buffer sums another type than bf16.
    pub fn combine_rows_ptr(&self) -> Option<DevicePtr> {
        self.0.place().room().combine_rows
    }

    /// Addresses of the tables of rows by expert, the same for each dispatch to this place, so a
    /// kernel may keep them. `None` where the buffer was made without
    /// [`Options::rows_by_expert`](super::Options::rows_by_expert).
    pub fn by_expert_ptrs(&self) -> Option<ByExpertPtrs> {
        self.0.place().room().own.by_expert.map(|tables| ByExpertPtrs {
            psum: tables.psum_expert,
            recv_topk_weights: tables.weights,
            recv_src_idx: tables.src_idx,
            recv_src_entry: tables.src_entry,
        })
    }
}

/// Addresses of the tables of a dispatch of rows by expert: the first elements of the tensors with
/// the same names in [`ReceivedByExpert`] and [`ExpertRows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ByExpertPtrs {
    /// The first one of [`ExpertRows::psum`].
    pub psum: DevicePtr,
    /// The first one of [`ReceivedByExpert::recv_topk_weights`].
    pub recv_topk_weights: DevicePtr,
    /// The first one of [`ReceivedByExpert::recv_src_idx`].
    pub recv_src_idx: DevicePtr,
    /// The first one of [`ReceivedByExpert::recv_src_entry`].
    pub recv_src_entry: DevicePtr,
}

/// Received rows, their tables, and sums.
#[derive(Debug)]
pub struct Room {
    /// Its layout in every pool; empty across nodes.
    pub at: LowLatencyPlace,
    /// Received rows, and their scales.
    pub recv_x: DevicePtr,
    pub recv_scales: DevicePtr,
    /// Rows of bf16 that this rank's experts store for a combine; none across nodes.
    pub combine_rows: Option<DevicePtr>,
    /// Arguments of the kernels for it across nodes.
    pub messages: Option<LowLatencyMessages>,
    /// This rank's private tables for it.
    pub own: PlaceTables,
    /// The memory of its tables; across nodes also that of its rows.
    pub _memory: Vec<Arc<Memory>>,
}

/// The result of a dispatch. The tensors are in the dispatch's place and keep its borrow;
/// [`Buffer::combine`](super::Buffer::combine) takes the result. `rows` stands for `num_ranks *
/// max_tokens`.
#[derive(Debug)]
#[non_exhaustive]
pub struct Received<'p> {
    /// `[rows, hidden]`: token t of rank s is row `s * max_tokens + t`, if it was sent here; other
    /// rows are undefined. Rows are `row_stride()` bytes apart, a multiple of 128. A clone can be
    /// read by work that is enqueued before the combine, which runs behind that work on any stream:
    /// peers may overwrite the rows behind it.
    pub x: Tensor<'p>,
    /// f32 `[hidden / 128 rounded up, rows]`, of fp8 rows: a row's scales are a column. `None` of
    /// rows that were [quantised as MXFP8](crate::low_latency::Quantise::Mxfp8).
    pub scales: Option<TypedTensor<'p, f32>>,
    /// The columns of the rows in the order of the request, each as words `[bytes / 4 rounded up,
    /// rows]`: word w of a row's column is at `[w][row]`. UE8M0 scales so have the layout that
    /// grouped GEMMs read: four to an i32, the rows side by side. The scales of rows that the
    /// dispatch [quantised as MXFP8](crate::low_latency::Quantise::Mxfp8) are such a column,
    /// `[hidden / 128, rows]`.
    pub columns: Vec<TypedTensor<'p, i32>>,
    /// Tokens of each rank: `[8]`, `[64]` where one node has more than 8 ranks, `[32]` across
    /// nodes.
    pub num_tokens: TypedTensor<'p, i32>,
    /// `[local_experts]`: rows of each local expert.
    pub expert_counts: TypedTensor<'p, i32>,
    /// `[local_experts, rows]`: the rows of each local expert, by source rank, then by token.
    /// Entries behind the last row of an expert hold anything.
    /// [`Buffer::gather_by_expert`](super::Buffer::gather_by_expert) copies them together, with
    /// columns [`Buffer::gather_columns_by_expert`](super::Buffer::gather_columns_by_expert).
    pub expert_rows: TypedTensor<'p, i32>,
    /// `[local_experts, rows]`: their tokens' indices on their source ranks.
    pub src_info: TypedTensor<'p, i32>,
    /// `[local_experts, num_ranks]`: for each source rank, the number of an expert's rows in the
    /// low 32 bits. The high 32 bits hold their first index in `expert_rows[expert]`.
    pub layout_range: TypedTensor<'p, i64>,
    /// The rows once more, by expert; `None` unless
    /// [`DispatchRequest::by_expert`](super::DispatchRequest::by_expert) asked for them.
    pub by_expert: Option<ReceivedByExpert<'p>>,
    /// Where an asynchronous call ends.
    pub event: Option<Event>,
    /// The type of the rows of its combine.
    pub(super) combine_dtype: DType,
    /// Room in the pool for those rows; none across nodes, or where they are not bf16.
    pub(super) combine_rows: Option<Tensor<'p>>,
    pub(super) num_local_tokens: u32,
    /// Whether rows arrived by expert. The caller can take the field above.
    pub(super) has_segments: bool,
    /// The generation of the buffer at the dispatch.
    pub(super) generation: Arc<Generation>,
    pub(super) lease: Arc<Lease<Room>>,
    pub(super) place: PhantomData<&'p mut Place>,
}

/// Received rows by expert: one for each selection, grouped by local expert, and within an expert
/// by source rank, token and entry. `rows` stands for [`Options::rows_by_expert`]. Rows behind the
/// last segment are undefined, and padding defines only `recv_src_idx`.
///
/// [`Options::rows_by_expert`]: super::Options::rows_by_expert
#[derive(Debug)]
#[non_exhaustive]
pub struct ReceivedByExpert<'p> {
    /// `[rows, hidden]`, contiguous; `None` where they are in the caller's memory. Experts may work
    /// in place.
    pub recv_x: Option<Tensor<'p>>,
    /// f32 `[hidden / 128 rounded up, rows]`, of fp8 rows: a row's scales are a column. `None`
    /// where rows have none, or have them in the caller's memory.
    pub recv_x_scales: Option<TypedTensor<'p, f32>>,
    /// The columns of the rows, as words `[bytes / 4 rounded up, rows]`, as [`Received::columns`].
    /// Empty where rows have none, or have them in the caller's memory
    /// ([`DispatchRequest::recv_columns`](super::DispatchRequest::recv_columns)).
    pub recv_columns: Vec<TypedTensor<'p, i32>>,
    /// `[rows]`: the weight of the selection, 1 where the dispatch had no weights.
    pub recv_topk_weights: TypedTensor<'p, f32>,
    /// `[rows]`: the token's index on its source rank; -1 in padding.
    pub recv_src_idx: TypedTensor<'p, i32>,
    /// `[rows, 2]`: the source rank, and which of the token's entries selected the expert.
    pub recv_src_entry: TypedTensor<'p, i32>,
    /// The places of each local expert's rows.
    pub experts: ExpertRows<'p>,
}

impl ReceivedByExpert<'_> {
    fn into_static(self) -> ReceivedByExpert<'static> {
        ReceivedByExpert {
            recv_x: self.recv_x.map(Tensor::into_static),
            recv_x_scales: self.recv_x_scales.map(TypedTensor::into_static),
            recv_columns: self.recv_columns.into_iter().map(TypedTensor::into_static).collect(),
            recv_topk_weights: self.recv_topk_weights.into_static(),
            recv_src_idx: self.recv_src_idx.into_static(),
            recv_src_entry: self.recv_src_entry.into_static(),
            experts: self.experts.into_static(),
        }
    }
}

/// The result of a combine, in the place of its dispatch.
#[derive(Debug)]
#[non_exhaustive]
pub struct Combined<'p> {
    /// `[num_tokens, hidden]` of [`Options::combine_dtype`](super::Options::combine_dtype): the sum
    /// over the token's destination ranks. It is accumulated in FP32 in rank order and rounded
    /// once, and so bit for bit reproducible. A token without a destination has 0.
    pub x: Tensor<'p>,
    /// Where an asynchronous call ends.
    pub event: Option<Event>,
    pub(super) lease: Arc<Lease<Room>>,
    pub(super) place: PhantomData<&'p mut Place>,
}

impl<'p> Received<'p> {
    /// bf16 `[rows, hidden]` of the pool, in the order of [`Received::x`], for the experts' results
    /// of a combine [`in_pool`](super::CombineRequest::in_pool). Their contents are undefined
    /// before. Rows are `row_stride()` bytes apart, a multiple of 128.
    ///
    /// Write them between the end of the dispatch and the start of the combine. Peers read them
    /// during the combine. Other combines reject them as rows, since peers return rows to the same
    /// memory.
    ///
    /// # Errors
    /// [`Error::Unavailable`] across nodes, where peers cannot read them, and where the buffer sums
    /// another type than bf16.
    pub fn combine_rows(&self) -> Result<&Tensor<'p>> {
        self.combine_rows.as_ref().ok_or_else(|| Error::Unavailable {
            what: "combine_rows".into(),
            reason: match self.combine_dtype {
                DType::Bf16 => {
                    "ranks of other nodes cannot read this rank's pool: give combine its rows by_row".into()
                }
                dtype => format!(
                    "rows in the pool are bf16, and the buffer sums {dtype}: give combine its rows by_row"
                ),
            },
        })
    }

    /// Replaces the borrow of the place by a check at run time that the rows are still valid. For
    /// callers that cannot carry lifetimes, and for steps, whose every run overwrites the rows.
    pub fn detach(self) -> Detached<Received<'static>> {
        let lease = self.lease.clone();
        lease.detach();
        Detached {
            results: Received {
                x: self.x.into_static(),
                scales: self.scales.map(TypedTensor::into_static),
                columns: self.columns.into_iter().map(TypedTensor::into_static).collect(),
                num_tokens: self.num_tokens.into_static(),
                expert_counts: self.expert_counts.into_static(),
                expert_rows: self.expert_rows.into_static(),
                src_info: self.src_info.into_static(),
                layout_range: self.layout_range.into_static(),
                by_expert: self.by_expert.map(ReceivedByExpert::into_static),
                event: self.event,
                combine_dtype: self.combine_dtype,
                combine_rows: self.combine_rows.map(Tensor::into_static),
                num_local_tokens: self.num_local_tokens,
                has_segments: self.has_segments,
                generation: self.generation,
                lease: self.lease,
                place: PhantomData,
            },
            lease,
        }
    }
}

impl Combined<'_> {
    /// Ends the borrow of the place, as [`Received::detach`] does.
    pub fn detach(self) -> Detached<Combined<'static>> {
        let lease = self.lease.clone();
        lease.detach();
        let results =
            Combined { x: self.x.into_static(), event: self.event, lease: self.lease, place: PhantomData };
        Detached { results, lease }
    }
}

/// Results of an operation, without a borrow of its place. A later dispatch there overwrites them,
/// behind all work enqueued by then.
#[derive(Debug)]
pub struct Detached<T> {
    results: T,
    lease: Arc<Lease<Room>>,
}

impl<T> Detached<T> {
    fn check(&self, place: &Place) -> Result<()> {
        self.lease.check_in(place.0.place())
    }
}

impl Detached<Received<'static>> {
    /// The rows, for as long as `place` is borrowed. A step that was captured with the place
    /// overwrites them when it runs, also in that time: launch it behind their last use.
    ///
    /// # Errors
    /// [`Error::StaleHandle`](crate::Error::StaleHandle) where a later dispatch has overwritten
    /// them, [`Error::Argument`](crate::Error::Argument) where they are in another place.
    pub fn at<'p>(&'p self, place: &'p Place) -> Result<&'p Received<'p>> {
        self.check(place).map(|()| &self.results)
    }
}

impl Detached<Received<'static>> {
    /// The rows with a borrow of `place` again, for the combine. A dispatch and its combine can
    /// thus be separate functions of the caller, which keeps only this and the [`Place`] in
    /// between, without a lifetime.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use epoxide::driver::Stream;
    /// # use epoxide::driver::virt::{VirtConfig, VirtualGpu};
    /// # use epoxide::{DType, Result, StreamOrder, Tensor, TypedTensor};
    /// # use epoxide::group::run_threads;
    /// # use epoxide::half::bf16;
    /// use epoxide::low_latency::*;
    ///
    /// struct Layer {
    ///     buffer: Buffer,
    ///     place: Place,
    ///     sent: Option<Detached<Received<'static>>>,
    /// }
    ///
    /// type Order<'a> = StreamOrder<'a>;
    ///
    /// impl Layer {
    ///     fn dispatch(&mut self, request: DispatchRequest<'_>, order: Order<'_>) -> Result<()> {
    ///         let received = self.buffer.dispatch(&mut self.place, request, order)?;
    ///         self.sent = Some(received.detach());
    ///         Ok(())
    ///     }
    ///
    ///     fn combine(&mut self, rows: &Tensor<'_>, out: &Tensor<'_>, order: Order<'_>) -> Result<()> {
    ///         let sent = self.sent.take().expect("a dispatch comes first");
    ///         let received = sent.attach(&mut self.place)?;
    ///         self.buffer.combine_into(received, CombineRequest::by_row(rows), out, order)?;
    ///         Ok(())
    ///     }
    /// }
    /// # let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
    /// #     let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
    /// #     let stream = Stream::new(&device)?;
    /// #     let shape = Shape { max_tokens: 8, hidden: 64, num_topk: 2, num_experts: 4 };
    /// #     let buffer = Buffer::new(device, &*group, Options::new(shape))?;
    /// #     let mut layer = Layer { place: buffer.place(0)?, buffer, sent: None };
    /// #     let numbers = [bf16::from_f32(rank as f32 + 1.0); 128];
    /// #     let x = Tensor::from_host(&stream, DType::Bf16, &[2, 64], &numbers)?;
    /// #     let topk_idx = TypedTensor::from_host(&stream, &[2, 2], &[0i64, 3, 1, -1])?;
    /// #     let out = Tensor::alloc(stream.device(), DType::Bf16, &[2, 64])?;
    /// #     layer.dispatch(DispatchRequest::new(&x, &topk_idx), StreamOrder::on(&stream))?;
    /// #     let rows = Tensor::from_host(&stream, DType::Bf16, &[16, 64], &[bf16::ONE; 1024])?;
    /// #     layer.combine(&rows, &out, StreamOrder::on(&stream))?;
    /// #     out.to_host::<bf16>(&stream)
    /// # })?;
    /// # assert_eq!((sums[1][0].to_f32(), sums[1][64].to_f32()), (2.0, 1.0));
    /// # Ok::<(), epoxide::group::RankFailure>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`Detached::at`].
    pub fn attach<'p>(self, place: &'p mut Place) -> Result<Received<'p>> {
        // In this order, a step of another thread is rejected from here on, or the check fails.
        self.lease.attach();
        self.check(place).inspect_err(|_| self.lease.detach())?;
        Ok(self.results)
    }
}

impl Detached<Combined<'static>> {
    /// The sums, for as long as `place` is borrowed.
    ///
    /// # Errors
    /// [`Error::StaleHandle`](crate::Error::StaleHandle) and
    /// [`Error::Argument`](crate::Error::Argument), as for received rows.
    pub fn at<'p>(&'p self, place: &'p Place) -> Result<&'p Combined<'p>> {
        self.check(place).map(|()| &self.results)
    }
}
