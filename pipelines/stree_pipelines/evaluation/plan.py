"""Plan an evaluation: its settings, and the jobs that follow from them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from stree.batching.checks import require_vocabulary_of
from stree.checkpoints.configs import load_config
from stree.checkpoints.identity import checkpoint_sha256
from stree.checkpoints.partners import partner_remarks
from stree.checkpoints.tokenizer import require_same_tokenizer
from stree.common.errors import NotFound, UsageError
from stree.common.files import MANIFEST_NAME, verify_manifest
from stree.common.plain_data import read_json
from stree.common.words import dtype_name
from stree.drafters import SiblingSampling
from stree.drafters.cross_tokenizer import require_tokens_alone
from stree.drafters.names import DrafterName
from stree.generation import GenerationConfig
from stree.loading import DTYPE_HELP, TARGET_DTYPE_HELP, pick_dtype, require_target_dtype
from stree.models.hidden_states import require_features_of
from stree.models.joint import require_backtracking
from stree.tree_policy.adaptive import AdaptiveTrees
from stree.tree_policy.names import TREE_POLICIES, as_tree_policy
from stree.tree_policy.policy import TreePolicy
from stree.trees.token_tree import StepTree, TokenTree
from stree.verifiers import VERIFIERS, named, require_tree
from stree_pipelines.console.command_line import input_path
from stree_pipelines.evaluation.benchmarks import PROMPT_FORMAT, Benchmark, BenchmarkPrompt
from stree_pipelines.evaluation.context import checkpoint_step, pick_device
from stree_pipelines.evaluation.records import ResultKey, SampleKey, config_hash
from stree_pipelines.evaluation.result_store import packed_samples
from stree_pipelines.evaluation.sampling import OFF, Sampling, option, sampling_of

# Names of methods in rows of results, and what people call them: in options, tables and figures
AUTOREGRESSIVE, CHAIN, TREE = METHODS = ("autoregressive", "vanilla_sd", "stree")
METHOD_LABELS = {AUTOREGRESSIVE: "plain", CHAIN: "chain", TREE: "tree"}
_METHOD_OF_LABEL = {label: method for method, label in METHOD_LABELS.items()}
DRAFTING = ("methods", "tree", "verifier", "backtracking", "num_chain_drafts")  # an arm's own
NUM_FIRST_PROMPTS = 4  # at least; a batch's size when that is larger


@dataclass(frozen=True)
class ChosenTree(StepTree):
    """Record of a tree policy: several trees, and each step has one of them, or none.

    The choice is by measured cost (`stree.AdaptiveTrees`), with a name such as "chain-2 or
    beam-4-5-16", or by a bandit (`stree.BanditTrees`): "bandit chain-2 or beam-4-5-16", or "ucb
    …". `shape` holds all of the trees; records of steps hold depths.
    """

    name: str
    shape: TokenTree = field()
    choices: tuple[StepTree, ...] = ()
    policy: type[TreePolicy] = AdaptiveTrees

    @classmethod
    def of(cls, tree_policy: TreePolicy) -> ChosenTree:
        choices = tree_policy.trees[1:]  # the first is plain decoding
        ranks: dict[tuple[int, ...], None] = {}  # of the children on the path to each node
        for tree in choices:
            paths: list[tuple[int, ...]] = [()]
            for node, parent in enumerate(tree.parents[1:], start=1):
                paths.append((*paths[parent], tree.shape.children[parent].index(node)))
            ranks |= dict.fromkeys(paths)
        nodes = sorted(ranks, key=lambda path: (len(path), path))
        parents = (nodes.index(path[:-1]) for path in nodes[1:])
        shape = TokenTree((-1, *parents), str(tree_policy))
        return cls(shape.name, shape, choices, type(tree_policy))


@dataclass(frozen=True)
class EvaluationSettings(Sampling):
    """Settings of an evaluation; the fields are the options of `eval_spec.py`, with their help."""

    target: str
    out: str
    benchmarks: tuple[str, ...] = option(
        f"names in --benchmark_dir, or JSONL files of one's own: {PROMPT_FORMAT}"
    )
    benchmark_dir: str | None = option("where names are looked up (default: data/benchmarks)", None)
    methods: tuple[str, ...] = option(
        f"{', '.join(_METHOD_OF_LABEL)}; or as in rows of results: {', '.join(METHODS)}",
        tuple(_METHOD_OF_LABEL),
    )
    temperatures: tuple[float, ...] = option("0 is greedy", (0.0, 1.0))
    tree: str = option(f"of the method tree: {TREE_POLICIES}", "paper")
    verifier: str = option(", ".join(VERIFIERS), "coupled")
    backtracking: str = option(
        "replay what the last call has kept of the accepted path, or joint: feed it again", "replay"
    )
    num_chain_drafts: int = option(
        "drafts a call of the method chain (the paper's N = 5 counts the root)", 4
    )
    max_new_tokens: int = option("a turn", GenerationConfig.max_new_tokens)
    limit: int | None = option("number of prompts of each benchmark, from the first on", None)
    chat_template: str | None = option("name or .jinja file (default: the tokenizer's own)", None)
    dtype: str = option(DTYPE_HELP, "auto")
    target_dtype: str | None = option(TARGET_DTYPE_HELP, None)
    device: str = option("auto, cpu, cuda or cuda:N", "auto")
    seed: int = option("of sampling, together with prompt and turn, and of the gate's intervals", 0)
    batch_size: int = option(
        "prompts that a process decodes at once; rows of other sizes are another table's", 1
    )
    ignore_eos: bool = option("go on to max_new_tokens (for speed runs; recorded)", False)
    beyond_positions: bool = option(
        "let prompts be longer than what the target was made for", False
    )
    overwrite: bool = option("measure again what exists", False)

    def __post_init__(self) -> None:
        for name in ("target", "benchmark_dir", "chat_template"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, input_path(value))
        object.__setattr__(self, "benchmarks", tuple(map(input_path, self.benchmarks)))
        object.__setattr__(self, "methods", tuple(map(method_of, self.methods)))
        for name in ("benchmarks", "methods", "temperatures"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not getattr(self, name):
                raise UsageError(f"{name} is empty, wanted at least one")
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UsageError(f"{name} are {list(getattr(self, name))}, wanted each once")
        if set(self.methods) - set(METHODS):
            raise UsageError(
                f"methods are {list(self.methods)}, wanted some of {', '.join(_METHOD_OF_LABEL)}"
            )
        for temperature in self.temperatures:
            # refuses settings that no decoding takes
            generation = GenerationConfig(temperature=temperature, **sampling_of(self))
        if not any(self.temperatures):
            generation.warn_of_unread()
        for name, off in OFF.items():
            object.__setattr__(self, name, type(off)(getattr(self, name)))
        if self.dtype == "auto" and Path(self.target).is_dir():  # else it is said later
            dtype = pick_dtype(self.dtype, pick_device(self.device), self.target)
            object.__setattr__(self, "dtype", dtype_name(dtype))
        require_target_dtype(self.target_dtype)
        named(self.verifier)
        require_backtracking(self.backtracking)
        leasts = {"max_new_tokens": 1, "num_chain_drafts": 1, "seed": 0, "batch_size": 1}
        for name, least in leasts.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}, wanted at least {least}")

    @property
    def held_dtype(self) -> str:
        """Dtype of the weights of the target's products."""
        return self.target_dtype or self.dtype

    def first_prompts(self, benchmark: Benchmark, least: int = 0) -> tuple[BenchmarkPrompt, ...]:
        """Return the prompts that tune a chain's length or teach a choice among trees.

        They are answered before any answer is timed, and again when timed: a server runs for hours
        and has learnt, an evaluation lasts for seconds. They fill a batch, and are `least` or more.
        """
        return benchmark.prompts[: max(NUM_FIRST_PROMPTS, least, self.batch_size)]

    def method(self, name: str) -> Method:
        """Return one of METHODS with its tree. Raises as `Method`."""
        trees = {AUTOREGRESSIVE: None, CHAIN: TokenTree.chain(self.num_chain_drafts)}
        tree = trees[name] if name in trees else tree_named(self.tree)
        return Method(name, name, tree, self.verifier, self.backtracking)


