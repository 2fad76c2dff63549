//! Parsed PTX to [`ir`](crate::ir): resolves names, lays out variables, decodes instructions.
//!
//! [`decode`](decode::decode) reads the opcode alone and returns an [`Emit`](decode::Emit), which
//! then takes the operands. [`supported_opcode`](crate::supported_opcode) is the first half by
//! itself.

mod accumulators;
mod allocate;
mod arith;
mod call;
mod cluster;
mod compare;
mod convert;
mod dataflow;
pub(crate) mod decode;
mod extended;
mod half_float;
mod integer;
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) mod live;
mod matrix;
mod mem;
mod multimem;
mod products;
pub(crate) mod slice;
mod state;
mod sync;
mod tensor;
mod types;
mod wgmma;
mod wmma;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use crate::fault::PtxError;
use crate::float_mode::IeeeMode;
use crate::ir::{File, GUARD_NOT, Init, Inst, NO_GUARD, Op, Origin, Special, count_straight_runs};
use crate::kernel::{Globals, Kernel, ParamInfo, UnwrittenRead};
use crate::module::Refusal;
use crate::ptx::lexer::error_at;
use crate::ptx::{self, Span, Stmt, VarSpace};
use allocate::Unwritten;
use state::{Binding, Lower, Lowered, MAX_LOCAL_BYTES, Patch, Scope};

/// The kernels of a file, and its `.global` and `.const` variables, if it has any.
pub(crate) struct Loaded {
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) globals: Option<Arc<Globals>>,
}

/// Lowers all kernels of a file.
pub(crate) fn module(text: &str, file: &ptx::File, module_id: u64) -> Result<Loaded, PtxError> {
    load(text, file, module_id, None)
}

/// Lowers the kernels of a file that are supported. Also returns all that stands in the way of the
/// others, each with its kernel.
pub(crate) fn supported(
    text: &str,
    file: &ptx::File,
    module_id: u64,
) -> Result<(Loaded, Vec<Refusal>), PtxError> {
    let mut refused = vec![];
    let loaded = load(text, file, module_id, Some(&mut refused))?;
    Ok((loaded, refused))
}

