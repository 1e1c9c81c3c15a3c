"""Numbers of the papers' tables, letter for letter, as far as ours are set beside them.

A table is its head and its rows. The papers: STree (Wu et al. 2025), Snakes and Ladders (Wu et al.
2024), Mamba Drafters (Choi et al. 2025) and DySpec (Xiong et al. 2024).
"""

from __future__ import annotations

Cells = tuple[str, ...]

STREE_1: tuple[Cells, ...] = (
    ("", "2.3B", "7B", "13B", "23B"),
    ("Autoregressive", "10.95", "22.94", "40.69", "72.41"),
    ("STree", "22.36 (2.04x)", "33.79 (1.47x)", "55.90 (1.37x)", "91.08 (1.26x)"),
    ("Vanilla SD", "15.05 (1.37x)", "26.46 (1.15x)", "45.95 (1.13x)", "76.74 (1.06x)"),
)

# By temperature: speed and τ on MT-Bench, HumanEval and GSM-8K
STREE_3: dict[float, tuple[Cells, ...]] = {
    0.0: (
        ("Autoregressive", "39.98", "1", "39.98", "1", "40.47", "1"),
        ("Vanilla SD", "67.68 (1.69×)", "2.04", "77.18 (1.93×)", "2.32", "78.38 (1.93×)", "2.34"),
        ("STree", "69.84 (1.74×)", "2.47", "78.35 (1.95×)", "2.79", "80.03 (1.98×)", "2.83"),
    ),
    1.0: (
        ("Autoregressive", "39.72", "1", "40.04", "1", "40.16", "1"),
        ("Vanilla SD", "49.24 (1.23×)", "1.55", "52.88 (1.32×)", "1.65", "51.80 (1.28×)", "1.61"),
        ("STree", "54.08 (1.36×)", "2.03", "60.34 (1.50×)", "2.26", "58.25 (1.45×)", "2.16"),
    ),
}
STREE_7: dict[float, tuple[Cells, ...]] = {
    0.0: (
        ("Autoregressive", "78.09", "1", "78.44", "1", "79.33", "1"),
        ("Vanilla SD", "113.60 (1.45×)", "2.03", "129.76 (1.65×)", "2.33", "131.62 (1.66×)",
         "2.33"),
        ("STree", "113.13 (1.45×)", "2.45", "127.15 (1.62×)", "2.77", "131.13 (1.65×)", "2.81"),
    ),
    1.0: (
        ("Autoregressive", "76.66", "1", "77.67", "1", "78.35", "1"),
        ("Vanilla SD", "80.76 (1.05×)", "1.56", "85.63 (1.10×)", "1.64", "87.04 (1.11×)", "1.63"),
        ("STree", "85.18 (1.11×)", "2.04", "92.74 (1.19×)", "2.22", "92.86 (1.19×)", "2.16"),
    ),
}  # fmt: skip

# MT-Bench, as its column A is Table 3's STree at T = 1
STREE_4: tuple[Cells, ...] = (
    ("Static tree configuration", "A", "B", "C", "D", "E"),
    ("Max tree width", "3", "16", "6", "4", "3"),
    ("Tree depth", "4", "3", "3", "4", "5"),
    ("Number of tokens", "13", "29", "16", "13", "16"),
    ("Speed", "54.08", "46.90", "51.19", "54.39", "56.79"),
    ("τ", "2.03", "2.15", "2.01", "2.07", "2.09"),
)

STREE_6: tuple[Cells, ...] = (
    ("", "12000 step", "48000 step", "264000 step"),
    ("Speed (Vanilla SD)", "44.52 (1.21x)", "53.11 (1.24x)", "56.49 (1.42x)"),
    ("τ (Vanilla SD)", "1.34", "1.56", "1.68"),
    ("Speed (STree)", "42.96 (1.19x)", "58.65 (1.36x)", "64.30 (1.62x)"),
    ("τ (STree)", "1.51", "2.02", "2.23"),
)

STREE_8: tuple[Cells, ...] = (
    ("", "Autoregressive", "Vanilla SD", "STree w. static tree", "STree w. beam search tree"),
    ("Speed", "39.98", "67.68 (1.69x)", "69.84 (1.75x)", "71.60 (1.79x)"),
    ("τ", "1", "2.04", "2.47", "2.60"),
)

# Figure 3, left: tree depth, packed or unrolled, states, tokens computed. Its right is a plot; the
# text has the times of the smallest and the largest tree, in ms.
STREE_FIGURE_3: tuple[Cells, ...] = (
    ("4", "Packed", "1", "15"),
    ("4", "Unrolled", "8", "32"),
    ("5", "Packed", "1", "31"),
    ("5", "Unrolled", "16", "90"),
    ("6", "Packed", "1", "63"),
    ("6", "Unrolled", "32", "192"),
)
STREE_FIGURE_3_MS = {("4", "Packed"): "27.6", ("6", "Packed"): "34.0",
                     ("4", "Unrolled"): "27.3", ("6", "Unrolled"): "59.8"}  # fmt: skip

