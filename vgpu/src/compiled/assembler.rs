//! An assembler for the few x86-64 instructions of compiled code: AVX-512 or AVX2 on whole
//! registers, mask registers, and what little the frame around them needs.

/// The vector instructions that code is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Target {
    /// 32 registers of 512 bits, and mask registers.
    #[default]
    Avx512,
    /// 16 registers of 256 bits. The lanes of a mask are all ones or zeros in a vector register.
    Avx2,
}

impl Target {
    /// Lanes of 32 bits in a register.
    pub(super) fn lanes(self) -> i32 {
        match self {
            Target::Avx512 => 16,
            Target::Avx2 => 8,
        }
    }

    /// Bytes of a register.
    pub(super) fn bytes(self) -> i32 {
        4 * self.lanes()
    }
}

/// General registers, by their numbers.
pub(super) const RAX: u8 = 0;
pub(super) const RCX: u8 = 1;
pub(super) const RDX: u8 = 2;
pub(super) const RSP: u8 = 4;
pub(super) const RSI: u8 = 6;
pub(super) const RDI: u8 = 7;
pub(super) const R8: u8 = 8;
pub(super) const R9: u8 = 9;
pub(super) const R10: u8 = 10;
pub(super) const R11: u8 = 11;

/// A place in memory: a general register and a distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mem {
    pub(super) base: u8,
    pub(super) offset: i32,
}

impl Mem {
    pub(super) fn plus(self, bytes: i32) -> Mem {
        Mem { offset: self.offset + bytes, ..self }
    }
}

/// The last operand of a vector instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Register(u8),
    Memory(Mem),
    /// The same 32 bits in every lane.
    Constant(u32),
    /// The same 64 bits in every lane.
    Wide(u64),
}

/// A vector instruction in the EVEX encoding, or in the VEX encoding for AVX2: opcode map (1: `0F`,
/// 2: `0F 38`, 3: `0F 3A`), prefix (0: none, 1: `66`, 2: `F3`, 3: `F2`), the bit W, and opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Vector(pub(super) u8, pub(super) u8, pub(super) bool, pub(super) u8);

/// An instruction in the VEX encoding: opcode map, prefix, the bits W and L, and opcode.
#[derive(Clone, Copy, Debug)]
struct Vex(u8, u8, bool, bool, u8);

/// The parts of a vector instruction besides its operands: the mask register, an immediate, and the
/// length of a last operand in memory.
#[derive(Clone, Copy, Debug)]
struct Tail {
    k: u8,
    imm: Option<u8>,
    size: i32,
}

/// A place in the code, perhaps one that comes later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label(usize);

/// The number of a constant behind the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Constant {
    Narrow(usize),
    Wide(usize),
    Lanes(usize),
}

/// The number of `v` in `list`, to which it is added if need be.
fn number_of<T: PartialEq + Copy>(list: &mut Vec<T>, v: T) -> usize {
    list.iter().position(|c| *c == v).unwrap_or_else(|| {
        list.push(v);
        list.len() - 1
    })
}

/// Code under construction.
#[derive(Default)]
pub(super) struct Assembler {
    target: Target,
    pub(super) code: Vec<u8>,
    labels: Vec<Option<usize>>,
    jumps: Vec<(usize, Label)>,
    /// Operands behind the code, and the places that name them.
    constants: Vec<u32>,
    wide: Vec<u64>,
    vectors: Vec<[u32; 8]>,
    to_constants: Vec<(usize, Constant)>,
}

impl Assembler {
    pub(super) fn new(target: Target) -> Assembler {
        Assembler { target, ..Assembler::default() }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.code.extend_from_slice(bytes);
    }

    fn word(&mut self, v: i32) {
        self.bytes(&v.to_le_bytes());
    }

    pub(super) fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    pub(super) fn bind(&mut self, label: Label) {
        self.labels[label.0] = Some(self.code.len());
    }

