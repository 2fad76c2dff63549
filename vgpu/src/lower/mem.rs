//! Decoding of loads, stores, atomics, address-space instructions and cache hints.

use std::ops::Range;

use super::decode::{Emit, simple};
use super::state::{Lower, Lowered};
use super::types::{Mods, Ty};
use super::wgmma::integer;
use crate::exec::access::{LOCAL_TAG, PARAM_TAG, SHARED_TAG};
use crate::exec::lanes::{Spec, op1, op3};
use crate::ir::{Access, Addr, Atomic, CopyOp, File, Init, Op, Reduce, Rmw, SINK, Scope, Sem, Space};
use crate::ptx::{Operand, Span};

const SPACES: &[(&str, Space)] = &[
    ("global", Space::Global),
    ("shared", Space::Shared),
    ("shared::cta", Space::Shared),
    ("shared::cluster", Space::Cluster),
    ("local", Space::Local),
    ("param", Space::Param),
    ("param::entry", Space::Param),
    ("param::func", Space::Param),
];

/// Whether an instruction names the space of constants. They live beside the global variables, and
/// their addresses are generic.
fn constant(m: &mut Mods) -> bool {
    m.has("const")
}

pub(super) const SCOPES: &[(&str, Scope)] =
    &[("cta", Scope::Cta), ("cluster", Scope::Cluster), ("gpu", Scope::Gpu), ("sys", Scope::Sys)];

const CACHE_HINTS: &[&str] = &[
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
    "L2::64B",
    "L2::128B",
    "L2::256B",
];

fn ordering(m: &mut Mods) -> Sem {
    m.one_of(&[
        ("weak", Sem::Weak),
        ("relaxed", Sem::Relaxed),
        ("acquire", Sem::Acquire),
        ("release", Sem::Release),
        ("acq_rel", Sem::AcqRel),
        ("volatile", Sem::Relaxed),
        ("mmio", Sem::Relaxed),
    ])
    .unwrap_or(Sem::Weak)
}

/// Common part of a load and a store.
struct Shape {
    space: Space,
    sem: Sem,
    scope: Scope,
    n: u8,
    ty: Ty,
    /// One value of 128 bits, in two halves.
    whole: bool,
    /// `.nc`, and all of `ldu`.
    read_only: bool,
    /// A 64-bit cache policy operand comes last.
    policy: bool,
}

fn shape(m: &mut Mods) -> Result<Shape, String> {
    let mut sem = ordering(m);
    // `.mmio` and `.relaxed` come together.
    if m.has("mmio") || m.has("relaxed") {
        sem = if sem == Sem::Weak { Sem::Relaxed } else { sem };
    }
    // `.volatile` and `.mmio` name no scope and mean the widest.
    let scope = m.one_of(SCOPES).unwrap_or(Scope::Sys);
    let of_constants = m.base != "st" && constant(m);
    let space = if of_constants { Some(Space::Global) } else { m.one_of(SPACES) };
    let space = space.unwrap_or(Space::Generic);
    m.ignore(CACHE_HINTS);
    let read_only = m.base == "ldu" || m.base == "ld" && m.has("nc");
    let policy = m.has("L2::cache_hint");
    if m.has("b128") {
        return Ok(Shape { space, sem, scope, n: 2, ty: Ty::B64, whole: true, read_only, policy });
    }
    let n = m.one_of(&[("v2", 2), ("v4", 4)]).unwrap_or(1);
    let ty = m.ty()?;
    if ty == Ty::Pred || matches!(ty, Ty::E4m3x2 | Ty::E5m2x2) || ty.bits() / 8 * n > 16 {
        return m.unsupported();
    }
    Ok(Shape { space, sem, scope, n: n as u8, ty, whole: false, read_only, policy })
}

