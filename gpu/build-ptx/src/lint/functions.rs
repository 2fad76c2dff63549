//! Everything is inlined: no functions, no calls, no runtime of the compiler's.

use super::finding::Finding;
use crate::ptx::{Module, Statement};

const RULE: &str = "functions";

const RUNTIME: [&str; 4] = ["vprintf", "malloc", "free", "__assert_fail"];

/// Refuses `.func`, `call` and the names of runtime and panic functions.
pub fn check(module: &Module) -> Vec<Finding> {
    let mut findings = Vec::new();
    for header in &module.functions {
        let message = format!(
            "`{}`: inline it: a function that kernels call is `#[device]` or `#[inline(always)]`",
            header.text
        );
        findings.push(Finding::new(RULE, header.line, message));
    }
    let bodies = module.instructions().map(|(_, statement)| statement);
    for statement in module.items.iter().chain(bodies) {
        if statement.is("call") {
            findings.push(Finding::new(RULE, statement.line, format!("a call: `{}`", statement.text)));
        } else if let Some(symbol) = runtime_symbol(statement) {
            let message = format!("`{symbol}`: kernels use neither a runtime nor panic messages");
            findings.push(Finding::new(RULE, statement.line, message));
        }
    }
    findings
}

fn runtime_symbol(statement: &Statement) -> Option<&str> {
    if statement.text.starts_with(".file") {
        return None;
    }
    statement.words().find(|word| RUNTIME.contains(word) || word.contains("panic"))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, entry};
    use super::*;

    #[test]
    fn inlined_code_passes() {
        assert_eq!(check(&entry(".file 1 \"rust/core/src/panic.rs\"\nadd.s32 %r1, %r1, 1;\nret;")), []);
    }

    #[test]
    fn functions_fail() {
        assert_one(&check(&Module::read(".extern .func helper (.param .b64 a);")), "inline it");
        assert_one(&check(&Module::read(".func helper()\n{\nret;\n}")), "inline it");
    }

    #[test]
    fn calls_and_runtime_symbols_fail() {
        assert_one(&check(&entry("call.uni (r), helper, (p);")), "a call");
        assert_one(&check(&entry("mov.u64 %rd1, vprintf;")), "`vprintf`");
        let symbol = "mov.u64 %rd1, _ZN4core9panicking5panic17hE;";
        assert_one(&check(&entry(symbol)), "panic messages");
    }
}
