//! Continuation without ranks that have died or left, and their return.

use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use epoxide_gpu::layout::{
    DevicePtr, GIVING_UP_NS, LocalState, LowLatencyTurns, QUANTUM, gave_up_offset, room_for_ranks,
};

use super::fault::{Generation, NO_DISPATCH};
use super::layout::most_ranks;
use super::{Buffer, agree, agree_on_part};
use crate::driver::poll;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;

/// Epochs that a rank may have used beyond those that another rank's kernels have ended. A rank is
/// at most one operation ahead, and a first half may have run without its second.
const AHEAD: u64 = 2;

/// The state that each rank sends to the others.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Proposal {
    /// Numbers among the buffer's ranks, not among the group's.
    rank: u64,
    /// Operations that have ended.
    epoch: u64,
}

impl Buffer {
    /// The ranks that operations have to do with, in their order: all of them, unless a
    /// [`Buffer::regroup`] has left some out.
    pub fn members(&self) -> Vec<u32> {
        (0..self.num_ranks()).filter(|rank| self.left_out >> rank & 1 == 0).collect()
    }

    /// Continues with the ranks that make this call, and without all others. Collective over
    /// `group`, which these ranks have made for this call. The group may number the ranks in any
    /// order: they exchange their ranks in the buffer.
    ///
    /// No rank waits for a rank that is left out, or sends it anything. Such a rank has no tokens
    /// ([`Received::num_tokens`](super::Received::num_tokens) holds 0). The share of its experts is
    /// missing in the sum of a token. Weights are not rescaled. Errors that [`Buffer::check`] has
    /// reported are cleared, and data that was sent and not received is discarded. A left-out rank
    /// that still has its buffer joins again by a later call that it makes as well. A new process
    /// needs new buffers on all ranks.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use epoxide::driver::Stream;
    /// # use epoxide::driver::virt::{VirtConfig, VirtualGpu};
    /// # use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
    /// # use epoxide::group::run_threads;
    /// # use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Shape};
    /// # use epoxide::half::bf16;
    /// let sums = run_threads(3, Duration::from_secs(60), |rank, group| {
    ///     # let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
    ///     # let stream = Stream::new(&device)?;
    ///     # let order = StreamOrder::on(&stream);
    ///     let options = Options::new(Shape { max_tokens: 8, hidden: 64, num_topk: 2, num_experts: 3 }).timeout(Duration::from_millis(100));
    ///     let mut buffer = Buffer::new(device, &*group, options)?;
    ///     // The job decides who goes on; here, all but rank 2.
    ///     let survivors = group.split((rank == 2).into())?;
    ///     if rank == 2 {
    ///         return Ok(0.0);
    ///     }
    ///     let mut place = buffer.place(0)?;
    ///     let x = Tensor::from_host(&stream, DType::Bf16, &[1, 64], &[bf16::ONE; 64])?;
    ///     // To expert 0, which is on rank 0, and to expert 2, which is on rank 2.
    ///     let topk_idx = TypedTensor::from_host(&stream, &[1, 2], &[0i64, 2])?;
    ///     let request = DispatchRequest::new(&x, &topk_idx);
    ///     drop(buffer.dispatch(&mut place, request, order)?);
    ///     stream.synchronize()?;
    ///     assert!(buffer.check().is_err(), "rank 2 does not come");
    ///
    ///     buffer.regroup(&*survivors)?;
    ///     assert_eq!(buffer.members(), [0, 1]);
    ///     let received = buffer.dispatch(&mut place, request, order)?;
    ///     let rows = received.x.clone();
    ///     let combined = buffer.combine(received, CombineRequest::by_row(&rows), order)?;
    ///     Ok(combined.x.to_host::<bf16>(&stream)?[0].to_f32())
    /// })?;
    /// assert_eq!(sums, [1.0, 1.0, 0.0]);
    /// # Ok::<(), epoxide::group::RankFailure>(())
    /// ```
    ///
    /// Waits for all work enqueued on streams of the device, and for the ranks. Results of earlier
    /// dispatches can no longer be combined, and their
    /// [`Received::num_tokens`](super::Received::num_tokens) has -1 for this rank. Graphs that were
    /// captured before can still be launched, each of them as a whole.
    ///
    /// Reading results of failed operations still returns their error. The output of a step is the
    /// exception until its next launch: [`Step::check`](crate::low_latency::Step::check) and
    /// [`Buffer::missing_tokens`] begin anew as well.
    ///
    /// # Errors
    /// [`Error::Argument`] where two ranks claim the same rank of the buffer, and
    /// [`Error::Mismatch`] where their buffers have different options. [`Error::Timeout`] where the
    /// device's work does not end within twice the buffer's deadline, at least 30 s. Across nodes
    /// also the error of a queue between two of the ranks that has ended: they need new buffers.
    /// [`Error::PeerFailed`] with the reason of another rank that cannot go on. Also errors of the
    /// group. Then the buffer is as it was, or cannot be used until a call succeeds.
    pub fn regroup(&mut self, group: &dyn ProcessGroup) -> Result<()> {
        regroup_ahead(self, group, AHEAD)
    }

    /// The state of this rank, behind all work of the device.
    fn propose(&self) -> Result<Proposal> {
        self.core.check_unbroken()?;
        if !self.core.wait_all()? {
            return Err(Error::timeout("regroup", self.core.unended("what the device's streams were given")));
        }
        let mut own = LocalState::zeroed();
        self.tables.read(self.core.stream(), 0, bytemuck::bytes_of_mut(&mut own))?;
        Ok(Proposal { rank: self.rank().into(), epoch: own.ticket / QUANTUM })
    }

