//! Readers of untrusted bytes, tested with malformed bytes: a bounded number of inputs, drawn from
//! a seed. So everyday tests cover the fuzz targets in `fuzz/`, which call the same functions.

use std::fmt::Display;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rand::seq::IndexedRandom as _;
use rand::{Rng as _, RngCore as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::selections::Selections;
use crate::tier;

/// The number of inputs of each target. Without it the tier decides.
pub const INPUTS: &str = "EPOXIDE_FUZZ_INPUTS";
/// The number of the first input, to go on elsewhere or to replay one; default 0.
pub const FIRST: &str = "EPOXIDE_FUZZ_FIRST";
/// How long a target runs in the long tier, at least.
const TIME: Duration = Duration::from_secs(2);
/// Longest input that is not made from a longer sample.
const MAX_RANDOM: usize = 512;

/// Gives `target` samples, variations of them and random bytes, and prints how many it was and the
/// most memory that the process had. Input i is the same in every run and on every machine. The
/// default tier has `inputs` of them, the long tier at least as many.
///
/// # Panics
/// The target panics, with the command to replay printed; or a variable holds no number.
pub fn run(name: &str, inputs: u64, samples: &[Vec<u8>], target: impl Fn(&[u8])) {
    let first = variable(FIRST).unwrap_or(0_u64);
    let inputs_given = variable(INPUTS).map(NonZeroU64::get);
    let time = if inputs_given.is_none() { tier::pick(Duration::ZERO, TIME) } else { Duration::ZERO };
    let inputs = inputs_given.unwrap_or(inputs);
    let start = Instant::now();
    let mut done = 0;
    while done < inputs || start.elapsed() < time {
        let bytes = input(first + done, samples);
        // The panic propagates, so no code sees half-done state.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| target(&bytes))) {
            let number = first + done;
            eprintln!(
                "{name}: failed with input {number}; {FIRST}={number} {INPUTS}=1 replays it: {bytes:02x?}"
            );
            resume_unwind(panic);
        }
        done += 1;
    }
    println!("{name}: {done} inputs from {first} in {:.1?}, peak memory {} KiB", start.elapsed(), peak_kib());
}

/// The number in an environment variable.
///
/// # Panics
/// Where it holds no such number.
fn variable<T: FromStr<Err: Display>>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")))
}

/// Input `number`: the samples come first.
fn input(number: u64, samples: &[Vec<u8>]) -> Vec<u8> {
    if let Some(sample) = usize::try_from(number).ok().and_then(|number| samples.get(number)) {
        return sample.clone();
    }
    let mut rng = ChaCha8Rng::seed_from_u64(number);
    let mut bytes = match samples.choose(&mut rng) {
        Some(sample) if rng.random_bool(0.9) => sample.clone(),
        _ => {
            let mut bytes = vec![0; rng.random_range(0..MAX_RANDOM)];
            rng.fill_bytes(&mut bytes);
            bytes
        }
    };
    for _ in 0..rng.random_range(0..6) {
        vary(&mut bytes, samples, &mut rng);
    }
    bytes
}

/// Numbers that lengths and counts go wrong at.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 32,
    1 << 36,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

fn vary(bytes: &mut Vec<u8>, samples: &[Vec<u8>], rng: &mut ChaCha8Rng) {
    let at = rng.random_range(0..=bytes.len());
    let end = rng.random_range(at..=bytes.len().min(at + 64));
    match rng.random_range(0..10) {
        0 => bytes.truncate(at),
        1 => drop(bytes.drain(at..end)),
        2 => {
            // Repeat a part once.
            let part = bytes[at..end].to_vec();
            bytes.splice(at..at, part);
        }
        3 => {
            let Some(sample) = samples.choose(rng) else { return };
            let from = rng.random_range(0..=sample.len());
            let to = rng.random_range(from..=sample.len().min(from + 256));
            bytes.splice(at..end, sample[from..to].iter().copied());
        }
        4 => {
            let edge =
                EDGES.choose(rng).copied().unwrap_or_default().wrapping_add_signed(rng.random_range(-1..=1));
            let word = edge.to_le_bytes();
            let length = *[1, 2, 4, 8].choose(rng).unwrap_or(&8);
            for (byte, new) in bytes[at..].iter_mut().zip(&word[..length]) {
                *byte = *new;
            }
        }
        5 => bytes.insert(at, rng.random()),
        6 => {
            // The number in a text that is next, whole.
            let Some(from) = bytes[at..].iter().position(u8::is_ascii_digit).map(|skip| at + skip) else {
                return;
            };
            let digits = bytes[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            let edge = EDGES.choose(rng).copied().unwrap_or_default();
            bytes.splice(from..from + digits, edge.to_string().into_bytes());
        }
        7 => {
            // Nests deeper than any real input.
            let Some(byte) = bytes.get(at).copied() else { return };
            let deep = if rng.random_bool(0.02) { 20_000 } else { 20 };
            bytes.splice(at..at, std::iter::repeat_n(byte, rng.random_range(0..deep)));
        }
        _ => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << rng.random_range(0..8);
            }
        }
    }
}

fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or_default()
}

