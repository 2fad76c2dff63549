//! How long a part of the test takes.

use std::time::Instant;

/// Wall time between calls.
pub struct Clock(pub Instant);

impl Clock {
    /// Seconds since the last call, or the start.
    pub fn lap(&mut self) -> f64 {
        let seconds = self.0.elapsed().as_secs_f64();
        self.0 = Instant::now();
        seconds
    }
}
