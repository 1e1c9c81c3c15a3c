"""Load target and drafter by name, as a decoder with the settings that were measured fastest."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, overload

import torch

from stree.batching.batch_decoder import BatchDecoder
from stree.checkpoints.heads.mtp import MTP_FILE
from stree.checkpoints.identity import checkpoint_sha256
from stree.checkpoints.load_save import stored_dtype
from stree.checkpoints.partners import partner_remarks
from stree.checkpoints.plan.build import build
from stree.checkpoints.plan.load_plan import plan_model
from stree.checkpoints.plan.stored import indexed_files
from stree.checkpoints.tokenizer import eos_token_ids, load_tokenizer
from stree.common.errors import NotFound, UsageError, naming_what_does_not_fit, warn
from stree.common.words import counted, device_name, dtype_name
from stree.decoder import Decoder
from stree.drafters.names import DrafterName
from stree.generation import GenerationConfig, require_whole
from stree.models.joint import require_backtracking
from stree.models.layers.part import has_products_in_8_bits
from stree.models.offload import stream_layers
from stree.models.slicing import share_ends
from stree.speculation_profile import FOLDER, load_profile
from stree.tree_policy.names import as_tree_policy, choice_of
from stree.tree_policy.policy import FixedTree, TreePolicy
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import StepTree, TokenTree
from stree.verifiers import Verifier, named

DTYPES = ("float32", "bfloat16", "float16", "float64")
DTYPE_HELP = (
    "of the weights: float32, bfloat16, or auto: the target's own on a GPU, float32 on a CPU"
)
FLOAT8 = "float8"
TARGET_DTYPE_HELP = (
    "float8: hold the weights of the target's products in 8 bits (default: as they are stored)"
)
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
# Files that `load` reads of a repository's root, in addition to the weights
_READ_ON_HUB = ["*.json", "*.jinja", "*.txt", "*.model", "*.md", "*.svg"]


@overload
def load(
    target: str | os.PathLike[str], drafter: str | os.PathLike[str] | None = None, *,
    tree: StepTree | TreePolicy | str | None = None, temperature: float = 0.0,
    device: torch.device | str = "auto", dtype: torch.dtype | str = "auto",
    max_length: int = 2048, verifier: str | Verifier | None = None,
    backtracking: str | None = None, num_prefixes: int = 0, num_rows: None = None,
    revision: str | None = None, offload: int | None = None, target_dtype: str | None = None,
) -> Decoder: ...


@overload
def load(
    target: str | os.PathLike[str], drafter: str | os.PathLike[str] | None = None, *,
    tree: StepTree | TreePolicy | str | None = None, temperature: float = 0.0,
    device: torch.device | str = "auto", dtype: torch.dtype | str = "auto",
    max_length: int = 2048, verifier: str | Verifier | None = None,
    backtracking: str | None = None, num_prefixes: int = 0, num_rows: int,
    revision: str | None = None, offload: int | None = None, target_dtype: str | None = None,
) -> BatchDecoder: ...


def load(
    target: str | os.PathLike[str], drafter: str | os.PathLike[str] | None = None, *,
    tree: StepTree | TreePolicy | str | None = None, temperature: float = 0.0,
    device: torch.device | str = "auto", dtype: torch.dtype | str = "auto",
    max_length: int = 2048, verifier: str | Verifier | None = None,
    backtracking: str | None = None, num_prefixes: int = 0, num_rows: int | None = None,
    revision: str | None = None, offload: int | None = None, target_dtype: str | None = None,
) -> Decoder | BatchDecoder:
    """Load target, drafter and tokenizer from checkpoint folders, or from the Hugging Face hub.

    Without a tree it takes the settings that the drafter's measured profile recommends for this
    kind of device and temperature, step times included. These may be no drafter at all, or the
    folder in another form, such as `float8:`. If no fitting measurement of these two checkpoints
    exists, it takes the paper's tree, and warns; n-grams have no profile and no warning.

    Args:
        target: A checkpoint's folder, or a name on the hub: OWNER/NAME, or OWNER/NAME@REVISION.
        drafter: A folder or name, as target; or n-grams, alone or with a folder: `ngram`,
            `ngram:CONTEXT`, `ngram:CONTEXT,FILE`, `FOLDER+ngram` (`stree.drafters.ngram`); or
            `text:FOLDER`, a checkpoint with another tokenizer (`stree.drafters.cross_tokenizer`);
            or, in the place of a folder, `mtp`, the head for multi-token prediction in the target's
            own checkpoint (`stree.checkpoints.heads.mtp.plan_mtp`); or `eagle:FOLDER`, an EAGLE-3
            head (`stree.checkpoints.heads.eagle.plan_eagle`). Before a name with a model,
            `float8:` drafts with the head in 8 bits, `independent:` draws each sibling from all of
            the distribution, `top:` drafts the best tokens, and `temperature=0.6:` draws at 0.6
            whatever the request's temperature (`stree.drafters.model.ModelDrafterSpec`). None
            decodes without drafts.
        tree: A tree or its name; or a tree policy: "A or B" (`AdaptiveTrees`) chooses by measured
            step times, "bandit A or B" (`BanditTrees`) by each tree's rewards. Some steps of each
            tree are timed here, unless the policy has step times of this device and dtype, greedy
            or sampled. None takes the profile's.
        temperature: Temperature of the requests to expect; 0 is greedy.
        device: "cpu", "cuda" or "cuda:N"; "auto" is a GPU if there is one.
        dtype: Dtype of the weights, or its name. "auto" is that of the target's stored weights on a
            GPU, and float32 on a CPU.
        max_length: Tokens of the longest sequence, prompt included.
        verifier: A name (`stree.verifiers.named`), or a verifier of your own. None takes the one
            that the profile's tree was measured with, else `coupled`.
        backtracking: "replay" or "joint", as in `BatchDecoder`. None takes that of the profile's
            tree, else replay.
        num_prefixes: Prefixes to keep; a conversation needs two (`Decoder`). 0 keeps none.
        num_rows: Sequences at once: a number returns a `BatchDecoder` with the same tree, verifier
            and tokenizer; None returns a `Decoder`.
        revision: Branch, tag or commit of a target on the hub; None is its main branch, or the
            one in its name.
        offload: Layers of the target whose weights stay in the CPU's memory and are copied to the
            GPU in each step, one ahead of their use (`stree.models.offload`). None copies none.
        target_dtype: "float8" holds the weights of the target's products in 8 bits, with one scale
            an output (`stree.models.in_8_bits`); activations are in `dtype`. None holds them as
            they are stored, in 8 bits or in `dtype`.

    Raises:
        UsageError: For a value out of range, before anything is read.
        NotFound: For a folder, file or name that does not exist.
        CheckpointRefused: For a checkpoint that cannot be read, and for a drafter with another
            tokenizer than the target's; most reasons are found before any weight is read
            (`stree.checkpoints.plan.load_plan`).

    Example:
        >>> import stree
        >>> decoder = stree.load("checkpoints/python-docs-hybrid", "ngram:4", device="cpu")
        >>> len(decoder.complete("The class of", max_new_tokens=8).tokens)
        8
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device, dtype = find_device(device), _name_of_dtype(dtype)
    require_whole("max_length", max_length)
    for name_of_number, number in (("num_rows", num_rows), ("offload", offload)):
        if number is not None:
            require_whole(name_of_number, number)
    verifier = None if verifier is None else named(verifier)
    if backtracking is not None:
        require_backtracking(backtracking)
    require_target_dtype(target_dtype)
    generation = GenerationConfig(temperature=temperature)  # refuses what no decoding could use
    name = None if drafter is None else DrafterName.parse(drafter)
    target_folder = checkpoint_folder(target, revision, mtp=name is not None and name.mtp)
    dtype = pick_dtype(dtype, device, target_folder)
    tokenizer, drafts, remark = load_tokenizer(target_folder), False, ""
    if name is not None:
        drafter_folder = None if name.folder is None else checkpoint_folder(name.folder)
        if tree is None and drafter_folder is not None and name.is_folder:
            held = target_dtype or dtype_name(dtype)
            found = _measured(target_folder, drafter_folder, device, temperature, held, name)
            if verifier or backtracking:
                found.tree.costs = StepTimes()  # they are of the profile's own
            name, tree, verifier = found.drafter, found.tree, verifier or found.verifier
            backtracking, remark = backtracking or found.backtracking, found.remark
        elif tree is None:
            tree = FixedTree(TokenTree.paper())
        else:
            tree = as_tree_policy(tree)
        if drafter_folder is not None and not name.retokenised and not name.eagle:
            for doubt in partner_remarks(target_folder, drafter_folder, max_length):
                warn(doubt)
        if remark:
            warn(f"{drafter}: {remark}")
        name, drafts = replace(name, folder=drafter_folder), tree.largest.num_nodes > 1
    elif tree is not None:
        tree = as_tree_policy(tree)
    target_plan = plan_model(target_folder)
    drafter_plan = name.plan(target_folder) if name is not None and drafts else None
    own = None if drafter_plan is None else build(drafter_plan, device, dtype)
    drafting = name.make(own, tokenizer) if name is not None and drafts else None
    with naming_what_does_not_fit("use dtype=torch.bfloat16", f"the weights in {target_folder}"):
        place = device if offload is None else "cpu"
        model = build(target_plan, place, dtype, in_8_bits=target_dtype == FLOAT8)
        if offload is not None:
            stream_layers(model, offload, device)
    if name is not None and name.is_head and own is not None:
        share_ends(own, model)
    if not eos_token_ids(model.config, tokenizer):
        warn(
            f"{target}: neither its config nor its tokenizer names an EOS, so answers end at "
            "max_new_tokens; name one with GenerationConfig(eos_token_id=…)"
        )
    make = Decoder if num_rows is None else partial(BatchDecoder, num_rows=num_rows)
    decoder: Decoder | BatchDecoder = make(
        model, drafting, tree, max_length=max_length, tokenizer=tokenizer,
        verifier=verifier or "coupled", backtracking=backtracking or "replay",
        num_prefixes=num_prefixes,
    )
    if tree is not None and (misfit := tree.misfit(model, temperature, num_rows or 1)):
        if tree.costs.seconds:
            remark = f"costs of steps are given, but {misfit}: they are measured here"
            warn(remark)
        decoder.measure_step_times(generation=generation)
    return decoder


