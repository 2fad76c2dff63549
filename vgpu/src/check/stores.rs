//! Counts of stores and loads by kernels and their places. Tests compare them with predictions: the
//! bytes that a protocol sends over each link, and the memory that each block loads from.

use std::collections::HashMap;

use super::clock::{self, Key};
use super::hooks::Place;

/// Bytes that the kernels of one name on one device stored in one part of a piece of memory, bulk
/// copies and atomics included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Number of the device whose kernels stored
    /// ([`Checker::number_device`](crate::Checker::number_device)).
    pub by: u32,
    /// The number of the device that the memory belongs to.
    pub on: u32,
    /// Label of the memory there.
    pub memory: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Name of the part, without its index ([`Region::name_parts`](crate::Region::name_parts));
    /// empty if it has none.
    pub part: String,
    /// How many bytes.
    pub bytes: u64,
}

/// Loads by the lanes of one block, of the kernels of one name on one device, from one part of a
/// piece of memory. Atomics and bulk copies are not counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Number of the device whose kernels loaded
    /// ([`Checker::number_device`](crate::Checker::number_device)).
    pub by: u32,
    /// The number of the device that the memory belongs to.
    pub on: u32,
    /// Label of the memory there.
    pub memory: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Name of the part, as in [`Stored::part`].
    pub part: String,
    /// The block within its grid.
    pub block: u32,
    /// How many loads.
    pub loads: u64,
}

/// Counts since [`Counts::count`], by grid, block within it, piece of memory and offset.
#[derive(Debug, Default)]
pub(crate) struct Counts(Option<HashMap<(u32, u32, u32, u64), u64>>);

impl Counts {
    /// Counts from here on.
    pub(super) fn count(&mut self) {
        self.0.get_or_insert_default();
    }

    pub(super) fn are_counted(&self) -> bool {
        self.0.is_some()
    }

    /// `more` bytes or loads by the actor `by`.
    pub(super) fn add(&mut self, by: Key, place: Place, more: u64) {
        if let (Some(counts), Place::Global { shadow, offset }) = (&mut self.0, place) {
            let block = clock::place_of(by).map_or(0, |(block, _)| block as u32);
            *counts.entry((clock::grid_of(by), block, shadow, offset)).or_default() += more;
        }
    }

    /// Discards the counts of a freed piece of memory.
    pub(super) fn forget(&mut self, number: u32) {
        if let Some(counts) = &mut self.0 {
            counts.retain(|(_, _, shadow, _), _| *shadow != number);
        }
    }

    /// Grid, block, piece of memory and offset, with the count.
    pub(super) fn counted(&self) -> impl Iterator<Item = ((u32, u32, u32, u64), u64)> {
        self.0.iter().flatten().map(|(&place, &count)| (place, count))
    }
}
