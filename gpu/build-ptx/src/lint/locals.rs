//! No local memory: a local variable in PTX is a round trip to device memory.

use super::finding::Finding;
use crate::described::{self, KernelInfo};
use crate::ptx::Module;

const RULE: &str = "locals";

/// Refuses `.local` variables where the kernel's attribute gives no reason for them.
pub fn check(module: &Module, described: &[KernelInfo]) -> Vec<Finding> {
    let allowed =
        |name: &str| described::find(described, name).is_some_and(|k| k.local_depot_allowed.is_some());
    let in_bodies = module
        .instructions()
        .filter(|(entry, _)| !allowed(&entry.name))
        .map(|(entry, statement)| (entry.name.as_str(), statement));
    let at_module_scope = module.items.iter().map(|statement| ("the module", statement));
    in_bodies
        .chain(at_module_scope)
        .filter(|(_, statement)| statement.text.starts_with(".local"))
        .map(|(owner, statement)| {
            let message = format!(
                "`{owner}` keeps a variable in local memory: `{}`. An array is indexed at run time; index it by constants, \
                 or read it through a pointer",
                statement.text
            );
            Finding::new(RULE, statement.line, message)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_one, entry};
    use super::*;
    use crate::described::samples::kernel;

    const DEPOT: &str = ".local .align 8 .b8 __local_depot0[72];\nret;";

    #[test]
    fn registers_pass_and_a_depot_fails() {
        assert_eq!(check(&entry(".reg .b32 %r<5>;\nret;"), &[kernel("copy")]), []);
        assert_one(&check(&entry(DEPOT), &[kernel("copy")]), "local memory");
    }

    #[test]
    fn the_attribute_can_allow_it() {
        let excused =
            KernelInfo { local_depot_allowed: Some("diagnostics only".to_owned()), ..kernel("copy") };
        assert_eq!(check(&entry(DEPOT), &[excused]), []);
    }
}
