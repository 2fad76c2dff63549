//! One connection: non-blocking reads and writes.
//!
//! Where the job has a secret, each header and each payload is followed by its signature. A header
//! is used only after its signature has been checked, and a frame is returned only after both.

use std::ffi::c_int;
use std::io::IoSlice;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, ioctl};
use rustix::net::sockopt::socket_domain;
use rustix::net::{AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags};

use super::frame::{HEADER, Header};
use crate::error::{Error, Result};
use crate::secret::{Forged, Initiator, Keys, REPLY, Signer, TAG};

/// Most memory reserved for a payload before its bytes arrive.
const RESERVE: u64 = 64 << 20;

/// The request of `ioctl` for the bytes that wait in a socket's queue.
const TIOCOUTQ: Opcode = 0x5411;

#[derive(Debug)]
pub(crate) struct Conn {
    pub socket: OwnedFd,
    /// The rank at the other end.
    pub peer: u32,
    /// Not yet taken by the kernel: bytes from `sent` on.
    out: Vec<u8>,
    sent: usize,
    /// Until it is answered, only the hello is sent.
    challenge: Option<Initiator>,
    /// The received part of the answer.
    reply: Vec<u8>,
    /// Frames that wait for the answer.
    held: Vec<(Header, Vec<u8>)>,
    /// Where the job has a secret: signs what is sent.
    signer: Option<Signer>,
    frames: Frames,
    /// True once its goodbye has been received.
    pub farewell: bool,
    received_any: bool,
}

/// Why a connection ended.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The connection broke.
    Connection(String),
    /// The answering process does not belong to the job.
    Stranger(String),
}

/// The frame that has not been received in full.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    /// Where the job has a secret: checks received messages.
    signer: Option<Signer>,
    header: Vec<u8>,
    payload: Option<(Header, Vec<u8>)>,
}

impl Conn {
    /// A connection that this rank opened to `peer`, before anything was received.
    pub(crate) fn opened(socket: OwnedFd, peer: u32) -> Conn {
        Conn {
            socket,
            peer,
            out: Vec::new(),
            sent: 0,
            challenge: None,
            reply: Vec::new(),
            held: Vec::new(),
            signer: None,
            frames: Frames::default(),
            farewell: false,
            received_any: false,
        }
    }

    /// Holds back all further frames until the other side has answered the challenge in the hello.
    pub(crate) fn challenge(&mut self, initiator: Initiator) {
        self.challenge = Some(initiator);
    }

    /// A connection that `peer` opened and sent its hello on; `keys` sign its frames where the job
    /// has a secret.
    pub(crate) fn accepted(socket: OwnedFd, peer: u32, keys: Option<Keys>) -> Conn {
        let mut conn = Conn { received_any: true, ..Conn::opened(socket, peer) };
        if let Some(keys) = keys {
            conn.sign(keys);
        }
        conn
    }

    /// Signs and checks all frames from now on.
    fn sign(&mut self, keys: Keys) {
        self.signer = Some(keys.send);
        self.frames.signer = Some(keys.receive);
    }

    /// True when everything sent has been taken by the kernel.
    pub(crate) fn flushed(&self) -> bool {
        self.out.is_empty() && self.challenge.is_none()
    }

    /// Bytes that the kernel has taken and the peer's host has not acknowledged. Bytes of a Unix
    /// socket are the peer's at once.
    pub(crate) fn unacknowledged(&self) -> usize {
        if socket_domain(&self.socket) == Ok(AddressFamily::UNIX) {
            return 0;
        }
        // SAFETY: `TIOCOUTQ` of a socket stores one `c_int`, as tcp(7) says, for which `Getter` has
        // room.
        let bytes = unsafe { ioctl(&self.socket, Getter::<TIOCOUTQ, c_int>::new()) };
        bytes.ok().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0)
    }

    /// True when bytes wait for the kernel to take them.
    pub(crate) fn blocked(&self) -> bool {
        !self.out.is_empty()
    }

    /// True once anything but the answer to a challenge was received.
    pub(crate) fn received_any(&self) -> bool {
        self.received_any
    }

    /// Sends a frame. Bytes that the kernel does not take now wait for [`Conn::flush`], and all
    /// bytes for the answer to a challenge.
    pub(crate) fn send(&mut self, header: &Header, payload: &[u8]) -> Result<(), Errno> {
        if self.challenge.is_some() {
            self.held.push((*header, payload.to_vec()));
            return Ok(());
        }
        let (head, tail) = self.around(header, payload);
        let mut taken = 0;
        if !self.blocked() {
            let pieces = [IoSlice::new(&head), IoSlice::new(payload), IoSlice::new(&tail)];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            taken =
                match rustix::net::sendmsg(&self.socket, &pieces, &mut SendAncillaryBuffer::default(), flags)
                {
                    Ok(taken) => taken,
                    Err(Errno::AGAIN | Errno::INTR) => 0,
                    Err(error) => return Err(error),
                };
        }
        for piece in [&head, payload, &tail] {
            self.out.extend_from_slice(&piece[taken.min(piece.len())..]);
            taken = taken.saturating_sub(piece.len());
        }
        Ok(())
    }

    /// The bytes before and behind a payload: header and signatures.
    fn around(&mut self, header: &Header, payload: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let mut head = header.encode().to_vec();
        let Some(signer) = &mut self.signer else { return (head, Vec::new()) };
        head.extend_from_slice(&signer.sign(&header.encode()));
        let tail = if payload.is_empty() { Vec::new() } else { signer.sign(payload).to_vec() };
        (head, tail)
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

    /// Reads all available bytes. True while the stream is open.
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
                    self.received_any |= !rest.is_empty();
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

    /// Takes the answer to a challenge, if one is due, and releases frames that waited for it.
    /// Returns the bytes behind it.
    fn take_reply<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], Broken> {
        if self.challenge.is_none() {
            return Ok(bytes);
        }
        let (reply, rest) = bytes.split_at(bytes.len().min(REPLY - self.reply.len()));
        self.reply.extend_from_slice(reply);
        if let Some(whole) = self.reply.first_chunk()
            && let Some(initiator) = self.challenge.take()
        {
            let (proof, keys) =
                initiator.answer(whole).map_err(|wrong| Broken::Stranger(wrong.to_string()))?;
            self.out.extend_from_slice(&proof);
            self.sign(keys);
            for (header, payload) in std::mem::take(&mut self.held) {
                let (head, tail) = self.around(&header, &payload);
                [head, payload, tail].iter().for_each(|piece| self.out.extend_from_slice(piece));
            }
            self.flush().map_err(|error| Broken::Connection(error.to_string()))?;
        }
        Ok(rest)
    }
}

