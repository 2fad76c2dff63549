//! The CUDA driver: [`Device`](super::Device) over the CUDA driver API.
//!
//! `cust` enumerates the devices and holds the primary context. Calls whose result may be a code
//! outside of `cust`'s enum go through our own declarations in `ffi`, which return plain integers.
//! An unlisted code in a Rust enum is undefined behaviour.
//!
//! | file | concern |
//! |---|---|
//! | `ffi` | the driver's functions, structs and constants, as C has them |
//! | `library` | `libcuda.so.1`, found at run time: where the functions of `cust_raw` and `ffi` jump |
//! | `late` | functions newer than `cust_raw`, which a driver may lack |
//! | `error` | result codes, their names and remedies |
//! | `context` | start-up, device facts, the primary context, made current on a thread |
//! | `device` | [`CudaDevice`], and the binding of its context to the calling thread |
//! | `calls` | the trait: streams, events, copies, capture; what is longer is in the files below |
//! | `memory` | allocation |
//! | `vmm` | what can be shared; export and import through virtual memory management |
//! | `pool` | device memory, allocated and freed in stream order |
//! | `module`, `ptx` | loading PTX, kernels, launches; which driver reads which PTX |
//! | `doctor` | what this machine has and lacks |
//!
//! A program with this feature starts on any machine. The first call of the driver loads
//! `libcuda.so.1`. If the library is missing, [`devices`] and [`CudaDevice::open`] return
//! [`Error::Unavailable`](crate::Error::Unavailable).
//!
//! Building it takes no CUDA toolkit either, but the build script of `cust_raw` searches for one
//! and fails without one. In epoxide's own repository `.cargo/config.toml` provides a substitute. A
//! crate elsewhere sets `CUDA_LIBRARY_PATH` to a folder with a file `lib64/libcuda.so` whose only
//! text is `INPUT(-lc)`. It refers the linker to the C library, which is linked anyway:
//!
//! ```sh
//! mkdir -p cuda/lib64 && echo 'INPUT(-lc)' > cuda/lib64/libcuda.so && CUDA_LIBRARY_PATH=$PWD/cuda cargo build
//! ```

mod calls;
mod context;
mod device;
mod doctor;
mod error;
mod ffi;
mod late;
mod library;
mod memory;
mod module;
mod pool;
mod ptx;
mod vmm;

#[cfg(test)]
mod tests;

pub use context::devices;
pub use device::CudaDevice;
pub use doctor::doctor;
pub use memory::export_dma_buf;
