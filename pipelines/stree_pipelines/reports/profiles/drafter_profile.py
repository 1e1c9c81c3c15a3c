"""Make the content of speculation_profile.json for one drafter, from the rows of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from stree.common.words import is_cpu_name
from stree.drafters.names import DrafterName
from stree.speculation_profile import (
    FOLDER,
    Measurement,
    Recommendation,
    SpeculationProfile,
    StepTimesRecord,
    SuggestedTree,
)
from stree_pipelines.evaluation.arms import without_trials
from stree_pipelines.evaluation.plan import METHODS, form_sha256
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports.profiles.tree_suggestion import suggest, tells_ranks
from stree_pipelines.reports.run_data import RunData, arrange, read_training
from stree_pipelines.reports.settings import chosen, dtype_of
from stree_pipelines.reports.tables.tables import advise

# Device, dtype and batch size: a profile has figures for each measured combination.
Place = tuple[str, str, int]


def place_of(row: ResultRow) -> Place:
    return row.environment.device, dtype_of(row), row.batch_size


def _rows_of(store: ResultStore, shown: Sequence[str]) -> list[ResultRow]:
    """Read the rows of the chosen decoding setting, without a comparison's trial chains."""
    return without_trials(chosen(store.results(), shown, store.directory))


def run_at_last_place(store: ResultStore, folder: Path, shown: Sequence[str] = ()) -> RunData:
    """Read the run `folder`, with the rows measured at the place of its last row.

    Raises UsageError when those have several decoding settings.
    """
    rows = _rows_of(store, shown)
    data = read_training(folder, [row for row in rows if place_of(row) == place_of(rows[-1])])
    arrange(data, store)
    return data


def profile_of(
    store: ResultStore, folder: Path, sha256: str, shown: Sequence[str] = (),
    earlier: SpeculationProfile | None = None,
) -> SpeculationProfile | None:
    """Make the profile of the drafter with this checkpoint hash; None when no row is about it.

    Args:
        store: the evaluation of the run `folder`.
        shown: NAME=VALUE pairs that choose the decoding setting.
        earlier: the drafter's profile so far, whose recommendation stays where these rows advise
            no method, as on a machine that had other work.

    Raises UsageError when the rows of a place have several decoding settings.
    """
    rows = _rows_of(store, shown)
    own = [row for row in rows if row.checkpoint_sha256 == sha256]
    rows = [_as_of_folder(row, sha256) for row in rows]
    mine = [row for row in rows if row.checkpoint_sha256 == sha256]
    if not mine:
        return None
    targets = {row.target_sha256 for row in mine}
    every = [row for row in rows if row.target_sha256 in targets]
    rows = [
        row for row in rows
        if row.checkpoint_sha256 in (None, sha256) and row.target_sha256 in targets
    ]
    so_far: Sequence[Recommendation] = ()
    if earlier is not None and earlier.checkpoint_sha256 == sha256:
        so_far = earlier.recommendations if earlier.target_sha256 in targets else ()
    places: list[RunData] = []
    for place in dict.fromkeys(map(place_of, rows)):
        places.append(RunData(folder, [row for row in rows if place_of(row) == place]))
        arrange(places[-1], store)
    last = [row for row in own if place_of(row) == place_of(mine[-1])]
    return SpeculationProfile(
        step=mine[-1].step,
        checkpoint_sha256=sha256,
        target=mine[-1].target,
        target_sha256=mine[-1].target_sha256,
        measurements=tuple(
            _measurement(_with_paired_speed(row, mine)) for data in places for row in data.rows
        ),
        recommendations=tuple(
            each for data in places for each in _recommendations(data, every, so_far)
        ),
        suggested_trees=tuple(_suggestions(store, last)),
    )


def _as_of_folder(row: ResultRow, sha256: str) -> ResultRow:
    """Convert a comparison's row of this folder in another form, such as `float8:FOLDER`, to a row
    of it.

    Arms differ by name. Other rows stay, and forms with a corpus, too: a profile names no file
    elsewhere.
    """
    name = DrafterName.parse(row.checkpoint or "")
    is_form = name.folder and name.corpus is None and not name.is_plain
    if row.method in METHODS or not is_form or row.checkpoint_sha256 != form_sha256(name, sha256):
        return row
    return row.model_copy(update={"checkpoint_sha256": sha256})


def _form(row: ResultRow) -> str | None:
    return None if row.checkpoint is None else DrafterName.parse(row.checkpoint).shown(FOLDER)


