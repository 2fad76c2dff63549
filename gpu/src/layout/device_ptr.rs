//! Addresses, as the kernel toolkit has them.

pub use epoxide_simt::DevicePtr;