/// The registers of a load or store and whether they are 64 bits wide.
fn registers(l: &mut Lower, op: &(Operand, Span), s: &Shape, dest: bool) -> Lowered<(bool, [u32; 4])> {
    if s.whole {
        let [low, high] = if dest && op.0 == Operand::Sink { [SINK; 2] } else { l.halves(op)? };
        return Ok((true, [low, high, SINK, SINK]));
    }
    let single;
    let items = match &op.0 {
        Operand::Vector(v) => v.as_slice(),
        other => {
            single = [other.clone()];
            &single
        }
    };
    if items.len() != usize::from(s.n) {
        return Err((op.1, format!("{} registers given, {} expected", items.len(), s.n)));
    }
    let (natural, bits) = (s.ty.file(), s.ty.bits());
    let mut regs = [SINK; 4];
    let mut wide = None;
    for (slot, item) in regs.iter_mut().zip(items) {
        let op = (item.clone(), op.1);
        match l.any_register(&op)? {
            Some((File::Pred, ..)) => return Err((op.1, "a predicate cannot be loaded or stored".into())),
            Some((_, 128, _)) => {
                return Err((op.1, format!("a 128-bit register holds .b128 alone, not {bits} bits")));
            }
            Some((file, b, _)) if b < bits => {
                return Err((op.1, format!("a {b}-bit register cannot hold {bits} bits ({file:?})")));
            }
            Some((file, _, s)) => {
                let w = file == File::R64;
                if *wide.get_or_insert(w) != w {
                    return Err((op.1, "registers of different widths in one vector".into()));
                }
                *slot = s;
            }
            None if dest && item == &Operand::Sink => {}
            None if dest => return Err((op.1, "destination is not a register".into())),
            None => *slot = l.source(&op, natural, bits.max(16))?,
        }
    }
    Ok((wide.unwrap_or(natural == File::R64), regs))
}

fn access(l: &mut Lower, ops: &[(Operand, Span)], s: &Shape, dest: bool) -> Lowered<Access> {
    let n = 2 + usize::from(s.policy);
    l.count(ops, n..=n)?;
    if s.policy {
        l.source_of::<u64>(&ops[2])?;
    }
    let (reg, addr) = if dest { (&ops[0], &ops[1]) } else { (&ops[1], &ops[0]) };
    let (wide, regs) = registers(l, reg, s, dest)?;
    let space = if s.space == Space::Param && l.passes_arguments(&addr.0) { Space::Local } else { s.space };
    if space == Space::Param && !dest {
        return l.error("st.param into a parameter of the kernel, which is read-only");
    }
    Ok(Access {
        space,
        sem: s.sem,
        scope: s.scope,
        addr: l.address(addr)?,
        bytes: (s.ty.bits() / 8) as u8,
        n: s.n,
        wide,
        signed: s.ty.is_signed(),
        whole: s.whole,
        read_only: s.read_only,
        regs,
    })
}

/// `ld`, `ldu`
pub(super) fn load(m: &mut Mods) -> Result<Emit, String> {
    let s = shape(m)?;
    if s.sem.releases() {
        return m.unsupported();
    }
    Ok(Box::new(move |l, ops| {
        let a = access(l, ops, &s, true)?;
        l.push(Op::Ld(a));
        Ok(())
    }))
}

/// `st`
pub(super) fn store(m: &mut Mods) -> Result<Emit, String> {
    let s = shape(m)?;
    if s.sem.acquires() {
        return m.unsupported();
    }
    Ok(Box::new(move |l, ops| {
        let a = access(l, ops, &s, false)?;
        l.push(Op::St(a));
        Ok(())
    }))
}

/// `cp.async`: a thread's own copy of 4, 8 or 16 bytes from global to shared memory, the groups of
/// copies and the waits for them.
pub(super) fn copy(m: &mut Mods) -> Result<Emit, String> {
    if m.has("commit_group") {
        return Ok(no_operands(CopyOp::Commit));
    }
    if m.has("wait_all") {
        return Ok(no_operands(CopyOp::WaitAll));
    }
    if m.has("wait_group") {
        return Ok(Box::new(|l, ops| {
            l.count(ops, 1..=1)?;
            let Operand::Int(n) = ops[0].0 else { return l.error("the number of groups must be a constant") };
            let Ok(allowed) = u32::try_from(n) else { return l.error("the number of groups is negative") };
            l.push(Op::Copy(CopyOp::Wait { allowed }));
            Ok(())
        }));
    }
    if m.has("mbarrier") {
        let counted = m.has("noinc");
        let space = m.one_of(&[("shared", Space::Shared), ("shared::cta", Space::Shared)]);
        if !(m.has("arrive") && m.has("b64")) {
            return m.unsupported();
        }
        return Ok(Box::new(move |l, ops| {
            l.count(ops, 1..=1)?;
            let (mbar, space) = (l.address(&ops[0])?, space.unwrap_or(Space::Generic));
            l.push(Op::Copy(CopyOp::Arrive { mbar, space, counted }));
            Ok(())
        }));
    }
    let all_sizes = m.one_of(&[("ca", true), ("cg", false)]);
    let shared = m.has("shared") || m.has("shared::cta");
    let (Some(all_sizes), true) = (all_sizes, shared & m.has("global")) else { return m.unsupported() };
    m.ignore(&["L2::64B", "L2::128B", "L2::256B"]);
    let policy = usize::from(m.has("L2::cache_hint"));
    Ok(Box::new(move |l, ops| {
        l.count(ops, 3 + policy..=4 + policy)?;
        if policy == 1 {
            l.source_of::<u64>(&ops[ops.len() - 1])?;
        }
        let bytes = match ops[2].0 {
            Operand::Int(16) => 16,
            Operand::Int(n @ (4 | 8)) if all_sizes => n as u8,
            _ if all_sizes => return l.error("cp.async.ca copies 4, 8 or 16 bytes"),
            _ => return l.error("cp.async.cg copies 16 bytes; cp.async.ca copies 4 or 8 as well"),
        };
        let (dst, src) = (l.address(&ops[0])?, l.address(&ops[1])?);
        // Only the first bytes are read, and zeros replace the others. A predicate may reduce the
        // number to none.
        let read = if ops.len() == 3 + policy { SINK } else { read_size(l, &ops[3], u32::from(bytes))? };
        l.push(Op::Copy(CopyOp::Start { dst, src, bytes, read }));
        Ok(())
    }))
}

