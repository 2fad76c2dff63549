//! One routing through every operation, each output against the oracle.

use rand::SeedableRng;
use rand::rngs::SmallRng;

use epoxide::Result;
use epoxide::ep::{
    CombineRows, Counts, DType, DispatchHandle, DispatchLayout, DispatchOutput, DispatchRequest,
    InternodeHandle, Tensor, Tuning,
};
use epoxide_testing::oracle::{self, InternodePlan, Plan, Routing};
use epoxide_testing::payload::{self, PerToken};

use crate::harness::{Nodes, POISON, Rank, Setup, as_bytes};

/// What travels, and how.
#[derive(Debug, Clone)]
pub struct Case {
    pub routing: Routing,
    /// `None`: all ranks are on one node.
    pub nodes: Option<Nodes>,
    pub num_channels: u32,
    pub expert_alignment: u32,
    pub dtype: DType,
    pub row_bytes: u32,
    pub scales: Scales,
    pub tuning: Tuning,
    /// Of the payload.
    pub seed: u64,
    /// Draws the order of the warps of each kernel; without it they take turns.
    pub schedule_seed: Option<u64>,
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
            nodes: None,
            num_channels: 2,
            expert_alignment: 1,
            dtype: DType::Bf16,
            row_bytes,
            scales: Scales::None,
            tuning: Tuning::default(),
            seed: 1,
            schedule_seed: None,
        }
    }

    /// Buffers that hold just this case; one token where it has none at all.
    pub fn setup(&self) -> Setup {
        let routing = &self.routing;
        let tokens = routing.max_tokens().max(1);
        Setup::new(routing.num_ranks(), self.num_channels, tokens, self.row_bytes.into())
            .max_topk(routing.num_topk)
            .max_scales(self.scales.count())
            .tuning(self.tuning)
            .nodes(self.nodes)
            .schedule_seed(self.schedule_seed)
    }

    /// Runs it on threads.
    pub fn check(&self) {
        let expected = Expected::new(self);
        self.setup().run(|rank| expected.check(rank));
    }

    /// The oracle's plan of every rank.
    pub fn plans(&self) -> Vec<Plan> {
        let plan = |rank| oracle::plan(&self.routing, rank, self.num_channels, self.expert_alignment);
        (0..self.routing.num_ranks()).map(plan).collect()
    }

    /// What several nodes add to each rank's plan.
    pub fn internode_plans(&self) -> Option<Vec<InternodePlan>> {
        let nodes = self.oracle_nodes()?;
        let plan = |rank| nodes.plan(rank, self.num_channels);
        Some((0..self.routing.num_ranks()).map(plan).collect())
    }

    /// `None` as well where there is one node only.
    fn oracle_nodes(&self) -> Option<oracle::Nodes<'_>> {
        let nodes = oracle::Nodes::new(&self.routing, self.nodes?.ranks_per_node);
        (nodes.count() > 1).then_some(nodes)
    }

    /// The rules of the interface ask for more than one channel in a cached dispatch across nodes.
    fn can_cache(&self) -> bool {
        self.num_channels > 1 || self.oracle_nodes().is_none()
    }

    /// The weights that combine gives a rank.
    fn summed_weights(&self, rank: u32, returned: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
        match self.oracle_nodes() {
            None => oracle::combined_weights(&self.routing, rank, returned),
            Some(nodes) => nodes.combined_weights(rank, returned),
        }
    }

    fn topk(&self) -> usize {
        self.routing.num_topk as usize
    }

    fn hidden(&self) -> u64 {
        u64::from(self.row_bytes) / self.dtype.size()
    }

    fn rng(&self, turn: u64) -> SmallRng {
        SmallRng::seed_from_u64(self.seed.rotate_left(8) ^ turn)
    }
}

/// All that the ranks send in one dispatch.
struct Payload {
    x: PerToken<Vec<u8>>,
    scales: Option<PerToken<Vec<f32>>>,
    weights: PerToken<Vec<f32>>,
}

