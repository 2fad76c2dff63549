//! One connection: bytes in and out without waiting.

use std::io::IoSlice;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};

use super::frame::{HEADER, Header};
use crate::error::{Error, Result};
use crate::group::secret::{Initiator, REPLY};

/// Largest piece of a payload that is reserved before its bytes come.
const RESERVE: u64 = 64 << 20;

#[derive(Debug)]
pub(crate) struct Conn {
    pub socket: OwnedFd,
    /// The rank at the other end.
    pub peer: u32,
    /// Not yet taken by the kernel: bytes from `sent` on.
    out: Vec<u8>,
    sent: usize,
    /// Until it is answered nothing but the hello goes out.
    challenge: Option<Initiator>,
    /// What has come of the answer.
    reply: Vec<u8>,
    /// Frames that wait for the answer.
    held: Vec<u8>,
    frames: Frames,
    /// True once its goodbye came.
    pub farewell: bool,
    heard: bool,
}

/// Why nothing more comes.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The connection broke.
    Connection(String),
    /// Who answers does not belong to the job.
    Stranger(String),
}

/// The frame that has not come in full.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    header: Vec<u8>,
    payload: Option<(Header, Vec<u8>)>,
}

impl Conn {
    /// A connection that this rank opened to `peer`, which has not said anything.
    pub(crate) fn opened(socket: OwnedFd, peer: u32) -> Conn {
        Conn {
            socket,
            peer,
            out: Vec::new(),
            sent: 0,
            challenge: None,
            reply: Vec::new(),
            held: Vec::new(),
            frames: Frames::default(),
            farewell: false,
            heard: false,
        }
    }

    /// Holds back what is sent from now on until the other side has answered, as the hello that was sent asks it to.
    pub(crate) fn challenge(&mut self, initiator: Initiator) {
        self.challenge = Some(initiator);
    }

    /// A connection that `peer` opened, and has said its hello on.
    pub(crate) fn accepted(socket: OwnedFd, peer: u32) -> Conn {
        Conn { heard: true, ..Conn::opened(socket, peer) }
    }

    /// True when everything sent has been taken by the kernel.
    pub(crate) fn flushed(&self) -> bool {
        self.out.is_empty() && self.challenge.is_none()
    }

    /// True when bytes wait for the kernel to take them.
    pub(crate) fn blocked(&self) -> bool {
        !self.out.is_empty()
    }

    /// True when anything came but the answer to a challenge.
    pub(crate) fn heard(&self) -> bool {
        self.heard
    }

    /// Sends a frame; what the kernel does not take now waits for [`Conn::flush`], and all of it for the answer to a challenge.
    pub(crate) fn send(&mut self, header: &Header, payload: &[u8]) -> Result<(), Errno> {
        let header = header.encode();
        if self.challenge.is_some() {
            self.held.extend_from_slice(&header);
            self.held.extend_from_slice(payload);
            return Ok(());
        }
        let mut taken = 0;
        if !self.blocked() {
            let pieces = [IoSlice::new(&header), IoSlice::new(payload)];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            taken =
                match rustix::net::sendmsg(&self.socket, &pieces, &mut SendAncillaryBuffer::default(), flags)
                {
                    Ok(taken) => taken,
                    Err(Errno::AGAIN | Errno::INTR) => 0,
                    Err(error) => return Err(error),
                };
        }
        if taken < HEADER {
            self.out.extend_from_slice(&header[taken..]);
        }
        self.out.extend_from_slice(&payload[taken.saturating_sub(HEADER)..]);
        Ok(())
    }

    /// Hands the kernel as much as it takes.
    pub(crate) fn flush(&mut self) -> Result<(), Errno> {
        while self.sent < self.out.len() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &self.out[self.sent..], flags) {
                Ok(taken) => self.sent += taken,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        self.sent = 0;
        if self.out.capacity() > 1 << 20 {
            self.out = Vec::new();
        }
        Ok(())
    }

    /// Reads what there is. True while the stream is open.
    pub(crate) fn read(
        &mut self,
        scratch: &mut [u8],
        frames: &mut Vec<(Header, Vec<u8>)>,
    ) -> Result<bool, Broken> {
        let broken = |error: Error| Broken::Connection(error.to_string());
        loop {
            match rustix::net::recv(&self.socket, &mut *scratch, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Ok(false),
                Ok((_, count)) => {
                    let rest = self.take_reply(&scratch[..count])?;
                    self.heard |= !rest.is_empty();
                    self.frames.parse(rest, frames).map_err(broken)?;
                    if count < scratch.len() {
                        return Ok(true);
                    }
                }
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Broken::Connection(error.to_string())),
            }
        }
    }

    /// Takes the answer to a challenge, if one is due, and lets go what waited for it. What is behind it.
    fn take_reply<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], Broken> {
        if self.challenge.is_none() {
            return Ok(bytes);
        }
        let (reply, rest) = bytes.split_at(bytes.len().min(REPLY - self.reply.len()));
        self.reply.extend_from_slice(reply);
        if let Some(whole) = self.reply.first_chunk()
            && let Some(initiator) = self.challenge.take()
        {
            let proof = initiator.answer(whole).map_err(|wrong| Broken::Stranger(wrong.to_string()))?;
            self.out.extend_from_slice(&proof);
            self.out.append(&mut self.held);
            self.flush().map_err(|error| Broken::Connection(error.to_string()))?;
        }
        Ok(rest)
    }
}

impl Frames {
    /// Takes bytes as they come, and gives the frames that they complete.
    pub(crate) fn parse(&mut self, mut bytes: &[u8], frames: &mut Vec<(Header, Vec<u8>)>) -> Result<()> {
        loop {
            if let Some((header, payload)) = &mut self.payload {
                let missing = header.len - payload.len() as u64;
                let take = usize::try_from(missing).unwrap_or(usize::MAX).min(bytes.len());
                payload.extend_from_slice(&bytes[..take]);
                bytes = &bytes[take..];
                if (payload.len() as u64) < header.len {
                    return Ok(());
                }
                frames.extend(self.payload.take());
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let take = (HEADER - self.header.len()).min(bytes.len());
            self.header.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            let Ok(whole) = <&[u8; HEADER]>::try_from(self.header.as_slice()) else { return Ok(()) };
            let header = Header::decode(whole)?;
            self.header.clear();
            self.payload = Some((header, Vec::with_capacity(header.len.min(RESERVE) as usize)));
        }
    }
}
