#!/usr/bin/env bash
# gpu.sh - every test that needs a GPU, in one command, on the CUDA build.
#
#   make CUDA=1 BUILD=build-cuda all drivers build-cuda/hadal_test && tests/gpu.sh [PART...]
#
# Parts: ops (operators against the reference, steps as graphs against steps without), memcheck,
# racecheck, synccheck, initcheck (the operators, each shape once, under compute-sanitizer), logits
# (every way to cut a sequence, the golden and the shared cases), updates (weights that PyTorch hands
# over by CUDA IPC and shared memory), train (training beside the CPU's), text (generated text, the shipped model against the CPU,
# precisions), official (graphs, drafts, engines with --precision official, which the other parts ask for
# in tests of their own), generic (operators, logits and text with --cuda-path generic: the kernels of other GPUs than
# Hopper, within the shared memory that those have), ranks (one model on several GPUs, or on parts of one: experimental, docs/ranks.md). All but
# ranks by default; on a GPU that is no Hopper, generic. HADAL_CUDA_PATH=generic runs any part with
# those kernels: HADAL_CUDA_PATH=generic tests/gpu.sh memcheck. HADAL, HADAL_TEST, PYTHON and
# HADAL_SHARED name what is used; JOBS how many tests run side by side, with pytest-xdist; TESTS which
# groups of operators the tools watch ("ops:real_*"); LOGS a folder for all that the parts print.
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
ops() { unit "$HADAL_TEST" "${serving[@]}" backward gradients; }

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
    local log=$LOGS/$part.log rc parallel=()
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

official() { HADAL_PRECISION=official unit "$HADAL_TEST" lanes drafts decode_graph engine rebuild; }

generic() {
    local -x HADAL_CUDA_PATH=generic
    unit "$HADAL_TEST" "${serving[@]}"
    logits
    text
}

parts=("$@")
if [ $# = 0 ] && [[ $gpu == *"cuda path sm90"* ]]; then
    parts=(ops memcheck racecheck synccheck initcheck logits updates train text official generic)
elif [ $# = 0 ]; then
    parts=(generic)
fi
for part in "${parts[@]}"; do
    echo "-- $part"
    case $part in
    ops | logits | updates | train | text | official | generic | ranks) "$part" ;;
    *check) sanitize "$part" ;;
    *) echo "error: no part $part; see tests/gpu.sh" && exit 2 ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
