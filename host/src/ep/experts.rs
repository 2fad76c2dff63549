//! Expert ids, and which rank has which expert.

use std::fmt;

use epoxide_gpu::layout::{DevicePtr, ExpertTable, MAX_LOCAL_EXPERTS, MAX_WORLD};

use super::{Element, Tensor, TypedTensor};
use crate::driver::Stream;
use crate::error::{Error, Result};

/// Types of expert ids that kernels read as they are: `i64` and `i32`.
pub trait ExpertId: Element + private::Sealed {}

impl ExpertId for i64 {}
impl ExpertId for i32 {}

mod private {
    pub trait Sealed {}
    impl Sealed for i64 {}
    impl Sealed for i32 {}
}

/// Whether ids are i32, as the kernels take it.
pub fn is_narrow(ids: &Tensor<'_>) -> u32 {
    (ids.dtype() == super::DType::I32).into()
}

/// The places of each local expert's rows, on the device, if rows arrived by expert.
///
/// | of local expert e | |
/// |---|---|
/// | its rows are | `starts[e]` to `starts[e] + counts[e] - 1` |
/// | behind them | padding to `starts[e + 1] - 1`, whose `recv_src_idx` is -1 |
/// | `psum[e]` | `starts[e] + counts[e]`, as grouped GEMMs take it |
#[derive(Debug, Clone)]
pub struct ExpertRows<'p> {
    counts: TypedTensor<'p, i32>,
    starts: TypedTensor<'p, i32>,
    psum: TypedTensor<'p, i32>,
}

impl<'p> ExpertRows<'p> {
    /// Makes them of tables of counts, starts and sums; `tensor` makes one by name, address and
    /// shape.
    pub(super) fn new(
        [counts, starts, psum]: [DevicePtr; 3],
        local_experts: u32,
        tensor: impl Fn(&'static str, DevicePtr, &[u64]) -> TypedTensor<'p, i32>,
    ) -> Self {
        let experts = u64::from(local_experts);
        ExpertRows {
            counts: tensor("expert_counts", counts, &[experts]),
            starts: tensor("expert_starts", starts, &[experts + 1]),
            psum: tensor("psum_expert", psum, &[experts + 1]),
        }
    }

    /// i32 `[local_experts]`: rows of each expert, without padding.
    pub fn counts(&self) -> TypedTensor<'p, i32> {
        self.counts.clone()
    }

    /// i32 `[local_experts + 1]`: the first row of each expert's segment, a multiple of the
    /// alignment; then the rows of all segments.
    pub fn starts(&self) -> TypedTensor<'p, i32> {
        self.starts.clone()
    }

    /// i32 `[local_experts + 1]`: the start of each expert's segment and its rows together; then
    /// the rows of all segments.
    pub fn psum(&self) -> TypedTensor<'p, i32> {
        self.psum.clone()
    }

    pub(super) fn into_static(self) -> ExpertRows<'static> {
        ExpertRows {
            counts: self.counts.into_static(),
            starts: self.starts.into_static(),
            psum: self.psum.into_static(),
        }
    }
}

/// Most rows by expert of so many tokens of each rank: one for each entry, and the padding of each
/// expert that has rows.
pub fn most_rows_by_expert(
    num_ranks: u32,
    max_tokens: u32,
    num_topk: u32,
    local_experts: u32,
    alignment: u32,
) -> u64 {
    // An entry is a row, whether or not entries of a token are of different experts.
    let rows = (u64::from(max_tokens) * u64::from(num_ranks)).saturating_mul(num_topk.into());
    let padded = u64::from(local_experts).min(rows);
    rows.saturating_add(padded * u64::from(alignment.saturating_sub(1)))
}

/// An error unless segments can have this alignment.
pub fn check_alignment(alignment: u32) -> Result<()> {
    if alignment.is_power_of_two() {
        return Ok(());
    }
    Err(Error::argument("alignment", alignment, "segments begin at multiples of a power of two"))
}

/// Most choices of an [`ExpertMap`] for each expert.
const MAX_CHOICES: u32 = 1024;
/// Most choices by default: an even turn through up to this many replicas.
const DEFAULT_CHOICES: u32 = 64;

/// A replica of an expert.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Replica {
    rank: u32,
    local: u32,
    weight: f32,
}

