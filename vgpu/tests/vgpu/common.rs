//! Helpers that run a snippet of PTX over the lanes of a warp, or a whole kernel.
//! `tier` picks how much a test tries.

use epoxide_vgpu::{
    CheckConfig, DeviceConfig, Fault, FaultKind, Grid, GridConfig, Machine, MachineError, Memory, Module,
    Progress, PtxError, Region, Report, Schedule,
};

/// The variable that names the tier: `default` or `long`. tests/src/tier.rs reads the same one.
const TIER: &str = "EPOXIDE_TIER";

/// Returns `default` in the default tier and `long` in the long tier.
///
/// # Panics
/// Where the variable names neither.
pub fn tier<T>(default: T, long: T) -> T {
    match std::env::var(TIER).as_deref() {
        Err(_) | Ok("default") => default,
        Ok("long") => long,
        Ok(other) => panic!("{TIER} = {other:?}, but the tiers are \"default\" and \"long\""),
    }
}

/// Returns how many seeds a correct kernel must pass.
pub fn correct_seeds() -> u64 {
    tier(200, 2000)
}

/// Returns how many seeds of a broken kernel must each be reported.
pub fn broken_seeds() -> u64 {
    tier(24, 240)
}

/// Whether one seed runs alone: nothing is to be counted then.
pub fn replaying() -> bool {
    std::env::var_os("EPOXIDE_VGPU_SEED").is_some()
}

/// A device whose schedule is drawn from a seed, in one of two manners.
pub fn device(seed: u64) -> DeviceConfig {
    let schedule = if seed.is_multiple_of(2) { Schedule::Random } else { Schedule::Preemptions(3) };
    DeviceConfig { schedule_seed: Some(seed), schedule, ..DeviceConfig::default() }
}

/// Runs a kernel by itself, on a buffer of which word `i` holds `i << 32`, so that flags of 32 bits
/// begin as 0. A report that is collected is an error too.
pub fn run_numbered(
    module: &Module,
    shape: GridConfig,
    seed: u64,
    check: Option<CheckConfig>,
) -> Result<Vec<u64>, MachineError> {
    let mut machine = Machine::with_config(1, device(seed), check);
    let words: Vec<u64> = (0..64).map(|i| i << 32).collect();
    let buf = machine.upload(0, "buf", &words)?;
    machine.launch_with(0, module, "k", shape, &[&buf])?;
    let ended = machine.run();
    match machine.reports().into_iter().next() {
        Some(first) => Err(MachineError::Fault(Box::new(first.fault))),
        None => ended.and_then(|()| buf.download()),
    }
}

/// Start of every test module.
pub const HEAD: &str = ".version 8.4\n.target sm_90\n.address_size 64\n";

/// Wraps a body in a kernel `k(.param .u64 buf)` with registers `%h`, `%r`, `%rd`, `%p`.
pub fn kernel(globals: &str, body: &str) -> String {
    format!(
        "{HEAD}{globals}
.visible .entry k(.param .u64 buf)
{{
.reg .pred %p<16>;
.reg .b16 %h<32>;
.reg .b32 %r<64>;
.reg .b64 %rd<64>;
ld.param.u64 %rd40, [buf];
mov.u32 %r40, %tid.x;
mul.wide.u32 %rd41, %r40, 8;
add.s64 %rd42, %rd40, %rd41;
{body}
ret;
}}
"
    )
}

/// A launched test kernel with its buffer.
pub struct Run {
    pub memory: Memory,
    pub buf: Region,
    pub grid: Grid,
}

