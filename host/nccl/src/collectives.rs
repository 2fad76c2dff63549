//! The operations on device tensors.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use epoxide_base::deadline;

use super::communicator::Communicator;
use super::ffi::{Code, Comm, Functions, Stream as RawStream};
use super::follow::Followed;
use super::in_flight::InFlight;
use crate::driver::{Event, Stream};
use crate::error::{Error, Result};
use epoxide::{DType, Tensor};
use epoxide_group::internal::{Operation, work_of};
use epoxide_group::{ReduceOp, Work};

/// One send or receive of [`Communicator::batch_send_recv`].
#[derive(Debug, Clone, Copy)]
pub enum P2p<'a> {
    /// Sends a tensor.
    Send {
        /// The receiver.
        to: u32,
        /// The data to send.
        tensor: &'a Tensor<'a>,
    },
    /// Receives into a tensor of as many elements.
    Recv {
        /// The sender.
        from: u32,
        /// The memory to overwrite.
        tensor: &'a Tensor<'a>,
    },
}

/// A contiguous piece of device memory as NCCL takes it.
#[derive(Debug, Clone, Copy)]
struct Piece {
    address: u64,
    count: u64,
    dtype: c_int,
    element_bytes: u64,
}

impl Piece {
    fn read(&self) -> *const c_void {
        self.address as *const c_void
    }

    fn write(&self) -> *mut c_void {
        self.address as *mut c_void
    }

    fn bytes(&self) -> u64 {
        self.count * self.element_bytes
    }

    /// `count` elements from element `first` on.
    fn part(self, first: u64, count: u64) -> Piece {
        Piece { address: self.address + first * self.element_bytes, count, ..self }
    }
}

/// `ncclDataType_t` of a dtype; those that NCCL only moves are bytes.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::Fp8E4m3 | DType::Fp8E5m2 | DType::Ue8m0 | DType::Fp4E2m1x2 => 1,
        DType::Bool | DType::U8 => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::Bf16 => 9,
    }
}

/// `ncclRedOp_t` of an operation on tensors of `dtype`.
fn reduction(op: ReduceOp, dtype: DType) -> Result<c_int> {
    if let DType::Fp8E4m3 | DType::Bool = dtype {
        let expected = "bf16, f32, i32 or i64: fp8 and bool are moved, not reduced".to_owned();
        return Err(Error::DType { tensor: "tensor".into(), have: dtype.to_string(), expected });
    }
    match op {
        ReduceOp::Sum => Ok(0),
        ReduceOp::Product => Ok(1),
        ReduceOp::Max => Ok(2),
        ReduceOp::Min => Ok(3),
        ReduceOp::Average => Ok(4),
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => Err(Error::argument(
            "op",
            op,
            "NCCL has sum, product, min, max and average; reduce on the host for others",
        )),
    }
}

fn piece(name: &'static str, tensor: &Tensor<'_>) -> Result<Piece> {
    if !tensor.is_contiguous() {
        let rule = format!("rows must be contiguous, {} bytes apart; copy them together", tensor.row_bytes());
        return Err(Error::argument(name, format!("row stride {} bytes", tensor.row_stride()), rule));
    }
    Ok(Piece {
        address: tensor.ptr().0,
        count: tensor.rows() * tensor.columns(),
        dtype: data_type(tensor.dtype()),
        element_bytes: tensor.dtype().size(),
    })
}

/// Two tensors of one dtype, of which `larger` has `ranks` times as many elements as `smaller`.
fn parted(
    (smaller_name, smaller): (&'static str, &Tensor<'_>),
    (larger_name, larger): (&'static str, &Tensor<'_>),
    ranks: u32,
) -> Result<(Piece, Piece)> {
    if smaller.dtype() != larger.dtype() {
        let (have, expected) =
            (larger.dtype().to_string(), format!("{}, as {smaller_name} has", smaller.dtype()));
        return Err(Error::DType { tensor: larger_name.into(), have, expected });
    }
    let (small, large) = (piece(smaller_name, smaller)?, piece(larger_name, larger)?);
    if small.count.checked_mul(u64::from(ranks)) != Some(large.count) {
        let expected = format!("{ranks} times the {} elements of {smaller_name}", small.count);
        return Err(Error::Shape { tensor: larger_name.into(), have: larger.shape().to_vec(), expected });
    }
    Ok((small, large))
}

