//! Ranks that die or stall: every other rank's error names the lost rank and the polled word.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use epoxide::StreamOrder;
use epoxide::driver::{Memory, MemoryKind, Stream};
use epoxide::throughput::{CachedDispatchRequest, DispatchHandle, DispatchRequest, Place};
use epoxide::transport::TransportKind;
use epoxide::{Error, Result};
use epoxide_testing::harness::{
    NodeLinks, PATIENCE, Rank, Setup, assert_names, now, run_ranks, sleep, try_run_ranks,
};
use epoxide_testing::tier;

use crate::gate::Gate;
use crate::spread::{Spread, in_every_spread};
use crate::turns::{Inputs, ROW, Turn, check_sums, combine_in_pool, echo};

in_every_spread! {
    a_rank_that_does_not_dispatch_is_named,
    a_rank_that_dies_before_a_dispatch_is_named,
    a_rank_that_does_not_dispatch_shows_without_a_host_wait,
    a_rank_that_does_not_make_a_cached_dispatch_is_named,
    a_rank_that_dies_before_a_cached_dispatch_is_named,
    a_rank_that_does_not_combine_is_named,
    a_rank_that_dies_before_a_combine_is_named,
    operations_queued_behind_an_expired_one_do_not_wait_again,
    a_slow_rank_is_waited_for,
    a_rank_that_computes_for_long_is_waited_for,
    a_deadline_that_is_not_kept_is_noticed,
    a_buffer_can_be_dropped_with_work_in_flight,
    a_buffer_that_is_dropped_behind_a_stuck_stream_leaves_its_memory,
    buffers_in_opposite_orders_name_each_other,
}

/// The kernels' wait for an absent rank, on the clock of the ranks.
pub const TIMEOUT: Duration = Duration::from_millis(1500);
/// Most time until a wait has timed out.
pub const SOON: Duration = Duration::from_secs(10);
/// The host's shortest wait for work of the device.
const HOST_PATIENCE: Duration = Duration::from_secs(30);
const TOKENS: [u32; 4] = [6, 4, 5, 3];

/// The ranks of a test: three of one node, or two nodes of two. The last rank is the absent one.
#[derive(Debug, Clone, Copy)]
pub struct Ranks {
    transport: Option<TransportKind>,
}

impl Ranks {
    /// With all that can be between nodes; in the default tier TCP, which has proxies.
    fn all(spread: Spread) -> Vec<Ranks> {
        use TransportKind::{Direct, Shm, Tcp};
        let between = match spread {
            Spread::OneNode => return vec![Ranks { transport: None }],
            Spread::SeveralNodes => tier::pick(vec![Tcp], vec![Direct, Shm, Tcp]),
        };
        between.into_iter().map(|transport| Ranks { transport: Some(transport) }).collect()
    }

    /// On one node.
    pub fn of_one_node() -> Ranks {
        Ranks { transport: None }
    }

    /// On two nodes, with this between them.
    pub fn on_nodes(transport: TransportKind) -> Ranks {
        Ranks { transport: Some(transport) }
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
    fn nodes(self, ranks_per_node: u32) -> Option<NodeLinks> {
        self.transport.map(|transport| NodeLinks { ranks_per_node, transport, queues: 2 })
    }

    pub fn setup(self) -> Setup {
        Setup::new(self.count(), self.channels(), 6, ROW).nodes(self.nodes(2)).timeout(TIMEOUT)
    }

    pub fn turn(self) -> Turn {
        Turn::random(0, &TOKENS[..self.count() as usize], self.channels())
    }
}

/// How the last rank is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lost {
    /// It makes no further call, but its buffer stays.
    Stalls,
    /// It drops its buffer.
    Dies,
}

