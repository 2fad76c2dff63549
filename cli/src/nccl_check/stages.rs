//! The stages of the check, on one rank.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::driver::{Memory, MemoryKind, Stream};
use epoxide::group::{MeshGroup, MeshOptions, ProcessGroup, ReduceOp};
use epoxide::{DType, Tensor};
use epoxide_nccl::{Communicator, Config, NcclGroup, Watchdog};

use super::oracle::Check;
use super::rank::{Act, Rank};
use crate::error::{CommandError, Result};
use crate::output;

/// Elements of the tensors that are compared.
const COUNTS: [u64; 3] = [1, 1000, 1 << 18];
/// Bytes of the all-reduce that is timed.
const TIMED_BYTES: u64 = 64 << 20;
/// The reason of aborts.
const WANTED: &str = "the check wants it so";
const UNNOTICED: &str = "NCCL reported nothing within the deadline, so the communicator was aborted";

/// The error that a stage must meet.
#[derive(Debug, Clone, Copy)]
pub(super) enum Expected {
    /// A deadline's, once it has passed.
    Deadline,
    /// That of an abort for the reason [`WANTED`].
    Abort,
    /// One that NCCL reports.
    Nccl,
}

/// Runs the stages of the rank's act; `folder` gets the watchdog's dumps.
pub fn run(rank: &Rank, folder: &Path) -> Result<()> {
    match rank.act {
        Act::Together => together(rank, folder),
        Act::Killed | Act::KilledOverSockets => killed(rank),
    }
}

impl Rank {
    fn config(&self, name: &str) -> Config {
        Config { timeout: self.timeout, ..Config::named(name) }
    }

    fn communicator(&self, config: Config) -> Result<Communicator> {
        Ok(Communicator::over_store(&self.library, &self.device, &*self.store, self.rank, self.size, config)?)
    }

    /// Runs a stage and publishes its outcome to the ranks in `ranks`; rank 0 prints it. All fail
    /// if one does.
    fn stage(&self, name: &str, ranks: u32, stage: impl FnOnce() -> Result<String>) -> Result<()> {
        let start = Instant::now();
        let outcome = stage();
        let took = start.elapsed().as_secs_f64() * 1e3;
        let key = |rank: u32| format!("{}/{name}/{rank}", self.act.name());
        let broken = |error: serde_json::Error| CommandError::failed(format!("a rank's report: {error}"));
        let told = serde_json::to_vec(&outcome.as_ref().map(|detail| (took, detail))).map_err(broken)?;
        self.store.set(&key(self.rank), &told)?;
        let mut slowest = took;
        let mut failure = None;
        let mut detail = String::new();
        for rank in (0..ranks).rev() {
            let told = self.store.get(&key(rank), self.timeout)?;
            match serde_json::from_slice::<Result<(f64, String)>>(&told).map_err(broken)? {
                Ok((took, of_rank)) => (slowest, detail) = (slowest.max(took), of_rank),
                Err(error) => failure = Some((rank, error.message.unwrap_or_default())),
            }
        }
        if self.rank == 0 {
            let act = self.act.name();
            output::text_line(&match &failure {
                Some((rank, reason)) => format!("FAIL {act}: {name}: rank {rank}: {reason}"),
                None => format!("ok   {act}: {name}: {detail} ({slowest:.1} ms on the slowest rank)"),
            })?;
        }
        match failure {
            Some(_) => outcome.and(Err(CommandError::failed(format!("{name} failed on another rank")))),
            None => Ok(()),
        }
    }

