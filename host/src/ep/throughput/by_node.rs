//! Counts by node of a dispatch whose ranks are one node to the kernels. The kernels make no such
//! counts: the host computes them, for callers that use the names of MSCCL++'s interface.

use super::handle::{DispatchHandle, IntranodeHandle};
use super::layout::DispatchLayout;
use crate::driver::Stream;
use crate::error::{Error, Result};

/// The quantities by RDMA rank (node) of MSCCL++'s interface, for a dispatch that relays nothing.
/// Matrices are row-major. `gbl_channel_prefix_matrix` is
/// [`IntranodeHandle::channel_prefix_matrix`]; quantities of relayed tokens do not exist here.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeCounts {
    /// Sender side, `[num_nodes, num_channels]`: tokens for each node in channels up to and with c,
    /// each token once per node, the own node included.
    pub rdma_channel_prefix_matrix: Vec<i32>,
    /// Sender side, `[num_tokens, num_nodes]`: the token's sequence number among those of its
    /// channel for that node, or -1.
    pub send_rdma_head: Vec<i32>,
    /// Receiver side, `[num_ranks, num_channels]`: the row of `recv_x` where channel c of a source
    /// rank starts.
    pub recv_gbl_channel_prefix_matrix: Vec<i32>,
    /// Receiver side, `[num_ranks]`: rows received from ranks up to and with r.
    pub recv_gbl_rank_prefix_sum: Vec<i32>,
}

/// For each token, the nodes with a rank that receives it.
fn nodes_of<T: Copy>(per_token: &[T], ranks: usize, per_node: usize, goes: impl Fn(T) -> bool) -> Vec<bool> {
    let nodes = per_token.chunks(ranks).flat_map(|token| token.chunks(per_node));
    nodes.map(|ranks| ranks.iter().any(|&rank| goes(rank))).collect()
}

fn check_nodes(ranks: u32, ranks_per_node: u32) -> Result<usize> {
    if ranks_per_node != 0 && ranks.is_multiple_of(ranks_per_node) {
        return Ok(ranks_per_node as usize);
    }
    let rule = format!("must divide the number of ranks, {ranks}: every node has as many");
    Err(Error::argument("ranks_per_node", ranks_per_node, rule))
}

impl DispatchLayout<'_> {
    /// `[num_nodes]`, with nodes of `ranks_per_node` ranks: tokens for each node, each token once
    /// per node, the own node included. Waits for `stream`, which the layout was made on or after.
    ///
    /// # Errors
    /// [`Error::Argument`] where the ranks are no multiple of `ranks_per_node`.
    pub fn tokens_per_node(&self, ranks_per_node: u32, stream: &Stream) -> Result<Vec<i32>> {
        let per_node = check_nodes(self.num_ranks, ranks_per_node)?;
        let ranks = self.num_ranks as usize;
        let in_rank = self.is_token_in_rank().to_host::<u8>(stream)?;
        let mut counts = vec![0; ranks / per_node];
        for token in nodes_of(&in_rank, ranks, per_node, |hit| hit != 0).chunks(counts.len()) {
            counts.iter_mut().zip(token).for_each(|(count, &hit)| *count += i32::from(hit));
        }
        Ok(counts)
    }
}

impl IntranodeHandle<'_> {
    /// Counts by nodes of `ranks_per_node` ranks. Waits for `stream`, on which the dispatch ran or
    /// which waited for it.
    ///
    /// # Errors
    /// [`Error::Argument`] where the ranks are no multiple of `ranks_per_node`.
    pub fn by_node(&self, ranks_per_node: u32, stream: &Stream) -> Result<NodeCounts> {
        let handle: &DispatchHandle = self.handle();
        let (ranks, channels) = (handle.0.num_ranks as usize, handle.0.num_channels as usize);
        let per_node = check_nodes(handle.0.num_ranks, ranks_per_node)?;
        let nodes = ranks / per_node;
        let heads = handle.send_head().to_host::<i32>(stream)?;
        let hits = nodes_of(&heads, ranks, per_node, |head| head >= 0);

        let tokens = handle.0.num_tokens as usize;
        let of_channel = tokens.div_ceil(channels).max(1);
        let mut counts = NodeCounts {
            rdma_channel_prefix_matrix: vec![0; nodes * channels],
            send_rdma_head: vec![-1; tokens * nodes],
            recv_gbl_channel_prefix_matrix: self.recv_channel_prefix_matrix().to_host(stream)?,
            recv_gbl_rank_prefix_sum: Vec::with_capacity(ranks),
        };
        for node in 0..nodes {
            let mut total = 0;
            for channel in 0..channels {
                let first = total;
                let end = ((channel + 1) * of_channel).min(tokens);
                for token in channel * of_channel..end {
                    if hits[token * nodes + node] {
                        counts.send_rdma_head[token * nodes + node] = total - first;
                        total += 1;
                    }
                }
                counts.rdma_channel_prefix_matrix[node * channels + channel] = total;
            }
        }
        // A column of the matrix of all ranks holds the rows that this rank receives.
        let prefix = self.rank_prefix_matrix().to_host::<i32>(stream)?;
        let me = handle.0.plans.faults().rank() as usize;
        for source in 0..ranks {
            let start = counts.recv_gbl_rank_prefix_sum.last().copied().unwrap_or(0);
            let starts = &mut counts.recv_gbl_channel_prefix_matrix[source * channels..][..channels];
            starts.iter_mut().for_each(|row| *row += start);
            counts.recv_gbl_rank_prefix_sum.push(prefix[source * ranks + me]);
        }
        Ok(counts)
    }
}
