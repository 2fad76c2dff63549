#!/usr/bin/env bash
# Measures and checks epoxide on all GPUs of a machine, without cargo: every list that docs/BENCHMARKS.md has of a
# number of GPUs, the most valuable run first. It needs bash, coreutils and tar.
#
# Each run has a time-out of its own, and none begins behind the limit of the whole, so that the script ends in time.
# Results are packed even where a run fails or a signal ends the script. A signal ends the run under way, and the exit
# code is 128 and the signal's number.
set -u -o pipefail

usage() {
    cat <<'EOF'
usage: benches/larger.sh --program FILE --out FOLDER [options]

  --program FILE  the command epoxide, built with --features cuda
  --tests FILE    the test program ep, built with --features cuda: ranks that stop, processes that are killed
  --before FILE   the command epoxide of an earlier commit: both are measured in turn, and compared
  --ptx FILE      kernels in place of those that the program has
  --out FOLDER    receives summary.txt and results.tar.gz (JSON, JSON lines and the output of each run)
  --limit SECONDS the whole takes no longer [540]
  --gpus N        2, 4 or 8 [those that nvidia-smi lists]
  --from NAME     begin with this run: the second call goes on where the first one ended
  --only NAMES    these runs alone, separated by commas
  --list          print the names of the runs, in their order, and end
  --virtual       tiny sizes on virtual GPUs: shows that every command line is accepted

Exit codes: 0 no run failed, 1 one failed, all were skipped or the options leave none to make, 2 bad usage, 128 + N
ended by signal N. Clocks, power and MIG are left as they are.
EOF
}

fail() {
    printf 'larger.sh: %s\n' "$*" >&2
    exit 2
}

program='' tests='' before='' ptx='' out='' limit=540 gpus='' from='' only='' list='' virtual='' work=''
while (($#)); do
    case $1 in
        --program | --tests | --before | --ptx | --out | --limit | --gpus | --from | --only)
            (($# > 1)) || fail "$1: needs a value"
            name=${1#--}
            printf -v "$name" '%s' "$2"
            shift 2
            ;;
        --list) list=1 && shift ;;
        --virtual) virtual=1 && shift ;;
        --help | -h) usage && exit 0 ;;
        *) fail "$1: no such option; --help lists them" ;;
    esac
done

if [[ ! $list ]]; then
    [[ $program ]] || fail '--program: missing; name the command epoxide'
    [[ $out ]] || fail '--out: missing; name the folder for results'
fi
for file in program tests before ptx; do
    [[ ! ${!file} ]] && continue
    [[ -r ${!file} ]] || fail "--$file ${!file}: no such file"
    printf -v "$file" '%s' "$(realpath "${!file}")"
done
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail "--limit $limit: must be a number of seconds, at least 1"
if [[ ! $gpus ]]; then
    if [[ $virtual || $list ]]; then
        gpus=2
    else
        gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    fi
fi
[[ $gpus =~ ^(2|4|8)$ ]] || fail "--gpus $gpus: must be 2, 4 or 8"

# A program that uses multicast over NVLink can put GPUs out of service that others share.
export NCCL_NVLS_ENABLE=0
[[ ! $ptx ]] || export EPOXIDE_PTX=$ptx

if [[ $virtual ]]; then
    device=(--device virtual) large=(--tokens 2 --hidden 128 --experts 8 --topk 2) small=("${large[@]}")
    iters=2 most_iters=2 few_iters=2 trips=3 replays=2 repeat=2 all_sms=4,8 some_sms=4 nccl_tokens=1..2 puts=4
    random=(--tokens 4 --hidden 128 --experts 8 --topk 2 --num-sms 4) few=("${random[@]:0:8}")
    batch=("${few[@]}")
    tools=() ll_sizes=("${large[@]}")
