//! Worse networks for tests: delays, queues that lag, narrow links, cut links.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::put::{Interrupt, Put, PutQueue};
use super::setup::{LinkEnds, POLL_INTERVAL, deadline};
use crate::driver::Memory;
use crate::error::{Error, Result};
use crate::lock::lock;

/// How to degrade the queues of a rank. Clones are handles of the same links: a link cut by one is
/// cut for all.
#[derive(Debug, Clone, Default)]
pub struct Shaping {
    pub(super) seed: u64,
    pub(super) delay: Duration,
    pub(super) lags: Vec<(u32, u32, Duration)>,
    pub(super) bytes_per_second: Option<u64>,
    pub(super) cut_after: Vec<(u32, u64)>,
    pub(super) fail_after: Vec<(u32, u64)>,
    pub(super) cut: Arc<Mutex<BTreeSet<u32>>>,
}

impl Shaping {
    /// Changes nothing yet; `seed` draws the random delays.
    pub fn new(seed: u64) -> Shaping {
        Shaping { seed, ..Shaping::default() }
    }

    /// Every put waits for a random time below `most` before it starts. Its queue waits with it.
    pub fn delay_up_to(mut self, most: Duration) -> Shaping {
        self.delay = most;
        self
    }

    /// Every put of this queue to `peer` waits for `delay`, on top of a random one: the queue lags
    /// behind the others.
    pub fn lag(mut self, peer: u32, queue: u32, delay: Duration) -> Shaping {
        self.lags.push((peer, queue, delay));
        self
    }

    /// The most that a queue carries, in bytes of payload per second.
    pub fn bandwidth(mut self, bytes_per_second: u64) -> Shaping {
        self.bytes_per_second = Some(bytes_per_second.max(1));
        self
    }

    /// Cuts each queue to `peer` after its first `puts` puts.
    pub fn cut_after(mut self, peer: u32, puts: u64) -> Shaping {
        self.cut_after.push((peer, puts));
        self
    }

    /// Each queue to `peer` fails behind its first `puts` puts.
    pub fn fail_after(mut self, peer: u32, puts: u64) -> Shaping {
        self.fail_after.push((peer, puts));
        self
    }

    /// Cuts the link to `peer` now: later puts vanish without an error and never complete.
    pub fn cut(&self, peer: u32) {
        lock(&self.cut).insert(peer);
    }

    pub(super) fn is_cut(&self, peer: u32, puts: u64) -> bool {
        self.cut_after.iter().any(|(cut, after)| *cut == peer && puts >= *after)
            || lock(&self.cut).contains(&peer)
    }
}

/// Longest time that a put takes on a narrow link.
const LONGEST: Duration = Duration::from_secs(3600);

/// 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Random bits for delays, the same for a seed in every version (Steele, Lea and Flood, OOPSLA
/// 2014).
#[derive(Debug)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// A queue made worse. The order of its puts stays.
#[derive(Debug)]
pub struct Shaped {
    queue: Box<dyn PutQueue>,
    shaping: Shaping,
    ends: LinkEnds,
    interrupt: Interrupt,
    lag: Duration,
    random: SplitMix64,
    /// When the bytes so far are through the narrow link.
    free_at: Instant,
    passed: u64,
    vanished: bool,
}

impl Shaped {
    pub(super) fn new(queue: Box<dyn PutQueue>, shaping: &Shaping, ends: LinkEnds, index: u32) -> Shaped {
        let lags = shaping.lags.iter().filter(|(peer, queue, _)| (*peer, *queue) == (ends.peer, index));
        let lag = lags.map(|(_, _, delay)| *delay).sum();
        // Each queue draws its own delays.
        let ends_bits = u64::from(ends.rank) << 40 ^ u64::from(ends.peer) << 20 ^ u64::from(index);
        Shaped {
            interrupt: queue.interrupt(),
            queue,
            shaping: shaping.clone(),
            ends,
            lag,
            random: SplitMix64(shaping.seed ^ ends_bits.wrapping_mul(GOLDEN)),
            free_at: Instant::now(),
            passed: 0,
            vanished: false,
        }
    }

    /// False where the wait was interrupted.
    fn wait_until(&self, when: Instant) -> bool {
        loop {
            let left = when.saturating_duration_since(Instant::now());
            if self.interrupt.is_raised() {
                return false;
            }
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(POLL_INTERVAL));
        }
    }

    fn is_cut(&self) -> bool {
        self.vanished || self.shaping.is_cut(self.ends.peer, self.passed)
    }

    fn interrupted(&self, operation: &'static str) -> Error {
        self.ends.error(operation, "interrupted: this rank closes the link")
    }
}

impl PutQueue for Shaped {
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()> {
        for put in puts {
            let mut start = deadline(self.lag);
            if !self.shaping.delay.is_zero() {
                start += self.shaping.delay.mul_f64(fraction(self.random.next_u64()));
            }
            if let Some(bytes_per_second) = self.shaping.bytes_per_second {
                let takes = Duration::try_from_secs_f64(put.bytes as f64 / bytes_per_second as f64);
                let takes = takes.unwrap_or(LONGEST).min(LONGEST);
                self.free_at = self.free_at.max(Instant::now()) + takes;
                start = start.max(self.free_at);
            }
            if !self.wait_until(start) {
                return Err(self.interrupted("put"));
            }
            let fails = |(peer, after): &(u32, u64)| *peer == self.ends.peer && self.passed >= *after;
            if self.shaping.fail_after.iter().any(fails) {
                return Err(self.ends.error("put", "the queue fails, for a test"));
            }
            if self.is_cut() {
                self.vanished = true;
                continue;
            }
            self.queue.put_with_counter(std::slice::from_ref(put))?;
            self.passed += 1;
        }
        Ok(())
    }

    fn completed(&mut self) -> Result<u64> {
        self.queue.completed()
    }

    fn failure(&self) -> Option<Error> {
        self.queue.failure()
    }

    fn quiet(&mut self, timeout: Duration) -> Result<()> {
        if !self.vanished {
            return self.queue.quiet(timeout);
        }
        if !self.wait_until(deadline(timeout)) {
            return Err(self.interrupted("quiet"));
        }
        Err(self.ends.error("quiet", format!("puts did not leave within {timeout:?}")))
    }

    fn source(&self) -> Option<&Memory> {
        self.queue.source()
    }

    fn close(&mut self) {
        // A cut link passes nothing, not even a goodbye.
        if !self.is_cut() {
            self.queue.close();
        }
    }

    fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
    }
}

/// A number from 0 to below 1, from random bits.
fn fraction(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
