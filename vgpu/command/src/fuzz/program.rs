//! Random programs: which forms, in which order and control flow, on which values; and their PTX.
//!
//! A program is one kernel. All threads run it, on values of their own. Its registers hold values
//! of the input at first, so that a program with any of its steps left out is a program as well:
//! that is what shrinking needs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::forms::{Form, Needs};
use super::kind::{Format, Kind, relate};

/// Blocks of a launch.
pub const BLOCKS: usize = 2;
/// Instruction forms of a program whose instructions are apart.
pub const APART: usize = 24;
/// Steps of another program, control flow aside.
const STEPS: std::ops::Range<usize> = 12..40;
/// Forms of each deck by which such a program starts behind the one before.
pub const DEALT: usize = 5;
/// Registers that the steps of a program share, by their letter.
const POOLS: [(char, usize); 4] = [('p', 6), ('h', 6), ('r', 10), ('d', 8)];
/// Arms of a branch by index.
const ARMS: usize = 4;
/// How deep branches and loops stand in one another.
const DEPTH: usize = 2;

/// Contents of a result register in front of a guarded instruction that is apart. The register
/// keeps them where the guard is false.
const BEFORE: u64 = 0x5a5a_1234_5a5a_1234;

/// How the instructions of a program depend on each other, and which values are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Each has operands of its own. Each result is compared.
    Apart,
    /// They use results of earlier ones. Each result is compared.
    Traced,
    /// They use results of earlier ones. Registers and memory are compared at the end, so that an
    /// assembler is free to combine instructions.
    Chained,
}

/// A program.
#[derive(Clone, Debug)]
pub struct Program {
    pub style: Style,
    /// Threads of a block.
    pub threads: usize,
    /// Rows of input: a value for each thread of the launch.
    pub rows: Vec<Vec<u64>>,
    pub steps: Vec<Step>,
}

/// A step, with an id that stays the same when others are left out.
#[derive(Clone, Debug)]
pub struct Step {
    pub id: usize,
    pub what: What,
}

#[derive(Clone, Debug)]
pub enum What {
    Do(Use),
    /// A branch that lanes may take apart, by its arms.
    Branch {
        on: Choice,
        arms: Vec<Vec<Step>>,
    },
    Loop {
        turns: Turns,
        body: Vec<Step>,
    },
}

/// The value that decides which arm of a branch a lane takes.
#[derive(Clone, Copy, Debug)]
pub enum Choice {
    /// The first of two where a predicate is true.
    Predicate(Source),
    /// One of [`ARMS`], by the low bits of a value.
    Index(Source),
}

/// How often a loop runs.
#[derive(Clone, Copy, Debug)]
pub enum Turns {
    /// The same in all threads.
    All(u32),
    /// 1 to 4 times, by the low bits of a value of each lane.
    Each(Source),
}

/// A form on given operands.
#[derive(Clone, Debug)]
pub struct Use {
    /// Number of the form.
    pub form: usize,
    pub operands: Vec<Source>,
    /// The register of the result: its letter, and its number in the pool.
    pub result: (char, usize),
    /// The predicate that guards it, and whether it must be false.
    pub guard: Option<(Source, bool)>,
    /// Random bits for the letters of [`effects`](super::effects).
    pub drawn: u32,
}

/// Where an operand comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// A row of the input.
    Row(usize),
    /// A register, by its number in the pool of its letter.
    Register(char, usize),
    Literal(u64),
}

/// A value that a program leaves for each thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    pub of: Of,
    pub kind: Kind,
    /// The bits of a NaN are open.
    pub any_nan: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Of {
    /// The result of a step.
    Step(usize),
    /// A register at the end.
    Register(String),
    /// Words of the thread in global memory, and words that a block shares.
    Memory,
}

/// A program as PTX.
#[derive(Clone, Debug)]
pub struct Written {
    /// The kernel.
    pub text: String,
    /// Stored values, in order: a row of a word for each thread.
    pub outputs: Vec<Output>,
    /// The instruction of each step as written, by the step's id.
    pub lines: Vec<(usize, String)>,
}

impl Program {
    /// Threads of the launch.
    pub fn lanes(&self) -> usize {
        self.threads * BLOCKS
    }

    /// The words of `in`.
    pub fn input(&self) -> Vec<u64> {
        self.rows.iter().flatten().copied().collect()
    }

    /// All uses, in the order of the text.
    pub fn uses(&self) -> Vec<(usize, &Use)> {
        fn collect<'a>(steps: &'a [Step], all: &mut Vec<(usize, &'a Use)>) {
            for step in steps {
                match &step.what {
                    What::Do(one) => all.push((step.id, one)),
                    What::Branch { arms, .. } => arms.iter().for_each(|arm| collect(arm, all)),
                    What::Loop { body, .. } => collect(body, all),
                }
            }
        }
        let mut all = vec![];
        collect(&self.steps, &mut all);
        all
    }

