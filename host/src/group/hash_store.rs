//! The store of threads that share a process.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::store::{Store, get_timed_out, parse_counter, poisoned, sum_counter};
use crate::error::Result;

/// A [`Store`] in this process's memory; share it between threads in an `Arc`.
#[derive(Debug, Default)]
pub struct HashStore {
    board: Mutex<Board>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Board {
    values: HashMap<String, Vec<u8>>,
    poison: Option<String>,
}

impl HashStore {
    /// An empty store.
    pub fn new() -> HashStore {
        HashStore::default()
    }

    /// Gives the store up: every call from now on, and every call that waits now, fails with `reason`. The first
    /// reason stays.
    pub fn poison(&self, reason: &str) {
        self.lock().poison.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_all();
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.lock().values.len()
    }

    /// True when there is no key.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        // No code runs under the lock that could leave the board half changed.
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn usable(&self, operation: &'static str, key: &str) -> Result<MutexGuard<'_, Board>> {
        let board = self.lock();
        match &board.poison {
            Some(reason) => Err(poisoned(operation, key, reason)),
            None => Ok(board),
        }
    }
}

impl Store for HashStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.usable("set", key)?.values.insert(key.to_owned(), value.to_owned());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let start = Instant::now();
        let mut board = self.usable("get", key)?;
        loop {
            if let Some(reason) = &board.poison {
                return Err(poisoned("get", key, reason));
            }
            if let Some(value) = board.values.get(key) {
                return Ok(value.clone());
            }
            let Some(left) = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else {
                return Err(get_timed_out(key, timeout));
            };
            board = self.changed.wait_timeout(board, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let mut board = self.usable("add", key)?;
        let value = board.values.get(key).map_or(Ok(0), |value| parse_counter(key, value))?;
        let sum = sum_counter(key, value, delta)?;
        board.values.insert(key.to_owned(), sum.to_string().into_bytes());
        drop(board);
        self.changed.notify_all();
        Ok(sum)
    }

    fn check(&self, key: &str) -> Result<bool> {
        Ok(self.usable("check", key)?.values.contains_key(key))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        Ok(self.usable("delete", key)?.values.remove(key).is_some())
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
        assert_eq!(store.get("k", Duration::from_secs(10)).unwrap(), b"v");
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
        assert!(error.to_string().contains("rank 1 failed"), "{error}");
        assert!(store.set("k", b"").is_err());
    }
}
