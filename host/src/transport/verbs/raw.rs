//! Owners of verbs objects. Each keeps its parent objects alive and frees its own on drop.

use std::ffi::{CStr, c_int};
use std::fmt::Debug;
use std::net::Ipv6Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Once};

use ibverbs_sys::{self as ib, ibv_access_flags as access, ibv_qp_attr_mask as mask};

use crate::error::{Error, Result};

/// The access that a peer's card has to registered memory. Not relaxed ordering: a counter must not
/// overtake its data.
const ACCESS: c_int = (access::IBV_ACCESS_LOCAL_WRITE.0 | access::IBV_ACCESS_REMOTE_WRITE.0) as c_int;

/// An [`Error::Verbs`] for an `errno` value.
pub(super) fn failed(call: &'static str, errno: i32, operation: &str, remedy: &str) -> Error {
    Error::Verbs {
        call,
        status: std::io::Error::from_raw_os_error(errno).to_string(),
        peer: None,
        operation: operation.to_owned(),
        remedy: remedy.to_owned(),
    }
}

/// The `errno` of a call that has just returned null.
pub(super) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The result of a call that reports failure as an `errno` value.
fn check(code: c_int, call: &'static str, operation: &str, remedy: &str) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(failed(call, code.abs(), operation, remedy)),
    }
}

/// An opened device.
pub(super) struct Context {
    raw: NonNull<ib::ibv_context>,
    name: String,
}

// SAFETY: verbs may be called from any thread; a context has no state of ours.
unsafe impl Send for Context {}
// SAFETY: libibverbs locks what it shares between threads.
unsafe impl Sync for Context {}

impl Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Context").field(&self.name).finish()
    }
}

fn unavailable(reason: String) -> Error {
    Error::Unavailable { what: "RDMA".into(), reason }
}

/// The devices that libibverbs lists.
struct List {
    raw: NonNull<*mut ib::ibv_device>,
    len: usize,
}

impl List {
    fn new() -> Result<List> {
        // Before any memory is registered. With a kernel older than 5.12, a fork of this process
        // would leave the card writing to pages that this process no longer sees.
        static FORK_SAFE: Once = Once::new();
        FORK_SAFE.call_once(|| {
            // SAFETY: the call takes no pointers, and libibverbs locks what it changes.
            let code = unsafe { ib::ibv_fork_init() };
            if code != 0 {
                tracing::debug!("ibv_fork_init: {}", std::io::Error::from_raw_os_error(code));
            }
        });
        let mut len = 0;
        // SAFETY: the out pointer is valid.
        let raw = unsafe { ib::ibv_get_device_list(&mut len) };
        let list = NonNull::new(raw).map(|raw| List { raw, len: len.max(0) as usize });
        list.ok_or_else(|| {
            unavailable(match errno() {
                libc::ENOSYS => "this kernel has no RDMA modules (ibv_get_device_list: ENOSYS); `modprobe ib_uverbs` and the driver of the \
                                 card, such as mlx5_ib; in a container, pass /dev/infiniband and /sys/class/infiniband"
                    .into(),
                errno => format!("ibv_get_device_list: {}", std::io::Error::from_raw_os_error(errno)),
            })
        })
    }

