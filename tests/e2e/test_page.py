"""The web page in headless Chromium: with scripted answers (page_mock.py), and with hadal itself.
"""

import gzip
import http.client
import json
import re
import urllib.error
import urllib.request

import pytest

from conftest import ROOT
from page_fixtures import IDLE, ask, browser, last_answer, mock, scratch, served, visit, wait_for_answers, write  # noqa: F401
from page_mock import CSP
from test_pd import Pd
from test_router import Router, of

pytestmark = pytest.mark.slow

HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "private, no-cache",
}


# ---- asking and answering ----


def test_an_answer_with_thinking_and_figures(mock, visit):
    server = mock()
    page = visit(server.address)
    ask(page, "What is 347 + 586?")
    assert last_answer(page) == "347 + 586 = 933"
    assert page.js("!document.querySelector('.thought').open")
    page.click(".thought summary")
    assert "hundreds: 3 + 5 + 1 = 9" in page.text(".thought-text")
    assert re.match(r"Thought for \d+\.\d s", page.text(".thought summary"))
    figures = page.text(".figures")
    for part in (r"\d+ tokens", "first after", "prompt 16, 8 cached", r"drafts \d+ of \d+, 2 tokens a step"):
        assert re.search(part, figures), figures
    body = server.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "What is 347 + 586?"}]
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert body.keys() == {"messages", "stream", "stream_options", "seed", "thinking"}


def test_a_tool_runs_in_the_page_and_its_result_goes_back(mock, visit):
    server = mock()
    page = visit(server.address)
    page.click(".example[data-tools]")
    wait_for_answers(page, 2)
    assert last_answer(page) == "The answer is 178377."
    assert 'calculator {"expression": "4821 * 37"}' in page.text(".call")
    assert '{"result": 178377}' in page.text(".call")
    first, second = server.bodies
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculator", "lookup"]
    call = second["messages"][1]["tool_calls"][0]
    assert call["id"] == second["messages"][2]["tool_call_id"] == "call_1"
    assert second["messages"][1]["reasoning_content"].startswith("I use the calculator")


def test_a_call_that_nobody_answers_is_shown_and_not_sent_again(mock, visit):
    server = mock()
    page = visit(server.address)
    ask(page, "light")
    assert 'set_light {"on": true}' in page.text(".call")
    ask(page, "and now")
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["light", "and now"]


def test_a_deleted_conversation_stays_deleted_while_its_answer_comes_in(mock, visit):
    server = mock(pause=0.002)
    page = visit(server.address)
    write(page, "endless")
    page.press("Enter")
    page.until("document.querySelector('.answer .body')?.innerText.length > 10")
    page.js("document.querySelector('#chats [aria-label^=Delete]').click(), document.querySelector('#chats [aria-label^=Delete]').click()")
    page.until(IDLE)
    assert page.js("document.querySelectorAll('.choose').length + document.querySelectorAll('.answer').length") == 0
    assert page.js("Object.keys(localStorage).filter(key => key.startsWith('hadal.chat.'))") == []


@pytest.mark.parametrize("expression, result", [
    ("2 + 3 * 4", 14), ("(2 + 3) * -4", -20), ("7 / 2", 3.5), ("100 - 1 - 9", 90),
    ("2 +", None), ("alert(1)", None), ("1;2", None), ("", None),
])  # fmt: skip
def test_the_calculator_reads_arithmetic_only(scratch, expression, result):
    text = scratch.js(f"import('./page/tools.js').then(t => t.run('calculator', {json.dumps(json.dumps({'expression': expression}))}))")
    assert json.loads(text).get("result") == result


def test_stop_keeps_what_came_and_leaves_the_server(mock, visit):
    server = mock(pause=0.002)
    page = visit(server.address)
    write(page, "endless")
    page.press("Enter")
    page.until("document.querySelector('.answer .body')?.innerText.length > 100")
    assert page.js("document.getElementById('send').getAttribute('aria-label')") == "Stop"
    page.press("Escape")
    page.until(IDLE)
    assert server.vanished.wait()
    assert "stopped" in page.text(".figures")
    assert last_answer(page).startswith("down and down and")
    ask(page, "again")
    assert server.bodies[1]["messages"][1]["content"].startswith("down and")