/// With `refused`, errors of kernels go there, and such kernels are left out.
fn load(
    text: &str,
    file: &ptx::File,
    module_id: u64,
    mut refused: Option<&mut Vec<Refusal>>,
) -> Result<Loaded, PtxError> {
    // Constants are converted.
    let _mode = IeeeMode::enter();
    let at = |(pos, message): (Span, String)| error_at(text, pos.line, pos.column, message);
    let mut shared = HashMap::new();
    let mut globals = HashMap::new();
    let mut variables = BTreeMap::new();
    let mut init = vec![];
    let mut addresses = vec![];
    let mut defined = HashSet::new();
    // Constants lie together behind the others, so that one range tells their addresses from those
    // of global memory.
    let mut constants = 0..0;
    let mut in_order: Vec<_> = file.variables.iter().collect();
    in_order.sort_by_key(|v| v.space == VarSpace::Const);
    for v in in_order {
        let is_definition = v.bytes.is_some() && !v.external;
        if is_definition && !defined.insert(v.name.as_str()) {
            return Err(at((v.pos, format!("variable '{}' is defined twice", v.name))));
        }
        match v.space {
            VarSpace::Shared => {
                // A definition takes the place of a declaration, wherever each is.
                let known = shared.entry(v.name.as_str()).or_insert(v);
                if is_definition {
                    *known = v;
                }
            }
            VarSpace::Global | VarSpace::Const => {
                let Some(bytes) = v.bytes.filter(|_| is_definition) else { continue };
                let offset = init.len().next_multiple_of(v.align.max(1));
                globals.insert(v.name.as_str(), offset as u64);
                variables.insert(v.name.clone(), (offset as u64, bytes as u64));
                init.resize(offset, 0);
                init.extend_from_slice(&v.init);
                init.resize(offset + bytes, 0);
                if v.space == VarSpace::Const {
                    let start = if constants.is_empty() { offset as u64 } else { constants.start };
                    constants = start..init.len() as u64;
                }
            }
            VarSpace::Local | VarSpace::Param => {
                return Err(at((v.pos, "local variable outside of a kernel".into())));
            }
        }
    }
    for v in file.variables.iter().filter(|v| matches!(v.space, VarSpace::Global | VarSpace::Const)) {
        let Some(place) = globals.get(v.name.as_str()) else {
            return Err(at((v.pos, format!("variable '{}' is defined elsewhere", v.name))));
        };
        for address in &v.addresses {
            let Some(target) = globals.get(address.variable.as_str()) else {
                let name = &address.variable;
                return Err(at((address.pos, format!("'{name}' is not a .global or .const variable here"))));
            };
            addresses.push((*place as usize + address.at, target.wrapping_add_signed(address.offset)));
        }
    }
    // A definition comes after the declaration of the same name, and takes its place.
    let functions: HashMap<_, _> = file.functions.iter().map(|f| (f.name.as_str(), f)).collect();
    let globals_init =
        (!init.is_empty()).then(|| Arc::new(Globals { module_id, init, addresses, variables }));
    let lines = Arc::new(file.lines.clone());
    let text_arc: Arc<str> = text.into();
    let mut kernels: Vec<Kernel> = vec![];
    for e in &file.entries {
        let mut l = Lower::new(&shared, &globals, constants.clone(), &functions);
        l.refused = refused.is_some().then(Vec::new);
        let mut params = vec![];
        let mut param_bytes = 0usize;
        for p in &e.params {
            let offset = param_bytes.next_multiple_of(p.align);
            param_bytes = offset + p.size;
            l.bind(Span::default(), &p.name, Binding::Param { offset: offset as u64 }).map_err(at)?;
            params.push(ParamInfo { name: p.name.clone(), offset, size: p.size, align: p.align });
        }
        l.body(&e.body).map_err(at)?;
        if let (Some(all), Some(errors)) = (&mut refused, l.refused.take_if(|errors| !errors.is_empty())) {
            let kernel = || e.name.clone();
            all.extend(errors.into_iter().map(|error| Refusal { kernel: kernel(), error: at(error) }));
            continue;
        }
        if l.most_local_bytes > MAX_LOCAL_BYTES {
            let (name, bytes) = (&e.name, l.most_local_bytes);
            let error = at((
                e.pos,
                format!(
                    "kernel '{name}' has {bytes} bytes of local memory, and a thread has at most \
                     {MAX_LOCAL_BYTES}: make its .local variables smaller, or those of functions that it calls"
                ),
            ));
            let Some(all) = &mut refused else { return Err(error) };
            all.push(Refusal { kernel: name.clone(), error });
            continue;
        }
        accumulators::guard(&mut l);
        let Lower { code, sigs, tables, operands, slots, inits, .. } = &mut l;
        let allocated = allocate::allocate(code, sigs, tables, operands, slots, inits);
        let unwritten = l.report_unwritten(allocated.unwritten);
        count_straight_runs(&mut l.code);
        let reads_workspace = l.inits.iter().any(|(_, _, init)| {
            matches!(init, Init::Special(Special::WorkspaceLow | Special::WorkspaceHigh))
        });
        kernels.push(Kernel {
            name: e.name.clone(),
            params,
            param_bytes,
            static_shared: l.shared_bytes.next_multiple_of(l.dynamic_align),
            shared_variables: l.shared_variables,
            dynamic_shared: l.dynamic_shared,
            max_threads: e.max_threads,
            required_block: e.required_block,
            required_cluster: e.required_cluster,
            explicit_cluster: e.explicit_cluster,
            max_cluster: e.max_cluster,
            code: l.code,
            sigs: l.sigs,
            compiled: Default::default(),
            origins: l.origins,
            tables: l.tables,
            operands: l.operands,
            register_checks: l.register_checks,
            slots: l.slots,
            inits: l.inits,
            alive_at_start: allocated.alive,
            unwritten,
            local_bytes: l.most_local_bytes.next_multiple_of(16),
            reads_workspace,
            globals: globals_init.clone(),
            lines: lines.clone(),
            text: text_arc.clone(),
            executed: OnceLock::new(),
        });
    }
    Ok(Loaded { kernels, globals: globals_init })
}

