//! A round trip on one rank, and its checks.

use epoxide::Result;
use epoxide::driver::Device;
use epoxide::group::ProcessGroup;
use epoxide::throughput::{
    Buffer, CachedDispatchRequest, CombineRequest, Combined, Counts, DispatchHandle, DispatchLayout,
    DispatchRequest, Options, Place, Quantise, Received,
};
use epoxide::{DType, Tensor, TypedTensor};
use half::{bf16, f16};

use super::case::{Case, Scales};
use super::{Cases, Draw, Replays, RoundTrip};
use crate::compare::{self, Difference};
use crate::harness::{POISON, Rank, Region, as_bytes};
use crate::ids::{Ids, upload_narrow};
use crate::oracle::{self, InternodePlan, Plan, Style};
use crate::payload;

/// Columns that combine's expected values are computed for at a time, to bound memory.
const COLUMNS_AT_A_TIME: usize = 256;

/// Expected results of one rank.
#[derive(Debug, Clone)]
pub struct Expected {
    /// The plan.
    pub plan: Plan,
    /// Additional results across nodes.
    pub internode: Option<InternodePlan>,
}

/// Parameters of one combine.
#[derive(Debug, Clone, Copy)]
struct Combine<'a> {
    what: &'a str,
    turn: u64,
    dtype: DType,
    columns: u64,
    /// The place that has the rows, if they are not in a tensor.
    place: Option<&'a Place>,
    /// The returned weights, and their expected sums.
    weights: Option<(&'a TypedTensor<'a, f32>, &'a [f32])>,
}

/// Scales on the device.
pub(super) type DeviceScales = Option<TypedTensor<'static, f32>>;

impl RoundTrip for Buffer {
    type Case = Case;
    type Options = Options;
    const FIRST_NUMBER: u64 = 0;

    fn create(device: Device, group: &dyn ProcessGroup, options: Options) -> Result<Buffer> {
        Buffer::new(device, group, options)
    }

    fn recorded(&self) -> Result<()> {
        self.check()
    }

    /// One case with distinct experts, as from routers, and one with holes.
    fn first_cases(cases: &Cases) -> Vec<Case> {
        let styles = [(1, Style::DistinctTopK), (2, Style::WithHoles)];
        styles.map(|(number, style)| Case::full_size(cases, number, style)).into()
    }

    fn case(cases: &Cases, number: u64, draw: Draw) -> Case {
        // [`first_cases`](Self::first_cases) has the first numbers.
        match draw {
            Draw::Random => Case::random(cases, 3 + number),
            Draw::Full => Case::full_size(cases, 3 + number, Style::DistinctTopK),
        }
    }

    /// Layout, dispatch, combine from a tensor with weights, cached dispatch of other bytes, combine
    /// from the pool.
    fn round_trip(rank: &mut Rank, case: &Case) -> Result<u64> {
        let expected = rank.expect(case);
        let rows = u64::from(expected.plan.num_recv_tokens);
        let (topk_weights, layout) = rank.lay_out(case, &expected)?;
        let mut place = rank.place()?;

        rank.poison_received(rows)?;
        let (x, scales) = rank.payload(case, 0)?;
        let columns = rank.columns(case, 0)?;
        let to_send = request(case, &topk_weights, &layout, &x, scales.as_ref(), &columns, Counts::Exact);
        let output = rank.dispatch(&mut place, to_send)?;
        rank.learn_regions(&output);
        rank.check_dispatch(case, 0, &expected, "dispatch", &output)?;
        let combine = Combine {
            what: "combine",
            turn: 1,
            dtype: DType::Bf16,
            columns: case.hidden(),
            place: None,
            weights: None,
        };
        let handle = output.handle.clone();
        let given = output.recv_topk_weights.clone();
        let summed = rank.round_trip_of_weights(case);
        let weights = given.as_ref().map(|given| (given, &summed[..]));
        rank.check_combine(case, &expected.plan, &handle, Combine { weights, ..combine })?;
        drop((output, given));

        rank.poison_received(rows)?;
        let (x, scales) = rank.payload(case, 2)?;
        let columns = rank.columns(case, 2)?;
        let cached =
            rank.dispatch_cached(&mut place, cached_request(case, &x, scales.as_ref(), &columns, &handle))?;
        rank.check_received(case, 2, &expected.plan.recv_src, "cached dispatch", &cached)?;
        drop(cached);
        let combine = Combine { what: "combine from the pool", turn: 3, place: Some(&place), ..combine };
        rank.check_combine(case, &expected.plan, &handle, combine)?;

        for tensor in rank.spoilable(&layout, &handle)? {
            rank.poison(&tensor)?;
        }
        Ok(rows)
    }

    fn replay(rank: &mut Rank, cases: &Cases, replays: u64, step: impl Fn()) -> Result<Replays> {
        rank.replay_graph(cases, replays, step)
    }
}

