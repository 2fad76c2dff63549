//! The client, and the host that is a client of its own server.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::admission::Terms;
use super::connection::{Address, Connection};
use super::listen::{has, listen_all, listen_for};
use super::protocol::{
    INIT_KEY, KEY_PREFIX, MAX_KEY_BYTES, MAX_KEYS, MAX_MESSAGE_BYTES, MAX_VALUE_BYTES, Message, Query,
};
use super::server::TcpStoreServer;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::secret;
use crate::store::{Store, get_timed_out, store_error, wait_timed_out};
use crate::{ConnectionLimits, JobSecret};

/// How often the host polls for the last ranks to join.
const JOIN_POLL: Duration = Duration::from_millis(10);
/// How often a client polls for a missing value or queue entry.
const QUEUE_POLL: Duration = Duration::from_millis(1);

/// A [`Store`] on a server over TCP: one of this library, or PyTorch's `TCPStore`.
///
/// Threads may share it; those that wait do not hold the others up, as each takes a connection of
/// its own. A change of the store has reached the server when the call returns.
///
/// Every call ends: a waiting call within the timeout that it is given, any other within the
/// store's. A server that has stopped answering is also waited for that long.
#[derive(Debug)]
pub struct TcpStore {
    // Before the server, so that its connections are gone when the server ends.
    pool: Mutex<Vec<Connection>>,
    address: Address,
    timeout: Duration,
    server: Option<Host>,
}

/// The server, and how long it stays for the others when this store is dropped.
#[derive(Debug)]
struct Host {
    server: Option<TcpStoreServer>,
    linger: Duration,
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.finish(self.linger);
        }
    }
}

/// How to open a [`TcpStore`].
#[derive(Debug, Clone)]
pub struct TcpStoreOptions {
    /// How long to try to connect, as the server may start later; also the time that the server may
    /// take to answer.
    pub timeout: Duration,
    /// The job's secret. Server and client prove it before anything else, so a host admits none of
    /// PyTorch's clients. Without a secret any server is accepted, also PyTorch's, and any process
    /// that reaches a host's port can read and write all keys.
    pub secret: Option<JobSecret>,
    /// The name of the run: where there is a secret, server and clients must have the same.
    pub run: String,
    /// How long a host's server, which ends with the store, then waits for the other clients to
    /// leave.
    pub linger: Duration,
    /// The resources of a host's clients.
    pub limits: ConnectionLimits,
}

impl TcpStoreOptions {
    /// Without a secret, a name and a linger, regardless of the environment.
    pub fn new(timeout: Duration) -> TcpStoreOptions {
        let (secret, run) = (None, String::new());
        TcpStoreOptions { timeout, secret, run, linger: Duration::ZERO, limits: ConnectionLimits::default() }
    }

    /// With the secret that the environment has, if any ([`JobSecret::from_env`]).
    ///
    /// # Errors
    /// Where the environment's secret is none.
    pub fn from_env(timeout: Duration) -> Result<TcpStoreOptions> {
        Ok(TcpStoreOptions { secret: JobSecret::from_env()?, ..TcpStoreOptions::new(timeout) })
    }

    fn address(&self, host: &str, port: u16) -> Result<Address> {
        let client = u32::from_le_bytes(secret::random()?);
        Ok(Address { host: host.to_owned(), port, terms: self.terms(), client })
    }

    fn terms(&self) -> Terms {
        Terms { secret: self.secret.clone(), run: self.run.clone() }
    }
}

