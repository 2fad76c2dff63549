//! The used part of `nccl.h`: types, constants and the table of functions.
//!
//! Written from NCCL's public ABI, which only grows: enumerations keep their numbers, and the
//! configuration holds its own size.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// A communicator of NCCL's.
#[repr(C)]
pub struct Comm {
    opaque: [u8; 0],
}

/// `ncclResult_t`. A plain integer, since a code that a Rust enum does not list would be undefined
/// behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Code(pub c_int);

impl Code {
    pub const SUCCESS: Code = Code(0);
    pub const IN_PROGRESS: Code = Code(7);

    /// Whether the call has failed: it has neither succeeded nor is in progress.
    pub fn is_failure(self) -> bool {
        !matches!(self, Code::SUCCESS | Code::IN_PROGRESS)
    }
}

/// `ncclUniqueId`, which functions take by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Id(pub [u8; 128]);

/// `NCCL_CONFIG_UNDEF_INT`.
pub const UNDEFINED: c_int = c_int::MIN;
/// `NCCL_SPLIT_NOCOLOR`.
pub const NO_COLOR: c_int = -1;
/// `NCCL_API_MAGIC`.
const MAGIC: c_uint = 0xcafe_beef;
/// Version of the `ncclConfig_t` below.
const CONFIG_VERSION: u32 = 22800;

/// `ncclConfig_t` as of 2.28. Fields are only ever added at its end. Older libraries read the
/// fields that they support, and newer ones fill in the missing ones: by `size`, and by `version`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RawConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// 2.14.
    pub blocking: c_int,
    /// 2.17.
    pub cga_cluster_size: c_int,
    /// 2.17.
    pub min_ctas: c_int,
    /// 2.17.
    pub max_ctas: c_int,
    /// 2.17.
    pub net_name: *const c_char,
    /// 2.18.
    pub split_share: c_int,
    /// 2.26.
    traffic_class: c_int,
    /// 2.27.
    pub comm_name: *const c_char,
    /// 2.27.
    collnet_enable: c_int,
    /// 2.27.
    cta_policy: c_int,
    /// 2.27.
    shrink_share: c_int,
    /// 2.27.
    nvls_ctas: c_int,
    /// 2.28.
    channels_per_net_peer: c_int,
    /// 2.28.
    nvlink_centric_sched: c_int,
}

impl RawConfig {
    /// A configuration without values, for a library of `version`.
    pub fn new(version: u32) -> RawConfig {
        RawConfig {
            size: RawConfig::size_at(version),
            magic: MAGIC,
            version: version.min(CONFIG_VERSION),
            blocking: UNDEFINED,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: std::ptr::null(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            channels_per_net_peer: UNDEFINED,
            nvlink_centric_sched: UNDEFINED,
        }
    }

    /// How long the structure was in a version, padding to 8 bytes included.
    fn size_at(version: u32) -> usize {
        use std::mem::offset_of;
        // The version from which it is longer, and the length before.
        let grown = [
            (21700, offset_of!(RawConfig, cga_cluster_size)),
            (21800, offset_of!(RawConfig, split_share)),
            (22600, offset_of!(RawConfig, traffic_class)),
            (22700, offset_of!(RawConfig, comm_name)),
            (22800, offset_of!(RawConfig, channels_per_net_peer)),
        ];
        let end =
            grown.iter().find(|(from, _)| version < *from).map_or(size_of::<RawConfig>(), |(_, end)| *end);
        end.next_multiple_of(8)
    }
}

/// A CUDA stream, as the runtime spells it.
pub type Stream = *mut c_void;

/// Declares the table of functions: those that every use needs, and those of later versions.
macro_rules! functions {
    (
        required { $($needed:ident: fn($($needed_arg:ty),*) -> $needed_result:ty;)* }
        optional { $($later:ident since $since:literal: fn($($later_arg:ty),*) -> $later_result:ty;)* }
    ) => {
        /// The functions of a library. Names are NCCL's.
        #[allow(non_snake_case)]
        pub struct Functions {
            $(pub $needed: unsafe extern "C" fn($($needed_arg),*) -> $needed_result,)*
            $(pub $later: Option<unsafe extern "C" fn($($later_arg),*) -> $later_result>,)*
        }

        impl Functions {
            /// Fills the table with the address that `find` returns for each name; or returns the
            /// names of the required functions that are missing.
            ///
            /// # Safety
            /// `find` gives the address of NCCL's function of that name, or null.
            pub unsafe fn resolve(find: impl Fn(&str) -> *const c_void) -> Result<Functions, Vec<&'static str>> {
                let lacking: Vec<&str> =
                    [$(stringify!($needed)),*].into_iter().filter(|name| find(name).is_null()).collect();
                if !lacking.is_empty() {
                    return Err(lacking);
                }
                // SAFETY: an address that is not null is the function of that name, and the types
                // match the C declarations in nccl.h. Null becomes `None` if the field allows it;
                // otherwise it was rejected above.
                unsafe {
                    Ok(Functions {
                        $($needed: std::mem::transmute::<
                            *const c_void,
                            unsafe extern "C" fn($($needed_arg),*) -> $needed_result,
                        >(find(stringify!($needed))),)*
                        $($later: std::mem::transmute::<
                            *const c_void,
                            Option<unsafe extern "C" fn($($later_arg),*) -> $later_result>,
                        >(find(stringify!($later))),)*
                    })
                }
            }

            /// The functions of later versions that this library lacks, each with the version that
            /// has it.
            pub fn lacking(&self) -> Vec<(&'static str, &'static str)> {
                let mut lacking = Vec::new();
                $(if self.$later.is_none() {
                    lacking.push((stringify!($later), $since));
                })*
                lacking
            }
        }

        /// The version that brought a function.
        pub fn since(name: &str) -> &'static str {
            match name {
                $(stringify!($later) => $since,)*
                _ => "2.7",
            }
        }
    };
}

