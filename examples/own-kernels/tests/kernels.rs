//! The kernels on the virtual GPU: right results on every schedule, and no race. With the feature `cuda`,
//! on a GPU as well.

mod gpus;

use epoxide_simt::launch::{Call, ContractError, Entry};
use epoxide_simt::{Global, ptx};
use epoxide_vgpu::{Machine, MachineError, Module};
use gpus::{Array, Gpus, launch_virtual, on_gpus};
use own_kernels::*;

/// Numbers that look random, the same in every run.
fn numbers(len: usize) -> Vec<u32> {
    let mut state = 0x9e37_79b9u32;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    (0..len).map(next).collect()
}

/// The same as multiples of 1/256 between -8 and 8: their sums and products of a few are exact.
fn floats(len: usize) -> Vec<f32> {
    numbers(len).into_iter().map(|n| (n % 4096) as f32 / 256.0 - 8.0).collect()
}

#[test]
fn the_ptx_has_the_kernels_of_this_crate_and_no_others() {
    let names: Vec<_> = ptx::CutPtx::new(PTX).names().collect();
    assert_eq!(
        names,
        [
            "exchange",
            "histogram",
            "matrix_product",
            "matrix_product_bf16",
            "rms_norm",
            "softmax",
            "sum",
            "vector_add"
        ]
    );
}

#[test]
fn vectors_are_added() {
    on_gpus(1, |mut gpus| {
        let (a, b) = (floats(1000), floats(2000)[1000..].to_vec());
        let (da, db) = (gpus.upload(0, "a", &a), gpus.upload(0, "b", &b));
        let out = gpus.alloc::<f32>(0, "out", 1000);
        gpus.launch(0, VectorAdd::call(da.global(), db.global(), out.global(), 1000));
        gpus.run();
        let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        assert_eq!(out.download(), want);
    });
}

#[test]
fn two_launches_reduce_an_array() {
    on_gpus(1, |mut gpus| {
        let x = floats(3000);
        let dx = gpus.upload(0, "x", &x);
        let sums = gpus.alloc::<f32>(0, "sums", 5);
        let all = gpus.alloc::<f32>(0, "all", 1);
        gpus.launch(0, Sum::call(dx.global(), sums.global(), 3000, 5));
        gpus.launch(0, Sum::call(sums.global(), all.global(), 5, 1));
        gpus.run();
        // Exact in any order, so the order does not matter here.
        assert_eq!(all.download(), [x.iter().sum::<f32>()]);
    });
}

#[test]
fn rows_of_a_softmax_are_those_of_the_host() {
    // The second shape takes 64 KiB of shared memory, which a GPU gives where it is asked for.
    for (rows, columns) in [(3, 300), (1, 16_352)] {
        on_gpus(1, |gpus| compare_softmax(gpus, rows, columns));
    }
}

fn compare_softmax(mut gpus: Gpus, rows: usize, columns: usize) {
    let x = floats(rows * columns);
    let dx = gpus.upload(0, "x", &x);
    let out = gpus.alloc::<f32>(0, "out", rows * columns);
    gpus.launch(0, Softmax::call(dx.global(), out.global(), rows as u32, columns as u32));
    gpus.run();
    for (row, got) in x.chunks(columns).zip(out.download().chunks(columns)) {
        let powers: Vec<f64> = row.iter().map(|v| f64::from(*v).exp()).collect();
        let sum: f64 = powers.iter().sum();
        for (power, got) in powers.iter().zip(got) {
            let want = power / sum;
            assert!((f64::from(*got) - want).abs() <= 1e-5 * want, "{got} instead of {want}");
        }
    }
}

/// The bits of a number as BF16, rounded to nearest even.
fn bf16(v: f32) -> u32 {
    (v.to_bits() + 0x7fff + (v.to_bits() >> 16 & 1)) >> 16
}

#[test]
fn an_rms_norm_is_that_of_the_host_bit_for_bit() {
    on_gpus(1, |mut gpus| {
        let (rows, columns, epsilon) = (3, 700, 1e-5);
        let number = |i: usize| ((i * 37 % 17) as f32 - 8.0) / 2.0;
        let pairs = |len: usize, number: &dyn Fn(usize) -> f32| -> Vec<u32> {
            (0..len / 2).map(|i| bf16(number(2 * i)) | bf16(number(2 * i + 1)) << 16).collect()
        };
        let weight = |c: usize| 1.0 + (c % 5) as f32 / 4.0;
        let x = gpus.upload(0, "x", &pairs(rows * columns, &number));
        let weights = gpus.upload(0, "weight", &pairs(columns, &weight));
        let out = gpus.alloc::<u32>(0, "out", rows * columns / 2);
        let (r, c) = (rows as u32, columns as u32);
        gpus.launch(0, RmsNorm::call(x.global(), weights.global(), out.global(), r, c, epsilon));
        gpus.run();

        // Sums of these squares are exact in any order.
        let scale = |row: usize| {
            let squares: f32 = (row * columns..(row + 1) * columns).map(|i| number(i) * number(i)).sum();
            1.0 / (squares / columns as f32 + epsilon).sqrt()
        };
        let want = |i: usize| number(i) * scale(i / columns) * weight(i % columns);
        assert_eq!(out.download(), pairs(rows * columns, &want));
    });
}

