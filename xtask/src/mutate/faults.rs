//! The faults: every place in a kernel that decides an order, a scope, a wait or a row, with a
//! wrong replacement.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use hmac_sha256::Hash;

use super::text::{Body, Line, Place};

/// Kind of fault in a faulty kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    ReleaseToRelaxed,
    AcquireToRelaxed,
    SystemToDevice,
    DeviceToBlock,
    ProxyFenceDropped,
    ProxyFenceOnlyShared,
    InitFenceDropped,
    BulkWaitDropped,
    BulkWaitOneLess,
    BulkWaitReadOnly,
    BulkCommitDropped,
    BlockBarrierDropped,
    WarpSyncDropped,
    MbarrierOtherParity,
    MbarrierNoWait,
    MbarrierFewerBytes,
    MbarrierNoBytes,
    MbarrierMoreArrivals,
    EpochIgnored,
    EpochOneLess,
    PublishedEarly,
    NextRow,
    AddDropped,
}

impl Kind {
    /// The name on the command line and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Kind::ReleaseToRelaxed => "release-to-relaxed",
            Kind::AcquireToRelaxed => "acquire-to-relaxed",
            Kind::SystemToDevice => "sys-to-gpu",
            Kind::DeviceToBlock => "gpu-to-cta",
            Kind::ProxyFenceDropped => "proxy-fence-dropped",
            Kind::ProxyFenceOnlyShared => "proxy-fence-only-shared",
            Kind::InitFenceDropped => "init-fence-dropped",
            Kind::BulkWaitDropped => "bulk-wait-dropped",
            Kind::BulkWaitOneLess => "bulk-wait-one-less",
            Kind::BulkWaitReadOnly => "bulk-wait-read-only",
            Kind::BulkCommitDropped => "bulk-commit-dropped",
            Kind::BlockBarrierDropped => "block-barrier-dropped",
            Kind::WarpSyncDropped => "warp-sync-dropped",
            Kind::MbarrierOtherParity => "mbarrier-other-parity",
            Kind::MbarrierNoWait => "mbarrier-no-wait",
            Kind::MbarrierFewerBytes => "mbarrier-fewer-bytes",
            Kind::MbarrierNoBytes => "mbarrier-no-bytes",
            Kind::MbarrierMoreArrivals => "mbarrier-more-arrivals",
            Kind::EpochIgnored => "epoch-ignored",
            Kind::EpochOneLess => "epoch-one-less",
            Kind::PublishedEarly => "published-early",
            Kind::NextRow => "next-row",
            Kind::AddDropped => "add-dropped",
        }
    }

    /// Description of the fault in the table.
    fn what(self) -> &'static str {
        match self {
            Kind::ReleaseToRelaxed => "a release is relaxed",
            Kind::AcquireToRelaxed => "an acquire is relaxed",
            Kind::SystemToDevice => "system scope is device scope",
            Kind::DeviceToBlock => "device scope is block scope",
            Kind::ProxyFenceDropped => "a proxy fence is missing",
            Kind::ProxyFenceOnlyShared => "a proxy fence orders shared memory only",
            Kind::InitFenceDropped => "the fence behind mbarrier inits is missing",
            Kind::BulkWaitDropped => "a wait for bulk stores is missing",
            Kind::BulkWaitOneLess => "a wait for bulk stores leaves one more group",
            Kind::BulkWaitReadOnly => "a wait for bulk stores waits for their reads only",
            Kind::BulkCommitDropped => "a bulk group is not closed",
            Kind::BlockBarrierDropped => "a block barrier is missing",
            Kind::WarpSyncDropped => "a warp barrier is missing",
            Kind::MbarrierOtherParity => "a wait is for the mbarrier's other phase",
            Kind::MbarrierNoWait => "a wait for an mbarrier does not wait",
            Kind::MbarrierFewerBytes => "an mbarrier expects 16 bytes less",
            Kind::MbarrierNoBytes => "an mbarrier expects no bytes",
            Kind::MbarrierMoreArrivals => "an mbarrier expects one arrival more",
            Kind::EpochIgnored => "a comparison of a polled word always says yes",
            Kind::EpochOneLess => "a polled word passes for one more than it is",
            Kind::PublishedEarly => "a word is published before what it stands for",
            Kind::NextRow => "a row is the next one",
            Kind::AddDropped => "an add is missing",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A fault that one could make in the Rust source: all copies that the compiler made of the place.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Identifies the fault, the same in every run on the same PTX.
    pub id: String,
    pub kernel: String,
    pub kind: Kind,
    /// Where it is in the kernel.
    pub own: Place,
    /// The calls that `own` was inlined for, the nearest first; copies with other calls have
    /// theirs.
    pub callers: Vec<Vec<Place>>,
    /// Other places: the function inlined there, the second of two swapped statements, the load
    /// whose word is compared, the accesses to a wrong row.
    pub also: Vec<Place>,
    /// The instruction, for readers.
    pub opcode: String,
    /// Lines of the PTX, and what they become.
    pub edits: Vec<(usize, String)>,
    /// Lines of the PTX of which one must be executed for the fault to show. They are those of the
    /// edits, or the accesses to a wrong row.
    pub through: Vec<usize>,
}