    /// The offset of a label that has been bound.
    pub(super) fn place(&self, label: Label) -> Option<usize> {
        self.labels[label.0]
    }

    /// ModRM byte and what follows it, for a place in memory. Distances that are multiples of
    /// `scale` have a short form.
    fn memory(&mut self, reg: u8, m: Mem, scale: i32) {
        let (reg, base) = ((reg & 7) << 3, m.base & 7);
        let short = m.offset % scale == 0 && i8::try_from(m.offset / scale).is_ok();
        self.bytes(&[if short { 0x40 } else { 0x80 } | reg | base]);
        if base == RSP {
            self.bytes(&[0x24]);
        }
        if short { self.bytes(&[(m.offset / scale) as i8 as u8]) } else { self.word(m.offset) }
    }

    /// A vector instruction on whole registers: `d = op(a, b)` under the mask register `k` (0 for
    /// none). Lanes outside of the mask keep what they have, or are stored as they were.
    pub(super) fn vector(&mut self, op: Vector, d: u8, a: u8, b: Source, k: u8) {
        self.vector_with(op, d, a, b, k, None);
    }

    /// The same, with an immediate.
    pub(super) fn vector_with(&mut self, op: Vector, d: u8, a: u8, b: Source, k: u8, imm: Option<u8>) {
        self.encode(op, [d, a], b, Tail { k, imm, size: 64 });
    }

    /// An instruction whose last operand, if in memory, has `size` bytes.
    pub(super) fn vector_sized(&mut self, op: Vector, d: u8, b: Source, size: i32) {
        self.encode(op, [d, 0], b, Tail { k: 0, imm: None, size });
    }

    fn encode(&mut self, op: Vector, registers: [u8; 2], b: Source, tail: Tail) {
        match self.target {
            Target::Avx512 => self.evex(op, registers, b, tail),
            Target::Avx2 => self.vex_vector(op, registers, b, tail.imm),
        }
    }

    /// An instruction on 256 bits. Those with a broadcast constant have it as a whole vector.
    fn vex_vector(
        &mut self,
        Vector(map, prefix, wide, opcode): Vector,
        [d, a]: [u8; 2],
        b: Source,
        imm: Option<u8>,
    ) {
        let base = match b {
            Source::Register(r) => r,
            Source::Memory(m) => m.base,
            _ => 0,
        };
        self.vex(Vex(map, prefix, wide, true, opcode), d, a, base);
        let lanes = match b {
            Source::Register(r) => {
                self.bytes(&[0xc0 | (d & 7) << 3 | r & 7]);
                None
            }
            Source::Memory(m) => {
                self.memory(d, m, 1);
                None
            }
            Source::Constant(v) => Some([v; 8]),
            Source::Wide(v) => Some(std::array::from_fn(|i| (v >> (32 * (i % 2))) as u32)),
        };
        if let Some(lanes) = lanes {
            let constant = Constant::Lanes(number_of(&mut self.vectors, lanes));
            self.constant(d, constant, imm);
        }
        if let Some(imm) = imm {
            self.bytes(&[imm]);
        }
    }

    /// A vector instruction of AVX2 with a constant: `d = op(a, lanes)`.
    pub(super) fn vector_lanes(&mut self, op: Vector, d: u8, a: u8, lanes: [u32; 8]) {
        let Vector(map, prefix, wide, opcode) = op;
        self.vex(Vex(map, prefix, wide, true, opcode), d, a, 0);
        let constant = Constant::Lanes(number_of(&mut self.vectors, lanes));
        self.constant(d, constant, None);
    }

    /// ModRM byte and distance of a constant behind the code.
    fn constant(&mut self, reg: u8, constant: Constant, imm: Option<u8>) {
        self.bytes(&[(reg & 7) << 3 | 5]);
        self.to_constants.push((self.code.len(), constant));
        // The distance counts from the end of the instruction.
        self.word(-4 - i32::from(imm.is_some()));
    }

