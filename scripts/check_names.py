#!/usr/bin/env python3
"""Finds retired words in identifiers and file names. docs/glossary.md has the words that replace them.

A word is a part of an identifier between underscores, or a whole identifier. Where a retired word has
another, accepted sense, SENSES lists the identifiers or folders in which it may stand.
"""
import pathlib
import re
import sys

# retired word: what to say instead
WORDS = {
    "lease": "seq_kv, seq", "leases": "seqs", "lifetime": "kv_group", "reach": "lookback",
    "guide": "constraint", "guides": "constraints", "guided": "constrained", "steer": "constraint",
    "steered": "constrained", "flight": "inflight", "orders": "graph_inputs", "outcome": "graph_outputs",
    "nobody": "padding", "nobodys": "is_padding", "standing": "verifiable", "stood": "accepted",
    "stands": "is_accepted", "meet": "small_m", "meeting": "small_m", "widen": "dequantize",
    "fold": "reduce", "turned": "transposed", "halves": "split_fp16", "recall": "token_history",
    "said": "answer_tokens", "meter": "profiler", "noise": "random_fill", "lay": "prepare",
    "settle": "commit, process_output", "listen": "process_aborts", "chosen": "outputs, selected",
    "attend": "attention", "exec": "runner", "works": "inputs", "executor": "model_runner",
    "choosing": "sampling",
}  # fmt: skip
# whole identifiers
NAMES = {
    "hd_work": "hd_seq_input", "hd_chosen": "hd_seq_output", "hd_generation": "hd_request",
    "hd_part": "hd_delta", "hd_pool": "hd_thread_pool", "hd_mark": "hd_device_event",
    "hd_layout": "hd_parallel_config", "hd_share": "hd_shard", "hd_cut": "hd_shard_axis",
    "hd_exchange": "hd_comm", "index_select": "indexer_topk", "linear_grouped": "grouped_gemm",
    "n_choose": "n_sample", "n_score": "n_prompt_logprobs", "score_from": "prompt_logprobs_from",
    "hd_end": "hd_finish_reason", "hd_finish": "hd_finish_reason", "hd_reply_finish_reason": "hd_finish_reason",
    "HD_END_NOT": "HD_FINISH_NONE", "HD_END_STOP": "HD_FINISH_STOP", "HD_END_CANCELLED": "HD_FINISH_ABORT",
    "HD_MOST_DRAFTS": "HD_MAX_DRAFTS", "HD_MAX_TOP_LOGPROBS": "HD_MAX_ALTERNATIVES",
    "engine_answer": "engine_choice", "n_answers": "n_choices", "max_answers": "max_choices",
    "form_text": "format_text",
}  # fmt: skip
# word: identifiers (a pattern) and files (a pattern) where it means something else
SENSES = {
    "guided": (r"guided_(json|regex|choice|grammar|object|decoding\w*)", r"src/api/"),  # vLLM's parameters
    "outcome": (r"(api_|hub_)?outcome", r"(src|tests)/(api|hub|server|fakes|fuzz)/"),  # of an HTTP exchange or a transfer
    "flight": (r"in_flight", r""),
    "listen": (r"\w*listen\w*|\w*LISTEN\w*", r"src/(http|server)/|bench/|tests/"),  # sockets
    "settle": (r"http_quota_settle", r""),  # a quota's account
    "fold": (r"\w*", r"src/(tokenizer|grammar|chat)/"),  # case folding
    "exec": (r"exec|execv\w*", r""),
    "nobody": (r"CURLOPT_NOBODY", r""),
}
SUFFIXES = {".c", ".h", ".cu", ".cuh"}
OPAQUE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def retired(identifier, path):
    if identifier in NAMES:
        return NAMES[identifier]
    for word in identifier.lower().split("_"):
        if word not in WORDS:
            continue
        names, files = SENSES.get(word, (None, None))
        if names and re.fullmatch(names, identifier) and re.match(files, path):
            continue
        return WORDS[word]
    return None


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    findings = {}
    for top in ("src", "include", "tests", "bench", "examples"):
        for path in sorted(p for p in (root / top).rglob("*") if p.suffix in SUFFIXES):
            shown = str(path.relative_to(root))
            better = retired(path.stem, shown)
            if better:
                findings[shown, path.name] = (1, better)
            code = OPAQUE.sub(lambda m: "\n" * m.group(0).count("\n") or " ", path.read_text(encoding="utf-8"))
            for number, line in enumerate(code.split("\n"), 1):
                if line.lstrip().startswith("#include"):
                    continue
                for identifier in IDENTIFIER.findall(line):
                    better = retired(identifier, shown)
                    if better:
                        findings.setdefault((shown, identifier), (number, better))
    for (shown, identifier), (number, better) in findings.items():
        print(f"{shown}:{number}: {identifier}: say {better} (docs/glossary.md)")
    print(f"retired names: {len(findings)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
