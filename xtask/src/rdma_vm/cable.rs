//! The virtual cable: an Ethernet switch between the VMs, made of Unix datagram sockets.
//!
//! No privilege, no network namespace and no port of the machine is needed, and a VM that ends
//! leaves the others alone.

use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

/// Room for the largest frame.
const FRAME: usize = 64 << 10;
/// How long the switch waits for a VM that does not read its frames before one is lost. Long,
/// because the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(5);

/// The first five bytes of every VM's hardware address; the last is its number, from 1.
const MAC_PREFIX: [u8; 5] = [0x52, 0x54, 0x00, 0x77, 0x00];

/// A switch with one port per VM. Its threads live as long as the process.
pub struct Cable {
    dir: PathBuf,
    lost: Arc<AtomicU64>,
}

impl Cable {
    /// A switch with `ports` ports; its sockets are in `dir`.
    pub fn new(dir: &Path, ports: usize) -> Result<Cable> {
        let mut sockets = Vec::new();
        for port in 0..ports {
            let path = switch_side(dir, port);
            let socket =
                UnixDatagram::bind(&path).with_context(|| format!("cannot bind {}", path.display()))?;
            socket.set_write_timeout(Some(PATIENCE))?;
            sockets.push((socket, guest_side(dir, port)));
        }
        let ends = Arc::new(sockets);
        let lost = Arc::new(AtomicU64::new(0));
        for port in 0..ports {
            let (ends, lost) = (ends.clone(), lost.clone());
            let name = format!("port {port}");
            std::thread::Builder::new().name(name).spawn(move || forward(port, &ends, &lost))?;
        }
        Ok(Cable { dir: dir.to_owned(), lost })
    }

    /// Frames to a running VM that did not read them in time.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// QEMU's arguments for the network card at a port.
    pub fn arguments(&self, port: usize) -> Vec<String> {
        let (local, remote) = (guest_side(&self.dir, port), switch_side(&self.dir, port));
        let mac = mac(port).map(|byte| format!("{byte:02x}")).join(":");
        vec![
            "-netdev".into(),
            format!(
                "dgram,id=wire,local.type=unix,local.path={},remote.type=unix,remote.path={}",
                local.display(),
                remote.display()
            ),
            "-device".into(),
            // With event_idx, QEMU's default, the emulated card sometimes misses a notification and
            // then hangs.
            format!("virtio-net-pci,netdev=wire,romfile=,event_idx=off,mac={mac}"),
        ]
    }
}

fn mac(port: usize) -> [u8; 6] {
    let [a, b, c, d, e] = MAC_PREFIX;
    [a, b, c, d, e, port as u8 + 1]
}

fn guest_side(dir: &Path, port: usize) -> PathBuf {
    dir.join(format!("vm{port}"))
}

fn switch_side(dir: &Path, port: usize) -> PathBuf {
    dir.join(format!("port{port}"))
}

/// Forwards every frame of a port to its destination VM, or to all others, through the VM's own
/// port.
fn forward(port: usize, ends: &[(UnixDatagram, PathBuf)], lost: &AtomicU64) {
    let mut frame = vec![0; FRAME];
    loop {
        let bytes = match ends[port].0.recv(&mut frame) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => return,
        };
        let frame = &frame[..bytes];
        let only = (0..ends.len()).find(|guest| frame.starts_with(&mac(*guest)));
        for (guest, (socket, path)) in ends.iter().enumerate() {
            if guest != port && only.is_none_or(|only| only == guest) {
                // A VM that is not there, or does not read, loses the frame, as on any cable.
                if let Err(error) = socket.send_to(frame, path)
                    && !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
                {
                    lost.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_go_to_whom_they_are_for_and_the_dead_lose_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let cable = Cable::new(dir.path(), 3).unwrap();
        let guest = |port| {
            let socket = UnixDatagram::bind(guest_side(dir.path(), port)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            socket.connect(switch_side(dir.path(), port)).unwrap();
            socket
        };
        let (first, second) = (guest(0), guest(1));
        let mut buffer = [0; 64];
        // The third is not there.
        first.send(&[&mac(2)[..], b"lost"].concat()).unwrap();
        first.send(&[&[0xff; 6][..], b"all"].concat()).unwrap();
        first.send(&[&mac(1)[..], b"you"].concat()).unwrap();
        for text in [b"all", b"you"] {
            let bytes = second.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[6..bytes], text);
        }
        second.send(&[&mac(0)[..], b"back"].concat()).unwrap();
        let bytes = first.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[6..bytes], b"back");
        assert_eq!(cable.lost(), 0);
        assert!(cable.arguments(2)[3].ends_with("event_idx=off,mac=52:54:00:77:00:03"));
    }
}
