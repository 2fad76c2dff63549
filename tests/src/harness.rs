//! Ranks as threads, each with a virtual GPU, a stream and a buffer. Checks do not stop a rank half
//! way, so that one wrong value does not leave its peers waiting.

use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Device, DevicePtr, Event, Stream};
use epoxide::group::ProcessGroup;
use epoxide::group::{RankFailure, run_threads};
use epoxide::internal::driver::driver;
use epoxide::internal::{self, Fields, Tuning};
use epoxide::throughput::{
    Buffer, CachedDispatchRequest, CombineRequest, Combined, Config, Counts, DispatchLayout, DispatchRequest,
    Options, Place, Received, Shape,
};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{DType, Element, ExpertId, ExpertMap, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result};
use rand::Rng;

use crate::compare::{Difference, origin};
use crate::payload::{bytes_of, rng_of, values_of};
use crate::roundtrip::RoundTrip;

/// Longest wait for a peer, and of a collective of the group, in tests without a timeout. A group
/// waits in real time, on a machine that may be busy.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// Contents of outputs before an operation writes them.
pub const POISON: u8 = 0x5e;

/// `cuda`: the ranks of a test use GPUs instead of virtual ones, rank r GPU r. For tests that use
/// no other devices.
const DEVICE: &str = "EPOXIDE_TEST_DEVICE";
/// Ranks of those tests that run with any number from 2 on, such as the number of GPUs.
const RANKS: &str = "EPOXIDE_TEST_RANKS";

/// Whether the ranks of tests use GPUs instead of virtual ones.
///
/// # Panics
/// Where `EPOXIDE_TEST_DEVICE` is neither `cuda` nor `virtual`, or the tests were built without the
/// feature `cuda`.
pub fn on_gpus() -> bool {
    let Ok(device) = std::env::var(DEVICE) else { return false };
    match device.as_str() {
        "virtual" => false,
        "cuda" if cfg!(feature = "cuda") => true,
        "cuda" => panic!("{DEVICE}=cuda: these tests have no GPUs; build them with --features cuda"),
        other => panic!("{DEVICE}={other}: must be cuda or virtual"),
    }
}

/// The number of ranks of a test that runs with any: `EPOXIDE_TEST_RANKS`, or `default`.
///
/// # Panics
/// Where the variable is no number of at least 2.
pub fn num_ranks(default: u32) -> u32 {
    let Ok(text) = std::env::var(RANKS) else { return default };
    let number = text.parse().ok().filter(|&number| number >= 2);
    number.unwrap_or_else(|| panic!("{RANKS}={text}: must be a number of at least 2"))
}

/// The numbers of ranks that a property test draws from: `counts`, cut at `EPOXIDE_TEST_RANKS`, which
/// is for machines with fewer GPUs. The range never becomes empty.
///
/// # Panics
/// See [`num_ranks`].
pub fn rank_counts(counts: RangeInclusive<usize>) -> RangeInclusive<usize> {
    let end = (*counts.end()).min(num_ranks(u32::MAX) as usize);
    (*counts.start()).min(end)..=end
}

/// Ranks of a large group. One of 64 opens some ten thousand files, and two at a time pass the
/// limit.
const LARGE: u32 = 32;
static LARGE_GROUP: Mutex<()> = Mutex::new(());

/// Groups of ranks that [`run_ranks`] runs now.
static RUNNING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

/// A place among the groups that run, given back on drop.
struct Slot;

impl Slot {
    /// Waits until fewer groups run than the machine has processors, and one.
    fn wait() -> Slot {
        let most = std::thread::available_parallelism().map_or(1, |processors| processors.get()) + 1;
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running =
            ENDED.wait_while(running, |running| *running >= most).unwrap_or_else(PoisonError::into_inner);
        *running += 1;
        Slot
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ENDED.notify_one();
    }
}

