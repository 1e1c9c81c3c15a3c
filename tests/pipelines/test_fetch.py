"""Benchmarks from their public homes: a server on this machine stands in for them."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stree.common.errors import BadData, UsageError
from stree_pipelines.commands import fetch_benchmarks
from stree_pipelines.commands.fetch_benchmarks import Unreachable, fetch, main
from stree_pipelines.evaluation import sources
from stree_pipelines.evaluation.benchmarks import load_benchmark
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import read_rows
from stree_pipelines.evaluation.sources import PINS_NAME, SOURCES

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLISHED = REPOSITORY / "docs/results/h200-sharegpt"
SHARED = REPOSITORY.parent / "shared/data/benchmarks"


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def questions(*numbers: int) -> bytes:
    return lines(
        {"question_id": n, "category": "writing", "turns": [f"Say {n}.", "Again?"]} for n in numbers
    )


FILES = {
    "mt_bench": questions(81, 82),
    "humaneval": gzip.compress(
        lines([{"task_id": "HumanEval/0", "prompt": "def f():\n"}]), mtime=0
    ),
    "gsm8k": lines([{"question": "What is 1 + 1?", "answer": "#### 2"}]),
    "spec_bench": questions(*range(1, 60)),
}


class Server(ThreadingHTTPServer):
    """Serves `files` by path; the first `num_broken` answers break off after 100 bytes."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {"/" + SOURCES[name].path: content for name, content in files.items()}
        self.num_broken = 0
        self.asked: list[str] = []  # paths

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.server.num_broken:
            self.server.num_broken -= 1
            content = content[:100]
            self.close_connection = True
        self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr(fetch_benchmarks, "PAUSE_S", 0.0)
    for name, source in SOURCES.items():  # these are not the real prompts
        monkeypatch.setitem(SOURCES, name, replace(source, prompts_hash=None))
    with Server(FILES) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_of_them_are_fetched_once_and_evaluations_find_them(server, tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--mirror", server.url + "/"]
    main(arguments)
    assert capsys.readouterr().out.count("prompts (") == len(server.asked) == 4
    mt_bench = load_benchmark("mt_bench", tmp_path)
    assert [prompt.id for prompt in mt_bench.prompts] == ["mt_bench-81", "mt_bench-82"]
    assert mt_bench.prompts[0].turns == ("Say 81.", "Again?")
    (humaneval,) = load_benchmark("humaneval", tmp_path).prompts
    assert (humaneval.id, humaneval.turns) == ("HumanEval/0", ("def f():\n",))
    (gsm8k,) = load_benchmark("gsm8k", tmp_path).prompts
    assert (gsm8k.id, gsm8k.turns) == ("gsm8k-test-0", ("What is 1 + 1?",))
    assert len(load_benchmark("spec_bench", tmp_path).prompts) == 59
    pins = json.loads((tmp_path / PINS_NAME).read_text())
    assert pins["humaneval"]["licence"] == "MIT" and "WMT14" in pins["spec_bench"]["licence"]
    assert pins["gsm8k"]["url"] == f"{server.url}/{SOURCES['gsm8k'].path}"
    before = files_in(tmp_path)
    main(arguments)
    assert capsys.readouterr().out.count("is there") == 4
    assert len(server.asked) == 4 and files_in(tmp_path) == before


def test_what_broke_off_is_asked_for_again(server, tmp_path):
    server.num_broken = 2
    fetch("spec_bench", tmp_path, server.url)
    assert len(server.asked) == 3 and len(load_benchmark("spec_bench", tmp_path).prompts) == 59
    server.num_broken = 3
    with pytest.raises(Unreachable, match=r"broke off after 100 of 4,\d+ bytes"):
        fetch("spec_bench", tmp_path / "new", server.url)
    assert not files_in(tmp_path / "new")


def test_the_first_download_is_the_measure_of_later_ones(server, tmp_path):
    fetch("mt_bench", tmp_path, server.url)
    (tmp_path / "mt_bench.jsonl").write_text("damaged")
    fetch("mt_bench", tmp_path, server.url)
    assert len(load_benchmark("mt_bench", tmp_path).prompts) == 2
    (tmp_path / "mt_bench.jsonl").unlink()
    before = files_in(tmp_path)
    server.files["/" + SOURCES["mt_bench"].path] = questions(81, 83)
    wanted = r"the first download had .*delete the entry mt_bench of .*SOURCES\.json to take"
    with pytest.raises(BadData, match=wanted):
        fetch("mt_bench", tmp_path, server.url)
    assert files_in(tmp_path) == before
    (tmp_path / PINS_NAME).unlink()
    fetch("mt_bench", tmp_path, server.url)
    assert load_benchmark("mt_bench", tmp_path).prompts[1].id == "mt_bench-83"
    assert fetch("mt_bench", tmp_path, server.url).endswith("is there")


def test_prompts_other_than_the_measured_ones_are_refused(server, tmp_path, monkeypatch):
    known = "a46cd5bdd10a04c735775eca6a37e39fd14f9c101e7dcf5a05b0c02d88a8ca2b"
    monkeypatch.setitem(SOURCES, "mt_bench", replace(SOURCES["mt_bench"], prompts_hash=known))
    with pytest.raises(BadData, match=rf"results were measured on {known}.* to --benchmarks"):
        fetch("mt_bench", tmp_path, server.url)
    assert not files_in(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"<html>Sign in</html>", b"[1]\n", b"", gzip.compress(b"{}", mtime=0), b"\x1f\x8bnot gzip"],
)
def test_a_page_of_something_else_is_no_benchmark(server, tmp_path, content):
    server.files["/" + SOURCES["mt_bench"].path] = content
    with pytest.raises(BadData):
        fetch("mt_bench", tmp_path, server.url)
    assert not files_in(tmp_path)