impl Rank {
    /// Expected results of this rank, with this buffer's channels and nodes.
    pub fn expect(&self, case: &Case) -> Expected {
        let channels = self.buffer.config().num_channels();
        let plan = oracle::plan(&case.routing, self.rank, channels, case.expert_alignment);
        let several = self.buffer.num_nodes() > 1;
        let nodes =
            several.then(|| oracle::InternodeOracle::new(&case.routing, self.buffer.ranks_per_node()));
        Expected { plan, internode: nodes.map(|nodes| nodes.plan(self.rank, channels)) }
    }

    /// This rank's ids and weights of a case, on the device.
    pub fn topk(&self, case: &Case) -> Result<(TypedTensor<'static, i64>, TypedTensor<'static, f32>)> {
        let shape = [u64::from(case.routing.num_tokens(self.rank)), u64::from(case.routing.num_topk)];
        let ids = case.routing.flat_topk_idx(self.rank);
        let ids = TypedTensor::from_host(&self.stream, &shape, &ids)?;
        let weights = case.weights(self.rank).concat();
        Ok((ids, TypedTensor::from_host(&self.stream, &shape, &weights)?))
    }

    /// This rank's rows and scales of a case as they are given, on the device.
    pub fn payload(&self, case: &Case, turn: u64) -> Result<(Tensor<'static>, DeviceScales)> {
        let (rank, tokens) = (self.rank, case.routing.num_tokens(self.rank));
        let rows: Vec<Vec<u8>> = (0..tokens).map(|token| case.given(turn, rank, token).1).collect();
        let (dtype, _) = case.given(turn, rank, 0);
        let x = self.upload_rows(dtype, case.hidden(), &rows)?;
        let shape = match case.scales {
            _ if case.quantise != Quantise::None => return Ok((x, None)),
            Scales::None | Scales::Any(_) => return Ok((x, None)),
            Scales::Flat => vec![u64::from(tokens)],
            Scales::Columns(columns) => vec![u64::from(tokens), u64::from(columns)],
        };
        let scales: Vec<f32> = (0..tokens).flat_map(|token| case.scales(turn, rank, token)).collect();
        Ok((x, Some(TypedTensor::from_host(&self.stream, &shape, &scales)?)))
    }

