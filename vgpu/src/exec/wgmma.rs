//! `wgmma`: products of matrices by the four warps of a warpgroup, which continue behind the
//! instruction.
//!
//! Each warp computes 16 rows of D when it reaches the instruction. Uses that the PTX manual leaves
//! undefined are faults: an access to a register that a product under way uses, products without
//! `wgmma.fence`, warps that execute different instructions. In check mode the product reads shared
//! memory until `wgmma.wait_group`, through the async proxy.
//!
//! A product is one operation of the warpgroup. So `wgmma.wait_group` waits until all four warps
//! have reached the products of its groups. Programs rely on that: one warp's wait lets it release
//! memory that the others' products read.

use std::collections::VecDeque;
use std::sync::Arc;

use super::descriptor::{Depth, Descriptor, Major, elements, ranges};
use super::lanes::lanes;
use super::mma::{COLUMNS, Left, MOST_K, Mma, Right, Start};
use super::sparse::Sparsity;
use super::state::{Exec, Flow, GroupState, Run, stop};
use super::sums::Adder;
use crate::check::hooks::Hooks;
use crate::check::record::How;
use crate::fault::{FaultKind, WaitingFor};
use crate::ir::{FULL, Op, WgmmaOp};

/// Warps of a warpgroup.
const WARPS: u32 = 4;

/// Rows of A that one warp multiplies.
const ROWS: u64 = 16;

/// Stands for the arrivals of a warpgroup among the addresses that a warp polls.
const ARRIVALS: u64 = u64::MAX - 1;

/// The matrix A.
#[derive(Clone, Debug)]
pub(crate) enum MatrixA {
    Registers([u32; 4]),
    /// The slot of the descriptor.
    Shared(u32, Major),
}

/// A `wgmma.mma_async`.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    /// The product of 16 rows and 8 columns.
    pub(crate) mma: Mma,
    pub(crate) columns: u16,
    pub(crate) a: MatrixA,
    /// The slot of the descriptor of B.
    pub(crate) b: u32,
    pub(crate) b_major: Major,
    pub(crate) d: Vec<u32>,
    /// The predicate: whether the product is added to D.
    pub(crate) adds: u32,
    /// A is sparse: `mma` is the product of its stored elements.
    pub(crate) sparsity: Option<Sparsity>,
    pub(crate) negates_a: bool,
    pub(crate) negates_b: bool,
    /// On every path, its registers were accessed since the last `wgmma.fence`.
    pub(crate) unfenced: bool,
    /// The registers of D, and of A, that other instructions may use before a wait.
    pub(crate) tracked: Vec<(u32, Use)>,
    /// Registers of A that an earlier product may still write.
    pub(crate) reads: Vec<Register>,
}

/// How a product under way uses a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Accumulator,
    /// A part of A.
    Input,
}

/// A register of PTX, by its number before slots were shared.
#[derive(Clone, Debug)]
pub(crate) struct Register {
    pub(crate) number: u32,
    pub(crate) name: Arc<str>,
}

/// Accesses by an instruction to registers of products that may be under way.
#[derive(Clone, Debug, Default)]
pub(crate) struct RegisterCheck {
    pub(crate) reads: Vec<Register>,
    pub(crate) writes: Vec<Register>,
    /// The instruction only moves the first register to the others, which are its parts where there
    /// are several. Compilers put such moves between products, for the assembler to take out.
    pub(crate) moves: Option<(Register, Vec<Register>)>,
}

/// A register of a product under way.
#[derive(Debug)]
struct Busy {
    number: u32,
    role: Use,
    /// The group and the instruction of the product.
    group: u32,
    pc: u32,
    /// Another register has the value too, and is tracked in place of this one.
    moved: bool,
}

/// The products of one warp.
#[derive(Debug, Default)]
pub(crate) struct Products {
    /// A `wgmma.fence` was executed.
    fenced: bool,
    /// It stands at a `wgmma.wait_group` that it has been counted at.
    waits: bool,
    committed: u32,
    busy: Vec<Busy>,
}

impl Products {
    pub(super) fn start(&mut self) {
        let mut busy = std::mem::take(&mut self.busy);
        busy.clear();
        *self = Self { busy, ..Self::default() };
    }

    fn busy(&self, number: u32) -> Option<&Busy> {
        self.busy.iter().find(|busy| busy.number == number)
    }

    fn set(&mut self, new: Busy) {
        match self.busy.iter_mut().find(|busy| busy.number == new.number) {
            Some(old) => *old = new,
            None => self.busy.push(new),
        }
    }
}

/// An instruction of the `wgmma` family that a warpgroup executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    pc: u32,
    /// The descriptors, and whether the product is added: the same in all four warps.
    operands: [u64; 3],
}

