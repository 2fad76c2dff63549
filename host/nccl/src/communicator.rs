//! [`Communicator`]: creation, splits, registered memory, abort and release.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::AtomicPtr;
use std::time::{Duration, Instant};

use epoxide_base::deadline;

use super::config::{Config, Prepared};
use super::core::{Core, Identity, Phase, create_blocking};
use super::ffi::{Code, Comm, NO_COLOR};
use super::library::Library;
use super::registration::{Handle, Registration};
use super::unique_id::UniqueId;
use super::watchdog::Guard;
use crate::driver::{Device, Memory};
use crate::error::{Error, Result};
use epoxide_group::{ProcessGroup, Store};

/// Ranks with a device each, among which NCCL moves and reduces device tensors.
///
/// All methods may be called from any thread; NCCL is entered by one at a time. Every rank makes
/// the same operations in the same order. NCCL's errors and missed deadlines end the communicator:
/// from then on every use returns an error with the reason. The remaining ranks can only make a new
/// one. Wrong arguments do not end it.
///
/// [`Communicator::abort`] works while another thread is in any other method, which then returns an
/// error.
///
/// Dropping a communicator ends it without the other ranks: the drop waits for its operations, up
/// to [`Config::close_timeout`], and aborts. [`Communicator::finalize`] ends it together with them.
/// Neither waits without end. If NCCL does not return, the communicator is leaked together with a
/// thread, and the log records it.
#[derive(Debug)]
pub struct Communicator {
    core: Arc<Core>,
    config: Config,
    created_by: Instant,
    // Dropped before the communicator that it watches.
    watchdog: Option<Guard>,
}

impl Communicator {
    /// Joins the communicator of `id` with `device`; waits for all ranks. Collective.
    ///
    /// # Errors
    /// Wrong arguments; [`Error::Unavailable`] if the library lacks a feature of `config`;
    /// [`Error::Nccl`]; [`Error::Group`] if a rank does not join within [`Config::timeout`].
    pub fn new(
        library: &Arc<Library>,
        device: &Device,
        id: &UniqueId,
        rank: u32,
        size: u32,
        config: Config,
    ) -> Result<Communicator> {
        let communicator = Communicator::start(library, device, id, rank, size, config)?;
        communicator.wait_ready()?;
        Ok(communicator)
    }

    /// [`Communicator::new`] without the wait: [`Communicator::wait_ready`] waits, and so does the
    /// first operation.
    ///
    /// # Errors
    /// [`Error::Argument`] where an argument breaks a rule, and errors of NCCL.
    pub fn start(
        library: &Arc<Library>,
        device: &Device,
        id: &UniqueId,
        rank: u32,
        size: u32,
        config: Config,
    ) -> Result<Communicator> {
        if size == 0 || size > c_int::MAX as u32 {
            return Err(Error::argument("size", size, "a communicator has at least one rank"));
        }
        if rank >= size {
            return Err(Error::argument(
                "rank",
                rank,
                format!("ranks of a communicator of {size} are 0..{size}"),
            ));
        }
        library.check_device(device)?;
        let prepared = Prepared::new(&config, library)?;
        let core = Core::new(
            library.clone(),
            device.clone(),
            identity(&config, rank, size),
            Phase::Creating,
            std::ptr::null_mut(),
        );
        let (size, rank, id) = (size as c_int, rank as c_int, id.raw());
        match library.functions.ncclCommInitRankConfig {
            Some(create) if !config.blocking => {
                let mut prepared = prepared;
                let code = core.on_device(|| {
                    // SAFETY: NCCL writes the handle before it returns, and copies the
                    // configuration and its texts.
                    unsafe { create(core.handle(), size, id, rank, &mut prepared.raw) }
                })?;
                if code.is_failure() {
                    return Err(core.fail(library.error("ncclCommInitRankConfig", code)));
                }
            }
            Some(create) => create_blocking(&core, move |_, comm| {
                // The other thread owns the whole configuration, with the texts that it points to.
                let mut prepared = prepared;
                // SAFETY: valid out and in pointers.
                unsafe { create(comm, size, id, rank, &mut prepared.raw) }
            })?,
            // Before 2.14 there was no configuration, and all calls blocked.
            None => create_blocking(&core, move |functions, comm| {
                // SAFETY: a valid out pointer.
                unsafe { (functions.ncclCommInitRank)(comm, size, id, rank) }
            })?,
        }
        Communicator::assemble(core, config)
    }

