//! `epoxide inspect`: the results of layout and dispatch for a routing, as JSON, computed by the
//! kernels on the virtual GPU.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Subcommand, value_parser};
use epoxide::driver::virt::VirtualGpu;
use epoxide::driver::{Device, Stream};
use epoxide::group::ProcessGroup;
use epoxide::group::run_threads;
use epoxide::internal::{JSON, read_text, read_text_file};
use epoxide::throughput::{Buffer, Config, DispatchRequest, Options, Shape};
use epoxide::{DType, Element, StreamOrder, Tensor, TypedTensor};
use epoxide_gpu::layout::{FEW_RANKS, MAX_CHANNELS, MAX_NODES};
use epoxide_testing::selections::Selections;
use epoxide_testing::sizes::check_experts;
use serde::Serialize;

use crate::error::{CommandError, Result};
use crate::options::VirtualFlags;
use crate::output;
use crate::ranks::root_cause;

/// Longest wait of a rank for the others.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Elements of the rows that are sent; their values are not used.
const HIDDEN: u64 = 8;

/// Options of `epoxide inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// The layout, the handle and the metadata of a dispatch, for every rank
    Handle(HandleArgs),
}

#[derive(Debug, clap::Args)]
struct HandleArgs {
    /// JSON with the selected experts, `[[[ids of token 0], ..] of rank 0, ..]`; -1 is no
    /// selection; - reads standard input
    #[arg(long, value_name = "FILE")]
    topk: PathBuf,

    /// Ranks of a node
    #[arg(long, value_name = "P", value_parser = value_parser!(u32).range(1..=FEW_RANKS as i64))]
    ranks_per_node: u32,

    /// Nodes; rank r is on node r / P
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=MAX_NODES as i64))]
    nodes: u32,

    /// Channels that each rank cuts its tokens into
    #[arg(long, value_name = "C", default_value_t = Config::default().num_channels(),
          value_parser = value_parser!(u32).range(1..=i64::from(MAX_CHANNELS)))]
    channels: u32,

    /// Experts of all ranks
    #[arg(long, value_name = "E")]
    experts: u32,

    /// Expert counts are rounded up to multiples of this
    #[arg(long, value_name = "A", default_value_t = 1, value_parser = value_parser!(u32).range(1..=1 << 20))]
    expert_alignment: u32,

    #[command(flatten)]
    virtual_gpu: VirtualFlags,
}

impl HandleArgs {
    fn num_ranks(&self) -> u32 {
        self.nodes * self.ranks_per_node
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    let What::Handle(args) = args.what;
    let (name, text) = read(&args.topk)?;
    output::json(&inspect(&args, &name, &text)?)
}

/// The text of the file, and what to call it in errors.
fn read(path: &Path) -> Result<(String, String)> {
    let (name, text) = if path == Path::new("-") {
        ("standard input".to_owned(), read_text(std::io::stdin(), JSON))
    } else {
        (path.display().to_string(), read_text_file(path, JSON))
    };
    let text = text.map_err(|error| CommandError::usage(format!("--topk {name}: {error}")))?;
    Ok((name, text))
}

/// Reads and checks the ids; errors name the place.
fn parse(args: &HandleArgs, name: &str, text: &str) -> Result<Selections> {
    let (nodes, per_node) = (args.nodes, args.ranks_per_node);
    let selections = Selections::parse(text, args.experts)
        .map_err(|error| CommandError::usage(format!("--topk {name}: {error}")))?;
    match selections.ranks.len() {
        ranks if ranks != args.num_ranks() as usize => Err(CommandError::usage(format!(
            "--topk {name}: {ranks} ranks: --nodes {nodes} with --ranks-per-node {per_node} are {} ranks",
            args.num_ranks()
        ))),
        _ => Ok(selections),
    }
}

/// The object that is printed.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Inspection {
    ranks: Vec<RankInspection>,
}

/// One rank's quantities, with the names of the interface; matrices are lists of rows.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct RankInspection {
    num_tokens_per_rank: Vec<i32>,
    num_tokens_per_expert: Vec<i32>,
    is_token_in_rank: Vec<Vec<u8>>,
    #[serde(flatten)]
    channels: Channels,
    recv_src_idx: Vec<i32>,
    recv_topk_idx: Vec<Vec<i64>>,
    num_recv_tokens_per_expert: Vec<u32>,
    num_recv_tokens: u32,
}