impl Payload {
    fn random(case: &Case, turn: u64) -> Payload {
        let mut rng = case.rng(turn);
        let routing = &case.routing;
        let tokens: Vec<u32> = (0..routing.num_ranks()).map(|rank| routing.num_tokens(rank)).collect();
        let mut floats =
            |columns: u32| payload::per_token(&tokens, |_, _| payload::rough_f32(&mut rng, columns as usize));
        let weights = floats(routing.num_topk);
        let scales = (case.scales != Scales::None).then(|| floats(case.scales.count()));
        Payload { x: payload::distinct_rows(&mut rng, &tokens, case.row_bytes as usize), scales, weights }
    }

    /// The part of one rank, on its device.
    fn upload(&self, case: &Case, rank: &Rank) -> Result<Uploaded> {
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

struct Uploaded {
    x: Tensor,
    scales: Option<Tensor>,
    weights: Tensor,
}

/// All that the ranks give to one combine, and get from it.
pub struct Return {
    pub dtype: DType,
    /// `[receiver][row]`.
    pub rows: Vec<Vec<Vec<u8>>>,
    /// `[rank][token]`.
    pub sums: Vec<Vec<Vec<u8>>>,
}

impl Return {
    /// Rows whose sum shows in which order and precision it was made.
    pub fn random(case: &Case, plans: &[Plan], turn: u64, dtype: DType) -> Return {
        let mut rng = case.rng(turn);
        let columns = (u64::from(case.row_bytes) / dtype.size()) as usize;
        let exact: Vec<_> = per_row(plans, || payload::rough_f32(&mut rng, columns));
        if dtype == DType::F32 {
            return Return::of_f32(case, &exact);
        }
        let rows: Vec<_> = exact.iter().map(|rows| payload::round(rows)).collect();
        let sums: Vec<_> = match case.oracle_nodes() {
            Some(nodes) => {
                let ranks = 0..case.routing.num_ranks();
                ranks.map(|rank| as_bytes(&nodes.combine(rank, &rows, columns))).collect()
            }
            None => {
                let widened: Vec<_> = rows.iter().map(|rows| payload::widen(rows)).collect();
                let sums = sums(case, &widened, columns);
                sums.iter().map(|sums| as_bytes(&payload::round(sums))).collect()
            }
        };
        Return { dtype, rows: rows.iter().map(|rows| as_bytes(rows)).collect(), sums }
    }

    fn of_f32(case: &Case, rows: &[Vec<Vec<f32>>]) -> Return {
        let sums = sums(case, rows, case.row_bytes as usize / 4);
        let bytes = |all: &[Vec<Vec<f32>>]| all.iter().map(|rows| as_bytes(rows)).collect();
        Return { dtype: DType::F32, rows: bytes(rows), sums: bytes(&sums) }
    }
}

/// What each rank gets from a combine of `rows`.
fn sums(case: &Case, rows: &[Vec<Vec<f32>>], columns: usize) -> Vec<Vec<Vec<f32>>> {
    (0..case.routing.num_ranks())
        .map(|rank| oracle::combine_f32(&case.routing, rank, rows, columns))
        .collect()
}

/// One thing per rank and received row.
fn per_row<T>(plans: &[Plan], mut make: impl FnMut() -> T) -> Vec<Vec<T>> {
    plans.iter().map(|plan| (0..plan.num_recv_tokens).map(|_| make()).collect()).collect()
}

/// A case with all that must come of it.
pub struct Expected<'a> {
    case: &'a Case,
    plans: Vec<Plan>,
    internode: Option<Vec<InternodePlan>>,
    first: Payload,
    /// Of the cached dispatch.
    second: Payload,
    returns: [Return; 4],
    /// The second payload's rows themselves, where they are numbers.
    echo: Option<Return>,
    /// Weights for a combine that are not those received, `[receiver][row]`: they may come from nowhere else.
    weights: Vec<Vec<Vec<f32>>>,
}

impl Expected<'_> {
    pub fn new(case: &Case) -> Expected<'_> {
        let plans = case.plans();
        let second = Payload::random(case, 2);
        // Between nodes rows are summed in BF16 only.
        let f32_sums = case.oracle_nodes().is_none();
        let f32_or_bf16 = if f32_sums { DType::F32 } else { DType::Bf16 };
        let echo = (case.dtype == DType::F32 && f32_sums).then(|| {
            // Exponent bits that make NaN and infinity are no use in a sum.
            let number = |bits: u32| f32::from_bits(bits & 0xbf7f_ffff);
            let row = |row: &Vec<u8>| payload::values_of::<u32>(row).into_iter().map(number).collect();
            let all: Vec<Vec<Vec<f32>>> =
                second.x.iter().map(|rows| rows.iter().map(row).collect()).collect();
            let returned: Vec<_> = plans.iter().map(|plan| oracle::recv_rows(plan, &all)).collect();
            Return {
                rows: all.iter().map(|rows| as_bytes(rows)).collect(),
                ..Return::of_f32(case, &returned)
            }
        });
        let mut rng = case.rng(9);
        Expected {
            first: Payload::random(case, 1),
            returns: [(3, DType::Bf16), (4, DType::Bf16), (5, f32_or_bf16), (6, f32_or_bf16)]
                .map(|(turn, dtype)| Return::random(case, &plans, turn, dtype)),
            weights: per_row(&plans, || payload::rough_f32(&mut rng, case.topk())),
            internode: case.internode_plans(),
            case,
            plans,
            second,
            echo,
        }
    }

    /// The part of one rank. Collective.
    pub fn check(&self, rank: &mut Rank) -> Result<()> {
        let (case, mine) = (self.case, rank.rank as usize);
        let plan = &self.plans[mine];
        let internode = self.internode.as_ref().map(|plans| &plans[mine]);
        let uploaded = self.first.upload(case, rank)?;

        let topk_idx = rank.upload(DType::I64, case.topk(), &case.routing.topk_idx[mine])?;
        let layout = rank.layout(&topk_idx, case.routing.num_experts)?;
        layout.validate(&rank.stream, &topk_idx)?;
        check_layout(rank, &layout, plan, internode)?;

        // Counts stay on the device: the outputs are the whole pool.
        let request = |counts| DispatchRequest {
            x_scales: uploaded.scales.as_ref(),
            topk_idx: Some(&topk_idx),
            topk_weights: Some(&uploaded.weights),
            expert_alignment: case.expert_alignment,
            counts,
            ..DispatchRequest::new(&uploaded.x, &layout)
        };
        let whole = rank.dispatch(request(rank.on_device()))?;
        rank.buffer.check_dispatch(&whole.handle, &rank.stream)?;
        rank.check(whole.num_recv_tokens.is_none(), "num_recv_tokens is unknown without a host wait");
        rank.check(
            whole.num_recv_tokens_per_expert.is_empty(),
            "expert counts are unknown without a host wait",
        );
        let rows = whole.handle.num_recv_tokens(&rank.stream)?;
        rank.equal("num_recv_tokens", &[rows], &[plan.num_recv_tokens]);
        self.check_received(rank, "on-device dispatch", &whole, &whole, &self.first, true)?;
        check_matrices(rank, &whole.handle, plan, internode)?;

        // Exact counts, into a poisoned pool.
        poison(rank, &whole)?;
        let exact = rank.dispatch(request(Counts::Exact))?;
        rank.equal("num_recv_tokens", exact.num_recv_tokens.as_slice(), &[plan.num_recv_tokens]);
        rank.equal(
            "num_recv_tokens_per_expert",
            &exact.num_recv_tokens_per_expert,
            &plan.num_recv_tokens_per_expert,
        );
        self.check_received(rank, "exact dispatch", &exact, &whole, &self.first, true)?;
        self.check_untouched(rank, &whole, true)?;
        check_matrices(rank, &exact.handle, plan, internode)?;
        let recv_weights =
            exact.recv_topk_weights.as_ref().map(|weights| rank.rows::<f32>(weights)).transpose()?;

        // The same routing with other rows; metadata does not travel.
        poison(rank, &whole)?;
        let uploaded = self.second.upload(case, rank)?;
        let cached = rank.dispatch_cached(&uploaded.x, uploaded.scales.as_ref(), &exact.handle);
        let last_handle = if case.can_cache() {
            let cached = cached?;
            rank.equal("cached num_recv_tokens", cached.num_recv_tokens.as_slice(), &[plan.num_recv_tokens]);
            self.check_received(rank, "cached dispatch", &cached, &whole, &self.second, false)?;
            self.check_untouched(rank, &whole, false)?;
            cached.handle
        } else {
            let error = cached.err().map_or("no error".into(), |error| error.to_string());
            rank.check(error.starts_with("num_sms = 2: "), format!("a cached dispatch gives {error}"));
            exact.handle.clone()
        };

        // Weights go back as they came: each survives where its id is valid.
        let masked = |(weights, ids): (&Vec<f32>, &Vec<i64>)| -> Vec<f32> {
            weights.iter().zip(ids).map(|(&weight, &id)| if id < 0 { 0.0 } else { weight }).collect()
        };
        let ids = &case.routing.topk_idx[mine];
        let round_trip: Vec<_> = self.first.weights[mine].iter().zip(ids).map(masked).collect();
        let weights = recv_weights.map(|given| Weights { given, summed: round_trip });
        self.check_combine(rank, "first combine", &exact.handle, &self.returns[0], Place::Tensor, weights)?;

        // The handle feeds further combines: other rows, either place, either dtype; so does the older handle.
        let summed = case.summed_weights(rank.rank, &self.weights);
        let weights = Some(Weights { given: self.weights[mine].clone(), summed });
        self.check_combine(
            rank,
            "combine from the pool",
            &exact.handle,
            &self.returns[1],
            Place::Pool,
            weights,
        )?;
        let [.., third, fourth] = &self.returns;
        self.check_combine(rank, "third combine", &whole.handle, third, Place::Tensor, None)?;
        self.check_combine(rank, "fourth combine", &last_handle, fourth, Place::Pool, None)?;

        // Received rows can go back as they are, strided as they lie in the pool.
        if let Some(echo) = &self.echo {
            let x = rank.upload_rows(case.dtype, case.hidden(), &echo.rows[mine])?;
            let cached = rank.dispatch_cached(&x, None, &exact.handle)?;
            let output = rank.combine(CombineRows::Tensor(&cached.recv_x), None, &exact.handle)?;
            rank.stream.synchronize()?;
            let got = rank.row_bytes(&output.combined_x)?;
            rank.equal("combined_x of recv_x itself", &got, &echo.sums[mine]);
        }
        rank.stream.synchronize()
    }

    /// Compares what `output` says was received. `whole` has the same tensors with all rows of the pool.
    fn check_received(
        &self,
        rank: &mut Rank,
        what: &str,
        output: &DispatchOutput,
        whole: &DispatchOutput,
        payload: &Payload,
        with_metadata: bool,
    ) -> Result<()> {
        let (case, plan) = (self.case, &self.plans[rank.rank as usize]);
        let rows = plan.num_recv_tokens as usize;
        let named = |name: &str| format!("{name} of {what}");
        let shape = output.num_recv_tokens.map_or(rank.buffer.capacity(), u64::from);
        rank.equal(&named("shape of recv_x"), output.recv_x.shape(), &[shape, case.hidden()]);
        rank.check(output.recv_x.dtype() == case.dtype, "recv_x has the dtype of x");
        rank.check(output.recv_x.ptr() == whole.recv_x.ptr(), "recv_x lies in the pool");

        let got = rank.row_bytes(&output.recv_x)?;
        rank.equal(&named("recv_x"), &got[..rows], &oracle::recv_rows(plan, &payload.x));
        match (&output.recv_x_scales, &payload.scales) {
            (Some(scales), Some(all)) => {
                let columns = (case.scales != Scales::Flat).then_some(case.scales.count().into());
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
            rank.check(output.recv_src_meta.is_none(), named("no recv_src_meta"));
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
        match (&output.recv_src_meta, &self.internode) {
            (Some(meta), Some(plans)) => {
                let got = rank.rows::<i32>(meta)?;
                let want: Vec<_> =
                    plans[rank.rank as usize].recv_src_meta.iter().map(|meta| meta.to_vec()).collect();
                rank.equal(&named("recv_src_meta"), &got[..rows], &want);
            }
            (got, want) => {
                rank.check(got.is_some() == want.is_some(), named("recv_src_meta with several nodes"))
            }
        }
        Ok(())
    }

    /// Checks that a dispatch into a poisoned pool wrote rows and nothing else.
    fn check_untouched(&self, rank: &mut Rank, whole: &DispatchOutput, with_metadata: bool) -> Result<()> {
        let rows = self.plans[rank.rank as usize].num_recv_tokens as usize;
        let poisoned = |bytes: &[u8]| bytes.iter().all(|&byte| byte == POISON);
        let stride = whole.recv_x.row_stride() as usize;
        for (row, bytes) in rank.raw(&whole.recv_x)?.chunks(stride).enumerate() {
            let used = if row < rows { self.case.row_bytes as usize } else { 0 };
            rank.check(poisoned(&bytes[used..]), format!("padding of recv_x row {row} is untouched"));
        }
        let metadata =
            [&whole.recv_topk_idx, &whole.recv_topk_weights, &whole.recv_src_idx, &whole.recv_src_meta];
        let metadata = metadata.map(|tensor| (tensor, if with_metadata { rows } else { 0 }));
        for (tensor, rows) in metadata.into_iter().chain([(&whole.recv_x_scales, rows)]) {
            let Some(tensor) = tensor else { continue };
            let used = rows * tensor.row_stride() as usize;
            let bytes = rank.raw(tensor)?;
            rank.check(poisoned(&bytes[used..]), format!("{tensor:?} is untouched from row {rows} on"));
        }
        Ok(())
    }

    fn check_combine(
        &self,
        rank: &mut Rank,
        what: &str,
        handle: &DispatchHandle,
        back: &Return,
        place: Place,
        weights: Option<Weights>,
    ) -> Result<()> {
        let mine = rank.rank as usize;
        let (columns, rows) = (u64::from(self.case.row_bytes) / back.dtype.size(), &back.rows[mine]);
        let (given, summed) = weights.map(|weights| (weights.given, weights.summed)).unzip();
        let given = given.map(|given| rank.upload(DType::F32, self.case.topk(), &given)).transpose()?;
        let tensor;
        let rows = match place {
            Place::Tensor => {
                tensor = rank.upload_rows(back.dtype, columns, rows)?;
                CombineRows::Tensor(&tensor)
            }
            Place::Pool => {
                let capacity = rank.buffer.capacity();
                rank.poison(&rank.buffer.combine_rows(back.dtype, capacity, columns)?)?;
                let pool = rank.buffer.combine_rows(back.dtype, rows.len() as u64, columns)?;
                for (row, bytes) in (0..).zip(rows) {
                    rank.stream.write(pool.ptr().add(row * pool.row_stride()), bytes)?;
                }
                CombineRows::InPool { dtype: back.dtype, hidden: columns }
            }
        };
        let output = rank.combine(rows, given.as_ref(), handle)?;
        // A rank without tokens reads nothing below, and the inputs must outlive the kernels.
        rank.stream.synchronize()?;
        let got = rank.row_bytes(&output.combined_x)?;
        rank.equal(&format!("combined_x of {what}"), &got, &back.sums[mine]);
        rank.check(output.combined_x.dtype() == back.dtype, "combined_x has the dtype of the rows");
        let got =
            output.combined_topk_weights.as_ref().map(|weights| rank.rows::<f32>(weights)).transpose()?;
        rank.check(got.is_some() == summed.is_some(), format!("{what} gives weights as it got them"));
        rank.equal(
            &format!("combined_topk_weights of {what}"),
            &got.unwrap_or_default(),
            &summed.unwrap_or_default(),
        );
        rank.buffer.check()
    }
}

/// What one rank gives to a combine as weights, and what it must get.
struct Weights {
    given: Vec<Vec<f32>>,
    summed: Vec<Vec<f32>>,
}

/// Where the rows of a combine are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Tensor,
    Pool,
}

