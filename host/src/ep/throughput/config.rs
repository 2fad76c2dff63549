//! The tuning knobs of the interface that epoxide took over, and its buffer size hints.

use crate::error::{Error, Result};

/// Buffer sizes are multiples of this many bytes.
const SIZE_ALIGN: u64 = 128;
/// The hints assume at most this many top-k entries and scales per token.
const HINT_COLUMNS: u64 = 128;

/// How many multiprocessors an operation may use, and the chunk sizes from which the size hints are
/// computed.
///
/// `num_sms` bounds the grid of dispatch, and the summing blocks of a combine; blocks that copy a
/// tensor's rows into the pool are additional. The number of channels is `num_sms / 2`. Across
/// nodes, one put has `num_max_rdma_chunked_send_tokens` rows. The other chunk fields keep the
/// meaning and the rules they have in MSCCL++'s DeepEP port. The kernels write rows to their final
/// place and have no rings. Here these fields only enter the size hints.
///
/// The default's NVLink ring grows with the nodes of a buffer, as [`Config::for_nodes`] computes it.
///
/// A call may have other multiprocessors than these, by
/// [`DispatchRequest::num_sms`](super::DispatchRequest::num_sms) and
/// [`CombineRequest::num_sms`](super::CombineRequest::num_sms).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Multiprocessors for dispatch and for combine; even.
    pub num_sms: u32,
    /// Tokens per published chunk, NVLink.
    pub num_max_nvl_chunked_send_tokens: u32,
    /// Ring capacity in tokens per (channel, peer), NVLink.
    pub num_max_nvl_chunked_recv_tokens: u32,
    /// Tokens per published chunk, RDMA.
    pub num_max_rdma_chunked_send_tokens: u32,
    /// Ring capacity in tokens per (channel, peer), RDMA; a multiple of the send chunk.
    pub num_max_rdma_chunked_recv_tokens: u32,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            num_sms: 20,
            num_max_nvl_chunked_send_tokens: 6,
            num_max_nvl_chunked_recv_tokens: 256,
            num_max_rdma_chunked_send_tokens: 6,
            num_max_rdma_chunked_recv_tokens: 258,
        }
    }
}

impl Config {
    /// Checks the rules between the fields and rounds the RDMA ring up to a multiple of its chunk.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the field that breaks a rule. All are positive and `num_sms` is
    /// even. Each send chunk is smaller than its ring, and the RDMA chunk is at most half of its
    /// ring. The rounded RDMA ring fits 32 bits.
    pub fn new(num_sms: u32, nvl_send: u32, nvl_recv: u32, rdma_send: u32, rdma_recv: u32) -> Result<Self> {
        let rule = |ok: bool, argument, value: u32, rule: String| {
            if ok { Ok(()) } else { Err(Error::argument(argument, value, rule)) }
        };
        rule(
            num_sms >= 2 && num_sms.is_multiple_of(2),
            "num_sms",
            num_sms,
            "must be even and at least 2: a channel is two".into(),
        )?;
        let given = Config {
            num_sms,
            num_max_nvl_chunked_send_tokens: nvl_send,
            num_max_nvl_chunked_recv_tokens: nvl_recv,
            num_max_rdma_chunked_send_tokens: rdma_send,
            num_max_rdma_chunked_recv_tokens: rdma_recv,
        };
        given.check_positive()?;
        rule(
            nvl_send < nvl_recv,
            "num_max_nvl_chunked_send_tokens",
            nvl_send,
            format!("must be below num_max_nvl_chunked_recv_tokens = {nvl_recv}"),
        )?;
        let rdma_recv = rdma_recv.checked_next_multiple_of(rdma_send).ok_or_else(|| {
            let most = largest_multiple(rdma_send);
            let rule = format!(
                "is rounded up to a multiple of num_max_rdma_chunked_send_tokens = {rdma_send}, which must fit 32 bits; \
                 give at most {most}"
            );
            Error::argument("num_max_rdma_chunked_recv_tokens", rdma_recv, rule)
        })?;
        rule(
            rdma_send <= rdma_recv / 2,
            "num_max_rdma_chunked_send_tokens",
            rdma_send,
            format!("must be at most half of num_max_rdma_chunked_recv_tokens = {rdma_recv}"),
        )?;
        Ok(Config { num_max_rdma_chunked_recv_tokens: rdma_recv, ..given })
    }

