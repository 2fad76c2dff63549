//! Bad input across nodes: every error names the argument, its value and the rule, and leaves the buffer usable. What does
//! not depend on nodes is in `intranode/errors.rs`.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use epoxide::ep::{Buffer, CombineRequest, CombineRows, Config, Counts, DType, DispatchRequest, StreamOrder};
use epoxide::group::ProcessGroup;
use epoxide::transport::TransportKind;
use epoxide::{Error, Result};
use epoxide_testing::lockstep;

use crate::harness::{Nodes, PATIENCE, POISON, Rank, Setup, assert_names};
use crate::turns::{HIDDEN, Inputs, ROW, Turn, echo};
use crate::valid::{EXPERTS, RANKS, TOKENS, refused, tensor, then_dispatch};

const NODES_OF_ONE: Nodes = Nodes { ranks_per_node: 1, transport: TransportKind::Shm, queues: 2 };

/// Two nodes of one rank.
fn setup() -> Setup {
    Setup::new(RANKS, 2, TOKENS as u32, 64).nodes(Some(NODES_OF_ONE))
}

/// What every rank says that is refused, in the order of the texts.
fn refusals(ranks: u32, change: impl Fn(u32, &mut Setup) + Sync) -> Vec<String> {
    let errors = Mutex::new(Vec::new());
    let _ = lockstep::run(ranks, |group| {
        let mut setup = Setup { ranks, ..setup() }.nodes(Some(NODES_OF_ONE));
        change(group.rank(), &mut setup);
        let made = Rank::join(&setup, group);
        errors.lock().expect("no panic").extend(made.as_ref().err().map(ToString::to_string));
        made
    });
    let mut errors = errors.into_inner().expect("no panic");
    errors.sort();
    errors
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
        let errors = refusals(ranks, |_, setup| setup.options.ranks_per_node = Some(ranks_per_node));
        assert_eq!(errors.len() as u32, ranks, "every rank must refuse: {errors:?}");
        let expected = format!("ranks_per_node = {ranks_per_node}: ");
        for error in errors {
            assert!(error.starts_with(&expected) && error.contains(rule), "{error}");
        }
    }
}

#[test]
fn more_ranks_than_a_node_has_need_their_number() {
    let errors = refusals(9, |_, setup| setup.options.ranks_per_node = None);
    let named = |error: &String| error.contains("group size = 9") && error.contains("set ranks_per_node");
    assert!(errors.len() == 9 && errors.iter().all(named), "{errors:?}");
}

/// Of the configuration of the original acceptance test, as a struct literal may break them.
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
    ] {
        let errors = refusals(nodes, |_, setup| setup.options.config = config);
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
    then_dispatch(setup(), |rank, _| {
        let odd = Config { num_max_nvl_chunked_recv_tokens: 255, ..*rank.buffer.config() };
        refused(rank.buffer.set_config(odd), &["num_max_nvl_chunked_recv_tokens = 255", "255 % 2 != 0"]);
        Ok(())
    });
}

#[test]
fn a_cached_dispatch_takes_more_than_one_channel() {
    let one = Setup::new(RANKS, 1, TOKENS as u32, 64).nodes(Some(NODES_OF_ONE));
    then_dispatch(one, |rank, valid| {
        let handle = rank.dispatch(valid.request())?.handle;
        refused(rank.dispatch_cached(&valid.x, None, &handle), &["num_sms = 2", "more than 3"]);
        rank.stream.synchronize()
    });
}

/// A group whose rank 1 says that it runs another version.
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
    let errors = Mutex::new(Vec::new());
    let setup = Setup { ranks: 3, ..setup() }.nodes(Some(NODES_OF_ONE));
    let _ = lockstep::run(3, |group| {
        let made = Rank::join(&setup, Arc::new(Tampered(group)));
        errors.lock().expect("no panic").extend(made.as_ref().err().map(ToString::to_string));
        made
    });
    let errors = errors.into_inner().expect("no panic");
    let version = env!("CARGO_PKG_VERSION");
    let says = format!("and rank 1 disagree on epoxide's version: {version} here, 9.9.9-other there");
    assert_eq!(errors.iter().filter(|error| error.contains(&says)).count(), 2, "{errors:?}");
}

