#!/usr/bin/env bash
# gpu.sh - every test that needs a GPU, in one command, on the CUDA build.
#
#   make CUDA=1 BUILD=build-cuda all drivers build-cuda/hadal_test && tests/gpu.sh [PART...]
#
# | part | what it runs |
# |---|---|
# | ops | operators against the reference, steps as graphs against steps without; training's operators |
# | logits | every way to cut a sequence, the golden and the shared cases |
# | text | generated text, the shipped models against the CPU, precisions |
# | official | graphs, drafts, engines and the golden cases with --precision official, which others ask for in tests of their own |
# | updates | weights that PyTorch hands over by CUDA IPC and shared memory; memory of a GPU |
# | train | training beside the CPU's |
# | generic | ops, logits and text with --cuda-path generic: the kernels of other GPUs than Hopper, within their shared memory |
# | memcheck, racecheck, synccheck, initcheck | operators, each shape once, under compute-sanitizer; racecheck takes more than 200 s each for the compressor and the sampler |
# | ranks | one model on several GPUs, or on parts of one: experimental, docs/ranks.md |
#
# Without PART: all but racecheck and ranks, side by side but for updates and train, which look at the GPU's memory; on
# a GPU that is no Hopper generic alone. Several PARTs run one after the other. In ops and generic a CPU's tables are
# left to ./test (HADAL_TEST_GPU_ALONE). HADAL_CUDA_PATH=generic runs any part with those kernels. HADAL,
# HADAL_TEST, PYTHON and HADAL_SHARED name what is used; JOBS how many tests run side by side, with pytest-xdist;
# TESTS which groups of operators the tools watch ("ops:real_*"); LOGS a folder for all that the parts print.
# The last line is "N passed, N failed, N skipped". Without a GPU it exits 77.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit 1

export HADAL=${HADAL:-$PWD/build-cuda/hadal} HADAL_BACKEND=cuda PYTHONDONTWRITEBYTECODE=1
HADAL_TEST=${HADAL_TEST:-$PWD/build-cuda/hadal_test}
PYTHON=${PYTHON:-python3}
passed=0 failed=0 skipped=0
if [ -z "${LOGS-}" ]; then
    LOGS=$(mktemp -d)
    trap 'rm -rf "$LOGS"' EXIT
fi

gpu=$("$HADAL" version | grep '^gpu')
echo "$gpu"
if [[ $gpu == *none:* || -z $gpu ]]; then
    echo "no GPU to test on"
    exit 77
fi

# Adds "N passed, N failed, N skipped" in any order; a bad end without a failure is one.
add() { # RC TEXT
    local p f s
    p=$(grep -oiE '[0-9]+ passed' <<<"$2" | awk '{n += $1} END {print n + 0}')
    f=$(grep -oiE '[0-9]+ (failed|error)' <<<"$2" | awk '{n += $1} END {print n + 0}')
    s=$(grep -oiE '[0-9]+ skipped' <<<"$2" | awk '{n += $1} END {print n + 0}')
    [ "$1" != 0 ] && [ "$f" = 0 ] && f=1
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    echo "== $p passed, $f failed, $s skipped"
}

unit() { # COMMAND...
    local log=$LOGS/$part.log rc
    "$@" >"$log" 2>&1
    rc=$?
    grep -E '^\[ +(ERROR|LINE|FAILED|SKIPPED) |=========' "$log" | head -40
    add $rc "$(sed -nE 's/^\[ +(PASSED|FAILED|SKIPPED) +\] ([0-9]+) test\(s\).*/\2 \1/p' "$log")"
}

serving=(device ops sample drafts lanes rebuild comm decode_graph fetched_experts engine) # groups that no training is in
ops() { HADAL_TEST_GPU_ALONE=1 unit "$HADAL_TEST" "${serving[@]}" backward gradients; }

ranks() {
    unit "$HADAL_TEST" comm decode_graph ranks engine_ranks engine_updates
    unit "$HADAL_TEST" comm_ipc # alone: it forks, which a process that has used CUDA cannot
    end_to_end tests/e2e/test_ranks_cuda.py
    end_to_end tests/e2e/test_rebalance.py tests/e2e/test_weight_ranks.py tests/e2e/test_dwdp.py -k "not process and not comes_back"
}

# What a tool reports although it is right; docs/testing.md has the reasons.
alarms() { # TOOL
    case $1 in
    memcheck) echo --report-api-errors no ;; # a test launches what a GPU refuses
    racecheck) echo --kernel-name-exclude kns=attention_tiles --kernel-name-exclude kns=gemm_fp8 ;;
    synccheck) echo --kernel-name-exclude kns=attention_tiles ;;
    esac
}

sanitize() { # TOOL
    if ! command -v compute-sanitizer >/dev/null; then
        echo "compute-sanitizer is not installed"
        skipped=$((skipped + 1))
        return
    fi
    local groups options
    read -ra groups <<<"${TESTS:-ops sample}"
    read -ra options <<<"$(alarms "$1")"
    HADAL_TEST_BRIEF=1 unit compute-sanitizer --tool "$1" "${options[@]}" --error-exitcode 99 "$HADAL_TEST" "${groups[@]}"
}

end_to_end() { # pytest arguments
    local log=$LOGS/$part.py.log rc parallel=()
    [ -n "${JOBS-}" ] && parallel=(-n "$JOBS")
    "$PYTHON" -m pytest -q -rs -p no:cacheprovider "${parallel[@]}" "$@" >"$log" 2>&1
    rc=$?
    tail -40 "$log"
    add $rc "$(grep -E '^=*.* in [0-9.]+s' "$log" | tail -1)"
}

logits() { end_to_end tests/e2e/test_logits.py; }
updates() { end_to_end tests/e2e/test_torch_pickles.py tests/e2e/test_memory_occupation.py -k "test_torch_pickles or memory_of_a_gpu"; }
train() { end_to_end tests/e2e/test_train_cuda.py; }
text() { end_to_end tests/e2e/test_tiny.py tests/e2e/test_generate.py tests/e2e/test_cuda.py tests/e2e/test_precision.py; }

official() {
    HADAL_PRECISION=official unit "$HADAL_TEST" lanes drafts decode_graph engine rebuild
    end_to_end tests/e2e/test_official_cases.py -k cuda
}

generic() {
    local -x HADAL_CUDA_PATH=generic HADAL_TEST_GPU_ALONE=1
    unit "$HADAL_TEST" "${serving[@]}"
    logits
    text
}

# Each part in a process of its own; what they print comes in their order.
side_by_side() { # PART...
    local -A pids
    for part in "$@"; do
        LOGS=$LOGS tests/gpu.sh "$part" >"$LOGS/$part.out" 2>&1 &
        pids[$part]=$!
    done
    for part in "$@"; do
        local rc=0
        wait "${pids[$part]}" || rc=$?
        sed '1d;$d' "$LOGS/$part.out"
        add $rc "$(tail -1 "$LOGS/$part.out")"
    done
}

run_part() {
    echo "-- $part"
    case $part in
    ops | logits | updates | train | text | official | generic | ranks) "$part" ;;
    *check) sanitize "$part" ;;
    *) echo "error: no part $part; see tests/gpu.sh" && exit 2 ;;
    esac
}

parts=("$@")
if [ $# = 0 ] && [[ $gpu == *"cuda path sm90"* ]]; then
    side_by_side ops logits text official generic memcheck synccheck initcheck
    parts=(updates train)
elif [ $# = 0 ]; then
    parts=(generic)
fi
for part in "${parts[@]}"; do
    begun=$SECONDS
    run_part
    echo "-- $part took $((SECONDS - begun)) s"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
