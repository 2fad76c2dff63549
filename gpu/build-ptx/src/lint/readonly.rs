//! Loads by the read-only cache only where a kernel asks for them.

use super::finding::Finding;
use crate::ptx::Module;

const RULE: &str = "readonly";

/// Refuses `ld.global.nc` outside inline assembly: the compiler makes it from `&T`, and it may read
/// stale bytes when another SM, GPU or NIC writes them.
pub fn check(module: &Module) -> Vec<Finding> {
    module
        .instructions()
        .filter(|(_, statement)| statement.is("ld") && statement.has_modifier("nc") && !statement.inline_asm)
        .map(|(entry, statement)| {
            let message = format!(
                "`{}` reads a `&T` through the read-only cache: `{}`. Take a raw pointer, or say `ld_nc` where the data never changes",
                entry.name, statement.text
            );
            Finding::new(RULE, statement.line, message)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, entry};
    use super::*;

    const LOAD: &str = "ld.global.nc.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];";

    #[test]
    fn explicit_loads_pass_and_implicit_ones_fail() {
        assert_eq!(check(&entry(&format!("// begin inline asm\n{LOAD}\n// end inline asm\nret;"))), []);
        assert_one(&check(&entry(LOAD)), "read-only cache");
    }
}
