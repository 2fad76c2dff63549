//! Groups made from groups.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::mesh::{Address, Directory};
use super::{MeshGroup, ProcessGroup};
use crate::error::{Error, Result};
use crate::foreign::escaped;

/// The message of each rank of the parent to the others when groups are made from it.
#[derive(Debug, Serialize, Deserialize)]
struct Proposal {
    /// The groups, where all ranks must name the same.
    plan: Option<Vec<Vec<u32>>>,
    color: Option<u64>,
    key: i64,
    /// None without a color; an error is why the rank cannot listen.
    address: std::result::Result<Option<Address>, String>,
}

impl MeshGroup {
    /// A group of the given ranks of this one, in that order. Every rank of this group makes the
    /// call, with the same list; those outside get `None`.
    ///
    /// # Errors
    /// As of [`MeshGroup::new_subgroups_by_enumeration`].
    pub fn new_group(&self, ranks: &[u32]) -> Result<Option<MeshGroup>> {
        self.new_subgroups_by_enumeration(&[ranks.to_vec()])
    }

    /// Groups of `group_size` consecutive ranks; returns this rank's. Collective.
    ///
    /// # Errors
    /// [`Error::Argument`] where `group_size` does not divide the group; also as of
    /// [`MeshGroup::new_subgroups_by_enumeration`].
    pub fn new_subgroups(&self, group_size: u32) -> Result<MeshGroup> {
        if group_size == 0 || !self.size().is_multiple_of(group_size) {
            let rule = format!("must divide the group's size, {}", self.size());
            return Err(Error::argument("group_size", group_size, rule));
        }
        let plan: Vec<Vec<u32>> = (0..self.size() / group_size)
            .map(|group| (group * group_size..(group + 1) * group_size).collect())
            .collect();
        self.new_subgroups_by_enumeration(&plan)?
            .ok_or_else(|| Error::argument("group_size", group_size, "leaves this rank out"))
    }

    /// The listed groups, of which none share a rank; returns this rank's, if it is in one.
    /// Collective, with the same lists everywhere.
    ///
    /// # Errors
    /// [`Error::Argument`] where a list is empty or two name the same rank, [`Error::Mismatch`]
    /// where ranks give different lists. Also as of [`MeshGroup::split_group`].
    pub fn new_subgroups_by_enumeration(&self, groups: &[Vec<u32>]) -> Result<Option<MeshGroup>> {
        let mut seen = vec![false; self.size() as usize];
        for rank in groups.iter().flatten() {
            let rule = format!("each rank of 0..{} at most once", self.size());
            match seen.get_mut(*rank as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(Error::argument("ranks", rank, rule)),
            }
        }
        if groups.iter().any(Vec::is_empty) {
            return Err(Error::argument("ranks", "[]", "a group has at least one rank"));
        }
        let place = (0u64..).zip(groups).find_map(|(color, ranks)| {
            ranks.iter().position(|rank| *rank == self.rank()).map(|key| (color, key as i64))
        });
        let (color, key) = place.map_or((None, 0), |(color, key)| (Some(color), key));
        self.regroup(Some(groups.to_vec()), color, key)
    }

    /// A group of all ranks that give the same `color`, ordered by `key` and then by rank; `None`
    /// for those without a color. Collective.
    ///
    /// # Errors
    /// [`Error::Os`] where a rank cannot listen, on every rank; [`Error::Group`] where a rank does
    /// not come in time.
    pub fn split_group(&self, color: Option<u64>, key: i64) -> Result<Option<MeshGroup>> {
        self.regroup(None, color, key)
    }

