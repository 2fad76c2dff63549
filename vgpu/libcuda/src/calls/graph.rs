//! Capture and graphs. A graph is made by a capture; one of nodes is not supported, unless empty.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};
use std::sync::Arc;

use epoxide_vgpu::Clock;
use epoxide_vgpu::stream::{Capture, Mark, Op, Queue};

use super::api;
use crate::abi::*;
use crate::work::Work;
use crate::world::{
    CaptureMode, GLOBAL, LastRecord, RELAXED, Recorded, THREAD_LOCAL, THREAD_MODE, Tables, world,
};

fn begin(stream: Handle, mode: c_int) -> Res {
    let mut tables = world()?.lock();
    if stream <= 1 || tables.is_legacy(stream) {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    let stream = tables.resolve(stream)?;
    let mode = match mode {
        GLOBAL => CaptureMode::Global,
        THREAD_LOCAL => CaptureMode::ThreadLocal,
        RELAXED => CaptureMode::Relaxed,
        _ => return Err(INVALID_VALUE),
    };
    if tables.stream(stream)?.queue.capture.is_some() {
        return Err(INVALID_VALUE);
    }
    let id = tables.new_handle() as u64;
    tables.captures.insert(id, (Capture::new(stream as u64), mode));
    tables.stream(stream)?.queue.capture = Some((id, 0));
    Ok(())
}

fn end(stream: Handle, to: Out<Handle>) -> Res {
    let mut tables = world()?.lock();
    let stream = tables.resolve(stream)?;
    let id = match tables.stream(stream)?.queue.capture {
        None => return Err(INVALID_VALUE),
        Some((id, 0)) => id,
        Some(_) => return Err(STREAM_CAPTURE_UNMATCHED),
    };
    let own_thread = |(capture, mode): &(Capture<_>, CaptureMode)| {
        *mode == CaptureMode::Relaxed || capture.thread == std::thread::current().id()
    };
    if !tables.captures.get(&id).is_some_and(own_thread) {
        return Err(STREAM_CAPTURE_WRONG_THREAD);
    }
    let (capture, _) = tables.captures.remove(&id).ok_or(INVALID_VALUE)?;
    let mut contexts = vec![];
    for lane in &capture.lanes {
        if let Some(stream) = tables.streams.get_mut(&(*lane as Handle)) {
            stream.queue.capture = None;
            contexts.push(stream.context);
        }
    }
    to.put(0)?;
    if capture.invalid.is_some() {
        return Err(STREAM_CAPTURE_INVALIDATED);
    }
    let graph = capture.finish().map_err(|_| STREAM_CAPTURE_UNJOINED)?;
    let handle = tables.new_handle();
    tables.graphs.insert(handle, Some(Recorded { graph, contexts }));
    to.put(handle)
}

fn instantiate(to: Out<Handle>, graph: Handle) -> Res {
    let mut tables = world()?.lock();
    to.required()?;
    let graph = tables.graphs.get(&graph).ok_or(INVALID_VALUE)?.clone();
    let handle = tables.new_handle();
    tables.executables.insert(handle, graph);
    to.put(handle)
}

/// Launches a graph: each lane runs in the context of the stream that it was recorded on. A wait
/// for an event outside of the capture is one for the last record before this call.
fn launch(exec: Handle, stream: Handle) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    let stream = tables.resolve(stream)?;
    let own = tables.stream(stream)?.context;
    let Some(mut recorded) = tables.executables.get(&exec).ok_or(INVALID_VALUE)?.clone() else {
        return Ok(());
    };
    let is_foreign = |context: &Handle| *context != own;
    if let Some((capture, lane)) = tables.recording(stream)? {
        if recorded.contexts.iter().any(is_foreign) {
            crate::symbols::report_once("cuGraphLaunch in a capture, of a graph of another context,");
            return Err(NOT_SUPPORTED);
        }
        // In one lane, the recorded order suffices.
        recorded.graph.work().for_each(|work| capture.work(lane, work.clone()));
        return Ok(());
    }
    recorded.contexts.iter().try_for_each(|context| tables.usable(*context))?;
    let (mut ops, mut sides) = recorded.graph.launch(Clone::clone);
    for op in ops.iter_mut().chain(sides.iter_mut().flat_map(|queue| &mut queue.ops)) {
        if let Op::Work(Work::Await(event)) = op {
            *op = match &tables.event(*event)?.last {
                LastRecord::Stream(mark) => Op::Wait(mark.clone()),
                // No stream waits for this mark.
                LastRecord::Never | LastRecord::Capture(..) => Op::Record(Arc::default()),
            };
        }
    }
    if recorded.contexts.first().is_some_and(is_foreign) {
        let (begin, end) = (Arc::new(Mark::default()), Arc::new(Mark::default()));
        let mut first = Queue { closed: true, ..Queue::default() };
        first.push(Op::Wait(begin.clone()));
        ops.into_iter().for_each(|op| first.push(op));
        first.push(Op::Record(end.clone()));
        sides.insert(0, first);
        ops = vec![Op::Record(begin), Op::Wait(end)];
    }
    // The first lane runs in the stream itself, unless its context is another.
    let contexts = recorded.contexts[recorded.contexts.len() - sides.len()..].to_vec();
    tables.executables.insert(exec, Some(recorded));
    for (context, queue) in contexts.into_iter().zip(sides) {
        let side = tables.new_stream(context, crate::world::NON_BLOCKING, 0)?;
        let is_alive = tables.is_alive(context);
        let own = &mut tables.stream(side)?.queue;
        *own = queue;
        if !is_alive {
            own.abandon(Clock::Real.now_ns());
        }
        let device = tables.device_of(context)?;
        world.start_engine(&mut tables, device)?;
    }
    for op in ops {
        tables = world.enqueue(tables, stream, op)?;
    }
    Ok(())
}

