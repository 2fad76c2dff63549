//! Systematic exploration: all schedules of a small program, one run for each.
//!
//! An exploration is a depth-first search without stored states. Each run follows the choices of a
//! [`Path`] as far as they are given, takes the first alternative from there on, and notes what the
//! others were. The next run takes the next alternative of the last choice that has one.
//!
//! A step is an instruction whose effect other threads may observe, with the thread's own
//! computations behind it. Without a bound, schedules that differ in the order of independent steps
//! alone are explored once (sleep sets). With a bound, all schedules with so few preemptions are.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Takes the next step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Actor {
    /// A warp of a resident block.
    Warp { device: usize, block: u32, warp: u32 },
    /// One of the block's copies that are under way.
    Copy { device: usize, block: u32, index: usize },
}

/// Bytes that a step reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touch {
    /// The piece of memory.
    pub(crate) memory: u64,
    pub(crate) from: u64,
    pub(crate) bytes: u64,
    pub(crate) write: bool,
}

/// All that a step touches.
#[derive(Clone, Debug, Default)]
struct Footprint {
    /// It depends on every other step.
    everything: bool,
    touched: Vec<Touch>,
}

impl Footprint {
    fn add(&mut self, touch: Touch) {
        if !self.touched.contains(&touch) {
            self.touched.push(touch);
        }
    }

    fn is_independent(&self, other: &Footprint) -> bool {
        let meet = |a: &Touch, b: &Touch| {
            (a.write || b.write)
                && a.memory == b.memory
                && a.from < b.from + b.bytes
                && b.from < a.from + a.bytes
        };
        !self.everything
            && !other.everything
            && !self.touched.iter().any(|a| other.touched.iter().any(|b| meet(a, b)))
    }
}

/// Actors whose next steps need not be taken, because another run has taken them before all that
/// has happened since, and the two are independent.
type Asleep = Vec<(Actor, Footprint)>;

/// A choice of a run.
#[derive(Debug)]
enum Node {
    /// The value of a load, or whether it comes late.
    Value { alternatives: u32, chosen: u32 },
    Step {
        actors: Vec<Actor>,
        chosen: usize,
        /// Actors that are to be tried, the next one last.
        rest: Vec<usize>,
        asleep: Asleep,
        /// The footprint of the chosen actor's step, in all runs that take it.
        footprint: Footprint,
    },
}

impl Node {
    fn chosen(&self) -> u32 {
        match self {
            Node::Value { chosen, .. } => *chosen,
            Node::Step { chosen, .. } => *chosen as u32,
        }
    }
}

#[derive(Debug, Default)]
struct Trail {
    nodes: Vec<Node>,
    /// Choices of this run so far.
    depth: usize,
    /// Most preemptions, those of this run so far, and whether a schedule with more was left out.
    bound: Option<u32>,
    preemptions: u32,
    left_out: bool,
    asleep: Asleep,
    /// Another run has taken every step that is possible now, so the rest of this run repeats
    /// another.
    redundant: bool,
    /// The step that is being taken.
    step: Footprint,
    /// The program did not do the same after the same choices.
    differs: bool,
    /// Loads return the last writes: nothing else can happen, and stores become visible in the end.
    fresh: bool,
    /// Choices of a schedule that is replayed.
    given: Vec<u32>,
}

impl Trail {
    fn begin_run(&mut self) {
        (self.depth, self.preemptions) = (0, 0);
        (self.redundant, self.fresh) = (false, false);
        self.asleep.clear();
        self.step = Footprint::default();
    }

    fn value(&mut self, alternatives: u32) -> u32 {
        if self.redundant || self.differs || alternatives < 2 {
            return 0;
        }
        let at = self.depth;
        self.depth += 1;
        match self.nodes.get(at) {
            Some(Node::Value { alternatives: known, chosen }) if *known == alternatives => *chosen,
            Some(_) => {
                self.differs = true;
                0
            }
            None => {
                let chosen = self.given.get(at).map_or(0, |&given| given.min(alternatives - 1));
                self.nodes.push(Node::Value { alternatives, chosen });
                chosen
            }
        }
    }