/// The experts of each rank, on the host. A rank may have any number of experts, also none, and an
/// expert may be on several ranks. An [`ExpertMap`] is its form on the device.
///
/// *Logical* experts are those of the model, which ids name. *Physical* experts are their replicas:
/// local expert `l` of rank `r` is the physical expert `r * local_experts + l`. `local_experts` is
/// the same on all ranks, so that a rank with fewer has some without tokens behind its own.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    num_ranks: u32,
    local_experts: u32,
    choices: Option<u32>,
    /// The replicas of each logical expert.
    replicas: Vec<Vec<Replica>>,
}

impl Placement {
    /// Places `num_experts` experts: `ranks[r]` lists those of rank r, in the order of its local
    /// experts. An expert that several places list has as many replicas, which tokens take in turn.
    ///
    /// ```
    /// # use epoxide::Placement;
    /// // Four experts on three ranks; expert 3 has a replica on ranks 0 and 1, and rank 2 has none.
    /// let placement = Placement::new(4, &[vec![0, 3], vec![3, 1, 2], vec![]])?;
    /// assert_eq!((placement.num_ranks(), placement.local_experts()), (3, 3));
    /// # Ok::<(), epoxide::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`] where there is no rank or too many, or a rank has more than 1024
    /// experts. Also where an expert is out of range or has no place.
    pub fn new<L: AsRef<[u32]>>(num_experts: u32, ranks: &[L]) -> Result<Placement> {
        check_num_ranks(ranks.len())?;
        let most = ranks.iter().map(|experts| experts.as_ref().len()).max().unwrap_or(0);
        if most > MAX_LOCAL_EXPERTS as usize {
            let rule = format!("a rank has at most {MAX_LOCAL_EXPERTS} experts: spread them over more ranks");
            return Err(Error::argument("ranks", format!("{most} experts on a rank"), rule));
        }
        check_num_experts(num_experts)?;
        let mut replicas = vec![Vec::new(); num_experts as usize];
        for (rank, experts) in (0..).zip(ranks) {
            for (local, &expert) in (0..).zip(experts.as_ref()) {
                let Some(of_expert) = replicas.get_mut(expert as usize) else {
                    let value = format!("expert {expert} as local expert {local} of rank {rank}");
                    let rule = format!("must be 0 to num_experts - 1 = {}", num_experts - 1);
                    return Err(Error::argument("ranks", value, rule));
                };
                of_expert.push(Replica { rank, local, weight: 1.0 });
            }
        }
        if let Some(expert) = replicas.iter().position(Vec::is_empty) {
            let rule = "every expert needs a place: list it for a rank";
            return Err(Error::argument("ranks", format!("no place of expert {expert}"), rule));
        }
        let local_experts = (most as u32).max(1);
        Ok(Placement { num_ranks: ranks.len() as u32, local_experts, choices: None, replicas })
    }

    /// Experts in order, split as evenly as possible: 10 experts on 4 ranks are 3, 3, 2, 2.
    ///
    /// # Errors
    /// As [`Placement::new`].
    pub fn even(num_experts: u32, num_ranks: u32) -> Result<Placement> {
        check_num_ranks(num_ranks as usize)?;
        check_num_experts(num_experts)?;
        let (each, more) = (num_experts / num_ranks, num_experts % num_ranks);
        let first = |rank: u32| rank * each + rank.min(more);
        let list = |rank| (first(rank)..first(rank + 1)).collect();
        Placement::new(num_experts, &(0..num_ranks).map(list).collect::<Vec<Vec<u32>>>())
    }

    /// Shares the tokens of an expert by weight: `weights[r][l]` is that of local expert l of rank
    /// r, 0 or more.
    ///
    /// # Errors
    /// [`Error::Argument`] where there is not a weight for each place, one is negative or no
    /// number, or all of an expert's are 0.
    pub fn weighted<L: AsRef<[f32]>>(mut self, weights: &[L]) -> Result<Placement> {
        // Places that `nearest` has left out count if later places of the rank remain.
        let mut counts = vec![0; self.num_ranks as usize];
        for replica in self.replicas.iter().flatten() {
            let count = &mut counts[replica.rank as usize];
            *count = (replica.local as usize + 1).max(*count);
        }
        let given: Vec<usize> = weights.iter().map(|of_rank| of_rank.as_ref().len()).collect();
        if given != counts {
            let rule = format!("one weight for each place: {counts:?}");
            return Err(Error::argument("weights", format!("lists of {given:?}"), rule));
        }
        for (expert, replicas) in self.replicas.iter_mut().enumerate() {
            for replica in &mut *replicas {
                let weight = weights[replica.rank as usize].as_ref()[replica.local as usize];
                if !weight.is_finite() || weight < 0.0 {
                    let value =
                        format!("{weight} of local expert {} of rank {}", replica.local, replica.rank);
                    return Err(Error::argument("weights", value, "must be a number, 0 or more"));
                }
                replica.weight = weight;
            }
            if replicas.iter().all(|replica| replica.weight == 0.0) {
                let rule = "an expert needs a place with a weight above 0";
                return Err(Error::argument("weights", format!("0 for all of expert {expert}"), rule));
            }
        }
        Ok(self)
    }

