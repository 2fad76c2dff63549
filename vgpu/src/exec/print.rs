//! `vprintf`, which nvcc makes of `printf` in a kernel.
//!
//! The rules are those of the CUDA C++ Programming Guide, "Formatted Output": `%[flags][width]
//! [.precision][size]type` with the flags `# 0 - +` and blank, `*` for a width or a precision, the
//! sizes `h`, `l` and `ll`, and the types of C without `%n`. The compiler lays the arguments out one
//! behind the other, each aligned to its own size, with C's promotions: 4 bytes, or 8 for `l`, `ll`,
//! pointers and floating point. The result is the number of arguments, -1 for a null format.

use super::state::{Exec, Run};
use crate::check::hooks::Hooks;

/// Longest format, longest string of `%s`, and widest field, in bytes, and most digits: more is cut.
const MOST: usize = 4096;

impl<W: Hooks> Exec<'_, W> {
    /// Prints for each lane, in the order of lanes.
    pub(super) fn print(&mut self, format: u32, arguments: u32, d: u32, m: u32) -> Run<()> {
        for lane in super::lanes::lanes(m) {
            let at = |slot: u32| self.warp.regs.r64[slot as usize][lane];
            let (format, arguments) = (at(format), at(arguments));
            let count = if format == 0 { u32::MAX } else { self.print_one(format, arguments, lane)? };
            self.warp.regs.r32[d as usize][lane] = count;
        }
        // The text is visible outside of the warp.
        self.changed();
        Ok(())
    }

    fn print_one(&mut self, format: u64, arguments: u64, lane: usize) -> Run<u32> {
        let format = self.text(format, lane)?;
        let (mut text, mut count, mut next) = (vec![], 0, arguments);
        let mut rest = format.as_slice();
        while let Some(at) = rest.iter().position(|c| *c == b'%') {
            text.extend_from_slice(&rest[..at]);
            let Some((spec, length)) = Spec::parse(&rest[at..]) else {
                // Not a specifier: it is printed as it stands.
                text.push(b'%');
                rest = &rest[at + 1..];
                continue;
            };
            rest = &rest[at + length..];
            if spec.kind == b'%' {
                text.push(b'%');
                continue;
            }
            let mut argument = |exec: &mut Self, bytes: u64| -> Run<u64> {
                // The read of an address that cannot be rounded up is a fault.
                next = next.checked_next_multiple_of(bytes).unwrap_or(next);
                let value = exec.word(next, bytes, lane)?;
                next = next.saturating_add(bytes);
                count += 1;
                Ok(value)
            };
            let mut spec = spec;
            if spec.width == Count::Given {
                let width = argument(self, 4)? as u32 as i32;
                spec.left |= width < 0;
                spec.width = Count::Of(width.unsigned_abs() as usize);
            }
            if spec.precision == Count::Given {
                let precision = argument(self, 4)? as u32 as i32;
                spec.precision = usize::try_from(precision).map_or(Count::None, |n| Count::Of(n.min(MOST)));
            }
            let value = argument(self, spec.bytes())?;
            if spec.kind == b's' {
                let string = if value == 0 { b"(null)".to_vec() } else { self.text(value, lane)? };
                spec.string(&mut text, &string);
            } else {
                spec.value(&mut text, value);
            }
        }
        text.extend_from_slice(rest);
        self.env.output.print(&text);
        Ok(count)
    }

    /// The bytes of a string, without the 0 at its end.
    fn text(&mut self, at: u64, lane: usize) -> Run<Vec<u8>> {
        let mut text = vec![];
        while text.len() < MOST {
            match self.word(at.saturating_add(text.len() as u64), 1, lane)? as u8 {
                0 => break,
                byte => text.push(byte),
            }
        }
        Ok(text)
    }

    /// A weak read of 1, 4 or 8 bytes at a generic address.
    fn word(&mut self, at: u64, bytes: u64, lane: usize) -> Run<u64> {
        self.read_generic(at, bytes, lane)
    }
}

/// A width or a precision.
#[derive(Clone, Copy, PartialEq)]
enum Count {
    None,
    /// `*`: an argument.
    Given,
    Of(usize),
}

/// A conversion specifier.
#[derive(Clone, Copy)]
struct Spec {
    alternate: bool,
    zero: bool,
    left: bool,
    plus: bool,
    blank: bool,
    width: Count,
    precision: Count,
    /// `h`, `l` (also `ll`), or nothing.
    size: u8,
    kind: u8,
}

