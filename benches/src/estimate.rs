//! Estimates a measurement's time and memory before it begins, so that no user waits minutes for
//! one that takes hours.

use crate::{Effort, Plan, counts};

/// Processor time of the interpreter, in nanoseconds, for each block of a call, and each peer that
/// it waits for. Measured on the two cores that docs/BENCH-NOTES.md names.
const BLOCK_NS: f64 = 40_000.0;
/// Time for each row sent or received.
const ROW_NS: f64 = 2_300.0;
/// For each byte of it.
const BYTE_NS: f64 = 1.7;
/// The share of the processors that ranks keep busy, since they wait for each other.
const BUSY: f64 = 0.75;
/// Calls of a run beside those that are timed: results are checked, and some are traced.
const OTHER_CALLS: f64 = 20.0;
/// Seconds of a rank for a buffer and rows.
const SETUP: f64 = 0.015;
/// Bytes of a rank on a virtual GPU for any size, and for each multiprocessor.
const RANK_BYTES: f64 = 6e6;
const SM_BYTES: f64 = 2.8e6;
/// Received rows are there so many times: in the pool, twice, and where they are made and compared
/// with others.
const COPIES: f64 = 6.0;

/// Rough needs of a measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Bytes of a rank's pool and of what lies beside it on the device.
    pub device_bytes: f64,
    /// On virtual GPUs: bytes of this process. Their memory is the host's.
    pub host_bytes: f64,
    /// On virtual GPUs: seconds. Hardware gets no estimate.
    pub seconds: Option<f64>,
}

impl Plan {
    /// The estimate, with so many processors for the virtual GPUs.
    pub fn estimate(&self, processors: usize) -> Estimate {
        let ranks = f64::from(self.topology.ranks());
        let by_token = counts::expected(f64::from(self.tokens), self.count_sizes()).recv_total;
        // By expert a row for each selection, and padding that half fills the last rows of each.
        let by_expert = self.rows_by_expert.filter(|_| self.low_latency.is_none()).map(|alignment| {
            let padding = f64::from(self.experts) / ranks * f64::from(alignment) / 2.0;
            f64::from(self.tokens) * f64::from(self.topk) + padding
        });
        let received = by_expert.unwrap_or(by_token);
        let row = self.combine_row_bytes() as f64;
        // The pool has room for all tokens of all ranks, or for all rows by expert, once for
        // received rows and once for returned ones.
        let room = self.room_by_expert().map_or(0.0, |rows| rows as f64).max(ranks * f64::from(self.tokens));
        let pool = room * (2.0 * row + 16.0 * f64::from(self.topk));
        let most_sms = self.num_sms.iter().copied().max().unwrap_or(0);
        // An all-gather's rows and a reduce-scatter's, once on the device and once where they are
        // made and compared.
        let gathered = if self.baseline.is_some() { ranks * f64::from(self.tokens) * row * 2.0 } else { 0.0 };
        // Sorted rows lie beside those of a staged combine.
        let outside = received + by_expert.unwrap_or(0.0);
        let own = (f64::from(self.tokens) * 2.0 + outside) * row + gathered;
        let host =
            ranks * (RANK_BYTES + SM_BYTES * f64::from(most_sms) + received * row * COPIES + 2.0 * gathered);
        let seconds = self.is_virtual.then(|| {
            let whole = self.effort == Effort::Whole;
            let mut calls = self.steps() as f64 / self.num_sms.len().max(1) as f64;
            if self.low_latency.is_some() {
                // Steps are pairs, and those that are not chained are made once more for the trace.
                calls = 2.0 * (calls + f64::from(self.warmup + self.iters));
            }
            let calls = calls + if whole { OTHER_CALLS } else { 2.0 };
            let blocks = f64::from(self.num_sms.iter().sum::<u32>());
            let row_bytes = self.phases().iter().map(|&name| self.row_bytes(name) as f64);
            let bytes = row_bytes.sum::<f64>() / self.phases().len() as f64;
            let rows = self.num_sms.len() as f64 * received;
            let of_all_sms = blocks * ranks * BLOCK_NS + rows * (ROW_NS + bytes * BYTE_NS);
            let busy = (processors.max(1) as f64).min(ranks) * BUSY;
            f64::from(self.repeat) * ranks * (SETUP + calls * of_all_sms / 1e9) / busy.max(1.0)
        });
        Estimate { device_bytes: pool + own, host_bytes: host, seconds }
    }
}

#[cfg(test)]
mod tests {
    use crate::tests::plan;

    #[test]
    fn larger_sizes_take_longer_and_more_room() {
        let of = |line: &str| plan(line).estimate(2);
        let small = of("");
        for line in
            ["--tokens 800", "--hidden 64000", "--ranks-per-node 4", "--num-sms 24", "--rows-by-expert 4"]
        {
            let large = of(line);
            assert!(
                large.seconds > small.seconds && large.host_bytes > small.host_bytes,
                "{line}: {large:?}"
            );
        }
        for line in ["--iters 20", "--repeat 3", "--num-sms 2,2", "--graph 3"] {
            assert!(of(line).seconds > small.seconds, "{line}");
        }
        assert!(plan("").estimate(8).seconds <= small.seconds);
        // A layer of a large model, of which 13 GB were measured.
        let large = of(
            "--ranks-per-node 8 --tokens 4096 --hidden 7168 --experts 256 --topk 8 --num-sms 24 --iters 20",
        );
        assert!(
            (13e9..18e9).contains(&large.host_bytes) && large.seconds.is_some_and(|s| s > 300.0),
            "{large:?}"
        );
        assert!((large.device_bytes / 1.3e9 - 1.0).abs() < 0.2, "{large:?}");
    }
}