functions! {
    required {
        ncclGetVersion: fn(*mut c_int) -> Code;
        ncclGetUniqueId: fn(*mut Id) -> Code;
        ncclGetErrorString: fn(Code) -> *const c_char;
        ncclCommInitRank: fn(*mut *mut Comm, c_int, Id, c_int) -> Code;
        ncclCommDestroy: fn(*mut Comm) -> Code;
        ncclCommAbort: fn(*mut Comm) -> Code;
        ncclCommGetAsyncError: fn(*mut Comm, *mut Code) -> Code;
        ncclCommCount: fn(*mut Comm, *mut c_int) -> Code;
        ncclCommUserRank: fn(*mut Comm, *mut c_int) -> Code;
        ncclGroupStart: fn() -> Code;
        ncclGroupEnd: fn() -> Code;
        ncclAllReduce: fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut Comm, Stream) -> Code;
        ncclBroadcast: fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut Comm, Stream) -> Code;
        ncclReduce: fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, *mut Comm, Stream) -> Code;
        ncclAllGather: fn(*const c_void, *mut c_void, usize, c_int, *mut Comm, Stream) -> Code;
        ncclReduceScatter: fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut Comm, Stream) -> Code;
        ncclSend: fn(*const c_void, usize, c_int, c_int, *mut Comm, Stream) -> Code;
        ncclRecv: fn(*mut c_void, usize, c_int, c_int, *mut Comm, Stream) -> Code;
    }
    optional {
        ncclGetLastError since "2.13": fn(*mut Comm) -> *const c_char;
        ncclCommInitRankConfig since "2.14": fn(*mut *mut Comm, c_int, Id, c_int, *mut RawConfig) -> Code;
        ncclCommFinalize since "2.14": fn(*mut Comm) -> Code;
        ncclCommSplit since "2.18": fn(*mut Comm, c_int, c_int, *mut *mut Comm, *mut RawConfig) -> Code;
        ncclCommRegister since "2.19": fn(*mut Comm, *mut c_void, usize, *mut *mut c_void) -> Code;
        ncclCommDeregister since "2.19": fn(*mut Comm, *mut c_void) -> Code;
        ncclCommMemStats since "2.29": fn(*mut Comm, c_int, *mut u64) -> Code;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_as_long_as_each_version_has_it() {
        // sizeof(ncclConfig_t) of 2.14, 2.17, 2.18, 2.27 and 2.28.
        let sizes = [(21400, 24), (21700, 40), (21800, 48), (22700, 72), (22803, 80), (23203, 80)];
        for (version, size) in sizes {
            assert_eq!(RawConfig::new(version).size, size, "{version}");
        }
        assert_eq!(RawConfig::new(21403).version, 21403);
        assert_eq!(RawConfig::new(23203).version, CONFIG_VERSION);
    }

    #[test]
    fn missing_functions_are_named() {
        // SAFETY: none of the addresses is called.
        let lacking =
            unsafe { Functions::resolve(|name| if name == "ncclSend" { std::ptr::null() } else { 8 as _ }) };
        assert_eq!(lacking.err(), Some(vec!["ncclSend"]));
        // SAFETY: as above.
        let old = unsafe {
            Functions::resolve(
                |name| if since(name) == "2.7" { 8 as *const c_void } else { std::ptr::null() },
            )
        };
        let lacking = old.unwrap_or_else(|lacking| panic!("{lacking:?}")).lacking();
        assert!(lacking.contains(&("ncclCommSplit", "2.18")), "{lacking:?}");
    }
}
