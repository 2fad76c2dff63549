//! Facts about kernels, occupancy, launches.

use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use epoxide_vgpu::stream::Launch;
use epoxide_vgpu::{Cluster, ClusterSizes, DeviceConfig, GridConfig, Kernel, Residency};

use super::api;
use super::device::MAX_SHARED_BYTES;
use super::module::{kernel_in, resolve_function};
use super::stream::submit;
use crate::abi::*;
use crate::engine::launch_code;
use crate::work::Work;
use crate::world::{Function, Tables, World, world};

/// `CU_FUNC_ATTRIBUTE_*` that can be set.
const MAX_DYNAMIC_SHARED: c_int = 8;
const CARVEOUT: c_int = 9;
const NON_PORTABLE_CLUSTERS: c_int = 14;

fn function_of(world: &World, tables: &mut Tables, handle: Handle) -> Res<Function> {
    let function = resolve_function(world, tables, handle)?;
    tables.functions.get(&function).cloned().ok_or(INVALID_HANDLE)
}

/// Loads the code of a kernel. With `CUDA_MODULE_LOADING=LAZY` that waits for all work that is
/// enqueued in the context's streams, as the driver may: also for a kernel that waits for this one.
fn load<'a>(
    world: &'a World,
    mut tables: MutexGuard<'a, Tables>,
    handle: Handle,
) -> Res<(MutexGuard<'a, Tables>, Function)> {
    let handle = resolve_function(world, &mut tables, handle)?;
    let function = tables.functions.get(&handle).cloned().ok_or(INVALID_HANDLE)?;
    if world.config.loads_lazily && !function.is_loaded {
        let context = tables.modules.get(&function.module).ok_or(INVALID_HANDLE)?.context;
        let streams = tables.streams_of(context);
        tables = world.synchronise(tables, &streams)?;
        tables.functions.get_mut(&handle).ok_or(INVALID_HANDLE)?.is_loaded = true;
    }
    Ok((tables, function))
}

fn attribute_of(value: Out<c_int>, asked: c_int, handle: Handle) -> Res {
    let world = world()?;
    let (tables, function) = load(world, world.lock(), handle)?;
    value.put(attribute(&tables, &function, asked)?)
}

fn attribute(tables: &Tables, function: &Function, attribute: c_int) -> Res<c_int> {
    let kernel = &function.kernel;
    let [words, double_words, _] = kernel.register_slots();
    let version = tables.modules.get(&function.module).map(|loaded| loaded.module.version());
    Ok(match attribute {
        0 => kernel.max_threads().unwrap_or(1024).min(1024) as c_int,
        1 => kernel.static_shared_bytes() as c_int,
        // CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET, and the three that REQUIRED_CLUSTER_WIDTH
        // begins.
        10 => c_int::from(kernel.needs_cluster()),
        11..=13 => kernel.required_cluster().map_or(0, |shape| shape[attribute as usize - 11] as c_int),
        2 | 7 | 15 => 0,
        3 => kernel.local_bytes() as c_int,
        4 => (words + 2 * double_words).clamp(1, 255) as c_int,
        5 => version.map_or(0, |version| (version.major * 10 + version.minor) as c_int),
        6 => 90,
        MAX_DYNAMIC_SHARED => function.max_dynamic_shared as c_int,
        CARVEOUT => function.carveout,
        NON_PORTABLE_CLUSTERS => c_int::from(function.cluster_sizes == ClusterSizes::NonPortable),
        _ => return Err(INVALID_VALUE),
    })
}

