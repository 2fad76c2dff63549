//! Divergence of a warp's lanes, by the origins of values: a branch parts the lanes if its guard
//! differs between them.
//!
//! A read at an address that all lanes share counts as the same in all lanes, though memory may
//! change between two lanes' reads. So does a thread's number without its lowest five bits, where
//! blocks have one dimension, also behind the sum with a multiple of 32 that all lanes share. So
//! does a register that lanes set in different places, if all of them copy the same thing. In
//! doubt a value differs. The tests are those of the rule on warp
//! collectives, the user of this module.

use std::collections::HashMap;

use epoxide_vgpu::ptx::{Entry, Flow, Instruction, Operand, Scopes, Stmt};

/// How a value differs between the lanes of a warp.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Value {
    /// The same in all lanes.
    #[default]
    Uniform,
    /// The sum of a multiple of 32 that all lanes share and the lane, times two to this power: the
    /// thread's number in a block of one dimension, or in the grid.
    Thread(u64),
    /// The value may differ in each lane.
    Differs,
}

impl Value {
    fn join(self, other: Value) -> Value {
        if self == other { self } else { Value::Differs }
    }
}

/// Values that differ between the lanes of a kernel's warps, and blocks in which lanes are apart.
pub struct Lanes<'a> {
    body: &'a [Stmt],
    uses: Vec<Uses>,
    /// Value of each definition.
    values: Vec<Value>,
    /// The lowest bits of each definition that are known to be zero.
    zeros: Vec<u32>,
    block_of: Vec<usize>,
    /// The statement that is the nearest branch to part the lanes, by block.
    apart: Vec<Option<usize>>,
    /// The branches that part lanes.
    parting: Vec<Parting>,
    /// The register of each definition.
    register_of: Vec<usize>,
    /// Whether blocks have one dimension.
    flat: bool,
}

/// A branch that parts lanes.
struct Parting {
    /// The block that it ends.
    block: usize,
    /// The block where all ways meet again, if there is one.
    meeting: Option<usize>,
    /// Whether a block lies on a way from here to there.
    between: Vec<bool>,
}

/// Definitions of registers that one statement reads and writes.
#[derive(Default)]
struct Uses {
    guard: Vec<usize>,
    written: Vec<usize>,
    /// The operands that are not written.
    read: Vec<Read>,
}

/// Contents of an operand that is read.
#[derive(Default, PartialEq, Eq)]
struct Read {
    /// The definitions that reach it.
    definitions: Vec<usize>,
    /// The special register that it is.
    special: Option<Value>,
    number: Option<u64>,
    /// Whether it is a register by itself, neither an address nor a list.
    plain: bool,
}

impl<'a> Lanes<'a> {
    /// Works it out for a kernel.
    pub fn of(entry: &'a Entry) -> Self {
        let flow = Flow::of(&entry.body);
        let meetings = flow.post_dominators();
        let (uses, register_of) = uses(&entry.body, &flow);
        let mut block_of = vec![0; entry.body.len()];
        for (block, statements) in flow.blocks.iter().enumerate() {
            block_of[statements.clone()].fill(block);
        }
        let mut lanes = Self {
            body: &entry.body,
            uses,
            values: vec![Value::Uniform; register_of.len()],
            zeros: vec![u64::BITS; register_of.len()],
            block_of,
            apart: vec![None; flow.blocks.len()],
            parting: Vec::new(),
            register_of,
            flat: entry.max_block.is_some_and(|[_, y, z]| y == 1 && z == 1),
        };
        let mut changed = true;
        // Numbers of zeros only fall, so the loop terminates.
        while std::mem::take(&mut changed) {
            for index in 0..lanes.body.len() {
                let zeros = lanes.zeros_of_result(index);
                for definition in &lanes.uses[index].written {
                    changed |= zeros < lanes.zeros[*definition];
                    lanes.zeros[*definition] = zeros.min(lanes.zeros[*definition]);
                }
            }
        }
        let mut parted = vec![false; flow.blocks.len()];
        changed = true;
        // Values only change to differing and blocks to divergent, so the loop terminates.
        while std::mem::take(&mut changed) {
            for index in 0..lanes.body.len() {
                let value = lanes.result(index, &flow);
                for definition in &lanes.uses[index].written {
                    changed |= value > lanes.values[*definition];
                    lanes.values[*definition] = value.max(lanes.values[*definition]);
                }
            }
            for (block, statements) in flow.blocks.iter().enumerate() {
                let last = statements.end - 1;
                let ways = flow.successors[block].len() + usize::from(flow.exits[block]);
                if parted[block] || ways < 2 || lanes.of_branch(last) == Value::Uniform {
                    continue;
                }
                (parted[block], changed) = (true, true);
                let mut between = vec![false; flow.blocks.len()];
                for decided in flow.decided_by(block, meetings[block]) {
                    // The last branch in the text is usually the innermost.
                    lanes.apart[decided] = lanes.apart[decided].max(Some(last));
                    between[decided] = true;
                }
                lanes.parting.push(Parting { block, meeting: meetings[block], between });
            }
        }
        lanes
    }

