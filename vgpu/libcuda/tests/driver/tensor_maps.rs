//! The arguments of `cuTensorMapEncodeTiled` that an H200's driver accepts, compared with this
//! library. One program makes both: over NVIDIA's driver it records, and here it compares. Recorded
//! on 2026-11-28 with driver 580.159.04.

use crate::cuda::*;

/// SplitMix64. Recorded results depend on these numbers, so they must never change.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number from `low` to `high`.
    pub fn from(&mut self, low: i64, high: i64) -> i64 {
        low + (self.next() % (high - low + 1) as u64) as i64
    }

    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.next() as usize % list.len()]
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// The least distance of a tensor from the begin of its memory.
pub const GUARD: usize = 64;

/// Arguments of `cuTensorMapEncodeTiled`. The lists are longer than the rank where that is wrong.
#[derive(Clone, Debug)]
pub struct Map {
    pub data_type: i32,
    pub rank: u32,
    /// Added to an address that is a multiple of 256.
    pub offset: u64,
    pub shape: [u64; 6],
    pub strides: [u64; 6],
    pub tile: [u32; 6],
    pub steps: [u32; 6],
    pub interleave: i32,
    pub swizzle: i32,
    pub promotion: i32,
    pub fill: i32,
}

/// 128 bytes, in the alignment that programs use.
#[repr(C, align(64))]
pub struct Bytes(pub [u8; 128]);

impl Map {
    /// A matrix of f32.
    pub fn simple() -> Map {
        Map {
            data_type: 7,
            rank: 2,
            offset: 0,
            shape: [64, 16, 4, 4, 4, 4],
            strides: [256, 4096, 16384, 65536, 262_144, 0],
            tile: [16, 4, 2, 2, 2, 2],
            steps: [1; 6],
            interleave: 0,
            swizzle: 0,
            promotion: 0,
            fill: 0,
        }
    }

    fn encode(&self, address: u64) -> Code {
        let mut map = Bytes([0; 128]);
        self.encode_at(&raw mut map as usize, address)
    }

    /// The 128 bytes for a tensor that is at its offset from `address`, or the code of the driver.
    pub fn bytes_at(&self, address: u64) -> Result<Vec<u8>, Code> {
        let mut map = Bytes([0; 128]);
        match self.encode_at(&raw mut map as usize, address) {
            0 => Ok(map.0.to_vec()),
            code => Err(code),
        }
    }

    fn encode_at(&self, map: usize, address: u64) -> Code {
        cu!(cuTensorMapEncodeTiled(
            map => usize, self.data_type => i32, self.rank => u32, address + self.offset => u64,
            self.shape.as_ptr() => *const u64, self.strides.as_ptr() => *const u64,
            self.tile.as_ptr() => *const u32, self.steps.as_ptr() => *const u32, self.interleave => i32,
            self.swizzle => i32, self.promotion => i32, self.fill => i32,
        ))
    }

    /// Bytes of an element.
    pub fn bytes(&self) -> usize {
        [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4][self.data_type as usize]
    }

    /// A valid map of a small tensor and a small box.
    pub fn random(rng: &mut Rng) -> Map {
        let mut map = Map::simple();
        map.data_type = rng.of(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11]);
        map.rank = rng.from(1, 5) as u32;
        map.swizzle = rng.from(0, 3) as i32;
        map.promotion = rng.from(0, 3) as i32;
        map.offset = (GUARD as i64 + 16 * rng.from(0, 3)) as u64;
        let (rank, bytes) = (map.rank as usize, map.bytes() as i64);
        let row = if map.swizzle == 0 { 16 * rng.from(1, 4) } else { 16 << map.swizzle };
        let most = [0, 0, 24, 7, 4, 3][rank];
        for d in 0..rank {
            map.tile[d] = if d == 0 { row / bytes } else { rng.from(1, most) } as u32;
            map.steps[d] = rng.of(&[1, 1, 1, 2, 3]);
            map.shape[d] = rng.from(1, 2 * i64::from(map.tile[d])) as u64;
        }
        let mut length = map.shape[0] * map.bytes() as u64;
        for d in 1..rank {
            length = length.next_multiple_of(16) + 16 * rng.from(0, 1) as u64;
            map.strides[d - 1] = length;
            length *= map.shape[d];
        }
        map
    }
}

