//! The table of words in `docs/waits.md`: expired waits are provoked for all of them, and the text of
//! each error is the page's.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::internal::driver::{Executor, Hooks, ManualGpus, Stop};
use epoxide::internal::transport::Shaping;
use epoxide::low_latency::{Options, Shape};
use epoxide::throughput::{CachedDispatchRequest, CombineRequest};
use epoxide::transport::TransportKind;
use epoxide::{Error, Result};
use epoxide_gpu::layout::Wait;
use epoxide_testing::harness::{NodeLinks, Rank, Setup, run_ranks};
use epoxide_testing::lockstep;

use crate::low_latency::ones::Ones;
use crate::promises::status;
use crate::turns::{Inputs, ROW, TOPK, Turn, combine_in_pool, echo};

/// Short, so that kernels read the clock every few polls.
const DEADLINE: Duration = Duration::from_millis(1);
/// Most points of the operations at which a rank stops, until errors have named all words.
const POINTS: u64 = 1024;

/// Codes of the page that no test provokes, each with the reason.
const NOT_PROVOKED: [(Wait, &str); 1] = [(
    Wait::LowLatencyQueue,
    "a ring has 256 requests, and a rank that is ahead of its peers by an operation has posted four",
)];

/// A row of the page's table.
#[derive(Debug)]
struct Row {
    operations: Vec<String>,
    /// The words, and the code of each.
    words: Vec<(String, String)>,
}

/// The page of waits: its table of words, and the text of an error.
struct Page {
    rows: Vec<Row>,
    text: String,
}

impl Page {
    fn read() -> Page {
        let page = include_str!("../../docs/waits.md");
        let text = page.split("```").nth(1).and_then(|block| block.strip_prefix("text\n")).unwrap();
        let table = page.split("| operation | the word in the text | code (`layout::Wait`) |\n").nth(1);
        let lines = table.unwrap().lines().skip(1).take_while(|line| line.starts_with('|'));
        let quoted =
            |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
        let row = |line: &str| {
            let [_, operations, words, codes, _] = line.split('|').collect::<Vec<_>>()[..] else {
                panic!("{line}")
            };
            let (words, codes) = (quoted(words), quoted(codes));
            assert_eq!(words.len(), codes.len(), "{line}");
            Row { operations: quoted(operations), words: words.into_iter().zip(codes).collect() }
        };
        Page { rows: lines.map(row).collect(), text: text.trim_end().replace('\n', " ") }
    }

    /// All codes of the table.
    fn codes(&self) -> BTreeSet<String> {
        self.rows.iter().flat_map(|row| &row.words).map(|(_, code)| code.clone()).collect()
    }

    /// Compares an error with the page, for which the device has recorded `code`. Returns the name
    /// of the code.
    fn check(&self, error: &Error, code: i64) -> String {
        let Error::PeerTimeout {
            rank,
            peer,
            operation,
            place,
            late_ranks,
            word,
            epoch,
            needed,
            seen,
            waited,
            other_causes,
        } = error
        else {
            panic!("{error} is no PeerTimeout")
        };
        let of_operation = self.rows.iter().filter(|row| row.operations.iter().any(|it| it == operation));
        let named = of_operation.flat_map(|row| &row.words).find(|(text, _)| text == word);
        let (_, name) = named.unwrap_or_else(|| panic!("the page has no {word:?} of {operation}: {error}"));
        let recorded = CODES.iter().find(|wait| **wait as i64 == code);
        assert_eq!(recorded.map(|wait| format!("{wait:?}")).as_ref(), Some(name), "{error}");
        assert!(*waited >= DEADLINE, "{error}");
        let late: Vec<_> = late_ranks.iter().map(u32::to_string).collect();
        let late = match late.split_last() {
            Some((last, [])) => format!("rank {last}"),
            Some((last, others)) => format!("ranks {} and {last}", others.join(", ")),
            None => panic!("no rank is late: {error}"),
        };
        let place = place.map_or(String::new(), |place| format!(" in place {place}"));
        let mut want = self.text.clone();
        for (of_page, of_error) in [
            ("rank R waited T", format!("rank {rank} waited {waited:?}")),
            ("in OPERATION [in place P]", format!("in {operation}{place}")),
            ("(epoch E)", format!("(epoch {epoch})")),
            ("for WORD of rank P", format!("for {word} of rank {peer}")),
            ("needed N, saw S", format!("needed {needed}, saw {seen}")),
            ("rank P may have died", format!("{late} may have died")),
            ("[; OTHER CAUSES]", other_causes.to_string()),
        ] {
            assert!(want.contains(of_page), "the page's text has no {of_page:?}");
            want = want.replacen(of_page, &of_error, 1);
        }
        assert_eq!(error.to_string(), want);
        name.clone()
    }
}

