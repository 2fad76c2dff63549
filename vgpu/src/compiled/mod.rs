//! Kernels compiled to instructions of this processor: their arithmetic, and the branches between.
//!
//! A kernel that has run for a while is compiled as a whole, once for warps all of whose lanes run
//! and once for others. Compiled code runs from the start of a basic block on, for as long as there
//! is arithmetic and all lanes branch alike. Without checks it also contains all other
//! instructions: a load of parameters is an instruction, and the others are calls of the
//! interpreter. It stops behind a call that changes the running lanes or their place, where the
//! budget of the slice ends within a block, and where lanes part; with checks in front of every
//! other instruction. The interpreter continues from there. All live values are in the registers of
//! the warp then, so each side can continue the other, and both count the same instructions.
//!
//! It needs x86-64 with AVX-512 (F, BW, DQ, VL, CD and VPOPCNTDQ), or else AVX2 and FMA. Elsewhere,
//! and in a process whose environment has `EPOXIDE_VGPU_COMPILE=0`, everything is interpreted. With
//! `EPOXIDE_VGPU_COMPILE=1` kernels are compiled when they first run.

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod assembler;
pub(crate) mod native;
#[cfg(all(test, target_arch = "x86_64", not(miri)))]
mod tests;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod translate;

/// The instructions between two at which other lanes of the warp stand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) behind: i32,
    pub(crate) ahead: i32,
}

impl Window {
    /// All instructions.
    pub(crate) const ALL: Window = Window { behind: -1, ahead: i32::MAX };
}

/// The arguments of compiled code for the instructions that it calls the interpreter for.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(all(target_arch = "x86_64", not(miri))), allow(dead_code))]
pub(crate) struct Calls {
    /// A function with the C interface of this system (System V): executes an instruction. Its
    /// arguments are `execution`, the instruction, the lanes for which it runs (one or more), the
    /// number of the instruction, and how much of the budget is left behind it. It returns whether
    /// compiled code ends. Null where code stops in front of such instructions.
    pub(crate) call: *const (),
    /// The same for loads of words that others may write.
    pub(crate) poll: *const (),
    /// The running warp.
    pub(crate) execution: *mut (),
    /// The parameter block of the grid.
    pub(crate) parameters: *const u8,
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod machine {
    use std::collections::HashMap;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    use super::assembler::Target;
    use super::translate::{Lanes, Part, Program, Surroundings, holders, slots_of, translate};
    use super::{Calls, Window};
    use crate::ir::{FULL, Init};
    use crate::kernel::Kernel;
    use crate::lower::live::Live;
    use crate::registers::Regs;

    /// A kernel is compiled when its grids have executed so many times as many instructions as it
    /// has.
    const WORTH_IT: u64 = 100;

    /// When kernels are compiled.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum When {
        Never,
        AtOnce,
        Hot,
    }

