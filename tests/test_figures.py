"""Curves of runs: what each chart holds, thinned curves, little or nothing to draw, rollbacks, phases, slowdowns."""

import io
import math
from typing import Any

import numpy as np
import pytest
from PIL import Image

from matrixlib.engine.stats import Event
from matrixlib.runs import figures
from matrixlib.runs.figures import Chart, charts, frame, marks, png, training_figure


def row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1.5,
        "losses": {"policy": 1.0, "value": 0.5},
        "metrics": {"policy/top1": 0.25, "policy/entropy": 2.0},
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "throughput": 1000.0,
    } | values


def named(shown: list[Chart]) -> dict[str, Chart]:
    return {chart.label: chart for chart in shown}


def test_each_number_goes_to_its_chart() -> None:
    later = {"losses": {"policy": 1.5}, "metrics": {"policy/top1": 0.2, "policy/top3": 0.4}, "kind": "full"}
    statistics = {"gradient_norm": {"p95": 0.75, "clip": 1.0}}
    initial = {"policy": {"loss": 1.0, "chance": 3.4, "floor": 2.0}}
    memory = {"rss_mib": 2048.0, "busy": 0.5}
    rows = [
        row(1, extra={"norm": 3.0}, initial=initial),
        row(2, validation=later, extra={"norm": 4.0}, statistics=statistics, memory=memory),
    ]
    shown = named(charts(frame(rows)))
    labels = [
        "total loss",
        "policy loss",
        "value loss",
        "accuracy [%]",
        "learning rate",
        "gradient norm",
        "positions/s",
    ]
    assert [*shown] == [*labels, "memory [GiB]", "GPU use [%]", "norm"]
    assert [(curve.name, curve.kind) for curve in shown["accuracy [%]"].curves] == [
        ("policy top-1", "raw"),
        ("policy top-1", "line"),
        ("policy top-1", "held-out"),
        ("policy top-3", "held-out"),
    ], "no entropy"
    assert shown["policy loss"].levels == [("chance", 3.4), ("floor", 2.0)]
    assert shown["gradient norm"].levels == [("clipped above", 1.0), ("95 % below", 0.75)]
    assert shown["memory [GiB]"].curves[0].values[1] == 2.0
    assert shown["norm"].curves[0].values.tolist() == [3.0, 4.0]
    assert math.isnan(shown["policy loss"].curves[2].values[0])
    assert [chart.label for chart in shown.values() if chart.held_out] == ["policy loss", "accuracy [%]"]


def test_self_supervised_losses_share_a_chart_and_many_terms_do() -> None:
    losses = {"policy": 2.0, "ssl_threat": 1e-4, "ssl_pin": 1.5e-4}
    assert [curve.name for curve in named(charts(frame([row(1, losses=losses)])))["SSL losses"].curves[::2]] == [
        "threat",
        "pin",
    ]
    many = named(charts(frame([row(1, losses={f"head{k}": 1.0 for k in range(9)})])))
    assert len(many["losses"].curves) == 18


def test_long_curves_are_thinned_to_means_of_neighbours() -> None:
    shown = charts(frame(row(step, losses={"policy": float(step)}) for step in range(1, 5002)))
    assert all(len(chart.steps) == figures.MAX_POINTS for chart in shown)
    (policy,) = (chart for chart in shown if chart.label == "policy loss")
    assert (policy.steps == policy.curves[0].values).all(), "both are averaged alike"


def test_a_rollback_is_drawn_over_and_events_are_marked() -> None:
    rows = [(1, 0, 0, 1.0), (2, 0, 0, 1.0), (3, 0, 1, 90.0), (2, 1, 1, 2.0), (3, 1, 1, 3.0), (4, 1, 2, math.nan)]
    keys = ("step", "rollbacks", "phase", "losses")
    log = [dict(zip(keys, (*head, {"policy": loss}), strict=True)) for *head, loss in rows]
    assert frame(log)["losses/policy"].dropna().to_dict() == {1: 1.0, 2: 2.0, 3: 3.0}
    found = [(mark.step, mark.event, mark.text, mark.bad) for mark in marks(log)]
    assert found == [
        (2, "rollback", "rolled back to update 1", True),
        (3, "phase", "phase 1 begins", False),
        (4, "phase", "phase 2 begins", False),
        (4, "skip", "not finite", True),
    ]
    reported = log[2] | {"messages": ["too high: back to update 1"], "events": [Event.ROLLBACK]}
    texts = [mark.text for mark in marks([*log[:2], reported, *log[3:]]) if mark.event == Event.ROLLBACK]
    assert texts == ["too high: back to update 1"], "not marked twice"
    title = training_figure(log, "run").get_suptitle()
    assert title == "run, rollback at update 2, skip at update 4"


@pytest.mark.parametrize(("first", "last", "text"), [(401, 480, "throughput falls by 60%"), (30, 50, "")])
def test_a_fall_of_the_throughput_is_marked_and_warming_up_is_none(first: int, last: int, text: str) -> None:
    steps = range(1, 1001 if text else 51)
    rows = [row(step, throughput=400.0 if first <= step <= last else 1000.0) for step in steps]
    if not text:
        rows = [row(step, throughput=400.0 if step < 4 else 1000.0) for step in steps]
    rows[0]["throughput"] = math.nan
    found = [mark for mark in marks(rows) if mark.event == "slow"]
    assert [mark.text for mark in found] == ([text] if text else [])
    assert all(first <= mark.step <= first + 40 for mark in found)


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [row(1, losses={"policy": 0.0}, grad_norm=0.0)]])
def test_little_or_nothing_to_draw_is_no_error(rows: list[dict[str, Any]]) -> None:
    png(training_figure(rows))


def test_the_picture_is_transparent_and_sharp() -> None:
    values = {f"head{k}": 1.0 for k in range(3)}
    picture = Image.open(io.BytesIO(png(training_figure([row(1, losses=values), row(2, losses=values)], "run"))))
    assert picture.width == 1800, "twice the 900 pixels at which it is shown"
    alpha = np.asarray(picture.convert("RGBA"))[..., 3]
    assert (alpha == 0).mean() > 0.5, "no slab on a dark page"
