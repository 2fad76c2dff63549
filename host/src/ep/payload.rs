//! The payload of a token: a row, and columns of bytes.

use std::sync::Arc;

use epoxide_gpu::layout::{DevicePtr, MAX_COLUMNS, MX_BLOCK, PackArgs, column_stride};

use super::core::{Arena, Choice, Pieces};
use super::tensor::{DType, Owner, Tensor};
use crate::driver::Stream;
use crate::error::{Error, Result};

/// Threads per block of the kernel that packs columns.
const PACK_THREADS: u32 = 256;
/// Elements of a row that share a scale in the usual FP8 formats.
const FP8_BLOCK: u64 = 128;
/// Elements of a row that share a scale in MXFP8.
const MXFP8_BLOCK: u64 = MX_BLOCK as u64;
/// Elements of a row that share a scale in NVFP4.
const NVFP4_BLOCK: u64 = 16;

/// The payload of a token: a row of elements of one type, and up to four columns, such as its
/// scales. Dispatch moves the bytes of both and gives them no meaning.
///
/// It computes the sizes that a buffer needs ([`Payload::max_scales`]) and the shapes of tensors.
/// `DispatchRequest::payload` of [high
/// throughput](crate::throughput::DispatchRequest::payload) and of [low
/// latency](crate::low_latency::DispatchRequest::payload) checks tensors against it.
///
/// | constructor | row | columns |
/// |---|---|---|
/// | [`Payload::rows`] | any type but i64 and bool; in low latency bf16, f16, fp8, fp4 or u8 | none |
/// | [`Payload::fp8`] | e4m3 or e5m2 `[hidden]` | f32 `[hidden / 128]`, rounded up |
/// | [`Payload::fp8_ue8m0`] | e4m3 or e5m2 `[hidden]` | UE8M0 of 128 elements, four to an i32, `[hidden / 512]`, rounded up |
/// | [`Payload::mxfp8`] | e4m3 or e5m2 `[hidden]` | UE8M0 `[hidden / 32]` |
/// | [`Payload::nvfp4`] | fp4 `[hidden / 2]`, two elements to a byte | e4m3 `[hidden / 16]`, f32 `[1]` |
///
/// A dispatch can convert rows of bf16 to [`Payload::fp8`] or [`Payload::mxfp8`] of e4m3:
/// [`Quantise`](crate::throughput::Quantise).
///
/// ```
/// use epoxide::{DType, Payload};
///
/// let payload = Payload::nvfp4(7168)?;
/// assert_eq!((payload.row(), payload.row_bytes()), ((DType::Fp4E2m1x2, 3584), 3584));
/// assert_eq!(payload.columns(), [(DType::Fp8E4m3, 448), (DType::F32, 1)]);
/// // 452 bytes, rounded up to 16, in units of 4.
/// assert_eq!(payload.max_scales(), 116);
/// # Ok::<(), epoxide::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payload {
    dtype: DType,
    elements: u64,
    columns: Vec<(DType, u64)>,
}

impl Payload {
    /// Rows of `elements` elements without columns.
    ///
    /// # Errors
    /// [`Error::Argument`] where the type is i64 or bool, or a row is not a positive multiple of 16
    /// bytes.
    pub fn rows(dtype: DType, elements: u64) -> Result<Payload> {
        if matches!(dtype, DType::I64 | DType::Bool) {
            return Err(Error::argument("dtype", dtype, "no dispatch sends rows of i64 or bool: use u8"));
        }
        let payload = Payload { dtype, elements, columns: Vec::new() };
        let bytes = elements.checked_mul(dtype.size());
        if bytes.is_none_or(|bytes| bytes == 0 || !bytes.is_multiple_of(16)) {
            let rule = "hidden * element size must be a positive multiple of 16 bytes";
            return Err(Error::argument("hidden", format!("{elements} x {dtype}"), rule));
        }
        Ok(payload)
    }