fn no_operands(op: CopyOp) -> Emit {
    Box::new(move |l, ops| {
        l.count(ops, 0..=0)?;
        l.push(Op::Copy(op));
        Ok(())
    })
}

/// Number of bytes that `cp.async` reads: a number, or all or none by a predicate that ignores the
/// source.
fn read_size(l: &mut Lower, op: &(Operand, Span), all: u32) -> Lowered<u32> {
    let predicate = matches!(op.0, Operand::Not(_)) || matches!(l.any_register(op)?, Some((File::Pred, ..)));
    if !predicate {
        return l.source_of::<u32>(op);
    }
    let ignored = l.source_of::<bool>(op)?;
    let size = l.slot(File::R32);
    let all = l.constant(File::R32, Init::Bits(all.into()));
    let none = l.constant(File::R32, Init::Bits(0));
    let select = op3(|a: u32, b: u32, p: bool| if p { a } else { b });
    l.push_alu(select.f, [size, none, all, ignored, 0, 0], select.sig);
    Ok(size)
}

/// `atom`, `red`
pub(super) fn atomic(m: &mut Mods) -> Result<Emit, String> {
    let red = m.base == "red";
    // Every atomic is sequentially consistent here, which is stronger than any requested order; the
    // rest is for checks.
    let sem = match ordering(m) {
        Sem::Weak => Sem::Relaxed,
        sem => sem,
    };
    let scope = m.one_of(SCOPES).unwrap_or(Scope::Gpu);
    let space = m.one_of(SPACES).unwrap_or(Space::Generic);
    let policy = m.has("L2::cache_hint");
    let reduce = m.one_of(&Reduce::NAMES);
    let swap = m.one_of(&[("exch", Rmw::Exch), ("cas", Rmw::Cas)]);
    if reduce.is_none() && swap.is_none() {
        return m.unsupported();
    }
    let noftz = m.has("noftz");
    let elements = m.one_of(&[("v2", 2), ("v4", 4), ("v8", 8)]);
    let ty = m.ty()?;
    let small_float = matches!(ty, Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2);
    use Reduce::{Add, And, Dec, Inc, Max, Min, Or, Xor};
    let op = match (reduce, swap, ty) {
        (Some(Add), None, Ty::F32) => Rmw::AddF32,
        (Some(Add), None, Ty::F64) => Rmw::AddF64,
        (Some(Add), None, Ty::F16) => Rmw::AddF16,
        (Some(Add), None, Ty::Bf16) => Rmw::AddBf16,
        (Some(Add), None, Ty::F16x2) => Rmw::AddF16x2,
        (Some(Add), None, Ty::Bf16x2) => Rmw::AddBf16x2,
        (Some(of @ (Add | Min | Max)), None, Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64)
        | (Some(of @ (Inc | Dec)), None, Ty::U32)
        | (Some(of @ (And | Or | Xor)), None, Ty::B32 | Ty::B64) => of.of_integers(ty.is_signed()),
        (None, Some(Rmw::Exch), Ty::B32 | Ty::B64) if !red => Rmw::Exch,
        (None, Some(Rmw::Cas), Ty::B16 | Ty::B32 | Ty::B64) if !red => Rmw::Cas,
        _ => return m.unsupported(),
    };
    if noftz != small_float || matches!(space, Space::Local | Space::Param) {
        return m.unsupported();
    }
    let cas = op == Rmw::Cas;
    let bits = ty.bits();
    let bytes = (bits / 8) as u8;
    let atomic = move |addr, d, a, b| Op::Atom(Atomic { op, space, sem, scope, addr, bytes, d, a, b });
    if let Some(elements) = elements {
        let float = ty == Ty::F32 || small_float;
        if reduce != Some(Add) || !float || space == Space::Shared || elements as u32 * bits > 128 {
            return m.unsupported();
        }
        return Ok(vector_atomic(move |addr, d, a| atomic(addr, d, a, SINK), bits, elements, red, policy));
    }
    Ok(Box::new(move |l, ops| {
        let n = 2 + usize::from(!red) + usize::from(cas) + usize::from(policy);
        l.count(ops, n..=n)?;
        if policy {
            l.source_of::<u64>(&ops[n - 1])?;
        }
        let file = ty.file();
        let (d, rest) = if red { (SINK, ops) } else { (l.dest(&ops[0], file, bits)?, &ops[1..]) };
        let addr = l.address(&rest[0])?;
        let a = l.source(&rest[1], file, bits)?;
        let b = if cas { l.source(&rest[2], file, bits)? } else { SINK };
        l.push(atomic(addr, d, a, b));
        Ok(())
    }))
}

