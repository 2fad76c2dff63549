//! Reductions: doubling and trees for what is small, rings for what is large.
//!
//! Every rank combines the same operands in the same order but for that of a pair, which makes no
//! difference. Results are therefore the same bits everywhere, in every run.

use std::ops::Range;

use super::run::Run;
use crate::element::{self, ElementType, ReduceOp};
use crate::error::Result;

/// From this size on, the bytes cost more than the rounds.
const LARGE: usize = 64 << 10;

impl Run<'_> {
    fn combine(
        &self,
        (dtype, op): (ElementType, ReduceOp),
        into: &mut [u8],
        other: &[u8],
        peer: u32,
    ) -> Result<()> {
        self.check_length(peer, other, into)?;
        element::reduce(dtype, op, into, other);
        Ok(())
    }

    pub(super) fn all_reduce(
        &mut self,
        mut data: Vec<u8>,
        dtype: ElementType,
        op: ReduceOp,
    ) -> Result<Vec<u8>> {
        if data.len() >= LARGE && self.size > 2 {
            let pieces = even_pieces(data.len(), dtype, self.size);
            self.ring_reduce(&mut data, &pieces, (dtype, op))?;
            let own = pieces[self.rank as usize].clone();
            element::finish(dtype, op, &mut data[own], self.size);
            self.ring_gather(&mut data, &pieces)?;
        } else {
            self.doubling(&mut data, (dtype, op))?;
            element::finish(dtype, op, &mut data, self.size);
        }
        Ok(data)
    }

    /// Recursive doubling. The ranks above the largest power of two give their elements to a
    /// partner first and get the result from it last.
    fn doubling(&mut self, data: &mut Vec<u8>, kind: (ElementType, ReduceOp)) -> Result<()> {
        let core = 1 << self.size.ilog2();
        let extra = self.size - core;
        if self.rank >= core {
            let partner = self.rank - core;
            self.send(partner, data)?;
            let theirs = self.receive(partner)?;
            self.check_length(partner, &theirs, data)?;
            *data = theirs;
            return Ok(());
        }
        if self.rank < extra {
            let partner = self.rank + core;
            let theirs = self.receive(partner)?;
            self.combine(kind, data, &theirs, partner)?;
        }
        let mut distance = 1;
        while distance < core {
            let partner = self.rank ^ distance;
            let theirs = self.swap(partner, data, partner)?;
            self.combine(kind, data, &theirs, partner)?;
            distance *= 2;
        }
        if self.rank < extra {
            self.send(self.rank + core, data)?;
        }
        Ok(())
    }

    /// Reduces in a ring; afterwards the piece of this rank is complete, and the rest of `data` is
    /// of no use.
    fn ring_reduce(
        &mut self,
        data: &mut [u8],
        pieces: &[Range<usize>],
        kind: (ElementType, ReduceOp),
    ) -> Result<()> {
        let size = self.size;
        let (next, last) = ((self.rank + 1) % size, (self.rank + size - 1) % size);
        // Piece p starts at the rank after p and ends at rank p.
        for step in 1..size {
            let out = pieces[((self.rank + size - step) % size) as usize].clone();
            let into = pieces[((self.rank + 2 * size - step - 1) % size) as usize].clone();
            let theirs = self.swap(next, &data[out], last)?;
            self.combine(kind, &mut data[into], &theirs, last)?;
        }
        Ok(())
    }

    /// Passes the complete pieces round the ring.
    fn ring_gather(&mut self, data: &mut [u8], pieces: &[Range<usize>]) -> Result<()> {
        let size = self.size;
        let (next, last) = ((self.rank + 1) % size, (self.rank + size - 1) % size);
        for step in 0..size - 1 {
            let out = pieces[((self.rank + size - step) % size) as usize].clone();
            let into = pieces[((self.rank + 2 * size - step - 1) % size) as usize].clone();
            let theirs = self.swap(next, &data[out], last)?;
            let into = &mut data[into];
            self.check_length(last, &theirs, into)?;
            into.copy_from_slice(&theirs);
        }
        Ok(())
    }

    /// The result, on the root.
    pub(super) fn reduce(
        &mut self,
        root: u32,
        mut data: Vec<u8>,
        dtype: ElementType,
        op: ReduceOp,
    ) -> Result<Option<Vec<u8>>> {
        if data.len() >= LARGE && self.size > 2 {
            let pieces = even_pieces(data.len(), dtype, self.size);
            self.ring_reduce(&mut data, &pieces, (dtype, op))?;
            let own = data[pieces[self.rank as usize].clone()].to_vec();
            let Some(all) = self.gather(root, own)? else { return Ok(None) };
            data = all.concat();
        } else {
            // The tree of a gather, combining on the way.
            let relative = (self.rank + self.size - root) % self.size;
            let mut distance = 1;
            while distance < self.size {
                if relative & distance != 0 {
                    let parent = (relative - distance + root) % self.size;
                    self.send(parent, &data)?;
                    return Ok(None);
                }
                if relative + distance < self.size {
                    let child = (relative + distance + root) % self.size;
                    let theirs = self.receive(child)?;
                    self.combine((dtype, op), &mut data, &theirs, child)?;
                }
                distance *= 2;
            }
        }
        element::finish(dtype, op, &mut data, self.size);
        Ok(Some(data))
    }

    /// The piece of this rank; `counts` are bytes.
    pub(super) fn reduce_scatter(
        &mut self,
        mut data: Vec<u8>,
        counts: &[u64],
        dtype: ElementType,
        op: ReduceOp,
    ) -> Result<Vec<u8>> {
        let mut end = 0;
        let pieces: Vec<Range<usize>> = counts
            .iter()
            .map(|count| {
                let start = end;
                end += *count as usize;
                start..end
            })
            .collect();
        if data.len() >= LARGE && self.size > 2 {
            self.ring_reduce(&mut data, &pieces, (dtype, op))?;
        } else {
            self.doubling(&mut data, (dtype, op))?;
        }
        let mut own = data[pieces[self.rank as usize].clone()].to_vec();
        element::finish(dtype, op, &mut own, self.size);
        Ok(own)
    }
}

/// Cuts `bytes` into one piece per rank at elements; the first may be one element longer.
fn even_pieces(bytes: usize, dtype: ElementType, size: u32) -> Vec<Range<usize>> {
    let elements = bytes / dtype.size();
    let at = |rank: u32| {
        let (each, rest) = (elements / size as usize, elements % size as usize);
        (each * rank as usize + rest.min(rank as usize)) * dtype.size()
    };
    (0..size).map(|rank| at(rank)..at(rank + 1)).collect()
}
