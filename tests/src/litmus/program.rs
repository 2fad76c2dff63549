//! The notation of the tests, and how a test becomes PTX.

use std::collections::HashMap;
use std::fmt::Write;

use super::many;

/// Locations in global memory, each in 16 bytes of its own. `p64`, `p32`, `p16` and `p8` are the
/// first bits of `p`, with their number in the name. `p16.1` and `p8.1` are the 16 and the 8 bits
/// behind those.
pub const LOCATIONS: [&str; 9] = ["x", "y", "f", "h", "t", "e", "v4", "p", "G"];
/// Offset of the threads' results, and the distance between two threads' results, in bytes.
pub const RESULTS: u64 = 256;
pub(super) const PER_THREAD: u64 = 64;
/// Length of the memory that all threads share.
pub const BYTES: u64 = 1024;
/// Contents of a result that no thread has stored.
pub const NO_RESULT: u32 = 0x00ee_0000;

/// A part of a text, or the rule that it breaks.
type Result<T> = std::result::Result<T, String>;

/// A result that the condition names: which one, and its value.
pub type Wanted = (u64, u32);

/// How often a guarded read is tried.
const TRIES: u32 = 16;

/// The kernels' barrier: first the lanes of a warp converge, then the warps.
const BLOCK_BARRIER: &str = "bar.warp.sync 0xffffffff;\nbarrier.sync 0;\n";

/// The barrier of cooperative groups.
const CLUSTER_BARRIER: &str = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n";

/// Offsets in shared memory: the mbarrier, `S`, and `D`.
const SHARED: &str = ".shared .align 16 .b8 SH[64];";
const S: u64 = 16;
const D: u64 = 32;

/// How many instances of a test a launch holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One, whose memory, of [`BYTES`] bytes, is at the kernel's only parameter.
    One,
    /// The same, with one try for each guarded read: an exploration meets the execution in question
    /// anyway.
    Explored,
    /// Many; see [`many`].
    Many,
}

impl Form {
    /// The offset of an address of global memory in its instance's memory.
    fn offset(self, at: u64) -> u64 {
        match self {
            Self::One | Self::Explored => at,
            Self::Many => many::offset(at),
        }
    }
}

/// A value that is read or written: a number, or what a register holds.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Number(u32),
    Register(String),
}

#[derive(Clone, Debug)]
enum Step {
    Write { order: char, scope: char, at: String, values: Vec<Value> },
    Read { order: char, scope: char, at: String, values: Vec<Value>, guard: bool },
    Atom { order: char, scope: char, at: String, old: Option<u32>, guard: bool },
    Red { order: char, scope: char, at: String },
    Fence { order: char, scope: char },
    BulkLoad,
    BulkStore,
    ExpectTx,
    WaitLoad,
    WaitStores { read: bool },
    ProxyFence { all: bool },
    BlockBarrier,
    ClusterBarrier { relaxed: bool },
    WarpBarrier,
    KernelBoundary,
}

impl Step {
    /// The global location that it uses, if any.
    fn location(&self) -> Option<u64> {
        match self {
            Self::Write { at, .. } | Self::Read { at, .. } | Self::Atom { at, .. } | Self::Red { at, .. } => {
                location(at).ok()
            }
            Self::BulkLoad | Self::BulkStore => location("G").ok(),
            _ => None,
        }
    }

    /// Whether it accesses this location.
    fn is_at(&self, location: &str) -> bool {
        match self {
            Self::Write { at, .. } | Self::Read { at, .. } | Self::Atom { at, .. } | Self::Red { at, .. } => {
                at == location
            }
            _ => false,
        }
    }

    /// Whether it needs what a block has only once: shared memory, and the mbarrier in it.
    fn is_of_the_block(&self) -> bool {
        match self {
            _ if self.is_at("S") || self.is_at("D") => true,
            Self::ClusterBarrier { .. } => true,
            Self::BulkLoad | Self::BulkStore | Self::ExpectTx | Self::WaitLoad | Self::WaitStores { .. } => {
                true
            }
            _ => false,
        }
    }
}