/// Tables of a handle that differ between one node and several.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
enum Channels {
    OneNode {
        rank_prefix_matrix: Vec<Vec<i32>>,
        channel_prefix_matrix: Vec<Vec<i32>>,
        recv_channel_prefix_matrix: Vec<Vec<i32>>,
    },
    Nodes(Box<AcrossNodes>),
}

/// Tables of a handle across nodes.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct AcrossNodes {
    num_tokens_per_rdma_rank: Vec<i32>,
    rdma_channel_prefix_matrix: Vec<Vec<i32>>,
    gbl_channel_prefix_matrix: Vec<Vec<i32>>,
    recv_rdma_channel_prefix_matrix: Vec<Vec<i32>>,
    recv_rdma_rank_prefix_sum: Vec<i32>,
    recv_gbl_channel_prefix_matrix: Vec<Vec<i32>>,
    recv_gbl_rank_prefix_sum: Vec<i32>,
    /// Source node of each row, and a bit for each rank of the own node that has the token.
    recv_src_meta: Vec<[i32; 2]>,
    send_rdma_head: Vec<Vec<i32>>,
    send_nvl_head: Vec<Vec<i32>>,
}

fn inspect(args: &HandleArgs, name: &str, text: &str) -> Result<Inspection> {
    let (ranks, experts) = (args.num_ranks(), args.experts);
    check_experts(experts, ranks).map_err(CommandError::usage)?;
    let selections = parse(args, name, text)?;
    let most = selections.ranks.iter().map(Vec::len).max().unwrap_or(0);
    let max_tokens = u32::try_from(most)
        .map_err(|_| CommandError::usage(format!("--topk {name}: {most} tokens on one rank are too many")))?;
    let shape = Shape {
        max_tokens,
        hidden: HIDDEN,
        dtype: DType::Bf16,
        max_topk: selections.num_topk as u32,
        max_scales: 0,
    };
    let options = Options::new(shape)
        .config(Config::with_sms(2 * args.channels)?.for_nodes(args.nodes))
        .timeout(TIMEOUT)
        .ranks_per_node(args.ranks_per_node)
        // Quantities of several nodes are only there where rows are relayed.
        .keep_nodes();
    let checker = args.virtual_gpu.checker(0);
    let inspected = run_threads(ranks, TIMEOUT * 3, |rank, group| {
        let device = VirtualGpu::new(args.virtual_gpu.device(rank, 0, checker.as_ref()));
        Ok(inspect_rank(args, &selections, options.clone(), rank, device, &group))
    });
    let outcomes = inspected.map_err(|failure| CommandError::from(failure.error).on_rank(failure.rank))?;
    merge(outcomes)
}

/// The object of all ranks, or the failure that no other rank's failure has caused.
fn merge(outcomes: Vec<Result<RankInspection>>) -> Result<Inspection> {
    let (mut ranks, mut errors) = (Vec::new(), Vec::new());
    for (rank, outcome) in (0..).zip(outcomes) {
        match outcome {
            Ok(inspection) => ranks.push(inspection),
            Err(error) => errors.push((rank, error)),
        }
    }
    root_cause(errors.into_iter()).map_or(Ok(Inspection { ranks }), Err)
}

