"""Write the model card of an exported drafter: its measurements and its origin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stree.checkpoints.configs import load_config
from stree.common.words import counted
from stree.speculation_profile import FOLDER, Measurement, SpeculationProfile
from stree_pipelines.evaluation.plan import METHODS, method_label
from stree_pipelines.evaluation.sampling import sampling_text
from stree_pipelines.reports.profiles.drafter_profile import withheld
from stree_pipelines.reports.rendering import markdown_page, render_text
from stree_pipelines.reports.run_data import RunData, in_batches, read_table
from stree_pipelines.reports.tables.tables import MISSING, Column, Table, figure

CARD_NAME = "README.md"
# Cards without it are someone's own writing.
MARKER = "<!-- Written by profile_drafter.py; without this line it leaves the card alone. -->"

# A path of the machine where the card is written, in quotation marks or up to a space, also behind
# a colon (float8:/home/…). Paths from the working directory, addresses and names on the hub stay.
_LOCAL_PATH = re.compile(
    r"""(?<=["'`])(?:~|\.\.)?/[^"'`\n]*(?=["'`])"""
    r"""|(?:file://|(?<![\w.~/<-]))(?:~|\.\.)?/(?!/)[^\s"'`,\]]*"""
)


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
    origin = read_table(drafter / "provenance.json")
    card = render_text("model_card.md.j2", {
        "marker": MARKER,
        "step": profile.step,
        "target": profile.target,
        "target_name": Path(profile.target).name,
        "facts": list(_facts(profile, origin, drafter)),
        "recommendations": profile.recommendations,
        "withheld": withheld(data),
        "places": list(_places(profile.measurements)),
        "curve": curve,
        "suggestions": profile.suggested_trees,
        "provenance": list(_provenance(origin, profile.step, data)),
    }, keep_trailing_newline=True)
    page = _LOCAL_PATH.sub(lambda path: Path(path[0]).name or path[0], markdown_page(card))
    return page.replace(markdown_page(MARKER), MARKER)


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
    training = read_table(data.folder / "config.yaml").get("data")
    training = training if isinstance(training, dict) else {}
    versions = origin.get("versions")
    facts = [  # name, what is known, its type, its format
        ("distillation steps", origin.get("step"), int, "{:,}"),
        ("tokens", origin.get("tokens_seen"), int, "{:,}"),
        ("data", training.get("train") or None, object, "`{}`"),
        ("validation data", training.get("valid") or None, object, "`{}`"),
        ("distillation loss", origin.get("loss"), float, "{:.4f} on the step's batch"),
        ("validation loss", _at(data, "val_loss", step), str, "{}"),
        ("simulated acceptance (validation)", _at(data, "val_simulated_acceptance", step), str,
         "{}"),
        ("command", data.command.get("command_line"), object, "`{}`"),
        ("config hash", origin.get("config_hash"), object, "{}"),
        ("commit", origin.get("git_sha"), object, "{}"),
        ("versions", isinstance(versions, dict) and ", ".join(
            f"{name} {version}" for name, version in versions.items()), str, "{}"),
    ]
    for name, known, kind, form in facts:
        if known is not None and isinstance(known, kind):
            yield name, form.format(known)


def _at(data: RunData, curve: str, step: int | None) -> str | None:
    """Return a curve's last value up to a step."""
    seen = [point for point in data.curves.get(curve, []) if point[0] <= (step or 0)]
    return f"{seen[-1][1]:.4f} at step {seen[-1][0]:.0f}" if seen else None


def _places(measurements: tuple[Measurement, ...]) -> Iterator[dict[str, str]]:
    """Yield the measurements of each device, dtype and batch size, which share no table."""
    places: dict[tuple[str, str, int], list[Measurement]] = {}
    for each in _in_order(measurements):
        places.setdefault((each.device, each.dtype, each.batch_size), []).append(each)
    for (device, dtype, batch_size), here in places.items():
        place = f"{dtype} on {device}{in_batches(batch_size, ', ')}"
        yield {
            "measured": Table.of_rows(
                f"Speed and acceptance length, {place}", here, MEASURED, num_left=2
            ).to_markdown(),
            "conditions": _conditions(here),
            "by_depth": _by_depth(here, f"Acceptance by depth, {place}"),
        }


WHERE: list[Column[Measurement]] = [
    ("", lambda each: f"{each.benchmark}, T = {each.temperature:g}"),
    ("method", lambda each: _method(each)),
]
MEASURED: list[Column[Measurement]] = [
    *WHERE,
    ("τ", lambda each: figure(each.acceptance_length, each.acceptance_length_interval)),
    ("tokens/s", lambda each: figure(each.tokens_per_second)),
    ("speed-up", lambda each: figure(each.speedup, each.speedup_interval, unit="×")),
    ("a call's time", lambda each: _times(each)),
]


def _by_depth(measurements: Sequence[Measurement], title: str) -> str:
    drafting = [each for each in measurements if each.depth_accept_rates]
    depths = sorted({depth for each in drafting for depth in each.depth_accept_rates})
    if not depths:
        return ""
    columns = [
        (f"depth {depth}", lambda each, depth=depth: figure(each.depth_accept_rates.get(depth)))
        for depth in depths
    ]
    return Table.of_rows(title, drafting, [*WHERE, *columns], num_left=2).to_markdown()


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
        f"{sampling_text(m, ', ')}, "
        f"commit {m.git_sha}"
        for m in measurements
    )
    return "; ".join(said) + "." + _endings(measurements)


def _endings(measurements: Sequence[Measurement]) -> str:
    """Say how answers ended and how many were held up, as far as both were counted."""
    counts = [(m.num_ended or 0, m.num_cut or 0, m.num_stalled or 0) for m in measurements]
    ended, cut, stalled = (sum(each) for each in zip(*counts, strict=True))
    sentences = f" {ended} answers ended by themselves, {cut} were cut." if ended + cut else ""
    if stalled:
        sentences += (
            f" Marked: the machine held up answers to {stalled} prompts, so do not rely on speeds."
        )
    return sentences


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