def test_regenerate_and_edit_replace_the_end(mock, visit):
    server = mock()
    page = visit(server.address)
    ask(page, "one")
    ask(page, "two")
    page.js("[...document.querySelectorAll('button')].find(b => b.textContent === 'Regenerate').click()")
    wait_for_answers(page, 2)
    first, again = server.bodies[1:3]
    assert first["messages"] == again["messages"] and first["seed"] != again["seed"]
    page.js("document.getElementById('prompt').focus()")
    page.press("ArrowUp")
    assert page.js("document.getElementById('prompt').value") == "two"
    assert page.js("document.querySelectorAll('.faded').length") == 2
    page.press("Escape")
    assert page.js("document.querySelectorAll('.faded').length") == 0
    page.press("ArrowUp")
    page.type(" and a half")
    page.press("Enter")
    wait_for_answers(page, 2)
    assert last_answer(page) == "You said: two and a half"
    assert [m["content"] for m in server.bodies[3]["messages"]] == ["one", "You said: one", "two and a half"]


def test_settings_are_sent_and_kept(mock, visit):
    server = mock()
    page = visit(server.address)
    page.click("#settings-open")
    values = {"temperature": "0.5", "top_p": "0.9", "max_tokens": "77", "seed": "5", "draft_tokens": "3",
              "think": "on", "effort": "high", "system": "Be brief."}  # fmt: skip
    for name, value in values.items():
        page.js(f"(f => {{ f.value = {json.dumps(value)}; f.dispatchEvent(new Event('input', {{bubbles: true}})); }})(document.querySelector('[name={name}]'))")
    page.press("Escape")
    page.click("#tools")
    page.open(server.address)
    assert page.js("document.getElementById('tools').getAttribute('aria-pressed')") == "true"
    ask(page, "hello")
    body = server.bodies[-1]
    expected = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 77, "seed": 5, "draft_tokens": 3,
                "thinking": {"type": "enabled"}, "reasoning_effort": "high"}  # fmt: skip
    assert {name: body.get(name) for name in expected} == expected
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_conversations_are_kept_chosen_and_deleted(mock, visit):
    server = mock()
    page = visit(server.address)
    ask(page, "first talk")
    page.click("#new")
    ask(page, "second talk")
    titles = "[...document.querySelectorAll('.choose')].map(b => b.textContent)"
    assert page.js(titles) == ["second talk", "first talk"]
    width = page.js("document.getElementById('side').offsetWidth")
    page.js("document.querySelector('.choose').textContent = 'a long title '.repeat(9)")
    assert page.js("document.getElementById('side').offsetWidth") == width
    page.open(server.address)
    assert last_answer(page) == "You said: second talk"
    page.js("document.querySelectorAll('.choose')[1].click()")
    assert last_answer(page) == "You said: first talk"
    remove = "document.querySelector('#chats [aria-label=\"Delete first talk\"]')"
    page.js(f"{remove}.click()")
    assert page.js(f"{remove}.textContent") == "Delete?"
    page.js(f"{remove}.click()")
    assert page.js(titles) == ["second talk"]
    assert page.js("document.body.classList.contains('fresh')")


# ---- what goes wrong ----


def test_errors_are_said_and_can_be_tried_again(mock, visit):
    server = mock()
    page = visit(server.address, expected=["status of 4"])
    ask(page, "busy")
    assert page.text(".error p") == "The queue is full. Try again in 3 s."
    assert page.js("document.querySelector('.error').getAttribute('role')") == "alert"
    ask(page, "wrong")
    assert "temperature must be at least 0." in page.text("#messages")
    ask(page, "breaks")
    assert last_answer(page) == "The sea is"
    assert "The connection ended before the answer did." in page.text("#messages")
    server.stop()
    ask(page, "nobody")
    assert "The server cannot be reached." in page.text("#messages")
    page.errors.clear()


def test_a_key_is_asked_for_and_kept_for_the_tab(mock, visit):
    server = mock(key="secret")
    page = visit(server.address, expected=["status of 401"])
    page.until("document.getElementById('key-dialog').open")
    assert page.text("#key-said") == ""
    page.type("secret")
    page.press("Enter")
    page.until("document.getElementById('model').textContent === 'mock'")
    ask(page, "hello")
    assert last_answer(page) == "You said: hello"
    assert "secret" not in page.js("JSON.stringify(localStorage) + location.href")


def test_a_wrong_key_is_called_wrong_and_asked_for_again(mock, visit):
    server = mock(key="secret")
    page = visit(server.address, expected=["status of 401"])
    page.until("document.getElementById('key-dialog').open")
    page.type("sekret")
    page.press("Enter")
    page.until("document.getElementById('key-dialog').open && document.getElementById('key-said').textContent")
    assert page.text("#key-said") == "The server does not accept this key."
    assert page.js("document.getElementById('key').getAttribute('aria-invalid')") == "true"
    assert page.text("#model") == "wrong API key"
    page.press("Escape")
    ask(page, "hello")  # the key there is still the wrong one
    assert "This key is unknown." in page.text("#messages")
    page.until("document.getElementById('key-dialog').open && document.getElementById('key-said').textContent")
    page.press("Escape")
    page.click("#tab-engine")
    page.until("document.getElementById('live').textContent === 'The server does not accept the API key'")
    page.click("#settings-open")
    page.click("#key-open")
    page.type("secret")
    page.press("Enter")
    page.until("document.getElementById('live').textContent === 'Live'")
    assert page.text("#model") == "mock"


