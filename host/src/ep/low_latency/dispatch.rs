//! Low-latency dispatch: sends rows to the ranks that hold their experts.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use epoxide_gpu::layout::{
    BLOCKS_FOR_A_LISTER, DevicePtr, ExpertTable, FEW_TOKENS, LowLatencyCall, LowLatencyDispatchArgs,
    LowLatencyExpertDispatchArgs, LowLatencyExpertRows, MX_BLOCK, SCALE_BLOCK, has_scale_packets, is_batch,
    row_stride,
};

use super::Buffer;
use super::halves::{Arguments, Operation, Pending};
use super::layout::most_ranks;
use super::options::check_sms;
use super::results::{Place, Received, ReceivedByExpert, Room};
use crate::driver::Outcome;
use crate::ep::Payload;
use crate::ep::core::{
    Block, CUMULATIVE_COUNTS, Halves, PlaceState, Uses, check_cumulative, check_timeout, setters,
};
use crate::ep::experts::{ExpertRows, check_alignment, is_narrow};
use crate::ep::payload::{Columns, PlacedColumn, Record};
use crate::ep::tensor::Owner;
use crate::ep::{DType, ExpertId, ExpertMap, Quantise, StreamOrder, Tensor, TypedTensor};
use crate::error::{Error, Result};

/// Types of elements that rows can have.
pub(super) const ROWS: [DType; 6] =
    [DType::Bf16, DType::Fp8E4m3, DType::F16, DType::Fp8E5m2, DType::Fp4E2m1x2, DType::U8];

/// Counts of words of columns, by which the types of columns count in a call.
const WORDS: u32 = 32;
/// Counts of words of columns, by which the type of rows counts: a third of those that a call has.
const TYPES: u32 = (1 << 13) / 3;
/// Numbers of bytes that differ by a multiple of this are the same in a call.
const BYTES_OF_CALLS: u32 = 1 << 17;

/// Arguments of [`Buffer::dispatch`].
#[derive(Debug, Clone, Copy)]
pub struct DispatchRequest<'a> {
    x: &'a Tensor<'a>,
    topk_idx: &'a Tensor<'a>,
    map: Option<&'a ExpertMap>,
    topk_weights: Option<&'a TypedTensor<'a, f32>>,
    scales: Option<&'a TypedTensor<'a, f32>>,
    columns: Columns<'a>,
    payload: Option<&'a Payload>,
    quantise: Quantise,
    by_expert: Option<u32>,
    recv_x: Option<&'a Tensor<'a>>,
    recv_x_scales: Option<&'a TypedTensor<'a, f32>>,
    recv_columns: Option<&'a TypedTensor<'a, i32>>,
    cumulative_counts: Option<&'a TypedTensor<'a, i32>>,
    cumulative_wait_ns: Option<&'a TypedTensor<'a, i64>>,
    num_sms: Option<u32>,
    timeout: Option<Duration>,
}

impl<'a> DispatchRequest<'a> {
    /// Rows `x` to send, `[num_tokens, hidden]`, contiguous, bf16, f16 or fp8, of fp4 `[num_tokens,
    /// hidden / 2]`, or as u8 rows of any number of bytes up to those of bf16. Their experts are
    /// `topk_idx`, `[num_tokens, num_topk]`: global ids, i64 or i32, or -1 for none. Weights are 1.
    pub fn new(x: &'a Tensor<'a>, topk_idx: &'a TypedTensor<'a, impl ExpertId>) -> Self {
        DispatchRequest {
            x,
            topk_idx,
            map: None,
            topk_weights: None,
            scales: None,
            columns: Columns::default(),
            payload: None,
            quantise: Quantise::None,
            by_expert: None,
            recv_x: None,
            recv_x_scales: None,
            recv_columns: None,
            cumulative_counts: None,
            cumulative_wait_ns: None,
            num_sms: None,
            timeout: None,
        }
    }

