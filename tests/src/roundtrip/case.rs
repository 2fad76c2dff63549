//! Inputs of a round trip, and its expected results.

use std::ops::Range;

use epoxide::internal::Tuning;
use epoxide::throughput::Quantise;
use epoxide::{DType, Payload};
use half::bf16;
use rand::{Rng, RngCore};
use rand_chacha::ChaCha8Rng;

use super::Cases;
use crate::harness::{NodeLinks, Setup};
use crate::ids::Ids;
use crate::oracle::{self, Plan, Routing, Style};
use crate::payload::{self, Format, mix, rng_of};
use crate::sizes::Sizes;

/// Inputs of a round trip: the same on every rank, so that each can compute the others' data.
#[derive(Debug, Clone)]
pub struct Case {
    /// The experts that every token of every rank selects.
    pub routing: Routing,
    /// How they are named.
    pub ids: Ids,
    /// The ranks' nodes, for [`Case::setup`]. `None`: all on one node.
    pub nodes: Option<NodeLinks>,
    /// Channels, for [`Case::setup`].
    pub num_channels: u32,
    /// Expert counts are rounded up to multiples of this.
    pub expert_alignment: u32,
    /// Type of the dispatched rows.
    pub dtype: DType,
    /// Bytes of a dispatched row.
    pub row_bytes: u32,
    /// Scales of a row.
    pub scales: Scales,
    /// The conversion of bf16 rows to these, if a dispatch quantises them.
    pub quantise: Quantise,
    /// The weight of every entry, in place of random ones.
    pub weight: Option<f32>,
    /// Launch shapes, for [`Case::setup`].
    pub tuning: Tuning,
    /// The seed of the contents.
    pub seed: u64,
    /// Draws the order of the warps of each kernel; without it they take turns. For
    /// [`Case::setup`].
    pub schedule_seed: Option<u64>,
    /// Draws the multiprocessors of each call, within one node. Without, they are the buffer's.
    pub sms_seed: Option<u64>,
}

/// Scales per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// There are none.
    None,
    /// One, as a tensor `[num_tokens]`.
    Flat,
    /// As a tensor `[num_tokens, n]`.
    Columns(u32),
    /// Up to four columns of any types, and the elements of each; 0 where there is none. Those of
    /// one element are a tensor `[num_tokens]`, others `[num_tokens, n]`.
    Any([(DType, u32); 4]),
}

impl Scales {
    /// As many columns, if any.
    pub fn columns(count: u64) -> Scales {
        if count == 0 { Scales::None } else { Scales::Columns(count as u32) }
    }

    /// Columns of these types and elements, at most four.
    ///
    /// # Panics
    /// Where there are more.
    pub fn any(columns: &[(DType, u32)]) -> Scales {
        let mut any = [(DType::U8, 0); 4];
        any[..columns.len()].copy_from_slice(columns);
        Scales::Any(any)
    }

    /// Those that travel with the rows of a payload.
    pub fn of(payload: &Payload) -> Scales {
        let columns = payload.columns().iter().map(|&(dtype, elements)| (dtype, elements as u32));
        match columns.collect::<Vec<_>>()[..] {
            [] => Scales::None,
            [(DType::F32, scales)] => Scales::Columns(scales),
            ref columns => Scales::any(columns),
        }
    }

    /// Scales of f32 of a token, beside columns of any types.
    pub(super) fn count(self) -> u32 {
        match self {
            Scales::None | Scales::Any(_) => 0,
            Scales::Flat => 1,
            Scales::Columns(columns) => columns,
        }
    }

    /// Columns of any types.
    pub fn list(self) -> Vec<(DType, u32)> {
        match self {
            Scales::Any(columns) => columns.into_iter().filter(|&(_, elements)| elements > 0).collect(),
            _ => Vec::new(),
        }
    }

    /// Room for them in a buffer: whole words, and of several columns together multiples of four
    /// words.
    fn words(self) -> u32 {
        let of_column = |&(dtype, elements): &(DType, u32)| (elements * dtype.size() as u32).div_ceil(4);
        let words: Vec<u32> = self.list().iter().map(of_column).collect();
        let sum = words.iter().sum::<u32>();
        self.count() + if words.len() > 1 { sum.next_multiple_of(4) } else { sum }
    }
}

