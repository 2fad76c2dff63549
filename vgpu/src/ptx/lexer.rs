//! Turns PTX text into tokens with their line and column.
//!
//! A dotted opcode with all of its modifiers (`ld.global.L1::no_allocate.v4.u32`) is one
//! [`Tok::Word`], and so is a register such as `%tid.x`. PTX never puts white space inside them,
//! and the decoder needs them whole.

use super::Span;
use crate::PtxError;

/// Kind of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Tok<'a> {
    /// Identifier, register, directive or opcode.
    Word(&'a str),
    /// Integer literal; the sign is a separate [`Tok::Punct`].
    Int(u64),
    /// `0fXXXXXXXX`: bits of an f32.
    F32(u32),
    /// `0dXXXXXXXXXXXXXXXX`: bits of an f64.
    F64(u64),
    /// A literal with a decimal point, also the `8.4` of `.version`.
    Decimal(&'a str),
    /// A quoted string, without its quotes; escapes are left as written.
    Str(&'a str),
    /// A single character of punctuation.
    Punct(char),
    /// End of the text.
    Eof,
}

/// A token and its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token<'a> {
    pub(crate) tok: Tok<'a>,
    pub(crate) span: Span,
}

/// Builds an error that quotes the source line.
pub(crate) fn error_at(text: &str, line: usize, column: usize, message: impl Into<String>) -> PtxError {
    let source_line = text.lines().nth(line.saturating_sub(1)).unwrap_or("").to_string();
    PtxError { line, column, message: message.into(), source_line }
}

fn is_word_start(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

/// Splits the whole text; the last token is [`Tok::Eof`].
pub(crate) fn tokenize(text: &str) -> Result<Vec<Token<'_>>, PtxError> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(text.len() / 4);
    let (mut i, mut line, mut line_start) = (0, 1, 0);
    while i < bytes.len() {
        let c = bytes[i];
        let column = i - line_start + 1;
        let rest = &bytes[i..];
        let span = |len: usize| Span { line, column, start: i, end: i + len };
        match c {
            b'\n' => {
                line += 1;
                i += 1;
                line_start = i;
            }
            b' ' | b'\t' | b'\r' => i += 1,
            // LLVM pads its output with NUL in places.
            0 => i += 1,
            b'/' if rest.get(1) == Some(&b'/') => {
                i += rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
            }
            b'/' if rest.get(1) == Some(&b'*') => {
                let end = rest[2..].windows(2).position(|w| w == b"*/");
                let Some(end) = end else {
                    return Err(error_at(text, line, column, "comment without an end"));
                };
                for (k, &b) in rest[..end + 4].iter().enumerate() {
                    if b == b'\n' {
                        line += 1;
                        line_start = i + k + 1;
                    }
                }
                i += end + 4;
            }
            b'"' => {
                let mut k = 1;
                while k < rest.len() && rest[k] != b'"' && rest[k] != b'\n' {
                    k += if rest[k] == b'\\' { 2 } else { 1 };
                }
                if rest.get(k) != Some(&b'"') {
                    return Err(error_at(text, line, column, "string without an end"));
                }
                out.push(Token { tok: Tok::Str(&text[i + 1..i + k]), span: span(k + 1) });
                i += k + 1;
            }
            b'0'..=b'9' => {
                let (tok, len) = number(text, i, line, column)?;
                out.push(Token { tok, span: span(len) });
                i += len;
            }
            _ if is_word_start(c) => {
                let mut k = 1;
                while k < rest.len() {
                    if is_word(rest[k]) {
                        k += 1;
                    } else if rest[k] == b':' && rest.get(k + 1) == Some(&b':') {
                        k += 2;
                    } else {
                        break;
                    }
                }
                out.push(Token { tok: Tok::Word(&text[i..i + k]), span: span(k) });
                i += k;
            }
            _ if c.is_ascii_graphic() => {
                out.push(Token { tok: Tok::Punct(c as char), span: span(1) });
                i += 1;
            }
            _ => {
                let c = text[i..].chars().next().unwrap_or('?');
                return Err(error_at(text, line, column, format!("character {c:?} has no place in PTX")));
            }
        }
    }
    let span = Span { line, column: i - line_start + 1, start: i, end: i };
    out.push(Token { tok: Tok::Eof, span });
    Ok(out)
}

fn number(text: &str, start: usize, line: usize, column: usize) -> Result<(Tok<'_>, usize), PtxError> {
    let bytes = &text.as_bytes()[start..];
    let mut len = 0;
    while len < bytes.len() && bytes[len].is_ascii_alphanumeric() {
        len += 1;
    }
    // `8.4` and `0.`, but not the `1.` of a malformed word.
    let whole = bytes[..len].iter().all(u8::is_ascii_digit);
    if whole && bytes.get(len) == Some(&b'.') && !bytes.get(len + 1).is_some_and(|b| is_word_start(*b)) {
        len += 1;
        while len < bytes.len() && bytes[len].is_ascii_digit() {
            len += 1;
        }
        return Ok((Tok::Decimal(&text[start..start + len]), len));
    }
    let word = &text[start..start + len];
    let bad = || error_at(text, line, column, format!("'{word}' is not a number"));
    let float = word.get(..2).unwrap_or("");
    if float.eq_ignore_ascii_case("0f") && len == 10 {
        return Ok((Tok::F32(u32::from_str_radix(&word[2..], 16).map_err(|_| bad())?), len));
    }
    if float.eq_ignore_ascii_case("0d") && len == 18 {
        return Ok((Tok::F64(u64::from_str_radix(&word[2..], 16).map_err(|_| bad())?), len));
    }
    let digits = word.strip_suffix(['U', 'u']).unwrap_or(word);
    let value = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => u64::from_str_radix(&digits[2..], 16),
        [b'0', b'b' | b'B', ..] => u64::from_str_radix(&digits[2..], 2),
        [b'0', _, ..] => u64::from_str_radix(&digits[1..], 8),
        _ => digits.parse(),
    };
    Ok((Tok::Int(value.map_err(|_| bad())?), len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toks(text: &str) -> Vec<Tok<'_>> {
        tokenize(text).unwrap().into_iter().map(|t| t.tok).collect()
    }

    #[test]
    fn words_keep_their_modifiers() {
        assert_eq!(
            toks("ld.global.L1::no_allocate.v4.u32 {%r1,_}, [%tid.x+-8];"),
            vec![
                Tok::Word("ld.global.L1::no_allocate.v4.u32"),
                Tok::Punct('{'),
                Tok::Word("%r1"),
                Tok::Punct(','),
                Tok::Word("_"),
                Tok::Punct('}'),
                Tok::Punct(','),
                Tok::Punct('['),
                Tok::Word("%tid.x"),
                Tok::Punct('+'),
                Tok::Punct('-'),
                Tok::Int(8),
                Tok::Punct(']'),
                Tok::Punct(';'),
                Tok::Eof
            ]
        );
    }

    #[test]
    fn numbers() {
        assert_eq!(
            toks("8.4 0. 0x1F 017 0b101 42U 0f3F800000 0d3FF0000000000000"),
            vec![
                Tok::Decimal("8.4"),
                Tok::Decimal("0."),
                Tok::Int(31),
                Tok::Int(15),
                Tok::Int(5),
                Tok::Int(42),
                Tok::F32(0x3f80_0000),
                Tok::F64(0x3ff0_0000_0000_0000),
                Tok::Eof
            ]
        );
        let e = tokenize("mov\n  0xZZ").unwrap_err();
        assert_eq!((e.line, e.column), (2, 3));
    }

    #[test]
    fn comments_and_labels() {
        let t = tokenize("// a\n/* b\n c */ $L1: bra").unwrap();
        assert_eq!(t[0].tok, Tok::Word("$L1"));
        assert_eq!((t[0].span.line, t[0].span.column), (3, 7));
        assert_eq!(t[1].tok, Tok::Punct(':'));
        assert!(tokenize("/* open").is_err());
        assert!(tokenize("\"open").is_err());
        assert_eq!(tokenize("a \u{e9}").unwrap_err().column, 3);
    }
}
