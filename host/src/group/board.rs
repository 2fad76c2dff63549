//! What a store in memory holds: values, counters and queues by key.

use std::collections::{HashMap, VecDeque};

/// Values and queues by key. They have name spaces of their own, as in PyTorch.
#[derive(Debug, Default)]
pub(super) struct Board {
    values: HashMap<Vec<u8>, Vec<u8>>,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
}

/// Why a counter could not be added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CounterError {
    /// The key holds something that is not a decimal number.
    NotACounter,
    /// The sum is outside 64 bits.
    Overflow {
        /// The counter's value.
        value: i64,
    },
}

impl Board {
    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) {
        match self.values.get_mut(key) {
            Some(old) => value.clone_into(old),
            None => drop(self.values.insert(key.to_owned(), value.to_owned())),
        }
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    pub(super) fn add(&mut self, key: &[u8], delta: i64) -> Result<i64, CounterError> {
        let value = match self.values.get(key) {
            None => 0,
            Some(value) => std::str::from_utf8(value)
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or(CounterError::NotACounter)?,
        };
        let sum = i64::checked_add(value, delta).ok_or(CounterError::Overflow { value })?;
        self.set(key, sum.to_string().as_bytes());
        Ok(sum)
    }

    /// Sets `key` to `desired` if it holds `expected`, or is missing and `expected` is empty. Returns what the key holds
    /// then; for a missing key, `expected` (as PyTorch does).
    pub(super) fn compare_set(&mut self, key: &[u8], expected: &[u8], desired: &[u8]) -> Vec<u8> {
        match self.values.get(key) {
            Some(value) if value == expected => self.set(key, desired),
            Some(value) => return value.clone(),
            None if expected.is_empty() => self.set(key, desired),
            None => return expected.to_owned(),
        }
        desired.to_owned()
    }

    pub(super) fn append(&mut self, key: &[u8], value: &[u8]) {
        self.values.entry(key.to_owned()).or_default().extend_from_slice(value);
    }

    /// True when the key has a value, or its queue an entry.
    pub(super) fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    pub(super) fn remove(&mut self, key: &[u8]) -> bool {
        self.values.remove(key).is_some()
    }

    /// How many values there are; queues do not count.
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    /// The keys that have values.
    pub(super) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.values.keys().map(Vec::as_slice)
    }

    pub(super) fn push(&mut self, key: &[u8], value: &[u8]) {
        self.queues.entry(key.to_owned()).or_default().push_back(value.to_owned());
    }

    pub(super) fn pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let queue = self.queues.get_mut(key)?;
        let value = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(key);
        }
        value
    }

    pub(super) fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }
}
