//! The queue over one reliable connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::raw::{self, From, Qp, Write};
use super::register::Region;
use crate::error::{Error, Result};
use crate::transport::{Put, Queue};

/// The peer's wire memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Remote {
    pub rank: u32,
    pub address: u64,
    pub bytes: u64,
    pub rkey: u32,
}

/// An ordered queue over verbs: of each put the bytes, then the counter, as RDMA writes on one connection.
#[derive(Debug)]
pub(super) struct VerbsQueue {
    // Before the region: dropped first.
    qp: Qp,
    region: Arc<Region>,
    remote: Remote,
    /// Most writes in flight.
    depth: u64,
    /// Most bytes of one write.
    max_message: u64,
    timeout: Duration,
    /// Writes of the chain that is being built.
    chain: Vec<Write>,
    /// Writes posted, and of those the ones that have left.
    posted: u64,
    retired: u64,
    /// Of the signalled writes in flight: their number, and how many puts have left when they have.
    marks: VecDeque<(u64, u64)>,
    puts_posted: u64,
    puts_left: u64,
    /// What made the queue useless.
    failure: Option<Error>,
}

impl VerbsQueue {
    pub fn new(
        qp: Qp,
        region: Arc<Region>,
        remote: Remote,
        depth: u32,
        max_message: u32,
        timeout: Duration,
    ) -> VerbsQueue {
        VerbsQueue {
            qp,
            region,
            remote,
            depth: depth.into(),
            max_message: u64::from(max_message).max(1),
            timeout,
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

    /// Remembers what made the queue useless.
    fn fail(&mut self, error: Error) -> Error {
        self.failure.get_or_insert(error).clone()
    }

    fn error(&self, call: &'static str, status: String, remedy: String) -> Error {
        let operation = format!("put #{}", self.puts_left + 1);
        Error::Verbs { call, status, peer: Some(self.remote.rank), operation, remedy }
    }

    /// Adds a write to the chain; a chain that fills half the connection goes at once.
    fn push(&mut self, from: From, to: u64, deadline: Instant) -> Result<()> {
        let id = self.posted + self.chain.len() as u64 + 1;
        let to = self.remote.address + to;
        self.chain.push(Write { id, from, to, rkey: self.remote.rkey, signalled: false });
        if self.chain.len() as u64 >= self.depth / 2 { self.flush(deadline) } else { Ok(()) }
    }

    /// Posts the chain in one call, with its last write signalled, once there is room for it.
    fn flush(&mut self, deadline: Instant) -> Result<()> {
        let mut chain = std::mem::take(&mut self.chain);
        let Some(last) = chain.last_mut() else { return Ok(()) };
        last.signalled = true;
        let id = last.id;
        self.wait(deadline, |queue| id - queue.retired <= queue.depth)?;
        let operation = format!("put #{} to rank {}", self.puts_posted, self.remote.rank);
        self.qp.post(&chain, &operation).map_err(|error| self.fail(error))?;
        self.posted = id;
        self.marks.push_back((id, self.puts_posted));
        chain.clear();
        self.chain = chain;
        Ok(())
    }

    /// Takes completions.
    fn poll(&mut self) -> Result<()> {
        let completions = self.qp.poll().map_err(|error| self.fail(error))?;
        for completion in completions {
            // The first to fail is the cause; those behind it are flushed.
            if let Some((status, vendor)) = completion.error {
                let text =
                    format!("{} (status {status}, vendor error {vendor:#x})", raw::status_text(status));
                let error = self.error("ibv_poll_cq", text, remedy(status).into());
                return Err(self.fail(error));
            }
            self.retired = completion.id;
            while let Some((_, puts)) = self.marks.pop_front_if(|(id, _)| *id <= completion.id) {
                self.puts_left = puts;
            }
        }
        Ok(())
    }

    fn wait(&mut self, deadline: Instant, done: impl Fn(&VerbsQueue) -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            self.poll()?;
            if done(self) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let (flying, waited) = (self.posted - self.retired, start.elapsed());
                let status = format!("{flying} writes did not complete within {waited:.1?}");
                let error = self.error("ibv_poll_cq", status, remedy(RETRY_EXCEEDED).into());
                return Err(self.fail(error));
            }
            std::thread::yield_now();
        }
    }
}

