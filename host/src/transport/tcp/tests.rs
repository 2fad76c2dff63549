//! One rank, with the test in the place of its peer.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide_gpu::layout::{PutRequest, QueueWords, RING_ENTRIES};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::net::sockopt;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::acceptor::{HELLO, TOKEN, hello, queue_hint, read_answer};
use super::frame::{FAREWELL, GOODBYE, MAX_REASON, Part, header, part_header, signed, word64};
use super::receiver::Incoming;
use super::*;
use crate::driver::virt::{VirtConfig, VirtualGpu};
use crate::driver::{Memory, MemoryKind};
use crate::group::ConnectionLimits;
use crate::group::internal::{Initiator, Keys, OPENING, PROOF, Purpose, Responder, Signer};
use crate::group::run_threads;
use crate::group::{HashStore, JobSecret, MeshGroup, MeshOptions, ProcessGroup};
use crate::transport::greeting::{PHASE, VERSION};
use crate::transport::links::Receiving;
use crate::transport::proxy::Proxy;
use crate::transport::put::Put;
use crate::transport::put::PutQueue;
use crate::transport::setup::{Writer, deadline};
use crate::transport::{TransportKind, TransportOptions};

const BYTES: u64 = 1 << 20;
/// The one connection of a queue that has no other.
const FIRST: Place = Place { queue: 0, peer: 1, connection: 0 };
/// The patience of threads that never poll, and of those that do at first.
const BLOCKS: Patience = Patience { polls: false };
const POLLS: Patience = Patience { polls: true };
/// Longer than any expected event takes on a busy machine.
const SOON: Duration = Duration::from_secs(120);

/// A deadline that is meant to pass.
const STALLS: Duration = Duration::from_millis(300);
/// One that is not.
const NEVER: Duration = Duration::from_secs(600);

/// Rank 0 of 2 by itself, with a test in the place of rank 1.
fn alone(timeout: Duration, test: impl Fn(&Setup<'_>) + Sync) {
    let run = |rank, group: Arc<dyn crate::group::ProcessGroup>| {
        if rank == 0 {
            let device = VirtualGpu::new(VirtConfig::default());
            let memory = Memory::alloc(&device, BYTES, MemoryKind::SharedHost, "wire")?.into();
            let options =
                TransportOptions { timeout, queues_per_peer: 1, ..TransportOptions::new(TransportKind::Tcp) };
            let (group, memory, options) = (&*group, &memory, &options);
            test(&Setup { options, memory, group, peers: &[1], timeout: SOON, writer: Writer::Proxies });
        }
        Ok(())
    };
    run_threads(2, SOON, run).unwrap();
}

fn read_to_end(socket: &mut TcpStream) -> String {
    let mut text = Vec::new();
    // A reset ends it as well.
    let _ = socket.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn strangers_are_refused_with_the_reason_and_do_not_disturb() {
    alone(SOON, |setup| {
        let mut acceptor = Acceptor::open(setup, 1).unwrap();
        let address = acceptor.address;
        let token = acceptor.token;
        let good = hello(VERSION, PHASE, &token, FIRST, BYTES);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let refused = |bytes: &[u8]| {
                    let mut socket = TcpStream::connect(address).unwrap();
                    socket.write_all(bytes).unwrap();
                    read_to_end(&mut socket)
                };
                let silent = TcpStream::connect(address).unwrap();
                assert!(refused(&[0xee; 64]).contains("no hello of epoxide's"));
                assert!(refused(b"GET / HTTP/1.1\r\n\r\n").contains("no hello of epoxide's"));
                let old = refused(&hello(9, PHASE, &token, FIRST, BYTES)[..12]);
                assert!(
                    old.contains(&format!("protocol version 9; this rank has version {VERSION}")),
                    "{old}"
                );
                let token = [7; TOKEN];
                assert!(refused(&hello(VERSION, PHASE, &token, FIRST, BYTES)).contains("wrong token"));
                drop(TcpStream::connect(address).unwrap());
                let mut friend = TcpStream::connect(address).unwrap();
                // In two parts.
                friend.write_all(&good[..20]).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                friend.write_all(&good[20..]).unwrap();
                read_answer(&mut friend, deadline(SOON)).unwrap();
                drop(silent);
            });
            let accepted = acceptor.accept(setup, 1, deadline(SOON)).unwrap();
            assert!(accepted.keys().eq(&[FIRST]));
        });
    });
}

#[test]
fn an_answer_that_comes_byte_by_byte_does_not_stretch_the_deadline() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            peer.write_all(&(MAX_REASON as u32).to_le_bytes()).unwrap();
            for _ in 0..MAX_REASON {
                std::thread::sleep(STALLS / 10);
                // Fails once the rank has closed the connection.
                if peer.write_all(b"x").is_err() {
                    break;
                }
            }
        });
        let error = read_answer(&mut socket, deadline(STALLS)).unwrap_err();
        assert!(error.starts_with("rejected, without a reason: "), "{error}");
        drop(socket);
    });
}

/// Rank 0 of 2 of a job with a secret, which is `alone` but for that.
fn alone_with_a_secret(test: impl Fn(&Setup<'_>)) {
    let secret = Some(JobSecret::new(&"s".repeat(32)).unwrap());
    let store = Arc::new(HashStore::new());
    let options = MeshOptions { secret, ..MeshOptions::default() };
    let group = MeshGroup::new(store, 0, 2, "alone", options).unwrap();
    let device = VirtualGpu::new(VirtConfig::default());
    let memory = Memory::alloc(&device, BYTES, MemoryKind::SharedHost, "wire").unwrap().into();
    let options = TransportOptions { queues_per_peer: 1, ..TransportOptions::new(TransportKind::Tcp) };
    test(&Setup {
        options: &options,
        memory: &memory,
        group: &group,
        peers: &[1],
        timeout: SOON,
        writer: Writer::Proxies,
    });
}

#[test]
fn a_token_without_the_secret_is_rejected() {
    alone_with_a_secret(|setup| {
        let (mut first, mut second) = (Acceptor::open(setup, 1).unwrap(), Acceptor::open(setup, 1).unwrap());
        let claims = |to: &Acceptor| super::acceptor::claims(setup, FIRST, 0, to.address);
        let call = |acceptor: &Acceptor, secret: &JobSecret, claims: Vec<u8>| {
            let initiator = Initiator::new(secret, Purpose::Transport, claims).unwrap();
            let proof = initiator.proof(&acceptor.token);
            let hello = hello(VERSION, PHASE, &acceptor.token, FIRST, BYTES);
            (initiator.opening(), [&hello, initiator.opening().as_slice(), &proof].concat(), initiator)
        };
        let secret = first.secret.clone().unwrap();
        let other = JobSecret::new(&"o".repeat(32)).unwrap();
        let (_, pending, _) = call(&first, &other, claims(&first));
        let (opening, good, initiator) = call(&first, &secret, claims(&first));
        // Bytes overheard at one listener, replayed at another: with its own token in place of the
        // first's.
        let mut replayed = good.clone();
        replayed[16..32].copy_from_slice(&second.token);
        let connect = |acceptor: &Acceptor, bytes: &[u8]| {
            let mut socket = TcpStream::connect(acceptor.address).unwrap();
            socket.write_all(bytes).unwrap();
            socket
        };
        let silent = connect(&first, &hello(VERSION, PHASE, &first.token, FIRST, BYTES));
        let refused = |mut socket: TcpStream| {
            let said = read_to_end(&mut socket);
            assert!(said.contains("does not know this job's secret"), "{said}");
        };
        let (pending, replayed) = (connect(&first, &pending), connect(&second, &replayed));
        let mut friend = connect(&first, &good);
        assert!(first.accept(setup, 1, deadline(SOON)).unwrap().keys().eq(&[FIRST]));
        refused(pending);
        // A replay opens nothing: the acceptor still admits the rank itself.
        let (_, own, _) = call(&second, &secret, claims(&second));
        let address = second.address;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                refused(replayed);
                let mut friend = TcpStream::connect(address).unwrap();
                friend.write_all(&own).unwrap();
                read_answer(&mut friend, deadline(SOON)).unwrap();
            });
            assert!(second.accept(setup, 1, deadline(SOON)).unwrap().keys().eq(&[FIRST]));
        });
        drop(silent);
        // The called rank proves the secret, too.
        read_answer(&mut friend, deadline(SOON)).unwrap();
        let mut proof = [0; PROOF];
        friend.read_exact(&mut proof).unwrap();
        initiator.check(&first.token, &proof).unwrap();
        assert_ne!(proof, initiator.proof(&first.token));
        assert_ne!(opening, proof);
    });
}

