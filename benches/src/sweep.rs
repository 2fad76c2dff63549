//! Sweeps: all combinations of some axes, stored as JSON lines, so that an interrupted sweep can
//! continue.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::str::FromStr;

use epoxide::driver::Device;
use epoxide::internal::driver::shipped_ptx;
use epoxide::internal::{JSON, read_text_file};

use crate::results::{PhaseName, Point, Results};
use crate::versions::{NcclVersion, Versions};
use crate::{Baseline, Error, Plan, Result, Watch};

/// Most values of an axis, and most combinations of all: more than can be measured in a day.
const MOST_VALUES: u32 = 4096;
const MOST_COMBINATIONS: usize = 1 << 20;

/// The axes of a sweep; an empty one stays at the plan's value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sweep {
    tokens: Vec<u32>,
    sms: Vec<u32>,
    ranks: Vec<u32>,
    nodes: Vec<u32>,
    rdma_send: Vec<u32>,
}

impl Sweep {
    /// With these numbers of tokens, unless tokens are an axis already.
    pub fn or_tokens(mut self, tokens: Vec<u32>) -> Sweep {
        if self.tokens.is_empty() {
            self.tokens = tokens;
        }
        self
    }
}

impl FromStr for Sweep {
    type Err = String;

    /// `axis=values` with commas between; values have commas between, too: `sms=4,8,ranks=2..8`.
    fn from_str(text: &str) -> std::result::Result<Sweep, String> {
        let (mut sweep, mut axis) = (Sweep::default(), None);
        for part in text.split(',') {
            let values = match part.split_once('=') {
                Some((name, values)) => {
                    axis = Some(name.trim());
                    values
                }
                None => part,
            };
            let list = match axis {
                Some("tokens") => &mut sweep.tokens,
                Some("sms") => &mut sweep.sms,
                Some("ranks") => &mut sweep.ranks,
                Some("nodes") => &mut sweep.nodes,
                Some("rdma_send") => &mut sweep.rdma_send,
                _ => {
                    return Err(format!("{part}: the axes are tokens=, sms=, ranks=, nodes= and rdma_send="));
                }
            };
            list.extend(parse_values(values.trim())?);
        }
        let Sweep { tokens, sms, ranks, nodes, rdma_send } = &mut sweep;
        let mut combinations: usize = 1;
        for list in [tokens, sms, ranks, nodes, rdma_send] {
            list.sort_unstable();
            list.dedup();
            combinations = combinations.saturating_mul(list.len().max(1));
        }
        if combinations > MOST_COMBINATIONS {
            let rule =
                format!("the axes have at most {MOST_COMBINATIONS}; give fewer values, or larger steps");
            return Err(format!("{text}: {combinations} combinations; {rule}"));
        }
        Ok(sweep)
    }
}

/// `7`, `4..48` (doubling, with the end if a doubling meets it), or `4..48:4` (steps).
///
/// # Errors
/// The text is no list of values, or has too many; the error gives the wrong part.
pub fn parse_values(text: &str) -> std::result::Result<Vec<u32>, String> {
    let number = |text: &str| match text.trim().parse::<u32>() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("{text}: a positive whole number is needed")),
    };
    let Some((from, rest)) = text.split_once("..") else {
        return Ok(vec![number(text)?]);
    };
    let (to, step) = match rest.split_once(':') {
        Some((to, step)) => (number(to)?, Some(number(step)?)),
        None => (number(rest)?, None),
    };
    let from = number(from)?;
    if from > to {
        return Err(format!("{text}: the end lies before the start"));
    }
    if let Some(step) = step.filter(|step| (to - from) / step >= MOST_VALUES) {
        let values = u64::from((to - from) / step) + 1;
        return Err(format!("{text}: {values} values; there may be {MOST_VALUES}: give a larger step"));
    }
    let next = |&at: &u32| match step {
        Some(step) => at.checked_add(step),
        None => at.checked_mul(2),
    };
    Ok(std::iter::successors(Some(from), next).take_while(|&at| at <= to).collect())
}