/// Where a thread runs.
#[derive(Clone, Copy, Debug)]
struct Place {
    device: usize,
    /// Cluster of the device, and block of the cluster.
    cluster: usize,
    rank: usize,
    /// Warp, or lane where the threads meet in warp barriers.
    index: usize,
}

/// Program of one device.
pub struct Device {
    /// Its module.
    pub ptx: String,
    /// The entries `k0`, `k1` and so on are launched one after the other.
    pub kernels: usize,
    /// Blocks of one instance.
    pub blocks: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    /// Threads of each block, of one instance.
    pub threads: u32,
}

/// A test, ready to run.
pub struct Program {
    /// Program of each device.
    pub devices: Vec<Device>,
    /// Words at the start, other than 0: offset, value.
    pub initial: Vec<(u64, u32)>,
    /// The condition: words at the end.
    pub wanted: Vec<Wanted>,
    /// The part of the condition on guarded reads: if it fails, the run does not test the rest.
    pub guards: Vec<Wanted>,
    /// Instances that share the test's blocks, lane by lane.
    pub packed: u32,
}

/// The offset of a location, in bytes from the start of an instance's memory. `S` and `D` are
/// elsewhere.
fn location(name: &str) -> Result<u64> {
    let (part, index) = name.split_once('.').unwrap_or((name, "0"));
    let whole = if part.starts_with('p') { "p" } else { part };
    let at = LOCATIONS.iter().position(|l| *l == whole);
    let within = index.parse::<u32>().map(|index| u64::from(bits(name)) / 8 * u64::from(index));
    match (at, within) {
        (Some(at), Ok(within @ 0..16)) => Ok(at as u64 * 16 + within),
        _ => Err(format!("no location '{name}'")),
    }
}

/// Width of a scalar access to a location.
fn bits(name: &str) -> u32 {
    let part = name.split('.').next().unwrap_or(name);
    part.strip_prefix('p').and_then(|bits| bits.parse().ok()).unwrap_or(32)
}

fn value(text: &str) -> Value {
    text.parse().map_or_else(|_| Value::Register(text.into()), Value::Number)
}

/// `(1,0)`, or one value.
fn values(text: &str) -> Vec<Value> {
    text.trim_matches(['(', ')']).split(',').map(value).collect()
}

/// A number of a step.
fn number(text: &str, step: &str) -> Result<u32> {
    text.parse().map_err(|_| format!("no number '{text}' in step '{step}'"))
}

