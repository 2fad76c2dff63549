//! Ranks of one host that play several nodes: a put is a copy to the peer's wire memory, which is mapped here.

use std::collections::VecDeque;
use std::io::{PipeReader, PipeWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::staging::Staging;
use super::{Interrupt, Link, Links, Place, Put, Queue, Receiving, Setup, deadline, greeting, store_counter};
use crate::driver::{DevicePtr, Memory};
use crate::error::{Error, Result};

/// Batches of one queue that a stream may have under way.
const BATCHES: usize = 32;
/// Most puts of a batch.
const BATCH_PUTS: usize = 32;

pub(super) fn connect(setup: &Setup<'_>) -> Result<Links> {
    let prepared = greeting::check_arguments(setup).and_then(|()| {
        let (presence, reader) = Presence::new()?;
        Ok((presence, reader, setup.memory.export()?))
    });
    let address = prepared.as_ref().map(|_| String::new()).map_err(Error::clone);
    greeting::meet(setup, address)?;
    let (presence, reader, memory) = prepared?;
    // What the ranks of one host give each other: wire memory, and a sign of life.
    let received = setup.group.exchange_fds(&[memory.as_fd(), reader.as_fd()])?;
    let links = greeting::agree(setup.group, setup.options.kind, make_links(setup, received))?;
    Ok(Links { links, receiving: Box::new(presence) })
}

fn make_links(setup: &Setup<'_>, received: Vec<Vec<OwnedFd>>) -> Result<Vec<Link>> {
    let device = setup.memory.device();
    let mut peers = Vec::new();
    for (peer, fds) in (0u32..).zip(received) {
        if !setup.peers.contains(&peer) {
            continue;
        }
        let count = fds.len();
        let [memory, life] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| {
            setup.place(peer).error("connect", format!("it gave {count} descriptors instead of 2"))
        })?;
        let label = format!("wire memory of rank {peer}");
        let memory = Memory::import(device, memory, setup.memory.bytes(), &label)?;
        peers.push((peer, Arc::new(memory), Arc::new(life)));
    }
    let mut links = Vec::new();
    for index in 0..setup.options.queues_per_peer {
        for (peer, target, life) in &peers {
            let carrier = if setup.direct {
                Carrier::Host
            } else {
                let staging = Staging::new(device, BATCHES, BATCH_PUTS as u64 * 8)?;
                Carrier::Stream { staging, under_way: VecDeque::new(), next: 0 }
            };
            let queue = ShmQueue {
                carrier,
                place: setup.place(*peer),
                source: setup.memory.clone(),
                target: target.clone(),
                life: life.clone(),
                timeout: setup.options.timeout,
                interrupt: Interrupt::default(),
                posted: 0,
                failed: None,
            };
            links.push(Link { peer: *peer, index, queue: Box::new(queue) });
        }
    }
    Ok(links)
}

/// How the peers see that this rank is there: a pipe that they hold the reading end of and poll. A byte in it is a goodbye,
/// a writing end that is closed without one a death.
#[derive(Debug)]
struct Presence {
    writer: Option<PipeWriter>,
    // Without a reader of our own the goodbye fails, with a signal, once the peers have left.
    _reader: PipeReader,
}

impl Presence {
    fn new() -> Result<(Presence, PipeReader)> {
        let pipe = || {
            let (reader, writer) = std::io::pipe()?;
            Ok((Presence { writer: Some(writer), _reader: reader.try_clone()? }, reader))
        };
        pipe().map_err(|error: std::io::Error| Error::os("pipe", error))
    }
}

impl Receiving for Presence {
    fn failure(&self) -> Option<Error> {
        // Nothing is received here: peers write to memory.
        None
    }

    fn close(&mut self) {
        if let Some(mut writer) = self.writer.take() {
            // One byte always fits.
            let _ = writer.write_all(&[1]);
        }
    }
}

/// What the pipe of a peer says.
fn check_life(life: &OwnedFd) -> Result<(), &'static str> {
    let mut polled = [PollFd::from_borrowed_fd(life.as_fd(), PollFlags::IN)];
    // An interrupted poll says nothing; the next put asks again.
    let _ = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    let found = polled[0].revents();
    if found.contains(PollFlags::IN) {
        Err("it said goodbye before; close only after a barrier")
    } else if found.intersects(PollFlags::HUP | PollFlags::ERR) {
        Err("it died")
    } else {
        Ok(())
    }
}

#[derive(Debug)]
struct ShmQueue {
    // First, so that the stream is through before the memories are unmapped.
    carrier: Carrier,
    place: Place,
    source: Arc<Memory>,
    target: Arc<Memory>,
    life: Arc<OwnedFd>,
    timeout: Duration,
    interrupt: Interrupt,
    posted: u64,
    failed: Option<Error>,
}

/// What copies.
#[derive(Debug)]
enum Carrier {
    /// This thread: the memory of a virtual GPU is the process's own.
    Host,
    /// A stream. A piece of staging holds the counters' values of a batch.
    Stream {
        staging: Staging,
        /// Piece of each batch under way, and the puts posted before it.
        under_way: VecDeque<(usize, u64)>,
        next: usize,
    },
}