    fn check_positive(&self) -> Result<()> {
        for (name, value) in [
            ("num_max_nvl_chunked_send_tokens", self.num_max_nvl_chunked_send_tokens),
            ("num_max_nvl_chunked_recv_tokens", self.num_max_nvl_chunked_recv_tokens),
            ("num_max_rdma_chunked_send_tokens", self.num_max_rdma_chunked_send_tokens),
            ("num_max_rdma_chunked_recv_tokens", self.num_max_rdma_chunked_recv_tokens),
        ] {
            if value == 0 {
                return Err(Error::argument(name, value, "must be positive"));
            }
        }
        Ok(())
    }

    /// Checks the rules between the fields and a number of nodes, those that the original interface
    /// checks at launch.
    ///
    /// # Errors
    /// [`Error::Argument`] with the rule and its numbers: all chunks and rings are positive, and the
    /// NVLink ring is cut into one part per node, each larger than both chunks.
    pub(crate) fn check_nodes(&self, nodes: u32) -> Result<()> {
        self.check_positive()?;
        let ring = self.num_max_nvl_chunked_recv_tokens;
        if nodes == 0 || !ring.is_multiple_of(nodes) {
            let rule = format!(
                "must be a multiple of the number of nodes, {nodes}: {ring} % {nodes} != 0; Config::for_nodes gives one"
            );
            return Err(Error::argument("num_max_nvl_chunked_recv_tokens", ring, rule));
        }
        let (part, nvl_send) = (ring / nodes, self.num_max_nvl_chunked_send_tokens);
        if nvl_send > part {
            let rule = format!(
                "must be at most num_max_nvl_chunked_recv_tokens / nodes = {ring} / {nodes} = {part}"
            );
            return Err(Error::argument("num_max_nvl_chunked_send_tokens", nvl_send, rule));
        }
        let chunk = self.num_max_rdma_chunked_send_tokens.max(nvl_send);
        if part <= chunk {
            let rule = format!(
                "divided by the number of nodes it must be above both send chunks: {ring} / {nodes} = {part}, not above {chunk}"
            );
            return Err(Error::argument("num_max_nvl_chunked_recv_tokens", ring, rule));
        }
        let (send, recv) = (self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens);
        if !recv.is_multiple_of(send) {
            let rule =
                format!("must be a multiple of num_max_rdma_chunked_send_tokens: {recv} % {send} != 0");
            return Err(Error::argument("num_max_rdma_chunked_recv_tokens", recv, rule));
        }
        Ok(())
    }

    /// The configuration of a buffer on `nodes` nodes: the default's ring is made for them.
    pub(super) fn of_buffer(self, nodes: u32) -> Self {
        if self == Config::default() { self.for_nodes(nodes) } else { self }
    }

    /// The same with the smallest NVLink ring, not below the present one, that suits `nodes` nodes.
    ///
    /// Where such a ring does not fit 32 bits, the ring is the largest multiple of `nodes` that
    /// does. The use of the configuration then rejects chunks that are too large for it.
    pub fn for_nodes(self, nodes: u32) -> Self {
        let chunk = self.num_max_rdma_chunked_send_tokens.max(self.num_max_nvl_chunked_send_tokens);
        let (nodes, least) = (nodes.max(1), chunk.saturating_add(1).saturating_mul(nodes));
        let ring = self.num_max_nvl_chunked_recv_tokens.max(least).checked_next_multiple_of(nodes);
        let ring = ring.unwrap_or_else(|| largest_multiple(nodes));
        Config { num_max_nvl_chunked_recv_tokens: ring, ..self }
    }

    /// The default chunks with `num_sms` multiprocessors.
    ///
    /// # Errors
    /// [`Error::Argument`] where `num_sms` is odd or 0.
    pub fn with_sms(num_sms: u32) -> Result<Self> {
        let d = Config::default();
        Config::new(
            num_sms,
            d.num_max_nvl_chunked_send_tokens,
            d.num_max_nvl_chunked_recv_tokens,
            d.num_max_rdma_chunked_send_tokens,
            d.num_max_rdma_chunked_recv_tokens,
        )
    }

    /// Channels: contiguous ranges that every rank cuts its tokens into.
    pub fn num_channels(&self) -> u32 {
        self.num_sms / 2
    }

