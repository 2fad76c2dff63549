//! The environment variables.

use epoxide_vgpu::Assumptions;

/// Settings of all virtual GPUs of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) devices: u32,
    /// Memory of each device in bytes.
    pub(crate) memory_bytes: u64,
    pub(crate) check: bool,
    /// Assumptions of check mode beyond the memory model.
    pub(crate) assume: Assumptions,
    pub(crate) seed: Option<u64>,
    /// `DeviceConfig::livelock_limit`; `None`: the default of the mode.
    pub(crate) livelock_limit: Option<u64>,
    /// How long kernels may only wait while nothing else happens; `None`: for ever.
    pub(crate) stuck_seconds: Option<u64>,
    /// Whether a kernel's code is loaded at its first use, behind all that runs.
    pub(crate) loads_lazily: bool,
}

impl Config {
    /// The settings, or a message that names the wrong variable.
    pub(crate) fn from_environment() -> Result<Config, String> {
        Config::read(|name| std::env::var(name).ok())
    }

    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Config, String> {
        let number =
            |name: &str, least: u64, most: u64| match variable(name).filter(|value| !value.is_empty()) {
                None => Ok(None),
                Some(value) => match value.parse::<u64>() {
                    Ok(number) if (least..=most).contains(&number) => Ok(Some(number)),
                    _ => Err(format!("{name} is '{value}': it must be a number from {least} to {most}")),
                },
            };
        let devices = number("EPOXIDE_VGPU_DEVICES", 0, 64)?.unwrap_or(1) as u32;
        let memory_bytes = number("EPOXIDE_VGPU_MEMORY_MIB", 1, 1 << 24)?.unwrap_or(16 << 10) << 20;
        let check = number("EPOXIDE_VGPU_CHECK", 0, 1)? == Some(1);
        let mut assume = Assumptions::default();
        let names = variable("EPOXIDE_VGPU_ASSUME").unwrap_or_default();
        for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            assume.state(name).map_err(|error| format!("EPOXIDE_VGPU_ASSUME is '{names}': {error}"))?;
        }
        let seed = number("EPOXIDE_VGPU_SEED", 0, u64::MAX)?;
        let steps = number("EPOXIDE_VGPU_STEPS", 0, u64::MAX)?;
        let livelock_limit = steps.map(|steps| if steps == 0 { u64::MAX } else { steps });
        let stuck = number("EPOXIDE_VGPU_STUCK_SECONDS", 0, u64::from(u32::MAX))?.unwrap_or(300);
        let stuck_seconds = Some(stuck).filter(|seconds| *seconds > 0);
        // The driver's own variable. Lazy loading, its default, adds waits that affect few
        // programs.
        let loads_lazily = variable("CUDA_MODULE_LOADING").as_deref() == Some("LAZY");
        Ok(Config { devices, memory_bytes, check, assume, seed, livelock_limit, stuck_seconds, loads_lazily })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_have_defaults_and_bounds() {
        let read = |name: &str, value: &str| Config::read(|asked| (asked == name).then(|| value.to_owned()));
        let default = Config::read(|_| None).unwrap();
        assert_eq!(
            (default.devices, default.memory_bytes, default.check, default.seed),
            (1, 16 << 30, false, None)
        );
        assert_eq!(read("EPOXIDE_VGPU_DEVICES", "").unwrap(), default);
        assert_eq!(read("EPOXIDE_VGPU_DEVICES", "4").unwrap().devices, 4);
        assert!(read("EPOXIDE_VGPU_CHECK", "1").unwrap().check);
        assert_eq!(read("EPOXIDE_VGPU_STUCK_SECONDS", "0").unwrap().stuck_seconds, None);
        let steps = |value: &str| read("EPOXIDE_VGPU_STEPS", value).unwrap().livelock_limit;
        assert_eq!([steps(""), steps("0"), steps("7")], [None, Some(u64::MAX), Some(7)]);
        let assume = |value: &str| read("EPOXIDE_VGPU_ASSUME", value).map(|config| config.assume);
        assert!(assume("ConvergedWarps, ClusterArrivals").unwrap().cluster_arrivals);
        assert!(assume("Luck").unwrap_err().starts_with("EPOXIDE_VGPU_ASSUME is 'Luck': no assumption"));
        let lazily = |value: &str| read("CUDA_MODULE_LOADING", value).unwrap().loads_lazily;
        assert_eq!([lazily(""), lazily("EAGER"), lazily("LAZY")], [false, false, true]);
        let error = read("EPOXIDE_VGPU_DEVICES", "65").unwrap_err();
        assert_eq!(error, "EPOXIDE_VGPU_DEVICES is '65': it must be a number from 0 to 64");
    }
}
