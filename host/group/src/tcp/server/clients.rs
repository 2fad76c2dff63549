//! The clients, the store they share, and what each request of theirs does.

use std::collections::BTreeMap;

use super::end::End;
use super::waits::Waits;
use crate::board::{Board, OVERHEAD, Shared};
use crate::tcp::protocol::{
    MAGIC, MAX_MESSAGE_BYTES, Message, NOT_READY, READY, Request, STOP_WAITING, Violation, WAIT_CANCELED,
};

/// Most keys that are listed in one answer.
const MAX_LISTED_KEYS: usize = 1 << 20;

/// The clients by the numbers of their connections, and what they share.
pub(super) struct Clients {
    pub(super) connections: BTreeMap<u64, End>,
    /// Connections with something to send, or to be closed.
    pub(super) changed: Vec<u64>,
    pub(super) waits: Waits,
    pub(super) board: Board,
    /// Most bytes of keys and values.
    store_bytes: usize,
}

impl Clients {
    pub(super) fn new(store_bytes: usize) -> Clients {
        Clients {
            connections: BTreeMap::new(),
            changed: Vec::new(),
            waits: Waits::default(),
            board: Board::default(),
            store_bytes,
        }
    }

    /// Removes a client that leaves.
    pub(super) fn remove(&mut self, id: u64) -> Option<End> {
        self.waits.forget(id);
        let mut connection = self.connections.remove(&id)?;
        self.pass_on(connection.woken_for.take());
        Some(connection)
    }