def method_of(name: str) -> str:
    """Return the method of one of METHODS' labels; other names as they are."""
    return _METHOD_OF_LABEL.get(name, name)


def method_label(method: str) -> str:
    """Return what tables and figures call a method of a row, with its tree where it has several.

    method: a name as `reports.run_data.method_names` gives it, such as "stree:paper".
    """
    name, _, tree = method.partition(":")
    return METHOD_LABELS.get(name, name) + (f", {tree}" if tree else "")


@dataclass(frozen=True)
class Method:
    """A way to decode, with its name in rows; plain decoding where `tree` is None.

    kind: one of METHODS. The arms of a comparison are all `TREE`. drawn: how the drafter draws
    siblings, None for the default.

    Raises UsageError for a tree that the verifier cannot judge.
    """

    name: str
    kind: str
    tree: StepTree | None
    verifier: str
    backtracking: str
    drawn: SiblingSampling | None = None

    def __post_init__(self) -> None:
        verifier = named(self.verifier)
        require_backtracking(self.backtracking)
        for each in choices_of(self.tree) if self.tree else ():
            require_tree(verifier, each, self.drawn)


def tree_named(name: str) -> StepTree:
    """Return a tree or a tree policy by its name or file. Raises UsageError."""
    return tree_of(as_tree_policy(name, input_path))


