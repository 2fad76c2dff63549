//! `vgpu_run`: one launch on a virtual GPU, without a driver. `include/vgpu.h` declares it; a test
//! compares the two.

use std::ffi::{c_char, c_int, c_uint};

use epoxide_vgpu::{CheckConfig, DeviceConfig, GridConfig, LaunchError, Machine, MachineError, Module};

use crate::abi::{In, OUT_OF_MEMORY, Out, Res};

/// Kinds of arguments, as in the header.
const VALUE: c_int = 0;
const IN: c_int = 1;
const OUT: c_int = 2;
const IN_OUT: c_int = IN | OUT;

/// Results, as in the header.
const OK: c_int = 0;
const BAD_ARGUMENT: c_int = 1;
const BAD_PTX: c_int = 2;
const BAD_LAUNCH: c_int = 3;
const FAULT: c_int = 4;

/// `vgpu_arg`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VgpuArg {
    /// The value, or the contents of the array.
    pub data: Out<u8>,
    /// Its length in bytes.
    pub bytes: usize,
    /// 0 is a value, 1 an input, 2 an output, 3 both.
    pub kind: c_int,
}

/// `vgpu_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VgpuOptions {
    /// Not 0: draws the order of warps.
    pub seed: u64,
    /// Most warp instructions without progress; 0 is 2^28.
    pub max_warp_instructions: u64,
    /// Not 0: check mode.
    pub check: c_int,
}

/// An error: the result and its explanation.
type Failure = (c_int, String);

fn bad(what: impl Into<String>) -> Failure {
    (BAD_ARGUMENT, what.into())
}

fn failed(error: MachineError) -> Failure {
    let result = match error {
        MachineError::Launch(_) | MachineError::Memory(_) => BAD_LAUNCH,
        _ => FAULT,
    };
    (result, error.to_string())
}

fn given<T>(what: &str, value: Res<T>) -> Result<T, Failure> {
    value.map_err(|_| bad(format!("{what} is null")))
}

/// The contents of an array, or room for those of an output.
fn host_copy(buffer: &Buffer) -> Result<Vec<u8>, Failure> {
    let Buffer { data, bytes, kind, number, .. } = *buffer;
    let mut room = vec![];
    let copy = match kind {
        OUT => room.try_reserve_exact(bytes).map(|()| room).map_err(|_| OUT_OF_MEMORY),
        _ => data.before().get_all(bytes),
    };
    copy.map_err(|_| {
        let text = format!("parameter {number} has {bytes} bytes of data: the host cannot allocate as many");
        (BAD_LAUNCH, text)
    })
}

fn extents(what: &str, at: In<c_uint>) -> Result<[u32; 3], Failure> {
    let all = given(what, at.get_all(3))?;
    Ok([all[0], all[1], all[2]])
}

/// Memory of the caller that the kernel gets as an array. Parameters with the same memory share it.
struct Buffer {
    data: Out<u8>,
    bytes: usize,
    /// [`IN`], [`OUT`] or both bits.
    kind: c_int,
    /// The number of its first parameter.
    number: usize,
    /// Where the addresses lie among the parameters.
    offsets: Vec<usize>,
}

impl Buffer {
    /// Whether the two have memory in common.
    fn overlaps(&self, other: &Buffer) -> bool {
        let [begin, other_begin] = [self.data.addr(), other.data.addr()];
        let begins_in = other_begin.wrapping_sub(begin) < self.bytes && other.bytes > 0;
        begins_in || begin.wrapping_sub(other_begin) < other.bytes && self.bytes > 0
    }
}

