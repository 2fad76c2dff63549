//! The buffer core: what every operation of a buffer needs, in both modes.
//!
//! | file | holds |
//! |---|---|
//! | `mod.rs` | [`Core`]: a buffer without rows, counts and layouts; the modes call its methods |
//! | `enqueue.rs`, `sequence.rs` | the stream of an operation, and the order of operations on the device |
//! | `place.rs` | places: their holders, and when it may be overwritten |
//! | `choice.rs` | the kernels of a buffer: their choice and their launch |
//! | `arena.rs` | device memory that operations reuse |
//! | `peers.rs` | the pools of the node, mapped |
//! | `network.rs` | the way to other nodes |
//! | `fault.rs` | what kernels record, and the errors made of it |
//! | `step.rs` | recordings, and what they keep |
//! | `add_counts.rs` | counts and times that grow with each operation |
//! | `first_tokens.rs` | batches whose size is only on the device |
//! | `sizes.rs` | the sizes of a buffer that does not exist yet |
//! | `instruments.rs` | when blocks reached their phases; what benchmarks and tests read |
//! | `methods.rs` | the public methods that buffers and options of both modes have |
//!
//! A method that depends on the mode belongs to the mode.

mod add_counts;
mod arena;
mod choice;
mod enqueue;
mod fault;
mod first_tokens;
mod instruments;
mod methods;
mod network;
mod peers;
mod place;
mod sequence;
mod sizes;
mod step;

use std::sync::Arc;
use std::time::Duration;

use bytemuck::Zeroable;
use epoxide_gpu::layout::{Comm, DevicePtr, FirstTokensArgs};

pub(crate) use add_counts::{CUMULATIVE_COUNTS, add_counts, check_cumulative, check_wait_ns};
pub use arena::{Arena, Block, Offsets, Pieces, laid_out};
pub(crate) use choice::choice;
pub use choice::{Choice, Chosen};
pub use enqueue::{StreamOrder, is_same_gpu, named};
pub use fault::{Calls, Faults};
pub use first_tokens::first_tokens;
pub use instruments::{Instruments, TracedLaunch};
pub(crate) use methods::{buffer_methods, option_methods, setters};
pub use network::Network;
pub use peers::Pools;
pub use place::{Held, LEAST_PATIENCE, Lease, PlaceState, check_count};
pub use sequence::{Halves, Operation, Sequence};
pub use sizes::Sizes;
pub use step::{Overwrites, Step};

use enqueue::Enqueuer;
use instruments::Trace;
use place::Pool;
use step::Recordings;

use super::Topology;
use super::tensor::{Filled, Owner, Tensor};
use crate::driver::{Device, Event, Memory, Outcome, Stream};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::lock::lock;
use crate::transport::{self, TransportOptions};

/// A buffer, but for its mode. `R`: the contents of a place.
#[derive(Debug)]
pub struct Core<R> {
    // Dropped in this order: streams first, so that no kernel runs when memory is freed.
    enqueuer: Arc<Enqueuer>,
    network: Option<Arc<Network>>,
    arena: Arc<Arena>,
    faults: Arc<Faults>,
    places: Vec<Arc<PlaceState<R>>>,
    pool: Arc<Pool>,
    pools: Pools,
    recordings: Recordings,
    /// Where kernels write the times of their blocks' phases, while a caller traces.
    trace: Option<Trace>,
    device: Device,
    timeout: Duration,
}

/// A buffer of either mode, which has a core.
pub trait HasCore {
    type Room;

    fn core(&mut self) -> &mut Core<Self::Room>;

    fn core_ref(&self) -> &Core<Self::Room>;

    /// The kernel of [`first_tokens`].
    fn first_tokens(&self) -> &Choice<FirstTokensArgs>;
}

impl<R> Core<R> {
    /// The core of a buffer with these pools, which has no places and no network yet. `timeout`:
    /// longest wait for a peer; `max_tokens`: most tokens of this rank; `calls`: how the mode
    /// describes its calls.
    pub fn new(
        device: &Device,
        rank: u32,
        pools: Pools,
        timeout: Duration,
        max_tokens: u32,
        calls: Box<dyn Calls>,
    ) -> Result<Core<R>> {
        let (enqueuer, arena) = (Enqueuer::new(device)?, Arena::new(device));
        let faults = Faults::new(device, enqueuer.sequence(), (rank, pools.topology()), max_tokens, calls)?;
        Ok(Core {
            enqueuer,
            network: None,
            faults,
            places: Vec::new(),
            pool: Pool::new(pools.own().clone(), &arena, timeout),
            arena,
            pools,
            recordings: Recordings::default(),
            trace: None,
            device: device.clone(),
            timeout,
        })
    }