/// Devices of a sweep, and receivers of its progress.
pub struct Means<'a> {
    /// Gives the plan for so many nodes of so many ranks, with the defaults for those, or the error.
    pub plan: &'a dyn Fn(u32, u32) -> Result<Plan>,
    /// Makes the device of a rank.
    pub open: &'a (dyn Fn(u32) -> epoxide::Result<Device> + Sync),
    /// Called before each run with its plan, and the numbers of finished and of all points.
    pub progress: &'a dyn Fn(&Plan, usize, usize),
    /// Receives the progress of a run.
    pub watch: &'a dyn Watch,
}

/// Results of a sweep.
#[derive(Debug, Clone)]
pub struct Swept {
    /// The points of this sweep, old and new.
    pub points: Vec<Point>,
    /// Plans that could not be measured, with the error.
    pub left_out: Vec<(Plan, Error)>,
}

/// Measures what `out` does not hold yet.
///
/// # Errors
/// An impossible combination, before any is measured; and errors of the operations.
pub fn run(plan: &Plan, sweep: &Sweep, out: &Path, how: &Means<'_>) -> Result<Swept> {
    let has_text = || std::fs::metadata(out).is_ok_and(|file| file.len() > 0);
    if has_text() {
        mend(out)?;
    }
    let mut known = if has_text() { Results::read(out)?.points } else { Vec::new() };
    let mut groups = groups(plan, sweep, how.plan)?;
    let info = (how.open)(0)?.info().clone();
    for group in &mut groups {
        // Points have the number itself, by which they are found again.
        let all = group.num_sms.iter_mut().filter(|sms| **sms == Plan::ALL_SMS);
        all.for_each(|sms| *sms = info.sm_count);
    }
    // Another program, device, driver or NCCL measured another thing.
    let kernels = Some(Versions::of_ptx(&shipped_ptx(plan.ptx.as_deref())?, info.is_virtual));
    let driver_version = if info.is_virtual { 0 } else { info.driver_version };
    let here = (&kernels, &info.name, driver_version);
    let nccl = plan.baseline.map(|Baseline::Nccl| NcclVersion::found()).transpose()?;
    known.retain(|point| {
        (&point.kernels, &point.device, point.driver_version) == here
            && (nccl.is_none() || point.nccl == nccl)
    });
    // Before anything is measured: a file that cannot be written is an error now.
    append(out, &[])?;
    let total = groups.iter().map(|group| group.num_sms.len()).sum::<usize>();
    let mut done = 0;
    let mut swept = Swept { points: Vec::new(), left_out: Vec::new() };
    for group in groups {
        (how.progress)(&group, done, total);
        let mut missing = group.clone();
        missing.num_sms.retain(|&sms| find(&known, &group, sms).is_none());
        // A number of multiprocessors that cannot be does not end the others.
        let of_number = |sms| Plan { num_sms: vec![sms], ..group.clone() };
        if (Plan { num_sms: Vec::new(), ..group.clone() }).check().is_ok() {
            missing.num_sms.retain(|&sms| {
                let reason = of_number(sms).check().err();
                let is_possible = reason.is_none();
                swept.left_out.extend(reason.map(|reason| (of_number(sms), reason)));
                is_possible
            });
        }
        if !missing.num_sms.is_empty() {
            match crate::measure(&missing, how.open, how.watch) {
                Ok((points, _)) => {
                    append(out, &points)?;
                    known.extend(points);
                }
                // A combination that cannot be, or has no room here, does not end the others.
                Err(
                    reason @ (Error::Usage(_)
                    | Error::DoesNotFit(_)
                    | Error::Operation(
                        epoxide::Error::Unavailable { .. } | epoxide::Error::Capacity { .. },
                    )),
                ) => swept.left_out.push((missing, reason)),
                Err(error) => return Err(error),
            }
        }
        let found = group.num_sms.iter().filter_map(|&sms| find(&known, &group, sms));
        swept.points.extend(found.cloned());
        done += group.num_sms.len();
    }
    Ok(swept)
}

