//! A stand-in for what a model runs between a dispatch and a combine.

use std::fmt::Write;
use std::sync::Arc;

use epoxide::Result;
use epoxide::driver::{Kernel, LaunchConfig, Memory, MemoryKind, Module, Stream};

const NAME: &str = "between";
/// Its instructions, of 16 bytes each on a GPU: more than the 128 KiB that a multiprocessor's
/// instruction cache holds.
const INSTRUCTIONS: usize = 10_000;
const REGISTERS: usize = 8;
/// Threads of a block: a warp for each scheduler of a multiprocessor.
const THREADS: u32 = 128;

/// A kernel that occupies all multiprocessors for a time, as the experts do, and evicts the
/// instructions of a dispatch and of a combine from their caches.
pub(crate) struct Between {
    kernel: Kernel,
    stream: Arc<Stream>,
    ns: u64,
    sink: Memory,
}

impl Between {
    /// One of `us` microseconds on `stream`.
    pub fn new(stream: &Arc<Stream>, us: u32) -> Result<Between> {
        let device = stream.device();
        let kernel = Module::load(device, &ptx())?.kernel(NAME, 0)?;
        let sink = Memory::alloc(device, 4, MemoryKind::Device, "sink of the stand-in")?;
        Ok(Between { kernel, stream: stream.clone(), ns: u64::from(us) * 1000, sink })
    }

    /// Enqueues the kernel.
    pub fn enqueue(&self) -> Result<()> {
        let grid = self.stream.device().info().sm_count;
        let config =
            LaunchConfig { grid, block: THREADS, shared_bytes: 0, cooperative: false, dependent: false };
        let params: [&[u8]; 2] = [&self.ns.to_ne_bytes(), &self.sink.ptr().0.to_ne_bytes()];
        // SAFETY: the signature is that of `ptx`, and the owner waits for the stream before it drops
        // the sink.
        unsafe { self.stream.launch(&self.kernel, &config, &params) }
    }
}

/// Straight through [`INSTRUCTIONS`] multiplications once, then until the time is over. The store
/// keeps the assembler from leaving them out; numbers from 1 on never sum up to less.
fn ptx() -> String {
    let mut ptx = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n\
         .visible .entry {NAME}(.param .u64 ns, .param .u64 sink)\n{{\n\
         .reg .pred %p<2>;\n.reg .f32 %f<{REGISTERS}>;\n.reg .b32 %r<1>;\n.reg .b64 %rd<4>;\n\
         mov.u64 %rd0, %globaltimer;\n\
         ld.param.u64 %rd1, [ns];\nld.param.u64 %rd2, [sink];\n\
         mov.u32 %r0, %tid.x;\nadd.u32 %r0, %r0, 1;\n"
    );
    let mut line = |text: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = writeln!(ptx, "{text}");
    };
    (0..REGISTERS).for_each(|to| line(format_args!("cvt.rn.f32.u32 %f{to}, %r0;")));
    for at in 0..INSTRUCTIONS {
        let [to, a, b] = [at, at + 1, at + 3].map(|at| at % REGISTERS);
        line(format_args!("fma.rn.f32 %f{to}, %f{to}, %f{a}, %f{b};"));
    }
    line(format_args!(
        "setp.lt.f32 %p0, %f0, 0f3F800000;\n@%p0 st.global.f32 [%rd2], %f0;\n\
         LATER:\nmov.u64 %rd3, %globaltimer;\nsub.u64 %rd3, %rd3, %rd0;\n\
         setp.lt.u64 %p1, %rd3, %rd1;\n@%p1 bra LATER;\nret;\n}}"
    ));
    ptx
}
