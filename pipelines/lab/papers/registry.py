"""List every table and figure of the papers: the command for ours and the differences.

A table that cannot be made has the reason instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stree.common.errors import NotFound
from stree_pipelines.console.command_line import input_path
from stree_pipelines.lab.papers import benches as paper_benches
from stree_pipelines.lab.papers import numbers as paper_numbers
from stree_pipelines.lab.papers import tables as paper_tables
from stree_pipelines.lab.papers.tables import Made

STEP, BATCH = "docs/results/h200-step", "docs/results/h200-batch"
H100 = "docs/results/h100-step"
CHATS, LENGTHS = "docs/results/h200-sharegpt/ba8f615", "docs/results/h200-long"
DRAFTING = f"{STEP}/drafting"
POLICIES = "docs/results/h200-policies"
PAPER_TREES = f"{POLICIES}/paper-trees"
KERNELS = ("python pipelines/lab/bench_kernels.py OUT/kernels.jsonl",)
EVALUATE = (
    "python pipelines/eval_spec.py --run RUN --config configs/eval/chat-75m.yaml --limit 15 "
    "--num_chain_drafts 2",
)
TREES = ("python pipelines/compare.py configs/compare/paper-trees.yaml --limit 10",)
TOKENIZERS = ("python pipelines/compare.py configs/compare/tokenizers.yaml",)
COMPARE = ("python pipelines/compare.py configs/compare/chat-75m.yaml",)
LONG = (
    "python pipelines/ask_conversations.py ../shared/data/chat/valid.jsonl.gz "
    "--out data/long.jsonl --lengths 1024 2048 4096 8192 16384 32768 "
    "--tokenizer runs/chat-75m/target/latest --limit 32 --turns 1",
    "python pipelines/eval_spec.py --config configs/eval/long-75m.yaml "
    "--target runs/chat-75m/target/latest --checkpoint runs/chat-75m-features/drafter/latest "
    "--out OUT",
)
LENGTHS_OF_DRAFTS = (
    'python pipelines/lab/bench_decode.py OUT/drafts.jsonl --what "[draft_lengths]" '
    '--drafters "[own,attention]" --trees "[beam-1-4-5,beam-8-4-32]"',
)
CHAT_PAIR = "ours is the 73 M hybrid of `make chat`, and the drafter that is named below"
CHAINS = "Our chain has 2 drafts, theirs 4"
TREES_PAIR = (
    f"{CHAT_PAIR} (the quickstart's pair has them, too, [on a CPU]"
    "(../results/cpu-policies/README.md#the-papers-trees))"
)
RANDOM = "ours has random weights of those shapes"
TWO_WAYS = "[two ways to backtrack](../trees-drafters-verifiers.md#two-ways-to-backtrack)"
RTX_3090, A10G, L40S = "RTX 3090", "A10G", "L40S"
A100, RTX_4090 = "A100 40GB", "RTX 4090"


def decode(what: str, *shapes: str, options: str = "") -> tuple[str, ...]:
    """Return the command that times these shapes."""
    command = f"python pipelines/lab/bench_decode.py OUT/{what}.jsonl --shape {','.join(shapes)}"
    return (f'{command} --what "[{what}]"{options and f" {options}"}',)


@dataclass(frozen=True)
class Entry:
    """A table or figure of a paper.

    Attributes:
        what: its subject. hardware: the paper's.
        note: the differences of ours; without a `build`, the reason.
        commands: write the rows of ours. rows: their default folder; "" when it needs none.
    """

    name: str
    what: str
    hardware: str
    note: str
    commands: tuple[str, ...] = ()
    rows: str = ""
    build: Callable[[Path], Made] | None = None

    def made(self, folder: str | None = None) -> Made:
        """Make the table. Raises NotFound when it cannot be made, or its rows are not there."""
        if self.build is None:
            raise NotFound(f"{self.name} cannot be made: {self.note}")
        path = Path(input_path(folder or self.rows))
        return paper_tables.with_notes(self.build(path), path)


PAPERS: dict[str, Sequence[Entry]] = {
    "STree (Wu et al. 2025)": (
        Entry("stree-figure-1", "unrolled and packed trees", "", "an illustration, as in "
              "[concepts](../concepts.md)"),
        Entry("stree-table-1", "a forward pass by model size", "not named", RANDOM + ": of "
              "Mamba2-2.7B beside its 2.3B, of a hybrid of 8B, and of larger ones where they were "
              "timed. The paper's larger ones have random weights, too; it does not say their "
              "layers, ours have 64 of 4,096 (7B), 80 of 5,120 (13B) and 64 of 7,680 (23B). A "
              "graph's replay, without drafting",
              decode("calls", "8b", "mamba2-2.7b", "mamba2-7b", "mamba2-13b", "mamba2-23b"), STEP,
              paper_benches.stree_1),
        Entry("stree-figure-2", "a call against its nodes, and the τ that it needs", "not named",
              RANDOM + "; the figure's values are not in the text, which reads 1.5× for "
              "Mamba2-2.7B and 1.1× for MambaInLlama-8B at 15 nodes. Needed is our own tree scan's "
              "time over its time of 5 nodes, where the paper has the multi-step update for the "
              "chain",
              decode("calls", "8b", "mamba2-2.7b"), STEP,
              paper_benches.stree_figure_2),
        Entry("stree-table-2", "grown trees, packed and unrolled, end to end", RTX_3090,
              "ours is a target call instead of tokens/s, since the weights of Mamba2-2.7B and "
              "130M are not there and the engine cannot decode an unrolled tree; " + RANDOM +
              ". Of all trees with M tokens a level ours have the most leaves, and unrolled as "
              "many sequences, all of N + 1 tokens: the paper's depend on the text. Memory is "
              "weights and caches (fp32 states), where the paper measures all that is in use",
              decode("beams", "mamba2-2.7b"), STEP, paper_benches.stree_2),
        Entry("stree-figure-3", "full binary trees, packed and unrolled", RTX_3090,
              RANDOM + ", a hybrid of 8B, where the paper has Mamba2-2.7B. Unrolled is by the "
              "multi-step update. Sixteen paths of five tokens are 80, the paper says 90",
              decode("unrolled", "8b"), STEP, paper_benches.stree_figure_3),
        Entry("stree-table-3", "speed and τ on three benchmarks", RTX_3090,
              CHAT_PAIR + f". {CHAINS}. The paper generates 1,024 tokens",
              EVALUATE, CHATS, paper_tables.speeds(
                  paper_numbers.STREE_3, "STree, Table 3: speed in tokens/s, and τ")),
        Entry("stree-figure-4", "speed and τ against temperature", RTX_3090,
              CHAT_PAIR + "; the figure's values are not in the text. The paper's `naive` judges "
              "the drafter's top k, accepted with the sum of their p: so do rows of `top:FOLDER`, "
              "in columns of their own where there are any; the others' drafts are drawn, and of a "
              "chain Σ p·q is accepted", COMPARE, POLICIES,
              paper_tables.stree_figure_4),
        Entry("stree-table-4", "five static trees", RTX_3090,
              TREES_PAIR + "; B to E have the paper's widths, depths and numbers of tokens, but "
              "the figure of their shapes is not in the text: configs/trees has ours", TREES,
              PAPER_TREES, paper_tables.stree_4),
        Entry("stree-table-5", "shares of attention layers in the target", RTX_3090, RANDOM +
              ", attention in every second layer, every fourth and none, drafter included: the "
              "graphs of a sampled step, without what the host adds. They accept nothing, so τ is "
              "the paper's, and speed is what a step would make of it; speed-up/τ, a plain step "
              "over a drafted one, does not depend on it",
              decode("graphs", "8b", "8b-25", "8b-0", options='--verifiers "[multi_step]"'), H100,
              paper_benches.stree_5),
        Entry("stree-table-6", "speed and τ against distillation steps", RTX_3090,
              CHAT_PAIR + "; ours is MT-Bench at T = 1, the paper names neither. "
              f"{CHAINS}. `report.py RUN` writes this table for every run", EVALUATE, CHATS,
              paper_tables.stree_6),
        Entry("stree-table-7", "speed and τ on a faster GPU", "H100",
              CHAT_PAIR + f", on an H200. {CHAINS}. The paper generates 1,024 tokens",
              EVALUATE, CHATS, paper_tables.speeds(
                  paper_numbers.STREE_7, "STree, Table 7: speed in tokens/s, and τ")),
        Entry("stree-table-8", "static and grown trees", RTX_3090,
              TREES_PAIR + f". {paper_tables.ALL_BEAMS} has M = 3 and N = 4 and verifies all that "
              "was drawn, 9 tokens a level after the first; the paper keeps all, too, and says "
              "that a level has M. The bracket of its static tree is 1.75x here and 1.74× in "
              "Table 3", TREES, PAPER_TREES, paper_tables.stree_8),
        Entry("stree-figure-5", "the shapes of Table 4", "", "the text does not have it"),
    ),
    "Snakes and Ladders (Wu et al. 2024)": (
        Entry("snakes-figures-1-3", "how backtracking works", "", "illustrations; "
              f"{TWO_WAYS} has both in words"),
        Entry("snakes-table-1", "kernels that update the state", "not named",
              "ours is a layer of 32 heads of 128 × 128 on an H200; SSU is mamba-ssm's; chunk scan "
              "was timed within calls only (stree-figure-3's rows). Batch sizes above 1 are not "
              "measured", KERNELS, STEP,
              paper_benches.snakes_1),
        Entry("snakes-table-2", "what the parts of its implementation save", A10G,
              "it takes away parts of an implementation that ours does not have: states are copied "
              "nowhere, and no step runs chunk scan"),
        Entry("snakes-table-3", "replay and joint attainment by number of drafts", A10G,
              RANDOM + ", the shape in brackets. Several drafts are one tree below one root, not "
              "rows of a batch, each with a state of its own. A step's target graph (acceptance "
              "included), without drafting",
              decode("joint", "mamba2-2.7b", options='--rows "[1]" --joint_trees "[' + ",".join(
                  f"png-{length}-{count}" for count in (1, 2, 3, 4) for length in (1, 2, 4, 6, 8)
              ) + ']"'),
              BATCH, paper_benches.snakes_3),
        Entry("snakes-table-4", "the same by model size, and memory", L40S,
              RANDOM + "; the paper does not say the layers of 7B and 13B, ours have 64 of 4,096 "
              "and 80 of 5,120. Memory is weights and cache (fp32 states), where the paper "
              f"measures all that is in use; {TWO_WAYS} has the bytes that either keeps",
              decode("joint", *paper_benches.SNAKES_4_SHAPES,
                     options='--rows "[1]" --joint_trees "[png-6-1]"'),
              BATCH, paper_benches.snakes_4),
        Entry("snakes-table-5", "n-grams on three benchmarks", A10G,
              "ours is the 73 M hybrid of `make chat`, at T = 0, n-grams of prompt "
              "and answer without a corpus", COMPARE, POLICIES, paper_tables.snakes_5),
        Entry("snakes-figure-4", "throughput against batch size", A10G,
              RANDOM + ", at given τ, with a drafter, plain, with the tree of 13, and with the "
              "tree that measured costs choose; the figure's values are not in the text. Of "
              "real text in a queue `bench_queue.py` prints a table of its own",
              decode("serve", "8b", options='--taus "[2.5,1.5]" --num_steps 40'), BATCH,
              paper_benches.snakes_figure_4),
    ),
    "Mamba Drafters (Choi et al. 2025)": (
        Entry("drafters-figure-1", "drafting time and memory by context", "H100",
              RANDOM + ": two layers of width 1,024 over 128,256 tokens, Mamba-2 or a Transformer "
              "in Llama's layout, drafting four levels of one node or of eight. Memory is one "
              "sequence's cache, where the paper has the peak; prefill and EAGLE are left out. The "
              "figure's values are not in the text",
              LENGTHS_OF_DRAFTS, DRAFTING, paper_benches.drafters_figure_1),
        Entry("drafters-tables-1-2", "Mamba drafters, Transformers and EAGLE-2", RTX_4090,
              "they need Pythia-6.9B and Mistral-7B and their drafters"),
        Entry("drafters-figure-2", "throughput and calibration by drafter size", RTX_4090,
              "it needs Pythia-6.9B and drafters of several sizes; calibration is not measured"),
        Entry("drafters-table-3", "LongBench from 1k to 8k tokens", "H100",
              CHAT_PAIR + ", both trained at 1,024 tokens. Ours are questions after other "
              "conversations, not LongBench's documents, and of a target that was not made for "
              "them: [long contexts](../long-context.md) tells its part from the drafter's. T = 0; "
              "the paper names none. Peak memory is left out",
              LONG, LENGTHS, paper_tables.drafters_3),
        Entry("drafters-table-4", "a drafter of another tokenizer", RTX_4090,
              "ours is the quickstart's 7 M hybrid and its prompts on a CPU, with drafters of one "
              "layer that were trained alike, with the target's tokenizer of 4,096 ids and with "
              "one of 2,048: [the page](../results/cpu-tokenizers/README.md) has T = 1, too. "
              "'Text' is the first one whose drafts are handed over as text all the same",
              TOKENIZERS,
              "docs/results/cpu-tokenizers", paper_tables.drafters_4),
        Entry("drafters-table-5", "a chain of 5 and the tree (3, 2, 2, 1, 1)", RTX_4090,
              TREES_PAIR + "; latency is taken for what drafting a tree takes in ms", TREES,
              PAPER_TREES, paper_tables.drafters_5),
        Entry("drafters-table-6", "three trees, a Transformer and a Mamba drafter", RTX_4090,
              TREES_PAIR + "; ours on MT-Bench, which the paper does not name here. A "
              "Transformer drafter is [beside a Mamba-2 one](../results/cpu-rival/README.md) with "
              "another tree", TREES, PAPER_TREES, paper_tables.drafters_6),
        Entry("drafters-table-7", "a search over trees", RTX_4090,
              TREES_PAIR + "; the reward of our bandit (`stree.BanditTrees`) has measured times "
              "where the paper's has a constant, and it goes on from prompt to prompt. The "
              "fixed tree is (3, 3, 2, 1), whose throughput in the paper's Table 6 is "
              "that of its Table 7. "
              "Alpaca is left out: we have no prompts of it", TREES, PAPER_TREES,
              paper_tables.drafters_7),
    ),
    "DySpec (Xiong et al. 2024)": (
        Entry("dyspec-figures-1-3", "tree shapes; acceptance and draft probability", "",
              "illustrations, and JF68M with Llama2-7B on CNN DailyMail"),
        Entry("dyspec-figure-4", "where a step's time goes", A100,
              "the paper's values are a plot; ours is in the columns draft to host of every "
              "comparison's table"),
        Entry("dyspec-table-1", "dynamic and fixed trees of 64 nodes, Llama2-7B", A100,
              CHAT_PAIR + "; trees that grow of 16 and 32 nodes, the paper's being dyspec-W-D-N "
              "with multi_step, and SpecInfer's expansion of 15. C4 and OWT are left out: we have "
              "no prompts of them. CNN's, of which `fetch_benchmarks.py spec_bench` has some, were "
              "not asked. Sequoia's tree is `suggest_tree.py`'s, no arm here",
              COMPARE,
              POLICIES, paper_tables.dyspec(
                  paper_numbers.DYSPEC_1, "DySpec, Table 1: speed-up (accepted a step)")),
        Entry("dyspec-table-2", "the same, Llama2-13B", A100, "as dyspec-table-1", COMPARE,
              POLICIES, paper_tables.dyspec(
                  paper_numbers.DYSPEC_2, "DySpec, Table 2: speed-up (accepted a step)")),
        Entry("dyspec-tables-3-4", "Llama2-70B with weights on the CPU", A100,
              "it needs Llama2-70B"),
        Entry("dyspec-figure-5", "tree sizes step by step", A100, "it needs Llama2-70B"),
        Entry("dyspec-table-5", "tree attention by node order, with figures 6 to 9", "not named",
              "ours counts blocks as the mean of 10 random trees, and times attention of one with "
              "1,024 tokens committed, in the 8B's shape: programs leave out blocks of their own "
              "size (16 nodes by 16 keys there) that none of their queries sees, or read every one "
              "below the diagonal. The paper does not say how its trees are random; ours hang each "
              "node below any before it", decode("orders", "8b"), STEP,
              paper_benches.dyspec_5),
    ),
}

ENTRIES = {entry.name: entry for entries in PAPERS.values() for entry in entries}
INDEX = """# The papers' tables

