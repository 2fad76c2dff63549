//! Programs that must not compile: each breaks one promise that the types of the interface make.

/// The correct form of each mistake in the programs; it compiles.
#[allow(dead_code)]
mod allowed;

/// In the long tier alone: it builds the library once more.
#[test]
fn programs_that_break_a_promise_do_not_compile() {
    if std::env::var("EPOXIDE_TIER").is_ok_and(|tier| tier == "long") {
        trybuild::TestCases::new().compile_fail("tests/types/*_*.rs");
    }
}
