//! Memory that all devices of a machine have alike and address mutually.

use crate::machine::{Array, Machine, MachineError, Number};

/// An array of each device, mapped on all devices: symmetric memory, as of NVSHMEM and NCCL.
#[derive(Debug)]
pub struct Symmetric<T> {
    /// `[device][owner]`. On its owner, an array is its own and no mapping.
    mapped: Vec<Vec<Array<T>>>,
}

impl<T: Number> Symmetric<T> {
    /// The array of device `owner`, as that device addresses it.
    ///
    /// # Panics
    /// The machine has fewer devices.
    #[must_use]
    pub fn of(&self, owner: usize) -> &Array<T> {
        &self.mapped[owner][owner]
    }

    /// The arrays of all devices in order, as device `device` addresses them.
    ///
    /// # Panics
    /// The machine has fewer devices.
    #[must_use]
    pub fn on(&self, device: usize) -> &[Array<T>] {
        &self.mapped[device]
    }

    /// The addresses of [`on`](Self::on), as kernels take them in an array of pointers.
    ///
    /// # Panics
    /// The machine has fewer devices.
    #[must_use]
    pub fn addrs(&self, device: usize) -> Vec<u64> {
        self.on(device).iter().map(Array::addr).collect()
    }
}

impl Machine {
    /// An array of each device that holds `numbers`, mapped on all devices. `label` names it in
    /// reports.
    ///
    /// # Errors
    /// No memory, or the operating system maps no more.
    pub fn symmetric<T: Number>(&self, label: &str, numbers: &[T]) -> Result<Symmetric<T>, MachineError> {
        let symmetric = self.symmetric_alloc(label, numbers.len())?;
        for owner in 0..self.devices() {
            symmetric.of(owner).upload(numbers)?;
        }
        Ok(symmetric)
    }

    /// The same for `len` numbers, which hold poison.
    ///
    /// # Errors
    /// No memory, or the operating system maps no more.
    pub fn symmetric_alloc<T: Number>(&self, label: &str, len: usize) -> Result<Symmetric<T>, MachineError> {
        let mut mapped: Vec<Vec<Array<T>>> = (0..self.devices()).map(|_| vec![]).collect();
        for owner in 0..self.devices() {
            let own = self.alloc(owner, label, len)?;
            for device in (0..self.devices()).filter(|&device| device != owner) {
                mapped[device].push(self.map(device, &own)?);
            }
            mapped[owner].push(own);
        }
        Ok(Symmetric { mapped })
    }
}