    /// This rank's columns of a case, of any types, on the device: those that are given.
    pub fn columns(&self, case: &Case, turn: u64) -> Result<Vec<Tensor<'static>>> {
        if case.quantise != Quantise::None {
            return Ok(Vec::new());
        }
        let tokens = case.routing.num_tokens(self.rank);
        let upload = |(index, (dtype, elements)): (usize, (DType, u32))| {
            let shape = [u64::from(tokens), u64::from(elements)];
            let shape = if elements == 1 { &shape[..1] } else { &shape[..] };
            let of_token = |token| case.column(turn, (self.rank, token), index);
            let bytes: Vec<u8> = (0..tokens).flat_map(of_token).collect();
            let tensor = Tensor::alloc(self.device(), dtype, shape)?;
            // SAFETY: the tensor's memory is live, and has the bytes of its shape.
            unsafe { self.stream.write(tensor.ptr(), &bytes)? };
            Ok(tensor)
        };
        case.scales.list().into_iter().enumerate().map(upload).collect()
    }

    /// Records the memory that a dispatch writes, for [`Rank::poison_received`].
    pub fn learn_regions(&mut self, output: &Received) {
        let region = |name, tensor: &Tensor, is_metadata| Region {
            name,
            at: tensor.ptr(),
            stride: tensor.row_stride(),
            used: tensor.row_bytes(),
            is_metadata,
        };
        let scales = output.recv_x_scales.as_deref().map(|tensor| region("recv_x_scales", tensor, false));
        // The columns of a row lie together.
        let columns = output.recv_columns.first().map(|tensor| {
            let region = region("recv_columns", tensor, false);
            Region { used: region.stride, ..region }
        });
        let ids = output.recv_topk_idx.as_deref().map(|tensor| region("recv_topk_idx", tensor, true));
        let weights =
            output.recv_topk_weights.as_deref().map(|tensor| region("recv_topk_weights", tensor, true));
        let src_idx = output.recv_src_idx.as_deref().map(|tensor| region("recv_src_idx", tensor, true));
        let src_meta = output.recv_src_meta.as_deref().map(|tensor| region("recv_src_meta", tensor, true));
        let x = Some(region("recv_x", &output.recv_x, false));
        self.regions = [x, scales, columns, ids, weights, src_idx, src_meta].into_iter().flatten().collect();
    }

    /// Overwrites the first `rows` rows of all recorded memory of dispatches in the own pool. Every
    /// peer's rows have arrived, and no peer sends the next ones before this rank enters the next
    /// dispatch.
    pub fn poison_received(&self, rows: u64) -> Result<()> {
        for region in &self.regions {
            if rows > 0 {
                // SAFETY: a dispatch of this buffer has written there, in memory that the buffer
                // keeps. Callers give no more rows than it has room for.
                unsafe { self.stream.fill(region.at, POISON, rows * region.stride)? };
            }
        }
        self.stream.synchronize()
    }

    /// All checks of one routing. They are dispatches with and without a wait of the host and
    /// cached, that they write all of their outputs and nothing else, and six combines. The
    /// combines are in either place, of each dtype and along either handle. Collective.
    ///
    /// # Errors
    /// Errors of the operations.
    pub fn check_everything(&mut self, case: &Case) -> Result<()> {
        let expected = self.expect(case);
        let plan = &expected.plan;
        let capacity = self.buffer.capacity();
        let (topk_weights, layout) = self.lay_out(case, &expected)?;
        layout.validate(&self.stream)?;
        let mut place = self.place()?;

        // Counts stay on the device: the outputs are the whole pool.
        let (x, scales) = self.payload(case, 1)?;
        let columns = self.columns(case, 1)?;
        let counts = self.on_device();
        let to_send = request(case, &topk_weights, &layout, &x, scales.as_ref(), &columns, counts);
        let sms = |turn| case.num_sms(self.rank, turn);
        let sms = [sms(1), sms(2), sms(3)];
        let to_send = sms[0].into_iter().fold(to_send, DispatchRequest::num_sms);
        let whole = self.dispatch(&mut place, to_send)?;
        self.buffer.check_dispatch(&whole.handle, &self.stream)?;
        self.check(whole.num_recv_tokens.is_none(), "num_recv_tokens is unknown without a host wait");
        self.learn_regions(&whole);
        self.check_dispatch(case, 1, &expected, "on-device dispatch", &whole)?;
        let (whole_at, whole) = (whole.recv_x.ptr(), whole.handle);

        // Exact counts, into a poisoned pool.
        self.poison_received(capacity)?;
        let to_send = request(case, &topk_weights, &layout, &x, scales.as_ref(), &columns, Counts::Exact);
        let to_send = sms[1].into_iter().fold(to_send, DispatchRequest::num_sms);
        let exact = self.dispatch(&mut place, to_send)?;
        self.equal("num_recv_tokens", exact.num_recv_tokens.as_slice(), &[plan.num_recv_tokens]);
        self.check_dispatch(case, 1, &expected, "exact dispatch", &exact)?;
        self.check(exact.recv_x.ptr() == whole_at, "recv_x lies in the pool");
        self.check_untouched(plan, true)?;
        let weights_before =
            exact.recv_topk_weights.as_ref().map(|tensor| tensor.values(&self.stream)).transpose()?;
        let exact = exact.handle;

        // The same routing with other rows; metadata does not travel.
        self.poison_received(capacity)?;
        let (x, scales) = self.payload(case, 2)?;
        let columns = self.columns(case, 2)?;
        let again = cached_request(case, &x, scales.as_ref(), &columns, &exact);
        let again = sms[2].into_iter().fold(again, CachedDispatchRequest::num_sms);
        let cached = self.dispatch_cached(&mut place, again);
        // The interface requires more than one channel in a cached dispatch across nodes.
        let may_be_cached = self.buffer.config().num_channels() > 1 || self.buffer.num_nodes() == 1;
        let last_handle = if may_be_cached {
            let cached = cached?;
            self.equal("cached num_recv_tokens", cached.num_recv_tokens.as_slice(), &[plan.num_recv_tokens]);
            self.check_received(case, 2, &plan.recv_src, "cached dispatch", &cached)?;
            self.check(cached.recv_x.ptr() == whole_at, "recv_x lies in the pool");
            let metadata = (&cached.recv_topk_idx, &cached.recv_topk_weights, &cached.recv_src_idx);
            let without = matches!(metadata, (None, None, None)) && cached.recv_src_meta.is_none();
            self.check(without, "a cached dispatch gives no metadata");
            self.check_untouched(plan, false)?;
            cached.handle
        } else {
            let error = cached.err().map_or("no error".into(), |error| error.to_string());
            self.check(error.starts_with("num_sms = 2: "), format!("a cached dispatch gives {error}"));
            exact.clone()
        };

        // Weights are returned unchanged: each with a valid id is kept.
        let shape = [u64::from(plan.num_recv_tokens), u64::from(case.routing.num_topk)];
        let upload = |rank: &Rank, values: &[f32]| TypedTensor::from_host(&rank.stream, &shape, values);
        let given = weights_before.map(|weights| upload(self, &weights)).transpose()?;
        let summed = self.round_trip_of_weights(case);
        let weights = given.as_ref().map(|given| (given, &summed[..]));
        let columns = |dtype: DType| u64::from(case.row_bytes) / dtype.size();
        let first = Combine {
            what: "first combine",
            turn: 3,
            dtype: DType::Bf16,
            columns: columns(DType::Bf16),
            place: None,
            weights,
        };
        self.check_combine(case, plan, &exact, first)?;

        // The handle feeds further combines: other rows, either place, either dtype; so does the
        // older handle.
        let given: Vec<f32> =
            plan.recv_src.iter().flat_map(|&source| case.given_weights(self.rank, source)).collect();
        let per_node = self.buffer.ranks_per_node();
        let summed =
            case.summed_weights(self.rank, per_node, |receiver, source| case.given_weights(receiver, source));
        let given = upload(self, &given)?;
        let weights = Some((&given, &summed[..]));
        let second =
            Combine { what: "combine from the pool", turn: 4, place: Some(&place), weights, ..first };
        self.check_combine(case, plan, &exact, second)?;
        let dtype = DType::F32;
        let third = Combine {
            what: "third combine",
            turn: 5,
            dtype,
            columns: columns(dtype),
            weights: None,
            ..first
        };
        self.check_combine(case, plan, &whole, third)?;
        let fourth = Combine { what: "fourth combine", turn: 6, place: Some(&place), ..third };
        self.check_combine(case, plan, &last_handle, fourth)?;
        let dtype = DType::F16;
        let fifth = Combine { what: "fifth combine", turn: 8, dtype, columns: columns(dtype), ..third };
        self.check_combine(case, plan, &exact, fifth)?;
        let sixth = Combine { what: "sixth combine", turn: 9, place: Some(&place), ..fifth };
        self.check_combine(case, plan, &last_handle, sixth)?;
        if case.dtype == DType::F32 && may_be_cached {
            self.check_echo(case, &exact, &mut place)?;
        }
        self.stream.synchronize()
    }

    /// Received rows can go back as they are, strided as they lie in the pool.
    fn check_echo(&mut self, case: &Case, handle: &DispatchHandle, place: &mut Place) -> Result<()> {
        const TURN: u64 = 7;
        let (rank, columns) = (self.rank, case.hidden() as usize);
        // Any receiver gives back the same.
        let row = |source| case.returned(TURN, 0, source, 0..columns);
        let rows: Vec<Vec<f32>> =
            (0..case.routing.num_tokens(rank)).map(|token| row((rank, token))).collect();
        let x = self.upload_rows(DType::F32, columns as u64, &as_bytes(&rows))?;
        let cached = self.dispatch_cached(place, CachedDispatchRequest::new(&x, handle))?;
        let output = self.combine(CombineRequest::new(&cached.recv_x, handle))?;
        self.stream.synchronize()?;
        let got = self.row_bytes(&output.combined_x)?;
        let sums =
            case.sums(rank, self.buffer.ranks_per_node(), DType::F32, columns, |_, source| row(source));
        self.equal("combined_x of recv_x itself", &got, &sums);
        Ok(())
    }

    /// Makes the layout, and compares it.
    pub(super) fn lay_out(
        &mut self,
        case: &Case,
        expected: &Expected,
    ) -> Result<(TypedTensor<'static, f32>, DispatchLayout<'static>)> {
        let (topk_idx, topk_weights) = self.topk(case)?;
        let layout = match &case.ids {
            Ids::Wide => self.layout(&topk_idx, case.routing.num_experts)?,
            Ids::Narrow => {
                let ids = &case.routing.topk_idx[self.rank as usize];
                let ids = upload_narrow(&self.stream, case.routing.num_topk, ids)?;
                self.layout(&ids, case.routing.num_experts)?
            }
            Ids::Placed(logical) => {
                let (ids, map) =
                    (logical.upload(&self.stream, self.rank)?, logical.upload_map(&self.stream)?);
                let layout = self.placed_layout(&ids, &map)?;
                let physical = layout.physical_topk_idx().map(|ids| ids.values(&self.stream)).transpose()?;
                let physical = physical.map(|ids| ids.into_iter().map(i64::from).collect::<Vec<_>>());
                let expected = case.routing.flat_topk_idx(self.rank);
                self.check(physical == Some(expected), "physical_topk_idx differs");
                layout
            }
        };
        let difference = self.compare_layout(&layout, expected)?;
        self.note(difference);
        Ok((topk_weights, layout))
    }

    /// Compares a layout.
    pub fn compare_layout(&self, layout: &DispatchLayout, expected: &Expected) -> Result<Difference> {
        let difference = compare::layout(&self.stream, layout, &expected.plan.layout)?;
        Ok(difference.or(compare::nodes(&self.stream, layout, expected.internode.as_ref())?))
    }

    /// Compares all that a dispatch with metadata gave.
    pub(super) fn check_dispatch(
        &mut self,
        case: &Case,
        turn: u64,
        expected: &Expected,
        what: &str,
        output: &Received,
    ) -> Result<()> {
        self.check_received(case, turn, &expected.plan.recv_src, what, output)?;
        let metadata = self.compare_metadata(case, expected, output)?;
        self.note(metadata.map(|difference| format!("{what}: {difference}")));
        Ok(())
    }

    /// Compares received rows and scales with those of turn `turn`, of the tokens `sources`, (rank,
    /// token) row after row.
    pub fn check_received(
        &mut self,
        case: &Case,
        turn: u64,
        sources: &[(u32, u32)],
        what: &str,
        output: &Received,
    ) -> Result<()> {
        let rows = output.num_recv_tokens.map_or(self.buffer.capacity(), u64::from);
        let recv_x = &output.recv_x;
        let mut difference = compare::value("recv_x shape", recv_x.shape(), &[rows, case.hidden()][..])
            .or(compare::value("recv_x dtype", recv_x.dtype(), case.dtype));
        if difference.is_none() {
            let got = self.first_rows(recv_x, sources.len() as u64)?;
            let row = |source, token| case.row(turn, source, token);
            let origin = |row, byte| {
                compare::origin(self.device(), recv_x.ptr().add(row * recv_x.row_stride() + byte))
            };
            difference = compare::rows("recv_x", &got, case.row_bytes as usize, sources, row, origin);
        }
        match (&output.recv_x_scales, case.scales) {
            (None, Scales::None | Scales::Any(_)) => {}
            (Some(scales), Scales::Flat | Scales::Columns(_)) => {
                let columns = (case.scales != Scales::Flat).then_some(case.scales.count().into());
                let shape: Vec<u64> = std::iter::once(rows).chain(columns).collect();
                let of_token = |&(source, token): &(u32, u32)| case.scales(turn, source, token);
                let expected: Vec<f32> = sources.iter().flat_map(of_token).collect();
                let got: Vec<f32> = payload::values_of(&self.first_rows(scales, sources.len() as u64)?);
                difference = difference
                    .or_else(|| compare::value("recv_x_scales shape", scales.shape(), &shape[..]))
                    .or_else(|| {
                        let tables = (case.scales.count() as usize, &got[..], &expected[..]);
                        let same = compare::same_bits;
                        compare::first_rows(self.device(), "recv_x_scales", scales, tables, same)
                    });
            }
            (got, _) => {
                let words = |some: bool| if some { "some" } else { "none" };
                let (want, got) = (words(got.is_none()), words(got.is_some()));
                difference = difference.or(Some(format!("recv_x_scales: expected {want}, got {got}")));
            }
        }
        let difference = difference.or(self.compare_columns(case, turn, sources, output)?);
        let rows = output.handle.num_recv_tokens(&self.stream)?;
        let wrong_count = compare::value("num_recv_tokens", rows as usize, sources.len())
            .map(|difference| difference + &compare::origin_of_rows(self.device(), &output.handle));
        // A wrong number of rows makes the rows wrong as well.
        let difference = wrong_count.or(difference);
        self.note(difference.map(|difference| format!("{what}: {difference}")));
        Ok(())
    }

    /// Compares received columns of any types with those of turn `turn`.
    fn compare_columns(
        &self,
        case: &Case,
        turn: u64,
        sources: &[(u32, u32)],
        output: &Received,
    ) -> Result<Difference> {
        let list = case.scales.list();
        let mut difference = compare::value("recv_columns", output.recv_columns.len(), list.len());
        for (index, (tensor, (dtype, elements))) in output.recv_columns.iter().zip(list).enumerate() {
            // One scale that was made is a column of one element.
            let is_flat = elements == 1 && case.quantise == Quantise::None;
            let columns = if is_flat { &[][..] } else { &[u64::from(elements)] };
            let shape = [&[output.recv_x.rows()], columns].concat();
            let expected: Vec<u8> =
                sources.iter().flat_map(|&source| case.column(turn, source, index)).collect();
            let got = self.first_rows(tensor, sources.len() as u64)?;
            let name = format!("recv_columns[{index}]");
            difference = difference
                .or_else(|| compare::value(&name, (tensor.dtype(), tensor.shape()), (dtype, &shape[..])))
                .or_else(|| compare::table(&name, tensor.row_bytes() as usize, &got, &expected));
        }
        Ok(difference)
    }

    /// Compares what travels with the rows, the counts and the handle.
    pub fn compare_metadata(
        &self,
        case: &Case,
        expected: &Expected,
        output: &Received,
    ) -> Result<Difference> {
        let (Some(ids), Some(weights), Some(src_idx)) =
            (&output.recv_topk_idx, &output.recv_topk_weights, &output.recv_src_idx)
        else {
            return Ok(Some("dispatch gave no recv_topk_idx, recv_topk_weights or recv_src_idx".to_owned()));
        };
        let (plan, columns) = (&expected.plan, case.topk());
        let rows = plan.recv_src.len() as u64;
        let weights_of = |&source: &(u32, u32)| case.received_weights(self.rank, source);
        let want_weights: Vec<f32> = plan.recv_src.iter().flat_map(weights_of).collect();
        let want_src: Vec<i32> = plan.recv_src.iter().map(|&(_, token)| token as i32).collect();
        let got_ids: Vec<i64> = payload::values_of(&self.first_rows(ids, rows)?);
        let got_weights: Vec<f32> = payload::values_of(&self.first_rows(weights, rows)?);
        let got_src: Vec<i32> = payload::values_of(&self.first_rows(src_idx, rows)?);
        let (device, want_ids) = (self.device(), plan.recv_topk_idx.concat());
        let of_ids = (columns, &got_ids[..], &want_ids[..]);
        let of_weights = (columns, &got_weights[..], &want_weights[..]);
        let of_src = (1, &got_src[..], &want_src[..]);
        // Empty where the host did not wait; the handle has them on the device.
        let waited = output.num_recv_tokens.is_some();
        let per_expert = if waited { &plan.num_recv_tokens_per_expert[..] } else { &[] };
        Ok(compare::first_rows(device, "recv_topk_idx", ids, of_ids, i64::eq)
            .or_else(|| {
                compare::first_rows(device, "recv_topk_weights", weights, of_weights, compare::same_bits)
            })
            .or_else(|| compare::first_rows(device, "recv_src_idx", src_idx, of_src, i32::eq))
            .or_else(|| {
                let got = &output.num_recv_tokens_per_expert[..];
                let wrong = got.iter().zip(per_expert).position(|(got, want)| got != want).unwrap_or(0);
                let counts = output.handle.num_recv_tokens_per_expert();
                let at = counts.ptr().add((wrong * size_of::<i32>()) as u64);
                compare::value("num_recv_tokens_per_expert_list", got, per_expert)
                    .map(|difference| difference + &compare::origin(device, at))
            })
            .or(self.compare_sources(expected, output)?)
            .or(compare::handle(&self.stream, &output.handle, plan, expected.internode.as_ref())?))
    }

    /// Compares the sources of rows, which only a dispatch across nodes returns.
    fn compare_sources(&self, expected: &Expected, output: &Received) -> Result<Difference> {
        match (&expected.internode, &output.recv_src_meta) {
            (None, None) => Ok(None),
            (Some(plan), Some(meta)) => {
                let rows = plan.recv_src_meta.len() as u64;
                let got: Vec<i32> = payload::values_of(&self.first_rows(meta, rows)?);
                let want = plan.recv_src_meta.concat();
                let tables = (2, &got[..], &want[..]);
                Ok(compare::first_rows(self.device(), "recv_src_meta", meta, tables, i32::eq))
            }
            (plan, meta) => {
                Ok(Some(format!("recv_src_meta: expected {}, got {}", plan.is_some(), meta.is_some())))
            }
        }
    }

    /// Notes what a dispatch into a poisoned pool has written besides rows.
    fn check_untouched(&mut self, plan: &Plan, with_metadata: bool) -> Result<()> {
        let poisoned = |bytes: &[u8]| bytes.iter().all(|&byte| byte == POISON);
        for region in self.regions.clone() {
            let rows = if with_metadata || !region.is_metadata { plan.num_recv_tokens as usize } else { 0 };
            let mut bytes = vec![0; (self.buffer.capacity() * region.stride) as usize];
            // SAFETY: a dispatch that had room for so many rows has written there, in memory that
            // the buffer keeps.
            unsafe { self.stream.read(&mut bytes, region.at)? };
            for (row, bytes) in bytes.chunks(region.stride as usize).enumerate() {
                let used = if row < rows { region.used as usize } else { 0 };
                let what = || format!("{} row {row} is untouched behind its {used} bytes", region.name);
                if !poisoned(&bytes[used..]) {
                    self.failures.push(what());
                }
            }
        }
        Ok(())
    }

    /// Writes what this rank gives back for the rows of `sources`, in BF16, F16 or F32.
    pub fn write_returned(
        &self,
        case: &Case,
        turn: u64,
        sources: &[(u32, u32)],
        rows: &Tensor,
    ) -> Result<()> {
        let columns = rows.columns() as usize;
        let row = |&source: &(u32, u32)| case.returned(turn, self.rank, source, 0..columns);
        let values = sources.iter().flat_map(row);
        match rows.dtype() {
            DType::F32 => rows.write(&self.stream, &values.collect::<Vec<f32>>()),
            DType::F16 => rows.write(&self.stream, &values.map(f16::from_f32).collect::<Vec<_>>()),
            _ => rows.write(&self.stream, &values.map(bf16::from_f32).collect::<Vec<_>>()),
        }
    }

    /// Combines, compares all results, and overwrites their memory, which the next combine is
    /// likely to reuse.
    fn check_combine(
        &mut self,
        case: &Case,
        plan: &Plan,
        handle: &DispatchHandle,
        combine: Combine<'_>,
    ) -> Result<()> {
        let Combine { what, turn, dtype, columns, place, weights } = combine;
        let count = plan.recv_src.len() as u64;
        let (tensor, pool);
        let request = match place {
            Some(place) => {
                self.poison(place.combine_rows(dtype, self.buffer.capacity(), columns)?.tensor())?;
                pool = place.combine_rows(dtype, count, columns)?;
                self.write_returned(case, turn, &plan.recv_src, pool.tensor())?;
                CombineRequest::new(&pool, handle)
            }
            None => {
                tensor = Tensor::alloc(self.device(), dtype, &[count, columns])?;
                self.write_returned(case, turn, &plan.recv_src, &tensor)?;
                CombineRequest::new(&tensor, handle)
            }
        };
        let request = weights.iter().fold(request, |request, (given, _)| request.topk_weights(given));
        let sms = case.num_sms(self.rank, 10 + turn);
        let request = sms.into_iter().fold(request, CombineRequest::num_sms);
        if [1, 4, 5].contains(&turn) {
            return self.check_combine_into(case, request, combine);
        }
        let output = self.combine(request)?;
        // A rank without tokens reads nothing below, and the inputs must outlive the kernels.
        self.outcome()?;
        let sums = self.compare_sums(case, turn, dtype, columns, &output.combined_x)?;
        let summed = compare_weights(self, case, weights.map(|(_, summed)| summed), &output)?;
        self.note(sums.or(summed).map(|difference| format!("{what}: {difference}")));
        self.poison_combined(&output)
    }

    /// Combines into tensors of this rank's, and compares them.
    fn check_combine_into(
        &mut self,
        case: &Case,
        request: CombineRequest<'_>,
        combine: Combine<'_>,
    ) -> Result<()> {
        let Combine { what, turn, dtype, columns, place: _, weights } = combine;
        let tokens = u64::from(case.routing.num_tokens(self.rank));
        let out = Tensor::alloc(self.device(), dtype, &[tokens, columns])?;
        self.poison(&out)?;
        let shape = [tokens, u64::from(case.routing.num_topk)];
        let zeros = vec![0.0f32; (shape[0] * shape[1]) as usize];
        let summed = weights.map(|_| TypedTensor::from_host(&self.stream, &shape, &zeros)).transpose()?;
        self.combine_into(request, &out, summed.as_ref())?;
        self.outcome()?;
        let sums = self.compare_sums(case, turn, dtype, columns, &out)?;
        let of_weights = match (&summed, weights) {
            (Some(got), Some((_, want))) => {
                compare::bits("out_topk_weights", case.topk(), &got.values(&self.stream)?, want)
            }
            _ => None,
        };
        self.note(sums.or(of_weights).map(|difference| format!("{what} into own memory: {difference}")));
        Ok(())
    }

    /// Compares the sums of the rows that all ranks returned in a turn.
    pub fn compare_sums(
        &self,
        case: &Case,
        turn: u64,
        dtype: DType,
        hidden: u64,
        combined: &Tensor,
    ) -> Result<Difference> {
        let tokens = u64::from(case.routing.num_tokens(self.rank));
        let difference = compare::value("combined_x shape", combined.shape(), &[tokens, hidden][..])
            .or(compare::value("combined_x dtype", combined.dtype(), dtype));
        if difference.is_some() {
            return Ok(difference);
        }
        let (size, hidden) = (dtype.size() as usize, hidden as usize);
        let got = self.first_rows(combined, tokens)?;
        for start in (0..hidden).step_by(COLUMNS_AT_A_TIME) {
            let columns = start..hidden.min(start + COLUMNS_AT_A_TIME);
            let returned = |receiver, source| case.returned(turn, receiver, source, columns.clone());
            let per_node = self.buffer.ranks_per_node();
            let sums = case.sums(self.rank, per_node, dtype, columns.len(), returned);
            for (token, (got, want)) in got.chunks_exact(hidden * size).zip(&sums).enumerate() {
                let got = &got[start * size..columns.end * size];
                let Some(at) = got.iter().zip(want).position(|(got, want)| got != want) else { continue };
                let number = |bytes: &[u8]| match dtype {
                    DType::F32 => payload::values_of::<f32>(bytes)[0],
                    DType::F16 => payload::values_of::<f16>(bytes)[0].to_f32(),
                    _ => payload::values_of::<bf16>(bytes)[0].to_f32(),
                };
                let at = at / size * size..at / size * size + size;
                let column = start + at.start / size;
                let (want, got) = (number(&want[at.clone()]), number(&got[at]));
                let place = token as u64 * combined.row_stride() + (column * size) as u64;
                let origin = compare::origin(self.device(), combined.ptr().add(place));
                return Ok(Some(format!(
                    "combined_x, token {token}, column {column}: expected {want}, got {got}{origin}"
                )));
            }
        }
        Ok(None)
    }

    /// Expected weights of a combine that returns the received weights unchanged.
    pub fn round_trip_of_weights(&self, case: &Case) -> Vec<f32> {
        let per_node = self.buffer.ranks_per_node();
        case.summed_weights(self.rank, per_node, |receiver, source| case.received_weights(receiver, source))
    }

    /// Spoils what a combine gave.
    pub(super) fn poison_combined(&self, output: &Combined) -> Result<()> {
        let weights = output.combined_topk_weights.as_deref();
        [Some(&output.combined_x), weights].into_iter().flatten().try_for_each(|tensor| self.poison(tensor))
    }

    /// Memory of a trip that the next one is likely to reuse.
    fn spoilable(&self, layout: &DispatchLayout, handle: &DispatchHandle) -> Result<Vec<Tensor<'static>>> {
        let mut tensors: Vec<Tensor<'static>> = vec![
            layout.is_token_in_rank(),
            layout.num_tokens_per_rank().into(),
            layout.num_tokens_per_expert().into(),
        ];
        tensors.extend(layout.num_tokens_per_rdma_rank().map(Tensor::from));
        let tables = compare::tables(handle);
        // The count is a word of the plan's header.
        let tables = tables.into_iter().filter(|(name, _)| *name != "num_recv_tokens");
        tensors.extend(tables.map(|(_, table)| Tensor::from(table)));
        Ok(tensors)
    }
}