fn inspect_rank(
    args: &HandleArgs,
    selections: &Selections,
    options: Options,
    rank: u32,
    device: Device,
    group: &Arc<dyn ProcessGroup>,
) -> Result<RankInspection> {
    let stream = Stream::new(&device)?;
    let mut buffer = Buffer::new(device, &**group, options)?;
    let order = || StreamOrder::on(&stream);

    let tokens = &selections.ranks[rank as usize];
    let (num_tokens, num_topk) = (tokens.len() as u64, selections.num_topk);
    let shape = [num_tokens, num_topk as u64];
    let topk_idx = TypedTensor::from_host(&stream, &shape, &tokens.concat())?;
    let topk_weights = TypedTensor::from_host(&stream, &shape, &vec![1.0f32; tokens.len() * num_topk])?;
    let x = vec![0u16; tokens.len() * HIDDEN as usize];
    let x = Tensor::from_host(&stream, DType::Bf16, &[num_tokens, HIDDEN], &x)?;

    let layout = buffer.get_dispatch_layout(&topk_idx, args.experts, order())?;
    let request = DispatchRequest::new(&x, &layout).topk_weights(&topk_weights);
    let mut place = buffer.place(0)?;
    let output = buffer.dispatch(&mut place, request.expert_alignment(args.expert_alignment), order())?;
    stream.synchronize()?;
    buffer.check()?;

    let handle = &output.handle;
    let missing = |name| CommandError::failed(format!("dispatch gave no {name}"));
    let channels = match (handle.intranode(), handle.internode()) {
        (Some(intranode), _) => Channels::OneNode {
            rank_prefix_matrix: rows(&stream, &intranode.rank_prefix_matrix())?,
            channel_prefix_matrix: rows(&stream, &intranode.channel_prefix_matrix())?,
            recv_channel_prefix_matrix: rows(&stream, &intranode.recv_channel_prefix_matrix())?,
        },
        (None, Some(internode)) => {
            let per_node =
                layout.num_tokens_per_rdma_rank().ok_or_else(|| missing("num_tokens_per_rdma_rank"))?;
            let meta = output.recv_src_meta.ok_or_else(|| missing("recv_src_meta"))?.values(&stream)?;
            Channels::Nodes(Box::new(AcrossNodes {
                num_tokens_per_rdma_rank: per_node.to_host(&stream)?,
                rdma_channel_prefix_matrix: rows(&stream, &internode.rdma_channel_prefix_matrix())?,
                gbl_channel_prefix_matrix: chunked(
                    &internode.gbl_channel_prefix_matrix(&stream)?,
                    args.channels,
                ),
                recv_rdma_channel_prefix_matrix: rows(&stream, &internode.recv_rdma_channel_prefix_matrix())?,
                recv_rdma_rank_prefix_sum: internode.recv_rdma_rank_prefix_sum().to_host(&stream)?,
                recv_gbl_channel_prefix_matrix: rows(&stream, &internode.recv_gbl_channel_prefix_matrix())?,
                recv_gbl_rank_prefix_sum: internode.recv_gbl_rank_prefix_sum(&stream)?,
                recv_src_meta: meta.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect(),
                send_rdma_head: rows(&stream, &internode.send_rdma_head())?,
                send_nvl_head: chunked(&internode.send_nvl_head(&stream)?, args.ranks_per_node),
            }))
        }
        (None, None) => return Err(CommandError::failed("dispatch gave neither kind of matrices")),
    };
    Ok(RankInspection {
        num_tokens_per_rank: layout.num_tokens_per_rank().to_host(&stream)?,
        num_tokens_per_expert: layout.num_tokens_per_expert().to_host(&stream)?,
        is_token_in_rank: rows(&stream, &layout.is_token_in_rank())?,
        channels,
        recv_src_idx: output.recv_src_idx.ok_or_else(|| missing("recv_src_idx"))?.values(&stream)?,
        recv_topk_idx: rows(&stream, &*output.recv_topk_idx.ok_or_else(|| missing("recv_topk_idx"))?)?,
        num_recv_tokens_per_expert: output.num_recv_tokens_per_expert.clone(),
        num_recv_tokens: output.num_recv_tokens.unwrap_or(0),
    })
}

/// A matrix as a list of rows.
fn rows<T: Element>(stream: &Stream, matrix: &Tensor) -> Result<Vec<Vec<T>>> {
    Ok(chunked(&matrix.to_host::<T>(stream)?, matrix.columns() as u32))
}

fn chunked<T: Copy>(flat: &[T], columns: u32) -> Vec<Vec<T>> {
    flat.chunks(columns.max(1) as usize).map(<[T]>::to_vec).collect()
}

#[cfg(test)]
mod tests {
    use epoxide_testing::oracle::{self, Routing};
    use serde_json::{Value, json};

    use super::*;
    use crate::testing;

