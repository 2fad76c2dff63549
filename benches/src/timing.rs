//! How calls are timed.

use epoxide::Result;
use epoxide::driver::Event;

use crate::bench::Bench;
use crate::measured::Samples;

/// Pairs of a dispatch and a combine in one timed chain. Few: NCCL is launched call by call. Each
/// launch takes the host about as long as the smallest calls take a device. It has to be done while
/// the L2 cache is emptied in front of them.
pub(crate) const CHAIN: u32 = 4;

impl Bench<'_> {
    /// Times every iteration by itself: L2 emptied if `flushed`, devices aligned, then one call
    /// between two events. All of it is enqueued ahead, so that the host's own delays stay out.
    pub fn isolated(&mut self, flushed: bool, call: impl FnMut(&mut Self) -> Result<()>) -> Result<Samples> {
        self.isolated_behind(|_| Ok(()), flushed, call)
    }

    /// The same, with a call that is not timed in front of each iteration.
    pub fn isolated_behind(
        &mut self,
        mut before: impl FnMut(&mut Self) -> Result<()>,
        flushed: bool,
        mut call: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<Samples> {
        let mut pairs = Vec::new();
        for iteration in 0..self.plan.warmup + self.plan.iters {
            before(self)?;
            if let (true, Some(flush)) = (flushed, &self.flush) {
                // SAFETY: the memory lives as long as the bench, which synchronises below.
                unsafe { self.rig.stream.fill(flush.ptr(), iteration as u8, flush.bytes())? };
            }
            self.barrier()?;
            let pair = (Event::timed(self.rig.buffer.device())?, Event::timed(self.rig.buffer.device())?);
            pair.0.record(&self.rig.stream)?;
            call(self)?;
            pair.1.record(&self.rig.stream)?;
            pairs.push(pair);
        }
        // The host has given the device all of it: it only looks on.
        for pair in &pairs {
            pair.1.synchronize()?;
            self.watch.step(self.rig.rank);
        }
        self.rig.stream.synchronize()?;
        self.rig.buffer.check()?;
        let timed = &pairs[self.plan.warmup as usize..];
        timed.iter().map(|(start, end)| Ok(start.elapsed_ms(end)? as f64 * 1e3)).collect()
    }

    /// Mean microseconds of calls that follow each other directly: one pair of events around all of
    /// them.
    pub fn back_to_back(&mut self, mut call: impl FnMut(&mut Self) -> Result<()>) -> Result<f64> {
        let (start, end) = (Event::timed(self.rig.buffer.device())?, Event::timed(self.rig.buffer.device())?);
        for _ in 0..self.plan.warmup {
            call(self)?;
            self.watch.step(self.rig.rank);
        }
        self.barrier()?;
        start.record(&self.rig.stream)?;
        for _ in 0..self.plan.iters {
            call(self)?;
        }
        end.record(&self.rig.stream)?;
        self.rig.stream.synchronize()?;
        (0..self.plan.iters).for_each(|_| self.watch.step(self.rig.rank));
        Ok(start.elapsed_ms(&end)? as f64 * 1e3 / self.plan.iters as f64)
    }

    /// Pairs one after the other, the time of one.
    pub fn pairs(&mut self, mut pair: impl FnMut(&mut Self) -> Result<()>) -> Result<Samples> {
        let chains = self.isolated(true, |bench| (0..CHAIN).try_for_each(|_| pair(bench)))?;
        Ok(chains.into_iter().map(|us| us / f64::from(CHAIN)).collect())
    }
}
