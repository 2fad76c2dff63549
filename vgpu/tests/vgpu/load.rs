//! Loading: rejected texts, positions of errors, resolution of names.

use epoxide_vgpu::{DeviceConfig, Memory, Module, supported_opcode};

use crate::common::*;

#[test]
fn unknown_things_are_errors_with_their_place() {
    for (body, column, what) in [
        ("  tcgen05.fence::before_thread_sync;", 3, "tcgen05"),
        ("\tadd.rna.f32 %r1, %r2, %r3;", 2, ".rna"),
        ("ld.global.u32.banana %r1, [%rd1];", 1, ".banana"),
        ("add.u32 %r1, %r2, %q3;", 19, "'%q3' is not declared"),
        ("add.u32 %r1, %rd2, %r3;", 14, "64-bit register"),
        ("add.u32 %r1, %r2;", 1, "2 operands given, 3 expected"),
        ("add.u64 %rd1, %rd2, 0f3F800000;", 21, "does not fit"),
        ("add.u32 5, %r2, %r3;", 9, "cannot be a destination"),
        ("bra NOWHERE;", 5, "label 'NOWHERE' does not exist"),
        ("@%r1 bra X; X:", 6, "not a predicate"),
        ("mov.u32 %r1, {%h1, %h2, %h3};", 14, "3 parts"),
        ("call.uni foo;", 10, "'foo' is not a function"),
        ("call (%r1), 5;", 1, "name of a function"),
        ("cp.async.ca.shared.global [%r1], [%rd1], 12;", 1, "4, 8 or 16 bytes"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 8;", 1, "cp.async.cg copies 16 bytes"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 4, 2;", 1, "cp.async.cg copies 16 bytes"),
        ("cp.async.ca.shared.global [%r1], [%rd1], 4, %rd2;", 45, "32 bits are needed"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r2];", 42, "1 registers given, 2 expected"),
        ("st.param.u32 [buf], %r1;", 1, "st.param"),
        ("atom.global.add.noftz.f32 %r1, [%rd1], %r2;", 1, "not supported"),
        ("shfl.idx.b32 %r1, %r2, 0, 31;", 1, ".sync"),
        (".reg .b128 %q; add.u64 %rd1, %q, %rd2;", 30, "128-bit register, 64 bits"),
        (".reg .b128 %q; ld.global.b64 %q, [%rd1];", 30, "holds .b128 alone"),
        (".reg .b128 %q; ld.global.b32 %r1, [%q];", 35, "cannot hold an address"),
        ("ld.global.b128 %rd1, [%rd2];", 16, "not a 128-bit register"),
        ("cp.async.bulk.wait_group %r1;", 1, "constant"),
        ("mov.u32 %r1, %pm0;", 14, "not declared"),
        ("ld.global.u64 %r1, [%rd1];", 15, "32-bit register cannot hold 64 bits"),
        ("A: A: ret;", 4, "twice"),
    ] {
        let e = reject(body);
        assert!(e.message.contains(what), "{body}: {e}");
        assert_eq!(e.source_line, body, "{e}");
        assert_eq!(e.column, column, "{body}: {e}");
        let text = kernel("", body);
        assert_eq!(text.lines().nth(e.line - 1), Some(body));
        assert!(e.to_string().starts_with(&format!("PTX {}:{}: ", e.line, e.column)));
    }
}

#[test]
fn opcodes_can_be_asked_for() {
    for op in [
        "add.s32",
        "ld.global.nc.L1::no_allocate.L2::256B.v4.u32",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint",
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64",
        "bra.uni",
        "red.release.sys.global.add.u64",
        "fence.proxy.async.global",
        "fence.sc.sys",
        "fence.cta",
        "fence.cluster",
        "fence.gpu",
        "fence.sys",
        "membar.proxy.alias",
        "membar.proxy.async",
        "membar.proxy.async.global",
        "membar.proxy.async.shared::cta",
        "createpolicy.range.global.L2::evict_last.L2::evict_first.b64",
        "createpolicy.cvt.L2.b64",
        "setmaxnreg.dec.sync.aligned.u32",
        "membar.gl",
        "setp.neu.ftz.f32",
        "call.uni",
        "st.param.b32",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
        "cp.async.cg.shared.global",
        "bar.red.popc.u32",
    ] {
        assert!(supported_opcode(op), "{op}");
    }
    for op in [
        "",
        "add",
        "add.q32",
        "wgmma.mma_async",
        "ld.global.v3.u32",
        "ld.global.v4.u64",
        "fence.bogus",
        "fence",
        "fence.acq_rel",
        "membar.proxy",
        "createpolicy.b64",
        "createpolicy.cvt.b64",
        "setmaxnreg.inc",
        "setmaxnreg.sync.aligned.u32",
        "setmaxnreg.inc.sync.aligned",
        "call.banana",
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16",
        "bar.red.xor.pred",
    ] {
        assert!(!supported_opcode(op), "{op}");
    }
}

