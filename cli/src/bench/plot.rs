//! `epoxide bench plot` and `--plot`: bandwidth against multiprocessors, tokens or ranks, and distributions of times.
//!
//! Results of the virtual GPU are drawn as interpreter times, under a title that says so, never as a bandwidth.

use std::path::{Path, PathBuf};
use std::sync::Once;

use clap::ValueEnum;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use epoxide_bench::results::{Key, PhaseName, Point, Results};

use crate::stop::{Result, Stop};

/// The text of every drawing: DejaVu Sans, cut down to the characters that are used (font/README.md).
const FONT: &[u8] = include_bytes!("font/DejaVuSans-subset.ttf");
const FAMILY: &str = "sans-serif";

/// As wide as a page shows it, so that text keeps its size; panels lie below each other.
const PANEL_WIDTH: u32 = 860;
const PANEL_HEIGHT: u32 = 480;
const TITLE_HEIGHT: u32 = 40;

/// Flags of `epoxide bench plot`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Results, or the JSON lines of sweeps.
    #[arg(required = true, value_name = "RESULT.json")]
    files: Vec<PathBuf>,
    /// The drawing: .svg or .png.
    #[arg(long, value_name = "FILE.svg|png")]
    out: PathBuf,
    #[command(flatten)]
    choice: Choice,
}

/// What is drawn.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Choice {
    /// What lies on the x axis: what differs between the points, unless given.
    #[arg(long, value_enum)]
    x: Option<Axis>,
    /// Bandwidth over the axis, distributions of times, or both where there is something to draw.
    #[arg(long, value_enum, default_value = "auto")]
    what: What,
}

/// An x axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Axis {
    /// Multiprocessors.
    Sms,
    /// Tokens per rank.
    Tokens,
    /// Ranks.
    Ranks,
    /// Nodes.
    Nodes,
    /// Rows of a put between nodes.
    RdmaSend,
}

/// Kinds of panels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum What {
    /// Whatever the results have.
    #[default]
    Auto,
    /// Bandwidth over the axis.
    Bandwidth,
    /// Distributions of the times.
    Latency,
}

impl Axis {
    const ALL: [Axis; 5] = [Axis::Sms, Axis::Tokens, Axis::Nodes, Axis::Ranks, Axis::RdmaSend];

    fn of(self, key: &Key) -> u32 {
        match self {
            Axis::Sms => key.num_sms,
            Axis::Tokens => key.tokens,
            Axis::Ranks => key.num_ranks,
            Axis::Nodes => key.nodes,
            Axis::RdmaSend => key.rdma_send.unwrap_or(0),
        }
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

    /// What the points of one panel have in common besides the axis: more nodes are more ranks of as many a node.
    fn rest(self, key: &Key) -> Rest {
        let unless = |axis: Axis, value| if self == axis { 0 } else { value };
        let ranks = if self == Axis::Nodes { key.num_ranks / key.nodes.max(1) } else { key.num_ranks };
        Rest(
            [
                unless(Axis::Nodes, key.nodes),
                unless(Axis::Ranks, ranks),
                unless(Axis::Tokens, key.tokens),
                unless(Axis::Sms, key.num_sms),
                unless(Axis::RdmaSend, key.rdma_send.unwrap_or(0)),
                key.experts,
                key.topk,
            ],
            key.hidden,
            (key.transport.clone(), key.queues),
        )
    }
}

/// Sizes, hidden, and what joins the nodes.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Rest([u32; 7], u64, (Option<String>, Option<u32>));

/// One drawing in the grid.
struct Panel {
    title: String,
    x_label: String,
    y_label: &'static str,
    /// Labels of x positions 0, 1, ..; none where x is a number.
    ticks: Option<Vec<u32>>,
    x_range: (f64, f64),
    y_range: (f64, f64),
    /// Percent on the y axis.
    percent: bool,
    /// The legend goes to the upper left, where lines that rise leave room.
    legend_above: bool,
    series: Vec<Series>,
}

struct Series {
    label: String,
    color: RGBColor,
    dashed: bool,
    points: Vec<(f64, f64)>,
}

/// Draws stored results.
pub fn run(args: &Args) -> Result<()> {
    let mut points = Vec::new();
    for file in &args.files {
        points.extend(Results::read(file)?.points);
    }
    draw(&points, &args.choice, &args.out)
}

/// True formats only, before anything is measured.
pub fn check_path(path: &Path) -> Result<()> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "png") => Ok(()),
        _ => Err(Stop::usage(format!("{}: a drawing ends in .svg or .png", path.display()))),
    }
}

