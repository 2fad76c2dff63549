//! Loads, stores, atomics, address spaces, and the faults they raise.

use epoxide_vgpu::{
    CheckConfig, DeviceConfig, FaultKind, Grid, GridConfig, InstructionPlace, MachineError, Memory, Module,
    Progress,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::cases::SHARED;
use crate::common::*;

#[test]
fn scalar_widths_and_extension() {
    let body = "
        ld.global.u8 %r1, [%rd40+8]; ld.global.s8 %r2, [%rd40+8];
        ld.global.s16 %rd3, [%rd40+8]; ld.global.u16 %r4, [%rd40+8];
        ld.global.s8 %h5, [%rd40+8]; cvt.u32.u16 %r5, %h5;
        ld.global.b32 %rd6, [%rd40+8]; ld.u64 %rd7, [%rd40+8];
        st.global.u32 [%rd40+16], %r1; st.global.u32 [%rd40+24], %r2; st.global.u64 [%rd40+32], %rd3;
        st.global.u32 [%rd40+40], %r4; st.global.u32 [%rd40+48], %r5; st.global.u64 [%rd40+56], %rd6;
        st.u64 [%rd40+64], %rd7; st.global.u8 [%rd40+72], %r2; st.global.u16 [%rd40+80], %rd7;
        st.global.u32 [%rd40+88], %rd7; st.global.u32 [%rd40+96], 7; st.global.f32 [%rd40+104], 0f3F800000;";
    let mut buf = vec![0; 16];
    buf[1] = 0xffff_ffff_8000_80f0;
    let got = run_body("", body, 1, &buf);
    let signed = |v: i32| u64::from(v as u32);
    let want = [
        0xf0,
        signed(-16),
        0xffff_ffff_ffff_80f0,
        0x80f0,
        0xfff0,
        0x8000_80f0,
        buf[1],
        0xf0,
        0x80f0,
        0x8000_80f0,
        7,
        f(1.0),
    ];
    assert_eq!(&got[2..14], &want);
}

/// A warp stores rows over 4 MiB, which bypass the caches, and then a flag. Another processor that
/// has read the flag must read the rows.
#[test]
fn rows_that_pass_the_caches_by_come_before_a_release() {
    const PASSES: u32 = 100;
    const ROWS: u64 = 512;
    const DISTANCE: u64 = 8192;
    let first = "mul.wide.u32 %rd1, %r40, 16; add.s64 %rd2, %rd40, %rd1; add.s64 %rd2, %rd2, 64;
         mov.u32 %r6, 1;";
    let again = format!(
        "add.u32 %r6, %r6, 1; setp.le.u32 %p1, %r6, {PASSES};
         @%p1 bra PASS;"
    );
    let writer = format!(
        "{first}
         PASS: mov.u32 %r5, {ROWS}; mov.u64 %rd3, %rd2;
         ROW: st.global.v4.u32 [%rd3], {{%r6, %r6, %r6, %r6}};
         add.s64 %rd3, %rd3, {DISTANCE}; sub.u32 %r5, %r5, 1; setp.ne.u32 %p2, %r5, 0;
         @%p2 bra ROW;
         st.release.sys.global.u32 [%rd40], %r6;
         WAIT: ld.acquire.sys.global.u32 %r7, [%rd40+4]; setp.ne.u32 %p2, %r7, %r6;
         @%p2 bra WAIT;
         {again}"
    );
    // The last rows come first.
    let reader = format!(
        "{first}
         PASS: mov.u32 %r5, {ROWS}; add.s64 %rd3, %rd2, {};
         WAIT: ld.acquire.sys.global.u32 %r7, [%rd40]; setp.ne.u32 %p2, %r7, %r6;
         @%p2 bra WAIT;
         ROW: ld.global.v4.u32 {{%r8, %r9, %r10, %r11}}, [%rd3];
         xor.b32 %r8, %r8, %r6; xor.b32 %r9, %r9, %r6; xor.b32 %r10, %r10, %r6; xor.b32 %r11, %r11, %r6;
         or.b32 %r8, %r8, %r9; or.b32 %r10, %r10, %r11; or.b32 %r8, %r8, %r10;
         setp.ne.u32 %p3, %r8, 0;
         @%p3 atom.global.add.u32 %r12, [%rd40+8], 1;
         sub.s64 %rd3, %rd3, {DISTANCE}; sub.u32 %r5, %r5, 1; setp.ne.u32 %p2, %r5, 0;
         @%p2 bra ROW;
         st.release.sys.global.u32 [%rd40+4], %r6;
         {again}",
        (ROWS - 1) * DISTANCE
    );
    let memory = Memory::new();
    let region = memory.alloc(64 + ROWS * DISTANCE, "rows").unwrap();
    memory.fill(region.addr(), 0, region.bytes()).unwrap();
    std::thread::scope(|scope| {
        for body in [writer, reader] {
            let (memory, params) = (memory.clone(), region.addr().to_ne_bytes());
            scope.spawn(move || {
                let module = Module::parse(&kernel("", &body)).unwrap();
                let (device, shape) = (DeviceConfig::default(), launch(1, 32));
                let mut grid =
                    Grid::new(module.kernel("k").unwrap(), memory, &device, shape, &params).unwrap();
                while grid.step(10_000).unwrap() != Progress::Done {
                    std::thread::yield_now();
                }
            });
        }
    });
    let mut bytes = vec![0; region.bytes() as usize];
    memory.read(region.addr(), &mut bytes).unwrap();
    let words: Vec<u32> =
        bytes.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words[..3], [PASSES, PASSES, 0], "the third one counts lanes with other rows");
    // Nothing beside the rows has changed.
    for (i, word) in words[16..].iter().enumerate() {
        let stored = (4 * i as u64) % DISTANCE < 512;
        assert_eq!(*word, if stored { PASSES } else { 0 }, "word {i}");
    }
}