    /// Delivers rows by expert as well: one for each selection, grouped by local expert, each
    /// expert's segment at a multiple of `alignment` rows, a power of two. [`Received::by_expert`]
    /// has the rows and the places of the segments. A token that selects an expert twice has two
    /// rows there. The receiving kernel copies each row to its segments as soon as it arrives, so
    /// the time depends on the received rows, not on the room for them.
    ///
    /// The buffer needs [`Options::rows_by_expert`](super::Options::rows_by_expert). Each rank
    /// decides for itself. [`CombineRequest::by_expert`](super::CombineRequest::by_expert) takes
    /// the experts' results in the same order.
    ///
    /// The columns of a row have at most 4 bytes for each 128 bytes of the row, rounded up. Scales
    /// of fp8 and MXFP8 fit. Those of [`Payload::nvfp4`] do not: a row of 3,584 bytes has 452 bytes
    /// of columns, and room for 112. Dispatch such rows without this, and read
    /// [`Received::columns`] by [`Received::expert_rows`], or copy them together with
    /// [`Buffer::gather_columns_by_expert`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use epoxide::driver::Stream;
    /// # use epoxide::driver::virt::{VirtConfig, VirtualGpu};
    /// # use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
    /// # use epoxide::group::run_threads;
    /// # use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Shape};
    /// # use epoxide::half::bf16;
    /// # let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
    /// #     let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
    /// #     let stream = Stream::new(&device)?;
    /// let shape = Shape { max_tokens: 8, hidden: 64, num_topk: 2, num_experts: 4 };
    /// let rows = shape.most_rows_by_expert(group.size(), 8);
    /// let mut buffer = Buffer::new(device, &*group, Options::new(shape).rows_by_expert(rows))?;
    /// #     let mut place = buffer.place(0)?;
    /// #     let order = StreamOrder::on(&stream);
    /// #     let x = Tensor::from_host(&stream, DType::Bf16, &[2, 64], &[bf16::from_f32(rank as f32 + 1.0); 128])?;
    /// #     let topk_idx = TypedTensor::from_host(&stream, &[2, 2], &[0i64, 3, 1, -1])?;
    /// // Rows of the grouped GEMM, whose memory keeps its address.
    /// let recv_x = Tensor::alloc(stream.device(), DType::Bf16, &[rows, 64])?;
    /// let request = DispatchRequest::new(&x, &topk_idx).by_expert(8).recv_x(&recv_x);
    /// let received = buffer.dispatch(&mut place, request, order)?;
    /// let by_expert = received.by_expert.as_ref().expect("asked for");
    /// let psum = by_expert.experts.psum();
    /// // The experts work on `recv_x` here, in place, by `psum`.
    /// #     let ends = psum.values(&stream)?;
    /// #     assert_eq!(ends, if rank == 0 { [2, 10, 16] } else { [0, 2, 8] });
    /// let combined = buffer.combine(received, CombineRequest::by_expert(&recv_x), order)?;
    /// #     combined.x.to_host::<bf16>(&stream)
    /// # })?;
    /// # assert_eq!((sums[1][0].to_f32(), sums[1][64].to_f32()), (4.0, 2.0));
    /// # Ok::<(), epoxide::group::RankFailure>(())
    /// ```
    pub fn by_expert(mut self, alignment: u32) -> Self {
        self.by_expert = Some(alignment);
        self
    }

    /// Sends one more column with the rows, `[num_tokens, n]` (or `[num_tokens]`), of any type of
    /// at most 4 bytes; up to four times. [`Received::columns`] has them in the same order. The
    /// bytes are sent unchanged, in whole words. Type and size of each are the same on every rank.
    ///
    /// The buffer needs room for them: [`Options::max_scales`](super::Options::max_scales).
    /// Several columns, and those whose bytes are no multiple of 4, are first copied together by a
    /// kernel.
    pub fn column(mut self, column: &'a Tensor<'a>) -> Self {
        self.columns.push(column);
        self
    }

