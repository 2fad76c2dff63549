//! Arguments of a kernel on the command line: numbers and buffers.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail, ensure};
use half::{bf16, f16};

/// Type of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    Bf16,
    F32,
    F64,
}

const TYPES: [(&str, Type); 12] = [
    ("u8", Type::U8),
    ("i8", Type::I8),
    ("u16", Type::U16),
    ("i16", Type::I16),
    ("u32", Type::U32),
    ("i32", Type::I32),
    ("u64", Type::U64),
    ("i64", Type::I64),
    ("f16", Type::F16),
    ("bf16", Type::Bf16),
    ("f32", Type::F32),
    ("f64", Type::F64),
];

impl Type {
    fn parse(name: &str) -> Result<Type> {
        let known = TYPES.iter().find(|(known, _)| *known == name);
        known.map(|(_, ty)| *ty).ok_or_else(|| {
            let names: Vec<_> = TYPES.iter().map(|(name, _)| *name).collect();
            anyhow!("'{name}' is no type: there are {}; a buffer is buf:TYPE:COUNT", names.join(", "))
        })
    }

    /// Bytes of a number.
    pub fn size(self) -> usize {
        match self {
            Type::U8 | Type::I8 => 1,
            Type::U16 | Type::I16 | Type::F16 | Type::Bf16 => 2,
            Type::U32 | Type::I32 | Type::F32 => 4,
            Type::U64 | Type::I64 | Type::F64 => 8,
        }
    }

    /// The bytes of a number as text.
    fn bytes(self, text: &str) -> Result<Vec<u8>> {
        let integer = || -> Result<i128> {
            let (sign, digits) = text.strip_prefix('-').map_or((1, text), |digits| (-1, digits));
            let (radix, digits) = digits.strip_prefix("0x").map_or((10, digits), |digits| (16, digits));
            // Digits have no sign of their own, which the conversion would take.
            ensure!(!digits.starts_with(['-', '+']), "'{text}' is no integer");
            let value = i128::from_str_radix(digits, radix);
            Ok(sign * value.with_context(|| format!("'{text}' is no integer"))?)
        };
        let float = || text.parse::<f64>().with_context(|| format!("'{text}' is no number"));
        let single = || text.parse::<f32>().with_context(|| format!("'{text}' is no number"));
        macro_rules! integer {
            ($t:ty) => {{
                let value = <$t>::try_from(integer()?);
                value.with_context(|| format!("{text} does not fit its type"))?.to_ne_bytes().to_vec()
            }};
        }
        Ok(match self {
            Type::U8 => integer!(u8),
            Type::I8 => integer!(i8),
            Type::U16 => integer!(u16),
            Type::I16 => integer!(i16),
            Type::U32 => integer!(u32),
            Type::I32 => integer!(i32),
            Type::U64 => integer!(u64),
            Type::I64 => integer!(i64),
            Type::F16 => f16::from_f64(float()?).to_ne_bytes().to_vec(),
            Type::Bf16 => bf16::from_f64(float()?).to_ne_bytes().to_vec(),
            Type::F32 => single()?.to_ne_bytes().to_vec(),
            Type::F64 => float()?.to_ne_bytes().to_vec(),
        })
    }

    /// A number's bytes as text.
    pub fn show(self, bytes: &[u8]) -> String {
        macro_rules! show {
            ($t:ty) => {{
                let mut own = [0; size_of::<$t>()];
                own.copy_from_slice(bytes);
                <$t>::from_ne_bytes(own).to_string()
            }};
        }
        match self {
            Type::U8 => show!(u8),
            Type::I8 => show!(i8),
            Type::U16 => show!(u16),
            Type::I16 => show!(i16),
            Type::U32 => show!(u32),
            Type::I32 => show!(i32),
            Type::U64 => show!(u64),
            Type::I64 => show!(i64),
            Type::F16 => show!(f16),
            Type::Bf16 => show!(bf16),
            Type::F32 => show!(f32),
            Type::F64 => show!(f64),
        }
    }

    /// The bytes of element `i` of a series that is drawn or counted.
    fn whole(self, i: u64) -> Vec<u8> {
        // The low bytes are the number modulo its range, on this little-endian machine.
        match self {
            Type::F16 => f16::from_f64(i as f64).to_ne_bytes().to_vec(),
            Type::Bf16 => bf16::from_f64(i as f64).to_ne_bytes().to_vec(),
            Type::F32 => (i as f32).to_ne_bytes().to_vec(),
            Type::F64 => (i as f64).to_ne_bytes().to_vec(),
            _ => i.to_le_bytes()[..self.size()].to_vec(),
        }
    }

