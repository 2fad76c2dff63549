//! Waits that end at a deadline.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

pub(super) fn left(deadline: Instant) -> Duration {
    // Zero would mean for ever.
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

pub(super) fn wait_for(polled: &mut [PollFd<'_>], timeout: Duration) -> Result<(), Errno> {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
    match poll(polled, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}
