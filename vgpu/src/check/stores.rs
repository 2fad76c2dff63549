//! How many bytes kernels store, and where: what a protocol sends over each link, for tests that predict it.

use std::collections::HashMap;

use super::clock::{self, Key};
use super::place::Place;

/// Bytes that the kernels of one name on one device stored in one part of a piece of memory, bulk copies and atomics included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The number of the device whose kernels stored them ([`Checker::number_device`](crate::Checker::number_device)).
    pub by: u32,
    /// The number of the device that the memory belongs to.
    pub on: u32,
    /// Label of the memory there.
    pub memory: String,
    /// Name of the kernel.
    pub kernel: String,
    /// What lies there, without its index ([`Region::name_parts`](crate::Region::name_parts)); empty where it has no name.
    pub part: String,
    /// How many bytes.
    pub bytes: u64,
}

/// Bytes by grid, piece of memory and offset, once somebody wants to know.
#[derive(Debug, Default)]
pub(crate) struct Stores(Option<HashMap<(u32, u32, u64), u64>>);

impl Stores {
    /// Counts from here on.
    pub(super) fn count(&mut self) {
        self.0.get_or_insert_default();
    }

    /// A store of `bytes` bytes by the actor `by`.
    pub(super) fn add(&mut self, by: Key, place: Place, bytes: u64) {
        if let (Some(stores), Place::Global { shadow, offset }) = (&mut self.0, place) {
            *stores.entry((clock::grid_of(by), shadow, offset)).or_default() += bytes;
        }
    }

    /// A piece of memory is gone.
    pub(super) fn forget(&mut self, number: u32) {
        if let Some(stores) = &mut self.0 {
            stores.retain(|(_, shadow, _), _| *shadow != number);
        }
    }

    /// Grid, piece of memory and offset, with the bytes.
    pub(super) fn counted(&self) -> impl Iterator<Item = ((u32, u32, u64), u64)> {
        self.0.iter().flatten().map(|(&place, &bytes)| (place, bytes))
    }
}
