//! Modules, libraries and linking. An image is PTX text: there are no virtual GPUs for binaries.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use epoxide_vgpu::ptx::Version;
use epoxide_vgpu::{ClusterSizes, Module};

use super::api;
use crate::abi::*;
use crate::world::{Function, Library, Loaded, Tables, World, memory_code, world};

/// `CU_JIT_ERROR_LOG_BUFFER` and the option of its size.
const ERROR_LOG: c_int = 5;
const ERROR_LOG_BYTES: c_int = 6;

/// Options of `cuModuleLoadDataEx`: keys and values.
struct Options {
    error_log: Out<c_char>,
    error_log_bytes: usize,
}

impl Options {
    fn none() -> Options {
        Options { error_log: Out::null(), error_log_bytes: 0 }
    }

    fn read(count: c_uint, keys: In<c_int>, values: In<usize>) -> Res<Options> {
        let (keys, values) = (keys.get_all(count as usize)?, values.get_all(count as usize)?);
        let mut options = Options::none();
        for (key, value) in keys.into_iter().zip(values) {
            match key {
                ERROR_LOG => options.error_log = Out::at(value),
                ERROR_LOG_BYTES => options.error_log_bytes = value & 0xffff_ffff,
                _ => {}
            }
        }
        Ok(options)
    }

    /// Prints a message, and writes it to the program's error log.
    fn report(&self, message: &str) {
        eprintln!("libcuda of virtual GPUs: {message}");
        if self.error_log_bytes > 0 {
            let text = message.bytes().take(self.error_log_bytes - 1).chain([0]);
            // Without a buffer there is nothing to write to.
            let _ = self.error_log.put_all(text.map(|byte| byte as c_char));
        }
    }
}

/// The PTX of an image.
fn text_of(image: In<c_char>, options: &Options) -> Res<String> {
    const BINARIES: [&[u8]; 3] = [b"\x7fELF", &[0x50, 0xed, 0x55, 0xba], &[0xb1, 0x43, 0x62, 0x46]];
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    if BINARIES.iter().any(|magic| image.begins_with(magic)) {
        options.report("the image is a cubin or a fat binary; virtual GPUs run PTX: load the PTX text");
        return Err(NO_BINARY_FOR_GPU);
    }
    image.text()
}

/// The newest version of PTX: that of CUDA 13.5, whose compiler's kernels are among the tests.
const NEWEST: Version = Version { major: 9, minor: 5 };

fn parse(ptx: &str, options: &Options) -> Res<Arc<Module>> {
    if ptx.trim().is_empty() {
        return Err(INVALID_IMAGE);
    }
    if let Some(version) = Version::of(ptx).filter(|version| *version > NEWEST) {
        options.report(&format!(
            "the PTX has .version {version}, and virtual GPUs know versions up to {NEWEST}: compile it with \
             an older toolkit, or write an older version into it"
        ));
        return Err(UNSUPPORTED_PTX_VERSION);
    }
    Module::parse(ptx).map(Arc::new).map_err(|error| {
        let place = format!("line {}, column {}", error.line, error.column);
        options.report(&format!("PTX {place}: {}\n  | {}", error.message, error.source_line.trim_end()));
        INVALID_PTX
    })
}

/// Loads a parsed module into a context.
fn enter(world: &World, tables: &mut Tables, context: Handle, module: Arc<Module>) -> Res<Handle> {
    let device = tables.device_of(context)?;
    let variables = world.devices[device].memory.variables(&module).map_err(memory_code)?;
    // Copies reach them, peers do not.
    let shared = variables.map(|region| world.all.share(&region)).transpose().map_err(memory_code)?;
    let handle = tables.new_handle();
    let loaded = Loaded { context, module, _shared: shared, functions: HashMap::new() };
    tables.modules.insert(handle, loaded);
    Ok(handle)
}

fn load(to: Out<Handle>, text: impl FnOnce() -> Res<String>, options: &Options) -> Res {
    let world = world()?;
    to.required()?;
    let context = world.lock().current()?;
    let module = parse(&text()?, options)?;
    let mut tables = world.lock();
    to.put(enter(world, &mut tables, context, module)?)
}

fn load_data(to: Out<Handle>, image: In<c_char>, options: &Options) -> Res {
    load(to, || text_of(image, options), options)
}

fn read_file(path: In<c_char>) -> Res<String> {
    let bytes = std::fs::read(path.text()?).map_err(|_| FILE_NOT_FOUND)?;
    // The text ends with the first zero, like a C string.
    let text: Vec<u8> = bytes.into_iter().take_while(|byte| *byte != 0).collect();
    String::from_utf8(text).map_err(|_| {
        Options::none().report("the file is not PTX text; virtual GPUs run PTX");
        NO_BINARY_FOR_GPU
    })
}