/// Runs a whole turn on all ranks, and then `call` on all but the last. `call` must end in an error
/// that names the lost rank and `operation`. `word` is the word that a rank of one node waits for.
/// Then they drop their buffers, and the remaining ranks make new ones.
fn without_the_last(
    spread: Spread,
    lost: Lost,
    operation: &str,
    word: &str,
    call: impl Fn(&mut Rank, &mut Place, &Inputs, &DispatchHandle) -> Result<()> + Sync,
) {
    for ranks in Ranks::all(spread) {
        let (turn, setup) = (ranks.turn(), ranks.setup());
        let errors = Mutex::new(BTreeMap::new());
        let outcome = try_run_ranks(ranks.count(), |number, group| {
            let mut rank = Rank::join(&setup, group.clone())?;
            let (inputs, mut place) = turn.begin(&rank)?;
            let handle = echo(&mut rank, &mut place, &inputs)?.0.handle;
            rank.synchronize()?;
            if number != ranks.lost() {
                let start = rank.now();
                let error = call(&mut rank, &mut place, &inputs, &handle);
                let error = error.expect_err("a rank did not come");
                let took = rank.now() - start;
                assert!((TIMEOUT..SOON).contains(&took), "noticed after {took:?}");
                // Every later call returns the same error at once.
                let start = rank.now();
                for later in [
                    rank.buffer.check().expect_err("the buffer is of no use"),
                    inputs.dispatch_exact(&mut rank, &mut place).expect_err("the buffer is of no use"),
                    rank.dispatch_cached(&mut place, CachedDispatchRequest::new(&inputs.x, &handle))
                        .expect_err("the buffer is of no use"),
                    combine_in_pool(&mut rank, &place, &handle).expect_err("the buffer is of no use"),
                ] {
                    assert_eq!(later.to_string(), error.to_string());
                }
                assert!(rank.now() - start < TIMEOUT, "later calls do not wait");
                rank.stream.synchronize()?;
                errors.lock().unwrap().insert(number, error);
            } else if lost == Lost::Dies {
                drop((inputs, handle, place, rank));
                return group.barrier(PATIENCE);
            }
            group.barrier(PATIENCE)
        });
        outcome.unwrap_or_else(|failure| panic!("{lost:?}, {ranks:?}: {failure}"));
        check_names(ranks, &errors.into_inner().unwrap(), operation, word);
        a_group_without_it(ranks);
    }
}

/// Every error names the waiting and the awaited rank; following them leads to the lost rank. On
/// one node all ranks wait for that rank itself.
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

/// Checks that `error` gives the time that rank number `number` waited for another in `operation`.
/// Returns the other rank and the word.
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
        let (inputs, mut place) = turn.begin(rank)?;
        let (_, back) = echo(rank, &mut place, &inputs)?;
        rank.stream.synchronize()?;
        check_sums(rank, "combined_x", &back, &turn)?;
        Ok(())
    });
}

fn without_a_dispatch(spread: Spread, lost: Lost) {
    without_the_last(spread, lost, "notify", "counts", |rank, place, inputs, _| {
        inputs.dispatch_exact(rank, place).map(drop)
    });
}

fn a_rank_that_does_not_dispatch_is_named(spread: Spread) {
    without_a_dispatch(spread, Lost::Stalls);
}

fn a_rank_that_dies_before_a_dispatch_is_named(spread: Spread) {
    without_a_dispatch(spread, Lost::Dies);
}

fn a_rank_that_does_not_dispatch_shows_without_a_host_wait(spread: Spread) {
    without_the_last(spread, Lost::Stalls, "notify", "counts", |rank, place, inputs, _| {
        let output = inputs.dispatch(rank, place)?;
        rank.buffer.check_dispatch(&output.handle, &rank.stream)
    });
}

fn without_a_cached_dispatch(spread: Spread, lost: Lost) {
    without_the_last(spread, lost, "dispatch", "ready", |rank, place, inputs, handle| {
        rank.dispatch_cached(place, CachedDispatchRequest::new(&inputs.x, handle))?;
        rank.outcome()
    });
}

