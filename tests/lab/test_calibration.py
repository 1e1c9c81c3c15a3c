"""Calibration of drafters: cases by hand, and the command on a tiny pair."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_evaluation import export, make_world

from stree.common.errors import UsageError
from stree_lab import calibration
from stree_lab.calibration import Drafts, bins_of, calibration_error, drafted


def test_bins_and_error_by_hand():
    """Two drafts are in the bin from 0.5 to 0.6, one at the very end."""
    drafts = Drafts(np.array([0.5, 0.59, 1.0]), np.array([0.25, 0.95, 0.7]))
    first, last = bins_of(drafts)
    assert (first.share, first.q, first.p) == pytest.approx((2 / 3, 0.545, 0.6))
    assert first.accepted == pytest.approx((0.5 + 1.0) / 2)
    assert (last.share, last.q, last.p, last.accepted) == pytest.approx((1 / 3, 1.0, 0.7, 0.7))
    wanted = 2 / 3 * 0.055 + 1 / 3 * 0.3
    assert calibration_error([first, last]) == pytest.approx(wanted)


def test_drafts_are_drawn_from_the_drafter_at_the_temperature():
    """Each draft's q and p are those of one token; over many drafts it has q's frequency."""
    target, drafter = torch.randn(2, 1, 3, dtype=torch.float64)
    found = drafted(target.expand(4000, -1), drafter.expand(4000, -1), 0.7, 1)
    p, q = ((each[0] / 0.7).softmax(-1) for each in (target, drafter))
    for token in range(3):
        drawn = np.isclose(found.q, float(q[token]))
        assert abs(drawn.mean() - float(q[token])) < 0.04  # five standard errors
        assert np.allclose(found.p[drawn], float(p[token]))


def test_the_command_compares_a_drafter_with_its_target(tmp_path, capsys):
    """A drafter that is the target is calibrated, and accepted always; a stranger is not."""
    root = make_world(tmp_path)
    prompts = ["--prompts", str(root / "talk.jsonl"), "--limit", "2", "--num_tokens", "6"]
    results = []
    for step in (100, 1):
        out = tmp_path / f"out-{step}"
        calibration.main([
            str(root / "target"), str(export(root, step)), str(out), *prompts, "--device", "cpu",
        ])
        results.append(json.loads((out / "calibration.json").read_text()))
        for name in ("reliability", "acceptance"):
            assert "<svg" in (out / f"{name}.svg").read_text()
    same, other = results
    assert same["environment"]["device"].startswith("CPU")
    assert same["num_drafts"] == sum(e["share"] for e in same["bins"]) * same["num_drafts"] > 6
    assert same["calibration_error"] < 1e-5 and same["accepted"] > 1 - 1e-5
    assert other["accepted"] < 0.95 and other["calibration_error"] > 1e-4
    assert "calibration error" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--temperature is 0"):
        calibration.main([str(root / "target"), "d", "o", *prompts, "--temperature", "0"])
