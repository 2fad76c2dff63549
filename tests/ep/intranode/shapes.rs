//! Shapes that are of one node alone.

use epoxide::throughput::CombineRequest;
use epoxide_testing::harness::Setup;
use epoxide_testing::oracle::Style;
use epoxide_testing::roundtrip::Case;

use crate::shapes::routing;
use crate::turns::{Turn, check_sums};

#[test]
fn a_single_rank() {
    let routing = routing(&[17], 4, 5, Style::DistinctTopK);
    Case { expert_alignment: 128, ..Case::new(routing, 48) }.check();
}

#[test]
fn a_pool_of_more_than_4_gib() {
    // Rows for combine start behind 200 000 * 2 receive rows of 14 KiB; only accessed pages take
    // memory.
    let setup = Setup::new(2, 1, 200_000, 2 * 7168);
    let turn = Turn::random(3, &[6, 5], 1);
    setup.run(|rank| {
        rank.check(rank.buffer.pool_bytes() > 2 << 32, "the pool is large");
        let (inputs, mut place) = turn.begin(rank)?;
        let output = inputs.dispatch_exact(rank, &mut place)?;
        let rows = rank.row_bytes(&output.recv_x)?;
        rank.equal("recv_x", &rows, &turn.recv(rank.rank));
        let back = rank.combine(CombineRequest::new(&output.recv_x, &output.handle))?;
        check_sums(rank, "combined_x", &back, &turn)?;
        rank.stream.synchronize()
    });
}
