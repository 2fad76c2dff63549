//! Parts of a Debian kernel package for the guest: the kernel as an ELF file, and the modules in
//! the order to load them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// Modules that the guest loads, besides their dependencies. `crc32_generic`: rxe requests the
/// checksum by name, so no module depends on it.
pub const MODULES: [&str; 10] = [
    "virtio_pci",
    "virtio_net",
    "crc32_generic",
    "dummy",
    "veth",
    "sch_netem",
    "sch_ingress",
    "cls_matchall",
    "act_gact",
    "rdma_rxe",
];

/// Unpacks the ELF kernel from a bzImage. Booted as it is, it needs no BIOS and does not unpack
/// itself, which is slow when emulated.
pub fn unpack(image: &[u8], scratch: &Path) -> Result<Vec<u8>> {
    let (tool, payload) = payload(image).context("this is no bzImage of boot protocol 2.08 or later")?;
    std::fs::write(scratch, payload).with_context(|| format!("cannot write {}", scratch.display()))?;
    let elf = decompress(tool, scratch)?;
    std::fs::remove_file(scratch)?;
    ensure!(elf.starts_with(b"\x7fELF"), "the kernel image holds no ELF file");
    Ok(elf)
}

/// The compressed kernel in a bzImage, and the tool that unpacks it. See
/// Documentation/arch/x86/boot.rst.
fn payload(image: &[u8]) -> Option<(&'static str, &[u8])> {
    let word = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let setup_sectors = usize::from(*image.get(0x1f1)?).max(1);
    let start = (setup_sectors + 1) * 512 + word(0x248)?;
    // The last four bytes are the unpacked size.
    let payload = image.get(start..start + word(0x24c)?.checked_sub(4)?)?;
    let tool = match payload {
        [0xfd, b'7', b'z', b'X', b'Z', ..] => "xz",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        [0x1f, 0x8b, ..] => "gzip",
        _ => return None,
    };
    Some((tool, payload))
}

/// Output of `tool -dc` for a file.
fn decompress(tool: &str, file: &Path) -> Result<Vec<u8>> {
    let output = Command::new(tool)
        .arg("-dc")
        .arg(file)
        .output()
        .with_context(|| format!("cannot start `{tool}`: install it (Debian: xz-utils, zstd, gzip)"))?;
    if !output.status.success() {
        bail!("`{tool} -dc` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// Reads [`MODULES`] and what they depend on from a `lib/modules/VERSION` folder: names and
/// contents, dependencies first.
pub fn modules(dir: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = BTreeMap::new();
    find(dir, &mut files)?;
    let mut loaded = Vec::new();
    for name in MODULES {
        load(name, &files, &mut loaded)?;
    }
    Ok(loaded)
}

fn find(dir: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            find(&entry.path(), files)?;
        } else if let Some((name, "ko" | "ko.xz")) = entry.file_name().to_string_lossy().split_once('.') {
            files.insert(name.replace('-', "_"), entry.path());
        }
    }
    Ok(())
}

fn load(name: &str, files: &BTreeMap<String, PathBuf>, loaded: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    if loaded.iter().any(|(have, _)| have == name) {
        return Ok(());
    }
    let file = files.get(name).with_context(|| format!("the kernel package has no module `{name}`"))?;
    let contents = match file.extension() {
        Some(extension) if extension == "xz" => decompress("xz", file)?,
        _ => std::fs::read(file)?,
    };
    for dependency in depends(&contents) {
        load(&dependency, files, loaded)?;
    }
    loaded.push((name.to_owned(), contents));
    Ok(())
}

/// The `depends=` string among a module's zero-terminated information strings.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let list = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let list = String::from_utf8_lossy(list);
    list.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_payload_of_a_kernel_image() {
        let mut image = vec![0; 0x800];
        image[0x1f1] = 2;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248] = 16;
        image[0x24c] = 12;
        image[0x610..0x61a].copy_from_slice(b"\xfd7zXZ\0abcd");
        assert_eq!(payload(&image), Some(("xz", &b"\xfd7zXZ\0ab"[..])));
        assert_eq!(payload(&image[..0x612]), None);
        assert_eq!(payload(b"no kernel"), None);
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let module = |name: &str, depends: &str| {
            std::fs::write(
                dir.path().join(name),
                format!("x\0license=GPL\0depends={depends}\0retpoline=Y\0"),
            )
            .unwrap();
        };
        for name in MODULES {
            module(&format!("{name}.ko"), "");
        }
        module("rdma_rxe.ko", "ib_uverbs,ib-core");
        module("ib_uverbs.ko", "ib_core");
        module("ib_core.ko", "");
        let names: Vec<String> = modules(dir.path()).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names[names.len() - 3..], ["ib_core", "ib_uverbs", "rdma_rxe"]);
        std::fs::remove_file(dir.path().join("ib_core.ko")).unwrap();
        assert!(modules(dir.path()).unwrap_err().to_string().contains("`ib_core`"));
    }
}
