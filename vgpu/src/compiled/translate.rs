//! Translates the arithmetic and the branches of a kernel.
//!
//! A block of arithmetic is computed for one strip of lanes after the other, because no lane reads
//! another lane's values. A strip is as many lanes as a vector register has parts of 32 bits: 16,
//! or 8 with AVX2. So a value of 32 bits is one vector register, one of 64 bits is two, and a
//! predicate is a bit for each lane. Values stay in registers within a block; what is alive behind
//! it is stored at its end. Registers 11 to 15 and the mask registers 1 to 3 are scratch.

use std::collections::HashMap;

use super::assembler::{
    Assembler, Label, Mem, R8, R9, R10, R11, RAX, RCX, RDI, RDX, RSI, RSP, Source, Target, Vector,
};
use super::native::{Binary, Compared, Float, Logic, Native, Shift, Unary, Width};
use crate::exec::lanes::{Role, Sig};
use crate::ir::{Access, File, GUARD_NOT, Inst, NO_GUARD, Op, SINK, Sem, Space};
use crate::registers::Regs;

/// Scratch registers; the last one has the lanes of a mask with AVX2. The others hold values.
const T0: u8 = 11;
const T1: u8 = 12;
const T2: u8 = 13;
const T3: u8 = 14;
const MASK: u8 = 15;

/// Vector registers that hold values.
pub(super) fn holders(target: Target) -> u8 {
    match target {
        Target::Avx512 => 27,
        Target::Avx2 => 11,
    }
}

/// Mask registers: that of a result, scratch, and the lanes that stay as they are (the low and the
/// high 8).
const K_GUARD: u8 = 1;
const K1: u8 = 2;
const K2: u8 = 3;
const KEEP: u8 = 7;
const KEEP_HIGH: u8 = 6;

/// The frame: the lanes that stay as they are, room for the arguments during a call, and the
/// predicates of the block at hand, 4 bytes each.
const KEPT: i32 = 0;
const SAVED: i32 = 8;
const PREDICATES: i32 = 64;

/// Offsets of the fields of [`Surroundings`].
const REGISTERS: i32 = std::mem::offset_of!(Surroundings, regs) as i32;
const EXECUTION: i32 = std::mem::offset_of!(Surroundings, execution) as i32;
const CALL: i32 = std::mem::offset_of!(Surroundings, call) as i32;
const POLL: i32 = std::mem::offset_of!(Surroundings, poll) as i32;
const PARAMETERS: i32 = std::mem::offset_of!(Surroundings, parameters) as i32;
const BEHIND: i32 = std::mem::offset_of!(Surroundings, behind) as i32;
const AHEAD: i32 = std::mem::offset_of!(Surroundings, ahead) as i32;

/// The arguments of compiled code besides the registers, the lanes and the budget.
#[repr(C)]
pub(super) struct Surroundings {
    pub(super) regs: *mut Regs,
    /// See [`Calls`](super::Calls).
    pub(super) call: *const (),
    pub(super) poll: *const (),
    pub(super) execution: *mut (),
    pub(super) parameters: *const u8,
    /// Compiled code runs blocks behind the one instruction, and in front of the other one: other
    /// lanes of the warp stand there.
    pub(super) behind: i32,
    pub(super) ahead: i32,
}

/// Immediates of comparisons of integers, see `Native::comparison`.
const EQ: u8 = 0;
const LT: u8 = 1;
const LE: u8 = 2;
const NE: u8 = 4;
const GE: u8 = 5;
const GT: u8 = 6;

/// Most predicates of a kernel that is compiled.
const MOST_PREDICATES: u32 = 1024;

const LOAD32: Vector = Vector(1, 2, false, 0x6f);
const STORE32: Vector = Vector(1, 2, false, 0x7f);
const COPY32: Vector = Vector(1, 1, false, 0x6f);
const LOAD64: Vector = Vector(1, 2, true, 0x6f);
const BLEND32: Vector = Vector(2, 1, false, 0x64);
const BLEND64: Vector = Vector(2, 1, true, 0x64);
const ADD32: Vector = Vector(1, 1, false, 0xfe);
const ADD64: Vector = Vector(1, 1, true, 0xd4);
const MUL32: Vector = Vector(2, 1, false, 0x40);
const MUL64: Vector = Vector(2, 1, true, 0x40);
const AND32: Vector = Vector(1, 1, false, 0xdb);
const OR32: Vector = Vector(1, 1, false, 0xeb);
const XOR32: Vector = Vector(1, 1, false, 0xef);
const XOR64: Vector = Vector(1, 1, true, 0xef);
const ZERO_EXTEND: Vector = Vector(2, 1, false, 0x35);
const SIGN_EXTEND: Vector = Vector(2, 1, false, 0x25);
const UPPER_HALF: Vector = Vector(3, 1, true, 0x3b);
const JOIN_HALVES: Vector = Vector(3, 1, true, 0x3a);
const TRUNCATE: Vector = Vector(2, 2, false, 0x35);
const BROADCAST32: Vector = Vector(2, 1, false, 0x58);
const BROADCAST64: Vector = Vector(2, 1, true, 0x59);
const MULTIPLY_WIDE: Vector = Vector(1, 1, true, 0xf4);
const MULTIPLY_WIDE_SIGNED: Vector = Vector(2, 1, true, 0x28);
const COMPARE_F32: Vector = Vector(1, 0, false, 0xc2);
const FMA: Vector = Vector(2, 1, false, 0xa8);
const UNORDERED: u8 = 3;
const COMPARE_UNSIGNED32: Vector = Vector(3, 1, false, 0x1e);
const UNSIGNED_TO_F64: Vector = Vector(1, 2, false, 0x7a);
const DIVIDE_F64: Vector = Vector(1, 1, true, 0x5e);
const F64_TO_UNSIGNED: Vector = Vector(1, 0, true, 0x78);

/// Instructions of AVX2 for what AVX-512 does with masks, and otherwise.
const AVX2_BLEND32: Vector = Vector(3, 1, false, 0x4a);
const AVX2_BLEND64: Vector = Vector(3, 1, false, 0x4b);
const AVX2_BROADCAST8: Vector = Vector(2, 1, false, 0x78);
const AVX2_BROADCAST64: Vector = Vector(2, 1, false, 0x59);
const AVX2_EQUAL32: Vector = Vector(1, 1, false, 0x76);
const AVX2_EQUAL64: Vector = Vector(2, 1, false, 0x29);
const AVX2_GREATER32: Vector = Vector(1, 1, false, 0x66);
const AVX2_GREATER64: Vector = Vector(2, 1, false, 0x37);
const AVX2_SIGNS32: Vector = Vector(1, 0, false, 0x50);
const AVX2_SIGNS64: Vector = Vector(1, 1, false, 0x50);
const AVX2_UPPER_HALF: Vector = Vector(3, 1, false, 0x39);
const AVX2_PICK32: Vector = Vector(1, 0, false, 0xc6);
const AVX2_ORDER64: Vector = Vector(3, 1, true, 0x00);
const AVX2_ROUND64: Vector = Vector(3, 1, false, 0x09);
const AVX2_ADD_F64: Vector = Vector(1, 1, false, 0x58);
const AVX2_SUB_F64: Vector = Vector(1, 1, false, 0x5c);
const TOWARDS_ZERO: u8 = 3;

/// 2^52 as an f64, whose low bits count integers.
const F64_OF_INTEGERS: Source = Source::Wide(0x4330_0000_0000_0000);

/// Executes an arithmetic instruction by its function.
///
/// # Safety
/// `regs` are the registers that compiled code runs on, `inst` an arithmetic instruction of its
/// kernel.
unsafe extern "sysv64" fn call_function(regs: *mut Regs, inst: *const Inst, lanes: u32) {
    // SAFETY: compiled code passes the pointer that it was given, to registers that are borrowed
    // mutably for as long as it runs and that nothing accesses during the call.
    let regs = unsafe { &mut *regs };
    // SAFETY: the instructions of a kernel live as long as its compiled code, and do not move.
    if let Op::Alu { f, s, .. } = unsafe { &(*inst).op } {
        // SAFETY: the constructor of `f` checked that this processor has the instructions that it
        // uses.
        unsafe { f(regs, s, lanes) }
    }
}

