//! An MoE layer on one rank, with its share of the experts: training in high throughput, decoding
//! in low latency.

use epoxide::driver::{Kernel, Stream};
use epoxide::throughput::{CombineRequest, DispatchRequest, Place, Received};
use epoxide::{DType, Result, StreamOrder, Tensor, TypedTensor};
use epoxide::{low_latency, throughput};
use epoxide_gpu::kernels::{MoeSwiglu, MoeSwigluBackward, MoeTopk, MoeTopkBackward};
use epoxide_gpu::layout::{DevicePtr, MoeSwigluArgs, MoeTopkArgs};
use half::bf16;

use crate::gemm::{Form, Gemm, Output, Rows};
use crate::model::{Expert, Matrices, Scores, Shape};

/// Threads of a block of the kernels.
const THREADS: u32 = 128;

/// The stream of a rank, and what it computes with beside the library's operations.
pub struct Compute<'a> {
    pub stream: &'a Stream,
    pub gemm: &'a dyn Gemm,
    topk: Kernel,
    topk_backward: Kernel,
    swiglu: Kernel,
    swiglu_backward: Kernel,
}

impl<'a> Compute<'a> {
    pub fn new(stream: &'a Stream, gemm: &'a dyn Gemm) -> Result<Compute<'a>> {
        let device = stream.device();
        Ok(Compute {
            stream,
            gemm,
            topk: Kernel::shipped::<MoeTopk>(device, 0)?,
            topk_backward: Kernel::shipped::<MoeTopkBackward>(device, 0)?,
            swiglu: Kernel::shipped::<MoeSwiglu>(device, 0)?,
            swiglu_backward: Kernel::shipped::<MoeSwigluBackward>(device, 0)?,
        })
    }

    fn rows(&self, dtype: DType, rows: u64, columns: usize) -> Result<Tensor<'static>> {
        Tensor::alloc(self.stream.device(), dtype, &[rows, columns as u64])
    }

    fn blocks(&self) -> u32 {
        self.stream.device().info().sm_count
    }

    fn topk_args(&self, shape: &Shape, routed: &Routed) -> MoeTopkArgs {
        MoeTopkArgs {
            logits: routed.logits.ptr().into(),
            topk_idx: routed.topk_idx.ptr().into(),
            topk_weights: routed.topk_weights.ptr().into(),
            grad_topk_weights: DevicePtr::NULL,
            grad_stride: 0,
            grad_logits: DevicePtr::NULL,
            num_tokens: routed.logits.rows() as u32,
            num_experts: shape.num_experts as u32,
            num_topk: shape.num_topk as u32,
            sigmoid: (shape.scores == Scores::Sigmoid).into(),
        }
    }
}

/// An expert layer's matrices on the device: those of some experts.
struct Experts {
    /// bf16 `[experts, hidden, 2 * intermediate]`.
    gate_up: Tensor<'static>,
    /// bf16 `[experts, intermediate, hidden]`.
    down: Tensor<'static>,
    intermediate: usize,
}

/// The experts' intermediate results, kept for the backward pass.
struct Activations {
    /// bf16 `[rows, 2 * intermediate]`.
    gate_up: Tensor<'static>,
    /// bf16 `[rows, intermediate]`.
    product: Tensor<'static>,
}

impl Experts {
    fn new(stream: &Stream, shape: &Shape, experts: &[Expert<bf16>]) -> Result<Experts> {
        let upload = |rows: usize, columns: usize, of: fn(&Expert<bf16>) -> &Vec<bf16>| {
            let values: Vec<bf16> = experts.iter().flat_map(of).copied().collect();
            Tensor::from_host(
                stream,
                DType::Bf16,
                &[experts.len() as u64 * rows as u64, columns as u64],
                &values,
            )
        };
        let Shape { hidden, intermediate, .. } = *shape;
        Ok(Experts {
            gate_up: upload(hidden, 2 * intermediate, |expert| &expert.gate_up)?,
            down: upload(intermediate, hidden, |expert| &expert.down)?,
            intermediate,
        })
    }

    fn activations(&self, compute: &Compute, rows: u64) -> Result<Activations> {
        Ok(Activations {
            gate_up: compute.rows(DType::Bf16, rows, 2 * self.intermediate)?,
            product: compute.rows(DType::Bf16, rows, self.intermediate)?,
        })
    }

    fn swiglu_args(&self, rows: &Rows, activations: &Activations) -> MoeSwigluArgs {
        MoeSwigluArgs {
            gate_up: activations.gate_up.ptr(),
            product: activations.product.ptr(),
            grad_gate_up: DevicePtr::NULL,
            weights: DevicePtr::NULL.into(),
            starts: rows.starts.ptr().into(),
            counts: rows.counts.ptr().into(),
            num_experts: rows.counts.rows() as u32,
            intermediate: self.intermediate as u32,
        }
    }

