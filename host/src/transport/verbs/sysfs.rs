//! Facts about RDMA devices from sysfs: GIDs with their types, and where a device sits on the PCI
//! tree.

use std::fs::read_to_string;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

/// How a GID is put on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidType {
    /// InfiniBand, which routes by LID.
    InfiniBand,
    /// RoCE v1: an Ethernet frame, not routed.
    RoceV1,
    /// RoCE v2: UDP, routed as any IP packet.
    RoceV2,
}

impl std::fmt::Display for GidType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            GidType::InfiniBand => "InfiniBand",
            GidType::RoceV1 => "RoCE v1",
            GidType::RoceV2 => "RoCE v2",
        })
    }
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gid {
    /// Its index.
    pub index: u32,
    /// The address.
    pub address: Ipv6Addr,
    /// How it is put on the wire.
    pub kind: GidType,
    /// Its network interface; none for InfiniBand.
    pub interface: Option<String>,
}

impl std::fmt::Display for Gid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GID {} = {} {}", self.index, self.kind, self.address)?;
        self.interface.iter().try_for_each(|interface| write!(f, " of {interface}"))
    }
}

/// A sysfs tree; a test has its own.
#[derive(Debug, Clone)]
pub struct Sysfs {
    root: PathBuf,
}

impl Sysfs {
    /// This machine's.
    pub fn new() -> Sysfs {
        Sysfs { root: "/sys".into() }
    }

    /// A recorded one.
    #[cfg(test)]
    pub fn at(root: &Path) -> Sysfs {
        Sysfs { root: root.into() }
    }

    /// The used entries of a port's GID table, by index. An entry that cannot be read is not used.
    pub fn gids(&self, device: &str, port: u8, infiniband: bool) -> Vec<Gid> {
        let dir = self.device(device).join(format!("ports/{port}"));
        let entries = std::fs::read_dir(dir.join("gids")).into_iter().flatten();
        let gid = |index: u32| {
            let text = |place: &str| read_to_string(dir.join(format!("{place}/{index}"))).ok();
            let address: Ipv6Addr = text("gids")?.trim().parse().ok()?;
            if address.is_unspecified() {
                return None;
            }
            let kind = match text("gid_attrs/types")?.trim() {
                "RoCE v2" => GidType::RoceV2,
                // The kernel has one name for both.
                "IB/RoCE v1" if infiniband => GidType::InfiniBand,
                "IB/RoCE v1" => GidType::RoceV1,
                _ => return None,
            };
            let interface = text("gid_attrs/ndevs").map(|name| name.trim().to_owned());
            Some(Gid { index, address, kind, interface: interface.filter(|name| !name.is_empty()) })
        };
        let mut gids: Vec<Gid> =
            entries.filter_map(|entry| gid(entry.ok()?.file_name().to_str()?.parse().ok()?)).collect();
        gids.sort_by_key(|gid| gid.index);
        gids
    }

    /// The distance of a device from a GPU, only for comparison; `None` if sysfs has no path.
    pub fn distance(&self, device: &str, gpu_pci_bus_id: &str) -> Option<u32> {
        if gpu_pci_bus_id.is_empty() {
            return None;
        }
        let gpu = self.root.join("bus/pci/devices").join(gpu_pci_bus_id.to_ascii_lowercase());
        let (gpu, card) = (gpu.canonicalize().ok()?, self.device(device).join("device").canonicalize().ok()?);
        let common = gpu.components().zip(card.components()).take_while(|(a, b)| a == b).count();
        let hops = (gpu.components().count() + card.components().count() - 2 * common) as u32;
        // Below one host bridge (`/sys/devices/pci0000:00`) the way does not touch the processor;
        // else sockets count.
        let host_bridge = self.root.canonicalize().ok()?.components().count() + 2;
        let node = |path: &Path| {
            read_to_string(path.join("numa_node")).ok()?.trim().parse().ok().filter(|node: &i32| *node >= 0)
        };
        Some(match (node(&gpu), node(&card)) {
            _ if common >= host_bridge => hops,
            (Some(a), Some(b)) if a != b => hops + 2 * FAR,
            _ => hops + FAR,
        })
    }

    /// The number of a GPU among NVIDIA's of this host, in the order of their PCI addresses; `None`
    /// if sysfs does not have it. Every process counts alike, whichever GPUs it sees.
    fn gpu_number(&self, gpu_pci_bus_id: &str) -> Option<usize> {
        let devices = self.root.join("bus/pci/devices");
        let names = std::fs::read_dir(&devices).ok()?;
        let names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let has = |name: &str, file: &str, start: &str| {
            read_to_string(devices.join(name).join(file)).is_ok_and(|text| text.starts_with(start))
        };
        // Display controllers.
        let is_gpu = |name: &String| has(name, "vendor", "0x10de") && has(name, "class", "0x03");
        let mut gpus: Vec<String> = names.filter(is_gpu).collect();
        gpus.sort_unstable();
        gpus.iter().position(|name| *name == gpu_pci_bus_id.to_ascii_lowercase())
    }

