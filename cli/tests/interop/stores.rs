//! The store protocol, both ways round.

use epoxide::group::{Store, TcpStore};
use epoxide::internal::group::TcpStoreServer;

use crate::scenario::{PATIENCE, play};
use crate::tools::{Running, python, scenario};

pub fn our_clients_at_pytorchs_server() {
    let python = python();
    const SIZE: u32 = 5;
    let mut server = Running::start(scenario(&python, "server", "127.0.0.1", 0, 0, SIZE));
    let port: u16 = server.announced("port ").parse().unwrap();
    server.listen();
    std::thread::scope(|scope| {
        for rank in 1..SIZE {
            scope.spawn(move || {
                let store = TcpStore::connect("127.0.0.1", port, PATIENCE).unwrap();
                play(&store, rank, SIZE);
            });
        }
    });
    let output = server.succeed();
    assert!(output.contains("rank 0 is done"), "{output}");
}

pub fn our_error_when_pytorchs_server_ends() {
    let python = python();
    let mut server = Running::start(scenario(&python, "server", "127.0.0.1", 0, 0, 2));
    let port: u16 = server.announced("port ").parse().unwrap();
    let mut store = TcpStore::connect("127.0.0.1", port, PATIENCE).unwrap();
    std::thread::scope(|scope| {
        let wait = scope.spawn(|| store.get("never", PATIENCE));
        std::thread::sleep(std::time::Duration::from_millis(200));
        // Kills it.
        drop(server);
        let error = wait.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("closed the connection"), "{error}");
    });
    store.set_timeout(std::time::Duration::from_secs(1));
    let error = store.set("k", b"").unwrap_err().to_string();
    assert!(error.contains("closed the connection") || error.contains("no store server"), "{error}");
}

pub fn pytorchs_clients_at_our_server() {
    let python = python();
    const SIZE: u32 = 4;
    let store = TcpStore::host(0, PATIENCE, PATIENCE).unwrap();
    let clients: Vec<_> = (1..SIZE)
        .map(|rank| {
            let mut client =
                Running::start(scenario(&python, "client", "localhost", store.port(), rank, SIZE));
            client.listen();
            client
        })
        .collect();
    // Loading PyTorch takes its time.
    let here = |count: i64| store.add("here", 0).unwrap() >= count;
    let start = std::time::Instant::now();
    while !here(i64::from(SIZE) - 1) && start.elapsed() < 2 * PATIENCE {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| play(&store, 0, SIZE)));
    for (rank, client) in (1..).zip(clients) {
        let output = client.succeed();
        assert!(output.contains(&format!("rank {rank} is done")), "{output}");
    }
    outcome.unwrap();
}

pub fn a_process_group_of_pytorchs_over_our_server() {
    let python = python();
    let server = TcpStoreServer::bind(("127.0.0.1", 0)).unwrap();
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            let mut rank = Running::start(scenario(&python, "gloo", "127.0.0.1", server.port(), rank, 3));
            rank.listen();
            rank
        })
        .collect();
    for rank in ranks {
        rank.succeed();
    }
}
