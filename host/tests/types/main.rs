//! What must not compile: each program breaks one promise that the types of the interface make.

/// What the programs do wrong, done right.
#[allow(dead_code)]
mod allowed;

#[test]
fn programs_that_break_a_promise_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/types/*_*.rs");
}