    /// A drawn number: any integer, or a float from -1 to 1.
    fn random(self, bits: u64) -> Vec<u8> {
        let unit = (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
        match self {
            Type::F16 => f16::from_f64(unit).to_ne_bytes().to_vec(),
            Type::Bf16 => bf16::from_f64(unit).to_ne_bytes().to_vec(),
            Type::F32 => (unit as f32).to_ne_bytes().to_vec(),
            Type::F64 => unit.to_ne_bytes().to_vec(),
            _ => bits.to_le_bytes()[..self.size()].to_vec(),
        }
    }
}

/// Most bytes of a buffer.
const MOST_BYTES: usize = 1 << 36;

/// The first contents of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Contents {
    /// Nothing was written: a kernel that reads it is reported in check mode.
    Unwritten,
    Zero,
    /// 0, 1, 2, ..
    Iota,
    Random(u64),
    /// The same number everywhere.
    Fill(Vec<u8>),
    File(PathBuf),
}

/// An argument of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// Bytes that are passed unchanged.
    Value(Vec<u8>),
    /// The address of a buffer of this device.
    Buffer(Buffer),
    /// The address at which this device has the buffer that is argument `.0`, from 0, of the next
    /// device.
    Peer(usize),
    /// The multicast address of the buffers of all devices that are argument `.0`, from 0.
    All(usize),
    /// The number of this device, as 32 bits.
    Device,
}

/// A buffer in device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// The type of its numbers.
    pub ty: Type,
    count: Option<usize>,
    contents: Contents,
}

impl FromStr for Argument {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "device" {
            return Ok(Argument::Device);
        }
        let (ty, value) =
            text.split_once(':').context("an argument is TYPE:VALUE, such as u32:5 or buf:f32:64")?;
        Ok(match ty {
            "buf" => Argument::Buffer(value.parse()?),
            "peer" => Argument::Peer(number(value)?),
            "all" => Argument::All(number(value)?),
            "bytes" => Argument::Value(from_hex(value)?),
            _ => Argument::Value(Type::parse(ty)?.bytes(value)?),
        })
    }
}

/// The number of an argument.
fn number(text: &str) -> Result<usize> {
    text.parse().with_context(|| format!("'{text}' is no argument's number"))
}

fn from_hex(text: &str) -> Result<Vec<u8>> {
    ensure!(text.len().is_multiple_of(2) && text.is_ascii(), "'{text}' is no row of bytes in hexadecimal");
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16);
    let bytes: Result<_, _> = (0..text.len()).step_by(2).map(byte).collect();
    bytes.with_context(|| format!("'{text}' is no row of bytes in hexadecimal"))
}

impl FromStr for Buffer {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (shape, contents) = text.split_once('=').map_or((text, None), |(shape, c)| (shape, Some(c)));
        let (ty, count) = shape.split_once(':').map_or((shape, None), |(ty, count)| (ty, Some(count)));
        let ty = Type::parse(ty)?;
        let count =
            count.map(|count| count.parse().with_context(|| format!("'{count}' is no count of numbers")));
        let count: Option<usize> = count.transpose()?;
        let inside = |text: &str, name: &str| -> Option<String> {
            Some(text.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')')?.to_owned())
        };
        let contents = match contents {
            None => Contents::Unwritten,
            Some("zero") => Contents::Zero,
            Some("iota") => Contents::Iota,
            Some("random") => Contents::Random(0),
            Some(text) => match (text.strip_prefix('@'), inside(text, "random"), inside(text, "fill")) {
                (Some(path), _, _) => Contents::File(path.into()),
                (_, Some(seed), _) => {
                    Contents::Random(seed.parse().with_context(|| format!("'{seed}' is no seed"))?)
                }
                (_, _, Some(value)) => Contents::Fill(ty.bytes(&value)?),
                _ => bail!("'{text}' is not zero, iota, random, random(SEED), fill(VALUE) or @FILE"),
            },
        };
        ensure!(
            count.is_some() || matches!(contents, Contents::File(_)),
            "a buffer needs a count of numbers, such as buf:f32:64, or a file"
        );
        Ok(Buffer { ty, count, contents })
    }
}

/// The bytes of a buffer as a run begins.
pub struct Filled {
    /// Length in bytes.
    pub len: usize,
    /// `None` if nothing is to be written.
    pub bytes: Option<Vec<u8>>,
}