fn check_layout(
    rank: &mut Rank,
    layout: &DispatchLayout,
    plan: &Plan,
    internode: Option<&InternodePlan>,
) -> Result<()> {
    let want = &plan.layout;
    rank.equal_values("num_tokens_per_rank", &layout.num_tokens_per_rank(), &want.num_tokens_per_rank)?;
    rank.equal_values("num_tokens_per_expert", &layout.num_tokens_per_expert(), &want.num_tokens_per_expert)?;
    rank.equal_rows("is_token_in_rank", &layout.is_token_in_rank(), &want.is_token_in_rank)?;
    match (layout.num_tokens_per_rdma_rank(), internode) {
        (Some(got), Some(want)) => {
            rank.equal_values("num_tokens_per_rdma_rank", &got, &want.num_tokens_per_rdma_rank)
        }
        (got, want) => {
            rank.check(got.is_some() == want.is_some(), "num_tokens_per_rdma_rank with several nodes");
            Ok(())
        }
    }
}

fn check_matrices(
    rank: &mut Rank,
    handle: &DispatchHandle,
    plan: &Plan,
    internode: Option<&InternodePlan>,
) -> Result<()> {
    rank.equal_rows("send_head", &handle.send_head(), &plan.send_head)?;
    let per_expert = handle.num_recv_tokens_per_expert();
    rank.equal_values(
        "num_recv_tokens_per_expert on the device",
        &per_expert,
        &plan.num_recv_tokens_per_expert,
    )?;
    let num_recv_tokens = handle.num_recv_tokens_on_device();
    rank.equal_values("num_recv_tokens on the device", &num_recv_tokens, &[plan.num_recv_tokens])?;
    rank.equal("num_tokens", &[handle.num_tokens()], &[plan.send_head.len() as u32]);
    rank.equal("num_channels", &[handle.num_channels()], &[plan.channel_prefix_matrix[0].len() as u32]);
    match (handle.intranode(), handle.internode(), internode) {
        (Some(got), None, None) => {
            rank.equal_rows("rank_prefix_matrix", &got.rank_prefix_matrix(), &plan.rank_prefix_matrix)?;
            rank.equal_rows(
                "channel_prefix_matrix",
                &got.channel_prefix_matrix(),
                &plan.channel_prefix_matrix,
            )?;
            rank.equal_rows(
                "recv_channel_prefix_matrix",
                &got.recv_channel_prefix_matrix(),
                &plan.recv_channel_prefix_matrix,
            )
        }
        (None, Some(got), Some(want)) => check_internode(rank, got, want),
        _ => {
            rank.check(false, "the handle has the matrices of one node, or else those of several");
            Ok(())
        }
    }
}