/// Runs `main(rank, group)` on threads as [`run_threads`] does, with [`PATIENCE`]. Few groups of a
/// process run at a time: their virtual GPUs compute without a pause, and more would only share the
/// processors. Of groups of 32 ranks and more one runs at a time. `main` must not call this.
///
/// # Errors
/// See [`run_threads`].
#[allow(clippy::result_large_err)] // As of `run_threads`.
pub fn try_run_ranks<T: Send>(
    count: u32,
    main: impl Fn(u32, Arc<dyn ProcessGroup>) -> Result<T> + Sync,
) -> Result<Vec<T>, RankFailure> {
    // In front of the slot, so that a group that waits here holds none.
    let _large = (count >= LARGE).then(|| LARGE_GROUP.lock().unwrap_or_else(PoisonError::into_inner));
    let _slot = Slot::wait();
    run_threads(count, PATIENCE, main)
}

/// [`try_run_ranks`] for ranks that must not fail.
///
/// # Panics
/// Where a rank fails.
pub fn run_ranks<T: Send>(
    count: u32,
    main: impl Fn(u32, Arc<dyn ProcessGroup>) -> Result<T> + Sync,
) -> Vec<T> {
    try_run_ranks(count, main).unwrap_or_else(|failure| panic!("{failure}"))
}

/// A virtual GPU, or in its place the GPU of the same number where [`on_gpus`] holds.
///
/// # Errors
/// Where there is no such GPU.
pub fn open_device(config: VirtConfig) -> Result<Device> {
    #[cfg(feature = "cuda")]
    if on_gpus() {
        return epoxide::driver::cuda::CudaDevice::open(config.ordinal);
    }
    #[cfg(not(feature = "cuda"))]
    let _: bool = on_gpus();
    Ok(VirtualGpu::new(config))
}

/// The clock of a device's kernel deadlines. On a virtual GPU of a rank that is a thread, it is the
/// clock of all ranks.
pub fn now(device: &Device) -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    driver(device).time().map_or_else(|| START.get_or_init(Instant::now).elapsed(), |time| time.now())
}

/// Waits until `duration` has passed by the deadlines' time ([`now`]).
pub fn sleep(device: &Device, duration: Duration) {
    match driver(device).time() {
        Some(time) => time.sleep(duration),
        None => std::thread::sleep(duration),
    }
}

/// How ranks are spread over nodes, and what connects these. With [`TransportKind::Auto`] there are
/// two nodes to a host, so that those of three nodes or more reach each other in different ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeLinks {
    /// Ranks of each node.
    pub ranks_per_node: u32,
    /// The transport between them.
    pub transport: TransportKind,
    /// Queues to each peer.
    pub queues: u32,
}

impl NodeLinks {
    /// Transport of a rank to other nodes.
    pub fn transport_of(&self, rank: u32) -> TransportOptions {
        let mut options =
            TransportOptions { queues_per_peer: self.queues, ..TransportOptions::new(self.transport) };
        if self.transport == TransportKind::Tcp {
            // Beside virtual GPUs there would be one, and small rows are not divided.
            options.connections_per_queue = Some(2);
            options.hooks.smallest_part = Some(256);
        }
        if self.transport == TransportKind::Auto {
            options.hooks.host = Some(format!("host {}", rank / self.ranks_per_node.max(1) / 2));
        }
        options
    }
}

/// How the ranks of a test are made.
#[derive(Debug, Clone)]
pub struct Setup {
    /// How many there are.
    pub ranks: u32,
    /// The options of each rank's buffer.
    pub options: Options,
    /// The configuration of each rank's device, but for its number.
    pub device: VirtConfig,
}

impl Setup {
    /// Small devices, `num_channels` channels, and buffers for up to `tokens` tokens of `row_bytes`
    /// bytes per rank with 8 entries and no scales.
    pub fn new(ranks: u32, num_channels: u32, tokens: u32, row_bytes: u64) -> Setup {
        let shape = Shape {
            max_tokens: tokens,
            hidden: row_bytes / 2,
            dtype: DType::Bf16,
            max_topk: 8,
            max_scales: 0,
        };
        let config = Config::with_sms(2 * num_channels).expect("an even number of SMs");
        let options = Options::new(shape).config(config);
        let device = VirtConfig { sm_count: 2, ..VirtConfig::default() };
        Setup { ranks, options, device }.timeout(PATIENCE)
    }

    /// The options of the buffers, to change one by one.
    pub fn fields(&mut self) -> &mut Fields {
        internal::fields(&mut self.options)
    }

    /// Room for so many entries of a token.
    pub fn max_topk(mut self, max_topk: u32) -> Setup {
        self.fields().shape.max_topk = max_topk;
        self
    }