/// The form in which an instruction is part of compiled code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Arithmetic,
    /// A load of parameters, from this offset on.
    Parameters(u32),
    Branch,
    /// Any other instruction, where compiled code calls the interpreter for these.
    Call,
    /// It ends compiled code.
    None,
}

impl Part {
    /// The form of an instruction. `calls`: the code calls the interpreter.
    pub(super) fn of(inst: &Inst, calls: bool, constants: &HashMap<Slot, u64>, param_bytes: u64) -> Part {
        match &inst.op {
            Op::Alu { .. } => Part::Arithmetic,
            Op::Bra { .. } => Part::Branch,
            Op::Ld(a) if calls && a.sem == Sem::Weak => {
                Self::parameters(a, constants, param_bytes).map_or(Part::Call, Part::Parameters)
            }
            _ if calls => Part::Call,
            _ => Part::None,
        }
    }

    /// The offset of the parameters that are loaded, if it is known, and the load has no fault.
    fn parameters(a: &Access, constants: &HashMap<Slot, u64>, param_bytes: u64) -> Option<u32> {
        let size = u64::from(a.bytes) * u64::from(a.n);
        if a.space != Space::Param || a.whole || !matches!((a.bytes, a.wide), (4, false) | (8, true)) {
            return None;
        }
        let file = if a.addr.wide { File::R64 } else { File::R32 };
        let at = constants.get(&(file, a.addr.slot))?.wrapping_add(a.addr.offset as u64);
        let at = if a.addr.wide { at } else { at & 0xffff_ffff };
        let fits = at.is_multiple_of(size) && at.checked_add(size).is_some_and(|end| end <= param_bytes);
        fits.then_some(at as u32)
    }

    /// Whether a value may stay in a register from the instruction before it to the one behind it.
    pub(super) fn is_inline(self) -> bool {
        matches!(self, Part::Arithmetic | Part::Parameters(_))
    }
}

/// A register of the warp.
pub(super) type Slot = (File, u32);

/// The input of a translation.
pub(super) struct Program<'a> {
    pub(super) code: &'a [Inst],
    pub(super) parts: &'a [Part],
    /// By instruction: its slots, the guard included as one that is read. See [`slots_of`].
    pub(super) slots_of: Vec<Vec<(Slot, Role)>>,
    /// First instructions of basic blocks.
    pub(super) leaders: &'a [bool],
    /// Slots of each file.
    pub(super) slots: [u32; 3],
    pub(super) target: Target,
    /// How many vector registers hold values: 11, which are enough for one instruction, to
    /// [`holders`].
    pub(super) holders: u8,
    /// Slots that hold the same known bits in every lane.
    pub(super) constants: &'a HashMap<Slot, u64>,
}

impl Program<'_> {
    /// The number of a slot among those of all files.
    fn id(&self, (file, slot): Slot) -> usize {
        let [n32, n64, _] = self.slots;
        let base = match file {
            File::R32 => 0,
            File::R64 => n32,
            File::Pred => n32 + n64,
        };
        (base + slot) as usize
    }

    /// A set without slots.
    fn none(&self) -> Vec<bool> {
        vec![false; self.slots.iter().sum::<u32>() as usize]
    }
}

/// The slots of an arithmetic instruction or a load of parameters, its guard included as one that is
/// read, and its results too if some lanes keep theirs.
pub(super) fn slots_of(inst: &Inst, sig: &[Sig], part: Part) -> Vec<(Slot, Role)> {
    let mut all: Vec<(Slot, Role)> = match (&inst.op, part) {
        (Op::Alu { s, .. }, _) => {
            sig.iter().zip(s).map(|(sig, &slot)| ((sig.file, slot), sig.role)).collect()
        }
        (Op::Ld(a), Part::Parameters(_)) => {
            let file = if a.wide { File::R64 } else { File::R32 };
            a.regs[..usize::from(a.n)].iter().map(|&slot| ((file, slot), Role::Def)).collect()
        }
        _ => return vec![],
    };
    // A comparison that is not combined with a predicate does not read that slot.
    if matches!(&inst.op, Op::Alu { s, native: Native::Compare(..), .. } if s[5] == 0) {
        all.truncate(4);
    }
    if inst.guard != NO_GUARD {
        let kept: Vec<_> = all.iter().filter(|(_, role)| *role == Role::Def).map(|(slot, _)| *slot).collect();
        all.push(((File::Pred, inst.guard & !GUARD_NOT), Role::Use));
        all.extend(kept.into_iter().map(|slot| (slot, Role::Use)));
    }
    all
}

/// Whether all lanes of a warp run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lanes {
    All,
    Some,
}

/// Code, and where the blocks begin in it.
pub(super) struct Translated {
    pub(super) code: Vec<u8>,
    /// By instruction; 0 if there is no entry.
    pub(super) entries: Vec<u32>,
}

/// A value in vector registers.
#[derive(Clone, Copy, Debug)]
struct Held {
    slot: Slot,
    /// The second one is for the upper half of the lanes of 64 bits.
    registers: [u8; 2],
    /// Memory has another value.
    dirty: bool,
}

/// How the slots of a block are used behind each of its instructions.
struct Uses {
    /// By instruction of the block: it computes nothing that is used.
    dead: Vec<bool>,
    /// Slots that are not used any more behind an instruction.
    last: Vec<Vec<Slot>>,
    /// Slots that are alive behind an instruction that its function does, and behind the last one.
    alive: Vec<(usize, Vec<bool>)>,
}

