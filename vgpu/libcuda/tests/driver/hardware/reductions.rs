//! Reductions by bulk copies, of bytes and of boxes of tensors: every operation of every type.

use std::rc::Rc;

use super::{Case, MapOfCase};
use crate::tensor_maps::{GUARD, Map, Rng};

const HEAD: &str = ".version 8.6\n.target sm_90a\n.address_size 64\n";
/// Bytes that a reduction moves.
const BYTES: usize = 512;

const OPERATIONS: [&str; 8] = ["add", "min", "max", "inc", "dec", "and", "or", "xor"];
/// Operations on bytes in global memory, by type; a `1` stands for those in shared memory too.
const OF_BYTES: [(&str, &str); 8] = [
    ("add", "u32 1, s32 1, u64 1, f32, f64, noftz.f16, noftz.bf16"),
    ("min", "u32 1, s32 1, u64, s64, f16, bf16"),
    ("max", "u32 1, s32 1, u64, s64, f16, bf16"),
    ("inc", "u32 1"),
    ("dec", "u32 1"),
    ("and", "b32 1, b64"),
    ("or", "b32 1, b64"),
    ("xor", "b32 1, b64"),
];
/// Types of tensors, in the order of `CUtensorMapDataType`.
const TYPES: [&str; 13] =
    ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz"];

/// A kernel of one warp: fills `SRC` and `DST` from `src` and `dst`, and runs `body` in one lane.
/// `%r1` and `%r2` are their addresses, `%r3` that of an mbarrier, and `%rd1` is `dst`.
fn entry(name: &str, params: &str, body: &str, behind: &str) -> String {
    format!(
        ".visible .entry {name}(.param .u64 dst, .param .u64 src{params}) {{
.reg .pred %p<4>; .reg .b32 %r<12>; .reg .b64 %rd<8>;
.shared .align 128 .b8 SRC[{BYTES}]; .shared .align 128 .b8 DST[{BYTES}]; .shared .align 8 .b8 BARRIER[8];
ld.param.u64 %rd1, [dst]; ld.param.u64 %rd2, [src];
mov.u32 %r1, SRC; mov.u32 %r2, DST; mov.u32 %r3, BARRIER; mov.u32 %r4, %tid.x;
shl.b32 %r5, %r4, 4; cvt.u64.u32 %rd3, %r5;
add.u64 %rd4, %rd1, %rd3; add.u64 %rd5, %rd2, %rd3; add.u32 %r6, %r1, %r5; add.u32 %r7, %r2, %r5;
ld.global.v2.u64 {{%rd6, %rd7}}, [%rd5]; st.shared.v2.u64 [%r6], {{%rd6, %rd7}};
ld.global.v2.u64 {{%rd6, %rd7}}, [%rd4]; st.shared.v2.u64 [%r7], {{%rd6, %rd7}};
fence.proxy.async; bar.sync 0; setp.ne.u32 %p1, %r4, 0; @%p1 bra DONE;
{body}
DONE: bar.sync 0;
{behind}
ret;
}}
"
    )
}

const GROUP: &str = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;";

/// Elements of a type, many of them special.
fn elements(ty: &str, bytes: usize, rng: &mut Rng) -> Vec<u8> {
    let special: (usize, Vec<u64>) = match ty {
        "f16" => {
            (2, vec![0, 0x8000, 1, 0x8001, 0x3ff, 0x400, 0x7bff, 0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xfe01])
        }
        "bf16" => (2, vec![0, 0x8000, 1, 0x8001, 0x7f, 0x80, 0x7f7f, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffc1]),
        "f32" => {
            let of = |high: u64| [high << 16, high << 16 | 1, high << 16 | 0xffff];
            (
                4,
                [0, 0x8000, 0x7f, 0x80, 0x8080, 0x7f7f, 0x7f80, 0xff80, 0x7fc0, 0xffc0]
                    .into_iter()
                    .flat_map(of)
                    .collect(),
            )
        }
        "f64" => (8, vec![0, 1 << 63, 1, 1 << 63 | 1, 0x10 << 48, 0x7fef << 48, 0x7ff0 << 48, 0xfff0 << 48]),
        "u64" | "s64" | "b64" => (8, vec![0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, 1 << 32]),
        _ => (4, vec![0, 1, 2, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff]),
    };
    let (size, special) = special;
    let mut all = vec![];
    while all.len() < bytes {
        let value = if rng.from(0, 1) == 0 { rng.of(&special) } else { rng.next() };
        all.extend_from_slice(&value.to_le_bytes()[..size]);
    }
    all
}

