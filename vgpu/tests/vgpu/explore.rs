//! Explorations: every schedule of small kernels, and every value that weak memory has for them.

use std::collections::BTreeSet;

use epoxide_vgpu::{
    CheckConfig, Coverage, DeviceConfig, Explore, Explored, GridConfig, Machine, MachineError, Module, Path,
};

use crate::cases::SHARED;
use crate::common::{kernel, launch, run_numbered};

/// Races are no reports: only values matter.
fn values() -> CheckConfig {
    CheckConfig { races: false, ..CheckConfig::default() }
}

/// The same, and loads may return older values.
fn weak() -> CheckConfig {
    CheckConfig { weak_memory: Some(0), ..values() }
}

/// A kernel of 32-bit words, of which all are 0 at first.
struct Program {
    module: Module,
    shape: GridConfig,
    check: Option<CheckConfig>,
}

impl Program {
    fn new(body: &str, shape: GridConfig, check: impl Into<Option<CheckConfig>>) -> Self {
        let ptx = kernel(SHARED, body);
        let module = Module::parse(&ptx).unwrap_or_else(|e| panic!("{e}\n{ptx}"));
        Self { module, shape, check: check.into() }
    }

    fn run(&self, path: &Path) -> Result<Vec<u32>, MachineError> {
        let mut machine = Machine::with_config(1, DeviceConfig::default(), self.check).explored(path);
        let words = machine.upload(0, "words", &[0u32; 64])?;
        machine.launch_with(0, &self.module, "k", self.shape, &[&words])?;
        machine.run()?;
        words.download()
    }

    /// The values of some words at the end of all runs.
    fn outcomes<const N: usize>(
        &self,
        explore: Explore,
        words: [usize; N],
    ) -> (BTreeSet<[u32; N]>, Explored<MachineError>) {
        let mut found = BTreeSet::new();
        let explored = explore.run(|path| {
            let all = self.run(path)?;
            found.insert(words.map(|word| all[word]));
            Ok(())
        });
        (found, explored)
    }
}

/// Divides the threads of two blocks, of which each has one.
const TWO_BLOCKS: &str = "mov.u32 %r41, %ctaid.x; setp.ne.u32 %p9, %r41, 0; mov.u32 %r1, 1; mov.u32 %r2, 2;
    @%p9 bra SECOND;";

/// A computation that takes a while and touches nothing.
fn computes(label: &str) -> String {
    format!("mov.u32 %r30, 60;\n{label}: sub.u32 %r30, %r30, 1; setp.ne.u32 %p8, %r30, 0; @%p8 bra {label};")
}

/// The second block must find both words in the moment in which they are 1.
fn two_moments() -> String {
    let [a, b, c] = ["A", "B", "C"].map(computes);
    format!(
        "{TWO_BLOCKS}
        {a} st.relaxed.gpu.global.u32 [%rd40], 1; st.relaxed.gpu.global.u32 [%rd40], 0;
        {b} st.relaxed.gpu.global.u32 [%rd40+4], 1; st.relaxed.gpu.global.u32 [%rd40+4], 0;
        bra END;
        SECOND:
        {c} ld.relaxed.gpu.global.u32 %r3, [%rd40]; ld.relaxed.gpu.global.u32 %r4, [%rd40+4];
        and.b32 %r3, %r3, %r4; st.global.u32 [%rd40+8], %r3;
        END:"
    )
}

#[test]
fn a_fault_of_a_rare_schedule_is_found() {
    let program = Program::new(&two_moments(), launch(2, 1), values());
    let found = (0..300).filter(|&seed| {
        let words = run_numbered(&program.module, program.shape, seed, Some(values())).unwrap();
        words[1] as u32 != 0
    });
    let found = found.count();
    assert!(found < 3, "{found} of 300 seeds show it, so it is no rare one");
    let search = |path: &Path| match program.run(path).expect("no fault")[2] {
        0 => Ok(()),
        _ => Err("both"),
    };
    // Three preemptions between the blocks, at three places.
    assert_eq!(Explore::new().preemptions(2).run(search).coverage, Coverage::Preemptions(2));
    let explored = Explore::new().preemptions(3).run(search);
    let failure = explored.failure.expect("the schedule is there");
    assert_eq!((failure.error, failure.preemptions), ("both", 3));
    assert!(explored.runs < 200, "{} runs", explored.runs);
    assert_eq!(Explore::replay(&failure.schedule, search), Err("both"));
    assert_eq!(Explore::new().run(search).failure.map(|failure| failure.error), Some("both"));
}

