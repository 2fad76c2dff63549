//! A libnccl for tests, with NCCL's symbols and without a GPU. Ranks are threads of one process,
//! device memory is memory of it, and the host executes operations once every rank has joined.
//! Until then they are in progress, or block, as NCCL's do. A test replaces a function's result
//! with `fake_set`.
//!
//! It also watches its caller: two threads in one communicator at a time, or any use of a destroyed
//! one, count as misuse.
//!
//! Compiled by the tests with rustc alone. `--cfg old` omits functions added after 2.7,
//! `--cfg broken` one required function, `--cfg foreign` the symbol that marks the fake. With
//! `--cfg wrong="NAME"`, that function corrupts the first byte of its result.

#![cfg_attr(old, allow(dead_code))]
#![allow(non_snake_case, clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE: c_int = 6;
const IN_PROGRESS: c_int = 7;
/// `fake_set`: the function hangs until the communicator is aborted.
const HANG: c_int = -1;
/// `fake_set`: the function hangs until `fake_release`.
const HANG_FOR_GOOD: c_int = -2;

type Comm = *mut c_void;
type Stream = *mut c_void;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Id([u8; 128]);

/// The beginning of `ncclConfig_t`.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

#[derive(Default)]
struct World {
    next: u64,
    /// Members that have joined, by meeting.
    meetings: HashMap<Vec<u8>, Meeting>,
    members: HashMap<usize, Member>,
    set: HashMap<String, c_int>,
    calls: HashMap<String, u32>,
    log: Vec<String>,
    misuse: Vec<String>,
    released: bool,
}

impl World {
    /// A new communicator's handle, of a rank that has joined a meeting.
    fn add(&mut self, meeting: Vec<u8>, rank: usize, size: usize, blocking: bool) -> usize {
        self.next += 1;
        let comm = 0x1000 + 16 * self.next as usize;
        self.meetings.entry(meeting.clone()).or_default().come.push(comm);
        let member = Member {
            meeting,
            rank,
            size,
            blocking,
            inside: 0,
            operations: 0,
            splits: 0,
            waits_for: Wait::Meeting,
            aborted: false,
            error: SUCCESS,
            registrations: 0,
        };
        self.members.insert(comm, member);
        comm
    }
}

/// Ranks that make a communicator, and its operations.
#[derive(Default)]
struct Meeting {
    come: Vec<usize>,
    operations: Vec<Operation>,
    /// (from, to): posted sends without a counterpart.
    sends: HashMap<(usize, usize), Vec<Posted>>,
    receives: HashMap<(usize, usize), Vec<Posted>>,
    splits: Vec<HashMap<usize, (c_int, c_int)>>,
}

#[derive(Default)]
struct Operation {
    parts: HashMap<usize, Part>,
    done: bool,
}

#[derive(Clone, Copy)]
struct Part {
    kind: &'static str,
    send: usize,
    receive: usize,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
}

#[derive(Clone, Copy)]
struct Posted {
    ticket: u64,
    address: usize,
    bytes: usize,
}

struct Member {
    meeting: Vec<u8>,
    rank: usize,
    size: usize,
    blocking: bool,
    /// Threads in a call with it, but for those that are in `ncclCommAbort`.
    inside: u32,
    operations: usize,
    splits: usize,
    /// Condition on which it is no longer in progress.
    waits_for: Wait,
    aborted: bool,
    error: c_int,
    registrations: u64,
}