pub fn cases() -> Vec<Case> {
    let mut cases = vec![];
    of_bytes(&mut cases);
    of_boxes(&mut cases);
    in_clusters(&mut cases);
    cases
}

/// A kernel of a cluster of `blocks`: block 0 copies, or reduces, its `SRC` to `DST` of block `rank`. Each
/// block writes its `DST` to its part of `dst`.
fn entry_of_cluster(name: &str, blocks: u32, copy: &str) -> String {
    format!(
        ".visible .entry {name}(.param .u64 dst, .param .u64 src, .param .u32 rank) .reqnctapercluster {blocks} {{
.reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>;
.shared .align 128 .b8 SRC[{BYTES}]; .shared .align 128 .b8 DST[{BYTES}]; .shared .align 8 .b8 BARRIER[8];
ld.param.u64 %rd1, [dst]; ld.param.u64 %rd2, [src]; ld.param.u32 %r8, [rank];
mov.u32 %r1, SRC; mov.u32 %r2, DST; mov.u32 %r3, BARRIER; mov.u32 %r4, %tid.x; mov.u32 %r9, %cluster_ctarank;
mapa.shared::cluster.u32 %r10, %r2, %r8; mapa.shared::cluster.u32 %r11, %r3, %r8;
shl.b32 %r12, %r9, 9; shl.b32 %r5, %r4, 4; add.u32 %r12, %r12, %r5;
cvt.u64.u32 %rd4, %r12; add.u64 %rd4, %rd1, %rd4; add.u64 %rd5, %rd2, %rd4; sub.u64 %rd5, %rd5, %rd1;
add.u32 %r6, %r1, %r5; add.u32 %r7, %r2, %r5;
ld.global.v2.u64 {{%rd6, %rd7}}, [%rd5]; st.shared.v2.u64 [%r6], {{%rd6, %rd7}};
ld.global.v2.u64 {{%rd6, %rd7}}, [%rd4]; st.shared.v2.u64 [%r7], {{%rd6, %rd7}};
setp.ne.u32 %p1, %r4, 0; setp.ne.or.u32 %p2, %r9, %r8, %p1; setp.ne.or.u32 %p3, %r9, 0, %p1;
@!%p1 mbarrier.init.shared.b64 [%r3], 1;
fence.proxy.async; fence.mbarrier_init.release.cluster;
barrier.cluster.arrive; barrier.cluster.wait;
@!%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {BYTES};
@!%p3 {copy} [%r10], [%r1], {BYTES}, [%r11];
@%p2 bra DONE;
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; @!%p3 bra WAIT;
DONE: bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait;
ld.shared.v2.u64 {{%rd6, %rd7}}, [%r7]; st.global.v2.u64 [%rd4], {{%rd6, %rd7}};
ret;
}}
"
    )
}

/// Reductions, and copies, to shared memory of the own block and of another one.
fn in_clusters(cases: &mut Vec<Case>) {
    const TO: &str = "shared::cluster.shared::cta.mbarrier::complete_tx::bytes";
    let mut rng = Rng(73);
    let mut copies = vec![("copy".to_owned(), format!("cp.async.bulk.{TO}"))];
    for (operation, types) in OF_BYTES {
        for ty in types.split(", ").filter_map(|ty| ty.strip_suffix(" 1")) {
            copies.push((format!("{operation} {ty}"), format!("cp.reduce.async.bulk.{TO}.{operation}.{ty}")));
        }
    }
    let kernel = |name: &str, blocks: u32| format!("{}_{blocks}", name.replace(' ', "_"));
    let mut text = HEAD.to_owned();
    for (name, copy) in &copies {
        for blocks in [1, 2] {
            text += &entry_of_cluster(&kernel(name, blocks), blocks, copy);
        }
    }
    let ptx: Rc<str> = text.into();
    for (name, _) in &copies {
        for (blocks, rank) in [(1, 0), (2, 0), (2, 1)] {
            let of = name.rsplit(' ').next().unwrap_or(name);
            let buffers = [(); 2].map(|()| elements(of, 2 * BYTES, &mut rng)).to_vec();
            cases.push(Case {
                name: format!("reduction in a cluster {name}"),
                ptx: Rc::clone(&ptx),
                kernel: kernel(name, blocks),
                shape: [blocks, 32],
                buffers,
                map: None,
                words: vec![rank],
                result: (0, 0),
            });
        }
    }
}

