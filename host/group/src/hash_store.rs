//! The store of threads that share a process.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::board::Board;
use super::store::{Store, counter_error, get_timed_out, poisoned, wait_timed_out};
use crate::error::Result;
use crate::lock::lock;

/// A [`Store`] in this process's memory; share it between threads in an `Arc`.
#[derive(Debug, Default)]
pub struct HashStore {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    board: Board,
    poison: Option<String>,
}

impl HashStore {
    /// An empty store.
    pub fn new() -> HashStore {
        HashStore::default()
    }

    /// Gives the store up: every call from now on, and every call that waits now, fails with
    /// `reason`. The first reason stays.
    pub(crate) fn poison(&self, reason: &str) {
        lock(&self.state).poison.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_all();
    }

    /// Reads the board.
    fn read<T>(&self, operation: &'static str, key: &str, look: impl FnOnce(&Board) -> T) -> Result<T> {
        let state = lock(&self.state);
        match &state.poison {
            Some(reason) => Err(poisoned(operation, key, reason)),
            None => Ok(look(&state.board)),
        }
    }

    /// Changes the board and wakes waiting threads.
    fn change<T>(
        &self,
        operation: &'static str,
        key: &str,
        change: impl FnOnce(&mut Board) -> T,
    ) -> Result<T> {
        let mut state = lock(&self.state);
        if let Some(reason) = &state.poison {
            return Err(poisoned(operation, key, reason));
        }
        let outcome = change(&mut state.board);
        drop(state);
        self.changed.notify_all();
        Ok(outcome)
    }

    /// Tries `attempt` now and after each change, until it gives something or `timeout` is over
    /// (`None`).
    fn wait_for<T>(
        &self,
        operation: &'static str,
        key: &str,
        timeout: Duration,
        mut attempt: impl FnMut(&mut Board) -> Option<T>,
    ) -> Result<Option<T>> {
        let start = Instant::now();
        let mut state = lock(&self.state);
        loop {
            if let Some(reason) = &state.poison {
                return Err(poisoned(operation, key, reason));
            }
            if let Some(value) = attempt(&mut state.board) {
                return Ok(Some(value));
            }
            let Some(left) = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else {
                return Ok(None);
            };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Store for HashStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change("set", key, |board| board.set(key.as_bytes(), value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.wait_for("get", key, timeout, |board| board.get(key.as_bytes()).map(|value| value.to_vec()))?
            .ok_or_else(|| get_timed_out(key, timeout))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.change("add", key, |board| board.add(key.as_bytes(), delta))?
            .map_err(|error| counter_error(key, error, delta))
    }

    fn check(&self, key: &str) -> Result<bool> {
        self.read("check", key, |board| board.has(key.as_bytes()))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.change("delete", key, |board| board.remove(key.as_bytes()))
    }

    fn check_all(&self, keys: &[&str]) -> Result<bool> {
        self.read("check", keys.first().unwrap_or(&""), |board| {
            keys.iter().all(|key| board.has(key.as_bytes()))
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let mut missing = keys.to_vec();
        self.wait_for("wait", keys.first().unwrap_or(&""), timeout, |board| {
            missing.retain(|key| !board.has(key.as_bytes()));
            missing.is_empty().then_some(())
        })?
        .ok_or_else(|| wait_timed_out("wait", missing.first().unwrap_or(&""), timeout))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.change("compare_set", key, |board| board.compare_set(key.as_bytes(), expected, desired).to_vec())
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change("append", key, |board| board.append(key.as_bytes(), value))
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        let first = entries.first().map_or("", |(key, _)| key);
        self.change("multi_set", first, |board| {
            entries.iter().for_each(|(key, value)| board.set(key.as_bytes(), value));
        })
    }

    fn num_keys(&self) -> Result<u64> {
        self.read("num_keys", "", |board| board.len() as u64)
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change("queue_push", key, |board| board.push(key.as_bytes(), value))
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        self.wait_for("queue_pop", key, timeout, |board| {
            board.pop(key.as_bytes()).map(|value| value.to_vec())
        })
    }

    fn queue_len(&self, key: &str) -> Result<u64> {
        self.read("queue_len", key, |board| board.queue_len(key.as_bytes()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Error;

    #[test]
    fn get_waits_for_set() {
        let store = Arc::new(HashStore::new());
        let setter = store.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            setter.set("k", b"v").unwrap();
        });
        assert_eq!(store.get("k", Duration::from_secs(120)).unwrap(), b"v");
        thread.join().unwrap();
    }

    #[test]
    fn get_times_out_and_names_the_key() {
        let error = HashStore::new().get("who", Duration::from_millis(20)).unwrap_err();
        assert!(matches!(&error, Error::Store { operation: "get", key, .. } if key == "who"), "{error}");
    }

    #[test]
    fn counters_check_and_delete() {
        let store = HashStore::new();
        assert_eq!(store.add("n", 2).unwrap(), 2);
        assert_eq!(store.add("n", -5).unwrap(), -3);
        assert_eq!(store.get("n", Duration::ZERO).unwrap(), b"-3");
        assert!(store.check("n").unwrap());
        assert!(store.delete("n").unwrap());
        assert!(!store.delete("n").unwrap());
        assert!(!store.check("n").unwrap());
        store.set("bytes", b"x").unwrap();
        assert!(store.add("bytes", 1).is_err());
        store.add("big", i64::MAX).unwrap();
        assert!(store.add("big", 1).is_err());
    }

    #[test]
    fn poison_wakes_waiters() {
        let store = Arc::new(HashStore::new());
        let waiter = store.clone();
        let thread = std::thread::spawn(move || waiter.get("never", Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(20));
        store.poison("rank 1 failed");
        let error = thread.join().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Aborted { reason, .. } if reason == "rank 1 failed"), "{error}");
        assert!(store.set("k", b"").is_err());
    }
}