    /// Each row of `x` through its expert, to `out`.
    fn forward(
        &self,
        compute: &Compute,
        rows: &Rows,
        x: &Tensor,
        activations: &Activations,
        out: (&Tensor, Output),
    ) -> Result<()> {
        let Compute { stream, gemm, .. } = compute;
        let gate_up = (&activations.gate_up, Output::Replace);
        gemm.multiply(stream, rows, x, (&self.gate_up, Form::Plain), gate_up)?;
        let call = MoeSwiglu::call(self.swiglu_args(rows, activations));
        // SAFETY: the tensors have the shapes of the argument struct. Their memory is freed only
        // behind the work enqueued on streams.
        unsafe { stream.call(&compute.swiglu, compute.blocks(), THREADS, 0, call)? };
        gemm.multiply(stream, rows, &activations.product, (&self.down, Form::Plain), out)
    }

    /// The gradients of the matrices, and to `grad_x` those of the rows. `grad` has the gradients
    /// of the experts' results, each still to be multiplied by its weight.
    fn backward(
        &self,
        compute: &Compute,
        rows: &Rows,
        x: &Tensor,
        activations: &Activations,
        (grad, weights): (&Tensor, Option<&TypedTensor<f32>>),
        grad_x: (&Tensor, Output),
    ) -> Result<GradExperts> {
        let Compute { stream, gemm, .. } = compute;
        let Activations { gate_up, product } = activations;
        let (count, hidden) = (product.rows(), grad.columns());
        let experts = rows.counts.rows();
        // First the gradients of products, then the weighted products in their place.
        let product = compute.rows(DType::Bf16, count, self.intermediate)?;
        let grad_gate_up = compute.rows(DType::Bf16, count, 2 * self.intermediate)?;
        gemm.multiply(stream, rows, grad, (&self.down, Form::Transposed), (&product, Output::Replace))?;
        let call = MoeSwigluBackward::call(MoeSwigluArgs {
            product: product.ptr(),
            grad_gate_up: grad_gate_up.ptr(),
            weights: weights.map_or(DevicePtr::NULL, |weights| weights.ptr()).into(),
            gate_up: gate_up.ptr(),
            ..self.swiglu_args(rows, activations)
        });
        // SAFETY: as in `forward`.
        unsafe { stream.call(&compute.swiglu_backward, compute.blocks(), THREADS, 0, call)? };
        gemm.multiply(stream, rows, &grad_gate_up, (&self.gate_up, Form::Transposed), grad_x)?;

        let matrices = |rows: usize, columns: usize| compute.rows(DType::F32, experts * rows as u64, columns);
        let grads = GradExperts {
            gate_up: matrices(hidden as usize, 2 * self.intermediate)?,
            down: matrices(self.intermediate, hidden as usize)?,
        };
        gemm.gradient(stream, rows, x, &grad_gate_up, &grads.gate_up)?;
        gemm.gradient(stream, rows, &product, grad, &grads.down)?;
        Ok(grads)
    }
}

/// Gradients of some experts' matrices, f32, in the shapes of the matrices.
pub struct GradExperts {
    pub gate_up: Tensor<'static>,
    pub down: Tensor<'static>,
}

/// The results of the router.
pub struct Routed {
    logits: Tensor<'static>,
    /// i64 `[tokens, num_topk]`.
    pub topk_idx: TypedTensor<'static, i64>,
    topk_weights: TypedTensor<'static, f32>,
}

/// A layer on one rank.
pub struct Layer {
    shape: Shape,
    /// bf16 `[hidden, num_experts]`.
    router: Tensor<'static>,
    experts: Experts,
    shared: Experts,
}

/// A forward pass of a layer, and what the backward pass needs of it.
pub struct Forward<'p> {
    x: Tensor<'static>,
    tokens: Rows<'static>,
    pub routed: Routed,
    received: Received<'p>,
    rows: Rows<'static>,
    activations: Activations,
    /// bf16 `[rows, hidden]`: the experts' results.
    made: Tensor<'static>,
    of_shared: Activations,
    /// bf16 `[tokens, hidden]`.
    pub out: Tensor<'static>,
}

/// The gradients of a layer. The router's and the shared expert's gradients are of this rank's
/// tokens alone. Callers must sum them over ranks, as for any replicated layer.
pub struct Backward {
    /// bf16 `[tokens, hidden]`.
    pub x: Tensor<'static>,
    /// f32 `[hidden, num_experts]`.
    pub router: Tensor<'static>,
    /// Gradients of this rank's experts.
    pub experts: GradExperts,
    pub shared: GradExperts,
}

