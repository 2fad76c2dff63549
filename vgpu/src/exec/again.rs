//! Repeats strong loads of a polling warp that change nothing in check mode.
//!
//! The checker records reads that changed nothing. If all reads of a load are such, the load is
//! kept with its lanes and places. While the places and the causal pasts stay as they are, the load
//! is repeated without another check of its places.

use super::access::{element, order_of};
use super::lanes::lanes;
use super::state::{Exec, Flow, Run};
use crate::check::hooks::{Hooks, Place, Repeated};
use crate::ir::Access;

/// Loads that a warp keeps.
const MOST: usize = 4;
/// Places of such a load.
const PLACES: usize = 4;

/// A strong load that changed nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Again {
    pc: u32,
    lanes: u32,
    /// By place: the lanes there read the same element.
    reads: [Option<Repeated>; PLACES],
    /// The addresses of the places.
    addr: [u64; PLACES],
}

impl<W: Hooks> Exec<'_, W> {
    /// Keeps a load by the lanes `m` that changed nothing.
    pub(super) fn keep_load(&mut self, a: &Access, m: u32) -> Run<()> {
        let (addr, size) = (self.addresses(&a.addr), u64::from(a.bytes) * u64::from(a.n));
        let (mut todo, mut new) =
            (m, Again { pc: self.pc, lanes: m, reads: [None; PLACES], addr: [0; PLACES] });
        for (read, at) in new.reads.iter_mut().zip(&mut new.addr) {
            if todo == 0 {
                break;
            }
            let (part, place) = self.loaded_part(a, &addr, size, todo)?;
            let Some(repeated) = self.watch.repeated(place, part, self.pc) else { return Ok(()) };
            (*read, *at) = (Some(repeated), addr[todo.trailing_zeros() as usize % 32]);
            todo &= !part.lanes;
        }
        if todo != 0 {
            return Ok(());
        }
        let kept = &mut self.warp.again;
        match kept.iter().position(|old| (old.pc, old.lanes) == (new.pc, new.lanes)) {
            Some(at) => kept[at] = new,
            None if kept.len() == MOST => kept[new.pc as usize % MOST] = new,
            None => kept.push(new),
        }
        Ok(())
    }

    /// Repeats a load of the lanes `m` that changed nothing before. `None`, and nothing has
    /// happened, where it may change something now.
    pub(super) fn load_again(&mut self, a: &Access, m: u32) -> Option<Flow> {
        let at = self.warp.again.iter().position(|old| (old.pc, old.lanes) == (self.pc, m))?;
        let again = &self.warp.again[at];
        // Where each lane reads.
        let mut from = [std::ptr::null_mut(); 32];
        let size = u64::from(a.bytes) * u64::from(a.n);
        for (read, addr) in again.reads.iter().map_while(Option::as_ref).zip(&again.addr) {
            let p = match read.place {
                // As in `Exec::global`: the region is there until `Warp::forget_regions`.
                Place::Global { .. } => *addr as *mut u8,
                Place::Shared { offset } => self.block.shared.pointer(offset, size).ok()?,
                Place::Private => return None,
            };
            for i in lanes(read.lanes) {
                if self.address(&a.addr, i) != *addr {
                    return None;
                }
                from[i] = p;
            }
        }
        let first = again.addr[0];
        if !self.watch.repeats(&mut self.warp.again[at].reads, self.pc, a.sem, a.scope) {
            return None;
        }
        let (order, mut value, mut seen) = (order_of(a), None, 0u64);
        for i in lanes(m) {
            let mut halves = [0; 2];
            for e in 0..a.n as usize {
                let mut v = halves[1];
                if !a.whole || e == 0 {
                    // SAFETY: bounds and alignment of the whole vector were checked when the load was
                    // kept, or by `pointer` now. A region that is no longer mapped has been
                    // forgotten, with the loads that were kept. The places have all lanes of `m`.
                    halves = unsafe { element(a, from[i], e, order) };
                    v = halves[0];
                }
                v = self.take_value(a, e, i, v);
                value.get_or_insert(v);
                seen = seen.rotate_left(7) ^ v;
            }
        }
        Some(self.loaded(a, value.map(|value| (first, value)), seen))
    }
}
