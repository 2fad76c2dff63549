#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| epoxide_bench::sweep::fuzz(bytes));
