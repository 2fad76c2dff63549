//! Ranks that die or stall: every other rank says whom it waited for, and on what.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use epoxide::ep::{CombineRows, DType, DispatchOutput, DispatchRequest, Tensor};
use epoxide::group::launch::run_threads;
use epoxide::transport::{Shaping, TransportKind};
use epoxide::{Error, Result};

use crate::harness::{Nodes, PATIENCE, Rank, Setup, assert_names};
use crate::turns::{HIDDEN, Inputs, ROW, Turn, echo};

/// Long enough for ranks that do come, on a busy machine.
const TIMEOUT: Duration = Duration::from_millis(1500);
/// Within this a wait must have been given up.
const SOON: Duration = Duration::from_secs(10);
const POOL_ROWS: CombineRows<'static> = CombineRows::InPool { dtype: DType::Bf16, hidden: HIDDEN as u64 };
/// Two nodes of two; the last rank is the one that does not come.
const TOKENS: [u32; 4] = [6, 4, 5, 3];
const LOST: u32 = 3;
/// The rank with its index on the other node.
const RAIL_PEER: u32 = 1;

fn setup(transport: TransportKind) -> Setup {
    let nodes = Nodes { ranks_per_node: 2, transport, queues: 2 };
    Setup::new(4, 2, 6, ROW).nodes(Some(nodes)).timeout(TIMEOUT)
}

fn turn() -> Turn {
    Turn::random(0, &TOKENS, 2)
}

fn dispatch(rank: &mut Rank, turn: &Turn, inputs: &Inputs) -> Result<DispatchOutput> {
    let layout = rank.layout(&inputs.topk_idx, turn.routing.num_experts)?;
    rank.dispatch(DispatchRequest::new(&inputs.x, &layout))
}

/// How the lost rank is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lost {
    /// It makes no further call, but its buffer stays.
    Stalls,
    /// It drops its buffer.
    Dies,
}