#[test]
fn weak_memory_shows_a_missing_acquire_and_none_where_it_is() {
    let message = |load: &str| {
        format!(
            "{TWO_BLOCKS}
            st.global.u32 [%rd40], 7; st.release.gpu.global.u32 [%rd40+4], 1;
            bra END;
            SECOND:
            ld.{load}.gpu.global.u32 %r3, [%rd40+4]; setp.eq.u32 %p1, %r3, 0; @%p1 bra SECOND;
            ld.global.u32 %r4, [%rd40]; st.global.u32 [%rd40+8], %r4;
            END:"
        )
    };
    for (load, seen) in [("relaxed", vec![[0], [7]]), ("acquire", vec![[7]])] {
        let program = Program::new(&message(load), launch(2, 1), weak());
        let (found, explored) = program.outcomes(Explore::new(), [2]);
        assert_eq!(explored.coverage, Coverage::Complete, "{load}: {:?}", explored.failure);
        assert_eq!(found.into_iter().collect::<Vec<_>>(), seen, "{load}");
    }
}

#[test]
fn a_value_that_is_missed_leaves_a_wait_without_end() {
    let body = format!(
        "{TWO_BLOCKS}
        st.relaxed.gpu.global.u32 [%rd40], 1; st.relaxed.gpu.global.u32 [%rd40], 2;
        bra END;
        SECOND:
        ld.relaxed.gpu.global.u32 %r3, [%rd40]; setp.ne.u32 %p1, %r3, 1; @%p1 bra SECOND;
        END:"
    );
    for check in [None, Some(values()), Some(weak())] {
        let program = Program::new(&body, launch(2, 1), check);
        let run = |path: &Path| program.run(path).map(drop);
        let failure = Explore::new().run(run).failure.expect("the value is missed");
        assert!(failure.error.to_string().contains("only wait"), "{}", failure.error);
        let again = Explore::replay(&failure.schedule, run).expect_err("the same schedule");
        assert!(again.to_string().contains("only wait"), "{again}");
    }
}

#[test]
fn a_barrier_leaves_one_outcome() {
    let body = |barrier: &str| {
        format!(
            "mov.u32 %r1, DATA; mad.lo.u32 %r2, %r40, 4, %r1; setp.eq.u32 %p1, %r40, 0; setp.eq.u32 %p2, %r40, 32;
            mov.u32 %r3, 0; st.shared.u32 [%r2], %r3; bar.sync 0; mov.u32 %r3, 1;
            @%p1 st.shared.u32 [%r1], %r3; @%p2 st.shared.u32 [%r1+128], %r3; {barrier}
            @%p1 ld.shared.u32 %r4, [%r1+128]; @%p2 ld.shared.u32 %r4, [%r1];
            @%p1 st.global.u32 [%rd40], %r4; @%p2 st.global.u32 [%rd40+4], %r4;"
        )
    };
    let (found, explored) =
        Program::new(&body("bar.sync 0;"), launch(1, 64), values()).outcomes(Explore::new(), [0, 1]);
    assert_eq!((found, explored.coverage), (BTreeSet::from([[1, 1]]), Coverage::Complete));
    let (found, explored) = Program::new(&body(""), launch(1, 64), values()).outcomes(Explore::new(), [0, 1]);
    let any = BTreeSet::from([[0, 1], [1, 0], [1, 1]]);
    assert_eq!((found, explored.coverage), (any, Coverage::Complete));
    let checked = Program::new(&body(""), launch(1, 64), CheckConfig::default());
    let error = checked.outcomes(Explore::new(), []).1.failure.expect("a race").error.to_string();
    assert!(error.contains("data race"), "{error}");
}