/// Compares combined weights with the expected ones; `None` if none were given.
pub fn compare_weights(
    rank: &Rank,
    case: &Case,
    want: Option<&[f32]>,
    output: &Combined,
) -> Result<Difference> {
    match (&output.combined_topk_weights, want) {
        (None, None) => Ok(None),
        (Some(got), Some(want)) => {
            let got = got.to_host::<f32>(&rank.stream)?;
            Ok(compare::bits("combined_topk_weights", case.topk(), &got, want))
        }
        (got, want) => {
            let words = |some: bool| if some { "some" } else { "none" };
            let (want, got) = (words(want.is_some()), words(got.is_some()));
            Ok(Some(format!("combined_topk_weights: expected {want}, got {got}")))
        }
    }
}

fn request<'a>(
    case: &Case,
    topk_weights: &'a TypedTensor<'a, f32>,
    layout: &'a DispatchLayout<'a>,
    x: &'a Tensor<'a>,
    x_scales: Option<&'a TypedTensor<'a, f32>>,
    columns: &'a [Tensor<'a>],
    counts: Counts,
) -> DispatchRequest<'a> {
    let request = DispatchRequest::new(x, layout).topk_weights(topk_weights);
    let request = request.expert_alignment(case.expert_alignment).counts(counts);
    let request = columns.iter().fold(request.quantise(case.quantise), DispatchRequest::column);
    x_scales.into_iter().fold(request, DispatchRequest::scales)
}

