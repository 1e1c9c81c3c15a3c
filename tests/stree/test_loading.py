"""`stree.load`: a decoder from two folders, their ends, tokenizers, dtypes, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from toys import load_quietly

import stree
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CheckpointRefused, NotFound, UsageError
from stree.common.files import MANIFEST_NAME
from stree.loading import pick_dtype

pytestmark = pytest.mark.usefixtures("without_a_gpu")


def test_ends_of_config_and_tokenizer_are_united(workspace, tmp_path):
    """Qwen3.5 names the end of a text in config.json, that of a turn in its tokenizer."""
    model, tokenizer = load_model(workspace / "target"), load_tokenizer(workspace / "target")
    end = tokenizer.eos_token_id
    model.config = model.config.replace(eos_token_ids=(9,))
    save_model(model, tmp_path / "target", tokenizer)
    decoder = load_quietly(tmp_path / "target")
    assert decoder.eos_token_ids == (9, end) and f"answers end at 9, {end}," in repr(decoder)


def without_eos(workspace: Path, folder: Path, **changes) -> Path:
    """Save the target with a config that names no EOS, and `changes` to its tokenizer."""
    model, tokenizer = load_model(workspace / "target"), load_tokenizer(workspace / "target")
    model.config = model.config.replace(eos_token_ids=())
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    save_model(model, folder, tokenizer)
    return folder


def test_where_the_config_names_no_eos_the_tokenizers_ends_an_answer(workspace, tmp_path):
    decoder = load_quietly(workspace / "target")
    prompt = decoder.tokenizer("What is 1 plus 2?")["input_ids"]
    free = decoder.generate(prompt, stree.GenerationConfig(40, ignore_eos=True)).tokens
    end = free[12]
    named = decoder.tokenizer.convert_ids_to_tokens(end)
    folder = without_eos(workspace, tmp_path / "target", eos_token=named)
    decoder = load_quietly(folder)
    assert decoder.target.config.eos_token_ids == () and decoder.eos_token_ids == (end,)
    out = decoder.generate(prompt, stree.GenerationConfig(40))
    assert out.finish_reason == "eos" and out.tokens == free[: free.index(end) + 1]
    out = decoder.generate(prompt, stree.GenerationConfig(40, ignore_eos=True))
    assert out.finish_reason == "length" and out.tokens == free


def test_where_neither_names_one_that_is_said(workspace, tmp_path):
    folder = without_eos(workspace, tmp_path / "target", eos_token=None)
    with pytest.warns(
        UserWarning, match=f"{folder}: neither its config nor its tokenizer names an"
    ):
        decoder = stree.load(folder, device="cpu")
    assert decoder.eos_token_ids == ()


def with_tokenizer(drafter, folder, change):
    tokenizer = load_tokenizer(drafter)
    change(tokenizer)
    save_model(load_model(drafter), folder, tokenizer)
    return folder


def test_a_drafter_with_other_ends_is_refused(workspace, drafter, tmp_path):
    other = with_tokenizer(
        drafter, tmp_path / "other", lambda it: setattr(it, "eos_token", it.unk_token or "a")
    )
    with pytest.raises(CheckpointRefused, match="the EOS tokens differ; use a drafter that was"):
        stree.load(workspace / "target", other, device="cpu")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda it: setattr(it, "chat_template", it.chat_template + "\n"), "chat template"),
        (lambda it: setattr(it, "pad_token", "a"), "pad_token"),
    ],
)
def test_a_drafter_with_another_template_or_padding_decodes(
    workspace, drafter, tmp_path, change, named
):
    other = with_tokenizer(drafter, tmp_path / "other", change)
    with pytest.warns(UserWarning, match=f"has another {named} than the target"):
        decoder = stree.load(workspace / "target", other, tree="chain-2", device="cpu")
    output = decoder.complete("What is 3", max_new_tokens=6)
    assert sum(output.stats.accepted_per_call) > 0


class Hub:
    """Stand-in for the hub with one repository, of which it copies what a pattern names."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.cache = repository, cache
        self.asked: list[tuple[str, str | None]] = []

    def fetch(self, name, revision=None, allow_patterns=("*",), ignore_patterns=()):
        self.asked.append((name, revision))
        if name != "someone/drafter":
            raise RuntimeError(f"404 for\n{name}")
        paths = [each for each in self.repository.rglob("*") if each.is_file()]
        names = [each.relative_to(self.repository).as_posix() for each in paths]
        for each in filter_repo_objects(
            names, allow_patterns=list(allow_patterns), ignore_patterns=list(ignore_patterns)
        ):
            (self.cache / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.repository / each, self.cache / each)
        return str(self.cache)

    def fetched(self) -> set[str]:
        paths = (each for each in self.cache.rglob("*") if each.is_file())
        return {each.relative_to(self.cache).as_posix() for each in paths}


