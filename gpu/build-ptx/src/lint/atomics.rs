//! Every read-modify-write names its order and its scope; nothing orders memory the old way.

use super::finding::Finding;
use crate::ptx::{Module, Statement};

const RULE: &str = "atomics";

const ORDERS: [&str; 4] = ["relaxed", "acquire", "release", "acq_rel"];
const SCOPES: [&str; 4] = ["cta", "cluster", "gpu", "sys"];

/// Refuses `atom`, `red` and `multimem.red` without order or scope (rustc drops both from `core`
/// atomics), `membar`, and volatile accesses.
pub fn check(module: &Module) -> Vec<Finding> {
    module.instructions().filter_map(|(_, statement)| fault(statement)).collect()
}

fn fault(statement: &Statement) -> Option<Finding> {
    let opcode = statement.opcode()?;
    let has_any = |list: [&str; 4]| list.into_iter().any(|modifier| statement.has_modifier(modifier));
    let read_modify_write = statement.is("atom") || statement.is("red") || opcode.starts_with("multimem.red");
    let message = if read_modify_write && !(has_any(ORDERS) && has_any(SCOPES)) {
        format!(
            "`{opcode}` lacks memory order or scope: use the functions of epoxide-simt, not core::sync::atomic"
        )
    } else if statement.is("membar") {
        format!("`{opcode}`: use a fence that names order and scope")
    } else if statement.has_modifier("volatile") {
        format!("`{opcode}`: volatile orders nothing; use a relaxed or acquire/release access")
    } else {
        return None;
    };
    Some(Finding::new(RULE, statement.line, message))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, entry};
    use super::*;

    #[test]
    fn ordered_and_scoped_passes() {
        let body = "atom.acq_rel.sys.global.add.u32 %r1, [%rd1], 1;
            red.release.gpu.global.add.u64 [%rd1], 1;
            @%p1 atom.relaxed.cta.shared.cas.b32 %r1, [%r2], 0, 1;
            fence.acq_rel.sys;
            ld.acquire.sys.global.b64 %rd2, [%rd1];";
        assert_eq!(check(&entry(body)), []);
    }

    #[test]
    fn missing_order_or_scope_fails() {
        assert_one(&check(&entry("atom.global.add.u32 %r1, [%rd1], 1;")), "lacks");
        assert_one(&check(&entry("red.relaxed.global.add.u32 [%rd1], 1;")), "lacks");
        assert_one(&check(&entry("@!%p2 red.gpu.global.add.u32 [%rd1], 1;")), "lacks");
    }

    #[test]
    fn old_fences_and_volatile_fail() {
        assert_one(&check(&entry("membar.sys;")), "fence");
        assert_one(&check(&entry("ld.volatile.global.b32 %r1, [%rd1];")), "volatile");
        assert_one(&check(&entry("st.volatile.global.b32 [%rd1], %r1;")), "volatile");
    }
}
