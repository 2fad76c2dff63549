//! Results of an H200 compared with those of the virtual GPU: copies of boxes and of pixels of
//! tensors, products of matrices, and reductions by bulk copies. One program makes both: over
//! NVIDIA's driver it records, and here it compares. Recorded on 2026-11-28 with driver 580.159.04.

mod boxes;
mod pixels;
mod products;
mod reductions;

use std::ffi::CString;
use std::fmt::Write as _;
use std::process::Command;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::cuda::*;
use crate::tensor_maps::Map;
use crate::tensor_maps_of_pixels::Pixels;

/// A kernel and its memory.
///
/// Its parameters are the addresses of the buffers, the map if it has one, and the words.
pub struct Case {
    /// Cases of one name stand behind one another and share a line of the record.
    pub name: String,
    pub ptx: Rc<str>,
    pub kernel: String,
    /// Blocks, and threads of a block.
    pub shape: [u32; 2],
    pub buffers: Vec<Vec<u8>>,
    pub map: Option<MapOfCase>,
    pub words: Vec<u32>,
    /// The buffer that is compared, from this byte on.
    pub result: (usize, usize),
}

/// The tensor map that a kernel gets.
pub enum MapOfCase {
    /// It describes the first buffer.
    OfBuffer(Map),
    /// The same, for copies of pixels.
    OfPixels(Pixels),
    /// It describes nothing, and is in the third buffer as well: the kernel replaces its fields.
    Template(Map),
}

/// A context with a module.
struct Gpu {
    ptx: Rc<str>,
    module: Module,
    _context: Context,
}

impl Gpu {
    fn new(ptx: &Rc<str>) -> Gpu {
        let context = Context::on(0);
        let text = CString::new(&**ptx).unwrap();
        let mut log = vec![0u8; 4096];
        // The options CU_JIT_ERROR_LOG_BUFFER and its size.
        let (keys, values) = ([5, 6], [log.as_mut_ptr() as usize, log.len()]);
        let mut module = 0;
        let code = cu!(cuModuleLoadDataEx(
            &mut module => *mut Handle, text.as_ptr() => *const i8, 2 => u32, keys.as_ptr() => *const i32,
            values.as_ptr() => *const usize,
        ));
        assert_eq!(code, 0, "{}", String::from_utf8_lossy(&log));
        Gpu { ptx: Rc::clone(ptx), module: Module(module), _context: context }
    }

    /// The result of a case, or the code of the first call that failed.
    fn run(&self, case: &Case) -> Result<Vec<u8>, Code> {
        let mut params: Vec<Vec<u8>> = vec![];
        let mut addresses = vec![];
        for buffer in &case.buffers {
            let mut address = 0u64;
            ok!(cuMemAlloc_v2(&mut address => *mut u64, buffer.len() => usize));
            ok!(cuMemcpyHtoD_v2(address => u64, buffer.as_ptr() => *const u8, buffer.len() => usize));
            params.push(address.to_ne_bytes().to_vec());
            addresses.push(address);
        }
        match &case.map {
            None => {}
            Some(MapOfCase::OfBuffer(map)) => params.push(map.bytes_at(addresses[0])?),
            Some(MapOfCase::OfPixels(map)) => params.push(map.bytes_at(addresses[0])?),
            Some(MapOfCase::Template(map)) => {
                let bytes = map.bytes_at(1 << 20)?;
                ok!(cuMemcpyHtoD_v2(addresses[2] => u64, bytes.as_ptr() => *const u8, bytes.len() => usize));
                params.push(bytes);
            }
        }
        params.extend(case.words.iter().map(|word| word.to_ne_bytes().to_vec()));
        let mut pointers: Vec<_> = params.iter_mut().map(|param| param.as_mut_ptr().cast()).collect();
        let done = |code: Code| if code == 0 { Ok(()) } else { Err(code) };
        done(self.module.try_launch(&case.kernel, 0, case.shape, &mut pointers))?;
        done(cu!(cuCtxSynchronize()))?;
        let (buffer, first) = case.result;
        let mut bytes = vec![0u8; case.buffers[buffer].len() - first];
        let from = addresses[buffer] + first as u64;
        ok!(cuMemcpyDtoH_v2(bytes.as_mut_ptr() => *mut u8, from => u64, bytes.len() => usize));
        for address in addresses {
            ok!(cuMemFree_v2(address => u64));
        }
        Ok(bytes)
    }
}

/// A digest of a result, or its code.
fn digest(result: &Result<Vec<u8>, Code>) -> String {
    match result {
        Err(code) => format!("error:{code}"),
        Ok(bytes) => {
            let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
            let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, fnv);
            format!("{:08x}", (hash ^ hash >> 32) as u32)
        }
    }
}

/// All cases: boxes, pixels, products and reductions. Groups of them are left out when one of number
/// `first` is already there.
fn cases(first: usize) -> Vec<Case> {
    let only = std::env::var(ONLY).ok();
    let wanted =
        |case: &Case| only.as_ref().is_none_or(|parts| parts.split(',').any(|part| case.name.contains(part)));
    let mut cases = vec![];
    for group in [boxes::cases, pixels::cases, products::cases, reductions::cases] {
        if first >= cases.len() {
            cases.extend(group().into_iter().filter(wanted));
        }
    }
    cases
}