impl Case {
    /// BF16 rows, two channels, alignment 1, all ranks on one node.
    pub fn new(routing: Routing, row_bytes: u32) -> Case {
        Case {
            routing,
            ids: Ids::Wide,
            nodes: None,
            num_channels: 2,
            expert_alignment: 1,
            dtype: DType::Bf16,
            row_bytes,
            scales: Scales::None,
            quantise: Quantise::None,
            weight: None,
            tuning: Tuning::default(),
            seed: 1,
            schedule_seed: None,
            sms_seed: None,
        }
    }

    /// Rows of `hidden` elements along a routing, of a run's dtype.
    pub fn along(cases: &Cases, routing: Routing, hidden: u64) -> Case {
        let quantise = cases.sizes.quantise;
        Case { quantise, ..Case::of_payload(routing, &cases.sizes.format.payload(hidden)) }
    }

    /// Rows of a payload along a routing.
    fn of_payload(routing: Routing, payload: &Payload) -> Case {
        let (dtype, row_bytes) = (payload.row().0, payload.row_bytes() as u32);
        Case { dtype, scales: Scales::of(payload), ..Case::new(routing, row_bytes) }
    }

    /// Rows of bf16 of `hidden` elements that are quantised on their way.
    pub fn quantised(routing: Routing, hidden: u64, quantise: Quantise) -> Case {
        let format = if quantise == Quantise::Mxfp8 { Format::Mxfp8 } else { Format::Fp8 };
        Case { quantise, ..Case::of_payload(routing, &format.payload(hidden)) }
    }

    /// Case `number` of a run, of the full size and a style.
    pub(super) fn full_size(cases: &Cases, number: u64, style: Style) -> Case {
        let mut rng = cases.rng(number);
        let routing = cases.routing(&mut rng, style);
        Case::along(cases, routing, cases.sizes.hidden).draw(&mut rng)
    }

    /// Case `number` of a run, of random sizes; some ranks have no tokens.
    pub(super) fn random(cases: &Cases, number: u64) -> Case {
        let mut rng = cases.rng(number);
        let Sizes { ranks, tokens, hidden, experts, topk, .. } = cases.sizes;
        let most = match rng.random_range(0..4) {
            0 => tokens.min(3),
            _ => tokens,
        };
        let mut tokens: Vec<u32> = (0..ranks).map(|_| rng.random_range(0..=most)).collect();
        if rng.random_bool(0.3) {
            let idle = rng.random_range(0..tokens.len());
            tokens[idle] = 0;
        }
        let style = Style::ALL[rng.random_range(0..Style::ALL.len())];
        let experts = ranks * rng.random_range(1..=experts / ranks);
        let topk = rng.random_range(1..=topk);
        let unit = cases.sizes.unit();
        let hidden = unit * rng.random_range(1..=hidden / unit);
        let routing = Routing::random(&mut rng, &tokens, topk, experts, style);
        Case::along(cases, routing, hidden).draw(&mut rng)
    }

    fn draw(self, rng: &mut ChaCha8Rng) -> Case {
        let expert_alignment = [1, 1, 4, 16][rng.random_range(0..4)];
        Case { expert_alignment, seed: rng.random(), ..self }
    }

    /// Buffers that hold just this case; one token where it has none at all.
    pub fn setup(&self) -> Setup {
        let routing = &self.routing;
        let tokens = routing.max_tokens().max(1);
        Setup::new(routing.num_ranks(), self.num_channels, tokens, self.row_bytes.into())
            .max_topk(routing.num_topk)
            .max_scales(self.scales.words())
            .tuning(self.tuning)
            .nodes(self.nodes)
            .schedule_seed(self.schedule_seed)
    }

    /// Runs the case on threads, with all options.
    ///
    /// # Panics
    /// A result differs from the oracle.
    pub fn check(&self) {
        self.setup().run(|rank| rank.check_everything(self));
    }

