use epoxide::{DType, Element};

#[derive(Clone, Copy)]
#[repr(C)]
struct Four([f32; 4]);

/// Copies rely on the size of a dtype's elements.
impl Element for Four {
    const DTYPE: DType = DType::F32;
}

fn main() {}
