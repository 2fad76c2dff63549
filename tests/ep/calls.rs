//! Calls that do not fit together: every rank's error names its own call and the other rank's.

use std::collections::BTreeMap;
use std::sync::Mutex;

use epoxide::DType;
use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::internal::driver;
use epoxide::throughput::{CachedDispatchRequest, CombineRequest, DispatchHandle, DispatchRequest, Place};
use epoxide::transport::TransportKind;
use epoxide::{Error, Result, Scope};
use epoxide_testing::harness::{NodeLinks, PATIENCE, Rank, Setup, run_ranks, try_run_ranks};
use epoxide_testing::tier;

use crate::failing::{FailingDevice, REFUSAL};
use crate::spread::{Spread, in_every_spread};
use crate::timeouts::{Ranks, SOON, check_timeout};
use crate::turns::{HIDDEN, Inputs, ROW, TOPK, Turn, echo};

in_every_spread! {
    a_combine_against_a_cached_dispatch_is_named,
    a_dispatch_against_other_calls_is_named,
    handles_that_are_swapped_are_named,
    rows_of_different_lengths_are_named,
    other_places_dtypes_and_weights_are_named,
    calls_queued_behind_different_ones_do_not_hide_them,
    calls_that_agree_pass_in_any_order,
    a_dispatch_that_fails_half_way_breaks_the_buffer,
}

/// Rows shorter than those of [`Turn`].
const SHORT: usize = HIDDEN - 8;
const PLACES: u32 = 2;

/// One of the calls along a handle.
#[derive(Debug, Clone, Copy)]
enum Call {
    /// With a count exchange, to place 0.
    Dispatch,
    /// To this place, with rows of so many elements.
    Cached { handle: usize, place: usize, hidden: usize },
    /// In the place of the handle's dispatch.
    Combine { handle: usize, dtype: DType, weights: bool },
    /// In the place of the handle's dispatch, of a tensor of BF16 rows.
    Return { handle: usize },
}

use Call::{Cached, Combine, Dispatch, Return};

impl Call {
    /// Name of the call in errors, if the handles' dispatches were the operations 1 and 3.
    fn name(self) -> String {
        match self {
            Dispatch => "dispatch with a count exchange".into(),
            Cached { handle, place, hidden } => {
                let (operation, bytes) = (2 * handle + 1, 2 * hidden);
                format!(
                    "cached dispatch in place {place} with the handle of operation {operation}, {bytes} bytes and 0 (both are numbers of bytes, dtype and columns) per row"
                )
            }
            Combine { handle, dtype, weights } => {
                let (operation, bytes) = (2 * handle + 1, HIDDEN as u64 * dtype.size());
                let columns = if weights { TOPK } else { 0 };
                format!(
                    "combine of {dtype} rows in place {handle} with the handle of operation {operation}, {bytes} bytes and \
                     {columns} top-k weights per row"
                )
            }
            Return { handle } => {
                let operation = 2 * handle + 1;
                format!(
                    "combine of a tensor of bf16 rows in place {handle} with the handle of operation {operation}, {ROW} bytes and \
                     0 top-k weights per row"
                )
            }
        }
    }

    fn make(self, rank: &mut Rank, places: &mut [Place], known: &Known) -> Result<()> {
        match self {
            Dispatch => known.inputs.dispatch(rank, &mut places[0]).map(drop),
            Cached { handle, place, hidden } => {
                let x = if hidden == SHORT { &known.short } else { &known.inputs.x };
                let request = CachedDispatchRequest::new(x, &known.handles[handle]);
                rank.dispatch_cached(&mut places[place], request).map(drop)
            }
            Combine { handle, dtype, weights } => {
                let capacity = rank.buffer.capacity();
                let rows = places[handle].combine_rows(dtype, capacity, HIDDEN as u64)?;
                let request = CombineRequest::new(&rows, &known.handles[handle]);
                let with =
                    rank.upload_typed(TOPK as usize, &vec![vec![1.0f32; TOPK as usize]; capacity as usize])?;
                let request = if weights { request.topk_weights(&with) } else { request };
                let outcome = rank.combine(request).map(drop);
                // The weights go back behind the stream.
                drop(rows);
                outcome
            }
            Return { handle } => {
                let rows = vec![vec![0; 2 * HIDDEN]; rank.buffer.capacity() as usize];
                let x = rank.upload_rows(DType::Bf16, HIDDEN as u64, &rows)?;
                rank.combine(CombineRequest::new(&x, &known.handles[handle])).map(drop)
            }
        }
    }
}

