#!/bin/bash
# slurm.sh - prefill servers, decode servers and a router on the nodes of a Slurm job:
#
#   MODEL=/models/DeepSeek-V4-Flash HADAL_API_KEY=... sbatch --nodes=4 slurm.sh
#
# The first PREFILL nodes compute prompts, the others decode; the router is on the first node, at port
# ROUTER_PORT. KV_HOST is in GB; OPTIONS are added to every server. At its time limit, or by scancel --signal=TERM --batch JOB, the
# job drains: what runs is answered.
#SBATCH --job-name=hadal-pd
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@180
set -eu
: "${MODEL:?a folder that every node has}" "${HADAL_API_KEY:?the key of the clients}"
PREFILL=${PREFILL:-1} PORT=${PORT:-30000} TRANSFER_PORT=${TRANSFER_PORT:-30200} ROUTER_PORT=${ROUTER_PORT:-30080} KV_HOST=${KV_HOST:-64}
HADAL_PEER_KEY=$(head -c 32 /dev/urandom | base64)
export HADAL_PEER_KEY HADAL_API_KEY

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
prefill=("${nodes[@]:0:PREFILL}") decode=("${nodes[@]:PREFILL}")
[ ${#decode[@]} -gt 0 ] || { echo "${#nodes[@]} nodes, and $PREFILL of them for prefill: none is left" >&2; exit 1; }

with() { # SUFFIX NODE...: the list of their addresses
    local suffix=$1 list
    shift
    list=$(printf "%s$suffix," "$@")
    echo "${list%,}"
}

on() { # NODE COMMAND...
    srun --nodes=1 --ntasks=1 --overlap --exact --nodelist="$1" "${@:2}" &
}

# shellcheck disable=SC2086 # OPTIONS are words
{
    for node in "${prefill[@]}"; do
        on "$node" hadal serve "$MODEL" --host "$node" --port "$PORT" --role prefill \
            --transfer-listen "$node:$TRANSFER_PORT" --kv-host "$KV_HOST" ${OPTIONS:-}
    done
    peers=()
    for node in "${prefill[@]}"; do peers+=("$node:$PORT=$node:$TRANSFER_PORT"); done
    for node in "${decode[@]}"; do
        on "$node" hadal serve "$MODEL" --host "$node" --port "$PORT" --role decode \
            --prefill-peers "$(with "" "${peers[@]}")" --kv-host "$KV_HOST" ${OPTIONS:-}
    done
}
on "${nodes[0]}" hadal router --host "${nodes[0]}" --port "$ROUTER_PORT" \
    --prefill "$(with ":$PORT" "${prefill[@]}")" --decode "$(with ":$PORT" "${decode[@]}")"

# srun would kill at a signal of its own, so the steps get it from Slurm.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
while [ -n "$(jobs -rp)" ]; do wait || true; done
