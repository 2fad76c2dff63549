//! Times of the softmax and of the BF16 matrix product on GPU 0, as `comparison/times.cu` measures its
//! own. Columns: kernel, size, microseconds, rate.
//!
//! ```sh
//! cargo run --release --features cuda --example times
//! ```

use std::process::ExitCode;

use own_kernels::cuda::{Gpu, Result};
use own_kernels::{MatrixProductBf16, Softmax};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let gpu = Gpu::open(0)?;
    eprintln!("{}", gpu.name()?);
    for columns in [1024, 4096, 8192] {
        softmax(&gpu, (32 << 20) / columns, columns)?;
    }
    for size in [2048, 4096, 8192] {
        matrix_product_bf16(&gpu, size, size, size)?;
    }
    Ok(())
}

/// An integer between -8 and 7: products and sums of many are exact.
fn number(i: usize) -> f32 {
    (((i as u64).wrapping_mul(2_654_435_761) >> 12) % 16) as f32 - 8.0
}

/// BF16 numbers in pairs.
fn bf16_pairs(len: usize) -> Vec<u32> {
    let bits = |i| number(i).to_bits() >> 16;
    (0..len / 2).map(|i| bits(2 * i) | bits(2 * i + 1) << 16).collect()
}

fn softmax(gpu: &Gpu, rows: u32, columns: u32) -> Result<()> {
    let len = (rows * columns) as usize;
    let x = gpu.upload(&(0..len).map(number).collect::<Vec<_>>())?;
    let out = gpu.upload(&vec![0.0f32; len])?;
    let call = Softmax::call(x.global(), out.global(), rows, columns)?;
    // SAFETY: both arrays have `rows * columns` elements, and live until the download below.
    let us = gpu.median_us(|| unsafe { gpu.launch(&call) })?;

    let powers: Vec<f64> = (0..columns as usize).map(|c| f64::from(number(c)).exp()).collect();
    let sum: f64 = powers.iter().sum();
    for (power, got) in powers.iter().zip(out.download()?) {
        let want = power / sum;
        if (f64::from(got) - want).abs() > 1e-5 * want {
            return Err(format!("softmax: {got} instead of {want}").into());
        }
    }
    println!("softmax\t{rows}x{columns}\t{us:.2}\t{:.0} GB/s", 2.0 * len as f64 * 4.0 / us / 1e3);
    Ok(())
}

fn matrix_product_bf16(gpu: &Gpu, m: u32, n: u32, k: u32) -> Result<()> {
    let (rows, columns, depth) = (m as usize, n as usize, k as usize);
    let a = gpu.upload(&bf16_pairs(rows * depth))?;
    let b = gpu.upload(&bf16_pairs(depth * columns))?;
    let c = gpu.upload(&vec![0.0f32; rows * columns])?;
    let call = MatrixProductBf16::call(a.global(), b.global(), c.global(), m, n, k)?;
    // SAFETY: the arrays are as large as `m`, `n` and `k` say, and live until the download below.
    let us = gpu.median_us(|| unsafe { gpu.launch(&call) })?;

    let got = c.download()?;
    for at in (0..rows * columns).step_by(rows * columns / 1000 + 1) {
        let (i, j) = (at / columns, at % columns);
        let want: f32 = (0..depth).map(|l| number(i * depth + l) * number(l * columns + j)).sum();
        if got[at] != want {
            return Err(format!("matrix_product_bf16: {} instead of {want} at {i}, {j}", got[at]).into());
        }
    }
    let operations = 2.0 * rows as f64 * columns as f64 * depth as f64;
    println!("matrix_product_bf16\t{m}x{n}x{k}\t{us:.2}\t{:.1} TFLOP/s", operations / us / 1e6);
    Ok(())
}