#[test]
fn vectors_full_partial_and_scattered() {
    // Every lane copies 16 bytes; full warps, partial warps and odd strides go different ways.
    for (threads, stride) in [(32, 16), (17, 16), (32, 48), (64, 16)] {
        for ty in ["v4.u32", "v2.u64", "v4.f32", "v2.b64"] {
            let regs = if ty.starts_with("v4") { "{%r1, %r2, %r3, %r4}" } else { "{%rd1, %rd2}" };
            let body = format!(
                "mul.wide.u32 %rd5, %r40, {stride}; add.s64 %rd6, %rd40, %rd5;
                 ld.global.{ty} {regs}, [%rd6]; st.global.{ty} [%rd6+{}], {regs};",
                64 * 48
            );
            let words = 64 * 48 / 8;
            let buf: Vec<u64> =
                (0..2 * words).map(|i| if i < words { i * 0x1_0001_0001 } else { 0 }).collect();
            let got = run_body("", &body, threads, &buf);
            for t in 0..threads as usize {
                let at = t * stride / 8;
                let copied = &got[words as usize + at..][..2];
                assert_eq!(copied, &buf[at..at + 2], "{ty}, thread {t}, stride {stride}");
            }
            let written = got[words as usize..].iter().filter(|&&w| w != 0).count();
            assert!(written <= 2 * threads as usize);
        }
    }
}

#[test]
fn sinks_in_vectors_and_narrow_vectors() {
    let body = "
        ld.global.v2.u32 {_, %r1}, [%rd40]; ld.global.v4.u16 {%h1, %h2, %h3, %h4}, [%rd40];
        ld.global.v2.u8 {%h5, %h6}, [%rd40+6]; cvt.u32.u16 %r2, %h3; cvt.u32.u16 %r3, %h6;
        st.global.v4.u8 [%rd40+8], {%h1, %h2, %h3, %h4};
        st.global.v2.u32 [%rd40+16], {%r1, %r2}; st.global.u32 [%rd40+24], %r3;";
    let got = run_body("", body, 1, &[0x8877_6655_4433_2211, 0, 0, 0]);
    assert_eq!(got[1], 0x7755_3311);
    assert_eq!(got[2], 0x6655_8877_6655);
    assert_eq!(got[3], 0x88);
}

#[test]
fn values_of_128_bits_are_moved_loaded_and_stored() {
    let body = "
        .reg .b128 %q, %s<3>;
        mul.wide.u32 %rd5, %r40, 16; add.s64 %rd6, %rd40, %rd5;
        ld.global.b128 %q, [%rd6]; mov.b128 %s1, %q; mov.b128 {%rd1, %rd2}, %s1;
        add.s64 %rd1, %rd1, 1; mov.b128 %s2, {%rd2, %rd1};
        st.global.b128 [%rd6+1024], %s2;";
    for threads in [32, 17] {
        let buf: Vec<u64> = (0..256).map(|i| if i < 128 { i * 0x1_0001_0001 } else { 0 }).collect();
        let got = run_body("", body, threads, &buf);
        for t in 0..threads as usize {
            assert_eq!(got[128 + 2 * t..][..2], [buf[2 * t + 1], buf[2 * t] + 1], "thread {t} of {threads}");
        }
    }
    // All 16 bytes at once, at an address for that.
    let fault =
        fault_kind("ld.relaxed.sys.global.b128 %q, [%rd40+8];".replace("ld", ".reg .b128 %q; ld").as_str());
    assert!(format!("{fault:?}").contains("lign"), "{fault:?}");
}

#[test]
fn every_cache_and_ordering_form_is_understood() {
    for ld in [
        "ld.global.nc.L1::no_allocate.L2::256B.u64",
        "ld.global.L1::evict_last.u64",
        "ld.global.ca.u64",
        "ld.global.cg.u64",
        "ld.global.cs.u64",
        "ld.global.lu.u64",
        "ld.global.cv.u64",
        "ld.volatile.global.u64",
        "ld.relaxed.gpu.global.u64",
        "ld.acquire.sys.global.u64",
        "ld.acquire.cta.u64",
        "ld.mmio.relaxed.sys.global.u64",
        "ld.weak.global.u64",
        "ld.global.L2::128B.b64",
    ] {
        for st in [
            "st.global.u64",
            "st.global.wb.u64",
            "st.global.cg.u64",
            "st.global.cs.u64",
            "st.global.wt.u64",
            "st.volatile.global.u64",
            "st.relaxed.cluster.global.u64",
            "st.release.sys.global.u64",
            "st.global.L1::no_allocate.u64",
            "st.mmio.relaxed.sys.global.u64",
        ] {
            let body = format!("{ld} %rd1, [%rd42]; add.s64 %rd1, %rd1, 1; {st} [%rd42], %rd1;");
            let got = run_body("", &body, 32, &(0..32).collect::<Vec<u64>>());
            assert_eq!(got, (1..33).collect::<Vec<u64>>(), "{ld} {st}");
        }
    }
    let hints = "createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;
        createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %rd10, 0.5;
        ld.global.L2::cache_hint.v2.u64 {%rd1, %rd2}, [%rd40], %rd9;
        st.global.L2::cache_hint.u64 [%rd40+16], %rd2, %rd10;
        prefetch.global.L2 [%rd40]; prefetch.global.L2::evict_last [%rd40]; prefetchu.L1 [%rd40];
        createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 %rd9, [%rd40], 64, 128;
        createpolicy.range.L2::evict_first.b64 %rd9, [%rd40], %r1, 128; createpolicy.cvt.L2.b64 %rd10, %rd9;
        discard.global.L2 [%rd40+128], 128; applypriority.global.L2::evict_normal [%rd40], 128;";
    assert_eq!(run_body("", hints, 32, &[1, 2, 0].repeat(11))[..3], [1, 2, 2]);
}

