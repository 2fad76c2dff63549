//! Drawings of results: small panels in a grid. They show bandwidth and times against tokens,
//! multiprocessors or ranks, or the distributions of times if there is one configuration.
//!
//! A panel shows one operation; further differences between points make more panels. Each file is a
//! series of its own. Results of the virtual GPU are drawn as interpreter times, never as a
//! bandwidth, and the title states it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Once;

use clap::ValueEnum;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use epoxide::internal::{JSON, read_text_file};
use epoxide_bench::figures::{self, Figures};
use epoxide_bench::results::{Key, Phase, PhaseName, Point, Results, Way, WayResult};

use super::{Args, Axis, Choice, What, check_path};
use crate::error::{CommandError, Result};

/// The text of every drawing: DejaVu Sans, cut down to the characters that are used
/// (font/README.md).
const FONT: &[u8] = include_bytes!("../font/DejaVuSans-subset.ttf");
const FAMILY: &str = "sans-serif";

/// The width of a page's column, so that text keeps its size.
const WIDTH: u32 = 960;
const MARGIN: u32 = 18;
/// Sizes of the text: title, the text below it, and panels.
const TITLE_SIZE: u32 = 22;
const TEXT_SIZE: u32 = 15;
const LINE_HEIGHT: u32 = 23;
/// Most points in a drawing of distributions: more lines cannot be distinguished.
const MOST_DISTRIBUTIONS: usize = 8;
/// Files, and measurements of the same thing in a file, that may be series: the legend names each.
const MOST_LABELS: usize = 200;
/// Panels of a drawing; a bitmap of them takes 200 MB.
const MOST_PANELS: usize = 1000;
/// Longest time that is drawn, in microseconds: ten years. Results with a longer one are damaged.
const LONGEST_US: f64 = 3.2e14;

/// Results of one file, and what to call them.
pub struct File {
    /// The name in the legend.
    pub label: String,
    /// The measured points.
    pub points: Vec<Point>,
}

impl Axis {
    const ALL: [Axis; 5] = [Axis::Tokens, Axis::Sms, Axis::Ranks, Axis::Nodes, Axis::RdmaSend];

    fn of(self, key: &Key) -> u32 {
        match self {
            Axis::Sms => key.num_sms,
            Axis::Tokens => key.tokens,
            Axis::Ranks => key.num_ranks,
            Axis::Nodes => key.nodes,
            Axis::RdmaSend => key.rdma_send.unwrap_or(0),
        }
    }

    fn flag(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn label(self) -> &'static str {
        match self {
            Axis::Sms => "multiprocessors (SMs)",
            Axis::Tokens => "tokens per rank",
            Axis::Ranks => "ranks",
            Axis::Nodes => "nodes",
            Axis::RdmaSend => "rows of a put between nodes",
        }
    }
}

/// Names the sizes and settings of a point for people, part by part. Parts that all points share go
/// below the title, the rest into the titles of panels.
fn parts(key: &Key, axis: Option<Axis>) -> Vec<String> {
    let per_node = key.num_ranks / key.nodes.max(1);
    let unless = |of: Axis, text: Option<String>| text.filter(|_| axis != Some(of));
    let ranks = match (key.nodes, axis) {
        (1, Some(Axis::Nodes)) | (2.., _) => format!("{per_node} ranks a node"),
        _ => format!("{per_node} ranks"),
    };
    let parts = [
        unless(Axis::Nodes, (key.nodes > 1).then(|| format!("{} nodes", key.nodes))),
        unless(Axis::Ranks, Some(ranks)),
        unless(Axis::Tokens, Some(format!("{} tokens", key.tokens))),
        unless(Axis::Sms, Some(format!("{} SMs", key.num_sms))),
        key.network(true, true),
        unless(Axis::RdmaSend, key.rdma_send.map(|rows| format!("{rows} rows a put"))),
        Some(format!("hidden {}", key.hidden)),
        Some(format!("top-{} of {}", key.topk, key.experts)),
        Some(format!("seed {:#x}", key.seed)),
        (key.masked > 0.0).then(|| format!("{} masked", key.masked)),
        key.combine_dtype.as_ref().map(|dtype| format!("combine in {}", dtype.to_uppercase())),
        key.combine_rows.as_ref().map(|rows| format!("combine {rows}")),
        key.rows_by_expert.map(|alignment| format!("rows by expert, aligned to {alignment}")),
        key.quantised.map(|_| "quantised on the way".to_owned()),
        key.chunk_tokens.map(|tokens| format!("chunks of {tokens}")),
        key.packet_tokens.map(|tokens| format!("packets up to {tokens} tokens")),
        key.max_tokens.map(|tokens| format!("buffers for {tokens} tokens")),
        key.between_us.map(|us| format!("{us} us between calls")),
    ];
    parts.map(Option::unwrap_or_default).into()
}

/// The parts of a text that there are.
fn listed(parts: impl IntoIterator<Item = String>) -> String {
    let parts = parts.into_iter().filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join(", ")
}

/// One drawing in the grid.
struct Panel {
    title: String,
    x_label: String,
    y_label: String,
    /// Positions and texts of the x axis's labels.
    ticks: Vec<(f64, String)>,
    x_range: (f64, f64),
    y_ticks: Vec<(f64, String)>,
    y_range: (f64, f64),
    mark: Mark,
    series: Vec<Series>,
}

/// How points are drawn.
#[derive(Clone, Copy, PartialEq)]
enum Mark {
    /// A line alone.
    Line,
    /// A line with a dot on each point.
    Dots,
    /// Bars, so wide in units of the x axis, with their values.
    Bars(f64),
}

struct Series {
    style: Style,
    points: Vec<(f64, f64)>,
}

#[derive(Clone, Copy, PartialEq)]
struct Style {
    color: RGBColor,
    dashed: bool,
}

/// All panels, and what they have in common.
struct Drawing {
    title: String,
    subtitle: String,
    legend: Vec<(String, Style)>,
    columns: usize,
    panels: Vec<Panel>,
}

const BLUE_: RGBColor = RGBColor(0x1f, 0x5f, 0xb4);
const GREEN_: RGBColor = RGBColor(0x2a, 0x8c, 0x3c);
const ORANGE: RGBColor = RGBColor(0xd9, 0x6a, 0x0b);
const PURPLE: RGBColor = RGBColor(0x86, 0x4c, 0xb0);
const GREY: RGBColor = RGBColor(0x70, 0x70, 0x70);
/// Colors of files.
const COLORS: [RGBColor; 8] = [
    BLUE_,
    ORANGE,
    GREEN_,
    PURPLE,
    RGBColor(0xb8, 0x2e, 0x2e),
    RGBColor(0x1a, 0x93, 0xa0),
    RGBColor(0xa0, 0x7a, 0x10),
    RGBColor(0x30, 0x30, 0x30),
];

/// Draws stored results, or a file of figures.
pub fn run(args: &Args) -> Result<()> {
    let mut files = Vec::new();
    if let [path] = &args.files[..] {
        let text = read_text_file(path, JSON);
        let figures = text.map_err(|error| error.to_string()).and_then(|text| Figures::of_text(&text));
        let wrong = |why: String| CommandError::usage(format!("{}: {why}", path.display()));
        if let Some(figures) = figures.map_err(wrong)? {
            check_path(&args.out)?;
            return Drawing::of_figures(&figures).map_err(wrong)?.save(&args.out);
        }
    }
    for path in &args.files {
        let label =
            path.file_stem().map_or_else(|| path.display().to_string(), |stem| stem.to_string_lossy().into());
        files.push(File { label, points: Results::read(path)?.points });
    }
    // Files of one name in different folders.
    let mut named: HashMap<String, usize> = HashMap::new();
    files.iter().for_each(|file| *named.entry(file.label.clone()).or_default() += 1);
    for (file, path) in files.iter_mut().zip(&args.files) {
        if named.get(&file.label).is_some_and(|count| *count > 1) {
            file.label = path.display().to_string();
        }
    }
    draw(&files, &args.choice, &args.out)
}