    /// Keeps each expert's replicas nearest to `rank`: its own, else those of its node, else all.
    /// Each rank then has its own placement, for its own tokens.
    ///
    /// # Errors
    /// [`Error::Argument`] where there is no such rank, or nodes of `ranks_per_node` do not make up
    /// the ranks.
    pub fn nearest(mut self, rank: u32, ranks_per_node: u32) -> Result<Placement> {
        if rank >= self.num_ranks {
            let rule = format!("must be 0 to {}", self.num_ranks - 1);
            return Err(Error::argument("rank", rank, rule));
        }
        if ranks_per_node == 0 || !self.num_ranks.is_multiple_of(ranks_per_node) {
            let rule = format!("must divide the number of ranks, {}", self.num_ranks);
            return Err(Error::argument("ranks_per_node", ranks_per_node, rule));
        }
        let node = rank / ranks_per_node;
        for replicas in &mut self.replicas {
            let keep = |replicas: &mut Vec<Replica>, is_near: &dyn Fn(&Replica) -> bool| {
                // A replica with weight 0 takes no tokens.
                let found = replicas.iter().any(|replica| is_near(replica) && replica.weight > 0.0);
                if found {
                    replicas.retain(is_near);
                }
                found
            };
            if !keep(replicas, &|replica| replica.rank == rank) {
                keep(replicas, &|replica| replica.rank / ranks_per_node == node);
            }
        }
        Ok(self)
    }

    /// Room for so many experts on each rank, for later placements of the same [`ExpertMap`] that
    /// have more on some rank.
    ///
    /// # Errors
    /// [`Error::Argument`] where a rank has more experts than that, or it is more than 1024.
    pub fn with_local_experts(mut self, local_experts: u32) -> Result<Placement> {
        let used = self.replicas.iter().flatten().map(|replica| replica.local + 1).max().unwrap_or(1);
        if local_experts < used || local_experts > MAX_LOCAL_EXPERTS {
            let rule = format!("must be {used} to {MAX_LOCAL_EXPERTS}: a rank has {used} experts");
            return Err(Error::argument("local_experts", local_experts, rule));
        }
        self.local_experts = local_experts;
        Ok(self)
    }

    /// The length of the turn through the replicas of an expert. Token t of rank r takes choice
    /// `(t + r) % choices`. Without, as many as an even turn takes, at most 64; 64 where an expert's
    /// weights differ; more where an expert has more replicas.
    ///
    /// # Errors
    /// [`Error::Argument`] where it is 0 or more than 1024.
    pub fn with_choices(mut self, choices: u32) -> Result<Placement> {
        if choices == 0 || choices > MAX_CHOICES {
            return Err(Error::argument("choices", choices, format!("must be 1 to {MAX_CHOICES}")));
        }
        self.choices = Some(choices);
        Ok(self)
    }

    /// Logical experts.
    pub fn num_experts(&self) -> u32 {
        self.replicas.len() as u32
    }

    /// Ranks.
    pub fn num_ranks(&self) -> u32 {
        self.num_ranks
    }

    /// Local experts of each rank: as many as the rank with most has, or
    /// [`Placement::with_local_experts`].
    pub fn local_experts(&self) -> u32 {
        self.local_experts
    }

    /// Choices for each expert.
    pub fn choices(&self) -> u32 {
        self.choices.unwrap_or_else(|| {
            let most = self.most_replicas().1.min(MAX_CHOICES as usize) as u32;
            self.even_turn().unwrap_or(DEFAULT_CHOICES).max(most)
        })
    }

