//! A sketch in Rust of the C interface of an expert-parallel library for a server like PegaInfer
//! (`DeepEpAbi`), implemented with epoxide's public interface. Functions have the C calling
//! convention and structs the C layout, and `main.rs` calls them from Rust. A library that C links
//! lacks these parts: `#[unsafe(no_mangle)]` on each function, a crate of type `cdylib` or
//! `staticlib`, a header, an ordinal in place of the Rust [`Device`] of [`ctx_create`], a number of
//! the interface's version, and a catch of panics in each function: one that leaves an `extern "C"`
//! function ends the process.
//!
//! The server gives raw pointers and a raw stream, captures whole decode steps, and keeps all
//! memory: [`Info`] gives the sizes before it allocates. Rows are received by expert ("expanded"):
//! a row for each local expert of a token, segments aligned to [`Params::expert_alignment`].
//! Weights of rows are received with them; the server applies them in the experts' epilogue.
//!
//! Decoding is in low latency: rows land in the server's memory, and the combine reads its rows
//! there. Prefill is in high throughput: peers write rows to the pool. Tables and the pool's rows
//! keep their addresses, which [`Info`] has. Nothing is copied for a server that uses these
//! addresses. For a server with memory of its own, tables are copied, and a kernel copies prefill's
//! rows at a cost in proportion to them.

use std::ffi::{CString, c_char, c_void};
use std::time::Duration;

use epoxide::driver::{Device, DevicePtr, RawStream, Stream};
use epoxide::group::{MeshGroup, UniqueId};
use epoxide::low_latency;
use epoxide::throughput::{self, CombineRequest, Counts, DispatchRequest};
use epoxide::{DType, Element, Error, Result, StreamOrder, Tensor, TypedTensor};

/// How long ranks wait for each other.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The sizes of a model.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Params {
    /// Most tokens of a rank in a prefill call.
    pub max_tokens: u32,
    /// Most tokens of a rank in a decode call.
    pub max_decode_tokens: u32,
    pub hidden: u32,
    pub num_topk: u32,
    pub num_experts: u32,
    pub expert_alignment: u32,
}

/// Sizes of the server's memory for one kind of call, and what the context has already.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Memory {
    /// Most rows that a dispatch brings, padding included.
    pub worst_expanded: u64,
    /// bf16 `[worst_expanded, hidden]`: what `recv_x` may be; 0 in decoding, where it may be
    /// anything.
    pub recv_x: u64,
    /// f32 `[worst_expanded]`: where weights of rows are after a dispatch.
    pub recv_topk_weights: u64,
    /// i32 `[worst_expanded]`: where the tokens' indices on their source ranks are, -1 in padding.
    pub recv_src_idx: u64,
    /// i32 `[worst_expanded, 2]`: where the source ranks are, and the tokens' entries.
    pub recv_src_entry: u64,
    /// i32 `[local_experts + 1]`: where `psum_expert` is; 0 in prefill, where each call has another
    /// one.
    pub psum_expert: u64,
    /// bf16 `[worst_expanded, hidden]`: what `x` of a combine may be; 0 in decoding, where it may
    /// be anything.
    pub combine_x: u64,
}

/// The numbers that a server needs before it allocates.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Info {
    pub decode: Memory,
    pub prefill: Memory,
    pub local_experts: u32,
    pub reserved: u32,
}

/// The buffer of decode calls.
struct Decode {
    buffer: low_latency::Buffer,
    place: low_latency::Place,
    /// The dispatch that no combine has answered yet.
    sent: Option<low_latency::Detached<low_latency::Received<'static>>>,
}

/// The buffer of prefill calls.
struct Prefill {
    buffer: throughput::Buffer,
    place: throughput::Place,
    /// The dispatch that no combine has answered yet.
    sent: Option<throughput::Detached>,
}

/// A rank.
pub struct Context {
    params: Params,
    info: Info,
    device: Device,
    _group: MeshGroup,
    decode: Decode,
    prefill: Prefill,
    /// The stream of the last call.
    stream: Option<Stream>,
    error: CString,
}

