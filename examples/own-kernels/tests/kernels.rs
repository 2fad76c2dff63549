//! The kernels on the virtual GPU: right results on every schedule, and no race.

use std::sync::OnceLock;

use epoxide_simt::launch::{Call, ContractError, Entry};
use epoxide_simt::{Element, Global, ptx};
use epoxide_vgpu::{Array, CheckConfig, GridConfig, Machine, MachineError, Module, Number};
use own_kernels::*;

/// The committed PTX, parsed once.
fn module() -> &'static Module {
    static MODULE: OnceLock<Module> = OnceLock::new();
    MODULE.get_or_init(|| Module::parse(PTX).unwrap_or_else(|error| panic!("{error}")))
}

/// Enqueues a call, in the shape that the kernel's attribute gives it.
fn launch<K: Entry>(machine: &mut Machine, device: usize, call: Result<Call<K>, ContractError>) {
    ptx::check_fresh::<K>(PTX).unwrap();
    launch_of(machine, device, module(), call);
}

fn launch_of<K: Entry>(
    machine: &mut Machine,
    device: usize,
    module: &Module,
    call: Result<Call<K>, ContractError>,
) {
    let call = call.unwrap();
    let shape = call.shape().unwrap();
    let shape = GridConfig::new(shape.grid, shape.block, shape.shared_bytes);
    machine.launch(device, module, call.name(), shape, call.param()).unwrap();
}

/// An array as a parameter.
fn global<T: Number + Element>(array: &Array<T>) -> Global<T> {
    Global::new(array.addr())
}

/// Runs a test on machines of `devices` devices: in order, then in check mode with memory as it runs and
/// as weak as the model allows, on schedules drawn from 10 seeds.
fn on_machines(devices: usize, test: impl Fn(Machine)) {
    test(Machine::new(devices));
    epoxide_vgpu::for_each_seed(10, |seed| {
        test(Machine::checked(devices, seed));
        // Without reports: what the model allows becomes a result.
        let weak = CheckConfig { races: false, weak_memory: Some(seed), ..CheckConfig::default() };
        test(Machine::checked_with(devices, seed, weak));
    });
}

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
    assert_eq!(names, ["exchange", "histogram", "matrix_product", "softmax", "sum", "vector_add"]);
}

#[test]
fn vectors_are_added() {
    on_machines(1, |mut machine| {
        let (a, b) = (floats(1000), floats(2000)[1000..].to_vec());
        let (da, db) = (machine.upload(0, "a", &a).unwrap(), machine.upload(0, "b", &b).unwrap());
        let out = machine.alloc::<f32>(0, "out", 1000).unwrap();
        launch(&mut machine, 0, VectorAdd::call(global(&da), global(&db), global(&out), 1000));
        machine.run().unwrap();
        let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        assert_eq!(out.download().unwrap(), want);
    });
}

#[test]
fn two_launches_reduce_an_array() {
    on_machines(1, |mut machine| {
        let x = floats(3000);
        let dx = machine.upload(0, "x", &x).unwrap();
        let sums = machine.alloc::<f32>(0, "sums", 5).unwrap();
        let all = machine.alloc::<f32>(0, "all", 1).unwrap();
        launch(&mut machine, 0, Sum::call(global(&dx), global(&sums), 3000, 5));
        launch(&mut machine, 0, Sum::call(global(&sums), global(&all), 5, 1));
        machine.run().unwrap();
        // Exact in any order, so the order does not matter here.
        assert_eq!(all.download().unwrap(), [x.iter().sum::<f32>()]);
    });
}

#[test]
fn rows_of_a_softmax_are_those_of_the_host() {
    on_machines(1, |mut machine| {
        let (rows, columns) = (3, 300);
        let x = floats(rows * columns);
        let dx = machine.upload(0, "x", &x).unwrap();
        let out = machine.alloc::<f32>(0, "out", rows * columns).unwrap();
        launch(&mut machine, 0, Softmax::call(global(&dx), global(&out), rows as u32, columns as u32));
        machine.run().unwrap();
        for (row, got) in x.chunks(columns).zip(out.download().unwrap().chunks(columns)) {
            let powers: Vec<f64> = row.iter().map(|v| f64::from(*v).exp()).collect();
            let sum: f64 = powers.iter().sum();
            for (power, got) in powers.iter().zip(got) {
                let want = power / sum;
                assert!((f64::from(*got) - want).abs() <= 1e-5 * want, "{got} instead of {want}");
            }
        }
    });
}