/// Translates a whole kernel. `alive` returns the slots that are alive in front of an instruction.
pub(super) fn translate(
    program: &Program,
    lanes: Lanes,
    alive: impl Fn(usize) -> Vec<Slot>,
) -> Option<Translated> {
    if program.slots[2] > MOST_PREDICATES {
        return None;
    }
    let mut t = Translator {
        program,
        lanes,
        asm: Assembler::new(program.target),
        strip: 0,
        held: vec![],
        references: [0; 32],
        pinned: 0,
        defined: vec![],
        left: vec![0; program.slots.iter().sum::<u32>() as usize],
        frame: (8 + PREDICATES + 4 * program.slots[2] as i32 + 15) / 16 * 16 + 8,
    };
    let n = program.code.len();
    let mut entries = vec![None; n];
    let labels: Vec<Option<Label>> = (0..n)
        .map(|i| (program.leaders[i] && program.parts[i] != Part::None).then(|| t.asm.label()))
        .collect();
    let leave = t.asm.label();
    let mut exits = vec![];
    // The label at which the code before continues.
    let mut fall = None;
    for start in (0..n).filter(|&i| labels[i].is_some()) {
        let mut end = start;
        while end < n && program.parts[end].is_inline() && (end == start || !program.leaders[end]) {
            end += 1;
        }
        let label = labels[start]?;
        if fall != Some(label)
            && let Some(fall) = fall
        {
            t.asm.jump(fall);
        }
        t.asm.bind(label);
        let length = (end - start) as i32;
        // One more instruction ends the block.
        let last = match program.parts.get(end) {
            Some(&part) if end == start || !program.leaders[end] => part,
            _ => Part::None,
        };
        // Others stand at this block, or within it.
        let meets = t.asm.label();
        t.asm.compare_memory(Mem { base: R9, offset: BEHIND }, start as i32);
        t.asm.jump_if_not_less(meets);
        t.asm.compare_memory(Mem { base: R9, offset: AHEAD }, (end + usize::from(last != Part::None)) as i32);
        t.asm.jump_if_less(meets);
        exits.push((meets, 0, start));
        if length > 0 {
            let exit = t.asm.label();
            t.asm.subtract_wide(R8, length);
            t.asm.jump_if_less(exit);
            exits.push((exit, length, start));
            t.block(start, end, &alive(end))?;
        }
        let next = |i: usize| labels.get(i).copied().flatten();
        if last != Part::None {
            let exit = t.asm.label();
            t.asm.subtract_wide(R8, 1);
            t.asm.jump_if_less(exit);
            exits.push((exit, 1, end));
        }
        if last == Part::Call {
            let stop = t.asm.label();
            t.interpreted(end, stop);
            exits.push((stop, 0, end));
            end += 1;
        }
        match program.code.get(end) {
            Some(Inst { op: Op::Bra { target }, guard, .. }) if last == Part::Branch => {
                let mut to = |t: &mut Translator, pc: usize| {
                    next(pc).unwrap_or_else(|| {
                        let exit = t.asm.label();
                        exits.push((exit, 0, pc));
                        exit
                    })
                };
                let taken = to(&mut t, *target as usize);
                if *guard == NO_GUARD {
                    fall = Some(taken);
                } else {
                    let behind = to(&mut t, end + 1);
                    let slot = guard & !GUARD_NOT;
                    t.asm.load(RAX, Mem { base: RDX, offset: 4 * slot as i32 });
                    if guard & GUARD_NOT != 0 {
                        t.asm.not(RAX);
                    }
                    let divergent = t.asm.label();
                    t.asm.and(RAX, RCX);
                    let none = t.asm.label();
                    t.asm.jump_if_zero(none);
                    t.asm.compare(RAX, RCX);
                    t.asm.jump_if_not_equal(divergent);
                    t.asm.jump(taken);
                    t.asm.bind(none);
                    fall = Some(behind);
                    exits.push((divergent, 1, end));
                }
            }
            _ => match next(end) {
                Some(label) => fall = Some(label),
                None => {
                    let exit = t.asm.label();
                    exits.push((exit, 0, end));
                    fall = Some(exit);
                }
            },
        }
    }
    if let Some(fall) = fall {
        t.asm.jump(fall);
    }
    for (start, label) in labels.iter().enumerate() {
        let Some(label) = *label else { continue };
        let entry = t.asm.label();
        t.asm.bind(entry);
        t.enter();
        t.asm.jump(label);
        entries[start] = Some(entry);
    }
    for (label, unused, pc) in exits {
        t.asm.bind(label);
        if unused != 0 {
            t.asm.add_wide(R8, unused);
        }
        t.asm.set(RAX, pc as u32);
        t.asm.jump(leave);
    }
    t.asm.bind(leave);
    t.asm.copy_wide(RDX, R8);
    t.asm.add_wide(RSP, t.frame);
    t.asm.leave();
    let entries = entries
        .into_iter()
        .map(|entry| entry.and_then(|entry| t.asm.place(entry)).unwrap_or(0) as u32)
        .collect();
    Some(Translated { code: t.asm.finish()?, entries })
}

struct Translator<'a> {
    program: &'a Program<'a>,
    lanes: Lanes,
    asm: Assembler,
    /// The number of the strip at hand.
    strip: i32,
    held: Vec<Held>,
    /// By vector register: how many values of `held` are in it.
    references: [u8; 32],
    /// Vector registers of the instruction at hand, one bit each.
    pinned: u32,
    /// Predicates that are in the frame.
    defined: Vec<u32>,
    /// How often each slot is still read in the block.
    left: Vec<u32>,
    frame: i32,
}

