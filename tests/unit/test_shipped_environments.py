"""The environments and tools of configs/, in real conversation servers. The model's turns are written here."""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from transformers import AutoTokenizer

from rl.config.load import load_config
from rl.config.schema import ROOT
from rl.environments.protocol import Ask, Ended, Open, SampledTurn
from rl.run.environment import LocalConversation

pytestmark = pytest.mark.timeout(60)
MODEL = ROOT / "configs/tiny_tools"
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


def converse(config: str, row: dict[str, Any], turns: list[str], *overrides: str) -> tuple[str, Ended]:
    """Have a conversation in which the model writes these turns. Return what it was given to read at last."""
    settings = load_config(ROOT / f"configs/{config}.yaml", list(overrides))
    with LocalConversation(settings, MODEL) as local:
        question = [{"role": "user", "content": row["prompt"]}]
        local.pool.send([Open((0, 0, 0, 0), row, question, [], 0, [], {})])
        prompt, written = "", 0
        while isinstance(event := local.receive(), Ask):
            read = TOKENIZER.decode(event.prompt)
            assert read.startswith(prompt), "nothing that was read or written has changed"
            prompt = read + turns[written] + "<eos>"
            tokens = TOKENIZER.encode(turns[written] + "<eos>")
            local.pool.send([SampledTurn(event.key, event.turn, tokens, "stop")])
            written += 1
        assert written == len(turns)
        return prompt, event


def test_the_calculator() -> None:
    turns = ["[add(a=123, b=456)]", "[add(a=579, b=789)]", "1368"]
    text, ended = converse("tiny_calculator", {"prompt": "123+456+789"}, turns)
    called = ">[add(a=123, b=456)]<eos>=579<eos>>[add(a=579, b=789)]<eos>=1368<eos>"
    assert text == f"#add(a, b)<eos>?123+456+789<eos>{called}>1368<eos>"
    assert (ended.ending, ended.reward, ended.messages[-1]["content"]) == ("done", None, "1368")
    assert text == TOKENIZER.apply_chat_template(ended.messages, tools=[ADD], tokenize=False)


ADD = {"function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}}


def test_the_guessing_game() -> None:
    row = {"prompt": "guess 1 to 31", "secret": 7}
    text, ended = converse("tiny_guess", row, ["[guess(n=16)]", "[guess(n=4)]", "[guess(n=7)]"])
    assert text.endswith(">[guess(n=16)]<eos>=lower<eos>>[guess(n=4)]<eos>=higher<eos>>[guess(n=7)]<eos>")
    assert (ended.ending, ended.reward) == ("done", 1.0)
    _, ended = converse("tiny_guess", row, ["[guess(n=1)]"] * 5)
    assert (ended.ending, ended.reward) == ("turns", 0.0)


def test_programs() -> None:
    calls = [f"[run_python(program={json.dumps(program)})]" for program in ("x = 6\nprint(x * 7)", "print(x)")]
    text, ended = converse("code_qwen2.5_3b", {"prompt": "f"}, [*calls, "def f(): return 42"])
    assert "<eos>=42 <eos>" in text
    assert "NameError: name 'x' is not defined" in text
    assert (ended.ending, ended.counts["calls"]) == ("done", 2)


@pytest.mark.skipif(find_spec("bm25s") is None, reason="bm25s is not installed; a run does not need it")
def test_search(tmp_path: Path) -> None:
    (tmp_path / "documents.jsonl").write_text('{"title": "Owls", "text": "Owls hunt at night."}\n{"text": "Cats."}\n')
    command = [sys.executable, "configs/environments/search.py", str(tmp_path / "documents.jsonl")]
    subprocess.run([*command, "--output", str(tmp_path / "index")], cwd=ROOT, check=True)
    turns = ['[search(query="When do owls hunt?")]', "<answer>at night</answer>"]
    options = f"environment.options={{index: {tmp_path / 'index'}}}"
    text, ended = converse("search_qa_qwen2.5_3b", {"prompt": "When?"}, turns, options)
    assert "#search(query, count)<eos>" in text
    assert "=[1] Owls Owls hunt at night.<eos>" in text
    assert (ended.ending, ended.messages[-1]["content"]) == ("done", "<answer>at night</answer>")


TOTALS: dict[str, int] = {}  # by episode


class Adder(BaseHTTPRequestHandler):
    """Adds up numbers. The action `stop` ends an episode, and `hang up` the connection."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        episode, said = asked["episode_id"], asked.get("action", {}).get("message", "0")
        if said == "hang up":
            return
        TOTALS[episode] = TOTALS.get(episode, asked.get("start")) + (0 if said == "stop" else int(said))
        total = TOTALS[episode]
        answer = {"observation": f"now {total}", "reward": total if said == "stop" else None, "done": said == "stop"}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_an_environment_over_http() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Adder) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        overrides = [
            "environment.class=rl/environments/http_environment.py:HttpEnvironment",
            f"environment.options={{url: 'http://127.0.0.1:{server.server_port}'}}",
        ]
        row = {"prompt": "add", "start": 5}
        text, ended = converse("tiny_guess", row, ["3", "4", "stop"], *overrides)
        assert text == "?add<eos>?now 5<eos>>3<eos>?now 8<eos>>4<eos>?now 12<eos>>stop<eos>"
        assert (ended.ending, ended.reward) == ("done", 12.0)
        _, ended = converse("tiny_guess", row, ["hang up"], *overrides)
        assert ended.ending == "error" and "failed at step: ServerDisconnectedError" in ended.problem
        server.shutdown()