    /// Room for so many scales of a token.
    pub fn max_scales(mut self, max_scales: u32) -> Setup {
        self.fields().shape.max_scales = max_scales;
        self
    }

    /// Longest wait of a kernel for a peer. Transports, which wait in real time, keep [`PATIENCE`].
    pub fn timeout(mut self, timeout: Duration) -> Setup {
        let fields = self.fields();
        fields.timeout = timeout;
        fields.transport.timeout = PATIENCE;
        self
    }

    /// Launch shapes.
    pub fn tuning(mut self, tuning: Tuning) -> Setup {
        self.fields().tuning = tuning;
        self
    }

    /// `None`: all ranks are on one node. Nodes are kept apart even if memory is mapped between
    /// them.
    pub fn nodes(mut self, nodes: Option<NodeLinks>) -> Setup {
        let ranks = self.ranks;
        let fields = self.fields();
        fields.ranks_per_node = nodes.map(|nodes| nodes.ranks_per_node);
        fields.keep_nodes = true;
        if let Some(nodes) = nodes {
            let count = ranks / nodes.ranks_per_node.max(1);
            fields.config = fields.config.for_nodes(count);
            fields.transport.kind = nodes.transport;
            fields.transport.queues_per_peer = nodes.queues;
        }
        self
    }

    /// Ranks that can map each other's memory are one node.
    pub fn join_nodes(mut self) -> Setup {
        self.fields().keep_nodes = false;
        self
    }

    /// Draws the order of the warps of each kernel.
    pub fn schedule_seed(mut self, seed: Option<u64>) -> Setup {
        self.device.schedule_seed = seed;
        self
    }

    /// Runs `main` on every rank, as threads of a group of their own.
    ///
    /// # Panics
    /// See [`run_checked`].
    pub fn run<T: Send>(&self, main: impl Fn(&mut Rank) -> Result<T> + Sync) -> Vec<T> {
        run_checked(self.ranks, |group| Rank::join(self, group), main)
    }
}

/// Runs `main` on the ranks that `join` makes of a group, each on a thread.
///
/// # Panics
/// A rank returns an error, panics, or has recorded a failed check.
pub fn run_checked<B, T: Send>(
    ranks: u32,
    join: impl Fn(Arc<dyn ProcessGroup>) -> Result<Rank<B>> + Sync,
    main: impl Fn(&mut Rank<B>) -> Result<T> + Sync,
) -> Vec<T> {
    let outcomes = run_ranks(ranks, |_, group| {
        let mut rank = join(group)?;
        let outcome = main(&mut rank).and_then(|value| rank.synchronize().map(|()| value));
        // Peers may detect the error late; until then, this line shows the reason of their wait.
        let outcome = outcome.inspect_err(|error| eprintln!("rank {} failed: {error}", rank.rank));
        let name = |failure| format!("rank {}: {failure}", rank.rank);
        Ok((outcome?, rank.failures.into_iter().map(name).collect()))
    });
    let (values, failures): (Vec<T>, Vec<Vec<String>>) = outcomes.into_iter().unzip();
    assert_no_failures(failures.concat());
    values
}

/// # Panics
/// Where there are failures.
pub fn assert_no_failures(failures: Vec<String>) {
    assert!(
        failures.is_empty(),
        "{} checks failed:\n{}",
        failures.len(),
        failures[..failures.len().min(12)].join("\n")
    );
}

/// Something that a dispatch writes: where its rows begin in the pool, how far apart they are, and
/// how long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    pub(crate) name: &'static str,
    pub(crate) at: DevicePtr,
    pub(crate) stride: u64,
    pub(crate) used: u64,
    /// It travels with an uncached dispatch alone.
    pub(crate) is_metadata: bool,
}

/// Calls that are launched as two halves, or whose waits are measured.
#[derive(Debug)]
struct Apart {
    seed: u64,
    calls: u64,
    waits: TypedTensor<'static, i64>,
    /// Whether waits can be measured.
    measures: bool,
}