/// `atom` and `red` on a vector: an operation for each element. Each is atomic by itself.
fn vector_atomic(
    one: impl Fn(Addr, u32, u32) -> Op + 'static,
    bits: u32,
    elements: usize,
    red: bool,
    policy: bool,
) -> Emit {
    Box::new(move |l, ops| {
        let n = 2 + usize::from(!red) + usize::from(policy);
        l.count(ops, n..=n)?;
        if policy {
            l.source_of::<u64>(&ops[n - 1])?;
        }
        let parts = |(op, pos): &(Operand, Span)| match op {
            Operand::Vector(parts) if parts.len() == elements => {
                Ok(parts.iter().map(|part| (part.clone(), *pos)).collect::<Vec<_>>())
            }
            _ => Err((*pos, format!("a vector of {elements} registers is needed"))),
        };
        let (results, rest) = if red { (vec![], ops) } else { (parts(&ops[0])?, &ops[1..]) };
        let addr = l.address(&rest[0])?;
        // A result may be a register of a later operand.
        let copy = op1(|v: u32| v);
        let mut added = vec![];
        for part in parts(&rest[1])? {
            let (from, to) = (l.source(&part, File::R32, bits)?, l.slot(File::R32));
            l.push_alu(copy.f, [to, from, from, 0, 0, 0], copy.sig);
            added.push(to);
        }
        for (i, a) in added.into_iter().enumerate() {
            let d = results.get(i).map_or(Ok(SINK), |part| l.dest(part, File::R32, bits))?;
            let offset = addr.offset.wrapping_add(i as i64 * i64::from(bits / 8));
            let addr = Addr { offset, ..addr };
            l.push(one(addr, d, a));
        }
        Ok(())
    })
}

/// `prefetch`: nothing to do. `discard`, `applypriority`: a line of global memory. `createpolicy`:
/// a policy that nothing reads.
pub(super) fn hint(m: &mut Mods) -> Result<Emit, String> {
    if m.base == "createpolicy" {
        return policy(m);
    }
    if let "discard" | "applypriority" = m.base {
        m.has("global");
        let discards = m.base == "discard";
        if !m.has(if discards { "L2" } else { "L2::evict_normal" }) {
            return m.unsupported();
        }
        return Ok(Box::new(move |l, ops| {
            l.count(ops, 2..=2)?;
            let addr = l.address(&ops[0])?;
            integer(l, &ops[1], 128..=128, "size")?;
            l.push(Op::Line { addr, discards });
            Ok(())
        }));
    }
    m.one_of(SPACES);
    // The address of a tensor map, which may be a constant.
    if m.has("tensormap") {
        constant(m);
    }
    m.ignore(&["L1", "L2", "L2::evict_last", "L2::evict_normal"]);
    Ok(Box::new(|l, ops| {
        l.count(ops, 1..=1)?;
        l.address(&ops[0])?;
        l.push(Op::Nop);
        Ok(())
    }))
}

