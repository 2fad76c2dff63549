//! The queue over one reliable connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::end::End;
use super::raw::{self, From, Write};
use crate::driver::Memory;
use crate::error::{Error, Result};
use crate::transport::put::{GOODBYE_BEFORE, Interrupt, Put, PutQueue};
use crate::transport::setup::LinkEnds;

/// The peer's wire memory, as large as the own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Remote {
    pub address: u64,
    pub rkey: u32,
}

/// An ordered queue over verbs: of each put the bytes, then the counter, as RDMA writes on one
/// connection.
#[derive(Debug)]
pub(super) struct VerbsQueue {
    end: Arc<End>,
    ends: LinkEnds,
    remote: Remote,
    /// Most writes in flight.
    depth: u64,
    /// Most bytes of one write.
    max_message: u64,
    timeout: Duration,
    interrupt: Interrupt,
    /// Writes of the chain that is being built.
    chain: Vec<Write>,
    /// Writes posted, and of those the ones that have left.
    posted: u64,
    retired: u64,
    /// The signalled writes in flight: their number, and how many puts have left when they have.
    marks: VecDeque<(u64, u64)>,
    puts_posted: u64,
    puts_left: u64,
    /// The failure that ended the queue.
    failure: Option<Error>,
}

impl VerbsQueue {
    pub fn new(
        end: Arc<End>,
        ends: LinkEnds,
        remote: Remote,
        depth: u32,
        max_message: u32,
        timeout: Duration,
    ) -> VerbsQueue {
        VerbsQueue {
            end,
            ends,
            remote,
            depth: depth.into(),
            max_message: u64::from(max_message).max(1),
            timeout,
            interrupt: Interrupt::default(),
            chain: Vec::new(),
            posted: 0,
            retired: 0,
            marks: VecDeque::new(),
            puts_posted: 0,
            puts_left: 0,
            failure: None,
        }
    }