    /// The oracle's plan of every rank.
    pub fn plans(&self) -> Vec<Plan> {
        let plan = |rank| oracle::plan(&self.routing, rank, self.num_channels, self.expert_alignment);
        (0..self.routing.num_ranks()).map(plan).collect()
    }

    /// Multiprocessors of call `turn` of a rank, if not the buffer's.
    pub(super) fn num_sms(&self, rank: u32, turn: u64) -> Option<u32> {
        let mut rng = rng_of(&[self.sms_seed?, u64::from(rank), turn]);
        rng.random_bool(0.8).then(|| 2 * rng.random_range(1..=16))
    }

    /// Elements of a dispatched row.
    pub fn hidden(&self) -> u64 {
        u64::from(self.row_bytes) / self.dtype.size()
    }

    pub(super) fn topk(&self) -> usize {
        self.routing.num_topk as usize
    }

    /// The bytes of a row in transit. Another `turn` has other contents.
    pub fn row(&self, turn: u64, rank: u32, token: u32) -> Vec<u8> {
        match self.quantise {
            Quantise::None => self.bytes(turn, rank, token),
            _ => self.converted(turn, rank, token).0,
        }
    }

    /// Type and bytes of a row as it is given.
    pub fn given(&self, turn: u64, rank: u32, token: u32) -> (DType, Vec<u8>) {
        match self.quantise {
            Quantise::None => (self.dtype, self.bytes(turn, rank, token)),
            _ => (DType::Bf16, payload::bytes_of(&self.numbers(turn, rank, token))),
        }
    }

    /// A row that is quantised on its way: blocks of all kinds that the conversion distinguishes.
    fn numbers(&self, turn: u64, rank: u32, token: u32) -> Vec<bf16> {
        let mut rng = rng_of(&[self.seed, turn, u64::from(rank), u64::from(token)]);
        let blocks = self.hidden().div_ceil(oracle::MX_BLOCK as u64) as u32;
        let kind = turn as u32 * 5 + rank * 3 + token;
        (0..blocks).flat_map(|at| payload::block_of_bf16(&mut rng, kind + at)).collect()
    }

    /// Elements of such a row, and the bytes of its scales.
    fn converted(&self, turn: u64, rank: u32, token: u32) -> (Vec<u8>, Vec<u8>) {
        let row: Vec<f32> = self.numbers(turn, rank, token).iter().map(|number| number.to_f32()).collect();
        if self.quantise == Quantise::Mxfp8 {
            return oracle::mxfp8(&row);
        }
        let (elements, scales) = oracle::quantised(&row, self.quantise == Quantise::Fp8PowerOfTwo);
        (elements, payload::bytes_of(&scales))
    }

    /// Random bytes that begin with rank and token, so that no two rows are equal.
    fn bytes(&self, turn: u64, rank: u32, token: u32) -> Vec<u8> {
        let mut row = vec![0; self.row_bytes as usize];
        rng_of(&[self.seed, turn, u64::from(rank), u64::from(token)]).fill_bytes(&mut row);
        row[..4].copy_from_slice(&rank.to_le_bytes());
        row[4..8].copy_from_slice(&token.to_le_bytes());
        row
    }

    /// The scales of a token.
    pub fn scales(&self, turn: u64, rank: u32, token: u32) -> Vec<f32> {
        match self.quantise {
            Quantise::None => {}
            Quantise::Mxfp8 => return Vec::new(),
            _ => return payload::values_of(&self.converted(turn, rank, token).1),
        }
        let mut rng = rng_of(&[!self.seed, turn, u64::from(rank), u64::from(token)]);
        payload::rough_f32(&mut rng, self.scales.count() as usize)
    }

    /// Column `index` of a token, of columns of any types.
    pub fn column(&self, turn: u64, (rank, token): (u32, u32), index: usize) -> Vec<u8> {
        if self.quantise != Quantise::None {
            return self.converted(turn, rank, token).1;
        }
        let (dtype, elements) = self.scales.list()[index];
        let mut bytes = vec![0; elements as usize * dtype.size() as usize];
        let what = [!self.seed, turn, u64::from(rank), u64::from(token), index as u64];
        rng_of(&what).fill_bytes(&mut bytes);
        bytes
    }