impl Apart {
    /// Whether the next call is launched as two halves, and where its waits are added up. `rank`:
    /// the number of a rank that decides for itself, or one that all have.
    fn next(apart: &mut Option<Apart>, rank: u64) -> (bool, Option<&TypedTensor<'static, i64>>) {
        let Some(Apart { seed, calls, waits, measures }) = apart else { return (false, None) };
        *calls += 1;
        let mut rng = rng_of(&[*seed, *calls, rank]);
        (rng.random_bool(0.7), Some(&*waits).filter(|_| *measures && rng.random_bool(0.5)))
    }
}

/// One rank, with a buffer of either mode.
#[derive(Debug)]
pub struct Rank<B = Buffer> {
    /// Its number.
    pub rank: u32,
    /// The group of all ranks.
    pub group: Arc<dyn ProcessGroup>,
    /// Its stream.
    pub stream: Arc<Stream>,
    /// The buffer under test.
    pub buffer: B,
    /// Whether [`Rank::layout`] and its siblings run on the communication stream.
    pub on_comm_stream: bool,
    /// Checks that failed.
    pub failures: Vec<String>,
    /// The launches of high-throughput calls, if they are not launched whole.
    apart: Option<Apart>,
    /// The memory that dispatches write, once a dispatch has returned it.
    pub(crate) regions: Vec<Region>,
}

impl<B: RoundTrip> Rank<B> {
    /// Makes the stream and the buffer. Collective.
    pub fn new(device: Device, group: Arc<dyn ProcessGroup>, options: B::Options) -> Result<Rank<B>> {
        let stream = Stream::new(&device)?;
        let buffer = B::create(device, &*group, options)?;
        Ok(Rank::with(group, stream, buffer))
    }

    /// Waits for the stream; Ok unless an operation has recorded an error.
    ///
    /// # Errors
    /// The recorded error, and those of the driver.
    pub fn outcome(&self) -> Result<()> {
        self.stream.synchronize()?;
        self.buffer.recorded()
    }

    /// Runs one round trip of a case and compares all results with the oracle, bit for bit. Returns
    /// the number of rows that a dispatch received. Collective.
    ///
    /// Differences are noted and the trip continues, so that the other ranks are not left waiting.
    ///
    /// # Errors
    /// Errors of the operations.
    pub fn round_trip(&mut self, case: &B::Case) -> Result<u64> {
        B::round_trip(self, case)
    }
}

impl<B> Rank<B> {
    /// A rank of a stream and a buffer that are there.
    pub fn with(group: Arc<dyn ProcessGroup>, stream: impl Into<Arc<Stream>>, buffer: B) -> Rank<B> {
        Rank {
            rank: group.rank(),
            group,
            stream: stream.into(),
            buffer,
            on_comm_stream: false,
            failures: Vec::new(),
            apart: None,
            regions: Vec::new(),
        }
    }

    /// Its GPU.
    pub fn device(&self) -> &Device {
        self.stream.device()
    }

    /// The time by which its kernels' deadlines pass.
    pub fn now(&self) -> Duration {
        now(self.device())
    }