#[test]
fn a_matrix_product_is_that_of_the_host_bit_for_bit() {
    on_machines(1, |mut machine| {
        let (m, n, k) = (32, 48, 32);
        let (a, b) = (floats(m * k), floats(k * n));
        let (da, db) = (machine.upload(0, "a", &a).unwrap(), machine.upload(0, "b", &b).unwrap());
        let c = machine.alloc::<f32>(0, "c", m * n).unwrap();
        let call =
            MatrixProduct::call(global(&da), global(&db), global(&c), m as u32, n as u32, k as u32);
        launch(&mut machine, 0, call);
        machine.run().unwrap();
        let mut want = vec![0.0f32; m * n];
        for i in 0..m {
            for j in 0..n {
                for l in 0..k {
                    want[i * n + j] += a[i * k + l] * b[l * n + j];
                }
            }
        }
        assert_eq!(c.download().unwrap(), want);
    });
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
    on_machines(1, |mut machine| {
        let (values, bins, want) = counted();
        let dv = machine.upload(0, "values", &values).unwrap();
        let counts = machine.upload(0, "counts", &vec![0u32; bins as usize]).unwrap();
        launch(&mut machine, 0, Histogram::call(global(&dv), global(&counts), 5000, bins));
        machine.run().unwrap();
        assert_eq!(counts.download().unwrap(), want);
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
    fn new(machine: &Machine, rank: usize, x: &[u32]) -> Rank {
        Rank {
            x: machine.upload(rank, "x", x).unwrap(),
            out: machine.alloc(rank, "out", x.len()).unwrap(),
            mailbox: machine.alloc(rank, "mailbox", 2 * x.len()).unwrap(),
            flag: machine.upload(rank, "flag", &[0]).unwrap(),
            expired: machine.upload(rank, "expired", &[0]).unwrap(),
        }
    }

    /// The call of a turn. `peer_mailbox` and `peer_flag` are the peer's, as this rank addresses them.
    fn call(&self, peer_mailbox: &Array<u32>, peer_flag: &Array<u64>, turn: u32) -> ExchangeArgs {
        ExchangeArgs {
            x: global(&self.x),
            out: global(&self.out),
            peer_mailbox: global(peer_mailbox),
            peer_flag: global(peer_flag),
            mailbox: global(&self.mailbox),
            flag: global(&self.flag),
            expired: global(&self.expired),
            timeout_ns: 10_000_000_000,
            len: self.x.len() as u32,
            turn,
        }
    }
}

#[test]
fn two_ranks_exchange_their_vectors_turn_after_turn() {
    on_machines(2, |mut machine| {
        let xs = [numbers(300), numbers(600)[300..].to_vec()];
        let ranks = [0, 1].map(|rank| Rank::new(&machine, rank, &xs[rank]));
        let peers = [0, 1].map(|rank: usize| {
            let peer = &ranks[1 - rank];
            (machine.map(rank, &peer.mailbox).unwrap(), machine.map(rank, &peer.flag).unwrap())
        });
        for turn in 1..=3 {
            for rank in [0, 1] {
                let (mailbox, flag) = &peers[rank];
                launch(&mut machine, rank, Exchange::call(ranks[rank].call(mailbox, flag, turn)));
            }
        }
        machine.run().unwrap();
        let want: Vec<u32> = xs[0].iter().zip(&xs[1]).map(|(a, b)| a.wrapping_add(*b)).collect();
        for rank in &ranks {
            assert_eq!(rank.expired.download().unwrap(), [0]);
            assert_eq!(rank.out.download().unwrap(), want);
        }
    });
}

#[test]
fn a_rank_whose_peer_never_comes_gives_up() {
    let mut machine = Machine::checked(2, 1);
    let ranks = [0, 1].map(|rank| Rank::new(&machine, rank, &[1, 2, 3]));
    let mailbox = machine.map(0, &ranks[1].mailbox).unwrap();
    let flag = machine.map(0, &ranks[1].flag).unwrap();
    launch(&mut machine, 0, Exchange::call(ranks[0].call(&mailbox, &flag, 1)));
    machine.run().unwrap();
    assert_eq!(ranks[0].expired.download().unwrap(), [EXCHANGE_BLOCKS]);
}

/// Calls for devices.
type Calls<K> = Vec<(usize, Result<Call<K>, ContractError>)>;

/// The report of check mode on a kernel whose PTX was edited. `calls` returns the memory of its calls, too.
fn report_of<K: Entry, M>(
    kernel: &str,
    edit: (&str, &str),
    devices: usize,
    calls: impl Fn(&Machine) -> (Calls<K>, M),
) -> MachineError {
    let (before, body) = PTX.split_once(&format!(".visible .entry {kernel}(")).unwrap();
    assert!(body.contains(edit.0), "{kernel} has no {}", edit.0);
    let broken = format!("{before}.visible .entry {kernel}({}", body.replacen(edit.0, edit.1, 1));
    let module = Module::parse(&broken).unwrap();
    for seed in 0..20 {
        let mut machine = Machine::checked(devices, seed);
        let (calls, _memory) = calls(&machine);
        for (device, call) in calls {
            launch_of(&mut machine, device, &module, call);
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
    let error = report_of::<Histogram, _>("histogram", ("barrier.sync 0;", ""), 1, |machine| {
        let dv = machine.upload(0, "values", &values).unwrap();
        let counts = machine.upload(0, "counts", &vec![0u32; bins as usize]).unwrap();
        let call = Histogram::call(global(&dv), global(&counts), 5000, bins);
        (vec![(0, call)], (dv, counts))
    });
    let text = error.to_string();
    assert!(text.contains("data race") && text.contains("src/histogram.rs:"), "{text}");
}

#[test]
fn a_release_that_is_missing_is_reported_across_ranks() {
    let edit = ("red.release.sys.global.add.u64", "red.relaxed.sys.global.add.u64");
    let error = report_of::<Exchange, _>("exchange", edit, 2, |machine| {
        let ranks = [0, 1].map(|rank| Rank::new(machine, rank, &[1, 2, 3]));
        let peers = [0, 1].map(|rank: usize| {
            let peer = &ranks[1 - rank];
            (machine.map(rank, &peer.mailbox).unwrap(), machine.map(rank, &peer.flag).unwrap())
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
    assert_eq!(
        error.to_string(),
        "kernel matrix_product requires n.is_multiple_of(16): n = 24"
    );
    let call = Histogram::call(Global::new(0), Global::new(0), 100, 50).unwrap();
    let error = call.shape_of(1, 256, 199).unwrap_err().to_string();
    assert!(error.contains("200 bytes of shared memory, 199 were given"), "{error}");
}
