//! Clusters of several blocks: registers, launches, distributed shared memory, the cluster's
//! barrier, remote mbarriers, and copies between blocks. The reports of check mode are tested in
//! `cases/`.

use epoxide_vgpu::{
    CheckConfig, Cluster, DeviceConfig, FaultKind, GridConfig, LaunchError, Machine, MachineError, Module,
    for_each_seed,
};

use crate::common::{HEAD, device, kernel, launch, tier};

/// Shared variables of the kernels: data, and an mbarrier.
const SHARED: &str = ".shared .align 128 .b8 DATA[1024];\n.shared .align 8 .b8 MBAR[16];";

fn clusters(blocks: u32, threads: u32, cluster: u32) -> GridConfig {
    launch(blocks, threads).in_clusters_of([cluster, 1, 1])
}

fn module(body: &str) -> Module {
    let ptx = kernel(SHARED, body);
    Module::parse(&ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"))
}

fn run_on(
    module: &Module,
    shape: GridConfig,
    config: DeviceConfig,
    check: Option<CheckConfig>,
) -> Result<Vec<u64>, MachineError> {
    let mut machine = Machine::with_config(1, config, check);
    let words: Vec<u64> = (0..512).map(|i| i << 32).collect();
    let buf = machine.upload(0, "buf", &words)?;
    machine.launch_with(0, module, "k", shape, &[&buf])?;
    machine.run()?;
    buf.download()
}

/// Runs a kernel under many seeds, in fast and in check mode, without a report, and compares words
/// of the buffer with `expected`.
fn passes(body: &str, shape: GridConfig, expected: impl Fn(usize) -> Option<u64>) {
    let module = module(body);
    for_each_seed(tier(60, 600), |seed| {
        for check in [None, Some(CheckConfig::default())] {
            let got = run_on(&module, shape, device(seed), check).unwrap_or_else(|e| panic!("{e}"));
            for (word, value) in got.iter().enumerate() {
                if let Some(expected) = expected(word) {
                    assert_eq!(*value, expected, "word {word} with {check:?}");
                }
            }
        }
    });
}

/// The fault of a kernel whose first run ends with one.
fn fault(body: &str, shape: GridConfig) -> FaultKind {
    match run_on(&module(body), shape, DeviceConfig::default(), None) {
        Err(MachineError::Fault(fault)) => fault.kind,
        other => panic!("{other:?}\n{body}"),
    }
}

/// A barrier of all threads of the cluster.
const MEET: &str = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;";

#[test]
fn registers_tell_a_block_its_place_in_the_cluster() {
    // Each block writes 16 numbers behind each other.
    let registers = [
        "%clusterid.x",
        "%clusterid.y",
        "%clusterid.z",
        "%nclusterid.x",
        "%nclusterid.y",
        "%nclusterid.z",
        "%cluster_ctaid.x",
        "%cluster_ctaid.y",
        "%cluster_ctaid.z",
        "%cluster_nctaid.x",
        "%cluster_nctaid.y",
        "%cluster_nctaid.z",
        "%cluster_ctarank",
        "%cluster_nctarank",
    ];
    let mut body = String::from(
        "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %nctaid.x; mad.lo.u32 %r1, %r2, %r3, %r1;
         mul.wide.u32 %rd1, %r1, 128; add.s64 %rd1, %rd1, %rd40;\n",
    );
    for (i, register) in registers.iter().enumerate() {
        body += &format!(
            "mov.u32 %r4, {register}; cvt.u64.u32 %rd2, %r4; st.global.u64 [%rd1+{}], %rd2;\n",
            8 * i
        );
    }
    body += "mov.pred %p1, %is_explicit_cluster; selp.u64 %rd2, 1, 0, %p1; st.global.u64 [%rd1+112], %rd2;";
    for shape in [Some([2, 2, 1]), Some([4, 1, 1]), Some([1, 1, 1]), None] {
        let config = GridConfig { grid: [4, 6, 1], cluster: shape.map(Cluster::from), ..launch(1, 1) };
        let [cx, cy, _] = shape.unwrap_or([1; 3]).map(u64::from);
        passes(&body, config, |word| {
            let (block, field) = (word as u64 / 16, word % 16);
            let [x, y] = [block % 4, block / 4];
            let fields = [
                x / cx,
                y / cy,
                0,
                4 / cx,
                6 / cy,
                1,
                x % cx,
                y % cy,
                0,
                cx,
                cy,
                1,
                x % cx + y % cy * cx,
                cx * cy,
                u64::from(shape.is_some()),
            ];
            fields.get(field).copied().filter(|_| block < 24)
        });
    }
}

#[test]
fn a_launch_in_clusters_is_checked() {
    let with = |directives: &str| {
        let text = format!("{HEAD}.visible .entry k()\n{directives}\n{{\nret;\n}}\n");
        Module::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    };
    let error = |module: &Module, shape: GridConfig, config: DeviceConfig| {
        let mut machine = Machine::with_config(1, config, None);
        machine.launch_with(0, module, "k", shape, &[]).unwrap();
        match machine.run() {
            Err(MachineError::Launch(LaunchError::Cluster { message, .. })) => message,
            other => panic!("{other:?}"),
        }
    };
    let device = DeviceConfig::default;
    let plain = with("");
    let runs = |module: &Module, shape| {
        let mut machine = Machine::new(1);
        machine.launch_with(0, module, "k", shape, &[]).unwrap();
        machine.run().unwrap();
    };
    runs(&plain, clusters(16, 32, 8));
    runs(&plain, launch(32, 32).in_non_portable_clusters_of([16, 1, 1]));
    for (shape, text) in [
        (clusters(5, 32, 2), "no multiple of 2"),
        (clusters(16, 32, 16), "8 are portable"),
        (clusters(16, 32, 0), "1 at least"),
        (launch(8, 32).in_clusters_of([1, 2, 1]), "1 blocks in y"),
        (launch(8, 32).in_clusters_of([u32::MAX; 3]), "16 the most"),
        (launch(32, 32).in_non_portable_clusters_of([32, 1, 1]), "16 the most"),
    ] {
        let message = error(&plain, shape, device());
        assert!(message.contains(text), "{message}");
    }
    let few = DeviceConfig { max_blocks_resident: Some(3), ..device() };
    let message = error(&plain, clusters(8, 32, 4), few);
    assert!(message.contains("holds 3 blocks"), "{message}");
    let required = with(".reqnctapercluster 2, 2, 1");
    let shape = GridConfig { grid: [4, 2, 1], ..launch(1, 32) };
    runs(&required, shape);
    runs(&required, shape.in_clusters_of([2, 2, 1]));
    assert!(
        error(&required, shape.in_clusters_of([4, 1, 1]), device())
            .contains("requires clusters of [2, 2, 1]")
    );
    assert!(error(&required, clusters(3, 32, 1), device()).contains("requires clusters"));
    let explicit = with(".explicitcluster\n.maxclusterrank 2");
    runs(&explicit, clusters(4, 32, 2));
    assert!(error(&explicit, launch(4, 32), device()).contains(".explicitcluster"));
    assert!(error(&explicit, clusters(4, 32, 4), device()).contains("allows 2"));
    let kernel = required.kernel("k").unwrap();
    assert_eq!((kernel.required_cluster(), kernel.needs_cluster()), (Some([2, 2, 1]), false));
    assert!(explicit.kernel("k").unwrap().needs_cluster());
}

/// Each block stores 100 and its number in the grid to its `DATA`, and reads that of the next block
/// of its cluster by `load`, which has the local address in `%r3` and the next block's rank in
/// `%r4`.
fn reads_neighbour(load: &str) -> String {
    format!(
        "mov.u32 %r1, %ctaid.x; add.u32 %r2, %r1, 100; mov.u32 %r3, DATA;
         mov.u32 %r4, %cluster_ctarank; mov.u32 %r5, %cluster_nctarank; add.u32 %r4, %r4, 1; rem.u32 %r4, %r4, %r5;
         st.shared.u32 [%r3+4], %r2;
         {MEET}
         {load}
         {MEET}
         mul.wide.u32 %rd1, %r1, 8; add.s64 %rd1, %rd1, %rd40; cvt.u64.u32 %rd2, %r6; st.global.u64 [%rd1], %rd2;"
    )
}

#[test]
fn blocks_read_each_others_shared_memory() {
    for load in [
        "mapa.shared::cluster.u32 %r7, %r3, %r4; ld.shared::cluster.u32 %r6, [%r7+4];",
        "mapa.shared::cluster.u32 %r7, DATA, %r4; ld.relaxed.cluster.shared::cluster.u32 %r6, [%r7+4];",
        "cvta.shared.u64 %rd3, DATA; mapa.u64 %rd3, %rd3, %r4; ld.u32 %r6, [%rd3+4];",
        "mapa.shared::cluster.u32 %r7, %r3, %r4; cvt.u64.u32 %rd3, %r7; cvta.shared::cluster.u64 %rd3, %rd3; ld.u32 %r6, [%rd3+4];",
        "mapa.shared::cluster.u32 %r7, %r3, %r4; atom.add.acquire.cluster.shared::cluster.u32 %r6, [%r7+4], 0;",
        "mapa.shared::cluster.u32 %r7, %r3, %r4; ld.shared::cluster.v2.u32 {%r8, %r6}, [%r7];",
    ] {
        // The vector's first element is unwritten otherwise.
        let load =
            if load.contains(".v2") { format!("st.shared.u32 [%r3], 0; {MEET} {load}") } else { load.into() };
        let body = reads_neighbour(&load);
        for (blocks, size) in [(6, 2), (8, 4), (8, 8), (3, 1), (16, 16)] {
            passes(&body, launch(blocks, 32).in_non_portable_clusters_of([size, 1, 1]), |word| {
                let word = word as u64;
                let (first, rank) = (word / u64::from(size) * u64::from(size), word % u64::from(size));
                (word < blocks.into()).then_some(100 + first + (rank + 1) % u64::from(size))
            });
        }
    }
}

#[test]
fn addresses_tell_their_block() {
    // For the other block of two: ranks of its address and of the own one, and whether each is in
    // the own window or in that of the cluster.
    let body = "mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1;
        cvta.shared.u64 %rd1, DATA; mapa.u64 %rd2, %rd1, %r2; mapa.shared::cluster.u32 %r3, DATA, %r2;
        getctarank.u64 %r10, %rd1; getctarank.u64 %r11, %rd2; getctarank.shared::cluster.u32 %r12, %r3;
        isspacep.shared %p1, %rd1; isspacep.shared::cta %p2, %rd2;
        isspacep.shared::cluster %p3, %rd1; isspacep.shared::cluster %p4, %rd2; isspacep.global %p5, %rd2;
        mapa.u64 %rd3, %rd2, %r1; setp.eq.u64 %p6, %rd3, %rd1;
        mul.wide.u32 %rd4, %r1, 128; add.s64 %rd4, %rd4, %rd40;
        st.global.u32 [%rd4], %r10; st.global.u32 [%rd4+8], %r11; st.global.u32 [%rd4+16], %r12;
        selp.u32 %r20, 1, 0, %p1; st.global.u32 [%rd4+24], %r20; selp.u32 %r20, 1, 0, %p2; st.global.u32 [%rd4+32], %r20;
        selp.u32 %r20, 1, 0, %p3; st.global.u32 [%rd4+40], %r20; selp.u32 %r20, 1, 0, %p4; st.global.u32 [%rd4+48], %r20;
        selp.u32 %r20, 1, 0, %p5; st.global.u32 [%rd4+56], %r20; selp.u32 %r20, 1, 0, %p6; st.global.u32 [%rd4+64], %r20;";
    let got = run_on(&module(body), clusters(2, 1, 2), DeviceConfig::default(), None).unwrap();
    let low = |word: usize| got[word] as u32;
    for rank in 0..2 {
        let fields: Vec<u32> = (0..9).map(|i| low(16 * rank + i)).collect();
        let (own, other) = (rank as u32, 1 - rank as u32);
        assert_eq!(fields, [own, other, other, 1, 0, 1, 1, 0, 1], "block {rank}");
    }
}

#[test]
fn addresses_outside_of_the_cluster_are_faults() {
    let reads = |address: &str| format!("mov.u32 %r3, DATA; {address} {MEET}");
    let two = clusters(2, 1, 2);
    let kind = fault(&reads("mapa.shared::cluster.u32 %r7, %r3, 2; ld.shared::cluster.u32 %r6, [%r7];"), two);
    assert_eq!(kind, FaultKind::OutOfCluster { rank: 2, blocks: 2 });
    // Plain shared accesses are to the block's own.
    let other = "mov.u32 %r1, %cluster_ctarank; xor.b32 %r1, %r1, 1; mapa.shared::cluster.u32 %r7, %r3, %r1;";
    let kind = fault(&reads(&format!("{other} ld.shared.u32 %r6, [%r7];")), two);
    assert!(matches!(kind, FaultKind::OutOfWindow { space: "shared", .. }), "{kind}");
    let kind = fault(&reads(&format!("{other} st.shared::cluster.u32 [%r7+2000], 0;")), two);
    assert!(matches!(kind, FaultKind::OutOfWindow { space: "shared", .. }), "{kind}");
    let kind = fault(&reads(&format!("{other} ld.shared::cluster.u32 %r6, [%r7+2];")), two);
    assert!(matches!(kind, FaultKind::Misaligned { .. }), "{kind}");
    let kind = fault(&reads("mapa.u64 %rd3, %rd40, 1; ld.u32 %r6, [%rd3];"), two);
    assert_eq!(kind, FaultKind::OutOfCluster { rank: 255, blocks: 2 });
}

#[test]
fn memory_of_a_block_that_has_ended_is_gone() {
    // Block 1 ends; block 0 reads its memory once it has read a word that block 1 stores last.
    let body = format!(
        "mov.u32 %r1, %cluster_ctarank; setp.ne.u32 %p1, %r1, 0; mov.u32 %r3, DATA; {MEET}
         @%p1 bra END;
         mov.u32 %r9, 3000;
         L: sub.u32 %r9, %r9, 1; setp.ne.u32 %p2, %r9, 0; @%p2 bra L;
         mapa.shared::cluster.u32 %r7, %r3, 1; ld.shared::cluster.u32 %r6, [%r7];
         END:"
    );
    let kind = fault(&body, clusters(2, 1, 2));
    assert!(matches!(kind, FaultKind::EndedBlock { block: [1, 0, 0], .. }), "{kind}");
    assert!(kind.to_string().contains("has ended"), "{kind}");
}

#[test]
fn misuse_of_the_barrier_of_a_cluster_is_reported() {
    let twice = "barrier.cluster.arrive; barrier.cluster.arrive; barrier.cluster.wait;";
    let kind = fault(
        &format!(
            "mov.u32 %r1, %cluster_ctarank; setp.ne.u32 %p1, %r1, 0; @!%p1 bra A; {MEET} bra E; A: {twice} E:"
        ),
        clusters(2, 1, 2),
    );
    assert!(
        matches!(&kind, FaultKind::BadBarrier { message, .. } if message.contains("arrives again")),
        "{kind}"
    );
    // In a block that is a cluster by itself too: a barrier completes with its arrival.
    for (body, wrong) in [
        ("barrier.cluster.wait;", "waits without an arrival"),
        ("barrier.cluster.wait.aligned;", "waits without an arrival"),
        ("barrier.cluster.arrive; barrier.cluster.wait; barrier.cluster.wait;", "waits without an arrival"),
        (twice, "arrives again"),
        // Lanes that have not waited may not arrive again.
        (
            "barrier.cluster.arrive; setp.lt.u32 %p1, %r40, 16; @%p1 barrier.cluster.wait; barrier.cluster.arrive;",
            "arrives again",
        ),
    ] {
        let kind = fault(body, launch(1, 32));
        assert!(
            matches!(&kind, FaultKind::BadBarrier { message, .. } if message.contains(wrong)),
            "{kind}\n{body}"
        );
    }
    // An aligned wait is one instruction for all lanes of the warp.
    for rest in ["", "@!%p1 barrier.cluster.wait.aligned;", "@!%p1 bar.sync 0;", "barrier.cluster.arrive;"] {
        let half = format!(
            "barrier.cluster.arrive.aligned; setp.lt.u32 %p1, %r40, 16; @%p1 barrier.cluster.wait.aligned; {rest}"
        );
        let kind = fault(&half, launch(1, 32));
        assert!(matches!(&kind, FaultKind::DivergentBarrier { .. }), "{kind}\n{half}");
    }
    // Block 1 waits for an arrival that never comes: its barrier 1 has one warp of two.
    let alone = format!(
        "mov.u32 %r1, %cluster_ctarank; setp.ne.u32 %p1, %r1, 0; @%p1 bra A; {MEET} bra E;
         A: barrier.sync 1, 64; {MEET} E:"
    );
    let kind = fault(&alone, clusters(2, 32, 2));
    let FaultKind::Deadlock(report) = &kind else { panic!("{kind}") };
    assert_eq!(report.warps.len(), 2, "{kind}");
    assert!(kind.to_string().contains("32 of 64 threads have arrived"), "{kind}");
}

#[test]
fn lanes_wait_at_the_barrier_of_a_cluster_in_parts() {
    // Some lanes come to an aligned wait later, behind a wait for a word of the others; others wait
    // at different places, which a wait without the modifier allows.
    let late = "mov.u64 %rd1, 1; setp.eq.u32 %p1, %r40, 31; @%p1 st.relaxed.cta.global.u64 [%rd40], %rd1;
        setp.lt.u32 %p2, %r40, 16; @!%p2 bra A;
        L: ld.relaxed.cta.global.u64 %rd2, [%rd40]; setp.ne.u64 %p3, %rd2, 1; @%p3 bra L;
        A:";
    let body = format!(
        "{late} barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
         barrier.cluster.arrive; @%p2 bra B; barrier.cluster.wait; bra C; B: barrier.cluster.wait; C:
         barrier.cluster.arrive; barrier.cluster.wait.aligned;"
    );
    passes(&body, launch(1, 32), |word| (word == 0).then_some(1));
    passes(&body.replace("cta", "gpu"), clusters(4, 64, 2), |word| (word == 0).then_some(1));
}

#[test]
fn threads_that_have_ended_count_as_arrived() {
    // One warp of each block ends at once, and all of block 1.
    let body = "mov.u32 %r1, %cluster_ctarank; setp.ge.u32 %p1, %r40, 32; @%p1 ret; setp.eq.u32 %p2, %r1, 1; @%p2 ret;
        barrier.cluster.arrive; barrier.cluster.wait; barrier.cluster.arrive; barrier.cluster.wait;
        mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd1, %r2, 8; add.s64 %rd1, %rd1, %rd40; mov.u64 %rd2, 7; st.relaxed.gpu.global.u64 [%rd1], %rd2;";
    passes(body, clusters(6, 64, 3), |word| {
        (word < 6).then_some(if word % 3 == 1 { (word as u64) << 32 } else { 7 })
    });
}

/// Block 0 initialises an mbarrier for `count` arrivals, and then signals the other blocks.
fn with_mbarrier(count: u32, rest: &str) -> String {
    format!(
        "mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, MBAR; mov.u32 %r3, DATA;
         setp.ne.u32 %p1, %r40, 0; @%p1 bra READY;
         mbarrier.init.shared::cta.b64 [%r2], {count};
         fence.mbarrier_init.release.cluster;
         READY:
         barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
         mapa.shared::cluster.u32 %r4, %r2, 0; mapa.shared::cluster.u32 %r5, %r3, 0;
         {rest}
         {MEET}"
    )
}

const WAIT: &str =
    "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r2], 0; @!%p3 bra WAIT;";

#[test]
fn remote_arrivals_release_to_the_waiting_block() {
    for (arrive, wait) in [
        ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];", WAIT),
        (
            "fence.acq_rel.cluster; mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r4];",
            "WAIT: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %p3, [%r2], 0; @!%p3 bra WAIT; fence.acq_rel.cluster;",
        ),
        ("mbarrier.arrive_drop.release.cluster.shared::cluster.b64 _, [%r4], 1;", WAIT),
    ] {
        // The threads of all blocks store their numbers to block 0, which adds them up.
        let body = with_mbarrier(
            16,
            &format!(
                "mov.u32 %r6, %ctaid.x; mad.lo.u32 %r7, %r1, 4, %r40; shl.b32 %r8, %r7, 2; add.u32 %r8, %r8, %r5;
                 st.shared::cluster.u32 [%r8], %r7;
                 {arrive}
                 setp.ne.u32 %p2, %r1, 0; @%p2 bra AFTER; @%p1 bra AFTER;
                 {wait}
                 mov.u32 %r9, 0; mov.u32 %r10, 0;
                 L: ld.shared.u32 %r11, [%r3]; add.u32 %r9, %r9, %r11; add.u32 %r3, %r3, 4; add.u32 %r10, %r10, 1;
                 setp.lt.u32 %p4, %r10, 16; @%p4 bra L;
                 mul.wide.u32 %rd1, %r6, 8; add.s64 %rd1, %rd1, %rd40; cvt.u64.u32 %rd2, %r9; st.global.u64 [%rd1], %rd2;
                 AFTER: bar.warp.sync 15;"
            ),
        );
        passes(&body, clusters(8, 4, 4), |word| (word == 0 || word == 4).then_some(120));
    }
}

