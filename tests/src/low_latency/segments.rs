//! Rows by expert that a dispatch brings, against the oracle.

use epoxide::driver::Stream;
use epoxide::low_latency::Received;
use epoxide::{Result, Tensor};

use super::LowLatencyRank;
use super::case::LowLatencyCase;
use super::check::GotScales;
use super::data::Data;
use super::inputs::LowLatencyInputs;
use crate::oracle::by_expert;

/// Contents of the caller's memory before: rows that are not sent must keep them.
const BEFORE: u8 = 0xa5;

/// Fills a tensor with [`BEFORE`].
pub(super) fn mark(stream: &Stream, tensor: &Tensor<'_>) -> Result<()> {
    let bytes = vec![BEFORE; (tensor.rows() * tensor.row_bytes()) as usize];
    // SAFETY: the tensor is contiguous, and has so many bytes.
    unsafe { stream.write(tensor.ptr(), &bytes) }
}

impl LowLatencyCase {
    /// Compares the rows by expert of a dispatch with the oracle.
    pub(super) fn check_segments(
        &self,
        rank: &mut LowLatencyRank,
        received: &Received<'_>,
        inputs: &LowLatencyInputs,
        data: &Data,
    ) -> Result<()> {
        let Some(segments) = self.segments else {
            rank.check(received.by_expert.is_none(), "rows by expert were not asked for");
            return Ok(());
        };
        let got = received.by_expert.as_ref().expect("they were asked for");
        let plan = by_expert(&self.routing, rank.rank, segments.alignment);
        let stream = rank.stream.clone();
        let tables = [
            ("counts by expert", got.experts.counts(), &plan.counts),
            ("starts", got.experts.starts(), &plan.starts),
            ("psum", got.experts.psum(), &plan.psum),
        ];
        for (what, table, want) in tables {
            rank.equal_at(what, table.ptr(), &table.values(&stream)?, want);
        }
        let src_idx = got.recv_src_idx.values(&stream)?;
        let want: Vec<i32> = plan.rows.iter().map(|of| of.map_or(-1, |(_, token, _)| token as i32)).collect();
        rank.equal_at("recv_src_idx", got.recv_src_idx.ptr(), &src_idx[..want.len()], &want);
        let entries = got.recv_src_entry.values(&stream)?;
        let weights = got.recv_topk_weights.values(&stream)?;
        let given = inputs.given();
        let x = given.map_or_else(|| got.recv_x.as_ref().expect("in memory of the library's"), |it| it.x);
        let scales = given.and_then(|it| it.scales).or(got.recv_x_scales.as_ref());
        let columns = given.and_then(|it| it.columns).map_or(&got.recv_columns[..], std::slice::from_ref);
        rank.check(got.recv_x.is_none() == given.is_some(), "rows are in the memory that was given");
        let are_given = given.is_some_and(|it| it.columns.is_some());
        rank.check(!are_given || got.recv_columns.is_empty(), "columns are in the memory that was given");
        // A checker would report a read of padding that is unwritten.
        let rows: Vec<usize> =
            (0..plan.rows.len()).filter(|&row| plan.rows[row].is_some() || given.is_some()).collect();
        let got_rows = rank.rows_of(x, &rows)?;
        let got_scales = GotScales::read(rank, scales, columns, &rows)?;
        for (index, (row, got_row)) in rows.into_iter().zip(got_rows).enumerate() {
            let Some((source, token, k)) = plan.rows[row] else {
                rank.check(
                    got_row.iter().all(|byte| *byte == BEFORE),
                    format!("padding row {row} was written"),
                );
                continue;
            };
            let what = format!("row {row}, of entry {k} of token {token} of rank {source}");
            let (entry, at_entry) = (&entries[2 * row..][..2], got.recv_src_entry.ptr().add(row as u64 * 8));
            rank.equal_at(&format!("entry of {what}"), at_entry, entry, &[source as i32, k as i32]);
            let weight = data.weights[source as usize][token as usize][k as usize];
            let at_weight = got.recv_topk_weights.ptr().add(row as u64 * 4);
            let bits = [weights[row].to_bits()];
            rank.equal_at(&format!("bits of the weight of {what}"), at_weight, &bits, &[weight.to_bits()]);
            let (bytes, want) = self.as_it_travels(&data.x[source as usize][token as usize]);
            let at = x.ptr().add(row as u64 * x.row_stride());
            rank.equal_at(&format!("{what}, byte "), at, &got_row, &bytes);
            got_scales.check(rank, index, &want, &what);
        }
        Ok(())
    }
}
