//! The methods that buffers and their options have in both modes.

/// Writes the methods into an `impl Buffer`; each forwards to the field `core`. Attributes before a
/// method's name add the mode's documentation.
macro_rules! buffer_methods {
    (
        $(#[$capture:meta])* capture,
        $(#[$status_ptr:meta])* status_ptr,
        $(#[$missing_ptr:meta])* missing_ptr,
        $(#[$first_tokens:meta])* first_tokens $(,)?
    ) => {
        /// Its number among the buffers that this process has made, used in errors.
        pub fn id(&self) -> u64 {
            self.core.id()
        }

        /// The buffer's device.
        pub fn device(&self) -> &Device {
            self.core.device()
        }

        /// This rank.
        pub fn rank(&self) -> u32 {
            self.core.rank()
        }

        /// Ranks of the group.
        pub fn num_ranks(&self) -> u32 {
            self.core.topology().ranks()
        }

        /// Nodes of the group; 1 if all ranks' memory is mapped, with any `ranks_per_node` of the
        /// options.
        pub fn num_nodes(&self) -> u32 {
            self.core.topology().nodes
        }

        /// Ranks of each node.
        pub fn ranks_per_node(&self) -> u32 {
            self.core.topology().ranks_per_node
        }

        /// This rank's node, its "RDMA rank".
        pub fn node(&self) -> u32 {
            self.core.topology().node(self.rank())
        }

        /// Device bytes of the pool, rounding included.
        pub fn pool_bytes(&self) -> u64 {
            self.core.pool().footprint()
        }

        /// Bytes of wire memory; 0 with one node.
        pub fn wire_bytes(&self) -> u64 {
            self.core.network().map_or(0, |network| network.bytes())
        }

        /// Takes the place of index `index`. Its index can be taken again once the [`Place`] is
        /// dropped.
        ///
        /// # Errors
        /// [`Error::Argument`] where the buffer has no such place or it is in use already.
        pub fn place(&self, index: u32) -> Result<Place> {
            self.core.place(index).map(Place)
        }

        /// Captures what `work` enqueues on `stream`. `work` is called twice: once to run, so that
        /// recording allocates and loads nothing, and once to be recorded. Collective, as the calls
        /// in it are. Waits for the first run.
        ///
        /// `work` returns results detached, since every run of the step overwrites them.
        ///
        /// A step is ordered with the buffer's other operations on all streams, and its launch
        /// returns the error of a failed one. Operations of another buffer are errors in it.
        /// Another recording (a framework's own) may have these, and has neither property: its
        /// launch is `unsafe`. Such a recording keeps memory of the buffer and its inputs until the
        /// buffer is dropped.
        ///
        $(#[$capture])*
        /// # Errors
        /// Errors of `work` and of the driver. [`Error::Argument`] within another `capture` of the
        /// buffer, or between [`Buffer::begin_warmup`] and [`Buffer::end_warmup`].
        pub fn capture<T>(
            &mut self,
            stream: &Stream,
            work: impl FnMut(&mut Buffer, StreamOrder<'_>) -> Result<T>,
        ) -> Result<Step<T>> {
            Core::capture(self, stream, work)
        }

        /// Begins the run of calls that another library records next, such as a framework that
        /// captures a whole step. Until [`Buffer::end_warmup`] operations keep their memory, as
        /// recorded ones do. The recording then reuses this memory, because nothing can be
        /// allocated within one. A recording that was given up between the halves of a call is
        /// forgotten. [`Buffer::capture`] runs its calls itself.
        pub fn begin_warmup(&mut self) {
            self.core.begin_warmup();
        }

        /// Ends the run, and frees the memory of its operations for the recording. Synchronise the
        /// stream before the recording begins, which waits for nothing outside of it.
        pub fn end_warmup(&mut self) {
            self.core.end_warmup();
        }

        /// Device address of the buffer's status, 8 bytes in mapped host memory. The status is 0
        /// until an operation fails so that the buffer cannot be used any more, then another
        /// number. A caller's kernel behind an operation reads whether that operation gave results,
        /// also in a replayed graph; [`Buffer::check`] returns the error on the host.
        ///
        /// Read it with `ld.acquire.sys` of 8 bytes. The address is valid and constant as long as
        /// the buffer lives.
        ///
        $(#[$status_ptr])*
        pub fn status_ptr(&self) -> DevicePtr {
            self.core.faults().status_ptr()
        }

        /// Device address of the tokens that a combine has left without their sums, in mapped host
        /// memory. It holds one u8 for each token that this rank may have. The u8 is 1 where a
        /// timed-out combine may not have made the sum, else 0. A caller's kernel reads them behind
        /// the combine if [`Buffer::status_ptr`] shows a failure, also in a replayed graph.
        ///
        $(#[$missing_ptr])*
        pub fn missing_ptr(&self) -> DevicePtr {
            self.core.faults().missing_ptr()
        }

        /// The tokens that a combine has left without their sums, in ascending order.
        /// [`Buffer::missing_ptr`] has them on the device. Empty as long as no operation has
        /// failed. The sums of all other tokens are right. Waits for all work enqueued on the
        /// device's streams.
        ///
        /// # Errors
        /// [`Error::Timeout`] where that has not ended after twice the buffer's timeout, at least
        /// 30 s.
        pub fn missing_tokens(&self) -> Result<Vec<u32>> {
            self.core.missing_tokens()
        }

        /// The ids of `topk_idx` `[max_tokens, num_topk]` for its first `num_tokens` tokens, and -1
        /// behind them. `num_tokens` i32 `[1]` is on the device: a captured step serves batches of
        /// any size. A number below 0 counts as 0, one above `max_tokens` as `max_tokens`.
        ///
        /// Tokens without an id are not sent. A combine still writes `max_tokens` rows: those
        /// behind `num_tokens` are zeros, in a tensor of the caller's too
        /// ([`Buffer::combine_into`]). So kernels that read all rows of a recorded step find finite
        /// numbers there, the same in every replay.
        ///
        $(#[$first_tokens])*
        ///
        /// Local to this rank; a kernel of its own in front of the operation, which for the host
        /// and its checks has `max_tokens` tokens. The host does not wait, and the call can be
        /// captured. An asynchronous call gives no event: the buffer's next operation follows it in
        /// any case.
        ///
        /// # Errors
        /// [`Error::DType`](crate::Error::DType), [`Error::Shape`](crate::Error::Shape) and
        /// [`Error::Argument`](crate::Error::Argument) where a tensor breaks a rule, and errors of
        /// the driver.
        pub fn first_tokens<T: crate::ExpertId>(
            &mut self,
            topk_idx: &crate::TypedTensor<'_, T>,
            num_tokens: &crate::TypedTensor<'_, i32>,
            order: StreamOrder<'_>,
        ) -> Result<crate::TypedTensor<'static, T>> {
            core::first_tokens(self, topk_idx, num_tokens, order)
        }
    };
}

/// Writes those of the options into their `impl`. Before a method's name: what its documentation
/// adds in this mode.
macro_rules! option_methods {
    (
        $(of $fields:ident;)?
        $(#[$ranks_per_node:meta])* ranks_per_node,
        $(#[$keep_nodes:meta])* keep_nodes,
        $(#[$transport:meta])* transport $(,)?
    ) => {
        /// Places for received rows, 1 to 64: the most dispatches whose results can be in use at
        /// once. Each takes the pool's memory once more.
        pub fn places(mut self, places: u32) -> Self {
            self$(.$fields)?.places = places;
            self
        }

        /// Longest wait for a peer. On virtual GPUs of [`run_threads`](crate::group::run_threads)
        /// the deadline is in the ranks' own clock, which stops while any of them runs
        /// ([`Time::Virtual`](crate::driver::virt::Time::Virtual)).
        pub fn timeout(mut self, timeout: Duration) -> Self {
            self$(.$fields)?.timeout = timeout;
            self
        }

        /// A failed combine keeps the old contents where it has no sum. By default it writes NaN
        /// there, for kernels that read sums without the error.
        pub fn keep_sums_on_failure(mut self) -> Self {
            self$(.$fields)?.nan_on_failure = false;
            self
        }

        /// Ranks of a node, which map each other's memory: ranks 0 to `ranks_per_node - 1` are node
        /// 0, and so on. One of several nodes has 1 to 8 ranks, a single one up to 64.
        /// [`Self::transport`] connects nodes. Without this option all ranks are one node.
        ///
        $(#[$ranks_per_node])*
        pub fn ranks_per_node(mut self, ranks: u32) -> Self {
            self$(.$fields)?.ranks_per_node = Some(ranks);
            self
        }

        /// Keeps nodes apart though all ranks can map each other's memory: rows are sent as over
        /// tcp or verbs.
        $(#[$keep_nodes])*
        pub fn keep_nodes(mut self) -> Self {
            self$(.$fields)?.keep_nodes = true;
            self
        }

        /// The transport of rows between nodes; unused with one node.
        $(#[$transport])*
        pub fn transport(mut self, transport: TransportOptions) -> Self {
            self$(.$fields)?.transport = transport;
            self
        }
    };
}

/// Writes methods of options and requests that each set the field of their name.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $value:ty;)*) => {$(
        $(#[$doc])*
        pub fn $name(mut self, $name: $value) -> Self {
            self.$name = $name.into();
            self
        }
    )*};
}

pub(crate) use {buffer_methods, option_methods, setters};