    /// The same with one more column, of `elements` elements of each token.
    ///
    /// # Errors
    /// [`Error::Argument`] where there are four already, a column is empty, or its elements are
    /// larger than 4 bytes.
    pub fn column(mut self, dtype: DType, elements: u64) -> Result<Payload> {
        check_count(self.columns.len() + 1)?;
        check_column(self.columns.len(), dtype, elements.saturating_mul(dtype.size()))?;
        self.columns.push((dtype, elements));
        Ok(self)
    }

    /// FP8 rows, e4m3 or e5m2, with an f32 scale for each 128 elements.
    ///
    /// # Errors
    /// [`Error::Argument`] where the type is another one, or `hidden` is no positive multiple of
    /// 16.
    pub fn fp8(dtype: DType, hidden: u64) -> Result<Payload> {
        check_fp8(dtype)?;
        Payload::rows(dtype, hidden)?.column(DType::F32, hidden.div_ceil(FP8_BLOCK))
    }

    /// FP8 rows, e4m3 or e5m2, with a UE8M0 scale for each 128 elements, packed four to an i32.
    ///
    /// # Errors
    /// As [`Payload::fp8`].
    pub fn fp8_ue8m0(dtype: DType, hidden: u64) -> Result<Payload> {
        check_fp8(dtype)?;
        Payload::rows(dtype, hidden)?.column(DType::I32, hidden.div_ceil(4 * FP8_BLOCK))
    }

    /// MXFP8 rows (OCP Microscaling Formats 1.0), e4m3 or e5m2: a UE8M0 scale for each 32 elements.
    ///
    /// # Errors
    /// [`Error::Argument`] where the type is another one, or `hidden` is no positive multiple of
    /// 32.
    pub fn mxfp8(dtype: DType, hidden: u64) -> Result<Payload> {
        check_fp8(dtype)?;
        check_blocks(hidden, MXFP8_BLOCK)?;
        Payload::rows(dtype, hidden)?.column(DType::Ue8m0, hidden / MXFP8_BLOCK)
    }

    /// NVFP4 rows of `hidden` e2m1 elements, two to a byte: an e4m3 scale for each 16 elements, and
    /// an f32 scale of the row. The tensor of rows is `[num_tokens, hidden / 2]`.
    ///
    /// # Errors
    /// [`Error::Argument`] where `hidden` is no positive multiple of 32: rows are multiples of 16
    /// bytes.
    pub fn nvfp4(hidden: u64) -> Result<Payload> {
        check_blocks(hidden, 32)?;
        let rows = Payload::rows(DType::Fp4E2m1x2, hidden / 2)?;
        rows.column(DType::Fp8E4m3, hidden / NVFP4_BLOCK)?.column(DType::F32, 1)
    }

    /// Type and elements of a row; of NVFP4, an element has two numbers.
    pub fn row(&self) -> (DType, u64) {
        (self.dtype, self.elements)
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.elements * self.dtype.size()
    }

    /// Type and elements of each column of a token.
    pub fn columns(&self) -> &[(DType, u64)] {
        &self.columns
    }

    /// Room for the columns, in units of 4 bytes: the least
    /// [`Shape::max_scales`](crate::throughput::Shape::max_scales) of a buffer, in low latency
    /// [`Options::max_scales`](crate::low_latency::Options::max_scales).
    pub fn max_scales(&self) -> u32 {
        let bytes = self.columns.iter().map(|&(dtype, elements)| elements * dtype.size());
        (record_of(bytes) / 4) as u32
    }

    /// Checks that these tensors are what it describes, for the same number of tokens.
    pub(super) fn check(&self, x: &Tensor<'_>, columns: Columns<'_>) -> Result<()> {
        let tokens = ("num_tokens", Some(x.rows()));
        x.expect("x", &[self.dtype], &[tokens, ("hidden", Some(self.elements))])?;
        if columns.count != self.columns.len() {
            let rule = format!("the payload has {}: give each with column()", self.columns.len());
            return Err(Error::argument("columns", columns.count, rule));
        }
        for (column, &(dtype, elements)) in columns.iter().zip(&self.columns) {
            let dims = [tokens, ("elements", Some(elements))];
            let is_flat = elements == 1 && column.shape().len() == 1;
            column.expect("column", &[dtype], if is_flat { &dims[..1] } else { &dims[..] })?;
        }
        Ok(())
    }
}

