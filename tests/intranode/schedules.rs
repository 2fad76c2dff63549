//! The same operations under many interleavings of all warps of all ranks, drawn from seeds: one host thread drives every
//! device, so a seed that fails can be run again.

use std::collections::HashSet;

use epoxide::Result;
use epoxide::driver::virt::{Executor, Machine, VirtConfig};
use epoxide::testing::lockstep;

use crate::harness::{Rank, Setup, assert_no_failures};
use crate::turns::{Inputs, ROW, Turn, echo};

const TOKENS: [u32; 3] = [6, 3, 5];
const CHANNELS: u32 = 2;

/// The setup on devices of one machine.
fn setup(machine: &Machine) -> Setup {
    let mut setup = Setup::new(TOKENS.len() as u32, CHANNELS, 6, ROW);
    let executor = Executor::Manual(machine.clone());
    setup.device = VirtConfig { executor, ..setup.device };
    setup
}

/// Runs `turns` with nothing but the last wait between them, and gives all bytes that came out, checked, with the digest of
/// the schedule.
fn run(seed: u64, turns: &[Turn]) -> Result<(u64, Vec<Vec<u8>>)> {
    let machine = Machine::new(seed);
    let setup = setup(&machine);
    // Only making the buffers needs the ranks to wait for each other in the host.
    let mut ranks = lockstep::run(setup.ranks, |group| Rank::join(&setup, group))?;
    let mut inputs = Vec::new();
    let mut outputs = Vec::new();
    for turn in turns {
        for rank in &mut ranks {
            inputs.push(Inputs::upload(turn, rank)?);
        }
    }
    for (turn, inputs) in turns.iter().zip(inputs.chunks(ranks.len())) {
        for (rank, inputs) in ranks.iter_mut().zip(inputs) {
            outputs.push(echo(rank, inputs, turn.routing.num_experts)?);
        }
    }
    for rank in &ranks {
        rank.stream.synchronize()?;
        rank.buffer.check()?;
    }
    let mut bytes = Vec::new();
    for (turn, outputs) in turns.iter().zip(outputs.chunks(ranks.len())) {
        for (rank, (_, back)) in ranks.iter_mut().zip(outputs) {
            let got = rank.row_bytes(&back.combined_x)?;
            rank.equal("combined_x", &got, &turn.sums[rank.rank as usize]);
            bytes.push(got.concat());
        }
    }
    // Received rows are overwritten by the next turn: those of the last one are still there.
    let last = turns.len() - 1;
    for (rank, (output, _)) in ranks.iter_mut().zip(&outputs[last * setup.ranks as usize..]) {
        let want = turns[last].recv(rank.rank);
        let mut got = rank.row_bytes(&output.recv_x)?;
        got.truncate(want.len());
        rank.equal("recv_x", &got, &want);
        bytes.push(got.concat());
    }
    let failures = ranks.iter_mut().flat_map(|rank| std::mem::take(&mut rank.failures));
    assert_no_failures(failures.map(|failure| format!("seed {seed}: {failure}")).collect());
    Ok((machine.schedule_digest(), bytes))
}

fn turns(count: u64) -> Vec<Turn> {
    (0..count).map(|seed| Turn::random(seed, &TOKENS, CHANNELS)).collect()
}

#[test]
fn a_seed_repeats_its_run_exactly() {
    let turns = turns(3);
    for seed in [0, 1, 0xdead_beef] {
        let (first, second) = (run(seed, &turns).unwrap(), run(seed, &turns).unwrap());
        assert_eq!(first.0, second.0, "seed {seed} took two schedules");
        assert_eq!(first.1, second.1, "seed {seed} gave two results");
    }
}

#[test]
fn a_hundred_schedules_give_the_same_results() {
    let turns = turns(3);
    let mut digests = HashSet::new();
    let mut results = HashSet::new();
    for seed in 0..100 {
        let (digest, bytes) = run(seed, &turns).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        digests.insert(digest);
        results.insert(bytes);
    }
    assert_eq!(results.len(), 1, "results depend on the schedule");
    assert_eq!(digests.len(), 100, "seeds must take different schedules");
}