    /// Bytes of NVLink buffer that the hint of the original interface gives, for rows of
    /// `hidden_bytes` and `num_ranks` ranks with `ranks_per_node` to a node. A hint that does not
    /// fit 64 bits is the largest multiple of 128.
    pub fn nvl_buffer_size_hint(&self, hidden_bytes: u64, num_ranks: u32, ranks_per_node: u32) -> u64 {
        let (channels, ranks) = (self.num_channels() as u64, num_ranks.min(ranks_per_node) as u64);
        let nodes = (num_ranks / ranks_per_node.max(1)).max(1) as u64;
        let slots = product(&[channels, ranks, self.num_max_nvl_chunked_recv_tokens as u64]);
        let control = product(&[channels, ranks, 2 * nodes + 3, 4]);
        let slot = hidden_bytes.saturating_add(8 + HINT_COLUMNS * (8 + 4 + 4));
        align(control.saturating_add(slots.saturating_mul(slot)))
    }

    /// Bytes of RDMA buffer that the hint of the original interface gives; 0 on one node. A hint
    /// that does not fit 64 bits is the largest multiple of 128.
    pub fn rdma_buffer_size_hint(&self, hidden_bytes: u64, num_ranks: u32, ranks_per_node: u32) -> u64 {
        if num_ranks <= ranks_per_node {
            return 0;
        }
        let (channels, peers) = (self.num_channels() as u64, ranks_per_node as u64);
        let nodes = (num_ranks / ranks_per_node.max(1)) as u64;
        let slots = product(&[channels, nodes, self.num_max_rdma_chunked_recv_tokens as u64, 2]);
        let control = product(&[channels, nodes, (2 * peers + 2) * 2 * 4 + 2 * 8]);
        let slot = hidden_bytes.saturating_add(8 + HINT_COLUMNS * (8 + 4 + 4) + 16);
        align(control.saturating_add(slots.saturating_mul(slot)))
    }
}

/// Bytes of RDMA buffer for the low-latency mode, for `max_tokens` tokens per rank of `hidden` BF16
/// elements. A hint that does not fit 64 bits is the largest multiple of 128.
pub fn low_latency_rdma_size_hint(max_tokens: u64, hidden: u64, num_ranks: u64, num_experts: u64) -> u64 {
    let _ = num_ranks; // the hint is the same for every number of ranks
    let combine = hidden.saturating_mul(2);
    let dispatch = combine.max(hidden.saturating_add(4 * (hidden / 128))).saturating_add(16);
    let send = max_tokens.saturating_mul(dispatch).max(product(&[num_experts, max_tokens, combine]));
    let receive = product(&[num_experts, max_tokens, dispatch.max(combine)]);
    let half = send.saturating_add(receive).saturating_add(num_experts.saturating_mul(8));
    half.saturating_mul(2).saturating_add(SIZE_ALIGN) / SIZE_ALIGN * SIZE_ALIGN
}

/// `bytes` rounded up to a multiple of [`SIZE_ALIGN`]; the largest one where that does not fit.
fn align(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(SIZE_ALIGN).unwrap_or(u64::MAX / SIZE_ALIGN * SIZE_ALIGN)
}

/// The product; the largest number where it does not fit.
fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |product, factor| product.saturating_mul(*factor))
}

