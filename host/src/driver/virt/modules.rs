//! Parsed modules, each parsed once a process: every rank that is a thread loads the same kernels
//! for every buffer.

use std::sync::{Arc, Mutex, OnceLock};

use epoxide_vgpu::{Module, PtxError};

use crate::lock::lock;

/// Texts that are kept. A program that loads more of them begins anew.
const KEPT: usize = 32;

type Parsed = Arc<OnceLock<Result<Arc<Module>, PtxError>>>;

/// A list: texts of megabytes differ in length, and a hash of one takes longer than all comparisons.
static MODULES: Mutex<Vec<(String, Parsed)>> = Mutex::new(Vec::new());

/// The module of a PTX text. A module with variables is parsed at each call, since loads must not
/// share variables.
pub(super) fn parsed(ptx: &str) -> Result<Arc<Module>, PtxError> {
    let cell = {
        let mut modules = lock(&MODULES);
        match modules.iter().find(|(text, _)| text == ptx) {
            Some((_, cell)) => cell.clone(),
            None => {
                if modules.len() >= KEPT {
                    modules.clear();
                }
                let cell = Parsed::default();
                modules.push((ptx.to_owned(), cell.clone()));
                cell
            }
        }
    };
    // Without the lock: loads of other texts proceed, and loads of this one wait.
    let module = cell.get_or_init(|| Module::parse(ptx).map(Arc::new)).clone()?;
    if module.has_globals() { Module::parse(ptx).map(Arc::new) } else { Ok(module) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 7.8\n.target sm_90\n.address_size 64\n";

    #[test]
    fn a_text_is_parsed_once_unless_it_has_variables() {
        let kernel = |body: &str| format!("{HEAD}{body}.visible .entry once()\n{{\n    ret;\n}}\n");
        let same = |ptx: &str| Arc::ptr_eq(&parsed(ptx).unwrap(), &parsed(ptx).unwrap());
        assert!(same(&kernel("")));
        assert!(!same(&kernel(".visible .global .u32 counter;\n")));
        let wrong = kernel("").replace("ret", "no such instruction");
        assert_eq!(parsed(&wrong).unwrap_err(), parsed(&wrong).unwrap_err());
    }
}