/// Inputs of a rank's calls.
struct Known {
    inputs: Inputs,
    short: epoxide::Tensor<'static>,
    /// Handles of a dispatch to each place.
    handles: Vec<DispatchHandle>,
}

/// All ways in which ranks can be spread for these tests: how many there are, and over which nodes.
fn spreads(spread: Spread) -> Vec<(u32, Option<NodeLinks>)> {
    let nodes = |ranks_per_node, transport| Some(NodeLinks { ranks_per_node, transport, queues: 2 });
    match spread {
        Spread::OneNode => vec![(2, None), (3, None)],
        Spread::SeveralNodes => tier::sample([
            (2, nodes(1, TransportKind::Direct)),
            (2, nodes(1, TransportKind::Shm)),
            (4, nodes(2, TransportKind::Direct)),
            (4, nodes(2, TransportKind::Shm)),
        ])
        .collect(),
    }
}

fn setup(ranks: u32, nodes: Option<NodeLinks>) -> Setup {
    let channels = if nodes.is_some() { 2 } else { 1 };
    // Four bytes an element, so that combines of FP32 rows have room.
    let mut setup = Setup::new(ranks, channels, 6, 2 * ROW).nodes(nodes);
    setup.options = setup.options.places(PLACES);
    setup
}

/// Makes what ranks need: a dispatch to each place, each followed by a combine.
fn prepare(rank: &mut Rank, turn: &Turn) -> Result<(Vec<Place>, Known)> {
    let inputs = Inputs::upload(turn, rank)?;
    let tokens = turn.x[rank.rank as usize].len();
    let short = rank.upload_rows(DType::Bf16, SHORT as u64, &vec![vec![0; 2 * SHORT]; tokens])?;
    let mut places = (0..PLACES).map(|place| rank.buffer.place(place)).collect::<Result<Vec<_>>>()?;
    let mut handles = Vec::new();
    for place in &mut places {
        handles.push(echo(rank, place, &inputs)?.0.handle);
    }
    rank.synchronize()?;
    Ok((places, Known { inputs, short, handles }))
}