    fn regroup(
        &self,
        plan: Option<Vec<Vec<u32>>>,
        color: Option<u64>,
        key: i64,
    ) -> Result<Option<MeshGroup>> {
        let options = &self.options;
        let listener = match color {
            // A group on one host needs no network, and neither does a part of it.
            Some(_) => options.listen(self.size(), !self.shares_host()).map(Some),
            None => Ok(None),
        };
        let address = listener.as_ref().map(|it| it.as_ref().map(|it| it.address.clone()));
        let ours = Proposal { plan, color, key, address: address.map_err(Error::to_string) };
        let bytes = serde_json::to_vec(&ours).map_err(|error| Error::internal("serialise", error))?;
        let name = format!("{}/sub{}", self.core.name, self.children.fetch_add(1, Ordering::Relaxed));
        let mut groups: BTreeMap<u64, Vec<(i64, u32, Address)>> = BTreeMap::new();
        let proposals = self.all_gather(&bytes)?;
        // This rank's own error has more detail than the text in its proposal.
        let listener = listener?;
        for (peer, theirs) in (0u32..).zip(proposals) {
            let theirs: Proposal = serde_json::from_slice(&theirs)
                .map_err(|error| Error::os("new_group", format!("rank {peer} sent no proposal: {error}")))?;
            let address = theirs.address.map_err(|reason| {
                let reason = format!("rank {peer} cannot listen: {}", escaped(reason.as_bytes()));
                Error::os("new_group", reason)
            })?;
            if theirs.plan != ours.plan {
                return Err(Error::Mismatch {
                    rank: self.rank(),
                    peer,
                    what: "the new groups",
                    ours: format!("{:?}", ours.plan),
                    theirs: format!("{:?}", theirs.plan),
                });
            }
            if let (Some(color), Some(address)) = (theirs.color, address) {
                groups.entry(color).or_default().push((theirs.key, peer, address));
            }
        }
        let (Some(color), Some(mut listener)) = (color, listener) else { return Ok(None) };
        let mut ranks = groups.remove(&color).unwrap_or_default();
        ranks.sort_by_key(|(key, peer, _)| (*key, *peer));
        let size = ranks.len() as u32;
        listener.address.size = size;
        let own = (0u32..).zip(&ranks).find(|(_, (_, peer, _))| *peer == self.rank()).map(|(rank, _)| rank);
        let rank =
            own.ok_or_else(|| Error::internal("new_group", "the gathered proposals lack this rank's"))?;
        let members = ranks.iter().map(|(_, peer, _)| self.members[*peer as usize]).collect();
        let resize = |mut address: Address| {
            address.size = size;
            address
        };
        let addresses = ranks.into_iter().map(|(_, _, address)| resize(address)).collect();
        let name = format!("{name}.{color}");
        let store = self.store.clone();
        MeshGroup::assemble(
            listener,
            Directory::Known(addresses),
            store,
            rank,
            &name,
            members,
            options.clone(),
        )
        .map(Some)
    }

    /// A group without the `dead` ranks of this one, the others renumbered in order. All survivors
    /// make the call, with the same list, and find each other through the store again; this group
    /// ends. The store must outlive the dead: with `MASTER_ADDR` alone, rank 0 serves it.
    ///
    /// # Errors
    /// When this rank is in the list, the survivors' lists differ, or one of them does not join
    /// within the timeout.
    pub fn shrink_group(&self, dead: &[u32]) -> Result<MeshGroup> {
        let mut dead = dead.to_vec();
        dead.sort_unstable();
        dead.dedup();
        if let Some(rank) = dead.iter().find(|rank| **rank >= self.size() || **rank == self.rank()) {
            let rule = format!("must be ranks of the group of {}, without the caller", self.size());
            return Err(Error::argument("dead", rank, rule));
        }
        let generation = self.shrunk.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}/shrunk{generation}", self.core.name);
        if !self.core.is_broken() {
            self.core.abort("it shrinks");
        }
        let survivors: Vec<u32> = (0..self.size()).filter(|rank| !dead.contains(rank)).collect();
        let plan = format!("{dead:?}");
        self.store.set(&format!("{name}/dead/{}", self.rank()), plan.as_bytes())?;
        let start = std::time::Instant::now();
        for peer in &survivors {
            let left = self.options.timeout.saturating_sub(start.elapsed());
            let theirs =
                self.store.get(&format!("{name}/dead/{peer}"), left).map_err(|error| Error::Group {
                    group: name.clone(),
                    rank: self.rank(),
                    operation: "shrink_group",
                    sequence: generation,
                    peers: vec![*peer],
                    reason: format!("rank {peer} did not come to shrink the group: {error}"),
                })?;
            if theirs != plan.as_bytes() {
                return Err(Error::Mismatch {
                    rank: self.rank(),
                    peer: *peer,
                    what: "the dead ranks",
                    ours: plan,
                    theirs: escaped(&theirs),
                });
            }
        }
        let own = (0u32..).zip(&survivors).find(|(_, peer)| **peer == self.rank()).map(|(rank, _)| rank);
        let rank = own.ok_or_else(|| Error::argument("dead", plan, "leaves this rank out"))?;
        let members = survivors.iter().map(|peer| self.members[*peer as usize]).collect();
        MeshGroup::join(self.store.clone(), rank, &name, members, self.options.clone())
    }
}