fn unload(world: &'static World, module: Handle) -> Res {
    let mut tables = world.lock();
    let context = tables.modules.get(&module).ok_or(INVALID_HANDLE)?.context;
    let streams = tables.streams_of(context);
    if tables.is_alive(context) {
        tables = world.synchronise(tables, &streams)?;
    }
    let device = tables.device_of(context)?;
    let gone = tables.remove_module(module);
    drop(tables);
    if let Some(gone) = gone {
        gone.module.unload(&world.devices[device].memory);
    }
    Ok(())
}

fn function(tables: &mut Tables, module: Handle, name: &str) -> Res<Handle> {
    let loaded = tables.modules.get(&module).ok_or(INVALID_HANDLE)?;
    if let Some(known) = loaded.functions.get(name) {
        return Ok(*known);
    }
    let kernel = loaded.module.kernel(name).ok_or(NOT_FOUND)?;
    let handle = tables.new_handle();
    let free = super::device::DEFAULT_SHARED_BYTES.saturating_sub(kernel.static_shared_bytes());
    let function = Function {
        module,
        kernel,
        max_dynamic_shared: free,
        carveout: -1,
        cluster_sizes: ClusterSizes::Portable,
        is_loaded: false,
    };
    tables.functions.insert(handle, function);
    if let Some(loaded) = tables.modules.get_mut(&module) {
        loaded.functions.insert(name.to_owned(), handle);
    }
    Ok(handle)
}

/// Address and length of a variable.
fn variable(world: &World, tables: &Tables, module: Handle, name: &str) -> Res<(u64, u64)> {
    let loaded = tables.modules.get(&module).ok_or(INVALID_HANDLE)?;
    let memory = &world.devices[tables.device_of(loaded.context)?].memory;
    memory.variable(&loaded.module, name).map_err(memory_code)?.ok_or(NOT_FOUND)
}

/// The module of a library in the current context, loaded if it is not yet.
fn module_of(world: &World, tables: &mut Tables, library: Handle) -> Res<Handle> {
    let context = tables.current()?;
    module_in(world, tables, library, context)
}

/// The module of a library in a context, loaded if it is not yet.
fn module_in(world: &World, tables: &mut Tables, library: Handle, context: Handle) -> Res<Handle> {
    let own = tables.libraries.get(&library).ok_or(INVALID_HANDLE)?;
    if let Some(module) = own.modules.get(&context) {
        return Ok(*module);
    }
    let module = parse(&own.ptx.clone(), &Options::none())?;
    let handle = enter(world, tables, context, module)?;
    if let Some(library) = tables.libraries.get_mut(&library) {
        library.modules.insert(context, handle);
    }
    Ok(handle)
}

/// The function that a `CUfunction` or a `CUkernel` stands for in the current context.
pub(crate) fn resolve_function(world: &World, tables: &mut Tables, handle: Handle) -> Res<Handle> {
    if tables.functions.contains_key(&handle) {
        return Ok(handle);
    }
    if !tables.kernels.contains_key(&handle) {
        return Err(INVALID_HANDLE);
    }
    let context = tables.current()?;
    kernel_in(world, tables, handle, context)
}

/// The function that a `CUkernel` stands for in a context.
pub(crate) fn kernel_in(world: &World, tables: &mut Tables, kernel: Handle, context: Handle) -> Res<Handle> {
    let (library, name) = tables.kernels.get(&kernel).ok_or(INVALID_HANDLE)?.clone();
    let module = module_in(world, tables, library, context)?;
    function(tables, module, &name)
}

fn new_library(to: Out<Handle>, ptx: String, options: &Options) -> Res {
    let world = world()?;
    to.required()?;
    // Errors of the text show here, and not at its first use.
    let parsed = parse(&ptx, options)?;
    let mut tables = world.lock();
    let handle = tables.new_handle();
    let library = Library { ptx: ptx.into(), parsed, modules: HashMap::new(), kernels: HashMap::new() };
    tables.libraries.insert(handle, library);
    to.put(handle)
}

/// A link under way: its inputs, and the image once there is one.
struct Link {
    handle: Handle,
    inputs: Vec<String>,
    image: Option<CString>,
}

static LINKS: Mutex<Vec<Link>> = Mutex::new(vec![]);

