//! Joining the group that the environment names.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::{FileStore, StoreGroup};
use crate::error::{Error, Result};

/// Variable with this process's rank, `0..WORLD_SIZE`.
pub const RANK: &str = "RANK";
/// Variable with the number of ranks.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Variable with the store's address: `file:///absolute/path` of a directory that is fresh for each run.
pub const STORE: &str = "EPOXIDE_STORE";

/// Joins the group that [`RANK`], [`WORLD_SIZE`] and [`STORE`] name. Collectives wait up to `timeout`.
pub fn rendezvous(timeout: Duration) -> Result<StoreGroup> {
    rendezvous_from(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()), timeout)
}

fn rendezvous_from(variable: impl Fn(&str) -> Option<String>, timeout: Duration) -> Result<StoreGroup> {
    let size = number(&variable, WORLD_SIZE)?;
    if size == 0 {
        return Err(Error::argument(WORLD_SIZE, size, "a group has at least one rank"));
    }
    let rank = number(&variable, RANK)?;
    if rank >= size {
        return Err(Error::argument(RANK, rank, format!("must be below {WORLD_SIZE}, which is {size}")));
    }
    let address = required(&variable, STORE, "the store's address, such as file:///tmp/run1")?;
    let store = FileStore::new(store_path(&address)?)?;
    StoreGroup::new(Arc::new(store), rank, size, "world", timeout)
}

fn store_path(address: &str) -> Result<PathBuf> {
    let path = address.strip_prefix("file://").map(Path::new).filter(|path| path.is_absolute());
    path.map(Path::to_owned).ok_or_else(|| {
        Error::argument(
            STORE,
            address,
            "only file:// with an absolute path is known, such as file:///tmp/run1",
        )
    })
}

fn number(variable: &impl Fn(&str) -> Option<String>, name: &'static str) -> Result<u32> {
    let text = required(variable, name, "a whole number")?;
    text.trim().parse().map_err(|_| Error::argument(name, text, "must be a whole number"))
}

fn required(
    variable: &impl Fn(&str) -> Option<String>,
    name: &'static str,
    what: &'static str,
) -> Result<String> {
    variable(name).filter(|value| !value.is_empty()).ok_or_else(|| {
        Error::argument(name, "unset", format!("the environment must hold {what}; `epoxide launch` sets it"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::ProcessGroup;

    fn join(variables: &[(&str, &str)]) -> Result<StoreGroup> {
        let lookup =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        rendezvous_from(lookup, Duration::from_secs(1))
    }

    #[test]
    fn joins() {
        let directory = tempfile::tempdir().unwrap();
        let store = format!("file://{}", directory.path().display());
        let group = join(&[(RANK, "0"), (WORLD_SIZE, "1"), (STORE, &store)]).unwrap();
        assert_eq!((group.rank(), group.size()), (0, 1));
    }

    #[test]
    fn errors_name_the_variable() {
        let cases: [(&[(&str, &str)], &str); 7] = [
            (&[], WORLD_SIZE),
            (&[(WORLD_SIZE, "2")], RANK),
            (&[(WORLD_SIZE, "two"), (RANK, "0")], WORLD_SIZE),
            (&[(WORLD_SIZE, "0"), (RANK, "0")], WORLD_SIZE),
            (&[(WORLD_SIZE, "2"), (RANK, "2")], RANK),
            (&[(WORLD_SIZE, "2"), (RANK, "1")], STORE),
            (&[(WORLD_SIZE, "2"), (RANK, "1"), (STORE, "tcp://host:1")], STORE),
        ];
        for (variables, name) in cases {
            let error = join(variables).unwrap_err();
            assert!(matches!(&error, Error::Argument { argument, .. } if *argument == name), "{error}");
        }
    }
}