#[test]
fn discarded_memory_counts_as_unwritten() {
    let discard = "st.global.u64 [%rd40+8], %rd40; discard.global.L2 [%rd40], 128;";
    let discarded = format!("{discard} ld.global.u64 %rd1, [%rd40+8]; st.global.u64 [%rd40+128], %rd1;");
    let words: Vec<u64> = (0..40).collect();
    let mut run = Run::new(&kernel("", &discarded), &words, launch(1, 1), &DeviceConfig::default());
    run.finish().unwrap();
    let (got, poison) = (run.words(), run.words()[0]);
    assert_eq!(got[..17], [poison; 17]);
    assert_eq!(got[17..], words[17..]);
    assert!(poison != 0 && poison != run.buf.addr());
    let checked = |body: &str, threads| {
        let module = Module::parse(&kernel("", body)).unwrap_or_else(|e| panic!("{e}"));
        run_numbered(&module, launch(1, threads), 0, Some(CheckConfig::default()))
    };
    let report = |result: Result<Vec<u64>, MachineError>| match result {
        Err(MachineError::Fault(fault)) => fault.kind,
        other => panic!("{other:?}"),
    };
    assert!(matches!(report(checked(&discarded, 1)), FaultKind::Unwritten { .. }));
    // Writing the line again makes it whole, and lanes may discard a line together.
    let again = "discard.L2 [%rd40], 128; bar.warp.sync -1; st.global.u64 [%rd42], %rd41;
        discard.global.L2 [%rd40+256], 128; ld.global.u64 %rd1, [%rd42]; st.global.u64 [%rd42+128], %rd1;";
    let got = checked(again, 16).unwrap();
    assert_eq!(got[..16], got[16..32]);
    assert_eq!(got[15], 120);
    // A discard is a weak write.
    let raced =
        "setp.eq.u32 %p1, %r40, 0; @%p1 discard.global.L2 [%rd40], 128; @!%p1 ld.global.u64 %rd1, [%rd42];";
    let kind = report(checked(raced, 2));
    assert!(matches!(kind, FaultKind::Race(_) | FaultKind::Unwritten { .. }), "{kind}");
    let raced =
        "setp.eq.u32 %p1, %r40, 0; @!%p1 st.global.u64 [%rd42], %rd41; @%p1 discard.global.L2 [%rd40], 128;";
    assert!(matches!(report(checked(raced, 2)), FaultKind::Race(_)));
    for op in ["discard.global.L2", "applypriority.global.L2::evict_normal"] {
        let kind = fault_kind(&format!("{op} [%rd40+64], 128;"));
        assert!(matches!(kind, FaultKind::Misaligned { align: 128, .. }), "{op}: {kind}");
        let kind = fault_kind(&format!("{op} [%rd40+1048576], 128;"));
        assert!(matches!(kind, FaultKind::OutOfBounds { bytes: 128, .. }), "{op}: {kind}");
        for operands in ["[%rd40], 64", "[%rd40], %r1", "[%rd40]"] {
            reject(&format!("{op} {operands};"));
        }
    }
}

#[test]
fn shared_memory_static_dynamic_and_generic() {
    let globals = ".shared .align 16 .b8 A[40];\n.shared .align 8 .b8 UNUSED[4096];\n\
                   .extern .shared .align 128 .b8 DYN[];\n";
    let body = "
        .shared .align 4 .b8 LOCALLY[4];
        mov.u32 %r1, A; mov.u32 %r2, DYN; mov.u32 %r3, LOCALLY; mov.u32 %r8, %dynamic_smem_size;
        mov.u64 %rd9, DYN; cvta.shared.u64 %rd10, %rd9; cvta.to.shared.u64 %rd11, %rd10;
        isspacep.shared %p1, %rd10; isspacep.global %p2, %rd10; isspacep.global %p3, %rd40;
        st.shared.u32 [%r2+4], 77; ld.u32 %r4, [%rd10+4]; st.u32 [%rd10+8], 78; ld.shared.u32 %r5, [%rd11+8];
        ld.shared::cta.u32 %r6, [DYN+8];
        mapa.shared::cluster.u32 %r7, %r2, 0; sub.u32 %r7, %r7, %r2;
        and.b32 %r9, %r2, 127; sub.u32 %r10, %r2, %r1;
        selp.u32 %r11, 1, 0, %p1; selp.u32 %r12, 1, 0, %p2; selp.u32 %r13, 1, 0, %p3;
        st.global.v4.u32 [%rd40], {%r4, %r5, %r6, %r7}; st.global.v4.u32 [%rd40+16], {%r8, %r9, %r10, %r11};
        st.global.v2.u32 [%rd40+32], {%r12, %r13};";
    let cfg = GridConfig { dynamic_shared_bytes: 256, ..launch(1, 1) };
    let mut run = Run::new(&kernel(globals, body), &[0; 8], cfg, &DeviceConfig::default());
    run.finish().unwrap();
    let w = run.words();
    let words: Vec<u64> = w.iter().flat_map(|v| [v & 0xffff_ffff, v >> 32]).collect();
    // LOCALLY is at 0, A at 16, DYN at the next multiple of 128; UNUSED costs nothing.
    assert_eq!(words[..10], [77, 78, 78, 0, 256, 0, 112, 1, 0, 1]);
    assert_eq!(run.grid.kernel().static_shared_bytes(), 128);
}

#[test]
fn local_and_param_memory() {
    let body = "
        .local .align 8 .b8 __local_depot0[16];
        .reg .b64 %SP; .reg .b64 %SPL;
        mov.b64 %SPL, __local_depot0; cvta.local.u64 %SP, %SPL;
        cvt.u64.u32 %rd1, %r40;
        st.local.u64 [%SPL+8], %rd1; ld.u64 %rd2, [%SP+8]; isspacep.local %p1, %SP;
        mov.b64 %rd3, buf; cvta.param.u64 %rd4, %rd3; ld.u64 %rd5, [%rd4]; ld.param.u64 %rd6, [%rd3];
        sub.u64 %rd7, %rd5, %rd6; @%p1 add.u64 %rd2, %rd2, %rd7;
        st.global.u64 [%rd42], %rd2;";
    assert_eq!(run_body("", body, 40, &[9; 40]), (0..40).collect::<Vec<u64>>());
}