fn a_rank_that_does_not_make_a_cached_dispatch_is_named(spread: Spread) {
    without_a_cached_dispatch(spread, Lost::Stalls);
}

fn a_rank_that_dies_before_a_cached_dispatch_is_named(spread: Spread) {
    without_a_cached_dispatch(spread, Lost::Dies);
}

fn without_a_combine(spread: Spread, lost: Lost) {
    without_the_last(spread, lost, "combine", "ready", |rank, place, _, handle| {
        combine_in_pool(rank, place, handle)?;
        rank.outcome()
    });
}

fn a_rank_that_does_not_combine_is_named(spread: Spread) {
    without_a_combine(spread, Lost::Stalls);
}

fn a_rank_that_dies_before_a_combine_is_named(spread: Spread) {
    without_a_combine(spread, Lost::Dies);
}

fn operations_queued_behind_an_expired_one_do_not_wait_again(spread: Spread) {
    without_the_last(spread, Lost::Stalls, "notify", "counts", |rank, place, inputs, _| {
        let queued = (0..30).map(|_| {
            let (output, back) = echo(rank, place, inputs)?;
            Ok((output.detach(), back))
        });
        // The timeout may already show while calls are still being made.
        let queued: Result<Vec<_>> = queued.collect();
        rank.stream.synchronize()?;
        queued.and_then(|_| rank.buffer.check())
    });
}

fn a_slow_rank_is_waited_for(spread: Spread) {
    for ranks in Ranks::all(spread) {
        let turn = ranks.turn();
        ranks.setup().run(|rank| {
            let inputs = Inputs::upload(&turn, rank)?;
            rank.synchronize()?;
            if rank.rank == ranks.lost() {
                sleep(rank.device(), TIMEOUT * 3 / 4);
            }
            let mut place = rank.place()?;
            let output = inputs.dispatch_exact(rank, &mut place)?;
            let got = rank.row_bytes(&output.recv_x)?;
            rank.equal("recv_x", &got, &turn.recv(rank.rank));
            Ok(())
        });
    }
}

/// Deadlines do not pass while a rank's thread has work, however long it takes in real time.
fn a_rank_that_computes_for_long_is_waited_for(spread: Spread) {
    const SHORT: Duration = Duration::from_millis(5);
    for ranks in Ranks::all(spread) {
        let turn = ranks.turn();
        ranks.setup().timeout(SHORT).run(|rank| {
            let inputs = Inputs::upload(&turn, rank)?;
            rank.synchronize()?;
            if rank.rank == ranks.lost() {
                let start = Instant::now();
                while start.elapsed() < 20 * SHORT {
                    std::hint::spin_loop();
                }
            }
            let mut place = rank.place()?;
            let output = inputs.dispatch_exact(rank, &mut place)?;
            let got = rank.row_bytes(&output.recv_x)?;
            rank.equal("recv_x", &got, &turn.recv(rank.rank));
            Ok(())
        });
    }
}

/// Kernels whose clock stands still, so that their waits never expire.
fn without_a_clock(ptx: &str) -> String {
    let mutated = ptx.replace(", %globaltimer;", ", 1;");
    assert_ne!(mutated, ptx, "no kernel reads the clock");
    mutated
}

/// The first rank's error while the last rank makes no dispatch, with these kernels; and the time
/// until the error on the ranks' clock.
fn wait_for_a_lost_rank(ranks: Ranks, ptx: &Path) -> (Error, Duration) {
    let (turn, mut setup) = (ranks.turn(), ranks.setup());
    setup.fields().ptx = Some(ptx.to_owned());
    let outcome = try_run_ranks(ranks.count(), |number, group| {
        let mut rank = Rank::join(&setup, group.clone())?;
        let inputs = Inputs::upload(&turn, &rank)?;
        rank.synchronize()?;
        let mut found = None;
        if number != ranks.lost() {
            let (start, mut place) = (rank.now(), rank.place()?);
            let error = inputs.dispatch_exact(&mut rank, &mut place).map(drop);
            found = Some((error.expect_err("a rank does not come"), rank.now() - start));
        }
        group.barrier(PATIENCE)?;
        Ok(found)
    });
    outcome
        .unwrap_or_else(|failure| panic!("{ranks:?}: {failure}"))
        .swap_remove(0)
        .expect("rank 0 is not lost")
}