impl Fault {
    /// One line of text about the fault.
    pub fn description(&self) -> String {
        format!("{} (`{}`)", self.kind.what(), self.opcode)
    }
}

/// All faults, in the order of the text.
pub fn enumerate(bodies: &[Body]) -> Vec<Fault> {
    bodies.iter().flat_map(of_body).collect()
}

/// At most `count` faults, in turn from each kind, and within a kind in turn from each kernel, so
/// that as many kinds and kernels as possible occur. `draw` selects the first kernels, and the
/// first faults of each. Draw 0 begins with the first kernel, and with its first and last fault.
pub fn sample(faults: Vec<Fault>, count: usize, draw: u64) -> Vec<Fault> {
    let mut kinds: BTreeMap<Kind, BTreeMap<&str, Vec<usize>>> = BTreeMap::new();
    for (index, fault) in faults.iter().enumerate() {
        kinds.entry(fault.kind).or_default().entry(&fault.kernel).or_default().push(index);
    }
    let queues: Vec<Vec<usize>> = kinds
        .into_values()
        .enumerate()
        .map(|(number, kernels)| {
            let mut kernels: Vec<Vec<usize>> = kernels.into_values().map(spread).collect();
            // Not every kind begins with the same kernel.
            let begin = number % kernels.len();
            kernels.rotate_left(begin);
            if draw > 0 {
                let drawn = |index: &usize| Hash::hash(format!("{draw} {}", faults[*index].id).as_bytes());
                kernels.iter_mut().for_each(|all| all.sort_by_key(drawn));
                kernels.sort_by_key(|all| drawn(&all[0]));
            }
            let longest = kernels.iter().map(Vec::len).max().unwrap_or(0);
            (0..longest)
                .flat_map(|round| kernels.iter().filter_map(move |kernel| kernel.get(round)))
                .copied()
                .collect()
        })
        .collect();
    let longest = queues.iter().map(Vec::len).max().unwrap_or(0);
    let turns = (0..longest).flat_map(|round| queues.iter().filter_map(move |queue| queue.get(round)));
    let chosen: HashSet<usize> = turns.copied().take(count).collect();
    faults
        .into_iter()
        .enumerate()
        .filter(|(index, _)| chosen.contains(index))
        .map(|(_, fault)| fault)
        .collect()
}

/// First, last, second, last but one: copies of one helper are neighbours.
fn spread(mut all: Vec<usize>) -> Vec<usize> {
    let mut spread = Vec::with_capacity(all.len());
    while !all.is_empty() {
        spread.push(all.remove(0));
        spread.extend(all.pop());
    }
    spread
}

/// A place where one kind of fault can be made.
struct Site {
    kind: Kind,
    /// The line that it is about.
    at: usize,
    edits: Vec<(usize, String)>,
    /// The other line of two: the load of a comparison, or what trades places with a release.
    other: Option<usize>,
    /// Lines that must be executed for the fault to show, where it is not those of the edits. A
    /// report that names one of them names the fault.
    through: Vec<usize>,
}

