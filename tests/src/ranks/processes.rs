//! Ranks that are processes, from the test's side.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::child::{Call, FromRank, RANKS, ToRank, files};
use super::outcome::Outcome;
use super::report::End;
use super::session::Ranks;
use super::slot::Slot;
use super::trace::{self, Thread};
use super::verdict::{Cause, RankMain};
use epoxide::group::FileStore;
use epoxide::internal::group::HeldPort;
use epoxide::internal::group::poison_files;
use epoxide::{Error, Result};
use epoxide_launch::{Process, RankEnvironment, StoreDirectory, die_with_parent};
use epoxide_launch::{RankExit, current_exe};

/// The interval of polls of processes whose end of the socket may stay open after they end.
const LOOK: Duration = Duration::from_millis(50);
/// Bytes of a rank's output that are shown.
const OUTPUT: usize = 4096;

/// The ranks. Dropping ends and reaps them.
#[derive(Debug)]
pub(super) struct Processes {
    peers: Vec<Peer>,
    call: Call,
    number: u64,
    store: FileStore,
    _port: HeldPort,
    _directory: StoreDirectory,
}

#[derive(Debug)]
struct Peer {
    process: Process,
    control: UnixStream,
    /// Bytes read of its next line.
    line: Vec<u8>,
    slot: Slot,
    thread: Option<Thread>,
    /// The rank has not yet ended the current test.
    busy: bool,
}

impl Processes {
    pub fn start(size: u32, call: Call) -> Result<Processes> {
        let directory = StoreDirectory::create()?;
        let call = Call { directory: directory.path.clone(), ..call };
        let board = directory.path.join("store");
        let port = HeldPort::any()?;
        let mut this = Processes {
            peers: Vec::new(),
            number: 0,
            store: FileStore::new(&board)?,
            _port: port,
            _directory: directory,
            call,
        };
        let call = serde_json::to_string(&this.call).map_err(|error| Error::os("JSON", error))?;
        for local_rank in 0..size {
            let environment = RankEnvironment {
                local_rank,
                local_size: size,
                node: 0,
                nodes: 1,
                master_addr: "127.0.0.1".to_owned(),
                master_port: this._port.number(),
                store: Some(format!("file://{}", board.display())),
                restarts: 0,
                max_restarts: 0,
                run_id: format!("test-{}", std::process::id()),
            };
            let peer = this.spawn(&environment, &call)?;
            this.peers.push(peer);
        }
        Ok(this)
    }

    fn spawn(&self, environment: &RankEnvironment, call: &str) -> Result<Peer> {
        let rank = environment.rank();
        let os = |what: &'static str| move |error: std::io::Error| Error::os(what, error);
        let [doing, _, output] = files(&self.call, rank);
        let output = File::options().create(true).append(true).open(output).map_err(os("open"))?;
        let (control, theirs) = UnixStream::pair().map_err(os("socketpair"))?;
        control.set_nonblocking(true).map_err(os("fionbio"))?;
        let mut command = current_exe()?;
        command
            .args(["--exact", &self.call.test, "--nocapture", "--test-threads=1", "--include-ignored"])
            .envs(environment.variables())
            .env(RANKS, call)
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(output.try_clone().map_err(os("dup"))?)
            .stderr(output);
        die_with_parent(&mut command);
        let child = command.spawn().map_err(|error| Error::os("spawn", format!("rank {rank}: {error}")))?;
        let slot = Slot::file(&doing)?;
        let process = Process::new(rank, environment.node, child).as_group_leader();
        Ok(Peer { process, control, line: Vec::new(), slot, thread: None, busy: false })
    }
}

impl Processes {
    fn send(&mut self, what: &ToRank) {
        let mut line = serde_json::to_vec(what).unwrap_or_default();
        line.push(b'\n');
        for peer in &mut self.peers {
            // `wait` finds a process that has ended. The few bytes always fit.
            let _ = peer.control.write_all(&line);
        }
    }
}

impl Ranks for Processes {
    fn size(&self) -> u32 {
        self.peers.len() as u32
    }

