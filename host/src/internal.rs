//! Items for the other crates of this repository; users of the library do not need them. They are
//! no public interface: any version may change them.

pub mod fuzz;

pub use epoxide_vgpu::Schedule;

pub use crate::bounded::{JSON, PTX, read_text, read_text_file};
pub use crate::driver::shipped_ptx;
pub use crate::ep::core::TracedLaunch;
pub use crate::ep::throughput::{CeilingShape, Direction, Tuning};
pub use crate::ep::topology::Topology;
pub use crate::group::mesh_group::Connect;
pub use crate::group::recorder::{Entry, State};
pub use crate::group::tcp::TcpStoreServer;
pub use crate::virtual_time::{Membership, VirtualTime, as_member};