impl Spec {
    /// The specifier at the begin of `text`, which is a `%`, and its length.
    fn parse(text: &[u8]) -> Option<(Spec, usize)> {
        let mut at = 1;
        let mut spec = Spec {
            alternate: false,
            zero: false,
            left: false,
            plus: false,
            blank: false,
            width: Count::None,
            precision: Count::None,
            size: 0,
            kind: 0,
        };
        loop {
            match text.get(at)? {
                b'#' => spec.alternate = true,
                b'0' => spec.zero = true,
                b'-' => spec.left = true,
                b'+' => spec.plus = true,
                b' ' => spec.blank = true,
                _ => break,
            }
            at += 1;
        }
        let count = |at: &mut usize| -> Option<Count> {
            if *text.get(*at)? == b'*' {
                *at += 1;
                return Some(Count::Given);
            }
            let mut value = None;
            while let Some(digit) = text.get(*at).filter(|c| c.is_ascii_digit()) {
                value = Some((value.unwrap_or(0) * 10 + usize::from(digit - b'0')).min(MOST));
                *at += 1;
            }
            Some(value.map_or(Count::None, Count::Of))
        };
        spec.width = count(&mut at)?;
        if *text.get(at)? == b'.' {
            at += 1;
            // A point alone is a precision of 0.
            spec.precision = match count(&mut at)? {
                Count::None => Count::Of(0),
                count => count,
            };
        }
        while let Some(size @ (b'h' | b'l')) = text.get(at) {
            spec.size = *size;
            at += 1;
        }
        spec.kind = *text.get(at)?;
        b"%cdiouxXpeEfFgGaAs".contains(&spec.kind).then_some((spec, at + 1))
    }

    /// Bytes of its argument.
    fn bytes(&self) -> u64 {
        match self.kind {
            b'd' | b'i' | b'o' | b'u' | b'x' | b'X' if self.size == b'l' => 8,
            b'd' | b'i' | b'o' | b'u' | b'x' | b'X' | b'c' => 4,
            _ => 8,
        }
    }

    fn string(&self, text: &mut Vec<u8>, string: &[u8]) {
        let most = if let Count::Of(most) = self.precision { most } else { MOST };
        Spec { zero: false, ..*self }.field(text, b"", &string[..string.len().min(most)]);
    }

    fn value(&self, text: &mut Vec<u8>, bits: u64) {
        match self.kind {
            b'c' => Spec { zero: false, ..*self }.field(text, b"", &[bits as u8]),
            b'p' => self.field(text, b"", format!("{bits:#x}").as_bytes()),
            b'd' | b'i' => {
                let value = match self.size {
                    b'l' => bits as i64,
                    b'h' => i64::from(bits as i16),
                    _ => i64::from(bits as i32),
                };
                let sign = self.sign(value < 0);
                self.integer(text, sign, &value.unsigned_abs().to_string(), value == 0);
            }
            b'o' | b'u' | b'x' | b'X' => {
                let value = match self.size {
                    b'l' => bits,
                    b'h' => u64::from(bits as u16),
                    _ => u64::from(bits as u32),
                };
                let (prefix, digits): (&[u8], _) = match self.kind {
                    b'o' => (if self.alternate && value != 0 { b"0" } else { b"" }, format!("{value:o}")),
                    b'u' => (b"", value.to_string()),
                    b'x' => (b"0x", format!("{value:x}")),
                    _ => (b"0X", format!("{value:X}")),
                };
                let prefix = if self.alternate && value != 0 { prefix } else { b"" };
                self.integer(text, prefix, &digits, value == 0);
            }
            _ => self.float(text, f64::from_bits(bits)),
        }
    }