fn check_fp8(dtype: DType) -> Result<()> {
    if matches!(dtype, DType::Fp8E4m3 | DType::Fp8E5m2) {
        return Ok(());
    }
    Err(Error::argument("dtype", dtype, "must be fp8 (e4m3) or fp8_e5m2"))
}

fn check_blocks(hidden: u64, unit: u64) -> Result<()> {
    if hidden != 0 && hidden.is_multiple_of(unit) {
        return Ok(());
    }
    Err(Error::argument("hidden", hidden, format!("must be a positive multiple of {unit}: blocks are whole")))
}

fn check_count(count: usize) -> Result<()> {
    if count <= MAX_COLUMNS {
        return Ok(());
    }
    let rule = format!("at most {MAX_COLUMNS} columns travel with a row: put some of them together");
    Err(Error::argument("columns", count, rule))
}

/// Most bytes of a column of a token.
const MOST_COLUMN_BYTES: u64 = 1 << 16;

fn check_column(index: usize, dtype: DType, bytes: u64) -> Result<()> {
    if dtype.size() > 4 {
        let rule = format!("elements of column {index} have at most 4 bytes: pass them as u8");
        return Err(Error::argument("column", dtype, rule));
    }
    if bytes == 0 || bytes > MOST_COLUMN_BYTES {
        let rule = format!("column {index} must have 1 to {MOST_COLUMN_BYTES} bytes per token");
        return Err(Error::argument("column", bytes, rule));
    }
    Ok(())
}

/// Bytes of a record whose columns have these bytes each. A single column is not padded, so that
/// f32 needs no copy; several are padded to a multiple of 16 for the copy engine.
fn record_of(bytes: impl Iterator<Item = u64>) -> u64 {
    let (count, bytes) =
        bytes.fold((0, 0), |(count, sum), bytes| (count + 1, sum + u64::from(column_stride(bytes as u32))));
    if count > 1 { u64::next_multiple_of(bytes, 16) } else { bytes }
}

/// The columns of a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Columns<'a> {
    given: [Option<&'a Tensor<'a>>; MAX_COLUMNS],
    /// How many there are; more than fit are an error of the call.
    count: usize,
}

impl<'a> Columns<'a> {
    pub fn push(&mut self, column: &'a Tensor<'a>) {
        if let Some(next) = self.given.get_mut(self.count) {
            *next = Some(column);
        }
        self.count += 1;
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn iter(self) -> impl Iterator<Item = &'a Tensor<'a>> {
        self.given.into_iter().flatten()
    }

    /// Checks the columns of so many tokens, and lays out their record.
    pub fn lay_out(self, num_tokens: u32) -> Result<Record> {
        check_count(self.count)?;
        let tokens = ("num_tokens", Some(u64::from(num_tokens)));
        let mut record = Record::default();
        for (index, column) in self.iter().enumerate() {
            let dims = [tokens, ("elements", None)];
            let dims = if column.shape().len() == 1 { &dims[..1] } else { &dims[..] };
            column.expect("column", &DType::ALL, dims)?;
            check_column(index, column.dtype(), column.row_bytes())?;
            let bytes = column.row_bytes() as u32;
            let shape = column.shape().get(1).copied();
            record.columns.push(PlacedColumn {
                ptr: column.ptr(),
                dtype: column.dtype(),
                elements: shape,
                bytes,
                offset: record.bytes,
            });
            record.bytes += column_stride(bytes);
        }
        record.bytes = record_of(self.iter().map(Tensor::row_bytes)) as u32;
        Ok(record)
    }
}

/// A column in a record.
#[derive(Debug, Clone, Copy)]
pub struct PlacedColumn {
    pub ptr: DevicePtr,
    pub dtype: DType,
    /// Elements of a token; `None` for a tensor `[num_tokens]`.
    pub elements: Option<u64>,
    pub bytes: u32,
    pub offset: u32,
}

/// The bytes sent with a token's row.
#[derive(Debug, Clone, Default)]
pub struct Record {
    pub columns: Vec<PlacedColumn>,
    /// Bytes of a record, a multiple of 4.
    pub bytes: u32,
}

impl Record {
    /// The records of so many UE8M0 scales of a token, a byte each, which are made when rows are
    /// sent and are nowhere before.
    pub fn of_ue8m0(scales: u32) -> Record {
        Record::made(DType::Ue8m0, scales)
    }