impl Run {
    pub fn new(ptx: &str, buf: &[u64], cfg: GridConfig, dev: &DeviceConfig) -> Run {
        let module = Module::parse(ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"));
        let memory = Memory::new();
        let region = memory.alloc(buf.len() as u64 * 8, "buf").unwrap();
        let bytes: Vec<u8> = buf.iter().flat_map(|v| v.to_ne_bytes()).collect();
        memory.write(region.addr(), &bytes).unwrap();
        let params = region.addr().to_ne_bytes();
        let grid = Grid::new(module.kernel("k").unwrap(), memory.clone(), dev, cfg, &params).unwrap();
        Run { memory, buf: region, grid }
    }

    /// Runs to the end; fails if the kernel only spins.
    pub fn finish(&mut self) -> Result<(), Box<Fault>> {
        for _ in 0..1_000_000 {
            match self.grid.step(10_000)? {
                Progress::Done => return Ok(()),
                Progress::Running => {}
                Progress::Spinning => panic!("spins: {}", self.grid.stuck_report()),
            }
        }
        panic!("does not end: {}", self.grid.stuck_report());
    }

    pub fn words(&self) -> Vec<u64> {
        let mut bytes = vec![0; self.buf.bytes() as usize];
        self.memory.read(self.buf.addr(), &mut bytes).unwrap();
        bytes.chunks_exact(8).map(|c| u64::from_ne_bytes(c.try_into().unwrap())).collect()
    }
}

pub fn launch(blocks: u32, threads: u32) -> GridConfig {
    GridConfig::new(blocks, threads, 0)
}

/// Runs a kernel on a buffer of zeros; gives the outcome of the run, its reports and the buffer.
pub fn run(
    module: &Module,
    shape: GridConfig,
    seed: u64,
    check: Option<CheckConfig>,
) -> (Result<(), MachineError>, Vec<Report>, Vec<u64>) {
    let device = DeviceConfig { schedule_seed: Some(seed), ..DeviceConfig::default() };
    let mut machine = Machine::with_config(1, device, check);
    let buf = machine.upload(0, "buf", &[0u64; 64]).unwrap();
    machine.launch_with(0, module, "k", shape, &[&buf]).unwrap();
    let outcome = machine.run();
    // Behind a run that a fault has ended, reading is a race.
    (outcome, machine.reports(), buf.download().unwrap_or_default())
}

/// Runs a kernel body over one block and returns the buffer of 64-bit words.
pub fn run_body(globals: &str, body: &str, threads: u32, buf: &[u64]) -> Vec<u64> {
    let mut run = Run::new(&kernel(globals, body), buf, launch(1, threads), &DeviceConfig::default());
    run.finish().unwrap_or_else(|f| panic!("{f}"));
    run.words()
}

/// Runs a kernel body that must fault.
pub fn fault_of(globals: &str, body: &str, threads: u32) -> Fault {
    let mut run = Run::new(&kernel(globals, body), &[0; 64], launch(1, threads), &DeviceConfig::default());
    match run.finish() {
        Err(fault) => *fault,
        Ok(()) => panic!("no fault:\n{body}"),
    }
}

pub fn fault_kind(body: &str) -> FaultKind {
    fault_of("", body, 32).kind
}

/// Parses a body that must be rejected.
pub fn reject(body: &str) -> PtxError {
    match Module::parse(&kernel("", body)) {
        Err(e) => e,
        Ok(_) => panic!("accepted:\n{body}"),
    }
}

fn uses(snippet: &str, register: &str) -> bool {
    snippet
        .match_indices(register)
        .any(|(i, r)| !snippet[i + r.len()..].starts_with(|c: char| c.is_ascii_digit()))
}

/// Runs a snippet that computes `%r0`, `%rd0`, `%h0` or `%p0` from registers numbered from 1
/// (`%r1`, `%h2`, ..), whose values are given per lane: `inputs[k][lane]` goes to register number
/// `k + 1`, whatever its kind.
pub fn per_lane(snippet: &str, threads: u32, inputs: &[Vec<u64>]) -> Vec<u64> {
    let mut body = String::new();
    for k in 1..=inputs.len() {
        let at = format!("[%rd42+{}]", k * 32 * 8);
        body += &if uses(snippet, &format!("%rd{k}")) {
            format!("ld.global.u64 %rd{k}, {at};\n")
        } else if uses(snippet, &format!("%r{k}")) {
            format!("ld.global.u32 %r{k}, {at};\n")
        } else if uses(snippet, &format!("%h{k}")) {
            format!("ld.global.u16 %h{k}, {at};\n")
        } else {
            assert!(uses(snippet, &format!("%p{k}")), "input {k} is not used by {snippet}");
            format!("ld.global.u64 %rd50, {at};\nsetp.ne.u64 %p{k}, %rd50, 0;\n")
        };
    }
    body += snippet;
    body += "\n";
    body += if uses(snippet, "%rd0") {
        "st.global.u64 [%rd42], %rd0;"
    } else if uses(snippet, "%r0") {
        "st.global.u32 [%rd42], %r0;"
    } else if uses(snippet, "%h0") {
        "st.global.u16 [%rd42], %h0;"
    } else {
        "selp.u64 %rd51, 1, 0, %p0;\nst.global.u64 [%rd42], %rd51;"
    };
    let mut buf = vec![0u64; 32 * (inputs.len() + 1)];
    for (k, values) in inputs.iter().enumerate() {
        for (lane, v) in values.iter().enumerate() {
            buf[(k + 1) * 32 + lane] = *v;
        }
    }
    run_body("", &body, threads, &buf)[..threads as usize].to_vec()
}

/// Runs a snippet with the same inputs in every lane, on a full and on a partial warp, which are
/// different paths through the interpreter, and checks the result.
#[track_caller]
pub fn check(snippet: &str, inputs: &[u64], expected: u64) {
    for threads in [32, 20] {
        let inputs: Vec<Vec<u64>> = inputs.iter().map(|v| vec![*v; threads as usize]).collect();
        for got in per_lane(snippet, threads, &inputs) {
            assert_eq!(got, expected, "{snippet} gave {got:#x}, expected {expected:#x} ({threads} threads)");
        }
    }
}

pub fn f(v: f32) -> u64 {
    v.to_bits().into()
}

pub fn d(v: f64) -> u64 {
    v.to_bits()
}