def tree_of(tree_policy: TreePolicy) -> StepTree:
    """Return a tree policy as the tree that records hold."""
    return tree_policy.largest if len(tree_policy.trees) == 1 else ChosenTree.of(tree_policy)


def policy_of(tree: StepTree) -> StepTree | TreePolicy:
    """Return the tree policy of a decoder, made anew for each decoder: a choice learns."""
    return tree.policy(tree.choices) if isinstance(tree, ChosenTree) else tree


def choices_of(tree: StepTree) -> tuple[StepTree, ...]:
    """Return the trees that a step may have."""
    return tree.choices if isinstance(tree, ChosenTree) else (tree,)


def require_fillable(tree: StepTree, drafter: DrafterName) -> None:
    """Raise UsageError for a dynamic tree with a drafter that fills only trees of one shape."""
    if any(each.grows for each in choices_of(tree)) and not drafter.grows:
        raise UsageError(
            f"{tree.name} grows, with {drafter}: n-grams fill trees of one shape, and so do "
            "drafters of another tokenizer and independent siblings, which may be alike; take "
            "paper, chain-N or png-N-D"
        )


def form_sha256(name: DrafterName, model_sha256: str | None, corpus: str = "") -> str:
    """Hash a drafter that is not just its folder: its model's files, its corpus, and how it
    drafts."""
    return config_hash({
        "model": model_sha256, "context": name.context,
        "corpus": hashlib.sha256(corpus.encode()).hexdigest(),
        **({"retokenised": True} if name.retokenised else {}),
        **({"head": "float8"} if name.float8 else {}),
        **({} if name.draws_in_turn else {"siblings": name.siblings.name}),
        **({} if name.temperature is None else {"temperature": name.temperature}),
        **({"mtp": True} if name.mtp else {}),
    })


