//! Recording a stream's work and running it again.

use super::device::Bound;
use super::ffi::{self, CuGraph, CuGraphExec};
use super::stream;
use crate::error::Result;

/// Starts recording. Other threads are free to make any call meanwhile; this one must only enqueue.
pub fn begin(_: &Bound<'_>, stream: u64) -> Result<()> {
    // SAFETY: the stream is live, as the trait demands.
    unsafe { ffi::cuStreamBeginCapture_v2(stream::raw(stream), ffi::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) }
        .check("cuStreamBeginCapture")
}

/// Ends the recording and makes it executable.
pub fn end(_: &Bound<'_>, stream: u64) -> Result<u64> {
    let mut graph: CuGraph = std::ptr::null_mut();
    // SAFETY: the stream is live, as the trait demands, and the out pointer is valid.
    unsafe { ffi::cuStreamEndCapture(stream::raw(stream), &mut graph) }.check("cuStreamEndCapture")?;
    let mut exec: CuGraphExec = std::ptr::null_mut();
    // SAFETY: the graph is the one just recorded, and the out pointer is valid.
    let instantiated = unsafe { ffi::cuGraphInstantiateWithFlags(&mut exec, graph, 0) };
    // The executable graph is a copy, so the recording itself can go in either case.
    // SAFETY: the graph is ours and is not used again.
    unsafe { ffi::cuGraphDestroy(graph) }.log("cuGraphDestroy");
    instantiated.check("cuGraphInstantiateWithFlags")?;
    Ok(exec as u64)
}

/// Runs a recording in the stream.
pub fn launch(_: &Bound<'_>, graph: u64, stream: u64) -> Result<()> {
    // SAFETY: both are live, as the trait demands.
    unsafe { ffi::cuGraphLaunch(graph as CuGraphExec, stream::raw(stream)) }.check("cuGraphLaunch")
}

/// Destroys a recording; a run in flight completes.
pub fn destroy(_: &Bound<'_>, graph: u64) {
    // SAFETY: its owner gives it back once.
    unsafe { ffi::cuGraphExecDestroy(graph as CuGraphExec) }.log("cuGraphExecDestroy");
}
