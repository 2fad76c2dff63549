//! The stages against the fake libnccl of the tests, with threads for processes and virtual GPUs.

use std::process::{Command, Stdio};

use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::group::{HashStore, Store};
use epoxide_testing::{alone, fake_nccl, tier};

use super::stages::Expected;
use super::*;
use crate::testing::parse;

/// A rank beside the fake libnccl.
fn fake_rank(rank: u32, size: u32, store: &Arc<dyn Store>, deadline: Duration) -> Rank {
    Rank {
        rank,
        size,
        act: Act::Together,
        store: store.clone(),
        library: Library::open(fake_nccl::built(&[])).unwrap(),
        device: VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() }),
        deadline,
        timeout: Duration::from_secs(120),
        die: || {},
    }
}

#[test]
fn the_stages_pass_where_all_is_well() {
    // Its deadlines are real, and take 10 s: the long tier.
    if !tier::is_long() {
        return;
    }
    // The environment names the watchdog's files, and belongs to the whole process.
    if std::env::var_os(DEBUG_INFO_FILE).is_none() {
        let dumps = tempfile::tempdir().unwrap();
        let mut alone = alone::one_test("nccl_check::tests::the_stages_pass_where_all_is_well");
        let ended = alone.env(DEBUG_INFO_FILE, dumps.path().join("debug_info_")).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        let said = String::from_utf8_lossy(&ended.stdout);
        assert_eq!(said.matches("ok   together: ").count(), 12, "{said}");
        return;
    }
    let dumps = PathBuf::from(std::env::var_os(DEBUG_INFO_FILE).unwrap());
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    const SIZE: u32 = 3;
    std::thread::scope(|scope| {
        let start = |rank| {
            // The first operation with that deadline has to end before it.
            let rank = fake_rank(rank, SIZE, &store, Duration::from_secs(4));
            let folder = dumps.parent().unwrap();
            scope.spawn(move || stages::run(&rank, folder))
        };
        let ranks: Vec<_> = (0..SIZE).map(start).collect();
        for ended in ranks {
            ended.join().unwrap().unwrap();
        }
    });
}

#[test]
fn a_killed_peer_must_be_noticed_over_sockets() {
    assert!(stages::unnoticed(Act::Killed).is_ok());
    assert!(stages::unnoticed(Act::KilledOverSockets).is_err());
}

#[test]
fn a_stage_that_must_fail_takes_no_other_error() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let rank = fake_rank(0, 2, &store, Duration::from_secs(60));
    let group = |reason: &str| epoxide::Error::Group {
        group: "all".into(),
        rank: 0,
        operation: "create",
        sequence: 0,
        peers: Vec::new(),
        reason: reason.into(),
    };
    let nccl = epoxide::Error::Nccl {
        call: "ncclCommInitRank",
        code: 2,
        name: "unhandled system error".into(),
        detail: String::new(),
    };
    let late = Instant::now().checked_sub(rank.deadline).unwrap();
    let expect = |start, error: &epoxide::Error, expected| {
        rank.expect_error("a call", start, Err::<(), _>(error.clone()), expected)
    };
    assert!(expect(late, &group("too late"), Expected::Deadline).is_ok());
    assert!(expect(late, &group("aborted: the check wants it so"), Expected::Abort).is_ok());
    assert!(expect(Instant::now(), &nccl, Expected::Nccl).is_ok());
    for (start, error, expected) in [
        // Long before the deadline.
        (Instant::now(), &group("too late"), Expected::Deadline),
        (late, &nccl, Expected::Deadline),
        (late, &group("another reason"), Expected::Abort),
        (late, &group("too late"), Expected::Nccl),
    ] {
        let message = expect(start, error, expected).unwrap_err().message.unwrap();
        assert!(
            message.contains("not by what is meant") && message.contains(&error.to_string()),
            "{message}"
        );
    }
    assert!(rank.expect_error("a call", late, Ok(()), Expected::Deadline).is_err());
}

#[test]
fn ranks_are_told_who_they_are() {
    let place: RankOf = "killed:1:4:/tmp/a:b".parse().unwrap();
    assert_eq!((place.act, place.rank, place.size, place.folder), (Act::Killed, 1, 4, "/tmp/a:b".into()));
    assert!("killed:1:4".parse::<RankOf>().is_err() && "gone:1:4:/tmp".parse::<RankOf>().is_err());
}

#[test]
fn times_have_bounds() {
    let of = |flag: &str, seconds: u64| parse::<Args>(["nccl-check", flag, &seconds.to_string()]);
    for flag in ["--deadline", "--timeout"] {
        assert!(of(flag, 1).is_ok() && of(flag, DAY).is_ok());
        for seconds in [0, DAY + 1, u64::MAX] {
            let error = of(flag, seconds).unwrap_err().to_string();
            assert!(error.contains(flag) && error.contains("1..=86400"), "{error}");
        }
    }
}

#[test]
fn ranks_wait_longer_than_a_stage_that_hangs() {
    for times in [["130", "120"], ["5", "4"], ["1", "1"], ["86400", "86400"]] {
        let args: Args = parse(["nccl-check", "--deadline", times[0], "--timeout", times[1]]).unwrap();
        let stage = Duration::from_secs(args.deadline) + Config::default().close_timeout;
        assert!(timeout_of_rank(&args) >= stage + Duration::from_secs(args.timeout), "{times:?}");
    }
}

/// Where the test below and its parent of ranks meet.
const MEET: &str = "EPOXIDE_TEST_MEET";

/// A rank in a driver's call that does not return. The test simulates it by a process that has
/// ended under a debugger, this process. The rank's parent gets no exit status until the debugger
/// has read it.
#[test]
fn a_rank_that_does_not_end_though_killed_is_left_behind() {
    // The deadline is real, and takes 10 s: the long tier.
    if !tier::is_long() {
        return;
    }
    let patience = Instant::now() + Duration::from_secs(120);
    let wait = |what: &dyn Fn() -> bool| {
        while !what() && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(what());
    };
    if let Some(meet) = std::env::var_os(MEET) {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > $0/new && mv $0/new $0/pid; exec sleep 1000"]).arg(&meet);
        let ranks = Ranks(vec![Process::new(0, 0, command.spawn().unwrap())]);
        wait(&|| Path::new(&meet).join("go").exists());
        drop(ranks);
        return;
    }
    let meet = tempfile::tempdir().unwrap();
    let name = "nccl_check::tests::a_rank_that_does_not_end_though_killed_is_left_behind";
    let mut parent = alone::one_test(name);
    let mut parent = parent.env(MEET, meet.path()).stdout(Stdio::null()).spawn().unwrap();
    wait(&|| meet.path().join("pid").exists());
    let pid: i32 = std::fs::read_to_string(meet.path().join("pid")).unwrap().trim().parse().unwrap();
    // SAFETY: the call takes no address; the process is one that this one's child has started.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
    assert_eq!(seized, 0, "ptrace, which the kernel lets a process do to what it has started");
    std::fs::write(meet.path().join("go"), "").unwrap();
    while parent.try_wait().unwrap().is_none() && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(5));
    }
    // Ends a parent that still waits for its rank.
    let _ = parent.kill();
    assert!(parent.wait().unwrap().success());
}
