//! The watchdog: aborts a communicator when an operation passes its deadline or NCCL has failed,
//! even if no other thread polls it.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::config::Watchdog;
use super::core::{Core, Phase};
use super::debug_info::Pipe;
use crate::error::{Error, Result};
use crate::lock::lock;

/// The watchdog's thread; stopped and joined on drop.
#[derive(Debug)]
pub(super) struct Guard {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Guard {
    pub fn start(core: &Arc<Core>, watchdog: &Watchdog) -> Result<Guard> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let (weak, told, interval) = (core.weak(), stop.clone(), watchdog.interval);
        let rank = core.identity.rank;
        let thread = std::thread::Builder::new()
            .name("epoxide-nccl-watchdog".into())
            .spawn(move || watch(&weak, &told, interval, rank))
            .map_err(|error| Error::system("spawn", error))?;
        Ok(Guard { stop, thread: Some(thread) })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        *lock(&self.stop.0) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread may be in an abort, which ends by its own deadline. Its panic has been
            // printed.
            let _ = thread.join();
        }
    }
}

fn watch(core: &Weak<Core>, stop: &(Mutex<bool>, Condvar), interval: Duration, rank: u32) {
    let mut pipe = Pipe::open(rank);
    loop {
        let told = lock(&stop.0);
        let told = stop.1.wait_timeout_while(told, interval, |told| !*told);
        if *told.unwrap_or_else(PoisonError::into_inner).0 {
            return;
        }
        let Some(core) = core.upgrade() else { return };
        if pipe.as_mut().is_some_and(Pipe::asked) {
            core.write_debug_info("requested through the pipe");
        }
        if let Phase::Aborted(_) | Phase::Finalized = core.phase() {
            continue;
        }
        // Each poll aborts the communicator if the operation has failed or takes too long.
        core.under_way.all().iter().for_each(|operation| drop(core.poll(operation)));
        if let Err(error) = core.check_async() {
            core.fail(error);
        }
    }
}
