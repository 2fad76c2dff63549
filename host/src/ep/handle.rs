//! What a dispatch leaves for combine and for cached dispatches.

use std::sync::{Arc, OnceLock};

use epoxide_gpu::layout::{DevicePtr, PlanHeader, SEND_ROW_STRIDE};

use super::scratch::{Block, Pieces};
use super::{DType, Tensor};
use crate::driver::Stream;
use crate::error::Result;

/// The routing of one dispatch. It can feed any number of combines and cached dispatches of the same buffer, forward
/// and backward; nothing rewrites it. Cheap to clone.
///
/// Matrices say which side they belong to: the *sender* owns tokens before dispatch and gets the sums in combine, the
/// *receiver* runs the experts.
#[derive(Debug, Clone)]
pub struct DispatchHandle(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub buffer_id: u64,
    pub block: Arc<Block>,
    pub places: Places,
    pub num_tokens: u32,
    pub num_ranks: u32,
    pub num_channels: u32,
    pub local_experts: u32,
    pub num_topk: Option<u32>,
    /// Rows that the dispatch had room for.
    pub capacity: u64,
    /// Rows received, once the host knows.
    pub num_recv_tokens: OnceLock<u32>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    pub header: DevicePtr,
    pub rank_prefix_matrix: DevicePtr,
    pub channel_prefix_matrix: DevicePtr,
    pub recv_channel_prefix_matrix: DevicePtr,
    pub send_head: DevicePtr,
    pub send_row: DevicePtr,
    pub num_recv_tokens_per_expert: DevicePtr,
}

impl Places {
    /// Bytes of a handle's block, and where things are in it once it has an address.
    pub fn lay_out(
        ranks: u32,
        channels: u32,
        tokens: u32,
        local_experts: u32,
    ) -> (u64, impl Fn(DevicePtr) -> Places) {
        let (ranks, channels, tokens) = (ranks as u64, channels as u64, tokens as u64);
        let mut pieces = Pieces::default();
        let header = pieces.push(size_of::<PlanHeader>() as u64);
        let rank_prefix = pieces.push(ranks * ranks * 4);
        let channel_prefix = pieces.push(ranks * channels * 4);
        let recv_channel_prefix = pieces.push(ranks * channels * 4);
        let send_head = pieces.push(tokens * ranks * 4);
        let send_row = pieces.push(tokens * SEND_ROW_STRIDE as u64 * 4);
        let per_expert = pieces.push(local_experts as u64 * 4);
        let places = move |base: DevicePtr| Places {
            header: base.add(header),
            rank_prefix_matrix: base.add(rank_prefix),
            channel_prefix_matrix: base.add(channel_prefix),
            recv_channel_prefix_matrix: base.add(recv_channel_prefix),
            send_head: base.add(send_head),
            send_row: base.add(send_row),
            num_recv_tokens_per_expert: base.add(per_expert),
        };
        (pieces.bytes(), places)
    }
}

impl Inner {
    /// Rows of a dispatch's outputs: as many as came, or where the host does not know, as many as there was room for.
    pub fn output_rows(&self) -> u64 {
        self.num_recv_tokens.get().map_or(self.capacity, |&rows| rows as u64)
    }
}

impl DispatchHandle {
    /// i32 `[num_ranks, num_ranks]`, the same on all ranks: `[i][j]` = tokens from ranks up to and with i to rank j.
    pub fn rank_prefix_matrix(&self) -> Tensor {
        self.matrix(self.0.places.rank_prefix_matrix, self.0.num_ranks, self.0.num_ranks)
    }

    /// Sender side, i32 `[num_ranks, num_channels]`: tokens for each destination rank in channels up to and with c.
    pub fn channel_prefix_matrix(&self) -> Tensor {
        self.matrix(self.0.places.channel_prefix_matrix, self.0.num_ranks, self.0.num_channels)
    }

    /// Receiver side, i32 `[num_ranks, num_channels]`: where channel c of source rank r starts in the block of rows of
    /// that source (exclusive, relative to the block).
    pub fn recv_channel_prefix_matrix(&self) -> Tensor {
        self.matrix(self.0.places.recv_channel_prefix_matrix, self.0.num_ranks, self.0.num_channels)
    }

    /// Sender side, i32 `[num_tokens, num_ranks]`: the token's sequence number among those of its channel for that
    /// rank, or -1.
    pub fn send_head(&self) -> Tensor {
        self.matrix(self.0.places.send_head, self.0.num_tokens, self.0.num_ranks)
    }

    /// Receiver side, i32 `[num_experts / num_ranks]`, on the device: selections of each local expert, each rounded up
    /// to the expert alignment.
    pub fn num_recv_tokens_per_expert(&self) -> Tensor {
        self.tensor(self.0.places.num_recv_tokens_per_expert, &[self.0.local_experts as u64])
    }

    /// Receiver side, i32 `[1]`, on the device: rows received.
    pub fn num_recv_tokens_on_device(&self) -> Tensor {
        let header = self.0.places.header;
        self.tensor(header.add(std::mem::offset_of!(PlanHeader, num_recv_tokens) as u64), &[1])
    }

    /// Rows received: at once if the dispatch was exact-size, else `stream`, on which the dispatch ran or which waited
    /// for it, is synchronised first.
    pub fn num_recv_tokens(&self, stream: &Stream) -> Result<u32> {
        if let Some(&known) = self.0.num_recv_tokens.get() {
            return Ok(known);
        }
        let count = self.num_recv_tokens_on_device().to_host::<i32>(stream)?[0] as u32;
        Ok(count)
    }

    /// Tokens that this rank sent.
    pub fn num_tokens(&self) -> u32 {
        self.0.num_tokens
    }

    /// Channels that tokens were cut into.
    pub fn num_channels(&self) -> u32 {
        self.0.num_channels
    }

    fn matrix(&self, ptr: DevicePtr, rows: u32, columns: u32) -> Tensor {
        self.tensor(ptr, &[rows as u64, columns as u64])
    }

    fn tensor(&self, ptr: DevicePtr, shape: &[u64]) -> Tensor {
        Tensor::in_memory(ptr, DType::I32, shape, self.0.block.clone())
    }
}
