//! A rank is lost in the middle of a dispatch or a combine. The others end with an error inside the
//! deadline, and continue without it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::driver::Stream;
use epoxide::group::{HashStore, MeshGroup, MeshOptions, ProcessGroup};
use epoxide::internal::transport::Shaping;
use epoxide::throughput::{Buffer, CombineRequest, Config, DispatchRequest, Options, Place, Received, Shape};
use epoxide::transport::TransportOptions;
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result};
use half::bf16;

use crate::faults::die;
use crate::puts::pull_cable;
use crate::rank::{Rank, wrong};

const TOKENS: u64 = 8;
const HIDDEN: u64 = 64;
/// The rank that is lost. Not rank 0, which has the store.
const LOST: u32 = 1;
/// Longest wait for a peer.
const DEADLINE: Duration = Duration::from_secs(8);
/// Extra time for a slow machine's other work, and for leaving.
const SLACK: Duration = Duration::from_secs(60);

/// The delay of each put of the rank to be killed, which dies between two puts.
const LAG: Duration = Duration::from_millis(400);

/// The way in which the rank is lost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Killed while its dispatch runs.
    InDispatch,
    /// Killed while its combine runs.
    InCombine,
    /// Its cable is out for good.
    Unplugged,
}

pub fn run(rank: &Rank, how: How) -> Result<()> {
    let mut options = rank.options.clone();
    if rank.rank() == LOST && how != How::Unplugged {
        let shaping = Shaping::new(0);
        options.hooks.shaping =
            Some(rank.peers().into_iter().fold(shaping, |all, peer| all.lag(peer, 0, LAG)));
    }
    let mut nodes = Nodes::new(rank, &rank.group, options)?;
    let mut place = nodes.buffer.place(0)?;
    nodes.turn(&mut place)?;
    rank.group.barrier(rank.timeout)?;
    if rank.rank() == LOST {
        match how {
            How::InDispatch => {
                nodes.dispatch(&mut place)?;
                std::thread::sleep(LAG * 3 / 2);
                return Err(die());
            }
            How::InCombine => {
                let received = nodes.dispatch(&mut place)?;
                nodes.stream.synchronize()?;
                nodes.combine(&received)?;
                std::thread::sleep(LAG * 3 / 2);
                return Err(die());
            }
            How::Unplugged => pull_cable(None)?,
        }
    }
    let start = Instant::now();
    let error = loop {
        if let Err(error) = nodes.turn(&mut place) {
            break error;
        }
        rank.in_time(|| "a rank is lost, and no rank noticed".into())?;
    };
    let noticed = start.elapsed();
    let named = matches!(error, Error::PeerTimeout { operation, .. } if match how {
        How::InDispatch => operation == "dispatch",
        How::InCombine => operation == "combine",
        How::Unplugged => true,
    });
    if !named || noticed > DEADLINE + SLACK {
        return Err(wrong(format!("after {noticed:.1?}: {error}")));
    }
    println!("as it should be, after {noticed:.1?}: {error}");
    let start = Instant::now();
    drop((place, nodes));
    if start.elapsed() > SLACK {
        return Err(wrong(format!("dropping the buffer took {:.1?}", start.elapsed())));
    }

    let unplugged = how == How::Unplugged;
    let group = if unplugged || rank.group.size() == 2 {
        MeshGroup::new(Arc::new(HashStore::new()), 0, 1, "alone", MeshOptions::default())?
    } else {
        rank.group.shrink_group(&[LOST])?
    };
    let mut nodes = Nodes::new(rank, &group, rank.options.clone())?;
    let mut place = nodes.buffer.place(0)?;
    nodes.turn(&mut place)?;
    drop((place, nodes));
    println!("rank {} goes on, one of {}", rank.rank(), group.size());
    if unplugged {
        // The group would say goodbye over the same network.
        std::process::exit(0)
    }
    group.destroy()
}

/// Nodes of one rank each.
struct Nodes {
    stream: Stream,
    buffer: Buffer,
    rank: u32,
    size: u32,
    x: Tensor<'static>,
    topk_idx: TypedTensor<'static, i64>,
    topk_weights: TypedTensor<'static, f32>,
}

impl Nodes {
    fn new(rank: &Rank, group: &MeshGroup, transport: TransportOptions) -> Result<Nodes> {
        let device = rank.device();
        let stream = Stream::new(&device)?;
        let (own, size) = (group.rank(), group.size());
        let shape = Shape {
            max_tokens: TOKENS as u32,
            hidden: HIDDEN,
            dtype: DType::Bf16,
            max_topk: size,
            max_scales: 0,
        };
        let options = Options::new(shape)
            .config(Config::with_sms(4)?.for_nodes(size))
            .timeout(DEADLINE)
            .ranks_per_node(1)
            .transport(transport);
        let buffer = Buffer::new(device, group, options)?;
        let x: Vec<bf16> = (0..TOKENS).flat_map(|token| vec![value(own, token); HIDDEN as usize]).collect();
        let x = Tensor::from_host(&stream, DType::Bf16, &[TOKENS, HIDDEN], &x)?;
        // Every token goes to every rank.
        let ids: Vec<i64> = (0..TOKENS).flat_map(|_| 0..i64::from(size)).collect();
        let topk_idx = TypedTensor::from_host(&stream, &[TOKENS, u64::from(size)], &ids)?;
        let weights = vec![1.0f32; ids.len()];
        let topk_weights = TypedTensor::from_host(&stream, &[TOKENS, u64::from(size)], &weights)?;
        Ok(Nodes { stream, buffer, rank: own, size, x, topk_idx, topk_weights })
    }

    fn dispatch<'p>(&mut self, place: &'p mut Place) -> Result<Received<'p>> {
        let order = StreamOrder::on(&self.stream);
        let layout = self.buffer.get_dispatch_layout(&self.topk_idx, self.size, order)?;
        let request = DispatchRequest::new(&self.x, &layout).topk_weights(&self.topk_weights);
        self.buffer.dispatch(place, request, order)
    }

    fn combine(&mut self, received: &Received) -> Result<Tensor<'static>> {
        let request = CombineRequest::new(&received.recv_x, &received.handle);
        Ok(self.buffer.combine(request, StreamOrder::on(&self.stream))?.combined_x)
    }

    /// Dispatch and combine, compared with what they must be.
    fn turn(&mut self, place: &mut Place) -> Result<()> {
        let received = self.dispatch(place)?;
        let sums = self.combine(&received)?;
        self.stream.synchronize()?;
        self.buffer.check()?;
        let rows = (0..self.size).flat_map(|source| (0..TOKENS).map(move |token| value(source, token)));
        self.compare("received", &received.recv_x, rows)?;
        let sum = |token| bf16::from_f32(value(self.rank, token).to_f32() * self.size as f32);
        self.compare("summed", &sums, (0..TOKENS).map(sum))
    }

    fn compare(&self, what: &str, rows: &Tensor, want: impl Iterator<Item = bf16>) -> Result<()> {
        let have = rows.to_host::<bf16>(&self.stream)?;
        let want: Vec<bf16> = want.flat_map(|value| vec![value; HIDDEN as usize]).collect();
        if have == want { Ok(()) } else { Err(wrong(format!("wrong rows {what}"))) }
    }
}

/// Every element of a token's row.
fn value(rank: u32, token: u64) -> bf16 {
    bf16::from_f32(rank as f32 * TOKENS as f32 + token as f32)
}