    fn evex(&mut self, op: Vector, [d, a]: [u8; 2], b: Source, tail: Tail) {
        let Vector(map, prefix, wide, opcode) = op;
        let Tail { k, imm, size } = tail;
        let bit = |v: u8, n: u8| v >> n & 1;
        // X and B: the high bits of the last operand.
        let (x, low) = match b {
            Source::Register(r) => (bit(r, 4), bit(r, 3)),
            Source::Memory(m) => (0, bit(m.base, 3)),
            Source::Constant(_) | Source::Wide(_) => (0, 0),
        };
        let broadcast = u8::from(size == 64 && matches!(b, Source::Constant(_) | Source::Wide(_)));
        let inverted = bit(d, 3) << 7 | x << 6 | low << 5 | bit(d, 4) << 4;
        self.bytes(&[
            0x62,
            (inverted ^ 0xf0) | map,
            u8::from(wide) << 7 | (!a & 15) << 3 | 4 | prefix,
            2 << 5 | broadcast << 4 | (bit(a, 4) ^ 1) << 3 | k,
            opcode,
        ]);
        match b {
            Source::Register(r) => self.bytes(&[0xc0 | (d & 7) << 3 | r & 7]),
            Source::Memory(m) => self.memory(d, m, size),
            Source::Wide(v) => {
                let constant = Constant::Wide(number_of(&mut self.wide, v));
                self.constant(d, constant, imm);
            }
            Source::Constant(v) => {
                let constant = Constant::Narrow(number_of(&mut self.constants, v));
                self.constant(d, constant, imm);
            }
        }
        if let Some(imm) = imm {
            self.bytes(&[imm]);
        }
    }

    /// An instruction in the VEX encoding, up to its opcode.
    fn vex(&mut self, op: Vex, d: u8, a: u8, base: u8) {
        let Vex(map, prefix, wide, long, opcode) = op;
        self.bytes(&[
            0xc4,
            (((d >> 3) << 7 | (base >> 3) << 5) ^ 0xe0) | map,
            u8::from(wide) << 7 | (!a & 15) << 3 | u8::from(long) << 2 | prefix,
            opcode,
        ]);
    }

    /// Loads 16 bits into a mask register.
    pub(super) fn load_mask(&mut self, k: u8, m: Mem) {
        self.vex(Vex(1, 0, false, false, 0x90), k, 0, m.base);
        self.memory(k, m, 1);
    }

    /// Loads 8 bits into a mask register.
    pub(super) fn load_mask_byte(&mut self, k: u8, m: Mem) {
        self.vex(Vex(1, 1, false, false, 0x90), k, 0, m.base);
        self.memory(k, m, 1);
    }

    /// Copies 16 bits of a mask register to a general one.
    pub(super) fn mask_to_general(&mut self, d: u8, k: u8) {
        self.vex(Vex(1, 0, false, false, 0x93), d, 0, 0);
        self.bytes(&[0xc0 | (d & 7) << 3 | k]);
    }

    /// `d = !a`, of 16 bits.
    pub(super) fn mask_not(&mut self, d: u8, a: u8) {
        self.vex(Vex(1, 0, false, false, 0x44), d, 0, 0);
        self.bytes(&[0xc0 | d << 3 | a]);
    }

    /// `d = a >> n`, of 16 bits.
    pub(super) fn mask_shift_right(&mut self, d: u8, a: u8, n: u8) {
        self.vex(Vex(3, 1, true, false, 0x30), d, 0, 0);
        self.bytes(&[0xc0 | d << 3 | a, n]);
    }

    /// `d = high << 8 | low`, of 8 bits each.
    pub(super) fn mask_join_bytes(&mut self, d: u8, high: u8, low: u8) {
        self.vex(Vex(1, 1, false, true, 0x4b), d, high, 0);
        self.bytes(&[0xc0 | d << 3 | low]);
    }

