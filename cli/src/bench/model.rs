//! `epoxide bench model`.

use std::fmt::Write;
use std::path::PathBuf;

use epoxide::throughput::Quantise;
use epoxide_bench::counts::{self, Sizes, TokenCounts};
use epoxide_bench::model::{Case, FITTED, Machine, Prediction, check, check_text, sampled};
use epoxide_bench::results::{PhaseName, Results, SCHEMA_VERSION, gbps};
use epoxide_testing::payload::Format;

use crate::error::{CommandError, Result};
use crate::options::RowType;
use crate::output::{self, write_text};

/// Flags of `epoxide bench model`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Nodes.
    #[arg(long, default_value_t = 1)]
    nodes: u32,
    /// Ranks of a node, one GPU and one NIC each.
    #[arg(long, default_value_t = 8)]
    ranks_per_node: u32,
    /// Tokens per rank.
    #[arg(long, default_value_t = 4096)]
    tokens: u32,
    /// Elements per row.
    #[arg(long, default_value_t = 7168)]
    hidden: u64,
    /// Experts of all ranks.
    #[arg(long, default_value_t = 256)]
    experts: u32,
    /// Experts per token.
    #[arg(long, default_value_t = 8)]
    topk: u32,
    /// Row type of dispatch; combine is BF16.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: RowType,
    /// Multiprocessors.
    #[arg(long, default_value_t = 24)]
    num_sms: u32,
    /// GB/s of a rank's NIC, each way: 50 is 400 Gb/s.
    #[arg(long, default_value_t = 50.0)]
    nic_gbps: f64,
    /// Microseconds that a hop between nodes adds to a call.
    #[arg(long, default_value_t = 10.0)]
    nic_latency_us: f64,
    /// All ranks can map each other's memory, and are one node to the kernels.
    #[arg(long)]
    mapped: bool,
    /// Take the links' ceilings from these results in place of those of 8 x H200.
    #[arg(long, value_name = "RESULT.json")]
    from: Option<PathBuf>,
    /// Count this many random tokens of every rank and scale, in place of the expected values:
    /// shows the busiest rank.
    #[arg(long, value_name = "TOKENS")]
    sampled: Option<u32>,
    /// Write the prediction as JSON to this file, `-` for standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Hold the model against these measured results, all other sizes left aside.
    #[arg(long, value_name = "RESULT.json", conflicts_with = "json")]
    check: Option<PathBuf>,
}

/// Predicts or checks, and prints.
pub fn run(args: &Args) -> Result<()> {
    for (flag, value, is_possible) in [
        ("--nic-gbps", args.nic_gbps, args.nic_gbps > 0.0),
        ("--nic-latency-us", args.nic_latency_us, args.nic_latency_us >= 0.0),
    ] {
        if !is_possible || !value.is_finite() {
            let rule = "must be a positive number; a latency may be 0";
            return Err(CommandError::usage(format!("model: {flag} {value}: {rule}")));
        }
    }
    let machine = Machine::h200(args.nic_gbps, args.nic_latency_us);
    let machine = match &args.from {
        Some(path) => machine.with_ceilings_of(&Results::read(path)?.points)?,
        None => machine,
    };
    if let Some(path) = &args.check {
        let points = Results::read(path)?.points;
        let checked = check(&points, &machine);
        if checked.is_empty() {
            let rule = "has no point of high throughput by token on hardware, which alone is modelled";
            return Err(CommandError::usage(format!("model: --check {}: {rule}", path.display())));
        }
        return output::text_line(&check_text(&checked, &points));
    }
    let case = case_of(args)?;
    let tokens = f64::from(args.tokens);
    let (six, busiest) = match args.sampled {
        None => (counts::expected(tokens, case.sizes), None),
        Some(sample) => {
            let (six, busiest) = sampled(sample, tokens, case.sizes)?;
            (six, Some(busiest))
        }
    };
    let predictions: Vec<Prediction> =
        PhaseName::HIGH_THROUGHPUT.iter().map(|&phase| case.predict(phase, six, &machine)).collect();
    let text = text(args, &case, six, busiest, &predictions);
    if let Some(path) = &args.json {
        let json = serde_json::json!({
            "schema_version": SCHEMA_VERSION, "predicted": true,
            "nodes": args.nodes, "ranks_per_node": args.ranks_per_node, "tokens": args.tokens, "hidden": args.hidden,
            "experts": args.experts, "topk": args.topk, "num_sms": args.num_sms,
            "figures": machine, "counts": six, "busiest_rank_recv_tokens": busiest, "phases": predictions,
        });
        write_text(path, &json.to_string())?;
        if path.as_os_str() == "-" {
            return Ok(());
        }
    }
    output::text_line(&text)
}

