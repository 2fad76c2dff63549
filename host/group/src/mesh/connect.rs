//! Finding the peers and connecting to them.

use std::time::{Duration, Instant};

use super::address::{self, Address, address_key};
use super::conn::Conn;
use super::engine::{Current, Directory, Engine};
use super::frame::{Header, Kind, Signature};
use super::hello;
use super::peers::Health;
use crate::call::Operation;
use crate::error::{Error, Result};
use crate::foreign::escaped;
use crate::secret::{Initiator, Purpose};

/// The operation of a rank that connects to the others. Peers that are all connected may be in
/// their first collective by then, so it has no number that could be taken for that one's.
fn connecting(timeout: Duration) -> Current {
    let signature = Signature::new(Operation::Connect);
    Current { sequence: 0, signature, start: Instant::now(), timeout }
}

impl Engine {
    /// The connection to send to `peer` on; opens one where there is none, which waits for the peer
    /// to have joined.
    pub(super) fn outgoing(&mut self, peer: u32) -> Result<usize> {
        if let Some(index) = self.peers[peer as usize].send_on {
            return Ok(index);
        }
        let mut pause = Duration::ZERO;
        loop {
            self.check_given_up()?;
            let state = &self.peers[peer as usize];
            let index = match state.conns.first() {
                Some(index) => Some(*index),
                None => self.try_connect(peer)?,
            };
            if let Some(index) = index {
                self.peers[peer as usize].send_on = Some(index);
                return Ok(index);
            }
            let left = self.current.as_ref().map_or(Duration::ZERO, Current::left);
            if left.is_zero() {
                return Err(self.error(vec![peer], format!("rank {peer} has not joined the group")));
            }
            self.progress(pause.min(left))?;
            pause = (pause * 2).clamp(Duration::from_millis(1), Duration::from_millis(50));
        }
    }

    /// Opens a connection to `peer` unless it has not joined yet.
    pub(crate) fn try_connect(&mut self, peer: u32) -> Result<Option<usize>> {
        let Some(theirs) = self.look_up(peer)? else { return Ok(None) };
        match &self.peers[peer as usize].health {
            Health::Dead(reason) => {
                return Err(self.error(vec![peer], format!("rank {peer} is dead: {reason}")));
            }
            Health::Stranger(_) => return self.check_health(peer).map(|()| None),
            _ => {}
        }
        let yes_or_no = |secret: bool| if secret { "yes" } else { "no" }.to_owned();
        if theirs.secret != self.secret.is_some() {
            return Err(Error::Mismatch {
                rank: self.rank,
                peer,
                what: "whether the job has a secret (EPOXIDE_JOB_SECRET or EPOXIDE_JOB_SECRET_FILE)",
                ours: yes_or_no(self.secret.is_some()),
                theirs: yes_or_no(theirs.secret),
            });
        }
        let socket = match address::connect(&theirs, &self.ours) {
            Ok(Some(socket)) => socket,
            Ok(None) => return Ok(None),
            Err(reason) => {
                // A peer that has left may have connected before, and what it sent is still to be
                // read.
                self.accept_waiting();
                if let Some(index) = self.peers[peer as usize].conns.first() {
                    return Ok(Some(*index));
                }
                let reason = format!("it takes no connections, it may have died or left: {reason}");
                self.peers[peer as usize].health = self.final_health(peer, &reason);
                return self.check_health(peer).map(|()| None);
            }
        };
        let unix = theirs.shares_host(&self.ours);
        let index = self.add(Conn::opened(socket, peer))?;
        self.peers[peer as usize].conns.push(index);
        let mut shown = theirs.token.as_bytes().to_vec();
        let claims = hello::claims(&self.name, self.rank, peer, self.size, &theirs, unix);
        let secret = self.secret.as_ref();
        let challenge = secret.map(|secret| Initiator::new(secret, Purpose::Mesh, claims)).transpose()?;
        shown.extend(challenge.iter().flat_map(Initiator::opening));
        let hello = Header::control(Kind::Hello, u64::from(self.rank), shown.len());
        self.send_on(index, &hello, &shown);
        if let (Some(challenge), Some(Some(conn))) = (challenge, self.conns.get_mut(index)) {
            conn.challenge(challenge);
        }
        Ok(Some(index))
    }

