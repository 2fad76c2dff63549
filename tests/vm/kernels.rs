//! Kernels by themselves, on a virtual GPU: docs/KERNELS.md shows how to add one.

use epoxide::TypedTensor;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Kernel, Stream};
use epoxide::gpu::kernels::MoeTopk;
use epoxide::gpu::layout::{DevicePtr, MoeTopkArgs};
use epoxide_vgpu::for_each_seed;

/// The ids and weights of two tokens with these logits.
fn topk(seed: u64, logits: &[f32], num_topk: u32, sigmoid: u32) -> (Vec<i64>, Vec<f32>) {
    let device = VirtualGpu::new(VirtConfig { schedule_seed: Some(seed), ..VirtConfig::default() });
    let stream = Stream::new(&device).unwrap();
    let (num_experts, entries) = (logits.len() / 2, 2 * num_topk as usize);
    let logits = TypedTensor::from_host(&stream, &[2, num_experts as u64], logits).unwrap();
    let topk_idx = TypedTensor::from_host(&stream, &[2, num_topk.into()], &vec![-1i64; entries]).unwrap();
    let topk_weights = TypedTensor::from_host(&stream, &[2, num_topk.into()], &vec![0f32; entries]).unwrap();
    let call = MoeTopk::call(MoeTopkArgs {
        logits: logits.ptr().into(),
        topk_idx: topk_idx.ptr().into(),
        topk_weights: topk_weights.ptr().into(),
        grad_topk_weights: DevicePtr::NULL,
        grad_stride: 0,
        grad_logits: DevicePtr::NULL,
        num_tokens: 2,
        num_experts: num_experts as u32,
        num_topk,
        sigmoid,
    });
    let kernel = Kernel::shipped::<MoeTopk>(&device, 0).unwrap();
    // SAFETY: the tensors have the shapes that the arguments say.
    unsafe { stream.call(&kernel, 1, 64, 0, call).unwrap() };
    (topk_idx.values(&stream).unwrap(), topk_weights.values(&stream).unwrap())
}

#[test]
fn the_router_selects_the_largest_logits() {
    for_each_seed(5, |seed| {
        // The lowest expert is first among equals; a lane has several of 70 experts.
        let logits = |at: usize| [5.0, -1.0, 5.0, 4.0][at % 70 % 4] + if at % 70 >= 68 { 1.0 } else { 0.0 };
        let logits: Vec<f32> = (0..140).map(logits).collect();
        let (ids, weights) = topk(seed, &logits, 4, 0);
        assert_eq!(ids, [68, 0, 2, 4].repeat(2));
        let rest = (-1f32).exp() / (1.0 + 3.0 * (-1f32).exp());
        for (weight, want) in weights.iter().zip([1.0 - 3.0 * rest, rest, rest, rest].repeat(2)) {
            assert!((weight - want).abs() < 1e-5, "{weights:?}");
        }
        let (ids, weights) =
            topk(seed, &[0.0, f32::NEG_INFINITY, 30.0, 1.0, -30.0, -31.0, -32.0, -33.0], 1, 1);
        assert_eq!((ids, weights), (vec![2, 0], vec![1.0, 1.0]));
    });
}