/// A source file's name in a fault's id: a `mod.rs` has that of its folder.
fn file_name(path: &str) -> &str {
    let path = path.strip_suffix("/mod.rs").or(path.strip_suffix(".rs")).unwrap_or(path);
    path.rsplit('/').next().unwrap_or(path)
}

fn of_body(body: &Body) -> Vec<Fault> {
    let lines = &body.lines;
    let mut faults: Vec<Fault> = Vec::new();
    let mut by_key: BTreeMap<(Kind, Place, Option<Place>, String), usize> = BTreeMap::new();
    let mut sites = Vec::new();
    let mut rows = BTreeMap::new();
    for at in 0..lines.len() {
        at_line(lines, at, &mut sites);
        polled(lines, at, &mut sites);
        published(lines, at, &mut sites);
        next_row(lines, at, &mut rows, &mut sites);
    }
    sites.sort_by_key(|site| (site.at, site.kind));
    for site in sites {
        let line = &lines[site.at];
        // Without a Rust line, no report can name the place.
        let Some(own) = line.own.clone() else { continue };
        let opcode = line.opcode().to_owned();
        let others = site.other.iter().chain(&site.through).filter_map(|other| lines[*other].own.clone());
        let mut also: Vec<Place> = line.inlined.clone().into_iter().chain(others).collect();
        also.dedup();
        let through = if site.through.is_empty() {
            site.edits.iter().map(|(index, _)| *index).collect()
        } else {
            site.through
        };
        let through = through.into_iter().map(|index: usize| lines[index].number);
        let edits = site.edits.into_iter().map(|(index, text)| (lines[index].number, text));
        let key = (site.kind, own.clone(), line.inlined.clone(), opcode.clone());
        if let Some(&index) = by_key.get(&key) {
            // Two edits of one line are two faults; only the first is kept.
            let edits: Vec<_> = edits.collect();
            let known = &mut faults[index].edits;
            if edits.iter().all(|(number, _)| known.iter().all(|(other, _)| other != number)) {
                known.extend(edits);
                faults[index].through.extend(through);
                if !faults[index].callers.contains(&line.callers) {
                    faults[index].callers.push(line.callers.clone());
                }
            }
            continue;
        }
        let file = file_name(&own.0);
        let mut id = format!("{}/{}/{file}:{}", body.kernel, site.kind, own.1);
        let same =
            faults.iter().filter(|fault| fault.id == id || fault.id.starts_with(&format!("{id}#"))).count();
        if same > 0 {
            id = format!("{id}#{}", same + 1);
        }
        by_key.insert(key, faults.len());
        faults.push(Fault {
            id,
            kernel: body.kernel.clone(),
            kind: site.kind,
            own,
            callers: vec![line.callers.clone()],
            also,
            opcode,
            edits: edits.collect(),
            through: through.collect(),
        });
    }
    faults
}

/// Faults that concern one line alone.
fn at_line(lines: &[Line], at: usize, sites: &mut Vec<Site>) {
    let line = &lines[at];
    let opcode = line.opcode();
    let text = &line.text;
    let mut edit = |kind, new: String| {
        sites.push(Site { kind, at, edits: vec![(at, new)], other: None, through: vec![] })
    };
    let mut replace = |kind, from: &str, to: &str| {
        if opcode.contains(from) {
            edit(kind, text.replacen(from, to, 1));
        }
    };
    match opcode.split('.').next().unwrap_or("") {
        "st" | "red" | "atom" | "ld" => {
            replace(Kind::ReleaseToRelaxed, ".release.", ".relaxed.");
            replace(Kind::ReleaseToRelaxed, ".acq_rel.", ".relaxed.");
            replace(Kind::AcquireToRelaxed, ".acquire.", ".relaxed.");
            replace(Kind::SystemToDevice, ".sys.", ".gpu.");
            replace(Kind::DeviceToBlock, ".gpu.", ".cta.");
            if opcode.starts_with("red.") {
                edit(Kind::AddDropped, String::new());
            }
        }
        "fence" if opcode.contains(".proxy.async") => {
            edit(Kind::ProxyFenceDropped, String::new());
            if opcode == "fence.proxy.async" {
                edit(Kind::ProxyFenceOnlyShared, text.replacen(opcode, "fence.proxy.async.shared::cta", 1));
            }
        }
        "fence" if opcode.contains("mbarrier_init") => edit(Kind::InitFenceDropped, String::new()),
        "cp" if opcode.contains("commit_group") => edit(Kind::BulkCommitDropped, String::new()),
        "cp" if opcode.contains("wait_group") => {
            edit(Kind::BulkWaitDropped, String::new());
            if let Some(pending) = line.operands().first().and_then(|n| n.parse::<u32>().ok()) {
                edit(Kind::BulkWaitOneLess, format!("{opcode} {};", pending + 1));
            }
            // Copies that are not of the copy engine have no such wait.
            if opcode.contains(".bulk.") && !opcode.ends_with(".read") {
                edit(Kind::BulkWaitReadOnly, text.replacen(opcode, &format!("{opcode}.read"), 1));
            }
        }
        "barrier" => edit(Kind::BlockBarrierDropped, String::new()),
        "bar" if opcode.starts_with("bar.warp.sync") => edit(Kind::WarpSyncDropped, String::new()),
        "mbarrier" => mbarrier(line, &mut edit),
        _ => {}
    }
}