impl Layer {
    /// Uploads the router, the shared expert and this rank's share of the others.
    pub fn new(
        stream: &Stream,
        shape: &Shape,
        matrices: &Matrices<bf16>,
        rank: u32,
        num_ranks: u32,
    ) -> Result<Layer> {
        let local = shape.num_experts / num_ranks as usize;
        let own = &matrices.experts[rank as usize * local..][..local];
        let router = [shape.hidden as u64, shape.num_experts as u64];
        Ok(Layer {
            shape: *shape,
            router: Tensor::from_host(stream, DType::Bf16, &router, &matrices.router)?,
            experts: Experts::new(stream, shape, own)?,
            shared: Experts::new(stream, shape, std::slice::from_ref(&matrices.shared))?,
        })
    }

    fn routed(&self, compute: &Compute, tokens: u64) -> Result<Routed> {
        let topk = [tokens, self.shape.num_topk as u64];
        Ok(Routed {
            logits: compute.rows(DType::F32, tokens, self.shape.num_experts)?,
            topk_idx: Tensor::alloc(compute.stream.device(), DType::I64, &topk)?.typed()?,
            topk_weights: Tensor::alloc(compute.stream.device(), DType::F32, &topk)?.typed()?,
        })
    }

    /// Selects and weighs the experts of each token.
    fn route(&self, compute: &Compute, tokens: &Rows, x: &Tensor, routed: &Routed) -> Result<()> {
        let Compute { stream, gemm, .. } = compute;
        let logits = (&routed.logits, Output::Replace);
        gemm.multiply(stream, tokens, x, (&self.router, Form::Plain), logits)?;
        let call = MoeTopk::call(compute.topk_args(&self.shape, routed));
        // SAFETY: the tensors have the shapes of the argument struct. Their memory is freed only
        // behind the work enqueued on streams.
        unsafe { stream.call(&compute.topk, compute.blocks(), THREADS, 0, call) }
    }

    /// A pass over `x`, bf16 `[tokens, hidden]`. The host waits once, for the counts of rows.
    /// Collective.
    pub fn forward<'p>(
        &self,
        compute: &Compute,
        buffer: &mut throughput::Buffer,
        place: &'p mut Place,
        x: Tensor<'static>,
    ) -> Result<Forward<'p>> {
        let stream = compute.stream;
        let order = StreamOrder::on(stream);
        let tokens = Rows::all(stream, x.rows())?;
        let routed = self.routed(compute, x.rows())?;
        self.route(compute, &tokens, &x, &routed)?;

        // A row for each selection, grouped by expert, without padding.
        let layout = buffer.get_dispatch_layout(&routed.topk_idx, self.shape.num_experts as u32, order)?;
        let request = DispatchRequest::new(&x, &layout).topk_weights(&routed.topk_weights).by_expert(1);
        let received = buffer.dispatch(place, request, order)?;
        let lengths: Vec<u64> = received.num_recv_tokens_per_expert.iter().copied().map(u64::from).collect();
        let rows = Rows::of_lengths(stream, &lengths)?;

        let activations = self.experts.activations(compute, received.recv_x.rows())?;
        let made = compute.rows(DType::Bf16, received.recv_x.rows(), self.shape.hidden)?;
        let to_made = (&made, Output::Replace);
        self.experts.forward(compute, &rows, &received.recv_x, &activations, to_made)?;

        let request = CombineRequest::new(&made, &received.handle).weights(&routed.topk_weights);
        let out = buffer.combine(request, order)?.combined_x;
        let of_shared = self.shared.activations(compute, x.rows())?;
        self.shared.forward(compute, &tokens, &x, &of_shared, (&out, Output::Add))?;
        Ok(Forward { x, tokens, routed, received, rows, activations, made, of_shared, out })
    }

    /// The gradients for `grad`, bf16 `[tokens, hidden]`, that of the pass's output. `place` is
    /// another one than the pass's. Collective; the host does not wait.
    pub fn backward(
        &self,
        compute: &Compute,
        buffer: &mut throughput::Buffer,
        place: &mut Place,
        pass: &Forward,
        grad: &Tensor,
    ) -> Result<Backward> {
        let Compute { stream, gemm, .. } = compute;
        let order = StreamOrder::on(stream);
        let (received, handle) = (&pass.received, &pass.received.handle);

        // Combine's backward brings each row the gradient of its token.
        let grads = buffer.combine_backward(place, grad, handle, order)?.recv_x;
        let weights = buffer.weights_backward(received, &grads, &pass.made, order)?.grad_topk_weights;
        // The experts write to the pool that peers read, so that nothing is copied.
        let grad_rows = received.combine_rows(DType::Bf16, self.shape.hidden as u64)?;
        let experts = self.experts.backward(
            compute,
            &pass.rows,
            &received.recv_x,
            &pass.activations,
            (&grads, received.recv_topk_weights.as_ref()),
            (grad_rows.tensor(), Output::Replace),
        )?;
        // Dispatch's backward sums the gradients of a token's rows.
        let x = buffer.dispatch_backward(&grad_rows, handle, order)?.combined_x;

        let shared = self.shared.backward(
            compute,
            &pass.tokens,
            &pass.x,
            &pass.of_shared,
            (grad, None),
            (&x, Output::Add),
        )?;
        let grad_logits = compute.rows(DType::Bf16, grad.rows(), self.shape.num_experts)?;
        let call = MoeTopkBackward::call(MoeTopkArgs {
            grad_topk_weights: weights.ptr(),
            grad_stride: weights.row_stride(),
            grad_logits: grad_logits.ptr(),
            ..compute.topk_args(&self.shape, &pass.routed)
        });
        // SAFETY: as in `route`.
        unsafe { stream.call(&compute.topk_backward, compute.blocks(), THREADS, 0, call)? };
        let router = compute.rows(DType::F32, self.shape.hidden as u64, self.shape.num_experts)?;
        gemm.gradient(stream, &pass.tokens, &pass.x, &grad_logits, &router)?;
        gemm.multiply(
            stream,
            &pass.tokens,
            &grad_logits,
            (&self.router, Form::Transposed),
            (&x, Output::Add),
        )?;
        Ok(Backward { x, router, experts, shared })
    }
}