#[test]
fn an_mbarrier_of_another_block_takes_arrivals_alone() {
    for (op, text) in [
        ("mbarrier.init.b64 [%rd3], 1;", "initialises its own"),
        ("mbarrier.try_wait.parity.b64 %p3, [%rd3], 0;", "waits on its own"),
        ("mbarrier.arrive.b64 %rd4, [%rd3];", "returns no state"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r4];", ".shared::cta"),
    ] {
        let body = with_mbarrier(
            1,
            &format!(
                "setp.eq.u32 %p2, %r1, 0; @%p2 bra AFTER; cvta.shared.u64 %rd3, MBAR; mapa.u64 %rd3, %rd3, 0; {op} AFTER:"
            ),
        );
        let kind = fault(&body, clusters(2, 1, 2));
        assert!(
            matches!(&kind, FaultKind::Mbarrier { message, .. } if message.contains(text)),
            "{op}: {kind}"
        );
    }
}

/// Block `from` copies to all blocks of the cluster; each waits on its mbarrier for `bytes` bytes
/// and stores the word at offset 64 of its `DATA`.
fn copied(copy: &str, bytes: u32) -> String {
    format!(
        "mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, MBAR; mov.u32 %r3, DATA; mov.u32 %r6, %ctaid.x;
         mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
         st.shared.u64 [%r3+64], 5; st.shared.u64 [%r3+72], 0; add.u32 %r9, %r6, 40; st.shared.u32 [%r3], %r9; st.shared.u32 [%r3+4], 0;
         st.shared.u64 [%r3+8], 0;
         fence.proxy.async.shared::cta;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {bytes};
         {MEET}
         {copy}
         AFTER:
         {WAIT}
         ld.shared.u32 %r8, [%r3+64];
         mul.wide.u32 %rd1, %r6, 8; add.s64 %rd1, %rd1, %rd40; cvt.u64.u32 %rd2, %r8; st.global.u64 [%rd1+2048], %rd2;
         {MEET}"
    )
}

