//! Versions of what is measured: the program, its kernels, the driver and NCCL; and digests of
//! routings and kernels: two results with equal digests measured the same.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::LazyLock;

use epoxide_nccl::{Library, NCCL_LIBRARY};
use serde::{Deserialize, Serialize};

/// The measured program and kernels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// Commit of the program, with `-dirty` where measured code had changed since; `unknown` where
    /// it was not built in a repository.
    pub commit: String,
    /// Digest of the executable, where the commit is dirty or unknown: several builds may have one
    /// such commit. Missing elsewhere, and in older files.
    #[serde(default)]
    pub program: Option<String>,
    /// Digest of the PTX.
    pub ptx: String,
    /// Version of the driver; missing on the virtual GPU.
    pub driver: Option<String>,
}

impl Versions {
    /// The kernels of this program, for a text of PTX.
    pub(crate) fn of_ptx(ptx: &str, is_virtual: bool) -> Versions {
        let driver = if is_virtual { None } else { loaded_driver() };
        let commit = Versions::commit_of_this_program();
        let program = digest_of_program(&commit);
        let digest = if ptx == epoxide_gpu::PTX { shipped_digest().to_owned() } else { digest_of_text(ptx) };
        Versions { commit, program, ptx: digest, driver }
    }

    pub(crate) fn commit_of_this_program() -> String {
        env!("EPOXIDE_COMMIT").into()
    }

    /// The kernels, for people.
    pub fn text(&self) -> String {
        let driver = self.driver.as_ref().map_or_else(String::new, |driver| format!(", driver {driver}"));
        let program =
            self.program.as_ref().map_or_else(String::new, |program| format!(", program {program}"));
        let other = match self.ptx == shipped_digest() {
            true => "",
            false => " (not those of this program)",
        };
        format!("PTX {}{other}, commit {}{program}{driver}", self.ptx, self.commit)
    }
}

/// The NCCL of a baseline.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclVersion {
    /// Version of libnccl, such as `2.28.3`.
    pub version: String,
    /// NCCL's variables of the environment that are set, `NCCL_*`, without the name of the file.
    pub variables: BTreeMap<String, String>,
}

impl NcclVersion {
    /// The one that this process finds.
    ///
    /// # Errors
    /// [`epoxide::Error::Unavailable`] without a libnccl.
    pub(crate) fn found() -> epoxide::Result<NcclVersion> {
        let version = Library::find()?.version_text();
        let variables = std::env::vars_os()
            .map(|(name, value)| [name, value].map(|text| text.to_string_lossy().into_owned()))
            .filter(|[name, _]| name.starts_with("NCCL_") && name != NCCL_LIBRARY)
            .map(|[name, value]| (name, value));
        Ok(NcclVersion { version, variables: variables.collect() })
    }

    /// The version and the variables, for people.
    pub fn text(&self) -> String {
        let variables = self.variables.iter().map(|(name, value)| format!(", {name}={value}"));
        format!("NCCL {}{}", self.version, variables.collect::<String>())
    }
}

/// The digest of this program's executable, where `commit` does not identify the program.
fn digest_of_program(commit: &str) -> Option<String> {
    static DIGEST: LazyLock<Option<String>> =
        LazyLock::new(|| std::fs::read("/proc/self/exe").ok().map(|program| digest_of_bytes(&program)));
    let is_ambiguous = commit.ends_with("-dirty") || commit == "unknown";
    is_ambiguous.then(|| DIGEST.clone()).flatten()
}

/// The digest of the kernels of this program.
fn shipped_digest() -> &'static str {
    static DIGEST: LazyLock<String> = LazyLock::new(|| digest_of_text(epoxide_gpu::PTX));
    &DIGEST
}

/// The version of the NVIDIA driver that the system has loaded.
fn loaded_driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    driver_of(&text)
}

/// The first word of a driver's first line that is a version.
fn driver_of(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// Bytes of the hash that are kept: enough against accidental collisions, but not against an
/// attacker.
const BYTES: usize = 8;

/// The first 16 hexadecimal digits of the SHA-256 of every rank's expert ids in rank order. The ids
/// are little-endian 64-bit integers; each rank's number of ids precedes its ids. The digest is the
/// same on every machine and in every version.
pub(crate) fn digest_of_routing<'a>(ranks: impl IntoIterator<Item = &'a [i64]>) -> String {
    let mut hash = hmac_sha256::Hash::new();
    for ids in ranks {
        hash.update((ids.len() as u64).to_le_bytes());
        hash.update(ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
    }
    digits(hash)
}

/// The same of a text.
fn digest_of_text(text: &str) -> String {
    digest_of_bytes(text.as_bytes())
}

fn digest_of_bytes(bytes: &[u8]) -> String {
    let mut hash = hmac_sha256::Hash::new();
    hash.update(bytes);
    digits(hash)
}

fn digits(hash: hmac_sha256::Hash) -> String {
    hash.finalize()[..BYTES].iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of other versions must have the same digest. Python's hashlib computed the expected
    /// values.
    #[test]
    fn a_routing_has_the_same_digest_for_ever() {
        assert_eq!(digest_of_routing([&[0, 3, -1][..], &[2, 1, 7]]), "1dbbcfdfb0a7e72b");
        assert_eq!(digest_of_routing([&[0, 3][..], &[-1, 2, 1, 7]]), "3abe046e6e5876b8");
        assert_eq!(digest_of_text("abc"), "ba7816bf8f01cfea");
    }

    #[test]
    fn a_program_without_a_commit_of_its_own_has_a_digest() {
        let digits = |commit: &str| digest_of_program(commit).map(|digest| digest.len());
        let commits = ["abc1234", "abc1234-dirty", "unknown"];
        assert_eq!(commits.map(digits), [None, Some(2 * BYTES), Some(2 * BYTES)]);
    }
}
