//! One process per rank, and one of them is killed.

use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};

use epoxide::group::{MeshGroup, RANK, STORE, WORLD_SIZE, rendezvous};
use epoxide::transport::TransportKind;
use epoxide::{Error, Result};
use epoxide_testing::alone::one_test;

use crate::turns::{Inputs, ROW, Turn, echo};
use epoxide_testing::harness::{NodeLinks, PATIENCE, Rank, Setup, assert_no_failures, num_ranks};
use epoxide_testing::tier;

/// Set where this test binary runs as a rank: the transport, and after how many milliseconds the
/// last rank is killed.
const ROLE: &str = "EPOXIDE_TEST_ROLE";
/// The last rank is killed.
fn ranks() -> u32 {
    num_ranks(4)
}

fn tokens(ranks: u32) -> Vec<u32> {
    [6, 4, 5, 3].into_iter().cycle().take(ranks as usize).collect()
}

/// The others' wait for the killed rank, in real time: processes have no virtual clock. Live ranks
/// meet it on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Exit code of a killed process, in `Child::wait`.
const NO_CODE: Option<i32> = None;

fn setup(ranks: u32, ranks_per_node: u32, transport: TransportKind) -> Setup {
    let nodes = NodeLinks { ranks_per_node, transport, queues: 2 };
    Setup::new(ranks, 2, 6, ROW).nodes(Some(nodes)).timeout(TIMEOUT)
}

/// Main function of a process that is a rank; does nothing as a test of its own.
#[test]
fn as_a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (transport, milliseconds) = role.split_once(' ').unwrap();
    let (transport, after) =
        (transport.parse().unwrap(), Duration::from_millis(milliseconds.parse().unwrap()));
    let group = Arc::new(rendezvous(PATIENCE).unwrap());
    let error = turns_until_an_error(&group, transport, after).expect_err("the last rank is killed");
    let Error::PeerTimeout { rank, peer, waited, .. } = error else { panic!("{error} is no PeerTimeout") };
    assert!(peer != rank && waited >= TIMEOUT, "{error}");

    // The others go on without it, in the same processes.
    let group = Arc::new(group.shrink_group(&[ranks() - 1]).unwrap());
    let left = ranks() - 1;
    let turn = Turn::random(1, &tokens(left), 2);
    let mut rank = Rank::join(&setup(left, 1, transport).timeout(PATIENCE), group).unwrap();
    let inputs = Inputs::upload(&turn, &rank).unwrap();
    let mut place = rank.place().unwrap();
    let (_, back) = echo(&mut rank, &mut place, &inputs).unwrap();
    rank.synchronize().unwrap();
    let got = rank.row_bytes(&back.combined_x).unwrap();
    rank.equal("combined_x", &got, &turn.sums[rank.rank as usize]);
    assert_no_failures(std::mem::take(&mut rank.failures));
}

/// Runs turn after turn; the last rank kills itself `after` the first one.
fn turns_until_an_error(group: &Arc<MeshGroup>, transport: TransportKind, after: Duration) -> Result<()> {
    let turn = Turn::random(0, &tokens(ranks()), 2);
    assert!(ranks().is_multiple_of(2), "{} ranks are not two nodes", ranks());
    let mut rank = Rank::join(&setup(ranks(), ranks() / 2, transport), group.clone())?;
    let (inputs, mut place) = turn.begin(&rank)?;
    echo(&mut rank, &mut place, &inputs)?;
    rank.synchronize()?;
    if rank.rank == ranks() - 1 {
        std::thread::spawn(move || {
            std::thread::sleep(after);
            kill_process(getpid(), Signal::KILL)
        });
    }
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        echo(&mut rank, &mut place, &inputs)?;
        rank.outcome()?;
    }
    Ok(())
}

fn spawn(rank: u32, role: &str, store: &Path) -> Child {
    let mut command = one_test("internode::processes::as_a_rank");
    command.env(RANK, rank.to_string()).env(WORLD_SIZE, ranks().to_string());
    command.env(STORE, format!("file://{}", store.display())).env(ROLE, role);
    command.stdout(Stdio::null()).spawn().unwrap()
}

#[test]
fn the_others_notice_a_killed_process_and_go_on_without_it() {
    let early = vec![("tcp", 3), ("shm", 11), ("direct", 7)];
    let late = vec![("tcp", 40), ("shm", 90), ("direct", 60)];
    // Most of the time passes in waiting: three groups at a time.
    for together in tier::pick(vec![early[..1].to_vec()], vec![early, late]) {
        let mut groups = Vec::new();
        for (transport, milliseconds) in together {
            let store = tempfile::tempdir().unwrap();
            let role = format!("{transport} {milliseconds}");
            let ranks: Vec<Child> = (0..ranks()).map(|rank| spawn(rank, &role, store.path())).collect();
            groups.push((role, store, ranks));
        }
        for (role, _store, ranks) in groups {
            let exits: Vec<Option<i32>> =
                ranks.into_iter().map(|mut rank| rank.wait().unwrap().code()).collect();
            let mut expected = vec![Some(0); exits.len()];
            *expected.last_mut().unwrap() = NO_CODE;
            assert_eq!(exits, expected, "{role}");
        }
    }
}