/// `IBV_WC_RETRY_EXC_ERR`.
const RETRY_EXCEEDED: u32 = ibverbs_sys::ibv_wc_status::IBV_WC_RETRY_EXC_ERR;

/// What to do about a completion's status.
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

impl Queue for VerbsQueue {
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()> {
        self.usable()?;
        for put in puts {
            check(put, self.region.bytes(), self.remote.bytes)?;
        }
        let deadline = Instant::now() + self.timeout;
        let (address, lkey) = (self.region.address(), self.region.lkey());
        for put in puts {
            let mut done = 0;
            while done < put.bytes {
                let bytes = (put.bytes - done).min(self.max_message);
                // At most `max_message`, a `u32`.
                self.push(
                    From::Memory(address + put.from + done, bytes as u32, lkey),
                    put.to + done,
                    deadline,
                )?;
                done += bytes;
            }
            // Counted before its last write is posted: a mark there covers it.
            self.puts_posted += 1;
            self.push(From::Word(put.value), put.counter, deadline)?;
        }
        self.flush(deadline)?;
        // Errors show early, and completions do not pile up.
        self.poll()
    }

    fn completed(&mut self) -> Result<u64> {
        self.usable()?;
        self.poll()?;
        Ok(self.puts_left)
    }

    fn quiet(&mut self, timeout: Duration) -> Result<()> {
        self.usable()?;
        self.wait(Instant::now() + timeout, |queue| queue.retired == queue.posted)
    }

    fn close(&mut self) {
        // The connection itself stays until the drop: the peer's puts come in over it.
        let error = self.error("put_with_counter", "the queue is closed".into(), String::new());
        self.failure.get_or_insert(error);
    }
}

/// Refuses a put that reaches beyond wire memory, here or there.
fn check(put: &Put, own: u64, peer: u64) -> Result<()> {
    let within = |start: u64, bytes: u64, size: u64| start.checked_add(bytes).is_some_and(|end| end <= size);
    let refuse = |argument, value: u64, rule: String| Err(Error::argument(argument, value, rule));
    if put.bytes > 0 && !within(put.from, put.bytes, own) {
        return refuse(
            "put.from",
            put.from,
            format!("with bytes = {} must be within the {own} bytes of wire memory", put.bytes),
        );
    }
    if put.bytes > 0 && !within(put.to, put.bytes, peer) {
        return refuse(
            "put.to",
            put.to,
            format!("with bytes = {} must be within the peer's {peer} bytes of wire memory", put.bytes),
        );
    }
    if !put.counter.is_multiple_of(8) || !within(put.counter, 8, peer) {
        return refuse(
            "put.counter",
            put.counter,
            format!("must be a multiple of 8 within the peer's {peer} bytes of wire memory"),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn puts_stay_within_wire_memory() {
        let good = Put { from: 0, to: 64, bytes: 64, counter: 120, value: 1 };
        assert!(check(&good, 64, 128).is_ok());
        assert!(check(&Put { from: 999, to: 999, bytes: 0, ..good }, 64, 128).is_ok());
        for (bad, name) in [
            (Put { from: 1, ..good }, "put.from = 1:"),
            (Put { from: u64::MAX, ..good }, "put.from = 18446744073709551615:"),
            (Put { to: 65, ..good }, "put.to = 65:"),
            (Put { counter: 124, ..good }, "put.counter = 124:"),
            (Put { counter: 128, ..good }, "put.counter = 128:"),
            (Put { counter: u64::MAX - 7, ..good }, "put.counter = 18446744073709551608:"),
        ] {
            let error = check(&bad, 64, 128).unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        }
    }
}