    /// The same with f32 scales.
    pub fn of_f32(scales: u32) -> Record {
        Record::made(DType::F32, scales)
    }

    fn made(dtype: DType, scales: u32) -> Record {
        let bytes = scales * dtype.size() as u32;
        let elements = Some(scales.into());
        let column = PlacedColumn { ptr: DevicePtr::NULL, dtype, elements, bytes, offset: 0 };
        Record { columns: vec![column], bytes: column_stride(bytes) }
    }

    /// The records of `num_tokens` tokens, existing or to be made.
    pub fn place(&self, arena: &Arc<Arena>, num_tokens: u32) -> Result<Records> {
        if self.columns.is_empty() {
            return Ok(Records::NONE);
        }
        if let Some(at) = self.in_place() {
            return Ok(Records::at(at));
        }
        let take = |pieces: &mut Pieces| pieces.array("columns", num_tokens.into(), self.bytes.into());
        let (block, records) = arena.take(take)?;
        let none = (DevicePtr::NULL, 0);
        let column = |index| self.columns.get(index).map_or(none, |it: &PlacedColumn| (it.ptr, it.bytes));
        let [first, second, third, fourth] = [0, 1, 2, 3].map(column);
        let args = PackArgs {
            column_0: first.0,
            column_1: second.0,
            column_2: third.0,
            column_3: fourth.0,
            records,
            bytes_0: first.1,
            bytes_1: second.1,
            bytes_2: third.1,
            bytes_3: fourth.1,
            record_bytes: self.bytes,
            num_tokens,
        };
        Ok(Records { at: records, pack: Some((args, block)) })
    }

    /// The address of records that need no kernel: a single column of whole, aligned words.
    fn in_place(&self) -> Option<DevicePtr> {
        let [column] = &self.columns[..] else { return None };
        // The copy engine moves multiples of 16 bytes.
        let align = if self.bytes.is_multiple_of(16) { 16 } else { 4 };
        (column.bytes == self.bytes && column.ptr.0.is_multiple_of(align)).then_some(column.ptr)
    }

    /// Eight bits of types and sizes, by which ranks compare columns; 0 for one of f32.
    pub fn fingerprint(&self) -> u32 {
        let hash = self.hash();
        (hash >> 24 ^ hash >> 16 ^ hash >> 8 ^ hash) & 0xff
    }

    /// Thirteen bits by which ranks compare rows of `dtype` with these columns; 0 without columns,
    /// and for no others.
    pub fn format(&self, dtype: DType) -> u32 {
        if self.columns.is_empty() {
            return 0;
        }
        let word = self.hash() ^ (self.bytes << 4 | dtype.code());
        (word.wrapping_mul(0x9e37_79b1) >> 19).max(1)
    }