fn set_attribute(function: &mut Function, attribute: c_int, value: c_int) -> Res {
    match attribute {
        MAX_DYNAMIC_SHARED => {
            let most = MAX_SHARED_BYTES.saturating_sub(function.kernel.static_shared_bytes());
            let bytes = u32::try_from(value).ok().filter(|bytes| *bytes <= most).ok_or(INVALID_VALUE)?;
            function.max_dynamic_shared = bytes;
        }
        CARVEOUT if (-1..=100).contains(&value) => function.carveout = value,
        NON_PORTABLE_CLUSTERS if value == 0 => function.cluster_sizes = ClusterSizes::Portable,
        NON_PORTABLE_CLUSTERS if value == 1 => function.cluster_sizes = ClusterSizes::NonPortable,
        // Attributes that can only be read.
        _ => return Err(INVALID_VALUE),
    }
    Ok(())
}

fn set_attribute_of(handle: Handle, attribute: c_int, value: c_int) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    let function = resolve_function(world, &mut tables, handle)?;
    set_attribute(tables.functions.get_mut(&function).ok_or(INVALID_HANDLE)?, attribute, value)
}

/// An error unless a device is that of the current context, for which attributes of kernels are.
fn check_device(device: CUdevice) -> Res {
    let world = world()?;
    world.device(device)?;
    let tables = world.lock();
    if tables.device_of(tables.current()?)? == device as usize {
        return Ok(());
    }
    crate::symbols::report_once("an attribute of a kernel on another device than the current context's");
    Err(NOT_SUPPORTED)
}

/// Blocks of this shape that fit on a multiprocessor.
fn blocks_per_sm(kernel: &Kernel, threads: u32, dynamic_shared: u64) -> u32 {
    let shared = dynamic_shared.saturating_add(u64::from(kernel.static_shared_bytes()));
    if shared > u64::from(MAX_SHARED_BYTES) || threads > kernel.max_threads().unwrap_or(1024).min(1024) {
        return 0;
    }
    DeviceConfig { sm_count: 1, ..DeviceConfig::default() }.resident_blocks(threads, shared as u32)
}

fn occupancy(blocks: Out<c_int>, function: Handle, threads: c_int, dynamic_shared: usize) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    tables.current()?;
    let function = function_of(world, &mut tables, function)?;
    let threads = u32::try_from(threads).ok().filter(|threads| *threads > 0).ok_or(INVALID_VALUE)?;
    blocks.put(blocks_per_sm(&function.kernel, threads, dynamic_shared as u64) as c_int)
}

/// The block size with the most threads on a multiprocessor, the largest of equals.
fn best_block(
    least_grid: Out<c_int>,
    block: Out<c_int>,
    function: Handle,
    shared_of: SharedOfBlock,
    dynamic_shared: usize,
    limit: c_int,
) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    let device = tables.device_of(tables.current()?)?;
    let kernel = function_of(world, &mut tables, function)?.kernel;
    drop(tables);
    let most = kernel.max_threads().unwrap_or(1024).min(1024);
    let most = if limit > 0 { most.min(limit as u32) } else { most };
    let shared = |threads: u32| match shared_of {
        // SAFETY: the caller passes a function for block sizes.
        Some(function) => (unsafe { function(threads as c_int) }) as u64,
        None => dynamic_shared as u64,
    };
    let sizes = (1..=most / 32).map(|warps| warps * 32).chain([most]);
    let blocks = |threads: u32| blocks_per_sm(&kernel, threads, shared(threads));
    let best =
        sizes.filter(|threads| *threads > 0).max_by_key(|threads| (blocks(*threads) * threads, *threads));
    let best = best.ok_or(INVALID_VALUE)?;
    least_grid.put((blocks(best) * world.devices[device].config.sm_count) as c_int)?;
    block.put(best as c_int)
}

