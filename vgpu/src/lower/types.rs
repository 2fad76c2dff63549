//! PTX types and the modifiers of an opcode.

use crate::ir::File;

macro_rules! types {
    ($($variant:ident $name:literal $bits:literal),* $(,)?) => {
        /// A type as it appears in an opcode.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Ty { $($variant),* }

        impl Ty {
            /// Parses a type, written without its dot.
            pub(crate) fn parse(s: &str) -> Option<Ty> {
                match s { $($name => Some(Ty::$variant),)* _ => None }
            }

            /// Width in bits.
            pub(crate) fn bits(self) -> u32 {
                match self { $(Ty::$variant => $bits),* }
            }

            /// The type with this number; the inverse of `as u32`.
            pub(crate) fn from_number(n: u32) -> Ty {
                const ALL: &[Ty] = &[$(Ty::$variant),*];
                ALL[n as usize]
            }
        }
    };
}

types! {
    Pred "pred" 1,
    B8 "b8" 8, U8 "u8" 8, S8 "s8" 8,
    B16 "b16" 16, U16 "u16" 16, S16 "s16" 16, F16 "f16" 16, Bf16 "bf16" 16,
    B32 "b32" 32, U32 "u32" 32, S32 "s32" 32, F32 "f32" 32,
    F16x2 "f16x2" 32, Bf16x2 "bf16x2" 32, U16x2 "u16x2" 32, S16x2 "s16x2" 32,
    B64 "b64" 64, U64 "u64" 64, S64 "s64" 64, F64 "f64" 64,
    E4m3x2 "e4m3x2" 16, E5m2x2 "e5m2x2" 16,
}

impl Ty {
    /// Register file of a value of this type.
    pub(crate) fn file(self) -> File {
        match self.bits() {
            1 => File::Pred,
            64 => File::R64,
            _ => File::R32,
        }
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }

    pub(crate) fn is_integer(self) -> bool {
        matches!(self, Ty::U8 | Ty::U16 | Ty::U32 | Ty::U64) || self.is_signed()
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self, Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64)
    }
}

/// An opcode split at its dots. Decoders remove the modifiers that they support; a modifier left
/// over is an error.
pub(crate) struct Mods<'a> {
    pub(crate) opcode: &'a str,
    pub(crate) base: &'a str,
    items: Vec<(&'a str, bool)>,
}

impl<'a> Mods<'a> {
    pub(crate) fn new(opcode: &'a str) -> Self {
        let mut parts = opcode.split('.');
        let base = parts.next().unwrap_or("");
        Mods { opcode, base, items: parts.map(|p| (p, false)).collect() }
    }

    /// Takes a modifier if it is there.
    pub(crate) fn has(&mut self, name: &str) -> bool {
        match self.items.iter_mut().find(|(n, used)| !used && *n == name) {
            Some(item) => {
                item.1 = true;
                true
            }
            None => false,
        }
    }

    /// Takes the first of several modifiers that is there.
    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[(&str, T)]) -> Option<T> {
        choices.iter().find(|(name, _)| self.has(name)).map(|&(_, v)| v)
    }

    /// Takes any number of modifiers that change nothing here.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for n in names {
            self.has(n);
        }
    }

    /// Takes the first type that is left.
    pub(crate) fn ty(&mut self) -> Result<Ty, String> {
        for (n, used) in &mut self.items {
            if let (false, Some(t)) = (*used, Ty::parse(n)) {
                *used = true;
                return Ok(t);
            }
        }
        Err(format!("'{}' lacks a type", self.opcode))
    }

    /// Modifiers in order, taken or not.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.items.iter().map(|(n, _)| *n)
    }

    /// Fails if something was not understood.
    pub(crate) fn finish(&self) -> Result<(), String> {
        match self.items.iter().find(|(_, used)| !used) {
            None => Ok(()),
            Some((n, _)) => Err(format!("modifier '.{n}' of '{}' is not supported", self.opcode)),
        }
    }

    /// The error for a combination that does not exist.
    pub(crate) fn unsupported<T>(&self) -> Result<T, String> {
        Err(format!("'{}' is not supported", self.opcode))
    }
}