def test_a_link_fills_the_box_and_sends_nothing(mock, visit):  # E12
    server = mock()
    page = visit(server.address + "?q=delete%20everything")
    assert page.js("document.getElementById('prompt').value") == "delete everything"
    assert server.bodies == []


def test_a_question_says_its_place_in_the_queue(mock, visit):
    server = mock()
    server.place = 3
    page = visit(server.address)
    write(page, "hello")
    page.press("Enter")
    page.until("document.querySelector('.wait').innerText === 'Place 3 in the queue'")
    server.place = 1
    page.until("document.querySelector('.wait').innerText === 'Place 1 in the queue'")
    server.place = 0
    wait_for_answers(page, 1)
    assert page.js("document.querySelector('.wait').checkVisibility()") is False
    server.place = 1
    write(page, "stop me")
    page.press("Enter")
    page.until("[...document.querySelectorAll('.wait')].at(-1).innerText === 'Place 1 in the queue'")
    page.press("Escape")
    page.until(IDLE)
    server.place = 0


# ---- files that go with a question ----


def give(page, name, files):
    """A drop or paste of files [[name, text]]."""
    page.js(f"""(files => {{
        const carried = new DataTransfer();
        for (const [name, text] of files) carried.items.add(new File([typeof text === 'string' ? text : new Uint8Array(text)], name));
        const event = {json.dumps(name)} === 'paste'
            ? new ClipboardEvent('paste', {{clipboardData: carried, bubbles: true, cancelable: true}})
            : new DragEvent({json.dumps(name)}, {{dataTransfer: carried, bubbles: true, cancelable: true}});
        document.getElementById('prompt').dispatchEvent(event);
    }})({json.dumps(files)})""")


CHIPS = "[...document.querySelectorAll('#files li')].map(li => li.firstChild.data)"


def test_files_are_dropped_and_pasted_and_go_into_the_message(mock, visit):
    server = mock()
    page = visit(server.address)
    give(page, "dragover", [["a.py", "x"]])
    assert page.js("document.querySelector('.dropping') !== null")
    give(page, "drop", [["a.py", "print('```')\n"], ["b <b>.txt", "tief 模型"]])
    page.until(f"{CHIPS}.length === 2")
    give(page, "paste", [["c.md", "c"]])
    page.until(f"{CHIPS}.length === 3")
    page.click("#files [aria-label='Remove c.md']")
    assert page.js(CHIPS) == ["a.py", "b <b>.txt"]
    ask(page, "What is this?")
    content = server.bodies[0]["messages"][0]["content"]
    assert content == "File \"a.py\":\n````\nprint('```')\n````\n\nFile \"b <b>.txt\":\n```\ntief 模型\n```\n\nWhat is this?"
    assert page.js(CHIPS) == []
    assert page.js("[...document.querySelectorAll('.question .file summary')].map(s => s.firstChild.data)") == ["a.py", "b <b>.txt"]
    assert page.text(".question .bubble") == "What is this?"
    page.open(server.address)  # kept with the conversation
    assert page.js("document.querySelectorAll('.question .file').length") == 2
    page.js("document.getElementById('prompt').focus()")
    page.press("ArrowUp")
    assert page.js(CHIPS) == ["a.py", "b <b>.txt"]
    page.press("Enter")
    wait_for_answers(page, 1)
    assert server.bodies[1]["messages"][0]["content"] == content


def test_what_is_no_text_or_too_large_is_refused_with_a_reason(mock, visit):
    server = mock()
    page = visit(server.address)
    give(page, "drop", [["a.png", [137, 80, 78, 71, 255, 0]], ["nul.txt", "a\0b"], ["large.txt", "x" * (256 * 1024 + 1)], ["good.txt", "x" * (256 * 1024)], ["more.txt", "x"]])
    page.until("document.getElementById('files-said').textContent")
    said = page.text("#files-said")
    for words in ("a.png is not a text file.", "nul.txt is not a text file.", "large.txt is too large", "more.txt is too large"):
        assert words in said
    assert page.js(CHIPS) == ["good.txt"]
    give(page, "drop", [[f"{n}.txt", ""] for n in range(11)])
    page.until("document.getElementById('files-said').textContent.includes('10 files')")
    assert page.js(f"{CHIPS}.length") == 10
    assert server.bodies == []