/// An operation's entry in the flight recorder.
struct Description {
    operation: Operation,
    bytes: u64,
    root: Option<u32>,
    reduction: Option<String>,
}

impl Communicator {
    /// Reduces `tensor` elementwise, into that of every rank.
    ///
    /// Like all operations, it runs on the device in the order of `stream`, and this returns once
    /// it is enqueued. [`Work::wait`] waits for its end, and
    /// [`Config::timeout`](super::Config::timeout) is its deadline. The tensor may be dropped
    /// before.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Shape`] and [`Error::DType`] for wrong arguments; these end
    /// nothing. [`Error::Unavailable`] while the stream is captured: a recording does not limit the
    /// communicator's lifetime. NCCL's errors and the deadline end the communicator.
    pub fn all_reduce(&self, tensor: &Tensor<'_>, op: ReduceOp, stream: &Stream) -> Result<Work<()>> {
        let (data, op_code) = (piece("tensor", tensor)?, reduction(op, tensor.dtype())?);
        let description = self.describe(Operation::AllReduce, data, None, Some((op, tensor.dtype())));
        // SAFETY: `launch` passes a live communicator and a live stream; the tensor is live until
        // the stream has passed its uses.
        self.launch(description, stream, move |nccl, comm, stream| unsafe {
            (nccl.ncclAllReduce)(
                data.read(),
                data.write(),
                data.count as usize,
                data.dtype,
                op_code,
                comm,
                stream,
            )
        })
    }

    /// Reduces `tensor` elementwise into that of `root`; the others' are not written. See
    /// [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`].
    pub fn reduce(&self, root: u32, tensor: &Tensor<'_>, op: ReduceOp, stream: &Stream) -> Result<Work<()>> {
        self.check_rank("root", root)?;
        let (data, op_code) = (piece("tensor", tensor)?, reduction(op, tensor.dtype())?);
        let description = self.describe(Operation::Reduce, data, Some(root), Some((op, tensor.dtype())));
        let root = root as c_int;
        // SAFETY: as in `all_reduce`.
        self.launch(description, stream, move |nccl, comm, stream| unsafe {
            (nccl.ncclReduce)(
                data.read(),
                data.write(),
                data.count as usize,
                data.dtype,
                op_code,
                root,
                comm,
                stream,
            )
        })
    }

    /// Overwrites `tensor` with that of `root`, which has as many elements. See
    /// [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`].
    pub fn broadcast(&self, root: u32, tensor: &Tensor<'_>, stream: &Stream) -> Result<Work<()>> {
        self.check_rank("root", root)?;
        let data = piece("tensor", tensor)?;
        let description = self.describe(Operation::Broadcast, data, Some(root), None);
        let root = root as c_int;
        // SAFETY: as in `all_reduce`.
        self.launch(description, stream, move |nccl, comm, stream| unsafe {
            (nccl.ncclBroadcast)(
                data.read(),
                data.write(),
                data.count as usize,
                data.dtype,
                root,
                comm,
                stream,
            )
        })
    }

    /// Every rank's `input`, by rank, in `output`, which has [`Communicator::size`] times its
    /// elements. See [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`].
    pub fn all_gather(&self, output: &Tensor<'_>, input: &Tensor<'_>, stream: &Stream) -> Result<Work<()>> {
        let (input, output) = parted(("input", input), ("output", output), self.size())?;
        let description = self.describe(Operation::AllGather, input, None, None);
        // SAFETY: as in `all_reduce`; the output has room for every rank's input.
        self.launch(description, stream, move |nccl, comm, stream| unsafe {
            (nccl.ncclAllGather)(
                input.read(),
                output.write(),
                input.count as usize,
                input.dtype,
                comm,
                stream,
            )
        })
    }

    /// Reduces `input` elementwise; rank `r` gets the `r`-th of [`Communicator::size`] equal pieces
    /// in `output`. See [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`].
    pub fn reduce_scatter(
        &self,
        output: &Tensor<'_>,
        input: &Tensor<'_>,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<Work<()>> {
        let (dtype, op_code) = (input.dtype(), reduction(op, input.dtype())?);
        let (output, input) = parted(("output", output), ("input", input), self.size())?;
        let description = self.describe(Operation::ReduceScatter, input, None, Some((op, dtype)));
        // SAFETY: as in `all_reduce`; the input has a piece for each rank.
        self.launch(description, stream, move |nccl, comm, stream| unsafe {
            (nccl.ncclReduceScatter)(
                input.read(),
                output.write(),
                output.count as usize,
                output.dtype,
                op_code,
                comm,
                stream,
            )
        })
    }