/// The parameter block, from an array of pointers or from the buffer that `extra` names.
fn pack(kernel: &Kernel, params: In<In<u8>>, extra: In<usize>) -> Res<Vec<u8>> {
    if !extra.is_null() {
        let (mut buffer, mut given) = (In::null(), 0);
        // CU_LAUNCH_PARAM_BUFFER_POINTER is 1, CU_LAUNCH_PARAM_BUFFER_SIZE 2, the end 0.
        for at in 0..2 {
            // Nothing is read behind the end.
            match extra.at_index(2 * at)? {
                0 => break,
                1 => buffer = In::at(extra.at_index(2 * at + 1)?),
                2 => given = In::<usize>::at(extra.at_index(2 * at + 1)?).get()?,
                _ => return Err(INVALID_VALUE),
            }
        }
        let mut block: Vec<u8> = buffer.get_all(given.min(kernel.param_bytes()))?;
        // Callers may leave out, or add, bytes that only pad.
        let last = kernel.params().last().map_or(0, |param| param.offset + param.size);
        if block.len() < last {
            return Err(INVALID_VALUE);
        }
        block.resize(kernel.param_bytes(), 0);
        return Ok(block);
    }
    let mut block = vec![0; kernel.param_bytes()];
    let values = params.get_all(kernel.params().len())?;
    for (param, value) in kernel.params().iter().zip(values) {
        block[param.offset..param.offset + param.size].copy_from_slice(&value.get_all(param.size)?);
    }
    Ok(block)
}

/// A launch: shape, stream, and whether all blocks must be resident at once.
struct Shape {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    dynamic_shared_bytes: c_uint,
    stream: Handle,
    residency: Residency,
    /// Blocks of a cluster, where the launch specifies them.
    cluster: Option<[c_uint; 3]>,
}

fn launch(function: Handle, shape: &Shape, params: In<In<u8>>, extra: In<usize>) -> Res {
    let world = world()?;
    let mut tables = world.lock();
    // A kernel of a library has no context, so that of the stream counts.
    let function = if tables.kernels.contains_key(&function) {
        let stream = tables.resolve(shape.stream)?;
        let context = tables.stream(stream)?.context;
        kernel_in(world, &mut tables, function, context)?
    } else {
        function
    };
    let (mut tables, function) = load(world, tables, function)?;
    let stream = tables.resolve(shape.stream)?;
    let owner = tables.modules.get(&function.module).map(|module| module.context);
    if owner != Some(tables.stream(stream)?.context) {
        return Err(INVALID_HANDLE);
    }
    let (kernel, sizes) = (function.kernel, function.cluster_sizes);
    let params = pack(&kernel, params, extra)?;
    let config = GridConfig {
        grid: shape.grid,
        block: shape.block,
        dynamic_shared_bytes: shape.dynamic_shared_bytes,
        cluster: shape.cluster.or(kernel.required_cluster()).map(|blocks| Cluster { blocks, sizes }),
    };
    let device = tables.stream(stream)?.device;
    let device = &world.devices[device].config;
    kernel.check_launch(device, &config, &params).map_err(|error| launch_code(&error))?;
    if shape.dynamic_shared_bytes > function.max_dynamic_shared {
        return Err(INVALID_VALUE);
    }
    if shape.residency == Residency::Together {
        let threads = shape.block.iter().product();
        let fit = blocks_per_sm(&kernel, threads, shape.dynamic_shared_bytes.into());
        let blocks: u64 = shape.grid.iter().map(|extent| u64::from(*extent)).product();
        if blocks > u64::from(fit) * u64::from(device.sm_count) {
            return Err(COOPERATIVE_LAUNCH_TOO_LARGE);
        }
    }
    let launch = Arc::new(Launch { kernel, residency: shape.residency, config, params });
    submit(world, tables, stream, Work::Launch(launch)).map(drop)
}

