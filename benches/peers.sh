#!/usr/bin/env bash
# Makes the figures of other projects that docs/BENCHMARKS.md puts beside epoxide's. Each peer is
# fetched at the version below and built. Its own benchmark then runs on the shapes of that page, or
# the shortest driver of its interface does. The result is a table.
#
# `nccl` ran on two H100 on 2026-11-25. The others have not run as a whole: no machine with two GPUs
# and a network was there. Each is written against the version that its variable names.
#
# The peers, and what their times hold:
#   nccl        NCCL's collectives, by `epoxide bench --baseline nccl`: medians of the slowest
#               rank.
#   nccl-ep     NCCL EP, by its ep_bench: means over ranks and calls, BF16 both ways.
#   flashinfer  TensorRT-LLM's one-sided kernels in FlashInfer's wheel, by a driver of its calls:
#               graph replays, medians of the slowest rank, BF16. Its combine is given summed rows.
#   deepep      DeepEP V1, by its tests: means of the slowest rank, FP8 dispatch, BF16 combine. The
#               low-latency test leaves out up to 10 entries of the routing.
#   pplx        pplx-garden, by its benchmark: medians over ranks and calls, FP8 dispatch.
#
# Clocks, power and MIG are left as they are, and no peer gets multicast over NVLink.
# Dollar signs of awk stand in single quotes, and `need` calls functions by their names.
# shellcheck disable=SC2016,SC2329
set -u -o pipefail

nccl_version=${PEERS_NCCL:-2.28.3}
nccl_ep_version=${PEERS_NCCL_EP:-44d2de0d70498a4e5df7cc9132c310c54392309d}
flashinfer_version=${PEERS_FLASHINFER:-0.7.2}
deepep_version=${PEERS_DEEPEP:-v1.2.1}
nvshmem_version=${PEERS_NVSHMEM:-3.3.9}
pplx_version=${PEERS_PPLX:-244600375fe93f136103e0e44a1618cf332a03dc}
# PyTorch for CUDA 12, and for CUDA 13.
torch_12=${PEERS_TORCH_12:-2.8.0}
torch_13=${PEERS_TORCH_13:-2.11.0}

all=(nccl nccl-ep flashinfer deepep pplx)
hidden=7168 topk=8 experts=256 num_sms=24
# The most that NCCL EP takes in high throughput.
nccl_ep_sms=16

usage() {
    cat <<'EOF'
usage: benches/peers.sh [options] [PEER..]

  PEER            nccl, nccl-ep, flashinfer, deepep or pplx [all of them]
  --program FILE  the command epoxide, built with --features cuda; for nccl [target/measure/epoxide]
  --work FOLDER   receives sources, builds, logs and table.tsv; builds of the same versions are used
                  again [target/peers]
  --gpus N        GPUs [those that nvidia-smi lists]
  --tokens LIST   tokens a rank in low latency [1,2,4,8,16,32,64,128,256,512,1024]
  --ht-tokens N   tokens a rank in high throughput [4096]
  --limit SECONDS one build or one run takes no longer [1800]
  --dry-run       print the commands, run none
  --list          print the names of the peers and their versions, and end

PEERS_NCCL, PEERS_NCCL_EP, PEERS_FLASHINFER, PEERS_DEEPEP, PEERS_NVSHMEM, PEERS_PPLX, PEERS_TORCH_12
and PEERS_TORCH_13 name other versions: releases, tags or commits, no branches. MPI_HOME and
CUDA_HOME are those of the machine.

Exit codes: 0 every peer that was chosen gave all figures, 1 one lacks some, 2 bad usage, or the
machine lacks something, which is named.
EOF
}

fail() {
    printf 'peers.sh: %s\n' "$*" >&2
    exit 2
}