    /// The index of the actor that takes the next step. `current`: the one that has taken the last.
    fn actor(&mut self, actors: &[Actor], current: Option<usize>) -> usize {
        let first = current.unwrap_or(0);
        if self.redundant || self.differs {
            return first;
        }
        let at = self.depth;
        self.depth += 1;
        let chosen = match self.nodes.get(at) {
            Some(Node::Step { actors: known, chosen, .. }) if known == actors => *chosen,
            Some(_) => {
                self.differs = true;
                return first;
            }
            None => {
                let others = (0..actors.len()).filter(|at| *at != first);
                let mut rest: Vec<usize> = std::iter::once(first).chain(others).collect();
                match self.bound {
                    // Only the current actor continues without a preemption.
                    Some(bound) if current.is_some() && self.preemptions >= bound => {
                        self.left_out |= rest.len() > 1;
                        rest.truncate(1);
                    }
                    Some(_) => {}
                    None => rest.retain(|&at| self.asleep.iter().all(|(actor, _)| *actor != actors[at])),
                }
                rest.reverse();
                let given = self.given.get(at).map(|&given| (given as usize).min(actors.len() - 1));
                let Some(chosen) = given.or_else(|| rest.pop()) else {
                    self.redundant = true;
                    self.depth -= 1;
                    return first;
                };
                let (actors, asleep) = (actors.to_vec(), self.asleep.clone());
                self.nodes.push(Node::Step { actors, chosen, rest, asleep, footprint: Footprint::default() });
                chosen
            }
        };
        self.preemptions += u32::from(current.is_some_and(|current| current != chosen));
        self.step = Footprint::default();
        chosen
    }

    /// The chosen step has been taken.
    fn stepped(&mut self, everything: bool) {
        let mut step = std::mem::take(&mut self.step);
        step.everything |= everything;
        if self.redundant || self.bound.is_some() {
            return;
        }
        // Choices of values within the step stand behind it.
        let mut last = self.nodes.iter_mut().take(self.depth).rev();
        let Some(Node::Step { actors, chosen, asleep, footprint, .. }) =
            last.find(|node| matches!(node, Node::Step { .. }))
        else {
            return;
        };
        let awake = actors[*chosen];
        self.asleep = asleep
            .iter()
            .filter(|(actor, theirs)| *actor != awake && theirs.is_independent(&step))
            .cloned()
            .collect();
        footprint.everything |= step.everything;
        step.touched.into_iter().for_each(|touch| footprint.add(touch));
    }

    /// Takes the next alternative of the last choice that has one. False if all are done.
    fn next_run(&mut self) -> bool {
        let keeps_asleep = self.bound.is_none();
        while let Some(node) = self.nodes.last_mut() {
            match node {
                Node::Value { alternatives, chosen } if *chosen + 1 < *alternatives => {
                    *chosen += 1;
                    return true;
                }
                Node::Step { actors, chosen, rest, asleep, footprint } => {
                    if let Some(next) = rest.pop() {
                        let done = (actors[*chosen], std::mem::take(footprint));
                        asleep.extend(keeps_asleep.then_some(done));
                        *chosen = next;
                        return true;
                    }
                }
                Node::Value { .. } => {}
            }
            self.nodes.pop();
        }
        false
    }
}

/// The choices of one run of an exploration. [`Machine::explored`](crate::Machine::explored) makes
/// a machine follow them.
#[derive(Clone, Debug)]
pub struct Path(Arc<Mutex<Trail>>);

impl Path {
    fn trail(&self) -> MutexGuard<'_, Trail> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses one of two alternatives. True is the unusual one.
    pub(crate) fn either(&self) -> bool {
        self.trail().value(2) == 1
    }

