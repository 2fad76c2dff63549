#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| epoxide::internal::fuzz::secret_file(bytes));
