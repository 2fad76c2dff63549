//! Text of other processes, escaped for output.
//!
//! An unauthenticated process at a port of the job, or with access to a store without a secret, can
//! put text into errors and logs. Control characters could set a terminal's title or clipboard, and
//! a line end could forge a line of this program.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Most bytes of another process's text that are shown.
const MOST: usize = 4096;

/// Whether a character may be shown as it is: not a control character, and none that is invisible
/// or turns text around.
fn is_plain(c: char) -> bool {
    matches!(c, '"' | '\'' | '\\') || c.escape_debug().len() == 1
}

fn escape(text: &str, keep: impl Fn(char) -> bool) -> Cow<'_, str> {
    if text.len() <= MOST && text.chars().all(|c| keep(c) || is_plain(c)) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::new();
    for c in text.chars() {
        if shown.len() >= MOST {
            let _ = write!(shown, ".. ({} bytes in all)", text.len());
            break;
        }
        match keep(c) || is_plain(c) {
            true => shown.push(c),
            false => shown.extend(c.escape_debug()),
        }
    }
    Cow::Owned(shown)
}

/// The text on one line: line ends and all other characters that are not plain are escaped.
pub fn escaped(text: &[u8]) -> String {
    escape(&String::from_utf8_lossy(text), |_| false).into_owned()
}

/// The same in quotes, which it cannot end.
pub fn quoted(text: &[u8]) -> String {
    format!("\"{}\"", escaped(text).replace('"', "\\\""))
}

/// The text, of which line ends and tabs stay as they are.
pub fn printable(text: &str) -> Cow<'_, str> {
    escape(text, |c| matches!(c, '\n' | '\t'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn terminals_get_no_control_characters() {
        let title = "\u{1b}]0;owned\u{7}";
        assert_eq!(escaped(title.as_bytes()), "\\u{1b}]0;owned\\u{7}");
        assert_eq!(escaped(b"no\nPASS\r\x08"), "no\\nPASS\\r\\u{8}");
        assert_eq!(escaped("left\u{202e}thgir\u{9b}2J".as_bytes()), "left\\u{202e}thgir\\u{9b}2J");
        assert_eq!(quoted(b"a \"b\" c"), "\"a \\\"b\\\" c\"");
        assert_eq!(printable("one\n\ttwo\u{1b}[2J"), "one\n\ttwo\\u{1b}[2J");
        let plain = "it's C:\\temp, \"x\" and \u{fc}ber";
        assert_eq!(escaped(plain.as_bytes()), plain);
        let long = escaped(&vec![b'x'; 1 << 20]);
        assert!(long.len() < MOST + 40 && long.ends_with("(1048576 bytes in all)"), "{}", long.len());
    }

    proptest! {
        #[test]
        fn whatever_comes_is_one_line_without_control_characters(bytes in any::<Vec<u8>>()) {
            let shown = escaped(&bytes);
            prop_assert!(!shown.chars().any(char::is_control));
            prop_assert!(!printable(&shown).chars().any(char::is_control));
        }
    }
}