    /// The operands of a use in a lane, where they are known without running the program: no other
    /// step writes a register that they are in. `None` where the guard is false, too.
    pub fn operands(&self, of: &Use, lane: usize) -> Option<Vec<u64>> {
        let only = matches!(&self.steps[..], [Step { what: What::Do(_), .. }]);
        let written: BTreeSet<(char, usize)> = match self.style {
            _ if only => BTreeSet::new(),
            Style::Apart => BTreeSet::new(),
            _ => self.uses().into_iter().map(|(_, one)| one.result).collect(),
        };
        let value = |source: &Source| match *source {
            Source::Literal(value) => Some(value),
            Source::Row(row) => Some(self.rows[row][lane]),
            Source::Register(letter, number) => {
                (!written.contains(&(letter, number))).then(|| self.rows[initial(letter, number)][lane])
            }
        };
        if let Some((guard, negated)) = &of.guard
            && (value(guard)? == 1) == *negated
        {
            return None;
        }
        of.operands.iter().map(value).collect()
    }

    /// The result that the manual gives a use whose operands are known.
    pub fn by_the_manual(&self, forms: &[Form], of: &Use, lane: usize) -> Option<u64> {
        let form = &forms[of.form];
        let eval = form.eval.as_ref()?;
        match (self.operands(of, lane), &of.guard) {
            (Some(operands), _) => {
                let fixed = form.operands.iter().zip(operands);
                let fixed: Vec<u64> = fixed.map(|(kind, value)| fit(*kind, value)).collect();
                Some(eval(&fixed))
            }
            (None, Some((Source::Row(_), _))) if self.style == Style::Apart => {
                Some(BEFORE & (u64::MAX >> (64 - form.result.bits())))
            }
            _ => None,
        }
    }

    /// Registers that the steps use at all, in order.
    fn registers(&self) -> BTreeSet<(char, usize)> {
        fn add(source: &Source, all: &mut BTreeSet<(char, usize)>) {
            if let Source::Register(letter, number) = *source {
                all.insert((letter, number));
            }
        }
        fn conditions(steps: &[Step], all: &mut BTreeSet<(char, usize)>) {
            for step in steps {
                match &step.what {
                    What::Do(_) => {}
                    What::Branch { on: Choice::Predicate(on) | Choice::Index(on), arms } => {
                        add(on, all);
                        arms.iter().for_each(|arm| conditions(arm, all));
                    }
                    What::Loop { turns, body } => {
                        if let Turns::Each(source) = turns {
                            add(source, all);
                        }
                        conditions(body, all);
                    }
                }
            }
        }
        let mut all = BTreeSet::new();
        conditions(&self.steps, &mut all);
        for (_, one) in self.uses() {
            one.operands
                .iter()
                .chain(one.guard.iter().map(|(guard, _)| guard))
                .for_each(|s| add(s, &mut all));
            all.insert(one.result);
        }
        all
    }

    /// Its PTX, as a kernel of this name.
    pub fn write(&self, forms: &[Form], name: &str) -> Written {
        Writer::new(self, forms).finish(name)
    }
}

/// The row of a pool register's initial value.
fn initial(letter: char, number: usize) -> usize {
    let before: usize = POOLS.iter().take_while(|(other, _)| *other != letter).map(|(_, count)| count).sum();
    before + number
}

/// Rows of the pools' initial values.
fn pool_rows() -> usize {
    POOLS.iter().map(|(_, count)| count).sum()
}

/// An operand as its kind allows it: the program's text does the same.
fn fit(kind: Kind, value: u64) -> u64 {
    match kind {
        Kind::Divisor(_) => value.max(1),
        Kind::ByteCount => value & 0xff,
        _ => value,
    }
}

/// Draws programs from decks of forms: none comes a second time before all have come once.
pub struct Dealer<'a> {
    forms: &'a [Form],
    seed: u64,
}

impl<'a> Dealer<'a> {
    pub fn new(forms: &'a [Form], seed: u64) -> Self {
        Self { forms, seed }
    }