def _with_paired_speed(row: ResultRow, mine: Sequence[ResultRow]) -> ResultRow:
    """Give a row of plain decoding the speed that it had in this drafter's own pairs.

    Their speedups are relative to it.
    """
    if row.checkpoint_sha256 is not None:
        return row
    where = (row.benchmark, row.prompts_hash, row.temperature, *place_of(row))
    for other in mine:
        beside = (other.benchmark, other.prompts_hash, other.temperature, *place_of(other))
        if where == beside and other.tokens_per_second and other.speedup:
            return row.model_copy(update={
                "tokens_per_second": other.tokens_per_second / other.speedup,
                "time_ms": other.baseline_time_ms or row.time_ms,
            })
    return row


def _measurement(row: ResultRow) -> Measurement:
    device, dtype, _ = place_of(row)
    fields = Measurement.model_fields.keys() - {"verifier", "drafter"}
    same = {name: getattr(row, name) for name in fields if hasattr(row, name)}
    return Measurement(
        **same, verifier=row.verifier, drafter=_form(row),
        draft_length=row.tree.to_token_tree().max_depth if row.tree else 0, device=device,
        dtype=dtype, acceptance_length_interval=row.confidence_intervals.get("acceptance_length"),
        speedup_interval=row.confidence_intervals.get("speedup"),
        lossless_share=row.lossless.share if row.lossless else None,
        git_sha=row.environment.git_sha,
    )


def withheld(data: RunData) -> list[str]:
    """Return why no method is advised, for each temperature of a run at which none is."""
    advice = {temperature: advise(data, temperature) for temperature in data.temperatures}
    return [f"T = {at:g}: {each.reason}" for at, each in advice.items() if not each.headline]


def _recommendations(
    data: RunData, every: Sequence[ResultRow], so_far: Sequence[Recommendation]
) -> Iterator[Recommendation]:
    """Yield the report's recommendation for each temperature.

    Where speeds cannot be compared it is the one so far, if there is one.

    Args:
        data: the rows of one place, of this drafter and of plain decoding.
        every: the rows of all drafters.
        so_far: recommendations of the profile so far.
    """
    place = device, dtype, batch_size = place_of(data.rows[0])
    rows = [row for row in every if place_of(row) == place]
    for temperature in data.temperatures:
        advice = advise(data, temperature, rows)
        cell = data.cell(data.last, advice.fastest, data.scopes[0], temperature)
        if cell is None:
            yield from (
                each for each in so_far
                if (each.device, each.dtype, each.batch_size, each.temperature)
                == (*place, temperature)
            )
            continue
        won = data.row_of(advice.method)
        form = None if won is None else _form(won)
        drafts = "" if form in (None, FOLDER) else f" It drafts with {form}."
        yield Recommendation(
            device=device, device_type="cpu" if is_cpu_name(device) else "cuda", dtype=dtype,
            batch_size=batch_size, temperature=temperature, benchmarks=tuple(data.benchmarks),
            num_prompts=cell.num_prompts, method=advice.method.partition(":")[0],
            tree=None if won is None else won.tree,
            verifier=None if won is None else won.verifier,
            backtracking=None if won is None else won.backtracking, drafter=form,
            costs=None if won is None else _costs(data, won, temperature),
            acceptance_length=cell["acceptance_length"], speedup=cell["speedup"],
            speedup_interval=cell.interval("speedup"),
            reason=f"{advice.headline}. {advice.reason}{drafts}",
        )


def _costs(data: RunData, won: ResultRow, temperature: float) -> StepTimesRecord | None:
    """Return the step times of a method at this temperature, of any benchmark.

    Rows that a resumed run completed lack them.
    """
    alike = (won.method, won.tree, temperature)
    rows = (row for row in data.rows if (row.method, row.tree, row.temperature) == alike)
    return next((row.costs for row in rows if row.costs is not None), None)


def _suggestions(store: ResultStore, rows: Sequence[ResultRow]) -> Iterator[SuggestedTree]:
    """Suggest trees from the place that was measured last, a tree per temperature.

    When a comparison's arms sample with several verifiers, the first one's rows count. Temperatures
    whose rows do not record the ends of paths have none.
    """
    with_ends = [row for row in rows if tells_ranks(row)]
    for temperature in sorted({row.temperature for row in with_ends}):
        here = [row for row in with_ends if row.temperature == temperature]
        alike = [row for row in here if temperature == 0 or row.verifier == here[0].verifier]
        yield suggest(alike, temperature, None, store.samples)