#[test]
fn a_number_of_registers_is_one_that_a_warpgroup_may_have() {
    for (operand, what) in [
        ("7", "24 to 256"),
        ("16", "24 to 256"),
        ("4000", "24 to 256"),
        ("-40", "24 to 256"),
        ("28", "multiple of 8"),
        ("no_such_name", "24 to 256"),
        ("%r1", "24 to 256"),
    ] {
        for way in ["inc", "dec"] {
            let e = reject(&format!("setmaxnreg.{way}.sync.aligned.u32 {operand};"));
            assert!(e.message.contains(what), "{operand}: {e}");
        }
    }
    reject("setmaxnreg.inc 40;");
    reject("setmaxnreg.inc.sync.aligned.u32 40, 40;");
    run_body("", "setmaxnreg.dec.sync.aligned.u32 24; setmaxnreg.inc.sync.aligned.u32 256;", 128, &[0]);
}

#[test]
fn the_offset_of_a_vector_may_be_the_largest() {
    // The second element is behind the largest offset: addresses wrap.
    let body = "mov.b32 %r1, 0f3F800000; mov.u64 %rd1, 9223372036854775804; sub.s64 %rd1, %rd40, %rd1;
        red.global.add.v2.f32 [%rd1+9223372036854775804], {%r1, %r1};
        mov.u64 %rd1, 9223372036854775807; sub.s64 %rd1, %rd40, %rd1;
        red.global.add.v2.f32 [%rd1+9223372036854775807], {%r1, %r1};";
    assert_eq!(run_body("", body, 1, &[0]), [0x4000_0000_4000_0000]);
}

#[test]
fn scopes_of_registers_and_labels_nest() {
    // Inline assembly in a loop body: the same names in two blocks, and a register that shadows an
    // outer one.
    let snippet = "
        mov.u32 %r0, 0;
        { .reg .pred p; .reg .b32 %r9; mov.u32 %r9, 5; setp.gt.u32 p, %r1, 3; @p bra SKIP; add.u32 %r0, %r0, %r9; SKIP: }
        { .reg .pred p; .reg .b32 %r9; mov.u32 %r9, 7; setp.gt.u32 p, %r1, 9; @p bra SKIP; add.u32 %r0, %r0, %r9; SKIP:
          { .reg .b32 %r9; mov.u32 %r9, 100; @p bra OUT; }
          add.u32 %r0, %r0, %r9; }
        OUT:";
    check(snippet, &[1], 5 + 7 + 7);
    check(snippet, &[5], 14);
    check(snippet, &[20], 0);
    assert!(reject("{ .reg .b32 inner; } mov.u32 %r1, inner;").message.contains("inner"));
    assert!(reject("bra INNER; { INNER: ret; }").message.contains("INNER"));
}

/// A module of functions and a kernel whose body is given.
fn with_functions(functions: &str, body: &str) -> String {
    kernel("", body).replace(".visible .entry", &format!("{functions}\n.visible .entry"))
}

#[test]
fn functions_stand_in_the_place_of_their_calls() {
    // `twice` calls `add`; both have registers, labels and parameters of the same names. One lane
    // in three does not call, odd arguments return early.
    let text = with_functions(
        ".func (.param .b32 r) add(.param .b32 p, .param .b32 q) {
            .reg .b32 %r<4>; .reg .pred %p<2>;
            ld.param.u32 %r1, [p]; ld.param.u32 %r2, [q];
            and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 0; @%p1 bra ON;
            st.param.b32 [r+0], 7; ret;
            ON: add.u32 %r1, %r1, %r2; st.param.b32 [r+0], %r1; ret;
        }
        .func (.param .align 8 .b8 r[16]) twice(.param .b32 p);
        .func (.param .align 8 .b8 r[16]) twice(.param .b32 p) {
            .reg .b32 %r<4>; .reg .b64 %rd<2>;
            ld.param.u32 %r1, [p];
            { .param .b32 param0; .param .b32 param1; .param .b32 retval0;
              st.param.b32 [param0+0], %r1; st.param.b32 [param1+0], 10;
              call.uni (retval0), add, (param0, param1);
              ld.param.b32 %r2, [retval0+0]; }
            mul.lo.u32 %r3, %r2, 2; cvt.u64.u32 %rd1, %r3;
            st.param.b64 [r+0], %rd1; st.param.b32 [r+8], %r2;
            ret;
        }
        .extern .func __assertfail(.param .b64 a) .noreturn;",
        "rem.u32 %r1, %r40, 3; setp.ne.u32 %p1, %r1, 0; mov.u64 %rd3, 0; mov.u32 %r4, 0;
         .param .b32 param0; .param .align 8 .b8 retval0[16];
         st.param.b32 [param0], %r40;
         @%p1 call (retval0), twice, (param0);
         @%p1 ld.param.b64 %rd3, [retval0+0]; @%p1 ld.param.b32 %r4, [retval0+8];
         mad.wide.u32 %rd3, %r4, 1000, %rd3;
         st.global.u64 [%rd42], %rd3;",
    );
    for seed in [None, Some(1), Some(2)] {
        let dev = DeviceConfig { schedule_seed: seed, ..DeviceConfig::default() };
        let mut run = Run::new(&text, &[9; 32], launch(1, 32), &dev);
        run.finish().unwrap_or_else(|f| panic!("{f}"));
        let of = |i: u64| {
            if i.is_multiple_of(3) {
                0
            } else if i % 2 == 1 {
                7014
            } else {
                (i + 10) * 1002
            }
        };
        assert_eq!(run.words(), (0..32).map(of).collect::<Vec<u64>>());
    }
}

