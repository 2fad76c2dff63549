//! Diagnosis of this machine's driver and GPUs. Needs no context, so it touches no GPU memory.

use std::ffi::c_int;

use cust::device::Device as CustDevice;

use super::context::{self, supports};
use super::error::unavailable;
use super::vmm::{can_access_peer, sharing};
use super::{ffi, late, ptx};
use crate::driver::RdmaWriteOrder;
use crate::error::Result;

/// One check per entry: its name, and the finding, or the error with its remedy.
pub fn doctor() -> Vec<(String, Result<String, String>)> {
    let mut report = Report(Vec::new());
    let driver = driver();
    let missing = driver.is_err();
    report.add("CUDA driver", driver);
    if missing {
        return report.0;
    }
    let devices = match devices() {
        Ok(devices) => devices,
        Err(error) => {
            report.add("CUDA devices", Err(error));
            return report.0;
        }
    };
    report.add("PTX version", ptx_ceiling());
    for &device in &devices {
        let ordinal = device.as_raw();
        report.add(format!("GPU {ordinal}"), describe(device));
        report.add(format!("GPU {ordinal} stream-ordered memory"), pooled(device));
        report.add(format!("GPU {ordinal} shareable memory"), shareable(device));
        report.add(format!("GPU {ordinal} mapped host memory"), mapped_host(device));
        report.add(format!("GPU {ordinal} dma-buf"), dma_buf(device));
        report.add(format!("GPU {ordinal} order of RDMA writes"), rdma_writes(device));
    }
    if devices.len() > 1 {
        report.add("GPU peer access", pairs(&devices, "peer access", PEER_REMEDY, can_access_peer));
        report.add(
            "GPU NVLink",
            pairs(&devices, "NVLink (native peer atomics)", NVLINK_REMEDY, context::native_atomics),
        );
    }
    report.0
}

const PEER_REMEDY: &str =
    "see `nvidia-smi topo -p2p r`; ranks on such a pair must be of different nodes (`--transport tcp`)";
const NVLINK_REMEDY: &str = "see `nvidia-smi topo -p2p a`; kernels count in each other's memory, so ranks on such a pair must be of different nodes \
     (`--transport tcp`)";

struct Report(Vec<(String, Result<String, String>)>);

impl Report {
    fn add(&mut self, name: impl Into<String>, found: Result<String>) {
        self.0.push((name.into(), found.map_err(|error| error.to_string())));
    }
}

fn driver() -> Result<String> {
    context::initialise()?;
    Ok(format!("CUDA {}", ptx::cuda_version_text(context::driver_version()?)))
}

fn devices() -> Result<Vec<CustDevice>> {
    (0..context::device_count()?).map(context::cust_device).collect()
}

fn ptx_ceiling() -> Result<String> {
    let cuda = context::driver_version()?;
    ptx::newest_ptx_for(cuda).map(|newest| format!("reads PTX up to {newest}")).ok_or_else(|| {
        unavailable(
            "PTX for sm_90",
            format!("a driver of CUDA {} is too old; install R550 or newer", ptx::cuda_version_text(cuda)),
        )
    })
}

fn describe(device: CustDevice) -> Result<String> {
    let info = context::describe(device)?;
    let (major, minor) = context::compute_capability(device)?;
    let text = format!(
        "{}, compute capability {major}.{minor}, {} SMs, {} KiB shared memory per block, {:.1} GiB, PCI {}",
        info.name,
        info.sm_count,
        info.max_shared_bytes_per_block / 1024,
        info.total_memory as f64 / (1u64 << 30) as f64,
        info.pci_bus_id
    );
    if major < 9 {
        return Err(unavailable("sm_90", format!("{text}; the kernels need compute capability 9.0")));
    }
    if !supports(device, ffi::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH) {
        return Err(unavailable("cooperative launch", format!("{text}; is this a time-sliced vGPU?")));
    }
    Ok(text)
}

fn pooled(device: CustDevice) -> Result<String> {
    if supports(device, ffi::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) {
        return Ok("memory can be given back while kernels run".into());
    }
    Err(unavailable(
        "stream-ordered memory",
        "tensors are made of it; it takes bare Linux or a virtual machine with the whole GPU",
    ))
}

fn shareable(device: CustDevice) -> Result<String> {
    let sharing = sharing(device)?;
    let rdma = if sharing.rdma { "RDMA-capable" } else { "not RDMA-capable" };
    let fabric = if sharing.fabric { "and fabric handles" } else { "no fabric handles" };
    Ok(format!("virtual memory management with file descriptors {fabric}, {rdma}"))
}

fn rdma_writes(device: CustDevice) -> Result<String> {
    match context::rdma_write_order(device) {
        RdmaWriteOrder::None => Err(unavailable(
            "an order of a card's writes to device memory",
            "only matters for RDMA: a counter could be seen before its bytes, so that wire memory is host memory",
        )),
        RdmaWriteOrder::Owner => Ok("a card's writes are seen in order by this GPU".into()),
        RdmaWriteOrder::AllDevices => Ok("a card's writes are seen in order by all GPUs".into()),
    }
}

fn mapped_host(device: CustDevice) -> Result<String> {
    if supports(device, ffi::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY) {
        return Ok("kernels can reach page-locked host memory".into());
    }
    Err(unavailable("mapped host memory", "the device cannot map it; proxies and deadlines need it"))
}

fn dma_buf(device: CustDevice) -> Result<String> {
    late::require(
        late::late().mem_get_handle_for_address_range,
        "cuMemGetHandleForAddressRange",
        "CUDA 11.7 (R515)",
    )?;
    if supports(device, ffi::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) {
        return Ok("device memory can be exported for ibv_reg_dmabuf_mr".into());
    }
    Err(unavailable(
        "dma-buf",
        "only matters for RDMA: install the open kernel modules (`modinfo nvidia` says which) on Linux 5.12 \
         or newer, or load nvidia-peermem",
    ))
}

/// Whether every ordered pair of devices has a property; the error lists the pairs without it.
fn pairs(
    devices: &[CustDevice],
    what: &str,
    remedy: &str,
    has: impl Fn(c_int, c_int) -> bool,
) -> Result<String> {
    let ordinals: Vec<c_int> = devices.iter().map(CustDevice::as_raw).collect();
    let ordered =
        || ordinals.iter().flat_map(|&a| ordinals.iter().map(move |&b| (a, b))).filter(|(a, b)| a != b);
    let missing: Vec<String> =
        ordered().filter(|&(a, b)| !has(a, b)).map(|(a, b)| format!("{a}->{b}")).collect();
    if missing.is_empty() {
        return Ok(format!("{what} between all {} pairs", ordered().count()));
    }
    Err(unavailable(format!("{what} {}", missing.join(", ")), remedy))
}