    /// The branch at which the lanes that execute the statement of this index in the body diverged.
    pub fn apart_since(&self, index: usize) -> Option<&'a Instruction> {
        self.apart[self.block_of[index]].and_then(|branch| instruction(&self.body[branch]))
    }

    /// Whether the guard of a statement lets some lanes by and others not.
    pub fn guard_differs(&self, index: usize) -> bool {
        self.of_guard(index) != Value::Uniform
    }

    fn of_guard(&self, index: usize) -> Value {
        self.join(&self.uses[index].guard, None)
    }

    /// Whether a branch is divergent: by its guard, or by the index of an indexed branch.
    fn of_branch(&self, index: usize) -> Value {
        let indexed = instruction(&self.body[index]).is_some_and(|inst| inst.is("brx"));
        let operands =
            self.uses[index].read.iter().filter(|_| indexed).map(|operand| self.of_operand(operand));
        operands.fold(self.of_guard(index), Value::join)
    }

    fn of_operand(&self, operand: &Read) -> Value {
        self.join(&operand.definitions, operand.special)
    }

    fn join(&self, definitions: &[usize], special: Option<Value>) -> Value {
        let values = definitions.iter().map(|definition| self.values[*definition]);
        special.into_iter().chain(values).reduce(Value::join).unwrap_or_default()
    }

    /// The operand of a statement that does nothing but copy it to a register.
    fn copied(&self, index: usize) -> Option<&Read> {
        let inst = instruction(&self.body[index])?;
        let uses = &self.uses[index];
        let plain = inst.is("mov") && inst.guard.is_none() && uses.written.len() == 1;
        uses.read.first().filter(|_| plain && uses.read.len() == 1)
    }

    /// Whether a statement on a divergent path copies the value that all lanes copy to its register
    /// before they reconverge. The value is a number, or a register that was set before they
    /// diverged. The compiler puts such copies on each path to a join.
    fn is_copied_everywhere(&self, index: usize, flow: &Flow) -> bool {
        let Some(source) = self.copied(index) else { return false };
        let set_before = |definition: usize, parting: &Parting| {
            let by = self.uses.iter().position(|uses| uses.written.contains(&definition));
            by.is_some_and(|by| !parting.between[self.block_of[by]])
        };
        let register = self.register_of[self.uses[index].written[0]];
        let mut around = self.parting.iter().filter(|parting| parting.between[self.block_of[index]]);
        around.all(|parting| {
            let is_same = match source.definitions[..] {
                [] => source.number.is_some(),
                [definition] => self.values[definition] == Value::Uniform && set_before(definition, parting),
                _ => false,
            };
            is_same && self.all_ways_copy(source, register, parting, flow)
        })
    }

    /// Whether the last write to `register` on every path from a branch to its join, or before the
    /// branch, copies `source`.
    fn all_ways_copy(&self, source: &Read, register: usize, parting: &Parting, flow: &Flow) -> bool {
        // Whether a block leaves the copy in the register; `None` where it does not write it.
        let leaves = |block: usize| {
            let writes = |index: &usize| {
                self.uses[*index].written.iter().any(|written| self.register_of[*written] == register)
            };
            let last = flow.blocks[block].clone().rfind(writes)?;
            Some(self.copied(last) == Some(source))
        };
        let is_copied_before = || {
            let mut seen = vec![false; flow.blocks.len()];
            let mut open = vec![parting.block];
            while let Some(block) = open.pop() {
                if std::mem::replace(&mut seen[block], true) {
                    continue;
                }
                match leaves(block) {
                    Some(true) => {}
                    None if block != 0 => {
                        let before = |other: &usize| flow.successors[*other].contains(&block);
                        open.extend((0..flow.blocks.len()).filter(before));
                    }
                    _ => return false,
                }
            }
            true
        };
        let start = is_copied_before();
        let mut seen = vec![[false; 2]; flow.blocks.len()];
        let mut open: Vec<(usize, bool)> = Vec::new();
        open.extend(flow.successors[parting.block].iter().map(|&next| (next, start)));
        while let Some((block, holds)) = open.pop() {
            if Some(block) == parting.meeting {
                if !holds {
                    return false;
                }
            } else if !std::mem::replace(&mut seen[block][usize::from(holds)], true) {
                let holds = leaves(block).unwrap_or(holds);
                open.extend(flow.successors[block].iter().map(|&next| (next, holds)));
            }
        }
        true
    }

    /// The lowest bits of an operand that are known to be zero.
    fn zeros_of(&self, operand: &Read) -> u32 {
        if let Some(number) = operand.number {
            return number.trailing_zeros();
        }
        let zeros = operand.definitions.iter().map(|definition| self.zeros[*definition]);
        zeros.min().filter(|_| operand.plain && operand.special.is_none()).unwrap_or(0)
    }

    /// The lowest bits of what a statement writes that are known to be zero.
    fn zeros_of_result(&self, index: usize) -> u32 {
        let inst = instruction(&self.body[index]).filter(|inst| is_of_integers(inst));
        let read = &self.uses[index].read;
        let zeros = |at: usize| read.get(at).map_or(0, |operand| self.zeros_of(operand));
        match inst.map(Instruction::base) {
            Some("mov" | "cvt") if read.len() == 1 => zeros(0),
            Some("add" | "sub" | "or" | "xor" | "selp") => zeros(0).min(zeros(1)),
            Some("and") => zeros(0).max(zeros(1)),
            Some("mul") => zeros(0) + zeros(1),
            Some("mad") => (zeros(0) + zeros(1)).min(zeros(2)),
            Some("shl") => {
                let bits = read.get(1).and_then(|bits| bits.number).unwrap_or(0);
                zeros(0) + u32::try_from(bits).unwrap_or(u64::BITS).min(u64::BITS)
            }
            _ => 0,
        }
        .min(u64::BITS)
    }

    /// The value of an instruction one of whose operands is [`Value::Thread`], which has this index
    /// among those that are read. All lanes share the others.
    fn result_of_thread(&self, inst: &Instruction, read: &[Read], at: usize, power: u64) -> Value {
        let number = |at: usize| read.get(at).and_then(|operand| operand.number);
        let is = |names: &[&str]| names.contains(&inst.base());
        // Whether what is added to the lane's bits has none of them.
        let is_whole = |zeros: u32| u64::from(zeros) >= 5 + power;
        let zeros = |at: usize| self.zeros_of(&read[at]);
        let stays = match (at, read.len()) {
            (0, 1) => is(&["mov", "cvt"]),
            (_, 2) if is(&["add", "or", "xor"]) => is_whole(zeros(1 - at)),
            (0, 2) if is(&["sub"]) => is_whole(zeros(1)),
            (2, 3) if is(&["mad"]) => is_whole(zeros(0) + zeros(1)),
            _ => false,
        };
        if stays && is_of_integers(inst) {
            return Value::Thread(power);
        }
        let whole = |bound: Option<u64>| bound.is_some_and(|bound| bound % (32 << power) == 0);
        let same = match number(1) {
            _ if at != 0 => false,
            // The bits of the lane stay, those above are the same in all lanes.
            Some(bits) if inst.is("shl") && power + bits <= 20 => return Value::Thread(power + bits),
            Some(bits) if inst.is("shr") => bits >= 5 + power,
            Some(mask) if inst.is("and") => mask % (32 << power) == 0,
            bound if inst.is("setp") && read.len() == 2 => {
                let below = ["lt", "ge", "lo", "hs"].iter().any(|name| inst.has(name));
                let upto = ["le", "gt", "ls", "hi"].iter().any(|name| inst.has(name));
                below && is_whole(zeros(1)) || upto && whole(bound.map(|bound| bound.wrapping_add(1)))
            }
            _ => false,
        };
        if same { Value::Uniform } else { Value::Differs }
    }

    /// The value that a statement writes.
    fn result(&self, index: usize, flow: &Flow) -> Value {
        let Some(inst) = instruction(&self.body[index]) else { return Value::Uniform };
        let uses = &self.uses[index];
        // Under a guard that differs, some lanes keep the old value.
        if self.of_guard(index) != Value::Uniform {
            return Value::Differs;
        }
        // On a divergent path some lanes may have a value from another place, or from another
        // iteration.
        if self.apart_since(index).is_some() {
            return if self.is_copied_everywhere(index, flow) { Value::Uniform } else { Value::Differs };
        }
        let operands: Vec<Value> = uses.read.iter().map(|operand| self.of_operand(operand)).collect();
        let is = |names: &[&str]| names.contains(&inst.base());
        let all_uniform = operands.iter().all(|value| *value == Value::Uniform);

        if is(&["vote", "redux"]) || inst.is("match") && inst.has("all") {
            return Value::Uniform;
        }
        // Votes of the whole block.
        if inst.is("barrier") && inst.has("red") {
            return Value::Uniform;
        }
        if inst.is("shfl") {
            let broadcast = inst.has("idx") && operands.get(1) == Some(&Value::Uniform);
            return if broadcast { Value::Uniform } else { Value::Differs };
        }
        // The result depends on the lane: lanes take turns, have copies, or get different answers.
        let own = is(&["atom", "elect", "activemask", "match"])
            || inst.is("mbarrier")
            || inst.is("ld") && inst.has("local");
        if own {
            return Value::Differs;
        }
        if all_uniform {
            return Value::Uniform;
        }
        let differing = operands.iter().enumerate().filter(|(_, value)| **value != Value::Uniform);
        match differing.collect::<Vec<_>>()[..] {
            [(at, &Value::Thread(power))] if self.flat => self.result_of_thread(inst, &uses.read, at, power),
            _ => Value::Differs,
        }
    }
}

