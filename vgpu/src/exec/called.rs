//! Instructions that compiled code calls the interpreter for.

use super::state::Exec;
use crate::check::hooks::Hooks;
use crate::compiled::Calls;

#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::state::Flow;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use crate::ir::{Inst, Op};

impl<W: Hooks> Exec<'_, W> {
    /// For code that runs on the registers of this warp.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline(always)]
    pub(super) fn calls(&mut self) -> Calls {
        Calls {
            call: call::<W> as *const (),
            poll: poll::<W> as *const (),
            execution: std::ptr::from_mut(self).cast(),
            parameters: self.env.params.as_ptr().cast(),
        }
    }

    /// Without a compiler no code uses the functions.
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    pub(super) fn calls(&mut self) -> Calls {
        let null = std::ptr::null();
        Calls { call: null, poll: null, execution: std::ptr::null_mut(), parameters: null.cast() }
    }
}

/// A load of compiled code for which [`Access::is_word_of_others`] holds: as [`call`], which it
/// shortens where few lanes read one region.
///
/// [`Access::is_word_of_others`]: crate::ir::Access::is_word_of_others
///
/// # Safety
/// The same conditions as for [`call`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2")]
unsafe extern "sysv64" fn poll<W: Hooks>(
    execution: *mut (),
    inst: *const Inst,
    m: u32,
    pc: u32,
    left: i64,
) -> bool {
    {
        // SAFETY: see `call`. Both references end with this block.
        let (exec, inst) = unsafe { (&mut *execution.cast::<Exec<'_, W>>(), &*inst) };
        if let Op::Ld(access) = &inst.op
            && !W::ON
        {
            exec.drain();
            if let Some((first, seen)) = exec.load_words(access, m) {
                exec.pc = pc;
                exec.executed = exec.run_end - left as u64;
                let flow = exec.loaded(access, Some(first), seen);
                // Neither the running lanes nor others have moved.
                if flow != Flow::Next {
                    exec.called = Some(flow);
                }
                return flow != Flow::Next;
            }
        }
    }
    // SAFETY: the caller keeps the conditions.
    unsafe { call::<W>(execution, inst, m, pc, left) }
}

/// Runs an instruction of compiled code for the lanes `m`: see [`Calls::call`]. Compiled code
/// continues behind it if the same lanes do, and no other lanes of the warp may have moved.
///
/// # Safety
/// `execution` must be an `Exec` with these hooks that nothing else uses during the call, and `inst`
/// an instruction of its kernel. The processor must have AVX2.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2")]
unsafe extern "sysv64" fn call<W: Hooks>(
    execution: *mut (),
    inst: *const Inst,
    m: u32,
    pc: u32,
    left: i64,
) -> bool {
    // SAFETY: the caller vouches for both pointers. Compiled code also has pointers to the registers
    // of the warp, which it does not use during the call, and the call does not move these.
    let (exec, inst) = unsafe { (&mut *execution.cast::<Exec<'_, W>>(), &*inst) };
    let mask = exec.mask;
    exec.pc = pc;
    exec.executed = exec.run_end - left as u64;
    let done = exec.execute(inst, m);
    let moves_no_others = || {
        matches!(inst.op, Op::Ld(_) | Op::St(_) | Op::Atom(_) | Op::Multimem { .. })
            || matches!(inst.op, Op::Fence(_) | Op::Timer { .. })
    };
    let others_stay = || exec.warp.groups.is_empty() || moves_no_others();
    match done {
        Ok(Flow::Next) if exec.mask == mask && others_stay() => return false,
        Ok(flow) => exec.called = Some(flow),
        Err(fault) => exec.called_fault = Some(fault),
    }
    true
}
