//! One routing through every operation, each output against the oracle.

use half::bf16;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use epoxide::Result;
use epoxide::ep::{
    CombineRows, Counts, DType, DispatchHandle, DispatchLayout, DispatchOutput, DispatchRequest, Tensor, Tuning,
};
use epoxide::testing::oracle::{self, Plan, Routing};
use epoxide::testing::payload::{self, PerToken};

use crate::harness::{POISON, Rank, Setup, as_bytes};

/// What travels, and how.
#[derive(Debug, Clone)]
pub struct Case {
    pub routing: Routing,
    pub num_channels: u32,
    pub expert_alignment: u32,
    pub dtype: DType,
    pub row_bytes: u32,
    pub scales: Scales,
    pub tuning: Tuning,
    /// Of the payload.
    pub seed: u64,
}

/// Scales per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    None,
    /// One, as a tensor `[num_tokens]`.
    Flat,
    /// As a tensor `[num_tokens, n]`.
    Columns(u32),
}

impl Scales {
    fn count(self) -> u32 {
        match self {
            Scales::None => 0,
            Scales::Flat => 1,
            Scales::Columns(columns) => columns,
        }
    }
}

impl Case {
    /// BF16 rows, two channels, alignment 1.
    pub fn new(routing: Routing, row_bytes: u32) -> Case {
        Case {
            routing,
            num_channels: 2,
            expert_alignment: 1,
            dtype: DType::Bf16,
            row_bytes,
            scales: Scales::None,
            tuning: Tuning::default(),
            seed: 1,
        }
    }

    /// Buffers that hold just this case.
    pub fn setup(&self) -> Setup {
        let routing = &self.routing;
        Setup::new(routing.num_ranks(), self.num_channels, routing.max_tokens(), self.row_bytes.into())
            .max_topk(routing.num_topk)
            .max_scales(self.scales.count())
            .tuning(self.tuning)
    }

    /// Runs it on threads.
    pub fn check(&self) {
        let plans = self.plans();
        self.setup().run(|rank| self.check_rank(rank, &plans));
    }

    /// The oracle's plan of every rank.
    pub fn plans(&self) -> Vec<Plan> {
        let plan = |rank| oracle::plan(&self.routing, rank, self.num_channels, self.expert_alignment);
        (0..self.routing.num_ranks()).map(plan).collect()
    }

