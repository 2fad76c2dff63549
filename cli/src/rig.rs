//! One rank's equipment for round trips, and the round trip that checks every bit against the oracle.

use epoxide::driver::{DevicePtr, Stream};
use epoxide::ep::{
    Buffer, CachedDispatchRequest, CombineOutput, CombineRequest, CombineRows, DType, DispatchHandle,
    DispatchLayout, DispatchOutput, DispatchRequest, Element, StreamOrder, Tensor,
};
use epoxide_gpu::layout::row_stride;
use epoxide_testing::oracle::{self, InternodePlan, Nodes, Plan, Routing, Style};
use epoxide_testing::payload::{PerToken, per_token, round};
use half::bf16;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};

use crate::checks::{self, Difference};
use crate::options::{RowType, Setup};
use crate::ranks::Rank;
use crate::stop::Result;

mod graph;

/// What memory holds that the next operation must overwrite: no expected value looks like it.
const POISON: u8 = 0xdb;
/// Columns that combine's expected values are computed for at a time, to bound memory.
const COLUMNS_AT_A_TIME: usize = 256;

/// What one round trip moves: the same on every rank, so that each knows what to expect of the others.
pub struct Case {
    /// Which experts every token of every rank selects.
    pub routing: Routing,
    /// Elements of a row.
    pub hidden: u64,
    /// Type of the dispatched rows.
    pub dtype: RowType,
    /// Expert counts are rounded up to multiples of this.
    pub expert_alignment: u32,
    /// By rank, token and entry.
    pub weights: PerToken<Vec<f32>>,
    /// Seed of the rows' contents.
    pub seed: u64,
}

impl Case {
    /// The sizes of `setup` with a routing of the given style. A different `number` is a different case.
    pub fn full_size(setup: &Setup, number: u64, style: Style) -> Case {
        let mut rng = rng_of(&[setup.seed, number]);
        let tokens = vec![setup.tokens; setup.ranks as usize];
        Case::draw(&mut rng, &tokens, setup.topk, setup.experts, setup.hidden, setup.dtype, style)
    }

    /// Random sizes up to those of `setup`, another number of tokens on each rank, sometimes none.
    pub fn random(setup: &Setup, number: u64) -> Case {
        let mut rng = rng_of(&[setup.seed, number]);
        let most = match rng.random_range(0..4) {
            0 => setup.tokens.min(3),
            _ => setup.tokens,
        };
        let mut tokens: Vec<u32> = (0..setup.ranks).map(|_| rng.random_range(0..=most)).collect();
        if rng.random_bool(0.3) {
            let idle = rng.random_range(0..tokens.len());
            tokens[idle] = 0;
        }
        let style = Style::ALL[rng.random_range(0..Style::ALL.len())];
        let experts = setup.ranks * rng.random_range(1..=setup.experts / setup.ranks);
        let topk = rng.random_range(1..=setup.topk);
        let unit = 16 / setup.dtype.dtype().size();
        let hidden = unit * rng.random_range(1..=setup.hidden / unit);
        Case::draw(&mut rng, &tokens, topk, experts, hidden, setup.dtype, style)
    }

    fn draw(
        rng: &mut SmallRng,
        tokens: &[u32],
        topk: u32,
        experts: u32,
        hidden: u64,
        dtype: RowType,
        style: Style,
    ) -> Case {
        let routing = Routing::random(rng, tokens, topk, experts, style);
        let weights =
            per_token(tokens, |_, _| (0..topk).map(|_| rng.random_range(0.01f32..1.0)).collect::<Vec<f32>>());
        let expert_alignment = [1, 1, 4, 16][rng.random_range(0..4)];
        Case { routing, hidden, dtype, expert_alignment, weights, seed: rng.random() }
    }

    fn row_bytes(&self) -> usize {
        (self.hidden * self.dtype.dtype().size()) as usize
    }

    /// Random bytes that begin with rank and token, so that no two rows are equal.
    fn row(&self, salt: u64, rank: u32, token: u32) -> Vec<u8> {
        let mut row = vec![0; self.row_bytes()];
        rng_of(&[self.seed, salt, u64::from(rank), u64::from(token)]).fill_bytes(&mut row);
        row[..4].copy_from_slice(&rank.to_le_bytes());
        row[4..8].copy_from_slice(&token.to_le_bytes());
        row
    }