/// Makes the calls `theirs` on the last node (or on one node's last rank) and `ours` on all others,
/// and checks each rank's error. Each rank has a rank with other calls on its node or rail.
fn differ(spread: Spread, ours: &[Call], theirs: &[Call]) {
    for (ranks, nodes) in spreads(spread) {
        let others = nodes.map_or(1, |nodes| nodes.ranks_per_node);
        let is_other = |rank: u32| rank >= ranks - others;
        let calls_of = |rank: u32| if is_other(rank) { theirs } else { ours };
        let (mut setup, turn) = (setup(ranks, nodes), Turn::random(1, &[5, 6, 3, 4][..ranks as usize], 2));
        // In check mode an error has the longest waits, the same each time it is read.
        let is_checked = ranks == 2;
        setup.device.checker = is_checked.then(|| Checker::new(CheckConfig::default()));
        let errors = Mutex::new(BTreeMap::new());
        let outcome = try_run_ranks(ranks, |number, group| {
            let mut rank = Rank::join(&setup, group.clone())?;
            let (mut places, known) = prepare(&mut rank, &turn)?;
            let start = rank.now();
            for call in calls_of(number) {
                // An earlier difference may already have been detected.
                let _ = call.make(&mut rank, &mut places, &known);
            }
            let error = rank.outcome().expect_err("calls that differ");
            let took = rank.now() - start;
            assert!(took < SOON, "noticed after {took:?}: {error}");
            assert_eq!(error.scope(), Scope::ThisRank);
            // Every later call returns the same error.
            for later in [
                calls_of(number)[0].make(&mut rank, &mut places, &known),
                known.inputs.dispatch_exact(&mut rank, &mut places[0]).map(drop),
            ] {
                assert_eq!(later.expect_err("the buffer is of no use").to_string(), error.to_string());
            }
            errors.lock().unwrap().insert(number, error);
            group.barrier(PATIENCE)
        });
        let name = format!("{ours:?} and {theirs:?}, {ranks} ranks, {nodes:?}");
        outcome.unwrap_or_else(|failure| panic!("{name}: {failure}"));
        for (number, error) in errors.into_inner().unwrap() {
            let Error::OtherCall { rank, peer, epoch, ours, theirs, .. } = &error else {
                panic!("{name}: {error}");
            };
            assert_eq!((*rank, *epoch), (number, 5), "{name}: {error}");
            assert_ne!(is_other(*rank), is_other(*peer), "{name}: {error}");
            assert_eq!(*ours, calls_of(*rank)[0].name(), "{name}");
            assert_eq!(*theirs, calls_of(*peer)[0].name(), "{name}");
            let text = error.to_string();
            assert!(text.contains(ours) && text.contains(theirs), "{text}");
            assert!(is_checked || text.ends_with("make a new buffer"), "{text}");
        }
    }
}

fn a_combine_against_a_cached_dispatch_is_named(spread: Spread) {
    let combine = Combine { handle: 0, dtype: DType::Bf16, weights: false };
    differ(spread, &[combine], &[Cached { handle: 0, place: 0, hidden: HIDDEN }]);
}

/// Across nodes a tensor is copied in front of the combine, which is the same then.
#[test]
fn a_combine_of_a_tensor_against_one_of_rows_in_the_pool_is_named() {
    let in_pool = Combine { handle: 0, dtype: DType::Bf16, weights: false };
    differ(Spread::OneNode, &[Return { handle: 0 }], &[in_pool]);
    differ(Spread::OneNode, &[Return { handle: 1 }], &[Return { handle: 0 }]);
}

fn a_dispatch_against_other_calls_is_named(spread: Spread) {
    differ(spread, &[Dispatch], &[Combine { handle: 0, dtype: DType::Bf16, weights: false }]);
    differ(spread, &[Cached { handle: 1, place: 0, hidden: HIDDEN }], &[Dispatch]);
}

fn handles_that_are_swapped_are_named(spread: Spread) {
    let [first, second] = [0, 1].map(|handle| Cached { handle, place: 0, hidden: HIDDEN });
    differ(spread, &[first], &[second]);
    let [first, second] = [0, 1].map(|handle| Combine { handle, dtype: DType::Bf16, weights: false });
    differ(spread, &[first, second], &[second, first]);
}

fn rows_of_different_lengths_are_named(spread: Spread) {
    let [whole, short] = [HIDDEN, SHORT].map(|hidden| Cached { handle: 1, place: 0, hidden });
    differ(spread, &[whole], &[short]);
}

fn other_places_dtypes_and_weights_are_named(spread: Spread) {
    let [first, second] = [0, 1].map(|place| Cached { handle: 0, place, hidden: HIDDEN });
    differ(spread, &[first], &[second]);
    let combine = |dtype, weights| Combine { handle: 1, dtype, weights };
    differ(spread, &[combine(DType::Bf16, false)], &[combine(DType::Bf16, true)]);
    if spread == Spread::OneNode {
        differ(spread, &[combine(DType::Bf16, false)], &[combine(DType::F32, false)]);
    }
}

/// Later calls must not overwrite words that a late peer has not polled yet.
fn calls_queued_behind_different_ones_do_not_hide_them(spread: Spread) {
    let combine = Combine { handle: 0, dtype: DType::Bf16, weights: false };
    let cached = Cached { handle: 0, place: 0, hidden: HIDDEN };
    differ(spread, &[combine, cached, combine], &[cached, cached, combine]);
}

