//! A communicator's state, and the turn that admits one thread to its calls.
//!
//! One thread at a time is inside NCCL with a communicator: it holds the *turn*. NCCL does not lock
//! communicators itself, and operations have to be the same on every rank, in the same order. The
//! state has a lock that is never held during a blocking call, so that `abort` gets it at once. A
//! thread that waits for NCCL's progress does so on the state's condition variable, and returns as
//! soon as the communicator is aborted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use epoxide_base::deadline;

use super::debug_info::{self, Report};
use super::ffi::{Code, Comm, Functions};
use super::in_flight::UnderWay;
use super::library::Library;
use super::registration::Registrations;
use crate::driver::Device;
use crate::error::{Error, Result};
use crate::lock::lock;
use epoxide::internal::driver::driver;
use epoxide_group::internal::Recorder;

/// The first pause between two questions for progress; each is twice as long, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_micros(20);
/// Short against a deadline and human perception, long enough to cost nothing.
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// The phase of a communicator.
///
/// | from | by | to |
/// |---|---|---|
/// | `Creating` | NCCL has found all ranks | `Ready` |
/// | `Ready` | `finalize` | `Finalizing` |
/// | `Finalizing` | NCCL has flushed all operations | `Finalized` |
/// | `Creating`, `Ready`, `Finalizing` | `abort`, an error, a deadline, drop | `Aborted` |
///
/// `Finalized` and `Aborted` are final: NCCL has released the communicator, or does so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    Creating,
    Ready,
    Finalizing,
    Finalized,
    Aborted(Arc<str>),
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// The call that the holder of the turn is in, if any.
    inside: Option<&'static str>,
    splits: u64,
}

/// Name, place and deadlines of a communicator.
pub(super) struct Identity {
    pub name: String,
    pub rank: u32,
    pub size: u32,
    pub timeout: Duration,
    pub close_timeout: Duration,
    pub recorded: usize,
    pub writes_debug_info: bool,
}

/// State shared by a communicator, its operations and its watchdog.
pub(super) struct Core {
    pub library: Arc<Library>,
    pub device: Device,
    pub identity: Identity,
    pub recorder: Recorder,
    pub under_way: UnderWay,
    pub registrations: Registrations,
    /// NCCL's handle; null before it exists, and once it was released.
    comm: AtomicPtr<Comm>,
    state: Mutex<State>,
    /// Each change of `phase` and `inside`.
    changed: Condvar,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("name", &self.identity.name)
            .field("rank", &self.identity.rank)
            .field("size", &self.identity.size)
            .field("phase", &self.phase())
            .finish_non_exhaustive()
    }
}

/// The turn: this thread alone calls NCCL with the communicator.
pub(super) struct Turn<'a> {
    core: &'a Core,
    what: &'static str,
    deadline: Instant,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.core.state().inside = None;
        self.core.changed.notify_all();
    }
}

/// How a communicator is released to NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Release {
    /// Ends work that still runs on the device.
    Abort,
    /// No operation runs any more.
    Destroy,
}