    /// Random scales of a token.
    fn scales(&self, salt: u64, rank: u32, token: u32) -> Vec<f32> {
        let mut rng = rng_of(&[!self.seed, salt, u64::from(rank), u64::from(token)]);
        (0..self.dtype.num_scales(self.hidden)).map(|_| rng.random_range(1e-4f32..100.0)).collect()
    }

    /// Columns of what the experts of `receiver` make of a token: integers from -16 to 16, whose sums over ranks are
    /// exact.
    fn expert_output(
        &self,
        salt: u64,
        receiver: u32,
        (rank, token): (u32, u32),
        columns: std::ops::Range<usize>,
    ) -> Vec<f32> {
        let base = mix(&[self.seed, salt, u64::from(receiver), u64::from(rank), u64::from(token)]);
        columns.map(|column| (mix(&[base, column as u64]) % 33) as f32 - 16.0).collect()
    }
}

/// One rank's equipment.
pub struct Rig<'a> {
    rank: &'a Rank,
    /// The buffer under test.
    pub buffer: Buffer,
    /// The rank's stream.
    pub stream: Stream,
    recv: Option<RecvRegions>,
    difference: Difference,
}

/// Where received rows and what travels with them begin in the pool.
struct RecvRegions {
    x: DevicePtr,
    scales: Option<DevicePtr>,
    topk_idx: Option<DevicePtr>,
    topk_weights: Option<DevicePtr>,
    src_idx: Option<DevicePtr>,
    src_meta: Option<DevicePtr>,
}

impl<'a> Rig<'a> {
    /// Makes the buffer. Collective.
    pub fn new(rank: &'a Rank, setup: &Setup) -> Result<Rig<'a>> {
        let stream = Stream::new(&rank.device, false)?;
        let buffer = Buffer::new(rank.device.clone(), &*rank.group, setup.buffer_options())?;
        Ok(Rig { rank, buffer, stream, recv: None, difference: None })
    }

    /// Keeps the first difference.
    pub fn note(&mut self, difference: Difference) {
        if self.difference.is_none() {
            self.difference = difference;
        }
    }

    /// The first difference since the last call.
    pub fn take_difference(&mut self) -> Difference {
        self.difference.take()
    }

    /// This rank's ids and weights of a case, on the device.
    pub fn topk(&self, case: &Case) -> Result<(Tensor, Tensor)> {
        let rank = self.rank.rank;
        let shape = [u64::from(case.routing.num_tokens(rank)), u64::from(case.routing.num_topk)];
        let ids = Tensor::from_host(&self.stream, DType::I64, &shape, &case.routing.flat_topk_idx(rank))?;
        let weights = case.weights[rank as usize].concat();
        Ok((ids, Tensor::from_host(&self.stream, DType::F32, &shape, &weights)?))
    }

    /// Remembers where a dispatch puts things.
    pub fn learn_regions(&mut self, output: &DispatchOutput) {
        let ptr = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::ptr);
        self.recv = Some(RecvRegions {
            x: output.recv_x.ptr(),
            scales: ptr(&output.recv_x_scales),
            topk_idx: ptr(&output.recv_topk_idx),
            topk_weights: ptr(&output.recv_topk_weights),
            src_idx: ptr(&output.recv_src_idx),
            src_meta: ptr(&output.recv_src_meta),
        });
    }