    fn assemble(core: Arc<Core>, config: Config) -> Result<Communicator> {
        let created_by = deadline(config.timeout);
        let mut communicator = Communicator { core, config, created_by, watchdog: None };
        if let Some(watchdog) = &communicator.config.watchdog {
            communicator.watchdog = Some(Guard::start(&communicator.core, watchdog)?);
        }
        Ok(communicator)
    }

    /// The communicator of the ranks that share `store`, named by `config`: another one over the
    /// same store takes another name. See [`Communicator::new`] and [`UniqueId::over_store`].
    ///
    /// # Errors
    /// Those of [`Communicator::new`] and of the store.
    pub fn over_store(
        library: &Arc<Library>,
        device: &Device,
        store: &dyn Store,
        rank: u32,
        size: u32,
        config: Config,
    ) -> Result<Communicator> {
        let id = UniqueId::over_store(library, store, &config.name, rank, config.timeout)?;
        Communicator::new(library, device, &id, rank, size, config)
    }

    /// The communicator of the ranks of `group`. Collective. See [`Communicator::new`] and
    /// [`UniqueId::over_group`].
    ///
    /// # Errors
    /// Those of [`Communicator::new`] and of the group.
    pub fn over_group(
        library: &Arc<Library>,
        device: &Device,
        group: &dyn ProcessGroup,
        config: Config,
    ) -> Result<Communicator> {
        let id = UniqueId::over_group(library, group)?;
        Communicator::new(library, device, &id, group.rank(), group.size(), config)
    }

    /// Waits until NCCL has found all ranks, up to [`Config::timeout`] after the start.
    ///
    /// # Errors
    /// See [`Communicator::new`]; a failure ends the communicator.
    pub fn wait_ready(&self) -> Result<()> {
        let core = &self.core;
        match core.phase() {
            Phase::Creating => {}
            phase => return core.unusable("create", &phase).map_or(Ok(()), Err),
        }
        if self.creation_blocks() {
            return core.await_created(self.created_by).map_err(|error| match core.phase() {
                Phase::Creating => core.fail(error),
                _ => error,
            });
        }
        core.with_turn("create", self.created_by, |turn| {
            // Another thread may have been here.
            if core.phase() == Phase::Creating {
                turn.settle("ncclCommInitRankConfig", core.comm(), Code::IN_PROGRESS)?;
                core.advance(Phase::Ready)?;
            }
            Ok(())
        })
    }

    fn creation_blocks(&self) -> bool {
        self.config.blocking || self.core.functions().ncclCommInitRankConfig.is_none()
    }