# ---- conversations ----


TITLES = "[...document.querySelectorAll('.choose')].map(b => b.textContent)"


def fill(page, selector, text):
    page.js(f"(f => {{ f.value = {json.dumps(text)}; f.dispatchEvent(new Event('input', {{bubbles: true}})); }})(document.querySelector({json.dumps(selector)}))")


def test_conversations_are_found_and_renamed(mock, visit):
    server = mock()
    page = visit(server.address)
    ask(page, "the deep trench")
    page.click("#new")
    ask(page, "markdown")
    page.click("#new")
    ask(page, "third")
    assert page.js(TITLES) == ["third", "markdown", "the deep trench"]
    for words, found in (("TRENCH", ["markdown", "the deep trench"]), ("mariana", ["markdown"]), ("nowhere", []), ("", ["third", "markdown", "the deep trench"])):
        fill(page, "#search", words)
        assert page.js(TITLES) == found, words
        assert page.text("#found") == ("" if found else "Nothing found.")
    page.click("#chats [aria-label='Rename or save third']")
    assert page.js("document.activeElement.id + document.activeElement.value") == "chat-titlethird"
    page.js("document.getElementById('chat-title').select()")
    page.type("<b>New</b> name")
    page.press("Enter")
    page.until("!document.getElementById('chat-dialog').open")
    assert page.js(TITLES) == ["<b>New</b> name", "markdown", "the deep trench"]
    ask(page, "more")  # does not bring the old title back
    page.open(server.address)
    assert page.js(TITLES)[0] == "<b>New</b> name"


def test_conversations_are_saved_and_read_in(mock, visit):
    server = mock()
    page = visit(server.address)
    give(page, "drop", [["a.txt", "inside"]])
    page.until(f"{CHIPS}.length === 1")
    ask(page, "What is 347 + 586?")
    page.js("URL.createObjectURL = (blob) => { window.blob = blob; return '#'; }")
    page.click("#chats [aria-label^='Rename or save']")
    texts = {}
    for kind in ("markdown", "json"):
        name = page.js(f"new Promise(done => {{ HTMLAnchorElement.prototype.click = function () {{ done(this.download); }}; document.getElementById('save-{kind}').click(); }})")
        texts[name] = page.js("window.blob.text()")
    markdown, source = texts["What-is-347-586.md"], texts["What-is-347-586.json"]
    assert markdown.startswith("# What is 347 + 586?\n\n## Question\n\nFile \"a.txt\":\n```\ninside\n```\n\nWhat is 347 + 586?\n\n## Answer\n\n")
    page.press("Escape")
    page.js("document.querySelector('#chats [aria-label^=Delete]').click(), document.querySelector('#chats [aria-label^=Delete]').click()")
    assert page.js(TITLES) == []

    def read_in(text):
        page.js(f"""(text => {{
            const carried = new DataTransfer();
            carried.items.add(new File([text], 'talk.json'));
            const input = document.getElementById('import-file');
            input.files = carried.files;
            input.dispatchEvent(new Event('change'));
        }})({json.dumps(text)})""")

    read_in(source)
    page.until(f"{TITLES}.length === 1")
    assert page.text(".question .file summary").startswith("a.txt")
    assert json.loads(source)["messages"] == page.js("JSON.parse(Object.entries(localStorage).find(([key]) => key.startsWith('hadal.chat.'))[1]).messages")
    for text in ("", "{", "[]", '{"format": "hadal conversation", "messages": [{"role": "system"}]}', '{"format": "hadal conversation", "messages": [null]}', "{}"):
        page.js("document.getElementById('import-said').textContent = ''")
        read_in(text)
        page.until("document.getElementById('import-said').textContent.startsWith('talk.json: ')")
    odd = {"format": "hadal conversation", "title": 5, "messages": [{"role": "user", "content": {"a": 1}, "files": [None, {"name": 3}]}, {"role": "assistant", "calls": "x", "usage": 7}, {"role": "tool"}]}
    read_in(json.dumps(odd))
    page.until(f"{TITLES}.length === 2")
    assert page.js(TITLES)[0] == "Imported"


# ---- long answers ----


