//! Kernels of another crate, the template `examples/own-kernels`, on the library's driver: the file
//! of one kernel and the PTX that the template has committed.

// The heads of the template's files explain why it is sound.
#![allow(clippy::undocumented_unsafe_blocks)]

#[path = "../../examples/own-kernels/src/vector_add.rs"]
mod vector_add;

use epoxide::Error;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Module, Stream};
use epoxide::{DType, Tensor};
use epoxide_simt::ptx::{CutPtx, check_fresh};
use vector_add::VectorAdd;

const PTX: &str = include_str!("../../examples/own-kernels/ptx/own_kernels.sm_80.ptx");

#[test]
fn a_kernel_of_another_crate_runs_on_the_librarys_driver() {
    check_fresh::<VectorAdd>(PTX).unwrap();
    let device = VirtualGpu::new(VirtConfig::default());
    let stream = Stream::new(&device).unwrap();
    let a: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let a_there = Tensor::from_host(&stream, DType::F32, &[1000], &a).unwrap();
    let out = Tensor::from_host(&stream, DType::F32, &[1000], &[0f32; 1000]).unwrap();
    let ptx = CutPtx::new(PTX).only(&[VectorAdd::INFO.name]);
    let kernel = Module::load(&device, &ptx).unwrap().kernel(VectorAdd::INFO.name, 0).unwrap();
    let call = |len| VectorAdd::call(a_there.ptr().into(), a_there.ptr().into(), out.ptr().into(), len);
    // SAFETY: the tensors have as many elements as the call says.
    unsafe { stream.launch_call(&kernel, call(1000)).unwrap() };
    let want: Vec<f32> = a.iter().map(|a| a + a).collect();
    assert_eq!(out.to_host::<f32>(&stream).unwrap(), want);

    let rule = |result| match result {
        Err(Error::Launch { kernel: "vector_add", rule }) => rule,
        other => panic!("{other:?}"),
    };
    // SAFETY: neither is launched.
    let (empty, shape) =
        unsafe { (stream.launch_call(&kernel, call(0)), stream.call(&kernel, 4, 128, 0, call(1000))) };
    assert_eq!(rule(empty), "requires len >= 1: 0 against 1");
    assert_eq!(rule(shape), "requires block = ..: 256 threads, 128 were given");
}
