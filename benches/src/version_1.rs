//! Low-latency points of schema version 1, which had a form of their own, as points of today.
//! `bench ab` reads them from programs of before.

use serde::Deserialize;

use crate::Plan;
use crate::results::{
    Distribution, Key, LOW_LATENCY, Pairs, Phase, PhaseName, Point, Run, SCHEMA_VERSION, Slowest, Within,
};

/// A number of tokens.
#[derive(Debug, Deserialize)]
pub(crate) struct LowLatencyV1 {
    device: String,
    #[serde(rename = "virtual")]
    is_virtual: bool,
    date: String,
    #[serde(flatten)]
    key: Key,
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

/// The point that a value of the old form holds.
pub(crate) fn point_of(mut value: serde_json::Value) -> serde_json::Result<Point> {
    if let Some(fields) = value.as_object_mut() {
        // The old form had no other values.
        fields.extend([("seed".to_owned(), 0.into()), ("masked".to_owned(), 0.into())]);
    }
    serde_json::from_value::<LowLatencyV1>(value).map(Point::from)
}

impl From<LowLatencyV1> for Point {
    /// Fields that the old form lacks are 0, empty or missing.
    fn from(old: LowLatencyV1) -> Point {
        let phase = |name: PhaseName, dtype: &str, slowest: Slowest, within: Within| Phase {
            name,
            row_bytes: Plan::bytes_of_row(old.key.hidden, dtype == "bf16"),
            call: Distribution::of(slowest.samples_us.clone()),
            slowest: Some(slowest),
            kernel_us: Some(within.done.mean_us),
            back_to_back: None,
            wire: None,
            bandwidth: None,
            traffic: None,
            within: Some(within),
        };
        let iters = old.dispatch.samples_us.len() / old.runs.len().max(1);
        let back = old.key.combine_dtype.as_deref().unwrap_or_default();
        let phases = vec![
            phase(PhaseName::LowLatencyDispatch, &old.key.dtype, old.dispatch, old.dispatch_within),
            phase(PhaseName::LowLatencyCombine, back, old.combine, old.combine_within),
        ];
        Point {
            schema_version: SCHEMA_VERSION,
            mode: LOW_LATENCY.into(),
            device: old.device,
            is_virtual: old.is_virtual,
            clock: Point::clock_of(old.is_virtual).into(),
            date: old.date,
            key: old.key,
            iters: u32::try_from(iters).unwrap_or(u32::MAX),
            routing_digest: Some(old.routing_digest),
            remote_rows: old.remote_rows,
            phases,
            pair: Some(Pairs { chain: old.chain, period: old.pair }),
            runs: old.runs,
            ..Point::default()
        }
    }
}