    /// Opens the network to `peers`, with wire memory of `bytes`; see [`Network::open`].
    /// Collective.
    pub fn open_network(
        &mut self,
        group: &dyn ProcessGroup,
        transport: &TransportOptions,
        bytes: u64,
        peers: &[u32],
    ) -> Result<Arc<Network>> {
        let network = Network::open(&self.device, group, transport, bytes, peers)?;
        let network = Arc::new(network);
        self.faults.watch(&network);
        self.network = Some(network.clone());
        Ok(network)
    }

    /// Makes a place of each room.
    pub fn make_places(&mut self, rooms: impl IntoIterator<Item = R>) {
        let (id, pool, arena) = (self.id(), &self.pool, &self.arena);
        let place = |(index, room)| PlaceState::new(index, id, room, pool.clone(), arena.clone());
        self.places = (0..).zip(rooms).map(place).collect();
    }

    /// The buffer's number among those of this process.
    pub fn id(&self) -> u64 {
        self.faults.id()
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.faults.rank()
    }

    /// How ranks are spread over nodes.
    pub fn topology(&self) -> Topology {
        self.faults.topology()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The buffer's own stream.
    pub fn stream(&self) -> &Stream {
        self.enqueuer.comm_stream()
    }

    /// Reusable device memory.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// This rank's pool.
    pub fn pool(&self) -> &Memory {
        self.pool.memory()
    }

    /// The addresses of the node's pools, by index within the node.
    pub fn pool_addresses(&self) -> &[u64] {
        self.pools.addresses()
    }

    /// The way to other nodes, if any.
    pub fn network(&self) -> Option<&Network> {
        self.network.as_deref()
    }

    /// The order of its operations.
    pub fn sequence(&self) -> &Arc<Sequence> {
        self.enqueuer.sequence()
    }

    /// The failures that kernels have recorded.
    pub fn faults(&self) -> &Arc<Faults> {
        &self.faults
    }

    /// The places.
    pub fn places(&self) -> &[Arc<PlaceState<R>>] {
        &self.places
    }

    /// Takes the place of index `index`.
    ///
    /// # Errors
    /// [`Error::Argument`] where there is no such place, or it is in use already.
    pub fn place(&self, index: u32) -> Result<Held<R>> {
        Held::take(&self.places, index)
    }

    /// An error unless the place is one of this buffer's.
    pub fn check_place(&self, place: &PlaceState<R>) -> Result<()> {
        if place.buffer() == self.id() {
            return Ok(());
        }
        let rule = "it is of another buffer: use one that this buffer gave";
        Err(Error::argument("place", place.index(), rule))
    }

    /// The arguments that all kernels of the buffer share: `local` is this rank's own state. The
    /// pool's layout and the call are the mode's to fill in.
    pub fn comm(&self, local: DevicePtr) -> Comm {
        Comm {
            pools: self.pools.few(),
            pool_table: DevicePtr::NULL,
            local,
            status: self.faults.memory().ptr(),
            timeout_ns: nanoseconds(self.timeout),
            trace: DevicePtr::NULL,
            rank: self.topology().index(self.rank()),
            num_ranks: self.topology().ranks_per_node,
            call: 0,
            pool: Zeroable::zeroed(),
        }
    }

    /// The error after which the buffer cannot be used, if there was one.
    pub fn check(&self) -> Result<()> {
        self.faults.check()?;
        self.sequence().check()
    }

    /// [`Core::check`], and an error where the second half of an operation was not enqueued. For
    /// callers that hold no first half.
    pub fn check_between_calls(&self) -> Result<()> {
        self.check()?;
        self.sequence().check_received(None, false)
    }

    /// No second half of an operation is outstanding.
    pub fn forget_sent(&self) {
        self.sequence().forget_sent();
    }

    /// An error if no operation can follow, regardless of the kernels' records.
    pub fn check_unbroken(&self) -> Result<()> {
        self.sequence().check()
    }

    /// Ends the buffer: `call` failed with `error` where peers count on it already.
    pub fn give_up(&self, call: &'static str, error: &Error) {
        self.sequence().give_up(call, error);
    }

    /// The tokens that a combine has left without their sums.
    pub fn missing_tokens(&self) -> Result<Vec<u32>> {
        // A fence leaves out the buffer's own stream.
        let ended = self.wait_all()? && self.sequence().wait(self.patience())?;
        if !ended {
            return Err(Error::timeout(
                "missing_tokens",
                self.unended("what the device's streams were given"),
            ));
        }
        let missing = (0..).zip(self.faults.missing()?);
        Ok(missing.filter_map(|(token, is_missing)| (is_missing != 0).then_some(token)).collect())
    }

    /// Waits for all work enqueued on the device's streams; false where it takes too long.
    pub fn wait_all(&self) -> Result<bool> {
        self.arena.wait_all(self.patience())
    }

    /// The text for work that takes longer than [`Core::patience`].
    pub fn unended(&self, work: &str) -> String {
        format!(
            "{work} has not ended in {:?}: look for a kernel on the device that never ends",
            self.patience()
        )
    }

    /// How long the host waits for the buffer's operations, behind the caller's work.
    fn patience(&self) -> Duration {
        self.pool.patience()
    }

    /// The deadline of a call's waits, in ns: `timeout`, or that of the buffer.
    pub fn timeout_ns(&self, timeout: Option<Duration>) -> u64 {
        let timeout_ns = nanoseconds(timeout.unwrap_or(self.timeout));
        self.pool.may_take(timeout_ns);
        timeout_ns
    }

    /// Begins an operation: an error where an earlier one has failed. Returns whether this one is
    /// only recorded.
    pub fn begin(&self, order: StreamOrder<'_>) -> Result<bool> {
        self.check()?;
        order.check_device(&self.device)?;
        self.is_capturing(order)
    }

    /// Whether an operation would only be recorded.
    pub fn is_capturing(&self, order: StreamOrder<'_>) -> Result<bool> {
        Enqueuer::is_capturing(order)
    }

    /// The owners of the memory of these arguments, those that have one.
    ///
    /// # Errors
    /// [`Error::Argument`] where an argument's memory is of another device.
    pub fn owners<'t, 'a: 't>(
        &self,
        arguments: impl IntoIterator<Item = (&'static str, Option<&'t Tensor<'a>>)>,
    ) -> Result<Vec<Owner>> {
        let mut owners = Vec::new();
        for (argument, tensor) in arguments {
            let Some(tensor) = tensor else { continue };
            if let Some(owner) = tensor.owner() {
                check_memory(argument, tensor.name(), owner, &self.device)?;
                owners.push(owner.clone());
            }
        }
        Ok(owners)
    }

    /// Runs `work` on the stream of `order`, behind the previous operation and behind the last
    /// users of the blocks that were taken for it. Returns the event of an asynchronous call.
    /// `capturing`: what [`Core::begin`] returned.
    pub fn run<B: HasCore<Room = R>>(
        buffer: &mut B,
        order: StreamOrder<'_>,
        capturing: bool,
        operation: Operation,
        uses: &Uses,
        work: impl FnOnce(&mut B, &Stream) -> Result<()>,
    ) -> Result<Option<Event>> {
        let core = buffer.core();
        let is_kept = capturing || core.recordings.is_warmup();
        // Without an allocation where nothing is kept.
        let (mut kept, mut is_of_others) = (Vec::new(), false);
        for owner in &uses.owners {
            check_memory("a tensor", "", owner, &core.device)?;
            is_of_others |= owner.arena().is_some_and(|arena| !Arc::ptr_eq(arena, &core.arena));
            kept.extend(is_kept.then(|| owner.memory().unwrap_or_else(|| owner.clone())));
        }
        let enqueuer = core.enqueuer.clone();
        let event = enqueuer.run(order, capturing, operation, |stream| {
            let core = buffer.core();
            if capturing {
                core.check_recorder(stream)?;
                core.recordings.keep(kept);
                core.arena.wait_before(core.patience())?;
            } else {
                core.recordings.keep_for_warmup(kept);
                core.arena.order_before(stream)?;
            }
            // Not before: a rejected call has written nothing.
            uses.filled.iter().for_each(|filled| core.record(filled));
            if !matches!(operation, Some((_, Halves::Send))) {
                uses.filled_last.iter().for_each(|filled| core.record(filled));
            }
            work(buffer, stream)
        })?;
        // The fences of other buffers leave out this one's stream, and the caller's does not wait.
        if event.is_some() && is_of_others && !capturing {
            enqueuer.comm_stream().order_fences_behind()?;
        }
        Ok(event)
    }

    /// Records that an operation fills a tensor of the caller's. In a warm-up the buffer's faults
    /// stand for an outcome that owns memory: the tensor would keep the memory from the recording.
    fn record(&self, filled: &Filled) {
        let Filled { tensor, of } = filled;
        let keeps = self.recordings.is_warmup() && of.owns_memory();
        let of: Arc<dyn Outcome> = if keeps { self.faults.clone() } else { of.clone() };
        *lock(tensor) = Some(of);
    }

    /// Where a launch of `blocks` blocks writes its times; null without a trace.
    pub fn trace(&mut self, operation: &'static str, blocks: u32) -> DevicePtr {
        self.trace.as_mut().map_or(DevicePtr::NULL, |trace| trace.reserve(operation, blocks))
    }
}

impl<R> Drop for Core<R> {
    fn drop(&mut self) {
        // Peers' mappings of this pool keep its memory alive for them, so no barrier is needed.
        self.enqueuer.close(self.patience());
        let Some(network) = &self.network else { return };
        let has_ended = self.sequence().has_ended().unwrap_or(false);
        if has_ended && self.check_unbroken().is_ok() && !self.faults.has_failed().unwrap_or(true) {
            network.close();
        } else {
            network.close_failed();
        }
    }
}

/// The memory of an operation's arguments.
#[derive(Debug, Default)]
pub struct Uses {
    /// Owners that must live as long as a recording of the operation.
    owners: Vec<Owner>,
    /// The caller's tensors that the operation fills.
    filled: Vec<Filled>,
    /// Those that it does not fill in a first half.
    filled_last: Vec<Filled>,
}

impl Uses {
    /// Adds memory that the operation needs.
    pub fn push(&mut self, owner: Owner) {
        self.owners.push(owner);
    }

