//! State of a kernel's lowering: its names, its code so far, and the meaning of its operands.

use std::collections::HashMap;
use std::ops::Range;

use crate::compiled::native::{Logic, Native};
use crate::exec::lanes::{self, Role, Sig, Spec};
use crate::exec::state::SHARED_BASE;
use crate::exec::wgmma::RegisterCheck;
use crate::ir::{Addr, AluFn, CARRY, File, Init, Inst, NO_GUARD, Op, Operands, Origin, SINK, Special, Timer};
use crate::kernel::SharedVariable;
use crate::ptx::{self, Operand, Span, VarSpace};

/// Most registers of a kernel. The live registers of each block are a set, and a short text must
/// not use up all memory.
const MAX_REGISTERS: u32 = 1 << 16;
/// Shared, or local, variables of a kernel have fewer bytes than this.
const MAX_BYTES: u32 = 1 << 24;
/// Most bytes of local memory of a thread, as in CUDA.
pub(super) const MAX_LOCAL_BYTES: u32 = 512 << 10;
/// Most labels in the tables of a kernel, and in those that its `brx.idx` name: each of the latter is
/// an edge of the control flow graph.
const MAX_TARGETS: usize = 1 << 20;

/// An error with its place; the text line is added at the end.
pub(crate) type Lowered<T> = Result<T, (Span, String)>;

/// Meaning of a name.
#[derive(Clone, Debug)]
pub(super) enum Binding {
    Reg { file: File, bits: u32, slot: u32 },
    Shared { offset: u64 },
    DynamicShared,
    Local { offset: u64 },
    Global { offset: u64 },
    Param { offset: u64 },
    Label { pc: u32 },
    Targets { table: u32 },
}

/// A reference to a label that may not have been parsed yet.
#[derive(Debug)]
pub(super) struct Fixup {
    pub(super) name: String,
    pub(super) pos: Span,
    pub(super) place: Patch,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Patch {
    Branch(usize),
    Table(u32, usize),
}

#[derive(Default)]
pub(super) struct Scope {
    pub(super) names: HashMap<String, Binding>,
    pub(super) fixups: Vec<Fixup>,
}

/// A function that is being put in the place of its call.
pub(super) struct Call {
    pub(super) name: String,
    /// Branches to its end.
    pub(super) returns: Vec<usize>,
}

/// Lowers one kernel.
pub(crate) struct Lower<'a> {
    pub(super) module_shared: &'a HashMap<&'a str, &'a ptx::Variable>,
    pub(super) module_globals: &'a HashMap<&'a str, u64>,
    /// Where the module's constants are among its variables.
    pub(super) module_constants: Range<u64>,
    pub(super) functions: &'a HashMap<&'a str, &'a ptx::Function>,
    /// The module's shared variables that the kernel names.
    pub(super) shared_named: HashMap<&'a str, Binding>,
    pub(super) scopes: Vec<Scope>,
    /// The functions that are being inlined, the innermost last.
    pub(super) calls: Vec<Call>,
    /// Statements of functions that were inlined so far, and the calls themselves.
    pub(super) inlined: usize,
    pub(super) code: Vec<Inst>,
    /// Types of the slots of each arithmetic instruction; empty for others.
    pub(super) sigs: Vec<Vec<Sig>>,
    pub(super) origins: Vec<Origin>,
    pub(super) tables: Vec<Vec<u32>>,
    /// Labels so far, for [`MAX_TARGETS`].
    pub(super) targets: usize,
    pub(super) operands: Operands,
    pub(super) register_checks: Vec<RegisterCheck>,
    /// Instructions that copy one register to another, in order.
    pub(super) moves: Vec<usize>,
    pub(super) slots: [u32; 3],
    /// Declared registers: file, first slot, name, and the count of a numbered series.
    pub(super) declared: Vec<(File, u32, String, Option<u32>)>,
    pub(super) inits: Vec<(File, u32, Init)>,
    pub(super) constants: HashMap<(File, Init), u32>,
    pub(super) shared_bytes: u32,
    /// Offsets of the shared variables of bodies, by the variables' places in the text: one for all
    /// calls of a function.
    pub(super) shared_of_bodies: HashMap<usize, u64>,
    pub(super) shared_variables: Vec<SharedVariable>,
    pub(super) dynamic_align: u32,
    /// The first name of dynamic shared memory.
    pub(super) dynamic_shared: Option<String>,
    /// Local memory in use, which called functions free at their ends, and its maximum.
    pub(super) local_bytes: u32,
    pub(super) most_local_bytes: u32,
    /// The guard, the origin and the place of the instruction in hand.
    pub(super) guard: u32,
    pub(super) origin: Origin,
    pub(super) pos: Span,
    /// Errors, where all of them are collected and not only the first.
    pub(super) refused: Option<Vec<(Span, String)>>,
}