@pytest.fixture
def hub(drafter, tmp_path, monkeypatch):
    hub = Hub(drafter, tmp_path / "cache")
    hub.cache.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.fetch)
    return hub


def test_a_name_on_the_hub_is_fetched_and_a_folder_is_not(workspace, hub):
    load_quietly(workspace / "target", "someone/drafter", tree="paper")
    assert set(hub.asked) == {("someone/drafter", None)}
    with pytest.raises(NotFound, match=r"no folder some/one.*404 for some/one"):
        stree.load("some/one", device="cpu")
    count = len(hub.asked)
    with pytest.raises(NotFound, match="no folder"):
        stree.load(workspace / "absent", device="cpu")
    assert len(hub.asked) == count


@pytest.mark.parametrize("sharded", [False, True])
def test_of_a_repository_only_what_is_read_is_fetched(hub, sharded):
    wanted = {each.name for each in hub.repository.iterdir()}
    if sharded:
        (hub.repository / MANIFEST_NAME).unlink()
        weights = hub.repository / "model.safetensors"
        weights.rename(hub.repository / "model-00001-of-00001.safetensors")
        names = dict.fromkeys(load_file(hub.repository / "model-00001-of-00001.safetensors"))
        weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
        index = hub.repository / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        wanted = {each.name for each in hub.repository.iterdir()}
    for name in (
        "model-q4.gguf", "pytorch_model.bin", "consolidated.00.pth", "onnx/model.onnx",
        "onnx/config.json", "consolidated.safetensors", "flax_model.msgpack", "tf_model.h5",
    ):
        (hub.repository / name).parent.mkdir(exist_ok=True)
        (hub.repository / name).write_text("x")
    load_quietly("someone/drafter")
    assert hub.fetched() == wanted


def test_a_repository_of_pickles_is_fetched_with_them(hub):
    weights = hub.repository / "model.safetensors"
    torch.save(load_file(weights), hub.repository / "pytorch_model.bin")
    weights.unlink()
    (hub.repository / MANIFEST_NAME).unlink()
    load_quietly("someone/drafter")
    assert "pytorch_model.bin" in hub.fetched()


def test_a_revision_is_named_behind_the_name_or_by_itself(workspace, hub):
    load_quietly("someone/drafter@v1.0")
    load_quietly("someone/drafter", revision="refs/pr/1")
    load_quietly("someone/drafter@abc", revision="abc")
    load_quietly(workspace / "target", "float8:someone/drafter@b-2", tree="paper")
    assert {revision for _, revision in hub.asked} == {"v1.0", "refs/pr/1", "abc", "b-2"}
    assert {name for name, _ in hub.asked} == {"someone/drafter"}
    for name, wrong in (("someone/drafter@abc", "names another"), (workspace / "target", "folder")):
        with pytest.raises(UsageError, match=wrong):
            stree.load(name, revision="other", device="cpu")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_the_stored_dtype_on_a_gpu_and_fp32_on_a_cpu(workspace, tmp_path, stored):
    target = workspace / "target"
    save_model(load_model(target), tmp_path / "it", load_tokenizer(target), dtype=stored)
    for device, wanted in (("cuda", stored), ("cpu", torch.float32)):
        assert pick_dtype("auto", torch.device(device), tmp_path / "it") == wanted
    assert pick_dtype("float64", torch.device("cuda"), tmp_path / "it") == torch.float64
    decoder = stree.load(tmp_path / "it", device="cpu")
    assert decoder.target.dtype == torch.float32 and "float32 on cpu" in repr(decoder)


