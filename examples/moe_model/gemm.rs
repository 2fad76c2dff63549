//! Products of rows by expert with the experts' matrices: a kernel in Rust, which runs on any
//! device, and cuBLAS.

use std::ops::Range;

use epoxide::driver::{Device, Kernel, Stream};
use epoxide::{DType, Result, Tensor, TypedTensor};
use epoxide_gpu::kernels::{MoeGemm, MoeGemmWeights};
use epoxide_gpu::layout::{MoeGemmArgs, MoeGemmWeightsArgs};

/// The rows of each expert in a tensor.
pub struct Rows<'a> {
    /// i32 `[experts]`, on the device.
    pub starts: TypedTensor<'a, i32>,
    /// i32 `[experts]`, on the device.
    pub counts: TypedTensor<'a, i32>,
    /// The same if the host has the counts, else all rows of the buffer.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // cuBLAS alone reads it.
    pub on_host: Vec<Range<u64>>,
}

impl Rows<'static> {
    /// All rows of a tensor, with one matrix for them.
    pub fn all(stream: &Stream, rows: u64) -> Result<Rows<'static>> {
        Rows::of_lengths(stream, &[rows])
    }

    /// Rows that follow each other, so many of each expert.
    pub fn of_lengths(stream: &Stream, lengths: &[u64]) -> Result<Rows<'static>> {
        let starts = lengths.iter().scan(0, |end, rows| {
            *end += rows;
            Some(*end - rows)
        });
        let on_host: Vec<_> = starts.zip(lengths).map(|(start, rows)| start..start + rows).collect();
        let table = |of: fn(&Range<u64>) -> u64| {
            let values: Vec<i32> = on_host.iter().map(|rows| of(rows) as i32).collect();
            TypedTensor::from_host(stream, &[values.len() as u64], &values)
        };
        let (starts, counts) = (table(|rows| rows.start)?, table(|rows| rows.end - rows.start)?);
        Ok(Rows { starts, counts, on_host })
    }
}

/// How a matrix lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `[columns of a, columns of c]`.
    Plain,
    /// `[columns of c, columns of a]`.
    Transposed,
}

/// The fate of the numbers that a product's tensor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    Replace,
    Add,
}

/// Multiplies matrices on a stream, in FP32, without waiting.
pub trait Gemm {
    /// Each row of `c`, bf16 or f32, becomes the row of `a`, bf16, times the matrix of its expert
    /// in `b`, bf16 `[experts, ..]`.
    fn multiply(
        &self,
        stream: &Stream,
        rows: &Rows,
        a: &Tensor,
        b: (&Tensor, Form),
        c: (&Tensor, Output),
    ) -> Result<()>;

    /// `c`, f32 `[experts, columns of a, columns of b]`, becomes the gradient of each expert's
    /// matrix: the sum of `a[row] * b[row]` over its rows. `a` and `b` are bf16.
    fn gradient(&self, stream: &Stream, rows: &Rows, a: &Tensor, b: &Tensor, c: &Tensor) -> Result<()>;
}

/// The kernels of `epoxide_gpu`. They read on the device how many rows there are.
pub struct RustGemm {
    multiply: Kernel,
    gradient: Kernel,
    blocks: u32,
}

/// Threads of a block.
const THREADS: u32 = 128;

impl RustGemm {
    pub fn new(device: &Device) -> Result<RustGemm> {
        Ok(RustGemm {
            multiply: Kernel::shipped::<MoeGemm>(device, 0)?,
            gradient: Kernel::shipped::<MoeGemmWeights>(device, 0)?,
            blocks: device.info().sm_count,
        })
    }
}

impl Gemm for RustGemm {
    fn multiply(
        &self,
        stream: &Stream,
        rows: &Rows,
        a: &Tensor,
        (b, form): (&Tensor, Form),
        (c, output): (&Tensor, Output),
    ) -> Result<()> {
        let call = MoeGemm::call(MoeGemmArgs {
            a: a.ptr(),
            a_stride: a.row_stride(),
            b: b.ptr(),
            c: c.ptr(),
            c_stride: c.row_stride(),
            starts: rows.starts.ptr().into(),
            counts: rows.counts.ptr().into(),
            num_experts: rows.counts.rows() as u32,
            k: a.columns() as u32,
            n: c.columns() as u32,
            transposed: (form == Form::Transposed).into(),
            accumulate: (output == Output::Add).into(),
            c_is_f32: (c.dtype() == DType::F32).into(),
        });
        // SAFETY: the tensors have the shapes that the trait requires, and their memory is freed
        // only after the work enqueued on streams.
        unsafe { stream.call(&self.multiply, self.blocks, THREADS, 0, call) }
    }

    fn gradient(&self, stream: &Stream, rows: &Rows, a: &Tensor, b: &Tensor, c: &Tensor) -> Result<()> {
        let call = MoeGemmWeights::call(MoeGemmWeightsArgs {
            a: a.ptr(),
            a_stride: a.row_stride(),
            b: b.ptr(),
            b_stride: b.row_stride(),
            c: c.ptr().into(),
            starts: rows.starts.ptr().into(),
            counts: rows.counts.ptr().into(),
            num_experts: rows.counts.rows() as u32,
            m: a.columns() as u32,
            n: b.columns() as u32,
            reserved: 0,
        });
        // SAFETY: as in `multiply`.
        unsafe { stream.call(&self.gradient, self.blocks, THREADS, 0, call) }
    }
}
