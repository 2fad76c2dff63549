//! Loads, stores and atomics: address checks, then raw or atomic accesses to host memory.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use half::{bf16, f16};

use super::cluster::rank_of;
use super::lanes::{lanes, mask_of};
use super::parts::stored_word;
use super::simd;
use super::state::window;
use super::state::{Exec, Flow, LateLoad, Run, stop};
use super::unchecked::FEW;
use crate::check::hooks::{Blamed, Hooks, Part, Place};
use crate::check::record::{How, Update, ViolationAt};
use crate::fault::FaultKind;
use crate::float::{self, canonical, flush};
use crate::ir::{Access, Addr, Atomic, FULL, Op, Rmw, SINK, Sem, Space};

/// Generic addresses of shared, local and parameter memory carry a tag in their top byte, which no
/// host address has.
pub(crate) const SHARED_TAG: u64 = 0xa0 << 56;
pub(crate) const LOCAL_TAG: u64 = 0xb0 << 56;
pub(crate) const PARAM_TAG: u64 = 0xc0 << 56;
pub(crate) const TAG: u64 = 0xff << 56;

/// Reads `bytes` (1, 2, 4 or 8) zero-extended.
///
/// # Safety
/// `p` must be valid for `bytes` bytes and aligned to them.
#[inline(always)]
pub(super) unsafe fn read(p: *mut u8, bytes: u8, order: Ordering) -> u64 {
    // SAFETY: the caller passes a valid, aligned pointer; atomics make the access single and untorn
    // even if other threads or processes write it.
    unsafe {
        match bytes {
            1 => u64::from(AtomicU8::from_ptr(p).load(order)),
            2 => u64::from(AtomicU16::from_ptr(p.cast()).load(order)),
            4 => u64::from(AtomicU32::from_ptr(p.cast()).load(order)),
            _ => AtomicU64::from_ptr(p.cast()).load(order),
        }
    }
}

/// Writes the low `bytes` (1, 2, 4 or 8) of `v`.
///
/// # Safety
/// `p` must be valid for `bytes` bytes and aligned to them.
#[inline(always)]
pub(super) unsafe fn write(p: *mut u8, bytes: u8, v: u64, order: Ordering) {
    // SAFETY: passed on to the caller; see `read`.
    unsafe {
        match bytes {
            1 => AtomicU8::from_ptr(p).store(v as u8, order),
            2 => AtomicU16::from_ptr(p.cast()).store(v as u16, order),
            4 => AtomicU32::from_ptr(p.cast()).store(v as u32, order),
            _ => AtomicU64::from_ptr(p.cast()).store(v, order),
        }
    }
}

/// Accesses of 16 bytes at once.
#[cfg(target_arch = "x86_64")]
pub(super) mod whole {
    use std::arch::asm;
    use std::arch::x86_64::{__m128i, _mm_cvtsi128_si64, _mm_set_epi64x, _mm_unpackhi_epi64};

    /// Reads them as two halves.
    ///
    /// # Safety
    /// `p` must be valid for 16 bytes and aligned to them.
    pub(in super::super) unsafe fn read(p: *mut u8) -> [u64; 2] {
        let value: __m128i;
        // SAFETY: passed on to the caller. Processors with AVX, which are all of the last ten
        // years, do this access at once (Intel's manual, volume 3, 9.1.1; AMD's, volume 2, 7.3.2).
        unsafe {
            asm!("movdqa {v}, [{p}]", v = out(xmm_reg) value, p = in(reg) p, options(nostack, preserves_flags))
        };
        // SAFETY: every x86-64 processor has SSE2.
        unsafe {
            [_mm_cvtsi128_si64(value) as u64, _mm_cvtsi128_si64(_mm_unpackhi_epi64(value, value)) as u64]
        }
    }

    /// Writes them.
    ///
    /// # Safety
    /// The same conditions as for [`read`].
    pub(super) unsafe fn write(p: *mut u8, halves: [u64; 2]) {
        // SAFETY: as in `read`.
        unsafe {
            let value = _mm_set_epi64x(halves[1] as i64, halves[0] as i64);
            asm!("movdqa [{p}], {v}", v = in(xmm_reg) value, p = in(reg) p, options(nostack, preserves_flags));
        }
    }
}

/// Accesses of 16 bytes, at once as far as the threads of one process are concerned.
#[cfg(not(target_arch = "x86_64"))]
pub(super) mod whole {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Mutex, PoisonError};

    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    /// Reads them as two halves.
    ///
    /// # Safety
    /// `p` must be valid for 16 bytes and aligned to them.
    pub(in super::super) unsafe fn read(p: *mut u8) -> [u64; 2] {
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: passed on to the caller.
        [0, 8].map(|at| unsafe { AtomicU64::from_ptr(p.add(at).cast()) }.load(Ordering::SeqCst))
    }

    /// Writes them.
    ///
    /// # Safety
    /// The same conditions as for [`read`].
    pub(super) unsafe fn write(p: *mut u8, halves: [u64; 2]) {
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        for (at, half) in [0, 8].into_iter().zip(halves) {
            // SAFETY: passed on to the caller.
            unsafe { AtomicU64::from_ptr(p.add(at).cast()) }.store(half, Ordering::SeqCst);
        }
    }
}

