//! The mbarrier object: 8 opaque bytes in shared memory.
//!
//! | bits | meaning |
//! |---|---|
//! | 0..20 | pending arrivals of the current phase |
//! | 20..40 | arrivals expected in the next phase |
//! | 40..61 | transaction count in bytes, two's complement |
//! | 61 | phase |
//! | 62..64 | `10` while initialised, so that stray bytes are detected |
//!
//! A phase completes when no arrival and no byte is pending; the next one then starts with the
//! expected count.

/// Largest arrival count.
pub(crate) const MAX_COUNT: u32 = (1 << 20) - 1;

/// The decoded object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mbarrier {
    pub(crate) pending: u32,
    pub(crate) expected: u32,
    pub(crate) tx: i32,
    pub(crate) phase: u32,
}

impl Mbarrier {
    pub(crate) fn new(count: u32) -> Result<Self, String> {
        if count == 0 || count > MAX_COUNT {
            return Err(format!("count {count} is not in 1..={MAX_COUNT}"));
        }
        Ok(Self { pending: count, expected: count, tx: 0, phase: 0 })
    }

    pub(crate) fn from_bits(bits: u64) -> Result<Self, String> {
        if bits >> 62 != 0b10 {
            return Err("not initialised (or overwritten)".to_string());
        }
        Ok(Self {
            pending: bits as u32 & MAX_COUNT,
            expected: (bits >> 20) as u32 & MAX_COUNT,
            tx: (((bits >> 40) as u32) << 11) as i32 >> 11,
            phase: (bits >> 61) as u32 & 1,
        })
    }

    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.pending)
            | u64::from(self.expected) << 20
            | u64::from(self.tx as u32 & 0x1f_ffff) << 40
            | u64::from(self.phase) << 61
            | 0b10 << 62
    }

    fn complete_phase(&mut self) {
        if self.pending == 0 && self.tx == 0 {
            self.phase ^= 1;
            self.pending = self.expected;
        }
    }

    fn add_tx(&mut self, bytes: i64) -> Result<(), String> {
        let tx = i64::from(self.tx) + bytes;
        if tx.unsigned_abs() > u64::from(MAX_COUNT) {
            return Err(format!("transaction count {tx} is not in +-{MAX_COUNT} bytes"));
        }
        self.tx = tx as i32;
        Ok(())
    }

    /// `expect_tx` followed by `count` arrivals.
    pub(crate) fn arrive(&mut self, count: u32, expect_bytes: Option<u32>) -> Result<(), String> {
        if let Some(bytes) = expect_bytes {
            self.add_tx(i64::from(bytes))?;
        }
        if count == 0 || count > self.pending {
            return Err(format!("{count} arrivals, {} are pending in this phase", self.pending));
        }
        self.pending -= count;
        self.complete_phase();
        Ok(())
    }

    /// The present phase waits for one more arrival.
    pub(crate) fn expect_one_more(&mut self) -> Result<(), String> {
        if self.pending == MAX_COUNT {
            return Err(format!("more than {MAX_COUNT} arrivals are pending in this phase"));
        }
        self.pending += 1;
        Ok(())
    }

    /// Arrival that also leaves the barrier for later phases.
    pub(crate) fn arrive_drop(&mut self, count: u32, expect_bytes: Option<u32>) -> Result<(), String> {
        if count > self.expected {
            return Err(format!("{count} arrivals dropped, {} are expected", self.expected));
        }
        self.expected -= count;
        self.arrive(count, expect_bytes)
    }

    pub(crate) fn expect_tx(&mut self, bytes: u32) -> Result<(), String> {
        self.add_tx(i64::from(bytes))?;
        self.complete_phase();
        Ok(())
    }

    pub(crate) fn complete_tx(&mut self, bytes: u32) -> Result<(), String> {
        self.add_tx(-i64::from(bytes))?;
        self.complete_phase();
        Ok(())
    }

    /// Whether the phase with this parity has completed.
    pub(crate) fn parity_done(self, parity: u32) -> bool {
        self.phase != parity & 1
    }

    /// Whether the phase in which `state` (an arrive's result) was current has completed.
    pub(crate) fn state_done(self, state: u64) -> Result<bool, String> {
        Ok(Self::from_bits(state)?.phase != self.phase)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_round_trip() {
        for tx in [0, 1, -1, MAX_COUNT as i32, -(MAX_COUNT as i32)] {
            let b = Mbarrier { pending: 3, expected: MAX_COUNT, tx, phase: 1 };
            assert_eq!(Mbarrier::from_bits(b.to_bits()), Ok(b));
        }
        assert!(Mbarrier::from_bits(0).is_err());
        assert!(Mbarrier::from_bits(u64::MAX).is_err());
    }

    #[test]
    fn phases_need_arrivals_and_bytes() {
        let mut b = Mbarrier::new(2).unwrap();
        let state = b.to_bits();
        b.arrive(1, Some(16)).unwrap();
        b.arrive(1, None).unwrap();
        assert!(!b.parity_done(0) && b.parity_done(1), "16 bytes are missing");
        b.complete_tx(16).unwrap();
        assert!(b.parity_done(0) && !b.parity_done(1));
        assert_eq!(b.state_done(state), Ok(true));
        assert_eq!((b.pending, b.tx, b.phase), (2, 0, 1));
        // Bytes may land before they are expected.
        b.complete_tx(32).unwrap();
        b.arrive(1, None).unwrap();
        b.arrive(1, Some(32)).unwrap();
        assert_eq!(b.phase, 0);
    }

    #[test]
    fn misuse() {
        assert!(Mbarrier::new(0).is_err());
        assert!(Mbarrier::new(MAX_COUNT + 1).is_err());
        let mut b = Mbarrier::new(1).unwrap();
        assert!(b.arrive(2, None).is_err());
        assert!(b.expect_tx(1 << 20).is_err());
        let mut b = Mbarrier::new(2).unwrap();
        b.arrive_drop(1, None).unwrap();
        b.arrive(1, None).unwrap();
        assert_eq!((b.pending, b.expected, b.phase), (1, 1, 1));
    }
}