/// A step; `None` for a condition on a final value, which is added to `last`.
fn step(text: &str, last: &mut Vec<(String, u32)>) -> Result<Option<Step>> {
    let unknown = || format!("no step '{text}'");
    let (text, guard) = text.strip_suffix('?').map_or((text, false), |t| (t, true));
    let simple = match text {
        "L.S/m" => Some(Step::BulkLoad),
        "T" => Some(Step::BulkStore),
        "E" => Some(Step::ExpectTx),
        "V" => Some(Step::WaitLoad),
        "Q" => Some(Step::WaitStores { read: false }),
        "q" => Some(Step::WaitStores { read: true }),
        "P*" => Some(Step::ProxyFence { all: true }),
        "Ps" => Some(Step::ProxyFence { all: false }),
        "B" => Some(Step::BlockBarrier),
        "C" => Some(Step::ClusterBarrier { relaxed: false }),
        "X" => Some(Step::ClusterBarrier { relaxed: true }),
        "b" => Some(Step::WarpBarrier),
        "K" => Some(Step::KernelBoundary),
        _ => None,
    };
    if simple.is_some() {
        return Ok(simple);
    }
    if text.starts_with(char::is_lowercase) {
        let (name, value) = text.split_once('=').ok_or_else(unknown)?;
        last.push((name.into(), number(value, text)?));
        return Ok(None);
    }
    let (kind, rest) = text.split_once('.').unwrap_or((text, ""));
    let mut letters = kind.chars();
    let kind_and_order = letters.next().zip(letters.next());
    let (kind, order) = kind_and_order.ok_or_else(unknown)?;
    // Weak accesses have no scope.
    let scope = letters.next().unwrap_or(' ');
    let (at, given) = match rest.find(['=', '+', '→']) {
        Some(cut) => (rest[..cut].to_string(), Some(&rest[cut..])),
        None => (rest.to_string(), None),
    };
    let read = given.and_then(|g| g.strip_prefix('='));
    ordered(order, scope)?;
    if kind != 'F' && at != "S" && at != "D" {
        location(&at)?;
    }
    Ok(Some(match kind {
        'F' => Step::Fence { order, scope },
        'W' => {
            let mut values = read.map_or(vec![Value::Number(1)], values);
            let wide = match at.as_str() {
                "v4" => 4,
                "p64" => 2,
                _ => 1,
            };
            if values.len() == 1 {
                values = vec![values[0].clone(); wide];
            }
            Step::Write { order, scope, at, values }
        }
        'R' => Step::Read { order, scope, at, values: read.map_or(vec![], values), guard },
        'U' => {
            let old = read.map(|r| number(r.split('→').next().unwrap_or(r), text)).transpose()?;
            Step::Atom { order, scope, at, old, guard }
        }
        'D' => {
            let new = given.and_then(|g| g.strip_prefix('→')).ok_or_else(unknown)?;
            last.push((at.clone(), number(new, text)?));
            Step::Red { order, scope, at }
        }
        _ => return Err(unknown()),
    }))
}

/// Modifiers for an order and a scope: `.acquire.gpu`.
fn ordered(order: char, scope: char) -> Result<String> {
    let order = match order {
        'w' => return Ok(String::new()),
        'x' => ".relaxed",
        'a' => ".acquire",
        'r' => ".release",
        'b' => ".acq_rel",
        's' => ".sc",
        _ => return Err(format!("no order '{order}'")),
    };
    let scope = match scope {
        'c' => ".cta",
        'k' => ".cluster",
        'g' => ".gpu",
        's' => ".sys",
        _ => return Err(format!("no scope '{scope}'")),
    };
    Ok(format!("{order}{scope}"))
}

/// Writes the PTX of one thread.
struct Writer<'a> {
    ptx: &'a mut String,
    form: Form,
    /// Results that are still in their registers: register, place.
    unstored: Vec<(usize, u64)>,
    /// Accesses to global memory so far.
    accesses: usize,
    thread: usize,
    /// Registers and results so far.
    registers: usize,
    results: u64,
    named: HashMap<String, usize>,
    /// Values that symbols must have.
    symbols: &'a HashMap<String, u32>,
    wanted: &'a mut Vec<Wanted>,
    guards: &'a mut Vec<Wanted>,
}

