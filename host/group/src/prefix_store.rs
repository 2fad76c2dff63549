//! A part of a store, under a name.

use std::sync::Arc;
use std::time::Duration;

use super::Store;
use crate::error::Result;

/// A [`Store`] whose keys are those of another store that begin with `PREFIX/`, as PyTorch's
/// `PrefixStore` has them.
///
/// Groups that share a store get one each, so that their keys cannot meet.
#[derive(Debug, Clone)]
pub struct PrefixStore {
    prefix: String,
    store: Arc<dyn Store>,
}

impl PrefixStore {
    /// The part of `store` under `prefix`.
    pub fn new(prefix: impl Into<String>, store: Arc<dyn Store>) -> PrefixStore {
        PrefixStore { prefix: prefix.into(), store }
    }

    fn join(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn join_all(&self, keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| self.join(key)).collect()
    }
}

fn borrow(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.join(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.store.get(&self.join(key), timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.store.add(&self.join(key), delta)
    }

    fn check(&self, key: &str) -> Result<bool> {
        self.store.check(&self.join(key))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.store.delete(&self.join(key))
    }

    fn check_all(&self, keys: &[&str]) -> Result<bool> {
        self.store.check_all(&borrow(&self.join_all(keys)))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.store.wait(&borrow(&self.join_all(keys)), timeout)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(&self.join(key), expected, desired)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.append(&self.join(key), value)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.store.multi_get(&borrow(&self.join_all(keys)), timeout)
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        let keys: Vec<String> = entries.iter().map(|(key, _)| self.join(key)).collect();
        let entries: Vec<_> =
            keys.iter().zip(entries).map(|(key, (_, value))| (key.as_str(), *value)).collect();
        self.store.multi_set(&entries)
    }

    fn num_keys(&self) -> Result<u64> {
        self.store.num_keys()
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.queue_push(&self.join(key), value)
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        self.store.queue_pop(&self.join(key), timeout)
    }

    fn queue_len(&self, key: &str) -> Result<u64> {
        self.store.queue_len(&self.join(key))
    }
}