impl Frames {
    /// Parses received bytes, and appends the frames that they complete.
    pub(crate) fn parse(&mut self, mut bytes: &[u8], frames: &mut Vec<(Header, Vec<u8>)>) -> Result<()> {
        let tag = if self.signer.is_some() { TAG } else { 0 };
        loop {
            if let Some((header, payload)) = &mut self.payload {
                let whole = if header.len == 0 { 0 } else { header.len + tag as u64 };
                let missing = whole - payload.len() as u64;
                let take = usize::try_from(missing).unwrap_or(usize::MAX).min(bytes.len());
                payload.extend_from_slice(&bytes[..take]);
                bytes = &bytes[take..];
                if (payload.len() as u64) < whole {
                    return Ok(());
                }
                if let (Some(signer), 1..) = (&mut self.signer, whole) {
                    check(signer, payload)?;
                }
                frames.extend(self.payload.take());
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let take = (HEADER + tag - self.header.len()).min(bytes.len());
            self.header.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.header.len() < HEADER + tag {
                return Ok(());
            }
            if let Some(signer) = &mut self.signer {
                check(signer, &mut self.header)?;
            }
            let Ok(whole) = <&[u8; HEADER]>::try_from(self.header.as_slice()) else { return Ok(()) };
            let header = Header::decode(whole)?;
            self.header.clear();
            let reserve = header.len.min(RESERVE) as usize;
            self.payload = Some((header, Vec::with_capacity(reserve + tag)));
        }
    }
}

/// Checks the signature at the end of `bytes`, and takes it off.
fn check(signer: &mut Signer, bytes: &mut Vec<u8>) -> Result<()> {
    let forged = |forged: Forged| Error::os("recv", forged);
    let (message, tag) = bytes.split_last_chunk::<TAG>().ok_or(Forged).map_err(forged)?;
    signer.check(message, tag).map_err(forged)?;
    bytes.truncate(bytes.len() - TAG);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::mesh::frame::Kind;

    /// The bytes of a rank's frames on its connection.
    fn sent(keys: Keys, payloads: &[&[u8]]) -> Vec<u8> {
        let (socket, _) = UnixStream::pair().unwrap();
        let mut conn = Conn::accepted(socket.into(), 1, Some(keys));
        let mut bytes = Vec::new();
        for payload in payloads {
            let header = Header::control(Kind::Message, 7, payload.len());
            let (head, tail) = conn.around(&header, payload);
            bytes.extend([&head, *payload, &tail].concat());
        }
        bytes
    }

    /// Returns the frames that another rank reads from these bytes, in pieces, and whether it took
    /// all bytes.
    fn taken(keys: Keys, bytes: &[u8], piece: usize) -> (Vec<Vec<u8>>, bool) {
        let mut reader = Frames { signer: Some(keys.receive), ..Frames::default() };
        let mut frames = Vec::new();
        let all = bytes.chunks(piece).all(|piece| reader.parse(piece, &mut frames).is_ok());
        (frames.into_iter().map(|(_, payload)| payload).collect(), all)
    }

    #[test]
    fn nothing_of_a_frame_that_was_changed_is_handed_on() {
        let payloads: [&[u8]; 3] = [b"first", b"", b"third"];
        for piece in [1, 7, 1000] {
            let (ours, theirs) = Keys::pair();
            let (frames, all) = taken(theirs, &sent(ours, &payloads), piece);
            assert!(all && frames == payloads, "{frames:?}");
        }
        let length = sent(Keys::pair().0, &payloads).len();
        for at in 0..length {
            let (ours, theirs) = Keys::pair();
            let mut bytes = sent(ours, &payloads);
            bytes[at] ^= 1;
            let (frames, all) = taken(theirs, &bytes, 1000);
            let (one, two) = (HEADER + 5 + 2 * TAG, 2 * HEADER + 5 + 3 * TAG);
            let kept = usize::from(at >= one) + usize::from(at >= two);
            assert_eq!((frames.as_slice(), all), (&payloads.map(<[u8]>::to_vec)[..kept], false), "byte {at}");
        }
        // Left out, repeated, and of another connection.
        let one = HEADER + 5 + 2 * TAG;
        let (ours, theirs) = Keys::pair();
        assert!(!taken(theirs, &sent(ours, &payloads)[one..], 1000).1);
        let (ours, theirs) = Keys::pair();
        let bytes = sent(ours, &payloads);
        assert!(!taken(theirs, &[&bytes[..one], &bytes].concat(), 1000).1);
        assert!(taken(Keys::pair().1, &bytes, 1000).0.is_empty());
    }
}