    /// Cuts the rows of `input` by `input_splits` (rows for each rank) and sends each rank its own.
    /// The rows from each rank are stored in `output` by rank, cut by `output_splits`. Empty splits
    /// cut evenly. The two tensors do not overlap. See [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`].
    pub fn all_to_all(
        &self,
        output: &Tensor<'_>,
        input: &Tensor<'_>,
        output_splits: &[u64],
        input_splits: &[u64],
        stream: &Stream,
    ) -> Result<Work<()>> {
        if output.dtype() != input.dtype() || output.columns() != input.columns() {
            let expected = format!("{} rows of {} columns, as input has", input.dtype(), input.columns());
            let have = format!("{} rows of {} columns", output.dtype(), output.columns());
            return Err(Error::DType { tensor: "output".into(), have, expected });
        }
        let parts = |name, tensor: &Tensor<'_>, splits: &[u64]| -> Result<Vec<Piece>> {
            let (whole, columns) = (piece(name, tensor)?, tensor.columns());
            let mut first = 0;
            let splits = row_splits(name, tensor.rows(), splits, self.size())?;
            let part = |rows: &u64| {
                first += rows * columns;
                whole.part(first - rows * columns, rows * columns)
            };
            Ok(splits.iter().map(part).collect())
        };
        let sends = parts("input_splits", input, input_splits)?;
        let receives = parts("output_splits", output, output_splits)?;
        let description = self.describe(Operation::AllToAll, piece("input", input)?, None, None);
        let peers = |pieces: Vec<Piece>| (0..self.size()).zip(pieces).collect();
        self.exchange(description, peers(sends), peers(receives), stream)
    }

    /// Sends `tensor` to rank `to`, which receives as many elements. See
    /// [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`].
    pub fn send(&self, to: u32, tensor: &Tensor<'_>, stream: &Stream) -> Result<Work<()>> {
        self.batch_send_recv(&[P2p::Send { to, tensor }], stream)
    }

    /// Receives the tensor that rank `from` sends into `tensor`. See [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`].
    pub fn recv(&self, from: u32, tensor: &Tensor<'_>, stream: &Stream) -> Result<Work<()>> {
        self.batch_send_recv(&[P2p::Recv { from, tensor }], stream)
    }

    /// Concurrent sends and receives (a group of NCCL's), so that none waits for another. See
    /// [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`].
    pub fn batch_send_recv(&self, list: &[P2p<'_>], stream: &Stream) -> Result<Work<()>> {
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for item in list {
            match *item {
                P2p::Send { to, tensor } => {
                    self.check_rank("to", to)?;
                    sends.push((to, piece("tensor", tensor)?));
                }
                P2p::Recv { from, tensor } => {
                    self.check_rank("from", from)?;
                    receives.push((from, piece("tensor", tensor)?));
                }
            }
        }
        let bytes = sends.iter().map(|(_, piece)| piece.bytes()).sum();
        let description =
            Description { operation: Operation::PointToPoint, bytes, root: None, reduction: None };
        self.exchange(description, sends, receives, stream)
    }

    fn exchange(
        &self,
        description: Description,
        sends: Vec<(u32, Piece)>,
        receives: Vec<(u32, Piece)>,
        stream: &Stream,
    ) -> Result<Work<()>> {
        self.launch(description, stream, move |nccl, comm, stream| {
            let sent = sends.iter().map(|(to, data)| {
                let (count, to) = (data.count as usize, *to as c_int);
                // SAFETY: as in `all_reduce`.
                unsafe { (nccl.ncclSend)(data.read(), count, data.dtype, to, comm, stream) }
            });
            let received = receives.iter().map(|(from, data)| {
                let (count, from) = (data.count as usize, *from as c_int);
                // SAFETY: as in `all_reduce`.
                unsafe { (nccl.ncclRecv)(data.write(), count, data.dtype, from, comm, stream) }
            });
            // One call after the other, up to the first that fails.
            let mut codes = sent.chain(received);
            let mut each = || codes.find(|code| code.is_failure()).unwrap_or(Code::SUCCESS);
            // SAFETY: the group is of this thread, which ends it in any case.
            unsafe {
                match (nccl.ncclGroupStart)() {
                    Code::SUCCESS => {}
                    code => return code,
                }
                let (each, end) = (each(), (nccl.ncclGroupEnd)());
                if each == Code::SUCCESS { end } else { each }
            }
        })
    }

    fn describe(
        &self,
        operation: Operation,
        data: Piece,
        root: Option<u32>,
        reduction: Option<(ReduceOp, DType)>,
    ) -> Description {
        let reduction = reduction.map(|(op, dtype)| format!("{dtype} {op}"));
        Description { operation, bytes: data.bytes(), root, reduction }
    }

    fn check_rank(&self, argument: &'static str, rank: u32) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        Err(Error::argument(argument, rank, format!("ranks of the communicator are 0..{}", self.size())))
    }

    /// Puts an operation into `stream`, by `enqueue`, and gives its handle.
    fn launch(
        &self,
        description: Description,
        stream: &Stream,
        enqueue: impl FnOnce(&Functions, *mut Comm, RawStream) -> Code,
    ) -> Result<Work<()>> {
        let core = self.core();
        let Description { operation, bytes, root, reduction } = description;
        let name = operation.name();
        self.check_device("stream", stream.device())?;
        if stream.is_capturing()? {
            let reason = "a recording does not say until when the communicator has to live; run it beside the recording";
            return Err(Error::Unavailable {
                what: format!("{name} in a stream that is captured"),
                reason: reason.into(),
            });
        }
        self.wait_ready()?;
        // Operations that have ended and were not polled.
        core.under_way.all().iter().for_each(|earlier| core.reap(earlier));
        let timeout = self.config().timeout;
        let deadline = deadline(timeout);
        let mut listed = None;
        let outcome = core.with_turn(name, deadline, |turn| {
            let started = core.under_way.list(|sequence| {
                core.recorder.start(sequence, operation, bytes, root, reduction);
                InFlight::new(sequence, operation, timeout)
            });
            listed = Some(started.clone());
            turn.call(function(operation), |nccl, comm| enqueue(nccl, comm, stream.raw().0))?;
            // Recorded behind the operation, which is in the stream by now.
            let event = Event::new(stream.device())?;
            event.record(stream)?;
            started.enqueued(event);
            Ok(started)
        });
        match (outcome, listed) {
            (Ok(started), _) => Ok(work_of(Arc::new(Followed::new(core, started)), |_| Ok(()))),
            (Err(error), Some(started)) => core.end_operation(&started, Err(error)).and_then(|()| {
                // The operation had ended before the call returned an error.
                Err(core.error(name, started.sequence, "it ended while it was started"))
            }),
            (Err(error), None) => Err(error),
        }
    }

    /// How long an operation may take.
    pub fn timeout(&self) -> Duration {
        self.config().timeout
    }
}

/// The function of NCCL that starts an operation.
fn function(operation: Operation) -> &'static str {
    match operation {
        Operation::AllReduce => "ncclAllReduce",
        Operation::Reduce => "ncclReduce",
        Operation::Broadcast => "ncclBroadcast",
        Operation::AllGather => "ncclAllGather",
        Operation::ReduceScatter => "ncclReduceScatter",
        _ => "ncclGroupEnd",
    }
}

/// Rows for each rank.
fn row_splits(argument: &'static str, rows: u64, splits: &[u64], ranks: u32) -> Result<Vec<u64>> {
    let even = u64::from(ranks);
    if splits.is_empty() && rows.is_multiple_of(even) {
        return Ok(vec![rows / even; ranks as usize]);
    }
    let sum = splits.iter().try_fold(0u64, |sum, split| sum.checked_add(*split));
    if splits.len() != ranks as usize || sum != Some(rows) {
        let rule = format!(
            "must be {ranks} counts that add up to the {rows} rows, or none where they divide evenly"
        );
        return Err(Error::argument(argument, format!("{splits:?}"), rule));
    }
    Ok(splits.to_vec())
}