impl Writer<'_> {
    fn register(&mut self) -> usize {
        self.registers += 1;
        self.registers
    }

    /// Stores a result at once: it is the thread's own, so it orders nothing. On a GPU the store,
    /// and all later instructions, would wait for the value, so there it is at the end.
    fn result(&mut self, register: usize, expected: Option<u32>) -> Result<()> {
        if self.results * 4 >= PER_THREAD {
            return Err(format!("a thread has more than {} reads", PER_THREAD / 4));
        }
        let at = RESULTS + self.thread as u64 * PER_THREAD + self.results * 4;
        self.results += 1;
        // A store right here would delay later instructions until the value arrives.
        self.unstored.push((register, at));
        if let Some(v) = expected {
            self.wanted.push((at, v));
        }
        Ok(())
    }

    /// A guarded read is tried a few times, so that the execution in question is not a rare one.
    /// Gives the counter.
    fn begin_tries(&mut self) -> usize {
        let counter = self.register();
        let _ = writeln!(self.ptx, "mov.u32 %r{counter}, {TRIES};\nTRY{}_{counter}:", self.thread);
        counter
    }

    fn end_tries(&mut self, counter: usize, register: usize, expected: u32) {
        let thread = self.thread;
        let _ = writeln!(
            self.ptx,
            "sub.u32 %r{counter}, %r{counter}, 1;\nsetp.ne.u32 %p2, %r{register}, {expected};\n\
             setp.ne.and.u32 %p2, %r{counter}, 0, %p2;\n@%p2 bra TRY{thread}_{counter};"
        );
    }

    /// Ends the thread unless the last result is this one.
    fn guard(&mut self, register: usize, expected: u32) {
        let thread = self.thread;
        self.guards.extend(self.wanted.last().copied());
        let _ = writeln!(self.ptx, "setp.ne.u32 %p2, %r{register}, {expected};\n@%p2 bra END{thread};");
    }

    /// State space and operand of an access.
    fn place(&mut self, at: &str) -> Result<(&'static str, String)> {
        if at == "S" {
            return Ok(("shared", format!("[SH+{S}]")));
        }
        if at == "D" {
            return Ok(("shared::cluster", format!("[%rd4+{D}]")));
        }
        let offset = self.form.offset(location(at)?);
        Ok(match self.form {
            Form::One | Form::Explored => ("global", format!("[%rd1+{offset}]")),
            Form::Many => {
                self.accesses += 1;
                ("global", many::access(self.ptx, self.accesses, offset))
            }
        })
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        match step {
            Step::Write { order, scope, at, values } => {
                let (space, address) = self.place(at)?;
                let how = ordered(*order, *scope)?;
                let sources: Vec<usize> = values
                    .iter()
                    .map(|v| match v {
                        Value::Number(n) => {
                            let r = self.register();
                            let _ = writeln!(self.ptx, "mov.u32 %r{r}, {n};");
                            Ok(r)
                        }
                        Value::Register(name) => self
                            .named
                            .get(name)
                            .copied()
                            .ok_or_else(|| format!("no read gives '{name}' before")),
                    })
                    .collect::<Result<_>>()?;
                let _ = match (at.as_str(), sources.as_slice()) {
                    ("v4", [a, b, c, d]) => {
                        writeln!(
                            self.ptx,
                            "st{how}.{space}.v4.u32 {address}, {{%r{a}, %r{b}, %r{c}, %r{d}}};"
                        )
                    }
                    ("p64", [a, b]) => writeln!(
                        self.ptx,
                        "mov.b64 %rd2, {{%r{a}, %r{b}}};\nst{how}.{space}.u64 {address}, %rd2;"
                    ),
                    (_, [a]) => writeln!(self.ptx, "st{how}.{space}.u{} {address}, %r{a};", bits(at)),
                    _ => return Err(format!("{} values at '{at}'", values.len())),
                };
            }
            Step::Read { order, scope, at, values, guard } => {
                let (space, address) = self.place(at)?;
                let how = ordered(*order, *scope)?;
                let into: Vec<usize> = (0..values.len().max(1)).map(|_| self.register()).collect();
                let tries =
                    if *guard && self.form != Form::Explored { Some(self.begin_tries()) } else { None };
                let _ = match (at.as_str(), into.as_slice()) {
                    ("v4", [a, b, c, d]) => {
                        writeln!(
                            self.ptx,
                            "ld{how}.{space}.v4.u32 {{%r{a}, %r{b}, %r{c}, %r{d}}}, {address};"
                        )
                    }
                    ("p64", [a, b]) => writeln!(
                        self.ptx,
                        "ld{how}.{space}.u64 %rd2, {address};\nmov.b64 {{%r{a}, %r{b}}}, %rd2;"
                    ),
                    (_, [a]) => writeln!(self.ptx, "ld{how}.{space}.u{} %r{a}, {address};", bits(at)),
                    _ => return Err(format!("{} values at '{at}'", values.len())),
                };
                if let (Some(tries), Some(Value::Number(v))) = (tries, values.first()) {
                    self.end_tries(tries, into[0], *v);
                }
                for (i, &register) in into.iter().enumerate() {
                    let expected = values.get(i).map(|v| match v {
                        Value::Number(n) => Ok(*n),
                        Value::Register(name) => {
                            self.named.insert(name.clone(), register);
                            self.symbols
                                .get(name)
                                .copied()
                                .ok_or_else(|| format!("no value of '{name}' at the end"))
                        }
                    });
                    let expected = expected.transpose()?;
                    self.result(register, expected)?;
                    if let (true, Some(v)) = (*guard, expected) {
                        self.guard(register, v);
                    }
                }
            }
            Step::Atom { order, scope, at, old, guard } => {
                let (space, address) = self.place(at)?;
                let r = self.register();
                let how = ordered(*order, *scope)?;
                let _ = writeln!(self.ptx, "atom{how}.{space}.add.u32 %r{r}, {address}, 1;");
                self.result(r, *old)?;
                if let (true, Some(v)) = (*guard, *old) {
                    self.guard(r, v);
                }
            }
            Step::Red { order, scope, at } => {
                let (space, address) = self.place(at)?;
                let _ = writeln!(self.ptx, "red{}.{space}.add.u32 {address}, 1;", ordered(*order, *scope)?);
            }
            Step::Fence { order, scope } => {
                let _ = writeln!(self.ptx, "fence{};", ordered(*order, *scope)?);
            }
            Step::BulkLoad => {
                let from = self.form.offset(location("G")?);
                let _ = writeln!(
                    self.ptx,
                    "add.s64 %rd3, %rd1, {from};\nmov.u32 %r1, SH;\n\
                     cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+{S}], [%rd3], 16, [%r1];"
                );
            }
            Step::BulkStore => {
                let to = self.form.offset(location("G")?);
                let _ = writeln!(
                    self.ptx,
                    "add.s64 %rd3, %rd1, {to};\nmov.u32 %r1, SH;\n\
                     cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r1+{S}], 16;\n\
                     cp.async.bulk.commit_group;"
                );
            }
            Step::ExpectTx => self.ptx.push_str("mbarrier.arrive.expect_tx.shared::cta.b64 _, [SH], 16;\n"),
            Step::WaitLoad => self.wait_load(),
            Step::WaitStores { read } => {
                let read = if *read { ".read" } else { "" };
                let _ = writeln!(self.ptx, "cp.async.bulk.wait_group{read} 0;");
            }
            Step::ProxyFence { all } => {
                let space = if *all { "" } else { ".shared::cta" };
                let _ = writeln!(self.ptx, "fence.proxy.async{space};");
            }
            Step::BlockBarrier => self.ptx.push_str(BLOCK_BARRIER),
            Step::ClusterBarrier { relaxed: false } => self.ptx.push_str(CLUSTER_BARRIER),
            Step::ClusterBarrier { relaxed: true } => {
                self.ptx.push_str("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;\n");
            }
            Step::WarpBarrier | Step::KernelBoundary => unreachable!("these cut a thread in parts"),
        }
        Ok(())
    }

    fn wait_load(&mut self) {
        let (thread, number) = (self.thread, self.register());
        let label = format!("WAIT{thread}_{number}");
        let _ = writeln!(
            self.ptx,
            "{label}:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [SH], 0;\n@!%p2 bra {label};"
        );
    }

    /// The end of a part: a block may not end before its copies have.
    fn end(&mut self, steps: &[Step]) {
        if steps.iter().any(|s| matches!(s, Step::BulkLoad)) {
            self.wait_load();
        }
        if steps.iter().any(|s| matches!(s, Step::BulkStore)) {
            self.ptx.push_str("cp.async.bulk.wait_group 0;\n");
        }
        let _ = writeln!(self.ptx, "END{}:", self.thread);
    }
}

