//! The amount of work of a test: the default tier is for every day and CI, the long tier for
//! releases and changes of what all depends on.

/// The variable that names the tier: `default` or `long`.
pub const TIER: &str = "EPOXIDE_TIER";

/// Returns every third case in the default tier, from the first on, and all in the long tier.
pub fn sample<T>(cases: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    cases.into_iter().step_by(pick(3, 1))
}

/// Returns whether this is the long tier: for a test that cannot be made smaller.
pub fn is_long() -> bool {
    pick(false, true)
}

/// Returns `default` in the default tier and `long` in the long tier.
///
/// # Panics
/// Where [`TIER`] names neither.
pub fn pick<T>(default: T, long: T) -> T {
    match std::env::var(TIER).as_deref() {
        Err(_) | Ok("default") => default,
        Ok("long") => long,
        Ok(other) => panic!("{TIER} = {other:?}, but the tiers are \"default\" and \"long\""),
    }
}