fn mbarrier(line: &Line, edit: &mut impl FnMut(Kind, String)) {
    let (opcode, text) = (line.opcode(), &line.text);
    // The last operand of an instruction that changes to `q`, computed before it.
    let computed = |what: &str, statement: &str| -> Option<String> {
        let (head, last) = statement.rsplit_once(',')?;
        let last = last.trim().trim_end_matches(';');
        Some(format!(".reg .b32 q; {} {head}, q;", what.replace('#', last)))
    };
    if opcode.contains(".try_wait.parity") {
        // { .reg .pred p; mbarrier.try_wait.parity.. p, [m], parity; selp.u32 d, 1, 0, p; }
        let Some((head, tail)) = text.split_once(opcode) else { return };
        let Some((wait, rest)) = tail.split_once(';') else { return };
        if let Some(wait) = computed("xor.b32 q, #, 1;", &format!("{opcode}{wait}")) {
            edit(Kind::MbarrierOtherParity, format!("{head}{wait}{rest}"));
        }
        if rest.contains("1, 0, p") {
            edit(Kind::MbarrierNoWait, text.replacen("1, 0, p", "1, 1, p", 1));
        }
    } else if opcode.contains(".arrive.expect_tx") {
        if let Some(less) = computed("sub.u32 q, #, 16;", text) {
            edit(Kind::MbarrierFewerBytes, format!("{{ {less} }}"));
        }
        if let Some((head, _)) = text.rsplit_once(',') {
            edit(Kind::MbarrierNoBytes, format!("{head}, 0;"));
        }
    } else if opcode.contains(".init")
        && let Some(more) = computed("add.u32 q, #, 1;", text)
    {
        edit(Kind::MbarrierMoreArrivals, format!("{{ {more} }}"));
    }
}

/// Instructions that carry a polled value on to its comparison.
const CARRIERS: [&str; 8] = ["shr", "shl", "cvt", "and", "mov", "add", "redux", "min"];
/// How far from the load its comparison may be, in lines. A loop that is unrolled over eight ranks
/// has all loads in front of all comparisons.
const REACH: usize = 100;

/// The comparison of what is polled or counted here with what it should be.
fn polled(lines: &[Line], at: usize, sites: &mut Vec<Site>) {
    let opcode = lines[at].opcode();
    let polls =
        ["ld.acquire.sys.", "ld.acquire.cta.", "ld.relaxed.sys."].iter().any(|load| opcode.starts_with(load));
    let counts = opcode.starts_with("atom.acq_rel") && opcode.contains(".add.");
    if !polls && !counts {
        return;
    }
    let mut carried: HashSet<String> = lines[at].writes().into_iter().map(str::to_owned).collect();
    for (index, line) in lines.iter().enumerate().skip(at + 1).take(REACH) {
        let operands = line.operands();
        let base = line.opcode().split('.').next().unwrap_or("");
        let uses = operands.iter().skip(1).any(|operand| carried.contains(*operand));
        if base == "setp" && uses {
            compared(lines, [at, index], &operands, &carried, sites);
            return;
        }
        if CARRIERS.contains(&base) && uses {
            carried.extend(line.writes().into_iter().map(str::to_owned));
        }
    }
}

