//! Bad input that is of several nodes alone: every error names the argument, its value and the
//! rule, and leaves the buffer usable.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use epoxide::DType;
use epoxide::group::ProcessGroup;
use epoxide::throughput::{CachedDispatchRequest, CombineRequest, Config, Counts, DispatchRequest};
use epoxide::transport::TransportKind;
use epoxide::{Error, Result};
use epoxide_testing::lockstep;

use crate::turns::{HIDDEN, Inputs, ROW, Turn, check_sums, echo};
use crate::valid::{EXPERTS, RANKS, TOKENS, bytes_in_pool, errors_of, refused, tensor, then_dispatch};
use epoxide_testing::harness::{NodeLinks, PATIENCE, POISON, Rank, Setup, assert_names};

const NODES_OF_ONE: NodeLinks = NodeLinks { ranks_per_node: 1, transport: TransportKind::Shm, queues: 2 };

/// Two nodes of one rank.
fn setup() -> Setup {
    Setup::new(RANKS, 2, TOKENS as u32, 64).nodes(Some(NODES_OF_ONE))
}

/// Errors of every rank that is rejected, sorted by text.
fn refusals(ranks: u32, change: impl Fn(u32, &mut Setup) + Sync) -> Vec<String> {
    errors_of(ranks, |group| {
        let mut setup = Setup { ranks, ..setup() }.nodes(Some(NODES_OF_ONE));
        change(group.rank(), &mut setup);
        Rank::join(&setup, group)
    })
}

#[test]
fn ranks_must_fill_their_nodes() {
    for (ranks, ranks_per_node, rule) in [
        (3, 2, "must divide the number of ranks, 3"),
        (2, 4, "must divide the number of ranks, 2"),
        (2, 0, "1 to 8 ranks"),
        (2, 9, "1 to 8 ranks"),
        (33, 1, "33 ranks would be 33 nodes; at most 32 are possible"),
    ] {
        let errors = refusals(ranks, |_, setup| setup.fields().ranks_per_node = Some(ranks_per_node));
        assert_eq!(errors.len() as u32, ranks, "every rank must refuse: {errors:?}");
        let expected = format!("ranks_per_node = {ranks_per_node}: ");
        for error in errors {
            assert!(error.starts_with(&expected) && error.contains(rule), "{error}");
        }
    }
}

#[test]
fn more_ranks_than_a_node_has_need_their_number() {
    let errors = refusals(65, |_, setup| setup.fields().ranks_per_node = None);
    let named = |error: &String| error.contains("group size = 65") && error.contains("set ranks_per_node");
    assert!(errors.len() == 65 && errors.iter().all(named), "{errors:?}");
}

/// The rule for the configuration of the original acceptance test, which a struct literal may
/// break.
#[test]
fn chunks_must_fit_their_rings() {
    let seed = Config::new(4, 8, 256, 16, 128).expect("a configuration that is used");
    for (nodes, config, parts) in [
        (3, seed, ["num_max_nvl_chunked_recv_tokens = 256", "256 % 3 != 0"]),
        (16, seed, ["num_max_nvl_chunked_recv_tokens = 256", "256 / 16 = 16, not above 16"]),
        (
            2,
            Config { num_max_nvl_chunked_send_tokens: 200, ..seed },
            ["num_max_nvl_chunked_send_tokens = 200", "256 / 2 = 128"],
        ),
        (
            2,
            Config { num_max_rdma_chunked_recv_tokens: 120, ..seed },
            ["num_max_rdma_chunked_recv_tokens = 120", "120 % 16 != 0"],
        ),
        (
            2,
            Config { num_max_rdma_chunked_send_tokens: 0, num_max_rdma_chunked_recv_tokens: 0, ..seed },
            ["num_max_rdma_chunked_send_tokens = 0", "must be positive"],
        ),
        (2, Config { num_sms: 5, ..seed }, ["num_sms = 5", "must be even"]),
    ] {
        let errors = refusals(nodes, |_, setup| setup.fields().config = config);
        assert_eq!(errors.len() as u32, nodes, "every rank must refuse: {errors:?}");
        for error in errors {
            assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}: {error}");
        }
    }
    for (config, parts) in [
        (Config::new(20, 256, 256, 6, 128), ["num_max_nvl_chunked_send_tokens = 256", "recv_tokens = 256"]),
        (Config::new(20, 6, 256, 128, 128), ["num_max_rdma_chunked_send_tokens = 128", "recv_tokens = 128"]),
        (Config::new(20, 6, 256, 0, 128), ["num_max_rdma_chunked_send_tokens = 0", "positive"]),
        (Config::new(21, 6, 256, 6, 128), ["num_sms = 21", "even"]),
    ] {
        assert_names(&config.expect_err("the rule is broken"), &parts);
    }
}

