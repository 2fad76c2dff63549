//! How a communicator works.

use std::ffi::{CString, c_int};
use std::time::Duration;

use super::ffi::RawConfig;
use super::library::Library;
use crate::error::{Error, Result};

/// A thread that watches a communicator: see [`Config::watchdog`].
///
/// When an operation passes its deadline, or NCCL reports an error, the watchdog dumps the state of
/// the flight recorder and of NCCL to [`DEBUG_INFO_FILE`](super::DEBUG_INFO_FILE). Then it aborts
/// the communicator. If [`DEBUG_INFO_PIPE`](super::DEBUG_INFO_PIPE) names a pipe, a write to the
/// pipe requests a dump at any time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watchdog {
    /// How often it polls.
    pub interval: Duration,
}

impl Default for Watchdog {
    /// Ten times a second.
    fn default() -> Watchdog {
        Watchdog { interval: Duration::from_millis(100) }
    }
}

/// Configuration of a [`Communicator`](super::Communicator). A field that is `None` is left to
/// NCCL.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its name: in errors, in the flight recorder, and in NCCL's log (2.27).
    pub name: String,
    /// How long creation, an operation, a split or `finalize` may take. An operation that takes
    /// longer is ended by a call of its [`Work`](epoxide_group::Work), or by the watchdog.
    pub timeout: Duration,
    /// Time that `abort` waits for NCCL to release the communicator, and that a drop waits for
    /// operations before that. An abort that takes longer continues on a leaked thread.
    pub close_timeout: Duration,
    /// Whether calls of NCCL block until NCCL is done. By default they do not, and their progress
    /// is polled until the deadline. A call that blocks ends by NCCL's own rules, or by `abort`
    /// from another thread.
    pub blocking: bool,
    /// Fewest blocks (CTAs) of a kernel (2.17).
    pub min_ctas: Option<u32>,
    /// Most blocks of a kernel (2.17).
    pub max_ctas: Option<u32>,
    /// Blocks of a cluster (2.17).
    pub cga_cluster_size: Option<u32>,
    /// The network to use, by NCCL's name for it (2.17).
    pub net_name: Option<String>,
    /// Whether communicators that are split from this one share its resources (2.18).
    pub split_share: Option<bool>,
    /// Aborts the communicator by itself on a missed deadline or an error.
    pub watchdog: Option<Watchdog>,
    /// How many operations the flight recorder keeps.
    pub recorded: usize,
}

impl Default for Config {
    /// `nccl`, 5 minutes, 10 seconds to close, calls that do not block, no watchdog, 1024
    /// operations recorded; the rest NCCL's choice.
    fn default() -> Config {
        Config {
            name: "nccl".into(),
            timeout: Duration::from_secs(300),
            close_timeout: Duration::from_secs(10),
            blocking: false,
            min_ctas: None,
            max_ctas: None,
            cga_cluster_size: None,
            net_name: None,
            split_share: None,
            watchdog: None,
            recorded: 1024,
        }
    }
}

impl Config {
    /// The default one under a name.
    pub fn named(name: impl Into<String>) -> Config {
        Config { name: name.into(), ..Config::default() }
    }

    /// An error that names the fields which this library does not support, so that no requested
    /// field is silently left out.
    pub(super) fn check(&self, library: &Library) -> Result<()> {
        let asked = [
            ("min_ctas", self.min_ctas.is_some(), 21700, "2.17"),
            ("max_ctas", self.max_ctas.is_some(), 21700, "2.17"),
            ("cga_cluster_size", self.cga_cluster_size.is_some(), 21700, "2.17"),
            ("net_name", self.net_name.is_some(), 21700, "2.17"),
            ("split_share", self.split_share.is_some(), 21800, "2.18"),
        ];
        for (what, asked, version, since) in asked {
            if asked && library.version() < version {
                let reason =
                    format!("NCCL {} does not know it; it came with {since}", library.version_text());
                return Err(Error::Unavailable { what: what.to_owned(), reason });
            }
        }
        let most = |argument, value: Option<u32>| match value {
            Some(value) if value == 0 || value > c_int::MAX as u32 => {
                Err(Error::argument(argument, value, "1 or more, or None for NCCL's choice"))
            }
            _ => Ok(()),
        };
        most("min_ctas", self.min_ctas)?;
        most("max_ctas", self.max_ctas)?;
        most("cga_cluster_size", self.cga_cluster_size)?;
        if let (Some(min), Some(max)) = (self.min_ctas, self.max_ctas)
            && min > max
        {
            return Err(Error::argument("min_ctas", min, format!("at most max_ctas, {max}")));
        }
        Ok(())
    }
}

/// A configuration as NCCL takes it, with the texts that it points to.
pub(super) struct Prepared {
    pub raw: RawConfig,
    _texts: [Option<CString>; 2],
}

// SAFETY: the pointers in it are to its own texts, which do not change.
unsafe impl Send for Prepared {}

impl Prepared {
    pub fn new(config: &Config, library: &Library) -> Result<Prepared> {
        config.check(library)?;
        let text = |argument, text: &str| {
            CString::new(text)
                .map_err(|_| Error::argument(argument, format!("{text:?}"), "must not hold a NUL"))
        };
        let name = text("name", &config.name)?;
        let net_name = config.net_name.as_deref().map(|name| text("net_name", name)).transpose()?;
        let mut raw = RawConfig::new(library.version());
        raw.blocking = c_int::from(config.blocking);
        let set = |field: &mut c_int, value: Option<u32>| {
            if let Some(value) = value {
                *field = value as c_int;
            }
        };
        set(&mut raw.min_ctas, config.min_ctas);
        set(&mut raw.max_ctas, config.max_ctas);
        set(&mut raw.cga_cluster_size, config.cga_cluster_size);
        set(&mut raw.split_share, config.split_share.map(u32::from));
        raw.comm_name = name.as_ptr();
        if let Some(net_name) = &net_name {
            raw.net_name = net_name.as_ptr();
        }
        Ok(Prepared { raw, _texts: [Some(name), net_name] })
    }
}