#[test]
fn ranks_must_make_equal_buffers() {
    let odd = |change: fn(&mut Setup)| {
        refusals(4, move |rank, setup| {
            setup.options.ranks_per_node = Some(2);
            if rank == 2 {
                change(setup);
            }
        })
    };
    let errors = odd(|setup| setup.options.shape.max_row_bytes = 128);
    let says = |rank: u32, peer: u32, ours: u32, theirs: u32| {
        format!(
            "rank {rank} and rank {peer} disagree on max_row_bytes: {ours} here, {theirs} there; collective calls need the same \
             on every rank"
        )
    };
    assert_eq!(errors, [says(0, 2, 64, 128), says(1, 2, 64, 128), says(2, 0, 128, 64), says(3, 2, 64, 128)]);
    for (change, what) in [
        ((|setup| setup.options.ranks_per_node = Some(1)) as fn(&mut Setup), "ranks_per_node"),
        (|setup| setup.options.transport.queues_per_peer = 3, "queues_per_peer"),
        (|setup| setup.options.transport.kind = TransportKind::Tcp, "transport"),
        (|setup| setup.options.shape.max_topk = 3, "max_topk"),
        (|setup| setup.options.shape.max_scales = 1, "max_scales"),
        (|setup| setup.options.shape.max_tokens_per_rank = 6, "rows of the pool"),
        (|setup| setup.options.config.num_max_nvl_chunked_send_tokens = 7, "num_max_nvl_chunked_send_tokens"),
        (
            |setup| setup.options.config.num_max_nvl_chunked_recv_tokens = 512,
            "num_max_nvl_chunked_recv_tokens",
        ),
        (
            |setup| setup.options.config.num_max_rdma_chunked_send_tokens = 3,
            "num_max_rdma_chunked_send_tokens",
        ),
        (
            |setup| setup.options.config.num_max_rdma_chunked_recv_tokens = 516,
            "num_max_rdma_chunked_recv_tokens",
        ),
        (|setup| setup.options.config.num_sms = 6, "num_sms"),
    ] {
        let errors = odd(change);
        let named = errors.iter().all(|error| error.contains(&format!("disagree on {what}")));
        assert!(errors.len() == 4 && named, "{what}: {errors:?}");
    }
}

#[test]
fn rows_are_summed_in_bf16_only() {
    then_dispatch(setup(), |rank, valid| {
        let handle = rank.dispatch(valid.request())?.handle;
        let x = tensor(rank, DType::F32, &[2 * TOKENS, 4]);
        refused(rank.combine(CombineRows::Tensor(&x), None, &handle), &["x has dtype f32, expected bf16"]);
        let rows = CombineRows::InPool { dtype: DType::F32, hidden: 4 };
        refused(rank.combine(rows, None, &handle), &["x has dtype f32, expected bf16"]);
        rank.stream.synchronize()
    });
}

#[test]
fn shapes_are_checked() {
    then_dispatch(setup(), |rank, valid| {
        let x = tensor(rank, DType::Bf16, &[TOKENS, 7]);
        let parts = ["hidden", "7 x bf16", "multiple of 16 bytes"];
        refused(rank.dispatch(DispatchRequest { x: &x, ..valid.request() }), &parts);
        for experts in [0u32, 1, 7] {
            let value = format!("num_experts = {experts}");
            refused(rank.layout(&valid.topk_idx, experts), &[&value, "multiple of the number of ranks, 2"]);
        }
        let handle = rank.dispatch(valid.request())?.handle;
        let rows = tensor(rank, DType::Bf16, &[9, 8]);
        let parts = "x has shape [9, 8], expected [num_recv_tokens = 10, hidden]";
        refused(rank.combine(CombineRows::Tensor(&rows), None, &handle), &[parts]);
        let weights = tensor(rank, DType::F32, &[11, 2]);
        let rows = CombineRows::InPool { dtype: DType::Bf16, hidden: 8 };
        let parts = "topk_weights has shape [11, 2], expected [num_recv_tokens = 10, num_topk = 2]";
        refused(rank.combine(rows, Some(&weights), &handle), &[parts]);
        let x = tensor(rank, DType::Bf16, &[6, 8]);
        refused(rank.dispatch_cached(&x, None, &handle), &["num_tokens = 5"]);
        rank.stream.synchronize()
    });
}

