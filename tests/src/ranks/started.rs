//! Started ranks of any kind.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::outcome::Outcome;
use super::report::End;
use super::verdict::RankMain;

/// The ranks, as the test sees them.
pub(super) trait Ranks: std::fmt::Debug {
    /// How many there are.
    fn size(&self) -> u32;
    /// Has all ranks run the test of this number.
    fn begin(&mut self, number: u64, rank_main: Arc<RankMain>);
    /// The ranks that are through with it since the last call; waits up to `timeout` for one.
    fn wait(&mut self, timeout: Duration) -> Vec<(u32, End, SystemTime)>;
    /// Tells the ranks what came of it on all of them.
    fn conclude(&mut self, outcome: &Outcome);
    /// Gives the group up.
    fn give_up(&self, reason: &str);
    /// State of the rank's thread.
    fn trace(&mut self, rank: u32, end: Instant) -> String;
    /// The rank's last operation.
    fn operation(&self, rank: u32) -> String;
    /// The last of what it printed.
    fn output(&self, rank: u32) -> String;
}
