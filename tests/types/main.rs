//! What must not compile: each program breaks one promise that the types of the interface make.

#[test]
fn programs_that_break_a_promise_do_not_compile() {
    let programs = trybuild::TestCases::new();
    programs.compile_fail("types/*_*.rs");
    programs.pass("types/allowed.rs");
}