/// `createpolicy`
fn policy(m: &mut Mods) -> Result<Emit, String> {
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Fraction,
        /// `range`: an address and two sizes.
        Range,
        /// `cvt`: an access property of CUDA.
        Property,
    }
    let kinds = [("fractional", Kind::Fraction), ("range", Kind::Range), ("cvt", Kind::Property)];
    let Some(kind) = m.one_of(&kinds) else { return m.unsupported() };
    if kind == Kind::Property && !m.has("L2") {
        return m.unsupported();
    }
    if kind == Kind::Range {
        m.has("global");
    }
    if kind != Kind::Property {
        // A primary and possibly a secondary priority.
        for _ in 0..2 {
            m.ignore(&["L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged"]);
        }
    }
    m.has("b64");
    Ok(Box::new(move |l, ops| {
        let (least, most) = match kind {
            Kind::Fraction => (1, 2),
            Kind::Range => (4, 4),
            Kind::Property => (2, 2),
        };
        l.count(ops, least..=most)?;
        let d = l.dest_of::<u64>(&ops[0])?;
        match kind {
            Kind::Fraction => {
                if let Some(fraction) = ops.get(1) {
                    l.source_of::<f32>(fraction)?;
                }
            }
            Kind::Range => {
                l.address(&ops[1])?;
                l.source_of::<u32>(&ops[2])?;
                l.source_of::<u32>(&ops[3])?;
            }
            Kind::Property => {
                l.source_of::<u64>(&ops[1])?;
            }
        }
        let zero = l.constant(File::R64, Init::Bits(0));
        let spec = op1(|a: u64| a);
        l.push_alu(spec.f, [d, zero, 0, 0, 0, 0], spec.sig);
        Ok(())
    }))
}

/// `cvta`, `isspacep`, `mapa`, `getctarank`
pub(super) fn spaces(m: &mut Mods) -> Result<Emit, String> {
    const TAG: u64 = 0xff << 56;
    match m.base {
        "cvta" => {
            let to = m.has("to");
            let space = if constant(m) { Some(Space::Global) } else { m.one_of(SPACES) };
            if m.ty()? != Ty::U64 {
                return m.unsupported();
            }
            let spec = match (space, to) {
                (Some(Space::Global), _) => op1(|a: u64| a),
                (Some(Space::Shared | Space::Cluster), false) => op1(|a: u64| a | SHARED_TAG),
                (Some(Space::Local), false) => op1(|a: u64| a | LOCAL_TAG),
                (Some(Space::Param), false) => op1(|a: u64| a | PARAM_TAG),
                // An address of another space keeps its tag, so that its use is detected.
                (Some(Space::Shared | Space::Cluster), true) => {
                    op1(|a: u64| if a & TAG == SHARED_TAG { a & !TAG } else { a })
                }
                (Some(Space::Local), true) => op1(|a: u64| if a & TAG == LOCAL_TAG { a & !TAG } else { a }),
                (Some(Space::Param), true) => op1(|a: u64| if a & TAG == PARAM_TAG { a & !TAG } else { a }),
                _ => return m.unsupported(),
            };
            Ok(simple(spec))
        }
        "isspacep" => {
            if constant(m) {
                return Ok(relative_to_constants(op3(|a: u64, start: u64, bytes: u64| {
                    a.wrapping_sub(start) < bytes
                })));
            }
            Ok(simple(match m.one_of(SPACES) {
                Some(Space::Shared) => return Ok(super::cluster::is_own_shared()),
                // The window of constants is none of global memory.
                Some(Space::Global) => {
                    return Ok(relative_to_constants(op3(|a: u64, start: u64, bytes: u64| {
                        a & TAG == 0 && a.wrapping_sub(start) >= bytes
                    })));
                }
                Some(Space::Cluster) => op1(|a: u64| a & TAG == SHARED_TAG),
                Some(Space::Local) => op1(|a: u64| a & TAG == LOCAL_TAG),
                Some(Space::Param) => op1(|a: u64| a & TAG == PARAM_TAG),
                _ => return m.unsupported(),
            }))
        }
        _ => super::cluster::map_address(m),
    }
}

/// A predicate on a generic address, and on the first address and the length of the module's
/// constants.
fn relative_to_constants(spec: Spec) -> Emit {
    Box::new(move |l, ops| {
        l.count(ops, 2..=2)?;
        let (d, a) = (l.dest_of::<bool>(&ops[0])?, l.source_of::<u64>(&ops[1])?);
        let Range { start, end } = l.module_constants.clone();
        let bytes = l.constant(File::R64, Init::Bits(end - start));
        // Without constants the module may have no variables at all.
        let init = if end > start { Init::GlobalAddress(start) } else { Init::Bits(0) };
        let start = l.constant(File::R64, init);
        l.push_alu(spec.f, [d, a, start, bytes, 0, 0], spec.sig);
        Ok(())
    })
}