#[test]
fn a_buffer_does_not_take_a_configuration_that_its_nodes_rule_out() {
    then_dispatch(setup(), |rank, _, _| {
        let odd = Config { num_max_nvl_chunked_recv_tokens: 255, ..*rank.buffer.config() };
        refused(rank.buffer.set_config(odd), &["num_max_nvl_chunked_recv_tokens = 255", "255 % 2 != 0"]);
        let odd = Config { num_sms: 21, ..*rank.buffer.config() };
        refused(rank.buffer.set_config(odd), &["num_sms = 21", "must be even"]);
        Ok(())
    });
}

#[test]
fn the_default_configuration_suits_three_nodes() {
    let mut setup = Setup::new(3, 1, TOKENS as u32, 64).nodes(Some(NODES_OF_ONE));
    setup.fields().config = Config::default();
    setup.run(|rank| {
        rank.buffer.set_config(Config::default())?;
        assert_eq!(rank.buffer.config().num_max_nvl_chunked_recv_tokens, 258);
        Ok(())
    });
}

#[test]
fn a_cached_dispatch_takes_more_than_one_channel() {
    let one = Setup::new(RANKS, 1, TOKENS as u32, 64).nodes(Some(NODES_OF_ONE));
    then_dispatch(one, |rank, valid, place| {
        let handle = rank.dispatch(place, valid.request())?.handle;
        let cached = rank.dispatch_cached(place, CachedDispatchRequest::new(&valid.x, &handle));
        refused(cached, &["num_sms = 2", "more than 3"]);
        rank.stream.synchronize()
    });
}

/// A group whose rank 1 reports another version.
#[derive(Debug)]
struct Tampered(Arc<dyn ProcessGroup>);

impl ProcessGroup for Tampered {
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    fn size(&self) -> u32 {
        self.0.size()
    }

    fn timeout(&self) -> Duration {
        self.0.timeout()
    }

    fn barrier(&self, timeout: Duration) -> Result<()> {
        self.0.barrier(timeout)
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut sent = data.to_vec();
        if self.rank() == 1 {
            let version = env!("CARGO_PKG_VERSION").as_bytes();
            let at = data.windows(version.len()).position(|window| window == version);
            let at = at.expect("ranks tell their version first of all");
            sent.splice(at..at + version.len(), *b"9.9.9-other");
        }
        let mut all = self.0.all_gather(&sent)?;
        all[self.rank() as usize] = data.to_vec();
        Ok(all)
    }

    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>> {
        self.0.broadcast(root, data)
    }

    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        self.0.exchange_fds(fds)
    }
}

#[test]
fn a_rank_of_another_version_is_refused() {
    let setup = Setup { ranks: 3, ..setup() }.nodes(Some(NODES_OF_ONE));
    let errors = errors_of(3, |group| Rank::join(&setup, Arc::new(Tampered(group))));
    let version = env!("CARGO_PKG_VERSION");
    let says = format!("and rank 1 disagree on epoxide's version: {version} here, 9.9.9-other there");
    assert_eq!(errors.iter().filter(|error| error.contains(&says)).count(), 2, "{errors:?}");
}

#[test]
fn rows_that_are_summed_are_floats() {
    then_dispatch(setup(), |rank, valid, place| {
        let output = rank.dispatch(place, valid.request())?;
        let x = tensor(rank, DType::I32, &[2 * TOKENS, 4]);
        let refuses = |name: &str| format!("{name} has dtype i32, expected bf16 or f32 or f16");
        refused(rank.combine(CombineRequest::new(&x, &output.handle)), &[&refuses("x")]);
        let rows = output.combine_rows(DType::I32, 4)?;
        refused(rank.combine(CombineRequest::new(&rows, &output.handle)), &[&refuses("rows")]);
        rank.stream.synchronize()
    });
}