impl Buffer {
    /// Reads, counts or draws the contents.
    ///
    /// # Errors
    /// The file cannot be read, or has fewer or more bytes than the buffer; or this machine has no
    /// room for the buffer.
    pub fn fill(&self) -> Result<Filled> {
        let size = self.ty.size();
        let count = self.count.unwrap_or(0);
        let too_large = || format!("a buffer of {count} numbers is too large");
        let len = count.checked_mul(size).filter(|len| *len <= MOST_BYTES).with_context(too_large)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).with_context(too_large)?;
        let mut each = |number: &dyn Fn(u64) -> Vec<u8>| bytes.extend((0..count as u64).flat_map(number));
        match &self.contents {
            Contents::Unwritten => return Ok(Filled { len, bytes: None }),
            Contents::Zero => bytes.resize(len, 0),
            Contents::Iota => each(&|i| self.ty.whole(i)),
            Contents::Random(seed) => each(&|i| self.ty.random(mix(seed.wrapping_mul(0x9e37_79b9) ^ mix(i)))),
            Contents::Fill(number) => each(&|_| number.clone()),
            Contents::File(path) => bytes = self.read(path)?,
        }
        Ok(Filled { len: bytes.len(), bytes: Some(bytes) })
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>> {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let size = self.ty.size();
        let wanted = self.count.map_or(bytes.len() / size * size, |count| count * size);
        ensure!(
            bytes.len() == wanted,
            "{} has {} bytes, the buffer {wanted}: numbers of {size} bytes",
            path.display(),
            bytes.len()
        );
        Ok(bytes)
    }
}

/// Scrambles 64 bits (splitmix64).
fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Vec<u8> {
        match text.parse().unwrap() {
            Argument::Value(bytes) => bytes,
            other => panic!("{other:?}"),
        }
    }

    fn numbers(text: &str) -> Vec<String> {
        let Argument::Buffer(buffer) = text.parse().unwrap() else { panic!("{text}") };
        let bytes = buffer.fill().unwrap().bytes.unwrap();
        bytes.chunks(buffer.ty.size()).map(|number| buffer.ty.show(number)).collect()
    }

    #[test]
    fn numbers_have_the_bytes_of_their_types() {
        assert_eq!(value("u32:5"), 5u32.to_ne_bytes());
        assert_eq!(value("u64:0xffffffffffffffff"), u64::MAX.to_ne_bytes());
        assert_eq!(value("i8:-1"), [255]);
        assert_eq!(value("f32:-1.5"), (-1.5f32).to_ne_bytes());
        assert_eq!(value("bf16:1"), 0x3f80u16.to_ne_bytes());
        assert_eq!(value("bytes:00ff10"), [0, 255, 16]);
    }

    #[test]
    fn buffers_hold_what_they_are_told() {
        assert_eq!(numbers("buf:u32:3=iota"), ["0", "1", "2"]);
        assert_eq!(numbers("buf:f32:3=iota"), ["0", "1", "2"]);
        assert_eq!(numbers("buf:i16:2=fill(-7)"), ["-7", "-7"]);
        assert_eq!(numbers("buf:f16:2=zero"), ["0", "0"]);
        let random = numbers("buf:f64:100=random(3)");
        assert_eq!(random, numbers("buf:f64:100=random(3)"));
        assert_ne!(random, numbers("buf:f64:100=random(4)"));
        assert!(random.iter().all(|x| x.parse::<f64>().unwrap().abs() <= 1.0));
        let Argument::Buffer(unwritten) = "buf:u16:5".parse().unwrap() else { panic!() };
        let filled = unwritten.fill().unwrap();
        assert!(filled.len == 10 && filled.bytes.is_none());
    }

    #[test]
    fn bad_arguments_are_explained() {
        for (text, error) in [
            ("5", "TYPE:VALUE"),
            ("int:5", "'int' is no type: there are u8, i8"),
            ("u8:256", "does not fit"),
            ("u32:x", "no integer"),
            ("i32:--5", "no integer"),
            ("i32:-+5", "no integer"),
            ("i32:0x-5", "no integer"),
            ("i32:-0x-5", "no integer"),
            ("i32:--170141183460469231731687303715884105728", "no integer"),
            ("i32:-170141183460469231731687303715884105728", "no integer"),
            ("f32:x", "no number"),
            ("buf:f32", "needs a count"),
            ("buf:f32:x", "no count"),
            ("buf:f32:4=ones", "'ones' is not zero, iota"),
            ("bytes:0", "hexadecimal"),
            ("bytes:é0", "hexadecimal"),
            ("peer:x", "no argument's number"),
            ("all:x", "no argument's number"),
        ] {
            let found = format!("{:#}", text.parse::<Argument>().unwrap_err());
            assert!(found.contains(error), "{text}: {found}");
        }
    }

    #[test]
    fn buffers_that_no_machine_has_room_for_are_refused() {
        for contents in ["", "=zero", "=iota", "=random", "=fill(1)", "=@file"] {
            for shape in ["u8:1000000000000", "f64:18446744073709551615"] {
                let Argument::Buffer(buffer) = format!("buf:{shape}{contents}").parse().unwrap() else {
                    panic!("{shape}{contents}")
                };
                let error = buffer.fill().map(drop).unwrap_err().to_string();
                assert!(error.contains("is too large"), "{shape}{contents}: {error}");
            }
        }
    }
}