/// The new value of a read-modify-write; `bytes` selects the width.
pub(super) fn modify(op: Rmw, bytes: u8, old: u64, a: u64, b: u64) -> u64 {
    let signed = |v: u64| if bytes == 4 { i64::from(v as u32 as i32) } else { v as i64 };
    match op {
        Rmw::Add => old.wrapping_add(a),
        Rmw::Min => old.min(a),
        Rmw::Max => old.max(a),
        Rmw::MinS => signed(old).min(signed(a)) as u64,
        Rmw::MaxS => signed(old).max(signed(a)) as u64,
        Rmw::Inc => {
            if old >= a {
                0
            } else {
                old + 1
            }
        }
        Rmw::Dec => {
            if old == 0 || old > a {
                a
            } else {
                old - 1
            }
        }
        Rmw::And => old & a,
        Rmw::Or => old | a,
        Rmw::Xor => old ^ a,
        Rmw::Exch => a,
        Rmw::Cas => {
            if old == a {
                b
            } else {
                old
            }
        }
        Rmw::AddF32 => {
            let sum = f32::from_bits(old as u32) + f32::from_bits(a as u32);
            u64::from(canonical(sum).to_bits())
        }
        Rmw::AddF32Ftz => {
            let sum = flush(f32::from_bits(old as u32)) + flush(f32::from_bits(a as u32));
            u64::from(canonical(flush(sum)).to_bits())
        }
        Rmw::AddF64 => (f64::from_bits(old) + f64::from_bits(a)).to_bits(),
        Rmw::AddF16 => u64::from(add_f16(old as u16, a as u16)),
        Rmw::AddBf16 => u64::from(add_bf16(old as u16, a as u16)),
        Rmw::AddF16x2 => halves(old, a, add_f16),
        Rmw::AddBf16x2 => halves(old, a, add_bf16),
        Rmw::MinF16 => of_halves(old, a, f16::from_bits, f16::to_bits, float::min::<f16, false>),
        Rmw::MaxF16 => of_halves(old, a, f16::from_bits, f16::to_bits, float::max::<f16, false>),
        Rmw::MinBf16 => of_halves(old, a, bf16::from_bits, bf16::to_bits, float::min::<bf16, false>),
        Rmw::MaxBf16 => of_halves(old, a, bf16::from_bits, bf16::to_bits, float::max::<bf16, false>),
    }
}

fn halves(old: u64, a: u64, f: impl Fn(u16, u16) -> u16) -> u64 {
    u64::from(f(old as u16, a as u16)) | u64::from(f((old >> 16) as u16, (a >> 16) as u16)) << 16
}

/// A function of floats of 16 bits, of their bits.
fn of_halves<T>(old: u64, a: u64, from: fn(u16) -> T, to: fn(T) -> u16, f: fn(T, T) -> T) -> u64 {
    u64::from(to(f(from(old as u16), from(a as u16))))
}

fn add_f16(x: u16, y: u16) -> u16 {
    crate::float::add_f16(f16::from_bits(x), f16::from_bits(y)).to_bits()
}

fn add_bf16(x: u16, y: u16) -> u16 {
    crate::float::add_bf16(bf16::from_bits(x), bf16::from_bits(y)).to_bits()
}

/// Atomically replaces `*p` and returns the old value.
///
/// # Safety
/// `p` must be valid for `bytes` bytes (2, 4 or 8) and aligned to them.
pub(super) unsafe fn rmw(p: *mut u8, bytes: u8, op: Rmw, a: u64, b: u64) -> u64 {
    // SAFETY: passed on to the caller.
    unsafe {
        match (op, bytes) {
            // Plain adds, the common case, are done directly.
            (Rmw::Add, 2) => AtomicU16::from_ptr(p.cast()).fetch_add(a as u16, Ordering::SeqCst).into(),
            (Rmw::Add, 4) => AtomicU32::from_ptr(p.cast()).fetch_add(a as u32, Ordering::SeqCst).into(),
            (Rmw::Add, _) => AtomicU64::from_ptr(p.cast()).fetch_add(a, Ordering::SeqCst),
            _ => update(p, bytes, |old| modify(op, bytes, old, a, b)),
        }
    }
}

/// Atomically replaces `*p` by what `new` makes of it, and returns the old value.
///
/// # Safety
/// `p` must be valid for `bytes` bytes (2, 4 or 8) and aligned to them.
#[inline(always)]
pub(super) unsafe fn update(p: *mut u8, bytes: u8, new: impl Fn(u64) -> u64) -> u64 {
    const ORDER: Ordering = Ordering::SeqCst;
    macro_rules! with {
        ($atomic:ty, $t:ty) => {{
            // SAFETY: passed on to the caller.
            let cell = unsafe { <$atomic>::from_ptr(p.cast()) };
            let mut old = cell.load(Ordering::Relaxed);
            loop {
                match cell.compare_exchange(old, new(u64::from(old)) as $t, ORDER, ORDER) {
                    Ok(_) => return u64::from(old),
                    Err(now) => old = now,
                }
            }
        }};
    }
    match bytes {
        2 => with!(AtomicU16, u16),
        4 => with!(AtomicU32, u32),
        _ => with!(AtomicU64, u64),
    }
}

/// How the addresses of a full warp lie to each other.
enum Footprint {
    /// All are this one.
    One(u64),
    /// Consecutive elements from here on.
    Row(u64),
    Other,
}

impl Footprint {
    /// The footprint of 32 addresses, for elements of `size` bytes.
    fn of(addr: &[u64; 32], size: u64) -> Self {
        let (mut apart, mut scattered) = (0, 0);
        for (lane, at) in (0..).zip(addr) {
            apart |= at ^ addr[0];
            scattered |= at ^ addr[0].wrapping_add(lane * size);
        }
        match () {
            () if apart == 0 => Footprint::One(addr[0]),
            () if scattered == 0 => Footprint::Row(addr[0]),
            () => Footprint::Other,
        }
    }
}

/// Reads element `e` of a load's vector at `p`. A vector that is read at once is read whole.
///
/// # Safety
/// `p` must be valid for the vector, and aligned to an element or, where it is read at once, to it.
#[inline(always)]
pub(super) unsafe fn element(a: &Access, p: *mut u8, e: usize, order: Ordering) -> [u64; 2] {
    // SAFETY: passed on to the caller.
    unsafe { if a.whole { whole::read(p) } else { [read(p.add(e * a.bytes as usize), a.bytes, order), 0] } }
}

/// The order of a load.
pub(super) fn order_of(a: &Access) -> Ordering {
    if a.sem == Sem::Acquire { Ordering::Acquire } else { Ordering::Relaxed }
}

/// How many rows ahead a warp prefetches memory. With one, the copy loop of the bench still waits.
const ROWS_AHEAD: u64 = 3;

/// After stores of equally distant rows over this many bytes, the memory is in no cache near the
/// processor any more when it is read.
const STREAMED: u64 = 1 << 20;

pub(super) const LOADS: usize = 0;
const STORES: usize = 1;

