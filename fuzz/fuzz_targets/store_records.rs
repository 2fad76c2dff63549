#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| epoxide::internal::fuzz::store_records(bytes));