else
    shape=(--hidden 7168 --topk 8 --experts 256)
    device=(--device cuda) large=(--tokens 4096 "${shape[@]}") small=(--tokens 128 "${shape[@]}") ll_sizes=("${shape[@]}")
    iters=100 most_iters=200 few_iters=20 trips=100000 replays=20000 repeat=9 nccl_tokens=1..8192 puts=64
    all_sms=4,8,12,16,24,32,48,64,132 some_sms=24,4
    random=(--tokens 32 --hidden 512 --experts 16 --topk 4 --num-sms 24) few=(--tokens 72 --hidden 128 --experts 16 --topk 4)
    batch=(--tokens 300 --hidden 128 --experts 64 --topk 8)
    tools=(memcheck racecheck synccheck initcheck)
fi
half=$((gpus / 2))
one_node=(--mode intranode --ranks-per-node "$gpus")
two_nodes=(--mode internode --nodes 2 --ranks-per-node "$half")
single_nodes=(--mode internode --nodes "$gpus" --ranks-per-node 1)
ll=(--mode low-latency --nodes 1 --ranks-per-node "$gpus")
ll_nodes=(--mode low-latency --nodes 2 --ranks-per-node "$half" --transport direct)

# The option without which the run of this name is left out.
needs() {
    case $1 in
        survivors | killed | residency) echo tests ;;
        ab-*) echo before ;;
        *) echo program ;;
    esac
}

# Whether the run of this name is to be made. With --list it prints the name.
started='' made=0 passed=0 failed=0 left_out=() signal=0
wanted() {
    if [[ $list ]]; then
        echo "$1"
        return 1
    fi
    local file
    file=$(needs "$1")
    [[ ! $from || $1 == "$from" ]] && started=1
    [[ $started && ${!file} && (! $only || ,$only, == *,$1,*) ]]
}

note() {
    printf '%s\n' "$*" | tee -a "$work/summary.txt"
}

# A signal leaves out the run under way and those behind it.
on_signal() {
    signal=$1
    # Without a run under way no job is listed.
    # shellcheck disable=SC2046
    kill $(jobs -pr) 2>/dev/null
}

# run NAME SECONDS COMMAND..: its output is kept, and the time it took printed.
run() {
    local name=$1 most=$2 begun=$SECONDS code=0 left said
    shift 2
    wanted "$name" || return 0
    left=$((limit - SECONDS))
    if ((left < 5 || signal)); then
        left_out+=("$name")
        return 0
    fi
    printf '%q ' "$@" >"$work/$name.txt"
    printf '\n' >>"$work/$name.txt"
    # In the background: bash runs a trap only behind a command in the foreground.
    timeout --kill-after 5 $((most < left ? most : left)) "$@" </dev/null >>"$work/$name.txt" 2>&1 &
    wait $! || code=$?
    if ((signal)); then
        wait
        left_out+=("$name")
        return 0
    fi
    made=$((made + 1))
    case $code in
        0) said=ok && passed=$((passed + 1)) ;;
        77) said=skipped ;;
        124 | 137) said='OUT OF TIME' && failed=$((failed + 1)) ;;
        *) said="FAILED ($code)" && failed=$((failed + 1)) ;;
    esac
    note "$(printf '%-24s %-12s %4d s' "$name" "$said" $((SECONDS - begun)))"
    [[ $said == ok ]] || tail -n 3 "$work/$name.txt" | cut -c 1-300 | sed 's/^/    /' | tee -a "$work/summary.txt"
}

bench() {
    local name=$1 most=$2
    shift 2
    run "$name" "$most" "$program" bench "${device[@]}" --json "$work/$name.json" "$@"
}

# trips NAME SECONDS SEED ARGUMENTS..: random round trips of one seed.
trips() {
    local name=$1 most=$2 seed=$3
    shift 3
    run "$name" "$most" "$program" roundtrip "${device[@]}" --threads --seed "$seed" "$@"
}