/// Whether a kernel failed, so that its context is unusable. A rejected map is no fault.
fn is_fault(result: &Result<Vec<u8>, Code>) -> bool {
    result.as_ref().is_err_and(|code| ![INVALID_VALUE, NOT_SUPPORTED].contains(code))
}

/// Runs cases and gives each result to `each`, which returns whether to go on. Cases of one module share
/// a context up to a fault.
fn run_all(cases: &[Case], mut each: impl FnMut(usize, Result<Vec<u8>, Code>) -> bool) {
    let mut gpu: Option<Gpu> = None;
    for (i, case) in cases.iter().enumerate() {
        let usable = gpu.take().filter(|gpu| Rc::ptr_eq(&gpu.ptx, &case.ptx));
        let with = usable.unwrap_or_else(|| Gpu::new(&case.ptx));
        let result = with.run(case);
        if !is_fault(&result) {
            gpu = Some(with);
        }
        if !each(i, result) {
            return;
        }
    }
}

/// The lines of a record: a name, a tab, and the digests of its cases.
fn lines(cases: &[Case], digests: &[String]) -> String {
    let mut lines = String::new();
    for (at, (case, digest)) in cases.iter().zip(digests).enumerate() {
        if at > 0 && cases[at - 1].name == case.name {
            write!(lines, " {digest}").unwrap();
        } else {
            let end = if at > 0 { "\n" } else { "" };
            write!(lines, "{end}{}\t{digest}", case.name).unwrap();
        }
    }
    lines + "\n"
}

#[test]
fn the_virtual_gpu_gives_what_an_h200_gave() {
    let cases = cases(usize::MAX);
    let mut digests = vec![];
    run_all(&cases, |_, result| {
        digests.push(digest(&result));
        true
    });
    let (here, there) = (lines(&cases, &digests), include_str!("h200.tsv"));
    let mut differ = vec![];
    for (here, there) in here.lines().zip(there.lines()) {
        if here != there {
            differ.push(format!("{here}\n  H200: {there}"));
        }
    }
    assert_eq!(here.lines().count(), there.lines().count());
    assert!(differ.is_empty(), "{} lines differ\n{}", differ.len(), differ.join("\n"));
}

/// The number of the first case that a process runs, and the file that it adds a line to for each
/// case: its digest, a tab, and all bytes.
const FIRST: &str = "EPOXIDE_TEST_FIRST";
const RESULTS: &str = "results.tsv";
/// Parts of names, separated by commas: only cases whose name has one are run.
const ONLY: &str = "EPOXIDE_TEST_ONLY";
/// The longest that all cases may take. Later ones are not recorded.
const LONGEST: Duration = Duration::from_secs(300);

/// A fault leaves a process without a GPU, so each process runs cases up to its first fault.
#[test]
#[ignore = "records the results of this machine's GPU in h200.tsv, and with all bytes in results.tsv"]
fn record() {
    if let Some(first) = std::env::var(FIRST).ok().and_then(|first| first.parse::<usize>().ok()) {
        record_from(first);
    }
    let cases = cases(usize::MAX);
    std::fs::write(RESULTS, "").unwrap();
    let mut digests: Vec<String> = vec![];
    let end = Instant::now() + LONGEST;
    while digests.len() < cases.len() && Instant::now() < end {
        let program = std::env::current_exe().expect("this program has a path");
        let mut child = Command::new(program)
            .args(["--ignored", "--exact", "hardware::record", "--nocapture"])
            .env(FIRST, digests.len().to_string())
            .spawn()
            .expect("it starts");
        while child.try_wait().expect("it can be waited for").is_none() {
            if Instant::now() > end {
                child.kill().expect("it is a child");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let before = digests.len();
        let text = std::fs::read_to_string(RESULTS).unwrap();
        let new = text.lines().skip(before).filter_map(|line| line.split_once('\t'));
        digests.extend(new.map(|(digest, _)| digest.to_owned()));
        assert!(digests.len() > before, "{} gives nothing", cases[before].name);
    }
    std::fs::write("h200.tsv", lines(&cases, &digests)).unwrap();
}

/// Adds a line for each case from `first` to the first fault, or to the last of a group. Ends the process.
fn record_from(first: usize) -> ! {
    use std::io::Write as _;
    let cases = cases(first);
    // With this variable, results of the virtual GPU are recorded, which helps to find a
    // difference.
    if std::env::var_os("EPOXIDE_TEST_VIRTUAL").is_none() {
        OTHER_LIBRARY.set("libcuda.so.1".into()).expect("runs by itself");
    }
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(RESULTS).unwrap();
    run_all(&cases[first..], |_, result| {
        let mut line = digest(&result) + "\t";
        result.iter().flatten().for_each(|byte| write!(line, "{byte:02x}").unwrap());
        writeln!(file, "{line}").unwrap();
        !is_fault(&result)
    });
    std::process::exit(0);
}
