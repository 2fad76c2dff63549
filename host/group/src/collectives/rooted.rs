//! Broadcast, gather and scatter over binomial trees.
//!
//! Ranks are counted from the root. The parent of a rank is the rank without its lowest set bit.
//! The children of a rank add each lower bit to it, so the subtree of a rank is the range up to the
//! next bit.

use super::blocks;
use super::run::Run;
use crate::error::Result;

impl Run<'_> {
    fn relative(&self, root: u32) -> u32 {
        (self.rank + self.size - root) % self.size
    }

    fn absolute(&self, relative: u32, root: u32) -> u32 {
        (u64::from(relative) + u64::from(root)).rem_euclid(u64::from(self.size)) as u32
    }

    /// The distances to the children of `relative`, nearest first.
    fn children(&self, relative: u32) -> Vec<u32> {
        let reach = if relative == 0 { 32 } else { relative.trailing_zeros() };
        let size = self.size;
        (0..reach).map(|bit| 1 << bit).take_while(|distance| relative + distance < size).collect()
    }

    /// The size of the subtree of `relative` whose own distance to its parent is `distance`.
    fn subtree(&self, relative: u32, distance: u32) -> usize {
        distance.min(self.size - relative) as usize
    }

    pub(super) fn broadcast(&mut self, root: u32, data: Vec<u8>) -> Result<Vec<u8>> {
        let relative = self.relative(root);
        let data = match relative {
            0 => data,
            _ => self.receive(self.absolute(relative & (relative - 1), root))?,
        };
        // The farthest first: its subtree is the largest.
        for distance in self.children(relative).into_iter().rev() {
            self.send(self.absolute(relative + distance, root), &data)?;
        }
        Ok(data)
    }

    /// Returns the payload of every rank, by rank, on the root alone.
    pub(super) fn gather(&mut self, root: u32, data: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>> {
        let relative = self.relative(root);
        let mut payload = Vec::with_capacity(data.len() + 8);
        blocks::push(&mut payload, &data);
        let mut count = 1;
        for distance in self.children(relative) {
            let child = self.absolute(relative + distance, root);
            let theirs = self.receive(child)?;
            payload.extend_from_slice(&theirs);
            count += self.subtree(relative + distance, distance);
        }
        if relative != 0 {
            self.send(self.absolute(relative & (relative - 1), root), &payload)?;
            return Ok(None);
        }
        let mut all = blocks::unpack(&payload, count)
            .ok_or_else(|| self.malformed(root, "blocks that do not fit the tree"))?;
        // From the root's count to the ranks'.
        all.rotate_right(root as usize);
        Ok(Some(all))
    }

    pub(super) fn scatter(&mut self, root: u32, mut parts: Vec<Vec<u8>>) -> Result<Vec<u8>> {
        let relative = self.relative(root);
        let mut mine = if relative == 0 {
            parts.rotate_left(root as usize);
            parts
        } else {
            let parent = self.absolute(relative & (relative - 1), root);
            let payload = self.receive(parent)?;
            let count = self.subtree(relative, 1 << relative.trailing_zeros());
            blocks::unpack(&payload, count)
                .ok_or_else(|| self.malformed(parent, "blocks that do not fit the tree"))?
        };
        for distance in self.children(relative).into_iter().rev() {
            // The remainder starts at this rank, so the child's subtree is the tail.
            let payload = blocks::pack(mine[distance as usize..].iter().map(Vec::as_slice));
            mine.truncate(distance as usize);
            self.send(self.absolute(relative + distance, root), &payload)?;
        }
        Ok(mine.swap_remove(0))
    }
}