test_program() {
    local name=$1 most=$2
    shift 2
    local place=cuda
    [[ ! $virtual ]] || place=virtual
    run "$name" "$most" env EPOXIDE_TEST_DEVICE=$place EPOXIDE_TEST_RANKS="$gpus" EPOXIDE_TIER="${tier-default}" \
        "$tests" --test-threads 1 "$@"
}

all_runs() {
    local type way tool

    # Low latency: both types of rows there and back; rows that are summed already, in the pool and not.
    for type in fp8 bf16; do
        bench ll-$type 120 "${ll[@]}" "${ll_sizes[@]}" --iters "$iters" --dtype $type
        bench ll-in-pool-$type 120 "${ll[@]}" "${ll_sizes[@]}" --iters "$iters" --dtype $type --combine-rows in-pool
    done
    bench ll-by-row 120 "${ll[@]}" "${ll_sizes[@]}" --iters "$iters" --combine-rows by-row
    # High throughput: cached, uncached, in the pool, of a tensor. On eight GPUs with all numbers of multiprocessors.
    local sms=$some_sms
    ((gpus == 8)) && sms=$all_sms
    for type in bf16 fp8; do
        bench ht-$type 100 "${one_node[@]}" "${large[@]}" --num-sms "$sms" --iters "$most_iters" --dtype $type
    done
    # Rows by expert, beside an ordinary dispatch whose rows a kernel sorts.
    for type in bf16 fp8; do
        bench ht-by-expert-$type 150 "${one_node[@]}" "${large[@]}" --num-sms "$sms" --iters "$most_iters" --dtype $type --rows-by-expert 64
    done
    # Rows by expert, and pairs with something between their calls, as a model has them.
    bench ll-by-expert 120 "${ll[@]}" "${ll_sizes[@]}" --iters "$iters" --rows-by-expert 64
    bench ll-between 120 "${ll[@]}" "${ll_sizes[@]}" --iters "$iters" --combine-rows by-row --between-us 20
    # Survivors of a rank that stops, and of a process that is killed.
    test_program survivors 300 survivors
    tier=long test_program killed 120 internode::processes
    # Beside a kernel that holds all multiprocessors but two.
    test_program residency 120 residency

    # Both programs in turn: high throughput, then low latency with 128 tokens there and back.
    for way in large small; do
        local -n sizes=$way
        run ab-$way 120 "$program" bench ab "${device[@]}" "${one_node[@]}" "${sizes[@]}" --num-sms "${some_sms%%,*}" \
            --iters "$iters" --repeat "$repeat" --a "$before" --json-a "$work/ab-$way-a.json" --json-b "$work/ab-$way-b.json"
    done
    run ab-ll 120 "$program" bench ab "${device[@]}" "${ll[@]}" "${small[@]}" --iters "$iters" --repeat "$repeat" \
        --a "$before" --json-a "$work/ab-ll-a.json" --json-b "$work/ab-ll-b.json"

    # Nodes that map each other's memory.
    for type in bf16 fp8; do
        bench direct-2-$type 60 "${two_nodes[@]}" --transport direct "${large[@]}" --num-sms "${some_sms%%,*}" --iters "$iters" --dtype $type
        if ((gpus > 2)); then
            bench direct-1-$type 60 "${single_nodes[@]}" --transport direct "${large[@]}" --num-sms "${some_sms%%,*}" --iters "$iters" --dtype $type
        fi
        bench direct-2-by-expert-$type 90 "${two_nodes[@]}" --transport direct --keep-nodes "${large[@]}" --num-sms "${some_sms%%,*}" \
            --iters "$iters" --dtype $type --rows-by-expert 64
        bench ll-direct-$type 120 "${ll_nodes[@]}" "${ll_sizes[@]}" --iters "$iters" --dtype $type
    done
    if ((gpus == 8)); then
        bench direct-4x2 60 --mode internode --nodes 4 --ranks-per-node 2 --transport direct "${large[@]}" --num-sms 24 --iters "$iters"
    fi

    # Beside NCCL.
    run nccl 150 "$program" bench "${device[@]}" --baseline nccl "${one_node[@]}" "${large[@]:2}" --num-sms "${some_sms%%,*}" \
        --iters "$iters" --no-ceiling --sweep "tokens=$nccl_tokens" --out "$work/nccl.jsonl"

    # A return path of FP8, and up to which number of tokens packets are the faster way back.
    for type in fp8 bf16; do
        bench ll-$type-fp8 120 "${ll[@]}" "${ll_sizes[@]}" --iters "$iters" --dtype $type --combine-dtype fp8
    done
    for way in 0 1024; do
        bench packets-$way 120 "${ll[@]}" "${ll_sizes[@]}" --iters "$iters" --packet-tokens $way
    done

    # Random round trips, alone and beside a neighbour, and replays.
    for type in bf16 fp8; do
        trips trips-$type 120 1 "${one_node[@]}" "${random[@]}" --dtype $type --random --iterations $((trips / 2))
        trips ll-trips-$type 300 2 "${ll[@]}" "${few[@]}" --dtype $type --random --iterations $((trips / 2))
    done
    trips direct-trips 200 3 "${two_nodes[@]}" --transport direct --keep-nodes "${random[@]}" --random --iterations "$trips"
    trips ll-direct-trips 300 4 "${ll_nodes[@]}" --keep-nodes "${few[@]}" --random --iterations "$trips"
    trips neighbour 300 5 "${one_node[@]}" "${random[@]}" --random --iterations "$trips" --neighbour=10000
    trips ll-neighbour 400 6 "${ll[@]}" "${few[@]}" --random --iterations "$trips" --neighbour=10000
    trips ll-batch-neighbour 120 10 "${ll[@]}" "${batch[@]}" --random --iterations $(((trips + 49) / 50)) --neighbour=10000
    trips replays 120 7 "${one_node[@]}" "${random[@]}" --graph-replays "$replays"
    trips ll-replays 120 8 "${ll[@]}" "${few[@]}" --graph-replays "$replays"
    for way in shm tcp; do
        trips $way-trips 120 9 "${two_nodes[@]}" --transport $way "${random[@]}" --random --iterations $(((trips + 9) / 10))
    done

    # Networks, against the sum of what they are made of.
    for way in shm tcp; do
        bench $way-2 60 "${two_nodes[@]}" --transport $way --rdma-send "$puts" "${large[@]}" --num-sms "${some_sms%%,*}" --iters "$few_iters"
        bench ll-$way 60 "${ll_nodes[@]:0:6}" --transport $way "${small[@]}" --iters "$few_iters"
        if ((gpus > 2)); then
            bench $way-1 90 "${single_nodes[@]}" --transport $way --rdma-send "$puts" "${large[@]}" --num-sms "${some_sms%%,*}" --iters "$few_iters"
        fi
    done
    if ((gpus < 8)); then
        bench sms-bf16 150 "${one_node[@]}" "${large[@]}" --num-sms "$all_sms" --iters "$few_iters"
        bench sms-fp8 150 "${one_node[@]}" "${large[@]}" --num-sms "$all_sms" --iters "$few_iters" --dtype fp8
    fi

    # Sanitizers. API errors are left out: where a machine has no fabric, memory is asked for with a fabric handle first.
    local tiny=(--threads --tokens 16 --hidden 256 --experts 8 --topk 2)
    for tool in "${tools[@]}"; do
        local check=(compute-sanitizer --report-api-errors no --error-exitcode 1 --tool "$tool" "$program" roundtrip "${device[@]}")
        run sanitizer-"$tool" 90 "${check[@]}" "${one_node[@]}" "${tiny[@]}" --num-sms 4
        run ll-sanitizer-"$tool" 90 "${check[@]}" "${ll[@]}" "${tiny[@]}"
    done
}

