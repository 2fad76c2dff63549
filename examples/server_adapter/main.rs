//! A server's view of epoxide: the sketch of a C interface in `adapter.rs`, used as a server uses
//! it, and compared with a computation on the host that does not model ranks.
//!
//! ```text
//! cargo run --release --example server_adapter
//! ```
//!
//! A captured decode step of three layers holds, for each layer, a kernel for the dispatch and one
//! for the combine, and nothing else. The experts between them work in place; here they return rows
//! unchanged.

mod adapter;

use std::ffi::CStr;
use std::process::ExitCode;

use adapter::{Context, Dispatch, Info, Params};
use bytemuck::{cast_slice, cast_slice_mut};
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Device, DevicePtr, Stream};
use epoxide::{DType, Result, Tensor, TypedTensor};
use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const RANKS: u32 = 3;
const MODEL: Params = Params {
    max_tokens: 10,
    max_decode_tokens: 6,
    hidden: 64,
    num_topk: 3,
    num_experts: 9,
    expert_alignment: 8,
};
const HIDDEN: usize = MODEL.hidden as usize;
const TOPK: usize = MODEL.num_topk as usize;

fn main() -> ExitCode {
    match std::panic::catch_unwind(run) {
        Ok(()) => {
            println!("PASS");
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    }
}

/// Runs the ranks, each a thread with a virtual GPU; they share only the id.
fn run() {
    let mut id = [0u8; 128];
    // SAFETY: it has 128 bytes.
    assert_eq!(unsafe { adapter::unique_id(id.as_mut_ptr()) }, 0, "no id");
    std::thread::scope(|scope| {
        let ranks = (0..RANKS).map(|rank| scope.spawn(move || serve(rank, id)));
        let ranks: Vec<_> = ranks.collect();
        for rank in ranks {
            rank.join().expect("a rank failed").unwrap_or_else(|error| panic!("{error}"));
        }
    });
}

/// A rank of the server.
struct Server {
    rank: u32,
    device: Device,
    stream: Stream,
    context: *mut Context,
    info: Info,
    /// The server's memory, allocated once; its addresses never change.
    memory: Memory,
}

struct Memory {
    x: Tensor<'static>,
    topk_idx: TypedTensor<'static, i32>,
    topk_weights: TypedTensor<'static, f32>,
    recv_x: Tensor<'static>,
    recv_topk_weights: TypedTensor<'static, f32>,
    recv_src_idx: TypedTensor<'static, i32>,
    recv_src_entry: TypedTensor<'static, i32>,
    psum_expert: TypedTensor<'static, i32>,
    psum_rank: TypedTensor<'static, i32>,
    rows: Tensor<'static>,
    out: Tensor<'static>,
}

/// The owner of the memory that outputs are in, where there is a choice.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Owner {
    Server,
    Context,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Decode,
    Prefill,
}

fn serve(rank: u32, id: [u8; 128]) -> Result<()> {
    let device = VirtualGpu::new(VirtConfig { ordinal: rank, sm_count: 4, ..VirtConfig::default() });
    let stream = Stream::new(&device)?;
    // SAFETY: the id has 128 bytes.
    let context = unsafe { adapter::ctx_create(&device, id.as_ptr(), RANKS, rank, MODEL) };
    assert!(!context.is_null(), "no context");
    // SAFETY: it was just made, and no other code has it.
    let info = adapter::info(unsafe { &*context });
    let memory = Memory::alloc(&stream, &info)?;
    let mut server = Server { rank, device, stream, context, info, memory };
    server.errors();
    for (seed, owner) in [(1, Owner::Server), (2, Owner::Context), (3, Owner::Context)] {
        server.decode(&Batch::random(seed, MODEL.max_decode_tokens as usize), owner)?;
        server.prefill(&Batch::random(seed + 10, MODEL.max_tokens as usize), owner)?;
    }
    server.errors_behind_a_dispatch(&Batch::random(4, MODEL.max_decode_tokens as usize))?;
    for tokens in [1, 4, MODEL.max_decode_tokens as usize] {
        server.decode_from_graphs(tokens)?;
    }
    server.stream.synchronize()?;
    // SAFETY: nothing uses it any more.
    unsafe { adapter::ctx_destroy(server.context) };
    Ok(())
}

