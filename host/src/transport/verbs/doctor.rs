//! The RDMA parts that this machine has and lacks, for `epoxide doctor`.

use std::sync::Arc;

use ibverbs_sys as ib;

use super::device::{Card, is_infiniband, state_name, state_remedy, unavailable};
use super::raw::{self, Context, Pd};
use super::register::{self, Reach};
use super::sysfs::{Gid, Sysfs, choose_gid};
use crate::driver::Device;
use crate::error::Result;
use crate::transport::verbs_options::{VerbsOptions, mtu_bytes};

/// Bytes of wire memory that are registered as a trial.
const TRIAL: u64 = 2 << 20;

/// One check per entry: its name, and the finding, or the error with its remedy. Tries wire memory
/// of each of `gpus`.
pub fn doctor(gpus: &[Device]) -> Vec<(String, Result<String, String>)> {
    let text = |result: Result<String>| result.map_err(|error| error.to_string());
    let options = match VerbsOptions::from_env() {
        Ok(options) => options,
        Err(error) => return vec![("RDMA settings".into(), Err(error.to_string()))],
    };
    let names = match raw::device_names() {
        Ok(names) => names,
        Err(error) => return vec![("RDMA devices".into(), Err(error.to_string()))],
    };
    let mut report = vec![("RDMA devices".into(), Ok(names.join(", ")))];
    for name in &names {
        let context = match Context::open(name) {
            Ok(context) => context,
            Err(error) => {
                report.push((format!("RDMA device {name}"), Err(error.to_string())));
                continue;
            }
        };
        report.push((format!("RDMA device {name}"), text(describe(&context))));
        // 1 if the device reports none: the first port is then used.
        let ports = context.device().map_or(1, |device| device.phys_port_cnt.max(1));
        for port in 1..=ports {
            report.push((format!("{name} port {port}"), text(describe_port(&context, port, &options))));
        }
        report.push((format!("{name} dma-buf"), text(dma_buf(&context))));
    }
    let order = format!(
        "cannot be checked here: adaptive routing and out-of-order placement must be off for service level {} and traffic \
         class {}, because a counter must not pass the bytes ahead of it",
        options.service_level, options.traffic_class
    );
    report.push(("RDMA order of writes".into(), Ok(order)));
    for gpu in gpus {
        let name = format!("RDMA wire memory of GPU {} ({})", gpu.info().ordinal, gpu.info().name);
        report.push((name, text(wire_memory(&options, gpu))));
    }
    report
}

fn describe(context: &Context) -> Result<String> {
    let device = context.device()?;
    let firmware: Vec<u8> =
        device.fw_ver.iter().map(|byte| byte.to_ne_bytes()[0]).take_while(|byte| *byte != 0).collect();
    let atomics = match device.atomic_cap {
        ib::IBV_ATOMIC_NONE => "none",
        ib::IBV_ATOMIC_HCA => "among RDMA only",
        _ => "with the processor's",
    };
    Ok(format!(
        "firmware {}, {} writes in flight per queue, atomics {atomics} (not used here)",
        String::from_utf8_lossy(&firmware),
        device.max_qp_wr
    ))
}

fn describe_port(context: &Context, number: u8, options: &VerbsOptions) -> Result<String> {
    let port = context.port(number)?;
    let infiniband = is_infiniband(&port);
    let layer = if infiniband { "InfiniBand" } else { "Ethernet" };
    let mtus = format!("MTU {} of {}", mtu_bytes(port.active_mtu), mtu_bytes(port.max_mtu));
    let gids = Sysfs::new().gids(context.name(), number, infiniband);
    let list = gids.iter().map(Gid::to_string).collect::<Vec<_>>().join(", ");
    let what = || format!("{layer}, {mtus}; {list}");
    if port.state != ib::ibv_port_state::IBV_PORT_ACTIVE {
        let reason = format!("{}; {}", state_name(port.state), state_remedy(port.state));
        return Err(unavailable(what(), reason));
    }
    if infiniband && options.gid_index.is_none() {
        return Ok(format!("{layer} ACTIVE, {mtus}; LID {}; {list}", port.lid));
    }
    match choose_gid(&gids, options.gid_index) {
        Ok(gid) => Ok(format!("{layer} ACTIVE, {mtus}; uses GID {} of: {list}", gid.index)),
        Err(reason) => Err(unavailable(what(), reason)),
    }
}

fn dma_buf(context: &Arc<Context>) -> Result<String> {
    if Pd::new(context)?.takes_dma_buf() {
        return Ok("device memory can be registered by dma-buf".into());
    }
    let reason = "its driver cannot register a dma-buf (Linux 5.12 and a driver that does it, such as mlx5_ib); GPU memory \
                  then needs nvidia-peermem, or wire memory is host memory";
    Err(unavailable(format!("dma-buf on {}", context.name()), reason.into()))
}

/// The cards that the GPU uses, and how those reach its wire memory.
fn wire_memory(options: &VerbsOptions, gpu: &Device) -> Result<String> {
    let cards = Card::open(options, gpu.info())?;
    let (_, reach) = register::wire_memory(&cards, gpu, TRIAL)?;
    let untried = match reach {
        Reach::Host => "",
        Reach::DmaBuf | Reach::PeerMemory => {
            "; it could be registered, but that puts into it are right was never tested on real cards: run `epoxide roundtrip \
             --device cuda --transport verbs`"
        }
    };
    let names: Vec<&str> = cards.iter().map(|card| card.context.name()).collect();
    Ok(format!("{reach}, on {}{untried}", names.join(", ")))
}