/// One run for each combination of the other axes, with all numbers of multiprocessors. All are
/// checked before any is measured.
fn groups(plan: &Plan, sweep: &Sweep, place: impl Fn(u32, u32) -> Result<Plan>) -> Result<Vec<Plan>> {
    let or = |list: &[u32], value: u32| if list.is_empty() { vec![value] } else { list.to_vec() };
    let mut groups = Vec::new();
    for nodes in or(&sweep.nodes, plan.topology.nodes) {
        for ranks_per_node in or(&sweep.ranks, plan.topology.ranks_per_node) {
            let placed = place(nodes, ranks_per_node)?;
            let num_sms = if sweep.sms.is_empty() { &placed.num_sms } else { &sweep.sms };
            // Within one node nothing is put, and low latency has one message for each rank.
            let has_chunks = nodes > 1 && plan.low_latency.is_none();
            let chunks = if has_chunks { &sweep.rdma_send[..] } else { &[] };
            for rdma_send in or(chunks, plan.rdma_send) {
                for tokens in or(&sweep.tokens, plan.tokens) {
                    groups.push(Plan { tokens, rdma_send, num_sms: num_sms.clone(), ..placed.clone() });
                }
            }
        }
    }
    if plan.low_latency.is_some() {
        return Ok(groups);
    }
    for (group, sms) in groups.iter().flat_map(|group| group.num_sms.iter().map(move |sms| (group, *sms))) {
        group.config(sms).map_err(|error| Error::Usage(format!("--sweep: {error}")))?;
    }
    Ok(groups)
}

/// A finished point: the same sizes, settings and launch shapes, the same kind of device, the same
/// iterations, and the requested replays.
fn find<'a>(known: &'a [Point], plan: &Plan, sms: u32) -> Option<&'a Point> {
    let key = plan.key(sms);
    known.iter().find(|point| {
        point.key == key
            && point.is_virtual == plan.is_virtual
            && (point.warmup, point.iters, point.shapes) == (plan.warmup, plan.iters, plan.shapes)
            && point.settings == Some(plan.settings())
            && point.runs.len().max(1) == plan.repeat as usize
            && (plan.baseline.is_none() || !point.baselines.is_empty())
            && plan
                .pairs()
                .is_none_or(|(chain, _)| point.pair.as_ref().is_some_and(|pair| pair.chain == chain))
            && plan.replays().is_none_or(|chain| point.graph.first().is_some_and(|step| step.chain == chain))
    })
}

/// The beginning of each line of a sweep.
const FIRST: &str = "{\"schema_version\"";

/// Cuts off a last line that was being written when the sweep was ended.
fn mend(out: &Path) -> Result<()> {
    let broken = |error: std::io::Error| Error::Failed(format!("{}: {error}", out.display()));
    let text = read_text_file(out, JSON).map_err(broken)?;
    let whole = whole_lines(&text);
    if whole.len() == text.len() {
        return Ok(());
    }
    if Results::of_text(&text).is_ok() {
        // Only the line end of the last line is missing.
        let mut file = OpenOptions::new().append(true).open(out).map_err(broken)?;
        return file.write_all(b"\n").map_err(broken);
    }
    let beginning = &text.as_bytes()[..text.len().min(FIRST.len())];
    let is_begun = whole.is_empty() && FIRST.as_bytes().starts_with(beginning);
    if !is_begun && Results::of_text(whole).is_err() {
        return Err(Error::Failed(format!("{}: no file of a sweep; name another one", out.display())));
    }
    // In one step, so that no line is lost.
    let file = OpenOptions::new().write(true).open(out).map_err(broken)?;
    file.set_len(whole.len() as u64).map_err(broken)
}

/// The lines of a text that end.
fn whole_lines(text: &str) -> &str {
    &text[..text.rfind('\n').map_or(0, |end| end + 1)]
}

/// Reads bytes as the file of a sweep to continue. Its complete lines are points, which can be
/// summarised and continued, or the file is rejected with a reason. For the fuzz target.
///
/// # Panics
/// The rule above does not hold.
pub fn fuzz(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let whole = whole_lines(&text);
    assert!(text.starts_with(whole) && whole_lines(whole) == whole);
    match Results::of_text(whole) {
        Ok(results) => {
            assert!(!summary(&results.points).is_empty());
            let more = lines_of(&results.points[..1]).map(|line| Results::of_text(&format!("{whole}{line}")));
            let count = more.map(|more| more.map(|more| more.points.len()));
            assert!(matches!(&count, Ok(Ok(count)) if *count == results.points.len() + 1), "{count:?}");
        }
        Err(reason) => assert!(!reason.is_empty()),
    }
}

