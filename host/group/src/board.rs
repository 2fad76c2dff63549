//! The content of a store in memory: values, counters and queues by key.

use std::borrow::Borrow;
use std::collections::{HashMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Approximate overhead of a key or value, in addition to its bytes.
pub(super) const OVERHEAD: usize = 64;
/// Longest text of a counter.
const MAX_COUNTER_TEXT: usize = 20;

/// Values and queues by key. Values and queues have separate name spaces, as in PyTorch.
#[derive(Debug, Default)]
pub(super) struct Board {
    values: HashMap<Shared, Shared>,
    queues: HashMap<Shared, VecDeque<Shared>>,
    meter: Meter,
}

/// The bytes of a key or of a value. Answers sent in slices share them without a copy.
#[derive(Debug, Clone)]
pub(super) struct Shared(Arc<Metered>);

#[derive(Debug)]
struct Metered {
    bytes: Vec<u8>,
    meter: Meter,
}

/// Memory of everything that a board gave out, for as long as anyone holds it.
#[derive(Debug, Clone, Default)]
struct Meter(Arc<AtomicUsize>);

impl Metered {
    fn size(&self) -> usize {
        self.bytes.capacity() + OVERHEAD
    }
}

impl Drop for Metered {
    fn drop(&mut self) {
        self.meter.0.fetch_sub(self.size(), Ordering::Relaxed);
    }
}

impl Shared {
    fn new(bytes: &[u8], meter: &Meter) -> Shared {
        let metered = Metered { bytes: bytes.to_vec(), meter: meter.clone() };
        meter.0.fetch_add(metered.size(), Ordering::Relaxed);
        Shared(Arc::new(metered))
    }

    /// Appends in place, unless an answer under way holds the bytes as they are.
    fn append(&mut self, more: &[u8]) {
        if Arc::get_mut(&mut self.0).is_none() {
            *self = Shared::new(self, &self.0.meter);
        }
        if let Some(metered) = Arc::get_mut(&mut self.0) {
            let before = metered.size();
            metered.bytes.extend_from_slice(more);
            metered.meter.0.fetch_add(metered.size() - before, Ordering::Relaxed);
        }
    }
}

impl Deref for Shared {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.bytes
    }
}

impl Borrow<[u8]> for Shared {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl PartialEq for Shared {
    fn eq(&self, other: &Shared) -> bool {
        **self == **other
    }
}

impl Eq for Shared {}

impl Hash for Shared {
    // The same hash as the slice, because look-ups use a slice.
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
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
    /// Bytes of all keys and values, each with [`OVERHEAD`], including replaced values that unsent
    /// answers still hold.
    pub(super) fn bytes(&self) -> usize {
        self.meter.0.load(Ordering::Relaxed)
    }

    fn share(&self, bytes: &[u8]) -> Shared {
        Shared::new(bytes, &self.meter)
    }

    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) {
        let value = self.share(value);
        match self.values.get_mut(key) {
            Some(old) => *old = value,
            None => drop(self.values.insert(self.share(key), value)),
        }
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&Shared> {
        self.values.get(key)
    }

    pub(super) fn add(&mut self, key: &[u8], delta: i64) -> Result<i64, CounterError> {
        let value = match self.values.get(key) {
            None => 0,
            Some(value) if value.len() > MAX_COUNTER_TEXT => return Err(CounterError::NotACounter),
            Some(value) => std::str::from_utf8(value)
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or(CounterError::NotACounter)?,
        };
        let sum = i64::checked_add(value, delta).ok_or(CounterError::Overflow { value })?;
        self.set(key, sum.to_string().as_bytes());
        Ok(sum)
    }

    /// Sets `key` to `desired` if it holds `expected`, or is missing and `expected` is empty.
    /// Returns what the key holds then; for a missing key, `expected` (as PyTorch does).
    pub(super) fn compare_set(&mut self, key: &[u8], expected: &[u8], desired: &[u8]) -> Shared {
        match self.values.get(key) {
            Some(value) if **value == *expected => self.set(key, desired),
            Some(value) => return value.clone(),
            None if expected.is_empty() => self.set(key, desired),
            None => return self.share(expected),
        }
        self.values.get(key).cloned().unwrap_or_else(|| self.share(desired))
    }

    pub(super) fn append(&mut self, key: &[u8], value: &[u8]) {
        match self.values.get_mut(key) {
            Some(old) => old.append(value),
            None => self.set(key, value),
        }
    }

    /// Most additional memory that an append needs: the value's allocation may double, and is
    /// copied while an answer holds the old one.
    pub(super) fn append_size(&self, key: &[u8], more: usize) -> usize {
        let Some(value) = self.values.get(key) else { return key.len() + more + 2 * OVERHEAD };
        let shared = Arc::strong_count(&value.0) > 1;
        let (length, capacity) = (value.len(), value.0.bytes.capacity());
        match shared {
            true => length + length.max(more) + OVERHEAD,
            false if length + more <= capacity => 0,
            false => capacity.max(more),
        }
    }

    /// Additional memory that setting a key to so many bytes takes.
    pub(super) fn set_size(&self, key: &[u8], length: usize) -> usize {
        match self.values.get(key) {
            // An answer under way holds the value that is replaced.
            Some(old) if Arc::strong_count(&old.0) > 1 => length + OVERHEAD,
            Some(old) => length.saturating_sub(old.len()),
            None => key.len() + length + 2 * OVERHEAD,
        }
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
    pub(super) fn keys(&self) -> impl Iterator<Item = &Shared> {
        self.values.keys()
    }

    pub(super) fn push(&mut self, key: &[u8], value: &[u8]) {
        let value = self.share(value);
        match self.queues.get_mut(key) {
            Some(queue) => queue.push_back(value),
            None => drop(self.queues.insert(self.share(key), VecDeque::from([value]))),
        }
    }

    pub(super) fn pop(&mut self, key: &[u8]) -> Option<Shared> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_meter_counts_what_is_alive_and_nothing_else() {
        let mut board = Board::default();
        board.set(b"key", &[1; 1000]);
        assert_eq!(board.bytes(), 3 + 1000 + 2 * OVERHEAD);
        assert_eq!((board.set_size(b"key", 1000), board.set_size(b"key", 1001)), (0, 1));
        assert_eq!(board.set_size(b"other", 7), 5 + 7 + 2 * OVERHEAD);
        let held = board.get(b"key").cloned();
        assert_eq!(board.set_size(b"key", 1000), 1000 + OVERHEAD, "an answer holds the old value");
        board.set(b"key", b"");
        assert_eq!(board.bytes(), 3 + 1000 + 3 * OVERHEAD, "an answer holds the old value");
        drop(held);
        assert_eq!(board.bytes(), 3 + 2 * OVERHEAD);
        let held = board.get(b"key").cloned();
        (0..100).for_each(|_| board.append(b"key", &[2; 50]));
        assert_eq!((held.unwrap().len(), board.get(b"key").unwrap().len()), (0, 5000));
        assert!((5000..12_000).contains(&board.bytes()), "{}", board.bytes());
        board.push(b"q", b"entry");
        drop((board.pop(b"q"), board.compare_set(b"key", b"other", b"x")));
        assert!(board.add(b"key", 1).is_err() && board.remove(b"key"));
        assert_eq!(board.bytes(), 0);
    }
}
