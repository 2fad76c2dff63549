//! Hosts with other networks than this one: each is a network name space, where the system lets
//! this process have one.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use epoxide::group::{HashStore, MeshGroup, MeshOptions, ProcessGroup, Sockets, Store, TcpStore};

use super::harness::{PATIENCE, options, threads};

/// Makes a test the process in the name space.
const INSIDE: &str = "EPOXIDE_TEST_NETWORK";

/// Makes tests of networks that this machine lacks fail.
const REQUIRE: &str = "EPOXIDE_REQUIRE_NETWORKS";

/// Notes that a test is skipped.
///
/// # Panics
/// With [`REQUIRE`].
pub fn skip(why: &str) {
    assert!(!std::env::var(REQUIRE).is_ok_and(|value| value == "1"), "{REQUIRE}=1, but {why}");
    eprintln!("skipped: {why}");
}

/// True in a process in a name space of its own, after these commands. The caller of that process
/// only checks that it ends well.
fn inside(test: &str, commands: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let try_out = Command::new("unshare").args(["-n", "ip", "link"]).output();
    if !try_out.as_ref().is_ok_and(|output| output.status.success()) {
        skip(&format!("this process may have no network name space, or there is no `ip`: {try_out:?}"));
        return false;
    }
    let exe = std::env::current_exe().unwrap();
    let script = format!("{commands}\nexec \"$@\"");
    let arguments = ["-n", "sh", "-ec", &script, "sh", exe.to_str().unwrap(), "--exact", test, "--nocapture"];
    let output = Command::new("unshare").args(arguments).env(INSIDE, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

/// The network address that rank 0 of a group announces.
fn announced(options: &MeshOptions) -> epoxide::Result<std::net::SocketAddr> {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let _group = MeshGroup::new(store.clone(), 0, 2, "g", options.clone())?;
    let address = store.get("g/mesh/0", Duration::ZERO)?;
    let address: serde_json::Value = serde_json::from_slice(&address).unwrap();
    Ok(address["tcp"].as_str().unwrap().parse().unwrap())
}

#[test]
fn hosts_without_ipv4() {
    let six = "ip link set lo up; ip addr del 127.0.0.1/8 dev lo; ip link add six0 type veth peer name six1
        ip link set six1 up; ip addr add 2001:db8:1::5/64 dev six0 nodad; ip link set six0 up
        ip -6 route add default dev six0";
    if !inside("groups::networks::hosts_without_ipv4", six) {
        return;
    }
    let tcp = MeshOptions { sockets: Sockets::Tcp, ..options(PATIENCE) };
    assert_eq!(announced(&tcp).unwrap().ip().to_string(), "2001:db8:1::5");
    let named = MeshOptions { interface: Some("six0".to_owned()), ..tcp.clone() };
    assert_eq!(announced(&named).unwrap().ip().to_string(), "2001:db8:1::5");
    let link = MeshOptions { interface: Some("six1".to_owned()), ..tcp.clone() };
    let error = announced(&link).unwrap_err().to_string();
    assert!(error.contains("six1") && error.contains("give its name or its address"), "{error}");
    threads(3, tcp, |group| {
        assert_eq!(group.all_gather(&[group.rank() as u8]).unwrap(), [[0], [1], [2]]);
        group.destroy().unwrap();
    });
    let host = TcpStore::host(0, PATIENCE, Duration::ZERO).unwrap();
    host.set("k", b"v").unwrap();
    let store = TcpStore::connect("2001:db8:1::5", host.port(), PATIENCE).unwrap();
    assert_eq!(store.get("k", PATIENCE).unwrap(), b"v");
}

#[test]
fn hosts_that_disable_ipv6() {
    let four = "ip link set lo up; echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6";
    if !inside("groups::networks::hosts_that_disable_ipv6", four) {
        return;
    }
    let host = TcpStore::host(0, PATIENCE, Duration::ZERO).unwrap();
    host.set("k", b"v").unwrap();
    let store = TcpStore::connect("127.0.0.1", host.port(), PATIENCE).unwrap();
    assert_eq!(store.get("k", PATIENCE).unwrap(), b"v");
}

#[test]
fn hosts_whose_ipv6_sockets_take_no_ipv4_by_default() {
    let six_only = "ip link set lo up; echo 1 > /proc/sys/net/ipv6/bindv6only";
    if !inside("groups::networks::hosts_whose_ipv6_sockets_take_no_ipv4_by_default", six_only) {
        return;
    }
    let host = TcpStore::host(0, PATIENCE, Duration::ZERO).unwrap();
    let store = TcpStore::connect("127.0.0.1", host.port(), PATIENCE).unwrap();
    store.set("k", b"v").unwrap();
    assert_eq!(host.get("k", PATIENCE).unwrap(), b"v");
}

#[test]
fn hosts_without_a_way_out() {
    // An address, and no route beyond its network.
    let alone = "ip link set lo up; ip link add far0 type veth peer name far1; ip link set far1 up
        ip addr add 10.7.0.5/24 dev far0; ip link set far0 up";
    if !inside("groups::networks::hosts_without_a_way_out", alone) {
        return;
    }
    let tcp = MeshOptions { sockets: Sockets::Tcp, ..options(PATIENCE) };
    assert_eq!(announced(&tcp).unwrap().ip().to_string(), "10.7.0.5");
}