#[test]
fn copies_reach_other_blocks() {
    // From shared memory of the block before; then loads of block 0 for all.
    let next = "mov.u32 %r10, %cluster_nctarank; add.u32 %r4, %r1, 1; rem.u32 %r4, %r4, %r10;
        mapa.shared::cluster.u32 %r5, %r3, %r4; mapa.shared::cluster.u32 %r7, %r2, %r4;";
    let first = "setp.ne.u32 %p1, %r1, 0; @%p1 bra AFTER; mov.u16 %h1, 15;";
    let before = |word: usize| (word / 4 * 4 + (word + 3) % 4) as u64 + 40;
    type Word<'a> = &'a dyn Fn(usize) -> u64;
    let cases: [(String, u32, Word); 7] = [
        (
            format!(
                "{next} cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5+64], [%r3], 16, [%r7];"
            ),
            16,
            &before,
        ),
        (
            format!(
                "{next} cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r5+64], [%r3], 16, [%r7];"
            ),
            16,
            &|word| before(word) + 5,
        ),
        (
            format!(
                "{first} cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r3+64], [%rd40], 64, [%r2], %h1;"
            ),
            64,
            &|_| 0,
        ),
        (
            format!(
                "{next} add.u32 %r9, %r6, 40; st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5+64], %r9, [%r7];"
            ),
            4,
            &before,
        ),
        (
            format!(
                "{next} add.u32 %r9, %r6, 40; st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r5+64], {{%r9, %r9, %r9, %r9}}, [%r7];"
            ),
            16,
            &before,
        ),
        (
            format!(
                "{next} add.u32 %r9, %r6, 35; red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r5+64], %r9, [%r7];"
            ),
            4,
            &before,
        ),
        (
            format!(
                "{next} cvt.u64.u32 %rd5, %r6; add.u64 %rd5, %rd5, 35; red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [%r5+64], %rd5, [%r7];"
            ),
            8,
            &before,
        ),
    ];
    for (copy, bytes, expected) in cases {
        passes(&copied(&copy, bytes), clusters(8, 1, 4), |word| {
            (256..264).contains(&word).then(|| expected(word - 256))
        });
    }
    let to_all = "setp.ne.u32 %p1, %r1, 0; @%p1 bra AFTER; mov.u16 %h1, 0xffff;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r3+64], [%rd40], 64, [%r2], %h1;";
    passes(&copied(to_all, 64), launch(16, 1).in_non_portable_clusters_of([16, 1, 1]), |word| {
        (256..272).contains(&word).then_some(0)
    });
}