#[test]
fn an_impostor_without_the_secret_gets_no_frames() {
    alone_with_a_secret(|setup| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("{:032x}@{}", 7, listener.local_addr().unwrap());
        let mut acceptor = Acceptor::open(setup, 1).unwrap();
        let dialed = dial(&mut acceptor, setup, &address, &[FIRST], FIRST, deadline(SOON)).unwrap();
        let (mut impostor, _) = listener.accept().unwrap();
        let mut hello = [0; HELLO + OPENING + PROOF];
        impostor.read_exact(&mut hello).unwrap();
        // Let in, with the proof that it got.
        impostor.write_all(&[&[0; 4], &hello[HELLO + OPENING..]].concat()).unwrap();
        let error = dialed.answered(deadline(SOON)).unwrap_err();
        assert!(error.contains("does not know this job's secret"), "{error}");
    });
}

/// All ranks connect at once, and a rank that connects does not wait for one that does not accept.
#[test]
fn more_connections_than_a_listener_queues_come_about() {
    const CONNECTIONS: u32 = 4;
    run_threads(2, SOON, |rank, group| {
        let device = VirtualGpu::new(VirtConfig::default());
        let memory = Memory::alloc(&device, 4096, MemoryKind::SharedHost, "wire")?.into();
        let options = TransportOptions {
            queues_per_peer: 1,
            connections_per_queue: Some(CONNECTIONS),
            ..TransportOptions::new(TransportKind::Tcp)
        };
        let peers = [1 - rank];
        let setup = Setup {
            options: &options,
            memory: &memory,
            group: &*group,
            peers: &peers,
            timeout: SOON,
            writer: Writer::Proxies,
        };
        let mut acceptor = Acceptor::open(&setup, CONNECTIONS)?;
        // From now on two may wait.
        rustix::net::listen(&acceptor.listener, 1).unwrap();
        let offer = Offer { address: acceptor.address(), ..Offer::new(&setup) };
        let all = greeting::meet(&setup, Ok(serde_json::to_string(&offer).unwrap()))?;
        let (links, receivers) = make_links(&setup, &mut acceptor, &offer, &all)?;
        assert_eq!((links.len(), receivers.readers.len()), (1, CONNECTIONS as usize));
        group.barrier(SOON)
    })
    .unwrap();
}

#[test]
fn an_error_names_the_limit_of_a_listener_where_it_is_exceeded() {
    let hint = queue_hint(129, "128\n");
    assert!(hint.contains("129 connections") && hint.contains("raise net.core.somaxconn"), "{hint}");
    for (expected, limit) in [(128, "128\n"), (4096, ""), (1, "no number")] {
        assert_eq!(queue_hint(expected, limit), "");
    }
}

#[test]
fn ranks_of_one_host_listen_at_loopback() {
    alone(SOON, |setup| {
        assert!(setup.group.shares_host());
        assert!(Acceptor::open(setup, 1).unwrap().address.ip().is_loopback());
    });
}

#[test]
fn a_rank_listens_at_the_interface_of_its_group() {
    let options = MeshOptions { interface: Some("127.0.0.2".into()), ..MeshOptions::default() };
    let group: Arc<dyn ProcessGroup> =
        Arc::new(MeshGroup::new(Arc::new(HashStore::new()), 0, 1, "alone", options).unwrap());
    let device = VirtualGpu::new(VirtConfig::default());
    let memory = Memory::alloc(&device, 4096, MemoryKind::SharedHost, "wire").unwrap().into();
    let options = TransportOptions::new(TransportKind::Tcp);
    for group in [group.clone(), group.split(0).unwrap()] {
        let setup = Setup {
            options: &options,
            memory: &memory,
            group: &*group,
            peers: &[],
            timeout: SOON,
            writer: Writer::Proxies,
        };
        assert_eq!(Acceptor::open(&setup, 1).unwrap().address.ip().to_string(), "127.0.0.2");
    }
}

#[test]
fn the_oldest_silent_stranger_makes_room_even_after_rejections() {
    alone(SOON, |setup| {
        let limits = ConnectionLimits { max_unauthenticated: 3, ..ConnectionLimits::default() };
        let options = TransportOptions { limits, ..setup.options.clone() };
        let setup = Setup { options: &options, ..*setup };
        let mut acceptor = Acceptor::open(&setup, 1).unwrap();
        let (address, good) = (acceptor.address, hello(VERSION, PHASE, &acceptor.token, FIRST, BYTES));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let connect = || TcpStream::connect(address).unwrap();
                let mut all: Vec<_> = (0..4).map(|_| connect()).collect();
                all[0].write_all(&[0xee; HELLO]).unwrap();
                assert!(read_to_end(&mut all[0]).contains("no hello"));
                all.push(connect());
                std::thread::sleep(Duration::from_millis(200));
                // One too many: the first of 1, 2, 3 and 4 is closed.
                let mut friend = connect();
                assert_eq!(read_to_end(&mut all[1]), "");
                friend.write_all(&good).unwrap();
                read_answer(&mut friend, deadline(SOON)).unwrap();
                for silent in &all[2..] {
                    silent.set_nonblocking(true).unwrap();
                    let error = (&*silent).read(&mut [0]).unwrap_err();
                    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                }
            });
            let accepted = acceptor.accept(&setup, 1, deadline(SOON)).unwrap();
            assert!(accepted.keys().eq(&[FIRST]));
        });
    });
}

