//! Times of the softmax and of the BF16 matrix product on GPU 0; with a file of kernels that nvcc wrote
//! from `comparison/kernels.cu`, also of those. Columns: kernel, size, microseconds and rate in Rust, then
//! in CUDA C++, and the ratio.
//!
//! ```sh
//! cargo run --release --features cuda --example times -- [FILE]
//! ```

use std::path::Path;
use std::process::ExitCode;

use epoxide_simt::launch::{Call, Entry};
use own_kernels::cuda::{Array, Gpu, Result};
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
    let mut sides = vec![gpu];
    if let Some(file) = std::env::args_os().nth(1) {
        sides.push(sides[0].with_kernels_of(Path::new(&file))?);
    }
    for columns in [1024, 4096, 8192] {
        softmax(&sides, (32 << 20) / columns, columns)?;
    }
    for size in [2048, 4096, 8192] {
        matrix_product_bf16(&sides, size, size, size)?;
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

/// An output for each side, which no kernel has written.
fn outputs(sides: &[Gpu], len: usize) -> Result<Vec<Array<f32>>> {
    sides.iter().map(|gpu| gpu.upload(&vec![f32::NAN; len])).collect()
}

/// Prints times of a call on each side: the best of three alternating rounds, because the clocks of
/// a GPU change. `work` is what the rate counts.
///
/// # Safety
/// The conditions of [`Gpu::launch`], for each call.
unsafe fn print_times<K: Entry>(
    sides: &[Gpu],
    calls: &[Call<K>],
    size: &str,
    work: f64,
    unit: &str,
) -> Result<()> {
    let mut best = vec![f64::INFINITY; sides.len()];
    for _ in 0..3 {
        for ((gpu, call), best) in sides.iter().zip(calls).zip(&mut best) {
            // SAFETY: the caller upholds the conditions above.
            *best = best.min(gpu.median_us(|| unsafe { gpu.launch(call) })?);
        }
    }
    print!("{:<20} {size:<18}", calls[0].name());
    for us in &best {
        print!(" {us:>9.2} us {:>6.0} {unit}", work / us / 1e3);
    }
    if let [rust, other] = best[..] {
        print!(" {:>7.3}", rust / other);
    }
    println!();
    Ok(())
}

fn softmax(sides: &[Gpu], rows: u32, columns: u32) -> Result<()> {
    let len = (rows * columns) as usize;
    let x = sides[0].upload(&(0..len).map(number).collect::<Vec<_>>())?;
    let outputs = outputs(sides, len)?;
    let calls: Vec<Call<Softmax>> = outputs
        .iter()
        .map(|out| Softmax::call(x.global(), out.global(), rows, columns))
        .collect::<std::result::Result<_, _>>()?;
    let size = format!("{rows} x {columns}");
    // SAFETY: all arrays have `rows * columns` elements, and live until the downloads below.
    unsafe { print_times(sides, &calls, &size, 2.0 * len as f64 * 4.0, "GB/s")? };

    let powers: Vec<f64> = (0..columns as usize).map(|c| f64::from(number(c)).exp()).collect();
    let sum: f64 = powers.iter().sum();
    for out in outputs {
        for (power, got) in powers.iter().zip(out.download()?) {
            let want = power / sum;
            let error = (f64::from(got) - want).abs();
            if error.is_nan() || error > 1e-5 * want {
                return Err(format!("softmax: {got} instead of {want}").into());
            }
        }
    }
    Ok(())
}

fn matrix_product_bf16(sides: &[Gpu], m: u32, n: u32, k: u32) -> Result<()> {
    let (rows, columns, depth) = (m as usize, n as usize, k as usize);
    let a = sides[0].upload(&bf16_pairs(rows * depth))?;
    let b = sides[0].upload(&bf16_pairs(depth * columns))?;
    let outputs = outputs(sides, rows * columns)?;
    let calls: Vec<Call<MatrixProductBf16>> = outputs
        .iter()
        .map(|c| MatrixProductBf16::call(a.global(), b.global(), c.global(), m, n, k))
        .collect::<std::result::Result<_, _>>()?;
    let (size, operations) = (format!("{m} x {n} x {k}"), 2.0 * rows as f64 * columns as f64 * depth as f64);
    // SAFETY: the arrays are as large as `m`, `n` and `k` say, and live until the downloads below.
    unsafe { print_times(sides, &calls, &size, operations / 1e3, "TFLOP/s")? };

    for c in outputs {
        let got = c.download()?;
        for at in (0..rows * columns).step_by(rows * columns / 1000 + 1) {
            let (i, j) = (at / columns, at % columns);
            let want: f32 = (0..depth).map(|l| number(i * depth + l) * number(l * columns + j)).sum();
            if got[at] != want {
                return Err(format!("matrix_product_bf16: {} instead of {want} at {i}, {j}", got[at]).into());
            }
        }
    }
    Ok(())
}