    /// Adds a tensor of the caller's, whose elements have the outcome `of` once the operation is
    /// enqueued. [`Core::owners`] gives the owner of its memory.
    pub(crate) fn fills(&mut self, tensor: &Tensor<'_>, of: &Arc<impl Outcome + 'static>) {
        self.filled.push(tensor.filled(of));
    }

    /// The same of a tensor that a first half leaves as it is.
    pub(crate) fn fills_last(&mut self, tensor: &Tensor<'_>, of: &Arc<impl Outcome + 'static>) {
        self.filled_last.push(tensor.filled(of));
    }
}

impl From<Vec<Owner>> for Uses {
    fn from(owners: Vec<Owner>) -> Uses {
        Uses { owners, ..Uses::default() }
    }
}

impl Extend<Owner> for Uses {
    fn extend<I: IntoIterator<Item = Owner>>(&mut self, owners: I) {
        self.owners.extend(owners);
    }
}

/// An error if a tensor's memory is of another device than `device`: a free of it does not wait for
/// streams of `device`. `name`: the tensor's own, if any.
fn check_memory(argument: &'static str, name: &str, owner: &Owner, device: &Device) -> Result<()> {
    let of = owner.device();
    if of.is(device) {
        return Ok(());
    }
    let rule = format!("must be in memory of the buffer's device, {}: copy it there", named(device));
    let name = if name.is_empty() || name == argument { String::new() } else { format!("{name}, ") };
    Err(Error::argument(argument, format!("{name}in memory of {}", named(of)), rule))
}

/// An error for a deadline that passes before a peer can answer. `None`: that of the buffer.
pub fn check_timeout(timeout: Option<Duration>) -> Result<()> {
    if timeout.is_some_and(|timeout| timeout.is_zero()) {
        let rule = "must be longer than 0: calls wait for their peers so long";
        return Err(Error::argument("timeout", "0 s", rule));
    }
    Ok(())
}

/// A deadline in the unit of kernels.
pub fn nanoseconds(timeout: Duration) -> u64 {
    timeout.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Returns this rank's part of a new buffer once every rank has its part.
///
/// # Errors
/// The error of the part, or [`Error::PeerFailed`] with the reason of a rank whose part is an
/// error: [`Error::Unavailable`] where that rank lacks a requirement.
pub fn agree_on_part<T>(group: &dyn ProcessGroup, part: Result<T>) -> Result<T> {
    transport::agree_or(group, part, |peer, lacks, reason| match lacks {
        true => Error::Unavailable { what: "the buffer".into(), reason: format!("rank {peer}: {reason}") },
        false => Error::PeerFailed { what: "the buffer", rank: group.rank(), peer, reason },
    })
}

/// Checks that all ranks run the same version and have the same values of the same names.
pub fn agree_on(group: &dyn ProcessGroup, mut ours: Vec<(&'static str, String)>) -> Result<()> {
    ours.insert(0, ("epoxide's version", env!("CARGO_PKG_VERSION").to_owned()));
    let message = ours.iter().map(|(_, value)| value.as_str()).collect::<Vec<_>>().join("\n");
    for (peer, theirs) in group.all_gather(message.as_bytes())?.into_iter().enumerate() {
        let theirs = String::from_utf8_lossy(&theirs);
        let mut theirs = theirs.split('\n');
        for (what, ours) in &ours {
            let theirs = theirs.next().unwrap_or("nothing");
            if ours != theirs {
                return Err(Error::Mismatch {
                    rank: group.rank(),
                    peer: peer as u32,
                    what,
                    ours: ours.clone(),
                    theirs: theirs.to_owned(),
                });
            }
        }
    }
    Ok(())
}