/// Makes `silent_connections_do_not_use_up_the_descriptors` the process that is attacked.
const ATTACKED: &str = "EPOXIDE_TEST_ATTACKED";

#[test]
fn silent_connections_do_not_use_up_the_descriptors() {
    if std::env::var_os(ATTACKED).is_some() {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
        return alone(SOON * 3, |setup| {
            let mut acceptor = Acceptor::open(setup, 1).unwrap();
            let (address, good) = (acceptor.address, hello(VERSION, PHASE, &acceptor.token, FIRST, BYTES));
            eprintln!("acceptor at {address}");
            std::io::stdin().read_exact(&mut [0]).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let mut friend = TcpStream::connect(address).unwrap();
                    friend.write_all(&good).unwrap();
                    read_answer(&mut friend, deadline(SOON)).unwrap();
                });
                assert_eq!(acceptor.accept(setup, 1, deadline(SOON)).unwrap().len(), 1);
            });
        });
    }
    let path = "transport::tcp::tests::silent_connections_do_not_use_up_the_descriptors";
    let mut attacked = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", path, "--nocapture"])
        .env(ATTACKED, "1")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(attacked.stderr.take().unwrap()).lines().map(|line| line.unwrap());
    let address = lines.find_map(|line| line.strip_prefix("acceptor at ").map(str::to_owned)).unwrap();
    let silent: Vec<_> =
        (0..300).map(|_| TcpStream::connect_timeout(&address.parse().unwrap(), SOON)).collect();
    attacked.stdin.take().unwrap().write_all(b"g").unwrap();
    let rest: Vec<String> = lines.collect();
    assert!(attacked.wait().unwrap().success(), "{rest:?}");
    drop(silent);
}

/// Makes `ranks_without_descriptors_for_their_connections_fail_at_once` the process without them.
const LIMITED: &str = "EPOXIDE_TEST_LIMITED";

#[test]
fn ranks_without_descriptors_for_their_connections_fail_at_once() {
    if std::env::var_os(LIMITED).is_none() {
        let path = "transport::tcp::tests::ranks_without_descriptors_for_their_connections_fail_at_once";
        let mut limited = std::process::Command::new(std::env::current_exe().unwrap());
        let limited = limited.args(["--exact", path, "--nocapture"]).env(LIMITED, "1").output().unwrap();
        assert!(limited.status.success(), "{}", String::from_utf8_lossy(&limited.stderr));
        return;
    }
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
    let errors = run_threads(3, SOON, |rank, group| {
        let device = VirtualGpu::new(VirtConfig::default());
        let memory = Memory::alloc(&device, 4096, MemoryKind::MappedHost, "wire")?.into();
        let options =
            TransportOptions { connections_per_queue: Some(4), ..TransportOptions::new(TransportKind::Tcp) };
        // Rank 0 has two peers, the others have one.
        let peers: &[u32] = if rank == 0 { &[1, 2] } else { &[0] };
        let (options, memory, group) = (&options, &memory, &*group);
        let setup = Setup { options, memory, group, peers, timeout: SOON, writer: Writer::Proxies };
        let error = connect(&setup).unwrap_err().to_string();
        group.barrier(SOON)?;
        Ok(error)
    })
    .unwrap();
    for (rank, error) in errors.iter().enumerate() {
        // 8 queues to each peer, and 2 sockets for each connection: 128 of rank 0, and 64 of each
        // other one.
        let needs = format!("{} needs 256 more descriptors", if rank == 0 { "this rank" } else { "rank 0" });
        for part in [&needs, "of 256", "ulimit -n", "queues_per_peer", "connections_per_queue"] {
            assert!(error.contains(part), "rank {rank}: {part:?} is not in {error}");
        }
    }
    // A process without any descriptor left, at either end of a connection.
    alone_with_a_secret(|setup| {
        let mut acceptor = Acceptor::open(setup, 1).unwrap();
        let address = acceptor.address();
        let files: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        let dialed = dial(&mut acceptor, setup, &address, &[FIRST], FIRST, deadline(SOON)).map(drop);
        let accepted = acceptor.accept(setup, 1, deadline(Duration::ZERO)).map(drop);
        drop(files);
        for error in [dialed, accepted].map(|outcome| outcome.unwrap_err().to_string()) {
            assert!(error.contains("ulimit -n") && error.contains("queues_per_peer"), "{error}");
            assert!(!error.contains("reachable") && !error.contains("network"), "{error}");
        }
    });
}

#[test]
fn ranks_of_the_group_with_a_wrong_hello_end_the_setup_on_both_sides() {
    alone(SOON, |setup| {
        for (phase, queue, memory, expected) in [
            (0, 0, BYTES, "phase 0; this rank connects phase 1"),
            (PHASE, 0, 8, "wire memory of 8 bytes; this rank has 1048576"),
            (PHASE, 5, BYTES, "connection 0 of queue 5 of rank 1 is not expected"),
        ] {
            let mut acceptor = Acceptor::open(setup, 1).unwrap();
            let mut socket = TcpStream::connect(acceptor.address).unwrap();
            socket
                .write_all(&hello(VERSION, phase, &acceptor.token, Place { queue, ..FIRST }, memory))
                .unwrap();
            let error = acceptor.accept(setup, 1, deadline(SOON)).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("with rank 1"), "{error}");
            let answer = read_answer(&mut socket, deadline(SOON)).unwrap_err();
            assert!(
                answer.starts_with("rejected; the listener there answers \"") && answer.contains(expected),
                "{answer}"
            );
        }
        let mut acceptor = Acceptor::open(setup, 1).unwrap();
        let error = acceptor.accept(setup, 1, deadline(Duration::from_millis(50))).unwrap_err().to_string();
        assert!(error.contains("with rank 1") && error.contains("did not connect within"), "{error}");
    });
}

/// A connected pair: the other end of rank 1, and this rank's.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (theirs, listener.accept().unwrap().0)
}

fn failure(receivers: &Receivers) -> Option<Error> {
    receivers.failures().into_iter().next().map(|(_, error)| error)
}