/// Whether an instruction computes with integers or bits alone, without saturation.
fn is_of_integers(inst: &Instruction) -> bool {
    let is_integer = |name: &str| {
        let bits = name.strip_prefix(['u', 's', 'b']);
        bits.is_some_and(|bits| ["8", "16", "32", "64"].contains(&bits))
    };
    inst.opcode.split('.').skip(1).all(|name| ["lo", "wide"].contains(&name) || is_integer(name))
}

fn instruction(stmt: &Stmt) -> Option<&Instruction> {
    if let Stmt::Inst(inst) = stmt { Some(inst) } else { None }
}

/// Reads and writes of every statement, and the register of each definition. A register is not the
/// same value everywhere: each use has the definitions that reach it.
fn uses(body: &[Stmt], flow: &Flow) -> (Vec<Uses>, Vec<usize>) {
    let named = registers(body);
    // All definitions, by register; each is a number.
    let mut of_register: HashMap<usize, Vec<usize>> = HashMap::new();
    let mut register_of = Vec::new();
    let mut all: Vec<Uses> = Vec::with_capacity(body.len());
    for names in &named {
        let written = register_of.len()..register_of.len() + names.written.len();
        register_of.extend(&names.written);
        for (register, definition) in names.written.iter().zip(written.clone()) {
            of_register.entry(*register).or_default().push(definition);
        }
        all.push(Uses { written: written.collect(), ..Uses::default() });
    }
    // The definitions behind a statement.
    let pass = |reaching: &mut Vec<bool>, index: usize, all: &[Uses]| {
        for (register, definition) in named[index].written.iter().zip(&all[index].written) {
            // Under a guard the old value may stay.
            if named[index].guard.is_none() {
                of_register[register].iter().for_each(|other| reaching[*other] = false);
            }
            reaching[*definition] = true;
        }
    };
    let mut at_start = vec![vec![false; register_of.len()]; flow.blocks.len()];
    let mut open: Vec<usize> = (0..flow.blocks.len()).rev().collect();
    while let Some(block) = open.pop() {
        let mut reaching = at_start[block].clone();
        flow.blocks[block].clone().for_each(|index| pass(&mut reaching, index, &all));
        for &successor in &flow.successors[block] {
            let known = &mut at_start[successor];
            if reaching.iter().zip(&*known).any(|(here, there)| *here && !there) {
                known.iter_mut().zip(&reaching).for_each(|(there, here)| *there |= here);
                open.push(successor);
            }
        }
    }
    for (statements, mut reaching) in flow.blocks.iter().zip(at_start) {
        for index in statements.clone() {
            let reached = |registers: &[usize]| -> Vec<usize> {
                let definitions = registers.iter().filter_map(|register| of_register.get(register)).flatten();
                definitions.copied().filter(|definition| reaching[*definition]).collect()
            };
            let names = &named[index];
            let read = names.read.iter().map(|(operand, registers)| Read {
                definitions: reached(registers),
                special: operand.names().into_iter().find_map(special),
                // A negative one by its bits.
                plain: matches!(operand, Operand::Name(_)),
                number: if let Operand::Int(number) = operand { Some(*number as u64) } else { None },
            });
            let (guard, read) = (reached(names.guard.as_slice()), read.collect());
            (all[index].guard, all[index].read) = (guard, read);
            pass(&mut reaching, index, &all);
        }
    }
    (all, register_of)
}

