//! The CUDA driver: [`Device`](super::Device) over the CUDA driver API.
//!
//! `cust` enumerates the devices and holds the primary context. Every call whose result may be a code that `cust`'s
//! enum does not list goes through our own declarations in `ffi`, which return plain integers: an unlisted code in a
//! Rust enum is undefined behaviour.
//!
//! | file | concern |
//! |---|---|
//! | `ffi` | the driver's functions, structs and constants, as C has them |
//! | `late` | functions newer than `cust_raw`, looked up at run time |
//! | `error` | result codes, their names and remedies |
//! | `context` | start-up, device facts, the primary context, made current on a thread |
//! | `device` | [`CudaDevice`], and the binding of its context to the calling thread |
//! | `calls` | the trait, one line per method |
//! | `memory`, `copy` | allocation; copies and fills |
//! | `sharing`, `vmm` | what can be shared; export and import through virtual memory management |
//! | `pool` | device memory that comes and goes in stream order |
//! | `module`, `ptx` | loading PTX, kernels, launches; which driver reads which PTX |
//! | `stream`, `graph` | streams, events; capture and replay |
//! | `doctor` | what this machine has and lacks |
//!
//! A binary with this feature links `libcuda.so.1` and does not start on a machine without it.

mod calls;
mod context;
mod copy;
mod device;
mod doctor;
mod error;
mod ffi;
mod graph;
mod late;
mod memory;
mod module;
mod pool;
mod ptx;
mod sharing;
mod stream;
mod vmm;

#[cfg(test)]
mod tests;

pub use context::devices;
pub use device::CudaDevice;
pub use doctor::doctor;
pub use memory::export_dma_buf;