/// The largest multiple of `of` that fits 32 bits; `of` is not 0.
fn largest_multiple(of: u32) -> u32 {
    u32::MAX / of * of
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_equal_the_published_check_figures() {
        let config = Config::new(20, 6, 256, 6, 128).unwrap();
        // 80 (channel, rank) pairs * 256 slots * 16392 bytes, plus 80 * 7 * 4 of control.
        assert_eq!(config.nvl_buffer_size_hint(14336, 16, 8), align(80 * 256 * 16392 + 80 * 7 * 4));
        let rdma = config.rdma_buffer_size_hint(14336, 16, 8);
        assert!((83_000_000..89_000_000).contains(&rdma), "{rdma}");
        // The 152-SM settings: 2.55 GB with 8 peers, 1.28 GB with 4; the functional test 639 MB.
        let wide = Config::new(152, 8, 256, 16, 128).unwrap();
        assert_eq!(wide.nvl_buffer_size_hint(14336, 16, 8) / 10_000_000, 255);
        assert_eq!(wide.nvl_buffer_size_hint(14336, 8, 4) / 10_000_000, 127);
        assert_eq!(wide.nvl_buffer_size_hint(2048, 16, 8) / 1_000_000, 638);
        assert_eq!(wide.rdma_buffer_size_hint(2048, 8, 8), 0);
    }

    #[test]
    fn rules_with_nodes_name_their_numbers() {
        let seed = Config::new(152, 8, 256, 16, 128).unwrap();
        for nodes in [2, 4, 8] {
            assert!(seed.check_nodes(nodes).is_ok(), "{nodes}");
        }
        for (nodes, text) in [(3, "256 % 3"), (18, "256 % 18"), (20, "256 % 20"), (16, "256 / 16 = 16")] {
            let error = seed.check_nodes(nodes).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
            assert!(seed.for_nodes(nodes).check_nodes(nodes).is_ok(), "{nodes}");
        }
    }

    #[test]
    fn rdma_ring_is_rounded_up_to_chunks() {
        assert_eq!(Config::new(20, 6, 256, 6, 256).unwrap().num_max_rdma_chunked_recv_tokens, 258);
    }

    #[test]
    fn a_ring_that_cannot_be_rounded_is_refused_with_the_largest_one() {
        let error = Config::new(20, 6, 256, 2_000_000_000, 4_000_000_001).unwrap_err().to_string();
        assert!(error.starts_with("num_max_rdma_chunked_recv_tokens = 4000000001"), "{error}");
        assert!(error.contains("= 2000000000") && error.ends_with("give at most 4000000000"), "{error}");
        assert!(Config::new(20, 6, 256, 2_000_000_000, 4_000_000_000).is_ok());
    }

    #[test]
    fn rings_of_many_nodes_stay_multiples() {
        let large = Config::new(20, 6, 256, 2_000_000_000, 4_000_000_000).unwrap().for_nodes(3);
        let error = large.check_nodes(3).unwrap_err().to_string();
        assert!(error.starts_with("num_max_nvl_chunked_recv_tokens = 4294967295"), "{error}");
        // A ring that cannot be rounded up, with chunks that fit a smaller one.
        let ring = Config::new(20, 6, u32::MAX, 6, 258).unwrap().for_nodes(4);
        assert_eq!(ring.num_max_nvl_chunked_recv_tokens, u32::MAX - 3);
        assert!(ring.check_nodes(4).is_ok());
        let chunk = Config { num_max_nvl_chunked_send_tokens: u32::MAX, ..Config::default() }.for_nodes(1);
        assert_eq!(chunk.num_max_nvl_chunked_recv_tokens, u32::MAX);
    }

    #[test]
    fn hints_that_do_not_fit_are_the_largest() {
        const LARGEST: u64 = u64::MAX - 127;
        let large = Config::new(u32::MAX - 1, 6, u32::MAX, 1, u32::MAX).unwrap();
        assert_eq!(large.nvl_buffer_size_hint(u64::MAX, u32::MAX, u32::MAX), LARGEST);
        assert_eq!(large.nvl_buffer_size_hint(14336, u32::MAX, 8), LARGEST);
        assert_eq!(large.rdma_buffer_size_hint(u64::MAX, u32::MAX, 1), LARGEST);
        assert_eq!(large.rdma_buffer_size_hint(14336, u32::MAX, u32::MAX - 1), LARGEST);
        assert_eq!(large.rdma_buffer_size_hint(14336, 8, 0), LARGEST);
        for (tokens, hidden, experts) in [(u64::MAX, 7168, 288), (128, u64::MAX, 288), (128, 7168, u64::MAX)]
        {
            assert_eq!(low_latency_rdma_size_hint(tokens, hidden, 8, experts), LARGEST);
        }
        assert_eq!(low_latency_rdma_size_hint(u64::MAX, u64::MAX, u64::MAX, u64::MAX), LARGEST);
    }

    #[test]
    fn every_rule_names_its_field() {
        for (config, field) in [
            (Config::new(0, 6, 256, 6, 128), "num_sms"),
            (Config::new(7, 6, 256, 6, 128), "num_sms"),
            (Config::new(20, 0, 256, 6, 128), "num_max_nvl_chunked_send_tokens"),
            (Config::new(20, 256, 256, 6, 128), "num_max_nvl_chunked_send_tokens"),
            (Config::new(20, 6, 256, 6, 0), "num_max_rdma_chunked_recv_tokens"),
            (Config::new(20, 6, 256, 100, 150), ""),
        ] {
            match config {
                Ok(config) => assert!(field.is_empty(), "{config:?} should break {field}"),
                Err(error) => assert!(error.to_string().starts_with(field) && !field.is_empty(), "{error}"),
            }
        }
        assert!(Config::new(20, 6, 256, 128, 128).is_err());
    }
}
