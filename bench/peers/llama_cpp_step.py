"""Times one prompt and decoding steps of a GGUF in llama.cpp, by its Python package's low-level
interface, and prints the seconds as JSON. By processor time of the calling thread, which is all
there is with one thread, or by the clock."""

import argparse
import json
import statistics
import time

import llama_cpp as ll


def decode(ctx, batch, tokens):
    """tokens: (id, position, sequence, wants logits)"""
    batch.n_tokens = len(tokens)
    for i, (token, position, sequence, logits) in enumerate(tokens):
        batch.token[i] = token
        batch.pos[i] = position
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.logits[i] = logits
    if ll.llama_decode(ctx, batch) != 0:
        raise RuntimeError("llama_decode failed")
    ll.llama_synchronize(ctx)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("gguf")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--cpu-time", action="store_true")
    a = p.parse_args()
    now = time.thread_time if a.cpu_time else time.perf_counter

    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(a.gguf.encode(), ll.llama_model_default_params())
    if not model:
        raise RuntimeError(f"{a.gguf}: cannot be loaded")
    most = max(a.batches)
    params = ll.llama_context_default_params()
    params.n_ctx = (a.prompt + a.context + 64) * most
    params.n_batch = params.n_ubatch = max(a.prompt, a.context)
    params.n_seq_max = most
    params.n_threads = params.n_threads_batch = a.threads
    ctx = ll.llama_init_from_model(model, params)
    vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    batch = ll.llama_batch_init(max(a.prompt, a.context, most), 0, 1)
    token = lambda i: i * 7919 % vocab

    def prompt(n, sequence):
        decode(ctx, batch, [(token(i), i, sequence, i == n - 1) for i in range(n)])

    def median(run):
        times = []
        for i in range(a.repeat + 1):
            begun = now()
            run(i)
            times.append(now() - begun)
        return statistics.median(times[1:])

    def fresh_prompt(_):
        ll.llama_memory_clear(ll.llama_get_memory(ctx), True)
        prompt(a.prompt, 0)

    out = {"version": ll.__version__, "prefill": median(fresh_prompt), "decode": {}}
    for n in a.batches:
        ll.llama_memory_clear(ll.llama_get_memory(ctx), True)
        for s in range(n):
            prompt(a.context, s)
        step = lambda i: decode(
            ctx, batch, [(token(s), a.context + i, s, True) for s in range(n)]
        )
        out["decode"][n] = median(step)
    print(json.dumps(out))


main()
