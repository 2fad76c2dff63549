//! `epoxide doctor`: the features of this machine, the missing ones, and the remedy.

use std::time::Duration;

use epoxide::driver::Stream;
use epoxide::group::run_threads;
use epoxide::throughput::{Buffer, Options, Shape};
use epoxide::{DType, StreamOrder, TypedTensor};
use epoxide_gpu::layout::FEW_RANKS;
use epoxide_testing::compare;
use epoxide_testing::oracle::{self, Routing};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use crate::error::{CommandError, Result};
use crate::options::DeviceKind;
use crate::output;
use crate::ranks::open_device;

/// Longest wait of the self-check.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Descriptors that a process needs besides those that ranks exchange.
const OTHER_FILES: u64 = 64;

/// Options of `epoxide doctor`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit code 1 if even the virtual GPU does not work; all other faults are only reported."
)]
pub struct Args {
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

/// The state of a part of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Present and works.
    Ok,
    /// Absent; everything else works without it.
    Missing,
    /// Present and does not work.
    Broken,
}

/// Finding about one part of the machine.
#[derive(Debug, Serialize)]
struct Finding {
    name: String,
    state: State,
    /// The finding, or the error with its remedy.
    detail: String,
}

impl Finding {
    fn new(name: impl Into<String>, state: State, detail: impl Into<String>) -> Finding {
        Finding { name: name.into(), state, detail: detail.into() }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    findings: Vec<Finding>,
}

/// Examines the machine.
pub fn run(args: Args) -> Result<()> {
    let mut findings = vec![virtual_gpu(), cores(), locked_memory(), open_files()];
    findings.extend(cuda());
    findings.extend(rdma());
    findings.extend(nccl());
    let report = Report { version: env!("CARGO_PKG_VERSION"), findings };
    if args.json {
        output::json(&report)?;
    } else {
        let lines: Vec<String> = report.findings.iter().map(line).collect();
        output::text_line(&lines.join("\n"))?;
    }
    // The report above has the reason.
    if report.findings.iter().any(|finding| finding.state == State::Broken) {
        Err(CommandError::reported(1))
    } else {
        Ok(())
    }
}

fn line(finding: &Finding) -> String {
    let mark = match finding.state {
        State::Ok => "[ok]",
        State::Missing => "[--]",
        State::Broken => "[!!]",
    };
    format!("{mark} {}: {}", finding.name, finding.detail)
}

/// Loads the shipped PTX and runs a kernel.
fn virtual_gpu() -> Finding {
    const NAME: &str = "virtual GPU";
    match check_virtual_gpu() {
        Ok(name) => Finding::new(
            NAME,
            State::Ok,
            format!("{name}: loads the shipped PTX, and the layout kernel counts right"),
        ),
        Err(error) => {
            let reason = error.message.unwrap_or_default();
            Finding::new(
                NAME,
                State::Broken,
                format!("{reason}; please report this with the output of `epoxide doctor`"),
            )
        }
    }
}

fn check_virtual_gpu() -> Result<String> {
    let ids = vec![vec![0, 3], vec![2, -1], vec![1, 1]];
    let routing = Routing { num_experts: 4, num_topk: 2, topk_idx: vec![ids] };
    let check = |_, group: std::sync::Arc<dyn epoxide::group::ProcessGroup>| {
        Ok((|| -> Result<String> {
            let device = open_device(DeviceKind::Virtual, 0)?;
            let name = device.info().name.clone();
            let stream = Stream::new(&device)?;
            let shape = Shape { max_tokens: 4, hidden: 8, dtype: DType::Bf16, max_topk: 2, max_scales: 0 };
            let options = Options::new(shape).timeout(TIMEOUT);
            let mut buffer = Buffer::new(device, &*group, options)?;
            let shape = [u64::from(routing.num_tokens(0)), u64::from(routing.num_topk)];
            let ids = TypedTensor::from_host(&stream, &shape, &routing.flat_topk_idx(0))?;
            let layout = buffer.get_dispatch_layout(&ids, routing.num_experts, StreamOrder::on(&stream))?;
            match compare::layout(&stream, &layout, &oracle::layout(&routing, 0))? {
                None => Ok(name),
                Some(difference) => Err(CommandError::failed(difference)),
            }
        })())
    };
    let outcomes = run_threads(1, TIMEOUT, check).map_err(|failure| CommandError::from(failure.error))?;
    outcomes.into_iter().next().unwrap_or_else(|| Err(CommandError::failed("its thread gave no result")))
}

fn cores() -> Finding {
    const NAME: &str = "processor cores";
    match std::thread::available_parallelism() {
        Ok(cores) => {
            let detail =
                format!("{cores}; the virtual GPU uses one for each rank that works, up to {FEW_RANKS}");
            Finding::new(NAME, State::Ok, detail)
        }
        Err(error) => Finding::new(NAME, State::Missing, format!("cannot be counted: {error}")),
    }
}

fn locked_memory() -> Finding {
    const NAME: &str = "locked memory";
    match getrlimit(Resource::Memlock).current {
        None => Finding::new(NAME, State::Ok, "no limit"),
        Some(bytes) => {
            let detail = format!(
                "limit {} KiB: enough here; RDMA needs as much as wire memory has (`ulimit -l unlimited`, or memlock in limits.conf)",
                bytes / 1024
            );
            Finding::new(NAME, State::Ok, detail)
        }
    }
}

fn open_files() -> Finding {
    const NAME: &str = "open files";
    // Ranks that are threads of one process each hold a descriptor of every rank while they
    // exchange them.
    let needed = (FEW_RANKS * FEW_RANKS * 2) as u64 + OTHER_FILES;
    match getrlimit(Resource::Nofile).current {
        Some(files) if files < needed => {
            let detail = format!(
                "limit {files}, {FEW_RANKS} ranks in one process need {needed}: `ulimit -n {needed}`"
            );
            Finding::new(NAME, State::Missing, detail)
        }
        Some(files) => Finding::new(NAME, State::Ok, format!("limit {files}")),
        None => Finding::new(NAME, State::Ok, "no limit"),
    }
}

/// A finding of a part of the library about itself.
fn from_outcome((name, outcome): (String, std::result::Result<String, String>)) -> Finding {
    match outcome {
        Ok(detail) => Finding::new(name, State::Ok, detail),
        Err(reason) => Finding::new(name, State::Missing, reason),
    }
}

#[cfg(feature = "rdma")]
fn rdma() -> Vec<Finding> {
    // Other findings report GPUs that do not open.
    let gpus = open_device(DeviceKind::Virtual, 0).into_iter();
    let gpus = gpus.chain((0..).map_while(|ordinal| open_device(DeviceKind::Cuda, ordinal).ok()));
    let gpus: Vec<_> = gpus.collect();
    epoxide::transport::verbs::doctor(&gpus).into_iter().map(from_outcome).collect()
}

#[cfg(not(feature = "rdma"))]
fn rdma() -> Vec<Finding> {
    vec![Finding::new(
        "RDMA",
        State::Missing,
        "not built in; rebuild with `--features rdma` (`tests/rdma/setup.sh` installs what that takes)",
    )]
}

#[cfg(feature = "cuda")]
fn cuda() -> Vec<Finding> {
    epoxide::driver::cuda::doctor().into_iter().map(from_outcome).collect()
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Vec<Finding> {
    vec![Finding::new("CUDA", State::Missing, crate::ranks::NO_CUDA)]
}

fn nccl() -> Vec<Finding> {
    epoxide_nccl::doctor().into_iter().map(from_outcome).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_virtual_gpu_works_here() {
        let finding = virtual_gpu();
        assert_eq!(finding.state, State::Ok, "{}", finding.detail);
    }

    #[test]
    fn findings_read_well() {
        let finding = Finding::new("RDMA", State::Missing, "not here");
        assert_eq!(line(&finding), "[--] RDMA: not here");
        let json = serde_json::to_value(&finding).unwrap();
        assert_eq!(json, serde_json::json!({"name": "RDMA", "state": "missing", "detail": "not here"}));
    }
}