    /// Bytes of a token's scales.
    pub fn scale_bytes(&self) -> u64 {
        u64::from(self.scales.count()) * 4
    }

    /// The weights of a rank's tokens.
    pub fn weights(&self, rank: u32) -> Vec<Vec<f32>> {
        (0..self.routing.num_tokens(rank)).map(|token| self.token_weights(rank, token)).collect()
    }

    /// The weights of a token.
    pub fn token_weights(&self, rank: u32, token: u32) -> Vec<f32> {
        if let Some(weight) = self.weight {
            return vec![weight; self.topk()];
        }
        let mut rng = rng_of(&[!self.seed, u64::MAX, u64::from(rank), u64::from(token)]);
        payload::rough_f32(&mut rng, self.topk())
    }

    /// Columns of what `receiver` gives back for a token of a rank: numbers whose sum shows in
    /// which order and precision it was made.
    pub fn returned(
        &self,
        turn: u64,
        receiver: u32,
        (rank, token): (u32, u32),
        columns: Range<usize>,
    ) -> Vec<f32> {
        let base = mix(&[self.seed, turn, u64::from(receiver), u64::from(rank), u64::from(token)]);
        columns.map(|column| rough(mix(&[base, column as u64]))).collect()
    }

    /// Weights to return with a row, which differ from the received ones, so that no other source
    /// has them.
    pub(super) fn given_weights(&self, receiver: u32, (rank, token): (u32, u32)) -> Vec<f32> {
        let mut rng = rng_of(&[!self.seed, u64::from(receiver), u64::from(rank), u64::from(token)]);
        payload::rough_f32(&mut rng, self.topk())
    }

    /// The routing with the tokens of one rank alone, which determine its sums, and the tokens that
    /// each receiver gets.
    pub(super) fn tokens_of(&self, rank: u32) -> (Routing, Vec<Vec<(u32, u32)>>) {
        let mut own = Routing { topk_idx: vec![Vec::new(); self.routing.topk_idx.len()], ..self.routing };
        own.topk_idx[rank as usize].clone_from(&self.routing.topk_idx[rank as usize]);
        let received = (0..own.num_ranks()).map(|receiver| oracle::recv_order(&own, receiver)).collect();
        (own, received)
    }

    /// Sums that combine gives `rank` for all of its tokens, as bytes of `dtype`.
    /// `returned(receiver, (rank, token))` gives a row of `columns` numbers.
    pub(super) fn sums(
        &self,
        rank: u32,
        ranks_per_node: u32,
        dtype: DType,
        columns: usize,
        returned: impl Fn(u32, (u32, u32)) -> Vec<f32>,
    ) -> Vec<Vec<u8>> {
        let (own, received) = self.tokens_of(rank);
        let give = |(receiver, sources): (u32, &Vec<(u32, u32)>)| -> Vec<Vec<f32>> {
            sources.iter().map(|&source| returned(receiver, source)).collect()
        };
        let exact: Vec<Vec<Vec<f32>>> = (0..).zip(&received).map(give).collect();
        let given: Vec<Vec<Vec<f32>>> = exact
            .into_iter()
            .map(|rows| {
                rows.iter().map(|row| row.iter().map(|&it| payload::rounded(dtype, it)).collect()).collect()
            })
            .collect();
        let sums = match ranks_per_node < own.num_ranks() {
            true => oracle::InternodeOracle::new(&own, ranks_per_node).combine_rounded(
                rank,
                &given,
                columns,
                |sum| payload::rounded(dtype, sum),
            ),
            false => oracle::combine_f32(&own, rank, &given, columns),
        };
        sums.iter().map(|row| payload::rounded_bytes(dtype, row)).collect()
    }

