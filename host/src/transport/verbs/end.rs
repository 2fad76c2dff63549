//! This rank's end of a connection, and how it closes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::raw::{Completion, From, Qp, Write};
use super::register::Region;
use crate::error::{Error, Result};
use crate::transport::links::Receiving;
use crate::transport::setup::deadline;

/// The work request numbers of the two goodbyes, which no put has: puts are numbered from 1.
const OUR_GOODBYE: u64 = u64::MAX;
const THEIR_GOODBYE: u64 = u64::MAX - 1;
/// How long a leaving rank waits for its peers, whose last puts may be in flight or not
/// acknowledged. Ranks that leave together need far less.
const LINGER: Duration = Duration::from_secs(1);

/// One end of a connection. The queue puts over it, and the receiving side keeps it until the peer
/// has left too, since it receives the peer's puts. The goodbye is an empty message behind all
/// puts.
#[derive(Debug)]
pub(super) struct End {
    // Before the region: dropped first.
    qp: Qp,
    pub region: Arc<Region>,
    sent_goodbye: AtomicBool,
    goodbye_arrived: AtomicBool,
    peer_left: AtomicBool,
    broken: AtomicBool,
}

impl End {
    /// Makes the end of a pair that is connected, before any rank sends.
    pub fn new(qp: Qp, region: &Arc<Region>) -> Result<End> {
        qp.receive(THEIR_GOODBYE)?;
        Ok(End {
            qp,
            region: region.clone(),
            sent_goodbye: AtomicBool::default(),
            goodbye_arrived: AtomicBool::default(),
            peer_left: AtomicBool::default(),
            broken: AtomicBool::default(),
        })
    }

    /// Posts the writes as one chain.
    pub fn post(&self, writes: &[Write], operation: &str) -> Result<()> {
        self.qp.post(writes, operation)
    }

    /// Takes completions of writes.
    pub fn poll(&self) -> Result<Vec<Completion>> {
        let mut completions = self.qp.poll()?;
        completions.retain(|Completion { id, error }| {
            if error.is_some() {
                self.broken.store(true, Ordering::Release);
            }
            match (*id, error) {
                (OUR_GOODBYE, None) => self.goodbye_arrived.store(true, Ordering::Release),
                (THEIR_GOODBYE, None) => self.peer_left.store(true, Ordering::Release),
                (OUR_GOODBYE | THEIR_GOODBYE, Some(_)) => {}
                _ => return true,
            }
            false
        });
        Ok(completions)
    }

    /// Whether the polled completions include the peer's goodbye.
    pub fn peer_left(&self) -> bool {
        self.peer_left.load(Ordering::Acquire)
    }

    /// Sends the goodbye behind all puts, at most once.
    pub fn send_goodbye(&self) {
        let write = Write { id: OUR_GOODBYE, from: From::Nothing, to: 0, rkey: 0, signalled: true };
        match self.post(&[write], "goodbye") {
            Ok(()) => self.sent_goodbye.store(true, Ordering::Release),
            // The peer then treats this rank as dead.
            Err(error) => tracing::debug!("{error}"),
        }
    }

    /// Whether the wait can end: both ends have left, or this one failed.
    fn is_over(&self) -> bool {
        let is = |flag: &AtomicBool| flag.load(Ordering::Acquire);
        // A proxy that was left behind may hold the queue's lock in `ibv_poll_cq`.
        if !is(&self.sent_goodbye) || is(&self.broken) {
            return true;
        }
        // Only goodbyes are still to come; the queue has finished everything else.
        self.poll().is_err() || is(&self.broken) || (is(&self.goodbye_arrived) && is(&self.peer_left))
    }
}

/// All ends of a rank. This side receives nothing itself: the peers' cards write to memory.
#[derive(Debug)]
pub(super) struct Ends(pub Vec<Arc<End>>);

impl Receiving for Ends {
    fn failures(&self) -> Vec<(u32, Error)> {
        Vec::new()
    }

    fn close(&mut self) {
        let until = deadline(LINGER);
        while !self.0.iter().all(|end| end.is_over()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.0.clear();
    }
}