/// Rank 3 would receive 6 tokens of each of four ranks, but there is room for 10 rows.
#[test]
fn too_many_rows_for_one_rank_are_an_error_on_every_rank_before_any_row_moves() {
    const CAPACITY: u64 = 10;
    let spread = NodeLinks { ranks_per_node: 2, ..NODES_OF_ONE };
    let setup = Setup::new(4, 2, 6, ROW).nodes(Some(spread));
    let turn = Turn::random(4, &[2, 3, 1, 2], 2);
    setup.run(|rank| {
        let topk_idx = rank.upload_typed(2, &vec![vec![7i64, 6]; 6])?;
        let x = rank.upload_rows(DType::Bf16, HIDDEN as u64, &vec![vec![9; ROW as usize]; 6])?;
        let layout = rank.layout(&topk_idx, 8)?;
        let inputs = Inputs::upload(&turn, rank)?;
        // A dispatch that fits gives the pool's place.
        let mut place = rank.place()?;
        let (output, _) = echo(rank, &mut place, &inputs)?;
        let whole = bytes_in_pool(&output.recv_x);
        rank.synchronize()?;
        rank.poison(&whole)?;
        rank.group.barrier(PATIENCE)?;
        let counts = Counts::OnDevice { capacity: CAPACITY };
        let request = DispatchRequest::new(&x, &layout).counts(counts);
        let handle = rank.dispatch(&mut place, request)?.handle;
        let error = rank.buffer.check_dispatch(&handle, &rank.stream).expect_err("24 rows do not fit");
        assert_names(&error, &["needs 24 rows, has 10 rows", "rank 3 would receive 24 rows"]);
        // Other ranks may still write when the first one has finished.
        rank.synchronize()?;
        let rows = rank.raw(&whole)?;
        rank.check(rows.iter().all(|&byte| byte == POISON), "no row moved");

        // The buffer still works.
        let (_, back) = echo(rank, &mut place, &inputs)?;
        rank.stream.synchronize()?;
        check_sums(rank, "combined_x afterwards", &back, &turn)?;
        Ok(())
    });
}

#[test]
fn wire_memory_that_is_too_small_is_an_error_on_every_rank_and_says_how_much_is_enough() {
    let with = |bytes: u64| {
        let mut setup = setup();
        setup.fields().num_rdma_bytes = Some(bytes);
        setup
    };
    let least = match lockstep::run(RANKS, |group| Rank::join(&with(0), group)) {
        Err(Error::Capacity { what: "num_rdma_bytes", needed, .. }) => needed,
        other => panic!("{other:?}"),
    };
    let enough = with(least).run(|rank| {
        let topk_idx = rank.upload_typed(2, &vec![vec![0i64, 3]; TOKENS as usize])?;
        let x = rank.upload_rows(DType::Bf16, 32, &vec![vec![1; 64]; TOKENS as usize])?;
        let layout = rank.layout(&topk_idx, EXPERTS)?;
        let request = DispatchRequest::new(&x, &layout);
        let mut place = rank.place()?;
        let error = rank.dispatch(&mut place, request).expect_err("5 tokens for one slot");
        let parts = ["wire memory: needs 5 slots for each node, has 1", "max_tokens >= 5"];
        assert_names(&error, &parts);
        let handle = rank.dispatch(&mut place, request.counts(rank.on_device()))?.handle;
        refused(rank.buffer.check_dispatch(&handle, &rank.stream), &parts);

        // One token fits.
        let topk_idx = rank.upload_typed(2, &[vec![0i64, 3]])?;
        let x = rank.upload_rows(DType::Bf16, 32, &[vec![2; 64]])?;
        let layout = rank.layout(&topk_idx, EXPERTS)?;
        let output = rank.dispatch(&mut place, DispatchRequest::new(&x, &layout))?;
        let rows = rank.row_bytes(&output.recv_x)?;
        rank.equal("recv_x", &rows, &vec![vec![2; 64]; RANKS as usize]);
        rank.stream.synchronize()?;
        let text = error.to_string();
        let bytes = text.split("num_rdma_bytes >= ").nth(1).and_then(|rest| rest.split(' ').next());
        Ok(bytes.and_then(|bytes| bytes.parse::<u64>().ok()).expect("the error says how many bytes"))
    });
    assert_eq!(enough[0], enough[1]);
    then_dispatch(with(enough[0]), |_, _, _| Ok(()));
}