/// Faults of a comparison with a word that was loaded in the line `load`.
fn compared(
    lines: &[Line],
    [load, at]: [usize; 2],
    operands: &[&str],
    carried: &HashSet<String>,
    sites: &mut Vec<Site>,
) {
    let &[predicate, left, right] = operands else { return };
    let opcode = lines[at].opcode();
    let bits = [64, 16].into_iter().find(|bits| opcode.ends_with(&bits.to_string())).unwrap_or(32);
    let seen = if carried.contains(left) { left } else { right };
    // A value compared with itself: equal, at least, not less, not other. Whichever way round the
    // branch is, the wait is over.
    let ignored = format!("{opcode} {predicate}, {seen}, {seen};");
    let (a, b) = if seen == left { ("q", right) } else { (left, "q") };
    let more = format!("{{ .reg .b{bits} q; add.u{bits} q, {seen}, 1; {opcode} {predicate}, {a}, {b}; }}");
    for (kind, text) in [(Kind::EpochIgnored, ignored), (Kind::EpochOneLess, more)] {
        sites.push(Site { kind, at, edits: vec![(at, text)], other: Some(load), through: vec![] });
    }
}

/// A release that trades places with the store or wait before it.
fn published(lines: &[Line], at: usize, sites: &mut Vec<Site>) {
    let publishes = ["st.release.", "red.release.", "atom.acq_rel."];
    if !publishes.iter().any(|prefix| lines[at].opcode().starts_with(prefix)) {
        return;
    }
    // Not `st.relaxed`: a packet is complete in itself, regardless of stores before and behind it.
    const MOVABLE: [&str; 6] =
        ["st.global", "st.shared", "cp.async.bulk.wait", "barrier", "bar.warp", "fence.proxy"];
    for index in (0..at).rev() {
        let line = &lines[index];
        if line.ends_block() {
            return;
        }
        if MOVABLE.iter().any(|prefix| line.opcode().starts_with(prefix)) {
            // The moved instruction's registers must hold the same values after the release.
            let needs = line.registers();
            let between = &lines[index + 1..=at];
            if between.iter().any(|other| other.writes().iter().any(|register| needs.contains(register))) {
                return;
            }
            let both = format!("{} {}", lines[at].text, line.text);
            let edits = vec![(index, String::new()), (at, both)];
            sites.push(Site { kind: Kind::PublishedEarly, at, edits, other: Some(index), through: vec![] });
            return;
        }
    }
}

/// How many definitions an address is followed back.
const DEPTH: usize = 6;

/// The product in the address of a row's access: its first factor, the row's number, is one more.
/// `rows` has the sites so far, by the product's line: a product that several accesses share is one
/// site.
fn next_row(lines: &[Line], at: usize, rows: &mut BTreeMap<usize, usize>, sites: &mut Vec<Site>) {
    const ACCESSES: [&str; 6] = [
        "cp.async.bulk.global",
        "cp.async.bulk.shared",
        "st.global.v4",
        "ld.global.L1",
        "st.global.b32",
        "st.global.b64",
    ];
    if !ACCESSES.iter().any(|prefix| lines[at].opcode().starts_with(prefix)) {
        return;
    }
    let mut open: Vec<(String, usize)> = Vec::new();
    for bracket in lines[at].text.split('[').skip(1) {
        let register = bracket.split([']', '+']).next().unwrap_or("").trim();
        if register.starts_with("%rd") {
            open.push((register.to_owned(), at));
        }
    }
    for _ in 0..DEPTH {
        let mut before = Vec::new();
        for (register, user) in open {
            let writes = |index: &usize| lines[*index].writes().contains(&register.as_str());
            let Some(index) = (0..user).rev().find(writes) else { continue };
            let line = &lines[index];
            if line.opcode() == "add.s64" {
                let operands = line.operands().into_iter().skip(1);
                before.extend(
                    operands.filter(|part| part.starts_with("%rd")).map(|part| (part.to_owned(), index)),
                );
            } else if let Some(new) = with_next_row(line) {
                // The compiler computes some products in two branches, for the same accesses.
                let is_same = |other: &Line| other.text == line.text && other.own == line.own;
                let all: Vec<usize> = (0..lines.len()).filter(|other| is_same(&lines[*other])).collect();
                let first = all.first().copied().unwrap_or(index);
                let site = *rows.entry(first).or_insert_with(|| {
                    sites.push(Site {
                        kind: Kind::NextRow,
                        at: first,
                        edits: all.into_iter().map(|index| (index, new.clone())).collect(),
                        other: None,
                        through: vec![],
                    });
                    sites.len() - 1
                });
                sites[site].through.push(at);
            }
        }
        open = before;
    }
}