impl Memory {
    fn alloc(stream: &Stream, info: &Info) -> Result<Memory> {
        let (device, hidden) = (stream.device(), u64::from(MODEL.hidden));
        let rows = info.decode.worst_expanded.max(info.prefill.worst_expanded);
        let (tokens, topk) = (u64::from(MODEL.max_tokens), u64::from(MODEL.num_topk));
        let rows_of = |rows| Tensor::alloc(device, DType::Bf16, &[rows, hidden]);
        let ints = |shape: &[u64]| Tensor::alloc(device, DType::I32, shape)?.typed::<i32>();
        let floats = |shape: &[u64]| Tensor::alloc(device, DType::F32, shape)?.typed::<f32>();
        Ok(Memory {
            x: rows_of(tokens)?,
            topk_idx: ints(&[tokens, topk])?,
            topk_weights: floats(&[tokens, topk])?,
            recv_x: rows_of(rows)?,
            recv_topk_weights: floats(&[rows])?,
            recv_src_idx: ints(&[rows])?,
            recv_src_entry: ints(&[rows, 2])?,
            psum_expert: ints(&[u64::from(info.local_experts) + 1])?,
            psum_rank: ints(&[RANKS.into()])?,
            rows: rows_of(rows)?,
            out: rows_of(tokens)?,
        })
    }
}

/// The tokens of all ranks: small whole numbers, so that all sums are exact.
struct Batch {
    /// By rank, then by token.
    tokens: Vec<Vec<Token>>,
}

#[derive(Clone)]
struct Token {
    x: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Batch {
    /// The same on every rank: different experts of each token, with holes. The last rank has fewer
    /// tokens.
    fn random(seed: u64, most: usize) -> Batch {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut token = || {
            let mut ids: Vec<i32> = Vec::new();
            while ids.len() < TOPK {
                let id = rng.random_range(-2..MODEL.num_experts as i32).max(-1);
                if id == -1 || !ids.contains(&id) {
                    ids.push(id);
                }
            }
            Token {
                x: (0..HIDDEN).map(|_| rng.random_range(0..8) as f32).collect(),
                ids,
                weights: (0..TOPK).map(|_| [0.5, 1.0, 2.0][rng.random_range(0..3)]).collect(),
            }
        };
        let tokens = |rank| if rank + 1 == RANKS { most.min(2) } else { most };
        Batch { tokens: (0..RANKS).map(|rank| (0..tokens(rank)).map(|_| token()).collect()).collect() }
    }

    /// The rows of a rank's experts, by expert: the token, its rank, its index there, and the
    /// entry, by source rank, then by token.
    fn received(&self, rank: u32) -> Vec<Vec<(&Token, [i32; 3])>> {
        let local = MODEL.num_experts / RANKS;
        let of_expert = |expert: u32| {
            let mut rows = Vec::new();
            for (source, tokens) in (0..).zip(&self.tokens) {
                for (index, token) in (0..).zip(tokens) {
                    let entries = (0..).zip(&token.ids).filter(|(_, id)| **id == expert as i32);
                    rows.extend(entries.map(|(k, _)| (token, [source, index, k])));
                }
            }
            rows
        };
        (rank * local..(rank + 1) * local).map(of_expert).collect()
    }
}

/// An expert's result for an element, before its weight.
fn expert_of(expert: i32, element: f32) -> f32 {
    element * (expert + 1) as f32
}

fn bits(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}

impl Server {
    fn context(&mut self) -> &mut Context {
        // SAFETY: `ctx_create` made it, and only this rank has it.
        unsafe { &mut *self.context }
    }

    fn error(&mut self) -> String {
        // SAFETY: the text is the context's, which makes no other call meanwhile.
        unsafe { CStr::from_ptr(adapter::ctx_error(self.context())) }.to_string_lossy().into_owned()
    }

    fn succeeded(&mut self, code: i32) {
        assert_eq!(code, 0, "{}", self.error());
    }

