//! Everything is inlined: no functions, no calls, no runtime of the compiler's.

use super::{Finding, Module};

const RULE: &str = "functions";

const RUNTIME: [&str; 4] = ["vprintf", "malloc", "free", "__assert_fail"];

/// Rejects `.func`, `call` and the names of runtime and panic functions.
pub fn check(module: &Module) -> Vec<Finding> {
    let mut findings = Vec::new();
    for function in &module.file.functions {
        let line = function.pos.line;
        let message = format!(
            "`{}`: inline it: a function that kernels call is `#[device]` or `#[inline(always)]`",
            module.line(line)
        );
        findings.push(Finding::new(RULE, line, message));
    }
    let forbidden = |symbol: &str| {
        (RUNTIME.contains(&symbol) || is_mangled(symbol) && symbol.contains("panic"))
            .then(|| format!("`{symbol}`: kernels use neither a runtime nor panic messages: remove what prints, allocates or asserts"))
    };
    for variable in &module.file.variables {
        findings.extend(forbidden(&variable.name).map(|why| Finding::new(RULE, variable.pos.line, why)));
    }
    for (_, inst) in module.instructions() {
        let message = if inst.is("call") {
            Some(format!(
                "a call: `{}`: inline the function, which is `#[device]` or `#[inline(always)]`",
                module.show(inst)
            ))
        } else {
            inst.operands.iter().flat_map(|(operand, _)| operand.names()).find_map(forbidden)
        };
        findings.extend(message.map(|message| Finding::new(RULE, inst.whole.line, message)));
    }
    findings
}

/// Whether rustc has made the name from a path, such as that of a panic function of `core`. Names
/// of kernels and of their parameters are the author's.
fn is_mangled(symbol: &str) -> bool {
    symbol.starts_with("_ZN") || symbol.starts_with("_R")
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, of, text};
    use super::*;

    #[test]
    fn inlined_code_passes() {
        assert_eq!(of(".file 1 \"rust/core/src/panic.rs\"\nadd.s32 %r1, %r1, 1;\nret;", check), []);
    }

    #[test]
    fn kernels_may_be_named_after_panics() {
        let text = text("ld.param.b64 %rd1, [copy_param_0];\nret;").replace("copy", "count_panics");
        assert_eq!(check(&Module::read(&text).unwrap()), []);
    }

    #[test]
    fn functions_fail() {
        let with = |function: &str| check(&Module::read(&(text("ret;") + function)).unwrap());
        assert_one(&with(".extern .func helper (.param .b64 a);"), "inline it");
        assert_one(&with(".func helper()\n{\nret;\n}"), "inline it");
    }

    #[test]
    fn calls_and_runtime_symbols_fail() {
        assert_one(&of("call.uni (r), helper, (p);", check), "a call");
        assert_one(&of("mov.u64 %rd1, vprintf;", check), "`vprintf`");
        let symbol = "mov.u64 %rd1, _ZN4core9panicking5panic17hE;";
        assert_one(&of(symbol, check), "panic messages");
        assert_one(&of("mov.u64 %rd1, _RNvNtCs1_4core9panicking5panic;", check), "panic messages");
    }
}