fn wait_for_failure(receivers: &Receivers) -> String {
    let end = deadline(SOON);
    loop {
        if let Some(error) = failure(receivers) {
            return error.to_string();
        }
        assert!(Instant::now() < end, "no failure");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The connection of rank 1, as an acceptor admits it where the job has no secret.
fn incoming(socket: TcpStream) -> BTreeMap<Place, Incoming> {
    BTreeMap::from([(FIRST, Incoming { socket, signer: None })])
}

fn start(setup: &Setup<'_>, incoming: BTreeMap<Place, Incoming>) -> Receivers {
    Receivers::start(setup, incoming, |_| BLOCKS).unwrap()
}

/// A queue over connections that sign nothing.
fn queue_over(setup: &Setup<'_>, sockets: Vec<TcpStream>) -> TcpQueue {
    let sockets = sockets.into_iter().map(|socket| (socket, None)).collect();
    TcpQueue::new(setup, setup.ends(1), sockets, BLOCKS).unwrap()
}

fn signed_put(put: &Put, signer: &mut Signer) -> Vec<u8> {
    signed(&header(put, put.bytes, 0), Some(signer))
}

/// The keys of the two sides of a connection.
fn keys() -> (Keys, Keys) {
    let secret = JobSecret::generate().unwrap();
    let initiator = Initiator::new(&secret, Purpose::Transport, Vec::new()).unwrap();
    let (responder, reply) = Responder::new(&secret, Purpose::Transport, b"", &initiator.opening()).unwrap();
    let (proof, ours) = initiator.answer(&reply).unwrap();
    (ours, responder.check(&proof).unwrap())
}

#[test]
fn a_put_that_the_rank_has_not_signed_is_refused() {
    let first = Put { from: 0, to: 64, bytes: 8, counter: 8, value: 1 };
    let second = Put { to: 72, counter: 16, ..first };
    alone(SOON, |setup| {
        for attack in ["unsigned", "changed", "repeated", "left out", "another's"] {
            let (mut theirs, ours) = pair();
            let (sender, receiver) = keys();
            let (mut signer, mut other) = (sender.send, keys().0.send);
            let ours = Incoming { socket: ours, signer: Some(receiver.receive) };
            let receivers = start(setup, BTreeMap::from([(FIRST, ours)]));
            let good = signed_put(&first, &mut signer);
            let mut next = signed_put(&second, &mut signer);
            match attack {
                "unsigned" => next = [header(&second, second.bytes, 0).as_slice(), &[0; 32]].concat(),
                "changed" => next[8] ^= 8,
                "repeated" => next.clone_from(&good),
                "left out" => next = signed_put(&second, &mut signer),
                _ => next = signed_put(&second, &mut other),
            }
            let (before, after) = (good, [next, vec![9; 8]].concat());
            theirs.write_all(&[before, vec![3; 8], after].concat()).unwrap();
            let error = wait_for_failure(&receivers);
            assert!(error.contains("not signed with this connection's key"), "{attack}: {error}");
        }
        let mut arrived = [0u8; 80];
        // SAFETY: within the memory of a virtual GPU; its receivers have ended.
        unsafe { std::ptr::copy_nonoverlapping(setup.memory.ptr().0 as *const u8, arrived.as_mut_ptr(), 80) };
        let words = [8, 16, 64, 72].map(|at| word64(&arrived, at));
        assert_eq!(words, [1, 0, 0x0303_0303_0303_0303, 0], "the first put, and nothing of the second");
    });
}

#[test]
fn frames_out_of_range_are_refused_and_the_sender_is_told() {
    alone(SOON, |setup| {
        let good = Put { from: 0, to: 64, bytes: 8, counter: 8, value: 1 };
        for put in [
            Put { bytes: BYTES, ..good },
            Put { bytes: u64::MAX - 1, ..good },
            Put { to: BYTES - 7, ..good },
            Put { counter: 9, ..good },
            Put { counter: BYTES, bytes: 0, ..good },
        ] {
            let (mut theirs, ours) = pair();
            let receivers = start(setup, incoming(ours));
            theirs.write_all(&header(&good, good.bytes, 0)).unwrap();
            theirs.write_all(&[3; 8]).unwrap();
            theirs.write_all(&header(&put, put.bytes, 0)).unwrap();
            let error = wait_for_failure(&receivers);
            assert!(error.contains("with rank 1: refused a frame of it"), "{error}");
            let mut queue = queue_over(setup, vec![theirs]);
            // A put may be sent before the answer is read.
            let told = queue.put_with_counter(&[good]).and_then(|()| queue.put_with_counter(&[good]));
            let told = told.unwrap_err().to_string();
            assert!(told.contains("it refused a frame, and says \"") && told.contains("must be"), "{told}");
        }
        let mut arrived = [0u8; 80];
        // SAFETY: within the memory of a virtual GPU; its receivers have ended.
        unsafe { std::ptr::copy_nonoverlapping(setup.memory.ptr().0 as *const u8, arrived.as_mut_ptr(), 80) };
        assert_eq!(
            (word64(&arrived, 8), word64(&arrived, 64), word64(&arrived, 72)),
            (1, 0x0303_0303_0303_0303, 0)
        );
    });
}

#[test]
fn a_peer_that_dies_is_named_on_both_sides() {
    alone(SOON, |setup| {
        // In a frame, and between frames.
        for bytes in [&[9; 20][..], &[]] {
            let (mut theirs, ours) = pair();
            let receivers = start(setup, incoming(ours));
            theirs.write_all(bytes).unwrap();
            drop(theirs);
            let error = wait_for_failure(&receivers);
            assert!(
                error.contains("receive, rank 0 with rank 1: the connection ended without a goodbye"),
                "{error}"
            );
        }
        let (theirs, ours) = pair();
        let mut queue = queue_over(setup, vec![ours]);
        let put = Put { bytes: 1024, ..Put::default() };
        queue.put_with_counter(&[put]).unwrap();
        drop(theirs);
        let end = deadline(SOON);
        let error = loop {
            match queue.put_with_counter(&[put]) {
                Ok(()) => assert!(Instant::now() < end, "no error"),
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains("put, rank 0 with rank 1: the connection broke"), "{error}");
        assert_eq!(queue.put_with_counter(&[put]).unwrap_err().to_string(), error, "it stays");
    });
}

/// A rank closes once it has the last put that it needs. Its farewell may arrive while this rank is
/// still in the call that sent that put.
#[test]
fn puts_that_were_sent_when_the_farewell_came_have_left() {
    alone(SOON, |setup| {
        let (mut theirs, ours) = pair();
        let arrived = ours.try_clone().unwrap();
        let mut queue = queue_over(setup, vec![ours]);
        theirs.write_all(&FAREWELL.to_le_bytes()).unwrap();
        let end = deadline(SOON);
        while !arrived.peek(&mut [0; 4]).is_ok_and(|count| count == 4) {
            assert!(Instant::now() < end, "the farewell does not come");
        }
        assert!(queue.failure().is_none());
        let put = Put { bytes: 64, ..Put::default() };
        queue.put_with_counter(&[put]).unwrap();
        assert_eq!(queue.completed().unwrap(), 1);
        theirs.set_read_timeout(Some(SOON)).unwrap();
        theirs.read_exact(&mut [0; 40 + 64]).unwrap();
        // `failure` returns the reason at once, and the next put fails with it.
        let known = queue.failure().unwrap().to_string();
        assert!(known.contains("put, rank 0 with rank 1: it said goodbye"), "{known}");
        for _ in 0..2 {
            assert_eq!(queue.put_with_counter(&[put]).unwrap_err().to_string(), known);
        }
    });
}

#[test]
fn a_queue_that_has_failed_ends_at_the_peer_though_it_is_kept() {
    for patience in [BLOCKS, POLLS] {
        alone(SOON, |setup| {
            let (mut queue, theirs) = queue_of_three(setup, patience);
            queue.put_with_counter(&[Put { bytes: 64 << 10, ..Put::default() }]).unwrap();
            let error = queue.put_with_counter(&[Put { counter: BYTES, ..Put::default() }]).unwrap_err();
            for mut socket in theirs {
                socket.set_read_timeout(Some(SOON)).unwrap();
                std::io::copy(&mut socket, &mut std::io::sink()).expect("the connection ends");
            }
            assert_eq!(queue.completed().unwrap_err().to_string(), error.to_string());
        });
    }
}

#[test]
fn failures_are_kept_for_each_peer() {
    alone(SOON, |setup| {
        let ((first, ours), (second, ours_second)) = (pair(), pair());
        let incoming = BTreeMap::from([
            (FIRST, Incoming { socket: ours, signer: None }),
            (Place { peer: 2, ..FIRST }, Incoming { socket: ours_second, signer: None }),
        ]);
        let receivers = start(setup, incoming);
        for (dying, dead) in [(first, &[1][..]), (second, &[1, 2])] {
            drop(dying);
            let end = deadline(SOON);
            while receivers.failures().len() < dead.len() {
                assert!(Instant::now() < end, "{:?}", receivers.failures());
                std::thread::sleep(Duration::from_millis(1));
            }
            for ((peer, error), dead) in receivers.failures().into_iter().zip(dead) {
                assert_eq!(peer, *dead);
                assert!(error.to_string().contains(&format!("rank 0 with rank {peer}")), "{error}");
            }
        }
    });
}

#[test]
fn a_goodbye_is_no_failure_and_a_missing_one_is() {
    alone(SOON, |setup| {
        let (theirs, ours) = pair();
        let receivers = start(setup, incoming(ours));
        let mut queue = queue_over(setup, vec![theirs]);
        queue.put_with_counter(&[Put { counter: 24, value: 5, ..Put::default() }]).unwrap();
        queue.close();
        assert!(queue.put_with_counter(&[]).is_err(), "closed");
        drop(queue);
        let end = deadline(SOON);
        while !receivers.readers[0].1.is_finished() {
            assert!(Instant::now() < end, "the reader goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(failure(&receivers).is_none(), "{:?}", failure(&receivers));
    });
}

#[test]
fn a_stalled_peer_ends_in_the_timeout_or_by_an_interrupt() {
    alone(STALLS, |setup| {
        let big = Put { bytes: BYTES, ..Put::default() };
        let fill = |queue: &mut TcpQueue| loop {
            if let Err(error) = queue.put_with_counter(&[big; 16]) {
                return error.to_string();
            }
        };
        let (_theirs, ours) = pair();
        let mut queue = queue_over(setup, vec![ours]);
        let error = fill(&mut queue);
        assert!(error.contains("rank 1: it took no bytes for 300ms"), "{error}");

        let (_theirs, ours) = pair();
        let mut queue = queue_over(setup, vec![ours]);
        queue.first.timeout = NEVER;
        let interrupt = queue.interrupt();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                interrupt.raise();
            });
            let start = Instant::now();
            let error = fill(&mut queue);
            assert!(error.contains("interrupted"), "{error}");
            assert!(start.elapsed() < NEVER);
        });
    });
}

/// A pair of which either end holds few bytes.
fn narrow_pair() -> (TcpStream, TcpStream) {
    let (theirs, ours) = pair();
    sockopt::set_socket_recv_buffer_size(&theirs, 128 << 10).unwrap();
    sockopt::set_socket_send_buffer_size(&ours, 128 << 10).unwrap();
    ours.set_nodelay(true).unwrap();
    (theirs, ours)
}

/// Reads and discards all bytes, up to 16 KiB a turn. `pause` gets the number of turns so far.
/// Returns the number of bytes.
fn read_slowly(mut socket: TcpStream, pause: impl Fn(u64)) -> u64 {
    let (mut buffer, mut bytes) = ([0; 16 << 10], 0);
    for turns in 1.. {
        // The sender's end shuts down behind an error.
        match socket.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => bytes += count as u64,
        }
        pause(turns);
    }
    bytes
}