impl<'a> Lower<'a> {
    pub(super) fn new(
        module_shared: &'a HashMap<&'a str, &'a ptx::Variable>,
        module_globals: &'a HashMap<&'a str, u64>,
        module_constants: Range<u64>,
        functions: &'a HashMap<&'a str, &'a ptx::Function>,
    ) -> Self {
        Lower {
            module_shared,
            module_globals,
            module_constants,
            functions,
            shared_named: HashMap::new(),
            scopes: vec![Scope::default()],
            calls: vec![],
            inlined: 0,
            code: vec![],
            sigs: vec![],
            origins: vec![],
            tables: vec![],
            targets: 0,
            operands: Operands::default(),
            register_checks: vec![],
            moves: vec![],
            // Slot 0 of each file is the sink; predicate slot 1 is the carry flag.
            slots: [1, 1, CARRY + 1],
            declared: vec![],
            inits: vec![],
            constants: HashMap::new(),
            shared_bytes: 0,
            shared_of_bodies: HashMap::new(),
            shared_variables: vec![],
            dynamic_align: 1,
            dynamic_shared: None,
            local_bytes: 0,
            most_local_bytes: 0,
            guard: NO_GUARD,
            origin: Origin::default(),
            pos: Span::default(),
            refused: None,
        }
    }

    /// Notes an error, where all of them are collected.
    pub(super) fn unless_noted(&mut self, done: Lowered<()>) -> Lowered<()> {
        match (done, &mut self.refused) {
            (Err(error), Some(all)) => {
                all.push(error);
                Ok(())
            }
            (done, _) => done,
        }
    }

    pub(super) fn bind(&mut self, pos: Span, name: &str, binding: Binding) -> Lowered<()> {
        let scope = self.scopes.last_mut().ok_or((pos, "unbalanced '}'".to_string()))?;
        match scope.names.insert(name.to_string(), binding) {
            None => Ok(()),
            Some(_) => Err((pos, format!("'{name}' is declared twice in this scope"))),
        }
    }

    pub(super) fn close_scope(&mut self) -> Lowered<()> {
        let Some(scope) = self.scopes.pop() else { return Ok(()) };
        for f in scope.fixups {
            match scope.names.get(&f.name) {
                Some(&Binding::Label { pc }) => match f.place {
                    Patch::Branch(i) => self.code[i].op = Op::Bra { target: pc },
                    Patch::Table(t, i) => self.tables[t as usize][i] = pc,
                },
                Some(_) => return Err((f.pos, format!("'{}' is not a label", f.name))),
                None => match self.scopes.last_mut() {
                    Some(outer) => outer.fixups.push(f),
                    None => return Err((f.pos, format!("label '{}' does not exist", f.name))),
                },
            }
        }
        Ok(())
    }

