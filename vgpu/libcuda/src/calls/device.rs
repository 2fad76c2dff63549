//! Initialisation, errors, devices.

use std::ffi::{CStr, c_char, c_int, c_uint};

use super::api;
use crate::abi::*;
use crate::world::{World, initialise, world};

/// `CUDA_VERSION` of the API that the library has.
pub(crate) const VERSION: c_int = 13000;
/// Most shared memory of a block, in bytes, as on an H200.
pub(crate) const MAX_SHARED_BYTES: u32 = 227 * 1024;
/// Dynamic shared memory that every kernel may have, in bytes.
pub(crate) const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

/// The value of a device attribute: those of an H200.
fn attribute(world: &World, device: CUdevice, attribute: c_int) -> Res<c_int> {
    let config = &world.device(device)?.config;
    Ok(match attribute {
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        8 => DEFAULT_SHARED_BYTES as c_int,
        9 => 64 * 1024,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65536,
        13 => 1_980_000,
        14 => 512,
        // Copies and kernels overlap, with several engines; devices have registered host memory,
        // clusters, tensor maps and multicast objects.
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 83 | 86 | 89 | 90 | 95 | 99 | 102 | 103 | 113 | 115 | 120
        | 127 | 132 => 1,
        16 => config.sm_count as c_int,
        30 => 512,
        33 => device + 1,
        36 => 2_619_000,
        37 => 5120,
        38 => 60 << 20,
        39 => 2048,
        40 => 3,
        51 => 32,
        75 => 9,
        76 => 0,
        81 => 228 * 1024,
        87 => 2,
        97 => MAX_SHARED_BYTES as c_int,
        106 => 32,
        111 => 1024,
        // CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT
        126 => 4,
        // Handles of memory pools: none.
        119 => 0,
        17
        | 18
        | 20..=29
        | 32
        | 34
        | 35
        | 42..=50
        | 52..=74
        | 77
        | 84
        | 85
        | 88
        | 91..=94
        | 96
        | 98
        | 100
        | 101
        | 104
        | 105
        | 107..=110
        | 112
        | 114
        | 116..=118
        | 121..=125
        | 128..=131
        | 133..=160 => 0,
        _ => return Err(INVALID_VALUE),
    })
}

/// A UUID that names the device.
fn uuid(device: CUdevice) -> Res<CUuuid> {
    world()?.device(device)?;
    let mut uuid = *b"virtual GPU    \0";
    uuid[15] = device as u8;
    Ok(uuid)
}

fn pci_bus_id(device: CUdevice) -> String {
    format!("0000:{:02x}:00.0", device + 1)
}

/// Writes a text and its end into a buffer of the caller.
pub(crate) fn put_text(to: Out<c_char>, bytes: c_int, text: &str) -> Res {
    let room = usize::try_from(bytes).ok().filter(|room| *room > 0).ok_or(INVALID_VALUE)?;
    let text = text.bytes().take(room - 1).chain([0]);
    to.put_all(text.map(|byte| byte as c_char))
}

fn texts(error: CUresult) -> Option<(&'static CStr, &'static CStr)> {
    if error == 0 {
        return Some((c"CUDA_SUCCESS", c"no error"));
    }
    CODES.iter().find(|(code, ..)| *code == error).map(|(_, name, text)| (*name, *text))
}

api! {
    /// Reads the environment and makes the devices.
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        initialise()
    }

    /// The version of the API.
    fn cuDriverGetVersion(version: Out<c_int>) {
        version.put(VERSION)
    }

    /// The name of a code.
    fn cuGetErrorName(error: CUresult, name: Out<*const c_char>) {
        name.put(texts(error).map_or(std::ptr::null(), |texts| texts.0.as_ptr()))?;
        texts(error).map(drop).ok_or(INVALID_VALUE)
    }

    /// The text of a code.
    fn cuGetErrorString(error: CUresult, text: Out<*const c_char>) {
        text.put(texts(error).map_or(std::ptr::null(), |texts| texts.1.as_ptr()))?;
        texts(error).map(drop).ok_or(INVALID_VALUE)
    }

    /// The number of devices.
    fn cuDeviceGetCount(count: Out<c_int>) {
        count.put(world()?.devices.len() as c_int)
    }

    /// The device of a number.
    fn cuDeviceGet(device: Out<CUdevice>, ordinal: c_int) {
        world()?.device(ordinal)?;
        device.put(ordinal)
    }

    /// The name of a device.
    fn cuDeviceGetName(name: Out<c_char>, bytes: c_int, device: CUdevice) {
        world()?.device(device)?;
        put_text(name, bytes, "virtual GPU")
    }

    /// The UUID of a device.
    fn cuDeviceGetUuid(to: Out<CUuuid>, device: CUdevice) {
        to.put(uuid(device)?)
    }

    /// The UUID of a device.
    fn cuDeviceGetUuid_v2(to: Out<CUuuid>, device: CUdevice) {
        to.put(uuid(device)?)
    }

    /// The memory of a device, in bytes.
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: CUdevice) {
        let world = world()?;
        world.device(device)?;
        bytes.put(world.config.memory_bytes as usize)
    }

    /// An attribute of a device.
    fn cuDeviceGetAttribute(value: Out<c_int>, asked: c_int, device: CUdevice) {
        value.put(attribute(world()?, device, asked)?)
    }

    /// The compute capability, 9.0.
    fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: CUdevice) {
        world()?.device(device)?;
        major.put(9)?;
        minor.put(0)
    }

    /// The PCI address of a device.
    fn cuDeviceGetPCIBusId(to: Out<c_char>, bytes: c_int, device: CUdevice) {
        world()?.device(device)?;
        put_text(to, bytes, &pci_bus_id(device))
    }

    /// The device of a PCI address.
    fn cuDeviceGetByPCIBusId(device: Out<CUdevice>, bus: In<c_char>) {
        let (world, bus) = (world()?, bus.text()?.to_lowercase());
        let found = (0..world.devices.len() as c_int).find(|device| pci_bus_id(*device).ends_with(&bus));
        device.put(found.filter(|_| bus.len() >= 7).ok_or(INVALID_DEVICE)?)
    }

    /// Whether a device may access the memory of another: yes.
    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: CUdevice, peer: CUdevice) {
        let world = world()?;
        world.device(device)?;
        world.device(peer)?;
        can.put(c_int::from(device != peer))
    }

    /// An attribute of the link between two devices.
    fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_int, device: CUdevice, peer: CUdevice) {
        let world = world()?;
        world.device(device)?;
        world.device(peer)?;
        match attribute {
            _ if device == peer => Err(INVALID_DEVICE),
            1 => value.put(0),
            // Access and native atomics; no arrays.
            2 | 3 => value.put(1),
            4 => value.put(0),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Begins profiling, which does nothing.
    fn cuProfilerStart() {
        world().map(drop)
    }

    /// Ends profiling, which does nothing.
    fn cuProfilerStop() {
        world().map(drop)
    }
}