    /// Connects to every rank below this one and waits for those above; within `timeout`.
    pub(crate) fn connect_all(&mut self, timeout: Duration) -> Result<()> {
        self.current = Some(connecting(timeout));
        for peer in 0..self.rank {
            self.outgoing(peer)?;
        }
        let rank = self.rank;
        self.wait(|engine| {
            let mut missing = Vec::new();
            for peer in (0..engine.size).filter(|peer| *peer != rank) {
                match engine.peers[peer as usize].health {
                    // A rank that left has been here.
                    Health::Alive if peer < rank || !engine.peers[peer as usize].conns.is_empty() => {}
                    Health::Alive => missing.push(peer),
                    Health::Left => {}
                    _ => engine.check_health(peer)?,
                }
            }
            engine.waiting = missing;
            // Only its hello identifies this rank to the called rank.
            let unsent = (0..engine.size).filter(|peer| !engine.flushed(*peer));
            let unsent: Vec<u32> = unsent.collect();
            engine.waiting.extend(unsent);
            // A higher rank that died at this point looks like one that never joined.
            for peer in engine.waiting.clone() {
                engine.look_up(peer)?;
            }
            Ok(engine.waiting.is_empty())
        })?;
        self.current = None;
        Ok(())
    }

    pub(super) fn gone_key(&self, peer: u32) -> String {
        format!("{}/gone/{peer}", self.name)
    }

    /// The health of `peer`, whose connection ended for `reason`. The store records whether `peer`
    /// gave up or left; otherwise it died. A store that a launcher gave up has no record of `peer`,
    /// but names the rank that failed first.
    pub(super) fn final_health(&self, peer: u32, reason: &str) -> Health {
        match self.left_in_store(peer) {
            Ok(Some(words)) => words,
            Ok(None) => Health::Dead(reason.to_owned()),
            Err(error) => Health::Dead(format!("{reason}; {error}")),
        }
    }

    fn left_in_store(&self, peer: u32) -> Result<Option<Health>> {
        let (gone, address) = (self.gone_key(peer), address_key(&self.name, peer));
        let has_address = matches!(self.directory, Directory::Store);
        self.ask_board(move |board| {
            if board.check(&gone)? {
                let reason = board.get(&gone, Duration::from_secs(1))?;
                return Ok(Some(Health::GaveUp(escaped(&reason))));
            }
            // A rank that leaves deletes its address; one that is killed does not.
            let left = has_address && !board.check(&address)?;
            Ok(left.then_some(Health::Left))
        })
    }

    /// Listens for connections from other hosts and announces it, once a rank on one joins.
    fn join_network(&mut self, theirs: &Address) -> Result<()> {
        if self.ours.on_network() {
            return Ok(());
        }
        self.open_network(theirs)?;
        let address = serde_json::to_vec(&self.ours).map_err(|error| Error::internal("serialise", error))?;
        self.board.set(&address_key(&self.name, self.rank), &address)
    }

    fn look_up(&mut self, peer: u32) -> Result<Option<Address>> {
        if let Some(address) = &self.peers[peer as usize].address {
            return Ok(Some(address.clone()));
        }
        let address = match &self.directory {
            Directory::Known(all) => all.get(peer as usize).cloned(),
            Directory::Store => {
                let key = address_key(&self.name, peer);
                if !self.board.check(&key)? {
                    return Ok(None);
                }
                let bytes = match self.board.get(&key, Duration::from_secs(1)) {
                    Ok(bytes) => bytes,
                    // The rank left in between and deleted its address.
                    Err(_) if !self.board.check(&key)? => return Ok(None),
                    Err(error) => return Err(error),
                };
                let address: Address = serde_json::from_slice(&bytes).map_err(|error| {
                    self.error(
                        vec![peer],
                        format!("rank {peer} announced no address in key {key:?}: {error}"),
                    )
                })?;
                if address.size != self.size {
                    return Err(Error::Mismatch {
                        rank: self.rank,
                        peer,
                        what: "the number of ranks",
                        ours: self.size.to_string(),
                        theirs: address.size.to_string(),
                    });
                }
                if !address.shares_host(&self.ours) {
                    self.join_network(&address)?;
                }
                if !address.reachable(&self.ours) {
                    // The rank does not listen for other hosts yet.
                    return Ok(None);
                }
                Some(address)
            }
        };
        self.peers[peer as usize].address = address.clone();
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::*;
    use crate::mesh::wake::Wake;
    use crate::mesh::{Listener, Sockets};
    use crate::{ConnectionLimits, HashStore, Store};

    /// Rank 1 of two, which `progress` drives.
    fn engine(store: Arc<HashStore>) -> Engine {
        engine_of(1, store)
    }

    fn engine_of(rank: u32, store: Arc<HashStore>) -> Engine {
        let listener = Listener::open(2, Sockets::Auto, None, None, true).unwrap();
        let wake = Arc::new(Wake::new().unwrap());
        let limits = ConnectionLimits::default();
        Engine::new("test", rank, listener, Directory::Store, store, wake, &limits).unwrap()
    }

    /// A connection that the engine takes for one of rank 0's; returns rank 0's end.
    fn connect(engine: &mut Engine) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let index = engine.add(Conn::opened(ours.into(), 0)).unwrap();
        engine.peers[0].conns.push(index);
        theirs
    }