    pub(super) fn fixup(&mut self, name: &str, pos: Span, place: Patch) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.fixups.push(Fixup { name: name.to_string(), pos, place });
        }
    }

    /// Counts the labels of a table, or of a branch by one.
    pub(super) fn count_targets(&mut self, pos: Span, name: &str, labels: usize) -> Lowered<()> {
        self.targets += labels;
        if self.targets <= MAX_TARGETS {
            return Ok(());
        }
        let rule = format!(
            "the tables of a kernel and its branches by them have at most {MAX_TARGETS} labels in all"
        );
        Err((pos, format!("'{name}' has {labels} labels, which are too many: {rule}")))
    }

    pub(super) fn registers(&mut self, pos: Span, ty: &str, name: &str, count: Option<u32>) -> Lowered<()> {
        let (file, bits) = match ty {
            ".pred" => (File::Pred, 1),
            ".b128" => return self.wide_registers(pos, name, count),
            _ => match crate::ptx::parser::type_bytes(ty) {
                Some(8) => (File::R64, 64),
                Some(b) => (File::R32, b as u32 * 8),
                None => return Err((pos, format!("unknown register type '{ty}'"))),
            },
        };
        let all = self.slots.iter().sum::<u32>().saturating_add(count.unwrap_or(1));
        if all > MAX_REGISTERS {
            return Err((
                pos,
                format!("more than {MAX_REGISTERS} registers, those of called functions included"),
            ));
        }
        self.declared.push((file, self.slots[file as usize], name.to_string(), count));
        match count {
            None => {
                let slot = self.slot(file);
                self.bind(pos, name, Binding::Reg { file, bits, slot })
            }
            Some(n) => (0..n).try_for_each(|i| {
                let slot = self.slot(file);
                self.bind(pos, &format!("{name}{i}"), Binding::Reg { file, bits, slot })
            }),
        }
    }

    /// Registers of 128 bits: two of 64 behind each other, which only moves, loads and stores of
    /// 128 bits take.
    fn wide_registers(&mut self, pos: Span, name: &str, count: Option<u32>) -> Lowered<()> {
        let all = self.slots.iter().sum::<u32>().saturating_add(count.unwrap_or(1).saturating_mul(2));
        if all > MAX_REGISTERS {
            return Err((
                pos,
                format!("more than {MAX_REGISTERS} registers, those of called functions included"),
            ));
        }
        let names = (0..count.unwrap_or(1)).map(|i| match count {
            Some(_) => format!("{name}{i}"),
            None => name.to_string(),
        });
        for name in names {
            let slot = self.slot(File::R64);
            self.slot(File::R64);
            self.declared.push((File::R64, slot, name.clone(), None));
            self.bind(pos, &name, Binding::Reg { file: File::R64, bits: 128, slot })?;
        }
        Ok(())
    }

    /// The halves of a register of 128 bits, the low one first.
    pub(super) fn halves(&mut self, op: &(Operand, Span)) -> Lowered<[u32; 2]> {
        match self.any_register(op)? {
            Some((_, 128, slot)) => Ok([slot, slot + 1]),
            _ => Err((op.1, format!("{} is not a 128-bit register", describe(&op.0)))),
        }
    }

    /// The name of a declared register.
    pub(super) fn name_of(&self, file: File, slot: u32) -> Option<String> {
        self.declared.iter().filter(|d| d.0 == file).find_map(|(_, first, name, count)| {
            let number = slot.checked_sub(*first).filter(|&n| n < count.unwrap_or(1))?;
            Some(if count.is_some() { format!("{name}{number}") } else { name.clone() })
        })
    }

    pub(super) fn variable(&mut self, v: &ptx::Variable) -> Lowered<()> {
        let Some(bytes) = v.bytes else {
            return Err((v.pos, format!("variable '{}' needs a length here", v.name)));
        };
        let too_large = || (v.pos, format!("variable '{}' is too large", v.name));
        let bytes = u32::try_from(bytes).map_err(|_| too_large())?;
        let align = v.align as u32;
        let binding = match v.space {
            VarSpace::Shared => {
                let offset = match self.shared_of_bodies.get(&v.pos.start) {
                    Some(&offset) => offset,
                    None => self.place_shared(&v.name, bytes, align).ok_or_else(too_large)?,
                };
                self.shared_of_bodies.insert(v.pos.start, offset);
                Binding::Shared { offset }
            }
            // Arguments of a function call lie in local memory; see `lower::call`.
            VarSpace::Local | VarSpace::Param => {
                let offset = place(&mut self.local_bytes, bytes, align).ok_or_else(too_large)?;
                self.most_local_bytes = self.most_local_bytes.max(self.local_bytes);
                Binding::Local { offset: offset.into() }
            }
            _ => return Err((v.pos, "global variable inside of a kernel".into())),
        };
        self.bind(v.pos, &v.name, binding)
    }

    /// The address of a shared variable that is new; `None` where there is no room.
    pub(super) fn place_shared(&mut self, name: &str, bytes: u32, align: u32) -> Option<u64> {
        let offset = place(&mut self.shared_bytes, bytes, align)?;
        self.shared_variables.push(SharedVariable { name: name.to_owned(), offset, bytes });
        Some(u64::from(SHARED_BASE + offset))
    }

    pub(super) fn slot(&mut self, file: File) -> u32 {
        let n = &mut self.slots[file as usize];
        *n += 1;
        *n - 1
    }

    /// A slot that holds `init` from the start.
    pub(super) fn constant(&mut self, file: File, init: Init) -> u32 {
        if let Some(&slot) = self.constants.get(&(file, init)) {
            return slot;
        }
        let slot = self.slot(file);
        self.constants.insert((file, init), slot);
        self.inits.push((file, slot, init));
        slot
    }

    pub(super) fn lookup(&mut self, name: &str, pos: Span) -> Lowered<Binding> {
        if let Some(b) = self.scopes.iter().rev().find_map(|s| s.names.get(name)) {
            return Ok(b.clone());
        }
        if let Some(&offset) = self.module_globals.get(name) {
            return Ok(Binding::Global { offset });
        }
        if let Some(b) = self.shared_named.get(name) {
            return Ok(b.clone());
        }
        if let Some((&name, v)) = self.module_shared.get_key_value(name) {
            // A kernel pays only for the shared variables it names.
            let align = v.align as u32;
            let binding = match v.bytes {
                None => {
                    self.dynamic_align = self.dynamic_align.max(align).max(16);
                    self.dynamic_shared.get_or_insert_with(|| name.to_owned());
                    Binding::DynamicShared
                }
                Some(bytes) => {
                    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
                    let too_large = || (pos, format!("shared variable '{name}' is too large"));
                    Binding::Shared { offset: self.place_shared(name, bytes, align).ok_or_else(too_large)? }
                }
            };
            self.shared_named.insert(name, binding.clone());
            return Ok(binding);
        }
        Err((pos, format!("'{name}' is not declared")))
    }

    pub(super) fn push(&mut self, op: Op) {
        self.code.push(Inst { op, guard: self.guard, straight: 0 });
        self.sigs.push(vec![]);
        self.origins.push(self.origin);
    }

    /// Adds an arithmetic instruction. `sig` describes the first slots; the slots behind them are
    /// plain numbers.
    pub(super) fn push_alu(&mut self, f: AluFn, s: [u32; 6], sig: &[Sig]) {
        self.push_native(f, s, sig, Native::Function);
    }

    /// The same, where compiled code has instructions for what `f` does.
    pub(super) fn push_native(&mut self, f: AluFn, s: [u32; 6], sig: &[Sig], native: Native) {
        self.code.push(Inst { op: Op::Alu { f, s, native }, guard: self.guard, straight: 0 });
        self.sigs.push(sig.to_vec());
        self.origins.push(self.origin);
    }

    /// Adds an arithmetic instruction with these slots.
    pub(super) fn push_spec(&mut self, spec: &Spec, s: [u32; 6]) {
        self.push_native(spec.f, s, spec.sig, spec.native);
    }

    pub(super) fn error<T>(&self, message: impl Into<String>) -> Lowered<T> {
        Err((self.pos, message.into()))
    }

    /// Checks the number of operands.
    pub(super) fn count(
        &self,
        ops: &[(Operand, Span)],
        allowed: std::ops::RangeInclusive<usize>,
    ) -> Lowered<()> {
        if allowed.contains(&ops.len()) {
            return Ok(());
        }
        let (a, b) = (allowed.start(), allowed.end());
        let wanted = if a == b { a.to_string() } else { format!("{a} to {b}") };
        self.error(format!("{} operands given, {wanted} expected", ops.len()))
    }

    /// A source operand of a file and width.
    pub(super) fn source(&mut self, op: &(Operand, Span), file: File, bits: u32) -> Lowered<u32> {
        let pos = op.1;
        let mask = if bits >= 64 { u64::MAX } else { (1 << bits) - 1 };
        let value = match &op.0 {
            Operand::Int(v) => (*v as u64) & mask,
            Operand::F32(v) if bits == 32 => u64::from(*v),
            Operand::F64(v) if bits == 64 => *v,
            Operand::F64(v) if bits == 32 => u64::from((f64::from_bits(*v) as f32).to_bits()),
            Operand::F32(_) | Operand::F64(_) => {
                return Err((pos, format!("floating-point constant does not fit {bits} bits")));
            }
            Operand::Name(name) => return self.named_source(name, pos, file, bits),
            Operand::Offset { name, offset } => {
                return self.variable_address(name, *offset, pos, file, bits);
            }
            Operand::Element { name, index } => {
                let remedy = format!("write the offset in bytes, as in '{name}+20'");
                return Err((pos, format!("'{name}[{index}]' is not supported: {remedy}")));
            }
            Operand::Not(name) if file == File::Pred => {
                let p = self.named_source(name, pos, file, bits)?;
                return Ok(self.negated(p));
            }
            other => return Err((pos, format!("{} cannot stand here", describe(other)))),
        };
        Ok(self.constant(file, Init::Bits(value)))
    }

    pub(super) fn source_of<T: lanes::Lane>(&mut self, op: &(Operand, Span)) -> Lowered<u32> {
        self.source(op, T::FILE, T::BITS)
    }

    /// `!p` in a fresh register.
    pub(super) fn negated(&mut self, p: u32) -> u32 {
        let d = self.slot(File::Pred);
        let spec = lanes::op_pred(|a, _| !a).compiled_as(Native::Logic(Logic::Not));
        let guard = std::mem::replace(&mut self.guard, NO_GUARD);
        self.push_spec(&spec, [d, p, p, 0, 0, 0]);
        self.guard = guard;
        d
    }

    pub(super) fn named_source(&mut self, name: &str, pos: Span, file: File, bits: u32) -> Lowered<u32> {
        let shadowed = self.scopes.iter().any(|s| s.names.contains_key(name));
        if let (Some(init), false) = (special_register(name), shadowed) {
            if bits == 1 && name == "%is_explicit_cluster" {
                return Ok(self.constant(file, init));
            }
            // All others are 32 bits wide, but for the one that is 64.
            if file == File::Pred || bits < 32 || bits == 64 && name != "%gridid" {
                return Err((pos, format!("'{name}' is not a {bits}-bit register")));
            }
            return Ok(self.constant(file, init));
        }
        match self.lookup(name, pos)? {
            Binding::Reg { file: f, bits: b, slot } => {
                if (f, b) != (file, bits) {
                    return Err((pos, format!("'{name}' is a {b}-bit register, {bits} bits are needed")));
                }
                Ok(slot)
            }
            _ => self.variable_address(name, 0, pos, file, bits),
        }
    }

    /// The address so many bytes behind the start of a variable.
    fn variable_address(
        &mut self,
        name: &str,
        offset: i64,
        pos: Span,
        file: File,
        bits: u32,
    ) -> Lowered<u32> {
        let behind = |start: u64| start.wrapping_add_signed(offset);
        let binding = match self.lookup(name, pos) {
            Err(_) if special_register(name).is_some() => None,
            found => Some(found?),
        };
        let init = match binding {
            None | Some(Binding::Reg { .. }) => {
                return Err((pos, format!("'{name}' is a register, which has no offset here")));
            }
            Some(Binding::Label { .. } | Binding::Targets { .. }) => {
                return Err((pos, format!("label '{name}' cannot stand here")));
            }
            Some(Binding::Local { offset } | Binding::Param { offset }) => Init::Bits(behind(offset)),
            Some(Binding::Shared { offset }) => Init::SharedAddress(behind(offset)),
            Some(Binding::DynamicShared) => Init::DynamicShared(behind(0)),
            Some(Binding::Global { offset }) => Init::GlobalAddress(behind(offset)),
        };
        if bits == 64 || bits == 32 && !matches!(init, Init::GlobalAddress(_)) {
            return Ok(self.constant(file, init));
        }
        Err((pos, format!("the address of '{name}' does not fit {bits} bits")))
    }

    /// A destination register; `_` gives the sink.
    pub(super) fn dest(&mut self, op: &(Operand, Span), file: File, bits: u32) -> Lowered<u32> {
        match &op.0 {
            Operand::Sink => Ok(SINK),
            Operand::Name(name) => match self.lookup(name, op.1)? {
                Binding::Reg { file: f, bits: b, slot } if (f, b) == (file, bits) => Ok(slot),
                Binding::Reg { bits: b, .. } => {
                    Err((op.1, format!("'{name}' is a {b}-bit register, {bits} bits are needed")))
                }
                _ => Err((op.1, format!("'{name}' is not a register"))),
            },
            other => Err((op.1, format!("{} cannot be a destination", describe(other)))),
        }
    }

    pub(super) fn dest_of<T: lanes::Lane>(&mut self, op: &(Operand, Span)) -> Lowered<u32> {
        self.dest(op, T::FILE, T::BITS)
    }

    /// A register that may be wider than the type it holds (loads, stores, conversions): file,
    /// width, slot.
    pub(super) fn any_register(&mut self, op: &(Operand, Span)) -> Lowered<Option<(File, u32, u32)>> {
        match &op.0 {
            Operand::Name(name) if special_register(name).is_none() => match self.lookup(name, op.1)? {
                Binding::Reg { file, bits, slot } => Ok(Some((file, bits, slot))),
                _ => Ok(None),
            },
            _ => Ok(None),
        }
    }

    /// `[base + offset]`.
    pub(super) fn address(&mut self, op: &(Operand, Span)) -> Lowered<Addr> {
        let Operand::Address { base, offset } = &op.0 else {
            return Err((op.1, format!("{} stands where an address is needed", describe(&op.0))));
        };
        let (offset, pos) = (*offset, op.1);
        match &**base {
            Operand::Name(name) => match self.lookup(name, pos)? {
                Binding::Reg { file: File::R64, bits: 64, slot } => Ok(Addr { slot, wide: true, offset }),
                Binding::Reg { file: File::R32, bits: 32, slot } => Ok(Addr { slot, wide: false, offset }),
                Binding::Reg { .. } => Err((pos, format!("'{name}' cannot hold an address"))),
                _ => {
                    let slot = self.named_source(name, pos, File::R64, 64)?;
                    Ok(Addr { slot, wide: true, offset })
                }
            },
            Operand::Int(v) => {
                let slot = self.constant(File::R64, Init::Bits(*v as u64));
                Ok(Addr { slot, wide: true, offset })
            }
            other => Err((pos, format!("{} cannot be an address", describe(other)))),
        }
    }

    /// Emits an arithmetic instruction whose operands are in the order of its signature; `extra`
    /// fills the slots behind them.
    pub(super) fn alu(&mut self, spec: &Spec, ops: &[(Operand, Span)], extra: &[u32]) -> Lowered<()> {
        self.count(ops, spec.sig.len()..=spec.sig.len())?;
        let mut s = [SINK; 6];
        for (i, (sig, op)) in spec.sig.iter().zip(ops).enumerate() {
            s[i] = self.operand(op, sig)?;
        }
        let n = spec.sig.len();
        s[n..n + extra.len()].copy_from_slice(extra);
        self.push_spec(spec, s);
        Ok(())
    }

    /// Puts each of these instructions in front of the one with its number, and behind others given
    /// earlier. The numbers rise. Jumps to that instruction go to the first new one.
    pub(super) fn insert(&mut self, new: Vec<(usize, Inst)>) {
        if new.is_empty() {
            return;
        }
        let old = std::mem::take(&mut self.code).into_iter();
        let old = old.zip(std::mem::take(&mut self.sigs)).zip(std::mem::take(&mut self.origins));
        let mut new = new.into_iter().peekable();
        let mut places = vec![];
        for (at, ((inst, sig), origin)) in old.enumerate() {
            places.push(self.code.len() as u32);
            while let Some((_, inst)) = new.next_if(|(number, _)| *number == at) {
                self.code.push(inst);
                self.sigs.push(vec![]);
                self.origins.push(origin);
            }
            self.code.push(inst);
            self.sigs.push(sig);
            self.origins.push(origin);
        }
        for inst in &mut self.code {
            if let Op::Bra { target } = &mut inst.op {
                *target = places[*target as usize];
            }
        }
        self.tables.iter_mut().flatten().for_each(|target| *target = places[*target as usize]);
    }

    pub(super) fn operand(&mut self, op: &(Operand, Span), sig: &Sig) -> Lowered<u32> {
        match sig.role {
            Role::Def | Role::Update => self.dest(op, sig.file, sig.bits),
            Role::Use => self.source(op, sig.file, sig.bits),
        }
    }
}

