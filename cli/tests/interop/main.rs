//! Against the real thing: PyTorch's store, both ways round, torchrun and mpirun.
//!
//! `tests/interop/setup.sh` installs what is needed. Without it these tests say on the terminal that they were skipped;
//! with `EPOXIDE_REQUIRE_INTEROP=1` they fail instead.

mod launchers;
mod scenario;
mod stores;
mod tools;