    fn begin(&mut self, number: u64, _: Arc<RankMain>) {
        self.number = number;
        for peer in &mut self.peers {
            peer.busy = true;
        }
        self.send(&ToRank::Go(number));
    }

    fn conclude(&mut self, outcome: &Outcome) {
        self.send(&ToRank::Outcome(outcome.clone()));
    }

    fn wait(&mut self, timeout: Duration) -> Vec<(u32, End, SystemTime)> {
        let timeout = timeout.min(LOOK) + Duration::from_millis(1);
        let busy = self.peers.iter().filter(|peer| peer.busy && peer.process.exit().is_none());
        let mut fds: Vec<PollFd<'_>> = busy.map(|peer| PollFd::new(&peer.control, PollFlags::IN)).collect();
        // The ranks are checked even if the poll fails.
        let _ = poll(&mut fds, Timespec::try_from(timeout).ok().as_ref());
        let number = self.number;
        let mut through = Vec::new();
        for (rank, peer) in (0..).zip(&mut self.peers).filter(|(_, peer)| peer.busy) {
            // In this order: messages from before its end must be read.
            let ended = peer.has_ended();
            let verdict = peer.read(number);
            let verdict = verdict.or_else(|| Some((End::Died(ended?), SystemTime::now())));
            if let Some((end, at)) = verdict {
                peer.busy = false;
                through.push((rank, end, at));
            }
        }
        through
    }

    fn give_up(&self, reason: &str) {
        if let Err(error) = poison_files(&self.store, reason) {
            tracing::warn!("{error}");
        }
    }

    fn trace(&mut self, rank: u32, end: Instant) -> String {
        let Some(peer) = self.peers.get_mut(rank as usize) else { return String::new() };
        // The verdict may have arrived only now.
        peer.read(self.number);
        let [_, traces, _] = files(&self.call, rank);
        match peer.thread {
            Some(thread) => trace::request(thread, &traces, end),
            None => "it did not come to the call that it is a rank of".to_owned(),
        }
    }

    fn operation(&self, rank: u32) -> String {
        self.peers.get(rank as usize).map_or_else(String::new, |peer| peer.slot.read())
    }

    fn output(&self, rank: u32) -> String {
        let [_, _, output] = files(&self.call, rank);
        let bytes = std::fs::read(output).unwrap_or_default();
        let end = &bytes[bytes.len().saturating_sub(OUTPUT)..];
        let mut text = String::from_utf8_lossy(end).trim().to_owned();
        let peer = self.peers.get(rank as usize);
        if peer.is_some_and(|peer| peer.thread.is_none() && peer.process.exit().is_some()) {
            text.push_str(&format!(
                "\n(it ended before it came to {}; if {:?} is not the path of the test, give that with Run::test)",
                self.call.site, self.call.test
            ));
        }
        text
    }
}

impl Peer {
    /// The exit of the process, if it has ended.
    fn has_ended(&mut self) -> Option<RankExit> {
        self.process.try_wait().inspect_err(|error| tracing::warn!("{error}")).ok().flatten()
    }

    /// Reads the rank's messages; returns the end of the test of this number.
    fn read(&mut self, number: u64) -> Option<(End, SystemTime)> {
        let mut chunk = [0; 4096];
        // Read all that has arrived: the socket does not block.
        while let Ok(count) = self.control.read(&mut chunk) {
            if count == 0 {
                break;
            }
            self.line.extend_from_slice(&chunk[..count]);
        }
        let mut ended = None;
        while let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.line.drain(..=end).collect();
            match serde_json::from_slice(&line) {
                Ok(FromRank::Here(tid)) => self.thread = Some(Thread { pid: self.process.id(), tid }),
                Ok(FromRank::Done { number: of, verdict, at }) if of == number => {
                    ended = Some((End::from(verdict), at));
                }
                Ok(FromRank::Done { .. }) => {}
                Err(error) => {
                    let text = format!("its message to the test cannot be read: {error}");
                    ended =
                        Some((End::Failed { text, cause: Cause::Own, backtrace: None }, SystemTime::now()));
                }
            }
        }
        ended
    }
}