/// Where the threads run: `c` in the block of the thread before, `k` in another block of its
/// cluster, `g` in another cluster, `s` on another device. A cluster is one block unless there is a
/// `k`.
fn places(text: &str, threads: usize, lanes: bool) -> Result<Vec<Place>> {
    let letters: Vec<&str> = text.split(',').collect();
    let mut places: Vec<Place> = vec![];
    for t in 0..threads {
        let letter = if letters.len() == 1 { letters[0] } else { letters.get(t).copied().unwrap_or("") };
        let next = match (places.last(), letter) {
            (None, _) => Place { device: 0, cluster: 0, rank: 0, index: 0 },
            (Some(p), "c") => Place { index: p.index + 1, ..*p },
            (Some(p), "k") => Place { rank: p.rank + 1, index: 0, ..*p },
            (Some(p), "g") => Place { cluster: p.cluster + 1, rank: 0, index: 0, ..*p },
            (Some(p), "s") => Place { device: p.device + 1, cluster: 0, rank: 0, index: 0 },
            _ => return Err(format!("no place '{letter}' for thread {t}")),
        };
        places.push(next);
    }
    let first = |p: &Place| (p.cluster, p.rank, p.device) == (0, 0, 0);
    if lanes && !places.iter().all(first) {
        return Err("a warp barrier has threads of one block".into());
    }
    Ok(places)
}

