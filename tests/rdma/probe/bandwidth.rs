//! Puts of 1 MiB from rank 0 to rank 1, timed.

use std::time::Instant;

use epoxide::Result;
use epoxide::group::ProcessGroup as _;
use epoxide::transport::Put;

use crate::rank::{Rank, wrong};

const BYTES: u64 = 1 << 20;
/// Room for the counter.
const COUNTERS: u64 = 128;

pub fn run(rank: &Rank, puts: u64) -> Result<()> {
    let wire = rank.wire_memory(COUNTERS + BYTES)?;
    let mut links = rank.connect(&wire, &rank.group, 1)?;
    if rank.rank() == 0 {
        let queue = &mut *links.queues()[0].queue;
        let put = |value| Put { from: COUNTERS, to: COUNTERS, bytes: BYTES, counter: 0, value };
        queue.put_with_counter(&[put(1)])?;
        queue.quiet(rank.timeout)?;
        let start = Instant::now();
        for value in 0..puts {
            queue.put_with_counter(&[put(2 + value)])?;
        }
        queue.quiet(rank.timeout)?;
        // As perftest counts: MB of 2^20 bytes.
        let rate = puts as f64 / start.elapsed().as_secs_f64();
        println!("bandwidth {rate:.2} MB/s: {puts} puts of 1 MiB, each with its counter");
    }
    rank.group.barrier(rank.timeout)?;
    if rank.rank() == 1 && wire.counter(0) != puts + 1 {
        return Err(wrong(format!("counter {} after {puts} puts", wire.counter(0))));
    }
    rank.leave(links)
}