fn of_bytes(cases: &mut Vec<Case>) {
    let mut rng = Rng(71);
    let (mut text, mut kernels) = (HEAD.to_owned(), vec![]);
    for (operation, types) in OF_BYTES {
        for ty in types.split(", ") {
            let (ty, in_shared) = ty.strip_suffix(" 1").map_or((ty, false), |ty| (ty, true));
            let name = |space: &str| format!("{space}_{operation}_{}", ty.replace('.', "_"));
            let global = format!(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{ty} [%rd1], [%r1], {BYTES}; {GROUP}"
            );
            text += &entry(&name("global"), "", &global, "");
            kernels.push((name("global"), operation, ty));
            if in_shared {
                let shared = format!(
                    "mbarrier.init.shared.b64 [%r3], 1; fence.proxy.async;
mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {BYTES};
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{operation}.{ty} [%r2], [%r1], {BYTES}, [%r3];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra WAIT;"
                );
                let back = "ld.shared.v2.u64 {%rd6, %rd7}, [%r7]; st.global.v2.u64 [%rd4], {%rd6, %rd7};";
                text += &entry(&name("shared"), "", &shared, back);
                kernels.push((name("shared"), operation, ty));
            }
        }
    }
    let ptx: Rc<str> = text.into();
    for (kernel, operation, ty) in kernels {
        let of = ty.trim_start_matches("noftz.");
        for _ in 0..3 {
            let buffers = vec![elements(of, BYTES, &mut rng), elements(of, BYTES, &mut rng)];
            let name = format!("reduction {operation} {ty}");
            let (ptx, kernel) = (Rc::clone(&ptx), kernel.clone());
            cases.push(Case {
                name,
                ptx,
                kernel,
                shape: [1, 32],
                buffers,
                map: None,
                words: vec![],
                result: (0, 0),
            });
        }
    }
}

/// Whether the manual has an operation for elements of a tensor.
fn has(operation: &str, ty: &str) -> bool {
    match operation {
        "add" => ["u32", "s32", "u64", "f16", "f32", "bf16"].contains(&ty),
        "min" | "max" => ["u32", "s32", "u64", "s64", "f16", "bf16"].contains(&ty),
        "inc" | "dec" => ty == "u32",
        _ => ["u32", "s32", "u64", "s64"].contains(&ty),
    }
}

/// Boxes of a tensor of two dimensions: inside, across each end, and outside.
fn of_boxes(cases: &mut Vec<Case>) {
    let mut rng = Rng(72);
    let params = ", .param .align 64 .b8 map[128], .param .u32 c0, .param .u32 c1";
    let kernels = OPERATIONS.map(|operation| {
        let body = format!(
            "mov.b64 %rd6, map; cvta.param.u64 %rd6, %rd6; ld.param.u32 %r8, [c0]; ld.param.u32 %r9, [c1];
cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.bulk_group [%rd6, {{%r8, %r9}}], [%r1]; {GROUP}"
        );
        entry(&format!("box_{operation}"), params, &body, "")
    });
    let ptx: Rc<str> = (HEAD.to_owned() + &kernels.concat()).into();
    for operation in OPERATIONS {
        for (data_type, ty) in (0..).zip(TYPES) {
            let mut map = Map { data_type, offset: GUARD as u64, ..Map::simple() };
            // A row ends within 16 bytes, and rows are 80 bytes apart.
            let unit = 16 / map.bytes() as i32;
            map.tile[..2].copy_from_slice(&[2 * unit as u32, 3]);
            map.shape[..2].copy_from_slice(&[3 * unit as u64 + 1, 5]);
            map.strides[0] = 80;
            let of = ty.split('.').next().unwrap_or(ty);
            let of = if of == "tf32" { "f32" } else { of };
            // A fault costs a process: operations that the manual does not have are tried less often.
            let places: &[[i32; 2]] = match (has(operation, ty), operation) {
                (true, _) => &[[0, 1], [2 * unit, 3], [-unit, -1], [0, 9]],
                (false, "add" | "min" | "inc" | "and") => &[[0, 1]],
                _ => &[],
            };
            for &place in places {
                let buffers = vec![elements(of, 2 * GUARD + 5 * 80, &mut rng), elements(of, BYTES, &mut rng)];
                cases.push(Case {
                    name: format!("reduction of a box {operation} {ty}"),
                    ptx: Rc::clone(&ptx),
                    kernel: format!("box_{operation}"),
                    shape: [1, 32],
                    buffers,
                    map: Some(MapOfCase::OfBuffer(map.clone())),
                    words: place.map(|at| at as u32).to_vec(),
                    result: (0, 0),
                });
            }
        }
    }
}