/// Stores results: register, and place in the notation.
fn store(ptx: &mut String, form: Form, results: &[(usize, u64)]) {
    for &(register, at) in results {
        let place = match form {
            Form::One | Form::Explored => format!("[%rd1+{at}]"),
            Form::Many => many::operand(at),
        };
        let _ = writeln!(ptx, "st.global.u32 {place}, %r{register};");
    }
}

impl Program {
    /// Compiles a test.
    ///
    /// # Errors
    /// The text is not in the notation of [`table`](super::table).
    pub fn new(text: &str, form: Form) -> Result<Self> {
        let (place, rest) = text.split_once(':').ok_or("no placement in front of ':'")?;
        let mut last = vec![];
        let mut thread =
            |text: &str| text.split(';').filter_map(|s| step(s, &mut last).transpose()).collect();
        let threads: Vec<Vec<Step>> = rest.split('‖').map(&mut thread).collect::<Result<_>>()?;
        let most = ((BYTES - RESULTS) / PER_THREAD) as usize;
        if threads.len() > most {
            return Err(format!("{} threads: at most {most} have room for their results", threads.len()));
        }
        let all = || threads.iter().flatten();
        let lanes = all().any(|s| matches!(s, Step::WarpBarrier));
        let places = places(place, threads.len(), lanes)?;
        let cluster = places.iter().map(|p| p.rank + 1).max().unwrap_or(1);
        let block = |t: usize| places[t].cluster * cluster + places[t].rank;
        let distributed = all().any(|s| s.is_at("D"));
        let on_devices = places.iter().map(|p| p.device + 1).max().unwrap_or(1);
        let symbols: HashMap<String, u32> = last.iter().cloned().collect();
        let mut wanted: Vec<Wanted> = last
            .iter()
            .filter(|(name, _)| LOCATIONS.contains(&name.as_str()))
            .map(|(name, v)| Ok((location(name)?, *v)))
            .collect::<Result<_>>()?;
        let mut guards = vec![];
        let writes = |to: &str| all().any(|s| matches!(s, Step::Write { at, .. } if at == to));
        let stores = all().any(|s| matches!(s, Step::BulkStore));
        let loads = all().any(|s| matches!(s, Step::BulkLoad));
        // New data is 1: it is there from the start unless a thread of the test writes it.
        let initial = if loads && !writes("G") && !stores { vec![(location("G")?, 1)] } else { vec![] };

        let mut used: Vec<u64> = all().filter_map(Step::location).collect();
        used.sort_unstable();
        used.dedup();
        let packed = if lanes || all().any(Step::is_of_the_block) { 1 } else { 32 };

        let mut devices = vec![];
        for device in 0..on_devices {
            let mine: Vec<usize> = (0..threads.len()).filter(|&t| places[t].device == device).collect();
            let per_block = mine.iter().map(|&t| places[t].index + 1).max().unwrap_or(1);
            let clusters = mine.iter().map(|&t| places[t].cluster + 1).max().unwrap_or(1);
            let blocks = clusters * cluster;
            let parts = |t: usize| threads[t].split(|s| matches!(s, Step::KernelBoundary));
            let count = mine.iter().map(|&t| parts(t).count()).max().unwrap_or(1);
            let mut ptx = ".version 8.6\n.target sm_90\n.address_size 64\n".to_string();
            for k in 0..count {
                let _ = writeln!(
                    ptx,
                    ".visible .entry k{k}({})\n{{\n{SHARED}\n.reg .pred %p<4>;\n.reg .b32 %r<64>;\n.reg .b64 %rd<8>;",
                    if form == Form::Many { many::KERNEL_PARAMS } else { ".param .u64 buf" }
                );
                match form {
                    Form::One | Form::Explored => {
                        ptx.push_str(
                            "ld.param.u64 %rd1, [buf];\nmov.u32 %r2, %tid.x;\nmov.u32 %r3, %ctaid.x;\n",
                        );
                    }
                    Form::Many => {
                        many::begin(&mut ptx, blocks, packed);
                        // A thread that a guard ends makes no later reads.
                        for r in 6..64 {
                            let _ = writeln!(ptx, "mov.u32 %r{r}, {NO_RESULT};");
                        }
                    }
                }
                if loads || stores {
                    // A block that stores from `S` without having written it finds new data there.
                    let full: Vec<usize> = mine
                        .iter()
                        .copied()
                        .filter(|&t| threads[t].iter().any(|s| matches!(s, Step::BulkStore)) && !writes("S"))
                        .map(block)
                        .collect();
                    let _ = writeln!(ptx, "setp.ne.u32 %p1, %r2, 0;\n@%p1 bra READY;\nmov.u32 %r4, 0;");
                    for block in full {
                        let _ = writeln!(ptx, "setp.eq.u32 %p2, %r3, {block};\n@%p2 mov.u32 %r4, 1;");
                    }
                    let _ = writeln!(
                        ptx,
                        "st.shared.v4.u32 [SH+{S}], {{%r4, %r4, %r4, %r4}};\nmbarrier.init.shared::cta.b64 [SH], 1;\n\
                         fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\nREADY:\n{BLOCK_BARRIER}"
                    );
                }
                if distributed {
                    // `D` is in the first block of each cluster.
                    let _ = writeln!(
                        ptx,
                        "mov.u32 %r4, SH;\nmapa.shared::cluster.u32 %r4, %r4, 0;\ncvt.u64.u32 %rd4, %r4;\n\
                         setp.ne.u32 %p1, %r2, 0;\n@!%p1 st.shared.u32 [SH+{D}], 0;\n{CLUSTER_BARRIER}"
                    );
                }
                // Which thread this is, or 99.
                let _ = writeln!(ptx, "mov.u32 %r5, 99;");
                for &t in &mine {
                    let at = places[t].index * if lanes { 1 } else { 32 };
                    let _ = writeln!(
                        ptx,
                        "setp.eq.u32 %p1, %r2, {at};\nsetp.eq.and.u32 %p1, %r3, {}, %p1;\n@%p1 mov.u32 %r5, {t};",
                        block(t)
                    );
                }
                if form == Form::Many {
                    many::place(&mut ptx, packed);
                    // Lanes of one warp need no common start, and what an earlier kernel does has
                    // none.
                    if !lanes && threads.len() > 1 && k + 1 == count {
                        let start = many::Start { threads: threads.len(), devices: on_devices, used: &used };
                        many::start(&mut ptx, &start);
                    }
                }
                if lanes {
                    // A warp barrier is one instruction for all lanes: between two of them the
                    // lanes go their own ways.
                    let cuts = threads[0].iter().filter(|s| matches!(s, Step::WarpBarrier)).count();
                    let mut states = vec![(5, 0u64, vec![]); threads.len()];
                    for cut in 0..=cuts {
                        for &t in &mine {
                            let part = threads[t].split(|s| matches!(s, Step::WarpBarrier)).nth(cut);
                            let _ = writeln!(ptx, "setp.ne.u32 %p1, %r5, {t};\n@%p1 bra PART{t}_{cut};");
                            let mut w = Writer {
                                ptx: &mut ptx,
                                form,
                                unstored: std::mem::take(&mut states[t].2),
                                accesses: 0,
                                thread: t,
                                registers: states[t].0,
                                results: states[t].1,
                                named: HashMap::new(),
                                symbols: &symbols,
                                wanted: &mut wanted,
                                guards: &mut guards,
                            };
                            let part = part.ok_or("threads with different numbers of warp barriers")?;
                            part.iter().try_for_each(|s| w.step(s))?;
                            if cut == cuts {
                                w.end(&threads[t]);
                            }
                            states[t] = (w.registers, w.results, w.unstored);
                            let _ = writeln!(ptx, "PART{t}_{cut}:");
                        }
                        if cut < cuts {
                            ptx.push_str("bar.warp.sync 0xffffffff;\n");
                        }
                    }
                    // One lane's store would delay all later instructions of the others.
                    for (t, (_, _, unstored)) in states.iter().enumerate().filter(|(_, s)| !s.2.is_empty()) {
                        let _ = writeln!(ptx, "setp.ne.u32 %p1, %r5, {t};\n@%p1 bra STORED{t};");
                        store(&mut ptx, form, unstored);
                        let _ = writeln!(ptx, "STORED{t}:");
                    }
                } else {
                    for &t in &mine {
                        let Some(part) = parts(t).nth(k) else { continue };
                        let earlier: usize = parts(t)
                            .take(k)
                            .flatten()
                            .filter(|s| matches!(s, Step::Read { .. } | Step::Atom { .. }))
                            .count();
                        let _ = writeln!(ptx, "setp.ne.u32 %p1, %r5, {t};\n@%p1 bra SKIP{t};");
                        let mut w = Writer {
                            ptx: &mut ptx,
                            form,
                            unstored: vec![],
                            accesses: 0,
                            thread: t,
                            registers: 5,
                            results: earlier as u64,
                            named: HashMap::new(),
                            symbols: &symbols,
                            wanted: &mut wanted,
                            guards: &mut guards,
                        };
                        part.iter().try_for_each(|s| w.step(s))?;
                        w.end(part);
                        let unstored = w.unstored;
                        if distributed {
                            // Others may access shared memory of the block until then.
                            ptx.push_str(CLUSTER_BARRIER);
                        }
                        store(&mut ptx, form, &unstored);
                        let _ = writeln!(ptx, "ret;\nSKIP{t}:");
                    }
                }
                ptx.push_str("ret;\n");
                if form == Form::Many {
                    many::stress(&mut ptx, on_devices);
                }
                ptx.push_str("}\n");
            }
            let threads = if lanes { 32 } else { 32 * per_block as u32 };
            let (blocks, cluster) = (blocks as u32, cluster as u32);
            devices.push(Device { ptx, kernels: count, blocks, cluster, threads });
        }
        if form == Form::Many {
            many::ends(&mut devices[0].ptx, &initial, &wanted, &guards);
        }
        Ok(Self { devices, initial, wanted, guards, packed })
    }
}
