#!/usr/bin/env python3
"""Finds retired words. docs/glossary.md has the words that replace them.

In identifiers and file names a word is a part between underscores, or the whole identifier. Where a
retired word has another, accepted sense, SENSES lists the identifiers or folders in which it may stand.
Words without another sense (TEXT) are refused in comments, strings and pages too.
"""
import pathlib
import re
import sys

# retired word: what to say instead
WORDS = {
    "lifetime": "kv_group", "reach": "lookback",
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
    "listen": (r"\w*listen\w*|\w*LISTEN\w*", r"src/(comm|http|server|cli/bench)/|bench/|tests/"),  # sockets
    "settle": (r"http_quota_settle", r""),  # a quota's account
    "fold": (r"\w*", r"src/(tokenizer|grammar|chat)/"),  # case folding
    "exec": (r"exec|execv\w*", r""),
    "nobody": (r"CURLOPT_NOBODY", r""),
}
# Words with no other sense: refused in every text, comments and strings included.
TEXT = {
    "n_choose": "n_sample", "n_score": "n_prompt_logprobs",
    "index_select": "indexer_topk", "linear_grouped": "grouped_gemm",
"attend_naive": "attention_naive", "lay_step": "prepare_step",
    "settle_step": "commit_step", "steer": "constraint", "steers": "constraint", "steered": "constrained",
    "guide": "constraint", "guides": "constraint", "widen": "dequantize", "rank_place": "rank_coords",
    "fixed.c": "decode_graph.c", "ahead.c": "overlap.c", "choose.c": "sampling.c",
    "made-up": "random", "made up": "random", "nobody's": "padding, without an owner",
} | NAMES  # fmt: skip
TEXT_WORD = re.compile(r"(?<![\w.>-])(" + "|".join(map(re.escape, TEXT)) + r")(?![\w-])")
# Pages that name retired words, and texts of another kind: recorded figures, stories for training.
TEXT_EXCEPT = re.compile(r"docs/(glossary\.md|perf/log/)|ARCHITECTURE\.md|scripts/check_names\.py|tools/train_tiny/|src/server/web/")
TEXT_SUFFIXES = {".c", ".h", ".cu", ".cuh", ".py", ".md", ".sh", ".mk", ".js"}
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


def in_identifiers(root):
    """Yields file, identifier, line and what to say instead."""
    for top in ("src", "include", "tests", "bench", "examples"):
        for path in sorted(p for p in (root / top).rglob("*") if p.suffix in SUFFIXES):
            shown = str(path.relative_to(root))
            better = retired(path.stem, shown)
            if better:
                yield shown, path.name, 1, better
            code = OPAQUE.sub(lambda m: "\n" * m.group(0).count("\n") or " ", path.read_text(encoding="utf-8"))
            for number, line in enumerate(code.split("\n"), 1):
                if line.lstrip().startswith("#include"):
                    continue
                for identifier in IDENTIFIER.findall(line):
                    better = retired(identifier, shown)
                    if better:
                        yield shown, identifier, number, better


def in_texts(root):
    """The same for whole words anywhere."""
    for top in ("README.md", "docs", "src", "include", "tests", "bench", "examples", "scripts", "packaging"):
        files = [root / top] if (root / top).is_file() else sorted((root / top).rglob("*"))
        for path in files:
            shown = str(path.relative_to(root))
            if path.suffix not in TEXT_SUFFIXES or TEXT_EXCEPT.match(shown):
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
                for word in TEXT_WORD.findall(line):
                    yield shown, word, number, TEXT[word]


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    findings = {}
    for shown, word, number, better in [*in_identifiers(root), *in_texts(root)]:
        findings.setdefault((shown, word), (number, better))
    for (shown, identifier), (number, better) in findings.items():
        print(f"{shown}:{number}: {identifier}: say {better} (docs/glossary.md)")
    print(f"retired names: {len(findings)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
