//! Results of a dispatch and a combine, compared with the oracle.

use epoxide::driver::DevicePtr;
use epoxide::low_latency::Received;
use epoxide::{Result, Tensor, TypedTensor};

use super::LowLatencyRank;
use super::case::LowLatencyCase;
use super::data::{Data, FP8_ERROR, SCALE_ERROR, Scales, numbers, worst_error};
use crate::compare::{Difference, origin};
use crate::oracle::{from_e4m3, low_latency_plan, recv_order};

impl LowLatencyCase {
    /// Compares a dispatch of the first round's rows with the oracle; differences are noted.
    ///
    /// # Errors
    /// Errors of the driver.
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
        rank.equal_at("num_tokens", received.num_tokens.ptr(), &num_tokens, &want);
        let want: Vec<i32> = plan.expert_rows.iter().map(|rows| rows.len() as i32).collect();
        let counts = &received.expert_counts;
        rank.equal_at("expert_counts", counts.ptr(), &counts.values(&stream)?[..want.len()], &want);
        let (of_expert, info) = (received.expert_rows.values(&stream)?, received.src_info.values(&stream)?);
        let range = |&(count, begin): &(u32, u32)| i64::from(begin) << 32 | i64::from(count);
        let want: Vec<i64> = plan.layout_range.iter().flatten().map(range).collect();
        let ranges = &received.layout_range;
        rank.equal_at("layout_range", ranges.ptr(), &ranges.values(&stream)?[..want.len()], &want);
        for (expert, list) in plan.expert_rows.iter().enumerate() {
            let part = expert * rows as usize..expert * rows as usize + list.len();
            let at = |tensor: &Tensor| tensor.ptr().add(part.start as u64 * 4);
            let want: Vec<i32> =
                list.iter().map(|&(source, token)| (source * max_tokens + token) as i32).collect();
            let (of_expert, at_rows) = (&of_expert[part.clone()], at(&received.expert_rows));
            rank.equal_at(&format!("expert_rows[{expert}]"), at_rows, of_expert, &want);
            let want: Vec<i32> = list.iter().map(|&(_, token)| token as i32).collect();
            let (info, at_info) = (&info[part.clone()], at(&received.src_info));
            rank.equal_at(&format!("src_info[{expert}]"), at_info, info, &want);
        }
        // Rows that were not sent have unspecified contents, and a checker would report a read of
        // them.
        let sent = recv_order(routing, rank.rank);
        let rows: Vec<usize> =
            sent.iter().map(|&(source, token)| (source * max_tokens + token) as usize).collect();
        let got = rank.rows_of(&received.x, &rows)?;
        let got_scales = GotScales::read(rank, received.scales.as_ref(), &received.columns, &rows)?;
        for (index, (source, token)) in sent.into_iter().enumerate() {
            let of = format!("token {token} of rank {source}");
            let x = &data.x[source as usize][token as usize];
            let (bytes, scales) = self.as_it_travels(x);
            let at = received.x.ptr().add(rows[index] as u64 * received.x.row_stride());
            rank.equal_at(&format!("row of {of}, byte "), at, &got[index], &bytes);
            got_scales.check(rank, index, &scales, &of);
            let Scales::F32(scales) = scales else { continue };
            let values = bytes.iter().enumerate().map(|(at, &byte)| from_e4m3(byte) * scales[at / 128]);
            let worst = worst_error(&numbers(x), &values.collect::<Vec<f32>>(), &scales);
            // A power of two may be up to twice the scale: the step is the same in units of it.
            rank.check(worst <= FP8_ERROR, format!("{of} is off by {worst} scales"));
        }
        Ok(())
    }

    /// Where the sums at `from` differ from the oracle.
    pub(super) fn compare_sums(
        &self,
        got: &[f32],
        data: &Data,
        rank: &LowLatencyRank,
        from: DevicePtr,
    ) -> Difference {
        let want = data.combined(self, rank.rank).concat();
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
        let origin = origin(rank.device(), from.add(at as u64 * self.combine_dtype.size()));
        Some(format!(
            "combined[{token}][{column}] = {}, expected {}; {count} columns of the token differ, the last is {last}{origin}",
            got[at], want[at]
        ))
    }
}

/// The received scales of some rows.
pub(super) struct GotScales {
    /// Whether they are f32, and how many tensors of columns there are.
    kinds: (bool, usize),
    /// By word of a row, those of all rows.
    words: Vec<Vec<[u8; 4]>>,
    /// The first word of each row, and the distance of a row's words in bytes.
    places: (Vec<DevicePtr>, u64),
}

impl GotScales {
    /// Reads the scales of the rows `rows`.
    pub(super) fn read(
        rank: &LowLatencyRank,
        scales: Option<&TypedTensor<'_, f32>>,
        columns: &[TypedTensor<'_, i32>],
        rows: &[usize],
    ) -> Result<GotScales> {
        let table: Option<&Tensor> = scales.map(|it| &**it).or(columns.first().map(|it| &**it));
        let words = table.map_or(Ok(Vec::new()), |table| rank.columns_of(table, rows))?;
        let first = |table: &Tensor| rows.iter().map(|row| table.ptr().add(*row as u64 * 4)).collect();
        let places = table.map_or((Vec::new(), 0), |table| (first(table), table.row_stride()));
        Ok(GotScales { kinds: (scales.is_some(), columns.len()), words, places })
    }

    /// Compares those of row `index` of these, and whether they are f32 or a column.
    pub(super) fn check(&self, rank: &mut LowLatencyRank, index: usize, want: &Scales, of: &str) {
        let kinds = match want {
            Scales::None => (false, 0),
            Scales::F32(_) => (true, 0),
            Scales::Ue8m0(_) => (false, 1),
        };
        if self.kinds != kinds {
            rank.note(Some(format!("{of} has f32 scales and columns: {:?}", self.kinds)));
            return;
        }
        let at = |block: usize| self.places.0[index].add(block as u64 * self.places.1);
        for (block, &want) in want.of_f32().iter().enumerate() {
            let got = f32::from_le_bytes(self.words[block][index]);
            let is_near = (got - want).abs() <= SCALE_ERROR * want;
            if !is_near {
                rank.equal_at(&format!("scale {block} of {of}"), at(block), &[got], &[want]);
            }
        }
        if let Scales::Ue8m0(want) = want {
            rank.check(self.words.len() * 4 == want.len(), format!("words of scales of {of}"));
            for (block, (got, want)) in self.words.iter().zip(want.chunks(4)).enumerate() {
                rank.equal_at(&format!("scales {block} of {of}"), at(block), &got[index], want);
            }
        }
    }
}