    fn rex(&mut self, wide: bool, reg: u8, base: u8) {
        let rex = 0x40 | u8::from(wide) << 3 | (reg >> 3) << 2 | base >> 3;
        if rex != 0x40 {
            self.bytes(&[rex]);
        }
    }

    /// An instruction of a general register and memory.
    fn general(&mut self, wide: bool, opcode: &[u8], reg: u8, m: Mem) {
        self.rex(wide, reg, m.base);
        self.bytes(opcode);
        self.memory(reg, m, 1);
    }

    /// Loads 32 bits.
    pub(super) fn load(&mut self, d: u8, m: Mem) {
        self.general(false, &[0x8b], d, m);
    }

    /// Loads 64 bits.
    pub(super) fn load_wide(&mut self, d: u8, m: Mem) {
        self.general(true, &[0x8b], d, m);
    }

    /// Loads 16 bits, zero-extended.
    pub(super) fn load_half(&mut self, d: u8, m: Mem) {
        self.general(false, &[0x0f, 0xb7], d, m);
    }

    /// Loads 8 bits, zero-extended.
    pub(super) fn load_byte(&mut self, d: u8, m: Mem) {
        self.general(false, &[0x0f, 0xb6], d, m);
    }

    /// Stores the low 8 bits of RAX, RCX or RDX.
    pub(super) fn store_byte(&mut self, m: Mem, v: u8) {
        self.general(false, &[0x88], v, m);
    }

    /// Stores 32 bits.
    pub(super) fn store(&mut self, m: Mem, v: u8) {
        self.general(false, &[0x89], v, m);
    }

    /// Stores 64 bits.
    pub(super) fn store_wide(&mut self, m: Mem, v: u8) {
        self.general(true, &[0x89], v, m);
    }

    /// Stores 16 bits.
    pub(super) fn store_half(&mut self, m: Mem, v: u8) {
        self.bytes(&[0x66]);
        self.general(false, &[0x89], v, m);
    }

    /// `d = op(d, a)` on 32 bits, by the opcode of the form with a register on the left.
    fn both(&mut self, wide: bool, opcode: u8, d: u8, a: u8) {
        self.rex(wide, a, d);
        self.bytes(&[opcode, 0xc0 | (a & 7) << 3 | d & 7]);
    }

    pub(super) fn and(&mut self, d: u8, a: u8) {
        self.both(false, 0x21, d, a);
    }

    pub(super) fn or(&mut self, d: u8, a: u8) {
        self.both(false, 0x09, d, a);
    }

    pub(super) fn xor(&mut self, d: u8, a: u8) {
        self.both(false, 0x31, d, a);
    }

    pub(super) fn compare(&mut self, a: u8, b: u8) {
        self.both(false, 0x39, a, b);
    }

    pub(super) fn copy(&mut self, d: u8, a: u8) {
        self.both(false, 0x89, d, a);
    }

    pub(super) fn copy_wide(&mut self, d: u8, a: u8) {
        self.both(true, 0x89, d, a);
    }

    /// `d = !d`, of 32 bits.
    pub(super) fn not(&mut self, d: u8) {
        self.rex(false, 0, d);
        self.bytes(&[0xf7, 0xd0 | d & 7]);
    }

    pub(super) fn shift_left(&mut self, d: u8, n: u8) {
        self.rex(false, 0, d);
        self.bytes(&[0xc1, 0xe0 | d & 7, n]);
    }

    /// `d += n`, of 64 bits.
    pub(super) fn add_wide(&mut self, d: u8, n: i32) {
        self.rex(true, 0, d);
        self.bytes(&[0x81, 0xc0 | d & 7]);
        self.word(n);
    }

    /// Compares 32 bits in memory with a number.
    pub(super) fn compare_memory(&mut self, m: Mem, n: i32) {
        self.general(false, &[0x81], 7, m);
        self.word(n);
    }

