//! The functions of the driver API, by subject.

pub mod context;
pub mod device;
pub mod event;
pub mod graph;
pub mod launch;
pub mod memory;
pub mod module;
pub mod multicast;
pub mod sharing;
pub mod stream;
pub mod tensor;

use crate::abi::{CUresult, Res};

/// Defines functions of the API. A body gives `Res`; its code is the function's result. `SYMBOLS`
/// has the name and the address of each function.
macro_rules! api {
    ($($(#[doc = $doc:literal])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[doc = $doc])*
            ///
            /// # Safety
            /// Pointers are null or valid for the reads and writes that the CUDA driver API
            /// describes for this function.
            #[unsafe(no_mangle)]
            #[allow(clippy::too_many_arguments)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> crate::abi::CUresult {
                crate::calls::code_of(move || $body)
            }
        )*

        pub(crate) const SYMBOLS: &[(&str, crate::symbols::Symbol)] =
            &[$((stringify!($name), crate::symbols::Symbol($name as *const ()))),*];
    };
}
pub(crate) use api;

/// The code of a call's result.
pub(crate) fn code_of(call: impl FnOnce() -> Res) -> CUresult {
    call().err().unwrap_or(0)
}