    /// The part of one rank. Collective.
    pub fn check_rank(&self, rank: &mut Rank, plans: &[Plan]) -> Result<()> {
        let plan = &plans[rank.rank as usize];
        let (first, second) = (Payload::random(self, 0), Payload::random(self, 1));
        let uploaded = first.upload(self, rank)?;

        let topk_idx = rank.upload(DType::I64, self.topk(), &self.routing.topk_idx[rank.rank as usize])?;
        let layout = rank.layout(&topk_idx, self.routing.num_experts)?;
        layout.validate(&rank.stream, &topk_idx)?;
        check_layout(rank, &layout, plan)?;

        // Counts stay on the device: the outputs are the whole pool.
        let request = |counts| DispatchRequest {
            x_scales: uploaded.scales.as_ref(),
            topk_idx: Some(&topk_idx),
            topk_weights: Some(&uploaded.weights),
            expert_alignment: self.expert_alignment,
            counts,
            ..DispatchRequest::new(&uploaded.x, &layout)
        };
        let whole = rank.dispatch(request(rank.on_device()))?;
        rank.buffer.check_dispatch(&whole.handle, &rank.stream)?;
        rank.check(whole.num_recv_tokens.is_none(), "num_recv_tokens is unknown without a host wait");
        rank.check(whole.num_recv_tokens_per_expert.is_empty(), "expert counts are unknown without a host wait");
        let rows = whole.handle.num_recv_tokens(&rank.stream)?;
        rank.equal("num_recv_tokens", &[rows], &[plan.num_recv_tokens]);
        self.check_received(rank, "on-device dispatch", &whole, &whole, plan, &first, true)?;
        check_matrices(rank, &whole.handle, plan)?;

        // Exact counts, into a poisoned pool.
        poison(rank, &whole)?;
        let exact = rank.dispatch(request(Counts::Exact))?;
        rank.equal("num_recv_tokens", exact.num_recv_tokens.as_slice(), &[plan.num_recv_tokens]);
        rank.equal(
            "num_recv_tokens_per_expert",
            &exact.num_recv_tokens_per_expert,
            &plan.num_recv_tokens_per_expert,
        );
        self.check_received(rank, "exact dispatch", &exact, &whole, plan, &first, true)?;
        self.check_untouched(rank, &whole, plan.num_recv_tokens, true)?;
        check_matrices(rank, &exact.handle, plan)?;
        let recv_weights = exact.recv_topk_weights.as_ref().map(|weights| rank.rows::<f32>(weights)).transpose()?;

        // The same routing with other rows; metadata does not travel.
        poison(rank, &whole)?;
        let uploaded = second.upload(self, rank)?;
        let cached = rank.dispatch_cached(&uploaded.x, uploaded.scales.as_ref(), &exact.handle)?;
        rank.equal("cached num_recv_tokens", cached.num_recv_tokens.as_slice(), &[plan.num_recv_tokens]);
        self.check_received(rank, "cached dispatch", &cached, &whole, plan, &second, false)?;
        self.check_untouched(rank, &whole, plan.num_recv_tokens, false)?;

        // Weights go back as they came: each survives where its id is valid.
        let masked = |(weights, ids): (&Vec<f32>, &Vec<i64>)| -> Vec<f32> {
            weights.iter().zip(ids).map(|(&weight, &id)| if id < 0 { 0.0 } else { weight }).collect()
        };
        let mine = rank.rank as usize;
        let round_trip: Vec<_> = first.weights[mine].iter().zip(&self.routing.topk_idx[mine]).map(masked).collect();
        let back = Returned { weights: recv_weights, ..Returned::bf16(self, plans, rank.rank, 0) };
        self.check_combine(rank, "first combine", &exact.handle, &back, false, Some(round_trip))?;

        // The handle feeds further combines: other rows, either place, either dtype; so does the older handle.
        let expected_weights = oracle::combined_weights(&self.routing, rank.rank, &all_weights(self, plans));
        let weights = all_weights(self, plans).swap_remove(mine);
        let back = Returned { weights: Some(weights), ..Returned::bf16(self, plans, rank.rank, 1) };
        self.check_combine(rank, "combine from the pool", &exact.handle, &back, true, Some(expected_weights))?;
        let back = Returned::f32(self, plans, rank.rank, 2);
        self.check_combine(rank, "f32 combine", &whole.handle, &back, false, None)?;
        let back = Returned::f32(self, plans, rank.rank, 3);
        self.check_combine(rank, "f32 combine from the pool", &cached.handle, &back, true, None)
    }

    fn topk(&self) -> usize {
        self.routing.num_topk as usize
    }