/// Has the ranks go through a whole turn, and all but one then through `call`, which must end in an error on each of them.
/// Then they drop their buffers, and those that are left make new ones.
fn without_the_last(
    lost: Lost,
    operation: &str,
    call: impl Fn(&mut Rank, &Turn, &Inputs, &DispatchOutput) -> Result<()> + Sync,
) {
    for transport in [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp] {
        let turn = turn();
        let setup = setup(transport);
        let errors = Mutex::new(BTreeMap::new());
        let outcome = run_threads(4, PATIENCE, |number, group| {
            let mut rank = Rank::join(&setup, group.clone())?;
            let inputs = Inputs::upload(&turn, &rank)?;
            let (output, _) = echo(&mut rank, &inputs, turn.routing.num_experts)?;
            rank.synchronize()?;
            if number != LOST {
                let start = Instant::now();
                let error = call(&mut rank, &turn, &inputs, &output).expect_err("a rank did not come");
                assert!(start.elapsed() < SOON, "noticed after {:?}", start.elapsed());
                // From now on every call says the same, at once.
                let start = Instant::now();
                for later in [
                    rank.buffer.check().expect_err("the buffer is of no use"),
                    rank.combine(POOL_ROWS, None, &output.handle).expect_err("the buffer is of no use"),
                    dispatch(&mut rank, &turn, &inputs).expect_err("the buffer is of no use"),
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
        outcome.unwrap_or_else(|failure| panic!("{lost:?}, {transport:?}: {failure}"));
        check_names(&errors.into_inner().unwrap(), operation);
        a_group_without_it(transport);
    }
}

/// Every error says who waited for whom; following them leads to the rank that is lost.
fn check_names(errors: &BTreeMap<u32, Error>, operation: &str) {
    assert_eq!(errors.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
    let mut waits = BTreeMap::new();
    for (&number, error) in errors {
        let &Error::PeerTimeout { rank, peer, operation: at, word, needed, seen, waited, .. } = error else {
            panic!("rank {number}: {error} is no PeerTimeout");
        };
        assert!(rank == number && peer != number, "{error}");
        assert_eq!(at, operation, "{error}");
        assert!(seen < needed && (TIMEOUT..SOON).contains(&waited), "{error}");
        let what = format!("rank {number} waited");
        assert_names(error, &[&what, word, &format!("rank {peer} may have died")]);
        waits.insert(number, peer);
    }
    assert_eq!(waits[&RAIL_PEER], LOST, "the peer on the other node waits for nobody else: {errors:?}");
    for &start in waits.keys() {
        let mut at = start;
        for _ in 0..4 {
            at = waits.get(&at).copied().unwrap_or(at);
        }
        assert_eq!(at, LOST, "from rank {start}: {errors:?}");
    }
}

/// The other ranks go on without it, in the same process.
fn a_group_without_it(transport: TransportKind) {
    let turn = Turn::random(1, &TOKENS[..3], 2);
    let nodes = Nodes { ranks_per_node: 1, transport, queues: 2 };
    Setup::new(3, 2, 6, ROW).nodes(Some(nodes)).run(|rank| {
        let inputs = Inputs::upload(&turn, rank)?;
        let (_, back) = echo(rank, &inputs, turn.routing.num_experts)?;
        rank.stream.synchronize()?;
        let got = rank.row_bytes(&back.combined_x)?;
        rank.equal("combined_x", &got, &turn.sums[rank.rank as usize]);
        Ok(())
    });
}

#[test]
fn a_rank_that_does_not_dispatch_is_named() {
    without_the_last(Lost::Stalls, "notify", |rank, turn, inputs, _| dispatch(rank, turn, inputs).map(drop));
}

#[test]
fn a_rank_that_dies_before_a_dispatch_is_named() {
    without_the_last(Lost::Dies, "notify", |rank, turn, inputs, _| dispatch(rank, turn, inputs).map(drop));
}

#[test]
fn a_rank_that_does_not_make_a_cached_dispatch_is_named() {
    without_the_last(Lost::Stalls, "dispatch", |rank, _, inputs, output| {
        rank.dispatch_cached(&inputs.x, None, &output.handle)?;
        rank.stream.synchronize()?;
        rank.buffer.check()
    });
}

#[test]
fn a_rank_that_dies_before_a_cached_dispatch_is_named() {
    without_the_last(Lost::Dies, "dispatch", |rank, _, inputs, output| {
        rank.dispatch_cached(&inputs.x, None, &output.handle)?;
        rank.stream.synchronize()?;
        rank.buffer.check()
    });
}

#[test]
fn a_rank_that_does_not_combine_is_named() {
    without_the_last(Lost::Stalls, "combine", |rank, _, _, output| {
        rank.combine(POOL_ROWS, None, &output.handle)?;
        rank.stream.synchronize()?;
        rank.buffer.check()
    });
}

#[test]
fn a_rank_that_dies_before_a_combine_is_named() {
    without_the_last(Lost::Dies, "combine", |rank, _, _, output| {
        rank.combine(POOL_ROWS, None, &output.handle)?;
        rank.stream.synchronize()?;
        rank.buffer.check()
    });
}

#[test]
fn a_slow_rank_is_waited_for() {
    let turn = turn();
    setup(TransportKind::Shm).timeout(10 * TIMEOUT).run(|rank| {
        let inputs = Inputs::upload(&turn, rank)?;
        rank.synchronize()?;
        if rank.rank == LOST {
            std::thread::sleep(TIMEOUT / 2);
        }
        let output = dispatch(rank, &turn, &inputs)?;
        let got = rank.row_bytes(&output.recv_x)?;
        rank.equal("recv_x", &got, &turn.recv(rank.rank));
        Ok(())
    });
}

#[test]
fn a_buffer_can_be_dropped_with_work_in_flight() {
    let turn = turn();
    for transport in [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp] {
        let setup = setup(transport).timeout(PATIENCE);
        let outcome = run_threads(4, PATIENCE, |_, group| {
            let mut rank = Rank::join(&setup, group)?;
            let inputs = Inputs::upload(&turn, &rank)?;
            for _ in 0..5 {
                echo(&mut rank, &inputs, turn.routing.num_experts)?;
            }
            let Rank { stream, buffer, .. } = rank;
            drop(buffer);
            stream.synchronize()
        });
        outcome.unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// The link from rank 1 to rank 0 breaks after so many puts; each dispatch puts counts, its readiness and one chunk of rows,
/// each combine its readiness and one chunk of sums.
#[test]
fn a_link_that_breaks_is_named_with_what_it_lost() {
    let every_rank = vec![vec![0i64, 1]; 2];
    let nodes = Nodes { ranks_per_node: 1, transport: TransportKind::Shm, queues: 1 };
    for (puts, operation, word) in [
        (0, "notify", "counts of the node"),
        (2, "dispatch", "rows of the node"),
        (4, "combine", "sums of the node"),
    ] {
        let outcome = run_threads(2, PATIENCE, |number, group| {
            let mut setup = Setup::new(2, 1, 2, ROW).nodes(Some(nodes)).timeout(TIMEOUT);
            if number == 1 {
                setup.options.transport.shaping = Some(Shaping::new(1).cut_after(0, puts));
            }
            let mut rank = Rank::join(&setup, group.clone())?;
            let topk_idx = rank.upload(DType::I64, 2, &every_rank)?;
            let x = Tensor::alloc(rank.device(), DType::Bf16, &[2, HIDDEN as u64])?;
            let layout = rank.layout(&topk_idx, 2)?;
            let counts = rank.on_device();
            let output = rank.dispatch(DispatchRequest { counts, ..DispatchRequest::new(&x, &layout) })?;
            rank.stream.synchronize()?;
            let combined = rank.combine(POOL_ROWS, None, &output.handle);
            rank.stream.synchronize()?;
            let error = combined.and_then(|_| rank.buffer.check()).expect_err("the link is broken");
            // Rank 0 lacks what was lost; rank 1 waits until it has left.
            let on = if number == 0 { word } else { "the queue to it" };
            let Error::PeerTimeout { rank: me, peer, operation: at, word, .. } = &error else {
                panic!("{error} is no PeerTimeout");
            };
            assert_eq!((*me, *peer, *at, *word), (number, 1 - number, operation, on), "{error}");
            group.barrier(PATIENCE)
        });
        outcome.unwrap_or_else(|failure| panic!("after {puts} puts: {failure}"));
    }
}
