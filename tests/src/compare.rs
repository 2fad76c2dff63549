//! Comparing what a device gave with what the oracle expects. A difference is named by table, row
//! and column.

use std::fmt::{Debug, Display};

use crate::oracle::{self, InternodePlan, Plan};
use epoxide::Result;
use epoxide::driver::{Device, DevicePtr, Stream};
use epoxide::internal::driver::driver;
use epoxide::throughput::{DispatchHandle, DispatchLayout};
use epoxide::{Element, Tensor, TypedTensor};

/// The first difference, or none.
pub type Difference = Option<String>;

/// Compares a table, row after row, with the expected one.
pub fn table<T: PartialEq + Display + Copy>(
    what: &str,
    columns: usize,
    got: &[T],
    expected: &[T],
) -> Difference {
    table_by(what, columns, got, expected, |got, expected| got == expected)
}

/// Compares like [`table`], for floats that must be the same bits.
pub fn bits(what: &str, columns: usize, got: &[f32], expected: &[f32]) -> Difference {
    table_by(what, columns, got, expected, same_bits)
}

/// Whether two floats are the same bits.
pub fn same_bits(got: &f32, expected: &f32) -> bool {
    got.to_bits() == expected.to_bits()
}

fn table_by<T: Display + Copy>(
    what: &str,
    columns: usize,
    got: &[T],
    expected: &[T],
    same: impl Fn(&T, &T) -> bool,
) -> Difference {
    first_of_table(what, columns, got, expected, same).map(|(difference, ..)| difference)
}

/// The first difference of a table, with its row and column. The first place of all where the
/// numbers of entries differ.
fn first_of_table<T: Display + Copy>(
    what: &str,
    columns: usize,
    got: &[T],
    expected: &[T],
    same: impl Fn(&T, &T) -> bool,
) -> Option<(String, usize, usize)> {
    if got.len() != expected.len() {
        let text = format!("{what}: expected {} entries, got {}", expected.len(), got.len());
        return Some((text, 0, 0));
    }
    let at = got.iter().zip(expected).position(|(got, expected)| !same(got, expected))?;
    let (row, column) = (at / columns.max(1), at % columns.max(1));
    let text = format!("{what}, row {row}, column {column}: expected {}, got {}", expected[at], got[at]);
    Some((text, row, column))
}

/// Lines about the origin of a wrong value in device memory. Empty on a device without checks.
pub fn origin(device: &Device, at: DevicePtr) -> String {
    let origin = driver(device).origin(at);
    origin.map_or_else(String::new, |origin| format!("\n  {origin}"))
}

/// Lines about the origin of a wrong number of received rows, in the handle that has it.
pub fn origin_of_rows(device: &Device, handle: &DispatchHandle) -> String {
    origin(device, handle.num_recv_tokens_on_device().ptr())
}

/// Compares the first rows of a tensor, which the host has in `got`, with the expected ones. A
/// difference names the origin of the wrong value.
pub fn first_rows<T: Display + Copy>(
    device: &Device,
    what: &str,
    from: &Tensor,
    (columns, got, expected): (usize, &[T], &[T]),
    same: impl Fn(&T, &T) -> bool,
) -> Difference {
    let (difference, row, column) = first_of_table(what, columns, got, expected, same)?;
    let place = row as u64 * from.row_stride() + (column * size_of::<T>()) as u64;
    Some(difference + &origin(device, from.ptr().add(place)))
}

/// Compares two values.
pub fn value<T: PartialEq + Debug>(what: &str, got: T, expected: T) -> Difference {
    (got != expected).then(|| format!("{what}: expected {expected:?}, got {got:?}"))
}

/// Compares a layout, sender side.
pub fn layout(stream: &Stream, got: &DispatchLayout, expected: &oracle::Layout) -> Result<Difference> {
    let num_ranks = expected.num_tokens_per_rank.len();
    let in_rank = expected.is_token_in_rank.concat();
    Ok(tensor(
        stream,
        "num_tokens_per_rank",
        &got.num_tokens_per_rank(),
        num_ranks,
        &expected.num_tokens_per_rank,
    )?
    .or(tensor(
        stream,
        "num_tokens_per_expert",
        &got.num_tokens_per_expert(),
        expected.num_tokens_per_expert.len(),
        &expected.num_tokens_per_expert,
    )?)
    .or(tensor(stream, "is_token_in_rank", &got.is_token_in_rank(), num_ranks, &in_rank)?))
}

/// Compares a layout's quantities of nodes, if there are several.
pub fn nodes(stream: &Stream, got: &DispatchLayout, expected: Option<&InternodePlan>) -> Result<Difference> {
    match (got.num_tokens_per_rdma_rank(), expected) {
        (None, None) => Ok(None),
        (Some(got), Some(expected)) => {
            let expected = &expected.num_tokens_per_rdma_rank;
            tensor(stream, "num_tokens_per_rdma_rank", &got, expected.len(), expected)
        }
        (got, _) => {
            Ok(Some(format!("num_tokens_per_rdma_rank: got {}", if got.is_some() { "some" } else { "none" })))
        }
    }
}

