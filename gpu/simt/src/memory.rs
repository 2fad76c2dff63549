//! Loads and stores. Names read `ld_<order>_<scope>_<type>`; without an order they are weak.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

macro_rules! loads {
    ($($(#[$meta:meta])* $name:ident: $ty:ty, $class:ident, $op:literal;)*) => {
        device_fns! { $(
            $(#[$meta])*
            #[doc = concat!("`", $op, " r, [p];`")]
            ///
            /// # Safety
            /// `p` is a live address of that space, aligned to the access.
            pub unsafe fn $name(p: u64) -> $ty {
                let r: $ty;
                // SAFETY: the caller vouches for `p`. The memory clobber keeps it in program order.
                unsafe { asm!(concat!($op, " {r}, [{p}];"), r = out($class) r, p = in(reg64) p, options(nostack)) };
                r
            }
        )* }
    };
}

macro_rules! vector_loads {
    ($($(#[$meta:meta])* $name:ident: $op:literal;)*) => {
        device_fns! { $(
            $(#[$meta])*
            #[doc = concat!("`", $op, " {..}, [p];`")]
            ///
            /// # Safety
            /// `p` is a live global address, 16-byte aligned.
            pub unsafe fn $name(p: u64) -> [u32; 4] {
                let (a, b, c, d): (u32, u32, u32, u32);
                // SAFETY: the caller vouches for `p`.
                unsafe {
                    asm!(
                        concat!($op, " {{{a}, {b}, {c}, {d}}}, [{p}];"),
                        a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
                        p = in(reg64) p, options(nostack)
                    )
                };
                [a, b, c, d]
            }
        )* }
    };
}

macro_rules! stores {
    ($($(#[$meta:meta])* $name:ident: $ty:ty, $class:ident, $op:literal;)*) => {
        device_fns! { $(
            $(#[$meta])*
            #[doc = concat!("`", $op, " [p], v;`")]
            ///
            /// # Safety
            /// `p` is a live, writable address of that space, aligned to the access.
            pub unsafe fn $name(p: u64, v: $ty) {
                // SAFETY: the caller vouches for `p`. The memory clobber keeps it in program order.
                unsafe { asm!(concat!($op, " [{p}], {v};"), v = in($class) v, p = in(reg64) p, options(nostack)) };
            }
        )* }
    };
}

loads! {
    /// Weak load.
    ld_u32: u32, reg32, "ld.global.b32";
    /// Weak load.
    ld_i32: i32, reg32, "ld.global.b32";
    /// Weak load.
    ld_f32: f32, reg32, "ld.global.b32";
    /// Weak load.
    ld_u64: u64, reg64, "ld.global.b64";
    /// Weak load.
    ld_i64: i64, reg64, "ld.global.b64";
    /// Relaxed load at system scope: reads stores of any device or the host, orders nothing.
    ld_relaxed_sys_u64: u64, reg64, "ld.relaxed.sys.global.b64";
    /// Relaxed load at device scope.
    ld_relaxed_gpu_u32: u32, reg32, "ld.relaxed.gpu.global.b32";
    /// Relaxed load at device scope.
    ld_relaxed_gpu_u64: u64, reg64, "ld.relaxed.gpu.global.b64";
    /// Acquire load at system scope: the writer's stores before its release of the value are
    /// visible after it.
    ld_acquire_sys_u64: u64, reg64, "ld.acquire.sys.global.b64";
}

stores! {
    /// Weak store.
    st_u32: u32, reg32, "st.global.b32";
    /// Weak store.
    st_i32: i32, reg32, "st.global.b32";
    /// Weak store.
    st_f32: f32, reg32, "st.global.b32";
    /// Weak store.
    st_u64: u64, reg64, "st.global.b64";
    /// Weak store.
    st_i64: i64, reg64, "st.global.b64";
    /// Relaxed store at system scope.
    st_relaxed_sys_u64: u64, reg64, "st.relaxed.sys.global.b64";
    /// Release store at system scope: this thread's stores before it are visible to a thread that
    /// acquires the value.
    st_release_sys_u64: u64, reg64, "st.release.sys.global.b64";
}

vector_loads! {
    /// 16 bytes that will not be read again soon.
    ld_stream_v4: "ld.global.L1::no_allocate.v4.b32";
    /// 16 bytes, weak.
    ld_v4: "ld.global.v4.b32";
}

device_fns! {
    /// One byte, weak. `ld.global.u8 r, [p];`
    ///
    /// # Safety
    /// `p` is a live global address.
    pub unsafe fn ld_u8(p: u64) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for `p`.
        unsafe { asm!("ld.global.u8 {r}, [{p}];", r = out(reg32) r, p = in(reg64) p, options(nostack)) };
        r
    }

    /// One byte where `active`, else 0, weak, with no branch; only a use of the value waits for it.
    /// `@active ld.global.u8 r, [p];`
    ///
    /// # Safety
    /// Where `active`, `p` is a live global address.
    pub unsafe fn ld_u8_if(active: bool, p: u64) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!(
                "{{ .reg .pred q; setp.ne.u32 q, {a}, 0; mov.b32 {r}, 0; @q ld.global.u8 {r}, [{p}]; }}",
                r = out(reg32) r, a = in(reg32) active as u32, p = in(reg64) p, options(nostack)
            )
        };
        r
    }

    /// One byte, weak; the low eight bits of `v`. `st.global.u8 [p], v;`
    ///
    /// # Safety
    /// `p` is a live, writable global address.
    pub unsafe fn st_u8(p: u64, v: u32) {
        // SAFETY: the caller vouches for `p`.
        unsafe { asm!("st.global.u8 [{p}], {v};", v = in(reg32) v, p = in(reg64) p, options(nostack)) };
    }

    /// One byte, relaxed at system scope; the low eight bits of `v`.
    /// `st.relaxed.sys.global.u8 [p], v;`
    ///
    /// # Safety
    /// `p` is a live, writable global address.
    pub unsafe fn st_relaxed_sys_u8(p: u64, v: u32) {
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!("st.relaxed.sys.global.u8 [{p}], {v};", v = in(reg32) v, p = in(reg64) p, options(nostack))
        };
    }

    /// A weak load where `active`, else 0.0, with no branch, so that several can be in flight.
    /// `@active ld.global.b32 r, [p];`
    ///
    /// # Safety
    /// Where `active`, `p` is a live global address, 4-byte aligned.
    pub unsafe fn ld_f32_if(active: bool, p: u64) -> f32 {
        let r: f32;
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!(
                "{{ .reg .pred q; setp.ne.u32 q, {a}, 0; mov.b32 {r}, 0; @q ld.global.b32 {r}, [{p}]; }}",
                r = out(reg32) r, a = in(reg32) active as u32, p = in(reg64) p, options(nostack)
            )
        };
        r
    }

    /// A weak load where `active`, else `otherwise`, with no branch; only a use of the value waits
    /// for it. `@active ld.global.b64 r, [p];`
    ///
    /// # Safety
    /// Where `active`, `p` is a live global address, 8-byte aligned.
    pub unsafe fn ld_i64_if(active: bool, p: u64, otherwise: i64) -> i64 {
        let r: i64;
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!(
                "{{ .reg .pred q; setp.ne.u32 q, {a}, 0; mov.b64 {r}, {o}; @q ld.global.b64 {r}, [{p}]; }}",
                r = out(reg64) r, a = in(reg32) active as u32, p = in(reg64) p, o = in(reg64) otherwise,
                options(nostack)
            )
        };
        r
    }

    /// A weak load where `active`, else `otherwise`, with no branch; only a use of the value waits
    /// for it. `@active ld.global.b32 r, [p];`
    ///
    /// # Safety
    /// Where `active`, `p` is a live global address, 4-byte aligned.
    pub unsafe fn ld_i32_if(active: bool, p: u64, otherwise: i32) -> i32 {
        let r: i32;
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!(
                "{{ .reg .pred q; setp.ne.u32 q, {a}, 0; mov.b32 {r}, {o}; @q ld.global.b32 {r}, [{p}]; }}",
                r = out(reg32) r, a = in(reg32) active as u32, p = in(reg64) p, o = in(reg32) otherwise,
                options(nostack)
            )
        };
        r
    }

    /// 16 bytes that will not be read again soon where `active`, else zeros, with no branch, so
    /// that several can be in flight. `@active ld.global.L1::no_allocate.v4.b32 {..}, [p];`
    ///
    /// # Safety
    /// Where `active`, `p` is a live global address, 16-byte aligned.
    pub unsafe fn ld_stream_v4_if(active: bool, p: u64) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!(
                "{{ .reg .pred q; setp.ne.u32 q, {v}, 0; mov.b32 {a}, 0; mov.b32 {b}, 0; mov.b32 {c}, 0; mov.b32 {d}, 0; \
                 @q ld.global.L1::no_allocate.v4.b32 {{{a}, {b}, {c}, {d}}}, [{p}]; }}",
                a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
                v = in(reg32) active as u32, p = in(reg64) p, options(nostack)
            )
        };
        [a, b, c, d]
    }

    /// 16 bytes at once, strong, without an order: never parts of two writes.
    /// `ld.relaxed.sys.global.b128 q, [p];`
    ///
    /// # Safety
    /// `p` is a live global address, 16-byte aligned.
    pub unsafe fn ld_relaxed_sys_b128(p: u64) -> [u32; 4] {
        let (low, high): (u64, u64);
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!(
                "{{ .reg .b128 q; ld.relaxed.sys.global.b128 q, [{p}]; mov.b128 {{{low}, {high}}}, q; }}",
                low = out(reg64) low, high = out(reg64) high, p = in(reg64) p, options(nostack)
            )
        };
        [low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32]
    }

    /// 16 bytes at once, strong, without an order: no thread reads a part of them.
    /// `st.relaxed.sys.global.b128 [p], q;`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 16-byte aligned.
    pub unsafe fn st_relaxed_sys_b128(p: u64, v: [u32; 4]) {
        let (low, high) = (v[0] as u64 | (v[1] as u64) << 32, v[2] as u64 | (v[3] as u64) << 32);
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!(
                "{{ .reg .b128 q; mov.b128 q, {{{low}, {high}}}; st.relaxed.sys.global.b128 [{p}], q; }}",
                low = in(reg64) low, high = in(reg64) high, p = in(reg64) p, options(nostack)
            )
        };
    }

    /// 16 bytes. `st.global.v4.b32 [p], {..};`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 16-byte aligned.
    pub unsafe fn st_v4(p: u64, v: [u32; 4]) {
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!(
                "st.global.v4.b32 [{p}], {{{a}, {b}, {c}, {d}}};",
                a = in(reg32) v[0], b = in(reg32) v[1], c = in(reg32) v[2], d = in(reg32) v[3],
                p = in(reg64) p, options(nostack)
            )
        };
    }

    /// 16 bytes of shared memory. `ld.shared.v4.b32 {..}, [s];`
    ///
    /// # Safety
    /// `s` is an offset inside the block's shared memory, 16-byte aligned.
    pub unsafe fn ld_shared_v4(s: u32) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller vouches for `s`.
        unsafe {
            asm!(
                "ld.shared.v4.b32 {{{a}, {b}, {c}, {d}}}, [{s}];",
                a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
                s = in(reg32) s, options(nostack)
            )
        };
        [a, b, c, d]
    }

    /// 16 bytes of shared memory. `st.shared.v4.b32 [s], {..};`
    ///
    /// # Safety
    /// See [`ld_shared_v4`]; no other thread uses it meanwhile.
    pub unsafe fn st_shared_v4(s: u32, v: [u32; 4]) {
        // SAFETY: the caller vouches for `s`.
        unsafe {
            asm!(
                "st.shared.v4.b32 [{s}], {{{a}, {b}, {c}, {d}}};",
                a = in(reg32) v[0], b = in(reg32) v[1], c = in(reg32) v[2], d = in(reg32) v[3],
                s = in(reg32) s, options(nostack)
            )
        };
    }

    /// `ld.shared.b32 r, [s];`
    ///
    /// # Safety
    /// `s` is an offset inside the block's shared memory, 4-byte aligned.
    pub unsafe fn ld_shared_u32(s: u32) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for `s`.
        unsafe { asm!("ld.shared.b32 {r}, [{s}];", r = out(reg32) r, s = in(reg32) s, options(nostack)) };
        r
    }

    /// `st.shared.b32 [s], v;`
    ///
    /// # Safety
    /// `s` is an offset inside the block's shared memory, 4-byte aligned.
    pub unsafe fn st_shared_u32(s: u32, v: u32) {
        // SAFETY: the caller vouches for `s`.
        unsafe { asm!("st.shared.b32 [{s}], {v};", v = in(reg32) v, s = in(reg32) s, options(nostack)) };
    }

    /// The stores that the word's writer in the block released are visible after it.
    /// `ld.acquire.cta.shared.b32 r, [s];`
    ///
    /// # Safety
    /// `s` is an offset inside the block's shared memory, 4-byte aligned.
    pub unsafe fn ld_acquire_cta_shared_u32(s: u32) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for `s`.
        unsafe { asm!("ld.acquire.cta.shared.b32 {r}, [{s}];", r = out(reg32) r, s = in(reg32) s, options(nostack)) };
        r
    }

    /// Publishes to the block what this thread did before. `st.release.cta.shared.b32 [s], v;`
    ///
    /// # Safety
    /// `s` is an offset inside the block's shared memory, 4-byte aligned.
    pub unsafe fn st_release_cta_shared_u32(s: u32, v: u32) {
        // SAFETY: the caller vouches for `s`.
        unsafe { asm!("st.release.cta.shared.b32 [{s}], {v};", v = in(reg32) v, s = in(reg32) s, options(nostack)) };
    }
}
