//! Kernels by themselves, on a virtual GPU: docs/KERNELS.md shows how to add one.

use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Kernel, Stream};
use epoxide::gpu::kernels::MoeRouter;
use epoxide::gpu::layout::MoeRouterArgs;
use epoxide::half::bf16;
use epoxide::{DType, Tensor, TypedTensor};
use epoxide_vgpu::for_each_seed;

#[test]
fn the_router_selects_the_largest_logit() {
    for_each_seed(5, |seed| {
        let device = VirtualGpu::new(VirtConfig { schedule_seed: Some(seed), ..VirtConfig::default() });
        let stream = Stream::new(&device).unwrap();
        let x = Tensor::from_host(&stream, DType::Bf16, &[2, 8], &[bf16::ONE; 16]).unwrap();
        // Expert e has the logit 8 * (e % 3): of 0, 8, 16 and 0 the third is the largest.
        let weights: Vec<f32> = (0..32).map(|at| (at % 4 % 3) as f32).collect();
        let w = Tensor::from_host(&stream, DType::F32, &[8, 4], &weights).unwrap();
        let topk_idx = TypedTensor::from_host(&stream, &[2, 1], &[-1i64; 2]).unwrap();
        let topk_weights = TypedTensor::from_host(&stream, &[2, 1], &[0f32; 2]).unwrap();
        let router = MoeRouter::call(MoeRouterArgs {
            x: x.ptr(),
            w: w.ptr(),
            topk_idx: topk_idx.ptr(),
            topk_weights: topk_weights.ptr(),
            num_tokens: 2,
            hidden: 8,
            num_experts: 4,
            num_topk: 1,
        });
        let kernel = Kernel::shipped::<MoeRouter>(&device, 0).unwrap();
        // SAFETY: the tensors have the shapes that the arguments say.
        unsafe { stream.call(&kernel, 1, 64, 0, router).unwrap() };
        assert_eq!(topk_idx.values(&stream).unwrap(), [2, 2]);
        assert_eq!(topk_weights.values(&stream).unwrap(), [1.0, 1.0]);
    });
}