/// Draws points to a file.
pub fn draw(points: &[Point], choice: &Choice, path: &Path) -> Result<()> {
    check_path(path)?;
    let panels = panels(points, choice);
    if panels.is_empty() {
        return Err(Stop::usage("plot: these results hold nothing of that kind to draw"));
    }
    static REGISTER: Once = Once::new();
    REGISTER.call_once(|| {
        // The file is part of the program; a test draws with it.
        let _ = register_font(FAMILY, FontStyle::Normal, FONT);
    });
    let size = (PANEL_WIDTH, PANEL_HEIGHT * panels.len() as u32 + TITLE_HEIGHT);
    let title = title(points);
    let broken = |why: String| Stop::failed(format!("{}: {why}", path.display()));
    match path.extension().is_some_and(|extension| extension == "svg") {
        true => paint(&SVGBackend::new(path, size).into_drawing_area(), &title, &panels),
        false => paint(&BitMapBackend::new(path, size).into_drawing_area(), &title, &panels),
    }
    .map_err(broken)
}

fn title(points: &[Point]) -> String {
    let first = &points[0];
    if let Some(point) = points.iter().find(|point| point.is_virtual) {
        return format!("epoxide on the {}", point.caveat());
    }
    let (from, to) = points
        .iter()
        .fold((&first.date, &first.date), |(from, to), point| (from.min(&point.date), to.max(&point.date)));
    let when = if from == to { from.clone() } else { format!("{from} to {to}") };
    format!("epoxide, {}, {when}", first.device)
}

fn panels(points: &[Point], choice: &Choice) -> Vec<Panel> {
    let mut panels = Vec::new();
    let distinct = |axis: Axis| {
        let mut values: Vec<u32> = points.iter().map(|point| axis.of(&point.key)).collect();
        values.sort_unstable();
        values.dedup();
        values.len()
    };
    let axis = choice.x.or_else(|| Axis::ALL.into_iter().find(|&axis| distinct(axis) > 1));
    if let (Some(axis), true) = (axis, choice.what != What::Latency) {
        let mut groups: Vec<_> = points.iter().map(|point| axis.rest(&point.key)).collect();
        groups.sort_unstable();
        groups.dedup();
        for group in groups.iter().rev() {
            let members: Vec<&Point> =
                points.iter().filter(|point| axis.rest(&point.key) == *group).collect();
            panels.push(against(axis, &members));
        }
    }
    if choice.what != What::Bandwidth {
        // Of many points, those of the fastest one are drawn.
        let sampled = points.iter().filter(|point| {
            point.phase(PhaseName::DispatchCached).is_some_and(|phase| phase.call.samples_us.len() > 1)
        });
        let fastest = sampled.min_by(|a, b| mean_us(a).total_cmp(&mean_us(b)));
        panels.extend(fastest.map(distribution));
    }
    panels
}

fn mean_us(point: &Point) -> f64 {
    point.phase(PhaseName::DispatchCached).map_or(f64::MAX, |phase| phase.call.avg_us)
}

/// Sizes of a point in a title, the axis left out.
fn sizes(key: &Key, axis: Option<Axis>) -> String {
    let mut parts = Vec::new();
    parts.extend(key.network(axis == Some(Axis::Nodes), axis == Some(Axis::RdmaSend)));
    match axis {
        Some(Axis::Ranks) => {}
        Some(Axis::Nodes) => parts.push(format!("{} ranks a node", key.num_ranks / key.nodes.max(1))),
        _ => parts.push(format!("{} ranks", key.num_ranks)),
    }
    if axis != Some(Axis::Tokens) {
        parts.push(format!("{} tokens", key.tokens));
    }
    parts.push(format!("hidden {}", key.hidden));
    parts.push(format!("top-{} of {}", key.topk, key.experts));
    if axis != Some(Axis::Sms) {
        parts.push(format!("{} SMs", key.num_sms));
    }
    parts.join(", ")
}

const BLUE_: RGBColor = RGBColor(0x1f, 0x5f, 0xb4);
const GREEN_: RGBColor = RGBColor(0x2a, 0x8c, 0x3c);
const ORANGE: RGBColor = RGBColor(0xd9, 0x6a, 0x0b);
const PURPLE: RGBColor = RGBColor(0x86, 0x4c, 0xb0);
const GREY: RGBColor = RGBColor(0x70, 0x70, 0x70);

