//! Calls of device functions: the body is put in the place of the call.
//!
//! The interpreter then needs no stack, and lanes that return at different places meet again as
//! after any branch. Arguments lie in local memory, in the caller's `.param` variables; the
//! function uses the same bytes under its own names. Recursion cannot be supported this way, and a
//! call through a pointer is a fault of the lanes that execute it. Lanes of a warp that call the
//! same function from different places meet at its shuffles, votes, matches, reductions, elections
//! and barriers of the warp, as at copies of one instruction. At matrix products they do not meet.

use super::state::{self, Binding, Call, Lower, Lowered, describe};
use crate::ir::{Access, Addr, File, GUARD_NOT, Init, NO_GUARD, Op, SINK, Scope, Sem, Space};
use crate::ptx::{Operand, Param, Span};

/// Most statements that calls put in their places in one kernel, and most instructions that they
/// become.
const MAX_INLINED: usize = 1 << 18;
/// Most functions that are inlined in each other. The lowering recurses as deep.
const MAX_DEPTH: usize = 256;

/// `call {(results),} name {, (arguments)}`
pub(super) fn call(l: &mut Lower, ops: &[(Operand, Span)]) -> Lowered<()> {
    l.count(ops, 1..=4)?;
    let empty = (Operand::List(vec![]), l.pos);
    let (results, rest) = match &ops[0].0 {
        Operand::List(_) => (&ops[0], &ops[1..]),
        _ => (&empty, ops),
    };
    if let Some((Operand::Name(name), pos)) = rest.first()
        && rest.len() >= 2
        && matches!(l.lookup(name, *pos), Ok(Binding::Reg { .. }))
    {
        l.push(Op::CallThroughPointer);
        return Ok(());
    }
    let (Some((Operand::Name(name), pos)), true) = (rest.first(), rest.len() <= 2) else {
        return l.error("a call needs the name of a function");
    };
    let (pos, functions) = (*pos, l.functions);
    let Some(f) = functions.get(name.as_str()) else {
        return Err((pos, format!("'{name}' is not a function of this module")));
    };
    let Some(body) = &f.body else {
        if name == "__assertfail" {
            l.push(Op::Trap);
            return Ok(());
        }
        if name == "vprintf" {
            return print(l, results, rest.get(1).unwrap_or(&empty));
        }
        return Err((pos, format!("function '{name}' is defined elsewhere")));
    };
    if l.calls.iter().any(|c| c.name == *name) {
        return Err((pos, format!("'{name}' calls itself, which is not supported")));
    }
    if l.calls.len() == MAX_DEPTH {
        let rule = format!("calls are inlined, at most {MAX_DEPTH} functions deep");
        return Err((pos, format!("the call of '{name}' is nested too deeply: {rule}")));
    }
    // Functions that call others twice grow without bounds. The call itself counts too, since a
    // body may be empty.
    l.inlined += body.len() + 1;
    if l.inlined.max(l.code.len()) > MAX_INLINED {
        let rule = format!("calls are inlined, up to {MAX_INLINED} statements and instructions");
        return Err((pos, format!("the call of '{name}' makes the kernel too large: {rule}")));
    }

    let mut inside = state::Scope::default();
    bind(l, &mut inside, results, &f.results)?;
    bind(l, &mut inside, rest.get(1).unwrap_or(&empty), &f.params)?;
    // Lanes that do not take part go around the body.
    let around = (l.guard != NO_GUARD).then_some(l.code.len());
    if around.is_some() {
        l.guard ^= GUARD_NOT;
        l.push(Op::Bra { target: 0 });
    }
    let outside = std::mem::replace(&mut l.scopes, vec![inside]);
    let local_bytes = l.local_bytes;
    l.calls.push(Call { name: name.clone(), returns: vec![] });
    l.statements(body)?;
    let closed = l.close_scope();
    l.unless_noted(closed)?;
    l.scopes = outside;
    l.local_bytes = local_bytes;
    let end = l.code.len() as u32;
    let returns = l.calls.pop().map_or(vec![], |c| c.returns);
    for at in returns.into_iter().chain(around) {
        l.code[at].op = Op::Bra { target: end };
    }
    Ok(())
}

