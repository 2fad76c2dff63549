//! Loads and stores that compiled code calls the interpreter for.

use super::state::Exec;
use crate::check::hooks::Hooks;
use crate::compiled::Accesses;

#[cfg(all(target_arch = "x86_64", not(miri)))]
use crate::ir::{Inst, Op};

impl<W: Hooks> Exec<'_, W> {
    /// For code that runs on the registers of this warp.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline(always)]
    pub(super) fn accesses(&mut self) -> Accesses {
        Accesses {
            access: access::<W> as *const (),
            execution: std::ptr::from_mut(self).cast(),
            parameters: self.env.params.as_ptr().cast(),
        }
    }

    /// Without a compiler no code asks for one.
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    pub(super) fn accesses(&mut self) -> Accesses {
        Accesses { access: std::ptr::null(), execution: std::ptr::null_mut(), parameters: std::ptr::null() }
    }
}

/// A weak load or store of compiled code, by the lanes `m`: see [`Accesses::access`].
///
/// # Safety
/// `execution` must be an `Exec` with these hooks that nothing else uses during the call, and `inst`
/// an instruction of its kernel. The processor must have AVX2.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2")]
unsafe extern "sysv64" fn access<W: Hooks>(execution: *mut (), inst: *const Inst, m: u32, pc: u32) -> bool {
    // SAFETY: the caller vouches for both pointers. Compiled code also has pointers to the registers
    // of the warp, which it does not use during the call, and the call does not move these.
    let (exec, inst) = unsafe { (&mut *execution.cast::<Exec<'_, W>>(), &*inst) };
    exec.pc = pc;
    let done = match &inst.op {
        Op::Ld(a) => exec.load(a, m).map(drop),
        Op::St(a) => exec.store(a, m),
        _ => Ok(()),
    };
    match done {
        Ok(()) => false,
        Err(stop) => {
            exec.fault = Some(stop);
            true
        }
    }
}
