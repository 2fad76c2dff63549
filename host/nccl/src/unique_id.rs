//! Identity of a communicator before it exists.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::ffi::{Code, Id};
use super::library::Library;
use crate::error::{Error, Result};
use crate::foreign::escaped;
use epoxide_group::{Collectives, ProcessGroup, Store};

/// Identity of a communicator for its ranks (`ncclUniqueId`). One rank makes it and all ranks get
/// it; it is good for one communicator.
///
/// It holds the address of rank 0, and grants the right to join: share it like a secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; UniqueId::BYTES]);

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

impl UniqueId {
    /// How long it is.
    pub const BYTES: usize = 128;

    /// A new one, of this process.
    ///
    /// # Errors
    /// [`Error::Nccl`], such as where NCCL finds no network interface.
    pub fn new(library: &Library) -> Result<UniqueId> {
        let mut id = Id([0; UniqueId::BYTES]);
        // SAFETY: the out pointer is valid.
        let code = unsafe { (library.functions.ncclGetUniqueId)(&mut id) };
        if code != Code::SUCCESS {
            return Err(library.error("ncclGetUniqueId", code));
        }
        Ok(UniqueId(id.0))
    }

    /// The one of these bytes, as another rank's [`UniqueId::bytes`] gave them.
    pub fn from_bytes(bytes: [u8; UniqueId::BYTES]) -> UniqueId {
        UniqueId(bytes)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8; UniqueId::BYTES] {
        &self.0
    }

    /// The one that rank 0 makes, over `store`. `name` is of one communicator alone: another of the
    /// same store takes another name.
    ///
    /// # Errors
    /// [`Error::Store`] if rank 0 does not publish it within `timeout`; on all ranks, the error
    /// that kept rank 0 from making one.
    pub fn over_store(
        library: &Arc<Library>,
        store: &dyn Store,
        name: &str,
        rank: u32,
        timeout: Duration,
    ) -> Result<UniqueId> {
        let key = format!("{name}/nccl_unique_id");
        if rank == 0 {
            let made = UniqueId::new(library);
            store.set(&key, &Message::encode(&made))?;
            return made;
        }
        Message::decode(&store.get(&key, timeout)?)
    }

    /// The one that rank 0 makes, over `group`. Collective.
    ///
    /// # Errors
    /// Errors of the group; on all ranks, the error that kept rank 0 from making one.
    pub fn over_group(library: &Arc<Library>, group: &dyn ProcessGroup) -> Result<UniqueId> {
        if group.rank() == 0 {
            let made = UniqueId::new(library);
            group.broadcast_object(0, &Message::encode(&made))?;
            return made;
        }
        Message::decode(&group.broadcast_object(0, &Vec::new())?)
    }

    pub(super) fn raw(&self) -> Id {
        Id(self.0)
    }
}

/// Message of rank 0 to the others: the bytes, or its error.
struct Message;

impl Message {
    const MADE: u8 = 1;
    const FAILED: u8 = 0;

    fn encode(made: &Result<UniqueId>) -> Vec<u8> {
        match made {
            Ok(id) => [&[Message::MADE][..], &id.0].concat(),
            Err(error) => [&[Message::FAILED][..], error.to_string().as_bytes()].concat(),
        }
    }

    fn decode(message: &[u8]) -> Result<UniqueId> {
        let reason = match message.split_first() {
            Some((&Message::MADE, bytes)) if bytes.len() == UniqueId::BYTES => {
                let mut id = [0; UniqueId::BYTES];
                id.copy_from_slice(bytes);
                return Ok(UniqueId(id));
            }
            Some((&Message::FAILED, reason)) => escaped(reason),
            _ => format!("{} bytes came that are no unique id", message.len()),
        };
        Err(Error::os("ncclGetUniqueId on rank 0", reason))
    }
}
