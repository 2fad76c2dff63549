//! Ranks as threads.

use std::sync::Arc;
use std::time::Duration;

use epoxide::group::{HashStore, MeshGroup, MeshOptions, Store};

/// Longer than any operation of a healthy group takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// A deadline that is meant to expire after all ranks but the late ones have entered the operation.
/// On a busy machine they enter up to a second apart.
pub const LATE: Duration = Duration::from_secs(3);

pub fn options(timeout: Duration) -> MeshOptions {
    MeshOptions { timeout, ..MeshOptions::default() }
}

/// Runs `rank_main` on a thread per rank over a fresh store; the results by rank.
pub fn threads<T: Send>(
    size: u32,
    options: MeshOptions,
    rank_main: impl Fn(MeshGroup) -> T + Sync,
) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|scope| {
        let start = |rank| {
            let (store, options, rank_main) = (store.clone(), options.clone(), &rank_main);
            scope.spawn(move || rank_main(MeshGroup::new(store, rank, size, "test", options).unwrap()))
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