    /// Waits for the stream, then for the other ranks.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()?;
        self.group.barrier(PATIENCE)
    }

    /// Records a failed check unless `got` and `want` are equal, with the first element that
    /// differs.
    pub fn equal<T: PartialEq + Debug>(&mut self, what: &str, got: &[T], want: &[T]) {
        self.equal_from(what, None, got, want);
    }

    /// The same of an array whose elements lie at `from`, without gaps. A rank's first difference has
    /// the origin of the wrong value.
    pub fn equal_at<T: PartialEq + Debug>(&mut self, what: &str, from: DevicePtr, got: &[T], want: &[T]) {
        self.equal_from(what, Some(from), got, want);
    }

    fn equal_from<T: PartialEq + Debug>(
        &mut self,
        what: &str,
        from: Option<DevicePtr>,
        got: &[T],
        want: &[T],
    ) {
        let differs = got.iter().zip(want).position(|(got, want)| got != want);
        let note = match differs {
            Some(at) => {
                // The search looks through all memory.
                let from = from.filter(|_| self.failures.is_empty());
                let origin = from.map(|from| origin(self.device(), from.add((at * size_of::<T>()) as u64)));
                let (got, want, origin) = (Short(&got[at]), Short(&want[at]), origin.unwrap_or_default());
                format!("[{at}] = {got:?}, expected {want:?}{origin}")
            }
            None if got.len() != want.len() => {
                format!(" has {} elements, expected {}", got.len(), want.len())
            }
            None => return,
        };
        self.failures.push(format!("{what}{note}"));
    }

    /// Notes a difference, if there is one.
    pub fn note(&mut self, difference: Difference) {
        self.failures.extend(difference);
    }

    /// The first failed check since the last call, which takes all of them.
    pub fn take_failure(&mut self) -> Option<String> {
        std::mem::take(&mut self.failures).into_iter().next()
    }

    /// Notes a failed check unless `holds`.
    pub fn check(&mut self, holds: bool, what: impl Into<String>) {
        if !holds {
            self.failures.push(what.into());
        }
    }

    /// A tensor with these rows' bytes.
    pub fn upload_rows(&self, dtype: DType, columns: u64, rows: &[Vec<u8>]) -> Result<Tensor<'static>> {
        let tensor = Tensor::alloc(self.device(), dtype, &[rows.len() as u64, columns])?;
        let bytes = rows.concat();
        assert_eq!(bytes.len() as u64, tensor.rows() * tensor.row_bytes());
        // SAFETY: the tensor's memory is live and as long as the bytes, which was just checked.
        unsafe { self.stream.write(tensor.ptr(), &bytes)? };
        Ok(tensor)
    }

    /// A typed tensor `[rows, columns]` of these values.
    pub fn upload_typed<T: Element>(
        &self,
        columns: usize,
        rows: &[Vec<T>],
    ) -> Result<TypedTensor<'static, T>> {
        TypedTensor::from_host(&self.stream, &[rows.len() as u64, columns as u64], &rows.concat())
    }

    /// The bytes of the first rows of a tensor, its padding left out.
    pub fn first_rows(&self, tensor: &Tensor, rows: u64) -> Result<Vec<u8>> {
        let (bytes, stride) = (tensor.row_bytes(), tensor.row_stride());
        if rows * bytes == 0 {
            return Ok(Vec::new());
        }
        let mut padded = vec![0; ((rows - 1) * stride + bytes) as usize];
        // SAFETY: the tensor's memory is live, from its first row to the end of the last of these.
        // Callers pass at most the number of rows that it has.
        unsafe { self.stream.read(&mut padded, tensor.ptr())? };
        match stride == bytes {
            true => Ok(padded),
            false => {
                Ok(padded.chunks(stride as usize).flat_map(|row| &row[..bytes as usize]).copied().collect())
            }
        }
    }

    /// The bytes of a row.
    pub fn row_of(&self, tensor: &Tensor, row: usize) -> Result<Vec<u8>> {
        self.rows_of(tensor, &[row]).map(|rows| rows.concat())
    }

    /// The bytes of some rows. Adjacent rows are read at once, other rows are not read.
    pub fn rows_of(&self, tensor: &Tensor, rows: &[usize]) -> Result<Vec<Vec<u8>>> {
        let bytes = tensor.row_bytes();
        let all = self.elements_of(tensor.ptr(), (bytes, tensor.row_stride()), rows)?;
        Ok(all.chunks(bytes as usize).map(<[u8]>::to_vec).collect())
    }

    /// Some columns of a tensor of 4-byte elements: by row, the elements in the order of `columns`,
    /// read as [`Rank::rows_of`] reads rows.
    pub fn columns_of(&self, tensor: &Tensor, columns: &[usize]) -> Result<Vec<Vec<[u8; 4]>>> {
        let of_row = |row: u64| {
            let at = tensor.ptr().add(row * tensor.row_stride());
            self.elements_of(at, (4, 4), columns).map(|bytes| values_of(&bytes))
        };
        (0..tensor.rows()).map(of_row).collect()
    }

    /// The bytes of elements of an array at `from`, whose elements have `bytes` bytes and lie `stride`
    /// apart.
    fn elements_of(
        &self,
        from: DevicePtr,
        (bytes, stride): (u64, u64),
        elements: &[usize],
    ) -> Result<Vec<u8>> {
        let mut all = vec![0; elements.len() * bytes as usize];
        let mut left = &mut all[..];
        for run in elements.chunk_by(|element, next| element + 1 == *next && bytes == stride) {
            let (got, behind) = left.split_at_mut(run.len() * bytes as usize);
            // SAFETY: the elements are those of a tensor.
            unsafe { self.stream.read(got, from.add(run[0] as u64 * stride))? };
            left = behind;
        }
        Ok(all)
    }

    /// The bytes of each row.
    pub fn row_bytes(&self, tensor: &Tensor) -> Result<Vec<Vec<u8>>> {
        if tensor.row_bytes() == 0 {
            return Ok(vec![Vec::new(); tensor.rows() as usize]);
        }
        let all = self.first_rows(tensor, tensor.rows())?;
        Ok(all.chunks_exact(tensor.row_bytes() as usize).map(<[u8]>::to_vec).collect())
    }

    /// All values.
    pub fn values<T: bytemuck::Pod>(&self, tensor: &Tensor) -> Result<Vec<T>> {
        Ok(values_of(&self.row_bytes(tensor)?.concat()))
    }

    /// Sets all bytes of a tensor, padding between rows included, in stream order.
    pub fn poison(&self, tensor: &Tensor) -> Result<()> {
        // SAFETY: the tensor's memory is live until the synchronise.
        unsafe { self.stream.fill(tensor.ptr(), POISON, tensor.rows() * tensor.row_stride())? };
        self.stream.synchronize()
    }

    /// All bytes of a tensor, padding between rows included.
    pub fn raw(&self, tensor: &Tensor) -> Result<Vec<u8>> {
        let mut bytes = vec![0; (tensor.rows() * tensor.row_stride()) as usize];
        // SAFETY: the tensor's memory is live, the padding of its last row included: that lies in
        // the pool.
        unsafe { self.stream.read(&mut bytes, tensor.ptr())? };
        Ok(bytes)
    }
}

