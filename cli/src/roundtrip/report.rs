//! The object of `roundtrip --json`.

use serde::{Deserialize, Serialize};

use crate::options::Settings;
use crate::ranks::{Placement, RankContext};

/// The object.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    pub command: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<ConfigReport>,
    /// Results of all ranks, in rank order.
    pub ranks: Vec<RankReport>,
    pub times: Times,
    pub iterations: u64,
    pub graph_replays: u64,
    /// Reads and writes of kernels' lanes that check mode has checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checked_accesses: Option<u64>,
    pub pass: bool,
    pub exit_code: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Writes into the report in rank 0's process, and does nothing elsewhere.
pub type Publish<'a> = &'a dyn Fn(&dyn Fn(&mut Report));

/// Settings, and what follows from them.
#[derive(Debug, Clone, Serialize)]
pub struct ConfigReport {
    #[serde(flatten)]
    pub settings: Settings,
    pub placement: Placement,
    pub device_name: String,
    /// True if times are those of the virtual GPU, which are not comparable with hardware.
    pub device_is_virtual: bool,
    /// Rows that there is room for: those received at most, in low latency those of each place.
    pub capacity_rows: u64,
    pub pool_bytes: u64,
    /// Nothing in low latency.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub high_throughput: Option<HighThroughput>,
}

/// Settings of high throughput only.
#[derive(Debug, Clone, Serialize)]
pub struct HighThroughput {
    pub num_channels: u32,
    pub num_max_nvl_chunked_send_tokens: u32,
    pub num_max_nvl_chunked_recv_tokens: u32,
    pub wire_bytes: u64,
    /// Whether the ranks of several nodes are one, as all their memory is mapped.
    pub is_one_node: bool,
    pub nvl_buffer_size_hint: u64,
    pub rdma_buffer_size_hint: u64,
}

impl ConfigReport {
    /// Settings of either mode.
    pub fn new(context: &RankContext, capacity_rows: u64, pool_bytes: u64) -> ConfigReport {
        let info = context.device.info();
        ConfigReport {
            settings: context.settings.clone(),
            placement: context.placement,
            device_name: info.name.clone(),
            device_is_virtual: info.is_virtual,
            capacity_rows,
            pool_bytes,
            high_throughput: None,
        }
    }
}

/// Results of one rank.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RankReport {
    pub rank: u32,
    pub num_tokens: u32,
    /// Rows that the first dispatch brought.
    pub num_recv_tokens: u32,
    /// `None` in low latency, whose first data is compared bit for bit, without a tolerance.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub first_data: Option<FirstData>,
    /// Error in rows, tables or sums of low latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Results of high throughput with the first data.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct FirstData {
    pub combine_max_abs_difference: f32,
    pub combine_max_abs_expected: f32,
    pub layout_ms: f32,
    pub dispatch_ms: f32,
    pub combine_ms: f32,
    /// Error in the dispatched rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dispatch_failure: Option<String>,
    /// Error in the sums.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub combine_failure: Option<String>,
}

/// Seconds of wall time.
#[derive(Debug, Default, Clone, Serialize)]
pub struct Times {
    pub setup_seconds: f64,
    /// Nothing in low latency.
    pub first_data_seconds: f64,
    pub bit_for_bit_seconds: f64,
    pub iterations_seconds: f64,
    pub graph_seconds: f64,
    pub total_seconds: f64,
}
