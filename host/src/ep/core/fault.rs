//! Faults: the records of a buffer's kernels in mapped host memory, and the errors for them.
//!
//! The report of an expired wait lists the other buffers of the process. Ranks that launch the
//! operations of two buffers in different orders wait for each other if both do not fit on the
//! device. The state of one buffer does not show that.

use std::fmt::Debug;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use epoxide_gpu::layout::{
    FAILED_PLANS, FailedPlans, LATE_PEERS, MAX_WORLD, MISSING_TOKENS, STATUS, Section, Status, Wait,
    ready_epoch,
};

use super::enqueue::is_same_gpu;
use super::network::Network;
use super::sequence::Sequence;
use crate::driver::{Device, DevicePtr, MappedMemory, Outcome, Stream};
use crate::ep::Topology;
use crate::error::{Error, Result};
use crate::lock::lock;

/// All buffers of this process, and some that were dropped.
static BUFFERS: Mutex<Vec<Weak<Faults>>> = Mutex::new(Vec::new());

/// The set that a kernel numbers its peers in.
#[derive(Debug, Clone, Copy)]
enum PeerNumber {
    /// The ranks of this node.
    Node,
    /// All ranks; the rank of this node with the same index relays for that one.
    Relay,
    /// The nodes: the rank there with this one's index.
    Rail,
    /// All ranks.
    World,
}

/// Kinds of records about a peer.
#[derive(Debug, Clone, Copy)]
enum RecordKind {
    /// The wait of an operation for a word expired. `None`: the recorded call names the operation.
    Late(Option<&'static str>, &'static str),
    /// The same for a packed ready word, which holds its epoch.
    LateReady(&'static str, &'static str),
    /// The peer made another call.
    OtherCall,
    /// The peer gave up, in these words, while this rank still read its rows. The second text is a
    /// remedy other than a new buffer.
    GaveUp(&'static str, &'static str),
}

/// All records about peers. The text of any other is the mode's ([`Calls::error`]).
const FAULTS: [(Wait, PeerNumber, RecordKind); 26] = [
    (Wait::Counts, PeerNumber::Node, RecordKind::Late(Some("notify"), "counts")),
    (Wait::DispatchReady, PeerNumber::Node, RecordKind::LateReady("dispatch", "ready")),
    (Wait::DispatchDone, PeerNumber::Node, RecordKind::Late(Some("dispatch"), "done")),
    (Wait::CombineReady, PeerNumber::Node, RecordKind::LateReady("combine", "ready")),
    (Wait::CombineDone, PeerNumber::Node, RecordKind::Late(Some("combine"), "done")),
    (Wait::Staged, PeerNumber::Node, RecordKind::Late(Some("combine"), "staged rows")),
    (Wait::OtherCall, PeerNumber::Node, RecordKind::OtherCall),
    (Wait::NodeCounts, PeerNumber::Rail, RecordKind::Late(Some("notify"), "counts of the node")),
    (Wait::RelayedCounts, PeerNumber::Relay, RecordKind::Late(Some("notify"), "counts that it relays")),
    (Wait::DispatchNodeReady, PeerNumber::Rail, RecordKind::LateReady("dispatch", "ready of the node")),
    (Wait::DispatchArrival, PeerNumber::Rail, RecordKind::Late(Some("dispatch"), "rows of the node")),
    (Wait::CombineNodeReady, PeerNumber::Rail, RecordKind::LateReady("combine", "ready of the node")),
    (Wait::CombineArrival, PeerNumber::Rail, RecordKind::Late(Some("combine"), "sums of the node")),
    (Wait::NotifyQueue, PeerNumber::Rail, RecordKind::Late(Some("notify"), "the queue to it")),
    (Wait::DispatchQueue, PeerNumber::Rail, RecordKind::Late(Some("dispatch"), "the queue to it")),
    (Wait::CombineQueue, PeerNumber::Rail, RecordKind::Late(Some("combine"), "the queue to it")),
    (Wait::OtherNodeCall, PeerNumber::Rail, RecordKind::OtherCall),
    (Wait::LowLatencyReady, PeerNumber::World, RecordKind::Late(None, "ready")),
    (Wait::LowLatencyEnter, PeerNumber::World, RecordKind::Late(None, "its call")),
    (Wait::LowLatencyIds, PeerNumber::World, RecordKind::Late(None, "expert ids")),
    (Wait::LowLatencyRows, PeerNumber::World, RecordKind::Late(None, "rows")),
    (Wait::LowLatencyReturned, PeerNumber::World, RecordKind::Late(None, "returned rows")),
    (Wait::LowLatencyQueue, PeerNumber::World, RecordKind::Late(None, "the queue to it")),
    (Wait::LowLatencyOtherCall, PeerNumber::World, RecordKind::OtherCall),
    (Wait::CombineGaveUp, PeerNumber::Node, RecordKind::GaveUp("gave up", "")),
    (
        Wait::LowLatencyGaveUp,
        PeerNumber::World,
        RecordKind::GaveUp("gave up, or regrouped,", "; regroup with the ranks that go on"),
    ),
];

