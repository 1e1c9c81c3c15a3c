"""Hold the numbers of the papers' tables, letter for letter, where we have ours to compare.

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

# By N: of M = 2 to 5 beams STree and FSS, tokens/s and then GB
STREE_2: tuple[Cells, ...] = (
    ("Speed", "4", "102.69 (1.05×)", "97.44", "101.68 (1.12×)", "90.64", "94.61 (1.10×)", "85.33",
     "91.80 (1.16×)", "78.94"),
    ("Speed", "8", "107.28 (1.09×)", "97.53", "104.99 (1.21×)", "86.68", "100.67 (1.31×)", "76.72",
     "98.75 (1.44×)", "68.44"),
    ("Speed", "16", "105.62 (1.25×)", "84.26", "101.97 (1.49×)", "68.14", "94.47", "OOM", "88.41",
     "OOM"),
    ("Memory", "4", "7.67 (0.91×)", "8.47", "7.68 (0.85×)", "8.97", "7.73 (0.83×)", "9.36",
     "7.75 (0.78×)", "9.85"),
    ("Memory", "8", "7.79 (0.86×)", "9.05", "7.85 (0.80×)", "9.76", "7.88 (0.72×)", "10.89",
     "7.91 (0.64×)", "12.32"),
    ("Memory", "16", "8.02 (0.75×)", "10.69", "8.12 (0.57×)", "14.02", "8.17", "OOM", "8.28",
     "OOM"),
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
}

# MT-Bench, as its column A is Table 3's STree at T = 1
STREE_4: tuple[Cells, ...] = (
    ("Static tree configuration", "A", "B", "C", "D", "E"),
    ("Max tree width", "3", "16", "6", "4", "3"),
    ("Tree depth", "4", "3", "3", "4", "5"),
    ("Number of tokens", "13", "29", "16", "13", "16"),
    ("Speed", "54.08", "46.90", "51.19", "54.39", "56.79"),
    ("τ", "2.03", "2.15", "2.01", "2.07", "2.09"),
)

# At T = 1, by the share of attention layers (50, 25 and 0 %): speed, τ, speed-up over τ
STREE_5: tuple[Cells, ...] = (
    ("Autoregressive", "39.71", "1", "-", "41.65", "1", "-", "43.79", "1", "-"),
    ("Vanilla SD", "46.56 (1.17×)", "1.47", "0.80", "47.69 (1.14×)", "1.45", "0.78",
     "53.72 (1.22×)", "1.57", "0.77"),
    ("STree", "49.04 (1.23×)", "1.84", "0.66", "48.08 (1.15×)", "1.77", "0.64", "55.32 (1.26×)",
     "2.00", "0.63"),
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
                     ("4", "Unrolled"): "27.3", ("6", "Unrolled"): "59.8"}

# Batch size 1, ms: selective-scan update in a loop, chunk scan, the fused multi-step update
SNAKES_1: tuple[Cells, ...] = (
    ("1", "0.0074", "0.064", "0.0074"),
    ("5", "0.027", "0.066", "0.016"),
    ("10", "0.052", "0.067", "0.027"),
)

# By number of speculations: ms with activation replay and with joint attainment, of 1 to 4 drafts
SNAKES_3: tuple[Cells, ...] = (
    ("1", "19.93", "16.72", "20.72", "17.33", "21.28", "17.94", "21.82", "19.85"),
    ("2", "20.50", "17.14", "21.51", "18.79", "22.04", "19.21", "22.74", "20.14"),
    ("4", "21.57", "17.99", "22.63", "19.72", "25.03", "21.85", "24.97", "22.20"),
    ("6", "22.36", "18.82", "23.57", "20.74", "25.09", "22.57", "26.23", "24.49"),
    ("8", "22.89", "19.86", "24.77", "21.55", "26.06", "24.68", "30.19", "25.52"),
    ("0 (Mamba2)", *["14.10"] * 8),
)

# By size (1.3B, 2.7B, 7B, 13B) replay and joint: ms, then GB
SNAKES_4: tuple[Cells, ...] = (
    ("Speed", "6", "10.23 (1.98×)", "6.84 (1.32×)", "15.39 (1.58×)", "11.82 (1.21×)",
     "26.66 (1.31×)", "24.04 (1.18×)", "44.07 (1.22×)", "41.99 (1.16x)"),
    ("Speed", "0", "5.17", "5.17", "9.74", "9.74", "20.33", "20.33", "36.15", "36.15"),
    ("Memory", "6", "3.95 (1.05×)", "4.61 (1.22×)", "6.78 (1.02×)", "7.51 (1.13×)",
     "14.65 (1.03×)", "15.40 (1.08×)", "26.52 (1.02×)", "27.26 (1.04×)"),
    ("Memory", "0", "3.76", "3.76", "6.60", "6.60", "14.21", "14.21", "26.06", "26.06"),
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
# The paper's "Ours" has the model's name here, since our own numbers stand next to it
DRAFTERS_6: tuple[Cells, ...] = (
    ("Method", "(3,3,2,1)", "(3,2,2,1,1)", "(2,2,2,1,1,1)"),
    ("Pythia", "75.38", "70.71", "63.75"),
    ("Mamba", "124.99", "127.37", "124.37"),
)
DRAFTERS_7: tuple[Cells, ...] = (
    ("Search?", "MT-bench", "HumanEval"),
    ("×", "124.99", "149.15"),
    ("✓", "128.21", "172.38"),
)

# Of the data sets that we have, too: DySpec, Sequoia and SpecInfer, speed-up (accepted a step)
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