#[test]
fn an_interrupt_ends_a_put_that_makes_progress() {
    let put = [Put { bytes: BYTES, ..Put::default() }; 16];
    for patience in [BLOCKS, POLLS] {
        alone(NEVER, |setup| {
            let (theirs, ours) = narrow_pair();
            let mut queue = TcpQueue::new(setup, setup.ends(1), vec![(ours, None)], patience).unwrap();
            let interrupt = queue.interrupt();
            std::thread::scope(|scope| {
                let reader = scope.spawn(move || {
                    read_slowly(theirs, |turns| {
                        if turns == 16 {
                            interrupt.raise();
                        }
                        // Shorter than a thread polls; the sender fills the buffers meanwhile.
                        if turns % 8 == 0 {
                            std::thread::sleep(SPIN / 2);
                        }
                    })
                });
                let outcome = queue.put_with_counter(&put);
                drop(queue);
                let error = outcome.unwrap_err().to_string();
                assert!(error.contains("interrupted"), "{error}");
                assert!(reader.join().unwrap() < 16 * BYTES);
            });
        });
    }
}

/// The link takes longer for a put than its timeout, but takes bytes all the time. A busy machine
/// may stop the reader for longer than the timeout; then the test tries a longer one.
#[test]
fn a_slow_link_does_not_end_in_the_timeout() {
    let put = [Put { bytes: BYTES, ..Put::default() }; 16];
    for patience in [BLOCKS, POLLS] {
        let passes = |timeout: Duration| {
            let outcome = std::sync::Mutex::new(None);
            alone(timeout, |setup| {
                let (theirs, ours) = narrow_pair();
                let mut queue = TcpQueue::new(setup, setup.ends(1), vec![(ours, None)], patience).unwrap();
                std::thread::scope(|scope| {
                    let begin = Instant::now();
                    scope.spawn(move || {
                        read_slowly(theirs, |_| {
                            if begin.elapsed() < 2 * timeout {
                                std::thread::sleep(timeout / 100);
                            }
                        })
                    });
                    let result = queue.put_with_counter(&put);
                    assert!(result.is_err() || begin.elapsed() > timeout, "the link is not slow");
                    *crate::lock::lock(&outcome) = Some(result);
                    drop(queue);
                });
            });
            outcome.into_inner().unwrap().unwrap()
        };
        let tries = [STALLS, 10 * STALLS, 100 * STALLS].map(|timeout| move || passes(timeout));
        let errors: Vec<_> = tries.into_iter().map_while(|attempt| attempt().err()).collect();
        assert!(errors.len() < 3, "{errors:?}");
    }
}