/// Four warps that execute `wgmma` together.
#[derive(Debug, Default)]
pub(crate) struct Warpgroup {
    /// Steps that not all warps have reached, and how many there were before.
    steps: VecDeque<Step>,
    before: u64,
    /// Steps of each warp, and the groups that it has committed.
    done: [u64; WARPS as usize],
    committed: [u32; WARPS as usize],
    /// Warps that have ended.
    ended: [bool; WARPS as usize],
}

impl Warpgroup {
    fn next(&self) -> u64 {
        self.before + self.steps.len() as u64
    }

    /// Counts a step of warp `warp`. The first warp at a step determines it; the error is the step
    /// of the others.
    fn arrive(&mut self, warp: usize, step: Step) -> Result<(), Step> {
        match self.steps.get((self.done[warp] - self.before) as usize) {
            Some(other) if *other != step => return Err(*other),
            Some(_) => {}
            None => self.steps.push_back(step),
        }
        self.done[warp] += 1;
        let all = self.done.iter().copied().min().unwrap_or(0);
        while self.before < all {
            self.steps.pop_front();
            self.before += 1;
        }
        Ok(())
    }
}

fn fault<T>(message: String, lane: Option<usize>) -> Run<T> {
    stop(FaultKind::Wgmma { message }, lane)
}