impl Translator<'_> {
    /// The code in front of a block where others enter it.
    fn enter(&mut self) {
        self.asm.subtract_wide(RSP, self.frame);
        if self.lanes == Lanes::Some {
            self.asm.copy(RAX, RCX);
            self.asm.not(RAX);
            self.asm.store(Mem { base: RSP, offset: KEPT }, RAX);
        }
    }

    fn uses(&self, start: usize, end: usize, alive: &[Slot]) -> Uses {
        let mut live = self.program.none();
        // The guard of a branch behind the block is among these.
        alive.iter().for_each(|&slot| live[self.program.id(slot)] = true);
        let n = end - start;
        let mut uses = Uses { dead: vec![false; n], last: vec![vec![]; n], alive: vec![] };
        uses.alive.push((n - 1, live.clone()));
        for i in (0..n).rev() {
            let slots = &self.program.slots_of[start + i];
            if self.is_function(start + i) && i + 1 != n {
                uses.alive.push((i, live.clone()));
            }
            let is_live = |slot: Slot| live[self.program.id(slot)];
            if !slots.iter().any(|&(slot, role)| role != Role::Use && slot.1 != SINK && is_live(slot)) {
                uses.dead[i] = true;
                continue;
            }
            uses.last[i] = slots.iter().map(|&(slot, _)| slot).filter(|&slot| !is_live(slot)).collect();
            for &(slot, _) in slots.iter().filter(|(_, role)| *role == Role::Def) {
                live[self.program.id(slot)] = false;
            }
            for &(slot, _) in slots.iter().filter(|(_, role)| *role != Role::Def) {
                live[self.program.id(slot)] = true;
            }
        }
        uses
    }

    /// Whether an instruction is a call of its function.
    fn is_function(&self, i: usize) -> bool {
        let Op::Alu { native, .. } = self.program.code[i].op else { return false };
        match native {
            Native::Function => true,
            Native::Unary(Unary::CountOnes | Unary::LeadingZeros, _)
            | Native::Shift(Shift::RightSigned, Width::W64)
            | Native::Binary(
                Binary::MinUnsigned | Binary::MinSigned | Binary::MaxUnsigned | Binary::MaxSigned,
                Width::W64,
            ) => self.program.target == Target::Avx2,
            _ => false,
        }
    }

    /// A block of arithmetic instructions.
    fn block(&mut self, start: usize, end: usize, alive: &[Slot]) -> Option<()> {
        let uses = self.uses(start, end, alive);
        let mut from = start;
        while from < end {
            // A segment ends at an instruction that its function does.
            let is_function = |i: usize| self.is_function(i) && !uses.dead[i - start];
            let to = (from..end).find(|&i| is_function(i)).unwrap_or(end);
            if from < to {
                let behind = if to == end { end - 1 } else { to } - start;
                let mut needed = uses.alive.iter().find(|(i, _)| *i == behind)?.1.clone();
                // In front of a function: also what it reads, or keeps.
                for &(slot, _) in self.program.slots_of.get(to).filter(|_| to < end).into_iter().flatten() {
                    needed[self.program.id(slot)] = true;
                }
                self.segment(from, to, start, &uses, &needed)?;
            }
            if to < end {
                self.function(to);
            }
            from = to + 1;
        }
        Some(())
    }

    /// Compiles instructions that have vector instructions. Afterwards all slots of `needed` are in
    /// memory.
    fn segment(&mut self, from: usize, to: usize, start: usize, uses: &Uses, needed: &[bool]) -> Option<()> {
        let program = self.program;
        let reads = |i: usize| program.slots_of[i].iter().filter(|(_, role)| *role != Role::Def).map(|r| r.0);
        let mut predicates = vec![];
        let (lanes, strips) = (self.program.target.lanes(), 32 / self.program.target.lanes());
        for strip in 0..strips {
            self.strip = strip;
            self.held.clear();
            self.references = [0; 32];
            self.defined.clear();
            for i in (from..to).filter(|i| !uses.dead[i - start]) {
                reads(i).for_each(|slot| self.left[program.id(slot)] += 1);
            }
            let none = self.asm.label();
            if self.lanes == Lanes::Some {
                // Nothing changes in a strip without lanes, whatever its predicates in the frame.
                self.asm.test(RCX, ((1 << lanes) - 1) << (lanes * strip));
                self.asm.jump_if_zero(none);
                if self.program.target == Target::Avx512 {
                    self.asm.load_mask(KEEP, Mem { base: RSP, offset: KEPT + 2 * strip });
                    self.asm.mask_shift_right(KEEP_HIGH, KEEP, 8);
                }
            }
            for i in (from..to).filter(|i| !uses.dead[i - start]) {
                reads(i).for_each(|slot| self.left[program.id(slot)] -= 1);
                self.pinned = 0;
                self.instruction(i)?;
                for slot in &uses.last[i - start] {
                    self.forget(*slot);
                }
            }
            for held in self.held.clone() {
                if held.dirty && needed[program.id(held.slot)] {
                    self.write_back(held);
                }
            }
            self.asm.bind(none);
            predicates = std::mem::take(&mut self.defined);
        }
        for p in predicates {
            if !needed[program.id((File::Pred, p))] {
                continue;
            }
            let (frame, memory) = (self.frame_predicate(p), Mem { base: RDX, offset: 4 * p as i32 });
            self.load_part(RAX, frame);
            for strip in 1..strips {
                self.load_part(R10, frame.plus(lanes / 8 * strip));
                self.asm.shift_left(R10, (lanes * strip) as u8);
                self.asm.or(RAX, R10);
            }
            if self.lanes == Lanes::Some {
                self.asm.load(R10, memory);
                self.asm.xor(RAX, R10);
                self.asm.and(RAX, RCX);
                self.asm.xor(RAX, R10);
            }
            self.asm.store(memory, RAX);
        }
        Some(())
    }

    /// Compiles an instruction as a call of its function. All registers are in memory.
    fn function(&mut self, i: usize) {
        self.call(i, REGISTERS, None, |asm| {
            asm.set_wide(RAX, call_function as *const () as usize as u64);
        });
    }

    /// Runs an instruction by the interpreter; jumps to `stop` where compiled code ends with it.
    /// All registers are in memory. R8 has what is left of the budget.
    fn interpreted(&mut self, i: usize, stop: Label) {
        let function = match &self.program.code[i].op {
            Op::Ld(access) if access.is_word_of_others() => POLL,
            _ => CALL,
        };
        self.call(i, EXECUTION, Some(stop), |asm| {
            asm.set(RCX, i as u32);
            asm.load_wide(RAX, Mem { base: R9, offset: function });
        });
    }

    /// Calls a function with three arguments: the field at `first` of the surroundings, the
    /// instruction `i`, and the lanes for which its guard holds. `target` loads the function into
    /// RAX. Nothing happens if there are no lanes. Jumps to `stop`, if given, where the function
    /// returns true.
    fn call(&mut self, i: usize, first: i32, stop: Option<Label>, target: impl Fn(&mut Assembler)) {
        let inst = &self.program.code[i];
        let registers = [RDI, RSI, RDX, RCX, R8, R9];
        let saved = |n: usize| Mem { base: RSP, offset: SAVED + 8 * n as i32 };
        let done = self.asm.label();
        self.asm.copy(RAX, RCX);
        if inst.guard != NO_GUARD {
            self.asm.load(R10, Mem { base: RDX, offset: 4 * (inst.guard & !GUARD_NOT) as i32 });
            if inst.guard & GUARD_NOT != 0 {
                self.asm.not(R10);
            }
            self.asm.and(RAX, R10);
            self.asm.jump_if_zero(done);
        }
        for (n, register) in registers.into_iter().enumerate() {
            self.asm.store_wide(saved(n), register);
        }
        self.asm.load_wide(RDI, Mem { base: R9, offset: first });
        self.asm.set_wide(RSI, std::ptr::from_ref(inst).expose_provenance() as u64);
        self.asm.copy(RDX, RAX);
        target(&mut self.asm);
        // No register has a value now, and functions may have instructions that wait for the upper
        // halves, or keep them.
        self.asm.clear_upper_halves();
        self.asm.call(RAX);
        for (n, register) in registers.into_iter().enumerate() {
            self.asm.load_wide(register, saved(n));
        }
        if let Some(stop) = stop {
            self.asm.test(RAX, 0xff);
            self.asm.jump_if_not_equal(stop);
        }
        self.asm.bind(done);
    }

    fn frame_predicate(&self, p: u32) -> Mem {
        Mem { base: RSP, offset: PREDICATES + 4 * p as i32 }
    }

    /// Loads the lanes of a strip.
    fn load_part(&mut self, d: u8, m: Mem) {
        match self.program.target {
            Target::Avx512 => self.asm.load_half(d, m),
            Target::Avx2 => self.asm.load_byte(d, m),
        }
    }

    /// The bits of a predicate that belong to the strip.
    fn predicate(&self, p: u32) -> Mem {
        let whole = if self.defined.contains(&p) {
            self.frame_predicate(p)
        } else {
            Mem { base: RDX, offset: 4 * p as i32 }
        };
        whole.plus(self.program.target.lanes() / 8 * self.strip)
    }

    /// The part of a register in memory: the lanes of a strip, or half of those of 64 bits.
    fn row(&self, slot: Slot, half: usize) -> Mem {
        let bytes = self.program.target.bytes();
        match slot.0 {
            File::R64 => {
                let part = 2 * self.strip + half as i32;
                Mem { base: RSI, offset: slot.1 as i32 * 256 + part * bytes }
            }
            _ => Mem { base: RDI, offset: slot.1 as i32 * 128 + self.strip * bytes },
        }
    }

    fn parts(slot: Slot) -> usize {
        if slot.0 == File::R64 { 2 } else { 1 }
    }

    fn find(&self, slot: Slot) -> Option<usize> {
        self.held.iter().position(|held| held.slot == slot)
    }

    fn forget(&mut self, slot: Slot) {
        if let Some(at) = self.find(slot) {
            let held = self.held.swap_remove(at);
            for &r in &held.registers[..Self::parts(slot)] {
                self.references[usize::from(r)] -= 1;
            }
        }
    }

    fn hold(&mut self, slot: Slot, registers: [u8; 2], dirty: bool) {
        self.forget(slot);
        for &r in &registers[..Self::parts(slot)] {
            self.references[usize::from(r)] += 1;
            self.pinned |= 1 << r;
        }
        self.held.push(Held { slot, registers, dirty });
    }

    /// Stores a value. Lanes that do not run keep theirs.
    fn write_back(&mut self, held: Held) {
        for half in 0..Self::parts(held.slot) {
            let (row, mut register) = (self.row(held.slot, half), held.registers[half]);
            if self.lanes == Lanes::Some && self.program.target == Target::Avx2 {
                self.expand(Mem { base: RSP, offset: KEPT + self.strip }, half, held.slot.0);
                self.blend(held.slot.0, T3, register, Source::Memory(row), K1);
                register = T3;
            } else if self.lanes == Lanes::Some {
                let keep = if half == 0 { KEEP } else { KEEP_HIGH };
                self.asm.vector(COPY32, T3, 0, Source::Register(register), 0);
                register = T3;
                let load = if held.slot.0 == File::R64 { LOAD64 } else { LOAD32 };
                self.asm.vector(load, register, 0, Source::Memory(row), keep);
            }
            self.asm.vector(STORE32, register, 0, Source::Memory(row), 0);
        }
    }

    /// A vector register that holds nothing.
    fn fresh(&mut self) -> Option<u8> {
        loop {
            let free = |&r: &u8| self.references[usize::from(r)] == 0 && self.pinned >> r & 1 == 0;
            // Scratch registers are between them.
            let mut holders = (0..self.program.holders).map(|n| if n < T0 { n } else { n + MASK + 1 - T0 });
            if let Some(r) = holders.find(free) {
                self.pinned |= 1 << r;
                return Some(r);
            }
            // Best one that is in memory, or else the oldest.
            let movable = |held: &Held| {
                held.registers[..Self::parts(held.slot)].iter().all(|r| self.pinned >> r & 1 == 0)
            };
            let clean = self.held.iter().position(|held| movable(held) && !held.dirty);
            let at = clean.or_else(|| self.held.iter().position(movable))?;
            let held = self.held[at];
            if held.dirty {
                self.write_back(held);
            }
            self.forget(held.slot);
        }
    }

    fn fresh_for(&mut self, slot: Slot) -> Option<[u8; 2]> {
        let low = self.fresh()?;
        Some([low, if Self::parts(slot) == 2 { self.fresh()? } else { 0 }])
    }

    /// The registers with a value, which is loaded if need be.
    fn value(&mut self, slot: Slot) -> Option<[u8; 2]> {
        if let Some(at) = self.find(slot) {
            let held = self.held[at];
            held.registers[..Self::parts(slot)].iter().for_each(|r| self.pinned |= 1 << r);
            return Some(held.registers);
        }
        if let Some(bits) = self.constant(slot) {
            let register = self.fresh()?;
            self.broadcast(register, slot.0, bits);
            self.hold(slot, [register, register], false);
            return Some([register, register]);
        }
        let registers = self.fresh_for(slot)?;
        for (half, &register) in registers[..Self::parts(slot)].iter().enumerate() {
            let row = self.row(slot, half);
            self.asm.vector(LOAD32, register, 0, Source::Memory(row), 0);
        }
        self.hold(slot, registers, false);
        Some(registers)
    }

    /// `register` = the same bits in every lane. The registers of a warp have them as well, but all
    /// warps share this place in memory.
    fn broadcast(&mut self, register: u8, file: File, bits: u64) {
        let bits = if file == File::R64 { Source::Wide(bits) } else { Source::Constant(bits as u32) };
        self.bring(register, bits);
    }

    /// `register` = an operand.
    fn bring(&mut self, register: u8, from: Source) {
        match from {
            _ if self.program.target == Target::Avx2 => self.asm.vector(LOAD32, register, 0, from, 0),
            Source::Constant(_) => self.asm.vector_sized(BROADCAST32, register, from, 4),
            Source::Wide(_) => self.asm.vector_sized(BROADCAST64, register, from, 8),
            _ => self.asm.vector(LOAD32, register, 0, from, 0),
        }
    }

    /// The same as operands, which stay in memory if this is their only use, or are constants.
    fn source(&mut self, slot: Slot) -> Option<[Source; 2]> {
        if let Some(bits) = self.constant(slot).filter(|_| self.find(slot).is_none()) {
            let constant =
                if slot.0 == File::R64 { Source::Wide(bits) } else { Source::Constant(bits as u32) };
            return Some([constant, constant]);
        }
        if self.find(slot).is_none() && self.left[self.program.id(slot)] == 0 {
            return Some([0, 1].map(|half| Source::Memory(self.row(slot, half))));
        }
        Some(self.value(slot)?.map(Source::Register))
    }

    /// The lanes `half` of a register of 32 bits, extended to 64 bits in `to`.
    fn extend(&mut self, slot: u32, half: usize, signed: bool, to: u8) -> Option<()> {
        self.widen(if signed { SIGN_EXTEND } else { ZERO_EXTEND }, slot, half, to)
    }

    /// The lanes `half` of a register of 32 bits, converted to 64 bits in `to`.
    fn widen(&mut self, op: Vector, slot: u32, half: usize, to: u8) -> Option<()> {
        let slot = (File::R32, slot);
        if let Some(bits) = self.constant(slot) {
            let wide = match op {
                SIGN_EXTEND => bits as i32 as u64,
                UNSIGNED_TO_F64 => f64::from(bits as u32).to_bits(),
                _ => u64::from(bits as u32),
            };
            self.broadcast(to, File::R64, wide);
            return Some(());
        }
        if self.find(slot).is_none() && self.left[self.program.id(slot)] == 0 {
            let bytes = self.program.target.bytes() / 2;
            let row = self.row(slot, 0).plus(bytes * half as i32);
            self.asm.vector_sized(op, to, Source::Memory(row), bytes);
            return Some(());
        }
        let [mut from, _] = self.value(slot)?;
        if half == 1 {
            let upper = match self.program.target {
                Target::Avx512 => UPPER_HALF,
                Target::Avx2 => AVX2_UPPER_HALF,
            };
            self.asm.vector_with(upper, from, 0, Source::Register(to), 0, Some(1));
            from = to;
        }
        self.asm.vector(op, to, 0, Source::Register(from), 0);
        Some(())
    }

    /// The lanes `half` of a register of 32 bits, as f64 in `to`.
    fn unsigned_to_f64(&mut self, slot: u32, half: usize, to: u8) -> Option<()> {
        match self.program.target {
            Target::Avx512 => self.widen(UNSIGNED_TO_F64, slot, half, to),
            Target::Avx2 => {
                self.widen(ZERO_EXTEND, slot, half, to)?;
                self.asm.vector(XOR64, to, to, F64_OF_INTEGERS, 0);
                self.asm.vector(AVX2_SUB_F64, to, to, F64_OF_INTEGERS, 0);
                Some(())
            }
        }
    }

    /// Makes `registers` the value of `slot`, for the lanes of the guard.
    fn define(&mut self, guard: u32, slot: Slot, registers: [u8; 2]) -> Option<()> {
        if slot.1 == SINK {
            return Some(());
        }
        if guard == NO_GUARD {
            self.hold(slot, registers, true);
            return Some(());
        }
        let old = self.value(slot)?;
        let parts = Self::parts(slot);
        // A result that is no other value need not be kept.
        let own = registers[..parts].iter().all(|&r| self.references[usize::from(r)] == 0)
            && (parts == 1 || registers[0] != registers[1]);
        let result = if own { registers } else { self.fresh_for(slot)? };
        for half in 0..parts {
            self.load_guard(guard, half, slot.0);
            self.blend(slot.0, result[half], old[half], Source::Register(registers[half]), K_GUARD);
        }
        self.hold(slot, result, true);
        Some(())
    }

    /// Loads the lanes of a predicate, for those of 32 bits or a half of 64, as a mask.
    fn load_lanes(&mut self, k: u8, p: u32, half: usize, file: File) {
        let at = self.predicate(p);
        match self.program.target {
            Target::Avx2 => self.expand(at, half, file),
            Target::Avx512 if file == File::R64 => self.asm.load_mask_byte(k, at.plus(half as i32)),
            Target::Avx512 => self.asm.load_mask(k, at),
        }
    }

    /// MASK = the lanes of the 8 bits in memory, or half of them for 64 bits each.
    fn expand(&mut self, at: Mem, half: usize, file: File) {
        let (bits, equal) = if file == File::R64 {
            let bit = |lane: usize| if lane.is_multiple_of(2) { 1 << (4 * half + lane / 2) } else { 0 };
            (std::array::from_fn(bit), AVX2_EQUAL64)
        } else {
            (std::array::from_fn(|lane| 1 << lane), AVX2_EQUAL32)
        };
        self.asm.vector(AVX2_BROADCAST8, MASK, 0, Source::Memory(at), 0);
        self.asm.vector_lanes(AND32, MASK, MASK, bits);
        self.asm.vector_lanes(equal, MASK, MASK, bits);
    }

    /// `d = mask ? b : a`. The mask is `k`, or MASK with AVX2.
    fn blend(&mut self, file: File, d: u8, a: u8, b: Source, k: u8) {
        let wide = file == File::R64;
        match self.program.target {
            Target::Avx512 => self.asm.vector(if wide { BLEND64 } else { BLEND32 }, d, a, b, k),
            Target::Avx2 => {
                let op = if wide { AVX2_BLEND64 } else { AVX2_BLEND32 };
                self.asm.vector_with(op, d, a, b, 0, Some(MASK << 4));
            }
        }
    }

    fn load_guard(&mut self, guard: u32, half: usize, file: File) {
        self.load_lanes(K_GUARD, guard & !GUARD_NOT, half, file);
        if guard & GUARD_NOT != 0 {
            match self.program.target {
                Target::Avx512 => self.asm.mask_not(K_GUARD, K_GUARD),
                Target::Avx2 => self.asm.vector(XOR32, MASK, MASK, Source::Constant(u32::MAX), 0),
            }
        }
    }

    /// Keeps the bits of RAX for the lanes of the guard, whose predicate is in R11, and takes those
    /// of the predicate `p` elsewhere.
    fn keep_unguarded(&mut self, guard: u32, p: u32) {
        if guard & GUARD_NOT != 0 {
            self.asm.not(R11);
        }
        let old = self.predicate(p);
        // old ^ ((old ^ new) & guard)
        self.load_part(R10, old);
        self.asm.xor(RAX, R10);
        self.asm.and(RAX, R11);
        self.asm.xor(RAX, R10);
    }

    /// Makes the low bits of RAX, one for each lane of the strip, the predicate `p`, for the lanes
    /// of the guard.
    fn define_predicate(&mut self, guard: u32, p: u32) {
        if p == SINK {
            return;
        }
        if guard != NO_GUARD {
            let at = self.predicate(guard & !GUARD_NOT);
            self.load_part(R11, at);
            self.keep_unguarded(guard, p);
        }
        let to = self.frame_predicate(p).plus(self.program.target.lanes() / 8 * self.strip);
        match self.program.target {
            Target::Avx512 => self.asm.store_half(to, RAX),
            Target::Avx2 => self.asm.store_byte(to, RAX),
        }
        if !self.defined.contains(&p) {
            self.defined.push(p);
        }
    }

    fn constant(&self, slot: Slot) -> Option<u64> {
        self.program.constants.get(&slot).copied()
    }

    /// A result that is a NaN becomes the canonical one.
    fn canonical(&mut self, d: u8) {
        self.unordered(d);
        self.blend(File::R32, d, d, Source::Constant(0x7fff_ffff), K1);
    }

    /// The mask = the lanes of `v` that are NaNs.
    fn unordered(&mut self, v: u8) {
        let mask = match self.program.target {
            Target::Avx512 => K1,
            Target::Avx2 => MASK,
        };
        self.asm.vector_with(COMPARE_F32, mask, v, Source::Register(v), 0, Some(UNORDERED));
    }

    /// The mask = the lanes of `v` that are zero.
    fn zeros(&mut self, v: u8) {
        let zero = Source::Constant(0);
        match self.program.target {
            Target::Avx512 => {
                self.asm.vector_with(COMPARE_UNSIGNED32, K1, v, zero, 0, Some(EQ));
            }
            Target::Avx2 => self.asm.vector(AVX2_EQUAL32, MASK, v, zero, 0),
        }
    }

    /// A shift by a number.
    fn shift(&mut self, op: Shift, width: Width, d: u8, mut a: Source, n: u8) {
        let wide = width == Width::W64;
        // The field selects the shift within the opcode.
        let (opcode, field) = match (op, wide) {
            (Shift::Left, false) => (0x72, 6),
            (Shift::Left, true) => (0x73, 6),
            (Shift::Right, false) => (0x72, 2),
            (Shift::Right, true) => (0x73, 2),
            (Shift::RightSigned, _) => (0x72, 4),
        };
        if self.program.target == Target::Avx2 && !matches!(a, Source::Register(_)) {
            self.bring(d, a);
            a = Source::Register(d);
        }
        self.asm.vector_with(Vector(1, 1, wide, opcode), field, d, a, 0, Some(n));
    }

    /// The low half of a product. `d` is neither operand.
    fn multiply(&mut self, width: Width, d: u8, a: u8, b: Source) {
        match (width, self.program.target) {
            (Width::W32, _) => self.asm.vector(MUL32, d, a, b, 0),
            (Width::W64, Target::Avx512) => self.asm.vector(MUL64, d, a, b, 0),
            (Width::W64, Target::Avx2) => {
                // low * low + (high * low + low * high << 32)
                let right = |t: &mut Self, to, from| t.shift(Shift::Right, width, to, from, 32);
                self.bring(T0, b);
                right(self, T1, Source::Register(T0));
                self.asm.vector(MULTIPLY_WIDE, T1, T1, Source::Register(a), 0);
                right(self, T2, Source::Register(a));
                self.asm.vector(MULTIPLY_WIDE, T2, T2, Source::Register(T0), 0);
                self.asm.vector(ADD64, T1, T1, Source::Register(T2), 0);
                self.shift(Shift::Left, width, T1, Source::Register(T1), 32);
                self.asm.vector(MULTIPLY_WIDE, d, a, Source::Register(T0), 0);
                self.asm.vector(ADD64, d, d, Source::Register(T1), 0);
            }
        }
    }

    /// Compares values, by the immediate of `vcmpps` or `vpcmpd`. The result is in `K1`, or the low
    /// bits of R11 with AVX2.
    fn compare(&mut self, compared: Compared, imm: u8, a: [u8; 2], b: [Source; 2]) {
        let (op, wide) = match compared {
            Compared::F32 => (COMPARE_F32, false),
            Compared::Unsigned(Width::W32) => (COMPARE_UNSIGNED32, false),
            Compared::Signed(Width::W32) => (Vector(3, 1, false, 0x1f), false),
            Compared::Unsigned(Width::W64) => (Vector(3, 1, true, 0x1e), true),
            Compared::Signed(Width::W64) => (Vector(3, 1, true, 0x1f), true),
        };
        if self.program.target == Target::Avx512 {
            self.asm.vector_with(op, K1, a[0], b[0], 0, Some(imm));
            if wide {
                self.asm.vector_with(op, K2, a[1], b[1], 0, Some(imm));
                self.asm.mask_join_bytes(K1, K2, K1);
            }
            return;
        }
        if compared == Compared::F32 {
            self.asm.vector_with(op, MASK, a[0], b[0], 0, Some(imm));
            self.asm.vector(AVX2_SIGNS32, R11, 0, Source::Register(MASK), 0);
            return;
        }
        for half in 0..if wide { 2 } else { 1 } {
            self.compare_integers(compared, imm, a[half], b[half]);
            let signs = if wide { AVX2_SIGNS64 } else { AVX2_SIGNS32 };
            let to = if half == 0 { R11 } else { R10 };
            self.asm.vector(signs, to, 0, Source::Register(MASK), 0);
        }
        if wide {
            self.asm.shift_left(R10, 4);
            self.asm.or(R11, R10);
        }
        let opposite = match (compared, imm) {
            (_, EQ | NE) => imm == NE,
            (Compared::Unsigned(Width::W32), _) => matches!(imm, LT | GT),
            _ => matches!(imm, LE | GE),
        };
        if opposite {
            self.asm.not(R11);
        }
    }

    /// MASK = a comparison of integers with AVX2, or its opposite: that of `ne`, that of `lt` and
    /// `gt` for unsigned numbers of 32 bits, and that of `le` and `ge` for others.
    fn compare_integers(&mut self, compared: Compared, imm: u8, a: u8, b: Source) {
        let width = match compared {
            Compared::Unsigned(width) | Compared::Signed(width) => width,
            Compared::F32 => return,
        };
        let (equal, greater) = match width {
            Width::W32 => (AVX2_EQUAL32, AVX2_GREATER32),
            Width::W64 => (AVX2_EQUAL64, AVX2_GREATER64),
        };
        match (compared, imm) {
            (_, EQ | NE) => self.asm.vector(equal, MASK, a, b, 0),
            (Compared::Unsigned(Width::W32), _) => {
                let least = matches!(imm, LE | GT);
                let op = binary(if least { Binary::MinUnsigned } else { Binary::MaxUnsigned }, width);
                self.asm.vector(op, MASK, a, b, 0);
                self.asm.vector(equal, MASK, MASK, Source::Register(a), 0);
            }
            _ => {
                let (mut left, mut right) = (a, b);
                if let Compared::Unsigned(_) = compared {
                    // The order of signed numbers, once the upper bits are turned over.
                    let sign = Source::Wide(1 << 63);
                    self.bring(T0, b);
                    self.asm.vector(XOR64, T0, T0, sign, 0);
                    self.bring(T1, Source::Register(a));
                    self.asm.vector(XOR64, T1, T1, sign, 0);
                    (left, right) = (T1, Source::Register(T0));
                }
                if matches!(imm, LT | GE) {
                    self.bring(T0, right);
                    (left, right) = (T0, Source::Register(left));
                }
                self.asm.vector(greater, MASK, left, right, 0);
            }
        }
    }

    /// f32 to bf16 in the upper half of 32 bits, below which anything may be.
    fn round_bf16(&mut self, to: u8, v: u8) {
        self.shift(Shift::Right, Width::W32, to, Source::Register(v), 16);
        self.asm.vector(AND32, to, to, Source::Constant(1), 0);
        self.asm.vector(ADD32, to, to, Source::Register(v), 0);
        self.asm.vector(ADD32, to, to, Source::Constant(0x7fff), 0);
        self.unordered(v);
        self.blend(File::R32, to, to, Source::Constant(0x7fff_0000), K1);
    }

    /// A load of parameters, from `at` on: all lanes get the same.
    fn parameters(&mut self, a: &Access, guard: u32, at: u32) -> Option<()> {
        let (file, op) = match (a.wide, self.program.target) {
            (false, _) => (File::R32, BROADCAST32),
            (true, Target::Avx512) => (File::R64, BROADCAST64),
            (true, Target::Avx2) => (File::R64, AVX2_BROADCAST64),
        };
        for (e, &slot) in (0..).zip(&a.regs[..usize::from(a.n)]) {
            let size = i32::from(a.bytes);
            let d = self.fresh()?;
            self.asm.load_wide(R10, Mem { base: R9, offset: PARAMETERS });
            let from = Source::Memory(Mem { base: R10, offset: at as i32 + e * size });
            self.asm.vector_sized(op, d, from, size);
            // The other half of 64 bits is in the same register.
            self.define(guard, (file, slot), [d, d])?;
        }
        Some(())
    }

    fn instruction(&mut self, i: usize) -> Option<()> {
        let inst = &self.program.code[i];
        let guard = inst.guard;
        if let (Part::Parameters(at), Op::Ld(a)) = (self.program.parts[i], &inst.op) {
            return self.parameters(a, guard, at);
        }
        let Op::Alu { s, native, .. } = &inst.op else { return None };
        let r32 = |n: usize| (File::R32, s[n]);
        let r64 = |n: usize| (File::R64, s[n]);
        let of = |width: Width, n: usize| (if width == Width::W64 { File::R64 } else { File::R32 }, s[n]);
        let halves = |width: Width| if width == Width::W64 { 2 } else { 1 };
        match *native {
            Native::Function => return None,
            Native::Unary(Unary::Move, width) => {
                let a = self.value(of(width, 1))?;
                self.define(guard, of(width, 0), a)?;
            }
            Native::Unary(op, width) => {
                let wide = width == Width::W64;
                let a = self.source(of(width, 1))?;
                let d = self.fresh_for(of(width, 0))?;
                for half in 0..halves(width) {
                    match op {
                        Unary::Move => {}
                        Unary::Not => {
                            self.bring(d[half], a[half]);
                            self.asm.vector(XOR32, d[half], d[half], Source::Constant(u32::MAX), 0);
                        }
                        Unary::Negate => {
                            let zero = Source::Register(T0);
                            self.asm.vector(XOR32, T0, T0, zero, 0);
                            let sub = Vector(1, 1, wide, if wide { 0xfb } else { 0xfa });
                            self.asm.vector(sub, d[half], T0, a[half], 0);
                        }
                        Unary::CountOnes => self.asm.vector(Vector(2, 1, wide, 0x55), d[half], 0, a[half], 0),
                        Unary::LeadingZeros => {
                            self.asm.vector(Vector(2, 1, wide, 0x44), d[half], 0, a[half], 0)
                        }
                    }
                }
                self.define(guard, of(width, 0), d)?;
            }
            Native::Binary(op, width) => {
                let a = self.value(of(width, 1))?;
                let b = self.source(of(width, 2))?;
                let d = self.fresh_for(of(width, 0))?;
                for half in 0..halves(width) {
                    match op {
                        Binary::Mul => self.multiply(width, d[half], a[half], b[half]),
                        _ => self.asm.vector(binary(op, width), d[half], a[half], b[half], 0),
                    }
                }
                self.define(guard, of(width, 0), d)?;
            }
            Native::Shift(op, width) => {
                let wide = width == Width::W64;
                if let Some(n) = self.constant(r32(2)) {
                    let a = self.source(of(width, 1))?;
                    let d = self.fresh_for(of(width, 0))?;
                    for half in 0..halves(width) {
                        self.shift(op, width, d[half], a[half], n.min(255) as u8);
                    }
                    return self.define(guard, of(width, 0), d);
                }
                let opcode = match op {
                    Shift::Left => 0x47,
                    Shift::Right => 0x45,
                    Shift::RightSigned => 0x46,
                };
                let a = self.value(of(width, 1))?;
                let d = self.fresh_for(of(width, 0))?;
                if wide {
                    for half in 0..2 {
                        self.extend(s[2], half, false, T0)?;
                        let n = Source::Register(T0);
                        self.asm.vector(Vector(2, 1, true, opcode), d[half], a[half], n, 0);
                    }
                } else {
                    let n = self.source(r32(2))?;
                    self.asm.vector(Vector(2, 1, false, opcode), d[0], a[0], n[0], 0);
                }
                self.define(guard, of(width, 0), d)?;
            }
            Native::MultiplyAdd(width) => {
                let a = self.value(of(width, 1))?;
                let b = self.source(of(width, 2))?;
                let c = self.source(of(width, 3))?;
                let d = self.fresh_for(of(width, 0))?;
                let add = if width == Width::W64 { ADD64 } else { ADD32 };
                for half in 0..halves(width) {
                    self.multiply(width, d[half], a[half], b[half]);
                    self.asm.vector(add, d[half], d[half], c[half], 0);
                }
                self.define(guard, of(width, 0), d)?;
            }
            Native::Divide { remainder } => {
                let d = self.fresh()?;
                let (a, b) = (self.value(r32(1))?, self.value(r32(2))?);
                // A quotient of such numbers, rounded to 53 bits, never reaches the next integer.
                for (half, to) in [d, T1].into_iter().enumerate() {
                    self.unsigned_to_f64(s[1], half, T2)?;
                    self.unsigned_to_f64(s[2], half, T3)?;
                    self.asm.vector(DIVIDE_F64, to, T2, Source::Register(T3), 0);
                }
                self.f64_to_unsigned(d, T1);
                if remainder {
                    self.asm.vector(MUL32, T1, d, Source::Register(b[0]), 0);
                    self.asm.vector(binary(Binary::Sub, Width::W32), d, a[0], Source::Register(T1), 0);
                }
                self.zeros(b[0]);
                self.blend(File::R32, d, d, Source::Constant(u32::MAX), K1);
                self.define(guard, r32(0), [d, 0])?;
            }
            Native::MultiplyWide { signed } | Native::MultiplyAddWide { signed } => {
                let d = self.fresh_for(r64(0))?;
                let op = if signed { MULTIPLY_WIDE_SIGNED } else { MULTIPLY_WIDE };
                let adds = matches!(native, Native::MultiplyAddWide { .. });
                for (half, to) in d.into_iter().enumerate() {
                    // The upper halves do not matter to the product.
                    self.extend(s[1], half, false, T0)?;
                    self.extend(s[2], half, false, T1)?;
                    self.asm.vector(op, to, T0, Source::Register(T1), 0);
                }
                if adds {
                    let c = self.source(r64(3))?;
                    for half in 0..2 {
                        self.asm.vector(ADD64, d[half], d[half], c[half], 0);
                    }
                }
                self.define(guard, r64(0), d)?;
            }
            Native::Select(width) => {
                let a = self.source(of(width, 1))?;
                let b = self.value(of(width, 2))?;
                let d = self.fresh_for(of(width, 0))?;
                let file = of(width, 0).0;
                for half in 0..halves(width) {
                    self.load_lanes(K1, s[3], half, file);
                    self.blend(file, d[half], b[half], a[half], K1);
                }
                self.define(guard, of(width, 0), d)?;
            }
            Native::Extend { signed } => {
                let d = self.fresh_for(r64(0))?;
                for (half, to) in d.into_iter().enumerate() {
                    self.extend(s[1], half, signed, to)?;
                }
                self.define(guard, r64(0), d)?;
            }
            Native::Truncate => {
                let a = self.value(r64(1))?;
                let d = self.fresh()?;
                self.truncate(d, a);
                self.define(guard, r32(0), [d, 0])?;
            }
            Native::Keep(bits) => {
                let a = self.value(r32(1))?;
                let d = self.fresh()?;
                self.asm.vector(AND32, d, a[0], Source::Constant(u32::MAX >> (32 - bits)), 0);
                self.define(guard, r32(0), [d, 0])?;
            }
            Native::Float(op) => {
                let a = self.value(r32(1))?;
                let b = self.source(r32(2))?;
                let d = self.fresh()?;
                let opcode = match op {
                    Float::Add => 0x58,
                    Float::Sub => 0x5c,
                    Float::Mul => 0x59,
                };
                self.asm.vector(Vector(1, 0, false, opcode), d, a[0], b[0], 0);
                self.canonical(d);
                self.define(guard, r32(0), [d, 0])?;
            }
            Native::FusedMultiplyAdd => {
                let a = self.source(r32(1))?;
                let b = self.value(r32(2))?;
                let c = self.source(r32(3))?;
                let d = self.fresh()?;
                self.bring(d, a[0]);
                self.asm.vector(FMA, d, b[0], c[0], 0);
                self.canonical(d);
                self.define(guard, r32(0), [d, 0])?;
            }
            Native::PackBf16 => {
                let (a, b) = (self.value(r32(1))?, self.value(r32(2))?);
                let d = self.fresh()?;
                self.round_bf16(T1, b[0]);
                self.shift(Shift::Right, Width::W32, T1, Source::Register(T1), 16);
                self.round_bf16(T0, a[0]);
                self.asm.vector(AND32, d, T0, Source::Constant(0xffff_0000), 0);
                self.asm.vector(OR32, d, d, Source::Register(T1), 0);
                self.define(guard, r32(0), [d, 0])?;
            }
            Native::WidenBf16 => {
                let a = self.source(r32(1))?;
                let d = self.fresh()?;
                self.shift(Shift::Left, Width::W32, d, a[0], 16);
                self.define(guard, r32(0), [d, 0])?;
            }
            Native::Split => {
                let a = self.value(r64(0))?;
                let (low, high) = (self.fresh()?, self.fresh()?);
                self.truncate(low, a);
                for (to, from) in [(T1, a[0]), (T2, a[1])] {
                    self.shift(Shift::Right, Width::W64, to, Source::Register(from), 32);
                }
                self.truncate(high, [T1, T2]);
                self.define(guard, r32(1), [low, 0])?;
                self.define(guard, r32(2), [high, 0])?;
            }
            Native::Join => {
                let d = self.fresh_for(r64(0))?;
                for (half, to) in d.into_iter().enumerate() {
                    self.extend(s[1], half, false, T0)?;
                    self.extend(s[2], half, false, to)?;
                    self.shift(Shift::Left, Width::W64, to, Source::Register(to), 32);
                    self.asm.vector(Vector(1, 1, true, 0xeb), to, to, Source::Register(T0), 0);
                }
                self.define(guard, r64(0), d)?;
            }
            Native::Compare(compared, imm) => {
                let file = match compared {
                    Compared::Unsigned(Width::W64) | Compared::Signed(Width::W64) => File::R64,
                    _ => File::R32,
                };
                let a = self.value((file, s[2]))?;
                let b = self.source((file, s[3]))?;
                self.compare(compared, imm, a, b);
                // The opposite first: the guard, and the combination, may be the other result.
                self.put_comparison(guard, s);
            }
            Native::Logic(op) => {
                let at = self.predicate(s[1]);
                self.load_part(RAX, at);
                let at = self.predicate(s[2]);
                match op {
                    Logic::Move => {}
                    Logic::Not => self.asm.not(RAX),
                    Logic::And | Logic::Or | Logic::Xor => {
                        self.load_part(R10, at);
                        match op {
                            Logic::And => self.asm.and(RAX, R10),
                            Logic::Or => self.asm.or(RAX, R10),
                            _ => self.asm.xor(RAX, R10),
                        }
                    }
                }
                self.define_predicate(guard, s[0]);
            }
        }
        Some(())
    }

    /// Stores the comparison of [`Translator::compare`], and its opposite, combined with the
    /// predicate of slot 5.
    fn put_comparison(&mut self, guard: u32, s: &[u32; 6]) {
        let [p, q, _, _, c, combine] = *s;
        // Both results are computed from the predicates as they were.
        if q != SINK {
            self.combined(c, combine, true);
            self.asm.store_wide(Mem { base: RSP, offset: SAVED }, RAX);
        }
        self.combined(c, combine, false);
        if q == SINK {
            self.define_predicate(guard, p);
            return;
        }
        // The guard may be one of the results, so it is applied to both before either changes.
        self.asm.store_wide(Mem { base: RSP, offset: SAVED + 8 }, RAX);
        if guard != NO_GUARD {
            let at = self.predicate(guard & !GUARD_NOT);
            self.load_part(RAX, at);
            self.asm.store_wide(Mem { base: RSP, offset: SAVED + 16 }, RAX);
        }
        for (slot, at) in [(q, SAVED), (p, SAVED + 8)] {
            if slot == SINK {
                continue;
            }
            self.asm.load_wide(RAX, Mem { base: RSP, offset: at });
            if guard != NO_GUARD {
                self.asm.load_wide(R11, Mem { base: RSP, offset: SAVED + 16 });
                self.keep_unguarded(guard, slot);
            }
            self.define_predicate(NO_GUARD, slot);
        }
    }

    /// RAX = the comparison of [`Translator::compare`], or its opposite, combined.
    fn combined(&mut self, c: u32, combine: u32, opposite: bool) {
        match self.program.target {
            Target::Avx512 => self.asm.mask_to_general(RAX, K1),
            Target::Avx2 => self.asm.copy(RAX, R11),
        }
        if opposite {
            self.asm.not(RAX);
        }
        if combine != 0 {
            let at = self.predicate(c);
            self.load_part(R10, at);
            match combine {
                1 => self.asm.and(RAX, R10),
                2 => self.asm.or(RAX, R10),
                _ => self.asm.xor(RAX, R10),
            }
        }
    }

    /// Two halves of f64, none below zero, as integers of 32 bits in `d`, which has the first half.
    fn f64_to_unsigned(&mut self, d: u8, second: u8) {
        match self.program.target {
            Target::Avx512 => {
                for half in [d, second] {
                    self.asm.vector(F64_TO_UNSIGNED, half, 0, Source::Register(half), 0);
                }
                self.asm.vector_with(JOIN_HALVES, d, d, Source::Register(second), 0, Some(1));
            }
            Target::Avx2 => {
                for half in [d, second] {
                    let mode = Some(TOWARDS_ZERO);
                    self.asm.vector_with(AVX2_ROUND64, half, 0, Source::Register(half), 0, mode);
                    self.asm.vector(AVX2_ADD_F64, half, half, F64_OF_INTEGERS, 0);
                }
                self.truncate(d, [d, second]);
            }
        }
    }

    /// The low 32 bits of each lane of 64. `d` is neither operand, but perhaps the first one with
    /// AVX2.
    fn truncate(&mut self, d: u8, a: [u8; 2]) {
        if self.program.target == Target::Avx2 {
            // Both halves of each register by turns, and then in order.
            self.asm.vector_with(AVX2_PICK32, d, a[0], Source::Register(a[1]), 0, Some(0x88));
            self.asm.vector_with(AVX2_ORDER64, d, 0, Source::Register(d), 0, Some(0xd8));
            return;
        }
        self.asm.vector(TRUNCATE, a[0], 0, Source::Register(d), 0);
        self.asm.vector(TRUNCATE, a[1], 0, Source::Register(T0), 0);
        self.asm.vector_with(JOIN_HALVES, d, d, Source::Register(T0), 0, Some(1));
    }
}

fn binary(op: Binary, width: Width) -> Vector {
    let wide = width == Width::W64;
    let (map, opcode) = match (op, wide) {
        (Binary::Add, false) => (1, 0xfe),
        (Binary::Add, true) => (1, 0xd4),
        (Binary::Sub, false) => (1, 0xfa),
        (Binary::Sub, true) => (1, 0xfb),
        (Binary::Mul, _) => (2, 0x40),
        (Binary::And, _) => (1, 0xdb),
        (Binary::Or, _) => (1, 0xeb),
        (Binary::Xor, _) => (1, 0xef),
        (Binary::MinUnsigned, _) => (2, 0x3b),
        (Binary::MinSigned, _) => (2, 0x39),
        (Binary::MaxUnsigned, _) => (2, 0x3f),
        (Binary::MaxSigned, _) => (2, 0x3d),
    };
    Vector(map, 1, wide, opcode)
}