    /// Compares what `output` says was received. `whole` has the same tensors with all rows of the pool.
    #[allow(clippy::too_many_arguments)]
    fn check_received(
        &self,
        rank: &mut Rank,
        what: &str,
        output: &DispatchOutput,
        whole: &DispatchOutput,
        plan: &Plan,
        payload: &Payload,
        with_metadata: bool,
    ) -> Result<()> {
        let rows = plan.num_recv_tokens as usize;
        let named = |name: &str| format!("{name} of {what}");
        let shape = output.num_recv_tokens.map_or(rank.buffer.capacity(), u64::from);
        rank.equal(&named("shape"), output.recv_x.shape(), &[shape, self.hidden()]);
        rank.check(output.recv_x.dtype() == self.dtype, "recv_x has the dtype of x");
        rank.check(output.recv_x.ptr() == whole.recv_x.ptr(), "recv_x lies in the pool");

        let got = rank.row_bytes(&output.recv_x)?;
        rank.equal(&named("recv_x"), &got[..rows], &oracle::recv_rows(plan, &payload.x));
        match (&output.recv_x_scales, &payload.scales) {
            (Some(scales), Some(all)) => {
                let columns = (self.scales != Scales::Flat).then_some(self.scales.count().into());
                let shape: Vec<u64> = std::iter::once(shape).chain(columns).collect();
                rank.equal(&named("shape of recv_x_scales"), scales.shape(), &shape);
                let got = rank.rows::<f32>(scales)?;
                rank.equal(&named("recv_x_scales"), &got[..rows], &oracle::recv_rows(plan, all));
            }
            (got, want) => rank.check(got.is_some() == want.is_some(), named("recv_x_scales as x_scales")),
        }
        let (Some(idx), Some(weights), Some(src_idx)) =
            (&output.recv_topk_idx, &output.recv_topk_weights, &output.recv_src_idx)
        else {
            rank.check(!with_metadata, named("top-k"));
            return Ok(());
        };
        rank.check(with_metadata, named("no top-k"));
        let got = rank.rows::<i64>(idx)?;
        rank.equal(&named("recv_topk_idx"), &got[..rows], &plan.recv_topk_idx);
        let got = rank.rows::<f32>(weights)?;
        let want = oracle::recv_topk_weights(plan, &payload.weights);
        rank.equal(&named("recv_topk_weights"), &got[..rows], &want);
        let got = rank.values::<i32>(src_idx)?;
        let want: Vec<i32> = plan.recv_src.iter().map(|&(_, token)| token as i32).collect();
        rank.equal(&named("recv_src_idx"), &got[..rows], &want);
        Ok(())
    }

    /// Checks that a dispatch into a poisoned pool wrote rows and nothing else.
    fn check_untouched(
        &self,
        rank: &mut Rank,
        whole: &DispatchOutput,
        rows: u32,
        with_metadata: bool,
    ) -> Result<()> {
        let poisoned = |bytes: &[u8]| bytes.iter().all(|&byte| byte == POISON);
        let stride = whole.recv_x.row_stride() as usize;
        for (row, bytes) in rank.raw(&whole.recv_x)?.chunks(stride).enumerate() {
            let used = if row < rows as usize { self.row_bytes as usize } else { 0 };
            rank.check(poisoned(&bytes[used..]), format!("padding of recv_x row {row} is untouched"));
        }
        let metadata = [&whole.recv_topk_idx, &whole.recv_topk_weights, &whole.recv_src_idx];
        for tensor in metadata.into_iter().flatten() {
            let used = if with_metadata { rows as u64 * tensor.row_stride() } else { 0 };
            let bytes = rank.raw(tensor)?;
            rank.check(poisoned(&bytes[used as usize..]), format!("{tensor:?} is untouched from row {rows} on"));
        }
        if let Some(scales) = &whole.recv_x_scales {
            let used = rows as usize * scales.row_stride() as usize;
            let bytes = rank.raw(scales)?;
            rank.check(poisoned(&bytes[used..]), format!("scales are untouched from row {rows} on"));
        }
        Ok(())
    }