    /// One round trip with random bytes, and all that it gives compared with the oracle: layout, dispatch, combine from
    /// a tensor with weights, cached dispatch of other bytes, combine from the pool. Returns the rows received.
    ///
    /// A difference is noted and the trip goes on, so that the other ranks are not left waiting.
    pub fn round_trip(&mut self, case: &Case) -> Result<u64> {
        let rank = self.rank.rank;
        let ranks = case.routing.num_ranks() as usize;
        let plan =
            oracle::plan(&case.routing, rank, self.buffer.config().num_channels(), case.expert_alignment);

        let (topk_idx, topk_weights) = self.topk(case)?;
        let layout = self.buffer.get_dispatch_layout(
            &topk_idx,
            case.routing.num_experts,
            StreamOrder::on(&self.stream),
        )?;
        let difference = checks::layout(&self.stream, &layout, &plan.layout, ranks)?;
        self.note(difference);
        let nodes = self.nodes_plan(case);
        let difference = checks::nodes(&self.stream, &layout, nodes.as_ref())?;
        self.note(difference);

        self.poison_recv(case, &plan)?;
        let (x, x_scales) = self.payload(case, 0)?;
        let output = self.buffer.dispatch(
            DispatchRequest {
                x_scales: x_scales.as_ref(),
                topk_idx: Some(&topk_idx),
                topk_weights: Some(&topk_weights),
                expert_alignment: case.expert_alignment,
                ..DispatchRequest::new(&x, &layout)
            },
            StreamOrder::on(&self.stream),
        )?;
        self.learn_regions(&output);
        self.check_received(case, 0, &plan, &output)?;
        let difference = self.check_metadata(case, &plan, nodes.as_ref(), &output)?;
        self.note(difference);

        let rows = Tensor::alloc(&self.rank.device, DType::Bf16, &[plan.recv_src.len() as u64, case.hidden])?;
        self.write_expert_output(case, 1, &plan, &rows)?;
        self.combine(case, 1, CombineRows::Tensor(&rows), output.recv_topk_weights.as_ref(), &output.handle)?;

        self.poison_recv(case, &plan)?;
        let (x, x_scales) = self.payload(case, 2)?;
        let cached = self.buffer.dispatch_cached(
            CachedDispatchRequest { x: &x, x_scales: x_scales.as_ref(), handle: &output.handle },
            StreamOrder::on(&self.stream),
        )?;
        self.check_received(case, 2, &plan, &cached)?;

        let rows = self.buffer.combine_rows(DType::Bf16, plan.recv_src.len() as u64, case.hidden)?;
        self.write_expert_output(case, 3, &plan, &rows)?;
        let in_pool = CombineRows::InPool { dtype: DType::Bf16, hidden: case.hidden };
        self.combine(case, 3, in_pool, None, &cached.handle)?;

        for tensor in self.spoilable(&layout, &output.handle)? {
            self.poison(tensor.ptr(), tensor.rows() * tensor.row_stride())?;
        }
        Ok(plan.recv_src.len() as u64)
    }

    /// What several nodes add to the plan of a case.
    pub fn nodes_plan(&self, case: &Case) -> Option<InternodePlan> {
        let (rank, channels) = (self.rank.rank, self.buffer.config().num_channels());
        self.nodes(&case.routing).map(|nodes| nodes.plan(rank, channels))
    }