/// Draws the points of one run to a file.
pub fn draw_points(points: &[Point], path: &Path) -> Result<()> {
    let file = File { label: String::new(), points: points.to_vec() };
    draw(&[file], &Choice::default(), path)
}

/// Draws files to a file.
pub fn draw(files: &[File], choice: &Choice, path: &Path) -> Result<()> {
    check_path(path)?;
    let drawing = Drawing::new(files, choice).map_err(|why| CommandError::usage(format!("plot: {why}")))?;
    drawing.save(path)
}

/// Registers the font of the program, once.
fn register() {
    static REGISTER: Once = Once::new();
    REGISTER.call_once(|| {
        // The file is part of the program; a test draws with it.
        let _ = register_font(FAMILY, FontStyle::Normal, FONT);
    });
}

/// A point and where it comes from: the file, and which of the file's points of the same kind it
/// is.
#[derive(Clone, Copy)]
struct Source<'a> {
    point: &'a Point,
    entry: usize,
}

/// A thing with a color of its own if there is more than one: a file, or the n-th measurement of
/// the same thing in it.
fn sources(files: &[File]) -> (Vec<String>, Vec<Source<'_>>) {
    let (mut labels, mut sources): (Vec<String>, Vec<Source<'_>>) = (Vec::new(), Vec::new());
    for file in files {
        let first = labels.len();
        let mut seen: HashMap<String, usize> = HashMap::new();
        for point in &file.points {
            // The key's text has every compared field.
            let count = seen.entry(format!("{:?}", point.key)).or_default();
            let again = *count;
            *count += 1;
            while labels.len() <= first + again {
                let nth = labels.len() - first;
                labels.push(if nth == 0 {
                    file.label.clone()
                } else {
                    format!("{} ({})", file.label, nth + 1).trim().into()
                });
            }
            sources.push(Source { point, entry: first + again });
        }
    }
    (labels, sources)
}

/// The subject of a panel.
struct Operation {
    name: &'static str,
    /// The lines of each file, and what legends call them.
    lines: Vec<(&'static str, Line)>,
    /// The phase that other ways and the links are held against; missing: pairs.
    phase: Option<PhaseName>,
}

/// The figure of a point.
#[derive(Clone, Copy)]
enum Line {
    /// Calls of a phase, the mean over ranks.
    Calls(PhaseName),
    /// The median of the slowest rank's calls of a phase, or of pairs.
    Median(Option<PhaseName>),
    /// The 99th percentile of the same.
    Tail(Option<PhaseName>),
}

impl Line {
    fn of(self, point: &Point, metric: Metric) -> Option<f64> {
        let slowest = |name: Option<PhaseName>| match name {
            Some(name) => point.phase(name)?.slowest.as_ref(),
            None => point.pair.as_ref().map(|pair| &pair.period),
        };
        match self {
            Line::Calls(name) => metric.of(point.phase(name)?),
            _ if metric != Metric::Time => None,
            Line::Median(name) => Some(slowest(name)?.p50_us),
            Line::Tail(name) => Some(slowest(name)?.p99_us),
        }
    }
}

/// Operations that get panels for the points of one mode: pairs as well, if they were measured.
fn operations(points: &[Source<'_>]) -> std::result::Result<Vec<Operation>, String> {
    use PhaseName::{CombineInPool, CombineStaged, DispatchCached, DispatchUncached};
    let is_low_latency = |source: &Source<'_>| source.point.is_low_latency();
    if points.iter().any(is_low_latency) {
        if !points.iter().all(is_low_latency) {
            return Err("some results are of low latency and others are not: draw results of one mode".into());
        }
        let [dispatch, combine] = PhaseName::LOW_LATENCY.map(Some);
        let operations = [("dispatch", dispatch), ("combine", combine), ("pair", None)];
        return Ok(operations
            .map(|(name, phase)| {
                let lines = vec![("median", Line::Median(phase)), (TAIL, Line::Tail(phase))];
                Operation { name, lines, phase }
            })
            .into());
    }
    let operation = |name, [first, second]: [(&'static str, PhaseName); 2]| {
        let lines = [first, second].map(|(text, phase)| (text, Line::Calls(phase)));
        Operation { name, lines: lines.into(), phase: Some(first.1) }
    };
    let mut operations = vec![
        operation("dispatch", [("cached", DispatchCached), ("uncached", DispatchUncached)]),
        operation("combine", [("in pool", CombineInPool), ("staged", CombineStaged)]),
    ];
    if points.iter().any(|source| source.point.pair.is_some()) {
        let lines = vec![("cached, in pool", Line::Median(None))];
        operations.push(Operation { name: "pair", lines, phase: None });
    }
    Ok(operations)
}

/// The figure of another way for an operation.
fn of_way(point: &Point, way: Way, operation: &Operation, metric: Metric) -> Option<f64> {
    let result = point.baselines.iter().find(|result| result.way == way)?;
    match operation.phase {
        Some(name) => metric.of(result.phase(name)?),
        None => Some(result.pair.period.p50_us).filter(|_| metric == Metric::Time),
    }
}

/// Baselines measured beside the points of each label: the label's number, and the way.
fn baselines(sources: &[Source<'_>]) -> BTreeSet<(usize, Way)> {
    let mut ways = BTreeSet::new();
    for Source { point, entry } in sources {
        ways.extend(point.baselines.iter().map(|result| (*entry, result.way)));
    }
    ways
}

/// The drawn figures of a phase at a point.
#[derive(Clone, Copy, PartialEq)]
enum Metric {
    Bandwidth,
    Time,
}

impl Metric {
    fn of(self, phase: &Phase) -> Option<f64> {
        match self {
            Metric::Time => Some(phase.call.median_us),
            Metric::Bandwidth => phase.bandwidth.as_ref().map(|bandwidth| bandwidth.links),
        }
    }

    fn ceiling(self, point: &Point, name: PhaseName) -> Option<f64> {
        match self {
            Metric::Time => None,
            Metric::Bandwidth => point.phase(name)?.bandwidth.as_ref()?.link_ceiling,
        }
    }
}

impl Drawing {
    fn new(files: &[File], choice: &Choice) -> std::result::Result<Drawing, String> {
        let (labels, sources) = sources(files);
        check_times(&sources)?;
        if labels.len() > MOST_LABELS {
            return Err(format!(
                "{} files or measurements of the same thing are too many for a legend; at most {MOST_LABELS}: draw \
                 fewer files",
                labels.len()
            ));
        }
        let keys = || sources.iter().map(|source| &source.point.key);
        let values = |axis: Axis| keys().map(|key| axis.of(key)).collect::<BTreeSet<u32>>();
        let longest = || {
            let axes = Axis::ALL.into_iter().filter(|axis| values(*axis).len() > 1);
            // Among axes with equally many values, the first.
            axes.rev().max_by_key(|axis| values(*axis).len())
        };
        if let Some((axis, only)) = choice.x.and_then(|axis| Some((axis, single(&values(axis))?))) {
            return Err(format!("--x {}: every point has {only}; an axis needs two values", axis.flag()));
        }
        let axis = choice.x.or_else(longest);
        let is_virtual = sources.iter().any(|source| source.point.is_virtual);
        let mut phases = sources.iter().flat_map(|source| &source.point.phases);
        let has_bandwidth = phases.any(|phase| phase.bandwidth.is_some());
        let mut metrics = match choice.what {
            What::Auto if axis == Some(Axis::Tokens) => vec![Metric::Time, Metric::Bandwidth],
            What::Auto if has_bandwidth => vec![Metric::Bandwidth],
            What::Auto | What::Latency => vec![Metric::Time],
            What::Bandwidth => vec![Metric::Bandwidth],
            What::Distribution => Vec::new(),
        };
        metrics.retain(|metric| *metric == Metric::Time || has_bandwidth);
        let of_times = match (choice.what, axis) {
            (What::Distribution, _) | (What::Auto, None) => true,
            (_, None) => return Err(
                "there is one configuration, so nothing to draw against; --what distribution draws its times"
                    .into(),
            ),
            _ => false,
        };
        if metrics.is_empty() && !of_times {
            return Err("these results have no bandwidth: times of the virtual GPU are an interpreter's; --what latency draws them".into());
        }
        let mut drawing = Drawing {
            title: title(&sources),
            subtitle: String::new(),
            legend: Vec::new(),
            columns: 1,
            panels: Vec::new(),
        };
        if of_times {
            drawing.distributions(&labels, &sources)?;
        } else if let Some(axis) = axis {
            drawing.against(axis, &metrics, &labels, &sources)?;
        }
        let kernels: BTreeSet<String> = sources.iter().map(|source| source.point.kernels_text()).collect();
        let kernels: Vec<String> = kernels.into_iter().collect();
        drawing.subtitle += &match &kernels[..] {
            [one] => format!(", kernels: {one}"),
            several => format!(", kernels: {} different ones", several.len()),
        };
        if is_virtual {
            for label in drawing.panels.iter_mut().flat_map(|panel| [&mut panel.x_label, &mut panel.y_label])
            {
                *label = label.replace(", us", ", interpreter us");
            }
        }
        Ok(drawing)
    }

    /// Panels over an axis: a column for each operation and type of rows, a row for each other
    /// difference.
    fn against(
        &mut self,
        axis: Axis,
        metrics: &[Metric],
        labels: &[String],
        sources: &[Source<'_>],
    ) -> std::result::Result<(), String> {
        let of = |source: &Source<'_>| parts(&source.point.key, Some(axis));
        let (common, differing) = split(&sources.iter().map(of).collect::<Vec<_>>());
        let dtypes: BTreeSet<&str> = sources.iter().map(|source| source.point.key.dtype.as_str()).collect();
        self.subtitle = common;
        if let Some(dtype) = single(&dtypes) {
            self.subtitle += &format!(", dispatch in {}", dtype.to_uppercase());
        }
        let rest = |source: &Source<'_>| {
            let parts = of(source);
            listed(differing.iter().map(|&at| parts[at].clone()))
        };
        // In the order of the numbers, not of their texts.
        let mut sorted: Vec<&Source<'_>> = sources.iter().collect();
        let numbers =
            |key: &Key| (key.nodes, key.num_ranks, key.tokens, key.num_sms, key.rdma_send, key.hidden);
        sorted.sort_by_key(|source| numbers(&source.point.key));
        let mut known: BTreeSet<String> = BTreeSet::new();
        let mut rests: Vec<String> = sorted.into_iter().map(rest).collect();
        rests.retain(|rest| known.insert(rest.clone()));
        // The points of each panel, in their given order.
        let mut groups: BTreeMap<(String, &str), Vec<Source<'_>>> = BTreeMap::new();
        for source in sources {
            groups.entry((rest(source), source.point.key.dtype.as_str())).or_default().push(*source);
        }
        let mut ticks: Vec<u32> = sources.iter().map(|source| axis.of(&source.point.key)).collect();
        ticks.sort_unstable();
        ticks.dedup();
        let operations = operations(sources)?;
        // The time of a combine does not depend on the type of dispatched rows, but that of a pair
        // does.
        let kinds: Vec<(usize, &str)> = operations
            .iter()
            .enumerate()
            .flat_map(|(at, operation)| {
                let types = if operation.name == "combine" { 1 } else { dtypes.len() };
                dtypes.iter().take(types).map(move |dtype| (at, *dtype))
            })
            .collect();
        let mut ceiling = false;
        let drawn = baselines(sources);
        let count = metrics.len() * rests.len() * kinds.len();
        if count > MOST_PANELS {
            return Err(format!(
                "{count} panels are too many for a drawing; at most {MOST_PANELS}: --x chooses another axis, and files \
                 with fewer configurations have fewer"
            ));
        }
        for &metric in metrics {
            let mut panels = Vec::new();
            for rest_of in &rests {
                for &(number, dtype) in &kinds {
                    let members: &[Source<'_>] =
                        groups.get(&(rest_of.clone(), dtype)).map_or(&[], Vec::as_slice);
                    let operation = &operations[number];
                    let name = operation.name;
                    let typed = match name {
                        "dispatch" | "pair" if dtypes.len() > 1 => format!(" {}", dtype.to_uppercase()),
                        _ => String::new(),
                    };
                    let title = listed([format!("{name}{typed}"), rest_of.clone()]);
                    let y_label = match metric {
                        Metric::Time => "median call, us",
                        Metric::Bandwidth => "over the links, GB/s",
                    };
                    let mut panel = Panel::over(title, axis.label(), y_label, &ticks);
                    let place = |point: &Point| ticks.binary_search(&axis.of(&point.key)).unwrap_or(0) as f64;
                    let mut add = |style: Style,
                                   entry: Option<usize>,
                                   value: &dyn Fn(&Point) -> Option<f64>| {
                        let members =
                            members.iter().filter(|source| entry.is_none_or(|entry| source.entry == entry));
                        let mut line: Vec<(f64, f64)> = members
                            .filter_map(|source| Some((place(source.point), value(source.point)?)))
                            .collect();
                        line.sort_by(|a, b| a.0.total_cmp(&b.0));
                        if entry.is_none() {
                            line.dedup_by(|a, b| a.0 == b.0);
                        }
                        let any = !line.is_empty();
                        if any {
                            panel.series.push(Series { style, points: line });
                        }
                        any
                    };
                    for (second, (text, line)) in operation.lines.iter().enumerate() {
                        for entry in 0..labels.len() {
                            let style = style(number, second, text, entry, labels.len());
                            add(style, Some(entry), &|point| line.of(point, metric));
                        }
                    }
                    for (nth, &(entry, way)) in drawn.iter().enumerate() {
                        add(way_style(labels.len(), nth), Some(entry), &|point| {
                            of_way(point, way, operation, metric)
                        });
                    }
                    // One for all: the links' bandwidth does not depend on the file.
                    ceiling |= add(CEILING, None, &|point| metric.ceiling(point, operation.phase?));
                    if !panel.series.is_empty() {
                        panels.push(panel);
                    }
                }
            }
            share_y(&mut panels, (metric == Metric::Time).then_some(12.0));
            self.panels.extend(panels);
        }
        if !drawn.is_empty() && metrics.contains(&Metric::Time) {
            let ratios = ratios(&operations, axis, &ticks, labels.len(), sources);
            self.panels.extend(ratios);
        }
        self.columns = match (kinds.len(), rests.len()) {
            (2, 5..) => 4,
            (kinds, _) => kinds,
        };
        self.legend = legend(labels, &operations, ceiling);
        self.legend.extend(drawn.iter().enumerate().map(|(nth, &(entry, way))| {
            let of = if labels.len() > 1 { labels[entry].clone() } else { String::new() };
            let label = listed([of, way.text().into()]);
            (label, way_style(labels.len(), nth))
        }));
        Ok(())
    }

    /// Cumulative share of the iterations over their time: a panel for each phase, a line for each
    /// file.
    fn distributions(
        &mut self,
        labels: &[String],
        sources: &[Source<'_>],
    ) -> std::result::Result<(), String> {
        let sampled: Vec<&Source<'_>> = sources
            .iter()
            .filter(|source| source.point.phases.iter().any(|phase| phase.call.samples_us.len() > 1))
            .collect();
        if sampled.is_empty() {
            return Err("these results hold no samples, so there is nothing of that kind to draw".into());
        }
        if sampled.len() > MOST_DISTRIBUTIONS {
            let (have, most) = (sampled.len(), MOST_DISTRIBUTIONS);
            return Err(format!("{have} points are too many to draw the distributions of; at most {most}"));
        }
        let (common, differing) =
            split(&sampled.iter().map(|source| parts(&source.point.key, None)).collect::<Vec<_>>());
        self.subtitle = common;
        let label = |source: &Source<'_>| {
            let parts = parts(&source.point.key, None);
            let own = differing.iter().map(|&at| parts[at].clone());
            let dtype = source.point.key.dtype.to_uppercase();
            listed([labels[source.entry].clone(), dtype].into_iter().chain(own))
        };
        let mut ways: Vec<(String, &WayResult)> = Vec::new();
        for source in &sampled {
            for result in &source.point.baselines {
                ways.push((format!("{}, {}", label(source), result.way.text()), result));
            }
        }
        for name in PhaseName::all() {
            let title = name.text().into();
            let quarters = (0..=4).map(|quarter| 25 * quarter);
            let mut panel = Panel {
                x_range: (f64::MAX, 0.0),
                y_ticks: quarters.map(|share| (f64::from(share), format!("{share}%"))).collect(),
                y_range: (0.0, 104.0),
                mark: Mark::Line,
                ..Panel::over(title, "time of a call, us", "share of the calls", &[""; 0])
            };
            let own = sampled.iter().enumerate().map(|(at, source)| (at, source.point.phase(name)));
            let others =
                ways.iter().enumerate().map(|(nth, (_, result))| (sampled.len() + nth, result.phase(name)));
            for (at, phase) in own.chain(others) {
                let Some(phase) = phase else { continue };
                let mut samples = phase.call.samples_us.clone();
                samples.sort_by(f64::total_cmp);
                let step = 100.0 / samples.len() as f64;
                let both = |(i, &us): (usize, &f64)| [(us, step * i as f64), (us, step * (i + 1) as f64)];
                panel.x_range.0 = samples.iter().copied().fold(panel.x_range.0, f64::min);
                panel.x_range.1 = samples.iter().copied().fold(panel.x_range.1, f64::max);
                let points = samples.iter().enumerate().flat_map(both).collect();
                panel.series.push(Series { style: solid(at), points });
            }
            if panel.series.is_empty() {
                continue;
            }
            let (low, high) = panel.x_range;
            let margin = ((high - low) * 0.05).max(high * 0.01);
            panel.x_range = with_width(((low - margin).max(0.0), high + margin));
            panel.ticks = round_ticks(panel.x_range, 5);
            self.panels.push(panel);
        }
        self.columns = 2;
        let labels =
            sampled.iter().map(|source| label(source)).chain(ways.iter().map(|(label, _)| label.clone()));
        self.legend = labels.enumerate().map(|(at, label)| (label, solid(at))).collect();
        Ok(())
    }
}

/// The only value, if there is only one.
fn single<T: Clone + Ord>(values: &BTreeSet<T>) -> Option<T> {
    if values.len() == 1 { values.first().cloned() } else { None }
}

/// The parts that all lists have in common, and the indices of the others.
fn split(lists: &[Vec<String>]) -> (String, Vec<usize>) {
    let Some(first) = lists.first() else { return (String::new(), Vec::new()) };
    let (same, differing): (Vec<usize>, Vec<usize>) =
        (0..first.len()).partition(|&at| lists.iter().all(|list| list[at] == first[at]));
    (listed(same.into_iter().map(|at| first[at].clone())), differing)
}

const CEILING: Style = Style { color: GREY, dashed: true };

/// The line of so manieth color.
fn solid(nth: usize) -> Style {
    Style { color: COLORS[nth % COLORS.len()], dashed: false }
}

/// The name of a 99th percentile, whose line is dashed and has the color of its median.
const TAIL: &str = "99th percentile";

/// In a drawing of one file each phase has a color. With several, each file has a color, and the
/// second line of an operation is dashed.
fn style(operation: usize, second: usize, text: &str, entry: usize, entries: usize) -> Style {
    const OF_PHASES: [[RGBColor; 2]; 3] = [[BLUE_, ORANGE], [GREEN_, PURPLE], [COLORS[7], COLORS[7]]];
    match (entries, text) {
        (1, TAIL) => Style { color: OF_PHASES[operation][0], dashed: true },
        (1, _) => Style { color: OF_PHASES[operation][second], dashed: false },
        _ => Style { color: COLORS[entry % COLORS.len()], dashed: second == 1 },
    }
}

/// For each operation the time of epoxide's fastest way over that of NCCL's fastest: panels from 0,
/// so that lengths compare.
fn ratios(
    operations: &[Operation],
    axis: Axis,
    ticks: &[u32],
    entries: usize,
    sources: &[Source<'_>],
) -> Vec<Panel> {
    let panel = |(step, operation): (usize, &Operation)| {
        let lines = (0..entries).map(|entry| {
            let of_entry = sources.iter().filter(|source| source.entry == entry);
            let place = |point: &Point| ticks.binary_search(&axis.of(&point.key)).unwrap_or(0) as f64;
            let ratio = |source: &Source<'_>| Some((place(source.point), source.point.ratio(step)?));
            let mut points: Vec<(f64, f64)> = of_entry.filter_map(ratio).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let color = if entries == 1 { BLACK } else { COLORS[entry % COLORS.len()] };
            Series { style: Style { color, dashed: false }, points }
        });
        ratio_panel(operation.name, axis.label(), ticks, lines.collect())
    };
    operations.iter().enumerate().map(panel).collect()
}

/// A panel of ratios, with a line at 1.
fn ratio_panel(name: &str, x_label: &str, ticks: &[impl ToString], mut series: Vec<Series>) -> Panel {
    let highest = series.iter().flat_map(|series| &series.points).map(|point| point.1).fold(1.0, f64::max);
    let (left, right) = x_range(ticks.len());
    series.push(Series { style: CEILING, points: vec![(left, 1.0), (right, 1.0)] });
    let y_range = (0.0, highest * 1.08);
    let title = format!("{name}: epoxide / others");
    let y_ticks = round_ticks(y_range, 5);
    Panel { y_ticks, y_range, series, ..Panel::over(title, x_label, "ratio of the fastest", ticks) }
}

/// A color that none of so many labels has, as long as there are any.
fn way_style(labels: usize, nth: usize) -> Style {
    // A single label takes four, one a phase.
    let taken = if labels == 1 { 4 } else { labels };
    solid(taken + nth)
}

fn legend(labels: &[String], operations: &[Operation], ceiling: bool) -> Vec<(String, Style)> {
    let mut legend = Vec::new();
    if labels.len() == 1 {
        for (at, operation) in operations.iter().enumerate() {
            for (second, (text, _)) in operation.lines.iter().enumerate() {
                legend.push((format!("{} {text}", operation.name), style(at, second, text, 0, 1)));
            }
        }
    } else {
        for (entry, label) in labels.iter().enumerate() {
            legend.push((label.clone(), style(0, 0, "", entry, labels.len())));
        }
        for (second, dashed) in [(0, false), (1, true)] {
            let mut texts: Vec<&str> =
                operations.iter().filter_map(|operation| Some(operation.lines.get(second)?.0)).collect();
            texts.dedup();
            // Pairs are of the first lines of both.
            texts.retain(|text| *text != "cached, in pool");
            legend.push((texts.join(", "), Style { color: BLACK, dashed }));
        }
    }
    if ceiling {
        legend.push(("link ceiling".into(), CEILING));
    }
    legend
}

fn title(sources: &[Source<'_>]) -> String {
    let points = || sources.iter().map(|source| source.point);
    if let Some(point) = points().find(|point| point.is_virtual) {
        return format!("epoxide on the {}", point.caveat());
    }
    let dates: BTreeSet<&str> = points().map(|point| point.date.as_str()).collect();
    let devices: BTreeSet<&str> = points().map(|point| point.device.as_str()).collect();
    let devices: Vec<&str> = devices.into_iter().collect();
    let when = match (dates.first(), dates.last()) {
        (Some(from), Some(to)) if from != to => format!("{from} to {to}"),
        (from, _) => from.copied().unwrap_or("").to_owned(),
    };
    format!("epoxide, {}, {when}", devices.join(" and "))
}

/// Gives all panels of a kind the same y axis, so that they can be compared. It starts from 0, or
/// is logarithmic if times differ by more than this factor.
fn share_y(panels: &mut [Panel], most_by_length: Option<f64>) {
    let all = || {
        panels.iter().flat_map(|panel| &panel.series).flat_map(|series| &series.points).map(|point| point.1)
    };
    let (low, high) = (all().fold(f64::MAX, f64::min), all().fold(0.0, f64::max));
    let by_factors = low > 0.0 && most_by_length.is_some_and(|most| high > most * low);
    let (range, ticks) = if by_factors {
        let range = (low.log10() - 0.08, high.log10() + 0.08);
        let decades = (range.0.floor() as i32)..=(range.1.ceil() as i32);
        let ticks = decades.flat_map(|decade| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(decade)));
        let ticks: Vec<(f64, String)> = ticks.map(|tick| (tick.log10(), number(tick))).collect();
        (range, ticks.into_iter().filter(|(at, _)| range.0 <= *at && *at <= range.1).collect())
    } else {
        let range = with_width((0.0, high * 1.08));
        (range, round_ticks(range, 6))
    };
    for panel in panels {
        (panel.y_range, panel.y_ticks) = (range, ticks.clone());
        if by_factors {
            panel
                .series
                .iter_mut()
                .flat_map(|series| &mut series.points)
                .for_each(|point| point.1 = point.1.log10());
        }
    }
}

/// Rejects times that no clock has measured, and that no axis has room for.
fn check_times(sources: &[Source<'_>]) -> std::result::Result<(), String> {
    for Source { point, .. } in sources {
        let phases = PhaseName::all().flat_map(|name| {
            let own = point.phase(name).into_iter();
            own.chain(point.baselines.iter().filter_map(move |result| result.phase(name)))
        });
        for phase in phases {
            let bandwidth = phase.bandwidth.as_ref();
            let times = phase.call.samples_us.iter().chain([&phase.call.median_us]);
            let figures = bandwidth.map(|bandwidth| bandwidth.links).into_iter();
            let figures = figures.chain(bandwidth.and_then(|bandwidth| bandwidth.link_ceiling));
            let wrong = times.copied().chain(figures).find(|value| !(0.0..=LONGEST_US).contains(value));
            if let Some(wrong) = wrong {
                return Err(format!(
                    "{wrong} is no time in us and no bandwidth; the results are damaged, measure them again"
                ));
            }
        }
    }
    Ok(())
}

/// The range, or one of the same beginning with a width, where all that is drawn is 0.
fn with_width((low, high): (f64, f64)) -> (f64, f64) {
    if high - low > f64::MIN_POSITIVE { (low, high) } else { (low, low + 1.0) }
}

/// About so many round numbers within a range that has a width.
fn round_ticks(range: (f64, f64), about: u32) -> Vec<(f64, String)> {
    let rough = (range.1 - range.0) / f64::from(about);
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * decade).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    let first = (range.0 / step).ceil() as i64;
    // Their number is bounded for any range.
    let at = (first..).map(|n| n as f64 * step).take(4 * about as usize).take_while(|at| *at <= range.1);
    at.map(|at| (at, if step < 1.0 { format!("{at:.2}") } else { number(at) })).collect()
}

fn number(value: f64) -> String {
    let digits = if value >= 1.0 || value == 0.0 { 0 } else { 2 };
    format!("{value:.digits$}")
}

type Area<DB> = DrawingArea<DB, Shift>;

/// About as wide as a text is.
fn width_of(text: &str) -> u32 {
    text.chars().count() as u32 * TEXT_SIZE * 3 / 5
}

impl Drawing {
    fn save(&self, path: &Path) -> Result<()> {
        register();
        let size = self.size();
        let broken = |why: String| CommandError::failed(format!("{}: {why}", path.display()));
        match path.extension().is_some_and(|extension| extension == "svg") {
            true => self.paint(&SVGBackend::new(path, size).into_drawing_area()),
            false => self.paint(&BitMapBackend::new(path, size).into_drawing_area()),
        }
        .map_err(broken)
    }

    /// Draws figures in the style of their file.
    fn of_figures(figures: &Figures) -> std::result::Result<Drawing, String> {
        for (count, most, what) in
            [(figures.systems.len(), MOST_LABELS, "systems"), (figures.panels.len(), MOST_PANELS, "panels")]
        {
            if count > most {
                return Err(format!("{count} {what} are too many for a drawing; at most {most}"));
            }
        }
        let ours = figures.systems.iter().filter(|system| system.is_ours).count();
        let (mut first, mut others) = (0..ours, ours..);
        let colors = figures.systems.iter().map(|system| {
            let at = if system.is_ours { first.next() } else { others.next() };
            COLORS[at.unwrap_or(0) % COLORS.len()]
        });
        let colors: Vec<RGBColor> = colors.collect();
        let bars = figures.style == figures::Style::Bars;
        let panel = |of: &figures::Panel| {
            let width = 0.84 / of.lines.len().max(1) as f64;
            let series = of.lines.iter().enumerate().flat_map(|(nth, line)| {
                let offset = if bars { (nth as f64 + 0.5) * width - 0.42 } else { 0.0 };
                [(&line.us, false), (&line.p99_us, true)].map(|(values, dashed)| Series {
                    style: Style { color: colors[line.system], dashed },
                    points: values
                        .iter()
                        .enumerate()
                        .filter_map(|(at, us)| Some((at as f64 + offset, (*us)?)))
                        .collect(),
                })
            });
            let y_label = if bars { "us" } else { "median, us" };
            let mut panel = Panel::over(of.title.clone(), &figures.x_label, y_label, &of.x);
            panel.series = series.filter(|series| !series.points.is_empty()).collect();
            if bars {
                panel.x_range = (-0.5, of.x.len() as f64 - 0.5);
                panel.mark = Mark::Bars(width * 0.92);
            }
            panel
        };
        let mut panels: Vec<Panel> = figures.panels.iter().map(panel).collect();
        match bars {
            // Panels of bars are of different sizes.
            true => panels.iter_mut().for_each(|panel| share_y(std::slice::from_mut(panel), None)),
            false => share_y(&mut panels, Some(4.0)),
        }
        let columns = if bars { 1 } else { panels.len().min(3) };
        if figures.style == figures::Style::LinesAndRatios {
            panels.extend(figures.panels.iter().map(|of| {
                let ratio = |at: usize| {
                    let [ours, theirs] = [true, false].map(|ours| of.fastest(at, &figures.systems, ours));
                    Some((at as f64, ours? / theirs.filter(|us| *us > 0.0)?))
                };
                let points = (0..of.x.len()).filter_map(ratio).collect();
                let line = Series { style: Style { color: BLACK, dashed: false }, points };
                ratio_panel(&of.title, &figures.x_label, &of.x, vec![line])
            }));
        }
        let named = figures.systems.iter().zip(&colors).map(|(system, color)| {
            let label = format!("{} ({}, {})", system.name, system.version, system.date);
            (label, Style { color: *color, dashed: false })
        });
        let mut legend: Vec<(String, Style)> = named.collect();
        if figures.panels.iter().flat_map(|panel| &panel.lines).any(|line| !line.p99_us.is_empty()) {
            legend.push((TAIL.into(), Style { color: BLACK, dashed: true }));
        }
        Ok(Drawing { title: figures.title.clone(), subtitle: figures.note.clone(), legend, columns, panels })
    }

    /// Text below the title cut into lines that fit.
    fn subtitle_lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for part in self.subtitle.split(", ").filter(|part| !part.is_empty()) {
            match lines.last_mut() {
                Some(line) if width_of(line) + width_of(part) + 2 * MARGIN < WIDTH => {
                    *line += &format!(", {part}")
                }
                _ => lines.push(part.to_owned()),
            }
        }
        lines
    }

    /// Positions of the legend's entries, in lines below each other.
    fn legend_places(&self) -> Vec<(u32, u32)> {
        let (mut x, mut line, mut places) = (MARGIN, 0, Vec::new());
        for (label, _) in &self.legend {
            let width = 34 + width_of(label) + 22;
            if x > MARGIN && x + width > WIDTH {
                (x, line) = (MARGIN, line + 1);
            }
            places.push((x, line));
            x += width;
        }
        places
    }

    fn head_height(&self) -> u32 {
        let legend = self.legend_places().last().map_or(0, |(_, line)| line + 1);
        46 + LINE_HEIGHT * (self.subtitle_lines().len() as u32 + legend) + 6
    }

    fn rows(&self) -> u32 {
        self.panels.len().div_ceil(self.columns.max(1)) as u32
    }

    fn size(&self) -> (u32, u32) {
        let height = match (self.columns, self.rows()) {
            (1, _) => 430,
            (2, ..=2) => 330,
            (2 | 3, _) => 275,
            _ => 240,
        };
        (WIDTH, self.head_height() + self.rows() * height + 6)
    }

    fn paint<DB: DrawingBackend>(&self, area: &Area<DB>) -> std::result::Result<(), String> {
        let text = |error: DrawingAreaErrorKind<DB::ErrorType>| error.to_string();
        area.fill(&WHITE).map_err(text)?;
        let (head, body) = area.split_vertically(self.head_height());
        let of_size = |size: u32| (FAMILY, size).into_font().color(&BLACK);
        let margin = MARGIN as i32;
        head.draw_text(&self.title, &of_size(TITLE_SIZE), (margin, 14)).map_err(text)?;
        let mut y = 46;
        for line in self.subtitle_lines() {
            head.draw_text(&line, &of_size(TEXT_SIZE), (margin, y)).map_err(text)?;
            y += LINE_HEIGHT as i32;
        }
        for ((x, line), (label, style)) in self.legend_places().into_iter().zip(&self.legend) {
            let (x, y) = (x as i32, y + (line * LINE_HEIGHT) as i32);
            let dash = if style.dashed { 10 } else { 26 };
            for from in if style.dashed { &[0, 16][..] } else { &[0] } {
                let line = [(x + from, y + 8), (x + from + dash, y + 8)];
                head.draw(&PathElement::new(line, style.color.stroke_width(3))).map_err(text)?;
            }
            head.draw_text(label, &of_size(TEXT_SIZE), (x + 34, y)).map_err(text)?;
        }
        let grid = body.split_evenly((self.rows() as usize, self.columns));
        for (area, panel) in grid.iter().zip(&self.panels) {
            panel.paint(area, self.columns).map_err(text)?;
        }
        area.present().map_err(text)
    }
}

/// An axis with labels at the given positions.
struct Ticked<'a> {
    range: (f64, f64),
    ticks: &'a [(f64, String)],
}

impl Ranged for Ticked<'_> {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let share = (value - self.range.0) / (self.range.1 - self.range.0);
        limit.0 + (share * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|(at, _)| *at).collect()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.0..self.range.1
    }
}

impl ValueFormatter<f64> for Ticked<'_> {
    fn format_ext(&self, value: &f64) -> String {
        self.ticks.iter().find(|(at, _)| at == value).map_or_else(String::new, |(_, text)| text.clone())
    }
}

/// The range of an axis with so many positions.
fn x_range(positions: usize) -> (f64, f64) {
    (-0.35, positions as f64 - 0.65)
}

impl Panel {
    /// A panel without lines over these positions.
    fn over(title: String, x_label: &str, y_label: &str, ticks: &[impl ToString]) -> Panel {
        Panel {
            title,
            x_label: x_label.into(),
            y_label: y_label.into(),
            ticks: ticks.iter().enumerate().map(|(at, tick)| (at as f64, tick.to_string())).collect(),
            x_range: x_range(ticks.len()),
            y_ticks: Vec::new(),
            y_range: (0.0, 0.0),
            mark: Mark::Dots,
            series: Vec::new(),
        }
    }

    fn paint<DB: DrawingBackend>(
        &self,
        area: &Area<DB>,
        columns: usize,
    ) -> std::result::Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
        // Labels that would touch each other are left out, every other one.
        let room = WIDTH as usize / columns - 90;
        let widest_of = |ticks: &[(f64, String)]| ticks.iter().map(|(_, text)| text.len()).max().unwrap_or(1);
        let widest = widest_of(&self.ticks);
        let every = (self.ticks.len() * (widest * 9 + 8)).div_ceil(room.max(1)).max(1);
        let ticks: Vec<(f64, String)> = self.ticks.iter().step_by(every).cloned().collect();
        let (text, caption) = if columns > 3 { (12, 13) } else { (14, 16) };
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, (FAMILY, caption))
            .margin(8)
            .margin_right(16)
            .x_label_area_size(if columns > 3 { 36 } else { 42 })
            .y_label_area_size(26 + 8 * widest_of(&self.y_ticks) as u32)
            .build_cartesian_2d(
                Ticked { range: self.x_range, ticks: &ticks },
                Ticked { range: self.y_range, ticks: &self.y_ticks },
            )?;
        chart
            .configure_mesh()
            .x_desc(&self.x_label)
            .y_desc(&self.y_label)
            .axis_desc_style((FAMILY, text))
            .label_style((FAMILY, text))
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
            .x_labels(ticks.len().max(1))
            .y_labels(self.y_ticks.len().max(1))
            .draw()?;
        for series in &self.series {
            if let Mark::Bars(width) = self.mark {
                let bars = series.points.iter().map(|&(x, y)| {
                    let corners = [(x - width / 2.0, 0.0), (x + width / 2.0, y)];
                    Rectangle::new(corners, series.style.color.filled())
                });
                chart.draw_series(bars)?;
                let font = (FAMILY, text).into_font().color(&BLACK);
                let values = series.points.iter().map(|&(x, y)| {
                    let value = if y < 100.0 { format!("{y:.1}") } else { number(y) };
                    // Above the bar, and centered.
                    let left = -(value.len() as i32) * text / 4;
                    EmptyElement::at((x, y)) + Text::new(value, (left, -text - 2), font.clone())
                });
                chart.draw_series(values)?;
                continue;
            }
            let style = series.style.color.stroke_width(2);
            let points = || series.points.iter().copied();
            match series.style.dashed {
                true => drop(chart.draw_series(DashedLineSeries::new(points(), 6, 4, style))?),
                false => drop(chart.draw_series(LineSeries::new(points(), style))?),
            }
            if self.mark == Mark::Dots && series.style != CEILING && !series.style.dashed {
                chart.draw_series(points().map(|at| Circle::new(at, 3, series.style.color.filled())))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::testing::h200 as measured;

    fn file(label: &str, points: Vec<Point>) -> File {
        File { label: label.into(), points }
    }

    /// Points of a sweep, from one that was measured.
    fn swept(tokens: &[u32], sms: &[u32]) -> Vec<Point> {
        let one = measured().remove(0);
        let point = |tokens: u32, sms: u32| {
            let mut point = one.clone();
            (point.key.tokens, point.key.num_sms) = (tokens, sms);
            point
        };
        tokens
            .iter()
            .flat_map(|&tokens| sms.iter().map(move |&sms| (tokens, sms)))
            .map(|(t, s)| point(t, s))
            .collect()
    }

    fn text_of(files: &[File], choice: &Choice) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.svg");
        draw(files, choice, &path).unwrap();
        std::fs::read_to_string(&path).unwrap()
    }

    #[test]
    fn drawings_have_axes_units_and_every_series() {
        let svg = text_of(&[file("h200", measured())], &Choice::default());
        for text in [
            "over the links, GB/s",
            "multiprocessors (SMs)",
            "dispatch cached",
            "dispatch uncached",
            "combine in pool",
            "combine staged",
            "dispatch BF16",
            "dispatch FP8",
            "link ceiling",
            "4096 tokens, hidden 7168, top-8 of 256",
            "dispatch BF16, 4 ranks",
            "combine, 8 ranks",
            "NVIDIA H200, 2026-11-20",
            "132",
        ] {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn low_latency_is_drawn_with_its_tails() {
        let line = "bench --mode low-latency --ranks-per-node 2 --hidden 64 --experts 4 --topk 2 --warmup 0 --iters 1 --graph=1";
        let mut plans = crate::bench::testing::parse(line).unwrap().plans().unwrap();
        plans.truncate(2);
        let points = crate::bench::start::measure_points(&plans, &()).unwrap().0;
        let drawing = Drawing::new(&[file("ll", points.clone())], &Choice::default()).unwrap();
        let titles: Vec<&str> = drawing.panels.iter().map(|panel| panel.title.as_str()).collect();
        assert_eq!(titles, ["dispatch", "combine", "pair"]);
        for panel in &drawing.panels {
            assert_eq!(
                panel.series.iter().map(|series| series.style.dashed).collect::<Vec<_>>(),
                [false, true]
            );
        }
        let svg = text_of(&[file("", points.clone())], &Choice::default());
        for text in
            ["pair 99th percentile", "tokens per rank", "VIRTUAL GPU", "kernels: PTX", "interpreter us"]
        {
            assert!(svg.contains(text), "{text}");
        }
        let mixed = [file("a", points.clone()), file("b", measured())];
        let error = Drawing::new(&mixed, &Choice::default()).map(drop).unwrap_err();
        assert!(error.contains("draw results of one mode"), "{error}");
    }

    #[test]
    fn committed_figures_are_drawn() {
        for (name, panels, texts) in [
            ("nccl-2xh200", 6, ["NCCL all-to-all (2.28.3, 2026-11-23)", "pair: epoxide / others"]),
            ("low-latency-2xh200", 3, ["99th percentile", "FlashInfer (0.7.2, 2026-11-23)"]),
            ("peers-h200", 2, ["DeepEP V1", "836"]),
        ] {
            let path = format!("{}/../benches/data/{name}.json", env!("CARGO_MANIFEST_DIR"));
            let figures = Figures::of_text(&std::fs::read_to_string(&path).unwrap()).unwrap().unwrap();
            let drawing = Drawing::of_figures(&figures).unwrap();
            assert_eq!(drawing.panels.len(), panels);
            let folder = tempfile::tempdir().unwrap();
            let out = folder.path().join("a.svg");
            drawing.save(&out).unwrap();
            let svg = std::fs::read_to_string(&out).unwrap();
            for text in texts.into_iter().chain(["not of this commit"]) {
                assert!(svg.contains(text), "{name}: {text}");
            }
            // Ratios lie on an axis from 0.
            let ratios = drawing.panels.iter().filter(|panel| panel.title.ends_with("/ others"));
            assert!(ratios.clone().all(|panel| panel.y_range.0 == 0.0), "{name}");
            assert_eq!(ratios.count(), if name == "nccl-2xh200" { 3 } else { 0 });
        }
    }

    #[test]
    fn two_files_of_one_configuration_are_two_series() {
        let points = || vec![swept(&[128, 256], &[8]), swept(&[128, 256], &[8])];
        let mut files: Vec<File> =
            points().into_iter().zip(["old", "new"]).map(|(points, label)| file(label, points)).collect();
        let drawing = Drawing::new(&files, &Choice::default()).unwrap();
        // Times and bandwidth of dispatch and combine; two phases of each file, and the ceiling.
        assert_eq!(drawing.panels.iter().map(|panel| panel.series.len()).collect::<Vec<_>>(), [4, 4, 5, 5]);
        let svg = text_of(&files, &Choice::default());
        for text in ["old", "new", "cached, in pool", "uncached, staged", "median call, us"] {
            assert!(svg.contains(text), "{text}");
        }
        // And so are two measurements in one file.
        let (second, first) = (files.pop().unwrap(), files.pop().unwrap());
        let both = file("both", [first.points, second.points].concat());
        let drawing = Drawing::new(&[both], &Choice::default()).unwrap();
        assert_eq!(
            drawing.legend[..2].iter().map(|(text, _)| text.as_str()).collect::<Vec<_>>(),
            ["both", "both (2)"]
        );
        assert_eq!(drawing.panels[0].series.len(), 4);
    }

    #[test]
    fn a_large_sweep_is_a_grid_of_panels_that_fits_a_page() {
        let points = swept(&[128, 256, 512, 1024, 2048, 4096], &[4, 8, 16, 24]);
        let choice = Choice { what: What::Latency, x: None };
        let drawing = Drawing::new(&[file("sweep", points)], &choice).unwrap();
        assert_eq!((drawing.columns, drawing.panels.len()), (2, 8));
        assert!(drawing.size().0 <= 960 && drawing.size().1 <= 1500, "{:?}", drawing.size());
        let titles: Vec<&str> = drawing.panels.iter().map(|panel| panel.title.as_str()).collect();
        assert_eq!(titles[..4], ["dispatch, 4 SMs", "combine, 4 SMs", "dispatch, 8 SMs", "combine, 8 SMs"]);
        // Every point is there, from left to right.
        for panel in &drawing.panels {
            for series in &panel.series {
                assert_eq!(
                    series.points.iter().map(|point| point.0).collect::<Vec<_>>(),
                    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
                );
            }
        }
    }

    #[test]
    fn samples_that_are_all_0_are_drawn() {
        let zero = |mut point: Point| {
            for phase in &mut point.phases {
                phase.call.samples_us = vec![0.0; 20];
                phase.call.median_us = 0.0;
                phase.bandwidth = None;
            }
            point.baselines.clear();
            point
        };
        let one = zero(measured().remove(0));
        for what in [What::Auto, What::Distribution] {
            let svg = text_of(&[file("zero", vec![one.clone()])], &Choice { x: None, what });
            assert!(svg.contains("share of the calls") && svg.len() < 1 << 20, "{}", svg.len());
        }
        let points = swept(&[128, 256], &[8]).into_iter().map(zero).collect();
        let svg = text_of(&[file("zero", points)], &Choice { x: None, what: What::Latency });
        assert!(svg.contains("median call, us") && svg.len() < 1 << 20);
        for range in [(0.0, 0.0), (5.0, 5.0), (0.0, f64::MIN_POSITIVE / 4.0), (1e14, 1e14)] {
            let ticks = round_ticks(with_width(range), 5);
            assert!((1..=20).contains(&ticks.len()), "{range:?}: {ticks:?}");
        }
    }

    #[test]
    fn times_that_no_clock_has_measured_are_refused() {
        for wrong in [-1.0, 1e300, f64::MAX, f64::INFINITY, f64::NAN] {
            let mut point = measured().remove(0);
            point.phases[0].call.samples_us = vec![1.0, wrong];
            let choice = Choice { x: None, what: What::Distribution };
            let error = Drawing::new(&[file("", vec![point])], &choice).map(|_| ()).unwrap_err();
            assert!(error.contains("measure them again"), "{error}");
        }
    }

    #[test]
    fn absurd_results_are_drawn_or_rejected() {
        let points = measured();
        let samples: Vec<Vec<u8>> = [&points[..1], &points[..2], &swept(&[1, 2], &[8])[..]]
            .map(|points| Results::new(points.to_vec()).json().unwrap().into_bytes())
            .to_vec();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.svg");
        epoxide_testing::fuzz::run("drawings", 300, &samples, |bytes| {
            let Ok(results) = Results::of_text(&String::from_utf8_lossy(bytes)) else { return };
            for what in [What::Auto, What::Latency, What::Distribution] {
                let files = [file("a", results.points.clone()), file("b", results.points.clone())];
                let _ = draw(&files, &Choice { x: None, what }, &path);
            }
        });
    }

    #[test]
    fn absurd_figures_are_drawn_or_rejected() {
        let samples = [
            include_str!("../../../../benches/data/peers-h200.json"),
            include_str!("../../../../benches/data/low-latency-2xh200.json"),
            include_str!("../../../../benches/data/nccl-2xh200.json"),
        ];
        let samples = samples.map(|text| text.as_bytes().to_vec());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.svg");
        epoxide_testing::fuzz::run("drawings of figures", 300, &samples, |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let Ok(Some(figures)) = Figures::of_text(&text) else { return };
            if let Ok(drawing) = Drawing::of_figures(&figures) {
                let _ = drawing.save(&path);
            }
        });
    }

    #[test]
    fn more_figures_than_a_drawing_has_room_for_are_refused() {
        let text = include_str!("../../../../benches/data/peers-h200.json");
        let figures = Figures::of_text(text).unwrap().unwrap();
        let panels = vec![figures.panels[0].clone(); MOST_PANELS + 1];
        let systems = vec![figures.systems[0].clone(); MOST_LABELS + 1];
        for (crowded, part) in [
            (Figures { panels, ..figures.clone() }, "1001 panels"),
            (Figures { systems, ..figures.clone() }, "201 systems"),
        ] {
            let error = Drawing::of_figures(&crowded).map(drop).unwrap_err();
            assert!(error.contains(part) && error.contains("at most"), "{error}");
        }
    }

    /// An algorithm of quadratic time would take minutes on these numbers.
    #[test]
    fn tens_of_thousands_of_points_and_series_are_drawn_or_refused_at_once() {
        let start = std::time::Instant::now();
        let of = |files: &[File], what| {
            Drawing::new(files, &Choice { x: None, what }).map(|drawing| drawing.panels.len())
        };
        let light = |mut points: Vec<Point>| {
            points
                .iter_mut()
                .flat_map(|point| &mut point.phases)
                .for_each(|phase| phase.call.samples_us.clear());
            points
        };
        // Points of one line.
        let tokens: Vec<u32> = (1..=20_000).collect();
        assert_eq!(of(&[file("long", light(swept(&tokens, &[8])))], What::Latency), Ok(2));
        // The same thing over and over: each a series.
        let again = vec![light(measured()).remove(0); 50_000];
        let error = of(&[file("again", again)], What::Latency).unwrap_err();
        assert!(error.contains("50000 files or measurements of the same thing"), "{error}");
        // Panels.
        let sms: Vec<u32> = (1..=20_000).collect();
        let points: Vec<Point> = swept(&[1], &sms)
            .into_iter()
            .zip(1..)
            .map(|(mut point, seed)| {
                point.key.seed = seed;
                point
            })
            .collect();
        let error = of(&[file("panels", points)], What::Latency).unwrap_err();
        assert!(error.contains("40000 panels") && error.contains("--x chooses"), "{error}");
        // Files.
        let points = light(swept(&[1, 2], &[8]));
        let files: Vec<File> = (0..5000).map(|at| file(&at.to_string(), points.clone())).collect();
        assert!(of(&files, What::Latency).unwrap_err().contains("draw fewer files"));
        assert!(start.elapsed() < std::time::Duration::from_secs(120), "{:?}", start.elapsed());
    }

    #[test]
    fn an_axis_has_two_values_at_least() {
        let points = swept(&[128], &[4, 8]);
        let of = |x, what| {
            Drawing::new(&[file("", points.clone())], &Choice { x, what }).map(|drawing| drawing.panels.len())
        };
        assert_eq!(of(None, What::Auto), Ok(2));
        let error = of(Some(Axis::Tokens), What::Auto).unwrap_err();
        assert!(error.contains("--x tokens: every point has 128"), "{error}");
    }

    #[test]
    fn one_configuration_is_drawn_as_distributions_of_every_file() {
        let point = crate::bench::testing::measured("--iters 6").0.remove(0);
        let files = [file("a", vec![point.clone()]), file("b", vec![point])];
        let drawing = Drawing::new(&files, &Choice::default()).unwrap();
        assert_eq!(drawing.panels.iter().map(|panel| panel.series.len()).collect::<Vec<_>>(), [2; 4]);
        assert!(
            drawing.panels.iter().all(|panel| panel.series.iter().all(|series| series.points.len() == 12))
        );
        let svg = text_of(&files, &Choice::default());
        assert!(
            svg.contains("VIRTUAL GPU: interpreter times")
                && svg.contains("a, BF16")
                && !svg.contains("GB/s")
        );
    }

    #[test]
    fn bitmaps_are_drawn_with_the_font_of_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        draw_points(&measured(), &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 10_000);
        assert!(register_font("again", FontStyle::Normal, FONT).is_ok());
    }

    #[test]
    fn nodes_and_rows_of_a_put_are_axes() {
        let point = |line: &str| crate::bench::testing::measured(line).0.remove(0);
        let points = [
            point("--nodes 2 --ranks-per-node 1 --num-sms 4 --experts 12 --transport shm"),
            point("--nodes 3 --ranks-per-node 1 --num-sms 4 --experts 12 --transport shm"),
            point("--nodes 2 --ranks-per-node 1 --num-sms 4 --experts 12 --transport shm --rdma-send 4"),
        ];
        for (x, points, texts) in [
            (
                Axis::Nodes,
                &points[..2],
                ["nodes", "1 ranks a node, 8 tokens, 4 SMs, shm, queues 1, 16 rows a put"],
            ),
            (
                Axis::RdmaSend,
                &[points[0].clone(), points[2].clone()],
                ["rows of a put between nodes", "2 nodes, 1 ranks a node"],
            ),
        ] {
            let svg = text_of(&[file("", points.to_vec())], &Choice { what: What::Latency, x: Some(x) });
            for text in texts {
                assert!(svg.contains(text), "{text}");
            }
            assert!(svg.contains("VIRTUAL GPU") && !svg.contains("GB/s"));
        }
    }

    #[test]
    fn impossible_drawings_are_rejected_with_a_reason() {
        let files = [file("", measured())];
        assert!(check_path("a.pdf".as_ref()).is_err());
        let of = |points: Vec<Point>, what| {
            Drawing::new(&[file("", points)], &Choice { what, x: None }).map(drop).unwrap_err()
        };
        // The old results have no samples.
        assert!(of(measured(), What::Distribution).contains("no samples"));
        assert!(of(measured()[..1].to_vec(), What::Bandwidth).contains("one configuration"));
        let virtual_points = crate::bench::testing::measured("--num-sms 2,4").0;
        assert!(of(virtual_points, What::Bandwidth).contains("no bandwidth"));
        assert!(draw(&files, &Choice::default(), "/nowhere/a.svg".as_ref()).is_err());
    }
}