impl Core {
    pub fn new(
        library: Arc<Library>,
        device: Device,
        identity: Identity,
        phase: Phase,
        comm: *mut Comm,
    ) -> Arc<Core> {
        let Identity { name, rank, size, recorded, .. } = &identity;
        let recorder = Recorder::new(name, *rank, *size, *recorded, None);
        Arc::new(Core {
            library,
            device,
            recorder,
            under_way: UnderWay::default(),
            registrations: Registrations::default(),
            identity,
            comm: AtomicPtr::new(comm),
            state: Mutex::new(State { phase, inside: None, splits: 0 }),
            changed: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub fn phase(&self) -> Phase {
        self.state().phase.clone()
    }

    pub fn comm(&self) -> *mut Comm {
        self.comm.load(Ordering::Acquire)
    }

    pub fn functions(&self) -> &Functions {
        &self.library.functions
    }

    /// The error of `operation`, number `sequence` here.
    pub fn error(&self, operation: &'static str, sequence: u64, reason: impl Into<String>) -> Error {
        Error::Group {
            group: self.identity.name.clone(),
            rank: self.identity.rank,
            operation,
            sequence,
            peers: Vec::new(),
            reason: reason.into(),
        }
    }

    /// Why nothing can be done in this phase, if that is so.
    pub fn unusable(&self, operation: &'static str, phase: &Phase) -> Option<Error> {
        let reason = match phase {
            Phase::Aborted(reason) => {
                format!("the communicator was aborted, make a new one of the ranks that are left: {reason}")
            }
            Phase::Finalizing | Phase::Finalized => "the communicator was finalized".to_owned(),
            Phase::Creating | Phase::Ready => return None,
        };
        Some(self.error(operation, 0, reason))
    }

    // ---- Calls ----

    /// Runs `body` with the turn. An error of `body` ends the communicator, unless it is a wrong
    /// argument. A missed turn does not end it.
    pub fn with_turn<T>(
        self: &Arc<Core>,
        what: &'static str,
        deadline: Instant,
        body: impl FnOnce(&Turn<'_>) -> Result<T>,
    ) -> Result<T> {
        let turn = self.turn(what, deadline)?;
        let outcome = body(&turn);
        // An abort waits for the thread that is inside.
        drop(turn);
        outcome.map_err(|error| self.fail(error))
    }

    /// Waits for the turn; an error once the communicator is of no use, or at `deadline`.
    fn turn(&self, what: &'static str, deadline: Instant) -> Result<Turn<'_>> {
        let mut state = self.state();
        loop {
            if let Some(error) = self.unusable(what, &state.phase) {
                return Err(error);
            }
            let Some(other) = state.inside else {
                state.inside = Some(what);
                return Ok(Turn { core: self, what, deadline });
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let reason = format!("its turn did not come: another thread is in {other}");
                return Err(self.error(what, 0, reason));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Runs `call` with the communicator's device current.
    pub fn on_device<T>(&self, call: impl FnOnce() -> T) -> Result<T> {
        let (mut call, mut value) = (Some(call), None);
        driver(&self.device).run_current(&mut || value = call.take().map(|call| call()))?;
        value.ok_or_else(|| Error::internal("nccl", "the device did not run the call"))
    }

    /// Pauses, longer each time, and queries NCCL for the state of `comm`. An abort ends the pause
    /// with its error; an error at `deadline` as well.
    ///
    /// # Safety
    /// `comm` is this communicator, or one that only the calling thread has.
    unsafe fn query_after_pause(
        &self,
        what: &'static str,
        comm: *mut Comm,
        pause: &mut Duration,
        deadline: Instant,
    ) -> Result<Code> {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut state = self.state();
        let unchanged = |state: &mut State| !matches!(state.phase, Phase::Aborted(_));
        state = self
            .changed
            .wait_timeout_while(state, (*pause).min(left), unchanged)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        *pause = (*pause * 2).min(LONGEST_PAUSE);
        if let Phase::Aborted(_) = state.phase {
            return Err(self.aborted(what, &state.phase));
        }
        // SAFETY: under the lock, and not aborted, so the communicator is not freed meanwhile.
        let code = unsafe { self.query(comm) };
        if code == Code::IN_PROGRESS && left.is_zero() {
            let reason =
                "NCCL is still in progress at the deadline; a peer may not have come, hang or have died";
            return Err(self.error(what, 0, reason));
        }
        Ok(code)
    }

    fn aborted(&self, what: &'static str, phase: &Phase) -> Error {
        self.unusable(what, phase).unwrap_or_else(|| self.error(what, 0, "the communicator was aborted"))
    }

    /// NCCL's present result code for a communicator. NCCL reads it from a word of the
    /// communicator, without waiting.
    ///
    /// # Safety
    /// `comm` is a communicator that is not freed meanwhile, and no other thread is in a call of
    /// it.
    unsafe fn query(&self, comm: *mut Comm) -> Code {
        let mut state = Code::SUCCESS;
        // SAFETY: the out pointer is valid; the rest is the caller's promise.
        let code = unsafe { (self.functions().ncclCommGetAsyncError)(comm, &mut state) };
        if code == Code::SUCCESS { state } else { code }
    }

    /// An error of NCCL's threads, if any. None while a thread is inside NCCL, because that thread
    /// gets it.
    pub fn check_async(&self) -> Result<()> {
        match self.async_code() {
            None | Some(Code::SUCCESS | Code::IN_PROGRESS) => Ok(()),
            Some(code) => Err(self.library.error("ncclCommGetAsyncError", code)),
        }
    }

    /// NCCL's result code for the communicator, if it can be queried.
    fn async_code(&self) -> Option<Code> {
        let state = self.state();
        let comm = self.comm();
        if comm.is_null() || state.inside.is_some() {
            return None;
        }
        // SAFETY: no thread is inside, and the handle is taken under the lock, before the
        // communicator is freed.
        Some(unsafe { self.query(comm) })
    }

    // ---- Dumps ----

    /// NCCL's statistics of its device memory, if its version has them and they can be queried.
    fn memory_statistics(&self) -> Vec<(&'static str, u64)> {
        let names = [
            "nccl_memory_suspendable",
            "nccl_memory_suspended",
            "nccl_memory_persistent",
            "nccl_memory_total",
        ];
        let state = self.state();
        let comm = self.comm();
        let Some(query) = self.functions().ncclCommMemStats else { return Vec::new() };
        if comm.is_null() || state.inside.is_some() || state.phase != Phase::Ready {
            return Vec::new();
        }
        let mut found = Vec::new();
        for (number, name) in (0..).zip(names) {
            let mut bytes = 0;
            // SAFETY: a live communicator, with no thread in a call of it, that is not freed while
            // the state is locked; a valid out pointer.
            if unsafe { query(comm, number, &mut bytes) } == Code::SUCCESS {
                found.push((name, bytes));
            }
        }
        found
    }

    /// State of the communicator as text: from this library, and from NCCL as far as its version
    /// gives it.
    pub fn dump(&self) -> BTreeMap<String, String> {
        let phase = match self.phase() {
            Phase::Aborted(reason) => format!("aborted: {reason}"),
            phase => format!("{phase:?}").to_lowercase(),
        };
        let mut dump = BTreeMap::from([
            ("name".to_owned(), self.identity.name.clone()),
            ("rank".to_owned(), self.identity.rank.to_string()),
            ("size".to_owned(), self.identity.size.to_string()),
            ("state".to_owned(), phase),
            ("device".to_owned(), format!("{} {}", self.device.info().name, self.device.info().ordinal)),
            ("nccl_version".to_owned(), self.library.version_text()),
            ("nccl_library".to_owned(), self.library.path().display().to_string()),
            ("splits".to_owned(), self.splits().to_string()),
            ("registrations".to_owned(), self.registrations.memory().len().to_string()),
            ("operations_under_way".to_owned(), {
                let each = self.under_way.all().into_iter();
                each.map(|it| format!("{} #{}", it.operation.name(), it.sequence))
                    .collect::<Vec<_>>()
                    .join(", ")
            }),
            ("nccl_last_error".to_owned(), self.library.last_error(std::ptr::null_mut())),
        ]);
        if let Some(code) = self.async_code() {
            dump.insert("nccl_async_error".to_owned(), self.library.code_text(code));
        }
        for (name, bytes) in self.memory_statistics() {
            dump.insert(name.to_owned(), bytes.to_string());
        }
        dump
    }

    /// Writes the state of the communicator to the file that the environment names, if any.
    pub fn write_debug_info(&self, reason: &str) {
        let Identity { name, rank, size, .. } = &self.identity;
        let Some(path) = debug_info::path(*rank) else { return };
        let (nccl, operations) = (self.dump(), self.recorder.entries());
        Report { group: name, rank: *rank, size: *size, reason, nccl, operations }.write(&path);
    }

    pub fn count_split(&self) {
        self.state().splits += 1;
    }

    pub fn splits(&self) -> u64 {
        self.state().splits
    }

    // ---- Ends ----

    /// Releases all registrations, in the order they were made. The caller must be the only user of
    /// the communicator.
    pub fn release_registrations(&self, comm: *mut Comm) {
        let registrations = self.registrations.take_all();
        let Some(deregister) = self.functions().ncclCommDeregister else { return };
        for registered in registrations {
            // SAFETY: the communicator is live, and the handle is of it and was not released.
            let code = unsafe { deregister(comm, registered.handle.0) };
            if code.is_failure() {
                tracing::debug!("{}", self.library.error("ncclCommDeregister", code));
            }
        }
    }

    /// Aborts the communicator for `reason`: every operation under way here ends with an error, and
    /// later ones fail. The first reason stays; a second call does not wait.
    ///
    /// # Errors
    /// If NCCL has not released it within `close_timeout`: it is leaked, with a thread.
    pub fn abort(self: &Arc<Core>, reason: &str) -> Result<()> {
        self.give_up(reason, true)
    }

    /// [`Core::abort`] of a communicator that is not needed any more, without a report.
    pub fn end(self: &Arc<Core>, reason: &str) -> Result<()> {
        self.give_up(reason, false)
    }

    /// [`Core::abort`]; with `report`, also dumps the communicator's state to the places that the
    /// environment names.
    fn give_up(self: &Arc<Core>, reason: &str, report: bool) -> Result<()> {
        {
            let mut state = self.state();
            match state.phase {
                Phase::Aborted(_) | Phase::Finalized => return Ok(()),
                Phase::Creating | Phase::Ready | Phase::Finalizing => {}
            }
            state.phase = Phase::Aborted(reason.into());
            self.changed.notify_all();
        }
        // Before the release: NCCL can still be queried, and hanging operations are still listed.
        if report {
            self.recorder.dump(reason);
            if self.identity.writes_debug_info {
                self.write_debug_info(reason);
            }
        }
        self.release(Release::Abort)
    }

    /// An error that ends the communicator, as those of NCCL and deadlines do; a wrong argument
    /// does not.
    pub fn fail(self: &Arc<Core>, error: Error) -> Error {
        if matches!(
            error,
            Error::Nccl { .. } | Error::Group { .. } | Error::Cuda { .. } | Error::VirtualFault(_)
        ) && let Err(left_behind) = self.abort(&error.to_string())
        {
            tracing::error!("{left_behind}");
        }
        error
    }

    /// Ends it in order, after NCCL has flushed its operations.
    pub fn destroy(self: &Arc<Core>) -> Result<()> {
        {
            let mut state = self.state();
            if let Phase::Aborted(_) = state.phase {
                return Err(self.aborted("finalize", &state.phase));
            }
            state.phase = Phase::Finalized;
        }
        self.changed.notify_all();
        self.release(Release::Destroy)
    }

    /// The next phase, unless the communicator was given up meanwhile.
    pub fn advance(&self, to: Phase) -> Result<()> {
        let mut state = self.state();
        if let Some(error) = self.unusable("create", &state.phase) {
            return Err(error);
        }
        state.phase = to;
        self.changed.notify_all();
        Ok(())
    }

    /// Stores the handle from NCCL; false if the communicator was aborted meanwhile.
    pub fn adopt(&self, comm: *mut Comm) -> bool {
        let mut state = self.state();
        if state.phase != Phase::Creating {
            return false;
        }
        self.comm.store(comm, Ordering::Release);
        state.phase = Phase::Ready;
        self.changed.notify_all();
        true
    }

    /// Where NCCL is to write the handle.
    pub fn handle(&self) -> *mut *mut Comm {
        self.comm.as_ptr()
    }

    /// Waits until the phase is no longer `Creating`; an error at `deadline`.
    pub fn await_created(&self, deadline: Instant) -> Result<()> {
        let mut state = self.state();
        while state.phase == Phase::Creating {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.error(
                    "create",
                    0,
                    "NCCL has not made the communicator within its timeout; a peer may not have come",
                ));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        match self.unusable("create", &state.phase) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Releases the communicator to NCCL, on its own thread: NCCL waits for its threads and for the
    /// device there.
    fn release(self: &Arc<Core>, how: Release) -> Result<()> {
        let core = self.clone();
        let (done, ended) = channel();
        let thread = std::thread::Builder::new()
            .name("epoxide-nccl-end".into())
            .spawn(move || {
                core.release_here(how);
                // The waiting thread may have timed out.
                let _ = done.send(());
            })
            .map_err(|error| {
                let reason = format!("a communicator is left as it is: {error}");
                Error::os("spawn", reason).with_errno(&error)
            })?;
        let timeout = self.identity.close_timeout;
        if let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(timeout) {
            let reason = format!(
                "NCCL has not let go of the communicator within {timeout:?}: it is left behind, with a thread"
            );
            return Err(self.error(if how == Release::Abort { "abort" } else { "destroy" }, 0, reason));
        }
        thread.join().map_err(|_| self.error("abort", 0, "its thread has panicked"))
    }

    fn release_here(&self, how: Release) {
        let stuck = !self.await_nobody_inside();
        let comm = {
            let _asking = self.state();
            self.comm.swap(std::ptr::null_mut(), Ordering::AcqRel)
        };
        if comm.is_null() {
            return;
        }
        let outcome = self.on_device(|| {
            // A thread inside NCCL still uses the registrations' lists; NCCL frees them with the
            // communicator.
            if !stuck {
                self.release_registrations(comm);
            }
            // SAFETY: a live communicator that is freed only here, since the handle was taken. No
            // thread enters a call of it any more. One thread may be stuck in a call. NCCL's abort
            // makes that call return, and the thread does not use the communicator after it.
            unsafe {
                match how {
                    Release::Abort => (self.functions().ncclCommAbort)(comm),
                    Release::Destroy => (self.functions().ncclCommDestroy)(comm),
                }
            }
        });
        match outcome {
            Ok(Code::SUCCESS | Code::IN_PROGRESS) => {}
            Ok(code) => tracing::debug!(
                "{:?} of {}: {}",
                how,
                self.identity.name,
                self.library.error("ncclCommAbort", code)
            ),
            Err(error) => tracing::warn!("a communicator is left behind: {error}"),
        }
    }

    /// Waits until the thread inside NCCL has left. It leaves at its next poll, unless a call of
    /// NCCL blocks.
    fn await_nobody_inside(&self) -> bool {
        let until = deadline(self.identity.close_timeout / 4);
        let mut state = self.state();
        while state.inside.is_some() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    pub fn weak(self: &Arc<Core>) -> Weak<Core> {
        Arc::downgrade(self)
    }
}

impl Turn<'_> {
    /// One call of NCCL on the device, polled until it is no longer in progress.
    pub fn call(&self, name: &'static str, call: impl FnOnce(&Functions, *mut Comm) -> Code) -> Result<()> {
        let comm = self.core.comm();
        let code = self.core.on_device(|| call(self.core.functions(), comm))?;
        self.settle(name, comm, code)
    }

    /// Follows `call`, which returned `code`, until NCCL reports its end.
    pub fn settle(&self, call: &'static str, comm: *mut Comm, mut code: Code) -> Result<()> {
        let mut pause = FIRST_PAUSE;
        while code == Code::IN_PROGRESS {
            // SAFETY: a communicator of this turn.
            code = unsafe { self.core.query_after_pause(self.what, comm, &mut pause, self.deadline)? };
        }
        if code == Code::SUCCESS {
            return Ok(());
        }
        // After an abort, errors of a call come from the abort.
        match self.core.phase() {
            phase @ Phase::Aborted(_) => Err(self.core.aborted(self.what, &phase)),
            _ => Err(self.core.library.error(call, code)),
        }
    }
}

impl Turn<'_> {
    /// The handle that NCCL writes, which some versions do a moment after they are done; null if it
    /// is not written by the deadline.
    pub fn await_handle(&self, written: &AtomicPtr<Comm>) -> Result<*mut Comm> {
        let mut pause = FIRST_PAUSE;
        loop {
            let handle = written.load(Ordering::Acquire);
            if !handle.is_null() || Instant::now() >= self.deadline {
                return Ok(handle);
            }
            // SAFETY: a communicator of this turn.
            unsafe { self.core.query_after_pause(self.what, self.core.comm(), &mut pause, self.deadline)? };
        }
    }
}

/// Makes NCCL's communicator in a call that blocks: on its own thread, which is leaked if it does
/// not end.
pub(super) fn create_blocking(
    core: &Arc<Core>,
    create: impl FnOnce(&Functions, *mut *mut Comm) -> Code + Send + 'static,
) -> Result<()> {
    let core = core.clone();
    let run = move || {
        let mut comm = std::ptr::null_mut();
        let made = core.on_device(|| create(core.functions(), &mut comm));
        let failure = match made {
            Ok(Code::SUCCESS) => {
                if !core.adopt(comm) {
                    // SAFETY: NCCL has just made it, and no other thread has it.
                    let aborted = core.on_device(|| unsafe { (core.functions().ncclCommAbort)(comm) });
                    tracing::debug!("a communicator that came too late was aborted: {aborted:?}");
                }
                return;
            }
            Ok(code) => core.library.error("ncclCommInitRank", code),
            Err(error) => error,
        };
        // NCCL has freed the communicator after its error.
        let _ = core.abort(&failure.to_string());
    };
    let thread = std::thread::Builder::new().name("epoxide-nccl-create".into());
    thread.spawn(run).map(drop).map_err(|error| Error::system("spawn", error))
}