#[test]
fn calls_that_cannot_be_inlined_are_refused() {
    let f = ".extern .func (.param .b32 r) malloc(.param .b64 a, .param .b64 b);
        .func a() { call b; ret; } .func b() { call a; ret; } .func one(.param .b32 p) { ret; }";
    let refuse = |body: &str| Module::parse(&with_functions(f, body)).unwrap_err();
    for (body, what) in [
        ("call a;", "'a' calls itself"),
        ("call one;", "0 values are passed, 1 expected"),
        ("call one, (%r1);", "'%r1' is not a .param variable"),
        ("call one, (5);", "a constant cannot be passed"),
        ("call one, %r1;", "where a list is needed"),
        (
            "{ .param .b64 x; .param .b64 y; .param .b32 z; call (z), malloc, (x, y); }",
            "'malloc' is defined elsewhere",
        ),
    ] {
        let e = refuse(body);
        assert!(e.message.contains(what), "{body}: {e}");
    }
}

#[test]
fn a_shared_variable_of_a_function_is_one_for_all_of_its_calls() {
    // Two functions have variables of the same name, in two scopes each; `outer` calls `swap` too.
    let text = with_functions(
        ".func (.param .b32 r) swap(.param .b32 p) {
            .reg .b32 %r<4>; .shared .align 4 .b32 V; .shared .align 4 .b32 W;
            ld.param.u32 %r1, [p]; ld.shared.u32 %r2, [V]; st.shared.u32 [V], %r1;
            { .shared .align 4 .b32 V; st.shared.u32 [V], 77; st.shared.u32 [W], 78; }
            st.param.b32 [r], %r2; ret;
        }
        .func (.param .b32 r) outer(.param .b32 p) {
            .reg .b32 %r<4>; .shared .align 4 .b32 V;
            ld.param.u32 %r1, [p]; st.shared.u32 [V], 79;
            { .param .b32 x; .param .b32 y; st.param.b32 [x], %r1;
              call (y), swap, (x); ld.param.b32 %r2, [y]; }
            st.param.b32 [r], %r2; ret;
        }",
        "{ .param .b32 x; .param .b32 y; st.param.b32 [x], 7; call (y), swap, (x); }
         { .param .b32 x; .param .b32 y; st.param.b32 [x], 9; call (y), swap, (x);
           ld.param.b32 %r1, [y]; }
         { .param .b32 x; .param .b32 y; st.param.b32 [x], 11; call (y), outer, (x);
           ld.param.b32 %r2, [y]; }
         mad.lo.u32 %r1, %r1, 100, %r2; cvt.u64.u32 %rd1, %r1; st.global.u64 [%rd42], %rd1;",
    );
    let module = Module::parse(&text).unwrap();
    assert_eq!(module.kernel("k").unwrap().static_shared_bytes(), 16);
    let mut run = Run::new(&text, &[0], launch(1, 1), &DeviceConfig::default());
    run.finish().unwrap();
    assert_eq!(run.words(), [709]);
}

