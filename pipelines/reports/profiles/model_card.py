"""Write the model card of an exported drafter: its measurements and its origin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from stree.checkpoints.load_save import load_config
from stree.common.errors import BadData
from stree.common.plain_data import parse_yaml, read_text
from stree.common.words import counted
from stree.speculation_profile import FOLDER, Measurement, SpeculationProfile
from stree_pipelines.evaluation.plan import METHODS
from stree_pipelines.evaluation.sampling import told_sampling
from stree_pipelines.reports.rendering import markdown_page
from stree_pipelines.reports.run_data import RunData, in_batches, method_label
from stree_pipelines.reports.tables.tables import MISSING, Table, figure

CARD_NAME = "README.md"
TEMPLATES = Path(__file__).parents[1] / "templates"
# Cards without it are someone's own writing.
MARKER = "<!-- Written by profile_drafter.py; without this line it leaves the card alone. -->"


def may_write_card(drafter: Path) -> bool:
    """Return True when the folder has no card, or one that was written here."""
    card = drafter / CARD_NAME
    return not card.exists() or MARKER in card.read_text(encoding="utf-8", errors="replace")


def model_card(profile: SpeculationProfile, data: RunData, drafter: Path, curve: str | None) -> str:
    """Format the card: Markdown with YAML front matter, as the Hugging Face hub shows it.

    Args:
        data: the run of the drafter.
        curve: file name of the figure in the card's folder.

    Raises CheckpointRefused or BadData when the drafter's config, its provenance or the run's
    config cannot be read.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    origin = _read(drafter / "provenance.json")
    card = environment.get_template("model_card.md.j2").render(
        marker=MARKER,
        step=profile.step,
        target=profile.target,
        target_name=Path(profile.target).name,
        facts=list(_facts(profile, origin, drafter)),
        recommendations=profile.recommendations,
        places=list(_places(profile.measurements)),
        curve=curve,
        suggestions=profile.suggested_trees,
        provenance=list(_provenance(origin, profile.step, data)),
        target_licence=_licence(Path(profile.target)),
    )
    return markdown_page(card).replace(markdown_page(MARKER), MARKER)


def _facts(
    profile: SpeculationProfile, origin: dict[str, Any], drafter: Path
) -> Iterator[tuple[str, str]]:
    config = load_config(drafter)
    num_attention = len(config.attn_layers)
    yield "layers", f"{config.num_layers}, {num_attention} of them attention, the others Mamba-2"
    yield "width, vocabulary", f"{config.d_model}, {config.vocab_size:,}"
    yield "drafts for", f"`{profile.target}` (sha256 of its files {profile.target_sha256[:12]}…)"
    if "tokenizer_fingerprint" in origin:
        yield "tokenizer", f"fingerprint {str(origin['tokenizer_fingerprint'])[:12]}…"


def _provenance(
    origin: dict[str, Any], step: int | None, data: RunData
) -> Iterator[tuple[str, str]]:
    """Yield facts about the drafter's origin, as far as the export and its run have them."""
    for name, label in (("step", "distillation steps"), ("tokens_seen", "tokens")):
        if isinstance(origin.get(name), int):
            yield label, f"{origin[name]:,}"
    training = _read(data.folder / "config.yaml").get("data")
    for name, label in (("train", "data"), ("valid", "validation data")):
        if isinstance(training, dict) and training.get(name):
            yield label, f"`{training[name]}`"
    if isinstance(origin.get("loss"), float):
        yield "distillation loss", f"{origin['loss']:.4f} on the step's batch"
    for name, label in (
        ("val_loss", "validation loss"),
        ("val_simulated_acceptance", "simulated acceptance (validation)"),
    ):
        seen = [point for point in data.curves.get(name, []) if point[0] <= (step or 0)]
        if seen:
            yield label, f"{seen[-1][1]:.4f} at step {seen[-1][0]:.0f}"
    if "command_line" in data.command:
        yield "command", f"`{data.command['command_line']}`"
    if "config_hash" in origin:
        yield "config hash", str(origin["config_hash"])
    if "git_sha" in origin:
        yield "commit", str(origin["git_sha"])
    if isinstance(origin.get("versions"), dict):
        yield "versions", ", ".join(f"{k} {v}" for k, v in origin["versions"].items())