fn cached_request<'a>(
    case: &Case,
    x: &'a Tensor<'a>,
    x_scales: Option<&'a TypedTensor<'a, f32>>,
    columns: &'a [Tensor<'a>],
    handle: &'a DispatchHandle,
) -> CachedDispatchRequest<'a> {
    let request = CachedDispatchRequest::new(x, handle).quantise(case.quantise);
    let request = columns.iter().fold(request, CachedDispatchRequest::column);
    x_scales.into_iter().fold(request, CachedDispatchRequest::scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Setup;
    use crate::roundtrip::case::tests::case;

    /// The checks must be able to fail.
    #[test]
    fn differences_from_the_oracle_are_noted() {
        let case = case();
        // The sums are BF16, twice as long as the rows.
        let setup = Setup::new(2, 2, 6, 96).max_topk(2).max_scales(3);
        let noted = setup.run(|rank| {
            rank.round_trip(&case)?;
            rank.check(rank.failures.is_empty(), "the round trip itself is right");
            let expected = rank.expect(&case);
            let sources = expected.plan.recv_src.clone();
            let (topk_weights, layout) = rank.lay_out(&case, &expected)?;
            let (x, scales) = rank.payload(&case, 0)?;
            let columns = rank.columns(&case, 0)?;
            let request =
                request(&case, &topk_weights, &layout, &x, scales.as_ref(), &columns, Counts::Exact);
            let mut place = rank.place()?;
            let output = rank.dispatch(&mut place, request)?;
            let sound = std::mem::take(&mut rank.failures);

            let mut noted = vec![sound.len()];
            let mut failed = |rank: &mut Rank| noted.push(std::mem::take(&mut rank.failures).len());
            rank.check_received(&case, 1, &sources, "rows of another turn", &output)?;
            failed(rank);
            rank.check_received(&case, 0, &sources[1..], "a row too many", &output)?;
            failed(rank);
            let other = Case { seed: 2, ..case.clone() };
            let metadata = rank.compare_metadata(&other, &expected, &output)?;
            rank.note(metadata);
            failed(rank);
            let rows = output.combine_rows(DType::Bf16, 24)?;
            rank.write_returned(&case, 3, &sources, rows.tensor())?;
            let request = CombineRequest::new(&rows, &output.handle);
            let weights = output.recv_topk_weights.iter();
            let combined = rank.combine(weights.fold(request, CombineRequest::topk_weights))?;
            for turn in [3, 4] {
                let sums = rank.compare_sums(&case, turn, DType::Bf16, 24, &combined.combined_x)?;
                rank.note(sums);
                failed(rank);
            }
            let mut weights = rank.round_trip_of_weights(&case);
            for _ in 0..2 {
                let difference = compare_weights(rank, &case, Some(&weights), &combined)?;
                rank.note(difference);
                failed(rank);
                weights[0] += 1.0;
            }
            Ok(noted)
        });
        assert_eq!(noted, [[0, 1, 1, 1, 0, 1, 0, 1]; 2].map(Vec::from));
    }
}