    /// Program `number` of this style. It depends on the seed and the number alone.
    pub fn program(&self, number: u64, style: Style) -> Program {
        let mut rng =
            ChaCha8Rng::seed_from_u64(self.seed ^ number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        match style {
            Style::Apart => self.apart(number, &mut rng),
            _ => Drawing::new(self, number, style, &mut rng).program(),
        }
    }

    fn apart(&self, number: u64, rng: &mut ChaCha8Rng) -> Program {
        let formulas: Vec<usize> =
            (0..self.forms.len()).filter(|form| self.forms[*form].eval.is_some()).collect();
        let mut program = Program { style: Style::Apart, threads: 40, rows: vec![], steps: vec![] };
        for at in 0..APART {
            let card = (number as usize).wrapping_mul(APART).wrapping_add(at);
            let mut deck = formulas.clone();
            let round = card / deck.len();
            deck.shuffle(&mut ChaCha8Rng::seed_from_u64(self.seed ^ round as u64));
            let form = deck[card % deck.len()];
            let one = apart_use(form, &self.forms[form], &mut program, rng);
            program.steps.push(Step { id: at, what: What::Do(one) });
        }
        program
    }
}

fn apart_use(number: usize, form: &Form, program: &mut Program, rng: &mut ChaCha8Rng) -> Use {
    let lanes = program.lanes();
    let mut rows: Vec<Vec<u64>> = Vec::new();
    for kind in &form.operands {
        let alike = form.operands[0].bits() == kind.bits() && *kind != Kind::Pred;
        let first = rows.first().filter(|_| alike);
        let row = (0..lanes).map(|lane| match first {
            Some(first) if rng.random_ratio(1, 5) => relate(*kind, first[lane], rng),
            _ => kind.value(rng),
        });
        let row = row.collect();
        rows.push(row);
    }
    // One literal at most, and never the only operand: the machine is to compute, not the
    // assembler.
    let literal = rng.random_range(0..4 * form.operands.len());
    let literal = Some(literal)
        .filter(|&i| form.is_single() && i < form.operands.len() && form.operands.len() > 1)
        .filter(|&i| form.operands[i].may_be_literal());
    let operands = rows.into_iter().enumerate().map(|(i, row)| {
        if literal == Some(i) {
            return Source::Literal(literal_of(form.operands[i], row[0]));
        }
        program.rows.push(row);
        Source::Row(program.rows.len() - 1)
    });
    let operands = operands.collect();
    let guard = form.may_be_guarded() && rng.random_ratio(1, 4);
    let guard = guard.then(|| {
        program.rows.push((0..lanes).map(|_| Kind::Pred.value(rng)).collect());
        (Source::Row(program.rows.len() - 1), rng.random())
    });
    Use { form: number, operands, result: (form.result.register(), 0), guard, drawn: rng.random() }
}

/// The assembler takes no greater positions of bits.
fn literal_of(kind: Kind, value: u64) -> u64 {
    value & if matches!(kind, Kind::Count | Kind::ByteCount) { 0xff } else { u64::MAX }
}

/// Threads that are together at a place of a program.
#[derive(Clone, Copy)]
struct Place {
    depth: usize,
    /// The forms that may stand here.
    most: Needs,
}

/// A program that is being drawn.
struct Drawing<'a, 'r> {
    forms: &'a [Form],
    rng: &'r mut ChaCha8Rng,
    program: Program,
    ids: usize,
    /// Forms with a formula, and the others.
    decks: [VecDeque<usize>; 2],
}

impl<'a, 'r> Drawing<'a, 'r> {
    fn new(dealer: &Dealer<'a>, number: u64, style: Style, rng: &'r mut ChaCha8Rng) -> Self {
        let threads = [64, 64, 96, 40][rng.random_range(0..4)];
        let mut program = Program { style, threads, rows: vec![], steps: vec![] };
        for (letter, count) in POOLS {
            for _ in 0..count {
                let kind = kind_of(letter, rng);
                program.rows.push((0..threads * BLOCKS).map(|_| kind.value(rng)).collect());
            }
        }
        let forms = dealer.forms;
        let decks = [true, false].map(|formula| {
            let may_come =
                |form: &usize| forms[*form].eval.is_some() == formula && !forms[*form].may_be_contracted();
            let mut deck: Vec<usize> = (0..forms.len()).filter(may_come).collect();
            // Each program begins where the one before it may have ended.
            let (length, card) = (deck.len().max(1), (number as usize).wrapping_mul(DEALT));
            deck.shuffle(&mut ChaCha8Rng::seed_from_u64(dealer.seed ^ (card / length) as u64));
            deck.rotate_left(card % length);
            deck.into()
        });
        Self { forms, rng, program, ids: 0, decks }
    }

    fn program(mut self) -> Program {
        let steps = self.rng.random_range(STEPS);
        let most = Needs::Block;
        self.program.steps = self.steps(steps, Place { depth: 0, most });
        self.program
    }

    fn steps(&mut self, count: usize, place: Place) -> Vec<Step> {
        (0..count).map(|_| self.step(place)).collect()
    }