#[test]
fn a_matrix_product_is_that_of_the_host_bit_for_bit() {
    on_gpus(1, |mut gpus| {
        let (m, n, k) = (32, 48, 32);
        let (a, b) = (floats(m * k), floats(k * n));
        let (da, db) = (gpus.upload(0, "a", &a), gpus.upload(0, "b", &b));
        let c = gpus.alloc::<f32>(0, "c", m * n);
        let call = MatrixProduct::call(da.global(), db.global(), c.global(), m as u32, n as u32, k as u32);
        gpus.launch(0, call);
        gpus.run();
        let mut want = vec![0.0f32; m * n];
        for i in 0..m {
            for j in 0..n {
                for l in 0..k {
                    want[i * n + j] += a[i * k + l] * b[l * n + j];
                }
            }
        }
        assert_eq!(c.download(), want);
    });
}

/// Multiplies matrices of small integers, whose sums are exact, on tensor cores.
fn multiply_on_tensor_cores(mut gpus: Gpus, m: usize, n: usize, k: usize) {
    let small = |len, from: usize| -> Vec<f32> {
        numbers(from + len)[from..].iter().map(|n| (n % 16) as f32 - 8.0).collect()
    };
    let (a, b) = (small(m * k, 0), small(k * n, 77));
    let pairs = |numbers: &[f32]| -> Vec<u32> {
        numbers.chunks(2).map(|pair| pair[0].to_bits() >> 16 | pair[1].to_bits()).collect()
    };
    let (da, db) = (gpus.upload(0, "a", &pairs(&a)), gpus.upload(0, "b", &pairs(&b)));
    let c = gpus.alloc::<f32>(0, "c", m * n);
    let (da, db, dc) = (da.global(), db.global(), c.global());
    gpus.launch(0, MatrixProductBf16::call(da, db, dc, m as u32, n as u32, k as u32));
    gpus.run();
    let mut want = vec![0.0f32; m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                want[i * n + j] += a[i * k + l] * b[l * n + j];
            }
        }
    }
    assert!(c.download() == want, "a sum differs");
}

#[test]
fn a_matrix_product_on_tensor_cores_is_exact_where_sums_are() {
    on_gpus(1, |gpus| multiply_on_tensor_cores(gpus, 128, 128, 128));
    // Blocks in both directions, and on a GPU more tiles too.
    multiply_on_tensor_cores(Gpus::Virtual(Machine::new(1)), 256, 384, 32);
    #[cfg(feature = "cuda")]
    gpus::on_real_gpus(1, |gpus| multiply_on_tensor_cores(gpus, 256, 384, 160));
}

/// The values of the histogram tests, their bins, and the counts that they should give.
fn counted() -> (Vec<u32>, u32, Vec<u32>) {
    let bins = 20;
    let values: Vec<u32> = numbers(5000).into_iter().map(|n| n % 24).collect();
    let count = |bin| values.iter().filter(|value| **value == bin).count() as u32;
    let want = (0..bins).map(count).collect();
    (values, bins, want)
}

#[test]
fn a_histogram_counts_every_value_once() {
    on_gpus(1, |mut gpus| {
        let (values, bins, want) = counted();
        let dv = gpus.upload(0, "values", &values);
        let counts = gpus.upload(0, "counts", &vec![0u32; bins as usize]);
        gpus.launch(0, Histogram::call(dv.global(), counts.global(), 5000, bins));
        gpus.run();
        assert_eq!(counts.download(), want);
    });
}

/// The memory of one rank of an exchange.
struct Rank {
    x: Array<u32>,
    out: Array<u32>,
    mailbox: Array<u32>,
    flag: Array<u64>,
    expired: Array<u32>,
}

impl Rank {
    fn new(gpus: &Gpus, rank: usize, x: &[u32]) -> Rank {
        Rank {
            x: gpus.upload(rank, "x", x),
            out: gpus.alloc(rank, "out", x.len()),
            mailbox: gpus.alloc(rank, "mailbox", 2 * x.len()),
            flag: gpus.upload(rank, "flag", &[0]),
            expired: gpus.upload(rank, "expired", &[0]),
        }
    }

    /// The call of a turn. `peer_mailbox` and `peer_flag` are the peer's, at this rank's addresses.
    fn call(&self, peer_mailbox: &Array<u32>, peer_flag: &Array<u64>, turn: u32) -> ExchangeArgs {
        ExchangeArgs {
            x: self.x.global(),
            out: self.out.global(),
            peer_mailbox: peer_mailbox.global(),
            peer_flag: peer_flag.global(),
            mailbox: self.mailbox.global(),
            flag: self.flag.global(),
            expired: self.expired.global(),
            timeout_ns: 10_000_000_000,
            len: self.x.len() as u32,
            turn,
        }
    }
}