    /// The routing on this group's nodes, where there are several.
    fn nodes<'r>(&self, routing: &'r Routing) -> Option<Nodes<'r>> {
        let buffer = &self.buffer;
        (buffer.num_nodes() > 1).then(|| Nodes::new(routing, buffer.ranks_per_node()))
    }

    /// What a trip leaves in memory that the next one is likely to get again.
    fn spoilable(&self, layout: &DispatchLayout, handle: &DispatchHandle) -> Result<Vec<Tensor>> {
        let mut tensors = vec![
            layout.is_token_in_rank(),
            layout.num_tokens_per_rank(),
            layout.num_tokens_per_expert(),
            handle.send_head(),
            handle.num_recv_tokens_per_expert(),
        ];
        tensors.extend(layout.num_tokens_per_rdma_rank());
        if let Some(handle) = handle.intranode() {
            tensors.extend([
                handle.rank_prefix_matrix(),
                handle.channel_prefix_matrix(),
                handle.recv_channel_prefix_matrix(),
            ]);
        }
        if let Some(handle) = handle.internode() {
            tensors.extend([
                handle.rdma_channel_prefix_matrix(),
                handle.gbl_channel_prefix_matrix(),
                handle.recv_rdma_channel_prefix_matrix(),
                handle.recv_rdma_rank_prefix_sum(),
                handle.recv_gbl_channel_prefix_matrix(),
                handle.recv_gbl_rank_prefix_sum(),
                handle.send_rdma_head(),
                handle.send_nvl_head(&self.stream)?,
            ]);
        }
        Ok(tensors)
    }

    /// This rank's rows and scales of a case, on the device.
    fn payload(&self, case: &Case, salt: u64) -> Result<(Tensor, Option<Tensor>)> {
        let rank = self.rank.rank;
        let tokens = case.routing.num_tokens(rank);
        let bytes: Vec<u8> = (0..tokens).flat_map(|token| case.row(salt, rank, token)).collect();
        let dtype = case.dtype.dtype();
        let x = Tensor::alloc(&self.rank.device, dtype, &[u64::from(tokens), case.hidden])?;
        if !bytes.is_empty() {
            self.stream.write(x.ptr(), &bytes)?;
        }
        let num_scales = case.dtype.num_scales(case.hidden);
        if num_scales == 0 {
            return Ok((x, None));
        }
        let scales: Vec<f32> = (0..tokens).flat_map(|token| case.scales(salt, rank, token)).collect();
        let shape = [u64::from(tokens), num_scales];
        Ok((x, Some(Tensor::from_host(&self.stream, DType::F32, &shape, &scales)?)))
    }

    /// Compares received rows and scales.
    fn check_received(&mut self, case: &Case, salt: u64, plan: &Plan, output: &DispatchOutput) -> Result<()> {
        let recv_x = match case.dtype {
            RowType::Bf16 => {
                bytemuck::cast_slice(&self.received::<u16>(plan, output, &output.recv_x)?).to_vec()
            }
            RowType::Fp8 => self.received::<u8>(plan, output, &output.recv_x)?,
        };
        let expected = |source, token| case.row(salt, source, token);
        let mut difference = checks::rows("recv_x", &recv_x, case.row_bytes(), &plan.recv_src, expected);
        if let Some(scales) = &output.recv_x_scales {
            let expected: Vec<f32> =
                plan.recv_src.iter().flat_map(|&(source, token)| case.scales(salt, source, token)).collect();
            let columns = scales.columns() as usize;
            let got = self.received::<f32>(plan, output, scales)?;
            difference = difference.or_else(|| checks::bits("recv_x_scales", columns, &got, &expected));
        } else if case.dtype == RowType::Fp8 {
            difference = difference.or(Some("recv_x_scales: expected some, got none".to_owned()));
        }
        let rows = output.handle.num_recv_tokens(&self.stream)?;
        self.note(difference.or_else(|| checks::value("num_recv_tokens", rows, plan.num_recv_tokens)));
        Ok(())
    }

    /// What came in `tensor`: all of it or, where the host did not wait for the counts, as many rows as should have come
    /// of those that there was room for.
    fn received<T: Element>(&self, plan: &Plan, output: &DispatchOutput, tensor: &Tensor) -> Result<Vec<T>> {
        let mut values = tensor.to_host(&self.stream)?;
        if output.num_recv_tokens.is_none() {
            values.truncate(plan.recv_src.len() * tensor.columns() as usize);
        }
        Ok(values)
    }

    /// Compares what travels with the rows, the counts and the handle.
    fn check_metadata(
        &self,
        case: &Case,
        plan: &Plan,
        nodes: Option<&InternodePlan>,
        output: &DispatchOutput,
    ) -> Result<Difference> {
        let (Some(ids), Some(weights), Some(src_idx)) =
            (&output.recv_topk_idx, &output.recv_topk_weights, &output.recv_src_idx)
        else {
            return Ok(Some("dispatch gave no recv_topk_idx, recv_topk_weights or recv_src_idx".to_owned()));
        };
        let stream = &self.stream;
        let columns = case.routing.num_topk as usize;
        let expected_weights = oracle::recv_topk_weights(plan, &case.weights).concat();
        let expected_src: Vec<i32> = plan.recv_src.iter().map(|&(_, token)| token as i32).collect();
        let ids = self.received::<i64>(plan, output, ids)?;
        let weights = self.received::<f32>(plan, output, weights)?;
        let src_idx = self.received::<i32>(plan, output, src_idx)?;
        // Empty where the host did not wait; the handle has them on the device.
        let waited = output.num_recv_tokens.is_some();
        let per_expert = if waited { &plan.num_recv_tokens_per_expert[..] } else { &[] };
        Ok(checks::table("recv_topk_idx", columns, &ids, &plan.recv_topk_idx.concat())
            .or(checks::bits("recv_topk_weights", columns, &weights, &expected_weights))
            .or(checks::table("recv_src_idx", 1, &src_idx, &expected_src))
            .or_else(|| {
                let got = &output.num_recv_tokens_per_expert[..];
                checks::value("num_recv_tokens_per_expert_list", got, per_expert)
            })
            .or(self.check_sources(plan, nodes, output)?)
            .or(checks::handle(stream, &output.handle, plan, nodes)?))
    }

    /// Compares where rows came from, which only a dispatch across nodes says.
    fn check_sources(
        &self,
        plan: &Plan,
        nodes: Option<&InternodePlan>,
        output: &DispatchOutput,
    ) -> Result<Difference> {
        match (nodes, &output.recv_src_meta) {
            (None, None) => Ok(None),
            (Some(nodes), Some(meta)) => {
                let got = self.received::<i32>(plan, output, meta)?;
                Ok(checks::table("recv_src_meta", 2, &got, &nodes.recv_src_meta.concat()))
            }
            (nodes, meta) => {
                Ok(Some(format!("recv_src_meta: expected {}, got {}", nodes.is_some(), meta.is_some())))
            }
        }
    }

    /// Writes what this rank's experts make of the rows it received.
    fn write_expert_output(&self, case: &Case, salt: u64, plan: &Plan, rows: &Tensor) -> Result<()> {
        let columns = 0..case.hidden as usize;
        let values: Vec<bf16> = plan
            .recv_src
            .iter()
            .flat_map(|&source| case.expert_output(salt, self.rank.rank, source, columns.clone()))
            .map(bf16::from_f32)
            .collect();
        Ok(rows.write(&self.stream, &values)?)
    }

    /// Combines, compares every sum, and poisons what it got, which the next combine is likely to get again.
    fn combine(
        &mut self,
        case: &Case,
        salt: u64,
        rows: CombineRows<'_>,
        topk_weights: Option<&Tensor>,
        handle: &DispatchHandle,
    ) -> Result<()> {
        let request = CombineRequest { rows, topk_weights, handle };
        let output = self.buffer.combine(request, StreamOrder::on(&self.stream))?;
        self.stream.synchronize()?;
        self.buffer.check()?;
        let difference = self.check_combined(case, salt, topk_weights.is_some(), &output)?;
        self.note(difference);
        self.poison_combined(&output)
    }

    fn check_combined(
        &self,
        case: &Case,
        salt: u64,
        weighted: bool,
        output: &CombineOutput,
    ) -> Result<Difference> {
        let (own, plans) = self.own_tokens(case);
        let hidden = case.hidden as usize;
        let shape = [u64::from(own.num_tokens(self.rank.rank)), case.hidden];
        let difference = checks::value("combined_x shape", output.combined_x.shape(), &shape[..]);
        if difference.is_some() {
            return Ok(difference);
        }
        let got = output.combined_x.to_host::<bf16>(&self.stream)?;
        for start in (0..hidden).step_by(COLUMNS_AT_A_TIME) {
            let columns = start..hidden.min(start + COLUMNS_AT_A_TIME);
            let returned: Vec<Vec<Vec<f32>>> = (0..)
                .zip(&plans)
                .map(|(receiver, plan)| {
                    let output = |&source: &_| case.expert_output(salt, receiver, source, columns.clone());
                    plan.recv_src.iter().map(output).collect()
                })
                .collect();
            let expected = match self.nodes(&own) {
                None => round(&oracle::combine_f32(&own, self.rank.rank, &returned, columns.len())),
                Some(nodes) => {
                    let returned: Vec<Vec<Vec<bf16>>> = returned.iter().map(|rows| round(rows)).collect();
                    nodes.combine(self.rank.rank, &returned, columns.len())
                }
            };
            for (token, (expected, got)) in expected.iter().zip(got.chunks_exact(hidden)).enumerate() {
                let wrong =
                    got[columns.clone()].iter().zip(expected).position(|(got, expected)| got != expected);
                if let Some(at) = wrong {
                    let (column, expected) = (start + at, expected[at]);
                    return Ok(Some(format!(
                        "combined_x, token {token}, column {column}: expected {expected}, got {}",
                        got[column]
                    )));
                }
            }
        }
        self.check_combined_weights(case, weighted, output)
    }

    /// Compares combined weights, where unmodified ones were given back.
    pub fn check_combined_weights(
        &self,
        case: &Case,
        weighted: bool,
        output: &CombineOutput,
    ) -> Result<Difference> {
        let Some(weights) = &output.combined_topk_weights else {
            return Ok(weighted.then(|| "combined_topk_weights: expected some, got none".to_owned()));
        };
        let (own, plans) = self.own_tokens(case);
        let returned: Vec<_> =
            plans.iter().map(|plan| oracle::recv_topk_weights(plan, &case.weights)).collect();
        let expected = match self.nodes(&own) {
            None => oracle::combined_weights(&own, self.rank.rank, &returned),
            Some(nodes) => nodes.combined_weights(self.rank.rank, &returned),
        };
        let expected = expected.concat();
        let got = weights.to_host::<f32>(&self.stream)?;
        Ok(checks::bits("combined_topk_weights", own.num_topk as usize, &got, &expected))
    }

    /// The routing with this rank's tokens alone, which are all that matter to its sums, and what each receiver gets.
    fn own_tokens(&self, case: &Case) -> (Routing, Vec<Plan>) {
        let rank = self.rank.rank as usize;
        let mut own = Routing { topk_idx: vec![Vec::new(); case.routing.topk_idx.len()], ..case.routing };
        own.topk_idx[rank].clone_from(&case.routing.topk_idx[rank]);
        let plans = (0..own.num_ranks()).map(|receiver| oracle::plan(&own, receiver, 1, 1)).collect();
        (own, plans)
    }

    /// Spoils what the next dispatch of `case` must write in the own pool.
    fn poison_recv(&self, case: &Case, plan: &Plan) -> Result<()> {
        let Some(regions) = &self.recv else {
            return Ok(());
        };
        let (rows, topk) = (u64::from(plan.num_recv_tokens), u64::from(case.routing.num_topk));
        let scales = case.dtype.num_scales(case.hidden);
        for (at, bytes) in [
            (Some(regions.x), rows * row_stride(case.row_bytes() as u64)),
            (regions.scales, rows * scales * 4),
            (regions.topk_idx, rows * topk * 8),
            (regions.topk_weights, rows * topk * 4),
            (regions.src_idx, rows * 4),
            (regions.src_meta, rows * 8),
        ] {
            if let Some(at) = at {
                self.poison(at, bytes)?;
            }
        }
        Ok(())
    }

    /// Spoils what a combine gave and the next one is likely to get again.
    fn poison_combined(&self, output: &CombineOutput) -> Result<()> {
        for tensor in [Some(&output.combined_x), output.combined_topk_weights.as_ref()].into_iter().flatten()
        {
            self.poison(tensor.ptr(), tensor.rows() * tensor.row_stride())?;
        }
        Ok(())
    }

    fn poison(&self, at: DevicePtr, bytes: u64) -> Result<()> {
        if bytes > 0 {
            // SAFETY: callers give an output of an earlier operation that has ended, in memory that the buffer keeps,
            // with no more rows than it has room for; no peer writes there before this rank joins the next dispatch.
            unsafe { self.stream.fill(at, POISON, bytes)? };
        }
        Ok(())
    }
}

/// A generator for one thing out of many.
pub fn rng_of(what: &[u64]) -> SmallRng {
    SmallRng::seed_from_u64(mix(what))
}

/// Mixes numbers into one (SplitMix64).
fn mix(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0x9e37_79b9_7f4a_7c15, |state: u64, &number| {
        let mut z = (state ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}