    /// Whether a load returns an older value.
    pub(crate) fn sees_older(&self) -> bool {
        let mut trail = self.trail();
        !trail.fresh && trail.value(2) == 1
    }

    pub(crate) fn actor(&self, actors: &[Actor], current: Option<usize>) -> usize {
        self.trail().actor(actors, current)
    }

    pub(crate) fn touch(&self, touch: Touch) {
        self.trail().step.add(touch);
    }

    pub(crate) fn stepped(&self, everything: bool) {
        self.trail().stepped(everything);
    }

    /// Sets whether loads return the last writes from here on.
    pub(crate) fn set_fresh(&self, fresh: bool) {
        self.trail().fresh = fresh;
    }
}

/// How much of a program's runs an exploration has covered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Coverage {
    /// Every schedule, and in weak-memory mode every value of every load that the mode has.
    Complete,
    /// All of them that have at most so many preemptions.
    Preemptions(u32),
    /// The limit of runs came first. With a bound, all schedules of fewer preemptions than these
    /// were explored.
    RunsSpent(Option<u32>),
    /// A run failed, and ended the exploration.
    Failed,
    /// The program did not do the same after the same choices, so the exploration has no result.
    /// The program depends on addresses, on the host or on time.
    Unrepeatable,
}

impl Coverage {
    /// Whether every schedule was explored.
    #[must_use]
    pub fn is_complete(self) -> bool {
        self == Coverage::Complete
    }
}

impl std::fmt::Display for Coverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Coverage::Complete => f.write_str("complete: every schedule was explored"),
            Coverage::Preemptions(0) => {
                f.write_str("all schedules without preemptions were explored, others exist")
            }
            Coverage::Preemptions(most) => {
                write!(f, "all schedules with at most {most} preemptions were explored, others exist")
            }
            Coverage::RunsSpent(None | Some(0)) => f.write_str("incomplete: the limit of runs came first"),
            Coverage::RunsSpent(Some(fewer)) => write!(
                f,
                "incomplete: the limit of runs came first; all schedules with fewer than {fewer} preemptions were explored"
            ),
            Coverage::Failed => f.write_str("a run failed"),
            Coverage::Unrepeatable => {
                f.write_str("incomplete: the program did not do the same after the same choices")
            }
        }
    }
}

/// A run that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure<E> {
    /// The error that the run returned.
    pub error: E,
    /// How many preemptions its schedule has.
    pub preemptions: u32,
    /// Its choices, for [`Explore::replay`].
    pub schedule: Vec<u32>,
}

/// Result of an exploration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explored<E> {
    /// How many runs there were.
    pub runs: u64,
    /// The schedules that they cover.
    pub coverage: Coverage,
    /// The run that failed, which was the last.
    pub failure: Option<Failure<E>>,
}

/// An exploration of all schedules of a small program, and in weak-memory mode of all values that
/// its loads may return.
///
/// The program is a function that runs a [`Machine`](crate::Machine), and it must do the same
/// whenever its machine does. It is called once for each schedule. Its error ends the exploration.
///
/// All blocks that fit are resident from the start, the lanes of a warp run in step as far as the
/// program allows, and a copy moves as a whole: other behaviour of these kinds is left to seeds.
///
/// ```
/// use epoxide_vgpu::{Explore, GridConfig, Machine, MachineError, Module};
///
/// // Two blocks add 1 to a word, without an atomic.
/// let module = Module::parse(
///     ".version 8.4\n.target sm_90\n.address_size 64
///      .visible .entry add(.param .u64 at) {
///          .reg .b32 %r<2>; .reg .b64 %rd<2>;
///          ld.param.u64 %rd1, [at];
///          ld.global.u32 %r1, [%rd1];
///          add.u32 %r1, %r1, 1;
///          st.global.u32 [%rd1], %r1;
///          ret;
///      }",
/// )?;
/// let mut sums = vec![];
/// let explored = Explore::new().run(|path| {
///     let mut machine = Machine::new(1).explored(path);
///     let word = machine.upload(0, "word", &[0u32])?;
///     machine.launch_with(0, &module, "add", GridConfig::new(2, 1, 0), &[&word])?;
///     machine.run()?;
///     sums.extend(word.download()?);
///     Ok::<(), MachineError>(())
/// });
/// assert!(explored.coverage.is_complete());
/// sums.sort();
/// sums.dedup();
/// assert_eq!(sums, [1, 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Explore {
    preemptions: Option<u32>,
    runs: u64,
}