def test_long_answers_are_never_drawn_again(mock, visit):
    page = visit(mock().address)
    page.js("""window.gone = 0; new MutationObserver(list => { for (const m of list) for (const n of m.removedNodes)
        if (n.marked) window.gone++; }).observe(document.getElementById('messages'), {childList: true, subtree: true});
        window.mark = setInterval(() => { const all = document.querySelector('.answer .body')?.children ?? [];
        for (let i = 0; i < all.length - 1; i++) all[i].marked = true; }, 1)""")
    ask(page, "long")
    page.js("clearInterval(window.mark)")
    assert page.js("document.querySelectorAll('.answer .body table').length") == 40
    assert page.js("window.gone") == 0
    ask(page, "long line")
    assert len(last_answer(page)) == 5 * 60000 - 1


def test_a_reader_who_scrolls_up_is_left_in_peace(mock, visit):
    page = visit(mock(pause=0.001).address)
    ask(page, "long")
    assert page.js("(s => s.scrollHeight - s.scrollTop - s.clientHeight)(document.getElementById('scroller'))") < 60
    page.js("document.getElementById('scroller').scrollTop = 0")
    page.until("!document.getElementById('to-end').hidden")
    page.click("#to-end")
    page.until("document.getElementById('to-end').hidden")


# ---- the engine ----