    /// Checks that `outcome` is the expected error, within the deadline and the time to close. Returns
    /// the error with its time.
    pub(super) fn expect_error<T>(
        &self,
        what: &str,
        start: Instant,
        outcome: Result<T, epoxide::Error>,
        expected: Expected,
    ) -> Result<String> {
        let took = start.elapsed();
        let Err(error) = outcome else {
            return Err(CommandError::failed(format!("{what} has worked, without its peer")));
        };
        let is_expected = match expected {
            Expected::Deadline => matches!(error, epoxide::Error::Group { .. }) && took >= self.deadline,
            Expected::Abort => error.to_string().contains(WANTED),
            Expected::Nccl => matches!(error, epoxide::Error::Nccl { .. }),
        };
        if !is_expected {
            return Err(CommandError::failed(format!(
                "{what} failed after {took:.1?}, but not by what is meant, {expected:?}: {error}"
            )));
        }
        let most = self.deadline + Config::default().close_timeout;
        if took > most {
            return Err(CommandError::failed(format!(
                "{what} took {took:.1?} to fail, at most {most:?} is meant: {error}"
            )));
        }
        Ok(format!("{:.2} s: {error}", took.as_secs_f64()))
    }

    /// Waits until all ranks are here.
    fn meet(&self, name: &str) -> Result<()> {
        let key = |rank: u32| format!("{}/meet/{name}/{rank}", self.act.name());
        self.store.set(&key(self.rank), b"here")?;
        for rank in 0..self.size {
            self.store.get(&key(rank), self.timeout)?;
        }
        Ok(())
    }

    fn small(&self) -> Result<(Stream, Tensor<'static>)> {
        let stream = Stream::new(&self.device)?;
        let tensor = Tensor::from_host(&stream, DType::F32, &[1024], &[1f32; 1024])?;
        Ok((stream, tensor))
    }
}