/// The row of [`FAULTS`] for a kernel's record.
fn look_up(code: u64) -> (PeerNumber, RecordKind) {
    let known = FAULTS.iter().find(|(wait, ..)| *wait as u64 == code);
    known.map_or((PeerNumber::World, RecordKind::Late(Some("unknown"), "unknown")), |&(_, peer, found)| {
        (peer, found)
    })
}

/// How a mode reads the words that describe its calls.
pub trait Calls: Debug + Send + Sync {
    /// The error of a record that is not about a peer; `None` where it is.
    fn error(&self, status: &Status) -> Option<Error>;

    /// The operation that a recorded call is of, and its place where the call has one.
    fn name(&self, call: u64) -> (&'static str, Option<u32>);

    /// The call in a word of the operation `epoch`.
    fn describe(&self, word: u64, epoch: u64) -> String;
}

/// The first failure that kernels of a buffer have recorded. Shared with the buffer's results and
/// steps, which outlive it.
#[derive(Debug)]
pub struct Faults {
    id: u64,
    rank: u32,
    topology: Topology,
    max_tokens: u32,
    device: Device,
    sequence: Arc<Sequence>,
    memory: MappedMemory,
    calls: Box<dyn Calls>,
    network: OnceLock<Weak<Network>>,
    /// Other possible causes of an expired wait, recorded at its first report: later calls give the
    /// same error.
    context: Mutex<Option<Box<str>>>,
}

impl Outcome for Faults {
    fn report(&self) -> Result<()> {
        self.check()
    }

    fn order_before(&self, stream: &Stream) -> Result<()> {
        self.sequence.order_before(stream)
    }
}

impl Faults {
    /// The faults of a new buffer, for up to `max_tokens` tokens of this rank. Reports of other
    /// buffers list the buffer as long as something holds this.
    pub fn new(
        device: &Device,
        sequence: &Arc<Sequence>,
        (rank, topology): (u32, Topology),
        max_tokens: u32,
        calls: Box<dyn Calls>,
    ) -> Result<Arc<Faults>> {
        let (status_bytes, plans_bytes) = (size_of::<Status>() as u64, size_of::<FailedPlans>() as u64);
        let memory = MappedMemory::alloc(device, MISSING_TOKENS + u64::from(max_tokens), "status")?;
        memory.describe(&[
            Section::one("wait", status_bytes).of(STATUS),
            Section::one("failed_plans", plans_bytes).of(FAILED_PLANS).at(status_bytes),
            Section::array("late_peers", 2 * MAX_WORLD as u64, 8).at(LATE_PEERS),
            Section::array("missing_tokens", max_tokens.into(), 1).at(MISSING_TOKENS),
        ]);
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let faults = Arc::new(Faults {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            rank,
            topology,
            max_tokens,
            device: device.clone(),
            sequence: sequence.clone(),
            memory,
            calls,
            network: OnceLock::new(),
            context: Mutex::default(),
        });
        let mut buffers = lock(&BUFFERS);
        buffers.retain(|buffer| buffer.strong_count() > 0);
        buffers.push(Arc::downgrade(&faults));
        Ok(faults)
    }

    /// The buffer's number among those of this process, in all modes.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The buffer's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The buffer's rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How the buffer's ranks are spread over nodes.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// The memory that kernels record in, which begins with the [`Status`].
    pub fn memory(&self) -> &MappedMemory {
        &self.memory
    }

    /// Device address of the word that is not 0 once a wait has failed.
    pub fn status_ptr(&self) -> DevicePtr {
        self.memory.ptr().add(offset_of!(Status, code) as u64)
    }

    /// Device address of the bytes that [`Faults::missing`] reads.
    pub fn missing_ptr(&self) -> DevicePtr {
        self.memory.ptr().add(MISSING_TOKENS)
    }

    /// Names the network whose failures belong to the report of an expired wait.
    pub fn watch(&self, network: &Arc<Network>) {
        let _ = self.network.set(Arc::downgrade(network));
    }

    /// Clears the record.
    pub fn clear(&self, stream: &Stream) -> Result<()> {
        *lock(&self.context) = None;
        self.memory.clear(stream)
    }

    /// The error of the first wait that expired, or met another call.
    pub fn check(&self) -> Result<()> {
        if !self.has_failed()? {
            return Ok(());
        }
        let status: Status = self.memory.read(0)?;
        if let Some(mut error) = self.calls.error(&status) {
            if let Error::Broken { reason, .. } = &mut error {
                *reason += &self.once(Self::waits_and_origin);
            }
            return Err(error);
        }
        let Status { code, epoch, needed, seen, waited_ns, .. } = status;
        let (rank, peer) = (self.rank, self.rank_of(code, status.peer as u32));
        let (name, place) = self.calls.name(status.call);
        let (operation, word, seen) = match look_up(code).1 {
            RecordKind::OtherCall => {
                let [ours, theirs] = [needed, seen].map(|word| self.calls.describe(word, epoch));
                let other_causes = self.once(Self::waits_and_origin);
                return Err(Error::OtherCall { rank, peer, epoch, ours, theirs, other_causes });
            }
            RecordKind::GaveUp(how, remedy) => {
                let causes = self.once(Self::waits_and_origin);
                let reason = format!(
                    "rank {peer} {how} while this rank still read its rows: they may be of a later operation{remedy}{causes}"
                );
                return Err(Error::Broken { call: name, reason, source: None });
            }
            RecordKind::Late(operation, word) => (operation.unwrap_or(name), word, seen),
            RecordKind::LateReady(operation, word) => (operation, word, ready_epoch(seen, epoch)),
        };
        Err(Error::PeerTimeout {
            rank,
            peer,
            operation,
            place,
            late_ranks: self.late_ranks(peer)?.into(),
            word,
            epoch,
            needed,
            seen,
            waited: Duration::from_nanos(waited_ns),
            other_causes: self.once(Self::find_causes),
        })
    }

