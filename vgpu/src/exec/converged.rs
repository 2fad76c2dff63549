//! Lanes of a warp that are sure to run together under every schedule.
//!
//! The groups of a warp depend on the run: they join again where the scheduler brings them
//! together. A program may count on less. Lanes that a branch separated are together again behind a
//! `bar.warp.sync` of theirs, and behind an aligned block barrier. In front of the latter, the
//! assembler converges the warp. They are together nowhere else.

/// Sets of lanes without a common one. Lanes of one set have taken the same path since they last
/// met.
#[derive(Debug, Default)]
pub(super) struct Converged {
    sets: Vec<u32>,
    /// The instruction that last took lanes apart.
    pub(super) parted_at: u32,
}

impl Converged {
    /// A warp begins: all of its lanes are together.
    pub(super) fn start(&mut self, live: u32) {
        self.sets.clear();
        self.sets.push(live);
        self.parted_at = 0;
    }

    /// The lanes `some` go another way than the others, from instruction `pc` on.
    pub(super) fn part(&mut self, some: u32, pc: u32) {
        for i in 0..self.sets.len() {
            let (here, there) = (self.sets[i] & some, self.sets[i] & !some);
            if here != 0 && there != 0 {
                self.sets[i] = here;
                self.sets.push(there);
                self.parted_at = pc;
            }
        }
    }

    /// The lanes `some` have waited for each other, and go on together.
    pub(super) fn meet(&mut self, some: u32) {
        self.sets.retain_mut(|lanes| {
            *lanes &= !some;
            *lanes != 0
        });
        self.sets.push(some);
    }

    /// The lanes that are converged with `lane`.
    pub(super) fn with(&self, lane: u32) -> u32 {
        self.sets.iter().find(|lanes| *lanes >> lane & 1 != 0).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_part_and_meet() {
        let mut lanes = Converged::default();
        lanes.start(0xff);
        // A split by all lanes, or by none, separates no lanes.
        lanes.part(0xff, 3);
        lanes.part(0, 4);
        assert_eq!((lanes.with(0), lanes.parted_at), (0xff, 0));
        lanes.part(0x0f, 5);
        lanes.part(0x33, 6);
        assert_eq!([0, 2, 4, 6].map(|lane| lanes.with(lane)), [0x03, 0x0c, 0x30, 0xc0]);
        assert_eq!(lanes.parted_at, 6);
        // Some meet, of three sets; the rest stays as it was.
        lanes.meet(0x1e);
        assert_eq!([0, 1, 2, 4, 5, 6].map(|lane| lanes.with(lane)), [0x01, 0x1e, 0x1e, 0x1e, 0x20, 0xc0]);
        lanes.meet(0xff);
        assert_eq!(lanes.with(7), 0xff);
        lanes.start(1);
        assert_eq!((lanes.with(0), lanes.with(1), lanes.parted_at), (1, 0, 0));
    }
}
