//! The example over candle, a workspace of its own that takes minutes to compile.

use std::process::Command;

use epoxide_testing::tier;

#[test]
fn the_example_over_candle_passes() {
    if !tier::is_long() {
        eprintln!("skipped: compiles candle; the long tier and tests/candle/run.sh run it");
        return;
    }
    let ran = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/candle/run.sh")).output().expect("a shell");
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{out}\n{err}");
}