    /// The weights that combine gives `rank`, where `returned(receiver, (rank, token))` are those
    /// given back with a row.
    pub(super) fn summed_weights(
        &self,
        rank: u32,
        ranks_per_node: u32,
        returned: impl Fn(u32, (u32, u32)) -> Vec<f32>,
    ) -> Vec<f32> {
        let (own, received) = self.tokens_of(rank);
        let give = |(receiver, sources): (u32, &Vec<(u32, u32)>)| -> Vec<Vec<f32>> {
            sources.iter().map(|&source| returned(receiver, source)).collect()
        };
        let all: Vec<Vec<Vec<f32>>> = (0..).zip(&received).map(give).collect();
        let sums = match ranks_per_node < own.num_ranks() {
            true => oracle::InternodeOracle::new(&own, ranks_per_node).combined_weights(rank, &all),
            false => oracle::combined_weights(&own, rank, &all),
        };
        sums.concat()
    }

    /// The weights of a token at a receiver: 0 if the expert is another rank's.
    pub(super) fn received_weights(&self, receiver: u32, (rank, token): (u32, u32)) -> Vec<f32> {
        let ids = &self.routing.topk_idx[rank as usize][token as usize];
        let here = |expert| self.routing.owner(expert) == Some(receiver);
        self.token_weights(rank, token)
            .into_iter()
            .zip(ids)
            .map(|(weight, &id)| if here(id) { weight } else { 0.0 })
            .collect()
    }
}

/// A number of mixed sign and magnitude, 2^-8 to 2^8, out of random bits.
pub(super) fn rough(bits: u64) -> f32 {
    let (sign, exponent) = ((bits >> 63) as u32, 119 + (bits >> 32 & 15) as u32);
    f32::from_bits(sign << 31 | exponent << 23 | bits as u32 & 0x7f_ffff)
}

/// The inputs of one combine on all ranks, and its results.
pub struct Return {
    /// Type of the rows.
    pub dtype: DType,
    /// `[receiver][row]`.
    pub rows: Vec<Vec<Vec<u8>>>,
    /// `[rank][token]`.
    pub sums: Vec<Vec<Vec<u8>>>,
}

impl Return {
    /// Rows whose sum shows in which order and precision it was made.
    pub fn random(case: &Case, plans: &[Plan], turn: u64, dtype: DType) -> Return {
        let columns = (u64::from(case.row_bytes) / dtype.size()) as usize;
        let ranks = case.routing.num_ranks();
        let per_node = case.nodes.map_or(ranks, |nodes| nodes.ranks_per_node);
        let row = |receiver, source| case.returned(turn, receiver, source, 0..columns);
        let rows = |(receiver, plan): (u32, &Plan)| {
            plan.recv_src
                .iter()
                .map(|&source| payload::rounded_bytes(dtype, &row(receiver, source)))
                .collect()
        };
        Return {
            dtype,
            rows: (0..).zip(plans).map(rows).collect(),
            sums: (0..ranks).map(|rank| case.sums(rank, per_node, dtype, columns, row)).collect(),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::oracle::Style;

    /// Two ranks, some tokens of which go to both.
    pub(in crate::roundtrip) fn case() -> Case {
        let routing = Routing::random(&mut rng_of(&[5]), &[6, 4], 2, 4, Style::WithHoles);
        Case { dtype: DType::Fp8E4m3, scales: Scales::Columns(3), ..Case::new(routing, 48) }
    }

    #[test]
    fn every_turn_is_another_content() {
        let case = case();
        assert_ne!(case.row(0, 1, 2), case.row(1, 1, 2));
        assert_eq!(case.row(0, 1, 2)[..8], [1, 0, 0, 0, 2, 0, 0, 0]);
        assert_ne!(case.scales(0, 1, 2), case.scales(1, 1, 2));
        assert_eq!(case.returned(0, 1, (0, 3), 2..5), case.returned(0, 1, (0, 3), 0..9)[2..5]);
        assert_ne!(case.returned(0, 1, (0, 3), 0..9), case.returned(0, 0, (0, 3), 0..9));
    }

    #[test]
    fn numbers_have_mixed_signs_and_magnitudes() {
        let numbers: Vec<f32> = (0..4096).map(|at| rough(mix(&[at]))).collect();
        assert!(numbers.iter().all(|number| (2.0f32.powi(-8)..256.0).contains(&number.abs())));
        assert!(
            numbers.iter().any(|number| *number < -128.0) && numbers.iter().any(|number| *number > 128.0)
        );
        assert!(numbers.iter().any(|number| number.abs() < 0.01));
    }
}
