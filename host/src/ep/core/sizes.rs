//! The sizes of a buffer that does not exist yet.

/// The memory and the rows of a buffer on each rank, as
/// [`throughput::Options::sizes`](crate::throughput::Options::sizes) and
/// [`low_latency::Options::sizes`](crate::low_latency::Options::sizes) compute them without a
/// device or a group.
///
/// Nodes whose memory is mapped become one node when the buffer is made. Each size is then the
/// larger one of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sizes {
    /// Most rows that a dispatch receives: the rows of tensors for any routing.
    pub rows: u64,
    /// Device bytes that peers map, of all places together. The driver rounds them up, by less than
    /// 2 MiB on NVIDIA GPUs.
    pub pool_bytes: u64,
    /// Bytes that other nodes write to; 0 with one node.
    pub wire_bytes: u64,
    /// Device bytes of this rank alone: in low latency sums and tables, across nodes received rows
    /// as well. In high throughput 0, though a buffer has some: operations take memory for layouts,
    /// handles and sums as needed, and reuse it. With
    /// [`combine_into`](crate::throughput::Buffer::combine_into) the sums are the caller's.
    pub own_bytes: u64,
    /// Device bytes for the e4m3 rows of high throughput's dispatches that quantise, and their
    /// scales ([`DispatchRequest::quantise`](crate::throughput::DispatchRequest::quantise)). The
    /// first such dispatch allocates them, and later ones reuse them. In low latency 0: rows are
    /// converted while they are sent.
    pub quantise_bytes: u64,
}

impl Sizes {
    /// The larger one of each size.
    pub(crate) fn or_more(self, other: Option<Sizes>) -> Sizes {
        let Some(other) = other else { return self };
        Sizes {
            rows: self.rows.max(other.rows),
            pool_bytes: self.pool_bytes.max(other.pool_bytes),
            wire_bytes: self.wire_bytes.max(other.wire_bytes),
            own_bytes: self.own_bytes.max(other.own_bytes),
            quantise_bytes: self.quantise_bytes.max(other.quantise_bytes),
        }
    }
}
