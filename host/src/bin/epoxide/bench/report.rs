//! Turns the ranks' samples into text and JSON.

use serde_json::{Value, json};

use super::Args;
use super::measure::{RankResult, Samples, Times};

/// A distribution over iterations; each iteration is the mean over ranks.
struct Summary {
    mean: f64,
    min: f64,
    max: f64,
    median: f64,
    p99: f64,
}

impl Summary {
    fn new(ranks: &[&Samples]) -> Summary {
        let iterations = ranks.first().map_or(0, |samples| samples.len());
        let mut means: Vec<f64> = (0..iterations)
            .map(|i| ranks.iter().map(|samples| samples[i]).sum::<f64>() / ranks.len() as f64)
            .collect();
        means.sort_by(f64::total_cmp);
        let rank_means = ranks.iter().map(|samples| samples.iter().sum::<f64>() / iterations as f64);
        let at = |q: f64| means[((means.len() - 1) as f64 * q).round() as usize];
        Summary {
            mean: means.iter().sum::<f64>() / iterations as f64,
            min: rank_means.clone().fold(f64::MAX, f64::min),
            max: rank_means.fold(0.0, f64::max),
            median: at(0.5),
            p99: at(0.99),
        }
    }

    fn json(&self) -> Value {
        json!({ "avg_us": self.mean, "min_rank_us": self.min, "max_rank_us": self.max, "median_us": self.median, "p99_us": self.p99 })
    }
}

/// The results of all ranks.
pub struct Report<'a> {
    args: &'a Args,
    ranks: &'a [RankResult],
}

/// One line of the table: a phase and how its bytes are counted.
struct Phase {
    name: &'static str,
    summary: Summary,
    /// Bytes per row.
    row_bytes: u64,
    /// GB/s of the ceiling that bounds it.
    ceiling: Option<f64>,
}

impl<'a> Report<'a> {
    /// A report of `ranks`, in rank order.
    pub fn new(args: &'a Args, ranks: &'a [RankResult]) -> Self {
        Report { args, ranks }
    }

    fn mean_over_ranks(&self, count: impl Fn(usize, &RankResult) -> u64) -> f64 {
        let total: u64 = self.ranks.iter().enumerate().map(|(i, rank)| count(i, rank)).sum();
        total as f64 / self.ranks.len() as f64
    }

    /// Rows received per rank, own rows included.
    fn recv_rows(&self) -> f64 {
        self.mean_over_ranks(|_, rank| rank.recv_rows.iter().sum())
    }

    /// Rows that crossed a link per rank.
    fn remote_rows(&self) -> f64 {
        self.mean_over_ranks(|i, rank| rank.recv_rows.iter().sum::<u64>() - rank.recv_rows[i])
    }

    fn summary(&self, index: usize, samples: impl Fn(&Times) -> &Samples) -> Summary {
        let all: Vec<&Samples> = self.ranks.iter().map(|rank| samples(&rank.times[index])).collect();
        Summary::new(&all)
    }

    fn mean(&self, index: usize, value: impl Fn(&Times) -> f64) -> f64 {
        self.ranks.iter().map(|rank| value(&rank.times[index])).sum::<f64>() / self.ranks.len() as f64
    }

    fn phases(&self, index: usize) -> Vec<Phase> {
        let ceiling = self.ranks[0].times[index].ceiling.map(|_| {
            let side = |pick: fn((f64, f64)) -> f64| self.mean(index, |t| t.ceiling.map_or(0.0, pick));
            (side(|c| c.0), side(|c| c.1))
        });
        let (push, pull) = (ceiling.map(|c| c.0), ceiling.map(|c| c.1));
        let (dispatch, combine) = (self.args.dispatch_row_bytes(), self.args.combine_row_bytes());
        let phase = |name, samples: fn(&Times) -> &Samples, row_bytes, ceiling| Phase {
            name,
            summary: self.summary(index, samples),
            row_bytes,
            ceiling,
        };
        vec![
            phase("dispatch cached", |t| &t.dispatch_cached, dispatch, push),
            phase("dispatch uncached", |t| &t.dispatch_uncached, dispatch, push),
            phase("combine in pool", |t| &t.combine, combine, pull),
            phase("combine staged", |t| &t.combine_staged, combine, pull),
        ]
    }