@dataclass(frozen=True)
class DrafterIdentity:
    """A drafter in an evaluation: a checkpoint at a path, or n-grams of a name."""

    path: str
    name: DrafterName
    sha256: str
    step: int | None

    @classmethod
    def at(cls, path: str | Path) -> DrafterIdentity:
        """Identify a drafter by its path or name; a link, such as `latest`, counts as its current
        target.

        A training may move the link meanwhile. Raises CheckpointRefused when files differ from the
        manifest: existing rows are of the files that it describes.
        """
        name = DrafterName.parse(str(path))
        if name.folder is None:
            return cls(str(path), name, form_sha256(name, None, name.corpus_text()), None)
        folder = Path(name.folder)
        if folder.is_symlink():
            folder = folder.parent / folder.readlink()
        if (folder / MANIFEST_NAME).exists():
            verify_manifest(folder)
        name, sha256 = replace(name, folder=str(folder)), checkpoint_sha256(folder)
        if not name.is_plain:
            sha256 = form_sha256(name, sha256, name.corpus_text())
        return cls(str(name), name, sha256, checkpoint_step(folder))

    def require_fit(self, target: str) -> None:
        """Raise now the errors of a decoder with this target's folder, by tokenizers and
        configs."""
        if self.name.is_head:
            self.name.plan(target)
        if self.name.folder is None or self.name.eagle:
            return
        config = load_config(self.name.folder)
        if self.name.retokenised:
            require_tokens_alone(config)
            return
        require_same_tokenizer(target, self.name.folder)
        require_vocabulary_of(config, load_config(target))
        require_features_of(config, load_config(target))

    def remarks(self, target: str, max_length: int | None = None) -> list[str]:
        """Return a sentence for each reason to doubt that it was made for this target's folder."""
        if self.name.folder is None or self.name.retokenised or self.name.eagle:
            return []
        return list(partner_remarks(target, self.name.folder, max_length))


@dataclass(frozen=True)
class Job:
    """A row to measure: a method on a benchmark at a temperature.

    verifier and backtracking are of its tree, if it has one.
    """

    method: str
    tree: StepTree | None
    verifier: str
    backtracking: str
    drafter: DrafterIdentity | None
    benchmark: Benchmark
    temperature: float
    decoding_hash: str
    seed: int

    @property
    def decoder_key(self) -> tuple[DrafterIdentity | None, str]:
        """Key of the job's decoder.

        Methods run at the same time, and a method's tree may differ by benchmark, so each has its
        own.
        """
        return self.drafter, self.method if self.tree is None else f"{self.method}: {self.tree}"

    @property
    def checkpoint_sha256(self) -> str | None:
        return self.drafter.sha256 if self.drafter else None

    @property
    def step(self) -> int | None:
        return self.drafter.step if self.drafter else None

    def columns(self, settings: EvaluationSettings) -> dict[str, Any]:
        """Return what the row and its samples both hold of the job and its evaluation."""
        return {
            "step": self.step, "checkpoint_sha256": self.checkpoint_sha256,
            "method": self.method, "benchmark": self.benchmark.name,
            "temperature": self.temperature, **sampling_of(settings),
            "batch_size": settings.batch_size, "seed": self.seed,
            "decoding_hash": self.decoding_hash,
        }

    def sample_key(self, prompt: BenchmarkPrompt) -> SampleKey:
        return (*self._head, prompt.id, self.decoding_hash, self.seed)

    @property
    def result_key(self) -> ResultKey:
        return (*self._head, self.benchmark.prompts_hash, self.decoding_hash, self.seed)

    @property
    def samples_name(self) -> str:
        """File of its samples: readable, and unique by the hash of its key."""
        prefix = "" if self.step is None else f"step-{self.step:08d}_"
        label = f"{prefix}{self.method}_{self.benchmark.name}_T{self.temperature:g}"
        return packed_samples(f"{label}_{config_hash({'key': self.result_key})[:8]}")

    @property
    def _head(self) -> tuple[str | None, str, str | None, str]:
        tree = self.tree.name if self.tree else None
        return self.checkpoint_sha256, self.method, tree, self.benchmark.name