def test_dtype_and_length_reach_the_models(workspace, drafter):
    decoder = load_quietly(
        workspace / "target", drafter, tree="paper", dtype=torch.bfloat16, max_length=77
    )
    assert decoder.target.dtype == torch.bfloat16 and decoder.max_length == 77


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16], ids=lambda value: repr(value)
)
def test_a_dtype_goes_by_its_name_too(dtype, workspace):
    assert load_quietly(workspace / "target", dtype=dtype).target.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"dtype": "int8"}, "dtype is 'int8', wanted auto or one of float32, bfloat16, float16, f"),
        ({"dtype": torch.int64}, "dtype is 'int64', wanted auto or one of float32"),
        ({"target_dtype": "int4"}, "target_dtype is 'int4', wanted float8 or none: dtype is"),
        ({"dtype": 16}, "dtype is '16', wanted auto or one of float32"),
        ({"device": "gpu"}, 'device is \'gpu\', wanted "auto", "cpu", "cuda" or "cuda:N"'),
        ({"device": "meta"}, "device is 'meta', wanted \"auto\""),
        ({"device": None}, "device is 'None', wanted \"auto\""),
        ({"device": "cuda:99"}, 'there is no device "cuda:99" here, PyTorch sees '),
        ({"max_length": 0}, "max_length is 0, wanted a whole number of at least 1"),
        ({"max_length": -5}, "max_length is -5, wanted a whole number"),
        ({"max_length": 9.5}, "max_length is 9.5, wanted a whole number"),
        ({"max_length": "99"}, "max_length is '99', wanted a whole number"),
        ({"temperature": -1}, "temperature is -1, wanted 0"),
        ({"temperature": float("nan")}, "temperature is nan, wanted 0"),
        ({"temperature": "cold"}, "temperature is 'cold', wanted a number"),
    ],
)
def test_what_no_decoder_could_use_is_one_line_before_anything_is_read(options, line):
    with pytest.raises(UsageError) as refused:
        stree.load("nowhere", **{"device": "cpu", **options})
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_target_in_8_bits_answers_with_drafts_as_without(workspace, drafter):
    """Its drafter is held as it is stored; the answers are not those of the stored weights."""
    prompts, answers = ["What is 1 plus 2?", "Name a river.", "Why?"], []
    options = dict(target_dtype="float8", num_rows=2, num_prefixes=2, dtype="float32")
    for given in ((None, None), (drafter, "paper"), ("ngram:2", "expand-2-2")):
        decoder = load_quietly(workspace / "target", given[0], tree=given[1], **options)
        assert decoder.target.is_in_8_bits and decoder.target.dtype == torch.float32
        outputs = decoder.complete(prompts, max_new_tokens=24)
        answers.append([each.tokens for each in outputs])
    assert answers[0] == answers[1] == answers[2]
    own = load_quietly(workspace / "target", drafter, tree="paper", num_rows=2)
    assert not own.drafter.model.is_in_8_bits and not own.target.is_in_8_bits


def test_a_tree_may_be_a_path(workspace, drafter, tmp_path):
    (tmp_path / "tree.yaml").write_text("parents: [-1, 0, 0]")
    decoder = load_quietly(workspace / "target", drafter, tree=tmp_path / "tree.yaml")
    assert decoder.tree.num_nodes == 3
    with pytest.raises(NotFound, match=r"no tree .*absent\.yaml"):
        stree.load(workspace / "target", drafter, tree=tmp_path / "absent.yaml", device="cpu")


def test_beyond_the_target_s_positions_it_refuses(workspace):
    decoder = load_quietly(workspace / "target", max_length=9000)
    with pytest.raises(UsageError, match="the target was made for 4096: shorten one, or raise"):
        decoder.complete("What is 1 plus 2?", max_new_tokens=4096)


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 3000, "a\0b"], ids=["long", "deep", "zero"])
def test_a_name_that_no_file_can_have_is_one_that_is_not_there(name):
    shipped = Path(__file__).parents[2] / "checkpoints/python-docs-hybrid"
    for arguments in (
        (name,),
        (shipped, name),
        (shipped, f"top:{name}"),
        (shipped, f"text:{name}"),
    ):
        with pytest.raises(NotFound, match="no folder"):
            stree.load(*arguments, device="cpu")
    with pytest.raises(NotFound, match="no corpus"):
        stree.load(shipped, f"ngram:4,{name}", device="cpu")
    with pytest.raises(NotFound, match="no tree"):
        stree.load(shipped, "ngram:4", tree=name, device="cpu")
