//! The expert-major copy, against the oracle.

use epoxide::low_latency::Received;
use epoxide::{DType, Result, StreamOrder, Tensor, TypedTensor};

use super::LowLatencyRank;
use super::case::LowLatencyCase;
use super::data::{Data, SCALE_ERROR};
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
        buffer.gather_by_expert(received, &x, scales.as_ref(), StreamOrder::on(stream))?;
        let mut got = vec![0u8; (x.rows() * x.row_bytes()) as usize];
        // SAFETY: the tensor has so many bytes.
        unsafe { stream.read(&mut got, x.ptr())? };
        let got_scales = scales.map_or(Ok(Vec::new()), |scales| scales.values(stream))?;

        let plan = low_latency_plan(&self.routing, rank.rank);
        let (row_bytes, rows) = (x.row_bytes() as usize, rows as usize);
        let untouched = f32::from_bits(u32::from_ne_bytes([BEFORE; 4]));
        for (expert, list) in plan.expert_rows.iter().enumerate() {
            for index in 0..rows {
                let row = expert * rows + index;
                let token = list.get(index).map(|&(source, token)| &data.x[source as usize][token as usize]);
                let (bytes, want) = token.map_or_else(
                    || (vec![BEFORE; row_bytes], vec![untouched; of_row as usize]),
                    |x| {
                        let (bytes, scales) = self.as_it_travels(x);
                        (bytes, scales.of_f32().to_vec())
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
            }
        }
        Ok(())
    }
}