if [[ $list ]]; then
    all_runs
    exit 0
fi
names=",$("$BASH" "$0" --list --gpus "$gpus" ${virtual:+--virtual} | tr '\n' ',')"
for name in $from ${only//,/ }; do
    [[ $names == *",$name,"* ]] || fail "$name: no run has this name on $gpus GPUs; --list prints them"
    file=$(needs "$name")
    [[ ${!file} ]] || fail "$name: needs --$file"
done

mkdir -p "$out" || fail "--out $out: cannot be made"
work=$(mktemp -d) || exit 2

# The figures of a run's output: tables without the columns that are in its JSON, and the lines that count round trips and errors.
figures() {
    local output=$work/$1.txt
    case $1 in
        *trips* | *neighbour | *replays) grep -E '^\[(iterations|graph|neighbour)\]' "$output" ;;
        *sanitizer*) grep 'ERROR SUMMARY' "$output" | tail -n 1 ;;
        ab-*) grep -E '^ +[0-9]+ ' "$output" | cut -c 14- ;;
        nccl) grep -E '^ +[0-9]+ ' "$output" ;;
        survivors | killed | residency) grep '^test result' "$output" ;;
        ll-* | packets-*)
            # Fewer than 100 samples have no 99th percentile.
            awk '/ rows to links / { printf "   tokens dispatch %8s  combine %8s     pair\n", $NF, $NF }
                /^ +[0-9]/ && NF == 10 { printf "%9s %8s %8s %8s %8s %8s\n", $2, $4, $5, $6, $7, $9 }' "$output"
            ;;
        *) awk '/^ +num_sms=/ { sms = $1 }
                NF == 0 { in_times = in_bytes = 0 }
                in_bytes && /^  (dispatch|combine|cached|uncached) / {
                    printf "  %-18s %9s us at the ceilings %8s\n", substr($0, 3, 18), $(NF - 1), $NF
                }
                / MB of a rank and call/ { in_bytes = 1 }
                / by expert, .* with a sort$/ { print substr($0, 3) }
                in_times && /^  (dispatch|combine|cached|uncached) / {
                    share = $NF ~ /%$/ ? $NF : ""
                    sub(/[|].*/, "")
                    printf "  %-18s %9s %9s %8s\n", substr($0, 3, 18), $(NF - 5), $(NF - 3), share
                }
                / avg +median / {
                    in_times = 1
                    print "  " sms "                 median       " (/ p99 / ? "p99" : "max") "   of the ceiling"
                }' "$output" ;;
    esac
}