fn calls_that_agree_pass_in_any_order(spread: Spread) {
    for (ranks, nodes) in spreads(spread) {
        let turn = Turn::random(2, &[5, 6, 3, 4][..ranks as usize], 2);
        setup(ranks, nodes).run(|rank| {
            let (mut places, known) = prepare(rank, &turn)?;
            let combine = |handle| Combine { handle, dtype: DType::Bf16, weights: handle == 1 };
            let cached =
                |handle, place| Cached { handle, place, hidden: if place == 0 { HIDDEN } else { SHORT } };
            for call in
                [combine(1), combine(0), cached(1, 0), cached(0, 0), cached(0, 1), combine(1), combine(1)]
            {
                call.make(rank, &mut places, &known)?;
            }
            // Each dispatch makes another handle, and earlier handles do not change.
            let later = echo(rank, &mut places[1], &known.inputs)?.0.handle;
            rank.dispatch_cached(&mut places[0], CachedDispatchRequest::new(&known.inputs.x, &later))?;
            cached(0, 0).make(rank, &mut places, &known)?;
            let output = known.inputs.dispatch_exact(rank, &mut places[0])?;
            let got = rank.row_bytes(&output.recv_x)?;
            rank.equal("recv_x after all", &got, &turn.recv(rank.rank));
            rank.outcome()
        });
    }
}

/// The last rank's dispatch fails after its counts are sent.
fn a_dispatch_that_fails_half_way_breaks_the_buffer(spread: Spread) {
    let ranks = match spread {
        Spread::OneNode => Ranks::of_one_node(),
        Spread::SeveralNodes => Ranks::on_nodes(TransportKind::Shm),
    };
    let (turn, setup) = (ranks.turn(), ranks.setup());
    run_ranks(ranks.lost() + 1, |number, group| {
        let device = VirtualGpu::new(VirtConfig { ordinal: number, ..setup.device.clone() });
        let failing = FailingDevice::new(device, &["dispatch", "internode_dispatch"]);
        let mut rank = Rank::new(driver::device(failing.clone()), group.clone(), setup.options.clone())?;
        let (inputs, mut place) = turn.begin(&rank)?;
        let handle = echo(&mut rank, &mut place, &inputs)?.0.handle;
        rank.synchronize()?;
        if number != ranks.lost() {
            let error = inputs.dispatch_exact(&mut rank, &mut place).map(drop).and_then(|()| {
                // The counts have arrived; the rows never do.
                rank.outcome()
            });
            check_timeout(number, &error.expect_err("a rank sends no rows"), "dispatch");
        } else {
            failing.refuse_next();
            let layout = inputs.layout(&mut rank)?;
            let request = DispatchRequest::new(&inputs.x, &layout);
            let error =
                rank.dispatch(&mut place, request).map(drop).expect_err("the driver refuses the launch");
            assert!(error.to_string().contains(REFUSAL), "{error}");
            let start = rank.now();
            let rows = place.combine_rows(DType::Bf16, rank.buffer.capacity(), HIDDEN as u64)?;
            let combine = rank.combine(CombineRequest::new(&rows, &handle)).map(drop);
            drop(rows);
            for later in [
                rank.buffer.check(),
                rank.dispatch(&mut place, request).map(drop),
                rank.dispatch_cached(&mut place, CachedDispatchRequest::new(&inputs.x, &handle)).map(drop),
                combine,
                inputs.layout(&mut rank).map(drop),
            ] {
                let later = later.expect_err("the buffer is of no use");
                let Error::Broken { call, reason, .. } = &later else { panic!("{later}") };
                assert_eq!((*call, reason.contains(REFUSAL)), ("dispatch", true), "{later}");
            }
            assert!(rank.now() - start < SOON, "later calls do not wait");
        }
        group.barrier(PATIENCE)
    });
}