/// One character for a code of `cuTensorMapEncodeTiled`.
pub fn letter(code: Code) -> char {
    match code {
        0 | INVALID_VALUE => (b'0' + code as u8).into(),
        NOT_SUPPORTED => 'n',
        _ => '?',
    }
}

/// The codes for arguments of which one is at a bound, and for random ones: lines of a name, a tab,
/// and a character for each code.
fn codes() -> String {
    let mut lines = String::new();
    let _context = Context::on(0);
    let address = alloc(1024);
    let mut numbers = |name: &str, numbers: &[u64], set: &dyn Fn(&mut Map, u64)| {
        let code = |number| {
            let mut map = Map::simple();
            set(&mut map, number);
            letter(map.encode(address))
        };
        let codes: String = numbers.iter().map(|&number| code(number)).collect();
        lines += &format!("{name}\t{codes}\n");
    };
    const LENGTHS: [u64; 7] = [0, 1, 3, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 40];
    const STRIDES: [u64; 12] = [0, 8, 16, 24, 128, 256, 272, 4096, 1 << 32, (1 << 40) - 16, 1 << 40, 1 << 41];
    const TILES: [u64; 13] = [0, 1, 2, 3, 4, 5, 8, 12, 64, 128, 255, 256, 257];
    numbers("rank", &[0, 1, 2, 3, 4, 5, 6], &|map, rank| map.rank = rank as u32);
    numbers("offset", &[0, 1, 4, 8, 16, 24, 32], &|map, offset| map.offset = offset);
    numbers("promotion", &[0, 1, 2, 3, 4], &|map, number| map.promotion = number as i32);
    for d in 0..2 {
        numbers(&format!("shape {d}"), &LENGTHS, &|map, length| map.shape[d] = length);
        numbers(&format!("tile {d}"), &TILES, &|map, length| map.tile[d] = length as u32);
        let steps = [0, 1, 2, 8, 9, 16, 255, 256];
        numbers(&format!("step {d}"), &steps, &|map, step| map.steps[d] = step as u32);
    }
    for d in 0..2 {
        numbers(&format!("stride {d} of 3 dimensions"), &STRIDES, &|map, stride| {
            map.rank = 3;
            map.strides[d] = stride;
        });
    }
    for d in 2..5 {
        let steps = [0, 1, 2, 3, 8];
        numbers(&format!("step {d}"), &steps, &|map, step| (map.rank, map.steps[d]) = (5, step as u32));
    }
    for data_type in 0..=16 {
        numbers(&format!("row of type {data_type}"), &TILES, &|map, row| {
            (map.data_type, map.tile[0]) = (data_type, row as u32);
        });
        numbers(&format!("fill of type {data_type}"), &[0, 1, 2], &|map, fill| {
            (map.data_type, map.fill) = (data_type, fill as i32);
        });
    }
    let rows = [4, 8, 12, 16, 20, 24, 32, 36, 64];
    for swizzle in 0..=7 {
        numbers(&format!("row of swizzle {swizzle}"), &rows, &|map, row| {
            (map.swizzle, map.tile[0]) = (swizzle, row as u32);
        });
        numbers(&format!("single row of swizzle {swizzle}"), &rows, &|map, row| {
            (map.swizzle, map.tile[0], map.tile[1]) = (swizzle, row as u32, 1);
        });
    }
    for interleave in 0..=3 {
        numbers(&format!("rank of interleave {interleave}"), &[1, 2, 3, 4, 5], &|map, rank| {
            (map.interleave, map.rank) = (interleave, rank as u32);
        });
    }
    const KIBIBYTES: [u64; 14] = [128, 227, 228, 229, 230, 231, 232, 234, 236, 238, 239, 240, 512, 8192];
    numbers("KiB of a box", &KIBIBYTES, &|map, kibibytes| {
        let rows = kibibytes as u32;
        (map.rank, map.tile) = (3, [256, rows.min(256), rows.div_ceil(256), 1, 1, 1]);
    });
    // 256 KiB of which steps leave a part: lengths of the second and third dimension.
    for step in [2, 3, 5] {
        numbers(&format!("length by step {step}"), &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], &|map, len| {
            (map.rank, map.tile, map.steps[2]) = (3, [256, 76, len as u32, 1, 1, 1], step);
        });
    }
    numbers("steps of the first dimension", &[1, 2, 3, 4], &|map, step| {
        (map.tile, map.steps[0]) = ([256, 256, 1, 1, 1, 1], step as u32);
    });
    numbers("steps of the second dimension", &[1, 2, 3, 4], &|map, step| {
        (map.tile, map.steps[1]) = ([256, 256, 1, 1, 1, 1], step as u32);
    });
    numbers("KiB of a box with wide rows of a swizzle", &KIBIBYTES, &|map, kibibytes| {
        let rows = 32 * kibibytes as u32;
        (map.rank, map.tile, map.swizzle) = (3, [8, rows.min(256), rows.div_ceil(256), 1, 1, 1], 3);
    });
    let mut maps = [const { Bytes([0; 128]) }; 2];
    let to = &raw mut maps as usize;
    let code = |offset| letter(Map::simple().encode_at(to + offset, address));
    lines += &format!("to places\t{}\n", [0, 8, 16, 32, 64].map(code).iter().collect::<String>());
    let null = |at: usize| {
        let map = Map::simple();
        let mut bytes = Bytes([0; 128]);
        let lists = [
            &raw mut bytes as usize,
            map.shape.as_ptr() as usize,
            map.strides.as_ptr() as usize,
            map.tile.as_ptr() as usize,
            map.steps.as_ptr() as usize,
        ];
        let [to, shape, strides, tile, steps] =
            std::array::from_fn(|i| if i == at % 5 { 0 } else { lists[i] });
        let rank = if at < 5 { 2 } else { 1 };
        letter(cu!(cuTensorMapEncodeTiled(
            to => usize, 7 => i32, rank => u32, address => u64, shape => usize, strides => usize, tile => usize,
            steps => usize, 0 => i32, 0 => i32, 0 => i32, 0 => i32,
        )))
    };
    lines += &format!("with a null pointer\t{}\n", (0..10).map(null).collect::<String>());
    let mut rng = Rng(1);
    for group in 0..40 {
        let mut codes = String::new();
        for _ in 0..50 {
            let mut map = Map::random(&mut rng);
            for _ in 0..rng.from(0, 2) {
                let d = rng.from(0, i64::from(map.rank) - 1) as usize;
                match rng.from(0, 7) {
                    0 => map.swizzle = rng.from(0, 3) as i32,
                    1 => map.tile[d] = rng.of(&TILES) as u32,
                    2 => map.steps[d] = rng.of(&[1, 2, 4, 8, 9]),
                    3 => map.shape[d] = rng.of(&LENGTHS),
                    4 => map.strides[d] = rng.of(&STRIDES),
                    5 => map.data_type = rng.from(0, 12) as i32,
                    6 => map.rank = rng.from(1, 5) as u32,
                    _ => map.offset = rng.of(&[0, 8, 16]),
                }
            }
            codes.push(letter(map.encode(address)));
        }
        lines += &format!("random {group}\t{codes}\n");
    }
    lines
}

#[test]
fn tensor_maps_are_taken_and_refused_as_by_an_h200() {
    let (here, there) = (codes(), include_str!("tensor_maps_h200.tsv"));
    assert_eq!(here.len(), there.len());
    for (here, there) in here.lines().zip(there.lines()) {
        // `n`: this kind of tensor map is not supported here.
        let (name, codes) = here.split_once('\t').unwrap();
        let same = |(here, there)| here == there || here == 'n';
        let all = there
            .split_once('\t')
            .is_some_and(|(of, there)| of == name && codes.chars().zip(there.chars()).all(same));
        assert!(all, "{here} here, and {there} of the H200");
    }
    let unsupported = |line: &&str| line.split_once('\t').unwrap().1.contains('n');
    let unsupported: Vec<&str> = here.lines().filter(unsupported).collect();
    assert_eq!(unsupported, ["rank of interleave 1\t11nnn", "rank of interleave 2\t11nnn"]);
}

#[test]
#[ignore = "records the codes of this machine's driver"]
fn record() {
    OTHER_LIBRARY.set("libcuda.so.1".into()).expect("runs by itself");
    std::fs::write("tensor_maps_h200.tsv", codes()).unwrap();
}