program='target/measure/epoxide' work='target/peers' gpus='' limit=1800 dry_run='' chosen=()
tokens=1,2,4,8,16,32,64,128,256,512,1024 ht_tokens=4096
while (($#)); do
    case $1 in
        --program | --work | --gpus | --tokens | --ht-tokens | --limit)
            (($# > 1)) || fail "$1: needs a value"
            name=${1#--}
            printf -v "${name//-/_}" '%s' "$2"
            shift 2
            ;;
        --dry-run) dry_run=1 && shift ;;
        --list)
            printf '%s\n' "nccl $nccl_version" "nccl-ep $nccl_ep_version" "flashinfer $flashinfer_version" \
                "deepep $deepep_version" "pplx $pplx_version"
            exit 0
            ;;
        --help | -h) usage && exit 0 ;;
        -*) fail "$1: no such option; --help lists them" ;;
        *)
            [[ " ${all[*]} " == *" $1 "* ]] || fail "$1: no such peer; --list names them"
            chosen+=("$1") && shift
            ;;
    esac
done
((${#chosen[@]})) || chosen=("${all[@]}")
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail "--limit $limit: must be a number of seconds, at least 1"
[[ $ht_tokens =~ ^[1-9][0-9]*$ ]] || fail "--ht-tokens $ht_tokens: must be a number, at least 1"
[[ $tokens =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]] || fail "--tokens $tokens: must be numbers with commas between"
IFS=, read -r -a ll_tokens <<<"$tokens"
# Benchmarks run in the folders of their projects.
[[ $work == /* ]] || work=$PWD/$work
[[ $program == /* ]] || program=$PWD/$program

# Names all that the machine lacks for the chosen peers, before anything is fetched.
missing=()

# need PEER WHAT COMMAND..: WHAT is missing where the command fails.
need() {
    local peer=$1 what=$2
    shift 2
    "$@" >/dev/null 2>&1 || missing+=("$peer: $what")
}

have() { command -v "$1"; }

# The CUDA release of nvcc, such as 12.8; nothing where there is none.
nvcc_release() {
    local nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc line
    line=$("$nvcc" --version 2>/dev/null) || return 0
    [[ $line =~ release\ ([0-9]+\.[0-9]+) ]] && printf '%s' "${BASH_REMATCH[1]}"
}

# nvcc_from LEAST [MOST]: whether the release is one of these, MOST not among them.
nvcc_from() {
    local release=${nvcc:-0.0} number least=$1 most=${2:-999.0}
    number=$((${release%.*} * 100 + ${release#*.}))
    ((number >= ${least%.*} * 100 + ${least#*.} && number < ${most%.*} * 100 + ${most#*.}))
}

can_make_venv() { python3 -c 'import ensurepip, venv'; }
has_header() { printf '#include <%s>\n' "$1" | g++ ${MPI_HOME:+-I"$MPI_HOME/include"} -x c++ -E -; }
has_rdma_device() { compgen -G '/sys/class/infiniband/*'; }

needs_nccl() {
    local made_by='cargo build --profile measure --features cuda --bin epoxide'
    need nccl "the command epoxide at $program (--program names it); $made_by" test -x "$program"
    if [[ ! ${NCCL_LIBRARY:-} ]]; then
        need nccl 'python3 with venv, for libnccl; or NCCL_LIBRARY, which names one' can_make_venv
    fi
    need nccl 'python3, which reads the results' have python3
}

needs_nccl_ep() {
    local tool
    for tool in git make g++ mpirun; do
        need nccl-ep "$tool" have "$tool"
    done
    need nccl-ep 'mpi.h; MPI_HOME names the folder of an MPI' has_header mpi.h
    need nccl-ep "nvcc of CUDA 13 or later; CUDA_HOME names its folder (found: ${nvcc:-none})" nvcc_from 13.0
}

needs_flashinfer() {
    need flashinfer 'python3 with venv' can_make_venv
    need flashinfer 'g++' have g++
    need flashinfer "nvcc of CUDA 12.6 or later; CUDA_HOME names its folder (found: ${nvcc:-none})" nvcc_from 12.6
}

needs_deepep() {
    need deepep 'git' have git
    need deepep 'g++' have g++
    need deepep 'python3 with venv' can_make_venv
    need deepep "nvcc of CUDA 12.3 to 12.9; CUDA_HOME names its folder (found: ${nvcc:-none})" nvcc_from 12.3 13.0
}

needs_pplx() {
    local tool
    for tool in git g++ cargo cmake; do
        need pplx "$tool" have "$tool"
    done
    need pplx 'python3 with venv' can_make_venv
    need pplx "nvcc of CUDA 12.8 or later; CUDA_HOME names its folder (found: ${nvcc:-none})" nvcc_from 12.8
    need pplx 'infiniband/verbs.h (libibverbs)' has_header infiniband/verbs.h
    need pplx 'rdma/fabric.h (libfabric)' has_header rdma/fabric.h
    need pplx 'gdrapi.h (GDRCopy)' has_header gdrapi.h
    need pplx 'an RDMA device for each GPU, in /sys/class/infiniband' has_rdma_device
}

# A command as one would type it.
in_words() {
    local word words=()
    for word; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || printf -v word '%q' "$word"
        words+=("$word")
    done
    printf '%s' "${words[*]}"
}

# Commands of the peer under way, and what they print: to its log.
log=''

# step FOLDER COMMAND..: runs it there; prints it in either case.
step() {
    local folder=$1
    shift
    printf '+ cd %s && %s\n' "$(in_words "$folder")" "$(in_words "$@")"
    [[ ! $dry_run ]] || return 0
    (cd "$folder" && timeout --kill-after 10 "$limit" "$@") </dev/null >>"$log" 2>&1
}

# measure FILE FOLDER COMMAND..: the same, but the output goes to the file, for the table.
measure() {
    local file=$1 code=0 output=$log
    shift
    log=$file
    [[ $dry_run ]] || : >"$file"
    step "$@" || code=$?
    log=$output
    ((code == 0)) || printf 'peers.sh: failed with %d; %s holds what it printed\n' "$code" "$file" >&2
    return "$code"
}

# built PEER VERSION..: the folder of what is built of these versions. Others have a folder of their
# own, so a row never has the version of another build.
built() {
    local folder=$1 version
    shift
    for version; do folder+=-${version//\//_}; done
    printf '%s' "$work/$folder"
}

# The checkout of a public repository at a version.
checkout() {
    local folder=$1 address=$2 version=$3
    [[ ! -e $folder ]] || return 0
    step . git clone --filter=blob:none "$address" "$folder.part" &&
        step "$folder.part" git checkout --detach "$version" &&
        step . mv "$folder.part" "$folder"
}

# A virtual environment with packages of these versions.
environment() {
    local folder=$1
    shift
    [[ -x $folder/bin/python ]] || step . python3 -m venv "$folder" || return 1
    (($# == 0)) || step . "$folder/bin/python" -m pip install "$@"
}

# rows_of PEER VERSION COMMAND: a row of the table for each line
# `TOKENS SMS DISPATCH COMBINE PAIR P99` of the input; `-` is for what is not known. The command
# stands there without the folder of the work. Input without a line is a failure.
rows_of() {
    local times code=1
    while read -r -a times; do
        printf '%s\t' "$1" "$2" "${times[@]}" "${3//"$work/"/}" >>"$work/table.tsv"
        printf '%s\n' "$today" >>"$work/table.tsv"
        code=0
    done
    return "$code"
}

peer_nccl() {
    local folder=$work/nccl library=${NCCL_LIBRARY:-} version=$nccl_version
    if [[ ! $library ]]; then
        environment "$folder/venv" "nvidia-nccl-cu13==$nccl_version" || return 1
        library=$(compgen -G "$folder/venv/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2" | head -n 1)
        [[ $library || $dry_run ]] || return 1
        library=${library:-$folder/venv/lib/python3/site-packages/nvidia/nccl/lib/libnccl.so.2}
    else
        version="of $library"
    fi
    local command=("$program" bench --baseline nccl --device cuda --mode intranode --ranks-per-node "$gpus"
        --hidden "$hidden" --topk "$topk" --experts "$experts" --num-sms "$num_sms" --iters 100 --no-ceiling
        --sweep "tokens=$tokens,$ht_tokens" --out "$folder/nccl.jsonl")
    # A sweep goes on where another one ended, so figures of another day would be among these.
    [[ $dry_run ]] || rm -f "$folder/nccl.jsonl"
    measure "$folder/bench.txt" . env NCCL_LIBRARY="$library" "${command[@]}" || return 1
    [[ ! $dry_run ]] || return 0
    local way code=0
    for way in nccl_all_to_all nccl_all_gather; do
        python3 - "$folder/nccl.jsonl" "$way" <<'EOF' |
import json
import sys

for line in open(sys.argv[1]):
    point = json.loads(line)
    for way in point["baselines"]:
        if way["way"] == sys.argv[2]:
            there, back = way["dispatch"]["slowest"], way["combine"]["slowest"]
            pair = way["pair"]["period"]["p50_us"]
            p99 = f'{there["p99_us"]:.1f}/{back["p99_us"]:.1f}'
            print(point["tokens"], "-", f'{there["p50_us"]:.1f} {back["p50_us"]:.1f} {pair:.1f}', p99)
EOF
            rows_of "${way//_/-}" "$version" "$(in_words "${command[@]}")" || code=1
    done
    return "$code"
}

peer_nccl_ep() {
    local folder=$work/nccl-ep count layout bench mpi=(mpirun -np "$gpus") file source code=0
    source=$(built nccl-ep "$nccl_ep_version")/source
    checkout "$source" https://github.com/NVIDIA/nccl-extensions "$nccl_ep_version" || return 1
    bench=$source/build/test/nccl_ep/ep_bench
    if [[ ! -x $bench ]]; then
        step . git -C "$source" submodule update --init third_party/nccl &&
            step . make -C "$source" nccl-submodule NVCC_GENCODE=-gencode=arch=compute_90,code=sm_90 &&
            step . make -C "$source/nccl_ep" MPI=1 NVCC_GENCODE=-gencode=arch=compute_90,code=sm_90 || return 1
    fi
    # Open MPI runs nothing as root unless it is asked to.
    if [[ ! $dry_run && $EUID == 0 ]] && mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
        mpi+=(--allow-run-as-root)
    fi
    local sizes=(--hidden "$hidden" --top-k "$topk" --experts "$experts" --warmup 10 --iters 100)
    local libraries="$source/third_party/nccl/build/lib:$source/build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    # The first line of each kind counts: times of whole calls come before those of kernels.
    local read_times='
        function us(name) {
            return match($0, name "=[0-9.]+") ? substr($0, RSTART + length(name) + 1, RLENGTH - length(name) - 1) : ""
        }
        /^Dispatch: / && !d { d = us(word) }
        /^Combine: / && !c { c = us(word) }
        /^Total \(D\+C\): / && !p { p = us("avg") }
        END { if (d && c) print tokens, sms, d, c, p ? p : "-", "-" }'
    for count in "${ll_tokens[@]}"; do
        for layout in expert-major rank-major; do
            local command=("${mpi[@]}" "$bench" --algorithm ll --layout "$layout" --tokens "$count"
                --disable-token-dropping "${sizes[@]}")
            file=$folder/ll-$layout-$count.txt
            measure "$file" . env LD_LIBRARY_PATH="$libraries" "${command[@]}" || { code=1 && continue; }
            [[ $dry_run ]] || awk -v tokens="$count" -v sms=- -v word=avg "$read_times" "$file" |
                rows_of "nccl-ep-ll-$layout" "$nccl_ep_version" "$(in_words "${command[@]}")" || code=1
        done
    done
    local command=("${mpi[@]}" "$bench" --algorithm ht --tokens "$ht_tokens" --zcopy
        --max-num-sms "$nccl_ep_sms" "${sizes[@]}")
    file=$folder/ht-$ht_tokens.txt
    measure "$file" . env LD_LIBRARY_PATH="$libraries" "${command[@]}" || return 1
    [[ $dry_run ]] || awk -v tokens="$ht_tokens" -v sms="$nccl_ep_sms" -v word=total "$read_times" "$file" |
        rows_of nccl-ep-ht "$nccl_ep_version" "$(in_words "${command[@]}")" || code=1
    return "$code"
}

# The driver of FlashInfer's interface. Each rank is a process; rank 0 prints a line for each size.
flashinfer_driver() {
    cat <<'EOF'
"""Times FlashInfer's one-sided all-to-all in replays of CUDA graphs."""

import os
import sys

import torch
import torch.distributed as dist
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.mnnvl import MnnvlConfig, TorchDistBackend
from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll

PAIRS, WARMUP, ITERS = 128, 20, 200


def captured(body):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def times_us(graphs):
    """Times of the graphs, replayed in turn; of each iteration the slowest rank's, sorted."""

    def event():
        return torch.cuda.Event(enable_timing=True)

    events = [[(event(), event()) for _ in graphs] for _ in range(WARMUP + ITERS)]
    torch.cuda.synchronize()
    dist.barrier()
    for iteration in events:
        for graph, (start, end) in zip(graphs, iteration):
            start.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    samples = [[start.elapsed_time(end) * 1000 for start, end in line] for line in events[WARMUP:]]
    samples = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(samples, op=dist.ReduceOp.MAX)
    return samples.sort(dim=0).values


def percentile(samples, share, column):
    """Nearest rank."""
    at = -(-len(samples) * share // 100) - 1
    return float(samples[at, column])


def main():
    hidden, topk, experts = (int(word) for word in sys.argv[1:4])
    sizes = [int(word) for word in sys.argv[4:]]
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    mapping = Mapping(ranks, rank, ranks, tp_size=ranks, moe_ep_size=ranks)
    exchange = MoeAlltoAll(
        mapping,
        max_num_tokens=max(sizes),
        top_k=topk,
        num_experts=experts,
        hidden_size=hidden,
        mnnvl_config=MnnvlConfig(comm_backend=TorchDistBackend()),
    )
    for tokens in sizes:
        torch.manual_seed(41394 + rank)
        scores = torch.randn(tokens, experts, device="cuda").abs() + 1
        weights, ids = scores.topk(topk, dim=-1)
        ids = ids.to(torch.int32)
        x = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
        payloads = [x, ids, weights]

        def dispatch():
            return exchange.dispatch(ids, payloads, tokens)

        def rows():
            return exchange.get_combine_payload_tensor_in_workspace(tokens, hidden, x.dtype)

        def combine():
            return exchange.combine(rows(), tokens, payload_in_workspace=True)

        # Every rank returns the rows that it received: a token comes back from each of its ranks.
        for _ in range(3):
            received = dispatch()[0]
            rows().copy_(received.view(ranks, tokens, hidden))
            torch.cuda.synchronize()
            dist.barrier()
            back = combine()
        reached = torch.zeros(tokens, ranks, device="cuda")
        reached.scatter_(1, (ids // (experts // ranks)).long(), 1.0)
        expected = x.float() * reached.sum(dim=1, keepdim=True)
        torch.testing.assert_close(back.float(), expected, rtol=2e-2, atol=1e-2)
        torch.cuda.synchronize()
        dist.barrier()

        single = [captured(dispatch), captured(combine)]

        def pairs():
            for _ in range(PAIRS):
                dispatch()
                combine()

        chain = captured(pairs)
        samples, chains = times_us(single), times_us([chain])
        there, back = (percentile(samples, 50, at) for at in (0, 1))
        tails = "/".join(f"{percentile(samples, 99, at):.1f}" for at in (0, 1))
        if rank == 0:
            pair = percentile(chains, 50, 0) / PAIRS
            print(f"figures {tokens} {there:.1f} {back:.1f} {pair:.1f} {tails}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
EOF
}

peer_flashinfer() {
    local folder=$work/flashinfer torch=$torch_13 venv
    nvcc_from 13.0 || torch=$torch_12
    venv=$(built flashinfer "$flashinfer_version" "torch$torch")/venv
    local python=$venv/bin/python
    if ! "$python" -c 'import flashinfer' >/dev/null 2>&1; then
        environment "$venv" "torch==$torch" "flashinfer-python==$flashinfer_version" || return 1
    fi
    if [[ $dry_run ]]; then
        printf '+ write the driver of its interface to %q\n' "$folder/driver.py"
    else
        flashinfer_driver >"$folder/driver.py"
    fi
    local command=("$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$folder/driver.py"
        "$hidden" "$topk" "$experts" "${ll_tokens[@]}" "$ht_tokens")
    local code=0
    measure "$folder/driver.txt" . "${command[@]}" || code=1
    [[ ! $dry_run ]] || return 0
    # Sizes that were measured before a failure count.
    sed -n 's/^figures \([0-9]*\)/\1 -/p' "$folder/driver.txt" |
        rows_of flashinfer "$flashinfer_version" "$(in_words "${command[@]}")" || code=1
    return "$code"
}

peer_deepep() {
    local folder=$work/deepep count file built code=0
    built=$(built deepep "$deepep_version" "torch$torch_12" "nvshmem$nvshmem_version")
    local source=$built/source python=$built/venv/bin/python
    checkout "$source" https://github.com/deepseek-ai/DeepEP "$deepep_version" || return 1
    if ! "$python" -c 'import torch, deep_ep' >/dev/null 2>&1; then
        environment "$built/venv" "torch==$torch_12" "nvidia-nvshmem-cu12==$nvshmem_version" \
            numpy setuptools wheel ninja || return 1
        step . env TORCH_CUDA_ARCH_LIST=9.0 "$python" -m pip install --no-build-isolation "$source" || return 1
    fi
    # Without a network card NVSHMEM has NVLink alone, and is not to look for more.
    local network=()
    has_rdma_device >/dev/null || network=(NVSHMEM_REMOTE_TRANSPORT=none)
    local sizes=(--num-processes "$gpus" --hidden "$hidden" --num-topk "$topk" --num-experts "$experts")
    local read_low_latency='
        function us(text) { return match(text, /avg_t=[0-9.]+/) ? substr(text, RSTART + 6, RLENGTH - 6) + 0 : 0 }
        function most(a, b) { return a > b ? a : b }
        /Dispatch \+ combine bandwidth/ { p = most(p, us($0)) }
        /Dispatch bandwidth/ { split($0, part, "|"); d = most(d, us(part[1])); c = most(c, us(part[2])) }
        END { if (d && c) printf "%d - %.1f %.1f %.1f -\n", tokens, d, c, p }'
    for count in "${ll_tokens[@]}"; do
        # Its copies want a multiple of four tokens from all ranks.
        ((count * gpus % 4 == 0)) || continue
        local command=("$python" tests/test_low_latency.py --num-tokens "$count" "${sizes[@]}")
        file=$folder/ll-$count.txt
        measure "$file" "$source" env "${network[@]}" "${command[@]}" || { code=1 && continue; }
        [[ $dry_run ]] || awk -v tokens="$count" "$read_low_latency" "$file" |
            rows_of deepep-ll-fp8 "$deepep_version" "$(in_words "${command[@]}")" || code=1
    done
    local read_tuned='
        function us() { return match($0, /t: [0-9.]+ us/) ? substr($0, RSTART + 3, RLENGTH - 6) : "" }
        index($0, "Best dispatch (" type ")") { d = us() }
        /Best combine/ { c = us() }
        /Best/ && match($0, /SMs [0-9]+/) { sms = substr($0, RSTART + 4, RLENGTH - 4) }
        END { if (d && c) print tokens, sms ? sms : "-", d, c, "-", "-" }'
    local command=("$python" tests/test_intranode.py --num-tokens "$ht_tokens" "${sizes[@]}") type
    file=$folder/ht-$ht_tokens.txt
    measure "$file" "$source" "${command[@]}" || return 1
    [[ ! $dry_run ]] || return 0
    for type in FP8 BF16; do
        awk -v tokens="$ht_tokens" -v type="$type" "$read_tuned" "$file" |
            rows_of "deepep-ht-${type,,}" "$deepep_version" "$(in_words "${command[@]}")" || code=1
    done
    return "$code"
}

peer_pplx() {
    local folder=$work/pplx count file torch=$torch_13 built code=0
    nvcc_from 13.0 || torch=$torch_12
    built=$(built pplx "$pplx_version" "torch$torch")
    local source=$built/source python=$built/venv/bin/python
    checkout "$source" https://github.com/perplexityai/pplx-garden "$pplx_version" || return 1
    if ! "$python" -c 'import pplx_garden' >/dev/null 2>&1; then
        environment "$built/venv" "torch==$torch" numpy build || return 1
        # Its build asks PyTorch where CMake finds it.
        local where='import torch; print(torch.utils.cmake_prefix_path)'
        step "$source" bash -c \
            'TORCH_CMAKE_PREFIX_PATH=$("$0" -c "$1") "$0" -m build --wheel && "$0" -m pip install dist/*.whl' \
            "$python" "$where" || return 1
    fi
    for count in "${ll_tokens[@]}" "$ht_tokens"; do
        file=$folder/$count.json
        local command=("$python" -m benchmarks.bench_all_to_all --world-size "$gpus" --nets-per-gpu 1
            --init-method tcp://127.0.0.1:29500 --node-rank 0 --nvlink "$gpus" --max-num-tokens "$count"
            --max-private-tokens $((2 * count)) --hidden-dim "$hidden" --num-experts "$experts"
            --num-experts-per-token "$topk" --num-warmup 100 --num-repeats 1000 --output "$file")
        measure "$folder/$count.txt" "$source" "${command[@]}" || { code=1 && continue; }
        [[ $dry_run ]] || python3 - "$file" "$count" <<'EOF' |
import json
import sys

times = json.load(open(sys.argv[1]))
there, back = times["dispatch"]["both"], times["combine"]["both"]
p99 = f'{there["p99"]:.1f}/{back["p99"]:.1f}'
print(sys.argv[2], "-", f'{there["p50"]:.1f} {back["p50"]:.1f} - {p99}')
EOF
            rows_of pplx "$pplx_version" "$(in_words "${command[@]}")" || code=1
    done
    return "$code"
}

run_peer() {
    case $1 in
        nccl) peer_nccl ;;
        nccl-ep) peer_nccl_ep ;;
        flashinfer) peer_flashinfer ;;
        deepep) peer_deepep ;;
        pplx) peer_pplx ;;
    esac
}

export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
nvcc=$(nvcc_release)
if [[ $dry_run ]]; then
    gpus=${gpus:-2}
else
    if [[ ! $gpus ]]; then
        listed=$(nvidia-smi --list-gpus 2>/dev/null) || listed=''
        gpus=0
        while read -r line; do [[ $line != GPU* ]] || gpus=$((gpus + 1)); done <<<"$listed"
    fi
    need all "2 NVIDIA GPUs at least, as nvidia-smi lists them (found: $gpus)" test "$gpus" -ge 2
    for peer in "${chosen[@]}"; do
        case $peer in
            nccl) needs_nccl ;;
            nccl-ep) needs_nccl_ep ;;
            flashinfer) needs_flashinfer ;;
            deepep) needs_deepep ;;
            pplx) needs_pplx ;;
        esac
    done
    if ((${#missing[@]})); then
        printf 'peers.sh: missing: %s\n' "${missing[@]}" >&2
        exit 2
    fi
fi
[[ $gpus =~ ^[1-9][0-9]*$ && $gpus -ge 2 ]] || fail "--gpus $gpus: must be a number, at least 2"

if [[ ! $dry_run ]]; then
    today=$(date -u +%F)
    mkdir -p "$work" || fail "--work $work: cannot be made"
    printf 'peer\tversion\ttokens\tsms\tdispatch_us\tcombine_us\tpair_us\tp99\tcommand\tdate\n' >"$work/table.tsv"
fi
failed=()
for peer in "${chosen[@]}"; do
    printf '# %s\n' "$peer"
    log=$work/$peer/log.txt
    if [[ $dry_run ]]; then
        run_peer "$peer"
        continue
    fi
    mkdir -p "$work/$peer" || fail "$work/$peer: cannot be made"
    before=$(wc -l <"$work/table.tsv")
    if ! run_peer "$peer" || (($(wc -l <"$work/table.tsv") == before)); then
        failed+=("$peer")
    fi
done
[[ ! $dry_run ]] || exit 0
sed -e 's/\t/ | /g' -e 's/^/| /' -e 's/$/ |/' -e '1a |---|---|---|---|---|---|---|---|---|---|' "$work/table.tsv"
for peer in "${failed[@]}"; do
    printf 'peers.sh: %s: no figures, or not all; see %s\n' "$peer" "$work/$peer" >&2
done
exit $((${#failed[@]} > 0))