fn with_link<T>(link: Handle, f: impl FnOnce(&mut Link) -> Res<T>) -> Res<T> {
    let mut links = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    f(links.iter_mut().find(|own| own.handle == link).ok_or(INVALID_HANDLE)?)
}

fn add_to_link(link: Handle, kind: c_int, ptx: String) -> Res {
    // CU_JIT_INPUT_PTX.
    if kind != 1 {
        return Err(NOT_SUPPORTED);
    }
    parse(&ptx, &Options::none())?;
    with_link(link, |link| {
        link.inputs.push(ptx);
        Ok(())
    })
}

api! {
    /// Loads PTX.
    fn cuModuleLoadData(module: Out<Handle>, image: In<c_char>) {
        load_data(module, image, &Options::none())
    }

    /// Loads PTX. Of the options, the buffer for errors is used.
    fn cuModuleLoadDataEx(module: Out<Handle>, image: In<c_char>, count: c_uint, keys: In<c_int>, values: In<usize>) {
        load_data(module, image, &Options::read(count, keys, values)?)
    }

    /// Reports that the image is no PTX.
    fn cuModuleLoadFatBinary(module: Out<Handle>, image: In<c_char>) {
        load_data(module, image, &Options::none())
    }

    /// Loads a file with PTX.
    fn cuModuleLoad(module: Out<Handle>, path: In<c_char>) {
        load(module, || read_file(path), &Options::none())
    }

    /// Unloads a module, after the work of its context.
    fn cuModuleUnload(module: Handle) {
        unload(world()?, module)
    }

    /// Modules are loaded at once.
    fn cuModuleGetLoadingMode(mode: Out<c_int>) {
        mode.put(1)
    }

    /// A kernel of a module.
    fn cuModuleGetFunction(to: Out<Handle>, module: Handle, name: In<c_char>) {
        to.required()?;
        to.put(function(&mut world()?.lock(), module, &name.text()?)?)
    }

    /// The number of kernels of a module.
    fn cuModuleGetFunctionCount(count: Out<c_uint>, module: Handle) {
        let tables = world()?.lock();
        count.put(tables.modules.get(&module).ok_or(INVALID_HANDLE)?.module.kernels().count() as c_uint)
    }

    /// The first kernels of a module.
    fn cuModuleEnumerateFunctions(to: Out<Handle>, count: c_uint, module: Handle) {
        let mut tables = world()?.lock();
        let loaded = tables.modules.get(&module).ok_or(INVALID_HANDLE)?;
        let names: Vec<String> =
            loaded.module.kernels().take(count as usize).map(|kernel| kernel.name().to_owned()).collect();
        let handles: Res<Vec<Handle>> = names.iter().map(|name| function(&mut tables, module, name)).collect();
        to.put_all(handles?)
    }

    /// A variable of a module.
    fn cuModuleGetGlobal_v2(addr: Out<CUdeviceptr>, bytes: Out<usize>, module: Handle, name: In<c_char>) {
        let (start, length) = variable(world()?, &world()?.lock(), module, &name.text()?)?;
        addr.put_optional(start);
        bytes.put_optional(length as usize);
        Ok(())
    }

    /// The module of a kernel.
    fn cuFuncGetModule(module: Out<Handle>, function: Handle) {
        let world = world()?;
        let mut tables = world.lock();
        let function = resolve_function(world, &mut tables, function)?;
        module.put(tables.functions.get(&function).ok_or(INVALID_HANDLE)?.module)
    }

    /// Loads PTX for all contexts.
    fn cuLibraryLoadData(
        library: Out<Handle>,
        image: In<c_char>,
        keys: In<c_int>,
        values: In<usize>,
        count: c_uint,
        _library_keys: In<c_int>,
        _library_values: In<usize>,
        _library_count: c_uint,
    ) {
        let options = Options::read(count, keys, values)?;
        new_library(library, text_of(image, &options)?, &options)
    }

    /// Loads a file with PTX for all contexts.
    fn cuLibraryLoadFromFile(
        library: Out<Handle>,
        path: In<c_char>,
        keys: In<c_int>,
        values: In<usize>,
        count: c_uint,
        _library_keys: In<c_int>,
        _library_values: In<usize>,
        _library_count: c_uint,
    ) {
        new_library(library, read_file(path)?, &Options::read(count, keys, values)?)
    }

    /// Unloads a library from all contexts. Gives the first error.
    fn cuLibraryUnload(library: Handle) {
        let world = world()?;
        let mut tables = world.lock();
        let gone = tables.libraries.remove(&library).ok_or(INVALID_HANDLE)?;
        tables.kernels.retain(|_, (own, _)| *own != library);
        drop(tables);
        gone.modules.into_values().map(|module| unload(world, module)).fold(Ok(()), Res::and)
    }

    /// The module of a library in the current context.
    fn cuLibraryGetModule(module: Out<Handle>, library: Handle) {
        let world = world()?;
        module.put(module_of(world, &mut world.lock(), library)?)
    }

    /// A kernel of a library.
    fn cuLibraryGetKernel(kernel: Out<Handle>, library: Handle, name: In<c_char>) {
        let world = world()?;
        kernel.required()?;
        let name = name.text()?;
        let mut tables = world.lock();
        let own = tables.libraries.get(&library).ok_or(INVALID_HANDLE)?;
        if let Some(known) = own.kernels.get(&name) {
            return kernel.put(*known);
        }
        own.parsed.kernel(&name).ok_or(NOT_FOUND)?;
        let handle = tables.new_handle();
        tables.kernels.insert(handle, (library, name.clone()));
        if let Some(library) = tables.libraries.get_mut(&library) {
            library.kernels.insert(name, handle);
        }
        kernel.put(handle)
    }

    /// The number of kernels of a library.
    fn cuLibraryGetKernelCount(count: Out<c_uint>, library: Handle) {
        let tables = world()?.lock();
        count.put(tables.libraries.get(&library).ok_or(INVALID_HANDLE)?.parsed.kernels().count() as c_uint)
    }

    /// A variable of a library in the current context.
    fn cuLibraryGetGlobal(addr: Out<CUdeviceptr>, bytes: Out<usize>, library: Handle, name: In<c_char>) {
        let world = world()?;
        let mut tables = world.lock();
        let module = module_of(world, &mut tables, library)?;
        let (start, length) = variable(world, &tables, module, &name.text()?)?;
        addr.put_optional(start);
        bytes.put_optional(length as usize);
        Ok(())
    }

    /// The function of a kernel in the current context.
    fn cuKernelGetFunction(function: Out<Handle>, kernel: Handle) {
        let world = world()?;
        function.put(resolve_function(world, &mut world.lock(), kernel)?)
    }

    /// The library of a kernel.
    fn cuKernelGetLibrary(library: Out<Handle>, kernel: Handle) {
        library.put(world()?.lock().kernels.get(&kernel).ok_or(INVALID_HANDLE)?.0)
    }

    /// Begins a link.
    fn cuLinkCreate_v2(_count: c_uint, _keys: In<c_int>, _values: In<usize>, link: Out<Handle>) {
        let mut tables = world()?.lock();
        tables.current()?;
        link.required()?;
        let handle = tables.new_handle();
        LINKS.lock().unwrap_or_else(PoisonError::into_inner).push(Link { handle, inputs: vec![], image: None });
        link.put(handle)
    }

    /// Adds PTX to a link.
    fn cuLinkAddData_v2(
        link: Handle,
        kind: c_int,
        data: In<u8>,
        bytes: usize,
        _name: In<c_char>,
        _count: c_uint,
        _keys: In<c_int>,
        _values: In<usize>,
    ) {
        world()?;
        let text = data.get_all(bytes)?.into_iter().take_while(|byte| *byte != 0).collect();
        add_to_link(link, kind, String::from_utf8(text).map_err(|_| INVALID_IMAGE)?)
    }

    /// Adds a file with PTX to a link.
    fn cuLinkAddFile_v2(
        link: Handle,
        kind: c_int,
        path: In<c_char>,
        _count: c_uint,
        _keys: In<c_int>,
        _values: In<usize>,
    ) {
        world()?;
        add_to_link(link, kind, read_file(path)?)
    }

    /// Ends a link of one input: its image is that PTX. Several inputs are not supported.
    fn cuLinkComplete(link: Handle, image: Out<*const c_void>, bytes: Out<usize>) {
        world()?;
        image.required()?;
        with_link(link, |link| {
            let [input] = &link.inputs[..] else {
                return Err(if link.inputs.is_empty() { INVALID_VALUE } else { NOT_SUPPORTED });
            };
            let text = link.image.insert(CString::new(input.as_str()).map_err(|_| INVALID_IMAGE)?);
            bytes.put_optional(text.as_bytes_with_nul().len());
            image.put(text.as_ptr().cast())
        })
    }

    /// Destroys a link and its image.
    fn cuLinkDestroy(link: Handle) {
        world()?;
        let mut links = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
        let at = links.iter().position(|own| own.handle == link).ok_or(INVALID_HANDLE)?;
        links.remove(at);
        Ok(())
    }
}