/// Remote bandwidth over an axis; on the virtual GPU the interpreter's times.
fn against(axis: Axis, points: &[&Point]) -> Panel {
    let is_virtual = points.iter().any(|point| point.is_virtual);
    let mut ticks: Vec<u32> = points.iter().map(|point| axis.of(&point.key)).collect();
    ticks.sort_unstable();
    ticks.dedup();
    let place =
        |point: &Point| ticks.iter().position(|&tick| tick == axis.of(&point.key)).unwrap_or(0) as f64;
    let mut series: Vec<Series> = Vec::new();
    let mut add = |label: String, color, dashed, value: &dyn Fn(&Point) -> Option<f64>| {
        let mut line: Vec<(f64, f64)> =
            points.iter().filter_map(|point| Some((place(point), value(point)?))).collect();
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
        line.dedup_by(|a, b| a.0 == b.0);
        if !line.is_empty() {
            series.push(Series { label, color, dashed, points: line });
        }
    };
    let measured = |point: &Point, name| {
        let phase = point.phase(name)?;
        match point.is_virtual {
            true => Some(phase.call.avg_us),
            false => phase.bandwidth.as_ref().map(|bandwidth| bandwidth.links),
        }
    };
    for (dtype, color) in [("bf16", BLUE_), ("fp8", GREEN_)] {
        add(format!("dispatch {}", dtype.to_uppercase()), color, false, &|point| {
            if point.key.dtype == dtype { measured(point, PhaseName::DispatchCached) } else { None }
        });
    }
    add("combine BF16".into(), ORANGE, false, &|point| measured(point, PhaseName::CombineInPool));
    let ceiling = |point: &Point, name| point.phase(name)?.bandwidth.as_ref()?.link_ceiling;
    add("link ceiling, push".into(), GREY, true, &|point| ceiling(point, PhaseName::DispatchCached));
    add("link ceiling, pull".into(), PURPLE, true, &|point| ceiling(point, PhaseName::CombineInPool));
    let top = series.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max);
    Panel {
        title: sizes(&points[0].key, Some(axis)),
        x_label: format!("{}, not to scale", axis.label()),
        y_label: if is_virtual { "mean call, interpreter us" } else { "over the links, GB/s per GPU" },
        x_range: (-0.3, ticks.len() as f64 - 0.7),
        // Times fill the whole height: room for the legend above them.
        y_range: (0.0, top * if is_virtual { 1.4 } else { 1.12 }),
        ticks: Some(ticks),
        percent: false,
        legend_above: is_virtual,
        series,
    }
}

/// What share of the iterations took at most so long, by phase and relative to its median: phases differ too much in length
/// for one axis of times.
fn distribution(point: &Point) -> Panel {
    let colors = [BLUE_, GREEN_, ORANGE, PURPLE];
    let mut series = Vec::new();
    for (phase, color) in point.phases.iter().zip(colors) {
        let mut samples = phase.call.samples_us.clone();
        samples.sort_by(f64::total_cmp);
        let step = 100.0 / samples.len() as f64;
        let mut points = Vec::new();
        for (i, &us) in samples.iter().enumerate() {
            let at = us / phase.call.median_us;
            points.extend([(at, step * i as f64), (at, step * (i + 1) as f64)]);
        }
        let label = format!("{}, median {:.1} us", phase.name.text(), phase.call.median_us);
        series.push(Series { label, color, dashed: false, points });
    }
    let all = || series.iter().flat_map(|line| &line.points).map(|point| point.0);
    let (low, high) = (all().fold(f64::MAX, f64::min), all().fold(0.0, f64::max));
    let margin = ((high - low) * 0.05).max(high * 0.01);
    Panel {
        title: format!("times of calls: {}", sizes(&point.key, None)),
        x_label: match point.is_virtual {
            true => "interpreter time of a call over its median".into(),
            false => "time of a call over its median (mean over ranks)".into(),
        },
        y_label: "iterations that took at most so long",
        ticks: None,
        x_range: (low - margin, high + margin),
        y_range: (0.0, 105.0),
        percent: true,
        legend_above: false,
        series,
    }
}

type Area<DB> = DrawingArea<DB, Shift>;

fn paint<DB: DrawingBackend>(
    area: &Area<DB>,
    title: &str,
    panels: &[Panel],
) -> std::result::Result<(), String> {
    let text = |error: DrawingAreaErrorKind<DB::ErrorType>| error.to_string();
    area.fill(&WHITE).map_err(text)?;
    let (head, body) = area.split_vertically(TITLE_HEIGHT);
    let style = (FAMILY, 22).into_font().color(&BLACK);
    head.draw_text(title, &style, (20, 12)).map_err(text)?;
    for (area, panel) in body.split_evenly((panels.len(), 1)).iter().zip(panels) {
        panel.paint(area).map_err(text)?;
    }
    area.present().map_err(text)
}