/// A product with its first factor one more.
fn with_next_row(line: &Line) -> Option<String> {
    let opcode = line.opcode();
    let bits = match opcode {
        "mul.lo.s64" | "mad.lo.s64" => 64,
        "mul.wide.u32" | "mad.wide.u32" => 32,
        _ => return None,
    };
    let operands = line.operands();
    let (result, row, rest) = (operands.first()?, operands.get(1)?, operands.get(2..)?.join(", "));
    let is_register = row.starts_with("%r");
    is_register
        .then(|| format!("{{ .reg .b{bits} q; add.u{bits} q, {row}, 1; {opcode} {result}, q, {rest}; }}"))
}

#[cfg(test)]
mod tests {
    use super::super::text::{bodies, with_lines};
    use super::*;
    use epoxide_vgpu::Module;

    /// A kernel around these statements, a line each; the first is on line 9, and its Rust line is
    /// 101.
    fn ptx(statements: &str) -> String {
        let mut text = ".version 8.4\n.target sm_90\n.address_size 64\n.entry k()\n{\n.reg .pred %p<9>;\n.reg .b32 %r<9>; .reg .b64 %rd<9>;\n.loc 1 100 0\n".to_owned();
        for (index, statement) in statements.lines().enumerate() {
            text += &format!(".loc 1 {} 0\n{}\n", 101 + index, statement.trim());
        }
        text + "ret;\n}\n.file 1 \"gpu/src/kernels/k.rs\"\n"
    }

    /// Kind, Rust line and the edited lines of every fault; each faulty text is valid PTX.
    fn faults(statements: &str) -> Vec<(&'static str, u32, Vec<String>)> {
        let text = ptx(statements);
        let found = enumerate(&bodies(&text, &["k", "none"]).unwrap());
        for fault in &found {
            let faulty = with_lines(&text, &fault.edits);
            assert_eq!(faulty.lines().count(), text.lines().count());
            Module::parse(&faulty).unwrap_or_else(|error| panic!("{}: {error}", fault.id));
        }
        let edits = |fault: &Fault| fault.edits.iter().map(|(_, text)| text.clone()).collect();
        found.iter().map(|fault| (fault.kind.name(), fault.own.1, edits(fault))).collect()
    }

    fn one(kind: &'static str, line: u32, edit: &str) -> (&'static str, u32, Vec<String>) {
        (kind, line, vec![edit.to_owned()])
    }

    #[test]
    fn orders_and_scopes() {
        let found = faults(
            "st.release.sys.global.b64 [%rd1], %rd2;\nld.acquire.gpu.global.b64 %rd3, [%rd4];\nld.global.b64 %rd3, [%rd4];",
        );
        assert_eq!(
            found,
            [
                one("release-to-relaxed", 101, "st.relaxed.sys.global.b64 [%rd1], %rd2;"),
                one("sys-to-gpu", 101, "st.release.gpu.global.b64 [%rd1], %rd2;"),
                one("acquire-to-relaxed", 102, "ld.relaxed.gpu.global.b64 %rd3, [%rd4];"),
                one("gpu-to-cta", 102, "ld.acquire.cta.global.b64 %rd3, [%rd4];"),
            ]
        );
        let found = faults("red.release.sys.global.add.u64 [%rd1], %rd2;");
        assert_eq!(found.last(), Some(&one("add-dropped", 101, "")));
    }