/// The memory of a layer's decode step of a number of tokens. A step that is captured allocates
/// nothing.
pub struct Room {
    tokens: Rows<'static>,
    pub routed: Routed,
    /// Received rows by expert: those of expert e begin at row `e * buffer.rows()`.
    recv_x: Tensor<'static>,
    starts: TypedTensor<'static, i32>,
    activations: Activations,
    made: Tensor<'static>,
    of_shared: Activations,
    /// bf16 `[tokens, hidden]`.
    pub out: Tensor<'static>,
}

impl Layer {
    pub fn room(&self, compute: &Compute, buffer: &low_latency::Buffer, tokens: u64) -> Result<Room> {
        let (experts, hidden) = (u64::from(buffer.local_experts()), self.shape.hidden);
        let rows = experts * buffer.rows();
        Ok(Room {
            tokens: Rows::all(compute.stream, tokens)?,
            routed: self.routed(compute, tokens)?,
            recv_x: compute.rows(DType::Bf16, rows, hidden)?,
            starts: Rows::of_lengths(compute.stream, &vec![buffer.rows(); experts as usize])?.starts,
            activations: self.experts.activations(compute, rows)?,
            made: compute.rows(DType::Bf16, rows, hidden)?,
            of_shared: self.shared.activations(compute, tokens)?,
            out: compute.rows(DType::Bf16, tokens, hidden)?,
        })
    }

    /// Enqueues a decode step of `x`, bf16 `[tokens, hidden]`, with the result in `room.out`. The
    /// host neither waits nor reads the number of rows, so the step can be captured. Collective.
    pub fn decode(
        &self,
        compute: &Compute,
        buffer: &mut low_latency::Buffer,
        place: &mut low_latency::Place,
        x: &Tensor,
        room: &Room,
    ) -> Result<()> {
        let order = StreamOrder::on(compute.stream);
        let routed = &room.routed;
        self.route(compute, &room.tokens, x, routed)?;
        let request =
            low_latency::DispatchRequest::new(x, &routed.topk_idx).topk_weights(&routed.topk_weights);
        let received = buffer.dispatch(place, request, order)?;
        buffer.gather_by_expert(&received, &room.recv_x, None, order)?;

        let most = |expert| expert * buffer.rows()..(expert + 1) * buffer.rows();
        let rows = Rows {
            starts: room.starts.clone(),
            counts: received.expert_counts.clone(),
            on_host: (0..u64::from(buffer.local_experts())).map(most).collect(),
        };
        let made = (&room.made, Output::Replace);
        self.experts.forward(compute, &rows, &room.recv_x, &room.activations, made)?;
        // Combine applies the weights that the dispatch was given.
        let request = low_latency::CombineRequest::by_expert(&room.made);
        buffer.combine_into(received, request, &room.out, order)?;
        self.shared.forward(compute, &room.tokens, x, &room.of_shared, (&room.out, Output::Add))
    }
}