impl ShmQueue {
    fn put(&mut self, puts: &[Put]) -> Result<()> {
        check_life(&self.life).map_err(|reason| self.place.error("put", reason))?;
        for put in puts {
            put.check(self.source.bytes()).map_err(|reason| self.place.error("put", reason))?;
        }
        let (source, target) = (self.source.ptr(), self.target.ptr());
        match &mut self.carrier {
            Carrier::Host => {
                for put in puts {
                    // SAFETY: checked above: all of it lies in the two memories, which are as large as each other and live
                    // as long as this queue. They are different mappings, reached through addresses only.
                    unsafe {
                        if put.bytes > 0 {
                            let from = (source.0 + put.from) as *const u8;
                            let to = (target.0 + put.to) as *mut u8;
                            std::ptr::copy_nonoverlapping(from, to, put.bytes as usize);
                        }
                        store_counter(target, put.counter, put.value);
                    }
                    self.posted += 1;
                }
            }
            Carrier::Stream { staging, under_way, next } => {
                let until = deadline(self.timeout);
                for batch in puts.chunks(BATCH_PUTS) {
                    let before = self.posted;
                    let piece = *next;
                    staging.wait(piece, until, &self.interrupt, self.place, "put")?;
                    // Its event is about to be recorded anew.
                    while under_way.front().is_some_and(|(front, _)| *front == piece) {
                        under_way.pop_front();
                    }
                    *next = (piece + 1) % staging.pieces();
                    let (host, device) = staging.piece(piece);
                    for (index, put) in (0u64..).zip(batch) {
                        let offset = index * 8;
                        // SAFETY: as above; `Staging` waits for the stream before anything is freed. The word is within
                        // the piece, which the stream is through with, and aligned like the piece.
                        unsafe {
                            if put.bytes > 0 {
                                let (to, from) = (target.0 + put.to, source.0 + put.from);
                                staging.stream().copy(DevicePtr(to), DevicePtr(from), put.bytes)?;
                            }
                            host.add(offset as usize).cast::<u64>().write_volatile(put.value);
                            let word = DevicePtr(device.0 + offset);
                            staging.stream().copy(DevicePtr(target.0 + put.counter), word, 8)?;
                        }
                    }
                    staging.enqueued(piece)?;
                    self.posted += batch.len() as u64;
                    under_way.push_back((piece, before));
                }
            }
        }
        Ok(())
    }
}

impl Queue for ShmQueue {
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let outcome = self.put(puts);
        self.failed = outcome.as_ref().err().cloned();
        outcome
    }

    fn completed(&mut self) -> Result<u64> {
        let Carrier::Stream { staging, under_way, .. } = &mut self.carrier else {
            return Ok(self.posted);
        };
        while let Some((piece, _)) = under_way.front() {
            if !staging.is_free(*piece)? {
                break;
            }
            under_way.pop_front();
        }
        Ok(under_way.front().map_or(self.posted, |(_, before)| *before))
    }

    fn quiet(&mut self, timeout: Duration) -> Result<()> {
        let until = deadline(timeout);
        if let Carrier::Stream { staging, under_way, .. } = &mut self.carrier {
            while let Some((piece, _)) = under_way.front() {
                staging.wait(*piece, until, &self.interrupt, self.place, "quiet")?;
                under_way.pop_front();
            }
        }
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    fn close(&mut self) {
        // The peer learns it from this rank's `Presence`, once for all queues.
        self.failed.get_or_insert_with(|| self.place.error("put", "this rank has closed the queue"));
    }

    fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::MemoryKind;
    use crate::driver::virt::{Executor, Machine, VirtConfig, VirtualGpu};

    #[test]
    fn a_pipe_tells_goodbye_from_death() {
        let (mut leaving, reader) = Presence::new().unwrap();
        let life = OwnedFd::from(reader);
        check_life(&life).unwrap();
        leaving.close();
        assert!(check_life(&life).unwrap_err().contains("goodbye"));
        drop(leaving);
        assert!(check_life(&life).unwrap_err().contains("goodbye"), "every later put as well");

        let (dying, reader) = Presence::new().unwrap();
        let life = OwnedFd::from(reader);
        check_life(&life).unwrap();
        drop(dying);
        assert!(check_life(&life).unwrap_err().contains("died"));
    }

    #[test]
    fn a_stream_that_is_behind_keeps_values_and_completion_right() {
        // Its work runs only in calls that wait for it.
        let executor = Executor::Manual(Machine::new(1));
        let device = VirtualGpu::new(VirtConfig { executor, ..VirtConfig::default() });
        let alloc = || Arc::new(Memory::alloc(&device, 4096, MemoryKind::Shareable, "wire").unwrap());
        let (source, target) = (alloc(), alloc());
        let (_presence, reader) = Presence::new().unwrap();
        let staging = Staging::new(&device, BATCHES, BATCH_PUTS as u64 * 8).unwrap();
        let mut queue = ShmQueue {
            carrier: Carrier::Stream { staging, under_way: VecDeque::new(), next: 0 },
            place: Place { transport: "shm", rank: 0, peer: 1 },
            source,
            target: target.clone(),
            life: Arc::new(reader.into()),
            timeout: Duration::from_secs(10),
            interrupt: Interrupt::default(),
            posted: 0,
            failed: None,
        };
        let put = |value: u64| Put { bytes: 16, to: 2048, counter: value * 8, value, ..Put::default() };
        queue.put_with_counter(&[put(1), put(2)]).unwrap();
        queue.put_with_counter(&[put(3)]).unwrap();
        assert_eq!(queue.completed().unwrap(), 0);
        queue.quiet(Duration::from_secs(10)).unwrap();
        assert_eq!(queue.completed().unwrap(), 3);
        // More batches than there are pieces for their values.
        let last = 3 + 2 * BATCHES as u64;
        for value in 4..=last {
            queue.put_with_counter(&[put(value)]).unwrap();
            assert!(queue.completed().unwrap() < value, "the stream has not run");
        }
        queue.quiet(Duration::from_secs(10)).unwrap();
        assert_eq!(queue.completed().unwrap(), last);
        for value in 1..=last {
            // SAFETY: within the memory of a virtual GPU, which runs nothing now.
            let word = unsafe { ((target.ptr().0 + value * 8) as *const u64).read_volatile() };
            assert_eq!(word, value);
        }
    }
}