    /// The communicator of all ranks that give the same `color`, ordered by `key` and then by rank;
    /// `None` for those without a color. Collective. It takes this one's configuration unless
    /// `config` gives another.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with NCCL before 2.18, [`Error::Argument`] for a color above
    /// 2147483647; others end this communicator.
    pub fn split(
        &self,
        color: Option<u32>,
        key: i32,
        config: Option<Config>,
    ) -> Result<Option<Communicator>> {
        let core = &self.core;
        let split = core.library.require(core.functions().ncclCommSplit, "ncclCommSplit")?;
        let color_number = match color {
            None => NO_COLOR,
            Some(color) => c_int::try_from(color)
                .map_err(|_| Error::argument("color", color, format!("at most {}", c_int::MAX)))?,
        };
        let config = config.unwrap_or_else(|| {
            let name = format!("{}/split{}", self.config.name, core.splits());
            Config { name, ..self.config.clone() }
        });
        let mut prepared = Prepared::new(&config, &core.library)?;
        self.wait_ready()?;
        let made = core.with_turn("split", deadline(self.config.timeout), |turn| {
            // A thread of NCCL's may write to it until the split is over, which is not certain once
            // this has failed: it is left then.
            let child = Arc::new(AtomicPtr::<Comm>::new(std::ptr::null_mut()));
            let leaked = Arc::into_raw(child.clone());
            turn.call("ncclCommSplit", |_, comm| {
                // SAFETY: a live communicator, a configuration that NCCL copies, and an out pointer
                // that is valid until the end of the split, or for ever.
                unsafe { split(comm, color_number, key, child.as_ptr(), &mut prepared.raw) }
            })?;
            let handle: *mut Comm = match color {
                Some(_) => turn.await_handle(&child)?,
                None => std::ptr::null_mut(),
            };
            if handle.is_null() && color.is_some() {
                return Err(core.error("split", 0, "NCCL gave no communicator to a rank with a color"));
            }
            // SAFETY: from `into_raw` above; NCCL has finished writing.
            drop(unsafe { Arc::from_raw(leaked) });
            core.count_split();
            let child = handle;
            if child.is_null() {
                return Ok(None);
            }
            let made = turn
                .settle("ncclCommSplit", child, Code::IN_PROGRESS)
                .and_then(|()| Ok((child, ask_place(core, child)?)));
            // No other thread has its core. Failing the core aborts the unfinished child.
            made.map(Some).map_err(|error| {
                let orphan = identity(&config, 0, 1);
                let orphan =
                    Core::new(core.library.clone(), core.device.clone(), orphan, Phase::Ready, child);
                orphan.fail(error)
            })
        })?;
        let assemble = |(child, (rank, size))| {
            let identity = identity(&config, rank, size);
            let child = Core::new(core.library.clone(), core.device.clone(), identity, Phase::Ready, child);
            Communicator::assemble(child, config)
        };
        made.map(assemble).transpose()
    }

    /// How many times it has been split.
    pub fn splits(&self) -> u64 {
        self.core.splits()
    }

