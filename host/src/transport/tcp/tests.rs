//! One rank, with the test in the place of its peer.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide_gpu::layout::{PutRequest, QueueWords, RING_ENTRIES};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::acceptor::{HELLO, TOKEN, hello, read_answer};
use super::frame::{header, signed_header, word64};
use super::receiver::Incoming;
use super::*;
use crate::driver::virt::{VirtConfig, VirtualGpu};
use crate::driver::{Memory, MemoryKind};
use crate::group::ConnectionLimits;
use crate::group::internal::{Initiator, Keys, OPENING, PROOF, Purpose, Responder};
use crate::group::run_threads;
use crate::group::{HashStore, JobSecret, MeshGroup, MeshOptions};
use crate::transport::greeting::{PHASE, VERSION};
use crate::transport::links::Receiving;
use crate::transport::proxy::Proxy;
use crate::transport::put::Put;
use crate::transport::put::PutQueue;
use crate::transport::setup::{Writer, deadline};
use crate::transport::{TransportKind, TransportOptions};

const BYTES: u64 = 1 << 20;
/// Longer than anything takes on a busy machine that is meant to happen.
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
        let mut acceptor = Acceptor::open(setup).unwrap();
        let address = acceptor.address;
        let token = acceptor.token;
        let good = hello(VERSION, PHASE, &token, 1, 0, BYTES);
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
                let old = refused(&hello(9, PHASE, &token, 1, 0, BYTES)[..12]);
                assert!(
                    old.contains(&format!("protocol version 9; this rank has version {VERSION}")),
                    "{old}"
                );
                let token = [7; TOKEN];
                assert!(refused(&hello(VERSION, PHASE, &token, 1, 0, BYTES)).contains("wrong token"));
                drop(TcpStream::connect(address).unwrap());
                let mut friend = TcpStream::connect(address).unwrap();
                // In two parts.
                friend.write_all(&good[..20]).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                friend.write_all(&good[20..]).unwrap();
                read_answer(&mut friend, deadline(SOON)).unwrap();
                drop(silent);
            });
            let accepted = acceptor.accept(setup, deadline(SOON)).unwrap();
            assert!(accepted.keys().eq(&[(0, 1)]));
        });
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
        let (mut first, mut second) = (Acceptor::open(setup).unwrap(), Acceptor::open(setup).unwrap());
        let claims = |to: &Acceptor| super::acceptor::claims(setup, 1, 0, 0, to.address);
        let call = |acceptor: &Acceptor, secret: &JobSecret, claims: Vec<u8>| {
            let initiator = Initiator::new(secret, Purpose::Transport, claims).unwrap();
            let proof = initiator.proof(&acceptor.token);
            let hello = hello(VERSION, PHASE, &acceptor.token, 1, 0, BYTES);
            (initiator.opening(), [&hello, initiator.opening().as_slice(), &proof].concat(), initiator)
        };
        let secret = first.secret.clone().unwrap();
        let other = JobSecret::new(&"o".repeat(32)).unwrap();
        let (_, stranger, _) = call(&first, &other, claims(&first));
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
        let silent = connect(&first, &hello(VERSION, PHASE, &first.token, 1, 0, BYTES));
        let refused = |mut socket: TcpStream| {
            let said = read_to_end(&mut socket);
            assert!(said.contains("does not know this job's secret"), "{said}");
        };
        let (stranger, replayed) = (connect(&first, &stranger), connect(&second, &replayed));
        let mut friend = connect(&first, &good);
        assert!(first.accept(setup, deadline(SOON)).unwrap().keys().eq(&[(0, 1)]));
        refused(stranger);
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
            assert!(second.accept(setup, deadline(SOON)).unwrap().keys().eq(&[(0, 1)]));
        });
        drop(silent);
        // The rank that was called shows that it knows the secret, too, with a proof of its own.
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
        let secret = setup.group.job_secret().unwrap();
        let dialed = dial(setup, &address, secret.as_ref(), 0, 1, deadline(SOON)).unwrap();
        let (mut impostor, _) = listener.accept().unwrap();
        let mut hello = [0; HELLO + OPENING + PROOF];
        impostor.read_exact(&mut hello).unwrap();
        // Let in, with the proof that it got.
        impostor.write_all(&[&[0; 4], &hello[HELLO + OPENING..]].concat()).unwrap();
        let error = dialed.answered(deadline(SOON)).unwrap_err();
        assert!(error.contains("does not know this job's secret"), "{error}");
    });
}