For readers of the papers that this project follows: each of their tables and figures with our
numbers beside theirs, the command that makes ours and what differs, or why there is none. One page
a paper:

{papers}

`python pipelines/lab/paper_tables.py NAME` prints a table from the committed rows, `--rows FOLDER`
from yours. These pages are written by
`python pipelines/lab/paper_tables.py --pages docs/paper-tables`.

The papers' numbers are copied from their tables. Theirs and ours are of other models on other GPUs:
ratios can be compared, tokens/s cannot.

| name | shows | ours |
|:--|:--|:--|
{entries}
"""


def page_of(paper: str) -> str:
    """Return the file name of a paper's page."""
    return paper.split(" (")[0].lower().replace(" ", "-") + ".md"


def pages() -> dict[str, str]:
    """Return the pages by file name: an index and one for each paper."""
    papers = "\n".join(f"- [{paper}]({page_of(paper)})" for paper in PAPERS)
    rows = [
        (f"[`{entry.name}`]({page_of(paper)})", entry.what, "made" if entry.build else "not made")
        for paper, entries in PAPERS.items()
        for entry in entries
    ]
    entries = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    index = INDEX.format(papers=papers, entries=entries)
    return {"README.md": index, **{page_of(paper): page(paper) for paper in PAPERS}}


def page(paper: str) -> str:
    """Return a paper's page: its entries, and the tables whose rows are there."""
    parts = [f"# {paper}\n", "The [index](README.md) says how these tables are made.\n"]
    for entry in PAPERS[paper]:
        hardware = f" Theirs: {entry.hardware}." if entry.hardware else ""
        parts.append(f"## `{entry.name}`: {entry.what}\n")
        if entry.build is None:
            parts.append(f"Not made: {entry.note}.{hardware}\n")
            continue
        parts += [f"    {command}" for command in entry.commands]
        parts.append(f"\nWhat differs: {entry.note}.{hardware} Our rows: `{entry.rows}`.\n")
        try:
            parts.append(entry.made().to_markdown())
        except NotFound:
            parts.append("No rows of it are committed yet.\n")
    return "\n".join(parts)


def listing() -> str:
    """Format a line per entry."""
    width = max(map(len, ENTRIES))
    return "\n".join(
        f"{name:<{width}}  {entry.what}: "
        + ("; ".join(entry.commands) if entry.build else f"not made ({entry.note})")
        for name, entry in ENTRIES.items()
    )