    fn step(&mut self, place: Place) -> Step {
        let id = self.ids;
        self.ids += 1;
        let deeper = place.depth < DEPTH;
        let what = match self.rng.random_range(0..20) {
            0 if deeper => {
                let apart = Place { depth: place.depth + 1, most: Needs::Mask };
                let (on, counts) = if self.rng.random_ratio(1, 4) {
                    (Choice::Index(self.source(Kind::Int(32))), vec![2; ARMS])
                } else {
                    (Choice::Predicate(self.source(Kind::Pred)), vec![6, 4])
                };
                let arms = counts.into_iter().map(|most| {
                    let count = self.rng.random_range(0..most);
                    self.steps(count, apart)
                });
                let arms = arms.collect();
                What::Branch { on, arms }
            }
            1 if deeper => {
                let turns = match self.rng.random() {
                    true => Turns::All(self.rng.random_range(2..5)),
                    false => Turns::Each(self.source(Kind::Int(32))),
                };
                let most = if matches!(turns, Turns::All(_)) { place.most } else { Needs::Mask };
                let count = self.rng.random_range(1..7);
                What::Loop { turns, body: self.steps(count, Place { depth: place.depth + 1, most }) }
            }
            _ => What::Do(self.one(place)),
        };
        Step { id, what }
    }

    fn one(&mut self, place: Place) -> Use {
        let number = self.deal(place);
        let form = &self.forms[number];
        let literal = self.rng.random_range(0..8 * form.operands.len().max(1));
        let mut operands: Vec<Source> = form.operands.iter().map(|kind| self.source(*kind)).collect();
        if form.is_single()
            && form.operands.len() > 1
            && form.operands.get(literal).is_some_and(|kind| kind.may_be_literal())
        {
            let kind = form.operands[literal];
            operands[literal] = Source::Literal(literal_of(kind, kind.value(self.rng)));
        }
        let guard = form.may_be_guarded() && self.rng.random_ratio(1, 6);
        let guard = guard.then(|| (self.register('p'), self.rng.random()));
        let result = self.in_pool(form.result.register());
        Use { form: number, operands, result, guard, drawn: self.rng.random() }
    }

    /// The next form that may stand here; the others wait for their place.
    fn deal(&mut self, place: Place) -> usize {
        let whole = self.program.threads.is_multiple_of(32);
        let forms = self.forms;
        let fits = |form: &usize| {
            let needs = forms[*form].needs;
            needs <= place.most
                && (needs != Needs::Warp || whole)
                && (place.depth == 0 || !forms[*form].is_wrong_where_paths_meet())
        };
        let first = usize::from(self.rng.random_ratio(2, 5));
        for deck in [first, 1 - first] {
            let deck = &mut self.decks[deck];
            if let Some(card) = deck.iter().position(fits).and_then(|at| deck.remove(at)) {
                deck.push_back(card);
                return card;
            }
        }
        0
    }

    fn in_pool(&mut self, letter: char) -> (char, usize) {
        let count = POOLS.iter().find(|(other, _)| *other == letter).map_or(1, |(_, count)| *count);
        (letter, self.rng.random_range(0..count))
    }

    fn register(&mut self, letter: char) -> Source {
        let (letter, number) = self.in_pool(letter);
        Source::Register(letter, number)
    }

    /// An operand: an earlier result, or a value of the input that is at the edge of something.
    fn source(&mut self, kind: Kind) -> Source {
        let fresh = matches!(kind, Kind::Float(_) | Kind::Pair(_) | Kind::Count | Kind::ByteCount);
        if self.rng.random_ratio(if fresh { 2 } else { 1 }, 5) {
            let lanes = self.program.lanes();
            self.program.rows.push((0..lanes).map(|_| kind.value(self.rng)).collect());
            return Source::Row(self.program.rows.len() - 1);
        }
        self.register(kind.register())
    }
}

/// A kind of value for a register of this letter.
fn kind_of(letter: char, rng: &mut ChaCha8Rng) -> Kind {
    use Format::*;
    let kinds: &[Kind] = match letter {
        'p' => &[Kind::Pred],
        'h' => &[Kind::Int(16), Kind::Float(F16), Kind::Float(Bf16), Kind::Pair(E4m3), Kind::Pair(E5m2)],
        'r' => {
            &[Kind::Int(32), Kind::Int(32), Kind::Float(F32), Kind::Pair(F16), Kind::Pair(Bf16), Kind::Count]
        }
        _ => &[Kind::Int(64), Kind::Float(F64)],
    };
    kinds[rng.random_range(0..kinds.len())]
}

/// Writes a program as PTX.
struct Writer<'a> {
    program: &'a Program,
    forms: &'a [Form],
    body: String,
    /// Registers of all letters are numbered in one sequence, behind those of the pools.
    registers: usize,
    /// Numbers of masks, counters and labels.
    numbers: usize,
    outputs: Vec<Output>,
    lines: Vec<(usize, String)>,
    /// The forms that write a register of a pool.
    writers: BTreeMap<(char, usize), Vec<&'a Form>>,
}

impl<'a> Writer<'a> {
    fn new(program: &'a Program, forms: &'a [Form]) -> Self {
        let registers = POOLS.iter().map(|(_, count)| *count).max().unwrap_or(0);
        let mut writers: BTreeMap<_, Vec<&Form>> = BTreeMap::new();
        for (_, one) in program.uses() {
            writers.entry(one.result).or_default().push(&forms[one.form]);
        }
        let body = String::new();
        Self { program, forms, body, registers, numbers: 0, outputs: vec![], lines: vec![], writers }
    }

