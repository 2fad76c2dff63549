//! Round trips of rows by expert, each output compared with the oracle, bit for bit.

use std::collections::BTreeMap;

use epoxide::Result;
use epoxide::throughput::{
    CachedDispatchRequest, CombineRequest, Counts, DispatchHandle, DispatchRequest, Place, Received,
};
use epoxide::{DType, Tensor, TypedTensor};

use super::case::{Case, Scales, rough};
use crate::harness::{Rank, Setup};
use crate::oracle::{self, ExpertPlan};
use crate::payload::{self, mix, rounded_bytes};

impl Case {
    /// Buffers with room for its rows by expert, and no more.
    pub fn setup_by_expert(&self, alignment: u32) -> Setup {
        let most = (0..self.routing.num_ranks())
            .map(|rank| oracle::by_expert(&self.routing, rank, alignment).rows.len() as u64)
            .max();
        let mut setup = self.setup();
        setup.fields().rows_by_expert = Some(most.unwrap_or(0));
        setup
    }

    /// Whether its ranks are several nodes.
    fn ranks_per_node(&self) -> Option<u32> {
        let nodes = self.nodes.as_ref().map(|nodes| nodes.ranks_per_node);
        nodes.filter(|&per_node| per_node < self.routing.num_ranks())
    }

    /// Runs the case by expert on threads, with all options.
    ///
    /// # Panics
    /// A result differs from the oracle.
    pub fn check_by_expert(&self, alignment: u32) {
        self.setup_by_expert(alignment).run(|rank| rank.check_by_expert(self, alignment));
    }

    /// The output of a selection's expert: numbers whose sum shows in which order and
    /// precision it was made.
    fn made(&self, turn: u64, dtype: DType, (rank, token, k): (u32, u32, u32), columns: usize) -> Vec<f32> {
        let base = mix(&[self.seed, turn, u64::from(rank), u64::from(token), u64::from(k), 77]);
        let number = |column| rough(mix(&[base, column as u64]));
        (0..columns).map(number).map(|value| payload::rounded(dtype, value)).collect()
    }
}

impl Rank {
    /// All checks of one routing by expert. They are dispatches with and without a wait of the host
    /// and cached, and combines of each dtype in either place, weighted or not. Collective.
    ///
    /// # Errors
    /// Errors of the operations.
    pub fn check_by_expert(&mut self, case: &Case, alignment: u32) -> Result<()> {
        let expected = self.expect(case);
        let plan = oracle::by_expert(&case.routing, self.rank, alignment);
        let per_node = case.ranks_per_node().unwrap_or(case.routing.num_ranks());
        self.equal("ranks per node", &[self.buffer.ranks_per_node()], &[per_node]);
        let (weights, layout) = self.lay_out(case, &expected)?;
        let mut place = self.place()?;
        let (x, scales) = self.payload(case, 1)?;
        let columns = self.columns(case, 1)?;
        let request = DispatchRequest::new(&x, &layout).by_expert(alignment).quantise(case.quantise);
        let request = scales.iter().fold(request, DispatchRequest::scales);
        let request = columns.iter().fold(request, DispatchRequest::column);

        // Counts stay on the device, and no weights travel.
        let output = self.dispatch(&mut place, request.counts(self.on_device()))?;
        self.buffer.check_dispatch(&output.handle, &self.stream)?;
        self.check(output.recv_topk_weights.is_none(), "no weights were sent");
        self.check(output.recv_src_meta.is_none(), "rows by expert have an entry in place of a source");
        self.check_rows_by_expert(case, 1, &plan, "on-device dispatch by expert", &output)?;
        self.check_selections(case, &plan, &output)?;
        let on_device = output.handle.clone();
        self.learn_regions(&output);
        drop(output);
        // The next dispatch sends the same rows, and marks the same padding.
        self.poison_received(plan.rows.len() as u64)?;
        self.synchronize()?;

        let request = request.topk_weights(&weights).counts(Counts::Exact);
        let output = self.dispatch(&mut place, request)?;
        self.equal("num_recv_tokens", output.num_recv_tokens.as_slice(), &[plan.rows.len() as u32]);
        let aligned: Vec<u32> = plan.starts.windows(2).map(|pair| (pair[1] - pair[0]) as u32).collect();
        self.equal("num_recv_tokens_per_expert", &output.num_recv_tokens_per_expert, &aligned);
        self.check_rows_by_expert(case, 1, &plan, "dispatch by expert", &output)?;
        self.check_selections(case, &plan, &output)?;
        let handle = output.handle.clone();
        drop(output);

        let (x, scales) = self.payload(case, 2)?;
        let columns = self.columns(case, 2)?;
        let request = CachedDispatchRequest::new(&x, &handle).quantise(case.quantise);
        let request = scales.iter().fold(request, CachedDispatchRequest::scales);
        let request = columns.iter().fold(request, CachedDispatchRequest::column);
        // Across nodes a cached dispatch requires more than one channel.
        if case.ranks_per_node().is_none() || case.num_channels > 1 {
            let output = self.dispatch_cached(&mut place, request)?;
            self.check_rows_by_expert(case, 2, &plan, "cached dispatch by expert", &output)?;
        }

        let weights = &weights;
        let columns = |dtype: DType| u64::from(case.row_bytes) / dtype.size();
        let combines = [
            (3, DType::Bf16, None, None, &handle),
            (4, DType::Bf16, Some(&place), Some(weights), &on_device),
            (5, DType::F32, None, Some(weights), &on_device),
            (6, DType::F32, Some(&place), None, &handle),
            (7, DType::F16, None, Some(weights), &handle),
            (8, DType::F16, Some(&place), None, &on_device),
            (9, DType::Bf16, None, Some(weights), &handle),
            (10, DType::F32, None, Some(weights), &handle),
        ];
        let with_weights = &handle;
        for (turn, dtype, place, weights, handle) in combines {
            // Across nodes weights are those that travelled.
            if case.ranks_per_node().is_some() && weights.is_some() && !std::ptr::eq(handle, with_weights) {
                continue;
            }
            self.check_combine_by_expert(case, turn, &plan, (dtype, columns(dtype)), place, weights, handle)?;
        }
        self.stream.synchronize()
    }

