//! Ranks that meet at a port where they have met before.
//!
//! Rank 0 ends its server once the others have left. A rank that has left, and meets again at the
//! same port, may be faster than rank 0. Such a rank would find its own number taken, so it waits
//! for the next server.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::{Duration, Instant};

use super::{LINGER, Member, agree_on_size};
use crate::error::Result;
use crate::lock::lock;
use crate::secret::{hex, random};
use crate::{PrefixStore, Store, TcpStore, TcpStoreOptions};

/// The key of a server's number, which the first client draws.
const SERVER_KEY: &str = "server";

/// A port of a host, and a rank that met there.
type Place = (String, u16, u32);

/// The server's number and the store of each rank of this process that met at a server of rank 0.
type Visits = HashMap<Place, (Vec<u8>, Weak<PrefixStore>)>;

static VISITS: LazyLock<Mutex<Visits>> = LazyLock::new(Mutex::default);

/// Connects to the server that rank 0 starts at `port` of `host`, for its keys behind `prefix`. A
/// server that this rank has left is not taken for [`LINGER`]; rank 0 is about to end it.
pub(super) fn connect(
    host: &str,
    port: u16,
    member: &Member,
    prefix: String,
    options: &TcpStoreOptions,
) -> Result<Arc<dyn Store>> {
    let (start, place) = (Instant::now(), (host.to_owned(), port, member.rank));
    loop {
        let left =
            TcpStoreOptions { timeout: options.timeout.saturating_sub(start.elapsed()), ..options.clone() };
        let mut store = TcpStore::connect_with(host, port, &left)?;
        store.set_timeout(options.timeout);
        let server = format!("{prefix}/{SERVER_KEY}");
        let number = store.compare_set(&server, b"", hex(&random::<16>()?).as_bytes());
        let waits = start.elapsed() < LINGER.min(options.timeout);
        match number {
            Ok(number) if waits && has_left(&place, &number) => {}
            // The server has ended in between.
            Err(_) if waits => {}
            number => {
                // A server of PyTorch may wait for as many to join.
                store.join()?;
                let store = Arc::new(PrefixStore::new(prefix, Arc::new(store)));
                // A rank that fails here has not met.
                agree_on_size(&*store, member)?;
                lock(&VISITS).insert(place, (number?, Arc::downgrade(&store)));
                return Ok(store);
            }
        }
        drop(store);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// True where the rank met at the server of this number and has dropped its store.
fn has_left(place: &Place, number: &[u8]) -> bool {
    let visits = lock(&VISITS);
    visits.get(place).is_some_and(|(server, store)| server == number && store.strong_count() == 0)
}