impl Context {
    fn new(
        device: Device,
        id: [u8; UniqueId::BYTES],
        num_ranks: u32,
        rank: u32,
        params: Params,
    ) -> Result<Context> {
        let group = UniqueId::from_bytes(id)?.group(rank, num_ranks, TIMEOUT)?;
        let local_experts = params.num_experts / num_ranks.max(1);

        let shape = low_latency::Shape {
            max_tokens: params.max_decode_tokens,
            hidden: params.hidden.into(),
            num_topk: params.num_topk,
            num_experts: params.num_experts,
        };
        let worst_expanded = shape.most_rows_by_expert(num_ranks, params.expert_alignment);
        let options = low_latency::Options::new(shape).rows_by_expert(worst_expanded).timeout(TIMEOUT);
        let buffer = low_latency::Buffer::new(device.clone(), &group, options)?;
        let place = buffer.place(0)?;
        let tables = place.by_expert_ptrs();
        let at = |of: fn(low_latency::ByExpertPtrs) -> DevicePtr| tables.map_or(0, |tables| of(tables).0);
        let of_decode = Memory {
            worst_expanded,
            recv_topk_weights: at(|tables| tables.recv_topk_weights),
            recv_src_idx: at(|tables| tables.recv_src_idx),
            recv_src_entry: at(|tables| tables.recv_src_entry),
            psum_expert: at(|tables| tables.psum),
            ..Memory::default()
        };
        let decode = Decode { buffer, place, sent: None };

        let shape = throughput::Shape {
            max_tokens: params.max_tokens,
            hidden: params.hidden.into(),
            dtype: DType::Bf16,
            max_topk: params.num_topk,
            max_scales: 0,
        };
        let worst_expanded = shape.most_rows_by_expert(num_ranks, local_experts, params.expert_alignment);
        let options = throughput::Options::new(shape).rows_by_expert(worst_expanded).timeout(TIMEOUT);
        let buffer = throughput::Buffer::new(device.clone(), &group, options)?;
        let place = buffer.place(0)?;
        let of_prefill = Memory {
            worst_expanded,
            recv_x: place.recv_x_ptr().0,
            recv_topk_weights: place.recv_topk_weights_ptr().0,
            combine_x: place.combine_rows_ptr().0,
            ..Memory::default()
        };
        let prefill = Prefill { buffer, place, sent: None };

        let info = Info { decode: of_decode, prefill: of_prefill, local_experts, reserved: 0 };
        let error = CString::default();
        Ok(Context { params, info, device, _group: group, decode, prefill, stream: None, error })
    }

    /// Makes the server's stream that of the next call.
    ///
    /// # Safety
    /// It is a stream of this device that outlives the context.
    unsafe fn on(&mut self, raw: *mut c_void) -> Result<()> {
        if self.stream.as_ref().is_none_or(|stream| stream.raw().0 != raw) {
            // SAFETY: the caller vouches for the stream.
            self.stream = Some(unsafe { Stream::adopt(&self.device, RawStream(raw))? });
        }
        Ok(())
    }
}

/// A tensor of the server's.
///
/// # Safety
/// The memory is live until the stream has passed the call, and as long as a graph that recorded
/// it.
unsafe fn tensor<'a, T: Element>(at: u64, shape: &[u64]) -> TypedTensor<'a, T> {
    // SAFETY: the caller vouches for the memory.
    unsafe { TypedTensor::from_raw(DevicePtr(at), shape) }
}

/// Copies a table to the server's address; does nothing for 0 or the table's own address.
///
/// # Safety
/// The conditions of [`tensor`] hold for `to`.
unsafe fn copy(stream: &Stream, to: u64, table: &Tensor) -> Result<()> {
    let bytes = table.rows() * table.row_bytes();
    if to == 0 || to == table.ptr().0 || bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller vouches for the memory at `to`; the table's is behind work on the stream.
    unsafe { stream.copy(DevicePtr(to), table.ptr(), bytes) }
}

/// Device addresses that a dispatch reads and writes; the server's. An output that is 0 is left
/// out, and one that is the address in [`Memory`] is not copied.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Dispatch {
    /// In: bf16 `[num_tokens, hidden]`.
    pub x: u64,
    /// In: i32 `[num_tokens, num_topk]`, -1 for none.
    pub topk_idx: u64,
    /// In: f32 `[num_tokens, num_topk]`.
    pub topk_weights: u64,
    pub num_tokens: u64,
    /// Out: bf16 `[worst_expanded, hidden]`; not 0.
    pub recv_x: u64,
    /// Out: f32 `[worst_expanded]`.
    pub recv_topk_weights: u64,
    /// Out: i32 `[worst_expanded]`, the tokens' indices on their source ranks.
    pub recv_src_idx: u64,
    /// Out: i32 `[worst_expanded, 2]`, source ranks and entries. With `recv_src_idx` it stands for
    /// DeepEP's `recv_src_metadata`. The combine needs neither.
    pub recv_src_entry: u64,
    /// Out: i32 `[local_experts + 1]`, the aligned start of each expert's segment plus its rows;
    /// then the rows of all segments.
    pub psum_expert: u64,
    /// Out, in prefill alone: i32 `[num_ranks]`, tokens received from ranks up to and including
    /// each, counted once. Decoding has no such sums and does not write the memory: the row of
    /// token t from rank s is always `s * max_decode_tokens + t`. DeepEP's combine requires
    /// `psum_rank` and the metadata, this one does not.
    pub psum_rank: u64,
}

