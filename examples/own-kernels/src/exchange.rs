//! An exchange between two ranks: each writes into the other's memory and raises a flag there.
//!
//! Sound because of three orders. Data before its flag: after a block barrier, one thread adds to
//! the flag with release at system scope. Flag before the data's reader: one thread loads the flag
//! with acquire at system scope, before a block barrier. Reader before the next writer: turns
//! alternate between two halves of the mailbox. When a rank has read all flags of turn `t + 1`, its
//! peer has finished turn `t`, as kernels of a stream run one after the other.

use epoxide_simt::*;

/// Blocks of an exchange. All of them must be resident at once, because they wait for the peer's.
pub const EXCHANGE_BLOCKS: u32 = 8;

/// Arguments of `exchange`. Ranks count turns from 1, both in step.
#[kernel_args]
pub struct ExchangeArgs {
    /// In: what this rank sends, `[len]`.
    pub x: Global<u32>,
    /// Out: what this rank sent plus what it received, `[len]`.
    pub out: Global<u32>,
    /// In the peer's memory: its mailbox, `[2, len]`.
    pub peer_mailbox: Global<u32>,
    /// In the peer's memory: its flag, which is never reset.
    pub peer_flag: Global<u64>,
    /// This rank's mailbox, `[2, len]`.
    pub mailbox: Global<u32>,
    /// This rank's flag.
    pub flag: Global<u64>,
    /// Out: the number of blocks that timed out. The host sets it to zero.
    pub expired: Global<u32>,
    /// How long a block waits for the peer.
    pub timeout_ns: u64,
    /// Elements.
    pub len: u32,
    /// Which exchange it is, from 1.
    pub turn: u32,
}

layout_assert!(ExchangeArgs, size = 72, turn at 68);

/// Sends `x` to the peer, waits for the peer's, and adds both.
#[kernel(
    threads = 128, block = 128, grid = EXCHANGE_BLOCKS, barriers = 2, registers = 40,
    requires(args.len >= 1, args.len <= 1 << 30, args.turn >= 1)
)]
pub unsafe fn exchange(args: ExchangeArgs) {
    let half = args.turn % 2 * args.len;
    grid_stride!(i in 0..args.len => {
        args.peer_mailbox.st(half + i, args.x.ld(i));
    });
    barrier_sync();
    let mut gave_up = false;
    if tid() == 0 {
        red_release_sys_add_u64(args.peer_flag.at(0), 1);
        let all = args.turn as u64 * nctaid() as u64;
        gave_up = !wait_at_least(args.flag, all, args.timeout_ns);
    }
    if barrier_any(gave_up) {
        if tid() == 0 {
            red_relaxed_gpu_add_u32(args.expired.at(0), 1);
        }
        return;
    }
    grid_stride!(i in 0..args.len => {
        args.out.st(i, args.x.ld(i) + args.mailbox.ld(half + i));
    });
}

/// Polls `flag` until it is at least `value`; false where that took longer than `timeout_ns`.
///
/// # Safety
/// The flag is live.
#[device]
unsafe fn wait_at_least(flag: Global<u64>, value: u64, timeout_ns: u64) -> bool {
    let start = globaltimer();
    while ld_acquire_sys_u64(flag.at(0)) < value {
        if globaltimer() - start > timeout_ns {
            return false;
        }
    }
    true
}