    /// The machine-readable form.
    pub fn json(&self) -> Value {
        let first = &self.ranks[0];
        let results: Vec<Value> = (0..first.times.len())
            .map(|index| {
                let phases: Vec<Value> = self
                    .phases(index)
                    .iter()
                    .map(|p| {
                        let mut value = p.summary.json();
                        value["phase"] = p.name.into();
                        value["row_bytes"] = p.row_bytes.into();
                        value["ceiling_gbps"] = p.ceiling.into();
                        value["remote_gbps"] =
                            gbps(self.remote_rows() * p.row_bytes as f64, p.summary.mean).into();
                        value["recv_gbps"] =
                            gbps(self.recv_rows() * p.row_bytes as f64, p.summary.mean).into();
                        value
                    })
                    .collect();
                json!({
                    "num_sms": first.times[index].num_sms,
                    "phases": phases,
                    "dispatch_back_to_back_us": self.mean(index, |t| t.dispatch_stream),
                    "dispatch_exact_returns_to_host_us": self.summary(index, |t| &t.dispatch_exact_host).json(),
                    "combine_back_to_back_us": self.mean(index, |t| t.combine_stream),
                })
            })
            .collect();
        json!({
            "device": first.device,
            "virtual": first.is_virtual,
            "driver_version": first.driver_version,
            "num_ranks": self.ranks.len(),
            "tokens": self.args.tokens,
            "hidden": self.args.hidden,
            "experts": self.args.experts,
            "topk": self.args.topk,
            "dtype": self.args.dtype().name(),
            "warmup": self.args.warmup,
            "iters": self.args.iters,
            "recv_rows": self.recv_rows(),
            "remote_rows": self.remote_rows(),
            "setup_ms": self.ranks.iter().map(|r| r.setup_ms).fold(0.0, f64::max),
            "pool_bytes": first.pool_bytes,
            "device_bytes": self.ranks.iter().map(|r| r.device_bytes).max(),
            "results": results,
        })
    }

    /// The human-readable form.
    pub fn print(&self) {
        let (args, first) = (self.args, &self.ranks[0]);
        println!(
            "[bench intranode HT] nodes=1 num_ranks={} tokens={} hidden={} experts={} topk={} warmup={} iters={} dtype={}",
            self.ranks.len(),
            args.tokens,
            args.hidden,
            args.experts,
            args.topk,
            args.warmup,
            args.iters,
            args.dtype()
        );
        let what =
            if first.is_virtual { "VIRTUAL GPU: times are those of an interpreter" } else { &first.device };
        let driver = (first.driver_version / 1000, first.driver_version % 1000 / 10);
        println!("  device: {what}, driver for CUDA {}.{}", driver.0, driver.1);
        let setup = self.ranks.iter().map(|r| r.setup_ms).fold(0.0, f64::max);
        let used = self.ranks.iter().map(|r| r.device_bytes).max().unwrap_or(0);
        println!(
            "  set-up {setup:.0} ms; pool {:.1} MB, device memory {:.1} MB a rank",
            first.pool_bytes as f64 / 1e6,
            used as f64 / 1e6
        );
        println!(
            "  rows per rank: received {:.1} (own included), over the links {:.1}; tokens routed {:.1}",
            self.recv_rows(),
            self.remote_rows(),
            self.mean_over_ranks(|_, rank| rank.routed_tokens)
        );
        println!(
            "  whole calls, between events; a cached dispatch and a combine in the pool are one kernel each, so that is kernel time too"
        );
        for index in 0..first.times.len() {
            self.print_times(index, first.is_virtual);
        }
    }