    fn line(&mut self, text: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.body, "    {text}");
    }

    fn fresh(&mut self, kind: Kind) -> String {
        self.registers += 1;
        format!("%{}{}", kind.register(), self.registers - 1)
    }

    fn load(&mut self, kind: Kind, name: &str, row: usize) {
        let at = row * self.program.lanes() * 8;
        match kind.bits() {
            1 => {
                self.line(&format!("ld.global.u32 %x, [%in+{at}];"));
                self.line(&format!("setp.ne.u32 {name}, %x, 0;"));
            }
            bits => self.line(&format!("ld.global.u{bits} {name}, [%in+{at}];")),
        }
    }

    fn store(&mut self, kind: Kind, name: &str, of: Of, any_nan: bool) {
        let at = self.outputs.len() * self.program.lanes() * 8;
        match kind.bits() {
            1 => {
                self.line(&format!("selp.u32 %x, 1, 0, {name};"));
                self.line(&format!("st.global.u32 [%out+{at}], %x;"));
            }
            bits => self.line(&format!("st.global.u{bits} [%out+{at}], {name};")),
        }
        self.outputs.push(Output { of, kind, any_nan });
    }

    /// The register of an operand, or the literal.
    fn source(&mut self, kind: Kind, source: Source) -> String {
        match source {
            Source::Literal(value) => value.to_string(),
            Source::Row(row) => {
                let name = self.fresh(kind);
                self.load(kind, &name, row);
                name
            }
            Source::Register(letter, number) => {
                let name = format!("%{letter}{number}");
                let bits = kind.bits();
                let change = match kind {
                    // Not zero, as `max` leaves it in the manual's value.
                    Kind::Divisor(_) => format!("max.u{bits} "),
                    Kind::ByteCount => format!("and.b{bits} "),
                    _ => return name,
                };
                let fixed = self.fresh(kind);
                let with = if matches!(kind, Kind::ByteCount) { 255 } else { 1 };
                self.line(&format!("{change}{fixed}, {name}, {with};"));
                fixed
            }
        }
    }

    /// Operand `at` of a use: its register, or a copy whose origin is hidden from the assembler.
    fn operand(&mut self, form: &Form, one: &Use, at: usize) -> String {
        let (kind, source) = (form.operands[at], one.operands[at]);
        let name = self.source(kind, source);
        let Source::Register(letter, number) = source else { return name };
        let writers = self.writers.get(&(letter, number)).into_iter().flatten();
        let confused = writers.into_iter().any(|writer| writer.is_forwarded_wrongly_to(form, kind));
        let folded = form.folds_equal_operands() && one.operands[..at].contains(&source);
        if kind == Kind::Pred || !(confused || folded) {
            return name;
        }
        let (bits, copy) = (kind.bits(), self.fresh(kind));
        // Equal copies by the same zero would be one register again.
        let zero = if folded { "nought" } else { "zero" };
        self.line(&format!("xor.b{bits} {copy}, {name}, %{zero}{bits};"));
        copy
    }

    /// The predicate of a guard, or a copy whose origin is hidden from the assembler.
    fn guard(&mut self, source: Source) -> String {
        let name = self.source(Kind::Pred, source);
        let Source::Register(letter, number) = source else { return name };
        let writers = self.writers.get(&(letter, number)).into_iter().flatten();
        if !writers.into_iter().any(|writer| writer.loses_ftz()) {
            return name;
        }
        let copy = self.fresh(Kind::Pred);
        self.line(&format!("selp.b32 %x, 1, 0, {name}; setp.ne.u32 {copy}, %x, %zero32;"));
        copy
    }

    fn steps(&mut self, steps: &[Step], mask: &str) {
        for step in steps {
            match &step.what {
                What::Do(one) => self.one(step.id, one, mask),
                What::Branch { on, arms } => self.branch(*on, arms, mask),
                What::Loop { turns, body } => self.repeat(*turns, body, mask),
            }
        }
    }

    fn one(&mut self, id: usize, one: &Use, mask: &str) {
        let form = &self.forms[one.form];
        let apart = self.program.style == Style::Apart;
        let mut text = form.text.clone();
        let names: Vec<String> = (0..form.operands.len()).map(|at| self.operand(form, one, at)).collect();
        let kind = form.result;
        let result = if apart { self.fresh(kind) } else { format!("%{}{}", one.result.0, one.result.1) };
        let guard = one.guard.map(|(guard, negated)| {
            let guard = self.guard(guard);
            format!("@{}{guard} ", if negated { "!" } else { "" })
        });
        for (i, name) in names.iter().enumerate() {
            text = text.replace(&format!("${}", i + 1), name);
        }
        let draw = one.drawn as usize & 0xffff;
        for (letter, value) in [
            ("$0", result.clone()),
            ("$m", mask.to_owned()),
            ("$t", (draw % self.program.threads).to_string()),
            ("$c", (draw & 0x1f1f).to_string()),
            ("$i", (draw % pool_rows() * self.program.lanes() * 8).to_string()),
            ("$j", (draw % 16).to_string()),
            ("$h", (draw % 8 * 2).to_string()),
            ("$w", (draw % 4 * 4).to_string()),
            ("$e", (draw % 2 * 8).to_string()),
        ] {
            text = text.replace(letter, &value);
        }
        if let Some(guard) = &guard {
            if apart {
                let bits = kind.bits();
                self.line(&format!("mov.b{bits} {result}, {};", BEFORE & (u64::MAX >> (64 - bits))));
            }
            text = format!("{guard}{text}");
        }
        self.line(&text);
        self.lines.push((id, text));
        if form.any_nan && !apart {
            self.one_nan(kind, &result);
        }
        if self.program.style != Style::Chained {
            self.store(kind, &result, Of::Step(id), form.any_nan && apart);
        }
    }

    /// Makes one NaN of all, because the manual leaves their bits open, and later steps would read
    /// them.
    fn one_nan(&mut self, kind: Kind, name: &str) {
        let choose = |writer: &mut Self, format: Format, name: &str| {
            let (bits, ty, nan) = (format.bits().0, format.name(), format.nan());
            writer.line(&format!("setp.nan.{ty} %q, {name}, {name};"));
            writer.line(&format!("selp.b{bits} {name}, {nan}, {name}, %q;"));
        };
        match kind {
            Kind::Float(format) => choose(self, format, name),
            Kind::Pair(format) => {
                self.line(&format!("mov.b32 {{%hx, %hy}}, {name};"));
                choose(self, format, "%hx");
                choose(self, format, "%hy");
                self.line(&format!("mov.b32 {name}, {{%hx, %hy}};"));
            }
            _ => {}
        }
    }

    /// Whether a step needs the mask of active lanes.
    fn needs_mask(&self, steps: &[Step]) -> bool {
        steps.iter().any(|step| match &step.what {
            What::Do(one) => self.forms[one.form].needs > Needs::Nothing,
            What::Branch { arms, .. } => arms.iter().any(|arm| self.needs_mask(arm)),
            What::Loop { body, .. } => self.needs_mask(body),
        })
    }

    fn branch(&mut self, on: Choice, arms: &[Vec<Step>], mask: &str) {
        let n = self.number();
        let asks = arms.iter().any(|arm| self.needs_mask(arm));
        match on {
            Choice::Predicate(on) => {
                let taken = self.source(Kind::Pred, on);
                if asks {
                    self.line(&format!("vote.sync.ballot.b32 %m{n}_0, {taken}, {mask};"));
                    self.line(&format!("not.b32 %m{n}_1, %m{n}_0; and.b32 %m{n}_1, %m{n}_1, {mask};"));
                }
                self.line(&format!("@!{taken} bra L{n}_1;"));
            }
            Choice::Index(on) => {
                let index = self.source(Kind::Int(32), on);
                self.line(&format!("and.b32 %l{n}, {index}, {};", ARMS - 1));
                for arm in (0..arms.len()).filter(|_| asks) {
                    self.line(&format!("setp.eq.u32 %q, %l{n}, {arm};"));
                    self.line(&format!("vote.sync.ballot.b32 %m{n}_{arm}, %q, {mask};"));
                }
                let labels: Vec<String> = (0..arms.len()).map(|arm| format!("L{n}_{arm}")).collect();
                self.line(&format!("T{n}: .branchtargets {};", labels.join(", ")));
                self.line(&format!("brx.idx %l{n}, T{n};"));
            }
        }
        for (at, arm) in arms.iter().enumerate() {
            self.line(&format!("L{n}_{at}:"));
            self.steps(arm, &format!("%m{n}_{at}"));
            if at + 1 < arms.len() {
                self.line(&format!("bra L{n}_end;"));
            }
        }
        self.line(&format!("L{n}_end:"));
    }

    fn repeat(&mut self, turns: Turns, body: &[Step], mask: &str) {
        let n = self.number();
        match turns {
            Turns::All(count) => self.line(&format!("mov.u32 %l{n}, {count};")),
            Turns::Each(source) => {
                let name = self.source(Kind::Int(32), source);
                self.line(&format!("and.b32 %l{n}, {name}, 3; add.u32 %l{n}, %l{n}, 1;"));
            }
        }
        let asks = self.needs_mask(body);
        self.line(&format!("mov.u32 %c{n}, 0;"));
        if asks {
            self.line(&format!("mov.b32 %m{n}_0, {mask};"));
        }
        self.line(&format!("L{n}_again:"));
        self.steps(body, &format!("%m{n}_0"));
        self.line(&format!("add.u32 %c{n}, %c{n}, 1; setp.lt.u32 %a{n}, %c{n}, %l{n};"));
        if asks {
            self.line(&format!("vote.sync.ballot.b32 %m{n}_1, %a{n}, %m{n}_0; mov.b32 %m{n}_0, %m{n}_1;"));
        }
        self.line(&format!("@%a{n} bra L{n}_again;"));
    }

    fn number(&mut self) -> usize {
        self.numbers += 1;
        self.numbers - 1
    }

    fn finish(mut self, name: &str) -> Written {
        let program = self.program;
        let pool = match program.style {
            Style::Apart => BTreeSet::new(),
            _ => program.registers(),
        };
        for (letter, number) in &pool {
            let kind = pool_kind(*letter);
            self.load(kind, &format!("%{letter}{number}"), initial(*letter, *number));
        }
        self.steps(&program.steps, "%full");
        if program.style != Style::Apart {
            for (letter, number) in &pool {
                let register = format!("%{letter}{number}");
                self.store(pool_kind(*letter), &register, Of::Register(register.clone()), false);
            }
        }
        let Self { body, registers, numbers, mut outputs, lines, .. } = self;
        let head = Head { body: &body, threads: program.threads, outputs: outputs.len(), registers, numbers };
        let memory = Output { of: Of::Memory, kind: Kind::Int(64), any_nan: false };
        outputs.extend(vec![memory; if head.names("%cell") || head.names("%gbin") { 3 } else { 0 }]);
        let text = format!(
            ".visible .entry {name}(.param .u64 in, .param .u64 out)\n{{\n{}{body}    ret;\n}}\n",
            head.text()
        );
        Written { text, outputs, lines }
    }
}

