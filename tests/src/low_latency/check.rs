//! Results of a dispatch and a combine, compared with the oracle.

use half::bf16;

use epoxide::driver::Stream;
use epoxide::low_latency::{Quantise, Received};
use epoxide::{Error, Result};

use super::case::LowLatencyCase;
use super::data::{Data, FP8_ERROR, SCALE_ERROR, numbers, worst_error};
use crate::oracle::{from_e4m3, low_latency_plan};

impl LowLatencyCase {
    /// Differences from the oracle in a dispatch of the first round's rows.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn check_dispatched(
        &self,
        received: &Received<'_>,
        stream: &Stream,
        rank: u32,
    ) -> Result<Vec<String>> {
        self.check_received(received, &Data::new(self, 0), stream, rank)
    }

    /// Differences from the oracle in a dispatch.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn check_received(
        &self,
        received: &Received<'_>,
        data: &Data,
        stream: &Stream,
        rank: u32,
    ) -> Result<Vec<String>> {
        let routing = &self.routing;
        let (plan, max_tokens) = (low_latency_plan(routing, rank), self.max_tokens);
        let rows = routing.num_ranks() * max_tokens;
        let mut differing = Vec::new();
        let mut equal = |what: String, got: Vec<i64>, want: Vec<i64>| {
            if got != want {
                differing.push(format!("{what} = {got:?}, expected {want:?}"));
            }
        };
        let num_tokens = received.num_tokens.values(stream)?;
        let counts = received.expert_counts.values(stream)?;
        let (of_expert, info) = (received.expert_rows.values(stream)?, received.src_info.values(stream)?);
        let ranges = received.layout_range.values(stream)?;
        let want = (0..num_tokens.len() as u32)
            .map(|rank| if rank < routing.num_ranks() { routing.num_tokens(rank).into() } else { 0 });
        equal("num_tokens".into(), num_tokens.iter().map(|&tokens| tokens.into()).collect(), want.collect());
        for (expert, want) in plan.expert_rows.iter().enumerate() {
            equal(format!("expert_counts[{expert}]"), vec![counts[expert].into()], vec![want.len() as i64]);
            let first = expert * rows as usize;
            let part = |from: &[i32]| {
                from[first..first + want.len()].iter().map(|&value| value.into()).collect::<Vec<i64>>()
            };
            let row = |&(source, token): &(u32, u32)| i64::from(source * max_tokens + token);
            equal(format!("expert_rows[{expert}]"), part(&of_expert), want.iter().map(row).collect());
            equal(format!("src_info[{expert}]"), part(&info), want.iter().map(|row| row.1.into()).collect());
            let ranges = &ranges[expert * routing.num_ranks() as usize..][..routing.num_ranks() as usize];
            let range = |&(count, begin): &(u32, u32)| i64::from(begin) << 32 | i64::from(count);
            equal(
                format!("layout_range[{expert}]"),
                ranges.to_vec(),
                plan.layout_range[expert].iter().map(range).collect(),
            );
        }
        // Rows that were not sent have unspecified contents, and a checker would report a read of
        // them: rows are read one by one.
        let row_bytes = received.x.row_bytes() as usize;
        for source in 0..routing.num_ranks() {
            for token in (0..routing.num_tokens(source)).filter(|&token| routing.hits(source, token, rank)) {
                let row = u64::from(source * max_tokens + token);
                let mut got = vec![0u8; row_bytes];
                // SAFETY: the row is one of the tensor's.
                unsafe { stream.read(&mut got, received.x.ptr().add(row * received.x.row_stride()))? };
                let x = &data.x[source as usize][token as usize];
                let (bytes, scales) = self.as_it_travels(x);
                if got != bytes {
                    differing.push(format!("row of token {token} of rank {source} differs"));
                }
                if self.quantise == Quantise::Not {
                    continue;
                }
                let tensor = received.scales.as_ref().ok_or_else(|| Error::os("check", "no scales"))?;
                for (block, &scale) in scales.iter().enumerate() {
                    let mut got = [0u8; 4];
                    let at = (block as u64 * u64::from(rows) + row) * 4;
                    // SAFETY: it is one of the tensor's elements.
                    unsafe { stream.read(&mut got, tensor.ptr().add(at))? };
                    let got = f32::from_le_bytes(got);
                    if (got - scale).abs() > SCALE_ERROR * scale {
                        differing.push(format!(
                            "scale {block} of token {token} of rank {source} is {got}, expected {scale}"
                        ));
                    }
                }
                let values = bytes.iter().enumerate().map(|(at, &byte)| from_e4m3(byte) * scales[at / 128]);
                let worst = worst_error(&numbers(x), &values.collect::<Vec<f32>>(), &scales);
                // A power of two may be up to twice the scale: the step is the same in units of it.
                if worst > FP8_ERROR {
                    differing.push(format!("token {token} of rank {source} is off by {worst} scales"));
                }
            }
        }
        Ok(differing)
    }

    /// Where sums differ from the oracle.
    pub(super) fn check_sums(&self, got: &[bf16], data: &Data, rank: u32) -> Option<String> {
        let want = data.combined(self, rank).concat();
        if got.len() != want.len() {
            return Some(format!("combined has {} elements, expected {}", got.len(), want.len()));
        }
        let at = got.iter().zip(&want).position(|(got, want)| got.to_bits() != want.to_bits())?;
        let (token, column) = (at / self.hidden as usize, at % self.hidden as usize);
        let row = token * self.hidden as usize..(token + 1) * self.hidden as usize;
        let differ: Vec<usize> = row
            .clone()
            .filter(|&at| got[at].to_bits() != want[at].to_bits())
            .map(|at| at - row.start)
            .collect();
        let (count, last) = (differ.len(), differ.last().copied().unwrap_or(column));
        Some(format!(
            "combined[{token}][{column}] = {}, expected {}; {count} columns of the token differ, the last is {last}",
            got[at], want[at]
        ))
    }
}