#[derive(Clone)]
enum Wait {
    Nothing,
    Meeting,
    Operation(usize),
    Messages(Vec<u64>),
    /// Number, and destination of the handle.
    Split(usize, usize),
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

/// A send or receive of a group: communicator, send or receive, peer, address, bytes.
type Queued = (usize, bool, usize, usize, usize);

thread_local! {
    /// The sends and receives of this thread's group, if one is open.
    static GROUP: RefCell<Option<Vec<Queued>>> = const { RefCell::new(None) };
}

/// The world, locked.
struct Guard(Option<MutexGuard<'static, Option<World>>>);

fn lock() -> Guard {
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    world.get_or_insert_with(World::default);
    Guard(Some(world))
}

fn world(guard: &mut Guard) -> &mut World {
    guard.0.as_mut().unwrap().as_mut().unwrap()
}

/// Lets others on until something has changed.
fn wait(guard: &mut Guard) {
    let taken = guard.0.take().unwrap();
    guard.0 = Some(CHANGED.wait(taken).unwrap_or_else(PoisonError::into_inner));
}

/// Counts a call, and returns the result set for it. `None`: the call continues.
fn begin(guard: &mut Guard, name: &str, comm: usize) -> Option<c_int> {
    *world(guard).calls.entry(name.to_owned()).or_default() += 1;
    match world(guard).set.get(name).copied() {
        None => None,
        Some(hang @ (HANG | HANG_FOR_GOOD)) => {
            loop {
                let world = world(guard);
                let aborted = world.members.get(&comm).is_none_or(|member| member.aborted);
                if world.released || (hang == HANG && comm != 0 && aborted) {
                    break;
                }
                wait(guard);
            }
            Some(REMOTE)
        }
        Some(code) => Some(code),
    }
}

/// A call with a communicator: checks that no other thread is in one, and applies the set result.
fn with_comm(name: &str, comm: Comm, call: impl FnOnce(&mut Guard, usize) -> c_int) -> c_int {
    let comm = comm as usize;
    let mut guard = lock();
    let Some(member) = world(&mut guard).members.get_mut(&comm) else {
        world(&mut guard).misuse.push(format!("{name} of a communicator that is not there"));
        return INVALID_ARGUMENT;
    };
    member.inside += 1;
    let alone = member.inside == 1;
    if !alone {
        world(&mut guard).misuse.push(format!("{name} while another thread is inside"));
    }
    let code = match begin(&mut guard, name, comm) {
        Some(code) => code,
        None => call(&mut guard, comm),
    };
    if let Some(member) = world(&mut guard).members.get_mut(&comm) {
        member.inside -= 1;
    }
    CHANGED.notify_all();
    code
}

/// The present result code of a communicator.
fn status(world: &mut World, comm: usize) -> c_int {
    let Some(member) = world.members.get(&comm) else { return INVALID_ARGUMENT };
    if member.aborted || world.released {
        return REMOTE;
    }
    if member.error != SUCCESS {
        return member.error;
    }
    let meeting = &world.meetings[&member.meeting];
    let done = match &member.waits_for {
        Wait::Nothing => true,
        Wait::Meeting => meeting.come.len() == member.size,
        Wait::Operation(number) => meeting.operations[*number].done,
        Wait::Messages(tickets) => {
            let open = meeting.sends.values().chain(meeting.receives.values()).flatten();
            !open.into_iter().any(|posted| tickets.contains(&posted.ticket))
        }
        Wait::Split(number, _) => meeting.splits[*number].len() == member.size,
    };
    if !done {
        return IN_PROGRESS;
    }
    if let Wait::Split(number, handle) = member.waits_for.clone() {
        finish_split(world, comm, number, handle);
    }
    if let Some(member) = world.members.get_mut(&comm) {
        member.waits_for = Wait::Nothing;
    }
    SUCCESS
}

/// The end of a call that has posted an operation: waits for it, or returns that it is in progress.
fn settle(guard: &mut Guard, comm: usize) -> c_int {
    loop {
        let code = status(world(guard), comm);
        let blocking = world(guard).members.get(&comm).is_some_and(|member| member.blocking);
        if code != IN_PROGRESS || !blocking {
            return code;
        }
        wait(guard);
    }
}

fn join(guard: &mut Guard, meeting: Vec<u8>, rank: c_int, size: c_int, blocking: bool) -> usize {
    let comm = world(guard).add(meeting, rank as usize, size as usize, blocking);
    CHANGED.notify_all();
    comm
}

fn finish_split(world: &mut World, comm: usize, number: usize, handle: usize) {
    let (meeting, rank) = (world.members[&comm].meeting.clone(), world.members[&comm].rank);
    let colors = world.meetings[&meeting].splits[number].clone();
    let (color, _) = colors[&rank];
    if color < 0 {
        return;
    }
    let mut ranks: Vec<(c_int, usize)> = colors
        .iter()
        .filter(|(_, (other, _))| *other == color)
        .map(|(rank, (_, key))| (*key, *rank))
        .collect();
    ranks.sort();
    let place = ranks.iter().position(|(_, other)| *other == rank).unwrap();
    let name = [&meeting[..], format!("/{number}/{color}").as_bytes()].concat();
    let blocking = world.members[&comm].blocking;
    let child = world.add(name, place, ranks.len(), blocking);
    unsafe { *(handle as *mut usize) = child };
}

fn width(dtype: c_int) -> usize {
    match dtype {
        0 | 1 => 1,
        9 => 2,
        2 | 7 => 4,
        _ => 8,
    }
}

fn load(address: usize, index: usize, dtype: c_int) -> f64 {
    unsafe {
        match dtype {
            2 => (address as *const i32).add(index).read_unaligned() as f64,
            4 => (address as *const i64).add(index).read_unaligned() as f64,
            7 => f64::from((address as *const f32).add(index).read_unaligned()),
            9 => f64::from(f32::from_bits(
                u32::from((address as *const u16).add(index).read_unaligned()) << 16,
            )),
            _ => f64::from((address as *const u8).add(index).read_unaligned()),
        }
    }
}

fn store(address: usize, index: usize, dtype: c_int, value: f64) {
    unsafe {
        match dtype {
            2 => (address as *mut i32).add(index).write_unaligned(value as i32),
            4 => (address as *mut i64).add(index).write_unaligned(value as i64),
            7 => (address as *mut f32).add(index).write_unaligned(value as f32),
            // The tests' values have few bits.
            9 => (address as *mut u16).add(index).write_unaligned(((value as f32).to_bits() >> 16) as u16),
            _ => (address as *mut u8).add(index).write_unaligned(value as u8),
        }
    }
}

fn copy(to: usize, from: usize, bytes: usize) {
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
}

fn spoil(address: usize, bytes: usize) {
    if bytes > 0 {
        unsafe { *(address as *mut u8) ^= 1 };
    }
}

/// All parts are there: does it, on the memory of all ranks.
fn perform(parts: &HashMap<usize, Part>) {
    let size = parts.len();
    let first = parts[&0];
    let bytes = first.count * width(first.dtype);
    let reduced = |elements: usize| -> Vec<f64> {
        let element = |index: usize| {
            let values = (0..size).map(|rank| load(parts[&rank].send, index, first.dtype));
            match first.op {
                0 => values.sum(),
                1 => values.product(),
                2 => values.fold(f64::NEG_INFINITY, f64::max),
                3 => values.fold(f64::INFINITY, f64::min),
                _ => values.sum::<f64>() / size as f64,
            }
        };
        (0..elements).map(element).collect()
    };
    let put = |rank: usize, values: &[f64]| {
        for (index, value) in values.iter().enumerate() {
            store(parts[&rank].receive, index, first.dtype, *value);
        }
    };
    match first.kind {
        "ncclAllReduce" => {
            let values = reduced(first.count);
            (0..size).for_each(|rank| put(rank, &values));
        }
        "ncclReduce" => put(first.root as usize, &reduced(first.count)),
        "ncclBroadcast" => {
            (0..size).for_each(|rank| copy(parts[&rank].receive, parts[&(first.root as usize)].send, bytes));
        }
        "ncclAllGather" => {
            for rank in 0..size {
                (0..size)
                    .for_each(|from| copy(parts[&rank].receive + from * bytes, parts[&from].send, bytes));
            }
        }
        "ncclReduceScatter" => {
            let values = reduced(first.count * size);
            (0..size).for_each(|rank| put(rank, &values[rank * first.count..(rank + 1) * first.count]));
        }
        kind => panic!("{kind}"),
    }
}

fn collective(comm: Comm, part: Part) -> c_int {
    let name = part.kind;
    with_comm(name, comm, |guard, comm| {
        let world = world(guard);
        let member = world.members.get_mut(&comm).unwrap();
        if !matches!(member.waits_for, Wait::Nothing) {
            world.misuse.push(format!("{name} while another call is in progress"));
            return INVALID_USAGE;
        }
        let (number, rank, size) = (member.operations, member.rank, member.size);
        member.operations += 1;
        member.waits_for = Wait::Operation(number);
        let meeting = world.meetings.get_mut(&member.meeting).unwrap();
        if meeting.operations.len() <= number {
            meeting.operations.resize_with(number + 1, Operation::default);
        }
        let operation = &mut meeting.operations[number];
        operation.parts.insert(rank, part);
        if operation.parts.len() == size {
            perform(&operation.parts);
            let wrong = (cfg!(wrong = "ncclAllGather") && name == "ncclAllGather")
                || (cfg!(wrong = "ncclReduceScatter") && name == "ncclReduceScatter");
            if wrong {
                operation.parts.values().for_each(|part| spoil(part.receive, part.count));
            }
            operation.done = true;
        }
        CHANGED.notify_all();
        settle(guard, comm)
    })
}

// ---- NCCL's functions ----

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    unsafe { *version = if cfg!(old) { 2703 } else { 22803 } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut Id) -> c_int {
    let mut guard = lock();
    if let Some(code) = begin(&mut guard, "ncclGetUniqueId", 0) {
        return code;
    }
    world(&mut guard).next += 1;
    let mut bytes = [0; 128];
    bytes[..8].copy_from_slice(&world(&mut guard).next.to_le_bytes());
    unsafe { *id = Id(bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text = match code {
        SUCCESS => c"no error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unhandled error",
    };
    text.as_ptr()
}

#[cfg(not(old))]
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_: Comm) -> *const c_char {
    c"the fake's last error".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(comm: *mut Comm, size: c_int, id: Id, rank: c_int) -> c_int {
    let mut guard = lock();
    if let Some(code) = begin(&mut guard, "ncclCommInitRank", 0) {
        return code;
    }
    let made = join(&mut guard, id.0.to_vec(), rank, size, true);
    let code = settle(&mut guard, made);
    if code == SUCCESS {
        unsafe { *comm = made as Comm };
    } else {
        world(&mut guard).members.remove(&made);
    }
    code
}

#[cfg(not(old))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut Comm,
    size: c_int,
    id: Id,
    rank: c_int,
    config: *mut Config,
) -> c_int {
    let config = unsafe { &*config };
    if config.size != 80 || config.magic != 0xcafe_beef || config.version != 22800 {
        return INVALID_ARGUMENT;
    }
    if config.blocking == 1 {
        return unsafe { ncclCommInitRank(comm, size, id, rank) };
    }
    let mut guard = lock();
    if let Some(code) = begin(&mut guard, "ncclCommInitRankConfig", 0) {
        return code;
    }
    let made = join(&mut guard, id.0.to_vec(), rank, size, false);
    unsafe { *comm = made as Comm };
    IN_PROGRESS
}

#[cfg(not(old))]
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: Comm) -> c_int {
    with_comm("ncclCommFinalize", comm, |_, _| SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: Comm) -> c_int {
    let code = with_comm("ncclCommDestroy", comm, |_, _| SUCCESS);
    world(&mut lock()).members.remove(&(comm as usize));
    code
}

/// Wakes threads that hang with it, waits for them to leave, and frees it.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: Comm) -> c_int {
    let mut guard = lock();
    match world(&mut guard).members.get_mut(&(comm as usize)) {
        Some(member) if !member.aborted => member.aborted = true,
        _ => {
            world(&mut guard).misuse.push("ncclCommAbort of a communicator that is not there".into());
            return INVALID_ARGUMENT;
        }
    }
    CHANGED.notify_all();
    let set = begin(&mut guard, "ncclCommAbort", 0);
    while world(&mut guard).members[&(comm as usize)].inside > 0 {
        wait(&mut guard);
    }
    world(&mut guard).members.remove(&(comm as usize));
    set.unwrap_or(SUCCESS)
}

#[cfg(not(old))]
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommSplit(
    comm: Comm,
    color: c_int,
    key: c_int,
    child: *mut Comm,
    _: *mut Config,
) -> c_int {
    with_comm("ncclCommSplit", comm, |guard, comm| {
        let world = world(guard);
        let member = world.members.get_mut(&comm).unwrap();
        let (number, rank) = (member.splits, member.rank);
        member.splits += 1;
        member.waits_for = Wait::Split(number, child as usize);
        let meeting = world.meetings.get_mut(&member.meeting).unwrap();
        if meeting.splits.len() <= number {
            meeting.splits.resize_with(number + 1, HashMap::new);
        }
        meeting.splits[number].insert(rank, (color, key));
        CHANGED.notify_all();
        settle(guard, comm)
    })
}

#[cfg(not(old))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    comm: Comm,
    _: *mut c_void,
    bytes: usize,
    handle: *mut *mut c_void,
) -> c_int {
    with_comm("ncclCommRegister", comm, |guard, comm| {
        let member = world(guard).members.get_mut(&comm).unwrap();
        member.registrations += 1;
        unsafe { *handle = (member.registrations as usize) as *mut c_void };
        let line = format!("register {} of {bytes} bytes", member.registrations);
        world(guard).log.push(line);
        SUCCESS
    })
}

#[cfg(not(old))]
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(comm: Comm, handle: *mut c_void) -> c_int {
    with_comm("ncclCommDeregister", comm, |guard, _| {
        world(guard).log.push(format!("deregister {}", handle as usize));
        SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: Comm, error: *mut c_int) -> c_int {
    with_comm("ncclCommGetAsyncError", comm, |guard, comm| {
        unsafe { *error = status(world(guard), comm) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: Comm, count: *mut c_int) -> c_int {
    with_comm("ncclCommCount", comm, |guard, comm| {
        unsafe { *count = world(guard).members[&comm].size as c_int };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: Comm, rank: *mut c_int) -> c_int {
    with_comm("ncclCommUserRank", comm, |guard, comm| {
        unsafe { *rank = world(guard).members[&comm].rank as c_int };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|group| *group = Some(Vec::new()));
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let Some(queued) = GROUP.with_borrow_mut(Option::take) else { return INVALID_USAGE };
    let Some(comm) = queued.first().map(|queued| queued.0) else { return SUCCESS };
    with_comm("ncclGroupEnd", comm as Comm, |guard, comm| {
        let world = world(guard);
        let member = world.members.get_mut(&comm).unwrap();
        let rank = member.rank;
        let meeting = world.meetings.get_mut(&member.meeting).unwrap();
        let mut tickets = Vec::new();
        for (_, is_send, peer, address, bytes) in queued {
            world.next += 1;
            let posted = Posted { ticket: world.next, address, bytes };
            let lane = if is_send { (rank, peer) } else { (peer, rank) };
            let (own, others) = match is_send {
                true => (&mut meeting.sends, &mut meeting.receives),
                false => (&mut meeting.receives, &mut meeting.sends),
            };
            match others.get_mut(&lane).filter(|others| !others.is_empty()) {
                Some(others) => {
                    let other = others.remove(0);
                    let (from, to) = if is_send { (posted, other) } else { (other, posted) };
                    copy(to.address, from.address, from.bytes.min(to.bytes));
                    if cfg!(wrong = "ncclRecv") {
                        spoil(to.address, to.bytes);
                    }
                }
                None => {
                    own.entry(lane).or_default().push(posted);
                    tickets.push(posted.ticket);
                }
            }
        }
        member.waits_for = Wait::Messages(tickets);
        CHANGED.notify_all();
        settle(guard, comm)
    })
}

fn queue(comm: Comm, is_send: bool, peer: c_int, address: usize, bytes: usize) -> c_int {
    let queued = (comm as usize, is_send, peer as usize, address, bytes);
    GROUP.with_borrow_mut(|group| match group {
        Some(group) => {
            group.push(queued);
            SUCCESS
        }
        None => INVALID_USAGE,
    })
}

#[cfg(not(broken))]
#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    data: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Comm,
    _: Stream,
) -> c_int {
    queue(comm, true, peer, data as usize, count * width(dtype))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    data: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Comm,
    _: Stream,
) -> c_int {
    queue(comm, false, peer, data as usize, count * width(dtype))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: Comm,
    _: Stream,
) -> c_int {
    let (send, receive) = (send as usize, receive as usize);
    collective(comm, Part { kind: "ncclAllReduce", send, receive, count, dtype, op, root: 0 })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    comm: Comm,
    _: Stream,
) -> c_int {
    let (send, receive) = (send as usize, receive as usize);
    collective(comm, Part { kind: "ncclReduce", send, receive, count, dtype, op, root })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: Comm,
    _: Stream,
) -> c_int {
    let (send, receive) = (send as usize, receive as usize);
    collective(comm, Part { kind: "ncclBroadcast", send, receive, count, dtype, op: 0, root })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    comm: Comm,
    _: Stream,
) -> c_int {
    let (send, receive) = (send as usize, receive as usize);
    collective(comm, Part { kind: "ncclAllGather", send, receive, count, dtype, op: 0, root: 0 })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: Comm,
    _: Stream,
) -> c_int {
    let (send, receive) = (send as usize, receive as usize);
    let part = Part { kind: "ncclReduceScatter", send, receive, count, dtype, op, root: 0 };
    collective(comm, part)
}

// ---- The tests' functions ----

/// Marks a library that works on host memory: without it, epoxide rejects virtual GPUs.
#[cfg(not(foreign))]
#[unsafe(no_mangle)]
pub extern "C" fn epoxide_nccl_on_host() {}

/// Sets the result of `name` from now on: a code, or one of the negative ones above; 0 lets it work
/// again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_set(name: *const c_char, code: c_int) {
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let mut guard = lock();
    match code {
        SUCCESS => world(&mut guard).set.remove(&name),
        code => world(&mut guard).set.insert(name, code),
    };
}

/// Makes NCCL's threads detect an error, in every communicator.
#[unsafe(no_mangle)]
pub extern "C" fn fake_fail_all(code: c_int) {
    world(&mut lock()).members.values_mut().for_each(|member| member.error = code);
    CHANGED.notify_all();
}

/// Lets everything return that hangs.
#[unsafe(no_mangle)]
pub extern "C" fn fake_release() {
    world(&mut lock()).released = true;
    CHANGED.notify_all();
}

/// How often a function was called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_calls(name: *const c_char) -> u32 {
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    world(&mut lock()).calls.get(&*name).copied().unwrap_or(0)
}

/// Communicators that are there.
#[unsafe(no_mangle)]
pub extern "C" fn fake_live() -> u32 {
    world(&mut lock()).members.len() as u32
}

/// Registrations made and released so far, a line each; then a line for each misuse. The text
/// stays.
#[unsafe(no_mangle)]
pub extern "C" fn fake_log() -> *const c_char {
    let mut guard = lock();
    let world = world(&mut guard);
    let lines: Vec<String> =
        world.log.iter().cloned().chain(world.misuse.iter().map(|line| format!("misuse: {line}"))).collect();
    CString::new(lines.join("\n")).unwrap().into_raw()
}
