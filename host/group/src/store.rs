//! The key-value store through which ranks find each other.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use super::board::CounterError;
use crate::error::{Error, Result};

/// A key-value board shared by all ranks. Keys are short UTF-8 strings, values are bytes.
///
/// Counters made by [`Store::add`] live in the same name space; [`Store::get`] reads them as
/// decimal text. Queues are separate: a key may name a value and a queue, and [`Store::check`] and
/// [`Store::wait`] accept either.
///
/// Calls that wait take a timeout; a timeout of zero checks once. Other calls end within the
/// store's own timeout, if it goes through a network.
pub trait Store: Send + Sync + Debug {
    /// Sets `key`, replacing the old value, and wakes its waiters.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of `key`; waits up to `timeout` for it to be set.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds `delta` to the counter `key`, which starts at 0, and returns the sum.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// True when `key` is set now, or its queue is not empty.
    fn check(&self, key: &str) -> Result<bool>;

    /// Removes the value of `key`, as PyTorch's `delete_key` does; true when it was there.
    fn delete(&self, key: &str) -> Result<bool>;

    /// True when every one of `keys` would pass [`Store::check`].
    fn check_all(&self, keys: &[&str]) -> Result<bool> {
        for key in keys {
            if !self.check(key)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns once each of `keys` has passed [`Store::check`]; after `timeout`, an error that
    /// names a missing key.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Sets `key` to `desired` if it holds `expected`, or if it is missing and `expected` is empty.
    /// Returns the value of `key` afterwards; if it is missing and `expected` is not empty,
    /// `expected`. The operation is atomic: if several ranks replace the same value, one wins.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Appends `value` to what `key` holds; a missing key counts as empty.
    fn append(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The values of `keys`, in their order; waits up to `timeout` for all of them.
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        keys.iter().map(|key| self.get(key, timeout.saturating_sub(start.elapsed()))).collect()
    }

    /// Sets several keys.
    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        entries.iter().try_for_each(|(key, value)| self.set(key, value))
    }

    /// How many keys have values. A [`PrefixStore`](super::PrefixStore) counts all keys of the
    /// store below it.
    fn num_keys(&self) -> Result<u64>;

    /// Appends `value` to the queue `key`, and wakes one of its waiters.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Takes the oldest entry of the queue `key`; waits up to `timeout` for one. `None` when the
    /// queue stayed empty.
    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>>;

    /// How many entries the queue `key` has.
    fn queue_len(&self, key: &str) -> Result<u64>;
}

/// An [`Error::Store`].
pub(super) fn store_error(operation: &'static str, key: &str, reason: impl ToString) -> Error {
    Error::Store { operation, key: key.to_owned(), reason: reason.to_string() }
}

/// The error of a `get` that waited in vain.
pub(super) fn get_timed_out(key: &str, timeout: Duration) -> Error {
    wait_timed_out("get", key, timeout)
}

/// The error of a wait in vain.
pub(super) fn wait_timed_out(operation: &'static str, key: &str, timeout: Duration) -> Error {
    store_error(
        operation,
        key,
        format!(
            "not set within {timeout:?}; the rank that sets it may be late, have died, or use another store"
        ),
    )
}

/// The error of every call on a store that [`HashStore::poison`](super::HashStore::poison) or
/// [`FileStore::poison`](super::FileStore::poison) gave up.
pub(super) fn poisoned(operation: &'static str, key: &str, reason: &str) -> Error {
    Error::Aborted { operation, key: key.to_owned(), reason: reason.to_owned() }
}

/// The error of an `add` that cannot be.
pub(super) fn counter_error(key: &str, error: CounterError, delta: i64) -> Error {
    match error {
        CounterError::NotACounter => {
            store_error("add", key, "the key holds bytes, not a counter; use another key for the counter")
        }
        CounterError::Overflow { value } => {
            store_error("add", key, format!("{value} + {delta} overflows 64 bits"))
        }
    }
}

/// Parses a counter's value.
pub(super) fn parse_counter(key: &str, value: &[u8]) -> Result<i64> {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| counter_error(key, CounterError::NotACounter, 0))
}

/// The sum of a counter and a delta.
pub(super) fn sum_counter(key: &str, value: i64, delta: i64) -> Result<i64> {
    value.checked_add(delta).ok_or_else(|| counter_error(key, CounterError::Overflow { value }, delta))
}
