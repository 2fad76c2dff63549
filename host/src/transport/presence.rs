//! Signs of life between the ranks of a host: a pipe whose reading end the peers hold and poll. A
//! byte in it is a goodbye; a writing end closed without one is a death.

use std::io::{PipeReader, PipeWriter, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::links::Receiving;
use super::put::GOODBYE_BEFORE;
use super::setup::LinkEnds;
use crate::error::{Error, Result};

/// This rank's own sign of life.
#[derive(Debug)]
pub(super) struct Presence {
    writer: Option<PipeWriter>,
    // Without a reader in this process the goodbye fails, with a signal, once the peers have left.
    _reader: PipeReader,
}

impl Presence {
    /// Begins, with the end that is given to the peers.
    pub(super) fn new() -> Result<(Presence, PipeReader)> {
        let pipe = || {
            let (reader, writer) = std::io::pipe()?;
            Ok((Presence { writer: Some(writer), _reader: reader.try_clone()? }, reader))
        };
        pipe().map_err(|error: std::io::Error| Error::system("pipe", error))
    }

    /// Writes the goodbye.
    pub(super) fn leave(&mut self) {
        if let Some(mut writer) = self.writer.take() {
            // One byte always fits.
            let _ = writer.write_all(&[1]);
        }
    }
}

/// A peer's sign of life.
#[derive(Debug)]
pub(super) struct Life(OwnedFd);

impl Life {
    /// `pipe` is what the peer gave.
    pub(super) fn new(pipe: OwnedFd) -> Life {
        Life(pipe)
    }

    /// Why nothing can be put to the peer any more, if so.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let found = self.poll();
        if found.contains(PollFlags::IN) {
            Err(GOODBYE_BEFORE)
        } else if found.intersects(PollFlags::HUP | PollFlags::ERR) {
            Err("it died")
        } else {
            Ok(())
        }
    }

    /// Whether the peer ended without a goodbye.
    pub(super) fn is_dead(&self) -> bool {
        let found = self.poll();
        !found.contains(PollFlags::IN) && found.intersects(PollFlags::HUP | PollFlags::ERR)
    }

    fn poll(&self) -> PollFlags {
        let mut polled = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
        // An interrupted poll has no result; the next call polls again.
        let _ = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled[0].revents()
    }
}

/// The peers on this host, as far as they are alive, and this rank's own sign of life.
#[derive(Debug)]
pub(super) struct Neighbours {
    pub(super) presence: Presence,
    pub(super) lives: Vec<(LinkEnds, Life)>,
}

impl Receiving for Neighbours {
    fn failures(&self) -> Vec<(u32, Error)> {
        // A peer wrote all its bytes before its goodbye.
        let dead = self.lives.iter().filter(|(_, life)| life.is_dead());
        dead.map(|(ends, _)| (ends.peer, ends.error("receive", "it died"))).collect()
    }

    fn close(&mut self) {
        self.presence.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_tells_goodbye_from_death() {
        let (mut leaving, reader) = Presence::new().unwrap();
        let life = Life::new(reader.into());
        life.check().unwrap();
        leaving.leave();
        assert!(life.check().unwrap_err().contains("goodbye"));
        drop(leaving);
        assert!(life.check().unwrap_err().contains("goodbye"), "every later put as well");
        assert!(!life.is_dead());

        let (dying, reader) = Presence::new().unwrap();
        let life = Life::new(reader.into());
        life.check().unwrap();
        assert!(!life.is_dead());
        drop(dying);
        assert!(life.check().unwrap_err().contains("died"));
        assert!(life.is_dead());
    }
}