@dataclass(frozen=True)
class Round:
    """Answers still to be made for one prompt at one temperature.

    Attributes:
        baseline: plain decoding, which goes first whenever it is among the methods, also when its
            own row exists: each speedup is relative to a run next to it.
        missing: the jobs whose answers are to be saved, interleaved.
    """

    prompt: BenchmarkPrompt
    baseline: Job | None
    missing: tuple[Job, ...]

    @property
    def jobs(self) -> list[Job]:
        """All jobs that run, in their order."""
        drafting = [job for job in self.missing if job.method != AUTOREGRESSIVE]
        return drafting if self.baseline is None else [self.baseline, *drafting]


def make_job(
    settings: EvaluationSettings, method: Method, drafter: DrafterIdentity | None,
    benchmark: Benchmark, temperature: float,
    target_sha256: str, chat_template: str, device_type: str,
) -> Job:
    """Make a job, with a hash of everything that decides its tokens and its speed.

    Drafter, prompts and seed are left out: its key has them by name. `chat_template` is the
    template's text, since a file's name does not identify its content, and has the date that it
    prints.
    """
    tree, verifier, backtracking = method.tree, method.verifier, method.backtracking
    decoding = {
        "target": target_sha256, "method": method.kind, "tree": tree.parents if tree else None,
        "temperature": float(temperature), "max_new_tokens": settings.max_new_tokens,
        "ignore_eos": settings.ignore_eos, "chat_template": chat_template,
        "dtype": settings.dtype, "target_dtype": settings.target_dtype, "device": device_type,
        "batch_size": settings.batch_size, "verifier": verifier if tree else None,
        "backtracking": backtracking if tree else None, **sampling_of(settings),
    }
    return Job(
        method.name, tree, verifier, backtracking, drafter if tree else None, benchmark,
        float(temperature), config_hash(decoding), settings.seed,
    )


def resolve(options: Mapping[str, Any]) -> tuple[EvaluationSettings, list[str | None]]:
    """Return settings and checkpoints from the command's options; [None] is plain decoding alone.

    A `run` gives its exports by step, its target and its eval folder. Raises UsageError when
    something is missing.
    """
    options, run = dict(options), options["run"]
    checkpoints = list(options["checkpoint"] or ())
    if run is not None:
        if not checkpoints:
            require_exports(run)
        checkpoints += _exports_of(run)
        options["out"] = options["out"] or str(Path(run, "eval"))
        options["target"] = options["target"] or _target_of(Path(run))
    for name in ("target", "out"):
        if options[name] is None:
            raise UsageError(f"--{name} is missing: give it, or a --run that implies it")
    settings = settings_of(options)
    if not checkpoints and AUTOREGRESSIVE not in settings.methods:
        raise UsageError(
            f"the methods {', '.join(map(method_label, settings.methods))} need a drafter: give "
            "--checkpoint or --run"
        )
    return settings, checkpoints or [None]


def require_exports(run: str) -> None:
    """Raise `NotFound` for a run without an export."""
    if not _exports_of(run):
        raise NotFound(f"{run}/drafter holds no step-* folder: has the run exported yet?")


def _exports_of(run: str) -> list[str]:
    exports = Path(run, "drafter").glob("step-*")
    return sorted(str(path) for path in exports if path.name[len("step-") :].isdecimal())


def settings_of(options: Mapping[str, Any]) -> EvaluationSettings:
    """Return the settings among the command's options, for any checkpoints."""
    return EvaluationSettings(**{f.name: options[f.name] for f in fields(EvaluationSettings)})


def prompt_seed(seed: int, benchmark: str, prompt_id: str, turn: int) -> int:
    """Return the sampling seed of one answer: a function of the question, not of process or
    time."""
    text = "\0".join((str(seed), benchmark, prompt_id, str(turn)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _target_of(run: Path) -> str:
    path = run / "command.json"
    try:
        return str(read_json(path)["target"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} does not name the run's target: give --target") from error
