//! A loaded kernel and facts about its instructions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::compiled::Compiled;
use crate::exec::cluster::map_shared;
use crate::exec::lanes::Sig;
use crate::exec::state::SHARED_BASE;
use crate::exec::wgmma::RegisterCheck;
use crate::fault::{InstructionPlace, LaunchError, UnwrittenRegister};
use crate::ir::{File, Init, Inst, Op, Operands, Origin, SINK};
use crate::machine::{Argument, ArgumentValue};
use crate::ptx::{LineTable, SourceLine};

/// A parameter of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamInfo {
    /// Name in the PTX.
    pub name: String,
    /// Offset in the parameter block, in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
}

/// Initial contents of the module's `.global` and `.const` variables.
#[derive(Debug)]
pub(crate) struct Globals {
    pub(crate) module_id: u64,
    pub(crate) init: Vec<u8>,
    /// Places in `init` that hold addresses, each with the offset of what it points to.
    pub(crate) addresses: Vec<(usize, u64)>,
    /// Offset and length of each variable, in bytes, by name.
    pub(crate) variables: BTreeMap<String, (u64, u64)>,
}

/// A kernel, ready to run.
#[derive(Debug)]
pub struct Kernel {
    pub(crate) name: String,
    pub(crate) params: Vec<ParamInfo>,
    pub(crate) param_bytes: usize,
    pub(crate) static_shared: u32,
    pub(crate) shared_variables: Vec<SharedVariable>,
    /// The name of dynamic shared memory.
    pub(crate) dynamic_shared: Option<String>,
    pub(crate) max_threads: Option<u32>,
    pub(crate) required_block: Option<[u32; 3]>,
    /// `.reqnctapercluster`, `.explicitcluster` and `.maxclusterrank`.
    pub(crate) required_cluster: Option<[u32; 3]>,
    pub(crate) explicit_cluster: bool,
    pub(crate) max_cluster: Option<u32>,
    pub(crate) code: Vec<Inst>,
    /// Types of the slots of each arithmetic instruction; empty for others.
    #[cfg_attr(not(all(target_arch = "x86_64", not(miri))), allow(dead_code))]
    pub(crate) sigs: Vec<Vec<Sig>>,
    pub(crate) compiled: Compiled,
    pub(crate) origins: Vec<Origin>,
    /// Jump tables of `brx.idx`.
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) operands: Operands,
    /// Instructions that use registers of products that may be under way.
    pub(crate) register_checks: Vec<RegisterCheck>,
    /// Slots per register file: 32-bit, 64-bit, predicates.
    pub(crate) slots: [u32; 3],
    /// Slots that hold something when a warp starts.
    pub(crate) inits: Vec<(File, u32, Init)>,
    /// Slots that may be read before they are written. [`Kernel::inits`] initialises some of them.
    pub(crate) alive_at_start: Vec<(File, u32)>,
    /// Reads of registers that nothing can have written.
    pub(crate) unwritten: Vec<UnwrittenRead>,
    /// Bytes of local memory per lane.
    pub(crate) local_bytes: u32,
    /// It reads the address of the workspace of a cooperative grid. Its unaligned block barriers are
    /// those of CUDA's library then.
    pub(crate) reads_workspace: bool,
    pub(crate) globals: Option<Arc<Globals>>,
    /// Source files and inlined calls, shared by the kernels of a module.
    pub(crate) lines: Arc<LineTable>,
    /// The PTX text, for messages.
    pub(crate) text: Arc<str>,
    /// Executed instructions, once coverage is on.
    pub(crate) executed: OnceLock<Box<[AtomicBool]>>,
}

/// Registers that an instruction reads and that nothing can have written.
#[derive(Debug)]
pub(crate) struct UnwrittenRead {
    /// [`Op::UnwrittenRegisters`] in front of the instruction.
    pub(crate) pc: u32,
    /// Names in the PTX.
    pub(crate) registers: Vec<String>,
}