#[test]
fn module_variables_last_from_launch_to_launch() {
    let globals = ".global .align 8 .u64 COUNTER = 5;\n.const .align 4 .b32 TABLE[3] = {10, 20, 30};\n";
    let body = "
        mov.u64 %rd1, COUNTER; atom.global.add.u64 %rd2, [%rd1], 1;
        mov.u64 %rd3, TABLE; ld.const.u32 %r1, [%rd3+8]; ld.global.u32 %r2, [TABLE];
        add.u32 %r1, %r1, %r2; cvt.u64.u32 %rd4, %r1; st.global.v2.u64 [%rd40], {%rd2, %rd4};";
    let ptx = kernel(globals, body);
    let module = epoxide_vgpu::Module::parse(&ptx).unwrap();
    let memory = epoxide_vgpu::Memory::new();
    let buf = memory.alloc(16, "buf").unwrap();
    for round in 0..3 {
        let mut grid = epoxide_vgpu::Grid::new(
            module.kernel("k").unwrap(),
            memory.clone(),
            &DeviceConfig::default(),
            launch(1, 1),
            &buf.addr().to_ne_bytes(),
        )
        .unwrap();
        while grid.step(1000).unwrap() != epoxide_vgpu::Progress::Done {}
        let mut out = [0; 16];
        memory.read(buf.addr(), &mut out).unwrap();
        assert_eq!(u64::from_ne_bytes(out[..8].try_into().unwrap()), 5 + round);
        assert_eq!(u64::from_ne_bytes(out[8..].try_into().unwrap()), 40);
    }
}

#[test]
fn constants_have_a_window_of_their_own() {
    // The constants lie together, whatever stands between their definitions.
    let globals = ".const .align 4 .b32 FIRST[2] = {1, 2};\n.global .align 8 .u64 BETWEEN = 5;\n\
                   .shared .align 8 .b64 S;\n.const .align 8 .b64 LAST = 3;\n";
    let inside = ["FIRST", "FIRST+7", "LAST", "LAST+7"].map(|at| (at, 1));
    let outside = ["BETWEEN", "BETWEEN+7", "FIRST-1", "LAST+8"].map(|at| (at, 2));
    for (at, want) in inside.into_iter().chain(outside) {
        let (name, offset) = at.split_at(at.find(['+', '-']).unwrap_or(at.len()));
        let offset = if offset.is_empty() { "0" } else { offset.trim_start_matches('+') };
        let body = format!(
            "mov.u64 %rd1, {name}; cvta.const.u64 %rd1, %rd1; add.s64 %rd1, %rd1, {offset};
             isspacep.const %p1, %rd1; isspacep.global %p2, %rd1;
             selp.u64 %rd2, 1, 0, %p1; selp.u64 %rd3, 2, 0, %p2; or.b64 %rd2, %rd2, %rd3; st.global.u64 [%rd40], %rd2;"
        );
        assert_eq!(run_body(globals, &body, 1, &[0]), [want], "{at}");
    }
    let body = "mov.u64 %rd1, S; cvta.shared.u64 %rd1, %rd1; isspacep.const %p1, %rd1; isspacep.const %p2, %rd40;
        mov.u64 %rd2, FIRST; cvta.const.u64 %rd3, %rd2; cvta.to.const.u64 %rd4, %rd3; ld.const.u32 %r1, [%rd4+4];
        ld.u32 %r2, [%rd3]; @%p1 add.u32 %r1, %r1, 10; @%p2 add.u32 %r1, %r1, 10; add.u32 %r1, %r1, %r2;
        st.global.u32 [%rd40], %r1;";
    assert_eq!(run_body(globals, body, 1, &[0]), [3]);
    // A module need not have variables.
    let none = "isspacep.const %p1, %rd40; isspacep.global %p2, %rd40; selp.u64 %rd2, 1, 0, %p1;
        selp.u64 %rd3, 2, 0, %p2; or.b64 %rd2, %rd2, %rd3; st.global.u64 [%rd40], %rd2;";
    assert_eq!(run_body("", none, 1, &[0]), [2]);
    for body in
        ["st.const.u32 [%rd1], %r1;", "atom.const.add.u32 %r1, [%rd1], 1;", "red.const.add.u32 [%rd1], 1;"]
    {
        assert!(reject(body).message.contains("const"), "{body}");
    }
}

#[test]
fn f32_atomics_flush_subnormals_in_global_memory_only() {
    // Two subnormals, and two normal numbers whose sum is subnormal.
    let (smallest, next) = (0x0080_0000u64, 0x8080_0001u64);
    for (old, add, kept, flushed) in [
        (1u64, 2u64, 3u64, 0u64),
        (0x8000_0001, 0x8000_0001, 0x8000_0002, 0x8000_0000),
        (smallest, next, 0x8000_0001, 0x8000_0000),
        (0x7fc0_1234, 0, 0x7fff_ffff, 0x7fff_ffff),
    ] {
        let body = |place: &str| {
            format!(
                "{place} mov.b32 %r1, {old}; mov.b32 %r2, {add};
                st.b32 [%rd1], %r1; atom.OP.add.f32 %r3, [%rd2], %r2; red.OP.add.f32 [%rd2], 0f80000000;
                ld.b32 %r4, [%rd1]; mov.b64 %rd3, {{%r4, %r3}}; st.global.b64 [%rd42], %rd3;"
            )
        };
        let shared = ".shared .align 8 .b64 S;";
        let (in_global, in_shared) = ("add.s64 %rd1, %rd42, 8;", "cvta.shared.u64 %rd1, S;");
        for (space, place, want) in [
            ("global", format!("{in_global} mov.b64 %rd2, %rd1;"), flushed),
            ("generic", format!("{in_global} mov.b64 %rd2, %rd1;"), flushed),
            ("shared", format!("{in_shared} mov.b64 %rd2, S;"), kept),
            ("generic", format!("{in_shared} mov.b64 %rd2, %rd1;"), kept),
        ] {
            let space = if space == "generic" { String::new() } else { format!(".{space}") };
            let body = body(&place).replace(".OP", &space);
            let got = run_body(shared, &body, 1, &[0; 2])[0];
            assert_eq!(got, old << 32 | want, "{got:#x}\n{body}");
        }
    }
}