    /// Until the engine has as many connections as that. A child that another test starts holds a
    /// closed socket open until it runs its own program.
    fn until_connections(engine: &mut Engine, count: usize) {
        let start = Instant::now();
        while engine.peers[0].conns.len() != count {
            assert!(start.elapsed() < Duration::from_secs(120));
            engine.progress(Duration::from_millis(100)).unwrap();
        }
    }

    #[test]
    fn a_goodbye_on_one_connection_waits_for_frames_on_the_other() {
        let mut engine = engine(Arc::new(HashStore::new()));
        let (mut first, mut second) = (connect(&mut engine), connect(&mut engine));
        let goodbye = Header::control(Kind::Goodbye, 0, 0).encode();
        first.write_all(&goodbye).unwrap();
        drop(first);
        until_connections(&mut engine, 1);
        assert_eq!(engine.peers[0].health, Health::Alive);
        let step = Header { kind: Kind::Collective, ..Header::control(Kind::Collective, 0, 0) };
        second.write_all(&step.encode()).unwrap();
        second.write_all(&goodbye).unwrap();
        engine.progress(Duration::from_secs(120)).unwrap();
        assert_eq!((engine.peers[0].inbox.len(), engine.peers[0].health.clone()), (1, Health::Left));
        // A connection that breaks after the peer's goodbye on another is no death either.
        engine.peers[0].health = Health::Alive;
        drop(second);
        until_connections(&mut engine, 0);
        assert_eq!(engine.peers[0].health, Health::Left);
    }

    #[test]
    fn a_rank_that_left_before_its_connection_was_accepted_has_been_there() {
        let store = Arc::new(HashStore::new());
        let [mut gone, mut here] = [0, 1].map(|rank| {
            let mut engine = engine_of(rank, store.clone());
            engine.current = Some(connecting(Duration::from_secs(120)));
            let address = serde_json::to_vec(&engine.ours).unwrap();
            store.set(&address_key("test", rank), &address).unwrap();
            engine
        });
        // `here` has the address of `gone`, and is not run while `gone` connects and leaves.
        here.look_up(0).unwrap().unwrap();
        gone.outgoing(1).unwrap();
        while !gone.flushed(1) {
            gone.progress(Duration::from_millis(1)).unwrap();
        }
        gone.leave();
        drop(gone);
        here.waiting = vec![0];
        here.query_awaited().unwrap();
        while here.peers[0].health == Health::Alive {
            here.progress(Duration::from_millis(100)).unwrap();
        }
        assert_eq!(here.peers[0].health, Health::Left);
    }

    #[test]
    fn a_connection_that_ends_after_the_store_was_given_up_tells_which_rank_failed() {
        let store = Arc::new(HashStore::new());
        let mut engine = engine(store.clone());
        let theirs = connect(&mut engine);
        // A launcher does this; rank 0 then has no place for its own reason.
        store.poison("rank 2 exited with code 7");
        drop(theirs);
        until_connections(&mut engine, 0);
        let error = engine.check_health(0).unwrap_err().to_string();
        assert!(error.contains("rank 2 exited with code 7"), "{error}");
    }

    #[test]
    fn a_question_of_a_rank_that_connects_is_not_taken_for_a_collective() {
        let patience = Duration::from_secs(120);
        let engine = || {
            let mut engine = engine(Arc::new(HashStore::new()));
            engine.begin(Signature::new(Operation::AllGather), patience);
            engine
        };
        let mut asked = engine();
        asked.receive(0, connecting(patience).query(), Vec::new());
        assert!(asked.mismatch.is_none(), "{:?}", asked.mismatch);
        // The same of a rank that is in another collective.
        let mut differs = engine();
        let barrier = Current { signature: Signature::new(Operation::Barrier), ..connecting(patience) };
        differs.receive(0, barrier.query(), Vec::new());
        assert!(differs.mismatch.is_some());
    }
}
