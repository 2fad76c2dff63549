//! Named sections of the memory that kernels share with each other and with the host, for reports.

use core::mem::offset_of;

use super::{
    ControlWord, FEW_RANKS, FailedPlans, LocalState, MAX_CHANNELS, MAX_LOCAL_EXPERTS, MAX_NODES, MAX_RANKS,
    MAX_WORLD, NodePath, PlanHeader, PoolLayout, QueueHandle, SIGNATURE_NAMES, Status, WireLayout,
    done_offset, message, message_offset, ready_offset, relay_message, row_stride, staged_offset,
    wire_message,
};

/// A part of a piece of memory, or of an element of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// Its name; empty where it is one more dimension of the array around it.
    pub name: &'static str,
    /// Where it begins, in bytes from the start of the section around it.
    pub offset: u64,
    /// Bytes, padding behind it included where that is simpler.
    pub bytes: u64,
    /// Bytes from one element of an array to the next; 0 where the section is not an array.
    pub stride: u64,
    /// The parts of the section, or of each element of an array.
    pub parts: &'static [Section],
}

impl Section {
    /// Something of `bytes` bytes at offset 0.
    pub const fn one(name: &'static str, bytes: u64) -> Section {
        Section { name, offset: 0, bytes, stride: 0, parts: &[] }
    }

    /// An array of `count` elements at offset 0, each `stride` bytes from the next.
    pub const fn array(name: &'static str, count: u64, stride: u64) -> Section {
        Section { name, offset: 0, bytes: count * stride, stride, parts: &[] }
    }

    /// The same at another offset.
    pub const fn at(self, offset: u64) -> Section {
        Section { offset, ..self }
    }

    /// The same, made of `parts`.
    pub const fn of(self, parts: &'static [Section]) -> Section {
        Section { parts, ..self }
    }

    /// The name of byte `at` of memory with these sections, such as `ready[3]` or
    /// `recv_x[17] + 0x40`; `None` between them.
    pub fn name_of(sections: &[Section], mut at: u64) -> Option<String> {
        let mut name = String::new();
        let mut inside = sections;
        while let Some(section) = inside.iter().find(|s| (s.offset..s.offset + s.bytes).contains(&at)) {
            if !name.is_empty() && !section.name.is_empty() {
                name.push('.');
            }
            name += section.name;
            at -= section.offset;
            if let Some(index) = at.checked_div(section.stride) {
                name += &format!("[{index}]");
                at %= section.stride;
            }
            inside = section.parts;
        }
        if name.is_empty() {
            return None;
        }
        if at != 0 {
            name += &format!(" + {at:#x}");
        }
        Some(name)
    }
}

/// The sections of a struct's fields.
macro_rules! fields {
    ($ty:ty { $($field:ident),+ $(,)? }) => {
        &[$(
            Section::one(stringify!($field), size_of_field(|value: &$ty| &value.$field))
                .at(offset_of!($ty, $field) as u64),
        )+]
    };
}

const fn size_of_field<T, F>(_: fn(&T) -> &F) -> u64 {
    size_of::<F>() as u64
}

/// The fields of a [`PlanHeader`].
pub const PLAN_HEADER: &[Section] = fields!(PlanHeader {
    status,
    num_recv_tokens,
    peer,
    detail,
    theirs,
    ours,
    tag,
    num_rdma_recv_tokens,
    epoch,
});

/// The fields of a [`LocalState`].
pub const LOCAL_STATE: &[Section] =
    fields!(LocalState { epoch, ticket, abort, left_out, started, recorded, left_out_high, claims });

/// The fields of a [`Status`].
pub const STATUS: &[Section] = fields!(Status { code, peer, epoch, needed, seen, waited_ns, call });

/// The fields of [`FailedPlans`], behind a [`Status`].
pub const FAILED_PLANS: &[Section] = fields!(FailedPlans { count, plans });

/// The fields of a [`QueueHandle`].
pub const QUEUE_HANDLE: &[Section] = fields!(QueueHandle { queue, posted });

/// The fields of a [`NodePath`].
pub const NODE_PATH: &[Section] = fields!(NodePath { memory, peer, peer_on_host });

