//! Faulty PTX in place of a program's own, for `cargo xtask mutate`.
//!
//! `EPOXIDE_VGPU_FAULTY` names a folder with the files `sound.ptx` and `faulty.ptx`, which have the
//! same number of lines. A program that loads the text of the first gets the kernels of the second,
//! which shows whether its tests detect the fault. The same holds for a part of the text: some of
//! its kernels, with empty lines for the others. Other PTX is loaded as it is. For development
//! only.

use std::borrow::Cow;
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
        // A run on sound kernels would count as one that detected nothing.
        std::fs::read_to_string(&file)
            .unwrap_or_else(|error| panic!("{DIRECTORY}: cannot read {}: {error}", file.display()))
    };
    Some(Texts { sound: read("sound.ptx"), faulty: read("faulty.ptx") })
});

/// The text to load for `text`.
pub(crate) fn in_place_of(text: &str) -> Cow<'_, str> {
    TEXTS.as_ref().and_then(|texts| texts.in_place_of(text)).map_or(Cow::Borrowed(text), Cow::Owned)
}

impl Texts {
    /// The faulty form of `text`, where that is the sound text or a part of it.
    fn in_place_of(&self, text: &str) -> Option<String> {
        let (mut sound, mut faulty) = (self.sound.lines(), self.faulty.lines());
        let mut new = String::with_capacity(text.len());
        for line in text.lines() {
            let (sound, faulty) = (sound.next()?, faulty.next()?);
            if line == sound {
                new.push_str(faulty);
            } else if !line.is_empty() {
                return None;
            }
            new.push('\n');
        }
        sound.next().is_none().then_some(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: &str = "HEAD\n.visible .entry a(\n{\nX\n}\n.visible .entry b(\n{\nY\n}\n";

    fn texts() -> Texts {
        Texts { sound: SOUND.to_owned(), faulty: SOUND.replace('Y', "Z").replace('X', "W") }
    }

    #[test]
    fn the_sound_text_becomes_the_faulty_one() {
        assert_eq!(texts().in_place_of(SOUND).unwrap(), texts().faulty);
    }

    #[test]
    fn a_part_of_the_sound_text_gets_the_faults_of_its_kernels() {
        let part = "HEAD\n\n\n\n\n.visible .entry b(\n{\nY\n}\n";
        assert_eq!(texts().in_place_of(part).unwrap(), part.replace('Y', "Z"));
    }

    #[test]
    fn other_text_stays_as_it_is() {
        for text in ["", "HEAD\n", "\n\n", &SOUND.replace('Y', "V"), &format!("{SOUND}TAIL\n")] {
            assert_eq!(texts().in_place_of(text), None, "{text:?}");
        }
        assert_eq!(in_place_of(SOUND), SOUND);
    }
}