fn run(
    (ptx, entry): (In<c_char>, In<c_char>),
    shape: GridConfig,
    (args, num_args): (In<VgpuArg>, usize),
    options: VgpuOptions,
) -> Result<(), Failure> {
    let (ptx, entry) = (given("ptx", ptx.text())?, given("entry", entry.text())?);
    let module = Module::parse(&ptx).map_err(|error| (BAD_PTX, error.to_string()))?;
    let kernel = module.find(&entry).map_err(|error| bad(error.to_string()))?;
    if num_args != kernel.params().len() {
        let (expected, actual, params) = (kernel.params().len(), num_args, kernel.param_lines());
        return Err(bad(LaunchError::ArgumentCount { kernel: entry, expected, actual, params }.to_string()));
    }
    let args = given("args", args.get_all(num_args))?;
    let mut params = vec![0; kernel.param_bytes()];
    let mut buffers: Vec<Buffer> = vec![];
    for (number, (param, arg)) in kernel.params().iter().zip(args).enumerate() {
        let VgpuArg { data, bytes, kind } = arg;
        if !(VALUE..=IN_OUT).contains(&kind) {
            return Err(bad(format!("parameter {number} has kind {kind}: 0 to 3 exist")));
        }
        let actual = if kind == VALUE { bytes } else { size_of::<u64>() };
        if actual != param.size {
            let (expected, params) = (param.size, kernel.param_lines());
            let error = LaunchError::ArgumentBytes { kernel: entry, param: number, expected, actual, params };
            return Err(bad(error.to_string()));
        }
        let name = format!("data of parameter {number}");
        if bytes > 0 {
            given(&name, data.required())?;
        }
        if kind == VALUE {
            let value = given(&name, data.before().get_all(bytes))?;
            params[param.offset..param.offset + param.size].copy_from_slice(&value);
            continue;
        }
        match buffers.iter_mut().find(|buffer| buffer.data.addr() == data.addr() && buffer.bytes == bytes) {
            Some(buffer) => {
                buffer.kind |= kind;
                buffer.offsets.push(param.offset);
            }
            None => buffers.push(Buffer { data, bytes, kind, number, offsets: vec![param.offset] }),
        }
    }
    for (count, later) in buffers.iter().enumerate() {
        let in_part = |earlier: &&Buffer| (earlier.kind | later.kind) & OUT != 0 && earlier.overlaps(later);
        if let Some(earlier) = buffers[..count].iter().find(in_part) {
            return Err(bad(format!(
                "data of parameters {} and {} overlap, and the kernel may write one of them: give both the same \
                 data and bytes, or memory of their own",
                earlier.number, later.number
            )));
        }
    }
    let config = DeviceConfig {
        schedule_seed: Some(options.seed).filter(|seed| *seed != 0),
        livelock_limit: Some(options.max_warp_instructions).filter(|limit| *limit != 0),
        ..DeviceConfig::default()
    };
    let mut machine = Machine::with_config(1, config, (options.check != 0).then(CheckConfig::default));
    let memory = machine.memory(0).map_err(failed)?.clone();
    let mut arrays = vec![];
    for buffer in &buffers {
        let host = host_copy(buffer)?;
        let label = &kernel.params()[buffer.number].name;
        let array = machine.alloc::<u8>(0, label, buffer.bytes).map_err(failed)?;
        memory.write(array.addr(), &host).map_err(|error| failed(error.into()))?;
        for offset in &buffer.offsets {
            params[*offset..*offset + size_of::<u64>()].copy_from_slice(&array.addr().to_ne_bytes());
        }
        arrays.push((buffer, array, host));
    }
    machine.launch(0, &module, &entry, shape, &params).map_err(failed)?;
    machine.run().map_err(failed)?;
    arrays.retain(|(buffer, ..)| buffer.kind & OUT != 0);
    // A call that fails changes no array, so all are read before the first is written.
    for (buffer, array, host) in &mut arrays {
        host.resize(buffer.bytes, 0);
        // An output that the kernel has not written is its fault.
        memory.read(array.addr(), host).map_err(|error| (FAULT, error.to_string()))?;
    }
    for (buffer, _, host) in arrays {
        // Null is an array without bytes.
        let _ = buffer.data.put_all(host);
    }
    Ok(())
}

/// Runs one kernel, as the header describes.
///
/// # Safety
/// Pointers are null or valid as the header describes.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // They are those of the header.
pub unsafe extern "C" fn vgpu_run(
    ptx: In<c_char>,
    entry: In<c_char>,
    grid: In<c_uint>,
    block: In<c_uint>,
    dynamic_shared: c_uint,
    args: In<VgpuArg>,
    num_args: usize,
    options: In<VgpuOptions>,
    report: Out<c_char>,
    report_bytes: usize,
) -> c_int {
    let all = || {
        let shape = GridConfig {
            grid: extents("grid", grid)?,
            block: extents("block", block)?,
            dynamic_shared_bytes: dynamic_shared,
            cluster: None,
        };
        let options =
            if options.is_null() { VgpuOptions::default() } else { given("options", options.get())? };
        run((ptx, entry), shape, (args, num_args), options)
    };
    let (result, text) = all().err().unwrap_or((OK, String::new()));
    if report_bytes > 0 && !report.is_null() {
        let text = text.bytes().take(report_bytes - 1).chain([0]);
        // The buffer is not null.
        let _ = report.put_all(text.map(|byte| byte as c_char));
    }
    result
}