#[test]
fn ranks_of_one_host_listen_at_loopback() {
    alone(SOON, |setup| {
        assert!(setup.group.shares_host());
        assert!(Acceptor::open(setup).unwrap().address.ip().is_loopback());
    });
}

#[test]
fn the_oldest_silent_stranger_makes_room_even_after_rejections() {
    alone(SOON, |setup| {
        let limits = ConnectionLimits { strangers: 3, ..ConnectionLimits::default() };
        let options = TransportOptions { limits, ..setup.options.clone() };
        let setup = Setup { options: &options, ..*setup };
        let mut acceptor = Acceptor::open(&setup).unwrap();
        let (address, good) = (acceptor.address, hello(VERSION, PHASE, &acceptor.token, 1, 0, BYTES));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let connect = || TcpStream::connect(address).unwrap();
                let mut all: Vec<_> = (0..4).map(|_| connect()).collect();
                all[0].write_all(&[0xee; HELLO]).unwrap();
                assert!(read_to_end(&mut all[0]).contains("no hello"));
                all.push(connect());
                std::thread::sleep(Duration::from_millis(200));
                // One too many: of 1, 2, 3 and 4 the first has to go.
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
            let accepted = acceptor.accept(&setup, deadline(SOON)).unwrap();
            assert!(accepted.keys().eq(&[(0, 1)]));
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
            let mut acceptor = Acceptor::open(setup).unwrap();
            let (address, good) = (acceptor.address, hello(VERSION, PHASE, &acceptor.token, 1, 0, BYTES));
            eprintln!("acceptor at {address}");
            std::io::stdin().read_exact(&mut [0]).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let mut friend = TcpStream::connect(address).unwrap();
                    friend.write_all(&good).unwrap();
                    read_answer(&mut friend, deadline(SOON)).unwrap();
                });
                assert_eq!(acceptor.accept(setup, deadline(SOON)).unwrap().len(), 1);
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

#[test]
fn ranks_of_the_group_with_a_wrong_hello_end_the_setup_on_both_sides() {
    alone(SOON, |setup| {
        for (phase, queue, memory, expected) in [
            (0, 0, BYTES, "phase 0; this rank connects phase 1"),
            (PHASE, 0, 8, "wire memory of 8 bytes; this rank has 1048576"),
            (PHASE, 5, BYTES, "queue 5 of rank 1 is not expected"),
        ] {
            let mut acceptor = Acceptor::open(setup).unwrap();
            let mut socket = TcpStream::connect(acceptor.address).unwrap();
            socket.write_all(&hello(VERSION, phase, &acceptor.token, 1, queue, memory)).unwrap();
            let error = acceptor.accept(setup, deadline(SOON)).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("with rank 1"), "{error}");
            let answer = read_answer(&mut socket, deadline(SOON)).unwrap_err();
            assert!(
                answer.starts_with("rejected; the listener there answers \"") && answer.contains(expected),
                "{answer}"
            );
        }
        let mut acceptor = Acceptor::open(setup).unwrap();
        let error = acceptor.accept(setup, deadline(Duration::from_millis(50))).unwrap_err().to_string();
        assert!(error.contains("with rank 1") && error.contains("did not connect within"), "{error}");
    });
}

/// A connected pair: the other end of rank 1, and this rank's.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (theirs, listener.accept().unwrap().0)
}