#[test]
fn a_proxy_ends_promptly_though_its_peer_stalls() {
    alone(NEVER, |setup| {
        let (_theirs, ours) = pair();
        let queue = Box::new(queue_over(setup, vec![ours]));
        let link = PeerQueue { peer: 1, index: 0, queue };
        let mut proxy = Proxy::start(setup.memory.device(), link).unwrap();
        let ring = proxy.handle().0;
        for index in 0..RING_ENTRIES {
            let entry = ring + size_of::<QueueWords>() as u64 + index * size_of::<PutRequest>() as u64;
            let mut put = PutRequest::default();
            (put.bytes, put.ticket) = (BYTES, index + 1);
            // SAFETY: an entry of the proxy's ring, in host memory, which the proxy has not
            // reached. A partial read is harmless: all values but the ticket and the bytes are zero
            // before and after.
            unsafe { (entry as *mut PutRequest).write_volatile(put) };
        }
        std::thread::sleep(Duration::from_millis(300));
        assert!(proxy.stats().puts < RING_ENTRIES && proxy.failure().is_none(), "it stalls");
        proxy.stop(Duration::from_millis(100));
        // Ended by the interrupt: a leaked proxy would report that.
        let error = proxy.failure().unwrap().to_string();
        assert!(error.contains("interrupted"), "{error}");
    });
}

/// The other ends of a queue's connections, and the receiving ends of this rank.
fn divided(setup: &Setup<'_>, connections: u32, patience: Patience) -> (Vec<TcpStream>, Receivers) {
    let (theirs, ours): (Vec<_>, Vec<_>) = (0..connections).map(|_| pair()).unzip();
    let place = |(connection, socket)| (Place { connection, ..FIRST }, Incoming { socket, signer: None });
    let incoming = (0..).zip(ours).map(place).collect();
    (theirs, Receivers::start(setup, incoming, |_| patience).unwrap())
}

/// The word of wire memory at an offset, in bytes.
fn wire_word(setup: &Setup<'_>, offset: u64) -> u64 {
    assert!(offset.is_multiple_of(8) && offset < BYTES);
    let at = (setup.memory.ptr().0 + offset) as *mut u64;
    // SAFETY: within the memory of a virtual GPU, whose words receivers may be writing.
    unsafe { std::sync::atomic::AtomicU64::from_ptr(at) }.load(std::sync::atomic::Ordering::Acquire)
}

/// A copy of wire memory.
fn memory(setup: &Setup<'_>) -> Vec<u8> {
    let words: Vec<u64> = (0..BYTES).step_by(8).map(|offset| wire_word(setup, offset)).collect();
    bytemuck::cast_slice(&words).to_vec()
}

/// The counter of the tests below.
const COUNTER: u64 = 8;

fn counter(setup: &Setup<'_>) -> u64 {
    wire_word(setup, COUNTER)
}

