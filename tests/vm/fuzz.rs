//! The fuzz targets of `fuzz/`. They run a fixed number of inputs in the default tier, two seconds
//! in the long tier, or `EPOXIDE_FUZZ_INPUTS` inputs.

use epoxide::internal::fuzz::{self, samples};
use epoxide_testing::fuzz::{ptx, run, sample_ptx, sample_selections, selections};

#[test]
fn store_requests() {
    run("store requests", 100_000, &samples::store_requests(), fuzz::store_requests);
}

#[test]
fn store_records() {
    run("store records", 50_000, &samples::store_records(), fuzz::store_records);
}

#[test]
fn store_files() {
    run("store files", 200_000, &samples::store_files(), fuzz::store_files);
}

#[test]
fn secret_file() {
    run("secret file", 50_000, &samples::secret_file(), fuzz::secret_file);
}

#[test]
fn addresses() {
    run("addresses", 50_000, &samples::addresses(), fuzz::addresses);
}

#[test]
fn mesh_hello() {
    run("mesh hello", 300_000, &samples::mesh_hello(), fuzz::mesh_hello);
}

#[test]
fn mesh_frames() {
    run("mesh frames", 100_000, &samples::mesh_frames(), fuzz::mesh_frames);
}

#[test]
fn tcp_hello() {
    run("tcp hello", 300_000, &samples::tcp_hello(), fuzz::tcp_hello);
}

#[test]
fn tcp_frames() {
    run("tcp frames", 200_000, &samples::tcp_frames(), fuzz::tcp_frames);
}

#[test]
fn ptx_text() {
    let module = include_str!("../../gpu/ptx/epoxide.sm_90.ptx");
    let samples = sample_ptx(module);
    samples.iter().for_each(|sample| {
        let text = String::from_utf8_lossy(sample);
        epoxide_vgpu::Module::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    });
    run("ptx", 5_000, &samples, ptx);
}

#[test]
fn selections_json() {
    run("selections", 100_000, &sample_selections(), selections);
}