/// The tests of this file can fail: with kernels that keep no deadline the wait is found to be
/// endless.
fn a_deadline_that_is_not_kept_is_noticed(spread: Spread) {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, ptx: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, ptx).unwrap();
        path
    };
    let sound = file("sound.ptx", epoxide_gpu::PTX);
    let mutated = file("mutated.ptx", &without_a_clock(epoxide_gpu::PTX));
    for ranks in Ranks::all(spread) {
        let (error, took) = wait_for_a_lost_rank(ranks, &sound);
        check_timeout(0, &error, "notify");
        assert!((TIMEOUT..2 * TIMEOUT).contains(&took), "{took:?}");
        // The host gives the wait for the counts up, after 20 deadlines.
        let (error, took) = wait_for_a_lost_rank(ranks, &mutated);
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(took >= 20 * TIMEOUT, "{took:?}");
        assert_names(&error, &["no answer of the device in 30s"]);
    }
}

/// Dispatches alone, on either stream, and whole turns.
fn a_buffer_can_be_dropped_with_work_in_flight(spread: Spread) {
    for ranks in Ranks::all(spread) {
        let (turn, setup) = (ranks.turn(), ranks.setup().timeout(PATIENCE));
        for on_comm_stream in [Some(false), Some(true), None] {
            let outcome = try_run_ranks(ranks.count(), |_, group| {
                let mut rank = Rank::join(&setup, group)?;
                let (inputs, mut place) = turn.begin(&rank)?;
                for _ in 0..5 {
                    let order = match on_comm_stream {
                        None => {
                            echo(&mut rank, &mut place, &inputs)?;
                            continue;
                        }
                        Some(true) => StreamOrder::comm(&rank.stream).asynchronous(),
                        Some(false) => StreamOrder::on(&rank.stream),
                    };
                    let experts = turn.routing.num_experts;
                    let layout = rank.buffer.get_dispatch_layout(&inputs.topk_idx, experts, order)?;
                    let request = DispatchRequest::new(&inputs.x, &layout).counts(rank.on_device());
                    rank.buffer.dispatch(&mut place, request, order)?;
                }
                // The pool is freed with the last of these two.
                drop(place);
                let Rank { stream, buffer, .. } = rank;
                drop(buffer);
                stream.synchronize()
            });
            outcome.unwrap_or_else(|failure| panic!("{ranks:?}: {failure}"));
        }
    }
}

/// The caller's stream is blocked by a kernel that ends long after the drop of the buffer. The drop
/// does not wait forever, and the memory of kernels after that one stays allocated.
fn a_buffer_that_is_dropped_behind_a_stuck_stream_leaves_its_memory(spread: Spread) {
    for ranks in Ranks::all(spread) {
        let (turn, setup) = (ranks.turn(), ranks.setup().timeout(Duration::from_millis(300)));
        let outcome = try_run_ranks(ranks.count(), |_, group| {
            let mut rank = Rank::join(&setup, group.clone())?;
            let inputs = Inputs::upload(&turn, &rank)?;
            let gate = Gate::new(rank.device())?;
            let mut place = rank.place()?;
            group.barrier(PATIENCE)?;
            gate.hold(&rank.stream)?;
            let order = StreamOrder::on(&rank.stream);
            let experts = turn.routing.num_experts;
            let layout = rank.buffer.get_dispatch_layout(&inputs.topk_idx, experts, order)?;
            let request = DispatchRequest::new(&inputs.x, &layout).counts(rank.on_device());
            drop(rank.buffer.dispatch(&mut place, request, order)?);
            drop((place, layout, inputs));
            let Rank { stream, buffer, .. } = rank;
            let start = now(stream.device());
            drop(buffer);
            let took = now(stream.device()) - start;
            assert!((HOST_PATIENCE..2 * HOST_PATIENCE).contains(&took), "{took:?}");
            // All of it runs from now on; a virtual GPU would report accesses to freed memory.
            gate.open();
            stream.synchronize()
        });
        outcome.unwrap_or_else(|failure| panic!("{ranks:?}: {failure}"));
    }
}