impl Dispatch {
    /// The inputs as tensors.
    ///
    /// # Safety
    /// The conditions of [`tensor`] hold for all addresses.
    unsafe fn inputs<'a>(
        &self,
        params: &Params,
    ) -> (TypedTensor<'a, u16>, TypedTensor<'a, i32>, TypedTensor<'a, f32>) {
        let entries = [self.num_tokens, params.num_topk.into()];
        // SAFETY: the caller vouches for the memory.
        unsafe {
            (
                tensor(self.x, &[self.num_tokens, params.hidden.into()]),
                tensor(self.topk_idx, &entries),
                tensor(self.topk_weights, &entries),
            )
        }
    }
}

impl Decode {
    /// Sends rows to the servers' memory, and copies tables to the addresses that the server gives.
    ///
    /// # Safety
    /// The conditions of [`tensor`] hold for all addresses.
    unsafe fn dispatch(
        &mut self,
        params: &Params,
        info: &Info,
        stream: &Stream,
        call: &Dispatch,
    ) -> Result<()> {
        // A combine must not answer an earlier dispatch where this one fails.
        self.sent = None;
        // SAFETY: the caller vouches for the memory.
        let ((x, ids, weights), recv_x) = unsafe {
            let rows = [info.decode.worst_expanded, params.hidden.into()];
            (call.inputs(params), tensor::<u16>(call.recv_x, &rows))
        };
        let request = low_latency::DispatchRequest::new(&x, &ids).topk_weights(&weights);
        let request = request.by_expert(params.expert_alignment).recv_x(&recv_x);
        let received = self.buffer.dispatch(&mut self.place, request, StreamOrder::on(stream))?;
        if let Some(rows) = &received.by_expert {
            // SAFETY: the caller vouches for the memory.
            unsafe {
                copy(stream, call.psum_expert, &rows.experts.psum())?;
                copy(stream, call.recv_topk_weights, &rows.recv_topk_weights)?;
                copy(stream, call.recv_src_idx, &rows.recv_src_idx)?;
                copy(stream, call.recv_src_entry, &rows.recv_src_entry)?;
            }
        }
        self.sent = Some(received.detach());
        Ok(())
    }

    /// Sums the experts' rows, unweighted, into `out`.
    fn combine(&mut self, stream: &Stream, x: &Tensor, out: &Tensor) -> Result<()> {
        let Some(sent) = self.sent.take() else { return no_dispatch() };
        let received = sent.attach(&mut self.place)?;
        let request = low_latency::CombineRequest::by_expert(x).unweighted();
        self.buffer.combine_into(received, request, out, StreamOrder::on(stream)).map(|_| ())
    }
}

impl Prefill {
    /// Sends rows. The host waits for the counts of all ranks, so that the outputs have as many
    /// rows as were received.
    ///
    /// # Safety
    /// The conditions of [`tensor`] hold for all addresses.
    unsafe fn send(&mut self, params: &Params, stream: &Stream, call: &Dispatch) -> Result<()> {
        // As in `Decode::dispatch`.
        self.sent = None;
        let order = StreamOrder::on(stream);
        // SAFETY: the caller vouches for the memory.
        let (x, ids, weights) = unsafe { call.inputs(params) };
        let layout = self.buffer.get_dispatch_layout(&ids, params.num_experts, order)?;
        let request = DispatchRequest::new(&x, &layout).topk_weights(&weights).counts(Counts::Exact);
        let request = request.by_expert(params.expert_alignment);
        self.sent = Some(self.buffer.dispatch(&mut self.place, request, order)?.detach());
        Ok(())
    }

