//! Random modules: which forms, on which values, as PTX text.

use std::fmt::Write as _;

use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::forms::Form;
use super::kind::{Kind, relate};

/// Threads of a block: one full warp, and one that is not.
pub const THREADS: usize = 40;
/// Blocks of the launch.
pub const BLOCKS: usize = 2;
/// Threads of the launch: each has operands of its own.
pub const LANES: usize = THREADS * BLOCKS;
/// Instruction forms of a module.
const USES: usize = 24;

/// Contents of a result register before the instruction. The register keeps them if a guard is
/// false.
pub const BEFORE: u64 = 0x5a5a_1234_5a5a_1234;

/// A form on given operands.
pub struct Use {
    /// Number of the form.
    pub form: usize,
    /// The operands, one row of lanes each.
    pub operands: Vec<Vec<u64>>,
    /// Whether an operand is written as a literal; its lanes are equal then.
    pub literal: Option<usize>,
    /// The lanes in which the instruction is executed, where a predicate guards it.
    pub guard: Option<Vec<u64>>,
}

impl Use {
    /// The bits that the result register of a lane holds afterwards, when the form evaluates to
    /// `value`.
    pub fn expected(&self, form: &Form, lane: usize) -> u64 {
        if self.guard.as_ref().is_some_and(|guard| guard[lane] == 0) {
            return BEFORE & (u64::MAX >> (64 - form.result.bits()));
        }
        let operands: Vec<u64> = self.operands.iter().map(|row| row[lane]).collect();
        (form.eval)(&operands)
    }
}

/// A kernel `fuzz(in, out)`, all of whose threads do the same on other values.
pub struct Module {
    /// Its instruction forms, in order.
    pub uses: Vec<Use>,
    /// PTX.
    pub text: String,
}

impl Module {
    /// The words of `in`: the rows of all uses, one after the other.
    pub fn input(&self) -> Vec<u64> {
        self.uses.iter().flat_map(|u| u.operands.iter().chain(&u.guard)).flatten().copied().collect()
    }
}

/// The modules of a seed. Forms are dealt like cards: none comes a second time before all have come
/// once.
pub fn random(forms: &[Form], seed: u64, modules: usize) -> Vec<Module> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut deck: Vec<usize> = Vec::new();
    let mut deal = |rng: &mut ChaCha8Rng| {
        if deck.is_empty() {
            deck = (0..forms.len()).collect();
            deck.shuffle(rng);
        }
        deck.pop().unwrap_or(0)
    };
    (0..modules)
        .map(|_| {
            let uses = (0..USES).map(|_| {
                let form = deal(&mut rng);
                random_use(form, &forms[form], &mut rng)
            });
            let uses: Vec<Use> = uses.collect();
            Module { text: text(forms, &uses), uses }
        })
        .collect()
}

fn random_use(number: usize, form: &Form, rng: &mut ChaCha8Rng) -> Use {
    let mut operands: Vec<Vec<u64>> = Vec::new();
    for kind in &form.operands {
        let alike = form.operands[0].bits() == kind.bits() && *kind != Kind::Pred;
        let first = operands.first().filter(|_| alike);
        let row = (0..LANES).map(|lane| match first {
            Some(first) if rng.random_ratio(1, 5) => relate(*kind, first[lane], rng),
            _ => kind.value(rng),
        });
        let row = row.collect();
        operands.push(row);
    }
    // One literal at most, and never the only operand: the machine is to compute, not the
    // assembler.
    let literal = rng.random_range(0..4 * form.operands.len());
    let literal = Some(literal)
        .filter(|&i| form.is_single() && i < form.operands.len() && form.operands.len() > 1)
        .filter(|&i| form.operands[i].may_be_literal());
    if let Some(i) = literal {
        // The assembler takes no greater positions of bits.
        let limit = if matches!(form.operands[i], Kind::Count | Kind::ByteCount) { 0xff } else { u64::MAX };
        let value = operands[i][0] & limit;
        operands[i].fill(value);
    }
    // H200 departs from the manual where a guard of `set` is false (docs/KERNELS.md).
    let may_guard = form.is_single() && form.result != Kind::Pred && !form.text.starts_with("set.");
    let guard =
        (may_guard && rng.random_ratio(1, 4)).then(|| (0..LANES).map(|_| Kind::Pred.value(rng)).collect());
    Use { form: number, operands, literal, guard }
}

fn text(forms: &[Form], uses: &[Use]) -> String {
    let mut body = String::new();
    // Writing to a string does not fail.
    let mut line = |text: std::fmt::Arguments| {
        let _ = writeln!(body, "    {text}");
    };
    // Registers of all kinds are numbered in one sequence.
    let mut registers = 0;
    let mut row = 0;
    for (number, u) in uses.iter().enumerate() {
        let form = &forms[u.form];
        let mut instruction = form.text.clone();
        let result = format!("%{}{registers}", form.result.register());
        registers += 1;
        for (i, kind) in form.operands.iter().enumerate() {
            let name = match u.literal == Some(i) {
                true => u.operands[i][0].to_string(),
                false => format!("%{}{registers}", kind.register()),
            };
            if u.literal != Some(i) {
                load(&mut line, *kind, &name, row);
            }
            row += 1;
            registers += 1;
            instruction = instruction.replace(&format!("${}", i + 1), &name);
        }
        instruction = instruction.replace("$0", &result);
        if u.guard.is_some() {
            load(&mut line, Kind::Pred, "%g", row);
            row += 1;
            let bits = form.result.bits();
            line(format_args!("mov.b{bits} {result}, {};", BEFORE & (u64::MAX >> (64 - bits))));
            instruction = format!("@%g {instruction}");
        }
        line(format_args!("{instruction}"));
        let at = number * LANES * 8;
        match form.result.bits() {
            1 => {
                line(format_args!("selp.u32 %x, 1, 0, {result};"));
                line(format_args!("st.global.u32 [%out+{at}], %x;"));
            }
            bits => line(format_args!("st.global.u{bits} [%out+{at}], {result};")),
        }
    }
    format!(
        "// What cargo xtask ptx-fuzz makes: {LANES} threads, each with operands of its own.
.version 8.4
.target sm_90
.address_size 64

.visible .entry fuzz(.param .u64 in, .param .u64 out)
{{
    .reg .pred %p<{registers}>;
    .reg .b16 %h<{registers}>;
    .reg .b32 %r<{registers}>;
    .reg .b64 %d<{registers}>;
    .reg .pred %g;
    .reg .pred %q;
    .reg .b32 %x;
    .reg .b32 %y;
    .reg .b64 %u;
    .reg .b64 %in;
    .reg .b64 %out;
    mov.u32 %x, %ctaid.x;
    mov.u32 %y, %tid.x;
    mad.lo.u32 %x, %x, {THREADS}, %y;
    mul.wide.u32 %u, %x, 8;
    ld.param.u64 %in, [in];
    ld.param.u64 %out, [out];
    add.u64 %in, %in, %u;
    add.u64 %out, %out, %u;
{body}    ret;
}}
"
    )
}

fn load(line: &mut impl FnMut(std::fmt::Arguments), kind: Kind, name: &str, row: usize) {
    let at = row * LANES * 8;
    match kind.bits() {
        1 => {
            line(format_args!("ld.global.u32 %x, [%in+{at}];"));
            line(format_args!("setp.ne.u32 {name}, %x, 0;"));
        }
        bits => line(format_args!("ld.global.u{bits} {name}, [%in+{at}];")),
    }
}