/// A shared variable of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SharedVariable {
    /// The name in PTX.
    pub(crate) name: String,
    /// Bytes behind the start of the block's shared memory.
    pub(crate) offset: u32,
    pub(crate) bytes: u32,
}

impl Kernel {
    /// Name of the entry.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Parameters in order.
    #[must_use]
    pub fn params(&self) -> &[ParamInfo] {
        &self.params
    }

    /// A line for each parameter, for messages: its number from 0, its size and its name, as in
    /// `parameter 2: 8 bytes, 'out'`. The name is missing where a compiler has made it of the
    /// kernel's, mangled, and the number: `_Z3addPfj_param_1`.
    #[must_use]
    pub fn param_lines(&self) -> Vec<String> {
        let line = |(number, param): (usize, &ParamInfo)| {
            let is_made = param.name == format!("{}_param_{number}", self.name);
            let name = if is_made { String::new() } else { format!(", '{}'", param.name) };
            format!("parameter {number}: {} bytes{name}", param.size)
        };
        self.params.iter().enumerate().map(line).collect()
    }

    /// Length of the parameter block in bytes.
    #[must_use]
    pub fn param_bytes(&self) -> usize {
        self.param_bytes
    }

    /// The parameter block for these arguments, in the order of the parameters.
    ///
    /// # Errors
    /// Number or sizes of the arguments are not those of the parameters, or a `usize` or `isize`
    /// does not fit.
    pub fn pack(&self, arguments: &[&dyn Argument]) -> Result<Vec<u8>, LaunchError> {
        let (kernel, expected) = (self.name.clone(), self.params.len());
        let mut values = vec![];
        arguments.iter().for_each(|argument| argument.pack_each(&mut values));
        if values.len() != expected {
            let (actual, params) = (values.len(), self.param_lines());
            return Err(LaunchError::ArgumentCount { kernel, expected, actual, params });
        }
        let mut block = vec![];
        for (number, (param, value)) in self.params.iter().zip(values).enumerate() {
            block.resize(param.offset, 0);
            let (expected, actual) = match value {
                ArgumentValue::Bytes(bytes) => {
                    block.extend_from_slice(&bytes);
                    (param.size, bytes.len())
                }
                ArgumentValue::Integer(value) if [1, 2, 4, 8].contains(&param.size) => {
                    let (kernel, bytes) = (kernel.clone(), param.size);
                    if !(-1 << (8 * bytes - 1)..1 << (8 * bytes)).contains(&value) {
                        let params = self.param_lines();
                        return Err(LaunchError::ArgumentRange {
                            kernel,
                            param: number,
                            bytes,
                            value,
                            params,
                        });
                    }
                    block.extend_from_slice(&value.to_le_bytes()[..bytes]);
                    (bytes, bytes)
                }
                ArgumentValue::Integer(_) => (param.size, size_of::<usize>()),
            };
            if expected != actual {
                let params = self.param_lines();
                return Err(LaunchError::ArgumentBytes { kernel, param: number, expected, actual, params });
            }
        }
        Ok(block)
    }

    /// The variable at an offset in the shared window, and the bytes in front of it there, as in
    /// `tile + 0x40`. Empty where no variable is.
    pub(crate) fn shared_part(&self, offset: u64) -> String {
        let at = map_shared(offset, 0).wrapping_sub(SHARED_BASE.into());
        let holds = |variable: &&SharedVariable| {
            at.checked_sub(variable.offset.into()).is_some_and(|inside| inside < variable.bytes.into())
        };
        let (name, start) = match self.shared_variables.iter().find(holds) {
            Some(variable) => (variable.name.as_str(), variable.offset),
            None if at < u64::from(self.static_shared) => return String::new(),
            None => (self.dynamic_shared.as_deref().unwrap_or_default(), self.static_shared),
        };
        match name {
            "" => String::new(),
            name => format!("{} + {:#x}", own_name(name), at.wrapping_sub(start.into())),
        }
    }

    /// Bytes of static shared memory per block.
    #[must_use]
    pub fn static_shared_bytes(&self) -> u32 {
        self.static_shared
    }

