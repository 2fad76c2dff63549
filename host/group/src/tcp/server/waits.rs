//! The clients that wait for each key.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Approximate memory of one wait for one key, in addition to the key's bytes.
const OVERHEAD: usize = 128;

/// All waits, in the order in which they began. A wait for a key is found by its ticket. So ending
/// a client's waits costs time in proportion to their number, regardless of other waits and of
/// repeated keys.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// Clients by ticket, which ascend with time.
    keys: HashMap<Arc<[u8]>, BTreeMap<u64, u64>>,
    clients: HashMap<u64, Wait>,
    ticket: u64,
}

#[derive(Debug, Default)]
struct Wait {
    keys: Vec<(Arc<[u8]>, u64)>,
    /// Number of keys that are still missing.
    missing: usize,
    bytes: usize,
}

impl Waits {
    /// Has a client wait for all of `keys`; it must not be waiting.
    pub(super) fn add(&mut self, client: u64, keys: &[&[u8]]) {
        let wait = self.clients.entry(client).or_default();
        for key in keys {
            let key = match self.keys.get_key_value(*key) {
                Some((key, _)) => key.clone(),
                None => Arc::from(*key),
            };
            self.ticket += 1;
            wait.bytes += key.len() + OVERHEAD;
            self.keys.entry(key.clone()).or_default().insert(self.ticket, client);
            wait.keys.push((key, self.ticket));
        }
        wait.missing = wait.keys.len();
    }

    pub(super) fn is_waiting(&self, client: u64) -> bool {
        self.clients.contains_key(&client)
    }

    /// Bytes that a client's waits take.
    pub(super) fn bytes(&self, client: u64) -> usize {
        self.clients.get(&client).map_or(0, |wait| wait.bytes)
    }

    /// Records that `key` exists. The clients that wait for nothing more, oldest wait first; at
    /// most one of them if `one`.
    pub(super) fn come(&mut self, key: &[u8], one: bool) -> Vec<u64> {
        let mut done = Vec::new();
        let Some(queue) = self.keys.get_mut(key) else { return done };
        while let Some((_, client)) = queue.pop_first() {
            let Some(wait) = self.clients.get_mut(&client) else { continue };
            wait.missing -= 1;
            if wait.missing == 0 {
                self.clients.remove(&client);
                done.push(client);
                if one {
                    break;
                }
            }
        }
        if queue.is_empty() {
            self.keys.remove(key);
        }
        done
    }

    /// Ends a client's waits.
    pub(super) fn forget(&mut self, client: u64) {
        for (key, ticket) in self.clients.remove(&client).unwrap_or_default().keys {
            if let Some(queue) = self.keys.get_mut(&key) {
                queue.remove(&ticket);
                if queue.is_empty() {
                    self.keys.remove(&key);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_end_in_their_order_and_leave_nothing() {
        let mut waits = Waits::default();
        waits.add(1, &[b"a", b"b", b"a"]);
        waits.add(2, &[b"a"]);
        waits.add(3, &[b"a", b"c"]);
        assert_eq!(waits.come(b"a", true), [2], "1 still waits for b, 3 was behind 2");
        assert_eq!(waits.come(b"b", false), [1]);
        assert!(!waits.is_waiting(1) && waits.bytes(1) == 0);
        assert_eq!(waits.come(b"c", false), [0; 0]);
        waits.add(4, &[b"a"]);
        waits.forget(3);
        assert_eq!(waits.come(b"a", false), [4]);
        assert!(waits.keys.is_empty() && waits.clients.is_empty());
    }
}
