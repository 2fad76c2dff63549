//! Waiting for peers: received frames, late ranks, and the ranks to blame.

use std::time::{Duration, Instant};

use super::engine::Engine;
use super::frame::{Header, Kind, Signature};
use super::peers::Health;
use crate::call::Message;
use crate::error::{Error, Result};

/// How often the store is polled for a rank that has not joined.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl Engine {
    /// Fails when the group was aborted, here or by a peer, or when a mismatch was found.
    pub(crate) fn check_given_up(&self) -> Result<()> {
        if let Some(reason) = self.wake.reason() {
            return Err(self.error(Vec::new(), format!("the group was given up: {reason}")));
        }
        if let Some(mismatch) = &self.mismatch {
            return Err(mismatch.clone());
        }
        // An abort in a later operation does not end this one.
        let collective = self.current.as_ref().filter(|current| current.signature.operation.is_collective());
        let now = collective.map_or(u64::MAX, |current| current.sequence);
        if let Some((peer, sequence, reason)) = &self.aborted
            && *sequence <= now
        {
            return Err(self.error(vec![*peer], format!("rank {peer} gave the group up: {reason}")));
        }
        Ok(())
    }

    /// One step of the current collective: sends each payload to its rank and takes one payload
    /// from each of `from`. The same rank may appear several times in both lists.
    pub(crate) fn exchange(&mut self, sends: &[(u32, &[u8])], from: &[u32]) -> Result<Vec<Vec<u8>>> {
        let Some(current) = self.current.clone() else {
            return Err(self.error(Vec::new(), "no operation is under way"));
        };
        for (peer, payload) in sends {
            let header = Header {
                kind: Kind::Collective,
                signature: current.signature,
                sequence: current.sequence,
                tag: 0,
                len: payload.len() as u64,
            };
            self.send(*peer, &header, payload)?;
        }
        let mut received: Vec<Option<Vec<u8>>> = vec![None; from.len()];
        self.wait(|engine| {
            engine.waiting.clear();
            for (slot, peer) in received.iter_mut().zip(from) {
                if slot.is_none() {
                    *slot = engine.take(*peer, current.sequence, &current.signature)?;
                }
                if slot.is_none() {
                    engine.waiting.push(*peer);
                }
            }
            let slow = sends.iter().map(|(peer, _)| *peer).filter(|peer| !engine.flushed(*peer));
            let slow: Vec<u32> = slow.collect();
            engine.waiting.extend(slow);
            Ok(engine.waiting.is_empty())
        })?;
        for (peer, _) in sends {
            self.check_sent(*peer)?;
        }
        Ok(received.into_iter().flatten().collect())
    }

    /// Fails when `peer` is dead or has left.
    pub(crate) fn check_health(&self, peer: u32) -> Result<()> {
        match &self.peers[peer as usize].health {
            Health::Alive => Ok(()),
            Health::Dead(reason) => Err(self.gone(peer, reason)),
            Health::Stranger(reason) => {
                Err(self.error(vec![peer], format!("rank {peer} is not let in: {reason}")))
            }
            Health::GaveUp(reason) => {
                Err(self.error(vec![peer], format!("rank {peer} gave the group up: {reason}")))
            }
            Health::Left => {
                let seen = self.peers[peer as usize].last_seen();
                Err(self.error(vec![peer], format!("rank {peer} has left the group, {seen}")))
            }
        }
    }

    /// A peer that died before it took what was sent cannot have done its part.
    fn check_sent(&self, peer: u32) -> Result<()> {
        match &self.peers[peer as usize].health {
            Health::Dead(_) | Health::Stranger(_) => self.check_health(peer),
            _ => Ok(()),
        }
    }

    fn gone(&self, peer: u32, reason: &str) -> Error {
        let seen = self.peers[peer as usize].last_seen();
        self.error(vec![peer], format!("rank {peer} died, {seen}: {reason}"))
    }

    /// The next payload of `peer` in this collective, if received.
    fn take(&mut self, peer: u32, sequence: u64, signature: &Signature) -> Result<Option<Vec<u8>>> {
        let state = &mut self.peers[peer as usize];
        let Some((header, _)) = state.inbox.front() else {
            return self.check_health(peer).map(|()| None);
        };
        if header.sequence != sequence || header.signature != *signature {
            // The first difference, perhaps of an earlier operation, explains more.
            if let Some(mismatch) = &self.mismatch {
                return Err(mismatch.clone());
            }
            let numbered =
                |sequence: u64, signature: &Signature| format!("{} #{sequence}", signature.operation.name());
            let difference = signature.difference(&header.signature);
            let (what, ours, theirs) = difference.unwrap_or_else(|| {
                let theirs = numbered(header.sequence, &header.signature);
                ("which collective comes next", numbered(sequence, signature), theirs)
            });
            return Err(Error::Mismatch { rank: self.rank, peer, what, ours, theirs });
        }
        Ok(state.inbox.pop_front().map(|(_, payload)| payload))
    }

    /// Drives the sockets until `done` returns true. `done` also records awaited ranks.
    pub(crate) fn wait(&mut self, mut done: impl FnMut(&mut Engine) -> Result<bool>) -> Result<()> {
        let mut asked: Option<Instant> = None;
        let beat = self.beat();
        loop {
            if let Some(reason) = self.wake.reason() {
                return Err(self.error(Vec::new(), format!("the group was given up: {reason}")));
            }
            // Received data is used, even if its sender has given up since.
            if done(self)? {
                return Ok(());
            }
            self.check_given_up()?;
            let Some(current) = self.current.clone() else { return Ok(()) };
            let left = current.left();
            if left.is_zero() {
                return Err(self.timed_out(current.timeout));
            }
            let since = asked.unwrap_or(current.start).elapsed();
            if since >= beat {
                asked = Some(Instant::now());
                self.query_awaited()?;
            }
            self.looked = Some(Instant::now());
            self.progress(left.min(beat.saturating_sub(since)).max(Duration::from_millis(1)))?;
        }
    }

    /// Handles the sockets while this rank waits for something else of `awaited`. Fails where the
    /// group was aborted or one of them has ended. `asked` is when they were last queried.
    pub(crate) fn check_awaited(&mut self, awaited: &[u32], asked: &mut Instant) -> Result<()> {
        self.waiting = awaited.to_vec();
        self.looked = Some(Instant::now());
        self.progress(Duration::ZERO)?;
        self.check_given_up()?;
        if asked.elapsed() >= self.beat() {
            *asked = Instant::now();
            self.query_awaited()?;
        }
        awaited.iter().try_for_each(|peer| self.check_health(*peer))
    }

    /// How often awaited ranks are queried for their state.
    fn beat(&self) -> Duration {
        let timeout = self.current.as_ref().map_or(Duration::ZERO, |current| current.timeout);
        (timeout / 10).clamp(Duration::from_millis(20), Duration::from_millis(250))
    }

    /// Queries the awaited ranks for their state. Connects to ranks without a connection, which
    /// shows whether their processes run.
    pub(super) fn query_awaited(&mut self) -> Result<()> {
        let Some(current) = self.current.clone() else { return Ok(()) };
        let query = current.query();
        for peer in self.waiting.clone() {
            if self.peers[peer as usize].conns.is_empty() && self.peers[peer as usize].health == Health::Alive
            {
                self.try_connect(peer)?;
            }
            self.send_if_connected(peer, &query, &[]);
        }
        Ok(())
    }

    /// The ranks at the root of this rank's wait: those it waits for, or those that they wait for.
    /// An answer's age counts up to this rank's last poll of its sockets: while its thread is not
    /// scheduled, it reads no answers.
    pub(crate) fn culprits(&self) -> Vec<u32> {
        let (fresh, looked) = (self.beat() * 3, self.looked.unwrap_or_else(Instant::now));
        let mut ranks = Vec::new();
        for peer in &self.waiting {
            match &self.peers[*peer as usize].status {
                Some((when, theirs)) if looked.saturating_duration_since(*when) < fresh => {
                    ranks.extend(theirs.iter().copied().filter(|rank| *rank != self.rank));
                }
                _ => ranks.push(*peer),
            }
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The error of a wait for [`Engine::waiting`] that has lasted for `timeout`.
    pub(crate) fn timed_out(&self, timeout: Duration) -> Error {
        let mut ranks = self.culprits();
        if ranks.is_empty() {
            ranks = self.waiting.clone();
            ranks.sort_unstable();
            ranks.dedup();
        }
        let each: Vec<String> = ranks
            .iter()
            .map(|rank| match self.peers[*rank as usize].seen {
                Some(_) => format!("rank {rank} ({})", self.peers[*rank as usize].last_seen()),
                None => format!("rank {rank}"),
            })
            .collect();
        let reason = format!(
            "timed out after {timeout:?} waiting for {}: it may hang, be stopped, or not have made the call",
            each.join(", ")
        );
        self.error(ranks, reason)
    }

    /// Takes the first message under `tag`, from one rank or any.
    pub(crate) fn take_message(&mut self, from: Option<u32>, tag: u64) -> Result<Option<Message>> {
        let fits = |message: &Message| message.tag == tag && from.is_none_or(|from| from == message.from);
        if let Some(index) = self.messages.iter().position(fits) {
            return Ok(self.messages.remove(index));
        }
        if let Some(peer) = from
            && peer != self.rank
        {
            self.check_health(peer)?;
        }
        let others: Vec<u32> = (0..self.size).filter(|peer| *peer != self.rank).collect();
        let gone = |peer: &u32| self.peers[*peer as usize].health != Health::Alive;
        if from.is_none() && !others.is_empty() && others.iter().all(gone) {
            return Err(self.error(others, "every other rank has left or died"));
        }
        Ok(None)
    }

    /// Sends a message of send and receive.
    pub(crate) fn send_message(&mut self, to: u32, tag: u64, data: &[u8]) -> Result<()> {
        if to == self.rank {
            self.messages.push_back(Message { from: to, tag, data: data.to_owned() });
            return Ok(());
        }
        let header = Header { kind: Kind::Message, tag, ..Header::control(Kind::Message, tag, data.len()) };
        self.send(to, &header, data)?;
        self.check_sent(to)
    }
}

impl Engine {
    /// The missing ranks: polls for up to `wait`, or until the group is aborted, and connects to
    /// ranks without a connection. A connection shows whether a process lives, regardless of its
    /// work.
    pub(crate) fn missing(&mut self, wait: Duration) -> Result<Vec<u32>> {
        let start = Instant::now();
        loop {
            for peer in (0..self.size).filter(|peer| *peer != self.rank).collect::<Vec<_>>() {
                let state = &self.peers[peer as usize];
                if state.health != Health::Alive || !state.conns.is_empty() {
                    continue;
                }
                if let Err(error) = self.try_connect(peer)
                    && self.peers[peer as usize].health == Health::Alive
                {
                    return Err(error);
                }
            }
            let left = wait.saturating_sub(start.elapsed());
            self.progress(left.min(LOOK_AGAIN))?;
            if left.is_zero() || self.wake.reason().is_some() {
                break;
            }
        }
        let missing = |peer: &u32| {
            let state = &self.peers[*peer as usize];
            match state.health {
                Health::Alive => *peer != self.rank && state.conns.is_empty(),
                // It sent a reason, so its process runs.
                Health::GaveUp(_) => false,
                Health::Left | Health::Dead(_) | Health::Stranger(_) => true,
            }
        };
        Ok((0..self.size).filter(missing).collect())
    }

    /// The ranks whose connections broke, and those that `error` blames.
    pub(crate) fn failed_ranks(&self, error: &Error) -> Vec<u32> {
        let dead =
            |peer: &u32| matches!(self.peers[*peer as usize].health, Health::Dead(_) | Health::Stranger(_));
        let mut ranks: Vec<u32> = (0..self.size).filter(dead).collect();
        // A rank that gave the group up sent a reason, so its process runs.
        if let (Error::Group { peers, .. }, None) = (error, &self.aborted) {
            ranks.extend(peers);
        }
        if let Some((rank, ..)) = &self.aborted {
            ranks.retain(|dead| dead != rank);
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::call::Operation;
    use crate::mesh::engine::Directory;
    use crate::mesh::wake::Wake;
    use crate::mesh::{Listener, Sockets};
    use crate::{ConnectionLimits, HashStore};

    /// Rank 0 of three, in its first barrier.
    fn engine() -> Engine {
        let listener = Listener::open(3, Sockets::Auto, None, None, true).unwrap();
        let (store, wake) = (Arc::new(HashStore::new()), Arc::new(Wake::new().unwrap()));
        let limits = ConnectionLimits::default();
        let mut engine = Engine::new("test", 0, listener, Directory::Store, store, wake, &limits).unwrap();
        engine.begin(Signature::new(Operation::Barrier), Duration::from_secs(60));
        engine
    }

    #[test]
    fn an_abort_of_a_later_operation_does_not_hide_one_of_this_operation() {
        let mut engine = engine();
        let abort = |sequence| Header { sequence, ..Header::control(Kind::Abort, 0, 0) };
        engine.receive(2, abort(1), b"later".to_vec());
        engine.check_given_up().unwrap();
        engine.receive(1, abort(0), b"now".to_vec());
        let error = engine.check_given_up().unwrap_err().to_string();
        assert!(error.contains("rank 1 gave the group up: now"), "{error}");
        // One more of a later operation changes nothing.
        engine.receive(2, abort(1), b"later".to_vec());
        assert_eq!(engine.check_given_up().unwrap_err().to_string(), error);
    }

    #[test]
    fn an_answer_is_as_old_as_it_was_when_this_rank_last_looked() {
        let mut engine = engine();
        engine.waiting = vec![1];
        assert_eq!(engine.culprits(), [1], "it has not answered");
        // Rank 1 waits for rank 2.
        let answered = Instant::now();
        engine.peers[1].status = Some((answered, vec![2]));
        for (looked, culprit) in [(0, 2), (500, 2), (1000, 1)] {
            engine.looked = Some(answered + Duration::from_millis(looked));
            assert_eq!(engine.culprits(), [culprit], "{looked} ms later");
        }
    }
}
