//! How the verbs transport is set up, from code or from the environment.

use std::str::FromStr;

use crate::error::{Error, Result};

/// How ranks are connected over verbs. [`VerbsOptions::from_env`] reads the variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerbsOptions {
    /// `EPOXIDE_RDMA_DEVICE`: the devices' names, such as `mlx5_0` or, with commas,
    /// `mlx5_0,mlx5_1`; as many on every rank. Queue q to a peer uses device q mod their number, at
    /// both ends, so that there are at least as many queues as devices. Low latency uses the first.
    /// Without it, the one nearest to the GPU.
    pub devices: Vec<String>,
    /// `EPOXIDE_RDMA_PORT`: the devices' port, from 1.
    pub port: u8,
    /// `EPOXIDE_RDMA_GID_INDEX`: the entry of the port's GID table. Without it, chosen by type and
    /// address.
    pub gid_index: Option<u32>,
    /// `EPOXIDE_RDMA_TRAFFIC_CLASS`: of the packets, 0 to 255; on RoCE v2 its upper six bits are
    /// the DSCP.
    pub traffic_class: u8,
    /// `EPOXIDE_RDMA_SERVICE_LEVEL`: 0 to 15; on RoCE the lower three bits are the priority.
    pub service_level: u8,
    /// `EPOXIDE_RDMA_RETRY_COUNT`: retransmissions of a packet that is not acknowledged, 0 to 7. On
    /// Soft-RoCE 7 means without end; the kernels' deadline then ends the wait.
    pub retry_count: u8,
    /// `EPOXIDE_RDMA_TIMEOUT`: how long a packet waits for its acknowledgement, 4.096 us * 2^n, n
    /// from 1 to 31, without back-off. If the last packets of a burst are lost, or the link
    /// recovers, one such wait passes before they are sent again. The connection fails after an
    /// outage of more than `retry_count + 1` waits.
    pub ack_timeout: u8,
    /// `EPOXIDE_RDMA_PATH_MTU`: bytes per packet: 256, 512, 1024, 2048 or 4096. Without it, the
    /// largest that both ports have.
    pub path_mtu: Option<u32>,
    /// `EPOXIDE_RDMA_QUEUE_DEPTH`: most writes in flight per queue, at least 4.
    pub queue_depth: u32,
}

impl Default for VerbsOptions {
    /// Packets wait half a second for their acknowledgement, and the connection fails after eight
    /// such waits (many cards wait up to four times as long). This outlasts a link outage of a few
    /// seconds, and a lost packet costs half a second.
    fn default() -> Self {
        VerbsOptions {
            devices: Vec::new(),
            port: 1,
            gid_index: None,
            traffic_class: 0,
            service_level: 0,
            retry_count: 7,
            ack_timeout: 17,
            path_mtu: None,
            queue_depth: 256,
        }
    }
}

impl VerbsOptions {
    /// The defaults, changed by the variables that are set.
    ///
    /// # Errors
    /// [`Error::Argument`] where a variable has no valid value.
    pub fn from_env() -> Result<VerbsOptions> {
        VerbsOptions::from_variables(&|name| std::env::var(name).ok())
    }

    fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Result<VerbsOptions> {
        fn number<T: FromStr>(
            variable: &dyn Fn(&str) -> Option<String>,
            name: &'static str,
            rule: &str,
        ) -> Result<Option<T>> {
            let Some(text) = variable(name).filter(|text| !text.trim().is_empty()) else { return Ok(None) };
            text.trim().parse().map(Some).map_err(|_| Error::argument(name, text, rule))
        }
        const SMALL: &str = "must be a number from 0 to 255";
        const NUMBER: &str = "must be a number";
        let default = VerbsOptions::default();
        let options = VerbsOptions {
            devices: variable("EPOXIDE_RDMA_DEVICE")
                .filter(|names| !names.trim().is_empty())
                .map(|names| names.split(',').map(|name| name.trim().to_owned()).collect())
                .unwrap_or_default(),
            port: number(variable, "EPOXIDE_RDMA_PORT", SMALL)?.unwrap_or(default.port),
            gid_index: number(variable, "EPOXIDE_RDMA_GID_INDEX", SMALL)?,
            traffic_class: number(variable, "EPOXIDE_RDMA_TRAFFIC_CLASS", SMALL)?
                .unwrap_or(default.traffic_class),
            service_level: number(variable, "EPOXIDE_RDMA_SERVICE_LEVEL", SMALL)?
                .unwrap_or(default.service_level),
            retry_count: number(variable, "EPOXIDE_RDMA_RETRY_COUNT", SMALL)?.unwrap_or(default.retry_count),
            ack_timeout: number(variable, "EPOXIDE_RDMA_TIMEOUT", SMALL)?.unwrap_or(default.ack_timeout),
            path_mtu: number(variable, "EPOXIDE_RDMA_PATH_MTU", NUMBER)?,
            queue_depth: number(variable, "EPOXIDE_RDMA_QUEUE_DEPTH", NUMBER)?.unwrap_or(default.queue_depth),
        };
        options.check().map(|()| options)
    }

