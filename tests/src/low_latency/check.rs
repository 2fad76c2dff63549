//! Results of a dispatch and a combine, compared with the oracle.

use epoxide::low_latency::Received;
use epoxide::{Result, Tensor, TypedTensor};

use super::LowLatencyRank;
use super::case::LowLatencyCase;
use super::data::{Data, FP8_ERROR, SCALE_ERROR, Scales, numbers, worst_error};
use crate::compare::Difference;
use crate::oracle::{from_e4m3, low_latency_plan, recv_order};

impl LowLatencyCase {
    /// Compares a dispatch of the first round's rows with the oracle; differences are noted.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn check_dispatched(&self, rank: &mut LowLatencyRank, received: &Received<'_>) -> Result<()> {
        self.check_received(rank, received, &Data::new(self, 0))
    }

    /// Compares a dispatch with the oracle.
    pub(super) fn check_received(
        &self,
        rank: &mut LowLatencyRank,
        received: &Received<'_>,
        data: &Data,
    ) -> Result<()> {
        let (routing, max_tokens, stream) = (&self.routing, self.max_tokens, rank.stream.clone());
        let (plan, ranks) = (low_latency_plan(routing, rank.rank), routing.num_ranks());
        let rows = ranks * max_tokens;
        let num_tokens = received.num_tokens.values(&stream)?;
        let mut want: Vec<i32> = (0..ranks).map(|source| routing.num_tokens(source) as i32).collect();
        want.resize(num_tokens.len(), 0);
        rank.equal("num_tokens", &num_tokens, &want);
        let want: Vec<i32> = plan.expert_rows.iter().map(|rows| rows.len() as i32).collect();
        rank.equal("expert_counts", &received.expert_counts.values(&stream)?[..want.len()], &want);
        let (of_expert, info) = (received.expert_rows.values(&stream)?, received.src_info.values(&stream)?);
        let range = |&(count, begin): &(u32, u32)| i64::from(begin) << 32 | i64::from(count);
        let want: Vec<i64> = plan.layout_range.iter().flatten().map(range).collect();
        rank.equal("layout_range", &received.layout_range.values(&stream)?[..want.len()], &want);
        for (expert, list) in plan.expert_rows.iter().enumerate() {
            let part = expert * rows as usize..expert * rows as usize + list.len();
            let want: Vec<i32> =
                list.iter().map(|&(source, token)| (source * max_tokens + token) as i32).collect();
            rank.equal(&format!("expert_rows[{expert}]"), &of_expert[part.clone()], &want);
            let want: Vec<i32> = list.iter().map(|&(_, token)| token as i32).collect();
            rank.equal(&format!("src_info[{expert}]"), &info[part], &want);
        }
        // Rows that were not sent have unspecified contents, and a checker would report a read of
        // them: rows are read one by one.
        let got_scales = (received.scales.as_ref(), &received.columns[..]);
        for (source, token) in recv_order(routing, rank.rank) {
            let (row, of) = (source * max_tokens + token, format!("token {token} of rank {source}"));
            let x = &data.x[source as usize][token as usize];
            let (bytes, scales) = self.as_it_travels(x);
            let got = rank.row_of(&received.x, row as usize)?;
            rank.check(got == bytes, format!("row of {of} differs"));
            check_scales(rank, &scales, got_scales, row.into(), &of)?;
            let Scales::F32(scales) = scales else { continue };
            let values = bytes.iter().enumerate().map(|(at, &byte)| from_e4m3(byte) * scales[at / 128]);
            let worst = worst_error(&numbers(x), &values.collect::<Vec<f32>>(), &scales);
            // A power of two may be up to twice the scale: the step is the same in units of it.
            rank.check(worst <= FP8_ERROR, format!("{of} is off by {worst} scales"));
        }
        Ok(())
    }

    /// Where sums differ from the oracle.
    pub(super) fn compare_sums(&self, got: &[f32], data: &Data, rank: u32) -> Difference {
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

/// Compares the scales of a row, and whether they are f32 or a column.
pub(super) fn check_scales(
    rank: &mut LowLatencyRank,
    want: &Scales,
    (scales, columns): (Option<&TypedTensor<'_, f32>>, &[TypedTensor<'_, i32>]),
    row: u64,
    of: &str,
) -> Result<()> {
    let stream = rank.stream.clone();
    let word = |tensor: &Tensor<'_>, word: usize| -> Result<[u8; 4]> {
        let mut got = [0u8; 4];
        let at = word as u64 * tensor.row_bytes() + row * 4;
        // SAFETY: it is one of the tensor's elements.
        unsafe { stream.read(&mut got, tensor.ptr().add(at))? };
        Ok(got)
    };
    let kinds = match want {
        Scales::None => (false, 0),
        Scales::F32(_) => (true, 0),
        Scales::Ue8m0(_) => (false, 1),
    };
    if (scales.is_some(), columns.len()) != kinds {
        rank.note(Some(format!("{of} has f32 scales and columns: {}, {}", scales.is_some(), columns.len())));
        return Ok(());
    }
    for (block, &want) in want.of_f32().iter().enumerate() {
        let got = f32::from_le_bytes(word(scales.expect("looked at above"), block)?);
        let is_near = (got - want).abs() <= SCALE_ERROR * want;
        rank.note((!is_near).then(|| format!("scale {block} of {of} is {got}, expected {want}")));
    }
    if let Scales::Ue8m0(want) = want {
        rank.check(columns[0].rows() as usize * 4 == want.len(), format!("words of scales of {of}"));
        for (block, want) in want.chunks(4).enumerate() {
            rank.equal(&format!("scales {block} of {of}"), &word(&columns[0], block)?, want);
        }
    }
    Ok(())
}
