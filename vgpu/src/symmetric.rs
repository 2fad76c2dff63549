//! Memory that all devices of a machine have alike and address mutually.

use crate::machine::{Array, Machine, MachineError, Number};
use crate::memory::Reservation;
use crate::memory_error::{MemoryError, PAGE};
use crate::multicast::MulticastObject;

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

    /// Copies `numbers` to the begin of each device's array.
    ///
    /// # Errors
    /// As [`Array::upload`].
    pub fn upload(&self, numbers: &[T]) -> Result<(), MachineError> {
        (0..self.mapped.len()).try_for_each(|owner| self.of(owner).upload(numbers))
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
        symmetric.upload(numbers)?;
        Ok(symmetric)
    }

    /// The same for `len` numbers, which hold poison until [`Symmetric::upload`] or a kernel writes
    /// them.
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

    /// The same with the array of owner `n` at `n * stride` bytes behind that of owner 0, on each
    /// device, as NCCL's windows have it. `stride` is a power of two. It and the bytes of an array
    /// are multiples of 4096. The numbers hold poison.
    ///
    /// ```
    /// use epoxide_vgpu::Machine;
    ///
    /// let machine = Machine::checked(2, 7);
    /// let heap = machine.symmetric_strided::<u32>("heap", 1 << 12, 1 << 32)?;
    /// // The first words are flags.
    /// heap.upload(&[0; 64])?;
    /// assert_eq!(heap.addrs(1)[1], heap.addrs(1)[0] + (1 << 32));
    /// heap.of(1).slice(0..64, "flags")?.expect([0; 64])?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `stride` is no power of two, less than 4096 or less than an array, an array has no whole
    /// pages, or those of [`symmetric_alloc`](Self::symmetric_alloc).
    pub fn symmetric_strided<T: Number>(
        &self,
        label: &str,
        len: usize,
        stride: u64,
    ) -> Result<Symmetric<T>, MachineError> {
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        if !stride.is_power_of_two() || stride < PAGE || stride < bytes {
            return Err(MachineError::BadStride { label: label.to_owned(), stride, bytes });
        }
        let own: Vec<Array<T>> =
            (0..self.devices()).map(|owner| self.alloc(owner, label, len)).collect::<Result<_, _>>()?;
        let on_device = |device| {
            // No reservation has as many bytes as the product is cut to.
            let reservation = Reservation::new(stride.saturating_mul(self.devices() as u64), stride)?;
            let place = |owner: usize| (&reservation, reservation.addr() + stride * owner as u64);
            own.iter().enumerate().map(|(owner, array)| self.map_at(device, array, place(owner))).collect()
        };
        Ok(Symmetric { mapped: (0..self.devices()).map(on_device).collect::<Result<_, MachineError>>()? })
    }

    /// Multicast addresses of the arrays of all devices, as each device has them: what `multimem`
    /// instructions access there, they access in all arrays. The host and other instructions have
    /// no access.
    ///
    /// ```
    /// use epoxide_vgpu::{GridConfig, Machine, Module};
    ///
    /// let ptx = "
    /// .version 8.1
    /// .target sm_90
    /// .address_size 64
    /// .visible .entry sum(.param .u64 all, .param .u64 out)
    /// {
    ///     .reg .b32 %r<2>;
    ///     .reg .b64 %rd<3>;
    ///     ld.param.u64 %rd1, [all];
    ///     ld.param.u64 %rd2, [out];
    ///     multimem.ld_reduce.global.add.u32 %r1, [%rd1];
    ///     st.global.u32 [%rd2], %r1;
    ///     ret;
    /// }";
    /// let mut machine = Machine::checked(4, 7);
    /// let numbers = machine.symmetric("numbers", &[5u32])?;
    /// let all = machine.multicast(&numbers)?;
    /// let out = machine.alloc::<u32>(1, "out", 1)?;
    /// let module = Module::parse(ptx)?;
    /// machine.launch_with(1, &module, "sum", GridConfig::new(1, 1, 0), &[&all[1], &out])?;
    /// machine.run()?;
    /// assert_eq!(out.download()?, [20]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The operating system maps no more.
    pub fn multicast<T: Number>(&self, arrays: &Symmetric<T>) -> Result<Vec<Array<T>>, MachineError> {
        self.multicast_of(&(0..self.devices()).map(|device| arrays.of(device)).collect::<Vec<_>>())
    }

    /// The same of an array of each device, in the order of the devices. All are as long.
    ///
    /// # Errors
    /// Arrays are missing or of other lengths, or the operating system maps no more.
    pub fn multicast_of<T: Number>(&self, arrays: &[&Array<T>]) -> Result<Vec<Array<T>>, MachineError> {
        let are_alike = arrays.iter().all(|array| array.shape() == arrays[0].shape());
        if arrays.len() != self.devices() || !are_alike {
            let message = "multicast addresses need an array of each device, all of one length".to_owned();
            return Err(MemoryError::Multicast { message }.into());
        }
        let bytes = arrays.first().map_or(0, |array| array.allocation().bytes());
        if let (0, Some(array)) = (bytes, arrays.first()) {
            let message =
                format!("'{}' is empty: multicast addresses need memory", array.allocation().label());
            return Err(MemoryError::Multicast { message }.into());
        }
        let object = MulticastObject::new(bytes);
        for (device, array) in (0..).zip(arrays) {
            object.add_device(device)?;
            object.bind(device, 0, (array.allocation(), 0), bytes)?;
        }
        arrays.iter().enumerate().map(|(device, array)| self.map_multicast(device, array, &object)).collect()
    }
}