    /// Moves rows to the server's address. Rows that are already there are not moved.
    ///
    /// # Safety
    /// The conditions of [`tensor`] hold for all addresses.
    unsafe fn receive(&mut self, info: &Info, rank: u32, stream: &Stream, call: &Dispatch) -> Result<()> {
        let Some(sent) = &self.sent else { return no_dispatch() };
        let received = sent.at(&self.place)?;
        if call.recv_x != info.prefill.recv_x {
            // SAFETY: the caller vouches for the memory.
            let x = unsafe { tensor::<u16>(call.recv_x, received.recv_x.shape()) };
            self.buffer.copy_received(received, &x, None, StreamOrder::on(stream))?;
        }
        // SAFETY: the caller vouches for the memory.
        unsafe {
            for (to, table) in [
                (call.recv_topk_weights, received.recv_topk_weights.as_deref()),
                (call.recv_src_idx, received.recv_src_idx.as_deref()),
                (call.recv_src_entry, received.recv_src_entry.as_deref()),
                (call.psum_expert, received.handle.by_expert().map(|rows| rows.psum()).as_deref()),
            ] {
                table.map_or(Ok(()), |table| copy(stream, to, table))?;
            }
            // This rank's column of the table of all ranks.
            if let (true, Some(handle)) = (call.psum_rank != 0, received.handle.intranode()) {
                let table = handle.rank_prefix_matrix();
                for source in 0..table.rows() {
                    let from = table.ptr().add(source * table.row_stride() + u64::from(rank) * 4);
                    stream.copy(DevicePtr(call.psum_rank + source * 4), from, 4)?;
                }
            }
        }
        Ok(())
    }

    /// Sums the experts' rows, unweighted, into `out`. `x` is the address of the rows.
    ///
    /// # Safety
    /// The conditions of [`tensor`] hold for `x`.
    unsafe fn combine(&mut self, info: &Info, stream: &Stream, x: u64, out: &Tensor) -> Result<()> {
        let Some(sent) = self.sent.take() else { return no_dispatch() };
        let (order, hidden) = (StreamOrder::on(stream), out.columns());
        let rows = sent.at(&self.place)?.recv_x.rows();
        if x == info.prefill.combine_x {
            let rows = self.place.combine_rows(DType::Bf16, rows, hidden)?;
            self.buffer.combine_into(CombineRequest::new(&rows, sent.handle()), out, None, order)?;
        } else {
            // SAFETY: the caller vouches for the memory.
            let rows: Tensor<'_> = unsafe { tensor::<u16>(x, &[rows, hidden]) }.into();
            self.buffer.combine_into(CombineRequest::new(&rows, sent.handle()), out, None, order)?;
        }
        Ok(())
    }
}

fn no_stream() -> Result<()> {
    Err(Error::Unavailable { what: "the stream".into(), reason: "no call has given one yet".into() })
}

fn no_dispatch() -> Result<()> {
    let reason = "no dispatch waits for it: make one first".into();
    Err(Error::Unavailable { what: "the rows".into(), reason })
}

/// 0, or -1 with the reason in [`ctx_error`].
fn code(context: &mut Context, outcome: Result<()>) -> i32 {
    let Err(error) = outcome else { return 0 };
    context.error = CString::new(error.to_string().replace('\0', " ")).unwrap_or_default();
    -1
}

/// Makes the id of a group, 128 bytes; one rank calls it.
///
/// # Safety
/// `id` has room for 128 bytes.
pub unsafe extern "C" fn unique_id(id: *mut u8) -> i32 {
    let Ok(made) = UniqueId::new() else { return -1 };
    // SAFETY: the caller vouches for it.
    unsafe { id.copy_from_nonoverlapping(made.bytes().as_ptr(), UniqueId::BYTES) };
    0
}

/// Joins the group as `rank`; null if that fails. Collective. `device` stands in for the thread's
/// current device, on a GPU `CudaDevice::current`.
///
/// # Safety
/// `id` has 128 bytes.
pub unsafe extern "C" fn ctx_create(
    device: &Device,
    id: *const u8,
    num_ranks: u32,
    rank: u32,
    params: Params,
) -> *mut Context {
    let mut bytes = [0; UniqueId::BYTES];
    // SAFETY: the caller vouches for it.
    unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(id, UniqueId::BYTES) };
    match Context::new(device.clone(), bytes, num_ranks, rank, params) {
        Ok(context) => Box::into_raw(Box::new(context)),
        Err(error) => {
            eprintln!("{error}");
            std::ptr::null_mut()
        }
    }
}

/// Frees a context.
///
/// # Safety
/// [`ctx_create`] made it, and nothing uses it any more.
pub unsafe extern "C" fn ctx_destroy(context: *mut Context) {
    // SAFETY: the caller vouches for it.
    drop(unsafe { Box::from_raw(context) });
}

/// The sizes of the server's memory.
pub extern "C" fn info(context: &Context) -> Info {
    context.info
}

/// The reason of the last -1; valid until the next call.
pub extern "C" fn ctx_error(context: &Context) -> *const c_char {
    context.error.as_ptr()
}

