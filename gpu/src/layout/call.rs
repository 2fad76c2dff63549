//! The call that a rank publishes with its `ready` words when it has entered an operation.
//!
//! A ready word is `epoch << READY_SHIFT | call`; the shift leaves the low bits of the epoch.
//! Operations of different ranks lie at most one epoch apart, so that these bits identify the
//! operation.

/// Where the epoch begins in a ready word; the bits below it are the call.
pub const READY_SHIFT: u32 = 40;
/// The bits of an epoch that a ready word holds.
pub const READY_EPOCHS: u64 = u64::MAX >> READY_SHIFT;
/// The bits of a ready word that are all 0 in a dispatch with a count exchange, and in no other
/// call.
pub const READY_OTHERS: u64 = (1 << READY_SHIFT) - (1 << COLUMNS_SHIFT);
/// In the place of a ready word that is not published. No call has its kind; 0 is the ready word of
/// a dispatch whose epoch is a multiple of 2^24.
pub const NO_READY: u64 = u64::MAX;
/// The bits of [`super::PlanHeader::epoch`] that a ready word holds.
pub const READY_PLANS: u32 = (1 << COLUMNS_SHIFT) - 1;

const COLUMNS_SHIFT: u32 = 10;
const ROWS_SHIFT: u32 = 18;
const PLACE_SHIFT: u32 = 31;
const KIND_SHIFT: u32 = 37;

/// Columns of a cached dispatch that each step of the row type counts for. Ready words thereby
/// differ between types of equally many scales, and between numbers of scales of one type.
pub const CACHED_DTYPE: u32 = 29;

/// The kinds of calls that an operation can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// A dispatch with a count exchange, which checks that all else agrees.
    Dispatch = 0,
    /// A dispatch along the routing of another one.
    CachedDispatch = 1,
    /// A combine of BF16 rows, which are where peers gather them.
    CombineBf16 = 2,
    /// A combine of FP32 rows, which are where peers gather them.
    CombineF32 = 3,
    /// A combine of BF16 rows that are staged meanwhile.
    CombineStagedBf16 = 4,
    /// A combine of FP32 rows that are staged meanwhile.
    CombineStagedF32 = 5,
    /// A combine of F16 rows, which are where peers gather them.
    CombineF16 = 6,
}

/// The parameters that must be the same on every rank in one operation, except for its routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The call's kind. All other fields of a [`CallKind::Dispatch`] are 0: where ranks disagree on
    /// them, no row moves and the buffers stay whole.
    pub kind: CallKind,
    /// The place's index, below 64.
    pub place: u32,
    /// Bytes per row, a multiple of 16. Lengths that differ by less than 128 KiB have different
    /// ready words. In a cached dispatch the host has added 16 for each unit of a hash of its
    /// columns.
    pub row_bytes: u32,
    /// Top-k weights of a combine per row. In a cached dispatch, scales, with [`CACHED_DTYPE`] for
    /// each type in front of its own. Values that differ by less than 256 have different ready
    /// words.
    pub columns: u32,
}

impl Call {
    /// Its bits in a ready word. Below them stand those of the routing.
    pub const fn bits(self) -> u64 {
        const fn field(value: u64, from: u32, to: u32) -> u64 {
            (value & ((1 << (to - from)) - 1)) << from
        }
        field(self.kind as u64, KIND_SHIFT, READY_SHIFT)
            | field(self.place as u64, PLACE_SHIFT, KIND_SHIFT)
            | field(self.row_bytes as u64 / 16, ROWS_SHIFT, PLACE_SHIFT)
            | field(self.columns as u64, COLUMNS_SHIFT, ROWS_SHIFT)
    }

    /// The call in a ready word.
    pub const fn of(word: u64) -> Call {
        const fn field(word: u64, from: u32, to: u32) -> u32 {
            (word >> from) as u32 & ((1 << (to - from)) - 1)
        }
        let kind = match field(word, KIND_SHIFT, READY_SHIFT) {
            0 => CallKind::Dispatch,
            1 => CallKind::CachedDispatch,
            2 => CallKind::CombineBf16,
            3 => CallKind::CombineF32,
            4 => CallKind::CombineStagedBf16,
            6 => CallKind::CombineF16,
            _ => CallKind::CombineStagedF32,
        };
        Call {
            kind,
            place: field(word, PLACE_SHIFT, KIND_SHIFT),
            row_bytes: field(word, ROWS_SHIFT, PLACE_SHIFT) * 16,
            columns: field(word, COLUMNS_SHIFT, ROWS_SHIFT),
        }
    }
}

/// The epoch that a ready word holds: the latest up to and with `latest`.
pub const fn ready_epoch(word: u64, latest: u64) -> u64 {
    latest.saturating_sub(latest.wrapping_sub(word >> READY_SHIFT) & READY_EPOCHS)
}

/// The epoch of the dispatch whose routing the call of a ready word uses: the latest possible one,
/// `latest` at most.
pub const fn ready_plan(word: u64, latest: u64) -> u64 {
    latest.saturating_sub(latest.wrapping_sub(word) & READY_PLANS as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ready_word_holds_call_routing_and_epoch() {
        let kinds = [
            CallKind::Dispatch,
            CallKind::CachedDispatch,
            CallKind::CombineBf16,
            CallKind::CombineF32,
            CallKind::CombineStagedBf16,
            CallKind::CombineStagedF32,
            CallKind::CombineF16,
        ];
        for kind in kinds {
            for (place, row_bytes, columns) in [(0, 16, 0), (63, (1 << 17) - 16, 255), (5, 14336, 57)] {
                let call = Call { kind, place, row_bytes, columns };
                for (epoch, plan) in [(1u64, 1u64), (4711, 4711 - 1023), ((1 << 24) + 3, (1 << 24) - 500)] {
                    let word = epoch << READY_SHIFT | call.bits() | (plan & READY_PLANS as u64);
                    assert_eq!(Call::of(word), call);
                    assert_eq!((ready_epoch(word, epoch), ready_plan(word, epoch)), (epoch, plan));
                    assert_eq!(ready_epoch(word, epoch + 1), epoch);
                }
            }
        }
        assert_eq!(ready_epoch(0, 1), 0);
    }

    #[test]
    fn no_ready_word_passes_for_none() {
        for kind in 0..7 {
            let word = !(7 << KIND_SHIFT) | kind << KIND_SHIFT;
            assert_ne!(word, NO_READY);
            assert_eq!(Call::of(word).kind as u64, kind);
        }
    }

    #[test]
    fn no_field_reaches_into_another() {
        let most = Call { kind: CallKind::CombineStagedF32, place: !0, row_bytes: !0, columns: !0 };
        let kinds = most.kind as u64 | 2;
        assert_eq!(kinds << KIND_SHIFT, READY_OTHERS & !0 << KIND_SHIFT);
        assert_eq!(most.bits() | 2 << KIND_SHIFT, READY_OTHERS);
        assert_eq!(READY_OTHERS | READY_PLANS as u64, (1 << READY_SHIFT) - 1);
        let dispatch = Call { kind: CallKind::Dispatch, place: 0, row_bytes: 0, columns: 0 };
        assert_eq!(dispatch.bits() & READY_OTHERS, 0);
    }
}