/// `count` packets of a count message from packet `first` on.
const fn packets(name: &'static str, first: u32, count: usize) -> Section {
    words(name, first, count, message_offset(0, 1))
}

/// `count` words of `bytes` bytes from word `first` on.
const fn words(name: &'static str, first: u32, count: usize, bytes: u64) -> Section {
    let section = Section::array(name, count as u64, bytes).at(first as u64 * bytes);
    // A single one has no index.
    Section { stride: if count == 1 { 0 } else { bytes }, ..section }
}

const MESSAGE: &[Section] = &[
    packets("signature", message::SIGNATURE, SIGNATURE_NAMES.len()),
    packets("invalid", message::INVALID, 1),
    packets("rank_counts", message::RANK_COUNTS, MAX_RANKS),
    packets("channel_starts", message::CHANNEL_STARTS, MAX_CHANNELS as usize),
    packets("expert_counts", message::EXPERT_COUNTS, MAX_LOCAL_EXPERTS as usize),
    packets("expert_rows", message::EXPERT_ROWS, 1),
    packets("expert_starts", message::EXPERT_STARTS, MAX_LOCAL_EXPERTS as usize),
];

const RELAY_MESSAGE: &[Section] = &[
    packets("signature", wire_message::SIGNATURE, SIGNATURE_NAMES.len()),
    packets("invalid", wire_message::INVALID, 1),
    packets("node_counts", wire_message::NODE_COUNTS, MAX_NODES),
    packets("rank_counts", wire_message::RANK_COUNTS, MAX_WORLD),
    packets("channel_starts", relay_message::CHANNEL_STARTS, MAX_CHANNELS as usize),
    packets("expert_counts", relay_message::EXPERT_COUNTS, MAX_LOCAL_EXPERTS as usize),
];

const WIRE_MESSAGE: &[Section] = &[
    words("signature", wire_message::SIGNATURE, SIGNATURE_NAMES.len(), 4),
    words("invalid", wire_message::INVALID, 1, 4),
    words("node_counts", wire_message::NODE_COUNTS, MAX_NODES, 4),
    words("rank_counts", wire_message::RANK_COUNTS, MAX_WORLD, 4),
    words("channel_starts", wire_message::CHANNEL_STARTS, (1 + FEW_RANKS) * MAX_CHANNELS as usize, 4),
    words("expert_counts", wire_message::EXPERT_COUNTS, FEW_RANKS * MAX_LOCAL_EXPERTS as usize, 4),
];

/// Sections from one of `starts` to the next, the last one to `end`.
fn in_a_row<const N: usize>(sections: [(u64, Section); N], end: u64) -> [Section; N] {
    std::array::from_fn(|i| {
        let (offset, section) = sections[i];
        let next = sections.get(i + 1).map_or(end, |next| next.0);
        Section { offset, bytes: next - offset, ..section }
    })
}

impl PoolLayout {
    /// The sections of a pool where there are `num_nodes` nodes, when it holds received rows of
    /// `recv_row_bytes` bytes and rows of `combine_row_bytes` bytes for combine.
    pub fn sections(&self, num_nodes: u32, recv_row_bytes: u64, combine_row_bytes: u64) -> [Section; 12] {
        const LINE: u64 = size_of::<ControlWord>() as u64;
        const OF_CHANNELS: &[Section] = &[Section::array("", MAX_CHANNELS as u64, 8)];
        let array = |name, stride| Section::array(name, 0, stride);
        let messages = match num_nodes {
            1 => array("messages", message_offset(1, 0)).of(MESSAGE),
            _ => array("messages", relay_message::WORDS as u64 * message_offset(0, 1)).of(RELAY_MESSAGE),
        };
        let sections = [
            (ready_offset(0), array("ready", LINE)),
            (done_offset(0), array("done", LINE)),
            (staged_offset(0, 0), array("staged", staged_offset(1, 0) - staged_offset(0, 0)).of(OF_CHANNELS)),
            (self.messages, messages),
            (self.recv_x, array("recv_x", row_stride(recv_row_bytes))),
            (self.recv_scales, array("recv_scales", 4)),
            (self.recv_topk_idx, array("recv_topk_idx", 8)),
            (self.recv_topk_weights, array("recv_topk_weights", 4)),
            (self.recv_src_idx, array("recv_src_idx", 4)),
            (self.recv_src_meta, array("recv_src_meta", 8)),
            (self.combine_x, array("combine_x", row_stride(combine_row_bytes))),
            (self.combine_weights, array("combine_weights", 4)),
        ];
        in_a_row(sections, self.bytes)
    }
}

