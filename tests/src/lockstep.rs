//! Ranks that run one at a time, for tests whose every step must be repeatable.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use epoxide::group::ProcessGroup;
use epoxide::{Error, Result};

/// Runs `rank_main(group)` on a thread per rank, of which only one runs at any time. A rank runs
/// until it waits for the others in a call of its group; then the next rank runs. So the ranks take
/// the same steps in the same order in every run, collective calls included. On virtual GPUs of one
/// [`ManualGpus`](epoxide::internal::driver::ManualGpus) the device work does too. Returns the
/// results, indexed by rank.
///
/// # Errors
/// The error of the lowest rank that failed.
///
/// # Panics
/// Where a rank panics.
pub fn run<T: Send>(
    size: u32,
    rank_main: impl Fn(Arc<dyn ProcessGroup>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let board = Arc::new(Board {
        state: Mutex::new(State { turn: 0, ranks: (0..size).map(|_| Rank::default()).collect() }),
        turned: Condvar::new(),
    });
    let run = |rank: u32| {
        let group = Lockstep { board: board.clone(), rank, members: (0..size).collect(), id: Vec::new() };
        let _ended = End(&group);
        drop(group.wait_turn());
        rank_main(Arc::new(group.clone()))
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        results
            .into_iter()
            .map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// One rank's contribution to one collective.
#[derive(Debug, Default)]
struct Post {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

#[derive(Debug, Default)]
struct Rank {
    /// By group, one for each collective so far.
    posts: BTreeMap<Vec<u64>, Vec<Post>>,
    ended: bool,
}

#[derive(Debug)]
struct State {
    /// The rank that runs.
    turn: u32,
    ranks: Vec<Rank>,
}

#[derive(Debug)]
struct Board {
    state: Mutex<State>,
    turned: Condvar,
}

/// A rank's handle of all ranks, or of a part of them.
#[derive(Debug, Clone)]
struct Lockstep {
    board: Arc<Board>,
    /// The rank among all ranks, as in `members`.
    rank: u32,
    members: Vec<u32>,
    /// Empty, or the group that was split, the number of its calls, and the colour.
    id: Vec<u64>,
}

impl Lockstep {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.board.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_turn(&self) -> MutexGuard<'_, State> {
        let mine = |state: &mut State| state.turn != self.rank;
        self.board.turned.wait_while(self.lock(), mine).unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the turn to the next rank that still runs.
    fn pass_turn(&self, mut state: MutexGuard<'_, State>) {
        let size = state.ranks.len() as u32;
        let next = (1..=size).map(|step| (self.rank + step) % size);
        let running = |rank: &u32| !state.ranks[*rank as usize].ended;
        state.turn = next.into_iter().find(running).unwrap_or(size);
        drop(state);
        self.board.turned.notify_all();
    }

    /// Posts and waits for the others; gives each rank's post to `read`, in the order of ranks.
    fn collective<T>(&self, post: Post, read: impl Fn(&Post) -> Result<T>) -> Result<Vec<T>> {
        let mut state = self.lock();
        let posts = state.ranks[self.rank as usize].posts.entry(self.id.clone()).or_default();
        let call = posts.len();
        posts.push(post);
        loop {
            let post = |rank: u32| state.ranks[rank as usize].posts.get(&self.id)?.get(call);
            if let Some(all) = self.members.iter().map(|rank| post(*rank)).collect::<Option<Vec<_>>>() {
                return all.into_iter().map(read).collect();
            }
            let has_left = |rank: u32| state.ranks[rank as usize].ended && post(rank).is_none();
            if let Some(rank) = self.members.iter().find(|rank| has_left(**rank)) {
                return Err(Error::os(
                    "lockstep group",
                    format!("rank {rank} has ended, call {call} waits for it"),
                ));
            }
            self.pass_turn(state);
            state = self.wait_turn();
        }
    }
}

impl ProcessGroup for Lockstep {
    fn rank(&self) -> u32 {
        self.members.iter().position(|member| *member == self.rank).expect("it is a member") as u32
    }

    fn size(&self) -> u32 {
        self.members.len() as u32
    }

    fn timeout(&self) -> Duration {
        Duration::MAX
    }

    fn barrier(&self, _timeout: Duration) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.collective(Post { bytes: data.to_vec(), fds: Vec::new() }, |post| Ok(post.bytes.clone()))
    }

    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>> {
        if root >= self.size() {
            return Err(Error::argument("root", root, format!("ranks are 0..{}", self.size())));
        }
        Ok(self.all_gather(data)?.swap_remove(root as usize))
    }

    fn split(&self, color: u64) -> Result<Arc<dyn ProcessGroup>> {
        let colors = self.all_gather(&color.to_le_bytes())?;
        let calls = self.lock().ranks[self.rank as usize].posts[&self.id].len() as u64;
        let of_color = self.members.iter().zip(&colors).filter(|(_, other)| **other == color.to_le_bytes());
        let members = of_color.map(|(member, _)| *member).collect();
        let id = [&self.id[..], &[calls, color]].concat();
        Ok(Arc::new(Lockstep { members, id, ..self.clone() }))
    }

    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        let duplicate = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map_err(|error| Error::os("dup", error));
        let fds = fds.iter().map(|fd| duplicate(*fd)).collect::<Result<_>>()?;
        self.collective(Post { bytes: Vec::new(), fds }, |post| {
            post.fds.iter().map(|fd| duplicate(fd.as_fd())).collect()
        })
    }
}

/// Lets the others go on when a rank is through, panicking or not.
struct End<'a>(&'a Lockstep);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ranks[self.0.rank as usize].ended = true;
        self.0.pass_turn(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_turns_between_collectives() {
        let order = Mutex::new(Vec::new());
        let note = |entry: (u32, u32)| order.lock().unwrap().push(entry);
        let gathered = run(3, |group| {
            note((group.rank(), 0));
            let all = group.all_gather(&[group.rank() as u8])?;
            note((group.rank(), 1));
            group.barrier(Duration::ZERO)?;
            note((group.rank(), 2));
            Ok(all.concat())
        });
        assert_eq!(gathered.unwrap(), [[0, 1, 2]; 3]);
        let by_hand = [(0, 0), (1, 0), (2, 0), (2, 1), (0, 1), (1, 1), (1, 2), (2, 2), (0, 2)];
        assert_eq!(*order.lock().unwrap(), by_hand);
    }

    #[test]
    fn parts_have_their_own_ranks_and_calls() {
        let parts = run(4, |group| {
            let part = group.split((group.rank() % 2).into())?;
            let gathered = part.all_gather(&[group.rank() as u8])?.concat();
            if group.rank() == 3 {
                part.barrier(Duration::ZERO)?;
            }
            Ok((part.rank(), part.size(), gathered))
        });
        assert!(parts.unwrap_err().to_string().contains("rank 1 has ended"));
        let parts = run(4, |group| {
            let part = group.split((group.rank() % 2).into())?;
            let gathered = part.all_gather(&[group.rank() as u8])?.concat();
            group.barrier(Duration::ZERO)?;
            Ok((part.rank(), part.size(), gathered))
        });
        let [even, odd] = [vec![0, 2], vec![1, 3]];
        assert_eq!(parts.unwrap(), [(0, 2, even.clone()), (0, 2, odd.clone()), (1, 2, even), (1, 2, odd)]);
    }

    #[test]
    fn descriptors_reach_every_rank() {
        use std::io::Write;
        use std::os::unix::fs::FileExt;
        let bytes = run(2, |group| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&[10 + group.rank() as u8]).unwrap();
            let all = group.exchange_fds(&[file.as_fd()])?;
            Ok(all
                .into_iter()
                .flatten()
                .map(|fd| {
                    let mut byte = [0];
                    std::fs::File::from(fd).read_exact_at(&mut byte, 0).unwrap();
                    byte[0]
                })
                .collect::<Vec<_>>())
        });
        assert_eq!(bytes.unwrap(), [[10, 11]; 2]);
    }

    #[test]
    fn a_rank_that_ends_early_is_named() {
        let error = run(2, |group| match group.rank() {
            0 => group.barrier(Duration::ZERO),
            _ => Ok(()),
        });
        assert!(error.unwrap_err().to_string().contains("rank 1 has ended"));
    }
}
