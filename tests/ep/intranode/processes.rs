//! One process per rank.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use epoxide::Error;
use epoxide::group::{FileStore, ProcessGroup, STORE, Store, rendezvous};
use epoxide::throughput::DispatchRequest;
use epoxide::{DType, Tensor};
use epoxide_launch::{RankExit, RankExits, spawn_ranks};
use epoxide_testing::alone::one_test;
use epoxide_testing::oracle::{Routing, Style};

use epoxide_testing::harness::{PATIENCE, Rank, assert_no_failures};
use epoxide_testing::roundtrip::Case;

/// Set where this test binary runs as a rank.
const ROLE: &str = "EPOXIDE_TEST_ROLE";
/// Exit code of the dying rank.
const DEAD: i32 = 3;
/// How long the other ranks wait for the dead one, in real time.
const TIMEOUT: Duration = Duration::from_secs(10);

fn case() -> Case {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let routing = Routing::random(&mut rng, &[17, 0, 30, 5], 4, 16, Style::WithHoles);
    Case { num_channels: 3, expert_alignment: 8, ..Case::new(routing, 112) }
}

/// Main function of a process that is a rank; does nothing as a test of its own.
#[test]
fn as_a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let case = case();
    let group: Arc<dyn ProcessGroup> = Arc::new(rendezvous(PATIENCE).unwrap());
    let timeout = if role == "die" { TIMEOUT } else { PATIENCE };
    let mut rank = Rank::join(&case.setup().timeout(timeout), group).unwrap();
    match role.as_str() {
        "exchange" => {
            rank.check_everything(&case).unwrap();
            rank.synchronize().unwrap();
            assert_no_failures(rank.failures);
        }
        "die" if rank.rank == 2 => {
            // A death aborts the group, so the rank dies only after the others have finished.
            for other in [0, 1, 3] {
                store().get(&format!("joined.{other}"), PATIENCE).unwrap();
            }
            std::process::exit(DEAD)
        }
        "die" => {
            store().set(&format!("joined.{}", rank.rank), b"").unwrap();
            let topk_idx = rank.upload_typed(4, &case.routing.topk_idx[rank.rank as usize]).unwrap();
            let x = Tensor::alloc(rank.device(), DType::Bf16, &[topk_idx.rows(), 56]).unwrap();
            let layout = rank.layout(&topk_idx, case.routing.num_experts).unwrap();
            let mut place = rank.place().unwrap();
            let request = DispatchRequest::new(&x, &layout);
            let error = rank.dispatch(&mut place, request).expect_err("rank 2 is dead");
            assert!(matches!(error, Error::PeerTimeout { peer: 2, .. }), "{error}");
        }
        other => panic!("no role {other}"),
    }
}

/// The store that the ranks meet at.
fn store() -> FileStore {
    let address = std::env::var(STORE).unwrap();
    FileStore::new(address.strip_prefix("file://").unwrap()).unwrap()
}

fn spawn(role: &str) -> RankExits {
    let outcome = spawn_ranks(4, PATIENCE, |_| {
        let mut command = one_test("intranode::processes::as_a_rank");
        command.env(ROLE, role).stdout(Stdio::null());
        Ok(command)
    });
    outcome.unwrap()
}

#[test]
fn processes_exchange_the_same_rows_as_threads() {
    assert_eq!(spawn("exchange").exits, [RankExit::Code(0); 4]);
}

#[test]
fn a_process_that_dies_is_named_by_the_others() {
    let alive = RankExit::Code(0);
    assert_eq!(spawn("die").exits, [alive, alive, RankExit::Code(DEAD), alive]);
}