impl WireLayout {
    /// The sections of wire memory. The contents of a slot depend on the operation.
    pub fn sections(&self) -> [Section; 7] {
        const LINE: u64 = size_of::<ControlWord>() as u64;
        const OF_CHANNELS: &[Section] = &[Section::array("", MAX_CHANNELS as u64, 8)];
        let array = |name, stride| Section::array(name, 0, stride);
        let sections = [
            (self.ready, array("ready", LINE)),
            (self.counts, array("counts", LINE)),
            (self.arrived, array("arrived", MAX_CHANNELS as u64 * 8).of(OF_CHANNELS)),
            (self.messages_out, array("messages_out", self.message_bytes).of(WIRE_MESSAGE)),
            (self.messages_in, array("messages_in", self.message_bytes).of(WIRE_MESSAGE)),
            (self.slots_out, array("slots_out", self.node_bytes)),
            (self.slots_in, array("slots_in", self.node_bytes)),
        ];
        in_a_row(sections, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Control;
    use super::*;

    /// Sections lie inside of `bytes` bytes, behind one another, and so do their parts in an
    /// element.
    fn check(sections: &[Section], bytes: u64) {
        let mut end = 0;
        for section in sections {
            assert!(section.offset >= end, "{} begins before {end:#x}", section.name);
            end = section.offset + section.bytes;
            assert!(end <= bytes, "{} ends behind {bytes:#x}", section.name);
            let element = if section.stride == 0 { section.bytes } else { section.stride };
            check(section.parts, element);
        }
    }

    const POOL: PoolLayout = PoolLayout {
        messages: 147_456,
        recv_x: 147_456 + 8 * 19_008,
        recv_scales: 304_768,
        // No scales.
        recv_topk_idx: 304_768,
        recv_topk_weights: 305_792,
        recv_src_idx: 306_816,
        recv_src_meta: 307_840,
        combine_x: 307_840,
        combine_weights: 315_008,
        rows: 32,
        bytes: 316_032,
    };

    #[test]
    fn offsets_of_a_pool_have_names() {
        let sections = POOL.sections(1, 48, 224);
        check(&sections, POOL.bytes);
        let name = |at| Section::name_of(&sections, at).unwrap();
        assert_eq!(name(ready_offset(3)), "ready[3]");
        assert_eq!(name(done_offset(7) + 12), "done[7] + 0xc");
        assert_eq!(name(staged_offset(0, 0)), "staged[0][0]");
        assert_eq!(name(staged_offset(63, 255) + 4), "staged[63][255] + 0x4");
        let packet = |src, word| POOL.messages + message_offset(src, word);
        assert_eq!(name(packet(2, message::SIGNATURE + 4)), "messages[2].signature[4]");
        assert_eq!(name(packet(0, message::INVALID)), "messages[0].invalid");
        assert_eq!(name(packet(7, message::RANK_COUNTS + 1)), "messages[7].rank_counts[1]");
        assert_eq!(name(packet(1, message::CHANNEL_STARTS + 255)), "messages[1].channel_starts[255]");
        assert_eq!(name(packet(1, message::EXPERT_ROWS - 1) + 4), "messages[1].expert_counts[1023] + 0x4");
        assert_eq!(name(packet(1, message::EXPERT_ROWS)), "messages[1].expert_rows");
        assert_eq!(name(packet(7, message::WORDS - 1)), "messages[7].expert_starts[1023]");
        assert_eq!(name(POOL.recv_x + 17 * row_stride(48) + 0x20), "recv_x[17] + 0x20");
        assert_eq!(name(POOL.recv_topk_idx + 8), "recv_topk_idx[1]");
        assert_eq!(name(POOL.combine_x + 2 * row_stride(224)), "combine_x[2]");
        assert_eq!(name(POOL.bytes - 4), "combine_weights[255]");
        assert_eq!(Section::name_of(&sections, POOL.bytes), None);
    }

    #[test]
    fn across_nodes_messages_are_longer() {
        let ranks = 16;
        let shift = ranks * relay_message::WORDS as u64 * 8 - 8 * 19_008;
        let more = |offset| offset + shift;
        let pool = PoolLayout {
            messages: POOL.messages,
            recv_x: more(POOL.recv_x),
            recv_scales: more(POOL.recv_scales),
            recv_topk_idx: more(POOL.recv_topk_idx),
            recv_topk_weights: more(POOL.recv_topk_weights),
            recv_src_idx: more(POOL.recv_src_idx),
            recv_src_meta: more(POOL.recv_src_meta),
            combine_x: more(POOL.combine_x + 256),
            combine_weights: more(POOL.combine_weights + 256),
            rows: POOL.rows,
            bytes: more(POOL.bytes + 256),
        };
        let sections = pool.sections(2, 48, 48);
        check(&sections, pool.bytes);
        let packet =
            |src: u64, word: u32| pool.messages + (src * relay_message::WORDS as u64 + word as u64) * 8;
        let name = |at| Section::name_of(&sections, at).unwrap();
        assert_eq!(name(packet(15, wire_message::NODE_COUNTS + 31)), "messages[15].node_counts[31]");
        assert_eq!(name(packet(9, relay_message::EXPERT_COUNTS)), "messages[9].expert_counts[0]");
        assert_eq!(name(pool.recv_src_meta + 12), "recv_src_meta[1] + 0x4");
    }

    #[test]
    fn offsets_of_wire_memory_have_names() {
        let line = size_of::<ControlWord>() as u64 * MAX_NODES as u64;
        let message_bytes = (wire_message::WORDS as u64 * 4).next_multiple_of(128);
        let arrived = 2 * line;
        let messages_out = arrived + MAX_NODES as u64 * MAX_CHANNELS as u64 * 8;
        let messages_in = messages_out + 2 * message_bytes;
        let slots_out = messages_in + 2 * message_bytes;
        let slots_in = slots_out + 2 * 1024;
        let wire = WireLayout {
            ready: 0,
            counts: line,
            arrived,
            messages_out,
            messages_in,
            message_bytes,
            slots_out,
            slots_in,
            node_bytes: 1024,
            slots: 2,
            bytes: slots_in + 2 * 1024,
        };
        let sections = wire.sections();
        check(&sections, wire.bytes);
        let name = |at| Section::name_of(&sections, at).unwrap();
        assert_eq!(name(wire.counts + 128), "counts[1]");
        assert_eq!(name(arrived + (MAX_CHANNELS as u64 + 17) * 8), "arrived[1][17]");
        let word = |word: u32| messages_in + message_bytes + word as u64 * 4;
        assert_eq!(name(word(wire_message::RANK_COUNTS + 5)), "messages_in[1].rank_counts[5]");
        assert_eq!(name(slots_in + 1024 + 0x30), "slots_in[1] + 0x30");
    }

    #[test]
    fn structs_are_named_whole() {
        // Every field has a name: the named bytes are all of the struct's, except for its padding.
        let named = |fields: &[Section]| fields.iter().map(|field| field.bytes).sum::<u64>();
        let structs = [
            (PLAN_HEADER, size_of::<PlanHeader>(), 0),
            (LOCAL_STATE, size_of::<LocalState>(), 4),
            (STATUS, size_of::<Status>(), 0),
            (FAILED_PLANS, size_of::<FailedPlans>(), 0),
            (QUEUE_HANDLE, size_of::<QueueHandle>(), 0),
            (NODE_PATH, size_of::<NodePath>(), 0),
        ];
        for (fields, bytes, padding) in structs {
            check(fields, bytes as u64);
            assert_eq!(named(fields) + padding, bytes as u64, "{fields:?}");
        }
        let control = size_of::<Control>() as u64;
        assert_eq!(staged_offset(MAX_RANKS as u32, 0), control);
        assert_eq!(
            Section::name_of(PLAN_HEADER, offset_of!(PlanHeader, tag) as u64 + 4).unwrap(),
            "tag + 0x4"
        );
    }
}