fn wait_for_counter(setup: &Setup<'_>, value: u64) {
    let end = deadline(SOON);
    while counter(setup) != value {
        assert!(Instant::now() < end, "the counter does not come to {value}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Random puts over three connections, of parts of random sizes, some of them missing. The streams
/// of the connections arrive in random pieces, one far ahead of another. At any time the memory
/// holds some number of puts, one after the other, and parts of the next one.
#[test]
fn parts_in_any_order_make_puts_in_order() {
    const CONNECTIONS: usize = 3;
    const PUTS: u64 = 40;
    for seed in 0..12 {
        let patience = if seed % 2 == 0 { BLOCKS } else { POLLS };
        alone(SOON, |setup| {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let (mut theirs, receivers) = divided(setup, CONNECTIONS as u32, patience);
            let mut streams = vec![Vec::new(); CONNECTIONS];
            // The memory after each put.
            let mut after = vec![vec![0; BYTES as usize]];
            // The ranges of each put's bytes.
            let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
            for number in 1..=PUTS {
                let parts = random.random_range(0..CONNECTIONS);
                let sizes: Vec<u64> = (0..=parts).map(|_| random.random_range(1..20_000)).collect();
                let start = random.random_range(64..BYTES - sizes.iter().sum::<u64>());
                // Half of all puts overlap.
                let start = if random.random_bool(0.5) { start } else { 64 };
                let put = Put { to: start, counter: COUNTER, value: number, ..Put::default() };
                let (mut to, mut expected) = (start, after[number as usize - 1].clone());
                for (connection, bytes) in sizes.into_iter().enumerate() {
                    let stream = &mut streams[connection];
                    match connection {
                        0 => stream.extend_from_slice(&header(&put, bytes, parts as u64)),
                        _ => stream.extend_from_slice(&part_header(&Part { from: 0, to, bytes, number })),
                    }
                    let fill = (number * 3 + connection as u64) as u8;
                    stream.resize(stream.len() + bytes as usize, fill);
                    expected[to as usize..(to + bytes) as usize].fill(fill);
                    to += bytes;
                }
                expected[COUNTER as usize] = number as u8;
                ranges.push(start as usize..to as usize);
                after.push(expected);
            }
            let mut sent = [0; CONNECTIONS];
            while (0..CONNECTIONS).any(|connection| sent[connection] < streams[connection].len()) {
                let connection = random.random_range(0..CONNECTIONS);
                let rest = &streams[connection][sent[connection]..];
                let piece = &rest[..rest.len().min(random.random_range(1..60_000))];
                theirs[connection].write_all(piece).unwrap();
                sent[connection] += piece.len();
                if random.random_bool(0.3) {
                    std::thread::sleep(Duration::from_micros(random.random_range(0..500)));
                }
                // The counter only grows, and nothing but the next put may have been stored ahead of it.
                let first = counter(setup) as usize;
                let seen = memory(setup);
                let last = counter(setup) as usize;
                let next = ranges.get(last).cloned().unwrap_or_default();
                if first == last {
                    for rest in [0..next.start, next.end..seen.len()] {
                        let equal = seen[rest.clone()] == after[last][rest.clone()];
                        assert!(equal, "seed {seed}: a byte of {rest:?}, put {last}");
                    }
                }
            }
            wait_for_counter(setup, PUTS);
            assert!(memory(setup) == after[PUTS as usize], "seed {seed}");
            assert!(failure(&receivers).is_none(), "{:?}", failure(&receivers));
        });
    }
}

/// A put of 200 bytes with two parts, of which the second connection has those from 100 on.
fn halves(number: u64) -> (Vec<u8>, Vec<u8>) {
    let put = Put { to: 64, counter: COUNTER, value: number, ..Put::default() };
    let part = Part { from: 0, to: 164, bytes: 100, number };
    let fill = vec![number as u8; 100];
    ([&header(&put, 100, 1)[..], &fill].concat(), [&part_header(&part)[..], &fill].concat())
}

#[test]
fn a_connection_that_dies_midway_ends_the_queue_without_the_counter() {
    for (patience, dies) in [(BLOCKS, 0), (BLOCKS, 1), (POLLS, 0), (POLLS, 1)] {
        alone(SOON, |setup| {
            let (mut theirs, receivers) = divided(setup, 2, patience);
            let ((first, second), (next_first, next_second)) = (halves(1), halves(2));
            theirs[0].write_all(&first).unwrap();
            theirs[1].write_all(&second).unwrap();
            wait_for_counter(setup, 1);
            let mut dying = theirs.remove(dies);
            let mut other = theirs.remove(0);
            let (its, rest) = if dies == 0 { (next_first, next_second) } else { (next_second, next_first) };
            dying.write_all(&its[..70]).unwrap();
            drop(dying);
            let _ = other.write_all(&rest);
            let error = wait_for_failure(&receivers);
            assert!(
                error.contains("receive, rank 0 with rank 1: the connection ended without a goodbye"),
                "{error}"
            );
            // The sender reads the reason from the other connection.
            other.set_read_timeout(Some(SOON)).unwrap();
            assert_eq!(read_to_end(&mut other), "");
            drop(receivers);
            assert_eq!(counter(setup), 1, "the put is not complete");
        });
    }
}

#[test]
fn a_part_that_does_not_come_ends_in_the_timeout() {
    alone(STALLS, |setup| {
        let (first, second) = halves(1);
        let (mut theirs, receivers) = divided(setup, 2, BLOCKS);
        theirs[0].write_all(&first).unwrap();
        let error = wait_for_failure(&receivers);
        assert!(error.contains("the part on connection 1 of put 1 did not come within 300ms"), "{error}");
        // A late part changes nothing any more.
        let _ = theirs[1].write_all(&second);
        drop(receivers);
        assert_eq!(counter(setup), 0);

        let (mut theirs, receivers) = divided(setup, 2, POLLS);
        theirs[1].write_all(&halves(3).1).unwrap();
        let error = wait_for_failure(&receivers);
        assert!(error.contains("put 2, ahead of a part did not come within 300ms"), "{error}");
        drop(receivers);
        assert!(memory(setup)[164..264].iter().all(|byte| *byte == 0), "nothing of a put that is to come");
    });
}

/// The part takes longer than the timeout, but bytes of it come all the time. A busy machine may
/// stop the peer for longer than the timeout; then the test tries a longer one.
#[test]
fn a_part_that_comes_slowly_does_not_end_in_the_timeout() {
    for patience in [BLOCKS, POLLS] {
        let passes = |timeout: Duration| {
            let outcome = std::sync::Mutex::new(None);
            alone(timeout, |setup| {
                let (first, second) = halves(1);
                let (mut theirs, receivers) = divided(setup, 2, patience);
                theirs[0].write_all(&first).unwrap();
                for byte in &second {
                    // Fails once the queue has ended.
                    let _ = theirs[1].write_all(&[*byte]);
                    std::thread::sleep(timeout / 50);
                }
                let end = deadline(SOON);
                while failure(&receivers).is_none() && counter(setup) != 1 {
                    assert!(Instant::now() < end, "neither the counter nor a failure");
                    std::thread::sleep(Duration::from_millis(1));
                }
                *crate::lock::lock(&outcome) = failure(&receivers);
            });
            outcome.into_inner().unwrap()
        };
        let tries = [STALLS, 10 * STALLS, 100 * STALLS];
        let errors: Vec<_> = tries.into_iter().map_while(passes).collect();
        assert!(errors.len() < 3, "{errors:?}");
    }
}

#[test]
fn parts_out_of_range_are_refused() {
    alone(SOON, |setup| {
        let part = |to, bytes| part_header(&Part { from: 0, to, bytes, number: 1 }).to_vec();
        let put = Put { to: 64, counter: COUNTER, value: 1, ..Put::default() };
        for (connection, frame, expected) in [
            (1, part(BYTES - 7, 8), "to + bytes must be within"),
            (1, part(64, BYTES), "to + bytes must be within"),
            (1, part(u64::MAX, 2), "to + bytes must be within"),
            (0, header(&put, 8, 2).to_vec(), "its 2 parts must be at most 1"),
            (0, header(&put, 8, u64::MAX).to_vec(), "parts must be at most 1"),
        ] {
            let (mut theirs, receivers) = divided(setup, 2, BLOCKS);
            theirs[connection].write_all(&frame).unwrap();
            let error = wait_for_failure(&receivers);
            assert!(error.contains("refused a frame of it") && error.contains(expected), "{error}");
            let told = read_to_end(&mut theirs[connection]);
            assert!(told.contains(expected), "{told}");
        }
    });
}

#[test]
fn a_part_that_the_rank_has_not_signed_is_refused() {
    alone(SOON, |setup| {
        let (sender, receiver) = keys();
        let ((mut first, ours), (mut second, ours_second)) = (pair(), pair());
        let (other, other_receiver) = keys();
        let incoming = BTreeMap::from([
            (FIRST, Incoming { socket: ours, signer: Some(receiver.receive) }),
            (
                Place { connection: 1, ..FIRST },
                Incoming { socket: ours_second, signer: Some(other_receiver.receive) },
            ),
        ]);
        let receivers = start(setup, incoming);
        let put = Put { to: 64, counter: COUNTER, value: 1, ..Put::default() };
        let (mut signer, mut part_signer) = (sender.send, other.send);
        let head = signed(&header(&put, 8, 1), Some(&mut signer));
        first.write_all(&[head, vec![1; 8]].concat()).unwrap();
        let mut part =
            signed(&part_header(&Part { from: 0, to: 72, bytes: 8, number: 1 }), Some(&mut part_signer));
        part[8] ^= 8;
        second.write_all(&[part, vec![1; 8]].concat()).unwrap();
        let error = wait_for_failure(&receivers);
        assert!(error.contains("not signed with this connection's key"), "{error}");
        drop(receivers);
        assert_eq!(counter(setup), 0);
    });
}

/// A queue over three connections, and their other ends.
fn queue_of_three(setup: &Setup<'_>, patience: Patience) -> (TcpQueue, Vec<TcpStream>) {
    let (theirs, ours): (Vec<_>, Vec<_>) = (0..3).map(|_| pair()).unzip();
    let sockets = ours.into_iter().map(|socket| (socket, None)).collect();
    (TcpQueue::new(setup, setup.ends(1), sockets, patience).unwrap(), theirs)
}

#[test]
fn a_further_connection_that_stalls_or_dies_ends_the_queue() {
    let big = Put { bytes: BYTES, ..Put::default() };
    let outcome = |queue: &mut TcpQueue| {
        let end = deadline(SOON);
        loop {
            assert!(Instant::now() < end, "no error");
            if let Err(error) = queue.put_with_counter(&[big]).and_then(|()| queue.completed().map(drop)) {
                return error.to_string();
            }
        }
    };
    /// Reads and discards all bytes.
    fn drain(mut socket: TcpStream) -> impl FnOnce() {
        move || drop(std::io::copy(&mut socket, &mut std::io::sink()))
    }
    for patience in [BLOCKS, POLLS] {
        for (dies, timeout, expected) in
            [(false, STALLS, "it took no bytes for 300ms"), (true, SOON, "the connection broke")]
        {
            alone(timeout, |setup| {
                let (mut queue, mut theirs) = queue_of_three(setup, patience);
                let last = theirs.pop().unwrap();
                std::thread::scope(|scope| {
                    theirs.drain(..).for_each(|socket| drop(scope.spawn(drain(socket))));
                    let kept = (!dies).then_some(last);
                    let error = outcome(&mut queue);
                    assert!(error.contains("rank 1") && error.contains(expected), "{error}");
                    assert_eq!(queue.completed().unwrap_err().to_string(), error, "it stays");
                    assert!(queue.quiet(SOON).is_err());
                    drop((queue, kept));
                });
            });
        }
        alone(NEVER, |setup| {
            let (mut queue, mut theirs) = queue_of_three(setup, patience);
            let last = theirs.pop().unwrap();
            std::thread::scope(|scope| {
                theirs.drain(..).for_each(|socket| drop(scope.spawn(drain(socket))));
                let start = Instant::now();
                // More than any buffer of a socket holds.
                let big = [big; 60];
                queue.put_with_counter(&big).unwrap();
                assert!(queue.completed().unwrap() < 60, "the parts of the last connection wait");
                let error = queue.quiet(STALLS).unwrap_err().to_string();
                assert!(error.contains("puts did not leave within 300ms"), "{error}");
                // Ends the thread that waits for the network.
                drop(queue);
                assert!(start.elapsed() < SOON);
                drop(last);
            });
        });
    }
}

#[test]
fn a_divided_queue_says_goodbye_on_every_connection() {
    for patience in [BLOCKS, POLLS] {
        alone(SOON, |setup| {
            let (mut queue, theirs) = queue_of_three(setup, patience);
            let put = Put { bytes: BYTES - 64, to: 64, counter: COUNTER, value: 1, ..Put::default() };
            let streams = std::thread::scope(|scope| {
                let read = |mut socket: TcpStream| {
                    scope.spawn(move || {
                        let mut bytes = Vec::new();
                        socket.read_to_end(&mut bytes).unwrap();
                        bytes
                    })
                };
                let readers: Vec<_> = theirs.into_iter().map(read).collect();
                queue.put_with_counter(&[put]).unwrap();
                queue.quiet(SOON).unwrap();
                assert_eq!(queue.completed().unwrap(), 1);
                queue.close();
                readers.into_iter().map(|reader| reader.join().unwrap()).collect::<Vec<_>>()
            });
            let third = (put.bytes.div_ceil(3)).next_multiple_of(64);
            let sizes = [third, third, put.bytes - 2 * third];
            for (connection, (stream, size)) in streams.iter().zip(sizes).enumerate() {
                let header = if connection == 0 { 40 } else { 24 };
                assert_eq!(stream.len() as u64, 2 * header + size, "connection {connection}");
                assert_eq!(word64(stream, 0), size);
                assert_eq!(word64(stream, 8), 64 + connection as u64 * third);
                assert_eq!(word64(stream, stream.len() - header as usize), GOODBYE);
            }
        });
    }
}

#[test]
fn connections_and_polling_follow_the_processors() {
    let offer = |host: &str, processors| Offer {
        address: String::new(),
        connections: None,
        host: host.into(),
        mask: vec![u64::MAX],
        processors,
        descriptors: (0, 0),
        process: 0,
    };
    let plan = |offers: &[Offer], queues, peers| {
        let plan = Plan::new(offers, queues, peers);
        (plan.connections, plan.polls)
    };
    let host = |ranks, processors| vec![offer("here", processors); ranks];
    assert_eq!(plan(&host(2, 32), 1, 1), (4, true), "two ranks of one host, one queue");
    assert_eq!(plan(&host(2, 32), 8, 1), (1, false), "eight queues");
    assert_eq!(plan(&host(4, 64), 1, 2), (2, true), "two peers");
    assert_eq!(plan(&host(2, 2), 1, 1), (1, false), "as many processors as ranks");
    assert_eq!(plan(&host(1, 2), 1, 1), (1, false), "two processors");
    assert_eq!(plan(&host(2, 1), 1, 1), (1, false), "virtual GPUs");
    assert_eq!(plan(&host(8, 128), 1, 8), (1, false), "eight peers");
    let hosts = [offer("one", 64), offer("two", 4)];
    assert_eq!(plan(&hosts, 1, 1), (1, true), "the smaller host");
    let bound = |mask: [u64; 2]| Offer { mask: mask.to_vec(), ..offer("here", 8) };
    assert_eq!(plan(&[bound([0xff, 0]), bound([0, 0xff])], 1, 1), (2, true), "processors of their own");
    assert_eq!(plan(&[bound([0xff, 0]), bound([0xff, 0])], 1, 1), (1, true), "the same processors");
    assert_eq!(plan(&[bound([0xfe, 1]), bound([0, 0xff])], 1, 1), (1, true), "one processor of both");
    let asked = [Offer { connections: Some(9), ..offer("one", 2) }];
    assert_eq!(plan(&asked, 1, 1), (9, false), "an option goes before");
}

/// Parts wait for the headers of earlier puts, which must not wait for room for these parts.
#[test]
fn many_large_puts_in_one_call_arrive() {
    const PUTS: u64 = 150;
    for patience in [BLOCKS, POLLS] {
        alone(SOON, |setup| {
            let (theirs, receivers) = divided(setup, 3, patience);
            let sockets = theirs.into_iter().map(|socket| (socket, None)).collect();
            let mut queue = TcpQueue::new(setup, setup.ends(1), sockets, patience).unwrap();
            let half = BYTES / 2;
            let mut random = ChaCha8Rng::seed_from_u64(1);
            let bytes: Vec<u8> = (64..half).map(|_| random.random_range(0..=u8::MAX)).collect();
            // SAFETY: the bytes are within the memory of a virtual GPU, which no other thread uses
            // before the first put.
            unsafe {
                let to = (setup.memory.ptr().0 + 64) as *mut u8;
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            }
            let put = |value| Put { from: 64, to: half, bytes: half - 64, counter: COUNTER, value };
            let puts: Vec<Put> = (1..=PUTS).map(put).collect();
            queue.put_with_counter(&puts).unwrap();
            queue.quiet(SOON).unwrap();
            wait_for_counter(setup, PUTS);
            assert!(memory(setup)[half as usize..][..bytes.len()] == bytes);
            queue.close();
            assert!(failure(&receivers).is_none(), "{:?}", failure(&receivers));
        });
    }
}
