//! Where in the caller's and our streams an operation runs.

use crate::driver::{Event, Stream};

/// Which stream an operation runs on, what it waits for, and who waits for it.
///
/// The operations of one [`Buffer`](super::Buffer) come one after the other on every rank, whatever streams they run on. Only within a
/// recording that spans several streams their order is the recorder's affair.
///
/// Two *different* buffers have no order between them. Their operations wait for peers while they hold multiprocessors: where one rank
/// launches buffer A's before B's and another one B's before A's, on streams that run side by side, and both do not fit on the device at
/// once ([`Config::num_sms`](super::Config) blocks each), they wait for each other until their deadlines; the error then
/// names the other buffer. Launch them in one order on every rank, or on one
/// stream, or give each so few multiprocessors that all fit.
#[derive(Debug, Clone, Copy)]
pub struct StreamOrder<'a> {
    pub(super) caller: &'a Stream,
    pub(super) previous_event: Option<&'a Event>,
    pub(super) on_comm_stream: bool,
    pub(super) asynchronous: bool,
}

impl<'a> StreamOrder<'a> {
    /// Runs on the caller's stream itself. Can be captured in a graph.
    pub fn on(stream: &'a Stream) -> Self {
        StreamOrder { caller: stream, previous_event: None, on_comm_stream: false, asynchronous: false }
    }

    /// Runs on the buffer's high-priority communication stream, after what `stream` holds now; `stream` then waits for
    /// the end.
    pub fn comm(stream: &'a Stream) -> Self {
        StreamOrder { on_comm_stream: true, ..StreamOrder::on(stream) }
    }

    /// Waits for `event` instead of all that the caller's stream holds; on the caller's own stream, as well.
    pub fn after(self, event: &'a Event) -> Self {
        StreamOrder { previous_event: Some(event), ..self }
    }

    /// Leaves the caller's stream alone at the end: the output has an event to wait for.
    pub fn asynchronous(self) -> Self {
        StreamOrder { asynchronous: true, ..self }
    }
}