impl TcpStore {
    /// Connects to the server at `host` and `port`, with [`TcpStoreOptions::from_env`].
    ///
    /// # Errors
    /// As of [`TcpStore::connect_with`], and where the environment's secret is none.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<TcpStore> {
        TcpStore::connect_with(host, port, &TcpStoreOptions::from_env(timeout)?)
    }

    /// Connects to the server at `host` and `port`.
    ///
    /// # Errors
    /// Where no server answers in time; at once where only one side has a secret, or the secrets
    /// differ.
    pub fn connect_with(host: &str, port: u16, options: &TcpStoreOptions) -> Result<TcpStore> {
        TcpStore::new(options.address(host, port)?, options.timeout, None)
    }

    /// Starts a server at `port` of this host (0 takes a free one; see [`TcpStore::port`]) and
    /// connects to it, with [`TcpStoreOptions::from_env`]. The server ends with the store; `linger`
    /// is how long it then waits for the other clients to leave.
    ///
    /// # Errors
    /// Where the port is taken, or the environment's secret is none.
    pub fn host(port: u16, timeout: Duration, linger: Duration) -> Result<TcpStore> {
        TcpStore::host_with(port, &TcpStoreOptions { linger, ..TcpStoreOptions::from_env(timeout)? })
    }

    /// Starts a server at `port` of this host and connects to it.
    ///
    /// # Errors
    /// Where the port is taken.
    pub fn host_with(port: u16, options: &TcpStoreOptions) -> Result<TcpStore> {
        TcpStore::host_on(listen_all(port)?, options)
    }

    /// Like [`TcpStore::host_with`], on a socket that listens already.
    pub(crate) fn host_on(listener: TcpListener, options: &TcpStoreOptions) -> Result<TcpStore> {
        TcpStore::serve(vec![listener], options)
    }

    /// Like [`TcpStore::host_with`] for clients that connect to `host`: a loopback address is
    /// listened at alone.
    pub(crate) fn host_at(host: &str, port: u16, options: &TcpStoreOptions) -> Result<TcpStore> {
        TcpStore::serve(listen_for(host, port)?, options)
    }

    fn serve(listeners: Vec<TcpListener>, options: &TcpStoreOptions) -> Result<TcpStore> {
        let server = TcpStoreServer::start(listeners, options.terms(), &options.limits)?;
        let address = server.address();
        let host = match address.ip() {
            ip if !ip.is_unspecified() => ip,
            // A host that disables IPv6 has IPv6 sockets, which take IPv4 clients, and no address.
            ip if ip.is_ipv6() && has(Ipv6Addr::LOCALHOST.into()) => Ipv6Addr::LOCALHOST.into(),
            _ => Ipv4Addr::LOCALHOST.into(),
        };
        let server = Host { server: Some(server), linger: options.linger };
        TcpStore::new(options.address(&host.to_string(), address.port())?, options.timeout, Some(server))
    }

    fn new(address: Address, timeout: Duration, server: Option<Host>) -> Result<TcpStore> {
        let connection = Connection::open(&address, epoxide_base::deadline(timeout), timeout)?;
        Ok(TcpStore { pool: Mutex::new(vec![connection]), address, timeout, server })
    }

    /// Like [`TcpStore::connect_with`], but tries for `tries`. Trying ends with an error once
    /// `stop` returns true. `stop` gets the reason of a long delay once.
    pub(crate) fn connect_unless(
        host: &str,
        port: u16,
        options: &TcpStoreOptions,
        tries: Duration,
        stop: impl FnMut(Option<&str>) -> bool,
    ) -> Result<TcpStore> {
        let address = options.address(host, port)?;
        let connection = Connection::open_unless(&address, epoxide_base::deadline(tries), tries, stop)?;
        Ok(TcpStore { pool: Mutex::new(vec![connection]), address, timeout: options.timeout, server: None })
    }

    /// How long the server stays for the other clients when this store is dropped, where it is this
    /// store's own.
    pub(crate) fn set_linger(&mut self, linger: Duration) {
        if let Some(host) = &mut self.server {
            host.linger = linger;
        }
    }

    /// How long the server may take to answer from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The server's port.
    pub fn port(&self) -> u16 {
        self.address.port
    }

    /// Counts this client as arrived, as PyTorch's clients with a world size do. Returns the number
    /// of arrived clients.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) where the server does not answer in time.
    pub fn join(&self) -> Result<u64> {
        let joined = self.call("join", INIT_KEY, self.timeout, |connection, deadline| {
            let message = Message::query(Query::Add).string(INIT_KEY.as_bytes()).number(1);
            connection.send(&message, deadline)?;
            connection.number(deadline)
        })?;
        Ok(u64::try_from(joined).unwrap_or_default())
    }

    /// Waits until `size` clients have joined, this one among them if it has.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) where they do not join in time.
    pub fn wait_for_workers(&self, size: u32, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            let value = self.call("wait", INIT_KEY, self.timeout, |connection, deadline| {
                let message = Message::query(Query::Get).string(INIT_KEY.as_bytes());
                connection.send(&message, deadline)?;
                connection.string(deadline)
            })?;
            let joined = String::from_utf8_lossy(&value).parse::<u32>().unwrap_or_default();
            if joined >= size {
                return Ok(());
            }
            let Some(left) = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else {
                let reason = format!("{joined} of {size} clients joined within {timeout:?}");
                return Err(store_error("wait", INIT_KEY, reason));
            };
            std::thread::sleep(JOIN_POLL.min(left));
        }
    }

    /// The keys that have values, in no order. PyTorch 2.15's server supports this request; older
    /// ones may close the connection instead.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) where the server does not answer in time.
    pub fn list_keys(&self) -> Result<Vec<String>> {
        self.call("list_keys", "", self.timeout, |connection, deadline| {
            connection.send(&Message::query(Query::ListKeys), deadline)?;
            let mut keys = Vec::new();
            for _ in 0..connection.number(deadline)? {
                let key = connection.string(deadline)?;
                if let Some(key) = key.strip_prefix(KEY_PREFIX.as_bytes()) {
                    keys.push(String::from_utf8_lossy(key).into_owned());
                }
            }
            Ok(keys)
        })
    }

    /// Returns once `size` clients have called it with this `key`, which serves once. PyTorch
    /// 2.15's server supports this request; older ones may close the connection instead.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) where they do not call it in time.
    pub fn barrier(&self, key: &str, size: u32, timeout: Duration) -> Result<()> {
        check_key("barrier", key)?;
        let message = Message::query(Query::Barrier).key(key).number(size.into());
        let passed = self.call("barrier", key, self.timeout, |connection, _| {
            connection.wait(&message, timeout, self.timeout)
        })?;
        match passed {
            true => Ok(()),
            false => Err(store_error(
                "barrier",
                key,
                format!("{size} ranks did not come within {timeout:?}; some may be late, or have died"),
            )),
        }
    }

    /// Does one operation on a connection of its own. The deadline is that of what does not wait.
    fn call<T>(
        &self,
        operation: &'static str,
        key: &str,
        timeout: Duration,
        exchange: impl FnOnce(&mut Connection, Instant) -> io::Result<T>,
    ) -> Result<T> {
        let deadline = epoxide_base::deadline(timeout);
        let idle = lock(&self.pool).pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => Connection::open_again(&self.address, deadline, timeout)?,
        };
        match exchange(&mut connection, deadline) {
            Ok(value) => {
                lock(&self.pool).push(connection);
                Ok(value)
            }
            // The connection is in the middle of an exchange, so it is closed.
            Err(error) => Err(store_error(operation, key, self.explain(&error, timeout))),
        }
    }

    fn explain(&self, error: &io::Error, timeout: Duration) -> String {
        let server = format!("the store server at {}", self.address);
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                format!(
                    "{server} did not answer within {timeout:?}; its process may be stopped or its host down"
                )
            }
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => format!(
                "{server} closed the connection; its process has ended, or it refused the request, and its log says why (as an \
                 add to a key that holds bytes, or more than ConnectionLimits of the process that serves it allows)"
            ),
            ErrorKind::InvalidData => format!("{server} does not speak the protocol: {error}"),
            _ => format!("{server}: {error}"),
        }
    }

    /// Sends requests that have no answer, and waits until the server has taken them.
    fn send_unanswered(&self, operation: &'static str, key: &str, message: Message) -> Result<()> {
        self.call(operation, key, self.timeout, |connection, deadline| {
            let nonce = connection.nonce();
            connection.send(&message.then(Query::Ping).word(nonce), deadline)?;
            connection.expect_nonce(nonce, deadline)
        })
    }

    /// Waits for all of `keys`. False when the time is over.
    fn wait_for(&self, operation: &'static str, keys: &[&str], timeout: Duration) -> Result<bool> {
        let message = Message::query(Query::Wait).keys(keys);
        self.call(operation, keys.first().unwrap_or(&""), self.timeout, |connection, _| {
            let ready = connection.wait(&message, timeout, self.timeout)?;
            if ready {
                // An entry of a queue wakes one client. The server wakes the next one for it.
                connection.cancel_wait(epoxide_base::deadline(self.timeout))?;
            }
            Ok(ready)
        })
    }

    /// The value of `key` if it has one.
    fn look(&self, operation: &'static str, key: &str) -> Result<Option<Vec<u8>>> {
        let (ready, value) = self.call(operation, key, self.timeout, |connection, deadline| {
            // In one packet, which the server handles in one step: no other client can delete the
            // key in between.
            let message = Message::query(Query::Check).keys(&[key]).then(Query::Get).key(key);
            connection.send(&message, deadline)?;
            Ok((connection.check(deadline)?, connection.string(deadline)?))
        })?;
        if !ready || !value.is_empty() {
            return Ok(ready.then_some(value));
        }
        // The value is empty, or the key has a queue alone. Replacing a random value by itself
        // changes nothing. The answer is what the key holds, or that random value if it holds
        // nothing.
        let absent = secret::random::<16>()?;
        let value = self.compare_set(key, &absent, &absent)?;
        Ok((value != absent).then_some(value))
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_entry("set", key, value)?;
        self.send_unanswered("set", key, Message::query(Query::Set).key(key).string(value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_key("get", key)?;
        let start = Instant::now();
        let mut pause = Duration::ZERO;
        loop {
            if let Some(value) = self.look("get", key)? {
                return Ok(value);
            }
            // A key with a queue and no value passes at once; do not poll without a pause.
            std::thread::sleep(pause.min(timeout.saturating_sub(start.elapsed())));
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() || !self.wait_for("get", &[key], left)? {
                return Err(get_timed_out(key, timeout));
            }
            pause = QUEUE_POLL;
        }
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        check_key("add", key)?;
        self.call("add", key, self.timeout, |connection, deadline| {
            connection.send(&Message::query(Query::Add).key(key).number(delta), deadline)?;
            connection.number(deadline)
        })
    }

    fn check(&self, key: &str) -> Result<bool> {
        self.check_all(&[key])
    }

    fn delete(&self, key: &str) -> Result<bool> {
        check_key("delete", key)?;
        self.call("delete", key, self.timeout, |connection, deadline| {
            connection.send(&Message::query(Query::DeleteKey).key(key), deadline)?;
            Ok(connection.number(deadline)? > 0)
        })
    }

    fn check_all(&self, keys: &[&str]) -> Result<bool> {
        check_keys("check", keys)?;
        self.call("check", keys.first().unwrap_or(&""), self.timeout, |connection, deadline| {
            connection.send(&Message::query(Query::Check).keys(keys), deadline)?;
            connection.check(deadline)
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        check_keys("wait", keys)?;
        if self.check_all(keys)? || (!timeout.is_zero() && self.wait_for("wait", keys, timeout)?) {
            return Ok(());
        }
        for key in keys {
            if !self.check(key)? {
                return Err(wait_timed_out("wait", key, timeout));
            }
        }
        Ok(())
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        check_entry("compare_set", key, desired)?;
        check_entry("compare_set", key, expected)?;
        self.call("compare_set", key, self.timeout, |connection, deadline| {
            let message = Message::query(Query::CompareSet).key(key).string(expected).string(desired);
            connection.send(&message, deadline)?;
            connection.string(deadline)
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        check_entry("append", key, value)?;
        self.send_unanswered("append", key, Message::query(Query::Append).key(key).string(value))
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        self.wait(keys, timeout)?;
        let first = keys.first().unwrap_or(&"");
        let mut values: Vec<_> = self.call("multi_get", first, self.timeout, |connection, deadline| {
            connection.send(&Message::query(Query::MultiGet).keys(keys), deadline)?;
            keys.iter().map(|_| connection.string(deadline)).collect()
        })?;
        // An empty answer may mean that the key was deleted since, or has a queue alone.
        for (key, value) in keys.iter().zip(&mut values).filter(|(_, value)| value.is_empty()) {
            *value = self.get(key, timeout.saturating_sub(start.elapsed()))?;
        }
        Ok(values)
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        let keys: Vec<&str> = entries.iter().map(|(key, _)| *key).collect();
        check_keys("multi_set", &keys)?;
        entries.iter().try_for_each(|(key, value)| check_entry("multi_set", key, value))?;
        let message = Message::query(Query::MultiSet).count(entries.len());
        let message = entries.iter().fold(message, |message, (key, value)| message.key(key).string(value));
        check_message("multi_set", &keys, &message)?;
        self.send_unanswered("multi_set", keys.first().unwrap_or(&""), message)
    }

    /// How many keys have values. The server counts PyTorch's count of arrivals, `init/`, among
    /// them.
    fn num_keys(&self) -> Result<u64> {
        self.call("num_keys", "", self.timeout, |connection, deadline| {
            connection.send(&Message::query(Query::NumKeys), deadline)?;
            connection.unsigned(deadline)
        })
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        check_entry("queue_push", key, value)?;
        self.send_unanswered("queue_push", key, Message::query(Query::QueuePush).key(key).string(value))
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        check_key("queue_pop", key)?;
        let start = Instant::now();
        let pop = Message::query(Query::QueuePop).key(key);
        let wait = Message::query(Query::Wait).keys(&[key]);
        loop {
            let value = self.call("queue_pop", key, self.timeout, |connection, deadline| {
                if let Some(value) = connection.pop(&pop, deadline)? {
                    return Ok(Some(value));
                }
                let left = timeout.saturating_sub(start.elapsed());
                if left.is_zero() {
                    return Ok(None);
                }
                // An entry may also be there after a wait in vain: the server woke another client.
                connection.wait(&wait, left, self.timeout)?;
                let deadline = epoxide_base::deadline(self.timeout);
                let value = connection.pop(&pop, deadline)?;
                // PyTorch's server keeps a client that has waited for a queue on its list, and
                // would wake it at the wrong time.
                connection.cancel_wait(deadline)?;
                Ok(value)
            })?;
            // Woken, but another was faster: once more.
            if value.is_some() || start.elapsed() >= timeout {
                return Ok(value);
            }
            // A key with a value and no queue passes at once; do not poll without a pause.
            std::thread::sleep(QUEUE_POLL.min(timeout.saturating_sub(start.elapsed())));
        }
    }

    fn queue_len(&self, key: &str) -> Result<u64> {
        check_key("queue_len", key)?;
        self.call("queue_len", key, self.timeout, |connection, deadline| {
            connection.send(&Message::query(Query::QueueLen).key(key), deadline)?;
            connection.unsigned(deadline)
        })
    }
}

fn check_key(operation: &'static str, key: &str) -> Result<()> {
    let (length, most) = ((key.len() + KEY_PREFIX.len()) as u64, MAX_KEY_BYTES);
    if length > most {
        let start: String = key.chars().take(40).collect();
        let reason = format!("the key takes {length} bytes, at most {most} are allowed; shorten it");
        return Err(store_error(operation, &format!("{start}..."), reason));
    }
    Ok(())
}

fn check_keys(operation: &'static str, keys: &[&str]) -> Result<()> {
    if keys.len() as u64 > MAX_KEYS {
        let rule = format!("{operation} takes at most {MAX_KEYS} keys; call it several times");
        return Err(Error::argument("keys", keys.len(), rule));
    }
    keys.iter().try_for_each(|key| check_key(operation, key))
}

fn check_entry(operation: &'static str, key: &str, value: &[u8]) -> Result<()> {
    check_key(operation, key)?;
    if value.len() as u64 > MAX_VALUE_BYTES {
        let reason = format!(
            "the value has {} bytes, at most {MAX_VALUE_BYTES} are allowed; the store is for small data, split it",
            value.len()
        );
        return Err(store_error(operation, key, reason));
    }
    Ok(())
}

fn check_message(operation: &'static str, keys: &[&str], message: &Message) -> Result<()> {
    if message.0.len() > MAX_MESSAGE_BYTES {
        let reason = format!(
            "the request has {} bytes, at most {MAX_MESSAGE_BYTES} are allowed; call it several times",
            message.0.len()
        );
        return Err(store_error(operation, keys.first().unwrap_or(&""), reason));
    }
    Ok(())
}