    /// The shortest turn that takes all replicas of each expert equally often; `None` where it is
    /// longer than the default, or an expert's weights differ.
    fn even_turn(&self) -> Option<u32> {
        let mut all = 1;
        for replicas in &self.replicas {
            if replicas.iter().any(|replica| replica.weight != replicas[0].weight) {
                return None;
            }
            let count = replicas.len() as u64;
            all = all / gcd(all, count) * count;
            if all > u64::from(DEFAULT_CHOICES) {
                return None;
            }
        }
        Some(all as u32)
    }

    /// The expert with most replicas that take tokens, and their number.
    fn most_replicas(&self) -> (usize, usize) {
        let count = |replicas: &Vec<Replica>| replicas.iter().filter(|replica| replica.weight > 0.0).count();
        let counts = self.replicas.iter().map(count).enumerate();
        counts.max_by_key(|&(_, count)| count).unwrap_or_default()
    }

    /// An error where so many choices leave out replicas of an expert.
    fn check_choices(&self, choices: u32) -> Result<()> {
        let (expert, most) = self.most_replicas();
        if most <= choices as usize {
            return Ok(());
        }
        let value = format!("{most} replicas of expert {expert}");
        let rule = format!(
            "the map has {choices} choices for each expert, and a replica needs one: make the map of a placement with_choices({most})"
        );
        Err(Error::argument("placement", value, rule))
    }

    /// The entries of a table of so many choices for each expert, with so many local experts on
    /// each rank.
    fn entries(&self, choices: u32, local_experts: u32) -> Vec<i32> {
        let of_expert = |replicas: &Vec<Replica>| {
            let total: f64 = replicas.iter().map(|replica| f64::from(replica.weight)).sum();
            let mut credits = vec![0.0f64; replicas.len()];
            let mut turn = Vec::with_capacity(choices as usize);
            for _ in 0..choices {
                credits
                    .iter_mut()
                    .zip(replicas)
                    .for_each(|(credit, replica)| *credit += f64::from(replica.weight));
                // The first of those to which most is owed.
                let mut next = 0;
                for (at, &credit) in credits.iter().enumerate() {
                    if credit > credits[next] {
                        next = at;
                    }
                }
                credits[next] -= total;
                turn.push((replicas[next].rank * local_experts + replicas[next].local) as i32);
            }
            turn
        };
        self.replicas.iter().flat_map(of_expert).collect()
    }
}

fn check_num_ranks(num_ranks: usize) -> Result<()> {
    if (1..=MAX_WORLD).contains(&num_ranks) {
        return Ok(());
    }
    Err(Error::argument("ranks", num_ranks, format!("must be 1 to {MAX_WORLD}, with a list for each")))
}

fn check_num_experts(num_experts: u32) -> Result<()> {
    let most = MAX_WORLD as u32 * MAX_LOCAL_EXPERTS;
    if (1..=most).contains(&num_experts) {
        return Ok(());
    }
    Err(Error::argument("num_experts", num_experts, format!("must be 1 to {most}")))
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A [`Placement`] on the device, by which dispatches translate ids. It can change between calls,
/// and between replays of a graph whose calls use it; buffers stay as they are.
///
/// ```
/// # use std::time::Duration;
/// # use epoxide::driver::Stream;
/// # use epoxide::driver::virt::{VirtConfig, VirtualGpu};
/// # use epoxide::throughput::*;
/// # use epoxide::{DType, ExpertMap, Placement, StreamOrder, Tensor, TypedTensor};
/// # use epoxide::group::run_threads;
/// # use epoxide::half::bf16;
/// let received = run_threads(2, Duration::from_secs(60), |rank, group| {
///     # let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
///     # let stream = Stream::new(&device)?;
///     # let order = StreamOrder::on(&stream);
///     # let shape = Shape { max_tokens: 2, hidden: 64, dtype: DType::Bf16, max_topk: 1, max_scales: 0 };
///     # let mut buffer = Buffer::new(device, &*group, Options::new(shape))?;
///     # let mut place = buffer.place(0)?;
///     // Three experts, of which rank 0 has two and rank 1 one.
///     let map = ExpertMap::new(&stream, &Placement::even(3, 2)?)?;
///     let x = Tensor::from_host(&stream, DType::Bf16, &[2, 64], &[bf16::ONE; 128])?;
///     let topk_idx = TypedTensor::from_host(&stream, &[2, 1], &[1i32, 2])?;
///     let mut counts = Vec::new();
///     for placement in [Placement::even(3, 2)?, Placement::new(3, &[vec![0], vec![2, 1]])?] {
///         map.set(&stream, &placement)?;
///         let layout = buffer.get_placed_dispatch_layout(&topk_idx, &map, order)?;
///         let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &layout), order)?;
///         counts.push(received.num_recv_tokens_per_expert.clone());
///     }
///     Ok(counts)
/// })?;
/// assert_eq!(received, [[[0, 2], [0, 0]], [[2, 0], [2, 2]]]);
/// # Ok::<(), epoxide::group::RankFailure>(())
/// ```
#[derive(Clone)]
pub struct ExpertMap {
    entries: TypedTensor<'static, i32>,
    num_ranks: u32,
    local_experts: u32,
}

impl fmt::Debug for ExpertMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExpertMap { entries, num_ranks, local_experts } = self;
        write!(f, "ExpertMap({entries:?}, {num_ranks} ranks with {local_experts} experts)")
    }
}

