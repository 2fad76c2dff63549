//! Services of the system that kernels use: `printf`, cooperative launches, variables of the module.
//! The kernels are those of `foreign/sources/system.cu`, as nvcc makes them.

use std::sync::{Arc, Mutex};

use epoxide_vgpu::{
    CheckConfig, DeviceConfig, FaultKind, GridConfig, LaunchError, Machine, MachineError, Module, Output,
    for_each_seed,
};

use crate::common::{HEAD, device, fault_of, kernel, run_body, tier};

const OPTIMISED: &str = include_str!("foreign/ptx/system.ptx");
const PLAIN: &str = include_str!("foreign/ptx/unoptimised/system.ptx");

/// The optimised and the plain translation.
fn modules() -> [Module; 2] {
    [OPTIMISED, PLAIN].map(|ptx| Module::parse(ptx).unwrap())
}

/// Machines without a seed, with one, and in check mode.
fn machines(devices: usize) -> impl Iterator<Item = Machine> {
    let seeded = (0..tier(4, 40)).flat_map(move |seed| {
        let check = [None, Some(CheckConfig::default())];
        check.map(|check| Machine::with_config(devices, device(seed), check))
    });
    std::iter::once(Machine::new(devices)).chain(seeded)
}

/// A machine, and what its kernels print.
fn printing(check: Option<CheckConfig>) -> (Machine, Arc<Mutex<String>>) {
    let text = Arc::new(Mutex::new(String::new()));
    let config = DeviceConfig { output: Output::to_text(&text), ..device(1) };
    (Machine::with_config(1, config, check), text)
}

#[test]
fn printf_formats_as_c_does() {
    // The text that glibc's printf gives for the same arguments.
    let expected = "plain\n\
        -42|  -42|-42  |-0042|-42|-42|-042|   -42|4294967254|-42\n\
        ffffffd6|FFFFFFD6|0xffffffd6|37777777726|037777777726|123456789abc|-20015998343868|20015998343868\n\
        3.141593|3.14|     3.142|3.1       |3.141593e+00|3.142E+00|3.14159|3.14159e+09|3.14159E-09|0x1.921fb54442d18p+1\n\
        given|      text|text      |tex|c|0x0|100%|%y\n";
    for (module, check) in modules().iter().zip([None, Some(CheckConfig::default())]) {
        let (mut machine, text) = printing(check);
        let given = machine.upload(0, "text", b"given\0").unwrap();
        let counts = machine.upload(0, "counts", &[9i32; 5]).unwrap();
        let x = std::f64::consts::PI;
        let wide = 0x1234_5678_9abc_i64;
        machine
            .launch_with(0, module, "print", GridConfig::new(1, 1, 0), &[&-42i32, &x, &wide, &given, &counts])
            .unwrap();
        machine.run().unwrap();
        assert_eq!(*text.lock().unwrap(), expected);
        assert_eq!(counts.download().unwrap(), [0, 11, 8, 10, 6]);
    }
}

#[test]
fn each_lane_prints_for_itself() {
    for module in modules() {
        let (mut machine, text) = printing(None);
        machine.launch_with(0, &module, "print_lanes", GridConfig::new(2, 40, 0), &[]).unwrap();
        machine.run().unwrap();
        let mut lines: Vec<_> = text.lock().unwrap().lines().map(str::to_owned).collect();
        lines.sort();
        let lanes = [3, 11, 19, 27, 35];
        let mut expected: Vec<_> =
            (0..2).flat_map(|block| lanes.map(|lane| format!("lane {lane} of block {block}"))).collect();
        expected.sort();
        assert_eq!(lines, expected);
    }
}