/// A buffer's deadline is for its peers. Work that the caller gave another stream may take longer:
/// the memory of the device is still freed behind the drop of the buffer.
#[test]
fn work_of_the_caller_may_take_longer_than_a_deadline() {
    let setup = Setup::new(2, 1, TOKENS[0], ROW).timeout(Duration::from_millis(1));
    let held = Mutex::new(None);
    run_ranks(2, |number, group| {
        let rank = Rank::join(&setup, group.clone())?;
        let device = rank.device().clone();
        if number == 1 {
            group.barrier(PATIENCE)?;
            let gate: Arc<Gate> = held.lock().unwrap().take().expect("a gate");
            sleep(&device, Duration::from_millis(50));
            gate.open();
            return group.barrier(PATIENCE);
        }
        let (gate, other) = (Arc::new(Gate::new(&device)?), Stream::new(&device)?);
        *held.lock().unwrap() = Some(gate.clone());
        gate.hold(&other)?;
        group.barrier(PATIENCE)?;
        drop(rank);
        let memory = Memory::alloc(&device, 1 << 20, MemoryKind::Device, "later")?;
        other.synchronize()?;
        let before = device.free_memory()?;
        drop(memory);
        assert!(device.free_memory()? > before);
        group.barrier(PATIENCE)
    });
}

/// Two buffers of a device whose multiprocessors have room for the operations of one at a time.
/// Operations of the second begin late, as after the gate of a stream.
fn buffers_in_opposite_orders_name_each_other(spread: Spread) {
    let turn = Turn::random(1, &TOKENS[..2], 2);
    let setup = Setup::new(2, 2, 6, ROW).nodes(spread.nodes(1)).timeout(TIMEOUT);
    run_ranks(2, |number, group| {
        let mut first = Rank::join(&setup, group.clone())?;
        let mut second = Rank::new(first.device().clone(), group.clone(), setup.options.clone())?;
        second.stream = first.stream.clone();
        let gate = Gate::new(first.device())?;
        let inputs = Inputs::upload(&turn, &first)?;
        // In one order all is well.
        for rank in [&mut first, &mut second] {
            let mut place = rank.place()?;
            echo(rank, &mut place, &inputs)?;
        }
        first.synchronize()?;
        let (mut earlier, mut later) = if number == 0 { (first, second) } else { (second, first) };
        let mut place = earlier.place()?;
        echo(&mut earlier, &mut place, &inputs)?;
        gate.hold(&earlier.stream)?;
        let mut place = later.place()?;
        echo(&mut later, &mut place, &inputs)?;

        let start = earlier.now();
        let error = loop {
            match earlier.buffer.check() {
                Err(error) => break error,
                Ok(()) => assert!(earlier.now() - start < SOON, "the wait has not ended"),
            }
            sleep(earlier.device(), TIMEOUT / 4);
        };
        let names = |rank: &Rank| format!("buffer {} of this process has a combine", rank.buffer.id());
        let order = "in the same order on every rank";
        assert_names(&error, &[&names(&later), "in flight on this device", order]);
        group.barrier(PATIENCE)?;
        gate.open();
        later.stream.synchronize()?;
        // This rank's operations did not block it, but the other rank's first operation of the
        // buffer has timed out.
        let error = later.buffer.check().expect_err("its peer has given it up");
        assert_names(&error, &[&names(&earlier), "failed as well on this device", order]);
        group.barrier(PATIENCE)
    });
}