    /// Uploads this rank's part of a batch; gives the number of its tokens.
    fn upload(&self, batch: &Batch) -> Result<u64> {
        let own = &batch.tokens[self.rank as usize];
        let write = |to: DevicePtr, bytes: &[u8]| match bytes {
            [] => Ok(()),
            // SAFETY: the server's memory has room for the most tokens, and batches have no more.
            bytes => unsafe { self.stream.write(to, bytes) },
        };
        let x: Vec<bf16> = own.iter().flat_map(|token| bits(&token.x)).collect();
        let ids: Vec<i32> = own.iter().flat_map(|token| token.ids.clone()).collect();
        let weights: Vec<f32> = own.iter().flat_map(|token| token.weights.clone()).collect();
        write(self.memory.x.ptr(), cast_slice(&x))?;
        write(self.memory.topk_idx.ptr(), cast_slice(&ids))?;
        write(self.memory.topk_weights.ptr(), cast_slice(&weights))?;
        Ok(own.len() as u64)
    }

    fn call(&self, kind: Kind, x: DevicePtr, num_tokens: u64, owner: Owner) -> Dispatch {
        let memory = &self.memory;
        let of_context = match kind {
            Kind::Decode => self.info.decode,
            Kind::Prefill => self.info.prefill,
        };
        let place = |of_context: u64, own: DevicePtr| match owner {
            Owner::Context if of_context != 0 => of_context,
            _ => own.0,
        };
        Dispatch {
            x: x.0,
            topk_idx: memory.topk_idx.ptr().0,
            topk_weights: memory.topk_weights.ptr().0,
            num_tokens,
            recv_x: place(of_context.recv_x, memory.recv_x.ptr()),
            recv_topk_weights: place(of_context.recv_topk_weights, memory.recv_topk_weights.ptr()),
            recv_src_idx: place(of_context.recv_src_idx, memory.recv_src_idx.ptr()),
            recv_src_entry: place(of_context.recv_src_entry, memory.recv_src_entry.ptr()),
            psum_expert: place(of_context.psum_expert, memory.psum_expert.ptr()),
            psum_rank: memory.psum_rank.ptr().0,
        }
    }

    fn decode(&mut self, batch: &Batch, owner: Owner) -> Result<()> {
        let tokens = self.upload(batch)?;
        let call = self.call(Kind::Decode, self.memory.x.ptr(), tokens, owner);
        let stream = self.stream.raw().0;
        // SAFETY: all addresses are the server's memory or the context's, which outlive the
        // stream's work.
        let dispatched = unsafe { adapter::decode_dispatch(self.context(), stream, &call) };
        self.succeeded(dispatched);
        // Experts leave their results anywhere.
        let results = self.memory.rows.ptr().0;
        self.compare_and_work(batch, &call, results)?;
        let out = self.memory.out.ptr();
        // SAFETY: as above.
        let combined = unsafe { adapter::decode_combine(self.context(), stream, results, tokens, out.0) };
        self.succeeded(combined);
        self.compare_weighted_sums(batch)
    }

    fn prefill(&mut self, batch: &Batch, owner: Owner) -> Result<()> {
        let tokens = self.upload(batch)?;
        let call = self.call(Kind::Prefill, self.memory.x.ptr(), tokens, owner);
        let stream = self.stream.raw().0;
        // SAFETY: as in `decode`.
        let sent = unsafe { adapter::prefill_send(self.context(), stream, &call) };
        self.succeeded(sent);
        let came = adapter::prefill_wait_counts(self.context());
        let padded = |rows: &Vec<_>| rows.len().next_multiple_of(MODEL.expert_alignment as usize);
        let want: usize = batch.received(self.rank).iter().map(padded).sum();
        assert_eq!(came, want as i64, "rows of all segments");
        // SAFETY: as in `decode`.
        let received = unsafe { adapter::prefill_recv(self.context(), stream, &call) };
        self.succeeded(received);
        let local = (MODEL.num_experts / RANKS) as i32;
        let comes = |token: &&Token| token.ids.iter().any(|id| *id >= 0 && *id / local == self.rank as i32);
        let mut upto = 0;
        let psum: Vec<i32> = batch
            .tokens
            .iter()
            .map(|tokens| {
                upto += tokens.iter().filter(comes).count() as i32;
                upto
            })
            .collect();
        assert_eq!(self.memory.psum_rank.values(&self.stream)?, psum, "psum_rank");
        let results = match owner {
            Owner::Context => self.info.prefill.combine_x,
            Owner::Server => self.memory.rows.ptr().0,
        };
        self.compare_and_work(batch, &call, results)?;
        let out = self.memory.out.ptr();
        // SAFETY: as in `decode`.
        let combined = unsafe { adapter::prefill_combine(self.context(), stream, results, tokens, out.0) };
        self.succeeded(combined);
        self.compare_weighted_sums(batch)
    }

