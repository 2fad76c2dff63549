//! Speed of the virtual GPU on the loop that matters most: a 16-byte copy, as the compiler writes it.
//!
//! `cargo bench --bench vgpu_copy` prints warp instructions per second on one core.

use std::time::Instant;

use epoxide_vgpu::{DeviceConfig, Grid, GridConfig, Memory, Module, Progress};

const PTX: &str = "
.version 8.4
.target sm_90
.address_size 64
.visible .entry copy(.param .u64 dst, .param .u64 src, .param .u32 rounds)
{
	.reg .pred %p<3>;
	.reg .b32 %r<16>;
	.reg .b64 %rd<8>;
	ld.param.u64 %rd1, [dst];
	ld.param.u64 %rd2, [src];
	ld.param.u32 %r5, [rounds];
	mov.u32 %r6, %tid.x;
	mov.u32 %r7, %ctaid.x;
	mov.u32 %r8, %ntid.x;
	mad.lo.u32 %r9, %r7, %r8, %r6;
	mul.wide.u32 %rd3, %r9, 16;
	add.s64 %rd1, %rd1, %rd3;
	add.s64 %rd2, %rd2, %rd3;
	mov.u32 %r10, %nctaid.x;
	mul.lo.u32 %r11, %r10, %r8;
	mul.wide.u32 %rd4, %r11, 16;
$L__BB0_1:
	ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd2];
	st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};
	add.s64 %rd2, %rd2, %rd4;
	add.s64 %rd1, %rd1, %rd4;
	add.s32 %r5, %r5, -1;
	setp.ne.s32 %p1, %r5, 0;
	@%p1 bra $L__BB0_1;
	ret;
}
";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const BLOCKS: u32 = 8;
    const THREADS: u32 = 256;
    const ROUNDS: u32 = 512;
    let module = Module::parse(PTX)?;
    let kernel = module.kernel("copy").ok_or("no kernel")?;
    let memory = Memory::new();
    let bytes = u64::from(BLOCKS * THREADS * ROUNDS * 16);
    let (src, dst) = (memory.alloc(bytes, "src")?, memory.alloc(bytes, "dst")?);
    memory.fill(src.addr(), 0x5a, bytes)?;
    let mut params = vec![];
    params.extend_from_slice(&dst.addr().to_ne_bytes());
    params.extend_from_slice(&src.addr().to_ne_bytes());
    params.extend_from_slice(&ROUNDS.to_ne_bytes());
    let launch = GridConfig { grid: [BLOCKS, 1, 1], block: [THREADS, 1, 1], dynamic_shared_bytes: 0 };
    let mut best = f64::MAX;
    let mut executed = 0;
    for _ in 0..20 {
        let mut grid = Grid::new(kernel.clone(), memory.clone(), &DeviceConfig::default(), launch, &params)?;
        let start = Instant::now();
        while grid.step(u64::MAX)? != Progress::Done {}
        best = best.min(start.elapsed().as_secs_f64());
        executed = grid.stats().warp_instructions;
    }
    let mut last = [0; 16];
    memory.read(dst.addr() + bytes - 16, &mut last)?;
    assert_eq!(last, [0x5a; 16]);
    println!(
        "vgpu copy: {:.1} M warp-instructions/s, {:.2} GB/s copied",
        executed as f64 / best / 1e6,
        bytes as f64 / best / 1e9
    );
    Ok(())
}