/// State and number of the capture of a stream.
fn capture_state(tables: &mut Tables, stream: Handle) -> Res<(c_int, u64)> {
    // The legacy stream is never captured.
    let stream = tables.resolve(stream)?;
    if !tables.captures_beside(stream)?.is_empty() {
        return Err(STREAM_CAPTURE_IMPLICIT);
    }
    Ok(match tables.stream(stream)?.queue.capture {
        None => (0, 0),
        Some((id, _)) => {
            let valid = tables.captures.get(&id).is_some_and(|(capture, _)| capture.invalid.is_none());
            (if valid { 1 } else { 2 }, id)
        }
    })
}

/// State and number of the capture of a stream. The graph, its nodes and edges are null.
fn capture_info(
    stream: Handle,
    status: Out<c_int>,
    id: Out<u64>,
    of_graph: [Out<Handle>; 3],
    node_count: Out<usize>,
) -> Res {
    let (state, number) = capture_state(&mut world()?.lock(), stream)?;
    status.put(state)?;
    id.put_optional(number);
    of_graph.into_iter().for_each(|handle| handle.put_optional(0));
    node_count.put_optional(0);
    Ok(())
}

api! {
    /// Begins a capture.
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) {
        begin(stream, mode)
    }

    /// Ends a capture and makes the graph.
    fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) {
        end(stream, graph)
    }

    /// Whether a stream is captured.
    fn cuStreamIsCapturing(stream: Handle, status: Out<c_int>) {
        status.put(capture_state(&mut world()?.lock(), stream)?.0)
    }

    /// State and number of the capture; the graph and its nodes are null.
    fn cuStreamGetCaptureInfo_v2(
        stream: Handle,
        status: Out<c_int>,
        id: Out<u64>,
        graph: Out<Handle>,
        nodes: Out<Handle>,
        node_count: Out<usize>,
    ) {
        capture_info(stream, status, id, [graph, nodes, Out::null()], node_count)
    }

    /// The same; edges are null.
    fn cuStreamGetCaptureInfo_v3(
        stream: Handle,
        status: Out<c_int>,
        id: Out<u64>,
        graph: Out<Handle>,
        nodes: Out<Handle>,
        edges: Out<Handle>,
        node_count: Out<usize>,
    ) {
        capture_info(stream, status, id, [graph, nodes, edges], node_count)
    }

    /// Exchanges the capture mode of the thread. In relaxed mode no call is forbidden.
    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) {
        world()?;
        let new = mode.before().get()?;
        if !(0..=RELAXED).contains(&new) {
            return Err(INVALID_VALUE);
        }
        mode.put(THREAD_MODE.replace(new))
    }

    /// Makes a graph without nodes.
    fn cuGraphCreate(graph: Out<Handle>, flags: c_uint) {
        let mut tables = world()?.lock();
        graph.required()?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let handle = tables.new_handle();
        tables.graphs.insert(handle, None);
        graph.put(handle)
    }

    /// Makes a graph ready to launch.
    fn cuGraphInstantiate_v2(exec: Out<Handle>, graph: Handle, _node: Out<Handle>, _log: Out<c_char>, _bytes: usize) {
        instantiate(exec, graph)
    }

    /// Makes a graph ready to launch. Flags change nothing.
    fn cuGraphInstantiateWithFlags(exec: Out<Handle>, graph: Handle, _flags: c_ulonglong) {
        instantiate(exec, graph)
    }

    /// Makes a graph ready to launch.
    fn cuGraphInstantiateWithParams(exec: Out<Handle>, graph: Handle, params: Out<u64>) {
        params.required()?;
        instantiate(exec, graph)
    }

    /// Uploads a graph, which does nothing.
    fn cuGraphUpload(exec: Handle, stream: Handle) {
        let mut tables = world()?.lock();
        tables.resolve(stream)?;
        tables.executables.get(&exec).map(drop).ok_or(INVALID_VALUE)
    }

    /// Launches a graph in a stream.
    fn cuGraphLaunch(exec: Handle, stream: Handle) {
        launch(exec, stream)
    }

    /// Destroys a graph.
    fn cuGraphDestroy(graph: Handle) {
        world()?.lock().graphs.remove(&graph).map(drop).ok_or(INVALID_VALUE)
    }

    /// Destroys an instance of a graph. Running launches continue.
    fn cuGraphExecDestroy(exec: Handle) {
        world()?.lock().executables.remove(&exec).map(drop).ok_or(INVALID_VALUE)
    }

    /// A copy of a graph.
    fn cuGraphClone(copy: Out<Handle>, graph: Handle) {
        let mut tables = world()?.lock();
        copy.required()?;
        let graph = tables.graphs.get(&graph).ok_or(INVALID_VALUE)?.clone();
        let handle = tables.new_handle();
        tables.graphs.insert(handle, graph);
        copy.put(handle)
    }
}