impl<W: Hooks> Exec<'_, W> {
    /// Executes `op` once all lanes of the warp are there.
    pub(super) fn wgmma(&mut self, op: &WgmmaOp) -> Run<Flow> {
        if !self.is_whole_warp()? {
            return Ok(Flow::Gone);
        }
        if !std::mem::take(&mut self.warp.products.waits) {
            self.count_step(op)?;
        }
        let warp = (self.warp.index % WARPS) as usize;
        let group = (self.warp.index / WARPS) as usize;
        match *op {
            WgmmaOp::Fence => self.warp.products.fenced = true,
            WgmmaOp::Commit => {
                self.warp.products.committed += 1;
                self.block.warpgroups[group].committed[warp] += 1;
                self.changed();
            }
            WgmmaOp::Wait { allowed } => {
                let until = self.warp.products.committed.saturating_sub(allowed);
                let committed = self.block.warpgroups[group].committed;
                if let Some(missing) = committed.iter().position(|&groups| groups < until) {
                    self.warp.products.waits = true;
                    let warp = self.warp.index / WARPS * WARPS + missing as u32;
                    self.warp.waiting = Some(WaitingFor::Warpgroup { warp, group: until });
                    self.poll(ARRIVALS, committed.iter().map(|&groups| u64::from(groups)).sum());
                    return Ok(Flow::GiveWay);
                }
                self.warp.products.busy.retain(|busy| busy.group > until);
                if W::ON {
                    self.watch.waited_products(until);
                }
                self.changed();
            }
            WgmmaOp::Multiply { product } => self.multiply(product)?,
        }
        self.pc += 1;
        Ok(Flow::Next)
    }

    /// Whether all lanes of the warp are at the instruction. Those that are here wait for the
    /// others, unless these cannot come.
    fn is_whole_warp(&mut self) -> Run<bool> {
        self.gather();
        let first = Some(self.mask.trailing_zeros() as usize % 32);
        let live = self.warp.live;
        if live != FULL {
            return fault(
                format!("the warp has only the lanes {live:#010x}, and all of a warpgroup take part"),
                first,
            );
        }
        if self.mask == FULL {
            return Ok(true);
        }
        let code = &self.kernel.code;
        let elsewhere = self.warp.groups.iter().find(|g| {
            matches!(g.state, GroupState::Lanes { .. }) && matches!(code[g.pc as usize].op, Op::Wgmma(_))
        });
        if let Some(other) = elsewhere {
            let line = self.kernel.place_of(other.pc).ptx_line;
            return fault(
                format!(
                    "the warp is not converged: lanes {:#010x} are here, and lanes {:#010x} at the wgmma of PTX line {line}",
                    self.mask, other.mask
                ),
                first,
            );
        }
        self.push(self.mask, self.pc, GroupState::Lanes { mask: FULL });
        Ok(false)
    }

    /// Counts the warp at the instruction, which the other warps of the warpgroup must execute too.
    fn count_step(&mut self, op: &WgmmaOp) -> Run<()> {
        let index = self.warp.index;
        let first = index / WARPS * WARPS;
        if first + WARPS > self.block.warps {
            let message = format!(
                "a block of {} warps has no warpgroup of the four warps from {first} on",
                self.block.warps
            );
            return fault(message, None);
        }
        let operands = match *op {
            WgmmaOp::Multiply { product } => self.operands(product)?,
            _ => [0; 3],
        };
        let step = Step { pc: self.pc, operands };
        let group = &mut self.block.warpgroups[(index / WARPS) as usize];
        let warp = (index % WARPS) as usize;
        let ended = group.ended.iter().position(|&ended| ended);
        if let Some(ended) = ended.filter(|_| group.done[warp] == group.next()) {
            return fault(format!("warp {} of the warpgroup has ended", first + ended as u32), None);
        }
        let number = group.done[warp] + 1;
        let Err(other) = group.arrive(warp, step) else { return Ok(()) };
        let line = self.kernel.place_of(other.pc).ptx_line;
        let differ = if other.pc == step.pc {
            let hex = |step: Step| step.operands.map(|operand| format!("{operand:#x}")).join(", ");
            format!("with operands {}, and another warp with {}", hex(step), hex(other))
        } else {
            format!("and another warp has executed that of PTX line {line}")
        };
        let message = format!(
            "the warps of a warpgroup execute the same: warp {index} executes this as its wgmma number \
             {number}, {differ}"
        );
        fault(message, None)
    }

    /// A warp with `wgmma` ends. The error: other warps of the warpgroup have later steps.
    pub(super) fn leave_warpgroup(&mut self) -> Run<()> {
        let index = self.warp.index;
        let Some(group) = self.block.warpgroups.get_mut((index / WARPS) as usize) else { return Ok(()) };
        let warp = (index % WARPS) as usize;
        group.ended[warp] = true;
        let Some(step) = group.steps.get((group.done[warp] - group.before) as usize) else { return Ok(()) };
        let line = self.kernel.place_of(step.pc).ptx_line;
        let message = format!(
            "warp {index} ends, and another warp of its warpgroup has executed that of PTX line {line}"
        );
        fault(message, None)
    }

    /// The descriptors and the predicate of a product, which are the same in all lanes.
    fn operands(&self, product: u32) -> Run<[u64; 3]> {
        let product = &self.kernel.operands.products[product as usize];
        let regs = &self.warp.regs;
        let mut same = [0; 3];
        let slots =
            [Some(product.b), if let MatrixA::Shared(slot, _) = product.a { Some(slot) } else { None }];
        for (same, slot) in same.iter_mut().zip(slots.into_iter().flatten()) {
            let row = &regs.r64[slot as usize];
            *same = row[0];
            if let Some(lane) = (1..32).find(|&lane| row[lane] != row[0]) {
                let message = format!(
                    "lanes disagree about a matrix descriptor: lane 0 has {:#018x}, lane {lane} has {:#018x}",
                    row[0], row[lane]
                );
                return fault(message, Some(lane));
            }
        }
        let adds = regs.pred[product.adds as usize];
        if adds != 0 && adds != FULL {
            let message = format!("lanes disagree about scale-d: it is set in lanes {adds:#010x}");
            return fault(message, Some((!adds).trailing_zeros() as usize));
        }
        same[2] = u64::from(adds != 0);
        Ok(same)
    }

    fn multiply(&mut self, number: u32) -> Run<()> {
        let product = &self.kernel.operands.products[number as usize];
        if !self.warp.products.fenced {
            return fault("the warp has executed no wgmma.fence ahead of its first product".into(), None);
        }
        if product.unfenced {
            return fault("registers of D or A were accessed since the last wgmma.fence".into(), None);
        }
        for register in &product.reads {
            if let Some(busy) = self.warp.products.busy(register.number)
                && busy.role == Use::Accumulator
            {
                return self.touched(&register.name, "read", busy.pc);
            }
        }
        let of_a = Depth::new(product.mma.k.into(), product.mma.a);
        let of_b = match product.sparsity {
            None => of_a,
            Some(_) => Depth::new(2 * u64::from(product.mma.k), product.mma.b),
        };
        let row = u64::from(self.warp.index % WARPS) * ROWS;
        let descriptor = |slot: u32, major, columns, depth: Depth| {
            Descriptor::new(self.warp.regs.r64[slot as usize][0], major, columns, depth.units())
                .or_else(|message| fault(message, Some(0)))
        };
        let b = descriptor(product.b, product.b_major, u64::from(product.columns), of_b)?;
        let a = match product.a {
            MatrixA::Registers(_) => None,
            MatrixA::Shared(slot, major) => {
                Some((descriptor(slot, major, ROWS * u64::from(WARPS), of_a)?, major))
            }
        };
        let eights = u64::from(product.columns) / COLUMNS as u64;
        if W::ON {
            let units_of_a = a.into_iter().flat_map(|(a, major)| {
                (row / 8..(row + ROWS) / 8).flat_map(move |eight| a.units(major, eight, of_a))
            });
            let units_of_b = (0..eights).flat_map(|eight| b.units(product.b_major, eight, of_b));
            self.watch_matrices(&ranges(units_of_a.chain(units_of_b)))?;
        }
        let mut left: Left = match (&product.a, a) {
            (MatrixA::Registers(slots), _) => product.mma.left(&self.warp.regs, slots),
            (_, Some((a, major))) => {
                let mut left = [[0.0; MOST_K]; ROWS as usize];
                for half in 0..ROWS / 8 {
                    let units = a.units(major, row / 8 + half, of_a).map(|at| self.block.shared.unit(at));
                    let block: [[f64; COLUMNS]; MOST_K] =
                        elements(major, product.mma.a, of_a, units).or_else(|kind| stop(kind, None))?;
                    for (k, values) in block.iter().enumerate() {
                        (0..8).for_each(|row| left[8 * half as usize + row][k] = values[row]);
                    }
                }
                left
            }
            (MatrixA::Shared(..), None) => unreachable!("a matrix in shared memory has a descriptor"),
        };
        // The sign of the product is that of one factor.
        if product.negates_a != product.negates_b {
            left.iter_mut().flatten().for_each(|value| *value = -*value);
        }
        let start =
            if self.warp.regs.pred[product.adds as usize] == 0 { Start::Zero } else { Start::Registers };
        let sums = product.mma.registers()[2];
        let (mma, major) = (product.mma, product.b_major);
        let columns = product.sparsity.map(|sparsity| sparsity.columns(&mma, &self.warp.regs, &left));
        let poison = self.env.poison as u32;
        for (eight, d) in (0..eights).zip(product.d.chunks(sums)) {
            let units = b.units(major, eight, of_b).map(|at| self.block.shared.unit(at));
            if let Some(columns) = &columns {
                let right: Right<{ 2 * MOST_K }> =
                    elements(major, mma.b, of_b, units).or_else(|kind| stop(kind, None))?;
                mma.add_sparse_product(
                    &mut self.warp.regs,
                    d,
                    (&left, columns),
                    &right,
                    (start, Adder::Warpgroup),
                    poison,
                );
            } else {
                let right: Right = elements(major, mma.b, of_b, units).or_else(|kind| stop(kind, None))?;
                mma.add_product(&mut self.warp.regs, d, &left, &right, (start, Adder::Warpgroup));
            }
        }
        let group = self.warp.products.committed + 1;
        for &(number, role) in &product.tracked {
            self.warp.products.set(Busy { number, role, group, pc: self.pc, moved: false });
        }
        self.changed();
        Ok(())
    }

    /// Notes that the product at hand reads shared memory until a wait for its group.
    fn watch_matrices(&mut self, read: &[std::ops::Range<u64>]) -> Run<()> {
        let shared = &self.block.shared;
        let read: Vec<_> = read.iter().map(|r| shared.address(r.start)..shared.address(r.end)).collect();
        for range in &read {
            // Bad addresses are faults of their own.
            let there = shared.pointer(range.start, range.end - range.start);
            there.or_else(|kind| stop(kind, None))?;
        }
        let group = self.warp.products.committed + 1;
        for (place, violation) in self.watch.matrices(&read, self.pc, group) {
            self.blame(place, violation, 0, How::PRODUCT, false)?;
        }
        Ok(())
    }

    /// Checks an access to registers by the next instruction, in some lanes of the warp.
    pub(super) fn check_registers(&mut self, number: u32, m: u32) -> Run<()> {
        let RegisterCheck { reads, writes, moves } = &self.kernel.register_checks[number as usize];
        let products = &mut self.warp.products;
        if let Some((from, to)) = moves
            && let Some(busy) = products.busy.iter_mut().find(|busy| busy.number == from.number)
        {
            busy.moved = true;
            let busy = Busy { moved: false, ..*busy };
            to.iter().for_each(|to| products.set(Busy { number: to.number, ..busy }));
            return Ok(());
        }
        let lane = lanes(m).next();
        let read = reads.iter().map(|register| (register, "read"));
        for (register, access) in read.chain(writes.iter().map(|register| (register, "written"))) {
            let Some(busy) = products.busy(register.number) else { continue };
            let harmless = match access {
                "read" => busy.role == Use::Input,
                _ => busy.moved || moves.is_some() && busy.role == Use::Input,
            };
            if !harmless {
                let pc = busy.pc;
                return self.touched(&register.name, access, pc).map_err(|mut stop| {
                    stop.lane = lane.map(|lane| lane as u32);
                    stop
                });
            }
        }
        self.warp.products.busy.retain(|busy| !writes.iter().any(|register| register.number == busy.number));
        Ok(())
    }

    fn touched<T>(&self, name: &str, access: &str, pc: u32) -> Run<T> {
        let line = self.kernel.place_of(pc).ptx_line;
        fault(
            format!(
                "register '{name}' is {access} while the product of PTX line {line} may be under way: put wgmma.wait_group for its group \
                 in front"
            ),
            None,
        )
    }
}
