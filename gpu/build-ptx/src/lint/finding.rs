//! Requirements of a PTX file, and the findings of a rule.

use std::fmt;

use crate::backend::PtxVersion;
use crate::described::KernelInfo;

/// Something a rule found wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule's name.
    pub rule: &'static str,
    /// The line in the PTX file, from 1; 0 where it is about the file as a whole.
    pub line: usize,
    /// The error and its remedy.
    pub message: String,
}

impl Finding {
    /// A finding about one line, or about the whole file (line 0).
    pub fn new(rule: &'static str, line: usize, message: impl Into<String>) -> Self {
        Self { rule, line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "line {}: ", self.line)?;
        }
        write!(f, "{} [{}]", self.message, self.rule)
    }
}

/// Requirements of a file.
pub struct Expect<'a> {
    /// The kernels it must hold, as it describes them.
    pub described: &'a [KernelInfo],
    /// The highest `.version` allowed.
    pub version: PtxVersion,
    /// The `.target`, such as `sm_90`.
    pub target: &'a str,
}
