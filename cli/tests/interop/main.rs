//! Against the real thing: PyTorch's store, both ways round, torchrun and mpirun.
//!
//! `tests/interop/setup.sh` installs what is needed. Without it these tests are skipped and
//! reported as such; with `EPOXIDE_REQUIRE_INTEROP=1` they fail instead.

#![forbid(unsafe_code)]

mod harness;
mod launchers;
mod scenario;
mod stores;
mod tools;

/// Names and functions.
macro_rules! tests {
    ($($module:ident::$name:ident,)*) => {
        &[$((concat!(stringify!($module), "::", stringify!($name)), $module::$name as fn())),*]
    };
}

/// A test that is missing here is an unused function to the compiler.
const TESTS: &[harness::Test] = tests![
    launchers::under_torchrun,
    launchers::under_torchrun_with_a_static_rendezvous,
    launchers::under_torchrun_where_rank_0_serves,
    launchers::an_error_of_a_rank_ends_torchrun,
    launchers::a_restart_of_torchrun_finds_a_clean_store,
    launchers::under_mpirun,
    launchers::under_mpirun_where_rank_0_serves,
    stores::our_clients_at_pytorchs_server,
    stores::our_error_when_pytorchs_server_ends,
    stores::pytorchs_clients_at_our_server,
    stores::a_process_group_of_pytorchs_over_our_server,
];

fn main() -> std::process::ExitCode {
    harness::run(TESTS)
}
