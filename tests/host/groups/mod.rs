//! Process groups over the mesh: every collective against a serial oracle, subgroups, faults, many
//! processes.

mod background;
mod faults;
mod harness;
pub mod networks;
mod oracle;
mod processes;
mod secrets;
mod strangers;
mod subgroups;