/// The default limit of runs of an exploration.
const RUNS: u64 = 100_000;

impl Default for Explore {
    fn default() -> Self {
        Self::new()
    }
}

impl Explore {
    /// An exploration of all schedules, of at most 100,000 runs.
    #[must_use]
    pub fn new() -> Self {
        Explore { preemptions: None, runs: RUNS }
    }

    /// Explores the schedules with at most so many preemptions: first those without any, then those
    /// with one, and so on. A preemption takes the turn from a warp that could go on. Schedules of
    /// fewer preemptions are run again with those of more.
    #[must_use]
    pub fn preemptions(self, most: u32) -> Self {
        Explore { preemptions: Some(most), ..self }
    }

    /// Limits the number of runs.
    #[must_use]
    pub fn runs(self, most: u64) -> Self {
        Explore { runs: most, ..self }
    }

    /// Calls `test` for each schedule, until it returns an error.
    pub fn run<E>(&self, mut test: impl FnMut(&Path) -> Result<(), E>) -> Explored<E> {
        let bounds = match self.preemptions {
            None => vec![None],
            Some(most) => (0..=most).map(Some).collect(),
        };
        let mut runs = 0;
        for bound in bounds {
            let path = Path(Arc::new(Mutex::new(Trail { bound, ..Trail::default() })));
            loop {
                if runs == self.runs {
                    return Explored { runs, coverage: Coverage::RunsSpent(bound), failure: None };
                }
                runs += 1;
                path.trail().begin_run();
                let result = test(&path);
                let mut trail = path.trail();
                if let Err(error) = result {
                    let schedule = trail.nodes.iter().take(trail.depth).map(Node::chosen).collect();
                    let failure = Some(Failure { error, preemptions: trail.preemptions, schedule });
                    return Explored { runs, coverage: Coverage::Failed, failure };
                }
                // A run that ends before its choices do is another one too.
                if trail.differs || trail.depth < trail.nodes.len() {
                    return Explored { runs, coverage: Coverage::Unrepeatable, failure: None };
                }
                if !trail.next_run() {
                    break;
                }
            }
            if !path.trail().left_out {
                return Explored { runs, coverage: Coverage::Complete, failure: None };
            }
        }
        let coverage = Coverage::Preemptions(self.preemptions.unwrap_or_default());
        Explored { runs, coverage, failure: None }
    }