/// Calls are inlined, so the size of a kernel must be bounded.
#[test]
fn calls_are_inlined_up_to_a_limit() {
    let chain = |functions: usize, innermost: &str, body: &dyn Fn(usize) -> String| {
        let rest = (1..functions).map(|i| format!(".func f{i}() {{ {} }}\n", body(i - 1)));
        let functions: String =
            std::iter::once(format!(".func f0() {{ {innermost} }}\n")).chain(rest).collect();
        move |outermost: usize| with_functions(&functions, &format!("call f{outermost};"))
    };
    let error = |text: &str| Module::parse(text).unwrap_err().message;
    // Functions that double in size with every one of them, with and without instructions.
    for innermost in ["ret;", ""] {
        let doubling = chain(64, innermost, &|callee| format!("call f{callee}; call f{callee};"));
        let message = error(&doubling(63));
        assert!(message.contains("makes the kernel too large") && message.contains("262144"), "{message}");
        assert!(!Module::refusals(&doubling(63)).is_empty());
        Module::parse(&doubling(10)).unwrap();
    }
    let long = chain(50_000, "ret;", &|callee| format!("call f{callee}; ret;"));
    let message = error(&long(49_999));
    assert!(message.contains("the call of 'f49743' is nested too deeply"), "{message}");
    assert!(message.contains("256"), "{message}");
    Module::parse(&long(255)).unwrap();
    assert!(error(&long(256)).contains("'f0'"));
}

/// Kernels contain such calls without executing them, for instance in Taichi's runtime module.
#[test]
fn calls_through_pointers_are_faults_of_lanes_that_come_to_them() {
    let body = |lane: u32| {
        format!(
            "setp.eq.u32 %p1, %r40, {lane}; mov.u64 %rd3, 7;
             {{ .param .b64 param0; .param .b64 retval0; st.param.b64 [param0], %rd3;
             prototype_1: .callprototype (.param .b64 _) _ (.param .b64 _);
             @%p1 call (retval0), %rd3, (param0), prototype_1; }}
             st.global.u64 [%rd42], %rd3;"
        )
    };
    assert_eq!(run_body("", &body(32), 32, &[0; 32]), [7; 32]);
    let fault = fault_of("", &body(5), 32);
    assert!(fault.to_string().contains("a call through a pointer"), "{fault}");
    assert_eq!(fault.lane, Some(5));
}

#[test]
fn registers_that_nothing_has_written_are_found() {
    let reads = |body: &str| -> Vec<(String, String)> {
        let module = Module::parse(&kernel("", body)).unwrap_or_else(|e| panic!("{e}"));
        let reads = module.kernel("k").unwrap().unwritten_registers();
        reads.into_iter().map(|read| (read.register, read.at.ptx_text)).collect()
    };
    for (body, register, text) in [
        ("add.u32 %r1, %r2, 1;", "%r2", "add.u32 %r1, %r2, 1;"),
        // Written only by what comes later.
        ("st.global.u64 [%rd40], %rd1;\nmov.u64 %rd1, 5;", "%rd1", "st.global.u64 [%rd40], %rd1;"),
        // Only the instruction itself writes what it reads.
        ("add.u32 %r1, %r1, 1;", "%r1", "add.u32 %r1, %r1, 1;"),
        ("L: st.global.u32 [%rd40], %r1;\nbra L;", "%r1", "L: st.global.u32 [%rd40], %r1;"),
        // A guard is a read, and so is what stands in an address, a vector, a negation or a half.
        ("@%p3 trap;", "%p3", "@%p3 trap;"),
        ("ld.global.u32 %r1, [%rd9+4];", "%rd9", "ld.global.u32 %r1, [%rd9+4];"),
        ("st.global.v2.u32 [%rd40], {%r40, %r7};", "%r7", "st.global.v2.u32 [%rd40], {%r40, %r7};"),
        ("selp.u32 %r1, 1, 0, %p2;", "%p2", "selp.u32 %r1, 1, 0, %p2;"),
        ("mov.u16 %h1, 1; mov.b32 %r1, {%h1, %h2};", "%h2", "mov.u16 %h1, 1; mov.b32 %r1, {%h1, %h2};"),
        // The other path writes another register.
        (
            "setp.eq.u32 %p1, %r40, 0; @%p1 bra A;\nmov.u32 %r1, 1; bra B;\nA: mov.u32 %r2, %r1;\nB:",
            "%r1",
            "A: mov.u32 %r2, %r1;",
        ),
        // Registers of an inner scope have names of their own.
        (
            "mov.u32 %r1, 1; { .reg .b32 %r1; st.global.u32 [%rd40], %r1; }",
            "%r1",
            "mov.u32 %r1, 1; { .reg .b32 %r1; st.global.u32 [%rd40], %r1; }",
        ),
        (
            "{ .reg .b32 inner; st.global.u32 [%rd40], inner; }",
            "inner",
            "{ .reg .b32 inner; st.global.u32 [%rd40], inner; }",
        ),
    ] {
        assert_eq!(reads(body), [(register.to_string(), text.to_string())], "{body}");
    }
    for body in [
        // Some path writes it: under a guard, on one of two arms, or in the turn before.
        "setp.eq.u32 %p1, %r40, 0; @%p1 mov.u32 %r1, 1; st.global.u32 [%rd40], %r1;",
        "setp.eq.u32 %p1, %r40, 0; @%p1 bra A; mov.u32 %r1, 1; A: st.global.u32 [%rd40], %r1;",
        "mov.u32 %r2, 0; L: setp.eq.u32 %p1, %r2, 0; @%p1 bra A; st.global.u32 [%rd40], %r1;
         A: mov.u32 %r1, %r2; add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 3; @%p2 bra L;",
        // Special registers, variables and the carry flag need no definition.
        "mov.u32 %r1, %tid.x; add.u32 %r1, %r1, %laneid; addc.u32 %r1, %r1, 1; st.global.u32 [%rd40], %r1;",
        // No lane gets here.
        "bra END; st.global.u32 [%rd40], %r1; END:",
        // An unused result does not count as used.
        "atom.global.add.u32 _, [%rd40], 1; shfl.sync.idx.b32 %r1|%p1, %r40, 0, 31, -1; barrier.sync 0;",
    ] {
        assert_eq!(reads(body), [], "{body}");
    }
}