#[test]
fn copies_to_other_blocks_are_checked() {
    let first = "setp.ne.u32 %p1, %r1, 0; @%p1 bra AFTER;";
    let multicast = |mask: u32, at: &str| {
        format!(
            "{first} mov.u16 %h1, {mask}; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [{at}], [%rd40], 64, [%r2], %h1;"
        )
    };
    let two = clusters(2, 1, 2);
    let kind = fault(&copied(&multicast(7, "%r3+64"), 64), two);
    assert_eq!(kind, FaultKind::OutOfCluster { rank: 2, blocks: 2 });
    let kind = fault(&copied(&multicast(3, "%r3+1024"), 64), two);
    assert!(matches!(kind, FaultKind::OutOfWindow { .. }), "{kind}");
    let apart = format!(
        "{first} mapa.shared::cluster.u32 %r5, %r3, 1; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd40], 16, [%r2];"
    );
    let kind = fault(&copied(&apart, 16), two);
    assert!(
        matches!(&kind, FaultKind::BulkCopy { message } if message.contains("both are in one block")),
        "{kind}"
    );
    let other = format!(
        "{first} mapa.shared::cluster.u32 %r5, %r3, 1; cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r3+64], [%r5], 16, [%r2];"
    );
    let kind = fault(&copied(&other, 16), two);
    assert!(matches!(kind, FaultKind::OutOfWindow { .. }), "{kind}");
}

#[test]
fn a_block_must_not_end_ahead_of_a_copy_to_it() {
    // Block 1 does not wait.
    let body = copied(
        "setp.ne.u32 %p1, %r1, 0; @%p1 ret; mov.u16 %h1, 3;
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r3+64], [%rd40], 64, [%r2], %h1;",
        64,
    );
    let module = module(&body);
    let found = (0..40).filter(|&seed| match run_on(&module, clusters(2, 1, 2), device(seed), None) {
        Err(MachineError::Fault(fault)) => {
            let late =
                matches!(fault.kind, FaultKind::CopyOutlivesBlock { .. } | FaultKind::EndedBlock { .. });
            assert!(late, "{fault}");
            true
        }
        other => other.is_err(),
    });
    assert!(found.count() > 20);
}