impl Rank {
    /// Makes the device, the stream and the buffer. Collective.
    pub fn join(setup: &Setup, group: Arc<dyn ProcessGroup>) -> Result<Rank> {
        let device = open_device(VirtConfig { ordinal: group.rank(), ..setup.device.clone() })?;
        let mut options = setup.options.clone();
        let fields = internal::fields(&mut options);
        if let (TransportKind::Auto, Some(ranks_per_node)) = (fields.transport.kind, fields.ranks_per_node) {
            let node = group.rank() / ranks_per_node.max(1);
            fields.transport.hooks.host = Some(format!("host {}", node / 2));
        }
        Rank::new(device, group, options)
    }

    /// The buffer's place 0.
    pub fn place(&self) -> Result<Place> {
        self.buffer.place(0)
    }

    /// [`Buffer::get_dispatch_layout`].
    pub fn layout<'a>(
        &mut self,
        topk_idx: &TypedTensor<'a, impl ExpertId>,
        num_experts: u32,
    ) -> Result<DispatchLayout<'a>> {
        self.buffer.get_dispatch_layout(topk_idx, num_experts, order(&self.stream, self.on_comm_stream))
    }

    /// [`Buffer::get_placed_dispatch_layout`].
    pub fn placed_layout<'a>(
        &mut self,
        topk_idx: &TypedTensor<'a, impl ExpertId>,
        map: &ExpertMap,
    ) -> Result<DispatchLayout<'a>> {
        self.buffer.get_placed_dispatch_layout(topk_idx, map, order(&self.stream, self.on_comm_stream))
    }

    /// Launches some of the calls that follow as two halves, and measures the waits of some: which,
    /// the seed draws, the same on every rank.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn launch_apart(&mut self, seed: u64) -> Result<()> {
        let ranks = self.buffer.num_ranks() as usize;
        let waits = TypedTensor::from_host(&self.stream, &[ranks as u64], &vec![0; ranks])?;
        self.apart = Some(Apart { seed, calls: 0, waits, measures: self.buffer.num_nodes() == 1 });
        Ok(())
    }

    /// The calls' waits for each rank, in ns, since [`Rank::launch_apart`]; empty before.
    ///
    /// # Errors
    /// The error of the last call, and those of the driver.
    pub fn waited(&self) -> Result<Vec<i64>> {
        self.apart.as_ref().map_or(Ok(Vec::new()), |apart| apart.waits.values(&self.stream))
    }

    /// [`Buffer::dispatch`].
    pub fn dispatch<'p>(
        &mut self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
    ) -> Result<Received<'p>> {
        let order = order(&self.stream, self.on_comm_stream);
        // Each rank draws for itself.
        let (in_halves, waits) = Apart::next(&mut self.apart, self.rank.into());
        let request = waits.into_iter().fold(request, DispatchRequest::cumulative_wait_ns);
        if in_halves {
            return self.buffer.dispatch_send(place, request, order)?.receive(order);
        }
        self.buffer.dispatch(place, request, order)
    }

    /// [`Buffer::dispatch_cached`].
    pub fn dispatch_cached<'p>(
        &mut self,
        place: &'p mut Place,
        request: CachedDispatchRequest<'_>,
    ) -> Result<Received<'p>> {
        let order = order(&self.stream, self.on_comm_stream);
        let (in_halves, waits) = Apart::next(&mut self.apart, self.rank.into());
        let request = waits.into_iter().fold(request, CachedDispatchRequest::cumulative_wait_ns);
        if in_halves {
            return self.buffer.dispatch_cached_send(place, request, order)?.receive(order);
        }
        self.buffer.dispatch_cached(place, request, order)
    }

    /// [`Buffer::combine`].
    pub fn combine(&mut self, request: CombineRequest<'_>) -> Result<Combined> {
        let order = order(&self.stream, self.on_comm_stream);
        // Combines of a tensor draw the same on every rank.
        let (in_halves, waits) = Apart::next(&mut self.apart, u64::MAX);
        let request = waits.into_iter().fold(request, CombineRequest::cumulative_wait_ns);
        if in_halves {
            return self.buffer.combine_send(request, order)?.receive(order);
        }
        self.buffer.combine(request, order)
    }

    /// [`Buffer::combine_into`].
    pub fn combine_into(
        &mut self,
        request: CombineRequest<'_>,
        out: &Tensor<'_>,
        out_topk_weights: Option<&TypedTensor<'_, f32>>,
    ) -> Result<Option<Event>> {
        let order = order(&self.stream, self.on_comm_stream);
        let (in_halves, waits) = Apart::next(&mut self.apart, u64::MAX);
        let request = waits.into_iter().fold(request, CombineRequest::cumulative_wait_ns);
        if in_halves {
            return self.buffer.combine_send_into(request, out, out_topk_weights, order)?.receive(order);
        }
        self.buffer.combine_into(request, out, out_topk_weights, order)
    }

    /// Counts that the host does not wait for, with room for all that the pool can hold.
    pub fn on_device(&self) -> Counts {
        Counts::OnDevice { capacity: self.buffer.capacity() }
    }
}