# Packs what there is, and prints the tables last: the end of the output is what is read.
pack() {
    trap - EXIT HUP INT TERM
    local name why='for want of time'
    ((signal == 0)) || why="at signal $signal"
    if ((${#left_out[@]})); then
        note "left out $why: ${left_out[*]}"
        note "go on with: --from ${left_out[0]}"
    elif ((made == 0)); then
        note 'no run was made'
        failed=1
    fi
    if ((made > 0 && passed + failed == 0)); then
        note 'no run passed: all were skipped, for the reasons above'
        failed=1
    fi
    tar -C "$work" -czf "$out/results.tar.gz" . || failed=$((failed + 1))
    for name in $(tr ',' '\n' <<<"$names"); do
        if [[ -r $work/$name.txt ]]; then
            printf -- '-- %s\n' "$name"
            figures "$name"
        fi
    done | tee -a "$work/summary.txt"
    printf '%d runs, %d failed, %d left out, %d s\n' $made $failed ${#left_out[@]} $SECONDS | tee -a "$work/summary.txt"
    cp "$work/summary.txt" "$out/summary.txt" || failed=$((failed + 1))
    rm -rf "$work"
    exit $((signal ? 128 + signal : failed > 0))
}
trap pack EXIT
trap 'on_signal 1' HUP
trap 'on_signal 2' INT
trap 'on_signal 15' TERM

note "$(date -u +%F) $gpus GPUs, $("$program" --version)"
if [[ ! $virtual ]]; then
    note "$(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader | sort | uniq -c)"
fi
all_runs
