//! How far a measurement is.

/// Receives the progress of a measurement, from every rank of this process that measures.
pub trait Watch: Sync {
    /// Rank `rank` begins with this.
    fn doing(&self, rank: u32, what: &str) {
        let _ = (rank, what);
    }

    /// Rank `rank` has done one more of the measurement's steps.
    fn step(&self, rank: u32) {
        let _ = rank;
    }
}

/// No progress reports.
impl Watch for () {}