impl Panel {
    fn paint<DB: DrawingBackend>(
        &self,
        area: &Area<DB>,
    ) -> std::result::Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, (FAMILY, 18))
            .margin(14)
            .margin_right(24)
            .x_label_area_size(48)
            .y_label_area_size(64)
            .build_cartesian_2d(self.x_range.0..self.x_range.1, self.y_range.0..self.y_range.1)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc(&self.x_label)
            .y_desc(self.y_label)
            .axis_desc_style((FAMILY, 17))
            .label_style((FAMILY, 15))
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd));
        let percent = |y: &f64| format!("{y:.0}%");
        let plain = |y: &f64| format!("{y:.0}");
        let y_format: &dyn Fn(&f64) -> String = if self.percent { &percent } else { &plain };
        let ticks = self.ticks.clone().unwrap_or_default();
        // Positions are whole numbers; the mesh asks for those, if it gets enough labels to give.
        let tick = |x: &f64| match (x.fract() == 0.0, ticks.get(*x as usize)) {
            (true, Some(tick)) => tick.to_string(),
            _ => String::new(),
        };
        let ratio = |x: &f64| format!("{x:.2}");
        let x_format: &dyn Fn(&f64) -> String = if self.ticks.is_some() { &tick } else { &ratio };
        if self.ticks.is_some() {
            mesh.x_labels(ticks.len() + 1).disable_x_mesh();
        } else {
            mesh.x_labels(8);
        }
        mesh.y_labels(9).x_label_formatter(x_format).y_label_formatter(y_format).draw()?;
        for series in &self.series {
            let style = series.color.stroke_width(2);
            let color = series.color;
            let drawn = match series.dashed {
                true => {
                    chart.draw_series(DashedLineSeries::new(series.points.iter().copied(), 6, 5, style))?
                }
                false => chart.draw_series(LineSeries::new(series.points.iter().copied(), style))?,
            };
            let dash = if series.dashed { 9 } else { 24 };
            drawn.label(&series.label).legend(move |(x, y)| {
                let style = color.stroke_width(3);
                EmptyElement::at((x, y))
                    + PathElement::new([(0, 0), (dash, 0)], style)
                    + PathElement::new([(24 - dash, 0), (24, 0)], style)
            });
            if self.ticks.is_some() && !series.dashed {
                chart
                    .draw_series(series.points.iter().map(|&at| Circle::new(at, 4, series.color.filled())))?;
            }
        }
        chart
            .configure_series_labels()
            .position(if self.legend_above {
                SeriesLabelPosition::UpperLeft
            } else {
                SeriesLabelPosition::LowerRight
            })
            .margin(18)
            .legend_area_size(32)
            .label_font((FAMILY, 16))
            .background_style(WHITE.mix(0.85))
            .border_style(RGBColor(0xbb, 0xbb, 0xbb))
            .draw()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::testing::h200 as measured;

    #[test]
    fn drawings_have_axes_units_and_every_series() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.svg");
        draw(&measured(), &Choice::default(), &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for text in [
            "over the links, GB/s per GPU",
            "multiprocessors (SMs)",
            "dispatch BF16",
            "dispatch FP8",
            "combine BF16",
            "link ceiling, push",
            "8 ranks, 4096 tokens, hidden 7168, top-8 of 256",
            "NVIDIA H200, 2026-11-20",
            "132",
        ] {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn bitmaps_are_drawn_with_the_font_of_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        draw(&measured(), &Choice::default(), &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 10_000);
        assert!(register_font("again", FontStyle::Normal, FONT).is_ok());
    }

    #[test]
    fn nodes_and_rows_of_a_put_are_axes() {
        let folder = tempfile::tempdir().unwrap();
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
                ["nodes, not to scale", "shm, queues 1, 16 rows a put, 1 ranks a node"],
            ),
            (
                Axis::RdmaSend,
                &points[..],
                ["rows of a put between nodes, not to scale", "2 nodes, shm, queues 1, 2 ranks"],
            ),
        ] {
            let path = folder.path().join("a.svg");
            draw(points, &Choice { what: What::Bandwidth, x: Some(x) }, &path).unwrap();
            let svg = std::fs::read_to_string(&path).unwrap();
            for text in texts {
                assert!(svg.contains(text), "{text}");
            }
            assert!(svg.contains("VIRTUAL GPU") && !svg.contains("GB/s"));
        }
    }

    #[test]
    fn what_cannot_be_drawn_is_said() {
        let points = measured();
        assert!(check_path("a.pdf".as_ref()).is_err());
        let choice = Choice { what: What::Latency, x: None };
        // The old results have no samples.
        assert!(draw(&points, &choice, "/nowhere/a.svg".as_ref()).is_err());
        assert!(draw(&points, &Choice::default(), "/nowhere/a.svg".as_ref()).is_err());
    }
}
