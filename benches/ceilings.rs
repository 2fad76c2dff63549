//! Bandwidth of this machine's NVLink links: bulk copies (TMA) with all GPUs at once, by number of
//! blocks.
//!
//! `cargo bench --features cuda --bench ceilings [-- RANKS]`. Every other figure is a share of
//! these.

use std::time::Duration;

use epoxide::driver::cuda::{CudaDevice, devices};
use epoxide::driver::{Device, Event, Stream};
use epoxide::group::ProcessGroup;
use epoxide::group::run_threads;
use epoxide::internal::{CeilingShape, Direction, launch_ceiling};
use epoxide::throughput::{Buffer, Options, Shape};
use epoxide::{Error, Result};

const BLOCKS: [u32; 9] = [4, 8, 12, 16, 24, 32, 48, 64, 132];
const ROWS: u32 = 4096;
const ITERATIONS: u32 = 20;

fn main() {
    // Cargo passes `--bench`; a number is the number of ranks.
    let wanted = std::env::args().skip(1).find_map(|arg| arg.parse().ok());
    match run(wanted) {
        Ok(()) => {}
        Err(error @ Error::Unavailable { .. }) => println!("skipped: {error}"),
        Err(error) => {
            eprintln!("ceilings: {error}");
            std::process::exit(1);
        }
    }
}

fn run(wanted: Option<u32>) -> Result<()> {
    let found = devices()?.len() as u32;
    let ranks = wanted.unwrap_or(found.min(8));
    if ranks < 2 || ranks > found {
        let reason = format!("it takes 2 to {found} GPUs, {ranks} asked for");
        return Err(Error::Unavailable { what: "the NVLink ceiling".into(), reason });
    }
    println!(
        "{ranks} GPUs at once, remote GB/s (1e9 bytes) per GPU, median of {ITERATIONS}; 4 or 7 warps a block, best of both"
    );
    for row_bytes in [14336, 7168] {
        let results = run_threads(ranks, Duration::from_secs(120), |rank, group| {
            measure(CudaDevice::open(rank)?, &*group, row_bytes)
        })
        .map_err(|failure| failure.error)?;
        println!("\nrows of {row_bytes} bytes, each to or from {} peers", 5.min(ranks - 1));
        println!("{:>8} {:>10} {:>10}", "blocks", "push", "pull");
        for (i, blocks) in BLOCKS.into_iter().enumerate() {
            let mean = |side: usize| results.iter().map(|r| r[i][side]).sum::<f64>() / ranks as f64;
            println!("{blocks:>8} {:>10.1} {:>10.1}", mean(0), mean(1));
        }
    }
    Ok(())
}

/// (push, pull) in GB/s by number of blocks.
fn measure(device: Device, group: &dyn ProcessGroup, row_bytes: u32) -> Result<Vec<[f64; 2]>> {
    let stream = Stream::new(&device)?;
    let shape = Shape {
        max_tokens: ROWS,
        hidden: row_bytes as u64 / 2,
        dtype: epoxide::DType::Bf16,
        max_topk: 1,
        max_scales: 0,
    };
    let buffer = Buffer::new(device.clone(), group, Options::new(shape))?;
    let limit = device.info().max_shared_bytes_per_block;
    let mut results = Vec::new();
    for blocks in BLOCKS {
        let mut best = [0.0f64; 2];
        for (side, direction) in [Direction::Push, Direction::Pull].into_iter().enumerate() {
            for warps in [4, 7] {
                let stages = (limit / (warps * (row_bytes + 8))).min(3);
                if stages < 2 {
                    continue;
                }
                let fanout = 5.min(group.size() - 1);
                let shape = CeilingShape { blocks, warps, stages, rows: ROWS, row_bytes, fanout };
                let mut times = Vec::new();
                for _ in 0..ITERATIONS + 3 {
                    group.barrier(group.timeout())?;
                    let (start, end) = (Event::timed(&device)?, Event::timed(&device)?);
                    start.record(&stream)?;
                    launch_ceiling(&buffer, direction, shape, &stream)?;
                    end.record(&stream)?;
                    end.synchronize()?;
                    times.push(start.elapsed_ms(&end)? as f64 * 1e-3);
                }
                let timed = &mut times[3..];
                timed.sort_by(f64::total_cmp);
                best[side] = best[side].max(shape.stored_bytes() as f64 / timed[timed.len() / 2] / 1e9);
            }
        }
        results.push(best);
    }
    Ok(results)
}