    setters! {
        /// Checks that rows and columns are what this describes.
        payload: &'a Payload;
        /// Stores rows by expert here, `[rows_by_expert, hidden]` of the dtype in which they are
        /// sent. It may be any memory of this rank's device.
        recv_x: &'a Tensor<'a>;
        /// Puts the f32 scales of fp8 rows by expert here, `[hidden / 128 rounded up,
        /// rows_by_expert]`.
        recv_x_scales: &'a TypedTensor<'a, f32>;
        /// Stores the columns of rows by expert here, or the scales of [`Quantise::Mxfp8`], as
        /// words `[words, rows_by_expert]`. Each column has bytes / 4 lines of the tensor, rounded
        /// up. The lines of the first column come first. One column has all `words` lines, which
        /// are hidden / 128 with [`Quantise::Mxfp8`]. With several columns `words` is the sum of
        /// their lines, rounded up to a multiple of 4, and the last lines hold anything.
        /// [`Payload::max_scales`] is that number.
        ///
        /// With [`DispatchRequest::recv_x`] as well, rows by expert take no memory of the library,
        /// so the caller's graph can record the call. Columns that a kernel first copies together
        /// ([`DispatchRequest::column`]) still take a block for the copy. An allocation fails while
        /// a stream is captured, and [`Buffer::capture`] makes it before.
        recv_columns: &'a TypedTensor<'a, i32>;
        /// Weights `[num_tokens, num_topk]` of the experts' outputs, for the combine.
        topk_weights: &'a TypedTensor<'a, f32>;
        /// Treats ids as logical experts, which `map` translates: its physical experts are the
        /// experts of the buffer. The device translates ids in the call, and again in each replay
        /// of a graph. Ranks may have different maps.
        map: &'a ExpertMap;
        /// Sends scales `[num_tokens, hidden / 128 rounded up]` with e4m3 rows. Scales of other rows
        /// are a [`column`](DispatchRequest::column).
        scales: &'a TypedTensor<'a, f32>;
        /// Quantises bf16 rows on their way; hidden must be a multiple of 128. The same on every
        /// rank, except that f32 scales may be powers of two on some. If some ranks convert rows to
        /// MXFP8, others may give such rows with their column.
        quantise: Quantise;
        /// Adds the rows of each local expert ([`Received::expert_counts`]) to these, i32
        /// `[local_experts]`, behind the dispatch and in each replay of a graph. A dispatch that
        /// fails adds nothing. The run before a recording adds too.
        cumulative_counts: &'a TypedTensor<'a, i32>;
        /// Adds the nanoseconds that this rank waited for each rank's rows to this i64
        /// `[num_ranks]`, by the device's `%globaltimer`. A slow rank or link stands out. The time
        /// begins when this rank's rows are sent, and ends when the other rank's have arrived. The
        /// time is 0 for a rank that was in time, and for this one. Each call, the run before a
        /// recording, and each replay add it.
        ///
        /// Each rank decides for itself. The call is launched as its two halves, with a small
        /// kernel between them that waits. It takes two launches more than a call without, whose
        /// kernels measure nothing, or one more where the caller makes the halves. A dispatch into
        /// a place whose last dispatch had no combine waits until all ranks have entered it before
        /// it sends rows; that time is not included.
        cumulative_wait_ns: &'a TypedTensor<'a, i64>;
        /// Most multiprocessors of the call, at least 1, instead of
        /// [`Options::num_sms`](super::Options::num_sms): fewer while other kernels run, more when
        /// they have ended. Ranks may differ. A graph keeps the number of its recording.
        num_sms: u32;
        /// Longest wait for a peer, instead of the buffer's: microseconds where a step must not
        /// take longer.
        timeout: Duration;
    }
}