def find_device(device: torch.device | str) -> torch.device:
    """Return a CPU or GPU by its name in PyTorch; "auto" is a GPU if there is one.

    Raises `UsageError` for another name, or a GPU that is not there.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise UsageError(f'device is {str(device)!r}, wanted "auto", "cpu", "cuda" or "cuda:N"')
    num_here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= num_here:
        raise UsageError(
            f'there is no device "{found}" here, PyTorch sees {counted(num_here, "GPU")}; '
            '"auto" takes what there is'
        )
    return found


def pick_dtype(
    dtype: torch.dtype | str, device: torch.device, target: str | os.PathLike[str]
) -> torch.dtype:
    """Return a dtype for weights by its name, one of `DTYPES`.

    "auto" is that of the weights stored in the target's folder on a GPU, and fp32 on a CPU. Raises
    `UsageError` for another name.
    """
    name = _name_of_dtype(dtype)
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" else stored_dtype(target)


def require_target_dtype(target_dtype: str | None) -> None:
    """Raise `UsageError` for what is no `target_dtype` of `load`."""
    if target_dtype not in (None, FLOAT8):
        raise UsageError(
            f"target_dtype is {target_dtype!r}, wanted {FLOAT8} or none: dtype is that of other "
            "weights and of activations"
        )


def _name_of_dtype(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ("auto", *DTYPES):
        raise UsageError(f"dtype is {name!r}, wanted auto or one of {', '.join(DTYPES)}")
    return name


class _Measured(NamedTuple):
    """Settings to decode with, from a drafter's profile.

    Attributes:
        drafter: The drafter's folder, and in which form it drafts.
        tree: A tree or tree policy.
        verifier: The verifier that was measured; None if unknown.
        backtracking: The backtracking that was measured; None if unknown.
        remark: Where the settings differ from those asked for, and why; "" for nowhere.
    """

    drafter: DrafterName
    tree: TreePolicy
    verifier: str | None = None
    backtracking: str | None = None
    remark: str = ""


def _measured(
    target: Path, drafter: Path, device: torch.device, temperature: float, dtype: str,
    asked: DrafterName,
) -> _Measured:
    """Return the settings that a drafter's profile recommends here, or the paper's tree.

    A form of the drafter that was asked for is kept.
    """
    profile, unmeasured = load_profile(drafter), _Measured(asked, FixedTree(TokenTree.paper()))
    otherwise = "the paper's tree is used; measure with eval_spec.py and profile_drafter.py"
    if profile is None:
        return unmeasured._replace(remark=f"no speculation_profile.json, so {otherwise}")
    for role, folder, sha256 in (
        (f"target ({profile.target})", target, profile.target_sha256),
        ("drafter", drafter, profile.checkpoint_sha256),
    ):
        if checkpoint_sha256(folder) != sha256:
            return unmeasured._replace(
                remark="its speculation_profile.json was measured with another "
                f"{role} than {folder}, so {otherwise}"
            )
    found = profile.recommended(device.type, temperature, dtype, device=device_name(device))
    if found is None:
        kind = "greedy" if temperature == 0 else "sampled"
        remark = f"no {kind} decoding of one sequence was measured on {device.type}: {otherwise}"
        return unmeasured._replace(remark=remark)
    if found.tree is None:
        plain, reason = FixedTree(TokenTree.chain(0, "root")), found.reason
        remark = f"its profile says: {reason} So it is not used; name a tree to use it all the same"
        return _Measured(asked, plain, remark=remark)
    form = found.drafter or FOLDER
    measured, remark = replace(DrafterName.parse(form), folder=asked.folder), ""
    if not asked.is_plain and asked != measured:
        measured = asked
        remark = f"its profile was measured with {form}, not {asked.shown(FOLDER)}"
    elif measured.float8 and not has_products_in_8_bits(device):
        measured = replace(measured, float8=False)
        remark = f"its profile recommends {form}, but GPUs of before compute capability 8.9 have "
        remark += "no products in 8 bits: it drafts with its head as it is stored"
    try:
        shape = found.tree.to_token_tree()
        tree = as_tree_policy(found.tree.name if choice_of(found.tree.name) else shape)
    except NotFound as error:  # a file's tree, of which a profile has no shape
        return unmeasured._replace(remark=f"its profile recommends {error}; {otherwise}")
    if not measured.grows and any(each.grows for each in tree.trees):
        remark += f", and {found.tree.name} grows, for siblings no two of which are alike"
        return unmeasured._replace(remark=f"{remark}: {otherwise}")
    if tree.needs_step_times and found.costs is not None and not remark:
        tree.costs = StepTimes.of_record(found.costs)
    return _Measured(measured, tree, found.verifier, found.backtracking, remark)


def checkpoint_folder(
    name: str | os.PathLike[str], revision: str | None = None, *, mtp: bool = False
) -> Path:
    """Return a checkpoint's folder, fetched from the Hugging Face hub if it is a name there.

    Of a repository the files that are read are fetched: no weights in other formats, none of other
    programs.

    Args:
        name: A folder, OWNER/NAME, or OWNER/NAME@REVISION.
        revision: Branch, tag or commit, for a name without one.
        mtp: Whether a file with an MTP head alone is fetched, too.

    Raises:
        NotFound: For neither a folder nor a name on the hub.
        UsageError: For a revision of a folder, or two revisions.
    """
    if not isinstance(name, str | os.PathLike) or not str(name):
        raise UsageError(f"a checkpoint is {name!r}, wanted a folder or a name on the hub")
    path, on_hub = Path(name), _HUB_NAME.fullmatch(str(name))
    if os.path.isdir(path):
        if revision is not None:
            raise UsageError(f"revision is {revision!r}, and {path} is a folder: leave it out")
        return path
    if on_hub is None:
        raise NotFound(f"no folder {str(name)!r:.200}: give the path of a checkpoint")
    if revision is not None and on_hub["revision"] not in (None, revision):
        raise UsageError(f"revision is {revision!r}, and {name} names another: leave one out")
    try:
        return _fetched(on_hub["name"], revision or on_hub["revision"], [MTP_FILE] * mtp)
    except Exception as error:  # of the network, the name, the cache: they have no common base
        reason = " ".join(str(error).split())
        raise NotFound(
            f"there is no folder {name}, and no such repository can be fetched ({reason}): give "
            "the path of a checkpoint folder, or a name on the hub"
        ) from error


def _fetched(name: str, revision: str | None, also: list[str]) -> Path:
    """Fetch a repository's configs and tokenizer, then the weights that `load_model` reads."""
    from huggingface_hub import snapshot_download

    fetch = partial(snapshot_download, name, revision=revision)
    folder = Path(fetch(allow_patterns=_READ_ON_HUB, ignore_patterns=["*/*"]))
    for weights in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{weights}.index.json"
        fetch(allow_patterns=[weights, "additional_chat_templates/*.jinja", *also])
        if not (folder / weights).is_file() and index.is_file():
            fetch(allow_patterns=sorted({path.name for path in indexed_files(index)}))
        if (folder / weights).is_file() or index.is_file():
            break
    return folder