#[test]
fn atomics() {
    // (instruction, memory before, operand, memory after); the instruction must return the old
    // value.
    let neg = |v: i64| v as u64;
    for (op, before, operand, after) in [
        ("add.u32", 5, 7, 12),
        ("add.s32", 5, 0xffff_ffff, 4),
        ("add.u64", u64::MAX, 1, 0),
        ("min.u32", 5, 7, 5),
        ("min.s32", 5, 0xffff_ffff, 0xffff_ffff),
        ("max.u32", 5, 0xffff_ffff, 0xffff_ffff),
        ("max.s32", 5, 0xffff_ffff, 5),
        ("min.s64", 5, neg(-1), neg(-1)),
        ("max.u64", 5, neg(-1), neg(-1)),
        ("inc.u32", 5, 5, 0),
        ("inc.u32", 4, 5, 5),
        ("dec.u32", 0, 5, 5),
        ("dec.u32", 9, 5, 5),
        ("dec.u32", 3, 5, 2),
        ("and.b32", 6, 3, 2),
        ("or.b64", 6, 3, 7),
        ("xor.b32", 6, 3, 5),
        ("exch.b32", 6, 3, 3),
        ("exch.b64", 6, 3, 3),
        ("add.f32", f(1.5), f(2.0), f(3.5)),
        ("add.f64", d(1.5), d(2.0), d(3.5)),
        ("add.noftz.f16x2", 0x3c00_4000, 0x4000_3c00, 0x4200_4200),
        ("add.noftz.bf16x2", 0x3f80_4000, 0x4000_3f80, 0x4040_4040),
    ] {
        let reg = if op.ends_with("64") { "rd" } else { "r" };
        let bits = if op.ends_with("64") { "64" } else { "32" };
        for form in ["", ".relaxed.gpu", ".acq_rel.sys", ".release.cta", ".acquire.gpu"] {
            let body = format!(
                "ld.global.b{bits} %{reg}1, [%rd40+8]; atom{form}.global.{op} %{reg}2, [%rd40], %{reg}1;
                 st.global.b{bits} [%rd40+16], %{reg}2;"
            );
            assert_eq!(run_body("", &body, 1, &[before, operand, 0]), [after, operand, before], "{op}");
            if !op.starts_with("exch") {
                let body =
                    format!("ld.global.b{bits} %{reg}1, [%rd40+8]; red{form}.global.{op} [%rd40], %{reg}1;");
                assert_eq!(run_body("", &body, 1, &[before, operand]), [after, operand], "{op}");
            }
        }
    }
    for (current, want) in [(5, 9), (6, 6)] {
        let body = "ld.global.b32 %r1, [%rd40]; atom.acq_rel.gpu.cas.b32 %r2, [%rd40], 5, 9;
            st.global.b32 [%rd40+8], %r2;";
        assert_eq!(run_body("", body, 1, &[current, 0]), [want, current]);
        let body = "mov.b16 %h1, 5; mov.b16 %h2, 9; atom.global.cas.b16 %h3, [%rd40], %h1, %h2;
            st.global.b16 [%rd40+8], %h3;";
        assert_eq!(run_body("", body, 1, &[current, 0]), [want, current]);
        let body = "atom.global.cas.b64 %rd2, [%rd40], 5, 9; st.global.b64 [%rd40+8], %rd2;";
        assert_eq!(run_body("", body, 1, &[current, 0]), [want, current]);
    }
    // All lanes change one word of shared memory: each gets another old value.
    let body = "
        mov.u32 %r1, S; mov.u32 %r2, 0; st.shared.u32 [%r1], %r2; bar.warp.sync -1;
        atom.shared.add.u32 %r3, [%r1], 1; cvt.u64.u32 %rd1, %r3; st.global.u64 [%rd42], %rd1;";
    let mut got = run_body(".shared .align 4 .b8 S[4];", body, 32, &[0; 32]);
    got.sort_unstable();
    assert_eq!(got, (0..32).collect::<Vec<u64>>());
}

#[test]
fn bad_addresses_fault_with_the_place() {
    let fault = fault_of("", ".file 1 \"src/k.rs\"\n.loc 1 42 7\nld.global.u32 %r1, [%rd42+512];", 32);
    assert_eq!((fault.lane, fault.warp, fault.block), (Some(0), 0, [0, 0, 0]));
    assert_eq!(fault.at.source, Some(("src/k.rs".to_string(), 42)));
    assert_eq!(fault.at.ptx_text, "ld.global.u32 %r1, [%rd42+512];");
    let text = fault.to_string();
    assert!(text.contains("src/k.rs:42") && text.contains("'buf'") && text.contains("lane 0"), "{text}");
    // The kernel's own line, and the one it was inlined from.
    let files = ".file 1 \"src/k.rs\"\n.file 2 \"src/mem.rs\"\n.loc 1 40 0\n";
    let fault = fault_of(
        "",
        &format!("{files}.loc 2 7 1 // inlined_at 1 43, 1 41\nld.global.u32 %r1, [%rd42+512];"),
        32,
    );
    assert_eq!(fault.at.source, Some(("src/k.rs".to_string(), 43)));
    assert_eq!(fault.at.inlined, Some(("src/mem.rs".to_string(), 7)));
    assert_eq!(fault.at.callers, [("src/k.rs".to_string(), 41)]);
    let place = "\n  at src/k.rs:43 (inlined: src/mem.rs:7), called at :41\n";
    assert!(fault.to_string().contains(place), "{fault}");
    // Only one lane is wrong, and it is the one named.
    let body = "setp.eq.u32 %p1, %r40, 9; selp.u64 %rd1, 8, %rd40, %p1; st.global.u64 [%rd1], %rd40;";
    let fault = fault_of("", body, 32);
    assert_eq!(fault.lane, Some(9));
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { addr: 8, bytes: 8, .. }));
    assert!(fault.to_string().contains("null pointer"));
    // The last bytes of a region are fine, one more is not.
    run_body("", "ld.global.u64 %rd1, [%rd40+56];", 1, &[0; 8]);
    let kind = fault_kind("ld.global.v2.u64 {%rd1, %rd2}, [%rd40+512];");
    assert!(matches!(kind, FaultKind::OutOfBounds { bytes: 16, nearest: Some(n), .. } if n.distance == 0));
    for body in [
        "ld.global.u32 %r1, [%rd40+2];",
        "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd40+8];",
        "st.global.u16 [%rd40+1], %h1;",
        "atom.global.add.u64 %rd1, [%rd40+4], 1;",
        "mov.u32 %r1, 1026; ld.shared.u32 %r2, [%r1];",
    ] {
        assert!(matches!(fault_kind(body), FaultKind::Misaligned { .. }), "{body}");
    }
    for (body, name) in [
        ("ld.shared.u32 %r1, [1024];", "shared"),
        ("mov.u32 %r1, 0; st.shared.u32 [%r1], 5;", "shared"),
        ("ld.param.u32 %r1, [buf+8];", "param"),
        (".local .b8 L[8]; ld.local.u32 %r1, [L+16];", "local"),
        (".local .b8 L[8]; mov.u64 %rd1, L; cvta.local.u64 %rd1, %rd1; st.u32 [%rd1-4], 1;", "local"),
    ] {
        let kind = fault_kind(body);
        let local_wrap = matches!(kind, FaultKind::OutOfBounds { .. }) && body.contains("-4");
        assert!(
            matches!(kind, FaultKind::OutOfWindow { space, .. } if space == name) || local_wrap,
            "{body}: {kind}"
        );
    }
    let shared = fault_of(".shared .align 4 .b8 S[8];", "ld.shared.u32 %r1, [S+8];", 1).kind;
    assert!(matches!(shared, FaultKind::OutOfWindow { offset: 1032, start: 1024, .. }), "{shared}");
    assert!(matches!(fault_kind("trap;"), FaultKind::Trap));
}