impl Buffer {
    /// Sends every token's row to each rank that has one of its experts, into `place`, the one of
    /// the same index on every rank. Collective; the host does not wait.
    ///
    /// # Errors
    /// Arguments that break a rule, on this rank alone; its peers then wait for it until their
    /// deadlines. [`Buffer::check`] returns errors that the device finds, once the stream has
    /// passed. These are a peer that timed out or made another call, and an expert id out of range.
    /// The rank that gave the id gets that error; others may get
    /// [`Error::PeerTimeout`](crate::Error::PeerTimeout) for that rank in a later call.
    pub fn dispatch<'p>(
        &mut self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Received<'p>> {
        let (mut operation, received) = self.prepare_dispatch(place, request, order)?;
        let event = self.launch(order, &mut operation, Halves::Both)?;
        Ok(Received { event, ..received })
    }

    /// The first half of [`Buffer::dispatch`]: sends rows. The second, [`Pending::receive`], waits
    /// for those of the peers; no multiprocessor is held in between. Collective; each rank decides
    /// for itself whether it calls the halves.
    ///
    /// # Errors
    /// The same as [`Buffer::dispatch`].
    pub fn dispatch_send<'b, 'p>(
        &'b mut self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Pending<'b, Received<'p>>> {
        let (operation, received) = self.prepare_dispatch(place, request, order)?;
        self.send(order, operation, received)
    }

    fn prepare_dispatch<'p>(
        &self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<(Operation, Received<'p>)> {
        let outcome = self.outcome(order)?;
        let place = place.0.place();
        self.core.check_place(place)?;
        let DispatchRequest { x, topk_idx, map, topk_weights, scales, quantise, timeout, .. } = request;
        let columns = request.columns;
        check_timeout(timeout)?;
        let (hidden, num_tokens) = (self.options.shape.hidden, self.check_tokens(x.rows())?);
        let tokens = Some(u64::from(num_tokens));
        x.expect("x", &ROWS, &[("num_tokens", tokens), ("hidden", elements_of(x.dtype(), hidden))])?;
        x.expect_rows_of_16("x")?;
        check_row_bytes("x", x, hidden)?;
        let record = self.check_columns(&request, num_tokens)?;
        let entries = [("num_tokens", tokens), ("num_topk", Some(self.options.shape.num_topk.into()))];
        topk_idx.expect("topk_idx", &[DType::I64, DType::I32], &entries)?;
        if let Some(map) = map {
            map.check_ranks(self.num_ranks())?;
            if map.local_experts() != self.local_experts() {
                let value = format!("{} experts on a rank", map.local_experts());
                let rule = format!(
                    "must be those of the buffer, {}: make it with num_experts = {}",
                    self.local_experts(),
                    map.num_physical_experts()
                );
                return Err(Error::argument("map", value, rule));
            }
        }
        if let Some(weights) = topk_weights {
            weights.expect("topk_weights", &[DType::F32], &entries)?;
        }
        let of_row = hidden.div_ceil(SCALE_BLOCK.into());
        let is_fp8 = x.dtype() == DType::Fp8E4m3;
        quantise.check(hidden, x.dtype(), SCALE_BLOCK)?;
        if let Some(scales) = scales {
            if !is_fp8 {
                let rule = format!(
                    "only e4m3 rows have them, and x is {}: give them with `column`, or leave them out",
                    x.dtype()
                );
                return Err(Error::argument("scales", "given", rule));
            }
            scales.expect(
                "scales",
                &[DType::F32],
                &[("num_tokens", tokens), ("hidden / 128", Some(of_row))],
            )?;
        }
        let dtype = if quantise == Quantise::None { x.dtype() } else { DType::Fp8E4m3 };
        let with_scales = scales.is_some() || quantise.makes_f32_scales();
        let row_bytes = x.columns() * dtype.size();
        let records = record.place(self.core.arena(), num_tokens)?;
        let given_words = record.bytes / 4;
        // For the receivers, scales made by the dispatch are a column like a given one.
        let record = match quantise {
            Quantise::Mxfp8 => Record::of_ue8m0(hidden as u32 / MX_BLOCK),
            _ => record,
        };
        let num_words = record.bytes / 4;

        let call = LowLatencyCall {
            is_combine: false,
            has_scales: with_scales || num_words > 0,
            place: place.index(),
            row_bytes: bytes_of_call(row_bytes as u32, dtype, &record),
            num_tokens,
        };
        let null = DevicePtr::NULL;
        let args = LowLatencyDispatchArgs {
            common: self.args(place, call, timeout),
            x: x.ptr(),
            scales: scales.map_or(records.at, |scales| scales.ptr()),
            topk_idx: topk_idx.ptr(),
            table: map.map_or_else(ExpertTable::default, ExpertMap::table),
            topk_weights: topk_weights.map_or(null, |weights| weights.ptr()),
            row_bytes: row_bytes as u32,
            num_scales: if scales.is_some() { of_row as u32 } else { given_words },
            quantise: quantise as u32,
            narrow_ids: is_narrow(topk_idx),
        };
        let entries = map.map(|map| &**map.entries());
        let inputs = [
            ("x", Some(x)),
            ("topk_idx", Some(topk_idx)),
            ("map", entries),
            ("topk_weights", topk_weights.map(|it| &**it)),
            ("scales", scales.map(|it| &**it)),
        ];
        let of_columns = columns.iter().map(|column| ("column", Some(column)));
        let mut uses = Uses::from(self.core.owners(inputs.into_iter().chain(of_columns))?);
        uses.extend(records.owner());
        let given = [
            request.recv_x.map(|it| ("recv_x", it)),
            request.recv_x_scales.map(|it| ("recv_x_scales", &**it)),
            request.recv_columns.map(|it| ("recv_columns", &**it)),
        ];
        if let (None, Some((argument, _))) = (request.by_expert, given.into_iter().flatten().next()) {
            let rule = "only rows by expert go there: ask for them with by_expert, or leave it out";
            return Err(Error::argument(argument, "given", rule));
        }
        let read = [Some(("x", x)), scales.map(|it| ("scales", &**it))].into_iter().flatten();
        for (others, read) in read.chain(columns.iter().map(|column| ("column", column))) {
            given.into_iter().flatten().try_for_each(|(name, it)| it.expect_apart(name, read, others))?;
        }
        let rows_by_expert = match request.by_expert {
            None => None,
            Some(alignment) => {
                let words = if with_scales { of_row } else { num_words.into() };
                Some(self.rows_by_expert(place, &request, alignment, (dtype, words), with_scales)?)
            }
        };
        check_cumulative(request.cumulative_counts, self.local_experts())?;
        check_sms(request.num_sms)?;
        let wait_ns = self.wait_ns(request.cumulative_wait_ns, &outcome, &mut uses)?;
        if let Some(cumulative) = request.cumulative_counts {
            uses.extend(self.core.owners([(CUMULATIVE_COUNTS, Some(&**cumulative))])?);
            uses.fills(cumulative, &outcome);
        }
        let lease = place.lease();
        let owner = || lease.clone() as Owner;
        let mut by_expert = None;
        if let Some((to, block)) = &rows_by_expert {
            let outs = given.into_iter().flatten().map(|(name, tensor)| (name, Some(tensor)));
            uses.extend(self.core.owners(outs)?);
            uses.extend(block.clone().map(|block| block as Owner));
            given.into_iter().flatten().for_each(|(_, tensor)| uses.fills(tensor, &outcome));
            by_expert = Some(received_by_expert(
                to,
                block.as_ref(),
                &request,
                (dtype, x.columns(), with_scales, self.local_experts()),
                &record,
                &outcome,
                owner,
            ));
        }
        let operation = Operation {
            name: "low-latency dispatch",
            kernel: match &rows_by_expert {
                None => Arguments::Dispatch(args),
                Some((to, _)) => {
                    Arguments::DispatchByExpert(LowLatencyExpertDispatchArgs { dispatch: args, to: *to })
                }
            },
            place: place.clone(),
            send_blocks: self.dispatch_blocks(num_tokens),
            receive_blocks: self.receive_blocks(rows_by_expert.is_some()),
            fills: Some(lease.clone()),
            rows: None,
            sums: None,
            records: Some(records),
            cumulative_counts: request.cumulative_counts.map(|counts| counts.ptr()),
            num_sms: request.num_sms,
            wait_ns,
            // Ranks compare whether scales are f32. MXFP8 scales are sent as words, made or given
            // as a column: a dispatch may have both.
            packs_scales: with_scales && has_scale_packets(self.options.shape.max_tokens, self.num_ranks()),
            uses,
        };
        let (rows, experts, ranks) =
            (self.rows(), u64::from(self.local_experts()), u64::from(self.num_ranks()));
        let tables = &place.room().own.tables;
        let x = Tensor::in_memory(place.room().recv_x, dtype, &[rows, x.columns()], owner());
        let of_experts =
            |name, ptr| TypedTensor::in_memory(ptr, &[experts, rows], owner()).result(name, &outcome);
        let received = Received {
            x: x.with_row_stride(row_stride(row_bytes)).result("x", &outcome),
            scales: with_scales.then(|| {
                TypedTensor::in_memory(place.room().recv_scales, &[of_row, rows], owner())
                    .result("scales", &outcome)
            }),
            columns: words_of(&record, place.room().recv_scales, rows, "columns", &outcome, owner),
            num_tokens: TypedTensor::in_memory(
                tables.num_tokens,
                &[most_ranks(self.core.topology())],
                owner(),
            )
            .result("num_tokens", &outcome),
            expert_counts: TypedTensor::in_memory(tables.expert_counts, &[experts], owner())
                .result("expert_counts", &outcome),
            expert_rows: of_experts("expert_rows", tables.expert_rows),
            src_info: of_experts("src_info", tables.src_info),
            layout_range: TypedTensor::in_memory(tables.layout_range, &[experts, ranks], owner())
                .result("layout_range", &outcome),
            by_expert,
            event: None,
            combine_dtype: self.options.combine_dtype,
            combine_rows: place.room().combine_rows.map(|rows| {
                let rows = Tensor::in_memory(rows, DType::Bf16, &[self.rows(), hidden], owner());
                rows.with_row_stride(row_stride(hidden * 2)).named("rows")
            }),
            num_local_tokens: num_tokens,
            has_segments: rows_by_expert.is_some(),
            generation: self.generation.clone(),
            lease,
            place: PhantomData,
        };
        Ok((operation, received))
    }

    /// Blocks of the first half, and those of a batch that list rows meanwhile. The links of more
    /// than two ranks are full with fewer blocks, each of which then waits for its stores once for
    /// two tokens: 128 tokens between four ranks are sent 4 to 6 us earlier.
    fn dispatch_blocks(&self, num_tokens: u32) -> u32 {
        const TOKENS_OF_BLOCKS_WITH_ONE: u32 = 64;
        let (is_one_node, num_ranks) = (self.core.topology().nodes == 1, self.num_ranks());
        let links_are_full = is_one_node && num_ranks > 2 && num_tokens > TOKENS_OF_BLOCKS_WITH_ONE;
        let senders = if links_are_full { num_tokens.div_ceil(2) } else { num_tokens };
        let has_listers = is_one_node && is_batch(num_tokens, num_ranks);
        if has_listers { senders + senders / (BLOCKS_FOR_A_LISTER - 1) } else { senders }
    }

    /// Blocks of the second half, which list the rows of experts. Across nodes they also copy rows
    /// to their places, several rows per block. With few tokens each warp lists an expert, and a
    /// block has two: with 15, a pair of 16 tokens took 1.1 us longer.
    ///
    /// Rows by expert are copied by as many blocks as there are rows.
    fn receive_blocks(&self, by_expert: bool) -> u32 {
        const ROWS_OF_BLOCK: u32 = 16;
        const EXPERTS_OF_BLOCK: u32 = 2;
        let (rows, experts) = (self.num_ranks() * self.options.shape.max_tokens, self.local_experts());
        match self.core.topology().nodes {
            _ if by_expert => rows.max(experts),
            1 if rows <= FEW_TOKENS => experts.div_ceil(EXPERTS_OF_BLOCK),
            1 => experts,
            _ => rows.div_ceil(ROWS_OF_BLOCK).max(experts),
        }
    }

    /// The destination of rows by expert, and its block if the memory is not the caller's.
    fn rows_by_expert(
        &self,
        place: &PlaceState<Room>,
        request: &DispatchRequest<'_>,
        alignment: u32,
        (dtype, words): (DType, u64),
        with_scales: bool,
    ) -> Result<(LowLatencyExpertRows, Option<Arc<Block>>)> {
        check_alignment(alignment)?;
        let Some(tables) = place.room().own.by_expert else {
            let rule = "the buffer has no room for them: create it with Options::rows_by_expert";
            return Err(Error::argument("by_expert", "asked for", rule));
        };
        let (rows, hidden) = (u64::from(tables.rows), self.options.shape.hidden);
        let most = self.options.shape.most_rows_by_expert(self.num_ranks(), alignment);
        if most > rows {
            let rule = format!(
                "up to {most} rows can come then, and the buffer has room for {rows}: \
                 create it with rows_by_expert >= {most}"
            );
            return Err(Error::argument("alignment", alignment, rule));
        }
        let room = ("rows_by_expert", Some(rows));
        if let Some(x) = request.recv_x {
            x.expect_strided("recv_x", &[dtype], &[room, ("hidden", Some(request.x.columns()))])?;
            x.expect_rows_of_16("recv_x")?;
        }
        let of_row = hidden.div_ceil(SCALE_BLOCK.into());
        if let Some(scales) = request.recv_x_scales {
            if !with_scales {
                let rule = "the rows have no scales of f32: leave it out. Columns, and the scales of MXFP8 rows, \
                            come as ReceivedByExpert::recv_columns: give memory for these as recv_columns";
                return Err(Error::argument("recv_x_scales", "given", rule));
            }
            scales.expect("recv_x_scales", &[DType::F32], &[("hidden / 128", Some(of_row)), room])?;
        }
        let row_bytes = request.x.columns() * dtype.size();
        let most_words = row_bytes.div_ceil(SCALE_BLOCK.into());
        if words > most_words {
            let rule = format!(
                "rows by expert bring at most a word for each {SCALE_BLOCK} bytes of a row, {most_words} of these: \
                 read Received::columns by expert_rows instead"
            );
            return Err(Error::argument("columns", format!("{words} words of 4 bytes"), rule));
        }
        if let Some(columns) = request.recv_columns {
            if with_scales || words == 0 {
                let rule = if with_scales {
                    "the rows have scales of f32, and no columns: give memory for these as recv_x_scales"
                } else {
                    "the rows have no columns: leave it out, or send some with column or Quantise::Mxfp8"
                };
                return Err(Error::argument("recv_columns", "given", rule));
            }
            columns.expect("recv_columns", &[DType::I32], &[("words", Some(words)), room])?;
        }
        let x_stride = request.recv_x.map_or(row_bytes, Tensor::row_stride);
        let (mut x, mut block) = (request.recv_x.map(Tensor::ptr), None);
        // Scales or columns: rows have one of them, and the kernel copies both alike.
        let mut scales = match (request.recv_x_scales, request.recv_columns) {
            (Some(scales), _) => Some(scales.ptr()),
            (None, columns) => columns.map(|columns| columns.ptr()),
        };
        let needs_scales = words > 0 && scales.is_none();
        if x.is_none() || needs_scales {
            let (needs_x, arena) = (x.is_none(), self.core.arena());
            let (taken, (x_at, scales_at)) = arena.take(|pieces| {
                let x_at = needs_x.then(|| pieces.array("recv_x_by_expert", rows, x_stride));
                (x_at, needs_scales.then(|| pieces.array("recv_x_scales_by_expert", words, rows * 4)))
            })?;
            (block, x, scales) = (Some(taken), x.or(x_at), scales.or(scales_at));
        }
        let null = DevicePtr::NULL;
        let (x, scales) = (x.unwrap_or(null), scales.unwrap_or(null));
        Ok((LowLatencyExpertRows { x, x_stride, scales, alignment, ..tables }, block))
    }

    /// Checks the columns of a request, and lays them out.
    fn check_columns(&self, request: &DispatchRequest<'_>, num_tokens: u32) -> Result<Record> {
        let columns = request.columns;
        if let Some(payload) = request.payload {
            let mut given = columns;
            request.scales.into_iter().for_each(|scales| given.push(scales));
            payload.check(request.x, given)?;
        }
        if columns.is_empty() {
            return Ok(Record::default());
        }
        if request.scales.is_some() || request.quantise != Quantise::None {
            let rule =
                "columns travel in the place of scales: give those as one of them, of rows as they are";
            return Err(Error::argument("columns", "given", rule));
        }
        let record = columns.lay_out(num_tokens)?;
        let (words, have) = (u64::from(record.bytes / 4), self.options.most_words());
        if words > have {
            let rule = format!(
                "the buffer has room for {have} words of 4 bytes: create it with max_scales >= {words}"
            );
            return Err(Error::argument("columns", format!("{words} words of 4 bytes"), rule));
        }
        Ok(record)
    }

    fn check_tokens(&self, tokens: u64) -> Result<u32> {
        let most = self.options.shape.max_tokens;
        if tokens <= u64::from(most) {
            return Ok(tokens as u32);
        }
        let rule = format!("the buffer was made for at most {most}: create it with max_tokens >= {tokens}");
        Err(Error::argument("num_tokens", tokens, rule))
    }
}