def test_a_file_without_end_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_benchmarks, "MAX_BYTES", 1000)
    monkeypatch.setattr(sources, "MAX_BYTES", 1000)
    with pytest.raises(BadData, match="over 1,000 bytes"):
        fetch("spec_bench", tmp_path, server.url)
    server.files["/" + SOURCES["spec_bench"].path] = gzip.compress(FILES["spec_bench"], mtime=0)
    with pytest.raises(BadData, match="unpacks to over 1,000 bytes"):
        fetch("spec_bench", tmp_path / "packed", server.url)


def test_without_a_connection_there_is_one_line(tmp_path, monkeypatch):
    """A closed server's port refuses connections."""
    monkeypatch.setattr(fetch_benchmarks, "PAUSE_S", 0.0)
    with Server({}) as closed:
        pass
    with pytest.raises(Unreachable, match=r"Connection refused.*connect this machine") as told:
        main(["--out", str(tmp_path / "new"), "--mirror", closed.url])
    assert told.value.exit_code == 69 and "\n" not in str(told.value)


def test_a_file_that_is_not_there_is_asked_for_once(server, tmp_path):
    server.files.clear()
    with pytest.raises(Unreachable, match="404"):
        fetch("gsm8k", tmp_path, server.url)
    assert len(server.asked) == 1


def test_wrong_options_and_a_damaged_record_are_refused(tmp_path, capsys):
    with pytest.raises(UsageError, match="there are mt_bench, humaneval, gsm8k, spec_bench"):
        main(["mmlu"])
    with pytest.raises(UsageError, match="wanted http"):
        main(["--mirror", "file:///etc"])
    (tmp_path / PINS_NAME).write_text('{"gsm8k": {"sha256": 3}}')
    with pytest.raises(BadData, match=PINS_NAME):
        main(["gsm8k", "--out", str(tmp_path)])
    main(["--dry_run"])
    assert capsys.readouterr().out.count("https://raw.githubusercontent.com/") == 4


def test_known_prompts_are_those_of_the_published_results():
    """All 80 prompts of MT-Bench were measured in fp32."""
    rows = read_rows(PUBLISHED / "results-fp32.jsonl", ResultRow)
    hashes = {row.prompts_hash for row in rows if row.benchmark == "mt_bench"}
    assert hashes == {SOURCES["mt_bench"].prompts_hash}


@pytest.mark.skipif(not SHARED.is_dir(), reason="without the files that were measured on")
@pytest.mark.parametrize("name", ["mt_bench", "humaneval", "gsm8k"])
def test_a_public_row_becomes_the_prompt_that_was_measured(name):
    """Their rows are made again from copies of the prompts, and the hash is of all of them."""
    copies = load_benchmark(name, SHARED)
    rows = {
        "mt_bench": lambda p: {
            "question_id": int(p.id.removeprefix("mt_bench-")), "category": p.category,
            "turns": list(p.turns),
        },
        "humaneval": lambda p: {"task_id": p.id, "prompt": p.turns[0], "entry_point": "f"},
        "gsm8k": lambda p: {"question": p.turns[0], "answer": "#### 1"},
    }
    content = lines(map(rows[name], copies.prompts))
    made = sources.parse_prompts(SOURCES[name].prompts(content).encode(), name)
    assert replace(copies, prompts=tuple(made)).prompts_hash == SOURCES[name].prompts_hash
    for file, limit in (("ba8f615/results.jsonl", 15), ("results-fp32.jsonl", 80)):
        measured = load_benchmark(name, SHARED, limit=limit).prompts_hash
        rows = [row for row in read_rows(PUBLISHED / file, ResultRow) if row.benchmark == name]
        assert {row.prompts_hash for row in rows} == {measured}