    fn devices(&self) -> impl Iterator<Item = (*mut ib::ibv_device, String)> {
        // SAFETY: the list has `len` entries and lives as long as `self`.
        let devices = unsafe { std::slice::from_raw_parts(self.raw.as_ptr(), self.len) };
        devices.iter().map(|device| {
            // SAFETY: an entry of a live list has a NUL-terminated name.
            let name = unsafe { CStr::from_ptr(ib::ibv_get_device_name(*device)) };
            (*device, name.to_string_lossy().into_owned())
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: freed once; opened devices do not need it.
        unsafe { ib::ibv_free_device_list(self.raw.as_ptr()) }
    }
}

/// The names of all RDMA devices, sorted. The error is the reason for none.
pub(super) fn device_names() -> Result<Vec<String>> {
    let list = List::new()?;
    let mut names: Vec<String> = list.devices().map(|(_, name)| name).collect();
    names.sort();
    if names.is_empty() {
        return Err(unavailable(
            "there is no RDMA device; load the driver of the card, such as mlx5_ib, and install its libibverbs provider \
             (Debian: ibverbs-providers)"
                .into(),
        ));
    }
    Ok(names)
}

impl Context {
    /// Opens the device of this name.
    pub fn open(name: &str) -> Result<Arc<Context>> {
        let list = List::new()?;
        let Some((device, _)) = list.devices().find(|(_, have)| have == name) else {
            return Err(Error::Unavailable {
                what: format!("RDMA device {name}"),
                reason: format!("there are {}", device_names()?.join(", ")),
            });
        };
        // SAFETY: the device is of a live list.
        let raw = NonNull::new(unsafe { ib::ibv_open_device(device) }).ok_or_else(|| {
            failed("ibv_open_device", errno(), name, "; may this user open /dev/infiniband/uverbs*?")
        })?;
        Ok(Arc::new(Context { raw, name: name.to_owned() }))
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The capabilities of the device.
    pub fn device(&self) -> Result<ib::ibv_device_attr> {
        // SAFETY: a struct of numbers, for which zeroes are valid.
        let mut attributes: ib::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open and the out pointer valid.
        let code = unsafe { ib::ibv_query_device(self.raw.as_ptr(), &mut attributes) };
        check(code, "ibv_query_device", &self.name, "").map(|()| attributes)
    }

    /// The state of a port.
    pub fn port(&self, port: u8) -> Result<ib::ibv_port_attr> {
        // SAFETY: a struct of numbers, for which zeroes are valid.
        let mut attributes: ib::ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open. The declared type is an older, shorter form of the same
        // struct; the missing fields stay zero.
        let code = unsafe { ib::ibv_query_port(self.raw.as_ptr(), port, (&raw mut attributes).cast()) };
        let operation = format!("port {port} of {}", self.name);
        check(code, "ibv_query_port", &operation, "; EPOXIDE_RDMA_PORT counts from 1").map(|()| attributes)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: closed once; all that was made from it held a reference.
        unsafe { ib::ibv_close_device(self.raw.as_ptr()) };
    }
}

/// A protection domain: queues reach the memory regions of theirs only.
#[derive(Debug)]
pub(super) struct Pd {
    raw: NonNull<ib::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Pd {}
// SAFETY: as for `Context`.
unsafe impl Sync for Pd {}

impl Pd {
    /// A domain of the device.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Pd>> {
        // SAFETY: the context is open.
        let raw = NonNull::new(unsafe { ib::ibv_alloc_pd(context.raw.as_ptr()) })
            .ok_or_else(|| failed("ibv_alloc_pd", errno(), &context.name, ""))?;
        Ok(Arc::new(Pd { raw, context: context.clone() }))
    }

    /// Whether the device takes dma-buf memory, tested with an invalid descriptor: other devices
    /// return another error.
    pub fn takes_dma_buf(&self) -> bool {
        // SAFETY: the domain is live; an invalid descriptor is rejected.
        let raw = unsafe { ib::ibv_reg_dmabuf_mr(self.raw.as_ptr(), 0, 0, 0, -1, 0) };
        let errno = errno();
        raw.is_null() && ![libc::EOPNOTSUPP, libc::EPROTONOSUPPORT, libc::ENOSYS].contains(&errno)
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: freed once; regions and queues held a reference.
        unsafe { ib::ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

/// Registered memory. Peers may write it.
#[derive(Debug)]
pub(super) struct Mr {
    raw: NonNull<ib::ibv_mr>,
    _pd: Arc<Pd>,
}

// SAFETY: as for `Context`; the keys are only read.
unsafe impl Send for Mr {}
// SAFETY: as for `Context`.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers `bytes` at `address`: host memory, or device memory that a peer-memory module of
    /// the kernel supports.
    ///
    /// # Safety
    /// The memory stays mapped for as long as the region lives. Peers write it at any time.
    pub unsafe fn at_address(pd: &Arc<Pd>, address: u64, bytes: u64) -> Result<Mr> {
        // SAFETY: passed on to the caller; the kernel checks the range.
        let raw = unsafe { ib::ibv_reg_mr(pd.raw.as_ptr(), address as *mut _, bytes as usize, ACCESS) };
        Mr::own(raw, pd, "ibv_reg_mr", bytes)
    }

    /// Registers device memory by its dma-buf; peers address it as if it began at `address`. The
    /// region holds its own reference to the memory.
    pub fn of_dma_buf(pd: &Arc<Pd>, fd: &OwnedFd, address: u64, bytes: u64) -> Result<Mr> {
        // SAFETY: the domain and the descriptor are live; the kernel checks the range.
        let raw = unsafe {
            ib::ibv_reg_dmabuf_mr(pd.raw.as_ptr(), 0, bytes as usize, address, fd.as_raw_fd(), ACCESS)
        };
        Mr::own(raw, pd, "ibv_reg_dmabuf_mr", bytes)
    }

    fn own(raw: *mut ib::ibv_mr, pd: &Arc<Pd>, call: &'static str, bytes: u64) -> Result<Mr> {
        match NonNull::new(raw) {
            Some(raw) => Ok(Mr { raw, _pd: pd.clone() }),
            None => {
                let errno = errno();
                let remedy = match errno {
                    libc::ENOMEM => "; raise the limit of locked memory: `ulimit -l unlimited`",
                    libc::EFAULT => {
                        "; that is no memory of the host, and no peer-memory module (nvidia-peermem) knows it"
                    }
                    libc::EOPNOTSUPP => "; the device or its driver cannot do this",
                    _ => "",
                };
                Err(failed(call, errno, &format!("{bytes} bytes on {}", pd.context.name), remedy))
            }
        }
    }

    /// The key for this rank's card.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is live.
        unsafe { self.raw.as_ref().lkey }
    }

    /// The key for peers' cards.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the region is live.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: freed once; queues that use it held a reference.
        unsafe { ib::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}

/// A completion queue.
#[derive(Debug)]
struct Cq {
    raw: NonNull<ib::ibv_cq>,
    _context: Arc<Context>,
}

impl Cq {
    fn new(context: &Arc<Context>, entries: u32) -> Result<Cq> {
        // SAFETY: the context is open; no channel, no user data.
        let raw =
            unsafe { ib::ibv_create_cq(context.raw.as_ptr(), entries as c_int, null_mut(), null_mut(), 0) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            failed("ibv_create_cq", errno(), &format!("{entries} entries on {}", context.name), "")
        })?;
        Ok(Cq { raw, _context: context.clone() })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: destroyed once, after its queue pair.
        unsafe { ib::ibv_destroy_cq(self.raw.as_ptr()) };
    }
}

/// The address of a connection's other end.
#[derive(Debug, Clone, Copy)]
pub(super) struct RemoteQp {
    /// Its queue pair.
    pub number: u32,
    /// Its first packet number.
    pub psn: u32,
    /// Its GID, with the index of ours; none where InfiniBand routes by LID.
    pub gid: Option<(Ipv6Addr, u8)>,
    /// Its LID, on InfiniBand.
    pub lid: u16,
    /// The code of the path's MTU.
    pub mtu: u32,
}

/// How a connection behaves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Behaviour {
    pub port: u8,
    pub traffic_class: u8,
    pub service_level: u8,
    pub retry_count: u8,
    pub ack_timeout: u8,
}

/// A reliable connection, with its completion queue.
#[derive(Debug)]
pub(super) struct Qp {
    raw: NonNull<ib::ibv_qp>,
    cq: Cq,
    _pd: Arc<Pd>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Qp {}
// SAFETY: providers lock a queue pair and a completion queue in each call (ibv_post_send(3) and
// ibv_poll_cq(3) are thread-safe).
unsafe impl Sync for Qp {}

/// One RDMA write, or an empty message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Write {
    /// Returned with its completion.
    pub id: u64,
    /// The payload.
    pub from: From,
    /// The peer's address.
    pub to: u64,
    /// The peer's key.
    pub rkey: u32,
    /// Whether it generates a completion; all writes before it are complete then too.
    pub signalled: bool,
}

/// The payload of a [`Write`].
#[derive(Debug, Clone, Copy)]
pub(super) enum From {
    /// Registered memory: address, bytes, key.
    Memory(u64, u32, u32),
    /// A word, copied when it is posted.
    Word(u64),
    /// Nothing: a message without contents, for which the peer has called [`Qp::receive`].
    Nothing,
}

/// A completion.
#[derive(Debug, Clone, Copy)]
pub(super) struct Completion {
    /// The write's id.
    pub id: u64,
    /// The status and the vendor's code, where it failed.
    pub error: Option<(u32, u32)>,
}

impl Qp {
    /// A connection for `depth` writes in flight and an empty message each way, not connected yet.
    /// Its completion queue has room for all of them, so that it cannot overrun.
    pub fn new(pd: &Arc<Pd>, depth: u32) -> Result<Qp> {
        let cq = Cq::new(&pd.context, depth + 2)?;
        // SAFETY: pointers and numbers, for which zeroes are valid.
        let mut attributes: ib::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        attributes.send_cq = cq.raw.as_ptr();
        attributes.recv_cq = cq.raw.as_ptr();
        attributes.qp_type = ib::ibv_qp_type::IBV_QPT_RC;
        attributes.cap = ib::ibv_qp_cap {
            max_send_wr: depth + 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: size_of::<u64>() as u32,
        };
        // SAFETY: the domain and the completion queue are live and outlive the pair.
        let raw = NonNull::new(unsafe { ib::ibv_create_qp(pd.raw.as_ptr(), &mut attributes) });
        let raw = raw.ok_or_else(|| {
            let operation = format!("{depth} writes in flight on {}", pd.context.name);
            failed("ibv_create_qp", errno(), &operation, "; a smaller EPOXIDE_RDMA_QUEUE_DEPTH may do")
        })?;
        Ok(Qp { raw, cq, _pd: pd.clone() })
    }

    /// Its number, which the other end uses.
    pub fn number(&self) -> u32 {
        // SAFETY: the pair is live.
        unsafe { self.raw.as_ref().qp_num }
    }

    /// Connects: to initialised, ready to receive, ready to send.
    pub fn connect(&mut self, route: &RemoteQp, behaviour: &Behaviour, psn: u32) -> Result<()> {
        // SAFETY: numbers and a union of bytes, for which zeroes are valid.
        let zero: ib::ibv_qp_attr = unsafe { std::mem::zeroed() };
        let mut init = zero;
        init.qp_state = ib::ibv_qp_state::IBV_QPS_INIT;
        init.port_num = behaviour.port;
        init.qp_access_flags = access::IBV_ACCESS_REMOTE_WRITE.0;
        let to_init = mask::IBV_QP_STATE.0
            | mask::IBV_QP_PKEY_INDEX.0
            | mask::IBV_QP_PORT.0
            | mask::IBV_QP_ACCESS_FLAGS.0;
        self.modify(&mut init, to_init, "initialise a connection")?;

        let mut rtr = zero;
        rtr.qp_state = ib::ibv_qp_state::IBV_QPS_RTR;
        rtr.path_mtu = route.mtu;
        rtr.dest_qp_num = route.number;
        rtr.rq_psn = route.psn;
        // Nothing reads, but some drivers reject 0.
        rtr.max_dest_rd_atomic = 1;
        rtr.min_rnr_timer = 12;
        rtr.ah_attr.port_num = behaviour.port;
        rtr.ah_attr.sl = behaviour.service_level;
        rtr.ah_attr.dlid = route.lid;
        if let Some((gid, own_index)) = route.gid {
            rtr.ah_attr.is_global = 1;
            rtr.ah_attr.grh.dgid = ib::ibv_gid { raw: gid.octets() };
            rtr.ah_attr.grh.sgid_index = own_index;
            rtr.ah_attr.grh.hop_limit = 64;
            rtr.ah_attr.grh.traffic_class = behaviour.traffic_class;
        }
        let to_rtr = mask::IBV_QP_STATE.0
            | mask::IBV_QP_AV.0
            | mask::IBV_QP_PATH_MTU.0
            | mask::IBV_QP_DEST_QPN.0
            | mask::IBV_QP_RQ_PSN.0
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC.0
            | mask::IBV_QP_MIN_RNR_TIMER.0;
        self.modify(&mut rtr, to_rtr, "address the peer")?;

        let mut rts = zero;
        rts.qp_state = ib::ibv_qp_state::IBV_QPS_RTS;
        rts.timeout = behaviour.ack_timeout;
        rts.retry_cnt = behaviour.retry_count;
        rts.rnr_retry = behaviour.retry_count;
        rts.sq_psn = psn;
        rts.max_rd_atomic = 1;
        let to_rts = mask::IBV_QP_STATE.0
            | mask::IBV_QP_TIMEOUT.0
            | mask::IBV_QP_RETRY_CNT.0
            | mask::IBV_QP_RNR_RETRY.0
            | mask::IBV_QP_SQ_PSN.0
            | mask::IBV_QP_MAX_QP_RD_ATOMIC.0;
        self.modify(&mut rts, to_rts, "get ready to send")
    }

    fn modify(&mut self, attributes: &mut ib::ibv_qp_attr, which: u32, operation: &str) -> Result<()> {
        // SAFETY: the pair is live, and the mask names the attributes that were set.
        let code = unsafe { ib::ibv_modify_qp(self.raw.as_ptr(), attributes, which as c_int) };
        let remedy = "; do both ends have a GID of the same type and network, and a route to each other?";
        check(code, "ibv_modify_qp", operation, remedy)
    }

    /// Posts a receive for one empty message; its completion has `id`.
    pub fn receive(&self, id: u64) -> Result<()> {
        let operation = "await the goodbye";
        // SAFETY: pointers and numbers, for which zeroes are valid: no buffers.
        let mut request: ib::ibv_recv_wr = unsafe { std::mem::zeroed() };
        request.wr_id = id;
        let mut refused = null_mut();
        // SAFETY: as in `post`.
        let receive = unsafe { (*self.raw.as_ref().context).ops.post_recv };
        let Some(receive) = receive else { return Err(failed("ibv_post_recv", libc::ENOSYS, operation, "")) };
        // SAFETY: the pair is live; the request lives until the call has returned, which keeps
        // nothing of it.
        let code = unsafe { receive(self.raw.as_ptr(), &mut request, &mut refused) };
        check(code, "ibv_post_recv", operation, "")
    }

    /// Posts the writes as one chain, in one call. After an error some of them may be posted.
    pub fn post(&self, writes: &[Write], operation: &str) -> Result<()> {
        let word = |write: &Write| match write.from {
            From::Word(word) => word,
            From::Memory(..) | From::Nothing => 0,
        };
        let words: Vec<u64> = writes.iter().map(word).collect();
        let mut pieces: Vec<ib::ibv_sge> = writes
            .iter()
            .zip(&words)
            .map(|(write, word)| match write.from {
                From::Word(_) => {
                    let addr = std::ptr::from_ref(word) as u64;
                    ib::ibv_sge { addr, length: size_of::<u64>() as u32, lkey: 0 }
                }
                From::Memory(addr, length, lkey) => ib::ibv_sge { addr, length, lkey },
                From::Nothing => ib::ibv_sge { addr: 0, length: 0, lkey: 0 },
            })
            .collect();
        let mut requests: Vec<ib::ibv_send_wr> = writes
            .iter()
            .zip(&mut pieces)
            .map(|(write, piece)| {
                // SAFETY: pointers, numbers and unions of them, for which zeroes are valid.
                let mut request: ib::ibv_send_wr = unsafe { std::mem::zeroed() };
                request.wr_id = write.id;
                request.sg_list = piece;
                (request.num_sge, request.opcode) = match write.from {
                    From::Nothing => (0, ib::ibv_wr_opcode::IBV_WR_SEND),
                    From::Word(_) | From::Memory(..) => (1, ib::ibv_wr_opcode::IBV_WR_RDMA_WRITE),
                };
                if write.signalled {
                    request.send_flags |= ib::ibv_send_flags::IBV_SEND_SIGNALED.0;
                }
                if let From::Word(_) = write.from {
                    request.send_flags |= ib::ibv_send_flags::IBV_SEND_INLINE.0;
                }
                request.wr.rdma.remote_addr = write.to;
                request.wr.rdma.rkey = write.rkey;
                request
            })
            .collect();
        for next in (1..requests.len()).rev() {
            let (before, after) = requests.split_at_mut(next);
            if let (Some(last), Some(first)) = (before.last_mut(), after.first_mut()) {
                last.next = first;
            }
        }
        let Some(first) = requests.first_mut() else { return Ok(()) };
        let first: *mut ib::ibv_send_wr = first;
        let mut refused = null_mut();
        // SAFETY: the pair is live and so is its context, whose table has this entry in every
        // provider (else it is an error, below).
        let post = unsafe { (*self.raw.as_ref().context).ops.post_send };
        let Some(post) = post else { return Err(failed("ibv_post_send", libc::ENOSYS, operation, "")) };
        // SAFETY: the chain, its pieces and the words live until the call has returned, which keeps
        // none of them.
        let code = unsafe { post(self.raw.as_ptr(), first, &mut refused) };
        check(code, "ibv_post_send", operation, "")
    }

    /// Takes completions; none where there are none.
    pub fn poll(&self) -> Result<Vec<Completion>> {
        let mut entries = [ib::ibv_wc::default(); 16];
        // SAFETY: as in `post`.
        let poll = unsafe { (*self.raw.as_ref().context).ops.poll_cq };
        let Some(poll) = poll else { return Err(failed("ibv_poll_cq", libc::ENOSYS, "poll", "")) };
        // SAFETY: the completion queue is live, and `entries` has room for the requested number.
        let count = unsafe { poll(self.cq.raw.as_ptr(), entries.len() as c_int, entries.as_mut_ptr()) };
        let count = usize::try_from(count).map_err(|_| {
            failed("ibv_poll_cq", count.saturating_abs(), "poll", "; the completion queue is broken")
        })?;
        let completion = |entry: &ib::ibv_wc| Completion { id: entry.wr_id(), error: entry.error() };
        Ok(entries.iter().take(count).map(completion).collect())
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: destroyed once, before its completion queue.
        unsafe { ib::ibv_destroy_qp(self.raw.as_ptr()) };
    }
}

/// The meaning of a completion's status.
pub(super) fn status_text(status: u32) -> String {
    // SAFETY: returns a static string for every value.
    let text = unsafe { CStr::from_ptr(ib::ibv_wc_status_str(status)) };
    text.to_string_lossy().into_owned()
}