#[test]
fn a_fault_is_kept() {
    let mut run = Run::new(&kernel("", "trap;"), &[0], launch(1, 32), &DeviceConfig::default());
    let first = run.grid.step(100).unwrap_err();
    assert_eq!(run.grid.step(100).unwrap_err(), first);
}

#[test]
fn copies_of_single_threads() {
    // `%rd40` holds the bytes 1, 2, ..; each line copies to its own 16 bytes of shared memory,
    // which hold 0xff before.
    let copies = "
        cp.async.cg.shared.global [%r1], [%rd40], 16;
        cp.async.ca.shared.global [%r1+16], [%rd40+8], 8;
        cp.async.ca.shared::cta.global.L2::128B [ %r1 + 32 ], [ %rd40 + 4 ], 0x4, %r2;
        cp.async.cg.shared.global [%r1+48], [%rd40], 16, 6;
        cp.async.cg.shared.global [%r1+64], [%rd9], 16, 0;
        cp.async.ca.shared.global [%r1+80], [%rd9], 8, %p1;
        cp.async.ca.shared.global [%r1+96], [%rd40], 4, !%p1;
        @!%p1 cp.async.cg.shared.global [%r1+112], [%rd9], 16, 16;
        cp.async.commit_group; cp.async.wait_group 0; cp.async.wait_all;";
    let mut body = "mov.u32 %r1, S; mov.u32 %r2, 4; mov.u64 %rd9, 0; setp.eq.u32 %p1, 0, 0;".to_string();
    (0..16).for_each(|k| body += &format!("st.shared.u64 [%r1+{}], -1;", 8 * k));
    body += copies;
    (0..16).for_each(|k| {
        body += &format!("ld.shared.u64 %rd1, [%r1+{0}]; st.global.u64 [%rd40+{0}], %rd1;", 8 * k)
    });
    let mut buf = [0; 16];
    (buf[0], buf[1]) = (0x0807_0605_0403_0201, 0x100f_0e0d_0c0b_0a09);
    let (a, b, none) = (buf[0], buf[1], u64::MAX);
    let word = |v: u64| none << 32 | v & 0xffff_ffff;
    let want = [
        [a, b],
        [b, none],
        [word(a >> 32), none],
        [a & 0xffff_ffff_ffff, 0],
        [0, 0],
        [0, none],
        [word(a), none],
        [none, none],
    ];
    assert_eq!(run_body(".shared .align 16 .b8 S[128];", &body, 1, &buf), want.concat());
}

#[test]
fn a_copy_reads_no_more_bytes_than_it_writes() {
    const S: &str = ".shared .align 16 .b8 S[128];";
    for (n, read) in [("-4", 0xffff_fffc_u32), ("5", 5)] {
        let body = format!(
            "mov.u32 %r1, S; mov.u32 %r2, {n}; setp.eq.u32 %p1, %r40, 3; @!%p1 mov.u32 %r2, 4;
             mad.lo.u32 %r1, %r40, 4, %r1; cp.async.ca.shared.global [%r1], [%rd40], 4, %r2;"
        );
        let fault = fault_of(S, &body, 8);
        assert_eq!(fault.lane, Some(3), "{fault}");
        let FaultKind::AsyncCopy { message } = &fault.kind else { panic!("{fault}") };
        assert_eq!(*message, format!("it reads {read} bytes (src-size), and copies 4 (cp-size)"));
    }
}