    /// Carries out a request. Requests that wait are answered later.
    pub(super) fn answer(&mut self, id: u64, request: Request<'_>) -> Result<(), Violation> {
        self.introduce(id, &request)?;
        let message = Message::default();
        let answer = match request {
            Request::Validate(MAGIC) => return Ok(()),
            Request::Validate(magic) => {
                return Err(Violation(format!("{magic:#x} where {MAGIC:#x} is expected")));
            }
            Request::Ping(nonce) => message.word(nonce),
            Request::Set { key, value } => {
                self.make_room(self.board.set_size(key, value.len()))?;
                self.board.set(key, value);
                self.wake(key, false);
                return Ok(());
            }
            Request::CompareSet { key, expected, desired } => {
                self.make_room(self.board.set_size(key, desired.len()) + expected.len())?;
                let now = self.board.compare_set(key, expected, desired);
                if self.board.has(key) {
                    self.wake(key, false);
                }
                self.send_string(id, Some(&now));
                return Ok(());
            }
            Request::Get(key) => {
                let value = self.board.get(key).cloned();
                self.send_string(id, value.as_ref());
                return Ok(());
            }
            Request::Add { key, delta } => {
                let sum = self.count(key, delta)?;
                self.wake(key, false);
                message.number(sum)
            }
            Request::Check(keys) => {
                let all = keys.iter().all(|key| self.board.has(key));
                Message(vec![if all { READY } else { NOT_READY }])
            }
            Request::Wait(keys) => {
                let missing: Vec<_> = keys.into_iter().filter(|key| !self.board.has(key)).collect();
                if !missing.is_empty() {
                    return self.wait(id, &missing);
                }
                Message(vec![STOP_WAITING])
            }
            Request::NumKeys => message.count(self.board.len()),
            Request::DeleteKey(key) => message.number(self.board.remove(key).into()),
            Request::Append { key, value } => {
                let length = self.board.get(key).map_or(0, |value| value.len());
                if length + value.len() > MAX_MESSAGE_BYTES {
                    let rule = format!("at most {MAX_MESSAGE_BYTES} are allowed; use several keys");
                    let length = length + value.len();
                    return Err(Violation(format!(
                        "appends to a value that would have {length} bytes, {rule}"
                    )));
                }
                self.make_room(self.board.append_size(key, value.len()))?;
                self.board.append(key, value);
                self.wake(key, false);
                return Ok(());
            }
            Request::MultiGet(keys) => {
                let values: Vec<Option<Shared>> =
                    keys.iter().map(|key| self.board.get(key).cloned()).collect();
                let length: usize = values.iter().flatten().map(|value| value.len()).sum();
                if length > MAX_MESSAGE_BYTES {
                    let rule = format!("at most {MAX_MESSAGE_BYTES} are allowed; ask several times");
                    return Err(Violation(format!("asks for {length} bytes at once, {rule}")));
                }
                values.iter().for_each(|value| self.send_string(id, value.as_ref()));
                return Ok(());
            }
            Request::MultiSet(entries) => {
                self.make_room(
                    entries.iter().map(|(key, value)| self.board.set_size(key, value.len())).sum(),
                )?;
                for (key, value) in entries {
                    self.board.set(key, value);
                    self.wake(key, false);
                }
                return Ok(());
            }
            Request::CancelWait => {
                self.waits.forget(id);
                let woken_for =
                    self.connections.get_mut(&id).and_then(|connection| connection.woken_for.take());
                self.pass_on(woken_for);
                Message(vec![WAIT_CANCELED])
            }
            Request::QueuePush { key, value } => {
                self.make_room(key.len() + value.len() + 2 * OVERHEAD)?;
                self.board.push(key, value);
                self.wake(key, true);
                return Ok(());
            }
            Request::QueuePop(key) => {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.woken_for = None;
                }
                let length = self.board.queue_len(key);
                self.send(id, &message.count(length).0);
                if let Some(value) = self.board.pop(key) {
                    self.send_string(id, Some(&value));
                }
                return Ok(());
            }
            Request::QueueLen(key) => message.count(self.board.queue_len(key)),
            Request::ListKeys => return self.list_keys(id),
            Request::Barrier { key, size } => {
                if self.count(key, 1)? < size {
                    return self.wait(id, &[key]);
                }
                self.wake(key, false);
                Message(vec![STOP_WAITING])
            }
        };
        self.send(id, &answer.0);
        Ok(())
    }

    /// Reads a connection's first ping. A server that ends admits further connections of its
    /// clients, which they may need to leave in order. The server rejects new clients, which look
    /// for the next one at this port and find it when they try again.
    fn introduce(&mut self, id: u64, request: &Request<'_>) -> Result<(), Violation> {
        let Some(&End { late, client: None, .. }) = self.connections.get(&id) else { return Ok(()) };
        let client = match request {
            Request::Validate(_) => return Ok(()),
            Request::Ping(number) => Some(*number),
            _ => None,
        };
        if late && (client.is_none() || !self.connections.values().any(|end| end.client == client)) {
            return Err(Violation("the server is ending, and it is no client of it yet".to_owned()));
        }
        if let Some(end) = self.connections.get_mut(&id) {
            end.client = client;
        }
        Ok(())
    }

    /// Rejects a request that would exceed the store's limit. The protocol has no answer for that.
    fn make_room(&self, needed: usize) -> Result<(), Violation> {
        let (held, most) = (self.board.bytes(), self.store_bytes);
        if needed > 0 && held + needed > most {
            return Err(Violation(format!(
                "it asks for {needed} bytes more where keys and values take {held}, and at most {most} are allowed; delete keys, or raise \
                 ConnectionLimits::max_store_bytes"
            )));
        }
        Ok(())
    }

    fn list_keys(&mut self, id: u64) -> Result<(), Violation> {
        let count = self.board.len();
        let length = || self.board.keys().map(|key| key.len()).sum::<usize>();
        if count > MAX_LISTED_KEYS || length() > MAX_MESSAGE_BYTES {
            return Err(Violation(format!(
                "asks for the names of {count} keys; at most {MAX_LISTED_KEYS} with {MAX_MESSAGE_BYTES} bytes are listed"
            )));
        }
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        connection.send(&Message::default().count(count).0);
        self.board.keys().for_each(|key| connection.send_string(key));
        self.changed.push(id);
        Ok(())
    }

    /// Adds to a counter. Arriving clients read a barrier's counter, waiting ones do not.
    fn count(&mut self, key: &[u8], delta: i64) -> Result<i64, Violation> {
        if self.board.get(key).is_none() {
            self.make_room(self.board.set_size(key, 20))?;
        }
        let name = String::from_utf8_lossy(key).into_owned();
        let sum = self.board.add(key, delta);
        sum.map_err(|error| Violation(format!("adds {delta} to {name:?}: {error:?}")))
    }

    fn send(&mut self, id: u64, bytes: &[u8]) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.send(bytes);
            self.changed.push(id);
        }
    }

    /// Sends a value, or an empty one where there is none.
    fn send_string(&mut self, id: u64, string: Option<&Shared>) {
        match (string, self.connections.get_mut(&id)) {
            (Some(string), Some(connection)) => {
                connection.send_string(string);
                self.changed.push(id);
            }
            _ => self.send(id, &[0; 8]),
        }
    }

    /// Has a connection wait for `keys`.
    fn wait(&mut self, id: u64, keys: &[&[u8]]) -> Result<(), Violation> {
        if self.waits.is_waiting(id) {
            return Err(Violation("waits while it waits".to_owned()));
        }
        if let Some(connection) = self.connections.get_mut(&id) {
            let woken_for = connection.woken_for.take();
            self.pass_on(woken_for);
            self.waits.add(id, keys);
        }
        Ok(())
    }

    /// Wakes the next client of a queue if a woken client did not take its entry.
    fn pass_on(&mut self, queue: Option<Vec<u8>>) {
        if let Some(key) = queue.filter(|key| self.board.queue_len(key) > 0) {
            self.wake(&key, true);
        }
    }

    /// Wakes clients that wait for `key`.
    fn wake(&mut self, key: &[u8], one: bool) {
        for id in self.waits.come(key, one) {
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.woken_for = one.then(|| key.to_owned());
                self.send(id, &[STOP_WAITING]);
            }
        }
    }
}