impl<W: Hooks> Exec<'_, W> {
    /// Pointer for an access of `bytes` bytes to global memory.
    #[inline(always)]
    pub(super) fn global(&mut self, cache: usize, addr: u64, bytes: u64) -> Result<*mut u8, FaultKind> {
        if self.warp.regions[cache][0].holds(addr, bytes) {
            return Ok(addr as *mut u8);
        }
        self.global_slow(cache, addr, bytes)
    }

    #[cold]
    fn global_slow(&mut self, cache: usize, addr: u64, bytes: u64) -> Result<*mut u8, FaultKind> {
        let regions = &mut self.warp.regions[cache];
        if let Some(at) = regions.iter().position(|region| region.holds(addr, bytes)) {
            regions.swap(0, at);
        } else {
            let found = self.env.table.find(addr, bytes);
            let found = found.ok_or_else(|| self.env.table.out_of_bounds(addr, bytes))?;
            regions.rotate_right(1);
            regions[0] = found;
        }
        Ok(addr as *mut u8)
    }

    /// Pointer for one lane's access to any space.
    #[inline(always)]
    pub(super) fn pointer(
        &mut self,
        cache: usize,
        space: Space,
        addr: u64,
        bytes: u64,
        lane: usize,
    ) -> Run<*mut u8> {
        if addr & (bytes - 1) != 0 {
            return stop(FaultKind::Misaligned { addr: addr & !TAG, align: bytes }, Some(lane));
        }
        let found = match space {
            Space::Global => self.global(cache, addr, bytes),
            Space::Generic if addr & TAG == 0 => self.global(cache, addr, bytes),
            Space::Shared => self.block.shared.pointer(addr, bytes),
            Space::Cluster => self.block.in_cluster(addr, bytes),
            _ => self.windowed(cache, space, addr, bytes, lane),
        };
        found.or_else(|kind| stop(kind, Some(lane)))
    }

    /// The rows of `ldmatrix` and `stmatrix` are aligned to their size.
    pub(super) fn check_rows(&self, addr: &Addr, rows: u32, m: u32) -> Run<()> {
        const ROW: u64 = 16;
        for lane in lanes(m).take_while(|&lane| lane < rows as usize) {
            let at = self.address(addr, lane);
            if !at.is_multiple_of(ROW) {
                return stop(FaultKind::Misaligned { addr: at & !TAG, align: ROW }, Some(lane));
            }
        }
        Ok(())
    }

    fn windowed(
        &mut self,
        cache: usize,
        space: Space,
        addr: u64,
        bytes: u64,
        lane: usize,
    ) -> Result<*mut u8, FaultKind> {
        let offset = addr & !TAG;
        let space = match (space, addr & TAG) {
            (Space::Generic, SHARED_TAG) => Space::Cluster,
            (Space::Generic, LOCAL_TAG) => Space::Local,
            (Space::Generic, PARAM_TAG) => Space::Param,
            (Space::Generic, _) => Space::Global,
            // Typed accesses take plain offsets.
            (space, 0) => space,
            (space, _) => {
                let (name, len) = match space {
                    Space::Local => ("local", u64::from(self.kernel.local_bytes)),
                    _ => ("param", self.env.param_bytes),
                };
                return Err(window(name, addr, bytes, 0, len));
            }
        };
        match space {
            Space::Shared => self.block.shared.pointer(offset, bytes),
            Space::Cluster => self.block.in_cluster(offset, bytes),
            Space::Local => {
                let len = u64::from(self.kernel.local_bytes);
                if offset > len || bytes > len - offset {
                    return Err(window("local", offset, bytes, 0, len));
                }
                let at = lane * self.kernel.local_bytes as usize + offset as usize;
                // SAFETY: `local` holds 32 lanes of `local_bytes` (a multiple of 8) bytes each,
                // checked above.
                Ok(unsafe { self.warp.local.as_mut_ptr().cast::<u8>().add(at) })
            }
            Space::Param => {
                let len = self.env.param_bytes;
                // Stores never get here: the lowering rejects them for .param, and generic ones are
                // stopped below.
                if cache == STORES || offset > len || bytes > len - offset {
                    return Err(window("param", offset, bytes, 0, if cache == STORES { 0 } else { len }));
                }
                // SAFETY: checked against the length; only ever read through.
                Ok(unsafe { self.env.params.as_ptr().cast::<u8>().cast_mut().add(offset as usize) })
            }
            Space::Global | Space::Generic => Err(self.env.table.out_of_bounds(addr, bytes)),
        }
    }

    /// How the addresses of a full warp lie to each other, for elements of `size` bytes.
    #[inline(always)]
    fn footprint(&self, a: &Addr, size: u64) -> Footprint {
        macro_rules! footprint {
            ($t:ty, $row:expr) => {{
                let row = $row;
                let (one, consecutive) = simd::Address::compare(row, size.trailing_zeros());
                let base = u64::from(row[0].wrapping_add(a.offset as $t));
                match () {
                    () if one => Footprint::One(base),
                    // Addresses of fewer bits do not wrap around within the row.
                    () if consecutive && base <= u64::from(<$t>::MAX) - 32 * size => Footprint::Row(base),
                    () => Footprint::Other,
                }
            }};
        }
        if a.wide {
            footprint!(u64, &self.warp.regs.r64[a.slot as usize])
        } else {
            footprint!(u32, &self.warp.regs.r32[a.slot as usize])
        }
    }

    /// The pointer for 32 consecutive elements from `base` on, if they are aligned and lie in one
    /// region.
    #[inline(always)]
    fn row(&mut self, cache: usize, space: Space, base: u64, size: u64) -> Option<*mut u8> {
        if base & (size - 1) != 0 {
            return None;
        }
        match space {
            Space::Global | Space::Generic if base & TAG == 0 => self.global(cache, base, 32 * size).ok(),
            Space::Shared => self.block.shared.pointer(base, 32 * size).ok(),
            Space::Cluster => self.block.in_cluster(base, 32 * size).ok(),
            Space::Generic if base & TAG == SHARED_TAG => self.block.in_cluster(base & !TAG, 32 * size).ok(),
            _ => None,
        }
    }

    /// A warp accesses 32 elements of `size` bytes at `p`: prefetches later rows if its rows have
    /// the same distance as the last two. Processors do not prefetch such rows by themselves where
    /// each is in another page. Elements of 16 bytes move most of the data.
    ///
    /// True, without a prefetch, where a store bypasses the caches: see [`STREAMED`].
    #[inline(always)]
    fn prefetch_rows(&mut self, cache: usize, p: *mut u8, size: u64) -> bool {
        if size != 16 {
            return false;
        }
        let (at, rows) = (p as u64, &mut self.warp.rows[cache]);
        let distance = at.wrapping_sub(rows.last);
        rows.last = at;
        rows.bytes = match distance == rows.distance {
            true => rows.bytes.saturating_add(distance.cast_signed().unsigned_abs()),
            false => 0,
        };
        rows.distance = distance;
        if cache == STORES && rows.bytes >= STREAMED && at.is_multiple_of(64) {
            return true;
        }
        let soon = at.wrapping_add(distance.wrapping_mul(ROWS_AHEAD));
        if self.warp.regions[cache][0].holds(soon, 32 * size) {
            simd::prefetch(soon as *const u8, 32 * size as usize);
        }
        false
    }

    /// Makes stores that have bypassed the caches visible to other processors, before anything
    /// behind them.
    #[inline(always)]
    pub(super) fn drain(&mut self) {
        if std::mem::take(&mut self.streamed) {
            simd::drain();
        }
    }

    /// A weak load of a full warp, where its lanes touch consecutive elements or all the same one.
    /// False where they do not, or have no fast path.
    #[inline(always)]
    fn load_together(&mut self, a: &Access, footprint: Footprint, size: u64) -> Run<bool> {
        match footprint {
            Footprint::Row(base) => Ok(match self.row(LOADS, a.space, base, size) {
                Some(p) => {
                    self.prefetch_rows(LOADS, p, size);
                    // SAFETY: `row` checked 32 * size bytes and the alignment.
                    unsafe { self.load_rows(a, p) }
                }
                None => false,
            }),
            Footprint::One(at) => self.load_once(a, at, size),
            Footprint::Other => Ok(false),
        }
    }

    /// Reads an element, such as a parameter, once for all lanes. False where each lane has memory
    /// of its own there.
    #[inline(always)]
    fn load_once(&mut self, a: &Access, at: u64, size: u64) -> Run<bool> {
        if a.space == Space::Local || a.space == Space::Generic && at & TAG == LOCAL_TAG || a.whole {
            return Ok(false);
        }
        let p = self.pointer(LOADS, a.space, at, size, 0)?;
        for (e, &slot) in a.regs[..usize::from(a.n)].iter().enumerate() {
            // SAFETY: `pointer` checked bounds and alignment of the whole vector.
            let v = a.extend(unsafe { read(p.add(e * usize::from(a.bytes)), a.bytes, Ordering::Relaxed) });
            if a.wide {
                simd::spread(&mut self.warp.regs.r64[slot as usize], v, FULL);
            } else {
                simd::spread(&mut self.warp.regs.r32[slot as usize], v as u32, FULL);
            }
        }
        Ok(true)
    }

    /// Where an access is watched. Its bounds have been checked, so its region is the one used
    /// last.
    fn place(&self, cache: usize, space: Space, addr: u64) -> Place {
        let global = || {
            let region = self.warp.regions[cache][0];
            Place::Global { shadow: region.shadow, offset: addr - region.start }
        };
        match (space, addr & TAG) {
            (Space::Shared | Space::Cluster, _) => Place::Shared { offset: addr },
            (Space::Global, _) | (Space::Generic, 0) => global(),
            (Space::Generic, SHARED_TAG) => Place::Shared { offset: addr & !TAG },
            _ => Place::Private,
        }
    }

    /// The first part of the lanes `todo` that load, and its place, whose bounds are checked.
    pub(super) fn loaded_part(
        &mut self,
        a: &Access,
        addr: &[u64; 32],
        size: u64,
        todo: u32,
    ) -> Run<(Part, Place)> {
        let (part, row) = self.part(LOADS, a.space, addr, size, todo);
        let first = part.lanes.trailing_zeros() as usize;
        if row.is_none() {
            self.pointer(LOADS, a.space, addr[first], size, first)?;
        }
        Ok((part, self.place(LOADS, a.space, addr[first])))
    }

    /// Watches a load before it happens. Returns the lanes whose reads repeat others
    /// ([`Violations::repeats`]).
    ///
    /// [`Violations::repeats`]: crate::check::record::Violations::repeats
    fn watch_load(&mut self, a: &Access, addr: &[u64; 32], size: u64, how: How, m: u32) -> Run<u32> {
        let (mut todo, mut repeats) = (m, 0);
        while todo != 0 {
            let (part, place) = match self.parts_apart(a, addr, size, todo) {
                Some(part) => (part, self.place(LOADS, a.space, addr[part.first()])),
                None => self.loaded_part(a, addr, size, todo)?,
            };
            todo &= !part.lanes;
            let found = self.watch.read(place, part, self.pc, how);
            if found.repeats {
                repeats |= part.lanes;
            }
            for (lane, violation) in found.all {
                self.blame(place, violation, lane, how, false)?;
            }
        }
        Ok(repeats)
    }

    #[inline(always)]
    pub(super) fn load(&mut self, a: &Access, m: u32) -> Run<Flow> {
        let size = u64::from(a.bytes) * u64::from(a.n);
        let mut repeats = 0;
        if W::ON {
            if a.sem != Sem::Weak
                && !self.warp.again.is_empty()
                && let Some(flow) = self.load_again(a, m)
            {
                return Ok(flow);
            }
            let read_only = a.read_only && !self.watch.has_coherent_loads();
            let how = How { read_only, ..How::generic(a.sem, a.scope, a.unit(), Update::No) };
            repeats = self.watch_load(a, &self.addresses(&a.addr), size, how, m)?;
            if repeats == m {
                self.keep_load(a, m)?;
            }
        }
        let together = m == FULL && a.sem == Sem::Weak && !self.watch.weak_memory();
        if together && self.load_together(a, self.footprint(&a.addr, size), size)? {
            self.pc += 1;
            return Ok(Flow::Next);
        }
        if !W::ON && m == FULL && a.sem != Sem::Weak {
            let footprint = self.footprint(&a.addr, size);
            if let Footprint::Row(base) = footprint
                && let Some(p) = self.row(LOADS, a.space, base, size)
                // SAFETY: `row` checked 32 * size bytes and the alignment.
                && let Some((value, seen)) = unsafe { self.load_strong_rows(a, p, order_of(a)) }
            {
                return Ok(self.loaded(a, Some((base, value)), seen));
            }
        }
        if !W::ON && a.sem != Sem::Weak && FEW.contains(&m.count_ones()) && !a.whole {
            let (first, seen) = self.load_few(a, size, m)?;
            return Ok(self.loaded(a, first, seen));
        }
        let addr = self.addresses(&a.addr);
        if a.sem == Sem::Weak && !self.watch.weak_memory() && self.load_scattered(a, &addr, size, m)? {
            self.pc += 1;
            return Ok(Flow::Next);
        }
        if W::ON && self.may_be_late(a, &addr, m) && self.watch.defers_load() {
            self.warp.late.push(LateLoad { access: *a, addr, lanes: m });
            self.pc += 1;
            return Ok(Flow::Next);
        }
        let (first, seen) = self.take_values(a, &addr, m, repeats)?;
        Ok(self.loaded(a, first, seen))
    }

    /// Continues behind a load. `first` and `seen` are the results of [`Exec::take_values`]: a
    /// strong load is a poll.
    #[inline(always)]
    pub(super) fn loaded(&mut self, a: &Access, first: Option<(u64, u64)>, seen: u64) -> Flow {
        let spins = match first {
            Some(first) if a.sem != Sem::Weak => self.poll_memory(first, seen),
            _ => false,
        };
        self.pc += 1;
        if spins { Flow::GiveWay } else { Flow::Next }
    }

    /// Whether weak memory may deliver the values of a load later than its instruction, at their
    /// first use.
    fn may_be_late(&self, a: &Access, addr: &[u64; 32], m: u32) -> bool {
        let in_global = || match a.space {
            Space::Global => true,
            Space::Generic => lanes(m).all(|i| addr[i] & TAG == 0),
            _ => false,
        };
        self.watch.weak_memory()
            && matches!(a.sem, Sem::Weak | Sem::Relaxed)
            && in_global()
            && (!self.watch.is_explored() || self.may_be_overtaken(a))
    }

    /// Whether a store may come before the values of a load at the present instruction: otherwise
    /// nothing shows that they are late.
    fn may_be_overtaken(&self, a: &Access) -> bool {
        let named = |slots: &[u32]| slots.iter().any(|slot| a.regs[..usize::from(a.n)].contains(slot));
        for inst in &self.kernel.code[self.pc as usize + 1..] {
            match &inst.op {
                Op::Alu { s, .. } if !named(s) => {}
                Op::Nop | Op::UnwrittenRegisters(_) => {}
                Op::Bra { .. } => return true,
                Op::St(to) if matches!(to.sem, Sem::Weak | Sem::Relaxed) => {
                    return !named(&to.regs[..usize::from(to.n)]) && !named(&[to.addr.slot]);
                }
                _ => return false,
            }
        }
        false
    }

    /// Delivers late loads before an instruction of their lanes that uses or replaces one of their
    /// values, stores to the same place, or orders anything.
    #[cold]
    pub(super) fn take_late(&mut self, op: &Op, m: u32) -> Run<()> {
        let running = self.mask;
        let late = || self.warp.late.iter().filter(|l| l.lanes & running != 0);
        let named = |slots: &[u32]| late().any(|l| l.registers().iter().any(|r| slots.contains(r)));
        let stays = match op {
            Op::Alu { s, .. } => !named(s),
            Op::St(a) if matches!(a.sem, Sem::Weak | Sem::Relaxed) => {
                let (addr, bytes) = (self.addresses(&a.addr), u64::from(a.bytes) * u64::from(a.n));
                let meets = |l: &LateLoad| {
                    lanes(m).any(|i| l.addresses().any(|at| at < addr[i] + bytes && addr[i] < at + l.bytes()))
                };
                !named(&a.regs[..usize::from(a.n)]) && !named(&[a.addr.slot]) && !late().any(meets)
            }
            Op::Bra { .. } | Op::Nop | Op::UnwrittenRegisters(_) => true,
            _ => false,
        };
        if !stays {
            let due: Vec<_> = self.warp.late.extract_if(.., |l| l.lanes & running != 0).collect();
            for LateLoad { access, addr, lanes } in due {
                self.block.read_outside |= access.sem != Sem::Weak;
                self.take_values(&access, &addr, lanes, 0)?;
            }
        }
        Ok(())
    }

    /// Brings the values of a load into its registers, lane by lane. Returns the first lane's value
    /// and address, and a digest of all values. `repeats`: as [`Exec::watch_load`] returned it.
    fn take_values(
        &mut self,
        a: &Access,
        addr: &[u64; 32],
        m: u32,
        repeats: u32,
    ) -> Run<(Option<(u64, u64)>, u64)> {
        let size = u64::from(a.bytes) * u64::from(a.n);
        let order = order_of(a);
        if !W::ON && a.n == 1 {
            let first = m.trailing_zeros() as usize;
            let at = addr[first];
            let own = a.space == Space::Local || a.space == Space::Generic && at & TAG == LOCAL_TAG;
            if m.is_power_of_two() || !own && mask_of(|i| addr[i] == at) & m == m {
                let p = self.pointer(LOADS, a.space, at, size, first)?;
                // SAFETY: `pointer` checked bounds and alignment.
                let v = a.extend(unsafe { read(p, a.bytes, order) });
                let slot = a.regs[0] as usize;
                if a.wide {
                    simd::spread(&mut self.warp.regs.r64[slot], v, m);
                } else {
                    simd::spread(&mut self.warp.regs.r32[slot], v as u32, m);
                }
                return Ok((Some((at, v)), v));
            }
        }
        let how = How::generic(a.sem, a.scope, a.unit(), Update::No);
        let (mut first, mut seen) = (None, 0u64);
        let weak_memory = W::ON && self.watch.weak_memory();
        // Elements that are read at once.
        let reads = if a.whole { 1 } else { u64::from(a.n) };
        // Lanes that are sure to read the last write.
        let settled = if weak_memory { self.settled_lanes(a, addr, size, m, how)? } else { m };
        if weak_memory
            && settled == FULL
            && a.sem == Sem::Weak
            && self.load_together(a, Footprint::of(addr, size), size)?
        {
            self.watch.skip_stale(reads * 32);
            return Ok((None, 0));
        }
        // Lanes that read the last write.
        let mut fresh = settled;
        for i in lanes(m) {
            let p = self.pointer(LOADS, a.space, addr[i], size, i)?;
            let stale = settled >> i & 1 == 0;
            if weak_memory && !stale {
                self.watch.skip_stale(reads);
            }
            let mut halves = [0; 2];
            for e in 0..a.n as usize {
                // A vector that is read at once is read at its first element.
                let mut v = halves[1];
                if !a.whole || e == 0 {
                    // SAFETY: `pointer` checked bounds and alignment of the whole vector.
                    halves = unsafe { element(a, p, e, order) };
                    if W::ON && stale {
                        let at = addr[i] + e as u64 * u64::from(a.bytes);
                        let place = self.place(LOADS, a.space, at);
                        match self.watch.stale(place, u64::from(a.unit()), i, how) {
                            Some(old) => halves = old,
                            None => fresh |= 1 << i,
                        }
                    }
                    v = halves[0];
                }
                v = self.take_value(a, e, i, v);
                if first.is_none() {
                    first = Some((addr[i], v));
                }
                seen = seen.rotate_left(7) ^ v;
            }
        }
        if W::ON && a.sem != Sem::Weak {
            self.watch_observation(a, addr, fresh, false, repeats);
            self.watch_observation(a, addr, m & !fresh, true, 0);
        }
        Ok((first, seen))
    }

    /// Lane `i` takes element `e` of a load, which it reads as `v`. Gives the value in its
    /// register.
    #[inline(always)]
    pub(super) fn take_value(&mut self, a: &Access, e: usize, i: usize, v: u64) -> u64 {
        let (v, slot) = (a.extend(v), a.regs[e] as usize);
        if a.wide {
            self.warp.regs.r64[slot][i] = v;
        } else {
            self.warp.regs.r32[slot][i] = v as u32;
        }
        v
    }

    /// Lanes of `m` that are sure to read the last write, under weak memory.
    fn settled_lanes(&mut self, a: &Access, addr: &[u64; 32], size: u64, m: u32, how: How) -> Run<u32> {
        let (mut todo, mut settled) = (m, 0);
        while todo != 0 {
            let (part, place) = self.loaded_part(a, addr, size, todo)?;
            todo &= !part.lanes;
            if self.watch.is_settled(place, part, how) {
                settled |= part.lanes;
            }
        }
        Ok(settled)
    }

    /// Lanes have read the last writes of locations, or those before.
    fn watch_observation(&mut self, a: &Access, addr: &[u64; 32], m: u32, older: bool, repeats: u32) {
        let mut todo = m;
        while todo != 0 {
            let first = todo.trailing_zeros() as usize;
            let same = mask_of(|i| addr[i] == addr[first]) & todo;
            todo &= !same;
            // The region used last may be another lane's.
            if self.pointer(LOADS, a.space, addr[first], 1, first).is_ok() {
                let place = self.place(LOADS, a.space, addr[first]);
                if same & !repeats == 0 {
                    self.watch.observe_again(place, same, self.pc, a.sem, a.scope);
                } else {
                    self.watch.observe(place, same, self.pc, a.sem, a.scope, older);
                }
            }
        }
    }

    /// Loads consecutive elements into whole registers. False if there is no fast path for the
    /// shape.
    ///
    /// # Safety
    /// `p` must be valid for 32 vectors and aligned to one.
    #[inline(always)]
    unsafe fn load_rows(&mut self, a: &Access, p: *const u8) -> bool {
        macro_rules! rows {
            ($t:ty, $file:ident, $n:literal) => {{
                // SAFETY: the caller checked the 32 * n elements, which are multiples of 16 bytes.
                // Other threads may write them. Each element is read once.
                let v: [[$t; $n]; 32] = unsafe { simd::read_pieces(p.cast()) };
                for e in 0..$n {
                    let row = &mut self.warp.regs.$file[a.regs[e] as usize];
                    for i in 0..32 {
                        row[i] = v[i][e];
                    }
                }
                true
            }};
        }
        match (a.bytes, a.n, a.wide) {
            (4, 4, false) => {
                let rows = a.regs.map(|slot| &raw mut self.warp.regs.r32[slot as usize]);
                // SAFETY: the caller checked all 32 vectors; see above. The rows are registers of
                // this warp.
                unsafe { simd::load_fours(p.cast(), rows) };
                true
            }
            (8, ..) if !simd::WHOLE_ELEMENTS => false,
            (8, 2, true) => rows!(u64, r64, 2),
            (4, 1, false) => rows!(u32, r32, 1),
            (8, 1, true) => rows!(u64, r64, 1),
            (4, 2, false) => rows!(u32, r32, 2),
            _ => false,
        }
    }

    /// A store under watch, of a row of lanes at once, or lane by lane. Equal values by several
    /// lanes do no harm, so each lane must find the stores of the lanes before it.
    fn watched_store(&mut self, a: &Access, addr: &[u64; 32], size: u64, m: u32) -> Run<()> {
        let how = How::generic(a.sem, a.scope, a.unit(), Update::No);
        let mut todo = m;
        while todo != 0 {
            let (part, row) = self.part(STORES, a.space, addr, size, todo);
            todo &= !part.lanes;
            let first = part.lanes.trailing_zeros() as usize;
            let p = match row {
                Some(p) => p,
                None => self.pointer(STORES, a.space, addr[first], size, first)?,
            };
            let place = self.place(STORES, a.space, addr[first]);
            let (strong_before, violations) = if part.row {
                let regs = &self.warp.regs;
                let values = |lane: usize, offset: usize| {
                    // SAFETY: `part` checked bounds and alignment of the whole row.
                    let now =
                        unsafe { read(p.add((lane - first) * size as usize + offset), 4, Ordering::Relaxed) };
                    [now as u32, stored_word(a, regs, lane, offset)]
                };
                self.watch.write_row(place, part, self.pc, how, values)
            } else {
                let (mut now, mut new) = ([0u8; 16], [0u8; 16]);
                for e in 0..a.n as usize {
                    let (slot, n) = (a.regs[e] as usize, a.bytes as usize);
                    let regs = &self.warp.regs;
                    let v = if a.wide { regs.r64[slot][first] } else { u64::from(regs.r32[slot][first]) };
                    // SAFETY: `pointer` checked bounds and alignment of the whole vector.
                    let old = unsafe { read(p.add(e * n), a.bytes, Ordering::Relaxed) };
                    new[e * n..][..n].copy_from_slice(&v.to_ne_bytes()[..n]);
                    now[e * n..][..n].copy_from_slice(&old.to_ne_bytes()[..n]);
                }
                let size = size as usize;
                let (strong, found) =
                    self.watch.write(place, first, self.pc, how, &now[..size], &new[..size]);
                (u32::from(strong) << first, found.into_iter().map(|found| (first, found)).collect())
            };
            let orders = if a.sem == Sem::Weak { strong_before } else { part.lanes };
            if orders == 0 && part.lanes == FULL && violations.is_empty() {
                // SAFETY: `part` checked bounds and alignment of the whole row.
                let done = unsafe { self.store_rows(a, p) };
                if done {
                    return Ok(());
                }
            }
            let mut violations = violations.into_iter().peekable();
            for i in lanes(part.lanes) {
                if let Some((_, violation)) = violations.next_if(|(lane, _)| *lane == i) {
                    self.blame(place, violation, i, how, true)?;
                }
                // SAFETY: bounds and alignment of the vector were checked, with those of its row.
                unsafe { self.store_lane(a, p.add((i - first) * size as usize), i) };
                if orders >> i & 1 == 0 {
                    continue;
                }
                for e in 0..u64::from(a.n) {
                    let place = self.place(STORES, a.space, addr[i] + e * u64::from(a.bytes));
                    self.watch.wrote(place, i, self.pc, a.sem, a.scope, false);
                }
            }
        }
        Ok(())
    }

    #[inline(always)]
    pub(super) fn store(&mut self, a: &Access, m: u32) -> Run<()> {
        let size = u64::from(a.bytes) * u64::from(a.n);
        if a.space != Space::Local {
            self.changed();
        }
        if W::ON {
            return self.watched_store(a, &self.addresses(&a.addr), size, m);
        }
        if m == FULL
            && let Footprint::Row(base) = self.footprint(&a.addr, size)
            && let Some(p) = self.row(STORES, a.space, base, size)
        {
            let streams = self.prefetch_rows(STORES, p, size);
            if streams && a.sem == Sem::Weak && (a.bytes, a.wide) == (4, false) {
                let rows = a.regs.map(|slot| &self.warp.regs.r32[slot as usize]);
                // SAFETY: `row` checked 512 bytes, and `prefetch_rows` that they begin at a cache line.
                unsafe { simd::stream_fours(p.cast(), rows) };
                self.streamed = true;
                return Ok(());
            }
            // SAFETY: `row` checked 32 * size bytes and the alignment.
            let done = a.sem == Sem::Weak && unsafe { self.store_rows(a, p) };
            if !done {
                for i in 0..32 {
                    // SAFETY: as above, for the vector of this lane.
                    unsafe { self.store_lane(a, p.add(i * size as usize), i) };
                }
            }
            return Ok(());
        }
        let addr = self.addresses(&a.addr);
        for i in lanes(m) {
            let p = self.pointer(STORES, a.space, addr[i], size, i)?;
            // SAFETY: `pointer` checked bounds and alignment of the whole vector.
            unsafe { self.store_lane(a, p, i) };
        }
        Ok(())
    }

    /// `discard.L2` and `applypriority.L2`, of 128 bytes of global memory. To discard them is a
    /// weak write that leaves them unwritten.
    #[cold]
    pub(super) fn line(&mut self, addr: &Addr, discards: bool, m: u32) -> Run<()> {
        const LINE: usize = 128;
        if discards {
            self.changed();
        }
        let poison = self.env.poison;
        for i in lanes(m) {
            let at = self.address(addr, i);
            let p = self.pointer(STORES, Space::Global, at, LINE as u64, i)?;
            if !discards {
                continue;
            }
            if W::ON {
                let (place, how) = (self.place(STORES, Space::Global, at), How::WEAK);
                let (mut now, mut new) = ([0; LINE], [0; LINE]);
                for (k, (now, new)) in now.as_chunks_mut().0.iter_mut().zip(new.as_chunks_mut().0).enumerate()
                {
                    // SAFETY: `pointer` checked bounds and alignment of the line.
                    *now = unsafe { read(p.add(8 * k), 8, Ordering::Relaxed) }.to_ne_bytes();
                    *new = poison.to_ne_bytes();
                }
                if let (_, Some(violation)) = self.watch.write(place, i, self.pc, how, &now, &new) {
                    self.blame(place, violation, i, how, true)?;
                }
                self.watch.discard(place, i, LINE as u64);
            }
            for k in 0..LINE / 8 {
                // SAFETY: `pointer` checked bounds and alignment of the line.
                unsafe { write(p.add(8 * k), 8, poison, Ordering::Relaxed) };
            }
        }
        Ok(())
    }

    /// Stores the vector of lane `i`.
    ///
    /// # Safety
    /// `p` must be valid for the vector and aligned to it.
    #[inline(always)]
    unsafe fn store_lane(&self, a: &Access, p: *mut u8, i: usize) {
        if a.whole {
            let half = |e: usize| self.warp.regs.r64[a.regs[e] as usize][i];
            // SAFETY: passed on to the caller.
            return unsafe { whole::write(p, [half(0), half(1)]) };
        }
        let order = if a.sem == Sem::Release { Ordering::Release } else { Ordering::Relaxed };
        for e in 0..a.n as usize {
            let slot = a.regs[e] as usize;
            let v = if a.wide { self.warp.regs.r64[slot][i] } else { u64::from(self.warp.regs.r32[slot][i]) };
            // SAFETY: passed on to the caller.
            unsafe { write(p.add(e * a.bytes as usize), a.bytes, v, order) };
        }
    }

    /// Stores whole registers to consecutive elements. False if there is no fast path for the
    /// shape.
    ///
    /// # Safety
    /// `p` must be valid for 32 vectors and aligned to one.
    #[inline(always)]
    unsafe fn store_rows(&mut self, a: &Access, p: *mut u8) -> bool {
        macro_rules! rows {
            ($t:ty, $file:ident, $n:literal) => {{
                let rows: [&[$t; 32]; $n] =
                    std::array::from_fn(|e| &self.warp.regs.$file[a.regs[e] as usize]);
                let v: [[$t; $n]; 32] = std::array::from_fn(|i| std::array::from_fn(|e| rows[e][i]));
                // SAFETY: the caller checked the 32 * n elements, which are multiples of 16 bytes.
                unsafe { simd::write_pieces(p.cast(), v) };
                true
            }};
        }
        match (a.bytes, a.n, a.wide) {
            (4, 4, false) => {
                let rows = a.regs.map(|slot| &self.warp.regs.r32[slot as usize]);
                // SAFETY: the caller checked all 32 vectors.
                unsafe { simd::store_fours(p.cast(), rows) };
                true
            }
            (8, ..) if !simd::WHOLE_ELEMENTS => false,
            (8, 2, true) => rows!(u64, r64, 2),
            (4, 1, false) => rows!(u32, r32, 1),
            (8, 1, true) => rows!(u64, r64, 1),
            (4, 2, false) => rows!(u32, r32, 2),
            _ => false,
        }
    }

    pub(super) fn atomic(&mut self, a: &Atomic, m: u32) -> Run<Flow> {
        let addr = self.addresses(&a.addr);
        let wide = a.bytes == 8;
        let limit = if wide { u64::MAX } else { (1u64 << (8 * a.bytes)) - 1 };
        let (mut seen, mut changed, mut last) = (0u64, false, (0, 0));
        for i in lanes(m) {
            let p = self.pointer(STORES, a.space, addr[i], u64::from(a.bytes), i)?;
            let operand = |slot: u32| {
                let regs = &self.warp.regs;
                if wide { regs.r64[slot as usize][i] } else { u64::from(regs.r32[slot as usize][i]) & limit }
            };
            let (x, y) = (operand(a.a), operand(a.b));
            let shared = matches!(a.space, Space::Shared | Space::Cluster) || addr[i] & TAG == SHARED_TAG;
            let op = if a.op == Rmw::AddF32 && !shared { Rmw::AddF32Ftz } else { a.op };
            let update = if a.op == Rmw::Exch { Update::Replaces } else { Update::Modifies };
            let how = How::generic(a.sem, a.scope, a.bytes, update);
            let place = if W::ON { self.place(STORES, a.space, addr[i]) } else { Place::Private };
            if W::ON {
                // SAFETY: `pointer` checked bounds and alignment.
                let now = unsafe { read(p, a.bytes, Ordering::Relaxed) };
                let n = a.bytes as usize;
                let (_, violation) = self.watch.write(place, i, self.pc, how, &now.to_ne_bytes()[..n], &[]);
                if let Some(violation) = violation {
                    self.blame(place, violation, i, how, true)?;
                }
            }
            // SAFETY: `pointer` checked bounds and alignment.
            let old = unsafe { rmw(p, a.bytes, op, x, y) };
            if W::ON {
                // Only an operation that returns a value can begin an acquire pattern.
                if a.d != SINK {
                    self.watch.observe(place, 1 << i, self.pc, a.sem, a.scope, false);
                }
                // A compare-and-swap that fails writes nothing, so that it releases nothing.
                if a.op != Rmw::Cas || old == x {
                    self.watch.wrote(place, i, self.pc, a.sem, a.scope, true);
                }
            }
            changed |= modify(op, a.bytes, old, x, y) & limit != old;
            seen = seen.rotate_left(7) ^ old;
            last = (addr[i], old);
            if a.d != SINK {
                if wide {
                    self.warp.regs.r64[a.d as usize][i] = old;
                } else {
                    self.warp.regs.r32[a.d as usize][i] = old as u32;
                }
            }
        }
        // A failed compare-and-swap, or adding 0, is a way to wait.
        let spins = if changed {
            self.changed();
            false
        } else {
            self.poll_memory(last, seen)
        };
        self.pc += 1;
        Ok(if spins { Flow::GiveWay } else { Flow::Next })
    }

    /// A weak read of `bytes` (1, 4 or 8) by one lane.
    pub(super) fn read_generic(&mut self, addr: u64, bytes: u64, lane: usize) -> Run<u64> {
        let p = self.pointer(LOADS, Space::Generic, addr, bytes, lane)?;
        if W::ON {
            let (place, how) = (self.place(LOADS, Space::Generic, addr), How::WEAK);
            for (_, violation) in self.watch.read(place, Part::of(lane, bytes), self.pc, how).all {
                self.blame(place, violation, lane, how, false)?;
            }
        }
        // SAFETY: `pointer` checked bounds and alignment.
        Ok(unsafe { read(p, bytes as u8, Ordering::Relaxed) })
    }

    /// Reports a wrong access: a fault, unless the checker collects its reports.
    #[cold]
    pub(super) fn blame(
        &mut self,
        place: Place,
        violation: ViolationAt,
        lane: usize,
        how: How,
        write: bool,
    ) -> Run<()> {
        let label = match place {
            Place::Global { shadow, .. } => self.env.table.label_of(shadow).unwrap_or("memory").to_string(),
            Place::Shared { offset } if self.block.is_remote(offset) => {
                let ctaid = self.block.cluster.as_ref().and_then(|cluster| cluster.ctaid(rank_of(offset)));
                ctaid.map_or_else(String::new, |block| format!("block {block:?}"))
            }
            _ => String::new(),
        };
        self.blame_in(label, place, violation, lane, (how, write))
    }

    /// The same for memory of this label.
    #[cold]
    pub(super) fn blame_in(
        &mut self,
        label: String,
        place: Place,
        violation: ViolationAt,
        lane: usize,
        (how, write): (How, bool),
    ) -> Run<()> {
        let blamed = Blamed { label, place, violation, lane, pc: self.pc, how, write, beside: self.mask };
        let recent = self.warp.trace.before(self.pc);
        self.watch.report(&blamed, recent).map_or(Ok(()), |kind| stop(kind, Some(lane)))
    }

    /// The next instruction reads registers that nothing can have written.
    #[cold]
    pub(super) fn unwritten_registers(&mut self, read: u32, m: u32) -> Run<()> {
        let Some(lane) = lanes(m).next().filter(|_| W::ON) else { return Ok(()) };
        let registers = self.kernel.unwritten[read as usize].registers.clone();
        self.undefined(FaultKind::UnwrittenRegister { registers }, lane)
    }

    /// A lane executes an instruction with an effect that the manual leaves undefined.
    #[cold]
    pub(super) fn undefined(&mut self, kind: FaultKind, lane: usize) -> Run<()> {
        let recent = self.warp.trace.before(self.pc);
        self.watch.undefined(lane, self.pc, kind, recent).map_or(Ok(()), |kind| stop(kind, Some(lane)))
    }

    /// Offset in the shared window of an address that an instruction takes in `space` (shared or
    /// generic).
    pub(super) fn shared_offset(space: Space, addr: u64) -> Result<u64, FaultKind> {
        match space {
            Space::Shared | Space::Cluster => Ok(addr),
            _ if addr & TAG == SHARED_TAG => Ok(addr & !TAG),
            _ => Err(FaultKind::Unsupported(format!("address {addr:#x} is not in shared memory"))),
        }
    }
}