#[test]
fn two_ranks_exchange_their_vectors_turn_after_turn() {
    on_gpus(2, |mut gpus| {
        let xs = [numbers(300), numbers(600)[300..].to_vec()];
        let ranks = [0, 1].map(|rank| Rank::new(&gpus, rank, &xs[rank]));
        let peers = [0, 1].map(|rank: usize| {
            let peer = &ranks[1 - rank];
            (gpus.map(rank, &peer.mailbox), gpus.map(rank, &peer.flag))
        });
        for turn in 1..=3 {
            for rank in [0, 1] {
                let (mailbox, flag) = &peers[rank];
                gpus.launch(rank, Exchange::call(ranks[rank].call(mailbox, flag, turn)));
            }
        }
        gpus.run();
        let want: Vec<u32> = xs[0].iter().zip(&xs[1]).map(|(a, b)| a.wrapping_add(*b)).collect();
        for rank in &ranks {
            assert_eq!(rank.expired.download(), [0]);
            assert_eq!(rank.out.download(), want);
        }
    });
}

#[test]
fn a_rank_whose_peer_never_comes_gives_up() {
    on_gpus(2, |mut gpus| {
        let ranks = [0, 1].map(|rank| Rank::new(&gpus, rank, &[1, 2, 3]));
        let mailbox = gpus.map(0, &ranks[1].mailbox);
        let flag = gpus.map(0, &ranks[1].flag);
        let args = ExchangeArgs { timeout_ns: 1_000_000, ..ranks[0].call(&mailbox, &flag, 1) };
        gpus.launch(0, Exchange::call(args));
        gpus.run();
        assert_eq!(ranks[0].expired.download(), [EXCHANGE_BLOCKS]);
    });
}

/// Calls for devices.
type Calls<K> = Vec<(usize, Result<Call<K>, ContractError>)>;

/// The report of check mode on a kernel whose PTX was edited. `calls` returns the memory of its calls, too.
fn report_of<K: Entry, M>(
    kernel: &str,
    edit: (&str, &str),
    devices: usize,
    calls: impl Fn(&Gpus) -> (Calls<K>, M),
) -> MachineError {
    let (before, body) = PTX.split_once(&format!(".visible .entry {kernel}(")).unwrap();
    assert!(body.contains(edit.0), "{kernel} has no {}", edit.0);
    let broken = format!("{before}.visible .entry {kernel}({}", body.replacen(edit.0, edit.1, 1));
    let module = Module::parse(&broken).unwrap();
    for seed in 0..20 {
        let mut gpus = Gpus::Virtual(Machine::checked(devices, seed));
        let (calls, _memory) = calls(&gpus);
        let machine = gpus.machine();
        for (device, call) in calls {
            launch_virtual(machine, device, &module, &call.unwrap());
        }
        if let Err(error) = machine.run() {
            return error;
        }
    }
    panic!("no seed reports {kernel} without {}", edit.0);
}

#[test]
fn a_barrier_that_is_missing_is_reported_with_the_line_of_the_kernel() {
    let (values, bins, _) = counted();
    let error = report_of::<Histogram, _>("histogram", ("barrier.sync 0;", ""), 1, |gpus| {
        let dv = gpus.upload(0, "values", &values);
        let counts = gpus.upload(0, "counts", &vec![0u32; bins as usize]);
        let call = Histogram::call(dv.global(), counts.global(), 5000, bins);
        (vec![(0, call)], (dv, counts))
    });
    // A value is counted in a bin that another warp has not set to zero yet.
    let text = error.to_string();
    assert!(text.contains("unwritten shared memory") && text.contains("src/histogram.rs:"), "{text}");
}

#[test]
fn a_release_that_is_missing_is_reported_across_ranks() {
    let edit = ("red.release.sys.global.add.u64", "red.relaxed.sys.global.add.u64");
    let error = report_of::<Exchange, _>("exchange", edit, 2, |gpus| {
        let ranks = [0, 1].map(|rank| Rank::new(gpus, rank, &[1, 2, 3]));
        let peers = [0, 1].map(|rank: usize| {
            let peer = &ranks[1 - rank];
            (gpus.map(rank, &peer.mailbox), gpus.map(rank, &peer.flag))
        });
        let call = |rank: usize| Exchange::call(ranks[rank].call(&peers[rank].0, &peers[rank].1, 1));
        (vec![(0, call(0)), (1, call(1))], (ranks, peers))
    });
    let text = error.to_string();
    assert!(text.contains("data race") && text.contains("src/exchange.rs:"), "{text}");
}

#[test]
fn a_clause_that_does_not_hold_is_an_error_before_the_launch() {
    let nothing = Global::new(0);
    let error = MatrixProduct::call(nothing, nothing, nothing, 16, 24, 16).err().unwrap();
    assert_eq!(error.to_string(), "kernel matrix_product requires n.is_multiple_of(16): n = 24");
    let call = Histogram::call(Global::new(0), Global::new(0), 100, 50).unwrap();
    let error = call.shape_of(1, 256, 199).unwrap_err().to_string();
    assert!(error.contains("200 bytes of shared memory, 199 were given"), "{error}");
}