def _places(measurements: tuple[Measurement, ...]) -> Iterator[dict[str, str]]:
    """Yield the measurements of each device, dtype and batch size, which share no table."""
    places: dict[tuple[str, str, int], list[Measurement]] = {}
    for each in _in_order(measurements):
        places.setdefault((each.device, each.dtype, each.batch_size), []).append(each)
    for (device, dtype, batch_size), here in places.items():
        place = f"{dtype} on {device}{in_batches(batch_size, ', ')}"
        yield {
            "measured": _measured(here, f"Speed and acceptance length, {place}"),
            "conditions": _conditions(here),
            "by_depth": _by_depth(here, f"Acceptance by depth, {place}"),
        }


def _measured(measurements: Sequence[Measurement], title: str) -> str:
    head = ("", "method", "τ", "tokens/s", "speed-up", "a call's time")
    rows = [
        (
            f"{each.benchmark}, T = {each.temperature:g}",
            _method(each),
            figure(each.acceptance_length, each.acceptance_length_interval),
            figure(each.tokens_per_second),
            figure(each.speedup, each.speedup_interval, unit="×"),
            _times(each),
        )
        for each in measurements
    ]
    return Table(title, (head, *rows), num_left=2).to_markdown()


def _by_depth(measurements: Sequence[Measurement], title: str) -> str:
    drafting = [each for each in measurements if each.depth_accept_rates]
    depths = sorted({depth for each in drafting for depth in each.depth_accept_rates})
    if not depths:
        return ""
    head = ("", "method", *(f"depth {depth}" for depth in depths))
    rows = [
        (
            f"{each.benchmark}, T = {each.temperature:g}",
            _method(each),
            *(figure(each.depth_accept_rates.get(depth)) for depth in depths),
        )
        for each in drafting
    ]
    return Table(title, (head, *rows), num_left=2).to_markdown()


def _in_order(measurements: tuple[Measurement, ...]) -> list[Measurement]:
    """Sort an evaluation's methods in their order, and a comparison's arms in that of its file."""
    places = dict.fromkeys((*METHODS, *(each.method for each in measurements)))
    order = {method: place for place, method in enumerate(places)}
    return sorted(
        measurements,
        key=lambda m: (
            m.device, m.dtype, m.batch_size, m.benchmark, m.temperature, order[m.method]
        ),
    )


def _conditions(measurements: Sequence[Measurement]) -> str:
    """Format the conditions of the measurements, each combination once."""
    said = dict.fromkeys(
        f"{counted(m.num_prompts, 'prompt')} of {m.benchmark}, "
        f"up to {m.max_new_tokens} new tokens a turn{' (EOS ignored)' if m.ignore_eos else ''}"
        f"{told_sampling(m, ', ')}, "
        f"commit {m.git_sha}"
        for m in measurements
    )
    return "; ".join(said) + "." + _endings(measurements)


def _endings(measurements: Sequence[Measurement]) -> str:
    """Say how answers ended and how many were held up; nothing of older rows."""
    counts = [(m.num_ended or 0, m.num_cut or 0, m.num_stalled or 0) for m in measurements]
    ended, cut, stalled = (sum(each) for each in zip(*counts, strict=True))
    told = f" {ended} answers ended by themselves, {cut} were cut." if ended + cut else ""
    if stalled:
        told += (
            f" Marked: the machine held up answers to {stalled} prompts, so do not rely on speeds."
        )
    return told


def _method(measurement: Measurement) -> str:
    parts = [method_label(measurement.method)]
    if measurement.tree is not None:
        parts.append(measurement.tree.name)
    if measurement.method not in METHODS and measurement.verifier is not None:
        parts.append(measurement.verifier)  # each arm has its own
    if measurement.drafter not in (None, FOLDER):
        parts.append(measurement.drafter)
    return ", ".join(parts)


def _times(measurement: Measurement) -> str:
    total = sum(measurement.time_ms.values())
    if not total:
        return MISSING
    parts = sorted(measurement.time_ms.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {100 * ms / total:.0f} %" for name, ms in parts[:2])
    return f"{total:.2f} ms: {shares}"


def _licence(target: Path) -> str | None:
    """Return the licence in the front matter of the target's own card."""
    card = target / CARD_NAME
    if not card.is_file():
        return None
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if parts[0] or len(parts) < 3:
        return None
    try:
        front = parse_yaml(parts[1])
    except ValueError:
        return None
    licence = front.get("license") if isinstance(front, dict) else None
    return licence if isinstance(licence, str) else None


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML file's table, empty without the file; raises BadData for other
    content."""
    if not path.is_file():
        return {}
    try:
        content = parse_yaml(read_text(path))  # JSON is YAML too
    except (OSError, ValueError) as error:
        raise BadData(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise BadData(f"{path} holds no table of names and values")
    return content