    /// Compares rows, scales and the tables of segments.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn check_rows_by_expert(
        &mut self,
        case: &Case,
        turn: u64,
        plan: &ExpertPlan,
        what: &str,
        output: &Received,
    ) -> Result<()> {
        let tables = output.handle.by_expert().expect("a dispatch by expert");
        let tables = [
            ("counts", tables.counts(), &plan.counts),
            ("starts", tables.starts(), &plan.starts),
            ("psum", tables.psum(), &plan.psum),
        ];
        for (name, table, expected) in tables {
            let got = table.values(&self.stream)?;
            self.equal(&format!("{what}: {name}"), &got, expected);
        }
        let rows = output.handle.num_recv_tokens(&self.stream)?;
        self.equal(&format!("{what}: rows"), &[rows], &[plan.rows.len() as u32]);
        self.equal(&format!("{what}: columns"), &[output.recv_columns.len()], &[case.scales.list().len()]);
        for (row, &(source, token, _)) in selected(plan) {
            for (index, column) in output.recv_columns.iter().enumerate() {
                let expected = case.column(turn, (source, token), index);
                let name = format!("{what}: column {index} of row {row}");
                self.equal(&name, &self.row_of(column, row)?, &expected);
            }
        }
        let scales = output.recv_x_scales.as_deref();
        self.check_segments(case, turn, plan, what, (&output.recv_x, scales))
    }

    /// Compares rows that lie in segments, and their scales.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn check_segments(
        &mut self,
        case: &Case,
        turn: u64,
        plan: &ExpertPlan,
        what: &str,
        (rows, scales): (&Tensor, Option<&Tensor>),
    ) -> Result<()> {
        let has_scales = matches!(case.scales, Scales::Flat | Scales::Columns(_));
        self.equal(&format!("{what}: has scales"), &[scales.is_some()], &[has_scales]);
        // The rows of a token follow each other, so that what is expected is made once.
        let mut by_token: Vec<_> = selected(plan).into_iter().collect();
        by_token.sort_by_key(|&(row, &(source, token, _))| (source, token, row));
        let of_token = |&(_, &(source, token, _)): &(usize, &(u32, u32, u32))| (source, token);
        for rows_of_token in by_token.chunk_by(|a, b| of_token(a) == of_token(b)) {
            let (source, token) = of_token(&rows_of_token[0]);
            let expected = case.row(turn, source, token);
            let expected_scales = case.scales(turn, source, token);
            for &(row, _) in rows_of_token {
                self.equal(&format!("{what}: row {row}"), &self.row_of(rows, row)?, &expected);
                if let Some(scales) = scales.filter(|_| has_scales) {
                    let (got, expected) = (self.row_of(scales, row)?, payload::bytes_of(&expected_scales));
                    self.equal(&format!("{what}: scales of row {row}"), &got, &expected);
                }
            }
        }
        Ok(())
    }

    /// Compares the sources of rows, and their weights.
    fn check_selections(&mut self, case: &Case, plan: &ExpertPlan, output: &Received) -> Result<()> {
        let read = |tensor: &Option<TypedTensor<'_, i32>>| {
            tensor.as_ref().expect("a dispatch that was not cached").values(&self.stream)
        };
        let (tokens, entries) = (read(&output.recv_src_idx)?, read(&output.recv_src_entry)?);
        let weights =
            output.recv_topk_weights.as_ref().map(|weights| weights.values(&self.stream)).transpose()?;
        for (row, selection) in plan.rows.iter().enumerate() {
            let token = selection.map_or(-1, |(_, token, _)| token as i32);
            self.equal(&format!("recv_src_idx[{row}]"), &tokens[row..=row], &[token]);
            let Some((source, token, k)) = *selection else { continue };
            let at = 2 * row..2 * row + 2;
            self.equal(&format!("recv_src_entry[{row}]"), &entries[at], &[source as i32, k as i32]);
            if let Some(weights) = &weights {
                let expected = case.token_weights(source, token)[k as usize];
                self.equal(&format!("recv_topk_weights[{row}]"), &weights[row..=row], &[expected]);
            }
        }
        Ok(())
    }

    /// Combines rows with unwritten padding, and compares the sums.
    #[allow(clippy::too_many_arguments)] // A combine, and what is known of it.
    fn check_combine_by_expert(
        &mut self,
        case: &Case,
        turn: u64,
        plan: &ExpertPlan,
        (dtype, columns): (DType, u64),
        place: Option<&Place>,
        weights: Option<&TypedTensor<'static, f32>>,
        handle: &DispatchHandle,
    ) -> Result<()> {
        let (tensor, pool);
        let rows = plan.rows.len() as u64;
        let (given, request) = if let Some(place) = place {
            pool = place.combine_rows(dtype, rows, columns)?;
            (pool.tensor(), CombineRequest::new(&pool, handle))
        } else {
            tensor = Tensor::alloc(self.device(), dtype, &[rows, columns])?;
            (&tensor, CombineRequest::new(&tensor, handle))
        };
        self.write_made(case, turn, plan, given)?;
        let request = weights.into_iter().fold(request, CombineRequest::weights);
        let output = self.combine(request)?;
        self.outcome()?;
        let weights = if weights.is_some() { Weights::OfCase } else { Weights::Ones };
        self.check_sums_by_expert(case, turn, weights, &output.combined_x)
    }

    /// Writes the experts' outputs for each row of `plan` in a turn, and no padding.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn write_made(&self, case: &Case, turn: u64, plan: &ExpertPlan, rows: &Tensor) -> Result<()> {
        let (dtype, columns) = (rows.dtype(), rows.columns() as usize);
        for (row, &selection) in selected(plan) {
            let made = rounded_bytes(dtype, &case.made(turn, dtype, selection, columns));
            // SAFETY: the row is one of the tensor's.
            unsafe { self.stream.write(rows.ptr().add(row as u64 * rows.row_stride()), &made)? };
        }
        Ok(())
    }

    /// Compares the sums of the rows that [`Rank::write_made`] wrote on all ranks in a turn, times
    /// the weights of the case or unweighted.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn check_sums_by_expert(
        &mut self,
        case: &Case,
        turn: u64,
        weights: Weights,
        sums: &Tensor,
    ) -> Result<()> {
        let (dtype, columns) = (sums.dtype(), sums.columns() as usize);
        let per_node = self.buffer.ranks_per_node();
        let per_node = (per_node < case.routing.num_ranks()).then_some(per_node);
        let got = self.row_bytes(sums)?;
        self.equal(
            &format!("turn {turn}: tokens"),
            &[got.len()],
            &[case.routing.num_tokens(self.rank) as usize],
        );
        for (token, got) in (0..).zip(&got) {
            let weights = match weights {
                Weights::OfCase => case.token_weights(self.rank, token),
                Weights::Ones => vec![1.0; case.routing.num_topk as usize],
            };
            let row = |_, k| case.made(turn, dtype, (self.rank, token, k), columns);
            let expected = oracle::combine_by_expert(
                &case.routing,
                self.rank,
                token,
                columns,
                &weights,
                per_node,
                dtype,
                row,
            );
            let name = format!("turn {turn}: combined_x[{token}]");
            self.equal(&name, got, &rounded_bytes(dtype, &expected));
        }
        Ok(())
    }
}

/// By what a combine multiplies rows by expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// The weights of the case's tokens.
    OfCase,
    /// Nothing.
    Ones,
}

/// The rows that are no padding, by their numbers.
fn selected(plan: &ExpertPlan) -> BTreeMap<usize, &(u32, u32, u32)> {
    plan.rows.iter().enumerate().filter_map(|(row, selection)| Some((row, selection.as_ref()?))).collect()
}