/// The bytes of rows in the call of a dispatch. Columns and the type change them: ranks thereby
/// compare formats of equally long rows.
fn bytes_of_call(row_bytes: u32, dtype: DType, record: &Record) -> u32 {
    let among_equally_long = match dtype {
        DType::F16 | DType::Fp8E5m2 => 1,
        DType::U8 => 2,
        _ => 0,
    };
    row_bytes + 16 * (record.bytes / 4 + WORDS * record.fingerprint() + TYPES * among_equally_long)
}

/// The rows and scales of a dispatch whose call has these bytes, in a buffer of `hidden` elements;
/// `None` where no usual format has them. Formats that share them are joined by "or".
pub(super) fn describe_rows(bytes: u32, has_scales: bool, hidden: u64) -> Option<String> {
    let mut found = Vec::new();
    let mut compare = |payload: &Payload, record: &Record, scales: &str| {
        let (dtype, elements) = payload.row();
        let row_bytes = payload.row_bytes();
        if bytes_of_call(row_bytes as u32, dtype, record) % BYTES_OF_CALLS == bytes {
            found.push(format!("{elements} x {dtype} ({row_bytes} bytes) per row{scales}"));
        }
    };
    if !has_scales {
        // Rows of u8 have any length.
        let of_u8 = bytes.wrapping_sub(bytes_of_call(0, DType::U8, &Record::default())) % BYTES_OF_CALLS;
        let of_u8 = Some(u64::from(of_u8)).filter(|&bytes| bytes <= hidden * 2);
        let rows = ROWS.into_iter().filter_map(|dtype| {
            let elements = elements_of(dtype, hidden).or(of_u8)?;
            Payload::rows(dtype, elements).ok()
        });
        rows.for_each(|payload| compare(&payload, &Record::default(), ""));
    } else {
        for dtype in [DType::Fp8E4m3, DType::Fp8E5m2] {
            let of_128 = " and UE8M0 scales of 128 elements";
            let formats = [
                (Payload::fp8(dtype, hidden), " and f32 scales"),
                (Payload::fp8_ue8m0(dtype, hidden), of_128),
                (Payload::mxfp8(dtype, hidden), " and UE8M0 scales of 32 elements"),
            ];
            for (payload, scales) in formats {
                payload.iter().for_each(|payload| compare(payload, &Record::of(payload), scales));
            }
        }
        // Scales that are no column.
        let of_scales = Payload::rows(DType::Fp8E4m3, hidden);
        of_scales.iter().for_each(|payload| compare(payload, &Record::default(), " and f32 scales"));
        let nvfp4 = Payload::nvfp4(hidden);
        nvfp4.iter().for_each(|payload| compare(payload, &Record::of(payload), " and NVFP4 scales"));
    }
    (!found.is_empty()).then(|| found.join(" or "))
}