    /// Registers memory, so that NCCL can use it without copying it. The communicator holds it
    /// until it is deregistered.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with NCCL before 2.19; [`Error::Argument`] for another device's
    /// memory; NCCL's, which ends the communicator.
    pub fn register(&self, memory: &Arc<Memory>) -> Result<Registration> {
        let core = &self.core;
        let register = core.library.require(core.functions().ncclCommRegister, "ncclCommRegister")?;
        core.library.require(core.functions().ncclCommDeregister, "ncclCommDeregister")?;
        self.check_device("memory", memory.device())?;
        self.wait_ready()?;
        core.with_turn("register", deadline(core.identity.timeout), |turn| {
            let mut handle = std::ptr::null_mut();
            turn.call("ncclCommRegister", |_, comm| {
                // SAFETY: a live communicator, memory that the registration keeps alive, and a
                // valid out pointer.
                unsafe { register(comm, memory.ptr().0 as *mut c_void, memory.bytes() as usize, &mut handle) }
            })?;
            Ok(core.registrations.keep(Handle(handle), memory.clone()))
        })
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// [`Error::Argument`] for a registration of another communicator; NCCL's, which ends the
    /// communicator.
    pub fn deregister(&self, registration: Registration) -> Result<()> {
        let core = &self.core;
        let deregister = core.library.require(core.functions().ncclCommDeregister, "ncclCommDeregister")?;
        core.with_turn("deregister", deadline(core.identity.timeout), |turn| {
            let registered = core.registrations.take(registration)?;
            turn.call("ncclCommDeregister", |_, comm| {
                // SAFETY: a live communicator, and a handle of it that is released once.
                unsafe { deregister(comm, registered.handle.0) }
            })
        })
    }

    /// The memory that is registered, in the order of registration.
    pub fn registered(&self) -> Vec<Arc<Memory>> {
        self.core.registrations.memory()
    }

    /// Aborts the communicator. Operations under way here end with an error that has `reason`, in
    /// other threads and on the device, and later uses fail with it. Other ranks get an error from
    /// NCCL or at their deadlines. The first reason stays.
    ///
    /// # Errors
    /// If NCCL has not released it within [`Config::close_timeout`]; it is aborted all the same,
    /// and leaked.
    pub fn abort(&self, reason: &str) -> Result<()> {
        self.core.abort(reason)
    }

    /// Ends the communicator together with the other ranks, once all operations have ended.
    /// Collective. Later operations fail.
    ///
    /// # Errors
    /// If the others do not arrive within [`Config::timeout`]: it is aborted then.
    pub fn finalize(&self) -> Result<()> {
        self.wait_ready()?;
        let core = &self.core;
        let deadline = deadline(self.config.timeout);
        self.drain(deadline).map_err(|error| core.fail(error))?;
        core.with_turn("finalize", deadline, |turn| {
            core.advance(Phase::Finalizing)?;
            let comm = core.comm();
            core.on_device(|| core.release_registrations(comm))?;
            match core.functions().ncclCommFinalize {
                // SAFETY: a live communicator, finalized once.
                Some(finalize) => turn.call("ncclCommFinalize", |_, comm| unsafe { finalize(comm) }),
                // Before 2.14 destroying it was all there was.
                None => Ok(()),
            }
        })?;
        core.destroy()
    }

    /// Waits for the operations under way; an error at `until`, or where one has failed.
    fn drain(&self, until: Instant) -> Result<()> {
        let mut pause = Duration::from_micros(50);
        loop {
            for operation in self.core.under_way.all() {
                if let Some(result) = self.core.poll(&operation) {
                    result?;
                }
            }
            if self.core.under_way.all().is_empty() {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(self.core.error("finalize", 0, "operations are still under way on the device"));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(2));
        }
    }

    /// The error of this communicator, if any: by this rank, or found by NCCL's threads. The latter
    /// ends the communicator.
    ///
    /// # Errors
    /// [`Error::Nccl`].
    pub fn check(&self) -> Result<()> {
        if let Some(error) = self.core.unusable("check", &self.core.phase()) {
            return Err(error);
        }
        self.core.check_async().map_err(|error| self.core.fail(error))
    }

    /// State of the communicator as text: from this type, and from NCCL if its version returns it.
    /// For people, and for collectors of dumps.
    ///
    /// NCCL's builds with `ncclCommDump` have that under a C++ signature, which cannot be called
    /// here.
    pub fn dump(&self) -> BTreeMap<String, String> {
        self.core.dump()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.core.identity.name
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.core.identity.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> u32 {
        self.core.identity.size
    }

    /// How it works.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device of this rank.
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// The library it is of.
    pub fn library(&self) -> &Arc<Library> {
        &self.core.library
    }

    pub(super) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// An error if a tensor or stream is on another device.
    pub(super) fn check_device(&self, argument: &'static str, device: &Device) -> Result<()> {
        let (ours, theirs) = (self.core.device.info(), device.info());
        if ours.ordinal == theirs.ordinal && ours.is_virtual == theirs.is_virtual {
            return Ok(());
        }
        let rule = format!("must be on the communicator's device, {} {}", ours.name, ours.ordinal);
        Err(Error::argument(argument, format!("on {} {}", theirs.name, theirs.ordinal), rule))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.watchdog = None;
        let core = &self.core;
        if let Phase::Finalized | Phase::Aborted(_) = core.phase() {
            // Its operations have ended with it.
        } else {
            if let Err(error) = self.drain(deadline(self.config.close_timeout)) {
                tracing::warn!("a communicator that is dropped is aborted: {error}");
            }
            if let Err(left_behind) = core.end("it was dropped") {
                tracing::error!("{left_behind}");
            }
        }
        for operation in core.under_way.all() {
            // Its handle may still be polled.
            drop(core.poll(&operation));
        }
    }
}

fn identity(config: &Config, rank: u32, size: u32) -> Identity {
    Identity {
        name: config.name.clone(),
        rank,
        size,
        timeout: config.timeout,
        close_timeout: config.close_timeout,
        recorded: config.recorded,
        writes_debug_info: config.watchdog.is_some(),
    }
}

/// (rank, size) of a communicator that no other thread uses yet.
fn ask_place(core: &Core, comm: *mut Comm) -> Result<(u32, u32)> {
    let (mut rank, mut size): (c_int, c_int) = (0, 0);
    // SAFETY: a live communicator and valid out pointers.
    let codes = unsafe {
        [
            ("ncclCommUserRank", (core.functions().ncclCommUserRank)(comm, &mut rank)),
            ("ncclCommCount", (core.functions().ncclCommCount)(comm, &mut size)),
        ]
    };
    for (call, code) in codes {
        if code != Code::SUCCESS {
            return Err(core.library.error(call, code));
        }
    }
    Ok((rank as u32, size as u32))
}