    /// Reads numbers from device memory that has as many.
    fn read<T: bytemuck::Pod>(&self, at: u64, count: usize) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); count];
        // SAFETY: callers name memory of this length.
        unsafe { self.stream.read(cast_slice_mut(&mut values), DevicePtr(at))? };
        Ok(values)
    }

    /// Compares received rows with the oracle, and overwrites them with the experts' results.
    fn compare_and_work(&mut self, batch: &Batch, call: &Dispatch, results: u64) -> Result<()> {
        let (mut start, mut ends) = (0u64, Vec::new());
        let first = (self.rank * self.info.local_experts) as i32;
        for (expert, came) in (first..).zip(&batch.received(self.rank)) {
            for (at, (token, [source, index, k])) in (start..).zip(came) {
                let (row, of) = ((HIDDEN * 2) as u64, format!("row {at}, expert {expert}"));
                let weight = token.weights[*k as usize];
                assert_eq!(self.read::<bf16>(call.recv_x + at * row, HIDDEN)?, bits(&token.x), "{of}");
                assert_eq!(self.read::<f32>(call.recv_topk_weights + at * 4, 1)?, [weight], "{of}");
                if call.recv_src_idx != 0 {
                    assert_eq!(self.read::<i32>(call.recv_src_idx + at * 4, 1)?, [*index], "{of}");
                    assert_eq!(self.read::<i32>(call.recv_src_entry + at * 8, 2)?, [*source, *k], "{of}");
                }
                let result: Vec<f32> = token.x.iter().map(|&x| expert_of(expert, x) * weight).collect();
                // SAFETY: the memory has room for all rows that may be received.
                unsafe { self.stream.write(DevicePtr(results + at * row), cast_slice(&bits(&result)))? };
            }
            ends.push((start + came.len() as u64) as i32);
            start = (start + came.len() as u64).next_multiple_of(MODEL.expert_alignment.into());
        }
        ends.push(start as i32);
        assert_eq!(self.read::<i32>(call.psum_expert, ends.len())?, ends, "psum_expert");
        Ok(())
    }

    fn compare_weighted_sums(&self, batch: &Batch) -> Result<()> {
        let sum = |token: &Token| -> Vec<f32> {
            let entries = || token.ids.iter().zip(&token.weights).filter(|(id, _)| **id >= 0);
            let of = |x: f32| entries().map(|(&id, weight)| expert_of(id, x) * weight).sum();
            token.x.iter().map(|&x| of(x)).collect()
        };
        self.compare_sums(&batch.tokens[self.rank as usize].iter().map(sum).collect::<Vec<_>>())
    }

    fn compare_sums(&self, want: &[Vec<f32>]) -> Result<()> {
        self.stream.synchronize()?;
        let mut got = vec![bf16::ZERO; want.len() * HIDDEN];
        if !got.is_empty() {
            // SAFETY: it holds the most tokens.
            unsafe { self.stream.read(cast_slice_mut(&mut got), self.memory.out.ptr())? };
        }
        for (token, (got, want)) in got.chunks(HIDDEN).zip(want).enumerate() {
            assert_eq!(got, bits(want), "token {token} of rank {}", self.rank);
        }
        Ok(())
    }

    /// Three layers on `tokens` tokens, whose experts give rows back as they are.
    fn step(&mut self, tokens: u64) -> Result<()> {
        let stream = self.stream.raw().0;
        let mut x = self.memory.x.ptr();
        for _ in 0..3 {
            let call = self.call(Kind::Decode, x, tokens, Owner::Context);
            let out = self.memory.out.ptr();
            // SAFETY: as in `decode`; the graph is dropped before the memory.
            unsafe {
                let dispatched = adapter::decode_dispatch(self.context(), stream, &call);
                self.succeeded(dispatched);
                let combined = adapter::decode_combine(self.context(), stream, call.recv_x, tokens, out.0);
                self.succeeded(combined);
            }
            x = out;
        }
        Ok(())
    }

    /// Captures the step for a bucket of tokens, and replays it with other tokens and experts.
    fn decode_from_graphs(&mut self, bucket: usize) -> Result<()> {
        let mut batch = Batch::random(20, bucket);
        // All ranks have as many tokens as the bucket: absent tokens select no expert.
        let absent = Token { x: vec![0.0; HIDDEN], ids: vec![-1; TOPK], weights: vec![0.0; TOPK] };
        let fill =
            |batch: &mut Batch| batch.tokens.iter_mut().for_each(|own| own.resize(bucket, absent.clone()));
        fill(&mut batch);
        self.upload(&batch)?;
        adapter::warm_up(self.context(), 1);
        self.step(bucket as u64)?;
        self.stream.synchronize()?;
        adapter::warm_up(self.context(), 0);
        let stream = self.stream.raw();
        // SAFETY: the server's own stream lives longer.
        let capturing = unsafe { Stream::adopt(&self.device, stream)? };
        let graph = capturing.capture(|| self.step(bucket as u64))?;
        for seed in 30..33 {
            let mut batch = Batch::random(seed, bucket);
            fill(&mut batch);
            self.upload(&batch)?;
            // SAFETY: what the graph uses lives until the stream is synchronised below.
            unsafe { graph.launch(&self.stream)? };
            let entries = |token: &Token| token.ids.iter().filter(|id| **id >= 0).count() as f32;
            let sum = |token: &Token| token.x.iter().map(|&x| x * entries(token).powi(3)).collect();
            self.compare_sums(&batch.tokens[self.rank as usize].iter().map(sum).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Failing calls report the reason, and later calls work.
    fn errors(&mut self) {
        let (stream, out) = (self.stream.raw().0, self.memory.out.ptr().0);
        // SAFETY: as in `decode`.
        assert_eq!(unsafe { adapter::decode_combine(self.context(), stream, out, 1, out) }, -1);
        let text = self.error();
        assert!(text.contains("make one first"), "{text}");
        assert_eq!(adapter::prefill_wait_counts(self.context()), -1);
        let tokens = u64::from(MODEL.max_decode_tokens) + 1;
        let call = self.call(Kind::Decode, self.memory.x.ptr(), tokens, Owner::Context);
        // SAFETY: as in `decode`: nothing is enqueued.
        assert_eq!(unsafe { adapter::decode_dispatch(self.context(), stream, &call) }, -1);
        let text = self.error();
        assert!(text.contains("num_tokens") && text.contains("max_tokens >= 7"), "{text}");
    }

    /// A combine answers no earlier dispatch than the last one, which failed.
    fn errors_behind_a_dispatch(&mut self, batch: &Batch) -> Result<()> {
        let tokens = self.upload(batch)?;
        let (stream, out) = (self.stream.raw().0, self.memory.out.ptr().0);
        let misaligned = DevicePtr(self.memory.x.ptr().0 + 2);
        for kind in [Kind::Decode, Kind::Prefill] {
            let [call, fails] =
                [self.memory.x.ptr(), misaligned].map(|x| self.call(kind, x, tokens, Owner::Context));
            let context = self.context();
            // SAFETY: as in `decode`; calls that fail enqueue nothing that uses the addresses.
            let (codes, combined) = unsafe {
                match kind {
                    Kind::Decode => (
                        [&call, &fails].map(|call| adapter::decode_dispatch(context, stream, call)),
                        adapter::decode_combine(context, stream, call.recv_x, tokens, out),
                    ),
                    Kind::Prefill => (
                        [&call, &fails].map(|call| adapter::prefill_send(context, stream, call)),
                        adapter::prefill_combine(context, stream, call.recv_x, tokens, out),
                    ),
                }
            };
            assert_eq!(codes, [0, -1], "{kind:?}: {}", self.error());
            let text = self.error();
            assert!(combined == -1 && text.contains("make one first"), "{kind:?}: {text}");
        }
        self.decode(batch, Owner::Server)?;
        self.prefill(batch, Owner::Context)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_server_runs_on_the_adapter() {
        super::run();
    }
}
