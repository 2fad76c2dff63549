//! Ranks that die or stall: every other rank says whom it waited for, and on what. On one node and on several.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use epoxide::ep::{CombineRows, DType, DispatchOutput, DispatchRequest, StreamOrder};
use epoxide::group::launch::run_threads;
use epoxide::transport::TransportKind;
use epoxide::{Error, Result};
use epoxide_testing::harness::{Nodes, PATIENCE, Rank, Setup, assert_names};

use crate::place::{Place, in_every_place};
use crate::turns::{HIDDEN, Inputs, ROW, Turn, echo};

in_every_place! {
    a_rank_that_does_not_dispatch_is_named,
    a_rank_that_dies_before_a_dispatch_is_named,
    a_rank_that_does_not_dispatch_shows_without_a_host_wait,
    a_rank_that_does_not_make_a_cached_dispatch_is_named,
    a_rank_that_dies_before_a_cached_dispatch_is_named,
    a_rank_that_does_not_combine_is_named,
    a_rank_that_dies_before_a_combine_is_named,
    operations_queued_behind_an_expired_one_do_not_wait_again,
    a_slow_rank_is_waited_for,
    a_buffer_can_be_dropped_with_work_in_flight,
}

/// Long enough for ranks that do come, on a busy machine.
pub const TIMEOUT: Duration = Duration::from_millis(1500);
/// Within this a wait must have been given up.
pub const SOON: Duration = Duration::from_secs(10);
pub const POOL_ROWS: CombineRows<'static> = CombineRows::InPool { dtype: DType::Bf16, hidden: HIDDEN as u64 };
const TOKENS: [u32; 4] = [6, 4, 5, 3];

/// The ranks of a test: three of one node, or two nodes of two. The last one is the one that does not come.
#[derive(Debug, Clone, Copy)]
pub struct Ranks {
    transport: Option<TransportKind>,
}

impl Ranks {
    /// With all that can be between nodes.
    fn all(place: Place) -> Vec<Ranks> {
        match place {
            Place::OneNode => vec![Ranks { transport: None }],
            Place::SeveralNodes => [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp]
                .map(|transport| Ranks { transport: Some(transport) })
                .to_vec(),
        }
    }

    /// On one node.
    pub fn of_one_node() -> Ranks {
        Ranks { transport: None }
    }

    fn count(self) -> u32 {
        if self.transport.is_none() { 3 } else { 4 }
    }

    fn channels(self) -> u32 {
        if self.transport.is_none() { 1 } else { 2 }
    }

    pub fn lost(self) -> u32 {
        self.count() - 1
    }

    /// So many ranks, of as many nodes if there are several.
    fn nodes(self, ranks_per_node: u32) -> Option<Nodes> {
        self.transport.map(|transport| Nodes { ranks_per_node, transport, queues: 2 })
    }

    pub fn setup(self) -> Setup {
        Setup::new(self.count(), self.channels(), 6, ROW).nodes(self.nodes(2)).timeout(TIMEOUT)
    }

    pub fn turn(self) -> Turn {
        Turn::random(0, &TOKENS[..self.count() as usize], self.channels())
    }
}

/// An exact dispatch of the turn.
pub fn dispatch(rank: &mut Rank, turn: &Turn, inputs: &Inputs) -> Result<DispatchOutput> {
    let layout = rank.layout(&inputs.topk_idx, turn.routing.num_experts)?;
    rank.dispatch(DispatchRequest::new(&inputs.x, &layout))
}

/// How the last rank is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lost {
    /// It makes no further call, but its buffer stays.
    Stalls,
    /// It drops its buffer.
    Dies,
}