    /// Calls `test` once, with the choices of a schedule that has failed ([`Failure::schedule`]).
    pub fn replay<E>(schedule: &[u32], test: impl FnOnce(&Path) -> Result<(), E>) -> Result<(), E> {
        let trail = Trail { given: schedule.to_vec(), bound: Some(u32::MAX), ..Trail::default() };
        test(&Path(Arc::new(Mutex::new(trail))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn warp(block: u32) -> Actor {
        Actor::Warp { device: 0, block, warp: 0 }
    }

    const WARPS: [Actor; 3] = [warp(0), warp(1), warp(2)];

    /// Threads that take steps on words of their own or of all, as the machine would run them.
    fn interleave(path: &Path, steps: &[Vec<(u64, bool)>]) -> Vec<usize> {
        let (mut at, mut order, mut current) = (vec![0; steps.len()], vec![], None);
        loop {
            let ready: Vec<usize> = (0..steps.len()).filter(|&t| at[t] < steps[t].len()).collect();
            if ready.is_empty() {
                return order;
            }
            let actors: Vec<Actor> = ready.iter().map(|&t| WARPS[t]).collect();
            let last = current.and_then(|current| ready.iter().position(|&t| t == current));
            let t = ready[path.actor(&actors, last)];
            let (word, write) = steps[t][at[t]];
            path.touch(Touch { memory: 1, from: word, bytes: 1, write });
            path.stepped(false);
            at[t] += 1;
            order.push(t);
            current = Some(t);
        }
    }

    fn orders(explore: Explore, steps: &[Vec<(u64, bool)>]) -> (Vec<Vec<usize>>, Coverage) {
        let mut all = vec![];
        let explored = explore.run(|path| {
            all.push(interleave(path, steps));
            Ok::<(), ()>(())
        });
        assert_eq!(explored.runs, all.len() as u64);
        (all, explored.coverage)
    }

    #[test]
    fn dependent_steps_come_in_every_order_and_independent_ones_in_one() {
        let writes = |word: u64, n| vec![(word, true); n];
        let (all, coverage) = orders(Explore::new(), &[writes(0, 2), writes(0, 2)]);
        let mut sorted = all.clone();
        sorted.sort();
        sorted.dedup();
        assert_eq!((all.len(), sorted.len(), coverage), (6, 6, Coverage::Complete));
        let (all, coverage) = orders(Explore::new(), &[writes(0, 3), writes(1, 3), writes(2, 3)]);
        // Runs that sleep sets cut short are runs too.
        assert!(all.len() < 20 && coverage.is_complete(), "{} runs", all.len());
        let reads = vec![(0, false); 3];
        let (all, _) = orders(Explore::new(), &[reads.clone(), reads]);
        assert!(all.len() < 5, "{} runs", all.len());
    }

    #[test]
    fn schedules_come_by_their_preemptions() {
        let steps = [vec![(0, true); 3], vec![(0, true); 3]];
        let preemptions = |order: &Vec<usize>| {
            let (mut left, mut found) = ([3, 3], 0);
            for pair in order.windows(2) {
                left[pair[0]] -= 1;
                found += u32::from(pair[0] != pair[1] && left[pair[0]] > 0);
            }
            found
        };
        for most in 0..3 {
            let (mut all, coverage) = orders(Explore::new().preemptions(most), &steps);
            assert_eq!(coverage, Coverage::Preemptions(most));
            assert!(all.iter().all(|order| preemptions(order) <= most));
            all.sort();
            all.dedup();
            let (mut every, complete) = orders(Explore::new().preemptions(9), &steps);
            assert_eq!(complete, Coverage::Complete, "no schedule has so many");
            every.sort();
            every.dedup();
            assert_eq!(every.len(), 20);
            every.retain(|order| preemptions(order) <= most);
            assert_eq!(all, every);
        }
    }

    #[test]
    fn limits_failures_and_surprises_are_told() {
        let steps = [vec![(0, true); 3], vec![(0, true); 3]];
        let (_, coverage) = orders(Explore::new().runs(3), &steps);
        assert_eq!(coverage, Coverage::RunsSpent(None));
        let wanted = [0, 1, 1, 0, 1, 0];
        let find = |path: &Path| match interleave(path, &steps) == wanted {
            true => Err("found"),
            false => Ok(()),
        };
        let explored = Explore::new().preemptions(4).run(find);
        let failure = explored.failure.expect("one of 20");
        assert_eq!((failure.error, failure.preemptions, explored.coverage), ("found", 3, Coverage::Failed));
        assert_eq!(Explore::replay(&failure.schedule, find), Err("found"));
        let mut call = 0;
        let explored = Explore::new().run(|path| {
            call += 1;
            path.either();
            if call > 1 {
                path.actor(&WARPS, None);
            }
            (call == 1).then(|| path.either());
            Ok::<(), ()>(())
        });
        assert_eq!(explored.coverage, Coverage::Unrepeatable);
    }
}
