//! Compares a device with the results of the virtual GPU: runs the modules that
//! `cargo xtask ptx-fuzz --out DIR` wrote and compares every result. Each instruction form that
//! differs is printed once; the exit code is 1 then, and 77 if there is no GPU.
//!
//! ```text
//! cargo xtask ptx-fuzz --modules 500 --out DIR
//! cargo run --release -p epoxide-examples --features cuda --example ptx_fuzz -- DIR
//! ```
//!
//! Without the feature `cuda` the device is the virtual GPU, which shows that folder and example
//! fit together.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use epoxide::Error;
use epoxide::driver::{Device, LaunchConfig, Memory, MemoryKind, Module, Stream};

type Fallible<T> = Result<T, Box<dyn StdError>>;

fn main() -> ExitCode {
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) if matches!(error.downcast_ref(), Some(Error::Unavailable { .. })) => {
            println!("SKIP  {error}");
            ExitCode::from(77)
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(feature = "cuda")]
fn open() -> Result<Device, Error> {
    epoxide::driver::cuda::CudaDevice::open(0)
}

#[cfg(not(feature = "cuda"))]
fn open() -> Result<Device, Error> {
    use epoxide::driver::virt::{VirtConfig, VirtualGpu};
    Ok(VirtualGpu::new(VirtConfig::default()))
}

/// Runs every module of the folder and returns the number of results that differ.
fn run() -> Fallible<usize> {
    let dir =
        std::env::args_os().nth(1).map(PathBuf::from).ok_or("which folder? See cargo xtask ptx-fuzz")?;
    let mut modules: Vec<PathBuf> = std::fs::read_dir(&dir)
        .map_err(|error| format!("cannot read {}: {error}", dir.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "ptx"))
        .collect();
    modules.sort();
    if modules.is_empty() {
        return Err(format!("no modules in {}: run cargo xtask ptx-fuzz --out {0}", dir.display()).into());
    }
    let device = open()?;
    println!("{} modules on {}", modules.len(), device.info().name);
    let mut found = Differences::default();
    for path in &modules {
        compare(&device, path, &mut found).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    for (form, (count, first)) in &found.forms {
        println!("{form} {count} differ; the first: {first}");
    }
    let total = found.forms.values().map(|(count, _)| count).sum();
    println!("{} results, {total} differ, of {} instruction forms", found.compared, found.forms.len());
    Ok(total)
}

/// Results that differ, by instruction form: how many, and the first.
#[derive(Default)]
struct Differences {
    compared: usize,
    forms: BTreeMap<String, (usize, String)>,
}

/// Runs one module. The words of its two buffers, `in` and `out`, and a description lie beside its
/// PTX. The description has a line with the launch, then one for each row of results.
fn compare(device: &Device, path: &Path, found: &mut Differences) -> Fallible<()> {
    let ptx = std::fs::read_to_string(path)?;
    let input = std::fs::read(path.with_extension("in"))?;
    let recorded = std::fs::read(path.with_extension("out"))?;
    let description = std::fs::read_to_string(path.with_extension("forms"))?;
    let mut lines = description.lines();
    let launch = lines.next().and_then(|line| line.split_once(' ')).ok_or("no launch in .forms")?;
    let (grid, block): (u32, u32) = (launch.0.parse()?, launch.1.parse()?);
    let lanes = (grid * block) as usize;

    let stream = Stream::new(device)?;
    let source = Memory::alloc(device, input.len() as u64, MemoryKind::Device, "in")?;
    let target = Memory::alloc(device, recorded.len() as u64, MemoryKind::Device, "out")?;
    let kernel = Module::load(device, &ptx)?.kernel("fuzz", 0)?;
    source.write(&stream, 0, &input)?;
    target.write(&stream, 0, &vec![0; recorded.len()])?;
    let config = LaunchConfig { grid, block, shared_bytes: 0, cooperative: false, dependent: false };
    // SAFETY: the read below waits for the kernel before the memory is freed. The kernel stays
    // inside the two buffers: the virtual GPU has checked each access.
    unsafe {
        stream.launch(&kernel, &config, &[&source.ptr().0.to_ne_bytes(), &target.ptr().0.to_ne_bytes()])?;
    }
    let mut output = vec![0; recorded.len()];
    target.read(&stream, 0, &mut output)?;

    let word = |bytes: &[u8], at: usize| {
        bytes.get(at * 8..at * 8 + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
    };
    let mut input_row = 0;
    for (row, line) in lines.enumerate() {
        let mut fields = line.splitn(3, '\t');
        let mut field = || fields.next().ok_or_else(|| format!("not a description: {line:?}"));
        let (kind, rows, form) = (field()?, field()?.parse::<usize>()?, field()?);
        for lane in 0..lanes {
            let (got, want) = (word(&output, row * lanes + lane), word(&recorded, row * lanes + lane));
            found.compared += 1;
            if alike(kind, got, want) {
                continue;
            }
            let (count, _) = found.forms.entry(form.to_owned()).or_insert_with(|| {
                let operands: Vec<String> = (input_row..input_row + rows)
                    .map(|row| format!("{:#x}", word(&input, row * lanes + lane)))
                    .collect();
                let operands = operands.join(", ");
                (0, format!("({operands}) gave {got:#x}, and {want:#x} on the virtual GPU"))
            });
            *count += 1;
        }
        input_row += rows;
    }
    Ok(())
}

/// Whether two results are the same by the rule of their kind: a float may be any NaN where the
/// other is one.
fn alike(kind: &str, a: u64, b: u64) -> bool {
    let both_nan = |infinity: u64, a: u64, b: u64| {
        let magnitude = infinity.next_power_of_two() - 1;
        a & magnitude > infinity && b & magnitude > infinity
    };
    let halves = |infinity: u64| {
        [0, 16].into_iter().all(|shift| {
            let (a, b) = (a >> shift & 0xffff, b >> shift & 0xffff);
            a == b || both_nan(infinity, a, b)
        })
    };
    a == b
        || match kind {
            "f16" => both_nan(0x7c00, a, b),
            "bf16" => both_nan(0x7f80, a, b),
            "f32" => both_nan(0x7f80_0000, a, b),
            "f64" => both_nan(0x7ff0 << 48, a, b),
            "f16x2" => halves(0x7c00),
            "bf16x2" => halves(0x7f80),
            _ => false,
        }
}