    fn print_times(&self, index: usize, is_virtual: bool) {
        let t = &self.ranks[0].times[index];
        println!("\n  num_sms={}", t.num_sms);
        println!(
            "    {:<22} {:>9} {:>9} {:>9} {:>9} {:>9} | {:>9} {:>9} {:>9} {:>7}",
            "us", "avg", "median", "p99", "min rank", "max rank", "remote", "received", "ceiling", "of it"
        );
        for p in self.phases(index) {
            let s = &p.summary;
            print!(
                "    {:<22} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} |",
                p.name, s.mean, s.median, s.p99, s.min, s.max
            );
            if is_virtual {
                println!("   (no bandwidth: virtual)");
                continue;
            }
            let remote = gbps(self.remote_rows() * p.row_bytes as f64, s.mean);
            print!(" {remote:>9.1} {:>9.1}", gbps(self.recv_rows() * p.row_bytes as f64, s.mean));
            match p.ceiling {
                Some(ceiling) => println!(" {ceiling:>9.1} {:>6.1}%", 100.0 * remote / ceiling),
                None => println!(),
            }
        }
        println!(
            "    back to back: cached dispatch {:.1} us, combine {:.1} us a call; an exact-size dispatch returns to the host after {:.1} us",
            self.mean(index, |t| t.dispatch_stream),
            self.mean(index, |t| t.combine_stream),
            self.summary(index, |t| &t.dispatch_exact_host).median,
        );
        if !is_virtual {
            self.print_conventions(index);
        }
    }

    /// The same two times, cached dispatch and combine in the pool, as others count them.
    fn print_conventions(&self, index: usize) {
        let (tokens, routed) = (self.args.tokens as f64, self.mean_over_ranks(|_, rank| rank.routed_tokens));
        let (received, remote) = (self.recv_rows(), self.remote_rows());
        let ranks = self.ranks.len() as f64;
        let phases = [
            (
                "dispatch",
                self.summary(index, |t| &t.dispatch_cached),
                self.args.dispatch_row_bytes(),
                routed,
                received,
            ),
            (
                "combine ",
                self.summary(index, |t| &t.combine),
                self.args.combine_row_bytes(),
                received,
                routed,
            ),
        ];
        println!(
            "    as the seed and NCCL EP count (send: unique (token, node) pairs, recv: rows; combine swaps them)"
        );
        for (name, s, row_bytes, send, recv) in &phases {
            let bw = |rows: f64| gbps(rows * *row_bytes as f64, s.mean);
            println!(
                "      {name}: avg={:.1}us min={:.1}us max={:.1}us  per_rank_bw={:.1} GB/s  agg_bw={:.1} GB/s  (BW @ avg time)",
                s.mean,
                s.min,
                s.max,
                bw(tokens),
                bw(tokens) * ranks
            );
            println!(
                "                send: total={:.1}  nvl={:.1}  rdma=0.0 GB/s  recv: total={:.1}  nvl={:.1}  rdma=0.0 GB/s",
                bw(*send),
                bw(*send),
                bw(*recv),
                bw(*recv)
            );
        }
        let mb = |rows: f64| rows * self.args.dispatch_row_bytes() as f64 / 1e6;
        println!(
            "      byte counts (per rank avg): total_send={:.1} MB ({routed:.0} tok)  rdma_send=0.0 MB (0 tok)  total_recv={:.1} MB ({received:.0} tok)  rdma_recv=0.0 MB (0 tok)",
            mb(routed),
            mb(received)
        );
        println!("    as DeepEP counts (received rows, own included) and over the links only (own left out)");
        for (name, s, row_bytes, ..) in &phases {
            let bw = |rows: f64| gbps(rows * *row_bytes as f64, s.mean);
            println!("      {name}: DeepEP {:.1} GB/s  links {:.1} GB/s", bw(received), bw(remote));
        }
    }
}

/// GB/s (1e9 bytes) of `bytes` in `us` microseconds.
fn gbps(bytes: f64, us: f64) -> f64 {
    bytes / us / 1e3
}
