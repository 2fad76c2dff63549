//! The fuzz targets of `fuzz/`, each for a bounded time, or for as many inputs as `EPOXIDE_FUZZ_INPUTS` says.

use epoxide::internal::fuzz::{self, samples};
use epoxide_testing::fuzz::{ptx, run, sample_ptx, sample_selections, selections};

#[test]
fn store_requests() {
    run("store requests", &samples::store_requests(), fuzz::store_requests);
}

#[test]
fn mesh_hello() {
    run("mesh hello", &samples::mesh_hello(), fuzz::mesh_hello);
}

#[test]
fn mesh_frames() {
    run("mesh frames", &samples::mesh_frames(), fuzz::mesh_frames);
}

#[test]
fn tcp_hello() {
    run("tcp hello", &samples::tcp_hello(), fuzz::tcp_hello);
}

#[test]
fn tcp_frames() {
    run("tcp frames", &samples::tcp_frames(), fuzz::tcp_frames);
}

#[test]
fn ptx_text() {
    let module = include_str!("../../gpu/ptx/epoxide.sm_90.ptx");
    let samples = sample_ptx(module);
    samples.iter().for_each(|sample| {
        let text = String::from_utf8_lossy(sample);
        epoxide_vgpu::Module::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    });
    run("ptx", &samples, ptx);
}

#[test]
fn selections_json() {
    run("selections", &sample_selections(), selections);
}