    const WORKED_EXAMPLE: &str = "[[[0,6],[3,5],[7,6],[1,-1]], [[2,4],[6,1],[0,1],[5,7]],
                                   [[7,0],[1,2],[4,5],[3,6]], [[0,2],[6,7],[5,1],[4,3]]]";

    fn args(line: &str) -> HandleArgs {
        let words = ["inspect", "--topk", "-"].into_iter().chain(line.split_whitespace());
        testing::parse(words).unwrap()
    }

    fn run(line: &str, text: &str) -> Result<Inspection> {
        inspect(&args(line), "ids.json", text)
    }

    /// The same object from the definitions.
    fn expected(line: &str, text: &str) -> Inspection {
        let args = args(line);
        let Selections { num_topk, ranks } = parse(&args, "", text).unwrap();
        let routing = Routing { num_experts: args.experts, num_topk: num_topk as u32, topk_idx: ranks };
        let rank = |rank| {
            let plan = oracle::plan(&routing, rank, args.channels, args.expert_alignment);
            let nodes = oracle::InternodeOracle::new(&routing, args.ranks_per_node).plan(rank, args.channels);
            let channels = match args.nodes {
                1 => Channels::OneNode {
                    rank_prefix_matrix: plan.rank_prefix_matrix,
                    channel_prefix_matrix: plan.channel_prefix_matrix,
                    recv_channel_prefix_matrix: plan.recv_channel_prefix_matrix,
                },
                _ => Channels::Nodes(Box::new(AcrossNodes {
                    num_tokens_per_rdma_rank: nodes.num_tokens_per_rdma_rank,
                    rdma_channel_prefix_matrix: nodes.rdma_channel_prefix_matrix,
                    gbl_channel_prefix_matrix: nodes.gbl_channel_prefix_matrix,
                    recv_rdma_channel_prefix_matrix: nodes.recv_rdma_channel_prefix_matrix,
                    recv_rdma_rank_prefix_sum: nodes.recv_rdma_rank_prefix_sum,
                    recv_gbl_channel_prefix_matrix: nodes.recv_gbl_channel_prefix_matrix,
                    recv_gbl_rank_prefix_sum: nodes.recv_gbl_rank_prefix_sum,
                    recv_src_meta: nodes.recv_src_meta,
                    send_rdma_head: nodes.send_rdma_head,
                    send_nvl_head: nodes.send_nvl_head,
                })),
            };
            RankInspection {
                num_tokens_per_rank: plan.layout.num_tokens_per_rank,
                num_tokens_per_expert: plan.layout.num_tokens_per_expert,
                is_token_in_rank: plan.layout.is_token_in_rank,
                channels,
                recv_src_idx: plan.recv_src.iter().map(|&(_, token)| token as i32).collect(),
                recv_topk_idx: plan.recv_topk_idx,
                num_recv_tokens_per_expert: plan.num_recv_tokens_per_expert,
                num_recv_tokens: plan.num_recv_tokens,
            }
        };
        Inspection { ranks: (0..routing.num_ranks()).map(rank).collect() }
    }

    #[test]
    fn the_worked_example_by_hand() {
        let line = "--ranks-per-node 4 --channels 2 --experts 8";
        let got = serde_json::to_value(run(line, WORKED_EXAMPLE).unwrap()).unwrap();
        assert_eq!(
            got.as_object().map(|object| object.keys().collect::<Vec<_>>()),
            Some(vec![&"ranks".to_owned()])
        );
        let ranks = got["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), 4);
        let rank_prefix = json!([[2, 1, 1, 2], [4, 2, 3, 4], [6, 4, 4, 6], [8, 6, 6, 7]]);
        let rank_0 = json!({
            "num_tokens_per_rank": [2, 1, 1, 2],
            "num_tokens_per_expert": [1, 1, 0, 1, 0, 1, 2, 1],
            "is_token_in_rank": [[1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]],
            "rank_prefix_matrix": rank_prefix,
            "channel_prefix_matrix": [[1, 2], [1, 1], [1, 1], [1, 2]],
            "recv_channel_prefix_matrix": [[0, 1], [0, 1], [0, 2], [0, 1]],
            "recv_src_idx": [0, 3, 1, 2, 0, 1, 0, 2],
            "recv_topk_idx": [[0, -1], [1, -1], [-1, 1], [0, 1], [-1, 0], [1, -1], [0, -1], [-1, 1]],
            "num_recv_tokens_per_expert": [4, 5],
            "num_recv_tokens": 8,
        });
        assert_eq!(ranks[0], rank_0);
        let rank_3 = json!({
            "num_tokens_per_rank": [2, 2, 2, 1],
            "num_tokens_per_expert": [1, 1, 1, 1, 1, 1, 1, 1],
            "is_token_in_rank": [[1, 1, 0, 0], [0, 0, 0, 1], [1, 0, 1, 0], [0, 1, 1, 0]],
            "rank_prefix_matrix": rank_prefix,
            "channel_prefix_matrix": [[1, 2], [1, 2], [0, 2], [1, 1]],
            "recv_channel_prefix_matrix": [[0, 1], [0, 1], [0, 1], [0, 1]],
            "recv_src_idx": [0, 2, 1, 3, 0, 3, 1],
            "recv_topk_idx": [[-1, 0], [1, 0], [0, -1], [-1, 1], [1, -1], [-1, 0], [0, 1]],
            "num_recv_tokens_per_expert": [5, 4],
            "num_recv_tokens": 7,
        });
        assert_eq!(ranks[3], rank_3);
    }

    #[test]
    fn the_worked_example_on_two_nodes_by_hand() {
        let line = "--nodes 2 --ranks-per-node 2 --channels 2 --experts 8";
        let got = serde_json::to_value(run(line, WORKED_EXAMPLE).unwrap()).unwrap();
        let ranks = got["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), 4);
        let rank_0 = json!({
            "num_tokens_per_rank": [2, 1, 1, 2],
            "num_tokens_per_expert": [1, 1, 0, 1, 0, 1, 2, 1],
            "is_token_in_rank": [[1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]],
            "num_tokens_per_rdma_rank": [3, 3],
            "rdma_channel_prefix_matrix": [[2, 3], [2, 3]],
            "gbl_channel_prefix_matrix": [[1, 2], [1, 1], [1, 1], [1, 2]],
            "recv_rdma_channel_prefix_matrix": [[2, 3], [2, 3]],
            "recv_rdma_rank_prefix_sum": [3, 6],
            "recv_gbl_channel_prefix_matrix": [[0, 1], [2, 3], [4, 6], [6, 7]],
            "recv_gbl_rank_prefix_sum": [2, 4, 6, 8],
            "recv_src_meta": [[0, 1], [0, 1], [0, 1], [0, 1], [1, 1], [1, 3], [1, 3], [1, 1]],
            "send_rdma_head": [[0, 0], [1, 1], [-1, 0], [0, -1]],
            "send_nvl_head": [[0, -1], [-1, 0], [0, -1], [0, -1], [1, 0], [-1, 0]],
            "recv_src_idx": [0, 3, 1, 2, 0, 1, 0, 2],
            "recv_topk_idx": [[0, -1], [1, -1], [-1, 1], [0, 1], [-1, 0], [1, -1], [0, -1], [-1, 1]],
            "num_recv_tokens_per_expert": [4, 5],
            "num_recv_tokens": 8,
        });
        assert_eq!(ranks[0], rank_0);
        let rank_3 = json!({
            "num_tokens_per_rank": [2, 2, 2, 1],
            "num_tokens_per_expert": [1, 1, 1, 1, 1, 1, 1, 1],
            "is_token_in_rank": [[1, 1, 0, 0], [0, 0, 0, 1], [1, 0, 1, 0], [0, 1, 1, 0]],
            "num_tokens_per_rdma_rank": [3, 3],
            "rdma_channel_prefix_matrix": [[1, 3], [1, 3]],
            "gbl_channel_prefix_matrix": [[1, 2], [1, 2], [0, 2], [1, 1]],
            "recv_rdma_channel_prefix_matrix": [[2, 3], [1, 3]],
            "recv_rdma_rank_prefix_sum": [3, 6],
            "recv_gbl_channel_prefix_matrix": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "recv_gbl_rank_prefix_sum": [2, 4, 6, 7],
            "recv_src_meta": [[0, 2], [0, 2], [0, 2], [0, 3], [1, 2], [1, 2], [1, 2]],
            "send_rdma_head": [[0, -1], [-1, 0], [0, 0], [1, 1]],
            "send_nvl_head": [[0, -1], [-1, 0], [0, 0], [-1, 0], [0, -1], [1, -1]],
            "recv_src_idx": [0, 2, 1, 3, 0, 3, 1],
            "recv_topk_idx": [[-1, 0], [1, 0], [0, -1], [-1, 1], [1, -1], [-1, 0], [0, 1]],
            "num_recv_tokens_per_expert": [5, 4],
            "num_recv_tokens": 7,
        });
        assert_eq!(ranks[3], rank_3);
    }

    #[test]
    fn alignment_channels_idle_ranks_and_no_tokens_at_all() {
        for (line, text) in [
            ("--ranks-per-node 4 --channels 2 --experts 8 --expert-alignment 4", WORKED_EXAMPLE),
            ("--ranks-per-node 4 --channels 3 --experts 8", WORKED_EXAMPLE),
            ("--ranks-per-node 3 --experts 3", "[[], [[2], [-1], [0]], []]"),
            ("--nodes 2 --ranks-per-node 2 --channels 3 --experts 8 --expert-alignment 4", WORKED_EXAMPLE),
            ("--nodes 4 --ranks-per-node 1 --channels 1 --experts 8", WORKED_EXAMPLE),
            ("--nodes 3 --ranks-per-node 1 --experts 3", "[[], [[2], [-1], [0]], []]"),
            ("--nodes 2 --ranks-per-node 1 --experts 4", "[[], []]"),
            ("--ranks-per-node 2 --experts 4", "[[], []]"),
            ("--ranks-per-node 1 --experts 4", "[[[3, 3, 0], [-1, -1, -1]]]"),
        ] {
            assert_eq!(run(line, text).unwrap(), expected(line, text), "{line}: {text}");
        }
        let aligned = run("--ranks-per-node 4 --experts 8 --expert-alignment 4", WORKED_EXAMPLE).unwrap();
        assert_eq!(aligned.ranks[0].num_recv_tokens_per_expert, [4, 8]);
    }

    #[test]
    fn errors_name_the_place_in_the_routing() {
        let two = "--ranks-per-node 2 --experts 4";
        for (line, text, place) in [
            (two, "[[[0]], [[1]]", "line 1"),
            (two, "[[[0]],\n [[\"a\"]]]", "line 2"),
            (two, "[[[0]], [[0.5]]]", "line 1"),
            (two, "{\"ranks\": []}", "line 1"),
            (two, "[[[0]]]", "1 ranks"),
            (two, "[[], [[0, 1], [2]]]", "rank 1, token 1: 1 ids, but 2 at rank 1, token 0"),
            (two, "[[[]], []]", "rank 0, token 0: 0 ids"),
            (two, "[[[0, 4]], []]", "rank 0, token 0, entry 1: 4;"),
            (two, "[[[0, -2]], []]", "rank 0, token 0, entry 1: -2;"),
            ("--ranks-per-node 2 --experts 3", "[[], []]", "--experts 3"),
            ("--ranks-per-node 2 --experts 0", "[[], []]", "--experts 0"),
            (
                "--ranks-per-node 2 --experts 4 --nodes 2",
                "[[], []]",
                "2 ranks: --nodes 2 with --ranks-per-node 2 are 4 ranks",
            ),
            ("--ranks-per-node 2 --experts 6 --nodes 2", "[[], [], [], []]", "--experts 6"),
        ] {
            let error = run(line, text).unwrap_err();
            assert_eq!(error.code, crate::error::USAGE);
            assert!(
                error.message.as_deref().is_some_and(|message| message.contains(place)),
                "{text}: {error:?}"
            );
        }
        let long: Value = json!([[vec![0; 33]], []]);
        assert_eq!(run(two, &long.to_string()).unwrap_err().code, crate::error::USAGE);
        assert_eq!(read(Path::new("/no/such/file")).unwrap_err().code, crate::error::USAGE);
    }

    #[test]
    fn the_finding_is_reported_not_its_consequences() {
        let timeout = || CommandError { consequence: true, ..CommandError::failed("waited for rank 2") };
        let outcomes = vec![Err(timeout()), Err(timeout()), Err(CommandError::failed("data race"))];
        assert_eq!(merge(outcomes).unwrap_err().message.as_deref(), Some("rank 2: data race"));
    }

    #[test]
    fn help_names_no_flag_that_there_is_not() {
        use clap::Args as _;
        let help = HandleArgs::augment_args(clap::Command::new("handle")).render_long_help().to_string();
        assert!(help.contains("--random-schedule") && !help.contains("--seed"), "{help}");
    }
}
