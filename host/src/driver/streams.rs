//! The list of a device's streams.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::lock::lock;

/// The streams of a device that have an owner ([`Stream`](super::Stream)).
#[derive(Debug, Default)]
pub struct Streams {
    list: Mutex<List>,
    /// Whether a wait for work of the device was given up. The work may still run.
    given_up: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct List {
    pub(super) streams: Vec<Listed>,
    /// A stream that has waited for all destroyed streams, whose work may still run.
    pub(super) departed: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Listed {
    pub(super) id: u64,
    pub(super) handle: u64,
    /// A fence comes behind it; false where its work is ordered otherwise.
    pub(super) fenced: bool,
}

/// The list, held still: none of the streams goes, or begins to be captured by this library,
/// meanwhile.
pub(super) type Still<'a> = MutexGuard<'a, List>;

impl Streams {
    /// A number that no other stream of this process has or had: a driver's handle may come back.
    pub(super) fn new_id() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn hold(&self) -> Still<'_> {
        lock(&self.list)
    }

    /// Whether a wait was given up although its work may still run. Its memory is not known here,
    /// so nothing is freed any more.
    pub(super) fn are_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// Notes that a wait was given up. True for the first time.
    pub(super) fn give_up(&self) -> bool {
        !self.given_up.swap(true, Ordering::AcqRel)
    }

    pub(super) fn add(&self, stream: Listed) {
        self.hold().streams.push(stream);
    }
}

impl List {
    /// Takes a stream off the list.
    pub(super) fn remove(&mut self, id: u64) -> Option<Listed> {
        let at = self.streams.iter().position(|stream| stream.id == id)?;
        Some(self.streams.swap_remove(at))
    }

    /// (id, handle) of the streams that a fence comes behind. The one that stands for those that
    /// are gone has the id 0.
    pub(super) fn fenced(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let fenced = self.streams.iter().filter(|stream| stream.fenced);
        fenced.map(|stream| (stream.id, stream.handle)).chain(self.departed.map(|handle| (0, handle)))
    }
}
