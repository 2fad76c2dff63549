//! The experts that each token selected, in a JSON file.

use epoxide_gpu::layout::MAX_TOPK;

/// The ids of all tokens of all ranks, checked.
#[derive(Debug, PartialEq, Eq)]
pub struct Selections {
    /// Ids of each token; 1 where there is no token.
    pub num_topk: usize,
    /// By rank and token; -1 is no selection.
    pub ranks: Vec<Vec<Vec<i64>>>,
}

impl Selections {
    /// Reads `[[[ids of token 0], ..] of rank 0, ..]`, ids of `experts` experts.
    ///
    /// # Errors
    /// Text that names the place and the rule.
    pub fn parse(text: &str, experts: u32) -> Result<Selections, String> {
        let ranks: Vec<Vec<Vec<i64>>> = serde_json::from_str(text)
            .map_err(|error| format!("{error}; expected [[[ids of token 0], ..] of rank 0, ..]"))?;
        let mut first: Option<(usize, usize, usize)> = None;
        for (rank, tokens) in ranks.iter().enumerate() {
            for (token, ids) in tokens.iter().enumerate() {
                let (first_rank, first_token, num_topk) = *first.get_or_insert((rank, token, ids.len()));
                let place = format!("rank {rank}, token {token}");
                let count = ids.len();
                if ids.is_empty() || count > MAX_TOPK as usize {
                    return Err(format!(
                        "{place}: {count} ids; a token has 1 to {MAX_TOPK}, -1 for no selection"
                    ));
                }
                if count != num_topk {
                    return Err(format!(
                        "{place}: {count} ids, but {num_topk} at rank {first_rank}, token {first_token}; pad with -1"
                    ));
                }
                if let Some(k) = ids.iter().position(|id| !(-1..i64::from(experts)).contains(id)) {
                    return Err(format!(
                        "{place}, entry {k}: {}; an expert id is -1 or 0 to {} (--experts - 1)",
                        ids[k],
                        i64::from(experts) - 1
                    ));
                }
            }
        }
        Ok(Selections { num_topk: first.map_or(1, |(_, _, num_topk)| num_topk), ranks })
    }
}