#[test]
fn matrices_go_to_registers_and_back() {
    // Element c of row r of matrix m is 64 m + 8 r + c. Each lane stores its four registers.
    let fill = "
        mov.u32 %r1, S; mov.u32 %r2, 0; mad.lo.u32 %r3, %r40, 16, %r1;
    FILL:
        mad.lo.u32 %r4, %r40, 8, %r2; cvt.u16.u32 %h1, %r4; mad.lo.u32 %r5, %r2, 2, %r3; st.shared.u16 [%r5], %h1;
        add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 8; @%p1 bra FILL;
        bar.sync 0;";
    let report = "
        mad.wide.u32 %rd1, %r40, 8, %rd42; mov.b64 %rd2, {%r11, %r12}; mov.b64 %rd3, {%r13, %r14};
        st.global.v2.u64 [%rd1], {%rd2, %rd3};";
    let of_matrix = |element: fn(u64, u64) -> u64| -> Vec<u64> {
        let register = |m: u64, t: u64| (64 * m + element(t, 0)) | (64 * m + element(t, 1)) << 16;
        (0..32).flat_map(|t| [0, 2].map(|m| register(m, t) | register(m + 1, t) << 32)).collect()
    };
    let plain = of_matrix(|t, k| 8 * (t / 4) + 2 * (t % 4) + k);
    let transposed = of_matrix(|t, k| 8 * (2 * (t % 4) + k) + t / 4);
    const S: &str = ".shared .align 16 .b8 S[1024];";
    let run = |code: &str| run_body(S, &format!("{fill}{code}{report}"), 32, &[0; 64]);
    let load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r11, %r12, %r13, %r14}, [%r3];";
    let load_trans = load.replace(".x4", ".x4.trans");
    assert_eq!(run(load), plain);
    assert_eq!(run(&load_trans), transposed);
    // By generic addresses, and fewer matrices at a time; the first lanes give the addresses.
    let pieces = "cvt.u64.u32 %rd5, %r3; cvta.shared.u64 %rd6, %rd5; mov.u32 %r11, 0; mov.u32 %r12, 0; mov.u32 %r14, 0;
        ldmatrix.sync.aligned.m8n8.x2.b16 {%r11, %r12}, [%rd6];
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r13}, [%r3+256]; add.u32 %r3, %r3, 384;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 %r14, [%r3];";
    assert_eq!(run(pieces), plain);
    // A matrix that was loaded in columns and stored in rows is transposed.
    for (back, want) in [("", &transposed), (".trans", &plain)] {
        let round = format!(
            "{load_trans} bar.sync 0; add.u32 %r4, %r3, 512;
             stmatrix.sync.aligned.m8n8.x4{back}.shared.b16 [%r4], {{%r11, %r12, %r13, %r14}};
             bar.sync 0; {}",
            load.replace("[%r3]", "[%r3+512]")
        );
        assert_eq!(&run(&round), want, "{back}");
    }
}

#[test]
fn rows_of_matrices_are_aligned() {
    const S: &str = ".shared .align 16 .b8 S[1024];";
    // Lane `odd` gives an address that is no multiple of 16.
    let body = |odd: u32, access: &str| {
        format!(
            "mov.u32 %r1, S; mad.lo.u32 %r3, %r40, 16, %r1;
             setp.eq.u32 %p1, %r40, {odd}; @%p1 add.u32 %r3, %r3, 8;
             cvt.u64.u32 %rd5, %r3; cvta.shared.u64 %rd6, %rd5;
             mov.u32 %r11, 0; mov.u32 %r12, 0; mov.u32 %r13, 0; mov.u32 %r14, 0;
             {access}"
        )
    };
    for (rows, access) in [
        (8, "ldmatrix.sync.aligned.m8n8.x1.shared.b16 %r11, [%r3];"),
        (16, "ldmatrix.sync.aligned.m8n8.x2.trans.b16 {%r11, %r12}, [%rd6];"),
        (32, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r11, %r12, %r13, %r14}, [%r3];"),
        (8, "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r3], %r11;"),
        (16, "stmatrix.sync.aligned.m8n8.x2.b16 [%rd6], {%r11, %r12};"),
    ] {
        let fault = fault_of(S, &body(rows - 1, access), 32);
        let FaultKind::Misaligned { addr, align: 16 } = fault.kind else { panic!("{access}: {fault}") };
        assert_eq!((addr, fault.lane), (1024 + 16 * u64::from(rows - 1) + 8, Some(rows - 1)), "{access}");
        // The other lanes give no address.
        run_body(S, &body(rows, access), 32, &[0]);
        let offset = access.replace("%r3]", "%r3+4]").replace("%rd6]", "%rd6+4]");
        assert_eq!(fault_of(S, &body(32, &offset), 32).lane, Some(0), "{offset}");
    }
}

/// Types of loads and stores, the registers of their elements, and the size of the vector.
const SHAPES: [(&str, &str, u64); 12] = [
    ("b32", "%r", 4),
    ("v2.b32", "%r", 8),
    ("v4.b32", "%r", 16),
    ("b64", "%rd", 8),
    ("v2.b64", "%rd", 16),
    ("u8", "%r", 1),
    ("s8", "%r", 1),
    ("u16", "%r", 2),
    ("s32", "%rd", 4),
    ("b128", "%rq", 16),
    ("v4.u8", "%r", 4),
    ("v2.s16", "%r", 4),
];