/// Prints with constants as arguments, by a kernel that stores them as nvcc would.
fn printed(format: &str, arguments: &[(u64, u64)]) -> String {
    let bytes: Vec<String> = format.bytes().chain([0]).map(|byte| byte.to_string()).collect();
    let globals =
        format!(".global .align 1 .b8 format[{}] = {{{}}};\n{VPRINTF}", bytes.len(), bytes.join(", "));
    let (mut stores, mut at) = (String::new(), 0u64);
    for (bytes, bits) in arguments {
        at = at.next_multiple_of(*bytes);
        stores += &format!("mov.u64 %rd3, {bits}; st.local.u{} [arguments+{at}], %rd3;\n", 8 * bytes);
        at += bytes;
    }
    let body = format!(
        ".local .align 16 .b8 arguments[256]; {stores}
         mov.u64 %rd4, arguments; cvta.local.u64 %rd4, %rd4; mov.u64 %rd1, format; cvta.global.u64 %rd1, %rd1;
         {}",
        call("").replace("[param1], 0", "[param1], %rd4")
    );
    let (mut machine, text) = printing(None);
    let module = Module::parse(&kernel(&globals, &body)).unwrap();
    let out = machine.upload(0, "out", &[0u64]).unwrap();
    machine.launch_with(0, &module, "k", GridConfig::new(1, 1, 0), &[&out]).unwrap();
    machine.run().unwrap();
    assert_eq!(out.download().unwrap(), [arguments.len() as u64]);
    text.lock().unwrap().clone()
}

#[test]
fn printf_rounds_and_pads_as_c_does() {
    let float = |x: f64| (8, x.to_bits());
    let int = |n: i32| (4, u64::from(n as u32));
    // The text that glibc's printf gives.
    for (format, argument, expected) in [
        ("%#.0f", float(1.0), "1."),
        ("%#g", float(1.0), "1.00000"),
        ("%.0e", float(12345.0), "1e+04"),
        ("%g", float(0.0001), "0.0001"),
        ("%g", float(0.00001), "1e-05"),
        ("%g", float(123_456_789.0), "1.23457e+08"),
        ("%g", float(-0.0), "-0"),
        ("%G", float(1e-10), "1E-10"),
        ("%a", float(0.0), "0x0p+0"),
        ("%.2a", float(1.9999), "0x2.00p+0"),
        ("%.0a", float(1.5), "0x2p+0"),
        ("%a", float(4e-320), "0x0.0000000001fap-1022"),
        ("%+.3f", float(2.5), "+2.500"),
        ("%08.2f", float(-3.5), "-0003.50"),
        ("%.0f", float(0.5), "0"),
        ("%.0f", float(1.5), "2"),
        ("%5.1f|", float(f64::INFINITY), "  inf|"),
        ("%05F", float(f64::NEG_INFINITY), " -INF"),
        ("%e", float(0.0), "0.000000e+00"),
        ("%5c", int(120), "    x"),
        ("%05d", int(-3), "-0003"),
        ("%.0d|", int(0), "|"),
        ("%#o", int(8), "010"),
        ("%08.3d", int(5), "     005"),
        ("%-8d|", int(7), "7       |"),
        ("%#X", int(255), "0XFF"),
        ("100%% of %d", int(3), "100% of 3"),
        ("%d% ", int(3), "3% "),
    ] {
        assert_eq!(printed(format, &[argument]), expected, "{format}");
    }
    // A negative width aligns left, a negative precision counts as none.
    assert_eq!(printed("%*d|%.*f", &[int(-4), int(7), int(-1), float(0.5)]), "7   |0.500000");
    // More digits than the widest field has are cut.
    assert_eq!(printed("%.*f", &[int(i32::MAX), float(0.5)]), format!("0.5{}", "0".repeat(4095)));
    assert_eq!(printed("%.*d", &[int(70_000), int(1)]), format!("{}1", "0".repeat(4095)));
    assert_eq!(printed("%.*e", &[int(65_536), float(1.0)]), format!("1.{}e+00", "0".repeat(4096)));
    // An argument of 8 bytes behind one of 4 begins at a multiple of 8.
    assert_eq!(printed("%d %lld %c%s", &[int(1), (8, 2), int(51), (8, 0)]), "1 2 3(null)");
}

/// A call of `vprintf` with the format at `format`; the result is word 0 of the buffer.
fn call(format: &str) -> String {
    format!(
        ".param .b64 param0; .param .b64 param1; .param .b32 retval0;
         {format}
         st.param.b64 [param0], %rd1; st.param.b64 [param1], 0;
         call.uni (retval0), vprintf, (param0, param1);
         ld.param.b32 %r1, [retval0]; cvt.s64.s32 %rd2, %r1; st.global.u64 [%rd42], %rd2;"
    )
}

const VPRINTF: &str = ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);";

