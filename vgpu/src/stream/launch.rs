//! Launches, as work of a stream.

use std::sync::Arc;

use crate::{DeviceConfig, Grid, GridConfig, Kernel, LaunchError, Memory, Past, Residency, Timeline};

/// A kernel with its arguments, checked, of which any number of grids can be made.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The kernel.
    pub kernel: Arc<Kernel>,
    /// Whether all blocks run together.
    pub residency: Residency,
    /// The shape.
    pub config: GridConfig,
    /// The bytes of the parameters.
    pub params: Vec<u8>,
}

impl Launch {
    /// How many warps it has.
    #[must_use]
    pub fn warps(&self) -> u64 {
        let blocks: u64 = self.config.grid.iter().map(|extent| u64::from(*extent)).product();
        let threads: u64 = self.config.block.iter().map(|extent| u64::from(*extent)).product();
        blocks * threads.div_ceil(32)
    }

    /// A grid, ready to run, with a schedule seed in place of the device's: [`Grid::launch`].
    /// Drivers make it when the launch begins, not when it is enqueued, because it has the
    /// registers of every block that is resident at once. `order`: in check mode the stream, and
    /// the causal past before the launch.
    ///
    /// # Errors
    /// The same as of [`Grid::launch`].
    pub fn grid(
        &self,
        memory: &Memory,
        device: &DeviceConfig,
        schedule_seed: Option<u64>,
        order: Option<&(Timeline, Past)>,
    ) -> Result<Grid, LaunchError> {
        let device = DeviceConfig { schedule_seed, ..device.clone() };
        let (kernel, memory) = (self.kernel.clone(), memory.clone());
        let order = order.map(|(timeline, past)| (*timeline, past));
        Grid::launch(self.residency, kernel, memory, &device, self.config, &self.params, order)
    }
}
