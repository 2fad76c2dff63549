//! The C interface that a server in the manner of PegaInfer asks of a library of expert parallelism
//! (`DeepEpAbi`), over epoxide's public interface.
//!
//! The server gives raw pointers and a raw stream, captures whole decode steps, and keeps all
//! memory: [`Info`] gives the sizes before it allocates. Rows come by expert ("expanded"): a row
//! for each local expert of a token, segments aligned to [`Params::expert_alignment`]. Weights of
//! rows by expert come beside them; the server applies them in the experts' epilogue.
//!
//! No call allocates within a capture, and none copies rows: peers write to the pool, whose
//! addresses [`Info`] has. A server that gives memory of its own for rows instead gets them copied,
//! by a kernel whose cost follows rows.

use std::ffi::{CString, c_char, c_void};
use std::time::Duration;

use epoxide::driver::{Device, DevicePtr, RawStream, Stream};
use epoxide::group::{MeshGroup, UniqueId};
use epoxide::throughput::{Buffer, CombineRequest, Counts, Detached, DispatchRequest, Options, Place, Shape};
use epoxide::{DType, Element, Error, Result, StreamOrder, Tensor, TypedTensor};

/// How long ranks wait for each other.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The sizes of a model.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Params {
    /// Most tokens of a rank in a call.
    pub max_tokens: u32,
    pub hidden: u32,
    pub num_topk: u32,
    pub num_experts: u32,
    pub expert_alignment: u32,
}

/// The sizes of a server's memory, and where the pool has rows already.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Info {
    /// Most rows that a dispatch brings, padding included.
    pub worst_expanded: u64,
    pub local_experts: u32,
    pub reserved: u32,
    /// bf16 `[worst_expanded, hidden]`: what `recv_x` may be, so that nothing is copied.
    pub recv_x: u64,
    /// f32 `[worst_expanded]`: where weights of rows are after a dispatch.
    pub recv_topk_weights: u64,
    /// bf16 `[worst_expanded, hidden]`: what `x` of a combine may be, so that nothing is copied.
    pub combine_x: u64,
}

/// A rank.
pub struct Context {
    params: Params,
    info: Info,
    device: Device,
    _group: MeshGroup,
    buffer: Buffer,
    place: Place,
    /// The dispatch that no combine has answered yet.
    sent: Option<Detached>,
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
        let shape = Shape {
            max_tokens: params.max_tokens,
            hidden: params.hidden.into(),
            dtype: DType::Bf16,
            max_topk: params.num_topk,
            max_scales: 0,
        };
        let local_experts = params.num_experts / num_ranks.max(1);
        let worst_expanded = shape.most_rows_by_expert(num_ranks, local_experts, params.expert_alignment);
        let group = UniqueId::from_bytes(id)?.group(rank, num_ranks, TIMEOUT)?;
        let options = Options::new(shape).rows_by_expert(worst_expanded).timeout(TIMEOUT);
        let buffer = Buffer::new(device.clone(), &group, options)?;
        let place = buffer.place(0)?;
        let info = Info {
            worst_expanded,
            local_experts,
            reserved: 0,
            recv_x: place.recv_x_ptr().0,
            recv_topk_weights: place.recv_topk_weights_ptr().0,
            combine_x: place.combine_rows_ptr().0,
        };
        Ok(Context {
            params,
            info,
            device,
            _group: group,
            buffer,
            place,
            sent: None,
            stream: None,
            error: CString::default(),
        })
    }

    /// Makes the server's stream that of the next call.
    ///
    /// # Safety
    /// It is a stream of this device that outlives the context.
    unsafe fn on(&mut self, raw: *mut c_void) -> Result<()> {
        if self.stream.as_ref().is_none_or(|stream| stream.raw().0 != raw) {
            // SAFETY: passed on to the caller.
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
    // SAFETY: passed on to the caller.
    unsafe { TypedTensor::from_raw(DevicePtr(at), shape) }
}

/// Device addresses that a dispatch reads and writes; the server's.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Dispatch {
    /// In: bf16 `[num_tokens, hidden]`.
    pub x: u64,
    /// In: i32 `[num_tokens, num_topk]`, -1 for none.
    pub topk_idx: u64,
    /// In: f32 `[num_tokens, num_topk]`.
    pub topk_weights: u64,
    pub num_tokens: u64,
    /// Out: bf16 `[worst_expanded, hidden]`; [`Info::recv_x`] spares the copy.
    pub recv_x: u64,
    /// Out: f32 `[worst_expanded]`; [`Info::recv_topk_weights`] spares the copy.
    pub recv_topk_weights: u64,
    /// Out: i32 `[local_experts + 1]`, the aligned start of each expert's segment plus its rows;
    /// then the rows of all segments.
    pub psum_expert: u64,
}

impl Context {
    /// Sends rows; the host waits for the counts where it is told to.
    ///
    /// # Safety
    /// The promise of [`tensor`], for all addresses.
    unsafe fn send(&mut self, call: &Dispatch, counts: Counts) -> Result<()> {
        let Context { params, buffer, place, stream: Some(stream), .. } = self else { return no_stream() };
        let order = StreamOrder::on(stream);
        let entries = [call.num_tokens, params.num_topk.into()];
        // SAFETY: passed on to the caller.
        let (x, ids, weights) = unsafe {
            (
                tensor::<u16>(call.x, &[call.num_tokens, params.hidden.into()]),
                tensor::<i32>(call.topk_idx, &entries),
                tensor::<f32>(call.topk_weights, &entries),
            )
        };
        let layout = buffer.get_dispatch_layout(&ids, params.num_experts, order)?;
        let request = DispatchRequest::new(&x, &layout).topk_weights(&weights).counts(counts);
        let request = request.by_expert(params.expert_alignment);
        self.sent = Some(buffer.dispatch(place, request, order)?.detach());
        Ok(())
    }