# Batch size 1, ms: selective-scan update in a loop, chunk scan, the fused multi-step update
SNAKES_1: tuple[Cells, ...] = (
    ("1", "0.0074", "0.064", "0.0074"),
    ("5", "0.027", "0.066", "0.016"),
    ("10", "0.052", "0.067", "0.027"),
)

# One draft sequence: speculations, ms by activation replay and by joint attainment
SNAKES_3: tuple[Cells, ...] = (
    ("1", "19.93", "16.72"),
    ("2", "20.50", "17.14"),
    ("4", "21.57", "17.99"),
    ("6", "22.36", "18.82"),
    ("8", "22.89", "19.86"),
    ("0 (Mamba2)", "14.10", "14.10"),
)

SNAKES_5: tuple[Cells, ...] = (
    ("Inference strategy", "MT-Bench", "GSM-8K", "HumanEval"),
    ("Baseline", "70.36", "70.37", "70.26"),
    ("Joint + PNG(6,2)", "112.67 (1.60×)", "137.49 (1.95×)", "133.64 (1.90×)"),
    ("ARP + PNG(6,2)", "103.80 (1.47×)", "122.73 (1.74×)", "120.66 (1.72×)"),
)

# LongBench, by prompt length: tokens/s (accept length)
DRAFTERS_3: tuple[Cells, ...] = (
    ("Method", "1k", "2k", "4k", "8k"),
    ("Single-document, no drafter", "31.02", "27.89", "24.35", "19.30"),
    ("Single-document, Mistral", "25.30 (2.43)", "23.28 (2.37)", "19.48 (2.24)", "15.23 (2.21)"),
    ("Single-document, EAGLE-2", "53.13 (2.73)", "47.00 (2.81)", "37.27 (2.76)", "26.12 (2.71)"),
    ("Single-document, Mamba", "55.09 (2.91)", "45.65 (2.77)", "36.32 (2.77)", "24.92 (2.80)"),
    ("Multi-document, no drafter", "28.17", "24.22", "19.01", "14.83"),
    ("Multi-document, Mistral", "24.64 (2.53)", "21.06 (2.48)", "16.49 (2.44)", "12.18 (2.39)"),
    ("Multi-document, EAGLE-2", "42.48 (2.60)", "35.38 (2.61)", "25.10 (2.68)", "17.36 (2.64)"),
    ("Multi-document, Mamba", "47.91 (2.94)", "36.40 (2.86)", "26.27 (2.88)", "17.77 (2.87)"),
)
# MT-Bench at T = 0, chains of five
DRAFTERS_4: tuple[Cells, ...] = (
    ("Method", "Setup", "Accept length", "Throughput"),
    ("EAGLE-2", "Pythia → Pythia", "2.59", "94.75"),
    ("Mamba", "Pythia → Pythia", "3.08", "112.69"),
    ("Mamba", "Mistral → Pythia", "2.45", "93.20"),
)
DRAFTERS_5: tuple[Cells, ...] = (
    ("Tree?", "Accept length", "Latency", "Throughput"),
    ("×", "3.08", "6.62", "112.69"),
    ("✓", "3.91", "8.30", "127.37"),
)
DRAFTERS_6: tuple[Cells, ...] = (
    ("Method", "(3,3,2,1)", "(3,2,2,1,1)", "(2,2,2,1,1,1)"),
    ("Pythia", "75.38", "70.71", "63.75"),
    ("Ours", "124.99", "127.37", "124.37"),
)
DRAFTERS_7: tuple[Cells, ...] = (
    ("Search?", "MT-bench", "HumanEval"),
    ("×", "124.99", "149.15"),
    ("✓", "128.21", "172.38"),
)

# Of the data sets that we have, too; speed-up and accepted tokens a step
DYSPEC_HEAD: Cells = ("Dataset", "Temp", "Ours", "Sequoia", "Specinfer")
DYSPEC_1: tuple[Cells, ...] = (
    ("GSM8k", "0", "3.93× (6.86)", "2.79× (4.92)", "2.01× (3.47)"),
    ("GSM8k", "0.6", "2.44× (4.31)", "2.20× (3.55)", "1.65× (3.03)"),
    ("MT-Bench", "0", "2.59× (4.02)", "2.35× (3.55)", "1.68× (2.70)"),
    ("MT-Bench", "0.6", "2.15× (3.62)", "2.11× (3.18)", "1.50× (2.71)"),
)
DYSPEC_2: tuple[Cells, ...] = (
    ("GSM8k", "0", "3.17× (5.29)", "2.21× (3.92)", "1.74× (2.98)"),
    ("GSM8k", "0.6", "2.49× (4.17)", "2.10× (3.39)", "1.51× (2.72)"),
    ("MT-Bench", "0", "2.19× (3.72)", "2.19× (3.46)", "2.15× (2.86)"),
    ("MT-Bench", "0.6", "2.25× (3.62)", "1.93× (3.11)", "1.40× (2.84)"),
)
DYSPEC_5: tuple[Cells, ...] = (
    ("Tree size", "Not reordered", "Reordered"),
    ("256", "36", "22.5"),
    ("512", "135.5", "52.8"),
    ("1024", "490.2", "119.3"),
    ("2048", "1654.5", "278.7"),
)
