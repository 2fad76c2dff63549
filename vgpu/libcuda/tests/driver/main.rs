//! The library as programs use it: loaded by name, called through C's calling convention.
//!
//! `cuda` loads it and wraps the calls. Each other module tests one part.

mod codes;
mod cuda;
mod faults;
mod hardware;
mod launch;
mod memory;
mod multicast;
mod program;
mod sharing;
mod streams;
mod tensor;
mod tensor_maps;
mod tensor_maps_of_pixels;
