//! The arguments of `cuTensorMapEncodeIm2col` that an H200's driver accepts, compared with this
//! library. One program makes both: over NVIDIA's driver it records, and here it compares. Recorded
//! on 2026-11-28 with driver 580.159.04.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use crate::cuda::*;
use crate::tensor_maps::{Bytes, GUARD, Map, Rng, letter};

/// Arguments of `cuTensorMapEncodeIm2col`. The dimensions are C, W, H, D and N; of three there are C, W
/// and N.
#[derive(Clone, Debug)]
pub struct Pixels {
    /// The channels of a pixel are its innermost tile. The others are not used.
    pub map: Map,
    pub pixels: u32,
    /// W, H and D.
    pub lower: [i32; 3],
    pub upper: [i32; 3],
}

impl Pixels {
    /// A small tensor of f32 with `rank` dimensions, of which a copy has 24 pixels.
    pub fn plain(rank: u32) -> Pixels {
        let mut map = Map { rank, offset: GUARD as u64, ..Map::simple() };
        map.shape = [20, 6, 5, 4, 3, 1];
        map.shape[rank as usize - 1] = 3;
        map.tile[0] = 8;
        let mut pixels = Pixels { map, pixels: 24, lower: [0; 3], upper: [0; 3] };
        pixels.lay_out();
        pixels
    }

    pub fn lay_out(&mut self) {
        self.map.lay_out();
    }

    /// Dimensions of a pixel's place in an image.
    pub fn axes(&self) -> usize {
        self.map.rank as usize - 2
    }

    /// The 128 bytes for a tensor that is at its offset from `address`, or the code of the driver.
    pub fn bytes_at(&self, address: u64) -> Result<Vec<u8>, Code> {
        let mut map = Bytes([0; 128]);
        match self.encode_at(&raw mut map as usize, address) {
            0 => Ok(map.0.to_vec()),
            code => Err(code),
        }
    }

    fn encode_at(&self, to: usize, address: u64) -> Code {
        let map = &self.map;
        cu!(cuTensorMapEncodeIm2col(
            to => usize, map.data_type => i32, map.rank => u32, address + map.offset => u64,
            map.shape.as_ptr() => *const u64, map.strides.as_ptr() => *const u64,
            self.lower.as_ptr() => *const i32, self.upper.as_ptr() => *const i32, map.tile[0] => u32,
            self.pixels => u32, map.steps.as_ptr() => *const u32, map.interleave => i32, map.swizzle => i32,
            map.promotion => i32, map.fill => i32,
        ))
    }

    /// A valid map of a small tensor.
    pub fn random(rng: &mut Rng) -> Pixels {
        let mut map = Map::random(rng);
        map.rank = rng.from(3, 5) as u32;
        let axes = map.rank as usize - 2;
        for d in 1..=axes {
            map.shape[d] = rng.from(1, 6) as u64;
            map.steps[d] = rng.of(&[1, 1, 1, 2, 3]);
        }
        map.shape[axes + 1] = rng.from(1, 3) as u64;
        map.steps[axes + 1] = 1;
        let mut pixels = Pixels { map, pixels: 0, lower: [0; 3], upper: [0; 3] };
        let row = match pixels.map.swizzle {
            0 => pixels.map.tile[0] * pixels.map.bytes() as u32,
            swizzle => 16 << swizzle,
        };
        pixels.pixels = rng.from(1, i64::from(6144 / row).min(96)) as u32;
        for axis in 0..axes {
            let length = pixels.map.shape[axis + 1] as i64;
            let lower = rng.from(-3, 2.min(length - 1));
            pixels.lower[axis] = lower as i32;
            // The last place of the box is not before the first.
            pixels.upper[axis] = rng.from((lower - (length - 1)).max(-3), 3) as i32;
        }
        pixels.lay_out();
        pixels
    }
}