#[test]
fn no_compiler_leaves_a_register_unwritten() {
    let root = env!("CARGO_MANIFEST_DIR");
    let mut kernels = 0;
    for folder in ["gpu/ptx", "vgpu/tests/vgpu/foreign/ptx", "vgpu/tests/vgpu/foreign/ptx/unoptimised"] {
        for entry in std::fs::read_dir(format!("{root}/../../{folder}")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|end| end != "ptx") {
                continue;
            }
            let module = Module::parse(&std::fs::read_to_string(&path).unwrap()).unwrap();
            for kernel in module.kernels() {
                assert_eq!(kernel.unwritten_registers(), [], "{} in {}", kernel.name(), path.display());
                kernels += 1;
            }
        }
    }
    assert!(kernels > 50, "{kernels}");
}

#[test]
fn module_properties() {
    let text = kernel("", "").replace(".visible .entry k", ".visible .entry first(\n.param .b8 a,\n.param .align 16 .b8 b[20],\n.param .u16 c\n)\n{ ret; }\n.weak .entry k");
    let m = Module::parse(&text).unwrap();
    assert_eq!((m.version().to_string().as_str(), m.target()), ("8.4", "sm_90"));
    assert_eq!(m.kernels().map(|k| k.name().to_string()).collect::<Vec<_>>(), ["first", "k"]);
    let k = m.kernel("first").unwrap();
    assert_eq!(
        k.params().iter().map(|p| (p.offset, p.size)).collect::<Vec<_>>(),
        [(0, 1), (16, 20), (36, 2)]
    );
    assert_eq!(k.param_bytes(), 38);
    assert!(m.kernel("missing").is_none());
}

#[test]
fn garbage_never_panics() {
    let good =
        kernel(".shared .align 4 .b8 S[4];", "@%p1 ld.global.v2.u32 {%r1, %r2}, [%rd1+8]; { .reg .b32 x; }");
    // Cut anywhere, and with any one byte replaced.
    for i in 0..good.len() {
        let _ = Module::parse(&good[..i]);
        for c in [b'{', b'}', b';', b'.', b'%', b'0', b'"', b' ', b'<', b'['] {
            let mut bytes = good.clone().into_bytes();
            bytes[i] = c;
            if let Ok(text) = String::from_utf8(bytes) {
                let _ = Module::parse(&text);
            }
        }
    }
}

#[test]
fn all_refusals_of_a_module_are_listed_with_their_kernels() {
    let text = format!(
        "{HEAD}.func helper() {{ .reg .b32 %r<2>;
         bad.u32 %r1, %r1;
         ret; }}
         .entry first() {{ .reg .b32 %r<2>;
         call helper, ();
         call helper, ();
         add.u32 %r1, %r5, 1;
         bra NOWHERE;
         worse.u32 %r1; }}
         .entry second() {{ ret; }}
         .entry third() {{ call helper, (); ret; }}"
    );
    let refusals = Module::refusals(&text);
    let found: Vec<_> = refusals.iter().map(|r| (r.kernel.as_str(), r.error.line - 3)).collect();
    // A function is named once for each kernel that calls it. A label is missing at the end.
    assert_eq!(found, [("first", 2), ("first", 7), ("first", 9), ("first", 8), ("third", 2)]);
    assert!(refusals[0].error.message.contains("'bad'"), "{}", refusals[0].error);
    for (text, what) in [("nothing", "expected"), (".extern .global .b32 x[];", "defined elsewhere")] {
        let refusals = Module::refusals(&format!("{HEAD}{text}"));
        let [only] = refusals.as_slice() else { panic!("{refusals:?}") };
        assert!(only.kernel.is_empty() && only.error.message.contains(what), "{}", only.error);
    }
}