/// The names that were returned, which live as long as the process.
static NAMES: Mutex<Vec<(Handle, &'static CStr)>> = Mutex::new(vec![]);

fn name_of(to: Out<*const c_char>, handle: Handle) -> Res {
    let world = world()?;
    to.required()?;
    let mut tables = world.lock();
    // A kernel of a library has a name in no context too.
    let name = match tables.kernels.get(&handle) {
        Some((_, name)) => name.clone(),
        None => function_of(world, &mut tables, handle)?.kernel.name().to_owned(),
    };
    drop(tables);
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = names.iter().find(|(own, _)| *own == handle).map(|(_, name)| *name);
    let name = match known {
        Some(name) => name,
        None => {
            let name: &'static CStr = Box::leak(CString::new(name).map_err(|_| UNKNOWN)?.into_boxed_c_str());
            names.push((handle, name));
            name
        }
    };
    to.put(name.as_ptr())
}

fn param_info(handle: Handle, index: usize, offset: Out<usize>, bytes: Out<usize>) -> Res {
    let world = world()?;
    let function = function_of(world, &mut world.lock(), handle)?;
    let param = function.kernel.params().get(index).ok_or(INVALID_VALUE)?;
    bytes.put_optional(param.size);
    offset.put(param.offset)
}

api! {
    /// An attribute of a kernel.
    fn cuFuncGetAttribute(value: Out<c_int>, asked: c_int, function: Handle) {
        attribute_of(value, asked, function)
    }

    /// Sets an attribute of a kernel.
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) {
        set_attribute_of(function, attribute, value)
    }

    /// An attribute of a kernel on the device of the current context.
    fn cuKernelGetAttribute(value: Out<c_int>, asked: c_int, kernel: Handle, device: CUdevice) {
        check_device(device)?;
        attribute_of(value, asked, kernel)
    }

    /// Sets an attribute of a kernel on the device of the current context, and in that context.
    fn cuKernelSetAttribute(attribute: c_int, value: c_int, kernel: Handle, device: CUdevice) {
        check_device(device)?;
        set_attribute_of(kernel, attribute, value)
    }

    /// Sets the preference for the cache, which changes nothing.
    fn cuFuncSetCacheConfig(function: Handle, _config: c_int) {
        let world = world()?;
        resolve_function(world, &mut world.lock(), function).map(drop)
    }

    /// Sets the preference for the cache, which changes nothing.
    fn cuKernelSetCacheConfig(kernel: Handle, _config: c_int, _device: CUdevice) {
        let world = world()?;
        resolve_function(world, &mut world.lock(), kernel).map(drop)
    }

    /// Sets the preference for banks of shared memory, which changes nothing.
    fn cuFuncSetSharedMemConfig(function: Handle, _config: c_int) {
        let world = world()?;
        resolve_function(world, &mut world.lock(), function).map(drop)
    }

    /// The name of a kernel.
    fn cuFuncGetName(name: Out<*const c_char>, function: Handle) {
        name_of(name, function)
    }

    /// The name of a kernel.
    fn cuKernelGetName(name: Out<*const c_char>, kernel: Handle) {
        name_of(name, kernel)
    }

    /// Offset and length of a parameter.
    fn cuFuncGetParamInfo(function: Handle, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        param_info(function, index, offset, bytes)
    }

    /// Offset and length of a parameter.
    fn cuKernelGetParamInfo(kernel: Handle, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        param_info(kernel, index, offset, bytes)
    }

    /// Whether the code of a kernel is loaded.
    fn cuFuncIsLoaded(state: Out<c_int>, function: Handle) {
        let world = world()?;
        let function = function_of(world, &mut world.lock(), function)?;
        state.put((function.is_loaded || !world.config.loads_lazily).into())
    }

    /// Loads the code of a kernel.
    fn cuFuncLoad(function: Handle) {
        let world = world()?;
        load(world, world.lock(), function).map(drop)
    }

    /// Blocks of a kernel that fit on a multiprocessor.
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<c_int>,
        function: Handle,
        threads: c_int,
        dynamic_shared: usize,
    ) {
        occupancy(blocks, function, threads, dynamic_shared)
    }

    /// The same; flags change nothing.
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<c_int>,
        function: Handle,
        threads: c_int,
        dynamic_shared: usize,
        _flags: c_uint,
    ) {
        occupancy(blocks, function, threads, dynamic_shared)
    }

    /// The block size with the most threads on a multiprocessor, and the grid that fills the
    /// device.
    fn cuOccupancyMaxPotentialBlockSize(
        least_grid: Out<c_int>,
        block: Out<c_int>,
        function: Handle,
        shared_of: SharedOfBlock,
        dynamic_shared: usize,
        limit: c_int,
    ) {
        best_block(least_grid, block, function, shared_of, dynamic_shared, limit)
    }

    /// The same; flags change nothing.
    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        least_grid: Out<c_int>,
        block: Out<c_int>,
        function: Handle,
        shared_of: SharedOfBlock,
        dynamic_shared: usize,
        limit: c_int,
        _flags: c_uint,
    ) {
        best_block(least_grid, block, function, shared_of, dynamic_shared, limit)
    }

    /// Dynamic shared memory of a block if `blocks` of them are to fit on a multiprocessor.
    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: Out<usize>, function: Handle, blocks: c_int, threads: c_int) {
        let world = world()?;
        let mut tables = world.lock();
        tables.current()?;
        let kernel = function_of(world, &mut tables, function)?.kernel;
        let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks > 0).ok_or(INVALID_VALUE)?;
        let threads = u32::try_from(threads).ok().filter(|threads| *threads > 0).ok_or(INVALID_VALUE)?;
        if blocks_per_sm(&kernel, threads, 0) < blocks {
            return Err(INVALID_VALUE);
        }
        // Each block also takes 1 KiB of the system's.
        let each = (228 * 1024 / blocks).saturating_sub(1024).min(MAX_SHARED_BYTES);
        bytes.put(each.saturating_sub(kernel.static_shared_bytes()) as usize)
    }

    /// Launches a kernel.
    fn cuLaunchKernel(
        function: Handle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        dynamic_shared_bytes: c_uint,
        stream: Handle,
        params: In<In<u8>>,
        extra: In<usize>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let shape = Shape { grid, block, dynamic_shared_bytes, stream, residency: Residency::InTurn, cluster: None };
        launch(function, &shape, params, extra)
    }

    /// Launches a kernel whose blocks are all resident at once.
    fn cuLaunchCooperativeKernel(
        function: Handle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        dynamic_shared_bytes: c_uint,
        stream: Handle,
        params: In<In<u8>>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let shape = Shape { grid, block, dynamic_shared_bytes, stream, residency: Residency::Together, cluster: None };
        launch(function, &shape, params, In::null())
    }

    /// Launches a kernel with attributes. Attributes that only affect speed are ignored.
    fn cuLaunchKernelEx(config: In<CUlaunchConfig>, function: Handle, params: In<In<u8>>, extra: In<usize>) {
        let config = config.get()?;
        let (mut residency, mut cluster) = (Residency::InTurn, None);
        for attribute in config.attributes.get_all(config.attribute_count as usize)? {
            let [low, high] = [attribute.value[0] as u32, (attribute.value[0] >> 32) as u32];
            match attribute.id {
                // Ignored, the window of the cache, policies of synchronisation and of clusters,
                // priority, domains, the part of shared memory, the use of NVLink.
                0 | 1 | 3 | 5 | 8 | 9 | 10 | 14 | 16 => {}
                2 => residency = if low == 0 { Residency::InTurn } else { Residency::Together },
                // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                4 => cluster = Some([low, high, attribute.value[1] as u32]),
                // Overlap with the kernel before it is allowed, not demanded.
                6 => {}
                // CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION without one
                11 if attribute.value[..2] == [0, 0] => {}
                // No attribute has this number.
                15 => return Err(INVALID_VALUE),
                _ => {
                    crate::symbols::report_once("cuLaunchKernelEx with this attribute");
                    return Err(NOT_SUPPORTED);
                }
            }
        }
        let CUlaunchConfig { grid, block, dynamic_shared_bytes, stream, .. } = config;
        launch(function, &Shape { grid, block, dynamic_shared_bytes, stream, residency, cluster }, params, extra)
    }
}