/// Begins (1) and ends (0) the run of a step that is captured next: the recording then finds its
/// memory.
pub extern "C" fn warm_up(context: &mut Context, begins: u32) {
    let buffer = &mut context.decode.buffer;
    if begins != 0 { buffer.begin_warmup() } else { buffer.end_warmup() }
}

/// Runs `call` on the server's stream, with all but that of the context.
///
/// # Safety
/// The stream is one of this device and outlives the context.
unsafe fn on_stream(
    context: &mut Context,
    stream: *mut c_void,
    call: impl FnOnce(&mut Context, &Stream) -> Result<()>,
) -> i32 {
    // SAFETY: the caller vouches for the stream.
    let outcome = unsafe { context.on(stream) }.and_then(|()| {
        let Some(stream) = context.stream.take() else { return no_stream() };
        let outcome = call(context, &stream);
        context.stream = Some(stream);
        outcome
    });
    code(context, outcome)
}

/// Receives all rows by expert without waiting. Can be captured.
///
/// # Safety
/// The stream outlives the context. All addresses are live until the stream has passed the call,
/// and as long as a graph that recorded it.
pub unsafe extern "C" fn decode_dispatch(context: &mut Context, stream: *mut c_void, call: &Dispatch) -> i32 {
    // SAFETY: the caller vouches for the stream and the addresses.
    unsafe {
        on_stream(context, stream, |context, stream| {
            context.decode.dispatch(&context.params, &context.info, stream, call)
        })
    }
}

/// Sums rows by expert, bf16 `[worst_expanded, hidden]`, unweighted, into `out` bf16 `[num_tokens,
/// hidden]`. Can be captured.
///
/// # Safety
/// The same as [`decode_dispatch`].
pub unsafe extern "C" fn decode_combine(
    context: &mut Context,
    stream: *mut c_void,
    x: u64,
    num_tokens: u64,
    out: u64,
) -> i32 {
    // SAFETY: the caller vouches for the stream and the addresses.
    unsafe {
        on_stream(context, stream, |context, stream| {
            let hidden = u64::from(context.params.hidden);
            let x = tensor::<u16>(x, &[context.info.decode.worst_expanded, hidden]).into();
            let out = tensor::<u16>(out, &[num_tokens, hidden]).into();
            context.decode.combine(stream, &x, &out)
        })
    }
}

/// Prefill, first part: sends rows. It blocks until all ranks have made the call, because the host
/// needs their counts.
///
/// # Safety
/// The same as [`decode_dispatch`].
pub unsafe extern "C" fn prefill_send(context: &mut Context, stream: *mut c_void, call: &Dispatch) -> i32 {
    // SAFETY: the caller vouches for the stream and the addresses.
    unsafe {
        on_stream(context, stream, |context, stream| context.prefill.send(&context.params, stream, call))
    }
}

/// Prefill, second part: the number of received rows of all segments, for which the first part has
/// waited; -1 without a dispatch.
pub extern "C" fn prefill_wait_counts(context: &mut Context) -> i64 {
    let rows = match (&context.prefill.sent, &context.stream) {
        (Some(sent), Some(stream)) => sent.handle().num_recv_tokens(stream).map(i64::from),
        _ => no_dispatch().map(|()| -1),
    };
    rows.unwrap_or_else(|error| code(context, Err(error)).into())
}

/// Prefill, third part: moves as many rows as the second part returned to the server's address.
///
/// # Safety
/// The same as [`decode_dispatch`].
pub unsafe extern "C" fn prefill_recv(context: &mut Context, stream: *mut c_void, call: &Dispatch) -> i32 {
    // SAFETY: the caller vouches for the stream and the addresses.
    unsafe {
        on_stream(context, stream, |context, stream| {
            let rank = context.prefill.buffer.rank();
            context.prefill.receive(&context.info, rank, stream, call)
        })
    }
}

/// Prefill, last part: sums all received rows by expert, unweighted, into `out` bf16
/// `[num_tokens, hidden]`.
///
/// # Safety
/// The same as [`decode_dispatch`].
pub unsafe extern "C" fn prefill_combine(
    context: &mut Context,
    stream: *mut c_void,
    x: u64,
    num_tokens: u64,
    out: u64,
) -> i32 {
    // SAFETY: the caller vouches for the stream and the addresses.
    unsafe {
        on_stream(context, stream, |context, stream| {
            let out = tensor::<u16>(out, &[num_tokens, context.params.hidden.into()]).into();
            context.prefill.combine(&context.info, stream, x, &out)
        })
    }
}