fn together(rank: &Rank, folder: &Path) -> Result<()> {
    let stream = Stream::new(&rank.device)?;
    let all = rank.size;
    let mut made = None;
    rank.stage("create", all, || {
        made = Some(rank.communicator(rank.config("all"))?);
        Ok(format!("{all} ranks over a store, without blocking"))
    })?;
    let communicator = made.ok_or_else(|| CommandError::failed("create gave nothing"))?;
    rank.stage("operations", all, || {
        let mut check = Check::new(&communicator, &stream);
        for count in COUNTS {
            check.all(count)?;
        }
        Ok(format!(
            "{} results of {} elements each the oracle's (f32 bf16 i32 i64; {COUNTS:?} elements)",
            check.operations, check.elements
        ))
    })?;
    rank.stage("time of an all-reduce", all, || {
        // Times on a virtual GPU are of no interest, and long.
        let bytes = if rank.device.info().is_virtual { TIMED_BYTES / 64 } else { TIMED_BYTES };
        let time = Check::new(&communicator, &stream).all_reduce_time(bytes)?.as_secs_f64();
        let factor = 2.0 * f64::from(all - 1) / f64::from(all);
        let bandwidth = bytes as f64 * factor / time / 1e9;
        let micros = time * 1e6;
        Ok(format!(
            "{} MiB, median of 9 with the host's wait: {micros:.0} us, bus bandwidth {bandwidth:.1} GB/s",
            bytes >> 20
        ))
    })?;
    rank.stage("registration", all, || {
        let memory = Arc::new(Memory::alloc(&rank.device, 1 << 20, MemoryKind::Shareable, "registered")?);
        memory.write(&stream, 0, &vec![1u8; 1 << 20])?;
        let registration = communicator.register(&memory)?;
        // SAFETY: the memory outlives the tensor, whose operations end before the memory is freed.
        let tensor = unsafe { Tensor::from_raw(memory.ptr(), DType::I32, &[1 << 18]) };
        communicator.all_reduce(&tensor, ReduceOp::Sum, &stream)?.wait()?;
        let expected = 0x0101_0101 * all as i32;
        if tensor.to_host::<i32>(&stream)?.iter().any(|value| *value != expected) {
            return Err(CommandError::failed("a sum in registered memory is wrong"));
        }
        communicator.deregister(registration)?;
        Ok("1 MiB registered, summed, deregistered".into())
    })?;
    rank.stage("split", all, || {
        let color = (rank.rank != 0 || all < 3).then_some(rank.rank % 2);
        let part = communicator.split(color, -(rank.rank as i32), None)?;
        if let Some(part) = &part {
            let mut check = Check::new(part, &stream);
            check.all(COUNTS[1])?;
            part.finalize()?;
        }
        if part.is_some() != color.is_some() || communicator.splits() != 1 {
            return Err(CommandError::failed(
                "a part where there should be none, or none where there should be one",
            ));
        }
        Check::new(&communicator, &stream).sum()?;
        Ok("odd and even ranks in reverse order, and with 3 ranks or more one without a color".into())
    })?;
    rank.stage("process group", all, || {
        let options = MeshOptions { timeout: rank.timeout, ..MeshOptions::default() };
        let host = Arc::new(MeshGroup::new(rank.store.clone(), rank.rank, all, "mesh", options)?);
        let group = NcclGroup::new(host, &rank.library, &rank.device, rank.config("group"))?;
        let ranks = group.all_gather(&[rank.rank as u8])?.concat();
        if !ranks.iter().copied().eq(0..all as u8) {
            return Err(CommandError::failed(format!("host data of the group came as {ranks:?}")));
        }
        Check::new(group.device(), &stream).sum()?;
        let part = group.split_group(u64::from(rank.rank % 2))?;
        Check::new(part.device(), &stream).sum()?;
        part.destroy()?;
        group.destroy()?;
        Ok("host data over the mesh, device tensors over NCCL, and a part of it".into())
    })?;
    rank.stage("finalize", all, || {
        communicator.finalize()?;
        match communicator.check() {
            Err(_) => Ok("all ranks".into()),
            Ok(()) => Err(CommandError::failed("a communicator that was finalized can still be used")),
        }
    })?;
    rank.stage("creation whose peer never comes", all, || {
        if rank.rank != 0 {
            return Ok(String::new());
        }
        let config = Config { timeout: rank.deadline, ..Config::named("lonely") };
        let id = epoxide_nccl::UniqueId::new(&rank.library)?;
        let start = Instant::now();
        let made = Communicator::new(&rank.library, &rank.device, &id, 0, all, config);
        rank.expect_error("creation", start, made, Expected::Deadline)
    })?;
    rank.stage("abort of a creation whose peer never comes", all, || {
        if rank.rank != 0 {
            return Ok(String::new());
        }
        let id = epoxide_nccl::UniqueId::new(&rank.library)?;
        let made = Communicator::start(&rank.library, &rank.device, &id, 0, all, rank.config("lonely"))?;
        std::thread::sleep(Duration::from_millis(500));
        let start = Instant::now();
        made.abort(WANTED)?;
        rank.expect_error("wait_ready", start, made.wait_ready(), Expected::Abort)
    })?;
    rank.stage("operation whose peer never comes, with a watchdog", all, || {
        // The deadline is for the operation. Joining has none, and neither has the first operation,
        // which connects the ranks.
        let parent = rank.communicator(rank.config("watched"))?;
        let watchdog = Some(Watchdog::default());
        let config = Config { timeout: rank.deadline, watchdog, ..rank.config("watched") };
        let made = parent.split(Some(0), rank.rank as i32, Some(config))?;
        let made = made.ok_or_else(|| CommandError::failed("a split gave nothing"))?;
        Check::new(&made, &stream).sum()?;
        rank.meet("watched")?;
        if rank.rank != 0 {
            rank.store.get("watched/done", rank.timeout)?;
            return Ok(String::new());
        }
        let (stream, tensor) = rank.small()?;
        let start = Instant::now();
        let work = made.all_reduce(&tensor, ReduceOp::Sum, &stream);
        let ended = work.and_then(|work| work.wait());
        let outcome = rank.expect_error("all_reduce", start, ended, Expected::Deadline);
        rank.store.set("watched/done", b"")?;
        let text = std::fs::read_to_string(folder.join("debug_info_0"))
            .map_err(|error| CommandError::failed(format!("the watchdog's dump: {error}")))?;
        if !text.contains("all_reduce") {
            return Err(CommandError::failed(format!(
                "the watchdog's dump does not name the operation: {text}"
            )));
        }
        // The kernel has left the stream, and the device works.
        tensor.to_host::<f32>(&stream)?;
        Ok(format!("{}; dump of {} bytes", outcome?, text.len()))
    })?;
    rank.stage("abort of an operation from another thread", all, || {
        let made = rank.communicator(rank.config("aborted"))?;
        rank.meet("aborted")?;
        if rank.rank != 0 {
            rank.store.get("aborted/done", rank.timeout)?;
            return Ok(String::new());
        }
        let (stream, tensor) = rank.small()?;
        let outcome = std::thread::scope(|scope| {
            let working =
                scope.spawn(|| made.all_reduce(&tensor, ReduceOp::Sum, &stream).and_then(|work| work.wait()));
            std::thread::sleep(Duration::from_millis(500));
            let start = Instant::now();
            made.abort(WANTED)?;
            let ended =
                working.join().map_err(|_| CommandError::failed("the thread that waited has panicked"))?;
            rank.expect_error("all_reduce", start, ended, Expected::Abort)
        });
        rank.store.set("aborted/done", b"")?;
        tensor.to_host::<f32>(&stream)?;
        outcome
    })?;
    rank.stage("a new communicator after all that", all, || {
        let made = rank.communicator(rank.config("again"))?;
        Check::new(&made, &stream).all(COUNTS[1])?;
        Ok("every operation again; then dropped".into())
    })
}