    /// The instructions that this processor has, best ones first.
    pub(super) fn targets() -> &'static [Target] {
        static TARGETS: OnceLock<Vec<Target>> = OnceLock::new();
        TARGETS.get_or_init(|| {
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512cd")
                && is_x86_feature_detected!("avx512vpopcntdq");
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let all = [(Target::Avx512, avx512), (Target::Avx2, avx2)];
            all.into_iter().filter(|(_, has)| *has).map(|(target, _)| target).collect()
        })
    }

    fn when() -> When {
        static WHEN: OnceLock<When> = OnceLock::new();
        *WHEN.get_or_init(|| match std::env::var("EPOXIDE_VGPU_COMPILE").as_deref() {
            _ if targets().is_empty() => When::Never,
            Ok("0") => When::Never,
            Ok("1") => When::AtOnce,
            _ => When::Hot,
        })
    }

    /// Whether this process compiles kernels.
    #[cfg(test)]
    pub(super) fn compiles() -> bool {
        when() != When::Never
    }

    /// Compiled code of a kernel, once there is some.
    #[derive(Debug, Default)]
    pub(crate) struct Compiled {
        /// Instructions that its grids have executed, while it is not compiled.
        heat: AtomicU64,
        /// For grids without checks, and for those with: for warps all of whose lanes run, and for
        /// others.
        code: [[OnceLock<Option<Code>>; 2]; 2],
    }

    impl Compiled {
        /// Code for the lanes `mask` of a grid, if there is some.
        #[inline(always)]
        pub(crate) fn code(&self, checked: bool, mask: u32) -> Option<&Code> {
            self.code[usize::from(checked)][usize::from(mask != FULL)].get()?.as_ref()
        }

        /// Notes that a slice of so many instructions of the kernel was executed, and compiles it
        /// when that is worth it.
        pub(crate) fn note(&self, kernel: &Kernel, checked: bool, executed: u64) {
            if self.code[usize::from(checked)][1].get().is_some() {
                return;
            }
            let heat = self.heat.fetch_add(executed, Ordering::Relaxed);
            let worth_it = match when() {
                When::Never => false,
                When::AtOnce => true,
                When::Hot => heat > WORTH_IT * kernel.code.len() as u64,
            };
            if worth_it {
                self.compile(kernel, checked);
            }
        }

        #[cold]
        pub(super) fn compile(&self, kernel: &Kernel, checked: bool) {
            if let [target, ..] = *targets() {
                self.compile_with(kernel, checked, target, holders(target));
            }
        }

        /// Compiles a kernel, with so many vector registers for values, for one of [`targets`].
        pub(super) fn compile_with(&self, kernel: &Kernel, checked: bool, target: Target, holders: u8) {
            assert!(targets().contains(&target), "{target:?}");
            let live = Live::new(kernel);
            let bits = |(file, slot, init): &(_, u32, Init)| match init {
                Init::Bits(bits) => Some(((*file, *slot), *bits)),
                _ => None,
            };
            let constants: HashMap<_, _> = kernel.inits.iter().filter_map(bits).collect();
            let part = |inst| Part::of(inst, !checked, &constants, kernel.param_bytes as u64);
            let parts: Vec<Part> = kernel.code.iter().map(part).collect();
            let mut leaders = live.leaders();
            for (i, part) in parts.iter().enumerate().take(leaders.len() - 1) {
                leaders[i + 1] |= !part.is_inline();
            }
            let sigs = kernel.code.iter().zip(&kernel.sigs).zip(&parts);
            let program = Program {
                code: &kernel.code,
                parts: &parts,
                slots_of: sigs.map(|((inst, sig), part)| slots_of(inst, sig, *part)).collect(),
                leaders: &leaders,
                slots: kernel.slots,
                target,
                holders,
                constants: &constants,
            };
            for (code, lanes) in self.code[usize::from(checked)].iter().zip([Lanes::All, Lanes::Some]) {
                code.get_or_init(|| {
                    // Products under way read registers behind their instructions.
                    if !kernel.operands.products.is_empty() {
                        return None;
                    }
                    let translated = translate(&program, lanes, |i| live.before(i))?;
                    Code::new(&translated.code, translated.entries)
                });
            }
        }
    }

    /// Executable memory with the code of a kernel.
    #[derive(Debug)]
    pub(crate) struct Code {
        start: *mut u8,
        bytes: usize,
        /// By instruction: the offset of its entry; 0 if there is none.
        entries: Vec<u32>,
    }

    // SAFETY: the memory is only read and executed from `Code::new` on, by any number of threads.
    unsafe impl Send for Code {}
    // SAFETY: see above.
    unsafe impl Sync for Code {}

    impl Drop for Code {
        fn drop(&mut self) {
            // SAFETY: `start` and `bytes` are those of the mapping. No thread runs the code any
            // more, because every caller borrows it.
            let _ = unsafe { munmap(self.start.cast(), self.bytes) };
        }
    }

    /// The place at which compiled code stopped, and how much of the budget is left.
    #[repr(C)]
    struct Stopped {
        pc: u64,
        left: i64,
    }

    type Entry = unsafe extern "sysv64" fn(
        *mut u8,
        *mut u8,
        *mut u32,
        mask: u32,
        budget: i64,
        *const Surroundings,
    ) -> Stopped;

    impl Code {
        /// Code that may be executed, and never written again. `None` if there is no memory.
        fn new(code: &[u8], entries: Vec<u32>) -> Option<Self> {
            let bytes = code.len().next_multiple_of(4096);
            let (write, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            // SAFETY: a new mapping at a place that the system chooses.
            let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, write, flags) }.ok()?;
            let code_at = Code { start: start.cast(), bytes, entries };
            // SAFETY: the mapping has room for the code, and no other thread has its address.
            unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), code_at.start, code.len()) };
            // SAFETY: as above. From here on it is only read and executed.
            unsafe { mprotect(start, bytes, MprotectFlags::READ | MprotectFlags::EXEC) }.ok()?;
            Some(code_at)
        }

        /// Runs from instruction `pc` on, if code begins there, and within `window`. Returns the
        /// instruction at which it stopped, and how many it has executed, at most `budget`.
        ///
        /// # Safety
        /// `regs` must be valid for as long as the code runs, have the slots of the kernel that this
        /// is the code of, and not move them, and `mask` be all lanes unless this is the code for
        /// some. For code of grids without checks, `calls` has a function that may be called with
        /// its `execution` and instructions of this kernel, and the parameters of this kernel.
        #[inline(always)]
        pub(crate) unsafe fn run(
            &self,
            pc: u32,
            regs: *mut Regs,
            mask: u32,
            budget: u64,
            window: Window,
            calls: Calls,
        ) -> Option<(u32, u64)> {
            let entry = self.entries[pc as usize];
            if entry == 0 {
                return None;
            }
            // SAFETY: an entry is an offset in the mapping, at which a function of this type
            // begins.
            let run: Entry = unsafe { std::mem::transmute(self.start.add(entry as usize)) };
            // SAFETY: the caller vouches for `regs`, and nothing else accesses them now.
            let (r32, r64, pred) = unsafe {
                let regs = &mut *regs;
                (regs.r32.as_mut_ptr().cast(), regs.r64.as_mut_ptr().cast(), regs.pred.as_mut_ptr())
            };
            let Calls { call, poll, execution, parameters } = calls;
            let Window { behind, ahead } = window;
            let around = Surroundings { regs, call, poll, execution, parameters, behind, ahead };
            // SAFETY: the code accesses slots of the kernel in these three files alone, parameters
            // within their block, and its own frame. It calls functions of the kernel, `call` and
            // `poll` as the caller allows. `targets` has checked that the processor has
            // the instructions.
            let Stopped { pc, left } = unsafe { run(r32, r64, pred, mask, budget as i64, &around) };
            Some((pc as u32, budget - left as u64))
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) use machine::Compiled;

/// Without a compiler: no kernel ever has code.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod none {
    use super::{Calls, Window};
    use crate::kernel::Kernel;
    use crate::registers::Regs;

    #[derive(Debug, Default)]
    pub(crate) struct Compiled;

    /// Code of a kernel, of which none exists.
    #[derive(Debug)]
    pub(crate) enum Code {}

    impl Compiled {
        pub(crate) fn code(&self, _: bool, _: u32) -> Option<&Code> {
            None
        }

        pub(crate) fn note(&self, _: &Kernel, _: bool, _: u64) {}
    }

    impl Code {
        /// # Safety
        /// None: it cannot be called.
        pub(crate) unsafe fn run(
            &self,
            _: u32,
            _: *mut Regs,
            _: u32,
            _: u64,
            _: Window,
            _: Calls,
        ) -> Option<(u32, u64)> {
            match *self {}
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) use none::Compiled;