    fn device(&self, name: &str) -> PathBuf {
        self.root.join("class/infiniband").join(name)
    }
}

/// More than any number of PCI switches.
const FAR: u32 = 1000;

/// The GID to use: the user's choice, else the RoCE v2 address that routes furthest, or the first
/// of InfiniBand.
pub fn choose_gid(gids: &[Gid], index: Option<u32>) -> Result<&Gid, String> {
    let have = || {
        let list: Vec<String> = gids.iter().map(Gid::to_string).collect();
        if list.is_empty() { "none".to_owned() } else { list.join(", ") }
    };
    if let Some(index) = index {
        let chosen = gids.iter().find(|gid| gid.index == index);
        return chosen
            .ok_or_else(|| format!("EPOXIDE_RDMA_GID_INDEX = {index} is not in use; there are: {}", have()));
    }
    let preference = |gid: &Gid| match gid.kind {
        GidType::InfiniBand => Some(0),
        GidType::RoceV2 if gid.address.to_ipv4_mapped().is_some() => Some(1),
        GidType::RoceV2 if !gid.address.is_unicast_link_local() => Some(2),
        GidType::RoceV2 => Some(3),
        GidType::RoceV1 => None,
    };
    let usable = gids.iter().filter_map(|gid| Some((preference(gid)?, gid)));
    usable.min_by_key(|(preference, gid)| (*preference, gid.index)).map(|(_, gid)| gid).ok_or_else(|| {
        format!(
            "no RoCE v2 GID (there are: {}); give the interface an IP address and set it up, or choose a RoCE v1 entry \
             with EPOXIDE_RDMA_GID_INDEX",
            have()
        )
    })
}

