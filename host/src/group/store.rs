//! The board that ranks meet at.

use std::fmt::Debug;
use std::time::Duration;

use crate::error::{Error, Result};

/// A key-value board shared by all ranks. Keys are short UTF-8 strings, values are bytes.
///
/// Counters made by [`Store::add`] live in the same name space; [`Store::get`] reads them as decimal text.
pub trait Store: Send + Sync + Debug {
    /// Sets `key`, replacing what was there, and wakes those who wait for it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of `key`; waits up to `timeout` for it to be set.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds `delta` to the counter `key`, which starts at 0, and returns the sum.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// True when `key` is set now.
    fn check(&self, key: &str) -> Result<bool>;

    /// Removes `key`; true when it was there.
    fn delete(&self, key: &str) -> Result<bool>;
}

/// An [`Error::Store`].
pub(super) fn store_error(operation: &'static str, key: &str, reason: impl ToString) -> Error {
    Error::Store { operation, key: key.to_owned(), reason: reason.to_string() }
}

/// The error of a `get` that waited in vain.
pub(super) fn get_timed_out(key: &str, timeout: Duration) -> Error {
    store_error(
        "get",
        key,
        format!(
            "not set within {timeout:?}; the rank that sets it may be late, have died, or use another store"
        ),
    )
}

/// The error of every call on a store that [`HashStore::poison`](super::HashStore::poison) or
/// [`FileStore::poison`](super::FileStore::poison) gave up.
pub(super) fn poisoned(operation: &'static str, key: &str, reason: &str) -> Error {
    store_error(operation, key, format!("the group was given up: {reason}"))
}

/// Parses a counter's value.
pub(super) fn parse_counter(key: &str, value: &[u8]) -> Result<i64> {
    std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).ok_or_else(|| {
        store_error("add", key, "the key holds bytes, not a counter; use another key for the counter")
    })
}

/// The sum of a counter and a delta.
pub(super) fn sum_counter(key: &str, value: i64, delta: i64) -> Result<i64> {
    value
        .checked_add(delta)
        .ok_or_else(|| store_error("add", key, format!("{value} + {delta} overflows 64 bits")))
}