#[test]
fn copies_move_at_every_point_up_to_their_wait() {
    let body = |wait: &str| {
        format!(
            "mov.u32 %r1, DATA; mov.u32 %r2, 5; mov.u32 %r3, 9;
            st.shared.u32 [%r1], %r2; st.global.u32 [%rd40], %r3;
            cp.async.ca.shared.global [%r1], [%rd40], 4; {wait}
            ld.shared.u32 %r4, [%r1]; st.global.u32 [%rd40+4], %r4;
            st.global.u32 [%rd40], %r2; cp.async.wait_all;
            ld.shared.u32 %r5, [%r1]; st.global.u32 [%rd40+8], %r5;"
        )
    };
    for (wait, outcomes) in
        [("", BTreeSet::from([[5, 5], [5, 9], [9, 9]])), ("cp.async.wait_all;", BTreeSet::from([[9, 9]]))]
    {
        for check in [None, Some(values())] {
            let (found, explored) =
                Program::new(&body(wait), launch(1, 1), check).outcomes(Explore::new(), [1, 2]);
            assert_eq!((&found, explored.coverage), (&outcomes, Coverage::Complete), "'{wait}'");
        }
    }
}

#[test]
fn kernels_of_two_devices_interleave() {
    let module = Module::parse(&kernel(
        "",
        "ld.global.u32 %r1, [%rd40]; add.u32 %r1, %r1, 1; st.global.u32 [%rd40], %r1;",
    ))
    .unwrap();
    let mut sums = BTreeSet::new();
    let explored = Explore::new().run(|path| {
        let mut machine = Machine::with_config(2, DeviceConfig::default(), Some(values())).explored(path);
        let word = machine.upload(0, "word", &[0u32])?;
        let peer = machine.map(1, &word)?;
        for (device, word) in [&word, &peer].into_iter().enumerate() {
            for _ in 0..2 {
                machine.launch_with(device, &module, "k", launch(1, 1), &[word])?;
            }
        }
        machine.run()?;
        sums.extend(word.download()?);
        Ok::<(), MachineError>(())
    });
    assert_eq!((sums, explored.coverage), (BTreeSet::from([2, 3, 4]), Coverage::Complete));
}

#[test]
fn loads_come_behind_later_stores() {
    let all = BTreeSet::from([[0, 0], [0, 1], [1, 0], [1, 1]]);
    // Arithmetic between the two changes nothing, also that with a register which nothing writes.
    for between in ["", "add.u32 %r5, %r1, 1;", "add.u32 %r5, %r7, 1;"] {
        let body = format!(
            "{TWO_BLOCKS}
            ld.global.u32 %r3, [%rd40]; {between} st.global.u32 [%rd40+4], %r1;
            st.global.u32 [%rd40+8], %r3;
            bra END;
            SECOND:
            ld.global.u32 %r4, [%rd40+4]; {between} st.global.u32 [%rd40], %r1;
            st.global.u32 [%rd40+12], %r4;
            END:"
        );
        let program = Program::new(&body, launch(2, 1), weak());
        for explore in [Explore::new().preemptions(9), Explore::new()] {
            let (found, explored) = program.outcomes(explore, [2, 3]);
            assert_eq!((found, explored.coverage), (all.clone(), Coverage::Complete), "{between}");
        }
    }
}

#[test]
fn a_kernel_that_does_not_end_is_reported() {
    let body = "L: ld.global.u32 %r1, [%rd40]; add.u32 %r1, %r1, 1; st.global.u32 [%rd40], %r1; bra L;";
    let endless = Program::new(body, launch(1, 1), None);
    let explored = Explore::new().run(|path| endless.run(path).map(drop));
    let error = explored.failure.unwrap().error.to_string();
    assert!(error.contains("livelock: 10485"), "{error}");
}