impl Lower<'_> {
    fn body(&mut self, body: &[Stmt]) -> Lowered<()> {
        self.statements(body)?;
        // Falling off the end is a return; it also keeps every branch target inside of the code.
        self.guard = NO_GUARD;
        self.push(Op::Exit);
        let closed = self.close_scope();
        self.unless_noted(closed)
    }

    /// Puts a report in front of each instruction that reads registers which nothing can have
    /// written. Returns the reads, by the number of the report.
    fn report_unwritten(&mut self, reads: Vec<Unwritten>) -> Vec<UnwrittenRead> {
        let mut found: Vec<(usize, Inst, Vec<String>)> = vec![];
        for Unwritten { at, file, slot, guards } in reads {
            // A register without a name is the lowering's own, copied from registers that were read.
            let Some(name) = self.name_of(file, slot) else { continue };
            if found.last().is_none_or(|last| last.0 != at) {
                let op = Op::UnwrittenRegisters(found.len() as u32);
                found.push((at, Inst { op, ..self.code[at] }, vec![]));
            }
            let Some((_, report, names)) = found.last_mut() else { continue };
            if guards {
                report.guard = NO_GUARD;
            }
            if !names.contains(&name) {
                names.push(name);
            }
        }
        self.insert(found.iter().map(|&(at, report, _)| (at, report)).collect());
        // Each report moves its instruction by one.
        let moved = |(number, (at, _, registers))| UnwrittenRead { pc: at as u32 + number, registers };
        (0..).zip(found).map(moved).collect()
    }

    fn statements(&mut self, body: &[Stmt]) -> Lowered<()> {
        for stmt in body {
            let done = self.statement(stmt);
            self.unless_noted(done)?;
        }
        Ok(())
    }

    fn statement(&mut self, stmt: &Stmt) -> Lowered<()> {
        match stmt {
            Stmt::Open => self.scopes.push(Scope::default()),
            Stmt::Close => self.close_scope()?,
            Stmt::Reg { pos, ty, name, count } => self.registers(*pos, ty, name, *count)?,
            Stmt::Var(v) => self.variable(v)?,
            Stmt::Label { pos, name } => {
                let pc = self.code.len() as u32;
                self.bind(*pos, name, Binding::Label { pc })?;
            }
            Stmt::Targets { pos, name, labels } => {
                self.count_targets(*pos, name, labels.len())?;
                let table = self.tables.len() as u32;
                self.tables.push(vec![0; labels.len()]);
                self.bind(*pos, name, Binding::Targets { table })?;
                for (i, (label, pos)) in labels.iter().enumerate() {
                    self.fixup(label, *pos, Patch::Table(table, i));
                }
            }
            Stmt::Inst(inst) => self.instruction(inst)?,
        }
        Ok(())
    }

    fn instruction(&mut self, inst: &ptx::Instruction) -> Lowered<()> {
        self.pos = inst.pos;
        self.origin = Origin {
            ptx_line: inst.pos.line as u32,
            ptx_byte: inst.pos.start,
            source: inst.source.unwrap_or_default(),
        };
        self.guard = NO_GUARD;
        if let Some((name, negated)) = &inst.guard {
            match self.lookup(name, inst.pos)? {
                Binding::Reg { file: File::Pred, slot, .. } => {
                    self.guard = slot | if *negated { GUARD_NOT } else { 0 };
                }
                _ => return Err((inst.pos, format!("'{name}' is not a predicate register"))),
            }
        }
        let emit = decode::decode(&inst.opcode).map_err(|m| (inst.pos, m))?;
        emit(self, &inst.operands)
    }
}
