//! The release patterns that reads of a location observe, by location.

use super::clock::Key;
use super::hash::FastMap;
use super::history::Writes;
use super::past::CausalPast;
use crate::ir::Scope;

/// A release pattern that reads of a location may observe.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) scope: Scope,
    pub(crate) by: Key,
    /// Other writers have added their releases by read-modify-writes. The scope includes them and
    /// `by`.
    pub(crate) shared: bool,
    /// Number of the chain; [`OUTSIDE`] is the chain of hidden memory. The causal past of a chain
    /// only grows.
    ///
    /// [`OUTSIDE`]: super::block::OUTSIDE
    pub(crate) chain: u64,
    pub(crate) past: CausalPast,
}

/// A fence's scope, and the causal past there.
pub(crate) type Fenced = (Scope, CausalPast);

/// The strong writes of a location, and what reads of it acquire.
#[derive(Clone, Debug, Default)]
pub(crate) struct Releases {
    /// For reports.
    pub(crate) writes: Writes,
    /// `None` where no write released anything.
    pub(crate) patterns: Option<Box<Patterns>>,
}

/// The release patterns of a location.
#[derive(Clone, Debug, Default)]
pub(crate) struct Patterns {
    /// Releases that a read of its last write observes.
    pub(crate) last: Vec<Release>,
    /// Releases that a read of the write before observes. A reader of an older value acquires what
    /// was released with that value.
    pub(crate) before: Vec<Release>,
    /// For reports: accesses before fences that stood ahead of a barrier before its last write, and
    /// the narrowest scope of these fences.
    pub(crate) ahead: Option<Fenced>,
}

impl Releases {
    pub(crate) fn last(&self) -> &[Release] {
        self.patterns.as_ref().map_or(&[], |patterns| &patterns.last)
    }

    pub(crate) fn before(&self) -> &[Release] {
        self.patterns.as_ref().map_or(&[], |patterns| &patterns.before)
    }

    pub(crate) fn ahead(&self) -> Option<&Fenced> {
        self.patterns.as_ref()?.ahead.as_ref()
    }
}

/// Bytes of memory whose locations lie together in a [`ReleaseMap`].
const CHUNK: u64 = 512;

/// The number of the only piece of memory in the map of a block: its shared memory.
pub(crate) const OWN: u32 = 0;

/// The releases of each location, by piece of memory and offset.
///
/// Kernels that send data in flagged words write and read very many neighbouring locations. So
/// these are stored together, behind one search: a table of single locations misses the cache at
/// each.
#[derive(Debug, Default)]
pub(crate) struct ReleaseMap(FastMap<(u32, u64), Vec<(u16, Releases)>>);

/// The index of a location among those of its chunk, or the index at which it would be.
fn place(chunk: &[(u16, Releases)], within: u16) -> Result<usize, usize> {
    // All locations of a chunk are mostly used, at equal distances, and come in ascending order.
    let guess = usize::from(within) * chunk.len() / CHUNK as usize;
    match chunk.last() {
        Some((last, _)) if *last < within => Err(chunk.len()),
        _ if chunk.get(guess).is_some_and(|entry| entry.0 == within) => Ok(guess),
        _ => chunk.binary_search_by_key(&within, |entry| entry.0),
    }
}

impl ReleaseMap {
    pub(crate) fn get(&self, memory: u32, offset: u64) -> Option<&Releases> {
        let chunk = self.0.get(&(memory, offset / CHUNK))?;
        let at = place(chunk, within(offset)).ok()?;
        Some(&chunk[at].1)
    }

    pub(crate) fn get_mut(&mut self, memory: u32, offset: u64) -> Option<&mut Releases> {
        let chunk = self.0.get_mut(&(memory, offset / CHUNK))?;
        let at = place(chunk, within(offset)).ok()?;
        Some(&mut chunk[at].1)
    }

    pub(crate) fn get_or_default(&mut self, memory: u32, offset: u64) -> &mut Releases {
        let chunk = self.0.entry((memory, offset / CHUNK)).or_default();
        let at = place(chunk, within(offset)).unwrap_or_else(|at| {
            chunk.insert(at, (within(offset), Releases::default()));
            at
        });
        &mut chunk[at].1
    }

    /// All locations, with their piece of memory and offset, in no order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, u64, &Releases)> {
        self.0.iter().flat_map(|(&(memory, chunk), locations)| {
            locations.iter().map(move |(at, of)| (memory, chunk * CHUNK + u64::from(*at), of))
        })
    }

    /// Discards the releases of a freed piece of memory.
    pub(crate) fn forget(&mut self, memory: u32) {
        self.0.retain(|(of, _), _| *of != memory);
    }
}

fn within(offset: u64) -> u16 {
    (offset % CHUNK) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_found_whatever_the_order_in_which_they_came() {
        let mut map = ReleaseMap::default();
        let ahead = |map: &ReleaseMap, memory, offset| {
            map.get(memory, offset).and_then(Releases::ahead).map(|(scope, _)| *scope)
        };
        let places = [(1, 8), (1, CHUNK), (2, 8), (1, 0), (1, CHUNK - 4), (1, 8 + CHUNK)];
        for (i, (memory, offset)) in places.into_iter().enumerate() {
            let scope = if i % 2 == 0 { Scope::Cta } else { Scope::Sys };
            let patterns = map.get_or_default(memory, offset).patterns.get_or_insert_default();
            patterns.ahead = Some((scope, CausalPast::default()));
        }
        for (i, (memory, offset)) in places.into_iter().enumerate() {
            let scope = if i % 2 == 0 { Scope::Cta } else { Scope::Sys };
            assert_eq!(ahead(&map, memory, offset), Some(scope));
            assert!(map.get_mut(memory, offset).is_some());
        }
        assert!(map.get(1, 4).is_none() && map.get(3, 8).is_none() && map.get_mut(2, 0).is_none());
        map.forget(1);
        assert!(map.get(1, 8).is_none() && map.get(1, CHUNK).is_none());
        assert_eq!(ahead(&map, 2, 8), Some(Scope::Cta));
    }
}