    fn sign(&self, negative: bool) -> &'static [u8] {
        match () {
            () if negative => b"-",
            () if self.plus => b"+",
            () if self.blank => b" ",
            () => b"",
        }
    }

    /// A precision is the least number of digits of an integer, and switches `0` off.
    fn integer(&self, text: &mut Vec<u8>, prefix: &[u8], digits: &str, is_zero: bool) {
        let Count::Of(least) = self.precision else { return self.field(text, prefix, digits.as_bytes()) };
        let digits = if is_zero && least == 0 { String::new() } else { format!("{digits:0>least$}") };
        Spec { zero: false, ..*self }.field(text, prefix, digits.as_bytes());
    }

    fn float(&self, text: &mut Vec<u8>, value: f64) {
        let upper = self.kind.is_ascii_uppercase();
        let (sign, size) = (self.sign(value.is_sign_negative() && !value.is_nan()), value.abs());
        if !value.is_finite() {
            let name = if value.is_nan() { "nan" } else { "inf" };
            let name = if upper { name.to_uppercase() } else { name.to_owned() };
            return Spec { zero: false, ..*self }.field(text, sign, name.as_bytes());
        }
        let precision = if let Count::Of(precision) = self.precision { Some(precision) } else { None };
        let (prefix, body) = match self.kind | 0x20 {
            b'f' => ("", self.fixed(size, precision.unwrap_or(6))),
            b'e' => ("", self.scientific(size, precision.unwrap_or(6))),
            b'a' => ("0x", self.hexadecimal(size, precision)),
            _ => ("", self.general(size, precision.unwrap_or(6).max(1))),
        };
        let (prefix, body) =
            if upper { (prefix.to_uppercase(), body.to_uppercase()) } else { (prefix.to_owned(), body) };
        self.field(text, &[sign, prefix.as_bytes()].concat(), body.as_bytes());
    }

    fn fixed(&self, size: f64, precision: usize) -> String {
        let point = if self.alternate && precision == 0 { "." } else { "" };
        format!("{size:.precision$}{point}")
    }

    fn scientific(&self, size: f64, precision: usize) -> String {
        let all = format!("{size:.precision$e}");
        let (digits, exponent) = all.split_once('e').unwrap_or((&all, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let point = if self.alternate && precision == 0 { "." } else { "" };
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}{point}e{sign}{:02}", exponent.unsigned_abs())
    }

    /// `%g` with `precision` significant digits: C11, 7.21.6.1.
    fn general(&self, size: f64, precision: usize) -> String {
        let scientific = format!("{size:.0$e}", precision - 1);
        let exponent: i32 = scientific.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
        let digits = if exponent < -4 || exponent >= precision as i32 {
            self.scientific(size, precision - 1)
        } else {
            self.fixed(size, (precision as i32 - 1 - exponent).max(0) as usize)
        };
        if self.alternate || !digits.contains('.') {
            return digits;
        }
        let (mantissa, exponent) = digits.split_at(digits.find('e').unwrap_or(digits.len()));
        format!("{}{exponent}", mantissa.trim_end_matches('0').trim_end_matches('.'))
    }

    /// The digits of `%a` behind its `0x`: one in front of the point, 1 unless the number is 0 or
    /// subnormal.
    fn hexadecimal(&self, size: f64, precision: Option<usize>) -> String {
        const BITS: u32 = f64::MANTISSA_DIGITS - 1;
        let bits = size.to_bits();
        let (mut mantissa, exponent) = (bits & ((1 << BITS) - 1), (bits >> BITS) as i32);
        let mut exponent = exponent - 1023;
        if exponent == -1023 {
            exponent = if mantissa == 0 { 0 } else { -1022 };
        } else {
            mantissa |= 1 << BITS;
        }
        let digits = precision.unwrap_or(13).min(13);
        let cut = 4 * (13 - digits as u32);
        if cut > 0 {
            // To the nearest, ties to even.
            let (half, rest) = (1u64 << (cut - 1), mantissa & ((1 << cut) - 1));
            mantissa >>= cut;
            mantissa += u64::from(rest > half || rest == half && mantissa & 1 == 1);
            mantissa <<= cut;
        }
        let fraction = format!("{:013x}", mantissa & ((1 << BITS) - 1));
        let fraction = match precision {
            Some(precision) => format!("{:0<precision$}", &fraction[..digits]),
            None => fraction.trim_end_matches('0').to_owned(),
        };
        let point = if fraction.is_empty() && !self.alternate { "" } else { "." };
        format!("{:x}{point}{fraction}p{exponent:+}", mantissa >> BITS)
    }

    /// Brings the text of a value to its width.
    fn field(&self, text: &mut Vec<u8>, prefix: &[u8], body: &[u8]) {
        let width = if let Count::Of(width) = self.width { width.min(MOST) } else { 0 };
        let missing = width.saturating_sub(prefix.len() + body.len());
        let pad = |text: &mut Vec<u8>, with: u8| text.resize(text.len() + missing, with);
        if !self.left && !self.zero {
            pad(text, b' ');
        }
        text.extend_from_slice(prefix);
        if !self.left && self.zero {
            pad(text, b'0');
        }
        text.extend_from_slice(body);
        if self.left {
            pad(text, b' ');
        }
    }
}
