//! The sizes that can be run: one rule, and one error text, for every command that takes them.

use epoxide::throughput::Quantise;
use epoxide_gpu::layout::{MAX_LOCAL_EXPERTS, MAX_RANKS, MAX_TOPK};

use crate::payload::{ELEMENTS_PER_SCALE, Format};

/// Most elements of a row.
const MOST_ELEMENTS: u64 = 1 << 21;
/// Most tokens of a rank in low latency.
const MOST_TOKENS: u32 = 1024;

/// Sizes of what is dispatched and combined, as a command line gives them.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Ranks of all nodes.
    pub ranks: u32,
    /// Whether the kernels are those of low latency.
    pub low_latency: bool,
    /// Tokens of each rank.
    pub tokens: u32,
    /// Fewest tokens that make sense: 0, or 1 where something is timed.
    pub fewest_tokens: u32,
    /// Elements of a row.
    pub hidden: u64,
    /// Elements of dispatched rows, and what travels with them.
    pub format: Format,
    /// The conversion of bf16 rows when they are sent, in high throughput.
    pub quantise: Quantise,
    /// Experts of all ranks.
    pub experts: u32,
    /// Experts that a token selects.
    pub topk: u32,
}

impl Sizes {
    /// Elements that rows of high throughput have a multiple of.
    pub fn unit(&self) -> u64 {
        match (self.quantise, self.format) {
            (Quantise::Fp8 | Quantise::Fp8PowerOfTwo, _) => ELEMENTS_PER_SCALE,
            // Combines return as many elements, of bf16.
            (_, format) => format.unit().max(Format::Bf16.unit()),
        }
    }

    /// Whether they can be run.
    ///
    /// # Errors
    /// The flag, its value, and the rule that it breaks.
    pub fn check(&self) -> Result<(), String> {
        let Sizes { ranks, tokens, fewest_tokens: fewest, hidden, experts, topk, .. } = *self;
        if self.low_latency && ranks > MAX_RANKS as u32 {
            return Err(format!(
                "--nodes, --ranks-per-node: {ranks} ranks in all, and low latency has at most {MAX_RANKS}"
            ));
        }
        if tokens < fewest && !self.low_latency {
            return wrong("--tokens", tokens, format!("must be at least {fewest}"));
        }
        if self.low_latency && !(fewest..=MOST_TOKENS).contains(&tokens) {
            return wrong(
                "--tokens",
                tokens,
                format!("must be {fewest} to {MOST_TOKENS} with --mode low-latency"),
            );
        }
        let (unit, why) = match (self.low_latency, self.format) {
            (true, Format::Fp8) => {
                (ELEMENTS_PER_SCALE, format!("a scale is that of {ELEMENTS_PER_SCALE} elements"))
            }
            (true, Format::Mxfp8) => {
                (ELEMENTS_PER_SCALE, format!("a word of scales is that of {ELEMENTS_PER_SCALE} elements"))
            }
            // In low latency rows are given as BF16 and may be sent as FP8.
            (true, _) => (8, "rows are multiples of 16 bytes".into()),
            (false, Format::Fp8) if self.quantise != Quantise::None => {
                (self.unit(), format!("a scale is that of {ELEMENTS_PER_SCALE} elements"))
            }
            (false, Format::F32) => (self.unit(), "rows of bf16 sums are multiples of 16 bytes".into()),
            (false, _) => (self.unit(), "rows are multiples of 16 bytes".into()),
        };
        if hidden == 0 || !hidden.is_multiple_of(unit) || hidden > MOST_ELEMENTS {
            let rule = format!("must be a positive multiple of {unit} ({why}), at most {MOST_ELEMENTS}");
            return wrong("--hidden", hidden, rule);
        }
        check_experts(experts, ranks)?;
        if topk == 0 || topk > MAX_TOPK.min(experts) {
            let rule = format!(
                "must be 1 to {} (at most {MAX_TOPK}, and at most the number of experts)",
                MAX_TOPK.min(experts)
            );
            return wrong("--topk", topk, rule);
        }
        Ok(())
    }
}

/// Whether so many experts can be spread over so many ranks.
///
/// # Errors
/// The flag, its value, and the rule that it breaks.
pub fn check_experts(experts: u32, ranks: u32) -> Result<(), String> {
    if experts == 0 || !experts.is_multiple_of(ranks) || experts / ranks > MAX_LOCAL_EXPERTS {
        let rule = format!(
            "must be a positive multiple of the {ranks} ranks, at most {MAX_LOCAL_EXPERTS} for each of them"
        );
        return wrong("--experts", experts, rule);
    }
    Ok(())
}

fn wrong(flag: &str, value: impl Into<u64>, rule: String) -> Result<(), String> {
    Err(format!("{flag} {}: {rule}", value.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_sizes_are_named() {
        let right = Sizes {
            ranks: 8,
            low_latency: false,
            tokens: 1,
            fewest_tokens: 1,
            hidden: 64,
            format: Format::Bf16,
            quantise: Quantise::None,
            experts: 16,
            topk: 8,
        };
        assert_eq!(right.check(), Ok(()));
        let low_latency = Sizes { low_latency: true, ..right };
        let quantised = Sizes { format: Format::Fp8, hidden: 256, ..low_latency };
        assert_eq!((low_latency.check(), quantised.check()), (Ok(()), Ok(())));
        for (sizes, text) in [
            (Sizes { tokens: 0, ..right }, "--tokens 0: must be at least 1"),
            (
                Sizes { tokens: 1025, ..low_latency },
                "--tokens 1025: must be 1 to 1024 with --mode low-latency",
            ),
            (
                Sizes { ranks: 72, ..low_latency },
                "--nodes, --ranks-per-node: 72 ranks in all, and low latency has at most 64",
            ),
            (
                Sizes { hidden: 836, format: Format::F32, ..right },
                "--hidden 836: must be a positive multiple of 8 (rows of bf16",
            ),
            (Sizes { hidden: 2, ..right }, "--hidden 2: must be a positive multiple of 8 (rows"),
            (
                Sizes { hidden: 72, format: Format::Fp8, ..right },
                "--hidden 72: must be a positive multiple of 16 (rows",
            ),
            (
                Sizes { hidden: 144, format: Format::Fp8, quantise: Quantise::Fp8, ..right },
                "--hidden 144: must be a positive multiple of 128 (a scale",
            ),
            (Sizes { hidden: 144, ..quantised }, "--hidden 144: must be a positive multiple of 128 (a scale"),
            (
                Sizes { hidden: 96, format: Format::Mxfp8, ..quantised },
                "--hidden 96: must be a positive multiple of 128 (a word of scales",
            ),
            (Sizes { hidden: 1 << 25, ..right }, "--hidden 33554432: must be a positive multiple of 8"),
            (Sizes { experts: 15, ..right }, "--experts 15: must be a positive multiple of the 8 ranks"),
            (Sizes { experts: 0, ..low_latency }, "--experts 0: must be"),
            (Sizes { experts: 8 * MAX_LOCAL_EXPERTS + 8, ..right }, "--experts 8200: must be"),
            (Sizes { topk: 33, experts: 64, ..right }, "--topk 33: must be 1 to 32 (at most 32"),
            (Sizes { topk: 17, ..right }, "--topk 17: must be 1 to 16 (at most 32"),
            (Sizes { topk: 0, ..low_latency }, "--topk 0: must be 1 to 16"),
        ] {
            let error = sizes.check().unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
    }
}
