//! The same products by cuBLAS, which cudarc loads when the program runs.
//!
//! cuBLAS takes the number of rows from the host, an expert at a time. If only the device has it,
//! all rows of the buffer are multiplied.

use std::ffi::c_void;
use std::fmt::Debug;
use std::sync::Arc;

use cudarc::cublas::result::CublasError;
use cudarc::cublas::{result, sys};
use cudarc::driver::CudaContext;
use epoxide::driver::{DevicePtr, Stream};
use epoxide::{DType, Error, Result, Tensor};

use crate::gemm::{Form, Gemm, Output, Rows};

/// Bytes that cuBLAS may use; within a capture it can allocate none.
const WORKSPACE: u64 = 32 << 20;

/// A handle of cuBLAS, for one thread and one stream at a time.
pub struct CublasGemm {
    handle: sys::cublasHandle_t,
    context: Arc<CudaContext>,
    _workspace: Tensor<'static>,
}

/// The error of a call that failed.
fn failed(call: &'static str) -> impl Fn(CublasError) -> Error {
    move |CublasError(status)| failed_with(call, status as i32, &status)
}

fn failed_with(call: &'static str, code: i32, status: &dyn Debug) -> Error {
    Error::Cuda { call, code, name: format!("{status:?}"), detail: String::new() }
}

/// Makes the context current on this thread.
fn bind(context: &CudaContext) -> Result<()> {
    context.bind_to_thread().map_err(|error| failed_with("cuCtxSetCurrent", error.0 as i32, &error.0))
}

/// A matrix in cuBLAS's layout: its columns are our rows.
struct Operand {
    at: DevicePtr,
    dtype: DType,
    /// Elements from one row of ours to the next.
    stride: u64,
    op: sys::cublasOperation_t,
}

impl Operand {
    fn new(tensor: &Tensor, first_row: u64, op: sys::cublasOperation_t) -> Operand {
        let (dtype, stride) = (tensor.dtype(), tensor.row_stride());
        Operand { at: tensor.ptr().add(first_row * stride), dtype, stride: stride / dtype.size(), op }
    }

    fn dtype(&self) -> sys::cudaDataType_t {
        match self.dtype {
            DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
            _ => sys::cudaDataType_t::CUDA_R_16BF,
        }
    }
}

const PLAIN: sys::cublasOperation_t = sys::cublasOperation_t::CUBLAS_OP_N;
const TRANSPOSED: sys::cublasOperation_t = sys::cublasOperation_t::CUBLAS_OP_T;

impl CublasGemm {
    /// A handle for the device of `stream`.
    pub fn new(stream: &Stream) -> Result<CublasGemm> {
        // SAFETY: the call only searches for the library, whose initialisers may run.
        if !unsafe { sys::is_culib_present() } {
            let reason = "the library is not installed".into();
            return Err(Error::Unavailable { what: "cuBLAS".into(), reason });
        }
        let context = CudaContext::new(stream.device().info().ordinal as usize);
        let context =
            context.map_err(|error| failed_with("cuDevicePrimaryCtxRetain", error.0 as i32, &error.0))?;
        bind(&context)?;
        let handle = result::create_handle().map_err(failed("cublasCreate"))?;
        let workspace = Tensor::alloc(stream.device(), DType::F32, &[WORKSPACE / 4])?;
        let gemm = CublasGemm { handle, context, _workspace: workspace };
        let at = gemm._workspace.ptr().0 as *mut c_void;
        // SAFETY: handle and stream are live; the workspace lives as long as the handle.
        unsafe {
            result::set_stream(handle, stream.raw().0.cast()).map_err(failed("cublasSetStream"))?;
            let set = sys::cublasSetWorkspace_v2(handle, at, WORKSPACE as usize).result();
            set.map_err(failed("cublasSetWorkspace"))?;
        }
        Ok(gemm)
    }

    /// `c[m, n] = left[m, k] * right[k, n]` of rows of ours, which cuBLAS takes as the transposed
    /// product.
    fn gemm(
        &self,
        [m, n, k]: [u64; 3],
        left: Operand,
        right: Operand,
        c: Operand,
        output: Output,
    ) -> Result<()> {
        let (alpha, beta) = (1f32, if output == Output::Add { 1f32 } else { 0f32 });
        bind(&self.context)?;
        // SAFETY: the operands lie inside of live tensors, with the strides of these.
        unsafe {
            result::gemm_ex(
                self.handle,
                right.op,
                left.op,
                n as i32,
                m as i32,
                k as i32,
                (&raw const alpha).cast(),
                right.at.0 as *const c_void,
                right.dtype(),
                right.stride as i32,
                left.at.0 as *const c_void,
                left.dtype(),
                left.stride as i32,
                (&raw const beta).cast(),
                c.at.0 as *mut c_void,
                c.dtype(),
                c.stride as i32,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
            .map_err(failed("cublasGemmEx"))
        }
    }
}

impl Drop for CublasGemm {
    fn drop(&mut self) {
        // SAFETY: the handle was made by `new`, and nothing uses it any more.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Gemm for CublasGemm {
    fn multiply(
        &self,
        _: &Stream,
        rows: &Rows,
        a: &Tensor,
        (b, form): (&Tensor, Form),
        (c, output): (&Tensor, Output),
    ) -> Result<()> {
        let (k, n) = (a.columns(), c.columns());
        for (expert, rows) in (0..).zip(&rows.on_host).filter(|(_, rows)| !rows.is_empty()) {
            let (stride, op) = if form == Form::Plain { (n, PLAIN) } else { (k, TRANSPOSED) };
            let at = b.ptr().add(expert * k * n * b.dtype().size());
            let matrix = Operand { at, dtype: b.dtype(), stride, op };
            let [a, c] = [a, c].map(|tensor| Operand::new(tensor, rows.start, PLAIN));
            self.gemm([rows.end - rows.start, n, k], a, matrix, c, output)?;
        }
        Ok(())
    }

    fn gradient(&self, stream: &Stream, rows: &Rows, a: &Tensor, b: &Tensor, c: &Tensor) -> Result<()> {
        let (m, n) = (a.columns(), b.columns());
        for (expert, rows) in (0..).zip(&rows.on_host) {
            let at = c.ptr().add(expert * m * n * c.dtype().size());
            if rows.is_empty() {
                // SAFETY: the matrix is one of the tensor's.
                unsafe { stream.fill(at, 0, m * n * c.dtype().size())? };
                continue;
            }
            let c = Operand { at, dtype: c.dtype(), stride: n, op: PLAIN };
            let a = Operand::new(a, rows.start, TRANSPOSED);
            let b = Operand::new(b, rows.start, PLAIN);
            self.gemm([m, n, rows.end - rows.start], a, b, c, Output::Replace)?;
        }
        Ok(())
    }
}