/// Waits for peers that may expire.
const CODES: [Wait; 21] = [
    Wait::Counts,
    Wait::NodeCounts,
    Wait::RelayedCounts,
    Wait::NotifyQueue,
    Wait::DispatchReady,
    Wait::DispatchDone,
    Wait::DispatchNodeReady,
    Wait::DispatchArrival,
    Wait::DispatchQueue,
    Wait::CombineReady,
    Wait::CombineDone,
    Wait::Staged,
    Wait::CombineNodeReady,
    Wait::CombineArrival,
    Wait::CombineQueue,
    Wait::LowLatencyReady,
    Wait::LowLatencyEnter,
    Wait::LowLatencyIds,
    Wait::LowLatencyRows,
    Wait::LowLatencyReturned,
    Wait::LowLatencyQueue,
];

/// The error of a rank whose wait has expired, and the recorded code.
type Expired = (Error, i64);

/// Runs `operations` with a rank stopped at points spread over them, until the other ranks' errors
/// have named all words of `codes`. Returns the names of all codes found.
fn sweep(
    page: &Page,
    lost: u32,
    codes: &[Wait],
    operations: impl Fn(&Arc<Stop>, u64) -> Vec<Expired>,
) -> BTreeSet<String> {
    let wanted: BTreeSet<String> = codes.iter().map(|code| format!("{code:?}")).collect();
    let counting = Stop::of(lost);
    assert!(operations(&counting, u64::MAX).is_empty(), "no rank was lost");
    let executed = u64::MAX - counting.left();
    let mut seen = BTreeSet::new();
    for point in 0..POINTS {
        // Points that follow each other are far apart.
        let at = executed * (point * 109 % POINTS) / POINTS;
        let new: Vec<_> =
            operations(&Stop::of(lost), at).iter().map(|(error, code)| page.check(error, *code)).collect();
        seen.extend(new);
        if wanted.is_subset(&seen) {
            return seen;
        }
    }
    panic!("no point of {executed} instructions has {:?}", wanted.difference(&seen));
}

/// Dispatches and combines of high throughput: with counts and of a tensor, then cached and of rows
/// in the pool.
fn high_throughput(nodes: Option<NodeLinks>, tokens: &[u32], stop: &Arc<Stop>, after: u64) -> Vec<Expired> {
    let ranks = tokens.len() as u32;
    let channels = if nodes.is_none() { 1 } else { 2 };
    let turn = Turn::random(0, tokens, channels);
    let mut setup = Setup::new(ranks, channels, 8, ROW).max_topk(TOPK).nodes(nodes).timeout(DEADLINE);
    setup.device.hooks.executor = Executor::Manual(ManualGpus::new(3));
    setup.device.hooks.stop = Some(stop.clone());
    let mut ranks = lockstep::run(ranks, |group| Rank::join(&setup, group)).unwrap();
    let inputs: Vec<_> = ranks.iter().map(|rank| Inputs::upload(&turn, rank).unwrap()).collect();
    stop.after(after);
    let enqueue = |rank: &mut Rank, inputs: &Inputs| -> Result<()> {
        let mut place = rank.place()?;
        let output = inputs.dispatch(rank, &mut place)?;
        let handle = output.handle.clone();
        rank.combine(CombineRequest::new(&output.recv_x, &handle))?;
        drop(output);
        drop(rank.dispatch_cached(&mut place, CachedDispatchRequest::new(&inputs.x, &handle))?);
        combine_in_pool(rank, &place, &handle).map(drop)
    };
    for (rank, inputs) in ranks.iter_mut().zip(&inputs) {
        enqueue(rank, inputs).unwrap();
    }
    let (lost, others) = ranks.split_last().unwrap();
    let outcome = |rank: &Rank| {
        let error = rank.outcome().err()?;
        Some((error, status(&rank.stream, rank.buffer.status_ptr()).unwrap()))
    };
    let expired = others.iter().filter_map(outcome).collect();
    if after != u64::MAX {
        stop.go_on();
    }
    lost.stream.synchronize().unwrap();
    expired
}