    /// Bytes of local memory per lane.
    #[must_use]
    pub fn local_bytes(&self) -> u32 {
        self.local_bytes
    }

    /// Most threads per block (`.maxntid`, `.reqntid`), when declared.
    #[must_use]
    pub fn max_threads(&self) -> Option<u32> {
        self.max_threads
    }

    /// Blocks of a cluster in x, y, z, when declared (`.reqnctapercluster`).
    #[must_use]
    pub fn required_cluster(&self) -> Option<[u32; 3]> {
        self.required_cluster
    }

    /// Whether a launch must name the cluster (`.explicitcluster` without `.reqnctapercluster`).
    #[must_use]
    pub fn needs_cluster(&self) -> bool {
        self.explicit_cluster && self.required_cluster.is_none()
    }

    /// Instructions in the kernel.
    #[must_use]
    pub fn instruction_count(&self) -> usize {
        self.code.len()
    }

    /// Register slots per warp after allocation: 32-bit, 64-bit, predicates. A slot holds one value
    /// per lane.
    #[must_use]
    pub fn register_slots(&self) -> [u32; 3] {
        self.slots
    }

    /// Reads of registers that no definition reaches, on any path. Check mode reports them where a
    /// lane executes them ([`FaultKind::UnwrittenRegister`]). A register that some paths write is not
    /// listed: compilers leave out writes of values that do not matter.
    ///
    /// [`FaultKind::UnwrittenRegister`]: crate::FaultKind::UnwrittenRegister
    #[must_use]
    pub fn unwritten_registers(&self) -> Vec<UnwrittenRegister> {
        let registers = |UnwrittenRead { pc, registers }: &UnwrittenRead| -> Vec<_> {
            let at = self.place_of(*pc);
            let register =
                |register: &String| UnwrittenRegister { register: register.clone(), at: at.clone() };
            registers.iter().map(register).collect()
        };
        self.unwritten.iter().flat_map(registers).collect()
    }

    /// Where each instruction comes from.
    pub fn places(&self) -> impl Iterator<Item = InstructionPlace> + '_ {
        (0..self.origins.len() as u32).map(|pc| self.place_of(pc))
    }

    /// A hash of the kernel's instructions and their PTX lines. Kernels with the same instructions
    /// at the same lines have the same hash, in every process.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut absorb = |bytes: &[u8]| {
            bytes.iter().for_each(|&b| hash = (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        };
        for origin in &self.origins {
            absorb(&origin.ptx_line.to_le_bytes());
            absorb(self.line_of(*origin).as_bytes());
        }
        hash
    }

    /// From now on, every grid of this kernel records the instructions that it executes, which
    /// makes it slower.
    pub fn record_coverage(&self) {
        self.executed.get_or_init(|| self.code.iter().map(|_| AtomicBool::new(false)).collect());
    }

    /// For each instruction, whether any lane of any grid has executed it; `None` before
    /// [`record_coverage`](Self::record_coverage).
    #[must_use]
    pub fn coverage(&self) -> Option<Vec<bool>> {
        Some(self.executed.get()?.iter().map(|mark| mark.load(Ordering::Relaxed)).collect())
    }

    /// The place of instruction `pc`.
    pub(crate) fn place_of(&self, pc: u32) -> InstructionPlace {
        let origin = self.origins.get(pc as usize).copied().unwrap_or_default();
        self.lines.instruction(origin.ptx_line as usize, self.line_of(origin), Some(origin.source))
    }

    /// The instructions that arrive at a barrier of a part of a block, where its number is a constant.
    pub(crate) fn arrivals_of_parts(&self, number: u32) -> impl Iterator<Item = InstructionPlace> {
        let is_number = move |id: u32| self.inits.contains(&(File::R32, id, Init::Bits(u64::from(number))));
        let arrives =
            move |op: &Op| matches!(*op, Op::Barrier { id, count, .. } if count != SINK && is_number(id));
        let pcs = (0..).zip(&self.code).filter(move |(_, inst)| arrives(&inst.op)).map(|(pc, _)| pc);
        pcs.map(|pc| self.place_of(pc))
    }

    /// The PTX line of an instruction; empty where it is unknown. A count of lines from the start of
    /// the text would read megabytes.
    fn line_of(&self, origin: Origin) -> &str {
        let (before, after) = match self.text.split_at_checked(origin.ptx_byte) {
            Some(parts) if origin.ptx_line > 0 => parts,
            _ => return "",
        };
        let start = before.rfind('\n').map_or(0, |end| end + 1);
        let end = before.len() + after.find('\n').unwrap_or(after.len());
        self.text[start..end].trim_end_matches('\r')
    }

    /// Whether the own lines of two instructions were inlined for the same call, or for none.
    pub(crate) fn are_of_one_call(&self, one: u32, other: u32) -> bool {
        let call = |pc: u32| self.origins.get(pc as usize).and_then(|origin| origin.source.call);
        call(one) == call(other)
    }

    /// Source lines of instruction `pc`: the kernel's own and that of the inlined function. Without
    /// line information, the PTX line and nothing.
    pub(crate) fn lines(&self, pc: u32) -> [SourceLine; 2] {
        let Origin { ptx_line, source, .. } = self.origins.get(pc as usize).copied().unwrap_or_default();
        if source.own.line == 0 {
            return [SourceLine { file: u32::MAX, line: ptx_line }, SourceLine::default()];
        }
        [source.own, source.innermost]
    }
}