#[test]
fn a_variable_of_a_module_is_defined_once() {
    let declared = |variables: &str| format!("{HEAD}{variables}\n.entry k() {{ ret; }}");
    for variables in [
        ".shared .b8 tile[512];\n.shared .b8 tile[16];",
        ".global .b32 x;\n.shared .b32 x;",
        ".const .b32 x = 1;\n.const .b32 x = 2;",
    ] {
        let error = Module::parse(&declared(variables)).map(|_| ()).unwrap_err();
        assert!(error.message.contains("is defined twice"), "{error}");
        assert_eq!(Module::refusals(&declared(variables)).len(), 1);
    }
    let body = ".reg .b32 %r<2>; mov.u32 %r1, tile; ret;";
    for variables in [
        ".extern .shared .b8 tile[];\n.shared .b8 tile[512];",
        ".shared .b8 tile[512];\n.extern .shared .b8 tile[];",
    ] {
        let text = format!("{HEAD}{variables}\n.entry k() {{ {body} }}");
        assert_eq!(Module::parse(&text).unwrap().kernel("k").unwrap().static_shared_bytes(), 512);
    }
}

/// The first contents of the module's variable `x`, and its address.
fn initial(variables: &str) -> (Vec<u8>, u64) {
    let module =
        Module::parse(&format!("{HEAD}{variables}\n")).unwrap_or_else(|e| panic!("{variables}: {e}"));
    let memory = Memory::new();
    let (addr, bytes) = memory.variable(&module, "x").unwrap().unwrap();
    let mut found = vec![0; bytes as usize];
    memory.read(addr, &mut found).unwrap();
    (found, addr)
}

fn refusal(variables: &str) -> String {
    Module::parse(&format!("{HEAD}{variables}\n")).map(|_| ()).expect_err(variables).message
}

#[test]
fn short_lists_of_an_initialiser_end_with_zeros() {
    for (variable, want) in [
        (".global .s32 x[2][2] = {{1}, {2, 3}};", &[1, 0, 2, 3][..]),
        (".global .s32 x[2][2] = {{}, {2}};", &[0, 0, 2, 0]),
        (".global .s32 x[2][2] = {1, 2, 3};", &[1, 2, 3, 0]),
        (".global .s32 x[2][2] = {1, 2, {3}};", &[1, 2, 3, 0]),
        (".const .s32 x[][3] = {{1}, {2, 3}};", &[1, 0, 0, 2, 3, 0]),
        (".global .s32 x[2][2][2] = {{{1}}, {{2}, {3}}};", &[1, 0, 0, 0, 2, 0, 3, 0]),
        (".global .v2 .s32 x[2] = {{1}, {2, 3}};", &[1, 0, 2, 3]),
        (".global .v4 .s32 x = {1, 2};", &[1, 2, 0, 0]),
        (".global .s32 x = {7};", &[7]),
        (".global .s32 x[] = {7, 8};", &[7, 8]),
        (".global .s32 x[3] = 7;", &[7, 0, 0]),
    ] {
        let want: Vec<u8> = want.iter().flat_map(|v: &i32| v.to_ne_bytes()).collect();
        assert_eq!(initial(variable).0, want, "{variable}");
    }
    for (variable, what) in [
        (".global .s32 x[2][2] = {{1, 2, 3}, {4}};", "longer than"),
        (".global .s32 x[2][2] = {{1}, {2}, {3}};", "longer than"),
        (".global .v2 .s32 x[2] = {{1, 2, 3}};", "longer than"),
        (".global .s32 x = {1, 2};", "longer than"),
        (".global .s32 x[2] = {1, 2, 3};", "longer than"),
        (".global .s32 x[2][2] = {1, {2, 3}};", "begins inside of"),
        (".global .s32 x[2][] = {{1}, {2}};", "first dimension"),
        (".global .s32 x[][16000000] = {{1}, {2}};", "too large"),
        (".global .s32 x[][4000000000000] = {{1}};", "too large"),
    ] {
        let message = refusal(variable);
        assert!(message.contains(what), "{variable}: {message}");
    }
}

