//! A program that depends on the library alone.

use std::time::Duration;

use epoxide::driver::Stream;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::throughput::{Buffer, DispatchRequest, Options, Shape};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::group::run_threads;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let received = run_threads(2, Duration::from_secs(60), |rank, group| {
        let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
        let stream = Stream::new(&device)?;
        let shape = Shape { max_tokens: 1, hidden: 4, dtype: DType::I32, max_topk: 1, max_scales: 0 };
        let mut buffer = Buffer::new(device, &*group, Options::new(shape))?;
        // Each rank's token is sent to the other rank.
        let x = Tensor::from_host(&stream, DType::I32, &[1, 4], &[rank as i32; 4])?;
        let topk_idx = TypedTensor::from_host(&stream, &[1, 1], &[1 - i64::from(rank)])?;
        let order = StreamOrder::on(&stream);
        let layout = buffer.get_dispatch_layout(&topk_idx, 2, order)?;
        let mut place = buffer.place(0)?;
        let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &layout), order)?;
        received.recv_x.to_host::<i32>(&stream)
    })?;
    assert_eq!(received, [[1; 4], [0; 4]]);
    println!("a token went each way");
    #[cfg(feature = "cuda")]
    match epoxide::driver::cuda::devices() {
        Ok(devices) => println!("{} GPUs", devices.len()),
        Err(error @ epoxide::Error::Unavailable { .. }) => println!("{error}"),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