/// Has the ranks go through a whole turn, and all but the last then through `call`, which must end in an error on each of them that says
/// so; `word` is what a rank of one node waits for. Then they drop their buffers, and those that are left make new ones.
fn without_the_last(
    place: Place,
    lost: Lost,
    operation: &str,
    word: &str,
    call: impl Fn(&mut Rank, &Turn, &Inputs, &DispatchOutput) -> Result<()> + Sync,
) {
    for ranks in Ranks::all(place) {
        let (turn, setup) = (ranks.turn(), ranks.setup());
        let errors = Mutex::new(BTreeMap::new());
        let outcome = run_threads(ranks.count(), PATIENCE, |number, group| {
            let mut rank = Rank::join(&setup, group.clone())?;
            let inputs = Inputs::upload(&turn, &rank)?;
            let (output, _) = echo(&mut rank, &inputs, turn.routing.num_experts)?;
            rank.synchronize()?;
            if number != ranks.lost() {
                let start = Instant::now();
                let error = call(&mut rank, &turn, &inputs, &output).expect_err("a rank did not come");
                let took = start.elapsed();
                assert!((TIMEOUT..SOON).contains(&took), "noticed after {took:?}");
                // From now on every call says the same, at once.
                let start = Instant::now();
                for later in [
                    rank.buffer.check().expect_err("the buffer is of no use"),
                    dispatch(&mut rank, &turn, &inputs).expect_err("the buffer is of no use"),
                    rank.dispatch_cached(&inputs.x, None, &output.handle)
                        .expect_err("the buffer is of no use"),
                    rank.combine(POOL_ROWS, None, &output.handle).expect_err("the buffer is of no use"),
                ] {
                    assert_eq!(later.to_string(), error.to_string());
                }
                assert!(start.elapsed() < TIMEOUT, "later calls do not wait");
                rank.stream.synchronize()?;
                errors.lock().unwrap().insert(number, error);
            } else if lost == Lost::Dies {
                drop((inputs, output, rank));
                return group.barrier(PATIENCE);
            }
            group.barrier(PATIENCE)
        });
        outcome.unwrap_or_else(|failure| panic!("{lost:?}, {ranks:?}: {failure}"));
        check_names(ranks, &errors.into_inner().unwrap(), operation, word);
        a_group_without_it(ranks);
    }
}

/// Every error says who waited for whom; following them leads to the rank that is lost. On one node everybody waits for that rank itself.
fn check_names(ranks: Ranks, errors: &BTreeMap<u32, Error>, operation: &str, word: &str) {
    assert_eq!(errors.keys().copied().collect::<Vec<_>>(), (0..ranks.lost()).collect::<Vec<_>>());
    let mut waits = BTreeMap::new();
    for (&number, error) in errors {
        let (peer, on) = check_timeout(number, error, operation);
        assert!(ranks.transport.is_some() || (peer, on) == (ranks.lost(), word), "{error}");
        waits.insert(number, peer);
    }
    if ranks.transport.is_some() {
        // The rank with its index on the other node.
        assert_eq!(waits[&(ranks.lost() - 2)], ranks.lost(), "it waits for nobody else: {errors:?}");
    }
    for &start in waits.keys() {
        let mut at = start;
        for _ in 0..ranks.count() {
            at = waits.get(&at).copied().unwrap_or(at);
        }
        assert_eq!(at, ranks.lost(), "from rank {start}: {errors:?}");
    }
}

/// Checks that `error` says how long rank `number` waited for another in `operation`; for which rank and word.
pub fn check_timeout<'a>(number: u32, error: &'a Error, operation: &str) -> (u32, &'a str) {
    let &Error::PeerTimeout { rank, peer, operation: at, word, needed, seen, waited, .. } = error else {
        panic!("rank {number}: {error} is no PeerTimeout");
    };
    assert!(rank == number && peer != number, "{error}");
    assert_eq!(at, operation, "{error}");
    assert!(seen < needed && (TIMEOUT..SOON).contains(&waited), "{error}");
    let parts = [&format!("rank {number} waited"), operation, word, &format!("rank {peer} may have died")];
    assert_names(error, &parts);
    (peer, word)
}

/// The other ranks go on without it, in the same process.
fn a_group_without_it(ranks: Ranks) {
    let tokens = &TOKENS[..ranks.lost() as usize];
    let turn = Turn::random(1, tokens, ranks.channels());
    Setup::new(ranks.lost(), ranks.channels(), 6, ROW).nodes(ranks.nodes(1)).run(|rank| {
        let inputs = Inputs::upload(&turn, rank)?;
        let (_, back) = echo(rank, &inputs, turn.routing.num_experts)?;
        rank.stream.synchronize()?;
        let got = rank.row_bytes(&back.combined_x)?;
        rank.equal("combined_x", &got, &turn.sums[rank.rank as usize]);
        Ok(())
    });
}

fn without_a_dispatch(place: Place, lost: Lost) {
    without_the_last(place, lost, "notify", "counts", |rank, turn, inputs, _| {
        dispatch(rank, turn, inputs).map(drop)
    });
}

fn a_rank_that_does_not_dispatch_is_named(place: Place) {
    without_a_dispatch(place, Lost::Stalls);
}