/// Two dispatches of low latency into a place, and a combine.
fn low_latency(stop: &Arc<Stop>, after: u64) -> Vec<Expired> {
    const RANKS: u32 = 2;
    let machine = ManualGpus::new(3);
    let shape = Shape { max_tokens: 4, hidden: 2048, num_topk: 2, num_experts: 4 };
    let mut ranks = lockstep::run(RANKS, |group| {
        let executor = Executor::Manual(machine.clone());
        let hooks = Hooks { executor, stop: Some(stop.clone()), ..Hooks::default() };
        let config = VirtConfig { ordinal: group.rank(), sm_count: 4, hooks, ..VirtConfig::default() };
        let ids = [0, 3, 1, 0, 2, -1, -1, 1];
        let options = |options: Options| options.packet_tokens(0).timeout(DEADLINE);
        Ones::new(VirtualGpu::new(config), group, shape, options, &ids)
    })
    .unwrap();
    stop.after(after);
    let enqueue = |rank: &mut Ones| -> Result<()> {
        let mut place = rank.buffer.place(0)?;
        drop(rank.dispatch(&mut place)?);
        let received = rank.dispatch(&mut place)?;
        rank.combine(received).map(drop)
    };
    ranks.iter_mut().try_for_each(enqueue).unwrap();
    let outcome = |rank: &Ones| {
        let error = rank.outcome().err()?;
        Some((error, status(&rank.stream, rank.buffer.status_ptr()).unwrap()))
    };
    let expired = outcome(&ranks[0]).into_iter().collect();
    if after != u64::MAX {
        stop.go_on();
    }
    ranks[1].stream.synchronize().unwrap();
    expired
}

/// A round trip of two nodes whose link from rank 1 to rank 0 breaks after so many puts.
fn with_broken_link(puts: u64) -> Vec<Expired> {
    let turn = Turn::random(0, &[3, 3], 1);
    let nodes = NodeLinks { ranks_per_node: 1, transport: TransportKind::Shm, queues: 1 };
    run_ranks(2, |number, group| {
        let mut setup = Setup::new(2, 1, 8, ROW).max_topk(TOPK).nodes(Some(nodes)).timeout(DEADLINE);
        if number == 1 {
            setup.fields().transport.hooks.shaping = Some(Shaping::new(1).cut_after(0, puts));
        }
        let mut rank = Rank::join(&setup, group)?;
        let (inputs, mut place) = turn.begin(&rank)?;
        // The wait may have expired while calls are still being made.
        let made = echo(&mut rank, &mut place, &inputs).map(drop);
        rank.stream.synchronize()?;
        let error = made.and_then(|()| rank.buffer.check()).expect_err("the link is broken");
        let code = status(&rank.stream, rank.buffer.status_ptr())?;
        rank.synchronize()?;
        Ok((error, code))
    })
}

#[test]
fn every_word_of_the_page_is_that_of_an_error() {
    let page = Page::read();
    let mut seen = sweep(
        &page,
        1,
        &[
            Wait::Counts,
            Wait::DispatchReady,
            Wait::DispatchDone,
            Wait::CombineReady,
            Wait::CombineDone,
            Wait::Staged,
        ],
        |stop, after| high_throughput(None, &[8, 5], stop, after),
    );
    let across = [
        Wait::NodeCounts,
        Wait::RelayedCounts,
        Wait::DispatchNodeReady,
        Wait::DispatchArrival,
        Wait::CombineNodeReady,
        Wait::CombineArrival,
    ];
    let nodes = NodeLinks { ranks_per_node: 2, transport: TransportKind::Direct, queues: 1 };
    seen.extend(sweep(&page, 3, &across, |stop, after| {
        high_throughput(Some(nodes), &[8, 5, 6, 7], stop, after)
    }));
    let words = [
        Wait::LowLatencyReady,
        Wait::LowLatencyEnter,
        Wait::LowLatencyIds,
        Wait::LowLatencyRows,
        Wait::LowLatencyReturned,
    ];
    seen.extend(sweep(&page, 1, &words, low_latency));
    // Counts, the word of readiness and rows, then the two of a combine.
    for puts in [0, 2, 4] {
        seen.extend(with_broken_link(puts).iter().map(|(error, code)| page.check(error, *code)));
    }
    for (code, reason) in NOT_PROVOKED {
        assert!(seen.insert(format!("{code:?}")), "{code:?} was provoked, though {reason}");
    }
    assert_eq!(seen, page.codes());
}