#[test]
fn a_null_format_is_an_error_of_the_call_and_a_wild_one_a_fault() {
    assert_eq!(run_body(VPRINTF, &call("mov.u64 %rd1, 0;"), 1, &[5]), [u64::MAX]);
    let fault = fault_of(VPRINTF, &call("mov.u64 %rd1, 4096;"), 1);
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { addr: 4096, .. }), "{fault}");
    assert!(fault.at.ptx_text.contains("call"), "{fault}");
    // Arguments at the end of all addresses, and a format there.
    let globals = format!(".global .align 1 .b8 format[5] = {{37, 99, 37, 115, 0}};\n{VPRINTF}");
    let body = call("mov.u64 %rd1, format;").replace("[param1], 0", "[param1], -2");
    let fault = fault_of(&globals, &body, 1);
    assert!(matches!(fault.kind, FaultKind::Misaligned { align: 4, .. }), "{fault}");
    let fault = fault_of(&globals, &call("mov.u64 %rd1, -1;"), 1);
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { .. }), "{fault}");
    for (body, what) in [
        ("{ .param .b64 x; call vprintf, (x); }", "vprintf takes 2 addresses"),
        ("{ .param .b64 x; .param .b32 z; call (z), vprintf, (x, %r1); }", "not a .param variable"),
    ] {
        let error = Module::parse(&kernel(VPRINTF, body)).unwrap_err();
        assert!(error.message.contains(what), "{body}: {error}");
    }
}

#[test]
fn blocks_of_a_cooperative_launch_meet() {
    const BLOCKS: usize = 5;
    const THREADS: usize = 48;
    const ROUNDS: usize = 3;
    let begin: Vec<u32> = (0..(BLOCKS * THREADS) as u32).collect();
    let mut expected = begin.clone();
    for _ in 0..ROUNDS {
        let next = |i: usize| {
            let value = expected[(i + THREADS) % expected.len()];
            if i % 2 == 1 { value + 1 } else { value.wrapping_mul(3) }
        };
        expected = (0..expected.len()).map(next).collect();
    }
    for module in modules() {
        for mut machine in machines(1) {
            let a = machine.upload(0, "a", &begin).unwrap();
            let b = machine.upload(0, "b", &begin).unwrap();
            let shape = GridConfig::new(BLOCKS as u32, THREADS as u32, 0);
            // Two launches: the second has a workspace of its own.
            for arguments in [[&a, &b], [&b, &a]] {
                let [a, b] = arguments;
                machine.launch_cooperative(0, &module, "hand_on", shape, &[a, b, &(ROUNDS as i32)]).unwrap();
            }
            machine.run().unwrap();
            let twice = |first: &[u32]| {
                (0..ROUNDS).fold(first.to_vec(), |now, _| {
                    let next = |i: usize| {
                        let value = now[(i + THREADS) % now.len()];
                        if i % 2 == 1 { value + 1 } else { value.wrapping_mul(3) }
                    };
                    (0..now.len()).map(next).collect()
                })
            };
            assert_eq!(a.download().unwrap(), twice(&expected));
        }
    }
}

#[test]
fn a_grid_that_is_not_cooperative_or_does_not_fit_cannot_meet() {
    let module = &modules()[0];
    let mut machine = Machine::new(1);
    let a = machine.upload(0, "a", &[0u32; 64]).unwrap();
    machine.launch_with(0, module, "hand_on", GridConfig::new(2, 32, 0), &[&a, &a, &1i32]).unwrap();
    let error = machine.run().unwrap_err();
    assert!(matches!(&error, MachineError::Fault(fault) if fault.kind == FaultKind::Trap), "{error}");

    let config = DeviceConfig { max_blocks_resident: Some(3), ..DeviceConfig::default() };
    let mut machine = Machine::with_config(1, config, None);
    let a = machine.upload(0, "a", &[0u32; 128]).unwrap();
    machine.launch_cooperative(0, module, "hand_on", GridConfig::new(4, 32, 0), &[&a, &a, &1i32]).unwrap();
    let error = machine.run().unwrap_err();
    let MachineError::Launch(LaunchError::NotResident { blocks: 4, resident: 3, .. }) = error else {
        panic!("{error}");
    };
}

/// The address space has no room for both copies.
#[test]
fn a_download_for_which_the_host_has_no_memory_is_an_error() {
    let machine = Machine::new(1);
    let bytes = 1 << 46;
    let array = machine.alloc::<u8>(0, "array", bytes).unwrap();
    let error = array.download().unwrap_err().to_string();
    assert!(error.contains(&format!("{bytes} elements of 1 bytes in the host's memory")), "{error}");
    assert_eq!(array.download_range(bytes - 2..bytes).unwrap(), [0, 0]);
}

