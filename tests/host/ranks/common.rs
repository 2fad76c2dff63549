//! Common code of all these tests.

use std::time::Duration;

use epoxide::Result;
use epoxide_testing::ranks::{Context, Run, Session};

/// Longer than anything here takes unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn processes(size: u32) -> Run {
    Run::new(size).processes().timeout(PATIENCE)
}

pub fn threads(size: u32) -> Run {
    Run::new(size).threads().timeout(PATIENCE)
}

/// Returns ranks that have joined their group within [`PATIENCE`]. Their tests have `timeout`,
/// which expires on purpose.
pub fn hurried(run: Run, timeout: Duration) -> Session {
    let mut session = run.session();
    let _ = session.test("join", sum_of_ranks);
    session.set_timeout(timeout);
    session
}

pub fn sum_of_ranks(ctx: &Context) -> Result<()> {
    let all = ctx.group()?.all_gather(&[ctx.rank() as u8])?;
    assert_eq!(all.concat(), (0..ctx.size() as u8).collect::<Vec<_>>());
    Ok(())
}