/// Elements of a row, where its type leaves no choice.
pub(super) fn elements_of(dtype: DType, hidden: u64) -> Option<u64> {
    match dtype {
        DType::U8 => None,
        DType::Fp4E2m1x2 => Some(hidden / 2),
        _ => Some(hidden),
    }
}

/// An error unless rows fit in places.
pub(super) fn check_row_bytes(argument: &'static str, x: &Tensor<'_>, hidden: u64) -> Result<()> {
    if x.row_bytes() <= hidden * 2 {
        return Ok(());
    }
    let rule = format!("a row has at most the bytes of one of bf16, {}", hidden * 2);
    Err(Error::argument(argument, format!("{} bytes per row", x.row_bytes()), rule))
}

/// The columns of a record as words, each `[words, rows]`, from `at` on.
fn words_of<'p>(
    record: &Record,
    at: DevicePtr,
    rows: u64,
    name: &'static str,
    outcome: &Arc<impl Outcome + 'static>,
    owner: impl Fn() -> Owner,
) -> Vec<TypedTensor<'p, i32>> {
    let of = |column: &PlacedColumn| {
        let at = at.add(u64::from(column.offset) * rows);
        let words = u64::from(column.bytes.div_ceil(4));
        TypedTensor::in_memory(at, &[words, rows], owner()).result(name, outcome)
    };
    record.columns.iter().map(of).collect()
}