/// A copy of a tensor's first rows in `stream`'s order, without their padding.
///
/// # Errors
/// Errors of the driver.
pub fn keep(stream: &Stream, tensor: &Tensor<'_>, rows: u64) -> Result<Tensor<'static>> {
    let copy = Tensor::alloc(stream.device(), tensor.dtype(), &[rows, tensor.columns()])?;
    let bytes = tensor.row_bytes();
    for row in 0..rows {
        let (to, from) = (copy.ptr().add(row * bytes), tensor.ptr().add(row * tensor.row_stride()));
        // SAFETY: the library guarantees that both live until the stream has executed the copy.
        unsafe { stream.copy(to, from, bytes)? };
    }
    Ok(copy)
}

fn order(stream: &Stream, on_comm_stream: bool) -> StreamOrder<'_> {
    if on_comm_stream { StreamOrder::comm(stream) } else { StreamOrder::on(stream) }
}

/// The start of a long `Debug` output.
struct Short<'a, T>(&'a T);

impl<T: Debug> Debug for Short<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = format!("{:?}", self.0);
        match text.char_indices().nth(160) {
            None => f.write_str(&text),
            Some((end, _)) => write!(f, "{}.. ({} characters)", &text[..end], text.len()),
        }
    }
}

/// Rows as bytes.
pub fn as_bytes<T: bytemuck::Pod>(rows: &[Vec<T>]) -> Vec<Vec<u8>> {
    rows.iter().map(|row| bytes_of(row)).collect()
}

/// # Panics
/// Where the error's text lacks one of `parts`.
#[track_caller]
pub fn assert_names(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}