def test_the_engine_view(mock, visit):
    page = visit(mock().address + "#engine")
    page.until("document.querySelectorAll('#lanes .card').length > 3 && !document.querySelector('.heat').hidden")
    assert page.text("#live") == "Live"
    assert page.text("#rest") == ""
    assert re.search(r"Output\s*\d+ tokens/s", page.text("#tiles"))
    assert re.search(r"Entries, 512 pages\s*122 in use, 90 cached, 300 free", page.text("#pools"))
    assert re.search(r"Experts, 384 of 1536 fit into .*\s*75 % were in memory, 85 % of the others predicted, .* read, .*B a token", page.text("#pools"))
    assert re.search(r"\d+ % of [\d.]+K? prompt tokens", page.text("#prefix"))
    assert "Accept length 3.34 tokens a step" in page.text("#drafts")
    label = page.js("document.querySelector('canvas').getAttribute('aria-label')")
    assert re.match(r"24 layers by 64 experts. Balancedness .* on average; least in layer \d+", label)
    page.click("#experts summary")
    page.until("document.querySelectorAll('#experts tbody tr').length === 24")
    page.click("#pause")
    steps = page.text("#facts")
    assert re.search(r"Version of the weights\s*step-7 <b>", steps)
    assert page.text("#live") == "View paused; the engine is not"
    page.js("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
    assert page.text("#facts") == steps
    page.click("#pause")
    page.until("document.getElementById('live').textContent === 'Live'")


def test_attention_groups_are_among_the_facts(mock, visit):
    groups = [{"running": n, "waiting": 2, "pages": 64, "pages_free": 48} for n in range(2)]
    page = visit(mock(change=lambda message: message | {"groups": groups}).address + "#engine")
    page.until("document.getElementById('facts').textContent.includes('Group 1')")
    assert re.search(r"Group 0\s*0 run, 2 wait, 25 % of the pages\s*Group 1\s*1 run, 2 wait", page.text("#facts"))


def test_ranks_have_a_panel(mock, visit):
    exchange = {"calls": 1500, "bytes": 3 << 20, "seconds": 0.5, "wait_seconds": 0.25}
    works = {"state": "active", "recent": {"compute": 0.5, "exchange": 0.125, "wait": 0.25}, "exchanges": {"dispatch": exchange, "broadcast": exchange}}
    ranks = {"epoch": 3, "active": 2, "imbalance": 1.25, "ranks": [{"rank": n, "group": n, **works} for n in range(2)] + [{"rank": 2, "state": "lost", "exchanges": {}}]}
    page = visit(mock(change=lambda message: message | {"ranks": ranks}).address + "#engine")
    page.until("document.querySelectorAll('#ranks .bar-row').length === 3")
    assert page.text("#ranks-said") == "2 of 3 work, epoch 3, imbalance 1.25"
    assert re.search(r"Rank 1, group 1\s*50 % computing, 13 % exchanging, 25 % waiting\s*Rank 2\s*lost", page.text("#ranks"))
    page.until("document.querySelectorAll('#ranks tbody tr').length === 2")
    assert re.search(r"Dispatch\s*3000\s*6 MiB\s*1 s\s*0.50 s", page.text("#ranks tbody"))
    assert page.js("[...document.querySelectorAll('#ranks .meter i')].map(i => i.style.width).join()") == "50%,12.5%,25%,50%,12.5%,25%,0%,0%,0%"


def test_one_rank_has_no_panel_of_ranks(mock, visit):
    page = visit(mock().address + "#engine")
    page.until("document.querySelector('#facts dd').textContent !== '–'")
    assert page.js("document.getElementById('panel-ranks').checkVisibility()") is False


def test_the_own_request_is_in_sight_among_many(mock, visit):
    server = mock(change=lambda message: message | {"requests": [
        {"id": n, "answer": 0, "phase": "decode", "prompt_tokens": 9, "cached_tokens": 0, "done_tokens": 9, "output_tokens": n} for n in [*range(100, 140), 1]]})  # fmt: skip
    server.place = 1
    page = visit(server.address + "#both", width=1500)
    page.until("document.querySelectorAll('#lanes .card').length === 10 && !document.querySelector('.card.own')")
    write(page, "hello")
    page.press("Enter")  # the engine knows it as 1
    page.until("document.querySelector('.card.own .yours')?.checkVisibility()")
    assert page.js("document.querySelectorAll('#lanes .card').length") == 10
    assert page.js("document.querySelectorAll('.card.own').length") == 1
    server.place = 0
    wait_for_answers(page, 1)


def test_the_charts_begin_before_the_view_was_opened(mock, visit):
    page = visit(mock(live_pause=3600).address + "#engine")  # one message only
    page.until("document.getElementById('live').textContent === 'Live'")
    points = page.js("[...document.querySelectorAll('.tile polyline.first')].map(line => line.getAttribute('points').split(' ').length)")
    assert points == [240, 240, 201, 240]  # the message is one more


def test_the_charts_are_those_of_the_server(served, visit):
    with urllib.request.urlopen(served + "engine/history") as response:
        before = json.load(response)
    page = visit(served + "#engine")
    page.until("document.getElementById('live').textContent === 'Live'")
    points = page.js("document.querySelector('.tile polyline.first').getAttribute('points').split(' ').length")
    assert points >= min(240, len(before["t"]))


@pytest.mark.parametrize("change", [
    lambda message: {},
    lambda message: {"stats": {}, "requests": None},
    lambda message: {k: message[k] for k in ("t", "requests")},
    lambda message: {"stats": {"pages": [4, 0], "drafted_at": [0] * 7}, "experts": {"n_experts": 2, "layers": [[0, 0]]}},
    lambda message: {"ttft_ms": {"p50": None, "p95": None}, "rates": {"tokens_s": 0}, "experts": {"n_experts": 4, "layers": "x"}},
])  # fmt: skip
def test_missing_fields_are_dashes(mock, visit, change):
    page = visit(mock(change=change).address + "#engine")
    page.until("document.getElementById('live').textContent === 'Live'")
    text = page.text(".engine")
    assert "NaN" not in text and "undefined" not in text and "null" not in text
    assert "–" in text


def test_the_engine_view_comes_back(mock, visit):
    server = mock()
    page = visit(server.address + "#engine", expected=["ERR_"])
    page.until("document.getElementById('live').textContent === 'Live'")
    port = server.server_address[1]
    server.stop()
    page.until("document.getElementById('live').dataset.kind === 'warn'")
    mock(port=port)
    page.until("document.getElementById('live').textContent === 'Live'")


# ---- for everyone ----

CONTRASTS = """(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = numbers(getComputedStyle(node).backgroundColor);
      if ((color[3] ?? 1) === 1) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walker.nextNode()); ) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(numbers(style.color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push([text.data.trim().slice(0, 40), node.className, ratio.toFixed(2)]);
  }
  return poor;
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_of_every_text(mock, visit, dark):
    server = mock()
    page = visit(server.address, dark=dark, expected=["status of 429"])
    assert page.js(CONTRASTS) == []
    page.click(".example[data-tools]")
    wait_for_answers(page, 2)
    ask(page, "markdown")
    give(page, "drop", [["a.txt", "inside"]])
    page.until(f"{CHIPS}.length === 1")
    ask(page, "formulas")
    ask(page, "busy")
    give(page, "drop", [["a.txt", "inside"], ["b.png", "\0"]])
    page.until("document.getElementById('files-said').textContent")
    assert page.js(CONTRASTS) == []
    page.click("#chats [aria-label^='Rename or save']")
    assert page.js(CONTRASTS) == []
    page.press("Escape")
    page.click("#settings-open")
    assert page.js(CONTRASTS) == []
    page.press("Escape")
    page.click("#tab-engine")
    page.until("document.querySelectorAll('#lanes .card').length > 3 && !document.querySelector('.heat').hidden")
    assert page.js(CONTRASTS) == []


def test_the_theme_follows_the_system_until_chosen(mock, visit):
    server = mock()
    page = visit(server.address)
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.js(background)
    page.scheme("dark")
    dark = page.js(background)
    assert dark != light
    page.click("#theme")
    assert page.js(background) == light
    page.open(server.address)
    assert page.js(background) == light


def test_every_control_has_a_name(mock, visit):
    page = visit(mock().address)
    ask(page, "markdown")
    ask(page, "formulas")
    give(page, "drop", [["a.txt", "inside"]])
    page.until(f"{CHIPS}.length === 1")
    page.click("#new")
    for view in ("#chats [aria-label^='Rename or save']", "#tab-chat", "#tab-engine"):
        page.click(view)
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "textbox", "searchbox", "link", "combobox", "spinbutton", "image", "region", "navigation"}
        nameless = [n["role"]["value"] for n in nodes
                    if not n.get("ignored") and n["role"]["value"] in roles and not n.get("name", {}).get("value")]  # fmt: skip
        assert nameless == []


def test_the_keyboard_alone_is_enough(mock, visit):
    page = visit(mock().address)
    assert page.js("document.activeElement.id") == "prompt"
    page.js("document.activeElement.blur()")
    stops = []
    for _ in range(40):
        page.press("Tab")
        name, seen = page.js("""(e => [e === document.body ? 'BODY' : e.id || e.textContent.trim().slice(0, 40), e === document.body ||
            getComputedStyle(e).outlineStyle !== 'none' || getComputedStyle(e.closest('.box') ?? e).boxShadow !== 'none'])(document.activeElement)""")
        assert seen, f"the focus cannot be seen on {name}"
        if name in stops and name != "BODY":
            break
        stops.append(name)
    at = stops.index("Skip to content")
    wanted = ["tab-chat", "tab-engine", "theme", "settings-open", "new", "import", "prompt", "think", "tools", "attach", "send"]
    order = [name for name in stops[at:] + stops[:at] if name in wanted]
    assert order == wanted
    page.js("document.getElementById('prompt').focus()")
    page.type("line one")
    page.press("Enter", shift=True)
    page.type("line two")
    page.press("Enter")
    wait_for_answers(page, 1)
    assert last_answer(page) == "You said: line one\nline two"
    assert page.js("document.activeElement.id") == "prompt"


def test_on_a_phone(mock, visit):
    page = visit(mock().address, width=360, height=740, phone=True)
    fits = "document.documentElement.scrollWidth <= innerWidth && document.getElementById('scroller').scrollWidth <= innerWidth"
    assert page.js(fits)
    ask(page, "markdown")
    assert page.js(fits)
    ask(page, "formulas")
    assert page.js(fits)
    page.click("#menu")
    page.until("document.activeElement.id === 'new'")
    assert page.js("document.getElementById('main').inert")
    page.press("Escape")
    assert page.js("document.activeElement.id") == "menu"
    page.click("#tab-engine")
    page.until("document.querySelectorAll('#lanes .card').length > 3")
    assert page.js("document.getElementById('view-engine').scrollWidth <= innerWidth")
    assert page.js("[...document.querySelectorAll('.tile p')].filter(p => p.scrollWidth > p.clientWidth).map(p => p.innerText)") == []
    small = page.js("""[...document.querySelectorAll('header button, nav a, #send')].filter(e => e.checkVisibility())
        .map(e => [e.id, e.getBoundingClientRect()]).filter(([, b]) => b.width < 24 || b.height < 24).map(([id]) => id)""")
    assert small == []


# ---- with hadal ----


def test_the_files_and_their_headers(served):  # E14
    names = re.findall(r'(?:href|src)="(page/[^"]+)"', (ROOT / "src/server/web/index.html").read_text())
    files = {"": "index.html"} | {name: name.removeprefix("page/") for name in names}
    files |= {f"page/{path.name}": path.name for path in (ROOT / "src/server/web").glob("*.js")}
    asked = [(path, name, packing) for path, name in files.items() for packing in ("identity", "gzip, br")]
    for path, name, packing in asked:
        request = urllib.request.Request(served + path, headers={"Accept-Encoding": packing})
        with urllib.request.urlopen(request) as response:
            packed = response.headers["Content-Encoding"] == "gzip"
            assert packed == ("gzip" in packing)
            body = response.read()
            assert (gzip.decompress(body) if packed else body) == (ROOT / "src/server/web" / name).read_bytes(), name
            for header, value in HEADERS.items():
                assert response.headers[header] == value
            etag = response.headers["ETag"]
        again = urllib.request.Request(served + path, headers={"If-None-Match": etag, "Accept-Encoding": packing})
        with pytest.raises(urllib.error.HTTPError) as known:
            urllib.request.urlopen(again)
        assert known.value.code == 304
    with pytest.raises(urllib.error.HTTPError) as missing:
        urllib.request.urlopen(served + "page/../page.c")
    assert missing.value.code == 404


def test_the_shipped_model_thinks_and_answers(served, visit):
    page = visit(served)
    page.until("document.getElementById('model').textContent.includes('tiny')")
    greedy(page, served)
    ask(page, "What is 347 + 586?")
    assert last_answer(page) == "347 + 586 = 933"
    assert "carry 1" in page.js("document.querySelector('.thought-text').textContent")
    assert re.search(r"\d+ tokens, [\d.]+/s · first after .* · prompt 16", page.text(".figures"))


def greedy(page, address):
    page.js("localStorage.setItem('hadal.settings', JSON.stringify({temperature: '0', think: 'on'}))")
    page.open(address)


def test_the_shipped_model_uses_the_calculator(served, visit):
    page = visit(served)
    greedy(page, served)
    page.click(".example[data-tools]")
    wait_for_answers(page, 2)
    assert '{"expression": "4821 * 37"}' in page.text(".call")
    assert "178377" in last_answer(page)


def test_the_engine_shows_the_request(served, visit):
    watcher = visit(served + "#engine")
    watcher.until("document.getElementById('live').textContent === 'Live'")
    assert watcher.text("#rest") == "Nothing runs or waits."
    client = http.client.HTTPConnection(served.split("/")[2], timeout=120)
    body = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "stream": True}  # until it was seen
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = client.getresponse()
    watcher.until("/#\\d+/.test(document.getElementById('lanes').innerText)")
    assert watcher.text("#rest") == ""
    response.close()
    client.close()
    watcher.until("document.getElementById('rest').textContent === 'Nothing runs or waits.'")
    watcher.until("!document.querySelector('.heat').hidden && /least in layer/.test(document.getElementById('experts').innerText)")
    assert "6 layers by 16 experts" in watcher.js("document.querySelector('canvas').getAttribute('aria-label')")


def test_the_own_request_is_marked(served, visit):
    page = visit(served + "#both", width=1500)
    page.js("localStorage.setItem('hadal.settings', JSON.stringify({temperature: '1', think: 'off'}))")
    page.open(served + "#both")
    other = visit(served + "#engine")
    write(page, "Write a long story about a girl named Lily. " * 20)
    page.press("Enter")
    page.until("document.querySelector('.card.own .yours')?.checkVisibility() || (!document.body.classList.contains('running') && document.getElementById('send').click(), false)")
    page.press("Escape")
    page.until(IDLE)
    assert other.js("document.querySelectorAll('.card.own').length") == 0  # another browser's


def test_stopping_frees_the_request(served, visit):
    page = visit(served)
    page.js("localStorage.setItem('hadal.settings', JSON.stringify({temperature: '1'}))")
    page.open(served)
    write(page, "Tell me a story.")
    page.press("Enter")
    page.until("document.querySelector('.answer .body')?.innerText.length > 20")
    page.click("#send")
    page.until(IDLE)
    page.click("#tab-engine")
    page.until("document.getElementById('live').textContent === 'Live' && /Running\\s*0 of/.test(document.getElementById('facts').innerText)")


def test_the_router_has_a_page(visit, tmp_path):
    prefill = Pd("prefill")
    decode = Pd("decode", peers=[prefill]).wait_paired()
    router = Router("--decode", of(decode), "--prefill", of(prefill)).wait_up(2)
    assert decode.ask(prefill, {"prompt": list(range(5, 400)), "max_tokens": 1}).status == 200
    page = visit(f"http://127.0.0.1:{router.port}/page/router.html")
    page.until("document.getElementById('state').textContent === '2 of 2 up'")
    page.until("[...document.querySelectorAll('#links td')].some(c => c.textContent.endsWith('MiB'))")
    rows = page.js("[...document.querySelectorAll('#servers tr')].map(r => [...r.cells].map(c => c.textContent))")
    assert [row[:3] for row in rows] == [[of(decode), "decode", "up"], [of(prefill), "prefill", "up"]]
    links = page.js("[...document.querySelectorAll('#links tr')].map(r => [...r.cells].map(c => c.textContent))")
    assert links[0][:4] == [of(decode), of(prefill), "receives", "up"] and len(links) == 2
    for process in (decode, prefill):
        process.close()
    page.until("document.getElementById('state').textContent === '0 of 2 up'")  # the page is the router's own
    assert page.js("document.querySelectorAll('#links tr').length") == 0
    router.close()