    fn usable(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Records the error that ends the queue.
    fn fail(&mut self, error: Error) -> Error {
        self.failure.get_or_insert(error).clone()
    }

    fn error(&self, call: &'static str, status: String, remedy: String) -> Error {
        let operation = format!("put #{}", self.puts_left + 1);
        Error::Verbs { call, status, peer: Some(self.ends.peer), operation, remedy }
    }

    /// Adds a write to the chain; a chain that fills half the connection is posted at once.
    fn push(&mut self, from: From, to: u64) -> Result<()> {
        let id = self.posted + self.chain.len() as u64 + 1;
        let to = self.remote.address + to;
        self.chain.push(Write { id, from, to, rkey: self.remote.rkey, signalled: false });
        if self.chain.len() as u64 >= self.depth / 2 { self.flush() } else { Ok(()) }
    }

    /// Posts the chain in one call, with its last write signalled, once the queue has room for it.
    fn flush(&mut self) -> Result<()> {
        let mut chain = std::mem::take(&mut self.chain);
        let Some(last) = chain.last_mut() else { return Ok(()) };
        last.signalled = true;
        let id = last.id;
        self.wait(self.timeout, |queue| id - queue.retired <= queue.depth)?;
        let operation = format!("put #{} to rank {}", self.puts_posted, self.ends.peer);
        let post = || self.end.post(&chain, &operation);
        self.interrupt.during(&"ibv_post_send", post).map_err(|error| self.fail(error))?;
        self.posted = id;
        self.marks.push_back((id, self.puts_posted));
        chain.clear();
        self.chain = chain;
        Ok(())
    }

    /// Takes completions.
    fn poll(&mut self) -> Result<()> {
        let completions =
            self.interrupt.during(&"ibv_poll_cq", || self.end.poll()).map_err(|error| self.fail(error))?;
        for completion in completions {
            // The first to fail is the cause; those behind it are flushed.
            if let Some((status, vendor)) = completion.error {
                let text =
                    format!("{} (status {status}, vendor error {vendor:#x})", raw::status_text(status));
                let error = self.error("ibv_poll_cq", text, remedy(status).into());
                return Err(self.fail(error));
            }
            self.retired = completion.id;
            while self.marks.front().is_some_and(|(id, _)| *id <= completion.id)
                && let Some((_, puts)) = self.marks.pop_front()
            {
                self.puts_left = puts;
            }
        }
        Ok(())
    }

    /// Waits while writes complete, and for `timeout` while none does.
    fn wait(&mut self, timeout: Duration, done: impl Fn(&VerbsQueue) -> bool) -> Result<()> {
        let (mut since, mut retired) = (Instant::now(), self.retired);
        loop {
            self.poll()?;
            if done(self) {
                return Ok(());
            }
            if self.interrupt.is_raised() {
                return Err(self.fail(self.ends.error("put", "interrupted: this rank closes the link")));
            }
            if self.retired != retired {
                (since, retired) = (Instant::now(), self.retired);
            }
            if since.elapsed() >= timeout {
                let flying = self.posted - self.retired;
                let status = format!("{flying} writes did not complete within {timeout:.1?}");
                let error = self.error("ibv_poll_cq", status, remedy(RETRY_EXCEEDED).into());
                return Err(self.fail(error));
            }
            std::thread::yield_now();
        }
    }
}

/// `IBV_WC_RETRY_EXC_ERR`.
const RETRY_EXCEEDED: u32 = ibverbs_sys::ibv_wc_status::IBV_WC_RETRY_EXC_ERR;

/// The remedy for a completion's status.
fn remedy(status: u32) -> &'static str {
    use ibverbs_sys::ibv_wc_status as wc;
    match status {
        wc::IBV_WC_RETRY_EXC_ERR => {
            "; the peer has died or the network is down or loses too much: see what the peer reported, `epoxide doctor` on \
             both hosts, and EPOXIDE_RDMA_TIMEOUT and EPOXIDE_RDMA_RETRY_COUNT"
        }
        wc::IBV_WC_REM_ACCESS_ERR | wc::IBV_WC_REM_INV_REQ_ERR | wc::IBV_WC_REM_OP_ERR => {
            "; the peer's card refused the address or the key: its wire memory is smaller than it said, or gone"
        }
        wc::IBV_WC_LOC_PROT_ERR | wc::IBV_WC_LOC_LEN_ERR => {
            "; this host's card refused the address or the length: wire memory is gone"
        }
        wc::IBV_WC_LOC_QP_OP_ERR => {
            "; this host's card could not send: its interface is down, or has no route to the peer any more"
        }
        wc::IBV_WC_WR_FLUSH_ERR => "; an earlier error, or the closing of the connection, flushed it",
        _ => "",
    }
}

impl PutQueue for VerbsQueue {
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()> {
        self.usable()?;
        // Errors show early, and completions do not pile up.
        self.poll()?;
        if self.end.peer_left() {
            return Err(self.fail(self.ends.error("put", GOODBYE_BEFORE)));
        }
        let (address, bytes, lkey) =
            (self.end.region.address(), self.end.region.bytes(), self.end.region.lkey());
        for put in puts {
            put.check(bytes).map_err(|reason| self.fail(self.ends.error("put", reason)))?;
        }
        for put in puts {
            let mut done = 0;
            while done < put.bytes {
                let bytes = (put.bytes - done).min(self.max_message);
                // At most `max_message`, a `u32`.
                let from = From::Memory(address + put.from + done, bytes as u32, lkey);
                self.push(from, put.to + done)?;
                done += bytes;
            }
            // Counted before its last write is posted: a mark there covers it.
            self.puts_posted += 1;
            self.push(From::Word(put.value), put.counter)?;
        }
        self.flush()
    }

    fn completed(&mut self) -> Result<u64> {
        self.usable()?;
        self.poll()?;
        Ok(self.puts_left)
    }

    fn quiet(&mut self, timeout: Duration) -> Result<()> {
        self.usable()?;
        self.wait(timeout, |queue| queue.retired == queue.posted)
    }

    fn source(&self) -> Option<&Memory> {
        Some(self.end.region.memory())
    }

    fn close(&mut self) {
        if self.failure.is_none() {
            self.end.send_goodbye();
            self.failure = Some(self.ends.error("put", "this rank has closed the queue"));
        }
    }

    fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
    }
}