    /// The rank that a kernel calls `number` where it recorded `code`.
    fn rank_of(&self, code: u64, number: u32) -> u32 {
        let (topology, node) = (self.topology, self.topology.node(self.rank));
        match look_up(code).0 {
            PeerNumber::Node => topology.rank(node, number),
            PeerNumber::Relay => topology.rank(node, topology.index(number)),
            PeerNumber::Rail => topology.rank(number, topology.index(self.rank)),
            PeerNumber::World => number,
        }
    }

    /// The context of the record: the first check computes it, later ones return the same.
    fn once(&self, find: impl FnOnce(&Self) -> String) -> Box<str> {
        lock(&self.context).get_or_insert_with(|| find(self).into()).clone()
    }

    /// Possible causes of an expired wait, for the end of its report: the buffer's context, and on
    /// a device in check mode the kernels' longest waits and the origin of the record.
    fn find_causes(&self) -> String {
        self.find_context() + &self.waits_and_origin()
    }

    /// On a device in check mode the kernels' longest waits, and the origin of the record, each
    /// after a separator: the block that has recorded it, and the memory that this block has read.
    fn waits_and_origin(&self) -> String {
        let waits = self.device.driver.longest_waits();
        let waits =
            if waits.is_empty() { waits } else { format!("; the longest waits of kernels:{waits}\n  ") };
        let origin = self.device.driver.origin(self.status_ptr());
        waits + &origin.map_or_else(String::new, |origin| format!("; the record was {origin}\n  "))
    }

    /// The buffer's context in the report of an expired wait. The context lists failures of the
    /// network, and other buffers of this process and device with operations in flight or failed.
    /// Empty if there are none.
    fn find_context(&self) -> String {
        let network = self.network.get().and_then(Weak::upgrade);
        let network = network.map_or_else(String::new, |network| network.context());
        // An upgraded reference may be the last of a buffer that is just dropped: it must not be
        // dropped while the list is locked.
        let others: Vec<Arc<Faults>> = lock(&BUFFERS).iter().filter_map(Weak::upgrade).collect();
        let is_other = |other: &&Arc<Faults>| other.id != self.id && is_same_gpu(&other.device, &self.device);
        let others = others.iter().filter(is_other);
        let named = others.filter_map(|other| other.unfinished());
        let named = named.collect::<Vec<_>>().join(" and ");
        if named.is_empty() {
            return network;
        }
        format!(
            "{network}; {named} on this device: operations of two buffers that are not launched in the same order on every rank wait for each \
             other where both do not fit on the device"
        )
    }

    /// Whether a kernel of the buffer has recorded that a wait failed.
    pub fn has_failed(&self) -> Result<bool> {
        // The device stores `code` with release after the rest, and this load acquires it.
        Ok(self.memory.load(offset_of!(Status, code) as u64)? != 0)
    }

    /// The late ranks when waits expired, in ascending order; `peer`, which the record names, is
    /// among them. The result has all ranks that had not entered the operation. If all had entered,
    /// it has the ranks from which other data had not arrived. A kernel may still be about to
    /// record one.
    fn late_ranks(&self, peer: u32) -> Result<Vec<u32>> {
        let mut late = Vec::new();
        for entry in 0..2 * MAX_WORLD as u32 {
            if entry == MAX_WORLD as u32 && !late.is_empty() {
                break;
            }
            let what = self.memory.load(LATE_PEERS + u64::from(entry) * 8)?;
            late.extend((what != 0).then(|| self.rank_of(what, entry % MAX_WORLD as u32)));
        }
        late.push(peer);
        late.sort_unstable();
        late.dedup();
        Ok(late)
    }

    /// For each token of this rank, whether a timed-out combine may have left it without its sum.
    /// All work on the tokens has ended.
    pub fn missing(&self) -> Result<Vec<u8>> {
        self.memory.read_all(MISSING_TOKENS, self.max_tokens)
    }

    fn unfinished(&self) -> Option<String> {
        let (id, operation) = (self.id, self.sequence.last_operation()?);
        if self.has_failed().is_ok_and(|failed| failed) {
            return Some(format!("buffer {id} of this process has a {operation} that failed as well"));
        }
        // Without an answer of the driver, the operation does not count as in flight.
        let in_flight = self.sequence.has_ended().is_ok_and(|ended| !ended);
        in_flight.then(|| format!("buffer {id} of this process has a {operation} in flight"))
    }
}