/// The registers of one statement, as numbers.
#[derive(Default)]
struct Names<'a> {
    guard: Option<usize>,
    written: Vec<usize>,
    /// The operands that are not written, with their registers.
    read: Vec<(&'a Operand, Vec<usize>)>,
}

/// The registers of every statement. A name that a scope declares is another register in each
/// scope.
fn registers<'a>(body: &'a [Stmt]) -> Vec<Names<'a>> {
    let scopes = Scopes::of(body);
    let mut numbers: HashMap<(usize, &'a str), usize> = HashMap::new();
    for (stmt, &scope) in body.iter().zip(&scopes.at) {
        if let Stmt::Reg { name, count: None, .. } = stmt {
            let next = numbers.len();
            numbers.insert((scope, name), next);
        }
    }
    let of_statement = |(index, stmt)| {
        let Some(inst) = instruction(stmt) else { return Names::default() };
        let mut number = |name: &'a str| {
            scopes.find(index, name, &numbers).copied().unwrap_or_else(|| {
                let next = numbers.len();
                numbers.insert((0, name), next);
                next
            })
        };
        let guard = inst.guard.as_ref().map(|(name, _)| number(name));
        let mut registers = |operand: &'a Operand| -> Vec<usize> {
            let names = operand.names().into_iter().filter(|name| special(name).is_none());
            names.map(&mut number).collect()
        };
        let written = inst.destination().map_or_else(Vec::new, &mut registers);
        let read = inst.operands.iter().skip(usize::from(inst.destination().is_some()));
        let read = read.map(|(operand, _)| (operand, registers(operand))).collect();
        Names { guard, written, read }
    };
    body.iter().enumerate().map(of_statement).collect()
}

/// How a special register differs between lanes; `None` for what is none. Lanes may read a clock
/// one after the other.
fn special(word: &str) -> Option<Value> {
    const DIFFER: [&str; 5] = ["%tid", "%laneid", "%lanemask", "%clock", "%globaltimer"];
    const SAME: [&str; 11] = [
        "%ctaid",
        "%ntid",
        "%nctaid",
        "%warpid",
        "%nwarpid",
        "%smid",
        "%nsmid",
        "%gridid",
        "%envreg",
        "%dynamic_smem",
        "%total_smem",
    ];
    if word == "%tid.x" {
        return Some(Value::Thread(0));
    }
    let is = |names: &[&str]| names.iter().any(|name| word.starts_with(name));
    if is(&DIFFER) { Some(Value::Differs) } else { is(&SAME).then_some(Value::Uniform) }
}