/// The variable's own name, the last part of one that a C++ compiler has mangled.
fn own_name(name: &str) -> &str {
    if !name.starts_with("_Z") {
        return name;
    }
    // Variables of a function: their number, where several have one name, follows the name.
    let digits = |c: char| c.is_ascii_digit();
    let numbered = name.trim_end_matches(digits).strip_suffix('_').filter(|_| name.ends_with(digits));
    let ends = [name.strip_suffix('E'), Some(name), numbered];
    let length_fits = |end: &str, at: usize| {
        let length = end[..at].rfind(|c: char| !digits(c)).map_or(0, |before| before + 1);
        end[length..at].parse().is_ok_and(|length: usize| length == end.len() - at)
    };
    let last_part = |end: &'_ str| (1..end.len()).rev().find(|&at| length_fits(end, at));
    ends.into_iter().flatten().find_map(|end| Some(&end[last_part(end)?..])).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Module;

    #[test]
    fn names_of_cpp_are_shortened() {
        for (mangled, own) in [
            ("_ZZ4scanPKjPjP6StatusjE1s", "s"),
            ("_ZZ4scanPKjPjP6StatusjE6prefix", "prefix"),
            ("_ZZ4scanPKjPjP6StatusjE4tile_0", "tile"),
            ("_ZN7kernels4smemE", "smem"),
            ("_ZZN5spaceL6kernelEPfE5tile2", "tile2"),
            ("tile", "tile"),
            ("_Z", "_Z"),
        ] {
            assert_eq!(own_name(mangled), own, "{mangled}");
        }
    }

    #[test]
    fn an_offset_in_shared_memory_has_the_name_of_its_variable() {
        let ptx = ".version 8.4\n.target sm_90\n.address_size 64\n.extern .shared .align 16 .b8 ring[];\n\
                   .visible .entry k() {\n.reg .b32 %r<3>;\n.shared .align 4 .b8 one[12];\n\
                   .shared .align 4 .b8 _ZZ1kvE3two[4];\nld.shared.b32 %r1, [one];\n\
                   ld.shared.b32 %r2, [ring];\nret;\n}";
        let module = Module::parse(ptx).unwrap();
        let kernel = module.kernel_like(&["k"]).unwrap();
        let base = u64::from(SHARED_BASE);
        let names = [0, 8, 12, 16, 20].map(|offset| kernel.shared_part(base + offset));
        assert_eq!(names, ["one + 0x0", "one + 0x8", "two + 0x0", "ring + 0x0", "ring + 0x4"]);
        // Of another block of a cluster.
        assert_eq!(kernel.shared_part(map_shared(base + 8, 3)), "one + 0x8");
    }
}