    /// Whether the 32 bits of a register have any of these.
    pub(super) fn test(&mut self, a: u8, bits: u32) {
        self.rex(false, 0, a);
        self.bytes(&[0xf7, 0xc0 | a & 7]);
        self.word(bits as i32);
    }

    /// `d -= n`, of 64 bits.
    pub(super) fn subtract_wide(&mut self, d: u8, n: i32) {
        self.rex(true, 0, d);
        self.bytes(&[0x81, 0xe8 | d & 7]);
        self.word(n);
    }

    /// `d = v`, of 32 bits, which clears the upper half.
    pub(super) fn set(&mut self, d: u8, v: u32) {
        self.rex(false, 0, d);
        self.bytes(&[0xb8 | d & 7]);
        self.word(v as i32);
    }

    pub(super) fn set_wide(&mut self, d: u8, v: u64) {
        self.rex(true, 0, d);
        self.bytes(&[0xb8 | d & 7]);
        self.bytes(&v.to_le_bytes());
    }

    pub(super) fn call(&mut self, target: u8) {
        self.rex(false, 0, target);
        self.bytes(&[0xff, 0xd0 | target & 7]);
    }

    pub(super) fn jump(&mut self, to: Label) {
        self.bytes(&[0xe9]);
        self.jump_distance(to);
    }

    fn jump_if(&mut self, condition: u8, to: Label) {
        self.bytes(&[0x0f, 0x80 | condition]);
        self.jump_distance(to);
    }

    pub(super) fn jump_if_not_less(&mut self, to: Label) {
        self.jump_if(0xd, to);
    }

    pub(super) fn jump_if_less(&mut self, to: Label) {
        self.jump_if(0xc, to);
    }

    pub(super) fn jump_if_zero(&mut self, to: Label) {
        self.jump_if(4, to);
    }

    pub(super) fn jump_if_not_equal(&mut self, to: Label) {
        self.jump_if(5, to);
    }

    fn jump_distance(&mut self, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.word(-4);
    }

    /// Clears the upper halves of vector registers 0 to 15.
    pub(super) fn clear_upper_halves(&mut self) {
        self.bytes(&[0xc5, 0xf8, 0x77]);
    }

    /// Leaves the upper halves of vector registers clean, and returns.
    pub(super) fn leave(&mut self) {
        self.clear_upper_halves();
        self.bytes(&[0xc3]);
    }

    /// The code with its constants. `None` if a label was never bound.
    pub(super) fn finish(mut self) -> Option<Vec<u8>> {
        self.code.resize(self.code.len().next_multiple_of(64), 0xcc);
        let vectors = self.code.len();
        let wide = vectors + 32 * self.vectors.len();
        let constants = wide + 8 * self.wide.len();
        for lane in std::mem::take(&mut self.vectors).into_iter().flatten() {
            self.bytes(&lane.to_le_bytes());
        }
        for constant in std::mem::take(&mut self.wide) {
            self.bytes(&constant.to_le_bytes());
        }
        for constant in std::mem::take(&mut self.constants) {
            self.bytes(&constant.to_le_bytes());
        }
        let mut patches: Vec<(usize, usize)> = vec![];
        for &(at, label) in &self.jumps {
            patches.push((at, self.labels[label.0]?));
        }
        patches.extend(self.to_constants.iter().map(|&(at, constant)| match constant {
            Constant::Narrow(n) => (at, constants + 4 * n),
            Constant::Wide(n) => (at, wide + 8 * n),
            Constant::Lanes(n) => (at, vectors + 32 * n),
        }));
        for (at, target) in patches {
            let field: &mut [u8; 4] = self.code[at..].first_chunk_mut()?;
            let bias = i32::from_le_bytes(*field);
            // The field holds the distance from its start to the end of its instruction, negated.
            *field = (target as i32 - at as i32 + bias).to_le_bytes();
        }
        Some(self.code)
    }
}