/// Selects among several devices the one for a GPU: the nearest by PCI. Those equally near are
/// dealt out by the GPU's number on its host, or by its `ordinal` in this process if sysfs does not
/// have it.
pub fn nearest<'a>(
    sysfs: &Sysfs,
    devices: &[&'a str],
    gpu_pci_bus_id: &str,
    ordinal: u32,
) -> Option<&'a str> {
    let distance = |device: &str| sysfs.distance(device, gpu_pci_bus_id).unwrap_or(u32::MAX);
    let least = devices.iter().map(|device| distance(device)).min()?;
    let mut near: Vec<&str> = devices.iter().copied().filter(|device| distance(device) == least).collect();
    near.sort_unstable();
    let number = sysfs.gpu_number(gpu_pci_bus_id).unwrap_or(ordinal as usize);
    near.get(number % near.len()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes files and links of a sysfs tree.
    fn record(root: &Path, files: &[(&str, &str)], links: &[(&str, &str)]) {
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        for (path, target) in links {
            let (path, target) = (root.join(path), root.join(target));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::create_dir_all(&target).unwrap();
            std::os::unix::fs::symlink(target, path).unwrap();
        }
    }

    fn gid(index: u32, kind: GidType, address: &str) -> Gid {
        Gid { index, address: address.parse().unwrap(), kind, interface: None }
    }

    #[test]
    fn reads_the_table_of_a_port() {
        let dir = tempfile::tempdir().unwrap();
        let port = "class/infiniband/mlx5_0/ports/1";
        let entry = |index: u32, address: &str, kind: &str, interface: &str| {
            let file = |place: &str, text: &str| {
                record(dir.path(), &[(&format!("{port}/{place}/{index}"), &format!("{text}\n"))], &[]);
            };
            file("gids", address);
            file("gid_attrs/types", kind);
            file("gid_attrs/ndevs", interface);
        };
        entry(0, "fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1", "eth0");
        entry(3, "0000:0000:0000:0000:0000:ffff:c0a8:4d01", "RoCE v2", "eth0");
        entry(4, "0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2", "eth0");
        entry(10, "not an address", "RoCE v2", "eth0");
        let sysfs = Sysfs::at(dir.path());
        let gids = sysfs.gids("mlx5_0", 1, false);
        assert_eq!(
            gids.iter().map(|gid| (gid.index, gid.kind)).collect::<Vec<_>>(),
            [(0, GidType::RoceV1), (3, GidType::RoceV2)]
        );
        assert_eq!(gids[1].to_string(), "GID 3 = RoCE v2 ::ffff:192.168.77.1 of eth0");
        assert_eq!(sysfs.gids("mlx5_0", 1, true)[0].kind, GidType::InfiniBand);
        assert_eq!(sysfs.gids("mlx5_1", 1, false), []);
    }

    #[test]
    fn prefers_the_address_that_routes_and_obeys_the_user() {
        let table = [
            gid(0, GidType::RoceV1, "fe80::1"),
            gid(1, GidType::RoceV2, "fe80::1"),
            gid(2, GidType::RoceV1, "::ffff:10.0.0.1"),
            gid(5, GidType::RoceV2, "::ffff:10.0.0.1"),
            gid(7, GidType::RoceV2, "2001:db8::1"),
        ];
        assert_eq!(choose_gid(&table, None).unwrap().index, 5);
        assert_eq!(choose_gid(&table[..3], None).unwrap().index, 1);
        assert_eq!(choose_gid(&table, Some(2)).unwrap().index, 2);
        let error = choose_gid(&table, Some(3)).unwrap_err();
        assert!(error.contains("GID_INDEX = 3") && error.contains("GID 5 = RoCE v2"), "{error}");
        let error = choose_gid(&table[..1], None).unwrap_err();
        assert!(error.contains("no RoCE v2 GID") && error.contains("GID 0"), "{error}");
        assert!(choose_gid(&[], None).unwrap_err().contains("none"));
        assert_eq!(choose_gid(&[gid(0, GidType::InfiniBand, "fe80::1")], None).unwrap().index, 0);
    }

    /// A host with two sockets; on the first, two GPUs with a card each below a switch of their
    /// own, and one card elsewhere.
    #[test]
    fn finds_the_nearest_device() {
        let dir = tempfile::tempdir().unwrap();
        let gpu = |n: u32| format!("devices/pci0000:00/0000:00:0{n}.0/0000:0{n}:00.0/0000:0{n}:01.0");
        let card = |n: u32| format!("devices/pci0000:00/0000:00:0{n}.0/0000:0{n}:00.0/0000:0{n}:02.0");
        let near_cpu = "devices/pci0000:40/0000:40:01.0/0000:41:00.0";
        let far = "devices/pci0000:80/0000:80:01.0/0000:81:00.0";
        record(
            dir.path(),
            &[
                (&format!("{}/numa_node", gpu(1)), "0\n"),
                (&format!("{}/numa_node", card(1)), "0\n"),
                (&format!("{near_cpu}/numa_node"), "0\n"),
                (&format!("{far}/numa_node"), "1\n"),
            ],
            &[
                ("bus/pci/devices/0000:0a:01.0", &gpu(1)),
                ("bus/pci/devices/0000:0b:01.0", &gpu(2)),
                ("class/infiniband/mlx5_0/device", far),
                ("class/infiniband/mlx5_1/device", near_cpu),
                ("class/infiniband/mlx5_2/device", &card(2)),
                ("class/infiniband/mlx5_3/device", &card(1)),
            ],
        );
        let sysfs = Sysfs::at(dir.path());
        let all = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"];
        assert_eq!(nearest(&sysfs, &all, "0000:0A:01.0", 0), Some("mlx5_3"));
        assert_eq!(nearest(&sysfs, &all, "0000:0B:01.0", 1), Some("mlx5_2"));
        assert_eq!(nearest(&sysfs, &all[..3], "0000:0A:01.0", 0), Some("mlx5_2"));
        assert_eq!(nearest(&sysfs, &all[..2], "0000:0A:01.0", 0), Some("mlx5_1"));
        // A GPU on no PCI tree gets a device by its number, and so does a GPU without an entry in
        // sysfs.
        assert_eq!(nearest(&sysfs, &all, "", 6), Some("mlx5_2"));
        assert_eq!(nearest(&sysfs, &all, "0000:ff:00.0", 1), Some("mlx5_1"));
        assert_eq!(nearest(&sysfs, &[], "", 0), None);
    }

    /// In a process that sees one GPU, that is number 0.
    #[test]
    fn gpus_equally_near_to_two_devices_get_one_each() {
        let dir = tempfile::tempdir().unwrap();
        let device = |n: u32| format!("devices/pci0000:00/0000:00:0{n}.0");
        // A switch is in front of the GPUs, and a sound device of a GPU between them.
        let classes = [(1, "0x068000\n"), (2, "0x030200\n"), (3, "0x040300\n"), (4, "0x030200\n")];
        for (n, class) in classes {
            let files =
                [(format!("{}/class", device(n)), class), (format!("{}/vendor", device(n)), "0x10de\n")];
            record(dir.path(), &files.each_ref().map(|(path, text)| (path.as_str(), *text)), &[]);
            record(dir.path(), &[], &[(&format!("bus/pci/devices/0000:00:0{n}.0"), &device(n))]);
        }
        let cards = [(0, device(8)), (1, device(9))];
        for (n, card) in &cards {
            record(dir.path(), &[], &[(&format!("class/infiniband/mlx5_{n}/device"), card)]);
        }
        let sysfs = Sysfs::at(dir.path());
        let all = ["mlx5_0", "mlx5_1"];
        assert_eq!(nearest(&sysfs, &all, "0000:00:02.0", 0), Some("mlx5_0"));
        assert_eq!(nearest(&sysfs, &all, "0000:00:04.0", 0), Some("mlx5_1"));
    }
}