fn check_internode(rank: &mut Rank, got: InternodeHandle<'_>, want: &InternodePlan) -> Result<()> {
    let relayed = got.num_rdma_recv_tokens(&rank.stream)?;
    rank.equal("num_rdma_recv_tokens", &[relayed], &[want.num_rdma_recv_tokens()]);
    for (name, got, want) in [
        ("rdma_channel_prefix_matrix", got.rdma_channel_prefix_matrix(), &want.rdma_channel_prefix_matrix),
        ("gbl_channel_prefix_matrix", got.gbl_channel_prefix_matrix(), &want.gbl_channel_prefix_matrix),
        (
            "recv_rdma_channel_prefix_matrix",
            got.recv_rdma_channel_prefix_matrix(),
            &want.recv_rdma_channel_prefix_matrix,
        ),
        (
            "recv_gbl_channel_prefix_matrix",
            got.recv_gbl_channel_prefix_matrix(),
            &want.recv_gbl_channel_prefix_matrix,
        ),
        ("send_rdma_head", got.send_rdma_head(), &want.send_rdma_head),
    ] {
        rank.equal_rows(name, &got, want)?;
    }
    let send_nvl_head = got.send_nvl_head(&rank.stream)?;
    rank.equal_rows("send_nvl_head", &send_nvl_head, &want.send_nvl_head)?;
    rank.equal_values(
        "recv_rdma_rank_prefix_sum",
        &got.recv_rdma_rank_prefix_sum(),
        &want.recv_rdma_rank_prefix_sum,
    )?;
    rank.equal_values(
        "recv_gbl_rank_prefix_sum",
        &got.recv_gbl_rank_prefix_sum(),
        &want.recv_gbl_rank_prefix_sum,
    )
}

/// Poisons all that a dispatch writes in this rank's pool. Every peer's rows have arrived, and no peer sends the next ones
/// before this rank enters the next dispatch.
fn poison(rank: &Rank, whole: &DispatchOutput) -> Result<()> {
    rank.poison(&whole.recv_x)?;
    let others = [
        &whole.recv_x_scales,
        &whole.recv_topk_idx,
        &whole.recv_topk_weights,
        &whole.recv_src_idx,
        &whole.recv_src_meta,
    ];
    others.into_iter().flatten().try_for_each(|tensor| rank.poison(tensor))
}
