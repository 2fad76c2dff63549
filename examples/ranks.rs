//! Ranks as processes: each dispatches its tokens to the ranks of their experts, gets their sums
//! back, and checks them.
//!
//! ```text
//! cargo build --release --example ranks
//! cargo run --release -- launch --nproc-per-node 2 -- target/release/examples/ranks
//! ```
//!
//! torchrun, mpirun and srun start it as well. With `--features cuda` in the first command each
//! rank has a GPU. On several hosts, start the launcher on each with `--nnodes`, `--node-rank` and
//! `--rdzv-endpoint`.

use std::time::Duration;

use epoxide::driver::{Device, Stream};
use epoxide::group::{Member, ProcessGroup, rendezvous};
use epoxide::half::bf16;
use epoxide::throughput::{Buffer, CombineRequest, DispatchRequest, Options, Shape};
use epoxide::{DType, Result, StreamOrder, Tensor, TypedTensor};

/// How long ranks wait for each other.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Tokens of each rank.
const TOKENS: u32 = 16;
const HIDDEN: u64 = 256;
const TOPK: u32 = 2;
const EXPERTS_PER_RANK: u32 = 2;

/// Opens the device of the rank with this number on its host: the GPU of this ordinal.
#[cfg(feature = "cuda")]
fn open(local_rank: u32) -> Result<Device> {
    epoxide::driver::cuda::CudaDevice::open(local_rank)
}

/// Opens the device of the rank with this number on its host: a virtual GPU.
#[cfg(not(feature = "cuda"))]
fn open(local_rank: u32) -> Result<Device> {
    use epoxide::driver::virt::{VirtConfig, VirtualGpu};
    Ok(VirtualGpu::new(VirtConfig { ordinal: local_rank, ..VirtConfig::default() }))
}

fn main() -> Result<()> {
    // The launcher's variables name the ranks and the place where they meet.
    let group = rendezvous(TIMEOUT)?;
    let (rank, num_ranks) = (group.rank(), group.size());
    let member = Member::detect()?;
    // The rank itself is another number on the second host. A launcher that gives neither has one
    // host.
    let local_rank = member.as_ref().and_then(|member| member.local_rank).unwrap_or(rank);
    let ranks_per_node = member.and_then(|member| member.local_size).unwrap_or(num_ranks);

    let device = open(local_rank)?;
    let stream = Stream::new(&device)?;
    let order = StreamOrder::on(&stream);
    let shape =
        Shape { max_tokens: TOKENS, hidden: HIDDEN, dtype: DType::Bf16, max_topk: TOPK, max_scales: 0 };
    let options = Options::new(shape).ranks_per_node(ranks_per_node).timeout(TIMEOUT);
    let mut buffer = Buffer::new(device, &group, options)?;
    let mut place = buffer.place(0)?;

    // All elements of token t are t + 1, on each rank.
    let tokens = u64::from(TOKENS);
    let values: Vec<bf16> = (0..tokens * HIDDEN).map(|at| bf16::from_f32((at / HIDDEN + 1) as f32)).collect();
    let x = Tensor::from_host(&stream, DType::Bf16, &[tokens, HIDDEN], &values)?;
    // Expert e is on rank e / EXPERTS_PER_RANK. A token selects one of this rank's experts, and one
    // of the next rank's.
    let num_experts = num_ranks * EXPERTS_PER_RANK;
    let select =
        |token: u32, rank: u32| i64::from(rank % num_ranks * EXPERTS_PER_RANK + token % EXPERTS_PER_RANK);
    let ids: Vec<i64> =
        (0..TOKENS).flat_map(|token| [select(token, rank), select(token, rank + 1)]).collect();
    let topk_idx = TypedTensor::from_host(&stream, &[tokens, TOPK.into()], &ids)?;

    let layout = buffer.get_dispatch_layout(&topk_idx, num_experts, order)?;
    let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &layout), order)?;
    // The experts work on received.recv_x here; these return it as it is.
    let combined = buffer.combine(CombineRequest::new(&received.recv_x, &received.handle), order)?;

    let sums = combined.combined_x.to_host::<bf16>(&stream)?;
    // A token comes once to each rank with experts of it, and so returns from two.
    let copies = num_ranks.min(2) as f32;
    for (at, (sum, value)) in sums.iter().zip(&values).enumerate() {
        let expected = copies * value.to_f32();
        assert_eq!(sum.to_f32(), expected, "token {}, element {}", at as u64 / HIDDEN, at as u64 % HIDDEN);
    }
    println!("rank {rank} of {num_ranks}: received {} rows, sums are right", received.recv_x.rows());
    Ok(())
}

// With the feature `cuda` the program needs GPUs.
#[cfg(all(test, not(feature = "cuda")))]
mod tests {
    use epoxide_launch::{RankExit, spawn_ranks};
    use epoxide_testing::alone::one_test;

    use super::*;

    /// Set where this test binary runs as a rank.
    const ROLE: &str = "EPOXIDE_TEST_ROLE";

    /// Main function of a process that is a rank; does nothing as a test of its own.
    #[test]
    fn as_a_rank() {
        if std::env::var_os(ROLE).is_some() {
            main().unwrap();
        }
    }

    #[test]
    fn two_processes_get_their_sums() {
        let command = |_| {
            let mut command = one_test("tests::as_a_rank");
            command.env(ROLE, "rank");
            Ok(command)
        };
        let outcome = spawn_ranks(2, TIMEOUT, command).unwrap();
        assert_eq!(outcome.exits, [RankExit::Code(0); 2]);
    }
}