impl ExpertMap {
    /// A map of this placement.
    ///
    /// # Errors
    /// [`Error::Argument`] where an expert has more replicas than choices, and errors of the driver.
    pub fn new(stream: &Stream, placement: &Placement) -> Result<ExpertMap> {
        let (choices, local_experts) = (placement.choices(), placement.local_experts());
        placement.check_choices(choices)?;
        let shape = [placement.num_experts().into(), choices.into()];
        let entries = TypedTensor::from_host(stream, &shape, &placement.entries(choices, local_experts))?;
        Ok(ExpertMap {
            entries: entries.named("expert map"),
            num_ranks: placement.num_ranks(),
            local_experts,
        })
    }

    /// Changes the placement, behind all work enqueued on `stream`; waits for that. Calls of other
    /// streams that use the map must have ended, or wait for `stream`. The number of choices stays.
    ///
    /// # Errors
    /// [`Error::Argument`] where the placement has another number of experts or ranks, more local
    /// experts than there is room for, or more replicas of an expert than choices.
    pub fn set(&self, stream: &Stream, placement: &Placement) -> Result<()> {
        let (experts, ranks) = (self.num_experts(), self.num_ranks);
        if placement.num_experts() != experts || placement.num_ranks != ranks {
            let value = format!("{} experts on {} ranks", placement.num_experts(), placement.num_ranks);
            let rule = format!("must have as many as the map, {experts} on {ranks}: make another map");
            return Err(Error::argument("placement", value, rule));
        }
        if placement.local_experts > self.local_experts {
            let value = format!("{} experts on a rank", placement.local_experts);
            let rule = format!(
                "the map has room for {}: make it of a placement with_local_experts({})",
                self.local_experts, placement.local_experts
            );
            return Err(Error::argument("placement", value, rule));
        }
        placement.check_choices(self.choices())?;
        self.entries.write(stream, &placement.entries(self.choices(), self.local_experts))
    }

