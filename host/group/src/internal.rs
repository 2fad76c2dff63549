//! Items for the other crates of this repository; users do not need them. These items are no public
//! interface: any version may change them.

pub mod fuzz;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

pub use crate::call::{Call, CallResult, Operation, P2p};
pub use crate::env::{
    LAUNCH, MASTER_ADDR, MASTER_PORT, MAX_RANKS, MAX_RANKS_PER_NODE, RESTART_COUNT, environment,
    too_many_ranks,
};
pub use crate::mesh::{host_id, interface_address, loopback};
pub use crate::pending::{ACCEPT_SLICE, Accepted, BACKLOG, PendingConnections};
pub use crate::port::HeldPort;
pub use crate::recorder::{Entry, Recorder, State};
pub use crate::secret::{
    Initiator, Keys, OPENING, PROOF, Purpose, Responder, Signer, TAG, WrongSecret, random,
};
pub use crate::tcp::TcpStoreServer;
pub use crate::threads::panic_text;
pub use crate::work::Pending;

use crate::error::Result;
use crate::{FileStore, HashStore, JobSecret, Member, MeshGroup, ReduceOp, TcpStore, TcpStoreOptions, Work};

/// All operations of reductions.
pub const REDUCE_OPS: [ReduceOp; 8] = ReduceOp::ALL;

/// The last operations of a group, oldest first.
pub fn flight_record(group: &MeshGroup) -> Vec<Entry> {
    group.flight_record()
}

/// [`Member::detect`] in an environment of the caller's.
///
/// # Errors
/// The same.
pub fn member_of(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Member>> {
    Member::from_variables(variable)
}

/// Has every wait for the store fail with this reason, from now on.
pub fn poison(store: &HashStore, reason: &str) {
    store.poison(reason);
}

/// Has every wait for the store fail with this reason, in all processes.
///
/// # Errors
/// Errors of the file system.
pub fn poison_files(store: &FileStore, reason: &str) -> Result<()> {
    store.poison(reason)
}

/// Gives a process to be started the secret.
pub fn give_secret(secret: &JobSecret, command: &mut std::process::Command) {
    secret.give_to(command);
}

/// The handle of an operation under way, whose outcome `convert` turns into the result.
pub fn work_of<T>(
    operation: Arc<dyn Pending>,
    convert: impl FnOnce(CallResult) -> Result<T> + Send + 'static,
) -> Work<T> {
    Work::of(operation).map(convert)
}

/// [`TcpStore::host_with`] on a socket that listens already.
///
/// # Errors
/// Errors of the operating system.
pub fn host_on(listener: TcpListener, options: &TcpStoreOptions) -> Result<TcpStore> {
    TcpStore::host_on(listener, options)
}

/// [`TcpStore::host_with`] for clients that connect to `host`: a loopback address is listened at
/// alone.
///
/// # Errors
/// Where the port is taken.
pub fn host_at(host: &str, port: u16, options: &TcpStoreOptions) -> Result<TcpStore> {
    TcpStore::host_at(host, port, options)
}

/// [`TcpStore::connect_with`], but tries for `tries`. Trying ends with an error once `stop` returns
/// true. `stop` gets the reason of a long delay once.
///
/// # Errors
/// Where the server is not reached in `tries`, or `stop` returns true.
pub fn connect_unless(
    host: &str,
    port: u16,
    options: &TcpStoreOptions,
    tries: Duration,
    stop: impl FnMut(Option<&str>) -> bool,
) -> Result<TcpStore> {
    TcpStore::connect_unless(host, port, options, tries, stop)
}

/// How long the server of a store stays for the other clients when the store is dropped.
pub fn set_linger(store: &mut TcpStore, linger: Duration) {
    store.set_linger(linger);
}