fn case_of(args: &Args) -> Result<Case> {
    let ranks = args
        .nodes
        .checked_mul(args.ranks_per_node)
        .filter(|&ranks| (1..=1024).contains(&ranks))
        .ok_or_else(|| CommandError::usage("model: nodes times ranks per node must be 1 to 1024"))?;
    let sizes = epoxide_testing::sizes::Sizes {
        ranks,
        low_latency: false,
        tokens: args.tokens,
        fewest_tokens: 1,
        hidden: args.hidden,
        format: match args.dtype {
            RowType::Bf16 => Format::Bf16,
            RowType::Fp8 => Format::Fp8,
            RowType::Mxfp8 => Format::Mxfp8,
        },
        quantise: Quantise::None,
        experts: args.experts,
        topk: args.topk,
    };
    sizes.check().map_err(|why| CommandError::usage(format!("model: {why}")))?;
    if args.num_sms == 0 {
        return Err(CommandError::usage("model: --num-sms 0: must be at least 1"));
    }
    let ranks_per_node = if args.mapped { ranks } else { args.ranks_per_node };
    let row = args.hidden * args.dtype.dtype().size() + args.dtype.num_scales(args.hidden) * 4;
    Ok(Case {
        sizes: Sizes { ranks, ranks_per_node, experts: args.experts, topk: args.topk },
        num_sms: args.num_sms,
        dispatch_row_bytes: row,
        combine_row_bytes: args.hidden * 2,
        mapped: false,
    })
}

fn text(
    args: &Args,
    case: &Case,
    six: TokenCounts<f64>,
    busiest: Option<f64>,
    predictions: &[Prediction],
) -> String {
    let Args { nodes, tokens, hidden, experts, topk, num_sms, nic_gbps, .. } = args;
    let ranks = nodes * args.ranks_per_node;
    let mut out = format!(
        "[model] nodes={nodes} num_ranks={ranks} tokens={tokens} hidden={hidden} experts={experts} topk={topk} num_sms={num_sms} \
         nic={nic_gbps} GB/s: PREDICTED, not measured\n"
    );
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "  tokens of a rank, dispatch: send total={:.1} nvl={:.1} rdma={:.1}  recv total={:.1} nvl={:.1} rdma={:.1}",
        six.send_total, six.send_nvl, six.send_rdma, six.recv_total, six.recv_nvl, six.recv_rdma
    );
    if let Some(busiest) = busiest {
        let _ = writeln!(out, "  the busiest rank of the sample receives {busiest:.1}");
    }
    let _ = write!(out, "  {:18}         us    NVLink MB     NIC MB  DeepEP GB/s  limit", "");
    for &Prediction { phase, us, nvlink_bytes, nic_bytes, limit } in predictions {
        let row_bytes = if phase.is_dispatch() { case.dispatch_row_bytes } else { case.combine_row_bytes };
        let (name, nvlink, nic) = (phase.text(), nvlink_bytes / 1e6, nic_bytes / 1e6);
        let rate = gbps(six.recv_total * row_bytes as f64, us);
        let _ = write!(out, "\n  {name:<18} {us:>10.1} {nvlink:>12.1} {nic:>10.1} {rate:>12.1}  {limit}");
    }
    out + "\n  " + FITTED
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::USAGE;
    use crate::testing::parse;

    fn error_of(line: &str) -> CommandError {
        run(&parse(["model"].into_iter().chain(line.split_whitespace())).unwrap()).unwrap_err()
    }

    #[test]
    fn impossible_sizes_are_rejected_by_name() {
        for (line, part) in [
            ("--hidden 18446744073709551608", "--hidden 18446744073709551608: must be a positive multiple"),
            ("--hidden 0", "--hidden 0: must be"),
            ("--tokens 0", "--tokens 0: must be"),
            ("--topk 33", "--topk 33: must be 1 to 32"),
            ("--experts 12", "--experts 12: must be a positive multiple of the 8 ranks"),
            ("--num-sms 0", "--num-sms 0: must be at least 1"),
            ("--sampled 4294967295", "--sampled 4294967295: must be 1 to 2097152 for these sizes"),
            ("--sampled 0", "--sampled 0: must be 1 to"),
            ("--nic-latency-us NaN", "--nic-latency-us NaN: must be"),
            ("--nic-latency-us=-1", "--nic-latency-us -1: must be"),
            ("--nic-gbps inf", "--nic-gbps inf: must be"),
            ("--nic-gbps 0", "--nic-gbps 0: must be"),
        ] {
            let error = error_of(line);
            assert_eq!(error.code, USAGE, "{line}");
            assert!(error.message.as_ref().is_some_and(|message| message.contains(part)), "{error:?}");
        }
    }

    #[test]
    fn a_check_of_nothing_is_bad_usage_and_has_no_json() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.json");
        let points = crate::bench::testing::measured("").0;
        std::fs::write(&file, Results::new(points).json().unwrap()).unwrap();
        let error = error_of(&format!("--check {}", file.display()));
        assert_eq!(error.code, USAGE);
        assert!(error.message.as_ref().is_some_and(|message| message.contains("a.json: has no point")));
        assert!(parse::<Args>(["model", "--check", "a.json", "--json", "-"]).is_err());
    }
}