#[test]
fn initialisers_hold_addresses_of_variables() {
    // `x` comes first in the memory of the variables; `y` comes behind it, aligned.
    for (value, offset) in
        [("y", 32), ("generic(y)", 32), ("y + 4", 36), ("generic(y)+8", 40), ("generic(y)-8", 24), ("x", 0)]
    {
        let variables = format!(".global .u64 x[3] = {{1, {value}, 2}};\n.global .align 16 .b8 y[16];");
        let (bytes, addr) = initial(&variables);
        let want: Vec<u8> = [1, addr + offset, 2].into_iter().flat_map(u64::to_ne_bytes).collect();
        assert_eq!(bytes, want, "{value}");
    }
    for (variables, what) in [
        (".global .u64 x = nothing;", "'nothing' is not a .global or .const variable"),
        (".global .u32 y;\n.global .u32 x = y;", "an address has 64 bits"),
        (".shared .u32 y;\n.global .u64 x = generic(y);", "'y' is not a .global or .const variable"),
    ] {
        let message = refusal(variables);
        assert!(message.contains(what), "{variables}: {message}");
    }
}

#[test]
fn operands_are_addresses_behind_variables() {
    let globals = ".global .align 4 .b8 A[64];\n.shared .align 4 .b8 S[64];";
    let body = ".local .align 4 .b8 L[64];
         mov.u64 %rd1, A; mov.u64 %rd2, A+20; sub.u64 %rd1, %rd2, %rd1;
         mov.u32 %r1, S + 32; mov.u32 %r2, S; sub.u32 %r1, %r1, %r2;
         mov.u32 %r3, L+12; mov.u32 %r4, L-4; sub.u32 %r3, %r3, %r4;
         add.u64 %rd4, %rd2, 8; mov.u64 %rd5, A+-4; sub.u64 %rd4, %rd4, %rd5;
         mad.lo.u32 %r1, %r1, 100, %r3; cvt.u64.u32 %rd3, %r1; mad.lo.u64 %rd1, %rd1, 10000, %rd3;
         mad.lo.u64 %rd1, %rd4, 1000000, %rd1; st.global.u64 [%rd42], %rd1;";
    assert_eq!(run_body(globals, body, 1, &[0]), [32_203_216]);
    for (body, what) in [
        ("mov.u32 %r1, %r2+4;", "'%r2' is a register"),
        ("mov.u32 %r1, %tid.x+4;", "'%tid.x' is a register"),
        ("mov.u32 %r1, nothing+4;", "'nothing' is not declared"),
        ("mov.u32 %r1, A[5];", "'A[5]'"),
        ("add.u32 A+4, %r1, %r2;", "cannot be a destination"),
    ] {
        let text = format!("{}\n.entry other() {{ ret; }}", kernel(".shared .b32 A[8];", body));
        let refusals = Module::refusals(&text);
        let [only] = refusals.as_slice() else { panic!("{body}: {refusals:?}") };
        assert!(only.kernel == "k" && only.error.message.contains(what), "{body}: {}", only.error);
    }
}

#[test]
fn an_extern_variable_is_defined_in_the_module() {
    for variables in [
        ".extern .global .align 4 .u32 x;\n.global .u32 x = 7;",
        ".global .u32 x = 7;\n.extern .global .align 4 .u32 x;",
        ".extern .const .u32 x;\n.extern .const .u32 x;\n.visible .const .u32 x = 7;",
        ".extern .global .u32 x[];\n.global .u32 x[1] = {7};",
    ] {
        assert_eq!(initial(variables).0, 7u32.to_ne_bytes(), "{variables}");
    }
    for variables in [".extern .global .align 4 .u32 x;", ".extern .const .u32 y, x[2];"] {
        let message = refusal(variables);
        assert!(message.contains("is defined elsewhere"), "{variables}: {message}");
    }
    let message = refusal(".extern .global .u32 x = 7;");
    assert!(message.contains("has no initialiser"), "{message}");
    let body = ".reg .b32 %r<2>; mov.u32 %r1, tile; ret;";
    let pair = ".extern .shared .b8 tile[16];\n.shared .b8 tile[512];";
    let text = format!("{HEAD}{pair}\n.entry k() {{ {body} }}");
    assert_eq!(Module::parse(&text).unwrap().kernel("k").unwrap().static_shared_bytes(), 512);
}

#[test]
fn statements_may_stand_behind_a_loc_on_its_line() {
    let body = "mov.u32 %r1, 3;
        .loc 1 7 1 mov.u32 %r1, 5;
        .loc 1 8 1, function_name $L+4, inlined_at 1 7 1 add.u32 %r1, %r1, 1; // inlined_at 1 2
        cvt.u64.u32 %rd1, %r1; st.global.u64 [%rd42], %rd1;";
    assert_eq!(run_body("", body, 1, &[0]), [6]);
}