pub(super) fn describe(op: &Operand) -> &'static str {
    match op {
        Operand::Name(_) => "a name",
        Operand::Offset { .. } | Operand::Element { .. } => "an address",
        Operand::Not(_) => "a negated predicate",
        Operand::Int(_) | Operand::F32(_) | Operand::F64(_) => "a constant",
        Operand::List(_) => "a list",
        Operand::Vector(_) => "a vector",
        Operand::Address { .. } => "an address",
        Operand::Tensor { .. } => "an address with coordinates",
        Operand::Pair(..) => "a pair of registers",
        Operand::Sink => "'_'",
    }
}

/// Special registers whose value is fixed when a warp starts.
pub(super) fn special_register(name: &str) -> Option<Init> {
    let name = name.strip_prefix('%')?;
    let (base, dim) = match name.split_once('.') {
        Some((b, "x")) => (b, Some(0)),
        Some((b, "y")) => (b, Some(1)),
        Some((b, "z")) => (b, Some(2)),
        Some(_) => return None,
        None => (name, None),
    };
    Some(Init::Special(match (base, dim) {
        ("tid", Some(d)) => Special::Tid(d),
        ("ntid", Some(d)) => Special::Ntid(d),
        ("ctaid", Some(d)) => Special::Ctaid(d),
        ("nctaid", Some(d)) => Special::Nctaid(d),
        ("clusterid", Some(d)) => Special::ClusterId(d),
        ("nclusterid", Some(d)) => Special::NClusterId(d),
        ("cluster_ctaid", Some(d)) => Special::ClusterCtaid(d),
        ("cluster_nctaid", Some(d)) => Special::ClusterNctaid(d),
        ("cluster_ctarank", None) => Special::ClusterRank,
        ("cluster_nctarank", None) => Special::ClusterSize,
        ("is_explicit_cluster", None) => Special::ExplicitCluster,
        ("laneid", None) => Special::LaneId,
        ("warpid", None) => Special::WarpId,
        ("nwarpid", None) => Special::NWarpId,
        ("smid", None) => Special::SmId,
        ("nsmid", None) => Special::NSmId,
        ("lanemask_lt", None) => Special::LaneMaskLt,
        ("lanemask_le", None) => Special::LaneMaskLe,
        ("lanemask_eq", None) => Special::LaneMaskEq,
        ("lanemask_ge", None) => Special::LaneMaskGe,
        ("lanemask_gt", None) => Special::LaneMaskGt,
        ("gridid", None) => Special::GridId,
        // The driver's registers. CUDA's cooperative groups use two of them.
        ("envreg1", None) => Special::WorkspaceHigh,
        ("envreg2", None) => Special::WorkspaceLow,
        (name, None) if driver_register(name) => Special::Zero,
        ("dynamic_smem_size", None) => Special::DynamicSmemSize,
        ("total_smem_size", None) => Special::TotalSmemSize,
        _ => return None,
    }))
}

/// Whether the name is one of `envreg0` to `envreg31`.
fn driver_register(name: &str) -> bool {
    let number = name.strip_prefix("envreg").and_then(|number| number.parse::<u8>().ok());
    number.is_some_and(|number| number < 32)
}

/// Special registers that change while a warp runs, with their width.
pub(super) fn timer_register(name: &str) -> Option<(Timer, u32)> {
    Some(match name {
        "%clock" => (Timer::Clock, 32),
        "%clock_hi" => (Timer::ClockHi, 32),
        "%clock64" => (Timer::Clock64, 64),
        "%globaltimer" => (Timer::Global, 64),
        "%globaltimer_lo" => (Timer::GlobalLo, 32),
        "%globaltimer_hi" => (Timer::GlobalHi, 32),
        _ => return None,
    })
}

/// Where a variable of `bytes` comes behind `used` others; `None` where they would be too many.
fn place(used: &mut u32, bytes: u32, align: u32) -> Option<u32> {
    let offset = used.checked_next_multiple_of(align.max(1))?;
    *used = offset.checked_add(bytes).filter(|end| *end < MAX_BYTES)?;
    Some(offset)
}
