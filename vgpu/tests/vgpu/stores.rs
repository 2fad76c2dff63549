//! Counts of stores and loads by kernels: by device, kernel, memory and part.

use epoxide_vgpu::{
    CheckConfig, Checker, DeviceConfig, Grid, Loaded, Memory, Module, Progress, Region, Stored,
};

use crate::common::{kernel, launch};

/// 32 lanes store 8 bytes each from the buffer's start on; one adds 4 bytes behind them, and 16
/// more leave by a bulk copy.
const BODY: &str = "
    st.global.u64 [%rd42], %rd42;
    setp.ne.u32 %p1, %r40, 0;
    @%p1 bra END;
    red.relaxed.gpu.global.add.u32 [%rd40+256], 1;
    mov.u32 %r1, DATA;
    mov.u64 %rd1, 7;
    st.shared.u64 [%r1], %rd1;
    st.shared.u64 [%r1+8], %rd1;
    fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%rd40+272], [%r1], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
END:";

fn run(memory: &Memory, buf: &Region) {
    run_blocks(memory, buf, BODY, 1);
}

fn run_blocks(memory: &Memory, buf: &Region, body: &str, blocks: u32) {
    let module = Module::parse(&kernel(".shared .align 128 .b8 DATA[16];", body)).unwrap();
    let params = buf.addr().to_ne_bytes();
    let shape = launch(blocks, 32);
    let mut grid =
        Grid::new(module.kernel("k").unwrap(), memory.clone(), &DeviceConfig::default(), shape, &params)
            .unwrap();
    while grid.step(1000).unwrap_or_else(|fault| panic!("{fault}")) != Progress::Done {}
}

#[test]
fn bytes_are_counted_by_device_memory_and_part() {
    let checker = Checker::new(CheckConfig { races: false, ..CheckConfig::default() });
    let [first, second] = [4, 9].map(|number| {
        let memory = Memory::checked(0, Some(checker.clone()));
        checker.number_device(&memory, number);
        memory
    });
    let pool = first.alloc_zeroed(4096, "pool").unwrap();
    pool.name_parts(|at| (at < 256).then(|| format!("rows[{}]", at / 64)));
    run(&first, &pool);
    assert_eq!(checker.stores(), [], "nobody asked");

    checker.count_stores();
    let theirs = second.import(pool.export().unwrap(), 4096, "pool of another").unwrap();
    run(&second, &theirs);
    run(&second, &theirs);
    let stored = |by, part: &str, bytes| {
        let (memory, kernel, part) = ("pool".into(), "k".into(), part.into());
        Stored { by, on: 4, memory, kernel, part, bytes }
    };
    assert_eq!(checker.stores(), [stored(9, "", 2 * (4 + 16)), stored(9, "rows", 2 * 256)]);
    run(&first, &pool);
    assert_eq!(checker.stores()[..2], [stored(4, "", 20), stored(4, "rows", 256)]);

    // Freed memory has no counts, and its successor begins without any.
    drop((theirs, pool));
    assert_eq!(checker.stores(), []);
    let next = second.alloc_zeroed(4096, "next").unwrap();
    run(&second, &next);
    let stored: Vec<_> = checker.stores().into_iter().map(|s| (s.by, s.on, s.memory, s.bytes)).collect();
    assert_eq!(stored, [(9, 9, "next".into(), 256 + 20)]);
}

#[test]
fn loads_are_counted_by_block() {
    // 32 lanes of each block load a word each; of block 1 one lane loads another word as well.
    let body = "
    ld.global.u64 %rd1, [%rd42];
    setp.ne.u32 %p1, %r40, 0;
    @%p1 bra END;
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 1;
    @%p1 bra END;
    ld.relaxed.sys.global.u32 %r2, [%rd40+256];
END:";
    let checker = Checker::new(CheckConfig { races: false, ..CheckConfig::default() });
    let memory = Memory::checked(0, Some(checker.clone()));
    checker.number_device(&memory, 3);
    let words = memory.alloc_zeroed(4096, "words").unwrap();
    words.name_parts(|at| (at < 256).then(|| format!("rows[{}]", at / 64)));
    run_blocks(&memory, &words, body, 2);
    assert_eq!(checker.loads(), [], "nobody asked");
    checker.count_loads();
    run_blocks(&memory, &words, body, 2);
    let loaded = |part: &str, block, loads| {
        let (memory, kernel, part) = ("words".into(), "k".into(), part.into());
        Loaded { by: 3, on: 3, memory, kernel, part, block, loads }
    };
    assert_eq!(checker.loads(), [loaded("", 1, 1), loaded("rows", 0, 32), loaded("rows", 1, 32)]);
}