/// The result of a dispatch by expert: rows of this dtype and length, with scales or without.
/// `owner` keeps the place's tables; `block` has what is not in the caller's memory.
fn received_by_expert<'p>(
    to: &LowLatencyExpertRows,
    block: Option<&Arc<Block>>,
    request: &DispatchRequest<'_>,
    (dtype, hidden, with_scales, local_experts): (DType, u64, bool, u32),
    record: &Record,
    outcome: &Arc<impl Outcome + 'static>,
    owner: impl Fn() -> Owner,
) -> ReceivedByExpert<'p> {
    let rows = u64::from(to.rows);
    let in_block = |is_given: bool| block.filter(|_| !is_given).map(|block| block.clone() as Owner);
    let recv_x = in_block(request.recv_x.is_some());
    let of_columns = in_block(request.recv_columns.is_some());
    let scales = in_block(request.recv_x_scales.is_some()).filter(|_| with_scales);
    let of_row = hidden.div_ceil(SCALE_BLOCK.into());
    let table = |name, ptr, shape: &[u64]| TypedTensor::in_memory(ptr, shape, owner()).result(name, outcome);
    ReceivedByExpert {
        recv_x: recv_x
            .map(|owner| Tensor::in_memory(to.x, dtype, &[rows, hidden], owner).result("recv_x", outcome)),
        recv_x_scales: scales.map(|owner| {
            TypedTensor::in_memory(to.scales, &[of_row, rows], owner).result("recv_x_scales", outcome)
        }),
        recv_columns: of_columns.map_or_else(Vec::new, |owner| {
            words_of(record, to.scales, rows, "recv_columns", outcome, || owner.clone())
        }),
        recv_topk_weights: TypedTensor::in_memory(to.weights, &[rows], owner())
            .result("recv_topk_weights", outcome),
        recv_src_idx: table("recv_src_idx", to.src_idx, &[rows]),
        recv_src_entry: table("recv_src_entry", to.src_entry, &[rows, 2]),
        experts: ExpertRows::new([to.expert_counts, to.expert_starts, to.psum_expert], local_experts, table),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::payload::assert_calls_differ;

    /// Scales have a bit of their own in the call.
    #[test]
    fn rows_of_the_usual_formats_have_different_calls() {
        for hidden in [512, 1024, 2048, 2560, 2880, 3584, 4096, 5120, 6144, 7168, 8192] {
            let elements = |dtype| elements_of(dtype, hidden).unwrap_or(hidden);
            assert_calls_differ(&ROWS, elements, |format, record| {
                let row_bytes = bytes_of_call(format.row_bytes() as u32, format.row().0, record);
                let has_scales = !format.columns().is_empty();
                let call =
                    LowLatencyCall { is_combine: false, has_scales, place: 0, row_bytes, num_tokens: 1 };
                call.bits().into()
            });
        }
    }
}