fn wait_for_failure(receivers: &Receivers) -> String {
    let end = deadline(SOON);
    loop {
        if let Some(error) = receivers.failure() {
            return error.to_string();
        }
        assert!(Instant::now() < end, "no failure");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The connection of rank 1, as an acceptor admits it where the job has no secret.
fn incoming(socket: TcpStream) -> BTreeMap<(u32, u32), Incoming> {
    BTreeMap::from([((0, 1), Incoming { socket, signer: None })])
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
            let receivers = Receivers::start(setup, BTreeMap::from([((0, 1), ours)])).unwrap();
            let good = signed_header(&first, Some(&mut signer));
            let mut next = signed_header(&second, Some(&mut signer));
            match attack {
                "unsigned" => next = [header(&second).as_slice(), &[0; 32]].concat(),
                "changed" => next[8] ^= 8,
                "repeated" => next.clone_from(&good),
                "left out" => next = signed_header(&second, Some(&mut signer)),
                _ => next = signed_header(&second, Some(&mut other)),
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
            let receivers = Receivers::start(setup, incoming(ours)).unwrap();
            theirs.write_all(&header(&good)).unwrap();
            theirs.write_all(&[3; 8]).unwrap();
            theirs.write_all(&header(&put)).unwrap();
            let error = wait_for_failure(&receivers);
            assert!(error.contains("with rank 1: refused a frame of it"), "{error}");
            let mut queue = TcpQueue::new(setup, setup.ends(1), theirs, None).unwrap();
            let told = queue.put_with_counter(&[good]).unwrap_err().to_string();
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
            let receivers = Receivers::start(setup, incoming(ours)).unwrap();
            theirs.write_all(bytes).unwrap();
            drop(theirs);
            let error = wait_for_failure(&receivers);
            assert!(
                error.contains("receive, rank 0 with rank 1: the connection ended without a goodbye"),
                "{error}"
            );
        }
        let (theirs, ours) = pair();
        let mut queue = TcpQueue::new(setup, setup.ends(1), ours, None).unwrap();
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

#[test]
fn a_goodbye_is_no_failure_and_a_missing_one_is() {
    alone(SOON, |setup| {
        let (theirs, ours) = pair();
        let receivers = Receivers::start(setup, incoming(ours)).unwrap();
        let mut queue = TcpQueue::new(setup, setup.ends(1), theirs, None).unwrap();
        queue.put_with_counter(&[Put { counter: 24, value: 5, ..Put::default() }]).unwrap();
        queue.close();
        assert!(queue.put_with_counter(&[]).is_err(), "closed");
        drop(queue);
        let end = deadline(SOON);
        while !receivers.readers[0].1.is_finished() {
            assert!(Instant::now() < end, "the reader goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(receivers.failure().is_none(), "{:?}", receivers.failure());
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
        let mut queue = TcpQueue::new(setup, setup.ends(1), ours, None).unwrap();
        let error = fill(&mut queue);
        assert!(error.contains("rank 1: it did not take all bytes within 300ms"), "{error}");

        let (_theirs, ours) = pair();
        let mut queue = TcpQueue::new(setup, setup.ends(1), ours, None).unwrap();
        queue.timeout = NEVER;
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

#[test]
fn a_proxy_ends_promptly_though_its_peer_stalls() {
    alone(NEVER, |setup| {
        let (_theirs, ours) = pair();
        let queue = Box::new(TcpQueue::new(setup, setup.ends(1), ours, None).unwrap());
        let link = PeerQueue { peer: 1, index: 0, queue };
        let mut proxy = Proxy::start(setup.memory.device(), link).unwrap();
        let ring = proxy.handle().0;
        for index in 0..RING_ENTRIES {
            let entry = ring + size_of::<QueueWords>() as u64 + index * size_of::<PutRequest>() as u64;
            let mut put = PutRequest::default();
            (put.bytes, put.ticket) = (BYTES, index + 1);
            // SAFETY: an entry of the proxy's ring, in host memory, which the proxy has not come
            // to. Seeing parts of it does no harm: all values but the ticket and the bytes are zero
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