/// All matrices and lists of a handle that kernels write.
pub fn tables(handle: &DispatchHandle) -> Vec<(&'static str, TypedTensor<'static, i32>)> {
    let mut all = vec![
        ("send_head", handle.send_head()),
        ("num_recv_tokens_per_expert", handle.num_recv_tokens_per_expert()),
        ("num_recv_tokens", handle.num_recv_tokens_on_device()),
    ];
    if let Some(handle) = handle.intranode() {
        all.extend([
            ("rank_prefix_matrix", handle.rank_prefix_matrix()),
            ("channel_prefix_matrix", handle.channel_prefix_matrix()),
            ("recv_channel_prefix_matrix", handle.recv_channel_prefix_matrix()),
        ]);
    }
    if let Some(handle) = handle.internode() {
        all.extend([
            ("recv_rdma_rank_prefix_sum", handle.recv_rdma_rank_prefix_sum()),
            ("rdma_channel_prefix_matrix", handle.rdma_channel_prefix_matrix()),
            ("recv_rdma_channel_prefix_matrix", handle.recv_rdma_channel_prefix_matrix()),
            ("recv_gbl_channel_prefix_matrix", handle.recv_gbl_channel_prefix_matrix()),
            ("send_rdma_head", handle.send_rdma_head()),
        ]);
    }
    all
}

/// Compares all matrices of a handle: `internode` where there are several nodes.
pub fn handle(
    stream: &Stream,
    got: &DispatchHandle,
    expected: &Plan,
    internode: Option<&InternodePlan>,
) -> Result<Difference> {
    let words = |some: bool| if some { "several nodes" } else { "one node" };
    let [want, have] = [internode.is_some(), got.internode().is_some()].map(words);
    if want != have {
        return Ok(Some(format!("handle: expected one of {want}, got one of {have}")));
    }
    let relayed = got.internode().map_or(Ok(0), |got| got.num_rdma_recv_tokens(stream))?;
    let (tokens, channels) = (expected.send_head.len(), expected.channel_prefix_matrix[0].len());
    let mut difference =
        value("num_rdma_recv_tokens", relayed, internode.map_or(0, InternodePlan::num_rdma_recv_tokens))
            .or(value("num_tokens", got.num_tokens() as usize, tokens))
            .or(value("num_channels", got.num_channels() as usize, channels));

    let list = |values: &[i32]| (values.len(), values.to_vec());
    let matrix = |rows: &Vec<Vec<i32>>| (rows.first().map_or(0, Vec::len), rows.concat());
    let per_expert: Vec<i32> =
        expected.num_recv_tokens_per_expert.iter().map(|&count| count as i32).collect();
    let mut wanted =
        vec![matrix(&expected.send_head), list(&per_expert), list(&[expected.num_recv_tokens as i32])];
    if got.intranode().is_some() {
        let Plan { rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, .. } = expected;
        wanted.extend([rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix].map(matrix));
    }
    if let Some(expected) = internode {
        wanted.extend([
            list(&expected.recv_rdma_rank_prefix_sum),
            matrix(&expected.rdma_channel_prefix_matrix),
            matrix(&expected.recv_rdma_channel_prefix_matrix),
            matrix(&expected.recv_gbl_channel_prefix_matrix),
            matrix(&expected.send_rdma_head),
        ]);
    }
    for ((what, got), (columns, expected)) in tables(got).iter().zip(wanted) {
        difference = difference.or(tensor(stream, what, got, columns, &expected)?);
    }
    if let (Some(got), Some(expected)) = (got.internode(), internode) {
        for (what, got, (columns, expected)) in [
            (
                "recv_gbl_rank_prefix_sum",
                got.recv_gbl_rank_prefix_sum(stream)?,
                list(&expected.recv_gbl_rank_prefix_sum),
            ),
            (
                "gbl_channel_prefix_matrix",
                got.gbl_channel_prefix_matrix(stream)?,
                matrix(&expected.gbl_channel_prefix_matrix),
            ),
            ("send_nvl_head", got.send_nvl_head(stream)?, matrix(&expected.send_nvl_head)),
        ] {
            difference = difference.or(table(what, columns, &got, &expected));
        }
    }
    Ok(difference)
}