    fn check_combine(
        &self,
        rank: &mut Rank,
        what: &str,
        handle: &DispatchHandle,
        back: &Returned,
        in_pool: bool,
        expected_weights: Option<Vec<Vec<f32>>>,
    ) -> Result<()> {
        let columns = u64::from(self.row_bytes) / back.dtype.size();
        let topk = self.topk();
        let weights = back.weights.as_ref().map(|rows| rank.upload(DType::F32, topk, rows)).transpose()?;
        let tensor;
        let rows = if in_pool {
            let capacity = rank.buffer.capacity();
            rank.poison(&rank.buffer.combine_rows(back.dtype, capacity, columns)?)?;
            let place = rank.buffer.combine_rows(back.dtype, back.rows.len() as u64, columns)?;
            for (row, bytes) in (0..).zip(&back.rows) {
                rank.stream.write(place.ptr().add(row * place.row_stride()), bytes)?;
            }
            CombineRows::InPool { dtype: back.dtype, hidden: columns }
        } else {
            tensor = rank.upload_rows(back.dtype, columns, &back.rows)?;
            CombineRows::Tensor(&tensor)
        };
        let output = rank.combine(rows, weights.as_ref(), handle)?;
        // A rank without tokens reads nothing below, and the inputs must outlive the kernels.
        rank.stream.synchronize()?;
        let got = rank.row_bytes(&output.combined_x)?;
        rank.equal(&format!("combined_x of {what}"), &got, &back.expected);
        rank.check(output.combined_x.dtype() == back.dtype, "combined_x has the dtype of the rows");
        let got = output.combined_topk_weights.as_ref().map(|weights| rank.rows::<f32>(weights)).transpose()?;
        rank.check(got.is_some() == expected_weights.is_some(), format!("{what} gives weights as it got them"));
        rank.equal(
            &format!("combined_topk_weights of {what}"),
            &got.unwrap_or_default(),
            &expected_weights.unwrap_or_default(),
        );
        rank.buffer.check()
    }

    fn hidden(&self) -> u64 {
        u64::from(self.row_bytes) / self.dtype.size()
    }
}

/// What all ranks send.
pub struct Payload {
    pub x: PerToken<Vec<u8>>,
    pub scales: Option<PerToken<Vec<f32>>>,
    pub weights: PerToken<Vec<f32>>,
}

/// The part of one rank, on its device.
pub struct Uploaded {
    pub x: Tensor,
    pub scales: Option<Tensor>,
    pub weights: Tensor,
}

impl Payload {
    /// The payload of a case; `turn` tells several apart. The same on every rank.
    pub fn random(case: &Case, turn: u64) -> Payload {
        let mut rng = SmallRng::seed_from_u64(case.seed ^ turn << 32);
        let routing = &case.routing;
        let tokens: Vec<u32> = (0..routing.num_ranks()).map(|rank| routing.num_tokens(rank)).collect();
        let mut floats = |columns: u32| {
            payload::per_token(&tokens, |_, _| payload::rough_f32(&mut rng, columns as usize))
        };
        let weights = floats(routing.num_topk);
        let scales = (case.scales != Scales::None).then(|| floats(case.scales.count()));
        Payload { x: payload::distinct_rows(&mut rng, &tokens, case.row_bytes as usize), scales, weights }
    }

    pub fn upload(&self, case: &Case, rank: &Rank) -> Result<Uploaded> {
        let mine = rank.rank as usize;
        let scales = |all: &PerToken<Vec<f32>>| match case.scales {
            Scales::Flat => {
                let shape = [all[mine].len() as u64];
                Tensor::from_host(&rank.stream, DType::F32, &shape, &all[mine].concat())
            }
            _ => rank.upload(DType::F32, case.scales.count() as usize, &all[mine]),
        };
        Ok(Uploaded {
            x: rank.upload_rows(case.dtype, case.hidden(), &self.x[mine])?,
            scales: self.scales.as_ref().map(scales).transpose()?,
            weights: rank.upload(DType::F32, case.topk(), &self.weights[mine])?,
        })
    }
}

/// What one rank gives to a combine, and what it must get.
struct Returned {
    dtype: DType,
    rows: Vec<Vec<u8>>,
    weights: Option<Vec<Vec<f32>>>,
    expected: Vec<Vec<u8>>,
}

impl Returned {
    fn bf16(case: &Case, plans: &[Plan], rank: u32, turn: u64) -> Returned {
        let columns = case.row_bytes as usize / 2;
        let all = all_returned(case, plans, turn, |rng| payload::rough_bf16(rng, columns));
        let widened: Vec<_> = all.iter().map(|rows| payload::widen(rows)).collect();
        let sums: Vec<Vec<bf16>> = payload::round(&oracle::combine_f32(&case.routing, rank, &widened, columns));
        let (dtype, rows) = (DType::Bf16, as_bytes(&all[rank as usize]));
        Returned { dtype, rows, weights: None, expected: as_bytes(&sums) }
    }