/// The codes for arguments with one at a bound, and for random ones: lines of a name, a tab, and a
/// character for each code, which `answer` makes of the call.
fn codes(answer: &mut dyn FnMut(&dyn Fn() -> Code) -> char) -> String {
    let mut lines = String::new();
    let _context = Context::on(0);
    let address = alloc(1024);
    let mut encode = |pixels: &Pixels| answer(&|| pixels.bytes_at(address).err().unwrap_or(0));
    let mut numbers = |name: &str, numbers: &[i64], set: &dyn Fn(&mut Pixels, i64)| {
        let mut code = |number| {
            let mut pixels = Pixels::plain(4);
            set(&mut pixels, number);
            encode(&pixels)
        };
        let codes: String = numbers.iter().map(|&number| code(number)).collect();
        lines += &format!("{name}\t{codes}\n");
    };
    const LENGTHS: [i64; 7] = [0, 1, 3, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 40];
    const STRIDES: [i64; 9] = [0, 8, 16, 24, 80, 4096, (1 << 40) - 16, 1 << 40, 1 << 41];
    const CHANNELS: [i64; 14] = [0, 1, 2, 3, 4, 5, 8, 12, 32, 64, 128, 255, 256, 257];
    const PIXELS: [i64; 13] = [0, 1, 2, 3, 7, 8, 16, 255, 256, 257, 1023, 1024, 1025];
    numbers("rank", &[0, 1, 2, 3, 4, 5, 6], &|pixels, rank| pixels.map.rank = rank as u32);
    numbers("offset", &[0, 1, 8, 16, 24, 32], &|pixels, offset| pixels.map.offset = offset as u64);
    numbers("promotion", &[0, 1, 2, 3, 4], &|pixels, number| pixels.map.promotion = number as i32);
    numbers("pixels", &PIXELS, &|pixels, number| pixels.pixels = number as u32);
    for d in 0..4 {
        numbers(&format!("shape {d}"), &LENGTHS, &|pixels, length| pixels.map.shape[d] = length as u64);
        let steps = [0, 1, 2, 3, 8, 9, 255];
        numbers(&format!("step {d}"), &steps, &|pixels, step| pixels.map.steps[d] = step as u32);
    }
    for d in 0..3 {
        numbers(&format!("stride {d}"), &STRIDES, &|pixels, stride| pixels.map.strides[d] = stride as u64);
    }
    for rank in 3..=5 {
        let bound = [1 << 15, 1 << 7, 1 << 4][rank as usize - 3];
        let corners = [-bound - 1, -bound, -1, 0, 1, bound - 1, bound];
        for axis in 0..rank as usize - 2 {
            numbers(&format!("lower corner {axis} of rank {rank}"), &corners, &|pixels, corner| {
                *pixels = Pixels::plain(rank);
                pixels.map.shape[axis + 1] = 1 << 20;
                pixels.lower[axis] = corner as i32;
            });
            numbers(&format!("upper corner {axis} of rank {rank}"), &corners, &|pixels, corner| {
                *pixels = Pixels::plain(rank);
                pixels.map.shape[axis + 1] = 1 << 20;
                pixels.upper[axis] = corner as i32;
            });
            // Boxes of 2, 1, 0 and -1 places.
            numbers(&format!("small box {axis} of rank {rank}"), &[-2, -1, 0, 1], &|pixels, less| {
                *pixels = Pixels::plain(rank);
                pixels.map.shape[axis + 1] = 4;
                pixels.lower[axis] = 2;
                pixels.upper[axis] = -less as i32 - 2;
            });
            numbers(&format!("empty box {axis} of rank {rank}"), &[-7, -6, -5, -4], &|pixels, upper| {
                *pixels = Pixels::plain(rank);
                pixels.map.shape[axis + 1] = 6;
                pixels.upper[axis] = upper as i32;
            });
        }
    }
    for data_type in 0..=16 {
        numbers(&format!("channels of type {data_type}"), &CHANNELS, &|pixels, channels| {
            (pixels.map.data_type, pixels.map.tile[0]) = (data_type, channels as u32);
        });
        numbers(&format!("fill of type {data_type}"), &[0, 1, 2], &|pixels, fill| {
            (pixels.map.data_type, pixels.map.fill) = (data_type, fill as i32);
        });
    }
    for swizzle in 0..=7 {
        numbers(
            &format!("channels of swizzle {swizzle}"),
            &[4, 8, 12, 16, 20, 32, 36, 64],
            &|pixels, row| {
                (pixels.map.swizzle, pixels.map.tile[0]) = (swizzle, row as u32);
            },
        );
    }
    for interleave in 0..=3 {
        numbers(&format!("rank of interleave {interleave}"), &[2, 3, 4, 5], &|pixels, rank| {
            (pixels.map.interleave, pixels.map.rank) = (interleave, rank as u32);
        });
    }
    // KiB of a copy, in rows of 1 KiB.
    numbers("KiB", &[128, 227, 228, 229, 240, 256, 512, 1024], &|pixels, kibibytes| {
        (pixels.map.tile[0], pixels.pixels) = (256, kibibytes as u32);
    });
    let null = |at: usize| -> Code {
        let Pixels { map, pixels, lower, upper } = Pixels::plain(4);
        let mut bytes = Bytes([0; 128]);
        let lists = [
            &raw mut bytes as usize,
            map.shape.as_ptr() as usize,
            map.strides.as_ptr() as usize,
            lower.as_ptr() as usize,
            upper.as_ptr() as usize,
            map.steps.as_ptr() as usize,
        ];
        let [to, shape, strides, lower, upper, steps] =
            std::array::from_fn(|i| if i == at { 0 } else { lists[i] });
        cu!(cuTensorMapEncodeIm2col(
            to => usize, 7 => i32, 4 => u32, address => u64, shape => usize, strides => usize, lower => usize,
            upper => usize, 8 => u32, pixels => u32, steps => usize, 0 => i32, 0 => i32, 0 => i32, 0 => i32,
        ))
    };
    let mut rng = Rng(17);
    for group in 0..20 {
        let codes: String = (0..50)
            .map(|_| {
                let mut pixels = Pixels::random(&mut rng);
                for _ in 0..rng.from(0, 2) {
                    let d = rng.from(0, i64::from(pixels.map.rank) - 1) as usize;
                    match rng.from(0, 7) {
                        0 => pixels.map.swizzle = rng.from(0, 3) as i32,
                        1 => pixels.map.tile[0] = rng.of(&CHANNELS) as u32,
                        2 => pixels.map.steps[d] = rng.of(&[1, 2, 4, 8, 9]),
                        3 => pixels.map.shape[d] = rng.of(&LENGTHS) as u64,
                        4 => pixels.map.strides[d] = rng.of(&STRIDES) as u64,
                        5 => pixels.pixels = rng.of(&PIXELS) as u32,
                        6 => pixels.lower[d % 3] = rng.from(-20, 20) as i32,
                        _ => pixels.upper[d % 3] = rng.from(-20, 20) as i32,
                    }
                }
                encode(&pixels)
            })
            .collect();
        lines += &format!("random {group}\t{codes}\n");
    }
    // These come last, because they may crash NVIDIA's driver.
    lines += "with a null pointer\t";
    lines.extend((0..6).map(|at| answer(&|| null(at))));
    lines + "\n"
}

