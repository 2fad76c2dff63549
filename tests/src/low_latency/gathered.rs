//! The expert-major copy, against the oracle.

use epoxide::low_latency::Received;
use epoxide::{DType, Result, StreamOrder, Tensor, TypedTensor};

use super::LowLatencyRank;
use super::case::LowLatencyCase;
use super::data::{Data, SCALE_ERROR, Scales};
use crate::oracle::low_latency_plan;

/// Contents of the copy's memory before: rows behind those of an expert must keep them.
const BEFORE: u8 = 0xa5;

impl LowLatencyCase {
    /// Compares the expert-major copy of a dispatch with the oracle.
    pub(super) fn check_gathered(
        &self,
        rank: &mut LowLatencyRank,
        received: &Received<'_>,
        data: &Data,
    ) -> Result<()> {
        let (buffer, stream) = (&mut rank.buffer, &*rank.stream);
        let (experts, rows, hidden) =
            (u64::from(buffer.local_experts()), buffer.rows(), u64::from(self.hidden));
        let of_row = hidden.div_ceil(128);
        let filled = |dtype: DType, shape: [u64; 2]| {
            let tensor = Tensor::alloc(stream.device(), dtype, &shape)?;
            let bytes = vec![BEFORE; (tensor.rows() * tensor.row_bytes()) as usize];
            // SAFETY: the tensor was just made, and has so many bytes.
            unsafe { stream.write(tensor.ptr(), &bytes)? };
            Ok::<_, epoxide::Error>(tensor)
        };
        let x = filled(received.x.dtype(), [experts * rows, hidden])?;
        let scales: Option<TypedTensor<'_, f32>> = match &received.scales {
            Some(_) => Some(filled(DType::F32, [experts * of_row, rows])?.typed()?),
            None => None,
        };
        let of_words = received.columns.iter().map(|column| column.rows()).sum::<u64>();
        let words = match of_words {
            0 => None,
            words => Some(filled(DType::I32, [experts * words, rows])?.typed::<i32>()?),
        };
        let order = StreamOrder::on(stream);
        match &words {
            None => buffer.gather_by_expert(received, &x, scales.as_ref(), order)?,
            Some(words) => buffer.gather_columns_by_expert(received, &x, words, order)?,
        };
        let mut got = vec![0u8; (x.rows() * x.row_bytes()) as usize];
        // SAFETY: the tensor has so many bytes.
        unsafe { stream.read(&mut got, x.ptr())? };
        let got_scales = scales.map_or(Ok(Vec::new()), |scales| scales.values(stream))?;
        let got_words = words.map_or(Ok(Vec::new()), |words| words.values(stream))?;

        let plan = low_latency_plan(&self.routing, rank.rank);
        let (row_bytes, rows) = (x.row_bytes() as usize, rows as usize);
        let untouched = f32::from_bits(u32::from_ne_bytes([BEFORE; 4]));
        for (expert, list) in plan.expert_rows.iter().enumerate() {
            for index in 0..rows {
                let row = expert * rows + index;
                let token = list.get(index).map(|&(source, token)| &data.x[source as usize][token as usize]);
                let (bytes, want, packed) = token.map_or_else(
                    || {
                        let packed = vec![BEFORE; 4 * of_words as usize];
                        (vec![BEFORE; row_bytes], vec![untouched; of_row as usize], packed)
                    },
                    |x| match self.as_it_travels(x) {
                        (bytes, Scales::Ue8m0(scales)) => (bytes, Vec::new(), scales),
                        (bytes, scales) => (bytes, scales.of_f32().to_vec(), Vec::new()),
                    },
                );
                let of = || format!("row {index} of expert {expert}");
                let same = got[row * row_bytes..][..row_bytes] == bytes;
                rank.note((!same).then(|| format!("{} is not as that of {:?} came", of(), list.get(index))));
                for (block, want) in want.iter().enumerate().filter(|_| !got_scales.is_empty()) {
                    let got = got_scales[(expert * of_row as usize + block) * rows + index];
                    let is_near = (got - want).abs() <= SCALE_ERROR * want.abs();
                    let what = || format!("scale {block} of {} is {got}, expected {want}", of());
                    rank.note((!is_near).then(what));
                }
                // Four scales of MXFP8 to a word, the first in its lowest byte.
                for (word, want) in packed.chunks(4).enumerate().filter(|_| !got_words.is_empty()) {
                    let got = got_words[(expert * of_words as usize + word) * rows + index].to_le_bytes();
                    let what = || format!("word {word} of {} is {got:?}, expected {want:?}", of());
                    rank.note((got[..] != *want).then(what));
                }
            }
        }
        Ok(())
    }
}
