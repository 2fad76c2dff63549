//! Work of streams: launches, copies, host functions, frees.

use std::ffi::c_void;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};

use epoxide_vgpu::stream::{Launch, Transfer};

use crate::abi::{CUresult, Handle};
use crate::world::Allocation;

/// Work in a queue, or recorded by a capture.
#[derive(Clone)]
pub(crate) enum Work {
    Launch(Arc<Launch>),
    Transfer(Transfer),
    Host(HostCall),
    /// Memory that is freed in stream order, once.
    Free(Arc<Mutex<Option<Allocation>>>),
    /// Recorded alone: a launch of the graph waits for the last record of this event.
    Await(Handle),
}

/// A function of the program, to be called in stream order.
#[derive(Clone, Copy)]
pub(crate) struct HostCall {
    function: Function,
    data: *mut c_void,
}

#[derive(Clone, Copy)]
enum Function {
    Host(unsafe extern "C" fn(*mut c_void)),
    Callback(unsafe extern "C" fn(Handle, CUresult, *mut c_void), Handle),
}

// SAFETY: callers of `cuLaunchHostFunc` and `cuStreamAddCallback` pass a function and data that a
// thread of the driver may use.
unsafe impl Send for HostCall {}
// SAFETY: as above; `&HostCall` gives out nothing but the call.
unsafe impl Sync for HostCall {}

impl HostCall {
    /// A call of `cuLaunchHostFunc`.
    ///
    /// # Safety
    /// `function` may be called with `data` in another thread, until the stream has passed the
    /// call.
    pub(crate) unsafe fn host(function: unsafe extern "C" fn(*mut c_void), data: *mut c_void) -> HostCall {
        HostCall { function: Function::Host(function), data }
    }

    /// A call of `cuStreamAddCallback`.
    ///
    /// # Safety
    /// The same as that of [`HostCall::host`].
    pub(crate) unsafe fn callback(
        function: unsafe extern "C" fn(Handle, CUresult, *mut c_void),
        stream: Handle,
        data: *mut c_void,
    ) -> HostCall {
        HostCall { function: Function::Callback(function, stream), data }
    }

    /// Calls it. `code`: the fault of its context, which a callback is given.
    pub(crate) fn run(self, code: CUresult) {
        match self.function {
            // SAFETY: the caller of the constructor keeps both valid until the stream has passed.
            Function::Host(function) => unsafe { function(self.data) },
            // SAFETY: as above.
            Function::Callback(function, stream) => unsafe { function(stream, code, self.data) },
        }
    }

    /// Calls the callback of a context that has failed, behind those before. Host functions of such
    /// a context are dropped.
    pub(crate) fn run_failed(self, code: CUresult) {
        static CALLS: OnceLock<Sender<(HostCall, CUresult)>> = OnceLock::new();
        if matches!(self.function, Function::Host(_)) {
            return;
        }
        let calls = CALLS.get_or_init(|| {
            let (send, calls) = channel::<(HostCall, CUresult)>();
            let run = move || calls.iter().for_each(|(call, code)| call.run(code));
            // Without a thread the sends below fail.
            let _ = std::thread::Builder::new().spawn(run);
            send
        });
        if calls.send((self, code)).is_err() {
            eprintln!("libcuda of virtual GPUs: no thread for a callback of a context that has failed");
        }
    }
}
