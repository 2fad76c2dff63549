//! How many bytes kernels store, and where: what a protocol sends over each link, for tests that predict it.

use std::collections::{BTreeMap, HashMap};

use super::Checker;
use super::clock::{self, Key};
use super::place::Place;
use super::world::World;

/// Bytes that the kernels of one name on one device stored in one part of a piece of memory, bulk copies and atomics included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The number of the device whose kernels stored them ([`Checker::number_device`]).
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
}

impl Checker {
    /// Has stores counted from here on, for [`Checker::stores`].
    pub fn count_stores(&self) {
        self.world().stores.0.get_or_insert_default();
    }

    /// Gives a device the number that [`Stored`] has for it; 0 otherwise.
    pub fn number_device(&self, memory: &crate::Memory, number: u32) {
        self.world().devices.insert(memory.id(), number);
    }

    /// What kernels have stored since [`Checker::count_stores`], in memory that is still there.
    #[must_use]
    pub fn stores(&self) -> Vec<Stored> {
        let world = self.world();
        let mut all: BTreeMap<_, u64> = BTreeMap::new();
        for (&(grid, shadow, offset), bytes) in world.stores.0.iter().flatten() {
            if let Some((by, kernel)) = world.kernel_of(grid)
                && let Some((on, memory)) = world.origin_of(shadow)
            {
                let part = world.part(shadow, offset);
                let part = part.split(['[', ' ']).next().unwrap_or_default().to_owned();
                *all.entry((by, on, memory, kernel, part)).or_default() += bytes;
            }
        }
        let stored = |((by, on, memory, kernel, part), bytes)| Stored { by, on, memory, kernel, part, bytes };
        all.into_iter().map(stored).collect()
    }
}

impl World {
    fn number(&self, device: u64) -> u32 {
        self.devices.get(&device).copied().unwrap_or_default()
    }

    /// The device of a grid, and the kernel.
    fn kernel_of(&self, grid: u32) -> Option<(u32, String)> {
        // Numbers begin with 1.
        let facts = self.grids.0.get((grid as usize).checked_sub(1)?)?;
        Some((self.number(facts.device), facts.kernel.name().to_owned()))
    }

    /// The device that a piece of memory belongs to, and its label there.
    fn origin_of(&self, shadow: u32) -> Option<(u32, String)> {
        let (device, label) = self.shadows.get(shadow as usize)?.origin.as_ref()?;
        Some((self.number(*device), label.to_string()))
    }
}