    /// The table, i32 `[num_experts, choices]`, for kernels of the caller's that write it: ids of
    /// physical experts, or -1 for an entry that selects nothing. An entry of token t of rank r
    /// takes choice `(t + r) % choices` of its expert. Dispatches report an id that is out of range
    /// as they report an expert's.
    pub fn entries(&self) -> &TypedTensor<'static, i32> {
        &self.entries
    }

    /// Logical experts.
    pub fn num_experts(&self) -> u32 {
        self.entries.rows() as u32
    }

    /// Choices for each.
    pub fn choices(&self) -> u32 {
        self.entries.columns() as u32
    }

    /// Local experts of each rank.
    pub fn local_experts(&self) -> u32 {
        self.local_experts
    }

    /// Ranks.
    pub fn num_ranks(&self) -> u32 {
        self.num_ranks
    }

    /// Physical experts.
    pub fn num_physical_experts(&self) -> u32 {
        self.num_ranks * self.local_experts
    }

    /// An error unless it is for a buffer of so many ranks.
    pub(super) fn check_ranks(&self, ranks: u32) -> Result<()> {
        if self.num_ranks == ranks {
            return Ok(());
        }
        let rule = format!("the buffer has {ranks} ranks: make the map of a placement on as many");
        Err(Error::argument("map", format!("for {} ranks", self.num_ranks), rule))
    }

    /// The table, as an argument of kernels.
    pub(super) fn table(&self) -> ExpertTable {
        ExpertTable { entries: self.entries.ptr(), num_experts: self.num_experts(), choices: self.choices() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(placement: &Placement) -> Vec<i32> {
        placement.entries(placement.choices(), placement.local_experts())
    }

    #[test]
    fn experts_are_spread_as_evenly_as_they_go() {
        let even = |experts, ranks| Placement::even(experts, ranks).unwrap();
        assert_eq!(entries(&even(10, 4)), [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]);
        assert_eq!(entries(&even(2, 3)), [0, 1]);
        // Without a rest, physical experts are the logical ones.
        assert_eq!(entries(&even(8, 4)), (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn replicas_take_turns_by_weight() {
        let placement = Placement::new(2, &[vec![0, 1], vec![0], vec![0, 1]]).unwrap();
        assert_eq!((placement.choices(), placement.local_experts()), (6, 2));
        assert_eq!(entries(&placement), [0, 2, 4, 0, 2, 4, 1, 5, 1, 5, 1, 5]);
        let weights = [vec![3.0, 0.0], vec![1.0], vec![0.0, 2.5]];
        let weighted = placement.clone().weighted(&weights).unwrap().with_choices(8).unwrap();
        assert_eq!(entries(&weighted), [0, 0, 2, 0, 0, 0, 2, 0, 5, 5, 5, 5, 5, 5, 5, 5]);
        assert_eq!(placement.clone().weighted(&weights).unwrap().choices(), 64);
        let equal = placement.weighted(&[vec![2.0, 7.0], vec![2.0], vec![2.0, 7.0]]).unwrap();
        assert_eq!(equal.choices(), 6);
        // One choice for each replica at least.
        assert_eq!(Placement::new(1, &[[0; 65], [0; 65]]).unwrap().choices(), 130);
    }

    #[test]
    fn near_replicas_come_first() {
        let ranks = [vec![0, 1], vec![0], vec![2, 1], vec![1]];
        let placement = Placement::new(3, &ranks).unwrap();
        let near = |rank| entries(&placement.clone().nearest(rank, 2).unwrap());
        // Rank 0 has 0 and 1 itself; its node has no 2.
        assert_eq!(near(0), [0, 1, 4]);
        assert_eq!(near(1), [2, 1, 4]);
        // Neither has 0, and so both take either replica in turn.
        assert_eq!(near(2), [0, 2, 5, 5, 4, 4]);
        assert_eq!(near(3), [0, 2, 6, 6, 4, 4]);
        // Rank 0 has kept only the second of its places.
        let kept = Placement::new(2, &[vec![0, 1], vec![0]]).unwrap().nearest(1, 1).unwrap();
        assert_eq!(entries(&kept.weighted(&[vec![1.0, 2.0], vec![1.0]]).unwrap()), [2, 1]);
    }

    #[test]
    fn what_cannot_be_placed_is_named() {
        let error = |result: Result<Placement>| result.unwrap_err().to_string();
        let names = |result, parts: &[&str]| {
            let error = error(result);
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        };
        let none: [Vec<u32>; 0] = [];
        names(Placement::new(1, &none), &["ranks = 0", "1 to 256"]);
        names(Placement::even(4, 0), &["ranks = 0"]);
        names(Placement::even(4, 257), &["ranks = 257"]);
        names(Placement::even(0, 2), &["num_experts = 0"]);
        names(Placement::even(u32::MAX, 2), &["num_experts = 4294967295"]);
        names(
            Placement::new(2, &[vec![0, 2]]),
            &["expert 2 as local expert 1 of rank 0", "num_experts - 1 = 1"],
        );
        names(Placement::new(3, &[vec![0, 2]]), &["no place of expert 1"]);
        names(Placement::new(1, &[vec![0; 1025]]), &["1025 experts on a rank", "at most 1024"]);
        let placement = || Placement::new(2, &[vec![0, 1], vec![1]]).unwrap();
        names(placement().weighted(&[vec![1.0], vec![1.0]]), &["lists of [1, 1]", "[2, 1]"]);
        for bad in [-1.0, f32::NAN, f32::INFINITY] {
            names(placement().weighted(&[vec![1.0, bad], vec![1.0]]), &["of local expert 1 of rank 0"]);
        }
        names(placement().weighted(&[vec![1.0, 0.0], vec![0.0]]), &["0 for all of expert 1"]);
        names(placement().nearest(2, 1), &["rank = 2", "0 to 1"]);
        names(placement().nearest(0, 3), &["ranks_per_node = 3", "number of ranks, 2"]);
        names(placement().with_local_experts(1), &["local_experts = 1", "2 to 1024"]);
        names(placement().with_choices(0), &["choices = 0", "1 to 1024"]);
    }
}