    /// Brings rows to where the server wants them. Nothing moves that is there already.
    ///
    /// # Safety
    /// The promise of [`tensor`], for all addresses.
    unsafe fn receive(&mut self, call: &Dispatch) -> Result<()> {
        let Context { info, buffer, place, sent: Some(sent), stream: Some(stream), .. } = self else {
            return no_dispatch();
        };
        let received = sent.at(place)?;
        if call.recv_x != info.recv_x {
            let rows = received.recv_x.rows();
            // SAFETY: passed on to the caller.
            let (x, weights) = unsafe {
                (
                    tensor::<u16>(call.recv_x, &[rows, received.recv_x.columns()]),
                    tensor::<f32>(call.recv_topk_weights, &[rows]),
                )
            };
            buffer.copy_received(received, &x, Some(&weights), StreamOrder::on(stream))?;
        }
        if let Some(rows) = received.handle.by_expert() {
            let psum = rows.psum();
            // SAFETY: passed on to the caller, for as many bytes as the table has.
            unsafe { stream.copy(DevicePtr(call.psum_expert), psum.ptr(), psum.rows() * 4)? };
        }
        Ok(())
    }

    /// Sums the experts' rows, unweighted, into `out`.
    ///
    /// # Safety
    /// The promise of [`tensor`], for all addresses.
    unsafe fn combine(&mut self, x: u64, num_tokens: u64, out: u64) -> Result<()> {
        let Context { params, info, buffer, place, stream: Some(stream), .. } = self else {
            return no_stream();
        };
        let Some(sent) = self.sent.take() else { return no_dispatch() };
        let (hidden, order) = (u64::from(params.hidden), StreamOrder::on(stream));
        let rows = sent.at(place)?.recv_x.rows();
        // SAFETY: passed on to the caller.
        let out: Tensor<'_> = unsafe { tensor::<u16>(out, &[num_tokens, hidden]) }.into();
        if x == info.combine_x {
            let rows = place.combine_rows(DType::Bf16, rows, hidden)?;
            buffer.combine_into(CombineRequest::new(&rows, sent.handle()), &out, None, order)?;
        } else {
            // SAFETY: passed on to the caller.
            let rows: Tensor<'_> = unsafe { tensor::<u16>(x, &[rows, hidden]) }.into();
            buffer.combine_into(CombineRequest::new(&rows, sent.handle()), &out, None, order)?;
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
    // SAFETY: passed on to the caller.
    unsafe { id.copy_from_nonoverlapping(made.bytes().as_ptr(), UniqueId::BYTES) };
    0
}

/// Joins the group as `rank`; null where that fails. Collective. `device` stands in for the
/// thread's current device, which `CudaDevice::current` is on a GPU.
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
    // SAFETY: passed on to the caller.
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
    // SAFETY: passed on to the caller.
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
pub extern "C" fn rehearse(context: &mut Context, begins: u32) {
    if begins != 0 { context.buffer.begin_rehearsal() } else { context.buffer.end_rehearsal() }
}

/// Waits for nothing: brings rows by expert, as many as come. Can be captured.
///
/// `psum_rank` and `recv_src_metadata` of DeepEP are for its combine alone; here the context has
/// what the combine needs.
///
/// # Safety
/// The stream outlives the context. All addresses are live until the stream has passed the call,
/// and as long as a graph that recorded it.
pub unsafe extern "C" fn decode_dispatch(context: &mut Context, stream: *mut c_void, call: &Dispatch) -> i32 {
    let counts = Counts::OnDevice { capacity: context.info.worst_expanded };
    // SAFETY: passed on to the caller.
    let outcome = unsafe {
        context.on(stream).and_then(|()| context.send(call, counts)).and_then(|()| context.receive(call))
    };
    code(context, outcome)
}

/// Sums rows by expert, unweighted, into `out` bf16 `[num_tokens, hidden]`. Can be captured.
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
    // SAFETY: passed on to the caller.
    let outcome = unsafe { context.on(stream).and_then(|()| context.combine(x, num_tokens, out)) };
    code(context, outcome)
}

/// Prefill, first part: sends rows. The counts are on their way to the host when it returns.
///
/// # Safety
/// The same as [`decode_dispatch`].
pub unsafe extern "C" fn prefill_send(context: &mut Context, stream: *mut c_void, call: &Dispatch) -> i32 {
    // SAFETY: passed on to the caller.
    let outcome = unsafe { context.on(stream).and_then(|()| context.send(call, Counts::Exact)) };
    code(context, outcome)
}

/// Prefill, second part: the rows of all segments that come; -1 where the dispatch failed.
pub extern "C" fn prefill_wait_counts(context: &mut Context) -> i64 {
    let rows = match (&context.sent, &context.stream) {
        (Some(sent), Some(stream)) => sent.handle().num_recv_tokens(stream).map(i64::from),
        _ => no_dispatch().map(|()| -1),
    };
    rows.unwrap_or_else(|error| code(context, Err(error)).into())
}

/// Prefill, third part: brings rows to where the server wants them, as many as it was told.
///
/// # Safety
/// The same as [`decode_dispatch`].
pub unsafe extern "C" fn prefill_recv(context: &mut Context, stream: *mut c_void, call: &Dispatch) -> i32 {
    // SAFETY: passed on to the caller.
    let outcome = unsafe { context.on(stream).and_then(|()| context.receive(call)) };
    code(context, outcome)
}
