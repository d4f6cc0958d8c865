"""Windows that no tier has any more are rebuilt (V4): answers with long cached prefixes and few snapshots are those of
requests that find nothing cached, on one rank and several, with drafts, constraints, HiSparse and a disk."""

import concurrent.futures

import pytest
from serving import Server
from test_kv_ranks import wait_until_quiet
from toy_models import make_toy_model

PAGE, WINDOW, LAYERS, TEXT = 128, 64, 5, 1400
LENGTH = PAGE + LAYERS * (WINDOW - 1)  # of a rebuild; a replay of one page would leave other windows
CUTS = [1290, 1000, 800, 530]  # where texts leave the first one
FEW = ("--context", 1700, "--max-running", 2, "--queue", 64, "--kv-tokens", 80000, "--snapshot-tokens", PAGE)


def text_of(number, n=TEXT):
    return [8 + (k * k * (number + 2) + 3 * k) % 300 for k in range(n)]


def prompt_at(cut, base=0):
    return text_of(base)[:cut] + text_of(cut, 1 + cut % 90)


def ask(server, prompt, number=0, salt=None, constraint=None):
    sampling = {"max_new_tokens": 12, "temperature": 0.8 * (number % 2), "sampling_seed": number}
    sampling |= constraint or {"ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    reply = server.post("/generate", body | ({"cache_salt": salt} if salt else {}))
    assert reply.status == 200, reply.text
    info = reply.json["meta_info"]
    return (reply.json["output_ids"], info["output_token_logprobs"], info["output_top_logprobs"]), info["cached_tokens"]


def rebuilt(server):
    figures = server.stats()
    return figures["hadal_kv_rebuilt_windows_total"], figures["hadal_kv_rebuilt_rows_total"]


def lose_windows(server, base=0):
    """The text's entries stay; other texts take all memory for windows."""
    for number in range(base, base + 6):
        ask(server, text_of(number))


@pytest.fixture(scope="module", params=["v4", "v4_dspark"])
def toy(request, tmp_path_factory):
    return make_toy_model(request.param, tmp_path_factory.mktemp("rebuild") / "model", sliding_window=WINDOW)


def check(server):
    """One after the other, then at once while others decode; each beside a salt of its own, with nothing cached."""
    lose_windows(server)
    for number, cut in enumerate(CUTS):
        constraint = {"regex": "[a-z ]{10,40}"} if number == 2 else None
        want, cached = ask(server, prompt_at(cut), number, f"alone{cut}", constraint)
        assert cached == 0
        got, cached = ask(server, prompt_at(cut), number, None, constraint)
        assert got == want
        assert cached == cut // PAGE * PAGE
        assert rebuilt(server) == (number + 1, (number + 1) * LENGTH)
    other = text_of(0)[: CUTS[1]] + [9]
    again, cached = ask(server, other, 1)  # what was rebuilt is cached
    assert cached == CUTS[1] // PAGE * PAGE
    assert again == ask(server, other, 1, "again")[0]
    assert rebuilt(server)[0] == len(CUTS)
    lose_windows(server, 50)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        prompts = [prompt_at(cut + 7 * k, 50) for k in range(3) for cut in CUTS]
        want = pool.map(lambda k: ask(server, prompts[k], k, f"crowd{k}")[0], range(len(prompts)))
        got = pool.map(lambda k: ask(server, prompts[k], k)[0], range(len(prompts)))
        assert list(got) == list(want)
    assert rebuilt(server)[0] > len(CUTS)


CASES = {
    "chunks": ("--chunk", 37),
    "drafts": ("--draft-tokens", 3, "--chunk", 64),
    "cp": ("--cp", 2),
    "tp": ("--tp", 2, "--draft-tokens", 2),
    "ep": ("--ep", 2, "--chunk", 100),
    "hisparse": ("--hisparse", 20, "--chunk", 100),
    "fp8": ("--kv-cache-dtype", "fp8", "--chunk", 100),
}


@pytest.mark.parametrize("case", CASES)
def test_rebuilt_windows_change_nothing(case, toy):
    server = Server(*FEW, *CASES[case], model=toy)
    check(server)
    server.close()


def test_where_windows_are_not_rebuilt(toy):
    """Several attention groups would have to agree on rows; choices of every position are kept by computing it."""
    for flags in (("--dp", 2), ("--routed-experts",), ("--indexer-topk",)):
        server = Server(*FEW, *flags, model=toy)
        ask(server, text_of(0))
        for number in range(1, 8):
            ask(server, text_of(number))
        for number, cut in enumerate(CUTS):
            got = ask(server, prompt_at(cut), number)[0]
            assert got == ask(server, prompt_at(cut), number, f"alone{cut}")[0]
        assert rebuilt(server) == (0, 0)
        server.close()


def test_a_recorder_leaves_rebuilds_out(toy, tmp_path):
    server = Server(*FEW, "--expert-record-dir", tmp_path, "--expert-record", "per-token", model=toy)
    lose_windows(server)
    prompts = [prompt_at(cut) for cut in CUTS]
    want = [ask(server, p, k, f"alone{k}")[0] for k, p in enumerate(prompts)]
    assert server.post("/start_expert_distribution_record").status == 200
    assert [ask(server, p, k)[0] for k, p in enumerate(prompts)] == want
    assert rebuilt(server)[0] == len(CUTS)
    assert server.post("/stop_expert_distribution_record").status == 200
    assert server.post("/dump_expert_distribution_record").status == 200
    assert list(tmp_path.iterdir())
    server.close()


def test_entries_of_a_disk(toy, tmp_path):
    """A text that ends with a page and is repeated after a restart: the disk has no window before its last page."""
    prompt = text_of(0)[: 8 * PAGE]
    flags = (*FEW, "--kv-host", 1, "--kv-disk", f"{tmp_path}:1")
    server = Server(*flags, model=toy)
    want = ask(server, prompt)[0]
    wait_until_quiet(server)
    server.close()
    server = Server(*flags, model=toy)
    got, cached = ask(server, prompt)
    assert got == want
    assert cached == 7 * PAGE
    assert rebuilt(server)[0] == 1
    server.close()