#[test]
fn an_expert_id_out_of_range_is_an_error_on_every_rank() {
    for bad in [i64::from(EXPERTS), -2, 1 << 32] {
        then_dispatch(setup(), |rank, valid| {
            let mut ids = vec![vec![0i64, 3]; TOKENS as usize];
            if rank.rank == 1 {
                ids[2][1] = bad;
            }
            let topk_idx = rank.upload(DType::I64, 2, &ids)?;
            let layout = rank.layout(&topk_idx, EXPERTS)?;
            let request = DispatchRequest { topk_idx: Some(&topk_idx), layout: &layout, ..valid.request() };
            let parts = ["topk_idx = an id on rank 1", "-1 or 0 to num_experts - 1", "validate"];
            refused(rank.dispatch(request), &parts);
            let handle = rank.dispatch(DispatchRequest { counts: rank.on_device(), ..request })?.handle;
            refused(rank.buffer.check_dispatch(&handle, &rank.stream), &parts);
            Ok(())
        });
    }
}

#[test]
fn ranks_must_make_equal_dispatches() {
    then_dispatch(setup(), |rank, valid| {
        let odd = rank.rank == 1;
        let disagree = |rank: &Rank, what: &str, ours: u32, theirs: u32| {
            let (me, peer) = (rank.rank, 1 - rank.rank);
            let (here, there) = if odd { (theirs, ours) } else { (ours, theirs) };
            format!("rank {me} and rank {peer} disagree on {what}: {here} here, {there} there")
        };
        let x = tensor(rank, DType::Bf16, &[TOKENS, if odd { 16 } else { 8 }]);
        let result = rank.dispatch(DispatchRequest { x: &x, ..valid.request() });
        refused(result, &[&disagree(rank, "bytes per row", 16, 32)]);
        let layout = rank.layout(&valid.topk_idx, if odd { 2 * EXPERTS } else { EXPERTS })?;
        let result = rank.dispatch(DispatchRequest { layout: &layout, ..valid.request() });
        refused(result, &[&disagree(rank, "num_experts", EXPERTS, 2 * EXPERTS)]);
        let counts = Counts::OnDevice { capacity: if odd { 10 } else { 9 } };
        let handle = rank.dispatch(DispatchRequest { counts, ..valid.request() })?.handle;
        let parts = disagree(rank, "capacity in rows", 9, 10);
        refused(rank.buffer.check_dispatch(&handle, &rank.stream), &[&parts]);
        Ok(())
    });
}

