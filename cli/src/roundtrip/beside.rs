//! Work that runs beside the round trips, and how both end.

use std::time::Duration;

use epoxide_testing::neighbour::Neighbour;

use crate::output::Voice;
use crate::ranks::Rank;
use crate::stop::{Result, Stop};

/// Threads that use the rank's device as other libraries do, if a flag asks for them.
pub struct Beside(Option<Neighbour>);

impl Beside {
    pub fn start(rank: &Rank, is_wanted: bool) -> Beside {
        // An interpreter has no cycles to spare.
        let pause = Duration::from_micros(if rank.device.info().is_virtual { 5_000 } else { 100 });
        Beside(is_wanted.then(|| Neighbour::start(&rank.device, pause)))
    }

    /// Ends the threads, and with them a test that has passed. Buffers live until then: no rank
    /// leaves while another still uses its pool.
    pub fn end(self, rank: &Rank, voice: &Voice) -> Result<()> {
        if let Some(neighbour) = self.0 {
            let calls = rank.gather(neighbour.stop().map_err(Stop::from))?.iter().sum::<u64>();
            voice.line(format!("[neighbour] OK ({calls} rounds of its threads beside all of this)"));
        }
        rank.gather(Ok(()))?;
        voice.line("PASS");
        Ok(())
    }
}