/// A line less breaks most kernels in one of many ways.
#[test]
fn there_are_refusals_where_a_module_does_not_load_and_only_there() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../vgpu/tests/vgpu/foreign/ptx");
    let mut broken = 0;
    for name in ["control", "reduce", "async", "sync"] {
        let text = std::fs::read_to_string(folder.join(name).with_extension("ptx")).unwrap();
        assert!(Module::refusals(&text).is_empty(), "{name}");
        let lines: Vec<&str> = text.lines().collect();
        for left_out in (0..lines.len()).step_by(tier(97, 7)) {
            let text = [&lines[..left_out], &lines[left_out + 1..]].concat().join("\n");
            let refusals = Module::refusals(&text);
            match Module::parse(&text) {
                Ok(_) => assert!(refusals.is_empty(), "{name}, line {left_out}: {refusals:?}"),
                Err(error) => {
                    assert!(refusals.iter().any(|refusal| refusal.error == error), "{name}, line {left_out}");
                    broken += 1;
                }
            }
        }
    }
    assert!(broken > 0);
}

/// Numbers and nesting in a short text must not take all memory or all of the stack.
#[test]
fn modules_that_are_too_large_are_rejected() {
    let head = ".version 8.4\n.target sm_90\n.address_size 64\n";
    let kernel = |body: &str| format!("{head}.visible .entry k(.param .u64 p) {{ {body} ret; }}");
    // Branches by a table of 1000 labels.
    let jumps = |table: &str, branches: usize| {
        let labels = (0..1000).map(|i| format!("L{i}")).collect::<Vec<_>>().join(", ");
        let ends: String = (0..1000).map(|i| format!("L{i}: ")).collect();
        let branch = format!("brx.idx %r0, {table};").repeat(branches);
        format!(".reg .b32 %r<1>; T: .branchtargets {labels}; {branch} {ends}")
    };
    Module::parse(&kernel(&jumps("T", 100))).unwrap();
    Module::parse(&kernel(".local .b8 v[524272]; .local .b8 w[16];")).unwrap();
    // A function frees its local memory, so that consecutive calls share it.
    let calls = |body: &str| {
        let function =
            |name: &str, body: &str| format!(".func {name}() {{ .local .b8 v[200000]; {body} ret; }}\n");
        let (inner, outer) = (function("inner", ""), function("outer", "call inner;"));
        kernel(body).replace(".visible", &format!("{inner}{outer}.visible"))
    };
    Module::parse(&calls("call outer; call outer; call inner; .local .b8 v[124288];")).unwrap();
    let refusals = Module::refusals(&kernel(".local .b8 v[524289];"));
    assert!(matches!(&refusals[..], [only] if only.kernel == "k"), "{refusals:?}");
    let huge = ".local .b8 v[16000000]; .local .b8 w[16000000];";
    for (text, what) in [
        (format!("{head}.global .b8 words[4294967296] = {{1}};"), "too large"),
        (format!("{head}.global .b8 a[40000000]; .global .b8 b[40000000];"), "too large"),
        (
            format!("{head}.global .b8 a[1]; .global .align 9223372036854775808 .b8 b[1];"),
            "power of two up to",
        ),
        (format!("{head}.global .b8 a[1] = {}", "{".repeat(1_000_000)), "dimensions"),
        (
            format!("{head}.entry k(.param .b8 a, .param .align 4294967296 .b8 b[4]) {{ ret; }}"),
            "bad parameter",
        ),
        (kernel(".reg .b32 %r<1000000>;"), "registers"),
        (kernel(".reg .b32 %a<60000>; { .reg .b32 %b<60000>; }"), "registers"),
        (kernel(huge), "too large"),
        (kernel(&huge.replace("local", "shared")), "too large"),
        (kernel(&format!("mov.b64 %rd1, {};", "{".repeat(1_000_000))), "vector"),
        (kernel(".local .b8 v[524272]; .local .b8 w[17];"), "kernel 'k' has 524289 bytes of local memory"),
        (calls(".local .b8 v[124289]; call outer; call inner;"), "kernel 'k' has 524289 bytes"),
        (kernel(&jumps("T", 4_000)), "'T' has 1000 labels, which are too many"),
        (kernel(&format!("mov.b64 %rd1, {};", "[a,".repeat(1_000_000))), "coordinates in braces"),
        (kernel(&format!("mov.b64 %rd1, {};", "[a,{".repeat(1_000_000))), "vector"),
        (kernel(&format!("mov.b64 %rd1, {};", "{[a,".repeat(1_000_000))), "vector"),
    ] {
        let error = Module::parse(&text).unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {}", &error[..error.len().min(300)]);
    }
}