/// Rank 3 would receive 6 tokens of each of four ranks, but there is room for 10 rows.
#[test]
fn too_many_rows_for_one_rank_are_an_error_on_every_rank_before_any_row_moves() {
    const CAPACITY: u64 = 10;
    let place = Nodes { ranks_per_node: 2, ..NODES_OF_ONE };
    let setup = Setup::new(4, 2, 6, ROW).nodes(Some(place));
    let turn = Turn::random(4, &[2, 3, 1, 2], 2);
    setup.run(|rank| {
        let topk_idx = rank.upload(DType::I64, 2, &vec![vec![7i64, 6]; 6])?;
        let x = rank.upload_rows(DType::Bf16, HIDDEN as u64, &vec![vec![9; ROW as usize]; 6])?;
        let layout = rank.layout(&topk_idx, 8)?;
        let inputs = Inputs::upload(&turn, rank)?;
        // A dispatch that fits gives the pool's place.
        let (whole, _) = echo(rank, &inputs, turn.routing.num_experts)?;
        rank.synchronize()?;
        rank.poison(&whole.recv_x)?;
        rank.group.barrier(PATIENCE)?;
        let counts = Counts::OnDevice { capacity: CAPACITY };
        let handle = rank.dispatch(DispatchRequest { counts, ..DispatchRequest::new(&x, &layout) })?.handle;
        let error = rank.buffer.check_dispatch(&handle, &rank.stream).expect_err("24 rows do not fit");
        assert_names(&error, &["needs 24 rows, has 10 rows", "rank 3 would receive 24 rows"]);
        // Whoever is through first has not seen what others may still write.
        rank.synchronize()?;
        let rows = rank.raw(&whole.recv_x)?;
        rank.check(rows.iter().all(|&byte| byte == POISON), "no row moved");

        // The buffer still works.
        let (output, back) = echo(rank, &inputs, turn.routing.num_experts)?;
        rank.stream.synchronize()?;
        let got = rank.row_bytes(&back.combined_x)?;
        rank.equal("combined_x afterwards", &got, &turn.sums[rank.rank as usize]);
        drop(output);
        Ok(())
    });
}

#[test]
fn a_handle_of_another_buffer_is_refused() {
    then_dispatch(setup(), |rank, valid| {
        let mut other = Buffer::new(rank.device().clone(), &*rank.group, setup().options)?;
        let handle = rank.dispatch(valid.request())?.handle;
        let rows = CombineRows::InPool { dtype: DType::Bf16, hidden: 8 };
        let request = CombineRequest { rows, topk_weights: None, handle: &handle };
        refused(other.combine(request, StreamOrder::on(&rank.stream)), &["stale handle", "another buffer"]);
        rank.synchronize()
    });
}

#[test]
fn wire_memory_that_is_too_small_is_an_error_on_every_rank_and_says_how_much_is_enough() {
    let with = |bytes: u64| {
        let mut setup = setup();
        setup.options.num_rdma_bytes = Some(bytes);
        setup
    };
    let least = match lockstep::run(RANKS, |group| Rank::join(&with(0), group)) {
        Err(Error::Capacity { what: "num_rdma_bytes", needed, .. }) => needed,
        other => panic!("{other:?}"),
    };
    let enough = with(least).run(|rank| {
        let topk_idx = rank.upload(DType::I64, 2, &vec![vec![0i64, 3]; TOKENS as usize])?;
        let x = rank.upload_rows(DType::Bf16, 32, &vec![vec![1; 64]; TOKENS as usize])?;
        let layout = rank.layout(&topk_idx, EXPERTS)?;
        let request = DispatchRequest::new(&x, &layout);
        let error = rank.dispatch(request).expect_err("5 tokens for one slot");
        let parts = ["wire memory: needs 5 slots for each node, has 1", "max_tokens_per_rank >= 5"];
        assert_names(&error, &parts);
        let counts = rank.on_device();
        let handle = rank.dispatch(DispatchRequest { counts, ..request })?.handle;
        refused(rank.buffer.check_dispatch(&handle, &rank.stream), &parts);

        // One token fits.
        let topk_idx = rank.upload(DType::I64, 2, &[vec![0i64, 3]])?;
        let x = rank.upload_rows(DType::Bf16, 32, &[vec![2; 64]])?;
        let layout = rank.layout(&topk_idx, EXPERTS)?;
        let output = rank.dispatch(DispatchRequest::new(&x, &layout))?;
        let rows = rank.row_bytes(&output.recv_x)?;
        rank.equal("recv_x", &rows, &vec![vec![2; 64]; RANKS as usize]);
        rank.stream.synchronize()?;
        let text = error.to_string();
        let bytes = text.split("num_rdma_bytes >= ").nth(1).and_then(|rest| rest.split(' ').next());
        Ok(bytes.and_then(|bytes| bytes.parse::<u64>().ok()).expect("the error says how many bytes"))
    });
    assert_eq!(enough[0], enough[1]);
    then_dispatch(with(enough[0]), |_, _| Ok(()));
}