    /// Clears what earlier operations have left on the device. The next operation is behind
    /// `epoch`, without the ranks `left_out`.
    fn clear(&self, left_out: u64, epoch: u64) -> Result<()> {
        let stream = self.core.stream();
        let ticket = epoch * QUANTUM;
        let (low, high) = (left_out as u32, (left_out >> 32) as u32);
        let state = LocalState { ticket, left_out: low, left_out_high: high, ..LocalState::zeroed() };
        self.tables.write(stream, 0, bytemuck::bytes_of(&state))?;
        let chunks = self.options.chunks() as usize;
        let members = most_ranks(self.core.topology()) as usize;
        // Members may differ in whether the last dispatch was answered. Treat it as unanswered, so
        // that the next one waits for all members.
        let turns = LowLatencyTurns { dispatches: 0, answered: u64::MAX };
        for place in self.core.places() {
            let tables = &place.room().own.tables;
            // Chunks may have been left half sent.
            self.tables.write_at(stream, tables.sent, &vec![0; chunks * 8])?;
            self.tables.write_at(stream, tables.answered, &vec![0; members * chunks * 8])?;
            self.tables.write_at(stream, tables.turns, bytemuck::bytes_of(&turns))?;
            // A combine of the dispatch before, replayed from a graph, is not for so many.
            let own = tables.num_tokens.add(4 * u64::from(self.rank()));
            self.tables.write_at(stream, own, &NO_DISPATCH.to_ne_bytes())?;
        }
        if let Some(messages) = &self.messages {
            messages.forget_unfinished(stream)?;
        }
        self.publish_left_out(left_out, epoch)?;
        self.generation.end(stream)
    }

    /// Publishes to left-out ranks that this rank's rows are now of a later operation, as a
    /// dispatch that times out does. A left-out rank may still read rows of the last combine.
    fn publish_left_out(&self, left_out: u64, epoch: u64) -> Result<()> {
        if left_out == 0 || self.messages.is_some() {
            return Ok(());
        }
        for rank in (0..self.num_ranks()).filter(|rank| left_out >> rank & 1 != 0) {
            let pool = DevicePtr(self.core.pool_addresses()[rank as usize]);
            let word = pool.add(gave_up_offset(room_for_ranks(self.num_ranks()), self.rank()));
            // SAFETY: the pool is mapped as long as the buffer exists, and the word has this rank as
            // its only writer.
            unsafe { self.core.stream().write(word, bytemuck::bytes_of(&epoch))? };
        }
        poll(self.core.device(), Duration::from_nanos(GIVING_UP_NS), || Ok(false)).map(drop)
    }
}

/// [`Buffer::regroup`] with epochs as after `ahead` more operations, equal on every rank. For
/// tests of long runs.
///
/// # Errors
/// The same as [`Buffer::regroup`].
pub fn regroup_ahead(buffer: &mut Buffer, group: &dyn ProcessGroup, ahead: u64) -> Result<()> {
    agree(group, &buffer.options, buffer.num_ranks())?;
    // The others wait for a rank that fails here, so all of them get its reason.
    let ours = agree_on_part(group, buffer.propose())?;
    let (members, epoch) =
        agree_on_members(&group.all_gather(bytemuck::bytes_of(&ours))?, buffer.num_ranks())?;

    // A queue that has ended carries no more puts.
    let mut failures = buffer.core.network().map_or_else(Vec::new, |network| network.proxies().failures());
    failures.retain(|(peer, _)| members >> peer & 1 != 0);
    agree_on_part(group, failures.pop().map_or(Ok(()), |(_, error)| Err(error)))?;

    let left_out = !members & (u64::MAX >> (64 - buffer.num_ranks()));
    // Every rank must have cleared its state before any rank starts an operation.
    agree_on_part(group, buffer.clear(left_out, epoch + ahead))?;
    buffer.left_out = left_out;
    if let Some(network) = buffer.core.network() {
        network.leave_out((0..buffer.num_ranks()).filter(|rank| left_out >> rank & 1 != 0).collect());
    }
    buffer.generation = Generation::new(buffer.core.faults());
    buffer.core.forget_sent();
    Ok(())
}

/// The members, as bits, and the last epoch that one of them has ended.
fn agree_on_members(proposals: &[Vec<u8>], num_ranks: u32) -> Result<(u64, u64)> {
    let (mut members, mut last) = (0, 0);
    for bytes in proposals {
        let read = bytemuck::try_pod_read_unaligned::<Proposal>(bytes);
        let Proposal { rank, epoch } = read.map_err(|error| Error::internal("regroup", error))?;
        if rank >= num_ranks.into() || members >> rank & 1 != 0 {
            let rule = format!("must be 0 to {}, and one for each rank of the group", num_ranks - 1);
            return Err(Error::argument("rank of the buffer", rank, rule));
        }
        members |= 1 << rank;
        last = epoch.max(last);
    }
    Ok((members, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_settle_on_the_last_epoch() {
        let say = |rank, epoch| bytemuck::bytes_of(&Proposal { rank, epoch }).to_vec();
        assert_eq!(agree_on_members(&[say(3, 5), say(0, 7)], 4).unwrap(), (0b1001, 7));
        assert_eq!(agree_on_members(&[say(63, 5), say(0, 7)], 64).unwrap(), (1 << 63 | 1, 7));
        for wrong in [[say(3, 5), say(3, 5)], [say(4, 5), say(0, 5)], [say(1, 5), vec![0; 3]]] {
            agree_on_members(&wrong, 4).unwrap_err();
        }
    }
}
