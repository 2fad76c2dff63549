//! Low-latency points of schema version 1, which had a form of their own, as points of today.
//! `bench ab` reads them from programs of before.

use serde::Deserialize;

use crate::counts::TokenCounts;
use crate::results::{
    Distribution, Key, LOW_LATENCY, Pairs, Phase, PhaseName, Point, Run, SCHEMA_VERSION, Slowest, Within,
};
use crate::{Plan, Shapes};

/// A number of tokens.
#[derive(Debug, Deserialize)]
pub(crate) struct LowLatencyV1 {
    device: String,
    #[serde(rename = "virtual")]
    is_virtual: bool,
    date: String,
    num_ranks: u32,
    nodes: u32,
    transport: Option<String>,
    tokens: u32,
    hidden: u32,
    experts: u32,
    topk: u32,
    dtype: String,
    combine_dtype: String,
    num_sms: u32,
    chunk_tokens: u32,
    packet_tokens: u32,
    dispatch: Slowest,
    combine: Slowest,
    pair: Slowest,
    dispatch_within: Within,
    combine_within: Within,
    chain: u32,
    remote_rows: f64,
    routing_digest: String,
    #[serde(default)]
    runs: Vec<Run>,
}

impl From<LowLatencyV1> for Point {
    /// Fields that the old form lacks are 0, empty or missing.
    fn from(old: LowLatencyV1) -> Point {
        let phase = |name: PhaseName, dtype: &str, slowest: Slowest, within: Within| Phase {
            name,
            row_bytes: Plan::low_latency_row_bytes(old.hidden.into(), dtype == "bf16"),
            call: Distribution::of(slowest.samples_us.clone()),
            slowest: Some(slowest),
            kernel_us: Some(within.done.mean_us),
            back_to_back: None,
            wire: None,
            bandwidth: None,
            within: Some(within),
        };
        let iters = old.dispatch.samples_us.len() / old.runs.len().max(1);
        let phases = vec![
            phase(PhaseName::LowLatencyDispatch, &old.dtype, old.dispatch, old.dispatch_within),
            phase(PhaseName::LowLatencyCombine, &old.combine_dtype, old.combine, old.combine_within),
        ];
        Point {
            schema_version: SCHEMA_VERSION,
            mode: LOW_LATENCY.into(),
            device: old.device,
            is_virtual: old.is_virtual,
            clock: Point::clock_of(old.is_virtual).into(),
            driver_version: 0,
            date: old.date,
            kernels: None,
            key: Key {
                nodes: old.nodes,
                num_ranks: old.num_ranks,
                tokens: old.tokens,
                hidden: old.hidden.into(),
                experts: old.experts,
                topk: old.topk,
                dtype: old.dtype,
                seed: 0,
                masked: 0.0,
                num_sms: old.num_sms,
                transport: old.transport,
                queues: None,
                rdma_send: None,
                combine_dtype: Some(old.combine_dtype),
                combine_rows: None,
                chunk_tokens: Some(old.chunk_tokens),
                packet_tokens: Some(old.packet_tokens),
                max_tokens: None,
            },
            shapes: Shapes::default(),
            warmup: 0,
            iters: u32::try_from(iters).unwrap_or(u32::MAX),
            setup_ms: 0.0,
            pool_bytes: 0,
            wire_bytes: 0,
            device_bytes: 0,
            routing_digest: Some(old.routing_digest),
            counts: TokenCounts::default(),
            counts_by_rank: Vec::new(),
            remote_rows: old.remote_rows,
            phases,
            exact_dispatch_returns: Distribution::default(),
            graph: Vec::new(),
            pair: Some(Pairs { chain: old.chain, period: old.pair }),
            baselines: Vec::new(),
            runs: old.runs,
        }
    }
}