/// The kind as which a pool's registers are loaded and stored.
fn pool_kind(letter: char) -> Kind {
    match letter {
        'p' => Kind::Pred,
        'h' => Kind::Int(16),
        'r' => Kind::Int(32),
        _ => Kind::Int(64),
    }
}

/// The declarations and addresses in front of a program's steps.
struct Head<'a> {
    body: &'a str,
    threads: usize,
    outputs: usize,
    registers: usize,
    numbers: usize,
}

impl Head<'_> {
    /// Whether the steps name a register or a variable.
    fn names(&self, name: &str) -> bool {
        self.body.contains(name)
    }

    fn text(&self) -> String {
        let Self { threads, outputs, registers, numbers, .. } = *self;
        let lanes = threads * BLOCKS;
        let mut text = format!(
            "    .reg .pred %p<{registers}>, %q;
    .reg .b16 %h<{registers}>, %hx, %hy;
    .reg .b32 %r<{registers}>, %x, %y;
    .reg .b64 %d<{registers}>, %u, %v, %in, %out;
"
        );
        let mut line = |parts: &str| {
            let _ = writeln!(text, "    {parts}");
        };
        if numbers > 0 {
            line(&format!(".reg .pred %a<{numbers}>;"));
            line(&format!(".reg .b32 %l<{numbers}>, %c<{numbers}>;"));
        }
        for n in 0..numbers {
            if self.names(&format!("%m{n}_")) {
                line(&format!(".reg .b32 %m{n}_<{ARMS}>;"));
            }
        }
        let shared = ["%own", "%tile", "%swap", "%priv", "%bins"].into_iter().filter(|name| self.names(name));
        let shared: Vec<&str> = shared.collect();
        if !shared.is_empty() {
            line(&format!(".shared .align 16 .b8 tile[{}];", threads * 48 + 64));
        }
        if self.names("stack") {
            line(".local .align 16 .b8 stack[16];");
        }
        line("mov.u32 %x, %ctaid.x;");
        line("mov.u32 %y, %tid.x;");
        line(&format!("mad.lo.u32 %x, %x, {threads}, %y;"));
        line("mul.wide.u32 %u, %x, 8;");
        line("ld.param.u64 %in, [in];");
        line("ld.param.u64 %out, [out];");
        if self.names("%cell") {
            line(&format!(
                ".reg .b64 %cell; mad.wide.u32 %cell, %x, 16, %out; add.u64 %cell, %cell, {};",
                outputs * lanes * 8
            ));
        }
        if self.names("%gbin") {
            line(&format!(
                ".reg .b64 %gbin; mov.u32 %x, %ctaid.x; mad.wide.u32 %gbin, %x, 64, %out; add.u64 %gbin, %gbin, {};",
                (outputs + 2) * lanes * 8
            ));
        }
        line("add.u64 %in, %in, %u;");
        line("add.u64 %out, %out, %u;");
        for name in shared {
            let at = match name {
                "%own" => "mad.lo.u32 %own, %y, 16, %own;".to_owned(),
                "%swap" => {
                    format!("mad.lo.u32 %swap, %y, 16, %swap; add.u32 %swap, %swap, {};", threads * 16)
                }
                "%priv" => {
                    format!("mad.lo.u32 %priv, %y, 16, %priv; add.u32 %priv, %priv, {};", threads * 32)
                }
                "%bins" => format!("add.u32 %bins, %bins, {};", threads * 48),
                _ => String::new(),
            };
            line(&format!(".reg .b32 {name}; mov.u32 {name}, tile; {at}"));
        }
        // Zeros in every launch. The assembler can derive neither that they are zero nor that they
        // are equal.
        for (zero, special) in [("%zero", "%ctaid.z"), ("%nought", "%ctaid.y")] {
            if self.names(zero) {
                line(&format!(".reg .b16 {zero}16; .reg .b32 {zero}32; .reg .b64 {zero}64;"));
                line(&format!("mov.u32 {zero}32, {special}; cvt.u16.u32 {zero}16, {zero}32;"));
                line(&format!("cvt.u64.u32 {zero}64, {zero}32;"));
            }
        }
        for (name, special) in [("%me", "%tid.x"), ("%all", "%ntid.x")] {
            if self.names(name) {
                line(&format!(".reg .b32 {name}; mov.u32 {name}, {special};"));
            }
        }
        if self.names("%full") {
            line(".reg .b32 %full; and.b32 %full, %y, 0xffffffe0;");
            line(&format!("sub.u32 %full, {threads}, %full; min.u32 %full, %full, 32;"));
            line("shl.b32 %full, 1, %full; sub.u32 %full, %full, 1;");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Register = (char, usize);

    /// A program of these instructions, with their operands and results in pool registers.
    fn text(steps: &[(&str, &[Register], Register)]) -> String {
        guarded_text(steps, None)
    }

    /// The same, with all instructions but comparisons under a guard.
    fn guarded_text(steps: &[(&str, &[Register], Register)], guard: Option<(Source, bool)>) -> String {
        let forms: Vec<Form> = super::super::all_forms();
        let steps = steps.iter().enumerate().map(|(id, (opcode, operands, result))| {
            let form = forms.iter().position(|form| form.text.starts_with(&format!("{opcode} ")));
            let operands = operands.iter().map(|(letter, n)| Source::Register(*letter, *n)).collect();
            let form = form.unwrap_or_else(|| panic!("no form {opcode}"));
            let guard = guard.filter(|_| result.0 != 'p');
            Step { id, what: What::Do(Use { form, operands, result: *result, guard, drawn: 0 }) }
        });
        let steps = steps.collect();
        Program { style: Style::Chained, threads: 32, rows: vec![], steps }.write(&forms, "k").text
    }

    #[test]
    fn the_assembler_does_not_see_what_it_passes_on_wrongly() {
        let (h, other) = (('h', 0), ('h', 1));
        let another_type = text(&[("cvt.rn.bf16.f16", &[h], other), ("cvt.rzi.u32.f16", &[other], ('r', 0))]);
        assert!(another_type.contains(", %h1, %zero16;"), "{another_type}");
        let same_type = text(&[("cvt.rn.bf16.f16", &[h], other), ("abs.bf16", &[other], ('h', 2))]);
        assert!(!same_type.contains("%zero16"), "{same_type}");
        let converted_twice =
            text(&[("cvt.rz.bf16.f16", &[h], other), ("cvt.rzi.u32.bf16", &[other], ('r', 0))]);
        assert!(converted_twice.contains(", %h1, %zero16;"), "{converted_twice}");
        let twice = text(&[("max.f16", &[h, h], other)]);
        assert!(twice.contains(", %h0, %nought16;"), "{twice}");
        // Copies for two reasons are two registers as well.
        let both = text(&[("cvt.rn.bf16.f16", &[h], other), ("max.f16", &[other, other], h)]);
        assert!(both.contains(", %h1, %zero16;") && both.contains(", %h1, %nought16;"), "{both}");
        assert!(!text(&[("max.f16", &[h, other], h)]).contains("%zero16"));
    }

    #[test]
    fn the_assembler_does_not_see_which_comparison_a_guard_is() {
        let guarded = |comparison: &str| {
            let steps: [(&str, &[Register], Register); 2] =
                [(comparison, &[('r', 0), ('r', 1)], ('p', 0)), ("add.u32", &[('r', 2), ('r', 3)], ('r', 2))];
            guarded_text(&steps, Some((Source::Register('p', 0), false)))
        };
        let flushed = guarded("setp.geu.ftz.f32");
        assert!(flushed.contains("setp.ne.u32 %p10, %x, %zero32;\n    @%p10 add.u32"), "{flushed}");
        assert!(guarded("setp.geu.f32").contains("@%p0 add.u32"));
    }
}
