//! Faulty PTX in place of a program's own, for `cargo xtask mutate`.
//!
//! `EPOXIDE_VGPU_FAULTY` names a folder with the files `sound.ptx` and `faulty.ptx`. A program that
//! loads the text of the first gets the kernels of the second, so that its tests show whether they
//! notice. Other PTX is loaded as it is. For development only.

use std::path::PathBuf;
use std::sync::LazyLock;

/// Names the folder.
const DIRECTORY: &str = "EPOXIDE_VGPU_FAULTY";

/// The sound text and the faulty one.
struct Texts {
    sound: String,
    faulty: String,
}

static TEXTS: LazyLock<Option<Texts>> = LazyLock::new(|| {
    let directory = PathBuf::from(std::env::var_os(DIRECTORY).filter(|value| !value.is_empty())?);
    let read = |name: &str| {
        let file = directory.join(name);
        // A run on sound kernels would pass for one that noticed nothing.
        std::fs::read_to_string(&file)
            .unwrap_or_else(|error| panic!("{DIRECTORY}: cannot read {}: {error}", file.display()))
    };
    Some(Texts { sound: read("sound.ptx"), faulty: read("faulty.ptx") })
});

/// The text to load for `text`.
pub(crate) fn in_place_of(text: &str) -> &str {
    match &*TEXTS {
        Some(texts) if texts.sound == text => &texts.faulty,
        _ => text,
    }
}