/// Compares a tensor's shape and values.
pub fn tensor<T: Element + PartialEq + Display>(
    stream: &Stream,
    what: &str,
    got: &Tensor,
    columns: usize,
    expected: &[T],
) -> Result<Difference> {
    let values = got.to_host::<T>(stream)?;
    let at = values.iter().zip(expected).position(|(got, want)| got != want).unwrap_or(0);
    let origin = || origin(stream.device(), got.ptr().add((at * size_of::<T>()) as u64));
    Ok(table(what, columns, &values, expected).map(|difference| difference + &origin()))
}

/// Compares received rows byte by byte. `expected_of(source, token)` gives the row of a token. Its
/// first bytes are source rank and token ([`Case::row`](crate::roundtrip::Case::row) stamps them),
/// so that a row in the wrong place is recognised. `origin(row, byte)` gives lines about the origin
/// of a wrong byte.
pub fn rows(
    what: &str,
    got: &[u8],
    row_bytes: usize,
    sources: &[(u32, u32)],
    expected_of: impl Fn(u32, u32) -> Vec<u8>,
    origin: impl Fn(u64, u64) -> String,
) -> Difference {
    if got.len() != row_bytes * sources.len() {
        return Some(format!(
            "{what}: expected {} rows, got {}",
            sources.len(),
            got.len() / row_bytes.max(1)
        ));
    }
    for (row, (got, &(source, token))) in got.chunks_exact(row_bytes).zip(sources).enumerate() {
        let expected = expected_of(source, token);
        let Some(at) = got.iter().zip(&expected).position(|(got, expected)| got != expected) else {
            continue;
        };
        let stamp = |bytes: &[u8]| bytes.first_chunk().map_or(u32::MAX, |word| u32::from_le_bytes(*word));
        let (found_source, found_token) = (stamp(got), stamp(&got[4..]));
        // The stamp is believed of a token that was sent here, and of any other whose row this is
        // as a whole.
        let expected_there = sources.contains(&(found_source, found_token));
        let is_token = || expected_of(found_source, found_token) == got;
        let text = if at < 8 && (expected_there || is_token()) {
            let stray = if expected_there { "" } else { ", which was not sent here" };
            format!(
                "{what}: row {row} holds token {found_token} of rank {found_source}{stray}, expected token {token} of rank {source}"
            )
        } else {
            format!(
                "{what}: row {row} is not token {token} of rank {source}: byte {at} is {:#04x}, expected {:#04x}",
                got[at], expected[at]
            )
        };
        return Some(text + &origin(row as u64, at as u64));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named() {
        assert_eq!(table("t", 2, &[1, 2, 3, 4], &[1, 2, 3, 4]), None);
        assert_eq!(
            table("t", 2, &[1, 2, 3, 4], &[1, 2, 9, 4]).unwrap(),
            "t, row 1, column 0: expected 9, got 3"
        );
        assert_eq!(table("t", 2, &[1], &[]).unwrap(), "t: expected 0 entries, got 1");
        assert_eq!(bits("w", 1, &[-0.0], &[0.0]).unwrap(), "w, row 0, column 0: expected 0, got -0");
        assert_eq!(bits("w", 1, &[f32::NAN], &[f32::NAN]), None);
        assert_eq!(value("n", 1, 2).unwrap(), "n: expected 2, got 1");
    }

    #[test]
    fn rows_in_the_wrong_place_are_recognised() {
        let make =
            |source: u32, token: u32| [source.to_le_bytes(), token.to_le_bytes(), [7; 4], [8; 4]].concat();
        let none = |_, _| String::new();
        let sources = [(0, 3), (2, 5)];
        let good = [make(0, 3), make(2, 5)].concat();
        assert_eq!(rows("x", &good, 16, &sources, make, none), None);
        let swapped = [make(2, 5), make(0, 3)].concat();
        assert_eq!(
            rows("x", &swapped, 16, &sources, make, none).unwrap(),
            "x: row 0 holds token 5 of rank 2, expected token 3 of rank 0"
        );
        let stray = [make(1, 7), make(2, 5)].concat();
        assert_eq!(
            rows("x", &stray, 16, &sources, make, none).unwrap(),
            "x: row 0 holds token 7 of rank 1, which was not sent here, expected token 3 of rank 0"
        );
        let spoilt = [&[0xa5; 16][..], &good[16..]].concat();
        assert_eq!(
            rows("x", &spoilt, 16, &sources, make, |row, byte| format!(" ({row}, {byte})")).unwrap(),
            "x: row 0 is not token 3 of rank 0: byte 0 is 0xa5, expected 0x00 (0, 0)"
        );
        let mut torn = good.clone();
        torn[16 + 9] = 1;
        assert_eq!(
            rows("x", &torn, 16, &sources, make, none).unwrap(),
            "x: row 1 is not token 5 of rank 2: byte 9 is 0x01, expected 0x07"
        );
        assert_eq!(rows("x", &good[..16], 16, &sources, make, none).unwrap(), "x: expected 2 rows, got 1");
    }
}