fn a_rank_that_dies_before_a_dispatch_is_named(place: Place) {
    without_a_dispatch(place, Lost::Dies);
}

fn a_rank_that_does_not_dispatch_shows_without_a_host_wait(place: Place) {
    without_the_last(place, Lost::Stalls, "notify", "counts", |rank, turn, inputs, _| {
        let layout = rank.layout(&inputs.topk_idx, turn.routing.num_experts)?;
        let counts = rank.on_device();
        let output = rank.dispatch(DispatchRequest { counts, ..DispatchRequest::new(&inputs.x, &layout) })?;
        rank.buffer.check_dispatch(&output.handle, &rank.stream)
    });
}

fn without_a_cached_dispatch(place: Place, lost: Lost) {
    without_the_last(place, lost, "dispatch", "ready", |rank, _, inputs, output| {
        rank.dispatch_cached(&inputs.x, None, &output.handle)?;
        rank.stream.synchronize()?;
        rank.buffer.check()
    });
}

fn a_rank_that_does_not_make_a_cached_dispatch_is_named(place: Place) {
    without_a_cached_dispatch(place, Lost::Stalls);
}

fn a_rank_that_dies_before_a_cached_dispatch_is_named(place: Place) {
    without_a_cached_dispatch(place, Lost::Dies);
}

fn without_a_combine(place: Place, lost: Lost) {
    without_the_last(place, lost, "combine", "ready", |rank, _, _, output| {
        rank.combine(POOL_ROWS, None, &output.handle)?;
        rank.stream.synchronize()?;
        rank.buffer.check()
    });
}

fn a_rank_that_does_not_combine_is_named(place: Place) {
    without_a_combine(place, Lost::Stalls);
}

fn a_rank_that_dies_before_a_combine_is_named(place: Place) {
    without_a_combine(place, Lost::Dies);
}

fn operations_queued_behind_an_expired_one_do_not_wait_again(place: Place) {
    without_the_last(place, Lost::Stalls, "notify", "counts", |rank, turn, inputs, _| {
        let queued = (0..30).map(|_| echo(rank, inputs, turn.routing.num_experts));
        // The timeout may already show while calls are still being made.
        let queued: Result<Vec<_>> = queued.collect();
        rank.stream.synchronize()?;
        queued.and_then(|_| rank.buffer.check())
    });
}

fn a_slow_rank_is_waited_for(place: Place) {
    for ranks in Ranks::all(place) {
        let turn = ranks.turn();
        ranks.setup().timeout(10 * TIMEOUT).run(|rank| {
            let inputs = Inputs::upload(&turn, rank)?;
            rank.synchronize()?;
            if rank.rank == ranks.lost() {
                std::thread::sleep(TIMEOUT / 2);
            }
            let output = dispatch(rank, &turn, &inputs)?;
            let got = rank.row_bytes(&output.recv_x)?;
            rank.equal("recv_x", &got, &turn.recv(rank.rank));
            Ok(())
        });
    }
}

/// Dispatches alone, on either stream, and whole turns.
fn a_buffer_can_be_dropped_with_work_in_flight(place: Place) {
    for ranks in Ranks::all(place) {
        let (turn, setup) = (ranks.turn(), ranks.setup().timeout(PATIENCE));
        for on_comm_stream in [Some(false), Some(true), None] {
            let outcome = run_threads(ranks.count(), PATIENCE, |_, group| {
                let mut rank = Rank::join(&setup, group)?;
                let inputs = Inputs::upload(&turn, &rank)?;
                for _ in 0..5 {
                    let order = match on_comm_stream {
                        None => {
                            echo(&mut rank, &inputs, turn.routing.num_experts)?;
                            continue;
                        }
                        Some(true) => StreamOrder::comm(&rank.stream).asynchronous(),
                        Some(false) => StreamOrder::on(&rank.stream),
                    };
                    let experts = turn.routing.num_experts;
                    let layout = rank.buffer.get_dispatch_layout(&inputs.topk_idx, experts, order)?;
                    let counts = rank.on_device();
                    let request = DispatchRequest { counts, ..DispatchRequest::new(&inputs.x, &layout) };
                    rank.buffer.dispatch(request, order)?;
                }
                let Rank { stream, buffer, .. } = rank;
                drop(buffer);
                stream.synchronize()
            });
            outcome.unwrap_or_else(|failure| panic!("{ranks:?}: {failure}"));
        }
    }
}