/// Parses bytes as PTX, which is loaded or refused.
pub fn ptx(bytes: &[u8]) {
    if let Err(error) = epoxide_vgpu::Module::parse(&String::from_utf8_lossy(bytes)) {
        assert!(!error.to_string().is_empty());
    }
}

/// Parses bytes as the selections of `epoxide inspect`, which are within the rules or refused with
/// a place.
pub fn selections(bytes: &[u8]) {
    match Selections::parse(&String::from_utf8_lossy(bytes), 8) {
        Ok(Selections { num_topk, ranks }) => {
            let mut tokens = ranks.iter().flatten();
            assert!(tokens.all(|ids| ids.len() == num_topk && ids.iter().all(|id| (-1..8).contains(id))));
        }
        Err(reason) => assert!(!reason.is_empty()),
    }
}

/// Valid input for [`selections`].
pub fn sample_selections() -> Vec<Vec<u8>> {
    ["[[[0,4],[1,6],[6,-1]],[[7,2],[-1,3]]]", "[[], []]", "[[[3, 3, 0], [-1, -1, -1]]]"]
        .map(|text| text.as_bytes().to_vec())
        .to_vec()
}

/// Valid input for [`ptx`]: a few instructions of each kind, and each kernel of `module` that is
/// short.
pub fn sample_ptx(module: &str) -> Vec<Vec<u8>> {
    sample_kernels(module, 6000).into_iter().chain([SAMPLE_PTX.into()]).collect()
}

/// Modules of one kernel each, of those of `module` whose text is shorter than `longest`.
pub fn sample_kernels(module: &str, longest: usize) -> Vec<Vec<u8>> {
    let start = module.find(".visible .entry").unwrap_or(module.len());
    let head = &module[..start];
    let kernels = module[start..].split_inclusive("\n}\n").filter(|kernel| kernel.len() < longest);
    kernels.map(|kernel| format!("{head}{kernel}").into_bytes()).collect()
}

const SAMPLE_PTX: &str = r#"
.version 8.4
.target sm_90
.address_size 64
.global .align 8 .b8 words[16] = {1, 2, 3};
.visible .entry sample(.param .u64 out, .param .u32 n)
.maxntid 128, 1, 1
{
    .reg .pred %p<3>;
    .reg .b16 %rs<2>;
    .reg .b32 %r<9>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<6>;
    .shared .align 16 .b8 stage[256];
    .loc 1 12 3
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r2, [n];
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p1, %r1, %r2;
    @%p1 bra DONE;
    mad.lo.s32 %r3, %r1, 4, %r2;
    cvt.u16.u32 %rs1, %r3;
    cvt.rn.f32.u32 %f1, %r3;
    fma.rn.f32 %f2, %f1, 0f3F800000, %f1;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    mov.u32 %r4, stage;
    st.shared.f32 [%r4+8], %f2;
    bar.sync 0;
    ld.volatile.global.v2.u32 {%r5, %r6}, [%rd3];
    atom.acquire.gpu.global.add.u32 %r7, [%rd3], %r5;
    st.global.release.sys.u32 [%rd3], %r7;
    shfl.sync.bfly.b32 %r8, %r7, 1, 31, -1;
    selp.b32 %r8, %r8, %r7, %p1;
DONE:
    ret;
}
"#;

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::alone;

    /// A printed number must mean the same input for as long as anyone may replay it.
    #[test]
    fn inputs_are_the_same_for_ever() {
        let samples = [b"a sample of some length".to_vec(), b"another".to_vec()];
        let sum = |number| {
            let bytes = input(number, &samples);
            bytes
                .iter()
                .fold(bytes.len() as u64, |sum, byte| sum.wrapping_mul(31).wrapping_add((*byte).into()))
        };
        assert_eq!(
            [2, 3, 1000].map(sum),
            [9_507_687_575_967_143_479, 330_782_769_026_721_673, 16_886_062_154_435_823_768]
        );
    }

    #[test]
    fn a_target_that_panics_is_told_with_its_input() {
        let seen = RefCell::new(0);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            run("test", 2, &[b"fine".to_vec(), b"bad".to_vec()], |bytes| {
                *seen.borrow_mut() += 1;
                assert_ne!(bytes, b"bad");
            });
        }));
        assert!(panic.is_err() && *seen.borrow() == 2);
    }

    #[test]
    fn the_long_tier_has_no_fewer_inputs() {
        if !tier::is_long() {
            let path = "fuzz::tests::the_long_tier_has_no_fewer_inputs";
            let ended = alone::one_test(path).env(tier::TIER, "long").env_remove(INPUTS).output().unwrap();
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
            return;
        }
        let seen = RefCell::new(0);
        run("slow", 5, &[], |_| {
            *seen.borrow_mut() += 1;
            std::thread::sleep(TIME / 4);
        });
        assert!(*seen.borrow() >= 5, "{seen:?}");
    }

    #[test]
    fn no_inputs_are_no_test() {
        let path = "fuzz::tests::a_target_that_panics_is_told_with_its_input";
        let ended = alone::one_test(path).env(INPUTS, "0").output().unwrap();
        let error = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && error.contains("EPOXIDE_FUZZ_INPUTS=0: "), "{error}");
    }
}