/// Points as lines of JSON.
fn lines_of(points: &[Point]) -> Result<String> {
    let mut lines = String::new();
    for point in points {
        lines += &serde_json::to_string(point).map_err(|error| Error::Failed(format!("JSON: {error}")))?;
        lines.push('\n');
    }
    Ok(lines)
}

fn append(out: &Path, points: &[Point]) -> Result<()> {
    let lines = lines_of(points)?;
    let broken = |error: std::io::Error| Error::Failed(format!("{}: {error}", out.display()));
    let mut file = OpenOptions::new().create(true).append(true).open(out).map_err(broken)?;
    file.write_all(lines.as_bytes()).map_err(broken)
}

/// For each phase and size the number of multiprocessors, and across nodes the rows of a put, that
/// is fastest.
pub fn summary(points: &[Point]) -> String {
    let mut lines =
        vec!["best of the sweep  nodes ranks  tokens   SMs chunk     mean us  links GB/s".to_owned()];
    for name in PhaseName::all().filter(|name| *name != PhaseName::CombineStaged) {
        let size = |point: &Point| (point.key.nodes, point.key.num_ranks, point.key.tokens);
        let mut sizes: Vec<(u32, u32, u32)> = points.iter().map(size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for of in sizes {
            let (nodes, ranks, tokens) = of;
            let of_size = points.iter().filter(|point| size(point) == of);
            let phases = of_size.filter_map(|point| Some((point, point.phase(name)?)));
            let best = phases.min_by(|a, b| a.1.call.avg_us.total_cmp(&b.1.call.avg_us));
            let Some((point, phase)) = best else { continue };
            let links = phase.bandwidth.as_ref().map_or("n/a".into(), |bw| format!("{:.1}", bw.links));
            let (name, sms, us) = (name.text(), point.key.num_sms, phase.call.avg_us);
            let chunk = point.key.rdma_send.map_or("-".into(), |rows| rows.to_string());
            let sizes = format!("{nodes:>5} {ranks:>5} {tokens:>7} {sms:>5} {chunk:>5}");
            lines.push(format!("{name:<18} {sizes} {us:>11.1} {links:>11}"));
        }
    }
    if let Some(point) = points.iter().find(|point| point.is_virtual) {
        lines.push(point.caveat().into());
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use epoxide::internal::Topology;

    use super::*;
    use crate::tests::{open, plan};

    fn sweep_of(plan: &Plan, sweep: &Sweep, out: &Path) -> Result<Vec<Point>> {
        swept(plan, sweep, out).map(|swept| swept.points)
    }

    fn swept(plan: &Plan, sweep: &Sweep, out: &Path) -> Result<Swept> {
        let place = |nodes, ranks_per_node| {
            let topology = Topology { nodes, ranks_per_node };
            Ok(Plan { topology, ..plan.clone() })
        };
        let how = Means { plan: &place, open: &open, progress: &|_, _, _| {}, watch: &() };
        run(plan, sweep, out, &how)
    }

    #[test]
    fn malformed_sweep_files_do_not_panic() {
        let points = crate::results::committed_points();
        let points: Vec<Point> = points.into_iter().step_by(9).take(4).collect();
        let three = lines_of(&points[..3]).unwrap();
        let begun = lines_of(&points[3..]).unwrap();
        let samples = [three.clone(), format!("{three}{}", &begun[..begun.len() / 2]), begun];
        epoxide_testing::fuzz::run("sweep files", 2_000, &samples.map(String::into_bytes), fuzz);
    }

    #[test]
    fn axes_double_step_or_are_listed() {
        let sweep: Sweep = "tokens=128..1000,sms=4..12:4,ranks=2,4,8".parse().unwrap();
        assert_eq!(sweep.tokens, [128, 256, 512]);
        assert_eq!(sweep.sms, [4, 8, 12]);
        assert_eq!(sweep.ranks, [2, 4, 8]);
        assert_eq!("sms=4,4,2".parse::<Sweep>().unwrap().sms, [2, 4]);
        for (many, part) in [
            ("tokens=1..4294967295:1", "1..4294967295:1: 4294967295 values; there may be 4096"),
            ("tokens=1..4096:1,sms=1..2048:1", "8388608 combinations"),
        ] {
            let reason = many.parse::<Sweep>().unwrap_err();
            assert!(reason.contains(part), "{reason}");
        }
        for bad in ["", "4", "hidden=3", "sms=0", "sms=8..4", "sms=4..8:0", "sms=x", "sms=4..4294967295:x"] {
            assert!(bad.parse::<Sweep>().is_err(), "{bad}");
        }
        assert_eq!("sms=2147483648..4294967295".parse::<Sweep>().unwrap().sms, [1 << 31]);
    }

    #[test]
    fn a_sweep_goes_on_where_it_was_ended() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("sweep.jsonl");
        let asked = plan("--tokens 4");
        let sweep: Sweep = "sms=2,4,ranks=1,2".parse().unwrap();
        let points = sweep_of(&asked, &sweep, &out).unwrap();
        assert_eq!(points.len(), 4);
        let whole = std::fs::read_to_string(&out).unwrap();
        assert_eq!(whole.lines().count(), 4);

        // Everything is there: nothing is measured or written.
        assert_eq!(sweep_of(&asked, &sweep, &out).unwrap(), points);
        assert_eq!(std::fs::read_to_string(&out).unwrap(), whole);

        // Ended in the middle of the last line: that point alone is measured again.
        std::fs::write(&out, &whole[..whole.len() - 100]).unwrap();
        let again = sweep_of(&asked, &sweep, &out).unwrap();
        assert_eq!(again[..3], points[..3]);
        assert_eq!(again[3].key, points[3].key);
        let lines = std::fs::read_to_string(&out).unwrap();
        assert_eq!(lines.lines().take(3).collect::<Vec<_>>(), whole.lines().take(3).collect::<Vec<_>>());
        assert_eq!(lines.lines().count(), 4);

        // Without the last line's end nothing is measured again.
        std::fs::write(&out, whole.trim_end()).unwrap();
        assert_eq!(sweep_of(&asked, &sweep, &out).unwrap(), points);
        assert_eq!(std::fs::read_to_string(&out).unwrap(), whole);
        // Another file stays as it is.
        for other in ["{\"a\": 1}", "a list\nof things", "abcdefghijklmnopäöü"] {
            std::fs::write(&out, other).unwrap();
            let refused = sweep_of(&asked, &sweep, &out).unwrap_err().to_string();
            assert!(refused.contains("no file of a sweep"), "{refused}");
            assert_eq!(std::fs::read_to_string(&out).unwrap(), other);
        }
        std::fs::write(&out, &whole).unwrap();

        let text = summary(&again);
        assert!(text.contains("VIRTUAL GPU") && text.contains("n/a"), "{text}");
        // Other iterations are another measurement; sizes that do not fit are left out.
        let other = plan("--tokens 4 --iters 3");
        assert!(find(&again, &other, 2).is_none() && find(&again, &asked, 2).is_some());
        assert!(find(&again, &plan("--tokens 4 --combine-warps 2"), 2).is_none());
        assert!(find(&again, &plan("--tokens 4 --repeat 2"), 2).is_none());
        let sweep: Sweep = "sms=2,ranks=2,3".parse().unwrap();
        let Swept { points, left_out } = swept(&asked, &sweep, &out).unwrap();
        assert_eq!((points.len(), left_out.len()), (1, 1));
        let (plan, reason) = &left_out[0];
        assert_eq!((plan.topology.ranks(), plan.tokens), (3, 4));
        assert!(reason.to_string().starts_with("--experts 8: must be a positive multiple of the 3 ranks"));
    }

    #[test]
    fn points_of_other_settings_are_measured_again() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("sweep.jsonl");
        let asked = plan("--tokens 4");
        let sweep = Sweep::default();
        sweep_of(&asked, &sweep, &out).unwrap();
        let lines = || std::fs::read_to_string(&out).unwrap().lines().count();
        let others = [
            Plan { flush_mib: 1, ..asked.clone() },
            Plan { connections: Some(2), ..asked.clone() },
            Plan { nvl_bytes: Some(1 << 30), ..asked.clone() },
            Plan { rdma_bytes: Some(1 << 30), ..asked.clone() },
            Plan { no_ceiling: true, ..asked.clone() },
        ];
        for (number, other) in (2..).zip(&others) {
            sweep_of(other, &sweep, &out).unwrap();
            assert_eq!(lines(), number, "{other:?}");
            sweep_of(other, &sweep, &out).unwrap();
            assert_eq!(lines(), number, "{other:?}");
        }
        // Another program, its kernels, another device and another driver.
        let changes: [fn(&mut Point); 6] = [
            |point| point.kernels.as_mut().unwrap().ptx.push('0'),
            |point| point.kernels.as_mut().unwrap().commit.push('0'),
            |point| point.kernels.as_mut().unwrap().program = Some("0".into()),
            |point| point.kernels = None,
            |point| point.device.push('0'),
            |point| point.driver_version += 1,
        ];
        let own = Results::read(&out).unwrap().points.remove(0);
        for change in changes {
            let mut point = own.clone();
            change(&mut point);
            std::fs::write(&out, lines_of(&[point]).unwrap()).unwrap();
            assert_eq!(sweep_of(&asked, &sweep, &out).unwrap().len(), 1);
            assert_eq!(lines(), 2);
        }
    }

    #[test]
    fn a_number_of_multiprocessors_that_cannot_be_does_not_end_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("sweep.jsonl");
        let asked = plan("--tokens 4 --nodes 2 --ranks-per-node 1 --transport shm");
        let Swept { points, left_out } = swept(&asked, &"sms=2,4".parse().unwrap(), &out).unwrap();
        assert_eq!(points.iter().map(|point| point.key.num_sms).collect::<Vec<_>>(), [4]);
        let [(plan, reason)] = &left_out[..] else { panic!("{left_out:?}") };
        assert_eq!(plan.num_sms, [2]);
        assert!(reason.to_string().starts_with("--num-sms 2: a cached dispatch across nodes"), "{reason}");
    }

    #[test]
    fn sizes_without_room_in_the_pool_do_not_end_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("sweep.jsonl");
        let room = crate::tests::measured("--tokens 32").0[0].pool_bytes;
        let asked = Plan { nvl_bytes: Some(room), ..plan("--tokens 4") };
        let Swept { points, left_out } = swept(&asked, &"tokens=4,256".parse().unwrap(), &out).unwrap();
        assert_eq!(points.iter().map(|point| point.key.tokens).collect::<Vec<_>>(), [4]);
        let [(plan, reason)] = &left_out[..] else { panic!("{left_out:?}") };
        assert_eq!(plan.tokens, 256);
        assert!(reason.to_string().contains("num_nvl_bytes"), "{reason}");
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error_before_anything_is_measured() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("no-such-folder/sweep.jsonl");
        let asked = plan("--tokens 4");
        let place = |_, _| Ok(asked.clone());
        let measured = |_: &Plan, _: usize, _: usize| panic!("nothing is measured");
        let how = Means { plan: &place, open: &open, progress: &measured, watch: &() };
        let error = run(&asked, &Sweep::default(), &out, &how).unwrap_err().to_string();
        assert!(error.contains("no-such-folder/sweep.jsonl: No such file"), "{error}");
    }

    #[test]
    fn nodes_and_chunks_are_axes() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("sweep.jsonl");
        let asked = plan("--tokens 4 --ranks-per-node 1 --num-sms 4 --transport shm");
        let sweep: Sweep = "nodes=1..2,rdma_send=1,4".parse().unwrap();
        let points = sweep_of(&asked, &sweep, &out).unwrap();
        let of = |point: &Point| (point.mode.clone(), point.key.nodes, point.key.rdma_send);
        // Within one node chunks make no difference.
        let alone = ("intranode".to_owned(), 1, None);
        let across = |chunk| ("internode".to_owned(), 2, Some(chunk));
        assert_eq!(points.iter().map(of).collect::<Vec<_>>(), [alone, across(1), across(4)]);
        assert_eq!(std::fs::read_to_string(&out).unwrap().lines().count(), 3);
        assert!(summary(&points).contains("nodes"));
        // An impossible combination is reported before anything is measured.
        let sweep: Sweep = "nodes=2,rdma_send=500".parse().unwrap();
        assert!(sweep_of(&asked, &sweep, &out).unwrap_err().to_string().contains("500"));
    }
}
