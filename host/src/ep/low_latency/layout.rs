//! Where things are in a low-latency pool, and in the memory that a rank keeps to itself.

use epoxide_gpu::layout::{
    ControlWord, DevicePtr, LowLatencyControl, LowLatencyPlace, LowLatencyTables, LowLatencyTurns, MAX_RANKS,
    ROW_ALIGN, Section, row_stride,
};

use super::options::Options;

/// Sections behind each other, each at a multiple of [`ROW_ALIGN`].
#[derive(Debug, Default)]
struct Sections {
    sections: Vec<Section>,
    bytes: u64,
}

impl Sections {
    fn push(&mut self, section: Section) -> u64 {
        let at = self.bytes.next_multiple_of(ROW_ALIGN);
        self.bytes = at + section.bytes;
        self.sections.push(section.at(at));
        at
    }
}

/// A pool: the places in it, and its parts by name.
#[derive(Debug)]
pub(super) struct PoolLayout {
    pub places: Vec<LowLatencyPlace>,
    pub sections: Vec<Section>,
    pub bytes: u64,
}

impl PoolLayout {
    pub fn new(options: &Options, num_ranks: u32) -> PoolLayout {
        const RANKS: u64 = MAX_RANKS as u64;
        const CONTROL: &[Section] = &[
            Section::array("ready", RANKS, size_of::<ControlWord>() as u64),
            Section::array("calls", RANKS, 16).at(size_of::<ControlWord>() as u64 * RANKS),
        ];
        let mut pool = Sections::default();
        pool.push(Section::one("control", size_of::<LowLatencyControl>() as u64).of(CONTROL));
        let (tokens, topk) = (u64::from(options.max_tokens), u64::from(options.num_topk));
        let (rows, chunks) = (u64::from(num_ranks) * tokens, options.chunks());
        let stride = row_stride(options.hidden * 2);
        let mut place = || LowLatencyPlace {
            arrived: pool.push(Section::array("arrived", RANKS, chunks * 8)),
            returned: pool.push(Section::array("returned", RANKS, chunks * 8)),
            ids: pool.push(Section::array("ids", RANKS * tokens, topk.div_ceil(2) * 8)),
            weights: pool.push(Section::array("weights", RANKS * tokens, topk * 4)),
            recv_x: pool.push(Section::array("recv_x", rows, stride)),
            recv_scales: pool.push(Section::array("recv_scales", options.max_scales(), rows * 4)),
            returned_x: pool.push(Section::array("returned_x", rows, stride)),
        };
        let places = (0..options.places).map(|_| place()).collect();
        let bytes = pool.bytes.next_multiple_of(ROW_ALIGN);
        PoolLayout { places, sections: pool.sections, bytes }
    }
}

/// What a rank keeps of its places: offsets in memory of its own.
#[derive(Debug)]
pub(super) struct OwnLayout {
    places: Vec<[u64; 11]>,
    pub sections: Vec<Section>,
    pub bytes: u64,
}

impl OwnLayout {
    /// Behind `local` bytes of something else.
    pub fn new(options: &Options, num_ranks: u32, local: Section) -> OwnLayout {
        let mut own = Sections::default();
        own.push(local);
        let (tokens, topk) = (u64::from(options.max_tokens), u64::from(options.num_topk));
        let (ranks, chunks) = (u64::from(num_ranks), options.chunks());
        let (rows, experts) = (ranks * tokens, u64::from(options.num_experts) / ranks);
        let mut place = || {
            [
                own.push(Section::array("num_tokens", MAX_RANKS as u64, 4)),
                own.push(Section::array("token_ranks", tokens, 4)),
                own.push(Section::array("expert_counts", experts, 4)),
                own.push(Section::array("expert_rows", experts, rows * 4)),
                own.push(Section::array("src_info", experts, rows * 4)),
                own.push(Section::array("layout_range", experts, ranks * 8)),
                own.push(Section::array("slots", rows, topk * 4)),
                own.push(Section::array("sent", chunks, 8)),
                own.push(Section::array("answered", MAX_RANKS as u64, chunks * 8)),
                own.push(Section::one("turns", size_of::<LowLatencyTurns>() as u64)),
                own.push(Section::array("combined_x", tokens, options.hidden * 2)),
            ]
        };
        let places = (0..options.places).map(|_| place()).collect();
        let bytes = own.bytes.next_multiple_of(ROW_ALIGN);
        OwnLayout { places, sections: own.sections, bytes }
    }

    /// Where they are in memory at `base`, place by place: what kernels are told, then the sums.
    pub fn at(&self, base: DevicePtr) -> Vec<(LowLatencyTables, DevicePtr)> {
        let tables = |offsets: &[u64; 11]| {
            let [
                num_tokens,
                token_ranks,
                expert_counts,
                expert_rows,
                src_info,
                layout_range,
                slots,
                sent,
                answered,
                turns,
                combined_x,
            ] = offsets.map(|offset| base.add(offset));
            let tables = LowLatencyTables {
                num_tokens,
                token_ranks,
                expert_counts,
                expert_rows,
                src_info,
                layout_range,
                slots,
                sent,
                answered,
                turns,
            };
            (tables, combined_x)
        };
        self.places.iter().map(tables).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps_and_everything_has_a_name() {
        let options = Options::new(5, 24, 3, 12).places(2).chunk_tokens(2);
        let (pool, own) =
            (PoolLayout::new(&options, 3), OwnLayout::new(&options, 3, Section::one("local", 32)));
        for (sections, bytes) in [(&pool.sections, pool.bytes), (&own.sections, own.bytes)] {
            for pair in sections.windows(2) {
                assert!(pair[0].offset + pair[0].bytes <= pair[1].offset, "{pair:?}");
                assert_eq!(pair[1].offset % ROW_ALIGN, 0);
            }
            let last = sections[sections.len() - 1];
            assert!(last.offset + last.bytes <= bytes);
        }
        let [first, second] = pool.places[..] else { panic!("{:?}", pool.places) };
        assert!(first.returned_x < second.arrived);
        let name = |at| Section::name_of(&pool.sections, at).unwrap();
        assert_eq!(name(second.recv_x + 7 * 128 + 4), "recv_x[7] + 0x4");
        assert_eq!(name(first.arrived + 3 * 8 + 8), "arrived[1] + 0x8");
    }
}