fn killed(rank: &Rank) -> Result<()> {
    let stream = Stream::new(&rank.device)?;
    let (all, survivors) = (rank.size, rank.size - 1);
    let mut made = None;
    rank.stage("create", all, || {
        let communicator = rank.communicator(Config { timeout: rank.timeout, ..rank.config("all") })?;
        Check::new(&communicator, &stream).all(COUNTS[1])?;
        made = Some(communicator);
        Ok(format!("{all} ranks, every operation"))
    })?;
    let communicator = made.ok_or_else(|| CommandError::failed("create gave nothing"))?;
    rank.meet("before the kill")?;
    if rank.rank == survivors {
        std::thread::sleep(Duration::from_millis(300));
        (rank.die)();
        return Err(CommandError::failed("the rank that is to be killed lives"));
    }
    rank.stage("a peer is killed", survivors, || {
        let (stream, tensor) = rank.small()?;
        let start = Instant::now();
        let detail = match communicator.all_reduce(&tensor, ReduceOp::Sum, &stream) {
            // The communicator's own deadline is longer: this stage tests what NCCL detects.
            Ok(work) if !work.wait_timeout(rank.deadline) => {
                // As a watchdog would.
                communicator.abort(UNNOTICED)?;
                format!("{:.2} s: {}", start.elapsed().as_secs_f64(), unnoticed(rank.act)?)
            }
            started => {
                let ended = started.and_then(|work| work.wait());
                rank.expect_error("all_reduce", start, ended, Expected::Nccl)?
            }
        };
        // The kernel has left the stream, and the device works.
        tensor.to_host::<f32>(&stream)?;
        Ok(detail)
    })?;
    rank.stage("a new communicator of the survivors", survivors, || {
        let config = rank.config("survivors");
        let made = Communicator::over_store(
            &rank.library,
            &rank.device,
            &*rank.store,
            rank.rank,
            survivors,
            config,
        )?;
        Check::new(&made, &stream).all(COUNTS[1])?;
        made.finalize()?;
        Ok(format!("{survivors} ranks, every operation"))
    })
}

/// The report where the deadline ended the wait for a killed peer: a failure over sockets, by which
/// NCCL sees a peer's end.
pub(super) fn unnoticed(act: Act) -> Result<&'static str> {
    match act {
        Act::KilledOverSockets => Err(CommandError::failed(UNNOTICED)),
        _ => Ok(UNNOTICED),
    }
}
