//! Loading: what is refused, where the error points, how names resolve.

mod common;

use common::*;
use epoxide_vgpu::{Module, supported_opcode};

#[test]
fn unknown_things_are_errors_with_their_place() {
    for (body, column, what) in [
        ("  wgmma.fence.sync.aligned;", 3, "wgmma"),
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
        ("call.uni foo;", 1, "call"),
        ("st.param.u32 [buf], %r1;", 1, "st.param"),
        ("atom.global.add.noftz.f32 %r1, [%rd1], %r2;", 1, "not supported"),
        ("shfl.idx.b32 %r1, %r2, 0, 31;", 1, ".sync"),
        (".reg .b128 %q;", 1, "128-bit"),
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
        "membar.gl",
        "setp.neu.ftz.f32",
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
        "call",
    ] {
        assert!(!supported_opcode(op), "{op}");
    }
}

#[test]
fn scopes_of_registers_and_labels_nest() {
    // Inline assembly in a loop body: the same names in two blocks, and a register that shadows an outer one.
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

#[test]
fn module_properties() {
    let text = kernel("", "").replace(".visible .entry k", ".visible .entry first(\n.param .b8 a,\n.param .align 16 .b8 b[20],\n.param .u16 c\n)\n{ ret; }\n.weak .entry k");
    let m = Module::parse(&text).unwrap();
    assert_eq!((m.version(), m.target()), ((8, 4), "sm_90"));
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