    #[test]
    fn fences_waits_and_barriers() {
        let found = faults(
            "fence.proxy.async;\ncp.async.bulk.wait_group 0;\ncp.async.bulk.wait_group.read 1;\nbarrier.sync 0;\nbar.warp.sync 0xffffffff;",
        );
        assert_eq!(
            found,
            [
                one("proxy-fence-dropped", 101, ""),
                one("proxy-fence-only-shared", 101, "fence.proxy.async.shared::cta;"),
                one("bulk-wait-dropped", 102, ""),
                one("bulk-wait-one-less", 102, "cp.async.bulk.wait_group 1;"),
                one("bulk-wait-read-only", 102, "cp.async.bulk.wait_group.read 0;"),
                one("bulk-wait-dropped", 103, ""),
                one("bulk-wait-one-less", 103, "cp.async.bulk.wait_group.read 2;"),
                one("block-barrier-dropped", 104, ""),
                one("warp-sync-dropped", 105, ""),
            ]
        );
    }

    #[test]
    fn mbarriers() {
        let found = faults(
            "mbarrier.init.shared.b64 [%r1], %r2;\nmbarrier.arrive.expect_tx.shared.b64 _, [%r1], %r2;\n\
             { .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%r1], %r2; selp.u32 %r3, 1, 0, p; }",
        );
        let wait = "{ .reg .pred p; .reg .b32 q; xor.b32 q, %r2, 1; mbarrier.try_wait.parity.shared.b64 p, [%r1], q; selp.u32 %r3, 1, 0, p; }";
        let never =
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%r1], %r2; selp.u32 %r3, 1, 1, p; }";
        let less = "{ .reg .b32 q; sub.u32 q, %r2, 16; mbarrier.arrive.expect_tx.shared.b64 _, [%r1], q; }";
        assert_eq!(
            found,
            [
                one(
                    "mbarrier-more-arrivals",
                    101,
                    "{ .reg .b32 q; add.u32 q, %r2, 1; mbarrier.init.shared.b64 [%r1], q; }"
                ),
                one("mbarrier-fewer-bytes", 102, less),
                one("mbarrier-no-bytes", 102, "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 0;"),
                one("mbarrier-other-parity", 103, wait),
                one("mbarrier-no-wait", 103, never),
            ]
        );
    }

    #[test]
    fn comparisons_of_polled_words() {
        let found = faults(
            "ld.acquire.sys.global.b64 %rd1, [%rd2];\nshr.u64 %rd3, %rd1, 32;\nsetp.ne.b64 %p1, %rd4, %rd3;",
        );
        let more = "{ .reg .b64 q; add.u64 q, %rd3, 1; setp.ne.b64 %p1, %rd4, q; }";
        assert_eq!(
            found[2..],
            [one("epoch-ignored", 103, "setp.ne.b64 %p1, %rd3, %rd3;"), one("epoch-one-less", 103, more)]
        );
        assert!(faults("ld.global.b64 %rd1, [%rd2];\nsetp.ne.b64 %p1, %rd1, %rd3;").is_empty());
    }

    #[test]
    fn polls_and_accesses_to_rows_are_places_of_a_fault() {
        let also = |kind, statements: &str| {
            let found = enumerate(&bodies(&ptx(statements), &["k"]).unwrap());
            let fault = found.into_iter().find(|fault| fault.kind == kind).unwrap();
            fault.also.into_iter().map(|place| place.1).collect::<Vec<_>>()
        };
        let poll =
            "ld.relaxed.sys.global.b64 %rd1, [%rd2];\nmov.b64 %rd3, %rd1;\nsetp.ne.b64 %p1, %rd4, %rd3;";
        assert_eq!(also(Kind::EpochIgnored, poll), [101]);
        let two_stores =
            "mul.wide.u32 %rd1, %r1, 4;\nst.global.b32 [%rd1], %r2;\nst.global.b32 [%rd1+4], %r2;";
        assert_eq!(also(Kind::NextRow, two_stores), [102, 103]);
    }

    #[test]
    fn words_published_before_their_data() {
        let early = |statements: &str| {
            let found = faults(statements);
            found.into_iter().find(|fault| fault.0 == "published-early").map(|fault| (fault.1, fault.2))
        };
        let both = "st.release.sys.global.b64 [%rd3], %rd2; st.global.b64 [%rd1], %rd2;".to_owned();
        let sound =
            "st.global.b64 [%rd1], %rd2;\nadd.s64 %rd3, %rd4, 8;\nst.release.sys.global.b64 [%rd3], %rd2;";
        assert_eq!(early(sound), Some((103, vec![String::new(), both])));
        // The store's registers change before the release, or another block begins.
        assert_eq!(
            early(
                "st.global.b64 [%rd1], %rd2;\nadd.s64 %rd1, %rd4, 8;\nst.release.sys.global.b64 [%rd1], %rd2;"
            ),
            None
        );
        assert_eq!(early("st.global.b64 [%rd1], %rd2;\n$L1:\nst.release.sys.global.b64 [%rd3], %rd2;"), None);
    }

    #[test]
    fn rows() {
        let found = faults(
            "mad.lo.s64 %rd1, %rd2, %rd3, %rd4;\nadd.s64 %rd5, %rd1, 64;\nst.global.v4.b32 [%rd5], {%r1, %r2, %r3, %r4};",
        );
        let next = "{ .reg .b64 q; add.u64 q, %rd2, 1; mad.lo.s64 %rd1, q, %rd3, %rd4; }";
        assert_eq!(found, [one("next-row", 101, next)]);
        // The product of another branch is the same fault: either may be the one that is used.
        let product = "mul.wide.u32 %rd1, %r1, 4;";
        let store = "st.global.b32 [%rd1], %r2;";
        let branches = format!("@%p1 bra $L1;\n{product}\nbra $L2;\n$L1:\n{product}\n$L2:\n{store}");
        let found =
            enumerate(&bodies(&ptx(&branches).replace(".loc 1 105 0", ".loc 1 102 0"), &["k"]).unwrap());
        let edits = |fault: &Fault| fault.edits.iter().map(|(_, text)| text.clone()).collect::<Vec<_>>();
        let next = "{ .reg .b32 q; add.u32 q, %r1, 1; mul.wide.u32 %rd1, q, 4; }";
        assert_eq!((found.len(), found[0].own.1, edits(&found[0])), (1, 102, vec![next.to_owned(); 2]));
    }

    #[test]
    fn copies_of_a_place_are_one_fault() {
        let copies = "barrier.sync 0;\n.loc 1 101 0\nbarrier.sync 0;";
        let text = ptx(copies);
        let found = enumerate(&bodies(&text, &["k"]).unwrap());
        // The helper puts a `.loc` of its own before the copy: same line again.
        let lines: Vec<u32> = found.iter().map(|fault| fault.own.1).collect();
        assert_eq!(lines, [101, 103]);
        let same = ptx("barrier.sync 0;").replace("ret;", ".loc 1 101 0\nbarrier.sync 0;\nret;");
        let found = enumerate(&bodies(&same, &["k"]).unwrap());
        assert_eq!((found.len(), found[0].edits.len()), (1, 2));
        assert_eq!(found[0].id, "k/block-barrier-dropped/k:101");
    }

    #[test]
    fn a_sample_has_every_kind() {
        let statements = "barrier.sync 0;\nbarrier.sync 0;\nbarrier.sync 0;\nfence.proxy.async.shared::cta;";
        let all = enumerate(&bodies(&ptx(statements), &["k"]).unwrap());
        let lines = |count, draw| {
            sample(all.clone(), count, draw).iter().map(|fault| fault.own.1).collect::<Vec<_>>()
        };
        assert_eq!(lines(2, 0), [101, 104]);
        assert_eq!(lines(3, 0), [101, 103, 104]);
        assert_eq!(spread(vec![1, 2, 3, 4, 5]), [1, 5, 2, 4, 3]);
        assert_eq!(lines(9, 0), [101, 102, 103, 104]);
        let draws: HashSet<_> = (1..20).map(|draw| lines(2, draw)).collect();
        assert_eq!(draws, [[101, 104], [102, 104], [103, 104]].map(Vec::from).into());
    }
}