#[test]
fn maps_of_pixels_are_taken_and_refused_as_by_an_h200() {
    let (here, there) = (codes(&mut |call| letter(call())), include_str!("tensor_maps_of_pixels_h200.tsv"));
    assert_eq!(here.len(), there.len());
    let mut differ = vec![];
    for (here, there) in here.lines().zip(there.lines()) {
        // `n`: this kind of tensor map is not supported here. `c`: NVIDIA's driver crashes.
        let (name, codes) = here.split_once('\t').unwrap();
        let same = |(here, there)| here == there || here == 'n' || there == 'c';
        let all = there
            .split_once('\t')
            .is_some_and(|(of, there)| of == name && codes.chars().zip(there.chars()).all(same));
        if !all {
            differ.push(format!("{here}\n  H200: {there}"));
        }
    }
    assert!(differ.is_empty(), "{} lines differ\n{}", differ.len(), differ.join("\n"));
    let unsupported = |line: &&str| line.split_once('\t').unwrap().1.contains('n');
    let unsupported: Vec<&str> = here.lines().filter(unsupported).collect();
    assert_eq!(unsupported, ["rank of interleave 1\t1nnn", "rank of interleave 2\t1nnn"]);
}

/// The file to which a child process adds a character for each call.
const LETTERS: &str = "letters.txt";
/// The number of the first call that a process makes.
const FIRST: &str = "EPOXIDE_TEST_FIRST";

/// Wrong arguments may crash a driver, so each process continues up to its first crash: `c`.
#[test]
#[ignore = "records the codes of this machine's driver"]
fn record() {
    OTHER_LIBRARY.set("libcuda.so.1".into()).expect("runs by itself");
    if let Some(first) = std::env::var(FIRST).ok().and_then(|first| first.parse::<usize>().ok()) {
        let mut file = std::fs::OpenOptions::new().append(true).open(LETTERS).unwrap();
        let mut number = 0;
        codes(&mut |call| {
            number += 1;
            if number > first {
                write!(file, "{}", letter(call())).unwrap();
            }
            ' '
        });
        std::process::exit(0);
    }
    std::fs::write(LETTERS, "").unwrap();
    let letters = loop {
        let letters = std::fs::read_to_string(LETTERS).unwrap();
        let program = std::env::current_exe().expect("this program has a path");
        let status = Command::new(program)
            .args(["--ignored", "--exact", "tensor_maps_of_pixels::record", "--nocapture"])
            .env(FIRST, letters.len().to_string())
            .status()
            .expect("it starts");
        let letters = std::fs::read_to_string(LETTERS).unwrap();
        match status.signal() {
            Some(_) => std::fs::write(LETTERS, letters + "c").unwrap(),
            None if status.success() => break letters,
            None => panic!("{status}"),
        }
    };
    let mut letters = letters.chars();
    let all = codes(&mut |_| letters.next().expect("a letter for each call"));
    assert_eq!(letters.next(), None);
    std::fs::write("tensor_maps_of_pixels_h200.tsv", all).unwrap();
}