    fn f32(case: &Case, plans: &[Plan], rank: u32, turn: u64) -> Returned {
        let columns = case.row_bytes as usize / 4;
        let all = all_returned(case, plans, turn, |rng| payload::rough_f32(rng, columns));
        let sums = oracle::combine_f32(&case.routing, rank, &all, columns);
        let (dtype, rows) = (DType::F32, as_bytes(&all[rank as usize]));
        Returned { dtype, rows, weights: None, expected: as_bytes(&sums) }
    }
}

/// One thing per rank and received row; `turn` tells several apart.
fn all_returned<T>(
    case: &Case,
    plans: &[Plan],
    turn: u64,
    mut make: impl FnMut(&mut SmallRng) -> T,
) -> Vec<Vec<T>> {
    let mut rng = SmallRng::seed_from_u64(!case.seed ^ turn << 32);
    plans.iter().map(|plan| (0..plan.num_recv_tokens).map(|_| make(&mut rng)).collect()).collect()
}

/// Weights that are not those received: nothing may be taken from anywhere but the argument.
fn all_weights(case: &Case, plans: &[Plan]) -> Vec<Vec<Vec<f32>>> {
    all_returned(case, plans, 99, |rng| payload::rough_f32(rng, case.topk()))
}

fn check_layout(rank: &mut Rank, layout: &DispatchLayout, plan: &Plan) -> Result<()> {
    let want = &plan.layout;
    let got = rank.values::<i32>(&layout.num_tokens_per_rank())?;
    rank.equal("num_tokens_per_rank", &got, &want.num_tokens_per_rank);
    let got = rank.values::<i32>(&layout.num_tokens_per_expert())?;
    rank.equal("num_tokens_per_expert", &got, &want.num_tokens_per_expert);
    let got = rank.rows::<u8>(&layout.is_token_in_rank())?;
    rank.equal("is_token_in_rank", &got, &want.is_token_in_rank);
    Ok(())
}

fn check_matrices(rank: &mut Rank, handle: &DispatchHandle, plan: &Plan) -> Result<()> {
    let matrices = [
        ("rank_prefix_matrix", handle.rank_prefix_matrix(), &plan.rank_prefix_matrix),
        ("channel_prefix_matrix", handle.channel_prefix_matrix(), &plan.channel_prefix_matrix),
        ("recv_channel_prefix_matrix", handle.recv_channel_prefix_matrix(), &plan.recv_channel_prefix_matrix),
        ("send_head", handle.send_head(), &plan.send_head),
    ];
    for (name, tensor, want) in matrices {
        let got = rank.rows::<i32>(&tensor)?;
        rank.equal(name, &got, want);
    }
    let got = rank.values::<u32>(&handle.num_recv_tokens_per_expert())?;
    rank.equal("num_recv_tokens_per_expert on the device", &got, &plan.num_recv_tokens_per_expert);
    let got = rank.values::<u32>(&handle.num_recv_tokens_on_device())?;
    rank.equal("num_recv_tokens on the device", &got, &[plan.num_recv_tokens]);
    rank.equal("num_tokens", &[handle.num_tokens()], &[plan.send_head.len() as u32]);
    rank.equal("num_channels", &[handle.num_channels()], &[plan.channel_prefix_matrix[0].len() as u32]);
    Ok(())
}

/// Poisons all that a dispatch writes in this rank's pool. Every peer's rows have arrived, and no peer sends the next ones
/// before this rank enters the next dispatch.
fn poison(rank: &Rank, whole: &DispatchOutput) -> Result<()> {
    rank.poison(&whole.recv_x)?;
    let others = [&whole.recv_x_scales, &whole.recv_topk_idx, &whole.recv_topk_weights, &whole.recv_src_idx];
    others.into_iter().flatten().try_for_each(|tensor| rank.poison(tensor))
}