// Miri maps no files, and no memory without access.
#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn strided_arrays_lie_at_the_stride_and_are_the_same_memory() {
        let machine = Machine::new(3);
        let stride = 1 << 32;
        let heap = machine.symmetric_strided::<u32>("heap", 1024, stride).unwrap();
        for owner in 0..3 {
            heap.of(owner).upload(&[owner as u32; 1024]).unwrap();
        }
        for device in 0..3 {
            for owner in 0..3 {
                let array = &heap.on(device)[owner];
                assert_eq!(array.addr(), heap.on(device)[0].addr() + stride * owner as u64);
                assert_eq!(array.download().unwrap(), [owner as u32; 1024]);
            }
        }
        for (len, stride) in [(1025, 1 << 13), (4096, 1 << 13)] {
            assert!(machine.symmetric_strided::<u32>("heap", len, stride).is_err());
        }
    }

    #[test]
    fn strides_at_which_arrays_cannot_lie_are_named() {
        let machine = Machine::new(2);
        for stride in [0, 1, 2048, 3 * 4096] {
            let error = machine.symmetric_strided::<u32>("heap", 1024, stride).unwrap_err().to_string();
            assert!(error.contains(&format!("'heap': the stride is {stride} bytes")), "{error}");
        }
    }

    #[test]
    fn empty_arrays_have_no_multicast_addresses() {
        let machine = Machine::new(2);
        let empty = machine.symmetric::<u32>("empty", &[]).unwrap();
        let error = machine.multicast(&empty).unwrap_err().to_string();
        assert!(error.contains("'empty of device 0' is empty"), "{error}");
        let all = machine.multicast(&machine.symmetric("all", &[0u32; 1024]).unwrap()).unwrap();
        let error = machine.map(1, &all[0]).unwrap_err().to_string();
        assert!(error.contains("map the arrays"), "{error}");
    }

    #[test]
    fn strides_whose_sum_is_no_number_find_no_addresses() {
        for (devices, stride) in [(2, 1 << 63), (3, 1 << 63), (4, 1 << 62)] {
            let error = Machine::new(devices).symmetric_strided::<u32>("heap", 1024, stride).unwrap_err();
            let requested = match error {
                MachineError::Memory(MemoryError::OutOfMemory { requested, .. }) => requested,
                other => panic!("{other}"),
            };
            assert_eq!(requested, u64::MAX);
        }
    }
}