    /// A hash of types and sizes; 0 for one of f32.
    fn hash(&self) -> u32 {
        if let [PlacedColumn { dtype: DType::F32, .. }] = self.columns[..] {
            return 0;
        }
        let mix = |hash: u32, column: &PlacedColumn| {
            let word = column.bytes << 4 | column.dtype.code();
            (hash ^ word).wrapping_mul(0x9e37_79b1).rotate_left(15)
        };
        self.columns.iter().fold(0, mix)
    }
}

/// Where the records of a dispatch are.
#[derive(Debug, Clone)]
pub struct Records {
    pub at: DevicePtr,
    /// The kernel that makes them there, unless they are in the caller's memory, and their block.
    pack: Option<(PackArgs, Owner)>,
}

impl Records {
    const NONE: Records = Records::at(DevicePtr::NULL);

    /// Records that another kernel makes, or that exist.
    pub const fn at(at: DevicePtr) -> Records {
        Records { at, pack: None }
    }

    /// Their memory, if it is not the caller's.
    pub fn owner(&self) -> Option<Owner> {
        self.pack.as_ref().map(|(_, block)| block.clone())
    }

    /// Enqueues the kernel that makes them, if needed, with at most `most_blocks` blocks.
    ///
    /// # Safety
    /// Columns and records are live until the stream has passed the kernel.
    pub unsafe fn launch(&self, stream: &Stream, kernel: &Choice<PackArgs>, most_blocks: u32) -> Result<()> {
        let Some((args, _)) = &self.pack else { return Ok(()) };
        let grid = args.num_tokens.div_ceil(PACK_THREADS / 32).clamp(1, most_blocks.max(1));
        // SAFETY: the caller keeps columns and records; each has the bytes that `lay_out` found.
        unsafe { kernel.call(stream, grid, PACK_THREADS, 0, *args) }
    }
}

impl Record {
    /// The record of a payload's columns, without addresses and offsets.
    pub fn of(payload: &Payload) -> Record {
        let place = |&(dtype, elements): &(DType, u64)| PlacedColumn {
            ptr: DevicePtr::NULL,
            dtype,
            elements: Some(elements),
            bytes: (elements * dtype.size()) as u32,
            offset: 0,
        };
        let columns = payload.columns().iter().map(place).collect();
        Record { columns, bytes: 4 * payload.max_scales() }
    }
}

/// Checks that `call` differs between the usual formats: plain rows of `rows`, and rows with scales.
/// `elements`: of a row of a type.
///
/// # Panics
/// Where two formats have one call.
#[cfg(test)]
pub fn assert_calls_differ(
    rows: &[DType],
    elements: impl Fn(DType) -> u64,
    call: impl Fn(&Payload, &Record) -> u64,
) {
    let plain = rows.iter().map(|&dtype| Payload::rows(dtype, elements(dtype)));
    let fp8 = [DType::Fp8E4m3, DType::Fp8E5m2].into_iter().flat_map(|dtype| {
        let elements = elements(dtype);
        [Payload::fp8(dtype, elements), Payload::fp8_ue8m0(dtype, elements), Payload::mxfp8(dtype, elements)]
    });
    let nvfp4 = Payload::nvfp4(2 * elements(DType::Fp4E2m1x2));
    let mut calls = std::collections::HashMap::new();
    for format in plain.chain(fp8).chain([nvfp4]) {
        let format = format.unwrap();
        if let Some(other) = calls.insert(call(&format, &Record::of(&format)), format.clone()) {
            panic!("{format:?} and {other:?} have one call");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_formats_have_their_sizes() {
        let words = |payload: Result<Payload>| {
            let payload = payload.unwrap();
            (payload.row_bytes(), payload.columns().to_vec(), payload.max_scales())
        };
        let (e4m3, e5m2) = (DType::Fp8E4m3, DType::Fp8E5m2);
        assert_eq!(words(Payload::rows(DType::F16, 7168)), (14336, vec![], 0));
        assert_eq!(words(Payload::fp8(e4m3, 7168)), (7168, vec![(DType::F32, 56)], 56));
        assert_eq!(words(Payload::fp8_ue8m0(e4m3, 7168)), (7168, vec![(DType::I32, 14)], 14));
        assert_eq!(words(Payload::mxfp8(e5m2, 7168)), (7168, vec![(DType::Ue8m0, 224)], 56));
        let nvfp4 = vec![(e4m3, 448), (DType::F32, 1)];
        assert_eq!(words(Payload::nvfp4(7168)), (3584, nvfp4, 116));
        // A column is whole words, several are multiples of 16 bytes.
        assert_eq!(words(Payload::mxfp8(e4m3, 96)).2, 1);
        assert_eq!(words(Payload::nvfp4(32)).2, 4);
    }

    #[test]
    fn rules_are_errors() {
        let wrong = |payload: Result<Payload>, parts: &[&str]| {
            let error = payload.unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        };
        wrong(Payload::rows(DType::Bf16, 0), &["hidden = 0 x bf16", "16 bytes"]);
        wrong(Payload::rows(DType::F16, 12), &["hidden = 12 x f16", "16 bytes"]);
        wrong(Payload::rows(DType::F32, u64::MAX / 2), &["16 bytes"]);
        wrong(Payload::rows(DType::I64, 16), &["dtype = i64", "u8"]);
        wrong(Payload::rows(DType::Bool, 16), &["dtype = bool", "u8"]);
        wrong(Payload::fp8(DType::Bf16, 128), &["dtype = bf16", "e4m3"]);
        wrong(Payload::mxfp8(DType::Fp8E4m3, 48), &["hidden = 48", "multiple of 32"]);
        wrong(Payload::nvfp4(48), &["hidden = 48", "multiple of 32"]);
        let full = Payload::nvfp4(32).unwrap().column(DType::U8, 3).unwrap().column(DType::I32, 1).unwrap();
        wrong(full.column(DType::U8, 1), &["columns = 5", "at most 4"]);
        let rows = || Payload::rows(DType::Bf16, 64).unwrap();
        wrong(rows().column(DType::I64, 1), &["column = i64", "at most 4 bytes"]);
        wrong(rows().column(DType::U8, 0), &["column = 0", "1 to 65536"]);
        wrong(rows().column(DType::U8, u64::MAX), &["1 to 65536"]);
    }

    #[test]
    fn the_usual_formats_have_different_fingerprints() {
        for hidden in [512, 1024, 2048, 2560, 2880, 3584, 4096, 5120, 6144, 7168, 8192] {
            let e4m3 = DType::Fp8E4m3;
            let formats = [
                Payload::rows(e4m3, hidden),
                Payload::fp8_ue8m0(e4m3, hidden),
                Payload::mxfp8(e4m3, hidden),
                Payload::nvfp4(hidden),
            ];
            let all: Vec<u32> = formats.map(|format| Record::of(&format.unwrap()).fingerprint()).into();
            let mut different = all.clone();
            different.sort_unstable();
            different.dedup();
            assert_eq!(different.len(), all.len(), "{hidden}: {all:?}");
            // Scales of f32 have none of their own.
            assert_eq!((all[0], Record::of(&Payload::fp8(e4m3, hidden).unwrap()).fingerprint()), (0, 0));
        }
    }

    /// In the call of low latency, whose rows of e4m3 are the same: a word of scales counts one,
    /// and a step of the fingerprint 32, of 8192.
    #[test]
    fn scales_that_are_made_differ_from_f32_and_are_those_that_are_given() {
        for hidden in (128..1 << 16).step_by(128) {
            let made = Record::of_ue8m0(hidden / 32);
            let given = Record::of(&Payload::mxfp8(DType::Fp8E4m3, hidden.into()).unwrap());
            assert_eq!((made.bytes, made.fingerprint()), (hidden / 32, given.fingerprint()));
            let call = |words: u32, fingerprint: u32| (words + 32 * fingerprint) % 8192;
            let of_made = call(hidden / 128, made.fingerprint());
            // f32 scales, made or given as such, and as a column.
            assert_ne!(of_made, 0, "{hidden}");
            assert_ne!(of_made, call(hidden / 128, 0), "{hidden}");
        }
    }
}