    /// Rejects values that no device takes.
    pub(super) fn check(&self) -> Result<()> {
        let range = |name, value: u32, least: u32, most: u32| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(Error::argument(name, value, format!("must be from {least} to {most}")))
        };
        let repeated = |(at, name)| self.devices[..at].contains(name);
        if self.devices.iter().any(String::is_empty) || self.devices.iter().enumerate().any(repeated) {
            let rule = "must name each device once, with a comma between two";
            return Err(Error::argument("EPOXIDE_RDMA_DEVICE", self.devices.join(","), rule));
        }
        range("EPOXIDE_RDMA_PORT", self.port.into(), 1, 255)?;
        // One byte in a packet's address header.
        range("EPOXIDE_RDMA_GID_INDEX", self.gid_index.unwrap_or(0), 0, 255)?;
        range("EPOXIDE_RDMA_SERVICE_LEVEL", self.service_level.into(), 0, 15)?;
        range("EPOXIDE_RDMA_RETRY_COUNT", self.retry_count.into(), 0, 7)?;
        // 0 is "wait without end", which nothing here does.
        range("EPOXIDE_RDMA_TIMEOUT", self.ack_timeout.into(), 1, 31)?;
        range("EPOXIDE_RDMA_QUEUE_DEPTH", self.queue_depth, 4, 1 << 15)?;
        match self.path_mtu {
            Some(mtu) if mtu_code(mtu).is_none() => {
                Err(Error::argument("EPOXIDE_RDMA_PATH_MTU", mtu, "must be 256, 512, 1024, 2048 or 4096"))
            }
            _ => Ok(()),
        }
    }
}

/// The code of an MTU in bytes, as verbs define it.
pub(super) fn mtu_code(bytes: u32) -> Option<u32> {
    (1..=5).find(|code| mtu_bytes(*code) == bytes)
}

/// The bytes of an MTU's code.
pub(super) fn mtu_bytes(code: u32) -> u32 {
    128 << code.min(5)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(set: &[(&str, &str)]) -> Result<VerbsOptions> {
        VerbsOptions::from_variables(&|name| {
            set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn variables_change_the_defaults() {
        assert_eq!(with(&[("EPOXIDE_RDMA_DEVICE", " ")]).unwrap(), VerbsOptions::default());
        let options = with(&[
            ("EPOXIDE_RDMA_DEVICE", "mlx5_1"),
            ("EPOXIDE_RDMA_GID_INDEX", "3"),
            ("EPOXIDE_RDMA_TRAFFIC_CLASS", "106"),
            ("EPOXIDE_RDMA_SERVICE_LEVEL", "3"),
            ("EPOXIDE_RDMA_RETRY_COUNT", "6"),
            ("EPOXIDE_RDMA_TIMEOUT", "14"),
            ("EPOXIDE_RDMA_PATH_MTU", "1024"),
        ]);
        let want = VerbsOptions {
            devices: vec!["mlx5_1".into()],
            gid_index: Some(3),
            traffic_class: 106,
            service_level: 3,
            retry_count: 6,
            ack_timeout: 14,
            path_mtu: Some(1024),
            ..VerbsOptions::default()
        };
        assert_eq!(options.unwrap(), want);
        let devices = |names| with(&[("EPOXIDE_RDMA_DEVICE", names)]).unwrap().devices;
        assert_eq!(devices("mlx5_0"), ["mlx5_0"]);
        assert_eq!(devices(" mlx5_1, mlx5_0"), ["mlx5_1", "mlx5_0"]);
    }

    #[test]
    fn wrong_values_are_named() {
        for (name, value) in [
            ("EPOXIDE_RDMA_DEVICE", "mlx5_0,"),
            ("EPOXIDE_RDMA_DEVICE", "mlx5_0,mlx5_1,mlx5_0"),
            ("EPOXIDE_RDMA_PORT", "0"),
            ("EPOXIDE_RDMA_GID_INDEX", "first"),
            ("EPOXIDE_RDMA_TRAFFIC_CLASS", "256"),
            ("EPOXIDE_RDMA_SERVICE_LEVEL", "16"),
            ("EPOXIDE_RDMA_RETRY_COUNT", "8"),
            ("EPOXIDE_RDMA_TIMEOUT", "0"),
            ("EPOXIDE_RDMA_PATH_MTU", "1500"),
            ("EPOXIDE_RDMA_QUEUE_DEPTH", "1"),
        ] {
            let error = with(&[(name, value)]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name} = {value}: ")), "{error}");
        }
    }

    #[test]
    fn mtus_have_codes() {
        assert_eq!((mtu_code(256), mtu_code(4096), mtu_code(1500)), (Some(1), Some(5), None));
    }
}