#[test]
fn other_registers_of_the_driver_are_zero() {
    let body = "mov.u32 %r1, %envreg0; mov.u32 %r2, %envreg31; or.b32 %r1, %r1, %r2;
        cvt.u64.u32 %rd1, %r1; st.global.u64 [%rd42], %rd1;";
    assert_eq!(run_body("", body, 1, &[5]), [0]);
    assert!(Module::parse(&kernel("", "mov.u32 %r1, %envreg32;")).is_err());
}

#[test]
fn the_host_reads_and_writes_variables_of_a_module() {
    for module in modules() {
        for mut machine in machines(2) {
            // Before the first launch.
            let [counter, other] = [0, 1].map(|at| machine.variable::<u32>(at, &module, "counter").unwrap());
            let table = machine.variable::<f32>(0, &module, "table").unwrap();
            assert_eq!(counter.download().unwrap(), [5]);
            assert_eq!(table.download().unwrap(), [1.0, 2.0, 3.0, 4.0]);
            table.upload(&[10.0, 20.0]).unwrap();
            other.upload(&[100]).unwrap();
            let outs = [0, 1].map(|at| machine.upload(at, "out", &[0f32; 4]).unwrap());
            for (at, out) in outs.iter().enumerate() {
                machine.launch_with(at, &module, "use_variables", GridConfig::new(1, 4, 0), &[out]).unwrap();
            }
            machine.run().unwrap();
            assert_eq!(outs[0].download().unwrap(), [17.0, 29.0, 10.0, 13.0]);
            assert_eq!(outs[1].download().unwrap(), [8.0, 11.0, 10.0, 13.0]);
            assert_eq!((counter.download().unwrap(), other.download().unwrap()), (vec![6], vec![101]));
            let limits = machine.variable::<i32>(0, &module, "limits").unwrap();
            assert_eq!(limits.download().unwrap(), [7, 9]);
        }
    }
}

#[test]
fn variables_are_looked_up_by_name_and_length() {
    let [module, _] = modules();
    let machine = Machine::new(1);
    let refuse = |name: &str| machine.variable::<u64>(0, &module, name).unwrap_err().to_string();
    assert!(
        refuse("count").starts_with("the module has no variable 'count'; it has $str"),
        "{}",
        refuse("count")
    );
    assert_eq!(refuse("counter"), "variable 'counter' has 4 bytes, which are no whole numbers of 8 bytes");
    assert_eq!(machine.variable::<u64>(0, &module, "table").unwrap().len(), 2);
    let counter = machine.variable::<u32>(0, &module, "counter").unwrap();
    assert!(counter.upload(&[1, 2]).unwrap_err().to_string().contains("2 numbers for an array of 1"));
    let memory = machine.memory(0).unwrap();
    assert_eq!(memory.variable(&module, "counter").unwrap(), Some((counter.addr(), 4)));
    assert_eq!(memory.variable(&module, "nothing").unwrap(), None);
    assert!(module.variables().any(|(name, bytes)| (name, bytes) == ("limits", 8)));
    let empty = Module::parse(HEAD).unwrap();
    assert_eq!(memory.variable(&empty, "counter").unwrap(), None);
}

#[test]
fn initialisers_come_before_all_kernels_and_the_host() {
    // The kernel still runs while the host reads a variable that nothing writes, and another kernel
    // reads it.
    let [module, _] = modules();
    for_each_seed(tier(4, 40), |seed| {
        let mut machine = Machine::checked(2, seed);
        let out = machine.upload(0, "out", &[0f32; 4]).unwrap();
        machine.launch_with(0, &module, "use_variables", GridConfig::new(1, 4, 0), &[&out]).unwrap();
        machine.run().unwrap();
        // First read after the launch.
        assert_eq!(
            machine.variable::<f32>(0, &module, "table").unwrap().download().unwrap(),
            [1.0, 2.0, 3.0, 4.0]
        );
        let counter = machine.variable::<u32>(0, &module, "counter").unwrap();
        assert_eq!(counter.download().unwrap(), [6]);
        counter.upload(&[0]).unwrap();
    });
}