/// `call (result), vprintf, (format, arguments)`: the only function of the system besides
/// `__assertfail`.
fn print(l: &mut Lower, results: &(Operand, Span), arguments: &(Operand, Span)) -> Lowered<()> {
    let given = |op: &(Operand, Span), wanted: usize| match &op.0 {
        Operand::List(list) if list.len() == wanted => Ok(list.clone()),
        _ => Err((op.1, format!("vprintf takes 2 addresses and returns 1 value; {wanted} expected here"))),
    };
    let (results, arguments) = (given(results, 1)?, given(arguments, 2)?);
    let mut variable = |name: &Operand| {
        let Operand::Name(name) = name else {
            return Err((l.pos, format!("{} cannot be passed, only a .param variable", describe(name))));
        };
        match l.lookup(name, l.pos)? {
            Binding::Local { offset } => Ok(offset),
            _ => Err((l.pos, format!("'{name}' is not a .param variable"))),
        }
    };
    let result = variable(&results[0])?;
    let addresses = [variable(&arguments[0])?, variable(&arguments[1])?];
    let access = |l: &mut Lower, offset: u64, bytes: u8, wide: bool, reg: u32| Access {
        space: Space::Local,
        sem: Sem::Weak,
        scope: Scope::Cta,
        addr: Addr { slot: l.constant(File::R64, Init::Bits(offset)), wide: true, offset: 0 },
        bytes,
        n: 1,
        wide,
        signed: false,
        whole: false,
        read_only: false,
        regs: [reg, SINK, SINK, SINK],
    };
    let [format, arguments] = addresses.map(|offset| {
        let slot = l.slot(File::R64);
        let load = access(l, offset, 8, true, slot);
        l.push(Op::Ld(load));
        slot
    });
    let d = l.slot(File::R32);
    l.push(Op::Print { format, arguments, d });
    let store = access(l, result, 4, false, d);
    l.push(Op::St(store));
    Ok(())
}

/// `ret`: the end of the kernel, or of the function that is being put in place.
pub(super) fn ret(l: &mut Lower, ops: &[(Operand, Span)]) -> Lowered<()> {
    l.count(ops, 0..=0)?;
    let at = l.code.len();
    match l.calls.last_mut() {
        Some(call) => {
            call.returns.push(at);
            l.push(Op::Bra { target: 0 });
        }
        None => l.push(Op::Exit),
    }
    Ok(())
}

/// Gives the caller's arguments the function's parameter names.
fn bind(l: &mut Lower, scope: &mut state::Scope, given: &(Operand, Span), wanted: &[Param]) -> Lowered<()> {
    let pos = given.1;
    let Operand::List(given) = &given.0 else {
        return Err((pos, format!("{} stands where a list is needed", describe(&given.0))));
    };
    if given.len() != wanted.len() {
        return Err((pos, format!("{} values are passed, {} expected", given.len(), wanted.len())));
    }
    for (given, param) in given.iter().zip(wanted) {
        let Operand::Name(name) = given else {
            return Err((pos, format!("{} cannot be passed, only a .param variable", describe(given))));
        };
        let binding = l.lookup(name, pos)?;
        if !matches!(binding, Binding::Local { .. }) {
            return Err((pos, format!("'{name}' is not a .param variable")));
        }
        scope.names.insert(param.name.clone(), binding);
    }
    Ok(())
}

impl Lower<'_> {
    /// Whether a `.param` address refers to an argument of a function call, not to a parameter of
    /// the kernel. The kernel's parameters cannot be named inside of a function, so a pointer there
    /// is to the function's own.
    pub(super) fn passes_arguments(&mut self, address: &Operand) -> bool {
        let Operand::Address { base, .. } = address else { return false };
        let Operand::Name(name) = &**base else { return false };
        match self.lookup(name, self.pos) {
            Ok(Binding::Local { .. }) => true,
            Ok(Binding::Reg { .. }) => !self.calls.is_empty(),
            _ => false,
        }
    }
}