/// A warp checks its addresses together where it can, with the same results as for one lane at a
/// time.
#[test]
fn a_warp_accesses_what_its_lanes_access_one_by_one() {
    epoxide_vgpu::for_each_seed(tier(400, 4000), |seed| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (ty, file, size) = SHAPES[rng.random_range(0..SHAPES.len())];
        let sem = ["", "relaxed.gpu."][rng.random_range(0..2)];
        let shared = rng.random_range(0..3) == 0;
        let space = if shared { "shared." } else { ["global.", ""][rng.random_range(0..2)] };
        let n = match ty.as_bytes()[..2] {
            [b'v', n] => u64::from(n - b'0'),
            _ => 1,
        };
        // Registers of the whole warp from `at` on, and of single lanes behind.
        let vector = |at: u64| {
            let names: Vec<_> = (at..at + n).map(|i| format!("{file}{i}")).collect();
            if n == 1 { names[0].clone() } else { format!("{{{}}}", names.join(", ")) }
        };
        // The place of each lane: the same, a row, a row from an odd lane on, or scattered.
        let pattern = rng.random_range(0..4);
        let (factor, add) = [(0, 9), (1, 0), (1, 3), (rng.random_range(2..40), 5)][pattern];
        let mask: u32 = match rng.random_range(0..4) {
            0 => u32::MAX,
            1 => rng.random(),
            2 => 1 << rng.random_range(0..32),
            _ => 0x8000_0101,
        };
        let base = if shared { "%rd45" } else { "%rd40" };
        let address = if shared && space == "shared." { "%rd46" } else { "%rd47" };
        let mut body = format!(
            "mov.u64 %rd45, sh; mul.lo.u32 %r41, %r40, {factor}; add.u32 %r41, %r41, {add};
             and.b32 %r41, %r41, 63; mul.wide.u32 %rd44, %r41, {size}; add.u64 %rd46, {base}, %rd44;
             add.u64 %rd47, %rd40, %rd44; shr.u32 %r42, {mask}, %r40; and.b32 %r42, %r42, 1;
             setp.ne.u32 %p1, %r42, 0; .reg .b128 %rq<8>;\n"
        );
        for word in 0..4 {
            body += &format!(
                "ld.global.u64 %rd43, [%rd42+{at}]; add.u64 %rd48, %rd45, %rd41;
                 st.shared.u64 [%rd48+{at}], %rd43;\n",
                at = 256 * word
            );
        }
        for i in 0..8 {
            body += &format!("mov.u32 %r{i}, {i}; mov.u64 %rd{i}, {i};\n");
        }
        body += "mov.b128 %rq0, {%rd1, %rd2}; mov.b128 %rq4, {%rd1, %rd2}; bar.warp.sync -1;\n";
        body += &format!("@%p1 ld.{sem}{space}{ty} {}, [{address}];\n", vector(0));
        let each = |instruction: String| -> String {
            (0..32)
                .map(|lane| format!("setp.eq.and.u32 %p2, %r40, {lane}, %p1; @%p2 {instruction}\n"))
                .collect()
        };
        for i in 4..8 {
            body += &format!("mov.u32 %r{i}, {}; mov.u64 %rd{i}, {};\n", i - 4, i - 4);
        }
        body += &each(format!("ld.{sem}{space}{ty} {}, [{address}];", vector(4)));
        if file == "%rq" {
            body += "mov.b128 {%rd0, %rd1}, %rq0; mov.b128 {%rd4, %rd5}, %rq4;\n";
        }
        for i in 0..8 {
            body += &format!("st.global.u64 [%rd42+{}], %rd{i};\n", 8192 + 512 * i);
            body += &format!("st.global.u32 [%rd42+{}], %r{i};\n", 8192 + 512 * i + 256);
        }
        // Two places of their own for stores of the same values.
        let stored = ty.replace(['s', 'u'], "b");
        for (at, whole) in [(0, true), (4096, false)] {
            let store = |guard: &str| format!("{guard}st.{sem}{stored} [%rd49], {};", vector(0));
            body += &format!("add.u64 %rd49, %rd47, {};\n", 16384 + at);
            body += &if whole { store("@%p1 ") + "\n" } else { each(store("")) };
        }
        let buf: Vec<u64> = (0..4096).map(|i| if i < 1024 { rng.random() } else { 0 }).collect();
        let got = run_body(".shared .align 16 .b8 sh[1024];", &body, 32, &buf);
        for i in 0..4 {
            let rows = |i: usize| &got[1024 + 64 * i..][..64];
            assert_eq!(rows(i), rows(i + 4), "registers {i} of ld.{sem}{space}{ty}, lanes {mask:#x}\n{body}");
        }
        assert_eq!(got[2048..2560], got[2560..3072], "st.{sem}{stored}, lanes {mask:#x}\n{body}");
    });
}

/// The PTX lines that a fault names for its address, the nearest first.
fn lines_of_address(body: &str) -> Vec<String> {
    let fault = fault_of(SHARED, body, 64);
    let text = fault.to_string();
    let line = |at: &InstructionPlace| format!("\n    PTX line {}: {}", at.ptx_line, at.ptx_text);
    let lines: String = fault.address.iter().map(line).collect();
    let said = format!("\n  its address was computed{lines}");
    assert_eq!(text.contains(&said), !lines.is_empty(), "{text}");
    fault.address.iter().map(|at| at.ptx_text.trim().to_owned()).collect()
}

#[test]
fn faults_name_the_instructions_behind_their_addresses() {
    // Through a load, and through both sides of a branch; values and conditions are left out.
    let body = "
    ld.global.u64 %rd1, [%rd40+8];
    add.s64 %rd2, %rd1, 3;
    setp.ne.u32 %p1, %r40, 0;
    mov.u64 %rd3, 16;
    @%p1 bra OTHER;
    mov.u64 %rd3, 8;
OTHER:
    add.s64 %rd4, %rd2, %rd3;
    mul.lo.u64 %rd9, %rd1, 7;
    st.global.u64 [%rd4], %rd9;";
    let expected = [
        "add.s64 %rd4, %rd2, %rd3;",
        "add.s64 %rd2, %rd1, 3;",
        "mov.u64 %rd3, 8;",
        "mov.u64 %rd3, 16;",
        "ld.global.u64 %rd1, [%rd40+8];",
    ];
    let lines = lines_of_address(body);
    assert_eq!(lines[0], expected[0], "{lines:?}");
    let sorted = |lines: &[String]| -> Vec<String> {
        let mut lines = lines.to_vec();
        lines.sort_unstable();
        lines
    };
    let expected = expected.map(str::to_owned);
    assert_eq!(sorted(&lines[..5]), sorted(&expected), "{lines:?}");

    // A value that goes around a loop, and one under a guard.
    let body = "
    mov.u64 %rd1, 0;
    mov.u32 %r1, 0;
AGAIN:
    add.s64 %rd1, %rd1, 1;
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p1, %r1, 3;
    @%p1 bra AGAIN;
    @!%p1 add.s64 %rd1, %rd1, 2;
    ld.global.u64 %rd2, [%rd1];";
    let expected = ["@!%p1 add.s64 %rd1, %rd1, 2;", "add.s64 %rd1, %rd1, 1;", "mov.u64 %rd1, 0;"];
    assert_eq!(lines_of_address(body), expected);
    // An address of shared memory, and no address.
    let body = "mov.u32 %r1, DATA;\nadd.u32 %r2, %r1, 100000;\nld.shared.u32 %r3, [%r2];";
    assert_eq!(lines_of_address(body)[0], "add.u32 %r2, %r1, 100000;");
    assert_eq!(lines_of_address("trap;"), <[String; 0]>::default());
}
